"""Connections to the server that is loaded: plain ones and secure ones, as many as the system allows."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import time

from kvctl.errors import KvctlError
from kvctl.loadtest.exchange import Exchange
from kvctl.loadtest.http1 import Response
from kvctl.loadtest.sse import Events
from kvctl.record import Record

SO_TIMESTAMPNS = 35
"""Of Linux on every processor that Python runs on but alpha, mips, parisc and sparc."""
READ = 64 * 1024
"""Bytes of a read, at most. Python makes room for as many at each, which from 128 KiB on (malloc's M_MMAP_THRESHOLD) is a mapping of its own:
with 256 KiB the client took half as much time again, and at 512 streams one event in six came in one read with others."""
UNDER_WAY = (0, errno.EINPROGRESS, errno.EWOULDBLOCK, getattr(errno, "WSAEWOULDBLOCK", errno.EINPROGRESS))
"""What a connection that is begun says."""
_FILES = 64
"""Files that a process has open beside connections."""


class Address(Record):
    """Where a server listens: resolved once, before anything is timed."""

    family: int
    host: str
    """An IP address."""
    port: int
    name: str
    """As the URL has it; what a certificate has to be for."""
    lookup_s: float | None = None
    """Seconds that looking the name up took."""
    connect_s: float | None = None
    """And connecting, once."""

    @property
    def pair(self) -> tuple[str, int]:
        return self.host, self.port


class Connection:
    __slots__ = (
        "began",
        "events",
        "exchange",
        "given",
        "idle_since",
        "last",
        "out",
        "ready",
        "response",
        "shaking",
        "sock",
        "tls",
        "used",
        "wants",
    )

    def __init__(self, sock: socket.socket, tls: Tls | None) -> None:
        self.sock, self.tls = sock, tls
        self.ready = False
        """Whether it is connected, and secured where it is to be."""
        self.shaking = False
        self.exchange: Exchange | None = None
        self.response = Response()
        self.events = Events()
        self.out = memoryview(b"")
        self.began = time.monotonic_ns()
        self.last = self.began
        """When something last happened."""
        self.given = 0
        """When it got its request."""
        self.idle_since = 0
        self.used = 0
        self.wants = 0

    def fill(self) -> None:
        """What is to be sent: the exchange's bytes, encrypted where the connection is secure."""
        assert self.exchange is not None
        data = self.exchange.data
        if self.tls is not None:
            self.tls.wrapped.write(data)
            data = self.tls.outgoing.read()
        self.out = memoryview(data)


class Tls:
    """A secure connection over buffers, so that the kernel's stamps of the bytes below it are had here too."""

    def __init__(self, context: ssl.SSLContext, name: str) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.wrapped = context.wrap_bio(self.incoming, self.outgoing, server_hostname=name)

    def read(self) -> bytes:
        out = []
        with contextlib.suppress(ssl.SSLWantReadError):
            while part := self.wrapped.read(READ):
                out.append(part)
        return b"".join(out)


def allow_files(count: int) -> None:
    """Have the system allow so many connections, beside what a process needs anyway.

    Raises:
        KvctlError: it does not, and how many it does.

    """
    try:
        import resource
    except ImportError:  # not on this system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = most
    if soft < needed:
        raise KvctlError(f"{count:,} connections take {needed:,} open files, and {soft:,} are allowed",
                         hint=f"ulimit -n {needed}, or fewer requests at once")  # fmt: skip


def asks_for_stamps() -> socket.socket | None:
    """A socket that asks the kernel for stamps as long as it lives: the kernel begins a moment after the first has asked, and
    ends with the last."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    except OSError:
        sock.close()
        return None
    return sock


_OURS = {
    errno.EMFILE: "this client may open no more files (ulimit -n)",
    errno.ENFILE: "this machine may open no more files",
    errno.EADDRNOTAVAIL: "this client has no port left",
}


def words_of(code: int) -> str:
    """An error of the system; what is the client's own limit is no fault of the server."""
    return _OURS.get(code) or (os.strerror(code).lower() if code else "failed")
