"""The clock, the queue and the counts that all allocation policies have in common.

Time is counted in iterations of the engine, each `tpot` microseconds long whatever the batch (an assumption, as is
the rate of prefill). At the start of iteration t, in this order:

1. requests whose last token was done end and free what they hold;
2. requests that arrived until t join the queue (first come, first served; preempted ones stand at its head);
3. every running sequence past its prefill gets a slot for one more token. Where that takes more memory than there
   is, the request that was admitted last is preempted, and again until it suffices (vLLM V1's rule);
4. the head of the queue is admitted while it fits and sequences are below `max_sequences`; nobody overtakes it.

A request of `input` tokens and `output` tokens is in prefill for ceil(tokens to compute / prefill rate) iterations,
at least one. Its first output token comes out of the prefill and each later one of an iteration; the last one is
never stored, since nothing attends to it. So a sequence stores `input` tokens from its admission on, `input + k` in
its k-th iteration after prefill, and ends after k = output - 1. A preempted request keeps its text: it is computed
again from the start, generated tokens included, when it is admitted again.

Nothing here steps through tokens. A running sequence takes a block each `block_size` iterations, so requests are
counted by the phase of that cycle; what is held between two events follows from the counts, as does the iteration
in which memory would run out. The counts are those of stepping token by token, exactly.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import Any

from kvctl.errors import UsageError
from kvctl.replay.areas import Areas
from kvctl.replay.request import Request
from kvctl.replay.setup import Setup
from kvctl.replay.spill import SpillQueue, Waiting


class Running:
    """A request that holds memory, from one admission to its end or preemption."""

    __slots__ = (
        "begun", "count", "done", "final", "kept", "length", "live", "phase", "place", "request", "since", "start",
        "steps", "taken",
    )  # fmt: skip

    def __init__(self, request: Request, done: int) -> None:
        self.request = request
        self.length = request.input_length
        self.count = request.sequences
        self.done = done
        """Output tokens that each sequence had stored when it was admitted."""
        self.steps = request.output_length - 1 if request.output_length else 0
        """Output tokens that each sequence will have stored in the end."""
        self.since = self.start = 0
        """Iteration of its admission, and the first one after prefill."""
        self.phase = -1
        """Iterations, modulo the block size, in which each sequence takes a block; -1 before that."""
        self.begun = False
        """Whether the first iteration after prefill has come."""
        self.live = True
        # The policy's: units taken at admission and at the end, of these in the tree, and where they are.
        self.taken = self.final = self.kept = 0
        self.place: Any = None


class Simulator:
    """What a policy adds: how much a request takes, and where."""

    # With this many attributes a class without slots is slow.
    __slots__ = (
        "_blocked", "_ends", "_first", "_last_arrival", "_marked", "_next_in", "_phases", "_starts", "_takers", "_times",
        "_writers", "areas", "block", "bound", "cached", "capacity", "end", "evicted", "external", "finished",
        "gone", "held", "hits", "need", "now", "peak", "peak_cached", "peak_queue", "peak_running",
        "peak_saved", "peak_stored", "preemptions", "queried", "queue", "recomputed", "rejected", "requests",
        "resumed", "running", "saved", "sequences", "setup", "shared", "stored",
    )  # fmt: skip

    name = ""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.block = setup.block_size
        self.capacity = setup.capacity_blocks
        """In the policy's units: blocks, or token slots."""
        self.now = -1
        """The last iteration whose start is done."""
        self.held = 0
        """Units that running requests hold, shared ones once."""
        self.bound = 0
        """Units that they would hold if all came to their end now."""
        self.stored = 0
        """Tokens in them, each once."""
        self.cached = 0
        """Units that nobody holds and that a later request may find."""
        self.gone = 0
        """Units evicted that the policy has still to forget, those released longest ago, before it looks for any."""
        self.running: dict[Running, None] = {}
        """In order of admission."""
        self.sequences = 0
        self.queue = SpillQueue()
        self.resumed: deque[Waiting] = deque()
        self.areas = Areas()
        self.saved = 0
        """Blocks that sharing saves now."""
        self.shared = 0
        """Units that are held and full, and not counted with the requests that hold them."""
        self.external = 0
        """Free units that are of no use to the head of the queue, which would fit into them in one piece."""
        self._marked = 0
        self._phases = [0] * self.block
        self._takers = 0
        self._writers = 0
        self._times: list[int] = []
        self._starts: dict[int, list[Running]] = {}
        self._ends: dict[int, list[Running]] = {}
        self._blocked = False
        self.need = 0
        """Units that the head of the queue needs at least, known from when it did not fit.

        While it waits nobody else is admitted, so that the cache only loses blocks and this does not shrink."""
        self._next_in: Running | None = None
        """The head of the queue, from when it did not fit."""
        self._last_arrival = -1
        self._first: int | None = None
        self.requests = self.finished = self.rejected = self.preemptions = self.evicted = 0
        self.queried = self.hits = self.recomputed = 0
        self.peak = (0, 0)
        self.peak_saved = 0
        self.peak_stored = self.peak_cached = self.peak_running = self.peak_queue = self.end = 0

    # What a policy decides.

    def never_fits(self, request: Request) -> bool:
        """Whether the whole pool is too small for it."""
        raise NotImplementedError

    def admit(self, entry: Running) -> int:
        """Take memory; tokens of it that need not be computed, or -1 where it does not fit now (then set `need`)."""
        raise NotImplementedError

    def begin(self, entry: Running) -> None:
        """The first iteration after prefill starts."""

    def release(self, entry: Running, done: int, last: int) -> None:
        """Give all back; each sequence has stored `done` output tokens, and `last` until the iteration before."""
        raise NotImplementedError

    # Requests come in.

    def offer(self, request: Request) -> None:
        """The next request of the trace; runs until it arrives."""
        setup = self.setup
        self.requests += 1
        if setup.concurrency is not None:
            while self.in_flight >= setup.concurrency:
                self._next(None)
            at = self.now + 1
        else:
            if request.arrival is None:
                raise UsageError("requests without arrival times", hint="--in-flight 32 replays 32 of them at a time")
            if self._first is None:
                self._first = request.arrival
            at = -(-(request.arrival - self._first) // setup.tpot)
            while self._next(at):
                pass
        if (
            request.input_length + request.output_length > setup.max_length
            or (setup.max_sequences is not None and request.sequences > setup.max_sequences)
            or self.never_fits(request)
        ):
            self.rejected += 1
            return
        if at != self._last_arrival:
            self._note_queue()
            self._last_arrival = at
            # Behind one that waits for memory nothing happens when others join.
            if not self._blocked:
                heappush(self._times, at)
        self.queue.append((request, at, 0))

    def drain(self) -> None:
        """Run until all are done."""
        while self._next(None):
            pass

    @property
    def in_flight(self) -> int:
        return self.queue.count + len(self.resumed) + len(self.running)

    # Time goes by.

    def _next(self, before: int | None) -> bool:
        """The start of the next iteration in which something happens, if it comes before `before`."""
        times = self._times
        due = bool(times) and (before is None or times[0] < before)
        time = times[0] if due else before
        if time is None:
            return False
        capacity = self.capacity
        if due or (capacity is not None and self.bound > capacity):
            full = self._pass(time - 1)
            if full >= 0:
                self._turn(full)
                return True
        if not due:
            return False
        while times and times[0] == time:
            heappop(times)
        self._turn(time)
        return True

    def _pass(self, until: int) -> int:
        """Iterations up to `until` go by; or, returned, those before the first whose growth the memory does not hold."""
        steps = until - self.now
        if steps <= 0:
            return -1
        full = -1
        takers, capacity = self._takers, self.capacity
        if takers:
            grown = self._growth(steps)
            if capacity is not None and self.held + grown > capacity:
                cycles, room = divmod(capacity - self.held, takers)
                full = self.now + cycles * self.block
                while room >= 0:
                    full += 1
                    room -= self._phases[full % self.block]
                steps = full - 1 - self.now
                grown = self._growth(steps)
            self.held += grown
            if self.cached:
                self._make_room()
        self.stored += self._writers * steps
        self.now += steps
        return full

    def _growth(self, steps: int) -> int:
        """Blocks that the next `steps` iterations take, nothing else happening."""
        block, phases = self.block, self._phases
        cycles, rest = divmod(steps, block)
        first = (self.now + 1) % block
        last = first + rest
        grown = cycles * self._takers + sum(phases[first:last])
        return grown + sum(phases[: last - block]) if last > block else grown

    def _make_room(self) -> None:
        if self.capacity is not None:
            over = self.held + self.cached - self.capacity
            if over > 0:
                self._evict(over)

    def _evict(self, count: int) -> None:
        self.cached -= count
        self.evicted += count
        self.gone += count

    def _note_queue(self) -> None:
        waiting = self.queue.count + len(self.resumed)
        if waiting > self.peak_queue:
            self.peak_queue = waiting

    def _turn(self, time: int) -> None:
        """The start of iteration `time`, all before it having gone by."""
        # Between two turns memory only fills, so the peaks are here.
        held, stored = self.held, self.stored
        if held >= self.peak[0] and (held, stored) > self.peak:
            self.peak = (held, stored)
        if stored > self.peak_stored:
            self.peak_stored = stored
        if time > self._last_arrival:
            self._note_queue()
        span = time - self._marked
        if self.shared:
            self.areas.shared += self.shared * span
        if self.saved:
            self.areas.saved += self.saved * span
        elif self.external:
            self.areas.external += self.external * span
        self._marked = self.now = time
        if time in self._ends:
            for entry in self._ends.pop(time):
                if entry.live:
                    self._leave(entry, entry.steps, entry.steps)
                    self.finished += 1
                    self.end = time
                    self._blocked = False
        if time in self._starts:
            for entry in self._starts.pop(time):
                if entry.live:
                    entry.begun = True
                    self._writers += entry.count
                    self.begin(entry)
        self.held += self._phases[time % self.block]
        self.stored += self._writers
        if self.capacity is not None and self.held > self.capacity:
            self._preempt()
        if self.cached:
            self._make_room()
        if not self._blocked:
            self.external = 0
            while (self.resumed or self.queue.count) and self._admit_head():
                pass
            self._note_queue()
            if len(self.running) > self.peak_running:
                self.peak_running = len(self.running)
        if self.cached > self.peak_cached:
            self.peak_cached = self.cached
        if self.saved > self.peak_saved:
            self.peak_saved = self.saved

    def _admit_head(self) -> bool:
        if self.need and self.capacity is not None and self.held + self.need > self.capacity:
            self._blocked = True
            return False
        again = bool(self.resumed)
        request, at, done = self.resumed[0] if again else self.queue.first()
        most = self.setup.max_sequences
        if most is not None and self.sequences + request.sequences > most:
            self._blocked = True
            return False
        entry = self._next_in
        if entry is None:
            self._next_in = entry = Running(request, done)
        entry.since = self.now
        hit = self.admit(entry)
        if hit < 0:
            self._blocked = True
            return False
        self._next_in = None
        self.need = 0
        compute = request.input_length + request.sequences * done - hit
        if again:
            self.resumed.popleft()
            self.recomputed += compute
        else:
            self.queue.popleft()
            self.queried += request.input_length
            self.hits += hit
        self.areas.waiting += self.now - at
        setup = self.setup
        start = self.now + -(-compute * 1_000_000 // (setup.prefill_rate * setup.tpot))
        entry.start = start
        self.sequences += request.sequences
        self.running[entry] = None
        left = entry.steps - done
        if left:
            self._schedule(self._starts, start, entry)
        self._schedule(self._ends, start + left, entry)
        return True

    def _schedule(self, plan: dict[int, list[Running]], time: int, entry: Running) -> None:
        there = plan.get(time)
        if there is None:
            plan[time] = [entry]
            heappush(self._times, time)
        else:
            there.append(entry)

    def takes_blocks(self, entry: Running) -> None:
        """From now on each sequence of it takes a block whenever its last one is full."""
        entry.phase = phase = (entry.start - entry.length - entry.done) % self.block
        self._phases[phase] += entry.count
        self._takers += entry.count

    def _leave(self, entry: Running, done: int, last: int) -> None:
        """`done` tokens are stored now, `last` were in the iteration before; the two differ where it is cut off."""
        count = entry.count
        entry.live = False
        del self.running[entry]
        self.sequences -= count
        if entry.phase >= 0:
            self._phases[entry.phase] -= count
            self._takers -= count
        if entry.begun:
            self._writers -= count
        self.areas.running += self.now - entry.since
        self.release(entry, done, last)

    def _preempt(self) -> None:
        assert self.capacity is not None
        while self.held > self.capacity:
            if self.cached:
                self._evict(self.cached)
            entry = next(reversed(self.running))
            past = self.now - entry.start
            done = entry.done + max(past + 1, 0)
            self._leave(entry, done, entry.done + max(past, 0))
            self.preemptions += 1
            # It may fit again at once: where it had a copy of a block that others hold, it now finds that block.
            self._blocked = False
            self._next_in, self.need = None, 0
            self.resumed.appendleft((entry.request, self.now, done))
