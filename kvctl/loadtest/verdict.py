"""Why a server did not do more: its cache, its batch, its speed, or the client; with the evidence, or that there is none."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvctl.loadtest.figures import Figures
from kvctl.loadtest.metrics import COUNTERS, Sample, growth
from kvctl.record import Record

FULL = 0.95
"""Share of the cache from which on it is full: engines keep a few blocks back."""
_BUSY = 0.85
"""Share of a core that leaves the client no time to spare."""
_LATE = 0.01
"""Dispatch delay at the 99th percentile, as a share of the median first-token time, that is worth a word."""

KV, BATCH, COMPUTE, CLIENT = "kv-saturated", "batch-limited", "compute-limited", "client-limited"
FAILED, UNKNOWN, NONE = "failed", "unknown", "not limited"
CEILING = 0.7
"""Share of what the client can take in from which on it, and not the server, may be what is seen."""
_MORE, _GAIN = 1.5, 0.1
"""So many times the requests at once, and tokens a second have to grow by such a share, or the server is at its speed."""


_NO_ROOM = re.compile(r"context size has been exceeded", re.IGNORECASE)
"""What llama.cpp says to requests under way when slots that share cells have filled them (tools/server/server-context.cpp)."""


class Verdict(Record):
    """What bound a load, and how that shows."""

    kind: str
    evidence: tuple[str, ...]


class Window(Record):
    """What the server's metrics were while a load lasted; None for what is not available."""

    kv_use: float | None
    """At its most."""
    waiting: float | None
    """At its most."""
    running: float | None
    """At its most."""
    preemptions: float | None
    resets: int
    looks: int


def window(samples: Sequence[Sample], first: int, last: int) -> Window:
    """Of samples between two times (where there is none, of those around), and counters from the last before to the first after."""
    inside = [sample for sample in samples if first <= sample.at <= last]
    before = [sample for sample in samples if sample.at < first][-1:]
    after = [sample for sample in samples if sample.at > last][:1]
    around = [*before, *inside, *after]

    def most(name: str) -> float | None:
        return max((sample.values[name] for sample in inside or around if name in sample.values), default=None)

    resets = max((grown.resets for name in COUNTERS if (grown := growth(around, name)) is not None), default=0)
    found = growth(around, "preemptions")
    resets = max((grown.resets for name in COUNTERS if (grown := growth(around, name)) is not None), default=0)
    return Window(most("kv_use"), most("waiting"), most("running"), None if found is None else found.value,
                  resets, len(inside))  # fmt: skip


def beyond(found: Verdict, rate: float | None, ceiling: float | None, processes: int = 1) -> Verdict:
    """With what the client can take in, where that was measured: so many tokens a second in each of its processes."""
    if rate is None or ceiling is None or rate < CEILING * ceiling * processes or found.kind == FAILED:
        return found
    each = " in each of its processes" if processes > 1 else ""
    words = f"{rate:,.0f} tokens a second came, and the client takes in {ceiling:,.0f}{each}"
    return Verdict(CLIENT, (words, *found.evidence))


def beside(found: Verdict, now: tuple[int, float], before: tuple[int, float] | None) -> Verdict:
    """A load beside one of fewer requests at once (requests, tokens a second): more of them that bring no more tokens say that
    the server computes as fast as it can."""
    if (
        found.kind not in (NONE, UNKNOWN)
        or before is None
        or now[0] < _MORE * before[0]
        or now[1] > (1 + _GAIN) * before[1]
    ):
        return found
    change = now[1] / before[1] - 1
    return Verdict(
        COMPUTE, (f"{change:+.0%} tokens a second, of {now[0]:,} at once after {before[0]:,}", *found.evidence)
    )


def verdict(figures: Figures, seen: Window, *, cpu: float, at_once: int | None) -> Verdict:
    """Of one load; `cpu` is the client's share of a core, `at_once` the number of requests that were kept under way."""
    thrown = next((words for words in figures.words.get("server", ()) if _NO_ROOM.search(words)), None)
    if thrown is not None:
        used = () if seen.kv_use is None else (f"KV cache in use: {seen.kv_use:.0%} at most",)
        return Verdict(KV, (f"{figures.faults['server']:,} of {figures.count:,} requests failed: {thrown}", *used))
    if not figures.count:
        return Verdict(UNKNOWN, ("no measured request has ended",))
    if not figures.good:
        return Verdict(FAILED, (f"none of {figures.count:,} requests was answered",))
    evidence = []
    ttft, dispatch = figures.times["ttft"], figures.times["dispatch"]
    late = dispatch.percentile(99).value / max(ttft.percentile(50).value, 1)
    if cpu > _BUSY:
        return Verdict(CLIENT, (f"the client took {cpu:.0%} of a core",))
    if at_once is None and late > 1:
        evidence.append(
            f"requests went out late: 99 of 100 within {dispatch.percentile(99).value / 1e6:.0f} ms of when they were due"
        )
    if seen.kv_use is None and seen.waiting is None:
        return Verdict(UNKNOWN, (*evidence, "the server says nothing of its cache and its queue"))
    if seen.resets:
        evidence.append("the server was restarted meanwhile")
    if seen.kv_use is not None:
        evidence.append(f"KV cache in use: {seen.kv_use:.0%} at most")
    if seen.waiting is not None:
        evidence.append(f"waiting: {seen.waiting:,.0f} at most")
    if seen.running is not None:
        evidence.append(f"running: {seen.running:,.0f} at most")
    if seen.preemptions is not None:
        evidence.append(f"preempted: {seen.preemptions:,.0f}")
    queued = bool(seen.waiting)
    if seen.kv_use is not None and seen.kv_use >= FULL and (queued or bool(seen.preemptions)):
        return Verdict(KV, tuple(evidence))
    if seen.preemptions:
        return Verdict(KV, tuple(evidence))
    if queued and seen.running is not None and (seen.kv_use is not None and seen.kv_use < FULL):
        return Verdict(BATCH, tuple(evidence))
    return Verdict(NONE, tuple(evidence))
