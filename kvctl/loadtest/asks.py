"""Requests as bytes: what engines are asked, in the words that each knows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvctl.loadtest.target import Place
from kvctl.record import Record

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_FULL_LENGTH: Mapping[str, Mapping[str, Any]] = {
    "vllm": {"ignore_eos": True},
    "sglang": {"ignore_eos": True},
    "llama.cpp": {"ignore_eos": True},
    "tensorrt-llm": {"ignore_eos": True},
}
"""What has an engine write as many tokens as it may (vLLM protocol.py, SGLang protocol.py, llama.cpp tools/server/README.md,
TensorRT-LLM openai_protocol.py). Others have no such word: their answers may be shorter, which is counted."""


COUNT_EACH = ("vllm", "sglang")
"""Engines that count tokens in every event when asked (stream_options.continuous_usage_stats)."""


class Wire(Record):
    """How requests to one model of one server look."""

    place: Place
    path: str
    """COMPLETIONS or CHAT."""
    model: str
    engine: str = "unknown"
    headers: Mapping[str, str] = {}
    extra: Mapping[str, Any] = {}
    """Of the body, as the user says."""
    full_length: bool = True
    """Whether as many tokens are wanted as are allowed."""
    usage: bool = True
    """Whether the server is asked to count tokens at the end of a stream; some refuse the question."""
    each: bool = False
    """Whether it is asked to count them in every event: where events carry several."""

    @property
    def lengthens(self) -> bool:
        """Whether the engine has a word for that."""
        return self.full_length and self.engine in _FULL_LENGTH

    def body(
        self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]], tokens: int, *, stream: bool = True
    ) -> dict[str, Any]:
        """As an object; `prompt` is a text, token ids, or messages."""
        out: dict[str, Any] = {"model": self.model, "max_tokens": tokens, "temperature": 0, "stream": stream}
        if self.path == CHAT:
            out["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        else:
            out["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
        if stream and self.usage:
            out["stream_options"] = {"include_usage": True} | ({"continuous_usage_stats": True} if self.each else {})
        if self.lengthens:
            out.update(_FULL_LENGTH[self.engine])
        out.update(self.extra)
        return out

    def request(self, body: Mapping[str, Any]) -> bytes:
        """Head and body."""
        try:
            data = msgspec.json.encode(body)
        except UnicodeEncodeError:  # half of a pair, in a prompt of a file
            data = json.dumps(body, separators=(",", ":")).encode()
        place = self.place
        name = f"[{place.name}]" if ":" in place.name else place.name
        head = [
            f"POST {place.base}{self.path} HTTP/1.1", f"Host: {name}:{place.port}", "Content-Type: application/json",
            "Accept: text/event-stream", "Accept-Encoding: identity", f"Content-Length: {len(data)}",
            *(f"{key}: {value}" for key, value in self.headers.items()),
        ]  # fmt: skip
        return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + data
