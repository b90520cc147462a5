"""Measured losses, read from what `kvctl quantize` and `kvctl profile` saved: they go before published ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvctl.errors import ConfigError, KvctlError, SourceError
from kvctl.recommend.quality import Loss, Measured
from kvctl.sources import jsonfile
from kvctl.speed import Range

_LIMIT = 64_000_000
_HINT = "name a file that kvctl quantize --json or kvctl profile --save wrote"
_SCHEMAS = ("kvctl.quantize/1", "kvctl.profile/1")
_WEIGHTS = {"fp8": "fp8-channel", "fp8-static": "fp8", "int8-w8a8": "w8a8"}
"""Names of `kvctl quantize --weights` that kvctl.weight_formats has under others."""
_CACHES = {"fp8, scale 1.0": "fp8"}
_PLAIN = ("plain", "fp16", "bf16", "fp32", "original")


def load(path: str) -> Measured:
    """Read a saved result.

    Raises:
        SourceError: there is no such file, or it cannot be read.
        ConfigError: it is no such result, is damaged, or holds no measured quality.

    """
    where = jsonfile.plain(path[:200])
    data = _document(path, where)
    schema = data.get("schema")
    if schema not in _SCHEMAS:
        name = jsonfile.plain(schema[:40]) if isinstance(schema, str) else "no schema"
        raise ConfigError(f"{where} holds {name}, and no result with measured quality ({' or '.join(_SCHEMAS)})", hint=_HINT)  # fmt: skip
    try:
        found = _quantized(data, where) if schema == _SCHEMAS[0] else _profiled(data, where)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{where} is damaged: {type(error).__name__} at {jsonfile.plain(str(error))[:80]}", hint=_HINT) from None  # fmt: skip
    if not (found.weights or found.caches or found.both):
        raise ConfigError(f"{where} holds no measured quality", hint="kvctl quantize without --dry-run, or kvctl profile --technique NAMES")  # fmt: skip
    return found


def _document(path: str, where: str) -> dict[str, Any]:
    try:
        return jsonfile.read_file(Path(path), limit=_LIMIT)
    except ConfigError as error:
        message = error.message.replace("to be a configuration", "to be a saved result")
        message = message.replace("for a configuration", "for a saved result")
        raise ConfigError(message, hint=_HINT) from None
    except KvctlError as error:
        raise SourceError(error.message, hint=_HINT) from None
    except ValueError as error:  # a NUL in the path
        raise SourceError(f"{where} cannot be read: {error}", hint=_HINT) from None


def _quantized(data: Mapping[str, Any], where: str) -> Measured:
    weights: dict[str, Loss] = {}
    caches: dict[str, Loss] = {}
    both: dict[tuple[str, str], Loss] = {}
    parameters = None
    for row in data["results"]:
        name = _WEIGHTS.get(row["format"], row["format"])
        parameters = parameters or _count(row["parameters"])
        judged = row["judged"]
        loss = _loss(None if judged is None else judged["quality"], where)
        if loss is not None and name != "rtn":  # its layout is AWQ's, its loss is not
            weights[name] = loss
        for cell in row["caches"]:
            found = _loss(cell["quality"], where)
            if found is None or cell["name"] in _PLAIN:
                continue
            if name == "original":
                caches[_CACHES.get(cell["name"], cell["name"])] = found
            else:
                both[name, _CACHES.get(cell["name"], cell["name"])] = found
    for row in () if data["kv"] is None else data["kv"]["results"]:
        found = _loss(row["quality"], where)
        if found is not None:
            caches[_CACHES.get(row["name"], row["name"])] = found
    return Measured(_name(data), parameters, weights, caches, both)


def _profiled(data: Mapping[str, Any], where: str) -> Measured:
    rows = () if data["techniques"] is None else data["techniques"]["rows"]
    caches = {
        _pair(row["name"]): loss
        for row in rows
        if (loss := _loss(row["quality"], where)) is not None and row["name"] not in _PLAIN
    }
    weights = data["weights"]
    return Measured(_name(data), None if weights is None else _count(weights.get("parameters")), {}, caches)


def _pair(name: str) -> str:
    """Keys in one format and values in another, as Deployments name them: "q8_0:values=q4_0" is "q8_0/q4_0"."""
    keys, _, values = name.partition(":values=")
    return f"{keys}/{values}" if values and ":" not in values else name


def _loss(quality: Mapping[str, Any] | None, where: str) -> Loss | None:
    """A measured change of perplexity, with two standard errors; None where there is none, infinite where it has no bounds."""
    if quality is None:
        return None
    change = quality["perplexity_change_percent"]
    value, error = _number(change["value"]), _number(change["standard_error"])
    if value is None:
        value, error = math.inf, 0.0
    spread = 2 * error if error is not None else 0.0
    tokens = _count(quality["tokens"]) or 0
    sure = "low" if error is None else "high"
    return Loss(
        Range(value - spread, value, value + spread), "perplexity", f"measured: {where}", True, sure, f"{tokens:,} tokens"
    )  # fmt: skip


def _name(data: Mapping[str, Any]) -> str:
    name = data["model"]["id"]
    if not isinstance(name, str):
        raise TypeError("model.id")
    return name


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError("a number")
    return float(value)


def _count(value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError("a whole number")
    return value


def load_all(paths: Iterator[str] | tuple[str, ...]) -> tuple[Measured, ...]:
    """Several saved results, the first of them first."""
    return tuple(load(path) for path in paths)
