"""Two plans beside each other: what differs in settings, memory, capacity, speed, quality and cost.

Ranges that overlap are not told apart, whatever their middles are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError
from kvctl.recommend.prices import Cost
from kvctl.recommend.quality import Loss
from kvctl.record import Record
from kvctl.speed import Range

if TYPE_CHECKING:
    from kvctl.recommend.deployment import Deployment

SCHEMA = "kvctl.recommend/1"
_HINT = "name a file that kvctl recommend --json wrote, with #2 behind it for its second answer"
SPEED = {"ttft": -1, "tpot": -1, "output_rate": 1, "request_rate": 1}
"""Figures of kvctl.speed.Speed that are compared, and whether more (1) or less (-1) of each is better."""
_UNSET = "not set"


class Side(Record):
    """What is compared of one plan; `to_dict` is what a plan's file keeps of it."""

    name: str
    settings: Mapping[str, Any]
    """Engine, model, formats, parallelism and limits, those that are set."""
    command: tuple[str, ...] = ()
    """The engine's command line, one argument each."""
    memory: Mapping[str, int] = {}
    """Bytes of a rank by what takes them: weights, cache, activations, …"""
    host_weights: int = 0
    """Bytes of each server's weights that stay in the host's memory, beside those."""
    capacity: int | None = None
    """Tokens that the pools of all replicas hold."""
    held: int | None = None
    """Requests that they hold at once."""
    speed: Mapping[str, Range] = {}
    """Of `SPEED`."""
    loss: Loss | None = None
    cost: Cost | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "settings": dict(self.settings),
            "command": list(self.command),
            "memory": dict(self.memory),
            "host_weights": self.host_weights,
            "capacity": self.capacity,
            "held": self.held,
            "speed": {name: _range_dict(found) for name, found in self.speed.items()},
            "loss": None if self.loss is None else self.loss.to_dict(),
            "cost": None if self.cost is None else self.cost.to_dict(),
        }


def settings(deployment: Deployment) -> dict[str, Any]:
    """What is set of a deployment, by name; what is left to a default is left out."""
    out: dict[str, Any] = {
        "engine": deployment.engine.name if deployment.engine.version is None else f"{deployment.engine.name}@{deployment.engine.version}",
        "model": deployment.model, "context": deployment.context, "device": deployment.device.name, "weights": deployment.weights,
        "made": deployment.made, "kv_dtype": deployment.kv_dtype, "gpus": deployment.gpus, "nodes": deployment.nodes,
        "replicas": deployment.replicas,
    }  # fmt: skip
    serving = deployment.serving
    for name in serving._fields:
        value = getattr(serving, name)
        if value != getattr(type(serving), name) and isinstance(value, bool | int | float | str | tuple | Mapping):
            out[name] = (
                list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
            )
    return out


class Row(Record):
    """One thing that differs."""

    part: str
    """settings, flags, memory, capacity, speed, quality or cost."""
    name: str
    left: Any
    """A value, a Range, or None: not set, or not known."""
    right: Any
    ratio: float | None = None
    """Right over left, of likeliest values, where both are numbers."""
    apart: bool | None = None
    """Whether the ranges leave each other alone; None where there are none."""
    better: str = ""
    """left or right; "" where they are not told apart, or neither is better in itself."""

    def to_dict(self) -> dict[str, Any]:
        return {
            name: _range_dict(value) if isinstance(value := getattr(self, name), Range) else value
            for name in self._fields
        }


class WhatIf(Record):
    """All that differs between two plans."""

    left: str
    right: str
    rows: tuple[Row, ...]
    alike: tuple[str, ...]
    """Figures whose ranges overlap: not told apart."""
    unknown: tuple[str, ...]
    """What only one of them, or neither, knows."""

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.rows

    def of(self, part: str) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.part == part)

    def to_dict(self) -> dict[str, Any]:
        return {"left": self.left, "right": self.right, "rows": [row.to_dict() for row in self.rows],
                "not_told_apart": list(self.alike), "not_known": list(self.unknown)}  # fmt: skip


def compare(left: Side, right: Side) -> WhatIf:
    """What differs, in the order of the parts; equal values are left out."""
    rows: list[Row] = []
    unknown: list[str] = []
    rows += _different("settings", left.settings, right.settings)
    rows += _different("flags", options(left.command), options(right.command))
    for name in dict.fromkeys((*left.memory, *right.memory)):
        rows += _number("memory", name, left.memory.get(name, 0), right.memory.get(name, 0), 0)
    rows += _number("memory", "weights in host memory", left.host_weights, right.host_weights, 0)
    for name in ("capacity", "held"):
        one, other = getattr(left, name), getattr(right, name)
        if one is None or other is None:
            unknown += [name]
        else:
            rows += _number("capacity", name, one, other, 1)
    for name, sign in SPEED.items():
        rows += _ranges("speed", name, left.speed.get(name), right.speed.get(name), sign, unknown)
    lost, other_lost = (None if side.loss is None else side.loss.percent for side in (left, right))
    rows += _ranges("quality", "loss", lost, other_lost, -1, unknown)
    if left.cost is not None and right.cost is not None:
        rows += _number("cost", "gpus", left.cost.gpus, right.cost.gpus, -1)
        if left.cost.per_hour is not None and right.cost.per_hour is not None:
            rows += _number("cost", "per_hour", left.cost.per_hour, right.cost.per_hour, -1)
            rows += _ranges("cost", "per_million", left.cost.per_million, right.cost.per_million, -1, unknown)
    alike = tuple(row.name for row in rows if row.apart is False)
    return WhatIf(left.name, right.name, tuple(rows), alike, tuple(unknown))


