"""StreamingLLM at work. Imported where torch is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvctl.techniques.policy import Policy, Seen, best, ranked
from kvctl.techniques.rope import Rope

if TYPE_CHECKING:
    from torch import Tensor

    from kvctl.techniques.keep import Place
    from kvctl.techniques.keeps.streaming_llm import StreamingLLM


class Streaming(Policy):
    """The first stay, and the oldest of the others goes. The first are tokens: padding before them goes before anything else."""

    def __init__(self, keep: StreamingLLM, place: Place, model: Any) -> None:
        super().__init__(keep, place)
        self._sinks = keep.sinks
        self._rope = Rope(model, keep.name) if keep.replaced else None
        self._valid: Tensor | None = None
        """[batch, held] of the last pass, where something is padding."""
        self._gone: Tensor | None = None
        """[batch]: tokens of each text that went."""

    def see(self, seen: Seen) -> None:
        self._valid = None if seen.valid is None else seen.valid[:, 0]
        if self._valid is not None and self._gone is None:
            # Until now nothing was padding: what went was all tokens, as many of each text.
            gone = seen.first + seen.new - seen.held
            self._gone = torch.full((self._valid.shape[0],), gone, device=self._valid.device)

    def choose(self, held: int, target: int, seen: Seen | None) -> Tensor | slice:
        if self._valid is None:
            return slice(self._sinks, self._sinks + held - target)
        assert seen is not None
        assert seen.valid is not None
        ages = torch.arange(held, device=seen.keys.device).expand(seen.valid.shape)
        return best(ranked(ages, self.keep, seen.valid), target)

    def gather(self, places: Tensor) -> None:
        assert self._valid is not None
        assert self._gone is not None
        left = self._valid.gather(1, places[:, 0])
        self._gone = self._gone + self._valid.sum(-1) - left.sum(-1)
        self._valid = left

    def turn(self, keys: Tensor, first: int) -> Tensor:
        if self._rope is None or not first:
            return keys
        if self._valid is None:
            sinks = keys[:, :, : self._sinks]
            by = torch.full((1, sinks.shape[2]), first, device=keys.device)
            return torch.cat([self._rope.turned(sinks, by), keys[:, :, self._sinks :]], dim=2)
        assert self._gone is not None
        # Each text's own first tokens, wherever they lie; of a text that is all there they stay where they are.
        places = (~self._valid).to(torch.uint8).argsort(dim=-1, stable=True)[:, : self._sinks]
        index = places[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
        sinks = keys.gather(2, index)
        moved = self._rope.turned(sinks, self._gone[:, None].expand_as(places))
        return keys.scatter(2, index, torch.where(self._gone[:, None, None, None] > 0, moved, sinks))

    def reorder(self, beams: Tensor) -> None:
        self._valid = None if self._valid is None else self._valid.index_select(0, beams)
        self._gone = None if self._gone is None else self._gone.index_select(0, beams)
