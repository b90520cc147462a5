"""Load tests onto the screen: the report to stdout, notes to stderr."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvctl import output
from kvctl.errors import ExitCode
from kvctl.words import one_line

if TYPE_CHECKING:
    from kvctl.loadtest.calibrate import Calibration
    from kvctl.loadtest.compare import Comparison
    from kvctl.loadtest.live import Live
    from kvctl.loadtest.report import ServeReport
    from kvctl.loadtest.run import Outcome
    from kvctl.measure.run import Now

_REFRESH_S = 0.25


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


@contextlib.contextmanager
def live(
    *, quiet: bool, more: Callable[[Outcome], str | None] = lambda one: None
) -> Iterator[tuple[Now, Live, Callable[[Outcome], None]]]:
    """What goes on, on stderr: a line for each load that is over, and what `more` has to say of it; on a terminal the one that runs under it, drawn four times a second
    by a thread of its own, elsewhere a line as each begins."""
    from kvctl.loadtest.live import Live
    from kvctl.measure.run import Now
    from kvctl.screen_live import done_words

    draws = not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    drawing = _Drawing() if draws else None

    def tell(text: str) -> None:
        if drawing is not None:
            drawing.above(text)
        elif not quiet:
            with contextlib.suppress(OSError):
                print(one_line(text), file=sys.stderr, flush=True)

    def done(one: Outcome) -> None:
        times = one.figures.times
        ttft, tpot = (
            times[name].percentile(50).value / 1e9 if times[name].count else None for name in ("ttft", "tpot")
        )
        figures = one.figures
        tell(
            done_words(
                one.step.words, figures.good, figures.faults.total(), ttft, tpot, figures.rates()["output_tokens"]
            )
        )

        if (text := more(one)) is not None:
            tell(text)

    now, at = Now() if drawing is not None else Now(tell), Live()
    if drawing is None:
        yield now, at, done
        return
    try:
        drawing.start(now, at)
        yield now, at, done
    finally:
        drawing.stop()


class _Drawing:
    """Draws over its own last lines until it is stopped."""

    def __init__(self) -> None:
        self._over, self._lock = threading.Event(), threading.Lock()
        self._lines = 0
        self._thread: threading.Thread | None = None
        self._colour = "NO_COLOR" not in os.environ
        self._unicode = "utf" in (sys.stderr.encoding or "").lower()

    def start(self, now: Now, at: Live) -> None:
        def show() -> None:
            while not self._over.wait(_REFRESH_S):
                # What is read may change under it: then this frame is left out.
                with contextlib.suppress(RuntimeError):
                    self._draw(self._frame(now, at))

        self._thread = threading.Thread(target=show, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """And nothing is left of it."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._draw([])

    def above(self, text: str) -> None:
        """A line that stays."""
        with self._lock:
            self._write(self._up() + "\x1b[J" + one_line(text) + "\n")
            self._lines = 0

    def _frame(self, now: Now, at: Live) -> list[str]:
        from kvctl.screen_live import frame

        width = max(20, shutil.get_terminal_size().columns - 1)
        seen = at.look()
        if seen is None:
            return [one_line(now.doing)[:width]]
        return frame(seen, width, colour=self._colour, unicode=self._unicode)

    def _draw(self, lines: Sequence[str]) -> None:
        with self._lock:
            self._write(self._up() + "".join(f"{line}\x1b[K\n" for line in lines) + "\x1b[J")
            self._lines = len(lines)

    def _up(self) -> str:
        """To the first of the lines that are there."""
        return f"\x1b[{self._lines}F" if self._lines else ""

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()


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
    out["work"] = json.dumps(out["work"])
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
