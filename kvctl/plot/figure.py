"""Plain figures for a web page: lines, steps and dots over two axes, several under one another over the same x."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from kvctl.plot.axes import Axis, from_zero, step
from kvctl.plot.picture import Dot, Label, Line, Page, Point, text_width
from kvctl.record import Record
from kvctl.units import format_seconds
from kvctl.words import shortened

WIDE, NARROW = 960, 470
"""Of pages: across a screen, and two beside each other there."""
_TEXT, _LINE, _EDGE = 12, 16, 10
_NARROW_SPREAD = 4


class Series(Record):
    """What is drawn in one colour; points are in order of x."""

    name: str
    points: tuple[Point, ...]
    ink: str
    steps: bool = False
    """A value holds until the next one."""
    dots: tuple[tuple[Point, str], ...] = ()
    """Points that are marked, with what a browser says under the pointer."""
    width: float = 2


class Mark(Record):
    """A line across the figure at an x, and what it says."""

    x: float
    title: str
    ink: str
    width: float = 1.5
    name: str = ""
    """Beside it, above the figure."""
    short: bool = False
    """Only at the upper edge: what is there so often that it would hide the rest."""


class Figure(Record):
    """One figure."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    x_label: str = ""
    y_label: str = ""
    marks: tuple[Mark, ...] = ()
    levels: tuple[tuple[float, str], ...] = ()
    """Dashed lines at values of y, and what they are."""
    labels: tuple[tuple[Point, str], ...] = ()
    """Names beside points, where there is room."""
    width: int = NARROW
    height: int = 230
    """Of the area that is drawn on."""


def number_axis(high: float, most: int) -> Axis:
    """From 0, in plain numbers."""
    return from_zero((high or 1) * 1.06, "", 1, most)


def seconds_axis(high: float, most: int) -> Axis:
    """Seconds from 0, in µs, ms or s."""
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if high >= 2 * size), ("µs", 1e-6))
    return from_zero((high or size) * 1.06, unit, size, most)


def spread_axis(low: float, high: float, most: int) -> Axis:
    """Seconds on a logarithmic scale, with ticks at 1, 2 and 5 times powers of ten, or at fewer of them; on an even one where they are close together."""
    low, high = low / 1.05, high * 1.05
    if high < _NARROW_SPREAD * low:
        each = step((high - low), most)
        first = math.ceil(low / each)
        even = [number * each for number in range(first, int(high / each) + 1)]
        return Axis(low, high, False, tuple((value, format_seconds(value)) for value in even))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)):
        values = [factor * 10.0**power for power in powers for factor in factors]
        values = [value for value in values if low <= value <= high]
        if len(values) <= most:
            break
    values = values or [math.sqrt(low * high)]
    every = math.ceil(len(values) / most)
    return Axis(low, high, True, tuple((value, format_seconds(value)) for value in values[::every]))


def share_axis() -> Axis:
    """From 0 to 100%."""
    return Axis(0, 1, False, tuple((part / 4, f"{part * 25}%") for part in range(5)))


def page(figures: Sequence[Figure]) -> Page:
    """Figures under one another, edges in line; those above the last leave the labels of x to it."""
    left = 16 + max(text_width(label, _TEXT) for figure in figures for _, label in figure.y.ticks)
    pages, top = [], 0
    for number, figure in enumerate(figures):
        pages.append(_Layout(figure, left, top, last=number == len(figures) - 1).page())
        top = pages[-1].height
    return Page(
        figures[0].width, top, tuple(line for one in pages for line in one.lines), tuple(dot for one in pages for dot in one.dots),
        tuple(label for one in pages for label in one.labels),
    )  # fmt: skip


