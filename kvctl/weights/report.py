"""What `kvctl quantize` reports: the model as it was, and each format beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl import __version__
from kvctl.record import Record
from kvctl.reports import ModelInfo

if TYPE_CHECKING:
    from kvctl.measure.quality import Quality
    from kvctl.reports import Fit
    from kvctl.weights.judge import CacheJudged, Judged
    from kvctl.weights.kv_run import KvPart

SCHEMA = "kvctl.quantize/1"
CONTEXT = 4096
"""Tokens at which bytes of caches are compared."""


class Gate(Record):
    """Bounds of what a format may cost, in percent; None: none."""

    most_change: float | None = None
    """Of the perplexity."""
    least_top1: float | None = None

    def __bool__(self) -> bool:
        return self.most_change is not None or self.least_top1 is not None

    def broken(self, found: Quality | None) -> list[str]:
        """What it breaks, in words."""
        if found is None:
            return []
        out = []
        if self.most_change is not None and not found.perplexity_change.value <= self.most_change:
            out.append(f"perplexity {_signed(found.perplexity_change.value)}%, and {self.most_change:g}% are allowed")
        if self.least_top1 is not None and not 100 * found.top1.value >= self.least_top1:
            out.append(f"top-1 {found.top1.value:.1%}, and {self.least_top1:g}% are asked for")
        return out


def _signed(value: float) -> str:
    """With as many digits as show that it is not nothing."""
    return f"{value:+.2f}" if abs(value) >= 0.01 or not value else f"{value:+.1g}"


class Cell(Record):
    """A format of the cache with the weights of one row."""

    name: str
    kv_bytes: int
    """Of one sequence of the context, from the format's rule."""
    judged: CacheJudged | None = None
    predicted_bytes: int | None = None
    """What the rule says of the tokens whose bytes were measured."""
    fit: Fit | None = None
    """With both on the GPUs that are named."""
    broken: tuple[str, ...] = ()
    pareto: bool = False

    @property
    def quality(self) -> Quality | None:
        """Against the original with the plain cache."""
        return None if self.judged is None else self.judged.quality

    @property
    def agrees(self) -> bool | None:
        """Whether the cache held what its rule says; None where it was not run."""
        if self.judged is None or self.judged.kv_bytes is None or self.predicted_bytes is None:
            return None
        return self.judged.kv_bytes == self.predicted_bytes

    def to_dict(self) -> dict[str, Any]:
        judged, found = self.judged, self.quality
        return {
            "name": self.name,
            "kv_bytes": self.kv_bytes,
            "tokens": None if judged is None else judged.kv_tokens,
            "measured_bytes": None if judged is None else judged.kv_bytes,
            "predicted_bytes": self.predicted_bytes,
            "agrees": self.agrees,
            "perplexity": None if judged is None else judged.perplexity,
            "quality": None if found is None else found.to_dict(),
            "tokens_per_second": None if judged is None else judged.tokens_per_second,
            "fit": None if self.fit is None else self.fit.to_dict(),
            "pareto": self.pareto,
            "broken": list(self.broken),
            "error": None if judged is None else judged.error,
        }


