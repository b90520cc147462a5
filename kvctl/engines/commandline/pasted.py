"""From a pasted text to the words of one command: shells, Windows, systemd units, Dockerfiles, Python calls.

What it takes for granted: a text may hold more than the command (comments, prompts, exports before it, other
commands), and characters that a web page or a chat has put in place of quotation marks and dashes.
"""

from __future__ import annotations

import ast
import contextlib
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from kvctl.engines.commandline import manifests
from kvctl.engines.commandline.manifests import Pasted, assignments, flags_of
from kvctl.engines.commandline.programs import program
from kvctl.errors import UsageError

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_PREFIXES = ("export", "env", "sudo", "exec", "nohup", "time", "set", "then", "do", "else", "{", "(")
_TYPOGRAPHY = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "\u00a0": " ", "\u2212": "–"})
_DASHES = re.compile(r"(?<![^\s\"'])[-–—]{1,3}(?=[A-Za-z])")
_CONTINUED = re.compile(r"[\\^`]+[ \t]*(\r?\n|\Z)")
_PROMPT = re.compile(r"^[ \t]*(PS )?[A-Za-z]:\\[^>\n]*>[ \t]*", re.MULTILINE)
_WINDOWS = re.compile(r"\.exe\b|[`^][ \t]*\r?\n|(?<![\w/])[A-Za-z]:\\|(?<![\w.])\.{1,2}\\\w")
_UNIT = re.compile(r"^[ \t]*(ExecStart=|Environment=|\[Container\]|\[program:)", re.MULTILINE)
_BLOCK = re.compile(r"^[ \t]*(image|entrypoint|command|args)[ \t]+=[ \t]+(?=[\[\"])", re.MULTILINE)
_SHOWN = re.compile(r"\[[\w@~./: -]{1,80}\] ?[$#%>] ")
_OBJECT = re.compile(r"<[A-Za-z_][^<>\n]*>")
_DOCKERFILE = re.compile(r"^[ \t]*(?:ENTRYPOINT|CMD)[ \t]+(\[.*?\])", re.MULTILINE | re.DOTALL)
_ARRAY = re.compile(r"(?:^|;)[ \t]*(?:declare -a |local )?(\w+)\+?=\(([^()]*)\)", re.MULTILINE)
_CALL = re.compile(
    r"(non-default args: |\bargs: Namespace|\b(?:LLM|LLMConfig|AsyncEngineArgs|EngineArgs|ServerArgs|Engine))(?=[({])"
)
_NEXT = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\r?\n)*([ \t]*)(-?)")
_NEXT_PLAIN = re.compile(r"(?:[ \t]*\r?\n)*([ \t]*)(-?)")
_FETCHES = {"pull", "build", "push", "tag", "inspect", "images"}
_PLACEHOLDER = re.compile(r"(?<![<\w])<([A-Za-z][\w /.-]{0,40})>")
_OLLAMA = re.compile(r"\b(OLLAMA_[A-Z_]+):([^\s\]]*)")
_HEREDOC = re.compile(r"^[^\n]*<<-?[ \t]*['\"\\]?(\w+)['\"]?[^\n]*\n", re.MULTILINE)
_SETTINGS_FILE = re.compile(r"[\w./~-]+\.(?:ya?ml|json)\b")
_DEFAULT = re.compile(r"\$\{\w+:?-([^}]*)\}")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)|\$\((\w+)\)|%(\w+)%")


def command(text: str) -> Pasted:
    """The command of a pasted text that starts an engine, or its first one."""
    rest, files = _files(text)
    return _command(rest).replace(files=files)


def _files(text: str) -> tuple[str, dict[str, str]]:
    """The text without the configuration files that it writes (cat > x.yaml <<EOF), and these."""
    files: dict[str, str] = {}
    kept: list[str] = []
    begin = 0
    while len(kept) < 50 and (match := _HEREDOC.search(text, begin)) is not None:
        name = _SETTINGS_FILE.search(match[0])
        end = re.compile(rf"^[ \t]*{match[1]}[ \t]*\r?$", re.MULTILINE).search(text, match.end()) if name else None
        if name is None or end is None:
            kept.append(text[begin : match.end()])
            begin = match.end()
            continue
        kept.append(text[begin : match.start()])
        files[name[0]] = text[match.end() : end.start()]
        begin = end.end()
    return "".join([*kept, text[begin:]]), files


