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
        request, done = entry.request, entry.done
        need = blocks_at(request, done, self.block)
        if self.capacity is not None and self.held + need > self.capacity:
            self.need = need
            return -1
        self.held += need
        self.bound += blocks_at(request, entry.steps, self.block)
        self.stored += request.input_length + request.sequences * done
        self.saved += spared(request, done, self.block)
        return 0

    def begin(self, entry: Running) -> None:
        self.takes_blocks(entry)
        request = entry.request
        if request.sequences > 1 and not entry.done:
            if request.input_length % self.block:
                self.held += request.sequences - 1
            self.saved += spared(request, 1, self.block) - spared(request, 0, self.block)

    def release(self, entry: Running, done: int, last: int) -> None:
        request = entry.request
        self.held -= blocks_at(request, done, self.block)
        self.bound -= blocks_at(request, entry.steps, self.block)
        self.stored -= request.input_length + request.sequences * done
        self.saved -= spared(request, done, self.block)
        add_paged(self.areas, request, entry.steps, (entry.done, last, self.now - entry.since), self.block, 0, 0)


def spared(request: Request, done: int, block: int) -> int:
    """Blocks fewer than if every sequence had blocks of its own."""
    if request.sequences == 1:
        return 0
    shared = request.input_length // block if done else -(-request.input_length // block)
    return (request.sequences - 1) * shared
