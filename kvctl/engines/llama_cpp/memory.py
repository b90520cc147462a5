"""What llama.cpp takes of a GPU beside weights and cache, what it leaves in host memory, and how layers are divided.

Source: llama.cpp b11434 src/llama-model.cpp (load_tensors: splits and which tensors stay with the CPU),
src/llama-context.cpp (sched_reserve, output_reserve, pipeline parallelism), common/fit.cpp (--fit),
tools/server/server-context.cpp (outputs of a batch).
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from kvctl.allocation import Part, Place, Serving
from kvctl.engines.llama_cpp.builds import NEWEST, rules
from kvctl.engines.llama_cpp.compute import Batch, Shape, compute_buffer
from kvctl.engines.llama_cpp.plan import Laid, cells_of, layout, ubatch_of
from kvctl.engines.llama_cpp.storage import storage
from kvctl.engines.llama_cpp.styles import NEAR, shape_of, style_of
from kvctl.engines.runtime import runtime
from kvctl.engines.usual import default_context, kv_budget, left, plan_refusal, shortage, start_refusal, started
from kvctl.errors import UsageError
from kvctl.formats import FP16, plain
from kvctl.kept import kept
from kvctl.record import Record
from kvctl.spec import Empty, Formats, LatentAttention, ModelSpec, Shared
from kvctl.units import MIB, format_bytes

__all__ = [
    "default_context",
    "fit_margin",
    "gpu_weights",
    "kv_budget",
    "layer_split",
    "left",
    "outputs",
    "overheads",
    "places",
    "plan_refusal",
    "shortage",
    "start_refusal",
    "started",
]  # fmt: skip

MARGIN = 1024 * MIB
"""--fit-target: what --fit on leaves free on every device."""
_SERVER, _WORD, _SLOT = 28 * MIB, 256, 3 * MIB // 2
"""Bytes of a host's memory that llama-server takes in any case, for a word of the vocabulary, and for a slot."""
_COPIES = 4
"""Of a device's inputs, where several devices work on batches at a time (GGML_SCHED_MAX_COPIES)."""
_AGES = ((9842, 3), (8095, 2), (6122, 1), (0, 0))
"""Builds from which graphs are laid out in a new way, and what `Batch.age` calls it."""
_LAST = (5640, 7698, 8390)
"""The last measured builds before these."""
_FITS_SINCE = 7698
"""The first measured build with --fit."""
_FEW_OUTPUTS_SINCE = 9842
"""The first measured build whose server has logits for its slots alone (pull request 23861), not for every token."""


class Split(Record):
    """Layers by device, and the device that has the head; -1 is the CPU."""

    layers: tuple[int, ...]
    on_cpu: int
    head: int


def layer_split(
    n_layer: int, free: Sequence[int], tensor_split: Sequence[float] | None = None, gpu_layers: int | None = None
) -> Split:
    """How -sm layer divides the layers and the head, by free memory or by --tensor-split.

    `gpu_layers`: -ngl; all of them and the head without it.

    Raises:
        UsageError: shares that are not one for each device, or negative.

    """
    if not free or any(bytes_ < 0 for bytes_ in free):
        raise UsageError("--gpu: llama.cpp's layers need at least one device with memory")
    shares: Sequence[float] = free
    if tensor_split is not None and any(tensor_split):
        shares = [*tensor_split, *[0.0] * len(free)][: len(free)]
        if not all(0 <= share < 2**60 for share in shares):
            raise UsageError("--tensor-split: shares are numbers of at least 0, one a device")
    points = [_single(total) for total in accumulate((_single(share) for share in shares), lambda a, b: _single(a + b))]
    if not points[-1]:
        raise UsageError("--gpu: no device has free memory")
    points = [_single(point / points[-1]) for point in points]
    places = n_layer + 1
    offloaded = places if gpu_layers is None or gpu_layers < 0 else min(gpu_layers, places)
    first = places - offloaded
    counts, head = [0] * len(free), -1
    for place in range(first, places):
        device = bisect_right(points, _single((place - first) / offloaded))
        if place == n_layer:
            head = device
        else:
            counts[device] += 1
    return Split(tuple(counts), n_layer - sum(counts), head)


