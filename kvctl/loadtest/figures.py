"""From exchanges to figures: what each means is said here once, and goes into --explain and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvctl.loadtest.exchange import Exchange
from kvctl.loadtest.histogram import Histogram
from kvctl.record import Record

SECOND = 1_000_000_000
DEFINITIONS: Mapping[str, str] = {
    "ttft": "time to first token: from the end of sending to the first event with output (text, reasoning or a tool call)",
    "ttfat": "time to first answer token: the same to the first that is no reasoning",
    "itl": "time between tokens: gaps between events with output, where these carry one token each",
    "icl": "time between chunks: gaps between events with output, however many tokens they carry",
    "tpot": "time per output token: of each request (last event - first event) / (output tokens - 1)",
    "e2e": "end to end: from the end of sending to the last event with output",
    "dispatch": "dispatch delay: from when a request was due to the end of its sending",
    "ttft_scheduled": "ttft from when the request was due: with what it waited for the client",
    "e2e_scheduled": "e2e from when the request was due",
}
TIMES = tuple(DEFINITIONS)
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

    def kept(self, times: Mapping[str, int]) -> bool:
        """Whether a request with these times keeps it; one without a time of its own (one token has no tpot) keeps that."""
        own = {"ttft": "ttft_scheduled", "e2e": "e2e_scheduled"} if self.scheduled else {}
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
    """Adds exchanges up, in memory that does not grow with their number but for a count a second."""

    def __init__(self, slo: Slo | None = None) -> None:
        self.slo = slo
        self.times = {name: Histogram() for name in TIMES}
        self.good = 0
        self.faults: Counter[str] = Counter()
        self.words: dict[str, list[str]] = {}
        """The first messages of each kind of fault."""
        self.kept = 0
        """Good ones that keep the objective."""
        self.tokens_in = self.tokens_out = self.cached = 0
        self.chunks = self.bundled = 0
        self.sources: Counter[str] = Counter()
        """Where the number of output tokens of how many requests is from: "usage", or "events"."""
        self.with_cached = 0
        """Good ones whose usage says something of cached tokens."""
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
        self.by_second: dict[int, int] = {}
        """Events with output in each second of the monotonic clock, of all exchanges."""

    def see(self, exchange: Exchange) -> None:
        """One that counts for nothing but what the server wrote in each second: of the warm-up."""
        by_second = self.by_second
        for stamp in exchange.stamps:
            second = stamp // SECOND
            by_second[second] = by_second.get(second, 0) + 1

    def add(self, exchange: Exchange, asked: int | None = None) -> None:
        """One that has ended; `asked`: output tokens that it was to have."""
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
        found = times_of(exchange, tokens)
        for name, value in found.items():
            self.times[name].add(value)
        self._gaps(exchange, tokens)
        self.kept += self.slo is None or self.slo.kept(found)
        self.user_stamps += not exchange.kernel

    def _bad(self, exchange: Exchange) -> None:
        fault = exchange.fault
        assert fault is not None
        self.faults[fault.kind] += 1
        said = self.words.setdefault(fault.kind, [])
        if len(said) < 3 and fault.message not in said:
            said.append(fault.message)
        if exchange.retry_after is not None:
            self.rejected_wait.add(int(exchange.retry_after * SECOND))

    def _tokens(self, exchange: Exchange) -> int:
        usage, events = exchange.usage, len(exchange.stamps)
        self.chunks += events
        self.bundled += exchange.bundled
        known = usage is not None and usage.completion is not None
        self.sources["usage" if known else "events"] += 1
        if usage is None:
            self.without_usage += 1
        else:
            self.tokens_in += usage.prompt or 0
            self.cached += usage.cached or 0
            self.with_cached += usage.cached is not None
        tokens = usage.completion if usage is not None and usage.completion is not None else events
        self.tokens_out += tokens
        return tokens

    def _gaps(self, exchange: Exchange, tokens: int) -> None:
        stamps = exchange.stamps
        icl, itl = self.times["icl"], self.times["itl"]
        each = tokens <= _ONE_EACH * len(stamps)
        before = stamps[0]
        for stamp in stamps[1:]:
            icl.add(stamp - before)
            if each:
                itl.add(stamp - before)
            before = stamp

    @property
    def count(self) -> int:
        """Of exchanges that ended, in whatever way."""
        return self.good + self.faults.total()

    @property
    def seconds(self) -> float:
        """From the first sending to the last event."""
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
                "short": self.short, "reconnects": self.reconnects,
            },
            "tokens": {
                "input": self.tokens_in, "output": self.tokens_out, "cached": self.cached if self.with_cached else None,
                "output_from": dict(self.sources), "per_event": self.tokens_a_chunk,
            },
            "seconds": self.seconds,
            "per_second": self.rates(),
            "times": {name: _times(self.times[name]) for name in TIMES},
            "kept": self.kept, "events_bundled": self.bundled, "events": self.chunks, "without_kernel_stamps": self.user_stamps,
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
    return out | {"histogram": found.text}
