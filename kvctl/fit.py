"""Whether a model and its cache fit on GPUs, and how long a context or how many requests would.

`room_for` lays weights and cache out over the ranks, and `fit` asks that `Room` for one workload.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from kvctl.allocation import Allocation, Part, Serving
from kvctl.errors import ConfigError, UsageError
from kvctl.ranks import Hardware, layout
from kvctl.reports import Fit, RankFit
from kvctl.room import Held, Load, Room
from kvctl.units import format_bytes, plural

if TYPE_CHECKING:
    from kvctl.engines import Engine
    from kvctl.formats import DType
    from kvctl.reports import WeightsInfo
    from kvctl.spec import ModelSpec


def room_for(
    spec: ModelSpec, engine: Engine, serving: Serving, hardware: Hardware, dtype: DType, context: int,
    weights_of: Callable[[Serving], WeightsInfo | None], held: Held,
) -> tuple[WeightsInfo | None, Room]:  # fmt: skip
    """The memory for the cache that the hardware leaves, and the weights as they lie on the ranks.

    `context` is one that is asked about, for trying whether the engine takes a split.

    Raises:
        ConfigError: how much the weights take is not known.
        UsageError: more ranks than devices.

    """

    def works(serving: Serving) -> bool:
        try:
            held(context, 1, serving)
        except UsageError:
            return False
        return True

    laid = layout(engine, serving, hardware, works)
    info = weights_of(laid.serving)
    count = len(laid.devices)
    cut = engine.rows and (laid.serving.tensor_parallel or 1) > 1  # its cache is told by rank
    shares = (Fraction(1, count),) * count if count > 1 and not engine.splits and not cut else ()
    more: tuple[dict[str, Any], ...] = ()
    guesses: list[str] = []
    if spec.provenance.source == "shape":
        weights: tuple[int, ...] = (0,)
        guesses.append("weights: a shape has none, nothing is counted for them")
    elif (info is None or info.bytes is None) and serving.kv_budget is not None:
        weights = (0,)  # the cache's own questions have an answer
        guesses.append("weights: not known, nothing is counted for them")
    elif info is None or info.bytes is None:  # nothing is assumed beside a budget
        raise ConfigError(f"{spec.id}: how much its weights take is not known",
                          hint="a folder or a repository with the weights says it; --kv-budget asks about the cache alone")  # fmt: skip
    elif info.per_rank is not None and engine.splits:
        weights = info.per_rank
        if engine.name != "vllm" and len(weights) > 1:
            guesses.append("weights: cut over ranks as vLLM cuts them")
    elif engine.slots:
        free = [device.available_bytes for device in laid.devices]
        places = engine.memory.places(spec, info.bytes, free, laid.serving)
        weights = tuple(place.weights for place in places)
        if count > 1 or laid.serving.gpu_layers is not None or laid.serving.kv_on_host:
            shares = tuple(place.share for place in places)
            more = tuple({"layers": place.layers, "head": place.head, "devices": count} for place in places)
            guesses.append(f"weights: {format_bytes(sum(weights))} divided by layers, as if they were equally large")
    elif (laid.serving.data_parallel or 1) > 1 or laid.serving.attention_dp:
        raise ConfigError(f"{spec.id}: what each rank holds of its weights where each has all of attention is not known",
                          hint="a folder with the weights says it; tensor parallelism shares everything out")  # fmt: skip
    else:
        weights = (-(-info.bytes // count),) * count
        if count > 1:
            guesses.append(f"weights: an equal share of {format_bytes(info.bytes)} for each GPU")
    stages = laid.serving.pipeline_parallel or 1
    if engine.name == "vllm" and stages > 1:
        # The last stage alone samples.
        ranks = laid.serving.tensor_parallel or 1
        more = tuple({"last_stage": index // ranks % stages == stages - 1} for index in range(count))
    if laid.devices[0].unified and engine.splits and laid.devices[0].kind == "gpu":
        # spark-vllm-docker#396: 22.5 and 28.74 GiB on two GB10, 15 GiB less than all else explains.
        guesses.append("unified memory: what the machine itself holds comes off; a published start had 15 GiB less")
    if laid.serving.cpu_offload is not None:
        weights = tuple(max(0, size - laid.serving.cpu_offload) for size in weights)
    if info is not None and info.source.startswith("estimated: ") and spec.provenance.source != "shape":
        guesses.append("weights: " + info.source.removeprefix("estimated: "))
    return info, Room(spec, engine, dtype.bytes, laid, hardware, weights, shares, held, tuple(guesses), more)


def fit(room: Room, context: int, sequences: int) -> tuple[Fit, Allocation | None]:
    """Whether so many requests of `context` tokens fit, how much more would, and where the memory goes."""
    load = room.load(context, sequences)
    rank, kv = load.ranks[load.bottleneck], load.kv[load.bottleneck]
    capacity = None
    if load.pool and load.allocation is not None and load.budget > 0 and not room.overridden(load.allocation, rank):
        capacity = load.allocation.capacity_tokens
    guess = context * max(1, load.budget) // max(1, sum(load.kv) if room.shares else kv)
    if capacity is not None:
        guess = capacity * room.laid.replicas // sequences
    short = room.shortage(rank)
    notes = room.laid.notes + ((f"{short.message}: {short.hint}",) if short is not None and short.when == "run" else ())
    longest = room.longest(sequences, guess, load.allocation.block_size if load.allocation is not None else 1)
    ranks = tuple(_rank_fit(room, load, index) for index in range(len(load.ranks)))
    return Fit(
        fits=load.fits,
        why=load.why,
        devices=tuple(rank.device.name for rank in load.ranks),
        estimated=_estimated(room, load),
        device_bytes=rank.device.cuda_bytes,
        weights_bytes=rank.weights,
        kv_bytes=kv,
        overhead_bytes=ranks[load.bottleneck].overhead_bytes,
        headroom_bytes=ranks[load.bottleneck].headroom_bytes,
        kv_budget_bytes=max(0, rank.budget),
        capacity_tokens=capacity,
        max_context=longest,
        max_concurrency=room.most(context, sequences, load),
        bottleneck_rank=load.bottleneck,
        parts=_beside(room, load, load.bottleneck),
        ranks=ranks,
        notes=notes,
    ), load.allocation


def _rank_fit(room: Room, load: Load, index: int) -> RankFit:
    rank, kv = load.ranks[index], load.kv[index]
    overhead = sum(part.bytes for part in _beside(room, load, index))
    headroom = rank.device.cuda_bytes - rank.weights - kv - overhead
    return RankFit(index, rank.device.name, rank.device.cuda_bytes, rank.weights, kv, overhead, headroom)


def _beside(room: Room, load: Load, index: int) -> tuple[Part, ...]:
    """What takes a rank's memory beside weights and the workload's cache, and what is left alone."""
    rank, kv = load.ranks[index], load.kv[index]
    parts = list(rank.parts)
    used = rank.device.cuda_bytes - rank.free
    left = rank.device.cuda_bytes - rank.taken - rank.budget  # what the engine leaves alone
    if used:
        held = rank.device.used_by_others
        rule = "not free when it was measured" + (f"; other processes hold {format_bytes(held)}" if held else "")
        parts.append(Part("in use", used, False, rule))
    if left > used:
        parts.append(Part("left free", left - used, False, room.left_words()))
    blocks = room.laid.serving.num_blocks
    if blocks is not None and load.allocation is not None and room.overridden(load.allocation, rank):
        size = blocks * load.allocation.bytes_per_block
        parts.append(
            Part("reserved cache", max(0, size - kv), False, f"the rest of {plural(blocks, 'block')}, as told")
        )
    elif load.pool and left < used and rank.budget > kv:
        # A budget that is given is reserved whole: what is missing is missing for that, not for the workload.
        parts.append(Part("reserved cache", rank.budget - kv, False, "the rest of --kv-budget, whatever the load"))
    return tuple(parts)


def _estimated(room: Room, load: Load) -> tuple[str, ...]:
    """What of the answer is no exact number, with its rule."""
    rank = load.ranks[load.bottleneck]
    out = [f"{part.name}: {part.rule}" for part in rank.parts if part.estimated]
    if rank.device.cuda_estimated:
        out.append(f"device: {rank.device.name} shows applications about {format_bytes(rank.device.cuda_bytes)} of its "
                   f"{format_bytes(rank.device.memory_bytes)}")  # fmt: skip
    return (*out, *room.guesses)
