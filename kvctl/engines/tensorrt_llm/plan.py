"""TensorRT-LLM's KV cache (PyTorch backend): blocks, windows and the lines of its start-up log.

Sources: TensorRT-LLM tensorrt_llm/_torch/pyexecutor/_util.py and resource_manager.py of 1.1, 1.2
and 1.4 (release candidates), llmapi/llm_args.py, docs/source/features/kvcache.md, and
cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp; checked against logs that users published.

The budget is what the engine gives the cache on each rank: a fraction (0.9) of what is free after
weights and activations. Without windows of its own choice the first manager (up to 1.2) keeps
every token of every layer in one pool; the second one (from 1.3 on) keeps windows apart.
"""

from __future__ import annotations

from itertools import pairwise

from kvctl.allocation import Allocation, GroupRow, RankRow, Serving
from kvctl.engines.tensorrt_llm.layers import Held, held_by, kv_dtype
from kvctl.engines.tensorrt_llm.pools import blocks_for, divided, grain, pools_of
from kvctl.engines.tensorrt_llm.settings import Settings, check_version, rules_for, settings_for
from kvctl.errors import ConfigError, UsageError
from kvctl.spec import Attention, Formats, ModelSpec
from kvctl.units import GIB, plural

__all__ = ["check_version", "kv_dtype", "plan"]


_KEEPS_WINDOWS = ("gpt_oss", "gemma3", "gemma3_text", "gemma4", "gemma4_text")
"""Model types whose windows the second manager reads from the configuration."""


def plan(
    spec: ModelSpec, context: int, sequences: int, fmt: Formats, serving: Serving, version: str | None
) -> Allocation:
    """What TensorRT-LLM keeps on every rank for requests of at most `context` tokens (--max_seq_len).

    Raises:
        ConfigError: a kind of state whose storage is not known, or a model without a cache.
        UsageError: options that TensorRT-LLM refuses, or that kvctl does not know together.

    """
    rules, doubt = rules_for(version)
    warnings = [doubt] if doubt else []
    settings = settings_for(spec, context, sequences, fmt, serving, rules)
    split = 1 if serving.attention_dp else settings.ranks
    held = held_by(spec, fmt, split, settings.block, scaled=rules.since < (1, 3))
    if not any(held):
        raise ConfigError(f"{spec.model_type[:60]}: nothing that TensorRT-LLM would cache")
    if not rules.indexer and any(item is not None and item.indexer for item in held):
        raise ConfigError("kvctl knows sparse attention with an indexer in TensorRT-LLM from 1.2 on",
                          hint="--engine tensorrt-llm@1.2")  # fmt: skip
    windows = _windows(spec, held, serving, settings)
    kept = [
        item if item.window == window else item.replace(window=window)
        for item, window in zip(held, windows, strict=True) if item is not None
    ]  # fmt: skip
    if not settings.second and len({item.width for item in kept if item.width}) > 1:
        raise ConfigError(f"{spec.id}: kvctl does not know how TensorRT-LLM's first cache manager holds heads of several widths",
                          hint="--engine tensorrt-llm@1.4")  # fmt: skip
    reasons: list[str] = []
    _explain(spec, [item for item in held if item is not None], settings, serving, reasons, warnings)
    if len(pools_of(kept, settings)) > 1:
        return divided(kept, settings, reasons, warnings)
    stages = [[item for item in part if item is not None] for part in _stages(held, settings.stages)]
    return _single(spec, stages, kept[0].window, fmt, settings, reasons, warnings)


def _windows(spec: ModelSpec, held: list[Held | None], serving: Serving, settings: Settings) -> list[int]:
    """Tokens that each layer keeps, 0 for all: the windows asked for, or the model's with the second manager."""
    asked = serving.attention_windows
    if asked is not None:
        if any(item is not None and item.state_bytes for item in held):
            raise UsageError("kvctl does not know TensorRT-LLM's max_attention_window beside recurrent layers")
        if min(asked) < 1:
            raise UsageError(f"max_attention_window {min(asked)} is out of range", hint="at least 1 token")
        return [_clamped(asked[index % len(asked)], settings.context) for index in range(len(held))]
    if settings.second:
        if spec.model_type not in _KEEPS_WINDOWS and any(item is not None and item.window for item in held):
            raise ConfigError(f"{spec.id}: kvctl does not know whether TensorRT-LLM keeps this architecture's windows apart",
                              hint="--engine tensorrt-llm@1.2 keeps every token")  # fmt: skip
        return [_clamped(item.window, settings.context) if item is not None else 0 for item in held]
    return [0] * len(held)


def _clamped(window: int, context: int) -> int:
    """0 for a window that never closes."""
    return window if window < context else 0


