"""When requests are sent: so many at a time, or by a clock that does not wait for answers."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable, Iterator

from kvctl.loadtest.exchange import Exchange, Wrote
from kvctl.record import Record

SECOND = 1_000_000_000
WARM, MEASURED = "warm-up", "measured"
_BACK_OFF = 1.0
"""Seconds that are waited where a server turns a request away and does not say for how long."""


class Ask:
    """One request that is to be sent, and what is known of it beforehand."""

    __slots__ = ("asked", "data", "known", "pause", "reads", "then", "tokens")

    def __init__(
        self, data: bytes, *, tokens: int | None = None, asked: int | None = None, known: int | None = None,
        then: Callable[[Exchange], Ask | None] | None = None, reads: bool = False,
    ) -> None:  # fmt: skip
        self.data = data
        self.tokens = tokens
        """Of its prompt, as it was built; None where nobody has counted them."""
        self.asked = asked
        """Output tokens that the engine was told to write; None: the answer ends where it will."""
        self.known = known
        """Of its prompt, those that were sent or written before, and may be found in the server's cache; None: nothing is meant to be."""
        self.then = then
        """What follows its answer, as the next turn of a conversation."""
        self.reads = reads
        """Whether that needs what the model wrote."""
        self.pause = 0.0
        """Seconds between the answer before it and this one."""


Make = Callable[[int], Ask]
"""The request with this number, from 0."""


class Length(Record):
    """How long is sent: a number of measured requests, or seconds; the first of both that is reached. Neither: until there are no more."""

    requests: int | None = None
    seconds: float | None = None


class Key:
    """What the sender knows an exchange by."""

    __slots__ = ("ask", "number", "phase", "tries")

    def __init__(self, number: int, phase: str, ask: Ask, tries: int = 0) -> None:
        self.number, self.phase, self.ask, self.tries = number, phase, ask, tries


class _Later:
    """A request whose time is known: the next turn of a conversation, or one that was turned away."""

    __slots__ = ("ask", "due", "refused")

    def __init__(self, due: int, ask: Ask, refused: Exchange | None = None) -> None:
        self.due, self.ask = due, ask
        self.refused = refused
        """What became of it the last time, of one that was turned away."""

    def __lt__(self, other: _Later) -> bool:
        return self.due < other.due


class Load:
    """What both kinds of load share: numbers, the warm-up, what follows answers, and the end.

    The first `warm` requests are the warm-up. The measured ones follow without a pause, into the server as the warm-up has filled it;
    the clock of the run begins with the first of them. After the last there is no new request, and answers under way are waited for
    `drain` seconds at most. One that the server turns away (429, 503) is sent again, up to `retries` times, when the server says, if that is
    within `drain` and before the end of a load that has a time; it keeps the time that it was due at first.
    """

    def __init__(
        self, make: Make, length: Length, ended: Callable[[Exchange], None], warm: int = 0, drain: float = 300.0, retries: int = 0
    ) -> None:  # fmt: skip
        self._make, self._length, self._told = make, length, ended
        self._warm, self._drain, self._retries = warm, int(drain * SECOND), retries
        self._later: list[_Later] = []
        self.number = 0
        """Requests so far."""
        self.live = 0
        """Of these, those under way."""
        self.retried = 0
        """Times that one was sent again."""
        self.began = 0
        """When the first measured request was due."""
        self.last = 0
        """When the last one was."""
        self.stopped = 0
        """When no more were sent."""

    @property
    def upcoming(self) -> int | None:
        """When the next request that follows none would have been due, by a clock; None where there is no clock."""
        return None

    def stop(self) -> None:
        """Send no more; what was turned away is not tried again."""
        self._end()
        refused = [later.refused for later in self._later if later.refused is not None]
        self._later.clear()
        for exchange in refused:
            self._told(exchange)

    def _end(self) -> None:
        """Begin no more, and no further turn."""
        if not self.stopped:
            self.stopped = time.monotonic_ns()
            self._later = [later for later in self._later if later.refused is not None]
            heapq.heapify(self._later)

    @property
    def held(self) -> int:
        """Requests under way, and those that follow one and are not due yet."""
        return self.live + len(self._later)

    def due(self) -> int | None:
        """When the next request is to be sent; None: not before another has ended, or never."""
        if self._length.seconds is not None and self._too_late(time.monotonic_ns()):
            self._end()
        if not self.stopped and self._length.requests is not None and self.number >= self._warm + self._length.requests:
            self._end()
        fresh = None if self.stopped else self._fresh()
        later = self._later[0].due if self._later else None
        return later if fresh is None else fresh if later is None else min(fresh, later)

    def take(self) -> Exchange:
        """That request."""
        fresh = None if self.stopped else self._fresh()
        if self._later and (fresh is None or self._later[0].due <= fresh):  # what was begun goes on first
            later = heapq.heappop(self._later)
            if later.refused is None:
                return self._counted(later.ask, later.due)
            key = later.refused.key
            assert isinstance(key, Key)
            self.live += 1
            return self._exchange(
                later.ask, later.refused.scheduled, Key(key.number, key.phase, later.ask, key.tries + 1)
            )
        when = self._next()
        return self._counted(self._make(self.number), when)

    def _counted(self, ask: Ask, when: int) -> Exchange:
        number = self.number
        phase = WARM if number < self._warm else MEASURED
        if phase == MEASURED:
            self.began = self.began or when
            self.last = when
        self.number += 1
        self.live += 1
        return self._exchange(ask, when, Key(number, phase, ask))

    @staticmethod
    def _exchange(ask: Ask, when: int, key: Key) -> Exchange:
        exchange = Exchange(ask.data, when, key)
        exchange.tries = key.tries
        if ask.reads:
            exchange.wrote = Wrote()
        return exchange

    def ended(self, exchange: Exchange) -> None:
        """One has, well or badly."""
        self.live -= 1
        key = exchange.key
        assert isinstance(key, Key)
        now = time.monotonic_ns()
        fault = exchange.fault
        if fault is not None and fault.kind == "rejected" and key.tries < self._retries:
            wait = _BACK_OFF if exchange.retry_after is None else max(exchange.retry_after, 0.0)
            if wait * SECOND <= self._drain and not self._too_late(now + int(wait * SECOND)):
                self.retried += 1
                heapq.heappush(self._later, _Later(now + int(wait * SECOND), key.ask, exchange))
                return
        if key.ask.then is not None and exchange.good and not self.stopped:
            after = key.ask.then(exchange)
            if after is not None:
                heapq.heappush(self._later, _Later(now + int(after.pause * SECOND), after))
        self._told(exchange)

    def _too_late(self, when: int) -> bool:
        """Whether the time of a load that has one is over by then."""
        seconds = self._length.seconds
        return seconds is not None and bool(self.began) and when > self.began + seconds * SECOND

    def over(self, now: int) -> bool:
        """Whether what is still under way is to be broken off."""
        late = bool(self.stopped) and now > self.stopped + self._drain
        if late:
            self.stop()
        return late

    def _fresh(self) -> int | None:
        """When a request that follows none is due."""
        raise NotImplementedError

    def _next(self) -> int:
        """That time; it is taken."""
        raise NotImplementedError


