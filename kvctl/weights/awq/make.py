"""A model's folder in, an AWQ checkpoint out."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, KvctlError, SourceError
from kvctl.measure.faults import first_line
from kvctl.measure.hush import quiet
from kvctl.measure.memory import map_large, trim
from kvctl.record import Record
from kvctl.weights import calibration, tensorfile, verify
from kvctl.weights.awq import layout
from kvctl.weights.awq.search import Options
from kvctl.weights.awq.structure import Site, architecture, file_names, sites
from kvctl.weights.checkpoint import Work, check_target, open_source
from kvctl.weights.layerwise import Done, Report, quantize
from kvctl.weights.skeleton import Skeleton

if TYPE_CHECKING:
    import torch

_RECIPE = 1
"""Goes up when the same settings come to give other bytes."""
_OVERFLOWS = frozenset(("gemma", "gemma2", "gemma3_text"))
"""Types whose activations float16 does not hold (AutoAWQ issue 458): the rest of their weights is bfloat16."""
_HALF_LIMIT = 65504.0
_LIBRARIES = 15 * 10**6
"""What torch's matrix products and LAPACK load and keep when they first run, as measured on Linux x86_64."""
_SLICE = 2**20
"""Numbers that are converted at a time."""


class Settings(Record):
    """How a model is quantized."""

    group: int | None = None
    """Inputs that share a scale; None: the largest of 128, 64 and 32 that divides all."""
    samples: int = 16
    length: int = 512
    seed: int = 0
    calibration: calibration.Wanted = calibration.Wanted()
    """What samples are drawn from, where none are given."""
    dtype: str | None = None
    """float16 or bfloat16, of what is not packed; None: float16 where the model's activations fit."""
    scale: bool = True
    clip: bool = True
    compensate: bool = True
    batch: int = 4
    """Samples that run at a time."""


class Step(Record):
    """How far it is."""

    stage: str
    """ "text", "layer", "rest" or "files"."""
    done: int
    of: int


class Made(Record):
    """A checkpoint, and what was done for it."""

    folder: Path
    files: tuple[Path, ...]
    group: int
    dtype: str
    layers: tuple[tuple[Report, ...], ...]
    largest: float
    """The largest value of the calibration tokens' states."""
    ranks: tuple[int, ...]
    """Tensor-parallel sizes that leave whole groups."""
    notes: tuple[str, ...]

    @property
    def error(self) -> float:
        """Mean over the model's linear layers of their outputs' relative squared error on the calibration tokens."""
        return _mean([report.error for reports in self.layers for report in reports])

    @property
    def plain_error(self) -> float:
        """The same of rounding to nearest."""
        return _mean([report.plain_error for reports in self.layers for report in reports])


class Plan(Record):
    """What will be done, from headers alone."""

    group: int
    dtype: str
    layers: int
    ranks: tuple[int, ...]
    parameters: int
    file_bytes: int
    """Of tensors in the checkpoint."""
    disk_bytes: int
    """At most, while it works: pieces and what they are joined to, and states."""
    memory_bytes: int
    """At its peak, beside what torch and transformers themselves take."""


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


class _Job:
    """A source, and how its layers are taken apart."""

    def __init__(self, source: Path, settings: Settings) -> None:
        self.settings, self.folder = settings, source
        self.source, self.config = open_source(source)
        self.known = architecture(self.config)
        self.skeleton = Skeleton(_configuration(source), self.source, self.known)
        self.sites: list[tuple[Site, ...]] = [
            sites(layer, self.known, self.skeleton.config) for layer in self.skeleton.layers
        ]
        self.shapes = {(index, slot.name): tuple(slot.of(self.skeleton.layers[index]).shape)
                       for index, found in enumerate(self.sites) for site in found for slot in site.slots}  # fmt: skip
        self.group = layout.choose_group((shape[1] for shape in self.shapes.values()), settings.group)
        odd = next((name for (_, name), shape in self.shapes.items() if shape[0] % layout.PER_WORD), None)
        if odd is not None:
            raise ConfigError(f"AWQ packs 8 outputs together, and those of {odd} are no multiple of 8",
                              hint="nf4, fp4 and int8 have no such rule")  # fmt: skip
        self.ranks = layout.ranks_that_fit(self._cut(), self.group)
        model_type = str(self.config.get("model_type"))
        self.dtype = settings.dtype or ("bfloat16" if model_type in _OVERFLOWS else "float16")

    def _cut(self) -> set[int]:
        """Inputs of the layers that ranks cut along them: all that is not given by a norm."""
        return {self.shapes[index, slot.name][1] for index, found in enumerate(self.sites) for site in found
                for slot in site.slots if site.name.endswith("output")}  # fmt: skip

    @property
    def kept(self) -> list[str]:
        """Linear modules that are not packed, by their whole names; readers take every other one for packed."""
        beside = [
            f"{self.skeleton.name_of(index)}.{file_names(path, (), self.known)[0][0]}".removesuffix(".weight")
            for index, found in enumerate(self.sites) for site in found for path in site.beside
        ]  # fmt: skip
        return ["lm_head", *beside]

    def key(self, samples: calibration.Samples) -> str:
        """The same for runs that give the same bytes."""
        import torch

        own = {name: str(getattr(self.settings, name)) for name in Settings._fields if name != "calibration"}
        ids = samples.ids.long().contiguous().numpy().tobytes()
        facts = [_RECIPE, own, hashlib.sha256(ids).hexdigest(), self.source.fingerprint(), self.config,
                 torch.__version__]  # fmt: skip
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _configuration(folder: Path) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"transformers cannot read the configuration: {first_line(error)}") from None


