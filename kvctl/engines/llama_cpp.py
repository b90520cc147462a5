"""llama.cpp's caches: cells, streams, and the sizes that its load log prints.

Sources: llama.cpp b11434 src/llama-kv-cache*.cpp, llama-memory-recurrent.cpp, llama-context.cpp,
src/llama-model.cpp (which architectures keep windows apart); checked against its own log.

The context (-c) is the total over all slots. Cells come in multiples of 256; a unified cache is
one stream that all slots share, otherwise every slot has a stream of its own.
"""

from __future__ import annotations

from kvctl.allocation import Allocation, GroupRow, RankRow, Serving
from kvctl.engines import IDEAL
from kvctl.engines.states import not_known, plain_attention
from kvctl.errors import ConfigError, UsageError
from kvctl.formats import CacheFormat, cache_format
from kvctl.record import Record
from kvctl.spec import (
    ChunkedAttention,
    ConvState,
    Empty,
    Formats,
    FullAttention,
    Indexer,
    LatentAttention,
    LayerState,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
)
from kvctl.units import plural

PAD = 256
MIB = 2**20

KV_TYPES = {
    "f32": "fp32", "f16": "fp16", "bf16": "bf16", "q8_0": "q8_0", "q4_0": "q4_0", "q4_1": "q4_1", "iq4_nl": "iq4_nl",
    "q5_0": "q5_0", "q5_1": "q5_1",
}  # fmt: skip
"""What --cache-type-k and --cache-type-v take."""

_KEEPS_WINDOWS = ("gemma2", "gemma3", "gemma3n", "gemma4", "gpt_oss", "llama4", "cohere2", "exaone4", "olmo3")
_IGNORES_WINDOWS = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "starcoder2")
"""Model types by what their architecture in llama.cpp does: the second group stores every token."""


def kv_dtype(name: str, option: str) -> CacheFormat:
    """The cache format that llama.cpp's `name` means; unknown ones list what there is."""
    ours = KV_TYPES.get(name.lower())
    if ours is None:
        raise UsageError(f"{option}: {name[:40]!r} is no cache type of llama.cpp", hint="one of " + ", ".join(KV_TYPES))
    return cache_format(ours).replace(name=name.lower())


def check_version(version: str) -> None:
    """One set of rules so far: that of build b11434."""
    raise UsageError(
        f"--engine: kvctl knows one version of llama.cpp, b11434, not {version[:40]!r}", hint="--engine llama.cpp"
    )


class _Cache(Record):
    """One cache of the context: rows of K and V that so many layers hold."""

    kind: str
    k_row: int
    """Bytes of one cell over all its layers."""
    v_row: int
    layers: int
    reach: int = 0
    """Window or chunk; 0 for every token."""

    @property
    def row(self) -> int:
        return self.k_row + self.v_row


class _Plan(Record):
    """A context laid out in cells."""

    context: int
    cells: int
    streams: int
    slots: int
    unified: bool


