"""Turning keys to other positions, with the model's own rotary embedding. Imported where torch is."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch

from kvctl.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class Rope:
    """The rotary embedding of a model's full attention.

    A key at position p turned by d is the key at p + d: rotations add up. Which pairs of elements are turned, and how
    far, is left to the model's own functions; that they do add up is tried before they are used.

    Raises:
        ConfigError: the model has no rotary embedding that can be turned so.

    """

    def __init__(self, model: Any, name: str) -> None:
        self._why = f"{name}: keys of {type(model).__name__} cannot be turned to other positions"
        found = [module for path, module in model.named_modules() if path.rpartition(".")[2] == "rotary_emb"]
        attention = next((m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "k_proj")), None)
        apply = getattr(sys.modules.get(type(attention).__module__), "apply_rotary_pos_emb", None)
        if len(found) != 1 or attention is None or apply is None:
            raise ConfigError(
                self._why, hint="its rotary embedding is not one that kvctl knows; positions=text leaves them"
            )
        self._embedding, self._apply = found[0], apply
        # Models with windows have one for each kind of layer: evictions work on full attention.
        by_kind = "layer_type" in inspect.signature(found[0].forward).parameters
        self._told = {"layer_type": "full_attention"} if by_kind else {}
        name = "full_attention_attention_scaling" if by_kind else "attention_scaling"
        self._scale = float(getattr(found[0], name, 1.0))
        self._check(attention)

    def turned(self, keys: Tensor, by: Tensor) -> Tensor:
        """Keys [batch, heads, tokens, dim] further on by `by` [batch or 1, tokens] positions (back, where negative)."""
        cos, sin = self._embedding(keys, by, **self._told)
        _, out = self._apply(keys, keys, cos / self._scale, sin / self._scale)
        return out

    def _check(self, attention: Any) -> None:
        dim = attention.head_dim
        device = attention.k_proj.weight.device
        keys = torch.randn(1, 1, 3, dim, device=device, generator=torch.Generator(device).manual_seed(0))
        at, by = torch.tensor([[5, 100, 1000]], device=device), torch.tensor([[40, -7, 300]], device=device)
        try:
            right, wrong = self.turned(keys, at + by), self.turned(self.turned(keys, at), by)
            fits = right.shape == wrong.shape and torch.allclose(right, wrong, atol=1e-3, rtol=1e-3)
        except Exception as error:
            raise ConfigError(
                self._why,
                hint=f"its rotary embedding is not one that kvctl knows ({type(error).__name__}); positions=text leaves them",
            ) from None
        if not fits:
            raise ConfigError(self._why, hint="its rotary embedding changes with length; positions=text leaves them")
