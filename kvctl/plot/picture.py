"""A chart laid out as lines, dots and texts on a page; SVG and PNG draw the same page.

Every curve is named at its right, beside its end, so that nobody has to match colours
to a legend. Lengths are pixels, y runs down.
"""

from __future__ import annotations

import itertools
import math
import textwrap
import unicodedata
from collections.abc import Sequence

from kvctl.plot.axes import Axis, context_axis, value_axis
from kvctl.plot.chart import (
    Chart,
    Curve,
    Mark,
    alike,
    bytes_at,
    crossing,
    curve_facts,
    fit_words,
    limit_words,
    tokens_words,
)
from kvctl.record import Record
from kvctl.units import plural
from kvctl.words import shortened

Point = tuple[float, float]

_WIDTH = 960
_PLOT_WIDTH, _PLOT_HEIGHT = 560, 360  # at least; names beside may take more of the page
_NAME_LENGTH = 36
_DASH = 7  # of curves that lie on one another
_FEW = 4  # crossings that get a line down to their context
_HEAD_SIZE, _TEXT_SIZE = 18, 12
_BELOW_HEAD_SIZE = 15
_LINE = 16  # from one line of text to the next


class Line(Record):
    """A path. `ink` names a colour: see kvctl.plot.colours. `dash` is (on, off, offset)."""

    points: tuple[Point, ...]
    ink: str
    width: float = 1
    dash: tuple[float, float, float] | None = None
    kind: str = ""
    title: str = ""


class Dot(Record):
    """A round mark with a text that a browser shows under the pointer."""

    at: Point
    radius: float
    ink: str
    kind: str
    title: str = ""


class Label(Record):
    """A line of text; `at` is on its baseline at the side that `anchor` names."""

    at: Point
    text: str
    ink: str = "text"
    size: float = _TEXT_SIZE
    anchor: str = "start"
    bold: bool = False
    kind: str = ""
    title: str = ""

    @property
    def box(self) -> tuple[float, float, float, float] | None:
        """Left, top, width and height of the patch that keeps it readable over curves, if it may lie on one."""
        if self.kind not in ("crossing-label", "limit-label"):
            return None
        width = text_width(self.text, self.size)
        left = self.at[0] - (width if self.anchor == "end" else 0)
        return left - 2, self.at[1] - self.size, width + 4, self.size + 4


class Page(Record):
    """What to draw, in that order."""

    width: int
    height: int
    lines: tuple[Line, ...]
    dots: tuple[Dot, ...]
    labels: tuple[Label, ...]


def text_width(text: str, size: float) -> float:
    """About as wide as DejaVu Sans, the widest of the usual fonts, sets it."""
    em = sum(1.0 if unicodedata.east_asian_width(char) in "WF" else 0.62 for char in text)
    return em * size


def _fitted(text: str, size: float, room: float) -> str:
    """A text without as much of its middle as it takes."""
    length = len(text)
    while text_width(short := shortened(text, length), size) > room:
        length -= 1
    return short


def page(chart: Chart) -> Page:
    """Lay out a checked chart; panels stand under one another with their edges in line."""
    layouts = [_Layout(panel, size) for panel, size in zip(chart.panels, (_HEAD_SIZE, _BELOW_HEAD_SIZE), strict=False)]
    left, beside = max(layout.left for layout in layouts), max(layout.beside for layout in layouts)
    pages = [layout.page(left, beside, chart.contexts) for layout in layouts]
    if len(pages) == 1:
        return pages[0]
    return _under(*pages)


def _under(first: Page, second: Page) -> Page:
    """Two pages of one width as one."""

    def moved(point: Point) -> Point:
        return point[0], point[1] + first.height

    return Page(
        first.width,
        first.height + second.height,
        first.lines + tuple(line.replace(points=tuple(map(moved, line.points))) for line in second.lines),
        first.dots + tuple(dot.replace(at=moved(dot.at)) for dot in second.dots),
        first.labels + tuple(label.replace(at=moved(label.at)) for label in second.labels),
    )


