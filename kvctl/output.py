"""Reports onto the screen: the one place that prints. Data to stdout, the rest to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvctl import __version__
from kvctl.reports import SizeReport, SizeResult
from kvctl.units import format_bytes, format_count, plural

if TYPE_CHECKING:
    from rich.console import Console

_PIPE_WIDTH = 120


def one_line(text: str) -> str:
    """Text from outside as one line without control characters: nothing may steer the terminal."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split(" ")).strip()


def say(kind: str, lines: Iterable[str]) -> None:
    """Notes and warnings, each once."""
    for line in dict.fromkeys(lines):
        print(f"{kind}: {one_line(line)}", file=sys.stderr)


def emit_size(report: SizeReport, form: str, *, quiet: bool = False) -> None:
    """Print a size report in the form asked for."""
    _forgive_encoding()
    if not quiet:
        say("note", (note for result in report.results for note in result.model.notes))
        say("warning", (_about(report, result, line) for result in report.results for line in result.warnings))
    if form == "json":
        _json(report.to_dict())
    elif form == "csv":
        _csv(_size_rows(report))
    elif form == "md":
        _markdown(report)
    else:
        _table(report)


def emit_listing(rows: Sequence[dict[str, Any]], form: str) -> None:
    """Print catalogue rows: id, model_type, parameters, max_context."""
    _forgive_encoding()
    if form == "json":
        _json({"schema": "kvctl.models/1", "kvctl_version": __version__, "models": list(rows)})
    elif form == "csv":
        _csv(rows)
    elif form == "md":
        print("| model | type | parameters | context |\n|---|---|---:|---:|")
        for row in rows:
            print("| " + " | ".join(_listing_cells(row)) + " |")
    elif not sys.stdout.isatty():
        # For pipes: one name a line, so that grep, fzf and xargs work.
        for row in rows:
            print(row["id"])
    else:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for name, justify in (("model", "left"), ("type", "left"), ("parameters", "right"), ("context", "right")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        for row in rows:
            table.add_row(*_listing_cells(row))
        _console().print(table)


def _listing_cells(row: dict[str, Any]) -> tuple[str, ...]:
    parameters, context = row.get("parameters"), row.get("max_context")
    return (
        str(row["id"]),
        str(row.get("model_type") or ""),
        format_count(parameters) if parameters else "",
        f"{context:,}" if context else "",
    )


def _about(report: SizeReport, result: SizeResult, line: str) -> str:
    several = len({r.model.id for r in report.results}) > 1
    return f"{result.model.id}: {line}" if several else line


def _forgive_encoding() -> None:
    """A character that the terminal's encoding lacks gets a stand-in, not a traceback."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace" if _unicode() else "replace")


def _unicode() -> bool:
    return "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()


def _json(document: dict[str, Any]) -> None:
    import json

    print(json.dumps(document, indent=2, ensure_ascii=not _unicode()))


def _csv(rows: Sequence[dict[str, Any]]) -> None:
    import csv

    if not rows:
        return
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _size_rows(report: SizeReport) -> list[dict[str, Any]]:
    """Flat rows: one a result, or one a layer with --per-layer."""
    rows = []
    for result in report.results:
        base = {
            "model": result.model.id,
            "engine": result.engine,
            "context": result.context,
            "sequences": result.sequences,
            "k_dtype": result.k_dtype,
            "v_dtype": result.v_dtype,
        }
        if result.per_layer is not None:
            for layer in result.per_layer:
                for state in layer.states:
                    rows.append(base | {"layer": layer.index, "kind": state.kind, "tokens": state.tokens, "bytes": state.bytes})
            continue
        rows.append(
            base
            | {
                "kv_bytes": result.kv_bytes,
                "kv_bytes_per_token": result.kv_bytes_per_token,
                "kv_bytes_fixed": result.kv_bytes_fixed,
                "weights_bytes": result.weights_bytes,
                "parameters": result.weights_parameters,
                "source": result.model.source,
            }
        )
    return rows


# -- words that table and Markdown share ---------------------------------------------------


def _kind(kind: str) -> str:
    return kind.replace("_", " ")


_HOLDS = {"none": "nothing", "shared": "another layer's cache", "compressed_attention": "entries",
          "cross_attention": "positions"}  # fmt: skip


def _held(kind: str, tokens: int) -> str:
    """What a kind of state holds for one sequence."""
    if kind in ("none", "shared"):
        return _HOLDS[kind]
    if not tokens:
        return "fixed size" if kind.endswith("_state") else "nothing yet"
    return f"{tokens:,} {_HOLDS.get(kind, 'tokens')}"


def _title(result: SizeResult) -> str:
    beams = f" × {plural(result.beams, 'beam')}" if result.beams > 1 else ""
    return f"{result.model.id}: {result.context:,} tokens × {plural(result.sequences, 'sequence')}{beams}"


def _formats(result: SizeResult) -> str:
    if result.k_dtype == result.v_dtype:
        return result.k_dtype
    return f"K {result.k_dtype}, V {result.v_dtype}"


def _schemes(result: SizeResult) -> str:
    """How the formats count, where that is more than a plain element."""
    parts = []
    for letter, name, scheme in (("K", result.k_dtype, result.k_scheme), ("V", result.v_dtype, result.v_scheme)):
        if not scheme.endswith("bytes an element"):
            parts.append((letter, name, scheme))
    if len(parts) == 2 and parts[0][1] == parts[1][1]:
        return f"{parts[0][1]}: {parts[0][2]}"
    return "; ".join(f"{letter} {name}: {scheme}" for letter, name, scheme in parts)


def _engine(result: SizeResult) -> str:
    return f"{result.engine} {result.engine_version}" if result.engine_version else result.engine


def _facts(result: SizeResult) -> list[tuple[str, str, str]]:
    """Name, size for people, exact number and what it is."""
    rows = [("KV cache", format_bytes(result.kv_bytes), f"{result.kv_bytes:,} bytes in {_formats(result)}")]
    exact = result.kv_bytes_per_token_exact
    each = f"{exact} bytes" if exact else f"{result.kv_bytes_per_token:,} bytes"
    if result.kv_bytes_per_token:
        rows.append(("+1 token", format_bytes(result.kv_bytes_per_token), f"{each} for each sequence"))
    else:
        rows.append(("+1 token", "0 B", "nothing grows any more at this context"))
    if result.kv_bytes_fixed:
        rows.append(("fixed part", format_bytes(result.kv_bytes_fixed), f"{result.kv_bytes_fixed:,} bytes that do not grow"))
    if result.weights_bytes is not None:
        count = f"{format_count(result.weights_parameters)} parameters, " if result.weights_parameters else ""
        rows.append(("weights", format_bytes(result.weights_bytes), f"{count}{result.weights_source}"))
    elif result.weights_parameters:
        rows.append(("weights", "unknown", f"{format_count(result.weights_parameters)} parameters, {result.weights_source}"))
    if result.kv_bytes and result.encoder_tokens:
        rows.append(("encoder", "", f"cross attention holds {result.encoder_tokens:,} positions"))
    scheme = _schemes(result)
    if scheme:
        rows.append(("format", "", scheme))
    for key, value in result.model.overrides.items():
        rows.append(("what if", "", f"{key} = {value!r}"))
    revision = f" at {result.model.revision[:12]}" if result.model.revision else ""
    rows.append(("engine", "", _engine(result) + _ENGINE_WORDS.get(result.engine, "")))
    rows.append(("source", "", f"{result.model.source}: {result.model.location}{revision}"))
    return rows


_ENGINE_WORDS = {
    "ideal": ": what the architecture needs, no engine's rounding",
    "transformers": ": the tensors of its DynamicCache",
}


def _naive(result: SizeResult) -> str | None:
    """What the usual formula would have said, where that differs."""
    naive = result.naive_bytes
    if naive is None or naive == result.kv_bytes or not result.kv_bytes:
        return None
    factor = naive / result.kv_bytes
    how = f"{factor:,.1f}x too much" if factor > 1 else f"{1 / factor:,.1f}x too little"
    return f"2 × layers × KV heads × head dim would say {format_bytes(naive)} ({naive:,} bytes): {how}"


def _share(part: int, whole: int) -> str:
    if not part or not whole:
        return "0%"
    percent = 100 * part / whole
    return f"{percent:.0f}%" if percent >= 9.95 else f"{percent:.1f}%" if percent >= 0.05 else "<0.1%"


# -- table -----------------------------------------------------------------------------------


def _console() -> Console:
    from rich.console import Console

    width = None
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        width = _PIPE_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False, emoji=False, markup=False)


def _bar(part: int, whole: int, width: int = 16) -> str:
    """A bar of eighths; something that is not nothing shows at least a sliver."""
    if not part or not whole:
        return ""
    if not _unicode():
        return "#" * max(1, round(width * part / whole))
    eighths = max(1, round(8 * width * part / whole))
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def _table(report: SizeReport) -> None:
    console = _console()
    results = report.results
    groups: dict[str, list[SizeResult]] = {}
    for result in results:
        groups.setdefault(result.model.id, []).append(result)
    if len(groups) > 1:
        _comparison(console, results)
        if any(result.formulas for result in results):
            for group in groups.values():
                _formulas(console, group[-1])
        return
    group = next(iter(groups.values()))
    if len(group) > 1:
        _ladder(console, group)
    _one(console, group[-1])


def _one(console: Console, result: SizeResult) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(Text(one_line(_title(result)), style="bold"))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("layers", justify="right")
    table.add_column("kind")
    table.add_column("holds")
    table.add_column("size", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    for row in sorted(result.layers, key=lambda row: -row.bytes):
        empty = row.kind in ("none", "shared")
        table.add_row(
            f"{row.count:,}",
            _kind(row.kind),
            _held(row.kind, row.tokens),
            format_bytes(row.bytes),
            _share(row.bytes, result.kv_bytes),
            Text(_bar(row.bytes, result.kv_bytes), style="cyan"),
            style="dim" if empty else None,
        )
    if not result.layers:
        table.add_row("0", "none", "nothing", "0 B", "", "")
    console.print(table)
    console.print()
    facts = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(justify="right", no_wrap=True)
    facts.add_column(overflow="fold")
    for index, (name, size, detail) in enumerate(_facts(result)):
        style = "bold" if index == 0 else ""
        facts.add_row(name, Text(size, style=style), Text(one_line(detail)))
    console.print(facts)
    if result.per_layer is not None:
        console.print()
        _layer_list(console, result)
    _formulas(console, result)


def _layer_list(console: Console, result: SizeResult) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name, justify in (("layer", "right"), ("kind", "left"), ("holds", "left"), ("bytes", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for layer in result.per_layer or ():
        for position, state in enumerate(layer.states):
            table.add_row("" if position else str(layer.index), _kind(state.kind), _held(state.kind, state.tokens), f"{state.bytes:,}")
    console.print(table)


def _formulas(console: Console, result: SizeResult) -> None:
    from rich.text import Text

    if not result.formulas:
        return
    # In a pipe a formula stays one line, for grep; on a screen it breaks between words, under itself.
    lines = [(_kind(f.kind) + ": ", f.text, "") for f in result.formulas]
    lines.append(("total: ", f"{result.kv_bytes:,} B = {format_bytes(result.kv_bytes)}", ""))
    naive = _naive(result)
    if naive:
        lines.append(("", naive, "yellow"))
    console.print()
    console.print(Text(one_line(f"{result.model.id}, step by step"), style="bold"))
    for kind, text, style in lines:
        line = Text.assemble("  " if not console.is_terminal else "", (kind, "cyan"), (text, style))
        if console.is_terminal:
            for index, part in enumerate(line.wrap(console, max(20, console.width - 4))):
                console.print(Text("    " if index else "  ") + part)
        else:
            console.print(line, soft_wrap=True)


def _ladder(console: Console, group: Sequence[SizeResult]) -> None:
    """Memory against context for one model."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("context", "KV cache", "bytes", "+1 token"):
        table.add_column(name, justify="right")
    table.add_column("")
    first = group[0]
    console.print(Text(one_line(f"{first.model.id}: by context, {plural(first.sequences, 'sequence')}"), style="bold"))
    largest = max(result.kv_bytes for result in group)
    for result in group:
        table.add_row(
            f"{result.context:,}",
            format_bytes(result.kv_bytes),
            f"{result.kv_bytes:,}",
            format_bytes(result.kv_bytes_per_token),
            Text(_bar(result.kv_bytes, largest, 24), style="cyan"),
        )
    console.print(table)
    console.print()


def _comparison(console: Console, results: Sequence[SizeResult]) -> None:
    from rich.table import Table
    from rich.text import Text

    contexts = list(dict.fromkeys(result.context for result in results))
    names = _display_names(results)
    wide = console.width >= 100
    fixed = any(result.kv_bytes_fixed for result in results)
    weights = any(result.weights_bytes is not None for result in results)
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("model", overflow="fold")
    columns = ["context"] * (len(contexts) > 1) + ["KV cache", "+1 token"] + ["fixed"] * fixed + ["weights"] * weights
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    if wide:
        table.add_column("", no_wrap=True)
    largest = max(result.kv_bytes for result in results)
    previous = None
    for result in results:
        cells: list[Any] = [Text(names[result.model.id] if result.model.id != previous else "")]
        previous = result.model.id
        values = {
            "context": f"{result.context:,}",
            "KV cache": Text(format_bytes(result.kv_bytes), style="bold"),
            "+1 token": format_bytes(result.kv_bytes_per_token),
            "fixed": format_bytes(result.kv_bytes_fixed),
            "weights": "?" if result.weights_bytes is None else format_bytes(result.weights_bytes),
        }
        cells += [values[name] for name in columns]
        if wide:
            cells.append(Text(_bar(result.kv_bytes, largest, 10), style="cyan"))
        table.add_row(*cells)
    first = results[0]
    formats = {_formats(result) for result in results}
    where = f"{contexts[0]:,} tokens × " if len(contexts) == 1 else ""
    cache = f", {formats.pop()} cache" if len(formats) == 1 else ""
    console.print(Text(f"{where}{plural(first.sequences, 'sequence')}{cache}, engine {_engine(first)}", style="bold"))
    console.print(table)


def _display_names(results: Sequence[SizeResult]) -> dict[str, str]:
    """Names without organisation, where that leaves them different."""
    ids = list(dict.fromkeys(result.model.id for result in results))
    short = {name: one_line(name.rpartition("/")[2] or name) for name in ids}
    clash = len(set(short.values())) < len(ids)
    return {name: one_line(name) if clash else short[name] for name in ids}


# -- Markdown --------------------------------------------------------------------------------


def _markdown(report: SizeReport) -> None:
    print("| model | context | sequences | format | KV cache | bytes | +1 token | fixed | weights |")
    print("|---|---:|---:|---|---:|---:|---:|---:|---:|")
    for result in report.results:
        weights = "" if result.weights_bytes is None else format_bytes(result.weights_bytes)
        cells = (
            one_line(result.model.id).replace("|", "\\|"),
            f"{result.context:,}",
            f"{result.sequences:,}",
            _formats(result),
            format_bytes(result.kv_bytes),
            f"{result.kv_bytes:,}",
            f"{result.kv_bytes_per_token:,}",
            f"{result.kv_bytes_fixed:,}",
            weights,
        )
        print("| " + " | ".join(cells) + " |")
    for result in report.results:
        if result.per_layer is not None:
            print(f"\n{_title(result)}\n\n| layer | kind | tokens | bytes |\n|---:|---|---:|---:|")
            for layer in result.per_layer:
                for state in layer.states:
                    print(f"| {layer.index} | {_kind(state.kind)} | {state.tokens:,} | {state.bytes:,} |")
        if result.formulas:
            print(f"\n{_title(result)}\n")
            for formula in result.formulas:
                print(f"- {_kind(formula.kind)}: {formula.text}")
            naive = _naive(result)
            if naive:
                print(f"- {naive}")
