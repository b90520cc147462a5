"""Bytes and parameters of a model's weights, from safetensors headers, their index, or what the Hub says of them."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from kvctl.errors import ConfigError, KvctlError
from kvctl.sources import jsonfile
from kvctl.spec import Weights
from kvctl.tensors import BITS, Named, Tensor, grouped

INDEX = "model.safetensors.index.json"
HEADER_LIMIT = 100_000_000
"""Bytes of a header that the format allows."""
INDEX_LIMIT = 100_000_000  # the indexes of the largest mixtures of experts have about 10 MB

# Quantized checkpoints pack several weights into one element of these types.
_PACKING = ("U8", "I32", "U32")
_MOST_DIMENSIONS = 64
_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


def folder_weights(folder: Path, config: Mapping[str, Any]) -> tuple[Weights | None, tuple[str, ...]]:
    """The weights in a model's folder, and a note where they are there and cannot be told."""
    try:
        index = _read_index(folder)
        shards = _shards(folder, index)
        if index is not None and not all(shard.is_file() for shard in shards):
            return _from_index(index), ()
        return _from_headers(folder, shards, config) if shards else (None, ())
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
    bits = sum(count * BITS.get(dtype, 0) for dtype, count in counts.items())
    known = bool(counts) and all(dtype in BITS for dtype in counts)
    # The Hub counts the weights that are packed in an element, not the elements: then only the files tell the bytes.
    if files is not None and not (known and 0 <= files - bits // 8 <= files // 100 + 1_000_000):
        return Weights(files, parameters, "safetensors file sizes")
    return Weights(bits // 8, _unpacked(counts, parameters), "safetensors headers") if known else None


def folder_tensors(folder: Path) -> tuple[Tensor, ...] | None:
    """The tensors in a model's folder, None where not all of its files are there.

    Raises:
        ConfigError: a header, or the index, is not valid.

    """
    shards = _shards(folder, _read_index(folder))
    if not shards or not all(shard.is_file() for shard in shards):
        return None
    return grouped(named for shard in shards for named in read_header(shard))


def files_of(folder: Path) -> list[Path]:
    """The files of a folder that make up the model.

    Raises:
        ConfigError: the index is not valid.

    """
    return _shards(folder, _read_index(folder))


def named_files(folder: Path) -> list[Path]:
    """The files that transformers would look for: those of the index, or model.safetensors; whether there or not.

    Raises:
        ConfigError: the index is not valid.

    """
    index = _read_index(folder)
    return [folder / name for name in (["model.safetensors"] if index is None else index_files(index))]


def small_tensors(path: Path, wanted: Callable[[str], bool], most: int) -> dict[str, tuple[float, ...]]:
    """The numbers in those tensors of a file that are wanted, of fp64 to fp16 and at most so many elements.

    Raises:
        ConfigError: the header is not valid, or one is of another dtype, larger, or cut short.

    """
    import struct

    out: dict[str, tuple[float, ...]] = {}
    sizes = {name: (dtype, math.prod(shape)) for name, dtype, shape, _ in read_header(path) if wanted(name)}
    if not sizes:
        return out
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(start - 8))
        for name, (dtype, count) in sizes.items():
            code = {"F64": "d", "F32": "f", "F16": "e", "BF16": "H"}.get(dtype)
            if code is None or count > most:
                raise ConfigError(
                    f"{jsonfile.plain(path.name)}: {jsonfile.plain(name)} has {count:,} numbers of {jsonfile.plain(dtype)}"
                )
            begin, end = header[name]["data_offsets"]
            file.seek(start + begin)
            data = file.read(end - begin)
            if len(data) != end - begin:
                raise ConfigError(f"{jsonfile.plain(path.name)} ends before {jsonfile.plain(name)}")
            numbers = struct.unpack(f"<{count}{code}", data)
            if dtype == "BF16":  # the upper half of fp32
                numbers = struct.unpack(f"<{count}f", b"".join(b"\0\0" + struct.pack("<H", one) for one in numbers))
            out[name] = numbers
    return out


def read_header(path: Path) -> list[Named]:
    """Every tensor of a file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(HEADER_LIMIT, os.fstat(file.fileno()).st_size - 8):
            raise malformed(path.name)
        return parse_header(file.read(length), path.name)


def parse_header(data: bytes, where: str) -> list[Named]:
    """Every tensor that a header lists."""
    try:
        header = json.loads(data)
        return [_tensor(name, entry) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise malformed(where) from None


def _tensor(name: str, entry: Mapping[str, Any]) -> Named:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and len(shape) <= _MOST_DIMENSIONS and all(map(_is_size, (*shape, begin, end)))):
        raise ValueError
    elements = 1
    for length in shape:
        elements *= length
    if end < begin or (dtype in BITS and (elements * BITS[dtype] + 7) // 8 != end - begin):
        raise ValueError
    return name, dtype, tuple(shape), end - begin


def index_files(index: Mapping[str, Any]) -> list[str]:
    """The files that an index names."""
    files = index.get("weight_map")
    names = set(files.values()) if isinstance(files, dict) and all(map(_is_name, files.values())) else set()
    if not names:
        raise ConfigError(f"{INDEX} names no files")
    return sorted(names)


def malformed(name: str) -> ConfigError:
    """The error for a file that does not begin as it should."""
    return ConfigError(f"{jsonfile.plain(name)} has no valid safetensors header")


def _read_index(folder: Path) -> dict[str, Any] | None:
    path = folder / INDEX
    return jsonfile.read_file(path, limit=INDEX_LIMIT) if path.is_file() else None


def _shards(folder: Path, index: Mapping[str, Any] | None) -> list[Path]:
    """The files that make up the model; a folder may hold a second copy of the weights in another layout."""
    if index is not None:
        return [folder / name for name in index_files(index)]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    ours = [path for path in found if not path.name.startswith(("adapter_", "consolidated"))]
    return ours or found


def _from_headers(folder: Path, shards: Iterable[Path], config: Mapping[str, Any]) -> tuple[Weights, tuple[str, ...]]:
    from kvctl.sources import packed

    tensors = [named for shard in shards for named in read_header(shard)]
    size = sum(length for *_, length in tensors)
    facts = packed.quantized(config, folder)
    if facts is not None:
        return Weights(size, packed.parameters(tensors, facts), "safetensors headers"), ()
    counts: Counter[str] = Counter()
    for _, dtype, shape, _ in tensors:
        counts[dtype] += math.prod(shape)
    odd = packed.unexplained(tensors)
    notes = () if odd is None else (
        f"{jsonfile.plain(odd[0])} is of {odd[1]}, and config.json says nothing of quantization: what it stands for is not known",
    )  # fmt: skip
    return Weights(size, _unpacked(counts, counts.total()), "safetensors headers"), notes


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
