"""The server of known cadence: what it says of its answers, and load generators that are compared by it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome

from kvctl.loadtest.connection import Address
from kvctl.loadtest.exchange import Exchange
from kvctl.loadtest.load import Ask, Closed, Length
from kvctl.loadtest.loop import Loop

SCRIPT = Path(__file__).parents[1] / "scripts" / "compare_load_generators.py"


@contextlib.contextmanager
def _fake(*argv: str) -> Iterator[int]:
    started = subprocess.Popen([sys.executable, "-m", "kvctl.loadtest.fake", *argv], stdout=subprocess.PIPE)
    try:
        assert started.stdout is not None
        yield int(started.stdout.readline())
    finally:
        started.kill()
        started.wait()


def _ask(port: int, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}{path}", data), timeout=10) as answer:
        return json.loads(answer.read())


def _load(port: int, count: int, body: dict[str, Any], path: str = "/v1/chat/completions") -> list[Exchange]:
    sent = json.dumps(body).encode()
    data = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(sent), sent)
    done: list[Exchange] = []
    loop = Loop(Address(socket.AF_INET, "127.0.0.1", port, "127.0.0.1"))
    loop.run(Closed(2, lambda number: Ask(data), Length(requests=count), done.append))
    loop.close()
    assert all(one.good for one in done), [one.fault for one in done]
    return done


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_it_knows_of_every_answer_when_it_came_and_was_written(path: str) -> None:
    asked = {"stream": True, "max_tokens": 5}
    asked |= (
        {"messages": [{"role": "user", "content": "one two three"}, {"role": "user", "content": "four"}]}
        if "chat" in path
        else {"prompt": "one two three four"}
    )
    with _fake("--ttft", "0.02", "--itl", "0.01") as port:
        done = _load(port, 4, asked, path)
        truth = _ask(port, "/truth")
        assert _ask(port, "/truth") == []  # said once
    # Words are tokens, and as many events as tokens were asked for.
    assert {(one.usage.prompt, one.usage.completion) for one in done if one.usage is not None} == {(4, 5)}
    assert [(tokens, len(written)) for _, tokens, written in truth] == [(5, 5)] * 4
    for came, _, written in truth:
        # The kernel took it in before it was read, and each event was written no sooner than it was due.
        assert all(at >= came + 20_000_000 + number * 10_000_000 for number, at in enumerate(written))
    # What a client saw: sent before it came, and events no sooner than they were written (clocks differ by microseconds).
    for one, (came, _, written) in zip(sorted(done, key=lambda one: one.sent), sorted(truth), strict=True):
        assert one.sent <= came + 100_000
        assert all(stamp >= at - 100_000 for stamp, at in zip(one.stamps, written, strict=True))


def test_answers_that_are_not_streamed_and_floods() -> None:
    with _fake("--ttft", "0", "--itl", "0", "--tokens", "200") as port:
        found = _ask(port, "/v1/completions", {"prompt": "one two", "max_tokens": 1, "stream": False})
        assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        assert [one["id"] for one in _ask(port, "/v1/models")["data"]] == ["fake"]
        (one, _) = _load(port, 2, {"stream": True})
        assert len(one.stamps) == 200
        # Of a flood the first and the last event.
        assert [(tokens, len(written)) for _, tokens, written in _ask(port, "/truth")] == [(200, 2)] * 2


def test_serve_test_loads_it(kvctl: Any) -> None:
    with _fake("--ttft", "0.01", "--itl", "0.001") as port:
        outcome: Outcome = kvctl(
            "serve-test", f"127.0.0.1:{port}", "-i", "32", "-o", "8", "-n", "20", "-c", "4", "--json"
        )
        truth = _ask(port, "/truth")
    assert outcome.code == 0, outcome.err
    (load,) = outcome.json["loads"]
    assert outcome.json["server"]["prompts_exact"]
    assert (load["all"]["tokens"]["input"], load["all"]["tokens"]["output"]) == (20 * 32, 20 * 8)
    # A warm-up of eight, and a trial of four tokens.
    assert sorted(tokens for _, tokens, _ in truth) == [4] + [8] * 28


# -- the script that compares load generators -------------------------------------------------------------


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("compare_load_generators", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_peers_say_is_read(script: Any, tmp_path: Path) -> None:
    """Cut from results of vLLM 0.32, guidellm 0.8.1 and aiperf 0.13."""
    load = script.Load("http://x", 4, 12, 64, "folder", tmp_path)
    (tmp_path / "vllm.json").write_text('{"completed": 12, "median_ttft_ms": 104.5, "median_itl_ms": 20.008}')
    (tmp_path / "guidellm.json").write_text(json.dumps({"benchmarks": [{"metrics": {
        "request_totals": {"successful": 12, "errored": 0, "incomplete": 0, "total": 12},
        "time_to_first_token_ms": {"successful": {"median": 125.0, "count": 12}},
        "inter_token_latency_ms": {"successful": {"median": 20.046, "count": 756}},
    }}]}))  # fmt: skip
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps({
        "request_count": {"unit": "requests", "avg": 12.0}, "time_to_first_token": {"unit": "ms", "p50": 108.5},
        "inter_token_latency": {"unit": "ms", "p50": 20.059},
    }))  # fmt: skip
    found = {name: script.CLIENTS[name].said(load, "") for name in ("vllm bench serve", "guidellm", "aiperf")}
    assert {name: (one.completed, one.ttft, one.itl) for name, one in found.items()} == {
        "vllm bench serve": (12, 104.5, 20.008),
        "guidellm": (12, 125.0, 20.046),
        "aiperf": (12, 108.5, 20.059),
    }
    for client in script.CLIENTS.values():
        asked = " ".join(client.argv("program", load))
        assert all(word in asked for word in ("http://x", "4", "12", "64"))


def test_truth_is_of_the_requests_that_are_counted(script: Any) -> None:
    """The last three of four answers of 3 tokens: one of two tokens is a trial, and the first of three a warm-up."""
    milli = 1_000_000
    answers = [
        [0, 3, [900 * milli, 950 * milli, 999 * milli]],
        [1000 * milli, 2, [1001 * milli, 1002 * milli]],
        [2000 * milli, 3, [2010 * milli, 2030 * milli, 2040 * milli]],
        [4000 * milli, 3, [4030 * milli, 4040 * milli, 4070 * milli]],
        [3000 * milli, 3, [3020 * milli, 3030 * milli, 3060 * milli]],
    ]
    body = json.dumps(answers).encode()
    from scripted_server import Scripted, send

    answer = send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    with Scripted(lambda number: [answer]) as server:
        by_gaps = script.Truth(server.port, 3, 3, gaps=True)
        by_request = script.Truth(server.port, 3, 3, gaps=False)
    assert by_gaps.ttft == by_request.ttft == 20
    assert by_gaps.itl == 15  # 20 10, 10 30, 10 30: the middle of 10 10 10 20 30 30
    assert by_request.itl == 20  # 15, 20, 20
    assert by_gaps.rate == pytest.approx(9 / 2.07)  # nine tokens from 2,000 to 4,070 ms
    assert by_gaps.answers == 4


def test_a_run_and_its_table(script: Any) -> None:
    run = script.measure("kvctl serve-test", sys.executable, 2, 4, 5, "", flood=False)
    assert "failed" not in run, run
    assert (run["completed"], run["served"]) == (4, 4)
    assert run["true_ttft_ms"] >= 100  # the cadence
    broken = script.measure("kvctl serve-test", sys.executable, 0, 4, 5, "", flood=False)
    assert "ttft_error_ms" not in broken
    assert broken["failed"]
    runs = [
        {
            "client": "a",
            "flood": False,
            "at_once": 2,
            "requests": 4,
            "completed": 4,
            "ttft_error_ms": error,
            "itl_error_ms": 0.5,
        }
        for error in (1.0, 9.0, 2.0)
    ]
    runs += [{"client": "a", "flood": True, "at_once": 16, "requests": 9, "completed": 8, "tokens_per_second": 12345.6}]
    runs += [{"client": script.CEILING, "flood": True, "tokens_per_second": 99999.0}]
    lines = script.table(runs, [2, 7]).splitlines()
    assert lines[2] == "| a | 2.000 | – | 0.5000 | – | 20 of 21 | 12,346 |"
    assert "99,999" in lines[-1]
