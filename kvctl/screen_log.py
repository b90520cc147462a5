"""A start-up log beside what kvctl expects, on a terminal."""

from __future__ import annotations

from rich.text import Text

from kvctl.screen_lines import Row, Screen
from kvctl.startlog import LogReport, LogRow
from kvctl.words import log_verdict, one_line, signed_bytes


def print_log(screen: Screen, report: LogReport) -> None:
    """What the log says, what kvctl expects, and what accounts for a difference."""
    log = report.log
    what = f"{log.engine} {log.version}" if log.version else log.engine
    screen.line(
        one_line(f"{log.path}: {what}, {log.model_name or log.model or 'a model that it does not name'}"), "bold"
    )
    screen.line(one_line(log_verdict(report)), _style(report))
    screen.line()
    rows: list[Row] = [(("line", "", "the log says", "kvctl expects", ""), None, "dim")]
    notes: list[tuple[str, str]] = []
    for row in report.rows:
        mark = {True: "same", False: "differs", None: "estimate"}[row.agrees]
        rows.append(((f"{row.line:,}", row.name, one_line(row.said), _expected(row), mark), None,
                     "red" if row.agrees is False else ""))  # fmt: skip
        notes += [(row.name, words) for words in (row.cause, row.remark) if words]
    if len(rows) > 1:
        screen.table("rlrrl", rows)
    for name, words in notes:
        screen.line(Text.assemble((f"{name}: ", "dim"), one_line(words)), indent=len(name) + 2)
    if report.refused is not None:
        screen.line()
        screen.line(one_line(f"line {report.refused.line:,}, it did not start: {report.refused.why}"), "red")
        for words in report.refused.fits:
            screen.line(one_line(f"it fits with {words}"))


def _style(report: LogReport) -> str:
    if report.refused is not None or report.agrees is False:
        return "bold red"
    return "bold green" if report.agrees else "bold yellow"


def _expected(row: LogRow) -> str:
    """A number, or the range that the log's own rounding leaves."""
    if row.low is None or row.high is None:
        return ""
    low, high = _number(row, row.low), _number(row, row.high)
    return low if low == high else f"{low} to {high}"


def _number(row: LogRow, value: float) -> str:
    if row.unit == "bytes":
        return signed_bytes(round(value))
    return f"{round(value):,}" if value == round(value) else f"{value:,.2f}"
