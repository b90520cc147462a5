"""SnapKV at work. Imported where torch is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvctl.techniques.policy import Policy, Seen, best, ranked

if TYPE_CHECKING:
    from torch import Tensor

    from kvctl.techniques.keep import Place
    from kvctl.techniques.keeps.snapkv import SnapKV


class LastQueries(Policy):
    """What the last queries of a pass attend to; nothing is kept from pass to pass."""

    def __init__(self, keep: SnapKV, place: Place) -> None:
        super().__init__(keep, place)
        self._window, self._kernel, self._largest = keep.window, keep.kernel, keep.largest

    def choose(self, held: int, target: int, seen: Seen | None) -> Tensor:
        assert seen is not None
        sums = sum(probabilities.sum(3) for _, probabilities in seen.probabilities(last=self._window))
        assert isinstance(sums, torch.Tensor)
        before = held - min(self._window, seen.new)
        scores = sums.new_zeros(*sums.shape[:2], held)
        if before:
            pool = torch.nn.functional.max_pool1d if self._largest else torch.nn.functional.avg_pool1d
            # [batch, KV heads × group, before]: pooling takes no more dimensions.
            pooled = pool(sums[..., :before].flatten(1, 2), self._kernel, stride=1, padding=self._kernel // 2)
            scores[..., :before] = pooled.view(*sums.shape[:3], before).mean(2)
        return best(ranked(scores, self.keep, seen.valid), target)
