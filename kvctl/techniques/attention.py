"""The attention function through which a cache meets queries. Imported where torch and transformers are.

transformers lets an attention function be registered by name; this one computes what its own for torch's
scaled_dot_product_attention does. An eviction gets a mask for what its cache holds, and is told of the queries afterwards. A
cache of packed rows hands out rows that for a single new token need not be unpacked.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from kvctl.errors import ConfigError, Hint
from kvctl.techniques import direct
from kvctl.techniques.direct import Stored, without_autocast

if TYPE_CHECKING:
    from torch import Tensor

    from kvctl.techniques import Technique
    from kvctl.techniques.caches import Rows, TechniqueLayer

NAME = "kvctl"
_models: set[int] = set()
"""Models that use it, by identity."""


class _Waiting(threading.local):
    """The layer of this thread whose keys were handed out last: its attention comes next."""

    def __init__(self) -> None:
        self.layers: list[TechniqueLayer] = []


_waiting = _Waiting()


def expect(layer: TechniqueLayer) -> None:
    """The attention of this layer comes next."""
    if _waiting.layers:
        _waiting.layers.clear()
        raise ConfigError("this model's attention does not pass through transformers' attention functions",
                          hint="evictions that look at queries cannot be used with it")  # fmt: skip
    _waiting.layers.append(layer)


def forget() -> None:
    """Nothing is expected: a pass broke off."""
    _waiting.layers.clear()


def serves(model: int) -> bool:
    """Whether the model of this identity uses it."""
    return model in _models


def install(model: Any, technique: Technique) -> None:
    """Let `model` use it.

    Raises:
        ConfigError: the technique cannot do without, and the model does not run with torch's scaled_dot_product_attention.

    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    now = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    if now == "sdpa":
        AttentionInterface.register(NAME, attend)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        change(model, "sdpa", NAME)
        _models.add(id(model))
    elif now != NAME and technique.keep is not None:
        raise ConfigError(f"{technique.name} needs a model that runs with sdpa, and {type(model).__name__} runs with {now}",
                          hint=Hint("--attn sdpa, where the model has it", "profile"))  # fmt: skip


def remove(model: Any) -> None:
    """Back to transformers' own function."""
    forget()
    _models.discard(id(model))
    change(model, NAME, "sdpa")


def change(model: Any, old: str, new: str) -> None:
    """In every part of the model that runs with `old`. Not by set_attn_implementation, nor by the property of a configuration,
    which say it to all parts: some know neither this function nor sdpa."""
    for config in {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values():
        if getattr(config, "_attn_implementation_internal", None) == old:
            config._attn_implementation_internal = new


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As transformers' sdpa_attention_forward, for the layer that is expected."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    scaling = query.shape[-1] ** -0.5 if kwargs.get("scaling") is None else kwargs["scaling"]
    if isinstance(key, Stored) and isinstance(value, Stored) and _all_alike(query, key.rows(), attention_mask, kwargs):
        return direct.attention(query, key.rows(), value.rows(), scaling), None
    layer = _waiting.layers.pop() if _waiting.layers else None
    mask = attention_mask if layer is None else layer.mask(query, attention_mask)
    out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    if layer is not None:
        with without_autocast(query.device.type):
            layer.attended(query, key, value, scaling)
    return out


def _all_alike(query: Tensor, rows: Rows, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Whether the query sees all tokens, and nothing but their products with it counts."""
    others = (kwargs.get("position_bias"), kwargs.get("softcap"), kwargs.get("dropout") or None)
    fits = query.shape[2] == 1 and query.shape[1] % rows.heads == 0 and query.dtype != torch.float64
    return fits and all(other is None for other in others) and (mask is None or _open(mask))


def _open(mask: Tensor) -> bool:
    """Whether nothing is hidden or weighed."""
    return bool(mask.all() if mask.dtype == torch.bool else not mask.any())


def visible(attention_mask: Tensor | None, new: int) -> Tensor | None:
    """Which of the new tokens [batch, new] are no padding; None where all are."""
    if attention_mask is None:
        return None
    last = attention_mask[:, 0, -1, -new:]
    seen = last if last.dtype == torch.bool else last > -1
    return None if bool(seen.all()) else seen
