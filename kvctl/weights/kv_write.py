"""Scales of an FP8 cache, written into a checkpoint in the form that vLLM and SGLang read.

The weights are not touched: their files are cloned where the file system can, linked, or else copied. Beside them lies a file
with k_scale and v_scale of every attention, as llm-compressor names and shapes them, and config.json declares them.

Read of vLLM 0.32 (layers/quantization: base_config.py, kv_cache.py, compressed_tensors, fp8.py) and SGLang 0.5.23 (the same
files): attention has parameters for scales with compressed-tensors that declares kv_cache_scheme, fp8, ModelOpt and Quark. With
other methods (AWQ, GPTQ, bitsandbytes, MXFP4, …) both pass over k_scale and v_scale and run with 1.0.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvctl.errors import ConfigError, SourceError, UsageError
from kvctl.measure.checkpoint import check_folder
from kvctl.quantization import facts_of
from kvctl.record import Record
from kvctl.sources import jsonfile, kv_scales, packed, safetensors
from kvctl.weights import tensorfile
from kvctl.weights.checkpoint import Finish, Work, check_target, copy_kept, discard, write_config
from kvctl.weights.kv_scales import HEAD, OWN_TOOL, TENSOR, Scales

FILE = "model-kv-scales.safetensors"
ONLY_CACHE: Mapping[str, Any] = {
    "quant_method": "compressed-tensors", "format": "dense", "quantization_status": "frozen", "config_groups": {}, "ignore": [],
    "global_compression_ratio": None,
}  # fmt: skip
"""The quantization_config of a model of which only the cache is quantized, as llm-compressor writes it."""
_ATTENTION = re.compile(r"^(?P<module>.+\.layers\.(?P<layer>\d+)\.self_attn)\.(?:[kv]_proj|qkv_proj)\.")
_TOWERS = frozenset(
    ("visual", "vision_tower", "vision_model", "audio_tower", "speech_encoder", "encoder", "multi_modal_projector")
)
_CLONE = 0x40049409
"""FICLONE of linux/fs.h."""


class WrittenScales(Record):
    """A checkpoint with scales."""

    files: tuple[Path, ...]
    shared: str
    """How the weights came there: cloned, linked or copied."""
    tensors: int
    bytes: int
    """Of the scales."""


def write(
    source: Path, target: Path, scales: Scales, *, force: bool = False, finish: Finish | None = None
) -> WrittenScales:
    """A checkpoint at `target` with the weights of `source` and scales; it is there whole, or not at all. `finish`: see
    `Work.place`.

    Raises:
        SourceError: the source has no weights in safetensors.
        ConfigError: it has scales already, or is quantized in a way whose readers pass over them.
        UsageError: something is at the target, and `force` is not given.
        KvctlError: it cannot be written.

    """
    config, files, scheme = _checked(source, scales.strategy)
    changed = dict(config) if scheme is None else {**config, "quantization_config": scheme}
    modules = modules_of(_names(files), [one.layer for one in scales.layers])
    check_target(target, source, force)
    tensors = _tensors(scales, modules)
    how: set[str] = set()
    made: list[tensorfile.Written] = []

    def fill(ready: Path) -> None:
        copy_kept(source, ready)
        for path in sorted(source.glob("*.py")):
            shutil.copyfile(path, ready / path.name)
        index: dict[str, str] = {}
        total = 0
        for path in files:
            name = "model-00001-of-00001.safetensors" if path.name == "model.safetensors" else path.name
            how.add(share(path.resolve(), ready / name))
            header = safetensors.read_header(path)
            index |= dict.fromkeys((tensor for tensor, *_ in header), name)
            total += sum(size for *_, size in header)
        made.append(tensorfile.write(ready / FILE, tensors))
        index |= dict.fromkeys(tensors, FILE)
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        (ready / safetensors.INDEX).write_text(text + "\n", encoding="utf-8")
        write_config(ready, changed)

    work: Work | None = None
    try:
        work = Work(target, "kv-scales", {}, resume=False)
        check_target(target, source, force)  # what a killed run was replacing may have come back
        paths = work.place(fill, finish)
    except UsageError:  # another process is at it, or the target is there
        if work is not None:
            work.close()
            discard(target)
        raise
    except BaseException:
        if work is not None:
            work.close()
        discard(target)
        raise
    return WrittenScales(paths, "copied" if "copied" in how else " and ".join(sorted(how)), len(tensors), made[0].size)


def check(source: Path, layers: Sequence[int], strategy: str = TENSOR) -> None:
    """Refuses a source that scales of these layers cannot be written into, from its configuration and headers alone.

    Raises:
        SourceError, ConfigError: as `write`.

    """
    _, files, _ = _checked(source, strategy)
    modules_of(_names(files), layers)


def _names(files: Sequence[Path]) -> list[str]:
    return [named[0] for file in files for named in safetensors.read_header(file)]


def _checked(source: Path, strategy: str) -> tuple[dict[str, Any], list[Path], dict[str, Any] | None]:
    """The configuration, the files of weights, and the quantization_config that they are to have (see `declared`)."""
    where = jsonfile.plain(str(source))
    if not source.is_dir():
        raise SourceError(f"{where} is no folder with a model's files", hint="hf download fetches a model; of a GGUF file, "
                          "llama.cpp and Ollama keep the cache in formats that need no scales")  # fmt: skip
    config = jsonfile.read_file(source / "config.json")
    check_folder(source)
    files = safetensors.files_of(source)
    if not files or not all(path.suffix == ".safetensors" for path in files):
        raise SourceError(f"{where} has no weights in safetensors", hint="transformers' save_pretrained writes them so")
    there = kv_scales.of_folder(source)
    if there.scales:
        raise ConfigError(f"{where} has {there.words}", hint="calibrate the checkpoint that it was made of")
    if there.declared is not None or there.dynamic:
        raise ConfigError(f"{where}: its configuration declares a cache in {there.declared} and has no scales of it",
                          hint="calibrate the checkpoint that it was made of")  # fmt: skip
    facts = packed.quantized(config, source)
    if facts is not None and facts_of(config) is None:  # ModelOpt's older checkpoints say it in a file beside
        config = {**config, "quantization_config": dict(facts)}
    try:
        return config, files, declared(config, strategy)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", hint=error.hint) from None


def declared(config: Mapping[str, Any], strategy: str = TENSOR) -> dict[str, Any] | None:
    """The quantization_config with the cache in it; None where it is to stay as it is.

    Raises:
        ConfigError: engines pass over scales in a checkpoint that is quantized like this one.

    """
    facts = facts_of(config)
    scheme = {"type": "float", "num_bits": 8, "strategy": strategy, "dynamic": False, "symmetric": True}
    if facts is None:
        return {**ONLY_CACHE, "kv_cache_scheme": scheme}
    method = facts.get("quant_method") or ("modelopt" if "quant_algo" in facts else None)
    if method == "compressed-tensors":
        return {**facts, "kv_cache_scheme": scheme}
    if method == "fp8":
        if strategy == HEAD:
            raise ConfigError("a checkpoint of method fp8 takes one scale a layer, and none a head", hint="one a layer")
        return (
            None  # its readers look for k_scale and v_scale whatever it declares; --kv-cache-dtype fp8 has to be said
        )
    name = "unknown" if method is None else str(method)[:40]
    if method in OWN_TOOL:
        raise ConfigError(f"scales for a checkpoint of method {name} are written by its own tool, with the weights",
                          hint="ModelOpt: --kv_cache_qformat fp8; Quark: --kv_cache_dtype fp8")  # fmt: skip
    raise ConfigError(f"vLLM and SGLang pass over scales of the cache in a checkpoint of method {name}, and run with 1.0",
                      hint="write them into the model that it was made of, or one quantized as compressed-tensors or fp8")  # fmt: skip


def modules_of(names: Sequence[str], layers: Sequence[int]) -> dict[int, str]:
    """The attention of each layer as the checkpoint's tensors name it.

    Raises:
        ConfigError: not one for every layer with scales, or of a name that readers do not look for.

    """
    found: dict[int, set[str]] = {}
    for name in names:
        match = _ATTENTION.match(name)
        if match is not None and not _TOWERS & set(name.split(".")):
            found.setdefault(int(match["layer"]), set()).add(match["module"])
    for layer in layers:
        modules = sorted(found.get(layer, ()))
        if len(modules) != 1:
            seen = " and ".join(modules[:2]) or "none of its tensors is called …layers.N.self_attn.k_proj"
            raise ConfigError(f"which attention layer {layer} has cannot be told: {jsonfile.plain(seen)}",
                              hint="vLLM and SGLang read scales of …layers.N.self_attn")  # fmt: skip
    return {layer: next(iter(found[layer])) for layer in layers}


def _tensors(scales: Scales, modules: Mapping[int, str]) -> dict[str, Any]:
    """In fp32, in which engines keep them: [1], or [heads, 1, 1] as llm-compressor has it."""
    import torch

    out = {}
    for one in scales.layers:
        for half, values in (("k", one.keys), ("v", one.values)):
            if not all(0 < value < float("inf") for value in values):
                raise UsageError(f"layer {one.layer}: a scale of {min(values):g} divides nothing")
            tensor = torch.tensor(values, dtype=torch.float32)
            shape = (-1, 1, 1) if scales.strategy == HEAD else (1,)
            out[f"{modules[one.layer]}.{half}_scale"] = tensor.view(shape)
    return out


def share(path: Path, target: Path) -> str:
    """A file at another place, without taking its bytes twice where that can be: "cloned", "linked" or "copied"."""
    try:
        import fcntl

        with path.open("rb") as source, target.open("xb") as file:
            fcntl.ioctl(file.fileno(), _CLONE, source.fileno())
        return "cloned"
    except (ImportError, OSError):
        target.unlink(missing_ok=True)
    try:
        os.link(path, target)
        return "linked"
    except OSError:
        shutil.copyfile(path, target)
        return "copied"
