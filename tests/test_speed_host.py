"""A host's speed from what was measured on it."""

from __future__ import annotations

import pytest

from kvctl.errors import ConfigError
from kvctl.formats import BF16, plain
from kvctl.hardware import read_gpus
from kvctl.model import build_spec
from kvctl.recommend.answers import Known, recommend
from kvctl.recommend.request import ask
from kvctl.sources import catalogue
from kvctl.spec import Formats
from kvctl.speed import Setup
from kvctl.speed.calibrate import Measurement
from kvctl.speed.host import FACTS, prepare_host

LLAMA = build_spec(catalogue.find("meta-llama/Llama-3.1-8B-Instruct"))
SETUP = Setup(LLAMA, "llama.cpp", FACTS, "f16", Formats(BF16, plain(BF16), plain(BF16)))
# One request of 400 + 2 tokens on a host that reads 50 GB/s and does 10^12 operations a second; Llama's parameters as
# tests/test_speed_work.py counts them, 2 bytes each, and rows of 32 × 4,096 bytes for each of 401 tokens.
LAYERS, HEAD = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096), 128_256 * 4096
TPOT = (2 * (LAYERS + HEAD) + 401 * 32 * 4096) / 50e9
TTFT = (2 * 400 * LAYERS + 2 * HEAD + 32 * 16_384 * 400 * 200) / 1e12
ONE = Measurement("llama.cpp", "CPU", LLAMA, 400, 2, 1.0, TTFT, TPOT, "f16", where="mine.json")


def test_rates_are_those_that_were_measured() -> None:
    ready = prepare_host(SETUP, [ONE])
    assert ready.layout.peaks.bandwidth == pytest.approx(50e9)
    assert ready.layout.peaks.flops == pytest.approx(1e12)
    # The measured load takes as long as was measured: where one of two rates bounds a phase, the other adds next to nothing.
    first, between = ready.seconds(400, 2, 1)
    assert first == pytest.approx(TTFT, rel=0.01)
    assert between == pytest.approx(TPOT, rel=0.02)
    speed = ready.at(400, 2, 1)
    assert 0 < speed.ttft.low < speed.ttft.mid < speed.ttft.high
    assert speed.validated == "measured: mine.json"
    assert "of any format" in speed.assumption


def test_fewer_bits_are_read_faster_and_longer_prompts_take_longer() -> None:
    plain_, small = prepare_host(SETUP, [ONE]), prepare_host(SETUP.replace(weights="q4_k_m"), [ONE])
    # 4.8944 of 16 bits, and the cache as it was.
    weights = 2 * (LAYERS + HEAD) / 50e9
    assert small.seconds(400, 2, 1)[1] == pytest.approx(TPOT - weights * (1 - 4.8944 / 16), rel=0.05)
    assert plain_.seconds(4000, 2, 1)[0] > 10 * TTFT


def test_loads_of_many_requests_do_not_set_the_rates() -> None:
    busy = ONE.replace(concurrency=8.0, ttft=10 * TTFT, tpot=10 * TPOT)
    assert prepare_host(SETUP, [busy, ONE]).seconds(400, 2, 1) == prepare_host(SETUP, [ONE]).seconds(400, 2, 1)


def test_loads_of_many_requests_correct_what_is_predicted_of_many() -> None:
    plain_ = prepare_host(SETUP, [ONE])
    four, sixteen = ((n, tuple(share * time for share, time in zip(shares, plain_.seconds(400, 2, n), strict=True)))
                     for n, shares in ((4, (2.0, 0.5)), (16, (8.0, 0.5))))  # fmt: skip
    measured = [
        ONE,
        *(
            ONE.replace(concurrency=float(n), ttft=times[0], tpot=times[1], where=f"{n}.json")
            for n, times in (four, sixteen)
        ),
    ]
    told: list[str] = []
    ready = prepare_host(SETUP, measured, lambda _, why: told.append(why))
    assert told == ["", "", ""]
    assert ready.at(400, 2, 1).validated == "measured: 16.json, 4.json, mine.json"
    for n, (first, between) in (four, sixteen):
        assert ready.seconds(400, 2, n) == (pytest.approx(first), pytest.approx(between))
    assert ready.seconds(400, 2, 1) == plain_.seconds(400, 2, 1)
    # Half way between 4 and 16 is 8: the square root of 2 × 8. Beyond 16 it is as at 16.
    for n, shares in ((8, (4.0, 0.5)), (64, (8.0, 0.5)), (2, (2**0.5, 0.5**0.5))):
        first, between = plain_.seconds(400, 2, n)
        assert ready.seconds(400, 2, n) == (pytest.approx(shares[0] * first), pytest.approx(shares[1] * between))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tpot": None}, "follows from TTFT and TPOT, and it has only one"),
        ({"ttft": None}, "follows from TTFT and TPOT, and it has only one"),
        ({"ttft": None, "tpot": None}, "neither TTFT nor TPOT"),
        ({"weights": "gguf"}, "how fast weights in gguf are multiplied is not known"),
    ],
)
def test_why_a_measurement_is_not_used(change: dict[str, str | None], why: str) -> None:
    told: list[str] = []
    prepare_host(SETUP, [ONE, ONE.replace(**change)], lambda one, why: told.append(why) if one is not ONE else None)
    assert len(told) == 1
    assert why in told[0]


@pytest.mark.parametrize("change", [{"engine": "vllm"}, {"card": "H100 SXM"}, {"tpot": None}, {"ttft": None}])
def test_what_was_not_measured_there_is_not_known(change: dict[str, str | None]) -> None:
    with pytest.raises(ConfigError, match="--calibrate FILE@cpu"):
        prepare_host(SETUP, [ONE.replace(**change)])


def test_a_recommendation_for_a_host() -> None:
    request = ask(
        build_spec(catalogue.find("HuggingFaceTB/SmolLM2-135M-Instruct")),
        read_gpus("cpu:64GiB"),
        prompt=400,
        answer=100,
        concurrency=1,
    )
    for known, engines in ((Known(), set()), (Known(measurements=(ONE,)), {"llama.cpp"})):
        judged = [one.judged for one in recommend(request, known, advise=False).answers]
        assert judged
        assert {one.candidate.deployment.engine.name for one in judged if one.speed is not None} == engines
