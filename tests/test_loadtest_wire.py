"""Bytes of answers: HTTP/1.1, server-sent events, and what engines say in them.

Streams are written by hand after RFC 9112, the WHATWG's text and what the engines send; every one is read in every
possible pair of pieces, byte by byte, and in pieces drawn by lot.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.loadtest.deltas import Called, NoEventError, Said, Usage, read
from kvctl.loadtest.http1 import ProtocolError, Response
from kvctl.loadtest.sse import EventError, Events


def _cuts(data: bytes) -> Iterator[list[bytes]]:
    yield [data]
    yield [data[at : at + 1] for at in range(len(data))]
    for at in range(1, len(data)):
        yield [data[:at], data[at:]]
    lot = random.Random(7)
    for _ in range(20):
        places = sorted(lot.sample(range(1, len(data)), min(5, len(data) - 1)))
        yield [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"


@pytest.mark.parametrize(("data", "body", "status", "keeps"), [
    (HEAD + b"Content-Length: 5\r\n\r\nhello", b"hello", 200, True),
    (HEAD + b"Content-Length: 0\r\n\r\n", b"", 200, True),
    (HEAD + b"content-length: 5, 5\r\n\r\nhello", b"hello", 200, True),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", b"hello", 200, True),
    (HEAD + b"Transfer-Encoding: Chunked\r\nConnection: Close\r\n\r\n2;a=b\r\nhe\r\n3 \r\nllo\r\n000\r\nX-Sum: 1\r\n\r\n", b"hello", 200, False),
    (b"HTTP/1.1 429 Too Many Requests\nRetry-After: 3\nContent-Length: 2\n\nno", b"no", 429, True),
    (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nA\n0123456789\n0\n\n", b"0123456789", 200, True),
    (b"HTTP/1.1 204 No Content\r\n\r\n", b"", 204, True),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", b"x", 200, False),
    (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\nx", b"x", 200, True),
    (b"HTTP/1.1 200\r\nContent-Length: 1\r\n\r\nx", b"x", 200, True),
])  # fmt: skip
def test_responses(data: bytes, body: bytes, status: int, keeps: bool) -> None:
    for pieces in _cuts(data):
        response = Response()
        got = b""
        for number, piece in enumerate(pieces):
            got += b"".join(response.feed(piece))
            assert response.done == (number == len(pieces) - 1), pieces
        assert (got, response.status, response.keeps) == (body, status, keeps)


def test_a_body_that_ends_with_the_connection() -> None:
    response = Response()
    assert b"".join(response.feed(b"HTTP/1.1 200 OK\r\n\r\nall")) == b"all"
    assert not response.done
    assert response.closed()
    cut = Response()
    cut.feed(HEAD + b"Content-Length: 5\r\n\r\nhell")
    assert not cut.closed()


@pytest.mark.parametrize(("data", "said"), [
    (b"<html>no</html>", "does not answer in HTTP/1.1"),
    (b"HTTP/2 200\r\n\r\n", "does not answer in HTTP/1.1"),
    (b"HTTP/1.1 20\r\n\r\n", "does not answer in HTTP/1.1"),
    (b"SSH-2.0-OpenSSH_9.6\r\n", "does not answer in HTTP/1.1"),
    (HEAD + b"no colon\r\n\r\n", "is no header"),
    (HEAD + b"Content-Length : 5\r\n\r\nhello", "is no header"),
    (HEAD + b"Content-Length: five\r\n\r\nhello", "is no length"),
    (HEAD + b"Content-Length: 5, 6\r\n\r\nhello", "is no length"),
    (HEAD + b"Content-Length: -5\r\n\r\nhello", "is no length"),
    (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", "both a length and chunks"),
    (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "transfer coding"),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "no size of a chunk"),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n", "no size of a chunk"),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1_0\r\n", "no size of a chunk"),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFFFFF\r\n", "no size of a chunk"),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhello\r\n", "longer than it says"),
    (HEAD + b"Content-Length: 2\r\n\r\nhello", "come after the end"),
    (HEAD + b"X: " + b"a" * 300_000, "more than 256 KiB"),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 9000, "do not end"),
    (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * 20_000, "no size of a chunk"),
])  # fmt: skip
def test_what_is_no_response(data: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        Response().feed(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for start in (b"", HEAD + b"Transfer-Encoding: chunked\r\n\r\n", HEAD + b"Content-Length: 20\r\n\r\n"):
        response = Response()
        try:
            response.feed(start + data)
            response.closed()
        except ProtocolError:
            pass


def test_a_chunk_of_a_megabyte() -> None:
    data = b"x" * 2**20
    response = Response()
    response.feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n100000\r\n")
    got = [part for at in range(0, len(data), 65536) for part in response.feed(data[at : at + 65536])]
    assert b"".join(got) == data
    response.feed(b"\r\n0\r\n\r\n")
    assert response.done


# -- events -----------------------------------------------------------------------------------------


def test_many_chunks_in_one_read_take_their_number_and_not_its_square() -> None:
    """Sixteen times as many take sixteen times as long, and 256 times where the rest is copied at each."""
    chunk = b"80\r\n" + b"x" * 128 + b"\r\n"
    took = []
    for count in (2_000, 32_000):
        response = Response()
        response.feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        began = time.process_time()
        parts = response.feed(chunk * count + b"3")  # and the beginning of one more
        took.append(time.process_time() - began)
        assert parts == [b"x" * 128] * count
        assert response.feed(b"\r\nabc\r\n0\r\n\r\n") == [b"abc"]
        assert response.done
    assert took[1] < 100 * max(took[0], 1e-4)
    odd = Response()
    odd.feed(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    # What is unusual among the usual: an extension, a line feed alone, capitals.
    assert odd.feed(chunk + b"3;a=b\r\nabc\r\n" + chunk + b"2\nde\n" + b"0A\r\n0123456789\r\n" + chunk) == [
        b"x" * 128, b"abc", b"x" * 128, b"de", b"0123456789", b"x" * 128,
    ]  # fmt: skip


@pytest.mark.parametrize(("data", "events", "comments"), [
    (b"data: a\n\ndata: b\n\n", [b"a", b"b"], 0),
    (b"\xef\xbb\xbfdata: a\r\n\r\ndata:b\r\rdata:  c\n\n", [b"a", b"b", b" c"], 0),
    (b": keep-alive\n\n:\n\nevent: token\nid: 7\ndata: x\ndata\ndata: y\n\n", [b"x\n\ny"], 2),
    (b"retry: 5\n\nevent: ping\n\ndata: x\n", [], 0),
    (b"data: \xc3\xa9\xff\n\n", [b"\xc3\xa9\xff"], 0),
    (b"data: [DONE]\r\n\r\n", [b"[DONE]"], 0),
    (b"\n\n\ndata:\n\n", [b""], 0),
    (b"data: one\n\ndata: t\rdata: wo\n\n", [b"one", b"t\nwo"], 0),
])  # fmt: skip
def test_events(data: bytes, events: list[bytes], comments: int) -> None:
    for pieces in _cuts(data):
        stream = Events()
        got = [event for piece in pieces for event in stream.feed(piece)]
        assert got == events, pieces
        assert stream.comments == comments


def test_the_usual_event_takes_the_short_way_and_is_the_same() -> None:
    stream = Events()
    assert stream.feed(b"data: first\n\n") == [b"first"]
    assert stream.feed(b"data: second\n\n") == [b"second"]
    assert stream.feed(b"data: thi") == []
    assert stream.feed(b"rd\n\n") == [b"third"]
    assert stream.feed(b"data: a\r") == []
    assert stream.feed(b"\ndata: b\n\n") == [b"a\nb"]
    assert stream.rest == b""


def _feed(stream: Events, part: bytes, times: int) -> None:
    for _ in range(times):
        stream.feed(part)


def test_an_event_without_an_end() -> None:
    for part in (b"x" * 2**20, b"data: " + b"x" * 2**20 + b"\n"):
        stream = Events()
        for _ in range(15):
            assert stream.feed(part) == []
        with pytest.raises(EventError, match="more than 16 MiB"):
            _feed(stream, part, 2)
    long = Events()
    assert [len(event) for event in long.feed(b"data: " + b"x" * 2**20 + b"\n\n")] == [2**20]


# -- what they say -----------------------------------------------------------------------------------


def _chat(delta: dict[str, object], **more: object) -> bytes:
    return json.dumps(
        {
            "id": "1",
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": delta, "finish_reason": None} | more],
        }
    ).encode()


@pytest.mark.parametrize(("data", "said"), [
    (b"[DONE]", Said(done=True)),
    (b" [DONE] ", Said(done=True)),
    (_chat({"role": "assistant", "content": ""}), Said()),
    (_chat({"role": "assistant", "content": None}), Said()),
    (_chat({"content": "Hi"}), Said(answer=True, text="Hi")),
    (_chat({"content": " "}), Said(answer=True, text=" ")),
    (_chat({"reasoning_content": "hm"}), Said(reasoning=True)),  # DeepSeek, vLLM, SGLang
    (_chat({"reasoning": "hm"}), Said(reasoning=True)),  # OpenRouter, vLLM from 0.11 on, Ollama
    (_chat({"content": "", "reasoning_content": ""}), Said()),
    (_chat({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}), Said(answer=True, calls=(Called(0, "", "f", ""),))),
    (_chat({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}), Said(answer=True, calls=(Called(0, "", "", "{"),))),
    (_chat({"tool_calls": []}), Said()),
    (_chat({"refusal": "no"}), Said(answer=True)),
    (_chat({}, finish_reason="stop"), Said(finish="stop")),
    (_chat({"content": [{"type": "text", "text": "parts"}]}), Said(answer=True, text="parts")),
    (b'{"choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":"length"}]}', Said(answer=True, finish="length", text="a")),
    (b'{"choices":[{"index":1,"text":"b"}]}', Said(answer=True)),
    (b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":3}}}', Said(usage=Usage(5, 7, 3), last=True)),
    (b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":7,"prompt_tokens_details":null}}', Said(usage=Usage(5, 7, None), last=True)),
    (b'{"choices":[],"usage":null}', Said()),
    (b'{"choices":[],"usage":{"prompt_tokens":"5","completion_tokens":7.0}}', Said(usage=Usage(None, 7, None), last=True)),
    (b'{"error":{"message":"out of\\nmemory","code":500}}', Said(error="out of memory")),
    (b'{"error":{"error":{"message":"deep"}}}', Said(error="deep")),
    (b'{"object":"error","message":"KV cache is full","code":400}', Said(error="KV cache is full")),
    (b'{"error":"plain"}', Said(error="plain")),
    (b'{"error":null,"choices":[{"text":"a"}]}', Said(answer=True, text="a")),
    (b"{}", Said()),
])  # fmt: skip
def test_what_events_say(data: bytes, said: Said) -> None:
    assert read(data) == said


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"nonsense", b'"text"', b"\xff\xfe", b'{"a":' * 100_000])
def test_what_no_server_says(data: bytes) -> None:
    with pytest.raises(NoEventError):
        read(data)