def _command(text: str) -> Pasted:
    stripped = re.sub(r"^[ \t]*```.*$", "", text.translate(_TYPOGRAPHY), flags=re.MULTILINE).strip()
    stripped = _DASHES.sub(_dashes, stripped)
    if not stripped:
        raise UsageError("--engine-args is empty", hint="""--engine-args "vllm serve MODEL --max-model-len 32768\"""")
    if (called := _python(stripped)) is not None:
        return called
    if "map[" in stripped and (printed := _OLLAMA.findall(stripped)):
        # Ollama's log prints all of its variables; these stand for "not set".
        return Pasted([], {name: value for name, value in printed if value not in ("", "0", "false")})
    if _UNIT.search(stripped):
        return _chosen([_unit(stripped)])
    if lists := _DOCKERFILE.findall(stripped):
        return _chosen(
            [Pasted([word for text in lists for item in manifests.commands(text) for word in item.words], {})]
        )
    blocks = list(_blocks(stripped))
    if any(program(one.words, one.image) for one in blocks):
        return _chosen(blocks)
    if manifests.looks_like(stripped) and _SHOWN.match(stripped) is None:
        found = [_unwrapped(one) for one in manifests.commands(_DEFAULT.sub(r"\1", stripped))]
        chosen = _chosen(found)
        if len(found) != 1 and program(chosen.words, chosen.image) is None:
            raise UsageError("--engine-args: no container in it starts an engine that kvctl knows")
        return chosen
    return _shell(stripped)


def _dashes(match: re.Match[str]) -> str:
    """Two dashes that became one long one; short names had one."""
    if match[0].isascii():
        return match[0]
    return "--" if re.match(r"[\w-]{3}", match.string[match.end() : match.end() + 3]) else "-"


def _chosen(found: Sequence[Pasted]) -> Pasted:
    """The first that starts an engine, its variables put in place; how many others do is kept."""
    starts = [(one, started) for one in found if (started := program(one.words, one.image)) is not None]
    # An image alone may only have been fetched or built.
    starts = [(one, started) for one, started in starts if started.name or not _FETCHES & {*one.words}] or starts
    servers = [one for one, started in starts if started.name] or [one for one, _ in starts]
    one = servers[0] if servers else found[0] if found else Pasted([], {})
    words = [word for text in one.words for word in _substituted(text, one.environment)]
    return one.replace(words=words, others=len({tuple(other.words) for other in servers}) - 1 if servers else 0)


