"""Durations in bounded memory, against all of them sorted."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.loadtest.histogram import Histogram


@given(st.lists(st.integers(0, 10**13), min_size=1, max_size=200), st.sampled_from([0, 1, 25, 50, 90, 99, 99.9, 100]))
def test_percentiles_are_those_of_all_values(values: list[int], of: float) -> None:
    found = Histogram(values)
    nearest = sorted(values)[max(1, math.ceil(of / 100 * len(values))) - 1]
    assert found.percentile(of).value == nearest
    assert found.share_within(nearest) == sum(value <= nearest for value in values) / len(values)
    assert found.mean == pytest.approx(sum(values) / len(values))
    assert (found.smallest, found.largest, found.count) == (min(values), max(values), len(values))
    if len(values) > 1:
        assert found.deviation == pytest.approx(statistics.stdev(values), rel=1e-6, abs=1e-3)


@pytest.mark.parametrize("joined", [False, True])
def test_of_many_to_one_part_in_a_thousand(*, joined: bool) -> None:
    lot = random.Random(2)
    values = [int(lot.lognormvariate(18, 1)) for _ in range(140_000)]
    found = Histogram(values[:100_000] if joined else values)
    if joined:
        found.join(Histogram(values[100_000:]))
    values.sort()
    for of in (0, 1, 50, 99, 99.99, 100):
        nearest = values[max(1, math.ceil(of / 100 * len(values))) - 1]
        assert found.percentile(of).value == pytest.approx(nearest, rel=1e-3)
        assert found.share_within(nearest) == pytest.approx(of / 100, abs=0.01)


@given(st.lists(st.integers(0, 10**12), max_size=50), st.lists(st.integers(0, 10**12), max_size=50))
def test_two_joined_are_one_of_both(one: list[int], other: list[int]) -> None:
    joined, whole = Histogram(one), Histogram(one + other)
    joined.join(Histogram(other))
    assert joined.rows() == whole.rows()
    assert (joined.total, joined.squares, joined.largest, joined.smallest) == (
        whole.total,
        whole.squares,
        whole.largest,
        whole.smallest,
    )


def test_the_interval_holds_the_true_percentile_as_often_as_it_says() -> None:
    """2,000 samples of 200 exponential values: the true median and 90th percentile lie within about 95 of 100 times."""
    lot = random.Random(3)
    for of, share in ((50, 0.5), (90, 0.9)):
        true = -math.log(1 - share) * 1e6
        inside = 0
        for _ in range(2000):
            found = Histogram(int(lot.expovariate(1e-6)) for _ in range(200)).percentile(of)
            assert found.low is not None
            assert found.high is not None
            inside += found.low <= true <= found.high
        assert 0.93 <= inside / 2000 <= 0.985


def test_too_few_have_no_interval() -> None:
    found = Histogram([5, 6, 7]).percentile(99)
    assert (found.value, found.high) == (7, None)


def test_memory_is_bounded() -> None:
    lot = random.Random(4)
    found = Histogram(int(lot.lognormvariate(18, 2)) for _ in range(200_000))
    assert len(found.rows()) < 20_000
    assert found.share_within(found.largest) == 1
    assert found.share_within(int(found.percentile(50).value)) == pytest.approx(0.5, abs=0.01)


def test_of_nothing() -> None:
    for ask in (lambda found: found.mean, lambda found: found.percentile(50), lambda found: found.share_within(1)):
        with pytest.raises(ValueError, match="of nothing"):
            ask(Histogram())
