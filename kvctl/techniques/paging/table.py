"""The block table: which blocks hold the tokens of each sequence, in order."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.techniques.paging.blocks import Blocks


class Table:
    """Sequences by number. Several may hold a block; whoever writes into one that others hold too gets a copy first."""

    def __init__(self, blocks: Blocks, size: int) -> None:
        self.blocks, self.size = blocks, size
        """`size`: tokens of a block."""
        self._rows: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0
        self.copied = 0
        """Blocks that were copied on a write."""

    @property
    def sequences(self) -> tuple[int, ...]:
        """All that are there."""
        return tuple(self._rows)

    def row(self, sequence: int) -> Sequence[int]:
        """Its blocks."""
        return self._rows[sequence]

    def length(self, sequence: int) -> int:
        """Its tokens."""
        return self._lengths[sequence]

    def begin(self, found: Sequence[int] = ()) -> int:
        """A sequence whose first tokens fill blocks that are there already; without any, an empty one."""
        self.blocks.hold(found)
        return self._add(list(found), len(found) * self.size)

    def fork(self, sequence: int) -> int:
        """Another with the same tokens, in the same blocks."""
        row = self._rows[sequence]
        self.blocks.hold(row)
        return self._add(list(row), self._lengths[sequence])

    def extend(self, sequence: int, tokens: int) -> list[tuple[int, int]]:
        """Room for more tokens. Pairs (from, to) of blocks whose contents have to be copied before these are written.

        Raises:
            KvctlError: too few blocks are free; nothing has changed then.

        """
        row, length = self._rows[sequence], self._lengths[sequence]
        shared = bool(tokens and length % self.size and self.blocks.holders(row[-1]) > 1)
        taken = self.blocks.take(-(-(length + tokens) // self.size) - len(row) + shared)
        copies = []
        if shared:
            copies = [(row[-1], taken[0])]
            self.blocks.drop(row[-1:])
            row.pop()
            self.copied += 1
        row += taken
        self._lengths[sequence] = length + tokens
        return copies

    def release(self, sequence: int) -> None:
        """It is done: its blocks are free, but for those that others hold."""
        del self._lengths[sequence]
        # The last first: of an index' blocks, those nearest to the root are the last to be used again.
        self.blocks.drop(reversed(self._rows.pop(sequence)))

    def _add(self, row: list[int], length: int) -> int:
        name, self._next = self._next, self._next + 1
        self._rows[name], self._lengths[name] = row, length
        return name
