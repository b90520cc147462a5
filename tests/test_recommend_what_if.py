"""Two plans: what differs, which is better, and what is not told apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.allocation import Serving
from kvctl.engines import engine
from kvctl.errors import ConfigError
from kvctl.hardware.naming import read_gpus
from kvctl.recommend.deployment import Deployment
from kvctl.recommend.prices import Cost
from kvctl.recommend.quality import Loss
from kvctl.recommend.what_if import Row, Side, compare, options, read, settings
from kvctl.speed import Range


def side(name: str = "a", **more: Any) -> Side:
    given: dict[str, Any] = {
        "settings": {"weights": "bf16", "tensor_parallel": 2}, "command": ("vllm", "serve", "m", "--tensor-parallel-size", "2"),
        "memory": {"weights": 100, "cache": 50}, "capacity": 1000, "held": 10,
        "speed": {"ttft": Range(0.1, 0.2, 0.3), "tpot": Range(0.01, 0.02, 0.03), "output_rate": Range(100.0, 200.0, 300.0)},
        "loss": Loss(Range(0.0, 0.0, 0.0), "", "own"), "cost": Cost(2, 5.0, Range(1.0, 2.0, 3.0)),
    }  # fmt: skip
    return Side(name, **(given | more))


def row(found: tuple[Row, ...], name: str) -> Row:
    (one,) = [one for one in found if one.name == name]
    return one


def test_a_plan_does_not_differ_from_itself() -> None:
    found = compare(side("a"), side("b"))
    assert found.same
    assert (found.left, found.right) == ("a", "b")
    assert found.alike == ()
    assert found.unknown == ("request_rate",)


def test_settings_and_flags() -> None:
    other = side(settings={"weights": "fp8", "kv_dtype": "fp8", "tensor_parallel": 2},
                 command=("vllm", "serve", "m", "--tensor-parallel-size=2", "--enforce-eager", "--seed", "-1"))  # fmt: skip
    found = compare(side(), other)
    assert row(found.of("settings"), "weights").right == "fp8"
    assert row(found.of("settings"), "kv_dtype").left == "not set"
    assert {one.name for one in found.of("flags")} == {"--enforce-eager", "--seed"}  # = or a blank is the same
    assert row(found.of("flags"), "--seed").right == "-1"
    assert row(found.of("flags"), "--seed").better == ""


def test_options_of_a_command() -> None:
    assert options(["vllm", "serve", "m", "-tp", "2", "--x=1", "--y", "--stop", "a", "b", "--x", "2"]) == {
        "-tp": "2", "--x": "1 2", "--y": "", "--stop": "a b"}  # fmt: skip
    assert options([]) == {}


def test_exact_figures() -> None:
    found = compare(side(), side(memory={"weights": 50, "graphs": 5, "cache": 50}, capacity=3000, held=5))
    assert row(found.of("memory"), "weights").ratio == 0.5
    assert row(found.of("memory"), "weights").better == ""  # memory is no end in itself
    assert (row(found.of("memory"), "graphs").left, row(found.of("memory"), "graphs").ratio) == (0, None)
    assert (row(found.of("capacity"), "capacity").ratio, row(found.of("capacity"), "capacity").better) == (3.0, "right")
    assert row(found.of("capacity"), "held").better == "left"
    assert "capacity" in compare(side(capacity=None), side()).unknown


@pytest.mark.parametrize(
    ("low", "apart", "better"),
    [(0.3, False, ""), (0.3001, True, "left")],  # the other's TTFT ends at 0.3
)
def test_ranges_that_overlap_are_not_told_apart(low: float, apart: bool, better: str) -> None:
    found = compare(side(), side(speed={"ttft": Range(low, 0.4, 0.5), "tpot": Range(0.01, 0.02, 0.03)}))
    assert (row(found.of("speed"), "ttft").apart, row(found.of("speed"), "ttft").better) == (apart, better)
    assert ("ttft" in found.alike) is not apart
    assert row(found.of("speed"), "ttft").ratio == pytest.approx(2.0)
    assert "output_rate" in found.unknown


def test_more_tokens_a_second_are_better_and_more_loss_is_not() -> None:
    found = compare(
        side(),
        side(speed={"output_rate": Range(400.0, 500.0, 600.0)}, loss=Loss(Range(0.5, 1.0, 2.0), "accuracy", "s")),
    )
    assert row(found.of("speed"), "output_rate").better == "right"
    assert row(found.of("quality"), "loss").better == "left"
    assert "loss" in compare(side(), side(loss=Loss(None, "", "unknown"))).unknown


def test_cost_is_money_where_both_have_a_price() -> None:
    found = compare(side(), side(cost=Cost(4, 4.0, Range(4.0, 5.0, 6.0))))
    assert row(found.of("cost"), "gpus").better == "left"
    assert row(found.of("cost"), "per_hour").better == "right"
    assert row(found.of("cost"), "per_million").better == "left"
    assert {one.name for one in compare(side(), side(cost=Cost(4, None, None))).of("cost")} == {"gpus"}


ranges = st.lists(st.floats(0.001, 1e6), min_size=3, max_size=3).map(lambda three: Range(*sorted(three)))


@given(ranges, ranges)
def test_the_other_way_round_is_the_mirror(one: Range, other: Range) -> None:
    there, back = (
        compare(side(speed={"ttft": a}), side(speed={"ttft": b})).of("speed") for a, b in ((one, other), (other, one))
    )
    assert len(there) == len(back)
    for first, second in zip(there, back, strict=True):
        assert first.apart == second.apart
        assert {first.better, second.better} in ({""}, {"left", "right"})
        assert bool(first.better) == first.apart


def test_what_a_deployment_sets() -> None:
    deployment = Deployment(
        base="m", model="m-AWQ", engine=engine("vllm@0.32"), serving=Serving(tensor_parallel=2, capture_sizes=(1, 2)), context=4096,
        device=read_gpus("L40S")[0], weights="awq", gpus=2,
    )  # fmt: skip
    found = settings(deployment)
    assert found["engine"] == "vllm@0.32"
    assert found["tensor_parallel"] == 2
    assert found["capture_sizes"] == [1, 2]
    assert "enforce_eager" not in found
    assert "max_sequences" not in found
    assert json.dumps(found)
    other = settings(deployment.replace(serving=Serving(tensor_parallel=1), gpus=1))
    assert {one.name for one in compare(side(settings=found), side(settings=other)).of("settings")} == {
        "tensor_parallel", "capture_sizes", "gpus"}  # fmt: skip


# -- files ----------------------------------------------------------------------------------


def plan(**more: Any) -> dict[str, Any]:
    return {
        "schema": "kvctl.recommend/1",
        "answers": [{"side": side("a").to_dict()}, {"side": side("b", loss=None, cost=None).to_dict()}],
    } | more


def test_a_file_gives_back_what_was_written() -> None:
    data = json.loads(json.dumps(plan()))
    assert read(data, "plan.json") == side("a")
    assert read(data, "plan.json", 2) == side("b", loss=None, cost=None)
    assert json.dumps(compare(side(), side("b", capacity=5)).to_dict())


def test_a_loss_beyond_all_bounds() -> None:
    broken = side(loss=Loss(Range(float("inf"), float("inf"), float("inf")), "perplexity", "measured", True))
    data = json.loads(json.dumps(plan(answers=[{"side": broken.to_dict()}]), allow_nan=False))
    assert read(data, "plan.json") == broken
    assert row(compare(side(), broken).of("quality"), "loss").better == "left"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "holds no schema"),
        ({"schema": "kvctl.size/1"}, "holds kvctl.size/1"),
        (plan(answers=3), "answers should be a list"),
        (plan(answers=[]), "nothing met that request"),
        (plan(answers=[{}]), "is damaged"),
        (plan(answers=[{"side": []}]), "is damaged"),
        (plan(answers=[{"side": side().to_dict() | {"memory": {"weights": "much"}}}]), "a whole number is wanted"),
        (plan(answers=[{"side": side().to_dict() | {"speed": {"ttft": {"low": 3, "mid": 2, "high": 1}}}}]), "a range from 3 over 2 to 1"),
        (plan(answers=[{"side": side().to_dict() | {"speed": {"ttft": {"low": 1, "mid": float("nan"), "high": 1}}}}]), "a number is wanted"),
    ],
)  # fmt: skip
def test_what_is_no_plan_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read(data, "plan.json")
    assert caught.value.hint


def test_an_answer_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="has 2 answers, and no number 3"):
        read(plan(), "plan.json", 3)
