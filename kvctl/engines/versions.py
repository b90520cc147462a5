"""Version numbers, as several engines write theirs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeVar

from kvctl.errors import UsageError
from kvctl.record import Record

Rules = TypeVar("Rules", bound=Record)


def history(kind: type[Rules], changes: Sequence[dict[str, Any]]) -> tuple[Rules, ...]:
    """The rules after every change, oldest first: what a change does not name stays as it was."""
    out = [kind(**changes[0])]
    for change in changes[1:]:
        out.append(out[-1].replace(**change))
    return tuple(out)


def numbers(version: str, engine: str, example: str) -> tuple[int, ...]:
    """The numbers of "0.11", "v0.11.0", "1.3.0rc5" or "0.5.13.post1", two to four of them."""
    parts = re.sub(r"\.?rc\d{1,4}$", "", version.lower().removeprefix("v"), flags=re.ASCII).split(".")
    if len(parts) > 2 and parts[-1].startswith("post") and parts[-1][4:].isdigit():
        parts.pop()  # the same code, packed again
    if not 2 <= len(parts) <= 4 or not all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts):
        raise UsageError(f"--engine: {version[:40]!r} is no version of {engine}", hint=f"for example {example}")
    return tuple(int(part) for part in parts)


def pair(version: str, engine: str, example: str) -> tuple[int, int]:
    """The first two of them."""
    major, minor, *_ = numbers(version, engine, example)
    return major, minor


def dotted(version: tuple[int, ...]) -> str:
    """0.5.13 for its numbers."""
    return ".".join(str(part) for part in version)


def unknown(version: str, engine: str, oldest: tuple[int, ...], newest: tuple[int, ...]) -> UsageError:
    """What to say of a version outside those that were read."""
    return UsageError(f"--engine: kvctl knows {engine} {dotted(oldest)} to {dotted(newest)}, not {version[:40]}",
                      hint="the rules change between versions; name one of these")  # fmt: skip
