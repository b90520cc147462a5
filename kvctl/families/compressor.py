"""The state of DeepSeek V4's compressors between two entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvctl.spec import Formats, LayerState, Retention, Workload

if TYPE_CHECKING:
    from kvctl.spec import Rational


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

    def growth(self, work: Workload, fmt: Formats, keep: Retention) -> Rational:
        # A sawtooth: over a whole window it adds nothing.
        return 0
