"""What an eviction does while a model runs: sees queries, and says which tokens stay. Imported where torch is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kvctl.techniques.keep import Keep, Place

_AT_ONCE = 2**22
"""Probabilities that are computed at a time: a long prompt's are never all in memory."""


class Seen:
    """One pass through an attention layer, after it was computed.

    queries [batch, query heads, new, dim] and keys [batch, KV heads, held, dim], the new ones last; `valid` [batch,
    KV heads, held] is None where nothing is padding; `first` is the position of the first new token in its text.
    """

    def __init__(
        self, queries: Tensor, keys: Tensor, values: Tensor, valid: Tensor | None, scaling: float, first: int
    ) -> None:
        self.queries, self.keys, self.values, self.valid = queries, keys, values, valid
        self.scaling, self.first = scaling, first
        self.new, self.held = queries.shape[2], keys.shape[2]

    def probabilities(self, last: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """What each query attends to, in float32 and in pieces: the place of the first query of a piece among the new ones, and
        [batch, KV heads, group, queries, held]. `last`: only so many newest queries."""
        batch, heads, new, dim = self.queries.shape
        kv_heads = self.keys.shape[1]
        queries = self.queries.reshape(batch, kv_heads, heads // kv_heads, new, dim).float()
        keys = self.keys.float().transpose(-1, -2)[:, :, None]
        begin = 0 if last is None else max(new - last, 0)
        step = max(1, _AT_ONCE // (batch * heads * self.held))
        places = torch.arange(self.held, device=keys.device)
        for start in range(begin, new, step):
            piece = queries[:, :, :, start : start + step]
            scores = (piece @ keys).mul_(self.scaling)
            own = torch.arange(start, start + piece.shape[3], device=keys.device) + (self.held - new)
            scores.masked_fill_(places[None, :] > own[:, None], float("-inf"))
            if self.valid is not None:
                # Padding is not seen, and sees nothing: what it would attend to counts nowhere.
                hidden = ~(self.valid[:, :, None, None, :] & self.valid[:, :, None, own, None])
                scores.masked_fill_(hidden, float("-inf"))
            yield start, scores.softmax(-1).nan_to_num_(0.0)


class Policy:
    """One layer's eviction: told of every pass, asked which tokens stay when there are too many."""

    def __init__(self, keep: Keep, place: Place) -> None:
        self.keep, self.at = keep, place

    def see(self, seen: Seen) -> None:
        """A pass; new tokens are the last of `seen.keys`."""

    def choose(self, held: int, target: int, seen: Seen | None) -> Tensor | slice | None:
        """Places [batch, KV heads, target] of those that stay, in order; a slice that goes instead where it is the same for
        all; None where nothing has to go."""
        raise NotImplementedError

    def gather(self, places: Tensor) -> None:
        """Only the tokens at `places` are left."""

    def turn(self, keys: Tensor, first: int) -> Tensor:
        """Keys [batch, KV heads, held, dim] as queries are to see them; `first` is the place that they would have in the text if
        they had come right before the next token."""
        return keys

    def reorder(self, beams: Tensor) -> None:
        """Sequences change places."""


def ranked(scores: Tensor, keep: Keep, valid: Tensor | None, recent: int | None = None) -> Tensor:
    """Scores [batch, KV heads, held] as float32 in which what always stays is above all others and padding below them.

    First tokens are those of the text: padding before them is none. `recent`: so many newest instead of `keep.recent`.
    """
    held = scores.shape[-1]
    most = torch.finfo(torch.float32).max
    out = scores.float().nan_to_num(nan=-most, posinf=most, neginf=-most)
    if valid is None:
        out[..., : keep.sinks] = most
    else:
        out = out.masked_fill(valid & (valid.cumsum(-1) <= keep.sinks), most).masked_fill(~valid, float("-inf"))
    # What a store does not pack stays where it is, even padding.
    out[..., : keep.fixed] = float("inf")
    out[..., max(held - (keep.recent if recent is None else recent), 0) :] = float("inf")
    return out


def best(scores: Tensor, target: int) -> Tensor:
    """Places of the `target` highest scores in order of place; of equals the newer."""
    held = scores.shape[-1]
    newest_first = scores.flip(-1).argsort(dim=-1, descending=True, stable=True)[..., :target]
    return (held - 1 - newest_first).sort(-1).values
