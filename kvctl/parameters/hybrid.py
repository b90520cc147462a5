"""Attention mixed with recurrent layers: gated delta (Qwen3-Next, Qwen3.5), Mamba 2 (Nemotron-H)."""

from __future__ import annotations

from kvctl.errors import ConfigError
from kvctl.families import patterns
from kvctl.parameters import LAYER, STANDARD, Layers, Model
from kvctl.parameters.dense import Dense, attention, mixture, mlp

_GATED = Dense(qkv_bias="attention_bias", o_bias="attention_bias", qk="head", gate=2)


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
    plain = Dense(qkv_bias="attention_bias", o_bias="attention_bias")
    if patterns.FULL in of:
        attention(m, plain, of[patterns.FULL], prefix)
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


def mamba2(m: Model, layers: Layers, prefix: str) -> None:
    """One projection in, a convolution, decays and a norm by head, one projection out."""
    if not layers:
        return
    f = m.f
    heads = m.size("mamba_num_heads")
    inner, states = heads * m.size("mamba_head_dim"), m.size("n_groups") * m.size("ssm_state_size")
    channels = inner + 2 * states
    bias = m.flag("mamba_proj_bias") or (m.f.type == "nemotron_h" and m.flag("use_bias"))
    m.linear(prefix + "in_proj", inner + channels + heads, m.hidden, layers, bias)
    m.add(prefix + "conv1d.weight", channels, 1, m.size("conv_kernel"), layers=layers)
    if f.flag("use_conv_bias", default=True):
        m.add(prefix + "conv1d.bias", channels, layers=layers)
    m.add(prefix + "A_log", heads, layers=layers, dtype="F32")
    m.add(prefix + "D", heads, layers=layers)
    m.add(prefix + "dt_bias", heads, layers=layers)
    m.norm(prefix + "norm", inner, layers)
    m.linear(prefix + "out_proj", m.hidden, inner, layers, bias)
