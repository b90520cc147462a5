"""A load test as Prometheus metrics, for node_exporter's textfile collector: gauges and summaries in base units."""

from __future__ import annotations

import calendar
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kvctl.loadtest import remarks
from kvctl.loadtest.figures import DEFINITIONS, SECOND, SHOWN, TIMES
from kvctl.loadtest.report import ServeReport, missed
from kvctl.loadtest.run import Outcome

if TYPE_CHECKING:
    from prometheus_client import Metric

_PREFIX = "kvctl_serve_test_"
_GAUGES: Mapping[str, str] = {
    "requests_per_second": "Good requests a second, over the whole load.",
    "input_tokens_per_second": "Input tokens of good requests a second.",
    "output_tokens_per_second": "Output tokens of good requests a second.",
    "objective_kept_ratio": "Share of requests that keep the objective.",
    "objective_missed": "1 where fewer requests keep the objective than are asked for.",
    "kv_cache_usage_max_ratio": "Share of the server's KV cache in use, at its most.",
    "requests_waiting_max": "Requests that waited in the server, at their most.",
    "requests_running_max": "Requests that ran in the server, at their most.",
    "preemptions": "Requests that lost their cache in the server.",
    "prefix_cache_hit_ratio": "Share of input tokens that were in the server's cache.",
    "prefix_cache_design_missed": "1 where what was found in the server's cache is not what was designed.",
    "client_cpu_ratio": "Share of a core that the client took.",
    "load_seconds": "From the first sending to the last event.",
}


def textfile(report: ServeReport) -> bytes:
    """The file; what is not known is left out, never 0."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.registry import Collector

    class Found(Collector):
        def collect(self) -> Iterator[Metric]:
            return _families(report)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Found())
    return generate_latest(registry)


def _families(report: ServeReport) -> Iterator[Metric]:
    from prometheus_client import Metric

    server = report.server
    base = {"model": str(server.get("model") or ""), "engine": str(server.get("engine") or "unknown")}
    loads = [(base | {"load": name}, one) for name, one in zip(report.names, report.outcomes, strict=True)]

    def family(name: str, words: str, kind: str = "gauge") -> Metric:
        return Metric(_PREFIX + name, words, kind)

    for name in TIMES:
        words = DEFINITIONS[name]
        found = family(f"{name}_seconds", words[:1].upper() + words[1:] + ".", "summary")
        for labels, one in loads:
            times = one.figures.times[name]
            if times.count:
                for of in SHOWN:
                    value = times.percentile(of).value / SECOND
                    found.add_sample(found.name, labels | {"quantile": f"{of / 100:g}"}, value)
                found.add_sample(f"{found.name}_sum", labels, times.total / SECOND)
                found.add_sample(f"{found.name}_count", labels, times.count)
        if found.samples:
            yield found
    values = [(labels, _values(report, one)) for labels, one in loads]
    for name, words in _GAUGES.items():
        found = family(name, words)
        for labels, of_load in values:
            if (known := of_load[name]) is not None:
                found.add_sample(found.name, labels, known)
        if found.samples:
            yield found
    ended = family("requests", "Measured requests by how they ended: good, or the kind of failure.")
    bound = family("verdict", "1 for what bound the load.")
    for labels, one in loads:
        for result, count in {"good": one.figures.good, **one.figures.faults}.items():
            ended.add_sample(ended.name, labels | {"result": result}, count)
        bound.add_sample(bound.name, labels | {"verdict": one.verdict.kind}, 1)
    yield from (ended, bound)
    if report.limit is not None:
        borne = family("limit_requests", "The most requests at once that nothing broke at, of those that were tried.")
        borne.add_sample(borne.name, base, report.limit.borne or 0)
        yield borne
    if (verified := report.verified) is not None:
        broken = family("plan_broken", "Promises of the plan that do not hold.")
        broken.add_sample(broken.name, base, float(len(verified.broken)))
        yield broken
    failed = family("failed", "1 where a load came to nothing or was given up.")
    failed.add_sample(failed.name, base, float(bool(report.failed)))
    yield failed
    if (when := _began(report)) is not None:
        started = family("start_timestamp_seconds", "When the test began, in seconds of the Unix epoch.")
        started.add_sample(started.name, base, when)
        yield started


def _values(report: ServeReport, one: Outcome) -> dict[str, float | None]:
    figures, seen, rates = one.figures, one.window, one.figures.rates()
    slo = report.plan.slo is not None and figures.count
    hits = one.hit_rate if one.hit_rate is not None else one.counted_hit_rate
    return {
        "requests_per_second": rates["requests"], "input_tokens_per_second": rates["input_tokens"],
        "output_tokens_per_second": rates["output_tokens"],
        "objective_kept_ratio": figures.kept / figures.count if slo else None,
        "objective_missed": float(missed(report.plan, one) is not None) if slo else None,
        "kv_cache_usage_max_ratio": seen.kv_use, "requests_waiting_max": seen.waiting, "requests_running_max": seen.running,
        "preemptions": seen.preemptions, "prefix_cache_hit_ratio": hits,
        "prefix_cache_design_missed": None if remarks.held_against_design(one) is None else float(remarks.misses_design(one, report.server) is not None),
        "client_cpu_ratio": one.cpu, "load_seconds": figures.seconds,
    }  # fmt: skip


def _began(report: ServeReport) -> int | None:
    try:
        return calendar.timegm(time.strptime(str(report.environment.get("time")), "%Y-%m-%dT%H:%M:%SZ"))
    except ValueError:
        return None
