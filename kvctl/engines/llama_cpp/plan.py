"""llama.cpp's caches: cells, streams, and the sizes that its load log prints.

Sources: llama.cpp b11434 src/llama-kv-cache*.cpp, llama-memory-recurrent.cpp, llama-context.cpp,
src/llama-model.cpp (which architectures keep windows apart); checked against its own log.

The context (-c) is the total over all slots. Cells come in multiples of 256; a unified cache is
one stream that all slots share, otherwise every slot has a stream of its own.
"""

from __future__ import annotations

from kvctl.allocation import Allocation, GroupRow, RankRow, Serving
from kvctl.engines.llama_cpp import log
from kvctl.engines.llama_cpp.builds import Rules, rules, unsure
from kvctl.engines.llama_cpp.drafts import drafted
from kvctl.engines.llama_cpp.storage import Cache, Storage, latents, storage, uneven, windowed
from kvctl.errors import ConfigError, UsageError
from kvctl.formats import CacheFormat, cache_format
from kvctl.record import Record
from kvctl.search import last
from kvctl.spec import Formats, ModelSpec
from kvctl.units import plural

KV_TYPES = {
    "f32": "fp32", "f16": "fp16", "bf16": "bf16", "q8_0": "q8_0", "q4_0": "q4_0", "q4_1": "q4_1", "iq4_nl": "iq4_nl",
    "q5_0": "q5_0", "q5_1": "q5_1",
}  # fmt: skip
"""What --cache-type-k and --cache-type-v take."""


def kv_dtype(name: str, option: str, version: str | None = None) -> CacheFormat:
    """The cache format that llama.cpp's `name` means; unknown ones list what there is."""
    ours = KV_TYPES.get(name.lower())
    if ours is None:
        raise UsageError(f"{option}: {name[:40]!r} is no cache type of llama.cpp", hint="one of " + ", ".join(KV_TYPES))
    return cache_format(ours).replace(name=name.lower())


def check_version(version: str) -> None:
    """Refuse a build whose rules are not known."""
    rules(version)


class Laid(Record):
    """A context laid out in cells."""

    rules: Rules
    flash: bool
    pad: int
    context: int
    cells: int
    """Of one stream."""
    hybrid_cells: int
    """Of one stream of attention beside recurrent states."""
    streams: int
    slots: int
    unified: bool