def _stages(held: list[Held | None], stages: int) -> list[list[Held | None]]:
    """Layers of every stage: the first ones take what does not divide."""
    each, more = divmod(len(held), stages)
    bounds = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return [held[first:last] for first, last in pairwise(bounds)]


# -- one pool -------------------------------------------------------------------------------


def _single(
    spec: ModelSpec, stages: list[list[Held]], window: int, fmt: Formats, settings: Settings, reasons: list[str],
    warnings: list[str],
) -> Allocation:  # fmt: skip
    """All layers keep equally many tokens: one table of blocks."""
    block, context = settings.block, settings.context
    every = [item for stage in stages for item in stage]
    token_bytes = [sum(item.token_bytes for item in stage) for stage in stages]
    counted = [sum(item.counted_bytes for item in stage) for stage in stages]
    states = [settings.max_sequences * sum(item.state_bytes for item in stage) for stage in stages]
    if not all(token_bytes):
        raise ConfigError(f"{spec.id}: kvctl does not know TensorRT-LLM's cache of a stage without attention")
    request = blocks_for(context, window, block)
    blocks = _block_count(token_bytes, settings)
    per_block = [block * count for count in token_bytes]
    reserved = [settings.sequences * request * size + state for size, state in zip(per_block, states, strict=True)]
    if counted != token_bytes:
        reasons.append(f"the engine's estimate counts {max(counted):,} bytes a token, and its manager allocates "
                       f"{max(token_bytes):,}: heads are whole on every rank")  # fmt: skip
        if settings.budget is not None:
            warnings.append(
                "estimated: the engine's count of tokens and its allocation differ; the number of blocks is this or more"
            )
    log: tuple[str, ...] = ()
    if blocks is not None:
        _admission(settings, blocks, request, warnings)
        log = _log(settings, blocks, per_block[0], fmt, every, window)
    kind = next(item.kind for item in every if item.token_bytes) if not window else "sliding_window"
    rows = [GroupRow(kind, sum(item.token_bytes > 0 for item in every), block, max(per_block), request)]
    if any(states):
        rows.append(GroupRow("recurrent_state", sum(item.state_bytes > 0 for item in every), 0, max(states), 1))
    tokens = blocks * block if blocks is not None else None
    return Allocation(
        device="gpu",
        tensor_parallel_size=settings.ranks,
        block_size=block,
        # Beside recurrent states, not all of it is blocks.
        bytes_per_block=0 if any(states) else max(per_block),
        blocks_per_request=request,
        reserved_bytes=max(reserved),
        kv_budget_bytes=settings.budget,
        num_blocks=blocks,
        # A pool of windows alone holds requests of any length.
        capacity_tokens=tokens if not window else None,
        reported_capacity=tokens,
        max_concurrency=blocks // request if blocks is not None else None,
        per_rank=tuple(
            RankRow(stage * settings.ranks + rank, per_block[stage], reserved[stage])
            for stage in range(len(stages)) for rank in range(settings.ranks)
        ),
        groups=tuple(rows),
        log=log,
        reasons=tuple(reasons),
        warnings=tuple(warnings),
        longest_sequence=context,
        held=None if blocks is None else max(0, blocks // request),
        beside=tuple(state for state in states for _ in range(settings.ranks)) if any(states) else (),
    )  # fmt: skip


def _block_count(token_bytes: list[int], settings: Settings) -> int | None:
    """Blocks of every rank: those of the one that can hold fewest tokens."""
    budget, limit, block = settings.budget, settings.max_tokens, settings.block
    if settings.second:
        sizes = [_quota(settings, bytes_) for bytes_ in token_bytes]
        counts = [size // (bytes_ * block) for size, bytes_ in zip(sizes, token_bytes, strict=True) if size is not None]
        return min(counts) if counts else None
    tokens = [budget // bytes_ for bytes_ in token_bytes] if budget is not None else []
    if limit is not None:
        tokens.append(limit)
    if not tokens:
        return None
    return -(-min(tokens) // block) if settings.rules.rounds_up else min(tokens) // block


def _quota(settings: Settings, token_bytes: int) -> int | None:
    """Bytes that the second manager sets aside: for max_tokens, 1/0.95 of what they take."""
    if settings.max_tokens is None:
        return settings.budget
    wanted = -(-settings.max_tokens * token_bytes * 20 // 19)
    return wanted if settings.budget is None else min(wanted, settings.budget)


def _explain(
    spec: ModelSpec, every: list[Held], settings: Settings, serving: Serving, reasons: list[str], warnings: list[str]
) -> None:
    """Why the engine takes more than the architecture needs, in words."""
    attention = [s for layer, _ in spec.groups for s in layer.states if isinstance(s, Attention)]
    if any(0 < s.value_dim < s.key_dim for s in attention):
        reasons.append("values are stored as wide as keys")
    if not settings.second and serving.attention_windows is None and any(item.window for item in every):
        reasons.append("without max_attention_window, windowed layers keep every token")
    if any(s.kind == "chunked_attention" for s in attention):
        reasons.append("layers of chunked attention keep every token")
    if serving.attention_dp and settings.ranks > 1:
        reasons.append(f"attention DP: each of {settings.ranks} ranks keeps whole heads, for requests of its own")
    elif settings.ranks > 1:
        for heads in sorted({s.kv_heads for s in attention if s.kv_heads % settings.ranks}):
            reasons.append(
                f"{plural(heads, 'KV head')} on {settings.ranks} ranks: each holds {-(-heads // settings.ranks)}"
            )
        if any(item.kind == "latent_attention" for item in every):
            reasons.append(f"latents are not split: every one of {settings.ranks} ranks holds all of them")
    if settings.stages > 1:
        reasons.append(
            f"bytes are those of the heaviest of {settings.stages} stages; the one that holds fewest tokens decides"
        )
    if settings.second and settings.budget is not None:
        reasons.append(
            f"memory comes in pieces of {grain(settings.budget) >> 20} MiB, so the pool may be that much larger"
        )
    if any(item.indexer for item in every) and settings.rules.since < (1, 3):
        warnings.append(
            "estimated: the indexer's keys go by a release candidate of 1.2, which counts them above their size"
        )
    if any(item.state_bytes for item in every):
        _explain_states(spec, every, settings, serving, reasons, warnings)


def _explain_states(
    spec: ModelSpec, every: list[Held], settings: Settings, serving: Serving, reasons: list[str], warnings: list[str]
) -> None:
    """Recurrent states lie beside the pool, for as many sequences as a batch may have."""
    if settings.rules.since >= (1, 3):
        raise ConfigError(f"{spec.id}: kvctl does not know how TensorRT-LLM 1.3 and later divide memory with recurrent layers",
                          hint="--engine tensorrt-llm@1.2")  # fmt: skip
    each = sum(item.state_bytes for item in every)
    reasons.append(
        f"recurrent states of {each:,} bytes for each of {settings.max_sequences:,} sequences, beside the blocks"
    )
    unsaid = ", in fp32 where the configuration names no dtype" if spec.model_type == "nemotron_h" else ""
    warnings.append(f"estimated: recurrent states as a release candidate of 1.2 allocates them{unsaid}")
    if serving.max_sequences is None:
        warnings.append("recurrent states for 2,048 sequences, the default of --max_batch_size; that option sets it")


def _admission(settings: Settings, blocks: int, request: int, warnings: list[str]) -> None:
    """The scheduler starts a request only when blocks for its whole length are free."""
    if blocks < request:
        warnings.append(f"one request of {settings.context:,} tokens needs {request:,} blocks and there are {blocks:,}: "
                        f"TensorRT-LLM lowers the maximum length to {blocks * settings.block:,}")  # fmt: skip
    elif settings.sequences * request > blocks:
        warnings.append(f"{plural(settings.sequences, 'request')} of this length need {settings.sequences * request:,} blocks "
                        f"and there are {blocks:,}: some would wait")  # fmt: skip


def _log(
    settings: Settings, blocks: int, block_bytes: int, fmt: Formats, every: list[Held], window: int
) -> tuple[str, ...]:
    """What rank 0 prints at start-up, as far as it follows from what is known."""
    lines = []
    if settings.second:
        if settings.budget is not None and settings.max_tokens is None:
            lines.append(f"KV cache manager v2 device quota set to {settings.budget / GIB}GiB")
        return tuple(lines)
    # With overlapped scheduling the longest sequence has one token more.
    longest = settings.context + 1
    if settings.rules.sequence_line and not window and longest <= blocks * settings.block:
        lines.append(
            f"Max KV cache blocks per sequence: {-(-longest // settings.block)} [window size={longest}], tokens per "
            f"block={settings.block}, primary blocks={blocks}, secondary blocks=0, max sequence length={longest}"
        )
    lines.append(f"Number of tokens per block: {settings.block}.")
    # Scales and indexer keys are no part of the size that is printed.
    if fmt.key.name != "nvfp4" and not any(item.indexer for item in every):
        lines.append(
            f"[MemUsageChange] Allocated {blocks * block_bytes / GIB:.2f} GiB for max tokens in paged KV cache "
            f"({blocks * settings.block})."
        )
    return tuple(lines)
