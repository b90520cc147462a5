"""What a load is doing right now, for whoever shows it from another thread.

The thread that is timed says once, as a load begins, where its figures are; nothing is told after that. Whoever shows them reads
counts that go up, which is harmless while they do.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.loadtest.figures import Figures
    from kvctl.loadtest.histogram import Histogram
    from kvctl.loadtest.load import Length, Load
    from kvctl.loadtest.loop import Loop
    from kvctl.loadtest.metrics import Sample, Watch

COURSE = 60
"""Seconds that are kept of each course."""


class Seen(Record):
    """One moment of a load."""

    name: str
    number: int
    of: int | None
    """Loads that there will be; None where that is not known."""
    warming: bool
    part: float
    """Of the load that is done, from 0 to 1: of requests, or of time, whichever is further."""
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
    ttft: tuple[float | None, ...]
    """Means of each of the last seconds, in seconds; None where no request ended."""
    tpot: tuple[float | None, ...]
    events: tuple[float, ...]
    """With output, in each of the last seconds."""


class Live:
    """Where the figures of the load are; `look` gives a moment of it."""

    def __init__(self) -> None:
        self._load: _Load | None = None

    def begin(
        self, name: str, number: int, of: int | None, length: Length, figures: Figures, source: Load, loop: Loop, watch: Watch | None
    ) -> None:  # fmt: skip
        """A load begins."""
        self._load = _Load(name, number, of, length, figures, source, loop, watch)

    def end(self) -> None:
        """It is over."""
        self._load = None

    def look(self) -> Seen | None:
        """Now; None between loads. To be called by one thread, some times a second."""
        load = self._load
        return None if load is None else load.look()


class _Load:
    def __init__(
        self, name: str, number: int, of: int | None, length: Length, figures: Figures, source: Load, loop: Loop, watch: Watch | None
    ) -> None:  # fmt: skip
        self.name, self.number, self.of, self.length = name, number, of, length
        self.figures, self.source, self.loop, self.watch = figures, source, loop, watch
        self.began = time.monotonic()
        self.ttft, self.tpot = _Course(), _Course()
        self.events: deque[float] = deque(maxlen=COURSE)
        self.second = self.began
        self.seen = 0
        """Events until then."""

    def look(self) -> Seen:
        now = time.monotonic()
        figures, source, length = self.figures, self.source, self.length
        if now - self.second >= 1:
            self._step(now)
        parts = [0.0]
        if length.requests:
            parts.append(figures.count / length.requests)
        if length.seconds and source.began:
            parts.append((now - source.began / 1e9) / length.seconds)
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
        return Seen(
            self.name, self.number, self.of, not source.began, min(max(parts), 1.0), now - self.began, goal, figures.good,
            figures.faults.total(), source.live, values.get("kv_use"), values.get("running"), values.get("waiting"),
            None if lost is None or first is None else max(0.0, lost - first.values.get("preemptions", lost)),
            tuple(self.ttft.means), tuple(self.tpot.means), tuple(self.events),
        )  # fmt: skip

    def _samples(self) -> tuple[Sample | None, Sample | None]:
        samples = [] if self.watch is None else self.watch.samples
        return (samples[-1], samples[0]) if samples else (None, None)

    def _step(self, now: float) -> None:
        """One more second of each course."""
        self.ttft.step(self.figures.times["ttft"])
        self.tpot.step(self.figures.times["tpot"])
        # Of answers that are complete, and of those under way; one that ends meanwhile may be counted in neither until the next look.
        events = sum(list(self.figures.by_second.values())) + sum(
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
