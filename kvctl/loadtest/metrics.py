"""What an engine's page of metrics says of its KV cache and its queue, whatever that engine and version call it.

A name that is not on the page is not available, never 0. Of each meaning the first name that is there counts; several engines behind
one page are added up, shares are averaged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvctl.errors import KvctlError
from kvctl.loadtest.target import Client
from kvctl.record import Record

GAUGES = ("kv_use", "running", "waiting", "kv_tokens")
COUNTERS = (
    "preemptions",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "prefix_queries",
    "prefix_hits",
    "requests",
)
SHARES = ("kv_use",)

NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    # vllm/v1/metrics/loggers.py; gpu_* until 0.9 (vllm#30041), prompt_tokens_cached from 0.16 on.
    "vllm": {
        "kv_use": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
        "prompt_tokens": ("vllm:prompt_tokens_total",),
        "output_tokens": ("vllm:generation_tokens_total",),
        "cached_tokens": ("vllm:prompt_tokens_cached_total",),
        "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        "requests": ("vllm:request_success_total",),
    },
    # sglang/srt/observability/metrics_collector.py
    "sglang": {
        "kv_use": ("sglang:token_usage",),
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv_tokens": ("sglang:num_used_tokens",),
        "preemptions": ("sglang:num_retracted_requests_total", "sglang:num_retractions"),
        "prompt_tokens": ("sglang:prompt_tokens_total",),
        "output_tokens": ("sglang:generation_tokens_total",),
        "cached_tokens": ("sglang:cached_tokens_total",),
        "requests": ("sglang:num_requests_total",),
    },
    # tools/server/server.cpp: no use of the cache; that comes from /slots.
    "llama.cpp": {
        "running": ("llamacpp:requests_processing",),
        "waiting": ("llamacpp:requests_deferred",),
        "prompt_tokens": ("llamacpp:prompt_tokens_total",),
        "output_tokens": ("llamacpp:tokens_predicted_total",),
        "cached_tokens": ("llamacpp:prompt_tokens_cached_total",),
    },
    # TGI's router: docs/source/reference/metrics.md
    "tgi": {
        "running": ("tgi_batch_current_size",),
        "waiting": ("tgi_queue_size",),
        "requests": ("tgi_request_success",),
    },
}


class Sample(Record):
    """One look at the page: nanoseconds of the monotonic clock, and values by meaning; without what is not there."""

    at: int
    values: Mapping[str, float]
    series: Mapping[str, Mapping[str, float]] = {}
    """Of counters each line by its labels: a reset of one is seen in its own."""
    info: Mapping[str, Mapping[str, str]] = {}
    """Labels of lines that say how the engine is set up."""


def read(page: str, engine: str, at: int = 0) -> Sample:
    """One page.

    Raises:
        ValueError: it is no such page.

    """
    from prometheus_client.parser import text_string_to_metric_families

    wanted = {name: meaning for meaning, names in NAMES.get(engine, {}).items() for name in names}
    found: dict[str, dict[str, float]] = {}
    info: dict[str, Mapping[str, str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in wanted:
                found.setdefault(sample.name, {})[repr(sorted(sample.labels.items()))] = float(sample.value)
            elif sample.name.endswith("cache_config_info"):
                info[sample.name] = dict(sample.labels)
    values: dict[str, float] = {}
    series: dict[str, dict[str, float]] = {}
    for meaning, names in NAMES.get(engine, {}).items():
        lines = next((found[name] for name in names if name in found), None)
        if not lines:
            continue
        values[meaning] = sum(lines.values()) / (len(lines) if meaning in SHARES else 1)
        if meaning in COUNTERS:
            series[meaning] = lines
    return Sample(at, values, series, info)


def of_slots(answer: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """llama.cpp's /slots: tokens that requests under way hold, and their share of all cells."""
    cells = sum(int(slot.get("n_ctx") or 0) for slot in answer)
    held = 0
    for slot in answer:
        if slot.get("is_processing"):
            after = slot.get("next_token")
            after = after[0] if isinstance(after, list) and after else after
            decoded = after.get("n_decoded", 0) if isinstance(after, Mapping) else 0
            held += int(slot.get("n_prompt_tokens") or 0) + int(decoded or 0)
    out: dict[str, float] = {"kv_tokens": held}
    if cells:
        out["kv_use"] = held / cells
    return out


class Growth(Record):
    """How far a counter went."""

    value: float
    resets: int
    """Times it fell: the server was restarted."""


def growth(samples: Iterable[Sample], meaning: str) -> Growth | None:
    """Of a counter over all samples, line by line; None where it was not there at the first and the last of them."""
    kept = [sample for sample in samples if meaning in sample.series]
    if len(kept) < 2:
        return None
    total, resets = 0.0, 0
    before = dict(kept[0].series[meaning])
    for sample in kept[1:]:
        fell = False
        for labels, value in sample.series[meaning].items():
            last = before.get(labels, 0.0)
            fell |= value < last
            total += value - last if value >= last else value
        resets += fell
        before = dict(sample.series[meaning])
    return Growth(total, resets)


def course(samples: Sequence[Sample], meaning: str) -> list[float | None]:
    """Of a counter at each look how far it had gone since the first; None where it was not there."""
    out: list[float | None] = []
    last: Sample | None = None
    total = 0.0
    for sample in samples:
        if meaning not in sample.series:
            out.append(None)
            continue
        if last is not None and (step := growth((last, sample), meaning)) is not None:
            total += step.value
        last = sample
        out.append(total)
    return out


class Watch:
    """Looks at the server's metrics on a timer, in a thread of its own, from `start` to `stop`."""

    def __init__(
        self, client: Client, engine: str, every: float = 0.25, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self.client, self.engine, self.every, self._clock = client, engine, every, clock
        self.samples: list[Sample] = []
        self.misses = 0
        """Looks that gave nothing."""
        self.took_ns = 0
        """All of them."""
        self.why: str | None = None
        """Of the first that gave nothing."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """The first look is done when this returns."""
        self.look()
        self._thread.start()

    def stop(self) -> None:
        """And the last one too."""
        self._over.set()
        self._thread.join(timeout=30)
        self.look()

    def _run(self) -> None:
        while not self._over.wait(self.every):
            self.look()

    def look(self) -> None:
        """One more sample."""
        began = self._clock()
        try:
            answer = self.client.get("/metrics")
            if answer is None or answer.status_code != 200:
                raise ValueError("no page of metrics" if answer is None else f"/metrics answers {answer.status_code}")
            sample = read(answer.text, self.engine, (began + self._clock()) // 2)
            if self.engine == "llama.cpp":
                slots = self.client.get("/slots")
                if slots is not None and slots.status_code == 200:
                    sample = sample.replace(values={**sample.values, **of_slots(slots.json())})
            self.samples.append(sample)
        except (KvctlError, ValueError, TypeError, AttributeError) as error:
            self.misses += 1
            self.why = self.why or (error.message if isinstance(error, KvctlError) else str(error))[:200]
        self.took_ns += self._clock() - began
