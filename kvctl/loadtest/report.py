"""What `kvctl serve-test` found: the server, the client, and each load."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvctl import __version__
from kvctl.loadtest import metrics, remarks
from kvctl.loadtest.calibrate import Calibration
from kvctl.loadtest.capacity import Capacity
from kvctl.loadtest.figures import DEFINITIONS, RATES, TIMES
from kvctl.loadtest.limit import Limit
from kvctl.loadtest.plan import Plan
from kvctl.loadtest.promised import Verified, verify
from kvctl.loadtest.run import SECOND, Outcome, Session
from kvctl.loadtest.work import Made
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.loadtest.launch import Started

SCHEMA = "kvctl.serve-test/1"


class ServeReport(Record):
    """All of one run."""

    plan: Plan
    server: Mapping[str, Any]
    """Empty before it was looked at."""
    environment: Mapping[str, Any]
    outcomes: tuple[Outcome, ...] = ()
    limit: Limit | None = None
    """Between what it lies, where it was looked for."""
    calibration: Calibration | None = None
    """Of the client, where it was measured on this machine."""
    capacity: Capacity | None = None
    """Of its KV cache."""
    started: Started | None = None
    """The server, where it was started for the test."""
    ended: str | None = None
    """Why that server was gone before it was to be."""
    notes: tuple[str, ...] = ()
    dry: bool = False
    """Nothing was sent."""
    interrupted: bool = False
    version: str = __version__
    """Of the kvctl that measured it."""

    @property
    def names(self) -> list[str]:
        """Of loads, each another: "16 at once", "16 at once (2)"."""
        seen: Counter[str] = Counter()
        out = []
        for one in self.outcomes:
            words = one.step.words
            seen[words] += 1
            out.append(words if seen[words] == 1 else f"{words} ({seen[words]})")
        return out

    def without_prefix(self, one: Outcome) -> float | None:
        """Median first-token time, in seconds, of the load like this one whose prompts share no beginning; None where there is none."""
        work = one.step.work
        if not isinstance(work, Made) or not work.prefix:
            return None
        pace = one.step.replace(work=work.alone, beside="")
        for other in self.outcomes:
            ttft = other.figures.times["ttft"]
            if other.step.replace(beside="") == pace and ttft.count:
                return ttft.percentile(50).value / SECOND
        return None

    @property
    def zero(self) -> int:
        """Where the clock of the whole run begins."""
        return zero_of(self.outcomes)

    @property
    def predicted(self) -> int | None:
        """Requests of this run's length that kvctl size expects at once; None where it has no answer."""
        return None if self.capacity is None else self.capacity.predicted.requests

    @property
    def verified(self) -> Verified | None:
        """What a plan promised beside what came of it; None without one, or of a dry run."""
        if self.plan.promised is None or not self.outcomes:
            return None
        return verify(self.plan.promised, self)

    @property
    def missed(self) -> list[str]:
        """Objectives, and what else was promised, as far as loads miss it."""
        found = self.verified
        return self.objectives if found is None else list(found.broken)

    @property
    def objectives(self) -> list[str]:
        """Objectives that loads miss, and finds in the server's cache that are not what was designed."""
        if self.plan.limit:  # what breaks is what was looked for
            if self.limit is None or self.limit.borne is not None or self.plan.slo is None:
                return []
            return [f"not even one request at a time: {self.limit.why}"]
        held = ((one, (missed(self.plan, one), remarks.misses_design(one, self.server))) for one in self.outcomes)
        return [f"{one.step.words}: {what}" for one, both in held for what in both if what is not None]

    @property
    def failed(self) -> list[str]:
        """Loads that came to nothing, or were given up."""
        if self.started is not None and self.ended is not None:
            return [f"{self.ended}; its log: {self.started.log}"]
        if self.limit is not None and self.limit.borne is not None:
            return []
        out = [f"{one.step.words}: {one.given_up}" for one in self.outcomes if one.given_up is not None]
        for one in self.outcomes:
            if not one.figures.good and one.figures.count and one.given_up is None:
                out.append(f"{one.step.words}: every request failed")
        return out

    def to_dict(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "schema": SCHEMA, "kvctl_version": self.version, "dry_run": self.dry, "interrupted": self.interrupted,
            "url": plan.place.root, "endpoint": plan.path, "server": dict(self.server), "environment": dict(self.environment),
            "settings": settings_of(plan),
            "definitions": dict(DEFINITIONS) | dict(RATES), "calibration": None if self.calibration is None else self.calibration.to_dict(),
            "loads": [load_of(one, name, self.zero) | {"ttft_without_prefix": self.without_prefix(one)} for one, name in zip(self.outcomes, self.names, strict=True)],
            "limit": None if self.limit is None else self.limit.to_dict() | {"predicted": self.predicted},
            "capacity": None if self.capacity is None else self.capacity.to_dict(),
            "plan": None if (verified := self.verified) is None else verified.to_dict(),
            "started": None if self.started is None else self.started.to_dict() | {"ended": self.ended}, "missed": self.missed, "failed": self.failed, "notes": list(self.notes),
        }  # fmt: skip