class Closed(Load):
    """So many requests at a time: each answer makes room for the next at once.

    A conversation keeps its room until it is over, between its turns too. The first are due at `begin` (nanoseconds), or at once.
    """

    def __init__(
        self, at_once: int, make: Make, length: Length, ended: Callable[[Exchange], None], warm: int = 0, drain: float = 300.0,
        retries: int = 0, begin: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(make, length, ended, warm, drain, retries)
        self.at_once = at_once
        self._free = begin or time.monotonic_ns()

    def _fresh(self) -> int | None:
        return self._free if self.held < self.at_once else None

    def _next(self) -> int:
        return self._free

    def ended(self, exchange: Exchange) -> None:
        self._free = time.monotonic_ns()
        super().ended(exchange)


class Open(Load):
    """By a clock: each request (or conversation) is due at its time, whatever became of those before it.

    `times` are seconds from `begin` (or from now), in order. With `most` under way the next waits, which its exchange shows: it was
    sent later than scheduled.
    """

    def __init__(
        self, times: Iterator[float], make: Make, length: Length, ended: Callable[[Exchange], None], warm: int = 0, drain: float = 300.0,
        most: int | None = None, retries: int = 0, begin: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(make, length, ended, warm, drain, retries)
        self.most = most
        self._times = times
        self._start = begin or time.monotonic_ns()
        self._due: int | None = self._start
        self._forward()

    def _forward(self) -> None:
        at = next(self._times, None)
        self._due = None if at is None else self._start + int(at * SECOND)

    @property
    def upcoming(self) -> int | None:
        return self._due

    def _fresh(self) -> int | None:
        return None if self.most is not None and self.live >= self.most else self._due

    def _next(self) -> int:
        assert self._due is not None
        when = self._due
        self._forward()
        return when


# -- times of arrival, in seconds from the start ------------------------------------------------------------


def constant(rate: float) -> Iterator[float]:
    """`rate` a second, evenly."""
    number = 0
    while True:
        yield number / rate
        number += 1


def gamma(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """`rate` a second on average; gaps follow a gamma distribution of shape `burstiness`: 1 is Poisson, less comes in bursts."""
    lot, at = random.Random(seed), 0.0
    while True:
        at += lot.gammavariate(burstiness, 1 / (rate * burstiness))
        yield at


def ramp(first: float, last: float, seconds: float) -> Iterator[float]:
    """From `first` to `last` a second, in so many seconds, evenly at each rate; then on at `last`."""
    number, at = 0, 0.0
    slope = (last - first) / seconds
    while True:
        yield at
        number += 1
        # The number of arrivals until t is first·t + slope·t²/2: solved for t.
        whole = first * seconds + slope * seconds**2 / 2
        if number >= whole:
            at = seconds + (number - whole) / last
        elif abs(slope) < 1e-12:
            at = number / first
        else:
            at = ((first * first + 2 * slope * number) ** 0.5 - first) / slope
