"""What a cache really holds: every tensor of the cache object, and of modules that keep state themselves."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from kvctl.record import Record

_DEEPEST = 12
"""Levels of objects in objects; caches have four."""


class Held(Record):
    """One tensor of a cache; bytes."""

    path: str
    layer: int | None
    """Where the path names one: the first number in it."""
    shape: tuple[int, ...]
    dtype: str
    logical_bytes: int
    alias: bool
    """Whether another tensor of the cache shows the same memory; it is counted there."""


class CacheBytes(Record):
    """A cache, walked. `logical_bytes` is what its tensors show, `storage_bytes` what the allocations behind them hold."""

    tensors: tuple[Held, ...]
    logical_bytes: int
    storage_bytes: int

    @property
    def by_layer(self) -> dict[int | None, int]:
        """Logical bytes of every layer; None for what belongs to none."""
        out: dict[int | None, int] = {}
        for held in self.tensors:
            if not held.alias:
                out[held.layer] = out.get(held.layer, 0) + held.logical_bytes
        return out


def walk(cache: Any, states: Mapping[str, Any] | None = None) -> CacheBytes:
    """Every tensor of `cache` and of `states` (path to tensor, of modules); without those of one number that count positions."""
    seen: set[tuple[Any, ...]] = set()
    storages: dict[tuple[str, int], int] = {}
    found = []
    for path, tensor in (*_tensors(cache, "cache", set(), 0), *(states or {}).items()):
        if tensor.numel() == 1 and not tensor.is_floating_point():
            continue
        size = tensor.numel() * tensor.element_size()
        key = (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype))
        alias = bool(size) and key in seen
        seen.add(key)
        storage = tensor.untyped_storage()
        storages[str(tensor.device), storage.data_ptr()] = storage.nbytes()
        found.append(
            Held(path, _layer(path), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), size, alias)
        )
    return CacheBytes(
        tuple(found),
        sum(held.logical_bytes for held in found if not held.alias),
        sum(storages.values()),
    )  # fmt: skip


def _tensors(value: Any, path: str, above: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    """Tensors in a value; those of tensor subclasses are their parts."""
    import torch

    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors(getattr(value, name), f"{path}.{name}", above, depth + 1)
        else:
            yield path, value
        return
    if depth > _DEEPEST or id(value) in above or isinstance(value, (torch.nn.Module, type, str, bytes)):
        return
    if isinstance(value, Mapping):
        items = [(f"{path}[{key}]", inner) for key, inner in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
    elif type(value).__module__.startswith(("transformers.", "kvctl.")) and hasattr(value, "__dict__"):
        # Configurations hold no tensors, and much else.
        items = [(f"{path}.{name}", inner) for name, inner in vars(value).items() if name != "config"]
    else:
        return
    above = above | {id(value)}
    for inner_path, inner in items:
        yield from _tensors(inner, inner_path, above, depth + 1)


def _layer(path: str) -> int | None:
    """The first number in brackets, or after a dot: "cache.layers[3].keys", "model.layers.3.mixer.state"."""
    for part in path.replace("[", ".").replace("]", "").split("."):
        if part.isdecimal():
            return int(part)
    return None


class ModuleStates:
    """Tensors that modules keep beside their weights, where a pass changes them (recurrent_gemma has such).

    What is neither parameter nor buffer, changes from pass to pass and has a row for every sequence is state.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._before = {path: (weakref.ref(tensor), _version(tensor)) for path, tensor in self._all()}

    def _all(self) -> Iterator[tuple[str, Any]]:
        import torch

        for name, module in self._model.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.dim() and not isinstance(value, torch.nn.Parameter):
                    yield f"{name}.{attribute}", value

    def found(self, batch: int) -> dict[str, Any]:
        """Those that changed since this was made, of a batch of so many sequences."""
        return {
            path: tensor for path, tensor in self._all() if self._changed(path, tensor) and tensor.shape[0] % batch == 0
        }

    def _changed(self, path: str, tensor: Any) -> bool:
        before, version = self._before.get(path, (None, None))
        return before is None or before() is not tensor or version != _version(tensor)


def _version(tensor: Any) -> int:
    return 0 if tensor.is_inference() else tensor._version
