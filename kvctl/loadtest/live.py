"""What a load is doing right now, for whoever shows it from another thread.

The thread that is timed says ten times a second how far it is, in a few counts; where the load is put on the server by this process it
also says once where its figures are. Whoever shows them reads counts that go up, which is harmless while they do. Several processes
have figures of their own: then there are counts alone.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.loadtest.drive import Seen
    from kvctl.loadtest.figures import Figures
    from kvctl.loadtest.histogram import Histogram
    from kvctl.loadtest.load import Length
    from kvctl.loadtest.loop import Loop
    from kvctl.loadtest.metrics import Sample, Watch

COURSE = 60
"""Seconds that are kept of each course."""


class Moment(Record):
    """One moment of a load."""

    name: str
    number: int
    of: int | None
    """Loads that there will be; None where that is not known."""
    warming: bool
    part: float | None
    """Of the load that is done, from 0 to 1: of requests, or of time, whichever is further; None where it has no such end."""
    seconds: float
    """Since it began, warm-up and all."""
    goal: str
    """ "60 requests", "30 s"."""
    good: int
    failed: int
    under_way: int
    kv_use: float | None
    running: float | None
    waiting: float | None
    preempted: float | None
    """Since the load began."""
    ttft: tuple[float | None, ...] | None
    """Means of each of the last seconds, in seconds; None where no request ended. Of several processes there are no courses."""
    tpot: tuple[float | None, ...] | None
    events: tuple[float, ...] | None
    """With output, in each of the last seconds."""


class Live:
    """What there is to know of the load; `look` gives a moment of it."""

    def __init__(self) -> None:
        self._load: _Load | None = None

    def begin(self, name: str, number: int, of: int | None, length: Length) -> None:
        """A load begins."""
        self._load = _Load(name, number, of, length)

    def watch(self, watch: Watch | None) -> None:
        """Who looks at the server's metrics meanwhile."""
        if self._load is not None:
            self._load.watch = watch

    def inside(self, figures: Figures, loop: Loop) -> None:
        """Where its figures are."""
        if self._load is not None:
            self._load.courses = _Courses(figures, loop)

    def tick(self, seen: Seen) -> None:
        """How far it is."""
        if self._load is not None:
            self._load.tick(seen)

    def end(self) -> None:
        """It is over."""
        self._load = None

    def look(self) -> Moment | None:
        """Now; None between loads, and before one sends. To be called by one thread, some times a second."""
        load = self._load
        return None if load is None else load.look()


class _Load:
    def __init__(self, name: str, number: int, of: int | None, length: Length) -> None:
        self.name, self.number, self.of, self.length = name, number, of, length
        self.watch: Watch | None = None
        self.courses: _Courses | None = None
        self.seen: Seen | None = None
        self.first = self.measuring = 0.0
        """When it was told of first, and when requests were measured first."""

    def tick(self, seen: Seen) -> None:
        self.first = self.first or time.monotonic()
        if seen.began and not self.measuring:
            self.measuring = time.monotonic()
        self.seen = seen

    def look(self) -> Moment | None:
        seen, length, now = self.seen, self.length, time.monotonic()
        if seen is None:
            return None
        parts = []
        if length.requests:
            parts.append(seen.measured / length.requests)
        if length.seconds:
            parts.append((now - self.measuring) / length.seconds if self.measuring else 0.0)
        goal = " or ".join(
            words
            for words in (
                f"{length.requests:,} requests" if length.requests else "",
                f"{length.seconds:g} s" if length.seconds else "",
            )
            if words
        )
        sample, first = self._samples()
        values = {} if sample is None else sample.values
        lost = values.get("preemptions")
        courses = self.courses
        if courses is not None:
            courses.look(now)
        return Moment(
            self.name, self.number, self.of, not seen.began, min(max(parts), 1.0) if parts else None, now - self.first, goal,
            seen.measured - seen.failed, seen.failed, seen.live, values.get("kv_use"), values.get("running"), values.get("waiting"),
            None if lost is None or first is None else max(0.0, lost - first.values.get("preemptions", lost)),
            *((None, None, None) if courses is None else courses.all),
        )  # fmt: skip

    def _samples(self) -> tuple[Sample | None, Sample | None]:
        samples = [] if self.watch is None else self.watch.samples
        return (samples[-1], samples[0]) if samples else (None, None)


class _Courses:
    """Of each second what came in it, from figures that grow."""

    def __init__(self, figures: Figures, loop: Loop) -> None:
        self.figures, self.loop = figures, loop
        self.ttft, self.tpot = _Course(), _Course()
        self.events: deque[float] = deque(maxlen=COURSE)
        self.second = time.monotonic()
        self.seen = 0
        """Events until then."""

    @property
    def all(self) -> tuple[tuple[float | None, ...], tuple[float | None, ...], tuple[float, ...]]:
        return tuple(self.ttft.means), tuple(self.tpot.means), tuple(self.events)

    def look(self, now: float) -> None:
        """One more second of each, where one is over."""
        if now - self.second < 1:
            return
        self.ttft.step(self.figures.times["ttft"])
        self.tpot.step(self.figures.times["tpot"])
        # Of answers that are complete, and of those under way; one that ends meanwhile may be counted in neither until the next look.
        events = self.figures.events + sum(
            len(exchange.stamps) for one in list(self.loop.busy) if (exchange := one.exchange) is not None
        )
        self.events.append(max(0, events - self.seen) / (now - self.second))
        self.seen, self.second = max(events, self.seen), now


class _Course:
    """Means of what a histogram got since the last step."""

    def __init__(self) -> None:
        self.means: deque[float | None] = deque(maxlen=COURSE)
        self._count = self._total = 0

    def step(self, found: Histogram) -> None:
        count, total = found.count, found.total
        self.means.append((total - self._total) / (count - self._count) / 1e9 if count > self._count else None)
        self._count, self._total = count, total
