"""PagedAttention: a block when it is needed, and no sharing between requests."""

from __future__ import annotations

from kvctl.replay.areas import add_paged, blocks_at
from kvctl.replay.request import Request
from kvctl.replay.simulator import Running, Simulator


class Paged(Simulator):
    """The sequences of one request share its prompt; the last block of that is copied when it is written."""

    name = "paged"

    def never_fits(self, request: Request) -> bool:
        steps = max(request.output_length - 1, 0)
        return self.capacity is not None and blocks_at(request, steps, self.block) > self.capacity

    def admit(self, entry: Running) -> int:
        done, block = entry.done, self.block
        entry.taken = need = blocks_at(entry.request, done, block)
        if self.capacity is not None and self.held + need > self.capacity:
            self.need = need
            return -1
        entry.final = blocks_at(entry.request, entry.steps, block)
        self.held += need
        self.bound += entry.final
        self.stored += entry.length + entry.count * done
        if entry.count > 1:
            self.saved += spared(entry, done, block)
        return 0

    def begin(self, entry: Running) -> None:
        self.takes_blocks(entry)
        if entry.count > 1 and not entry.done:
            if entry.length % self.block:
                self.held += entry.count - 1
            self.saved += spared(entry, 1, self.block) - spared(entry, 0, self.block)

    def release(self, entry: Running, done: int, last: int) -> None:
        self.held -= entry.final if done == entry.steps else blocks_at(entry.request, done, self.block)
        self.bound -= entry.final
        self.stored -= entry.length + entry.count * done
        if entry.count > 1:
            self.saved -= spared(entry, done, self.block)
        add_paged(self.areas, entry, last, self.now - entry.since, self.block, 0)


def spared(entry: Running, done: int, block: int) -> int:
    """Blocks fewer than if every sequence had blocks of its own."""
    shared = entry.length // block if done else -(-entry.length // block)
    return (entry.count - 1) * shared