def _substituted(word: str, environment: dict[str, str]) -> list[str]:
    """A word with the variables that the text itself sets."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3] or match[4] or match[5]
        return environment.get(name, match[0] if match[2] is None else match[2])

    out = _VARIABLE.sub(value, word)
    if out != word and _VARIABLE.fullmatch(word) and any(letter.isspace() for letter in out):
        return shlex.split(out)
    return [out]


# -- shells ---------------------------------------------------------------------------------


def _shell(text: str) -> Pasted:
    if placeholder := _PLACEHOLDER.search(text):
        raise UsageError(f"--engine-args: {placeholder[0]} stands for something", hint="put the value itself there")
    windows = _WINDOWS.search(text) is not None
    # A flag that is commented out, or a remark after the end of a line, in the middle of a command.
    text = re.sub(r"(?<=\\\n)[ \t]*#[^\n]*(\n|\Z)", "", re.sub(r"\\[ \t]+#[^\n]*(?=\n)", r"\\", text))
    prepared = _PROMPT.sub("", text)
    prepared = re.sub(r"^(\w+)[ \t]*[:?]=[ \t]*(?=\S)", r"\1=", prepared, flags=re.MULTILINE)  # a Makefile's
    prepared = re.sub(r"(?i)\$env:(\w+)[ \t]*=[ \t]*", r"\1=", prepared)
    prepared = re.sub(r"^[ \t]*(?:launchctl setenv|setx)[ \t]+(\w+)[ \t]+", r"\1=", prepared, flags=re.MULTILINE)
    prepared = re.sub(r"(?i)^[ \t]*start[ \t]+\"[^\"\n]*\"", "", prepared, flags=re.MULTILINE)  # and a window's title
    prepared = _CONTINUED.sub(" ", prepared) if windows else re.sub(r"[\\^`][ \t]*(\r?\n|\Z)", " ", prepared)
    found = _commands(_lines(prepared, windows, comments=True), windows)
    if not any(program(one.words, one.image) for one in found):
        # A # may have been the prompt.
        found += _commands(_lines(prepared, windows, comments=False), windows)
    if not any(program(one.words, one.image) for one in found):
        found += _quoted_lists(text)
    return _chosen(found)


def _lines(text: str, windows: bool, *, comments: bool) -> str:
    """One line: comments left out, ends of commands marked, arrays put where they are used."""
    out: list[str] = []
    quote, index, indent = "", 0, len(text) - len(text.lstrip(" \t"))
    while index < len(text):
        letter = text[index]
        escaped = letter == "\\" and not windows and quote != "'"
        if escaped:
            out.append(text[index : index + 2])
            index += 2
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif comments and letter == "#" and (index == 0 or text[index - 1].isspace()):
            end = text.find("\n", index)
            index = len(text) if end < 0 else end
            continue
        elif letter == "\n":
            following = (_NEXT if comments else _NEXT_PLAIN).match(text, index + 1)
            assert following is not None
            goes_on = following[2] == "-" or len(following[1]) > indent
            out.append(" " if goes_on else "\n")
            indent = indent if goes_on else len(following[1])
            index = following.start(1)
            continue
        out.append(letter)
        index += 1
    joined = "".join(out)
    arrays = {match[1]: match[2] for match in _ARRAY.finditer(joined)}
    joined = _ARRAY.sub("", joined)
    for name, content in arrays.items():
        for use in (f'"${{{name}[@]}}"', f"${{{name}[@]}}", f"${{{name}[*]}}"):
            joined = joined.replace(use, content.replace("\n", " "))
    return joined


def _commands(text: str, windows: bool) -> list[Pasted]:
    """Every command, with the variables set up to it."""
    environment: dict[str, str] = {}
    out, kept = [], []
    for words in _split(text, windows):
        aside: list[str] = []
        while words and (_ASSIGNMENT.fullmatch(words[0]) or words[0].lower() in _PREFIXES):
            for name, value in assignments([words[0]]).items():
                environment[name] = " ".join(_substituted(value, environment))
            aside.append(words.pop(0).partition("=")[2])
        if values := [value for value in aside if " " in value and not words]:
            # Nothing but assignments: a line of a log, or a command kept in a variable.
            kept.append(_unwrapped(Pasted(values, dict(environment))))
        if words:
            words = [part for word in words for part in _substituted(word, environment)]
            out.append(_unwrapped(Pasted(words, dict(environment))))
    started = (one for one in kept if program(one.words, one.image) is not None)
    return [*out, *started] or [Pasted([], environment)]


def _split(text: str, windows: bool) -> Iterator[list[str]]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";|&<>\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    if windows:
        lexer.escape = ""
    try:
        words = list(lexer)
    except ValueError:
        raise UsageError("--engine-args: a quotation mark is not closed in it") from None
    current: list[str] = []
    skip = False
    for word in words:
        if word and set(word) <= set(";|&<>\n"):
            # What follows < or > is a file.
            skip = ("<" in word or ">" in word) and not word.endswith("\n")
            if not skip or "\n" in word:
                yield current
                current = []
        elif skip:
            skip = False
        else:
            current.append(word)
    yield current


def _unwrapped(one: Pasted) -> Pasted:
    """The command within bash -c, docker exec, tmux and their like."""
    outer = program(one.words, one.image)
    if outer is not None and outer.name:
        return one
    environment = one.environment | docker_variables(one.words)
    best = one
    length = -1
    for word in one.words:
        if any(letter.isspace() for letter in word):
            try:
                inner = _shell(word)
            except UsageError:
                continue
            # A log names the program in its message, and has the command beside it.
            started = program(inner.words, None)
            if started is not None and len(started.rest) > length:
                image = one.image or next((name for name in one.words if outer and program(["", name], None)), None)
                words = [part for text in inner.words for part in _substituted(text, environment)]
                best, length = Pasted(words, environment | inner.environment, image), len(started.rest)
    return best


def docker_variables(words: Sequence[str]) -> dict[str, str]:
    """What docker run's -e sets."""
    out: list[str] = []
    for index, word in enumerate(words):
        if word in ("-e", "--env"):
            out += words[index + 1 : index + 2]
        elif word.startswith("--env="):
            out.append(word.removeprefix("--env="))
    return assignments(out)


# -- other texts ----------------------------------------------------------------------------


def _unit(text: str) -> Pasted:
    """A systemd unit, a drop-in with its environment alone, a Quadlet, a program of supervisord."""
    environment: dict[str, str] = {}
    words: list[str] = []
    image = None
    for line in re.sub(r"\n[ \t]+(?=-)", " ", _CONTINUED.sub(" ", text)).splitlines():
        key, equals, value = line.strip().partition("=")
        try:
            if equals and key == "Environment":
                environment |= assignments(shlex.split(value))
            elif equals and key == "ExecStart" and value:
                words = shlex.split(value.lstrip("-@+!:"))
            elif equals and key in ("Exec", "command"):
                words = shlex.split(value)
            elif equals and key == "environment":
                environment |= assignments(shlex.split(value.replace(",", " ")))
            elif equals and key == "Image":
                image = value.strip()
        except ValueError:
            raise UsageError("--engine-args: a quotation mark is not closed in it") from None
    return _unwrapped(Pasted(words, environment, image))


