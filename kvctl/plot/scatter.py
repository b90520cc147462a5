"""Quality against bytes: a mark for every technique, and the line of those that no other beats."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from html import escape

from kvctl.errors import UsageError
from kvctl.plot.axes import Axis
from kvctl.plot.html import document, table
from kvctl.plot.picture import Dot, Label, Line, Page, Point, text_width
from kvctl.plot.svg import svg
from kvctl.plot.text import Cell, Text
from kvctl.record import Record
from kvctl.units import BINARY, format_bytes
from kvctl.words import one_line, shortened

_WIDTH, _HEIGHT, _TOP = 960, 480, 92
_TEXT = 12
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_DECADES = 8
"""At most: what is smaller lies at the foot of the picture."""


class Spot(Record):
    """A technique: its cache in bytes, and what it loses; lower is better."""

    name: str
    bytes: int
    loss: float
    low: float
    high: float
    """Ends of its error bar."""
    best: bool = False
    facts: tuple[str, ...] = ()


class Scatter(Record):
    """One picture, with both axes logarithmic."""

    title: str
    spots: tuple[Spot, ...]
    subtitle: str = ""
    note: str = ""
    x_label: str = "KV cache"
    y_label: str = ""

    @property
    def ordered(self) -> tuple[Spot, ...]:
        """Largest first."""
        return tuple(sorted(self.spots, key=lambda spot: (-spot.bytes, spot.loss)))


def checked(chart: Scatter) -> Scatter:
    """With names that are one line.

    Raises:
        UsageError: nothing to draw.

    """
    if not chart.spots:
        raise UsageError("nothing to plot", hint="quality needs a text, and a model with a tokenizer")
    spots = tuple(spot.replace(name=one_line(spot.name)) for spot in chart.spots)
    return chart.replace(spots=spots, title=one_line(chart.title), subtitle=one_line(chart.subtitle))


def axes(chart: Scatter) -> tuple[Axis, Axis]:
    """Of bytes, with a tick at powers of two, and of losses, with one at powers of ten."""
    sizes = [spot.bytes for spot in chart.spots]
    low, high = math.log2(min(sizes)) - 0.15, math.log2(max(sizes)) + 0.15
    powers = range(math.ceil(low), math.floor(high) + 1)
    every = max(1, math.ceil(len(powers) / 8))
    unit, size = next(((unit, size) for unit, size in BINARY if max(sizes) >= size), ("bytes", 1))
    x_ticks = tuple((2.0**power, f"{2.0**power / size:,g}") for power in powers if (powers[-1] - power) % every == 0)
    losses = [loss for spot in chart.spots for loss in (spot.loss, spot.high) if loss > 0] or [1.0]
    top = math.ceil(math.log10(max(losses)) + 0.02)
    foot = max(math.floor(math.log10(min(spot.loss for spot in chart.spots if spot.loss > 0))) if any(
        spot.loss > 0 for spot in chart.spots) else top - 1, top - _DECADES)  # fmt: skip
    foot = min(foot, top - 1)
    y_ticks = tuple((10.0**power, f"{10.0**power:g}") for power in range(foot, top + 1))
    return Axis(2**low, 2**high, True, x_ticks, unit), Axis(10.0**foot, 10.0**top, True, y_ticks)


def _share(axis: Axis, value: float) -> float:
    return axis.share(min(max(value, axis.low), axis.high))


# -- a page -------------------------------------------------------------------------------------------


def page(chart: Scatter) -> Page:
    """Lay out a checked chart."""
    return _Layout(chart).page()


class _Layout:
    def __init__(self, chart: Scatter) -> None:
        self.chart = chart
        self.x, self.y = axes(chart)
        self.left = 24 + max(text_width(label, _TEXT) for _, label in self.y.ticks)
        self.right, self.bottom = _WIDTH - 44, _TOP + _HEIGHT
        self.lines: list[Line] = []
        self.dots: list[Dot] = []
        self.labels: list[Label] = []
        self.taken: list[tuple[float, float, float, float]] = []

    def page(self) -> Page:
        height = self._words()
        self._grid()
        best = [spot for spot in self.chart.ordered if spot.best]
        self.lines.append(
            Line(tuple(self.at(spot.bytes, spot.loss) for spot in best), "curve0", 1.5, (4, 4, 0), "front")
        )
        for spot in self.chart.ordered:
            x, y = self.at(spot.bytes, spot.loss)
            self.taken.append((x - 5, y - 5, x + 5, y + 5))
        for (x1, y1), (x2, y2) in itertools.pairwise(self.at(spot.bytes, spot.loss) for spot in best):
            steps = max(1, int(math.hypot(x2 - x1, y2 - y1) / 6))
            along = [(x1 + (x2 - x1) * step / steps, y1 + (y2 - y1) * step / steps) for step in range(steps)]
            self.taken += [(x, y, x, y) for x, y in along]
        # The best ones are named first: where there is no room for all, they have it.
        for spot in sorted(self.chart.ordered, key=lambda spot: not spot.best):
            self._spot(spot)
        return Page(_WIDTH, height, tuple(self.lines), tuple(self.dots), tuple(self.labels))

    def at(self, size: float, loss: float) -> Point:
        x = self.left + _share(self.x, size) * (self.right - self.left)
        return x, self.bottom - _share(self.y, loss) * (self.bottom - _TOP)

    def _words(self) -> int:
        chart = self.chart
        self.labels.append(Label((24, 34), shortened(chart.title, 80), size=18, bold=True, kind="title"))
        self.labels.append(Label((24, 55), shortened(chart.subtitle, 118), "muted", 13, kind="subtitle"))
        self.labels.append(Label((24, _TOP - 12), chart.y_label, "muted", kind="y-label"))
        middle = (self.left + self.right) / 2
        self.labels.append(
            Label(
                (middle, self.bottom + 40), f"{chart.x_label} ({self.x.unit})", "muted", anchor="middle", kind="x-label"
            )
        )
        y = self.bottom + 50.0
        for line in textwrap.wrap(chart.note, int((_WIDTH - 48) / (0.62 * 11)), max_lines=4, placeholder=" …"):
            y += 15
            self.labels.append(Label((24, y), line, "muted", 11, kind="note"))
        return math.ceil(y) + 16

    def _grid(self) -> None:
        for value, label in self.y.ticks:
            _, y = self.at(self.x.low, value)
            self.lines.append(Line(((self.left, y), (self.right, y)), "grid", kind="grid"))
            self.labels.append(Label((self.left - 8, y + 4), label, "muted", anchor="end", kind="y-tick"))
        self.lines.append(Line(((self.left, self.bottom), (self.right, self.bottom)), "axis", kind="grid"))
        for value, label in self.x.ticks:
            x, _ = self.at(value, self.y.low)
            self.lines.append(Line(((x, self.bottom), (x, self.bottom + 5)), "axis", kind="tick"))
            self.labels.append(Label((x, self.bottom + 20), label, "muted", anchor="middle", kind="x-tick"))

    def _spot(self, spot: Spot) -> None:
        x, y = self.at(spot.bytes, spot.loss)
        ink = "curve0" if spot.best else "muted"
        (_, low), (_, high) = self.at(spot.bytes, spot.low), self.at(spot.bytes, spot.high)
        if low - high > 1:
            self.lines.append(Line(((x, low), (x, high)), ink, 1, kind="bar"))
        title = f"{spot.name}: {', '.join([f'{spot.bytes:,} bytes', *spot.facts])}"
        self.dots.append(Dot((x, y), 5 if spot.best else 3.5, ink, "technique", title))
        name = Label(
            (x, y), shortened(spot.name, 36), "text" if spot.best else "muted", bold=spot.best, kind="name", title=title
        )
        width = text_width(name.text, _TEXT)
        for dx, dy, anchor in ((8, 4, "start"), (-8, 4, "end"), (8, -8, "start"), (8, 16, "start"), (-8, -8, "end"), (-8, 16, "end"),
                               (8, -20, "start"), (8, 28, "start")):  # fmt: skip
            start = x + dx - (width if anchor == "end" else 0)
            box = (start - 2, y + dy - _TEXT, start + width + 2, y + dy + 4)
            if start < self.left or start + width > self.right or box[1] < _TOP - 8 or box[3] > self.bottom + 4:
                continue
            if all(box[0] >= b[2] or box[2] <= b[0] or box[1] >= b[3] or box[3] <= b[1] for b in self.taken):
                self.taken.append(box)
                self.labels.append(name.replace(at=(x + dx, y + dy), anchor=anchor))
                return


def html(chart: Scatter) -> str:
    """A web page with the picture and its numbers."""
    head = ["", "bytes", chart.y_label, "± ", ""]
    rows = [
        [escape(spot.name), f"{spot.bytes:,}<small>{format_bytes(spot.bytes)}</small>", f"{spot.loss:.3g}",
         f"{(spot.high - spot.low) / 2:.2g}", escape(", ".join(spot.facts))]
        for spot in chart.ordered
    ]  # fmt: skip
    picture = svg(page(chart), name=chart.title, alone=False).rstrip()
    return document(chart.title, [picture, table("Techniques by bytes", [escape(cell) for cell in head], rows)])


# -- on a terminal ------------------------------------------------------------------------------------


def drawn(chart: Scatter, width: int, height: int, *, colour: bool, unicode: bool) -> str:
    """A checked chart in at most `width` columns: letters in a frame, and what they are under it."""
    text = Text(max(width, 20), colour, unicode)
    x, y = axes(chart)
    spots = chart.ordered
    margin = max(len(label) for _, label in y.ticks) + 1
    columns, rows = max(text.width - margin - 1, 8), max(14, min(20, height - len(spots) - 6))
    cells: list[list[Cell]] = [[(" ", "")] * columns for _ in range(rows)]
    edge = "│" if unicode else "|"
    for index, spot in reversed(list(enumerate(spots[: len(_LETTERS)]))):
        row = rows - 1 - round(_share(y, spot.loss) * (rows - 1))
        column = _free(cells[row], round(_share(x, spot.bytes) * (columns - 1)))
        cells[row][column] = (_LETTERS[index], "1;36" if spot.best else "")
    lines = [
        *text.wrapped(chart.title, "1"),
        *text.wrapped(chart.subtitle, "2"),
        *text.wrapped(f"{chart.y_label}", "2"),
    ]
    names = {rows - 1 - round(_share(y, value) * (rows - 1)): label for value, label in y.ticks}
    for number, line_cells in enumerate(cells):
        lead = [(char, "2") for char in f"{names.get(number, ''):>{margin - 1}} {edge}"]
        lines.append(text.line([*lead, *line_cells]))
    lines.append(text.styled(" " * margin + ("└" if unicode else "+") + ("─" if unicode else "-") * columns, "2"))
    lines.append(text.styled(_under(x, columns, margin), "2"))
    wide = max(len(spot.name) for spot in spots)
    for letter, spot in zip(_LETTERS, spots, strict=False):
        mark = text.styled(letter, "1;36" if spot.best else "1")
        line = text.plain(f"{shortened(spot.name, max(12, min(wide, text.width - 40))):<{min(wide, max(12, text.width - 40))}}"
                          f"  {spot.bytes:>13,} bytes  {spot.loss:.2g}")  # fmt: skip
        lines.append(f"{mark} {line[: text.width - 2]}")
    if len(spots) > len(_LETTERS):
        lines += text.wrapped(f"{len(spots) - len(_LETTERS)} more are not drawn", "2")
    return "\n".join([*lines, *text.wrapped(chart.note, "2")]) + "\n"


def _free(row: Sequence[Cell], wish: int) -> int:
    """The free column nearest to the one that is wished for."""
    order = sorted(range(len(row)), key=lambda column: abs(column - wish))
    return next((column for column in order if row[column][0] == " "), wish)


def _under(axis: Axis, columns: int, margin: int) -> str:
    """Labels of the axis of bytes, where they have room."""
    line = [" "] * (margin + 1 + columns)
    for value, label in axis.ticks:
        label = f"{label} {axis.unit}"
        start = margin + 1 + round(_share(axis, value) * (columns - 1)) - len(label) // 2
        if (
            start < 0
            or start + len(label) > len(line)
            or any(char != " " for char in line[max(start - 1, 0) : start + len(label) + 1])
        ):
            continue
        line[start : start + len(label)] = label
    return "".join(line).rstrip()
