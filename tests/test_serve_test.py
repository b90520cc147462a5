"""`kvctl serve-test` against a server whose every answer is known."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome
from scripted_server import OK, Act, Scripted, chunk, close, event, good, send, wait

from kvctl.loadtest import nearby
from kvctl.loadtest.exchange import Exchange, Fault
from kvctl.loadtest.figures import Figures
from kvctl.loadtest.verdict import Verdict, Window, beside, beyond, verdict

Run = Callable[..., Outcome]
SCHEMA = json.loads((Path(__file__).parents[1] / "kvctl/data/schemas/kvctl.serve-test-1.json").read_text("utf-8"))


def _json(value: object, status: str = "200 OK") -> list[Act]:
    data = json.dumps(value).encode()
    return [
        send(
            b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            % (status.encode(), len(data))
            + data
        )
    ]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration of this machine is none of these tests', nor is a server that runs on it."""
    monkeypatch.setattr(nearby, "PLACES", ())
    monkeypatch.setenv("KVCTL_CACHE", str(tmp_path_factory.mktemp("cache")))


class Engine:
    """A vLLM of a kind: words are tokens, a template adds seven, and what it does with a request is told it."""

    def __init__(
        self,
        answer: Callable[[int, dict[str, Any]], Sequence[Act]],
        *,
        owner: str = "vllm",
        page: str | None = "",
        limit: int = 4096,
    ) -> None:
        self.answer, self.owner, self.page, self.limit = answer, owner, page, limit
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[bytes] = []
        self.server = Scripted(self._act)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.__exit__()

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def _act(self, number: int) -> Sequence[Act]:
        head, _, body = self.server.requests[number].partition(b"\r\n\r\n")
        path = head.split()[1].decode()
        if path == "/v1/models":
            return _json({"data": [{"id": "m", "owned_by": self.owner, "max_model_len": self.limit}]})
        if path == "/version":
            return _json({"version": "0.32.0"})
        if path == "/metrics" and self.page is not None:
            data = ("# TYPE vllm:kv_cache_usage_perc gauge\n" + self.page).encode()
            return [send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)]
        if path == "/tokenize" and self.owner == "vllm":
            return _json({"count": self.count(json.loads(body))})
        if path in ("/v1/chat/completions", "/v1/completions"):
            asked = json.loads(body)
            if not asked["stream"]:
                return _json({"usage": {"prompt_tokens": self.count(asked), "completion_tokens": 1}})
            self.bodies.append(asked)
            self.heads.append(head)
            return self.answer(len(self.bodies) - 1, asked)
        return _json({"error": "no such place"}, "404 Not Found")

    @staticmethod
    def count(asked: dict[str, Any]) -> int:
        text = asked["messages"][0]["content"] if "messages" in asked else asked["prompt"]
        return len(text.split()) + (7 if "messages" in asked else 0)

    def whole(self, asked: dict[str, Any], **usage: Any) -> list[Act]:
        return good(asked["max_tokens"], prompt_tokens=self.count(asked), **usage)


QUICK = ("-i", "40", "-o", "4", "-n", "12", "--warmup", "2")


def test_loads_one_after_the_other(kvctl: Run, tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    page = 'vllm:kv_cache_usage_perc{engine="0"} 0.25\n# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{engine="0"} 0\n'
    with Engine(
        lambda number, asked: engine.whole(asked, prompt_tokens_details={"cached_tokens": 7}), page=page
    ) as engine:
        outcome = kvctl("serve-test", engine.url, *QUICK, "-c", "1,3", "--log", str(tmp_path / "log.jsonl"), "--json")
        assert outcome.code == 0, outcome.err
        found = outcome.json
        jsonschema.validate(found, SCHEMA)
        assert found["server"]["engine"] == "vllm"
        assert found["server"]["version"] == "0.32.0"
        assert found["server"]["tokens_counted_by"] == "the server's /tokenize"
        assert [load["step"]["at_once"] for load in found["loads"]] == [1, 3]
        for load in found["loads"]:
            # 12 measured of 14 sent; each of 40 tokens in, of which the 7 of the template were cached, and 4 out.
            assert load["sent"] == 14
            assert load["all"]["requests"] | {"messages": {}} == {
                "ended": 12, "good": 12, "failed": {}, "messages": {}, "short": 0, "reconnects": 0, "asked_to_wait": None,
            }  # fmt: skip
            tokens = load["all"]["tokens"]
            assert (tokens["input"], tokens["output"], tokens["cached"], tokens["output_from"]) == (
                480,
                48,
                84,
                {"usage": 12},
            )
            assert load["all"]["times"]["tpot"]["count"] == 12
            assert load["all"]["times"]["itl"]["count"] == 36
            assert load["metrics"]["kv_use_max"] == 0.25
            assert load["metrics"]["preemptions"] is None
            assert load["verdict"]["kind"] == "not limited"
        # One request was tried; then two loads of 14. No two have the same prompt, nor its first 16 words.
        assert len(engine.bodies) == 1 + 2 * 14
        assert len({" ".join(body["messages"][0]["content"].split()[:17]) for body in engine.bodies}) == 29
        assert all(engine.count(body) == 40 for body in engine.bodies)
        assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in engine.bodies)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [
        sum(line["load"] == load and line["phase"] == phase for line in lines)
        for load in (0, 1)
        for phase in ("warm-up", "measured")
    ] == [2, 12, 2, 12]
    # The server is a thread of this process, and "sent" may be stamped after it had its turn.
    assert all(0 <= line["sent"] <= line["first_token"] + 0.1 <= line["last_token"] + 0.1 for line in lines)


