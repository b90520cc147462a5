"""The arithmetic behind a result, written out so that a person can check it by hand."""

from __future__ import annotations

from kvctl.engines import Engine
from kvctl.formats import CacheFormat
from kvctl.reports import Formula
from kvctl.spec import (
    Attention,
    ChunkedAttention,
    CompressedAttention,
    ConvState,
    Empty,
    Formats,
    FullAttention,
    Indexer,
    LatentAttention,
    LayerState,
    ModelSpec,
    PerToken,
    RecurrentState,
    SlidingWindow,
    Workload,
)
from kvctl.units import plural


def formulas(
    spec: ModelSpec, work: Workload, fmt: Formats, engine: Engine, copies: int, shared_copies: int
) -> list[Formula]:
    """One line for every state of every group of equal layers; equal lines are merged."""
    merged: dict[tuple[str, str], list[int]] = {}
    for layer, count in spec.groups:
        for state in layer.states_in(engine.name):
            if isinstance(state, Empty):
                continue
            times = copies if state.per_beam else shared_copies
            size = state.size(work, fmt, engine.retention)
            entry = merged.setdefault((state.kind, _state(state, work, fmt, engine)), [0, 0, times])
            entry[0] += count
            entry[1] += size * count * times
    lines = []
    for (kind, text), (count, total, times) in merged.items():
        sequences = f" × {times:,} sequences" if times > 1 else ""
        lines.append(Formula(count, kind, f"{plural(count, 'layer')} × {text}{sequences} = {total:,} B", total))
    return lines


def _even(fmt: CacheFormat, elements: int) -> bool:
    """Whether a row is so many whole blocks and nothing else."""
    return elements % fmt.block == 0 and not fmt.head_bytes


def _element(fmt: CacheFormat) -> str:
    return f"{fmt.block_bytes} B" if fmt.block == 1 else f"{fmt.block_bytes}/{fmt.block} B"


def _tokens(state: LayerState, work: Workload, engine: Engine) -> str:
    keep = engine.retention
    held = state.tokens(work, keep)
    limit: int | None = None
    if isinstance(state, SlidingWindow):
        limit = state.window
    elif isinstance(state, ChunkedAttention):
        limit = state.chunk
    elif isinstance(state, LatentAttention):
        limit = state.window
    if limit is not None:
        slack = f" − {keep.window_slack}" if keep.window_slack else ""
        return f"min({work.context:,}, {limit:,}{slack}) tokens"
    if isinstance(state, FullAttention) and state.prefix:
        return f"({work.context:,} + {state.prefix}) tokens"
    if isinstance(state, (Indexer, CompressedAttention)):
        step = state.stride if isinstance(state, Indexer) else state.ratio
        if step > 1:
            return f"⌊{work.context:,} / {step}⌋ entries"
    return f"{held:,} tokens"


def _state(state: LayerState, work: Workload, fmt: Formats, engine: Engine) -> str:
    if isinstance(state, Attention):
        held = _tokens(state, work, engine)
        heads = plural(state.kv_heads, "KV head")
        if not (_even(fmt.key, state.kv_heads * state.key_dim) and _even(fmt.value, state.kv_heads * state.value_dim)):
            # Scales a head, or a row that does not fill its last block: the row itself is the unit.
            key = fmt.key.row_bytes(state.kv_heads * state.key_dim, state.kv_heads)
            value = fmt.value.row_bytes(state.kv_heads * state.value_dim, state.kv_heads)
            return f"{held} × ({key:,} B of keys + {value:,} B of values: {heads} of {state.key_dim} and {state.value_dim})"
        if not state.value_dim:
            return f"{held} × {heads} × head dim {state.key_dim} (K and V in one) × {_element(fmt.key)}"
        if state.key_dim == state.value_dim and fmt.key == fmt.value:
            return f"{held} × 2 (K and V) × {heads} × head dim {state.key_dim} × {_element(fmt.key)}"
        return f"{held} × {heads} × ({state.key_dim} × {_element(fmt.key)} + {state.value_dim} × {_element(fmt.value)})"
    if isinstance(state, LatentAttention):
        held, width = _tokens(state, work, engine), state.latent + state.rope
        if not _even(fmt.key, width):
            return f"{held} × {fmt.key.row_bytes(width):,} B (a row of {state.latent} latent + {state.rope} rotary)"
        return f"{held} × ({state.latent} latent + {state.rope} rotary) × {_element(fmt.key)}"
    if isinstance(state, Indexer):
        width = (state.dtype or fmt.model).bytes
        return f"{_tokens(state, work, engine)} × {state.dim} indexer key × {width} B"
    if isinstance(state, CompressedAttention):
        row = (
            f"{state.dim} × {_element(fmt.key)}" if _even(fmt.key, state.dim) else f"{fmt.key.row_bytes(state.dim):,} B"
        )
        return f"{_tokens(state, work, engine)} × {row}"
    if isinstance(state, PerToken):
        return f"{_tokens(state, work, engine)} × {state.elements} × {(state.dtype or fmt.model).bytes} B"
    if isinstance(state, ConvState):
        columns = state.columns(engine.retention)
        return f"{state.channels:,} channels × {columns} columns × {(state.dtype or fmt.model).bytes} B"
    if isinstance(state, RecurrentState):
        shape = " × ".join(f"{length:,}" for length in state.shape)
        return f"{shape} × {(state.dtype or fmt.model).bytes} B ({(state.dtype or fmt.model).name})"
    return f"{state.size(work, fmt, engine.retention):,} B"