def _single(value: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return float(rounded)


def gpu_weights(spec: ModelSpec) -> int | None:
    """Bytes of the weights on GPUs when all layers are offloaded: embeddings stay in host memory.

    A head that reads the embeddings is a copy of them, and goes with the last layer. None: not known.
    """
    weights = spec.weights
    if weights is None or weights.bytes is None:
        return None
    if weights.looked_up is not None:
        return weights.bytes - weights.looked_up
    if spec.tensors is None:
        return None
    head = any(tensor.name.endswith("lm_head.weight") for tensor in spec.tensors)
    embeddings = sum(
        t.total for t in spec.tensors if t.name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight"))
    )
    return weights.bytes - embeddings if head else weights.bytes


def overheads(
    spec: ModelSpec,
    serving: Serving,
    *,
    dtype_bytes: int,
    device_bytes: int,
    gpu_name: str | None,
    version: str | None,
    context: int,
    free_bytes: int | None = None,
    layers: int | None = None,
    head: bool = True,
    devices: int = 1,
) -> tuple[Part, ...]:
    """What is neither weights nor cache on one GPU that runs `layers` of the model (all without it) and perhaps the head.

    `context` is -c: the tokens of all slots together. Outputs and embeddings lie in host memory. The
    compute buffer of known architectures is the CPU library's own to the byte; CUDA's fused kernels keep single tensors
    longer, which adds up to 3% in published logs.
    """
    by, _ = rules(version)
    laid = layout(by, spec, context, serving)
    shape = shape_of(spec, laid, serving)
    shape = shape.replace(layers=len(spec.layers) if layers is None else layers)
    gpu = serving.device != "cpu"
    batch = _batch(shape, laid, serving, version, gpu=gpu, spec=spec)
    batch = batch.replace(head=head, copies=_COPIES if devices > 1 and not serving.kv_on_host else 1)
    size = compute_buffer(shape, batch)
    rule = _rule(spec, shape, batch)
    if _unlike(spec):
        # Of architectures that build quite another graph, the largest was seven times what this one says.
        size, rule = 7 * size, f"{rule}: seven times that, the most that was measured of such architectures"
    compute = Part("compute buffer", size, estimated=gpu or not _exact(spec, version), rule=rule)
    if not gpu:
        return (_process(shape, laid), compute)
    parts = [runtime(1), compute]
    margin = fit_margin(version) if serving.fit_margin is None else serving.fit_margin * MIB
    if margin:
        parts.append(Part("margin", margin, estimated=False, rule=(
            f"--fit on leaves {format_bytes(margin)} free (--fit-target), by a shorter context where none is named, "
            "else with layers on the CPU")))  # fmt: skip
    return tuple(parts)


def _process(shape: Shape, laid: Laid) -> Part:
    """What llama-server itself has of a host's memory: libraries, the vocabulary and its merges, a thread for each connection.

    Seen of build b11434 and SmolLM2-135M (49,152 words) over load tests, as the peak of resident memory less weights, cache and compute
    buffer: 36.8 MiB with 1 slot, 39.3 with 4, 44.4 with 8; this gives some more.
    """
    words = shape.vocabulary * _WORD
    size = _SERVER + words + laid.slots * _SLOT
    return Part("process", size, estimated=True, rule=(
        f"llama-server itself: about {format_bytes(_SERVER)}, {format_bytes(words)} for {shape.vocabulary:,} words and {format_bytes(_SLOT)} "
        "a slot; more than was seen"))  # fmt: skip


def _exact(spec: ModelSpec, version: str | None) -> bool:
    """Whether the buffers of this architecture were equal to the library's own, on the CPU of a build near this one."""
    style = style_of(spec)
    build = _build(version)
    between = any(last < build < since for last, (since, _) in zip(reversed(_LAST), _AGES, strict=False))
    return style is not None and spec.model_type not in NEAR and not between


def _unlike(spec: ModelSpec) -> bool:
    """Whether a model's graph is known to be quite another one than those that are laid out here."""
    return spec.model_type.startswith("minimax") or spec.keeps(LatentAttention, Shared)


def _rule(spec: ModelSpec, shape: Shape, batch: Batch) -> str:
    flash = "with flash attention" if batch.flash else "without flash attention"
    text = (f"the graph of {batch.tokens:,} tokens over {batch.cells:,} cells {flash}, {batch.outputs:,} of them with logits "
            f"over {shape.vocabulary:,} words")  # fmt: skip
    if batch.copies > 1:
        text += f", with {batch.copies} copies of its inputs"
    if style_of(spec) is None:
        text += "; laid out as if the architecture were Llama's"
    return text


def fit_margin(version: str | None) -> int:
    """Bytes that --fit on leaves free on a device; 0 in builds before it."""
    return MARGIN if _build(version) >= _FITS_SINCE else 0


def _build(version: str | None) -> int:
    rules(version)  # refuses what is no build
    return NEWEST if version is None else int(version.removeprefix("b"))


def outputs(version: str | None, tokens: int, slots: int) -> int:
    """Tokens of a batch that get logits in llama-server."""
    return min(tokens, slots) if _build(version) >= _FEW_OUTPUTS_SINCE else tokens


def _batch(shape: Shape, laid: Laid, serving: Serving, version: str | None, *, gpu: bool, spec: ModelSpec) -> Batch:
    tokens = -(-ubatch_of(serving, laid) // laid.slots) * laid.slots
    few = outputs(version, tokens, laid.slots)
    window = _window_cells(spec, laid, serving) or laid.cells
    age = next(age for since, age in _AGES if _build(version) >= since)
    return Batch(tokens=tokens, outputs=few, cells=laid.cells, window_cells=window, flash=laid.flash, gpu=gpu, age=age)


def _window_cells(spec: ModelSpec, laid: Laid, serving: Serving) -> int:
    """Cells of a stream of windows; 0 where there are none apart."""
    fmt = Formats(FP16, plain(FP16), plain(FP16))
    stored = storage(spec, fmt, laid.rules, flash=laid.flash)
    return max((cells_of(cache, laid, stored, serving) for cache in stored.caches if cache.reach), default=0)


def _tied(spec: ModelSpec) -> bool:
    from kvctl.families import text_fields
    from kvctl.families.fields import Fields
    from kvctl.parameters import tied

    root = Fields(spec.config)
    return tied(root, text_fields(root))


def places(spec: ModelSpec, weights_bytes: int, free: Sequence[int], serving: Serving) -> tuple[Place, ...]:
    """What lies on each device with -ngl layers offloaded; layers count alike, as llama.cpp counts
    them."""
    return _places(spec, weights_bytes, tuple(free), serving.tensor_split, serving.gpu_layers)


@kept
def _places(
    spec: ModelSpec, weights_bytes: int, free: tuple[int, ...], tensor_split: tuple[float, ...] | None,
    gpu_layers: int | None,
) -> tuple[Place, ...]:  # fmt: skip
    # Devices without any memory share the layers too: that these do not fit is for the fit to say.
    known = free if any(free) else (1,) * len(free)
    split = layer_split(len(spec.layers), known, tensor_split, gpu_layers)
    there = gpu_weights(spec)
    total = weights_bytes if there is None else there
    words = (spec.vocab_size or 0) * (spec.hidden_size or 0)
    parameters = spec.weights.parameters if spec.weights is not None else None
    head = weights_bytes * words // parameters if parameters else 0
    if there is None and not _tied(spec):
        total -= head  # embeddings stay in host memory
    owners = [any(not isinstance(state, Empty) for state in layer.states_in("llama.cpp")) for layer in spec.layers]
    out, first = [], split.on_cpu
    for device, count in enumerate(split.layers):
        owned = sum(owners[first : first + count])
        first += count
        weights = (total - head) * count // len(spec.layers) + (head if split.head == device else 0)
        out.append(Place(weights, Fraction(owned, sum(owners) or 1), count, split.head == device))
    return tuple(out)
