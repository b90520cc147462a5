"""What is to be done to a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvctl.loadtest import asks, load, target
from kvctl.loadtest.capacity import Sizing
from kvctl.loadtest.figures import Slo
from kvctl.loadtest.loop import Patience
from kvctl.loadtest.work import Work
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.loadtest.launch import Launch
    from kvctl.loadtest.promised import Promised


_WARM_S = 10.0
"""Seconds that the warm-up of a slow clock takes, at most."""


class Step(Record):
    """One load: requests of a kind, so many at once, so many a second, or (neither) by their own times."""

    work: Work
    at_once: int | None = None
    """Requests that are kept under way; conversations, where those are what is sent."""
    rate: float | None = None
    """A second."""
    last_rate: float | None = None
    """At the end, where the rate rises or falls."""
    burstiness: float | None = None
    """Of the gaps; None: they are even."""
    beside: str = ""
    """In what requests of this load differ from those of others."""
    once: bool = False
    """Whether each of those at once is sent one time, without a warm-up: how many are held is looked for, and no speed."""

    @property
    def words(self) -> str:
        """ "16 at once", "5 a second", "1 to 10 a second, 4,096 in"."""
        what = " conversations" if self.work.talks else ""
        if self.at_once is not None:
            pace = f"{self.at_once:,}{what} at once"
        elif self.rate is None:
            pace = "by its times"
        elif self.last_rate is None:
            pace = f"{self.rate:g}{what} a second"
        else:
            pace = f"{self.rate:g} to {self.last_rate:g}{what} a second"
        return f"{pace}, {self.beside}" if self.beside else pace

    @property
    def kind(self) -> dict[str, Any]:
        """What makes a load another one than others, in whatever run."""
        return {name: value for name, value in self.to_dict().items() if name not in ("words", "beside")}

    def to_dict(self) -> dict[str, Any]:
        out = {name: getattr(self, name) for name in ("at_once", "rate", "last_rate", "burstiness")}
        return out | {"words": self.words, "beside": self.beside, "work": self.work.to_dict()}


class Plan(Record):
    """What is to be done to a server."""

    place: target.Place
    steps: tuple[Step, ...]
    length: load.Length | None = None
    """Of each load; None: by how many requests are under way."""
    path: str = asks.CHAT
    model: str | None = None
    warm: int | None = None
    """Requests before those that count; None: as many as are under way, and eight at least; by a slow clock those of ten seconds."""
    headers: Mapping[str, str] = {}
    extra: Mapping[str, Any] = {}
    trust: target.Trust = target.Trust()
    patience: Patience = Patience()
    slo: Slo | None = None
    slo_percent: float = 99.0
    """Requests of a hundred that have to keep it."""
    seed: int | None = None
    """Of prompts and times; None draws one, so that no run finds another's prompts in the server's cache."""
    most_errors: float = 5.0
    """Percent of requests that may fail before a load is given up."""
    every: float = 0.25
    """Seconds between looks at the server's metrics."""
    limit: bool = False
    """Whether the steps are only where a search for the limit begins."""
    processes: int = 1
    """Of this client, which put each load on the server together."""
    retries: int = 0
    """Times that a request is sent again which the server turned away."""
    reset_cache: bool = False
    """Whether the server is told to forget what it keeps of prompts, before each load."""
    launch: Launch | None = None
    """What is started for the test."""
    sizing: Sizing = Sizing()
    """What is known of how the server was started."""
    promised: Promised | None = None
    """What a plan of kvctl recommend says that this will show."""
    notes: tuple[str, ...] = ()

    def warm_of(self, step: Step) -> int:
        """Requests of the warm-up."""
        if step.once:
            return 0
        warm = self.warm if self.warm is not None else max(8, step.at_once or 0)
        if self.warm is None and step.rate is not None:
            warm = max(1, min(warm, int(min(step.rate, step.last_rate or step.rate) * _WARM_S)))
        count = step.work.count
        return warm if count is None or self.warm is not None else min(warm, count // 4)

    def length_of(self, step: Step) -> load.Length:
        """As asked, else all that there are; else four requests for each that is under way, and enough to tell percentiles from."""
        if step.once and step.at_once is not None:
            return load.Length(requests=step.at_once)
        count = step.work.count
        if count is not None:
            left = max(1, count - self.warm_of(step))
            asked = self.length or load.Length()
            return asked.replace(requests=left if asked.requests is None else min(asked.requests, left))
        return self.length or load.Length(requests=max(24 if self.limit else 50, 4 * (step.at_once or 0)))
