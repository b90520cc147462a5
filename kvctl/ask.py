"""Every model under every plan: the answers of one run, and who gave none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.record import Record
from kvctl.reports import SizeReport, SizeResult
from kvctl.size import SizePlan, answers, needs_tensors
from kvctl.spec import ModelSpec

if TYPE_CHECKING:
    from kvctl.startlog import StartLog


class Plans(Record):
    """What to ask: plans, and for several engines the reasons of those that cannot be asked."""

    each: tuple[SizePlan, ...]
    faults: tuple[tuple[str, KvctlError], ...] = ()
    """Names of engines, and what is wrong with the question to them."""
    comparing: bool = False
    """Whether engines are compared: one that gives no answer is named, and the others answer."""


def ask(specs: Sequence[ModelSpec], plans: Plans) -> SizeReport:
    """Answers for every model, plan and context.

    Raises:
        KvctlError: the first plan's, or where engines are compared that of all of them.

    """
    if any(needs_tensors(plan) for plan in plans.each):
        from kvctl.sources.tensors import attach

        specs = [attach(spec) for spec in specs]
    results: list[SizeResult] = []
    faults = list(plans.faults)
    for spec in specs:
        left: list[str] = []
        first = len(results)
        for plan in plans.each:
            try:
                results += _answers(spec, plan)
            except KvctlError as error:
                if plan.technique is not None and plan.technique.of_all:
                    left.append(f"{plan.technique.name} is left out: {error.message}")
                    continue
                if not plans.comparing:
                    raise
                faults.append((plan.engine.name, error))
        if left and len(results) > first:
            results[first] = results[first].replace(warnings=(*results[first].warnings, *left))
    refused = tuple(dict.fromkeys(f"{name}: {error.message}" for name, error in faults))
    if not results:
        fault_kind = UsageError if all(isinstance(error, UsageError) for _, error in faults) else ConfigError
        raise fault_kind("no engine answers: " + "; ".join(refused))
    return SizeReport(tuple(results), refused)


def ask_log(log: StartLog, spec: ModelSpec, plan: SizePlan) -> SizeReport:
    """A start-up log, explained, and the answer for the start that it tells of.

    Raises:
        KvctlError: kvctl has no plan for this start.

    """
    from kvctl.startlog import explain

    report = explain(log, spec, plan)
    budget = log.kv_budget
    told = log.told(plan.serving, budget[0] if budget is not None else None)
    return ask([spec], Plans((plan.replace(serving=told),))).replace(log=report)


def _answers(spec: ModelSpec, plan: SizePlan) -> list[SizeResult]:
    if plan.hardware is None:
        return answers(spec, plan)
    from kvctl.solve import answers_on

    return answers_on(spec, plan)
