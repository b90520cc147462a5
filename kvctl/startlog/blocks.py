"""vLLM: blocks, tokens and requests that the printed memory holds."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.allocation import Allocation
from kvctl.record import Record
from kvctl.search import last
from kvctl.size import SizePlan
from kvctl.startlog.causes import cause, compared
from kvctl.startlog.figures import Figure
from kvctl.startlog.log import StartLog
from kvctl.startlog.report import LogRow, row
from kvctl.startlog.trial import Trial
from kvctl.units import format_bytes

_NEAR = 64
"""Numbers of blocks that may print the same tokens."""


class Found(Record):
    """What a plan gives at both ends of the printed memory."""

    low: Allocation
    high: Allocation
    blocks: tuple[int, int]
    match: Allocation | None
    """The plan with some number of blocks between, where it gives what the log says."""


def capacity(trial: Trial, plan: SizePlan, meaning: str = "") -> Found | None:
    """The plan at the printed memory; `match` where tokens, requests and blocks are those of the log.

    `meaning`: what the logged tokens are, where that is not what the version says.
    """
    log = trial.log
    length = log.figure("length")
    context = plan.contexts[0] if plan.contexts and plan is not trial.plan and length is None else trial.length
    sample = trial.allocation(plan, context, kv_budget=2**36)
    if sample is None or not sample.bytes_per_block:
        return None
    size = sample.bytes_per_block
    held = _blocks(log, plan, sample)
    if held is None:
        return None
    low, high = held

    def at(blocks: int) -> Allocation | None:
        override = plan.serving.num_blocks
        return trial.allocation(plan, context, kv_budget=max(blocks, 1) * size, num_blocks=override)

    ends = at(low), at(high)
    if ends[0] is None or ends[1] is None:
        return None
    counted = log.figure("blocks")
    if counted is not None:
        if not low <= counted.value <= high and plan.serving.num_blocks is None:
            return Found(ends[0], ends[1], held, None)
        low = high = int(counted.value)
    wanted, concurrency = log.figure("capacity"), log.figure("concurrency")
    if wanted is not None:

        def too_few(blocks: int) -> bool:
            found = at(blocks)
            reached = _tokens(found, meaning) if found is not None else None
            return reached is not None and reached < wanted.value

        low = last(too_few, low - 1, high) + 1
    for blocks in range(low, min(low + _NEAR, high) + 1):
        found = at(blocks)
        if found is not None and _says(found, wanted, concurrency, meaning):
            return Found(ends[0], ends[1], held, found)
        if found is None or (wanted is not None and _tokens(found, meaning) != wanted.value):
            break
    return Found(ends[0], ends[1], held, None)


def _blocks(log: StartLog, plan: SizePlan, sample: Allocation) -> tuple[int, int] | None:
    """Fewest and most blocks that the printed memory holds, on the poorest rank or stage."""
    if plan.serving.num_blocks is not None:
        return plan.serving.num_blocks, plan.serving.num_blocks
    if plan.serving.kv_budget is not None:
        return (plan.serving.kv_budget // sample.bytes_per_block,) * 2
    budget = log.kv_budget
    if budget is None or budget[1] < sample.bytes_per_block:
        return None
    sizes = [row.bytes_per_block for row in sample.per_rank]
    if min(sizes) == max(sizes):
        return max(budget[0], 0) // sizes[0], budget[1] // sizes[0]
    # Stages hold blocks of their own sizes, and all have as many as the one with the fewest.
    ends = []
    for figure in log.of_one_engine("kv_available"):
        stage = next((int(word[2:]) for word in figure.where.split() if word.startswith("PP")), 0)
        first_rank = stage * sample.tensor_parallel_size
        size = sizes[first_rank] if "PP" in figure.where and first_rank < len(sizes) else max(sizes)
        if size:
            ends.append((int(figure.low) // size, int(figure.high) // size))
    return (min(low for low, _ in ends), min(high for _, high in ends)) if ends else None


def _tokens(found: Allocation, meaning: str) -> int | None:
    """What the log would print of a plan."""
    blocks = found.num_blocks
    if not meaning or blocks is None:
        return found.reported_capacity
    sizes = [group.block_size for group in found.groups if group.block_size]
    if meaning == "blocks":
        return blocks * found.block_size
    if meaning == "groups":
        return blocks // len(found.groups) * min(sizes) if sizes else None
    return int(found.max_concurrency * found.longest_sequence) if found.max_concurrency is not None else None


def _says(found: Allocation, tokens: Figure | None, concurrency: Figure | None, meaning: str) -> bool:
    if tokens is not None and _tokens(found, meaning) != tokens.value:
        return False
    if concurrency is None or meaning:
        return True
    # As printed, to two places.
    return found.max_concurrency is not None and f"{found.max_concurrency:.2f}" == f"{concurrency.value:.2f}"


_MEANINGS = {
    "blocks": "the tokens are blocks × tokens of a block, as vLLM counts up to 0.9",
    "groups": "the tokens are the blocks of one group of layers, as vLLM counts from 0.10 to 0.20.0",
    "requests": "the tokens are those of so many full requests, as vLLM counts from 0.20.1 on",
}


def rows(trial: Trial) -> Iterator[LogRow]:
    """Block size, blocks, capacity and concurrency of the log beside the plan's."""
    log, plan = trial.log, trial.plan
    said = log.figure("block_size")
    if said is not None:

        def size(plan: SizePlan) -> tuple[float, float] | None:
            found = trial.allocation(plan)
            return (found.block_size,) * 2 if found is not None else None

        yield from compared(trial, "block size", said, size)
    tokens, concurrency = log.figure("capacity"), log.figure("concurrency")
    if tokens is None and concurrency is None and log.figure("blocks") is None:
        return
    found = capacity(trial, plan)
    if found is None:
        return
    why = remark = ""
    if found.match is None:
        why, remark = _why(trial, found)
    if (counted := log.figure("blocks")) is not None:
        yield row("blocks", counted, *found.blocks, found.blocks[0] <= counted.value <= found.blocks[1], why)
    if tokens is not None:
        ends = found.low.reported_capacity or 0, found.high.reported_capacity or 0
        reached = found.match is not None or (_alone(trial, found, "capacity"))
        yield row("capacity", tokens, *ends, reached, "" if reached else why, "" if reached else remark)
    if concurrency is not None:
        ratios = round(found.low.max_concurrency or 0, 2), round(found.high.max_concurrency or 0, 2)
        reached = found.match is not None or _alone(trial, found, "concurrency")
        yield row("concurrency", concurrency, *ratios, reached, "" if reached else why)


