"""What a plan of `kvctl recommend` promises of a server, beside what a test of that server found.

What breaks a promise: requests that fail or end short, that are pushed out of the cache, or wait because it (llama.cpp: its slots)
is full; a cache that is smaller than was planned; a process that takes more memory than there is; figures that are worse than the far
end of their range. What is better than promised breaks nothing. What the server does not say is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvctl.loadtest.figures import SECOND
from kvctl.loadtest.verdict import FULL
from kvctl.record import Record
from kvctl.speed import Range
from kvctl.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from kvctl.loadtest.capacity import Capacity
    from kvctl.loadtest.launch import Started
    from kvctl.loadtest.report import ServeReport
    from kvctl.loadtest.run import Outcome

SPEED = ("ttft", "tpot", "output_rate", "request_rate")
"""Figures that have ranges; of the first two less is better, of the others more."""


class Promised(Record):
    """What one answer of a plan says of one server."""

    name: str
    """The answer in words."""
    source: str
    """The file and the number of the answer; empty of a plan that is being made."""
    engine: str
    prompt: int
    """Tokens of a usual prompt, and of its answer."""
    answer: int
    context: int
    """Of the longest request."""
    concurrency: int | None
    """Usual requests at once; None where a rate is promised."""
    rate: float | None
    """Requests a second."""
    held: int
    """Requests of the longest length that it holds at once."""
    tokens: int | None = None
    """That its cache holds; None where that follows from its settings alone."""
    memory: int | None = None
    """Bytes that weights, cache and what lies beside them take together."""
    limit: int | None = None
    """Bytes of the host's memory that it may take; None of GPUs."""
    whole: bool = True
    """Whether `memory` is all that it takes."""
    ttft: Range | None = None
    """Seconds; None is not predicted."""
    tpot: Range | None = None
    output_rate: Range | None = None
    """Output tokens a second."""
    request_rate: Range | None = None

    def to_dict(self) -> dict[str, Any]:
        out = {name: getattr(self, name) for name in self._fields}
        return out | {name: None if (found := out[name]) is None else found.to_dict() for name in SPEED}


class Row(Record):
    """One thing that is promised, and what it was."""

    name: str
    unit: str
    """requests, tokens, blocks, bytes, seconds, "tokens a second", "requests a second", or "share"."""
    promised: float | Range | None
    """None: nothing is, and the row is told for what it says."""
    measured: float | None
    """None: not available."""
    verdict: str
    """In words: as promised, inside, better, more, less, worse, not judged, …"""
    holds: bool | None
    """None: neither way."""

    @property
    def words(self) -> str:
        promised = "" if self.promised is None else f", and {amount(self.promised, self.unit)} promised"
        return f"{self.name}: {amount(self.measured, self.unit)}{promised}"

    def to_dict(self) -> dict[str, Any]:
        out = {name: getattr(self, name) for name in self._fields}
        promised = self.promised
        if not isinstance(promised, Range):
            promised = None if promised is None else Range(promised, promised, promised)
        return out | {"promised": None if promised is None else promised.to_dict()}


class Verified(Record):
    """All rows, and what they come to."""

    promised: Promised
    rows: tuple[Row, ...]
    broken: tuple[str, ...]
    """Promises that do not hold, in words; none where all do."""
    notes: tuple[str, ...] = ()
    unfinished: bool = False
    """Whether a load was interrupted: then nothing is said to hold."""

    @property
    def holds(self) -> bool:
        return not self.broken and not self.unfinished

    def to_dict(self) -> dict[str, Any]:
        return {
            "promised": self.promised.to_dict(), "rows": [row.to_dict() for row in self.rows], "holds": self.holds,
            "broken": list(self.broken), "notes": list(self.notes),
        }  # fmt: skip


