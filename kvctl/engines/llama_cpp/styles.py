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
_LAYER_NORM = Style(layer_norm=True)
_BESIDE = _LAYER_NORM.replace(parallel=True)
STYLES: dict[str, Style] = {
    **dict.fromkeys(
        ["llama", "mistral", "ministral3", "mistral3", "mixtral", "qwen2", "qwen2_5_vl", "qwen2_vl", "gemma", "gpt_oss", "smollm3", "granite", "glm4", "seed_oss", "ernie4_5", "hunyuan_v1_dense", "internlm2", "minicpm", "olmo"], _PLAIN),
    **dict.fromkeys(["qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "gemma3", "gemma3_text"], _HEADS),
    **dict.fromkeys(("olmo2", "olmo3"), Style(full_norm=True, norm_first=False)),
    **dict.fromkeys(("cohere", "cohere2"), _BESIDE),
    "orion": _LAYER_NORM, "stablelm": _LAYER_NORM, "gemma2": Style(capped=True), "phi3": Style(fused=True),
    "starcoder2": _LAYER_NORM.replace(gated=False), "nemotron": _LAYER_NORM.replace(gated=False), "arcee": Style(gated=False),
    "phi": _BESIDE.replace(gated=False), "gpt_neox": _BESIDE.replace(gated=False), "falcon": _BESIDE.replace(gated=False),
}  # fmt: skip
"""By model type."""
NEAR = frozenset(["cohere2", "falcon", "gemma2", "gpt_neox", "gpt_oss", "mixtral", "olmo", "phi", "phi3", "stablelm"])
"""Of these some buffers are up to an eighth off, the others are equal to the byte."""
_FILES = {"phi2": "phi", "gptneox": "gpt_neox", "falcon": "falcon", "internlm2": "internlm2"}
"""GGUF architectures that kvctl otherwise reads like another one."""
_LIKE_LLAMA = frozenset(("llama", "mistral3", "internlm2", "qwen2vl"))


def style_of(spec: ModelSpec) -> Style | None:
    """How a model's graph differs from Llama's; None: it is not known."""
    file = spec.config.get("gguf_architecture")
    if isinstance(file, str) and spec.model_type == "llama" and file not in _LIKE_LLAMA:
        return STYLES.get(_FILES.get(file, ""))
    return STYLES.get(spec.model_type)


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
        dense=w.dense, windowed=windowed if any(windowed) else (), style=style_of(spec) or _PLAIN,
    )  # fmt: skip