def _alone(trial: Trial, found: Found, name: str) -> bool:
    """Whether one of the two values is within what the plan gives, while the other is not."""
    said = trial.log.figure(name)
    if said is None:
        return False
    if name == "capacity":
        low, high = found.low.reported_capacity or 0, found.high.reported_capacity or 0
        return low <= said.value <= high and (low < high or low == said.value)
    return (found.low.max_concurrency or 0) - said.half <= said.value <= (found.high.max_concurrency or 0) + said.half


def _why(trial: Trial, found: Found) -> tuple[str, str]:
    """What accounts for another capacity; and, where nothing does, what the log's numbers come to."""
    log, plan = trial.log, trial.plan
    if log.figure("capacity") is not None:
        for meaning, words in _MEANINGS.items():
            got = capacity(trial, plan, meaning)
            if got is not None and got.match is not None:
                return words, ""

    if _apart(trial, found):
        return "a draft layer shares no group with others, which makes every layer a group of its own", ""

    def holds(other: SizePlan) -> bool:
        got = capacity(trial, other)
        return got is not None and got.match is not None

    if words := cause(trial, holds):
        return words, ""
    return "", _implied(trial, found)


def _apart(trial: Trial, found: Found) -> bool:
    """Whether the log's tokens are those of groups of one layer each, which draw blocks of one layer's page."""
    tokens, budget, groups = trial.log.figure("capacity"), trial.log.kv_budget, found.high.groups
    if tokens is None or budget is None or len(groups) < 2 or trial.plan.serving.speculative is None:
        return False
    page = max(group.page_bytes // group.layers for group in groups)
    request = sum(group.layers * group.blocks_per_request for group in groups)
    return any(
        int(blocks / request * found.high.longest_sequence) == tokens.value
        for blocks in range(budget[0] // page, min(budget[1] // page, budget[0] // page + 4096) + 1)
    )


def _implied(trial: Trial, found: Found) -> str:
    """What the log's tokens come to, for somebody to think about."""
    log = trial.log
    tokens, budget = log.figure("capacity"), log.kv_budget
    reported = found.high.reported_capacity
    if tokens is None or budget is None or not reported or not tokens.value:
        return ""
    size, blocks = found.high.bytes_per_block, found.high.num_blocks or 0
    needed = round(tokens.value * blocks / reported) * size
    out = f"so many tokens take {format_bytes(needed)} by kvctl's count"
    ranks = len(found.high.per_rank)
    if needed < budget[0] and ranks > 1 and len(log.of_one_engine("kv_available")) < ranks:
        return out + f"; of {ranks} ranks not all say what they have, and the poorest decides"
    if len(found.high.groups) == 1:
        out += f"; the log's own numbers are {sum(budget) / 2 / tokens.value:,.0f} bytes a token, kvctl's {size / found.high.block_size:,.0f}"
        out += ": another model, or another format of the cache, than was read"
    return out
