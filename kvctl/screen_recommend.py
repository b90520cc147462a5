"""What `kvctl recommend` shows: answers with their reasons, memory and speed; what was left; a matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from kvctl.recommend.answers import in_words
from kvctl.recommend.cases import memory
from kvctl.recommend.prices import words as money
from kvctl.recommend.report import seconds
from kvctl.units import format_bytes, format_rate, plural
from kvctl.words import one_line

if TYPE_CHECKING:
    from kvctl.recommend.answers import Answer, Recommendation
    from kvctl.recommend.emit import Site
    from kvctl.recommend.judge import Judged
    from kvctl.recommend.quality import Loss
    from kvctl.recommend.report import RecommendReport
    from kvctl.recommend.request import Ask
    from kvctl.recommend.verify import Trial
    from kvctl.recommend.what_if import Row as Difference
    from kvctl.recommend.what_if import WhatIf
    from kvctl.screen_lines import Row, Screen
    from kvctl.speed import Range

_REASONS = 8
_VERDICTS = {"yes": "green", "no": "dim", "depends": "yellow"}


def print_recommendation(screen: Screen, found: Recommendation, site: Site, *, explain: bool) -> None:
    """One request's answer."""
    screen.line(asked_words(found), style="bold")
    if not found.answers:
        _nothing(screen, found)
    for number, answer in enumerate(found.answers, 1):
        screen.line()
        _answer(screen, number, answer, found.ask, first=number == 1, site=site)
    if len(found.answers) > 1:
        screen.line()
        _side_by_side(screen, found)
    if explain:
        _explained(screen, found)
    elif found.answers:
        screen.line()
        screen.line(
            f"{found.tried:,} configurations tried, {found.fitting:,} fit; --explain says what was left and why, and where every technique stands",
            style="dim",
        )
        screen.line("--emit command|compose|kubernetes|systemd|runbook|… writes what to run", style="dim")


def asked_words(found: Recommendation) -> str:
    """The request on one line."""
    ask = found.ask
    where = (
        ask.device.name
        if not ask.gpus
        else f"{ask.gpus} × {ask.device.name}" + (f" in each of {ask.nodes} nodes" if ask.nodes > 1 else "")
    )
    load = (
        ("1 request a second" if ask.rate == 1 else f"{ask.rate:.4g} requests a second")
        if ask.rate is not None
        else f"{plural(ask.concurrency or 1, 'request')} at once"
    )
    limits = [
        f"{name} ≤ {seconds(value)}" for name, value in (("TTFT", ask.ttft), ("TPOT", ask.tpot)) if value is not None
    ]
    parts = [
        f"{ask.spec.id} on {where}",
        f"{load} of {ask.prompt:,} + {ask.answer:,} tokens, at most {ask.context:,}",
        *limits,
        f"goal: {ask.goal}",
    ]
    return one_line("; ".join(parts))


def _answer(screen: Screen, number: int, answer: Answer, ask: Ask, *, first: bool, site: Site) -> None:
    one = answer.judged
    style = "green" if first else "cyan"
    screen.line(
        Text.assemble((f"{number}. {answer.kind}: ", f"bold {style}"), (in_words(one.candidate), "bold")), indent=3
    )
    for line in answer.why:
        screen.line(f"   {line}", indent=3)
    if first:
        _memory(screen, one)
    for label, value, words in figures(one, ask):
        screen.line(Text.assemble("   ", label.ljust(14), (value, "bold"), "  ", (words, "dim")), indent=17)
    screen.line(f"   binds first    {answer.binds}", indent=17)
    screen.line(f"   change next    {answer.change}", indent=17)
    for note in one.candidate.notes:
        screen.line(f"   note: {note}", indent=9, style="yellow")
    if first:
        from kvctl.recommend.emit.script import script

        screen.line()
        deployment = one.candidate.deployment
        for line in script(deployment.replace(replicas=1), site).splitlines():
            screen.line(f"   {line}", style="cyan")
        if deployment.replicas > 1:
            screen.line(
                f"   # and {plural(deployment.replicas - 1, 'server')} more like it, on ports and GPUs of their own: --emit command",
                style="cyan",
            )


