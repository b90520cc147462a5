"""ScissorHands at work. Imported where torch is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvctl.techniques.policy import Policy, Seen, best, ranked

if TYPE_CHECKING:
    from torch import Tensor

    from kvctl.techniques.keep import Place
    from kvctl.techniques.keeps.scissorhands import ScissorHands


class Unimportant(Policy):
    """Counts [batch, KV heads, held] in int32: to how many of the last queries each token was of no importance."""

    def __init__(self, keep: ScissorHands, place: Place) -> None:
        super().__init__(keep, place)
        self._rule = keep
        self.counts: Tensor | None = None
        self._due: Tensor | None = None
        self._padding: list[int] = []

    def see(self, seen: Seen) -> None:
        rule, now = self._rule, seen.first + seen.new
        if seen.valid is not None:
            fresh = (~seen.valid[:, 0, seen.held - seen.new :]).sum(-1).tolist()
            before = self._padding or [0] * len(fresh)
            self._padding = [a + b for a, b in zip(before, fresh, strict=True)]
        counts = torch.zeros(seen.keys.shape[:3], dtype=torch.int32, device=seen.keys.device)
        if self.counts is not None:
            counts[..., : self.counts.shape[2]] = self.counts
        # Queries of this pass that the next decision looks back on.
        coming = now - (rule.next_drop(now) - rule.history)
        if seen.held > rule.kept(now, 0, self.at):
            self._due = self._count(seen, rule.history) + (counts if seen.new < rule.history else 0)
            self.counts = self._count(seen, coming)
        else:
            self.counts = counts + self._count(seen, coming)

    def _count(self, seen: Seen, last: int) -> Tensor:
        """Over the `last` newest queries, or as many as there are."""
        counts = torch.zeros(seen.keys.shape[:3], dtype=torch.int32, device=seen.keys.device)
        if last <= 0:
            return counts
        places = torch.arange(seen.held, device=counts.device)
        padding = torch.tensor(self._padding or [0], device=counts.device)[:, None, None, None, None]
        for start, probabilities in seen.probabilities(last=last):
            own = torch.arange(start, start + probabilities.shape[3], device=counts.device)
            # Tokens that a query's text has, itself included.
            texts = (own + seen.first + 1)[:, None] - padding
            seen_by = places[None, :] <= (own + seen.held - seen.new)[:, None]
            if seen.valid is not None:
                at = own + seen.held - seen.new
                seen_by = seen_by & seen.valid[:, :, None, None, :] & seen.valid[:, :, None, at, None]
            counts += ((probabilities < 1 / texts) & seen_by).sum((2, 3), dtype=torch.int32)
        return counts

    def choose(self, held: int, target: int, seen: Seen | None) -> Tensor:
        assert self._due is not None
        counts, self._due = self._due, None
        return best(ranked(-counts, self.keep, seen.valid if seen is not None else None), target)

    def gather(self, places: Tensor) -> None:
        assert self.counts is not None
        self.counts = self.counts.gather(2, places)

    def reorder(self, beams: Tensor) -> None:
        self.counts = None if self.counts is None else self.counts.index_select(0, beams)
        self._padding = [self._padding[beam] for beam in beams.tolist()] if self._padding else []