def test_by_a_clock_and_an_objective(kvctl: Run) -> None:
    """Ten a second, each answered after 0.1 s: within a second of when it was due, and not within 50 ms."""
    with Engine(lambda number, asked: [wait(0.1), *engine.whole(asked)]) as engine:
        for slo, code in (("ttft=1s,p99", 0), ("ttft=50ms,p50", 3)):
            outcome = kvctl("serve-test", engine.url, *QUICK, "--rate", "10", "--slo", slo, "--json")
            assert outcome.code == code, outcome.err
            times = outcome.json["loads"][0]["all"]["times"]
            assert 0.1 <= times["ttft_scheduled"]["p50"]["value"] < 1
            assert times["dispatch"]["p50"]["value"] < 1
    assert "0.0% of requests keep ttft 50 ms, and 50% are asked for" in outcome.err


def test_failures_are_named_and_a_load_is_given_up(kvctl: Run) -> None:
    def answer(number: int, asked: dict[str, Any]) -> Sequence[Act]:
        if number % 3 == 2:
            return [
                send(
                    OK,
                    chunk(event({"content": "a"})),
                    chunk(b'data: {"error":{"message":"engine died"}}\n\n'),
                    b"0\r\n\r\n",
                )
            ]
        return engine.whole(asked)

    with Engine(answer) as engine:
        outcome = kvctl("serve-test", engine.url, "-i", "40", "-o", "4", "-n", "300", "--warmup", "0")
        assert outcome.code == 1
        assert "requests failed, and 5% may" in outcome.err
        assert "server: engine died" in outcome.out
        assert len(engine.bodies) < 100
        # Told to bear it, it goes on.
        outcome = kvctl(
            "serve-test",
            engine.url,
            "-i",
            "40",
            "-o",
            "4",
            "-n",
            "30",
            "--warmup",
            "0",
            "--max-error-rate",
            "100",
            "--json",
        )
        assert outcome.code == 0
        requests = outcome.json["loads"][0]["all"]["requests"]
        assert (requests["good"], requests["failed"]) == (20, {"server": 10})


def test_a_server_that_knows_less(kvctl: Run) -> None:
    """Of no known engine: it refuses stream_options, counts prompts in short answers, and writes fewer tokens than asked."""

    def answer(number: int, asked: dict[str, Any]) -> Sequence[Act]:
        if "stream_options" in asked:
            return _json({"error": {"message": "unknown field stream_options"}}, "400 Bad Request")
        events = [event({"content": " a"}), event({"content": " b"}, "stop")]
        return [wait(0.02), send(OK, *map(chunk, events), b"0\r\n\r\n")]

    with Engine(answer, owner="somebody", page=None) as engine:
        outcome = kvctl("serve-test", engine.url, *QUICK, "--json")
        assert outcome.code == 0, outcome.err
        assert "refuses stream_options" in outcome.err
        found = outcome.json
        assert found["server"]["engine"] == "unknown"
        assert found["server"]["tokens_counted_by"] == "usage of answers of one token"
        load = found["loads"][0]
        assert load["all"]["tokens"]["output_from"] == {"events": 12}
        assert load["all"]["tokens"]["cached"] is None
        assert load["metrics"]["kv_use_max"] is None
        assert load["verdict"]["kind"] == "unknown"
        assert not any("ignore_eos" in body for body in engine.bodies)
        table = kvctl("serve-test", engine.url, *QUICK).out
        assert "output tokens of 12 answers are events, for want of usage: an estimate" in table


