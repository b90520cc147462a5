"""All loads of one run, one after the other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvctl.errors import KvctlError
from kvctl.loadtest import calibrate, limit, verdict
from kvctl.loadtest.exchange import Exchange
from kvctl.loadtest.load import Key, Load
from kvctl.loadtest.report import ServeReport, missed, server_of
from kvctl.loadtest.run import Outcome, Plan, Session, Step

if TYPE_CHECKING:
    from io import TextIOWrapper

    from kvctl.loadtest.figures import Figures
    from kvctl.loadtest.live import Live
    from kvctl.loadtest.loop import Loop
    from kvctl.loadtest.metrics import Watch
    from kvctl.measure.run import Now


MOST_AT_ONCE = 4096
"""Requests at once that a search for the limit goes up to."""


class Log:
    """A line of JSON for every request, in a file that is there when it is complete; None writes none."""

    def __init__(self, path: str | None) -> None:
        self.path = None if path is None else Path(path)
        self._part = None if self.path is None else self.path.with_name(f".{self.path.name}.part")
        self._file: TextIOWrapper | None = None
        self.step = 0

    def __enter__(self) -> Log:
        if self._part is not None:
            try:
                self._file = self._part.open("w", encoding="utf-8")
            except OSError as error:
                raise KvctlError(f"cannot write {self.path}: {(error.strerror or str(error)).lower()}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None or self._part is None or self.path is None:
            return
        self._file.close()
        if kind is None or issubclass(kind, KeyboardInterrupt):
            self._part.replace(self.path)
        else:
            self._part.unlink(missing_ok=True)

    def add(self, exchange: Exchange) -> None:
        """One that has ended; times in seconds, stamps from when it was due."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(_line(exchange, self.step)) + "\n")
        except OSError as error:
            raise KvctlError(f"cannot write {self.path}: {(error.strerror or str(error)).lower()}") from None


def _line(one: Exchange, step: int) -> dict[str, Any]:
    def since(stamp: int) -> float | None:
        return (stamp - one.scheduled) / 1e9 if stamp else None

    usage = one.usage
    return {
        "load": step, "number": one.key.number if isinstance(one.key, Key) else None, "phase": one.key.phase if isinstance(one.key, Key) else None,
        "sent": since(one.sent), "first_byte": since(one.first_byte), "first_token": since(one.first_token),
        "first_answer": since(one.answer_at), "last_token": since(one.last_token), "ended": since(one.ended), "events": len(one.stamps),
        "input_tokens": None if usage is None else usage.prompt, "output_tokens": None if usage is None else usage.completion,
        "cached_tokens": None if usage is None else usage.cached, "finish": one.finish, "status": one.status,
        "fault": None if one.fault is None else one.fault.kind, "message": None if one.fault is None else one.fault.message,
        "reconnects": one.reconnects, "kernel_stamps": one.kernel,
    }  # fmt: skip


def planned(plan: Plan) -> ServeReport:
    """What would be done."""
    from kvctl.measure.environment import environment

    return ServeReport(plan, {}, environment("cpu"), dry=True)


def run(
    plan: Plan, now: Now, log: Log, live: Live | None = None, done: Callable[[Outcome], None] = lambda outcome: None
) -> ServeReport:
    """Every load, each told `live` as it begins and `done` when it is over; on Ctrl-C what is complete is in the report, which says so.

    Raises:
        KvctlError: the server cannot be reached, or does not take such requests.

    """
    report = planned(plan).replace(dry=False, calibration=calibrate.load())
    session = Session(plan, now.stage)
    session.check()
    report = report.replace(server=server_of(session))
    outcomes: list[Outcome] = []

    def one(step: Step) -> Outcome:
        now.stage(f"{step.words}: {plan.input_tokens:,} tokens in, {plan.output_tokens:,} out")
        log.step = len(outcomes)
        of = None if plan.limit else len(plan.steps)

        def show(figures: Figures, source: Load, loop: Loop, watch: Watch | None) -> None:
            if live is not None:
                live.begin(step.words, len(outcomes) + 1, of, plan.length_of(step), figures, source, loop, watch)

        try:
            outcomes.append(session.run(step, len(outcomes), log.add, now.say, show))
        finally:
            if live is not None:
                live.end()
        done(outcomes[-1])
        return outcomes[-1]

    if plan.limit:
        report = report.replace(limit=_searched(plan, one))
    else:
        for step in plan.steps:
            if one(step).interrupted or not outcomes[-1].figures.good:
                break
    report = report.replace(outcomes=tuple(outcomes), interrupted=any(outcome.interrupted for outcome in outcomes))
    return report.replace(notes=tuple(session.notes), outcomes=tuple(_judged(report)))


def _searched(plan: Plan, one: Callable[[Step], Outcome]) -> limit.Limit:
    def test(at_once: int) -> tuple[Outcome, str | None]:
        outcome = one(Step(at_once=at_once))
        return outcome, limit.breaks(outcome, missed(plan, outcome))

    return limit.search(test, plan.steps[0].at_once or 1, MOST_AT_ONCE)


def _judged(report: ServeReport) -> Iterator[Outcome]:
    """Loads with what the client can take in, and what others of fewer requests at once say of them."""
    ceiling = None if report.calibration is None else report.calibration.ceiling
    before: tuple[int, float] | None = None
    for one in report.outcomes:
        found = verdict.beyond(one.verdict, one.output_rate, ceiling)
        if one.step.at_once is not None and one.output_rate is not None:
            now = one.step.at_once, one.output_rate
            found = verdict.beside(found, now, before)
            before = now
        yield one.replace(verdict=found)
