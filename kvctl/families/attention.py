"""Multi-head, grouped-query and multi-query attention, with windows, chunks and sharing."""

from __future__ import annotations

from kvctl.errors import ConfigError
from kvctl.families import patterns as p
from kvctl.families.build import (
    NONE,
    Layers,
    Maker,
    attention_makers,
    build,
    derived_head_dim,
    grouped,
    head_dim,
    kv_heads,
    repeat,
    window,
)
from kvctl.families.fields import Fields
from kvctl.spec import FullAttention, Layer, SlidingWindow

# Rules of configuration classes that fill in `layer_types`; types that are not here have
# no pattern of their own (all layers alike).
PATTERNS: dict[str, p.Pattern] = {
    "afmoe": p.every(4, field="global_attn_every_n_layers"),
    "beam": p.beam,
    "cohere2": p.every(4, field="sliding_window_pattern"),
    "cohere2_moe": p.cohere2_moe,
    "cohere_compass_text": p.all_of(p.FULL),
    "cwm": p.first_of(4),
    "dots1": p.dots1,
    "exaone4": p.every(4, field="sliding_window_pattern"),
    "exaone_moe": p.every(4, field="sliding_window_pattern"),
    "flint": p.flint,
    "gemma2": p.every(2),
    "gemma3_text": p.every(6, field="sliding_window_pattern"),
    "gemma3n_text": p.every(5),
    "gpt_oss": p.every(2),
    "granite_swa": p.first_of(4),
    "granitemoe_swa": p.first_of(4),
    "kolibri1": p.every(5),
    "laguna": p.all_of(p.FULL),
    "llama4_text": p.llama4,
    "mellum": p.all_of(p.FULL),

    "modernbert": p.first_of(3, field="global_attn_every_n_layers"),
    "modernbert-decoder": p.first_of(3, field="global_attn_every_n_layers"),
    "muse_glimmer_assistant": p.all_of(p.SLIDING),
    "muse_glimmer_text": p.from_the_end(4),
    "muse_spark_text": p.from_the_end(4),
    "olmo3": p.every(4),
    "qwen2": p.window_from_layer,
    "qwen2_5_omni_talker": p.window_from_layer,
    "qwen2_5_omni_text": p.window_from_layer,
    "qwen2_5_vl_text": p.window_from_layer,
    "qwen2_moe": p.qwen2_moe,
    "qwen2_vl_text": p.window_from_layer,
    "qwen3": p.window_from_layer,
    "smollm3": p.smollm3,
    "step3p5": p.all_of(p.FULL),
    "t5_gemma_module": p.every(2),
    "t5gemma2_decoder": p.every(6, field="sliding_window_pattern"),
    "t5gemma2_text": p.every(6, field="sliding_window_pattern"),
    "unlimited_ocr_text": p.unlimited_ocr,
    "vaultgemma": p.every(2),
}  # fmt: skip


def normalised(f: Fields) -> Fields:
    """Apply what the configuration class does to windows when it loads."""
    kind = f.type
    if kind == "step3p5":
        # Published files go on with the kinds of the layers that predict further tokens.
        n, extra = f.layers(), f.number_or("num_nextn_predict_layers", 0, minimum=0)
        kinds = f.entries("layer_types")
        if extra and kinds is not None and len(kinds) == n + extra:
            f = f.with_values(layer_types=kinds[:n])
    if kind in _USES_FLAG and not f.flag("use_sliding_window"):
        return f.with_values(sliding_window=None)
    if kind == "cwm" and not f.get("sliding_window"):
        return f.with_values(sliding_window=None)
    if kind in _NO_WINDOW_NO_PATTERN and f.get("sliding_window") is None:
        return f.with_values(sliding_window_pattern=0)
    if kind == "gemma3_text" and f.get("use_bidirectional_attention"):
        return f.with_values(sliding_window=window(f) // 2 + 1)
    return f


_USES_FLAG = {"qwen2", "qwen3", "qwen3_moe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text",
              "qwen2_5_omni_talker", "qwen2_moe", "minicpmv", "minicpmo", "llava_qwen", "llava_qwen2",
              "bailing_moe_v2"}  # fmt: skip
_NO_WINDOW_NO_PATTERN = {"exaone4", "exaone_moe"}


def grouped_query(f: Fields) -> Layers:
    """The common case: KV heads, an explicit or derived head dim, windows by pattern."""
    f = normalised(f)
    return build(f, p.layer_kinds(f, PATTERNS.get(f.type)), attention_makers(grouped))


def split_hidden(f: Fields) -> Layers:
    """Grouped-query attention whose class ignores `head_dim` and splits the hidden size."""
    f = normalised(f)
    shape = _split_shape
    return build(f, p.layer_kinds(f, PATTERNS.get(f.type)), attention_makers(shape))


def _split_shape(f: Fields) -> tuple[int, int, int]:
    dim = derived_head_dim(f)
    return kv_heads(f), dim, dim


def multi_head(f: Fields) -> Layers:
    """One KV head for every query head; no window, no explicit head dim."""
    dim = derived_head_dim(f)
    return repeat(f.layers(), Layer((FullAttention(f.number("num_attention_heads"), dim, dim),)))


def decoder_only_bert(f: Fields) -> Layers:
    """BERT and kin: a cache only where the model is a decoder."""
    n = f.layers()
    if not f.flag("is_decoder"):
        return repeat(n, NONE)
    return multi_head(f)


def bloom(f: Fields) -> Layers:
    """Multi-head; old files give the width as n_embed."""
    width = f.optional_number("n_embed")
    return multi_head(f if width is None else f.with_values(hidden_size=width))


def gpt_neo(f: Fields) -> Layers:
    """Global and local layers; transformers keeps local layers in full."""
    n = f.layers()
    kinds = f.strings("attention_layers")
    if kinds is None:
        kinds = []
        for entry in f.entries("attention_types") or [[["global", "local"], 12]]:
            if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list)
                    and isinstance(entry[1], int)) or not 0 <= entry[1] <= 10_000:  # fmt: skip
                raise ConfigError(f"{f.path}attention_types is not a list of [[kinds], repeats]")
            kinds += [str(kind) for kind in entry[0]] * entry[1]
    if len(kinds) != n:
        raise ConfigError(f"{f.path}attention_types describe {len(kinds)} layers, num_layers is {n}")
    dim, heads = derived_head_dim(f), f.number("num_attention_heads")
    full = FullAttention(heads, dim, dim)
    local = Layer((SlidingWindow(heads, dim, dim, window=f.number("window_size")),), {"transformers": (full,)},
                  note="transformers keeps windowed layers in full")  # fmt: skip
    everything = Layer((full,))
    return tuple(local if kind == "local" else everything for kind in kinds)


