"""Reports onto the screen: the one place that prints. Data to stdout, the rest to stderr."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvctl import __version__
from kvctl.reports import Fit, SizeReport
from kvctl.units import format_bytes
from kvctl.words import (
    beside_own_words,
    copies_words,
    engine_words,
    fit_cells,
    format_words,
    formula_lines,
    gpu_cells,
    held_words,
    kind_words,
    listing_cells,
    naive_words,
    of_own_structure,
    one_line,
    reserved_words,
    title_words,
    unicode_output,
    what_if_words,
)

if TYPE_CHECKING:
    from kvctl.plot import Chart
    from kvctl.plot.scatter import Scatter


def say(kind: str, lines: Iterable[str]) -> None:
    """Notes and warnings, each once; on a screen they break between words."""
    for line in dict.fromkeys(lines):
        text = f"{kind}: {one_line(line)}"
        if sys.stderr.isatty():
            import shutil
            import textwrap

            width = max(40, shutil.get_terminal_size().columns - 1)
            text = textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        # A stderr that takes nothing is no reason to keep the answer back.
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr)


def emit_size(report: SizeReport, form: str, *, quiet: bool = False) -> None:
    """Print a size report in the form asked for."""
    forgive_encoding()
    if not quiet:
        several = len({result.model.id for result in report.results}) > 1
        for kind, lines in (("note", _notes(report)), ("warning", _warnings(report))):
            say(kind, (f"{name}: {line}" if several else line for name, line in lines))
        say("no answer from", report.refused)
        if form in ("json", "csv"):
            say("no answer for", (one.words for one in report.missing))
    if form == "json":
        print_json(report.to_dict())
    elif form == "csv":
        print_csv(_aside_rows(report) or _size_rows(report))
    elif form == "md":
        rows = _aside_rows(report)
        print_markdown(rows) if rows else _markdown(report)
    else:
        from kvctl.screen import print_size

        print_size(report)


def emit_listing(rows: Sequence[dict[str, Any]], form: str) -> None:
    """Print catalogue rows: id, model_type, parameters, max_context."""
    forgive_encoding()
    if form == "json":
        print_json({"schema": "kvctl.models/1", "kvctl_version": __version__, "models": list(rows)})
    elif form == "csv":
        print_csv(rows)
    elif form == "md":
        print("| model | type | parameters | context |\n|---|---|---:|---:|")
        for row in rows:
            print("| " + " | ".join(listing_cells(row)) + " |")
    elif not sys.stdout.isatty():
        # For pipes: one name a line, so that grep, fzf and xargs work.
        for row in rows:
            print(row["id"])
    else:
        from kvctl.screen import print_listing

        print_listing(rows)


def emit_chart(chart: Chart | Scatter, path: str) -> None:
    """Draw a chart into a file, or on the terminal for "-"."""
    from kvctl import plot

    if path != "-":
        plot.write(chart, path)
        return
    import os
    import shutil

    forgive_encoding()
    size = shutil.get_terminal_size((100, 30))
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    drawn = plot.terminal(chart, size.columns, min(size.lines - 2, 30), colour=colour, unicode=unicode_output())
    sys.stdout.write(drawn)


@contextlib.contextmanager
def progress(what: str, *, quiet: bool) -> Iterator[Callable[[int], None] | None]:
    """A count on stderr that is overwritten as it grows; nothing where that is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return

    def show(count: int) -> None:
        with contextlib.suppress(OSError):
            print(f"\r{count:,} {what}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        with contextlib.suppress(OSError):
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def emit_gpus(rows: Sequence[dict[str, Any]], form: str) -> None:
    """Print rows of the GPU table: name, memory_mib, bandwidth_gbs, fp16_tflops, compute_capability, nvml_names."""
    forgive_encoding()
    if form == "json":
        print_json({"schema": "kvctl.gpus/1", "kvctl_version": __version__, "gpus": list(rows)})
    elif form == "csv":
        print_csv(
            [row | {"nvml_names": " | ".join(row["nvml_names"]), "aliases": " | ".join(row["aliases"])} for row in rows]
        )
    elif form == "md":
        print("| GPU | memory | bandwidth | dense FP16 | as the driver names it |\n|---|---:|---:|---:|---|")
        for row in rows:
            print("| " + " | ".join(gpu_cells(row)) + " |")
    elif not sys.stdout.isatty():
        for row in rows:
            print(row["name"])
    else:
        from kvctl.screen import print_gpus

        print_gpus(rows)


def _notes(report: SizeReport) -> list[tuple[str, str]]:
    return [
        (result.model.id, note)
        for result in report.results
        for note in (*result.model.notes, *(result.fit.notes if result.fit is not None else ()))
    ]


def _warnings(report: SizeReport) -> list[tuple[str, str]]:
    log = report.log
    found = [(log.log.path, note) for note in log.notes] if log is not None else []
    return found + [(result.model.id, line) for result in report.results for line in result.warnings]


# -- encodings ----------------------------------------------------------------------------

_PLAIN = {"×": "x", "−": "-", "⌊": "floor(", "⌋": ")", "…": "...", "·": "-", "–": "-", "█": "#"}


def forgive_encoding() -> None:
    """A character that the terminal's encoding lacks gets a stand-in, not a traceback."""
    import codecs

    def stand_in(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        bad = error.object[error.start : error.end]
        return "".join(_PLAIN.get(char, "?") for char in bad), error.end

    codecs.register_error("kvctl", stand_in)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="kvctl")


# -- JSON and CSV ---------------------------------------------------------------------------


_CONTROLS = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def print_json(document: dict[str, Any]) -> None:
    """One JSON document on stdout."""
    import json

    text = json.dumps(document, indent=2, ensure_ascii=not unicode_output(), allow_nan=False)
    # JSON escapes only the first 32; the others steer terminals too.
    print(_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def print_csv(rows: Sequence[dict[str, Any]]) -> None:
    """Flat rows on stdout, with a header."""
    import csv

    if not rows:
        return
    # Engines that plan nothing ahead have fewer columns.
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(sys.stdout, list(names), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: one_line(value) if isinstance(value, str) else value for key, value in row.items()})


def fit_columns(fit: Fit) -> dict[str, Any]:
    """A fit as flat columns."""
    names = ("fits", "device_bytes", "kv_bytes", "overhead_bytes", "headroom_bytes", "max_context", "max_concurrency",
             "bottleneck_rank")  # fmt: skip
    return {"rank_kv_bytes" if name == "kv_bytes" else name: getattr(fit, name) for name in names} | {
        "rank_weights_bytes": fit.weights_bytes
    }


def _size_rows(report: SizeReport) -> list[dict[str, Any]]:
    """Flat rows: one a result, or one for each state of each layer with --per-layer."""
    rows = []
    for result in report.results:
        base = {
            "model": result.model.id,
            "engine": result.engine,
            "technique": result.technique or "",
            "what_if": result.what_if or "",
            "context": result.context,
            "sequences": result.sequences,
            "beams": result.beams,
            "k_dtype": result.k_dtype,
            "v_dtype": result.v_dtype,
        }
        if result.per_layer is not None:
            rows += [
                base | {"layer": layer.index, "kind": state.kind, "tokens": state.tokens, "bytes": state.bytes}
                for layer in result.per_layer
                for state in layer.states
            ]
            continue
        plan = result.allocation
        planned = plan and {
            "tensor_parallel_size": plan.tensor_parallel_size,
            "reserved_bytes": plan.reserved_bytes,
            "block_size": plan.block_size,
            "bytes_per_block": plan.bytes_per_block,
            "num_blocks": plan.num_blocks,
            "reported_capacity": plan.reported_capacity,
            "max_concurrency": plan.max_concurrency,
        }
        rows.append(
            base
            | {
                "kv_bytes": result.kv_bytes,
                "kv_bytes_per_token": result.kv_bytes_per_token,
                "kv_bytes_fixed": result.kv_bytes_fixed,
                "weights_bytes": result.weights_bytes,
                "parameters": result.weights_parameters,
                "source": result.model.source,
                "location": result.model.location,
                "overrides": " ".join(f"{key}={value}" for key, value in result.model.overrides.items()),
            }
            | (planned or {})
            | (fit_columns(result.fit) if result.fit is not None else {})
        )
    return rows


def _aside_rows(report: SizeReport) -> list[dict[str, Any]]:
    """Rows of a log that is explained, or of a replay: what was asked for in place of sizes."""
    if report.log is not None:
        names = ("line", "name", "said", "low", "high", "agrees", "difference", "cause")
        return [{name: getattr(row, name) for name in names} for row in report.log.rows]
    return [
        {"model": result.model.id, "engine": result.engine, "context": result.context} | policy.to_dict()
        for result in report.results
        if result.replay is not None
        for policy in result.replay.policies
    ]


# -- Markdown --------------------------------------------------------------------------------


def print_markdown(rows: Sequence[dict[str, Any]]) -> None:
    """Plain rows, the first one's keys as the header; long ones stand upright."""
    if len(rows[0]) > 10:
        upright = "policy" if "policy" in rows[0] else None
        print("| | " + " | ".join(str(row[upright]) if upright else "" for row in rows) + " |")
        print("|---|" + "---:|" * len(rows))
        for name in rows[0]:
            if name != upright:
                print(f"| {name} | " + " | ".join(one_line(str(row[name])) for row in rows) + " |")
        return
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        cells = (one_line("" if value is None else str(value)).replace("|", "\\|") for value in row.values())
        print("| " + " | ".join(cells) + " |")


def markdown_cell(text: str) -> str:
    """Text as it may stand in a table or a line of Markdown."""
    return one_line(text).replace("|", "\\|")


def print_markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> None:
    """Rows for people: as many columns as have words to the left, the others to the right."""
    print("| " + " | ".join(map(markdown_cell, head)) + " |")
    print("|" + "---|" * words + "---:|" * (len(head) - words))
    for row in rows:
        print("| " + " | ".join(map(markdown_cell, row)) + " |")


def _markdown(report: SizeReport) -> None:
    planned = any(result.allocation for result in report.results)
    reserved = " reserved |" if planned else ""
    fitted = any(result.fit for result in report.results)
    engines = len({result.engine for result in report.results}) > 1
    own = of_own_structure(report.results)
    imagined = bool(report.missing) or any(beside_own_words(result, own(result)) for result in report.results)
    columns = 8 + planned + 4 * fitted + imagined

    def without(place: int) -> None:
        for one in report.missing:
            if one.after == place:
                cells = (one.model + " " + one.name, *["–"] * (columns - 1), one.why)
                print("| " + " | ".join(map(markdown_cell, cells)) + " |")

    print(f"| model | context | held for | format | KV cache | bytes |{reserved} +1 token | fixed | weights |"
          + " fits | headroom | longest context | requests at once |" * fitted + " beside its own |" * imagined)  # fmt: skip
    print(
        "|---|---:|---|---|---:|---:|"
        + "---:|" * planned
        + "---:|---:|---:|"
        + "---|---:|---:|---:|" * fitted
        + "---|" * imagined
    )
    for place, result in enumerate(report.results, 1):
        cells = (
            (one_line(result.model.id) + what_if_words(result)).replace("|", "\\|")
            + (f", {engine_words(result)}" if engines else ""),
            f"{result.context:,}",
            copies_words(result),
            format_words(result),
            format_bytes(result.kv_bytes),
            f"{result.kv_bytes:,}",
            *((reserved_words(result),) if planned else ()),
            format_bytes(result.kv_bytes_per_token),
            format_bytes(result.kv_bytes_fixed),
            "unknown" if result.weights_bytes is None else format_bytes(result.weights_bytes),
            *(fit_cells(result) if fitted else ()),
            *((beside_own_words(result, own(result)),) if imagined else ()),
        )
        print("| " + " | ".join(cells) + " |")
        without(place)
    for result in report.results:
        if result.per_layer is not None:
            print(f"\n{title_words(result)}\n\n| layer | kind | holds | bytes |\n|---:|---|---|---:|")
            for layer in result.per_layer:
                for state in layer.states:
                    held = held_words(state.kind, state.tokens)
                    print(f"| {layer.index} | {kind_words(state.kind)} | {held} | {state.bytes:,} |")
        if result.formulas:
            print(f"\n{title_words(result)}\n")
            for kind, text in formula_lines(result):
                print(f"- {kind}: {text}")
            naive = naive_words(result)
            if naive:
                print(f"- {naive}")
