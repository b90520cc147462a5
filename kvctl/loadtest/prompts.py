"""Prompts of a file: plain lines, JSON lines, or ShareGPT's JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvctl.errors import SourceError
from kvctl.loadtest.work import Message, Prompt

_MOST_BYTES = 512 * 2**20
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_NAMES = ("prompt", "text", "question", "instruction", "input", "query")
_LIMITS = ("max_tokens", "max_completion_tokens", "output_tokens", "max_new_tokens")
_HUMAN = ("human", "user")


def read(path: str, turns: int = 1) -> tuple[tuple[Prompt, ...], int]:
    """All of them, in the file's order, and how many entries were left out in which nobody asks anything.

    A file of JSON has a list, or an object a line: `messages` as OpenAI's protocol has them (what an assistant says at their end is
    left out), `conversations` as ShareGPT has them (what the human says in the first `turns`), or a text under `prompt`, `text` or
    `question`. Any other file has a prompt a line.

    Raises:
        SourceError: it cannot be read, has none, or one of another kind.

    """
    try:
        if Path(path).stat().st_size > _MOST_BYTES:
            raise SourceError(
                f"{path}: larger than {_MOST_BYTES // 2**20} MiB", hint="a part of it will do: head -n 10000"
            )
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SourceError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise SourceError(f"{path}: no text in UTF-8") from None
    except ValueError:
        raise SourceError(f"{path!r} is no path") from None
    out = []
    for where, row in _rows(path, text):
        found = _prompt(row, turns)
        if isinstance(found, str):
            raise SourceError(
                f"{path}, {where}: {found}", hint='{"prompt": "…"} or {"messages": […]} a line, or plain lines'
            )
        out.append(found)
    asking = tuple(one for one in out if one.says or one.messages)
    if not asking:
        raise SourceError(f"{path} has no prompts")
    return asking, len(out) - len(asking)


def _rows(path: str, text: str) -> Iterator[tuple[str, Any]]:
    start = text.lstrip()[:1]
    if start == "[":
        for number, row in enumerate(_parsed(path, "", text), 1):
            yield f"entry {number:,}", row
        return
    for number, line in enumerate(text.splitlines() if start != "{" else text.split("\n"), 1):
        if line.strip():
            yield f"line {number:,}", _parsed(path, f", line {number:,}", line) if start == "{" else line.strip()


def _parsed(path: str, where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SourceError(f"{path}{where}: not JSON: {getattr(error, 'msg', str(error)).lower()}") from None
    except RecursionError:
        raise SourceError(f"{path}{where}: nested too deeply") from None


def _prompt(row: Any, turns: int) -> Prompt | str:
    """Of an entry; or what is wrong with it."""
    if isinstance(row, str):
        return Prompt(says=(row,)) if row.strip() else "empty"
    if not isinstance(row, dict):
        return "no object and no text"
    asked = next((row[name] for name in ("request", "body") if isinstance(row.get(name), dict)), row)
    limit = next((asked[name] for name in _LIMITS if asked.get(name) is not None), None)
    if limit is not None and (type(limit) is not int or not 1 <= limit <= 2**24):
        return f"{limit!r:.20} is no number of output tokens"
    if "messages" in asked:
        messages = _messages(asked["messages"])
        return messages if isinstance(messages, str) else Prompt(messages=tuple(messages), out=limit)
    if isinstance(asked.get("conversations"), list):
        says = tuple(
            part["value"] for part in asked["conversations"]
            if isinstance(part, dict) and part.get("from") in _HUMAN and isinstance(part.get("value"), str) and part["value"].strip()
        )[:turns]  # fmt: skip
        return Prompt(says=says, out=limit)  # of nobody, now and then, in ShareGPT's own file
    found = next((asked[name] for name in _NAMES if isinstance(asked.get(name), str)), None)
    if found is None or not found.strip():
        return "neither prompt nor messages"
    return Prompt(says=(found,), out=limit)


def _messages(found: Any) -> list[Message] | str:
    if not isinstance(found, list) or not found:
        return "messages is no list"
    for one in found:
        if not isinstance(one, dict) or one.get("role") not in _ROLES or not ("content" in one or "tool_calls" in one):
            return "a message without role and content"
    last = max((number for number, one in enumerate(found) if one["role"] != "assistant"), default=-1)
    return found[: last + 1] or "only the assistant speaks"
