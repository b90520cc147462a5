"""What SGLang reserves: pools of tokens and of recurrent states.

`pools` says what a token takes, `budget` how memory is divided, by version, and `log`
what is printed of it; their sources are named there.

The memory left for the cache is divided by the bytes of one token over all layers. Windowed layers of
some architectures have a pool of their own, of `swa_full_tokens_ratio` tokens for each full one; recurrent
states have a pool that takes `mamba_full_memory_ratio` bytes for each byte of the rest. Every pool has one
page more, for padded tokens, that is not part of the budget.
"""

from __future__ import annotations

from kvctl.allocation import Allocation, GroupRow, RankRow, Serving
from kvctl.engines.sglang.budget import (
    Pool,
    Settings,
    allocated,
    capped,
    check_version,
    given_slots,
    pools,
    rules_for,
    settings_for,
    windowed_tokens,
)
from kvctl.engines.sglang.log import lines
from kvctl.engines.sglang.pools import Layout, kv_dtype, layout
from kvctl.errors import UsageError
from kvctl.spec import Formats, ModelSpec
from kvctl.units import plural

__all__ = ["check_version", "kv_dtype", "plan"]


def plan(
    spec: ModelSpec, context: int, sequences: int, fmt: Formats, serving: Serving, version: str | None
) -> Allocation:
    """What SGLang reserves on every rank; `context` is --context-length.

    Raises:
        ConfigError: a kind of state whose storage in SGLang is not known.
        UsageError: a split, page size or format that SGLang refuses.

    """
    if context < 1:
        raise UsageError("--ctx 0: SGLang needs a length of at least one token")
    rules, doubt = rules_for(version)
    # Shapes do not depend on how much memory there is, nor on limits.
    alike = serving.replace(kv_budget=None, max_sequences=None, utilization=None, max_batched=None, max_tokens=None)
    laid = layout(spec, fmt, alike, rules.windowed, not rules.elided)
    reasons: list[str] = []
    warnings = [doubt] if doubt else []
    settings = settings_for(spec, laid, fmt, serving, rules, reasons, warnings)
    pool = pools(laid, context, serving, settings)

    pages = -(-context // settings.page)
    # Ranks of decode context parallelism hold their part of the tokens.
    share = -(-sequences * pages // (serving.decode_context_parallel or 1))
    held = Pool(share * settings.page, 0, sequences * settings.slots if laid.states else 0, sequences)
    held = held.replace(windowed=windowed_tokens(held.tokens, settings) if laid.windowed else 0)
    reserved = [allocated(laid, stage, held, settings) for stage in laid.stages]
    per_page = [settings.page * (laid.full_row(stage) + laid.windowed_row(stage)) for stage in laid.stages]
    copies = serving.decode_context_parallel or 1
    tp = serving.tensor_parallel or 1
    log: list[str] = []
    capacity = concurrency = at_once = None
    if pool is not None:
        capacity = pool.tokens * copies
        concurrency = capacity / context
        at_once = min(int(concurrency), pool.requests) if _serves(laid, settings, pool) else 0
        if pool.tokens > 0 and not (laid.states and pool.slots <= 0 and serving.kv_budget is not None):
            log = lines(laid, fmt, context, serving, settings, pool)
        if serving.kv_budget is not None:
            _check(laid, context, sequences, settings, pool, capacity, warnings)
    _explain(laid, serving, settings, tp, reasons)
    return Allocation(
        device="gpu",
        tensor_parallel_size=tp,
        block_size=settings.page,
        # Pools of windows have fewer pages: no page of the full ones has so many bytes.
        bytes_per_block=0 if laid.windowed is not None else max(per_page),
        blocks_per_request=pages,
        reserved_bytes=max(reserved),
        kv_budget_bytes=serving.kv_budget,
        num_blocks=pool.tokens // settings.page if pool is not None else None,
        capacity_tokens=capacity,
        reported_capacity=capacity,
        max_concurrency=concurrency,
        per_rank=tuple(
            RankRow(stage * tp + rank, per_page[stage], reserved[stage])
            for stage in range(len(laid.stages))
            for rank in range(tp)
        ),
        groups=_groups(laid, settings, pages),
        log=tuple(log),
        reasons=tuple(reasons),
        warnings=tuple(warnings),
        longest_sequence=context,
        held=at_once,
    )


def _serves(laid: Layout, settings: Settings, pool: Pool) -> bool:
    """Whether the pools hold anything, and a window of the windowed layers."""
    return pool.tokens > 0 and not (
        (laid.states and pool.slots <= 0) or (laid.windowed and pool.windowed <= laid.window + settings.page)
    )


def _check(
    laid: Layout, context: int, sequences: int, settings: Settings, pool: Pool, capacity: int, warnings: list[str]
) -> None:
    """What would go wrong at start-up, or with so many requests."""
    if laid.states and pool.slots <= 0:
        warnings.append("SGLang would not start: the budget holds no recurrent state")
    elif pool.tokens <= 0:
        warnings.append("SGLang would not start: the budget holds no token")
    elif laid.windowed and pool.windowed <= laid.window + settings.page:
        warnings.append(
            f"SGLang could serve no request: {pool.windowed:,} tokens of windowed layers hold no window of {laid.window:,}"
        )
    elif capacity < sequences * context:
        need = "needs" if sequences == 1 else "need"
        warnings.append(f"{plural(sequences, 'request')} of {context:,} tokens {need} {sequences * context:,}, "
                        f"and the pool holds {capacity:,}: longer ones are refused, others wait")  # fmt: skip
    elif sequences > pool.requests:
        warnings.append(f"{pool.requests} requests run at a time, {sequences} were asked for: some would wait")


def _groups(laid: Layout, settings: Settings, pages: int) -> tuple[GroupRow, ...]:
    rows, page = [], settings.page
    if laid.full is not None:
        kind = "latent_attention" if laid.latent else "full_attention"
        layers = sum(stage.full for stage in laid.stages)
        each = sum(laid.full_row(stage) for stage in laid.stages)
        rows.append(GroupRow(kind, layers, page, page * each, pages))
    if laid.windowed is not None:
        layers = sum(stage.windowed for stage in laid.stages)
        rows.append(GroupRow("sliding_window", layers, page, page * layers * laid.windowed.bytes,
                             windowed_tokens(pages * page, settings) // page))  # fmt: skip
    if laid.states:
        rows.append(
            GroupRow("recurrent_state", laid.states, 0, laid.states * (laid.conv + laid.matrix), settings.slots)
        )
    return tuple(rows)


def _explain(laid: Layout, serving: Serving, settings: Settings, tp: int, reasons: list[str]) -> None:
    """Why the engine takes more than the architecture needs, in words."""
    if laid.full or laid.windowed:
        page = plural(settings.page, "token")
        reasons.append(f"every pool has one page more, of {page}, for padded tokens; it is not part of the budget")
    if laid.windowed is not None and not capped(serving, settings):
        reasons.append(f"windowed layers have a pool of {settings.ratio:g} × the tokens of the full ones")
    if laid.stretched:
        reasons.append(f"{plural(laid.stretched, 'layer')} with a window, a shared cache or none are stored in full")
    if laid.states:
        ratio = 0.9 if serving.mamba_ratio is None else serving.mamba_ratio
        if given_slots(serving, settings) is None:
            reasons.append(
                f"recurrent states take {ratio:g} bytes for each byte of the rest: {ratio / (1 + ratio):.1%} of it"
            )
        reasons.append(f"a running request holds {plural(settings.slots, 'state slot')}, and one slot is for padding")
    ranks = tp // settings.workers
    if laid.latent and ranks > 1:
        reasons.append(f"latents are not split: every one of {ranks} ranks holds all of them")
    if settings.workers > 1:
        reasons.append(
            f"{settings.workers} data-parallel workers have a pool of their own each: their sum is {settings.workers} times this"
        )
    if settings.drafts:
        reasons.append(f"{plural(settings.drafts, 'draft layer')} count as the model's own")
