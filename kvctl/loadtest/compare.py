"""A load test beside an earlier one: load by load, with what the two differ by for sure, and gates on that.

Percentiles have 95% intervals by order statistics, which suppose nothing of how times are spread (`Histogram.percentile`). The interval
of the ratio of two of them is that of Zou and Donner 2008, "Construction of confidence limits about effect measures", on logarithms.
Output tokens a second are cut into pieces of equal length, and the pieces' means compared by Welch's t test.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvctl.errors import UsageError
from kvctl.loadtest.figures import SHOWN, TIMES
from kvctl.loadtest.histogram import Percentile, told_of
from kvctl.loadtest.plan import Plan, Step
from kvctl.loadtest.report import ServeReport, settings_of
from kvctl.loadtest.run import Outcome
from kvctl.measure.statistics import Ratio, Sample, ratio
from kvctl.record import Record

SCHEMA = "kvctl.serve-compare/1"
NOTE = (
    "95% intervals are over the requests of each run; what differs from one run to the next beyond that (the machine, other load, "
    "a restart) is not in them: leave room for it in --fail-on"
)
RATE = "output_tokens"
_PIECES = 10
_MOST_NAMED = 8
"""Loads that an error lists."""
_SHOWN = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "e2e_p50", "e2e_p99", RATE)
_CHANGE = re.compile(r"([+-]?)(\d+(?:\.\d+)?)%", re.ASCII)
_LISTED = ("requests", "seconds", "warm_up", "retries", "processes", "reset_cache", "launch", "objective")
"""Settings with which two runs may differ and still have sent the same kind of requests, which is said."""

BETTER, WORSE, SAME = "better", "worse", "same within noise"
UNTOLD, SHORT, MISSING = "too few requests", "too short", "not measured"


class Gate(Record):
    """How much worse than before a figure may be."""

    what: str
    """ "ttft_p99", "output_tokens"."""
    change: float
    """Share of the earlier value: 0.05 more of a time, −0.05 of a rate."""

    @property
    def words(self) -> str:
        """ "ttft_p99:+5%"."""
        return f"{self.what}:{self.change * 100:+g}%"

    @property
    def name(self) -> str:
        """Of the time."""
        return self.what.rpartition("_")[0]

    @property
    def percent(self) -> int:
        return int(self.what.rpartition("_p")[2])

    def needs(self) -> int:
        """Good requests that each run has to have for this to be told."""
        return 0 if self.what == RATE else told_of(self.percent)

    def broken(self, found: Ratio | None) -> bool | None:
        """Whether a figure is worse than that for sure; None where nothing is for sure."""
        if found is None or found.low is None or found.high is None:
            return None
        return found.high < 1 + self.change if self.what == RATE else found.low > 1 + self.change


def read_gate(text: str) -> Gate:
    """ "ttft_p99:+5%", "output_tokens:-5%".

    Raises:
        UsageError: it is no such thing, or worse would be better.

    """
    what, _, change = text.strip().partition(":")
    names = [f"{name}_p{of}" for name in TIMES for of in SHOWN]
    if what not in (*names, RATE):
        raise UsageError(f"--fail-on: {what[:40]!r} is no figure that is compared",
                         hint=f"{RATE}, or a time and one of {', '.join(f'p{of}' for of in SHOWN)}: ttft_p99:+5%")  # fmt: skip
    found = _CHANGE.fullmatch(change.strip())
    if found is None:
        raise UsageError(f"--fail-on {what}: {change[:40]!r} is no change in percent", hint="--fail-on ttft_p99:+5%")
    share = float(found[2]) / 100 * (-1 if found[1] == "-" else 1)
    if share and (share < 0) != (what == RATE):
        worse = "less" if what == RATE else "more"
        raise UsageError(f"--fail-on {what}: {worse} of it is worse",
                         hint=f"--fail-on {what}:{'-' if what == RATE else '+'}{abs(share) * 100:g}%")  # fmt: skip
    if share <= -1 or share > 1000:
        raise UsageError(f"--fail-on {what}: {change[:40]} is out of range", hint="--fail-on ttft_p99:+5%")
    return Gate(what, share)


class Row(Record):
    """One figure of one load, in both runs."""

    what: str
    before: float | None
    """Seconds, or tokens a second; None where that run has none."""
    now: float | None
    ratio: Ratio | None
    """Now over before; None where one is missing."""

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return MISSING
        if self.ratio.same is None:
            return SHORT if self.what == RATE else UNTOLD
        if self.ratio.same:
            return SAME
        return WORSE if (self.ratio.value > 1) != (self.what == RATE) else BETTER

    @property
    def unit(self) -> str:
        return "tokens/s" if self.what == RATE else "s"

    def to_dict(self) -> dict[str, Any]:
        return {
            "what": self.what, "unit": self.unit, "before": self.before, "now": self.now,
            "ratio": None if self.ratio is None else self.ratio.value,
            "low": None if self.ratio is None else self.ratio.low, "high": None if self.ratio is None else self.ratio.high,
            "verdict": self.verdict,
        }  # fmt: skip


class Check(Record):
    """A gate at one load."""

    gate: Gate
    row: Row

    @property
    def broken(self) -> bool | None:
        """None: that is not told by so few requests."""
        return self.gate.broken(self.row.ratio)

    def to_dict(self) -> dict[str, Any]:
        return {"gate": self.gate.words, "broken": self.broken}


class Matched(Record):
    """A load that both runs have."""

    name: str
    rows: tuple[Row, ...]
    checks: tuple[Check, ...]
    requests: tuple[int, int]
    """Good ones, before and now."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "good_requests": {"before": self.requests[0], "now": self.requests[1]},
            "rows": [row.to_dict() for row in self.rows], "checks": [check.to_dict() for check in self.checks],
        }  # fmt: skip


