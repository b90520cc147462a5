"""Every way to serve a model that could be the best: engine, parallelism, weights, cache format, batch, replicas.

The space is exhaustive but for what is never better than something that stays. What is left out, and why that loses nothing:

- Replicas stand for data parallelism of models without experts: the same memory and work, and no exchange at all.
- Tensor parallelism stays within a node: an exchange in every layer, over a network ten times slower than a link, is slower
  than stages over the same GPUs, which exchange once a stage and hold as much.
- Within a node that has links, stages are used only where tensor parallelism cannot use the GPUs: equal memory, and a token
  passes all stages one after another. Where GPUs have no link (or it is not known), both stay.
- Such stages, and servers over several nodes, only where fewer GPUs do not hold all: they add memory, and no speed.
- Expert parallelism comes with data parallelism: with tensor parallelism alone both hold and read the same bytes, and whole
  experts are loaded unevenly.
- Experts are spread over ranks that divide them: an uneven share lets all wait for the fullest rank (SGLang and TensorRT-LLM refuse
  it).
- Attention on ranks of their own, and tokens dealt out over ranks, only where ranks would otherwise hold the same keys
  (latents, or fewer KV heads than ranks): elsewhere nothing is repeated that they could save. Tokens are dealt out over all
  such ranks or none: the exchange comes with the first step, the memory grows with the last.
- Of formats of weights with the same bits and kernels one stays, published before converted before made: 8-bit floats; 4-bit
  weights that are unpacked on the way. 8-bit integers only where tensor cores have no 8-bit floats, for bytes and rate are
  equal and they lose more; 4-bit floats that have to be made only where tensor cores compute in them.
- Of more than forty replicas so many that each number is within 5% of one that is tried: figures so near each other count as equal.
- Replicas that hold fewer requests at once than are asked for, where more of them, on GPUs that are there, hold all.
- `max_sequences` is what is asked of a replica: more takes memory for requests that do not come, fewer lets them wait.
- Weights stay in host memory (which has to be asked for) only where a format fits on no GPUs, and as few as can be: every step
  reads them over a bus that has a twentieth of a GPU's bandwidth.
- llama.cpp runs layers one after another on several GPUs: as few as hold what is asked, for more hold the same and are no
  faster.

Order: engines as asked, weights from the largest, splits from the fewest GPUs; the same input gives the same list.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.engines import Engine
from kvctl.hardware import Device
from kvctl.recommend import takes
from kvctl.recommend.checkpoints import Checkpoint
from kvctl.recommend.request import Ask, Pins
from kvctl.record import Record
from kvctl.spec import Attention, LatentAttention, ModelSpec

BATCHES = (2048, 8192)
"""Tokens of a batch that are tried: a small one for even gaps between tokens and for memory, and one that fills large GPUs."""


class Split(Record):
    """How one server lies on GPUs."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    """Ranks (vLLM: engines) that attend for requests of their own, experts spread over them."""
    dealt: int = 1
    """Ranks of tensor parallelism over which tokens are dealt out."""
    gpus: int = 1
    """On each node."""
    nodes: int = 1

    @property
    def ranks(self) -> int:
        """GPUs that the server has."""
        return self.gpus * self.nodes


OVER_NODES = ("vllm", "sglang")
"""Engines whose own processes join several nodes."""


def splits(engine: Engine, ask: Ask) -> Iterator[Split]:
    """Splits that are considered, those on the fewest GPUs first; whether the engine takes one is its planner's to say."""
    if not ask.gpus:
        yield Split(gpus=0)
        return
    pins = ask.pins
    if engine.slots:
        yield from (Split(gpus=count) for count in range(1, ask.gpus + 1) if not pins.split)
        return
    found = [*_within(engine, ask), *_over_nodes(engine, ask)]
    if pins.split:
        # What is told is tried, if it is left out elsewhere for something better.
        told = Split(pins.tensor or 1, pins.pipeline or 1, gpus=(pins.tensor or 1) * (pins.pipeline or 1))
        found += [told] if told.gpus <= ask.gpus else []
        found = [one for one in found if pins.tensor in (None, one.tensor) and pins.pipeline in (None, one.pipeline)]
    yield from sorted(dict.fromkeys(found), key=lambda one: (one.ranks, one.nodes, one.pipeline, one.data, one.dealt))


