"""Classes that a model's repository brings as Python: run only where --trust-remote-code says so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError
from kvctl.measure.faults import ON_HUB, first_line

if TYPE_CHECKING:
    from kvctl.measure.loaded import Wanted
    from kvctl.spec import ModelSpec


def brought(spec: ModelSpec, wanted: Wanted, names: tuple[str, ...]) -> Any:
    """The class that the repository's own code has for the first of these auto classes; None where it has none for any,
    or was not trusted.

    Raises:
        ConfigError: the code is not there, does not run, or has no such class.

    """
    named = spec.config.get("auto_map")
    if not wanted.trust_remote_code or not named:
        return None
    if not isinstance(named, Mapping):
        raise ConfigError(f"{spec.id}: auto_map names no classes", hint='an object: {"AutoConfig": "file.Class"}')
    reference = next((named[name] for name in names if named.get(name) is not None), None)
    if reference is None:
        return None
    if not isinstance(reference, str) or "." not in reference:
        raise ConfigError(f"{spec.id}: auto_map names {str(reference)[:60]!r}, which is no class of a file",
                          hint="it is written file.Class")  # fmt: skip
    return _loaded(spec, wanted, reference)


def _loaded(spec: ModelSpec, wanted: Wanted, reference: str) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    source = spec.provenance.source
    if source == "local":
        path = spec.provenance.place
        where, revision = str(path if path.is_dir() else path.parent), None
        _, _, other = reference.rpartition("--")
        file = Path(where, *other.split(".")[:-1]).with_suffix(".py")
        if "--" not in reference and not file.is_file():
            raise ConfigError(
                f"{spec.id}: its code, {file.name[:60]}, is not there", hint="download it beside config.json"
            )
    elif source in ON_HUB:
        where, revision = spec.id, wanted.revision or spec.provenance.revision
    else:
        raise ConfigError(
            f"{spec.id}: a configuration alone brings no code", hint="give the folder that the code is in"
        )
    try:
        return get_class_from_dynamic_module(reference, where, revision=revision)
    except (Exception, SystemExit) as error:  # whatever that code does
        if isinstance(error, OSError) and source in ON_HUB:
            raise ConfigError(f"{spec.id}: its code is not in the Hub's cache, and could not be fetched",
                              hint="try again with a connection") from None  # fmt: skip
        what = "ends the program" if isinstance(error, SystemExit) else f"cannot be run: {said(error)}"
        raise ConfigError(f"{spec.id}: its own code ({reference[:60]}) {what}",
                          hint=_HINTS.get(type(error), "it may be written for another version of transformers")) from None  # fmt: skip


_HINTS: dict[type[BaseException], str] = {
    ImportError: "install what it needs",
    ModuleNotFoundError: "install what it needs",
    SyntaxError: "download it again",
}


def said(error: BaseException) -> str:
    """An exception of code that nobody knows, with its kind."""
    text, name = first_line(error), type(error).__name__
    return text if text.startswith(name) else f"{name}: {text}"