def verify(promised: Promised, report: ServeReport) -> Verified:
    """A test's figures beside what was promised; the first of its loads is of usual requests. Of one that was interrupted only what broke
    is told: what had not broken until then might have."""
    rows: list[Row] = []
    for number, one in enumerate(report.outcomes):
        what = f" ({one.step.words})" if len(report.outcomes) > 1 else ""
        found = (row.replace(name=row.name + what) for row in _held(promised, one, usual=number == 0))
        rows += (_unfinished(row) if one.interrupted and row.holds is not False else row for row in found)
    if report.capacity is not None:
        rows += _cache(promised, report.capacity)
    if report.started is not None:
        # Its highest peak comes when all of it is sent.
        rows += (
            _unfinished(row) if report.interrupted and row.holds else row for row in _memory(promised, report.started)
        )
    if report.outcomes:
        first = report.outcomes[0]
        rows += (_unfinished(row) if first.interrupted else row for row in _speed(promised, first))
    broken = [row.words for row in rows if row.holds is False]
    if not report.interrupted:
        if not any(one.figures.good for one in report.outcomes):
            broken.append("no request has been answered: nothing was measured that promises could be held to")
        broken += [one for one in report.objectives if one not in broken]
    notes = []
    if report.server and report.server["engine"] not in (promised.engine, "unknown"):
        notes.append(f"the plan is for {promised.engine}, and this server is {report.server['engine']}")
    left = [f"{one.step.words}: unfinished" for one in report.outcomes if one.interrupted]
    if left and not report.plan.limit:
        left += [f"{step.words}: not begun" for step in report.plan.steps[len(report.outcomes) :]]
    return Verified(promised, tuple(rows), tuple(broken), (*notes, *left), unfinished=bool(left))


def _unfinished(row: Row) -> Row:
    """One that is not judged."""
    return row if not row.verdict and row.holds is None else row.replace(verdict="unfinished", holds=None)


# -- requests -----------------------------------------------------------------------------------


def _held(promised: Promised, one: Outcome, *, usual: bool) -> Iterator[Row]:
    """What became of one load's requests."""
    figures, asked = one.figures, one.step.at_once
    faults = figures.faults.total()
    yield Row("requests that failed", "requests", 0, faults, "as promised" if not faults else "more", not faults)
    short = figures.short
    yield Row("answers cut short", "requests", 0, short, "as promised" if not short else "more", not short)
    lost = one.counters.get("preemptions")
    if lost is not None:
        yield Row("pushed out of the cache", "requests", 0, lost, "as promised" if not lost else "more", not lost)
    use, waiting, running = (_most(one, name) for name in ("kv_use", "waiting", "running"))
    if asked is not None:
        yield _at_once(promised, asked, running, waiting, use, lost)
        if waiting is not None and promised.engine == "llama.cpp":
            yield Row("waiting for a slot", "requests", 0, waiting, "as promised" if not waiting else "more", not waiting)  # fmt: skip
    if use is not None:
        yield Row("cache in use at most", "share", None, use, "", None)


def _most(one: Outcome, name: str) -> float | None:
    """Of a gauge over the whole load, warm-up and all."""
    return max((sample.values[name] for sample in one.samples if name in sample.values), default=None)


def _at_once(
    promised: Promised, asked: int, running: float | None, waiting: float | None, use: float | None, lost: float | None
) -> Row:
    """Whether as many run at once as are kept under way; where they do not, it is the cache that is to blame if it is full."""
    name, unit = "requests that run at once", "requests"
    if running is None:
        return Row(name, unit, asked, None, "not available", None)
    if running >= asked:
        return Row(name, unit, asked, running, "as promised", True)
    full = bool(lost) or promised.engine == "llama.cpp" or (use is not None and use >= FULL)
    if waiting and full:
        return Row(name, unit, asked, running, "less", False)
    # Prompts are computed one after another: the last begins when the first has ended, however much room there is.
    return Row(name, unit, asked, running, "less, and the cache was not full", None)


# -- memory ---------------------------------------------------------------------------------------


