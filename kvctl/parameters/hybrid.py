"""Attention mixed with recurrent layers (gated delta, Mamba 2, short convolutions), and GPT-NeoX."""

from __future__ import annotations

from typing import NamedTuple

from kvctl.errors import ConfigError
from kvctl.families import patterns
from kvctl.families.fields import Fields
from kvctl.parameters import LAYER, STANDARD, Layers, Model
from kvctl.parameters.dense import Dense, attention, mixture, mlp

_GATED = Dense(qkv_bias="attention_bias", o_bias="attention_bias", qk="head", gate=2)
_PLAIN = Dense(qkv_bias="attention_bias", o_bias="attention_bias")


def gated_delta(m: Model) -> None:
    """Full attention with a gate every few layers, gated delta in the others."""
    f = m.f
    m.embeddings()
    for name in STANDARD:
        m.norm(LAYER + name, m.hidden, m.all)
    m.norm("model.norm", m.hidden)
    rule = patterns.every(4, field="full_attention_interval", other=patterns.LINEAR)
    kinds = patterns.layer_kinds(f, rule)
    linear = tuple(i for i in m.all if kinds[i] == patterns.LINEAR)
    attention(m, _GATED, tuple(i for i in m.all if kinds[i] != patterns.LINEAR))
    _delta(m, linear)
    sparse: Layers = ()
    if f.type != "qwen3_5_text":
        sparse = mixture(m, "qwen2")
    rest = tuple(i for i in m.all if i not in set(sparse))
    if rest:
        mlp(m, "gated", rest, m.size("intermediate_size"))


def _delta(m: Model, layers: Layers) -> None:
    keys = m.size("linear_num_key_heads") * m.size("linear_key_head_dim")
    heads, dim = m.size("linear_num_value_heads"), m.size("linear_value_head_dim")
    values = heads * dim
    prefix = LAYER + "linear_attn."
    if not layers:
        return
    if m.f.type == "qwen3_next":
        m.linear(prefix + "in_proj_qkvz", 2 * keys + 2 * values, m.hidden, layers)
        m.linear(prefix + "in_proj_ba", 2 * heads, m.hidden, layers)
    else:
        m.linear(prefix + "in_proj_qkv", 2 * keys + values, m.hidden, layers)
        m.linear(prefix + "in_proj_z", values, m.hidden, layers)
        m.linear(prefix + "in_proj_b", heads, m.hidden, layers)
        m.linear(prefix + "in_proj_a", heads, m.hidden, layers)
    m.add(prefix + "conv1d.weight", 2 * keys + values, 1, m.size("linear_conv_kernel_dim"), layers=layers)
    m.add(prefix + "A_log", heads, layers=layers, dtype="F32")
    m.add(prefix + "dt_bias", heads, layers=layers)
    m.norm(prefix + "norm", dim, layers)
    m.linear(prefix + "out_proj", m.hidden, values, layers)


BACKBONE = "backbone.layers.N."


def nemotron_h(m: Model) -> None:
    """Layers of one mixer each: Mamba 2, attention, a feed-forward part, or experts."""
    f = m.f
    listed = f.strings("layers_block_type")
    kinds = patterns.nemotron_h(f, 0) if listed is None else listed
    kinds = [patterns.LEGACY_KINDS.get(kind, kind) for kind in kinds]
    m.all = tuple(range(len(kinds)))
    m.embeddings(name="backbone.embeddings")
    m.norm("backbone.norm_f", m.hidden)
    m.norm(BACKBONE + "norm", m.hidden, m.all)
    of = {kind: tuple(i for i in m.all if kinds[i] == kind) for kind in set(kinds)}
    known = {patterns.LINEAR, patterns.FULL, patterns.MLP, patterns.MOE}
    if of.keys() - known:
        raise ConfigError(
            f"the parameters of {f.type} layers of kind {', '.join(sorted(of.keys() - known))} are not known"
        )
    prefix = BACKBONE + "mixer."
    mamba2(m, of.get(patterns.LINEAR, ()), prefix)
    if patterns.FULL in of:
        attention(m, _PLAIN, of[patterns.FULL], prefix)
    if patterns.MLP in of:
        mlp(m, "plain", of[patterns.MLP], m.size("intermediate_size"), m.flag("mlp_bias"), prefix)
    if patterns.MOE in of:
        _nemotron_experts(m, of[patterns.MOE], prefix)


