"""The loop that sends requests and stamps answers, against a server that does as a script says."""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from scripted_server import DONE, OK, Act, Scripted, chunk, close, event, good, reset, send, wait

from kvctl.errors import KvctlError
from kvctl.loadtest.connection import Address, allow_files
from kvctl.loadtest.exchange import Exchange
from kvctl.loadtest.loop import Loop, Patience

BODY = b'{"stream":true}'
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY


class Few:
    """So many requests, so many at a time."""

    def __init__(self, count: int, at_once: int = 1, data: bytes = REQUEST) -> None:
        self.count, self.at_once, self.data = count, at_once, data
        self.live = 0
        self.done: list[Exchange] = []
        self.until: int | None = None
        self.pause = 0
        self.next = time.monotonic_ns()

    def due(self) -> int | None:
        return self.next if self.count and self.live < self.at_once else None

    def take(self) -> Exchange:
        self.count -= 1
        self.live += 1
        return Exchange(self.data, self.next)

    def ended(self, exchange: Exchange) -> None:
        self.live -= 1
        self.done.append(exchange)
        self.next = time.monotonic_ns() + self.pause

    def over(self, now: int) -> bool:
        return self.until is not None and now > self.until


def _address(port: int, name: str = "127.0.0.1") -> Address:
    return Address(socket.AF_INET, "127.0.0.1", port, name)


def _run(
    script: Callable[[int], Sequence[Act]], count: int = 1, at_once: int = 1, patience: Patience | None = None
) -> list[Exchange]:
    with Scripted(script) as server:
        loop = Loop(_address(server.port), patience=patience)
        few = Few(count, at_once)
        loop.run(few)
        loop.close()
        return few.done


def test_an_answer() -> None:
    (one,) = _run(lambda number: good(4, prompt_tokens_details={"cached_tokens": 2}))
    assert one.good
    assert one.usage is not None
    assert (one.usage.prompt, one.usage.completion, one.usage.cached) == (7, 4, 2)
    assert len(one.stamps) == 4  # the role alone is no token
    assert one.scheduled <= one.sent <= one.ended
    # Microseconds lie between the kernel's clock and the monotonic one.
    assert one.sent - 1_000_000 < one.first_byte <= one.first_token <= one.last_token <= one.ended
    assert one.finish == "length"
    assert one.connect_ns is not None
    assert list(one.stamps) == sorted(one.stamps)


def test_connections_are_kept_and_opened_before() -> None:
    with Scripted(lambda number: good()) as server:
        loop = Loop(_address(server.port))
        assert loop.open(8) == 8
        few = Few(100, 8)
        loop.run(few)
        loop.close()
        assert len(few.done) == 100
        assert all(one.good and one.connect_ns is None for one in few.done)
        assert server.connections == loop.opened == 8


def test_stamps_are_the_kernels() -> None:
    """The loop is held up for 50 ms while events come every 10: it reads them late, and stamps them as they came."""
    script = [send(OK), *(act for n in range(10) for act in (wait(0.01), send(chunk(event({"content": "x"}))))),
              send(chunk(event({"content": "x"}, "stop")), b"0\r\n\r\n")]  # fmt: skip
    with Scripted(lambda number: script) as server:
        loop, few = Loop(_address(server.port)), Few(1)
        inner = loop._poll

        def slow(wait: float, source: Few) -> None:
            inner(min(wait, 0.05), source)
            time.sleep(0.05)

        loop._poll = slow  # type: ignore[assignment, method-assign]
        loop.run(few)
        loop.close()
    (one,) = few.done
    assert one.good
    if sys.platform == "linux":
        assert one.kernel
        # Of what came in one read only the last packet has a stamp of its own: some are bundled, none comes after it was read.
        assert 0 < one.bundled < 11
        assert one.last_token - one.first_token > 60e6


