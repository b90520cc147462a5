"""What `kvctl serve-test` asks a server: lengths, conversations, traces, prompts of a file; and when."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Outcome
from scripted_server import OK, Act, Scripted, chunk, event, good, send, wait
from test_serve_test import Engine, _json, _own_cache  # noqa: F401

from kvctl.errors import SourceError, UsageError
from kvctl.loadtest import asks, prompts
from kvctl.loadtest.connection import Address
from kvctl.loadtest.exchange import Exchange
from kvctl.loadtest.lengths import Fixed, Lognormal, Mix, Normal, Uniform
from kvctl.loadtest.load import MEASURED, Ask, Closed, Key, Length, Load, Open, constant
from kvctl.loadtest.loop import Loop
from kvctl.options_serve import read_lengths

Run = Callable[..., Outcome]
REQUEST = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"


# -- lengths -----------------------------------------------------------------------------------------


def test_lengths_as_they_are_written() -> None:
    assert read_lengths("512", "-i") == Fixed(512)
    assert read_lengths("4k", "-i") == Fixed(4096)
    assert read_lengths("200-1k", "-i") == Uniform(200, 1024)
    assert read_lengths("normal:512:64", "-i") == Normal(512, 64.0)
    assert read_lengths("lognormal:1k:0.8", "-i") == Lognormal(1024, 0.8)
    assert read_lengths("512:70+4k:30%", "-i") == Mix(((512, 70.0), (4096, 30.0)))
    assert read_lengths("1+2", "-i") == Mix(((1, 1.0), (2, 1.0)))
    for text in ("", "x", "0", "5-2", "-5", "normal:512", "normal:512:0", "normal:512:-3", "lognormal:512:9", "lognormal:0:1", "1:x+2", "1:0+2:1",
                 "normal:5:nan", "1:inf+2:1", "5-", "1+", "normal:5:1:1"):  # fmt: skip
        with pytest.raises(UsageError):
            read_lengths(text, "-i")


def test_lengths_as_they_are_drawn() -> None:
    lot = random.Random(1)

    def drawn(text: str) -> list[int]:
        spread = read_lengths(text, "-i")
        found = [spread.draw(lot) for _ in range(20_000)]
        assert min(found) >= spread.least
        assert spread.most is None or max(found) <= spread.most
        return found

    assert set(drawn("7")) == {7}
    # Of 11 lengths each comes 1,818 times, give or take four times √1,818 = 43.
    assert all(abs(count - 1818) < 172 for count in Counter(drawn("20-30")).values())
    found = drawn("normal:500:50")
    # The mean of 20,000 has an error of 50/√20,000 = 0.35, the deviation one of 50/√40,000 = 0.25.
    assert statistics.mean(found) == pytest.approx(500, abs=1.8)
    assert statistics.stdev(found) == pytest.approx(50, abs=1.3)
    found = drawn("lognormal:400:0.5")
    # Half are shorter than the median, 84.1% than the median times e^0.5 = 659.5.
    assert sum(one < 400 for one in found) / 20_000 == pytest.approx(0.5, abs=0.015)
    assert sum(one <= 659 for one in found) / 20_000 == pytest.approx(0.841, abs=0.015)
    assert Counter(drawn("10:3+20:1"))[10] / 20_000 == pytest.approx(0.75, abs=0.013)
    assert min(drawn("normal:2:50")) == 1


def test_requests_have_the_lengths_that_are_drawn(kvctl: Run) -> None:
    with Engine(lambda number, asked: engine.whole(asked)) as engine:
        outcome = kvctl(
            "serve-test", engine.url, "-i", "20-60", "-o", "2:1+4:1", "-n", "60", "--warmup", "0", "-c", "4", "--json"
        )
        assert outcome.code == 0, outcome.err
        sent = engine.bodies[1:]
        lengths = [engine.count(body) for body in sent]
        assert 20 <= min(lengths) < 28 < 52 < max(lengths) <= 60
        assert {body["max_tokens"] for body in sent} == {2, 4}
        found = outcome.json["loads"][0]
        assert found["all"]["tokens"]["input"] == sum(lengths)
        assert found["all"]["tokens"]["output"] == sum(body["max_tokens"] for body in sent)
        assert found["all"]["requests"]["short"] == 0
        assert found["designed_hit_rate"] is None
        assert found["step"]["work"]["input_tokens"] == {"kind": "uniform", "low": 20, "high": 60}
    # What has no bound is cut to the server's context, and that is counted.
    with Engine(lambda number, asked: engine.whole(asked), limit=64) as engine:
        outcome = kvctl(
            "serve-test", engine.url, "-i", "normal:55:20", "-o", "4", "-n", "40", "--warmup", "0", "--json"
        )
        assert outcome.code == 0, outcome.err
        assert max(engine.count(body) for body in engine.bodies) == 60
        assert (
            outcome.json["loads"][0]["lengths_changed"]
            >= sum(engine.count(body) == 60 for body in engine.bodies[1:]) - 8
            > 0
        )


# -- conversations -----------------------------------------------------------------------------------


def _numbered(number: int, asked: dict[str, Any], prompt: int, cached: int | None = None) -> list[Act]:
    """An answer of two words that nobody else gives."""
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": 2}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    last = {"object": "chat.completion.chunk", "choices": [], "usage": usage}
    return [
        send(
            OK, chunk(event({"role": "assistant", "content": ""})), chunk(event({"content": f"answer{number}"})), chunk(event({"content": " end"}, "length")),
            chunk(b"data: " + json.dumps(last).encode() + b"\n\n"), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n",
        )
    ]  # fmt: skip


class Talker(Engine):
    """Counts every word of every message, and seven tokens around each."""

    @staticmethod
    def count(asked: dict[str, Any]) -> int:
        if "messages" not in asked:
            return len(asked["prompt"].split())
        return sum(len(str(one["content"]).split()) + 7 for one in asked["messages"])


def test_conversations_grow_by_what_was_said(kvctl: Run) -> None:
    with Talker(lambda number, asked: _numbered(number, asked, engine.count(asked), 0)) as engine:
        outcome = kvctl(
            "serve-test",
            engine.url,
            "-i",
            "20",
            "-o",
            "2",
            "--turns",
            "3",
            "--turn-tokens",
            "5",
            "-n",
            "12",
            "--warmup",
            "0",
            "-c",
            "1",
            "--json",
        )
        assert outcome.code == 0, outcome.err
        sent = engine.bodies[1:]
        assert Counter(len(body["messages"]) for body in sent) == {1: 4, 3: 4, 5: 4}
        for number, body in enumerate(sent):
            roles = [one["role"] for one in body["messages"]]
            assert roles == ["user", "assistant", "user", "assistant", "user"][: len(roles)]
            before = [other for other in sent[:number] if other["messages"] == body["messages"][:-2]]
            assert len(before) == (len(roles) > 1)
            if before:
                assert body["messages"][-2]["content"] == f"answer{engine.bodies.index(before[0])} end"
                assert len(body["messages"][-1]["content"].split()) == 5
        # By the server's own count: 20; 20 + 2 + 7 + 5 + 7 = 41; 41 + 21 = 62. Of these were known: nothing; 20 + 2 − 1 = 21; 41 + 1 = 42.
        found = outcome.json["loads"][0]
        assert found["all"]["tokens"]["input"] == 4 * (20 + 41 + 62)
        assert found["designed_hit_rate"] == pytest.approx((21 + 42) / (20 + 41 + 62))
        assert found["hit_rate"] == 0


def test_conversations_of_plain_completions_and_a_pause(kvctl: Run) -> None:
    times: list[float] = []

    def answer(number: int, asked: dict[str, Any]) -> Sequence[Act]:
        times.append(time.monotonic())
        return [send(OK, chunk(b'data: {"choices":[{"index":0,"text":" yes","finish_reason":"length"}],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'),
                     chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")]  # fmt: skip

    with Engine(answer) as engine:
        outcome = kvctl("serve-test", engine.url, "-i", "9", "-o", "1", "--turns", "2", "--turn-tokens", "3", "--think", "150ms", "-n", "4",
                        "--warmup", "0", "--endpoint", "completions", "--json")  # fmt: skip
        assert outcome.code == 0, outcome.err
        first, second = engine.bodies[1]["prompt"], engine.bodies[2]["prompt"]
        assert second.startswith(first + " yes ")
        assert len(second.split()) == 9 + 1 + 3
        # One conversation at a time: between its turns nothing else is sent.
        assert all(after - before > 0.15 for before, after in ((times[1], times[2]), (times[3], times[4])))


def test_an_agents_loop(kvctl: Run) -> None:
    """A server that calls a tool when it is asked first, and then speaks; and one that refuses to have tools called."""

    def answer(number: int, asked: dict[str, Any]) -> Sequence[Act]:
        if asked.get("tool_choice") != "none" and refusing:
            return _json(
                {"error": {"message": '"auto" tool choice requires --enable-auto-tool-choice'}}, "400 Bad Request"
            )
        if len(asked["messages"]) > 1:
            return _numbered(number, asked, 50)
        calls = [
            {
                "tool_calls": [
                    {"index": 0, "id": "c1", "type": "function", "function": {"name": "read_file", "arguments": ""}}
                ]
            },
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"path":'}}]},
            {
                "tool_calls": [
                    {"index": 0, "function": {"arguments": '"a"}'}},
                    {"index": 1, "id": "c2", "function": {"name": "run_command", "arguments": "{}"}},
                ]
            },
        ]
        end = b'data: {"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":9}}\n\n'
        return [
            send(
                OK,
                *(chunk(event(call)) for call in calls),
                chunk(event({}, "tool_calls")),
                chunk(end),
                chunk(b"data: [DONE]\n\n"),
                b"0\r\n\r\n",
            )
        ]

    for refusing in (False, True):
        with Talker(answer) as engine:
            outcome = kvctl(
                "serve-test",
                engine.url,
                "-i",
                "40",
                "-o",
                "9",
                "--turns",
                "2",
                "--tools",
                "10",
                "-n",
                "4",
                "--warmup",
                "0",
                "--json",
            )
            assert outcome.code == 0, outcome.err
            assert ("tools are defined, and not to be called" in outcome.err) is refusing
            bodies = engine.bodies[2 if refusing else 1 :]
            names = [one["function"]["name"] for one in bodies[0]["tools"]]
            assert len(set(names)) == 10
            messages = bodies[1]["messages"]
            assert [one["role"] for one in messages] == ["user", "assistant", "tool", "tool"]
            assert messages[1]["tool_calls"] == [
                {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": '{"path":"a"}'}},
                {"id": "c2", "type": "function", "function": {"name": "run_command", "arguments": "{}"}},
            ]
            assert [one["tool_call_id"] for one in messages[2:]] == ["c1", "c2"]


def test_groups_one_after_the_other(kvctl: Run) -> None:
    with Engine(lambda number, asked: engine.whole(asked)) as engine:
        outcome = kvctl("serve-test", engine.url, "-i", "40", "-o", "1", "--shared-prefix", "30", "--groups", "3", "--order", "round", "-n", "9",
                        "--warmup", "0", "--json")  # fmt: skip
        assert outcome.code == 0, outcome.err
        # One that was tried, three that fill the cache, then the three in turn.
        begins = [" ".join(body["messages"][0]["content"].split()[:23]) for body in engine.bodies[1:]]
        assert len(set(begins)) == 3
        assert begins == begins[:3] * 4


def test_a_load_without_the_prefix_stands_beside(kvctl: Run) -> None:
    """A server that takes 80 ms for a beginning that it has not seen, and 10 ms for one that it has."""
    seen: set[str] = set()

    def answer(number: int, asked: dict[str, Any]) -> Sequence[Act]:
        begin = " ".join(asked["messages"][0]["content"].split()[:23])
        known = begin in seen
        seen.add(begin)
        return [
            wait(0.01 if known else 0.08),
            *engine.whole(asked, prompt_tokens_details={"cached_tokens": 30 if known else 7}),
        ]

    with Engine(answer) as engine:
        asked = ("-i", "40", "-o", "1", "-n", "9", "--warmup", "0", "--shared-prefix", "30", "--control")
        outcome = kvctl("serve-test", engine.url, *asked, "--json")
        assert outcome.code == 0, outcome.err
        alone, shared = outcome.json["loads"]
        assert [one["step"]["words"] for one in (alone, shared)] == ["1 at once, no prefix shared", "1 at once"]
        assert [one["step"]["work"]["prefix_tokens"] for one in (alone, shared)] == [0, 30]
        assert alone["ttft_without_prefix"] is None
        assert shared["ttft_without_prefix"] == alone["all"]["times"]["ttft"]["p50"]["value"] > 0.08
        assert shared["all"]["times"]["ttft"]["p50"]["value"] < shared["ttft_without_prefix"]
        assert (shared["hit_rate"], shared["designed_hit_rate"]) == (0.75, 0.75)
        assert "where no beginning is shared: -" in kvctl("serve-test", engine.url, *asked).out.replace("\n", " ")
    assert kvctl("serve-test", "x", "--control").code == 2


# -- traces ------------------------------------------------------------------------------------------

TRACE = [
    {"timestamp": 0, "input_length": 1030, "output_length": 2, "hash_ids": [1, 2, 3]},
    {"timestamp": 100, "input_length": 1200, "output_length": 3, "hash_ids": [1, 2, 4]},
    {"timestamp": 400, "input_length": 20, "output_length": 1, "hash_ids": [9]},
    {"timestamp": 400, "input_length": 9000, "output_length": 1, "hash_ids": list(range(20, 38))},
    {"timestamp": 600, "input_length": 600, "output_length": 2, "hash_ids": [1, 5]},
]


def test_a_trace_is_replayed_by_its_times(kvctl: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(one) + "\n" for one in TRACE).encode()))
    log = tmp_path / "log"
    with Engine(lambda number, asked: engine.whole(asked)) as engine:
        outcome = kvctl(
            "serve-test", engine.url, "--trace", str(path), "--speed", "2", "--warmup", "0", "--log", str(log), "--json"
        )
        assert outcome.code == 0, outcome.err
        assert "1 request of" in outcome.err
        assert "left out: longer than the 4,096 tokens" in outcome.err
        # What is sent soon after something else may be read before it.
        found = {engine.count(body): body for body in engine.bodies[1:]}
        assert {tokens: body["max_tokens"] for tokens, body in found.items()} == {1030: 2, 1200: 3, 20: 1, 600: 2}
        words = [found[tokens]["messages"][0]["content"].split()[1:] for tokens in (1030, 1200, 20, 600)]
        # Seven tokens of a template and the first word stand before: of 1,030 tokens 1,022 are the trace's.
        assert [len(one) for one in words] == [1022, 1192, 12, 592]
        assert words[0] == words[1][:1022]
        assert words[3][:512] == words[0][:512]
        assert words[3][512:550] != words[0][512:550]
        load = outcome.json["loads"][0]
        # Known beforehand: 2 × 512 of 1,200, and 512 of 600; of 2,850 tokens in all.
        assert load["designed_hit_rate"] == pytest.approx((1024 + 512) / 2850)
        assert load["step"]["work"]["left_out"] == 1
    lines = sorted((json.loads(line) for line in log.read_text().splitlines()), key=lambda line: line["number"])
    assert [line["known_input_tokens"] for line in lines] == [0, 1024, 0, 512]


def test_a_traces_times(tmp_path: Path) -> None:
    from kvctl.loadtest.work import traced

    path = tmp_path / "t"
    path.write_text("".join(json.dumps(one) + "\n" for one in TRACE))
    found = traced(str(path), 2.0)
    assert (found.seen, found.most, found.seconds) == (5, 9001, 0.6)
    times = found.fitting(4096).times()
    assert times is not None
    assert list(times) == [0.0, 0.05, 0.2, 0.3]
    assert found.fitting(10_000) is found


def test_a_trace_by_another_clock_and_one_without_times(kvctl: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        "".join(json.dumps({"input_length": 30 + number, "output_length": 1}) + "\n" for number in range(12))
    )
    with Engine(lambda number, asked: engine.whole(asked)) as engine:
        outcome = kvctl("serve-test", engine.url, "--trace", str(path))
        assert outcome.code == 1
        assert "request 1 has no time" in outcome.err
        outcome = kvctl("serve-test", engine.url, "--trace", str(path), "-c", "2", "--json")
        assert outcome.code == 0, outcome.err
        # A quarter of its requests at most is the warm-up: all twelve are sent, and nine are measured.
        assert outcome.json["loads"][0]["sent"] == 12
        assert outcome.json["loads"][0]["all"]["requests"]["good"] == 9
        # Without hashes nothing is known of what prompts share.
        assert outcome.json["loads"][0]["designed_hit_rate"] is None
        outcome = kvctl(
            "serve-test", engine.url, "--trace", str(path), "-r", "50", "-n", "4", "--warmup", "0", "--json"
        )
        assert outcome.json["loads"][0]["sent"] == 4
    path.write_text('{"input_length": 5}\n')
    outcome = kvctl("serve-test", "127.0.0.1:1", "--trace", str(path), "-c", "1")
    assert outcome.code == 1
    assert "line 1: no output_length" in outcome.err


# -- prompts of a file -------------------------------------------------------------------------------


def test_files_of_prompts(tmp_path: Path) -> None:
    def read(text: str, turns: int = 1) -> list[tuple[Any, ...]]:
        path = tmp_path / "prompts"
        path.write_text(text)
        return [(one.messages, one.says, one.out) for one in prompts.read(str(path), turns)[0]]

    assert read("one thing\n\n  another \n") == [((), ("one thing",), None), ((), ("another",), None)]
    assert read('{"prompt": "a", "max_tokens": 5}\n{"question": "b"}\n') == [((), ("a",), 5), ((), ("b",), None)]
    user, assistant = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
    assert read(json.dumps({"messages": [user, assistant]})) == [((user,), (), None)]
    assert read(json.dumps({"request": {"messages": [user, assistant, user], "max_completion_tokens": 3}})) == [
        ((user, assistant, user), (), 3)
    ]
    talk = [
        {"from": "system", "value": "s"},
        *({"from": who, "value": f"{who}{n}"} for n in (1, 2) for who in ("human", "gpt")),
    ]
    assert read(json.dumps([{"conversations": talk}])) == [((), ("human1",), None)]
    assert read(json.dumps([{"conversations": talk}]), 5) == [((), ("human1", "human2"), None)]
    assert read('["a", {"text": "b"}]') == [((), ("a",), None), ((), ("b",), None)]
    for text, said in (
        ("", "has no prompts"), (" \n\n", "has no prompts"), ("[]", "has no prompts"), ('{"prompt": "a"}\n{"promt": "b"}', "line 2: neither prompt nor messages"),
        ('{"prompt": "a"', "line 1: not JSON"), ("[" * 100_000, "nested too deeply"), ('{"messages": []}', "messages is no list"),
        ('{"messages": ["x"]}', "a message without role and content"), (json.dumps({"messages": [assistant]}), "only the assistant speaks"),
        ('[{"conversations": []}]', "has no prompts"), ('{"prompt": "a", "max_tokens": "many"}', "'many' is no number of output tokens"),
        ('{"prompt": "a", "max_tokens": true}', "True is no number"), ("[1]", "entry 1: no object and no text"),
    ):  # fmt: skip
        with pytest.raises(SourceError) as caught:
            read(text)
        assert said in str(caught.value), text[:40]
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path, said in (
        (tmp_path / "binary", "no text in UTF-8"),
        (tmp_path / "missing", "no such file"),
        (tmp_path, "is a directory"),
    ):
        with pytest.raises(SourceError) as caught:
            prompts.read(str(path))
        assert said in str(caught.value)


def test_prompts_are_sent_as_they_are(kvctl: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"tell {number} \U0001f600 \ud83d"}) + "\n" for number in range(6)))
    with Engine(lambda number, asked: engine.whole({**asked, "max_tokens": 2})) as engine:
        outcome = kvctl(
            "serve-test", engine.url, "--prompts", str(path), "-o", "50", "-n", "12", "--warmup", "0", "--json"
        )
        assert outcome.code == 0, outcome.err
        sent = [body["messages"][0]["content"] for body in engine.bodies[1:]]
        # Each before any comes again; in another order than the file's now and then.
        assert (
            sorted(sent[:6])
            == sorted(sent[6:])
            == sorted(json.loads(line)["prompt"] for line in path.read_text().splitlines())
        )
        assert not any("ignore_eos" in body for body in engine.bodies)
        assert outcome.json["loads"][0]["all"]["requests"]["short"] == 0
        assert outcome.json["server"]["tokens_counted_by"] is None
    with Engine(lambda number, asked: engine.whole(asked)) as engine:
        path.write_text('{"messages": [{"role": "user", "content": "x"}]}')
        outcome = kvctl("serve-test", engine.url, "--prompts", str(path), "--endpoint", "completions")
        assert outcome.code == 2
        assert "takes texts, no messages" in outcome.err


# -- when --------------------------------------------------------------------------------------------


def _run(load: Load, answer: Callable[[int], Sequence[Act]]) -> None:
    with Scripted(answer) as server:
        loop = Loop(Address(socket.AF_INET, "127.0.0.1", server.port, "localhost"))
        loop.run(load)
        loop.close()


def _busy(after: str) -> list[Act]:
    return [send(b"HTTP/1.1 429 Too Many Requests\r\n" + after.encode() + b"Content-Length: 4\r\n\r\nbusy")]


def test_what_was_turned_away_is_sent_again_when_the_server_says() -> None:
    """guidellm#444: of four requests the first two answers are 429 with Retry-After; they keep the time that they were due at first."""
    done: list[Exchange] = []
    load = Closed(1, lambda number: Ask(REQUEST), Length(requests=4), done.append, retries=3)
    _run(load, lambda number: _busy("Retry-After: 0.2\r\n") if number < 2 else good(2))
    assert all(one.good for one in done)
    assert load.retried == 2
    keys = [one.key for one in done]
    assert [key.number for key in keys if isinstance(key, Key)] == [0, 1, 2, 3]
    assert [key.tries for key in keys if isinstance(key, Key)] == [2, 0, 0, 0]
    assert done[0].sent - done[0].scheduled >= 0.4e9
    assert done[1].sent - done[1].scheduled < 0.2e9


