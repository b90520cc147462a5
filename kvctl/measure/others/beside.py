"""What an engine said at its start beside kvctl's own, and the report of a whole run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvctl.ask import ask_log
from kvctl.errors import KvctlError
from kvctl.measure.environment import environment
from kvctl.measure.others.ask import EngineAsk
from kvctl.measure.others.process import telling
from kvctl.measure.others.words import planned
from kvctl.measure.report import Point, ProfileReport
from kvctl.measure.statistics import Sample
from kvctl.record import Record
from kvctl.size import SizePlan
from kvctl.spec import ModelSpec
from kvctl.startlog import explain, read_log
from kvctl.startlog.figures import Figure


class Times:
    """Times of one point as its passes bring them."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.steps: list[tuple[float, ...]] = []

    def add(self, first_s: float, steps: tuple[float, ...]) -> None:
        """One repeat."""
        self.first.append(first_s)
        self.steps.append(steps)

    def point(self, context: int, batch: int, decode: int, error: str | None = None) -> Point:
        """What came of the point."""
        steps = tuple(seconds for one in self.steps for seconds in one)
        return Point(
            context, batch, decode,
            ttft=Sample(tuple(self.first), (1,) * len(self.first)) if self.first else None,
            tpot=Sample(steps, tuple(len(one) for one in self.steps)) if steps else None,
            error=error,
        )  # fmt: skip


class Ran(Record):
    """What a run of an engine brought."""

    points: tuple[Point, ...]
    interrupted: bool = False
    environment: Mapping[str, Any] = {}
    """What the engine says of itself: program, build, devices."""
    settings: Mapping[str, Any] = {}
    """The command, and settings in effect that its log does not have."""
    figures: tuple[Figure, ...] = ()
    """Numbers that it gave by another way than its log."""
    notes: tuple[str, ...] = ()
    renamed: tuple[str, str] | None = None
    """A folder of this run alone, and what stands for it in what is reported."""


def report(
    engine: str, spec: ModelSpec, plan: SizePlan, ask: EngineAsk, words: Sequence[str], log: Path, ran: Ran
) -> ProfileReport:
    """The run, with the start that its log tells of beside kvctl's plan for the same words.

    Raises:
        KvctlError: the log is gone.

    """
    found = read_log(str(log))
    fresh = tuple(figure for figure in ran.figures if not found.all(figure.name))
    found = found.replace(path=ask.log_file or f"{engine}'s log", figures=(*found.figures, *fresh))
    if ran.renamed is not None and found.model is not None:
        found = found.replace(
            model=found.model.replace(*ran.renamed), engine_args=found.engine_args.replace(*ran.renamed)
        )
    told = planned(engine, words, plan, found.rules)
    notes = [*ran.notes, *told.notes[len(plan.notes) :]]
    model = weights = dtype = None
    try:
        answer = ask_log(found, spec, told)
        beside, first = answer.log, answer.results[0]
        model, weights, dtype = first.model, first.weights, first.dtype
    except KvctlError as error:
        notes.append(f"kvctl has no plan for this start: {error.message}")
        beside = explain(found, spec, told)
    failed = [point for point in ran.points if point.error is not None]
    return ProfileReport(
        model=model,
        engine=engine,
        engine_version=found.version,
        dtype=dtype,
        weights=weights,
        settings={
            "contexts": list(ask.contexts), "batches": list(ask.batches),
            "decode": ask.decode, "repeat": ask.repeats, "seed": ask.seed,
            "prompt": "random tokens" if ask.prompt is None else "text", **ran.settings,
        },
        environment=_where(ran),
        points=ran.points,
        engine_log=beside,
        notes=tuple(dict.fromkeys(notes)),
        warnings=tuple(f"{point.context:,} tokens × {point.batch:,}: {point.error}" for point in failed),
        interrupted=ran.interrupted,
    )  # fmt: skip


def _where(ran: Ran) -> dict[str, Any]:
    """The machine, and the engine's own words; the packages of this Python did not run the model."""
    return {name: value for name, value in environment().items() if name not in ("packages", "torch")} | dict(
        ran.environment
    )


def refused(
    error: KvctlError, engine: str, spec: ModelSpec, plan: SizePlan, words: Sequence[str], log: Path
) -> KvctlError:
    """The error of a start that failed, with what would fit where its log says why in words that kvctl knows."""
    with contextlib.suppress(KvctlError):
        found = read_log(str(log))
        why = explain(found, spec, planned(engine, words, plan, found.rules)).refused
        if why is not None:
            hint = "it fits with " + " or ".join(why.fits) if why.fits else telling(why.said)
            return KvctlError(f"{engine} did not start: {why.why}", hint=hint)
    return error
