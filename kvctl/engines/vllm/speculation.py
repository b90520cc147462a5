"""Speculative decoding in vLLM: draft tokens a step, and the layers that drafting adds to the cache.

Source: vllm 0.33.0 config/speculative.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvctl.errors import ConfigError, UsageError
from kvctl.record import Record
from kvctl.spec import FullAttention, Indexer, LatentAttention, Layer, ModelSpec, SlidingWindow

_WITHOUT_LAYERS = ("ngram", "[ngram]", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Methods that draft without a cache."""
_OTHER_MODELS = ("eagle", "eagle3", "draft_model", "dflash", "dspark")
"""Methods whose layers are those of a model of its own."""

_REPEATS = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm5_next_text", "glm4_moe", "glm4_moe_lite", "qwen3_next",
            "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "mimo", "ernie4_5_moe", "exaone_moe", "exaone4_5",
            "longcat_flash", "nemotron_h", "hy_v3", "bailing_hybrid", "kimi_k3", "minimax_m3_vl", "minimax_m3_vl_text",
            "glm_ocr", "pangu_ultra_moe")  # fmt: skip
"""Model types whose modules for multi-token prediction have attention like that of their last layers."""
_WINDOWS = {"deepseek_v4": None, "mimo_v2_flash": 1, "mimo_v2": 1}
"""Those whose modules have a window alone, like the last of their layers with one; and how many vLLM runs, where
that is not what the configuration names."""
_BY_KIND = ("step3p5", "step3p7")
"""Those whose configuration says of each module whether it has a window."""
_READS_TARGET = ("gemma4_assistant", "gemma4_unified_assistant")
"""Draft models that read the keys and values of the model they draft for."""
_DRAFTING = 3
"""Layers of DeepSeek V4's checkpoint that draft with the method dspark, where its configuration names none."""
_ONE = ("qwen3_next", "longcat_flash", "nemotron_h")
"""Model types that have one where their configuration does not say."""


class Drafts(Record):
    """What drafting needs: tokens a step, and layers with the model whose rules they follow."""

    tokens: int = 0
    layers: tuple[tuple[Layer, ModelSpec], ...] = ()
    reason: str = ""
    retained: int = 0
    """Tokens that windows keep beyond their length, from 0.28 on: those that a chain of modules reads again."""


def draft_model(settings: Mapping[str, Any] | None) -> str | None:
    """The name of the model that drafts, where it is one of its own."""
    method, name = (settings or {}).get("method"), (settings or {}).get("model")
    alone = method in _WITHOUT_LAYERS or (isinstance(method, str) and (method == "mtp" or method.endswith("_mtp")))
    return name if isinstance(name, str) and not alone and name not in _WITHOUT_LAYERS else None


def drafts(spec: ModelSpec, settings: Mapping[str, Any] | None, draft: ModelSpec | None) -> Drafts:
    """Read --speculative-config; `draft` is the model that it names, where it names one.

    Raises:
        UsageError: a method, or a number of tokens, that vLLM does not have.
        ConfigError: a model whose prediction modules are not known.

    """
    if settings is None:
        return Drafts()
    method = settings.get("method")
    tokens = settings.get("num_speculative_tokens")
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= 1024):
        raise UsageError(f"--speculative-config: num_speculative_tokens {str(tokens)[:40]!r} is out of range",
                         hint="from 1 to 1,024")  # fmt: skip
    if method in _WITHOUT_LAYERS or settings.get("model") in ("ngram", "[ngram]", "suffix"):
        if tokens is None:
            raise UsageError(f"--speculative-config: {method or settings['model']} needs num_speculative_tokens")
        return Drafts(tokens, (), f"{method or settings['model']} drafts {tokens} tokens without a cache of its own")
    if isinstance(method, str) and (method == "mtp" or method.endswith("_mtp")):
        return _predicted(spec, tokens)
    if method is not None and method not in _OTHER_MODELS:
        raise UsageError(f"--speculative-config: unknown method {str(method)[:40]!r}",
                         hint="one of mtp, " + ", ".join((*_OTHER_MODELS, *_WITHOUT_LAYERS[:1], *_WITHOUT_LAYERS[3:])))  # fmt: skip
    if draft is None and method == "dspark" and spec.model_type == "deepseek_v4":
        return _windows(spec, spec.config.get("n_mtp_layers") or _DRAFTING, tokens)
    if draft is None:
        raise UsageError("--speculative-config names no draft model and no method that needs none",
                         hint='"method": "mtp", or "model": a name or a folder')  # fmt: skip
    if tokens is None:
        raise UsageError("--speculative-config: a draft model needs num_speculative_tokens")
    if draft.model_type in _READS_TARGET:
        return Drafts(tokens, (), f"the draft model {draft.id} reads the model's own cache")
    count = len(draft.layers)
    return Drafts(tokens, tuple((layer, draft) for layer in draft.layers),
                  f"{count} layers of the draft model {draft.id} hold every token too")  # fmt: skip


