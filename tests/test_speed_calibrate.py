"""Measurements of one's own: what they move, and how sure one is then."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvctl.formats import BF16, plain
from kvctl.hardware.table import find
from kvctl.model import build_spec
from kvctl.sources import catalogue
from kvctl.spec import Formats
from kvctl.speed import Prepared, Range, Setup, prepare
from kvctl.speed.calibrate import KEPT, Measurement, calibration

LLAMA = build_spec(catalogue.find("meta-llama/Llama-3.1-8B-Instruct"))
QWEN = build_spec(catalogue.find("Qwen/Qwen3-8B"))
SETUP = Setup(LLAMA, "vllm", find("H100 SXM")[0], "bf16", Formats(BF16, plain(BF16), plain(BF16)))
PLAIN = prepare(SETUP)
LOAD = (2000, 200, 8.0)


def measured(times: float | None, between: float | None, *, prepared: Prepared = PLAIN, **more: Any) -> Measurement:
    """So many times as slow as predicted."""
    first, token = prepared.seconds(*LOAD)
    setup = prepared.setup
    found = Measurement(
        setup.engine, setup.card.name, setup.spec, *LOAD, None if times is None else times * first, None if between is None else between * token,
        setup.weights, where="a.json",
    )  # fmt: skip
    return found.replace(**more)


def told(*measurements: Measurement, setup: Setup = SETUP) -> Prepared:
    return prepare(setup, calibration(setup, measurements))


def width(found: Range) -> float:
    return math.log(found.high / found.low)


def test_twice_as_slow_moves_by_two_and_narrows() -> None:
    before, after = PLAIN.at(1000, 100, 4), told(measured(2, 2)).at(1000, 100, 4)
    assert after.ttft.mid == pytest.approx(2 * before.ttft.mid)
    assert after.tpot.mid == pytest.approx(2 * before.tpot.mid)
    assert after.output_rate.mid == pytest.approx(before.output_rate.mid / 2)
    # Both ends are 0.65 and 0.60 as far off, as logarithms. The best that hardware can do is not in the way when all is twice as slow.
    low, high = PLAIN.spread(4)["ttft"]
    assert width(after.ttft) == pytest.approx(0.65 * (high - low))
    low, high = PLAIN.spread(4)["tpot"]
    assert width(after.tpot) == pytest.approx(0.60 * (high - low))
    assert width(after.output_rate) < width(before.output_rate)
    assert after.validated.startswith("measured: a.json; ")


def test_each_kind_of_figure_is_moved_by_its_own() -> None:
    before, after = PLAIN.at(1000, 100, 4), told(measured(3, None)).at(1000, 100, 4)
    assert after.ttft.mid == pytest.approx(3 * before.ttft.mid)
    assert after.tpot == before.tpot


@pytest.mark.parametrize(
    "change",
    [{"engine": "sglang"}, {"engine": "llama.cpp"}, {"card": "H200 SXM"}, {"card": "H100 PCIe"}, {"engine": "unknown"}],
)
def test_other_engines_and_cards_move_nothing(change: dict[str, str]) -> None:
    other = measured(2, 2, **change)
    assert calibration(SETUP, [other]) is None
    assert told(other).at(1000, 100, 4) == PLAIN.at(1000, 100, 4)


def test_ollama_is_llama_cpp() -> None:
    setup = SETUP.replace(engine="llama.cpp", weights="q4_k_m")
    one = measured(2, 2, prepared=prepare(setup), engine="ollama")
    assert told(one, setup=setup).at(1000, 100, 1).tpot.mid == pytest.approx(
        2 * prepare(setup).at(1000, 100, 1).tpot.mid
    )


def test_another_model_is_half_believed_and_narrows_nothing() -> None:
    other = prepare(SETUP.replace(spec=QWEN))
    before, after = PLAIN.at(1000, 100, 4), told(measured(4, 4, prepared=other)).at(1000, 100, 4)
    assert after.tpot.mid == pytest.approx(2 * before.tpot.mid)
    assert width(after.ttft) >= width(before.ttft) - 1e-9
    assert after.validated.startswith("measured with other models: a.json")


def test_this_model_goes_before_others() -> None:
    other = prepare(SETUP.replace(spec=QWEN))
    found = calibration(SETUP, [measured(4, 4, prepared=other), measured(2, 2)])
    assert found is not None
    assert found.factor("tpot") == pytest.approx(2)


def test_the_middle_of_several_counts() -> None:
    found = calibration(SETUP, [measured(one, one) for one in (1.1, 1.2, 1.5)])
    assert found is not None
    assert found.factor("ttft") == pytest.approx(1.2)


def test_contradictions_widen_again() -> None:
    low, high = PLAIN.spread(4)["tpot"]
    agreeing = calibration(SETUP, [measured(2, 2), measured(2, 2)])
    assert agreeing is not None
    assert agreeing.spread("tpot", low, high) == pytest.approx((KEPT["tpot"] * low, KEPT["tpot"] * high))
    # A third and three times as slow: e^±1.0986, which is more than was published.
    apart = calibration(SETUP, [measured(1 / 3, 1 / 3), measured(3, 3)])
    assert apart is not None
    assert apart.factor("tpot") == pytest.approx(1)
    assert apart.spread("tpot", low, high) == pytest.approx((-math.log(3), math.log(3)))
    assert apart.spread("rate", -0.1, 0.1) == pytest.approx((-math.log(3), math.log(3)))


def test_nothing_is_faster_than_the_hardware() -> None:
    found = told(measured(0.001, 0.001)).at(1000, 100, 4)
    first, between = PLAIN.best(1000, 100, 4)
    assert (found.ttft.low, found.ttft.mid) == (first, first)
    assert (found.tpot.low, found.tpot.mid) == (between, between)
    # Four requests at once, each of which takes at least so long.
    assert found.request_rate.high <= 4 / (first + 99 * between) * (1 + 1e-9)


def test_transformers_is_a_bound() -> None:
    # 40% of the predicted time: a server is no slower. Five times: a server is what it is.
    quick, slow = measured(0.4, 0.9, engine="transformers"), measured(5, 5, engine="transformers")
    before, after = PLAIN.at(1000, 100, 4), told(quick).at(1000, 100, 4)
    assert after.ttft.mid == pytest.approx(0.4 * before.ttft.mid)
    assert after.tpot.mid == pytest.approx(0.9 * before.tpot.mid)
    assert after.ttft.high / after.ttft.mid == pytest.approx(before.ttft.high / before.ttft.mid)
    assert after.validated.startswith("no slower than transformers: a.json; ")
    assert calibration(SETUP, [slow]) is None
    both = calibration(SETUP, [quick, measured(2, 2)])
    assert both is not None
    assert both.factor("ttft") == pytest.approx(2)


def test_a_batch_is_compared_with_a_batch() -> None:
    first, between = PLAIN.together(512, 32, 16)
    one = Measurement(
        "vllm",
        "H100 SXM 80GB" if SETUP.card.name != "H100 SXM" else "H100 SXM",
        LLAMA,
        512,
        32,
        16.0,
        2 * first,
        3 * between,
        "bf16",
        together=True,
    )
    found = calibration(SETUP, [one])
    assert found is not None
    assert (found.factor("ttft"), found.factor("tpot")) == pytest.approx((2, 3))


def test_what_was_found_in_the_cache_is_not_held_against_it() -> None:
    first, between = PLAIN.seconds(*LOAD, 1500)
    found = calibration(SETUP, [measured(1, 1, ttft=first, tpot=between, before=1500.0)])
    assert found is not None
    assert (found.factor("ttft"), found.factor("tpot")) == pytest.approx((1, 1))


def test_what_cannot_be_predicted_says_nothing() -> None:
    assert calibration(SETUP, [measured(2, 2, weights="a format of tomorrow")]) is None
