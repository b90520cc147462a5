"""What a start-up log says: values with the line they stand in and the precision they are printed with."""

from __future__ import annotations

import math
from typing import Any

from kvctl.record import Record
from kvctl.units import BINARY

UNITS = {**dict(BINARY), "B": 1}
_NAMES = {size: name for name, size in UNITS.items()}
_MOST = 10**21
"""No count or size in a log is larger; what is, is damaged."""


class Figure(Record):
    """One number of a log."""

    name: str
    value: float
    """In `unit`; bytes and counts are whole, and the middle of what rounds to the printed text."""
    half: float
    """Half of the last printed digit: the true value lies within so much. 0: exact."""
    unit: str
    """bytes, tokens, blocks, requests, states or "" for a ratio."""
    line: int
    where: str
    """The process that printed it, as far as the line says: DP0 PP1 TP0, CUDA0; empty for one that says nothing."""
    text: str
    """As it is printed."""

    @property
    def low(self) -> float:
        return math.ceil(self.value - self.half) if self.unit else self.value - self.half

    @property
    def high(self) -> float:
        return math.floor(self.value + self.half) if self.unit else self.value + self.half

    def meets(self, low: float, high: float) -> bool:
        """Whether the true value may lie from `low` to `high`."""
        return low <= self.high and self.low <= high

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}


class Pool(Record):
    """One cache that SGLang or llama.cpp allocated, with the sizes its line prints."""

    kind: str
    """cache, states, or the word of the line: Full, SWA."""
    line: int
    where: str
    count: int | None
    """Tokens, cells or slots."""
    layers: int | None
    slots: str
    """llama.cpp's sequences and streams, as printed: "4/1"."""
    formats: tuple[str, ...]
    sizes: tuple[tuple[str, float], ...]
    """(name, bytes) of keys, values, states …, rounded as printed."""
    half: float
    """Half of the last printed digit of a size, in bytes."""

    @property
    def total(self) -> float:
        return sum(size for _, size in self.sizes)

    def same(self, other: Pool) -> bool:
        """Whether both lines say the same, whichever process printed them."""
        return (self.count, self.layers, self.slots, self.formats) == (
            other.count, other.layers, other.slots, other.formats
        ) and self.agrees(other)  # fmt: skip

    def agrees(self, other: Pool) -> bool:
        """Whether the sizes are the same as printed."""
        return len(self.sizes) == len(other.sizes) and all(
            name == named and abs(mine - theirs) <= self.half / 16
            for (name, mine), (named, theirs) in zip(self.sizes, other.sizes, strict=True)
        )


class Refusal(Record):
    """Why an engine did not start, or ran out of memory."""

    kind: str
    """too long, no cache, not free, fraction, out of memory."""
    line: int
    text: str
    """What the log says, on one line."""


def number(text: str) -> float | None:
    """A printed number; None for what is none, or out of any range."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if abs(value) < _MOST else None


def count(text: str) -> int | None:
    """A printed whole number."""
    digits = text.replace(",", "")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= 20 else None


def sized(
    name: str, text: str, factor: int, line: int, where: str = "", decimals: int = 2, unit: str = "bytes"
) -> Figure | None:
    """A size printed in units of `factor` bytes.

    `decimals` are those it is rounded to at least: an engine that prints round(x, 2) writes 0.4 for 0.40.
    """
    value = number(text)
    if value is None:
        return None
    shown = len(text.partition(".")[2])
    scaled = value * factor
    printed = f"{text} {_NAMES[factor]}" if unit else text
    return Figure(name, round(scaled) if unit else scaled, factor * 0.5 * 10 ** -max(decimals, min(shown, 12)), unit,
                  line, where, printed)  # fmt: skip


def whole(name: str, text: str, unit: str, line: int, where: str = "") -> Figure | None:
    """A count."""
    value = count(text)
    return None if value is None else Figure(name, value, 0, unit, line, where, text)