def _blocks(text: str) -> Iterator[Pasted]:
    """Blocks of Nomad and Terraform: image = "...", args = ["...", ...]; a key told again starts another."""
    block: dict[str, Any] = {}
    for match in list(_BLOCK.finditer(text))[:50]:
        value = text[match.end() : match.end() + 20_000]
        value = _balanced(value) if value.startswith("[") else value.partition("\n")[0]
        if match[1] in block:
            yield from manifests.commands_of(block)
            block = {}
        block |= {match[1]: value}
    yield from manifests.commands_of(block)


def _python(text: str) -> Pasted | None:
    """LLM(...), ServerArgs(...) and kin: as code has them, or as a start-up log prints them."""
    match = _CALL.search(text)
    if match is None or "tensorrt_llm" in text:
        return None
    expression = _OBJECT.sub("None", _balanced(text[match.end() :]))
    try:
        node = ast.parse("f" + expression if expression.startswith("(") else expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    settings: dict[str, Any] = {}
    if isinstance(node, ast.Call):
        pairs = [(item.arg, item.value) for item in node.keywords] + [("model", item) for item in node.args[:1]]
    elif isinstance(node, ast.Dict):
        pairs = [(getattr(key, "value", None), value) for key, value in zip(node.keys, node.values, strict=True)]
    else:
        return None
    for name, value in pairs:
        try:
            settings[str(name)] = _value(value)
        except (ValueError, TypeError, SyntaxError, RecursionError):
            continue  # an object of the engine's own
    if match[1] == "LLMConfig":
        loading = settings.get("model_loading_config") or {}
        settings = {
            "model_tag": loading.get("model_source") or loading.get("model_id"),
            **(settings.get("engine_kwargs") or {}),
        }
    model = settings.pop("model_tag", None)
    settings = ({"model": model} if model is not None else {}) | settings
    ours = match[1] in ("ServerArgs", "Engine")
    return Pasted([*(("sglang", "serve") if ours else ("vllm", "serve")), *flags_of(settings)], {})


def _value(node: ast.expr) -> Any:
    """A literal; dict(name=value) is one here too."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return {str(item.arg): _value(item.value) for item in node.keywords}
    return ast.literal_eval(node)


def _quoted_lists(text: str) -> Iterator[Pasted]:
    """Lists of words in code: subprocess.Popen(["vllm", "serve", ...])."""
    with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        yield from _lists_of(ast.parse(text))
    for match in list(re.finditer(r"\[\s*[\"']", text))[:20]:
        try:
            words = ast.literal_eval(_balanced(text[match.start() :]))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if isinstance(words, list) and all(isinstance(word, (str, int, float)) for word in words):
            yield Pasted([str(word) for word in words], {})


def _lists_of(tree: ast.Module) -> Iterator[Pasted]:
    """The lists of a Python file, with its constants in place and what is added to them."""
    constants: dict[str, str] = {}
    lists: dict[str, list[str]] = {}

    def word(node: ast.expr) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str" and node.args:
            return word(node.args[0])
        if isinstance(node, ast.JoinedStr):
            return "".join(word(part.value if isinstance(part, ast.FormattedValue) else part) for part in node.values)
        name = node.id if isinstance(node, ast.Name) else "expression"
        return constants.get(name, f"${name}")

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            if isinstance(node.value, ast.Constant):
                constants[node.targets[0].id] = str(node.value.value)
            elif isinstance(node.value, ast.List):
                lists[node.targets[0].id] = [word(item) for item in node.value.elts]
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.List):
            lists.get(node.target.id, []).extend(word(item) for item in node.value.elts)
        elif isinstance(node, ast.Call):
            for inner in node.args:
                if isinstance(inner, ast.List):
                    words = [word(item) for item in inner.elts]
                    extended = isinstance(node.func, ast.Attribute) and node.func.attr == "extend"
                    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
                    if extended and isinstance(owner, ast.Name):
                        lists.get(owner.id, []).extend(words)
                    else:
                        lists[f"argument {len(lists)}"] = words
    for words in lists.values():
        yield Pasted(words, {})


def _balanced(text: str) -> str:
    """The text up to the bracket that closes its first one."""
    depth, quote = 0, ""
    for index, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote and text[index - 1] != "\\" else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
            if not depth:
                return text[: index + 1]
    return text