def settings_of(plan: Plan) -> dict[str, Any]:
    """What was asked for."""
    return {
        "requests": None if plan.length is None else plan.length.requests,
        "seconds": None if plan.length is None else plan.length.seconds, "warm_up": plan.warm, "seed": plan.seed, "max_error_percent": plan.most_errors,
        "retries": plan.retries, "processes": plan.processes, "reset_cache": plan.reset_cache, "find_limit": plan.limit,
        "launch": None if plan.launch is None else plan.launch.shown,
        "objective": None if plan.slo is None else plan.slo.to_dict() | {"percent": plan.slo_percent},
        "steps": [step.to_dict() for step in plan.steps],
    }  # fmt: skip


def zero_of(outcomes: Sequence[Outcome]) -> int:
    """Where the clock of some loads begins: in whole slices of them before all that has a time, so that each slice is so too."""
    moments = [one.began for one in outcomes if one.began]
    moments += [one.samples[0].at for one in outcomes if one.samples]
    moments += [piece.start for one in outcomes for piece in one.figures.slices]
    width = max((one.figures.slices.width for one in outcomes), default=SECOND)
    return min(moments, default=0) // width * width


def missed(plan: Plan, one: Outcome) -> str | None:
    """In what way a load misses the objective; None where it does not, or there is none."""
    if plan.slo is None:
        return None
    count = one.figures.count
    share = 100 * one.figures.kept / count if count else 0.0
    if share >= plan.slo_percent:
        return None
    return f"{share:.1f}% of requests keep {plan.slo.words}, and {plan.slo_percent:g}% are asked for"


def load_of(one: Outcome, name: str | None = None, zero: int | None = None) -> dict[str, Any]:
    """One load; without `zero` by a clock of its own."""
    seen = one.window
    zero = zero_of([one]) if zero is None else zero
    lost = metrics.Course(one.samples, "preemptions")
    return {
        "name": name or one.step.words, "step": one.step.to_dict(), "began_seconds": (one.began - zero) / SECOND if one.began else None, "sent": one.sent, "whole_seconds": one.seconds, "output_tokens_per_second": one.output_rate,
        "all": one.figures.to_dict(), "steady": one.steady.to_dict() | ({"times": dict.fromkeys(TIMES)} if one.refused else {}), "steady_refused": one.refused,
        "verdict": {"kind": one.verdict.kind, "evidence": list(one.verdict.evidence)},
        "metrics": {
            "looks": seen.looks, "kv_use_max": seen.kv_use, "waiting_max": seen.waiting, "running_max": seen.running,
            "preemptions": seen.preemptions, "resets": seen.resets, "counters": dict(one.counters),
            "series": [{"seconds": (sample.at - zero) / SECOND, **_gauges(sample), "preemptions": lost.until(sample.at)} for sample in one.samples],
            "info": {name: dict(labels) for name, labels in one.samples[-1].info.items()} if one.samples else {},
            "all_looks": None if one.watched is None else one.watched.looks, "failed_looks": None if one.watched is None else one.watched.misses, "seconds_looking": None if one.watched is None else one.watched.seconds,
        },
        "slices": list(_slices(one, zero)), "preemption_cost": _cost(one), "ttft_beside_server": _beside(one), "remarks": list(one.remarks),
        "retried": one.retried, "lengths_changed": one.cut, "designed_hit_rate": one.designed, "hit_rate": one.hit_rate, "hit_rate_of_counters": one.counted_hit_rate, "client_cpu": one.cpu, "given_up": one.given_up, "interrupted": one.interrupted,
    }  # fmt: skip


def _slices(one: Outcome, zero: int) -> Iterator[dict[str, float | None]]:
    """What came in each slice of time, beside what the server said in it: one clock for both."""
    preempted = metrics.Course(one.samples, "preemptions").between
    at = [sample.at for sample in one.samples]
    for piece in one.figures.slices:
        end = piece.start + piece.width
        inside = one.samples[bisect_left(at, piece.start) : bisect_left(at, end)]
        most = {
            name: max((sample.values[name] for sample in inside if name in sample.values), default=None)
            for name in metrics.GAUGES
        }
        yield {
            "seconds": (piece.start - zero) / SECOND, "width": piece.width / SECOND, "events": piece.events, "gaps": piece.gaps,
            "between_events": piece.gap, "preemptions": preempted(piece.start, end), **most,
        }  # fmt: skip


def _cost(one: Outcome) -> dict[str, float] | None:
    found = remarks.preemption_cost(one)
    return None if found is None else {"with": found[0], "without": found[1]}


def _beside(one: Outcome) -> dict[str, float] | None:
    gap = one.ttft_gap
    return None if gap is None else {"server_mean": gap[0], "client_mean": gap[1], "requests": gap[2]}


def _gauges(sample: metrics.Sample) -> dict[str, float | None]:
    return {name: sample.values.get(name) for name in metrics.GAUGES}


def server_of(session: Session) -> dict[str, Any]:
    """What is known of a server, and of how prompts for it are made."""
    server = session.server
    return {
        "engine": server.engine, "version": server.version, "model": session.wire.model, "models": list(server.models),
        "context": server.context, "slots": server.slots, "metrics": server.metrics, "facts": dict(server.facts),
        "address": session.address.host, "lookup_seconds": session.address.lookup_s, "connect_seconds": session.address.connect_s,
        "tokens_counted_by": session.counted_by,
        "prompts_exact": None if session.vocabulary is None else session.vocabulary.exact,
        "prompt_overhead_tokens": None if session.vocabulary is None else session.vocabulary.around, "usage_in_streams": session.wire.usage, "seed": session.seed,
    }  # fmt: skip
