"""A load put on a server by this process: all of it, or its share where several put it there together.

Of a load that is so many requests at once each process keeps some under way; of one by a clock each sends every n-th request, at
the time that it has in the whole. So together they send what one would have sent. Beginnings and traces are the same in all of them,
and all other words are drawn by another lot in each.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvctl.errors import KvctlError
from kvctl.loadtest import asks, load
from kvctl.loadtest.connection import Address
from kvctl.loadtest.exchange import Exchange
from kvctl.loadtest.figures import Figures
from kvctl.loadtest.loop import Loop
from kvctl.loadtest.plan import Plan, Step
from kvctl.loadtest.words import Vocabulary
from kvctl.loadtest.work import Kit
from kvctl.record import Record

Keep = Callable[[Mapping[str, Any]], None]
"""Takes a line of the log: what became of one request."""
_FEWEST = 20
"""Requests of which some fail, before a load is given up in its middle."""
_AHEAD = 64
"""Requests that are ready before they are due, beside one for each that is under way."""
_MOST_READY = 256 * 2**20
"""Bytes of them."""
_MAKING_S = 0.02
"""Of each tenth of a second, at most, that goes into making requests while others are timed: one of a megabyte takes 0.03 s."""
_MOST_OPENED = 4096
"""Connections that are opened before they are needed."""


class Job(Record):
    """A load, and all that a process needs to put it on a server."""

    plan: Plan
    step: Step
    number: int
    """Of the load in the run."""
    address: Address
    wire: asks.Wire
    vocabulary: Vocabulary | None
    context: int | None
    seed: int
    logs: bool = False
    """Whether lines of the log are wanted."""
    index: int = 0
    """Of this process, among `of`."""
    of: int = 1

    def part(self, count: int) -> int:
        """This process's share of so many."""
        return count // self.of + (self.index < count % self.of)

    def kit(self) -> Kit:
        """The same in every process."""
        lot = random.Random(f"{self.seed} {self.number}")
        return Kit(self.wire, self.vocabulary, lot, self.context, index=self.index, of=self.of)


class Seen(Record):
    """How far a load is."""

    began: bool
    """Whether requests are measured."""
    measured: int
    failed: int
    live: int
    """Requests under way."""


class Driven(Record):
    """What came of a load, or of a share of it; times in nanoseconds of the monotonic clock."""

    figures: Figures
    steady: Figures
    """Of requests that were sent and answered while the load was whole."""
    began: int
    """When the first measured request was due; 0: there was none."""
    stopped: int
    """When no more were sent."""
    sent: int
    retried: int
    cut: int
    cpu: float
    """Share of a core; of several processes that of the busiest."""
    given_up: str | None
    interrupted: bool


class Ready:
    """Requests that are made before they are due."""

    def __init__(self, make: Callable[[], load.Ask | None]) -> None:
        self._make = make
        self._made: deque[load.Ask] = deque()
        self._bytes = 0

    def fill(self, count: int, seconds: float = math.inf) -> None:
        """Until there are so many, or no more, or they take too much memory, or it takes so long."""
        end = time.monotonic() + seconds
        while len(self._made) < count and self._bytes < _MOST_READY and time.monotonic() < end:
            ask = self._make()
            if ask is None:
                return
            self._made.append(ask)
            self._bytes += len(ask.data)

    def take(self) -> load.Ask:
        if self._made:
            ask = self._made.popleft()
            self._bytes -= len(ask.data)
            return ask
        made = self._make()
        assert made is not None, "more requests than there are"
        return made


def put(
    job: Job, keep: Keep, tick: Callable[[Seen], None], start: Callable[[], int | None],
    show: Callable[[Figures, Loop], None] = lambda figures, loop: None,
) -> Driven:  # fmt: skip
    """The load. `tick` is called ten times a second; `start` when connections are open and requests are made, and says when to begin
    (None: now); `show` once before that, with what another thread may look at. On Ctrl-C what came until then is returned.

    Raises:
        KvctlError: there are no connections.

    """
    plan, step = job.plan, job.step
    kit = job.kit()
    making = step.work.source(kit)
    clock = kit.lot.getrandbits(48)
    if job.of > 1:
        kit.lot.seed(f"{job.seed} {job.number} {job.index} of {job.of}")
    ready, figures, steady = Ready(making.next), Figures(plan.slo), Figures(plan.slo)
    given_up: str | None = None
    behind = time.time_ns() - time.monotonic_ns()

    def told(exchange: Exchange) -> None:
        nonlocal given_up
        exchange.data = b""  # the next need the room
        key = exchange.key
        assert isinstance(key, load.Key)
        if key.phase == load.MEASURED:
            figures.add(exchange, key.ask.asked, key.ask.known, key.ask.tokens)
            if exchange.good and not source.stopped:
                steady.add(exchange, key.ask.asked, key.ask.known, key.ask.tokens)
        else:
            figures.see(exchange)
        if job.logs:
            keep(line(exchange, job.number, job.index, behind))
        if given_up is None and (given_up := _too_many(figures, plan.most_errors)) is not None:
            source.stop()

    def look(now: int) -> None:
        ready.fill(_AHEAD, _MAKING_S)
        tick(Seen(bool(source.began), figures.count, figures.faults.total(), source.live))

    at_once = None if step.at_once is None else job.part(step.at_once)
    ready.fill(_AHEAD + (at_once or 0))
    loop = Loop(job.address, tls=plan.trust.context() if plan.place.secure else None, patience=plan.patience)
    interrupted = False
    with undisturbed():
        try:
            loop.open(min(at_once or 8, _MOST_OPENED))
            show(figures, loop)
            begin = start()
            # Its clock begins as it is made: not before there are connections.
            source = _source(job, at_once, lambda number: ready.take(), told, clock, begin)
            began, cpu = time.monotonic(), time.thread_time()
            try:
                loop.run(source, look)
            except KeyboardInterrupt:
                interrupted = True
            cpu = (time.thread_time() - cpu) / max(time.monotonic() - began, 1e-9)
        except OSError as error:
            raise KvctlError(f"{plan.place.root}: {str(error).lower()}") from None
        finally:
            loop.close()
    if source.upcoming is not None and figures.first and not interrupted and given_up is None:
        # A rate is over whole intervals: of two requests two seconds apart the second has its two seconds, too.
        figures.last = max(figures.last, source.upcoming)
    if not interrupted and figures.good and job.of == 1:
        given_up = _too_many(figures, plan.most_errors, 1) or given_up
    return Driven(
        figures, steady, source.began, source.stopped or time.monotonic_ns(), source.number, source.retried, making.cut, cpu, given_up,
        interrupted,
    )  # fmt: skip


