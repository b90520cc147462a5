"""What one token costs a model: parameters that it goes through, pairs that attention compares, rows of the cache that it reads.

Parameters are counted from the configuration (kvctl.parameters). Where that does not know the architecture, experts follow
from their sizes in the configuration and the rest from the published number of parameters; `estimated` says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from kvctl.errors import ConfigError, KvctlError
from kvctl.families import text_fields
from kvctl.families.fields import Fields
from kvctl.kept import kept
from kvctl.record import Record
from kvctl.spec import (
    Attention,
    ConvState,
    CrossAttention,
    Formats,
    Indexer,
    LatentAttention,
    ModelSpec,
    RecurrentState,
    Retention,
    Workload,
)
from kvctl.tensors import of_vision

_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts", "ffn_config.moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "experts_per_token")
_WIDTH = ("moe_intermediate_size", "expert_intermediate_size", "moe_ffn_hidden_size", "intermediate_size")
_ACTIVE = re.compile(r"-A\d+(\.\d+)?[BM]\b", re.I)
"""What names of mixtures of experts have: 30B-A3B."""
_LEAST, _MOST = 0.4, 1.5
"""Of the published parameters, that a configuration may have: vision towers are in one and not in the other."""
_KEEP = Retention(window_slack=0, conv_slack=1)


class Attends(Record):
    """Layers that attend alike."""

    layers: int
    pair: int
    """Multiplications and additions of one query token with one key, over all query heads, when prompts are computed."""
    step: int
    """The same when one token is decoded: latent attention then multiplies with the latent itself."""
    row: int
    """Bytes of one position in the cache of one layer."""
    heads: int
    """KV heads that ranks can divide among themselves; 1 where there is one row for all."""
    limit: int | None
    """Positions that a token looks back at, at most."""
    looked: int | None = None
    """Positions that a decoded token reads of those, where an indexer chooses them."""

    def seen(self, length: int) -> int:
        """Positions that a token at `length` reads."""
        return min(value for value in (length, self.limit, self.looked) if value is not None)


class Work(Record):
    """One model's."""

    layers: int
    hidden: int
    dense: int
    """Parameters of layers that every token goes through."""
    expert: int
    """Parameters of one routed expert, in all layers together."""
    experts: int
    """Routed experts in a layer; 0 without any."""
    chosen: int
    """How many of them a token goes through."""
    expert_layers: int
    head: int
    """Parameters of the output's projection."""
    attends: tuple[Attends, ...]
    state: int
    """Bytes of recurrent states of one sequence, in all layers."""
    estimated: bool = False
    """Whether parameters come from the published total, not from the architecture."""

    @property
    def active(self) -> int:
        """Parameters that a token goes through, without the output's projection."""
        return self.dense + self.chosen * self.expert

    @property
    def stored(self) -> int:
        """Parameters of all layers and of the output's projection."""
        return self.dense + self.experts * self.expert + self.head

    def touched(self, tokens: float) -> float:
        """Routed experts of a layer that at least one of so many tokens goes through, if they choose evenly."""
        if not self.experts:
            return 0.0
        return self.experts * (1.0 - math.pow(1.0 - self.chosen / self.experts, tokens))


@kept
def work_of(spec: ModelSpec, fmt: Formats) -> Work:
    """Counted from a model, its cache in `fmt`.

    Raises:
        ConfigError: neither its parameters nor their number are known, or which of them a token goes through is not.

    """
    f = text_fields(Fields(spec.config))
    layers = len(spec.layers)
    experts, chosen = _experts(spec, f)
    counted = _counted(spec, f, experts)
    estimated = counted is None
    hidden = spec.hidden_size or f.number("hidden_size", minimum=1)
    dense, routed, head, expert_layers = counted if counted is not None else _from_total(spec, f, hidden, experts)
    return Work(
        layers=layers,
        hidden=hidden,
        dense=dense,
        expert=routed // experts if experts else 0,
        experts=experts,
        chosen=chosen,
        expert_layers=expert_layers,
        head=head,
        attends=_attends(spec, f, fmt),
        state=_state(spec, fmt),
        estimated=estimated,
    )


def _experts(spec: ModelSpec, f: Fields) -> tuple[int, int]:
    """Routed experts of a layer, and how many of them a token goes through; none of a dense model.

    A source that leaves fields out may be about another size than the class's defaults: those count only where it is whole.
    """
    experts, chosen = _first(f, _EXPERTS, whole=spec.whole) or 0, _first(f, _CHOSEN, whole=spec.whole) or 0
    if experts and chosen:
        return experts, chosen
    said = [f.raw[name] for name in _EXPERTS if name in f.raw]
    if any(said) or (not said and (_first(f, _EXPERTS) or "moe" in spec.model_type.lower() or _ACTIVE.search(spec.id))):
        raise ConfigError(f"{spec.id}: how many experts a token goes through is not in the source of its configuration",
                          hint="its own config.json says it")  # fmt: skip
    return 0, 0