def test_what_is_turned_away_for_good_is_a_failure() -> None:
    for retries, sent in ((0, 3), (2, 9)):
        done: list[Exchange] = []
        asked: list[int] = []
        load = Closed(2, lambda number: Ask(REQUEST), Length(requests=3), done.append, retries=retries)

        def answer(number: int, asked: list[int] = asked) -> list[Act]:
            asked.append(number)
            return _busy("Retry-After: 0.01\r\n")

        _run(load, answer)
        assert len(asked) == sent
        assert [one.fault.kind for one in done if one.fault is not None] == ["rejected"] * 3


def test_a_load_that_is_given_up_tells_of_what_waits() -> None:
    done: list[Exchange] = []

    def told(exchange: Exchange) -> None:
        done.append(exchange)
        load.stop()

    load = Closed(3, lambda number: Ask(REQUEST), Length(requests=100), told, retries=1)
    _run(load, lambda number: good(1) if number == 2 else _busy("Retry-After: 3600\r\n"))
    assert sorted(one.good for one in done) == [False, False, True]


def test_retries_of_the_command(kvctl: Run) -> None:
    with Engine(
        lambda number, asked: _busy("Retry-After: 0\r\n") if number % 3 == 1 else engine.whole(asked)
    ) as engine:
        outcome = kvctl(
            "serve-test", engine.url, "-i", "40", "-o", "2", "-n", "12", "--warmup", "0", "--retry", "2", "--json"
        )
        assert outcome.code == 0, outcome.err
        load = outcome.json["loads"][0]
        assert load["all"]["requests"]["good"] == 12
        assert load["retried"] == len(engine.bodies) - 1 - 12 > 0


