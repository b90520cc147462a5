"""Which blocks of a pool are free, and how many hold each of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvctl.errors import KvctlError
from kvctl.units import plural


class Blocks:
    """Numbers of blocks with reference counts. Without `count` there are always enough: the pool grows by what is missing."""

    def __init__(self, count: int | None = None) -> None:
        self.fixed = count is not None
        self._holders = [0] * (count or 0)
        self._free = list(range((count or 0) - 1, -1, -1))
        self.reclaim: Callable[[int], None] = lambda number: None
        """Asked to set so many blocks free, where too few are: an index drops what nobody else holds."""

    @property
    def count(self) -> int:
        """All that there are."""
        return len(self._holders)

    @property
    def held(self) -> int:
        """Those that somebody holds."""
        return self.count - len(self._free)

    def holders(self, block: int) -> int:
        """How many hold it."""
        return self._holders[block]

    def take(self, number: int) -> list[int]:
        """Free blocks, each held once from here on: all, or none.

        Raises:
            KvctlError: so many are not free.

        """
        if self.fixed and number > len(self._free):
            self.reclaim(number - len(self._free))
        missing = number - len(self._free)
        if missing > 0:
            if self.fixed:
                raise KvctlError(f"the pool has {plural(self.count, 'block')}, {number} are needed and {len(self._free)} are free",
                                 hint="a larger pool, or fewer requests at a time")  # fmt: skip
            self._free[:0] = range(self.count + missing - 1, self.count - 1, -1)
            self._holders += [0] * missing
        taken = [self._free.pop() for _ in range(number)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """One more holds each of them; somebody does already."""
        for block in blocks:
            if not self._holders[block]:
                raise ValueError(f"block {block} is free: nobody can share it")
            self._holders[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """One fewer holds each of them; those that nobody holds are free."""
        for block in blocks:
            if not self._holders[block]:
                raise ValueError(f"block {block} is free already")
            self._holders[block] -= 1
            if not self._holders[block]:
                self._free.append(block)
