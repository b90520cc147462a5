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
from kvctl.loadtest.answers import counted, fault_of, verdict_of
from kvctl.loadtest.connection import (
    READ,
    SO_TIMESTAMPNS,
    UNDER_WAY,
    Address,
    Connection,
    Tls,
    allow_files,
    asks_for_stamps,
    words_of,
)
from kvctl.loadtest.deltas import NoEventError, read
from kvctl.loadtest.exchange import Exchange, Fault
from kvctl.loadtest.http1 import ProtocolError, Response
from kvctl.loadtest.sse import EventError, Events
from kvctl.record import Record

_STAMP = struct.Struct("@qq")
_ANCILLARY = socket.CMSG_SPACE(_STAMP.size)
_IDLE_NS = 4_000_000_000
"""uvicorn closes connections that lie idle for five seconds: those that lie for four are not used again."""
_SPIN_NS = 1_500_000
"""epoll counts milliseconds: what is due in less is waited for in short polls."""
_LOOK_NS = 100_000_000
"""How often what takes too long is looked for."""
_MOST = 256 * 2**20
"""Bytes of an answer: one that is longer has no end."""


class Patience(Record):
    """How long is waited, in seconds."""

    connect: float = 10.0
    silence: float = 300.0
    """For the next byte of an answer."""
    whole: float = 3600.0
    """For all of an answer, however lively, or as long as `silence` if that is more: comments that keep a connection alive may come
    for ever."""


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
        self.idle: deque[Connection] = deque()
        self.busy: set[Connection] = set()
        self.opened = 0
        """Connections that were made."""
        self._asks = asks_for_stamps() if self.stamped else None
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
                # What refuses a request does not read all of it: its answer comes first, or is lost with the connection.
                if mask & selectors.EVENT_READ:
                    self._receive(connection, source)
                if mask & selectors.EVENT_WRITE and connection in self.busy and connection.out:
                    self._send(connection)
            except OSError as error:
                self._broken(connection, error, source)

    # -- connections ----------------------------------------------------------------------------

    def _connect(self) -> Connection:
        sock = self._socket()
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.stamped:
            try:
                sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            except OSError:
                self.stamped = False
        connection = Connection(sock, None if self.tls is None else Tls(self.tls, self.address.name))
        code = sock.connect_ex(self.address.pair)
        if code not in UNDER_WAY:
            sock.close()
            raise OSError(code, words_of(code))
        self.opened += 1
        connection.wants = selectors.EVENT_WRITE
        self.selector.register(sock, connection.wants, connection)
        return connection

    def _socket(self) -> socket.socket:
        try:
            return socket.socket(self.address.family, socket.SOCK_STREAM)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
        # By a clock no one knows beforehand how many are under way.
        with contextlib.suppress(KvctlError):
            allow_files(2 * (len(self.busy) + len(self.idle)))
        return socket.socket(self.address.family, socket.SOCK_STREAM)

    def _goes_on(self, connection: Connection) -> bool:
        """Whether a connection that was begun is ready now."""
        sock = connection.sock
        if not connection.shaking:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, words_of(code))
            connection.last = time.monotonic_ns()
            if connection.tls is None:
                connection.ready = True
                self._want(connection, selectors.EVENT_READ)
                return True
            connection.shaking = True
        tls = connection.tls
        assert tls is not None
        with contextlib.suppress(BlockingIOError):
            data = sock.recv(READ)
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

    def _want(self, connection: Connection, mask: int) -> None:
        if connection.wants != mask:
            connection.wants = mask
            self.selector.modify(connection.sock, mask, connection)

    def _rest(self, connection: Connection) -> None:
        connection.exchange = None
        connection.idle_since = time.monotonic_ns()
        self._want(connection, selectors.EVENT_READ)
        self.idle.append(connection)

    def _peer_spoke_unasked(self, connection: Connection) -> None:
        """An idle connection that can be read is one that was closed, or is in disorder; over TLS it may be sent a ticket."""
        tls = connection.tls
        if tls is not None:
            with contextlib.suppress(OSError):
                data = connection.sock.recv(READ)
                tls.incoming.write(data)
                if data and not tls.read():
                    return
        with contextlib.suppress(ValueError):
            self.idle.remove(connection)
        self._close(connection)

    def _close(self, connection: Connection) -> None:
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
            self._fail(exchange, Fault("refused", words_of(error.errno or 0)), source)
            return
        self._give(connection, exchange, source)

    def _give(self, connection: Connection, exchange: Exchange, source: Source) -> None:
        connection.exchange = exchange
        connection.response, connection.events = Response(), Events()
        connection.last = connection.given = time.monotonic_ns()
        self.busy.add(connection)
        if not connection.ready:
            return
        try:
            connection.fill()
            self._flush(connection)
        except OSError as error:
            self._broken(connection, error, source)

    def _send(self, connection: Connection) -> None:
        """The request of a connection that has become ready, or the rest of it."""
        exchange = connection.exchange
        assert exchange is not None
        if not exchange.sent and not connection.out:
            exchange.connect_ns = time.monotonic_ns() - connection.began
            connection.fill()
        self._flush(connection)

    def _flush(self, connection: Connection) -> None:
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

    def _receive(self, connection: Connection, source: Source) -> None:
        sock = connection.sock
        kernel = False
        try:
            if self.stamped:
                data, ancillary, _, _ = sock.recvmsg(READ, _ANCILLARY)
                now = time.monotonic_ns()
                stamp = now
                for level, kind, value in ancillary:
                    if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(value) >= _STAMP.size:
                        seconds, nanoseconds = _STAMP.unpack_from(value)
                        stamp = min(seconds * 1_000_000_000 + nanoseconds + self._behind, now)
                        kernel = True
            else:
                data = sock.recv(READ)
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
        if connection.out and exchange.stamps:
            exchange.fault = Fault("protocol", "it answers before the request was sent whole")
        if exchange.bytes_in > _MOST:
            exchange.fault = Fault("protocol", f"an answer of more than {_MOST // 2**20} MiB")
        if exchange.fault is not None:
            self._over(connection, exchange, now, exchange.fault, source)
        elif connection.response.done:
            self._over(connection, exchange, now, None, source)

    def _answer(self, connection: Connection, exchange: Exchange, data: bytes, stamp: int) -> None:
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
                if exchange.wrote is not None:
                    exchange.wrote.add(said)
                if exchange.events is not None:
                    exchange.events.append(event)
                if said.usage is not None:
                    counted(exchange, said)
                if said.finish is not None:
                    exchange.finish = said.finish
                    exchange.terminal = True
                if said.done:
                    exchange.terminal = True
                if said.error is not None:
                    exchange.fault = Fault("server", said.error)
        exchange.status = response.status

    def _refusal(self, connection: Connection, part: bytes) -> None:
        """The beginning of what a server says with another status than 200 is kept for the message."""
        exchange = connection.exchange
        assert exchange is not None
        if len(exchange.said) < 2000 and sum(map(len, exchange.said)) < 2000:
            exchange.said.append(part[:2000].decode("utf-8", "replace"))

    def _ended_by_peer(self, connection: Connection, exchange: Exchange, now: int, source: Source) -> None:
        if connection.response.closed():
            self._over(connection, exchange, now, None, source)
        elif not exchange.first_byte:
            self._broken(connection, ConnectionResetError(errno.ECONNRESET, words_of(errno.ECONNRESET)), source)
        else:
            self._over(
                connection,
                exchange,
                now,
                Fault("truncated", "the connection ended in the middle of the answer"),
                source,
            )

    def _broken(self, connection: Connection, error: OSError, source: Source) -> None:
        """The connection is gone. One that had been used before and gave no byte was closed while it lay idle: the request goes
        out once more, with a new stamp."""
        exchange = connection.exchange
        assert exchange is not None
        if connection.response.status not in (0, 200):  # it has said why
            self._over(connection, exchange, time.monotonic_ns(), None, source)
            return
        self.busy.discard(connection)
        self._close(connection)
        if connection.used and not exchange.first_byte and not exchange.reconnects:
            exchange.reconnects += 1
            exchange.sent = 0
            try:
                self._give(self._connect(), exchange, source)
            except OSError as again:
                self._fail(exchange, Fault("refused", words_of(again.errno or 0)), source)
            return
        self._fail(exchange, fault_of(error, connected=connection.ready), source)

    def _over(self, connection: Connection, exchange: Exchange, now: int, fault: Fault | None, source: Source) -> None:
        """An answer is complete, or is not read on."""
        exchange.ended = now
        self.busy.discard(connection)
        connection.used += 1
        if fault is None and connection.response.done and connection.response.keeps and not connection.out:
            self._rest(connection)
        else:
            self._close(connection)
        exchange.fault = fault or verdict_of(exchange, connection.response)
        source.ended(exchange)

    def _fail(self, exchange: Exchange, fault: Fault, source: Source) -> None:
        exchange.ended = time.monotonic_ns()
        exchange.fault = fault
        source.ended(exchange)

    def _late(self, now: int, source: Source) -> None:
        whole = max(self.patience.whole, self.patience.silence)
        for connection in list(self.busy):
            exchange = connection.exchange
            assert exchange is not None
            waits = self.patience.silence if connection.ready else self.patience.connect
            if now - connection.last > waits * 1e9:
                what = "no byte of the answer" if connection.ready else "no connection"
                self._over(connection, exchange, now, Fault("timeout", f"{what} for {waits:g} s"), source)
            elif now - connection.given > whole * 1e9:
                words = f"the answer is not complete after {whole:,g} s"
                self._over(connection, exchange, now, Fault("timeout", words), source)

    def _break_off(self, source: Source) -> None:
        now = time.monotonic_ns()
        for connection in list(self.busy):
            exchange = connection.exchange
            assert exchange is not None
            self._over(connection, exchange, now, Fault("cancelled", "the run was over"), source)
