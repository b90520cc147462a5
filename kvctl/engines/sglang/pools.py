"""What one token, and one recurrent state, takes in SGLang's pools on one rank.

Sources: sglang 0.5.23 srt/model_executor/pool_configurator.py, srt/mem_cache/memory_pool.py and
swa_memory_pool.py, srt/configs/model_config.py (which architectures keep windows apart, which are
latent) and mamba_utils.py, srt/arg_groups/overrides.py (page sizes). Executed on a CPU: tests/data/sglang.json.gz.

SGLang stores all layers of a pool in one shape. Layers that read another layer's cache and layers
without attention get their share of the pool all the same, except in models with recurrent states.
"""

from __future__ import annotations

from kvctl.allocation import Serving
from kvctl.engines import IDEAL
from kvctl.engines.states import not_known, plain_attention
from kvctl.errors import ConfigError, UsageError
from kvctl.formats import BF16, CacheFormat, cache_format, plain
from kvctl.kept import kept
from kvctl.record import Record
from kvctl.spec import (
    Attention,
    ConvState,
    CrossAttention,
    Formats,
    FullAttention,
    Indexer,
    LatentAttention,
    Layer,
    LayerState,
    ModelSpec,
    NoState,
    RecurrentState,
    Shared,
)

_FP8 = cache_format("fp8")
_FP4 = CacheFormat("fp4", 16, 8 + 1, "9 bytes per 16 elements: e2m1 and one scale byte")

KV_DTYPES: dict[str, CacheFormat] = {
    "bf16": plain(BF16),
    "bfloat16": plain(BF16),
    "fp8_e5m2": _FP8.replace(name="fp8_e5m2"),
    "fp8_e4m3": _FP8.replace(name="fp8_e4m3"),
    "mxfp8": cache_format("mxfp8"),
    "nvfp4": cache_format("nvfp4"),
    "fp4_mx_block16": _FP4.replace(name="fp4_mx_block16"),
    "fp4_e2m1": _FP4.replace(name="fp4_e2m1"),
}
"""What --kv-cache-dtype takes, in one version or another."""

TORCH_NAMES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8_e5m2": "float8_e5m2",
               "fp8_e4m3": "float8_e4m3fn", "mxfp8": "float8_e4m3fn", "nvfp4": "float4_e2m1fn_x2",
               "fp4_mx_block16": "float4_e2m1fn_x2", "fp4_e2m1": "float4_e2m1fn_x2"}  # fmt: skip
"""How its log names the dtype of the pool."""

_FOUR_BITS = ("nvfp4", "fp4_mx_block16", "fp4_e2m1")

_LATENT = {
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_vl_v2", "kimi_k2", "kimi_k25", "kimi_vl", "kimi_k3", "kimi_linear",
    "glm4_moe_lite", "glm_moe_dsa", "hy_v4", "longcat_flash", "minicpm3", "sarvam_mla", "bailing_hybrid",
}  # fmt: skip
"""Model types that SGLang keeps as latents."""

_STATEFUL = {
    "falcon_h1", "nemotron_h", "lfm2", "lfm2_moe", "lfm2_vl", "falcon_mamba", "mamba", "mamba2", "granitemoehybrid",
    "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "kimi_linear", "kimi_k3", "bailing_hybrid",
}  # fmt: skip
"""Model types whose recurrent layers SGLang serves from a pool of states."""

BUFFERED = {
    "falcon_h1", "nemotron_h", "granitemoehybrid", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe",
    "qwen3_5_moe_text", "kimi_linear", "kimi_k3", "bailing_hybrid",
}  # fmt: skip
"""Of these, those that keep extra states for prefix caching without being told."""


_OTHERS_ONLY = {"gpt_oss", "gemma4", "gemma4_text", "gemma4_unified", "diffusion_gemma", "mellum", "muse_glimmer"}
"""Model types whose window SGLang takes without the newest token itself."""


class LayerKv(Record):
    """One layer's cache in bytes a token on one rank."""

    key: int
    """Keys, or the latent."""
    value: int
    index: int = 0
    """Keys of a sparse attention's indexer, in every copy."""
    unlogged: int = 0
    """Bytes that the log's size leaves out: scales of 4-bit latents."""
    apart: bool = False
    """Whether it lies in the pool of windowed layers."""

    @property
    def bytes(self) -> int:
        return self.key + self.value + self.unlogged


class Stage(Record):
    """One pipeline stage: how many layers its pools have."""

    full: int
    windowed: int
    indexed: int
    stateful: int


