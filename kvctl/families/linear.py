"""Recurrent layers: gated delta, Mamba, convolutions, RWKV, xLSTM; alone or mixed with attention."""

from __future__ import annotations

from kvctl.errors import ConfigError
from kvctl.families import patterns as p
from kvctl.families.build import (
    Layers,
    Maker,
    attention_makers,
    build,
    grouped,
    head_dim,
    kv_heads,
    repeat,
    window,
)
from kvctl.families.fields import Fields
from kvctl.formats import FP32, DType, model_dtype
from kvctl.spec import ConvState, FullAttention, Layer, LayerState, RecurrentState, SlidingWindow

States = tuple[LayerState, ...]


def named_dtype(f: Fields, name: str, default: DType | None) -> DType | None:
    """A state dtype that the config names."""
    value = f.get(name)
    if value is None or value == "auto":
        return default
    dtype = model_dtype(value) if isinstance(value, str) else None
    if dtype is None:
        raise ConfigError(f"{f.path}{name} is {str(value)[:40]!r}, not a known dtype")
    return dtype


# -- gated delta ----------------------------------------------------------------------


def gated_delta_states(f: Fields) -> States:
    """A convolution over queries, keys and values; one [key, value] matrix a value head, in float32 unless named."""
    key_heads, value_heads = f.number("linear_num_key_heads"), f.number("linear_num_value_heads")
    key_dim, value_dim = f.number("linear_key_head_dim"), f.number("linear_value_head_dim")
    if value_heads % key_heads:
        raise ConfigError(
            f"{f.path}linear_num_key_heads {key_heads} does not divide linear_num_value_heads {value_heads}"
        )
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return (
        ConvState(channels, f.number("linear_conv_kernel_dim")),
        RecurrentState((value_heads, key_dim, value_dim), named_dtype(f, "mamba_ssm_dtype", FP32), "delta"),
    )


def gated_delta_layer(f: Fields) -> Layer:
    """The layer; transformers keeps the state in float32 whatever the config names."""
    states = gated_delta_states(f)
    conv, delta = states
    assert isinstance(delta, RecurrentState)
    stored: dict[str, States] = {}
    if delta.dtype is not FP32:
        stored["transformers"] = (conv, delta.replace(dtype=FP32))
    if "mamba_ssm_dtype" not in f.raw:
        # vLLM follows what the file says, and without it the model's dtype.
        stored["vllm"] = (conv, delta.replace(dtype=None))
    return Layer(states, stored)


def gated_delta(f: Fields) -> Layers:
    """Qwen3-Next and kin: attention every 4th layer (full_attention_interval)."""
    makers = attention_makers(grouped) | {p.LINEAR: gated_delta_layer}
    return build(f, p.layer_kinds(f, p.every(4, field="full_attention_interval", other=p.LINEAR)), makers)


def olmo_hybrid(f: Fields) -> Layers:
    """Gated delta with head counts and widths that follow the attention's where not given."""
    heads = f.number("num_attention_heads")
    key_heads = f.optional_number("linear_num_key_heads") or heads
    key_dim = f.optional_number("linear_key_head_dim") or int(0.75 * f.number("hidden_size") / key_heads)
    f = f.with_values(
        linear_num_key_heads=key_heads,
        linear_num_value_heads=f.optional_number("linear_num_value_heads") or heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=f.optional_number("linear_value_head_dim") or 2 * key_dim,
    )
    makers = attention_makers(grouped) | {p.LINEAR: gated_delta_layer}
    return build(f, p.layer_kinds(f, p.olmo_hybrid), makers)


def lara_mini(f: Fields) -> Layers:
    """Gated delta, windows and full attention in a cycle of five."""
    makers = attention_makers(grouped) | {p.LINEAR: gated_delta_layer}
    return build(f, p.layer_kinds(f, p.cycle(p.LINEAR, p.SLIDING, p.LINEAR, p.FULL, p.SLIDING)), makers)


# -- Mamba ----------------------------------------------------------------------------


def mamba1_states(inner: int, state: int, kernel: int) -> States:
    """Selective scan: a convolution over the inner width, and [inner, state] in float32."""
    return ConvState(inner, kernel), RecurrentState((inner, state), FP32, "ssm")


def mamba2_states(
    inner: int, groups: int, state: int, kernel: int, heads: int, dim: int, dtype: DType | None = FP32
) -> States:
    """State-space duality: the convolution also runs over both group projections; [heads, dim, state]."""
    return ConvState(inner + 2 * groups * state, kernel, groups=(groups, 2 * state)), RecurrentState(
        (heads, dim, state), dtype, "ssm"
    )