def test_turns_by_a_clock() -> None:
    """Two conversations of three turns, ten a second: each turn goes on from the answer before it, whatever the clock does."""
    done: list[Exchange] = []

    def turn(left: int) -> Ask:
        return Ask(REQUEST, then=lambda exchange: turn(left - 1) if left > 1 else None)

    load = Open(constant(10), lambda number: turn(3), Length(requests=6), done.append)
    _run(load, lambda number: [wait(0.05), *good(1)])
    assert len(done) == 6
    assert all(one.good and isinstance(one.key, Key) and one.key.phase == MEASURED for one in done)
    first = [one for one in done if isinstance(one.key, Key) and one.key.ask.then is not None]
    assert len(first) == 6


def test_sweeps_and_ramps(kvctl: Run) -> None:
    with Engine(lambda number, asked: engine.whole(asked)) as engine:
        outcome = kvctl(
            "serve-test",
            engine.url,
            "-o",
            "1",
            "-n",
            "6",
            "--warmup",
            "0",
            "--sweep",
            "input-tokens=20,40",
            "--sweep",
            "concurrency=1,2",
            "--json",
        )
        assert outcome.code == 0, outcome.err
        assert [load["step"]["words"] for load in outcome.json["loads"]] == [
            "1 at once, 20 tokens in", "2 at once, 20 tokens in", "1 at once, 40 tokens in", "2 at once, 40 tokens in"
        ]  # fmt: skip
        assert [load["all"]["tokens"]["input"] for load in outcome.json["loads"]] == [120, 120, 240, 240]
        before = len(engine.bodies)
        outcome = kvctl(
            "serve-test",
            engine.url,
            "-i",
            "20",
            "-o",
            "1",
            "--rate",
            "10..40",
            "--duration",
            "1s",
            "--warmup",
            "0",
            "--json",
        )
        assert outcome.code == 0, outcome.err
        # 10 t + 15 t² arrivals until t: 25 in a second.
        assert outcome.json["loads"][0]["step"]["last_rate"] == 40
        assert len(engine.bodies) - before - 1 in (25, 26)


