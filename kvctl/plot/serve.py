"""A load test as one web page that needs nothing from elsewhere: what bound each load, the table, and plots."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvctl.loadtest import metrics
from kvctl.loadtest.figures import SECOND
from kvctl.loadtest.histogram import Histogram
from kvctl.loadtest.report import ServeReport
from kvctl.loadtest.run import Outcome
from kvctl.loadtest.verdict import FULL
from kvctl.plot import figure as plain
from kvctl.plot.axes import from_zero
from kvctl.plot.chart import MOST_CURVES
from kvctl.plot.figure import Figure, Mark, Series, number_axis, seconds_axis, share_axis, spread_axis
from kvctl.plot.html import document, table
from kvctl.plot.picture import Point
from kvctl.plot.svg import svg
from kvctl.units import format_seconds, plural

Table = list[list[str]]
Lines = list[tuple[str, str]]
"""Texts, and the style that each has on a screen."""
Loads = Sequence[tuple[str, Outcome]]

_STYLE = """
body{max-width:1120px}
h1{font-size:1.25rem;margin:0 0 .25rem;overflow-wrap:anywhere}h2{font-size:1.05rem;margin:2rem 0 .5rem}
p{margin:.35rem 0;overflow-wrap:anywhere}.dim{color:var(--muted)}.red{color:var(--bad)}.yellow{color:var(--warn)}
:root{--bad:#b3261e;--warn:#8a5a00;--good:#1a7f37;--badge:#eef0f2}
@media screen and (prefers-color-scheme:dark){:root{--bad:#ff8f85;--warn:#e3b341;--good:#56d364;--badge:#262b31}}
.badge{display:inline-block;padding:.05rem .5rem;border-radius:.7rem;background:var(--badge);font-weight:600;white-space:nowrap}
.kv-saturated,.failed,.worse{color:var(--bad)}.batch-limited,.compute-limited,.client-limited{color:var(--warn)}
.not-limited,.better{color:var(--good)}
.verdicts td,.verdicts th{text-align:left}.verdicts th{min-width:5em}
.loads th,.loads td,.compared th,.compared td{white-space:nowrap;min-width:0;font-size:.8rem;padding-right:.5rem}
.alert{border-left:4px solid var(--bad);padding:.3rem .8rem;margin:.8rem 0;background:var(--badge)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:1.2rem}
.wide svg{min-width:620px}
@media print{.plots{grid-template-columns:1fr 1fr}.wide svg{min-width:0}.loads th,.loads td{padding-right:.4rem;font-size:8px}}
"""
_MOST_WORKS = 3
"""Kinds of requests that are named."""
_OTHER_TIMES = "TTFT and TPOT are of measured requests; tokens a second over the whole load"


def page(
    report: ServeReport, heading: str, loads: Table, lines: Lines, beside: tuple[Table, Lines] | None = None
) -> str:
    """The page: `loads` is the table of loads and `lines` what is said under it, as on a screen; `beside` the same of a comparison."""
    named = list(zip(report.names, report.outcomes, strict=True))
    body = [f"<h1>{escape(heading)}</h1>", f'<p class="dim">{escape(_facts(report))}</p>']
    if report.interrupted:
        body.append('<p class="alert">The run was interrupted: this is what came until then.</p>')
    body += [f'<p class="alert red">{escape(line)}</p>' for line in (*report.failed, *report.missed)]
    body += [
        f"<p><strong>{escape(line)}</strong></p>"
        for line, _ in lines
        if report.limit is not None and line.startswith("limit: ")
    ]
    body += [_verdicts(named), _cells("loads", loads)]
    body += [f'<p class="{escape(style)}">{escape(line)}</p>' for line, style in lines if style != "bold"]
    body += [f"<p>{escape(line)}</p>" for line in report.notes]
    if beside is not None:
        rows, said = beside
        body += ["<h2>Beside the earlier run</h2>", _cells("compared", rows)]
        body += [f'<p class="{escape(style)}">{escape(line)}</p>' for line, style in said]
    body += _pictures(report, named)
    return document(heading, body, _STYLE)


def _facts(report: ServeReport) -> str:
    """When, from where and with what."""
    plan, environment = report.plan, report.environment
    cpu = environment.get("cpu")
    machine = str(cpu.get("model") or "") if isinstance(cpu, dict) else ""
    works = list(dict.fromkeys(one.step.work.words for one in report.outcomes))
    more = [f"and {plural(len(works) - _MOST_WORKS, 'other kind')}"] if len(works) > _MOST_WORKS else []
    parts = [
        str(environment.get("time") or ""), *works[:_MOST_WORKS], *more,
        f"objective: {plan.slo.words} of {plan.slo_percent:g}%" if plan.slo is not None else "",
        f"client: kvctl {report.version}, {environment.get('os') or ''}{', ' + machine if machine else ''}",
        "" if report.server.get("seed") is None else f"seed {report.server['seed']}",
    ]  # fmt: skip
    return "; ".join(part for part in parts if part)


def _verdicts(loads: Loads) -> str:
    rows = []
    for name, one in loads:
        kind = one.verdict.kind
        badge = f'<span class="badge {escape(kind.replace(" ", "-"))}">{escape(kind)}</span>'
        rows.append([escape(name), badge, escape("; ".join(one.verdict.evidence))])
    return f'<div class="verdicts">{table("What bound each load", ["load", "verdict", "evidence"], rows)}</div>'


def _cells(kind: str, rows: Table) -> str:
    head, *rest = rows
    cells = [
        [f'<span class="{word}">{word}</span>' if word in ("better", "worse") else escape(word) for word in row]
        for row in rest
    ]
    return f'<div class="{kind}">{table("", [escape(cell) for cell in head], cells)}</div>'


def _pictures(report: ServeReport, loads: Loads) -> list[str]:
    over_time = _over_time(report, loads)
    smaller = [figure for figure in (
        _against(loads, "ttft", "TTFT"), _against(loads, "tpot", "TPOT"), _spread(loads, "ttft", "TTFT"), _spread(loads, "tpot", "TPOT"),
        _spread(loads, "e2e", "E2E"),
    ) if figure is not None]  # fmt: skip
    out = []
    if over_time:
        title = "Over time: the KV cache, requests, and output"
        out += [
            f"<h2>{title}</h2>",
            f'<div class="scroll wide">{svg(plain.page(over_time), name=title, alone=False)}</div>',
        ]
    if smaller:
        pictures = "".join(f"<div>{svg(plain.page([one]), name=one.title, alone=False)}</div>" for one in smaller)
        out += [
            "<h2>Throughput and latency</h2>",
            f'<div class="plots">{pictures}</div>',
            f'<p class="dim">{_OTHER_TIMES}.</p>',
        ]
    return out


# -- over time ------------------------------------------------------------------------------------


def _over_time(report: ServeReport, loads: Loads) -> list[Figure]:
    """Panels over the clock of the run; none where nothing has a time."""
    zero = report.zero
    ends = [(one.samples[-1].at - zero) / SECOND for _, one in loads if one.samples]
    ends += [(piece.start + piece.width - zero) / SECOND for _, one in loads for piece in one.figures.slices]
    if not ends:
        return []
    x = from_zero(max(ends), "s", 1, 12)
    starts = tuple(
        Mark((one.began - zero) / SECOND, f"{name}: measured from here on", "axis", 1, name)
        for name, one in loads
        if one.began
    )
    figures = []
    uses = [_gauge(loads, zero, "kv_use")]
    if uses[0]:
        lost = _preemptions(loads, zero)
        title = "KV cache in use" + ("; red: requests lost their cache" if lost else "")
        figures.append(Figure(
            title, x, share_axis(), tuple(_course("", part, "curve0") for part in uses[0]), marks=(*starts, *lost),
            levels=((FULL, f"{FULL:.0%}: full"),), width=plain.WIDE, height=150,
        ))  # fmt: skip
    counts = [(words, ink, parts) for name, words, ink in (("running", "running", "curve2"), ("waiting", "waiting", "curve1"))
              if (parts := _gauge(loads, zero, name))]  # fmt: skip
    if counts:
        most = max(value for _, _, parts in counts for part in parts for _, value in part)
        series = [
            _course(words if not number else "", part, ink)
            for words, ink, parts in counts
            for number, part in enumerate(parts)
        ]
        figures.append(
            Figure(
                "Requests in the server",
                x,
                number_axis(most, 4),
                tuple(series),
                marks=_bare(starts),
                width=plain.WIDE,
                height=110,
            )
        )
    rates = _output(loads, zero)
    if rates:
        most = max(value for _, value in rates)
        figures.append(Figure(
            "Output tokens a second, as they came", x, number_axis(most, 4), (_course("", rates, "curve4"),),
            marks=_bare(starts) if figures else starts, width=plain.WIDE, height=110,
        ))  # fmt: skip
    return [*figures[:-1], figures[-1].replace(x_label="time")]


def _bare(marks: Sequence[Mark]) -> tuple[Mark, ...]:
    """Without their names: those above have them."""
    return tuple(mark.replace(name="") for mark in marks)


def _course(name: str, points: Sequence[Point], ink: str) -> Series:
    return Series(name, tuple(points), ink, steps=True, width=1.5)


def _gauge(loads: Loads, zero: int, name: str) -> list[list[Point]]:
    """Of each load; none of loads without it."""
    found = [
        [((sample.at - zero) / SECOND, sample.values[name]) for sample in one.samples if name in sample.values]
        for _, one in loads
    ]
    return [points for points in found if points]


def _preemptions(loads: Loads, zero: int) -> list[Mark]:
    out = []
    for _, one in loads:
        before, course = 0.0, metrics.Course(one.samples, "preemptions")
        for sample in one.samples:
            count = course.until(sample.at)
            if count is not None and count > before:
                at = (sample.at - zero) / SECOND
                out.append(
                    Mark(at, f"{plural(round(count - before), 'preemption')} until {at:.1f} s", "bad", 2, short=True)
                )
            before = before if count is None else count
    return out


def _output(loads: Loads, zero: int) -> list[Point]:
    """Tokens a second by time, of all loads: events of each slice times what an event carries on average, over its width. Of two loads
    whose slices overlap the sum."""
    steps: dict[int, float] = {}
    for _, one in loads:
        each = one.figures.tokens_a_chunk or 1.0
        for piece in one.figures.slices:
            rate = each * piece.events * SECOND / piece.width
            for at, change in ((piece.start, rate), (piece.start + piece.width, -rate)):
                steps[at] = steps.get(at, 0.0) + change
    out: list[Point] = []
    height = 0.0
    for at in sorted(steps):
        height = max(0.0, round(height + steps[at], 6))  # what goes up comes down to nothing
        out.append(((at - zero) / SECOND, height))
    return out


# -- throughput against latency, and how times are spread -----------------------------------------------


def _against(loads: Loads, time: str, words: str) -> Figure | None:
    """The median and the 99th percentile of a time against output tokens a second, a point for each load."""
    found = []
    for name, one in loads:
        times, rate = one.figures.times[time], one.figures.rates()["output_tokens"]
        if times.count and rate:
            found.append((one.step.at_once or one.step.rate or 0, rate, times, name, one.verdict.kind))
    if not found:
        return None
    found.sort(key=lambda row: row[0])
    series, highest = [], 0.0
    for of, ink in ((50, "curve0"), (99, "curve1")):
        points = [(rate, times.percentile(of).value / SECOND) for _, rate, times, _, _ in found]
        highest = max(highest, *(y for _, y in points))
        dots = tuple(
            (point, f"{name}: {words} p{of} {format_seconds(point[1])} at {point[0]:,.0f} tokens/s, {kind}")
            for point, (_, _, _, name, kind) in zip(points, found, strict=True)
        )
        series.append(Series(f"p{of}", tuple(points), ink, dots=dots))
    lowest = min(y for one in series for _, y in one.points)
    y = spread_axis(lowest, highest, 7) if lowest > 0 and highest > 20 * lowest else seconds_axis(highest, 5)
    return Figure(
        f"{words} against throughput", number_axis(max(rate for _, rate, *_ in found), 6), y, tuple(series), "output tokens a second", words,
        labels=tuple((point, name) for point, (_, _, _, name, _) in zip(series[0].points, found, strict=True)),
    )  # fmt: skip


def _spread(loads: Loads, time: str, words: str) -> Figure | None:
    """The share of requests within a time, a curve for each load."""
    found = [(name, one.figures.times[time]) for name, one in loads if one.figures.times[time].count]
    if not found:
        return None
    drawn = found
    if len(found) > MOST_CURVES:  # the first, the last, and evenly between
        places = {round(place * (len(found) - 1) / (MOST_CURVES - 1)) for place in range(MOST_CURVES)}
        drawn = [found[place] for place in sorted(places)]
    curves = [(name, _shares(times)) for name, times in drawn]
    values = [max(value, 1e-9) for _, points in curves for value, _ in points]
    series = tuple(
        Series(name, tuple((max(value, 1e-9), share) for value, share in points), f"curve{number}", steps=True)
        for number, (name, points) in enumerate(curves)
    )
    some = f" ({len(drawn)} of {len(found)} loads)" if len(drawn) < len(found) else ""
    return Figure(
        f"{words}: share of requests within{some}",
        spread_axis(min(values), max(values), 6),
        share_axis(),
        series,
        words,
    )


def _shares(times: Histogram) -> list[Point]:
    """Seconds, and the share that is within; as many points as can be seen."""
    rows = times.rows()
    out: list[Point] = [(rows[0][0] / SECOND, 0.0)]
    seen = 0
    for number, (value, count) in enumerate(rows, 1):
        seen += count
        share = seen / times.count
        last = out[-1]
        if number == len(rows) or share - last[1] >= 0.004 or value / SECOND > 1.01 * last[0]:
            out.append((value / SECOND, share))
    return out
