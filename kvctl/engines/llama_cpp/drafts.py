"""What drafting adds to llama.cpp's caches (--spec-type).

Sources: llama.cpp common/common.h (need_n_rs_seq), src/llama-memory-recurrent.cpp, src/llama-arch.cpp
(llm_arch_supports_rs_rollback), and published start-up logs (tests/test_published_logs.py).
Layers of the model's own that predict further tokens (draft-mtp) get a context of their own: as many
cells and streams as the model's, in f16 whatever the model's cache is stored in. A recurrent state
is kept once more for each drafted token, to go back to.
"""

from __future__ import annotations

from kvctl.allocation import Serving
from kvctl.engines.llama_cpp.builds import Rules
from kvctl.engines.llama_cpp.storage import Cache, Storage
from kvctl.engines.states import plain_attention
from kvctl.errors import ConfigError, UsageError
from kvctl.formats import CacheFormat
from kvctl.spec import ModelSpec

_DEFAULT_TOKENS = 3
_PREDICTS = {"qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
"""Model types whose states can be rolled back, and whose own draft layers alone have a cache in their context."""
_MODELS = ("draft-simple", "draft-eagle3", "draft-dflash", "draft-dspark")
_KEEPS_STATES = ("draft-mtp", "draft-eagle3", "draft-dflash", "draft-dspark")


def drafted(
    stored: Storage, spec: ModelSpec, rules: Rules, serving: Serving, types: tuple[CacheFormat, CacheFormat]
) -> tuple[Storage, tuple[str, ...]]:
    """The caches with those of drafting, and what to say; `types`: what the draft's keys and values are stored in.

    Raises:
        ConfigError: a build, a model or a kind of drafting whose caches are not known.
        UsageError: no kind of drafting that llama.cpp has.

    """
    asked = [name.strip() for name in (serving.speculative_algorithm or "none").lower().split(",")]
    kinds = [name for name in asked if name != "none" and not name.startswith("ngram")]
    if not kinds:
        return stored, ()
    for name in kinds:
        if name not in (*_MODELS, "draft-mtp"):
            raise UsageError(f"--spec-type: {name[:40]!r} is not known",
                             hint="one of none, ngram-…, draft-mtp, " + ", ".join(_MODELS))  # fmt: skip
    if not rules.recurrent_log:
        raise ConfigError("kvctl knows what llama.cpp's drafting keeps from build b9842 on")
    warnings: tuple[str, ...] = ()
    if any(name in _MODELS for name in kinds):
        warnings = ("the draft model's own cache comes beside this: size it as a model of its own",)
    if stored.recurrent_layers and any(name in _KEEPS_STATES for name in kinds) and spec.model_type in _PREDICTS:
        stored = stored.replace(snapshots=serving.draft_tokens or _DEFAULT_TOKENS)
    if "draft-mtp" in kinds:
        stored = stored.replace(caches=(*stored.caches, _own_layers(spec, types)))
    return stored, warnings


def _own_layers(spec: ModelSpec, types: tuple[CacheFormat, CacheFormat]) -> Cache:
    """The cache of the layers that predict: they attend as the model's full layers do."""
    if spec.model_type not in _PREDICTS:
        raise ConfigError(f"{spec.id}: kvctl does not know what llama.cpp's draft-mtp keeps for {spec.model_type[:40]}")
    if not spec.prediction_modules:
        raise ConfigError(f"{spec.id}: no layers that predict further tokens", hint="draft-mtp needs them in the file")
    found = (plain_attention(state) for layer in spec.layers for state in layer.states)
    state = next(attention for attention in found if attention is not None)
    layers, (key, value) = spec.prediction_modules, types
    return Cache(
        state.kind,
        key.row_bytes(state.kv_heads * state.key_dim) * layers,
        value.row_bytes(state.kv_heads * state.value_dim) * layers,
        layers,
        drafts=(key.name, value.name),
    )
