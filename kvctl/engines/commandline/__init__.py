"""Pasted command lines: how somebody starts an engine, in the shell, in Docker or in Kubernetes.

`pasted` finds the words of the command, `programs` what it starts. `read` finds the engine,
its version, the model and the flags that change memory. Flags that do not are passed over;
which of an engine's flags take a value is data (data/engine_flags.json), so that a misspelt
one is told from one that does not matter here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvctl.engines.commandline import config_files
from kvctl.engines.commandline.pasted import command, docker_variables
from kvctl.engines.commandline.programs import ONE_SLOT, Program, engine_of_variables, program
from kvctl.engines.flags import BYTES, COUNTS, FLAGS, OBJECT, ON_OFF, TOKENS, Flag, Given, given
from kvctl.errors import UsageError
from kvctl.record import Record

_LONGEST = 200_000

# Settings that every command of kvctl has an option for; spelled as the engines do.
COMMON: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "vllm": {"model": ("--model", "--model-id"), "revision": ("--revision",), "context": ("--max-model-len",), "dtype": ("--dtype",),
             "kv_dtype": ("--kv-cache-dtype",), "overrides": ("--hf-overrides",), "weights": ("--quantization", "-q")},
    "sglang": {"model": ("--model-path", "--model"), "revision": ("--revision",), "context": ("--context-length",),
               "dtype": ("--dtype",), "kv_dtype": ("--kv-cache-dtype",), "overrides": ("--json-model-override-args",),
               "weights": ("--quantization",)},
    "llama.cpp": {"model": ("-m", "--model"), "repo": ("-hf", "-hfr", "--hf-repo"), "file": ("-hff", "--hf-file"),
                  "context": ("-c", "--ctx-size"), "k_dtype": ("-ctk", "--cache-type-k"),
                  "v_dtype": ("-ctv", "--cache-type-v")},
    "tensorrt-llm": {"context": ("--max_seq_len",), "kv_dtype": ("--kv_cache_dtype",), "revision": ("--revision",)},
    "ollama": {"context": ("OLLAMA_CONTEXT_LENGTH",), "kv_dtype": ("OLLAMA_KV_CACHE_TYPE",)},
    "transformers": {"model": ("--force-model",), "dtype": ("--dtype",), "weights": ("--quantization",)},
}  # fmt: skip

_PACKED = {
    "awq": "awq",
    "awq_marlin": "awq",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "bitsandbytes": "nf4",
    "mxfp4": "mxfp4",
}
QUANTIZATIONS: Mapping[str, Mapping[str, str]] = {
    # vllm/config/quantization.py (_ONLINE_SHORTHANDS); those that convert experts alone are not here, nor those of several formats.
    "vllm": {**_PACKED, "auto_awq": "awq", "auto_gptq": "gptq", "fp8": "fp8", "fp8_per_tensor": "fp8", "fp8_per_block": "fp8-block",
             "fp8_per_channel": "fp8-channel", "ptpc_fp8": "fp8-channel", "fbgemm_fp8": "fp8-channel"},
    # sglang/srt/arg_groups/choices.py
    "sglang": {**_PACKED, "fp8": "fp8", "modelopt_fp8": "fp8", "w8a8_fp8": "fp8-channel", "w8a8_int8": "w8a8",
               "nvfp4_online": "nvfp4", "unquant": ""},
    "transformers": {"bnb-4bit": "nf4", "bnb-8bit": "int8"},
}  # fmt: skip
"""Engines' words for formats of weights that a checkpoint has, or that plain ones are converted to while they are loaded; empty: as they are."""

# Variables that stand for a flag.
ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "llama.cpp": {
        "LLAMA_ARG_MODEL": "-m", "LLAMA_ARG_HF_REPO": "-hf", "LLAMA_ARG_HF_FILE": "-hff", "LLAMA_ARG_CTX_SIZE": "-c",
        "LLAMA_ARG_N_PARALLEL": "-np", "LLAMA_ARG_CACHE_TYPE_K": "-ctk", "LLAMA_ARG_CACHE_TYPE_V": "-ctv",
        "LLAMA_ARG_UBATCH": "-ub", "LLAMA_ARG_BATCH": "-b", "LLAMA_ARG_FLASH_ATTN": "-fa", "LLAMA_ARG_KV_UNIFIED": "-kvu",
        "LLAMA_ARG_SPEC_TYPE": "--spec-type", "LLAMA_ARG_SPEC_DRAFT_N_MAX": "--spec-draft-n-max",
        "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K": "-ctkd", "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V": "-ctvd",
        "LLAMA_ARG_SWA_FULL": "--swa-full", "LLAMA_ARG_NO_KV_OFFLOAD": "-nkvo",
        "LLAMA_ARG_N_GPU_LAYERS": "-ngl", "LLAMA_ARG_TENSOR_SPLIT": "-ts", "LLAMA_ARG_FIT": "-fit", "LLAMA_ARG_FIT_TARGET": "--fit-target",
        "LLAMA_ARG_KV_UNIFIED_PER_SLOT": "--kv-unified-per-slot", "LLAMA_ARG_CACHE_RAM": "-cram",
    },
}  # fmt: skip

