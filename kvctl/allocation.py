"""What an engine is told at its start, and what it then reserves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvctl.record import Record

if TYPE_CHECKING:
    from fractions import Fraction

MOST_SLOTS = 256
"""Sequences in one context of llama.cpp: LLAMA_MAX_SEQ in src/llama-cparams.h."""


class Serving(Record):
    """How an engine is started; None stands for its default."""

    device: str = "gpu"
    """gpu or cpu."""
    gpu: str | None = None
    """What an engine finds the GPU to be: its CUDA capability, or AMD's name of its architecture; None where none is known."""
    kv_budget: int | None = None
    """Bytes for the cache on each rank."""
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    """Stages that the layers are divided over."""
    expert_parallel: bool = False
    """Whether experts lie whole on the ranks, each on one."""
    data_parallel: int | None = None
    decode_context_parallel: int | None = None
    prefill_context_parallel: int | None = None
    stage_layers: tuple[int, ...] | None = None
    """Layers of every pipeline stage, where they are not divided evenly."""
    num_blocks: int | None = None
    """Blocks of the pool, whatever the budget."""
    speculative: Mapping[str, Any] | None = None
    """--speculative-config."""
    draft: Any = None
    """The ModelSpec of the draft model that it names."""
    fit_length: bool = False
    """Whether the engine lowers the maximum length until a request fits."""
    max_sequences: int | None = None
    """Requests in a batch at most."""
    utilization: float | None = None
    """Share of a GPU's memory that the engine may take."""
    offload: int | None = None
    """Bytes of host memory for blocks that leave the GPU, over all ranks."""
    async_scheduling: bool | None = None
    mamba_cache_mode: str | None = None
    gdn_prefill_backend: str | None = None
    block_size: int | None = None
    max_batched: int | None = None
    chunked_prefill: bool | None = None
    """Whether a prompt may be computed in parts."""
    enforce_eager: bool = False
    """Whether no CUDA graphs are captured."""
    capture_sizes: tuple[int, ...] | None = None
    """Batch sizes that CUDA graphs are captured for."""
    prefix_caching: bool | None = None
    hybrid_disabled: bool | None = None
    """Whether windows are stored in full; None leaves it to the engine."""
    kv_transfer: Mapping[str, Any] | None = None
    """--kv-transfer-config: what moves the cache elsewhere."""
    offload_backend: str | None = None
    lmcache_size: int | None = None
    """Bytes of LMCache's host memory on each rank."""
    lmcache_chunk: int | None = None
    """Tokens of a chunk of LMCache."""
    prompt_cache: int | None = None
    """MiB of host memory for earlier prompts; -1 without a limit."""
    slots: int | None = None
    unified: bool | None = None
    """Whether all slots share one stream of cells."""
    ubatch: int | None = None
    swa_full: bool = False
    flash_attention: bool | None = None
    attention_dp: bool = False
    """Whether ranks attend for requests of their own: every rank (TensorRT-LLM), or data_parallel groups of them (SGLang)."""
    max_tokens: int | None = None
    """Most tokens of the cache, beside the budget."""
    attention_windows: tuple[int, ...] | None = None
    """TensorRT-LLM's max_attention_window: tokens that layers keep, repeated over them."""
    second_manager: bool | None = None
    """TensorRT-LLM's use_kv_cache_manager_v2."""
    encoder: int = 0
    """Encoder positions of a request, for cross attention that is reserved ahead."""
    cache_implementation: str | None = None
    """Which of transformers' caches: dynamic, static, offloaded, offloaded_static, quantized or paged."""
    cache_backend: str | None = None
    """What quantises it: quanto, hqq or fp8."""
    nbits: int | None = None
    q_group_size: int | None = None
    residual_length: int | None = None
    """Tokens that stay in the model's dtype before they are quantised together."""
    axis_key: int | None = None
    axis_value: int | None = None
    generated: int | None = None
    """Tokens of the context that were generated one by one; the others were the prompt."""
    max_blocks_per_request: int | None = None
    """Width of the block table of the fast decode path; 0 turns that off."""
    async_batching: bool | None = None
    batch: int | None = None
    """Tokens of a logical batch; `ubatch` are those of a physical one."""
    gpu_layers: int | None = None
    """Layers that are offloaded to GPUs; None is all."""
    tensor_split: tuple[float, ...] | None = None
    """Shares of the layers by device."""
    fit_margin: int | None = None
    """MiB that stay free on each device."""
    cpu_offload: int | None = None
    """Bytes of each rank's weights that stay in host memory."""
    kv_on_host: bool = False
    """Whether the cache stays in the host's memory."""
    slot_limit: int | None = None
    """Tokens that one slot takes at most, however many cells are free."""
    speculative_algorithm: str | None = None
    draft_path: str | None = None
    """The model that drafts, as SGLang names it."""
    draft_layers: int | None = None
    """Layers of a draft model (EAGLE, MTP) that keep a cache beside the model's."""
    draft_tokens: int | None = None
    """Tokens that speculative decoding verifies in one step."""
    draft_key: str | None = None
    """What the keys of a draft's cache are stored in, in the engine's word."""
    draft_value: str | None = None
    swa_ratio: float | None = None
    """Tokens of a windowed layer for each token of a full one."""
    mamba_ratio: float | None = None
    """Memory of recurrent states for each byte of the cache that grows."""
    mamba_slots: int | None = None
    mamba_strategy: str | None = None
    """How recurrent states are kept for prefix caching."""
    state_dtype: str | None = None
    """Dtype of recurrent states."""
    conv_dtype: str | None = None
    """Dtype of convolution states, and of recurrent ones that nothing else names."""
    attention_backend: str | None = None
    sparse_backend: str | None = None
    """Kernels of sparse latent attention."""
    host_ratio: float | None = None
    """Tokens of the cache in host memory for each one on the device."""
    host_gb: float | None = None
    """Size of the cache in host memory, in units of 10^9 bytes."""


