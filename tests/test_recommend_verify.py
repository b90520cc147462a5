"""Recommendations that are put to the proof: --verify with programs that play an engine, and `kvctl serve-test --plan`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import Outcome
from deployments import CPU, LLAMA_CPP, VLLM, VLLM_NODES
from fake_servers import write as program
from gguf_models import write as write_gguf
from scripted_server import Act, wait
from test_serve_test import Engine
from test_serve_test_launch import CONFIG, SMOLLM2, gone

from kvctl.errors import ConfigError, UsageError
from kvctl.hardware import host, read_gpus
from kvctl.loadtest import nearby
from kvctl.loadtest.capacity import Capacity, Side
from kvctl.loadtest.exchange import Exchange, Fault
from kvctl.loadtest.figures import Figures
from kvctl.loadtest.launch import Started
from kvctl.loadtest.metrics import Sample
from kvctl.loadtest.plan import Plan, Step
from kvctl.loadtest.promised import Promised, Row, verify
from kvctl.loadtest.report import ServeReport
from kvctl.loadtest.run import Outcome as Load
from kvctl.loadtest.target import read_url
from kvctl.loadtest.verdict import Verdict, Window
from kvctl.measure.others import llama_cpp, process, vllm_engine
from kvctl.recommend import trial_time
from kvctl.recommend import verify as proof
from kvctl.recommend.emit import Site
from kvctl.speed import Range

Run = Callable[..., Outcome]
GIB, MIB = 2**30, 2**20
SCHEMA = json.loads((Path(__file__).parents[1] / "kvctl/data/schemas/kvctl.serve-test-1.json").read_text("utf-8"))


@pytest.fixture(autouse=True)
def _alone(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No server and no engine of this machine; a stand-in heeds SIGTERM at once, or never."""
    monkeypatch.setenv("KVCTL_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(nearby, "PLACES", ())
    for name in (llama_cpp.VARIABLE, vllm_engine.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(llama_cpp, "_FOLDERS", ())
    monkeypatch.setattr(process, "_GRACE_S", 0.3)


# -- what is promised beside what came ------------------------------------------------------------------------

PROMISED = Promised(
    "vllm on 1 GPU", "plan.json#1", "vllm", prompt=900, answer=100, context=1024, concurrency=4, rate=None, held=4, tokens=4224,
    memory=GIB, ttft=Range(0.1, 0.2, 0.3), tpot=Range(0.01, 0.02, 0.03), output_rate=Range(100.0, 150.0, 200.0),
)  # fmt: skip


def _exchange(ttft_ms: int, gap_ms: int, tokens: int = 3, fault: Fault | None = None) -> Exchange:
    """One whose first token came after so long, and the others so far apart."""
    one = Exchange(None, 10**9)
    one.sent = 10**9
    for number in range(tokens):
        one.stamps.append(10**9 + (ttft_ms + number * gap_ms) * 10**6)
    one.ended = one.stamps[-1]
    one.fault = fault
    return one


def _load(
    exchanges: Sequence[Exchange], samples: Sequence[dict[str, float]] = (), asked: int = 3, **counters: float
) -> Load:
    figures = Figures()
    for one in exchanges:
        figures.add(one, asked)
    looks = tuple(Sample(number, values) for number, values in enumerate(samples))
    window = Window(None, None, None, None, 0, len(looks))
    return Load(Step(proof._made(900, 100), 4), figures, Figures(), window, Verdict("not limited", ()), looks, counters, 4, 1.0, 150.0, 0.1)  # fmt: skip


def _verified(load: Load, promised: Promised = PROMISED, **more: Any) -> tuple[dict[str, Row], tuple[str, ...]]:
    plan = Plan(read_url("http://127.0.0.1"), (load.step,), promised=promised)
    found = verify(promised, ServeReport(plan, {"engine": promised.engine}, {}, (load,), **more))
    return {row.name: row for row in found.rows}, found.broken


FULL = {"kv_use": 1.0, "running": 4.0, "waiting": 0.0}
GOOD = [_exchange(200, 20)] * 4


def test_all_that_is_promised_holds() -> None:
    rows, broken = _verified(_load(GOOD, [FULL | {"running": 2.0}, FULL], preemptions=0.0))
    assert broken == ()
    assert rows["requests that run at once"].holds is True
    assert rows["pushed out of the cache"].holds is True
    assert [rows[name].verdict for name in ("TTFT", "TPOT", "throughput")] == ["inside"] * 3
    assert rows["cache in use at most"].measured == 1.0
    assert rows["requests served"].promised is None  # not predicted, and told all the same


@pytest.mark.parametrize(
    ("exchanges", "samples", "counters", "name"),
    [
        ([*GOOD, _exchange(200, 20, fault=Fault("server", "full"))], [FULL], {}, "requests that failed"),
        ([*GOOD, _exchange(200, 20, tokens=2)], [FULL], {}, "answers cut short"),
        (GOOD, [FULL], {"preemptions": 1.0}, "pushed out of the cache"),
        (GOOD, [FULL | {"running": 3.0, "waiting": 1.0}], {}, "requests that run at once"),
        ([_exchange(301, 20)], [FULL], {}, "TTFT"),
        ([_exchange(200, 31)], [FULL], {}, "TPOT"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_breaks_a_promise(
    exchanges: list[Exchange], samples: list[dict[str, float]], counters: dict[str, float], name: str
) -> None:
    rows, broken = _verified(_load(exchanges, samples, **counters))
    assert rows[name].holds is False
    assert len(broken) == 1
    assert broken[0].startswith(name)


def test_what_is_better_breaks_nothing() -> None:
    rows, broken = _verified(_load([_exchange(50, 5)], [FULL]))
    assert broken == ()
    assert (rows["TTFT"].verdict, rows["TPOT"].verdict) == ("better", "better")


def test_prompts_that_wait_for_others_are_not_the_cache() -> None:
    """A request whose prompt waits for its turn while the cache is half empty says nothing of the cache."""
    rows, broken = _verified(_load(GOOD, [{"kv_use": 0.5, "running": 3.0, "waiting": 1.0}]))
    assert broken == ()
    assert rows["requests that run at once"].holds is None


def test_a_slot_that_is_waited_for_breaks_the_promise() -> None:
    rows, broken = _verified(_load(GOOD, [{"running": 4.0, "waiting": 1.0}]), PROMISED.replace(engine="llama.cpp"))
    assert rows["waiting for a slot"].holds is False
    assert broken == ("waiting for a slot: 1, and 0 promised",)


def test_the_cache_beside_the_plan() -> None:
    def capacity(tokens: int, blocks: int, bytes_: int, concurrency: float) -> Capacity:
        declared = Side(tokens=tokens, blocks=blocks, bytes=bytes_, bytes_within=5, concurrency=concurrency)
        return Capacity(1000, 1024, declared, (), Side(blocks=33, bytes=1000), None, ())

    rows, broken = _verified(_load(GOOD, [FULL]), capacity=capacity(4224, 33, 1004, 4.125))
    held = "requests of 1,024 tokens that the cache holds"
    assert broken == ()
    assert [rows[name].verdict for name in ("tokens in the cache", "blocks of the cache", "bytes of the cache", held)] == ["as promised"] * 4  # fmt: skip
    rows, broken = _verified(_load(GOOD, [FULL]), capacity=capacity(4096, 32, 990, 3.99))
    assert [row for row in ("tokens in the cache", "blocks of the cache", held) if rows[row].holds is False] == ["tokens in the cache", "blocks of the cache", held]  # fmt: skip
    assert rows["bytes of the cache"].verdict == "less"
    assert len(broken) == 3
    rows, broken = _verified(_load(GOOD, [FULL]), capacity=capacity(4300, 34, 1100, 4.2))
    assert broken == ()


@pytest.mark.parametrize(("taken", "holds"), [(2 * GIB, True), (2 * GIB + 1, False)])
def test_memory_of_the_process(taken: int, holds: bool) -> None:
    started = Started("vllm", read_url("http://127.0.0.1"), "vllm serve m", "vllm", "log", 1.0, resident_bytes=taken)
    rows, broken = _verified(_load(GOOD, [FULL]), PROMISED.replace(limit=2 * GIB), started=started)
    assert rows["of the memory that there is"].holds is holds
    assert bool(broken) is not holds
    # A GPU's memory is not the process's.
    rows, broken = _verified(_load(GOOD, [FULL]), started=started)
    assert "memory of the process" not in rows


# -- what is started ------------------------------------------------------------------------------------------


def test_what_cannot_be_started_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> str:
        with pytest.raises(UsageError) as error:
            proof.check_here(*args)
        return error.value.message

    made = LLAMA_CPP.replace(made="make", weights="q8_0")
    monkeypatch.setattr(host, "host_device", lambda: CPU)
    assert "have to be made first: convert" in refused(made, "convert_hf_to_gguf.py")
    assert "over 2 nodes" in refused(VLLM_NODES, "")
    monkeypatch.setattr("kvctl.hardware.local.list_gpus", lambda: ())
    assert "2 GPUs (NVIDIA H100 80GB HBM3), and this machine has no NVIDIA GPU" in refused(VLLM, "")
    # Weights that could be made would still have no GPU to run on.
    assert "this machine has no NVIDIA GPU" in refused(VLLM.replace(made="make", weights="awq"), "kvctl quantize")
    (card,) = read_gpus("RTX4090")
    monkeypatch.setattr("kvctl.hardware.local.list_gpus", lambda: (card,))
    assert "this machine has 0 of them (NVIDIA GeForce RTX 4090)" in refused(VLLM, "")
    monkeypatch.setattr("kvctl.hardware.local.list_gpus", lambda: (VLLM.device, VLLM.device))
    proof.check_here(VLLM, "")
    monkeypatch.setattr(host, "host_device", lambda: CPU.replace(memory_bytes=32 * GIB))
    assert "for a host with 64 GiB, and this one has 32 GiB" in refused(LLAMA_CPP.replace(device=CPU), "")
    assert "sglang is no engine that kvctl starts" in refused(VLLM.replace(engine=_engine("sglang")), "")


def _engine(name: str) -> Any:
    from kvctl.engines import engine

    return engine(name)


def test_the_command_is_the_one_that_is_emitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(program(tmp_path / "bin", "llama-server").parent))
    one = proof.launch_of(LLAMA_CPP, Site(), ("-t", "2"))
    assert one.shown.startswith("llama-server --model /srv/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert "--ctx-size 16384 --cache-type-k q8_0 --cache-type-v q5_1" in one.shown
    assert "-t 2" in one.shown
    assert "--port" not in one.shown
    assert one.notes == ()
    for more in (("-c", "512"), ("--parallel", "8"), ("-ctk", "f16"), ("-kvu",)):
        with pytest.raises(UsageError, match=r"--verify-args: .* changes what is promised"):
            proof.launch_of(LLAMA_CPP, Site(), more)


@pytest.mark.parametrize(("device", "version", "told"), [
    ("cpu:64GiB", None, True), ("cpu:64GiB", "b11434", True), ("M3Max:64GB", None, True), ("cpu:64GiB", "b6431", False), ("L4", None, False),
])  # fmt: skip
def test_prompts_that_ended_take_no_memory_that_was_planned_with(device: str, version: str | None, told: bool) -> None:
    """llama-server keeps up to 8 GiB of them in host memory unless --cache-ram says otherwise; b6431 has no such option."""
    from kvctl.recommend.emit.command import command

    one = LLAMA_CPP.replace(
        device=read_gpus(device)[0], engine=_engine(f"llama.cpp@{version}" if version else "llama.cpp"),
        serving=LLAMA_CPP.serving.replace(prompt_cache=None),
    )  # fmt: skip
    assert (("--cache-ram", "0") in command(one, Site()).options) is told


def test_a_model_of_this_machine_is_loaded_by_its_path(kvctl: Run, tmp_path: Path) -> None:
    """Wherever the command is run: a folder's name alone would be looked for on the Hub."""
    place = tmp_path / "my models" / "small"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(CONFIG))
    outcome = kvctl("recommend", str(place), "--engine", "vllm", "--gpu", "RTX4090", "--ctx", "4k", "--emit", "command")
    assert outcome.code == 0, outcome.err
    assert f"vllm serve '{place}'" in outcome.out
    assert "--served-model-name small" in outcome.out


def test_a_gguf_file_is_answered_as_it_is(kvctl: Run, gguf: Path) -> None:
    """What it lost when it was made is part of the model; one request too many names what would fit."""
    found = kvctl("recommend", str(gguf), *ASKED, "--json").json["answers"][0]["side"]
    assert (found["settings"]["model"], found["settings"]["made"], found["loss"]["percent"]["mid"]) == (
        str(gguf),
        "stored",
        0,
    )
    tight = kvctl(
        "recommend", str(gguf), *ASKED[:3], "cpu:128MiB", *ASKED[4:-1], "64", "--max-quality-loss", "0", "--json"
    )
    assert tight.code == 3, tight.err
    assert any(near["change"].startswith("--concurrency ") for near in tight.json["nearest"])


def test_loads_are_of_usual_and_of_longest_requests() -> None:
    from kvctl.loadtest.capacity import Sizing
    from kvctl.loadtest.launch import Launch

    launch = Launch("vllm", ("vllm",), "vllm serve m", None)
    plan = proof.plan_of(PROMISED.replace(context=1000), launch, Sizing(), None, 99.0)
    assert [(step.words, step.work.longest) for step in plan.steps] == [("4 at once", 1000)]
    plan = proof.plan_of(PROMISED.replace(held=3), launch, Sizing(), None, 99.0)
    assert [(step.at_once, step.work.longest) for step in plan.steps] == [(4, 1000), (3, 1024)]
    # Eight at least, and as many before them as there are at once; what is as long as can be is sent once each.
    assert [(plan.warm_of(step), plan.length_of(step).requests) for step in plan.steps] == [(4, 8), (0, 3)]
    plan = proof.plan_of(PROMISED.replace(concurrency=None, rate=2.0, context=1000), launch, Sizing(), None, 99.0)
    assert [(step.at_once, step.rate) for step in plan.steps] == [(None, 2.0), (4, None)]
    # A minute of a slow clock has six requests, however many are held: not two hundred, which take half an hour.
    plan = proof.plan_of(PROMISED.replace(concurrency=None, rate=0.1, held=200), launch, Sizing(), None, 99.0)
    assert [(plan.warm_of(step), plan.length_of(step).requests) for step in plan.steps] == [(6, 8), (0, 200)]


def _sent(**more: Any) -> Plan:
    from kvctl.loadtest.capacity import Sizing
    from kvctl.loadtest.launch import Launch

    return proof.plan_of(
        PROMISED.replace(**more), Launch("vllm", ("vllm",), "vllm serve m", None), Sizing(), None, 99.0
    )


def test_how_long_a_trial_takes() -> None:
    """12 requests, 4 at once: three times 0.2 s and 99 gaps of 20 ms, 6.54 s; then 3 of which prompts have 924 tokens for 900 and are
    3 for 4: 0.154 s and 1.98 s."""
    usual, longest = trial_time.sizes(_sent(held=3))
    assert (usual.said, longest.said) == (
        "12 requests of 900 and 100 tokens (4 at once)", "3 requests of 924 and 100 tokens (3 at once, the longest)",
    )  # fmt: skip
    assert usual.seconds(0.2, 0.02) == pytest.approx(6.54)
    plan = _sent(held=3)
    told = trial_time.after(plan, _load([_exchange(200_000, 20)] * 4), 1)
    # The prompts of the measured load took 200 s: 200 x 924 x 3 / (900 x 4) + 1.98 = 156 s, some three minutes.
    assert told is not None
    assert "about 3 min by what was measured" in told
    assert trial_time.after(plan, _load(GOOD), 2) is None
    # Fourteen at 0.1 a second: 140 s and the last one's 2.18 s.
    clock, _ = trial_time.sizes(_sent(concurrency=None, rate=0.1, held=200))
    assert clock.seconds(0.2, 0.02) == pytest.approx(142.18)


def test_what_a_predicted_speed_says_of_a_trial() -> None:
    """Twelve requests, four at once, each as long as the answer's own figures for that load say: three times TTFT and 255 gaps."""
    from test_recommend_answers import asked

    from kvctl.loadtest.capacity import Sizing
    from kvctl.loadtest.launch import Launch
    from kvctl.recommend.answers import Known, judge_of, recommend

    request = asked(
        "Qwen/Qwen3-8B", "H100", engines=(_engine("vllm"),), concurrency=4, context=2048, prompt=1792, answer=256
    )
    answer = recommend(request, advise=False).answers[0]
    speed = answer.judged.speed
    assert speed is not None
    plan = proof.plan_of(
        proof.promised(answer, request), Launch("vllm", ("vllm",), "vllm serve m", None), Sizing(), None, 99.0
    )
    words = trial_time.before(plan, answer.judged.candidate, judge_of(request, Known()))
    seconds = 3 * (speed.ttft.mid + 255 * speed.tpot.mid)
    assert f": about {trial_time.duration(seconds)} by the predicted speed" in words
    assert "sends 12 requests of 1,792 and 256 tokens (4 at once): " in words


@pytest.mark.parametrize(("seconds", "words"), [(3, "10 s or less"), (44, "40 s"), (420, "7 min"), (12_600, "3.5 h")])
def test_times_are_rough(seconds: float, words: str) -> None:
    assert trial_time.duration(seconds) == words


def test_a_load_that_was_interrupted_is_not_judged() -> None:
    """The first is complete; of the second nothing had failed until then, which says nothing of the rest."""
    plan = _sent(held=3)
    first = _load(GOOD, [FULL], preemptions=0.0).replace(step=plan.steps[0])
    second = _load([], [FULL], preemptions=0.0).replace(step=plan.steps[1], interrupted=True)
    found = verify(PROMISED, ServeReport(plan, {}, {}, (first, second), interrupted=True))
    rows = {row.name: row for row in found.rows}
    failed = "requests that failed"
    assert rows[f"{failed} (4 at once)"].verdict == "as promised"
    for name in (failed, "answers cut short", "pushed out of the cache", "requests that run at once"):
        row = rows[f"{name} (3 at once, the longest)"]
        assert (row.verdict, row.holds) == ("unfinished", None)
    assert rows["TTFT"].verdict == "inside"
    assert (found.holds, found.broken) == (False, ())
    assert found.notes == ("3 at once, the longest: unfinished",)
    # What broke before that is told.
    second = _load([], [FULL], preemptions=2.0).replace(step=plan.steps[1], interrupted=True)
    found = verify(PROMISED, ServeReport(plan, {}, {}, (first, second), interrupted=True))
    assert found.broken == ("pushed out of the cache (3 at once, the longest): 2, and 0 promised",)
    # And what was not begun; times of a part are no median of the whole.
    found = verify(PROMISED, ServeReport(plan, {}, {}, (first.replace(interrupted=True),), interrupted=True))
    assert found.notes == ("4 at once: unfinished", "3 at once, the longest: not begun")
    assert {row.verdict for row in found.rows if row.name in ("TTFT", "TPOT", "throughput")} == {"unfinished"}


# -- all of it, with a program that plays llama-server --------------------------------------------------------


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "smollm2.gguf", "llama", SMOLLM2, {"token_embd.weight": (49152, 576)})


ASKED = ("--engine", "llama.cpp", "--gpu", "cpu:1GiB", "--ctx", "512", "--output-tokens", "4", "--concurrency", "3")


def test_an_answer_is_started_loaded_and_ended(
    kvctl: Run, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    folder = program(tmp_path / "bin", "llama-server").parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    outcome = kvctl("recommend", str(gguf), *ASKED, "--verify", "--verify-args", "-t 1", "--json")
    assert outcome.code == 0, outcome.err
    assert gone(folder)
    words = json.loads((folder / "words").read_text())
    told = dict(pairwise(words))
    assert (told["--ctx-size"], told["--parallel"], told["-t"], told["--host"]) == ("1536", "3", "1", "127.0.0.1")
    assert told["--port"] != "8000"
    found = outcome.json["verified"]
    rows = {row["name"]: row for row in found["rows"]}
    # Its log: 33.75 MiB (512 cells, 3/3 seqs), as 3 x 512 tokens of 23,040 bytes are.
    assert rows["bytes of the cache"]["measured"] == rows["bytes of the cache"]["promised"]["mid"] == 3 * 512 * 23040
    assert rows["tokens in the cache"]["measured"] == 1536
    assert rows["requests of 512 tokens that the cache holds"]["verdict"] == "as promised"
    assert (found["holds"], found["broken"], found["answer"]) == (True, [], 1)
    assert found["test"]["started"]["resident_bytes"] > MIB
    jsonschema.validate(found["test"], SCHEMA)
    (load,) = found["test"]["loads"]
    assert load["step"]["at_once"] == 3
    assert load["all"]["tokens"]["input"] == 508 * load["all"]["requests"]["good"]
    shown = kvctl("recommend", str(gguf), *ASKED, "--verify")
    assert "--verify starts the server and sends 11 requests of 508 and 4 tokens (3 at once): " in shown.err
    assert "holds: nothing that is promised broke" in shown.out
    assert kvctl("recommend", str(gguf), *ASKED, "--verify", "--format", "md").code == 0


def test_objectives_of_a_machine_whose_speed_is_not_known_are_measured(
    kvctl: Run, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = program(tmp_path / "bin", "llama-server").parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    assert kvctl("recommend", str(gguf), *ASKED, "--slo", "ttft=1h").code == 3  # nobody knows
    kept = kvctl("recommend", str(gguf), *ASKED, "--slo", "ttft=1h,tpot=1h", "--verify", "--json")
    assert kept.code == 0, kept.err
    objective = kept.json["verified"]["test"]["settings"]["objective"]
    assert (objective["ttft"], objective["tpot"], objective["percent"]) == (3600, 3600, 99)
    assert "whether objectives are kept, the trial says" in kept.err
    missed = kvctl("recommend", str(gguf), *ASKED, "--slo", "ttft=1us", "--verify", "--json")
    assert missed.code == 3
    assert missed.json["verified"]["broken"] == [
        "3 at once: 0.0% of requests keep ttft 0.001 ms, and 99% are asked for"
    ]
    # What does not fit is no matter of speed.
    nothing = kvctl(
        "recommend", str(gguf), *ASKED[:3], "cpu:64MiB", *ASKED[4:], "--slo", "ttft=1h", "--verify", "--json"
    )
    assert nothing.code == 3
    assert "verified" not in nothing.json


def test_a_log_of_less_than_was_promised_is_status_3(
    kvctl: Run, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in always has 3 slots of 512 cells: four were promised."""
    folder = program(tmp_path / "bin", "llama-server").parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    outcome = kvctl("recommend", str(gguf), *ASKED[:-1], "4", "--verify")
    assert outcome.code == 3
    assert "does not hold" in outcome.out
    assert "tokens in the cache: 1,536, and 2,048 promised" in outcome.out
    assert gone(folder)


def test_a_cache_that_is_too_small_to_start_is_status_3(
    kvctl: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM says that a request of 8,192 tokens needs more than there is: what was promised does not hold."""
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(CONFIG))
    folder = program(tmp_path / "bin", "vllm", "refuses").parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    asked = (
        "recommend",
        str(place),
        "--engine",
        "vllm",
        "--gpu",
        "cpu:3GiB",
        "--ctx",
        "512",
        "--concurrency",
        "3",
        "--verify",
    )
    outcome = kvctl(*asked, "--json")
    assert outcome.code == 3, outcome.err
    found = outcome.json["verified"]
    assert (found["holds"], found["test"], found["rows"]) == (False, None, [])
    assert "vllm did not start" in found["refused"]
    assert found["broken"] == [found["refused"]]
    assert gone(folder)
    assert "does not hold" in kvctl(*asked).out


def test_another_failure_of_the_start_is_status_1(
    kvctl: Run, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quantised cache that wants flash attention is none that memory would mend."""
    folder = program(tmp_path / "bin", "llama-server", "refuses").parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    outcome = kvctl("recommend", str(gguf), *ASKED, "--verify")
    assert outcome.code == 1
    assert "quantized V cache requires flash_attn" in outcome.err
    assert gone(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_kvctl_ends_the_server(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    folder = program(tmp_path / "bin", "llama-server", "forks").parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    asked = [
        sys.executable,
        "-m",
        "kvctl",
        "recommend",
        str(gguf),
        "--engine",
        "llama.cpp",
        "--gpu",
        "cpu:1GiB",
        "--ctx",
        "512",
    ]
    asked += ["--output-tokens", "4", "--rate", "1", "--verify", "--json"]
    process = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while not ((folder / "served").exists() and (folder / "served").read_text() not in ("", "1")):
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert gone(folder)
    if number != signal.SIGKILL:
        assert json.loads(out)["verified"]["test"]["interrupted"], err
        found = json.loads(out)["verified"]
        assert not found["holds"]
        assert "as promised" not in {
            row["verdict"] for row in found["rows"] if row["name"].startswith("requests that failed")
        }
        assert any(note.endswith(": unfinished") for note in found["notes"])
        assert "Traceback" not in err


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        ((*ASKED, "--verify-args", "-t 1"), 2, "--verify-args is about --verify"),
        ((*ASKED, "--verify", "--emit", "command"), 2, "--verify runs what --emit writes"),
        ((*ASKED, "--verify", "--answer", "3"), 2, "--answer 3: there are"),
        ((*ASKED, "--verify"), 1, "llama-server"),  # there is none
        ((*ASKED, "--verify", "--verify-args", "'"), 2, "--verify-args"),
    ],
)
def test_wrong_usage(kvctl: Run, gguf: Path, argv: tuple[str, ...], code: int, said: str) -> None:
    outcome = kvctl("recommend", str(gguf), *argv)
    assert outcome.code == code, outcome.err
    assert said in outcome.err
    assert "Traceback" not in outcome.err


# -- kvctl serve-test --plan ----------------------------------------------------------------------------------

PAGE = ('vllm:kv_cache_usage_perc{{engine="0"}} 0.5\n# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{engine="0"}} 2\n'
        '# TYPE vllm:num_preemptions_total counter\nvllm:num_preemptions_total{{engine="0"}} {}\n')  # fmt: skip


@pytest.fixture
def plan(kvctl: Run, tmp_path: Path) -> Path:
    """Two requests at once of 40 + 4 tokens."""
    asked = ("--gpu", "H100", "--engine", "vllm", "--input-tokens", "40", "--output-tokens", "4", "--concurrency", "2")
    outcome = kvctl("recommend", "Qwen3-8B", *asked, "--slo", "ttft=20s,p95", "--json")
    assert outcome.code == 0, outcome.err
    path = tmp_path / "plan.json"
    path.write_text(outcome.out)
    return path


def test_a_server_beside_its_plan(kvctl: Run, plan: Path, tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    with Engine(lambda number, asked: server.whole(asked), page=PAGE.format(0)) as server:
        saved = tmp_path / "saved.json"
        outcome = kvctl("serve-test", server.url, "--plan", str(plan), "-n", "6", "--warmup", "2", "--json", "--save", str(saved))  # fmt: skip
        assert outcome.code == 0, outcome.err
    found = outcome.json
    jsonschema.validate(found, SCHEMA)
    (load,) = found["loads"]
    assert (load["step"]["at_once"], load["all"]["tokens"]["input"], load["all"]["tokens"]["output"]) == (2, 240, 24)
    assert (found["settings"]["objective"]["ttft"], found["settings"]["objective"]["percent"]) == (20, 95)
    promised = found["plan"]["promised"]
    assert (promised["source"], promised["concurrency"], promised["context"]) == (f"{plan}#1", 2, 44)
    assert promised["ttft"] == json.loads(plan.read_text())["answers"][0]["side"]["speed"]["ttft"]
    rows = {row["name"]: row for row in found["plan"]["rows"]}
    assert (rows["requests that run at once"]["holds"], rows["pushed out of the cache"]["holds"]) == (True, True)
    assert found["plan"]["holds"]
    # Settings are those of the plan, which is how kvctl size knows them.
    assert found["capacity"]["settings"][0] == "settings of the plan"
    again = kvctl("serve-test", "--from", str(saved), "--json")
    assert again.json["plan"] == found["plan"]
    shown = kvctl("serve-test", "--from", str(saved))
    assert "plan: holds: nothing that is promised broke" in shown.out


def test_slots_of_a_plan_have_parts_of_their_own(kvctl: Run, gguf: Path) -> None:
    """llama.cpp rounds every slot up to whole 256ths: three of 600 tokens are 3 x 768 cells."""
    asked = (*ASKED[:4], "--ctx", "600", "--concurrency", "3", "--json")
    found, _, _, percent, command = proof.of_plan(kvctl("recommend", str(gguf), *asked).json, "plan.json", 1)
    assert (found.tokens, found.held, found.engine, percent) == (2304, 3, "llama.cpp", 99)
    assert "--ctx-size 1800" in command


def test_a_server_that_does_not_keep_its_plan(kvctl: Run, plan: Path) -> None:
    lost = iter(range(10**6))  # one more at each look

    class Losing(Engine):
        def _act(self, number: int) -> Sequence[Act]:
            self.page = PAGE.format(next(lost))
            return super()._act(number)

    with Losing(lambda number, asked: server.whole(asked)) as server:
        files = ("--junit", str(plan.with_name("cases.xml")), "--prometheus", str(plan.with_name("kvctl.prom")))
        outcome = kvctl("serve-test", server.url, "--plan", f"{plan}#1", "-n", "6", "--warmup", "2", *files)
    assert outcome.code == 3
    cases = ElementTree.parse(plan.with_name("cases.xml")).iter("testcase")
    bad = {case.get("name") for case in cases if case.find("failure") is not None}
    assert bad == {"plan: pushed out of the cache"}
    assert 'kvctl_serve_test_plan_broken{engine="vllm",model="m"} 1.0' in plan.with_name("kvctl.prom").read_text()
    assert "plan: does not hold: pushed out of the cache" in outcome.out
    assert "pushed out of the cache" in outcome.err


def test_times_beyond_their_range_break_the_plan(kvctl: Run, plan: Path) -> None:
    """A first token after a second, where the plan has some hundredths."""
    data = json.loads(plan.read_text())
    assert data["answers"][0]["side"]["speed"]["ttft"]["high"] < 0.5
    with Engine(lambda number, asked: [wait(1.0), *server.whole(asked)], page=PAGE.format(0)) as server:
        outcome = kvctl("serve-test", server.url, "--plan", str(plan), "-n", "2", "--warmup", "0", "--json")
    assert outcome.code == 3
    assert [row["verdict"] for row in outcome.json["plan"]["rows"] if row["name"] == "TTFT"] == ["worse"]
    assert any(line.startswith("TTFT") for line in outcome.json["missed"])


def test_an_engine_that_is_not_the_plans_is_told(kvctl: Run, plan: Path) -> None:
    with Engine(lambda number, asked: server.whole(asked), owner="sglang", page=None) as server:
        outcome = kvctl("serve-test", server.url, "--plan", str(plan), "-n", "4", "--warmup", "0", "--json")
    notes = outcome.json["plan"]["notes"]
    assert notes == ["the plan is for vllm, and this server is sglang"] or outcome.json["server"]["engine"] == "unknown"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("-i", "5"), "--input-tokens: --plan says what is sent"),
        (("-c", "2"), "--concurrency: --plan says what is sent"),
        (("--find-limit",), "--find-limit: --plan says what is sent"),
        (("--sweep", "concurrency=1,2"), "--sweep: --plan says what is sent"),
    ],
)
def test_a_plan_says_what_is_sent(kvctl: Run, plan: Path, argv: tuple[str, ...], said: str) -> None:
    outcome = kvctl("serve-test", "http://127.0.0.1:9", "--plan", str(plan), *argv)
    assert outcome.code == 2
    assert said in outcome.err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data["asked"].update(concurrency=0), "is damaged"),
        (lambda data: data["asked"].update(concurrency=None), "is damaged"),
        (lambda data: data["asked"].update(prompt_tokens="many"), "is damaged"),
        (lambda data: data.pop("asked"), "is damaged"),
        (lambda data: data.update(asked=[]), "is damaged"),
        (lambda data: data["answers"].clear(), "nothing met that request"),
        (lambda data: data.update(schema="kvctl.size/1"), "is no plan"),
        (lambda data: data["answers"][0]["side"]["settings"].pop("engine"), "is damaged"),
        (lambda data: data["answers"][0]["side"]["speed"]["ttft"].update(low=float("inf")), "is damaged"),
    ],
)
def test_plans_that_are_damaged(plan: Path, change: Callable[[dict[str, Any]], object], said: str) -> None:
    data = json.loads(plan.read_text())
    change(data)
    with pytest.raises(ConfigError, match=said):
        proof.of_plan(data, "plan.json", 1)
