"""What a replay found, in integers; ratios are derived and say what of."""

from __future__ import annotations

from typing import Any

from kvctl.record import Record
from kvctl.replay.setup import Setup
from kvctl.replay.simulator import Simulator


class PolicyReport(Record):
    """One allocation policy over one trace.

    A slot is room for the keys and values of one token over all layers. Means are over the iterations from the first
    arrival to the last end, rounded down; `*_area` are the exact sums in slots × iterations. What requests hold is

        allocated = stored + reservation + internal fragmentation + copies

    at every moment (Kwon et al. 2023, "Efficient Memory Management for LLM Serving with PagedAttention", section 3.1
    and figure 2), and allocated + cached + free is the capacity. A preempted request's blocks count as long as it
    held them.
    """

    policy: str
    requests: int
    finished: int
    rejected: int
    """Longer than `max_length`, more sequences than `max_sequences`, or more memory than the pool has."""
    iterations: int
    makespan_us: int
    peak_held_blocks: int
    """Blocks that running requests hold, shared ones once; slots rounded up to blocks under "contiguous"."""
    mean_held_blocks: int
    peak_held_bytes: int
    mean_held_bytes: int
    peak_slots: int
    stored_at_peak: int
    """Tokens stored in the iteration in which most is held; of several, the one with most tokens stored."""
    peak_stored_tokens: int
    """Token states in held memory, each once. A prompt counts from its admission on, while it is being computed."""
    mean_stored_tokens: int
    slot_area: int
    """Allocated slots."""
    stored_area: int
    reserved_area: int
    """Reservation: empty slots that the same request fills later."""
    internal_area: int
    """Internal fragmentation: slots that the request which holds them never fills."""
    copied_area: int
    """Slots with tokens that lie elsewhere too: prompts of parallel sequences ("contiguous"), the last prompt block
    copied on write (paged), a whole cached block computed once more ("prefix")."""
    external_area: int
    """External fragmentation: free slots while the head of the queue waits although they would do, in one piece. Not
    part of what is allocated; none under paged policies, by construction."""
    mean_saved_blocks: int
    """Blocks fewer than if every sequence had all of its blocks to itself."""
    peak_saved_blocks: int
    queried_tokens: int
    """Prompt tokens of admitted requests, once each."""
    hit_tokens: int
    """Of these, found in the cache."""
    peak_cached_blocks: int
    """Blocks that nobody holds and that can be found, at the most."""
    evicted_blocks: int
    preemptions: int
    recomputed_tokens: int
    """Tokens computed again after preemptions, generated ones included, cached ones not."""
    peak_running: int
    running_area: int
    """Running requests × iterations."""
    peak_queue: int
    waiting_area: int
    """Waiting requests × iterations."""

    @property
    def utilization(self) -> float:
        """Stored tokens of allocated slots, over time."""
        return _share(self.stored_area, self.slot_area)

    @property
    def utilization_at_peak(self) -> float:
        return _share(self.stored_at_peak, self.peak_slots)

    @property
    def hit_rate(self) -> float:
        return _share(self.hit_tokens, self.queried_tokens)

    @property
    def reservation(self) -> float:
        return _share(self.reserved_area, self.slot_area)

    @property
    def internal_fragmentation(self) -> float:
        return _share(self.internal_area, self.slot_area)

    @property
    def copies(self) -> float:
        return _share(self.copied_area, self.slot_area)

    @property
    def external_fragmentation(self) -> float:
        """Of allocated slots and these together."""
        return _share(self.external_area, self.slot_area + self.external_area)

    @property
    def mean_running(self) -> float:
        return _share(self.running_area, self.iterations)

    @property
    def mean_queue(self) -> float:
        return _share(self.waiting_area, self.iterations)

    def to_dict(self) -> dict[str, Any]:
        derived = (
            "utilization", "utilization_at_peak", "reservation", "internal_fragmentation", "copies",
            "external_fragmentation", "hit_rate", "mean_running", "mean_queue",
        )  # fmt: skip
        return {name: getattr(self, name) for name in (*self._fields, *derived)}


class Replay(Record):
    """All policies over one trace."""

    setup: Setup
    requests: int
    policies: tuple[PolicyReport, ...]
    assumed: tuple[str, ...]
    """Names of the setup's values that were left at what kvctl assumes."""
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "setup": {name: getattr(self.setup, name) for name in self.setup._fields},
            "requests": self.requests,
            "policies": [policy.to_dict() for policy in self.policies],
            "assumed": list(self.assumed),
            "notes": list(self.notes),
        }


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def report(run: Simulator) -> PolicyReport:
    """The counts of a simulator whose requests are all done."""
    setup, areas, time = run.setup, run.areas, max(run.end, 1)
    block = setup.block_size
    slot = 1 if run.name == "contiguous" else block
    shared = areas.shared * block
    slots = areas.slots + shared
    peak_held, stored_at_peak = run.peak
    peak_slots = peak_held * slot
    return PolicyReport(
        policy=run.name,
        requests=run.requests,
        finished=run.finished,
        rejected=run.rejected,
        iterations=run.end,
        makespan_us=run.end * setup.tpot,
        peak_held_blocks=-(-peak_slots // block),
        mean_held_blocks=slots // (time * block),
        peak_held_bytes=-(-peak_slots * setup.bytes_per_block // block),
        mean_held_bytes=slots * setup.bytes_per_block // (time * block),
        peak_slots=peak_slots,
        stored_at_peak=stored_at_peak,
        peak_stored_tokens=run.peak_stored,
        mean_stored_tokens=(areas.stored + shared) // time,
        slot_area=slots,
        stored_area=areas.stored + shared,
        reserved_area=areas.reserved,
        internal_area=areas.internal,
        copied_area=areas.duplicates,
        external_area=areas.external,
        mean_saved_blocks=areas.saved // time,
        peak_saved_blocks=run.peak_saved,
        queried_tokens=run.queried,
        hit_tokens=run.hits,
        peak_cached_blocks=run.peak_cached,
        evicted_blocks=run.evicted,
        preemptions=run.preemptions,
        recomputed_tokens=run.recomputed,
        peak_running=run.peak_running,
        running_area=areas.running,
        peak_queue=run.peak_queue,
        waiting_area=areas.waiting,
    )
