"""Scales of an FP8 KV cache that a checkpoint brings: which, under what names, and whether its configuration says so.

Names are those that vLLM 0.32 (quantization/base_config.py, get_cache_scale_mapper; fp8.py and quark.py, which add
output_scale) and SGLang 0.5.23 (model_loader/weight_utils.py, maybe_remap_kv_scale_name) read, and their writers: llm-compressor,
NVIDIA's ModelOpt, AMD's Quark, AutoFP8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvctl.quantization import facts_of
from kvctl.record import Record
from kvctl.sources import jsonfile, safetensors

KEYS, VALUES, BOTH = "k", "v", "kv"
MODELOPT_CONFIG = "hf_quant_config.json"
"""Where older ModelOpt says how it quantized, beside config.json."""
_MOST_HEADS = 65_536
_SPELLINGS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("k_proj.k_scale", re.compile(r"\.(?P<half>[kv])_proj\.(?P=half)_scale$")),
    ("qkv_proj.k_scale", re.compile(r"\.qk(?:qk)?v_proj\.(?P<half>[kv])_scale$")),
    ("k_proj.output_scale", re.compile(r"\.(?P<half>[kv])_proj\.output_scale$")),
    ("k_cache.scale", re.compile(r"\.(?P<half>[kv])_cache\.scale$")),
    ("attn.k_scale", re.compile(r"\.attn\.(?P<half>[kv])_scale$")),
    ("kv_scale", re.compile(r"\.(?P<half>kv)_scale$")),
    ("k_scale", re.compile(r"\.(?P<half>[kv])_scale$")),
)
"""Spellings, those that others are an ending of first."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")


class Scale(Record):
    """One tensor of scales."""

    name: str
    spelling: str
    layer: int | None
    half: str
    """k, v, or kv for both."""
    values: tuple[float, ...] | None
    """One, or one a KV head; None where only names are known."""


class FoundScales(Record):
    """What a checkpoint says of scales of its cache."""

    scales: tuple[Scale, ...]
    method: str | None
    """quant_method of its weights, or of its cache alone; None where nothing is quantized."""
    declared: str | None
    """What the configuration says of the cache: fp8, nvfp4, …; None: nothing."""
    dynamic: bool = False
    """Whether the engine is to find scales while it runs, so that none are stored."""

    @property
    def spellings(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(scale.spelling for scale in self.scales))

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers with scales."""
        return tuple(sorted({scale.layer for scale in self.scales if scale.layer is not None}))

    @property
    def per_head(self) -> bool:
        """Whether a layer has more than one scale."""
        return any(len(scale.values or ()) > 1 for scale in self.scales)

    @property
    def placeholders(self) -> bool:
        """Whether all that are stored are 1.0, which is what engines take without any."""
        found = [scale.values for scale in self.scales]
        return bool(found) and all(values is not None and all(value == 1.0 for value in values) for values in found)

    @property
    def broken(self) -> str | None:
        """Why these are no scales that divide: the name of one that is zero, negative or not finite."""
        return next(
            (scale.name for scale in self.scales if not all(0 < one < float("inf") for one in scale.values or ())), None
        )

    @property
    def words(self) -> str:
        """On one line."""
        said = (
            f"its configuration says {self.declared}"
            if self.declared
            else "its configuration says nothing of the cache"
        )
        if self.dynamic:
            return f"no scales of the cache are stored: {said}, found while it runs"
        if not self.scales:
            return f"no scales of the cache; {said}"
        several = "one a KV head" if self.per_head else "one a layer"
        ones = ", all 1.0" if self.placeholders else ""
        return (
            f"scales of the cache in {len(self.layers)} layers ({', '.join(self.spellings)}: {several}{ones}); {said}"
        )


def spelling_of(name: str) -> tuple[str, str] | None:
    """The spelling of a tensor's name, and whose scale it is (k, v or kv); None where it is no scale of the cache."""
    for spelling, pattern in _SPELLINGS:
        found = pattern.search(name)
        if found is not None:
            return spelling, found["half"]
    return None


def of_names(names: Iterable[str], config: Mapping[str, Any]) -> FoundScales:
    """What names of tensors and the configuration say, without the values."""
    return _found(dict.fromkeys(names), config, None)


def of_folder(folder: Path) -> FoundScales:
    """What a model's folder has.

    Raises:
        ConfigError: a header, the index or the configuration is not valid.
        SourceError: a file cannot be read.

    """
    config = jsonfile.read_file(folder / "config.json")
    beside = folder / MODELOPT_CONFIG
    values: dict[str, tuple[float, ...] | None] = {}
    for path in safetensors.files_of(folder):
        values |= safetensors.small_tensors(path, lambda name: spelling_of(name) is not None, _MOST_HEADS)
    return _found(values, config, jsonfile.read_file(beside) if beside.is_file() else None)


def _found(
    values: Mapping[str, tuple[float, ...] | None], config: Mapping[str, Any], beside: Mapping[str, Any] | None
) -> FoundScales:
    scales = []
    for name, numbers in values.items():
        known = spelling_of(name)
        if known is not None:
            layer = _LAYER.search(name)
            scales.append(Scale(name, known[0], None if layer is None else int(layer[1]), known[1], numbers))
    facts = facts_of(config) or (facts_of({"quantization_config": beside}) if beside is not None else None) or {}
    method = facts.get("quant_method") or ("modelopt" if "quant_algo" in facts else None)
    declared, dynamic = _declared(facts)
    return FoundScales(tuple(scales), str(method)[:40] if method is not None else None, declared, dynamic)


def _declared(facts: Mapping[str, Any]) -> tuple[str | None, bool]:
    """compressed-tensors says kv_cache_scheme (an object), ModelOpt kv_cache_quant_algo (a word) or the former, Quark kv_cache_group."""
    scheme = facts.get("kv_cache_scheme") or facts.get("kv_cache_quant_algo")
    if isinstance(scheme, str):
        return scheme.lower()[:40], False
    if isinstance(scheme, Mapping):
        name = {("float", 8): "fp8", ("float", 4): "nvfp4"}.get(
            (str(scheme.get("type", "float")), scheme.get("num_bits", 0))
        )
        return name or f"{str(scheme.get('type'))[:20]}{str(scheme.get('num_bits'))[:20]}", bool(scheme.get("dynamic"))
    if facts.get("quant_method") == "quark":
        export = facts.get("export")
        if isinstance(export, Mapping) and export.get("kv_cache_group"):
            return "fp8", False
    return None, False
