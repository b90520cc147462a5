"""What one rank of TensorRT-LLM keeps for each layer.

Sources: TensorRT-LLM tensorrt_llm/_torch/pyexecutor/resource_manager.py (heads a rank, bytes a
token), _torch/attention_backend/sparse/dsa.py (indexer keys), pyexecutor/mamba_cache_manager.py.
"""

from __future__ import annotations

from kvctl.engines import IDEAL
from kvctl.engines.states import not_known, plain_attention
from kvctl.errors import ConfigError, UsageError
from kvctl.formats import CacheFormat, DType, cache_format
from kvctl.kept import kept
from kvctl.record import Record
from kvctl.spec import (
    Attention,
    ConvState,
    Empty,
    Formats,
    Indexer,
    LatentAttention,
    Layer,
    LayerState,
    ModelSpec,
    NoState,
    RecurrentState,
    SlidingWindow,
)

ENGINE = "tensorrt-llm"

KV_TYPES = ("fp8", "nvfp4")
"""What --kv_cache_dtype takes beside auto."""

RECURRENT = ("nemotron_h", "qwen3_next")
"""Model types with recurrent layers that TensorRT-LLM 1.2 serves."""

_INDEX_TOKENS = 64
"""Tokens in a block of indexer keys up to 1.2, whatever the cache's blocks have."""


def kv_dtype(name: str, option: str, version: str | None = None) -> CacheFormat:
    """The cache format that TensorRT-LLM's `name` means; unknown ones list what there is."""
    if option in ("--k-dtype", "--v-dtype"):
        raise UsageError(
            "tensorrt-llm keeps keys and values in one format", hint="--kv-cache-dtype instead of --k-dtype, --v-dtype"
        )
    if name.lower() not in KV_TYPES:
        raise UsageError(
            f"{option}: {name[:40]!r} is no cache format of TensorRT-LLM", hint="one of auto, " + ", ".join(KV_TYPES)
        )
    return cache_format(name)


class Held(Record):
    """What one layer keeps on one rank."""

    kind: str
    token_bytes: int
    """Bytes of a token that the manager allocates."""
    counted_bytes: int
    """Bytes of a token that the estimate before it counts: heads over ranks, not rounded up."""
    window: int = 0
    """The architecture's window; 0 for every token."""
    width: int = 0
    """Elements of a head."""
    state_bytes: int = 0
    """Bytes of a sequence, whatever its length."""
    indexer: bool = False


@kept
def held_by(spec: ModelSpec, fmt: Formats, ranks: int, block: int, scaled: bool) -> list[Held | None]:
    """One entry a layer, None for layers without a cache; `scaled`: an indexer's keys counted as up to 1.2."""
    found = {id(layer): _held(layer, spec, fmt, ranks, block, scaled) for layer, _ in spec.groups}
    return [found[id(layer)] for layer in spec.layers]


def _held(layer: Layer, spec: ModelSpec, fmt: Formats, ranks: int, block: int, scaled: bool) -> Held | None:
    states = [state for state in layer.states_in(ENGINE) if not isinstance(state, NoState)]
    if not states:
        return None
    if len(states) == 1 and (attention := plain_attention(states[0])) is not None:
        return _attention(spec, attention, fmt.key, ranks)
    latent = states[0]
    if isinstance(latent, LatentAttention) and latent.window is None:
        if fmt.key.name == "nvfp4":
            raise ConfigError(f"{spec.id}: kvctl does not know of an nvfp4 cache of latents in TensorRT-LLM")
        row = _row(fmt.key, latent.latent + latent.rope)
        if len(states) == 1:
            return Held(latent.kind, row, row)
        keys = _indexer_keys(states[1:], fmt.key, block, scaled)
        if keys is not None:
            return Held(latent.kind, row + keys, row + keys, indexer=True)
    if all(isinstance(state, (ConvState, RecurrentState)) for state in states):
        return _recurrent(spec, states, fmt, ranks)
    raise not_known(spec, states[-1], "TensorRT-LLM")


def _row(fmt: CacheFormat, elements: int) -> int:
    """Bytes of one token's row; scales of nvfp4 are counted apart and cover whole rows."""
    if elements % fmt.block:
        raise UsageError(
            f"TensorRT-LLM keeps no rows of {elements:,} elements in {fmt.name}: one scale is for {fmt.block}"
        )
    return fmt.row_bytes(elements)


def _attention(spec: ModelSpec, state: Attention, fmt: CacheFormat, ranks: int) -> Held:
    """Keys and values: both as wide as keys."""
    if state.value_dim > state.key_dim:
        raise ConfigError(f"{spec.id}: kvctl does not know how TensorRT-LLM stores values wider than keys")
    heads = -(-state.kv_heads // ranks)
    window = state.window if isinstance(state, SlidingWindow) else 0
    # The estimate multiplies before it divides: 8 heads of 128 over 16 ranks are 64 elements.
    counted = fmt.row_bytes(state.key_dim * state.kv_heads // ranks)
    return Held(state.kind, 2 * _row(fmt, heads * state.key_dim), 2 * counted, window, state.key_dim)


def _indexer_keys(states: list[LayerState], fmt: CacheFormat, block: int, scaled: bool) -> int | None:
    """Bytes of a token's indexer keys, fp8 with one fp32 scale for every 128; None for what is not known."""
    (index,) = states if len(states) == 1 else (None,)
    if isinstance(index, Empty) and not scaled:
        return 0
    if not isinstance(index, Indexer) or index.stride != 1:
        return None
    keys = index.dim + index.dim // 128 * 4
    if not scaled:
        return keys
    # Up to 1.2 the count takes the indexer's bytes for elements of the cache's format, and its
    # blocks of 64 tokens for one with each of the cache's.
    return -(-keys * _INDEX_TOKENS // block) * fmt.block_bytes // fmt.block


def _recurrent(spec: ModelSpec, states: list[LayerState], fmt: Formats, ranks: int) -> Held:
    """Convolution and state of one sequence, heads divided over ranks."""
    if spec.model_type not in RECURRENT:
        raise not_known(spec, states[-1], "TensorRT-LLM")
    total = 0
    for state in states:
        dtype: DType = fmt.model
        if isinstance(state, ConvState):
            first, elements = state.channels, state.channels * state.columns(IDEAL.retention)
        else:
            assert isinstance(state, RecurrentState)
            first, elements = state.shape[0], state.elements
            if spec.model_type == "nemotron_h" and state.dtype is not None:
                dtype = state.dtype
        if first % ranks:
            raise UsageError(f"--tensor-parallel-size {ranks} does not divide {first:,} heads or channels of a state")
        total += elements // ranks * dtype.bytes
    return Held(RecurrentState.kind, 0, 0, state_bytes=total)
