"""What others' load generators got wrong, by public threads: each with what `kvctl serve-test` does, and the test that holds it.

docs/serve-test.md has the list, with the thread and the test of each. Tests that were there already stay where they are; those here are the
others, in the list's order, against the command itself where that is what could be wrong.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome as Ran
from scripted_server import DONE, OK, Act, Scripted, chunk, event, good, send, wait
from test_loadtest_loop import Few, _address
from test_serve_test import QUICK, Engine, _json

from kvctl.errors import KvctlError
from kvctl.loadtest import caches, target
from kvctl.loadtest import loop as loop_module
from kvctl.loadtest.deltas import Usage
from kvctl.loadtest.exchange import Exchange
from kvctl.loadtest.figures import Figures
from kvctl.loadtest.lengths import Fixed
from kvctl.loadtest.loop import Loop
from kvctl.loadtest.metrics import Sample, Watched
from kvctl.loadtest.plan import Step
from kvctl.loadtest.remarks import misses_design, preemption_cost, remarks
from kvctl.loadtest.run import Outcome
from kvctl.loadtest.slices import Slices, cost
from kvctl.loadtest.verdict import Verdict, Window
from kvctl.loadtest.work import Made

Run = Callable[..., Ran]
SECOND = 1_000_000_000
MS = 1_000_000
DOCS = (Path(__file__).parents[1] / "docs" / "serve-test.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCTL_CACHE", str(tmp_path_factory.mktemp("cache")))


class Counting(Engine):
    """One with a page of metrics that is made anew for every look, from how many requests came."""

    def __init__(
        self, answer: Callable[[int, dict[str, Any]], Sequence[Act]], lines: Callable[[int], str], **more: Any
    ) -> None:
        self.lines = lines
        super().__init__(answer, **more)

    @property
    def page(self) -> str:
        return self.lines(len(self.bodies))

    @page.setter
    def page(self, value: str | None) -> None:
        pass


def _load(ran: Ran) -> dict[str, Any]:
    assert ran.code == 0, ran.err
    load: dict[str, Any] = ran.json["loads"][0]
    return load


def test_the_list_is_whole_and_its_tests_are_there() -> None:
    """Every number from 1 to 37 has a row, and every test that a row names exists."""
    section = DOCS.partition("## What goes wrong elsewhere\n")[2]
    rows = re.findall(r"^\| (\d+) \|.*\|$", section, re.MULTILINE)
    assert [int(row) for row in rows] == list(range(1, 38))
    tests = {
        name
        for file in Path(__file__).parent.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.MULTILINE)
    }
    lines = re.findall(r"^\| \d+ \|.*\|$", section, re.MULTILINE)
    named = set(re.findall(r"`(test_\w+)`", "\n".join(lines)))
    assert named <= tests, named - tests
    assert all("`test_" in line for line in lines)


# -- time origin, queueing, load model ----------------------------------------------------------------------


def _exchange(
    *stamps: int,
    tokens: int | None = None,
    scheduled: int = 0,
    sent: int = 10,
    prompt: int = 100,
    cached: int | None = None,
) -> Exchange:
    """Times in milliseconds."""
    one = Exchange(b"", scheduled * MS)
    one.sent = sent * MS
    one.stamps = array("q", [at * MS for at in stamps])
    one.answer_at = one.first_token
    one.ended = (max(stamps) + 1 if stamps else sent) * MS
    one.usage = None if tokens is None else Usage(prompt, tokens, cached)
    return one


def _work(prefix: int = 0) -> Made:
    return Made(Fixed(100), Fixed(4), prefix)


def _outcome(figures: Figures, *, prefix: int = 0, **more: Any) -> Outcome:
    return Outcome(
        Step(_work(prefix), at_once=1), figures, Figures(), Window(None, None, None, None, 0, 0), Verdict("unknown", ()), (), {}, 1, 1.0, None, 0.1
    ).replace(**more)  # fmt: skip


def _said(figures: Figures, engine: str = "vllm", **more: Any) -> str:
    return "\n".join(remarks(_outcome(figures, **more), engine))


def test_2_what_waits_for_the_client_is_said() -> None:
    """vllm#54101: sent 20 ms after it was due, first token 500 ms later: 4% of that, where 1% is worth a word."""
    late, fine, small = Figures(), Figures(), Figures()
    late.add(_exchange(520, 540, tokens=2, sent=20))
    fine.add(_exchange(520, 540, tokens=2, sent=4))
    small.add(_exchange(2, 3, tokens=2, sent=1))  # half of 2 ms, but a millisecond: noise of any clock
    assert "requests waited for the client: 99 of 100 went out within 20.0 ms" in _said(late)
    assert "waited for the client" not in _said(fine)
    assert "waited for the client" not in _said(small)


