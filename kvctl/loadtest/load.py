"""When requests are sent: so many at a time, or by a clock that does not wait for answers."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from kvctl.loadtest.exchange import Exchange
from kvctl.record import Record

SECOND = 1_000_000_000
WARM, MEASURED = "warm-up", "measured"

Make = Callable[[int], bytes]
"""The bytes of the request with this number, from 0."""


class Length(Record):
    """How long is sent: a number of measured requests, or seconds; the first of both that is reached."""

    requests: int | None = None
    seconds: float | None = None


class Key:
    """What the sender knows an exchange by."""

    __slots__ = ("number", "phase")

    def __init__(self, number: int, phase: str) -> None:
        self.number, self.phase = number, phase


class Load:
    """What both kinds of load share: numbers, the warm-up, and the end.

    The first `warm` requests are the warm-up. The measured ones follow without a pause, into the server as the warm-up has filled it;
    the clock of the run begins with the first of them. After the last there is no new request, and answers under way are waited for
    `drain` seconds at most.
    """

    def __init__(
        self, make: Make, length: Length, ended: Callable[[Exchange], None], warm: int = 0, drain: float = 300.0
    ) -> None:
        self._make, self._length, self._told = make, length, ended
        self._warm, self._drain = warm, int(drain * SECOND)
        self.number = 0
        """Requests so far."""
        self.live = 0
        """Of these, those under way."""
        self.began = 0
        """When the first measured request was due."""
        self.last = 0
        """When the last one was."""
        self.stopped = 0
        """When no more were sent."""

    def stop(self) -> None:
        """Send no more."""
        self.stopped = self.stopped or time.monotonic_ns()

    def take(self) -> Exchange:
        when = self._next()
        number = self.number
        phase = WARM if number < self._warm else MEASURED
        if phase == MEASURED:
            self.began = self.began or when
            self.last = when
        self.number += 1
        self.live += 1
        return Exchange(self._make(number), when, Key(number, phase))

    def ended(self, exchange: Exchange) -> None:
        self.live -= 1
        self._told(exchange)

    def over(self, now: int) -> bool:
        return bool(self.stopped) and now > self.stopped + self._drain

    def _next(self) -> int:
        raise NotImplementedError

    def _enough(self, when: int) -> bool:
        """Whether a request at this time would be one too many."""
        if self.stopped:
            return True
        length = self._length
        enough = length.requests is not None and self.number >= self._warm + length.requests
        late = length.seconds is not None and self.began and when > self.began + length.seconds * SECOND
        if enough or late:
            self.stop()
        return bool(self.stopped)


class Closed(Load):
    """So many requests at a time: each answer makes room for the next at once."""

    def __init__(
        self,
        at_once: int,
        make: Make,
        length: Length,
        ended: Callable[[Exchange], None],
        warm: int = 0,
        drain: float = 300.0,
    ) -> None:
        super().__init__(make, length, ended, warm, drain)
        self.at_once = at_once
        self._free = time.monotonic_ns()

    def due(self) -> int | None:
        if self.live >= self.at_once or self._enough(self._free):
            return None
        return self._free

    def _next(self) -> int:
        return self._free

    def ended(self, exchange: Exchange) -> None:
        self._free = time.monotonic_ns()
        super().ended(exchange)


class Open(Load):
    """By a clock: each request is due at its time, whatever became of those before it.

    `times` are seconds from the start, in order. With `most` under way the next waits, which its exchange shows: it was
    sent later than scheduled.
    """

    def __init__(
        self, times: Iterator[float], make: Make, length: Length, ended: Callable[[Exchange], None], warm: int = 0, drain: float = 300.0,
        most: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(make, length, ended, warm, drain)
        self.most = most
        self._times = times
        self._start = time.monotonic_ns()
        self._due: int | None = self._start
        self._forward()

    def _forward(self) -> None:
        at = next(self._times, None)
        self._due = None if at is None else self._start + int(at * SECOND)

    def due(self) -> int | None:
        if self._due is None:
            self.stop()
            return None
        if self._enough(self._due) or (self.most is not None and self.live >= self.most):
            return None
        return self._due

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
