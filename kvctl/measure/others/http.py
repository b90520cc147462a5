"""llama-server over loopback: small questions, and one streamed completion with its own timings.

Source: llama.cpp tools/server/README.md (/health, /props, /v1/models, /tokenize, /completion) and server-task.cpp, whose
`timings` with `timings_per_token` count in milliseconds from the first token.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvctl.errors import KvctlError
from kvctl.measure.others.timing import Arrivals
from kvctl.record import Record

_MOST = 4 * 2**20
"""Bytes of an answer, or of a line of one, at most."""
_LONGEST_S = 1e7


class CutShort(KvctlError):
    """An answer without its end: the server may be about to end too."""


class Completion(Record):
    """One answer, on the caller's clock."""

    arrivals: Arrivals
    prompt_s: float
    """From the start of its prompt to its first token, by the server's own clock."""
    prompt_tokens: int
    cached_tokens: int


def ask(port: int, path: str, body: Any = None, limit_s: float = 30.0) -> tuple[int, Any]:
    """Status and JSON of an answer; a body makes it a POST.

    Raises:
        OSError, HTTPException: nobody answers.
        KvctlError: what came is no JSON.

    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_s)
    try:
        _send(connection, path, body)
        answer = connection.getresponse()
        return answer.status, _json(answer.read(_MOST))
    finally:
        connection.close()


def complete(port: int, prompt: Sequence[int], tokens: int, slot: int, limit_s: float) -> Completion:
    """Send token ids to one slot and take `tokens` that follow, greedily, whatever they are.

    Raises:
        OSError, HTTPException: the connection broke.
        KvctlError: the server refuses, or answers something else than it does.

    """
    body = {
        "prompt": list(prompt), "n_predict": tokens, "id_slot": slot, "cache_prompt": False, "ignore_eos": True,
        "stream": True, "timings_per_token": True, "temperature": 0, "top_k": 1, "samplers": ["top_k"],
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_s)
    try:
        _send(connection, "/completion", body)
        answer = connection.getresponse()
        if answer.status != 200:
            raise KvctlError(f"llama-server refuses: {_message(_json(answer.read(_MOST)), answer.status)}")
        return _completion(_events(answer), len(prompt), tokens)
    finally:
        connection.close()


def _send(connection: http.client.HTTPConnection, path: str, body: Any) -> None:
    if body is None:
        connection.request("GET", path)
    else:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise KvctlError(f"llama-server answers what is no JSON: {text[:80]!r}") from None


def _message(found: Any, status: int) -> str:
    error = found.get("error") if isinstance(found, dict) else None
    said = error.get("message") if isinstance(error, dict) else None
    return str(said)[:300] if said else f"status {status}"


def _events(answer: http.client.HTTPResponse) -> Iterator[tuple[float, dict[str, Any]]]:
    """Events of a stream with the time that they came."""
    while line := answer.readline(_MOST + 1):
        now = time.perf_counter()
        if len(line) > _MOST:
            raise KvctlError("llama-server answers with a line without end")
        kind, _, text = line.partition(b":")
        if kind not in (b"data", b"error") or text.strip() == b"[DONE]":
            continue
        found = _json(text)
        if kind == b"error" and not (isinstance(found, dict) and "error" in found):
            found = {"error": found}
        if isinstance(found, dict) and "error" in found:
            raise KvctlError(f"llama-server stopped: {_message(found, answer.status)}")
        if isinstance(found, dict):
            yield now, found
            if found.get("stop") is True:
                return


def _completion(events: Iterator[tuple[float, dict[str, Any]]], prompt: int, tokens: int) -> Completion:
    later: list[tuple[int, float]] = []
    first = float("inf")
    timings: Any = None
    for now, event in events:
        timings = event.get("timings")
        try:
            count, seconds = int(timings["predicted_n"]), float(timings["predicted_ms"]) / 1000
        except (TypeError, KeyError, ValueError):
            if event.get("stop"):
                break
            continue
        if not count:
            continue
        before, at = later[-1] if later else (1, 0.0)
        if not (before <= count <= tokens and at <= seconds < _LONGEST_S):
            raise KvctlError(f"llama-server's timings make no sense: {count:,} tokens after {seconds:,.3f} s")
        # An event is late by the time that it takes to be sent, and where a character takes several tokens.
        first = min(first, now - seconds)
        if count > before:
            later.append((count, seconds))
    try:
        taken, cached, prompt_s = (
            int(timings["prompt_n"]),
            int(timings.get("cache_n", 0)),
            float(timings["prompt_ms"]) / 1000,
        )
    except (TypeError, KeyError, ValueError):
        raise CutShort("llama-server's answer ended early, or has no timings") from None
    found = Completion(Arrivals(first, tuple(later)), prompt_s, taken, cached)
    if taken != prompt or cached:
        raise KvctlError(
            f"llama-server computed {taken:,} prompt tokens where {prompt:,} were sent, and found {cached:,} in its cache"
        )
    got = found.arrivals.tokens if first < float("inf") else 0
    if got != tokens:
        raise KvctlError(f"llama-server generated {got:,} tokens where {tokens:,} were asked for")
    return found
