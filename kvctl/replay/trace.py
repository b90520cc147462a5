"""Reading traces: one JSON object a line, a line at a time.

Public formats, told apart by their fields:

- Mooncake (FAST '25; github.com/kvcache-ai/Mooncake): `timestamp` in milliseconds, `input_length`, `output_length`,
  `hash_ids`, one for each 512 tokens of the prompt and one for the rest. Some writers leave the rest out; both are
  read. Without `hash_ids` nothing is shared.
- Qwen-Bailian (github.com/alibaba-edu/qwen-bailian-usagetraces-anon): the same with `chat_id` and `parent_chat_id`;
  timestamps in seconds, 16 tokens a hash.
- Logs of OpenAI-style requests: see `kvctl.replay.messages`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

from kvctl.errors import SourceError
from kvctl.replay.request import HASH_TOKENS, Request

MAX_LINE = 64 * 2**20
"""Bytes of a line: a prompt of some million tokens."""
MAX_TOKENS = 2**31
MAX_MS = 2**53
BAILIAN_HASH_TOKENS = 16
_GZIP = b"\x1f\x8b"

Tokenizer = Callable[[str], list[int]]


_LINE = 'a line is {"timestamp": 0, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}, or an object with messages and usage'
_FILE = "name a file of JSON lines, gzipped or not, or - for standard input"


class BadLine(Exception):
    """What is wrong with a line, in a few words, and what to do about it where that is not what a line is."""

    def __init__(self, what: str, hint: str = _LINE) -> None:
        super().__init__(what)
        self.hint = hint


def _no_number(name: str) -> NoReturn:
    raise BadLine(f"{name} is not a number")


_parse = json.JSONDecoder(parse_constant=_no_number).decode


def read_trace(
    path: str | Path, tokenizer: Tokenizer | None = None, hash_tokens: int | None = None
) -> Iterator[Request]:
    """The requests of a JSONL file, gzipped or not; "-" is standard input. Only one line is in memory at a time.

    `hash_tokens` is the number of tokens under one of `hash_ids`, where it is not the format's usual one.
    """
    name = "standard input" if str(path) == "-" else str(path)
    last: int | None = None
    number = 0
    row = _Rows(tokenizer, hash_tokens)
    with _open(path, name) as file:
        for number, line in enumerate(_lines(file, name), 1):
            try:
                request = row.read(_decode(line))
                if request.arrival is not None:
                    if last is not None and request.arrival < last:
                        raise BadLine("it arrives before the line above", "sort the trace by time")
                    last = request.arrival
            except BadLine as error:
                raise SourceError(f"{name}, line {number}: {error}", hint=error.hint) from None
            yield request
    if not number:
        raise SourceError(f"{name} has no requests", hint=_LINE)


class _Rows:
    """The reader of lines, and what it remembers between them."""

    def __init__(self, tokenizer: Tokenizer | None, hash_tokens: int | None) -> None:
        self._tokenizer, self._hash_tokens = tokenizer, hash_tokens
        self._messages: Any = None

    def read(self, row: Any) -> Request:
        if not isinstance(row, dict):
            raise BadLine("not a JSON object")
        if "input_length" in row:
            return _lengths(row, self._hash_tokens)
        if self._messages is None:
            from kvctl.replay.messages import MessageReader

            self._messages = MessageReader(self._tokenizer)
        request: Request = self._messages.read(row)
        return request


def _lengths(row: Mapping[str, Any], hash_tokens: int | None) -> Request:
    """A line of lengths and hashes."""
    bailian = "chat_id" in row and "parent_chat_id" in row
    per_hash = hash_tokens or (BAILIAN_HASH_TOKENS if bailian else HASH_TOKENS)
    length = whole(row, "input_length", 1)
    output = whole(row, "output_length", 0)
    ids = row.get("hash_ids")
    found: tuple[int, ...] = ()
    if ids is not None:
        if type(ids) is not list or (ids and set(map(type, ids)) != {int}):
            raise BadLine("hash_ids is not a list of whole numbers")
        found = tuple(ids)
        if found and (min(found) < 0 or max(found) >= 2**64):
            raise BadLine("hash_ids has a number out of range")
        if len(found) not in (-(-length // per_hash), length // per_hash):
            raise BadLine(
                f"{len(found):,} hash_ids for {length:,} tokens; with {per_hash:,} tokens each it would be "
                f"{-(-length // per_hash):,}"
            )
    most = whole(row, "max_tokens", 1) if row.get("max_tokens") is not None else None
    count = whole(row, "n", 1, 1024) if row.get("n") is not None else 1
    time = row.get("timestamp")
    arrival = None if time is None else microseconds(time, "timestamp", 1_000_000 if bailian else 1000)
    return Request(arrival, length, output, found, count, most, per_hash)


def whole(row: Mapping[str, Any], name: str, least: int, most: int = MAX_TOKENS) -> int:
    """A field that must be a whole number in range."""
    value = row.get(name)
    if type(value) is not int:
        raise BadLine(f"no {name}" if value is None else f"{name} is not a whole number")
    if not least <= value <= most:
        raise BadLine(f"{name} is out of range")
    return value


def microseconds(value: Any, name: str, unit: int) -> int:
    """A time in units of so many microseconds."""
    if type(value) is not int and type(value) is not float:
        raise BadLine(f"{name} is not a number")
    if not 0 <= value <= MAX_MS:
        raise BadLine(f"{name} is out of range")
    return round(value * unit)


def _decode(line: bytes) -> Any:
    try:
        text = line.decode()
    except UnicodeDecodeError:
        raise BadLine("not text in UTF-8") from None
    if not text.strip():
        raise BadLine("blank")
    if text[0] == "\ufeff":
        raise BadLine("begins with a byte order mark; save the file as UTF-8 without one")
    try:
        return _parse(text)
    except json.JSONDecodeError as error:
        raise BadLine(f"not JSON: {error.msg.lower()} at column {error.colno}") from None
    except RecursionError:
        raise BadLine("nested too deeply") from None
    except ValueError:
        raise BadLine("a number with too many digits") from None


@contextmanager
def _open(path: str | Path, name: str) -> Iterator[IO[bytes]]:
    """Bytes of the file, unpacked if they are gzip."""
    try:
        if str(path) == "-":
            if sys.stdin is None:  # kvctl … <&-
                raise SourceError("standard input is closed", hint=_FILE)
            yield _unpacked(sys.stdin.buffer)
            return
        if str(path) in ("", "."):
            raise SourceError("a trace without a name", hint="the file, or - for standard input")
        with Path(path).open("rb") as file:
            yield _unpacked(file)
    except EOFError:
        raise SourceError(f"{name}: the gzip data is cut off", hint="fetch or write it again") from None
    except OSError as error:
        # gzip's own errors have no number.
        why = error.strerror or "the gzip data is damaged"
        raise SourceError(f"{name}: {why}", hint=_FILE) from None
    except ValueError:
        raise SourceError(f"{name!r} is no path", hint=_FILE) from None


def _unpacked(file: Any) -> Any:
    if not hasattr(file, "peek"):
        import io

        file = io.BufferedReader(file)
    if file.peek(2)[:2] != _GZIP:
        return file
    import gzip

    return gzip.GzipFile(fileobj=file)


def _lines(file: IO[bytes], name: str) -> Iterator[bytes]:
    import zlib

    number = 0
    while True:
        number += 1
        try:
            line = file.readline(MAX_LINE + 1)
        except zlib.error:
            raise SourceError(f"{name}: the gzip data is damaged", hint="fetch or write it again") from None
        if not line:
            return
        if len(line) > MAX_LINE:
            raise SourceError(f"{name}, line {number}: longer than {MAX_LINE // 2**20} MiB", hint=_LINE)
        yield line