def _first(f: Fields, names: tuple[str, ...], *, whole: bool = True) -> int | None:
    """The first of the fields that is a number: of what the source says, then of the class's defaults if `whole`."""
    for value in (*(f.raw.get(name) for name in names), *(f.get(name) for name in names if whole or "." in name)):
        if isinstance(value, list) and value and all(isinstance(entry, int) for entry in value):
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _counted(spec: ModelSpec, f: Fields, experts: int) -> tuple[int, int, int, int] | None:
    """Dense parameters, those of routed experts, of the head, and layers with experts, from the architecture."""
    from kvctl.parameters import parameters

    for config in (spec.config, f.raw):
        try:
            tensors = parameters(config, whole=spec.whole)
        except KvctlError:
            continue
        break
    else:
        return None
    dense = routed = head = embedding = 0
    with_experts: set[int] = set()
    for t in tensors:
        count, path = t.elements * t.count, t.name.split(".")
        if of_vision(t):
            continue
        if "experts" in path or (
            experts and len(t.shape) == 3 and t.shape[0] == experts
        ):  # Granite's have no such name
            routed += count
            with_experts.update(t.layers)
        elif "lm_head" in path or "embed_out" in path:
            head += count
        elif not t.layers and len(t.shape) == 2:
            embedding = max(embedding, count)
        elif t.layers:
            dense += count
    published = spec.weights.parameters if spec.weights is not None else None
    share = (dense + routed + head + embedding) / published if published else 1.0
    if not _LEAST <= share <= _MOST and "quantization_config" not in spec.config:
        raise ConfigError(f"{spec.id}: its configuration has {share:.2g} times the parameters that are published",
                          hint="its own config.json says it")  # fmt: skip
    return dense, routed, head or embedding, len(with_experts)


def _from_total(spec: ModelSpec, f: Fields, hidden: int, experts: int) -> tuple[int, int, int, int]:
    """The same from the published number of parameters."""
    total = spec.weights.parameters if spec.weights is not None else None
    if total is None:
        raise ConfigError(f"{spec.id}: its number of parameters is not known",
                          hint="a folder or a repository with the weights says it")  # fmt: skip
    words = spec.vocab_size or _first(f, ("vocab_size", "padded_vocab_size")) or 0
    head = words * hidden
    tied = f.get("tie_word_embeddings")
    rest = total - head * (1 if tied is True or (tied is None and spec.config.get("tie_word_embeddings")) else 2)
    if not experts:
        return max(rest, 0), 0, head, 0
    width, layers = _first(f, _WIDTH) or 0, len(spec.layers)
    first, every = (
        _first(f, ("first_k_dense_replace",)) or 0,
        _first(f, ("interleave_moe_layer_step", "moe_layer_freq")) or 1,
    )
    listed = f.get("moe_layers")
    with_experts = len(listed) if isinstance(listed, list) else (layers - first) // every
    one = 3 * hidden * width * experts
    with_experts = min(with_experts, max(rest, 0) // one) if one else 0  # a file may leave out which layers have them
    routed = one * with_experts
    return max(rest, 0) - routed, routed, head, with_experts


def _attends(spec: ModelSpec, f: Fields, fmt: Formats) -> tuple[Attends, ...]:
    """Groups of layers by how they attend."""
    heads = spec.attention_heads or 1
    found: dict[tuple[Any, ...], int] = {}
    for layer, count in spec.groups:
        topk = _first(f, ("index_topk",)) if any(isinstance(state, Indexer) for state in layer.states) else None
        for state in layer.states:
            if isinstance(state, CrossAttention):
                continue  # its positions are those of an encoder
            if isinstance(state, Attention):
                far = state.tokens(Workload(1 << 40), _KEEP)
                pair = 2 * heads * (state.key_dim + state.value_dim)
                key: tuple[Any, ...] = (
                    pair,
                    pair,
                    state.row(fmt),
                    state.kv_heads,
                    far if far < 1 << 40 else None,
                    None,
                )
            elif isinstance(state, LatentAttention):
                nope, value = _first(f, ("qk_nope_head_dim",)) or 128, _first(f, ("v_head_dim",)) or 128
                pair = 2 * heads * (nope + state.rope + value)
                step = 2 * heads * (2 * state.latent + state.rope)
                key = (pair, step, state.row(fmt), 1, state.window, topk)
            else:
                continue
            found[key] = found.get(key, 0) + count
    return tuple(Attends(count, *key) for key, count in found.items())


def _state(spec: ModelSpec, fmt: Formats) -> int:
    kinds = (ConvState, RecurrentState)
    return sum(
        count * state.size(Workload(1), fmt, _KEEP)
        for layer, count in spec.groups for state in layer.states if isinstance(state, kinds)
    )  # fmt: skip


def text_config(spec: ModelSpec) -> Mapping[str, Any]:
    """The configuration of the language model."""
    return text_fields(Fields(spec.config)).raw