def _cache(promised: Promised, found: Capacity) -> Iterator[Row]:
    """How large the cache is, as the server says it; what no plan has is predicted by kvctl size for the same settings."""
    declared, predicted = found.declared, found.predicted
    tokens = promised.tokens if promised.tokens is not None else predicted.tokens
    for name, unit, wanted, measured, within in (
        ("tokens in the cache", "tokens", tokens, declared.tokens, 0),
        ("blocks of the cache", "blocks", predicted.blocks, declared.blocks, 0),
        ("bytes of the cache", "bytes", predicted.bytes, declared.bytes, declared.bytes_within),
        (f"requests of {promised.context:,} tokens that the cache holds", "requests", promised.held, _held_by(found, promised), 0),
    ):  # fmt: skip
        if wanted is None or measured is None:
            continue
        apart = measured - wanted
        if abs(apart) <= within:
            yield Row(name, unit, wanted, measured, "as promised", True)
        elif unit == "bytes":  # more is no worse: what counts is whether the memory is there
            yield Row(name, unit, wanted, measured, "more" if apart > 0 else "less", None)
        else:
            yield Row(name, unit, wanted, measured, "more" if apart > 0 else "less", apart > 0)


def _held_by(found: Capacity, promised: Promised) -> int | None:
    """Requests of the longest length, by what the server says of its cache."""
    if found.declared.concurrency is not None and found.context == promised.context:
        return int(found.declared.concurrency)
    if found.declared.requests is not None and found.length == promised.context:
        return found.declared.requests
    return None


def _memory(promised: Promised, started: Started) -> Iterator[Row]:
    """What the process takes of a host's memory."""
    if promised.limit is None or started.resident_bytes is None:
        return
    taken = started.resident_bytes
    more = "" if promised.whole else "what it takes beside weights and cache was not known"
    yield Row("memory of the process", "bytes", promised.memory, taken, more, None)
    fits = taken <= promised.limit
    yield Row("of the memory that there is", "bytes", promised.limit, taken, "inside" if fits else "more", fits)


# -- speed ----------------------------------------------------------------------------------------


def _speed(promised: Promised, one: Outcome) -> Iterator[Row]:
    """Times in the median and rates, beside their ranges."""
    figures, rates = one.figures, one.figures.rates()
    measured: dict[str, float | None] = {
        **{
            name: figures.times[name].percentile(50).value / SECOND if figures.times[name].count else None
            for name in ("ttft", "tpot")
        },
        "output_rate": one.output_rate if one.output_rate is not None else rates["output_tokens"],
        "request_rate": rates["requests"],
    }
    labels = {"ttft": ("TTFT", "seconds"), "tpot": ("TPOT", "seconds"), "output_rate": ("throughput", "tokens a second"),
              "request_rate": ("requests served", "requests a second")}  # fmt: skip
    for name, value in measured.items():
        if value is None:
            continue
        label, unit = labels[name]
        wanted: Range | None = getattr(promised, name)
        if wanted is None:
            yield Row(label, unit, None, value, "not predicted", None)
        elif wanted.low <= value <= wanted.high:
            yield Row(label, unit, wanted, value, "inside", True)
        else:
            worse = value > wanted.high if unit == "seconds" else value < wanted.low
            yield Row(label, unit, wanted, value, "worse" if worse else "better", not worse)


def amount(value: float | Range | None, unit: str) -> str:
    """A figure with its unit, or a range."""
    if value is None:
        return "not available"
    if isinstance(value, Range):
        return f"{amount(value.low, unit)} to {amount(value.high, unit)}"
    if unit == "bytes":
        return format_bytes(round(value))
    if unit == "seconds":
        return format_seconds(value)
    if unit == "share":
        return f"{value:.0%}"
    shown = f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:,.3g}"
    return shown + {"tokens a second": " tok/s", "requests a second": " req/s"}.get(unit, "")
