"""Decoders in the shape of Llama, with feed-forward parts or mixtures of experts, in all the ways in which they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvctl.errors import ConfigError
from kvctl.parameters import LAYER, STANDARD, Layers, Model

AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
BEHIND = ("post_attention_layernorm", "post_feedforward_layernorm")


class Dense(NamedTuple):
    """What tells one family of decoder layers from another.

    Biases: "yes", the key that says so (with + where its class turns it on), or none.
    """

    qkv_bias: str = ""
    o_bias: str = ""
    mlp_bias: str = ""
    mlp: str = "gated"
    """gated, fused (gate and up in one), plain (up, down), c_fc."""
    norms: tuple[str, ...] = STANDARD
    norm_bias: bool = False
    final_norm: bool = True
    qk: str = ""
    """Norms of queries and keys: head (one for all heads), heads (one a head), full (over all heads)."""
    qk_key: str = ""
    """The key that turns them on."""
    qk_names: tuple[str, str] = ("q_norm", "k_norm")
    fused_qkv: bool = False
    head_bias: str = ""
    moe: str = ""
    gate: int = 1
    """Query rows for each head's row: 2 where the output's gate comes with the queries."""


_BIASED = Dense(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias")
_MOE = Dense(qkv_bias="attention_bias", o_bias="attention_bias")

DENSE: dict[str, Dense] = {
    "llama": _BIASED,
    "granite": _BIASED,
    "smollm3": _BIASED,
    "mistral": Dense(),
    "ministral": Dense(),
    "ministral3": Dense(),
    "qwen2": Dense(qkv_bias="yes"),
    "qwen3": _MOE._replace(qk="head"),
    "gemma": _MOE,
    "gemma2": _MOE._replace(norms=AROUND),
    "gemma3_text": _MOE._replace(norms=AROUND, qk="head"),
    "olmo": _MOE._replace(norms=(), final_norm=False),
    "olmo2": _MOE._replace(norms=BEHIND, qk="full"),
    "olmo3": _MOE._replace(norms=BEHIND, qk="full"),
    "cohere": _MOE._replace(norms=STANDARD[:1], qk="heads", qk_key="use_qk_norm"),
    "cohere2": _MOE._replace(norms=STANDARD[:1]),
    "phi3": Dense(fused_qkv=True, mlp="fused"),
    "glm": Dense(qkv_bias="+attention_bias", mlp="fused"),
    "glm4": Dense(qkv_bias="+attention_bias", mlp="fused",
                  norms=(*STANDARD, "post_self_attn_layernorm", "post_mlp_layernorm")),
    "starcoder2": Dense("+use_bias", "+use_bias", "+use_bias", mlp="c_fc", norm_bias=True),
    "stablelm": Dense(qkv_bias="use_qkv_bias", norm_bias=True),
    "ernie4_5": Dense("use_bias", "use_bias", "use_bias"),
    "seed_oss": Dense("+attention_bias", "attention_out_bias", "mlp_bias"),
    "exaone4": Dense(norms=BEHIND, qk="head"),
    "arcee": _BIASED._replace(mlp="plain"),
    "nemotron": _BIASED._replace(mlp="plain", norm_bias=True),
    "apertus": _MOE._replace(mlp="xielu", norms=("attention_layernorm", "feedforward_layernorm"), qk="head"),
    "hunyuan_v1_dense": _MOE._replace(qk="head", qk_names=("query_layernorm", "key_layernorm")),
    "internlm3": Dense("qkv_bias", "bias", "bias"),
    # Mixtures of experts
    "mixtral": Dense(moe="mixtral"),
    "qwen2_moe": Dense(qkv_bias="+qkv_bias", moe="qwen2"),
    "qwen3_moe": _MOE._replace(qk="head", moe="qwen3"),
    "olmoe": _MOE._replace(qk="full", moe="olmoe"),
    "phimoe": _MOE._replace(norm_bias=True, head_bias="lm_head_bias", moe="mixtral"),
    "granitemoe": _MOE._replace(moe="granite"),
    "ernie4_5_moe": Dense("use_bias", "use_bias", "use_bias", head_bias="use_bias", moe="ernie"),
    "glm4_moe": Dense(qkv_bias="attention_bias", qk="head", qk_key="use_qk_norm", moe="deepseek"),
    "minimax_m2": Dense(qk="full", moe="minimax"),
    "qwen2_vl_text": Dense(qkv_bias="yes"),
    "qwen2_5_vl_text": Dense(qkv_bias="yes"),
    "qwen3_vl_text": _MOE._replace(qk="head"),
    "qwen3_vl_moe_text": _MOE._replace(qk="head", moe="qwen3"),
    "mellum": _MOE._replace(qk="head", moe="mellum"),
    "solar_open": Dense(qkv_bias="attention_bias", moe="deepseek"),
    "dots1": _MOE._replace(qk="head", moe="deepseek"),
    "gpt_oss": Dense("+attention_bias", "+attention_bias", moe="gpt_oss"),
}  # fmt: skip


def dense(m: Model) -> None:
    """Decoders in the shape of Llama, in all the ways in which they differ."""
    t = DENSE[m.f.type]
    if m.f.type == "stablelm" and (m.flag("qk_layernorm") or m.flag("use_parallel_residual")):
        raise ConfigError("the parameters of stablelm with norms of queries and keys, or in parallel, are not known")
    if m.f.type == "exaone4" and m.f.get("norm_position") not in (None, "post"):
        raise ConfigError("the norms of this exaone4 are not known")
    m.embeddings(m.flag(t.head_bias))
    for name in t.norms:
        m.norm(LAYER + name, m.hidden, m.all, t.norm_bias)
    if t.final_norm:
        m.norm("model.norm", m.hidden, bias=t.norm_bias)
    attention(m, t, m.all)
    sparse = mixture(m, t.moe) if t.moe else ()
    rest = tuple(layer for layer in m.all if layer not in set(sparse))
    if rest:
        mlp(m, t.mlp, rest, m.size("intermediate_size"), m.flag(t.mlp_bias))


def attention(m: Model, t: Dense, layers: Layers, prefix: str = LAYER + "self_attn.", out: str = "o_proj") -> None:
    """Projections of queries, keys, values and the output, with norms."""
    if not layers:
        return
    f = m.f
    heads = m.size("num_attention_heads")
    kv = f.optional_number("num_key_value_heads")
    if kv is None:
        kv = heads
    elif not m.whole and f.read[f.path + f.stored_name("num_key_value_heads")] != "config":
        raise ConfigError(f"{f.path}num_key_value_heads is not in the source of this configuration")
    dim = f.optional_number("head_dim") or m.hidden // heads
    bias, o_bias = m.flag(t.qkv_bias), m.flag(t.o_bias)
    if t.fused_qkv:
        m.linear(prefix + "qkv_proj", (heads + 2 * kv) * dim, m.hidden, layers, bias)
    else:
        m.linear(prefix + "q_proj", t.gate * heads * dim, m.hidden, layers, bias)
        m.linear(prefix + "k_proj", kv * dim, m.hidden, layers, bias)
        m.linear(prefix + "v_proj", kv * dim, m.hidden, layers, bias)
    m.linear(prefix + out, m.hidden, heads * dim, layers, o_bias)
    if m.f.type == "gpt_oss":
        m.add(prefix + "sinks", heads, layers=layers)
    if not t.qk or (t.qk_key and not f.flag(t.qk_key)):
        return
    for name, count in zip(t.qk_names, (heads, kv), strict=True):
        if t.qk == "heads":
            m.add(f"{prefix}{name}.weight", count, dim, layers=layers)
        else:
            m.norm(prefix + name, dim if t.qk == "head" else count * dim, layers)


def mlp(m: Model, kind: str, layers: Layers, width: int, bias: bool = False, prefix: str = LAYER + "mlp.",
        each: int = 1, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")) -> None:  # fmt: skip
    """A feed-forward part of `width`; `each`: so many of them in a layer."""
    gate, up, down = names
    if kind == "c_fc":
        up, down = "c_fc", "c_proj"
    if kind == "gated":
        m.linear(prefix + gate, width, m.hidden, layers, bias, each)
    if kind == "fused":
        m.linear(prefix + "gate_up_proj", 2 * width, m.hidden, layers, bias, each)
    else:
        m.linear(prefix + up, width, m.hidden, layers, bias, each)
    m.linear(prefix + down, m.hidden, width, layers, bias, each)
    if kind == "xielu":
        m.add(prefix + "act_fn.alpha_p", 1, layers=layers)
        m.add(prefix + "act_fn.alpha_n", 1, layers=layers)


class Moe(NamedTuple):
    """A mixture of experts: where its sizes stand, and what stands beside the experts."""

    experts: str
    width: str
    sparse: Callable[[Model], Layers]
    prefix: str = "mlp."
    router: str = "gate"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = ""
    shared_width: str = ""
    """The key of the shared experts' width; else their number times the experts' width."""
    shared_number: str = ""
    shared_gate: bool = False
    correction: str = ""
    """A vector of one float32 an expert that corrects the router's choice."""


