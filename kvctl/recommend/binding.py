"""What of an answer runs out first as its load grows, and what to change then."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvctl.recommend.takes import caches
from kvctl.units import format_bytes, plural

if TYPE_CHECKING:
    from kvctl.recommend.candidate import Candidate
    from kvctl.recommend.judge import Judged
    from kvctl.recommend.request import Ask

FULL = 0.85
"""Share of the pool from which on the cache is what binds first."""


def binding(one: Judged, ask: Ask) -> tuple[str, str]:
    """What runs out first as the load grows, and what to change then."""
    candidate = one.candidate
    stack, count = candidate.stack, candidate.asked or candidate.usual_at_once
    # Where an engine allocates for the workload, what is free could be cache, too.
    room = stack.pool + (max(stack.headroom, 0) if candidate.capacity is None else 0)
    used = stack.kv / room if room else 1.0
    if ask.rate is not None and one.speed is not None:
        # As many are in service as come and stay, not as many as would have room.
        count = math.ceil(one.speed.concurrency)
        used *= one.speed.concurrency / max(candidate.usual_at_once, 1)
    if candidate.queues or used >= FULL:
        words = f"the cache: {format_bytes(round(used * room))} of {format_bytes(room)} are promised to {plural(count, 'request')}"
        return words, _more_cache(candidate, ask)
    if one.speed is None:
        return "not known: its speed is not", "--verify measures it"
    bound = "host" if candidate.offloaded else one.speed.decode_bound
    spare = f"; the cache would hold {1 / used:.1f} times as much" if used > 0 else ""
    more = {
        "weights": (
            "reading weights in every step",
            "more requests at once share them; fewer bits, or more tensor-parallel ranks",
        ),
        "cache": ("reading the cache in every step", "a cache in fewer bits, or shorter requests"),
        "compute": ("arithmetic in every step", "more GPUs, or weights in a format that tensor cores multiply faster"),
        "communication": ("exchange between GPUs", "fewer tensor-parallel ranks and more replicas"),
        "host": (
            f"fetching {format_bytes(candidate.offloaded)} of weights from host memory in every step",
            "fewer bits, or more GPUs, that hold all of the weights; more requests at once share what is fetched",
        ),
        "overhead": ("launches and scheduling", "more requests at once; they cost little more"),
    }
    words, change = more[bound]
    if not candidate.deployment.gpus:
        change = _ON_HOST.get(bound, change)
    return words + spare, change


_ON_HOST = {"weights": "more requests at once share them; fewer bits", "compute": "more cores, or shorter requests"}
"""What to change where there are no GPUs to add."""


_SIXTEEN = ("auto", "bfloat16", "f16")
_EIGHT = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "q8_0"})


def _more_cache(candidate: Candidate, ask: Ask) -> str:
    """What gives more cache: half the bits, where the engine has such a format there."""
    deployment = candidate.deployment
    if deployment.kv_dtype in _SIXTEEN and _EIGHT & set(caches(deployment.engine, deployment.device, ask.spec)):
        return "a cache in 8 bits holds about twice as much"
    return f"more {'GPUs' if deployment.gpus else 'memory'}, or shorter requests"