def _pad(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def layout(by: Rules, spec: ModelSpec, context: int, serving: Serving) -> Laid:
    # Without -np the server takes its default number of slots on one unified cache, whatever else it is told.
    slots = serving.slots or by.slots
    unified = serving.slots is None or not by.streams or bool(serving.unified)
    flash = by.flash_by_default if serving.flash_attention is None else serving.flash_attention
    if spec.model_type == "grok-1" or (by.one_cache and uneven(spec)):
        flash = False  # there is none for these, and it is forced off
    pad = by.pad if flash else by.pad_without_flash
    total = _pad(context, pad)
    if unified or slots == 1:
        return Laid(by, flash, pad, total, total, total, 1, slots, unified)
    each = _pad(total // slots, pad)
    if not each:
        raise UsageError(
            f"--parallel {slots} leaves no token of --ctx for a slot", hint="--kv-unified shares one cache"
        )
    hybrid = {"slot": each, "slots": each * slots, "context": total}[by.hybrid_cells]
    return Laid(by, flash, pad, each * slots, each, hybrid, slots, slots, unified)


def apart(laid: Laid, stored: Storage) -> Laid:
    """A stream of all cells for each slot, where slots cannot share one."""
    return laid.replace(streams=laid.slots, unified=False) if stored.compressors and laid.unified else laid


def plan(
    spec: ModelSpec, context: int, sequences: int, fmt: Formats, serving: Serving, version: str | None
) -> Allocation:
    """What llama.cpp allocates for a context of `context` tokens over all its slots.

    Raises:
        ConfigError: a kind of state, or windows of an architecture, whose storage is not known.
        UsageError: types that llama.cpp refuses.

    """
    if sequences > 1:
        raise UsageError(
            "llama.cpp divides --ctx over its slots", hint="--parallel N instead of --sequences and --beams"
        )
    if context < 1:
        raise UsageError("--ctx 0 is the model's own maximum to llama.cpp", hint="name it, for example --ctx 32k")
    by, warnings = rules(version)
    if unsure(version) and (latents(spec) or windowed(spec)):
        raise ConfigError(
            f"{spec.id}: windows and latents got caches of their own between b4980 and b5552, in steps kvctl does not know",
            hint="llama.cpp@b5552 is the first build that kvctl knows with them",
        )
    laid = layout(by, spec, context, serving)
    stored = storage(spec, fmt, by, flash=laid.flash)
    laid = apart(laid, stored)
    types = (kv_dtype(serving.draft_key or "f16", "--spec-draft-type-k"),
             kv_dtype(serving.draft_value or "f16", "--spec-draft-type-v"))  # fmt: skip
    stored, said = drafted(stored, spec, by, serving, types)
    warnings += said
    groups, lines = [], []
    ahead: list[str] = []
    total = 0
    for cache in stored.caches:
        cells = cells_of(cache, laid, stored, serving)
        total += cells * laid.streams * cache.row
        groups.append(
            GroupRow(cache.kind, cache.layers, laid.pad, laid.pad * cache.row, cells * laid.streams // laid.pad)
        )
        if not by.one_cache:
            line = log.sized(by, cache, cells, laid.streams, laid.slots, fmt)
            if cache.drafts:
                ahead.append(line)
                continue
            lines += log.created(by, stored, cache, max(1, -(-laid.cells // cache.ratio)) if cache.ratio > 1 else cells)
            lines.append(line)
    total += stored.state * laid.slots
    for tail in stored.compressors:
        groups.append(GroupRow("compressor_state", tail.layers, 0, tail.bytes, laid.slots))
        lines.append(log.compressor(tail, laid.slots))
    if state := (stored.shift_bytes + stored.state_bytes) * (1 + stored.snapshots):
        groups.append(GroupRow("recurrent_state", stored.recurrent_layers, 0, state, laid.slots))
        if not by.one_cache:
            lines.append(log.recurrent(by, stored, laid.slots, len(spec.layers)))
    lines += ahead
    if by.one_cache:
        lines.append(log.self_size(by, stored, laid.cells, laid.slots, fmt))
    growing = [cache for cache in stored.caches if not cache.reach]
    # Where entries stand for several tokens, so many cells are no block of equal bytes.
    block = laid.pad * sum(cache.row for cache in growing) if all(cache.ratio == 1 for cache in growing) else 0
    budget = serving.kv_budget
    # Without a cache that grows there is no longest context to find.
    capacity = _largest(spec, laid, serving, budget, stored) if budget is not None and growing else None
    if budget is not None and total > budget:
        warnings += (f"the cache takes {total:,} bytes, more than the budget of {budget:,}",)
    return Allocation(
        device="cpu" if serving.kv_on_host else "gpu",
        tensor_parallel_size=1,
        block_size=laid.pad,
        bytes_per_block=block,
        blocks_per_request=laid.cells // laid.pad,
        reserved_bytes=total,
        kv_budget_bytes=budget,
        num_blocks=capacity // laid.pad if capacity is not None else None,
        capacity_tokens=capacity,
        reported_capacity=capacity,
        max_concurrency=None,
        per_rank=(RankRow(0, block, total),),
        groups=tuple(groups),
        log=tuple(lines),
        reasons=tuple(_reasons(context, laid, stored, serving)),
        warnings=warnings,
        longest_sequence=min(context, laid.cells, serving.slot_limit or context),
    )


def _reasons(context: int, laid: Laid, stored: Storage, serving: Serving) -> list[str]:
    """Why it is more, or elsewhere, than what the architecture needs."""
    reasons = []
    batch, physical = _batch(serving), ubatch_of(serving, laid)
    if serving.ubatch is not None and serving.ubatch > physical:
        reasons.append(f"a physical batch is never more than the logical one of {min(batch, laid.context):,} tokens")
    if serving.slots is None and laid.slots > 1:
        reasons.append(
            f"{laid.slots} slots on one unified cache, as llama-server has it; --parallel sets another number"
        )
    if not laid.unified and laid.slots > 1:
        reasons.append(f"--ctx is that of {laid.slots} slots together: a request has {laid.cells:,} tokens")
    if laid.context != context:
        reasons.append(f"{context:,} tokens become {laid.context:,} cells: every stream has a multiple of {laid.pad}")
    for cache in stored.caches:
        cells = cells_of(cache, laid, stored, serving)
        if cache.reach and cells < laid.cells:
            times = f"{laid.slots} × " if laid.unified and laid.slots > 1 else ""
            reasons.append(
                f"windows hold {times}{cache.reach:,} + {_room(serving, laid):,} tokens of a batch: {cells:,} cells"
            )
    if stored.shift_bytes or stored.state_bytes:
        copies = f"{1 + stored.snapshots} for each" if stored.snapshots else "one for each"
        reasons.append(f"recurrent states are float32, {copies} of {plural(laid.slots, 'slot')}")
    if drafts := sum(cache.layers for cache in stored.caches if cache.drafts):
        reasons.append(f"{plural(drafts, 'draft layer')} with a cache as long as the model's")
    if stored.compressors and laid.slots > 1:
        reasons.append("slots of compressed attention share no cells: each has a cache of its own")
    if stored.full_windows:
        reasons.append("llama.cpp keeps every token of this architecture's windowed layers")
    if serving.kv_on_host:
        reasons.append("without KV offload the cache lies in the host's memory")
    if serving.prompt_cache:
        size = f"up to {serving.prompt_cache:,} MiB" if serving.prompt_cache > 0 else "as much as they need"
        reasons.append(f"earlier prompts take {size} of the host's memory beside it")
    if serving.slot_limit is not None and serving.slot_limit < min(context, laid.cells):
        reasons.append(f"no slot takes more than {serving.slot_limit:,} tokens")
    return reasons


def _batch(serving: Serving) -> int:
    """Tokens of a logical batch."""
    return serving.batch or 2048


def ubatch_of(serving: Serving, laid: Laid) -> int:
    """Tokens of a physical batch: no more than a logical one, or than there are cells."""
    return min(serving.ubatch or 512, _batch(serving), laid.context)


def _room(serving: Serving, laid: Laid) -> int:
    """Tokens of a batch for which windows have room."""
    return min(_batch(serving), laid.context) if laid.rules.whole_batch else ubatch_of(serving, laid)


def cells_of(cache: Cache, laid: Laid, stored: Storage, serving: Serving) -> int:
    """Cells of one stream."""
    if not cache.reach or serving.swa_full:
        cells = laid.hybrid_cells if stored.shift_bytes or stored.state_bytes else laid.cells
        return cells if cache.ratio == 1 else _pad(max(1, -(-cells // cache.ratio)), 256)
    needed = cache.reach * (laid.slots if laid.unified else 1) + _room(serving, laid)
    return min(laid.cells, _pad(needed, laid.pad))


def _largest(spec: ModelSpec, laid: Laid, serving: Serving, budget: int, stored: Storage) -> int:
    """The largest context in the budget, a multiple of its padding for every stream; the model's own maximum at most."""

    def takes(context: int) -> int:
        laid_out = apart(layout(laid.rules, spec, context, serving), stored)
        cells = sum(cells_of(cache, laid_out, stored, serving) * cache.row for cache in stored.caches)
        return cells * laid_out.streams + stored.state * laid_out.slots

    step = laid.pad * laid.streams
    most = (spec.max_context or 2**24) // laid.pad
    return last(lambda steps: takes(steps * step) <= budget, 0, most + 1) * step
