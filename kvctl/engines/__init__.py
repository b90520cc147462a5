"""Engines: how an implementation stores what the architecture needs.

Adding one: a module here with an `Engine`, and a row in `ENGINES`. First is the default.
"""

from __future__ import annotations

from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.spec import Retention


class Engine(Record):
    """Rules that turn layer states into allocated bytes."""

    name: str
    version: str | None
    retention: Retention
    beams_share_cross: bool
    """Whether all beams of a sequence read one copy of the encoder's keys and values."""
    quantizes: bool
    """Whether keys and values may be kept in another format than the model's dtype."""
    summary: str


IDEAL = Engine(
    name="ideal",
    version=None,
    retention=Retention(window_slack=0, conv_slack=1),
    beams_share_cross=True,
    quantizes=True,
    summary="what the architecture needs, without any engine's rounding",
)

# Source: transformers 5.24 cache_utils.py. DynamicSlidingWindowLayer keeps window - 1
# positions; LinearAttentionLayer keeps as many columns as the kernel has; generate()
# expands the encoder's output once a beam before the first cross attention.
TRANSFORMERS = Engine(
    name="transformers",
    version="5.24",
    retention=Retention(window_slack=1, conv_slack=0),
    beams_share_cross=False,
    quantizes=False,
    summary="bytes of every tensor in transformers' DynamicCache",
)

ENGINES: tuple[Engine, ...] = (IDEAL, TRANSFORMERS)


def engine(name: str) -> Engine:
    """Look an engine up by name; unknown names list what there is."""
    for candidate in ENGINES:
        if candidate.name == name.lower():
            return candidate
    raise UsageError(f"--engine: unknown engine {name!r}", hint="one of " + ", ".join(e.name for e in ENGINES))
