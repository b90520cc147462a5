"""Tables on a terminal, drawn with rich; every number in full, whatever the width."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvctl.reports import LayerRow, SizeReport, SizeResult
from kvctl.units import format_bytes, format_count
from kvctl.words import (
    copies_words,
    engine_words,
    format_words,
    formula_lines,
    held_words,
    kind_words,
    listing_cells,
    naive_words,
    one_line,
    scheme_words,
    title_words,
    unicode_output,
)

if TYPE_CHECKING:
    from rich.console import JustifyMethod

_PIPE_WIDTH = 120
# Narrower than this, the terminal breaks the lines: better than rich cutting numbers short.
_LEAST_WIDTH = 64

_ENGINE_WORDS = {
    "ideal": ": what the architecture needs, no engine's rounding",
    "transformers": ": the tensors of its DynamicCache",
}


class Screen:
    """A console that leaves no blanks at the ends of lines in a pipe."""

    def __init__(self) -> None:
        self.terminal = sys.stdout.isatty()
        width = None
        if not self.terminal and not os.environ.get("COLUMNS"):
            width = _PIPE_WIDTH
        self.console = Console(file=sys.stdout, width=width, highlight=False, emoji=False, markup=False)
        self.console.width = max(self.console.width, _LEAST_WIDTH)

    @property
    def width(self) -> int:
        return self.console.width

    def print(self, item: Any = "", *, soft_wrap: bool = False) -> None:
        if self.terminal:
            self.console.print(item, soft_wrap=soft_wrap)
            return
        with self.console.capture() as captured:
            self.console.print(item, soft_wrap=soft_wrap)
        sys.stdout.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))

    def title(self, text: str) -> None:
        self.print(Text(text, style="bold"), soft_wrap=True)


def print_listing(rows: Sequence[dict[str, Any]]) -> None:
    """The catalogue."""
    table = _new_table(("model", "left"), ("type", "left"), ("parameters", "right"), ("context", "right"))
    for row in rows:
        table.add_row(*listing_cells(row))
    Screen().print(table)


def print_size(report: SizeReport) -> None:
    """One model in detail, or several side by side."""
    screen = Screen()
    groups: dict[str, dict[int, SizeResult]] = {}
    for result in report.results:
        groups.setdefault(result.model.id, {})[result.context] = result
    if len(groups) > 1:
        _comparison(screen, [list(group.values()) for group in groups.values()])
        details = [max(group.values(), key=lambda r: r.context) for group in groups.values()]
        for result in details:
            _layer_list(screen, result)
            _formulas(screen, result)
        return
    (group,) = groups.values()
    if len(group) > 1:
        _ladder(screen, list(group.values()))
    largest = max(group.values(), key=lambda r: r.context)
    _one(screen, largest)
    _layer_list(screen, largest)
    _formulas(screen, largest)


def _new_table(*columns: tuple[str, JustifyMethod], header: bool = True) -> Table:
    table = Table(box=None, pad_edge=False, show_header=header, header_style="dim", padding=(0, 2, 0, 0))
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=justify == "right")
    return table


def _bar(part: int, whole: int, width: int = 16) -> Text:
    """A bar of eighths; something that is not nothing shows at least a sliver."""
    if not part or not whole:
        return Text("")
    if not unicode_output():
        return Text("#" * max(1, round(width * part / whole)))
    eighths = max(1, round(8 * width * part / whole))
    return Text("█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8], style="cyan")


def _share(part: int, whole: int) -> str:
    """Percent: 100% only for all of it, 0% only for nothing."""
    if not part or not whole:
        return "0%"
    if part == whole:
        return "100%"
    percent = 100 * part / whole
    if percent >= 99.95:
        return ">99.9%"
    if percent < 0.05:
        return "<0.1%"
    return f"{percent:.0f}%" if 9.95 <= percent < 99 else f"{percent:.1f}%"


def _one(screen: Screen, result: SizeResult) -> None:
    screen.title(title_words(result))
    table = _new_table(
        ("layers", "right"), ("kind", "left"), ("holds", "left"), ("size", "right"), ("share", "right"), ("", "left")
    )
    for row in sorted(result.layers, key=lambda row: -row.bytes):
        table.add_row(
            f"{row.count:,}",
            kind_words(row.kind),
            held_words(row.kind, row.tokens),
            format_bytes(row.bytes),
            _share(row.bytes, result.kv_bytes),
            _bar(row.bytes, result.kv_bytes),
            style="dim" if row.kind in ("none", "shared") else None,
        )
    if not result.layers:
        table.add_row("0", "none", "nothing", "0 B", "", "")
    screen.print(table)
    screen.print()
    facts = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(justify="right", no_wrap=True)
    facts.add_column(overflow="fold")
    for index, (name, size, detail) in enumerate(_facts(result)):
        facts.add_row(name, Text(size, style="bold" if index == 0 else ""), Text(one_line(detail)))
    screen.print(facts)


def _facts(result: SizeResult) -> list[tuple[str, str, str]]:
    """Name, size for people, exact number and what it is."""
    rows = [("KV cache", format_bytes(result.kv_bytes), f"{result.kv_bytes:,} bytes in {format_words(result)}")]
    exact = result.kv_bytes_per_token_exact
    if result.kv_bytes_per_token:
        each = f"{exact} bytes" if exact else f"{result.kv_bytes_per_token:,} bytes"
        rows.append(("+1 token", format_bytes(result.kv_bytes_per_token), f"{each} for each sequence"))
    else:
        rows.append(("+1 token", "0 B", "nothing grows any more at this context"))
    if result.kv_bytes_fixed:
        rows.append(
            ("fixed part", format_bytes(result.kv_bytes_fixed), f"{result.kv_bytes_fixed:,} bytes that do not grow")
        )
    count = f"{format_count(result.weights_parameters)} parameters, " if result.weights_parameters else ""
    if result.weights_bytes is not None:
        rows.append(("weights", format_bytes(result.weights_bytes), f"{count}{result.weights_source}"))
        rows.append(("together", format_bytes(result.kv_bytes + result.weights_bytes), "KV cache and weights"))
    elif result.model.source != "shape":
        rows.append(("weights", "unknown", f"{count}{result.weights_source or 'not in the source'}"))
    if result.kv_bytes and result.encoder_tokens:
        rows.append(("encoder", "", f"cross attention holds {result.encoder_tokens:,} positions"))
    scheme = scheme_words(result)
    if scheme:
        rows.append(("format", "", scheme))
    for key, value in result.model.overrides.items():
        rows.append(("what if", "", f"{key} = {value!r}"))
    revision = f" at {result.model.revision[:12]}" if result.model.revision else ""
    rows.append(("engine", "", engine_words(result) + _ENGINE_WORDS.get(result.engine, "")))
    rows.append(("source", "", f"{result.model.source}: {result.model.location}{revision}"))
    return rows


def _layer_list(screen: Screen, result: SizeResult) -> None:
    """Every layer; neighbours that are alike share a line."""
    if result.per_layer is None:
        return
    screen.print()
    screen.title(one_line(f"{result.model.id}, layer by layer"))
    table = _new_table(("layer", "right"), ("kind", "left"), ("holds", "left"), ("bytes each", "right"))
    for first, last in _runs(result.per_layer):
        span = str(first.index) if first is last else f"{first.index}–{last.index}"
        for position, state in enumerate(first.states):
            held = held_words(state.kind, state.tokens)
            table.add_row("" if position else span, kind_words(state.kind), held, f"{state.bytes:,}")
    screen.print(table)


def _runs(layers: Sequence[LayerRow]) -> list[tuple[LayerRow, LayerRow]]:
    """First and last of every run of equal neighbours."""
    runs: list[tuple[LayerRow, LayerRow]] = []
    for layer in layers:
        if runs and runs[-1][0].states == layer.states:
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    return runs


def _formulas(screen: Screen, result: SizeResult) -> None:
    """On a screen a formula breaks between words, under itself; in a pipe it stays one line, for grep."""
    if not result.formulas:
        return
    screen.print()
    screen.title(one_line(f"{result.model.id}, step by step"))
    lines = [Text.assemble((kind, "cyan"), ": ", text) for kind, text in formula_lines(result)]
    naive = naive_words(result)
    if naive:
        lines.append(Text(naive, style="yellow"))
    for line in lines:
        if not screen.terminal:
            screen.print(Text("  ") + line, soft_wrap=True)
            continue
        for index, part in enumerate(line.wrap(screen.console, screen.width - 4)):
            screen.print(Text("    " if index else "  ") + part)


def _ladder(screen: Screen, group: Sequence[SizeResult]) -> None:
    """Memory against context for one model."""
    first = group[0]
    screen.title(one_line(f"{first.model.id}: {copies_words(first)}, by context"))
    table = _new_table(
        ("context", "right"), ("KV cache", "right"), ("bytes", "right"), ("+1 token", "right"), ("", "left")
    )
    largest = max(result.kv_bytes for result in group)
    for result in group:
        table.add_row(
            f"{result.context:,}",
            format_bytes(result.kv_bytes),
            f"{result.kv_bytes:,}",
            format_bytes(result.kv_bytes_per_token),
            _bar(result.kv_bytes, largest, min(24, screen.width - 52)),
        )
    screen.print(table)
    screen.print()


def _comparison(screen: Screen, groups: Sequence[Sequence[SizeResult]]) -> None:
    """Several models: one line each, or with several contexts a name and a line for every context."""
    results = [result for group in groups for result in group]
    first = results[0]
    names = _display_names(results)
    stacked = max(len(group) for group in groups) > 1
    head = ["context" if stacked else "", "KV cache", "+1 token", "fixed"] + ([] if stacked else ["weights"])
    cells = {id(result): _comparison_cells(result, names, stacked=stacked) for result in results}
    if not any(result.kv_bytes_fixed for result in results):
        for row in (head, *cells.values()):
            del row[3]
    widths = [max(len(row[column]) for row in (head, *cells.values())) for column in range(len(head))]
    room = min(24, screen.width - sum(widths) - 2 * len(widths))
    largest = max(result.kv_bytes for result in results)

    def line(row: Sequence[str], bar: Text, style: str) -> Text:
        parts = [cell.rjust(width) if column or stacked else cell.ljust(width)
                 for column, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        text = Text("  ".join(parts), style=style)
        if not style:
            start = len(parts[0]) + 2
            text.stylize("bold", start, start + len(parts[1]))
        return text + Text("  ") + bar

    where = "" if stacked else f"{first.context:,} tokens × "
    formats = {format_words(result) for result in results}
    cache = f", {formats.pop()} cache" if len(formats) == 1 else ""
    screen.title(f"{where}{copies_words(first)}{cache}, engine {engine_words(first)}; +1 token is for each sequence")
    screen.print(line(head, Text(""), "dim"), soft_wrap=True)
    for group in groups:
        if stacked:
            weights = _weights(group[0])
            screen.print(Text.assemble((names[group[0].model.id], "bold"), f"  (weights {weights})"), soft_wrap=True)
        for result in group:
            bar = _bar(result.kv_bytes, largest, room) if room >= 6 else Text("")
            screen.print(line(cells[id(result)], bar, ""), soft_wrap=True)


def _comparison_cells(result: SizeResult, names: dict[str, str], *, stacked: bool) -> list[str]:
    cells = [
        f"{result.context:,}" if stacked else names[result.model.id],
        format_bytes(result.kv_bytes),
        format_bytes(result.kv_bytes_per_token),
        format_bytes(result.kv_bytes_fixed),
    ]
    return cells if stacked else [*cells, _weights(result)]


def _weights(result: SizeResult) -> str:
    return "unknown" if result.weights_bytes is None else format_bytes(result.weights_bytes)


def _display_names(results: Sequence[SizeResult]) -> dict[str, str]:
    """Names without organisation, where that leaves them different."""
    ids = list(dict.fromkeys(result.model.id for result in results))
    short = {name: one_line(name.rpartition("/")[2] or name) for name in ids}
    clash = len(set(short.values())) < len(ids)
    return {name: one_line(name) if clash else short[name] for name in ids}
