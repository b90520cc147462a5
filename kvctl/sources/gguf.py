"""GGUF files: the header alone, and a configuration in the words of config.json.

Format: ggml docs/gguf.md, versions 2 and 3. Nothing of the tensors' data is read; every count
and length of the file is checked against the file's size before it is believed. Files here are
mapped; those on the Hub (`gguf_hub`) come in ranges, and one reader reads both.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
import struct
from pathlib import Path
from typing import Any, Protocol

from kvctl.errors import ConfigError, KvctlError, SourceError
from kvctl.record import Record
from kvctl.sources import Found, jsonfile
from kvctl.spec import Provenance, Weights

_MAGIC = b"GGUF"
_MOST_KEYS, _MOST_TENSORS, _LONGEST_ARRAY, _LONGEST_NAME = 100_000, 1_000_000, 4_000_000, 65_535
_LONGEST_HEADER = 2**29  # bytes; with a vocabulary of a million words it is some 30 MB
_MOST_ELEMENTS = 2**44
_ALIGNED, _MOST_ALIGNED = 32, 2**20  # what the data begins at a multiple of, unless the file says so
_KEPT_ARRAY = 10_000  # entries: one a layer, not one a word of a vocabulary

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9

TENSOR_TYPES = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18),
}  # fmt: skip
"""ggml's types: elements in a block, and its bytes."""

_LOOKED_UP = frozenset(("per_layer_token_embd.weight", "position_embd.weight", "token_types.weight"))
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class Header(Record):
    """What stands before the data: metadata without the vocabulary, and the tensors' sizes."""

    metadata: dict[str, Any]
    tensors: int
    bytes: int
    elements: int
    cut: bool
    """Whether the file ends before the tensors' data does."""
    looked_up: int = 0
    """Bytes of tensors of which single rows are looked up, beside the tokens' embeddings."""
    embeddings: int = 0
    vocabulary: int = 0
    """Rows of the tokens' embeddings."""
    head: bool = False
    """Whether the head has a tensor of its own."""


def from_file(path: Path, where: str) -> Found:
    """The model in a GGUF file (any part of a split one).

    Raises:
        SourceError: the file cannot be read, or is no GGUF.
        ConfigError: it is cut short or contradicts itself, or its architecture is not known.

    """
    first, others = _parts(path)
    if first != path and not first.exists():
        raise SourceError(f"{where} is one part of several, and the first is not beside it",
                          hint=f"the metadata is in {jsonfile.plain(first.name)}")  # fmt: skip
    headers = [read_header(first, jsonfile.plain(str(first)))]
    headers += [read_header(other, jsonfile.plain(str(other))) for other in others if other.is_file()]
    return found(headers, len(others) + 1, jsonfile.plain(path.name), where, Provenance("local", where))


def found(headers: list[Header], parts: int, name: str, where: str, provenance: Provenance) -> Found:
    """The model of a file's headers, one for each part that is there, the first first."""
    total, elements = sum(part.bytes for part in headers), sum(part.elements for part in headers)
    notes: tuple[str, ...] = ()
    weights: Weights | None = Weights(total, elements, "the tensors of the GGUF file", _stays(headers))
    missing = parts - len(headers)
    if missing:
        weights = None
        notes = (f"weights unknown: {missing} of {parts} parts are not here",)
    elif not total:
        weights, notes = None, ("weights unknown: the file has no tensors",)
    elif any(part.cut for part in headers):
        notes = ("the file is cut short: its tensors' data is not all there; weights are those that its header lists",)
    from kvctl.sources.gguf_config import to_config

    config = to_config(headers[0].metadata, where)
    vocabulary = max(part.vocabulary for part in headers)
    if vocabulary and "vocab_size" not in config:
        config["vocab_size"] = vocabulary
    if vocabulary and not missing:
        config["tie_word_embeddings"] = not any(part.head for part in headers)
    return Found(name, config, provenance, weights, notes)


def _stays(headers: list[Header]) -> int:
    """Bytes that stay in host memory when all layers are offloaded; a head without a tensor of its own is copied."""
    stays = sum(part.looked_up for part in headers)
    return stays + sum(part.embeddings for part in headers) if any(part.head for part in headers) else stays


