"""A model with only some of its layers: a few of each distinct kind stand for all."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from kvctl.errors import ConfigError, UsageError
from kvctl.record import Record
from kvctl.spec import ModelSpec, Shared

_INDEXES = ("layer_idx", "layer_id", "layer_index", "layer_number", "layer_num", "kv_shared_layer_index")
"""What modules call the place of their layer, or of the layer whose cache they read."""

_LISTED = ("cross_attention_layers",)
"""What models call lists of the places of layers."""


class Thinned(Record):
    """Which layers were kept. Kinds are in order of first appearance."""

    spec: ModelSpec
    """Of the kept layers."""
    kept: tuple[int, ...]
    """Their places in the whole model."""
    kinds: tuple[int, ...]
    """The kind of each kept layer."""
    counts: tuple[int, ...]
    """How many of each kind the whole model has."""
    whole: ModelSpec

    def scaled(self, values: Sequence[float]) -> float:
        """A sum over all layers, from a value of each kept one: the mean of its kind stands for each other one."""
        total = 0.0
        for kind, count in enumerate(self.counts):
            own = [value for value, of in zip(values, self.kinds, strict=True) if of == kind]
            total += count * sum(own) / len(own)
        return total

    def scaled_bytes(self, values: Sequence[int]) -> int:
        """Bytes of all layers, from those of each kept one; layers of a kind hold the same."""
        of = dict(zip(reversed(self.kinds), reversed(values), strict=True))
        return sum(count * of[kind] for kind, count in enumerate(self.counts))


def thin(model: Any, spec: ModelSpec, keep: int) -> Thinned:
    """Drop all but `keep` layers of each kind from a model whose weights have no memory yet.

    Layers are of one kind that keep the same states and have the same modules and shapes.

    Raises:
        ConfigError: which modules are its layers cannot be told.

    """
    if keep < 1:
        raise UsageError(f"--layers: {keep} is out of range", hint="1 or more of each kind")
    stack = _stack(model, spec)
    kinds: dict[Any, list[int]] = {}
    for index, module in enumerate(stack):
        states = tuple(_like(state) for state in spec.layers[index].states_in("transformers"))
        kinds.setdefault((_signature(module), states), []).append(index)
    chosen = {index for places in kinds.values() for index in places[:keep]}
    kept = sorted(chosen | {source for index in chosen if (source := _reads(stack[index])) is not None})
    kind_of = {index: number for number, places in enumerate(kinds.values()) for index in places}
    layers = [stack[index] for index in kept]
    places = {old: new for new, old in enumerate(kept)}
    for module in layers:
        _renumber(module, places)
    total = len(stack)
    del stack[:]
    stack.extend(layers)
    _renumber_lists(model, places)
    _narrow(model, stack, total)
    _reconfigure(model, total, kept)
    return Thinned(
        spec.replace(layers=tuple(spec.layers[index] for index in kept)),
        tuple(kept),
        tuple(kind_of[index] for index in kept),
        tuple(len(places) for places in kinds.values()),
        spec,
    )  # fmt: skip


def layer_stack(model: Any, count: int) -> Any:
    """The list of `count` layers in a model's decoder; None where there is not exactly one."""
    import torch

    # Some classes call their head the decoder (modernbert-decoder).
    for part in (model.get_decoder() if hasattr(model, "get_decoder") else model, model):
        lists = [m for m in part.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
        inside = {id(inner) for outer in lists for inner in outer.modules() if inner is not outer}
        outermost = [module for module in lists if id(module) not in inside]
        if outermost:
            return outermost[0] if len(outermost) == 1 else None
    return None


def _stack(model: Any, spec: ModelSpec) -> Any:
    found = layer_stack(model, len(spec.layers))
    if found is None:
        raise ConfigError(f"{spec.id}: which of {type(model).__name__}'s modules are its {len(spec.layers)} layers cannot be told",
                          hint="leave --layers out")  # fmt: skip
    return found


def _signature(module: Any) -> tuple[Any, ...]:
    """What makes two layers alike: classes, shapes and the facts that their constructors noted."""
    parts = []
    for name, part in module.named_modules():
        facts = tuple(sorted(
            (key, value) for key, value in vars(part).items()
            if isinstance(value, (bool, int, float, str)) and key not in _INDEXES and not key.startswith("_")
        ))  # fmt: skip
        shapes = tuple((key, tuple(value.shape)) for key, value in part.named_parameters(recurse=False))
        parts.append((name, type(part).__name__, facts, shapes))
    return tuple(parts)


def _like(state: Any) -> Any:
    """A state without which layer it is shared with: all that share are of one kind."""
    return Shared() if isinstance(state, Shared) else state


def _reads(module: Any) -> int | None:
    """The place of the layer whose cache this one reads."""
    found = (vars(part).get("kv_shared_layer_index") for part in module.modules())
    return next((index for index in found if isinstance(index, int)), None)


def _renumber(module: Any, places: dict[int, int]) -> None:
    for part in module.modules():
        for name in _INDEXES:
            old = vars(part).get(name)
            if isinstance(old, int):
                setattr(part, name, places.get(old, old))


def _renumber_lists(model: Any, places: dict[int, int]) -> None:
    """Lists of the places of layers of one kind, which some models ask while they run (mllama)."""
    for module in model.modules():
        for name in _LISTED:
            listed = vars(module).get(name)
            if isinstance(listed, list):
                setattr(module, name, [places[old] for old in listed if old in places])


def _narrow(model: Any, stack: Any, total: int) -> None:
    """Tensors beside the layers that have a part for each (the inputs of each layer of Gemma 3n and 4)."""
    import torch

    width = getattr(model.config.get_text_config(decoder=True), "hidden_size_per_layer_input", None)
    if not width:
        return
    inside = {id(module) for module in stack.modules()}
    for prefix, module in model.named_modules():
        if "per_layer" not in prefix or id(module) in inside:
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            # Out of a projection, or a row of an embedding.
            side = 0 if isinstance(module, torch.nn.Linear) else parameter.dim() - 1
            if parameter.shape[side] == total * width:
                shape = list(parameter.shape)
                shape[side] = len(stack) * width
                setattr(module, name, torch.nn.Parameter(parameter.new_empty(shape), requires_grad=False))


def _reconfigure(model: Any, total: int, kept: Sequence[int]) -> None:
    """Let every module see as many layers as are left.

    Those that keep tables of frequencies look them up by the layers of the whole model, when these are filled.
    """
    shortened: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if config is None or any("inv_freq" in name for name in module._buffers):
            continue
        if id(config) not in shortened:
            shortened[id(config)] = copy.deepcopy(config)
            _shorten(shortened[id(config)], total, kept)
            text = shortened[id(config)].get_text_config(decoder=True)
            if text is not shortened[id(config)]:
                _shorten(text, total, kept)
        module.config = shortened[id(config)]


def _shorten(config: Any, total: int, kept: Sequence[int]) -> None:
    """Lists with an entry for each layer, and their number."""
    if getattr(config, "num_hidden_layers", None) != total:
        return
    # Some work such a list out from a period (jamba) or from other lists: a class of its own gives the one that is meant.
    worked_out = {
        name: [value[index] for index in kept]
        for name in dir(type(config))
        if isinstance(getattr(type(config), name), property)
        and isinstance(value := getattr(config, name, None), list)
        and len(value) == total
    }
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == total and name not in _LISTED:
            setattr(config, name, [value[index] for index in kept])
    for name in _LISTED:
        listed = vars(config).get(name)
        if isinstance(listed, list):
            setattr(config, name, [kept.index(old) for old in listed if old in kept])
    sharing = getattr(config, "num_kv_shared_layers", None)
    if sharing:
        config.num_kv_shared_layers = sum(index >= total - sharing for index in kept)
    config.num_hidden_layers = len(kept)
    if worked_out:
        config.__class__ = type(type(config).__name__, (type(config),), worked_out)
