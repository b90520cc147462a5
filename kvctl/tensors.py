"""The tensors of a checkpoint, equal ones of many layers and experts together.

Names are those of the checkpoint with every number in them replaced by N
("model.layers.N.mlp.experts.N.down_proj.weight"): one record stands for all tensors of that
name, shape and dtype, and says which layers have it and how many there are in each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from kvctl.errors import ConfigError
from kvctl.record import Record

BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits an element, by the dtype's name in a safetensors header."""

Named = tuple[str, str, tuple[int, ...], int]
"""One tensor of a file: name, dtype, shape, bytes."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
MOST_KINDS = 200_000
"""Different tensors; real checkpoints have at most some hundred."""


class Tensor(Record):
    """All tensors of one name (numbers apart), shape and dtype."""

    name: str
    dtype: str
    """As a safetensors header names it: BF16, F8_E4M3, …"""
    shape: tuple[int, ...]
    bytes: int
    """Of one of them."""
    layers: tuple[int, ...] = ()
    """Layers that have it; empty for what belongs to none."""
    each: int = 1
    """How many in each of these layers (experts)."""

    @property
    def count(self) -> int:
        return self.each * max(1, len(self.layers))

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.bytes * self.count

    @property
    def elements(self) -> int:
        """Elements of one of them."""
        return math.prod(self.shape)

    @property
    def module(self) -> str:
        """The name of the module that it belongs to."""
        return self.name.rpartition(".")[0]


VISION = frozenset(("visual", "vision_tower", "multi_modal_projector"))
"""Parts of names beside the language model: their blocks are numbered for themselves."""


def of_vision(tensor: Tensor) -> bool:
    return bool(VISION & {*tensor.name.split(".")})


def without_drafts(tensors: Iterable[Tensor], layers: int) -> tuple[tuple[Tensor, ...], int]:
    """A model's tensors without layers past its last, which draft tokens ahead, and the bytes of those."""
    kept: list[Tensor] = []
    left = 0
    for tensor in tensors:
        stay = tensor.layers if of_vision(tensor) else tuple(layer for layer in tensor.layers if layer < layers)
        if tensor.name.startswith("mtp.") or (tensor.layers and not stay):
            left += tensor.total
        elif stay == tensor.layers:
            kept.append(tensor)
        else:
            shorter = tensor.replace(layers=stay)
            kept.append(shorter)
            left += tensor.total - shorter.total
    return tuple(kept), left


def stored(shape: Iterable[int], dtype: str) -> int:
    """Bytes of a tensor."""
    bits = BITS[dtype]
    for length in shape:
        bits *= length
    return -(-bits // 8)


def tensor(name: str, shape: tuple[int, ...], dtype: str, layers: tuple[int, ...] = (), each: int = 1) -> Tensor:
    """A record with its bytes worked out."""
    return Tensor(name, dtype, shape, stored(shape, dtype), layers, each)


def grouped(tensors: Iterable[Named]) -> tuple[Tensor, ...]:
    """Tensors of files, equal ones together."""
    groups: dict[tuple[str, str, tuple[int, ...], int], dict[int, int]] = {}
    for name, dtype, shape, size in tensors:
        found = _LAYER.search(name)
        layer = int(found[1]) if found else -1
        counts = groups.setdefault((_NUMBER.sub("N", name), dtype, shape, size), {})
        counts[layer] = counts.get(layer, 0) + 1
        if len(groups) > MOST_KINDS:
            raise ConfigError(f"the weights have over {MOST_KINDS:,} different tensors")
    return tuple(record for key, counts in groups.items() for record in _records(key, counts))


def _records(key: tuple[str, str, tuple[int, ...], int], counts: dict[int, int]) -> Iterable[Tensor]:
    by_number: dict[int, list[int]] = {}
    for layer, number in counts.items():
        by_number.setdefault(number, []).append(layer)
    name, dtype, shape, size = key
    for each, layers in by_number.items():
        outside = layers == [-1]
        yield Tensor(name, dtype, shape, size, () if outside else tuple(sorted(x for x in layers if x >= 0)), each)
