"""What a plan promised beside what came of it, on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.loadtest.promised import amount
from kvctl.words import one_line

if TYPE_CHECKING:
    from kvctl.loadtest.promised import Verified
    from kvctl.screen_lines import Row as Line
    from kvctl.screen_lines import Screen


def verified_table(found: Verified) -> list[list[str]]:
    """A heading, and a row for each thing that a plan promised."""
    out = [["", "promised", "measured", ""]]
    for row in found.rows:
        promised = "–" if row.promised is None else amount(row.promised, row.unit)
        out.append([row.name, promised, amount(row.measured, row.unit), row.verdict])
    return [[one_line(cell) for cell in row] for row in out]


def print_verified(screen: Screen, found: Verified) -> None:
    """That table; what breaks a promise stands out."""
    head, *rows = verified_table(found)
    styles = {True: "", None: "dim", False: "red"}
    lines: list[Line] = [(head, None, "dim")]
    lines += [(cells, None, styles[row.holds]) for cells, row in zip(rows, found.rows, strict=True)]
    screen.table("lrrl", lines)


def verified_lines(found: Verified) -> list[tuple[str, str]]:
    """The same as lines, with what it comes to; each with its style."""
    _, *rows = verified_table(found)
    out = [(f"plan {found.promised.source}: {found.promised.name}", "bold")]
    out += [(f"plan: {name}: {measured}, {promised} promised" + (f": {verdict}" if verdict else ""), "")
            for name, promised, measured, verdict in rows]  # fmt: skip
    out += [(f"plan: {note}", "yellow") for note in found.notes]
    if found.holds:
        return [*out, ("plan: holds: nothing that is promised broke", "bold green")]
    if found.unfinished and not found.broken:
        return [*out, ("plan: unfinished: nothing that is promised broke until it was interrupted", "yellow")]
    return [*out, *((f"plan: does not hold: {line}", "bold red") for line in found.broken)]
