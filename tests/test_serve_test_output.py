"""What is made of a load test: saved, compared, drawn, handed to other programs, and shown while it runs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree

import pytest
from conftest import Outcome as Ran
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from scripted_server import Act, send, wait
from test_serve_test import QUICK, SCHEMA, Engine, _own_cache  # noqa: F401

from kvctl import output_serve
from kvctl.errors import ConfigError, UsageError
from kvctl.loadtest import compare, junit, metrics, saved, target, textfile
from kvctl.loadtest.capacity import Capacity, Side
from kvctl.loadtest.connection import Address
from kvctl.loadtest.deltas import Usage
from kvctl.loadtest.drive import Seen
from kvctl.loadtest.exchange import Exchange, Fault
from kvctl.loadtest.figures import Figures, Slo
from kvctl.loadtest.histogram import Histogram, Percentile, told_of
from kvctl.loadtest.lengths import Fixed, Lognormal, Mix, Normal, Uniform
from kvctl.loadtest.limit import Limit
from kvctl.loadtest.live import Live, Moment
from kvctl.loadtest.load import Length
from kvctl.loadtest.loop import Loop
from kvctl.loadtest.plan import Plan, Step
from kvctl.loadtest.report import ServeReport
from kvctl.loadtest.run import Outcome
from kvctl.loadtest.slices import Slice, Slices
from kvctl.loadtest.verdict import Verdict, Window
from kvctl.loadtest.work import ROUND, Given, Made, Traced, Work
from kvctl.measure.statistics import Ratio

Run = Callable[..., Ran]
S, MS = 10**9, 10**6
BEGAN = 1000 * S
WORK = Made(Fixed(100), Fixed(5), prefix=25)


# -- reports of known numbers ---------------------------------------------------------------------------


def _exchange(at: int, ttft: int, tokens: int, gap: int) -> Exchange:
    one = Exchange(b"", at)
    one.sent = at
    one.stamps = array("q", [at + ttft + number * gap for number in range(tokens)])
    one.answer_at, one.ended = one.stamps[0], one.stamps[-1]
    one.usage = Usage(100, tokens, 25)
    return one


def _outcome(
    at_once: int,
    ttfts: Sequence[int],
    *,
    gap: int = 10 * MS,
    began: int = BEGAN,
    slo: Slo | None = None,
    faults: Sequence[Fault] = (),
) -> Outcome:
    """Requests that follow one another every 100 ms, each of 5 tokens; looks at the metrics every second, two of which saw preemptions."""
    figures = Figures(slo)
    for number, ttft in enumerate(ttfts):
        figures.add(_exchange(began + number * 100 * MS, ttft, 5, gap))
    for fault in faults:
        bad = Exchange(b"", began)
        bad.sent, bad.ended, bad.fault = began, began + 1, fault
        figures.add(bad)
    values = ((0.5, 0, 10), (0.97, 3, 12), (0.98, 2, 12), (0.98, 1, 15))
    samples = tuple(
        metrics.Sample(
            began + number * S,
            {"kv_use": use, "waiting": waiting, "running": 4.0, "preemptions": lost},
            {"preemptions": {"": lost}},
        )
        for number, (use, waiting, lost) in enumerate(values)
    )
    return Outcome(
        Step(WORK, at_once=at_once), figures, Figures(slo), Window(0.98, 3, 4, 5, 0, 4), Verdict("kv-saturated", ("KV cache in use: 98% at most",)),
        samples, {"requests": float(len(ttfts))}, len(ttfts), len(ttfts) / 10, 50.0, 0.2, began=began,
    )  # fmt: skip


def _report(*outcomes: Outcome, slo: Slo | None = None, **more: Any) -> ServeReport:
    plan = Plan(target.read_url("127.0.0.1:8000"), tuple(one.step for one in outcomes), slo=slo, seed=7)
    server = {
        "engine": "vllm", "version": "0.32.0", "model": "m<b>", "models": ["m<b>"], "context": 4096, "slots": None, "facts": {},
        "tokens_counted_by": "usage", "prompts_exact": True, "seed": 7, "address": None, "prompt_overhead_tokens": 7,
    }  # fmt: skip
    environment = {"time": "2026-11-30T12:00:00Z", "os": "Linux", "cpu": {"model": "a processor"}}
    return ServeReport(plan, server, environment, outcomes, **more)


# -- saved ----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=60))
@example([94905819, 94905818])  # whose squares are alike to sixteen digits
def test_a_histogram_is_the_same_from_its_text(values: list[int]) -> None:
    whole = Histogram(values)
    found = Histogram.of_text(whole.text, whole.sums, min(values), max(values))
    assert found.rows() == whole.rows()
    assert found.mean == sum(values) / len(values)
    assert found.deviation == whole.deviation
    exact = [whole.percentile(of) for of in (50, 99)]
    found = Histogram.of_text(whole.text, whole.sums, min(values), max(values), exact)
    assert [found.percentile(of) for of in (50, 99)] == exact
    assert found.percentile(50).value == sorted(values)[(len(values) - 1) // 2]


def test_the_text_of_a_histogram_is_what_it_says() -> None:
    # 1,100 is in the bucket of two from 1,100 on; 3,001 in that of four from 3,000 on.
    whole = Histogram([5, 5, 1101, 3001])
    assert whole.text == "5*2 1100 3000"
    assert whole.sums == "4112 10218252"  # 5² + 5² + 1101² + 3001²
    for text in ("5*0", "x", "5*", "-5", "", "5 ²"):
        with pytest.raises(ValueError, match="bucket"):
            Histogram.of_text(text, "5 25", 5, 5)
    with pytest.raises(ValueError, match="least"):
        Histogram.of_text("5 9", "14 106", 5, 8)
    # 3,001 is in the bucket from 3,000 on, and so is 3,003; 3,004 is in the next.
    for most, fine in ((3003, True), (3004, False)):
        told = [Percentile(100, most, most, None)]
        with contextlib.nullcontext() if fine else pytest.raises(ValueError, match="p100"):
            assert Histogram.of_text("5*2 1100 3000", whole.sums, 5, 3001, told).percentile(100).value == most
    # Squares of 5 and 9 are 106; of two values that add up to 14 they are 98 at least, and 19 is more than twice 9.
    for sums in ("14 97", "19 200", "9 106", "14", "14 x", "-14 106"):
        with pytest.raises(ValueError, match="sums"):
            Histogram.of_text("5 9", sums, 5, 9)


def test_slices_are_the_same_from_their_pieces() -> None:
    whole = Slices(most=4)
    whole.add([S, S + 5, 9 * S + 7])
    whole.add([BEGAN, BEGAN + 3])
    found = Slices.of(whole)
    assert (found.width, list(found)) == (whole.width, list(whole))
    for pieces in (
        [Slice(0, S + 1, 1, 0, 0)], [Slice(0, 3 * S, 1, 0, 0)], [Slice(1, S, 1, 0, 0)], [Slice(S, 2 * S, 1, 0, 0)],
        [Slice(0, S, 1, 0, 0), Slice(2 * S, 2 * S, 1, 0, 0)], [Slice(0, S, 1, 0, 0)] * 2, [Slice(0, 0, 1, 0, 0)],
    ):  # fmt: skip
        with pytest.raises(ValueError, match="slices"):
            Slices.of(pieces)


def test_a_saved_report_is_the_same_when_read(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    slo = Slo(ttft=80 * MS)
    fault = Fault("server", "engine died")
    report = _report(
        _outcome(4, [50 * MS, 100 * MS, 70 * MS] * 10, slo=slo, faults=[fault]), _outcome(8, [60 * MS] * 20, began=BEGAN + 9 * S, slo=slo),
        slo=slo, notes=("a note",), limit=None,
    )  # fmt: skip
    path = str(tmp_path / "a.json")
    saved.save(report, path)
    document = json.loads(Path(path).read_text())
    jsonschema.validate(document, SCHEMA)
    found = saved.read(path)
    assert found.to_dict() == document
    assert found.missed == report.missed
    assert "66.7%" not in found.missed[0]  # of 31 that ended 20 keep it
    assert found.missed[0].startswith("4 at once: 64.5% of requests keep ttft 80 ms")
    # One clock: the second load's looks are nine seconds after the first's, and 10, 12, 12, 15 preemptions are none, 2, 2, 5.
    assert [sample["seconds"] for sample in document["loads"][1]["metrics"]["series"]] == [9, 10, 11, 12]
    assert [sample["preemptions"] for sample in document["loads"][1]["metrics"]["series"]] == [0, 2, 2, 5]
    # Of 30 requests a tenth of a second apart, each has 5 events within 40 ms of its first: 5 a request in all.
    # Request 19 comes at 1.9 s + 100 ms, which is 2.0 s; of request 29 (2.97 s) three events come before 3.0 s.
    slices = document["loads"][0]["slices"]
    assert [(piece["seconds"], piece["events"]) for piece in slices] == [(0, 50), (1, 45), (2, 53), (3, 2)]
    assert (document["loads"][0]["began_seconds"], document["loads"][1]["began_seconds"]) == (0, 9)
    searched = report.replace(limit=Limit(4, 8, "kv-saturated"))
    assert saved.of_dict(searched.to_dict(), "x").limit == searched.limit


def _same(report: ServeReport) -> ServeReport:
    """As it is read again from what it says: the same document, and the same lines."""
    from kvctl.screen_serve import heading, lines_of, table_of

    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    found = saved.of_dict(document, "a.json")
    assert json.loads(json.dumps(found.to_dict())) == document
    assert (heading(found), table_of(found), lines_of(found, explain=True)) == (
        heading(report), table_of(report), lines_of(report, explain=True)
    )  # fmt: skip
    return found


SPREADS = (Fixed(7), Uniform(5, 9), Normal(50.0, 7.5), Lognormal(400.0, 0.8), Mix(((10, 3.0), (20, 1.0))))


@pytest.mark.parametrize("work", [
    *(Made(spread, spread) for spread in SPREADS), Made(Fixed(90), Fixed(4), 20, 3, ROUND, 4, Uniform(2, 8), 0.5, 12),
    Traced("a.jsonl", 2.0, 70, 900, 12.5, 4096, 30), Traced("a.jsonl", None, 70, 900, None), Given("p.jsonl", (), Fixed(9), 1.5, 12),
])  # fmt: skip
def test_every_kind_of_requests_is_the_same_when_read(work: Work) -> None:
    timed = isinstance(work, Traced) and work.speed is not None
    step = Step(work, None if timed else 4, beside="4,096 tokens in")
    found = _same(_report(_outcome(4, [50 * MS] * 20).replace(step=step)))
    read = found.outcomes[0].step
    assert read.words == step.words
    assert read.work == (work.replace(limit=None) if isinstance(work, Traced) else work)
    assert read.work.longest == work.longest
    pace = Step(WORK, rate=2.0, last_rate=8.0, burstiness=0.5)
    assert _same(_report(_outcome(4, [50 * MS] * 20).replace(step=pace))).outcomes[0].step == pace


def test_all_of_a_report_is_the_same_when_read() -> None:
    one = _outcome(4, [50 * MS] * 20)
    turned = Exchange(b"", BEGAN)
    turned.sent, turned.ended, turned.retry_after, turned.fault = BEGAN, BEGAN + 1, 1.5, Fault("rejected", "busy")
    one.figures.add(turned)
    one.figures.see(_exchange(BEGAN - S, 40 * MS, 5, MS))  # of the warm-up
    info = {"vllm:cache_config_info": {"block_size": "16", "num_gpu_blocks": "100"}}
    one = one.replace(
        remarks=("the server was restarted meanwhile",), retried=3, cut=2, watched=metrics.Watched(9, 1, None, 0.25), interrupted=True,
        # By hand: 20 requests of 50 ms and one of 40 ms are 1.04 s until first tokens; the turned-away one has none.
        counters={"requests": 22.0, "ttft_requests": 21.0, "ttft_seconds": 0.84, "output_tokens": 210.0, "prefix_queries": 400.0, "prefix_hits": 100.0},
        samples=(*one.samples[:-1], one.samples[-1].replace(info=info)),
    )  # fmt: skip
    held = Capacity(
        105, 4096, Side(1600, 10**9, 5000, 100, 3.25, 7), ("cache_config_info", "its log"), Side(1584, 10**9, 0, 99, 3.0, 8),
        "m, vllm@0.32.0", ("its log",), ("a note of it",),
    )  # fmt: skip
    report = _report(one, capacity=held, interrupted=True, limit=Limit(4, 8, "kv-saturated"), notes=("x",))
    found = _same(report)
    assert found.capacity == held
    assert found.predicted == 8
    load = found.to_dict()["loads"][0]
    assert load["ttft_beside_server"] == {
        "server_mean": 0.84 / 21,
        "client_mean": pytest.approx(1.04 / 21),
        "requests": 21,
    }
    assert load["hit_rate_of_counters"] == 0.25
    assert load["all"]["requests"]["asked_to_wait"]["p50"]["value"] == pytest.approx(1.5, rel=2e-3)
    # 25 of 100 input tokens were cached, and of the 25 designed in blocks of 16 one block has to be: nothing is missed, in either.
    assert found.missed == report.missed == []
    assert found.outcomes[0].samples[-1].info == info


def test_loads_beyond_an_hour_are_the_same_when_read() -> None:
    """Their slices are of several seconds; those of a load beside them may be narrower."""
    wide, narrow = _outcome(4, [50 * MS] * 20, began=BEGAN + 3 * S), _outcome(8, [50 * MS] * 20, began=BEGAN + 77 * S)
    slices = Slices(most=3)
    for second in range(3, 43):  # 10 events in each of 40 seconds, 1,003 to 1,043
        slices.add([BEGAN + second * S + place for place in range(10)])
    wide.figures.slices = slices
    assert slices.width == 32 * S
    report = _report(wide, narrow)
    found = _same(report)
    assert report.zero % (32 * S) == 0
    pieces = found.to_dict()["loads"][0]["slices"]
    # 1,003 is in the slice from 31 · 32 = 992 on, which ends at 1,024: 21 seconds of 10 events, and 19 in the next.
    assert [(piece["seconds"], piece["width"], piece["events"]) for piece in pieces] == [(0, 32, 210), (32, 32, 190)]
    assert found.to_dict()["loads"][0]["began_seconds"] == 11
    assert found.outcomes[0].figures.slices.counts(found.zero, found.zero + 64 * S) == [210, 190]


def test_a_percentile_of_many_is_the_same_when_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond so many values there are counts alone, and the middle of a bucket may be half a nanosecond."""
    from kvctl.loadtest import histogram

    monkeypatch.setattr(histogram, "_FEW", 10)
    _same(_report(_outcome(4, [50 * MS + 65_537 * number for number in range(400)])))


