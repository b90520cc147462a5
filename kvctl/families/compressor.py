"""The state of DeepSeek V4's compressors between two entries."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from kvctl.spec import Formats, LayerState, Retention, Workload


@dataclass(frozen=True, slots=True)
class CompressorTail(LayerState):
    """Tokens since the last full window of `ratio`: a value and a gate of `dim` each.

    Overlapping compressors carry two series for each token, and after the first window
    that window's own value (model dtype) and gate (float32).
    """

    dim: int
    ratio: int
    overlapping: bool = False
    kind: ClassVar[str] = "compressor_state"

    def tokens(self, work: Workload, keep: Retention) -> int:
        return work.context % self.ratio

    def size(self, work: Workload, fmt: Formats, keep: Retention) -> int:
        series = 2 if self.overlapping else 1
        size = (work.context % self.ratio) * 2 * series * self.dim * fmt.model.bytes
        if self.overlapping and work.context >= self.ratio:
            size += self.ratio * self.dim * (fmt.model.bytes + 4)
        return size

    def growth(self, work: Workload, fmt: Formats, keep: Retention) -> Fraction:
        # A sawtooth: over a whole window it adds nothing.
        return Fraction(0)
