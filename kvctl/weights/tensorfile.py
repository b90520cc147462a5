"""safetensors files: read tensor by tensor, written whole, and joined without being held in memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kvctl.errors import KvctlError, SourceError
from kvctl.record import Record
from kvctl.sources import jsonfile, safetensors

if TYPE_CHECKING:
    import torch

_CHUNK = 1 << 20
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_NAMES = {ours: theirs for theirs, ours in _DTYPES.items()}
_ALIGNMENT = 8  # so that readers may map tensors in place


class Source:
    """The tensors of a folder, each read when it is asked for; files are not mapped, so memory holds no more than that."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self._places: dict[str, tuple[Path, int, tuple[int, ...]]] = {}
        for path in files:
            header, start = _read_header(path)
            for name, dtype, shape, size in safetensors.read_header(path):
                if name in self._places:
                    raise SourceError(f"{jsonfile.plain(str(folder))} has {jsonfile.plain(name)} twice")
                if dtype not in _DTYPES:
                    raise SourceError(f"{jsonfile.plain(name)} is {jsonfile.plain(dtype)[:20]}, which is not known",
                                      hint="known: " + ", ".join(_DTYPES))  # fmt: skip
                self.shapes[name], self.dtypes[name], self.sizes[name] = shape, dtype, size
                self._places[name] = (path, start + header[name]["data_offsets"][0], shape)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self) -> list[str]:
        """All tensors, in the files' order."""
        return list(self._places)

    def read(self, name: str) -> torch.Tensor:
        """A tensor as it is stored.

        Raises:
            SourceError: the file is cut short, or cannot be read.

        """
        import torch

        (path, start, shape), size = self._places[name], self.sizes[name]
        data = bytearray(size)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                got, view = 0, memoryview(data)
                while got < size and (count := file.readinto(view[got:])):
                    got += count
        except OSError as error:
            raise SourceError(jsonfile.unreadable(jsonfile.plain(str(path)), error).message) from None
        if got < size:
            raise SourceError(
                f"{jsonfile.plain(path.name)} ends within {jsonfile.plain(name)}", hint="download it again"
            )
        dtype = getattr(torch, _DTYPES[self.dtypes[name]])
        if not size:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(data, dtype=dtype).view(shape)

    def read_rows(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """These rows [n] of a matrix, in ascending order, without the others.

        Raises:
            SourceError: as `read`.

        """
        import torch

        (path, start, shape), size = self._places[name], self.sizes[name]
        each = size // shape[0]
        data = bytearray(each * len(rows))
        view = memoryview(data)
        try:
            with path.open("rb") as file:
                for at, row in enumerate(rows.tolist()):
                    file.seek(start + row * each)
                    if file.readinto(view[at * each : (at + 1) * each]) < each:
                        raise SourceError(
                            f"{jsonfile.plain(path.name)} ends within {jsonfile.plain(name)}", hint="download it again"
                        )
        except OSError as error:
            raise SourceError(jsonfile.unreadable(jsonfile.plain(str(path)), error).message) from None
        return torch.frombuffer(data, dtype=getattr(torch, _DTYPES[self.dtypes[name]])).view(len(rows), *shape[1:])

    def fingerprint(self) -> str:
        """Changes when the files do: of names, shapes, sizes, and the time of their last change."""
        found = hashlib.sha256()
        for path in sorted({path for path, *_ in self._places.values()}):
            status = path.stat()
            found.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        for name in sorted(self._places):
            found.update(f"{name} {self.dtypes[name]} {self.shapes[name]}\n".encode())
        return found.hexdigest()


class Written(Record):
    """A file that is complete."""

    name: str
    size: int
    sha256: str


def write(path: Path, tensors: Mapping[str, torch.Tensor]) -> Written:
    """Tensors into a file of their own, on the disk when this returns.

    Raises:
        KvctlError: the disk is full, or the folder cannot be written to.

    """
    entries, at = {}, 0
    for name in sorted(tensors):
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        dtype = _NAMES[str(tensor.dtype).removeprefix("torch.")]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    try:
        with path.open("wb") as file:
            out = _Hashing(file)
            out.write(_header(entries))
            for name in sorted(tensors):
                out.write(_bytes(tensors[name]))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from None
    return Written(path.name, out.size, out.sha256)


def join(path: Path, pieces: Sequence[Path], names: Sequence[Sequence[str]]) -> Written:
    """One file of what several hold, `names` of each; copied in blocks."""
    spans, entries, at = [], {}, 0
    for piece, wanted in zip(pieces, names, strict=True):
        header, start = _read_header(piece)
        for name in wanted:
            entry = header[name]
            begin, end = entry["data_offsets"]
            entries[name] = {**entry, "data_offsets": [at, at + end - begin]}
            spans.append((piece, start + begin, end - begin))
            at += end - begin
    try:
        with path.open("wb") as file:
            out = _Hashing(file)
            out.write(_header(entries))
            for piece, begin, size in spans:
                with piece.open("rb") as source:
                    source.seek(begin)
                    while size:
                        block = source.read(min(size, _CHUNK))
                        if not block:
                            raise KvctlError(f"{piece.name} is cut short", hint="start again without --resume")
                        out.write(block)
                        size -= len(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from None
    return Written(path.name, out.size, out.sha256)


def header_bytes(tensors: Mapping[str, tuple[str, Sequence[int], int]]) -> int:
    """Bytes of the header of a file with these tensors: dtype, shape and bytes of each, in the file's order."""
    entries, at = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    return len(_header(entries))


def sizes(path: Path) -> dict[str, int]:
    """Bytes of each tensor of a file."""
    return {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in _read_header(path)[0].items()}


def cannot_write(path: Path, error: OSError) -> KvctlError:
    """The error for a disk that is full, or a folder that is read-only."""
    return KvctlError(f"cannot write {jsonfile.plain(str(path))[:200]}: {error.strerror or error}")


class _Hashing:
    """A file, and the hash of what was written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash = file, hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> None:
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


def _header(entries: Mapping[str, Any]) -> bytes:
    data = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    data += b" " * (-len(data) % _ALIGNMENT)
    return len(data).to_bytes(8, "little") + data


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    # Through bytes: numpy has no bfloat16.
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(b"")