class _Layout:
    def __init__(self, figure: Figure, left: float, above: int, *, last: bool) -> None:
        self.figure, self.left, self.above, self.last = figure, left, above, last
        self.right = figure.width - _EDGE - 8
        self.lines: list[Line] = []
        self.dots: list[Dot] = []
        self.labels: list[Label] = []
        self.taken: list[tuple[float, float, float, float]] = []

    def page(self) -> Page:
        """With its bottom as the height."""
        figure = self.figure
        y = self.above + 20.0
        title = shortened(figure.title, int(figure.width / (_TEXT * 0.68)))
        self.labels.append(Label((_EDGE, y), title, size=13, bold=True, kind="title", title=figure.title))
        y = self._legend(y + _LINE + 2)
        if any(mark.name for mark in figure.marks):
            y += _LINE
        self.top, self.bottom = y, y + figure.height
        self._grid()
        self._marks()
        for series in figure.series:
            self._series(series)
        self._names()
        return Page(
            figure.width,
            math.ceil(self.bottom + (44 if self.last else 8)),
            tuple(self.lines),
            tuple(self.dots),
            tuple(self.labels),
        )

    def at(self, point: Point) -> Point:
        shares = (
            min(max(axis.share(min(max(value, axis.low), axis.high)), 0.0), 1.0)
            for axis, value in zip((self.figure.x, self.figure.y), point, strict=True)
        )
        x, y = shares
        return self.left + x * (self.right - self.left), self.bottom - y * (self.bottom - self.top)

    def _legend(self, y: float) -> float:
        """What is along y, and each series in its colour; gives where the figure begins."""
        x = float(_EDGE)
        label = self.figure.y_label + (f" ({self.figure.y.unit})" if self.figure.y.unit else "")
        if label:
            self.labels.append(Label((x, y), label, "muted", kind="y-label"))
            x += text_width(label, _TEXT) + 16
        for series in self.figure.series:
            if not series.name:
                continue
            name = shortened(series.name, 40)
            width = text_width(name, _TEXT) + 30
            if x + width > self.right and x > _EDGE:
                x, y = float(_EDGE), y + _LINE
            self.lines.append(Line(((x, y - 4), (x + 14, y - 4)), series.ink, 3, kind="key"))
            self.labels.append(Label((x + 19, y), name, "text", kind="name", title=series.name))
            x += width
        return y + 12

    def _grid(self) -> None:
        figure = self.figure
        for value, label in figure.y.ticks:
            _, y = self.at((figure.x.low, value))
            ink = "axis" if value == figure.y.low else "grid"
            self.lines.append(Line(((self.left, y), (self.right, y)), ink, kind="grid"))
            self.labels.append(Label((self.left - 6, y + 4), label, "muted", anchor="end", kind="y-tick"))
        if figure.y.log:
            self.lines.append(Line(((self.left, self.bottom), (self.right, self.bottom)), "axis", kind="grid"))
        end = -math.inf
        for value, label in figure.x.ticks:
            x, _ = self.at((value, figure.y.low))
            self.lines.append(Line(((x, self.bottom), (x, self.bottom + 4)), "axis", kind="tick"))
            width = text_width(label, _TEXT)
            middle = min(x, figure.width - 4 - width / 2)
            if self.last and middle - width / 2 > end + 6:
                self.labels.append(Label((middle, self.bottom + 18), label, "muted", anchor="middle", kind="x-tick"))
                end = middle + width / 2
        if self.last and figure.x_label:
            label = figure.x_label + (f" ({figure.x.unit})" if figure.x.unit else "")
            middle = (self.left + self.right) / 2
            self.labels.append(Label((middle, self.bottom + 36), label, "muted", anchor="middle", kind="x-label"))
        for value, name in figure.levels:
            _, y = self.at((figure.x.low, value))
            self.lines.append(Line(((self.left, y), (self.right, y)), "limit", 1, (5, 4, 0), "level", name))

    def _marks(self) -> None:
        end = -math.inf
        for mark in self.figure.marks:
            x, _ = self.at((mark.x, self.figure.y.low))
            dash = (3, 3, 0) if mark.name else None
            foot = self.top + 14 if mark.short else self.bottom
            self.lines.append(Line(((x, foot), (x, self.top)), mark.ink, mark.width, dash, "mark", mark.title))
            if mark.name and x + 2 > end and x + 4 + text_width(mark.name, _TEXT) <= self.right + 8:
                self.labels.append(Label((x + 2, self.top - 5), mark.name, "muted", kind="mark-name"))
                end = x + 12 + text_width(mark.name, _TEXT)

    def _series(self, series: Series) -> None:
        points = [self.at(point) for point in series.points]
        if series.steps:
            held = [(after[0], before[1]) for before, after in itertools.pairwise(points)]
            points = [part for pair in zip(points, held, strict=False) for part in pair] + points[-1:]
        if self.figure.labels:
            self.taken += [spot for ends in itertools.pairwise(points) for spot in _along(*ends)]
        if len(points) > 1:
            self.lines.append(Line(tuple(points), series.ink, series.width, kind="series", title=series.name))
        for point, title in series.dots:
            x, y = self.at(point)
            self.dots.append(Dot((x, y), 4, series.ink, "point", title))
            self.taken.append((x - 5, y - 5, x + 5, y + 5))

    def _names(self) -> None:
        for point, name in self.figure.labels:
            x, y = self.at(point)
            width = text_width(name, 11)
            for dx, dy in (
                (8, 4),
                (-8 - width, 4),
                (-width / 2, -9),
                (-width / 2, 18),
                (8, -8),
                (8, 16),
                (-8 - width, -8),
                (-width / 2, -18),
            ):
                box = (x + dx - 2, y + dy - 11, x + dx + width + 2, y + dy + 3)
                inside = (
                    box[0] >= self.left
                    and box[2] <= self.right + 8
                    and box[1] >= self.top - 6
                    and box[3] <= self.bottom
                )
                if inside and all(
                    box[0] >= b[2] or box[2] <= b[0] or box[1] >= b[3] or box[3] <= b[1] for b in self.taken
                ):
                    self.taken.append(box)
                    self.labels.append(Label((x + dx, y + dy), name, "muted", 11, kind="point-name"))
                    break


def _along(one: Point, other: Point) -> list[tuple[float, float, float, float]]:
    """Spots on a line, close enough together that no text fits between."""
    steps = max(1, int(math.hypot(other[0] - one[0], other[1] - one[1]) / 6))
    spots = [
        (one[0] + (other[0] - one[0]) * step / steps, one[1] + (other[1] - one[1]) * step / steps)
        for step in range(steps + 1)
    ]
    return [(x, y, x, y) for x, y in spots]
