"""A paged cache (Kwon et al., 2023, arXiv 2309.06180): blocks of tokens, a table of them, and prefixes that requests share.

`blocks`, `table` and `radix` are the bookkeeping, without torch; `pool` and `cache` hold tensors.
"""

from __future__ import annotations

from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.techniques.options import Options

BLOCK = 16
"""Tokens: vLLM's."""
MOST = 4096
_ENTRY = 4
"""Bytes of an int32."""


class Paging(Record):
    """How keys and values are cut into blocks."""

    block: int = BLOCK
    """Tokens of a block."""

    def blocks(self, tokens: int) -> int:
        """Of one sequence, the last one in part."""
        return -(-tokens // self.block)

    def bytes(self, tokens: int, row: int) -> int:
        """Of one sequence in one layer, `row` bytes for keys and values of a token; the last block counts whole."""
        return self.blocks(tokens) * self.block * row

    def table(self, tokens: int) -> int:
        """Bytes of one sequence's row in the block table, which all layers share: int32 for its length and for each block."""
        return _ENTRY * (1 + self.blocks(tokens)) if tokens else 0


def build(options: Options) -> Paging:
    """`paged`, `paged:block=32`."""
    return Paging(checked(options.number("block", BLOCK, least=1), f"{options.name}:block"))


def checked(block: int, what: str) -> int:
    """Tokens of a block.

    Raises:
        UsageError: too few or too many.

    """
    if not 1 <= block <= MOST:
        raise UsageError(f"{what}: {block} is out of range", hint=f"tokens of a block, from 1 to {MOST:,}")
    return block
