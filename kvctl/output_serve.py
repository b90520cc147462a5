"""Load tests onto the screen: the report to stdout, notes to stderr."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvctl import output
from kvctl.errors import ExitCode

if TYPE_CHECKING:
    from kvctl.loadtest.calibrate import Calibration
    from kvctl.loadtest.compare import Comparison
    from kvctl.loadtest.report import ServeReport
    from kvctl.loadtest.run import Outcome


def emit_serve(
    report: ServeReport, form: str, *, quiet: bool, explain: bool, comparison: Comparison | None = None
) -> None:
    """Print what was found, in the form asked for, and what it is beside an earlier run."""
    output.forgive_encoding()
    if not quiet:
        output.say("note", report.notes)
    if form == "json":
        document = report.to_dict()
        output.print_json(document | ({"comparison": comparison.to_dict()} if comparison is not None else {}))
    elif form == "csv":
        output.print_csv(
            [_flat(one) for one in report.outcomes]
            if comparison is None
            else [{"load": one.name, **row.to_dict()} for one in comparison.loads for row in one.rows]
        )
    else:
        from kvctl.screen_serve import (
            comparison_lines,
            comparison_table,
            lines_of,
            print_comparison,
            print_serve,
            table_of,
        )

        if form == "md":
            parts = [(table_of(report), lines_of(report, explain=explain))]
            if comparison is not None:
                parts.append((comparison_table(comparison), comparison_lines(comparison)))
            for number, ((head, *rows), lines) in enumerate(parts):
                if number:
                    print()
                output.print_markdown_table(head, rows)
                print()
                for line, _ in lines:
                    print(f"- {output.markdown_cell(line)}")
        else:
            from kvctl.screen_lines import Screen

            print_serve(Screen(), report, explain=explain)
            if comparison is not None:
                print_comparison(Screen(), comparison)


def write_files(
    report: ServeReport, comparison: Comparison | None, *, explain: bool, save: str | None, page: str | None,
    prometheus: str | None, junit: str | None,
) -> None:  # fmt: skip
    """Write what a path is given of, each whole; nothing of a run that came to no load.

    Raises:
        KvctlError: one cannot be written; those before it are.

    """
    if not report.outcomes:
        return
    from kvctl.files import write_whole

    if save is not None:
        from kvctl.loadtest import saved

        saved.save(report, save)
    if page is not None:
        from kvctl.plot import serve
        from kvctl.screen_serve import comparison_lines, comparison_table, heading, lines_of, table_of

        beside = None
        if comparison is not None:
            beside = comparison_table(comparison), comparison_lines(comparison)
        lines = lines_of(report, explain=explain)
        drawn = serve.page(report, heading(report), table_of(report), lines, beside)
        write_whole(page, drawn.encode())
    if prometheus is not None:
        from kvctl.loadtest.textfile import textfile

        write_whole(prometheus, textfile(report))
    if junit is not None:
        from kvctl.loadtest import junit as cases

        write_whole(junit, cases.junit(report, comparison))


def outcome(report: ServeReport, comparison: Comparison | None) -> Iterator[tuple[Sequence[str], ExitCode]]:
    """What is wrong, and the status that says so, the worst first."""
    if report.failed:
        yield report.failed, ExitCode.FAILED
    broken = [*report.missed, *(comparison.broken if comparison is not None else ())]
    if broken:
        yield broken, ExitCode.ANSWER_IS_NO
    if comparison is not None and comparison.untold:
        yield comparison.untold, ExitCode.FAILED


def emit_calibration(found: Calibration, form: str) -> None:
    """Print the client's own errors."""
    output.forgive_encoding()
    if form == "json":
        output.print_json(found.to_dict())
    elif form == "csv":
        output.print_csv([one.to_dict() | {"ceiling_tokens_per_second": found.ceiling} for one in found.errors])
    else:
        from kvctl.screen_serve import calibration_lines, calibration_table, print_calibration

        if form == "md":
            head, *rows = calibration_table(found)
            output.print_markdown_table(head, rows)
            print()
            for line in calibration_lines(found):
                print(f"- {output.markdown_cell(line)}")
        else:
            from kvctl.screen_lines import Screen

            print_calibration(Screen(), found)


def _flat(one: Outcome) -> dict[str, Any]:
    """A load, a cell each; times in seconds."""
    found = one.figures.to_dict()
    out: dict[str, Any] = dict(one.step.to_dict())
    out |= {
        "sent": one.sent,
        "good": one.figures.good,
        "failed": one.figures.faults.total(),
        "seconds": found["seconds"],
    }
    out |= {f"{name}_per_second": value for name, value in found["per_second"].items()}
    for name, times in found["times"].items():
        for of in ("p50", "p90", "p95", "p99"):
            out[f"{name}_{of}"] = None if times is None else times[of]["value"]
    seen = one.window
    return out | {
        "input_tokens": one.figures.tokens_in, "output_tokens": one.figures.tokens_out, "kv_use_max": seen.kv_use, "waiting_max": seen.waiting,
        "running_max": seen.running, "preemptions": seen.preemptions, "verdict": one.verdict.kind, "client_cpu": one.cpu,
    }  # fmt: skip
