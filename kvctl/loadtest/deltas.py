"""What one event of a stream says, of chat and of plain completions, as engines write them.

A typed decoder reads an event in a microsecond; what does not fit its types (content in parts, numbers as text) is read
once more in the general way. Everything that a model wrote counts as output: text, reasoning, calls of tools.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec

DONE = b"[DONE]"
_FAILED = ("abort", "error")
"""Reasons to stop that are failures of the server (SGLang and vLLM end streams with them after a 200)."""
_MOST = 2**53
"""No count of tokens: what is more, or less than 0, is not believed."""


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    function: _Function | None = None
    index: int = 0
    id: str | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Reasoned(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None
    completion_tokens_details: _Reasoned | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw | None = None
    object: str | None = None
    message: msgspec.Raw | None = None


_DECODE = msgspec.json.Decoder(_Event).decode


class Usage(msgspec.Struct, frozen=True):
    """Tokens as the server counts them; None for what it does not say."""

    prompt: int | None
    completion: int | None
    cached: int | None
    """Of the prompt, those that were in its cache."""
    reasoning: int | None = None


class Called(msgspec.Struct, frozen=True):
    """A call of a tool, or a piece of one."""

    index: int
    id: str
    name: str
    arguments: str

    def joined(self, more: Called) -> Called:
        """With a later piece of it."""
        return Called(self.index, self.id or more.id, self.name + more.name, self.arguments + more.arguments)


class Said(msgspec.Struct, frozen=True):
    """What an event says."""

    answer: bool = False
    """Whether it has text of the answer, or of a call of a tool."""
    reasoning: bool = False
    """Whether it has text of the reasoning before it."""
    finish: str | None = None
    """Why the model stopped."""
    usage: Usage | None = None
    error: str | None = None
    """Of a server that fails when it has begun to answer."""
    done: bool = False
    """The mark that ends a stream."""
    text: str = ""
    """What the model wrote: the answer, of the first choice."""
    calls: tuple[Called, ...] = ()
    """Of tools, by the first choice."""
    last: bool = False
    """Whether it is usage alone, without a choice, with which servers end a stream."""


class NoEventError(Exception):
    """The data of an event is nothing that such servers send."""


_ENDED = Said(done=True)
_NOTHING = Said()


def read(data: bytes) -> Said:
    """One event.

    Raises:
        NoEventError: it is no JSON object.

    """
    if data == DONE or data.strip() == DONE:
        return _ENDED
    try:
        event = _DECODE(data)
    except msgspec.ValidationError:
        return _loosely(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise NoEventError(f"no JSON: {data[:60]!r}") from None
    if event.object == "error" or (event.error is not None and bytes(event.error) != b"null"):
        return _loosely(data)
    usage = None if event.usage is None else _usage(event.usage)
    if not event.choices:
        return _NOTHING if usage is None else Said(usage=usage, last=True)
    answer = reasoning = False
    finish, text = None, ""
    calls: tuple[Called, ...] = ()
    for choice in event.choices:
        finish = finish or choice.finish_reason
        delta = choice.delta
        if delta is not None:
            answer = answer or bool(
                delta.content or delta.refusal or (delta.tool_calls and any(map(_speaks, delta.tool_calls)))
            )
            reasoning = reasoning or bool(delta.reasoning_content or delta.reasoning)
            own = delta.content
            if delta.tool_calls and choice.index == 0:
                calls = tuple(map(_called, delta.tool_calls))
        else:
            own = choice.text
            answer = answer or bool(own)
        if own and choice.index == 0:
            text = own
    return Said(answer, reasoning, finish, usage, _stopped(finish), text=text, calls=calls)


def _stopped(finish: str | None) -> str | None:
    """In words, where a model stopped for a failure."""
    return f"it stopped with finish_reason {finish}" if finish in _FAILED else None


def _called(call: _Call) -> Called:
    function = call.function or _Function()
    return Called(call.index, call.id or "", function.name or "", function.arguments or "")


def _speaks(call: _Call) -> bool:
    function = call.function
    return function is not None and bool(function.name or function.arguments)


def _usage(found: _Usage) -> Usage | None:
    """None of one in which nothing is said."""
    prompt, completion = _count(found.prompt_tokens), _count(found.completion_tokens)
    if prompt is None and completion is None:
        return None
    cached = None if found.prompt_tokens_details is None else _count(found.prompt_tokens_details.cached_tokens)
    thought = None if found.completion_tokens_details is None else found.completion_tokens_details.reasoning_tokens
    return Usage(prompt, completion, cached, _count(thought))


def _count(value: Any) -> int | None:
    """A number of tokens; None of what is none: text, true, -1, 1e999."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
        return None
    return int(value)


def _words(error: Any) -> str:
    """An error object's message, on one line."""
    while isinstance(error, dict) and "error" in error and not error.get("message"):
        error = error["error"]
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error.get("type") or error
    with contextlib.suppress(
        RecursionError, ValueError
    ):  # of what is nested without end, or a number of thousands of digits
        return " ".join(str(error).split())[:500] or "an error without words"
    return "an error that cannot be shown"


def _loosely(data: bytes) -> Said:
    """An event whose types are not the usual ones."""
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        raise NoEventError(f"no JSON: {data[:60]!r}") from None
    if not isinstance(event, dict):
        raise NoEventError(f"no JSON object: {data[:60]!r}")
    if event.get("error") or event.get("object") == "error":
        return Said(error=_words(event.get("error") or event))
    answer = reasoning = False
    finish, text = None, ""
    choices = event.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if not isinstance(choice, dict):
            continue
        delta = choice.get("delta")
        said = delta if isinstance(delta, dict) else {"content": choice.get("text")}
        reason = choice.get("finish_reason")
        finish = finish or (None if reason is None else _words(reason)[:60])
        own = _text(said.get("content"))
        answer = answer or bool(own or said.get("tool_calls") or said.get("refusal"))
        reasoning = reasoning or bool(_text(said.get("reasoning_content")) or _text(said.get("reasoning")))
        text = text or own
    usage = _loose_usage(event.get("usage"))
    return Said(answer, reasoning, finish, usage, _stopped(finish), text=text, last=usage is not None and not choices)


def _text(content: Any) -> str:
    """Of text, or of parts of which some are text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return ""


def _loose_usage(found: Any) -> Usage | None:
    if not isinstance(found, dict):
        return None

    def count(holder: Any, name: str) -> int | None:
        return _count(holder.get(name)) if isinstance(holder, dict) else None

    prompt, completion = count(found, "prompt_tokens"), count(found, "completion_tokens")
    if prompt is None and completion is None:
        return None
    return Usage(
        prompt, completion, count(found.get("prompt_tokens_details"), "cached_tokens"),
        count(found.get("completion_tokens_details"), "reasoning_tokens"),
    )  # fmt: skip
