"""How kept rows are stored: packed by a codec, but for the first and the newest tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.techniques.codecs import Codec


class Packing(Record):
    """Of keys, or of values.

    The first `sinks` tokens and the newest `residual` stay as they are; what lies between is packed once, in whole groups
    of `codec.tokens`, so what is packed does not depend on how tokens arrived.
    """

    codec: Codec | None = None
    """None: all stay as they are."""
    sinks: int = 0
    residual: int = 0
    rotated: bool = False
    """Whether rows are turned by a Hadamard matrix before they are packed, which spreads outliers."""

    def packed(self, tokens: int) -> int:
        """How many of so many tokens are packed."""
        if self.codec is None:
            return 0
        free = max(tokens - self.sinks - self.residual, 0)
        return free - free % self.codec.tokens

    def bytes(self, tokens: int, heads: int, dim: int, itemsize: int) -> int:
        """Of one sequence in one layer, `itemsize` bytes an element that is not packed."""
        packed = self.packed(tokens)
        plain = (tokens - packed) * heads * dim * itemsize
        return plain + (self.codec.bytes(packed, heads, dim, itemsize) if self.codec is not None and packed else 0)

    def beside(self, seen: int) -> int:
        """Of all sequences in one layer once, when so many tokens were seen, whichever of them stay."""
        return self.codec.beside if self.codec is not None and self.packed(seen) else 0


class Store(Record):
    """Of both; `unrotated`: keys are packed before their rotary embedding, and turned when they are read."""

    keys: Packing = Packing()
    values: Packing = Packing()
    unrotated: bool = False

    @property
    def group(self) -> int:
        """Tokens that are packed together, of keys or values."""
        return max((half.codec.tokens for half in (self.keys, self.values) if half.codec is not None), default=1)
