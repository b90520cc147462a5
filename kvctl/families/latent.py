"""Latent attention (MLA): one compressed row a token; sparse variants add an indexer's keys."""

from __future__ import annotations

from kvctl.errors import ConfigError
from kvctl.families import patterns as p
from kvctl.families.build import SHARED, Layers, build, grouped, repeat, window
from kvctl.families.fields import Fields
from kvctl.formats import FP32, INT64
from kvctl.spec import (
    CompressedAttention,
    ConvState,
    FullAttention,
    Indexer,
    LatentAttention,
    Layer,
    LayerState,
    PerToken,
    RecurrentState,
    SlidingWindow,
)


def latent_of(f: Fields) -> LatentAttention:
    """The row of one layer: kv_lora_rank, and the rotary part shared by all heads."""
    return LatentAttention(f.number("kv_lora_rank"), f.number("qk_rope_head_dim", minimum=0))


def latent(f: Fields) -> Layers:
    """Every layer keeps a latent."""
    layer = Layer((latent_of(f),))
    if f.type == "minicpm3":
        # vLLM runs this one with expanded heads, values padded to the width of keys.
        width = f.number("qk_nope_head_dim") + f.number("qk_rope_head_dim")
        layer = Layer(layer.states, {"vllm": (FullAttention(f.number("num_attention_heads"), width, width),)})
    return build(f, p.layer_kinds(f, p.all_of(p.FULL)), {p.FULL: lambda f: layer})


def deepseek_v2(f: Fields) -> Layers:
    """DeepSeek-V2 code also runs models without a latent (kv_lora_rank absent or null): grouped attention."""
    if f.get("kv_lora_rank") is None:
        dim = f.number("hidden_size") // f.number("num_attention_heads")
        heads = f.optional_number("num_key_value_heads") or f.number("num_attention_heads")
        return repeat(f.layers(), Layer((FullAttention(heads, dim, dim),)))
    return latent(f)


