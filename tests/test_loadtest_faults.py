"""Servers that misbehave, one by one: what the loop makes of them is a success only where there was one, and never a hang."""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from email.utils import formatdate
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scripted_server import DONE, OK, Act, Scripted, chunk, close, event, good, reset, send, wait
from test_loadtest_loop import Few, _address, _run

from kvctl.loadtest import loop as loop_module
from kvctl.loadtest.deltas import NoEventError, Said, Usage, read
from kvctl.loadtest.exchange import Exchange
from kvctl.loadtest.http1 import ProtocolError, Response
from kvctl.loadtest.loop import Loop, Patience
from kvctl.loadtest.sse import EventError, Events

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
STREAM = event({"content": "é"}) + event({"content": "b"}, "stop") + DONE


def _one(script: Sequence[Act], silence: float = 5.0) -> Exchange:
    (one,) = _run(lambda number: script, patience=Patience(silence=silence))
    return one


def _fault(script: Sequence[Act], silence: float = 5.0) -> tuple[str, str]:
    one = _one(script, silence)
    assert one.fault is not None
    assert not one.good
    return one.fault.kind, one.fault.message


# -- oddities that are none of the server's faults ------------------------------------------------------


def _bytes(data: bytes, pause: float = 0.0) -> list[Act]:
    """A byte at a time, each in a packet of its own."""
    return [act for at in range(len(data)) for act in (send(data[at : at + 1]), wait(pause))]