class _Layout:
    def __init__(self, chart: Chart, head_size: int) -> None:
        self.chart, self.head_size = chart, head_size
        self.facts = [curve_facts(curve, chart) for curve in chart.curves]
        self.names = [shortened(curve.name, _NAME_LENGTH) for curve in chart.curves]
        self.y = value_axis(chart, 6)
        # The labels of values decide the left edge, the curves' names the right one.
        self.left = 24 + max(text_width(label, _TEXT_SIZE) for _, label in self.y.ticks)
        self.beside = max(text_width(text, _TEXT_SIZE) for text in itertools.chain(self.names, *self.facts))
        self.top = 92 if chart.subtitle else 72
        self.bottom = self.top + max(_PLOT_HEIGHT, sum(self._block(index) for index in range(len(chart.curves))))
        self.lines: list[Line] = []
        self.dots: list[Dot] = []
        self.labels: list[Label] = []
        # What no text may cover: boxes as left, top, right, bottom.
        self.taken: list[tuple[float, float, float, float]] = []
        self.met = [
            (index, limit, found)
            for limit in chart.limits
            for index, curve in enumerate(chart.curves)
            if (found := crossing(curve, limit)) is not None
        ]

    def page(self, left: float, beside: float, contexts: Sequence[int]) -> Page:
        """The page with the plot's left edge, the room beside it, and the contexts of its axis."""
        self.left = left
        self.width = max(_WIDTH, math.ceil(left + _PLOT_WIDTH + 44 + beside))
        self.right = self.width - 44 - beside
        self.x = context_axis(contexts, int((self.right - left) / 52))
        height = self._words()
        self._axes()
        self._curves()
        self._limits()
        self._crossings()
        self._names()
        return Page(self.width, height, tuple(self.lines), tuple(self.dots), tuple(self.labels))

    def at(self, context: float, size: float) -> Point:
        return (
            self.left + self.x.share(context) * (self.right - self.left),
            self.bottom - self.y.share(size) * (self.bottom - self.top),
        )

    def _words(self) -> int:
        """Title, subtitle and source; gives the height of the page."""
        chart = self.chart
        title = _fitted(chart.title, self.head_size, self.width - 48)
        self.labels.append(Label((24, 34), title, size=self.head_size, bold=True, kind="title"))
        if chart.subtitle:
            subtitle = _fitted(chart.subtitle, 13, self.width - 48)
            self.labels.append(Label((24, 55), subtitle, "muted", 13, kind="subtitle"))
        unit = f"{chart.y_label} ({self.y.unit})"
        self.labels.append(Label((24, self.top - 12), unit, "muted", kind="y-label"))
        middle = (self.left + self.right) / 2
        self.labels.append(Label((middle, self.bottom + 40), chart.x_label, "muted", anchor="middle", kind="x-label"))
        y = self.bottom + 50
        for line in textwrap.wrap(chart.note, int((self.width - 48) / (0.62 * 11)), max_lines=4, placeholder=" …"):
            y += 15
            self.labels.append(Label((24, y), line, "muted", 11, kind="note"))
        return math.ceil(y) + 16

    def _axes(self) -> None:
        for value, label in self.y.ticks:
            _, y = self.at(self.x.low, value)
            self.lines.append(Line(((self.left, y), (self.right, y)), "axis" if value == 0 else "grid", kind="grid"))
            self.labels.append(Label((self.left - 8, y + 4), label, "muted", anchor="end", kind="y-tick"))
        for value, label in self.x.ticks:
            x, _ = self.at(value, 0)
            self.lines.append(Line(((x, self.bottom), (x, self.bottom + 5)), "axis", kind="tick"))
            self.labels.append(Label((x, self.bottom + 20), label, "muted", anchor="middle", kind="x-tick"))

    def _limits(self) -> None:
        for limit in self.chart.limits:
            words = limit_words(limit)
            label = Label((0, 0), words, kind="limit-label", title=limit.name)
            if limit.bytes > self.y.high:
                # Outside, and said so; several stand under one another.
                spots = [(self.left + 8, self.top + 14.0 + _LINE * row) for row in range(len(self.chart.limits))]
                self._place(label.replace(text=f"↑ {words}, above this picture"), spots, must=True)
                continue
            _, y = self.at(self.x.low, limit.bytes)
            ends = ((self.left, y), (self.right, y))
            self.lines.append(Line(ends, "limit", 1.5, (7, 5, 0), "limit", words))
            # Left first: there the curves are low. Lines close to each other take turns.
            across = [self.left + 8 + share * (self.right - self.left) for share in (0, 0.25, 0.5, 0.75)]
            sides = [side for side in (y - 6, y + 15) if side < self.bottom - 2]
            last = (self.left + 8, y - 6)
            self._place(label, [*((x, side) for x in across for side in sides), last], must=True)

    def _place(self, label: Label, spots: Sequence[Point], *, must: bool = False) -> None:
        """Put a text at the first of some spots where nothing is; else nowhere, or if it must, at the last."""
        width = text_width(label.text, label.size)
        for number, (x, y) in enumerate(spots, 1):
            start = x - width if label.anchor == "end" else x
            box = (start - 4, y - label.size, start + width + 4, y + 4)
            free = all(box[0] >= b[2] or box[2] <= b[0] or box[1] >= b[3] or box[3] <= b[1] for b in self.taken)
            inside = start >= self.left and start + width <= self.right and box[1] >= self.top - 12
            if (free and inside) or (must and number == len(spots)):
                self.taken.append(box)
                self.labels.append(label.replace(at=(x, y)))
                return

    def _curves(self) -> None:
        dashes = {}
        for group in alike(self.chart.curves):
            for place, index in enumerate(group):
                # The first is whole, the next ones let those below show through.
                dashes[index] = (_DASH, _DASH * (len(group) - 1), -_DASH * place) if place else None
        for index, curve in enumerate(self.chart.curves):
            if curve.points:
                path = tuple(self.at(context, size) for context, size in _samples(curve, self.x))
                # Under rings a line is thinner: it is not what was measured.
                width = 1.5 if curve.measured else 2.5
                self.lines.append(Line(path, f"curve{index}", width, dashes[index], "curve", curve.name))
                self.taken += [(x, y, x, y) for x, y in path]
            if curve.measured:
                for mark in curve.measured:
                    self._mark(curve, mark, f"curve{index}")
                continue
            # Every point can be asked for its value; the marks stay few.
            radius = 5 if len(curve.points) == 1 else 2.5 if len(curve.points) <= 24 else 0
            for context, size in curve.points:
                title = f"{curve.name}: {self._exactly(size)} at {plural(context, 'token')}"
                self.dots.append(Dot(self.at(context, size), radius, f"curve{index}", "point", title))

    def _exactly(self, value: int) -> str:
        words = self.chart.amount(value)
        return f"{words} ({value:,} bytes)" if self.chart.quantity == "memory" else words

    def _mark(self, curve: Curve, mark: Mark, ink: str) -> None:
        """A ring, and a bar from the low to the high end."""
        x, y = self.at(mark.context, mark.value)
        title = f"{curve.name}: measured {self._exactly(mark.value)} at {plural(mark.context, 'token')}"
        if mark.low is not None and mark.high is not None:
            (_, low), (_, high) = self.at(mark.context, mark.low), self.at(mark.context, mark.high)
            self.lines.append(Line(((x, low), (x, high)), ink, 1.5, kind="bar"))
            self.lines += [Line(((x - 4, end), (x + 4, end)), ink, 1.5, kind="bar-end") for end in (low, high)]
            title += f", from {self.chart.amount(mark.low)} to {self.chart.amount(mark.high)}"
        self.dots.append(Dot((x, y), 5, ink, "measured"))
        self.dots.append(Dot((x, y), 2.5, "background", "hole", title))
        self.taken.append((x - 5, y - 5, x + 5, y + 5))

    def _crossings(self) -> None:
        """Marks where curves leave limits; numbers at them only where there is room: the names' lines have them all."""
        labels = []
        for index, limit, found in self.met:
            curve, ink = self.chart.curves[index], f"curve{index}"
            x, y = self.at(found.tokens, min(limit.bytes, bytes_at(curve, found.tokens)))
            title = f"{curve.name}: {fit_words(curve, limit)} in {limit_words(limit)}"
            if len(self.met) <= _FEW:
                self.lines.append(Line(((x, y), (x, self.bottom)), ink, 1, (2, 3, 0), "drop"))
            self.dots.append(Dot((x, y), 4.5, ink, "crossing", title))
            self.taken.append((x - 5, y - 5, x + 5, y + 5))
            label = Label((0, 0), tokens_words(found), anchor="end", bold=True, kind="crossing-label", title=title)
            labels.append((label, [(x - 10, y - 8), (x - 10, y + 18)]))
        for label, spots in labels:
            self._place(label, spots)

    def _block(self, index: int) -> float:
        return _LINE * (1 + len(self.facts[index])) + 8

    def _names(self) -> None:
        """Names beside the ends of their curves, moved apart where they would touch."""
        ends = [self.at(*curve.ends[1]) for curve in self.chart.curves]
        order = sorted(range(len(ends)), key=lambda index: (ends[index][1], index))
        tops: list[float] = []
        for index in order:
            wish = ends[index][1] - _LINE / 2
            tops.append(max([wish, self.top - 8] if not tops else [wish, tops[-1] + self._block(order[len(tops) - 1])]))
        floor: float = self.bottom + 8
        for place in reversed(range(len(order))):
            tops[place] = min(tops[place], floor - self._block(order[place]))
            floor = tops[place]
        x = self.right + 34
        for top, index in zip(tops, order, strict=True):
            (end_x, end_y), middle, ink = ends[index], top + _LINE / 2, f"curve{index}"
            leader = ((end_x, end_y), (max(end_x, self.right) + 4, end_y), (x - 10, middle), (x - 4, middle))
            # Dotted: it must not look like more of the curve.
            self.lines.append(Line(leader, ink, 1, (1.5, 3, 0), "leader"))
            self.dots.append(Dot((x - 4, middle), 3, ink, "key"))
            name = Label(
                (x + 4, middle + 4), self.names[index], bold=True, kind="name", title=self.chart.curves[index].name
            )
            self.labels.append(name)
            for number, fact in enumerate(self.facts[index], 1):
                self.labels.append(Label((x + 4, middle + 4 + _LINE * number), fact, "muted", kind="fact"))


def _samples(curve: Curve, axis: Axis) -> list[tuple[float, float]]:
    """A curve's points, and on a doubling axis enough between them: there a straight line bends."""
    points: list[tuple[float, float]] = list(curve.points)
    if axis.log:
        low, high = curve.points[0][0], curve.points[-1][0]
        between = (axis.value(number / 120) for number in range(1, 120))
        points += [(context, bytes_at(curve, context)) for context in between if low < context < high]
    return sorted(points)
