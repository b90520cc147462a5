"""Measurements of one's own beside published ones: how far predictions of a setup are off, and how sure one then is.

What of a measurement carries over was looked at on the published figures that the fit is judged on (tests/data/speed.jsonl): each
figure was predicted by a fit without its combination of model, card and engine, and then corrected by the median of the others.

- Of the same model on the same card and engine (300 TTFT, 476 TPOT, 748 rates of other loads; 256, 355 and 382 of other formats and
  splits): corrected in full, the errors' 90th percentiles are 0.65, 0.60 and 0.82 of what they were (other splits: 0.93, 0.74, 0.89).
  A share of 0.85 would be a little better, and the whole is simpler.
- Of other models (269, 394 and 699): corrected in full they are 1.17, 1.02 and 1.09 of what they were, by half 0.97, 0.98 and 1.00.
  The engine and the card are in the fit already; half of what is measured is believed, and no range becomes narrower.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from kvctl.errors import KvctlError
from kvctl.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvctl.spec import ModelSpec
    from kvctl.speed import Prepared, Setup

KEPT = {"ttft": 0.65, "tpot": 0.60, "rate": 0.82}
"""Share of a published spread that stays where the same model was measured with another load."""
KINDS = ("ttft", "tpot")
OTHER = 0.5
"""Share of what was measured of another model that is believed, as a logarithm."""
REFERENCE = "transformers"
"""What is no server: servers reach what it reaches."""


class Part(Record):
    """What was measured of one kind of figure."""

    factor: float
    """On what is predicted."""
    kept: float
    """Share of the published spread."""
    apart: float
    """The logarithm that measurements lie from their median, the farthest."""


_NOTHING = Part(1.0, 1.0, 0.0)


class Calibration(Record):
    """Factors on what is predicted, and what they make of ranges."""

    parts: dict[str, Part]
    """By kind of figure: ttft, tpot; none where it was not measured."""
    words: str
    """What was measured."""

    def factor(self, kind: str) -> float:
        return self.parts.get(kind, _NOTHING).factor

    def spread(self, kind: str, low: float, high: float) -> tuple[float, float]:
        """The logarithms of a range around a calibrated figure: as wide as measurements are apart, at least."""
        part = self.parts.get("tpot" if kind == "rate" else kind, _NOTHING)
        kept = KEPT[kind] if part.kept < 1 and kind == "rate" else part.kept
        return min(kept * low, -part.apart), max(kept * high, part.apart)


class Measurement(Record):
    """What a saved result says of one load on one setup."""

    engine: str
    card: str
    spec: ModelSpec
    prompt: int
    answer: int
    concurrency: float
    ttft: float | None
    """Seconds."""
    tpot: float | None
    weights: str | None = None
    tensor: int = 1
    where: str = ""
    """The file."""
    before: float = 0.0
    """Tokens of a prompt that were found in the cache."""
    together: bool = False
    """Whether requests were computed as one batch, as `kvctl profile` does, and TTFT is that of them all."""


Tell = Callable[[Measurement, str], None]
"""Is told why a measurement is not used, or, with nothing, that it is."""


def silent(_: Measurement, __: str) -> None:
    pass


def calibration(setup: Setup, measurements: Sequence[Measurement], tell: Tell = silent) -> Calibration | None:
    """What measurements of this engine on this card say of a setup; None without any.

    Those of this model, in whatever format and split, go before those of others. Without either, what transformers reached
    on the card is a bound: a server that was predicted to be slower is taken to be as quick; one that was predicted to be
    quicker stays as it is, and no range becomes narrower.
    """
    known = _known(setup, [one for one in measurements if one.card == setup.card.name], tell)
    own = [one for one, _ in known if not _is_reference(setup, one)]
    mine = [one for one in own if one.spec.id == setup.spec.id]
    used = mine or own or [one for one, _ in known]
    logs = {kind: [found[kind] for one, found in known if one in used and kind in found] for kind in KINDS}
    if own:
        believed = 1.0 if mine else OTHER
        parts = {kind: _part(kind, found, believed) for kind, found in logs.items() if found}
        words = "measured" if mine else "measured with other models"
    else:
        parts = {
            kind: Part(math.exp(median(found)), 1.0, 0.0) for kind, found in logs.items() if found and median(found) < 0
        }
        words = f"no slower than {REFERENCE}"
    for one, found in known:
        tell(one, _passed(setup, one, bool(mine)) if one not in used else "" if found.keys() & parts.keys() else
             f"{REFERENCE} was slower there than a server is predicted to be")  # fmt: skip
    return Calibration(parts, f"{words}: {_files(used)}") if parts else None


def _is_reference(setup: Setup, one: Measurement) -> bool:
    return one.engine == REFERENCE != setup.engine


def _passed(setup: Setup, one: Measurement, mine: bool) -> str:
    """Why others go before it."""
    if _is_reference(setup, one):
        return f"{setup.engine} itself was measured there"
    assert mine
    return f"it is about {one.spec.id}, and others are about {setup.spec.id}"


def _known(setup: Setup, measurements: Sequence[Measurement], tell: Tell) -> list[tuple[Measurement, dict[str, float]]]:
    """Measurements of the engine, or of transformers, with the logarithms of measured over predicted, by kind of figure."""
    from kvctl.speed import ALIKE  # which imports this

    out = []
    ready: dict[tuple[str, int, str], Prepared | KvctlError] = {}
    for one in measurements:
        if ALIKE.get(one.engine, one.engine) != ALIKE.get(setup.engine, setup.engine) and one.engine != REFERENCE:
            continue
        key = one.spec.id, one.tensor, one.weights or setup.weights
        if key not in ready:
            ready[key] = _prepared(setup, one)
        prepared = ready[key]
        if isinstance(prepared, KvctlError):
            tell(one, prepared.message)
            continue
        if one.together:
            first, between = prepared.together(one.prompt, one.answer, one.concurrency)
        else:
            first, between = prepared.seconds(one.prompt, one.answer, one.concurrency, one.before)
        found = {kind: math.log(measured / predicted) for kind, measured, predicted in
                 (("ttft", one.ttft, first), ("tpot", one.tpot, between)) if measured}  # fmt: skip
        if found:
            out.append((one, found))
        else:
            tell(one, "it has neither TTFT nor TPOT")
    return out


def _part(kind: str, logs: list[float], believed: float) -> Part:
    middle = median(logs)
    apart = max(abs(one - middle) for one in logs)
    return Part(math.exp(believed * middle), KEPT[kind] if believed == 1 else 1.0, apart)


def _files(measurements: Sequence[Measurement]) -> str:
    return ", ".join(sorted({one.where for one in measurements}))


def _prepared(setup: Setup, one: Measurement) -> Prepared | KvctlError:
    """What was measured, as the setup's engine would have it with its own settings."""
    from kvctl.speed import prepare  # which imports this

    try:
        return prepare(setup.replace(
            spec=one.spec, tensor=one.tensor, pipeline=1, data=1, dealt=1, expert=False, replicas=1,
            weights=one.weights or setup.weights, batched=None,
        ))  # fmt: skip
    except KvctlError as error:
        return error
