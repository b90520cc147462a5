"""Expected attention at work. Imported where torch is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvctl.techniques.policy import Policy, Seen, best, ranked
from kvctl.techniques.rope import Rope

if TYPE_CHECKING:
    from torch import Tensor

    from kvctl.techniques.keep import Place
    from kvctl.techniques.keeps.expected import ExpectedAttention


class Expected(Policy):
    """What queries like those of a pass would attend to; nothing is kept from pass to pass."""

    def __init__(self, keep: ExpectedAttention, place: Place, model: Any) -> None:
        super().__init__(keep, place)
        self._future = keep.future
        self._rope = Rope(model, keep.name)

    def choose(self, held: int, target: int, seen: Seen | None) -> Tensor:
        assert seen is not None
        batch, kv_heads = seen.keys.shape[:2]
        mean, covariance = (part.unflatten(1, (kv_heads, -1)) for part in self._queries(seen))
        keys = seen.keys.float()
        real = seen.valid if seen.valid is not None else keys.new_ones(batch, kv_heads, held, dtype=torch.bool)
        others = real & (real.cumsum(-1) > self.keep.sinks)
        scores = keys.new_zeros(batch, kv_heads, held)
        for member in range(mean.shape[2]):
            middle = (keys * mean[:, :, member, None]).sum(-1) * seen.scaling
            spread = ((keys @ covariance[:, :, member]) * keys).sum(-1) * (seen.scaling**2 / 2)
            scores += (middle + spread).masked_fill(~others, float("-inf")).softmax(-1).nan_to_num(0.0)
        return best(ranked(scores * seen.values.float().norm(dim=-1), self.keep, seen.valid), target)

    def _queries(self, seen: Seen) -> tuple[Tensor, Tensor]:
        """Mean [batch, query heads, dim] and covariance [batch, query heads, dim, dim] of queries to come."""
        device = seen.queries.device
        # Positions are right but for what is the same for all: where padding moves them, it moves those to come as well.
        at = torch.arange(seen.first, seen.first + seen.new, device=device)[None]
        queries = self._rope.turned(seen.queries.float(), -at)
        real = (
            seen.valid[:, 0] if seen.valid is not None else at.new_ones(queries.shape[0], seen.held, dtype=torch.bool)
        )
        counted = (real & (real.cumsum(-1) > self.keep.sinks))[:, None, seen.held - seen.new :, None].float()
        count = counted.sum(2).clamp(min=1)
        mean = (queries * counted).sum(2) / count
        apart = (queries - mean[:, :, None]) * counted
        covariance = apart.transpose(-1, -2) @ apart / count[..., None]
        turn = self._turn(seen.first + seen.new, queries)
        return mean @ turn, turn.T @ covariance @ turn

    def _turn(self, first: int, like: Tensor) -> Tensor:
        """[dim, dim] that turns a row as positions from `first` on do on average."""
        dim = like.shape[-1]
        positions = torch.arange(first, first + self._future, device=like.device)[None]
        rows = torch.eye(dim, dtype=like.dtype, device=like.device)[None, :, None].expand(1, dim, self._future, dim)
        return self._rope.turned(rows, positions)[0].mean(1)
