"""A server of known cadence, against which the client is measured: `python -m kvctl.loadtest.fake`.

Every answer begins `ttft` seconds after its request came and has as many events as tokens were asked for, or `tokens`, `itl` seconds
apart (0: as fast as they can be written). The times do not wait for one another: what one event is late, the next is not. Each event says
when it was handed to the system (nanoseconds of the monotonic clock, which processes of one machine share), and the last one when the
request came and when the first and the last token went out: what a client ought to have measured. A request came when the kernel
took it in, not when this process got to it: the way from there is the server's, and every client sees it.

For clients that do not read what events say, `GET /truth` gives the same of all answers since it was last asked. A word of a prompt is a
token, and answers that are not streamed come at once and are empty.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import selectors
import socket
import struct
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_FLOOD = 64
"""Tokens that are written in one go where they come as fast as they can."""
_CHAT = (b'data: {"id":"%d","object":"chat.completion.chunk","created":1700000000,"model":"fake","choices":[{"index":0,'
         b'"delta":{"content":" token"},"logprobs":null,"finish_reason":%s}]}\n\n')  # fmt: skip
_TEXT = (b'data: {"id":"%d","object":"text_completion","created":1700000000,"model":"fake","choices":[{"index":0,'
         b'"text":" token","logprobs":null,"finish_reason":%s}]}\n\n')  # fmt: skip
_SO_TIMESTAMPNS = 35
_STAMP = struct.Struct("@qq")


class _Peer:
    __slots__ = ("asked", "buffer", "came", "event", "left", "next", "out", "prompt", "sock", "wants", "written")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""
        self.out = bytearray()
        self.event = _CHAT
        self.asked = self.prompt = self.left = 0
        """Tokens of the answer, of the prompt, and of the answer still to come."""
        self.came = self.next = 0
        self.written = array("q")
        """When each event was; of a flood the first and the last."""
        self.wants = selectors.EVENT_READ


class Fake:
    """The server; `serve` until `over`."""

    def __init__(self, ttft: float, itl: float, tokens: int, port: int = 0) -> None:
        self.ttft, self.itl, self.tokens = int(ttft * 1e9), int(itl * 1e9), tokens
        self.selector = selectors.DefaultSelector()
        self.listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self.listener.setblocking(False)
        with contextlib.suppress(OSError):  # connections inherit it
            self.listener.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.selector.register(self.listener, selectors.EVENT_READ, None)
        self.port: int = self.listener.getsockname()[1]
        self.due: list[tuple[int, int, _Peer]] = []
        self.number = 0
        self.answers: list[tuple[int, int, array[int]]] = []
        """Of each that is complete: when its request came, its tokens, and when events were written."""

    def serve(self, parent: int | None = None) -> None:
        """Until the process is ended, or its parent is gone."""
        import os

        while parent is None or os.getppid() == parent:
            now = time.monotonic_ns()
            while self.due and self.due[0][0] <= now:
                _, _, peer = heapq.heappop(self.due)
                with contextlib.suppress(OSError):
                    self._token(peer)
                now = time.monotonic_ns()
            wait = 1.0 if not self.due else (self.due[0][0] - now) / 1e9
            # epoll counts milliseconds; what is due within two is not slept over.
            for key, mask in self.selector.select(0 if wait < 0.002 else min(wait - 0.001, 1.0)):
                if key.data is None:
                    self._accept()
                    continue
                try:
                    if mask & selectors.EVENT_WRITE:
                        self._flush(key.data)
                    if mask & selectors.EVENT_READ:
                        self._request(key.data)
                except OSError:
                    self._close(key.data)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.selector.register(sock, selectors.EVENT_READ, _Peer(sock))

    def _close(self, peer: _Peer) -> None:
        peer.left = 0
        with contextlib.suppress(KeyError, ValueError, OSError):
            self.selector.unregister(peer.sock)
        peer.sock.close()

    def _request(self, peer: _Peer) -> None:
        data, ancillary, _, _ = peer.sock.recvmsg(256 * 1024, 64)
        if not data:
            self._close(peer)
            return
        now = time.monotonic_ns()
        came = now
        for _, kind, value in ancillary:
            if kind == _SO_TIMESTAMPNS:
                seconds, nanoseconds = _STAMP.unpack_from(value)
                came = min(now, seconds * 1_000_000_000 + nanoseconds + now - time.time_ns())
        peer.buffer += data
        end = peer.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = peer.buffer[:end].lower()
        at = head.find(b"content-length:")
        length = 0 if at < 0 else int(head[at + 15 :].split(b"\r\n")[0])
        if len(peer.buffer) < end + 4 + length:
            return
        body = peer.buffer[end + 4 : end + 4 + length]
        peer.buffer = peer.buffer[end + 4 + length :]
        if head.startswith(b"get /truth"):
            self._small(peer, [[came, tokens, written.tolist()] for came, tokens, written in self.answers])
            self.answers.clear()
        elif head.startswith(b"get"):
            self._small(peer, {"object": "list", "data": [{"id": "fake", "object": "model", "max_model_len": 1 << 20}]})
        else:
            self._asked(peer, head, _read(body), came)

    def _asked(self, peer: _Peer, head: bytes, asked: Mapping[str, Any], came: int) -> None:
        tokens = asked.get("max_completion_tokens") or asked.get("max_tokens")
        peer.asked = peer.left = tokens if isinstance(tokens, int) and tokens > 0 else self.tokens
        peer.prompt = _words(asked)
        if asked.get("stream") is False:
            peer.left = 0
            self._small(peer, {"object": "chat.completion", "choices": [], "usage": _usage(peer)})
            return
        peer.event = _CHAT if b"chat" in head[:40] else _TEXT
        peer.came, peer.written = came, array("q")
        peer.next = came + self.ttft
        peer.out += _HEAD
        self._flush(peer)
        self._later(peer)

    def _small(self, peer: _Peer, answer: object) -> None:
        body = json.dumps(answer).encode()
        peer.out += (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        self._flush(peer)

    def _later(self, peer: _Peer) -> None:
        self.number += 1
        heapq.heappush(self.due, (peer.next, self.number, peer))

    def _token(self, peer: _Peer) -> None:
        if peer.left <= 0:
            return
        for _ in range(1 if self.itl else min(_FLOOD, peer.left)):
            now = time.monotonic_ns()
            peer.left -= 1
            peer.out += _chunk(peer.event % (now, b"null" if peer.left else b'"length"'))
            if self.itl or not peer.written or not peer.left:
                peer.written.append(now)
        if not peer.left:
            truth = {"came": peer.came, "first": peer.written[0], "last": peer.written[-1]}
            last = {"object": "chat.completion.chunk", "choices": [], "usage": _usage(peer), "kvctl": truth}
            peer.out += (
                _chunk(b"data: " + json.dumps(last).encode() + b"\n\n") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
            )
            self.answers.append((peer.came, peer.asked, peer.written))
        self._flush(peer)
        if peer.left:
            peer.next += self.itl
            self._later(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.out:
                del peer.out[: peer.sock.send(peer.out)]
        except BlockingIOError:
            pass
        wants = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
        if wants != peer.wants:
            peer.wants = wants
            self.selector.modify(peer.sock, wants, peer)


def _read(body: bytes) -> Mapping[str, Any]:
    with contextlib.suppress(ValueError):
        asked = json.loads(body)
        if isinstance(asked, dict):
            return asked
    return {}


def _words(asked: Mapping[str, Any]) -> int:
    """Of a prompt, or of all messages."""
    messages = asked.get("messages")
    said = [one.get("content") for one in messages] if isinstance(messages, list) else [asked.get("prompt")]
    return sum(len(str(one).split()) for one in said)


def _usage(peer: _Peer) -> dict[str, int]:
    return {
        "prompt_tokens": peer.prompt,
        "completion_tokens": peer.asked,
        "total_tokens": peer.prompt + peer.asked,
    }


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def main(argv: Sequence[str] | None = None) -> None:
    """Say the port on a line of standard output, and serve until the parent is gone."""
    import gc
    import os

    parser = argparse.ArgumentParser(prog="python -m kvctl.loadtest.fake")
    parser.add_argument("--ttft", type=float, default=0.1)
    parser.add_argument("--itl", type=float, default=0.02)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args(argv)
    fake = Fake(given.ttft, given.itl, given.tokens, given.port)
    print(fake.port, flush=True)
    gc.freeze()
    with contextlib.suppress(KeyboardInterrupt):
        fake.serve(os.getppid())


if __name__ == "__main__":
    main(sys.argv[1:])
