"""What `kvctl profile --technique` shows: bytes and speed, quality, and what the columns are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvctl.units import format_bytes, plural
from kvctl.words import one_line, share_words, shortened

if TYPE_CHECKING:
    from kvctl.measure.assessed import Assessed, Assessment
    from kvctl.measure.statistics import Ratio
    from kvctl.screen_lines import Row, Screen

_SIZES = ("bytes", "smaller", "TTFT", "TPOT", "works in")
_QUALITIES = ("perplexity", "±", "KL", "p99", "top-1", "same", "keys")


def print_techniques(screen: Screen, found: Assessment, dtype: str | None) -> None:
    """Each technique beside the plain cache; a star where no other is as good in fewer bytes."""
    sizes, qualities = (_measured(part) for part in _cells(found))
    parts = [part for part in (sizes, qualities) if part[0]]
    names = [["", "technique"], *(["*" if row.pareto else "", row.name] for row in found.rows)]
    cells = _beside(names, *parts)
    if screen.width_of(cells) > screen.console.width:
        room = max(12, screen.console.width - max(screen.width_of(part) for part in parts) - 6)
        cells = _beside([[mark, shortened(name, room)] for mark, name in names], *parts)
    styles = ["dim", *("red" if row.agrees is False else "" for row in found.rows)]
    table: list[Row] = [(row, None, style) for row, style in zip(cells, styles, strict=True)]
    screen.tables(2, "ll" + "r" * len(cells[0][2:]), table, [len(part[0]) for part in parts], bold=2)
    for row in found.rows:
        if row.error is not None:
            screen.line(one_line(f"{row.name}: {row.error}"), "red")
    for words in _notes(found, dtype):
        screen.line(one_line(words), "dim")
    if found.settings.bounds and qualities[0]:
        screen.line(one_line(smallest_words(found)), "bold")


def markdown_techniques(found: Assessment, dtype: str | None) -> tuple[list[list[str]], list[str]]:
    """The same as a table, its head first, and lines to stand under it."""
    parts = [part for part in map(_measured, _cells(found)) if part[0]]
    marks = [["best for its bytes"], *(["yes" if row.pareto else ""] for row in found.rows)]
    names = [["technique"], *([row.name] for row in found.rows)]
    errors = [f"{row.name}: {row.error}" for row in found.rows if row.error is not None]
    judged = any(row.pareto for row in found.rows)
    notes = [line.replace("; *: ", "; best for its bytes: ") for line in _notes(found, dtype)]
    return _beside(names, *parts, *([marks] if judged else [])), [*errors, *notes]


def _cells(found: Assessment) -> tuple[list[list[str]], list[list[str]]]:
    return [[*_SIZES], *map(_size, found.rows)], [[*_QUALITIES], *map(_quality, found.rows)]


def _measured(cells: list[list[str]]) -> list[list[str]]:
    """Without columns in which nothing stands: a run may have ended before them."""
    kept = [column for column in range(len(cells[0])) if any(row[column] != "–" for row in cells[1:])]
    return [[row[column] for column in kept] for row in cells]


def _notes(found: Assessment, dtype: str | None) -> list[str]:
    """What the columns that are there say."""
    settings, rows = found.settings, found.rows
    parts = [f"bytes after {settings.context:,} tokens and {settings.decode:,} more"]
    if any(row.ratio is not None for row in rows):
        parts.append(f"smaller: than the plain cache in {dtype}")
    ratios = [one for row in rows for one in (row.ttft, row.tpot) if one is not None]
    if ratios:
        parts.append("times over its, in turn")
    if any(one.low is None for one in ratios):
        parts.append("?: too few runs to tell from noise, --repeat 3")
    if any(row.working_bytes is not None for row in rows):
        parts.append("works in: memory at its most, beside the cache")
    lines = ["; ".join(parts)]
    quality = next((row.quality for row in rows if row.quality is not None), None)
    if quality is not None:
        lines.append(f"{plural(quality.tokens, 'token')} of {one_line(found.text or '')}, each read through the cache after {settings.prompt:,} others: "
                     f"perplexity {quality.plain_perplexity:.4g} plain; ± is a standard error; KL in nats; *: no other is as good in fewer bytes")  # fmt: skip
    greedy = next((row.greedy for row in rows if row.greedy is not None), None)
    if greedy is not None:
        lines.append(
            f"same: of {greedy.of} tokens generated after {plural(greedy.texts, 'text')}, those before the first that differs from the plain cache's"
        )
    recall = next((row.recall for row in rows if row.recall is not None), None)
    if recall is not None:
        depths = ", ".join(f"{depth:.0%}" for depth in recall.depths)
        lines.append(f"keys: numbers hidden at {depths} of {settings.prompt:,} tokens that were found again")
    for row in rows:
        words = _lost(row)
        if words:
            lines.append(
                f"{row.name}: {words}: it has no scale; fp8:scaled and fp8_e5m2:scaled take one from the prompt"
            )
    pairs = {frozenset((row.name, other)) for row in rows for other in row.like}
    if pairs:
        alike = "; ".join(sorted(" and ".join(sorted(pair)) for pair in pairs))
        lines.append(f"too few tokens to tell apart with 95% confidence: {alike}")
    return lines


def _lost(row: Assessed) -> str:
    """Of 8-bit floats: elements that are cut off, however few, and those that became zero, where they are more than one of 20."""
    ends = row.ends
    if ends is None:
        return ""
    parts = [f"{share_words(ends.largest, ends.elements)} of all elements are cut off at its largest number"] * bool(
        ends.largest
    )
    parts += [f"{share_words(ends.zero, ends.elements)} of all elements became zero"] * (20 * ends.zero > ends.elements)
    return " and ".join(parts)


def smallest_words(found: Assessment) -> str:
    """Which technique is the smallest that keeps the bounds."""
    row, bounds = found.smallest, found.settings.bounds
    asked = [] if bounds.most_change is None else [f"perplexity up to +{bounds.most_change:g}%"]
    asked += [] if bounds.least_top1 is None else [f"top-1 of at least {bounds.least_top1:g}%"]
    what = " and ".join(asked)
    if row is None:
        return f"none keeps {what}"
    words = f"smallest with {what}: {row.name}, {row.kv_bytes or 0:,} bytes"
    words += "" if row.ratio is None else f", {row.ratio:.2f}× smaller"
    return words if bounds.sure(row) else f"{words}; more --tokens would make that certain"


def _beside(*parts: Sequence[list[str]]) -> list[list[str]]:
    return [[cell for row in rows for cell in row] for rows in zip(*parts, strict=True)]


def _size(row: Assessed) -> list[str]:
    held = "–" if row.kv_bytes is None else f"{row.kv_bytes:,}"
    if row.kv_bytes is not None and row.predicted_bytes is None:
        held += " (not predicted)"
    return [
        held if row.agrees is not False else f"{held} ({row.predicted_bytes:,} predicted)",
        "–" if row.ratio is None else f"{row.ratio:.2f}×",
        _times(row.ttft),
        _times(row.tpot),
        "–" if row.working_bytes is None else format_bytes(row.working_bytes),
    ]


def _times(ratio: Ratio | None) -> str:
    """With a question mark where there are too few values to tell it from noise."""
    return "–" if ratio is None else f"{ratio.value:.2f}×" + ("?" if ratio.low is None else "")


def _quality(row: Assessed) -> list[str]:
    cells = ["–"] * 5
    if row.quality is not None:
        change = row.quality.perplexity_change
        cells = [
            f"{change.value:+.2f}%",
            "?" if change.error is None else f"{change.error:.2g}%",
            f"{row.quality.kl.value:.2g}",
            f"{row.quality.kl_p99:.2g}",
            f"{row.quality.top1.value:.1%}",
        ]
    cells.append("–" if row.greedy is None else f"{row.greedy.same:.3g}")
    cells.append("–" if row.recall is None else row.recall.words)
    return cells