class Layout(Record):
    """What a rank stores, stage by stage."""

    full: LayerKv | None
    windowed: LayerKv | None
    window: int
    conv: int
    """Bytes of one layer's convolution state."""
    matrix: int
    """Bytes of one layer's recurrent matrix."""
    columns: int
    """Columns of the convolution state; 0 where copies of it for draft tokens cannot overlap."""
    stages: tuple[Stage, ...]
    latent: bool
    stretched: int
    """Layers that the architecture lets forget, share or do without, and that are stored in full."""

    @property
    def states(self) -> int:
        """Layers with recurrent states."""
        return sum(stage.stateful for stage in self.stages)

    @property
    def state(self) -> int:
        """Bytes of one request's state over the layers of the fullest stage."""
        return (self.conv + self.matrix) * max(stage.stateful for stage in self.stages)

    def full_row(self, stage: Stage) -> int:
        """Bytes of one token in a stage's pool of full layers."""
        return 0 if self.full is None else self.full.bytes * stage.full + self.full.index * stage.indexed

    def windowed_row(self, stage: Stage) -> int:
        """Bytes of one token in a stage's pool of windowed layers."""
        return 0 if self.windowed is None else self.windowed.bytes * stage.windowed


def kv_dtype(name: str, option: str, version: str | None = None) -> CacheFormat:
    """The cache format that --kv-cache-dtype `name` means to a version of SGLang; unknown ones list what there is."""
    from kvctl.engines.sglang.budget import rules_for

    if option in ("--k-dtype", "--v-dtype"):
        raise UsageError(
            "sglang keeps keys and values in one format", hint="--kv-cache-dtype instead of --k-dtype, --v-dtype"
        )
    has = rules_for(version)[0].dtypes
    if name.lower() not in has:
        raise UsageError(f"{option}: {name[:40]!r} is no format that SGLang has" + (f" in {version}" if version else ""),
                         hint="one of auto, " + ", ".join(has))  # fmt: skip
    return KV_DTYPES[name.lower()]


