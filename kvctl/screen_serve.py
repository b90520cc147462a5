"""What `kvctl serve-test` shows: a row for each load, and what bound it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvctl.loadtest.calibrate import ITL, TTFT
from kvctl.loadtest.compare import BETTER, RATE, SAME, SHORT, UNTOLD, WORSE
from kvctl.loadtest.figures import DEFINITIONS, RATES
from kvctl.loadtest.verdict import CEILING
from kvctl.units import format_seconds, plural
from kvctl.words import one_line

if TYPE_CHECKING:
    from kvctl.loadtest.calibrate import Calibration
    from kvctl.loadtest.capacity import Capacity
    from kvctl.loadtest.compare import Comparison
    from kvctl.loadtest.histogram import Histogram
    from kvctl.loadtest.limit import Limit
    from kvctl.loadtest.load import Length
    from kvctl.loadtest.report import ServeReport
    from kvctl.loadtest.run import Outcome
    from kvctl.screen_lines import Row as Line
    from kvctl.screen_lines import Screen

_LEAD = ["load", "good", "failed"]
_TIMES = ["TTFT p50", "p99", "TPOT p50", "p99", "E2E p50", "p99"]
_RATES = ["requests/s", "tokens/s out", "in"]
_CACHE = ["KV use", "waiting", "preempted", "cached"]


def table_of(report: ServeReport) -> list[list[str]]:
    """A heading and a row for each load."""
    return [[*_LEAD, *_TIMES, *_RATES, *_CACHE], *map(_row, report.outcomes)]


def print_serve(screen: Screen, report: ServeReport, *, explain: bool) -> None:
    """The table, and the lines that explain it."""
    screen.line(one_line(heading(report)))
    if report.outcomes:
        rows = table_of(report)
        styles = ["dim", *("red" if one.given_up or not one.figures.good else "" for one in report.outcomes)]
        lines: list[Line] = [(cells, None, style) for cells, style in zip(rows, styles, strict=True)]
        groups = [2 + len(_TIMES), len(_RATES), len(_CACHE)]
        screen.tables(1, "l" + "r" * (len(rows[0]) - 1), lines, groups)
    for line, style in lines_of(report, explain=explain):
        screen.line(line, style)


def lines_of(report: ServeReport, *, explain: bool) -> list[tuple[str, str]]:
    """What is said under the table, with its style."""
    out = []
    for one in report.outcomes:
        out += _of_load(one, report.without_prefix(one))
    if report.interrupted:
        out.append(("interrupted: this is what came until then", "yellow"))
    if report.limit is not None:
        out.append((_limit(report.limit, report.predicted), "bold"))
    if report.capacity is not None:
        out += [(line, "") for line in capacity_lines(report.capacity)]
    verified = report.verified
    if verified is not None:
        from kvctl.screen_verified import verified_lines

        out += verified_lines(verified)
    if report.started is not None:
        own = report.started
        out.append((f"started: {own.command} (ready after {format_seconds(own.seconds)}; its log: {own.log})", "dim"))
    if report.outcomes:
        out += [(_footer(report), "dim"), (_client(report), "dim")]
    if report.dry:
        plan = report.plan
        warm = ", ".join(dict.fromkeys(plural(plan.warm_of(step), "request") for step in plan.steps))
        lengths = dict.fromkeys(_length(plan.length_of(step)) for step in plan.steps)
        works = dict.fromkeys(step.work.words for step in plan.steps)  # each kind once
        out += [
            (f"each load: {', '.join(lengths)}, after a warm-up ({warm})", ""),
            *((f"requests: {work}", "") for work in works),
            ("loads: " + "; ".join(step.words for step in plan.steps), ""),
            *([(f"started first: {plan.launch.shown}", "")] if plan.launch is not None else []),
            ("nothing was sent", "dim"),
        ]
    if explain:
        out += [(f"{name}: {words}", "") for name, words in (*DEFINITIONS.items(), *RATES.items())]
    # Words of the server are among them: nothing of it may steer the terminal.
    return [(one_line(line), style) for line, style in out]


def _length(length: Length) -> str:
    parts = [
        f"{length.requests:,} requests" if length.requests is not None else "",
        f"{length.seconds:g} s" if length.seconds is not None else "",
    ]
    return " or ".join(part for part in parts if part)


def heading(report: ServeReport) -> str:
    """The server in a line."""
    server, plan = report.server, report.plan
    if not server:
        return f"{plan.place.root}{plan.path}"
    version = f" {server['version']}" if server["version"] else ""
    limits = [
        f"{server['context']:,} tokens a request" if server["context"] else "",
        plural(server["slots"], "slot") if server["slots"] else "",
    ]
    engine = "a server of an unknown engine" if server["engine"] == "unknown" else f"{server['engine']}{version}"
    own = "" if server["address"] in (plan.place.name, None) else f" ({server['address']})"
    return ", ".join(
        part for part in (f"{plan.place.root}{plan.path}{own}: {engine}", str(server["model"]), *limits) if part
    )


def _row(one: Outcome) -> list[str]:
    figures = one.figures
    times = figures.times
    rates = figures.rates()
    seen = one.window

    def rate(name: str) -> str:
        value = rates[name]
        return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    cached = "–" if one.hit_rate is None else f"{one.hit_rate:.0%}"
    return [
        one.step.words, f"{figures.good:,}", f"{figures.faults.total():,}", *_two(times["ttft"]), *_two(times["tpot"]), *_two(times["e2e"]),
        rate("requests"), rate("output_tokens"), rate("input_tokens"),
        "–" if seen.kv_use is None else f"{seen.kv_use:.0%}", "–" if seen.waiting is None else f"{seen.waiting:,.0f}",
        "–" if seen.preemptions is None else f"{seen.preemptions:,.0f}", cached,
    ]  # fmt: skip


def _two(found: Histogram) -> list[str]:
    """The median, and what 99 of 100 do not exceed."""
    if not found.count:
        return ["–", "–"]
    return [format_seconds(found.percentile(of).value / 1e9) for of in (50, 99)]


def _of_load(one: Outcome, without: float | None) -> list[tuple[str, str]]:
    out = [(f"{one.step.words}: {one.verdict.kind} ({'; '.join(one.verdict.evidence)})" if one.verdict.evidence
            else f"{one.step.words}: {one.verdict.kind}", "bold")]  # fmt: skip
    if one.output_rate is not None:
        out.append(
            (
                f"{one.step.words}: {_rate(one.output_rate)} output tokens a second in the whole seconds while the load was whole ({format_seconds(one.seconds)})",
                "",
            )
        )
    figures, designed = one.figures, one.designed
    if one.retried:
        out.append((f"{one.step.words}: {one.retried:,} times a request was turned away and sent again", ""))
    if one.cut:
        out.append(
            (
                f"{one.step.words}: {plural(one.cut, 'request')} of another length than drawn: a template is longer, or the context shorter",
                "",
            )
        )
    if designed is not None:
        seen = [
            f"{rate:.1%} by {how}"
            for how, rate in (("usage", one.hit_rate), ("the engine's counters", one.counted_hit_rate))
            if rate is not None
        ]
        out.append((f"{one.step.words}: {designed:.1%} of input tokens were sent before; found in the cache: "
                    + (", ".join(seen) or "not said (vLLM: --enable-prompt-tokens-details, SGLang: --enable-cache-report)"), ""))  # fmt: skip
    if without is not None and figures.times["ttft"].count:
        ttft = figures.times["ttft"].percentile(50).value / 1e9
        out.append((f"{one.step.words}: first tokens after {format_seconds(ttft)} in the median, and after {format_seconds(without)} where no beginning is "
                    f"shared: {ttft / without - 1:+.0%}", ""))  # fmt: skip
    out += [(f"{one.step.words}: {line}", "") for line in one.remarks]
    for kind, count in figures.faults.most_common():
        out.append((f"{one.step.words}: {count:,} {kind}: {'; '.join(figures.words[kind])}", "red"))
    if figures.short:
        out.append((f"{one.step.words}: {plural(figures.short, 'answer')} shorter than asked", ""))
    if figures.sources.get("events") and one.counted_tokens_an_event is None:
        out.append(
            (
                f"{one.step.words}: output tokens of {plural(figures.sources['events'], 'answer')} are events, for want of usage: an estimate",
                "",
            )
        )
    each = figures.tokens_a_chunk
    if each is not None and each > 1.05:
        counted = "; usage says how many each" if figures.times["itl"].count else ""
        out.append(
            (
                f"{one.step.words}: an event carries {each:.2f} tokens on average: gaps between events are no times between tokens{counted}",
                "",
            )
        )
    if figures.user_stamps:
        out.append(
            (
                f"{one.step.words}: {plural(figures.user_stamps, 'answer')} stamped by this process, not by the kernel",
                "",
            )
        )
    return out


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def calibration_table(found: Calibration) -> list[list[str]]:
    """A heading and a row for each number of requests at once."""
    head = ["at once", "TTFT error p50", "p99", "ITL error p50", "p99", "tokens/s", "of", "core"]
    return [head, *([f"{one.at_once:,}", *(format_seconds(value) for value in (one.ttft_p50, one.ttft_p99, one.itl_p50, one.itl_p99)),
                     f"{one.tokens_per_second:,.0f}", f"{one.nominal:,.0f}", f"{one.cpu:.0%}"] for one in found.errors)]  # fmt: skip


def calibration_lines(found: Calibration) -> list[str]:
    """What is said under it."""
    stamps = "the kernel's" if found.kernel else "this process's: the kernel gives none"
    return [
        f"as fast as they come: {found.ceiling:,.0f} tokens a second; beyond {CEILING:.0%} of that a load is called client-limited",
        f"against a server of {TTFT * 1e3:g} ms to the first token and {ITL * 1e3:g} ms between tokens, which says itself when it wrote each; "
        f"stamps are {stamps}",
        found.machine,
    ]  # fmt: skip


def print_calibration(screen: Screen, found: Calibration) -> None:
    """The client's own errors."""
    rows = calibration_table(found)
    lines: list[Line] = [(cells, None, "" if number else "dim") for number, cells in enumerate(rows)]
    screen.table("r" * len(rows[0]), lines)
    for line in calibration_lines(found):
        screen.line(line, "dim")


