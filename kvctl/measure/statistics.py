"""Repeated measurements: their middle, their spread, and how far one set is from another.

Every value counts: none is removed as an outlier. Steps within one repeat follow one another and are not
independent, so intervals are over the repeats: Student's t on the logarithms of the repeats' medians. Logarithms,
because times are positive, skewed to the right, and compared by their ratio. With one or two repeats of many
steps there is nothing better than the steps, and the interval says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from kvctl.record import Record

_CONFIDENCE = 0.95
_ENOUGH_REPEATS = 3
"""With two, t has one degree of freedom and an interval of no use (12.7 standard errors)."""


class Interval(Record):
    """Where the typical value lies with 95% confidence."""

    low: float
    high: float
    by: str
    """"repeats", or "steps": as if the steps were independent, which makes it too narrow."""


class Sample(Record):
    """Times of one thing in seconds, as they were measured; at least one."""

    values: tuple[float, ...]
    groups: tuple[int, ...] = ()
    """How many values belong to each repeat, in order; empty: each value is a repeat of its own."""

    @property
    def median(self) -> float:
        """The middle value."""
        return quantile(self.values, 0.5)

    @property
    def p95(self) -> float:
        """What 95 of 100 values do not exceed."""
        return quantile(self.values, 0.95)

    @property
    def mean(self) -> float:
        """The arithmetic mean."""
        return math.fsum(self.values) / len(self.values)

    @property
    def iqr(self) -> float:
        """Interquartile range: the middle half lies within so much."""
        return quantile(self.values, 0.75) - quantile(self.values, 0.25)

    @property
    def spread(self) -> float | None:
        """Interquartile range over the median."""
        return self.iqr / self.median if self.median else None

    @property
    def repeats(self) -> tuple[tuple[float, ...], ...]:
        """The values of each repeat."""
        if not self.groups:
            return tuple((value,) for value in self.values)
        ends = list(itertools.accumulate(self.groups))
        if ends[-1] != len(self.values):
            raise ValueError(f"groups of {ends[-1]} values, and there are {len(self.values)}")
        return tuple(self.values[end - size : end] for end, size in zip(ends, self.groups, strict=True) if size)

    @property
    def interval(self) -> Interval | None:
        """The typical value with 95% confidence; None where there are too few values to say."""
        logs = _repeat_logs(self)
        if logs is not None:
            middle, half = _mean_and_half(logs)
            return Interval(math.exp(middle - half), math.exp(middle + half), "repeats")
        ranks = _median_ranks(len(self.values))
        if ranks is None or min(self.values) <= 0:
            return None
        ordered = sorted(self.values)
        return Interval(ordered[ranks[0]], ordered[ranks[1]], "steps")

    @property
    def noise(self) -> float | None:
        """Half the width of the interval over the median: two runs on an idle machine agree within that."""
        interval = self.interval
        return None if interval is None else (interval.high - interval.low) / 2 / self.median

    def to_dict(self) -> dict[str, Any]:
        interval = self.interval
        return {
            "median_s": self.median,
            "p95_s": self.p95,
            "mean_s": self.mean,
            "iqr_s": self.iqr,
            "spread": self.spread,
            "interval_s": None if interval is None else [interval.low, interval.high],
            "interval_by": None if interval is None else interval.by,
            "noise": self.noise,
            "repeats": [len(repeat) for repeat in self.repeats],
            "values_s": list(self.values),
        }


class Ratio(Record):
    """One sample over another."""

    value: float
    low: float | None
    """With 95% confidence; None where one of the two has too few values."""
    high: float | None
    by: str
    """"pairs" of interleaved repeats, "repeats", or "steps": see `Interval`."""

    @property
    def same(self) -> bool | None:
        """Whether the two may be the same; None where that is not known."""
        return None if self.low is None or self.high is None else self.low <= 1 <= self.high

    def widened(self, share: float) -> Ratio:
        """With a noise that the samples cannot know, as a share of the value, in the interval too."""
        if self.low is None or self.high is None:
            return self
        below, above = (
            math.hypot(math.log(end / self.value), math.log1p(share)) * sign
            for end, sign in ((self.low, -1), (self.high, 1))
        )
        return self.replace(low=self.value * math.exp(below), high=self.value * math.exp(above))

    def to_dict(self) -> dict[str, Any]:
        interval = None if self.low is None else [self.low, self.high]
        return {"value": self.value, "interval": interval, "by": self.by}


def ratio(a: Sample, b: Sample, *, paired: bool = False) -> Ratio:
    """Typical time of `a` over that of `b`.

    `paired`: the two ran in turns, so that repeat i of one belongs to repeat i of the other and what slowed
    both cancels. Otherwise by Welch's t test, for which the two may spread differently. By repeats it is the ratio
    of geometric means of the repeats' medians; by steps, that of medians.

    Raises:
        ValueError: paired samples with different numbers of repeats, or a time that is not positive.

    """
    if min(*a.values, *b.values) <= 0:
        raise ValueError("a time that is not positive has no ratio")
    if paired:
        ones, others = _medians(a), _medians(b)
        logs = [math.log(one / other) for one, other in zip(ones, others, strict=True)]
        if len(logs) < _ENOUGH_REPEATS:
            return Ratio(math.exp(math.fsum(logs) / len(logs)), None, None, "pairs")
        middle, half = _mean_and_half(logs)
        return _ratio(middle, half, half, "pairs")
    one_logs, other_logs = _repeat_logs(a), _repeat_logs(b)
    if one_logs is not None and other_logs is not None:
        return _ratio(*_welch(one_logs, other_logs), "repeats")
    middle = math.log(a.median / b.median)
    if (ours := a.interval) is None or (theirs := b.interval) is None:
        return Ratio(math.exp(middle), None, None, "steps")
    # Two intervals combined: Zou and Donner 2008, "Construction of confidence limits about effect measures".
    below = math.hypot(math.log(a.median / ours.low), math.log(theirs.high / b.median))
    above = math.hypot(math.log(ours.high / a.median), math.log(b.median / theirs.low))
    return _ratio(middle, below, above, "steps")


def _ratio(middle: float, below: float, above: float, by: str) -> Ratio:
    return Ratio(math.exp(middle), math.exp(middle - below), math.exp(middle + above), by)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of all lie, between neighbours in proportion (numpy's "linear")."""
    if not values:
        raise ValueError("a sample without values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _medians(sample: Sample) -> list[float]:
    return [quantile(repeat, 0.5) for repeat in sample.repeats]


def _repeat_logs(sample: Sample) -> list[float] | None:
    """Logarithms of the repeats' medians, where they are what an interval goes by."""
    medians = _medians(sample)
    alone = len(medians) == len(sample.values)  # one value a repeat: nothing but repeats
    if len(medians) < (2 if alone else _ENOUGH_REPEATS) or min(medians) <= 0:
        return None
    return [math.log(median) for median in medians]


def _mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    """The mean and the variance of that mean."""
    count = len(values)
    mean = math.fsum(values) / count
    return mean, math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count


def _mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half of its interval."""
    mean, variance = _mean_and_variance(values)
    return mean, t_quantile(len(values) - 1) * math.sqrt(variance)


def _welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """The difference of two means, and its interval below and above; degrees of freedom by Satterthwaite 1946."""
    (mean_a, variance_a), (mean_b, variance_b) = _mean_and_variance(a), _mean_and_variance(b)
    both = variance_a + variance_b
    half = 0.0
    if both:
        freedom = both**2 / (variance_a**2 / (len(a) - 1) + variance_b**2 / (len(b) - 1))
        half = t_quantile(freedom) * math.sqrt(both)
    return mean_a - mean_b, half, half


@cache
def _median_ranks(count: int) -> tuple[int, int] | None:
    """Which of `count` ordered values enclose the median with at least 95%: so many lie below it by coin tosses."""
    tail, low = 0.0, -1
    for below in range(count):
        choices = math.lgamma(count + 1) - math.lgamma(below + 1) - math.lgamma(count - below + 1)
        tail += math.exp(choices - count * math.log(2))
        if tail > (1 - _CONFIDENCE) / 2:
            break
        low = below
    return None if low < 0 else (low, count - 1 - low)


def t_tails(t: float, freedom: float) -> float:
    """How likely Student's t is at least so far from zero: both tails together hold I_x(freedom / 2, 1 / 2)."""
    return _incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5) if t else 1.0


@cache
def t_quantile(freedom: float) -> float:
    """Student's t with so many degrees of freedom (1 or more, fractions too): |t| exceeds it in 5 of 100 cases."""
    constant = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)
    found = 1.9  # less than the normal distribution's 1.96
    while True:
        # The tails fall ever less steeply, so Newton's steps never go too far.
        tails = t_tails(found, freedom)
        density = constant * math.exp(-(freedom + 1) / 2 * math.log1p(found * found / freedom))
        step = (tails - (1 - _CONFIDENCE)) / (2 * density)
        found += step
        if step < 1e-9 * found:
            return found


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b) for 0 < x < 1: DLMF 8.17.22, with the symmetry 8.17.4."""
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x) - math.log(a)
    )
    # The continued fraction, from its far end; so many terms are more than double precision needs.
    tail = 0.0
    for term in range(200, 0, -1):
        m = term // 2
        if term % 2:
            step = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            step = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        tail = step / (1 + tail)
    return front / (1 + tail)
