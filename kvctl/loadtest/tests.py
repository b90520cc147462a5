"""All loads of one run, one after the other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvctl.errors import KvctlError
from kvctl.files import check_writable
from kvctl.loadtest import calibrate, capacity, limit, remarks, verdict
from kvctl.loadtest.plan import Plan, Step
from kvctl.loadtest.report import ServeReport, missed, server_of
from kvctl.loadtest.run import Outcome, Session

if TYPE_CHECKING:
    from io import TextIOWrapper

    from kvctl.loadtest.launch import Started
    from kvctl.loadtest.live import Live
    from kvctl.measure.run import Now


MOST_AT_ONCE = 4096
"""Requests at once that a search for the limit goes up to."""


class Log:
    """A line of JSON for every request, in a file that is there when it is complete; None writes none."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self._part: Path | None = None
        """Where it is written until it is complete; None of what is no plain file: a pipe, a device."""
        self._target: Path | None = None
        self._file: TextIOWrapper | None = None

    def __enter__(self) -> Log:
        if self.path is None:
            return self
        try:
            place = Path(os.path.realpath(self.path))
            if not self.path or place.is_dir():
                raise KvctlError(f"cannot write {self.path[:200]!r}: it is a folder", hint="--log requests.jsonl")
            if place.exists() and not place.is_file():
                self._file = place.open("w", encoding="utf-8")
                return self
            check_writable(self.path)
            self._target, self._part = place, place.with_name(f".kvctl-{os.getpid()}-{os.urandom(4).hex()}.part")
            self._file = self._part.open("x", encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise self._cannot(error) from None
        return self

    def _cannot(self, error: OSError | ValueError) -> KvctlError:
        why = getattr(error, "strerror", None) or str(error)
        return KvctlError(f"cannot write {(self.path or '')[:200]}: {why.lower()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
            if (
                self._part is not None
                and self._target is not None
                and (kind is None or issubclass(kind, KeyboardInterrupt))
            ):
                self._part.replace(self._target)
        except OSError as wrong:
            raise self._cannot(wrong) from None
        finally:
            if self._part is not None:
                self._part.unlink(missing_ok=True)

    @property
    def wanted(self) -> bool:
        """Whether there is a file."""
        return self._file is not None

    def add(self, line: Mapping[str, Any]) -> None:
        """One request that has ended."""
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise self._cannot(error) from None


def planned(plan: Plan) -> ServeReport:
    """What would be done."""
    from kvctl.measure.environment import environment

    return ServeReport(plan, {}, environment("cpu"), dry=True)


Done = Callable[[Outcome], None]
"""Is given each load as it is over."""


def run(plan: Plan, now: Now, log: Log, live: Live | None = None, done: Done = lambda outcome: None) -> ServeReport:
    """Every load, each told `live` while it runs and `done` when it is over; on Ctrl-C what is complete is in the report, which says so.

    Raises:
        KvctlError: the server cannot be reached, or does not take such requests.

    """
    if plan.launch is None:
        return _tested(plan, now, log, None, live, done)
    from kvctl.loadtest import launch

    with launch.serving(plan.launch, now, partial(capacity.refused, plan.sizing)) as started:
        # Of an engine that lists models, the one that it was started with is the first.
        report = _tested(plan.replace(place=started.place), now, log, started, live, done)
        return report.replace(started=started.replace(resident_bytes=started.taken()))


def _tested(plan: Plan, now: Now, log: Log, started: Started | None, live: Live | None, done: Done) -> ServeReport:
    """A server that is there."""
    report = planned(plan).replace(dry=False, calibration=calibrate.load(), started=started)
    session = Session(plan, now.stage)
    session.check()
    held = capacity.look(
        session.client,
        session.server,
        session.wire.model,
        session.longest,
        plan.sizing,
        None if started is None else started.log,
    )
    session.cells = held.cells
    report = report.replace(server=server_of(session), capacity=held)
    outcomes: list[Outcome] = []

    def one(step: Step) -> Outcome:
        now.stage(f"{step.words}: {step.work.words}")
        if live is not None:
            live.begin(step.words, len(outcomes) + 1, None if plan.limit else len(session.steps), plan.length_of(step))
        try:
            outcomes.append(session.run(step, len(outcomes), log.add if log.wanted else None, now.say, live))
        finally:
            if live is not None:
                live.end()
        done(outcomes[-1])
        return outcomes[-1]

    if plan.limit:
        report = report.replace(limit=_searched(session, one))
    else:
        for step in session.steps:
            if one(step).interrupted or not outcomes[-1].figures.good:
                break
    report = report.replace(outcomes=tuple(outcomes), interrupted=any(outcome.interrupted for outcome in outcomes))
    doubtful = any(outcome.figures.faults for outcome in outcomes)
    ended = None if started is None else started.ended(doubtful=doubtful)
    return report.replace(notes=(*plan.notes, *session.notes), outcomes=tuple(_judged(report)), ended=ended)


def _searched(session: Session, one: Callable[[Step], Outcome]) -> limit.Limit:
    (step,) = session.steps

    def test(at_once: int) -> tuple[Outcome, str | None]:
        outcome = one(step.replace(at_once=at_once))
        return outcome, limit.breaks(outcome, missed(session.plan, outcome))

    return limit.search(test, step.at_once or 1, MOST_AT_ONCE)


def _judged(report: ServeReport) -> Iterator[Outcome]:
    """Loads with what the client can take in, and what others of fewer requests at once say of them."""
    ceiling = None if report.calibration is None else report.calibration.ceiling
    before: tuple[int, float] | None = None
    for one in report.outcomes:
        found = verdict.beyond(one.verdict, one.output_rate, ceiling, report.plan.processes)
        if one.step.at_once is not None and one.output_rate is not None:
            now = one.step.at_once, one.output_rate
            found = verdict.beside(found, now, before)
            before = now
        engine = str(report.server.get("engine"))
        yield one.replace(verdict=found, remarks=tuple(remarks.remarks(one, engine)))
