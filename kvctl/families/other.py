"""Model types with rules of their own, in transformers and outside of it."""

from __future__ import annotations

from kvctl.errors import ConfigError
from kvctl.families import patterns as p
from kvctl.families.build import NONE, SHARED, Layers, head_dim, kv_heads, repeat
from kvctl.families.fields import Fields
from kvctl.formats import FP32
from kvctl.spec import ConvState, FullAttention, LatentAttention, Layer, NoState, RecurrentState, SlidingWindow


def no_cache(f: Fields) -> Layers:
    """Encoders: no layer keeps anything, however many there are."""
    return repeat(f.layers() if f.get("num_hidden_layers") is not None else 0, NONE)


def cpmant(f: Fields) -> Layers:
    """Multi-head with an explicit dim_head; a learned prompt stands before the text."""
    dim = f.number("dim_head")
    state = FullAttention(f.number("num_attention_heads"), dim, dim, prefix=f.number("prompt_length", minimum=0))
    return repeat(f.layers(), Layer((state,)))


def openai_gpt(f: Fields) -> Layers:
    """Multi-head; transformers has no cache for it."""
    dim = f.number("hidden_size") // f.number("num_attention_heads")
    state = FullAttention(f.number("num_attention_heads"), dim, dim)
    return repeat(f.layers(), Layer((state,), {"transformers": (NoState(),)}, note="transformers keeps no cache"))


def xlnet(f: Fields) -> Layers:
    """Memory of hidden states: the newest mem_len positions of every layer (all without mem_len)."""
    width = f.number("d_model")
    length = f.optional_number("mem_len", minimum=0)
    if not length:
        return repeat(f.layers(), Layer((FullAttention(1, width, 0),)))
    stored = SlidingWindow(1, width, 0, window=length + 1)
    return repeat(f.layers(), Layer((SlidingWindow(1, width, 0, window=length),), {"transformers": (stored,)}))


def blt(f: Fields) -> Layers:
    """Byte latent transformer: the byte encoder and decoder keep a cache, the patch transformer none."""
    encoder, decoder = f.nested("encoder_config"), f.nested("decoder_config")
    if encoder is None or decoder is None:
        raise ConfigError(f"{f.path}encoder_config and decoder_config are needed")
    layers: Layers = ()
    for part, size in ((encoder, f.optional_number("local_attention_window_len")), (decoder, None)):
        dim, heads = head_dim(part), kv_heads(part)
        full = FullAttention(heads, dim, dim)
        layer = Layer((full,))
        if size is not None:
            layer = Layer((SlidingWindow(heads, dim, dim, window=size),), {"transformers": (full,)})
        layers += repeat(part.layers(), layer)
    return layers


def unsupported(f: Fields) -> Layers:
    """Types whose state does not follow from the configuration."""
    reasons = {
        "reformer": "its cache depends on hashing (buckets), not on the configuration alone",
        "phi4flash": "its mix of state-space, windowed and shared layers is fixed in its own code",
    }
    reason = reasons.get(f.type, "its cache does not follow from the configuration")
    raise ConfigError(f"{f.type} cannot be sized: {reason}")


def chatglm(f: Fields) -> Layers:
    """ChatGLM 2 and later: multi_query_group_num KV heads of width kv_channels."""
    heads = f.number("num_attention_heads")
    dim = f.optional_number("kv_channels") or f.number("hidden_size") // heads
    count = f.number("multi_query_group_num") if f.flag("multi_query_attention") else heads
    return repeat(f.layers("num_layers"), Layer((FullAttention(count, dim, dim),)))


def qwen(f: Fields) -> Layers:
    """The first Qwen: multi-head of width kv_channels."""
    heads = f.number("num_attention_heads")
    dim = f.optional_number("kv_channels") or f.optional_number("head_dim") or f.number("hidden_size") // heads
    return repeat(f.layers(), Layer((FullAttention(heads, dim, dim),)))


def step3(f: Fields) -> Layers:
    """Multi-matrix factorisation attention: num_attention_groups KV heads of width head_dim."""
    dim = f.number("head_dim")
    count = f.optional_number("num_attention_groups") or f.number("num_key_value_heads")
    return repeat(f.layers(), Layer((FullAttention(count, dim, dim),)))


