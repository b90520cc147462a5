"""Recommendations onto the screen and into files: the report to stdout, notes to stderr."""

from __future__ import annotations

import itertools
import json
import os
import sys
from typing import TYPE_CHECKING

from kvctl import __version__, output
from kvctl.errors import KvctlError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvctl.options_recommend import Proof
    from kvctl.recommend.answers import Answer, Known, Recommendation
    from kvctl.recommend.report import RecommendReport
    from kvctl.recommend.request import Ask
    from kvctl.recommend.what_if import Side

_PLAN = "plan.json"
"""What the plan itself is called in a folder."""


def _notes(report: RecommendReport) -> list[str]:
    """Each once, with the requests that it is about where these are not all; of measurements of a card that another request is about, nothing."""
    from kvctl.recommend.passed_over import card_of

    cards = {card_of(one.ask) for one in report.each}
    about: dict[str, list[Ask]] = {}
    for one in report.each:
        elsewhere = {each.words for each in one.passed_over if each.card in cards}
        for note in (*one.ask.spec.notes, *one.notes):
            if note not in elsewhere:
                about.setdefault(note, []).append(one.ask)
    asks = [one.ask for one in report.each]
    out = []
    for note, own in about.items():
        models = {ask.spec.id for ask in own}
        kinds = {ask.device.name for ask in own}
        of_models = [ask for ask in asks if ask.spec.id in models]
        of_kinds = [ask for ask in asks if ask.device.name in kinds]
        if len(own) == len(asks):
            out.append(note)
        elif len(own) == len(of_models):
            out.append(f"{', '.join(sorted(models))}: {note}")
        elif len(own) == len(of_kinds):
            out.append(f"{', '.join(sorted(kinds))}: {note}")
        else:
            out.append(f"{', '.join(f'{ask.spec.id} on {ask.device.name}' for ask in own)}: {note}")
    return out


def say_unused(report: RecommendReport) -> None:
    """Measured speeds that the answer does not rest on."""
    output.say(
        "note", [words for one in report.each for words in (*one.unread, *(each.words for each in one.passed_over))]
    )


def emit_recommend(report: RecommendReport, form: str, *, quiet: bool) -> None:
    """Print answers in the form asked for."""
    from kvctl.recommend.report import row_dict

    output.forgive_encoding()
    if not quiet:
        output.say("note", _notes(report))
    if form == "json":
        output.print_json(report.to_dict())
    elif form == "csv":
        output.print_csv([row_dict(one) for one in report.each])
    elif form == "md":
        from kvctl.screen_recommend import lines_of, table_of, title

        head, *rows = table_of(report)
        several = len(report.each) > 1
        output.print_markdown_table(head, rows, 3 if several else 2)
        for found in report.each if report.explain or not several else ():
            print(f"\n## {output.markdown_cell(title(found))}\n" if several else "")
            for line in lines_of(found, explain=report.explain):
                print(f"- {output.markdown_cell(line)}")
            if report.trial is not None:
                from kvctl.screen_recommend import trial_lines, trial_table

                print()
                head, *rows = trial_table(report.trial)
                output.print_markdown_table(head, rows)
                print()
                for line, _ in trial_lines(report.trial):
                    print(f"- {output.markdown_cell(line)}")
    else:
        from kvctl.screen_lines import Screen
        from kvctl.screen_recommend import print_matrix, print_recommendation

        if len(report.each) > 1:
            print_matrix(Screen(), report)
            for found in report.each if report.explain else ():
                print("\n")
                print_recommendation(Screen(), found, report.site_of(found), explain=True)
        else:
            print_recommendation(Screen(), report.each[0], report.site_of(report.each[0]), explain=report.explain)
            if report.trial is not None:
                from kvctl.screen_recommend import print_trial

                print_trial(Screen(), report.trial)


def verified(
    report: RecommendReport, answer: int, proof: Proof, ask: Ask, known: Known, *, quiet: bool
) -> RecommendReport:
    """The report with what came of one of its answers, which is started for that on this machine and ended again; `ask` has the
    objectives, and `known` what speeds are predicted from.

    Raises:
        UsageError: it cannot be started here.
        KvctlError: it does not start.

    """
    from kvctl import options_launch, output_serve, signals
    from kvctl.loadtest.figures import SECOND, Slo
    from kvctl.recommend import trial_time, verify
    from kvctl.recommend.answers import judge_of

    found = report.each[0]
    chosen = _chosen(found, answer)
    candidate = chosen.judged.candidate
    verify.check_here(candidate.deployment, candidate.checkpoint.how)
    launch = verify.launch_of(candidate.deployment, report.site_of(found), proof.more).replace(log=proof.log)
    launch = launch if proof.limit_s is None else launch.replace(limit_s=proof.limit_s)
    sizing = options_launch.read_sizing(launch, None, proof.model).replace(spec=ask.spec, settings="settings of the recommended command")  # fmt: skip
    slo = None
    if ask.ttft is not None or ask.tpot is not None:
        ttft, tpot = (None if limit is None else round(limit * SECOND) for limit in (ask.ttft, ask.tpot))
        slo = Slo(ttft, tpot, scheduled=ask.rate is not None)
    plan = verify.plan_of(verify.promised(chosen, ask), launch, sizing, slo, ask.slo_percent)
    if not quiet:
        output.say("note", [trial_time.before(plan, candidate, judge_of(ask, known))])
    over = itertools.count(1)
    signals.heed()
    with output_serve.live(quiet=quiet, more=lambda one: trial_time.after(plan, one, next(over))) as (now, live, done):
        return report.replace(trial=verify.put(answer, plan, now, live, done))


