"""Bytes and parameters of a model's weights, from safetensors headers, their index, or what the Hub says of them."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from kvctl.errors import ConfigError, KvctlError
from kvctl.sources import jsonfile
from kvctl.spec import Weights

INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 100_000_000
"""Bytes of a header that the format allows."""
_INDEX_LIMIT = 100_000_000  # the indexes of the largest mixtures of experts have about 10 MB

_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
# Quantized checkpoints pack several weights into one element of these types.
_PACKING = ("U8", "I32", "U32")
_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


def folder_weights(folder: Path) -> tuple[Weights | None, tuple[str, ...]]:
    """The weights in a model's folder, and a note where they are there and cannot be told."""
    try:
        index = _read_index(folder)
        shards = _shards(folder, index)
        if index is not None and not all(shard.is_file() for shard in shards):
            return _from_index(index), ()
        return (_from_headers(shards), ()) if shards else (None, ())
    except KvctlError as error:
        return None, (f"weights unknown: {error.message}",)
    except OSError as error:
        return None, (f"weights unknown: {jsonfile.unreadable(jsonfile.plain(str(folder)), error).message}",)


def hub_weights(info: Mapping[str, Any]) -> Weights | None:
    """The weights as the Hub's model information gives them: elements by dtype, and the files' sizes."""
    files = _file_sizes(info.get("siblings"))
    facts = info.get("safetensors")
    counts = facts.get("parameters") if isinstance(facts, dict) else None
    if not isinstance(counts, dict) or not all(_is_size(count) for count in counts.values()):
        return None if files is None else Weights(files, None, "safetensors file sizes")
    total = facts.get("total") if isinstance(facts, dict) else None
    parameters = total if _is_size(total) else sum(counts.values())
    bits = sum(count * _BITS.get(dtype, 0) for dtype, count in counts.items())
    known = bool(counts) and all(dtype in _BITS for dtype in counts)
    # The Hub counts the weights that are packed in an element, not the elements: then only the files tell the bytes.
    if files is not None and not (known and 0 <= files - bits // 8 <= files // 100 + 1_000_000):
        return Weights(files, parameters, "safetensors file sizes")
    return Weights(bits // 8, _unpacked(counts, parameters), "safetensors headers") if known else None


def read_header(path: Path) -> list[tuple[str, int, int]]:
    """Every tensor of a file: its dtype, its elements and its bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(HEADER_LIMIT, os.fstat(file.fileno()).st_size - 8):
            raise _malformed(path)
        data = file.read(length)
    try:
        header = json.loads(data)
        return [_tensor(entry) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _malformed(path) from None


def _tensor(entry: Mapping[str, Any]) -> tuple[str, int, int]:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and all(map(_is_size, (*shape, begin, end)))):
        raise ValueError
    elements = 1
    for length in shape:
        elements *= length
    if dtype in _BITS and (elements * _BITS[dtype] + 7) // 8 != end - begin:
        raise ValueError
    return dtype, elements, end - begin


def _malformed(path: Path) -> ConfigError:
    return ConfigError(f"{jsonfile.plain(path.name)} has no valid safetensors header")


def _read_index(folder: Path) -> dict[str, Any] | None:
    path = folder / INDEX
    return jsonfile.read_file(path, limit=_INDEX_LIMIT) if path.is_file() else None


def _shards(folder: Path, index: Mapping[str, Any] | None) -> list[Path]:
    """The files that make up the model; a folder may hold a second copy of the weights in another layout."""
    if index is not None:
        files = index.get("weight_map")
        names = set(files.values()) if isinstance(files, dict) and all(map(_is_name, files.values())) else set()
        if not names:
            raise ConfigError(f"{INDEX} names no files")
        return [folder / name for name in sorted(names)]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    ours = [path for path in found if not path.name.startswith(("adapter_", "consolidated"))]
    return ours or found


def _from_headers(shards: Iterable[Path]) -> Weights:
    counts: Counter[str] = Counter()
    size = 0
    for shard in shards:
        for dtype, elements, length in read_header(shard):
            counts[dtype] += elements
            size += length
    return Weights(size, _unpacked(counts, counts.total()), "safetensors headers")


def _from_index(index: Mapping[str, Any]) -> Weights:
    facts = index.get("metadata")
    facts = facts if isinstance(facts, dict) else {}
    size, parameters = facts.get("total_size"), facts.get("total_parameters")
    # Some writers put a float there.
    size = int(size) if isinstance(size, float) and size.is_integer() else size
    if not _is_size(size):
        raise ConfigError(f"{INDEX} has no total_size, and not all of its files are here")
    return Weights(size, parameters if _is_size(parameters) else None, "safetensors index")


def _file_sizes(siblings: Any) -> int | None:
    """Bytes of the model's safetensors files on the Hub; None where one is not told or there are none."""
    if not isinstance(siblings, list):
        return None
    files = [file for file in siblings if isinstance(file, dict) and _SHARD.fullmatch(str(file.get("rfilename")))]
    sizes = [file.get("size") for file in files]
    known = [size for size in sizes if _is_size(size)]
    return sum(known) if files and len(known) == len(files) else None


def _unpacked(counts: Mapping[str, int], parameters: int) -> int | None:
    """The number of parameters, or None where a good part of the elements holds packed weights."""
    packed = sum(counts.get(dtype, 0) for dtype in _PACKING)
    return None if packed * 4 > sum(counts.values()) else parameters


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value not in ("", ".", "..") and os.path.basename(value) == value
