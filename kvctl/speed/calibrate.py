"""Measurements of one's own in place of published ones: how far predictions of a setup are off, and how sure one then is."""

from __future__ import annotations

from kvctl.record import Record

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
