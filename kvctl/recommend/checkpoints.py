"""In which formats a model's weights are to be had: as published, made while an engine loads, or made beforehand.

Published checkpoints are those of the catalogue whose name is the model's with a format behind it and whose architecture has
the same layers and widths, and those of data/checkpoints.json, each with its source: no name is made up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from shlex import quote
from typing import Any

from kvctl.errors import ConfigError, KvctlError
from kvctl.families import text_fields
from kvctl.families.fields import Fields
from kvctl.formats import DType
from kvctl.quantization import SUFFIXES, named_format, scheme, usual_storage
from kvctl.recommend.takes import GGUF
from kvctl.record import Record
from kvctl.sources import catalogue
from kvctl.spec import ModelSpec

_PATH = os.path.join(os.path.dirname(os.path.dirname(__file__)), "data", "checkpoints.json")

_SCHEMES = {
    "fp8": "fp8",
    "fp8-block": "fp8-block",
    "awq": "awq",
    "gptq": "gptq",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    "pack-quantized": "w4a16",
    "float-quantized": "fp8-channel",
    "int-quantized": "w8a8",
}
"""Names of kvctl.weight_formats for what a quantization_config is read as."""
_MADE = (("awq", "awq"), ("w8a8", "int8-w8a8"), ("nvfp4", "nvfp4"))
"""Formats that are made beforehand where nobody published them; fp8 is not, for engines make that while they load."""


class Checkpoint(Record):
    """One format that a model's weights are to be had in."""

    name: str
    """What the engine is told to load; of one that has to be made, the model that it is made of."""
    weights: str
    """A name of kvctl.weight_formats, or of a GGUF type."""
    made: str
    """stored, load or make, as in Deployment."""
    how: str
    """For people: where it is from, what to tell the engine, or what to run first."""
    source: str = ""
    sized: str | None = None
    """The format that the model's own weights are counted in; None: as they are."""

    @property
    def loads(self) -> str:
        """What the engine is told to load: a name, or the folder or file that is made."""
        return made_at(self.name, self.weights) if self.made == "make" else self.name


def made_at(model: str, weights: str) -> str:
    """Where weights that have to be made are put: "./Qwen3-8B-awq", "./Qwen3-8B-Q4_K_M.gguf"."""
    short = model.rstrip("/").rpartition("/")[2]
    if weights in (*GGUF, "mxfp4"):
        return f"./{short}-{weights.upper()}.gguf"
    return f"./{short}-{weights}"


def stored_format(spec: ModelSpec) -> str | None:
    """The format of a model's own weights; None where it is not one that engines here are known to load."""
    if of_gguf(spec):
        return "gguf"
    try:
        found = scheme(spec.config)
    except ConfigError:
        return None
    dtype = spec.dtype.name if isinstance(spec.dtype, DType) else "bf16"
    if found is not None:
        return _SCHEMES.get(found.format.name)
    if spec.weights is not None and spec.weights.bytes is not None:
        return "bf16" if dtype == "fp32" else dtype
    name = usual_storage(spec.model_type, spec.id, dtype)
    return "bf16" if name == "fp32" else name


def is_quantized(name: str) -> bool:
    """Whether a name is that of a quantized checkpoint of another model."""
    return named_format(name) is not None


def unknown_storage(spec: ModelSpec) -> str:
    """Why no format is known that a model is to be had in; empty where one is."""
    if checkpoints(spec) or gguf_types(spec):
        return ""
    try:
        scheme(spec.config)
    except ConfigError as error:
        return error.message
    return "how its weights are stored is not in the source, and models of its type are published in more ways than one"


def timed(weights: str, spec: ModelSpec, *, slots: bool) -> str:
    """A format as `kvctl.speed` has it: what llama.cpp has in 16 bits, and a file of no named type by its bits a weight; `slots`: llama.cpp."""
    if slots and weights in ("bf16", "fp16"):
        return "f16"
    held = spec.weights
    if weights == "gguf" and held is not None and held.bytes and held.parameters:
        return f"gguf-{8 * held.bytes / held.parameters:.2f}"
    return weights


def of_gguf(spec: ModelSpec) -> bool:
    """Whether the model was read from a GGUF file."""
    return spec.weights is not None and "GGUF" in spec.weights.source


def loaded_from(spec: ModelSpec) -> str:
    """What an engine is told to load: a name on the Hub, or where the model is on this machine, from whatever folder it is started."""
    path = spec.provenance.path
    if spec.provenance.source != "local" or path is None:
        return spec.id
    place = os.path.abspath(path)
    return os.path.dirname(place) if place.endswith(".json") else place


