"""StreamingLLM at work. Imported where torch is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvctl.techniques.policy import Policy, Seen
from kvctl.techniques.rope import Rope

if TYPE_CHECKING:
    from torch import Tensor

    from kvctl.techniques.keep import Place
    from kvctl.techniques.keeps.streaming_llm import StreamingLLM


class Streaming(Policy):
    """The first stay, and the oldest of the others goes."""

    def __init__(self, keep: StreamingLLM, place: Place, model: Any) -> None:
        super().__init__(keep, place)
        self._sinks = keep.sinks
        self._rope = Rope(model, keep.name) if keep.replaced else None

    def choose(self, held: int, target: int, seen: Seen | None) -> slice:
        return slice(self._sinks, self._sinks + held - target)

    def turn(self, keys: Tensor, first: int) -> Tensor:
        if self._rope is None or not first:
            return keys
        sinks = keys[:, :, : self._sinks]
        by = torch.full((1, sinks.shape[2]), first, device=keys.device)
        return torch.cat([self._rope.turned(sinks, by), keys[:, :, self._sinks :]], dim=2)
