"""Profiles as JSON and as files, read back and compared; and the charts of them."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.files import check_writable
from kvctl.measure.compare import Cell, Comparison, compare
from kvctl.measure.fits import lines_of
from kvctl.measure.report import (
    CacheRow,
    Limits,
    MemoryUse,
    Point,
    ProfileReport,
    ScaledTimes,
    Try,
    UntilOom,
    Work,
)
from kvctl.measure.saved import Kept, Saved, load, save
from kvctl.measure.statistics import Sample
from kvctl.plot import render, terminal
from kvctl.plot.profile import chart_of
from kvctl.reports import ModelInfo, WeightsInfo

# SmolLM2-135M: 30 layers × 3 KV heads × 64 × 2 tensors × 2 bytes.
PER_TOKEN = 23_040
GIB = 2**30


def point(context: int, batch: int, *, slower: float = 1.0) -> Point:
    ttft = tuple(slower * context * batch * 2e-4 * factor for factor in (1, 1.01, 0.99))
    steps = tuple(slower * (0.02 + 1e-6 * context) * factor for factor in (1.0, 1.01, 0.99, 1.02) * 3)
    return Point(
        context=context,
        batch=batch,
        decode=4,
        ttft=Sample(ttft, (1, 1, 1)),
        tpot=Sample(steps, (4, 4, 4)),
        cache=tuple(
            CacheRow(phase, n, n * batch * PER_TOKEN, n * batch * PER_TOKEN, n * batch * PER_TOKEN, tensors=60)
            for phase, n in (("prefill", context), ("decode", context + 4))
        ),
        memory=MemoryUse("kernel", GIB, GIB + batch * context * PER_TOKEN, GIB + 2 * batch * context * PER_TOKEN),
        work=Work(10**12, 10**9, 3 * 10**8),
        limits=Limits(0.5, 0.25, 2e11, 1e10, "memory"),
    )


def made(*points: Point, **changes: Any) -> ProfileReport:
    report = ProfileReport(
        model=ModelInfo(
            "org/model", "llama", "local", "/models/it", None, {"num_hidden_layers": 30}, ("a note",), 8192
        ),
        engine="transformers",
        engine_version="5.24.0",
        dtype="bf16",
        weights=WeightsInfo(269_030_016, 134_515_008, "safetensors headers", "bf16"),
        settings={"device": "cpu", "attention": "sdpa", "prefill_chunk": None, "repeats": 3},
        environment={"torch": "2.13.0", "cpu": {"name": "A", "threads": 2}},
        points=points,
        lines=lines_of(points),
    )
    return report.replace(**changes)


REPORT = made(*(point(context, batch) for batch in (1, 8) for context in (512, 2048, 8192)))


def written(path: Path, report: ProfileReport) -> Saved:
    save(report, str(path))
    return load(str(path))


# -- JSON --------------------------------------------------------------------------------


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_saved_profile_is_the_profile(tmp_path: Path) -> None:
    full = REPORT.replace(
        until_oom=UntilOom("context", 4096, 4224, 4100, (Try(4096, True, "ran", GIB, 1.5), Try(4224, False, "killed")), "x"),
        points=(*REPORT.points, Point(16384, 1, 4, error="out of memory", scaled=ScaledTimes(1.0, 0.5, 7, 7))),
        machine=Kept({"memory": 5, "rate": 1.5}),
        engine_log=Kept({"agrees": False, "rows": []}),
        notes=("n",),
        warnings=("w",),
        interrupted=True,
        ranks=2,
    )  # fmt: skip
    saved = written(tmp_path / "run.json", full)
    assert saved.report.to_dict() == full.to_dict()
    assert saved.report.points == full.points
    assert saved.report.lines == full.lines
    assert saved.report.until_oom == full.until_oom
    assert saved.report.agrees is False  # the engine's log does not
    assert saved.name == str(tmp_path / "run.json")
    assert (saved.report.interrupted, saved.report.ranks) == (True, 2)


def test_the_json_has_what_people_look_for() -> None:
    data = strict(json.dumps(REPORT.to_dict()))
    assert data["schema"] == "kvctl.profile/1"
    assert data["engine"] == {"name": "transformers", "version": "5.24.0"}
    first = data["points"][3]
    assert (first["context"], first["batch"], first["agrees"]) == (512, 8, True)
    # 512 × 8 tokens at 0.2 ms each.
    assert first["ttft"]["median_s"] == pytest.approx(0.8192)
    assert first["prefill_tokens_per_second"] == pytest.approx(5000)
    # Four steps of a repeat at 0.99, 1, 1.01 and 1.02 times 20.512 ms: between the middle two.
    assert first["tpot"]["median_s"] == pytest.approx(0.020512 * 1.005)
    assert first["decode_tokens_per_second"] == pytest.approx(8 / (0.020512 * 1.005))
    assert first["tpot"]["repeats"] == [4, 4, 4]
    assert len(first["tpot"]["values_s"]) == 12
    assert first["tpot"]["interval_by"] == "repeats"
    assert first["cache"][1]["logical_bytes"] == 516 * 8 * PER_TOKEN
    assert (first["cache"][1]["ratio"], first["cache"][1]["agrees"]) == (1.0, True)
    steady = next(line for line in data["lines"] if line["what"] == "steady memory" and line["batch"] == 8)
    assert (steady["slope"], steady["predicted_slope"], steady["unit"], steady["ratio"]) == (
        8 * PER_TOKEN, 8 * PER_TOKEN, "bytes", 1.0,
    )  # fmt: skip


def test_json_holds_only_numbers(tmp_path: Path) -> None:
    odd = made(
        point(512, 1).replace(limits=Limits(math.nan, None, math.inf, -math.inf, "overhead")),
        settings={"path": Path("/x"), "rate": math.nan, "pair": (1, math.inf), 5: True},
    )
    data = strict(json.dumps(odd.to_dict(), allow_nan=False))
    assert data["settings"] == {"path": "/x", "rate": None, "pair": [1, None], "5": True}
    assert data["points"][0]["limits"]["flops_per_second"] is None


# -- files -------------------------------------------------------------------------------


def test_a_failed_save_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("folder", "missing/run.json", "a\0"):
        with pytest.raises(KvctlError, match="cannot write"):
            save(REPORT, str(tmp_path / name))
        with pytest.raises(KvctlError, match="cannot write"):
            check_writable(str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    check_writable(str(tmp_path / "run.json"))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_is_no_saved_profile_is_named_in_one_line(tmp_path: Path) -> None:
    good = json.dumps(REPORT.to_dict())
    deep = json.loads(good) | {"environment": json.loads('{"a":' * 30 + "1" + "}" * 30)}
    cases: dict[str, tuple[bytes, str]] = {
        "empty": (b"", "is empty"),
        "cut": (good[: len(good) // 2].encode(), "cut short|not valid JSON"),
        "list": (b"[]", "holds a list"),
        "binary": (b"\x00\xff\xfe" * 99, "not UTF-8|not valid"),
        "gguf": (b"GGUF....", "GGUF file"),
        "size": (b'{"schema": "kvctl.size/1", "results": []}', r"holds kvctl\.size/1, and is no saved profile"),
        "config": (b'{"model_type": "llama"}', "names no schema"),
        "later": (b'{"schema": "kvctl.profile/12"}', r"later kvctl: kvctl\.profile/12"),
        "esc": (b'{"schema": "\\u001b[31m"}', r"holds \\x1b\[31m"),
        "no engine": (b'{"schema": "kvctl.profile/1"}', "engine should be an object and is null"),
        "nesting": (b'{"a":' * 100_000, "nested too deep to be a saved profile|cut short|not valid"),
        "deep": (json.dumps(deep).encode(), "environment is nested too deep"),
        "digits": (b'{"schema": ' + b"9" * 5000 + b"}", "thousands of digits"),
    }
    for name, (data, expected) in cases.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(KvctlError, match=expected) as caught:
            load(str(path))
        assert "\n" not in caught.value.message, name
        assert "\x1b" not in caught.value.message, name
        assert "configuration" not in caught.value.message, name
        assert caught.value.hint, name
    os.mkfifo(tmp_path / "pipe")
    for name, expected in (
        ("absent", "no such file"),
        ("pipe", "a pipe"),
        (".", "a folder"),
        ("a\0b", "cannot be read"),
    ):
        with pytest.raises(KvctlError, match=expected) as caught:
            load(str(tmp_path / name))
        assert "config.json" not in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        (("points",), {}, "points should be a list"),
        (("points", 0, "context"), -1, r"points\[0\]\.context should be a whole number that is not negative and is -1"),
        (("points", 0, "context"), True, r"points\[0\]\.context"),
        (("points", 0, "context"), 10**30, r"points\[0\]\.context"),
        (("points", 0, "ttft", "values_s"), [], "holds no times"),
        (("points", 0, "ttft", "values_s", 0), 0.0, "not positive"),
        (("points", 0, "ttft", "values_s", 0), math.inf, "should be a number and is Infinity"),
        (("points", 0, "ttft", "values_s", 0), math.nan, "should be a number and is NaN"),
        (("points", 0, "ttft", "values_s", 0), None, "should be a number and is null"),
        (("points", 0, "tpot", "repeats"), [4, 4], "do not add up to the 12 times"),
        (("points", 0, "tpot", "repeats"), [12, 0], "do not add up"),
        (("points", 0, "cache", 0, "phase"), 5, r"cache\[0\]\.phase should be text and is 5"),
        (("model", "id"), ["x"], r"model\.id should be text and is a list or an object"),
        (("interrupted",), "yes", "interrupted should be true or false"),
        (("dtype",), 16, "dtype should be text and is 16"),
        (("lines", 0, "slope"), "1e3", r"lines\[0\]\.slope should be a number"),
        (("engine_log",), 1, "engine_log should be an object"),
    ],
)
def test_a_damaged_profile_is_refused_with_the_place(
    tmp_path: Path, place: tuple[str | int, ...], value: Any, expected: str
) -> None:
    data = json.loads(json.dumps(REPORT.to_dict()))
    spot: Any = data
    for step in place[:-1]:
        spot = spot[step]
    spot[place[-1]] = value
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=expected) as caught:
        load(str(path))
    assert f"{path} is damaged: " in caught.value.message


def test_a_field_that_is_missing_is_named_and_more_fields_are_left_out(tmp_path: Path) -> None:
    data = json.loads(json.dumps(REPORT.to_dict()))
    data["points"][0]["later"] = data["later"] = {"x": 1}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))
    assert load(str(path)).report == load(str(path)).report
    del data["points"][0]["batch"]
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"points\[0\]\.batch is missing"):
        load(str(path))


def test_names_from_a_file_steer_no_terminal(tmp_path: Path) -> None:
    data = json.loads(json.dumps(REPORT.to_dict()))
    data["model"]["id"] = "a\x1b[31m\nb"
    data["environment"]["x\x07"] = ["\u202e"]
    path = tmp_path / "run.json"
    path.write_text(json.dumps(data))
    found = load(str(path)).report
    assert found.model is not None
    assert found.model.id == "a [31m b"
    assert found.environment["x "] == [" "]


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
junk = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@given(key=st.sampled_from(sorted(REPORT.to_dict())), inner=st.sampled_from(sorted(REPORT.points[0].to_dict())), value=junk, deep=st.booleans())  # fmt: skip
def test_no_content_breaks_the_reader(
    tmp_path_factory: pytest.TempPathFactory, key: str, inner: str, value: Any, deep: bool
) -> None:
    data = json.loads(json.dumps(REPORT.to_dict()))
    if deep:
        data["points"][0][inner] = value
    else:
        data[key] = value
    path = tmp_path_factory.getbasetemp() / "junk.json"
    path.write_text(json.dumps(data))
    try:
        found = load(str(path))
    except KvctlError as error:
        message = error.message
    else:
        message = ""
    assert "\n" not in message
    if not message:
        json.dumps(found.report.to_dict(), allow_nan=False)
        compare([found, Saved("other", REPORT)])


# -- beside each other -------------------------------------------------------------------


def cells(found: Comparison, context: int, batch: int, what: str) -> tuple[Cell, ...]:
    matched = next(m for m in found.points if (m.key.context, m.key.batch) == (context, batch))
    return next(row.cells for row in matched.rows if row.what == what)


def test_a_run_beside_itself_is_the_same() -> None:
    found = compare([Saved("a", REPORT), Saved("b", REPORT), Saved("c", REPORT)])
    assert (found.differences, found.unmatched) == ((), ())
    assert len(found.points) == 6
    verdicts = {row.what: {cell.verdict for cell in row.cells[1:]} for m in found.points for row in m.rows}
    assert verdicts == {
        "TTFT": {"same within noise"},
        "TPOT": {"same within noise"},
        "KV cache": {"same"},
        "peak memory": {"same"},
    }


def test_twice_as_fast_is_seen_with_its_noise() -> None:
    fast = made(*(point(context, batch, slower=0.5) for batch in (1, 8) for context in (512, 2048, 8192)))
    found = compare([Saved("slow", REPORT), Saved("fast", fast)])
    before, after = cells(found, 2048, 8, "TTFT")
    assert before.ratio is None
    assert after.ratio is not None
    assert (after.verdict, after.ratio.value) == ("faster", pytest.approx(0.5))
    # Logarithms 0, ln 1.01, ln 0.99 on both sides: variance of a mean 1.0002e-4 / 3, of two 6.668e-5;
    # four degrees of freedom: 2.776 × 0.008166 = 0.02267. With ln 1.05 = 0.04879 between processes: √(0.02267² + 0.04879²) = 0.05380.
    assert after.ratio.low == pytest.approx(0.5 * math.exp(-0.05380), rel=1e-4)
    assert after.ratio.high == pytest.approx(0.5 * math.exp(0.05380), rel=1e-4)
    assert cells(compare([Saved("f", fast), Saved("s", REPORT)]), 512, 1, "TPOT")[1].verdict == "slower"


def test_bytes_are_the_same_or_not() -> None:
    base = point(512, 1)
    cache, memory = base.cache[1], base.memory
    assert memory is not None
    bigger = base.replace(
        cache=(cache.replace(logical_bytes=cache.logical_bytes * 2),),
        memory=memory.replace(peak_bytes=memory.peak_bytes * 1015 // 1000),
    )
    found = compare([Saved("a", made(base)), Saved("b", made(bigger))])
    kv = cells(found, 512, 1, "KV cache")[1]
    assert kv.ratio is not None
    assert (kv.value, kv.ratio.value, kv.verdict) == (2 * 516 * PER_TOKEN, 2.0, "differs")
    assert cells(found, 512, 1, "peak memory")[1].verdict == "same within noise"
    for observer, percent, verdict in (
        ("kernel", 115, "same within noise"), ("kernel", 125, "differs"), ("cuda", 103, "differs"),
    ):  # fmt: skip
        one = base.replace(memory=memory.replace(observer=observer))
        far = base.replace(memory=memory.replace(observer=observer, peak_bytes=memory.peak_bytes * percent // 100))
        found = compare([Saved("a", made(one)), Saved("b", made(far))])
        assert cells(found, 512, 1, "peak memory")[1].verdict == verdict


def test_what_cannot_be_compared_is_said() -> None:
    one = point(512, 1)
    single = one.replace(ttft=Sample((0.1,)), tpot=None, memory=None)
    other = made(single, point(1024, 2), dtype="fp32", environment={"torch": "2.6", "cpu": {"name": "B", "threads": 2}})
    found = compare([Saved("this run", made(one, point(2048, 1))), Saved("old.json", other)])
    assert found.unmatched == (
        "2,048 tokens × 1 sequence, 4 decoded: only in this run",
        "1,024 tokens × 2 sequences, 4 decoded: only in old.json",
    )
    assert {d.what: d.values for d in found.differences} == {
        "dtype": ("bf16", "fp32"),
        "environment.torch": ("2.13.0", "2.6"),
        "environment.cpu.name": ("A", "B"),
    }
    assert cells(found, 512, 1, "TTFT")[1].verdict == "too few repeats"
    assert cells(found, 512, 1, "TPOT")[1].value is None
    # Another chunk or number of ranks is another point.
    chunked = made(one, settings={"prefill_chunk": 128})
    assert compare([Saved("a", made(one)), Saved("b", chunked), Saved("c", made(one, ranks=2))]).points == ()
    with pytest.raises(UsageError, match="nothing to be compared"):
        compare([Saved("a", REPORT)])
    strict(json.dumps(found.to_dict(), allow_nan=False))


def test_readings_of_the_moment_are_no_difference() -> None:
    one, other = (
        made(
            point(512, 1),
            environment={"time": now, "gpus": [{"driver": driver, "free_bytes": now, "readings": {"w": now}}]},
        )
        for now, driver in ((1, "570.1"), (2, "580.2"))
    )
    found = compare([Saved("a", one), Saved("b", other)])
    assert [(d.what, d.values) for d in found.differences] == [("environment.gpus[0].driver", ("570.1", "580.2"))]


def test_a_live_run_and_its_file_do_not_differ(tmp_path: Path) -> None:
    live = made(point(512, 1), settings={"prefill_chunk": None, "contexts": (512,)})
    assert compare([Saved("this run", live), written(tmp_path / "run.json", live)]).differences == ()


# -- charts ------------------------------------------------------------------------------


def test_the_chart_has_what_was_measured() -> None:
    chart = chart_of(REPORT)
    assert [curve.name for curve in chart.curves] == [
        "KV cache, batch 1",
        "KV cache, batch 8",
        "peak beside the weights, batch 1",
        "peak beside the weights, batch 8",
    ]
    cache = chart.curves[1]
    expected = [(context, context * 8 * PER_TOKEN) for context in (512, 2048, 8192)]
    assert [(mark.context, mark.value) for mark in cache.measured] == expected == list(cache.points)
    assert (cache.line, cache.facts) == ("predicted", ("as predicted, to the byte",))
    peak = chart.curves[2]
    assert [mark.value for mark in peak.measured] == [2 * context * PER_TOKEN for context in (512, 2048, 8192)]
    assert peak.facts == ("45 KiB a token of context",)  # 2 × 23,040 bytes
    assert chart.below is not None
    (one, _) = chart.below.curves
    # 20 ms and 1 ns for every token, times 1.005 (the median of the four factors).
    assert one.points == ((512, 20_614_560), (8192, 28_332_960))
    assert [mark.value for mark in one.measured] == pytest.approx([20_614_560, 22_158_240, 28_332_960], abs=1)
    assert one.facts == ("20.1 ms + 1.03 ms every 1,024 tokens",)
    for kind in ("svg", "html"):
        assert render(chart, kind)
    assert "decode step, batch 8" in terminal(chart, 120, 40, colour=False, unicode=True)


def test_a_chart_of_little() -> None:
    with pytest.raises(UsageError, match="nothing to plot"):
        chart_of(made(Point(512, 1, 4, error="out of memory")))
    alone = chart_of(made(point(512, 1).replace(memory=None, tpot=None)))
    assert (alone.below, [curve.name for curve in alone.curves]) == (None, ["KV cache"])
    assert alone.subtitle == "○ measured"
    assert terminal(alone, 80, 24, colour=False, unicode=True)
    steps = chart_of(made(point(512, 1).replace(memory=None, cache=())))
    assert (steps.quantity, steps.below) == ("time", None)
    assert steps.note
    # Logits and activations that would press the cache flat stay out.
    memory = point(512, 1).memory
    assert memory is not None
    huge = point(512, 1).replace(memory=memory.replace(peak_bytes=100 * GIB))
    assert [curve.name for curve in chart_of(made(huge)).curves] == ["KV cache"]


def test_a_chart_of_many_batches() -> None:
    chart = chart_of(made(*(point(512, batch) for batch in range(1, 12))))
    assert len(chart.curves) == 8
    assert chart.below is not None
    assert "3 more batches are not drawn" in chart.below.note


def test_a_wrong_prediction_is_said_beside_the_curve() -> None:
    base = point(512, 1)
    wrong = base.replace(cache=tuple(row.replace(predicted_bytes=GIB) for row in base.cache))
    curve = chart_of(made(wrong)).curves[0]
    assert curve.facts == ("predicted: 1 GiB at 512 tokens",)
    assert curve.points == ((512, GIB),)
    assert curve.measured[0].value == 512 * PER_TOKEN
