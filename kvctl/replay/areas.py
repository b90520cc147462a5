"""Sums over time, in token slots × iterations, of what requests held and what was in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.replay.request import Request

if TYPE_CHECKING:
    from kvctl.replay.simulator import Running


class Areas:
    """Divided by the iterations of the whole replay these are the time-weighted means of the report."""

    __slots__ = (
        "duplicates", "external", "internal", "reserved", "running", "saved", "shared", "slots", "stored", "waiting",
    )  # fmt: skip

    def __init__(self) -> None:
        self.slots = self.stored = self.reserved = self.internal = self.duplicates = self.external = 0
        self.saved = self.shared = self.running = self.waiting = 0

    def add(self, slots: int, stored: int, duplicates: int, internal: int) -> None:
        """What is left of the slots is reserved: it was filled later."""
        self.slots += slots
        self.stored += stored
        self.duplicates += duplicates
        self.internal += internal
        self.reserved += slots - stored - duplicates - internal


def blocks_at(request: Request, done: int, block: int) -> int:
    """Blocks of a request whose sequences have stored `done` output tokens each.

    All sequences share the prompt. Its last block, where not full, is shared until the first token is written; then
    every sequence but one copies it (copy on write).
    """
    count = request.sequences
    if count == 1 or not done:
        return -(-(request.input_length + done) // block)
    whole = request.input_length // block
    return whole + count * (-(-(request.input_length + done) // block) - whole)


def add_paged(areas: Areas, entry: Running, last: int, total: int, block: int, copied: int) -> None:
    """What one request held for `total` iterations; in the last of them each sequence stored `last` output tokens.

    `entry.kept` blocks of the prompt are in the tree and counted there; `copied` others hold what the tree has too.
    """
    first, length, count = entry.done, entry.length, entry.count
    grown = last - first
    waited = total - grown
    blocks = entry.taken * waited - entry.kept * total
    stored = (length + count * first) * waited - (entry.kept + copied) * block * total
    duplicates = copied * block * total
    final = length + entry.steps
    top = -(-final // block) * block
    unused = top - final
    since = top - block - length  # slots past the end are in the last block only, so after so many tokens
    internal = 0
    if first:
        if first > since:
            internal = count * unused * waited
    elif since < 0:
        internal = unused * waited
    if grown:
        # The sum of ceil(j / block) over the lengths j that a sequence had.
        low, rest_low = divmod(length + first, block)
        high, rest = divmod(length + last, block)
        ceilings = (block * high * (high + 1) - block * low * (low + 1)) // 2 + rest * (high + 1) - rest_low * (low + 1)
        blocks += count * ceilings
        stored += grown * length + count * (last * (last + 1) - first * (first + 1)) // 2
        internal += count * unused * max(0, last - max(first, since))
    if count > 1:
        whole, rest = divmod(length, block)
        blocks -= grown * whole * (count - 1)
        duplicates += (grown + (waited if first else 0)) * (count - 1) * rest
    areas.add(blocks * block, stored, duplicates, internal)
