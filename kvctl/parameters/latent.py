"""Latent attention: DeepSeek-V2, V3 and V3.2, Kimi K2, GLM-4.7-Flash and GLM-5, A.X K1."""

from __future__ import annotations

from kvctl.families.latent import indexer_kinds
from kvctl.parameters import LAYER, STANDARD, Model
from kvctl.parameters.dense import mixture, mlp


def latent(m: Model) -> None:
    """Latent attention (DeepSeek-V2 and V3, Kimi K2, GLM-4.7-Flash, A.X K1) with a mixture of experts."""
    f = m.f
    m.embeddings()
    for name in STANDARD:
        m.norm(LAYER + name, m.hidden, m.all)
    m.norm("model.norm", m.hidden)
    heads, kv_rank = m.size("num_attention_heads"), m.size("kv_lora_rank")
    nope, rope, value = m.size("qk_nope_head_dim"), m.size("qk_rope_head_dim"), m.size("v_head_dim")
    bias = f.flag("attention_bias")
    prefix = LAYER + "self_attn."
    q_rank = f.optional_number("q_lora_rank")
    if q_rank is None:
        m.linear(prefix + "q_proj", heads * (nope + rope), m.hidden, m.all)
    else:
        m.linear(prefix + "q_a_proj", q_rank, m.hidden, m.all, bias)
        m.norm(prefix + "q_a_layernorm", q_rank, m.all)
        m.linear(prefix + "q_b_proj", heads * (nope + rope), q_rank, m.all)
    m.linear(prefix + "kv_a_proj_with_mqa", kv_rank + rope, m.hidden, m.all, bias)
    m.norm(prefix + "kv_a_layernorm", kv_rank, m.all)
    m.linear(prefix + "kv_b_proj", heads * (nope + value), kv_rank, m.all)
    m.linear(prefix + "o_proj", m.hidden, heads * value, m.all, bias)
    sparse = mixture(m, "deepseek")
    rest = tuple(layer for layer in m.all if layer not in set(sparse))
    if rest:
        mlp(m, "gated", rest, m.size("intermediate_size"), f.type == "deepseek_v2" and f.flag("mlp_bias"))
    if f.type in ("deepseek_v32", "glm_moe_dsa"):
        indexer(m)
    if f.type == "axk1":
        m.norm(LAYER + "post_mlp_layernorm", m.hidden, m.all)


def indexer(m: Model) -> None:
    """What picks the tokens that sparse attention looks at."""
    heads, dim = m.size("index_n_heads"), m.size("index_head_dim")
    layers = m.all
    if m.f.type == "glm_moe_dsa":  # some layers use the choice of an earlier one
        own = indexer_kinds(m.f, len(m.all))
        layers = tuple(i for i in m.all if own[i])
    prefix = LAYER + "self_attn.indexer."
    m.linear(prefix + "wq_b", heads * dim, m.size("q_lora_rank"), layers)
    m.linear(prefix + "wk", dim, m.hidden, layers)
    m.norm(prefix + "k_norm", dim, layers, bias=True)  # float32 in vLLM, whatever the file has
    m.linear(prefix + "weights_proj", heads, m.hidden, layers)