def longcat(f: Fields) -> Layers:
    """Two attentions, so two latents, in every layer; num_hidden_layers, where given, counts them all and wins."""
    both = f.optional_number("num_hidden_layers", minimum=0)
    return repeat(2 * f.layers("num_layers") if both is None else both // 2 * 2, Layer((latent_of(f),)))


def indexer_kinds(f: Fields, n: int, *, default: str = "") -> list[bool]:
    """True for each layer with an indexer of its own; "shared" layers use an earlier one's choice."""
    kinds = f.strings("indexer_types")
    if kinds is not None and len(kinds) < n:
        raise ConfigError(f"{f.path}indexer_types has {len(kinds)} entries for {n} layers")
    kinds = None if kinds is None else kinds[:n]
    if kinds is None:
        pattern = f.get("index_topk_pattern")
        if isinstance(pattern, (str, list)):
            if len(pattern) < n:
                raise ConfigError(f"{f.path}index_topk_pattern has {len(pattern)} entries for {n} layers")
            return [entry in ("F", "full") for entry in pattern[:n]]
        if default == "hy_v4":
            return [i == 0 or (i - 1) % 4 == 0 for i in range(n)]
        freq = max(f.number_or("index_topk_freq", 1, minimum=0), 1)
        offset = f.number_or("index_skip_topk_offset", 2, minimum=0)
        return [max(i - offset + 1, 0) % freq == 0 for i in range(n)]
    unknown = set(kinds) - {"full", "shared"}
    if unknown:
        raise ConfigError(f"{f.path}indexer_types holds {sorted(unknown)[0]!r}; known are full and shared")
    return [kind == "full" for kind in kinds]


def indexed(f: Fields) -> Layers:
    """Sparse latent attention, an indexer in every layer."""
    row, keys = latent_of(f), Indexer(f.number("index_head_dim"))
    layers = {p.INDEXED: Layer((row, keys)), p.FULL: Layer((row,))}
    kinds = p.layer_kinds(f, p.all_of(p.INDEXED))
    return build(f, kinds, {kind: lambda f, layer=layer: layer for kind, layer in layers.items()})  # type: ignore[misc]


def indexed_shared(f: Fields) -> Layers:
    """Sparse latent attention where some layers reuse the choice of an earlier indexer."""
    kinds = p.layer_kinds(f, p.all_of(p.INDEXED))
    own = indexer_kinds(f, len(kinds), default="hy_v4" if f.type.startswith("hy_v4") else "")
    with_indexer = Layer((latent_of(f), Indexer(f.number("index_head_dim"))))
    without = Layer((latent_of(f),))
    layers = []
    for kind, indexer in zip(kinds, own, strict=True):
        if kind not in (p.INDEXED, p.FULL):
            raise ConfigError(f"{f.path}layer_types holds {kind[:40]!r}, which {f.type} is not known to have")
        layers.append(with_indexer if kind == p.INDEXED and indexer else without)
    return tuple(layers)


def mistral_large4(f: Fields) -> Layers:
    """Sparse latent attention; layers without rotary part; layers that read another's latent."""
    kinds = p.layer_kinds(f, p.all_of(p.INDEXED))
    n = len(kinds)
    own = indexer_kinds(f, n)
    rotary = p.no_rope_layers(f, n, "no_rope_layer_interval")
    sources = f.entries("kv_source_layers") or list(range(n))
    if len(sources) != n:
        raise ConfigError(f"{f.path}kv_source_layers has {len(sources)} entries for {n} layers")
    rank, rope, keys = (
        f.number("kv_lora_rank"),
        f.number("qk_rope_head_dim", minimum=0),
        Indexer(f.number("index_head_dim")),
    )
    made: dict[tuple[bool, bool, bool], Layer] = {}
    layers = []
    for index in range(n):
        reads_other = sources[index] != index
        key = (reads_other, rotary[index], own[index])
        if key not in made:
            states: list[LayerState] = []
            if not reads_other:
                states.append(LatentAttention(rank, rope if rotary[index] else 0))
            if own[index]:
                states.append(keys)
            made[key] = Layer(tuple(states)) if states else SHARED
        layers.append(made[key])
    return tuple(layers)


def dots3_note(f: Fields) -> Layers:
    """Full (or indexed) latent layers, and windowed latent layers with ranks of their own."""
    n = f.layers()
    use_dsa = f.get("use_dsa", None if "per_layer_config" in f.raw else True)
    full = p.FULL if use_dsa is False else p.INDEXED
    windowed = f.flag("use_sliding_window", True)
    if f.get("sliding_window") is None:
        f = f.with_values(sliding_window=f.number_or("sliding_window_size", 512))

    def pattern(f: Fields, n: int) -> list[str]:
        return [full if not windowed or i < 2 or i % 4 == 1 else p.SLIDING for i in range(n)]

    kinds = p.layer_kinds(f, pattern)
    if use_dsa is not None:
        kinds = [full if kind in (p.FULL, p.INDEXED) else kind for kind in kinds]
    if "per_layer_config" not in f.raw:
        head, nope = f.number_or("swa_head_dim", 256), f.number_or("swa_qk_nope_head_dim", 192)
        override = {
            "kv_lora_rank": f.number_or("swa_kv_lora_rank", 1024),
            "qk_rope_head_dim": f.number_or("swa_qk_rope_head_dim", head - nope, minimum=0),
        }
        f = f.with_values(per_layer_config={str(i): override for i in range(n) if kinds[i] == p.SLIDING})

    def sliding(f: Fields) -> Layer:
        row = latent_of(f)
        return Layer((LatentAttention(row.latent, row.rope, window=window(f)),))

    def indexed_layer(f: Fields) -> Layer:
        row, width = latent_of(f), f.number("index_head_dim")
        # transformers leaves these indexer keys in float32.
        return Layer((row, Indexer(width)), {"transformers": (row, Indexer(width, dtype=FP32))})

    makers = {
        p.FULL: lambda f: Layer((latent_of(f),)),
        p.INDEXED: indexed_layer,
        p.SLIDING: sliding,
    }
    return build(f, kinds, makers)


def kda_states(f: Fields, heads: int, dim: int, kernel: int) -> Layer:
    """Kimi delta attention: a convolution over queries, keys and values, and one matrix a head."""
    return Layer((ConvState(3 * heads * dim, kernel), RecurrentState((heads, dim, dim), FP32, "kda")))


def kimi_linear(f: Fields) -> Layers:
    """Three delta layers for every latent layer."""
    section = f.section("linear_attn_config")
    heads = section.optional_number("num_heads") or f.number("linear_num_heads")
    dim = section.optional_number("head_dim") or f.number("linear_head_dim")
    kernel = section.optional_number("short_conv_kernel_size") or f.number("linear_conv_kernel_dim")
    makers = {p.FULL: lambda f: Layer((latent_of(f),)), p.LINEAR: lambda f: kda_states(f, heads, dim, kernel)}
    return build(f, p.layer_kinds(f, p.kimi_linear), makers)


def bailing_hybrid(f: Fields) -> Layers:
    """Delta layers in groups, each group closed by a latent layer."""
    # A saved config holds the rotary width under head_dim, and the delta layers' own width apart.
    heads = f.optional_number("linear_num_heads") or f.number("num_attention_heads")
    dim = f.optional_number("linear_head_dim") or f.number("head_dim")
    kernel = f.optional_number("linear_conv_kernel_dim") or f.number("short_conv_kernel_size")
    period = p.every(f.number_or("layer_group_size", 6), other=p.LINEAR)
    makers = {p.FULL: lambda f: Layer((latent_of(f),)), p.LINEAR: lambda f: kda_states(f, heads, dim, kernel)}
    return build(f, p.layer_kinds(f, period), makers)


def glm5_next(f: Fields) -> Layers:
    """Delta layers, and every 4th a sparse latent layer whose indexer pools keys with gates."""
    section = f.section("linear_attn_config")
    heads = section.optional_number("num_heads") or f.number("linear_num_heads")
    dim = section.optional_number("head_dim") or f.number("linear_head_dim")
    kernel = section.optional_number("short_conv_kernel_size") or f.number("linear_conv_kernel_dim")
    kinds = [
        p.INDEXED if kind == p.FULL else kind for kind in p.layer_kinds(f, p.every(4, last=p.INDEXED, other=p.LINEAR))
    ]
    own = indexer_kinds(f, len(kinds))
    width = f.number("index_head_dim")
    row = latent_of(f)
    # Key and pooling gate are what the indexer needs; transformers packs a validity flag with them.
    stored = {"transformers": (row, Indexer(2 * width + 1))}
    pooled = f.optional_number("index_kpool")
    if pooled is not None:
        stored["vllm"] = (row, Indexer(width, stride=pooled))
    full = Layer((row, Indexer(2 * width)), stored)
    without = Layer((row,))
    linear = kda_states(f, heads, dim, kernel)
    layers = []
    for kind, indexer in zip(kinds, own, strict=True):
        if kind not in (p.INDEXED, p.LINEAR):
            raise ConfigError(f"{f.path}layer_types holds {kind[:40]!r}, which {f.type} is not known to have")
        layers.append(linear if kind == p.LINEAR else full if indexer else without)
    return tuple(layers)


# -- grouped attention with an indexer --------------------------------------------------


def minimax_m3(f: Fields) -> Layers:
    """Grouped-query attention; sparse layers keep one more key a token for their index."""
    section = f.section("sparse_attention_config")
    width = section.optional_number("sparse_index_dim") or f.number("index_head_dim")
    makers = {
        p.FULL: lambda f: Layer((FullAttention(*grouped(f)),)),
        p.SPARSE: lambda f: Layer((FullAttention(*grouped(f)), Indexer(width))),
    }
    return build(f, p.layer_kinds(f, p.minimax_m3), makers)


def qwen4_exp(f: Fields) -> Layers:
    """Gated delta layers, and every 4th a grouped attention with an indexer."""
    from kvctl.families.linear import gated_delta_states

    kinds = p.layer_kinds(f, p.every(4, field="full_attention_interval", last=p.INDEXED, other=p.LINEAR))
    kinds = [p.INDEXED if kind == p.FULL else kind for kind in kinds]
    keys = Indexer(f.number_or("indexer_kv_heads", 1) * f.number("indexer_head_dim"))
    attention = FullAttention(*grouped(f))
    bases: dict[str, tuple[LayerState, ...]] = {p.LINEAR: gated_delta_states(f), p.INDEXED: (attention, keys)}
    # transformers keeps three int64 position ids a token, once, in the first indexed layer.
    positions = kinds.index(p.INDEXED) if p.INDEXED in kinds else -1
    injected = {index - 1 for index in f.wholes("ple_layer_ids") or []}
    ngram: tuple[LayerState, ...] = ()
    if injected:
        size = f.number("ngram_size")
        columns = (f.number("ple_conv_kernel_size") - 1) * size
        channels = f.number("hidden_size") * f.number("hc_count")
        ngram = (
            ConvState(channels, columns, fixed_columns=columns),
            ConvState(1, size - 1, INT64, fixed_columns=size - 1),
        )
    made: dict[tuple[str, bool, bool], Layer] = {}
    layers = []
    for index, kind in enumerate(kinds):
        if kind not in bases:
            raise ConfigError(f"{f.path}layer_types holds {kind[:40]!r}, which {f.type} is not known to have")
        key = (kind, index in injected, index == positions)
        if key not in made:
            states = bases[kind] + (ngram if key[1] else ())
            made[key] = Layer(states, {"transformers": (*states, PerToken(3, INT64))} if key[2] else {})
        layers.append(made[key])
    return tuple(layers)


# -- DeepSeek V4 -------------------------------------------------------------------------

_V4_RATIOS = {0: p.SLIDING, 4: p.COMPRESSED_SPARSE, 128: p.HEAVILY_COMPRESSED}


def deepseek_v4(f: Fields) -> Layers:
    """A short window in every layer, and compressed entries of the past in most.

    Keys and values are one row (shared-KV multi-query attention). Source of the rules:
    DeepseekV4HCACache and DeepseekV4CSACache of transformers 5.24.
    """
    from kvctl.families.compressor import CompressorTail

    n = f.layers()
    kinds = f.strings("layer_types")
    ratios = f.entries("compress_ratios")
    if kinds is not None:
        kinds = kinds[:n]
    elif ratios is not None:
        unknown = [ratio for ratio in ratios[:n] if not isinstance(ratio, int) or ratio not in _V4_RATIOS]
        if unknown:
            raise ConfigError(f"{f.path}compress_ratios holds {unknown[0]!r}; known are 0, 4 and 128")
        kinds = [_V4_RATIOS[ratio] for ratio in ratios[:n]]
    else:
        kinds = [p.HEAVILY_COMPRESSED] * min(n, 2)
        kinds += [p.COMPRESSED_SPARSE if i % 2 else p.HEAVILY_COMPRESSED for i in range(max(n - 2, 0))]
    if len(kinds) != n:
        raise ConfigError(f"{f.path}layer kinds are given for {len(kinds)} of {n} layers")
    rates = f.section("compress_rates")
    sparse_rate = f.optional_number("compress_rate_csa") or rates.number_or(p.COMPRESSED_SPARSE, 4)
    heavy_rate = f.optional_number("compress_rate_hca") or rates.number_or(p.HEAVILY_COMPRESSED, 128)
    dim, index_dim, size = f.number("head_dim"), f.number("index_head_dim"), window(f)
    row = SlidingWindow(1, dim, 0, window=size)
    steps = (
        f"compressed entries come every {sparse_rate} and {heavy_rate} tokens: what one more token adds is the average"
    )
    layers = {
        # Without a compressor transformers keeps the one row twice, as keys and as values.
        p.SLIDING: Layer((row,), {"transformers": (SlidingWindow(1, dim, dim, window=size),)}),
        p.HEAVILY_COMPRESSED: Layer((row, CompressedAttention(dim, heavy_rate), CompressorTail(dim, heavy_rate)), note=steps),
        p.COMPRESSED_SPARSE: Layer((
            row,
            CompressedAttention(dim, sparse_rate),
            CompressorTail(dim, sparse_rate, overlapping=True),
            Indexer(index_dim, stride=sparse_rate),
            CompressorTail(index_dim, sparse_rate, overlapping=True),
        ), note=steps),
    }  # fmt: skip
    return build(f, kinds, {kind: lambda f, layer=layer: layer for kind, layer in layers.items()})  # type: ignore[misc]