@pytest.mark.parametrize(("script", "kind", "said"), [
    ([send(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 16\r\n\r\nout\nof blocks   ")], "status", "500: out of blocks"),
    ([send(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 2\r\nContent-Length: 0\r\n\r\n")], "rejected", "429"),
    ([send(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")], "rejected", "503"),
    ([send(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nhi")], "protocol", "text/html"),
    ([send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: <html>\n\n"), close], "protocol", "no JSON"),
    ([send(b"SSH-2.0-x\r\n")], "protocol", "does not answer in HTTP"),
    ([send(OK, chunk(event({"content": "a"})), chunk(b'data: {"error":{"message":"engine died"}}\n\n'), b"0\r\n\r\n")], "server", "engine died"),
    ([send(OK, chunk(event({"content": "a"}))), close], "truncated", "in the middle"),
    ([send(OK, chunk(event({"content": "a"})), b"0\r\n\r\n")], "truncated", "without finish_reason"),
    ([send(OK, chunk(event({"content": "a"}))[:-9]), close], "truncated", "in the middle"),
    ([send(OK, chunk(event({"content": ""}, "stop")), chunk(DONE), b"0\r\n\r\n")], "empty", "without a token"),
    ([send(OK, chunk(event({"content": "a"}))), wait(0.05), reset], "reset", "reset"),
    ([reset], "reset", "reset"),
    ([close], "reset", "reset"),
    ([send(OK, chunk(b"data: \xff\xfe\n\n")), close], "protocol", "no JSON"),
    ([send(OK, chunk(event({"content": "a"}))), wait(5)], "timeout", "no byte of the answer for 0.3 s"),
    ([send(b"HTTP/1.1 200 OK\r\nContent-"), wait(5)], "timeout", "no byte"),
    ([wait(5)], "timeout", "no byte"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_faults(script: list[Act], kind: str, said: str) -> None:
    (one,) = _run(lambda number: script, patience=Patience(silence=0.3))
    assert not one.good
    assert one.fault is not None
    assert one.fault.kind == kind, one.fault
    assert said in one.fault.message, one.fault
    assert one.ended >= one.scheduled


def test_retry_after_is_told() -> None:
    (one,) = _run(lambda number: [send(b"HTTP/1.1 429 x\r\nRetry-After: 2.5\r\nContent-Length: 2\r\n\r\nno")])
    assert one.retry_after == 2.5


def test_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    few = Few(3)
    loop = Loop(_address(port))
    loop.run(few)
    loop.close()
    assert [one.fault.kind for one in few.done if one.fault] == ["refused"] * 3
    assert "connection refused" in few.done[0].fault.message
    with pytest.raises(OSError, match="connection refused"):
        Loop(_address(port)).open(4)


def test_a_connection_that_was_closed_while_idle_is_no_failure() -> None:
    """uvicorn closes what lies idle: the request goes out again on a new connection, with a new stamp."""

    def script(number: int) -> list[Act]:
        # The second request meets a connection that ends as it comes; what it is sent on again is another.
        return [close] if number == 1 else good()

    first, second = _run(script, count=2)
    assert first.good
    assert second.good
    assert (first.reconnects, second.reconnects) == (0, 1)
    # A server that does so again is at fault.
    faults = _run(lambda number: good() if number == 0 else [close], count=2)
    assert [one.good for one in faults] == [True, False]


def test_comments_keep_alive_and_are_no_tokens() -> None:
    script = [send(OK), *(act for _ in range(4) for act in (wait(0.15), send(chunk(b": keep-alive\n\n")))),
              send(chunk(event({"content": "late"}, "stop")), b"0\r\n\r\n")]  # fmt: skip
    (one,) = _run(lambda number: script, patience=Patience(silence=0.3))
    assert one.good
    assert one.first_token - one.sent > 0.5e9
    assert one.first_byte < one.first_token


def test_an_event_of_a_megabyte_in_odd_pieces() -> None:
    data = OK + chunk(event({"content": "x" * 2**20})) + chunk(event({"content": ""}, "stop")) + b"0\r\n\r\n"
    pieces = [send(data[at : at + 4099]) for at in range(0, len(data), 4099)]
    (one,) = _run(lambda number: pieces)
    assert one.good
    assert len(one.stamps) == 1
    assert one.bytes_in == len(data)


def test_a_request_of_a_megabyte() -> None:
    body = b"x" * 2**20
    data = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with Scripted(lambda number: good()) as server:
        loop, few = Loop(_address(server.port)), Few(4, 2, data)
        loop.run(few)
        loop.close()
        assert all(one.good for one in few.done)
        assert server.requests == [data] * 4


def test_reasoning_comes_before_the_answer() -> None:
    script = [send(OK, chunk(event({"reasoning_content": "hm"}))), wait(0.1),
              send(chunk(event({"content": "yes"}, "stop")), chunk(DONE), b"0\r\n\r\n")]  # fmt: skip
    (one,) = _run(lambda number: script)
    assert one.good
    assert len(one.stamps) == 2
    assert one.answer_at - one.first_token > 0.08e9


def test_the_end_of_a_run_breaks_off_what_is_under_way() -> None:
    with Scripted(lambda number: [send(OK, chunk(event({"content": "a"}))), wait(20)]) as server:
        loop, few = Loop(_address(server.port)), Few(3, 3)
        few.until = time.monotonic_ns() + 300_000_000
        start = time.monotonic()
        loop.run(few)
        loop.close()
    assert time.monotonic() - start < 5
    assert [one.fault.kind for one in few.done if one.fault] == ["cancelled"] * 3
    assert all(len(one.stamps) == 1 for one in few.done)


def test_many_requests_of_which_some_fail() -> None:
    """One in twenty is refused: exactly those are."""
    done = _run(
        lambda number: [send(b"HTTP/1.1 500 x\r\nContent-Length: 0\r\n\r\n")] if number % 20 == 0 else good(2), 2000, 32
    )
    assert len(done) == 2000
    assert sum(one.fault is not None and one.fault.kind == "status" for one in done) == 100
    assert sum(one.good for one in done) == 1900


def test_over_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        server = Scripted(lambda number: good(), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with server:
        loop, few = Loop(Address(socket.AF_INET6, "::1", server.port, "localhost")), Few(1)
        loop.run(few)
        loop.close()
        assert few.done[0].good


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", folder / "key.pem", "-out", folder / "cert.pem",
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"], capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("no openssl here")
    return folder


def _tls(folder: Path, *, trusted: bool) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    client = ssl.create_default_context(cafile=str(folder / "cert.pem") if trusted else None)
    return server, client


def test_over_tls_with_the_kernels_stamps(certificate: Path) -> None:
    server_side, client_side = _tls(certificate, trusted=True)
    with Scripted(lambda number: good(5), tls=server_side) as server:
        loop, few = Loop(_address(server.port, "localhost"), tls=client_side), Few(20, 4)
        assert loop.open(4) == 4
        time.sleep(0.05)  # the kernel begins to stamp a moment after it is asked
        loop.run(few)
        loop.close()
    assert all(one.good and len(one.stamps) == 5 for one in few.done), few.done[0].fault
    assert server.connections == 4
    if sys.platform == "linux":
        assert all(one.kernel for one in few.done)


def test_certificates_are_checked(certificate: Path) -> None:
    server_side, client_side = _tls(certificate, trusted=False)
    with Scripted(lambda number: good(), tls=server_side) as server:
        loop, few = Loop(_address(server.port, "localhost"), tls=client_side), Few(1)
        loop.run(few)
        assert few.done[0].fault is not None
        assert few.done[0].fault.kind == "tls"
        assert "self" in few.done[0].fault.message
        # Another's certificate.
        _, trusting = _tls(certificate, trusted=True)
        few = Few(1)
        Loop(_address(server.port, "example.org"), tls=trusting).run(few)
        assert few.done[0].fault is not None
        assert "ostname mismatch" in few.done[0].fault.message


def test_more_connections_than_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource", reason="no limits of files here")
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: told.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 4096))
    allow_files(100)
    assert told == []
    allow_files(1000)  # 64 more than connections
    assert told == [(1064, 4096)]
    with pytest.raises(KvctlError, match="5,000 connections take 5,064 open files, and 4,096 are allowed"):
        allow_files(5000)
