"""What transformers takes beside weights and cache: activations of the prompt's forward pass, and what steps keep twice.

Source: transformers 5.24 modeling code (hidden states that a layer, its caller and the model hold while a
feed-forward part or attention runs), generation/utils.py (logits of the last token alone), cache_utils.py,
generation/continuous_batching. Checked against the live tensors of forward passes on the CPU
(tests/test_overheads_transformers.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.allocation import Part, Serving
from kvctl.engines.runtime import runtime
from kvctl.engines.usual import default_context, left, plan_refusal, shortage, start_refusal, started
from kvctl.engines.widths import UNGATED, Widths, widths
from kvctl.errors import UsageError
from kvctl.spec import FullAttention, LatentAttention, ModelSpec
from kvctl.units import MIB, format_bytes

__all__ = [
    "default_context",
    "kv_budget",
    "left",
    "overheads",
    "plan_refusal",
    "prefill",
    "shortage",
    "start_refusal",
    "started",
]

_CUBLAS = 32 * MIB
"""cuBLAS's workspace, which torch makes at the first product: 32 MiB on Hopper, 8 MiB before."""

_FUSED = frozenset(["chatglm", "dbrx", "glm", "glm4", "phi3"])
"""Both products into it are one tensor."""
_CHAINED = frozenset(("gpt2", "gpt-sw3"))
"""Activations that are many operations."""
EAGER = frozenset(
    [
        "big_bird",
        "bigbird_pegasus",
        "bloom",
        "cpmant",
        "deepseek_v4",
        "flint",
        "gemma2",
        "git",
        "got_ocr2",
        "gpt_neo",
        "gpt_neox_japanese",
        "gpt_oss",
        "granite_swa",
        "granitemoe_swa",
        "hy_v4",
        "inkling2_loop_text",
        "inkling2_text",
        "megatron-bert",
        "mimo_v2_flash",
        "mpt",
        "mvp",
        "openai-gpt",
        "prophetnet",
        "rembert",
        "roformer",
        "trocr",
        "vaultgemma",
        "xglm",
        "xlm",
        "xlnet",
    ]
)
"""Types whose classes have no SDPA, and build the scores of all heads."""


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
    """What is neither weights nor cache when one sequence's prompt of `context` tokens runs through the model at once."""
    parts = [runtime(1, more=_CUBLAS)]
    if serving.cache_implementation == "paged":
        return tuple(parts)  # what its batches take is part of the pool's own arithmetic
    eager = spec.model_type in EAGER or serving.attention_backend == "eager"
    w = widths(spec)
    peak, where = prefill(spec.model_type, w, context, dtype_bytes, eager=eager)
    last = w.vocabulary * (dtype_bytes + 4)
    parts.append(Part("activations", max(peak, last), estimated=True, rule=(
        f"a prompt of {context:,} tokens in one piece keeps {where} for each: {format_bytes(peak)} at the peak; "
        "logits are made for its last token alone")))  # fmt: skip
    if serving.cache_implementation in (None, "dynamic") and (layer := _widest_layer(spec, context, dtype_bytes)):
        parts.append(Part("cache growth", layer, estimated=False, rule=(
            f"every step writes a layer's cache anew before it lets the old one go: {format_bytes(layer)} of the widest")))  # fmt: skip
    if serving.cache_implementation == "quantized":
        copy = 2 * _widest_layer(spec, context, dtype_bytes)
        parts.append(Part("dequantised layer", copy, estimated=True, rule=(
            f"attention reads a layer's keys and values dequantised: {format_bytes(copy)} of the widest, once a step")))  # fmt: skip
    return tuple(parts)


def prefill(model_type: str, w: Widths, tokens: int, dtype_bytes: int, *, eager: bool = False) -> tuple[int, str]:
    """Bytes of live activations at their peak beside the cache, and what they are for each token.

    The model holds its embeddings, the caller a layer's input, the layer its residual and the normed state.
    """
    inner = 4.5 if model_type in _CHAINED else 4 if model_type in _FUSED else 2 if model_type in UNGATED else 3
    mlp = 4 * w.hidden + int(inner * w.feed)
    experts = 4 * w.hidden + w.used * max(w.hidden + 4 * w.expert, 4 * w.hidden) if w.expert else 0
    attention = 3 * w.hidden + 4 * w.queries
    most = max(mlp, experts, attention)
    if most == attention:
        where = f"3 hidden states of {w.hidden:,} and 4 rows of {w.queries:,} for its queries"
    elif most == mlp:
        where = f"4 hidden states of {w.hidden:,} and {inner:g} rows of {w.feed:,} in the feed-forward part"
    else:
        where = f"4 hidden states of {w.hidden:,} and the rows of its {w.used} experts"
    dim = w.queries // w.heads
    rope = 2 * dim * dtype_bytes + 16
    peak = tokens * (most * dtype_bytes + rope)
    if eager:
        # Scores, scores with the mask, and their softmax in float32; with sinks none of them is.
        each = 3 * dtype_bytes + (0 if model_type == "gpt_oss" else 4)
        scores = tokens * tokens * (w.heads * each + dtype_bytes)
        # Keys and values are repeated for every query head.
        attended = tokens * ((3 * w.hidden + 3 * w.queries) * dtype_bytes + rope) + scores
        if attended > peak:
            return attended, f"the scores of {w.heads} heads over {tokens:,} tokens"
    return peak, where


def _widest_layer(spec: ModelSpec, context: int, dtype_bytes: int) -> int:
    """Bytes of the largest cache that one layer appends to."""
    rows = [0]
    for layer, _ in spec.groups:
        for state in layer.states_in("transformers"):
            if isinstance(state, FullAttention):
                rows.append(max(state.kv_heads * state.key_dim, state.kv_heads * state.value_dim))
            elif isinstance(state, LatentAttention):
                rows.append(state.latent)
    # Keys are let go before values are written.
    return max(rows) * context * dtype_bytes


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
    """Bytes that are left for the cache on one GPU.

    Of the paged cache: what it divides between its batches and its pool (`kvctl.engines.transformers.paged`), which
    is 90% of what is free once the weights are there. All others grow until memory ends.
    """
    rest = free_bytes - weights_bytes - sum(part.bytes for part in parts)
    if serving.cache_implementation != "paged":
        return rest
    share = serving.utilization
    if share is None:
        share = 0.6 if serving.device == "cpu" else 0.9
    if not 0 < share <= 1:
        raise UsageError(f"--cb-max-memory-percent {share:g} is out of range", hint="between 0 and 1")
    return int(rest * share)
