"""H2O at work. Imported where torch is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvctl.techniques.policy import Policy, Seen, best, ranked

if TYPE_CHECKING:
    from torch import Tensor

    from kvctl.techniques.keep import Place
    from kvctl.techniques.keeps.h2o import H2O


class HeavyHitters(Policy):
    """Sums [batch, KV heads, held] of the attention that each token got, in float32."""

    def __init__(self, keep: H2O, place: Place) -> None:
        super().__init__(keep, place)
        self._newest, self._largest = keep.newest, keep.largest
        self.sums: Tensor | None = None

    def see(self, seen: Seen) -> None:
        fresh = torch.zeros(seen.keys.shape[:3], dtype=torch.float32, device=seen.keys.device)
        if self.sums is not None:
            fresh[..., : self.sums.shape[2]] = self.sums
        for _, probabilities in seen.probabilities():
            group = probabilities.amax(2) if self._largest else probabilities.sum(2)
            fresh += group.sum(2)
        self.sums = fresh

    def choose(self, held: int, target: int, seen: Seen | None) -> Tensor:
        assert self.sums is not None
        valid = seen.valid if seen is not None else None
        return best(ranked(self.sums, self.keep, valid, self._newest(target)), target)

    def gather(self, places: Tensor) -> None:
        assert self.sums is not None
        self.sums = self.sums.gather(2, places)

    def reorder(self, beams: Tensor) -> None:
        self.sums = None if self.sums is None else self.sums.index_select(0, beams)
