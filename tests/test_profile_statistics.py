"""Middles, spreads, intervals and ratios of repeated measurements, against tables, hand calculations and simulation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from kvctl.measure.fits import fitted, lines_of
from kvctl.measure.report import CacheRow, MemoryUse, Point, ProfileReport
from kvctl.measure.statistics import Ratio, Sample, quantile, ratio, t_quantile


# Student's t, two-sided 95%: NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2, column 0.975; the last
# is the normal distribution's.
@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (6, 2.447), (7, 2.365), (8, 2.306), (9, 2.262),
     (10, 2.228), (20, 2.086), (29, 2.045), (60, 2.000), (100, 1.984), (10**7, 1.960)],
)  # fmt: skip
def test_student_t_is_the_published_table(freedom: int, t: float) -> None:
    assert t_quantile(freedom) == pytest.approx(t, abs=0.0006)


def test_student_t_between_whole_numbers() -> None:
    # By Simpson's rule: the density of t with 2.5 degrees of freedom has 95% within the quantile.
    freedom, steps = 2.5, 20_000
    end = t_quantile(freedom)
    constant = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    heights = [constant * (1 + (end * i / steps) ** 2 / freedom) ** (-(freedom + 1) / 2) for i in range(steps + 1)]
    area = end / steps / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1:-1:2]) + 2 * sum(heights[2:-1:2]))
    assert 2 * area == pytest.approx(0.95, abs=1e-9)


def test_a_sample_by_hand() -> None:
    sample = Sample((4.0, 1.0, 2.0, 3.0, 10.0))
    assert (sample.median, sample.mean) == (3.0, 4.0)
    # In order 1 2 3 4 10: quarters at places 1 and 3; 95% at place 3.8, four fifths from 4 to 10.
    assert (sample.iqr, sample.spread) == (2.0, 2 / 3)
    assert sample.p95 == pytest.approx(8.8)
    assert quantile([7.0], 0.95) == 7.0
    with pytest.raises(ValueError, match="without values"):
        quantile([], 0.5)


def test_an_interval_over_repeats_by_hand() -> None:
    # Logarithms 0, 1, 2: mean 1, standard error 1/√3; t with two degrees of freedom 4.3027.
    interval = Sample((1.0, math.e, math.e**2)).interval
    assert interval is not None
    assert interval.by == "repeats"
    assert math.log(interval.low) == pytest.approx(1 - 4.302653 / math.sqrt(3), abs=1e-5)
    assert math.log(interval.high) == pytest.approx(1 + 4.302653 / math.sqrt(3), abs=1e-5)


def test_steps_of_a_repeat_count_as_one() -> None:
    """A thousand equal steps in each of three repeats know no more than three numbers do."""
    repeats = (1.0, 1.1, 1.2)
    steps = Sample(tuple(value for value in repeats for _ in range(1000)), (1000,) * 3)
    assert steps.interval == Sample(repeats).interval
    # Half-width over the middle: (1.3803 - 0.8684) / 2 / 1.1, from logarithms 0, 0.09531, 0.18232.
    mean = (0.0953102 + 0.1823216) / 3
    variance = (mean**2 + (0.0953102 - mean) ** 2 + (0.1823216 - mean) ** 2) / 2
    half = 4.302653 * math.sqrt(variance / 3)
    assert steps.noise == pytest.approx((math.exp(mean + half) - math.exp(mean - half)) / 2 / 1.1, rel=1e-5)


@pytest.mark.parametrize(
    # Conover, Practical Nonparametric Statistics, sign-test intervals of a median: ranks that hold it with at least 95%.
    ("count", "ranks"),
    [(6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (10, (2, 9)), (20, (6, 15)), (100, (40, 61))],
)
def test_one_repeat_goes_by_its_steps_and_says_so(count: int, ranks: tuple[int, int]) -> None:
    interval = Sample(tuple(float(value) for value in range(1, count + 1)), (count,)).interval
    assert interval is not None
    assert (interval.low, interval.high, interval.by) == (*ranks, "steps")


def test_too_few_values_have_no_interval() -> None:
    assert Sample((1.0,)).interval is None
    assert Sample((1.0,)).noise is None
    assert Sample((1.0, 2.0, 3.0, 4.0, 5.0), (5,)).interval is None
    assert ratio(Sample((2.0,)), Sample((1.0,))).same is None
    assert ratio(Sample((2.0,)), Sample((1.0,)), paired=True).same is None
    assert ratio(Sample((2.0,)), Sample((1.0, 1.0, 1.0))).value == 2.0
    with pytest.raises(ValueError, match="not positive"):
        ratio(Sample((0.0, 1.0)), Sample((1.0, 1.0)))
    with pytest.raises(ValueError, match="groups"):
        _ = Sample((1.0, 2.0), (3,)).repeats


def test_equal_values_have_a_ratio_without_width() -> None:
    found = ratio(Sample((2.0, 2.0, 2.0)), Sample((4.0, 4.0, 4.0)))
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))


def test_welch_by_hand() -> None:
    # Logarithms 1, 2, 3 and 0, 2, 4: means equal, variances of the means 1/3 and 4/3, so √(5/3);
    # degrees of freedom (5/3)² / ((1/3)² / 2 + (4/3)² / 2) = 50/17, between t's 4.303 at 2 and 3.182 at 3.
    a, b = (Sample(tuple(math.exp(x) for x in logs)) for logs in ((1, 2, 3), (0, 2, 4)))
    found = ratio(a, b)
    assert found.value == pytest.approx(1)
    assert found.high is not None
    assert math.log(found.high) == pytest.approx(t_quantile(50 / 17) * math.sqrt(5 / 3))
    assert 3.182 < t_quantile(50 / 17) < 3.25


def test_pairs_take_out_what_slowed_both() -> None:
    drift = (1.0, 1.5, 0.7, 1.2)
    a = Sample(tuple(1.02 * d * e for d, e in zip(drift, (1.001, 0.999, 1.0, 1.0), strict=True)))
    b = Sample(drift)
    paired, apart = ratio(a, b, paired=True), ratio(a, b)
    assert paired.same is False
    assert paired.value == pytest.approx(1.02, rel=1e-3)
    assert apart.same is True
    with pytest.raises(ValueError, match="zip"):
        ratio(a, Sample((1.0, 1.0)), paired=True)


def test_a_ratio_of_single_repeats_goes_by_steps() -> None:
    # Both intervals reach from 1/1.2 to 1.2 of the median: together √2 times as far, in logarithms.
    values = (1 / 1.2, *(1.0,) * 4, 1.2)
    found = ratio(Sample(values, (6,)), Sample(values, (6,)))
    assert found.by == "steps"
    assert found.low is not None
    assert found.low == pytest.approx(1.2 ** -math.sqrt(2))


def test_a_noise_of_its_own_widens_a_ratio() -> None:
    # 1.1 within 1.1/1.03 … 1.1·1.04, and 5%: ln 1.03 = 0.029559, ln 1.04 = 0.039221, ln 1.05 = 0.048790;
    # √(0.029559² + 0.048790²) = 0.057045, √(0.039221² + 0.048790²) = 0.062599; 1.1·e^-0.057045 = 1.039007, 1.1·e^0.062599 = 1.171060.
    found = Ratio(1.1, 1.1 / 1.03, 1.1 * 1.04, "repeats").widened(0.05)
    assert (found.low, found.high) == (pytest.approx(1.039007, abs=1e-5), pytest.approx(1.171060, abs=1e-5))
    assert Ratio(1.1, None, None, "repeats").widened(0.05).low is None


def normal(rng: random.Random) -> float:
    return rng.gauss(1, 0.05)


def skewed(rng: random.Random) -> float:
    """Lognormal, and one in ten a third slower: a machine that does something else now and then."""
    return math.exp(rng.gauss(0, 0.05)) * (1.3 if rng.random() < 0.1 else 1)


@pytest.mark.parametrize(
    ("draw", "repeats", "least", "most"),
    [(normal, 3, 0.93, 0.97), (normal, 5, 0.93, 0.97), (normal, 10, 0.93, 0.97),
     (skewed, 3, 0.92, 1), (skewed, 5, 0.92, 1), (skewed, 10, 0.92, 1)],
)  # fmt: skip
def test_nominal_95_percent_cover_95_percent(
    draw: Callable[[random.Random], float], repeats: int, least: float, most: float
) -> None:
    # 2,000 trials: the standard error of a share of 95% is half a percent, and the bounds are four of those away.
    rng = random.Random(7)
    trials, inside, apart, pairs = 2000, 0, 0, 0
    for _ in range(trials):
        one = Sample(tuple(draw(rng) for _ in range(repeats)))
        other = Sample(tuple(draw(rng) for _ in range(repeats)))
        interval, difference, paired = one.interval, ratio(one, other), ratio(one, other, paired=True)
        assert interval is not None
        inside += interval.low <= 1 <= interval.high  # the median of both distributions, within 0.7%
        apart += bool(difference.same)
        pairs += bool(paired.same)
    assert least <= inside / trials <= most
    # Welch's test is known to be cautious with very few values (Satterthwaite's degrees of freedom).
    assert least <= apart / trials <= max(most, 0.98)
    assert least <= pairs / trials <= max(most, 0.98)


# -- lines -------------------------------------------------------------------------------


def test_a_straight_line_is_found_exactly() -> None:
    fit = fitted([512, 2048, 8192, 2**20], [1000 + 81_920 * x for x in (512, 2048, 8192, 2**20)], degree=1)
    assert fit is not None
    assert fit.coefficients == (1000, 81_920)
    assert (fit.slope_error, fit.residual) == (0, 0)


def test_the_noise_of_two_points_is_that_of_their_slope() -> None:
    # Through (100, 5) and (300, 9): slope 4/200; errors 0.3 and 0.4 make √(0.3² + 0.4²) = 0.5 in the difference.
    fit = fitted([100, 300], [5, 9], degree=1, errors=[0.3, 0.4])
    assert fit is not None
    assert fit.coefficients == pytest.approx((3, 0.02))
    assert fit.slope_error == pytest.approx(0.5 / 200)
    alone = fitted([100, 300], [5, 9], degree=1, errors=[0.3, None])
    assert alone is not None
    assert alone.slope_error is None


@pytest.mark.parametrize("relative", [False, True])
def test_the_noise_of_points_moves_a_slope_as_moved_points_do(relative: bool) -> None:
    """Against the slopes of points that are moved by their errors, at random."""
    numpy = pytest.importorskip("numpy")
    xs, ys, errors = [128, 512, 2048], [0.040, 0.042, 0.051], [0.0001, 0.0002, 0.0004]
    fit = fitted(xs, ys, degree=1, relative=relative, errors=errors)
    assert fit is not None
    weights = 1 / numpy.array(ys) if relative else None
    moved = numpy.random.default_rng(0).normal(ys, errors, (20_000, 3))
    slopes = [numpy.polyfit(xs, row, 1, w=weights)[0] for row in moved]
    assert fit.slope_error == pytest.approx(numpy.std(slopes), rel=0.03) or fit.slope_error > numpy.std(slopes)
    only_noise = fitted(xs, [fit.coefficients[0] + fit.coefficients[1] * x for x in xs], degree=1, errors=errors)
    assert only_noise is not None
    if not relative:
        assert only_noise.slope_error == pytest.approx(numpy.std(slopes), rel=0.03)


def test_a_line_by_hand() -> None:
    # Through (0, 1), (1, 1), (2, 4): slope 3/2, intercept 1/2; residuals 1/2, -1, 1/2, of squares 3/2;
    # the slope's standard error is √(3/2 / 1 / 2). The farthest point is off by 1 of 1.
    fit = fitted([0, 1, 2], [1, 1, 4], degree=1)
    assert fit is not None
    assert fit.coefficients == pytest.approx((0.5, 1.5))
    assert fit.slope_error == pytest.approx(math.sqrt(0.75))
    assert fit.residual == pytest.approx(1.0)


def test_a_curve_by_hand() -> None:
    xs = [512, 2048, 8192, 32768, 131072]
    fit = fitted(xs, [0.25 + 2**-10 * x + 2**-30 * x * x for x in xs], degree=2)
    assert fit is not None
    assert fit.coefficients == pytest.approx((0.25, 2**-10, 2**-30), rel=1e-12)


def test_one_context_has_no_line() -> None:
    assert fitted([512, 512], [1, 2], degree=1) is None
    assert fitted([512, 1024], [1, 2], degree=2) is None
    assert lines_of((point(512, 1),)) == ()


def test_relative_errors_weigh_alike() -> None:
    """A point of 100 s that is off by 1% must not bend the line away from one of 0.1 s."""
    fit = fitted([1, 10, 1000], [0.1, 1.0, 101.0], degree=1, relative=True)
    assert fit is not None
    assert fit.residual < 0.011


def point(context: int, batch: int, *, per_token: int = 80) -> Point:
    return Point(
        context=context, batch=batch, decode=4,
        ttft=Sample((0.5 + 0.001 * context,) * 3),
        tpot=Sample((0.01 + 0.00001 * context,) * 12, (4, 4, 4)),
        cache=(CacheRow("prefill", context, context * per_token * batch, context * per_token * batch, context * per_token * batch),
               CacheRow("decode", context + 4, 0, 0, (context + 4) * per_token * batch)),
        memory=MemoryUse("kernel", 10**9, 10**9 + 90 * batch * context, 2 * 10**9 + 100 * batch * context),
    )  # fmt: skip


def test_lines_of_a_report() -> None:
    points = tuple(point(context, batch) for batch in (1, 8) for context in (512, 2048, 8192))
    lines = {(line.what, line.batch): line for line in lines_of(points)}
    assert set(lines) == {
        (what, batch) for what in ("steady memory", "peak memory", "TTFT", "TPOT") for batch in (1, 8)
    }
    steady = lines["steady memory", 8]
    assert (steady.intercept, steady.slope, steady.predicted_slope, steady.points) == (10**9, 720, 640, 3)
    assert lines["peak memory", 1].slope == 100
    assert lines["TPOT", 1].slope == pytest.approx(1e-5)
    assert lines["TPOT", 1].intercept == pytest.approx(0.01)
    assert lines["TPOT", 1].predicted_slope is None
    assert lines["TTFT", 1].curve is None  # three contexts are too few for a square
    assert steady.at(4096) == 10**9 + 720 * 4096
    report = ProfileReport(None, "transformers", None, None, None, {}, {}, points, tuple(lines.values()))
    assert report.agrees is False


def test_four_contexts_give_prefill_its_square() -> None:
    points = tuple(
        point(n, 1).replace(ttft=Sample((0.5 + 0.001 * n + 1e-8 * n * n,))) for n in (512, 1024, 4096, 16384)
    )
    (line,) = [line for line in lines_of(points) if line.what == "TTFT"]
    assert line.curve == pytest.approx(1e-8, rel=1e-6)
    assert line.slope == pytest.approx(0.001, rel=1e-6)
    # Where parts are missing the rest is fitted all the same.
    assert {line.what for line in lines_of(tuple(p.replace(memory=None, tpot=None) for p in points))} == {"TTFT"}
