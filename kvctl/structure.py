"""What if a model's attention had another structure: multi-head, multi-query, grouped-query, or a latent for all heads.

Its layers, with the same windows and widths of heads; everything else of the model stays as it is. Grouped queries: Ainslie et
al., 2023, arXiv 2305.13245; one group: Shazeer, 2019, arXiv 1911.02150; latents: DeepSeek-V2, arXiv 2405.04434.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from kvctl.errors import ConfigError, UsageError
from kvctl.families import text_fields
from kvctl.families.fields import Fields
from kvctl.record import Record
from kvctl.spec import (
    Attention,
    ChunkedAttention,
    FullAttention,
    LatentAttention,
    Layer,
    LayerState,
    ModelSpec,
    Shared,
    SlidingWindow,
)
from kvctl.units import plural

NAMES = ("mha", "mqa", "gqa:8", "mla:512+64")
"""Spellings of --what-if."""
_MOST = 2**20
_LEFT = ("cross_attention", "recurrent_state", "conv_state", "indexer", "compressed_attention")
"""Kinds of state that no structure of heads is about."""
_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads")
_LATENT_FIELDS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OTHER_PARTS = re.compile(r"vision|audio|vit|projector|resampler|draft")

Change = Callable[[LayerState], LayerState | None]
"""A state in the other structure; None for one that it leaves alone."""


class Structure(Record):
    """What --what-if asks about."""

    name: str
    """As it is written: mha, mqa, gqa:4, mla:512+64."""
    heads: int | None = None
    """KV heads; None: one for each query head."""
    latent: tuple[int, int] | None = None
    """Width of the latent, and of the rotary key that all heads share."""


def parse(text: str) -> Structure:
    """ "gqa:4" and the like.

    Raises:
        UsageError: no structure is called so.

    """
    name = text.strip().lower()
    kind, _, words = name.partition(":")
    if name in ("mha", "mqa"):
        return Structure(name, 1 if name == "mqa" else None)
    numbers = words.split("+")
    counts = [int(number) for number in numbers if number.isascii() and number.isdecimal() and len(number) <= 18]
    if len(counts) == len(numbers) and counts[0] > 0:
        if kind == "gqa" and len(counts) == 1:
            return Structure(name, counts[0])
        if kind == "mla" and len(counts) == 2 and max(counts) <= _MOST:
            return Structure(name, latent=(counts[0], counts[1]))
    hint = {
        "gqa": "gqa:8 has 8 KV heads",
        "mla": "mla:512+64 has a latent of 512 and a shared rotary key of 64 a layer",
    }
    raise UsageError(
        f"--what-if: {text[:40]!r} is no structure", hint=hint.get(kind, "one of mha, mqa, gqa:N, mla:L+R")
    )


def parse_list(texts: Sequence[str]) -> list[Structure]:
    """Each of several --what-if, with commas between some, without repeats."""
    found = [parse(part) for text in texts for part in text.split(",") if part.strip()]
    if texts and not found:
        raise UsageError("--what-if: none is named", hint="one of mha, mqa, gqa:N, mla:L+R, or several with commas")
    return list(dict.fromkeys(found))


def restructured(spec: ModelSpec, structure: Structure, engine: str = "") -> ModelSpec:
    """The model if its attention were so, as `engine` would hold it ("" is what the architecture needs). It is an estimate
    of a model that does not exist, and notes say so.

    Windows stay windows; cross attention, recurrent states and indexers are left as they are. A latent becomes heads of the
    widths that its configuration names.

    Raises:
        UsageError: the KV heads do not divide the query heads.
        ConfigError: nothing of the model's cache has such a structure, a number that the answer rests on is not known, or the
            engine could not run it.

    """
    notes = [f"what if {structure.name}: a model that does not exist, sized by rule; weights are counted as {spec.id} has them"]  # fmt: skip
    latent = structure.latent
    change = _to_heads(spec, structure, engine, notes) if latent is None else _to_latent(spec, *latent)
    return _mapped(spec, structure.name, change, engine, notes)


def pooled(spec: ModelSpec, heads: int, name: str, engine: str = "") -> ModelSpec:
    """The model with the KV heads of every layer joined to `heads`, each in the place of a group of as many neighbours.

    Raises:
        UsageError: they do not divide a layer's KV heads.
        ConfigError: it keeps no keys and values of heads.

    """

    def change(state: LayerState) -> LayerState | None:
        if isinstance(state, LatentAttention):
            raise ConfigError(f"{spec.id} keeps latents: {name} joins KV heads, and a latent has none")
        if not _of_heads(state):
            return None
        if state.kv_heads % heads:
            raise UsageError(f"{name}: {spec.id} has {state.kv_heads} KV heads, and {heads} does not divide them",
                             hint=_divisors(state.kv_heads))  # fmt: skip
        return state.replace(kv_heads=heads)

    return _mapped(spec, name, change, engine, [])


def _of_heads(state: LayerState) -> TypeGuard[Attention]:
    """Whether a state is keys and values of a layer's own heads."""
    return isinstance(state, (FullAttention, SlidingWindow, ChunkedAttention)) and bool(state.value_dim)


