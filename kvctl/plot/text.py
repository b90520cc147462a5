"""A chart as lines of text: dots of Braille, or letters where the terminal knows no more than ASCII."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Sequence

from kvctl.plot.axes import context_axis, value_axis
from kvctl.plot.chart import (
    Chart,
    Curve,
    alike,
    bytes_at,
    crossing,
    curve_facts,
    fit_words,
    largest,
    limit_words,
)
from kvctl.words import shortened

_COLOURS = ("36", "33", "35", "32", "94", "31", "96", "95")  # cyan, yellow, magenta, …: the terminal's own
_DIM, _BOLD = "2", "1"
_LETTERS = "ABCDEFGH"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a Braille cell by row and column (Unicode 1.1, U+2800)."""

_FEWEST_COLUMNS, _FEWEST_ROWS, _READABLE_ROWS, _MOST_ROWS = 8, 6, 12, 24
_LEAST_PANEL = 18

_NARROWEST = 20
_FILLER = "\ue000"
"""Holds the second column of a wide character while columns are counted; no text has one (see one_line)."""
_UNITS = re.compile(r"(?<=\d) (?=([KMGT]i)?B\b|tokens?\b)")

Cell = tuple[str, str]
"""A character and its SGR codes."""


def drawn(chart: Chart, width: int, height: int, *, colour: bool, unicode: bool) -> str:
    """A checked chart in at most `width` columns, and in `height` lines where its legend leaves room."""
    plain = Text(max(width, _NARROWEST), colour, unicode)
    # Two panels share the screen, unless that would squeeze them flat: then they scroll.
    each = height if chart.below is None else max(_LEAST_PANEL, height // 2)
    panels = [_panel(panel, chart.contexts, each, plain) for panel in chart.panels]
    return ("\n\n".join("\n".join(lines) for lines in panels) + "\n").replace(_FILLER, "")


def _panel(chart: Chart, contexts: Sequence[int], height: int, plain: Text) -> list[str]:
    """One panel, over the contexts of all."""
    head = [*plain.wrapped(chart.title, _BOLD), *plain.wrapped(chart.subtitle, _DIM)]
    foot = [*_legend(chart, plain), *plain.wrapped(chart.note, _DIM)]
    # A long legend scrolls the head away rather than squeeze the picture flat.
    least = min(_READABLE_ROWS, max(_FEWEST_ROWS, height - 6))
    rows = max(least, min(_MOST_ROWS, height - len(head) - len(foot) - 5))
    plot = _Plot(chart, contexts, rows, plain)
    middle = [plain.line(cells) for cells in plot.lines()] if plot.columns >= _FEWEST_COLUMNS else []
    return [*head, *middle, *foot]


class Text:
    """Lines in what the terminal can show."""

    def __init__(self, width: int, colour: bool, unicode: bool) -> None:
        self.width, self.colour, self.unicode = width, colour, unicode

    def plain(self, text: str) -> str:
        """In characters that the terminal has, each followed by a filler if it takes two columns."""
        if self.unicode:
            text = unicodedata.normalize("NFC", text)
            wide = "".join(char + _FILLER * (unicodedata.east_asian_width(char) in "WF") for char in text)
            return "".join(char for char in wide if not unicodedata.combining(char))
        text = text.replace("×", "x").replace("−", "-").replace("…", "...").replace("↑", "^")
        text = text.replace("○", "o").replace("µ", "u")
        return text.encode("ascii", "replace").decode()

    def wrapped(self, text: str, style: str, first: str = "", later: str = "") -> list[str]:
        """A text over as many lines as it takes; a number and its unit stay together."""
        text = _UNITS.sub("\N{NO-BREAK SPACE}", self.plain(text))
        # A wide character may be cut from its filler, and then sticks out by one.
        width = self.width - (_FILLER in text)
        lines = textwrap.wrap(text, width, initial_indent=first, subsequent_indent=later, break_on_hyphens=False)
        return [self.styled(line.replace("\N{NO-BREAK SPACE}", " "), style) for line in lines]

    def styled(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self.colour and style and text else text

    def line(self, cells: list[Cell]) -> str:
        """Cells as text, with as few changes of colour as possible."""
        runs: list[list[str]] = []
        for char, style in cells:
            if runs and (runs[-1][1] == style or char == " "):
                runs[-1][0] += char
            else:
                runs.append([char, style])
        if runs:
            runs[-1][0] = runs[-1][0].rstrip()
        return "".join(self.styled(text, style) for text, style in runs)


def _mark(index: int, count: int) -> str:
    return _LETTERS[index] if count > 1 else "*"


def _legend(chart: Chart, plain: Text) -> list[str]:
    """What every curve is and where it fits; what every limit is."""
    if len(chart.curves) > 1:
        table = _table(chart, plain)
        if max(map(len, table)) <= plain.width:
            return [
                plain.styled(table[0], _DIM),
                *(_lettered(row, index, plain) for index, row in enumerate(table[1:])),
            ]
    lines = []
    many = len(chart.curves) > 1
    for index, curve in enumerate(chart.curves):
        facts = [*curve_facts(curve, chart), *_below(chart, index)]
        text = f"{shortened(curve.name, max(12, plain.width - 4))}: {'; '.join(facts)}"
        first, *rest = plain.wrapped(text, "", f"{_LETTERS[index]} " if many else "", "  " if many else "")
        lines += [_lettered(first, index, plain) if many else first, *rest]
    dash = "╌╌ " if plain.unicode else "-- "
    for limit in chart.limits:
        lines += plain.wrapped(limit_words(limit), _DIM, dash, "   ")
    return lines


def _table(chart: Chart, plain: Text) -> list[str]:
    """A line for every curve, with a column for every limit."""
    rows = [["", "largest", *(limit_words(limit) for limit in chart.limits)]]
    for index, curve in enumerate(chart.curves):
        context, size = largest(curve)
        fits = [fit_words(curve, limit).removeprefix("fits ").removesuffix(" tokens") for limit in chart.limits]
        name = f"{_LETTERS[index]} {shortened(curve.name, 36)}"
        rows.append([name, f"{chart.amount(size)} at {context:,}", *fits, *curve.facts, *_below(chart, index)])
    rows = [[plain.plain(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows)))]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _below(chart: Chart, index: int) -> list[str]:
    """Says of a curve that another one hides it."""
    group = next(group for group in alike(chart.curves) if index in group)
    return [] if group[0] == index else [f"on the line of {_LETTERS[group[0]]}"]


def _lettered(line: str, index: int, plain: Text) -> str:
    return plain.styled(line[0], f"{_BOLD};{_COLOURS[index]}") + line[1:]


class _Plot:
    """The picture itself, as rows of cells."""

    def __init__(self, chart: Chart, contexts: Sequence[int], rows: int, text: Text) -> None:
        self.chart, self.rows, self.text, self.width = chart, rows, text, text.width
        self.unicode = text.unicode
        self.y = value_axis(chart, max(2, rows // 3))
        self.margin = max(len(label) for _, label in self.y.ticks) + 2
        # To the right of the curves stand their letters: at most all of them in one row.
        self.columns = self.width - self.margin - 1 - (len(chart.curves) if len(chart.curves) > 1 else 1)
        self.x = context_axis(contexts, max(1, self.columns // 7))
        self.cells: dict[tuple[int, int], Cell] = {}

    def lines(self) -> list[list[Cell]]:
        label = self.text.plain(f"{self.chart.y_label} ({self.y.unit})")
        self._limits()
        for index, curve in enumerate(self.chart.curves):
            if curve.points:
                self._curve(index, curve)
        self._crossings()
        self._letters()
        self._measured()
        tick, bar = ("┤", "│") if self.unicode else ("+", "|")
        labels = {self._row(value): text for value, text in self.y.ticks}
        lines: list[list[Cell]] = [_cells(label[: self.width], _DIM)]
        for row in range(self.rows):
            text = labels.get(row, "")
            edge = _cells(text.rjust(self.margin - 2) + " " + (tick if text else bar), _DIM)
            lines.append(
                edge + [self.cells.get((row, column), (" ", "")) for column in range(self.width - self.margin)]
            )
        return [*lines, *self._context_axis()]

    def _row(self, size: float) -> int:
        return min(self.rows - 1, max(0, int((1 - self.y.share(size)) * self.rows)))

    def _column(self, context: float) -> int:
        return min(self.columns - 1, int(self.x.share(context) * self.columns))

    def _limits(self) -> None:
        dash = "╌" if self.unicode else "-"
        taken: set[int] = set()
        for limit in self.chart.limits:
            beyond = limit.bytes > self.y.high
            row = 0 if beyond else self._row(limit.bytes)
            if not beyond:
                self.cells |= {
                    (row, column): (dash, _DIM) for column in range(self.columns) if self.unicode or column % 2
                }
            # The label stands in its line, else (two limits in one line) only in the legend.
            text = f" {limit_words(limit)}{', above' if beyond else ''} "
            plain = self.text.plain(text)
            if row not in taken and len(plain) + 4 <= self.columns:
                taken.add(row)
                self.cells |= {(row, 2 + place): (char, _BOLD) for place, char in enumerate(plain)}

    def _curve(self, index: int, curve: Curve) -> None:
        low, high = curve.points[0][0], curve.points[-1][0]
        wide, tall = 2 * self.columns, 4 * self.rows
        first, last = (min(wide - 1, int(self.x.share(context) * wide)) for context in (low, high))
        bits: dict[tuple[int, int], int] = {}
        before: int | None = None
        for x in range(first, last + 1):
            context = min(max(self.x.value((x + 0.5) / wide), low), high)
            y = min(tall - 1, max(0, int((1 - self.y.share(bytes_at(curve, context))) * tall)))
            # Steep curves have no gaps: from the height of the dot before to this one's.
            for dot in range(min(y, y if before is None else before), max(y, before or 0) + 1):
                cell = (dot // 4, x // 2)
                bits[cell] = bits.get(cell, 0) | _DOTS[dot % 4][x % 2]
            before = y
        for cell, dots in bits.items():
            self.cells[cell] = (self._curve_mark(index, dots, cell, alone=first == last), _COLOURS[index])

    def _curve_mark(self, index: int, dots: int, cell: tuple[int, int], *, alone: bool) -> str:
        if not self.unicode:
            return _mark(index, len(self.chart.curves)).lower()
        if alone:
            return "●"
        below = ord(self.cells.get(cell, (" ", ""))[0]) - 0x2800
        return chr(0x2800 + (dots | below if 0 < below < 0x100 else dots))

    def _crossings(self) -> None:
        for limit in self.chart.limits:
            for index, curve in enumerate(self.chart.curves):
                found = crossing(curve, limit)
                if found is not None:
                    cell = (self._row(limit.bytes), self._column(found.tokens))
                    self.cells[cell] = ("●" if self.unicode else "X", _COLOURS[index])

    def _measured(self) -> None:
        """Rings at measured values; bars where they are longer than a line of text is high."""
        ring, bar = ("○", "│") if self.unicode else ("o", "|")
        for index, curve in enumerate(self.chart.curves):
            for mark in curve.measured:
                column = self._column(mark.context)
                if mark.low is not None and mark.high is not None:
                    for row in range(self._row(mark.high), self._row(mark.low) + 1):
                        self.cells[row, column] = (bar, _COLOURS[index])
                self.cells[self._row(mark.value), column] = (ring, _COLOURS[index])

    def _letters(self) -> None:
        """Each curve's letter where it ends, and once on its way, for those who see no colours."""
        count = len(self.chart.curves)
        if count == 1:
            return
        taken = set()
        for index, curve in enumerate(self.chart.curves):
            (low, _), (high, size) = curve.ends
            letter = (_LETTERS[index], f"{_BOLD};{_COLOURS[index]}")
            row, column = self._row(size), self._column(high) + 1
            while (row, column) in taken:
                column += 1
            taken.add((row, column))
            self.cells[row, column] = letter
            first, last = self._column(low), self._column(high)
            middle = first + (last - first) * (index + 1) // (count + 1)
            if curve.points and first + 2 < middle < last - 1:
                on_the_way = min(max(self.x.value((middle + 0.5) / self.columns), low), high)
                self.cells[self._row(bytes_at(curve, on_the_way)), middle] = letter

    def _context_axis(self) -> list[list[Cell]]:
        corner, line, mark = ("└", "─", "┬") if self.unicode else ("+", "-", "+")
        rule = [line] * self.columns
        labels = [" "] * self.width
        free = 0
        for value, text in self.x.ticks:
            column = self._column(value)
            rule[column] = mark
            start = min(max(free, self.margin + column - len(text) // 2), self.width - len(text))
            # Only a label that stays under its tick.
            if start >= free and start <= self.margin + column < start + len(text):
                labels[start : start + len(text)] = text
                free = start + len(text) + 1
        name = self.text.plain(self.chart.x_label)
        start = max(0, min(self.margin + (self.columns - len(name)) // 2, self.width - len(name)))
        rule_cells = " " * (self.margin - 1) + corner + "".join(rule)
        return [_cells(text[: self.width], _DIM) for text in (rule_cells, "".join(labels), " " * start + name)]


def _cells(text: str, style: str) -> list[Cell]:
    return [(char, style) for char in text]
