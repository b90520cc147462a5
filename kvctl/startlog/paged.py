"""TensorRT-LLM: the pool of blocks, its bytes a token, and the tokens that the memory holds."""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.size import SizePlan
from kvctl.startlog.causes import first, variants
from kvctl.startlog.report import LogRow, row
from kvctl.startlog.trial import Trial


def rows(trial: Trial) -> Iterator[LogRow]:
    """The pool for the logged tokens, and tokens for the logged memory."""
    log = trial.log
    tokens, size, each = log.figure("capacity"), log.figure("kv_bytes"), log.figure("token_bytes")

    def pool(plan: SizePlan | None) -> float | None:
        found = trial.allocation(plan, max_tokens=int(tokens.value), kv_budget=None) if tokens is not None else None
        return (
            found.num_blocks * found.bytes_per_block
            if found is not None and found.num_blocks and found.bytes_per_block
            else None
        )

    def token(plan: SizePlan | None) -> float | None:
        found = trial.allocation(plan)
        return (
            found.bytes_per_block / found.block_size
            if found is not None and found.block_size and found.bytes_per_block
            else None
        )

    for name, said, value in (("cache", size, pool), ("bytes a token", each, token)):
        expected = value(None) if said is not None else None
        if said is None or expected is None:
            continue
        agrees = said.low <= expected <= said.high
        cause = "" if agrees else first(
            variants(trial.log, trial.spec, trial.plan),
            lambda plan, value=value, said=said: (got := value(plan)) is not None and said.low <= got <= said.high,  # type: ignore[misc]
        )  # fmt: skip
        yield row(name, said, expected, expected, agrees, cause)
    budget = log.kv_budget
    if tokens is None or budget is None or trial.plan.serving.max_tokens is not None:
        return
    ends = [trial.allocation(kv_budget=max(end, 1)) for end in budget]
    low, high = (end.reported_capacity if end is not None else None for end in ends)
    if low is not None and high is not None:
        yield row("capacity", tokens, low, high, low <= tokens.value <= high)
