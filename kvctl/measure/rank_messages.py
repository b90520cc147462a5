"""What `kvctl.measure.ranks` and its ranks say to one another."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.measure.report import Point
    from kvctl.measure.run import ProfilePlan

FRAME = struct.Struct(">I")
"""Before every pickled message: its length in bytes."""


class Told(Record):
    """What a rank has to know."""

    plan: ProfilePlan
    rank: int
    local_rank: int
    nproc: int
    """Ranks on this node."""
    nnodes: int
    store: str
    """A path for a store in a file, or "host:port" of the first node."""
    meeting_s: float
    """How long to wait for all ranks to come."""

    @property
    def world(self) -> int:
        """Ranks on all nodes."""
        return self.nproc * self.nnodes


class Loaded(Record):
    """The model is there; `rows` has a row of facts for every rank."""

    settings: dict[str, Any]
    notes: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]


class Doing(Record):
    """What `Now` shows."""

    doing: str
    step: int
    steps: int


class Measured(Record):
    """A point, with the cache of every rank and the times of the first."""

    point: Point
    peaks: tuple[int | None, ...]
    """The most memory that each rank took."""


class Failed(Record):
    """Why a rank gave up."""

    rank: int
    kind: str
    """Name of a class in kvctl.errors."""
    message: str
    hint: str | None
    follows: bool
    """Whether it looks like a consequence of another rank's end."""


class Done(Record):
    """All is measured."""

    notes: tuple[str, ...] = ()