def figures(one: Judged, ask: Ask) -> list[tuple[str, str, str]]:
    """Label, value and words of what is predicted of one answer."""
    candidate, speed = one.candidate, one.speed
    capacity = "" if candidate.capacity is None else f"{plural(candidate.capacity, 'token')} in the cache"
    more = f"{candidate.usual_at_once:,} of the usual length" if candidate.usual_at_once != candidate.at_once else ""
    out = [("requests", f"{candidate.at_once:,} at once", ", ".join(part for part in (more, capacity) if part))]
    if one.found is not None:
        out.append(("found", f"{one.found:.0%} of prompts", found_words(one, ask)))
    if speed is None:
        out.append(("speed", "unknown", one.no_speed))
    else:
        sure = speed.validated or "unvalidated"
        out.append(("TTFT", seconds(speed.ttft.mid), f"{_span(speed.ttft)}; binds: {speed.prefill_bound}"))
        out.append(("TPOT", seconds(speed.tpot.mid), f"{_span(speed.tpot)}; binds: {speed.decode_bound}"))
        rate = speed.output_rate
        out.append(
            (
                "throughput",
                f"{format_rate(rate.mid)} tok/s",
                f"{format_rate(rate.low)} to {format_rate(rate.high)} output tokens a second, {speed.request_rate.mid:,.3g} requests a second",
            )
        )
        out.append(("how sure", sure, f"hangs on: {speed.assumption}"))
    first, *rest = one.loss.source.split("; ")
    out.append(("quality", loss_words(one.loss), first + (f"; and {len(rest)} more, in --json" if rest else "")))
    out.append(("cost", money(one.cost), ""))
    return [(label, one_line(value), one_line(words)) for label, value, words in out]


def found_words(one: Judged, ask: Ask) -> str:
    """Where prompt tokens are found, in words."""
    from kvctl.recommend.load import caches
    from kvctl.spec import ConvState, RecurrentState

    if not one.found and ask.spec.keeps(RecurrentState, ConvState):
        return "recurrent layers keep states at few places: nothing is counted on"
    count = caches(one.candidate)
    dealt = f", requests being dealt in turn to {count:,} caches" if count > 1 else ""
    return f"in the prefix cache{dealt}" + (f": {ask.reuse.name}" if ask.reuse is not None else "")


def loss_words(loss: Loss) -> str:
    """What is lost, in short."""
    if loss.percent is None:
        return "loss unknown"
    if not loss.metric:
        return "nothing lost"
    how = "measured" if loss.measured else "published"
    lost = f"{loss.percent.mid:.2g}% lost" if loss.percent.mid > 0 else "no loss seen"
    return f"{lost} ({loss.percent.low:.2g} to {loss.percent.high:.2g}%, {loss.metric}, {how})"


def _span(found: Range) -> str:
    return f"{seconds(found.low)} to {seconds(found.high)}"


def _memory(screen: Screen, one: Judged) -> None:
    from kvctl.screen_lines import bar

    total = one.candidate.stack.device
    name = one_line(one.candidate.deployment.device.name)
    screen.line(
        f"   memory of the fullest {'GPU' if one.candidate.deployment.gpus else 'host'}, {name}: {format_bytes(total)}",
        indent=3,
    )
    rows: list[Row] = [
        (("  ", label, format_bytes(size), f"{100 * size / total:.0f}%"), bar(max(size, 0), total), "") for label, size in memory(one.candidate).items()
    ]  # fmt: skip
    screen.table("llrr", rows)
    if one.candidate.offloaded:
        each = " of each server" if one.candidate.deployment.replicas > 1 else ""
        screen.line(
            f"   beside it in the host's memory{each}, not in this sum: {format_bytes(one.candidate.offloaded)} of weights",
            indent=3,
        )


def table_of(report: RecommendReport) -> list[list[str]]:
    """A heading and rows: answers of one request, or the best of each."""
    if len(report.each) > 1:
        return _matrix(report)
    return _rows(report.each[0])


_HEAD = ["answer", "configuration", "GPUs", "requests", "TTFT", "TPOT", "tok/s", "loss", "cost"]


def _rows(found: Recommendation) -> list[list[str]]:
    return [
        _HEAD,
        *([answer.kind, in_words(answer.judged.candidate), *_cells(answer.judged)] for answer in found.answers),
    ]


def _cells(one: Judged) -> list[str]:
    speed = one.speed
    hour = "–" if one.cost.per_hour is None else f"{one.cost.per_hour:,.2f}/h"
    return [
        str(one.cost.gpus), f"{one.candidate.usual_at_once:,}", "–" if speed is None else seconds(speed.ttft.mid),
        "–" if speed is None else seconds(speed.tpot.mid), "–" if speed is None else format_rate(speed.output_rate.mid),
        "?" if one.loss.percent is None else f"{max(one.loss.percent.mid, 0):.2g}%", hour,
    ]  # fmt: skip


def _side_by_side(screen: Screen, found: Recommendation) -> None:
    head, *rows = [[row[0], *row[2:]] for row in _rows(found)]
    screen.table("lrrrrrrr", [(head, None, "dim"), *((row, None, "") for row in rows)])


def title(found: Recommendation) -> str:
    """What a request is about, in one line."""
    return one_line(f"{found.ask.spec.id} on {_where(found)}")


def _where(found: Recommendation) -> str:
    ask = found.ask
    return ask.device.name if not ask.gpus else f"{ask.all_gpus} × {ask.device.name}"


