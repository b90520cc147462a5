"""Load tests onto the screen: the report to stdout, notes to stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvctl import output

if TYPE_CHECKING:
    from kvctl.loadtest.calibrate import Calibration
    from kvctl.loadtest.report import ServeReport
    from kvctl.loadtest.run import Outcome


def emit_serve(report: ServeReport, form: str, *, quiet: bool, explain: bool) -> None:
    """Print what was found, in the form asked for."""
    output.forgive_encoding()
    if not quiet:
        output.say("note", report.notes)
    if form == "json":
        output.print_json(report.to_dict())
    elif form == "csv":
        output.print_csv([_flat(one) for one in report.outcomes])
    else:
        from kvctl.screen_serve import lines_of, print_serve, table_of

        if form == "md":
            head, *rows = table_of(report)
            output.print_markdown_table(head, rows)
            print()
            for line, _ in lines_of(report, explain=explain):
                print(f"- {output.markdown_cell(line)}")
        else:
            from kvctl.screen_lines import Screen

            print_serve(Screen(), report, explain=explain)


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
