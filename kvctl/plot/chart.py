"""What is plotted: curves of memory or time against context, the limits they meet, and where they meet."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.units import format_bytes, format_seconds, plural
from kvctl.words import one_line, shortened

MOST_CURVES = 8
"""As many as can be told apart, in colour and in name."""


class Mark(Record):
    """A measured value, and the ends of its error bar where they are known."""

    context: int
    value: int
    low: int | None = None
    high: int | None = None


class Curve(Record):
    """A model or format: (context in tokens, bytes or nanoseconds), contexts ascending.

    A point at the largest context that fits and one a token further make its annotation exact.
    """

    name: str
    points: tuple[tuple[int, int], ...]
    """Of the line; none where only marks are to be drawn."""
    measured: tuple[Mark, ...] = ()
    """Rings in the line's colour, contexts ascending; the line is then what was predicted or fitted."""
    line: str = ""
    """What the line is beside measured marks: predicted, fitted."""
    facts: tuple[str, ...] = ()
    """More to say beside it."""

    @property
    def ends(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The first and the last point, of the line if there is one."""
        points = self.points or tuple((mark.context, mark.value) for mark in self.measured)
        return points[0], points[-1]


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
    quantity: str = "memory"
    """memory (in bytes), or time (in nanoseconds; such a chart has no limits)."""
    below: Chart | None = None
    """Another panel under this one, over the same contexts; it has none below."""

    @property
    def panels(self) -> tuple[Chart, ...]:
        """This one and the one below."""
        return (self,) if self.below is None else (self, self.below)

    @property
    def contexts(self) -> list[int]:
        """All at which something is drawn, in this panel and below."""
        lines = [context for panel in self.panels for curve in panel.curves for context, _ in curve.points]
        return lines + [mark.context for panel in self.panels for curve in panel.curves for mark in curve.measured]

    @property
    def values(self) -> list[int]:
        """All that the scale of this panel has to hold."""
        marks = [mark for curve in self.curves for mark in curve.measured]
        tops = [max(mark.value, mark.high or 0) for mark in marks]
        return [size for curve in self.curves for _, size in curve.points] + tops

    def amount(self, value: int) -> str:
        """A value in words: 1.50 GiB, or 12.3 ms."""
        return format_bytes(value) if self.quantity == "memory" else format_seconds(value / 1e9)


class Crossing(Record):
    """Where a curve leaves a limit: it fits up to `tokens`; not exact means read off between two points."""

    tokens: int
    exact: bool


def checked(chart: Chart) -> Chart:
    """The chart with its texts as plain lines; refused when there is nothing to draw or too much."""
    if not any(curve.points or curve.measured for curve in chart.curves):
        raise UsageError("nothing to plot", hint="name a model and contexts, for example --ctx 4k,32k,128k")
    curves = tuple(
        curve.replace(name=one_line(curve.name), facts=tuple(map(one_line, curve.facts)))
        for curve in chart.curves
        if curve.points or curve.measured
    )
    if len(curves) > MOST_CURVES:
        raise UsageError(
            f"{len(curves)} curves are too many for one picture; it holds {MOST_CURVES}",
            hint="plot fewer models, engines or formats at a time",
        )
    for curve in curves:
        marks = tuple((mark.context, mark.value) for mark in curve.measured)
        bars = ((mark.low or 0, mark.high or 0) for mark in curve.measured)
        if any([x for x, _ in points] != sorted({x for x, _ in points}) for points in (curve.points, marks)) or any(
            min(point) < 0 for point in (*curve.points, *marks, *bars)
        ):
            raise ValueError(f"{curve.name}: contexts must ascend and nothing be negative")
    if chart.quantity != "memory" and chart.limits:
        raise ValueError("only memory has limits")
    below = None if chart.below is None else checked(chart.below.replace(below=None))
    texts = {name: one_line(getattr(chart, name)) for name in ("title", "subtitle", "note", "x_label", "y_label")}
    limits = tuple(limit.replace(name=one_line(limit.name)) for limit in chart.limits)
    return chart.replace(curves=curves, limits=limits, below=below, **texts)


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
    (first, least), (last, _) = curve.ends
    if least > limit.bytes:
        return "does not fit" if first == last else f"does not fit even at {plural(first, 'token')}"
    found = crossing(curve, limit)
    if found is None:
        return "fits" if first == last else "fits throughout"
    return f"fits up to {tokens_words(found)} token{'' if found.tokens == 1 else 's'}"


def tokens_words(found: Crossing) -> str:
    """96,256 or, read off between two points, "about 96,200"."""
    return f"{'' if found.exact else 'about '}{found.tokens:,}"


def largest(curve: Curve) -> tuple[int, int]:
    """The last context and its value: the measured one where there is one."""
    return (curve.measured[-1].context, curve.measured[-1].value) if curve.measured else curve.points[-1]


def curve_facts(curve: Curve, chart: Chart) -> list[str]:
    """What stands beside a curve: its end, what each limit says of it, and its own facts."""
    context, size = largest(curve)
    facts = [f"{chart.amount(size)} at {plural(context, 'token')}"]
    for limit in chart.limits:
        prefix = f"{shortened(limit.name, 24)}: " if len(chart.limits) > 1 else ""
        facts.append(prefix + fit_words(curve, limit))
    return [*facts, *curve.facts]


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
    if not a.points or not b.points:
        return False
    low, high = (max(a.points[0][0], b.points[0][0]), min(a.points[-1][0], b.points[-1][0]))
    if low > high or (low == high and not len(a.points) == len(b.points) == 1):
        return False
    shared = [context for context, _ in (*a.points, *b.points) if low <= context <= high]
    pairs = ((bytes_at(a, context), bytes_at(b, context)) for context in shared)
    return all(abs(one - other) <= 0.005 * max(one, other) for one, other in pairs)