def falcon(f: Fields) -> Layers:
    """Multi-query by default; the new architecture has groups, which transformers repeats before caching."""
    width = f.optional_number("n_embed")
    if width is not None:
        f = f.with_values(hidden_size=width)
    heads = f.number("num_attention_heads")
    dim = derived_head_dim(f)
    groups = f.optional_number("num_kv_heads") or f.optional_number("n_head_kv") or heads
    if f.flag("new_decoder_architecture"):
        needed = FullAttention(groups, dim, dim)
        repeated = FullAttention(heads, dim, dim)
        layer = Layer((needed,), {"transformers": (repeated,)} if groups != heads else {},
                      note="transformers stores every query head's copy of the KV heads")  # fmt: skip
    else:
        count = 1 if f.flag("multi_query", True) else groups
        layer = Layer((FullAttention(count, dim, dim),))
    return repeat(f.layers(), layer)


def refined_web(f: Fields) -> Layers:
    """Falcon before it was named: RefinedWebModel (7B, multi-query) and RefinedWeb (40B, grouped)."""
    heads, dim = f.number("n_head"), f.number("hidden_size") // f.number("n_head")
    groups = f.optional_number("n_head_kv")
    count = groups if groups is not None else 1 if f.flag("multi_query") else heads
    return repeat(f.layers("n_layer"), Layer((FullAttention(count, dim, dim),)))


def gpt_bigcode(f: Fields) -> Layers:
    """Multi-query unless switched off."""
    dim = derived_head_dim(f)
    count = 1 if f.flag("multi_query", True) else f.number("num_attention_heads")
    return repeat(f.layers(), Layer((FullAttention(count, dim, dim),)))


def dbrx(f: Fields) -> Layers:
    """KV heads live in attn_config."""
    dim = derived_head_dim(f)
    attn = f.section("attn_config")
    count = attn.number_or("kv_n_heads", 1)
    return repeat(f.layers(), Layer((FullAttention(count, dim, dim),)))


def mpt(f: Fields) -> Layers:
    """Multi-head; attn_config may name fewer KV heads (in MPT's own code, not in transformers)."""
    heads, dim = f.number("num_attention_heads"), derived_head_dim(f)
    attn = f.section("attn_config")
    kind = attn.get("attn_type", "multihead_attention")
    full = FullAttention(heads, dim, dim)
    if kind == "multihead_attention":
        return repeat(f.layers(), Layer((full,)))
    count = 1 if kind == "multiquery_attention" else attn.number("kv_n_heads")
    return repeat(f.layers(), Layer((FullAttention(count, dim, dim),), {"transformers": (full,)}))


def jetmoe(f: Fields) -> Layers:
    """Mixture of attention heads: KV heads of width kv_channels."""
    dim = f.number("kv_channels")
    return repeat(f.layers(), Layer((FullAttention(f.number("num_key_value_heads"), dim, dim),)))


