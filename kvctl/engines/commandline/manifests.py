"""Commands that stand in YAML: Kubernetes, Compose, Helm values, Ray Serve, llama-swap, an engine's own file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvctl.engines.commandline.config_files import short
from kvctl.errors import UsageError
from kvctl.record import Record

_KEYS = (
    "args|command|image|apiVersion|entrypoint|services|environment|env|cmd|extraArgs|vllmConfig|modelSpec"
    "|engine_kwargs|engine_args|llm_configs|model|model[-_]path|max[-_]model[-_]len"
)
_LOOKS = re.compile(rf"^\s*(- )?[\"']?({_KEYS})[\"']?\s*:(\s|$)", re.MULTILINE)
_COMMANDS = ("entrypoint", "command", "args", "cmd", "extraArgs", "extra_args")
_OWN_FILE = (("model", "vllm", "serve"), ("model-path", "sglang", "serve"))


class Pasted(Record):
    """A command: its words, variables set for it, and the image it runs in."""

    words: list[str]
    environment: dict[str, str]
    image: str | None = None
    files: Mapping[str, str] = {}
    """Files that the text writes before it starts the engine: their names, and what is in them."""
    others: int = 0
    """Other commands of the text that start an engine."""


def looks_like(text: str) -> bool:
    """Whether a text is YAML with commands in it."""
    return text.startswith(("[", "- ")) or _LOOKS.search(text) is not None


def commands(text: str) -> list[Pasted]:
    """Every command in a list of arguments or a manifest.

    Raises:
        UsageError: no valid YAML.

    """
    import yaml

    try:
        documents = [item for item in yaml.safe_load_all(text) if item is not None]
    except (yaml.YAMLError, RecursionError, ValueError):
        raise UsageError("--engine-args: looks like a list or a manifest, and is no valid YAML") from None
    if not short(documents):
        raise UsageError("--engine-args: the YAML in it stands for more than it says")
    if len(documents) == 1 and isinstance(documents[0], list) and all(map(_is_word, documents[0])):
        return [Pasted([str(word) for word in documents[0]], {})]
    found = list(_walk(documents, 0))
    for document in documents:
        if not found and isinstance(document, Mapping):
            found += _own_file(document)
    return found


def commands_of(block: Mapping[str, str]) -> list[Pasted]:
    """The command of a block whose values are lists or texts as YAML has them; none where they are not."""
    try:
        return commands("\n".join(f"{key}: {value}" for key, value in block.items()))
    except UsageError:
        return []


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings as the flags of a command line: max_model_len or maxModelLen as --max-model-len."""
    words: list[str] = []
    for key, value in settings.items():
        name = "--" + re.sub(r"(?<=[a-z0-9])([A-Z])", r"-\1", str(key)).replace("_", "-").lower()
        if value is True:
            words.append(name)
        elif value is False:
            # Switches that are off are no news, but for those that an engine has on by itself.
            words += ["--no-" + name[2:]] if name.startswith("--enable-") else []
        elif isinstance(value, (Mapping, list)):
            words += [name, json.dumps(value)]
        elif value is not None:
            words += [name, str(value)]
    return words


def assignments(words: Iterable[str]) -> dict[str, str]:
    """NAME=value words."""
    pairs = (word.partition("=") for word in words)
    return {name: value for name, equals, value in pairs if equals}


def _is_word(value: Any) -> bool:
    return isinstance(value, (str, int, float))


def _walk(value: Any, depth: int) -> Iterator[Pasted]:
    """Everything that has a command, arguments or an image."""
    if depth > 20:
        return
    if isinstance(value, Mapping):
        if (one := _one(value)) is not None:
            yield one
        for inner in value.values():
            yield from _walk(inner, depth + 1)
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner, depth + 1)


def _one(value: Mapping[str, Any]) -> Pasted | None:
    """The command of one mapping; None where it has none."""
    image, environment = _image(value), _variables(value)
    for key, model in (("vllmConfig", value.get("modelURL")), ("engine_kwargs", _ray_model(value))):
        settings = value.get(key)
        if isinstance(settings, Mapping):
            named = {name: inner for name, inner in settings.items() if name not in _COMMANDS}
            words = ["vllm", "serve", *([str(model)] if model else []), *flags_of(named), *_command(settings)]
            return Pasted(words, environment, image)
    words = _command(value)
    if words or (image is not None and (environment or isinstance(value.get("image"), str))):
        return Pasted(words, environment, image)
    return None


def _command(value: Mapping[str, Any]) -> list[str]:
    return [str(word) for key in _COMMANDS for word in _listed(value.get(key))]


def _ray_model(value: Mapping[str, Any]) -> Any:
    loading = value.get("model_loading_config")
    return (loading.get("model_source") or loading.get("model_id")) if isinstance(loading, Mapping) else None


def _image(value: Mapping[str, Any]) -> str | None:
    """The image: a text, a chart's repository and tag, or what a KServe model format runs in."""
    image = value.get("image")
    if isinstance(image, str):
        return image
    source = image if isinstance(image, Mapping) else value
    if isinstance(source.get("repository"), str):
        tag = f":{source['tag']}" if source.get("tag") else ""
        return f"{source['repository']}{tag}"
    kind = value.get("modelFormat")
    served = isinstance(kind, Mapping) and str(kind.get("name", "")).lower() in ("huggingface", "vllm")
    return "vllm/vllm-openai" if served else None


def _variables(container: Mapping[str, Any]) -> dict[str, str]:
    """Environment of a container: Kubernetes' env, Compose's environment, a list or a mapping."""
    out: dict[str, str] = {}
    for key in ("env", "environment"):
        values = container.get(key)
        if isinstance(values, Mapping):
            out |= {str(name): str(value) for name, value in values.items() if _is_word(value)}
        elif isinstance(values, list):
            out |= assignments(str(item) for item in values if isinstance(item, str))
            named = (item for item in values if isinstance(item, Mapping) and "name" in item and "value" in item)
            out |= {str(item["name"]): str(item["value"]) for item in named}
    return out


def _own_file(settings: Mapping[str, Any]) -> list[Pasted]:
    """What vLLM and SGLang read from --config."""
    named = {str(key).replace("_", "-"): value for key, value in settings.items()}
    for key, *start in _OWN_FILE:
        if isinstance(named.get(key), str) and len(named) > 1:
            return [Pasted([*start, *flags_of(named)], {})]
    return []


def _listed(value: Any) -> Sequence[Any]:
    if isinstance(value, list):
        return [item for item in value if _is_word(item)]
    if not isinstance(value, str):
        return ()
    try:
        return shlex.split(re.sub(r"\\[ \t]*\n", " ", value))
    except ValueError:
        return ()