def heads_on_rank(heads: int, ranks: int) -> int:
    """KV heads on one rank; SGLang repeats them once ranks outnumber them."""
    if heads % ranks and ranks % heads:
        raise UsageError(
            f"attention split over {ranks} ranks neither divides {heads} KV heads nor is a multiple of them",
            hint="SGLang refuses this split",
        )
    return max(1, heads // ranks)


def _grouped(state: Attention, fmt: CacheFormat, ranks: int, apart: bool) -> LayerKv:
    heads = heads_on_rank(state.kv_heads, ranks)
    keys, values = heads * state.key_dim, heads * state.value_dim
    if fmt.name in _FOUR_BITS or fmt.name == "mxfp8":
        if state.key_dim % fmt.block or state.value_dim % fmt.block:
            raise UsageError(f"SGLang keeps whole blocks of {fmt.block} in {fmt.name}, not heads of {state.key_dim}")
        if fmt.name in _FOUR_BITS and (state.key_dim != state.value_dim or apart):
            raise UsageError(f"SGLang does not keep this model's keys and values in {fmt.name}", hint="fp8_e4m3")
    return LayerKv(fmt.row_bytes(keys), fmt.row_bytes(values), apart=apart)


def _latent(state: LatentAttention, sparse: bool, fmt: CacheFormat, raw: bool) -> LayerKv:
    width = state.latent + state.rope
    if fmt.name in ("nvfp4", "mxfp8"):
        raise UsageError(f"SGLang does not keep latents in {fmt.name}", hint="--kv-cache-dtype fp8_e4m3")
    if fmt.name in _FOUR_BITS:
        return LayerKv(width // 2, 0, unlogged=width // 16)
    if sparse and fmt.name == "fp8_e4m3" and not raw:
        # A float32 scale for every 128 of the latent, and the rotary key in bf16.
        return LayerKv(state.latent + state.latent // 128 * 4 + state.rope * 2, 0)
    return LayerKv(fmt.row_bytes(width), 0)


def _own(layer: Layer) -> tuple[LayerState, ...]:
    """A layer's states in SGLang, those of a sharing layer included."""
    states: list[LayerState] = []
    for state in layer.states_in("sglang"):
        states += state.like if isinstance(state, Shared) else (state,)
    return tuple(states)


@kept
def layout(
    spec: ModelSpec, fmt: Formats, serving: Serving, windowed_types: frozenset[str], indexers_all: bool
) -> Layout:
    """Shapes of a rank's pools.

    Raises:
        ConfigError: a kind of state, or a mixture of shapes, whose storage in SGLang is not known.
        UsageError: a split or format that SGLang refuses.

    """
    tp, context_ranks = attention_ranks(spec, serving), serving.decode_context_parallel or 1
    by_layer = [(layer, _own(layer)) for layer in spec.layers]
    every = [state for _, states in by_layer for state in states]
    stateful = any(isinstance(state, (ConvState, RecurrentState)) for state in every)
    if stateful and spec.model_type not in _STATEFUL:
        raise not_known(spec, next(s for s in every if isinstance(s, (ConvState, RecurrentState))), "SGLang")
    apart = spec.model_type in windowed_types and not serving.hybrid_disabled
    sparse = any(isinstance(state, Indexer) for state in every)
    reads = {
        id(layer): _read_layer(spec, states, fmt, serving, (tp, context_ranks), apart, sparse)
        for layer, states in by_layer
    }
    kinds = _shapes(spec, [cache for caches, _, _ in reads.values() for cache in caches])
    if not kinds and not stateful:
        raise ConfigError(f"{spec.model_type[:60]}: nothing that SGLang would cache")
    counts: list[tuple[int, int, int, int]] = []
    stretched = 0
    for layer in spec.layers:
        caches, reach, recurrent = reads[id(layer)]
        # Without recurrent layers every layer has its place in the pool, even one that attends to nothing.
        bare = not caches and not stateful
        full = 1 if bare else sum(not cache.apart for cache in caches)
        indexed = full if indexers_all and sparse else sum(cache.index > 0 for cache in caches)
        counts.append((full, sum(cache.apart for cache in caches), indexed, int(recurrent)))
        stretched += bool(bare or (reach and full) or any(isinstance(state, Shared) for state in layer.states))
    conv, matrix, columns = _states(spec, every, serving, tp)
    return Layout(
        full=kinds.get(False),
        windowed=kinds.get(True),
        window=max(reach for _, reach, _ in reads.values()),
        conv=conv,
        matrix=matrix,
        columns=columns,
        stages=_stages(counts, serving),
        latent=any(isinstance(state, LatentAttention) for state in every),
        stretched=stretched,
    )


def _shapes(spec: ModelSpec, caches: list[LayerKv]) -> dict[bool, LayerKv]:
    """The one shape of full layers (False) and of those apart (True), with the keys that an indexer adds."""
    kinds: dict[bool, LayerKv] = {}
    for cache in caches:
        seen = kinds.setdefault(cache.apart, cache)
        if seen.replace(index=0) != cache.replace(index=0):
            raise ConfigError(f"{spec.id}: kvctl does not know how SGLang stores layers of several shapes in one pool")
        kinds[cache.apart] = seen.replace(index=max(seen.index, cache.index))
    return kinds


def attention_ranks(spec: ModelSpec, serving: Serving) -> int:
    """Ranks that one attention layer's heads are split over."""
    tp, dp = serving.tensor_parallel or 1, serving.data_parallel or 1
    if serving.attention_dp:
        if tp % dp:
            raise UsageError(f"--dp-size {dp} does not divide --tp-size {tp}", hint="SGLang refuses this split")
        tp //= dp
    if spec.attention_heads is not None and spec.attention_heads % tp:
        raise UsageError(f"attention split over {tp} ranks does not divide the {spec.attention_heads} attention heads",
                         hint="SGLang refuses this split")  # fmt: skip
    if tp % (serving.decode_context_parallel or 1):
        raise UsageError(f"--dcp-size {serving.decode_context_parallel} does not divide the {tp} ranks of attention",
                         hint="SGLang refuses this split")  # fmt: skip
    return tp


def _read_layer(
    spec: ModelSpec,
    states: tuple[LayerState, ...],
    fmt: Formats,
    serving: Serving,
    ranks: tuple[int, int],
    apart: bool,
    sparse: bool,
) -> tuple[list[LayerKv], int, bool]:
    """A layer's caches, its window (0: none) and whether it has a recurrent state."""
    caches: list[LayerKv] = []
    reach, recurrent = 0, False
    tp, context_ranks = ranks
    for state in states:
        if isinstance(state, NoState):
            continue
        if isinstance(state, (ConvState, RecurrentState)):
            recurrent = True
        elif isinstance(state, LatentAttention) and state.window is None and spec.model_type in _LATENT:
            caches.append(
                _latent(state, sparse, fmt.key, (serving.sparse_backend or "").startswith(("trtllm", "tilelang")))
            )
        elif isinstance(state, Indexer) and state.stride == 1 and state.dim == 128 and caches:
            # Keys in fp8 with one fp32 scale for every 128; every rank of a split sequence has them all.
            caches[-1] = caches[-1].replace(index=(state.dim + state.dim // 128 * 4) * context_ranks)
        elif isinstance(state, CrossAttention) and spec.model_type == "mllama":
            # Tokens of an image take slots of the same pool.
            caches.append(_grouped(state, fmt.key, tp, False))
        elif (attention := plain_attention(state)) is not None:
            if not isinstance(attention, FullAttention):
                span = getattr(attention, "window", 0) or getattr(attention, "chunk", 0)
                reach = max(reach, span - (spec.model_type in _OTHERS_ONLY))
            caches.append(
                _grouped(attention, fmt.key, tp // context_ranks, apart and not isinstance(attention, FullAttention))
            )
        else:
            raise not_known(spec, state, "SGLang")
    return caches, reach, recurrent


def _states(spec: ModelSpec, every: list[LayerState], serving: Serving, tp: int) -> tuple[int, int, int]:
    """Bytes of one layer's convolution and matrix, and columns that copies of the convolution share."""
    element = {"float32": 4, "bfloat16": 2, "float16": 2}
    if serving.state_dtype is not None and serving.state_dtype not in element:
        raise UsageError(f"--mamba-ssm-dtype: {serving.state_dtype[:40]!r}", hint="one of " + ", ".join(element))
    convs = {_conv(state, tp) for state in every if isinstance(state, ConvState)}
    matrices = set()
    for state in every:
        if isinstance(state, RecurrentState):
            if state.shape[0] % tp:
                raise UsageError(f"attention split over {tp} ranks does not divide {state.shape[0]} heads of the state",
                                 hint="SGLang refuses this split")  # fmt: skip
            size = element[serving.state_dtype] if serving.state_dtype else (state.dtype.bytes if state.dtype else 4)
            matrices.add((state.elements // tp * size, state.name))
    if len(convs) > 1 or len(matrices) > 1:
        raise ConfigError(f"{spec.id}: kvctl does not know how SGLang stores states of several shapes in one pool")
    conv, columns = next(iter(convs), (0, 0))
    matrix, name = next(iter(matrices), (0, ""))
    return conv, matrix, 0 if name == "kda" else columns


def _conv(state: ConvState, tp: int) -> tuple[int, int]:
    """Bytes (always bf16) and columns of a convolution's state on one rank."""
    channels = state.channels
    groups, width = state.groups
    if groups % tp:
        # Heads on each rank need their group with them: groups are repeated.
        channels += (tp - groups) * width
    if channels % tp:
        raise UsageError(f"attention split over {tp} ranks does not divide {channels:,} channels of the convolution",
                         hint="SGLang refuses this split")  # fmt: skip
    columns = state.columns(IDEAL.retention)
    return channels // tp * columns * BF16.bytes, columns


def _stages(counts: list[tuple[int, int, int, int]], serving: Serving) -> tuple[Stage, ...]:
    """Layers of each pipeline stage: as even as can be, the last stages one more (get_pp_indices)."""
    stages = serving.pipeline_parallel or 1
    if not 1 <= stages <= len(counts):
        raise UsageError(f"--pp-size {stages} stages for {len(counts)} layers")
    base, more = divmod(len(counts), stages)
    sizes = tuple(base + (rank >= stages - more) for rank in range(stages))
    if serving.stage_layers is not None and stages > 1:
        sizes = serving.stage_layers
        if len(sizes) != stages or sum(sizes) != len(counts):
            raise UsageError(f"SGLANG_PP_LAYER_PARTITION: {len(sizes)} stages of {sum(sizes)} layers, "
                             f"for {stages} of {len(counts)}")  # fmt: skip
    out, start = [], 0
    for size in sizes:
        out.append(Stage(*(sum(row[i] for row in counts[start : start + size]) for i in range(4))))
        start += size
    return tuple(out)


# Source: sglang srt/arg_groups/overrides.py; cutlass_mla: server_args.py up to 0.5.14.
_PAGES = {"flashmla": (64,), "trtllm_mla": (64, 32), "cutedsl_mla": (64, 32), "tokenspeed_mla": (64, 32),
          "trtllm_mha": (64, 16, 32, 128), "hpc_ops": (64,), "cutlass_mla": (128,), "intel_xpu": (128, 64)}  # fmt: skip
"""Tokens in a page that a backend has; the first is what it takes instead of others."""
_ANY_PAGE = ("triton", "torch_native", "flex_attention", "flashinfer", "fa3", "fa4", "dual_chunk_flash_attn", "dsa", "nsa",
             "aiter", "wave", "intel_amx")  # fmt: skip


def page_size(spec: ModelSpec, serving: Serving, sparse: bool) -> tuple[int, str]:
    """Tokens in a page, and why, where that is not what was asked for."""
    asked, backend = serving.block_size or 1, serving.attention_backend or ""
    if sparse:
        return 64, "" if asked == 64 else "pages of 64 tokens: sparse attention has no other on NVIDIA GPUs"
    if backend and backend not in (*_PAGES, *_ANY_PAGE):
        raise UsageError(f"--attention-backend: unknown value {backend[:40]!r}",
                         hint="one of " + ", ".join(sorted((*_PAGES, *_ANY_PAGE))))  # fmt: skip
    allowed = _PAGES.get(backend)
    if backend == "fa4" and asked != 128:
        return asked, "on Blackwell fa4 has no pages but those of 128 tokens, unless for latents"
    if allowed is None or asked in allowed:
        return asked, ""
    return allowed[0], f"pages of {allowed[0]} tokens: {backend} has no pages of {asked}"