def test_plain_completions(kvctl: Run) -> None:
    with Engine(lambda number, asked: [send(OK, chunk(b'data: {"choices":[{"index":0,"text":" a","finish_reason":"length"}],'
                b'"usage":{"prompt_tokens":40,"completion_tokens":1}}\n\n'), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")]) as engine:  # fmt: skip
        outcome = kvctl(
            "serve-test", f"http://{engine.url}/v1/", *QUICK, "--endpoint", "completions", "-o", "1", "--json"
        )
        assert outcome.code == 0, outcome.err
        assert all(len(body["prompt"].split()) == 40 for body in engine.bodies)


@pytest.mark.parametrize(("argv", "said"), [
    ((), "no server is named"),
    (("ftp://x",), "is no URL of a server"),
    (("http://user:secret@x",), "has a name or a password in it"),
    (("http://x:99999",), "is no URL"),
    (("http://x?key=1",), "a server's URL has no ?"),
    (("x", "-c", "1,a"), "is no list of numbers"),
    (("x", "-c", "0"), "--concurrency: 0 is out of range"),
    (("x", "-c", "1.5"), "is no whole number"),
    (("x", "-c", "1", "-r", "2"), "--concurrency keeps so many requests under way"),
    (("x", "--burstiness", "1"), "--burstiness is about --rate"),
    (("x", "-n", "0"), "--requests: 0 is out of range"),
    (("x", "-d", "soon"), "--duration: 'soon' is no time"),
    (("x", "--slo", "fast"), "'fast' is not understood"),
    (("x", "--slo", "p99"), "--slo names no time"),
    (("x", "--endpoint", "embeddings"), "unknown 'embeddings'"),
    (("x", "-H", "no colon"), "that is no header"),
    (("x", "-H", "Authorization: Bearer abc"), "a key on the command line is seen by everybody"),
    (("x", "-H", "A: b\r\nC: d"), "that is no header"),
    (("x", "--api-key-env", "KVCTL_NO_SUCH_KEY"), "is not set"),
    (("x", "--extra", "stream=false"), "stream is kvctl's own"),
    (("x", "--insecure"), "about https"),
    (("https://x", "--ca", "/no/such.pem"), "no certificates can be read"),
    (("x", "-i", "0"), "--input-tokens"),
    (("x", "--find-limit", "-c", "1,2"), "--find-limit raises the number of requests at once by itself"),
    (("x", "--find-limit", "-r", "1"), "--find-limit raises"),
    (("x", "--groups", "2"), "--groups: beginnings that prompts share"),
    (("x", "-i", "100", "--shared-prefix", "100"), "leave nothing of prompts of 100"),
])  # fmt: skip
def test_wrong_usage(kvctl: Run, argv: tuple[str, ...], said: str) -> None:
    outcome = kvctl("serve-test", *argv)
    assert outcome.code == 2
    assert said in outcome.err
    assert "abc" not in outcome.err
    assert "secret" not in outcome.err
    assert not outcome.out


def test_a_server_that_is_not_there(kvctl: Run) -> None:
    with Engine(lambda number, asked: []) as engine:
        gone = engine.url
    for url, said in ((gone, "connection refused"), ("nowhere.invalid", "nowhere.invalid: ")):
        outcome = kvctl("serve-test", url)
        assert outcome.code == 1
        assert said in outcome.err
        assert outcome.err.count("\n") <= 3


def test_requests_that_it_cannot_take(kvctl: Run) -> None:
    with Engine(
        lambda number, asked: _json({"error": {"message": "no\ncuda"}}, "500 Internal Server Error"), limit=100
    ) as engine:
        outcome = kvctl("serve-test", engine.url, "-i", "90", "-o", "20")
        assert outcome.code == 1
        assert "90 tokens in, 20 out: up to 110 tokens, and the server takes 100" in outcome.err
        outcome = kvctl("serve-test", engine.url, "-i", "40", "-o", "4")
        assert outcome.code == 1
        assert "the first request failed: status: 500: " in outcome.err
        outcome = kvctl("serve-test", engine.url, "-m", "other")
        assert outcome.code == 1
        assert "does not serve other" in outcome.err
        assert "it serves m" in outcome.err
    with Engine(lambda number, asked: [close]) as engine:
        outcome = kvctl("serve-test", engine.url, "-i", "40", "-o", "4")
        assert outcome.code == 1
        assert "the first request failed: reset" in outcome.err


def test_the_key_is_sent_and_not_shown(kvctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-123456")
    with Engine(lambda number, asked: engine.whole(asked)) as engine:
        outcome = kvctl("serve-test", engine.url, *QUICK, "--api-key-env", "MY_KEY", "-H", "X-Team: ops", "--json")
        assert outcome.code == 0
        assert all(b"Authorization: Bearer sk-123456" in head and b"X-Team: ops" in head for head in engine.heads)
    assert "sk-123456" not in outcome.out + outcome.err


def test_a_dry_run_sends_nothing(kvctl: Run) -> None:
    outcome = kvctl("serve-test", "nowhere.invalid", "-c", "2,4", "-n", "10", "--dry-run", "--explain")
    assert outcome.code == 0
    assert "each load: 10 requests, after a warm-up" in outcome.out
    assert "requests: 512 tokens in, 128 out" in outcome.out
    assert "loads: 2 at once; 4 at once" in outcome.out
    assert "ttft: time to first token" in outcome.out


def test_what_came_until_ctrl_c_is_printed(tmp_path: Path) -> None:
    with Engine(lambda number, asked: [wait(0.02), *engine.whole(asked)]) as engine:
        asked = [
            sys.executable,
            "-m",
            "kvctl",
            "serve-test",
            engine.url,
            "-i",
            "40",
            "-o",
            "4",
            "-d",
            "60s",
            "--log",
            str(tmp_path / "log"),
            "--json",
        ]
        process = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        while len(engine.bodies) < 30:
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    found = json.loads(out)
    assert found["interrupted"]
    assert found["loads"][0]["all"]["requests"]["good"] > 5
    assert (tmp_path / "log").is_file()
    assert "Traceback" not in err


def test_prompts_that_begin_alike(kvctl: Run) -> None:
    """A server that remembers every prompt: of 40 tokens 30 were sent before by design, the template's 7 among them."""
    seen: list[list[str]] = []

    def answer(number: int, asked: dict[str, Any]) -> Sequence[Act]:
        words = asked["messages"][0]["content"].split()
        common = max(
            (
                sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(words, other, strict=False)))
                for other in seen
            ),
            default=0,
        )
        seen.append(words)
        return engine.whole(asked, prompt_tokens_details={"cached_tokens": common + 7 if common else 0})

    with Engine(answer) as engine:
        outcome = kvctl("serve-test", engine.url, *QUICK, "--shared-prefix", "30", "--groups", "3", "-c", "2", "--json")
        assert outcome.code == 0, outcome.err
        load = outcome.json["loads"][0]
        assert load["designed_hit_rate"] == 0.75
        # A word after the beginning is by chance another's one in some two hundred times.
        assert 0.75 <= load["hit_rate"] < 0.78
        # One that was tried, one for each beginning before anything is measured, then 2 and 12.
        assert len(seen) == 1 + 3 + 14
        assert len({" ".join(words[:23]) for words in seen[1:]}) == 3
        table = kvctl("serve-test", engine.url, *QUICK, "--shared-prefix", "30").out
        assert "75.0% of input tokens were sent before; found in the cache: 75" in table


def test_the_limit_is_found(kvctl: Run) -> None:
    """A server that answers in 20 ms as long as three requests are under way, and in 400 ms when there are more: three keep 200 ms."""
    live = 0
    lock = threading.Lock()

    def answer(number: int, asked: dict[str, Any]) -> Sequence[Act]:
        def work(sock: Any) -> None:
            nonlocal live
            with lock:
                live += 1
                slow = live > 3
            time.sleep(0.4 if slow else 0.02)
            with lock:
                live -= 1

        return [work, *engine.whole(asked)]

    with Engine(answer) as engine:
        asked = ("-i", "40", "-o", "2", "--warmup", "4", "-n", "12", "--find-limit", "--slo", "e2e=200ms,p75")
        outcome = kvctl("serve-test", engine.url, *asked, "--json")
        assert outcome.code == 0, outcome.err
        limit = outcome.json["limit"]
        assert (limit["borne"], limit["broken"]) == (3, 4)
        assert "of requests keep e2e 200 ms" in limit["why"]
        assert [load["step"]["at_once"] for load in outcome.json["loads"]] == [1, 2, 4, 3]
        assert kvctl("serve-test", engine.url, *asked[:-1], "e2e=1ms").code == 3  # not even one


# -- what bound a load, by numbers worked out by hand -------------------------------------------------


def _figures(count: int = 10) -> Figures:
    figures = Figures()
    for _ in range(count):
        one = Exchange(b"", 0)
        one.sent, one.ended = 1, 10**9
        one.stamps = array("q", [10**8, 2 * 10**8])
        figures.add(one)
    return figures


@pytest.mark.parametrize(("seen", "kind"), [
    (Window(0.97, 3, 8, 0, 0, 9), "kv-saturated"),
    (Window(0.97, 0, 8, 2, 0, 9), "kv-saturated"),
    (Window(0.97, 0, 8, 0, 0, 9), "not limited"),  # full, and nothing suffers
    (Window(0.4, 3, 8, 0, 0, 9), "batch-limited"),
    (Window(0.4, 3, 8, 5, 0, 9), "kv-saturated"),  # between two looks it was full
    (Window(0.4, 0, 8, 0, 0, 9), "not limited"),
    (Window(None, None, None, None, 0, 0), "unknown"),
])  # fmt: skip
def test_what_bound_a_load(seen: Window, kind: str) -> None:
    found = verdict(_figures(), seen, cpu=0.2, at_once=8)
    assert found.kind == kind
    assert found.evidence
    assert verdict(_figures(), seen, cpu=0.9, at_once=8).kind == "client-limited"
    assert verdict(_figures(0), seen, cpu=0.2, at_once=8).kind == "unknown"  # broken off in the warm-up
    bad, nothing = Exchange(b"", 0), _figures(0)
    bad.fault = Fault("reset", "x")
    nothing.add(bad)
    assert verdict(nothing, seen, cpu=0.2, at_once=8).kind == "failed"


def test_a_cache_that_throws_requests_out() -> None:
    """llama.cpp's slots share cells; full, it fails those under way, between two looks at its metrics perhaps."""
    figures = _figures(3)
    one = Exchange(b"", 0)
    one.sent, one.ended, one.fault = 1, 10**9, Fault("server", "Context size has been exceeded.")
    figures.add(one)
    found = verdict(figures, Window(0.8, 0, 4, None, 0, 9), cpu=0.2, at_once=4)
    assert found == Verdict(
        "kv-saturated", ("1 of 4 requests failed: Context size has been exceeded.", "KV cache in use: 80% at most")
    )


def test_what_other_loads_and_the_client_say() -> None:
    fine, full = Verdict("not limited", ("x",)), Verdict("kv-saturated", ("x",))
    # 16 at once write 5% more than 8 did: computing is what takes the time. 50% more is no sign of that.
    assert beside(fine, (16, 1050), (8, 1000)) == Verdict(
        "compute-limited", ("+5% tokens a second, of 16 at once after 8", "x")
    )
    assert beside(fine, (16, 1500), (8, 1000)) is fine
    assert beside(fine, (10, 1000), (8, 1000)) is fine
    assert beside(fine, (16, 1000), None) is fine
    assert beside(full, (16, 1000), (8, 1000)) is full
    assert beyond(fine, 71_000, 100_000).kind == "client-limited"
    assert beyond(fine, 69_000, 100_000) is fine
    assert beyond(fine, 71_000, None) is fine


def test_the_client_is_measured_and_that_is_kept(kvctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    from kvctl.loadtest import calibrate

    assert calibrate.load() is None
    found = calibrate.calibrate(lambda text: None, at_once=(1, 8), rounds=1)
    jsonschema.validate(
        found.to_dict(),
        json.loads((Path(__file__).parents[1] / "kvctl/data/schemas/kvctl.calibration-1.json").read_text()),
    )
    assert [one.requests for one in found.errors] == [1, 8]
    # 64 tokens in 0.1 + 63 × 0.02 s each; on a machine that is busy with other tests, a few in a hundred late.
    assert found.errors[0].nominal == pytest.approx(64 / 1.36)
    assert found.errors[1].tokens_per_second == pytest.approx(8 * 64 / 1.36, rel=0.3)
    assert found.errors[1].itl_p50 < 0.005
    assert found.errors[1].ttft_p50 < 0.05
    assert found.ceiling > found.errors[1].tokens_per_second
    calibrate.save(found)
    assert calibrate.load() == found
    monkeypatch.setattr(calibrate, "machine", lambda: "another")
    assert calibrate.load() is None
    calibrate.place().write_text("{")
    assert calibrate.load() is None
    assert kvctl("serve-test", "http://x", "--calibrate").code == 2