def plan(source: Path, settings: Settings) -> Plan:
    """What `make` would do; reads headers alone.

    Raises:
        KvctlError: as `make`.

    """
    with quiet():
        job = _Job(source, settings)
    packed = sum(_packed_bytes(shape, job.group) for shape in job.shapes.values())
    of_slots = {f"{job.skeleton.name_of(index)}.{name}.weight" for index, name in job.shapes}
    names = [name for name in job.source.names() if name not in of_slots and name in _wanted(job)]
    plain = sum(2 * math.prod(job.source.shapes[name]) for name in names)
    outside = max((_outside_memory(job, name) for name in job.skeleton.outside), default=0)
    states = 4 * settings.samples * settings.length * job.skeleton.config.hidden_size
    working = max(_layer_memory(job, index) for index in range(len(job.sites)))
    parameters = sum(math.prod(job.source.shapes[name]) for name in _wanted(job))
    return Plan(job.group, job.dtype, len(job.sites), job.ranks, parameters, packed + plain, 2 * (packed + plain) + 2 * states,
                max(2 * states, states + working + _LIBRARIES, outside))  # fmt: skip


def _wanted(job: _Job) -> set[str]:
    inside = {name for name in job.source.names() if name.startswith(f"{job.skeleton.prefix}layers.")}
    return inside | set(job.skeleton.outside)


def _packed_bytes(shape: tuple[int, ...], group: int) -> int:
    outputs, inputs = shape
    groups = inputs // group
    return outputs * inputs // 2 + groups * outputs // 2 + groups * outputs * 2


def _outside_memory(job: _Job, name: str) -> int:
    """Of a tensor that belongs to no layer: what is stored, and what becomes of it where that has other bytes."""
    count, own = math.prod(job.source.shapes[name]), job.source.sizes[name]
    return own if own == 2 * count else own + 2 * count


_GAPS = 9
"""Percent of a layer's memory that many layers, one after the other, take beside it."""