def _limit(found: Limit, predicted: int | None) -> str:
    beside = "" if predicted is None else f"; kvctl size predicts room for {predicted:,}"
    if found.broken is None:
        return f"limit: none found up to {found.borne or 0:,} at once ({found.why}){beside}"
    if found.borne is None:
        return f"limit: not even 1 at once ({found.why}){beside}"
    return f"limit: {found.borne:,} at once; at {found.broken:,}: {found.why}{beside}"


def capacity_lines(found: Capacity) -> list[str]:
    """What the cache holds, as the server declares it and as kvctl size predicts it; what neither says is left out."""
    names = {
        "tokens": "tokens", "bytes": "bytes", "blocks": "blocks",
        "concurrency": f"requests of {found.context or 0:,} tokens", "requests": f"requests of {found.length:,} tokens at once",
    }  # fmt: skip
    parts = []
    for name, words in names.items():
        declared, predicted = getattr(found.declared, name), getattr(found.predicted, name)
        if declared is None and predicted is None:
            continue
        difference = found.difference(name)
        beside = "" if difference is None else ", the same" if abs(difference) < 0.005 else f", {difference:+.2f}%"
        rounded = f" ± {found.declared.bytes_within:,}" if name == "bytes" and found.declared.bytes_within else ""
        parts.append(f"{words}: {_count(declared)}{rounded} declared, {_count(predicted)} predicted{beside}")
    if not parts:
        return [f"KV cache: not available; {'; '.join(found.notes)}" if found.notes else "KV cache: not available"]
    out = ["KV cache: " + "; ".join(parts)]
    sources = []
    if found.declared_by:
        sources.append(f"declared by {' and '.join(found.declared_by)}")
    if found.predicted_for is not None:
        sources.append(f"predicted by kvctl size for {found.predicted_for} ({', '.join(found.settings)})")
    if sources:
        out.append("KV cache: " + "; ".join(sources))
    return out + [f"KV cache: {note}" for note in found.notes]


