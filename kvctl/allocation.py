"""What an engine is told at its start, and what it then reserves."""

from __future__ import annotations

from typing import Any

from kvctl.record import Record


class Serving(Record):
    """How an engine is started; None stands for its default."""

    device: str = "gpu"
    """gpu or cpu."""
    kv_budget: int | None = None
    """Bytes for the cache on each rank."""
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    expert_parallel: bool = False
    """Whether experts lie whole on the ranks, each on one."""
    block_size: int | None = None
    max_batched: int | None = None
    prefix_caching: bool | None = None
    hybrid_disabled: bool = False
    slots: int | None = None
    unified: bool | None = None
    """Whether all slots share one stream of cells."""
    ubatch: int | None = None
    swa_full: bool = False
    flash_attention: bool | None = None


class _Row(Record):
    """A record whose JSON is its fields."""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}


class GroupRow(_Row):
    """Layers of an engine that share a block table."""

    kind: str
    layers: int
    block_size: int
    """Tokens in a block."""
    page_bytes: int
    """Bytes of a block over the group's layers."""
    blocks_per_request: int


class RankRow(_Row):
    """One rank of a tensor-parallel engine."""

    rank: int
    bytes_per_block: int
    reserved_bytes: int


class Allocation(Record):
    """What an engine reserves; bytes are those of one rank, numbers of a pool need a budget."""

    device: str
    tensor_parallel_size: int
    block_size: int
    bytes_per_block: int
    blocks_per_request: int
    reserved_bytes: int
    kv_budget_bytes: int | None
    num_blocks: int | None
    capacity_tokens: int | None
    reported_capacity: int | None
    max_concurrency: float | None
    per_rank: tuple[RankRow, ...]
    groups: tuple[GroupRow, ...]
    log: tuple[str, ...]
    """Lines that its start-up log will print."""
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    longest_sequence: int
    """Tokens that one sequence may have: all of the context, or a slot's part of it."""

    @property
    def blocks_are_alike(self) -> bool:
        """Whether everything reserved is so many blocks of one size."""
        return (
            self.bytes_per_block > 0
            and self.reserved_bytes % self.bytes_per_block == 0
            and (self.max_concurrency is not None or self.kv_budget_bytes is None)
        )

    def to_dict(self) -> dict[str, Any]:
        out = {name: getattr(self, name) for name in self._fields if name not in ("warnings", "longest_sequence")}
        out["per_rank"] = [row.to_dict() for row in self.per_rank]
        out["groups"] = [row.to_dict() for row in self.groups]
        out["reasons"] = list(self.reasons)
        out["log"] = list(self.log)
        return out