@pytest.mark.parametrize("script", [
    # A size with an extension, in upper case, with zeros before it; trailers.
    [send(HEAD, b"Transfer-Encoding: chunked\r\n\r\n", b"%04X;name=\"v;\"\r\n%b\r\n" % (len(STREAM), STREAM), b"000\r\nX-Sum: 1\r\nY: 2\r\n\r\n")],
    # Chunks that end within a character, and packets that end within CRLF.
    [send(HEAD, b"Transfer-Encoding: chunked\r\n\r\n"), *(send(part) for at in range(0, len(STREAM), 7)
      for part in (b"%x\r" % len(STREAM[at : at + 7]), b"\n" + STREAM[at : at + 7] + b"\r", b"\n")), send(b"0\r\n\r"), send(b"\n")],
    # No chunks: until the connection ends, or of a length.
    [send(HEAD, b"\r\n", STREAM), close],
    [send(HEAD, b"Content-Length: %d\r\n\r\n" % len(STREAM), STREAM)],
    # HTTP/1.0, with what ends the connection.
    [send(HEAD.replace(b"1.1", b"1.0"), b"\r\n", STREAM), close],
    # Interim answers before the real one (RFC 9110, 15.2).
    [send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n", OK, chunk(STREAM), b"0\r\n\r\n")],
    # A byte at a time, the head too.
    _bytes(OK + chunk(STREAM) + b"0\r\n\r\n"),
], ids=["extensions", "cut anywhere", "until the end", "of a length", "HTTP/1.0", "1xx", "byte by byte"])  # fmt: skip
def test_odd_ways_to_say_the_same(script: Sequence[Act]) -> None:
    one = _one(script)
    assert one.good, one.fault
    assert (len(one.stamps), one.finish) == (2, "stop")


def test_slow_headers_are_waited_for() -> None:
    """A head that takes longer than the silence that is borne, but is never silent for so long."""
    data = b"HTTP/1.1 200 OK\r\nA: b\r\n"
    assert _one(
        [*_bytes(data, 0.02), send(HEAD[17:], b"Transfer-Encoding: chunked\r\n\r\n", chunk(STREAM), b"0\r\n\r\n")],
        silence=0.3,
    ).good


def test_connections_that_end_after_every_answer() -> None:
    """With Connection: close, and without a word: each request gets its answer, and none is sent twice."""
    said = HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + chunk(STREAM) + b"0\r\n\r\n"
    for script in ([send(said), close], [send(OK, chunk(STREAM), b"0\r\n\r\n"), close]):
        with Scripted(lambda number, script=script: script) as server:  # type: ignore[misc]
            loop, few = Loop(_address(server.port)), Few(20, 4)
            few.pause = 2_000_000
            loop.run(few)
            loop.close()
            assert [one.fault for one in few.done] == [None] * 20
            assert len(server.requests) == 20


# -- faults ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("script", "kind", "said"), [
    ([send(HEAD, b"Content-Encoding: gzip\r\n\r\n", gzip.compress(STREAM)), close], "protocol", "compressed (gzip)"),
    ([send(b"HTTP/1.1 307 Temporary Redirect\r\nLocation: https://other/v1\r\nContent-Length: 0\r\n\r\n")], "status", "307 to https://other/v1"),
    ([send(b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nContent-Length: 89\r\n\r\n"
           b"<html><head><title>x</title></head><body>\n<h1>Bad Gateway</h1><hr>nginx</body></html>    ")], "status", "502: Bad Gateway nginx"),
    ([send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")], "protocol", "application/json, no stream"),
    ([send(OK, chunk(STREAM), b"0\r\n\r\nHTTP/1.1 200 OK\r\n")], "protocol", "bytes come after the end"),
    ([send(HEAD, b"Content-Length: 10\r\n\r\n", STREAM)], "protocol", "bytes come after the end"),
    ([send(HEAD, b"Content-Length: -1\r\n\r\n", STREAM)], "protocol", "is no length"),
    ([send(HEAD, b"Content-Length: 99999999999999999999\r\n\r\n", STREAM)], "protocol", "is no length"),
    ([send(HEAD, b"Transfer-Encoding: chunked\r\n\r\n8000000000000000\r\n", STREAM)], "protocol", "no size of a chunk"),
    ([send(HEAD, b"Transfer-Encoding: chunked\r\n\r\n7fffffffffffff\r\n", STREAM), close], "truncated", "in the middle"),
    ([send(HEAD, b"Content-Length: 999999999999999999\r\n\r\n", STREAM), close], "truncated", "in the middle"),
    ([send(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50_000)], "protocol", "more than 256 KiB"),
    ([send(HEAD, b"Transfer-Encoding: chunked\r\n\r\n1;" + b"x" * 20_000)], "protocol", "no size of a chunk"),
    ([send(OK), *[send(chunk(b"x" * 2**20))] * 17], "protocol", "an event of more than 16 MiB"),
    ([send(OK), *[send(chunk(b"data\n" * 2**17))] * 10], "protocol", "an event of more than 16 MiB"),
    ([send(OK, *[chunk(b"x")] * 100_000), close], "truncated", "in the middle"),
    ([send(OK, chunk(b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n')), close], "protocol", "no JSON"),
    ([send(OK, chunk(b'data: {"choices":' + b"[" * 100_000 + b"\n\n")), close], "protocol", "no JSON"),
    ([send(OK, chunk(event({"content": "a"})), chunk(event({}, "abort")), chunk(DONE), b"0\r\n\r\n")], "server", "finish_reason abort"),
    ([send(OK, chunk(event({"content": "a"})), chunk(b"event: error\ndata: {\"error\":{\"message\":\"out of memory\"}}\n\n"), b"0\r\n\r\n")], "server", "out of memory"),
    ([send(OK, chunk(event({"content": "a"})), b"0\r\n\r\n")], "truncated", "without finish_reason"),
    ([send(b"\x16\x03\x03\x00\x02\x02\x28")], "protocol", "does not answer in HTTP"),  # a server that wants TLS
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_faults_of_answers(script: Sequence[Act], kind: str, said: str) -> None:
    found = _fault(script)
    assert found[0] == kind, found
    assert said in found[1], found


def _for_ever(data: bytes, pause: float = 0.02) -> Act:
    def act(sock: socket.socket) -> None:
        while True:
            sock.sendall(data)
            time.sleep(pause)

    return act


@pytest.mark.parametrize(
    "data", [b"X", b": keep-alive\n\n", event({"content": ""})], ids=["a head", "comments", "empty events"]
)
def test_what_goes_on_for_ever_is_not_waited_for(data: bytes) -> None:
    """Bytes come all the time, so that nothing is ever silent: all of an answer has its limit too, an hour if nothing else is said."""
    begin = b"HTTP/1.1 200 OK\r\nX: " if data == b"X" else HEAD + b"\r\n"
    start = time.monotonic()
    (one,) = _run(lambda number: [send(begin), _for_ever(data)], patience=Patience(silence=0.3, whole=0.5))
    assert one.fault is not None
    assert (one.fault.kind, one.fault.message) == ("timeout", "the answer is not complete after 0.5 s")
    assert 0.5 < time.monotonic() - start < 5
    assert Patience(silence=1).whole == 3600


def test_an_answer_without_an_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that writes tokens on and on, as fast as it can, whatever was asked."""
    monkeypatch.setattr(loop_module, "_MOST", 2**20)
    one = _one([send(OK), _for_ever(chunk(event({"content": "a"})) * 100, 0)])
    assert one.fault is not None
    assert (one.fault.kind, one.fault.message) == ("protocol", "an answer of more than 1 MiB")
    # At least 100 bytes an event: of 8 bytes a stamp no more than a hundred kilobytes are held.
    assert len(one.stamps) < 2 * 2**20 / 100


class Hasty(Scripted):
    """Answers as soon as it has the head of a request."""

    def __init__(self, answer: bytes, *, end: bool) -> None:
        self.answer, self.end = answer, end
        super().__init__(lambda number: ())

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.recv(64)
            self.requests.append(b"")
            sock.sendall(self.answer)
            if self.end:
                time.sleep(0.1)  # what is still to be sent would be lost with the connection
                reset(sock)
            else:
                time.sleep(0.3)
                while sock.recv(2**20):
                    pass


@pytest.mark.parametrize(("answer", "end", "kind", "said"), [
    (b"HTTP/1.1 413 Too Large\r\nContent-Length: 7\r\n\r\ntoo big", False, "status", "413: too big"),
    (b"HTTP/1.1 413 Too Large\r\n\r\ntoo big", True, "status", "413"),
    (OK + chunk(STREAM) + b"0\r\n\r\n", False, "protocol", "before the request was sent whole"),
    (OK + chunk(event({"content": "a"})), False, "protocol", "before the request was sent whole"),
])  # fmt: skip
def test_answers_that_come_before_the_request_was_sent(answer: bytes, end: bool, kind: str, said: str) -> None:
    """A body of 32 MB is no sooner begun than it is answered: no time to a token can be counted from its end."""
    body = b"x" * 32_000_000
    data = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with Hasty(answer, end=end) as server:
        loop, few = Loop(_address(server.port), patience=Patience(silence=3)), Few(1, data=data)
        loop.run(few)
        loop.close()
    (one,) = few.done
    assert one.fault is not None
    assert (one.fault.kind, said in one.fault.message) == (kind, True), one.fault


def test_a_restart_in_the_middle() -> None:
    """The first server goes away under four requests, another takes its port a moment later: those four are lost, no other is."""
    first = Scripted(lambda number: good() if number < 20 else [send(OK, chunk(event({"content": "a"}))), wait(30)])
    port = first.port
    second: list[Scripted] = []

    def restart() -> None:
        while len(first.requests) < 24:
            time.sleep(0.005)
        first.__exit__()
        for sock in first.open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        second.append(Scripted(lambda number: good(), port=port))

    thread = threading.Thread(target=restart)
    thread.start()
    loop, few = Loop(_address(port)), Few(60, 4)
    few.pause = 20_000_000
    loop.run(few)
    loop.close()
    thread.join()
    second[0].__exit__()
    kinds = [one.fault.kind for one in few.done if one.fault is not None]
    assert len(few.done) == 60
    assert set(kinds) <= {"truncated", "reset", "refused"}
    assert kinds.count("truncated") + kinds.count("reset") >= 4
    assert sum(one.good for one in few.done) >= 40
    assert few.done[-1].good


def test_no_more_files_are_the_clients_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    loop, few = Loop(_address(1)), Few(1)
    monkeypatch.setattr(loop_module.socket, "socket", none)
    loop.run(few)
    monkeypatch.undo()
    loop.close()
    assert few.done[0].fault is not None
    assert few.done[0].fault.message == "this client may open no more files (ulimit -n)"


@pytest.mark.parametrize(("value", "seconds"), [
    (b"2", 2), (b"0.5", 0.5), (b"nan", None), (b"inf", None), (b"-1", None), (b"1e400", None), (b"soon", None), (b"", None), (b"9" * 30, 1e9),
    (b"Wed, 21 Oct 2015 07:28:00 GMT", 0), (b"in 90 s", 90),
])  # fmt: skip
def test_retry_after_is_a_number_or_a_date(value: bytes, seconds: float | None) -> None:
    value = formatdate(time.time() + 90, usegmt=True).encode() if value == b"in 90 s" else value
    one = _one([send(b"HTTP/1.1 503 x\r\nRetry-After: %b\r\nContent-Length: 0\r\n\r\n" % value)])
    assert one.retry_after == (None if seconds is None else pytest.approx(seconds, abs=60))


# -- TLS -------------------------------------------------------------------------------------------------

EXPIRED = Path(__file__).parent / "data" / "tls-expired"


def _over_tls(folder: Path, name: str, client: ssl.SSLContext) -> Exchange:
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    with Scripted(lambda number: good(), tls=server_side) as server:
        loop, few = Loop(_address(server.port, name), tls=client), Few(1)
        loop.run(few)
        loop.close()
    return few.done[0]


def test_an_expired_certificate() -> None:
    """Of localhost, trusted, and over since 2 January 2020."""
    client = ssl.create_default_context(cafile=str(EXPIRED / "cert.pem"))
    fault = _over_tls(EXPIRED, "localhost", client).fault
    assert fault is not None
    assert (fault.kind, fault.message) == ("tls", "certificate has expired")
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    assert _over_tls(EXPIRED, "localhost", client).good


def test_a_server_without_tls() -> None:
    for answer in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b""):
        with Scripted(lambda number: [], greets=answer) as server:
            loop, few = Loop(_address(server.port, "localhost"), tls=ssl.create_default_context()), Few(1)
            loop.run(few)
            loop.close()
        assert few.done[0].fault is not None
        assert few.done[0].fault.kind in ("tls", "reset", "refused")


# -- usage, wherever it is (sglang#24254, #24266) ---------------------------------------------------------


def _usage(completion: int | None) -> dict[str, object]:
    return {"prompt_tokens": 5, "completion_tokens": completion}


@pytest.mark.parametrize(("events", "completion"), [
    ([event({"content": "a"}), event({"content": "b"}, "stop"), event(None, usage=_usage(7)), DONE], 7),
    ([event({"content": "a"}), event({"content": "b"}, "stop", _usage(7)), DONE], 7),
    ([event({"content": "a"}, None, _usage(3)), event({"content": "b"}, "stop", _usage(7)), DONE], 7),
    ([event({"content": "a"}, None, _usage(3)), event({"content": "b"}, "stop", _usage(6)), event(None, usage=_usage(7))], 7),
    ([event({"content": "a"}, None, _usage(7)), event({"content": "b"}, "stop"), event(None, usage=_usage(None))], 7),
    # Neither finish_reason nor [DONE]: usage alone ends it too.
    ([event({"content": "a"}), event({"content": "b"}), event(None, usage=_usage(7))], 7),
])  # fmt: skip
def test_usage_is_found_wherever_it_is(events: list[bytes], completion: int) -> None:
    one = _one([send(OK, *map(chunk, events), b"0\r\n\r\n")])
    assert one.good, one.fault
    assert one.usage is not None
    assert one.usage.completion == completion


def test_usage_before_any_token_ends_nothing() -> None:
    assert (
        _fault([send(OK, chunk(event(None, usage=_usage(0))), chunk(event({"content": "a"})), b"0\r\n\r\n")])[0]
        == "truncated"
    )


@pytest.mark.parametrize(
    "number", ["-5", "1e999", "NaN", "Infinity", "true", '"7"', "1" + "0" * 400, "9007199254740994", "[7]", "null"]
)
def test_numbers_of_tokens_that_are_none(number: str) -> None:
    data = b'{"choices":[],"usage":{"prompt_tokens":%b,"completion_tokens":7}}' % number.encode()
    with contextlib.suppress(NoEventError):
        assert read(data) == Said(usage=Usage(None, 7, None), last=True)


@pytest.mark.parametrize("data", [
    b'{"error":{"message":"\xff"}}', b'{"error":' + b'{"error":' * 900 + b"1" + b"}" * 901, b'{"error":' + b"9" * 5000 + b"}",
    b'{"error":[' + b"[" * 900 + b"]" * 901 + b"}", b'{"object":"error","message":' + b"[" * 500 + b"]" * 500 + b"}",
])  # fmt: skip
def test_errors_that_cannot_be_shown_are_errors_still(data: bytes) -> None:
    with contextlib.suppress(NoEventError):
        assert read(data).error


def test_what_is_no_error() -> None:
    for nothing in ("false", '""', "{}", "null", "[]"):
        assert read(b'{"error":%b,"choices":[{"text":"a"}]}' % nothing.encode()) == Said(answer=True, text="a")


# -- any bytes ---------------------------------------------------------------------------------------------

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["choices", "delta", "content", "usage", "prompt_tokens", "completion_tokens", "prompt_tokens_details", "cached_tokens", "error",
         "message", "object", "finish_reason", "index", "text", "tool_calls", "function", "reasoning"]), inner, max_size=5), max_leaves=12,
)  # fmt: skip
_whole = st.one_of(
    st.binary(max_size=60),
    _json.map(lambda value: b"data: " + json.dumps(value).encode() + b"\n\n"),
    st.sampled_from([event({"content": "a"}), event({}, "stop"), DONE, b": x\n\n", b"data\n", b"\r", b"\n", b"\xef\xbb\xbf", b"\xff", b"data: {"]),
)  # fmt: skip


def _read_all(pieces: Sequence[bytes]) -> None:
    """As the loop does; only errors of the three's own come out."""
    response, events = Response(), Events()
    try:
        for piece in pieces:
            for part in response.feed(piece):
                for one in events.feed(part):
                    said = read(one)
                    assert said.usage is None or (said.usage.completion or 0) >= 0
            if response.done:
                break
        response.closed()
    except (ProtocolError, EventError, NoEventError):
        pass


@settings(max_examples=150, deadline=None)
@given(st.lists(_whole, max_size=8), st.sampled_from([b"\r\n", b"Transfer-Encoding: chunked\r\n\r\n", b"Content-Length: 99\r\n\r\n"]),
       st.lists(st.integers(0, 300), max_size=6), st.binary(max_size=20))  # fmt: skip
@example([b'data: {"error":{"message":"\xff"}}\n\n'], b"\r\n", [], b"")
@example([b'data: {"usage":{"prompt_tokens":1e999}}\n\n'], b"\r\n", [], b"")
def test_any_bytes_end_in_an_answer_or_in_an_error_of_their_own(
    parts: list[bytes], head: bytes, cuts: list[int], junk: bytes
) -> None:
    body = b"".join(map(chunk, filter(None, parts))) if b"chunked" in head else b"".join(parts)
    data = HEAD + head + body + junk
    places = sorted({at for at in cuts if at < len(data)})
    _read_all([data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)])


def _seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize("size", [1, 40])
def test_small_pieces_take_time_by_their_number(size: int) -> None:
    """Chunks of a byte in reads of 256 KB: four times as many take four times as long, and not sixteen times."""

    def work(count: int) -> None:
        data = chunk(b"x" * size) * count
        response, events = Response(), Events()
        response.feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for at in range(0, len(data), 256 * 1024):
            for part in response.feed(data[at : at + 256 * 1024]):
                events.feed(part)

    count = 12_000
    assert _seconds(lambda: work(4 * count)) < 9 * _seconds(lambda: work(count))


# -- what is asked untimed: /v1/models, /metrics, /props, /slots, /tokenize ------------------------------------


def _reply(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(body)) + body


HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "text": b"no",
    "number": b"1e999",
    "null": b"null",
    "deep": b"[" * 100_000,
    "deep objects": b'{"data":' * 50_000 + b"1" + b"}" * 50_000,
    "binary": bytes(range(256)),
    "wrong types": b'{"data":[1,null,{"id":7},{"id":["m"]},{"id":""}],"total_slots":"four","default_generation_settings":[],"version":[1],"count":"7","tokens":{}}',
    "huge numbers": b'{"data":[{"id":"m","owned_by":"vllm","max_model_len":1'
    + b"0" * 400
    + b'}],"total_slots":-1,"count":1e999,"tokens":[]}',
    "NaN": b'{"data":[{"id":"m","max_model_len":NaN}],"total_slots":NaN,"count":NaN}',
    "escapes": b'{"data":[{"id":"m\\u001b]0;gone\\u0007\\u009b31m","owned_by":"vllm","max_model_len":true}]}',
    "many": b'{"data":[' + b'{"id":"m"},' * 5000 + b'{"id":"' + b"n" * 10_000 + b'"}]}',
}


@contextlib.contextmanager
def _hostile(answer: Callable[[bytes], Sequence[Act]]) -> Iterator[str]:
    with Scripted(lambda number: answer(server.requests[number].split()[1])) as server:
        yield f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_answers_are_not_available(body: bytes) -> None:
    from kvctl.errors import KvctlError
    from kvctl.loadtest.asks import COMPLETIONS, Wire
    from kvctl.loadtest.counting import counter
    from kvctl.loadtest.metrics import Watch
    from kvctl.loadtest.target import Client, Trust, look, read_url

    with _hostile(lambda path: [send(_reply(body))]) as url:
        place = read_url(url)
        client = Client(place, Trust(), {})
        found = look(client)
        assert found.context is None
        assert found.slots is None
        assert all(0 < len(name) <= 500 for name in found.models)
        assert len(found.models) <= 1000
        for engine in ("vllm", "llama.cpp", "unknown"):
            with pytest.raises(KvctlError):
                counter(client, Wire(place, COMPLETIONS, "m", engine))[0]("a b")
        watch = Watch(client, "llama.cpp")
        watch.look()
        assert all(not sample.values for sample in watch.samples)


def test_bytes_of_any_kind_as_pages_of_metrics() -> None:
    """What cannot be a number of the kind is not available: none of it comes into a report, where JSON has no NaN."""
    from kvctl.loadtest.metrics import of_slots
    from kvctl.loadtest.metrics import read as read_page

    for value in ("NaN", "+Inf", "-1", "7", "1e999", "x", ""):
        with contextlib.suppress(ValueError):
            assert "kv_use" not in read_page(f"vllm:kv_cache_usage_perc {value}\n", "vllm").values
    for slots in (
        None,
        7,
        {},
        [1],
        [{"n_ctx": "x"}],
        [{"n_ctx": float("inf"), "is_processing": True, "n_prompt_tokens": float("nan")}],
    ):
        assert set(of_slots(slots).values()) <= {0}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=30), st.sampled_from(
    ["vllm:kv_cache_usage_perc", "{", "}", 'engine="0"', ",", "=", " 0.5", " NaN", "\n", "vllm:cache_config_info{", '"', "\\", "#", " 1 2"])), max_size=12))  # fmt: skip
def test_any_text_is_a_page_or_refused(parts: list[str]) -> None:
    from kvctl.loadtest.metrics import read as read_page

    with contextlib.suppress(ValueError):
        assert all(0 <= value < float("inf") for value in read_page("".join(parts), "vllm").values.values())


@pytest.mark.parametrize("script", [
    [_for_ever(b"H", 0.05)],
    [send(b"HTTP/1.1 200 OK\r\nX: "), _for_ever(b"y", 0.05)],
    [send(b"HTTP/1.1 200 OK\r\n\r\n"), _for_ever(b"y", 0.05)],
    [wait(3)],
    [send(b"HTTP/1.1 200 OK\r\nContent-Length: 104857600\r\n\r\n"), _for_ever(b"y" * 2**20, 0)],
    [send(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n", gzip.compress(b"0" * 50_000_000)), close],
    [send(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nno"), close],
    [send(b"\x00\x01\x02"), close],
    [reset],
], ids=["no head", "a head", "a body", "silence", "100 MB", "a bomb", "no gzip", "binary", "reset"])  # fmt: skip
def test_questions_end(script: Sequence[Act], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes come all the time, or too many of them: one plain line or nothing, in the time that is given."""
    from kvctl.errors import KvctlError
    from kvctl.loadtest import target

    monkeypatch.setattr(target, "_SECONDS", 0.4)
    start = time.monotonic()
    with _hostile(lambda path: script) as url:
        client = target.Client(target.read_url(url), target.Trust(), {})
        said = None
        try:
            assert client.get("/v1/models") is None
        except KvctlError as error:
            said = error
    assert said is None or "\n" not in said.message
    assert time.monotonic() - start < 3


def test_what_a_server_can_do_without_may_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lists its models, and says nothing at all to any other question: a server without metrics, of no known version."""
    from kvctl.loadtest import target

    monkeypatch.setattr(target, "_SECONDS", 0.2)
    listed = _reply(b'{"data":[{"id":"m","owned_by":"vllm","max_model_len":512}]}')
    with _hostile(lambda path: [send(listed)] if path == b"/v1/models" else [wait(2)]) as url:
        found = target.look(target.Client(target.read_url(url), target.Trust(), {}))
    assert (found.engine, found.version, found.models, found.context, found.metrics) == (
        "vllm",
        None,
        ("m",),
        512,
        False,
    )


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


def test_questions_go_to_the_address_that_is_loaded(certificate: Path) -> None:
    """By name in the head and in TLS, so that certificates hold; by address in the connection, so that no other replica answers."""
    from kvctl.errors import KvctlError
    from kvctl.loadtest.target import Client, Trust, read_url

    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    with Scripted(lambda number: [send(_reply(b"{}"))], tls=server_side) as server:
        place = read_url(f"https://localhost:{server.port}")
        trust = Trust(ca=str(certificate / "cert.pem"))
        found = Client(place, trust, {}, _address(server.port)).get("/metrics")
        assert found is not None
        assert b"localhost:%d" % server.port in server.requests[0]
        with pytest.raises(KvctlError, match="ertificate"):
            Client(place, Trust(), {}, _address(server.port)).get("/metrics")
        # Of another name it is no certificate.
        with pytest.raises(KvctlError, match="ostname mismatch"):
            Client(read_url(f"https://example.org:{server.port}"), trust, {}, _address(server.port)).get("/metrics")