def options(command: Sequence[str]) -> dict[str, str]:
    """A command line's options with their values; the same option twice keeps both, in order."""
    out: dict[str, str] = {}
    current = None
    for argument in command:
        name, equals, value = argument.partition("=")
        if argument.startswith("-") and not _is_number(argument):
            current = name
            told = value if equals else ""
            out[current] = f"{out[current]} {told}".strip() if current in out else told
        elif current is not None:
            out[current] = f"{out[current]} {argument}".strip()
    return out


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _different(part: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Row]:
    names = dict.fromkeys((*left, *right))
    return [
        Row(part, name, left.get(name, _UNSET), right.get(name, _UNSET))
        for name in names
        if left.get(name, _UNSET) != right.get(name, _UNSET)
    ]


def _number(part: str, name: str, left: float, right: float, sign: int) -> list[Row]:
    """A figure that is exact; `sign` says whether more of it is better, 0 that neither is."""
    if left == right:
        return []
    better = "" if not sign else "right" if (right - left) * sign > 0 else "left"
    return [Row(part, name, left, right, right / left if left else None, None, better)]


def _ranges(part: str, name: str, left: Range | None, right: Range | None, sign: int, unknown: list[str]) -> list[Row]:
    if left is None or right is None:
        unknown.append(name)
        return []
    if left == right:
        return []
    apart = left.high < right.low or right.high < left.low
    better = "" if not apart else "right" if (right.mid - left.mid) * sign > 0 else "left"
    return [Row(part, name, left, right, right.mid / left.mid if left.mid else None, apart, better)]


def _range_dict(found: Range) -> dict[str, float]:
    return {"low": found.low, "mid": found.mid, "high": found.high}


# -- plans as files -------------------------------------------------------------------------


def read(data: Mapping[str, Any], where: str, answer: int = 1) -> Side:
    """One answer of a plan: of `answers` the n-th, from 1, in its part `side` (`Side.to_dict`).

    Raises:
        ConfigError: it is no plan, is damaged, or has no such answer.

    """
    schema = data.get("schema")
    if schema != SCHEMA:
        named = schema[:40] if isinstance(schema, str) and schema.isprintable() else "no schema"
        raise ConfigError(f"{where} holds {named}, and is no plan ({SCHEMA})", hint=_HINT)
    answers = data.get("answers")
    if not isinstance(answers, list):
        raise ConfigError(f"{where} is damaged: answers should be a list", hint=_HINT)
    if not answers:
        raise ConfigError(f"{where}: nothing met that request, so its plan has no answers",
                          hint="its `nearest` and `impossible` say what could be met: ask for that, and save it with --json")  # fmt: skip
    if not 1 <= answer <= len(answers):
        raise ConfigError(f"{where} has {len(answers)} answers, and no number {answer}", hint=_HINT)
    try:
        return _side(answers[answer - 1]["side"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = str(error)[:80]
        raise ConfigError(f"{where} is damaged: {what if what.isprintable() else type(error).__name__}", hint=_HINT) from None  # fmt: skip


def _side(data: Mapping[str, Any]) -> Side:
    loss, cost = data["loss"], data["cost"]
    return Side(
        name=_text(data["name"]),
        settings=_mapping(data["settings"]),
        command=tuple(_text(argument) for argument in data["command"]),
        memory={name: _count(value) for name, value in _mapping(data["memory"]).items()},
        host_weights=_count(data.get("host_weights", 0)),
        capacity=None if data["capacity"] is None else _count(data["capacity"]),
        held=None if data["held"] is None else _count(data["held"]),
        speed={name: _read_range(value) for name, value in _mapping(data["speed"]).items() if name in SPEED},
        loss=None if loss is None else Loss(
            _loss_range(loss["percent"]), _text(loss["metric"]), _text(loss["source"]), loss["measured"] is True,
            _text(loss["sure"]), _text(loss["basis"])),
        cost=None if cost is None else Cost(
            _count(cost["gpus"]), None if cost["per_hour"] is None else _finite(cost["per_hour"]),
            _maybe_range(cost["per_million_output_tokens"])),
    )  # fmt: skip


def _loss_range(value: Any) -> Range | None:
    """Of a loss: what is null is beyond all bounds."""
    if value is None:
        return None
    return _read_range({name: math.inf if one is None else one for name, one in _mapping(value).items()}, math.inf)


def _maybe_range(value: Any) -> Range | None:
    return None if value is None else _read_range(value)


def _read_range(value: Any, most: float = 0.0) -> Range:
    found = Range(
        *(most if value[name] == math.inf == most else _finite(value[name]) for name in ("low", "mid", "high"))
    )
    if not found.low <= found.mid <= found.high:
        raise ValueError(f"a range from {found.low:g} over {found.mid:g} to {found.high:g}")
    return found


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError("a number is wanted")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError("a whole number is wanted")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("text is wanted")
    return value if value.isprintable() else "".join(char if char.isprintable() else " " for char in value)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError("an object is wanted")
    return value
