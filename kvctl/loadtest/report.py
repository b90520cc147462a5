"""What `kvctl serve-test` found: the server, the client, and each load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvctl import __version__
from kvctl.loadtest import metrics
from kvctl.loadtest.calibrate import Calibration
from kvctl.loadtest.figures import DEFINITIONS
from kvctl.loadtest.limit import Limit
from kvctl.loadtest.run import SECOND, Outcome, Plan, Session
from kvctl.record import Record

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
    notes: tuple[str, ...] = ()
    dry: bool = False
    """Nothing was sent."""
    interrupted: bool = False
    version: str = __version__
    """Of the kvctl that measured it."""

    @property
    def missed(self) -> list[str]:
        """Objectives that loads miss."""
        if self.plan.limit:  # what breaks is what was looked for
            if self.limit is None or self.limit.borne is not None or self.plan.slo is None:
                return []
            return [f"not even one request at a time: {self.limit.why}"]
        return [f"{one.step.words}: {what}" for one in self.outcomes if (what := missed(self.plan, one)) is not None]

    @property
    def failed(self) -> list[str]:
        """Loads that came to nothing, or were given up."""
        if self.limit is not None and self.limit.borne is not None:
            return []
        out = [f"{one.step.words}: {one.given_up}" for one in self.outcomes if one.given_up is not None]
        for one in self.outcomes:
            if not one.figures.good and one.figures.count and one.given_up is None:
                out.append(f"{one.step.words}: every request failed")
        return out

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

    @property
    def zero(self) -> int:
        """Where the clock of the whole run begins: at a whole second of the monotonic one."""
        moments = [one.began for one in self.outcomes if one.began]
        moments += [one.samples[0].at for one in self.outcomes if one.samples]
        moments += [min(one.figures.by_second) * SECOND for one in self.outcomes if one.figures.by_second]
        return min(moments, default=0) // SECOND * SECOND

    def to_dict(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "schema": SCHEMA, "kvctl_version": self.version, "dry_run": self.dry, "interrupted": self.interrupted,
            "url": plan.place.root, "endpoint": plan.path, "server": dict(self.server), "environment": dict(self.environment),
            "settings": settings_of(plan),
            "definitions": dict(DEFINITIONS), "calibration": None if self.calibration is None else self.calibration.to_dict(),
            "loads": [_load(one, name, self.zero) for one, name in zip(self.outcomes, self.names, strict=True)],
            "limit": None if self.limit is None else self.limit.to_dict(), "missed": self.missed, "failed": self.failed, "notes": list(self.notes),
        }  # fmt: skip


def settings_of(plan: Plan) -> dict[str, Any]:
    """What was asked for."""
    return {
        "input_tokens": plan.input_tokens, "output_tokens": plan.output_tokens,
        "prefix_tokens": plan.prefix_tokens, "groups": plan.groups, "designed_hit_rate": plan.designed,
        "requests": None if plan.length is None else plan.length.requests,
        "seconds": None if plan.length is None else plan.length.seconds, "warm_up": plan.warm, "seed": plan.seed, "max_error_percent": plan.most_errors,
        "objective": None if plan.slo is None else plan.slo.to_dict() | {"percent": plan.slo_percent},
        "steps": [step.to_dict() for step in plan.steps],
    }  # fmt: skip


def missed(plan: Plan, one: Outcome) -> str | None:
    """In what way a load misses the objective; None where it does not, or there is none."""
    if plan.slo is None:
        return None
    count = one.figures.count
    share = 100 * one.figures.kept / count if count else 0.0
    if share >= plan.slo_percent:
        return None
    return f"{share:.1f}% of requests keep {plan.slo.words}, and {plan.slo_percent:g}% are asked for"


def _load(one: Outcome, name: str, zero: int) -> dict[str, Any]:
    seen = one.window
    seconds = one.figures.by_second
    first, last = (min(seconds), max(seconds)) if seconds else (zero // SECOND, zero // SECOND - 1)
    lost = metrics.course(one.samples, "preemptions")
    return {
        "name": name, "step": one.step.to_dict(), "began_seconds": (one.began - zero) / SECOND if one.began else None,
        "sent": one.sent, "whole_seconds": one.seconds, "output_tokens_per_second": one.output_rate,
        "all": one.figures.to_dict(), "steady": one.steady.to_dict(),
        "verdict": {"kind": one.verdict.kind, "evidence": list(one.verdict.evidence)},
        "metrics": {
            "looks": seen.looks, "kv_use_max": seen.kv_use, "waiting_max": seen.waiting, "running_max": seen.running,
            "preemptions": seen.preemptions, "resets": seen.resets, "counters": dict(one.counters),
            "series": [{"seconds": (sample.at - zero) / SECOND, **_gauges(sample), "preemptions": count}
                       for sample, count in zip(one.samples, lost, strict=True)],
        },
        "events_by_second": {"first": first - zero // SECOND, "counts": [seconds.get(second, 0) for second in range(first, last + 1)]},
        "hit_rate": one.hit_rate, "hit_rate_of_counters": one.counted_hit_rate, "client_cpu": one.cpu, "given_up": one.given_up, "interrupted": one.interrupted,
    }  # fmt: skip


def _gauges(sample: metrics.Sample) -> dict[str, float | None]:
    return {name: sample.values.get(name) for name in metrics.GAUGES}


def server_of(session: Session) -> dict[str, Any]:
    """What is known of a server, and of how prompts for it are made."""
    server = session.server
    return {
        "engine": server.engine, "version": server.version, "model": session.wire.model, "models": list(server.models),
        "context": server.context, "slots": server.slots, "metrics": server.metrics, "facts": dict(server.facts),
        "address": session.address.host, "tokens_counted_by": session.counted_by, "prompts_exact": session.vocabulary.exact,
        "prompt_overhead_tokens": session.vocabulary.around, "usage_in_streams": session.wire.usage, "seed": session.seed,
    }  # fmt: skip