_BESIDE = {
    "vllm": dict.fromkeys(
        ("--kv-cache-dtype-skip-layers", "--mamba-block-size", "--disable-sliding-window", "--use-replayssm"),
        "changes what the cache takes, and kvctl does not count it: passed over",
    ),
    "llama.cpp": dict.fromkeys(
        ("-md", "--model-draft", "--spec-draft-model", "-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"),
        "names a draft model, whose own cache comes beside this",
    )
    | dict.fromkeys(
        ("-ncmoe", "--n-cpu-moe", "-cmoe", "--cpu-moe", "-ot", "--override-tensor"),
        "may keep weights in host memory, which is not counted: the GPU takes less than a fit says",
    ),
    "sglang": {
        "--speculative-draft-kv-cache-dtype": "stores draft layers in a type of their own; they are counted in the model's",
        "--attention-context-parallel-size": "leaves fewer ranks to split heads over, which is not counted",
        "--attn-cp-size": "leaves fewer ranks to split heads over, which is not counted",
        "--enable-int8-mamba-checkpoint": "stores kept states in 8 bits, which is not counted",
        "--enable-hisparse": "keeps part of the cache in host memory, which is not counted",
    },
}  # fmt: skip
"""Flags that change memory in ways that the plan of the cache leaves out, and what kvctl says of them."""

# Where -1 says that the engine chooses, as it does without the flag.
_OPEN = {("llama.cpp", "slots"), ("sglang", "max_batched")}

OPEN_LENGTHS: Mapping[str, tuple[str, ...]] = {"vllm": ("auto", "-1"), "llama.cpp": ("0",)}
"""Lengths that stand for the model's own, or for the longest that fits."""

_SHOWN = 8
_NUMBER = re.compile(r"-\d+(\.\d+)?")
_UNSET = re.compile(r"\$\{?\w+|\$\(|\{\{")


class Started(Record):
    """What a command line says: texts as they stand there, None where it says nothing."""

    engine: str
    version: str | None
    unversioned: bool
    """An image without a version in its tag starts it."""
    model: str | None
    common: Mapping[str, str]
    """Settings of `COMMON` but for the model."""
    flags: tuple[Given, ...]
    notes: tuple[str, ...]


def read(text: str, engine: str | None = None) -> Started:
    """The engine that a pasted command line starts; `engine`: the one it is for, where the user named it.

    Raises:
        UsageError: no engine in it, another than `engine`, a flag that no engine of this kind has.

    """
    if len(text) > _LONGEST:
        raise UsageError("--engine-args is too long to be a command line")
    pasted = command(text)
    started = program(pasted.words, pasted.image)
    found = started.engine if started is not None else engine_of_variables(list(pasted.environment))
    if found is None and engine is None:
        raise UsageError("--engine-args: no engine's command in it",
                         hint="paste all of it (vllm serve …, llama-server …), or name the engine with --engine")  # fmt: skip
    if found is not None and engine is not None and found != engine:
        raise UsageError(f"--engine-args starts {found}, and --engine says {engine}", hint="leave --engine out")
    name = found or engine
    assert name is not None
    if name not in COMMON:
        raise UsageError(f"--engine-args: {name} has no command line of its own",
                         hint="it is for " + ", ".join(COMMON))  # fmt: skip
    environment = pasted.environment | docker_variables(pasted.words)
    reader = _Reader(name, started, pasted.files)
    if pasted.others:
        reader.notes.append(f"{pasted.others + 1} commands in it start an engine: the first is taken")
    words = started.rest if started is not None else pasted.words
    return reader.read(words, environment, slots=1 if started is not None and started.name in ONE_SLOT else None)


# -- flags ----------------------------------------------------------------------------------


