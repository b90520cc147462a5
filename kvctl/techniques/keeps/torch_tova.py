"""TOVA at work. Imported where torch is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.techniques.policy import Policy, Seen, best, ranked

if TYPE_CHECKING:
    from torch import Tensor

    from kvctl.techniques.keep import Place
    from kvctl.techniques.keeps.tova import TOVA


class NewestQuery(Policy):
    """What the newest query of a pass attends to; nothing is kept from pass to pass."""

    def __init__(self, keep: TOVA, place: Place) -> None:
        super().__init__(keep, place)
        self._together = keep.together

    def choose(self, held: int, target: int, seen: Seen | None) -> Tensor:
        assert seen is not None
        _, probabilities = next(seen.probabilities(last=1))
        scores = probabilities[:, :, :, 0].mean(2)
        if self._together:
            scores = scores.mean(1, keepdim=True).expand_as(scores)
        return best(ranked(scores, self.keep, seen.valid), target)