class Comparison(Record):
    """Two runs; ratios are over the earlier."""

    earlier: str
    """Its file."""
    loads: tuple[Matched, ...]
    differences: tuple[tuple[str, Any, Any], ...]
    """What else is not the same: its name, before, now."""
    unmatched: tuple[str, ...]
    """Loads that only one of them has, in words."""
    note: str = NOTE

    @property
    def broken(self) -> list[str]:
        """Gates that are, in words."""
        return [words(one, check) for one in self.loads for check in one.checks if check.broken]

    @property
    def untold(self) -> list[str]:
        """Gates of which nothing can be said, in words."""
        return [words(one, check) for one in self.loads for check in one.checks if check.broken is None]

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA, "earlier": self.earlier, "loads": [one.to_dict() for one in self.loads],
            "differences": [{"what": what, "before": before, "now": now} for what, before, now in self.differences],
            "unmatched": list(self.unmatched), "broken": self.broken, "untold": self.untold, "note": self.note,
        }  # fmt: skip


def words(one: Matched, check: Check) -> str:
    """What came of a gate at a load."""
    row, gate = check.row, check.gate
    if row.ratio is None:
        return f"{one.name}: {gate.words}: not measured in both runs"
    change = f"{gate.what} {row.ratio.value - 1:+.1%}"
    if row.ratio.low is None or row.ratio.high is None:
        counts = f"{one.requests[0]:,} good requests before and {one.requests[1]:,} now"
        if gate.what == RATE:
            return f"{one.name}: {change}: not told from noise in so short a time ({gate.words})"
        return f"{one.name}: {change}: not told from noise by {counts}; it takes {gate.needs():,} ({gate.words})"
    between = f"{row.ratio.low - 1:+.1%} to {row.ratio.high - 1:+.1%}"
    return f"{one.name}: {change} ({between}), {gate.change * 100:+g}% may be"


