"""Measurements of one's own in place of published ones: how far predictions of a setup are off, and how sure one then is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvctl.spec import ModelSpec
    from kvctl.speed import Setup

AGAIN = 0.10
"""Logarithm that two runs of one setup differ by, nine times of ten. Assumed: noise of a quiet server is less, of a busy one more."""
AWAY = 0.5
"""Share of the published spread that stays where the load is another than was measured. Assumed."""


class Calibration(Record):
    """Factors on what is predicted."""

    ttft: float
    tpot: float
    words: str
    """What was measured."""

    def spread(self, kind: str, low: float, high: float) -> tuple[float, float]:
        """The logarithms of a range around a calibrated figure."""
        return AWAY * low - AGAIN, AWAY * high + AGAIN


class Measurement(Record):
    """What a saved result says of one setup."""

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


def calibration(setup: Setup, measurements: Sequence[Measurement]) -> Calibration | None:
    """Factors from the measurements of this engine on this card: the median of measured over predicted; None without any.

    A measurement of another model or another split counts too: what an engine reaches of a card is what carries over.
    """
    from statistics import median

    from kvctl.speed import prepare

    alike = [one for one in measurements if one.engine == setup.engine and one.card == setup.card.name]
    mine = [one for one in alike if one.spec.id == setup.spec.id and one.tensor == setup.tensor] or alike
    ttft, tpot = [], []
    for one in mine:
        prepared = prepare(
            setup.replace(
                spec=one.spec, tensor=one.tensor, pipeline=1, data=1, replicas=1, weights=one.weights or setup.weights
            )
        )
        first, between = prepared.seconds(one.prompt, one.answer, one.concurrency)
        ttft += [one.ttft / first] if one.ttft else []
        tpot += [one.tpot / between] if one.tpot else []
    if not ttft and not tpot:
        return None
    files = sorted({one.where for one in mine})
    return Calibration(median(ttft) if ttft else 1.0, median(tpot) if tpot else 1.0, f"measured: {', '.join(files)}")
