"""Rows of chats and texts, from JSON Lines, JSON and Parquet files that nobody has vouched for.

A row's column says what it is: `messages`, `conversations` or `conversation` a chat (role and content, or ShareGPT's from and
value), `prompt` and `completion` a pair of either texts or messages, `text` a text.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from kvctl.errors import KvctlError, SourceError, UsageError
from kvctl.record import Record
from kvctl.sources import jsonfile

LONGEST = 100_000_000
"""Bytes that are read of a text or of rows; with what comes after, nothing is done."""
MOST = 20_000
"""Rows that are read: samples are drawn from these."""
_LONGEST_ROW = 10_000_000
_MOST_EMPTY = 1_000_000
"""Empty lines in a row that are passed over: a small packed file can hold minutes of them."""
_CHATS = ("messages", "conversations", "conversation")
COLUMNS = (*_CHATS, "prompt", "completion", "text")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant"}
"""ShareGPT's names of who speaks; others are templates' own."""
_Found = Generator[tuple[str, dict[str, Any]], None, None]
"""Objects, each with where it is."""
_KNOWN = "rows have messages, conversations, prompt and completion, or text"

_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]")
"""Half of a surrogate pair, escaped, which JSON allows and no tokenizer takes; also found where a backslash is escaped."""

Message = Mapping[str, Any]
""" "role" and "content", texts, and of tools what `_TOOLS` names."""
_TOOLS = ("tool_calls", "tool_call_id", "name")


class Row(Record):
    """One of them."""

    parts: tuple[str, ...] = ()
    """A text, or what a pair consists of; empty of a chat."""
    messages: tuple[Message, ...] = ()
    """Of a chat, each with its role and content."""

    @property
    def size(self) -> int:
        return sum(map(len, self.parts)) + sum(
            len(message["content"]) + len(str(message.get("tool_calls", ""))) for message in self.messages
        )

    def chat(self) -> list[Message]:
        """As messages: a text is a user's turn, a pair that and the answer."""
        roles = ("user", "assistant")
        return list(self.messages) or [
            {"role": role, "content": part} for role, part in zip(roles, self.parts, strict=False)
        ]


class Rows(Record):
    """What was read."""

    rows: tuple[Row, ...]
    columns: tuple[str, ...]
    """That were used, in the order of `COLUMNS`."""
    whole: bool
    """Whether nothing is left of the files."""


def ending(name: str) -> str:
    """What kind of file a name says it is: json, parquet, or text."""
    name = name.lower().removesuffix(".gz")
    if name.endswith((".json", ".jsonl", ".ndjson")):
        return "json"
    return "parquet" if name.endswith(".parquet") else "text"


def read(files: Iterable[tuple[Path, str]]) -> Rows:
    """Rows of files, each with the name that errors call it by, in their order, until `MOST` or `LONGEST` is reached.

    Raises:
        SourceError: one is damaged, or holds something else.
        UsageError: no column is known, or nothing is in them.
        KvctlError: pyarrow is not installed, and one is a Parquet file.

    """
    rows: list[Row] = []
    columns: set[str] = set()
    size = 0
    for path, where in files:
        with closing(_READERS[ending(where)](path, where)) as found:
            for at, fields in found:
                row, used = _row(fields, at)
                columns.update(used)
                if row is None:
                    continue
                rows.append(row)
                size += row.size
                if len(rows) >= MOST or size >= LONGEST:
                    return Rows(tuple(rows), tuple(name for name in COLUMNS if name in columns), False)
    if not rows:
        raise UsageError("the calibration data has no row with anything in it")
    return Rows(tuple(rows), tuple(name for name in COLUMNS if name in columns), True)


def _row(fields: Mapping[str, Any], at: str) -> tuple[Row | None, tuple[str, ...]]:
    """A row of these fields, None where it is empty, and the columns it was found in."""
    for name in _CHATS:
        if fields.get(name):
            return Row(messages=_messages(fields[name], f"{at}: {name}")), (name,)
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return Row(messages=_messages([*prompt, *completion], f"{at}: prompt")), ("prompt", "completion")
    if prompt is not None and completion is not None:
        own = _text(prompt, f"{at}: prompt"), _text(completion, f"{at}: completion")
        return (Row(own) if "".join(own).strip() else None), ("prompt", "completion")
    if "text" in fields:
        text = "" if fields["text"] is None else _text(fields["text"], f"{at}: text")
        return (Row((text,)) if text.strip() else None), ("text",)
    if any(name in fields for name in _CHATS):
        return None, ()
    raise unknown_columns(fields, at)


def unknown_columns(names: Iterable[str], where: str) -> UsageError:
    seen = ", ".join(jsonfile.plain(str(name))[:40] for name in list(names)[:12])
    return UsageError(f"{where} has no column that is known; it has {seen or 'none'}", hint=_KNOWN)


def _text(value: Any, at: str) -> str:
    if not isinstance(value, str):
        raise SourceError(f"{at} is {_kind(value)}, not text")
    return value


