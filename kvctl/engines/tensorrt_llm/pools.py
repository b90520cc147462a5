"""How TensorRT-LLM divides its memory over layers that keep different windows.

The first manager gives every size of window an equal share; the second one measures shares by
what a typical request would take.

Sources: TensorRT-LLM 1.4 (release candidate) tensorrt_llm/runtime/kv_cache_manager_v2/:
_storage/_config.py (layers of one window and size share slots), _storage_manager.py (shares),
_storage/_core.py (slots of physical memory), and pyexecutor/kv_cache/kv_cache_manager_v2.py.
"""

from __future__ import annotations

from kvctl.allocation import Allocation, GroupRow, RankRow
from kvctl.engines.tensorrt_llm.layers import Held
from kvctl.engines.tensorrt_llm.settings import Settings
from kvctl.errors import ConfigError, UsageError
from kvctl.record import Record
from kvctl.units import GIB, MIB, plural

_TYPICAL = 2048
"""Tokens of the request that shares are measured by, where no typical length is given."""


class Pool(Record):
    """Slots of one size, and the windows whose blocks take them (0: every token)."""

    windows: tuple[int, ...]
    slot_bytes: int
    """Bytes of a block over its layers."""


def blocks_for(tokens: int, window: int, block: int) -> int:
    """Blocks that a request of `tokens` needs; a window's tokens need not start with a block."""
    if window and tokens > window:
        return -(-window // block) + 1
    return -(-tokens // block)


def grain(quota: int) -> int:
    """Bytes of one piece of physical memory: 2 MiB, and up to 32 from 16 GiB on."""
    return 2 * MIB << min(4, max(0, (quota // GIB).bit_length() - 1))


def slots(pools: list[Pool], quota: int, block: int) -> list[int]:
    """Slots of every pool: shares follow what a typical request would take in each."""
    piece = grain(quota)
    weights = [-(-sum(_typical(window, block) for window in pool.windows) * pool.slot_bytes // piece) for pool in pools]
    left = -(-quota // piece)
    found = [0] * len(pools)
    order = sorted(range(len(pools)), key=lambda index: weights[index])
    for place, index in enumerate(order):
        rest = sum(weights[later] for later in order[place:])
        pieces = round(left * weights[index] / rest)
        # Every window needs one slot to work at all.
        found[index] = max(len(pools[index].windows), pieces * piece // pools[index].slot_bytes)
        left -= -(-found[index] * pools[index].slot_bytes // piece)
    return found


def _typical(window: int, block: int) -> int:
    """Blocks that a request of 2,048 tokens holds while it computes one more."""
    stale = max(0, _TYPICAL + 1 - window) // block if window else 0
    return -(-(_TYPICAL + 1) // block) - stale


def pools_of(kept: list[Held], settings: Settings) -> list[Pool]:
    """Layers by their windows, longest first."""
    by_window: dict[int, list[Held]] = {}
    for item in kept:
        by_window.setdefault(item.window, []).append(item)
    return [
        Pool((window,), settings.block * sum(item.token_bytes for item in items))
        for window, items in sorted(by_window.items(), key=lambda entry: entry[0] or settings.context, reverse=True)
    ]


def divided(kept: list[Held], settings: Settings, reasons: list[str], warnings: list[str]) -> Allocation:
    """Layers that keep different numbers of tokens: memory is divided between them."""
    if settings.stages > 1:
        raise UsageError("kvctl does not know how TensorRT-LLM divides memory over windows and stages",
                         hint="--pipeline-parallel-size 1")  # fmt: skip
    block, context, budget = settings.block, settings.context, settings.budget
    pools = pools_of(kept, settings)
    counts: list[int] | None = None
    log: tuple[str, ...] = ()
    if settings.second:
        pools = _merged(kept, pools)
        if settings.max_tokens is not None:
            raise UsageError("kvctl does not know what max_tokens means to TensorRT-LLM's windows", hint="--kv-budget")
        if budget is not None:
            counts = slots(pools, budget, block)
            log = (f"KV cache manager v2 device quota set to {budget / GIB}GiB",)
            warnings.append(
                "estimated: shares of memory are those of a request of 2,048 tokens, as release candidates have them"
            )
        reasons.append("windows keep blocks of their own; layers whose blocks are equally large share a pool")
    else:
        reasons.append(f"{plural(len(pools), 'window size')}: the budget is divided equally between them")
        warnings.append("estimated: kvctl has no log of windows to check this division against")
        if settings.max_tokens is not None:
            warnings.append("max_tokens has no effect beside windows of several sizes")
        if budget is not None:
            # Through the bytes of a token, as the engine does: int(share / bytes) // tokens.
            counts = [int(budget / len(pools)) * block // pool.slot_bytes // block for pool in pools]
            log = tuple(
                f"Window size = {pool.windows[0] or context}, primary_blocks: {count}, secondary_blocks: 0"
                for pool, count in sorted(
                    zip(pools, counts, strict=True), key=lambda pair: pair[0].windows[0] or context
                )
            )
    needs = [sum(blocks_for(context, window, block) for window in pool.windows) for pool in pools]
    reserved = settings.sequences * sum(need * pool.slot_bytes for need, pool in zip(needs, pools, strict=True))
    concurrency = min(count // need for count, need in zip(counts, needs, strict=True)) if counts else None
    if concurrency is not None and concurrency < settings.sequences:
        warnings.append(f"the pools hold {plural(concurrency, 'request')} of {context:,} tokens at a time")
    capacity = _longest(pools[0], counts[0], block) if counts else None
    return Allocation(
        device="gpu",
        tensor_parallel_size=settings.ranks,
        block_size=block,
        # Blocks of several sizes have no one size to count in.
        bytes_per_block=pools[0].slot_bytes if len(pools) == 1 else 0,
        blocks_per_request=sum(needs),
        reserved_bytes=reserved,
        kv_budget_bytes=budget,
        num_blocks=sum(counts) if counts else None,
        capacity_tokens=capacity,
        reported_capacity=None,
        max_concurrency=concurrency,
        per_rank=tuple(
            RankRow(rank, pools[0].slot_bytes if len(pools) == 1 else 0, reserved) for rank in range(settings.ranks)
        ),
        groups=tuple(
            GroupRow("sliding_window" if window else "full_attention", _layers(kept, window), block, pool.slot_bytes,
                     blocks_for(context, window, block))
            for pool in pools for window in pool.windows
        ),
        log=log,
        reasons=tuple(reasons),
        warnings=tuple(warnings),
        longest_sequence=context,
        held=concurrency,
    )  # fmt: skip


def _layers(kept: list[Held], window: int) -> int:
    return sum(item.window == window for item in kept)


def _merged(kept: list[Held], pools: list[Pool]) -> list[Pool]:
    """Pools whose slots are equally large become one."""
    if any(len({item.token_bytes for item in kept if item.window in pool.windows}) > 1 for pool in pools):
        raise ConfigError("kvctl does not know TensorRT-LLM's pools of layers that differ within a window")
    merged: dict[int, Pool] = {}
    for pool in pools:
        same = merged.get(pool.slot_bytes)
        merged[pool.slot_bytes] = pool.replace(windows=same.windows + pool.windows) if same else pool
    return list(merged.values())


def _longest(pool: Pool, count: int, block: int) -> int | None:
    """Tokens of the longest single request that the pool of the longest window holds; None for any length."""
    if 0 not in pool.windows:
        return None
    fixed = sum(-(-window // block) + 1 for window in pool.windows if window)
    return max(0, count - fixed) * block