def _nemotron_experts(m: Model, layers: Layers, prefix: str) -> None:
    """Experts of two matrices, in a narrower space where the file names one."""
    count, width = m.size("n_routed_experts"), m.size("moe_intermediate_size")
    latent = m.f.optional_number("moe_latent_size")
    inner = latent or m.hidden
    bias = m.flag("mlp_bias")
    m.linear(prefix + "gate", count, m.hidden, layers)
    m.add(prefix + "gate.e_score_correction_bias", count, layers=layers, dtype="F32")
    m.linear(prefix + "experts.N.up_proj", width, inner, layers, bias, count)
    m.linear(prefix + "experts.N.down_proj", inner, width, layers, bias, count)
    shared = m.size("moe_shared_expert_intermediate_size") * m.f.number_or("n_shared_experts", 1, minimum=0)
    if shared:
        m.linear(prefix + "shared_experts.up_proj", shared, m.hidden, layers, bias)
        m.linear(prefix + "shared_experts.down_proj", m.hidden, shared, layers, bias)
    if latent is not None:
        m.linear(prefix + "fc1_latent_proj", latent, m.hidden, layers, bias)
        m.linear(prefix + "fc2_latent_proj", m.hidden, latent, layers, bias)


class Mamba2(NamedTuple):
    """Sizes of a Mamba 2 mixer."""

    heads: int
    inner: int
    groups: int
    state: int
    kernel: int


def mamba2_sizes(f: Fields) -> Mamba2:
    """As the families of Nemotron-H, Granite 4 and Falcon-H1 spell them."""
    if f.type == "nemotron_h":
        heads = f.number("mamba_num_heads")
        inner = heads * f.number("mamba_head_dim")
        return Mamba2(heads, inner, f.number("n_groups"), f.number("ssm_state_size"), f.number("conv_kernel"))
    if f.type == "falcon_h1":
        inner = f.optional_number("mamba_d_ssm") or f.number("mamba_expand") * f.number("hidden_size")
    else:
        inner = f.number("mamba_expand") * f.number("hidden_size")
    return Mamba2(
        f.number("mamba_n_heads"),
        inner,
        f.number("mamba_n_groups"),
        f.number("mamba_d_state"),
        f.number("mamba_d_conv"),
    )


def mamba2(m: Model, layers: Layers, prefix: str, out_bias: bool | None = None) -> None:
    """One projection in, a convolution, decays and a norm by head, one projection out."""
    if not layers:
        return
    f = m.f
    sizes = mamba2_sizes(f)
    channels = sizes.inner + 2 * sizes.groups * sizes.state
    bias = m.flag("mamba_proj_bias") or (f.type == "nemotron_h" and m.flag("use_bias"))
    m.linear(prefix + "in_proj", sizes.inner + channels + sizes.heads, m.hidden, layers, bias)
    m.add(prefix + "conv1d.weight", channels, 1, sizes.kernel, layers=layers)
    if f.flag("use_conv_bias" if f.type == "nemotron_h" else "mamba_conv_bias", default=True):
        m.add(prefix + "conv1d.bias", channels, layers=layers)
    m.add(prefix + "A_log", sizes.heads, layers=layers, dtype="F32")
    m.add(prefix + "D", sizes.heads, layers=layers)
    m.add(prefix + "dt_bias", sizes.heads, layers=layers)
    if f.type != "falcon_h1" or f.flag("mamba_rms_norm"):
        m.norm(prefix + "norm", sizes.inner, layers)
    m.linear(prefix + "out_proj", m.hidden, sizes.inner, layers, bias if out_bias is None else out_bias)


def granite_hybrid(m: Model) -> None:
    """Granite 4: Mamba 2 or attention, then experts (where there are any) beside a feed-forward part for all tokens."""
    f = m.f
    m.embeddings()
    for name in STANDARD:
        m.norm(LAYER + name, m.hidden, m.all)
    m.norm("model.norm", m.hidden)
    listed = f.strings("layer_types", len(m.all))
    kinds = [patterns.LINEAR] * len(m.all) if listed is None else listed
    kinds = [patterns.LEGACY_KINDS.get(kind, kind) for kind in kinds]
    mamba2(m, tuple(i for i in m.all if kinds[i] == patterns.LINEAR), LAYER + "mamba.")
    attention(m, _PLAIN, tuple(i for i in m.all if kinds[i] != patterns.LINEAR))
    width = m.size("shared_intermediate_size")
    m.linear(LAYER + "shared_mlp.input_linear", 2 * width, m.hidden, m.all)
    m.linear(LAYER + "shared_mlp.output_linear", m.hidden, width, m.all)
    if m.size("num_local_experts", minimum=0):
        mixture(m, "granite")


