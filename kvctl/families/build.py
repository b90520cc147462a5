"""Shared pieces of family code: from kinds of layers to `Layer` objects.

A family maps each kind of layer to a maker, `Fields -> Layer`. `build` calls every maker
once for equal layers, so that equal layers are one object and a report is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvctl.errors import ConfigError, Hint
from kvctl.families.fields import MAX_LAYERS, Fields
from kvctl.families.patterns import CHUNKED, FULL, MLP, MOE, REFERENCE_SLIDING, SLIDING
from kvctl.spec import (
    ChunkedAttention,
    CrossAttention,
    FullAttention,
    LatentAttention,
    Layer,
    LayerState,
    NoState,
    Shared,
    SlidingWindow,
)

Maker = Callable[[Fields], Layer]
Layers = tuple[Layer, ...]

NONE = Layer((NoState(),))
SHARED = Layer((Shared(),))


def per_layer_overrides(f: Fields, n: int) -> dict[int, Mapping[str, Any]]:
    """`per_layer_config`: layer index → the fields in which that layer differs."""
    section = f.get("per_layer_config")
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{f.path}per_layer_config is not an object")
    out: dict[int, Mapping[str, Any]] = {}
    for key, value in section.items():
        try:
            index = int(key)
        except ValueError:
            index = -1
        if not 0 <= index < n or not isinstance(value, Mapping):
            raise ConfigError(f"{f.path}per_layer_config: {str(key)[:20]!r} is not a layer of {n}")
        out[index] = value
    return out


def build(
    f: Fields,
    kinds: Sequence[str],
    makers: Mapping[str, Maker],
    *,
    shared: Sequence[bool] | None = None,
) -> Layers:
    """One layer for each of `kinds`; `shared` marks those that read another layer's cache."""
    overrides = per_layer_overrides(f, len(kinds))
    made: dict[tuple[str, str], Layer] = {}
    sharing: dict[tuple[str, str], Layer] = {}
    layers = []
    for index, kind in enumerate(kinds):
        override = overrides.get(index)
        key = (kind, repr(sorted(override.items(), key=lambda item: item[0])) if override else "")
        if key not in made:
            made[key] = _make(f.with_values(**override) if override else f, kind, makers)
        if shared is not None and shared[index]:
            if key not in sharing:
                sharing[key] = Layer((Shared(like=made[key].states),))
            layers.append(sharing[key])
        else:
            layers.append(made[key])
    return tuple(layers)


def _make(f: Fields, kind: str, makers: Mapping[str, Maker]) -> Layer:
    if kind in (MOE, MLP):
        return NONE
    maker = makers.get(kind)
    if maker is None:
        raise ConfigError(
            f"{f.path}layer_types holds {kind[:40]!r}, which {f.type[:60] or 'this family'} is not known to have",
            hint="known here: " + ", ".join([*makers, MOE, MLP]),
        )
    return maker(f)


def windows_of_the_cache(f: Fields, layers: Layers) -> Layers:
    """Put in the windows that transformers' cache sees though the model has none.

    Without layer_types, the cache slides in every layer of a config that has a
    `sliding_window` (or an `attention_chunk_size`), whatever the model's own code does
    (get_layer_types_and_kwargs in cache_utils.py).
    """
    if not {"sliding_window", "attention_chunk_size"} & f.raw.keys():
        return layers
    size = f.get("sliding_window")
    size = f.get("attention_chunk_size") if size is None else size
    if size is None or f.get("layer_types") is not None:
        return layers
    if any(
        isinstance(s, (SlidingWindow, ChunkedAttention)) for layer in layers for s in layer.states_in("transformers")
    ):
        return layers
    size = f.as_number("sliding_window", size, 1)
    made: dict[int, Layer] = {}
    for layer in layers:
        if id(layer) not in made:
            stored = tuple(_windowed(state, size) for state in layer.states_in("transformers"))
            made[id(layer)] = layer.replace(stored={"transformers": stored})
    return tuple(made[id(layer)] for layer in layers)


def _windowed(state: LayerState, size: int) -> LayerState:
    if isinstance(state, FullAttention):
        return SlidingWindow(state.kv_heads, state.key_dim, state.value_dim, window=size)
    if isinstance(state, (LatentAttention, CrossAttention)):
        return state.replace(window=size)
    return state


# -- attention -----------------------------------------------------------------------


def kv_heads(f: Fields, name: str = "num_key_value_heads", heads: str = "num_attention_heads") -> int:
    """KV heads; null or absent is one for every query head."""
    kv = f.optional_number(name)
    if kv is None:
        return f.number(heads)
    queries = f.optional_number(heads)
    if queries is not None and queries % kv:
        raise ConfigError(f"{f.path}{name} is {kv}, and does not divide the {queries} query heads ({heads})")
    return kv


def head_dim(f: Fields) -> int:
    """Width of a head: given, or the hidden size split over the query heads."""
    return f.optional_number("head_dim", minimum=0) or derived_head_dim(f, given=True)


def derived_head_dim(f: Fields, *, given: bool = False) -> int:
    """Width of a head where the class always splits the hidden size (`given`: unless the file names it)."""
    hidden, heads = f.number("hidden_size"), f.number("num_attention_heads")
    if hidden % heads:
        raise ConfigError(
            f"{f.path}hidden_size {hidden} does not split over {heads} heads"
            + (", and head_dim is not given" if given else ""),
            hint=Hint(
                f"give it with --set {f.path}head_dim=N", "size", "profile", otherwise="say it in its config.json"
            )
            if given
            else None,
        )
    return hidden // heads


def window(f: Fields, name: str = "sliding_window") -> int:
    """A window that must be there."""
    value = f.get(name)
    if value is None:
        how = "null" if name in f.raw else "missing"
        raise ConfigError(
            f"{f.path}{name} is {how}, and the layer kinds of {f.type[:60]} have windows",
            hint=Hint(f"give it with --set {f.path}{name}=N", "size", "profile", otherwise="say it in its config.json"),
        )
    return f.number(name)


def attention_makers(shape: Callable[[Fields], tuple[int, int, int]]) -> dict[str, Maker]:
    """Makers for the kinds of plain attention; `shape` is (KV heads, key dim, value dim)."""
    return {
        FULL: lambda f: Layer((FullAttention(*shape(f)),)),
        SLIDING: lambda f: Layer((SlidingWindow(*shape(f), window=window(f)),)),
        CHUNKED: lambda f: Layer((ChunkedAttention(*shape(f), chunk=window(f, "attention_chunk_size")),)),
        REFERENCE_SLIDING: reference_sliding(shape),
    }


def reference_sliding(shape: Callable[[Fields], tuple[int, int, int]]) -> Maker:
    """Full attention over the prompt, a window over what is generated; the prompt length is not known here."""

    def make(f: Fields) -> Layer:
        window(f)
        return Layer(
            (FullAttention(*shape(f)),),
            note="prompt in full, a window over generated tokens: counted as if all were prompt",
        )

    return make


def grouped(f: Fields) -> tuple[int, int, int]:
    """(KV heads, key dim, value dim) of grouped-query attention."""
    dim = head_dim(f)
    if dim == 1:
        # Rotary embeddings come in pairs: one of width 1 makes keys twice as wide as values.
        raise ConfigError(f"{f.path}head_dim is 1; a head with rotary embeddings has an even width")
    return kv_heads(f), dim, dim


def repeat(count: int, layer: Layer) -> Layers:
    """`count` equal layers."""
    if count > MAX_LAYERS:
        raise ConfigError(f"{count:,} layers; no model has over {MAX_LAYERS:,}")
    return (layer,) * count