def check_plan(plan: Plan, earlier: ServeReport, name: str, gates: Sequence[Gate]) -> None:
    """Refuses before anything is sent what could not be compared after it.

    Raises:
        UsageError: the two have no load in common, or too few requests for a gate.

    """
    if plan.limit:  # which loads there will be is not known
        works = [_asked(one.step)["work"] for one in earlier.outcomes]
        if not any(_asked(step)["work"] in works for step in plan.steps):
            raise _nothing(earlier, plan.steps, name, _asked)
        return
    asked = [_asked(step) for step in plan.steps]
    both = [one for one in earlier.outcomes if _asked(one.step) in asked]
    if not both:
        raise _nothing(earlier, plan.steps, name, _asked)
    steps = [one.step for one in both]
    for gate in gates:
        counts = [one.figures.good for one in both]
        if min(counts) < gate.needs():
            raise UsageError(f"--fail-on {gate.words}: {name} has a load of {min(counts):,} good requests, and it takes {gate.needs():,} to tell",
                             hint="a baseline of more --requests, or a lower percentile")  # fmt: skip
        lengths = [plan.length_of(step).requests for step in steps]
        least = min((count for count in lengths if count is not None), default=gate.needs())
        if least < gate.needs():
            raise UsageError(f"--fail-on {gate.words}: a load of {least:,} requests is asked for, and it takes {gate.needs():,} to tell",
                             hint=f"--requests {gate.needs()}, or a lower percentile")  # fmt: skip


def compare(report: ServeReport, earlier: ServeReport, name: str, gates: Sequence[Gate] = ()) -> Comparison:
    """Loads of the same step, of two runs that sent the same kind of requests; `name`: of the earlier one.

    Raises:
        UsageError: there are none.

    """
    before, now = _keyed(earlier), _keyed(report)
    both = [key for key in now if key in before]
    if not both:
        raise _nothing(earlier, [one.step for one in report.outcomes], name, lambda step: step.kind)
    loads = tuple(_matched(now[key][0], before[key][1], now[key][1], gates) for key in both)
    only = [f"{load}: only in {name}" for key, (load, _) in before.items() if key not in both]
    only += [f"{load}: only in this run" for key, (load, _) in now.items() if key not in both]
    return Comparison(name, loads, tuple(_differences(earlier, report)), tuple(only))


def _keyed(report: ServeReport) -> dict[tuple[str, int], tuple[str, Outcome]]:
    """Loads with their names, by what was sent, and the how manyth of the same it is."""
    out: dict[tuple[str, int], tuple[str, Outcome]] = {}
    seen: Counter[str] = Counter()
    for name, one in zip(report.names, report.outcomes, strict=True):
        kind = json.dumps(one.step.kind, sort_keys=True)
        seen[kind] += 1
        out[kind, seen[kind]] = name, one
    return out


def _asked(step: Step) -> dict[str, Any]:
    """What is to be sent, of a trace all of it: which of its requests the server takes is not known before it was looked at."""
    work = step.work.to_dict()
    if "left_out" in work:
        work |= {"requests": work["requests"] + work["left_out"], "left_out": 0}
    return step.kind | {"work": work}


def _nothing(
    earlier: ServeReport, now: Sequence[Step], name: str, kind: Callable[[Step], Mapping[str, Any]]
) -> UsageError:
    """Why no two loads are of a kind: the requests that each sends, or, where these are the same, their pace."""
    before = [one.step for one in earlier.outcomes]
    works = [kind(step)["work"] for step in before]
    if before and now and not any(kind(step)["work"] in works for step in now):
        there, here = (_listed([step.work.words for step in steps]) for steps in (before, now))
        if there == here:
            differ = [what for what, value in kind(now[0])["work"].items() if works[0].get(what) != value]
            here += f" ({', '.join(differ)} differ)"
        return UsageError(f"{name} is of other requests: {there} there and {here} here", hint="compare runs of the same workload")  # fmt: skip
    there, here = (_listed([step.words for step in steps]) for steps in (before, now))
    return UsageError(f"nothing to compare: {name} has {there or 'no loads'}, and this run {here or 'none'}",
                      hint="loads are compared that have the same --concurrency or --rate")  # fmt: skip


