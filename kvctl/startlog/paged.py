"""TensorRT-LLM: the pool of blocks, its bytes a token, and the tokens that the memory holds."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.size import SizePlan
from kvctl.startlog.causes import compared
from kvctl.startlog.report import LogRow, row
from kvctl.startlog.trial import Trial


def rows(trial: Trial) -> Iterator[LogRow]:
    """The pool for the logged tokens, and tokens for the logged memory."""
    log = trial.log
    tokens, size, each = log.figure("capacity"), log.figure("kv_bytes"), log.figure("token_bytes")

    def pool(plan: SizePlan) -> tuple[float, float] | None:
        found = trial.allocation(plan, max_tokens=int(tokens.value), kv_budget=None) if tokens is not None else None
        if found is None or not found.num_blocks or not found.bytes_per_block:
            return None
        return (found.num_blocks * found.bytes_per_block,) * 2

    def token(plan: SizePlan) -> tuple[float, float] | None:
        found = trial.allocation(plan)
        if found is None or not found.block_size or not found.bytes_per_block:
            return None
        return (found.bytes_per_block / found.block_size,) * 2

    if size is not None:
        yield from compared(trial, "cache", size, pool)
    if each is not None:
        yield from compared(trial, "bytes a token", each, token)
    budget = log.kv_budget
    if tokens is None or budget is None or trial.plan.serving.max_tokens is not None:
        return
    ends = [trial.allocation(kv_budget=max(end, 1)) for end in budget]
    low, high = (end.reported_capacity if end is not None else None for end in ends)
    if low is not None and high is not None:
        yield row("capacity", tokens, low, high, low <= tokens.value <= high)