def _chosen(found: Recommendation, answer: int) -> Answer:
    if answer > len(found.answers):
        raise UsageError(f"--answer {answer}: there are {len(found.answers)}", hint="--answer 1 is the best")
    return found.answers[answer - 1]


def side_of(report: RecommendReport, answer: int) -> Side:
    """One answer, as plans are compared."""
    from kvctl.recommend.report import side

    found = report.each[0]
    return side(_chosen(found, answer), report.site_of(found))


def emit_what_if(left: Side, right: Side, form: str) -> None:
    """Print what differs between two plans."""
    from kvctl.recommend.what_if import compare

    output.forgive_encoding()
    found = compare(left, right)
    if form == "json":
        output.print_json({"schema": "kvctl.recommend-compare/1", "kvctl_version": __version__, **found.to_dict()})
        return
    from kvctl.screen_recommend import difference_rows, print_difference

    rows = difference_rows(found)
    if form == "csv":
        output.print_csv([dict(zip(rows[0], row, strict=True)) for row in rows[1:]])
    elif form == "md":
        output.print_markdown_table(rows[0], rows[1:])
    else:
        from kvctl.screen_lines import Screen

        print_difference(Screen(), found)


def emit_files(
    report: RecommendReport, kinds: tuple[str, ...], folder: str | None, answer: int, *, force: bool, quiet: bool
) -> None:
    """Write what can be run: one kind to stdout, several into a folder, which is made; all of them or none.

    Raises:
        UsageError: a kind that makes no sense for the deployment, or another file in a place where one would come (not with `force`).
        KvctlError: it cannot be written.

    """
    from kvctl.recommend import emit
    from kvctl.recommend.promises import promise_of, weights_of

    output.forgive_encoding()
    found = report.each[0]
    chosen = _chosen(found, answer)
    site = report.site_of(found).replace(weights=weights_of(chosen.judged.candidate, found.ask))
    deployment, promise = chosen.judged.candidate.deployment, promise_of(chosen, found.ask)
    texts: dict[str, str] = {}
    wanted = (*(kind.name for kind in emit.KINDS), "json") if kinds == ("all",) else kinds
    files = {kind: _PLAN if kind == "json" else emit.file_of(kind, deployment, site) for kind in wanted}
    # What names the others is written when it is known which of them there are.
    for kind in sorted(wanted, key=lambda kind: kind == "runbook"):
        beside = {other: files[other] for other in texts} if folder is not None else {}
        if "json" in beside and answer > 1:
            beside["json"] += f"#{answer}"
        try:
            texts[kind] = (
                json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n"
                if kind == "json"
                else emit.emit(kind, deployment, site, promise, beside)
            )
        except UsageError as error:
            if kinds != ("all",):
                raise
            if not quiet:
                output.say("note", [f"no {kind}: {error.message}"])
    if folder is None:
        sys.stdout.write(texts[kinds[0]])
        return
    from kvctl.files import write_whole

    places = {os.path.join(folder, files[kind]): text.encode() for kind, text in texts.items()}
    _check_places(folder, places, force=force)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise KvctlError(f"{folder[:200]}: {error.strerror}", hint="-o names a folder") from None
    for place, data in places.items():
        write_whole(place, data)
        if not quiet:
            output.say("wrote", [place])


def _check_places(folder: str, places: Mapping[str, bytes], *, force: bool) -> None:
    """Refuses, before anything is written, places that a file cannot come to, or where another one is."""
    from kvctl.files import check_writable

    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise UsageError(f"{folder[:200]} is a file", hint="-o names a folder, where each kind has a file")
    if not os.path.isdir(folder):
        return
    for place, data in places.items():
        try:
            check_writable(place)
        except KvctlError as error:
            raise KvctlError(error.message, hint="nothing was written; -o names another folder") from None
        if not force and os.path.lexists(place) and not _holds(place, data):
            raise UsageError(f"{place[:200]} is there already, and is another file", hint="--force replaces it; nothing was written")  # fmt: skip


def _holds(place: str, data: bytes) -> bool:
    """Whether a file is the same already."""
    try:
        with open(place, "rb") as file:
            return file.read(len(data) + 1) == data
    except OSError:
        return False
