"""What is plotted: curves of memory against context, the limits they meet, and where they meet."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.units import format_bytes, plural
from kvctl.words import one_line

MOST_CURVES = 8
"""As many as can be told apart, in colour and in name."""


class Curve(Record):
    """A model or format: (context in tokens, bytes), contexts ascending.

    A point at the largest context that fits and one a token further make its annotation exact.
    """

    name: str
    points: tuple[tuple[int, int], ...]


class Limit(Record):
    """What a GPU or several hold; the drawing adds the size to the name."""

    name: str
    bytes: int


class Chart(Record):
    """One picture. `note` is the source line: engine, version, kvctl's version, estimated or not."""

    title: str
    curves: tuple[Curve, ...]
    limits: tuple[Limit, ...] = ()
    subtitle: str = ""
    note: str = ""
    x_label: str = "context (tokens)"
    y_label: str = "memory"  # the drawing adds the unit


class Crossing(Record):
    """Where a curve leaves a limit: it fits up to `tokens`; not exact means read off between two points."""

    tokens: int
    exact: bool


def checked(chart: Chart) -> Chart:
    """The chart with its texts as plain lines; refused when there is nothing to draw or too much."""
    if not any(curve.points for curve in chart.curves):
        raise UsageError("nothing to plot", hint="name a model and contexts, for example --ctx 4k,32k,128k")
    curves = tuple(curve.replace(name=one_line(curve.name)) for curve in chart.curves if curve.points)
    if len(curves) > MOST_CURVES:
        raise UsageError(
            f"{len(curves)} curves are too many for one picture; it holds {MOST_CURVES}",
            hint="plot fewer models, engines or formats at a time",
        )
    for curve in curves:
        contexts = [context for context, _ in curve.points]
        if contexts != sorted(set(contexts)) or min(min(point) for point in curve.points) < 0:
            raise ValueError(f"{curve.name}: contexts must ascend and nothing be negative")
    texts = {name: one_line(getattr(chart, name)) for name in ("title", "subtitle", "note", "x_label", "y_label")}
    limits = tuple(limit.replace(name=one_line(limit.name)) for limit in chart.limits)
    return chart.replace(curves=curves, limits=limits, **texts)


def bytes_at(curve: Curve, context: float) -> float:
    """Bytes on the straight line between the two nearest points; `context` is inside the curve."""
    points = curve.points
    after = bisect_right(points, context, key=lambda point: point[0])
    if after == len(points):
        return points[-1][1]
    (c0, b0), (c1, b1) = points[max(0, after - 1)], points[after]
    return b0 + (b1 - b0) * (context - c0) / (c1 - c0)


def crossing(curve: Curve, limit: Limit) -> Crossing | None:
    """The last context that fits before the first that does not; None when all fit or none does."""
    for (c0, b0), (c1, b1) in zip(curve.points, curve.points[1:], strict=False):
        if b0 <= limit.bytes < b1:
            if c1 == c0 + 1:
                return Crossing(c0, True)
            between = c0 + (c1 - c0) * (limit.bytes - b0) // (b1 - b0)
            # Three digits are as much as a straight line knows, but c0 is known to fit.
            unit = 10 ** max(0, len(str(between)) - 3)
            return Crossing(max(c0, between // unit * unit), False)
    return None


def fit_words(curve: Curve, limit: Limit) -> str:
    """ "fits up to 96,256 tokens", "fits up to about 96,200 tokens", "does not fit"."""
    if curve.points[0][1] > limit.bytes:
        return (
            "does not fit" if len(curve.points) == 1 else f"does not fit even at {plural(curve.points[0][0], 'token')}"
        )
    found = crossing(curve, limit)
    if found is None:
        return "fits" if len(curve.points) == 1 else "fits throughout"
    return f"fits up to {tokens_words(found)} token{'' if found.tokens == 1 else 's'}"


def tokens_words(found: Crossing) -> str:
    """96,256 or, read off between two points, "about 96,200"."""
    return f"{'' if found.exact else 'about '}{found.tokens:,}"


def curve_facts(curve: Curve, limits: Sequence[Limit]) -> list[str]:
    """What stands beside a curve: its end, and what each limit says of it."""
    context, size = curve.points[-1]
    facts = [f"{format_bytes(size)} at {plural(context, 'token')}"]
    for limit in limits:
        prefix = f"{shortened(limit.name, 24)}: " if len(limits) > 1 else ""
        facts.append(prefix + fit_words(curve, limit))
    return facts


def limit_words(limit: Limit) -> str:
    """ "2 x H100 80GB: 158.4 GiB"."""
    size = format_bytes(limit.bytes)
    return f"{shortened(limit.name, 40)}: {size}" if limit.name else size


def alike(curves: Sequence[Curve]) -> list[list[int]]:
    """Indexes of curves that lie on top of one another, in groups; most have one member."""
    groups: list[list[int]] = []
    for index, curve in enumerate(curves):
        home = next((group for group in groups if _one_line(curves[group[0]], curve)), None)
        if home is None:
            groups.append([index])
        else:
            home.append(index)
    return groups


def _one_line(a: Curve, b: Curve) -> bool:
    """Whether two curves are nowhere half a percent apart: nobody sees two."""
    low, high = (max(a.points[0][0], b.points[0][0]), min(a.points[-1][0], b.points[-1][0]))
    if low > high or (low == high and not len(a.points) == len(b.points) == 1):
        return False
    shared = [context for context, _ in (*a.points, *b.points) if low <= context <= high]
    pairs = ((bytes_at(a, context), bytes_at(b, context)) for context in shared)
    return all(abs(one - other) <= 0.005 * max(one, other) for one, other in pairs)


def shortened(text: str, length: int) -> str:
    """A long name without its middle: both ends tell models apart."""
    if len(text) <= length:
        return text
    tail = (length - 1) // 2
    return text[: length - 1 - tail] + "…" + text[len(text) - tail :]
