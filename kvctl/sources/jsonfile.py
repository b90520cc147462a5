"""Reading JSON that nobody has vouched for: bounded, and with a plain word for everything that is not a config."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from kvctl.errors import ConfigError, SourceError

LIMIT = 10_000_000
"""Bytes. Real configurations have at most a few hundred thousand."""

_GIVE_CONFIG = "give the model's config.json, its folder, or its name on the Hub"

# How files begin that people give by mistake: what they are, and what to do instead.
_BEGINNINGS = (
    (b"GGUF", "is a GGUF file", "give it by a path that ends in .gguf"),
    (b"version https://git-lfs", "is a git-lfs pointer, not the file it stands for", "fetch the file: git lfs pull"),
    (b"PK\x03\x04", "is a zip archive (PyTorch weights are), not JSON", _GIVE_CONFIG),
    (b"\x1f\x8b", "is gzip-compressed, not JSON", "unpack it first"),
    (b"\xff\xfe", "is UTF-16 text, not UTF-8", "save it as UTF-8"),
    (b"\xfe\xff", "is UTF-16 text, not UTF-8", "save it as UTF-8"),
)
_TOP_LEVEL = {list: "a list", str: "a string", bool: "true or false", type(None): "null", int: "a number"}


def plain(text: str) -> str:
    """A name from outside, fit for one line of a terminal: control characters are spelled out."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def read_file(path: Path, *, limit: int = LIMIT) -> dict[str, Any]:
    """The JSON object in a regular file; never blocks on pipes and devices, never reads past the limit."""
    where = plain(str(path))
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise not_regular(where, status.st_mode)
        with path.open("rb") as file:
            return parse(file.read(limit + 1), where, size=status.st_size, limit=limit)
    except OSError as error:
        raise unreadable(where, error) from None


def read_stream(stream: BinaryIO, where: str) -> dict[str, Any]:
    """The JSON object in a stream; stops at the limit."""
    try:
        data = stream.read(LIMIT + 1)
    except OSError as error:
        raise unreadable(where, error) from None
    return parse(data, where)


def parse(
    data: bytes, where: str, *, size: int | None = None, limit: int = LIMIT, hint: str | None = None
) -> dict[str, Any]:
    """The JSON object in `data`; `where` names it in errors, `size` is its full length where `data` is a part.

    `hint` replaces the usual advice for content that is damaged or of another kind.
    """
    _refuse_other_kinds(data, where, hint)
    if len(data) > limit:
        raise too_long(where, size, limit=limit)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text (byte {error.start})", hint=hint or _GIVE_CONFIG) from None
    try:
        # NaN and Infinity pass: real configurations hold them ("time_step_limit": [0.0, Infinity]).
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise _not_json(text, error, where, hint) from None
    except RecursionError:
        raise ConfigError(f"{where} is nested too deep to be a configuration", hint=hint or _GIVE_CONFIG) from None
    except ValueError:
        # The only other ValueError: Python refuses to convert integers of more than 4,300 digits.
        raise ConfigError(
            f"{where} holds a whole number with thousands of digits", hint=hint or "no size is that large"
        ) from None
    if not isinstance(value, dict):
        what = _TOP_LEVEL.get(type(value), "a number")
        raise ConfigError(f"{where} holds {what}, not a JSON object {{…}}", hint=hint or _GIVE_CONFIG)
    return value


def too_long(where: str, size: int | None = None, *, limit: int = LIMIT) -> ConfigError:
    """The error for content past the limit."""
    how_long = "" if size is None or size <= limit else f" ({size / 1e6:,.0f} MB)"
    return ConfigError(
        f"{where} is too long for a configuration{how_long}: over {limit // 1_000_000} MB", hint=_GIVE_CONFIG
    )


def not_regular(where: str, mode: int) -> SourceError:
    """The error for pipes, sockets, devices and folders, whose reading could block or never end."""
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    kind = next((name for test, name in kinds if test(mode)), "a device")
    return SourceError(
        f"{where} is {kind}, not a regular file", hint="kvctl reads standard input when the model is given as -"
    )


def unreadable(where: str, error: OSError) -> SourceError:
    """The error for what the operating system will not open."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return SourceError(f"{where}: no such file or folder", hint="a model on the Hub is written org/name")
    if isinstance(error, PermissionError):
        return SourceError(
            f"{where}: permission denied", hint="make it readable, or pipe it: kvctl size - < config.json"
        )
    reason = os.strerror(error.errno) if error.errno else "cannot be read"
    return SourceError(f"{where}: {reason[:1].lower()}{reason[1:]}", hint=_GIVE_CONFIG)


def _refuse_other_kinds(data: bytes, where: str, hint: str | None) -> None:
    for beginning, what, advice in _BEGINNINGS:
        if data.startswith(beginning):
            raise ConfigError(f"{where} {what}", hint=advice)
    # A safetensors file begins with the length of its header, eight bytes of which the upper four are 0.
    if data[4:9] == b"\0\0\0\0{":
        raise ConfigError(f"{where} is a safetensors file (weights), not a configuration", hint=_GIVE_CONFIG)
    start = data[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start:
        raise ConfigError(f"{where} is empty", hint=hint or _GIVE_CONFIG)
    if start.startswith(b"<"):
        raise ConfigError(
            f"{where} looks like a web page, not JSON", hint=hint or "check the address or login it was fetched with"
        )


def _not_json(text: str, error: json.JSONDecodeError, where: str, hint: str | None) -> ConfigError:
    rest = text[error.pos :].strip()
    # The end of the text in the middle of something: a value, a word such as "true", or a string.
    if error.msg.startswith("Unterminated string") or any(word.startswith(rest) for word in ("true", "false", "null")):
        end = text.rstrip()
        line, column = end.count("\n") + 1, len(end) - end.rfind("\n") - 1
        return ConfigError(
            f"{where} is cut short: its JSON ends at line {line}, column {column}", hint=hint or "fetch it again"
        )
    problem = error.msg[:1].lower() + error.msg[1:]
    return ConfigError(
        f"{where} is not valid JSON: {problem} at line {error.lineno}, column {error.colno}",
        hint=hint or "correct it there, or fetch it again",
    )
