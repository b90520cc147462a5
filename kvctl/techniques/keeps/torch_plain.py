"""Evictions that look at no query: the newest, the shortest keys, lots. Imported where torch is."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from kvctl.techniques.policy import Policy, Seen, best, ranked

if TYPE_CHECKING:
    from torch import Tensor

    from kvctl.techniques.keep import Place
    from kvctl.techniques.keeps.random_tokens import Random


class Newest(Policy):
    """The oldest go, but for places that are fixed."""

    def choose(self, held: int, target: int, seen: Seen | None) -> slice:
        return slice(self.keep.fixed, self.keep.fixed + held - target)


class ShortKeys(Policy):
    """Keys of large norm go."""

    def choose(self, held: int, target: int, seen: Seen | None) -> Tensor:
        assert seen is not None
        return best(ranked(-seen.keys.float().norm(dim=-1), self.keep, seen.valid), target)


class Lots(Policy):
    """Numbers [batch, KV heads, held] in float32 that tokens drew; those that drew low ones go."""

    def __init__(self, keep: Random, place: Place) -> None:
        super().__init__(keep, place)
        self._seed = keep.seed
        self.drawn: Tensor | None = None

    def see(self, seen: Seen) -> None:
        batch, heads = seen.keys.shape[:2]
        places = torch.arange(seen.first, seen.first + seen.new, device=seen.keys.device)
        salts = [random.Random(f"{self._seed} {self.at.layer} {head}").getrandbits(32) for head in range(heads)]
        fresh = _mixed(places + torch.tensor(salts, device=places.device)[:, None]) / 2.0**32
        fresh = fresh[None].expand(batch, -1, -1)
        self.drawn = fresh.clone() if self.drawn is None else torch.cat([self.drawn, fresh], 2)

    def choose(self, held: int, target: int, seen: Seen | None) -> Tensor:
        assert self.drawn is not None
        return best(ranked(self.drawn, self.keep, seen.valid if seen is not None else None), target)

    def gather(self, places: Tensor) -> None:
        assert self.drawn is not None
        self.drawn = self.drawn.gather(2, places)

    def reorder(self, beams: Tensor) -> None:
        self.drawn = None if self.drawn is None else self.drawn.index_select(0, beams)


def _mixed(numbers: Tensor) -> Tensor:
    """32 bits that look drawn, of each number: what comes out depends on neither chunks nor the batch."""
    bits = (numbers * 0x9E3779B1) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = ((bits ^ (bits >> shift)) * factor) & 0xFFFFFFFF
    return bits ^ (bits >> 16)
