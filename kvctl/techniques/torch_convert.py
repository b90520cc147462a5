"""KV heads of a real model, joined. Imported where torch is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from kvctl.engines import TRANSFORMERS
from kvctl.errors import ConfigError
from kvctl.spec import Attention, CrossAttention, LayerState, ModelSpec, Shared
from kvctl.units import plural

if TYPE_CHECKING:
    from torch import Tensor

_NORMS = ("k_norm", "v_norm", "k_layernorm", "key_layernorm", "qk_norm")
"""Of keys and values; they have to be the same for all heads."""
_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "dense", "out_proj", "gate_proj", "g_proj", "q_norm", "q_layernorm", "query_layernorm",
          "rotary_emb", *_NORMS}  # fmt: skip
"""What an attention may consist of; anything else may depend on the number of heads in a way that is not known."""
_OWN = {"sinks"}
"""Parameters of its own that do not: one for each query head."""
_COUNTS = ("num_key_value_heads", "num_kv_heads")


def joined(model: Any, spec: ModelSpec, heads: int, name: str) -> Callable[[], None]:
    """Average the keys' and values' projections of neighbouring heads, so that `heads` are left in every layer.

    Projections get new weights, attentions and configurations the new number of heads. The old weights are kept, and what is
    returned puts these very tensors back.

    Raises:
        ConfigError: an attention is not one of linear projections by head; nothing is changed then.

    """
    found, readers = _attentions(model, spec, name)
    undo: list[tuple[Any, str, Any]] = []

    def swap(target: Any, attribute: str, value: Any) -> None:
        undo.append((target, attribute, getattr(target, attribute)))
        setattr(target, attribute, value)

    def restore() -> None:
        while undo:
            setattr(*undo[-1])
            undo.pop()

    try:
        for module, state in found:
            group = state.kv_heads // heads
            swap(module, "num_key_value_groups", module.num_key_value_groups * group)
            _count(swap, module, heads)
            if module in readers:
                continue
            for linear, dim in ((module.k_proj, state.key_dim), (module.v_proj, state.value_dim)):
                for part in ("weight", "bias"):
                    rows = getattr(linear, part)
                    if rows is not None:
                        swap(linear, part, torch.nn.Parameter(mean_of_groups(rows, heads, group, dim), False))
                swap(linear, "out_features", heads * dim)
        configs = [getattr(module, "config", None) for module, _ in found]
        for config in {id(one): one for one in (*configs, model.config.get_text_config(decoder=True))}.values():
            _count(swap, config, heads)
    except BaseException:
        restore()
        raise
    return restore


def mean_of_groups(rows: Tensor, heads: int, group: int, dim: int) -> Tensor:
    """Rows [heads · group · dim, …] of a projection; the mean of `group` neighbouring heads for each of `heads`.

    The average is taken in single precision at least, and rounded once.
    """
    wide = rows.detach().to(torch.promote_types(rows.dtype, torch.float32))
    return wide.reshape(heads, group, dim, *rows.shape[1:]).mean(1).reshape(heads * dim, *rows.shape[1:]).to(rows.dtype)


def _count(swap: Callable[[Any, str, Any], None], target: Any, heads: int) -> None:
    for attribute in _COUNTS:
        if isinstance(getattr(target, attribute, None), int):
            swap(target, attribute, heads)


def _attentions(model: Any, spec: ModelSpec, name: str) -> tuple[list[tuple[Any, Attention]], set[Any]]:
    """The attention of every layer that keeps keys and values of heads, or reads those of another layer, with what it keeps or
    reads; and those of them that read.

    Raises:
        ConfigError: one is missing, there twice, or not one that can be changed.

    """
    kind = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ConfigError(f"{name}: {kind} has an encoder, and heads are joined in models that are a decoder alone")
    wanted, read = _kept(spec, name)
    found: dict[int, Any] = {}
    for path, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        known = (
            hasattr(module, "num_key_value_groups")
            if index in read
            else hasattr(module, "k_proj") and hasattr(module, "v_proj")
        )
        if not known or index not in wanted:
            continue
        if index in found:
            raise ConfigError(
                f"{name}: layer {index} of {kind} has two attentions, and which of them keeps the cache is not known"
            )
        fault = _fault(module, wanted[index]) if index not in read else None
        if fault is not None:
            raise ConfigError(
                f"{name}: {path} of {kind} {fault}", hint="kvctl size MODEL --technique gqa:N predicts the cache"
            )
        found[index] = module
    missing = [index for index in wanted if index not in found]
    if missing:
        raise ConfigError(f"{name}: layer {missing[0]} of {kind} has no projections of keys and of values (k_proj, v_proj)",
                          hint="heads are joined where keys and values have a projection each")  # fmt: skip
    return [(found[index], state) for index, state in wanted.items()], {found[index] for index in read}


def _kept(spec: ModelSpec, name: str) -> tuple[dict[int, Attention], set[int]]:
    """By layer, the keys and values of heads that it keeps or reads; and the layers that read another's.

    Raises:
        ConfigError: what a layer reads is not known.

    """
    wanted: dict[int, Attention] = {}
    read = set()
    for index, layer in enumerate(spec.layers):
        for state in layer.states_in(TRANSFORMERS.name):
            states: tuple[LayerState, ...] = (state,)
            if isinstance(state, Shared):
                states = state.like
                read.add(index)
                if not states:
                    raise ConfigError(
                        f"{name}: layer {index} of {spec.id} reads another layer's cache, and how many heads it reads is not known"
                    )
            for one in states:
                if isinstance(one, Attention) and not isinstance(one, CrossAttention):
                    wanted[index] = one
    return wanted, read


def _fault(module: Any, state: Attention) -> str | None:
    """Why an attention cannot be changed."""
    for part, dim in (("k_proj", state.key_dim), ("v_proj", state.value_dim)):
        linear = getattr(module, part)
        if type(linear) is not torch.nn.Linear or type(linear.weight) is not torch.nn.Parameter:
            return f"has a {type(linear).__name__} as {part}, not a plain linear layer"
        if linear.weight.is_meta:
            return f"has its {part} somewhere else (offloaded)"
        if linear.out_features != state.kv_heads * dim:
            return f"has {linear.out_features} outputs of {part}, not {plural(state.kv_heads, 'head')} of {dim}"
    strange = [part for part, _ in module.named_children() if part not in _PARTS]
    strange += [
        part
        for part, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if part not in _OWN
    ]
    if strange:
        return f"has a part that may depend on the heads: {strange[0]}"
    for part in _NORMS:
        norm, dim = getattr(module, part, None), state.value_dim if part.startswith("v") else state.key_dim
        if norm is not None and any(weight.numel() != dim for weight in norm.parameters()):
            return f"has a {part} that is not the same for all heads"
    if not isinstance(getattr(module, "num_key_value_groups", None), int):
        return "does not say how many query heads share a KV head (num_key_value_groups)"
    return None