def _matrix(report: RecommendReport) -> list[list[str]]:
    out = [["model", "on", "configuration", *_HEAD[2:7], "range", *_HEAD[7:]]]
    for found in report.each:
        model, where = found.ask.spec.id, _where(found)
        if found.answers:
            one = found.answers[0].judged
            made = " (weights to be made first)" if one.candidate.deployment.made == "make" else ""
            cells = _cells(one)
            out.append([model, where, in_words(one.candidate) + made, *cells[:5], _certain(one), *cells[5:]])
        else:
            why = (
                found.impossible[0]
                if found.impossible
                else f"nearest: {found.nearest[0].words}"
                if found.nearest
                else "nothing near"
            )
            words = f"not known: {found.unknown}" if found.unknown else f"nothing meets it; {why}"
            out.append([model, where, words, *["–"] * 8])
    return [[one_line(cell) for cell in row] for row in out]


def _certain(one: Judged) -> str:
    """The range of a rate, and whether such predictions were ever compared with a measurement."""
    speed = one.speed
    if speed is None:
        return "–"
    found = f"{format_rate(speed.output_rate.low)} to {format_rate(speed.output_rate.high)}"
    return found if speed.validated else f"{found}, unvalidated"


def print_matrix(screen: Screen, report: RecommendReport) -> None:
    """The best answer of each model on each kind of hardware."""
    head, *rows = _matrix(report)
    groups, justify = [1] * 9, "lllrrrrrrrr"
    if screen.width_of([row[:3] for row in (head, *rows)]) > screen.console.width:
        # Configurations in words of their own, where a column of them has no room.
        for model, where, what, *cells in rows:
            style = "" if cells[0] != "–" else "red"
            screen.line(Text.assemble((f"{model} on {where}", "bold"), f": {what}", style=style), indent=3)
        screen.line()
        head, *rows = [[*row[:2], *row[3:]] for row in (head, *rows)]
        groups, justify = groups[1:], "llrrrrrrrr"
    screen.tables(
        2, justify, [(head, None, "dim"), *((row, None, "" if row[-8] != "–" else "red") for row in rows)], groups
    )


def lines_of(found: Recommendation, *, explain: bool) -> list[str]:
    """What is said under the table of answers, one thing a line."""
    out = []
    for answer in found.answers:
        out += [
            f"{answer.kind}: {line}"
            for line in (*answer.why, f"binds first: {answer.binds}", f"change next: {answer.change}")
        ]
        out += [
            f"{answer.kind}: {label} {value}" + (f" ({words})" if words else "")
            for label, value, words in figures(answer.judged, found.ask)
        ]
    if not found.answers:
        out += [
            *found.impossible,
            *(f"nearest, {near.direction}: {near.words}, with {in_words(near.candidate)}" for near in found.nearest),
        ]
    if explain:
        out += [f"rejected: {words}" for words in rejected_lines(found)]
        out += [
            f"{one.technique}: {one.verdict}, {one.because}" + (f" ({one.how})" if one.how else "")
            for one in found.advice
        ]
    return out


def _nothing(screen: Screen, found: Recommendation) -> None:
    screen.line()
    screen.line("nothing here meets the request", style="bold red")
    for line in found.impossible:
        screen.line(f"   {line}", indent=3)
    if found.best_missing is not None:
        one = found.best_missing
        screen.line(f"   nearest to it here: {in_words(one.candidate)}", indent=3)
        for line in (*one.missed, *one.candidate.notes):
            screen.line(f"      {line}", indent=6)
    elif found.rejections:
        lines = rejected_lines(found)
        for line in lines[:_REASONS]:
            screen.line(f"   {line}", indent=3)
        if len(lines) > _REASONS:
            screen.line(f"   and {plural(len(lines) - _REASONS, 'reason')} more, with --explain", style="dim")
    if found.nearest:
        screen.line()
        screen.line("what would:", style="bold")
        for near in found.nearest:
            screen.line(f"   {near.direction.ljust(9)} {near.words}", indent=13)
            screen.line(f"   {'':9} with {in_words(near.candidate)}", indent=13, style="dim")


def rejected_lines(found: Recommendation) -> list[str]:
    """What does not start, one reason a line; first what is not known."""
    out = []
    for one in sorted(found.rejections, key=lambda one: one.kind != "unknown"):
        what = ", ".join(
            part
            for part in (
                one.engine,
                one.weights and f"weights in {one.weights}",
                one.kv_dtype not in ("", "auto") and f"cache in {one.kv_dtype}",
                one.gpus and f"up to {plural(one.gpus, 'GPU')}",
            )
            if part
        )
        what = f"not known: {what}" if one.kind == "unknown" else what
        out.append(one_line(f"{what}: {one.why}" + (f" (and {one.count - 1:,} like it)" if one.count > 1 else "")))
    return out


