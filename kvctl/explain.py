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
        row = state.kv_heads
        head_scale = ""
        if fmt.key.head_bytes or fmt.value.head_bytes:
            head_scale = f" + {plural(row, 'head')} × {fmt.key.head_bytes + fmt.value.head_bytes} B of scales"
        heads = plural(row, "KV head")
        if not state.value_dim:
            text = f"{heads} × head dim {state.key_dim} (K and V in one) × {_element(fmt.key)}"
        elif state.key_dim == state.value_dim and fmt.key == fmt.value:
            text = f"2 (K and V) × {heads} × head dim {state.key_dim} × {_element(fmt.key)}"
        else:
            text = f"{heads} × ({state.key_dim} × {_element(fmt.key)} + {state.value_dim} × {_element(fmt.value)})"
        return f"{held} × ({text}{head_scale})" if head_scale else f"{held} × {text}"
    if isinstance(state, LatentAttention):
        return f"{_tokens(state, work, engine)} × ({state.latent} latent + {state.rope} rotary) × {_element(fmt.key)}"
    if isinstance(state, Indexer):
        width = (state.dtype or fmt.model).bytes
        return f"{_tokens(state, work, engine)} × {state.dim} indexer key × {width} B"
    if isinstance(state, CompressedAttention):
        return f"{_tokens(state, work, engine)} × {state.dim} × {_element(fmt.key)}"
    if isinstance(state, PerToken):
        return f"{_tokens(state, work, engine)} × {state.elements} × {(state.dtype or fmt.model).bytes} B"
    if isinstance(state, ConvState):
        columns = state.columns(engine.retention)
        return f"{state.channels:,} channels × {columns} columns × {(state.dtype or fmt.model).bytes} B"
    if isinstance(state, RecurrentState):
        shape = " × ".join(f"{length:,}" for length in state.shape)
        return f"{shape} × {(state.dtype or fmt.model).bytes} B ({(state.dtype or fmt.model).name})"
    return f"{state.size(work, fmt, engine.retention):,} B"