def _predicted(spec: ModelSpec, tokens: int | None) -> Drafts:
    """Modules of multi-token prediction: layers like the model's own last one with attention."""
    if _WINDOWS.get(spec.model_type):
        return _windows(spec, _WINDOWS[spec.model_type], tokens)
    modules = spec.prediction_modules or int(spec.model_type in _ONE)
    if not modules:
        raise ConfigError(f"{spec.id}: its configuration names no modules for multi-token prediction",
                          hint="another method, or --set num_nextn_predict_layers=1")  # fmt: skip
    if spec.model_type in _WINDOWS:
        return _windows(spec, modules, tokens)
    if spec.model_type in _BY_KIND:
        return _by_kind(spec, modules, tokens or modules)
    if spec.model_type not in _REPEATS:
        raise ConfigError(f"{spec.id}: kvctl does not know the prediction modules of {spec.model_type[:60]}",
                          hint="without --speculative-config the model alone is counted")  # fmt: skip
    states: tuple[Any, ...] = ()
    for layer in reversed(spec.layers):
        states = tuple(s for s in layer.states_in("vllm") if isinstance(s, (FullAttention, LatentAttention, Indexer)))
        if states:
            break
    if not states:
        raise ConfigError(f"{spec.id}: no attention that a prediction module could repeat")
    reason = (
        f"{modules} layer{'s' * (modules > 1)} for multi-token prediction hold{'s' * (modules == 1)} every token too"
    )
    return Drafts(tokens or modules, ((Layer(states), spec),) * modules, reason)


def _windows(spec: ModelSpec, modules: int | None, tokens: int | None) -> Drafts:
    """Modules that have a window alone, like that of the model's last layer with one."""
    window = next(
        (s for layer in reversed(spec.layers) for s in layer.states_in("vllm") if isinstance(s, SlidingWindow)), None
    )
    if window is None or not isinstance(modules, int) or not 1 <= modules <= 64:
        raise ConfigError(f"{spec.id}: no window that a prediction module could repeat")
    reason = (
        f"{modules} layer{'s' * (modules > 1)} that draft{'s' * (modules == 1)} hold{'s' * (modules == 1)} a window too"
    )
    return Drafts(tokens or modules, ((Layer((window,)), spec),) * modules, reason)


def _by_kind(spec: ModelSpec, modules: int, tokens: int) -> Drafts:
    """Modules with the attention that the configuration names after its own layers."""
    nested = spec.config.get("text_config")
    config = nested if isinstance(nested, Mapping) else spec.config
    named = [config.get(name) for name in ("layer_types", "mtp_layer_types")]
    kinds = [str(kind) for kinds in named if isinstance(kinds, list) for kind in kinds][len(spec.layers) :][:modules]
    if len(kinds) < modules:
        raise ConfigError(f"{spec.id}: its configuration does not say which attention its prediction modules have",
                          hint='--set mtp_layer_types=\'["sliding_attention", …]\', one for each')  # fmt: skip
    states = [state for layer in spec.layers for state in layer.states_in("vllm")]
    like: dict[str, list[Any]] = {
            "sliding_attention": [s for s in states if isinstance(s, SlidingWindow)],
            "full_attention": [s for s in states if isinstance(s, FullAttention)]}  # fmt: skip
    if not all(like.get(kind) for kind in kinds):
        raise ConfigError(f"{spec.id}: kvctl does not know the prediction modules {str(kinds)[:60]}")
    made = {kind: Layer((like[kind][-1],)) for kind in like if like[kind]}
    return Drafts(tokens, tuple((made[kind], spec) for kind in kinds),
                  f"{modules} layer{'s' * (modules > 1)} for multi-token prediction hold tokens too",
                  tokens - 1 if modules > 1 else 0)  # fmt: skip
