"""Before PagedAttention: every sequence reserves its longest length ahead, in one piece."""

from __future__ import annotations

from bisect import bisect_left

from kvctl.replay.request import Request
from kvctl.replay.setup import Setup
from kvctl.replay.simulator import Running, Simulator

_ENDLESS = 2**100


class AddressSpace:
    """Token slots in a row: first fit, and neighbours that come free are joined."""

    def __init__(self, size: int | None) -> None:
        self._starts = [0]
        self._sizes = [_ENDLESS if size is None else size]

    def take(self, size: int) -> int:
        """The start of the first hole that is large enough, or -1."""
        for index, room in enumerate(self._sizes):
            if room >= size:
                start = self._starts[index]
                if room == size:
                    del self._starts[index], self._sizes[index]
                else:
                    self._starts[index] += size
                    self._sizes[index] -= size
                return start
        return -1

    def give(self, start: int, size: int) -> None:
        index = bisect_left(self._starts, start)
        starts, sizes = self._starts, self._sizes
        if index < len(starts) and start + size == starts[index]:
            size += sizes[index]
            del starts[index], sizes[index]
        if index and starts[index - 1] + sizes[index - 1] == start:
            sizes[index - 1] += size
        else:
            starts.insert(index, start)
            sizes.insert(index, size)


class Contiguous(Simulator):
    """Units are token slots. Parallel sequences each have a copy of the prompt. Nothing grows, nobody is preempted."""

    name = "contiguous"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if setup.capacity_blocks is not None:
            self.capacity = setup.capacity_blocks * setup.block_size
        self._space = AddressSpace(self.capacity)

    def _reserve(self, request: Request) -> int:
        """Slots of one sequence."""
        whole = request.input_length + request.output_length
        most = self.setup.max_length
        if self.setup.reserve == "exact":
            return whole
        if self.setup.reserve == "pow2":
            return min(request.input_length + (1 << max(request.output_length - 1, 0).bit_length()), most)
        if request.max_output is None:
            return most
        return min(max(request.input_length + request.max_output, whole), most)

    def never_fits(self, request: Request) -> bool:
        return self.capacity is not None and self.capacity // self._reserve(request) < request.sequences

    def admit(self, entry: Running) -> int:
        request = entry.request
        size = self._reserve(request)
        whole = size * request.sequences
        if self.capacity is not None and self.held + whole > self.capacity:
            self.need = whole
            return -1
        starts: list[int] = []
        for _ in range(request.sequences):
            start = self._space.take(size)
            if start < 0:
                for taken in starts:
                    self._space.give(taken, size)
                assert self.capacity is not None
                self.external = self.capacity - self.held
                return -1
            starts.append(start)
        entry.place, entry.kept = starts, size
        self.held += whole
        self.stored += request.input_length
        return 0

    def release(self, entry: Running, done: int, last: int) -> None:
        request, size, steps = entry.request, entry.kept, entry.steps
        for start in entry.place:
            self._space.give(start, size)
        length, count = request.input_length, request.sequences
        self.held -= size * count
        self.stored -= length + count * done
        total = self.now - entry.since
        self.areas.add(
            size * count * total,
            length * total + count * last * (last + 1) // 2,
            (count - 1) * length * total,
            count * (size - length - steps) * total,
        )