def _count(value: float | None) -> str:
    if value is None:
        return "not available"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _client(report: ServeReport) -> str:
    """How far the client's own times may be off."""
    if report.calibration is None:
        return "the client's own error is not known on this machine: kvctl serve-test --calibrate measures it"
    most = max((one.step.at_once or 1 for one in report.outcomes), default=1)
    own = report.calibration.nearest(most)
    return (f"the client's own error at {own.at_once:,} at once: TTFT {format_seconds(own.ttft_p50)} (p99 {format_seconds(own.ttft_p99)}), "
            f"ITL {format_seconds(own.itl_p50)} (p99 {format_seconds(own.itl_p99)}), calibrated {report.calibration.at}")  # fmt: skip


def _footer(report: ServeReport) -> str:
    server = report.server
    exact = "" if server["prompts_exact"] else ", though not of exactly as many as asked"
    made = (
        f"prompts are drawn by lot from words of one token each, by {server['tokens_counted_by']}{exact}; "
        if server["tokens_counted_by"]
        else ""
    )
    return f"TTFT, E2E from the end of sending; TPOT of each request; p99: 99 of 100 do not exceed it; {made}--explain has the definitions"


def comparison_table(found: Comparison) -> list[list[str]]:
    """A heading, and a row for each figure of each load."""
    out = [["load", "figure", "before", "now", "change", "95% interval", ""]]
    for one in found.loads:
        for row in one.rows:
            change = "–" if row.ratio is None else f"{row.ratio.value - 1:+.1%}"
            between = "–"
            if row.ratio is not None and row.ratio.low is not None and row.ratio.high is not None:
                between = f"{row.ratio.low - 1:+.1%} to {row.ratio.high - 1:+.1%}"
            name = "tokens/s out" if row.what == RATE else row.what.replace("_", " ").upper().replace(" P", " p")
            out.append(
                [
                    one.name,
                    name,
                    _amount(row.before, row.what),
                    _amount(row.now, row.what),
                    change,
                    between,
                    row.verdict,
                ]
            )
    return out


def _amount(value: float | None, what: str) -> str:
    return "–" if value is None else f"{value:,.0f}" if what == RATE else format_seconds(value)


def comparison_lines(found: Comparison) -> list[tuple[str, str]]:
    """What is said under it, with its style: what else differs, and what cannot be compared."""
    out = [(f"{what}: {_said(before)} before, {_said(now)} now", "yellow") for what, before, now in found.differences]
    out += [(line, "") for line in found.unmatched]
    return [*out, (found.note, "dim")]


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items() if item is not None and item is not False)
    return "–" if value is None else one_line(str(value))


def print_comparison(screen: Screen, found: Comparison) -> None:
    """This run beside an earlier one."""
    rows = comparison_table(found)
    styles = {WORSE: "red", BETTER: "green", UNTOLD: "dim", SHORT: "dim", SAME: "dim"}
    screen.line()
    screen.line(f"beside {one_line(found.earlier)}:", "bold")
    lines: list[Line] = [
        (cells, None, "dim" if not number else styles.get(cells[-1], "")) for number, cells in enumerate(rows)
    ]
    screen.table("llrrrrl", lines)
    for line, style in comparison_lines(found):
        screen.line(line, style)
