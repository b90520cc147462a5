"""What a format's bytes buy: tokens in the memory it frees, formats of the cache beside it, and what then fits on GPUs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvctl.engines import TRANSFORMERS
from kvctl.formats import model_dtype
from kvctl.record import Record
from kvctl.size import SizePlan, size
from kvctl.spec import Weights
from kvctl.weights.report import CONTEXT, Cell, Gate, Row

if TYPE_CHECKING:
    from kvctl.formats import DType
    from kvctl.ranks import Hardware
    from kvctl.reports import Fit
    from kvctl.spec import ModelSpec
    from kvctl.techniques import Technique


class Terms(Record):
    """What every row is asked."""

    spec: ModelSpec
    context: int = CONTEXT
    hardware: Hardware | None = None
    techniques: tuple[Technique, ...] = ()
    """Formats of the cache, the plain one first; empty where none are asked about."""
    gate: Gate = Gate()


def gpus(hardware: Hardware | None) -> str | None:
    """ "4 × NVIDIA H100 80GB HBM3"."""
    if hardware is None:
        return None
    names = Counter(device.name for device in hardware.devices)
    return " + ".join(f"{count} × {name}" if count > 1 else name for name, count in names.items())


def bought(terms: Terms, row: Row, original: Row) -> Row:
    """The row with what it buys, as far as its bytes are known.

    Raises:
        ConfigError: a technique does not work with the model.
        UsageError: the GPUs cannot be shared so.

    """
    if original.bytes is None or row.bytes is None:
        return row
    freed = original.bytes - row.bytes
    each = size(terms.spec, CONTEXT, SizePlan(TRANSFORMERS)).kv_bytes_per_token
    dtype = model_dtype(row.dtype)
    return row.replace(
        freed_bytes=freed,
        freed_tokens=max(freed, 0) // each if each else None,
        fit=_fit(terms, row, row.bytes, dtype, None),
        caches=tuple(_cell(terms, row, row.bytes, dtype, technique) for technique in terms.techniques),
    )


def _cell(terms: Terms, row: Row, weights: int, dtype: DType | None, technique: Technique) -> Cell:
    plan = SizePlan(TRANSFORMERS, dtype=dtype, technique=technique)
    cell = Cell(
        technique.name, size(terms.spec, terms.context, plan).kv_bytes, fit=_fit(terms, row, weights, dtype, technique)
    )
    there = () if row.judged is None else row.judged.caches
    judged = next((one for one in there if one.name == technique.name), None)
    if judged is None:
        return cell
    predicted = None if judged.error is not None else size(terms.spec, judged.kv_tokens, plan).kv_bytes
    return cell.replace(judged=judged, predicted_bytes=predicted, broken=tuple(terms.gate.broken(judged.quality)))


def _fit(terms: Terms, row: Row, weights: int, dtype: DType | None, technique: Technique | None) -> Fit | None:
    """By transformers' rules, as it is what measures."""
    if terms.hardware is None:
        return None
    spec = terms.spec.replace(weights=Weights(weights, row.parameters, f"as {row.name}"), tensors=None)
    plan = SizePlan(TRANSFORMERS, contexts=(terms.context,), dtype=dtype, hardware=terms.hardware, technique=technique)
    return size(spec, terms.context, plan).fit
