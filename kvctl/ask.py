"""Every model under every plan: the answers of one run, and who gave none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.record import Record
from kvctl.reports import Missing, SizeReport, SizeResult
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
    missing: list[Missing] = []
    impossible: list[KvctlError] = []
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
                if plans.comparing:
                    faults.append((plan.engine.name + (f", {_beside(plan)}" if plan.what_if else ""), error))
                    continue
                if plan.what_if is None or len(results) == first:
                    raise
                missing.append(
                    Missing(spec.id, _beside(plan), error.message.removeprefix(f"{spec.id}: "), len(results))
                )
                if not _possible(spec, plan):
                    impossible.append(error)
        if left and len(results) > first:
            results[first] = results[first].replace(warnings=(*results[first].warnings, *left))
    refused = tuple(dict.fromkeys(f"{name}: {error.message}" for name, error in faults))
    if not results:
        fault_kind = UsageError if all(isinstance(error, UsageError) for _, error in faults) else ConfigError
        raise fault_kind("no engine answers: " + "; ".join(refused))
    if impossible and len(impossible) == len(missing) and not any(result.what_if for result in results):
        raise impossible[0]  # whatever the engine: there is nothing to compare
    return SizeReport(tuple(results), refused, tuple(missing))


def _beside(plan: SizePlan) -> str:
    """What is asked of a model beside its own structure."""
    assert plan.what_if is not None
    return f"if {plan.what_if.name}" + ("" if plan.technique is None else f", {plan.technique.name}")


def _possible(spec: ModelSpec, plan: SizePlan) -> bool:
    """Whether the model can be thought of in the other structure, in whatever engine."""
    from kvctl.structure import restructured

    assert plan.what_if is not None
    try:
        restructured(spec, plan.what_if)
    except KvctlError:
        return False
    return True


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