def _ttft_lines(count: int) -> str:
    """As vLLM writes them; of each request 50 ms."""
    return (f'# TYPE vllm:time_to_first_token_seconds histogram\nvllm:time_to_first_token_seconds_bucket{{le="+Inf"}} {count}\n'
            f"vllm:time_to_first_token_seconds_sum {0.05 * count}\nvllm:time_to_first_token_seconds_count {count}\n")  # fmt: skip


def test_4_the_servers_own_first_token_time_stands_beside(kvctl: Run) -> None:
    """aiperf#1424: a server that answers after 60 ms and says 50 in its histogram: the rest was on the way."""
    with Counting(lambda number, asked: [wait(0.06), *engine.whole(asked)], _ttft_lines) as engine:
        load = _load(kvctl("serve-test", engine.url, *QUICK, "-c", "2", "--json"))
        beside = load["ttft_beside_server"]
        # 2 to warm up and 12 measured; the one that was tried came before.
        assert (beside["requests"], beside["server_mean"]) == (14, pytest.approx(0.05))
        assert beside["client_mean"] > 0.059
        assert any(
            "first-token time by the server's own histogram: 50.0 ms on average of 14 requests" in line
            for line in load["remarks"]
        )
        # Two were due before all others, and went out one after the other.
        assert load["all"]["start"]["requests"] == 2
        assert 0 <= load["all"]["start"]["skew"] < 0.5


def test_4_others_that_load_the_server_too_are_seen(kvctl: Run) -> None:
    with Counting(lambda number, asked: engine.whole(asked), lambda count: _ttft_lines(3 * count)) as engine:
        load = _load(kvctl("serve-test", engine.url, *QUICK, "--json"))
        assert load["ttft_beside_server"] is None
        assert any(
            "the server gave 42 first tokens in this time, and 14 of them came here" in line for line in load["remarks"]
        )


def test_6_the_clock_begins_with_the_first_request(kvctl: Run) -> None:
    """guidellm#526: what is done before (here half a second for a first look at the metrics) is neither in the run nor on its schedule."""

    def lines(count: int) -> str:
        time.sleep(0.5)
        return ""

    with Counting(lambda number, asked: engine.whole(asked), lines) as engine:
        load = _load(
            kvctl(
                "serve-test", engine.url, "-i", "40", "-o", "4", "--rate", "20", "-n", "20", "--warmup", "0", "--json"
            )
        )
        # 20 at 20 a second: from the first to the last 0.95 s; none was due before there was a connection.
        assert 0.9 < load["all"]["seconds"] < 1.6
        assert load["all"]["times"]["dispatch"]["p50"]["value"] < 0.1


# -- warm-up, steady state, end ---------------------------------------------------------------------------


def test_9_times_of_a_load_that_was_whole_for_too_short_are_refused(kvctl: Run) -> None:
    """sglang#30918: four requests, four at once, all sent in one go: nothing of them is steady. Forty are ten rounds."""
    with Engine(lambda number, asked: [wait(0.05), *engine.whole(asked)]) as engine:
        asked = ("-i", "40", "-o", "4", "-c", "4", "--warmup", "4", "--json")
        short, long = (_load(kvctl("serve-test", engine.url, *asked, "-n", count)) for count in ("4", "40"))
    assert set(short["steady"]["times"].values()) == {None}
    assert "2 are needed" in short["steady_refused"]
    assert short["all"]["times"]["e2e"]["count"] == 4
    assert long["steady_refused"] is None
    assert 20 <= long["steady"]["times"]["e2e"]["count"] <= 40


def test_10_tokens_count_when_they_arrive(kvctl: Run) -> None:
    """llm-load-test#37: three answers of 0.4 s, and one of 2 s that is waited for: every event stands in the slice it came in."""

    def answer(number: int, asked: dict[str, Any]) -> list[Act]:
        pause, count = (0.5, 4) if number == 4 else (0.1, 4)
        return [send(OK), *(act for n in range(count) for act in (wait(pause), send(chunk(event({"content": "a"}, "stop" if n == 3 else None))))),
                send(b"0\r\n\r\n")]  # fmt: skip

    with Engine(answer) as engine:
        load = _load(
            kvctl("serve-test", engine.url, "-i", "40", "-o", "4", "-n", "4", "--warmup", "0", "-c", "2", "--json")
        )
    pieces = load["slices"]
    assert sum(piece["events"] for piece in pieces) == 16
    assert len(pieces) >= 2
    assert all(piece["width"] == 1 for piece in pieces)
    # The last ones have only the one that is left: its gaps are five times those of the others.
    gaps = [piece["between_events"] for piece in pieces if piece["between_events"] is not None]
    assert max(gaps) > 2 * min(gaps)


