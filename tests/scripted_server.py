"""A server that answers by a script: any cadence, any fault. One thread accepts, one serves each connection."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
Act = Callable[[socket.socket], object]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(
    delta: dict[str, object] | None = None, finish: str | None = None, usage: dict[str, object] | None = None
) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return (
        b"data: "
        + json.dumps({"object": "chat.completion.chunk", "choices": choices, "usage": usage}).encode()
        + b"\n\n"
    )


def send(*parts: bytes) -> Act:
    return lambda sock: sock.sendall(b"".join(parts))


def wait(seconds: float) -> Act:
    return lambda sock: time.sleep(seconds)


def reset(sock: socket.socket) -> None:
    """End the connection with RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_RDWR)


def good(tokens: int = 3, **usage: object) -> list[Act]:
    """A whole answer."""
    said = {"prompt_tokens": 7, "completion_tokens": tokens} | usage
    events = [event({"role": "assistant", "content": ""}), *(event({"content": f" t{n}"}) for n in range(tokens - 1))]
    events += [event({"content": " end"}, "length"), event(None, usage=said), DONE]
    return [send(OK), *(send(chunk(one)) for one in events), send(b"0\r\n\r\n")]


class Scripted:
    """`script` is called with the number of the request, from 0, and gives what is done after it was read."""

    def __init__(
        self,
        script: Callable[[int], Sequence[Act]],
        *,
        family: int = socket.AF_INET,
        tls: ssl.SSLContext | None = None,
        port: int = 0,
        greets: bytes | None = None,
    ) -> None:
        self.script, self.tls, self.greets = script, tls, greets
        self.requests: list[bytes] = []
        self.connections = 0
        self.lock = threading.Lock()
        host = "127.0.0.1" if family == socket.AF_INET else "::1"
        self.listener = socket.create_server((host, port), family=family, backlog=1024)
        self.port: int = self.listener.getsockname()[1]
        self.open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for sock in self.open:
            with contextlib.suppress(OSError):
                sock.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            self.open.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.greets is not None:
                sock.sendall(self.greets)
                close(sock)
            if self.tls is not None:
                sock = self.tls.wrap_socket(sock, server_side=True)
            for request in _requests(sock):
                with self.lock:
                    number = len(self.requests)
                    self.requests.append(request)
                for act in self.script(number):
                    act(sock)


def _requests(sock: socket.socket) -> Iterable[bytes]:
    buffer = b""
    while True:
        while b"\r\n\r\n" not in buffer:
            data = sock.recv(65536)
            if not data:
                return
            buffer += data
        head, _, rest = buffer.partition(b"\r\n\r\n")
        length = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        while len(rest) < length:
            rest += sock.recv(65536)
        yield head + b"\r\n\r\n" + rest[:length]
        buffer = rest[length:]