def mamba(f: Fields) -> Layers:
    inner = f.optional_number("intermediate_size") or int(f.number("expand") * f.number("hidden_size"))
    return repeat(f.layers(), Layer(mamba1_states(inner, f.number("state_size"), f.number("conv_kernel"))))


def mamba2(f: Fields) -> Layers:
    inner = int(f.number("expand") * f.number("hidden_size"))
    states = mamba2_states(inner, f.number("n_groups"), f.number("state_size"), f.number("conv_kernel"),
                           f.number("num_heads"), f.number("head_dim"))  # fmt: skip
    return repeat(f.layers(), Layer(states))


def jamba(f: Fields) -> Layers:
    """Mamba with attention every attn_layer_period layers."""
    inner = f.number("mamba_expand") * f.number("hidden_size")
    states = mamba1_states(inner, f.number("mamba_d_state"), f.number("mamba_d_conv"))
    makers = attention_makers(grouped) | {p.LINEAR: lambda f: Layer(states)}
    f = f.with_values(sliding_window=None)
    return build(f, p.jamba(f, f.layers()), makers)


def _head_width(f: Fields, name: str, inner: int, heads: int) -> int:
    value = f.get(name, "auto")
    return inner // heads if value == "auto" else f.number(name)


def _mamba2_of_hybrid(f: Fields, inner: int) -> States:
    heads = f.number("mamba_n_heads")
    return mamba2_states(inner, f.number("mamba_n_groups"), f.number("mamba_d_state"), f.number("mamba_d_conv"), heads,
                         _head_width(f, "mamba_d_head", inner, heads))  # fmt: skip


def bamba(f: Fields) -> Layers:
    """Mamba 2 with attention at the listed layers."""
    states = _mamba2_of_hybrid(f, f.number("mamba_expand") * f.number("hidden_size"))
    makers = attention_makers(grouped) | {p.LINEAR: lambda f: Layer(states)}
    kinds = p.indices("attn_layer_indices", listed=p.FULL, other=p.LINEAR)(f, f.layers())
    return build(f, kinds, makers)


def granite_hybrid(f: Fields) -> Layers:
    """Mamba 2 and attention by layer_types."""
    kinds = p.layer_kinds(f, p.all_of(p.LINEAR))
    makers: dict[str, Maker] = dict(attention_makers(grouped))
    makers[p.LINEAR] = lambda f: Layer(_mamba2_of_hybrid(f, f.number("mamba_expand") * f.number("hidden_size")))
    return build(f, kinds, makers)


def falcon_h1(f: Fields) -> Layers:
    """Attention and Mamba 2 side by side in every layer."""
    inner = f.optional_number("mamba_d_ssm") or f.number("mamba_expand") * f.number("hidden_size")
    return repeat(f.layers(), Layer((FullAttention(*grouped(f)), *_mamba2_of_hybrid(f, inner))))


def nemotron_h(f: Fields) -> Layers:
    """Mamba 2, attention, experts and MLPs by pattern; the pattern sets the number of layers."""
    groups = f.optional_number("mamba_n_groups") or f.number("n_groups")
    kernel = f.optional_number("mamba_d_conv") or f.number("conv_kernel")
    heads, dim, state = f.number("mamba_num_heads"), f.number("mamba_head_dim"), f.number("ssm_state_size")
    named = named_dtype(f, "mamba_ssm_cache_dtype", FP32)
    states = mamba2_states(heads * dim, groups, state, kernel, heads, dim, named)
    stored = {} if named is FP32 else {"transformers": mamba2_states(heads * dim, groups, state, kernel, heads, dim)}
    makers = attention_makers(grouped) | {p.LINEAR: lambda f: Layer(states, stored)}
    listed = f.strings("layers_block_type")
    kinds = p.nemotron_h(f, 0) if listed is None else listed
    kinds = [p.LEGACY_KINDS.get(kind, kind) for kind in kinds]
    return build(f, kinds, makers)


def zamba(f: Fields) -> Layers:
    """Mamba layers; some also run a shared attention block of twice the width."""
    inner = f.number("mamba_expand") * f.number("hidden_size")
    states = mamba1_states(inner, f.number("mamba_d_state"), f.number("mamba_d_conv"))
    dim = f.optional_number("attention_head_dim") or 2 * f.number("hidden_size") // f.number("num_attention_heads")
    attention = FullAttention(kv_heads(f), dim, dim)
    makers = {p.LINEAR: lambda f: Layer(states), p.HYBRID: lambda f: Layer((attention, *states))}
    return build(f, p.layer_kinds(f, p.zamba), makers)


