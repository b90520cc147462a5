"""Speculative decoding in vLLM: draft tokens a step, and the layers that drafting adds to the cache.

Source: vllm 0.33.0 config/speculative.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvctl.errors import ConfigError, UsageError
from kvctl.record import Record
from kvctl.spec import FullAttention, Indexer, LatentAttention, Layer, ModelSpec

_WITHOUT_LAYERS = ("ngram", "[ngram]", "ngram_gpu", "suffix", "medusa", "mlp_speculator")
"""Methods that draft without a cache."""
_OTHER_MODELS = ("eagle", "eagle3", "draft_model", "dflash", "dspark")
"""Methods whose layers are those of a model of its own."""

_REPEATS = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm5_next_text", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5",
            "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "mimo", "ernie4_5_moe", "exaone_moe", "exaone4_5", "longcat_flash", "nemotron_h")  # fmt: skip
"""Model types whose modules for multi-token prediction have attention like that of their last layers."""
_ONE = ("qwen3_next", "longcat_flash", "nemotron_h")
"""Model types that have one where their configuration does not say."""


class Drafts(Record):
    """What drafting needs: tokens a step, and layers with the model whose rules they follow."""

    tokens: int = 0
    layers: tuple[tuple[Layer, ModelSpec], ...] = ()
    reason: str = ""


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
    if draft is None:
        raise UsageError("--speculative-config names no draft model and no method that needs none",
                         hint='"method": "mtp", or "model": a name or a folder')  # fmt: skip
    if tokens is None:
        raise UsageError("--speculative-config: a draft model needs num_speculative_tokens")
    count = len(draft.layers)
    return Drafts(tokens, tuple((layer, draft) for layer in draft.layers),
                  f"{count} layers of the draft model {draft.id} hold every token too")  # fmt: skip


def _predicted(spec: ModelSpec, tokens: int | None) -> Drafts:
    """Modules of multi-token prediction: layers like the model's own last one with attention."""
    modules = spec.prediction_modules or int(spec.model_type in _ONE)
    if not modules:
        raise ConfigError(f"{spec.id}: its configuration names no modules for multi-token prediction",
                          hint="another method, or --set num_nextn_predict_layers=1")  # fmt: skip
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
