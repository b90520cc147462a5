"""Profiles as files: written whole, and read back without trust in what stands there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from kvctl.errors import ConfigError, KvctlError, SourceError
from kvctl.files import write_json
from kvctl.measure import report as reports
from kvctl.measure.report import SCHEMA, ProfileReport
from kvctl.measure.statistics import Sample
from kvctl.record import Record
from kvctl.reports import ModelInfo, WeightsInfo
from kvctl.sources import jsonfile

T = TypeVar("T", bound=Record)

_LIMIT = 64_000_000
"""Bytes; a profile of fifty points has less than one million."""
_LARGEST = 2**80
_DEEPEST = 20
_HINT = "name a file that kvctl profile --save wrote"


class Kept(Record):
    """A part of a saved profile that is only shown and saved again, as it was."""

    facts: Mapping[str, Any]

    @property
    def agrees(self) -> bool | None:
        """What it said of itself."""
        said = self.facts.get("agrees")
        return said if isinstance(said, bool) else None

    def to_dict(self) -> dict[str, Any]:
        return dict(self.facts)


class Saved(Record):
    """A profile and what it is called: the file it came from, or "this run"."""

    name: str
    report: ProfileReport


def save(report: ProfileReport, path: str) -> None:
    """Write the report's JSON, whole or not at all.

    Raises:
        KvctlError: it cannot be written.

    """
    write_json(path, report.to_dict())


def load(path: str) -> Saved:
    """Read a profile that `save` wrote.

    Raises:
        SourceError: there is no such file, or it cannot be read.
        ConfigError: it holds something else, is damaged, or was written by a later kvctl.

    """
    where = jsonfile.plain(path[:200])
    try:
        data = jsonfile.read_file(Path(path), limit=_LIMIT)
        return Saved(where, _report(data, where))
    except ConfigError as error:
        message = error.message.replace("to be a configuration", "to be a saved profile")
        message = message.replace("not a configuration", "not a saved profile")
        raise ConfigError(message.replace("for a configuration", "for a saved profile"), hint=_HINT) from None
    except KvctlError as error:
        raise SourceError(error.message, hint=_HINT) from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deep to be a saved profile", hint=_HINT) from None
    except ValueError as error:  # a NUL in the path
        raise SourceError(f"{where} cannot be read: {error}", hint=_HINT) from None


def _report(data: Mapping[str, Any], where: str) -> ProfileReport:
    schema = data.get("schema")
    if schema != SCHEMA:
        name = jsonfile.plain(schema[:40]) if isinstance(schema, str) else ""
        family, _, number = name.partition("/")
        if family == SCHEMA.partition("/")[0] and number.isdecimal():
            raise ConfigError(f"{where} is of a later kvctl: {name}, and this one reads {SCHEMA}")
        raise ConfigError(
            f"{where} {f'holds {name}' if name else 'names no schema'}, and is no saved profile ({SCHEMA})"
        )
    try:
        return _profile(data)
    except _Wrong as wrong:
        raise ConfigError(f"{where} is damaged: {wrong}") from None


class _Wrong(Exception):
    """Something that is not as `save` writes it."""


def _profile(data: Mapping[str, Any]) -> ProfileReport:
    engine = _mapping(data.get("engine"), "engine")
    flat = dict(data) | {"engine": engine.get("name"), "engine_version": engine.get("version")}
    flat["version"] = flat.pop("kvctl_version", None)
    flat |= {
        name: None if flat.get(name) is None else Kept(_free(flat[name], name))
        for name in ("machine", "engine_log", "techniques", "sharing")
    }
    return _record(ProfileReport, flat, "")


def _record(kind: type[T], value: Any, where: str) -> T:
    """A record of the keys that its fields are named after; further keys are of a later kvctl, and left out."""
    data = _mapping(value, where)
    found = {}
    for name in kind._fields:
        inside = f"{where}.{name}" if where else name
        if name in data:
            found[name] = _value(kind.__annotations__[name], data[name], inside)
        elif not hasattr(kind, name):
            raise _Wrong(f"{inside} is missing")
    return kind(**found)


def _value(hint: str, value: Any, where: str) -> Any:
    """A value of an annotated type: `int | None`, `tuple[Point, ...]`, and so on."""
    hint, _, optional = hint.partition(" | ")
    if value is None and optional:
        return None
    if hint.startswith("tuple["):
        if not isinstance(value, list):
            _refuse(value, "a list", where)
        inner = hint.removeprefix("tuple[").removesuffix(", ...]")
        return tuple(_value(inner, item, f"{where}[{number}]") for number, item in enumerate(value))
    return _READERS[hint](value, where)


def _sample(value: Any, where: str) -> Sample:
    data = _mapping(value, where)
    values = _value("tuple[float, ...]", data.get("values_s"), f"{where}.values_s")
    groups = _value("tuple[int, ...]", data.get("repeats"), f"{where}.repeats")
    if not values or min(values) <= 0:
        raise _Wrong(f"{where}.values_s holds {'a time that is not positive' if values else 'no times'}")
    if sum(groups) != len(values) or not all(groups):
        raise _Wrong(f"{where}.repeats do not add up to the {len(values):,} times of {where}.values_s")
    return Sample(values, groups)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        _refuse(value, "an object", where)
    return value


def _free(value: Any, where: str) -> Mapping[str, Any]:
    """An object of anything."""
    return {_printable(key): _tamed(item, where, 1) for key, item in _mapping(value, where).items()}


def _tamed(value: Any, where: str, depth: int) -> Any:
    """Without control characters and what is no number, and nowhere deep."""
    if depth > _DEEPEST:
        raise _Wrong(f"{where} is nested too deep")
    if isinstance(value, str):
        return _printable(value)
    if isinstance(value, dict):
        return {_printable(key): _tamed(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_tamed(item, where, depth + 1) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def _text(value: Any, where: str) -> str:
    return _printable(value) if isinstance(value, str) else _refuse(value, "text", where)


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
        _refuse(value, "a whole number that is not negative", where)
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        _refuse(value, "a number", where)
    return float(value)


def _flag(value: Any, where: str) -> bool:
    return value if isinstance(value, bool) else _refuse(value, "true or false", where)


def _anything(value: Any, where: str) -> Any:
    return value


def _refuse(value: Any, wanted: str, where: str) -> NoReturn:
    found = json.dumps(value) if isinstance(value, str | int | float | None) else "a list or an object"
    raise _Wrong(f"{where or 'the file'} should be {wanted} and is {jsonfile.plain(found[:40])}")


def _reader(kind: type[T]) -> Callable[[Any, str], T]:
    return lambda value, where: _record(kind, value, where)


_PARTS: tuple[type[Record], ...] = (
    ModelInfo, WeightsInfo, reports.CacheRow, reports.MemoryUse, reports.Work, reports.Limits, reports.Point,
    reports.ScaledTimes, reports.Line, reports.Try, reports.UntilOom,
)  # fmt: skip
_READERS: dict[str, Callable[[Any, str], Any]] = {
    "str": _text,
    "int": _whole,
    "float": _number,
    "bool": _flag,
    "Mapping[str, Any]": _free,
    "Any": _anything,
    "Sample": _sample,
    **{kind.__name__: _reader(kind) for kind in _PARTS},
}
