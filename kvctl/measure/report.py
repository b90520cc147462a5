"""What `kvctl profile` reports: points of measurement, each beside its prediction. Bytes are integers, times seconds.

`to_dict` is the JSON (kvctl.profile/1), derived values included; `kvctl.measure.saved` reads it back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvctl import __version__
from kvctl.measure.statistics import Sample
from kvctl.record import Record
from kvctl.reports import ModelInfo, WeightsInfo

SCHEMA = "kvctl.profile/1"


class CacheRow(Record):
    """The cache after one phase, measured and predicted, on one rank."""

    phase: str
    """prefill or decode: after it."""
    tokens: int
    """Positions of a sequence that the cache has seen."""
    logical_bytes: int
    """What its tensors show; memory that several show counts once."""
    storage_bytes: int
    """What the allocations behind them hold: a window is a view of more until the next step."""
    predicted_bytes: int
    rank: int = 0
    tensors: int = 0

    @property
    def agrees(self) -> bool:
        """Whether the prediction is right to the byte."""
        return self.logical_bytes == self.predicted_bytes

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None where nothing was predicted and something measured."""
        if self.predicted_bytes:
            return self.logical_bytes / self.predicted_bytes
        return None if self.logical_bytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        return _fields(self) | {"ratio": self.ratio, "agrees": self.agrees}


class MemoryUse(Record):
    """What the process took on the device while a point ran.

    On the CPU it is the resident set (RSS) of this process, all its threads, without children: all that lies in RAM, files
    mapped into memory included, as the kernel's high-water mark has it. Page cache that is not mapped is not in it.
    """

    observer: str
    """How the peak was read: "kernel" (the kernel's high-water mark), "samples" (a thread reading it again and again),
    "cuda" (torch's allocator)."""
    before_bytes: int
    """Before the point, what is free given back: weights, libraries, context."""
    steady_bytes: int
    """After decoding, with the cache held and what is free given back."""
    peak_bytes: int
    reserved_bytes: int | None = None
    """Of the CUDA allocator: what it keeps from the driver, at its most."""
    process_bytes: int | None = None
    """Of this process by NVML, at its most; None where it is not told."""
    sampled_peak_bytes: int | None = None
    """The most that the sampling thread saw; what is shorter than its interval escapes it."""
    mapped_bytes: int | None = None
    """Part of `steady_bytes` that are pages of mapped files (weights in safetensors) and memory shared with others."""
    anonymous_peak_bytes: int | None = None
    """The most that was the process's own, without mapped files, as the samples saw it."""
    samples: int = 0
    sampling_share: float | None = None
    """Processor time of the sampling thread over the time that was watched."""

    def to_dict(self) -> dict[str, Any]:
        return _fields(self)


class Work(Record):
    """What passes have to do, counted on the operations of one real pass."""

    prefill_flops: int
    decode_flops: int
    """Of one step of the whole batch."""
    decode_bytes: int
    """Bytes that one step has to read: weights that it uses, once, and the cache."""

    def to_dict(self) -> dict[str, Any]:
        return _fields(self)


class Limits(Record):
    """How near a point comes to what the hardware can do; shares of 1."""

    compute_share: float | None
    """Achieved FLOP/s in prefill over the peak."""
    bandwidth_share: float | None
    """Achieved bytes/s in decode over the bandwidth."""
    flops_per_second: float
    bytes_per_second: float
    binds: str
    """What a decode step waits for: "memory", "compute" or "overhead" (neither is near its limit)."""

    def to_dict(self) -> dict[str, Any]:
        return _fields(self)


class ScaledTimes(Record):
    """Estimates for the whole model, from the few layers that ran."""

    ttft_s: float
    tpot_s: float | None
    kv_bytes: int
    """Of the whole model: measured layers, each kind times how often the model has it."""
    predicted_bytes: int

    @property
    def agrees(self) -> bool:
        """Whether the prediction for the whole model is right to the byte."""
        return self.kv_bytes == self.predicted_bytes

    def to_dict(self) -> dict[str, Any]:
        return _fields(self) | {"agrees": self.agrees}


class Point(Record):
    """One context and batch."""

    context: int
    """Prompt tokens of a sequence."""
    batch: int
    decode: int
    """Tokens generated after the first."""
    ttft: Sample | None = None
    """Prefill of the whole batch up to the first token."""
    tpot: Sample | None = None
    """One step of the whole batch."""
    cache: tuple[CacheRow, ...] = ()
    memory: MemoryUse | None = None
    work: Work | None = None
    limits: Limits | None = None
    error: str | None = None
    """Why there is no more of it: out of memory, interrupted."""
    scaled: ScaledTimes | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether every prediction is right; None where no cache was measured."""
        if not self.cache:
            return None
        return all(row.agrees for row in self.cache) and (self.scaled is None or self.scaled.agrees)

    @property
    def held(self) -> tuple[CacheRow, ...]:
        """The cache after the last phase that was measured, one row a rank."""
        return tuple(row for row in self.cache if row.phase == self.cache[-1].phase)

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens a second, over the batch."""
        return None if self.ttft is None else self.context * self.batch / self.ttft.median

    @property
    def decode_rate(self) -> float | None:
        """Generated tokens a second, over the batch."""
        return None if self.tpot is None else self.batch / self.tpot.median

    def to_dict(self) -> dict[str, Any]:
        return {
            "context": self.context,
            "batch": self.batch,
            "decode": self.decode,
            "ttft": _part(self.ttft),
            "tpot": _part(self.tpot),
            "prefill_tokens_per_second": self.prefill_rate,
            "decode_tokens_per_second": self.decode_rate,
            "cache": [row.to_dict() for row in self.cache],
            "agrees": self.agrees,
            "memory": _part(self.memory),
            "work": _part(self.work),
            "limits": _part(self.limits),
            "scaled": _part(self.scaled),
            "error": self.error,
        }


