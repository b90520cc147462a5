"""Encoder-decoders: self attention over the output, cross attention over the encoder's positions."""

from __future__ import annotations

from kvctl.errors import ConfigError
from kvctl.families import patterns as p
from kvctl.families.attention import PATTERNS, decoder_only_bert, multi_head
from kvctl.families.build import (
    NONE,
    Layers,
    attention_makers,
    build,
    derived_head_dim,
    grouped,
    head_dim,
    kv_heads,
    repeat,
)
from kvctl.families.fields import Fields
from kvctl.spec import Attention, CrossAttention, FullAttention, Layer

_DECODER_ONLY_ENDINGS = ("ForCausalLM", "LMHeadModel", "Decoder")


def is_decoder_only(f: Fields) -> bool:
    """Whether the decoder runs alone: the model class decides, else `is_encoder_decoder`."""
    names = f.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        # T5WithLMHeadModel is an old name of the whole model.
        if names[0].endswith(_DECODER_ONLY_ENDINGS) and not names[0].startswith("T5With"):
            return "EncoderDecoder" not in names[0]
        return f.type == "trocr"
    return not f.flag("is_encoder_decoder")


def with_cross(layer: Layer) -> Layer:
    """The same layer with cross attention of the same shape as its self attention."""
    own = next((state for state in layer.states if isinstance(state, Attention)), None)
    if own is None or any(isinstance(state, CrossAttention) for state in layer.states):
        return layer
    cross = CrossAttention(own.kv_heads, own.key_dim, own.value_dim)
    return layer.replace(states=(*layer.states, cross))


def add_cross(layers: Layers) -> Layers:
    """Cross attention in every layer that has none yet; equal layers stay one object."""
    made: dict[int, Layer] = {}
    return tuple(made.setdefault(id(layer), with_cross(layer)) for layer in layers)


def _stack(f: Fields, count: int, heads: int, dim: int, *, kv: int | None = None) -> Layers:
    layers = repeat(count, Layer((FullAttention(kv or heads, dim, dim),)))
    return layers if is_decoder_only(f) else add_cross(layers)


