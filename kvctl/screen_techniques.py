"""What `kvctl profile --technique` shows: bytes and speed, quality, and what the columns are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvctl.units import format_bytes, plural
from kvctl.words import one_line, shortened

if TYPE_CHECKING:
    from kvctl.measure.assessed import Assessed, Assessment
    from kvctl.screen_lines import Row, Screen


def print_techniques(screen: Screen, found: Assessment, dtype: str | None) -> None:
    """Each technique beside the plain cache; a star where no other is as good in fewer bytes."""
    scored = any(row.quality for row in found.rows)
    sizes = [["bytes", "smaller", "TTFT", "TPOT", "works in"], *map(_size, found.rows)]
    qualities = [["perplexity", "±", "KL", "p99", "top-1", "same", "keys"], *map(_quality, found.rows)]
    whole = [size + quality for size, quality in zip(sizes, qualities, strict=True)] if scored else sizes
    names = [["", "technique"], *(["*" if row.pareto else "", row.name] for row in found.rows)]
    parts = [whole]
    if scored and screen.width_of(_beside(names, whole)) > screen.console.width:
        parts = [sizes, qualities]
    styles = ["dim", *("red" if row.agrees is False else "" for row in found.rows)]
    for number, part in enumerate(parts):
        if number:
            screen.line()
        room = max(12, screen.console.width - screen.width_of(part) - 6)
        cells = _beside([[mark, shortened(name, room)] for mark, name in names], part)
        table: list[Row] = [(row, None, style) for row, style in zip(cells, styles, strict=True)]
        screen.table("ll" + "r" * len(part[0]), table, bold=2)
    for row in found.rows:
        if row.error is not None:
            screen.line(one_line(f"{row.name}: {row.error}"), "red")
    settings = found.settings
    lines = [f"bytes after {settings.context:,} tokens and {settings.decode:,} more; smaller: than the plain cache in {dtype}; times over its, in turn; "
             "works in: memory at its most, beside the cache"]  # fmt: skip
    quality = next((row.quality for row in found.rows if row.quality is not None), None)
    if quality is not None:
        lines.append(f"{plural(quality.tokens, 'token')} of {one_line(found.text or '')}, each read through the cache after {settings.prompt:,} others: "
                     f"perplexity {quality.plain_perplexity:.4g} plain; ± is a standard error; KL in nats; *: no other is as good in fewer bytes")  # fmt: skip
    greedy = next((row.greedy for row in found.rows if row.greedy is not None), None)
    if greedy is not None:
        lines.append(
            f"same: of {greedy.of} tokens generated after {plural(greedy.texts, 'text')}, those before the first that differs from the plain cache's"
        )
    recall = next((row.recall for row in found.rows if row.recall is not None), None)
    if recall is not None:
        depths = ", ".join(f"{depth:.0%}" for depth in recall.depths)
        lines.append(f"keys: numbers hidden at {depths} of {settings.prompt:,} tokens that were found again")
    pairs = {frozenset((row.name, other)) for row in found.rows for other in row.like}
    if pairs:
        alike = "; ".join(sorted(" and ".join(sorted(pair)) for pair in pairs))
        lines.append(f"too few tokens to tell apart with 95% confidence: {alike}")
    for words in lines:
        screen.line(one_line(words), "dim")
    if settings.bounds and scored:
        screen.line(one_line(smallest_words(found)), "bold")


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


def _beside(one: Sequence[list[str]], other: Sequence[list[str]]) -> list[list[str]]:
    return [left + right for left, right in zip(one, other, strict=True)]


def _size(row: Assessed) -> list[str]:
    held = "–" if row.kv_bytes is None else f"{row.kv_bytes:,}"
    if row.kv_bytes is not None and row.predicted_bytes is None:
        held += " (not predicted)"
    return [
        held if row.agrees is not False else f"{held} ({row.predicted_bytes:,} predicted)",
        "–" if row.ratio is None else f"{row.ratio:.2f}×",
        "–" if row.ttft is None else f"{row.ttft.value:.2f}×",
        "–" if row.tpot is None else f"{row.tpot.value:.2f}×",
        "–" if row.working_bytes is None else format_bytes(row.working_bytes),
    ]


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