def test_10_slices_by_hand() -> None:
    """Events at 0.2, 0.4, 0.9, 1.1 s of one, and at 1.5 of another: three in the first second and two in the next."""
    slices = Slices()
    slices.add(array("q", [200 * MS, 400 * MS, 900 * MS, 1100 * MS]))
    slices.add(array("q", [1500 * MS]))
    first, second = slices
    assert (first.events, first.gaps, first.waited) == (3, 2, 700 * MS)
    assert (second.events, second.gaps, second.waited) == (2, 1, 200 * MS)
    assert first.gap == pytest.approx(0.35)
    assert slices.rate(0, 2 * SECOND) == 2.5
    assert slices.rate(1, 2 * SECOND) is None  # one whole second


def test_12_a_warm_up_by_default_that_nothing_hits_later(kvctl: Run) -> None:
    """vllm#26943: eight at least, one for each under way; none of its prompts comes again."""
    for at_once, warm in (("2", 8), ("12", 12)):
        with Engine(lambda number, asked: engine.whole(asked)) as engine:
            load = _load(kvctl("serve-test", engine.url, "-i", "40", "-o", "4", "-n", "6", "-c", at_once, "--json"))
            assert load["sent"] == 6 + warm
            prompts = [body["messages"][0]["content"] for body in engine.bodies]
            assert len(set(prompts)) == len(prompts)


# -- tokens, chunks, definitions ----------------------------------------------------------------------------


def _fours(asked: dict[str, Any], prompt: int) -> list[Act]:
    """Four tokens an event, 20 ms apart, as with speculative decoding; counted in every one where that is asked for."""
    each = asked["stream_options"].get("continuous_usage_stats")
    acts: list[Act] = [send(OK)]
    for n in range(1, asked["max_tokens"] // 4 + 1):
        usage: dict[str, object] | None = {"prompt_tokens": prompt, "completion_tokens": 4 * n} if each else None
        acts += [
            wait(0.02),
            send(chunk(event({"content": "a b c d"}, "length" if 4 * n == asked["max_tokens"] else None, usage))),
        ]
    usage = {"prompt_tokens": prompt, "completion_tokens": asked["max_tokens"]}
    return [*acts, send(chunk(event(None, usage=usage)), chunk(DONE), b"0\r\n\r\n")]


def test_15_events_of_several_tokens_are_counted_one_by_one(kvctl: Run) -> None:
    """sglang#12064, #33193: gaps of 20 ms and four tokens each: 5 ms between tokens, 20 between events, and the server is asked to count."""
    with Engine(lambda number, asked: _fours(asked, engine.count(asked))) as engine:
        load = _load(kvctl("serve-test", engine.url, "-i", "40", "-o", "16", "-n", "6", "--warmup", "1", "--json"))
        assert engine.bodies[0]["stream_options"] == {"include_usage": True}
        assert all(body["stream_options"]["continuous_usage_stats"] for body in engine.bodies[1:])
    times = load["all"]["times"]
    assert load["all"]["tokens"]["per_event"] == 4
    # Of each answer three gaps, of four tokens each.
    assert (times["icl"]["count"], times["itl"]["count"]) == (18, 72)
    assert times["itl"]["mean"] == pytest.approx(times["icl"]["mean"] / 4, rel=1e-6)
    assert times["tpot"]["p50"]["value"] < times["icl"]["p50"]["value"] / 2


def test_15_without_those_counts_gaps_are_no_times_between_tokens() -> None:
    figures = Figures()
    one = _exchange(100, 120, 140, tokens=12)
    one.counts = array("q", [4, 8])  # not of every event
    figures.add(one)
    assert (figures.times["itl"].count, figures.times["icl"].count) == (0, 2)


def test_16_without_usage_the_engines_counter_stands_beside(kvctl: Run) -> None:
    """sglang#24254: two events an answer without usage, and the engine counts six tokens for each of 14."""
    script = [send(OK, chunk(event({"content": "a"})), chunk(event({"content": "b"}, "stop")), b"0\r\n\r\n")]
    with Counting(lambda number, asked: script, lambda count: f"vllm:generation_tokens_total {6 * count}\n") as engine:
        load = _load(kvctl("serve-test", engine.url, *QUICK, "--json"))
    assert load["all"]["tokens"]["output_from"] == {"events": 12}
    assert any("by the engine's own counter each of these carries 3.00 tokens" in line for line in load["remarks"])


def test_16_a_count_of_nothing_for_an_answer_with_tokens_is_not_believed() -> None:
    figures = Figures()
    figures.add(_exchange(100, 120, 140, tokens=0))
    assert (figures.tokens_out, figures.sources) == (3, {"events": 1})


def test_17_and_18_counts_are_the_servers_and_its_difference_is_said(kvctl: Run) -> None:
    """vllm#44708: a /tokenize that counts 40 where usage says 50: usage stands, and +25% is said."""
    with Engine(lambda number, asked: good(4, prompt_tokens=50)) as engine:
        ran = kvctl("serve-test", engine.url, *QUICK, "--json")
    load = _load(ran)
    assert load["all"]["tokens"]["input"] == 12 * 50
    assert "prompts were made of 40 tokens on average, and the server counts 50 (+25.0%)" in load["remarks"]
    assert "the server counts 50" in ran.err


def test_19_short_answers_are_counted(kvctl: Run) -> None:
    """vllm#18687: told to write 4 tokens and to go on after the end of a text, a server stops after 3 in every other answer."""
    with Engine(lambda number, asked: good(4 - number % 2, prompt_tokens=40)) as engine:
        ran = kvctl("serve-test", engine.url, *QUICK)
        assert all(body["ignore_eos"] for body in engine.bodies)
    assert ran.code == 0, ran.err
    assert "6 answers shorter than asked" in ran.out


def test_21_formulas_are_in_json_and_in_explain(kvctl: Run) -> None:
    with Engine(lambda number, asked: engine.whole(asked)) as engine:
        found = kvctl("serve-test", engine.url, *QUICK, "--json").json["definitions"]
        text = kvctl("serve-test", engine.url, *QUICK, "--explain").out
    for name, words in (
        ("tpot", "(last event - first event) / (output tokens - 1)"),
        ("hit rate", "cached input tokens / all input tokens"),
    ):
        assert words in found[name]
        assert f"{name}: " in text
        assert words in text


# -- transport ----------------------------------------------------------------------------------------------


def test_26_connections_that_lay_idle_are_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """llm-d#1564: what lay for longer than is borne is let go, so that no request meets a connection that the server is closing."""
    monkeypatch.setattr(loop_module, "_IDLE_NS", 20 * MS)
    with Scripted(lambda number: good()) as server:
        loop, few = Loop(_address(server.port)), Few(4)
        few.pause = 60 * MS
        loop.run(few)
        loop.close()
        assert [one.reconnects for one in few.done] == [0] * 4
        assert server.connections == 4
        few = Few(4)
        loop = Loop(_address(server.port))
        loop.run(few)
        loop.close()
        assert server.connections == 5


def _two_addresses(port: int) -> Callable[..., list[Any]]:
    """A name of ::1 and 127.0.0.1, in that order."""
    real = socket.getaddrinfo

    def found(name: Any, *more: Any, **named: Any) -> list[Any]:
        if name != "two.test":
            return real(name, *more, **named)
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port)),
        ]

    return found