def bart(f: Fields) -> Layers:
    """BART and kin: decoder_layers, decoder_attention_heads, the width split over the heads."""
    heads = f.number("decoder_attention_heads")
    width = f.number("hidden_size") if f.has("hidden_size") else f.number("d_model")
    return _stack(f, f.layers("decoder_layers"), heads, width // heads)


def t5(f: Fields) -> Layers:
    """T5 and kin: heads of width d_kv; the decoder may have a length of its own."""
    if str((f.entries("architectures") or [""])[0]).endswith("EncoderModel"):
        return repeat(f.layers("num_layers"), NONE)
    count = f.optional_number("num_decoder_layers", minimum=0)
    heads, dim = f.number("num_heads"), f.number("d_kv")
    return _stack(f, f.layers("num_layers") if count is None else count, heads, dim)


def pix2struct(f: Fields) -> Layers:
    """A T5 decoder that always looks at the image."""
    heads, dim, hidden = f.number("num_heads"), f.number("d_kv"), f.number("hidden_size")
    if heads * dim != hidden:
        # Its projections are hidden_size wide whatever the heads say: no reading of this is right.
        raise ConfigError(f"{f.path}num_heads {heads} × d_kv {dim} is not hidden_size {hidden}")
    f = f.with_values(is_encoder_decoder=True, architectures=None, num_decoder_layers=None)
    return add_cross(t5(f))


def blip_text(f: Fields) -> Layers:
    """A BERT decoder that always looks at the image."""
    return add_cross(multi_head(f)) if f.flag("is_decoder") else repeat(f.layers(), NONE)


def prophetnet(f: Fields) -> Layers:
    heads = f.number("num_decoder_attention_heads")
    return _stack(f, f.layers("num_decoder_layers"), heads, f.number("hidden_size") // heads)


def moonshine(f: Fields) -> Layers:
    """The decoder has the encoder's heads: building the encoder writes them into the shared config."""
    heads = f.number("encoder_num_attention_heads")
    dim = f.optional_number("head_dim") or f.number("hidden_size") // heads
    return _stack(f, f.layers("decoder_num_hidden_layers"), heads, dim,
                  kv=f.optional_number("encoder_num_key_value_heads"))  # fmt: skip


def flat_grouped(f: Fields) -> Layers:
    """A grouped-query decoder at the top of the config (Cohere ASR, Moonshine Streaming)."""
    dim = head_dim(f)
    return _stack(f, f.layers(), f.number("num_attention_heads"), dim, kv=kv_heads(f))


def nested_grouped(f: Fields) -> Layers:
    """A grouped-query decoder under decoder_config (Canary)."""
    decoder = f.nested("decoder_config")
    if decoder is None:
        raise ConfigError(f"{f.path}decoder_config is missing")
    return add_cross(repeat(decoder.layers(), Layer((FullAttention(*grouped(decoder)),))))


def dia(f: Fields) -> Layers:
    """Cross attention has heads of its own."""
    d = f.nested("decoder_config") or f
    dim = head_dim(d)
    cross_dim = d.number("cross_head_dim")
    states = (
        FullAttention(kv_heads(d), dim, dim),
        CrossAttention(d.number("cross_num_key_value_heads"), cross_dim, cross_dim),
    )
    return repeat(d.layers(), Layer(states))


def nested_decoder(f: Fields) -> Layers:
    """EncoderDecoderModel and kin: a decoder of any type under `decoder`, with cross attention."""
    from kvctl.families import read_layers

    decoder = f.nested("decoder")
    if decoder is None:
        raise ConfigError(f"{f.path}decoder is missing from the configuration")
    return add_cross(read_layers(decoder.with_values(is_decoder=True, architectures=None, is_encoder_decoder=False)))


def t5gemma(f: Fields) -> Layers:
    """Gemma layers in the decoder, cross attention of the same shape."""
    d = f.nested("decoder")
    if d is None:
        raise ConfigError(f"{f.path}decoder is missing from the configuration")
    kinds = p.layer_kinds(d, PATTERNS.get(d.type, p.every(2)))
    return add_cross(build(d, kinds, attention_makers(grouped)))


def cross_where_added(f: Fields) -> Layers:
    """BERT-like decoders: multi-head; cross attention where add_cross_attention says so."""
    layers = decoder_only_bert(f)
    return add_cross(layers) if f.flag("add_cross_attention") else layers


def gpt2(f: Fields) -> Layers:
    """Multi-head; cross attention where add_cross_attention says so."""
    dim, heads = derived_head_dim(f), f.number("num_attention_heads")
    layer = Layer((FullAttention(heads, dim, dim),))
    if f.raw.get("attention_head_type") == "multiquery":
        # SantaCoder: the weights have one KV head; transformers' own class knows nothing of it.
        layer = Layer((FullAttention(1, dim, dim),), {"transformers": layer.states},
                      note="transformers' gpt2 class has no multi-query attention")  # fmt: skip
    layers = repeat(f.layers(), layer)
    return add_cross(layers) if f.flag("add_cross_attention") else layers


def musicgen(f: Fields) -> Layers:
    """A text encoder and a music decoder with cross attention."""
    d = f.nested("decoder")
    if d is None:
        raise ConfigError(f"{f.path}decoder is missing from the configuration")
    return add_cross(gpt2(d.with_values(add_cross_attention=False)))


def mllama(f: Fields) -> Layers:
    """Llama 3.2 Vision: the listed layers look at the image, all others at the text."""
    dim = derived_head_dim(f)
    kv = kv_heads(f)
    listed = f.entries("cross_attention_layers")
    cross_at = set([3, 8, 13, 18, 23, 28, 33, 38] if listed is None else listed)
    text = Layer((FullAttention(kv, dim, dim),))
    image = Layer((CrossAttention(kv, dim, dim),))
    return tuple(image if i in cross_at else text for i in range(f.layers()))


def seq2seq_text_model(f: Fields) -> Layers:
    """Models whose language part may be an encoder-decoder under text_config (BLIP-2, Florence-2)."""
    from kvctl.families import read_layers

    text = f.nested("text_config")
    if text is None:
        raise ConfigError(f"{f.path}text_config is missing from the configuration")
    return read_layers(text.with_values(architectures=None))
