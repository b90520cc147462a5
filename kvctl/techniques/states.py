"""Prediction: layers in, layers out. What a technique leaves of a model's states, to the byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from kvctl.errors import ConfigError, Hint
from kvctl.spec import (
    Attention,
    Formats,
    FullAttention,
    LatentAttention,
    Layer,
    LayerState,
    ModelSpec,
    Retention,
    Workload,
    fraction,
)  # fmt: skip
from kvctl.techniques.keep import Keep, Place
from kvctl.techniques.paging import Paging
from kvctl.techniques.store import Packing, Store

if TYPE_CHECKING:
    from kvctl.spec import Rational
    from kvctl.techniques import Technique


class Compressed(LayerState):
    """Keys and values of full attention as a technique holds them."""

    kv_heads: int
    key_dim: int
    value_dim: int
    prefix: int
    store: Store
    keep: Keep | None
    place: Place
    paging: Paging | None = None
    table: bool = False
    """Whether the block table, which all layers share, is counted here."""
    kind: ClassVar[str] = "full_attention"

    def tokens(self, work: Workload, keep: Retention) -> int:
        seen = work.context + self.prefix
        return seen if self.keep is None else self.keep.kept(seen, work.generated, self.place)

    def size(self, work: Workload, fmt: Formats, keep: Retention) -> int:
        kept, width = self.tokens(work, keep), fmt.model.bytes
        if self.paging is not None:
            row = self.kv_heads * (self.key_dim + self.value_dim) * width
            return self.paging.bytes(kept, row) + (self.paging.table(kept) if self.table else 0)
        halves: Sequence[tuple[Packing, int]] = ((self.store.keys, self.key_dim), (self.store.values, self.value_dim))
        held = sum(half.bytes(kept, self.kv_heads, dim, width) for half, dim in halves)
        return held + (self.keep.beside(kept, self.kv_heads, self.place) if self.keep is not None else 0)

    def total(self, work: Workload, fmt: Formats, keep: Retention, copies: int) -> int:
        """With what all of them share, a scale of the whole tensor, once."""
        seen = (work.context + self.prefix) * bool(copies)
        halves = ((self.store.keys, self.key_dim), (self.store.values, self.value_dim))
        return super().total(work, fmt, keep, copies) + sum(half.beside(seen) for half, dim in halves if dim)

    def growth(self, work: Workload, fmt: Formats, keep: Retention) -> Rational:
        """Over as many tokens as it takes for whole groups or blocks, and whole numbers of a share."""
        steps = self.store.group if self.paging is None else self.paging.block
        if self.keep is not None:
            steps = math.lcm(steps, self.keep.period(self.place))
        later = Workload(work.context + steps, 1, work.encoder)
        return fraction(self.size(later, fmt, keep) - self.size(work.replace(generated=0), fmt, keep), steps)


def applied(spec: ModelSpec, technique: Technique, engine: str) -> ModelSpec:
    """The model with its keys and values as `technique` holds them in `engine` ("" is what the architecture needs).

    Windows, chunks, cross attention and recurrent states are left as they are; a note says so.

    Raises:
        ConfigError: nothing of the model's cache is what the technique works on.

    """
    if technique.convert is not None:
        spec = technique.convert.predicted(spec, engine)
        if technique.like_plain:
            return spec.replace(notes=(*spec.notes, *technique.papers))
    made: dict[tuple[int, Place, bool], Layer] = {}
    layers, left, changed = [], set[str](), False
    for index, layer in enumerate(spec.layers):
        if engine == "transformers":
            _check_indexers(spec, layer.states_in(engine), technique)
        place = Place(index, len(spec.layers)) if technique.by_layer else Place()
        key = (id(layer), place, changed)
        if key not in made:
            states = tuple(
                _state(spec, state, technique, place, left, first=not changed) for state in layer.states_in(engine)
            )
            made[key] = layer if states == layer.states_in(engine) else Layer(states, {}, layer.note)
        changed |= made[key] is not layer
        layers.append(made[key])
    if not changed:
        raise ConfigError(f"{spec.id}: {technique.name} works on keys and values of full attention, and its cache has none",
                          hint=f"it holds {', '.join(sorted(left)) or 'nothing'}")  # fmt: skip
    notes = [*spec.notes, *technique.papers]
    if left:
        notes.append(f"{technique.name} leaves {', '.join(sorted(left))} as they are")
    return spec.replace(layers=tuple(layers), notes=tuple(notes))


def _check_indexers(spec: ModelSpec, states: Sequence[LayerState], technique: Technique) -> None:
    """Refuses attention over the tokens that an indexer picks, whose cache in transformers is no technique's."""
    if any(isinstance(state, FullAttention) for state in states) and any(state.kind == "indexer" for state in states):
        raise ConfigError(f"{spec.id}: {technique.name} works on keys and values of full attention, and its layers keep an indexer's beside them",
                          hint=Hint("--engine ideal predicts the bytes", "size", otherwise="it holds what an indexer picks from"))  # fmt: skip


def _state(
    spec: ModelSpec, state: LayerState, technique: Technique, place: Place, left: set[str], *, first: bool
) -> LayerState:
    if isinstance(state, LatentAttention):
        raise ConfigError(f"{spec.id} keeps latents: {technique.name} works on keys and values of heads",
                          hint=Hint("a latent is compressed already; --kv-dtype says in which format engines keep it", "size",
                                    otherwise="a latent is compressed already"))  # fmt: skip
    if not isinstance(state, FullAttention):
        if technique.foreign is not None:
            raise ConfigError(
                f"{spec.id} keeps {state.kind.replace('_', ' ')}: {technique.name} takes full attention alone"
            )
        if isinstance(state, Attention) or state.kind in (
            "recurrent_state",
            "conv_state",
            "indexer",
            "compressed_attention",
        ):
            left.add(state.kind.replace("_", " "))
        return state
    if technique.foreign is not None:
        if state.prefix or not state.value_dim:
            raise ConfigError(f"{spec.id}: {technique.name} takes keys and values of tokens alone")
        return technique.foreign.state(state)
    for half, dim in ((technique.store.keys, state.key_dim), (technique.store.values, state.value_dim)):
        if half.codec is not None and dim:
            half.codec.check(state.kv_heads, dim)
    return Compressed(
        state.kv_heads, state.key_dim, state.value_dim, state.prefix, technique.store, technique.keep, place,
        technique.paging, first and technique.paging is not None,
    )  # fmt: skip
