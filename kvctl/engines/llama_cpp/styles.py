"""Which architectures' graphs are known node by node, and a model's widths for them.

Source: llama.cpp b11434 src/models/*.cpp; each was compared with the buffer that the library itself allocates
(tests/test_llama_cpp_compute.py).
"""

from __future__ import annotations

from kvctl.allocation import Serving
from kvctl.engines.llama_cpp.compute import Shape, Style
from kvctl.engines.llama_cpp.plan import Laid
from kvctl.engines.llama_cpp.storage import KEEPS_WINDOWS
from kvctl.engines.widths import widths
from kvctl.spec import Attention, ChunkedAttention, ModelSpec, SlidingWindow

_PLAIN, _HEADS = Style(), Style(head_norm=True)
STYLES: dict[str, Style] = {
    "llama": _PLAIN, "mistral": _PLAIN, "ministral3": _PLAIN, "mistral3": _PLAIN, "mixtral": _PLAIN, "qwen2": _PLAIN,
    "qwen2_5_vl": _PLAIN, "qwen2_vl": _PLAIN, "gemma": _PLAIN, "gpt_oss": _PLAIN,
    "qwen3": _HEADS, "qwen3_moe": _HEADS, "gemma3": _HEADS, "gemma3_text": _HEADS,
    "gemma2": Style(capped=True), "phi3": Style(fused=True), "olmo2": Style(full_norm=True, norm_first=False),
    "starcoder2": Style(gated=False), "cohere": Style(parallel=True), "cohere2": Style(parallel=True),
}  # fmt: skip


def shape_of(spec: ModelSpec, laid: Laid, serving: Serving) -> Shape:
    """The widths of a model; an architecture that is not known here is taken for one like Llama.

    Raises:
        ConfigError: the configuration does not name the widths.

    """
    w = widths(spec)
    attention = next(
        (state for layer, _ in spec.groups for state in layer.states if isinstance(state, Attention)), None
    )
    kv_heads = attention.kv_heads if attention else w.heads
    key = attention.key_dim if attention else w.queries // w.heads
    value = attention.value_dim if attention else key
    apart = spec.model_type in KEEPS_WINDOWS and not serving.swa_full and not laid.rules.one_cache
    windowed = tuple(
        apart and any(isinstance(state, (SlidingWindow, ChunkedAttention)) for state in layer.states)
        for layer in spec.layers
    )
    return Shape(
        layers=len(spec.layers), hidden=w.hidden, heads=w.heads, kv_heads=kv_heads, key=key, value=value,
        vocabulary=w.vocabulary, feed=w.feed, expert=w.expert, experts=w.experts, used=w.used, shared=w.shared,
        windowed=windowed if any(windowed) else (), style=STYLES.get(spec.model_type, _PLAIN),
    )  # fmt: skip