class Line(Record):
    """Least squares over the measured points: value = intercept + slope × context + curve × context²."""

    what: str
    """"steady memory", "peak memory" (bytes), "TTFT" or "TPOT" (seconds)."""
    batch: int
    intercept: float
    slope: float
    predicted_slope: float | None = None
    """For memory: bytes that one more token of every sequence takes by prediction."""
    residual: float = 0.0
    """Largest distance of a point from the line, over the point's value."""
    points: int = 0
    curve: float | None = None
    """For TTFT, where at least four contexts tell it: attention grows with the square."""
    slope_error: float | None = None
    """Standard error of the slope, by how far points lie from the line or by the noise of each, whichever says more; None
    where neither says anything."""

    @property
    def unit(self) -> str:
        return "bytes" if self.what.endswith("memory") else "s"

    def at(self, context: float) -> float:
        """The value on the line."""
        return self.intercept + self.slope * context + (self.curve or 0.0) * context**2

    @property
    def told(self) -> bool:
        """Whether the slope is more than noise: of times, more than two standard errors from zero."""
        return (
            self.unit == "bytes"
            or self.curve is not None
            or (self.slope_error is not None and abs(self.slope) > 2 * self.slope_error)
        )

    @property
    def ratio(self) -> float | None:
        """The slope over the predicted one."""
        return self.slope / self.predicted_slope if self.predicted_slope else None

    def to_dict(self) -> dict[str, Any]:
        return _fields(self) | {"unit": self.unit, "ratio": self.ratio, "told": self.told}


class Try(Record):
    """One attempt of --until-oom, in a process of its own."""

    size: int
    """Context in tokens, or sequences."""
    ran: bool
    ended: str
    """"ran", or why not: "out of memory: …", "killed by …", "stopped: …"."""
    peak_bytes: int | None = None
    """Of its process in RAM on the CPU, of its tensors on a GPU; of one that broke off, as far as it was seen."""
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return _fields(self)


class UntilOom(Record):
    """The largest that really runs."""

    what: str
    """context or batch."""
    largest: int | None
    first_failed: int | None
    predicted: int | None
    """What `size` says of the same device."""
    tries: tuple[Try, ...]
    note: str = ""
    interrupted: bool = False
    """Whether it was ended before it was found: `largest` ran, and larger ones may."""

    def to_dict(self) -> dict[str, Any]:
        return _fields(self) | {"tries": [one.to_dict() for one in self.tries]}


class ProfileReport(Record):
    """Everything one `kvctl profile` run measured."""

    model: ModelInfo | None
    engine: str
    engine_version: str | None
    dtype: str | None
    weights: WeightsInfo | None
    settings: Mapping[str, Any]
    """What was asked: device, attention, prefill chunk, repeats, seed, layers kept."""
    environment: Mapping[str, Any]
    """Where it ran: versions, processor, devices, drivers."""
    points: tuple[Point, ...] = ()
    lines: tuple[Line, ...] = ()
    until_oom: UntilOom | None = None
    machine: Any = None
    """kvctl.measure.machine.Machine, where it was looked at."""
    techniques: Any = None
    """kvctl.measure.assessed.Assessment, where techniques were asked for."""
    sharing: Any = None
    """kvctl.measure.shared.Sharing, where requests with a common prefix were asked for."""
    engine_log: Any = None
    """kvctl.startlog.LogReport of another engine's start."""
    ranks: int = 1
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    interrupted: bool = False
    schema: str = SCHEMA
    version: str = __version__

    @property
    def agrees(self) -> bool | None:
        """Whether all that was measured is as predicted; None where nothing was measured that was predicted."""
        found = [point.agrees for point in self.points if point.agrees is not None]
        if self.engine_log is not None:
            found.append(self.engine_log.agrees)
        for part in (self.techniques, self.sharing):
            if part is not None and part.agrees is not None:
                found.append(part.agrees)
        return all(found) if found else None

    @property
    def found(self) -> bool:
        """Whether there is anything to keep of an interrupted run: points, techniques, or tries."""
        return (
            bool(self.points)
            or (self.techniques is not None and bool(self.techniques.rows))
            or (self.sharing is not None and self.sharing.agrees is not None)
            or (self.until_oom is not None and bool(self.until_oom.tries))
        )

    @property
    def failed(self) -> bool:
        """Whether a point could not be measured to its end, or nothing runs at all."""
        if self.until_oom is not None and self.until_oom.largest is None:
            return True
        return any(point.error is not None for point in self.points)

    def to_dict(self) -> dict[str, Any]:
        out = {
            "schema": self.schema,
            "kvctl_version": self.version,
            "model": _part(self.model),
            "engine": {"name": self.engine, "version": self.engine_version},
            "dtype": self.dtype,
            "weights": _part(self.weights),
            "ranks": self.ranks,
            "settings": self.settings,
            "environment": self.environment,
            "agrees": self.agrees,
            "points": [point.to_dict() for point in self.points],
            "lines": [line.to_dict() for line in self.lines],
            "until_oom": _part(self.until_oom),
            "machine": _part(self.machine),
            "techniques": _part(self.techniques),
            "sharing": _part(self.sharing),
            "engine_log": _part(self.engine_log),
            "notes": self.notes,
            "warnings": self.warnings,
            "interrupted": self.interrupted,
        }
        cleaned: dict[str, Any] = jsonable(out)
        return cleaned


def jsonable(value: Any) -> Any:
    """As strict JSON has it: no NaN and no infinity (they become null); what JSON does not know, as its text."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def _fields(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record._fields}


def _part(record: Any) -> Any:
    return None if record is None else record.to_dict()