def baichuan_m1(f: Fields) -> Layers:
    """Listed layers are windowed and have KV heads of their own; keys and values pass a short convolution."""
    listed = f.entries("sliding_window_layers") or []
    hidden, heads = f.number("hidden_size"), f.number("num_attention_heads")
    full_dim = hidden // heads
    swa_heads = f.optional_number("num_swa_attention_heads") or heads
    swa_dim = hidden // swa_heads
    kv, swa_kv = kv_heads(f), f.optional_number("num_swa_key_value_heads") or kv_heads(f)
    taps = f.number_or("conv_window", 2)
    full = Layer((FullAttention(kv, full_dim, full_dim), ConvState(2 * kv * full_dim, taps)))
    sliding = Layer((
        SlidingWindow(swa_kv, swa_dim, swa_dim, window=f.number("sliding_window")),
        ConvState(2 * swa_kv * swa_dim, taps),
    ))  # fmt: skip
    chosen = set(listed)
    return tuple(sliding if i in chosen else full for i in range(f.layers()))


def block_configs(f: Fields) -> Layers:
    """Nemotron-NAS (Deci): every block says how many query heads share a KV head, or has no attention."""
    blocks = f.entries("block_configs")
    n = f.layers()
    if blocks is None and f.get("num_key_value_heads_per_layer") is not None:
        # The first of them (DeciLM-7B) counts KV heads instead.
        counts = f.entries("num_key_value_heads_per_layer") or []
        heads = f.number("num_attention_heads")
        blocks = [{"attention": {"n_heads_in_group": heads // c if isinstance(c, int) and c > 0 and heads % c == 0 else c}}
                  for c in counts]  # fmt: skip
    if blocks is None or len(blocks) != n:
        raise ConfigError(f"{f.path}block_configs must have one entry for each of {n} layers")
    heads = f.number("num_attention_heads")
    dim = head_dim(f)
    made: dict[int, Layer] = {}
    layers = []
    for index, block in enumerate(blocks):
        attention = block.get("attention") if isinstance(block, dict) else None
        if not isinstance(attention, dict):
            raise ConfigError(f"{f.path}block_configs[{index}].attention is missing")
        if attention.get("no_op") or attention.get("replace_with_linear"):
            layers.append(NONE)
            continue
        share = attention.get("n_heads_in_group")
        if isinstance(share, bool) or not isinstance(share, int) or share < 1 or heads % share:
            raise ConfigError(f"{f.path}block_configs[{index}].attention.n_heads_in_group is {share!r}")
        count = heads // share
        layers.append(made.setdefault(count, Layer((FullAttention(count, dim, dim),))))
    return tuple(layers)


def hunyuan(f: Fields) -> Layers:
    """Grouped-query; with cross-layer attention only the first of every cla_share_factor layers has a cache."""
    if f.flag("use_mla"):
        return repeat(f.layers(), Layer((LatentAttention(f.number("kv_lora_rank"), f.number("qk_rope_head_dim")),)))
    heads = f.number("num_attention_heads")
    dim = f.optional_number("attention_head_dim") or f.optional_number("head_dim") or f.number("hidden_size") // heads
    own = Layer((FullAttention(kv_heads(f), dim, dim),))
    factor = f.number_or("cla_share_factor", 1) if f.flag("use_cla") else 1
    return tuple(SHARED if i % factor else own for i in range(f.layers()))


def phi_msft(f: Fields) -> Layers:
    """Phi-1.5 and Phi-2 in their own code: n_embd over n_head, n_head_kv KV heads."""
    heads = f.number("n_head")
    dim = f.number("n_embd") // heads
    return repeat(f.layers("n_layer"), Layer((FullAttention(f.optional_number("n_head_kv") or heads, dim, dim),)))


def rwkv5(f: Fields) -> Layers:
    """RWKV 5 and 6: two shifted inputs in the model's dtype, one matrix a head in float32."""
    hidden, size = f.number("hidden_size"), f.number("head_size")
    heads = (f.optional_number("attention_hidden_size") or hidden) // size
    states = (RecurrentState((2, hidden), None, "shift"), RecurrentState((heads, size, size), FP32, "wkv"))
    return repeat(f.layers(), Layer(states))


def phi3small(f: Fields) -> Layers:
    """Grouped-query; block-sparse attention still keeps every token."""
    dim = head_dim(f)
    return repeat(f.layers(), Layer((FullAttention(kv_heads(f), dim, dim),)))


def gemma4_assistant(f: Fields) -> Layers:
    """A draft model that reads the target's cache where all its layers share."""
    from kvctl.families.attention import gemma4

    text = f.nested("text_config")
    if text is None:
        raise ConfigError(f"{f.path}text_config is missing from the configuration")
    if not text.number_or("num_kv_shared_layers", 0, minimum=0):
        text = text.with_values(num_kv_shared_layers=text.layers())
    return gemma4(text)


def minimax_text_01(f: Fields) -> Layers:
    """Lightning attention by attn_type_list: 0 linear, 1 softmax."""
    from kvctl.families.linear import minimax

    kinds = p.flags("attn_type_list", on=p.FULL, off=p.LINEAR)(f, f.layers())
    return minimax(f.with_values(layer_types=kinds, sliding_window=None))
