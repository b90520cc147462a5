"""The replay, done slowly: every iteration, every token, every block one by one.

Written from the rules in the docstrings of `kvctl.replay`, without its arithmetic: what is held is found by looking
into every block. Good for a few hundred tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from kvctl.replay import Request, Setup

Name = tuple[tuple[int, ...], int]
"""What a full block of a prompt is found by: all hashes up to its end, and where that is."""


class Block:
    def __init__(self, size: int) -> None:
        self.slots: list[str | None] = [None] * size  # None, "token", or "copy"
        self.users = 0
        self.name: Name | None = None

    def filled(self) -> int:
        return sum(slot is not None for slot in self.slots)


Table = list[Block]
"""The blocks of one sequence."""
Entry = list[Any]
"""A running job: it, its tables, the start of decoding, and the tokens that each sequence stored."""


class OutOfMemory(Exception):
    pass


class Job:
    def __init__(self, request: Request, arrived: int) -> None:
        self.request, self.arrived, self.kept = request, arrived, 0
        self.fresh = True

    @property
    def final(self) -> int:
        return self.request.input_length + max(self.request.output_length - 1, 0)


def names_of_blocks(request: Request, size: int) -> list[Name]:
    """For each full block that the hashes cover: all hashes up to its end, and how far it reaches."""
    out = []
    covered = min(len(request.hash_ids) * request.hash_tokens, request.input_length)
    for end in range(size, covered + 1, size):
        out.append((tuple(request.hash_ids[: math.ceil(end / request.hash_tokens)]), end))
    return out


class Pool:
    """Blocks, with or without a cache of prompts."""

    def __init__(self, setup: Setup, caching: bool) -> None:
        self.size, self.limit, self.caching = setup.block_size, setup.capacity_blocks, caching
        self.held: list[Block] = []
        self.cache: dict[Name, Block] = {}
        self.idle: list[Block] = []  # cached and unused, the one to be evicted first in front
        self.evicted = 0

    def room(self) -> float:
        return math.inf if self.limit is None else self.limit - len(self.held)

    def new(self) -> Block:
        if self.limit is not None and len(self.held) + len(self.idle) >= self.limit:
            if not self.idle:
                raise OutOfMemory
            gone = self.idle.pop(0)
            assert gone.name is not None
            del self.cache[gone.name]
            self.evicted += 1
        block = Block(self.size)
        block.users = 1
        self.held.append(block)
        return block

    def use(self, block: Block) -> None:
        if block.users == 0:
            self.idle.remove(block)
            self.held.append(block)
        block.users += 1

    def drop(self, block: Block) -> None:
        block.users -= 1
        if block.users == 0:
            self.held.remove(block)
            if block.name is not None:
                self.idle.append(block)

    def lookup(self, job: Job) -> tuple[list[Name], list[Block]]:
        request = job.request
        names = names_of_blocks(request, self.size) if self.caching else []
        known = request.input_length + request.sequences * job.kept
        found: list[Block] = []
        for name in names:
            if name not in self.cache or (len(found) + 1) * self.size > known - 1:
                break
            found.append(self.cache[name])
        return names, found

    def place(self, job: Job) -> tuple[list[Table], int] | None:
        """Blocks for the tokens known of a job; None where it does not fit."""
        request, size = job.request, self.size
        names, found = self.lookup(job)
        prompt = request.input_length
        own = sum(max(math.ceil((prompt + job.kept) / size), 0) - prompt // size for _ in range(request.sequences))
        need = prompt // size + own if job.kept else math.ceil(prompt / size)
        need -= sum(block.users > 0 for block in found)
        if need > self.room():
            return None
        for block in found:
            self.use(block)
        shared = list(found)
        while len(shared) < prompt // size:
            there = self.cache.get(names[len(shared)]) if len(shared) < len(names) else None
            if there is not None and there.users == 0:
                self.use(there)
                shared.append(there)
                continue
            block = self.new()
            mark = "token"
            if len(shared) < len(names):
                name = names[len(shared)]
                if name in self.cache:
                    mark = "copy"
                else:
                    block.name = name
                    self.cache[name] = block
            block.slots = [mark] * size
            shared.append(block)
        tables = [list(shared) for _ in range(request.sequences)]
        tail = prompt % size
        if job.kept == 0 and tail:
            block = self.new()
            block.slots[:tail] = ["token"] * tail
            for table in tables:
                table.append(block)
        elif job.kept:
            for index, table in enumerate(tables):
                for at in range(prompt // size * size, prompt + job.kept):
                    if at % size == 0:
                        table.append(self.new())
                    table[-1].slots[at % size] = "copy" if at < prompt and index else "token"
        for table in tables:
            for block in table:
                block.users += 1
        for block in {id(b): b for table in tables for b in table}.values():
            block.users -= 1  # the hold of `new` and `use`
        return tables, len(found) * size

    def write(self, table: Table, at: int) -> None:
        """One more token, copying the last block if others read it."""
        if at % self.size == 0:
            table.append(self.new())
        elif table[-1].users > 1:
            mine = self.new()
            mine.slots = ["copy" if slot else None for slot in table[-1].slots]
            self.drop(table[-1])
            table[-1] = mine
        table[-1].slots[at % self.size] = "token"

    def free(self, tables: list[Table]) -> None:
        # As one: the deepest first.
        depth = max(len(table) for table in tables)
        for level in reversed(range(depth)):
            for table in tables:
                if level < len(table):
                    self.drop(table[level])


class Slots:
    """One long row of slots, each with the name of its owner."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.row: list[Job | None] = [None] * (
            10_000 if setup.capacity_blocks is None else setup.capacity_blocks * setup.block_size
        )
        self.bounded = setup.capacity_blocks is not None

    def reserve(self, request: Request) -> int:
        whole = request.input_length + request.output_length
        if self.setup.reserve == "exact":
            return whole
        if self.setup.reserve == "pow2":
            power = 1
            while power < request.output_length:
                power *= 2
            return min(self.setup.max_length, request.input_length + power)
        if request.max_output is None:
            return self.setup.max_length
        return min(self.setup.max_length, max(whole, request.input_length + request.max_output))

    def place(self, job: Job) -> list[int] | None:
        size, starts = self.reserve(job.request), []
        for _ in range(job.request.sequences):
            for start in range(len(self.row) - size + 1):
                if not any(self.row[start : start + size]):
                    self.row[start : start + size] = [job] * size
                    starts.append(start)
                    break
            else:
                self.free(job)
                return None
        return starts

    def free(self, job: Job) -> None:
        self.row = [None if owner is job else owner for owner in self.row]


