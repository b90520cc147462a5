"""Requests out, answers in: one thread, one loop over epoll, and the kernel's own time of every arrival.

A packet's stamp is taken by the kernel when it comes in (SO_TIMESTAMPNS), so that it does not matter how late this process
gets to read it: with hundreds of streams on one core that is the difference between a measurement and a guess. The kernel
stamps reads, not events: those that come in one read share a stamp and are counted (`Exchange.bundled`). Where there
are no such stamps (TLS has them too; other systems than Linux have not) the time of the read is taken, and said.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvctl.errors import KvctlError
from kvctl.loadtest.deltas import NoEventError, read
from kvctl.loadtest.exchange import Exchange, Fault
from kvctl.loadtest.http1 import ProtocolError, Response
from kvctl.loadtest.sse import EventError, Events
from kvctl.record import Record

_SO_TIMESTAMPNS = 35
"""Of Linux on every processor that Python runs on but alpha, mips, parisc and sparc."""
_STAMP = struct.Struct("@qq")
_ANCILLARY = socket.CMSG_SPACE(_STAMP.size)
_READ = 64 * 1024
"""Bytes of a read, at most. Python makes room for as many at each, which from 128 KiB on (malloc's M_MMAP_THRESHOLD) is a mapping of its own:
with 256 KiB the client took half as much time again, and at 512 streams one event in six came in one read with others."""
_IDLE_NS = 4_000_000_000
"""uvicorn closes connections that lie idle for five seconds: those that lie for four are not used again."""
_SPIN_NS = 1_500_000
"""epoll counts milliseconds: what is due in less is waited for in short polls."""
_FILES = 64
"""Files that a process has open beside connections."""
_LOOK_NS = 100_000_000
"""How often what takes too long is looked for."""


class Address(Record):
    """Where a server listens: resolved once, before anything is timed."""

    family: int
    host: str
    """An IP address."""
    port: int
    name: str
    """As the URL has it; what a certificate has to be for."""

    @property
    def pair(self) -> tuple[str, int]:
        return self.host, self.port


class Patience(Record):
    """How long is waited, in seconds."""

    connect: float = 10.0
    silence: float = 300.0
    """For the next byte of an answer."""


class Source(Protocol):
    """Whoever decides what is sent, and when."""

    def due(self) -> int | None:
        """When the next request is to be sent; None: not before another has ended, or never."""

    def take(self) -> Exchange:
        """That request."""

    def ended(self, exchange: Exchange) -> None:
        """One has, well or badly."""

    def over(self, now: int) -> bool:
        """Whether what is still under way is to be broken off."""


class _Connection:
    __slots__ = (
        "began",
        "events",
        "exchange",
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

    def __init__(self, sock: socket.socket, tls: _Tls | None) -> None:
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


class _Tls:
    """A secure connection over buffers, so that the kernel's stamps of the bytes below it are had here too."""

    def __init__(self, context: ssl.SSLContext, name: str) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.wrapped = context.wrap_bio(self.incoming, self.outgoing, server_hostname=name)

    def read(self) -> bytes:
        out = []
        with contextlib.suppress(ssl.SSLWantReadError):
            while part := self.wrapped.read(_READ):
                out.append(part)
        return b"".join(out)


class Loop:
    """Sends what a source has, over connections that it opens and keeps.

    `kernel`: stamps are asked of the kernel.
    """

    def __init__(
        self, address: Address, *, tls: ssl.SSLContext | None = None, patience: Patience | None = None, kernel: bool = True,
    ) -> None:  # fmt: skip
        self.address, self.tls = address, tls
        self.patience = patience or Patience()
        self.stamped = kernel and hasattr(socket.socket, "recvmsg")
        """Whether the kernel stamps; False once it is seen not to."""
        self.selector = selectors.DefaultSelector()
        self.idle: deque[_Connection] = deque()
        self.busy: set[_Connection] = set()
        self.opened = 0
        """Connections that were made."""
        self._asks = _asks_for_stamps() if self.stamped else None
        self._behind = 0
        """Nanoseconds from the kernel's clock of the day to the monotonic one."""

    # -- the loop -------------------------------------------------------------------------------

    def run(self, source: Source, tick: Callable[[int], None] = lambda now: None) -> None:
        """Until the source has no more and nothing is under way, or it says that it is over; `tick` is called ten times a second."""
        look = time.monotonic_ns()
        while True:
            due = source.due()
            now = time.monotonic_ns()
            while due is not None and due <= now:
                self._start(source.take(), source)
                due, now = source.due(), time.monotonic_ns()
            if now >= look:
                look = now + _LOOK_NS
                tick(now)
                self._late(now, source)
                if source.over(now):
                    self._break_off(source)
                    return
            if due is None and not self.busy:
                due = source.due()
                if due is None:
                    return
            wait = (look if due is None else min(due, look)) - now
            # What is due within a millisecond or two is not slept over.
            self._poll(0 if wait < _SPIN_NS else (wait - _SPIN_NS // 2) / 1e9, source)

    def open(self, count: int) -> int:
        """Open so many connections before anything is timed; how many there are.

        Raises:
            KvctlError: the system does not allow so many.
            OSError, ssl.SSLError: the first could not be opened, and why.

        """
        allow_files(count)
        failed: list[OSError] = []
        made = [self._connect() for _ in range(count)]
        pending = set(made)
        end = time.monotonic_ns() + int(self.patience.connect * 1e9)
        while pending and time.monotonic_ns() < end:
            for key, _ in self.selector.select(0.05):
                connection = key.data
                if connection not in pending:
                    continue
                try:
                    if self._goes_on(connection):
                        pending.discard(connection)
                        self._rest(connection)
                except OSError as error:
                    failed.append(error)
                    pending.discard(connection)
                    self._close(connection)
        for connection in pending:
            self._close(connection)
        if not self.idle:
            raise failed[0] if failed else TimeoutError(errno.ETIMEDOUT, "no connection in time")
        return len(self.idle)

    def close(self) -> None:
        """Let go of every connection."""
        for connection in (*self.idle, *self.busy):
            self._close(connection)
        self.idle.clear()
        self.busy.clear()
        if self._asks is not None:
            self._asks.close()
        self.selector.close()

    def _poll(self, wait: float, source: Source) -> None:
        ready = self.selector.select(wait)
        if not ready:
            return
        # Once for all that is ready: the two clocks drift apart by less than a microsecond between polls.
        self._behind = time.monotonic_ns() - time.time_ns()
        for key, mask in ready:
            connection = key.data
            if connection.exchange is None:
                self._peer_spoke_unasked(connection)
                continue
            try:
                if not connection.ready:
                    if self._goes_on(connection):
                        self._send(connection)
                    continue
                if mask & selectors.EVENT_WRITE:
                    self._send(connection)
                if mask & selectors.EVENT_READ:
                    self._receive(connection, source)
            except OSError as error:
                self._broken(connection, error, source)

    # -- connections ----------------------------------------------------------------------------

    def _connect(self) -> _Connection:
        sock = socket.socket(self.address.family, socket.SOCK_STREAM)
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.stamped:
            try:
                sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            except OSError:
                self.stamped = False
        connection = _Connection(sock, None if self.tls is None else _Tls(self.tls, self.address.name))
        sock.connect_ex(self.address.pair)
        self.opened += 1
        connection.wants = selectors.EVENT_WRITE
        self.selector.register(sock, connection.wants, connection)
        return connection

    def _goes_on(self, connection: _Connection) -> bool:
        """Whether a connection that was begun is ready now."""
        sock = connection.sock
        if not connection.shaking:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, _words(code))
            connection.last = time.monotonic_ns()
            if connection.tls is None:
                connection.ready = True
                self._want(connection, selectors.EVENT_READ)
                return True
            connection.shaking = True
        tls = connection.tls
        assert tls is not None
        with contextlib.suppress(BlockingIOError):
            data = sock.recv(_READ)
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "the connection broke off before it was secure")
            tls.incoming.write(data)
        try:
            tls.wrapped.do_handshake()
            connection.ready = True
        except ssl.SSLWantReadError:
            pass
        if flight := tls.outgoing.read():
            sock.sendall(flight)  # a few hundred bytes: they fit into an empty buffer
        connection.last = time.monotonic_ns()
        self._want(connection, selectors.EVENT_READ)
        return connection.ready

    def _want(self, connection: _Connection, mask: int) -> None:
        if connection.wants != mask:
            connection.wants = mask
            self.selector.modify(connection.sock, mask, connection)

    def _rest(self, connection: _Connection) -> None:
        connection.exchange = None
        connection.idle_since = time.monotonic_ns()
        self._want(connection, selectors.EVENT_READ)
        self.idle.append(connection)

    def _peer_spoke_unasked(self, connection: _Connection) -> None:
        """An idle connection that can be read is one that was closed, or is in disorder; over TLS it may be sent a ticket."""
        tls = connection.tls
        if tls is not None:
            with contextlib.suppress(OSError):
                data = connection.sock.recv(_READ)
                tls.incoming.write(data)
                if data and not tls.read():
                    return
        with contextlib.suppress(ValueError):
            self.idle.remove(connection)
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        with contextlib.suppress(KeyError, ValueError, OSError):
            self.selector.unregister(connection.sock)
        connection.sock.close()

    # -- requests -------------------------------------------------------------------------------

    def _start(self, exchange: Exchange, source: Source) -> None:
        connection = None
        now = time.monotonic_ns()
        while self.idle and connection is None:
            connection = self.idle.pop()
            if now - connection.idle_since > _IDLE_NS:
                self._close(connection)
                connection = None
        try:
            connection = connection or self._connect()
        except OSError as error:  # no more files, no more ports
            self._fail(exchange, Fault("refused", _words(error.errno or 0)), source)
            return
        self._give(connection, exchange, source)

    def _give(self, connection: _Connection, exchange: Exchange, source: Source) -> None:
        connection.exchange = exchange
        connection.response, connection.events = Response(), Events()
        connection.last = time.monotonic_ns()
        self.busy.add(connection)
        if not connection.ready:
            return
        try:
            connection.fill()
            self._flush(connection)
        except OSError as error:
            self._broken(connection, error, source)

    def _send(self, connection: _Connection) -> None:
        """The request of a connection that has become ready, or the rest of it."""
        exchange = connection.exchange
        assert exchange is not None
        if not exchange.sent and not connection.out:
            exchange.connect_ns = time.monotonic_ns() - connection.began
            connection.fill()
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        out = connection.out
        now = time.monotonic_ns()
        try:
            while out:
                # Before the call: it returns late where the server, on the same machine, is woken by it and goes first.
                now = time.monotonic_ns()
                out = out[connection.sock.send(out) :]
        except BlockingIOError:
            pass
        connection.out = out
        connection.last = now
        if out:
            self._want(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
        else:
            assert connection.exchange is not None
            connection.exchange.sent = now
            self._want(connection, selectors.EVENT_READ)

    # -- answers --------------------------------------------------------------------------------

    def _receive(self, connection: _Connection, source: Source) -> None:
        sock = connection.sock
        kernel = False
        try:
            if self.stamped:
                data, ancillary, _, _ = sock.recvmsg(_READ, _ANCILLARY)
                now = time.monotonic_ns()
                stamp = now
                for level, kind, value in ancillary:
                    if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(value) >= _STAMP.size:
                        seconds, nanoseconds = _STAMP.unpack_from(value)
                        stamp = min(seconds * 1_000_000_000 + nanoseconds + self._behind, now)
                        kernel = True
            else:
                data = sock.recv(_READ)
                stamp = now = time.monotonic_ns()
        except BlockingIOError:
            return
        connection.last = now
        exchange = connection.exchange
        assert exchange is not None
        if not data:
            self._ended_by_peer(connection, exchange, now, source)
            return
        exchange.kernel = exchange.kernel and kernel
        exchange.bytes_in += len(data)
        if connection.tls is not None:
            connection.tls.incoming.write(data)
            data = connection.tls.read()
        if not exchange.first_byte and data:
            exchange.first_byte = stamp
        try:
            self._answer(connection, exchange, data, stamp)
        except (ProtocolError, EventError, NoEventError) as error:
            self._over(connection, exchange, now, Fault("protocol", str(error)), source)
            return
        if exchange.fault is not None:
            self._over(connection, exchange, now, exchange.fault, source)
        elif connection.response.done:
            self._over(connection, exchange, now, None, source)

    def _answer(self, connection: _Connection, exchange: Exchange, data: bytes, stamp: int) -> None:
        """What bytes of an answer say."""
        response = connection.response
        seen = 0
        for part in response.feed(data):
            if response.status != 200:
                self._refusal(connection, part)
                continue
            for event in connection.events.feed(part):
                said = read(event)
                if said.answer or said.reasoning:
                    exchange.stamps.append(stamp)
                    exchange.bundled += seen > 0
                    seen += 1
                    if said.answer and not exchange.answer_at:
                        exchange.answer_at = stamp
                if exchange.events is not None:
                    exchange.events.append(event)
                if said.usage is not None:
                    exchange.usage = said.usage
                if said.finish is not None:
                    exchange.finish = said.finish
                    exchange.terminal = True
                if said.done:
                    exchange.terminal = True
                if said.error is not None:
                    exchange.fault = Fault("server", said.error)
        exchange.status = response.status

    def _refusal(self, connection: _Connection, part: bytes) -> None:
        """The beginning of what a server says with another status than 200 is kept for the message."""
        exchange = connection.exchange
        assert exchange is not None
        if sum(map(len, exchange.said)) < 2000:
            exchange.said.append(part[:2000].decode("utf-8", "replace"))

    def _ended_by_peer(self, connection: _Connection, exchange: Exchange, now: int, source: Source) -> None:
        if connection.response.closed():
            self._over(connection, exchange, now, None, source)
        elif not exchange.first_byte:
            self._broken(connection, ConnectionResetError(errno.ECONNRESET, _words(errno.ECONNRESET)), source)
        else:
            self._over(
                connection,
                exchange,
                now,
                Fault("truncated", "the connection ended in the middle of the answer"),
                source,
            )

    def _broken(self, connection: _Connection, error: OSError, source: Source) -> None:
        """The connection is gone. One that had been used before and gave no byte was closed while it lay idle: the request goes
        out once more, with a new stamp."""
        exchange = connection.exchange
        assert exchange is not None
        self.busy.discard(connection)
        self._close(connection)
        if connection.used and not exchange.first_byte and not exchange.reconnects:
            exchange.reconnects += 1
            exchange.sent = 0
            try:
                self._give(self._connect(), exchange, source)
            except OSError as again:
                self._fail(exchange, Fault("refused", _words(again.errno or 0)), source)
            return
        self._fail(exchange, _fault_of(error, connected=connection.ready), source)

    def _over(self, connection: _Connection, exchange: Exchange, now: int, fault: Fault | None, source: Source) -> None:
        """An answer is complete, or is not read on."""
        exchange.ended = now
        self.busy.discard(connection)
        connection.used += 1
        if fault is None and connection.response.done and connection.response.keeps and not connection.out:
            self._rest(connection)
        else:
            self._close(connection)
        exchange.fault = fault or _verdict(exchange, connection)
        source.ended(exchange)

    def _fail(self, exchange: Exchange, fault: Fault, source: Source) -> None:
        exchange.ended = time.monotonic_ns()
        exchange.fault = fault
        source.ended(exchange)

    def _late(self, now: int, source: Source) -> None:
        for connection in list(self.busy):
            exchange = connection.exchange
            assert exchange is not None
            waits = self.patience.silence if connection.ready else self.patience.connect
            if now - connection.last > waits * 1e9:
                what = "no byte of the answer" if connection.ready else "no connection"
                self._over(connection, exchange, now, Fault("timeout", f"{what} for {waits:g} s"), source)

    def _break_off(self, source: Source) -> None:
        now = time.monotonic_ns()
        for connection in list(self.busy):
            exchange = connection.exchange
            assert exchange is not None
            self._over(connection, exchange, now, Fault("cancelled", "the run was over"), source)


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


def _asks_for_stamps() -> socket.socket | None:
    """A socket that asks the kernel for stamps as long as it lives: the kernel begins a moment after the first has asked, and
    ends with the last."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    except OSError:
        sock.close()
        return None
    return sock


def _verdict(exchange: Exchange, connection: _Connection) -> Fault | None:
    """What is wrong with an answer that came whole."""
    response = connection.response
    if response.status != 200:
        words = " ".join(" ".join(exchange.said).split())[:300]
        with contextlib.suppress(ValueError):
            exchange.retry_after = float(response.headers.get("retry-after", ""))
        kind = "rejected" if response.status in (429, 503) else "status"
        return Fault(kind, f"{response.status}" + (f": {words}" if words else ""))
    if "text/event-stream" not in response.headers.get("content-type", "text/event-stream"):
        return Fault("protocol", f"its answer is {response.headers['content-type'][:60]}, no stream of events")
    if not exchange.terminal:
        return Fault("truncated", "the stream ended without finish_reason and [DONE]")
    if not exchange.stamps:
        return Fault("empty", "an answer without a token")
    return None


def _fault_of(error: OSError, *, connected: bool) -> Fault:
    if isinstance(error, ssl.SSLError):
        return Fault("tls", getattr(error, "verify_message", None) or error.reason or str(error))
    return Fault("reset" if connected else "refused", _words(error.errno or 0) if error.errno else str(error))


def _words(code: int) -> str:
    import os

    return os.strerror(code).lower() if code else "failed"
