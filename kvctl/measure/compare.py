"""Profiles beside each other: point by point, with the noise of both, and what differs in how they came about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvctl.errors import UsageError
from kvctl.measure.report import Point, ProfileReport, jsonable
from kvctl.measure.saved import Saved
from kvctl.measure.statistics import Ratio, Sample, ratio
from kvctl.record import Record
from kvctl.units import plural

PROCESS_NOISE = 0.05
"""What times differ by from one process to the next beyond their repeats: medians of six runs of one model on an idle
machine of two cores were within 3%, and one run in six 12% off, which no noise of its own can tell."""
_ALLOCATOR_NOISE = 0.02
_C_LIBRARY_NOISE = 0.2
"""Peaks nearer than this are the same. torch's allocator for CUDA repeats itself; what the C library keeps depends on
what was freed before, and the same loop in four processes took from 1.75 to 2.07 GB."""

NOTE = (
    "intervals are over the repeats of each run, with 5% for what differs from process to process; a machine that changes "
    "its speed between two runs is not told from a change of the program"
)


class Cell(Record):
    """One figure of one run, beside the first run's."""

    value: float | int | None
    """Seconds (the median) or bytes; None where that run has none."""
    ratio: Ratio | None = None
    """Over the first run's; None for the first run itself and where one of the two is missing."""
    verdict: str = ""
    """"same", "same within noise", "faster", "slower", "differs" (bytes), or "too few repeats" to say."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "ratio": None if self.ratio is None else self.ratio.to_dict(),
            "verdict": self.verdict or None,
        }


class Row(Record):
    """One figure of one point, in every run."""

    what: str
    """"TTFT", "TPOT" (seconds), "KV cache", "peak memory" (bytes)."""
    cells: tuple[Cell, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"what": self.what, "unit": unit_of(self.what), "cells": [cell.to_dict() for cell in self.cells]}


class Key(Record):
    """What two points must have in common to be compared."""

    context: int
    batch: int
    decode: int
    prefill_chunk: Any
    ranks: int

    def words(self) -> str:
        """ "4,096 tokens × 8 sequences, 64 decoded, in chunks of 512, on 2 ranks"."""
        words = f"{plural(self.context, 'token')} × {plural(self.batch, 'sequence')}, {self.decode:,} decoded"
        if self.prefill_chunk:
            words += f", in chunks of {self.prefill_chunk}"
        return words + (f", on {self.ranks} ranks" if self.ranks > 1 else "")


class Matched(Record):
    """One point that the first run and at least one other have."""

    key: Key
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        key = {name: getattr(self.key, name) for name in self.key._fields}
        return key | {"rows": [row.to_dict() for row in self.rows]}


class Difference(Record):
    """Something of how the runs came about that is not the same in all of them."""

    what: str
    """model, dtype, settings.attention, environment.torch, …"""
    values: tuple[Any, ...]
    """Of each run; None where it does not say."""

    def to_dict(self) -> dict[str, Any]:
        return {"what": self.what, "values": list(self.values)}


class Comparison(Record):
    """Several runs; ratios are over the first."""

    names: tuple[str, ...]
    points: tuple[Matched, ...]
    differences: tuple[Difference, ...]
    unmatched: tuple[str, ...]
    """Points that not all have, in words with the runs that have them."""
    note: str = NOTE

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = jsonable({
            "runs": self.names,
            "points": [point.to_dict() for point in self.points],
            "differences": [difference.to_dict() for difference in self.differences],
            "unmatched": self.unmatched,
            "note": self.note,
        })  # fmt: skip
        return out


def unit_of(what: str) -> str:
    """Of the values of a row: s or bytes."""
    return "s" if what in ("TTFT", "TPOT") else "bytes"


def compare(runs: Sequence[Saved]) -> Comparison:
    """Every later run beside the first, where their points have the same context, batch, decode, chunk and ranks.

    Raises:
        UsageError: fewer than two runs.

    """
    if len(runs) < 2:
        raise UsageError("one run has nothing to be compared with", hint="name a saved profile with --compare FILE")
    tables = [_keyed(run.report) for run in runs]
    points, unmatched = [], []
    for key in dict.fromkeys(key for table in tables for key in table):
        of_runs = [table.get(key) for table in tables]
        having = [run.name for run, point in zip(runs, of_runs, strict=True) if point is not None]
        if of_runs[0] is not None and len(having) > 1:
            points.append(Matched(key, _rows(of_runs)))
        if len(having) < len(runs):
            unmatched.append(f"{key.words()}: only in {', '.join(having)}")
    return Comparison(tuple(run.name for run in runs), tuple(points), _differences(runs), tuple(unmatched))


def _keyed(report: ProfileReport) -> dict[Key, Point]:
    chunk = report.settings.get("prefill_chunk")
    chunk = chunk if isinstance(chunk, str | int) else None
    table: dict[Key, Point] = {}
    for point in report.points:
        table.setdefault(Key(point.context, point.batch, point.decode, chunk, report.ranks), point)
    return table


def _rows(points: Sequence[Point | None]) -> tuple[Row, ...]:
    rows = [
        Row("TTFT", _timed([None if point is None else point.ttft for point in points])),
        Row("TPOT", _timed([None if point is None else point.tpot for point in points])),
        Row("KV cache", _sized([_cache_bytes(point) for point in points], 0)),
        Row("peak memory", _sized([_peak_bytes(point) for point in points], _peak_noise(points))),
    ]
    return tuple(row for row in rows if any(cell.value is not None for cell in row.cells))


def _cache_bytes(point: Point | None) -> int | None:
    if point is None or not point.cache:
        return None
    return sum(row.logical_bytes for row in point.held)


def _peak_bytes(point: Point | None) -> int | None:
    return None if point is None or point.memory is None else point.memory.peak_bytes


def _peak_noise(points: Sequence[Point | None]) -> float:
    observers = {point.memory.observer for point in points if point is not None and point.memory is not None}
    return _ALLOCATOR_NOISE if observers <= {"cuda"} else _C_LIBRARY_NOISE


def _timed(samples: Sequence[Sample | None]) -> tuple[Cell, ...]:
    first = samples[0]
    cells = []
    for number, sample in enumerate(samples):
        if sample is None or first is None or number == 0:
            cells.append(Cell(None if sample is None else sample.median))
            continue
        found = ratio(sample, first).widened(PROCESS_NOISE)
        apart = "faster" if found.value < 1 else "slower"
        verdict = {True: "same within noise", False: apart, None: "too few repeats"}[found.same]
        cells.append(Cell(sample.median, found, verdict))
    return tuple(cells)


def _sized(sizes: Sequence[int | None], noise: float) -> tuple[Cell, ...]:
    first = sizes[0]
    cells = []
    for number, size in enumerate(sizes):
        if size is None or first is None or number == 0:
            cells.append(Cell(size))
            continue
        near = abs(size - first) <= noise * first
        verdict = "same" if size == first else "same within noise" if near else "differs"
        found = Ratio(size / first, None, None, "bytes") if first else None
        cells.append(Cell(size, found, verdict))
    return tuple(cells)


_FACTS: tuple[tuple[str, Callable[[ProfileReport], Any]], ...] = (
    ("model", lambda report: report.model and report.model.id),
    ("model revision", lambda report: report.model and report.model.revision),
    ("model overrides", lambda report: report.model and (dict(report.model.overrides) or None)),
    ("engine", lambda report: report.engine),
    ("engine version", lambda report: report.engine_version),
    ("dtype", lambda report: report.dtype),
    ("weights", lambda report: report.weights and report.weights.bytes),
    ("ranks", lambda report: report.ranks),
    ("interrupted", lambda report: report.interrupted),
)
_OF_THE_MOMENT = frozenset(
    ("time", "mhz", "available_bytes", "free_bytes", "used_by_others_bytes", "load_average", "readings")
)
"""Of an environment: what no two runs have in common."""


def _differences(runs: Sequence[Saved]) -> tuple[Difference, ...]:
    facts = []
    for run in runs:
        of_run = {name: value for name, get in _FACTS if (value := get(run.report)) is not None}
        # As a file has them: what was just measured has tuples where a saved run has lists.
        of_run |= _flat("settings", jsonable(run.report.settings))
        of_run |= _flat("environment", jsonable(run.report.environment))
        facts.append(of_run)
    names = dict.fromkeys(name for of_run in facts for name in of_run)
    columns = ((name, tuple(of_run.get(name) for of_run in facts)) for name in names)
    return tuple(Difference(name, values) for name, values in columns if any(value != values[0] for value in values))


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Nested mappings by dotted names, {"gpus": [{"driver": 1}]} as gpus[0].driver; without what is of the moment."""
    if isinstance(value, Mapping):
        parts = [(f"{name}.{key}", item) for key, item in value.items() if key not in _OF_THE_MOMENT]
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        parts = [(f"{name}[{number}]", item) for number, item in enumerate(value)]
    else:
        return {name: value}
    found: dict[str, Any] = {}
    for part, item in parts:
        found |= _flat(part, item)
    return found
