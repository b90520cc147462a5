"""A way to serve a model that fits: what it holds, and where its memory goes; and reasons why others do not."""

from __future__ import annotations

from kvctl.allocation import Part
from kvctl.recommend.checkpoints import Checkpoint
from kvctl.recommend.deployment import Deployment
from kvctl.recommend.space import Split
from kvctl.record import Record


class Stack(Record):
    """Where the memory of the fullest GPU goes, in bytes."""

    device: int
    """What applications see."""
    weights: int
    parts: tuple[Part, ...]
    """What the engine takes beside weights and cache."""
    kv: int
    """Of the requests at once that are promised, at their longest."""
    pool: int
    """That the engine reserves for them."""

    @property
    def headroom(self) -> int:
        """What nothing is promised of."""
        return self.device - self.weights - sum(part.bytes for part in self.parts) - self.pool


class Candidate(Record):
    """A deployment that starts and holds at least one request."""

    deployment: Deployment
    checkpoint: Checkpoint
    split: Split
    stack: Stack
    capacity: int | None
    """Tokens of all replicas' pools; None where an engine allocates for the workload."""
    at_once: int
    """Requests of the longest length that all replicas hold at once, of those that are let in."""
    usual_at_once: int
    """And of the usual length."""
    asked: int | None
    """Requests at once that were asked for; None for a rate."""
    offloaded: int
    """Bytes of each server's weights that stay in host memory."""
    native: bool
    """Whether tensor cores compute in the weights' format."""
    notes: tuple[str, ...] = ()

    @property
    def queues(self) -> bool:
        """Whether some of the usual requests wait for others to end."""
        return self.asked is not None and self.usual_at_once < self.asked


class Rejection(Record):
    """A reason, what it stands in the way of, and how often."""

    kind: str
    """engine (it does not run here, or reads nothing that is to be had), format, refused (it does not take the split), unknown
    (facts that its plan rests on), weights or cache."""
    engine: str
    weights: str
    kv_dtype: str
    gpus: int
    """Of one server."""
    why: str
    count: int = 1


class Found(Record):
    """What a search found, in the order of the space."""

    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    """One for each engine, format of weights and kind of reason: the one on most GPUs, with how many it stands for."""
    tried: int

    @property
    def holding(self) -> tuple[Candidate, ...]:
        """Candidates with which no request waits."""
        return tuple(one for one in self.candidates if not one.queues)
