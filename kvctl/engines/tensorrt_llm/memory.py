"""What TensorRT-LLM takes beside weights and cache, and the share of the rest that its cache gets.

Source: TensorRT-LLM tensorrt_llm/_torch/pyexecutor/_util.py (KvCacheCreator, configure_kv_cache_capacity and
_cal_max_memory): a real forward pass of max_num_tokens is measured, with a small cache that is given back, and

    cache = (total − peak + that small cache) × free_gpu_memory_fraction

where the peak has weights, activations, and all that is used outside of torch (context, NCCL, graphs, others' processes).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.allocation import Part, Serving
from kvctl.engines.runtime import runtime
from kvctl.engines.tensorrt_llm.settings import rules_for
from kvctl.engines.usual import default_context, plan_refusal, shortage, start_refusal, started
from kvctl.engines.widths import Widths, widths
from kvctl.errors import UsageError
from kvctl.spec import ModelSpec
from kvctl.units import format_bytes

__all__ = [
    "activations",
    "default_context",
    "kv_budget",
    "left",
    "overheads",
    "plan_refusal",
    "shortage",
    "start_refusal",
    "started",
]

TOKENS = 8192
"""max_num_tokens without being told."""


def overheads(
    spec: ModelSpec,
    serving: Serving,
    *,
    dtype_bytes: int,
    device_bytes: int,
    gpu_name: str | None,
    version: str | None,
    context: int,
    free_bytes: int | None = None,
) -> tuple[Part, ...]:
    """What is neither weights nor cache on one rank; all of it estimated, for the engine measures it."""
    rules_for(version)
    ranks = 1 if serving.attention_dp else serving.tensor_parallel or 1
    w, tokens = widths(spec), serving.max_batched or TOKENS
    taken = activations(w, tokens, dtype_bytes, ranks)
    return (
        runtime((serving.tensor_parallel or 1) * (serving.pipeline_parallel or 1)),
        Part("activations", taken, estimated=True, rule=(
            f"the engine measures a forward pass of {tokens:,} tokens: about {format_bytes(taken)}, by the width of its layers")),
    )  # fmt: skip


def activations(w: Widths, tokens: int, dtype_bytes: int, ranks: int) -> int:
    """Bytes that a forward pass of `tokens` allocates in torch at its peak, about."""
    states = 3 * w.hidden
    feed = 3 * w.feed // ranks
    experts = w.used * (2 * w.hidden + 3 * w.expert // ranks) + 3 * w.shared // ranks if w.expert else 0
    attention = (2 * w.queries + w.keys + w.values) // ranks
    return tokens * (states + max(feed, experts, attention)) * dtype_bytes


def kv_budget(
    *,
    device_bytes: int,
    free_bytes: int,
    weights_bytes: int,
    parts: Sequence[Part],
    serving: Serving,
    version: str | None,
    spec: ModelSpec,
) -> int:
    """Bytes for the cache on one rank; what other processes hold is off the total like all else outside of torch."""
    share = 0.9 if serving.utilization is None else serving.utilization
    if not 0 < share <= 1:
        raise UsageError(f"free_gpu_memory_fraction {share:g} is out of range", hint="above 0, at most 1")
    return int((free_bytes - weights_bytes - sum(part.bytes for part in parts)) * share)


def left(serving: Serving, version: str | None) -> str:
    """Why the engine leaves some of the memory alone."""
    return f"free_gpu_memory_fraction {0.9 if serving.utilization is None else serving.utilization:g} leaves it alone"