def _listed(words: Sequence[str]) -> str:
    """Each once, and not too many."""
    once = list(dict.fromkeys(words))
    return ", ".join(once[:_MOST_NAMED]) + (", …" if len(once) > _MOST_NAMED else "")


_FACTS = ("engine", "version", "model", "context", "slots", "tokens_counted_by")


def _differences(before: ServeReport, now: ServeReport) -> list[tuple[str, Any, Any]]:
    """Of how the two came about: what else may be why they differ."""

    def facts(report: ServeReport) -> dict[str, Any]:
        server, plan, environment = report.server, report.plan, report.environment
        cpu = environment.get("cpu")
        settings = settings_of(plan)
        return {
            **{f"server {name.replace('_', ' ')}": server.get(name) for name in _FACTS},
            **{f"server {name}": value for name, value in dict(server.get("facts") or {}).items()},
            "endpoint": plan.path, **{name.replace("_", " "): settings[name] for name in _LISTED},
            "kvctl": report.version, "client's kernel": environment.get("kernel"), "client's Python": environment.get("python"),
            "client's processor": cpu.get("model") if isinstance(cpu, Mapping) else None, "interrupted": report.interrupted,
        }  # fmt: skip

    ones, others = facts(before), facts(now)
    names = dict.fromkeys((*ones, *others))
    return [(name, ones.get(name), others.get(name)) for name in names if ones.get(name) != others.get(name)]


def _matched(name: str, before: Outcome, now: Outcome, gates: Sequence[Gate]) -> Matched:
    rows = {what: _row(what, before, now) for what in dict.fromkeys((*_SHOWN, *(gate.what for gate in gates)))}
    return Matched(
        name, tuple(rows.values()), tuple(Check(gate, rows[gate.what]) for gate in gates),
        (before.figures.good, now.figures.good),
    )  # fmt: skip


def _row(what: str, before: Outcome, now: Outcome) -> Row:
    if what == RATE:
        return Row(what, before.output_rate, now.output_rate, _rates(before, now))
    name, _, percent = what.rpartition("_p")
    one, other = (outcome.figures.times[name] for outcome in (before, now))
    ends = [found.percentile(int(percent)) if found.count else None for found in (one, other)]
    first, second = ends
    values = [None if end is None else end.value / 1e9 for end in ends]
    return Row(what, values[0], values[1], None if first is None or second is None else quotient(second, first))


def quotient(now: Percentile, before: Percentile) -> Ratio | None:
    """One percentile over another; an end of the interval is None where an end that it takes is."""
    if not now.value or not before.value:
        return None
    value = now.value / before.value
    low = _end(value, now.value, now.low, before.value, before.high, -1)
    high = _end(value, now.value, now.high, before.value, before.low, 1)
    if low is None or high is None:
        low = high = None
    return Ratio(value, low, high, "requests")


def _end(
    ratio_: float, now: float, now_end: float | None, before: float, before_end: float | None, sign: int
) -> float | None:
    if not now_end or not before_end:
        return None
    return ratio_ * math.exp(sign * math.hypot(math.log(now_end / now), math.log(before_end / before)))


def _rates(before: Outcome, now: Outcome) -> Ratio | None:
    """Of output tokens a second."""
    if not before.output_rate or not now.output_rate:
        return None
    value = now.output_rate / before.output_rate
    one, other = _pieces(before), _pieces(now)
    if one is None or other is None:
        return Ratio(value, None, None, "pieces")
    found = ratio(other, one)
    if found.low is None or found.high is None:
        return Ratio(value, None, None, "pieces")
    # The interval's width is the pieces', its middle the rate over all of the time.
    return Ratio(value, value * found.low / found.value, value * found.high / found.value, "pieces")


def _pieces(outcome: Outcome) -> Sample | None:
    """Means of pieces of whole slices of time, of equal length; None where there are too few slices, or a piece without an event."""
    events = outcome.whole_events
    each = len(events) // _PIECES
    if not each:
        return None
    means = tuple(sum(events[place * each : (place + 1) * each]) / each for place in range(_PIECES))
    return Sample(means) if min(means) > 0 else None
