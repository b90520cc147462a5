"""The JSON contract of `kvctl profile`: reports with every part fit the schema, and the schema has no part that none fills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from test_schema import load, undescribed

from kvctl.hardware.device import Device, Readings
from kvctl.measure.assessed import AssessAsked, Assessed, Assessment, Bounds, Ends, Greedy, Recall
from kvctl.measure.environment import environment
from kvctl.measure.fits import lines_of
from kvctl.measure.machine import Gpu, Holder, look
from kvctl.measure.quality import Estimate, Quality
from kvctl.measure.rates import Rate, Rates
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
from kvctl.measure.saved import Saved
from kvctl.measure.saved import load as load_saved
from kvctl.measure.shared import Alike, FirstToken, Forked, Held, PrefillWork, Sharing, SharingAsked
from kvctl.measure.statistics import Ratio, Sample
from kvctl.output_profile import emit_profile
from kvctl.reports import ModelInfo, WeightsInfo
from kvctl.startlog.figures import Figure
from kvctl.startlog.log import StartLog
from kvctl.startlog.report import LogReport, LogRow, Refused

Json = dict[str, Any]

PROFILE = Draft202012Validator(load("kvctl.profile-1.json"))
GIB = 2**30


def point(context: int) -> Point:
    return Point(
        context, 2, 3,
        ttft=Sample((0.5, 0.51, 0.52)),
        tpot=Sample((0.02, 0.021, 0.022) * 3, (3, 3, 3)),
        cache=tuple(CacheRow(phase, context, 4096 * context, 8192 * context, 4096 * context, rank, 6) for phase in ("prefill", "decode") for rank in (0, 1)),
        memory=MemoryUse("samples", GIB, GIB, 2 * GIB, 2 * GIB, 2 * GIB, GIB, 512, GIB, 17, 0.01),
        work=Work(10**12, 10**9, 3 * 10**8),
        limits=Limits(0.5, 0.25, 2e11, 1e10, "memory"),
        scaled=ScaledTimes(1.5, 0.2, 4096, 4096),
    )  # fmt: skip


def log() -> LogReport:
    figure = Figure("blocks", 100, 0, "blocks", 7, "CUDA0", "100")
    start = StartLog("server.log", "vllm", "0.33", "org/model", "A model", "vllm serve org/model", "vllm@0.33", "gpu",
                     (figure, Figure("kv_available", 2 * GIB, 2**22, "bytes", 8, "", "2.00 GiB")), (), None, True, 1, 1, ())  # fmt: skip
    rows = (
        LogRow("blocks", "blocks", "100", 100, 0, 7, 100, 100, True, 0),
        LogRow("weights", "bytes", "1.5 GiB", 1.5 * GIB, 2**22, 9, None, None, None, 0, "a cause", "a remark"),
    )
    return LogReport(
        start, rows, Refused("too long", 9, "2 GiB are short", 2 * GIB, ("--ctx 4k",), "ValueError: …"), ("n",)
    )


def gpu() -> Gpu:
    device = Device("NVIDIA H100", 80 * GIB, index=0, uuid="GPU-1", free_bytes=70 * GIB, peers=(1,), nvlinks=18, pcie="gen 5 x16",
                    compute_capability="9.0", driver="580.1", cuda_version="13.0", notes=("n",))  # fmt: skip
    readings = Readings(1980, 1980, 2619, 2619, 120.5, 700.0, 41, True, ("power",))
    return Gpu(device, readings, (Holder(7, GIB, "python", "me"), Holder(8, None, None, None)))


RATES = Rates(
    "cpu",
    (Rate("read", 3e10, 0.1, 5, 0.4, "memchr"),),
    (Rate("matmul", 3e11, 0.1, 5, 0.4, "torch", "float32"),),
    4e10,
    1e12,
    ("n",),
)


def assessment() -> Assessment:
    estimate = Estimate(0.5, 0.1, 0.05)
    found = Quality(1536, 6, 20, "blocks", 20.0, 20.1, estimate, estimate, 0.4, Estimate(0.99, 0.002, 0.001))
    row = Assessed("int4", ("int4: …",), 576, 900, 900, 3200, 4096, Ratio(1.1, 1.0, 1.2, "pairs"), Ratio(1.2, 1.1, 1.3, "pairs"), found,
                   Greedy(20.5, 32, 6), Recall((0.0, 1.0), (2, 1), 2), ("fp8",), True, None, Ends(1000, 3, 60))  # fmt: skip
    broken = Assessed("int2", ("int2: …",), 576, error="out of memory")
    return Assessment(
        (row, broken),
        AssessAsked(512, encoder_tokens=9, bounds=Bounds(1.0, 98.0)),
        "english",
        False,
        ("tova is left out: …",),
    )


def sharing() -> Sharing:
    """Two requests, with everything that is measured of them."""
    alike = Alike("prefix", 10, 9, 0.5, 20.0)
    times = Sample((0.5, 0.25))
    return Sharing(
        SharingAsked(64, 0.5, 2), (Held("contiguous", 900, None, 128, 100), Held("paged", 800, 800, 112, 100, 7)), (alike,), (0, 32), (0, 32),
        Forked(63, 4, 3, 3, 3, 8, 8, 20, alike), PrefillWork(100, 50), FirstToken(times, times, Ratio(0.5, 0.4, 0.6, "pairs")),
    )  # fmt: skip


def full() -> ProfileReport:
    """A report with every part."""
    points = tuple(point(context) for context in (512, 1024, 2048, 4096))
    return ProfileReport(
        model=ModelInfo("org/model", "llama", "hub", "org/model", "abc", {"num_hidden_layers": 2}, ("a note",), 8192),
        engine="transformers",
        engine_version="5.24.0",
        dtype="bf16",
        weights=WeightsInfo(10**9, 5 * 10**8, "headers", "bf16", "a scheme", (5 * 10**8, 5 * 10**8), "vllm"),
        settings={
            "device": "cpu", "device_map": "auto", "attention": "sdpa", "weights": "random", "weights_bytes": 10**9, "layers": 1,
            "layers_kept": [0, 3], "layers_of_kind": [10, 2], "decode": 3, "prefill_chunk": 256, "repeat": 3, "seed": 0,
            "tensor_parallel": 2, "nodes": 1, "ranks": [{"rank": 0, "device": "cpu", "weights_bytes": 5, "peak_bytes": 6}],
            "contexts": [512], "batches": [2], "prompt": "text", "command": "llama-server -m it.gguf", "slots": 4, "block_size": 16,
            "cache_dtype": "auto", "prefix_caching": True, "batch_tokens": 8192, "length": 8192,
        },
        environment=environment("cpu"),
        points=(*points, Point(8192, 2, 3, error="out of memory: 8 GiB")),
        lines=lines_of(points),
        until_oom=UntilOom("context", 4096, 4224, 4100,
                           (Try(4096, True, "ran", GIB, 1.5), Try(4224, False, "killed by SIGKILL")), "a note", False),
        machine=look().replace(gpus=(gpu(),), no_gpu=None, load=(0.5, 0.25, 0.125), rates=(RATES,)),
        engine_log=log(),
        techniques=assessment(),
        sharing=sharing(),
        ranks=2,
        notes=("n",),
        warnings=("w",),
        interrupted=True,
    )  # fmt: skip


FULL = full()


def check(document: Json) -> None:
    PROFILE.validate(document)
    assert not list(undescribed(document, PROFILE.schema))


def document(**changes: Any) -> Json:
    made: Json = json.loads(json.dumps(FULL.replace(**changes).to_dict(), allow_nan=False))
    return made


def compared(capsys: pytest.CaptureFixture[str]) -> Json:
    emit_profile(FULL, "json", [Saved("before.json", FULL.replace(points=FULL.points[:2], dtype="fp16"))], quiet=True)
    made: Json = json.loads(capsys.readouterr().out)
    return made


def unfilled(schema: Json, values: list[Any], path: str = "") -> Iterator[str]:
    """Keys of the schema for which no value is there but null."""
    for key, inner in schema.get("properties", {}).items():
        found = [value[key] for value in values if isinstance(value, dict) and value.get(key) is not None]
        if not found:
            yield f"{path}.{key}"
        yield from unfilled(inner, found, f"{path}.{key}")
    if "items" in schema:
        items = [item for value in values if isinstance(value, list) for item in value]
        yield from unfilled(schema["items"], items, path + "[]")


def test_a_report_with_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    check(compared(capsys))


def test_the_schema_names_nothing_that_no_report_has(capsys: pytest.CaptureFixture[str]) -> None:
    absent = set(unfilled(PROFILE.schema, [compared(capsys)]))
    # What only some machines tell.
    assert not {name for name in absent if not name.startswith((".environment.", ".machine."))}
    gpus = {name for name in absent if name.startswith(".machine.gpus")}
    assert gpus == {".machine.gpus[].unreadable"} | {f".machine.gpus[].{name}" for name in ("card", "published_bandwidth_gbs", "published_fp16_tflops")}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"model": None, "engine": "none", "engine_version": None, "dtype": None, "weights": None, "settings": {}, "environment": {},
         "points": (), "lines": (), "until_oom": None, "engine_log": None, "ranks": 1},
        {"machine": None},
        {"machine": look().replace(rates=(Rates("cpu"),))},
        {"points": (Point(1, 1, 0),)},
        {"points": (Point(1, 1, 0, ttft=Sample((0.5,))),)},
        {"points": (Point(1, 1, 0, cache=(CacheRow("prefill", 1, 5, 5, 0), CacheRow("decode", 1, 0, 0, 0))),)},
        {"points": (Point(1, 1, 0, limits=Limits(None, None, 1.0, 1.0, "unknown")),)},
        {"points": (Point(1, 1, 0, scaled=ScaledTimes(0.5, None, 1, 2)),)},
        {"points": (Point(1, 1, 0, memory=MemoryUse("cuda", 1, 1, 1)),)},
        {"until_oom": UntilOom("batch", None, 1, None, (), interrupted=True)},
        {"engine": "llama.cpp", "settings": {"command": "llama-server", "slots": 4}, "environment": {"program": "llama-server"}},
    ],
    ids=lambda changes: ", ".join(changes),
)  # fmt: skip
def test_reports_that_lack_something(changes: dict[str, Any]) -> None:
    PROFILE.validate(document(**changes))


def test_numbers_that_are_none_become_null() -> None:
    made = document(points=(Point(1, 1, 1, limits=Limits(float("nan"), float("inf"), 1.0, 1.0, "memory")),))
    check(made)
    assert made["points"][0]["limits"]["compute_share"] is None


DAMAGE: list[tuple[str, Any]] = [
    ("schema", "kvctl.profile/2"),
    ("engine.name", "ideal"),
    ("ranks", 0),
    ("agrees", "yes"),
    ("points.0.context", 0),
    ("points.0.context", "512"),
    ("points.0.ttft.median_s", 0),
    ("points.0.ttft.values_s", []),
    ("points.0.ttft.interval_s", [1.0]),
    ("points.0.ttft.interval_by", "guess"),
    ("points.0.cache.0.phase", "encode"),
    ("points.0.cache.0.logical_bytes", 1.5),
    ("points.0.cache.0.rank", -1),
    ("points.0.memory.observer", "psutil"),
    ("points.0.memory.peak_bytes", None),
    ("points.0.limits.binds", "network"),
    ("points.0.error", 5),
    ("lines.0.what", "weights"),
    ("lines.0.unit", "ms"),
    ("until_oom.what", "ctx"),
    ("until_oom.tries.0.ran", None),
    ("machine.memory.total_bytes", -1),
    ("machine.rates.0.memory.0.what", "write"),
    ("engine_log.rows.0.agrees", "no"),
    ("engine_log.refused.fits", "none"),
    ("settings.repeat", 0),
    ("settings.weights", "real"),
    ("environment.memory_bytes", "16 GiB"),
    ("notes", "one"),
]


@pytest.mark.parametrize(("path", "value"), DAMAGE, ids=str)
def test_the_schema_refuses(path: str, value: Any) -> None:
    made = document()
    PROFILE.validate(made)
    *way, last = path.split(".")
    place: Any = made
    for step in way:
        place = place[int(step)] if step.isdigit() else place[step]
    assert last in place
    place[last] = value
    assert not PROFILE.is_valid(made)


def objects(value: Any, schema: Json) -> Iterator[tuple[Json, Json]]:
    """Every object of a document with its schema."""
    if isinstance(value, dict) and "properties" in schema:
        yield value, schema
        for key, inner in value.items():
            yield from objects(inner, schema["properties"].get(key, {}))
    elif isinstance(value, list):
        for inner in value:
            yield from objects(inner, schema.get("items", {}))


OPTIONAL = {"comparison", "bytes_per_second", "flops_per_second"} | {
    # Of parts that kvctl.size/1 had before.
    "location", "max_context", "dtype", "scheme", "per_rank", "rules", "model", "model_name", "engine_args", "complete", "starts",
    "line", "kv_budget_bytes", "figures",
}  # fmt: skip


def test_every_key_is_required_and_later_ones_are_welcome() -> None:
    for value, schema in objects(document(), PROFILE.schema):
        if schema["required"]:  # settings and environments are open
            assert set(schema["properties"]) - set(schema["required"]) <= OPTIONAL
        for key in schema["required"]:
            kept = value.pop(key)
            assert list(Draft202012Validator(schema).iter_errors(value)), key
            value[key] = kept
        value["a later key"] = 1
        Draft202012Validator(schema).validate(value)


def test_what_is_saved_fits_too(tmp_path: Path) -> None:
    from kvctl.measure.saved import save

    save(FULL, str(tmp_path / "run.json"))
    check(json.loads((tmp_path / "run.json").read_text("utf-8")))
    assert load_saved(str(tmp_path / "run.json")).report.to_dict() == FULL.to_dict()


# -- real runs -----------------------------------------------------------------------------

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from kvctl.cli import main
main()
"""


