"""Lines through measured points: what a token more costs in memory and in time, beside what is predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

from kvctl.measure.report import Line, Point
from kvctl.measure.statistics import Sample
from kvctl.record import Record

_ENOUGH_FOR_A_SQUARE = 4
"""Contexts. Three would be met exactly whatever they are."""


class Fitted(Record):
    """A polynomial of least squares."""

    coefficients: tuple[float, ...]
    """Of 1, x, x², …"""
    slope_error: float | None
    """Standard error of the coefficient of x: by how far points lie off, or by the errors of the points, whichever is
    larger; None where neither says anything."""
    residual: float
    """The largest distance of a point, over that point's value."""


def fitted(
    xs: Sequence[int], ys: Sequence[float | Fraction], *, degree: int, relative: bool = False,
    errors: Sequence[float | None] = (),
) -> Fitted | None:  # fmt: skip
    """The polynomial nearest to some points; None for fewer different xs than it takes.

    `relative`: errors are in proportion to values, as those of times are, so squares of relative distances are least.
    `errors`: standard errors of the ys, where they are known.
    """
    if len(set(xs)) <= degree:
        return None
    # In fractions: contexts to the fourth power leave nothing of a float's 53 bits.
    exact = [Fraction(y) for y in ys]
    relative = relative and all(exact)
    weights = [1 / y**2 if relative else Fraction(1) for y in exact]
    size = degree + 1
    moments = [
        sum((w * x**power for w, x in zip(weights, xs, strict=True)), Fraction()) for power in range(2 * size - 1)
    ]
    rows = [
        [*(moments[row + column] for column in range(size)),
         sum((w * x**row * y for w, x, y in zip(weights, xs, exact, strict=True)), Fraction()),
         Fraction(int(row == 1))]
        for row in range(size)
    ]  # fmt: skip
    _solve(rows)
    coefficients = [row[size] for row in rows]
    misses = [
        abs(y - sum(c * x**power for power, c in enumerate(coefficients))) for x, y in zip(xs, exact, strict=True)
    ]
    inverse = [row[size + 1] for row in rows]  # the column of the slope, of a symmetric matrix
    said = []
    if len(xs) > size:
        variance = sum((w * miss**2 for w, miss in zip(weights, misses, strict=True)), Fraction()) / (len(xs) - size)
        said.append(math.sqrt(variance * inverse[1]))
    known = [error for error in errors if error is not None]
    if known and len(known) == len(xs):
        pulls = [w * sum(c * x**power for power, c in enumerate(inverse)) for w, x in zip(weights, xs, strict=True)]
        said.append(math.hypot(*(float(pull) * error for pull, error in zip(pulls, known, strict=True))))
    residual = max((float(miss / abs(y)) for miss, y in zip(misses, exact, strict=True) if y), default=0.0)
    return Fitted(tuple(map(float, coefficients)), max(said, default=None), residual)


def _solve(rows: list[list[Fraction]]) -> None:
    """Gauss and Jordan's elimination: the square part becomes the identity. It is positive definite: no pivot is 0."""
    for column in range(len(rows)):
        pivot = rows[column][column]
        rows[column] = [value / pivot for value in rows[column]]
        for other in range(len(rows)):
            if other != column:
                factor = rows[other][column]
                rows[other] = [value - factor * own for value, own in zip(rows[other], rows[column], strict=True)]


def lines_of(points: Sequence[Point]) -> tuple[Line, ...]:
    """For each batch with at least two contexts: steady and peak memory, TTFT and TPOT over the context.

    Steady memory is held after decoding: a constant number of tokens more than the context, the same for every point.
    """
    lines = []
    for batch in dict.fromkeys(point.batch for point in points):
        of_batch = [point for point in points if point.batch == batch]
        predicted = _predicted_slope(of_batch)
        for what, value in _MEMORY.items():
            known = [(point.context, found) for point in of_batch if (found := value(point)) is not None]
            lines.append(_line(what, batch, known, predicted=predicted))
        for what, sample in _TIMES.items():
            timed = [(point.context, times) for point in of_batch if (times := sample(point)) is not None]
            lines.append(_time_line(what, batch, timed))
    return tuple(line for line in lines if line is not None)


_Value = Callable[[Point], "float | None"]

_MEMORY: dict[str, _Value] = {
    "steady memory": lambda point: None if point.memory is None else point.memory.steady_bytes,
    "peak memory": lambda point: None if point.memory is None else point.memory.peak_bytes,
}
_TIMES: dict[str, Callable[[Point], Sample | None]] = {
    "TTFT": lambda point: point.ttft,
    "TPOT": lambda point: point.tpot,
}
_HALF_INTERVAL = 1.96
"""Standard errors in half of a 95% interval."""


def _time_line(what: str, batch: int, samples: Sequence[tuple[int, Sample]]) -> Line | None:
    errors = [None if sample.noise is None else sample.noise * sample.median / _HALF_INTERVAL for _, sample in samples]
    medians = [(context, sample.median) for context, sample in samples]
    return _line(what, batch, medians, relative=True, square=what == "TTFT", errors=errors)


def _line(
    what: str, batch: int, found: Sequence[tuple[int, float]], *, relative: bool = False, square: bool = False,
    predicted: float | None = None, errors: Sequence[float | None] = (),
) -> Line | None:  # fmt: skip
    contexts = [context for context, _ in found]
    degree = 2 if square and len(set(contexts)) >= _ENOUGH_FOR_A_SQUARE else 1
    fit = fitted(contexts, [value for _, value in found], degree=degree, relative=relative, errors=errors)
    if fit is None:
        return None
    intercept, slope, *rest = fit.coefficients
    return Line(what, batch, intercept, slope, predicted, fit.residual, len(found), curve=rest[0] if rest else None,
                slope_error=fit.slope_error)  # fmt: skip


def _predicted_slope(points: Sequence[Point]) -> float | None:
    """Bytes that one more token of every sequence takes by prediction, over the same contexts; exact for a straight line.

    A full window bends the prediction, and the measured line through the same contexts likewise. Memory is that of one
    process, so the cache is that of the first rank.
    """
    found = [(point.context, sum(row.predicted_bytes for row in point.held if row.rank == 0))
             for point in points if point.held]  # fmt: skip
    fit = fitted([context for context, _ in found], [size for _, size in found], degree=1)
    return None if fit is None else fit.coefficients[1]
