"""Profiles onto the screen: the report to stdout, progress, notes and warnings to stderr."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvctl import output
from kvctl.units import format_bytes, format_seconds
from kvctl.words import one_line

if TYPE_CHECKING:
    from kvctl.measure.assessed import Assessed
    from kvctl.measure.machine import Machine
    from kvctl.measure.report import Point, ProfileReport, Try
    from kvctl.measure.run import Now, Progress
    from kvctl.measure.saved import Saved

_REFRESH_S = 0.25


@contextlib.contextmanager
def live(*, quiet: bool) -> Iterator[Progress]:
    """Progress on stderr: a line for each complete point; on a terminal one under it that says what goes on, elsewhere
    a line as each part of the run begins."""
    from kvctl.measure.run import Now, Progress

    terminal = sys.stderr.isatty()

    def tell(text: str) -> None:
        if not quiet:
            with contextlib.suppress(OSError):
                print(("\r\033[K" if terminal else "") + one_line(text), file=sys.stderr, flush=True)

    now = Now() if terminal else Now(tell)

    def done(point: Point) -> None:
        tell(_point_words(point))

    def tried(one: Try) -> None:
        tell(f"{one.size:,}: {one.ended}")

    if quiet or not terminal:
        yield Progress(now, done, tried)
        return
    stop = threading.Event()

    def show() -> None:
        while not stop.wait(_REFRESH_S):
            with contextlib.suppress(OSError):
                print(f"\r\033[K{_now_words(now)}", end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield Progress(now, done, tried)
    finally:
        stop.set()
        thread.join()
        with contextlib.suppress(OSError):
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _now_words(now: Now) -> str:
    import shutil

    text = now.doing + (f", token {now.step:,} of {now.steps:,}" if now.steps else "")
    return one_line(text)[: max(20, shutil.get_terminal_size().columns - 1)]


def _point_words(point: Point) -> str:
    """One complete point: "512 tokens × 1: TTFT 345 ms, TPOT 40.9 ms, cache 25.3 MiB as predicted"."""
    words = []
    if point.ttft is not None:
        words.append(f"TTFT {format_seconds(point.ttft.median)}")
    if point.tpot is not None:
        words.append(f"TPOT {format_seconds(point.tpot.median)}")
    if point.cache:
        words.append(f"cache {format_bytes(point.cache[-1].logical_bytes)} "
                     + ("as predicted" if point.agrees else "NOT as predicted"))  # fmt: skip
    if point.error is not None:
        words.append(point.error)
    return one_line(f"{point.context:,} tokens × {point.batch}: " + ", ".join(words))


def emit_profile(report: ProfileReport, form: str, earlier: Sequence[Saved], *, quiet: bool) -> None:
    """Print a profile in the form asked for, beside earlier ones."""
    output.forgive_encoding()
    if not quiet:
        output.say("note", (*(report.model.notes if report.model is not None else ()), *report.notes))
        output.say("warning", report.warnings)
    comparison = None
    if earlier:
        from kvctl.measure.compare import compare
        from kvctl.measure.saved import Saved

        comparison = compare([Saved("this run", report), *earlier])
    if form == "json":
        document = report.to_dict()
        output.print_json(document | ({"comparison": comparison.to_dict()} if comparison is not None else {}))
    elif form in ("csv", "md"):
        rows = [_row(report, point) for point in report.points]
        if form == "md" and (report.sharing is not None or report.techniques is not None):
            _markdown(report)
            return
        if report.sharing is not None:
            rows = [
                {"model": report.model.id if report.model is not None else "", **held.to_dict()}
                for held in report.sharing.held
            ]
        if report.techniques is not None:
            rows = [_technique(report, row) for row in report.techniques.rows]
        if report.model is None:
            rows = [
                {"device": rates.device, "bandwidth_bytes_per_second": rates.bandwidth}
                for rates in report.machine.rates
            ]
        if form == "csv":
            output.print_csv(rows)
        elif rows:
            output.print_markdown(rows)
    elif report.model is not None:
        from kvctl.screen_lines import Screen
        from kvctl.screen_profile import print_profile

        print_profile(Screen(), report, comparison)


def _markdown(report: ProfileReport) -> None:
    """What is on a screen, to be pasted: a title, a table, and what its columns are."""
    from kvctl.screen_profile import title
    from kvctl.screen_sharing import markdown_sharing
    from kvctl.screen_techniques import markdown_techniques

    print(f"{output.markdown_cell(title(report))}\n")
    for found, cells_of in (
        (report.techniques, lambda found: markdown_techniques(found, report.dtype)),
        (report.sharing, markdown_sharing),
    ):
        if found is not None and report.found:
            (head, *rows), lines = cells_of(found)
            output.print_markdown_table(head, rows)
            print("\n" + "\n".join(f"- {output.markdown_cell(line)}" for line in lines))


def say_broken(lines: Sequence[str]) -> None:
    """Why the answer is no."""
    output.say("broken", lines)


def emit_plot(report: ProfileReport, path: str) -> None:
    """Draw a profile."""
    from kvctl.plot.profile import chart_of, quality_of

    output.emit_chart(chart_of(report) if report.techniques is None else quality_of(report, report.techniques), path)


def emit_machine(machine: Machine, form: str) -> None:
    """Print the machine before a model is run on it; forms that programs read have it in the report."""
    if form != "table":
        return
    from kvctl.screen_lines import Screen
    from kvctl.screen_profile import print_machine

    output.forgive_encoding()
    screen = Screen()
    print_machine(screen, machine)
    screen.line()
    sys.stdout.flush()


def _row(report: ProfileReport, point: Point) -> dict[str, Any]:
    """A point as flat columns."""
    last = point.cache[-1] if point.cache else None
    return {
        "model": report.model.id if report.model is not None else "",
        "engine": report.engine,
        "dtype": report.dtype,
        "context": point.context,
        "batch": point.batch,
        "decode": point.decode,
        "ttft_s": point.ttft.median if point.ttft else None,
        "ttft_noise": point.ttft.noise if point.ttft else None,
        "tpot_s": point.tpot.median if point.tpot else None,
        "tpot_p95_s": point.tpot.p95 if point.tpot else None,
        "tpot_noise": point.tpot.noise if point.tpot else None,
        "prefill_tokens_per_second": point.prefill_rate,
        "decode_tokens_per_second": point.decode_rate,
        "kv_bytes": last.logical_bytes if last else None,
        "kv_storage_bytes": last.storage_bytes if last else None,
        "kv_predicted_bytes": last.predicted_bytes if last else None,
        "agrees": point.agrees,
        "peak_bytes": point.memory.peak_bytes if point.memory else None,
        "steady_bytes": point.memory.steady_bytes if point.memory else None,
        "error": point.error,
    }


def _technique(report: ProfileReport, row: Assessed) -> dict[str, Any]:
    """A technique as flat columns."""
    quality = row.quality
    return {
        "model": report.model.id if report.model is not None else "",
        "dtype": report.dtype,
        "technique": row.name,
        "tokens": row.tokens,
        "kv_bytes": row.kv_bytes,
        "predicted_bytes": row.predicted_bytes,
        "agrees": row.agrees,
        "ratio": row.ratio,
        "working_bytes": row.working_bytes,
        "ttft_ratio": row.ttft.value if row.ttft else None,
        "tpot_ratio": row.tpot.value if row.tpot else None,
        "perplexity_change_percent": quality.perplexity_change.value if quality else None,
        "perplexity_change_error": quality.perplexity_change.error if quality else None,
        "kl_nats": quality.kl.value if quality else None,
        "kl_p99_nats": quality.kl_p99 if quality else None,
        "top1_agreement": quality.top1.value if quality else None,
        "greedy_same": row.greedy.same if row.greedy else None,
        "keys_found": sum(row.recall.found) if row.recall else None,
        "pareto": row.pareto,
        "error": row.error,
    }