@pytest.mark.parametrize(("argv", "said"), [
    (("--sweep", "colour=1"), "is not understood"),
    (("--sweep", "concurrency"), "is not understood"),
    (("--sweep", "concurrency=1,2", "-c", "4"), "it is given besides"),
    (("--sweep", "rate=1,2", "-c", "4"), "one of them"),
    (("--sweep", "input-tokens=1k,", "-c", "4"), "lists nothing"),
    (("--sweep", "input-tokens=1k,2k", "-i", "4"), "it is given besides"),
    (("--sweep", "input-tokens=1k,x"), "'x' is not a number of tokens"),
    (("--find-limit", "--sweep", "input-tokens=1k,2k"), "--find-limit raises"),
    (("--rate", "1..5"), "over what time?"),
    (("--rate", "1..5", "-d", "1s", "--burstiness", "1"), "--burstiness is about an even --rate"),
    (("--rate", "1..x", "-d", "1s"), "is no list of numbers"),
    (("--retry", "-1"), "--retry: -1 is out of range"),
    (("--turns", "1"), "--turns: 1 is out of range"),
    (("--turn-tokens", "5"), "--turn-tokens is about --turns"),
    (("--think", "5s"), "--think is about --turns"),
    (("--tools", "0"), "--tools: 0 is out of range"),
    (("--tools", "2", "--endpoint", "completions"), "no messages and no tools"),
    (("--order", "round"), "--order: random or round"),
    (("--order", "up", "--shared-prefix", "5"), "--order: random or round"),
    (("--speed", "2"), "--speed is about the times of a --trace"),
    (("--trace", "t", "--prompts", "p"), "two kinds of requests"),
    (("--trace", "t", "-i", "5"), "--input-tokens: a trace has lengths of its own"),
    (("--trace", "t", "-o", "5"), "--output-tokens: a trace has lengths of its own"),
    (("--trace", "t", "--speed", "2", "-c", "5"), "--speed is about the times"),
    (("--trace", "t", "--speed", "0"), "--speed: 0 is out of range"),
    (("--trace", "-"), "standard input cannot be read twice"),
    (("--prompts", "p", "--shared-prefix", "5"), "prompts of a file are sent as they are"),
    (("-i", "20-100", "--shared-prefix", "20"), "leave nothing of prompts of 20 to 100"),
])  # fmt: skip
def test_wrong_usage(kvctl: Run, argv: tuple[str, ...], said: str) -> None:
    outcome = kvctl("serve-test", "x", *argv)
    assert outcome.code == 2
    assert said in outcome.err
    assert not outcome.out


