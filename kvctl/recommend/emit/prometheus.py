"""Alerts for Prometheus: full caches, preemptions, queues, missed objectives, under the engine's own names of metrics.

Format: prometheus.io docs/prometheus/latest/configuration/alerting_rules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvctl.engines.metrics import NAMES, TIMES, page_of
from kvctl.errors import UsageError
from kvctl.recommend.emit.documents import document, title
from kvctl.recommend.emit.kubernetes import APP, kubernetes, leader_worker_set
from kvctl.recommend.emit.script import on_machine
from kvctl.recommend.emit.site import reached
from kvctl.record import Record
from kvctl.units import format_seconds

if TYPE_CHECKING:
    from kvctl.recommend.deployment import Deployment
    from kvctl.recommend.emit.site import Promise, Site

DOWN = "ServerDown"
# What follows are choices, not measurements: late enough that a burst is no alarm, early enough that somebody can act.
_FULL = 0.95
"""Share of the cache: the next long request waits or has another one preempted."""
_HALF = 0.5
"""Of the hit rate that was counted on."""


class Alert(Record):
    """One alarm, and what to do when it fires."""

    name: str
    expression: str
    lasts: str
    severity: str
    summary: str
    do: tuple[str, ...]


def prometheus(deployment: Deployment, site: Site, promise: Promise) -> str:
    """The rules, as a file for Prometheus' rule_files.

    Raises:
        UsageError: the engine has no page of metrics.

    """
    rules = [_rule(alert, site) for alert in alerts(deployment, site, promise)]
    note = (
        f'{title(deployment)}\nFor rule_files of prometheus.yml. They ask for job="{site.name}", which Prometheus takes from its own scrape '
        f"configuration:\nunder another name {DOWN} fires for ever, and nothing else does. This gives it:\n"
    )
    ways = [f"On machines:\n{_indented(_jobs(_targets(deployment, site)))}"]
    if _in_pods(deployment, site):
        ways.append(
            f"Or in Kubernetes, beside whatever job there is for annotated pods:\n{_indented(_jobs(_pods(deployment, site)))}"
        )
        ways.append(
            f"Or with the Prometheus operator: a ServiceMonitor of the Service (selector and jobLabel: {APP}; endpoints: port http, "
            f"path {page_of(deployment.engine.name)}),\nand the groups below as the spec of a PrometheusRule."
        )
    return document({"groups": [{"name": site.name, "rules": rules}]}, comment=note + "\n".join(ways))


def _jobs(job: dict[str, Any]) -> str:
    return document({"scrape_configs": [job]})


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _targets(deployment: Deployment, site: Site) -> dict[str, Any]:
    """A job of Prometheus for servers on machines: those of one; others come behind them."""
    each = 1 if deployment.nodes > 1 else on_machine(deployment, site)
    targets = [f"{reached(site.host)}:{site.port + number}" for number in range(each)]
    page = page_of(deployment.engine.name)
    return {"job_name": site.name, "metrics_path": page, "static_configs": [{"targets": targets}]}


def _pods(deployment: Deployment, site: Site) -> dict[str, Any]:
    """And for pods: those of this name that say that they have a page."""
    kept = {
        "source_labels": [
            "__meta_kubernetes_pod_label_app_kubernetes_io_name",
            "__meta_kubernetes_pod_annotation_prometheus_io_scrape",
        ],
        "regex": f"{site.name};true",
        "action": "keep",
    }
    return {
        "job_name": site.name,
        "metrics_path": page_of(deployment.engine.name),
        "kubernetes_sd_configs": [{"role": "pod"}],
        "relabel_configs": [kept],
    }


def _in_pods(deployment: Deployment, site: Site) -> bool:
    """Whether there is a manifest for it."""
    try:
        (kubernetes if deployment.nodes == 1 else leader_worker_set)(deployment, site)
    except UsageError:
        return False
    return True


def _rule(alert: Alert, site: Site) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.lasts,
        "labels": {"severity": alert.severity, "service": site.name},
        "annotations": {"summary": alert.summary, "description": " ".join(alert.do)},
    }


def alerts(deployment: Deployment, site: Site, promise: Promise) -> tuple[Alert, ...]:
    """The alarms that this engine's metrics allow, the gravest first.

    Raises:
        UsageError: it has none.

    """
    engine = deployment.engine.name
    names = {meaning: aliases[0] for meaning, aliases in NAMES.get(engine, {}).items()}
    if not names:
        raise UsageError(
            f"{engine} has no page of metrics for Prometheus", hint="kvctl serve-test measures from outside"
        )
    chosen = f'{{job="{site.name}"}}'
    out = [_down(chosen)]
    if (use := names.get("kv_use")) is not None:
        out.append(_full(use + chosen))
    if (preempted := names.get("preemptions")) is not None:
        out.append(_preempted(preempted + chosen))
    out.append(_queue(names["waiting"] + chosen, names["running"] + chosen))
    hits = names.get("prefix_hits") or names.get("cached_tokens")
    asked = names.get("prefix_queries") or names.get("prompt_tokens")
    if promise.hit_rate and hits and asked and deployment.serving.prefix_caching is not False:
        out.append(_hits(hits + chosen, asked + chosen, promise.hit_rate))
    times = TIMES.get(engine, {})
    for kind, limit, what in (
        ("ttft", promise.ttft_s, "to the first token"),
        ("tpot", promise.tpot_s, "between tokens"),
    ):
        if limit and kind in times:
            out.append(_slow(kind, f"{times[kind]}_bucket{chosen}", limit, promise.percent, what))
    return tuple(out)


def _down(chosen: str) -> Alert:
    return Alert(
        DOWN, f"up{chosen} == 0 or absent(up{chosen})", "2m", "critical", "The server does not answer Prometheus",
        ("Read the end of its log: out of memory, or a lost rank?",
         "A start takes as long as the weights take to load; nothing has to be done while it loads.",
         "If it ended out of memory, compare its log with `kvctl size --from-log LOG`, and go back to the version before."),
    )  # fmt: skip


def _full(use: str) -> Alert:
    return Alert(
        "KVCacheFull", f"max by (instance) ({use}) > {_FULL}", "10m", "warning", f"More than {_FULL:.0%} of the KV cache is taken",
        ("Requests are longer or more than this was sized for: compare running requests and prompt lengths with the plan.",
         "Let fewer in at once, shorten what one may ask for, or add a replica.",
         "A smaller format of the cache holds more: ask `kvctl recommend` again with the load that is measured."),
    )  # fmt: skip


def _preempted(count: str) -> Alert:
    return Alert(
        "Preemptions", f"sum by (instance) (increase({count}[15m])) > 0", "5m", "warning",
        "Requests are put off half way, and computed again",
        ("The cache is too small for the requests that run at once; the plan promises none of this.",
         "Lower the limit of requests in a batch to what the cache holds, or add a replica.",
         "Preempted requests lose the time between their tokens: look at the objective too."),
    )  # fmt: skip


def _queue(waiting: str, running: str) -> Alert:
    return Alert(
        "RequestsWait", f"min_over_time((sum by (instance) ({waiting}))[10m:1m]) > 0", "5m", "warning",
        "Requests have been waiting for ten minutes without a break",
        (f"More come than are served. Are all slots busy ({running.partition('{')[0]} at its limit), or does the cache hold no more?",
         "If the cache is not full, the limit of requests in a batch may be raised as far as it holds them.",
         "Otherwise add a replica: a queue that does not empty grows."),
    )  # fmt: skip


def _hits(hits: str, asked: str, rate: float) -> Alert:
    share = f"sum by (instance) (rate({hits}[30m])) / sum by (instance) (rate({asked}[30m]))"
    return Alert(
        "PrefixCacheMisses", f"{share} < {rate * _HALF:.4g}", "30m", "warning",
        f"Fewer prompt tokens come from the prefix cache than half of the {rate:.0%} that were counted on",
        ("Do prompts still begin alike? A time or a name at the start of a prompt ends all sharing.",
         "Does a router send requests of one conversation to different replicas?",
         "If the cache is full, beginnings are thrown out before they come again: make it larger, or offload it to host memory."),
    )  # fmt: skip


def _slow(kind: str, buckets: str, limit: float, percent: float, what: str) -> Alert:
    quantile = f"histogram_quantile({percent / 100:.6g}, sum by (instance, le) (rate({buckets}[10m])))"
    ways = {
        "ttft": ("Do requests wait (RequestsWait), or are prompts longer than planned?",
                 "Add a replica, or let the engine compute more prompt tokens in a step: that costs time between tokens."),
        "tpot": ("Are more requests in a batch than planned, or longer ones?",
                 "Let fewer run at once, compute fewer prompt tokens in a step, or add a replica."),
    }[kind]  # fmt: skip
    return Alert(
        f"{kind.upper()}Missed", f"{quantile} > {limit:.6g}", "10m", "warning",
        f"One request of {100 / (100 - percent):.0f} takes longer than {format_seconds(limit)} {what}"
        if percent < 100 else f"The slowest request takes longer than {format_seconds(limit)} {what}",
        (*ways, "Measure it from outside with kvctl serve-test: the engine's own times leave out what is before it."),
    )  # fmt: skip