def _to_heads(spec: ModelSpec, structure: Structure, engine: str, notes: list[str]) -> Change:
    """So many KV heads, as wide as they are, or as a latent stands for.

    vLLM's attention of latent models without latents (VLLM_MLA_DISABLE=1) pads values to the width of keys, and takes no indexer
    (vllm 0.27 model_executor/models/deepseek_v2.py, DeepseekV2Attention).
    """
    query = _query_heads(spec, structure) if structure.heads != 1 else None
    heads = structure.heads or query or 1
    if query is not None and query % heads:
        raise UsageError(f"--what-if {structure.name}: {spec.id} has {query} query heads, which {plural(heads, 'KV head')} cannot share evenly",
                         hint=_divisors(query))  # fmt: skip

    def change(state: LayerState) -> LayerState | None:
        if isinstance(state, LatentAttention):
            key, rope, value = _widths_behind(spec, state, structure)
            if engine == "vllm":
                if any(one.kind == "indexer" for layer, _ in spec.groups for one in layer.states):
                    raise ConfigError(f"{spec.id}: vLLM picks tokens by an indexer from latents alone",
                                      hint="--engine ideal says what heads would need")  # fmt: skip
                value = max(key + rope, value)
                notes.append("vLLM pads values to the width of keys, as it does with VLLM_MLA_DISABLE=1")
            notes.append(f"what if {structure.name}: {plural(heads, 'KV head')} with keys of {key + rope} and values of {value} a token "
                         f"({_LATENT_FIELDS[0]} + {_LATENT_FIELDS[1]}, {_LATENT_FIELDS[2]})")  # fmt: skip
            if state.window is not None:
                return SlidingWindow(heads, key + rope, value, window=state.window)
            return FullAttention(heads, key + rope, value)
        if not _of_heads(state):
            return None
        if query is not None and query % state.kv_heads:
            raise ConfigError(f"{spec.id}: a layer has {state.kv_heads} KV heads, which do not divide the {query} query heads that its "
                              f"configuration names; how many that layer has is not known")  # fmt: skip
        return state.replace(kv_heads=heads)

    return change


def _query_heads(spec: ModelSpec, structure: Structure) -> int:
    """Query heads of every layer.

    Raises:
        ConfigError: they are not known, or differ from layer to layer.

    """
    f = text_fields(Fields(spec.config))
    heads = spec.attention_heads or next((found for name in _QUERY_HEADS if type(found := f.get(name)) is int), None)
    hint = "mqa and mla:L+R do not depend on them"
    if not heads:
        raise ConfigError(f"{spec.id}: how many query heads it has is not known, and --what-if {structure.name} depends on it",
                          hint=hint)  # fmt: skip
    other = next((found for found in _other_heads(f.raw, heads)), None)
    if other is not None:
        raise ConfigError(f"{spec.id}: its layers differ in query heads ({other}), and --what-if {structure.name} depends on them",
                          hint=hint)  # fmt: skip
    return heads


def _other_heads(config: Mapping[str, Any], heads: int) -> Iterator[str]:
    """Fields that name another number of query heads than `heads`."""
    for key, value in config.items():
        if isinstance(value, Mapping) and not _OTHER_PARTS.search(str(key)):
            yield from _other_heads(value, heads)
        elif "attention_heads" in str(key):
            numbers = [one for one in (value if isinstance(value, list) else [value]) if type(one) is int and one > 0]
            if any(one != heads for one in numbers):
                yield f"{key} {str(value)[:40]}"