# Dense layers at the start, where the class says so otherwise than by a default of the key.
_FIRST_DENSE = {"axk1": 1, "glm4_moe_lite": 1, "glm_moe_dsa": 3}


def _everywhere(m: Model) -> Layers:
    return m.all


def _after_the_first(m: Model) -> Layers:
    """DeepSeek's rule: dense at first, then one in every `moe_layer_freq`."""
    if "n_routed_experts" in m.f.raw and m.f.raw["n_routed_experts"] is None:
        return ()
    kinds = m.f.strings("mlp_layer_types", len(m.all))
    if kinds is not None:
        return tuple(i for i in m.all if kinds[i] == "sparse")
    first = m.f.number_or("first_k_dense_replace", _FIRST_DENSE.get(m.f.type, 0), minimum=0)
    step = m.f.number_or("moe_layer_freq", 1)
    return tuple(i for i in m.all if i >= first and i % step == 0)


def _by_step(m: Model) -> Layers:
    """Qwen's rule: every `decoder_sparse_step`-th, except those named."""
    named = m.f.entries("mlp_only_layers") or ()
    step = m.f.number_or("decoder_sparse_step", 1)
    return tuple(i for i in m.all if i not in named and (i + 1) % step == 0)


def _between(m: Model) -> Layers:
    """Ernie's rule: from one layer to another, at an interval."""
    first, last = m.f.number("moe_layer_start_index", minimum=0), m.f.number("moe_layer_end_index", minimum=-1)
    step = m.f.number_or("moe_layer_interval", 1)
    last = len(m.all) - 1 if last == -1 else last
    return tuple(i for i in m.all if first <= i <= last and (i + 1) % step == 0)


