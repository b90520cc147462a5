"""An engine's own configuration file: what `kvctl.engines.commandline.config_files` reads, and variables where an engine has no such file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvctl.engines.commandline import ENVIRONMENT
from kvctl.errors import UsageError
from kvctl.recommend.emit.command import Command, Option, command
from kvctl.recommend.emit.documents import comments, document, shell, title
from kvctl.recommend.emit.site import SETTINGS, VARIABLES, is_variables

if TYPE_CHECKING:
    from kvctl.recommend.deployment import Deployment
    from kvctl.recommend.emit.site import Site

# llama-server --help: the variables of options that kvctl does not read, beside those of ENVIRONMENT.
_LLAMA_CPP = {
    "--model": "LLAMA_ARG_MODEL", "--hf-repo": "LLAMA_ARG_HF_REPO", "--hf-file": "LLAMA_ARG_HF_FILE", "--alias": "LLAMA_ARG_ALIAS",
    "--host": "LLAMA_ARG_HOST", "--port": "LLAMA_ARG_PORT", "--metrics": "LLAMA_ARG_ENDPOINT_METRICS", "--device": "LLAMA_ARG_DEVICE",
    "--split-mode": "LLAMA_ARG_SPLIT_MODE", "--ctx-size": "LLAMA_ARG_CTX_SIZE", "--cache-type-k": "LLAMA_ARG_CACHE_TYPE_K",
    "--cache-type-v": "LLAMA_ARG_CACHE_TYPE_V", "--parallel": "LLAMA_ARG_N_PARALLEL", "--batch-size": "LLAMA_ARG_BATCH",
    "--ubatch-size": "LLAMA_ARG_UBATCH", "--flash-attn": "LLAMA_ARG_FLASH_ATTN", "--kv-unified": "LLAMA_ARG_KV_UNIFIED",
    "--n-gpu-layers": "LLAMA_ARG_N_GPU_LAYERS", "--tensor-split": "LLAMA_ARG_TENSOR_SPLIT", "--cache-ram": "LLAMA_ARG_CACHE_RAM",
    "--spec-draft-type-k": "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K", "--spec-draft-type-v": "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
}  # fmt: skip
_SWITCHED = {"--no-kv-unified": ("LLAMA_ARG_KV_UNIFIED", "0"), "--no-cache-prompt": ("LLAMA_ARG_CACHE_PROMPT", "0"),
             "--no-kv-offload": ("LLAMA_ARG_KV_OFFLOAD", "0")}  # fmt: skip


def config(deployment: Deployment, site: Site) -> str:
    """The file, with its name and the command that reads it in its first lines.

    Raises:
        UsageError: the engine reads none, or several nodes, whose options differ.

    """
    head, name = title(deployment), deployment.engine.name
    how = start(deployment, site)
    one = command(deployment, site)
    if is_variables(deployment):
        note = f"{head}\nThis file is {VARIABLES}:\n{how}"
        return comments(note) + "".join(f"{key}={shell(value)}\n" for key, value in _variables(one, name))
    note = f"{head}\nThis file is {SETTINGS}:\n{how}"
    if name == "tensorrt-llm":
        return comments(note) + one.files[0][1]
    return document(_settings(one), comment=note)


def start(deployment: Deployment, site: Site) -> str:
    """The command that reads the file, in the folder where it lies.

    Raises:
        UsageError: the engine reads none, or several nodes, whose options differ.

    """
    if deployment.nodes > 1:
        raise UsageError(
            "nodes of one server are started with options that differ", hint="--emit command, or --emit lws"
        )
    one, name = command(deployment, site), deployment.engine.name
    if is_variables(deployment):
        return f"set -a; . ./{VARIABLES}; set +a; {' '.join(one.program)}"
    if name in ("vllm", "sglang"):
        before = "".join(f"{key}={value} " for key, value in one.variables)
        return f"{before}{' '.join(one.program)} --config {SETTINGS}"
    if name == "tensorrt-llm":
        from kvctl.recommend.emit.script import line_of

        own = one.files[0][0]
        return line_of(one.program, [SETTINGS if word == own else word for word in one.arguments])
    raise UsageError(f"{name} reads no configuration file", hint="--emit command")


def _settings(one: Command) -> dict[str, Any]:
    """Options as keys: a switch is true, several values a list, JSON a mapping."""
    out: dict[str, Any] = {}
    for option in one.options:
        key, value = _setting(option)
        out[key] = value
    return out


def _setting(option: Option) -> tuple[str, Any]:
    name, *values = option
    if not name.startswith("--"):
        return "model", name
    if not values:
        # --no-… too: `vllm serve` passes over what is false in its file (0.32 looks for the option where it is not).
        return name[2:], True
    if len(values) > 1:
        return name[2:], [_value(value) for value in values]
    return name[2:], _value(values[0])


def _value(text: str) -> Any:
    """A number or a mapping where the text is one; as it stands otherwise."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (int, float, dict)) and not isinstance(value, bool) else text


def _variables(one: Command, engine: str) -> list[tuple[str, str]]:
    """The command as variables of the environment."""
    if engine == "ollama":
        return list(one.variables)
    known: Mapping[str, str] = {flag: name for name, flag in ENVIRONMENT["llama.cpp"].items()} | _LLAMA_CPP
    out: list[tuple[str, str]] = []
    for name, *values in one.options:
        if name in _SWITCHED:
            out.append(_SWITCHED[name])
        elif name in known:
            out.append((known[name], values[0] if values else "1"))
        else:
            raise UsageError(f"{name} of llama.cpp has no variable", hint="--emit command")
    return out
