"""From exchanges to figures: what each means is said here once, and goes into --explain and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from operator import sub
from typing import Any

from kvctl.loadtest.exchange import Exchange
from kvctl.loadtest.histogram import Histogram
from kvctl.loadtest.slices import Slices
from kvctl.record import Record

SECOND = 1_000_000_000
DEFINITIONS: Mapping[str, str] = {
    "ttft": "time to first token: from the end of sending to the first event with output (text, reasoning or a tool call)",
    "ttfat": "time to first answer token: the same to the first that is no reasoning",
    "itl": "time between tokens: gaps between events with output, where these carry one token each, or usage says how many",
    "icl": "time between chunks: gaps between events with output, however many tokens they carry",
    "tpot": "time per output token: of each request (last event - first event) / (output tokens - 1)",
    "e2e": "end to end: from the end of sending to the last event with output",
    "dispatch": "dispatch delay: from when a request was due to the end of its sending",
    "ttft_scheduled": "ttft from when the request was due: with what it waited for the client",
    "e2e_scheduled": "e2e from when the request was due",
}
TIMES = tuple(DEFINITIONS)
RATES: Mapping[str, str] = {
    "hit rate": "cached input tokens / all input tokens",
    "goodput": "requests a second that keep --slo",
    "error rate": "failed requests / ended requests, each once; failures are no samples of any time",
}
"""What other figures mean."""
SUMS = (
    "good", "kept", "tokens_in", "tokens_out", "cached", "known", "chunks", "bundled", "with_prompt", "with_cached", "with_built", "built",
    "counted", "with_known", "without_usage", "short", "reconnects", "user_stamps", "events", "answered", "waited",
)  # fmt: skip
"""Figures that are sums over exchanges."""
_MOST_WORDS = 3
"""Messages of each kind of fault that are kept."""
_ONE_EACH = 1.05
"""Tokens an event carries at most, on average, where its gaps are called time between tokens."""


class Slo(Record):
    """What a request has to keep, in nanoseconds; None: any time will do."""

    ttft: int | None = None
    tpot: int | None = None
    e2e: int | None = None
    scheduled: bool = False
    """Whether times count from when a request was due."""

    @property
    def words(self) -> str:
        """ "ttft 500 ms, tpot 50 ms"."""
        limits = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return ", ".join(f"{name} {limit / 1e6:g} ms" for name, limit in limits.items() if limit is not None)

    def to_dict(self) -> dict[str, Any]:
        """Limits in seconds."""
        limits = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        out: dict[str, Any] = {name: None if limit is None else limit / SECOND for name, limit in limits.items()}
        return out | {"from_schedule": self.scheduled}

    def kept(self, times: Mapping[str, int], *, retried: bool = False) -> bool:
        """Whether a request with these times keeps it; one without a time of its own (one token has no tpot) keeps that. What waited
        to be sent again (`retried`) is held to it from when it was due."""
        own = {"ttft": "ttft_scheduled", "e2e": "e2e_scheduled"} if self.scheduled or retried else {}
        limits = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return all(limit is None or times.get(own.get(name, name), 0) <= limit for name, limit in limits.items())


def times_of(exchange: Exchange, tokens: int) -> dict[str, int]:
    """Times of a good exchange of so many output tokens, in nanoseconds."""
    first, last = exchange.first_token, exchange.last_token
    out = {
        "ttft": first - exchange.sent,
        "e2e": last - exchange.sent,
        "dispatch": exchange.sent - exchange.scheduled,
        "ttft_scheduled": first - exchange.scheduled,
        "e2e_scheduled": last - exchange.scheduled,
    }
    if exchange.answer_at:
        out["ttfat"] = exchange.answer_at - exchange.sent
    if tokens > 1 and len(exchange.stamps) > 1:
        out["tpot"] = (last - first) // (tokens - 1)
    return out


class Figures:
    """Adds exchanges up, in memory that does not grow with their number."""

    def __init__(self, slo: Slo | None = None) -> None:
        self.slo = slo
        self.times = {name: Histogram() for name in TIMES}
        self.good = 0
        self.faults: Counter[str] = Counter()
        self.words: dict[str, list[str]] = {}
        """The first messages of each kind of fault."""
        self.kept = 0
        """Good ones that keep the objective."""
        self.tokens_in = self.tokens_out = self.cached = self.known = 0
        self.chunks = self.bundled = 0
        self.sources: Counter[str] = Counter()
        """Where the number of output tokens of how many requests is from: "usage", or "events"."""
        self.with_prompt = 0
        """Good ones whose usage says the tokens of the prompt."""
        self.with_cached = 0
        """Good ones whose usage says something of cached tokens."""
        self.with_built = self.built = self.counted = 0
        """Good ones whose prompts were built of so many tokens, and the server's count of the same prompts."""
        self.with_known = 0
        """Good ones of which some input tokens had been sent or written before, which are added up in `known`."""
        self.without_usage = 0
        self.short = 0
        """Good ones with fewer output tokens than were asked for."""
        self.reconnects = 0
        self.user_stamps = 0
        """Good ones of which not all stamps are the kernel's."""
        self.rejected_wait: Histogram = Histogram()
        """Of those that were turned away, what they were asked to wait."""
        self.first = self.last = 0
        """The first sending, and the last event."""
        self.slices = Slices()
        """Events with output by when they came, of all exchanges."""
        self.events = 0
        """All of these."""
        self.start, self._due, self._start = 0, 0, (0, 0)
        self.answered, self.waited = 0, 0
        """Exchanges with a first token, and nanoseconds until then in all: the warm-up's among them, as the server counts."""

    def see(self, exchange: Exchange) -> None:
        """One that counts for nothing but what the server wrote in each second: of the warm-up."""
        self.slices.add(exchange.stamps)
        self.events += len(exchange.stamps)
        self._begin(exchange)
        if exchange.stamps:
            self.answered += 1
            self.waited += exchange.first_token - exchange.sent

    def _begin(self, exchange: Exchange) -> None:
        """Requests that are due before all others are the start of a load: they go out one after the other."""
        due, sent = exchange.scheduled, exchange.sent
        if not sent or (self._due and due > self._due):
            return
        if not self._due or due < self._due:
            self._due, self.start, self._start = due, 0, (sent, sent)
        self.start += 1
        self._start = min(self._start[0], sent), max(self._start[1], sent)

    @property
    def skew(self) -> float:
        """Seconds from the first to the last sending of these."""
        return (self._start[1] - self._start[0]) / SECOND

    def add(
        self, exchange: Exchange, asked: int | None = None, known: int | None = None, built: int | None = None
    ) -> None:
        """One that has ended; `asked`: output tokens that it was to have; `known`: input tokens that were sent or written before;
        `built`: input tokens that its prompt was made of."""
        self.reconnects += exchange.reconnects
        if exchange.sent and (not self.first or exchange.sent < self.first):
            self.first = exchange.sent
        self.last = max(self.last, exchange.last_token, exchange.ended)
        self.see(exchange)
        if exchange.fault is not None:
            self._bad(exchange)
            return
        self.good += 1
        tokens = self._tokens(exchange)
        if asked is not None and tokens < asked:
            self.short += 1
        if known is not None and exchange.usage is not None and exchange.usage.prompt:
            self.known += min(known, exchange.usage.prompt)
            self.with_known += 1
        if built is not None and exchange.usage is not None and exchange.usage.prompt:
            self.built += built
            self.counted += exchange.usage.prompt
            self.with_built += 1
        found = times_of(exchange, tokens)
        if exchange.tries:
            del found["dispatch"]  # the server had it wait, not the client
        for name, value in found.items():
            self.times[name].add(value)
        self._gaps(exchange, tokens)
        self.kept += self.slo is None or self.slo.kept(found, retried=exchange.tries > 0)
        self.user_stamps += not exchange.kernel

    def _bad(self, exchange: Exchange) -> None:
        fault = exchange.fault
        assert fault is not None
        self.faults[fault.kind] += 1
        said = self.words.setdefault(fault.kind, [])
        if len(said) < _MOST_WORDS and fault.message not in said:
            said.append(fault.message)
        if exchange.retry_after is not None:
            self.rejected_wait.add(int(exchange.retry_after * SECOND))

    def _tokens(self, exchange: Exchange) -> int:
        usage, events = exchange.usage, len(exchange.stamps)
        self.chunks += events
        self.bundled += exchange.bundled
        # A server that wrote and says it did not is not believed.
        said = usage.completion if usage is not None and (usage.completion or not events) else None
        self.sources["events" if said is None else "usage"] += 1
        if usage is None:
            self.without_usage += 1
        else:
            self.tokens_in += usage.prompt or 0
            self.with_prompt += usage.prompt is not None
            self.cached += usage.cached or 0
            self.with_cached += usage.cached is not None
        tokens = events if said is None else said
        self.tokens_out += tokens
        return tokens

    def _gaps(self, exchange: Exchange, tokens: int) -> None:
        stamps = exchange.stamps
        gaps = [*map(sub, stamps[1:], stamps)]
        each = tokens <= _ONE_EACH * len(stamps)
        icl, itl = self.times["icl"], self.times["itl"]
        icl.extend(gaps, *([itl] if each else ()))
        counts = exchange.counts
        if not each and len(counts) == len(stamps):
            for gap, (before, after) in zip(gaps, pairwise(counts), strict=True):
                if after > before:
                    itl.add(gap // (after - before), after - before)

    def join(self, other: Figures) -> None:
        """Add all of another."""
        for name, found in self.times.items():
            found.join(other.times[name])
        self.rejected_wait.join(other.rejected_wait)
        self.slices.join(other.slices)
        self.faults.update(other.faults)
        self.sources.update(other.sources)
        for kind, words in other.words.items():
            own = self.words.setdefault(kind, [])
            own += [one for one in words if one not in own][: max(0, _MOST_WORDS - len(own))]
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.first = min(self.first or other.first, other.first or self.first)
        self.last = max(self.last, other.last)
        self._join_start(other)

    def _join_start(self, other: Figures) -> None:
        if not other._due or (self._due and self._due < other._due):
            return
        if not self._due or other._due < self._due:
            self._due, self.start, self._start = other._due, other.start, other._start
            return
        self.start += other.start
        self._start = min(self._start[0], other._start[0]), max(self._start[1], other._start[1])

    @property
    def count(self) -> int:
        """Of exchanges that ended, in whatever way."""
        return self.good + self.faults.total()

    @property
    def seconds(self) -> float:
        """From the first sending to the last event; by a clock, until the next request would have been due."""
        return (self.last - self.first) / SECOND if self.first else 0.0

    @property
    def tokens_a_chunk(self) -> float | None:
        """Output tokens for each event with output."""
        return self.tokens_out / self.chunks if self.chunks else None

    def rates(self) -> dict[str, float | None]:
        """A second of the run: requests, input and output tokens, and requests that kept the objective."""
        seconds = self.seconds
        if not seconds:
            return dict.fromkeys(("requests", "input_tokens", "output_tokens", "total_tokens", "goodput"))
        return {
            "requests": self.good / seconds, "input_tokens": self.tokens_in / seconds, "output_tokens": self.tokens_out / seconds,
            "total_tokens": (self.tokens_in + self.tokens_out) / seconds,
            "goodput": self.kept / seconds if self.slo is not None else None,
        }  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Times in seconds."""
        return {
            "requests": {
                "ended": self.count, "good": self.good, "failed": dict(self.faults), "messages": {k: list(v) for k, v in self.words.items()},
                "short": self.short, "reconnects": self.reconnects, "asked_to_wait": _times(self.rejected_wait),
            },
            "start": {"requests": self.start, "skew": self.skew},
            "tokens": {
                "input": self.tokens_in, "output": self.tokens_out, "cached": self.cached if self.with_cached else None,
                "output_from": dict(self.sources), "per_event": self.tokens_a_chunk,
            },
            "seconds": self.seconds,
            "per_second": self.rates(),
            "times": {name: _times(self.times[name]) for name in TIMES},
            "sums": {name: getattr(self, name) for name in SUMS}, "events_bundled": self.bundled, "events": self.chunks, "without_kernel_stamps": self.user_stamps,
        }  # fmt: skip


SHOWN = (50, 90, 95, 99)
"""Percentiles that JSON has."""


def _times(found: Histogram) -> dict[str, Any] | None:
    if not found.count:
        return None
    out: dict[str, Any] = {
        "count": found.count, "mean": found.mean / SECOND, "standard_deviation": found.deviation / SECOND,
        "min": (found.smallest or 0) / SECOND, "max": found.largest / SECOND,
    }  # fmt: skip
    for of in SHOWN:
        at = found.percentile(of)
        bounds = [None if bound is None else bound / SECOND for bound in (at.low, at.high)]
        out[f"p{of}"] = {"value": at.value / SECOND, "low": bounds[0], "high": bounds[1]}
    return out | {"histogram": found.text, "sums": found.sums}
