"""`kvctl recommend` with parts of the answer settled: --weights-dtype, --kv-cache-dtype, -tp, -pp, --replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import Outcome

from kvctl.engines import commandline
from kvctl.recommend.request import Pins

Run = Callable[..., Outcome]
BASE = ("recommend", "Qwen/Qwen3-32B", "--gpu", "2xH100", "--ctx", "16k", "--concurrency", "8", "--json")


def _answers(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [answer["side"]["settings"] for answer in found["answers"]]


@pytest.mark.parametrize(("argv", "field", "values"), [
    (("--weights-dtype", "awq"), "weights", {"awq"}),
    (("--weights-dtype", "FP8"), "weights", {"fp8", "fp8-block", "fp8-channel"}),
    (("--weights-dtype", "q4_k_m"), "weights", {"q4_k_m"}),
    (("--kv-cache-dtype", "fp8"), "kv_dtype", {"fp8", "fp8_e4m3"}),
    (("--kv-dtype", "q8_0"), "kv_dtype", {"q8_0"}),
    (("--kv-dtype", "bf16"), "kv_dtype", {"auto", "f16"}),
    (("-tp", "2", "--engine", "vllm"), "tensor_parallel", {2}),
    (("-pp", "2", "--engine", "vllm"), "pipeline_parallel", {2}),
    (("--replicas", "2"), "replicas", {2}),
    (("-tp", "1", "--replicas", "1", "--engine", "vllm,sglang"), "gpus", {1}),
], ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")  # fmt: skip
def test_what_is_settled_holds_in_every_answer(kvctl: Run, argv: tuple[str, ...], field: str, values: set[Any]) -> None:
    outcome = kvctl(*BASE, *argv)
    assert outcome.code == 0, outcome.err
    found = _answers(outcome.json)
    assert found
    assert {one[field] for one in found} <= values


def test_a_split_that_is_told_is_in_the_command(kvctl: Run) -> None:
    """Two stages of two GPUs, which the search leaves out where GPUs have links: it is told."""
    outcome = kvctl(*BASE[:2], "--gpu", "4xH100", *BASE[4:], "--engine", "vllm", "-tp", "2", "-pp", "2")
    command = outcome.json["answers"][0]["side"]["command"]
    given = {one.flag.field: one.value for one in commandline.read(" ".join(command)).flags}
    assert (given["tensor_parallel"], given["pipeline_parallel"]) == (2, 2)


def test_the_search_settled_on_its_own_answer_finds_it_again(kvctl: Run) -> None:
    plain = kvctl(*BASE, "--engine", "vllm").json["answers"][0]["side"]
    chosen = plain["settings"]
    told = (
        "--weights-dtype",
        chosen["weights"],
        "--kv-dtype",
        chosen["kv_dtype"],
        "-tp",
        str(chosen["tensor_parallel"]),
    )
    again = kvctl(*BASE, "--engine", "vllm", *told, "--replicas", str(chosen.get("replicas", 1))).json
    assert again["answers"][0]["side"] == plain
    assert (again["asked"]["told_weights"], again["asked"]["told_tensor"], again["asked"]["told_pipeline"]) == (
        chosen["weights"], chosen["tensor_parallel"], None,
    )  # fmt: skip


def test_what_a_named_format_loses_is_not_held_against_it(kvctl: Run) -> None:
    """AWQ of this model lost more than 1% in every published middle: asked for, it is given; bounded, it is not."""
    outcome = kvctl(*BASE, "--weights-dtype", "awq", "--engine", "vllm")
    assert outcome.code == 0
    assert outcome.json["answers"][0]["side"]["loss"]["percent"]["mid"] > 1
    assert any("but for those named" in note for note in outcome.json["notes"])
    assert kvctl(*BASE, "--weights-dtype", "awq", "--engine", "vllm", "--max-quality-loss", "1").code == 3
    # The cache was not named: no format that loses more than 1% by itself comes with it.
    assert {one["kv_dtype"] for one in _answers(outcome.json)} <= {"auto", "fp8"}


@pytest.mark.parametrize(("argv", "said"), [
    (("--engine", "llama.cpp", "-tp", "2"), "llama.cpp has no ranks as -tp and -pp count them"),
    (("--engine", "vllm", "--weights-dtype", "q4_k_m"), "vllm runs no q4_k_m of Qwen/Qwen3-32B on NVIDIA H100 80GB HBM3"),
    (("--engine", "sglang", "--kv-dtype", "nvfp4"), "sglang keeps no cache in nvfp4 on NVIDIA H100 80GB HBM3"),
])  # fmt: skip
def test_what_no_engine_has_is_said(kvctl: Run, argv: tuple[str, ...], said: str) -> None:
    outcome = kvctl(*BASE, *argv)
    assert outcome.code == 3
    assert any(said in one["why"] for one in outcome.json["rejected"])


@pytest.mark.parametrize(("argv", "said"), [
    (("-tp", "4"), "4 GPUs are wanted by -tp, -pp and --replicas, and there are 2"),
    (("-tp", "2", "--replicas", "2"), "4 GPUs are wanted"),
    (("-tp", "0"), "-tp 0 is out of range"),
    (("--replicas", "-1"), "--replicas -1 is out of range"),
    (("--weights-dtype", "q9"), "--weights-dtype: unknown format 'q9'"),
    (("--kv-dtype", "fp7"), "--kv-cache-dtype: no engine has a cache in 'fp7'"),
    (("--weights-dtype", ""), "--weights-dtype: unknown format ''"),
])  # fmt: skip
def test_what_cannot_be(kvctl: Run, argv: tuple[str, ...], said: str) -> None:
    outcome = kvctl(*BASE, *argv)
    assert outcome.code == 2
    assert said in outcome.err
    assert not outcome.out


def test_fp8_is_each_of_its_kinds() -> None:
    pins = Pins("fp8", "fp8")
    assert [name for name in ("fp8", "fp8-block", "fp8-channel", "bf16", "w8a8") if pins.wants(name)] == [
        "fp8",
        "fp8-block",
        "fp8-channel",
    ]
    assert [name for name in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "q8_0") if pins.holds(name)] == [
        "fp8",
        "fp8_e4m3",
        "fp8_e5m2",
    ]
    assert Pins("fp8-block").wants("fp8-block")
    assert not Pins("fp8-block").wants("fp8")