def _sparse_by_list(m: Model) -> Layers:
    kinds = m.f.strings("mlp_layer_types", len(m.all))
    return m.all if kinds is None else tuple(i for i in m.all if kinds[i] == "sparse")


_DEEPSEEK = Moe("n_routed_experts", "moe_intermediate_size", _after_the_first, shared="shared_experts.",
                shared_number="n_shared_experts", correction="gate.e_score_correction_bias")  # fmt: skip
MOE: dict[str, Moe] = {
    "mixtral": Moe("num_local_experts", "intermediate_size", _everywhere, "block_sparse_moe.", names=("w1", "w3", "w2")),
    "qwen2": Moe("num_experts", "moe_intermediate_size", _by_step, shared="shared_expert.",
                 shared_width="shared_expert_intermediate_size", shared_gate=True),
    "qwen3": Moe("num_experts", "moe_intermediate_size", _by_step),
    "mellum": Moe("num_experts", "moe_intermediate_size", _sparse_by_list),
    "olmoe": Moe("num_experts", "intermediate_size", _everywhere),
    "granite": Moe("num_local_experts", "intermediate_size", _everywhere, "block_sparse_moe.", "router.layer"),
    "ernie": Moe("moe_num_experts", "moe_intermediate_size", _between, shared="shared_experts.",
                 shared_number="moe_num_shared_experts", correction="moe_statics.e_score_correction_bias"),
    "deepseek": _DEEPSEEK,
    "minimax": Moe("num_local_experts", "intermediate_size", _everywhere, "block_sparse_moe.", names=("w1", "w3", "w2"),
                   correction="e_score_correction_bias"),
    "gpt_oss": Moe("num_local_experts", "intermediate_size", _everywhere, router="router"),
}  # fmt: skip


def mixture(m: Model, name: str) -> Layers:
    """The experts of a model, their router and what stands beside them; the layers that have them."""
    t = MOE[name]
    layers = t.sparse(m)
    if not layers:
        return ()
    count, width = m.size(t.experts), m.size(t.width)
    prefix = LAYER + t.prefix
    m.linear(prefix + t.router, count, m.hidden, layers, bias=name == "gpt_oss")
    if t.correction and m.f.type != "deepseek_v2":
        m.add(prefix + t.correction, count, layers=layers, dtype="F32")
    if name == "gpt_oss":
        m.add(prefix + "experts.gate_up_proj", count, m.hidden, 2 * width, layers=layers)
        m.add(prefix + "experts.gate_up_proj_bias", count, 2 * width, layers=layers)
        m.add(prefix + "experts.down_proj", count, width, m.hidden, layers=layers)
        m.add(prefix + "experts.down_proj_bias", count, m.hidden, layers=layers)
    elif name == "granite":
        m.add(prefix + "input_linear.weight", count, 2 * width, m.hidden, layers=layers)
        m.add(prefix + "output_linear.weight", count, m.hidden, width, layers=layers)
    else:
        mlp(m, "gated", layers, width, prefix=prefix + "experts.N.", each=count, names=t.names)
    if t.shared:
        beside = (
            m.f.number_or(t.shared_width, 0, minimum=0) if t.shared_width
            else width * (m.f.optional_number(t.shared_number, minimum=0) or 0)
        )  # fmt: skip
        if beside:
            bias = m.flag({"ernie4_5_moe": "use_bias", "deepseek_v2": "mlp_bias"}.get(m.f.type, ""))
            mlp(m, "gated", layers, beside, bias, prefix + t.shared)
        if t.shared_gate:
            m.linear(prefix + "shared_expert_gate", 1, m.hidden, layers)
    return layers
