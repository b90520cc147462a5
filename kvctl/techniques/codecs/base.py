"""The shape that all codecs share."""

from __future__ import annotations

from typing import Any, Protocol

from kvctl.errors import UsageError
from kvctl.record import Record

Parts = tuple[Any, ...]
"""A codec's tensors, each [batch, heads or 1, tokens / codec.tokens, ...]: they are appended along the third
dimension, permuted along the first and, where `tokens` is 1, gathered along the third."""


class Kernel(Protocol):
    """The tensor side of a codec. Groups never cross tokens (or groups of tokens), heads or sequences."""

    def encode(self, x: Any) -> Parts:
        """Pack x [batch, heads, tokens, dim] of fp32, bf16 or fp16."""

    def decode(self, parts: Parts, dtype: Any, dim: int) -> Any:
        """Unpack to [batch, heads, tokens, dim] of `dtype`."""


class Codec(Record):
    """How keys or values are packed. NaN and Inf make their own group decode to NaN and touch nothing else
    (`Fp8` has no groups: NaN stays itself, Inf saturates as in vLLM)."""

    name: str
    tokens: int = 1
    """Tokens that are packed together."""

    def bytes(self, tokens: int, heads: int, dim: int, itemsize: int) -> int:
        """Bytes of one sequence in one layer for `tokens`, a multiple of `self.tokens`: codes, scales, minima."""
        raise NotImplementedError

    @property
    def beside(self) -> int:
        """Bytes that a tensor takes once, whatever is in it: a scale of the whole."""
        return 0

    def check(self, heads: int, dim: int) -> None:
        """Raise UsageError where these heads cannot be packed."""
        raise NotImplementedError

    def kernel(self) -> Kernel:
        """The codec's kernel; imports torch."""
        raise NotImplementedError


def refuse(codec: str, heads: int, dim: int, needs: str, hint: str) -> UsageError:
    """What to raise for heads that do not fit."""
    return UsageError(f"{codec}: cannot pack {heads} heads of {dim} elements: {needs}", hint=hint)