class Row(Record):
    """One format: what was planned, made and measured."""

    name: str
    title: str
    dtype: str
    """Of what is not packed."""
    group: int | None
    parameters: int
    predicted_bytes: int | None
    """Of the checkpoint's tensors, from headers alone; None where it cannot be made."""
    predicted_peak_bytes: int | None = None
    """Memory while it is made, beside what Python, torch and transformers take."""
    disk_bytes: int | None = None
    """On the disk while it is made, at most."""
    tensor_bytes: int | None = None
    """Of the checkpoint's tensors, as its files have them."""
    peak_bytes: int | None = None
    seconds: float | None = None
    """That making it took."""
    made_with: str = ""
    folder: Path | None = None
    """Where it is, if it was kept."""
    judged: Judged | None = None
    checked: tuple[str, ...] = ()
    facts: Mapping[str, Any] = {}
    """Of the format alone: tensor-parallel sizes, errors of the search."""
    freed_bytes: int | None = None
    """Of the original's tensors."""
    freed_tokens: int | None = None
    """Tokens of KV cache that fit into these."""
    caches: tuple[Cell, ...] = ()
    """Formats of the cache with these weights, the plain one first, where several are asked about."""
    fit: Fit | None = None
    """With the plain cache, on the GPUs that are named."""
    error: str | None = None
    broken: tuple[str, ...] = ()
    pareto: bool = False
    """No other has less divergence in fewer bytes."""
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int | None:
        """As made, or else as predicted."""
        return self.predicted_bytes if self.tensor_bytes is None else self.tensor_bytes

    @property
    def bits(self) -> float | None:
        """A parameter takes, scales and what is not packed included."""
        return 8 * self.bytes / self.parameters if self.bytes is not None and self.parameters else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": self.name,
            "title": self.title,
            "dtype": self.dtype,
            "group": self.group,
            "parameters": self.parameters,
            "predicted_bytes": self.predicted_bytes,
            "tensor_bytes": self.tensor_bytes,
            "bits_per_parameter": self.bits,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "peak_bytes": self.peak_bytes,
            "disk_bytes": self.disk_bytes,
            "seconds": self.seconds,
            "made_with": self.made_with or None,
            "folder": None if self.folder is None else str(self.folder),
            "checked": list(self.checked),
            "facts": dict(self.facts),
            "judged": None if self.judged is None else self.judged.to_dict(),
            "freed_bytes": self.freed_bytes,
            "freed_tokens": self.freed_tokens,
            "caches": [cell.to_dict() for cell in self.caches],
            "fit": None if self.fit is None else self.fit.to_dict(),
            "pareto": self.pareto,
            "broken": list(self.broken),
            "error": self.error,
            "notes": list(self.notes),
        }


class QuantizeReport(Record):
    """Everything that one `kvctl quantize` made and measured."""

    model: ModelInfo
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: tuple[Row, ...] = ()
    """The model as it was first."""
    context: int = CONTEXT
    """Tokens at which bytes of caches are told, and what fits."""
    gpus: str | None = None
    """As `fit` names them."""
    kv: KvPart | None = None
    """Of the cache, where it was asked about."""
    dry: bool = False
    """Nothing was made."""
    process_bytes: int | None = None
    """What Python, torch and transformers take, beside which memory is told; of a plan."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def original(self) -> Row:
        return self.rows[0]

    @property
    def broken(self) -> list[str]:
        """Bounds that formats break."""
        cells = [(f"{row.name}, {cell.name}", cell.broken) for row in self.rows for cell in row.caches]
        out = [
            f"{name}: {what}"
            for name, broken in [(row.name, row.broken) for row in self.rows] + cells
            for what in broken
        ]
        return out + (self.kv.broken if self.kv is not None else [])

    @property
    def failed(self) -> bool:
        """Whether a format could not be made or measured."""
        return any(row.error is not None for row in self.rows) or any(
            cell.judged is not None and cell.judged.error is not None for row in self.rows for cell in row.caches
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "kvctl_version": __version__,
            "model": self.model.to_dict(),
            "settings": dict(self.settings),
            "environment": dict(self.environment),
            "dry_run": self.dry,
            "process_bytes": self.process_bytes,
            "context": self.context,
            "gpus": self.gpus,
            "results": [row.to_dict() for row in self.rows],
            "kv": None if self.kv is None else self.kv.to_dict(),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "interrupted": self.interrupted,
        }


def ranked(rows: list[Row]) -> tuple[Row, ...]:
    """With those marked that no other beats in bytes and divergence both: rows, or where they have several caches these."""
    places = [_place(row) for row in rows]
    cells = [_cell_place(row, cell) for row in rows for cell in row.caches]
    marks = iter(cells)
    out = []
    for row, own in zip(rows, places, strict=True):
        caches = tuple(cell.replace(pareto=_best(next(marks), cells)) for cell in row.caches)
        out.append(row.replace(pareto=_best(own, places), caches=caches))
    return tuple(out)


_Place = tuple[int, float] | None
"""Bytes, and nats of divergence; None where it was not measured."""


def _best(own: _Place, places: list[_Place]) -> bool:
    return own is not None and not any(
        other is not None and other != own and other[0] <= own[0] and other[1] <= own[1] for other in places
    )


def _place(row: Row) -> _Place:
    if row.judged is None or row.bytes is None:
        return None
    found = row.judged.quality
    return row.bytes, 0.0 if found is None else found.kl.value


def _cell_place(row: Row, cell: Cell) -> _Place:
    if row.bytes is None or cell.judged is None or cell.judged.error is not None:
        return None
    return row.bytes + cell.kv_bytes, 0.0 if cell.quality is None else cell.quality.kl.value
