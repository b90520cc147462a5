"""Configurations on this machine: a folder, a file, or standard input."""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvctl.errors import ConfigError, KvctlError, SourceError, UsageError
from kvctl.sources import Found, jsonfile, safetensors
from kvctl.spec import Provenance

CONFIG = "config.json"

# <cache>/models--org--name/snapshots/<commit>
_SNAPSHOT = re.compile(r"models--(?P<repo>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")


def from_path(name: str) -> Found:
    """The configuration in a folder or a file."""
    path = Path(os.path.expanduser(name))
    found = _from_path(path, jsonfile.plain(name))
    return found.replace(provenance=found.provenance.replace(path=str(path)))


def _from_path(path: Path, where: str) -> Found:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise _missing(where, error) from None
    if stat.S_ISDIR(mode):
        return read_folder(path, where)
    if path.name == CONFIG:
        return read_folder(path.parent, where)
    if path.name.lower().endswith(".gguf") or (stat.S_ISREG(mode) and _begins_with_gguf(path)):
        from kvctl.sources import gguf

        return gguf.from_file(path, where)
    config = jsonfile.read_file(path)
    refuse_other_json(config, where)
    return Found(where, config, Provenance("local", where))


def _begins_with_gguf(path: Path) -> bool:
    """Whether a file under another name (an Ollama blob) is a GGUF file."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def from_stdin() -> Found:
    """The configuration on standard input."""
    stream = sys.stdin
    if stream is None or stream.closed:
        raise UsageError("standard input is closed", hint="kvctl size - < config.json")
    if stream.isatty():
        raise UsageError(
            "standard input is a terminal, so there is nothing to read",
            hint="pipe a config.json into it: kvctl size - < config.json",
        )
    config = jsonfile.read_stream(stream.buffer, "standard input")
    refuse_other_json(config, "standard input")
    return Found("stdin", config, Provenance("stdin", "-"))


def read_folder(folder: Path, where: str) -> Found:
    """The model in a folder; a snapshot in a Hub cache keeps its repository's name and commit."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise jsonfile.unreadable(where, error) from None
    if CONFIG not in names:
        raise no_config(where, names, base=_adapter_base(folder), inside=_subfolders_with_config(folder, names))
    path = folder / CONFIG
    config = jsonfile.read_file(path)
    refuse_other_json(config, jsonfile.plain(str(path)))
    weights, notes = safetensors.folder_weights(folder, config)
    absolute = os.path.abspath(folder)
    snapshot = _SNAPSHOT.search(absolute)
    name = snapshot["repo"].replace("--", "/", 1) if snapshot else os.path.basename(absolute) or absolute
    revision = snapshot["commit"] if snapshot else None
    return Found(jsonfile.plain(name), config, Provenance("local", where, revision), weights, notes)


def no_config(where: str, names: Sequence[str], *, base: str | None = None, inside: Sequence[str] = ()) -> SourceError:
    """The error for a folder or repository without config.json: what is there instead.

    `base` is the model that an adapter belongs to, `inside` are subfolders that do have a config.json.
    """
    shown = [jsonfile.plain(name) for name in names]

    def first(ending: str) -> str | None:
        return next((name for name in shown if name.lower().endswith(ending)), None)

    if "adapter_config.json" in shown:
        model = jsonfile.plain(base) if base else "the model it was trained on"
        return SourceError(f"{where} is an adapter, not a model", hint=f"the cache is its base model's: size {model}")
    if "model_index.json" in shown:
        return SourceError(
            f"{where} is a diffusers pipeline (model_index.json): it has no config.json and no KV cache of its own",
            hint="its text encoder may be in a subfolder: give that folder",
        )
    if "params.json" in shown:
        return SourceError(
            f"{where} has only params.json, the format of the model's own code, and no config.json",
            hint="give the version of the model for transformers, which has a config.json",
        )
    gguf = first(".gguf")
    if gguf:
        return SourceError(
            f"{where} has GGUF files ({gguf}) and no config.json",
            hint="give one of the files",
        )
    if inside:
        return SourceError(
            f"{where} has no config.json itself", hint="these do: " + ", ".join(map(jsonfile.plain, inside))
        )
    weights = first(".safetensors")
    if weights:
        return SourceError(
            f"{where} has weights ({weights}) and no config.json",
            hint="weights alone do not tell the architecture: put the model's config.json beside them",
        )
    has = "is empty" if not shown else "has no config.json"
    return SourceError(f"{where} {has}", hint="give a folder with a config.json, the file itself, or a name on the Hub")


def refuse_other_json(config: Mapping[str, Any], where: str) -> None:
    """Raise for JSON objects of other kinds that lie beside a config.json and are given by mistake."""
    if "model_type" in config:
        return
    if "weight_map" in config:
        raise ConfigError(f"{where} is an index of weights, not a configuration", hint="give the folder it is in")
    if "peft_type" in config:
        base = config.get("base_model_name_or_path")
        model = jsonfile.plain(base) if isinstance(base, str) and base else "the model it was trained on"
        raise ConfigError(
            f"{where} describes an adapter, not a model", hint=f"the cache is its base model's: size {model}"
        )
    if "_diffusers_version" in config:
        raise ConfigError(
            f"{where} describes a part of a diffusers pipeline, which has no KV cache", hint="give a language model"
        )
    if "dim" in config and "n_layers" in config and "n_heads" in config:
        raise ConfigError(
            f"{where} is in the format of params.json, not of config.json",
            hint="give the version of the model for transformers, which has a config.json",
        )


def _missing(where: str, error: OSError | ValueError) -> KvctlError:
    if isinstance(error, ValueError):
        return UsageError(f"{where} cannot be the name of a file", hint="give a folder with a config.json")
    if error.errno == errno.ELOOP:
        return SourceError(f"{where}: its symbolic links lead in a circle", hint="give the folder they should lead to")
    return jsonfile.unreadable(where, error)


def _adapter_base(folder: Path) -> str | None:
    try:
        base = jsonfile.read_file(folder / "adapter_config.json").get("base_model_name_or_path")
    except KvctlError:
        return None
    return base if isinstance(base, str) and base else None


def _subfolders_with_config(folder: Path, names: Sequence[str]) -> list[str]:
    found = (os.path.join(folder, name) for name in names[:100] if os.path.isfile(folder / name / CONFIG))
    return [path for path, _ in zip(found, range(3), strict=False)]