def offloading(engine: Engine, ask: Ask) -> Split | None:
    """The server whose weights may stay in host memory in part, on all GPUs of a node; None where an engine has no such option."""
    if engine.slots:
        return None if ask.pins.split else Split(gpus=ask.gpus)
    if engine.name == "tensorrt-llm":
        return None
    tensor = ask.pins.tensor or _tensors(ask.spec, ask.gpus)[-1]
    return Split(tensor, gpus=tensor) if ask.pins.pipeline in (None, 1) else None


def staged(split: Split, ask: Ask) -> bool:
    """Whether a split only adds memory to what fewer GPUs do: stages for what tensor parallelism leaves over, or over nodes."""
    return split.nodes > 1 or (split.pipeline > 1 and linked(ask.device))


def replicas(split: Split, ask: Ask) -> tuple[int, ...]:
    """How many such servers may stand side by side, the fewest first."""
    if not split.gpus:
        return (1,)
    most = ask.nodes // split.nodes if split.nodes > 1 else ask.nodes * (ask.gpus // split.gpus)
    told = ask.pins.replicas
    if told is not None:
        return (told,) if told <= most else ()
    found, count = [], 1
    while count < most:
        found.append(count)
        count += max(1, count // 20)
    return (*found, most) if most else ()


def _within(engine: Engine, ask: Ask) -> Iterator[Split]:
    """Splits within one node."""
    spec, count = ask.spec, ask.gpus
    tensors = _tensors(spec, count)
    for ranks in range(1, count + 1):
        if ranks in tensors:
            yield Split(ranks, gpus=ranks)
            yield from _dealt(engine, spec, Split(ranks, gpus=ranks))
        staged = [one for one in tensors if one < ranks and ranks % one == 0 and ranks // one <= len(spec.layers)]
        if linked(ask.device):
            staged = [] if ranks in tensors else staged[-1:]
        yield from (Split(one, ranks // one, gpus=ranks) for one in staged)
        if ranks > 1:
            yield from _attending(engine, spec, Split(gpus=ranks))


def _over_nodes(engine: Engine, ask: Ask) -> Iterator[Split]:
    """Splits over several nodes, all GPUs of each, of engines that kvctl can start so."""
    if engine.name not in OVER_NODES:
        return
    tensor = max((one for one in _tensors(ask.spec, ask.gpus) if ask.gpus % one == 0), default=1)
    for nodes in range(2, ask.nodes + 1):
        stages = nodes * (ask.gpus // tensor)
        if stages <= len(ask.spec.layers):
            split = Split(tensor, stages, gpus=ask.gpus, nodes=nodes)
            yield split
            yield from _dealt(engine, ask.spec, split)
        yield from _attending(engine, ask.spec, Split(gpus=ask.gpus, nodes=nodes))


def _tensors(spec: ModelSpec, count: int) -> list[int]:
    """Tensor-parallel ranks that divide the heads."""
    heads, kv = spec.attention_heads or 1, _kv_heads(spec)
    return [
        ranks for ranks in range(1, count + 1)
        if heads % ranks == 0 and (not kv or kv % ranks == 0 or ranks % kv == 0)
    ]  # fmt: skip


def _dealt(engine: Engine, spec: ModelSpec, split: Split) -> Iterator[Split]:
    """The split with tokens dealt out over ranks that hold the same keys."""
    heads = 1 if spec.keeps(LatentAttention) else _kv_heads(spec)
    copies = split.tensor // heads if heads else 1
    if copies > 1 and engine.name != "tensorrt-llm":
        yield split.replace(dealt=copies)


def _attending(engine: Engine, spec: ModelSpec, split: Split) -> Iterator[Split]:
    """Attention on ranks of their own, experts spread over all."""
    ranks = split.ranks
    count = experts(spec)
    if count and count % ranks == 0 and (spec.keeps(LatentAttention) or _kv_heads(spec) < ranks):
        yield split.replace(tensor=1 if engine.name == "vllm" else ranks, data=ranks)


def _kv_heads(spec: ModelSpec) -> int:
    """KV heads of the layer that has most; 0 without any."""
    return max((s.kv_heads for layer, _ in spec.groups for s in layer.states if isinstance(s, Attention)), default=0)


def experts(spec: ModelSpec) -> int:
    """Experts of a mixture; 0 without any."""
    from kvctl.engines.widths import EXPERTS, first
    from kvctl.families import text_fields
    from kvctl.families.fields import Fields

    count = first(text_fields(Fields(spec.config)), EXPERTS)
    return count if count > 1 else 0


def mixture(spec: ModelSpec) -> bool:
    """Whether the model has experts."""
    return experts(spec) > 0


def linked(device: Device) -> bool:
    """Whether GPUs of a node exchange over links of their own."""
    if device.nvlinks is not None:
        return device.nvlinks > 0
    return bool(device.facts is not None and device.facts.link_gbs)


_OPEN = Pins()


def weights(
    engine: Engine, device: Device, offered: tuple[Checkpoint, ...], pins: Pins = _OPEN
) -> tuple[Checkpoint, ...]:
    """Of the formats that are to be had, those that are considered for an engine on a device."""
    offered = tuple(one for one in offered if pins.wants(one.weights))
    if engine.slots:
        return offered
    taken = [
        (one, how) for one in offered if (how := takes.weights(engine, device, one.weights)) is not None
        and not (one.made == "load" and not how.load) and not (one.made == "make" and engine.name == "tensorrt-llm")
    ]  # fmt: skip
    if pins.weights is not None:
        return tuple(one for one, _ in taken)
    eight = any(one.weights.startswith("fp8") and takes.computes(how, device) for one, how in taken)
    best: dict[str, tuple[tuple[bool, int, bool, int], Checkpoint]] = {}
    for order, (one, how) in enumerate(taken):
        native = takes.computes(how, device)
        kind = _kind(one.weights, native)
        if (kind == "8-bit integers" and (eight or not native)) or (
            one.made == "make" and one.weights == "nvfp4" and not native
        ):
            continue
        # Of 4-bit weights that are unpacked, integers have the fewer scales.
        wide = kind == "4 bits" and one.weights in ("nvfp4", "mxfp4")
        rank = (not native, ("stored", "load", "make").index(one.made), wide, order)
        if kind not in best or rank < best[kind][0]:
            best[kind] = rank, one
    kept = {id(one) for _, one in best.values()}
    order_of = ("16 bits", "8-bit floats", "8-bit integers", "4-bit floats", "4 bits")
    return tuple(sorted((one for one, _ in taken if id(one) in kept),
                        key=lambda one: order_of.index(next(kind for kind, (_, kept_one) in best.items() if kept_one is one))))  # fmt: skip


def _kind(name: str, native: bool) -> str:
    """Formats of a kind have the same bits and kernels."""
    if name.startswith("fp8"):
        return "8-bit floats"
    if name == "w8a8":
        return "8-bit integers"
    if name in ("nvfp4", "mxfp4") and native:
        return "4-bit floats"
    return "4 bits" if name in ("awq", "gptq", "w4a16", "nvfp4", "mxfp4") else "16 bits"


def batches(engine: Engine, ask: Ask, requests: int) -> tuple[int | None, ...]:
    """Tokens of a batch that are tried with so many requests in it; None is the engine's own."""
    if engine.slots or not ask.gpus:
        return (None,)
    if engine.name == "tensorrt-llm":
        return (BATCHES[-1],)  # max_num_tokens, its own default
    from kvctl.engines.vllm.models import least_batched
    from kvctl.engines.vllm.rules import minor_of

    # An input that is not to be cut has to fit in a batch.
    least = least_batched(ask.spec, minor_of(engine.version)) if engine.name == "vllm" else 0
    return tuple(dict.fromkeys(max(size, least) for size in BATCHES if size >= requests)) or (max(requests, least),)
