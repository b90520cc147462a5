"""Lines and tables on a terminal, through rich; every number in full, whatever the width.

Columns are laid out here and not by rich's Table: that cuts cells short on narrow
terminals, pads the ends of lines, and takes longer than the rest of a run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from kvctl.words import unicode_output

Row = tuple[Sequence[str], Text | None, str]
"""Cells, what stands after them (a bar), and the style of the line."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would leave with status 1; whoever called decides.
        raise BrokenPipeError


class Screen:
    """Lines on stdout: on a terminal long ones break between words, in a pipe they stay whole, for grep."""

    def __init__(self) -> None:
        self.terminal = sys.stdout.isatty()
        width = None if self.terminal or os.environ.get("COLUMNS") else 120
        self.console = _Console(file=sys.stdout, width=width, highlight=False, emoji=False, markup=False)
        if self.console.width < 20:  # COLUMNS=0 and the like
            self.console.width = 80

    def line(self, text: str | Text = "", style: str = "", indent: int = 0) -> None:
        """One line; what does not fit goes on under column `indent`."""
        content = Text(text, style=style) if isinstance(text, str) else text
        room = self.console.width - 1
        if not self.terminal or content.cell_len <= room or room - indent < 24:
            self.console.print(content, soft_wrap=True)
            return
        head, rest = content.divide([indent]) if indent else (Text(""), content)
        for index, part in enumerate(rest.wrap(self.console, room - indent)):
            self.console.print((Text(" " * indent) if index else head) + part, soft_wrap=True)

    def width_of(self, rows: Sequence[Sequence[str]]) -> int:
        """Columns that a table of these rows takes."""
        widths = [max(cell_len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return sum(widths) + 2 * (len(widths) - 1)

    def table(self, justify: str, rows: Sequence[Row], *, bold: int | None = None) -> None:
        """Rows of cells, each column as wide as its widest; `justify` has an l or r for each.

        Column `bold` of rows without a style of their own stands out.
        """
        widths = [max(cell_len(row[0][column]) for row in rows) for column in range(len(justify))]
        for cells, tail, style in rows:
            if tail is not None and not any(cells):
                self.line(tail, indent=2)  # a heading between rows
                continue
            parts = []
            for cell, width, side in zip(cells, widths, justify, strict=True):
                blank = " " * (width - cell_len(cell))
                parts.append(blank + cell if side == "r" else cell + blank)
            text = Text("  ".join(parts), style=style)
            if bold is not None and not style:
                start = sum(widths[:bold]) + 2 * bold
                text.stylize("bold", start, start + widths[bold])
            if tail is not None:
                text.append("  ")
                text.append_text(tail)
            text.rstrip()
            self.console.print(text, soft_wrap=True)

    def tables(
        self, lead: int, justify: str, rows: Sequence[Row], groups: Sequence[int], *, bold: int | None = None
    ) -> None:
        """The first `lead` columns and groups of so many others side by side, as far as there is room; the rest below, beside the
        first columns once more. A line among the rows that has a style stands once, a heading over each part."""
        parts: list[list[int]] = []
        start = lead
        for count in groups:
            more = [*range(start, start + count)]
            start += count
            joined = [*(parts[-1] if parts else range(lead)), *more]
            if (
                parts
                and self.width_of([[cells[column] for column in joined] for cells, _, _ in rows]) <= self.console.width
            ):
                parts[-1] = joined
            else:
                parts.append([*range(lead), *more])
        for number, columns in enumerate(parts):
            if number:
                self.line()
            shown: list[Row] = [
                ([cells[column] for column in columns], None if number and any(cells) else tail, style)
                for cells, tail, style in rows
                if any(cells) or not number or not style
            ]
            self.table("".join(justify[column] for column in columns), shown, bold=bold)


def bar(part: int, whole: int, width: int = 16) -> Text:
    """A bar of eighths; something that is not nothing shows at least a sliver."""
    if not part or not whole:
        return Text("")
    if not unicode_output():
        return Text("#" * max(1, round(width * part / whole)))
    eighths = max(1, round(8 * width * part / whole))
    return Text("█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8], style="cyan")