def zamba2(f: Fields) -> Layers:
    """Mamba 2 layers; some also run a shared attention block of twice the width."""
    inner = int(f.number("mamba_expand") * f.number("hidden_size"))
    heads = f.number("n_mamba_heads")
    states = mamba2_states(inner, f.number("mamba_ngroups"), f.number("mamba_d_state"), f.number("mamba_d_conv"), heads,
                           f.optional_number("mamba_headdim") or inner // heads)  # fmt: skip
    dim = f.optional_number("attention_head_dim") or 2 * f.number("hidden_size") // f.number("num_attention_heads")
    attention = FullAttention(kv_heads(f), dim, dim)
    makers = {p.LINEAR: lambda f: Layer(states), p.HYBRID: lambda f: Layer((attention, *states))}
    return build(f, p.layer_kinds(f, p.all_of(p.LINEAR)), makers)


# -- convolutions ---------------------------------------------------------------------


def lfm2(f: Fields) -> Layers:
    """Short convolutions, and attention at the listed layers."""
    conv = Layer((ConvState(f.number("hidden_size"), f.number("conv_L_cache")),))
    makers = attention_makers(grouped) | {p.CONV: lambda f: conv}
    everywhere = p.all_of(p.FULL)
    return build(
        f, p.layer_kinds(f, p.indices("full_attn_idxs", listed=p.FULL, other=p.CONV, default=everywhere)), makers
    )


def lfm3(f: Fields) -> Layers:
    """Short convolutions, full attention and windows in a cycle."""
    conv = Layer((ConvState(f.number("hidden_size"), f.number("conv_L_cache")),))
    makers = attention_makers(grouped) | {p.CONV: lambda f: conv}
    return build(f, p.layer_kinds(f, p.lfm3), makers)


def inkling_layer(f: Fields, *, sliding: bool) -> Layer:
    """Attention with short convolutions on keys, values, attention output and MLP output."""
    prefix = "swa_" if sliding else ""
    heads, dim = f.number(prefix + "num_key_value_heads"), f.number(prefix + "head_dim")
    kernel, hidden = f.number("conv_kernel_size"), f.number("hidden_size")
    attention = SlidingWindow(heads, dim, dim, window=window(f)) if sliding else FullAttention(heads, dim, dim)
    channels = (heads * dim, heads * dim, hidden, hidden)
    # transformers runs these convolutions, and so keeps their inputs, in float32.
    return Layer(
        (attention, *(ConvState(c, kernel) for c in channels)),
        {"transformers": (attention, *(ConvState(c, kernel, FP32) for c in channels))},
    )


_INKLING: dict[str, Maker] = {
    p.HYBRID: lambda f: inkling_layer(f, sliding=False),
    p.HYBRID_SLIDING: lambda f: inkling_layer(f, sliding=True),
}


def inkling(f: Fields) -> Layers:
    return build(f, p.layer_kinds(f, p.inkling), _INKLING)


def inkling2(f: Fields) -> Layers:
    return build(f, p.layer_kinds(f, p.every(6, last=p.HYBRID, other=p.HYBRID_SLIDING)), _INKLING)


def inkling2_loop(f: Fields) -> Layers:
    """A core of layers runs several times; every pass has a cache of its own."""
    layers = inkling2(f)
    section = f.section("loop_config")
    start = section.number_or("core_start", f.number("loop_layer_index_start", minimum=0), minimum=0)
    end = section.number_or("core_end", f.number("loop_layer_index_end", minimum=0), minimum=0)
    passes = section.optional_number("num_passes") or f.number("loop_num_passes")
    if not 0 <= start <= end <= len(layers):
        raise ConfigError(f"{f.path}loop_layer_index_start..end is {start}..{end} of {len(layers)} layers")
    _check_passes(f, "loop_num_passes", passes, end - start)
    return layers + layers[start:end] * (passes - 1)


def _check_passes(f: Fields, name: str, passes: int, looped: int) -> None:
    if passes * max(looped, 1) > 10_000:
        raise ConfigError(f"{f.path}{name} is {passes:,}; that would be {passes * looped:,} cached layers")


def dory(f: Fields) -> Layers:
    """A recurrent section runs several times; every loop has a cache of its own (or only the last)."""
    kinds = f.strings("layer_types")
    n = f.layers()
    counts = [f.number_or(name, 0, minimum=0) for name in ("n_input_layers", "n_output_layers")]
    looped = f.optional_number("n_recurrent_layers", minimum=0)
    if kinds is not None and p.MLP in kinds:
        # The saved form lists attention and MLP as layers of their own.
        kinds, n, counts = kinds[::2], n // 2, [count // 2 for count in counts]
        looped = None if looped is None else looped // 2
    if kinds is None:
        kinds = p.every(4)(f, n)
    if len(kinds) != n:
        raise ConfigError(f"{f.path}layer_types has {len(kinds)} entries for {n} layers")
    if looped is None:
        looped = n - sum(counts)
    if looped < 0 or counts[0] + looped + counts[1] != n:
        raise ConfigError(f"{f.path}n_input_layers, n_recurrent_layers and n_output_layers do not add up to {n}")
    layers = build(f, kinds, attention_makers(grouped))
    loops = f.number("n_recurrent_loops")
    if f.get("recurrent_kv_cache_mode", "per_loop") == "last_loop":
        return layers
    _check_passes(f, "n_recurrent_loops", loops, looped)
    return layers + layers[counts[0] : counts[0] + looped] * (loops - 1)


def hrm_text(f: Fields) -> Layers:
    """Two stacks that take turns; every turn of every layer has a cache of its own."""
    turns = f.number("H_cycles") * (f.number("L_cycles") + 1)
    stack = f.optional_number("num_layers_per_stack")
    stack = f.layers() if stack is None else stack
    _check_passes(f, "H_cycles", turns, stack)
    count = stack * turns
    dim = head_dim(f)
    return repeat(count, Layer((FullAttention(f.number("num_attention_heads"), dim, dim),)))


# -- others ---------------------------------------------------------------------------


def minimax(f: Fields) -> Layers:
    """Lightning attention: one [head, head] matrix a head, in the model's dtype."""
    dim, heads = head_dim(f), f.number("num_attention_heads")
    state = Layer((RecurrentState((heads, dim, dim), None, "lightning"),))
    # transformers makes its cache without a config: windows have no effect on it.
    makers = attention_makers(grouped) | {p.LINEAR: lambda f: state}
    return build(f, p.layer_kinds(f, p.every(2, last=p.LINEAR, other=p.FULL)), makers)


def zaya(f: Fields) -> Layers:
    """Compressed convolutional attention: attention, two convolutions' tail, and a delayed value."""
    heads, kv, dim = f.number("num_attention_heads"), f.number("num_key_value_heads"), f.number("head_dim")
    columns = f.number("cca_time0") - 1 + f.number("cca_time1") - 1
    extra: States = (
        ConvState((heads + kv) * dim, columns + 1, fixed_columns=columns),
        RecurrentState((kv * dim // 2,), None, "delayed value"),
    )
    makers: dict[str, Maker] = {
        p.HYBRID: lambda f: Layer((FullAttention(kv, dim, dim), *extra)),
        p.HYBRID_SLIDING: lambda f: Layer((SlidingWindow(kv, dim, dim, window=window(f)), *extra)),
    }
    return build(f, p.layer_kinds(f, p.all_of(p.HYBRID)), makers)


def recurrent_gemma(f: Fields) -> Layers:
    """Griffin: gated linear recurrences, and windowed attention every third layer."""
    width = f.optional_number("lru_width") or f.number("hidden_size")
    recurrent = Layer((
        ConvState(width, f.number("conv1d_width"), fixed_columns=f.number("conv1d_width") - 1),
        RecurrentState((width,), FP32, "lru"),
    ))  # fmt: skip
    dim = head_dim(f)
    attention = Layer((SlidingWindow(kv_heads(f), dim, dim, window=window(f, "attention_window_size")),))
    kinds = p.recurrent_gemma(f, f.layers())
    return tuple(recurrent if kind == p.LINEAR else attention for kind in kinds)


def rwkv(f: Fields) -> Layers:
    """RWKV 4: two shifted inputs in the model's dtype, three running sums in float32."""
    hidden = f.number("hidden_size")
    states = (RecurrentState((2, hidden), None, "shift"), RecurrentState((3, hidden), FP32, "wkv"))
    return repeat(f.layers(), Layer(states))


def _round_up(value: float, multiple: int) -> int:
    return int((value + multiple - 1) // multiple * multiple)


def xlstm(f: Fields) -> Layers:
    """mLSTM: a matrix memory, a normaliser and a maximum for every head."""
    hidden = f.optional_number("hidden_size") or f.number("embedding_dim")
    heads = f.number("num_heads")
    factors = []
    for name in ("qk_dim_factor", "v_dim_factor"):
        factor = f.get(name)
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= 1024:
            raise ConfigError(f"{f.path}{name} is {str(factor)[:40]!r}, not a factor")
        factors.append(factor)
    key, value = (_round_up(hidden * factor, 64) // heads for factor in factors)
    elements = (heads * key * value, heads * key, heads)
    named = named_dtype(f, "inference_state_dtype", FP32)
    layer = Layer(
        tuple(RecurrentState((count,), named) for count in elements),
        # transformers allocates the state in the model's dtype, whatever the config names.
        {"transformers": tuple(RecurrentState((count,), None) for count in elements)},
    )
    return repeat(f.optional_number("num_hidden_layers") or f.layers("num_blocks"), layer)
