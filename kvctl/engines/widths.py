"""How wide a model's layers are: what activations and compute buffers are made of."""

from __future__ import annotations

from typing import Any

from kvctl.errors import ConfigError
from kvctl.families import text_fields
from kvctl.families.fields import Fields
from kvctl.kept import kept
from kvctl.record import Record
from kvctl.spec import Attention, ModelSpec

EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
USED = ("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "top_k_experts", "num_experts_per_token", "top_k")
EXPERT_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size")
FEED = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "decoder_ffn_dim", "n_inner", "d_ff", "inner_dim")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
"""What configurations call these."""
UNGATED = frozenset(
    [
        "arcee",
        "biogpt",
        "bloom",
        "codegen",
        "falcon",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "mpt",
        "nemotron",
        "nemotron_h",
        "opt",
        "persimmon",
        "phi",
        "phi-msft",
        "RefinedWeb",
        "RefinedWebModel",
        "starcoder2",
        "whisper",
        "xglm",
    ]
)
"""Model types whose feed-forward parts have no gate: one product in, an activation, one product out."""
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


@kept
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
    experts, feed = first(f, EXPERTS), first(f, FEED)
    expert, used, shared, dense = 0, 0, 0, 0
    if experts > 1:
        expert, used = first(f, EXPERT_WIDTHS) or feed, first(f, USED) or 1
        if used > min(experts, _MOST_USED):
            raise ConfigError(f"{spec.id}: {used:,} of {experts:,} experts for each token cannot be")
        shared = first(f, ("shared_expert_intermediate_size", "shared_intermediate_size")) or expert * first(f, SHARED)
        if not first(f, EXPERT_WIDTHS):
            feed = 0  # every layer is a mixture
        elif feed:
            dense = first(f, ("first_k_dense_replace",))
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
        spec.hidden_size or first(f, ("n_embd", "d_model")),
        spec.vocab_size or first(f, ("padded_vocab_size",)),
        spec.attention_heads or first(f, ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads")),
    )


def first(f: Fields, names: tuple[str, ...]) -> int:
    """The first of these that is a number, or 0; where layers differ, the widest."""
    return next((value for value in (whole(f.get(name)) for name in names) if value), 0)


def whole(value: Any) -> int:
    """A whole number within reason, or the largest of a list; 0 for anything else."""
    if isinstance(value, (list, tuple)):
        return max((whole(entry) for entry in value[:10_000] if not isinstance(entry, (list, tuple))), default=0)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else 0