def test_the_machine_alone(tmp_path: Path) -> None:
    kept = tmp_path / "machine.json"
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, "profile", "--json", "--save", str(kept)], capture_output=True,
                          text=True, timeout=120, check=True)  # fmt: skip
    made = json.loads(done.stdout)
    check(made)
    assert made["machine"]["rates"][0]["bandwidth_bytes_per_second"] > 10**8  # no memory is slower than that
    assert made["points"] == []
    assert json.loads(kept.read_text("utf-8")) == made
    assert load_saved(str(kept)).report.model is None


@pytest.mark.engine
def test_a_real_run(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch and transformers")
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    kept = tmp_path / "run.json"
    done = subprocess.run(
        [sys.executable, "-m", "kvctl", "profile", "--json", "--ctx", "32", "--decode", "2", "--repeat", "1", "--save", str(kept)],
        capture_output=True, text=True, timeout=600, env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    check(made)
    check(json.loads(kept.read_text("utf-8")))
    (measured,) = made["points"]
    # SmolLM2-135M: 30 layers × 3 KV heads × 64 × 2 tensors, of 4 bytes on a CPU; 2 bytes elsewhere.
    width = 4 if made["dtype"] == "fp32" else 2
    assert [row["logical_bytes"] for row in measured["cache"]] == [
        tokens * 30 * 3 * 64 * 2 * width for tokens in (32, 34)
    ]
    assert made["agrees"] is True
    assert len(measured["ttft"]["values_s"]) == 1
    assert len(measured["tpot"]["values_s"]) == 2