def _layer_memory(job: _Job, index: int) -> int:
    """Beside all tokens' states: weights in float32, and the most of what there is at a time with them."""
    layer, config, settings = job.skeleton.layers[index], job.skeleton.config, job.settings
    weights: int = sum(4 * parameter.numel() for parameter in layer.parameters())
    grams = search = packed = slots = 0
    for site in job.sites[index]:
        rows = [job.shapes[index, slot.name][0] for slot in site.slots]
        width = job.shapes[index, site.slots[0].name][1]
        grams += 4 * width * width
        packed += sum(rows) * width
        slots = max(slots, max(rows) * width)
        joined, gram = sum(rows) * width, width * width
        # A Gram matrix with its diagonal added to, or divided by scales: twice. Rounding: weights, their codes in a byte, the
        # error, that times Gram and times itself.
        search = max(search, 4 * joined + 8 * gram, 17 * joined + 4 * gram)
        if settings.scale and site.fold is not None:
            search = max(search, 17 * max(rows) * width + 8 * gram)
        if settings.compensate:
            # What is left of the weights; the Gram matrix, and two factors of it in float64; two sets of codes.
            search = max(search, 9 * joined + 20 * gram, 19 * joined + 8 * gram)
    inner = max(shape[1] for shape in job.shapes.values())
    # A block's inputs, what attention makes of them and adds, and three products of the MLP's inner width.
    running: int = 4 * settings.batch * settings.length * (4 * config.hidden_size + 3 * inner)
    # Codes take a byte; of one layer at a time the file is held against what they stand for.
    most = max(grams + packed + search, grams + running, packed + running, packed * 3 // 2 + 12 * slots)
    # Each layer's blocks leave gaps that the next one's do not all fit into: over SmolLM2-135M's 30 layers the peak was 9% above
    # that of the first, most of it after seven.
    count = len(job.sites)
    return weights + most + most * _GAPS * (count - 1) // (100 * count)


def make(
    source: Path,
    target: Path,
    settings: Settings,
    *,
    samples: calibration.Samples | None = None,
    progress: Callable[[Step], None] | None = None,
    resume: bool = False,
    force: bool = False,
    finish: Callable[[Path, Made], Mapping[str, str]] | None = None,
) -> Made:
    """Quantize the model in folder `source` and write the checkpoint to folder `target`; `finish`: see `Work.publish`, it is
    told of what was made, too. `samples`: what it is searched on, where that was drawn already.

    Raises:
        UsageError: settings that cannot be, a target that is there, or nothing to resume.
        ConfigError: an architecture, or shapes, that AWQ is not made for; a model that is quantized already.
        SourceError: weights that are missing or broken.
        KvctlError: the disk is full; the model makes numbers that are not finite.

    """
    tell = progress or (lambda step: None)
    check_target(target, source, force)
    map_large()
    with quiet():
        job = _Job(source, settings)
        if samples is None:
            samples = calibration.draw(source, settings.calibration, settings.samples, settings.length, settings.seed)
        calibration.check_vocabulary(samples, job.skeleton.config.vocab_size)
        import torch

        work = Work(target, job.key(samples), {"threads": torch.get_num_threads()}, resume)
        threads = torch.get_num_threads()
        try:
            # Sums in another order have other last bits.
            torch.set_num_threads(work.facts["threads"])
            _layers(job, work, samples.ids, tell)
            _rest(job, work, tell)
            _check_better(work)
            tell(Step("files", 0, 1))
            made = _made(job, work, target)
            last = None if finish is None else lambda folder: finish(folder, made)
            files = work.publish(source, _config_of(job), [entry["piece"] for entry in work.done], last)
            tell(Step("files", 1, 1))
        finally:
            torch.set_num_threads(threads)
            work.close()
    return made.replace(files=files)


def _check_better(work: Work) -> None:
    """Refuses what is no better than rounding to nearest; layer by layer that cannot be, so it is a fault."""
    reports = [report for entry in work.done for report in entry.get("reports", ())]
    error, plain = (_mean([report[name] for report in reports]) for name in ("error", "plain_error"))
    if not error <= plain * (1 + 1e-6):
        raise KvctlError(f"the layers' outputs are off by {error:.3g} of their squares, and rounded to nearest by {plain:.3g}",
                         hint="take more calibration samples, or another text")  # fmt: skip


def _made(job: _Job, work: Work, target: Path) -> Made:
    layers = tuple(
        tuple(Report(**{**report, "layers": tuple(report["layers"])}) for report in entry["reports"])
        for entry in work.done if "reports" in entry
    )  # fmt: skip
    largest = max(entry["largest"] for entry in work.done if "reports" in entry)
    notes = []
    if job.dtype == "float16" and largest > _HALF_LIMIT / 2:
        notes.append(f"states reach {largest:,.0f}, and float16 ends at 65,504: run it in bfloat16")
    unseen = sum(report.tokens == 0 for reports in layers for report in reports)
    if unseen:
        notes.append(f"{unseen} experts were given no calibration token and are rounded to nearest: take more samples")
    if any(site.name.startswith("expert") for found in job.sites for site in found):
        notes.append(
            "transformers 5.24 has no packed experts: it would run this checkpoint with random ones; vLLM on a CPU takes AMX for them"
        )
    return Made(target, (), job.group, job.dtype, layers, largest, job.ranks, tuple(notes))


def _layers(job: _Job, work: Work, ids: torch.Tensor, tell: Callable[[Step], None]) -> None:
    import torch

    count = len(job.sites)
    tell(Step("text", 0, 1))
    states, beside = job.skeleton.enter(ids, torch.float32)
    trim()
    tell(Step("text", 1, 1))
    begun = sum("reports" in entry for entry in work.done)
    if begun == count:
        return
    if begun:
        states = tensorfile.Source(work.folder, [work.folder / _states(begun)]).read("states")
    options = Options(job.group, job.settings.scale, job.settings.clip, job.settings.compensate)
    plain = getattr(torch, job.dtype)
    for index in range(begun, count):
        tell(Step("layer", index, count))
        with job.skeleton.filled(index, torch.float32) as layer:
            try:
                done = quantize(layer, job.sites[index], states, beside[index], job.settings.batch, options, plain)
            except KvctlError as error:
                raise KvctlError(f"layer {index}: {error.message}", hint=error.hint) from None
            trim()
            piece = _write_layer(job, work, index, layer, done, plain)
        written = [piece]
        if index + 1 < count:
            written.append(tensorfile.write(work.folder / _states(index + 1), {"states": states}))
        work.record(
            {"piece": piece.name, "largest": done.largest, "reports": [report.to_dict() for report in done.reports]},
            written, [_states(index)] if index else [],
        )  # fmt: skip
        # What a search leaves behind in pieces would add up from layer to layer.
        trim()
        tell(Step("layer", index + 1, count))


def _states(index: int) -> str:
    return f"states-{index:05d}.safetensors"


def _write_layer(job: _Job, work: Work, index: int, layer: Any, done: Done, plain: torch.dtype) -> tensorfile.Written:
    prefix = job.skeleton.name_of(index)
    out: dict[str, torch.Tensor] = {}
    for name, codes in done.codes.items():
        for part, tensor in layout.packed(*codes).items():
            out[f"{prefix}.{name}.{part}"] = tensor
    packed = {slot.path for site in job.sites[index] for slot in site.slots}
    for path, parameter in layer.named_parameters():
        if path not in packed:
            ((name, _, _),) = file_names(path, tuple(parameter.shape), job.known)
            out[f"{prefix}.{name}"] = _stored(parameter.data, plain, f"{prefix}.{name}")
    path = work.folder / f"layer-{index:05d}.safetensors"
    written = tensorfile.write(path, out)
    verify.check_packed(path, ((f"{prefix}.{name}", codes.weight()) for name, codes in done.codes.items()))
    return written


def _stored(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    import torch

    out = tensor.to(dtype)
    # By the extremes: isfinite would make copies of the largest tensors there are.
    if out.numel() and not all(map(math.isfinite, map(float, out.aminmax()))):
        largest = max(map(abs, map(float, tensor.aminmax())))
        if not math.isfinite(largest):
            raise SourceError(f"{name} has numbers that are not finite", hint="download it again")
        raise KvctlError(f"{name} reaches {largest:.3g}, which {str(dtype).removeprefix('torch.')} does not hold",
                         hint="--dtype bf16 holds it" if dtype == torch.float16 else None)  # fmt: skip
    return out


def _converted(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """As `_stored`, in the place of `tensor` where that has as many bytes: embeddings are the largest tensor there is."""
    if tensor.dtype == dtype or tensor.element_size() != dtype.itemsize:
        return _stored(tensor, dtype, name)
    before, after = tensor.view(-1), tensor.view(dtype).view(-1)
    for start in range(0, len(before), _SLICE):
        after[start : start + _SLICE] = _stored(before[start : start + _SLICE], dtype, name)
    return after.view(tensor.shape)


def _rest(job: _Job, work: Work, tell: Callable[[Step], None]) -> None:
    """Embeddings, the last norm, the head: each a piece of its own, so that one at a time is in memory."""
    import torch

    plain, names = getattr(torch, job.dtype), job.skeleton.outside
    begun = sum("rest" in entry for entry in work.done)
    for number, name in enumerate(names[begun:], begun):
        tell(Step("rest", number, len(names)))
        path = work.folder / f"rest-{number:05d}.safetensors"
        written = tensorfile.write(path, {name: _converted(job.source.read(name), plain, name)})
        work.record({"piece": written.name, "rest": name}, [written])
    tell(Step("rest", len(names), len(names)))


def _config_of(job: _Job) -> Mapping[str, Any]:
    config = {key: value for key, value in job.config.items() if key not in ("torch_dtype", "dtype", "auto_map")}
    # Older readers look for torch_dtype, and newer ones for either.
    return {**config, "torch_dtype": job.dtype, "quantization_config": layout.quantization_config(job.group, job.kept)}
