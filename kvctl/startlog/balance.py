"""Whether the log's own parts add up to the memory it leaves for the cache; and what kvctl estimates beside them."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.errors import KvctlError
from kvctl.reports import SizeResult
from kvctl.size import SizePlan, answer, prepare
from kvctl.startlog.figures import Figure
from kvctl.startlog.log import StartLog
from kvctl.startlog.report import LogRow, row
from kvctl.startlog.trial import Trial
from kvctl.units import format_bytes


def sums(log: StartLog) -> Iterator[LogRow]:
    """vLLM: the share of the GPU, and what is left of it."""
    total, share, asked = log.figure("device_total"), log.figure("utilization"), log.figure("requested")
    if total is not None and share is not None and asked is not None:
        low, high = total.low * (share.value - share.half), total.high * (share.value + share.half)
        agrees = asked.meets(low, high)
        cause, free = "", log.figure("device_free")
        if not agrees and free is not None and asked.meets(free.low * share.value, free.high * share.value):
            cause = "a share of the memory that was free, not of the total"
        yield row("share of the GPU", asked, round(low), round(high), agrees, cause)
    left = log.figure("kv_available")
    parts = _parts(log)
    if asked is None or left is None or not parts:
        return
    low = asked.low - sum(part.high for part in parts)
    high = asked.high - sum(part.low for part in parts)
    agrees = left.meets(low, high)
    cause, graphs = "", log.figure("graphs_estimated")
    if not agrees and graphs is not None:
        if left.meets(low - graphs.high, high - graphs.low):
            cause = f"{graphs.text} of CUDA graphs are taken out as well"
        elif left.meets(low + graphs.low, high + graphs.high):
            cause = f"{graphs.text} of CUDA graphs are not taken out"
    yield row("share less the parts", left, low, high, agrees, cause)


def _parts(log: StartLog) -> list[Figure]:
    """What the log says takes the rest of the share, of one rank."""
    for names in (("consumed", "activations"), ("weights_used", "activations", "non_torch"),
                  ("weights_profiled", "activations", "non_torch")):  # fmt: skip
        found = [log.of_one_engine(name) for name in names]
        if all(found):
            return [figures[0] for figures in found]
    return []


def measured(trial: Trial, plan: SizePlan) -> Iterator[LogRow]:
    """What the engine measured beside what kvctl estimates: differences, and no verdict."""
    result = _answer(trial, plan)
    if result is None:
        return
    yield from _weights(trial, plan, result)
    if result.fit is None:
        return
    log, parts = trial.log, {part.name: part.bytes for part in result.fit.parts}
    graphs = log.figure("graphs_estimated") or log.figure("graphs")
    # From 0.20 on what the graphs are expected to take is part of the peak that is printed at the end.
    folded = log.figure("consumed") is not None and "graphs" in parts
    peak = parts.get("activations", 0) + (parts["graphs"] if folded else 0)
    for said, words, expected in (
        (
            log.figure("activations"),
            "activations and graphs" if folded else "activations",
            peak if "activations" in parts else None,
        ),
        (graphs, "graphs", parts.get("graphs")),
        (log.figure("kv_available"), "left for the cache", result.fit.kv_budget_bytes),
    ):
        if said is not None and expected is not None:
            yield row(words, said, expected, expected, None, remark="kvctl's is an estimate")


def _answer(trial: Trial, plan: SizePlan) -> SizeResult | None:
    try:
        return answer(prepare(trial.spec, plan), trial.length)
    except KvctlError:
        return None


def _weights(trial: Trial, plan: SizePlan, result: SizeResult) -> Iterator[LogRow]:
    weights = result.weights
    said = trial.log.all("weights")
    if weights is None or weights.bytes is None or not said:
        return
    ranks = (plan.serving.tensor_parallel or 1) * (plan.serving.pipeline_parallel or 1)
    if trial.log.engine in ("llama.cpp", "ollama"):
        if "GGUF" not in weights.source:
            return  # another file than the one that was loaded
        total = Figure("weights", sum(part.value for part in said), sum(part.half for part in said), "bytes", said[0].line, "",
                       " + ".join(f"{part.text} on {part.where}" for part in said[:8]))  # fmt: skip
        yield row("weights", total, weights.bytes, weights.bytes, None)
        return
    expected = max(weights.per_rank) if weights.per_rank is not None else weights.bytes if ranks == 1 else None
    most = max(said, key=lambda figure: figure.value)
    if expected is None:
        return
    remark = ""
    if abs(most.value - expected) > expected / 10:
        remark = f"not the {format_bytes(expected)} of the checkpoint that was read"
        if ranks > 1 and abs(most.value - weights.bytes) < weights.bytes / 20:
            remark = "every rank holds all of them"
    yield row("weights", most, expected, expected, None, remark=remark)