def simulate(requests: Iterable[Request], setup: Setup, policy: str) -> dict[str, int]:
    """All counts of a PolicyReport that are not derived, by name."""
    paged = policy != "contiguous"
    pool: Any = Pool(setup, policy == "prefix") if paged else Slots(setup)
    size = setup.block_size
    trace = list(requests)
    first = trace[0].arrival
    count = dict.fromkeys(
        [
            "finished",
            "rejected",
            "preemptions",
            "recomputed_tokens",
            "queried_tokens",
            "hit_tokens",
            "peak_cached_blocks",
            "peak_running",
            "peak_queue",
            "peak_saved_blocks",
            "slot_area",
            "stored_area",
            "reserved_area",
            "internal_area",
            "copied_area",
            "external_area",
            "saved_area",
            "running_area",
            "waiting_area",
            "peak_stored_tokens",
            "peak_slots",
            "stored_at_peak",
            "iterations",
        ],
        0,
    )
    waiting: list[Job] = []
    running: list[Entry] = []
    time = -1
    peak = (0, 0)

    def impossible(request: Request) -> bool:
        if request.input_length + request.output_length > setup.max_length:
            return True
        if setup.max_sequences is not None and request.sequences > setup.max_sequences:
            return True
        if setup.capacity_blocks is None:
            return False
        if not paged:
            return setup.capacity_blocks * size < request.sequences * pool.reserve(request) and (
                setup.capacity_blocks * size // pool.reserve(request) < request.sequences
            )
        final = request.input_length + max(request.output_length - 1, 0)
        shared = request.input_length // size
        blocks = shared + request.sequences * (math.ceil(final / size) - shared)
        if request.output_length <= 1:
            blocks = math.ceil(request.input_length / size)
        return blocks > setup.capacity_blocks

    def preempt() -> Job:
        job: Job
        job, tables, start, stored = running.pop()
        if job not in stepped and time >= start:
            stored += 1
        elif job in stepped:
            stored = stepped[job]
        pool.free(tables)
        job.kept = stored - job.request.input_length
        job.fresh = False
        job.arrived = time
        waiting.insert(0, job)
        count["preemptions"] += 1
        return job

    while trace or waiting or running:
        time += 1
        before = len(waiting) + len(running)
        # 1. ends
        for entry in list(running):
            job, tables, start, stored = entry
            if time >= start and stored == job.final:
                running.remove(entry)
                pool.free(tables if paged else job)
                count["finished"] += 1
                count["iterations"] = time
        # 2. arrivals
        while trace:
            if setup.concurrency is None:
                assert trace[0].arrival is not None
                assert first is not None
                if (trace[0].arrival - first) / setup.tpot > time:
                    break
            elif before >= setup.concurrency:
                break
            request = trace.pop(0)
            if impossible(request):
                count["rejected"] += 1
                continue
            before += 1
            waiting.append(Job(request, time))
        # 3. one token more for everyone past prefill, the oldest first
        stepped = {}
        index = 0
        while index < len(running):
            entry = running[index]
            job, tables, start, stored = entry
            index += 1
            if time < start:
                continue
            if paged:
                gone = False
                for table in tables:
                    while True:
                        try:
                            pool.write(table, stored)
                            break
                        except OutOfMemory:
                            if preempt() is job:
                                gone = True
                                break
                    if gone:
                        break
                if gone:
                    break
            stepped[job] = stored + 1
            entry[3] = stored + 1
        # 4. admission, in order
        stuck = None
        while waiting:
            job = waiting[0]
            request = job.request
            active = sum(entry[0].request.sequences for entry in running)
            if setup.max_sequences is not None and active + request.sequences > setup.max_sequences:
                break
            placed = pool.place(job)
            if placed is None:
                stuck = job
                break
            waiting.pop(0)
            tables, hit = placed if paged else (placed, 0)
            compute = request.input_length + request.sequences * job.kept - hit
            if job.fresh:
                count["queried_tokens"] += request.input_length
                count["hit_tokens"] += hit
            else:
                count["recomputed_tokens"] += compute
            count["waiting_area"] += time - job.arrived
            start = time
            while (start - time) * setup.tpot * setup.prefill_rate < compute * 1_000_000:
                start += 1
            running.append([job, tables, start, request.input_length + job.kept])
        # look
        count["peak_running"] = max(count["peak_running"], len(running))
        count["peak_queue"] = max(count["peak_queue"], len(waiting))
        count["running_area"] += len(running)
        seen = look_paged(pool, running, size) if paged else look_row(pool, running)
        slots, stored, copies, reserved = seen
        assert stored + copies + reserved <= slots
        count["slot_area"] += slots
        count["stored_area"] += stored
        count["copied_area"] += copies
        count["reserved_area"] += reserved
        count["internal_area"] += slots - stored - copies - reserved
        count["peak_stored_tokens"] = max(count["peak_stored_tokens"], stored)
        peak = max(peak, (slots, stored))
        if paged:
            if pool.limit is not None:
                assert len(pool.held) + len(pool.idle) <= pool.limit
            count["peak_cached_blocks"] = max(count["peak_cached_blocks"], len(pool.idle))
            apart = sum(j.request.sequences * math.ceil(n / size) for j, _, _, n in running)
            saved = apart - len(pool.held)
            count["saved_area"] += saved
            count["peak_saved_blocks"] = max(count["peak_saved_blocks"], saved)
        elif stuck is not None and pool.bounded:
            free = pool.row.count(None)
            if free >= stuck.request.sequences * pool.reserve(stuck.request):
                count["external_area"] += free
        # Nothing can ever happen again only if all is done.
        assert time < 100_000
    count["peak_slots"], count["stored_at_peak"] = peak
    count["evicted_blocks"] = pool.evicted if paged else 0
    return count


def look_paged(pool: Pool, running: list[Entry], size: int) -> tuple[int, int, int, int]:
    held = pool.held
    filled = sum(block.slots.count("token") for block in held)
    copies = sum(block.slots.count("copy") for block in held)
    # Slots that get a token later: the free ones of a last block, as far as the request goes on. A block that
    # several sequences still share is filled by one of them.
    reserved, counted = 0, set()
    for job, tables, _, stored in running:
        for table in tables:
            last = table[-1]
            if id(last) in counted:
                continue
            counted.add(id(last))
            reserved += min(last.slots.count(None), job.final - stored)
    return len(held) * size, filled, copies, reserved


def look_row(pool: Slots, running: list[Entry]) -> tuple[int, int, int, int]:
    slots = len(pool.row) - pool.row.count(None)
    filled = sum(
        job.request.input_length + job.request.sequences * (stored - job.request.input_length)
        for job, _, _, stored in running
    )
    copies = sum((job.request.sequences - 1) * job.request.input_length for job, *_ in running)
    reserved = sum(job.request.sequences * (job.final - stored) for job, _, _, stored in running)
    return slots, filled, copies, reserved
