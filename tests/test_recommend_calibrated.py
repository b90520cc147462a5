"""Saved load tests and profiles as measured speeds: what is read of them, and what is said where they do not say enough."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_profile_results import made, point
from test_serve_test_output import MS, _outcome, _report

from kvctl.engines import engine
from kvctl.errors import KvctlError, UsageError
from kvctl.hardware import read_gpus
from kvctl.loadtest.plan import Step
from kvctl.measure.report import ProfileReport, ScaledTimes
from kvctl.model import build_spec
from kvctl.recommend.answers import Known, recommend
from kvctl.recommend.calibrated import load
from kvctl.recommend.request import ask
from kvctl.reports import ModelInfo
from kvctl.sources import catalogue
from kvctl.speed.calibrate import Measurement

H100 = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_520_809_984}


def served(path: Path, *outcomes: Any, model: str = "Qwen/Qwen3-8B", engine: str = "vllm", **more: Any) -> str:
    report = _report(*(outcomes or (_outcome(4, [50 * MS] * 20),)), **more)
    report = report.replace(server=dict(report.server) | {"model": model, "models": [model], "engine": engine})
    path.write_text(json.dumps(report.to_dict()))
    return str(path)


def profiled(path: Path, report: ProfileReport) -> str:
    path.write_text(json.dumps(report.to_dict()))
    return str(path)


def profile(*points: Any, gpus: Any = (H100,), model: str = "Qwen/Qwen3-8B", **more: Any) -> ProfileReport:
    info = ModelInfo(model, "qwen3", "hub", "/nowhere", None, {}, (), 40_960)
    settings = {"device": "cuda:0"}
    environment = {"gpus": list(gpus)}
    return made(*(points or (point(512, 1), point(512, 8)))).replace(
        **{"model": info, "settings": settings, "environment": environment} | more
    )


# -- load tests ------------------------------------------------------------------------------------


def test_a_load_test(tmp_path: Path) -> None:
    (one,) = load(served(tmp_path / "a.json") + "@H100")
    # Prompts of 100 tokens of which 25 were cached, 5 tokens out, the first after 50 ms and then one in 10 ms, 4 at once.
    assert (one.engine, one.card, one.spec.id, one.weights, one.tensor) == (
        "vllm",
        "H100 SXM",
        "Qwen/Qwen3-8B",
        "bf16",
        1,
    )
    assert (one.prompt, one.answer, one.concurrency, one.before) == (100, 5, 4.0, 25.0)
    assert (one.ttft, one.tpot) == (pytest.approx(0.05), pytest.approx(0.01))
    assert one.where == str(tmp_path / "a.json")
    assert not one.together


def test_every_load_counts_and_gpus_are_named_behind_the_file(tmp_path: Path) -> None:
    text = served(tmp_path / "a.json", _outcome(4, [50 * MS] * 20), _outcome(8, [80 * MS] * 20))
    assert [(one.concurrency, one.tensor) for one in load(text + "@2xH100")] == [(4.0, 2), (8.0, 2)]
    # A file whose name has an @ is that file.
    path = tmp_path / "b@H100"
    with pytest.raises(KvctlError, match="does not say what GPU"):
        load(served(path))


def test_requests_that_come_at_a_rate(tmp_path: Path) -> None:
    one = _outcome(4, [50 * MS] * 20)
    paced = one.replace(step=Step(one.step.work, rate=2.0), seconds=10.0)
    (found,) = load(served(tmp_path / "a.json", paced) + "@H100")
    # 20 requests in 10 seconds, each of 50 ms and four times 10 ms: 0.18 in service, and one is the least.
    assert found.concurrency == 1.0
    slow = _outcome(4, [9000 * MS] * 20)
    (found,) = load(
        served(tmp_path / "b.json", slow.replace(step=Step(one.step.work, rate=2.0), seconds=10.0)) + "@H100"
    )
    assert found.concurrency == pytest.approx(2 * 9.04)


@pytest.mark.parametrize(
    ("model", "server", "spec", "weights"),
    [
        ("Qwen/Qwen3-8B-FP8", "vllm", "Qwen/Qwen3-8B-FP8", "fp8-block"),
        ("/models/Qwen3-8B-Q4_K_M.gguf", "llama.cpp", "Qwen/Qwen3-8B", "q4_k_m"),
        ("qwen3-8b", "llama.cpp", "Qwen/Qwen3-8B", "f16"),
    ],
)
def test_models_and_the_format_of_their_weights(
    model: str, server: str, spec: str, weights: str, tmp_path: Path
) -> None:
    (one,) = load(served(tmp_path / "a.json", model=model, engine=server) + "@H100")
    assert (one.spec.id, one.weights, one.engine) == (spec, weights, server)


def test_models_that_are_known_already_go_first(tmp_path: Path) -> None:
    spec = build_spec(catalogue.find("Qwen/Qwen3-8B")).replace(id="/models/mine")
    (one,) = load(served(tmp_path / "a.json", model="mine") + "@H100", [spec])
    assert one.spec is spec


# -- profiles ---------------------------------------------------------------------------------------


def test_a_profile(tmp_path: Path) -> None:
    one, eight = load(profiled(tmp_path / "p.json", profile()))
    assert (one.engine, one.card, one.weights, one.together) == ("transformers", "H100 SXM", "bf16", True)
    assert (eight.prompt, eight.concurrency) == (512, 8.0)
    # As tests/test_profile_results.py has it: 512 × 8 tokens at 0.2 ms each, and a step of 20.512 ms × 1.005.
    assert (eight.ttft, eight.tpot) == (pytest.approx(0.8192), pytest.approx(0.020512 * 1.005))


def test_a_profile_of_a_few_layers_says_what_all_would_take(tmp_path: Path) -> None:
    (one,) = load(profiled(tmp_path / "p.json", profile(point(512, 1).replace(scaled=ScaledTimes(1.5, 0.25, 7, 7)))))
    assert (one.ttft, one.tpot) == (1.5, 0.25)


def test_points_that_came_to_nothing_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    assert len(load(profiled(path, profile(point(512, 1), point(512, 8).replace(error="out of memory"))))) == 1
    with pytest.raises(KvctlError, match="no point that was measured to its end"):
        load(profiled(path, profile(point(512, 8).replace(error="out of memory"))))


def test_a_host(tmp_path: Path) -> None:
    on_cpu = profiled(tmp_path / "p.json", profile(settings={"device": "cpu"}))
    assert (
        {one.card for one in load(on_cpu)}
        == {one.card for one in load(served(tmp_path / "a.json") + "@cpu")}
        == {"CPU"}
    )
    with pytest.raises(KvctlError, match="measured on a processor, and not on"):
        load(on_cpu + "@H100")


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("report", "said"),
    [
        (profile(gpus=()), "does not say what GPU it was measured on"),
        (profile(gpus=({"name": "A card of tomorrow", "memory_bytes": 5},)), "A card of tomorrow is not in the table"),
        (profile(gpus=(H100, {"name": "NVIDIA H200", "memory_bytes": 150_754_820_096})), "several kinds of GPUs"),
        (profile(model="org/unheard-of"), "org/unheard-of, which is no model of the catalogue"),
        (profile().replace(model=None), "does not say which model"),
    ],
)
def test_profiles_that_do_not_say_enough(report: ProfileReport, said: str, tmp_path: Path) -> None:
    with pytest.raises(KvctlError, match=said) as caught:
        load(profiled(tmp_path / "p.json", report))
    assert caught.value.hint


def test_files_that_are_none(tmp_path: Path) -> None:
    good = Path(served(tmp_path / "a.json")).read_text()
    for text, said in (
        ("[]", "holds a list"), ("{", "not valid|no JSON|JSON"), ('{"schema": "kvctl.size/1"}', "holds kvctl.size/1"),
        ("{}", "holds no schema"), (good.replace('"loads"', '"lods"'), "is damaged"), ('{"schema": "kvctl.serve-test/9"}', "serve-test/9"),
    ):  # fmt: skip
        path = tmp_path / "b.json"
        path.write_text(text)
        with pytest.raises(KvctlError, match=said) as caught:
            load(str(path))
        assert caught.value.hint
    with pytest.raises(KvctlError, match=r"no such file|No such file"):
        load(str(tmp_path / "c.json"))
    with pytest.raises(UsageError):
        load(str(tmp_path / "a.json") + "@H9000")
    with pytest.raises(
        KvctlError, match="no load that says how fast the server is; 4 at once: no request was answered"
    ):
        load(served(tmp_path / "d.json", _outcome(4, [])) + "@H100")
    with pytest.raises(KvctlError, match="which is no model of the catalogue"):
        load(served(tmp_path / "e.json", model="gpt-3.5") + "@H100")


# -- what follows ------------------------------------------------------------------------------------


def test_an_answer_is_as_slow_as_was_measured() -> None:
    spec = build_spec(catalogue.find("Qwen/Qwen3-8B"))
    request = ask(spec, read_gpus("H100"), prompt=2000, answer=200, concurrency=8, engines=[engine("vllm")])
    before = recommend(request, advise=False).answers[0].judged
    assert before.speed is not None
    measured = Measurement("vllm", "H100 SXM", spec, 2000, 200, 8.0, 3 * before.speed.ttft.mid, 3 * before.speed.tpot.mid,
                           before.candidate.deployment.weights, where="mine.json")  # fmt: skip
    after = recommend(request, Known(measurements=(measured,)), advise=False).answers[0].judged
    assert after.candidate.deployment == before.candidate.deployment
    assert after.speed is not None
    assert after.speed.ttft.mid == pytest.approx(3 * before.speed.ttft.mid)
    assert after.speed.tpot.mid == pytest.approx(3 * before.speed.tpot.mid)
    assert after.speed.validated.startswith("measured: mine.json; ")


def test_from_the_command_line(tmp_path: Path, kvctl: Callable[..., Any]) -> None:
    path = served(tmp_path / "a.json")
    command = ("recommend", "Qwen3-8B", "--gpu", "H100", "--engine", "vllm", "--concurrency", "4", "--json")
    plain, calibrated = json.loads(kvctl(*command).out), json.loads(kvctl(*command, "--calibrate", path + "@H100").out)
    assert not plain["answers"][0]["validated"].startswith("measured")
    assert calibrated["answers"][0]["validated"].startswith(f"measured: {path}; ")
    refused = kvctl(*command, "--calibrate", path)
    assert refused.code == 1
    assert "does not say what GPU" in refused.err
    assert "FILE@H100" in refused.err
    assert kvctl(*command, "--calibrate", str(tmp_path / "none.json")).code == 1


# -- what is not used is said ------------------------------------------------------------------------


def said(kvctl: Callable[..., Any], *words: str) -> list[str]:
    """Notes about files."""
    outcome = kvctl("recommend", *words)
    assert outcome.code in (0, 3), outcome.err
    return [line for line in outcome.err.splitlines() if "not used" in line]


VLLM = ("Qwen3-8B", "--engine", "vllm", "--concurrency", "4", "--ctx", "2k")


@pytest.mark.parametrize(
    ("gpu", "card", "engine_", "why"),
    [
        ("H100", "@H200", "vllm", "it was measured on H200 SXM, and this is about NVIDIA H100 80GB HBM3"),
        ("H100", "@cpu", "vllm", "it was measured on CPU, and this is about NVIDIA H100 80GB HBM3"),
        ("cpu:64GiB", "@H100", "vllm", "it was measured on H100 SXM, and this is about CPU"),
        ("H100", "@H100", "sglang", "it was measured with sglang, and this is about vllm"),
        ("cpu:64GiB", "@cpu", "tgi", "it was measured with tgi, and this is about vllm"),
        ("T4,H100", "@L4", "vllm", "it was measured on L4, and this is about "),
        ("RTX3070", "@RTX3070", "vllm", "nothing of vllm fits on NVIDIA GeForce RTX 3070"),
    ],
)
def test_a_file_that_says_nothing_of_a_request(
    gpu: str, card: str, engine_: str, why: str, tmp_path: Path, kvctl: Callable[..., Any]
) -> None:
    path = served(tmp_path / "a.json", engine=engine_)
    tight = ("--weights-dtype", "bf16") if gpu == "RTX3070" else ()
    lines = said(kvctl, *VLLM, "--gpu", gpu, *tight, "--calibrate", path + card)
    assert lines
    assert all(f"{path}: not used: {why}" in line for line in lines)
    outcome = kvctl("recommend", *VLLM, "--gpu", gpu.partition(",")[0], *tight, "--calibrate", path + card, "--json")
    assert any(note.startswith(f"{path}: not used: ") for note in outcome.json["notes"])


def test_nothing_is_said_of_a_file_that_is_used_elsewhere_in_a_matrix(
    tmp_path: Path, kvctl: Callable[..., Any]
) -> None:
    path = served(tmp_path / "a.json")
    assert not said(kvctl, *VLLM, "--gpu", "H100,L40S", "--calibrate", path + "@H100")
    assert not said(kvctl, *VLLM, "--gpu", "H100", "--calibrate", path + "@H100")


def test_what_goes_before_others(tmp_path: Path, kvctl: Callable[..., Any]) -> None:
    own, other = served(tmp_path / "a.json") + "@H100", served(tmp_path / "b.json", model="Qwen/Qwen3-4B") + "@H100"
    plain = profiled(tmp_path / "p.json", profile())
    lines = said(
        kvctl, *VLLM, "--gpu", "H100", *(word for path in (own, other, plain) for word in ("--calibrate", path))
    )
    assert lines == [
        f"note: {other[:-5]}: not used: it is about Qwen/Qwen3-4B, and others are about Qwen/Qwen3-8B",
        f"note: {plain}: not used: vllm itself was measured there",
    ]
    assert not said(kvctl, *VLLM, "--gpu", "H100", "--calibrate", other)
    # 0.2 ms for each token of a prompt is far from what servers do on an H100: no bound.
    assert said(kvctl, *VLLM, "--gpu", "H100", "--calibrate", plain) == [
        f"note: {plain}: not used: transformers was slower there than a server is predicted to be"
    ]
    assert said(kvctl, *VLLM, "--gpu", "cpu:64GiB", "--calibrate", profiled(tmp_path / "c.json", profile(settings={"device": "cpu"}))) == [
        f"note: {tmp_path / 'c.json'}: not used: what transformers does says nothing of a server on a host"
    ]  # fmt: skip


def test_loads_of_a_file_that_say_nothing(tmp_path: Path, kvctl: Callable[..., Any]) -> None:
    good = _outcome(4, [50 * MS] * 20)
    path = served(
        tmp_path / "a.json",
        good,
        _outcome(8, []),
        _outcome(16, [50 * MS] * 20).replace(given_up="6% of requests failed"),
    )
    lines = said(kvctl, *VLLM, "--gpu", "H100", "--calibrate", path + "@H100")
    assert lines == [
        f"note: {path}: not used of its loads 8 at once: no request was answered",
        f"note: {path}: not used of its loads 16 at once: 6% of requests failed",
    ]
    # They are said beside what is written, too, which has no notes.
    written = kvctl("recommend", *VLLM, "--gpu", "H100", "--calibrate", path + "@H200", "--emit", "command")
    assert written.code == 0
    assert written.err.count("not used") == 3


def test_what_cannot_be_timed() -> None:
    spec = build_spec(catalogue.find("Qwen/Qwen3-8B"))
    one = Measurement("vllm", "H100 SXM", spec, 2000, 200, 8.0, 0.1, 0.01, "gguf", where="mine.json")
    request = ask(spec, read_gpus("H100"), prompt=2000, answer=200, concurrency=8, engines=[engine("vllm")])
    good = one.replace(weights="bf16", concurrency=4.0)
    for known, words in (
        ([one], "mine.json: not used: how fast weights in gguf are multiplied is not known"),
        ([one, good], "mine.json: not used of its 2 loads 8 at once of 2,000 + 200 tokens: how fast weights in gguf are multiplied is not known"),
    ):  # fmt: skip
        found = recommend(request, Known(measurements=tuple(known)), advise=False)
        assert [each.words for each in found.passed_over] == [words]
        assert words in found.notes
    slice_ = request.replace(device=request.device.replace(mig=True))
    (each,) = recommend(slice_, Known(measurements=(good,)), advise=False).passed_over
    assert each.words == "mine.json: not used: how much of its card's speed a MIG slice has is not known"


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("Qwen3-8B-Q4_0.gguf", "gguf-4.50"),  # 32 × 4 bits and a scale of 16
        ("Qwen3-8B.Q4_1.gguf", "gguf-5.00"),  # and a minimum of 16
        ("Qwen3-8B-Q5_0.gguf", "gguf-5.50"),
        ("Qwen3-8B-Q5_1.gguf", "gguf-6.00"),
        ("Qwen3-8B-BF16.gguf", "f16"),
        ("Qwen3-8B-f16.gguf", "f16"),
    ],
)
def test_files_of_types_that_are_not_made(name: str, weights: str, tmp_path: Path) -> None:
    (one,) = load(served(tmp_path / "a.json", model=f"/models/{name}", engine="llama.cpp") + "@H100")
    assert (one.spec.id, one.weights) == ("Qwen/Qwen3-8B", weights)