def test_a_run_and_its_file_say_the_same(kvctl: Run, tmp_path: Path) -> None:
    """Prefixes, drawn lengths, requests that are turned away, failures, an objective that is missed, and another process."""
    path = str(tmp_path / "a.json")
    page = (
        "# TYPE vllm:num_preemptions_total counter\nvllm:num_preemptions_total 0\n"
        'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n'
    )

    def answer(number: int, asked: dict[str, Any]) -> Sequence[Act]:
        if number % 9 == 8:
            return [send(b"HTTP/1.1 503 Busy\r\nRetry-After: 0\r\nContent-Length: 0\r\n\r\n")]
        return [wait(0.005), *engine.whole(asked, prompt_tokens_details={"cached_tokens": 16})]

    argv = ("-i", "30-60", "--shared-prefix", "20", "-o", "2:1+4:1", "-n", "30", "--warmup", "2", "--slo", "ttft=1us,p50",
            "--sweep", "concurrency=1,3", "--retry", "1", "--max-error-rate", "50")  # fmt: skip
    with Engine(answer, page=page) as engine:
        ran = kvctl("serve-test", engine.url, *argv, "--save", path, "--json")
        assert ran.code == 3, ran.err
        lined = kvctl(
            "serve-test", engine.url, *argv, "-n", "20", "--processes", "2", "--save", str(tmp_path / "b.json")
        )
        assert lined.code == 3, lined.err
    shown = kvctl("serve-test", "--from", path, "--json")
    assert shown.code == 3
    assert shown.json == ran.json
    assert ran.json["loads"][0]["retried"] >= 3
    assert ran.json["capacity"]["declared"]["tokens"] == 1600
    again = str(tmp_path / "again.json")
    shown = kvctl("serve-test", "--from", str(tmp_path / "b.json"), "--save", again)
    assert shown.out == lined.out
    assert "KV cache: tokens: 1,600 declared" in shown.out
    assert Path(again).read_text() == (tmp_path / "b.json").read_text()


