"""Logs of OpenAI-style requests: prompts as messages or text, answers as text, `usage` counts, times.

A line has `messages` (or `prompt`), beside it or under `response` the answer (`choices`, `completion` or text) and
`usage`, and a time: `created` (seconds since 1970, as in OpenAI's responses) or `timestamp`. Requests logged whole,
under `request` or `body`, are read too.

With a tokenizer the texts give lengths and sharing: prompts are hashed in runs of 16 tokens, each hash standing for
all before it. The chat template is not applied; its few tokens a message are missing unless `usage` says otherwise.
Without a tokenizer, `usage` gives lengths and nothing is known of sharing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from kvctl.errors import Hint
from kvctl.replay.request import Request
from kvctl.replay.trace import BadLine, Tokenizer, microseconds, whole

RUN = 16
"""Tokens under one hash: the block of most engines."""
MAX_COUNT = 1024

_COUNTED = Hint(
    "--tokenizer FILE, a tokenizer.json, counts them", "size", "recommend", otherwise="a line with usage says them"
)


class MessageReader:
    """Lines of one log."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def read(self, row: Mapping[str, Any]) -> Request:
        asked = _part(row, "request") or _part(row, "body") or row
        answer = _part(row, "response") or row
        answer = _part(answer, "body") or answer
        if "messages" not in asked and "prompt" not in asked:
            raise BadLine("neither input_length nor messages nor prompt")
        prompt = _prompt_text(asked)
        answers = _answers(answer, row)
        count = max(
            (
                whole(asked, name, 1, MAX_COUNT)
                for name in ("n", "best_of", "beams", "num_beams")
                if _given(asked, name)
            ),
            default=1,
        )
        count = max(count, len(answers))
        usage = _part(answer, "usage") or _part(row, "usage")
        length = generated = 0
        ids: tuple[int, ...] = ()
        if self._tokenizer is not None:
            tokens = self._tokens(prompt)
            length, ids = len(tokens), hashes(tokens)
            generated = sum(len(self._tokens(text)) for text in answers)
        if usage is not None:
            length = whole(usage, "prompt_tokens", 1)
            ids = ids[: length // RUN]
            generated = whole(usage, "completion_tokens", 0)
        elif self._tokenizer is None:
            raise BadLine("no usage to take lengths from, and no tokenizer to count tokens with", _COUNTED)
        elif not answers:
            raise BadLine("neither an answer nor usage says how much was generated")
        if not length:
            raise BadLine("the prompt is empty")
        limit = next((whole(asked, name, 1) for name in _LIMITS if _given(asked, name)), None)
        # Choices are taken to be of one length, since `usage` has the sum only.
        return Request(_time(row, answer), length, -(-generated // count), ids, count, limit, RUN)

    def _tokens(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer(text.encode("utf-8", "replace").decode())


_LIMITS = ("max_completion_tokens", "max_tokens")


def hashes(tokens: list[int]) -> tuple[int, ...]:
    """One number for each whole run of tokens, which stands for the tokens before it too."""
    state = hashlib.blake2b(digest_size=8)
    out = []
    for start in range(0, len(tokens) - RUN + 1, RUN):
        state.update(repr(tokens[start : start + RUN]).encode())
        out.append(int.from_bytes(state.digest(), "big"))
    return tuple(out)


def _given(row: Mapping[str, Any], name: str) -> bool:
    return row.get(name) is not None


def _part(row: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    value = row.get(name)
    return value if isinstance(value, dict) else None


def _prompt_text(row: Mapping[str, Any]) -> str:
    """All that the model reads, in order, roles included."""
    if not _given(row, "messages"):
        return _text(row.get("prompt"), "prompt")
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise BadLine("messages is not a list of messages")
    parts = []
    for message in messages:
        if not isinstance(message, dict):
            raise BadLine("messages has something that is no message")
        role = message.get("role")
        if not isinstance(role, str):
            raise BadLine("a message without a role")
        content = message.get("content")
        calls = message.get("tool_calls")
        parts.append(f"{role}\n{'' if content is None else _text(content, 'content')}\n")
        if calls is not None:
            import json

            parts.append(json.dumps(calls) + "\n")
    return "".join(parts)


def _text(value: Any, name: str) -> str:
    """Text, or the texts of a list of parts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = []
        for part in value:
            text = part.get("text") if isinstance(part, dict) else part
            if not isinstance(text, str):
                raise BadLine(f"{name} has a part that is not text")
            texts.append(text)
        return "".join(texts)
    raise BadLine(f"{name} is not text")


def _answers(answer: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    """The texts generated, one for each choice."""
    if _given(answer, "choices"):
        choices = answer["choices"]
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise BadLine("choices is not a list of choices")
        if len(choices) > MAX_COUNT:
            raise BadLine("too many choices")
        return [_choice(choice) for choice in choices]
    for name in ("completion", "response", "output", "text"):
        value = row.get(name)
        if isinstance(value, str):
            return [value]
    return []


def _choice(choice: Mapping[str, Any]) -> str:
    message = _part(choice, "message")
    if message is None:
        return _text(choice.get("text", ""), "text")
    content = message.get("content")
    text = "" if content is None else _text(content, "content")
    if message.get("tool_calls") is not None:
        import json

        text += json.dumps(message["tool_calls"])
    return text


def _time(row: Mapping[str, Any], answer: Mapping[str, Any]) -> int | None:
    """Microseconds since 1970, or since the start of the log."""
    for source in (row, answer):
        for name in ("timestamp", "created", "created_at"):
            value = source.get(name)
            if value is None:
                continue
            if isinstance(value, str):
                return _iso(value, name)
            # Seconds since 1970 have ten digits, milliseconds thirteen; small numbers are milliseconds, as in
            # Mooncake's traces, unless the name says seconds.
            seconds = type(value) in (int, float) and (name != "timestamp" or 1e9 <= value < 1e11)
            return microseconds(value, name, 1_000_000 if seconds else 1000)
    return None


def _iso(text: str, name: str) -> int:
    from datetime import UTC, datetime

    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise BadLine(f"{name} is neither a number nor a date") from None
    if time.tzinfo is None:
        time = time.replace(tzinfo=UTC)
    try:
        since = time - datetime(1970, 1, 1, tzinfo=UTC)
    except OverflowError:
        raise BadLine(f"{name} is out of range") from None
    if since.days < 0:
        raise BadLine(f"{name} is out of range")
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
