"""What llama.cpp stores of DeepSeek-V4: windows of all layers, compressed entries, and the compressors' states.

Source: llama.cpp b11434 src/llama-kv-cache-dsv4.cpp. Every slot has streams of its own, unified or not.
"""

from __future__ import annotations

from kvctl.engines.llama_cpp.storage import Cache, Compressor, Storage
from kvctl.engines.states import not_known
from kvctl.families.compressor import CompressorTail
from kvctl.formats import CacheFormat
from kvctl.spec import CompressedAttention, FullAttention, Indexer, LayerState, ModelSpec, SlidingWindow

TYPES = frozenset({"deepseek_v4", "deepseek_ref"})
_SPARSE, _HEAVY = 4, 128  # tokens to an entry


def storage(spec: ModelSpec, fmt: CacheFormat) -> Storage:
    """The caches in the order of the log: no full layers, windows, compressed entries, indexer keys."""
    widths: dict[tuple[str, int], list[int]] = {}
    for layer in spec.layers:
        for state in layer.states:
            key, width = _place(spec, state)
            widths.setdefault(key, []).append(width)
    window = next((reach for kind, reach in widths if kind == SlidingWindow.kind), 0)
    caches = [Cache(FullAttention.kind, 0, 0, 0)]
    for kind, reach, ratio in (
        (SlidingWindow.kind, window, 1), (CompressedAttention.kind, 0, _SPARSE), (CompressedAttention.kind, 0, _HEAVY),
        (Indexer.kind, 0, _SPARSE),
    ):  # fmt: skip
        held = widths.get((kind, reach or ratio), [])
        caches.append(Cache(kind, sum(map(fmt.row_bytes, held)), 0, len(held), reach, ratio))
    head = widths[SlidingWindow.kind, window][0]
    tails = (
        # Overlapping windows carry two series.
        Compressor("csa", _SPARSE, 2 * _SPARSE, 2 * head, len(widths.get(("csa", _SPARSE), ()))),
        Compressor("hca", _HEAVY, _HEAVY, head, len(widths.get(("hca", _HEAVY), ()))),
        Compressor("lid", _SPARSE, 2 * _SPARSE, 2 * _indexed(spec), len(widths.get(("lid", _SPARSE), ()))),
    )
    return Storage(tuple(caches), compressors=tails)


def _place(spec: ModelSpec, state: LayerState) -> tuple[tuple[str, int], int]:
    """Which cache a state goes to, and the width of its rows."""
    if isinstance(state, SlidingWindow) and not state.value_dim:
        return (state.kind, state.window), state.key_dim
    if isinstance(state, CompressedAttention) and state.ratio in (_SPARSE, _HEAVY):
        return (state.kind, state.ratio), state.dim
    if isinstance(state, Indexer) and state.stride == _SPARSE:
        return (state.kind, state.stride), state.dim
    if isinstance(state, CompressorTail) and state.ratio == _HEAVY:
        return ("hca", _HEAVY), state.dim
    if isinstance(state, CompressorTail) and state.ratio == _SPARSE:
        return ("lid" if state.dim == _indexed(spec) else "csa", _SPARSE), state.dim
    raise not_known(spec, state, "llama.cpp")


def _indexed(spec: ModelSpec) -> int:
    return next((state.dim for layer, _ in spec.groups for state in layer.states if isinstance(state, Indexer)), 0)