# -- several processes of this client ----------------------------------------------------------------


def test_several_processes_put_on_a_load_together(kvctl: Run, tmp_path: Path) -> None:
    """Seven at once by two: four and three. All that one would say is said of both together."""
    log = tmp_path / "log"
    with Engine(
        lambda number, asked: [wait(0.03), *engine.whole(asked, prompt_tokens_details={"cached_tokens": 30})]
    ) as engine:
        asked = (
            "-i",
            "40",
            "-o",
            "3",
            "-c",
            "7",
            "-n",
            "41",
            "--warmup",
            "9",
            "--shared-prefix",
            "30",
            "--groups",
            "2",
        )
        outcome = kvctl("serve-test", engine.url, *asked, "--processes", "2", "--log", str(log), "--json")
        assert outcome.code == 0, outcome.err
        found = outcome.json["loads"][0]
        assert (found["sent"], found["all"]["requests"]["good"]) == (50, 41)
        assert (found["all"]["tokens"]["input"], found["all"]["tokens"]["output"]) == (41 * 40, 41 * 3)
        assert found["all"]["times"]["ttft"]["count"] == 41
        assert found["all"]["times"]["itl"]["count"] == 82
        assert found["designed_hit_rate"] == found["hit_rate"] == 0.75
        # One that was tried and one for each of two beginnings; no two of the rest are alike, whichever process sent them.
        assert len(engine.bodies) == 3 + 50
        assert len({body["messages"][0]["content"] for body in engine.bodies}) == 53
        assert len({" ".join(body["messages"][0]["content"].split()[:23]) for body in engine.bodies[1:]}) == 2
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert len(lines) == 50
        assert Counter(line["phase"] for line in lines) == {"warm-up": 9, "measured": 41}