def mimo_v2(f: Fields) -> Layers:
    """Values narrower than keys; windowed layers have twice the KV heads."""
    kv, key, value = kv_heads(f), f.number("head_dim"), f.number("v_head_dim")
    published = f.get("sliding_window")
    previous = f.optional_number("sliding_window_size")
    swa_kv = f.optional_number("swa_num_key_value_heads") or 2 * kv
    swa_key = f.optional_number("swa_head_dim") or key
    swa_value = f.optional_number("swa_v_head_dim") or value

    def sliding(f: Fields) -> Layer:
        size = window(f) if published is not None else f.number("sliding_window_size")
        needed = SlidingWindow(swa_kv, swa_key, swa_value, window=size)
        # transformers reads sliding_window_size as the tokens before the query, and doubles the KV heads itself.
        stored = SlidingWindow(2 * kv, key, value, window=size if previous is None else previous + 1)
        return Layer((needed,), {"transformers": (stored,)})

    makers = {p.FULL: lambda f: Layer((FullAttention(kv, key, value),)), p.SLIDING: sliding}
    return build(f, p.layer_kinds(f, p.mimo_v2), makers)


def modernbert_decoder(f: Fields) -> Layers:
    """Half of `local_attention` on each side; a decoder looks back over one half."""
    if f.get("sliding_window") is None:
        local = f.optional_number("local_attention", minimum=0)
        f = f.with_values(sliding_window=local // 2 if local else None)
    dim, heads = derived_head_dim(f), f.number("num_attention_heads")
    return build(f, p.layer_kinds(f, PATTERNS[f.type]), attention_makers(lambda f: (heads, dim, dim)))


def last_layers_share(f: Fields, kinds: list[str], *, all_may: bool = False) -> list[bool]:
    """The last `num_kv_shared_layers` layers read the cache of the last layer of their kind before them."""
    n = len(kinds)
    shared = f.number_or("num_kv_shared_layers", 0, minimum=0)
    if shared > n:
        raise ConfigError(f"{f.path}num_kv_shared_layers is {shared} of {n} layers")
    without = set(kinds) - set(kinds[: n - shared])
    if shared and without and not (all_may and shared == n):
        raise ConfigError(f"{f.path}num_kv_shared_layers is {shared}: no {without.pop()} layer is left to share from")
    return [i >= n - shared for i in range(n)]


def gemma3n(f: Fields) -> Layers:
    """Windows by pattern, and a tail of layers that share."""
    kinds = p.layer_kinds(f, PATTERNS["gemma3n_text"])
    return build(f, kinds, attention_makers(grouped), shared=last_layers_share(f, kinds))


def gemma4(f: Fields) -> Layers:
    """Full layers have their own head dim and KV heads (global_*); a tail of layers may share."""
    if f.get("use_bidirectional_attention") == "all":
        f = f.with_values(sliding_window=window(f) // 2 + 1)
    kinds = p.layer_kinds(f, p.every(6))
    if kinds:
        kinds[-1] = p.FULL
    if "per_layer_config" not in f.raw:
        override = {"head_dim": f.number_or("global_head_dim", 512)}
        global_heads = f.optional_number("num_global_key_value_heads")
        # Gemma4 and the assistants of it carry the switch; the classes without it always follow.
        if global_heads is not None and f.flag("attention_k_eq_v", True):
            override["num_key_value_heads"] = global_heads
        f = f.with_values(per_layer_config={str(i): override for i, kind in enumerate(kinds) if kind == p.FULL})
    # The diffusion model's class lacks the field, and ignores it in a file.
    shared = last_layers_share(f, kinds, all_may=True) if f.knows("num_kv_shared_layers") else None
    return build(f, kinds, attention_makers(grouped), shared=shared)


def per_layer_lists(f: Fields) -> Layers:
    """OpenELM: num_kv_heads is a list, one entry a layer."""
    dim = f.number("head_dim")
    counts = f.entries("num_kv_heads")
    n = f.layers("num_transformer_layers")
    if counts is None or len(counts) != n:
        raise ConfigError(f"{f.path}num_kv_heads must have one entry for each of {n} layers")
    made: dict[int, Layer] = {}
    layers = []
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"{f.path}num_kv_heads holds {str(count)[:40]!r}")
        layers.append(made.setdefault(count, Layer((FullAttention(count, dim, dim),))))
    return tuple(layers)


def uneven(f: Fields) -> Layers:
    """What a GGUF file says where no class is laid out alike: widths of keys and values apart, windows as listed."""
    key = head_dim(f)
    value = f.optional_number("v_head_dim") or key
    makers: dict[str, Maker] = {
        p.FULL: lambda f: Layer((FullAttention(kv_heads(f), key, value),)),
        p.SLIDING: lambda f: Layer((SlidingWindow(kv_heads(f), key, value, window=window(f)),)),
    }
    return build(f, p.layer_kinds(f, p.all_of(p.FULL)), makers)
