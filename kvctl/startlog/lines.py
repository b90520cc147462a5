"""Lines of a log that may matter, whatever wrote them down: consoles, files, Docker, Kubernetes, systemd, PowerShell."""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kvctl.errors import SourceError
from kvctl.record import Record

LARGEST = 64 * 2**30
"""Bytes of a log that are read at most."""
_LONGEST = 2**18
"""Bytes of a line that are looked at."""
_CHUNK = 2**20

# What a line of interest has at least one of; a server's log has millions of others, which are passed over as bytes.
_MARKS = (
    b"iB", b"GB", b"args", b"with config", b"blocks", b"_tokens", b"concurrency", b"KV cache size", b"KV cache pool", b"lock size",
    b"max seq len", b"model length", b"max model len", b"max_model_len", b"padding layers", b"of memory", b"enough memory", b"tokens per block", b"ersion", b"build",
    b"llama_", b"starting llama", b"general.name", b"loaded meta data", b"using device", b"specul", b"n_max=", b"cache_k=", b"n_parallel", b"to allocate",
)  # fmt: skip
_ESCAPES = re.compile(
    r"(?:\x1b|#033)\[[0-9;?]*[A-Za-z]|(?<!\w)\[\d{1,2}(?:;\d{1,3})*m|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)
_VLLM = re.compile(r"\(((?:\w*Engine\w*|\w*Worker\w*|APIServer\w*|\w*Actor\w*)[^()]{0,80})\)")
_RANK = re.compile(r"\b(?:_?(DP|PP|TP)_?(\d{1,4})|rank[= ](\d{1,4}))|(?<=_)(DP|PP|TP)(\d{1,4})", re.IGNORECASE)
_SGLANG = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d((?: [A-Z]{2,4}\d{1,4})+)\]")
_TRT = re.compile(r"\[RANK (\d{1,4})\]")
_BOMS = ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"), (codecs.BOM_UTF8, "utf-8"))


class Line(Record):
    """One line without colours and control characters."""

    number: int
    text: str
    where: str
    """Ranks that its prefix names, in the order DP, PP, TP."""


def lines(path: str) -> Iterator[Line]:
    """Lines that may matter; `path` "-" is standard input.

    Raises:
        SourceError: no such file, no permission, or no text.

    """
    if path == "-":
        if sys.stdin is None:  # kvctl … <&-
            raise SourceError("standard input is closed")
        yield from _lines(sys.stdin.buffer, "standard input")
        return
    try:
        if not Path(path).exists():
            raise SourceError(
                f"{path[:200]}: no such log", hint="the file that the engine's output went to, or - for standard input"
            )
        if not Path(path).is_file():
            raise SourceError(f"{path[:200]} is not a file", hint="name the log itself")
        with open(path, "rb") as source:
            yield from _lines(source, path[:200])
    except OSError as error:
        raise SourceError(f"{path[:200]}: {error.strerror or 'cannot be read'}") from None
    except ValueError:  # a null byte in the name
        raise SourceError(f"{path[:80]!r} is no file name") from None


def _lines(source: BinaryIO, name: str) -> Iterator[Line]:
    head = source.read(8192)
    if head[:2] == b"\x1f\x8b":
        raise SourceError(f"{name} is compressed", hint="gunzip -c FILE, and --from-log -")
    coding = next((coding for mark, coding in _BOMS if head.startswith(mark)), "")
    if not coding and b"\x00" in head:
        raise SourceError(f"{name} is no text", hint="--from-log reads what an engine prints when it starts")
    for number, line in _marked(_chunks(head, source, coding)):
        text = line.decode("utf-8", "replace")
        if text.startswith("{"):
            text = _unwrapped(text)
        # A progress bar leaves what it wrote over before the last line.
        for piece in text.split("\r"):
            clean = _ESCAPES.sub("", piece).strip()
            if clean:
                yield Line(number, clean, _where(clean[:600]))


def _chunks(head: bytes, source: BinaryIO, coding: str) -> Iterator[bytes]:
    """The file in pieces, as UTF-8; PowerShell writes UTF-16."""
    decoder = codecs.getincrementaldecoder(coding)("replace") if coding.startswith("utf-16") else None
    chunk, seen = head, 0
    while chunk:
        yield decoder.decode(chunk).encode("utf-8", "replace") if decoder is not None else chunk
        seen += len(chunk)
        if seen > LARGEST:
            raise SourceError(
                f"the log is larger than {LARGEST >> 30} GiB", hint="its part with the last start is enough"
            )
        chunk = source.read(_CHUNK)


def _marked(chunks: Iterator[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines that hold a mark, with their numbers; of one that is too long the start."""
    pending, first, dropping = b"", 1, False
    for chunk in chunks:
        if dropping:  # the rest of a line that was too long
            _, ended, chunk = chunk.partition(b"\n")
            if not ended:
                continue
            first, dropping = first + 1, False
        pending += chunk
        whole, end, rest = pending.rpartition(b"\n")
        if end:
            yield from _found(whole, first)
            first += whole.count(b"\n") + 1
            pending = rest
        if len(pending) > _LONGEST:
            yield from _found(pending[:_LONGEST], first)
            pending, dropping = b"", True
    yield from _found(pending, first)


def _found(block: bytes, first: int) -> Iterator[tuple[int, bytes]]:
    """The lines of `block` with a mark; searching for marks is far faster than looking at every line."""
    starts: dict[int, int] = {}
    for mark in _MARKS:
        at = block.find(mark)
        while at >= 0:
            start, end = block.rfind(b"\n", 0, at) + 1, block.find(b"\n", at)
            starts[start] = len(block) if end < 0 else end
            at = block.find(mark, end) if end >= 0 else -1
    number, counted = first, 0
    for start in sorted(starts):
        number += block.count(b"\n", counted, start)
        counted = start
        yield number, block[start : min(starts[start], start + _LONGEST)]


def _unwrapped(text: str) -> str:
    """The line inside Docker's json-file log."""
    import json

    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(found, dict):
        for key in ("log", "message", "msg"):
            if isinstance(found.get(key), str):
                return str(found[key]).rstrip("\n").replace("\n", "\r")
    return text


def _where(text: str) -> str:
    """DP0 PP1 TP0, as far as the prefix names them."""
    if found := _SGLANG.search(text):
        return " ".join(word for word in found[1].split() if word[:2] in ("DP", "PP", "TP"))
    ranks: dict[str, str] = {}
    for process in _VLLM.findall(text):
        for kind, rank, bare, inner, index in _RANK.findall(process):
            ranks[(kind or inner or "rank").upper()] = rank or bare or index
    if not ranks and (found := _TRT.search(text)):
        ranks["RANK"] = found[1]
    return " ".join(f"{kind}{ranks[kind]}" for kind in ("DP", "PP", "TP", "RANK") if kind in ranks)