def test_several_processes_share_a_clock(kvctl: Run, tmp_path: Path) -> None:
    """Twenty a second by three, and a trace by two: each request once, when it is due."""
    log, path = tmp_path / "log", tmp_path / "trace"
    path.write_text(
        "".join(
            json.dumps({"timestamp": 50 * n, "input_length": 20 + n, "output_length": 1, "hash_ids": [n]}) + "\n"
            for n in range(12)
        )
    )
    with Engine(lambda number, asked: engine.whole(asked)) as engine:
        outcome = kvctl(
            "serve-test",
            engine.url,
            "-i",
            "40",
            "-o",
            "1",
            "-r",
            "20",
            "-n",
            "20",
            "--warmup",
            "0",
            "--processes",
            "3",
            "--json",
        )
        assert outcome.code == 0, outcome.err
        assert outcome.json["loads"][0]["sent"] == 20
        # From the first to the last are nineteen twentieths of a second, less what the first was late on a busy machine.
        assert outcome.json["loads"][0]["all"]["seconds"] > 0.6
        before = len(engine.bodies)
        outcome = kvctl(
            "serve-test",
            engine.url,
            "--trace",
            str(path),
            "--warmup",
            "0",
            "--processes",
            "2",
            "--log",
            str(log),
            "--json",
        )
        assert outcome.code == 0, outcome.err
        # One that was tried is as long as the first.
        assert sorted(engine.count(body) for body in engine.bodies[before + 1 :]) == [
            20 + number for number in range(12)
        ]


