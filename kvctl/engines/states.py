"""What engines that plan ahead make of a layer's states alike."""

from __future__ import annotations

from kvctl.errors import ConfigError
from kvctl.spec import Attention, ChunkedAttention, FullAttention, LayerState, ModelSpec, SlidingWindow


def plain_attention(state: LayerState) -> Attention | None:
    """Keys and values of the sequence itself, of all of it or of its newest part; None for any other state."""
    if type(state) not in (FullAttention, SlidingWindow, ChunkedAttention):
        return None
    assert isinstance(state, Attention)
    odd = not state.value_dim or (isinstance(state, FullAttention) and state.prefix)
    return None if odd else state


def not_known(spec: ModelSpec, state: LayerState, engine: str) -> ConfigError:
    """The error for a state whose storage in an engine was not read."""
    return ConfigError(
        f"{spec.id}: kvctl does not know how {engine} stores {state.kind.replace('_', ' ')} yet",
        hint="--engine ideal says what the architecture needs",
    )
