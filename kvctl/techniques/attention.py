"""The attention function that lets an eviction see queries. Imported where torch and transformers are.

transformers lets an attention function be registered by name; this one computes what its own for torch's
scaled_dot_product_attention does, with a mask for what the cache holds, and then tells the layer of the cache about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvctl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from kvctl.techniques.caches import TechniqueLayer

NAME = "kvctl"
_waiting: list[TechniqueLayer] = []
"""The layer whose keys were handed out last: its attention comes next."""


def expect(layer: TechniqueLayer) -> None:
    """The attention of this layer comes next."""
    if _waiting:
        _waiting.clear()
        raise ConfigError("this model's attention does not pass through transformers' attention functions",
                          hint="evictions that look at queries cannot be used with it")  # fmt: skip
    _waiting.append(layer)


def forget() -> None:
    """Nothing is expected: a pass broke off."""
    _waiting.clear()


def install(model: Any, name: str) -> None:
    """Let `model` use it.

    Raises:
        ConfigError: the model does not run with torch's scaled_dot_product_attention.

    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    now = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    if now == NAME:
        return
    if now != "sdpa":
        raise ConfigError(f"{name} needs a model that runs with sdpa, and {type(model).__name__} runs with {now}",
                          hint="--attn sdpa, where the model has it")  # fmt: skip
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    _change(model, "sdpa", NAME)


def remove(model: Any) -> None:
    """Back to transformers' own function."""
    forget()
    _change(model, NAME, "sdpa")


def _change(model: Any, old: str, new: str) -> None:
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

    layer = _waiting.pop() if _waiting else None
    if layer is None:
        passed: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return passed
    mask = layer.mask(query, attention_mask)
    out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    scaling = kwargs.get("scaling")
    layer.attended(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling)
    return out


def visible(attention_mask: Tensor | None, new: int) -> Tensor | None:
    """Which of the new tokens [batch, new] are no padding; None where all are."""
    if attention_mask is None:
        return None
    last = attention_mask[:, 0, -1, -new:]
    seen = last if last.dtype == torch.bool else last > -1
    return None if bool(seen.all()) else seen
