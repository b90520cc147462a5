"""SGLang and llama.cpp: the caches that the log announces beside those that kvctl expects, size by size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvctl.allocation import Allocation
from kvctl.size import SizePlan
from kvctl.startlog import llama_cpp, sglang
from kvctl.startlog.causes import cause, compared
from kvctl.startlog.figures import Figure, Pool
from kvctl.startlog.report import LogRow, row
from kvctl.startlog.trial import Trial

Parse = Callable[[str], Pool | None]


def rows(trial: Trial, parse: Parse, told: dict[str, Any]) -> Iterator[LogRow]:
    """One row for each cache; `told` are numbers that the log says and the engine chose."""
    logged = _distinct(trial.log.pools)
    if not logged:
        return
    found = trial.allocation(**told)
    expected = _pools(found, parse)
    wrong = [pool for pool in logged if not _among(pool, expected)]

    def accounts_for(pools: list[Pool]) -> str:
        def holds(plan: SizePlan) -> bool:
            other = _pools(trial.allocation(plan, **told), parse)
            return all(_among(pool, other) for pool in pools)

        return cause(trial, holds)

    common = accounts_for(logged) if wrong else ""
    for pool in logged:
        near = min(
            (other for other in expected if other.kind == pool.kind),
            key=lambda other: abs(other.total - pool.total),
            default=None,
        )
        agrees = pool not in wrong
        # Where no one assumption accounts for all of them, each may have its own.
        why = "" if agrees else common or accounts_for([pool]) or _paged(pool, near, found)
        yield _row(pool, pool if agrees else near, agrees, why)


def _paged(pool: Pool, near: Pool | None, found: Allocation | None) -> str:
    """Whether only the page is another: the sizes are the same, and the tokens are no multiple of it."""
    if found is None or near is None or not pool.agrees(near) or not pool.count or pool.count % found.block_size == 0:
        return ""
    return f"{pool.count:,} tokens are no multiple of {found.block_size}: the engine's pages are smaller than kvctl takes them to be"


def _pools(found: Allocation | None, parse: Parse) -> list[Pool]:
    return [pool for line in found.log if (pool := parse(line)) is not None] if found is not None else []


def _distinct(pools: tuple[Pool, ...]) -> list[Pool]:
    """Every cache once: ranks print the same."""
    out: list[Pool] = []
    for pool in pools:
        if not any(kept.kind == pool.kind and kept.same(pool) for kept in out):
            out.append(pool)
    return out


def _among(pool: Pool, expected: list[Pool]) -> bool:
    return any(_fits(pool, other) for other in expected)


def _fits(pool: Pool, other: Pool) -> bool:
    """Whether two lines are of one cache: sizes as printed, and counts where both have them."""
    counts = None in (pool.count, other.count) or pool.count == other.count
    # Labels and dtypes came with later versions, and streams with later builds.
    slots = (
        "/" not in pool.slots or "/" not in other.slots or pool.slots.replace(" ", "") == other.slots.replace(" ", "")
    )
    kinds = pool.kind == other.kind or "states" not in (pool.kind, other.kind)
    return kinds and counts and slots and pool.agrees(other)


def _row(pool: Pool, near: Pool | None, agrees: bool, cause: str) -> LogRow:
    sizes = ", ".join(f"{name} {_short(size)}" for name, size in pool.sizes)
    counted = f"{pool.count:,} " if pool.count is not None else ""
    names = {
        "states": "recurrent states",
        "cache": "cache",
        "Full": "full layers",
        "SWA": "windowed layers",
        "both": "both pools",
    }
    said = Figure(
        "", pool.total, pool.half * len(pool.sizes), "bytes", pool.line, pool.where, f"{counted}({sizes})".strip()
    )
    total = near.total if near is not None else None
    return row(names.get(pool.kind, pool.kind), said, total, total, agrees, cause)


def _short(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB"


# -- SGLang ---------------------------------------------------------------------------------


def sglang_rows(trial: Trial) -> Iterator[LogRow]:
    """Sizes of the pools for the logged tokens; and tokens for the memory that the log leaves."""
    log = trial.log
    told: dict[str, Any] = {}
    capacity = log.figure("capacity")
    both = next((pool for pool in log.pools if pool.kind == "both"), None)
    counts = [pool.count for pool in log.pools if pool.kind not in ("states", "both") and pool.count]
    tokens = (both.count if both is not None else None) or (
        int(capacity.value) if capacity is not None else max(counts, default=None)
    )
    if tokens:
        told["max_tokens"] = tokens
    states = next((pool for pool in log.pools if pool.kind == "states" and pool.count), None)
    if states is not None:
        told["mamba_slots"] = states.count
    yield from rows(trial, sglang.pool, told)
    fraction = trial.plan.serving.utilization
    budget = log.kv_budget or (log.rest(fraction) if fraction is not None else None)
    if capacity is None and len(counts) == 1:
        only = next(pool for pool in log.pools if pool.count == counts[0])
        capacity = Figure("capacity", counts[0], 0, "tokens", only.line, only.where, f"{counts[0]}")
    if capacity is None or budget is None or trial.plan.serving.max_tokens is not None:
        return

    def ends(plan: SizePlan) -> tuple[int, int] | None:
        low, high = (trial.allocation(plan, kv_budget=max(end, 1)) for end in budget)
        if low is None or high is None or low.capacity_tokens is None or high.capacity_tokens is None:
            return None
        return low.capacity_tokens, high.capacity_tokens

    yield from compared(trial, "capacity", capacity, ends)


# -- llama.cpp ------------------------------------------------------------------------------


def llama_rows(trial: Trial) -> Iterator[LogRow]:
    """Every cache; where their lines are not logged, the buffers that hold them, over all devices."""
    log = trial.log
    yield from rows(trial, llama_cpp.pool, {})
    for name, words, kind in (("kv_buffer", "cache", "cache"), ("state_buffer", "recurrent states", "states")):
        parts = log.all(name)
        if not parts or any(pool.kind == kind for pool in log.pools):
            continue
        total = Figure(name, sum(part.value for part in parts), sum(part.half for part in parts), "bytes", parts[0].line, "",
                       " + ".join(f"{part.text} on {part.where}" for part in parts[:8]))  # fmt: skip

        yield from _buffers(trial, words, kind, total)


def _buffers(trial: Trial, words: str, kind: str, total: Figure) -> Iterator[LogRow]:
    def size(plan: SizePlan) -> float | None:
        found = _pools(trial.allocation(plan), llama_cpp.pool)
        return sum(pool.total for pool in found if pool.kind == kind) if found else None

    def holds(plan: SizePlan) -> bool:
        # The expected sizes are themselves rounded as printed.
        got = size(plan)
        return got is not None and abs(got - total.value) <= 2 * total.half

    expected = size(trial.plan)
    if expected is not None:
        agrees = holds(trial.plan)
        yield row(words, total, expected, expected, agrees, "" if agrees else cause(trial, holds))