@pytest.mark.parametrize(("lines", "processes"), [(6, 2), (6, 3), (9, 3), (5, 3), (13, 4)])
def test_processes_send_all_of_a_trace(kvctl: Run, tmp_path: Path, lines: int, processes: int) -> None:
    """The warm-up and the rest together are all lines, whoever sends them."""
    path = tmp_path / "trace"
    path.write_text(
        "".join(
            json.dumps({"timestamp": 5 * n, "input_length": 20 + n, "output_length": 1}) + "\n" for n in range(lines)
        )
    )
    with Engine(lambda number, asked: engine.whole(asked)) as engine:
        outcome = kvctl("serve-test", engine.url, "--trace", str(path), "--processes", str(processes), "--json")
        assert outcome.code == 0, outcome.err
        assert outcome.json["loads"][0]["sent"] == lines
        assert sorted(engine.count(body) for body in engine.bodies[1:]) == [20 + number for number in range(lines)]


def test_processes_of_which_one_cannot_go_on(kvctl: Run) -> None:
    """A server that is gone when the load begins: one line, and no process is left."""
    with Engine(lambda number, asked: engine.whole(asked)) as engine:
        outcome = kvctl(
            "serve-test",
            engine.url,
            "-i",
            "40",
            "-o",
            "1",
            "-c",
            "2",
            "--processes",
            "2",
            "-n",
            "4",
            "--max-error-rate",
            "100",
            "--json",
        )
        assert outcome.code == 0
    assert kvctl("serve-test", "x", "--processes", "0").code == 2
    assert not [
        one for one in psutil.Process().children(recursive=True) if "kvctl.loadtest.workers" in " ".join(one.cmdline())
    ]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_reaches_all_processes(number: signal.Signals, code: int) -> None:
    with Engine(lambda number, asked: [wait(0.02), *engine.whole(asked)]) as engine:
        argv = [
            sys.executable,
            "-m",
            "kvctl",
            "serve-test",
            engine.url,
            "-i",
            "40",
            "-o",
            "4",
            "-c",
            "4",
            "-d",
            "60s",
            "--processes",
            "2",
            "--json",
        ]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while len(engine.bodies) < 40:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    found = json.loads(out)
    assert found["interrupted"]
    assert found["loads"][0]["all"]["requests"]["good"] > 10
    assert "Traceback" not in err