class Part(Record):
    """A part of a rank's memory beside weights and cache."""

    name: str
    """activations, graphs, runtime, …"""
    bytes: int
    estimated: bool
    """Whether a rule of thumb gives it, and not the engine's own arithmetic."""
    rule: str
    """One plain sentence that says how it comes about, with its numbers."""


class Place(Record):
    """What of a model lies on one of several devices, where whole layers are divided over them."""

    weights: int
    share: Fraction
    """Of the cache: the device's part of the layers that have one."""
    layers: int
    head: bool


class Shortage(Record):
    """What runs short where an engine takes a share of the memory: too small and too large a share are opposite mistakes."""

    when: str
    """start: no cache is left beside the weights; run: a step's activations have no room."""
    message: str
    hint: str


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
    held: int | None = None
    """Requests of this length that the budget holds at once, 0 where the engine does not start; None where it
    allocates for the workload, and `reserved_bytes` is what the budget has to cover."""
    whole: int | None = None
    """Of these, those that have all of their blocks at once: an engine's log may divide all blocks, and of these it keeps some back; None
    where `held` says it."""
    beside: tuple[int, ...] = ()
    """Of what every rank reserves, bytes that lie beside the pool and are none of its budget; empty where nothing does."""

    @property
    def blocks_are_alike(self) -> bool:
        """Whether everything reserved is so many blocks of one size."""
        return (
            self.bytes_per_block > 0
            and all(group.block_size for group in self.groups)
            and self.reserved_bytes % self.bytes_per_block == 0
            and (self.max_concurrency is not None or self.kv_budget_bytes is None)
        )

    def to_dict(self) -> dict[str, Any]:
        out = {
            name: getattr(self, name)
            for name in self._fields
            if name not in ("warnings", "longest_sequence", "held", "whole", "beside")
        }
        out["per_rank"] = [row.to_dict() for row in self.per_rank]
        out["groups"] = [row.to_dict() for row in self.groups]
        out["reasons"] = list(self.reasons)
        out["log"] = list(self.log)
        return out
