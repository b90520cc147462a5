"""Quantized models onto the screen: the report to stdout, notes and warnings to stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvctl import output
from kvctl.units import format_bytes

if TYPE_CHECKING:
    from kvctl.measure.quality import Quality
    from kvctl.reports import Fit
    from kvctl.screen_lines import Row as Line
    from kvctl.weights.backends.environments import Plan
    from kvctl.weights.report import QuantizeReport, Row


def emit_quantize(report: QuantizeReport, form: str, *, quiet: bool) -> None:
    """Print what was made, in the form asked for."""
    output.forgive_encoding()
    if not quiet:
        output.say("note", (*report.notes, *(f"{row.name}: {note}" for row in report.rows for note in _notes(row))))
        output.say("warning", report.warnings)
    if form == "json":
        output.print_json(report.to_dict())
    elif form == "csv":
        flat = [line for row in report.rows for line in _flat(report, row)]
        if report.kv is not None:
            flat = [
                {
                    "model": report.model.id,
                    "format": row.name,
                    "kv_bytes": row.kv_bytes,
                    **_quality(row.quality),
                    **_fit(row.fit),
                }
                for row in report.kv.rows
            ]
        output.print_csv(flat)
    else:
        from kvctl.screen_quantize import lines_of, print_quantize, table_of

        if form == "md":
            head, *rows = table_of(report)
            output.print_markdown_table(head, rows)
            print()
            for line, _ in lines_of(report):
                print(f"- {output.markdown_cell(line)}")
        else:
            from kvctl.screen_lines import Screen

            print_quantize(Screen(), report)


def _notes(row: Row) -> tuple[str, ...]:
    return (*row.notes, *(() if row.judged is None else row.judged.notes))


def emit_ways(form: str) -> None:
    """Print the formats that are known."""
    from kvctl.weights.ways import TABLE

    output.forgive_encoding()
    rows = [
        {"format": way.name, "title": way.title, "made_with": way.by or way.backend or "kvctl", "read_by": way.readers}
        for way in TABLE
    ]
    if form == "json":
        output.print_json({"schema": "kvctl.weight-formats/1", "formats": rows})
    elif form == "csv":
        output.print_csv(rows)
    elif form == "md":
        output.print_markdown(rows)
    else:
        _listing(
            ("format", "made with", "what it is"), [[row["format"], row["made_with"], row["title"]] for row in rows]
        )
        from kvctl.screen_lines import Screen

        screen = Screen()
        screen.line()
        for readers in dict.fromkeys(row["read_by"] for row in rows):
            names = ", ".join(row["format"] for row in rows if row["read_by"] == readers)
            screen.line(f"{names}: read by {readers}")


def emit_backends(form: str) -> None:
    """Print other people's quantizers, and what is there of each."""
    from kvctl.weights.backends.environments import states

    output.forgive_encoding()
    found = states()
    rows = [state.to_dict() for state in found]
    if form == "json":
        output.print_json({"schema": "kvctl.backends/1", "backends": rows})
    elif form == "csv":
        output.print_csv([row | {"formats": " ".join(row["formats"])} for row in rows])
    elif form == "md":
        output.print_markdown([row | {"formats": ", ".join(row["formats"])} for row in rows])
    else:
        cells = [
            [
                one.backend.name,
                one.version,
                one.status,
                format_bytes(one.size),
                ", ".join(f.name for f in one.backend.formats),
            ]
            for one in found
        ]
        _listing(("backend", "version", "state", "takes", "makes"), cells)


def _listing(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from kvctl.screen_lines import Screen

    screen = Screen()
    table: list[Line] = [(list(row), None, "" if number else "dim") for number, row in enumerate([head, *rows])]
    screen.table("l" * len(head), table)


def may_install(plan: Plan, *, yes: bool) -> bool:
    """Say what a backend's environment takes, and ask where somebody can answer.

    Raises:
        UsageError: nobody can.

    """
    from kvctl.errors import UsageError

    how = "" if plan.size.measured else "about "
    words = (f"{plan.backend.name} {plan.backend.version} goes into an environment of its own: {plan.packages} packages, "
             f"{how}{format_bytes(plan.size.download_bytes)} to download, {how}{format_bytes(plan.size.installed_bytes)} on the disk, "
             f"in {plan.folder}")  # fmt: skip
    if yes:
        output.say("note", (words, *plan.notes))
        return True
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(words, hint="--yes agrees to that")
    output.say("note", (words, *plan.notes))
    print("Make it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _flat(report: QuantizeReport, row: Row) -> list[dict[str, Any]]:
    """Without what a cell cannot hold; a line for each format of the cache."""
    out: dict[str, Any] = {"model": report.model.id}
    out |= {
        name: value
        for name, value in row.to_dict().items()
        if not isinstance(value, list | dict) and name not in ("judged", "fit")
    }
    out |= {"context": report.context}
    if not row.caches:
        judged = row.judged
        return [out | {
            "cache": "plain", "kv_bytes": None, "perplexity": None if judged is None else judged.perplexity,
            **_quality(None if judged is None else judged.quality),
            "tokens_per_second": None if judged is None else judged.tokens_per_second, **_fit(row.fit), "broken": "; ".join(row.broken),
            "cache_tokens": None, "cache_measured_bytes": None, "cache_predicted_bytes": None,
        }]  # fmt: skip
    lines = []
    for cell in row.caches:
        judged_cell = cell.judged
        lines.append(out | {
            "cache": cell.name, "kv_bytes": cell.kv_bytes, "perplexity": None if judged_cell is None else judged_cell.perplexity,
            **_quality(cell.quality), "tokens_per_second": None if judged_cell is None else judged_cell.tokens_per_second,
            **_fit(cell.fit), "pareto": cell.pareto, "broken": "; ".join(cell.broken),
            "cache_tokens": None if judged_cell is None else judged_cell.kv_tokens, "cache_measured_bytes": None if judged_cell is None else judged_cell.kv_bytes,
            "cache_predicted_bytes": cell.predicted_bytes, "error": row.error or (None if judged_cell is None else judged_cell.error),
        })  # fmt: skip
    return lines


def _fit(fit: Fit | None) -> dict[str, Any]:
    """What fits, a cell each."""
    return {
        "max_context": None if fit is None else fit.max_context,
        "max_concurrency": None if fit is None else fit.max_concurrency,
    }


def _quality(found: Quality | None) -> dict[str, Any]:
    """Its figures, a cell each."""
    return {
        "perplexity_change_percent": None if found is None else found.perplexity_change.value,
        "perplexity_change_standard_error": None if found is None else found.perplexity_change.error,
        "kl_nats": None if found is None else found.kl.value,
        "kl_p99_nats": None if found is None else found.kl_p99,
        "top1_agreement": None if found is None else found.top1.value,
    }
