"""Keys and values of one layer in blocks. Imported where torch is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Pool:
    """Tensors [blocks, tokens of a block, KV heads, dim], as wide as the first tokens that come."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def grow(self, count: int, keys: Tensor, values: Tensor) -> None:
        """So many blocks; `keys` and `values` [batch, KV heads, new, dim] are of the kind that they are to hold."""
        self.keys, self.values = self._grown(self.keys, count, keys), self._grown(self.values, count, values)

    def _grown(self, held: Tensor | None, count: int, rows: Tensor) -> Tensor:
        missing = count - (0 if held is None else held.shape[0])
        if held is not None and missing <= 0:
            return held
        more = rows.new_empty(missing, self._size, rows.shape[1], rows.shape[3])
        return more if held is None else torch.cat([held, more])

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Contents of blocks into others."""
        if pairs:
            old, new = map(list, zip(*pairs, strict=True))
            for half in (self.keys, self.values):
                assert half is not None
                half[new] = half[old]

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """New tokens [batch, KV heads, new, dim] into `slots` [batch, new]: block × tokens of a block + place in it."""
        for half, rows in ((self.keys, keys), (self.values, values)):
            assert half is not None
            half.view(-1, *half.shape[2:]).index_copy_(0, slots.flatten(), rows.transpose(1, 2).flatten(0, 1))

    def read(self, table: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, KV heads, tokens, dim] of sequences whose blocks stand in the rows of `table`."""
        assert self.keys is not None
        assert self.values is not None
        return self._read(self.keys, table, tokens), self._read(self.values, table, tokens)

    def _read(self, half: Tensor, table: Tensor, tokens: int) -> Tensor:
        rows = half.index_select(0, table.flatten()).view(table.shape[0], -1, *half.shape[2:])
        return rows[:, :tokens].transpose(1, 2)
