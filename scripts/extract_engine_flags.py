"""Rewrite kvctl/data/engine_flags.json: which flags the engines have, which of them take a value, and one of which.

    python scripts/extract_engine_flags.py --sglang SITE_PACKAGES/sglang --llama-cpp common/arg.cpp --vllm

--vllm imports the installed vllm; the others are read as text. Engines that are not named keep
what they have. Flags of older releases that people still paste are listed below.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "kvctl/data/engine_flags.json"

OLDER = {
    "vllm": (
        "--use-v2-block-manager --enable-prompt-adapter --task-none --enable-reasoning --disable-log-requests --disable-async-output-proc",
        "--swap-space --num-scheduler-steps --max-seq-len-to-capture --guided-decoding-backend --task --device "
        "--num-lookahead-slots --num-speculative-tokens --speculative-model --rope-scaling --rope-theta "
        "--preemption-mode --quantization-param-path --scheduler-delay-factor --max-context-len-to-capture --worker-use-ray "
        "--disable-logprobs-during-spec-decoding --model",
    ),
    "llama.cpp": (
        "--no-mmap --mlock --embedding --embeddings -cb --cont-batching -nocb --no-kv-offload -dt --log-disable --no-webui",
        "--defrag-thold -gan -gaw --grp-attn-n --grp-attn-w",
    ),
}

Flags = tuple[set[str], set[str]]
"""Switches, and flags with a value."""
Choices = dict[str, list[str]]
"""Of flags that take one of a few words, those."""


def of_vllm() -> tuple[Flags, Choices, str]:
    """From the parser of the installed vllm; with its version."""
    from importlib.metadata import version

    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    actions = make_arg_parser(FlexibleArgumentParser())._actions
    switches = {name for action in actions if action.nargs == 0 for name in action.option_strings}
    values = {name for action in actions for name in action.option_strings} - switches
    choices = {
        name: [*map(str, action.choices)] for action in actions if action.choices for name in action.option_strings
    }
    return (switches, values), choices, version("vllm").partition("+")[0]


def of_sglang(package: Path) -> tuple[Flags, Choices, str]:
    """From the annotated fields of its argument groups and its deprecated arguments; with its version."""
    switches: set[str] = set()
    values: set[str] = set()
    choices: Choices = {}
    lists = _lists(package / "srt/arg_groups/choices.py")
    for path in sorted((package / "srt/arg_groups/fields").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                _sglang_field(node.target.id, node.annotation, switches, values, choices, lists)
    text = (package / "srt/server_args.py").read_text(encoding="utf-8")
    for call in re.finditer(r"parser\.add_argument\((.*?)\n {8}\)", text, re.S):
        names = set(re.findall(r'^\s*"(--[\w-]+)"', call[1], re.M))
        (switches if re.search("StoreTrue|StoreConst|store_true", call[1]) else values).update(names)
    values -= switches
    return (switches, values), {name: words for name, words in choices.items() if name in values}, _version_of(package)


def _version_of(package: Path) -> str:
    """Of an unpacked wheel: its metadata lies beside the package."""
    found = next(package.parent.glob("sglang-*.dist-info"), None)
    return found.name.split("-")[1].removesuffix(".dist") if found is not None else ""


def _lists(module: Path) -> dict[str, list[str]]:
    """Lists of words that a module names."""
    out = {}
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.List):
            out[node.targets[0].id] = [str(item.value) for item in node.value.elts if isinstance(item, ast.Constant)]
    return out


def _words(node: ast.expr | None, lists: dict[str, list[str]]) -> list[str]:
    """The words of a choice: a list, or the name of one; none where code makes them."""
    if isinstance(node, ast.Name):
        return lists.get(node.id, [])
    if isinstance(node, (ast.List, ast.Tuple)) and all(isinstance(item, ast.Constant) for item in node.elts):
        return [str(item.value) for item in node.elts if isinstance(item, ast.Constant)]
    return []


def _sglang_field(
    name: str, hint: ast.expr, switches: set[str], values: set[str], choices: Choices, lists: dict[str, list[str]]
) -> None:
    if not (isinstance(hint, ast.Subscript) and isinstance(hint.value, ast.Name) and hint.value.id == "A"):
        return
    assert isinstance(hint.slice, ast.Tuple)
    kind, *more = hint.slice.elts
    facts: dict[str, ast.expr] = {}
    for item in more:
        if isinstance(item, ast.Call) and isinstance(item.func, ast.Name):
            if item.func.id == "Derived":
                return
            facts = {word.arg: word.value for word in item.keywords if word.arg}
    if "no_cli" in facts:
        return
    names = [ast.literal_eval(facts["cli_name"]) if "cli_name" in facts else "--" + name.replace("_", "-")]
    names += ast.literal_eval(facts["aliases"]) if "aliases" in facts else []
    action = ast.unparse(facts["action"]) if "action" in facts else ""
    if "BooleanOptional" in action:
        switches.update(names, ("--no-" + spelling[2:] for spelling in names))
    elif ast.unparse(kind) == "bool" or "StoreTrue" in action or "store_true" in action:
        switches.update(names)
    else:
        values.update(names)
        if words := _words(facts.get("choices"), lists):
            choices |= dict.fromkeys(names, words)


def of_llama_cpp(source: Path) -> Flags:
    """From the table in common/arg.cpp: a handler that takes a text or a whole number has a value."""
    text = source.read_text(encoding="utf-8")
    switches: set[str] = set()
    values: set[str] = set()
    for match in re.finditer(r"common_arg\(\s*\{([^}]*)\},\s*(\{[^}]*\},)?", text):
        names = set(re.findall(r'"(-[^"]+)"', match[1]))
        handler = re.search(r"\[[^\]]*\]\(common_params &[^)]*\)", text[match.start() : match.start() + 1500])
        if handler and re.search(r"std::string|\bint ", handler[0]):
            values |= names
        else:
            switches |= names | set(re.findall(r'"(-[^"]+)"', match[2] or ""))
    return switches - values, values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--sglang", type=Path)
    parser.add_argument("--llama-cpp", type=Path)
    args = parser.parse_args()
    data = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    found: dict[str, Flags] = {}
    more: dict[str, tuple[Choices, str]] = {}
    if args.vllm:
        found["vllm"], choices, version = of_vllm()
        more["vllm"] = choices, version
    if args.sglang:
        found["sglang"], choices, version = of_sglang(args.sglang)
        more["sglang"] = choices, version
    if args.llama_cpp:
        found["llama.cpp"] = of_llama_cpp(args.llama_cpp)
    for engine, (switches, values) in found.items():
        old_switches, old_values = OLDER.get(engine, ("", ""))
        data[engine] = {
            "switches": " ".join(sorted(switches | set(old_switches.split()))),
            "values": " ".join(sorted((values | set(old_values.split())) - switches)),
        }
        if engine in more:
            choices, version = more[engine]
            data[engine] |= {"version": version, "choices": {name: " ".join(choices[name]) for name in sorted(choices)}}
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