def checkpoints(spec: ModelSpec) -> tuple[Checkpoint, ...]:
    """Formats for engines that read safetensors: stored ones first, then what engines make, then what has to be made."""
    if of_gguf(spec):
        return ()
    stored, name = stored_format(spec), loaded_from(spec)
    out = []
    if stored is not None:
        out.append(Checkpoint(name, stored, "stored", "as published", spec.provenance.location))
    elif (named := named_format(spec.id)) is not None:
        # Its configuration does not say how it is stored, and its name does.
        out.append(Checkpoint(name, named, "stored", "as published", spec.provenance.location, named))
    plain = stored in ("bf16", "fp16")
    if is_quantized(spec.id):
        return tuple(out)
    if not spec.overrides:
        out += published(spec)
    if plain:
        out.append(Checkpoint(name, "fp8", "load", "the engine converts while it loads", sized="fp8"))
    there = {one.weights for one in out}
    there |= {"awq"} if there & {"w4a16", "gptq"} else set()
    if plain:
        for weights, way in _MADE:
            if weights not in there and (weights != "awq" or _awq_makes(spec)):
                out.append(
                    Checkpoint(
                        name,
                        weights,
                        "make",
                        f"kvctl quantize {quote(name)} --weights {way} -o {quote(made_at(name, weights))}",
                        sized=weights,
                    )
                )
    return tuple(out)


def gguf_types(spec: ModelSpec) -> tuple[Checkpoint, ...]:
    """Types of GGUF files, the largest first; a model that is such a file has its own alone."""
    if of_gguf(spec):
        return (Checkpoint(loaded_from(spec), "gguf", "stored", "the file itself", spec.provenance.location),)
    stored = stored_format(spec)
    if stored == "mxfp4":
        how = f"convert_hf_to_gguf.py {quote(loaded_from(spec))} --outfile {quote(made_at(spec.id, 'mxfp4'))} keeps MXFP4 as it is"
        return (Checkpoint(spec.id, "mxfp4", "make", how),)
    plain = stored in ("bf16", "fp16")
    if stored is None or not (plain or stored.startswith("fp8")):
        return ()
    out = []
    for name in GGUF:
        first = quote(made_at(spec.id, "bf16"))
        how = f"convert_hf_to_gguf.py {quote(loaded_from(spec))} --outtype bf16 --outfile {first}"
        if name != "bf16":
            how += f" && llama-quantize {first} {quote(made_at(spec.id, name))} {name.upper()}"
        sized = (None if plain else "bf16") if name == "bf16" else name
        out.append(Checkpoint(spec.id, name, "make", how, sized=sized))
    return tuple(out)


def published(spec: ModelSpec) -> Iterator[Checkpoint]:
    """Quantized checkpoints of a model that somebody published; of a format those with plain names, which most people load, go first."""
    seen: set[str] = set()
    for name, weights in sorted(_named_after(spec.id), key=lambda one: len(one[0])):
        if (config := _alike(spec, name)) is not None and _loads(config):
            seen.add(name)
            weights = _said(config) or _BY_METHOD.get(_method(config), weights)
            yield Checkpoint(name, weights, "stored", "a published checkpoint", f"the catalogue has {name}", weights)
    data = _data()
    for name, weights, source in data["checkpoints"].get(spec.id, ()):
        if name not in seen:
            yield Checkpoint(name, weights, "stored", "a published checkpoint", data["sources"][source], weights)


@cache
def _data() -> dict[str, Any]:
    with open(_PATH, encoding="utf-8") as file:
        data: dict[str, Any] = json.load(file)
    return data


@cache
def _named_after(base: str) -> tuple[tuple[str, str], ...]:
    """Names of the catalogue that are a model's with a format behind it, and that format."""
    short = base.rpartition("/")[2].lower()
    found = []
    for name in catalogue.names():
        own = name.rpartition("/")[2]
        if len(own) <= len(short) or not own.lower().startswith(short):
            continue
        for pattern, weights in SUFFIXES:
            match = pattern.search(own)
            if match is not None and own[: match.start()].lower() == short:
                found.append((name, weights))
                break
    return tuple(found)


def _alike(spec: ModelSpec, name: str) -> Mapping[str, Any] | None:
    """A catalogue entry's configuration, where it has the layers and widths of a model."""
    try:
        config = catalogue.find(name).config
        mine, other = text_fields(Fields(spec.config)), text_fields(Fields(config))
    except KvctlError:
        return None
    keys = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads")
    return config if mine.type == other.type and all(mine.get(key) == other.get(key) for key in keys) else None


_BY_METHOD = {"fbgemm_fp8": "fp8-channel"}
"""Methods that have a scale for each channel, whatever a name says."""


def _method(config: Mapping[str, Any]) -> str:
    told = config.get("quantization_config")
    return str(told.get("quant_method")) if isinstance(told, dict) else ""


def _loads(config: Mapping[str, Any]) -> bool:
    """Whether engines load it as it is stored: vLLM takes weights for plain ones where `quant_method` is missing."""
    told = config.get("quantization_config")
    return not isinstance(told, dict) or "quant_method" in told


def _said(config: Mapping[str, Any]) -> str | None:
    """The format that a checkpoint's own configuration names."""
    try:
        found = scheme(config)
    except ConfigError:
        return None
    return None if found is None else _SCHEMES.get(found.format.name)


def _awq_makes(spec: ModelSpec) -> bool:
    """Whether kvctl quantizes this architecture to AWQ."""
    from kvctl.weights.awq.structure import ARCHITECTURES

    return text_fields(Fields(spec.config)).type in ARCHITECTURES