def _explained(screen: Screen, found: Recommendation) -> None:
    screen.line()
    screen.line(
        f"{found.tried:,} configurations tried, {found.fitting:,} fit, {len(found.answers)} chosen", style="bold"
    )
    for left in found.left:
        screen.line(f"   {left.count:,} fit and were not chosen: {one_line(left.why)}", indent=3)
        screen.line(f"      the best of them: {in_words(left.nearest.candidate)}", indent=6, style="dim")
        for line in left.nearest.missed:
            screen.line(f"      {one_line(line)}", indent=6, style="dim")
    lines = rejected_lines(found)
    if lines:
        screen.line("   do not start:")
        for line in lines:
            screen.line(f"      {line}", indent=6)
    if found.advice:
        screen.line()
        screen.line("techniques", style="bold")
        for advice in found.advice:
            head = Text.assemble(
                "   ",
                (advice.verdict.ljust(8), _VERDICTS[advice.verdict]),
                (advice.technique, "bold"),
                ": ",
                one_line(advice.because),
            )
            screen.line(head, indent=11)
            if advice.how:
                screen.line(f"           {one_line(advice.how)}", indent=11, style="cyan")


# -- what was put to the proof -------------------------------------------------------------------


def trial_table(trial: Trial) -> list[list[str]]:
    """A heading, and a row for each thing that is promised."""
    from kvctl.screen_verified import verified_table

    found = None if trial.report is None else trial.report.verified
    return [["", "promised", "measured", ""]] if found is None else verified_table(found)


def trial_lines(trial: Trial) -> list[tuple[str, str]]:
    """What it comes to, with the style of each line."""
    out = [("holds: nothing that is promised broke", "bold green")] if trial.holds else []
    out += [("does not hold", "bold red")] if trial.broken else []
    out += [(f"   {line}", "red") for line in trial.broken]
    if trial.interrupted:
        out.append(("interrupted: this is what came until then", "yellow"))
    report = trial.report
    if report is not None:
        found = report.verified
        out += [(line, "") for line in (*(found.notes if found is not None else ()), *report.notes)]
        if report.started is not None:
            own = report.started
            out.append((f"started: {own.command} (ready after {seconds(own.seconds)}; its log: {own.log})", "dim"))
    return [(one_line(line), style) for line, style in out]


def print_trial(screen: Screen, trial: Trial) -> None:
    """What one answer promised beside what it did on this machine."""
    screen.line()
    screen.line(f"answer {trial.answer} on this machine: {trial.promised.name}", style="bold")
    found = None if trial.report is None else trial.report.verified
    if found is not None:
        from kvctl.screen_verified import print_verified

        print_verified(screen, found)
    for line, style in trial_lines(trial):
        screen.line(line, style=style, indent=3)


# -- two plans ---------------------------------------------------------------------------------


def difference_rows(found: WhatIf) -> list[list[str]]:
    """A heading and a row for each thing that differs."""
    out = [["what", one_line(found.left), one_line(found.right), "ratio", "told apart"]]
    for row in found.rows:
        apart = "" if row.apart is None else "yes" if row.apart else "no: ranges overlap"
        out.append(
            [
                f"{row.part}: {row.name}",
                _cell(row, row.left),
                _cell(row, row.right),
                "" if row.ratio is None else f"{row.ratio:.2f}x",
                apart,
            ]
        )
    return out


def _cell(row: Difference, value: object) -> str:
    from kvctl.speed import Range

    if value is None:
        return "unknown"
    if isinstance(value, Range):
        if row.name in ("ttft", "tpot"):
            return f"{seconds(value.mid)} ({_span(value)})"
        return f"{value.mid:,.4g} ({value.low:,.4g} to {value.high:,.4g})"
    if row.part == "memory" and isinstance(value, int):
        return format_bytes(value)
    return one_line(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))


def print_difference(screen: Screen, found: WhatIf) -> None:
    """Two plans beside each other."""
    screen.line(f"left:  {one_line(found.left)}")
    screen.line(f"right: {one_line(found.right)}")
    screen.line()
    if found.same:
        screen.line("nothing differs")
        return
    head, *rows = difference_rows(found)
    head = ["what", "left", "right", *head[3:]]
    if screen.width_of([head, *rows]) <= screen.console.width:
        screen.table("lrrrl", [(head, None, "dim"), *((row, None, "") for row in rows)])
    else:
        for what, left, right, ratio, apart in rows:
            more = f"{ratio and f', {ratio}'}{apart and f'; told apart: {apart}'}"
            screen.line(Text.assemble((f"{what}: ", "bold"), f"{left} → {right}{more}"), indent=3)
    if found.unknown:
        screen.line(f"not known of both: {', '.join(found.unknown)}", style="dim")