def _parts(path: Path) -> tuple[Path, list[Path]]:
    """The part with the metadata, and the others."""
    first, *others = (path.with_name(name) for name in parts_of(path.name))
    return first, others


def parts_of(name: str) -> list[str]:
    """The names of all parts of a split file, in order; of any other, its own."""
    split = _SPLIT.fullmatch(name)
    count = int(split["count"]) if split else 1
    if split is None or not 1 <= int(split["number"]) <= count <= 10_000:
        return [name]
    return [f"{split['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]


def read_header(path: Path, where: str) -> Header:
    """Metadata and tensor sizes of one file."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise SourceError(f"{where} is not a regular file", hint="give a .gguf file")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise _broken(where, "is too short for a GGUF header") if file.read(4) == _MAGIC else _no_gguf(where)
            with mmap.mmap(file.fileno(), min(size, _LONGEST_HEADER), access=mmap.ACCESS_READ) as data:
                return parse_header(_Mapped(data), size, where)
    except OSError as error:
        if error.errno == errno.ENODEV:
            raise _no_gguf(where) from None
        raise jsonfile.unreadable(where, error) from None
    except ValueError as error:
        if isinstance(error, KvctlError):
            raise
        raise _broken(where, "cannot be mapped") from None


def _no_gguf(where: str) -> SourceError:
    return SourceError(f"{where} is not a GGUF file", hint="give a .gguf file, or a folder with a config.json")


def _broken(where: str, what: str) -> ConfigError:
    return ConfigError(f"{where} {what}", hint="the download may be incomplete: fetch it again")


class Start(Protocol):
    """The start of a file, as far as it is there."""

    longest: int
    """Bytes that there can be of it at most."""

    @property
    def data(self) -> mmap.mmap | bytearray:
        """Those bytes."""

    def reach(self, end: int) -> int:
        """Has at least the first `end` bytes at hand (no more than `longest`); how many those are now."""


class _Mapped:
    """A file in memory, all of it from the beginning."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.longest = len(data)

    def reach(self, end: int) -> int:
        return self.longest


def parse_header(start: Start, whole: int, where: str) -> Header:
    """What a file of `whole` bytes says before its data begins."""
    if whole < 24:
        start.reach(min(whole, 4))
        raise _broken(where, "is too short for a GGUF header") if start.data[:4] == _MAGIC else _no_gguf(where)
    return _Reader(start, whole, where).header()


class _Reader:
    """A place in the start of a file; `held` bytes of it are at hand, `size` there are at most."""

    def __init__(self, start: Start, whole: int, where: str) -> None:
        self.start, self.size, self.whole, self.where = start, start.longest, whole, where
        self.at = self.held = 0

    def reach(self, end: int) -> None:
        """Has the bytes before `end` at hand."""
        if end > self.size:
            raise _broken(self.where, "ends in the middle of its header")
        if end > self.held:
            self.held = self.start.reach(end)

    def header(self) -> Header:
        self.reach(24)
        if self.start.data[:4] != _MAGIC:
            raise _no_gguf(self.where)
        self.at = 4
        version = self.number("<I")
        if version in (0x02000000, 0x03000000):
            raise ConfigError(f"{self.where} is a big-endian GGUF file, which kvctl does not read")
        if version not in (2, 3):
            raise ConfigError(f"{self.where} has GGUF version {version}; kvctl reads 2 and 3",
                              hint="convert it with a current llama.cpp" if version < 2 else None)  # fmt: skip
        tensors, keys = self.number("<Q"), self.number("<Q")
        # The shortest key takes 13 bytes, the shortest tensor 32.
        if keys > _MOST_KEYS or keys * 13 > self.size or tensors > _MOST_TENSORS or tensors * 32 > self.size:
            raise _broken(self.where, f"claims {keys:,} keys and {tensors:,} tensors, more than can be in it")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.text(_LONGEST_NAME)
            value = self.value(self.number("<I"), keep=not key.startswith("tokenizer."))
            if key in metadata:
                raise _broken(self.where, f"has the key {jsonfile.plain(key)[:60]} twice")
            metadata[key] = value
        total = elements = end = looked_up = embeddings = vocabulary = 0
        head = False
        for _ in range(tensors):
            name, rows, held, count, start = self.tensor()
            total, elements, end = total + held, elements + count, max(end, start + held)
            looked_up += held if name in _LOOKED_UP else 0
            if name == "token_embd.weight":
                embeddings, vocabulary = held, rows
            head = head or name == "output.weight"
        if elements > _MOST_ELEMENTS:
            raise _broken(self.where, f"claims {elements:,} weights")
        alignment = metadata.get("general.alignment")
        alignment = alignment if isinstance(alignment, int) and 0 < alignment <= _MOST_ALIGNED else _ALIGNED
        end += -(-self.at // alignment) * alignment if end else 0
        return Header(metadata, tensors, total, elements, end > self.whole, looked_up, embeddings, vocabulary, head)

    def tensor(self) -> tuple[str, int, int, int, int]:
        """Name, rows, bytes and elements of the next tensor, and where its data starts after the header."""
        name = self.text(_LONGEST_NAME)
        dims = self.number("<I")
        if not 1 <= dims <= 8:
            raise _broken(self.where, f"has a tensor of {dims:,} dimensions ({jsonfile.plain(name)[:60]})")
        shape = [self.number("<Q") for _ in range(dims)]
        kind = self.number("<I")
        start = self.number("<Q")
        count = 1
        for length in shape:
            count *= length
        if count > _MOST_ELEMENTS:
            raise _broken(self.where, f"has a tensor of {count:,} elements ({jsonfile.plain(name)[:60]})")
        if kind not in TENSOR_TYPES:
            raise ConfigError(f"{self.where} has tensors of type {kind}, which kvctl does not know")
        block, held = TENSOR_TYPES[kind]
        if shape[0] % block:
            raise _broken(
                self.where, f"has rows of {shape[0]:,} elements in blocks of {block} ({jsonfile.plain(name)[:60]})"
            )
        return name, shape[1] if dims > 1 else 1, count // block * held, count, start

    def number(self, form: str) -> Any:
        end = self.at + struct.calcsize(form)
        if end > self.held:
            self.reach(end)
        (value,) = struct.unpack_from(form, self.start.data, self.at)
        self.at = end
        return value

    def text(self, longest: int, *, keep: bool = True) -> str:
        length = self.number("<Q")
        if length > longest or self.at + length > self.size:
            raise _broken(self.where, f"has a text of {length:,} bytes, more than can be in it")
        start, self.at = self.at, self.at + length
        if not keep:
            return ""
        end = min(self.at, start + _LONGEST_NAME)
        self.reach(end)
        return self.start.data[start:end].decode("utf-8", "replace")

    def value(self, kind: int, *, keep: bool) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text(self.size, keep=keep)
        if kind == _ARRAY:
            return self.array(keep)
        raise _broken(self.where, f"has a value of type {kind}, which GGUF does not know")

    def array(self, keep: bool) -> Any:
        """A list; None in place of one that no layer needs."""
        kind, count = self.number("<I"), self.number("<Q")
        if kind in _SCALARS:
            width = struct.calcsize(_SCALARS[kind])
            if count > (self.size - self.at) // width:
                raise _broken(self.where, f"has a list of {count:,} entries, more than can be in it")
            start, self.at = self.at, self.at + count * width
            if not keep or count > _KEPT_ARRAY:
                return None
            self.reach(self.at)
            return list(struct.unpack_from(f"<{count}{_SCALARS[kind][1]}", self.start.data, start))
        if kind != _STRING or count > min(_LONGEST_ARRAY, (self.size - self.at) // 8):
            what = f"{count:,} entries, more than can be in it" if kind == _STRING else f"lists of type {kind}"
            raise _broken(self.where, f"has a list of {what}")
        return self.texts(count, keep and count <= _KEPT_ARRAY)

    def texts(self, count: int, keep: bool) -> list[str] | None:
        if keep:
            return [self.text(self.size) for _ in range(count)]
        # Over them quickly: vocabularies have hundreds of thousands.
        at, held, data = self.at, self.held, self.start.data
        unpack = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > held:
                self.reach(at + 8)
                held = self.held
            at += 8 + unpack(data, at)[0]
            if at > self.size:
                raise _broken(self.where, "ends in the middle of its header")
        self.at = at
        return None
