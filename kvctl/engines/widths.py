"""How wide a model's layers are: what activations and compute buffers are made of."""

from __future__ import annotations

from kvctl.errors import ConfigError
from kvctl.families import text_fields
from kvctl.families.fields import Fields
from kvctl.record import Record
from kvctl.spec import Attention, ModelSpec

_MOST_USED = 1024
"""Experts for a token, far above those of published models."""
_FOURFOLD = ("gpt2", "gptj", "bloom", "falcon", "mpt", "RefinedWeb", "RefinedWebModel")
"""Types whose feed-forward part is four times as wide as the model where no width is named."""
MEASURED = "--measured-overhead says what the engine was seen to take beside weights and cache"


class Widths(Record):
    """Elements of one token's row, by where it arises."""

    hidden: int
    vocabulary: int
    queries: int
    """Query heads times their width."""
    keys: int
    """Of the layer that has most."""
    values: int
    feed: int
    """The inner width of a dense feed-forward part; 0 where there is none."""
    expert: int
    """The inner width of one expert; 0 where there are none."""
    used: int
    """Experts that a token is sent to."""
    experts: int
    shared: int
    """The inner width of the experts that every token goes through."""
    heads: int
    dense: int = 0
    """First layers that have no experts."""


def widths(spec: ModelSpec) -> Widths:
    """The widths that a configuration names.

    Raises:
        ConfigError: it does not name those that the answer rests on.

    """
    if not spec.config:
        raise ConfigError(
            f"{spec.id}: the width of its layers is not known, and what activations take depends on it",
            hint=MEASURED,
        )
    f = text_fields(Fields(spec.config))
    hidden, vocabulary, heads = base(spec, f)
    states = [state for layer, _ in spec.groups for state in layer.states if isinstance(state, Attention)]
    if not heads and not states:
        raise ConfigError(f"{spec.id}: what activations of a model without attention take is not known", hint=MEASURED)
    missing = [name for name, value in (("hidden_size", hidden), ("vocab_size", vocabulary),
                                        ("num_attention_heads", heads)) if not value]  # fmt: skip
    if missing:
        raise ConfigError(f"{spec.id}: {' and '.join(missing)}: not in the configuration, and activations depend on it",
                          hint=MEASURED)  # fmt: skip
    widest = max(states, key=lambda state: state.kv_heads * (state.key_dim + state.value_dim), default=None)
    dim = widest.key_dim if widest is not None else max(1, hidden // heads)
    keys = widest.kv_heads * widest.key_dim if widest is not None else hidden
    values = widest.kv_heads * widest.value_dim if widest is not None else hidden
    experts = _first(f, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    feed = _first(
        f, "intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "ffn_hidden_size", "d_ff", "inner_dim"
    )
    expert, used, shared, dense = 0, 0, 0, 0
    if experts > 1:
        expert = _first(f, "moe_intermediate_size", "expert_ffn_hidden_size") or feed
        used = _first(f, "num_experts_per_tok", "moe_topk", "moe_top_k", "num_experts_per_token", "top_k") or 1
        if used > min(experts, _MOST_USED):
            raise ConfigError(f"{spec.id}: {used:,} of {experts:,} experts for each token cannot be")
        shared = _first(f, "shared_expert_intermediate_size", "shared_intermediate_size")
        shared = shared or expert * _first(f, "n_shared_experts", "num_shared_experts")
        if not _first(f, "moe_intermediate_size", "expert_ffn_hidden_size"):
            feed = 0  # every layer is a mixture
        elif feed:
            dense = _first(f, "first_k_dense_replace")
    if not feed and not expert:
        if f.has("n_embd") or f.type in _FOURFOLD:
            feed = 4 * hidden  # what these classes make of a width that is not named
        else:
            raise ConfigError(f"{spec.id}: intermediate_size is not in the configuration, and activations depend on it",
                              hint=MEASURED)  # fmt: skip
    return Widths(hidden, vocabulary, heads * dim, keys, values, feed, expert, used, experts, shared, heads, dense)


def base(spec: ModelSpec, f: Fields) -> tuple[int, int, int]:
    """Width of the model, words of its vocabulary and query heads, under any of their names; 0 where there is none."""
    return (
        spec.hidden_size or _first(f, "n_embd", "d_model"),
        spec.vocab_size or _first(f, "padded_vocab_size"),
        spec.attention_heads or _first(f, "num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"),
    )


def _first(f: Fields, *names: str) -> int:
    """The first of these that is a number, or 0; where layers differ, the widest."""
    for name in names:
        found = f.get(name)
        if isinstance(found, list) and found:
            found = max((n for n in found if isinstance(n, int)), default=None)
        if isinstance(found, int) and not isinstance(found, bool) and 0 < found < 2**40:
            return found
    return 0