def test_figures_of_two_are_those_of_one() -> None:
    """All sums, whoever adds them up."""
    from kvctl.loadtest.deltas import Usage
    from kvctl.loadtest.exchange import Fault
    from kvctl.loadtest.figures import Figures, Slo

    def exchange(number: int) -> Exchange:
        one = Exchange(b"", 10**9 * number // 7)
        one.sent = one.scheduled + number * 1000
        one.ended = one.sent + 10**9
        for token in range(number % 5 + 1):
            one.stamps.append(one.sent + 10**7 * (token + 1) + number)
        one.usage = Usage(50 + number, number % 5 + 1, 10) if number % 3 else None
        one.reconnects, one.bundled, one.kernel = number % 2, 1, bool(number % 4)
        if number % 7 == 3:
            one.fault, one.retry_after = Fault("rejected", f"busy {number}"), 1.0
        return one

    def add(figures: Figures, number: int) -> None:
        if number < 5:
            figures.see(exchange(number))
        else:
            figures.add(exchange(number), 4, 20 if number % 2 else None, 50 + number)

    slo = Slo(ttft=10**7 + 40)
    whole, parts = Figures(slo), [Figures(slo), Figures(slo)]
    for number in range(100):
        add(whole, number)
        add(parts[number % 2], number)
    parts[0].join(parts[1])
    whole.words.clear()  # the first of each kind: of two, those of one come first
    parts[0].words.clear()
    plain = {
        name: value for name, value in vars(whole).items() if isinstance(value, int | tuple | dict) and name != "times"
    }
    assert len(plain) > 20
    assert {name: getattr(parts[0], name) for name in plain} == plain
    assert parts[0].to_dict() == whole.to_dict()
    assert list(parts[0].slices) == list(whole.slices)


# -- what a tester found ----------------------------------------------------------------------------------


def test_conversations_without_a_question_are_left_out(kvctl: Run, tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    talks = [[{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}], [], [{"from": "gpt", "value": "x"}]]
    path.write_text(json.dumps([{"conversations": talk} for talk in talks]))
    with Engine(lambda number, asked: engine.whole({**asked, "max_tokens": 1})) as engine:
        outcome = kvctl("serve-test", engine.url, "--prompts", str(path), "-n", "2", "--warmup", "0", "--json")
        assert outcome.code == 0, outcome.err
        assert "in 2 conversations nobody asks anything; left out" in outcome.err
        assert {body["messages"][0]["content"] for body in engine.bodies} == {"hi"}


def test_what_waited_to_be_sent_again_is_held_to_the_objective(kvctl: Run) -> None:
    """Every sixth request is told to wait for 0.3 s: it does not have its first token within 0.2 s of when it was due."""
    with Engine(
        lambda number, asked: _busy("Retry-After: 0.3\r\n") if number % 6 == 2 else engine.whole(asked)
    ) as engine:
        outcome = kvctl(
            "serve-test",
            engine.url,
            "-i",
            "40",
            "-o",
            "2",
            "-n",
            "20",
            "--warmup",
            "0",
            "--retry",
            "1",
            "--slo",
            "ttft=200ms,p99",
            "--json",
        )
        assert outcome.code == 3, outcome.err
        load = outcome.json["loads"][0]
        assert load["all"]["requests"]["good"] == 20
        assert load["all"]["times"]["dispatch"]["count"] == 20 - load["retried"]
        assert not any("waited for the client" in line for line in load["remarks"])
        # A search for the limit ends where requests are turned away.
        outcome = kvctl(
            "serve-test",
            engine.url,
            "-i",
            "40",
            "-o",
            "2",
            "-n",
            "12",
            "--warmup",
            "0",
            "--retry",
            "3",
            "--find-limit",
            "--json",
        )
        assert outcome.json["limit"]["why"] == "requests were turned away"


def test_a_load_with_a_time_does_not_wait_beyond_it() -> None:
    """Half a second, of a server that asks for ten: what was turned away is a failure, and the load is over."""
    done: list[Exchange] = []
    load = Closed(2, lambda number: Ask(REQUEST), Length(seconds=0.5), done.append, retries=3)
    start = time.monotonic()
    _run(load, lambda number: _busy("Retry-After: 10\r\n") if number in (1, 3) else [wait(0.02), *good(1)])
    assert time.monotonic() - start < 5
    assert sum(not one.good for one in done) == 2
    assert load.retried == 0
    # Nor for what is asked for beyond all patience.
    done.clear()
    load = Closed(1, lambda number: Ask(REQUEST), Length(requests=2), done.append, drain=5.0, retries=3)
    _run(load, lambda number: _busy("Retry-After: 99999999999\r\n") if number == 0 else good(1))
    assert [one.good for one in done] == [False, True]


def test_rates_are_over_whole_intervals(kvctl: Run) -> None:
    """Eight requests, ten a second: the last is due after 0.7 s, and the next would have been after 0.8 s: ten a second, no more."""
    with Engine(lambda number, asked: engine.whole(asked)) as engine:
        outcome = kvctl(
            "serve-test", engine.url, "-i", "40", "-o", "1", "-r", "10", "-n", "8", "--warmup", "0", "--json"
        )
        assert outcome.code == 0, outcome.err
        assert 7 < outcome.json["loads"][0]["all"]["per_second"]["requests"] <= 10.5
        outcome = kvctl("serve-test", engine.url, "-r", "0.05", "-n", "8", "--dry-run")
        assert "after a warm-up (1 request)" in outcome.out
        outcome = kvctl("serve-test", engine.url, "-r", "20", "--turns", "2", "--dry-run")
        assert "loads: 20 conversations a second" in outcome.out


def test_parts_of_blocks_are_known_as_far_as_they_came() -> None:
    """Prompts of 100, 200 and 300 tokens under one hash: 100 of the second had come before, and 200 of the third."""
    from kvctl.loadtest.load import Ask as Asked
    from kvctl.loadtest.target import read_url
    from kvctl.loadtest.words import Vocabulary
    from kvctl.loadtest.work import Kit, traced

    def known(rows: list[dict[str, Any]], folder: Path) -> list[int | None]:
        path = folder / "t"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        kit = Kit(
            asks.Wire(read_url("x"), asks.CHAT, "m"), Vocabulary("a", tuple("bcdefgh"), 8, True), random.Random(1)
        )
        source = traced(str(path), None).source(kit)
        found = [source.next() for _ in rows]
        assert all(isinstance(one, Asked) for one in found)
        return [one.known for one in found if one is not None]

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        rows = [{"input_length": length, "output_length": 1, "hash_ids": [0]} for length in (100, 200, 300)]
        assert known(rows, Path(folder)) == [0, 100, 200]
        rows = [
            {"input_length": length, "output_length": 1, "hash_ids": ids}
            for length, ids in ((600, [1, 2]), (1100, [1, 2, 3]))
        ]
        assert known(rows, Path(folder)) == [0, 600]  # 512 and the 88 that came of the second


def test_logs_go_where_they_are_told(kvctl: Run, tmp_path: Path) -> None:
    """Through a link to its file, into a pipe without replacing it, and into no folder."""
    with Engine(lambda number, asked: engine.whole(asked)) as engine:
        asked = ("serve-test", engine.url, "-i", "40", "-o", "1", "-n", "3", "--warmup", "0")
        real, link = tmp_path / "real", tmp_path / "link"
        real.write_text("old")
        link.symlink_to(real)
        assert kvctl(*asked, "--log", str(link)).code == 0
        assert link.is_symlink()
        assert len(real.read_text().splitlines()) == 3
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        read: list[str] = []
        thread = threading.Thread(target=lambda: read.extend(pipe.read_text().splitlines()))
        thread.start()
        assert kvctl(*asked, "--log", str(pipe)).code == 0
        thread.join(10)
        assert len(read) == 3
        assert pipe.is_fifo()
        before = len(engine.bodies)
        for path in (str(tmp_path), "", ".", "/", str(tmp_path / "no" / "such")):
            outcome = kvctl(*asked, "--log", path)
            assert outcome.code in (1, 2), path
            assert "cannot write" in outcome.err
            assert "internal" not in outcome.err
        assert len(engine.bodies) == before
        assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "pipe", "real"]


def test_the_server_is_patient_while_it_is_looked_at(kvctl: Run) -> None:
    """What is tried before a load is turned away once, and asked again."""
    with Engine(lambda number, asked: _busy("Retry-After: 0\r\n") if number == 0 else engine.whole(asked)) as engine:
        assert (
            kvctl("serve-test", engine.url, "-i", "40", "-o", "1", "-n", "3", "--warmup", "0", "--retry", "1").code == 0
        )
    assert kvctl("serve-test", "x", "--slo", "ttft=1s,ttft=2s").code == 2
    assert kvctl("serve-test", "x", "-i", "200m").code == 2
    assert "names no file" in kvctl("serve-test", "x", "--trace", "").err
