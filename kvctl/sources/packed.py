"""How many parameters tensors stand for, where an element packs several weights, and scales lie beside them.

Names are those that the writers store: AutoAWQ and GPTQModel (qweight, qzeros, scales, g_idx), bitsandbytes (weight.absmax,
SCB, …), compressed-tensors (weight_packed, weight_scale, …), DeepSeek's FP8 (weight_scale_inv), ModelOpt (weight_scale_2,
input_scale) and OpenAI's MXFP4 (_blocks, _scales).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvctl.quantization import facts_of
from kvctl.sources import jsonfile
from kvctl.sources.kv_scales import MODELOPT_CONFIG, spelling_of
from kvctl.tensors import Named

_BESIDE = frozenset((
    "SCB", "g_idx", "input_global_scale", "input_scale", "input_zero_point", "qzeros", "scales", "weight_format", "weight_g_idx",
    "weight_global_scale", "weight_scale", "weight_scale_2", "weight_scale_inv", "weight_shape", "weight_zero_point",
))  # fmt: skip
"""Last parts of names that say how to read a weight, and are none."""
_OF_EXPERTS = ("_scales", "_scale_inv", "_scale")
"""Endings of scales of parameters that hold the experts of a layer."""
_INTEGERS = frozenset(("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"))
_MATRICES = ("weight", "weight_packed", "_blocks", "_proj")
"""Endings of names of matrices of layers and of experts."""
_NIBBLES = frozenset(("bitsandbytes", "modelopt", "modelopt_fp4", "modelopt_mixed"))
"""Methods that put two weights in each byte."""


def quantized(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any] | None:
    """What a model's folder says of how it is quantized, in its configuration or beside it; None: nothing.

    Raises:
        ConfigError: a file beside it is not valid.

    """
    if not isinstance(config.get("quantization_config", {}), Mapping):
        return {}  # who needs it says what is wrong with it
    facts = facts_of(config)
    if facts is None and (folder / MODELOPT_CONFIG).is_file():
        facts = facts_of({"quantization_config": jsonfile.read_file(folder / MODELOPT_CONFIG)})
    return facts


def parameters(tensors: Sequence[Named], facts: Mapping[str, Any]) -> int | None:
    """Of a checkpoint with these tensors, that `facts` say is quantized; None where they do not tell."""
    shapes = {name: shape for name, _, shape, _ in tensors}
    total = 0
    for name, dtype, shape, _ in tensors:
        if _beside(name, shapes):
            continue
        count = _weights(name, dtype, shape, shapes, facts)
        if count is None:
            return None
        total += count
    return total


def unexplained(tensors: Sequence[Named]) -> tuple[str, str] | None:
    """Name and dtype of a matrix that does not stand for itself: of whole numbers, or with a scale beside it. None: there is none."""
    shapes = {name: shape for name, _, shape, _ in tensors}
    for name, dtype, shape, _ in tensors:
        scaled = dtype.startswith("F8") and not shapes.keys().isdisjoint((f"{name}_scale", f"{name}_scale_inv"))
        if len(shape) > 1 and (scaled or (dtype in _INTEGERS and name.endswith(_MATRICES))):
            return name, dtype
    return None


def _beside(name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a tensor says how to read another, or a cache."""
    module, _, last = name.rpartition(".")
    if last in _BESIDE or spelling_of(name) is not None:
        return True
    head = f"{name.split('.weight.')[0]}.weight"
    if head != name and ".weight." in name and head in shapes:
        return True
    for ending in _OF_EXPERTS:
        stem = f"{module}.{last.removesuffix(ending)}"
        if last.endswith(ending) and (stem in shapes or f"{stem}_blocks" in shapes):
            return True
    return False


def _weights(name: str, dtype: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]], facts: Mapping[str, Any]) -> int | None:  # fmt: skip
    """How many weights a tensor holds; None where that cannot be told."""
    module, _, last = name.rpartition(".")
    count = math.prod(shape)
    if dtype not in _INTEGERS:
        return count
    if last == "qweight":
        zeros, scales = shapes.get(f"{module}.qzeros", ()), shapes.get(f"{module}.scales", ())
        if len(zeros) == len(scales) == 2 and zeros[1]:  # zero points are packed as weights are, and scales are not
            return count * scales[1] // zeros[1]
        return _in_words(count, facts.get("bits"))
    if last == "weight_packed":
        return 2 * count if dtype == "U8" else _in_words(count, _bits(facts))
    if last.endswith("_blocks") and dtype == "U8":
        return 2 * count
    if last == "weight" and len(shape) > 1:
        if dtype == "U8":
            return 2 * count if facts.get("quant_method", "modelopt") in _NIBBLES else None
        return count if dtype == "I8" else None
    return count


def _in_words(count: int, bits: Any) -> int | None:
    """Weights of so many bits in words of 32."""
    return 32 * count // bits if isinstance(bits, int) and 0 < bits <= 32 else None


def _bits(facts: Mapping[str, Any]) -> Any:
    """Of compressed-tensors, where all its groups have as many."""
    groups = facts.get("config_groups")
    found = {
        group["weights"].get("num_bits") for group in (groups.values() if isinstance(groups, Mapping) else ())
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
    }  # fmt: skip
    return found.pop() if len(found) == 1 else None
