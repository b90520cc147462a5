"""Explains a start-up log: what it says, what kvctl expects, and which assumption accounts for a difference."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.size import SizePlan
from kvctl.spec import ModelSpec
from kvctl.startlog import balance, blocks, paged, pools, refused
from kvctl.startlog.log import StartLog
from kvctl.startlog.report import LogReport, LogRow
from kvctl.startlog.trial import Trial


def explain(log: StartLog, spec: ModelSpec, plan: SizePlan) -> LogReport:
    """The log beside kvctl's numbers for the same start.

    `plan` has the engine, formats and serving that `log.engine_args` say, changed by whatever the user adds; its
    hardware, where named, gives estimates to be compared with what the engine measured.
    """
    trial = Trial(log, spec, plan)
    notes = list(log.notes)
    if refusal := trial.refusal():
        notes.append(f"kvctl has no plan for this start: {refusal}")
    rows = [*_rows(trial), *refused.rows(trial), *balance.sums(log), *balance.measured(trial, plan)]
    return LogReport(log, tuple(rows), refused.explained(trial), tuple(notes))


def _rows(trial: Trial) -> Iterator[LogRow]:
    """What follows from the model, the settings and the printed memory."""
    name = trial.log.engine
    if name == "vllm":
        yield from blocks.rows(trial)
    elif name == "sglang":
        yield from pools.sglang_rows(trial)
    elif name in ("llama.cpp", "ollama"):
        yield from pools.llama_rows(trial)
    else:
        yield from paged.rows(trial)