def falcon_h1(m: Model) -> None:
    """Mamba 2 and attention side by side in every layer."""
    m.embeddings()
    for name in ("input_layernorm", "pre_ff_layernorm"):
        m.norm(LAYER + name, m.hidden, m.all)
    m.norm("model.final_layernorm", m.hidden)
    attention(m, _PLAIN, m.all)
    mamba2(m, m.all, LAYER + "mamba.", m.flag("projectors_bias"))
    mlp(m, "gated", m.all, m.size("intermediate_size"), m.flag("mlp_bias"), LAYER + "feed_forward.")


def lfm2(m: Model) -> None:
    """LFM2: short convolutions, attention at some layers, feed-forward parts or experts."""
    f = m.f
    m.embeddings()
    for name in ("operator_norm", "ffn_norm"):
        m.norm(LAYER + name, m.hidden, m.all)
    m.norm("model.embedding_norm", m.hidden)
    kinds = f.strings("layer_types", len(m.all))
    full = f.entries("full_attn_idxs")
    attending = tuple(
        i for i in m.all
        if (kinds[i] == "full_attention" if kinds is not None else full is None or i in full)
    )  # fmt: skip
    convolving = tuple(i for i in m.all if i not in set(attending))
    bias = m.flag("conv_bias")
    m.linear(LAYER + "conv.in_proj", 3 * m.hidden, m.hidden, convolving, bias)
    m.linear(LAYER + "conv.out_proj", m.hidden, m.hidden, convolving, bias)
    if convolving:
        m.add(LAYER + "conv.conv.weight", m.hidden, 1, m.size("conv_L_cache"), layers=convolving)
        if bias:
            m.add(LAYER + "conv.conv.bias", m.hidden, layers=convolving)
    attention(m, Dense(qk="head", qk_names=("q_layernorm", "k_layernorm")), attending, out="out_proj")
    names, prefix = ("w1", "w3", "w2"), LAYER + "feed_forward."
    if f.type == "lfm2":
        mlp(m, "gated", m.all, _lfm2_width(m), prefix=prefix, names=names)
        return
    dense = m.size("num_dense_layers", minimum=0)
    mlp(m, "gated", m.all[:dense], m.size("intermediate_size"), prefix=prefix, names=names)
    sparse, count = m.all[dense:], m.size("num_experts")
    m.linear(prefix + "gate", count, m.hidden, sparse)
    if f.flag("use_expert_bias", default=True):
        m.add(prefix + "expert_bias", count, layers=sparse, dtype="F32")
    mlp(m, "gated", sparse, m.size("moe_intermediate_size"), prefix=prefix + "experts.N.", each=count, names=names)


def _lfm2_width(m: Model) -> int:
    """Two thirds of the width that the file names, rounded up."""
    width = m.size("intermediate_size")
    if not m.f.flag("block_auto_adjust_ff_dim", default=True):
        return width
    multiplier = m.f.get("block_ffn_dim_multiplier")
    if multiplier not in (None, 1, 1.0):
        raise ConfigError("lfm2 with another block_ffn_dim_multiplier than 1 is not known")
    multiple = m.f.number_or("block_multiple_of", 256)
    return -(-(2 * width // 3) // multiple) * multiple


def gpt_neox(m: Model) -> None:
    """GPT-NeoX and Pythia: queries, keys and values in one matrix, two layers behind, biases everywhere."""
    layer = "gpt_neox.layers.N."
    m.embeddings(name="gpt_neox.embed_in", head="embed_out")
    for name in STANDARD:
        m.norm(layer + name, m.hidden, m.all, bias=True)
    m.norm("gpt_neox.final_layer_norm", m.hidden, bias=True)
    bias, width = m.flag("+attention_bias"), m.size("intermediate_size")
    m.linear(layer + "attention.query_key_value", 3 * m.hidden, m.hidden, m.all, bias)
    m.linear(layer + "attention.dense", m.hidden, m.hidden, m.all, bias)
    m.linear(layer + "mlp.dense_h_to_4h", width, m.hidden, m.all, bias=True)
    m.linear(layer + "mlp.dense_4h_to_h", m.hidden, width, m.all, bias=True)
