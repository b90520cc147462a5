"""What holds of every prediction: physics, order, and no surprises for any model on any GPU."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.errors import KvctlError
from kvctl.formats import BF16, cache_format, plain
from kvctl.hardware.device import GpuFacts
from kvctl.hardware.table import cards
from kvctl.model import build_spec
from kvctl.sources import catalogue
from kvctl.spec import Formats, ModelSpec
from kvctl.speed import Prepared, Range, Setup, Speed, prepare
from kvctl.speed.machine import FORMATS, format_of, peaks
from kvctl.speed.work import work_of

B16 = Formats(BF16, plain(BF16), plain(BF16))
FP8 = Formats(BF16, cache_format("fp8"), cache_format("fp8"))
MODELS = (
    "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-120b",
    "mistralai/Mixtral-8x7B-Instruct-v0.1", "Qwen/Qwen3-Next-80B-A3B-Instruct", "ibm-granite/granite-4.0-h-small", "google/gemma-3-27b-it",
)  # fmt: skip
"""Dense ones, mixtures, latent attention, windows, recurrent layers."""
ENGINES = ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "ollama", "mlx-lm", "transformers")
BF = format_of("bf16")
assert BF is not None
CARDS = tuple(card for card in cards() if peaks(card, BF) is not None)
NEARLY = 1 + 1e-9


@cache
def model(name: str) -> ModelSpec:
    return build_spec(catalogue.find(name))


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    engine = draw(st.sampled_from(ENGINES))
    names = [fmt.name for fmt in FORMATS if engine not in ("llama.cpp", "ollama") or fmt.whole]
    return Setup(
        model(draw(st.sampled_from(MODELS))), engine, draw(st.sampled_from(CARDS)), draw(st.sampled_from(names)), draw(st.sampled_from((B16, FP8))),
        tensor=draw(st.sampled_from((1, 2, 4, 8, 16))), pipeline=draw(st.sampled_from((1, 2, 4))), data=draw(st.sampled_from((1, 1, 8))),
        replicas=draw(st.sampled_from((1, 3))), batched=draw(st.sampled_from((None, 512, 16_384))),
    )  # fmt: skip


LENGTHS = (st.integers(1, 130_000), st.integers(1, 4000))
AT_ONCE = st.floats(1, 2000)


@settings(deadline=None)
@given(setups(), st.floats(1, 20), st.sampled_from(("bandwidth", "rates", "link")), AT_ONCE, *LENGTHS)
def test_better_hardware_is_never_slower(
    setup: Setup, times: float, what: str, held: float, prompt: int, answer: int
) -> None:
    """The same card with more bandwidth, more operations a second or faster links; what engines reach of it stays."""
    card = setup.card
    names = {"bandwidth": ("bandwidth_gbs",), "link": ("link_gbs",),
             "rates": ("fp16_tflops", "fp8_tflops", "fp4_tflops", "int8_tops", "fp32_tflops", "shader_tflops")}[what]  # fmt: skip
    better: GpuFacts = card.replace(**{name: times * getattr(card, name) for name in names if getattr(card, name)})
    slow, fast = prepare(setup), prepare(setup.replace(card=better))
    alone, quicker = slow.seconds(prompt, answer, 1), fast.seconds(prompt, answer, 1)
    assert quicker[0] <= alone[0] * NEARLY
    assert quicker[1] <= alone[1] * NEARLY
    # In company prompts of others come more often where answers are written faster: TTFT may grow, the whole request may not.
    before, after = slow.seconds(prompt, answer + 1, held), fast.seconds(prompt, answer + 1, held)
    assert after[1] <= before[1] * NEARLY
    assert after[0] + answer * after[1] <= (before[0] + answer * before[1]) * 1.001
    assert fast.best(prompt, answer, held)[0] <= slow.best(prompt, answer, held)[0] * NEARLY
    assert fast.best(prompt, answer, held)[1] <= slow.best(prompt, answer, held)[1] * NEARLY


@settings(deadline=None)
@given(setups(), AT_ONCE, st.floats(0, 1), *LENGTHS)
def test_nothing_beats_the_roofline(setup: Setup, held: float, found: float, prompt: int, answer: int) -> None:
    ready, before = prepare(setup), found * (prompt - 1)
    first, between = ready.seconds(prompt, answer, held, before)
    best = ready.best(prompt, answer, held * setup.replicas, before)
    assert 0 < best[0] <= first * NEARLY
    assert 0 < best[1] <= between * NEARLY
    speed = ready.at(prompt, answer, held, before=before)
    best = ready.best(prompt, answer, held, before)
    assert speed.ttft.low >= best[0] / NEARLY
    assert speed.tpot.low >= best[1] / NEARLY
    assert speed.request_rate.high <= held / (best[0] + (answer - 1) * best[1]) * NEARLY
    _sane(speed)


def _sane(speed: Speed) -> None:
    for name in ("ttft", "tpot", "output_rate", "request_rate"):
        found: Range = getattr(speed, name)
        assert 0 < found.low <= found.mid * NEARLY <= found.high * NEARLY**2
        assert math.isfinite(found.high) or not speed.sustained


@settings(deadline=None)
@given(setups(), AT_ONCE, st.floats(1, 10), *LENGTHS)
def test_company_makes_no_request_faster_and_the_server_no_slower(
    setup: Setup, held: float, times: float, prompt: int, answer: int
) -> None:
    ready = prepare(setup)
    few, many = ready.seconds(prompt, answer, held), ready.seconds(prompt, answer, held * times)
    assert many[0] >= few[0] / NEARLY
    assert many[1] >= few[1] / NEARLY
    one, other = (held * k / (first + (answer - 1) * between) for k, (first, between) in ((1, few), (times, many)))
    assert other >= one / NEARLY


@settings(deadline=None)
@given(setups(), AT_ONCE, st.floats(0, 1), *LENGTHS)
def test_what_is_found_in_the_cache_never_costs_time(
    setup: Setup, held: float, found: float, prompt: int, answer: int
) -> None:
    ready = prepare(setup.replace(pipeline=1))  # a prompt of fewer passes keeps stages busy less well
    whole, rest = ready.seconds(prompt, answer, held), ready.seconds(prompt, answer, held, found * (prompt - 1))
    assert rest[0] <= whole[0] * NEARLY
    assert rest[1] <= whole[1] * NEARLY


@settings(deadline=None)
@given(setups(), st.integers(1, 500), st.floats(0.01, 3), *LENGTHS)
def test_requests_that_come_at_a_rate(setup: Setup, held: int, share: float, prompt: int, answer: int) -> None:
    ready = prepare(setup)
    most = ready.at(prompt, answer, float(held))
    limit = most.concurrency / (most.ttft.mid + (answer - 1) * most.tpot.mid)
    speed = ready.coming(prompt, answer, share * limit, float(held))
    _sane(speed)
    # What is served is what comes, and no more than a full server does.
    assert speed.request_rate.mid == pytest.approx(min(share, 1) * limit, rel=1e-6)
    assert speed.request_rate.high <= share * limit * NEARLY
    if share > NEARLY:
        assert not speed.sustained
        assert math.isinf(speed.ttft.mid)
    elif share < 1 / NEARLY:
        assert speed.sustained
        assert math.isfinite(speed.ttft.high)
        # Little's law: as many are in service as come in the time that one takes.
        if speed.concurrency > setup.replicas:
            first, between = ready.seconds(prompt, answer, speed.concurrency / setup.replicas)
            assert speed.concurrency == pytest.approx(share * limit * (first + (answer - 1) * between), rel=1e-3)


@settings(deadline=None)
@given(setups(), st.integers(1, 500), *LENGTHS)
def test_near_the_limit_requests_wait_without_end(setup: Setup, held: int, prompt: int, answer: int) -> None:
    ready = prepare(setup)
    full = ready.at(prompt, answer, float(held))
    limit = full.concurrency / (full.ttft.mid + (answer - 1) * full.tpot.mid)
    waits = [
        ready.coming(prompt, answer, limit * (1 - gap), float(held)).ttft.mid for gap in (0.5, 0.1, 1e-2, 1e-4, 1e-6)
    ]
    assert waits == sorted(waits)
    # The wait is the service time over as many as are served at once and the free share of them.
    assert waits[-1] > 1e3 * full.ttft.mid / max(held / setup.replicas, 1)
    assert waits[-1] > 50 * waits[-2] - 60 * full.ttft.mid


# -- every model on every GPU --------------------------------------------------------------------------


def _known(names: list[str]) -> list[ModelSpec]:
    found = []
    for name in names:
        spec = model(name)
        try:
            work_of(spec, B16)
        except KvctlError:
            continue
        found.append(spec)
    return found


def _everything(specs: list[ModelSpec], on: tuple[GpuFacts, ...], engines: tuple[str, ...]) -> None:
    for spec in specs:
        for card in on:
            for engine in engines:
                ready = prepare(Setup(spec, engine, card, "q4_k_m" if engine == "llama.cpp" else "bf16", B16))
                _one(ready, 1000, 100, 8.0)


def _one(ready: Prepared, prompt: int, answer: int, held: float) -> None:
    speed = ready.at(prompt, answer, held)
    what: Any = (ready.setup.spec.id, ready.setup.card.name, ready.setup.engine, speed)
    assert all(0 < value < math.inf for name in ("ttft", "tpot", "output_rate", "request_rate") for value in getattr(speed, name).to_dict().values()), what  # fmt: skip
    assert speed.ttft.low <= speed.ttft.mid <= speed.ttft.high, what
    # A token of a model of a milliard parameters and more takes no microsecond, and no hour.
    assert 1e-6 < speed.tpot.mid < 3600, what


def test_a_sample_of_the_catalogue() -> None:
    _everything(_known(catalogue.names()[::40]), CARDS[::15], ("vllm", "llama.cpp"))


@pytest.mark.slow
def test_the_whole_catalogue() -> None:
    specs = _known(catalogue.names())
    assert len(specs) > 470
    assert len(CARDS) > 110
    _everything(specs, CARDS, ("vllm",))
    _everything(specs[::7], CARDS, ("sglang", "tensorrt-llm", "llama.cpp"))
