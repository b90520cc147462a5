"""A server of known cadence, against which the client is measured: `python -m kvctl.loadtest.fake`.

Every answer begins `ttft` seconds after its request was read and has `tokens` events `itl` seconds apart (0: as fast as they can be
written). The times do not wait for one another: what one event is late, the next is not. Each event says when it was handed to
the system (nanoseconds of the monotonic clock, which processes of one machine share), and the last one when the
request was read and when the first and the last token went out: what a client ought to have measured.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import selectors
import socket
import sys
import time
from collections.abc import Sequence

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_FLOOD = 64
"""Tokens that are written in one go where they come as fast as they can."""


class _Peer:
    __slots__ = ("buffer", "first", "last", "left", "next", "out", "read", "sock", "wants")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""
        self.out = bytearray()
        self.left = 0
        self.read = self.first = self.last = self.next = 0
        self.wants = selectors.EVENT_READ


class Fake:
    """The server; `serve` until `over`."""

    def __init__(self, ttft: float, itl: float, tokens: int, port: int = 0) -> None:
        self.ttft, self.itl, self.tokens = int(ttft * 1e9), int(itl * 1e9), tokens
        self.selector = selectors.DefaultSelector()
        self.listener = socket.create_server(("127.0.0.1", port), backlog=4096)
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ, None)
        self.port: int = self.listener.getsockname()[1]
        self.due: list[tuple[int, int, _Peer]] = []
        self.number = 0

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
        data = peer.sock.recv(256 * 1024)
        if not data:
            self._close(peer)
            return
        peer.buffer += data
        end = peer.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = peer.buffer[:end].lower()
        at = head.find(b"content-length:")
        length = 0 if at < 0 else int(head[at + 15 :].split(b"\r\n")[0])
        if len(peer.buffer) < end + 4 + length:
            return
        asked = peer.buffer[end + 4 : end + 4 + length]
        peer.buffer = peer.buffer[end + 4 + length :]
        if head.startswith(b"get"):
            self._small(peer, {"object": "list", "data": [{"id": "fake", "object": "model", "max_model_len": 1 << 20}]})
            return
        peer.read = time.monotonic_ns()
        peer.left = self.tokens
        with contextlib.suppress(ValueError, AttributeError):
            peer.left = int(json.loads(asked).get("max_tokens") or self.tokens)
        peer.first = peer.last = 0
        peer.next = peer.read + self.ttft
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
        if self.itl:
            self._event(peer)
        else:
            for _ in range(min(_FLOOD, peer.left)):
                self._event(peer)
        if not peer.left:
            usage = {"prompt_tokens": 1, "completion_tokens": self.tokens}
            truth = {"read": peer.read, "first": peer.first, "last": peer.last}
            last = {"object": "chat.completion.chunk", "choices": [], "usage": usage, "kvctl": truth}
            peer.out += (
                _chunk(b"data: " + json.dumps(last).encode() + b"\n\n") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
            )
        self._flush(peer)
        if peer.left:
            peer.next += self.itl
            self._later(peer)

    def _event(self, peer: _Peer) -> None:
        now = time.monotonic_ns()
        peer.first = peer.first or now
        peer.last = now
        peer.left -= 1
        finish = b"null" if peer.left else b'"length"'
        event = (b'data: {"id":"%d","object":"chat.completion.chunk","created":1700000000,"model":"fake","choices":[{"index":0,'
                 b'"delta":{"content":" token"},"logprobs":null,"finish_reason":%s}]}\n\n' % (now, finish))  # fmt: skip
        peer.out += _chunk(event)

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
