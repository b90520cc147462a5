"""Settings as Python prints them: {'a': 1, 'b': 'x'} and Name(a=1, b='x'), read without running anything.

Logs are cut off, wrapped and hold representations of any object, so this is no parser of Python: it
splits at commas outside quotes and brackets, and reads values that are literals. Others stay texts.
"""

from __future__ import annotations

import ast
import re
from typing import Any

_CLOSES = {"(": ")", "[": "]", "{": "}"}
_LONGEST = 200_000
_DEEPEST = 60
_KEY = re.compile(r"""\s*(?:'([^']{1,80})'|"([^"]{1,80})"|([A-Za-z_]\w{0,79}))\s*[:=](.*)""", re.DOTALL)
_CALL = re.compile(r"[A-Za-z_][\w.]*\((.*)\)", re.DOTALL)


def settings(text: str) -> dict[str, Any]:
    """Keys and values of the text after an opening bracket, or of bare key=value pairs; up to where it ends."""
    out: dict[str, Any] = {}
    for part in _split(text[:_LONGEST]):
        match = _KEY.fullmatch(part)
        if match is not None:
            out[match[1] or match[2] or match[3]] = value(match[4])
    return out


def value(text: str) -> Any:
    """A literal; the settings of a call (KvCacheConfig(a=1)) as a mapping; else the text."""
    text = text.strip()
    if len(text) <= 20_000:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            pass
    call = _CALL.fullmatch(text)
    if call is not None:
        return settings(call[1])
    if text.startswith("{") and text.endswith("}"):
        return settings(text[1:-1])
    return text


def _split(text: str) -> list[str]:
    """Parts between commas that no quote or bracket holds; ends at a bracket that closes what was opened before."""
    parts: list[str] = []
    closing: list[str] = []
    quote, start, index = "", 0, 0
    while index < len(text):
        char = text[index]
        if quote:
            if char == "\\":
                index += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in _CLOSES:
            closing.append(_CLOSES[char])
            if len(closing) > _DEEPEST:
                break
        elif char in ")]}":
            if not closing:
                break
            if char == closing[-1]:
                closing.pop()
        elif char == "," and not closing:
            parts.append(text[start:index])
            start = index + 1
        index += 1
    if not closing and not quote:
        parts.append(text[start:index])
    return parts
