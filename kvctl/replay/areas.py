"""Sums over time, in token slots × iterations, of what requests held and what was in it."""

from __future__ import annotations

from kvctl.replay.request import Request


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
    whole = request.input_length // block
    if done == 0:
        return -(-request.input_length // block)
    return whole + request.sequences * (-(-(request.input_length + done) // block) - whole)


def _ceilings(count: int, block: int) -> int:
    """The sum of ceil(j / block) over j = 1 … count."""
    whole, rest = divmod(count, block)
    return block * whole * (whole + 1) // 2 + rest * (whole + 1)


def add_paged(
    areas: Areas, request: Request, steps: int, span: tuple[int, int, int], block: int, kept: int, copied: int
) -> None:
    """What one request held: `span` is (tokens stored at admission, in the last iteration, iterations in all).

    `kept` blocks of the prompt are in the tree and counted there; `copied` others hold what the tree has too.
    """
    first, last, total = span
    length, count = request.input_length, request.sequences
    grown = last - first
    waited = total - grown
    whole, rest = divmod(length, block)
    blocks = blocks_at(request, first, block) * waited - kept * total
    stored = (length + count * first) * waited - (kept + copied) * block * total
    duplicates = copied * block * total
    final = length + steps
    top = -(-final // block) * block
    unused = top - final
    # Slots past the end are in the last block only.
    since = top - block - length
    internal = 0
    if first:
        duplicates += (count - 1) * rest * waited
        if first > since:
            internal = count * unused * waited
    elif since < 0:
        internal = unused * waited
    if grown:
        blocks += grown * whole * (1 - count) + count * (_ceilings(length + last, block) - _ceilings(length + first, block))
        stored += grown * length + count * (last * (last + 1) - first * (first + 1)) // 2
        duplicates += grown * (count - 1) * rest
        internal += count * unused * max(0, last - max(first, since))
    areas.add(blocks * block, stored, duplicates, internal)
