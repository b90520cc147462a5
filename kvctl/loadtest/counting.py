"""How many tokens a prompt is to a server: by its own tokenizer where it lends that, else by what it counts in an answer."""

from __future__ import annotations

from typing import Any

from kvctl.errors import KvctlError
from kvctl.loadtest.asks import CHAT, Wire
from kvctl.loadtest.target import Client
from kvctl.loadtest.words import Count


def counter(client: Client, wire: Wire) -> tuple[Count, str]:
    """A way to count prompts as requests of `wire` send them, and in words which it is.

    vLLM and SGLang: POST /tokenize, of messages too; llama.cpp: /apply-template, then /tokenize. Any other: the usage of an
    answer of one token.
    """
    ways = {"vllm": _tokenize, "sglang": _tokenize, "llama.cpp": _llama_cpp}
    way = ways.get(wire.engine)
    if way is not None:
        count = way(client, wire)
        try:
            count("one two three")
        except KvctlError:
            pass  # an engine of an older version, or with that turned off
        else:
            return count, "the server's /tokenize"
    return _by_usage(client, wire), "usage of answers of one token"


def _tokenize(client: Client, wire: Wire) -> Count:
    def count(text: str) -> int:
        asked: dict[str, Any] = {"model": wire.model}
        asked |= _messages(text, wire) if wire.path == CHAT else {"prompt": text}
        return _number(client, "/tokenize", asked, "count")

    return count


def _messages(text: str, wire: Wire) -> dict[str, Any]:
    """What a template makes a prompt of."""
    out: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    return out | ({"tools": wire.extra["tools"]} if wire.extra.get("tools") else {})


def _llama_cpp(client: Client, wire: Wire) -> Count:
    def count(text: str) -> int:
        if wire.path == CHAT:
            found = client.post("/apply-template", _messages(text, wire))
            text = _object(found, "/apply-template").get("prompt", "")
        answer = _object(
            client.post("/tokenize", {"content": text, "add_special": True, "parse_special": True}), "/tokenize"
        )
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise KvctlError("the server's /tokenize gives no tokens")
        return len(tokens)

    return count


def _by_usage(client: Client, wire: Wire) -> Count:
    def count(text: str) -> int:
        found = client.post(wire.path, wire.body(text, 1, stream=False))
        usage = _object(found, wire.path).get("usage")
        tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if not isinstance(tokens, int) or tokens < 1:
            raise KvctlError("the server does not say how many tokens a prompt has",
                             hint="give real prompts: --prompts FILE")  # fmt: skip
        return tokens

    return count


def _number(client: Client, path: str, asked: dict[str, Any], name: str) -> int:
    value = _object(client.post(path, asked), path).get(name)
    if not isinstance(value, int) or value < 1:
        raise KvctlError(f"the server's {path} gives no {name}")
    return value


def _object(found: Any, path: str) -> dict[str, Any]:
    if found is None or found.status_code != 200:
        said = "" if found is None else f": {found.status_code} {' '.join(found.text.split())[:200]}"
        raise KvctlError(f"{path} is refused{said}")
    try:
        value = found.json()
    except ValueError:
        raise KvctlError(f"{path} answers with no JSON") from None
    if not isinstance(value, dict):
        raise KvctlError(f"{path} answers with no JSON object")
    return value