def _widths_behind(spec: ModelSpec, state: LatentAttention, structure: Structure) -> tuple[int, int, int]:
    """Widths of a head that a latent stands for: its key without and with rotary part, and its value.

    Raises:
        ConfigError: the configuration does not name them for this layer.

    """
    f = text_fields(Fields(spec.config))
    found = [f.get(name) for name in _LATENT_FIELDS]
    missing = [name for name, value in zip(_LATENT_FIELDS, found, strict=True) if type(value) is not int or value < 0]
    hint = "mla:L+R asks about another latent"
    if missing:
        raise ConfigError(f"{spec.id} keeps latents, and --what-if {structure.name} takes {', '.join(missing)}, which its configuration lacks",
                          hint=hint)  # fmt: skip
    if (state.latent, state.rope) != (f.get("kv_lora_rank"), found[1]):
        raise ConfigError(f"{spec.id}: a layer keeps a latent of {state.latent} + {state.rope}, and how wide its heads are is not known",
                          hint=hint)  # fmt: skip
    key, rope, value = found
    return key, rope, value


def _to_latent(spec: ModelSpec, latent: int, rope: int) -> Change:
    """A latent and a rotary key in every layer, with the windows that it has."""

    def change(state: LayerState) -> LayerState | None:
        if isinstance(state, LatentAttention):
            return state.replace(latent=latent, rope=rope)
        return _as_latent(spec, state, latent, rope) if _of_heads(state) else None

    return change


def _as_latent(spec: ModelSpec, state: Attention, latent: int, rope: int) -> LatentAttention:
    if isinstance(state, FullAttention) and state.prefix:
        raise ConfigError(f"{spec.id} puts positions of its own before every text, and as latents nobody has them")
    return LatentAttention(latent, rope, window=getattr(state, "window", getattr(state, "chunk", None)))


def _mapped(spec: ModelSpec, name: str, change: Change, engine: str, notes: list[str]) -> ModelSpec:
    """Every layer changed, equal ones once."""
    made: dict[int, Layer] = {}
    for layer, _ in spec.groups:
        made[id(layer)] = _layer(layer, change, engine)
    left = {
        state.kind.replace("_", " ")
        for layer, _ in spec.groups
        for state in layer.states_in(engine)
        if state.kind in _LEFT
    }
    if all(made[id(layer)] is layer for layer, _ in spec.groups):
        raise ConfigError(f"{spec.id}: {name} is about keys and values of heads, and its cache has none",
                          hint=f"it holds {', '.join(sorted(left)) or 'nothing'}")  # fmt: skip
    if left:
        notes.append(f"{name} leaves as it is: {', '.join(sorted(left))}")
    # What a one-line calculator makes of the configuration says nothing about another structure.
    return spec.replace(
        layers=tuple(made[id(layer)] for layer in spec.layers),
        notes=(*spec.notes, *dict.fromkeys(notes)),
        naive=None,
    )


def _layer(layer: Layer, change: Change, engine: str) -> Layer:
    """A layer in the other structure; the same object where it has nothing that changes."""
    states = _states(layer.states, change)
    if all(new is old for new, old in zip(states, layer.states, strict=True)):
        return layer
    kept = layer.stored.get(engine)
    if kept is None:
        return Layer(states, {}, "" if layer.stored else layer.note)
    own = next((state for state in layer.states if _of_heads(state)), None)
    stored = tuple(_stored(state, own, change) for state in kept)
    return Layer(states, {engine: stored}, layer.note)


def _states(states: Sequence[LayerState], change: Change) -> tuple[LayerState, ...]:
    return tuple(
        state.replace(like=_states(state.like, change))
        if isinstance(state, Shared) and state.like
        else change(state) or state
        for state in states
    )


def _stored(state: LayerState, own: LayerState | None, change: Change) -> LayerState:
    """A state that an engine keeps its own way, in a layer that has `own`: where it repeats heads for every query head, it goes
    on doing so; where it expands latents, these stay expanded."""
    if isinstance(state, Attention):
        if isinstance(own, Attention) and state.kv_heads != own.kv_heads:
            return state
        made = change(state)
        return made if made is not None and (own is not None or isinstance(made, Attention)) else state
    return change(state) or state


def _divisors(count: int) -> str:
    return f"one of {', '.join(str(n) for n in range(1, count + 1) if count % n == 0)}"