class _Reader:
    """Words of one engine's command line, read into settings."""

    def __init__(self, engine: str, started: Program | None, files: Mapping[str, str]) -> None:
        self.engine, self.files = engine, files
        self.version = started.version if started is not None else None
        self.unversioned = started is not None and started.unversioned
        self.flags = {name: flag for flag in FLAGS for name in self._spellings(flag)}
        self.common = {name: field for field, names in COMMON[engine].items() for name in names}
        self.switches, self.values = _known(engine)
        self.names = self.flags.keys() | self.common.keys() | self.switches | self.values
        self.notes: list[str] = []
        self.unknown: list[str] = []
        self.settings: dict[str, str] = {}
        self.given: dict[str, Given] = {}
        self.objects: dict[str, dict[str, Any]] = {}

    def _spellings(self, flag: Flag) -> tuple[str, ...]:
        return (*flag.names.get(self.engine, ()), *(flag.off if self.engine in flag.engines else ()))

    def read(self, words: Sequence[str], environment: Mapping[str, str], slots: int | None = None) -> Started:
        """`slots`: those of the program, where it is not told."""
        positional: list[str] = []
        if slots is not None:
            self._take("--parallel", str(slots))
        for name, value in self._environment(environment):
            self._take(name, value)
        queue = self._with_files(words)
        while queue:
            word = queue.pop(0)
            if word == "--":
                positional += queue
                break
            if not word.startswith("-") or _NUMBER.fullmatch(word) or word == "-":
                positional.append(word)
                continue
            name, equals, inline = word.partition("=")
            name = self._canonical(name)
            if self._is_switch(name):
                self._take(name, inline if equals else None)
            elif equals:
                self._take(name, inline)
            elif queue and (not queue[0].startswith("-") or _NUMBER.fullmatch(queue[0])):
                value = queue.pop(0)
                if name in self.flags and self.flags[name].kind is COUNTS:
                    while queue and queue[0].isdigit():  # one option with several words
                        value += "," + queue.pop(0)
                self._take(name, value)
            elif name in self.flags and self.flags[name].kind is ON_OFF:
                self._take(name, "on")  # a switch in older builds
            elif name in self.flags or name in self.common:
                raise UsageError(f"--engine-args: {name} has no value")
            else:
                self._take(name, None)
        return self._started(positional)

    def _environment(self, environment: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
        names = {name: name for name in (*self.flags, *self.common)} | dict(ENVIRONMENT.get(self.engine, {}))
        for variable in names.keys() & environment.keys():
            name, value = names[variable], environment[variable]
            if not self._is_switch(name):
                yield name, value
            elif value.lower() in ("1", "true", "on", "enabled"):
                yield name, None
            elif name in self.flags and self.flags[name].off and value.lower() in ("0", "false", "off", "disabled"):
                yield self.flags[name].off[0], None

    def _with_files(self, words: Sequence[str]) -> list[str]:
        """The words with those of configuration files before them: what stands on the command line wins."""
        out: list[str] = []
        for index, word in enumerate(words):
            name, equals, value = word.partition("=")
            if self._canonical(name) in config_files.FLAGS.get(self.engine, ()):
                path = value if equals else "".join(words[index + 1 : index + 2])
                ends = path.rpartition("/")[2]
                told = next((text for written, text in self.files.items() if written.rpartition("/")[2] == ends), None)
                found = config_files.words(self.engine, path, told)
                if found is None:
                    self.notes.append(f"{name} {path[:60]}: no such file here, so what it says is not read")
                out += found or []
        return [*out, *words]

    def _canonical(self, name: str) -> str:
        if self.engine in ("vllm", "sglang") and name.startswith("--"):
            # Their parsers read underscores as dashes.
            head, dot, tail = name.partition(".")
            return self._whole(head.replace("_", "-")) + dot + tail
        if self.engine == "tensorrt-llm" and name.startswith("--") and name not in self.flags:
            return name.replace("-", "_").replace("__", "--", 1)
        return name

    def _whole(self, name: str) -> str:
        """The flag that a shortened one stands for: argparse takes the start of a name that no other has."""
        if name in self.names or len(name) < 6:
            return name
        ours = self.flags.keys() | self.common.keys()
        longer = sorted(
            (other for other in self.names if other.startswith(name)), key=lambda other: (other not in ours, other)
        )
        if len(longer) > 1 and longer[0] in ours:
            raise UsageError(f"--engine-args: {name} could be {longer[0]} or {longer[1]}", hint="write it out")
        return longer[0] if len(longer) == 1 else name

    def _is_switch(self, name: str) -> bool:
        flag = self.flags.get(name)
        return flag.kind.read is None if flag is not None else name in self.switches

    def _take(self, name: str, value: str | None) -> None:
        """One flag with its value; None for a switch."""
        if value is not None and _UNSET.search(value) and (name in self.flags or name in self.common):
            raise UsageError(f"--engine-args: {name} is {value[:40]!r}, which a shell would replace",
                             hint="put the value itself there")  # fmt: skip
        base, _, inner = name.partition(".")
        flag = self.flags.get(name)
        if flag is not None and flag.kind.read is None:
            on = name not in flag.off
            if value is not None and value.lower() in ("false", "0", "off"):
                on = not on
            self.given[flag.key] = given(flag, name, on)
        elif flag is not None and value == "-1" and (self.engine, flag.field) in _OPEN:
            self.given.pop(flag.key, None)
        elif flag is not None and value is not None:
            self.given[flag.key] = Given(flag, name, value_of(self.engine, flag, value, name))
        elif inner and value is not None and self._is_object(base):
            self.objects.setdefault(base, {})[inner] = _scalar(value)
        elif name in self.common and value is not None and not value.strip():
            raise UsageError(f"--engine-args: {name} is empty")
        elif name in self.common and value is not None:
            self.settings[self.common[name]] = value
        elif base not in self.switches and base not in self.values and name not in _BESIDE.get(self.engine, {}):
            self._unknown(name)
        self._beside(name)

    def _is_object(self, name: str) -> bool:
        """Whether a flag takes JSON, whose keys may be given one by one: --speculative-config.method."""
        return self.common.get(name) == "overrides" or (name in self.flags and self.flags[name].kind is OBJECT)

    def _beside(self, name: str) -> None:
        """Says what changes memory and is not counted."""
        if (effect := _BESIDE.get(self.engine, {}).get(name)) is not None:
            self.notes.append(f"{name} {effect}")

    def _unknown(self, name: str) -> None:
        import difflib

        if not self.values or re.fullmatch(r"-O\d", name):
            return
        known = (*self.flags, *self.common)
        near = difflib.get_close_matches(name, known, 1, 0.84) if name.startswith("--") else []
        if near:
            raise UsageError(f"--engine-args: {self.engine} has no flag {name[:60]}", hint=f"did you mean {near[0]}?")
        self.unknown.append(name[:60])

    def _started(self, positional: Sequence[str]) -> Started:
        import json

        settings = self.settings
        for name, value in self.objects.items():
            if name in self.flags:
                self.given[self.flags[name].key] = given(self.flags[name], name, json.dumps(value))
            else:
                settings[self.common[name]] = json.dumps(value)
        model = settings.pop("model", None)
        repo, file = settings.pop("repo", None), settings.pop("file", None)
        if model is None and repo is not None:
            model = f"{repo}/{file}" if file else repo
        if model is None and positional and self.engine in ("vllm", "tensorrt-llm", "ollama", "transformers"):
            model = positional[0]
        if model is not None and _UNSET.search(model):
            raise UsageError(f"--engine-args: the model is {model[:40]!r}, which a shell would replace",
                             hint="put its name there")  # fmt: skip
        for name in self.unknown[:_SHOWN]:
            self.notes.append(f"{name} is no flag of {self.engine} that kvctl knows: passed over")
        if len(self.unknown) > _SHOWN:
            self.notes.append(f"{len(self.unknown) - _SHOWN:,} more flags are not known: passed over")
        return Started(
            self.engine, self.version, self.unversioned, model, settings, tuple(self.given.values()), tuple(self.notes)
        )


def _scalar(text: str) -> Any:
    import json

    try:
        return json.loads(text)
    except ValueError:
        return text


def _known(engine: str) -> tuple[frozenset[str], frozenset[str]]:
    """Switches, and flags that take a value, of an engine; as its newest parsers have them."""
    import json
    from importlib import resources

    data = json.loads(resources.files("kvctl").joinpath("data/engine_flags.json").read_text("utf-8"))
    facts = data.get(engine, {})
    return frozenset(facts.get("switches", "").split()), frozenset(facts.get("values", "").split())


_HUMAN = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")


def value_of(engine: str, flag: Flag, text: str, spelling: str) -> Any:
    """A flag's value as the engine itself reads it: vLLM's k is 1,000 and its K is 1,024."""
    if flag.kind in (TOKENS, BYTES):
        return count_of(engine, text, spelling)
    return flag.read(text, spelling)


def count_of(engine: str, text: str, spelling: str) -> int:
    """A whole number as the engine reads it."""
    match = _HUMAN.fullmatch(text.strip()) if engine == "vllm" else None
    if match is not None:
        power = "kmgt".index(match[2].lower()) + 1
        if match[2].islower():
            thousand: int = 1000**power
            return int(float(match[1]) * thousand)
        if "." not in match[1]:
            return int(match[1]) << 10 * power
    elif text.strip().isascii() and text.strip().isdigit() and len(text) <= 20:
        return int(text)
    raise UsageError(f"--engine-args: {spelling} {text[:40]!r} is no number that {engine} reads")


def overrides_of(text: str | None) -> dict[str, Any]:
    """What-ifs of the configuration in an engine's JSON, nested keys dotted as --set has them."""
    if text is None:
        return {}
    import json

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"--engine-args: overrides of the configuration are no JSON object: {text[:60]!r}")
    return dict(_flat(value, ""))


def _flat(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping) and key.endswith("config"):
            yield from _flat(inner, f"{prefix}{key}.")
        else:
            yield prefix + key, inner