def joined(parts: Sequence[Driven], most_errors: float) -> Driven:
    """What several processes did, as one."""
    figures, steady = parts[0].figures, parts[0].steady
    for one in parts[1:]:
        figures.join(one.figures)
        steady.join(one.steady)
    given_up = next((one.given_up for one in parts if one.given_up is not None), None)
    interrupted = any(one.interrupted for one in parts)
    if not interrupted and figures.good:
        given_up = _too_many(figures, most_errors, 1) or given_up
    return Driven(
        figures, steady, max(one.began for one in parts), min(one.stopped for one in parts), sum(one.sent for one in parts),
        sum(one.retried for one in parts), sum(one.cut for one in parts), max(one.cpu for one in parts), given_up, interrupted,
    )  # fmt: skip


def _source(
    job: Job, at_once: int | None, make: load.Make, told: Callable[[Exchange], None], clock: int, begin: int | None
) -> load.Closed | load.Open:
    plan, step = job.plan, job.step
    whole = plan.length_of(step)
    all_warm, drain = plan.warm_of(step), plan.patience.silence
    # Every n-th of all, of which the first are the warm-up: what is left of its own is measured.
    warm = job.part(all_warm)
    length = whole if whole.requests is None else whole.replace(requests=job.part(all_warm + whole.requests) - warm)
    if at_once is not None:
        return load.Closed(at_once, make, length, told, warm, drain, plan.retries, begin=begin)
    times = itertools.islice(_times(step, whole, clock), job.index, None, job.of)
    return load.Open(times, make, length, told, warm, drain, retries=plan.retries, begin=begin)


def _times(step: Step, length: load.Length, seed: int) -> Iterator[float]:
    own = step.work.times()
    if step.rate is None:
        assert own is not None
        return own
    if step.last_rate is not None:
        assert length.seconds is not None
        return load.ramp(step.rate, step.last_rate, length.seconds)
    if step.burstiness is None:
        return load.constant(step.rate)
    return load.gamma(step.rate, step.burstiness, seed)


def _too_many(figures: Figures, most_errors: float, least: int = _FEWEST) -> str | None:
    """Why a load is given up; of fewer requests than `least` nothing is said."""
    failed, count = figures.faults.total(), figures.count
    if count >= least and failed > count * most_errors / 100:
        return f"{failed:,} of {count:,} requests failed, and {most_errors:g}% may"
    return None


def line(one: Exchange, step: int, process: int, behind: int) -> dict[str, Any]:
    """What became of a request; times in seconds from when it was due, and that in seconds since 1970. `behind`: nanoseconds from the
    monotonic clock to that of the day."""

    def since(stamp: int) -> float | None:
        return (stamp - one.scheduled) / 1e9 if stamp else None

    usage, key = one.usage, one.key
    assert isinstance(key, load.Key)
    return {
        "load": step, "process": process, "number": key.number, "due": (one.scheduled + behind) / 1e9, "phase": key.phase, "tries": key.tries + 1, "built_input_tokens": key.ask.tokens,
        "known_input_tokens": key.ask.known,
        "sent": since(one.sent), "first_byte": since(one.first_byte), "first_token": since(one.first_token),
        "first_answer": since(one.answer_at), "last_token": since(one.last_token), "ended": since(one.ended), "events": len(one.stamps),
        "input_tokens": None if usage is None else usage.prompt, "output_tokens": None if usage is None else usage.completion,
        "cached_tokens": None if usage is None else usage.cached, "finish": one.finish, "status": one.status,
        "fault": None if one.fault is None else one.fault.kind, "message": None if one.fault is None else one.fault.message,
        "reconnects": one.reconnects, "kernel_stamps": one.kernel,
    }  # fmt: skip


@contextmanager
def undisturbed() -> Iterator[None]:
    """The collector of garbage waits: it would stop the clock's reader in the middle."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