def _pad(count: int) -> int:
    return -(-count // PAD) * PAD


def _layout(context: int, serving: Serving) -> _Plan:
    # Without -np the server takes four slots on one unified cache.
    slots = serving.slots or 4
    unified = serving.unified if serving.unified is not None else serving.slots is None
    total = _pad(context)
    if unified or slots == 1:
        return _Plan(total, total, 1, slots, unified)
    each = _pad(total // slots)
    if not each:
        raise UsageError(
            f"--parallel {slots} leaves no token of --ctx for a slot", hint="--kv-unified shares one cache"
        )
    return _Plan(each * slots, each, slots, slots, unified)


def plan(
    spec: ModelSpec, context: int, sequences: int, fmt: Formats, serving: Serving, version: str | None
) -> Allocation:
    """What llama.cpp allocates for a context of `context` tokens over all its slots.

    Raises:
        ConfigError: a kind of state, or windows of an architecture, whose storage is not known.
        UsageError: types that llama.cpp refuses.

    """
    if sequences > 1:
        raise UsageError(
            "llama.cpp divides --ctx over its slots", hint="--parallel N instead of --sequences and --beams"
        )
    if context < 1:
        raise UsageError("--ctx 0 is the model's own maximum to llama.cpp", hint="name it, for example --ctx 32k")
    caches, r_bytes, s_bytes = _caches(spec, fmt, serving)
    laid = _layout(context, serving)
    reasons: list[str] = []
    if serving.ubatch is not None and serving.ubatch > _ubatch(serving, laid):
        reasons.append(f"a physical batch is never more than the logical one of {_ubatch(serving, laid):,} tokens")
    if serving.slots is None:
        reasons.append("4 slots on one unified cache, as llama-server has it; --parallel sets another number")
    if laid.context != context:
        reasons.append(f"{context:,} tokens become {laid.context:,} cells: every stream has a multiple of {PAD}")
    groups, log = [], []
    total = 0
    indexed = any(cache.kind == "indexer" for cache in caches)
    local = any(cache.reach for cache in caches)
    for cache in caches:
        cells = _cells(cache, laid, serving)
        size = cells * laid.streams * cache.row
        total += size
        groups.append(GroupRow(cache.kind, cache.layers, PAD, PAD * cache.row, cells * laid.streams // PAD))
        if indexed:
            log.append(f"llama_kv_cache_dsa: creating {'indexer' if cache.kind == 'indexer' else 'main'} KV cache, "
                       f"size = {cells} cells")  # fmt: skip
        elif local:
            log.append(f"llama_kv_cache_iswa: creating {'    SWA' if cache.reach else 'non-SWA'} KV cache, "
                       f"size = {cells} cells")  # fmt: skip
        k, v = (cells * laid.streams * row / MIB for row in (cache.k_row, cache.v_row))
        log.append(
            f"llama_kv_cache: size = {size / MIB:7.2f} MiB ({cells:6d} cells, {cache.layers:3d} layers, "
            f"{laid.slots:2d}/{laid.streams} seqs), K ({fmt.key.name}): {k:7.2f} MiB, V ({fmt.value.name}): {v:7.2f} MiB"
        )
        if cache.reach and cells < laid.cells:
            times = f"{laid.slots} × " if laid.unified and laid.slots > 1 else ""
            reasons.append(
                f"windows hold {times}{cache.reach:,} + {_ubatch(serving, laid):,} tokens of a batch: {cells:,} cells"
            )
    if r_bytes or s_bytes:
        size = (r_bytes + s_bytes) * laid.slots
        total += size
        rows = sum(any(isinstance(s, (ConvState, RecurrentState)) for s in layer.states) for layer in spec.layers)
        groups.append(GroupRow("recurrent_state", rows, 0, r_bytes + s_bytes, laid.slots))
        log.append(
            f"llama_memory_recurrent: size = {size / MIB:7.2f} MiB ({laid.slots:6d} cells, {len(spec.layers):3d} layers, "
            f"{laid.slots:2d} seqs  0 rs_seq), R (f32): {r_bytes * laid.slots / MIB:7.2f} MiB, "
            f"S (f32): {s_bytes * laid.slots / MIB:7.2f} MiB, P (f32):    0.00 MiB"
        )
        reasons.append(f"recurrent states are float32, one for each of {plural(laid.slots, 'slot')}")
    if spec.model_type in _IGNORES_WINDOWS and any(
        isinstance(state, SlidingWindow) for layer, _ in spec.groups for state in layer.states
    ):
        reasons.append("llama.cpp keeps every token of this architecture's windowed layers")
    block = PAD * sum(cache.row for cache in caches if not cache.reach)
    budget = serving.kv_budget
    # Without a cache that grows there is no longest context to find.
    capacity = _largest(spec, serving, budget, caches, r_bytes + s_bytes) if budget is not None and block else None
    warnings = []
    if budget is not None and total > budget:
        warnings.append(f"the cache takes {total:,} bytes, more than the budget of {budget:,}")
    return Allocation(
        device="gpu",
        tensor_parallel_size=1,
        block_size=PAD,
        bytes_per_block=block,
        blocks_per_request=laid.cells // PAD,
        reserved_bytes=total,
        kv_budget_bytes=budget,
        num_blocks=capacity // PAD if capacity is not None else None,
        capacity_tokens=capacity,
        reported_capacity=capacity,
        max_concurrency=None,
        per_rank=(RankRow(0, block, total),),
        groups=tuple(groups),
        log=tuple(log),
        reasons=tuple(reasons),
        warnings=tuple(warnings),
        longest_sequence=min(context, laid.cells),
    )


def _ubatch(serving: Serving, laid: _Plan) -> int:
    """Tokens of a physical batch: no more than a logical one (2,048), or than there are cells."""
    return min(serving.ubatch or 512, 2048, laid.context)


def _cells(cache: _Cache, laid: _Plan, serving: Serving) -> int:
    """Cells of one stream."""
    if not cache.reach or serving.swa_full:
        return laid.cells
    return min(laid.cells, _pad(cache.reach * (laid.slots if laid.unified else 1) + _ubatch(serving, laid)))


def _largest(spec: ModelSpec, serving: Serving, budget: int, caches: list[_Cache], state: int) -> int:
    """The largest context in the budget, a multiple of 256 for every stream; the model's own maximum at most."""

    def takes(context: int) -> int:
        laid = _layout(context, serving)
        held = sum(_cells(cache, laid, serving) * cache.row for cache in caches) * laid.streams
        return held + state * laid.slots

    step = PAD * _layout(2**24, serving).streams
    low, high = 0, (spec.max_context or 2**24) // PAD
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if takes(middle * step) <= budget else (low, middle - 1)
    return low * step


def _caches(spec: ModelSpec, fmt: Formats, serving: Serving) -> tuple[list[_Cache], int, int]:
    """Caches in the order of llama.cpp's log, and the R and S bytes of one sequence's recurrent state."""
    if serving.flash_attention is False and fmt.value.block > 1:
        raise UsageError("llama.cpp needs flash attention for a quantised V cache", hint="--flash-attn on")
    widths: dict[tuple[str, int], list[tuple[int, int]]] = {}
    r_bytes = s_bytes = 0
    for layer in spec.layers:
        states = [state for state in layer.states_in("llama.cpp") if not isinstance(state, Empty)]
        for state in states:
            if isinstance(state, ConvState):
                r_bytes += state.channels * state.columns(IDEAL.retention) * 4
            elif isinstance(state, RecurrentState) and state.name in ("delta", "kda", "ssm"):
                s_bytes += state.elements * 4
            elif isinstance(state, LatentAttention) and state.window is None:
                _fits(fmt.key, state.latent + state.rope)
                widths.setdefault(("latent_attention", 0), []).append((fmt.key.row_bytes(state.latent + state.rope), 0))
            elif (
                isinstance(state, Indexer) and state.stride == 1 and any(isinstance(s, LatentAttention) for s in states)
            ):
                _fits(fmt.key, state.dim)
                widths.setdefault(("indexer", 0), []).append((fmt.key.row_bytes(state.dim), 0))
            elif (attention := plain_attention(state)) is not None:
                _fits(fmt.key, attention.key_dim)
                _fits(fmt.value, attention.value_dim)
                rows = (
                    fmt.key.row_bytes(attention.kv_heads * attention.key_dim),
                    fmt.value.row_bytes(attention.kv_heads * attention.value_dim),
                )
                widths.setdefault(_kind(spec, attention), []).append(rows)
            else:
                raise not_known(spec, state, "llama.cpp")
        if sum(isinstance(state, ConvState) for state in states) > 1:
            raise not_known(spec, states[-1], "llama.cpp")
    if not widths and not (r_bytes or s_bytes):
        raise ConfigError(f"{spec.model_type[:60]}: nothing that llama.cpp would cache")
    if len([key for key in widths if key[1]]) > 1:
        raise ConfigError(f"{spec.model_type[:60]}: llama.cpp has one size of window a model, this has several")
    caches = []
    for (kind, reach), held in sorted(widths.items(), key=lambda item: (item[0][1] > 0, item[0][0] == "indexer")):
        values = [value for _, value in held]
        if serving.flash_attention is False:
            # V lies transposed then, and every layer pays for the widest.
            values = [max(values)] * len(values)
        caches.append(_Cache(kind, sum(key for key, _ in held), sum(values), len(held), reach))
    return caches, r_bytes, s_bytes


def _kind(spec: ModelSpec, state: LayerState) -> tuple[str, int]:
    """Which cache a layer's keys and values go to."""
    if isinstance(state, FullAttention):
        return FullAttention.kind, 0
    if not spec.model_type.startswith(_KEEPS_WINDOWS):
        if spec.model_type in _IGNORES_WINDOWS:
            return FullAttention.kind, 0
        raise ConfigError(
            f"{spec.id}: kvctl does not know whether llama.cpp keeps this architecture's windows apart",
            hint="--engine ideal says what the architecture needs",
        )
    if isinstance(state, SlidingWindow):
        return SlidingWindow.kind, state.window
    assert isinstance(state, ChunkedAttention)
    return ChunkedAttention.kind, state.chunk


def _fits(fmt: CacheFormat, width: int) -> None:
    """ggml quantises whole blocks of a head."""
    if width % fmt.block:
        raise UsageError(f"llama.cpp cannot keep heads of {width} elements in {fmt.name}: its blocks have {fmt.block}")