def test_27_the_address_that_answers_is_found_before_the_clock_starts(
    kvctl: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aiohttp#4627: ::1 first, where nobody listens. It is tried once; every request, and every question, goes to the other."""
    with Engine(lambda number, asked: engine.whole(asked)) as engine:
        port = engine.server.port
        monkeypatch.setattr(socket, "getaddrinfo", _two_addresses(port))
        ran = kvctl("serve-test", f"two.test:{port}", *QUICK, "--json")
        load = _load(ran)
        server = ran.json["server"]
        assert (load["all"]["requests"]["good"], server["address"]) == (12, "127.0.0.1")
        assert server["lookup_seconds"] >= 0
        assert server["connect_seconds"] > 0
        assert all(b"Host: two.test:%d" % port in head for head in engine.heads)
        table = kvctl("serve-test", f"two.test:{port}", *QUICK).out
        assert f"http://two.test:{port}/v1/chat/completions (127.0.0.1): vllm" in table
    with pytest.raises(KvctlError, match=r"two\.test.*connection refused"):
        target.resolve(target.read_url(f"two.test:{port}"))


def test_28_what_is_turned_away_is_no_sample_and_its_wait_is_kept(kvctl: Run) -> None:
    """guidellm#444: every third is a 429 with Retry-After: 2; neither latency nor tokens a second has it."""

    def answer(number: int, asked: dict[str, Any]) -> Sequence[Act]:
        if number % 3 == 2:
            return [send(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 2\r\nContent-Length: 4\r\n\r\nfull")]
        return engine.whole(asked)

    with Engine(answer) as engine:
        asked = ("-i", "40", "-o", "4", "-n", "12", "--warmup", "0", "--max-error-rate", "50", "--json")
        load = _load(kvctl("serve-test", engine.url, *asked))
    requests = load["all"]["requests"]
    # The one that was tried was number 0; of 1 to 12 four are turned away.
    assert (requests["good"], requests["failed"], requests["messages"]) == (
        8,
        {"rejected": 4},
        {"rejected": ["429: full"]},
    )
    assert (requests["asked_to_wait"]["count"], requests["asked_to_wait"]["p50"]["value"]) == (
        4,
        pytest.approx(2, rel=1e-3),
    )
    assert load["all"]["tokens"]["output"] == 32
    assert load["all"]["times"]["ttft"]["count"] == 8


def test_29_nothing_but_failures_is_a_failure_in_words(kvctl: Run) -> None:
    """llm-d-benchmark#680: no division by zero; status 1, and the first three messages."""

    def answer(number: int, asked: dict[str, Any]) -> Sequence[Act]:
        return engine.whole(asked) if not number else _json({"error": f"no {number % 4}"}, "500 Internal Server Error")

    with Engine(answer) as engine:
        for form in ("table", "json", "csv", "md"):
            engine.bodies.clear()
            ran = kvctl("serve-test", engine.url, *QUICK, "--warmup", "0", "--format", form)
            assert ran.code == 1
            assert "every request failed" in ran.err
            assert "Traceback" not in ran.err
            if form == "json":
                assert ran.json["loads"][0]["verdict"]["kind"] == "failed"
                assert len(ran.json["loads"][0]["all"]["requests"]["messages"]["status"]) == 3
    assert "rror" in ran.out


@pytest.mark.parametrize("status", ["400 Bad Request", "422 Unprocessable Entity"])
def test_30_servers_that_refuse_stream_options(kvctl: Run, status: str) -> None:
    """fw-ai/benchmark#10; servers that check bodies by a model of their own say 422."""

    def answer(number: int, asked: dict[str, Any]) -> Sequence[Act]:
        return _json({"detail": "extra"}, status) if "stream_options" in asked else engine.whole(asked)

    with Engine(answer) as engine:
        ran = kvctl("serve-test", engine.url, *QUICK, "--json")
    assert _load(ran)["all"]["requests"]["good"] == 12
    assert "refuses stream_options" in ran.err


# -- the cache ------------------------------------------------------------------------------------------------


def test_31_the_cache_is_emptied_before_each_load(kvctl: Run) -> None:
    """vllm#52884: by the engine's own word; and where it has none, or says no, that is said."""
    with Engine(lambda number, asked: engine.whole(asked)) as engine:
        plain = engine._act
        emptied: list[int] = []

        def act(number: int) -> Sequence[Act]:
            if engine.server.requests[number].startswith(b"POST /reset_prefix_cache "):
                emptied.append(len(engine.bodies))
                return [send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")]
            return plain(number)

        engine.server.script = act
        assert kvctl("serve-test", engine.url, *QUICK, "-c", "1,2", "--reset-cache").code == 0
        # After the one that was tried, and after the 14 of the first load.
        assert emptied == [1, 15]
        engine.server.script = plain
        ran = kvctl("serve-test", engine.url, *QUICK, "--reset-cache")
        assert ran.code == 1
        assert "the server does not empty its cache: 404" in ran.err
        assert "VLLM_SERVER_DEV_MODE=1" in ran.err
    with Engine(lambda number, asked: engine.whole(asked), owner="somebody") as engine:
        assert "has no way for that" in kvctl("serve-test", engine.url, *QUICK, "--reset-cache").err


def test_31_a_cache_that_is_not_to_be_emptied_yet() -> None:
    """SGLang refuses while a request is at work: it is asked again, and the third time it does. One of llama.cpp is emptied slot by slot."""
    refused = [send(b"HTTP/1.1 400 x\r\nContent-Length: 0\r\n\r\n")]
    with Scripted(
        lambda number: refused if number < 2 else [send(b"HTTP/1.1 200 x\r\nContent-Length: 0\r\n\r\n")]
    ) as server:
        client = target.Client(target.read_url(f"127.0.0.1:{server.port}"), target.Trust(), {})
        caches.reset(client, target.Server("sglang", None, (), None))
        assert [request.split()[1] for request in server.requests] == [b"/flush_cache"] * 3
        caches.reset(client, target.Server("llama.cpp", None, (), None, slots=2))
        assert [request.split()[1] for request in server.requests[3:]] == [
            b"/slots/0?action=erase",
            b"/slots/1?action=erase",
        ]


@pytest.mark.parametrize(("cached", "argv", "said"), [
    (20, (), "50.0% of input tokens were found in the server's cache, and at most 20.0% had been sent before"),
    (0, ("--shared-prefix", "30"), "0.0% of input tokens were found in the server's cache, and 75.0% had been sent before"),
    (38, ("--shared-prefix", "30"), "95.0% of input tokens were found in the server's cache, and at most 75.0% had been sent before"),
])  # fmt: skip
def test_31_finds_that_are_not_what_was_designed_fail(
    kvctl: Run, cached: int, argv: tuple[str, ...], said: str
) -> None:
    """inference-perf#340: random prompts of which nine in ten hit. A template of seven tokens and the first word may."""
    with Engine(lambda number, asked: engine.whole(asked, prompt_tokens_details={"cached_tokens": cached})) as engine:
        ran = kvctl("serve-test", engine.url, *QUICK, *argv)
    assert ran.code == 3
    assert said in ran.err


def _hits(cached: int, block: int | None = None, prefix: int = 60) -> Outcome:
    figures = Figures()
    figures.add(_exchange(100, 110, tokens=2, cached=cached))
    info = {} if block is None else {"vllm:cache_config_info": {"block_size": str(block)}}
    return _outcome(figures, prefix=prefix, samples=(Sample(0, {}, {}, info),))


def test_31_only_whole_blocks_are_found() -> None:
    """60 of 100 tokens begin alike; blocks of 16 hold 48 of them, and that is as designed. Of blocks of one 58 are, and 57 are not."""
    server = {"prompt_overhead_tokens": 8}
    assert misses_design(_hits(48, 16), server) is None
    assert misses_design(_hits(45, 16), server) == (
        "45.0% of input tokens were found in the server's cache, and 48.0% (whole blocks of 16) had been sent before"
    )
    assert misses_design(_hits(58), server) is None
    assert misses_design(_hits(57), server) is not None
    assert misses_design(_hits(48), server | {"facts": {"page_size": 16}}) is None
    assert misses_design(_hits(63), server) is not None
    assert misses_design(_hits(8, prefix=0), server) is None
    assert misses_design(_outcome(Figures()), server) is None  # no one says


def test_32_only_what_the_run_itself_found_counts(kvctl: Run) -> None:
    """vllm#46938: a server that was up for a year, 90% of whose billion tokens hit; of this run's 40 a request, 7."""

    def lines(count: int) -> str:
        return f"vllm:prefix_cache_queries_total {10**9 + 40 * count}\nvllm:prefix_cache_hits_total {9 * 10**8 + 7 * count}\n"

    with Counting(lambda number, asked: engine.whole(asked), lines) as engine:
        load = _load(kvctl("serve-test", engine.url, *QUICK, "--json"))
    assert load["hit_rate_of_counters"] == pytest.approx(7 / 40)
    assert load["metrics"]["counters"]["prefix_queries"] == 14 * 40


def test_34_the_flag_that_has_a_server_say_what_it_found_is_named(kvctl: Run) -> None:
    """gpustack#5189: usage says null, and the counters say that a sixth was found."""

    def lines(count: int) -> str:
        return f"vllm:prefix_cache_queries_total {40 * count}\nvllm:prefix_cache_hits_total {7 * count}\n"

    with Counting(lambda number, asked: engine.whole(asked, prompt_tokens_details=None), lines) as engine:
        load = _load(kvctl("serve-test", engine.url, *QUICK, "--json"))
    assert load["hit_rate"] is None
    assert any(
        "17.5% of input tokens); --enable-prompt-tokens-details has it say so" in line for line in load["remarks"]
    )
    figures = Figures()
    figures.add(_exchange(100, 110, tokens=2))
    assert "--enable-cache-report" in _said(figures, "sglang", counters={"prefix_queries": 100.0, "prefix_hits": 50.0})
    assert "--enable" not in _said(figures, "tgi", counters={"prefix_queries": 100.0, "prefix_hits": 50.0})


def _preempting() -> Outcome:
    """Events 20 ms apart for a second, then 60 ms apart for another, in which five requests are preempted, then 20 again."""
    figures = Figures()
    stamps, at = [], 0
    for pause, until in ((20, 1000), (60, 2000), (20, 3000)):
        while at < until:
            stamps.append(at * MS)
            at += pause
        at = until
    figures.slices.add(array("q", stamps))
    counts = [0, 0, 0, 0, 0, 2, 5, 5, 5, 5, 5, 5]
    samples = tuple(
        Sample(250 * MS * n + 1, {"kv_use": 0.9, "preemptions": float(value)}, {"preemptions": {"": float(value)}})
        for n, value in enumerate(counts)
    )
    return _outcome(figures, samples=samples)


def test_37_what_preemptions_cost_by_time() -> None:
    """inference-sim#1167: the second with all five of them beside the other two."""
    found = preemption_cost(_preempting())
    assert found is not None
    hit, rest = found
    # 1.0 to 2.0 s: 17 events, the first 20 ms after the one before; 16 gaps of 60. The others 20, but for one of 40 behind the second.
    assert hit == pytest.approx((20 + 16 * 60) / 17 / 1000, rel=0.01)
    assert rest == pytest.approx(0.020, rel=0.05)
    assert "(+1" in "\n".join(remarks(_preempting(), "vllm"))
    assert cost(Slices(), lambda first, last: True) is None
    assert preemption_cost(_preempting().replace(samples=())) is None


def test_37_slices_have_preemptions_beside_the_use_of_the_cache(kvctl: Run) -> None:
    """A server that preempts one request for each that it gets from the seventh on."""

    def lines(count: int) -> str:
        return f"vllm:kv_cache_usage_perc 0.97\nvllm:num_requests_waiting 2\nvllm:num_preemptions_total {max(0, count - 7)}\n"

    with Counting(lambda number, asked: [wait(0.1), *engine.whole(asked)], lines) as engine:
        load = _load(kvctl("serve-test", engine.url, *QUICK, "-n", "20", "--json"))
    assert load["verdict"]["kind"] == "kv-saturated"
    known = [piece["preemptions"] for piece in load["slices"] if piece["preemptions"] is not None]
    # 23 requests in all, of which 16 came after the seventh; those at the very end may come after the last slice's last look.
    assert 10 <= sum(known) <= 16
    assert max(piece["kv_use"] or 0 for piece in load["slices"]) == 0.97


# -- faults, through the command ------------------------------------------------------------------------------


def test_a_restart_is_said_and_counters_go_on(kvctl: Run) -> None:
    """After the eighth request counters begin anew, and two answers break off."""

    def lines(count: int) -> str:
        return f"vllm:prompt_tokens_total {40 * (count if count <= 8 else count - 8)}\n"

    def answer(number: int, asked: dict[str, Any]) -> Sequence[Act]:
        if number in (9, 10):
            return [send(OK, chunk(event({"content": "a"}))), lambda sock: sock.shutdown(socket.SHUT_RDWR)]
        return [wait(0.1), *engine.whole(asked)]

    with Counting(answer, lines) as engine:
        load = _load(kvctl("serve-test", engine.url, *QUICK, "-n", "20", "--max-error-rate", "20", "--json"))
    assert load["all"]["requests"]["failed"] == {"truncated": 2}
    assert load["metrics"]["resets"] == 1
    assert "the server was restarted meanwhile: its counters began anew 1 time" in load["remarks"]
    # 22 requests after the one that was tried: but for those between the last look before and the first after, all are counted.
    assert 22 - 3 <= load["metrics"]["counters"]["prompt_tokens"] / 40 <= 22


def test_looks_that_gave_nothing_are_said() -> None:
    said = _said(Figures(), watched=Watched(12, 3, "/metrics answers 503", 0.1))
    assert said == "3 of 12 looks at the server's metrics gave nothing: /metrics answers 503"


ESCAPE = "\x1b]0;gone\x07\x9b31mred\u202e"


def test_nothing_of_a_server_steers_the_terminal(kvctl: Run) -> None:
    """Its model's name, its version and its errors have escape sequences, of seven bits and of eight, and marks that turn text round."""

    def answer(number: int, asked: dict[str, Any]) -> Sequence[Act]:
        return (
            engine.whole(asked)
            if number % 2 == 0
            else _json({"error": {"message": f"bad {ESCAPE}"}}, f"500 {ESCAPE.encode().decode('latin-1')}")
        )

    with Engine(answer) as engine:
        plain = engine._act

        def act(number: int) -> Sequence[Act]:
            if engine.server.requests[number].startswith(b"GET /v1/models "):
                return _json({"data": [{"id": f"m{ESCAPE}", "owned_by": "vllm"}]})
            if engine.server.requests[number].startswith(b"GET /version "):
                return _json({"version": f"1{ESCAPE}"})
            return plain(number)

        engine.server.script = act
        for form in ("table", "json", "csv", "md"):
            engine.bodies.clear()
            ran = kvctl("serve-test", engine.url, *QUICK, "--max-error-rate", "100", "--format", form)
            assert ran.code == 0, ran.err
            assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", ran.out + ran.err), form
            if form == "json":
                assert ran.json["server"]["model"] == f"m{ESCAPE}"
        assert all(body["model"] == f"m{ESCAPE}" for body in engine.bodies)
        ran = kvctl("serve-test", engine.url, *QUICK, "-m", "other")
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", ran.out + ran.err)


def test_a_server_that_sends_on(kvctl: Run) -> None:
    with Scripted(
        lambda number: [send(b"HTTP/1.1 308 x\r\nLocation: https://elsewhere/v1/models\r\nContent-Length: 0\r\n\r\n")]
    ) as server:
        ran = kvctl("serve-test", f"127.0.0.1:{server.port}")
    assert ran.code == 1
    assert "/v1/models sends on to https://elsewhere/v1/models" in ran.err


def test_connections_that_fail_just_before_the_load(kvctl: Run) -> None:
    """It answers all that is asked of it, and goes away when the load begins: one line, and its metrics are not waited for."""
    with Engine(lambda number, asked: [*engine.whole(asked), gone]) as engine:

        def gone(sock: socket.socket) -> None:
            engine.server.__exit__()

        ran = kvctl("serve-test", engine.url, *QUICK)
    assert ran.code == 1
    assert ran.err.count("kvctl: error: ") == 1
    assert "internal" not in ran.err


class Swift:
    """One thread that serves all: a vLLM of a kind that answers at once, and every twentieth request with an error."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = self.listener.getsockname()[1]
        self.asked = 0
        usage: dict[str, object] = {"prompt_tokens": 40, "completion_tokens": 2}
        said = [event({"content": "a"}), event({"content": "b"}, "length"), event(None, usage=usage), DONE]
        self.good = OK + b"".join(map(chunk, said)) + b"0\r\n\r\n"
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self.listener, selectors.EVENT_READ)
        buffers: dict[socket.socket, bytes] = {}
        while True:
            for key, _ in selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self.listener:
                    try:
                        made, _ = sock.accept()
                    except OSError:
                        return
                    buffers[made] = b""
                    selector.register(made, selectors.EVENT_READ)
                    continue
                try:
                    data = sock.recv(65536)
                except OSError:
                    data = b""
                if not data:
                    selector.unregister(sock)
                    sock.close()
                    continue
                head, mark, body = (buffers[sock] + data).partition(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: *(\d+)", head)
                if not mark or len(body) < int(length[1] if length else 0):
                    buffers[sock] += data
                    continue
                buffers[sock] = b""
                sock.sendall(self._answer(head.split()[1], body))

    def _answer(self, path: bytes, body: bytes) -> bytes:
        if path == b"/v1/models":
            found: object = {"data": [{"id": "m", "owned_by": "vllm"}]}
        elif path == b"/tokenize":
            found = {"count": Engine.count(json.loads(body))}
        elif path == b"/v1/chat/completions":
            self.asked += 1
            if self.asked % 20 == 2:
                return b"HTTP/1.1 500 x\r\nContent-Length: 4\r\n\r\noops"
            return self.good
        else:
            return b"HTTP/1.1 404 x\r\nContent-Length: 0\r\n\r\n"
        data = json.dumps(found).encode()
        return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data


@pytest.fixture
def swift() -> Iterator[Swift]:
    server = Swift()
    yield server
    server.listener.shutdown(socket.SHUT_RDWR)
    server.listener.close()


def test_ten_thousand_requests_of_which_one_in_twenty_fails(kvctl: Run, swift: Swift) -> None:
    """The first is tried; of the 10,000 after it those with numbers 2, 22, … fail: 500 of them, and exactly those are counted."""
    asked = ("-i", "40", "-o", "2", "-n", "10000", "--warmup", "0", "-c", "32", "--max-error-rate", "20", "--json")
    load = _load(kvctl("serve-test", f"127.0.0.1:{swift.port}", *asked))
    requests = load["all"]["requests"]
    assert (requests["ended"], requests["good"], requests["failed"]) == (10_000, 9_500, {"status": 500})
    assert requests["messages"] == {"status": ["500: oops"]}
    assert (load["sent"], load["all"]["tokens"]["output"]) == (10_000, 19_000)
    assert load["all"]["times"]["ttft"]["count"] == 9_500
    assert sum(piece["events"] for piece in load["slices"]) == 19_000


def test_certificates_that_do_not_hold(kvctl: Run) -> None:
    """Expired, and of one that nobody trusts: a line that says which, and no request."""
    import ssl

    folder = Path(__file__).parent / "data" / "tls-expired"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    with Scripted(lambda number: good(), tls=context) as server:
        url = f"https://localhost:{server.port}"
        for argv, said in (
            ((), "self-signed certificate"),
            (("--ca", str(folder / "cert.pem")), "certificate has expired"),
        ):
            ran = kvctl("serve-test", url, *argv)
            assert ran.code == 1
            assert said in ran.err
            assert ran.err.count("\n") <= 3
        assert not server.requests