def _broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(json.dumps(_report(_outcome(4, [50 * MS] * 10)).to_dict()))
    change(document)
    return document


@pytest.mark.parametrize(("change", "said"), [
    (lambda d: d.update(schema="kvctl.serve-test/2"), "of a later kvctl"),
    (lambda d: d.update(schema="kvctl.profile/1"), "holds kvctl.profile/1"),
    (lambda d: d.pop("schema"), "names no schema"),
    (lambda d: d.pop("loads"), "loads"),
    (lambda d: d["loads"][0].update(sent=-1), r"loads\[0\].sent"),
    (lambda d: d["loads"][0]["all"].update(times=[]), "times"),
    (lambda d: d["loads"][0]["all"]["times"]["ttft"].update(histogram="5"), "least"),
    (lambda d: d["loads"][0]["all"]["requests"].update(failed={"reset": 2}), "without messages"),
    (lambda d: d["loads"][0]["step"].update(at_once="4"), "at_once"),
    (lambda d: d["loads"][0]["step"].update(at_once=None), "without a pace"),
    (lambda d: d["loads"][0]["step"].update(rate=2.0), "or with two"),
    (lambda d: d["loads"][0].update(step={}), "damaged"),
    (lambda d: d["loads"][0]["step"]["work"].update(kind="poem"), "poem"),
    (lambda d: d["loads"][0]["step"]["work"].update(order="x"), "an order"),
    (lambda d: d["loads"][0]["step"]["work"].update(input_tokens={"kind": "uniform", "low": 9, "high": 5}), "go down"),
    (lambda d: d["loads"][0]["step"]["work"].update(input_tokens={"kind": "mix", "parts": []}), "input_tokens"),
    (lambda d: d["loads"][0]["slices"][0].update(width=1.5), "slices"),
    (lambda d: d["loads"][0]["slices"][0].update(seconds=0.5), "slices"),
    (lambda d: d["loads"][0]["slices"].append(d["loads"][0]["slices"][0]), "twice"),
    (lambda d: d["loads"][0]["metrics"]["series"].reverse(), "follow"),
    (lambda d: d["loads"][0]["all"]["sums"].pop("good"), "damaged"),
    (lambda d: d["loads"][0]["all"]["sums"].update(with_prompt=0), "input tokens of no request"),
    (lambda d: d["loads"][0]["all"]["times"]["ttft"].update(sums="1 1"), "sums"),
    (lambda d: d["server"].update(prompt_overhead_tokens="x"), "prompt_overhead_tokens"),
    (lambda d: d["server"].update(facts=[]), "facts"),
    (lambda d: d["loads"][0]["metrics"].update(series=[{"seconds": float("inf"), "kv_use": "x"}]), "damaged"),
    (lambda d: d.update(url="ftp://x"), "damaged"),
    (lambda d: d.update(calibration={"errors": 5}), "no calibration"),
])  # fmt: skip
def test_what_is_no_saved_report_is_said(change: Callable[[dict[str, Any]], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        saved.of_dict(_broken(change), "a.json")


def test_text_of_a_file_steers_no_terminal() -> None:
    document = _broken(lambda d: d["server"].update(model="m\x1b[2J\n"))
    assert saved.of_dict(document, "x").server["model"] == "m [2J "


def test_shown_from_a_file(kvctl: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    saved.save(_report(_outcome(4, [50 * MS] * 30)), str(path))
    outcome = kvctl("serve-test", "--from", str(path))
    assert outcome.code == 0, outcome.err
    assert "4 at once: kv-saturated" in outcome.out
    assert "50.0 ms" in outcome.out
    assert kvctl("serve-test", "--from", str(path), "--json").json["loads"][0]["sent"] == 30
    for argv, said in (
        (("-c", "2"), "--from shows a saved result, and --concurrency is about a run"),
        (("http://x",), "and URL is about a run"),
        (("--fail-on", "ttft_p50:+5%"), "--fail-on is about --compare"),
        (("--report", str(tmp_path / "a.txt")), "does not end in .html"),
        (
            ("--save", str(tmp_path / "x.html"), "--report", str(tmp_path / "x.html")),
            "--save and --report name the same file",
        ),
    ):
        outcome = kvctl("serve-test", "--from", str(path), *argv)
        assert outcome.code == 2, argv
        assert said in outcome.err
    assert kvctl("serve-test", "--from", str(tmp_path / "none.json")).code == 1
    outcome = kvctl("serve-test", "http://127.0.0.1:9", "--junit", str(tmp_path / "no" / "x.xml"))
    assert outcome.code == 1
    assert "there is no folder" in outcome.err


# -- compared -------------------------------------------------------------------------------------------


def test_one_percentile_over_another_by_hand() -> None:
    # 110 (100 to 121) over 100 (90 to 110). Below: √(ln(110/100)² + ln(110/100)²) = 0.13479, and 1.1 · e^-0.13479 = 0.96127.
    # Above: √(ln(121/110)² + ln(100/90)²) = √(0.09531² + 0.10536²) = 0.14207, and 1.1 · e^0.14207 = 1.26794.
    found = compare.quotient(Percentile(50, 110, 100, 121), Percentile(50, 100, 90, 110))
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((1.1, 0.96127, 1.26794), rel=1e-4)
    open_ended = compare.quotient(Percentile(99, 110, 100, None), Percentile(99, 100, 90, 110))
    assert open_ended is not None
    assert (open_ended.low, open_ended.high) == (None, None)
    assert compare.quotient(Percentile(99, 0, 0, 0), Percentile(99, 100, 90, 110)) is None


def test_how_many_requests_a_percentile_takes() -> None:
    # p99 of 563: 557.37 + 1.96 √(563 · 0.0099) = 561.998, so that rank 562 + 1 bounds it; of 562 it would be rank 563.
    assert told_of(99) == 563
    assert told_of(50) == 8


@pytest.mark.parametrize(("of", "count"), [(50, 60), (95, 150)])
def test_alike_runs_differ_by_chance_as_rarely_as_it_says(of: int, count: int) -> None:
    """Of two runs of one distribution no more than 5 in 100 are told apart; of one that is slower by half nearly all."""
    lot = random.Random(of)

    def drawn(factor: float) -> Percentile:
        return Histogram([int(factor * lot.lognormvariate(18, 0.3)) for _ in range(count)]).percentile(of)

    apart = {1.0: 0, 1.5: 0}
    for factor in apart:
        for _ in range(200):
            found = compare.quotient(drawn(factor), drawn(1.0))
            apart[factor] += found is not None and found.same is False
    assert apart[1.0] <= 18  # 10 are expected at most; 18 and more come once in a hundred
    assert apart[1.5] >= 195


def test_gates_by_hand() -> None:
    slower, unsure = Ratio(1.10, 1.04, 1.16, ""), Ratio(1.10, None, None, "")
    gate = compare.read_gate("ttft_p99:+5%")
    assert gate.words == "ttft_p99:+5%"
    assert gate.broken(slower) is False  # it may be 4% more
    assert compare.read_gate("ttft_p99:+3%").broken(slower) is True
    assert compare.read_gate("ttft_p99:3%").broken(slower) is True
    assert gate.broken(unsure) is None
    assert gate.broken(None) is None
    less = Ratio(0.90, 0.86, 0.94, "")
    assert compare.read_gate("output_tokens:-5%").broken(less) is True
    assert compare.read_gate("output_tokens:-8%").broken(less) is False
    for text, said in (
        ("ttft:+5%", "no figure that is compared"), ("ttft_p42:+5%", "no figure"), ("ttft_p99", "no change in percent"),
        ("ttft_p99:5", "no change"), ("ttft_p99:-5%", "more of it is worse"), ("output_tokens:+5%", "less of it is worse"),
        ("output_tokens:-100%", "out of range"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=said):
            compare.read_gate(text)


def test_two_runs_beside_each_other() -> None:
    lot = random.Random(1)
    before = [int(lot.uniform(45, 55) * MS) for _ in range(100)]
    now = [2 * value for value in before]
    gates = tuple(map(compare.read_gate, ("ttft_p50:+50%", "tpot_p50:+5%", "e2e_p99:+5%")))
    earlier = _report(_outcome(4, before), _outcome(8, before))
    newer = _report(_outcome(4, now), version="9.9").replace(server=_report().server | {"version": "0.33.0"})
    found = compare.compare(newer, earlier, "old.json", gates)
    assert [one.name for one in found.loads] == ["4 at once"]
    assert found.unmatched == ("8 at once: only in old.json",)
    rows = {row.what: row for row in found.loads[0].rows}
    assert rows["ttft_p50"].ratio is not None
    assert rows["ttft_p50"].ratio.value == pytest.approx(2, rel=2e-3)
    assert rows["ttft_p50"].verdict == "worse"
    assert rows["tpot_p50"].verdict == "same within noise"
    assert rows["ttft_p99"].verdict == "too few requests"
    # Ten seconds of ten requests with five events each, in both: no difference.
    assert rows["output_tokens"].ratio is not None
    assert rows["output_tokens"].ratio.value == 1
    assert [line.partition(" (")[0] for line in found.broken] == ["4 at once: ttft_p50 +100.0%"]
    assert len(found.untold) == 1
    assert "it takes 563" in found.untold[0]
    assert ("server version", "0.32.0", "0.33.0") in found.differences
    assert ("kvctl", earlier.version, "9.9") in found.differences
    other = newer.outcomes[0].replace(step=Step(WORK.replace(input=Fixed(200)), 4))
    with pytest.raises(UsageError, match=r"of other requests: 100 tokens in, .* there and 200 tokens in, .* here"):
        compare.compare(newer.replace(outcomes=(other,)), earlier, "old.json")
    with pytest.raises(
        UsageError, match=r"nothing to compare: old\.json has 4 at once, 8 at once, and this run 2 at once"
    ):
        compare.compare(_report(_outcome(2, now)), earlier, "old.json")


def test_loads_are_matched_by_what_was_sent() -> None:
    """Words, which say in what a load differs from others of its run, make no other load of it; nor do retries and processes."""
    one = _outcome(4, [50 * MS] * 20)
    twice = _report(one.replace(step=one.step.replace(beside="100 tokens in")), one, _outcome(8, [MS] * 9))
    again = _report(one).replace(plan=_report(one).plan.replace(processes=2, retries=3, warm=9))
    found = compare.compare(again, twice, "old.json")
    assert [load.name for load in found.loads] == ["4 at once"]
    assert found.unmatched == ("4 at once: only in old.json", "8 at once: only in old.json")
    assert {("processes", 1, 2), ("retries", 0, 3), ("warm up", None, 9)} <= set(found.differences)
    with pytest.raises(UsageError, match=r"of other requests: .* \(groups differ\)"):
        compare.compare(_report(one.replace(step=Step(Made(Fixed(100), Fixed(5), groups=2), 4))),
                        _report(one.replace(step=Step(Made(Fixed(100), Fixed(5)), 4))), "old.json")  # fmt: skip
    # Of a trace the server takes what fits, which is known once it was looked at: before that all of it is asked for.
    whole, part = Traced("a", None, 10, 900), Traced("a", None, 7, 900, left_out=3)
    before = _report(one.replace(step=Step(part, 4)))
    compare.check_plan(before.plan.replace(steps=(Step(whole, 4),)), before, "old.json", ())
    with pytest.raises(UsageError, match="other requests"):
        compare.compare(_report(one.replace(step=Step(whole, 4))), before, "old.json")


def test_pieces_of_slices_of_any_width() -> None:
    """20 seconds of 50 events each, in slices of one and of two seconds: 50 a second in ten pieces either way; 9 slices are too few."""
    from kvctl.loadtest.compare import _pieces

    for most, seconds, expected in ((4096, 20, (50.0,) * 10), (10, 20, (50.0,) * 10), (4096, 9, None), (5, 20, None)):
        slices = Slices(most)
        for second in range(20):
            slices.add([BEGAN + second * S + place for place in range(50)])
        one = _outcome(4, [MS] * 9).replace(seconds=float(seconds))
        one.figures.slices = slices
        found = _pieces(one)
        assert (None if found is None else found.values) == expected


def test_this_run_against_a_baseline(kvctl: Run, tmp_path: Path) -> None:
    """First tokens after 20 ms in the baseline, and after 80 ms in the run: for sure more than half as late again."""
    jsonschema = pytest.importorskip("jsonschema")
    delay = 0.02
    base, cases = str(tmp_path / "base.json"), str(tmp_path / "cases.xml")

    def answer(number: int, asked: dict[str, Any]) -> Sequence[Act]:
        return [wait(delay), *engine.whole(asked)]

    with Engine(answer) as engine:
        assert kvctl("serve-test", engine.url, *QUICK, "--save", base).code == 0
        delay = 0.08
        outcome = kvctl(
            "serve-test",
            engine.url,
            *QUICK,
            "--compare",
            base,
            "--fail-on",
            "ttft_p50:+50%",
            "--json",
            "--junit",
            cases,
        )
        assert outcome.code == 3, outcome.err
        assert "broken: 1 at once: ttft_p50 +" in outcome.err
        comparison = outcome.json["comparison"]
        schema = Path(__file__).parents[1] / "kvctl/data/schemas/kvctl.serve-compare-1.json"
        jsonschema.validate(comparison, json.loads(schema.read_text("utf-8")))
        assert comparison["broken"]
        assert "regression" in Path(cases).read_text()
        beside = kvctl("serve-test", "--from", base, "--compare", base, "--fail-on", "ttft_p50:+0%")
        assert beside.code == 0
        assert "same within noise" in beside.out
        sent = len(engine.bodies)
        for argv, said in (
            (("-i", "50"), "40 tokens in, 4 out there and 50 tokens in, 4 out here"),
            (("-c", "3"), "nothing to compare"),
            (("--fail-on", "ttft_p99:+5%"), "it takes 563 to tell"),
            (("--fail-on", "nonsense"), "no figure that is compared"),
        ):
            outcome = kvctl("serve-test", engine.url, *QUICK, "--compare", base, *argv)
            assert outcome.code == 2, argv
            assert said in outcome.err
        assert len(engine.bodies) == sent  # nothing of this took a run to find out


# -- the page -------------------------------------------------------------------------------------------


def _page(kvctl: Run, tmp_path: Path, report: ServeReport, *argv: str) -> str:
    source, path = str(tmp_path / "a.json"), tmp_path / "a.html"
    saved.save(report, source)
    outcome = kvctl("serve-test", "--from", source, "--report", str(path), *argv)
    assert outcome.code in (0, 1), outcome.err
    return path.read_text("utf-8")


def test_a_page_that_needs_nothing_from_elsewhere(kvctl: Run, tmp_path: Path) -> None:
    lot = random.Random(2)
    loads = [
        _outcome(at, [int(lot.uniform(40, 60) * at * MS) for _ in range(50)], began=BEGAN + at * 10 * S)
        for at in (1, 2, 4)
    ]
    page = _page(kvctl, tmp_path, _report(*loads))
    assert not re.search(r"<script|<link|<img|<iframe|@import|url\(", page)
    assert set(re.findall(r"https?://[^\s\"'<]+", page)) == {
        "http://www.w3.org/2000/svg",
        "http://127.0.0.1:8000/v1/chat/completions:",
    }
    assert "m&lt;b&gt;" in page
    assert "<b>" not in page
    pictures = re.findall(r"<svg.*?</svg>", page, re.S)
    assert len(pictures) == 6
    for picture in pictures:
        ElementTree.fromstring(picture)
    assert "prefers-color-scheme:dark" in page
    # Two looks of each load saw more preemptions than the one before: 2, then 3.
    assert page.count("2 preemptions until") == 3
    assert page.count("3 preemptions until") == 3
    # Loads of 10 requests a second with 5 tokens each; the worst waits as long as it was told to.
    assert "TTFT against throughput" in page
    assert "4 at once: TTFT p50" in page
    assert page.count('<span class="badge kv-saturated">') == 3
    assert _page(kvctl, tmp_path, _report(*loads)) == page  # the same report is the same bytes


def test_a_page_of_a_server_that_says_nothing_and_of_failures(kvctl: Run, tmp_path: Path) -> None:
    """No metrics: no cache and no queue over time. Nothing answered: nothing to draw, and still a page."""
    silent = _outcome(4, [50 * MS] * 20).replace(samples=(), window=Window(None, None, None, None, 0, 0))
    page = _page(kvctl, tmp_path, _report(silent))
    assert "KV cache in use</text>" not in page
    assert "Output tokens a second" in page
    failed = _outcome(4, [], faults=[Fault("reset", "<i>gone</i>")] * 3).replace(
        verdict=Verdict("failed", ("none",)), samples=()
    )
    page = _page(kvctl, tmp_path, _report(failed))
    assert "every request failed" in page
    assert "&lt;i&gt;gone" in page
    assert "<svg" not in page


def test_a_page_of_many_loads_draws_as_many_as_can_be_told_apart(kvctl: Run, tmp_path: Path) -> None:
    page = _page(kvctl, tmp_path, _report(*(_outcome(at, [at * MS] * 5, began=BEGAN + at * S) for at in range(1, 13))))
    assert "(8 of 12 loads)" in page


# -- for other programs -----------------------------------------------------------------------------------


def test_metrics_for_the_textfile_collector() -> None:
    slo = Slo(ttft=80 * MS)
    # Of 100 requests TTFT is 1 to 100 ms: 80 keep 80 ms; the median is 50 ms, and 99 of 100 take 99 ms.
    one = _outcome(4, [number * MS for number in range(1, 101)], slo=slo, faults=[Fault("server", "x")])
    report = _report(
        one,
        _outcome(4, [MS] * 3, slo=slo, began=BEGAN + 20 * S).replace(window=Window(None, None, None, None, 0, 0)),
        slo=slo,
    )
    text = textfile.textfile(report).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    ttft = families["kvctl_serve_test_ttft_seconds"]
    assert ttft.type == "summary"
    found = {
        (sample.name, sample.labels["load"], sample.labels.get("quantile")): sample.value for sample in ttft.samples
    }
    assert found["kvctl_serve_test_ttft_seconds", "4 at once", "0.5"] == pytest.approx(0.050, rel=2e-3)
    assert found["kvctl_serve_test_ttft_seconds", "4 at once", "0.99"] == pytest.approx(0.099, rel=2e-3)
    assert found["kvctl_serve_test_ttft_seconds_count", "4 at once", None] == 100
    assert found["kvctl_serve_test_ttft_seconds_sum", "4 at once", None] == pytest.approx(5.05)
    labels = {"model": "m<b>", "engine": "vllm", "load": "4 at once"}
    every = [(sample.name, sample.labels, sample.value) for family in families.values() for sample in family.samples]
    assert ("kvctl_serve_test_kv_cache_usage_max_ratio", labels, 0.98) in every
    assert ("kvctl_serve_test_requests", labels | {"result": "good"}, 100) in every
    assert ("kvctl_serve_test_requests", labels | {"result": "server"}, 1) in every
    assert ("kvctl_serve_test_objective_kept_ratio", labels, 80 / 101) in every
    assert ("kvctl_serve_test_verdict", labels | {"verdict": "kv-saturated"}, 1) in every
    # 2026-11-30T12:00:00Z, by `date -u -d ... +%s`.
    assert ("kvctl_serve_test_start_timestamp_seconds", {"model": "m<b>", "engine": "vllm"}, 1796040000) in every
    # What the second load does not know is not there, and no line is there twice.
    uses = families["kvctl_serve_test_kv_cache_usage_max_ratio"].samples
    assert [sample.labels["load"] for sample in uses] == ["4 at once"]
    lines = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))
    assert all(f"# HELP {name} " in text for name in families)


def test_cases_for_a_ci_server() -> None:
    slo = Slo(ttft=80 * MS)
    fine, slow = _outcome(1, [50 * MS] * 20, slo=slo), _outcome(2, [90 * MS] * 20, slo=slo)
    dead = _outcome(4, [], slo=slo, faults=[Fault("server", "engine\x00died <&")]).replace(
        given_up="1 of 1 requests failed, and 5% may"
    )
    slow.figures.cached = 40 * 20  # of 100 each, of which 25 had been sent before
    report = _report(fine, slow, dead, slo=slo)
    assert (
        'kvctl_serve_test_prefix_cache_design_missed{engine="vllm",load="2 at once",model="m<b>"} 1.0'
        in textfile.textfile(report).decode()
    )
    root = ElementTree.fromstring(junit.junit(report, None))
    cases = {
        str(case.get("name")): [child.tag for child in case if child.tag != "system-out"]
        for case in root.iter("testcase")
    }
    assert cases == {
        "1 at once: answered": [], "1 at once: ttft 80 ms, p99": [], "1 at once: found in the cache as designed": [],
        "2 at once: answered": [], "2 at once: ttft 80 ms, p99": ["failure"], "2 at once: found in the cache as designed": ["failure"],
        "4 at once: answered": ["error"], "4 at once: ttft 80 ms, p99": ["failure"],
    }  # fmt: skip
    assert [root.get(name) for name in ("tests", "failures", "errors")] == ["8", "3", "1"]
    error = root.find(".//error")
    assert error is not None
    assert "engine\ufffddied <&" in str(error.get("message"))
    gates = tuple(map(compare.read_gate, ("ttft_p50:+5%", "ttft_p99:+5%", "e2e_p50:+500%")))
    beside = compare.compare(_report(slow), _report(slow.replace(figures=fine.figures)), "old.json", gates)
    root = ElementTree.fromstring(junit.junit(_report(slow, interrupted=True), beside))
    cases = {
        str(case.get("name")): [child.tag for child in case if child.tag != "system-out"]
        for case in root.iter("testcase")
    }
    assert cases == {
        "2 at once: answered": [],
        "2 at once: found in the cache as designed": ["failure"],
        "2 at once: ttft_p50:+5% against old.json": ["failure"],
        "2 at once: ttft_p99:+5% against old.json": ["error"],  # of twenty requests nobody can tell
        "2 at once: e2e_p50:+500% against old.json": [],
        "run: complete": ["error"],
    }  # fmt: skip


def test_files_are_there_whatever_came_of_the_run(kvctl: Run, tmp_path: Path) -> None:
    names = {"--save": "a.json", "--report": "a.html", "--prometheus": "a.prom", "--junit": "a.xml"}
    argv = [word for option, name in names.items() for word in (option, str(tmp_path / name))]
    with Engine(lambda number, asked: [wait(0.02), *engine.whole(asked)]) as engine:
        outcome = kvctl("serve-test", engine.url, *QUICK, "--slo", "ttft=1ms,p50", *argv)
        assert outcome.code == 3, outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names.values())
    assert "kvctl_serve_test_objective_missed" in (tmp_path / "a.prom").read_text()
    assert "<failure" in (tmp_path / "a.xml").read_text()


def test_files_are_there_where_nobody_reads_what_is_printed(tmp_path: Path) -> None:
    """As of `kvctl serve-test ... | head -1`: here the pipe is closed before anything is written."""
    source, path = tmp_path / "a.json", tmp_path / "b.json"
    saved.save(_report(_outcome(4, [50 * MS] * 30)), str(source))
    ours, theirs = os.pipe()
    os.close(ours)
    argv = [sys.executable, "-m", "kvctl", "serve-test", "--from", str(source), "--save", str(path)]
    ran = subprocess.run(argv, stdout=theirs, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(theirs)
    assert b"Traceback" not in ran.stderr
    assert json.loads(path.read_text()) == json.loads(source.read_text())


# -- while it runs ----------------------------------------------------------------------------------------

SEEN = Moment(
    "16 at once",
    2,
    3,
    False,
    0.5,
    75.0,
    "60 requests",
    29,
    1,
    16,
    0.97,
    12,
    4,
    3,
    (0.1, None, 0.2, 0.4),
    (0.01, 0.01),
    (0.0, 100.0),
)


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("colour", [False, True])
def test_a_frame_fits_and_says_what_it_has_to(width: int, colour: bool) -> None:
    from kvctl.screen_live import frame

    lines = frame(SEEN, width, colour=colour, unicode=True)
    bare = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert (bare != lines) == colour
    assert max(map(len, bare)) <= width
    whole = "\n".join(bare)
    for words in (
        "2 of 3",
        "16 at once",
        "50% of 60 requests",
        "29 good",
        "1 failed",
        "16 under way",
        "97%",
        "12 running",
        "4 waiting",
    ):
        assert words in whole
    assert "400 ms" in bare[3]
    # Of 0.4 s at most 0.1 s is a quarter and 0.2 s a half, with a gap between: ▃ (1 + 7/4 up), space, ▅ (1 + 7/2).
    assert "▃ ▅█" in bare[3]


def test_a_frame_without_unicode_and_without_metrics() -> None:
    from kvctl.screen_live import frame

    lines = frame(
        SEEN.replace(kv_use=None, running=None, waiting=None, of=None, warming=True), 80, colour=False, unicode=False
    )
    assert all(line.isascii() for line in lines)
    assert not any("KV cache" in line for line in lines)
    assert "load 2" in lines[0]
    assert "warming up" in lines[0]


class _Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("environment", "drawn", "coloured"), [
    ({"TERM": "xterm"}, True, True), ({"TERM": "xterm", "NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, False, False),
])  # fmt: skip
def test_what_a_terminal_gets(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], drawn: bool, coloured: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(output_serve, "_REFRESH_S", 0.01)
    monkeypatch.setattr(Live, "look", lambda self: SEEN)
    with output_serve.live(quiet=False) as (now, _, done):
        now.stage("looking")
        while drawn and "KV cache" not in screen.getvalue():
            time.sleep(0.005)
        done(_outcome(4, [50 * MS] * 20))
    said = screen.getvalue()
    assert ("\x1b[K" in said, bool(re.search(r"\x1b\[[0-9;]+m", said))) == (drawn, coloured)
    assert "4 at once: 20 good, TTFT 50.0 ms, TPOT 10.0 ms" in said
    assert ("looking\n" in said) == (not drawn)
    if drawn:  # six lines up, and nothing below
        assert said.endswith("\x1b[J")
        assert "\x1b[6F" in said
    with output_serve.live(quiet=True) as (now, _, done):
        now.stage("looking")
        done(_outcome(4, [50 * MS] * 20))
    assert screen.getvalue() == said


def test_the_course_of_a_load_is_what_its_figures_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests in the first second, with first tokens after 50 and 150 ms, and none in the second."""
    clock = iter((0.0, 0.0, 0.0, 1.0, 1.5, 2.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    figures, live = Figures(), Live()
    loop = Loop(Address(socket.AF_INET, "127.0.0.1", 9, "x"))
    watch = metrics.Watch(cast("Any", None), "vllm")
    try:
        live.begin("4 at once", 1, 2, Length(requests=8))
        live.watch(watch)
        live.inside(figures, loop)
        watch.samples += [
            metrics.Sample(0, {"preemptions": 7.0, "kv_use": 0.1}),
            metrics.Sample(1, {"preemptions": 9.0, "kv_use": 0.5}),
        ]
        for ttft in (50, 150):
            figures.add(_exchange(BEGAN, ttft * MS, 5, 10 * MS))
        live.tick(Seen(True, 2, 0, 4))
        for _ in range(3):
            seen = live.look()
    finally:
        loop.close()
    assert seen is not None
    assert seen.ttft == (pytest.approx(0.1), None)
    assert seen.tpot == (pytest.approx(0.01), None)
    assert seen.events == (10.0, 0.0)
    assert (seen.part, seen.good, seen.preempted, seen.kv_use, seen.waiting) == (0.25, 2, 2.0, 0.5, None)
    live.end()
    assert live.look() is None


def test_a_load_of_several_processes_has_counts_and_no_courses() -> None:
    """And one by the times of a trace has no end that it could be a share of."""
    from kvctl.screen_live import frame

    live = Live()
    live.begin("4 at once", 1, 1, Length())
    assert live.look() is None
    live.tick(Seen(True, 10, 3, 4))
    seen = live.look()
    assert seen is not None
    assert (seen.good, seen.failed, seen.under_way, seen.part, seen.ttft, seen.events) == (7, 3, 4, None, None, None)
    lines = frame(seen, 80, colour=False, unicode=True)
    assert len(lines) == 2
    assert "%" not in lines[0]
    assert "7 good  3 failed  4 under way" in lines[1]


def test_a_run_on_a_terminal_leaves_it_clean(tmp_path: Path) -> None:
    """Frames are drawn over one another, stdout has none of them, and what stays is a line for the load."""
    pty = pytest.importorskip("pty")
    with Engine(
        lambda number, asked: [wait(0.1), *engine.whole(asked)], page='vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
    ) as engine:
        ours, theirs = pty.openpty()
        parts: list[bytes] = []

        def drain() -> None:
            with contextlib.suppress(OSError):
                while part := os.read(ours, 65536):
                    parts.append(part)

        thread = threading.Thread(target=drain, daemon=True)
        thread.start()
        argv = [sys.executable, "-m", "kvctl", "serve-test", engine.url, *QUICK, "-c", "2"]
        environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "TERM": "xterm"}
        ran = subprocess.run(argv, stdout=subprocess.PIPE, stderr=theirs, env=environment, timeout=60, check=False)
        os.close(theirs)
        thread.join(5)
        os.close(ours)
    said = b"".join(parts).decode()
    assert ran.returncode == 0, said
    assert b"\x1b" not in ran.stdout
    assert "KV cache" in said
    assert said.count("2 at once: 12 good, TTFT") == 1
    assert said.endswith("\x1b[J")