def _messages(value: Any, at: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        raise SourceError(f"{at} is {_kind(value)}, not a list of messages")
    return tuple(_message(one, at) for one in value)


def _message(fields: Mapping[str, Any], at: str) -> Message:
    role = fields["role"] if "role" in fields else fields.get("from")
    content = fields["content"] if "content" in fields else fields.get("value")
    if isinstance(content, list):  # in parts, as of models that take pictures too
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    tools = {name: fields[name] for name in _TOOLS if fields.get(name)}
    if isinstance(tools.get("tool_calls"), list):
        tools["tool_calls"] = [_call(call) for call in tools["tool_calls"]]
    if content is None and "tool_calls" in tools:
        content = ""  # as templates that know nothing of tools can write it
    if not isinstance(role, str) or not isinstance(content, str):
        raise SourceError(f"{at} has a message without a role or a text",
                          hint='{"role": "user", "content": "…"}, or {"from": "human", "value": "…"}')  # fmt: skip
    return {"role": _ROLES.get(role, role), "content": content, **tools}


def _call(call: Any) -> Any:
    """A call of a tool, its arguments as an object, as templates take them: OpenAI's are JSON in a string."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = _loaded(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _kind(value: Any) -> str:
    return (
        "a list"
        if isinstance(value, list)
        else "an object"
        if isinstance(value, dict)
        else jsonfile.plain(repr(value))[:40]
    )


# -- files ----------------------------------------------------------------------------------


@contextmanager
def opened(path: Path, where: str) -> Iterator[BinaryIO]:
    """A file's content, unpacked where it is a gzip file.

    Raises:
        SourceError: it cannot be read, is damaged, or packed otherwise.

    """
    try:
        with path.open("rb") as file:
            start = file.read(4)
            file.seek(0)
            if start == b"\x28\xb5\x2f\xfd":
                raise SourceError(f"{where} is packed with zstd", hint="unpack it first: zstd -d")
            if start[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield unpacked  # type: ignore[misc]  # has all that is used here
            else:
                yield file
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise SourceError(f"{where} is a gzip file that is damaged", hint="fetch it again") from None
    except OSError as error:
        raise SourceError(jsonfile.unreadable(where, error).message) from None


def _json(path: Path, where: str) -> _Found:
    """Objects of a JSON array, or of JSON Lines."""
    with opened(path, where) as file:
        start = file.read(4096)
        file.seek(0)
        if not start:
            raise SourceError(f"{where} is empty")
        yield from (
            _array(file, where) if start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[" else _lines(file, where)
        )


def _array(file: BinaryIO, where: str) -> _Found:
    data = file.read(LONGEST + 1)
    if len(data) > LONGEST:
        raise UsageError(f"{where} has more than {LONGEST // 10**6} MB, and a JSON array is read at once",
                         hint="JSON Lines are read line by line")  # fmt: skip
    for number, value in enumerate(_parsed(data, where), 1):
        yield _object(value, f"{where}, row {number}")


def _lines(file: BinaryIO, where: str) -> _Found:
    number = last = empty = 0
    while line := file.readline(_LONGEST_ROW + 1):
        number += 1
        if len(line) > _LONGEST_ROW:
            raise SourceError(f"{where}, line {number} has more than {_LONGEST_ROW // 10**6} MB")
        if not line.strip():
            empty += len(line)
            if empty > LONGEST or number - last > _MOST_EMPTY:
                raise SourceError(f"{where} has nothing but empty lines from line {last + 1} on")
            continue
        last, empty = number, 0
        at = f"{where}, line {number}"
        yield _object(_parsed(line, at), at)


def _object(value: Any, at: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(value, dict):
        raise SourceError(f"{at} is {_kind(value)}, not an object", hint=_KNOWN)
    return at, value


def _parsed(data: bytes, at: str) -> Any:
    try:
        return _loaded(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise SourceError(f"{at} is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise SourceError(f"{at} is not JSON: {error.msg[:1].lower()}{error.msg[1:]}",
                          hint="JSON Lines have an object a line") from None  # fmt: skip
    except (RecursionError, ValueError):
        raise SourceError(f"{at} is nested too deep, or has a number with thousands of digits") from None


def _loaded(text: str) -> Any:
    """JSON, with a replacement character for each half of a surrogate pair, as tiktoken has it."""
    value = json.loads(text)
    if _HALF.search(text):
        whole = json.dumps(value, ensure_ascii=False).encode("utf-16-le", "surrogatepass")
        value = json.loads(whole.decode("utf-16-le", "replace"))
    return value


def _lines_of_text(path: Path, where: str) -> _Found:
    """A text file of a data set: every line is a row, as the datasets library has it."""
    with opened(path, where) as file:
        while line := file.readline(_LONGEST_ROW + 1):
            if len(line) > _LONGEST_ROW:
                raise SourceError(f"{where} has a line of more than {_LONGEST_ROW // 10**6} MB")
            try:
                yield where, {"text": line.decode("utf-8-sig")}
            except UnicodeDecodeError as error:
                raise SourceError(f"{where} is not UTF-8 text (byte {error.start} of a line)") from None


def _parquet(path: Path, where: str) -> _Found:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise KvctlError(f"{where} is a Parquet file, and pyarrow is not installed",
                         hint="pip install 'kvctl[parquet]', or give JSON Lines") from None  # fmt: skip
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = list(file.schema_arrow.names)
            wanted = [name for name in COLUMNS if name in names]
            if not any(_row_has(wanted, name) for name in (*_CHATS, "completion", "text")):
                raise unknown_columns(names, where)
            about = file.metadata
            if any(about.row_group(group).total_byte_size > 20 * LONGEST for group in range(about.num_row_groups)):
                raise UsageError(f"{where} has groups of rows of more than {20 * LONGEST // 10**9} GB")
            number = 0
            for batch in file.iter_batches(batch_size=64, columns=wanted):
                for fields in batch.to_pylist():
                    number += 1
                    yield f"{where}, row {number}", fields
    except (pyarrow.ArrowException, OSError, ValueError):
        raise SourceError(f"{where} is no Parquet file, or damaged", hint="fetch it again") from None


def _row_has(names: list[str], name: str) -> bool:
    return name in names and (name != "completion" or "prompt" in names)


_READERS = {"json": _json, "parquet": _parquet, "text": _lines_of_text}
