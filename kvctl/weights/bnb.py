"""A model's folder or GGUF file in, a bitsandbytes checkpoint out: INT8 (LLM.int8), NF4 and FP4.

transformers says which layers are packed, bitsandbytes packs them, one tensor after another: no model is ever in memory.
What comes out is what transformers' from_pretrained with a BitsAndBytesConfig and save_pretrained would write.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, KvctlError, SourceError, UsageError
from kvctl.measure.faults import first_line
from kvctl.measure.hush import quiet
from kvctl.record import Record
from kvctl.tensors import Tensor, tensor
from kvctl.units import MIB, format_bytes
from kvctl.weight_formats import four_bits, weight_format
from kvctl.weights import from_gguf, tensorfile
from kvctl.weights.bnb_places import Places, divided
from kvctl.weights.checkpoint import Finish, Work, check_target, discard, open_source

if TYPE_CHECKING:
    import torch

KINDS = ("int8", "nf4", "fp4")
_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_TORCH = {stored: name for name, stored in _DTYPES.items()}
_PIECE = 64 * MIB
"""Bytes that are packed before they are written."""
_TRIMMED = 2**16
"""Weights of a layer from which on what it took is given back at once; of smaller ones it serves the next."""
_SLICE = 2**16
"""Weights that are packed at a time: a multiple of all blocks, so that the same comes out as of the whole."""
_WORKING = {"int8": 11, "nf4": 15, "fp4": 30}
"""Bytes a weight of a slice that bitsandbytes 0.50 takes on a CPU beside the tensor that it packs, at most, by its code
(backends, default/ops.py). INT8: a copy in float16, products with the scales in float32, and these rounded. 4 bits: a copy
in float32, what it is scaled to, the codes as int32, then as bytes and in halves; FP4's codes as int64, twice, before.
"""
_LIBRARIES = 5 * MIB
"""What bitsandbytes, hashing and writing load when they are first used: 4.3 MB and 0.5 to 2 MB on Linux x86_64."""
_OFFSET = 19
"""Characters of a double quantization's offset as JSON has it: 17 to 21 of them."""


class Settings(Record):
    """How a model is quantized."""

    kind: str = "nf4"
    """int8, nf4 or fp4."""
    double: bool = False
    """Of 4 bits: their scales in 8 bits (double quantization)."""
    compute: str | None = None
    """Of 4 bits: the dtype that they are computed in; None: that of what is not packed."""
    threshold: float = 6.0
    """Of INT8: inputs larger than this are multiplied in 16 bits (LLM.int8's outliers); 0: none."""
    skip: tuple[str, ...] = ()
    """Names of modules that stay as they are, or ends of names, beside the head and embeddings, which always do."""
    dtype: str | None = None
    """Of what is not packed; None: as it is stored, and bfloat16 of a GGUF file."""

    def check(self) -> None:
        """Refuses what cannot be.

        Raises:
            UsageError: it cannot.

        """
        if self.kind not in KINDS:
            raise UsageError(f"bitsandbytes makes no {self.kind[:40]!r}", hint=f"one of {', '.join(KINDS)}")
        for name, value in (("compute dtype", self.compute), ("dtype", self.dtype)):
            if value is not None and value not in _DTYPES:
                raise UsageError(f"{name} {value[:40]!r} is not known", hint=f"one of {', '.join(_DTYPES)}")
        if self.kind == "int8" and (self.double or self.compute is not None):
            raise UsageError("double quantization and a compute dtype belong to 4 bits", hint="nf4 or fp4")
        if not 0 <= self.threshold < 65504:
            raise UsageError(f"a threshold of {self.threshold} for outliers", hint="6 is LLM.int8's own")

    @property
    def format_name(self) -> str:
        """What `size --weights-dtype` calls it."""
        return f"{self.kind}-dq" if self.double and self.kind == "nf4" else self.kind

    def for_transformers(self, dtype: str) -> dict[str, Any]:
        """As BitsAndBytesConfig takes them; `dtype` is that of what is not packed."""
        if self.kind == "int8":
            return {"load_in_8bit": True, "llm_int8_threshold": self.threshold}
        return {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": self.kind,
            "bnb_4bit_use_double_quant": self.double,
            "bnb_4bit_compute_dtype": self.compute or dtype,
        }


class Plan(Record):
    """What will be done, from headers alone."""

    dtype: str
    """Of what is not packed, for the most part."""
    packed: int
    """Linear layers."""
    parameters: int
    packed_parameters: int
    kept: tuple[str, ...]
    """Modules that stay."""
    tensor_bytes: int
    """Of the checkpoint."""
    file_bytes: int
    """Of its safetensors files: tensors, what bitsandbytes notes of each, and headers."""
    disk_bytes: int
    """At most, while it works."""
    memory_bytes: int
    """At its peak, beside what Python, torch and transformers take."""
    notes: tuple[str, ...]


class Step(Record):
    """How far it is."""

    stage: str
    """ "dequantize" (of a GGUF file), "pack" or "files"."""
    done: int
    of: int


class Made(Record):
    """A checkpoint that is complete."""

    folder: Path
    files: tuple[Path, ...]
    plan: Plan
    file_bytes: int
    """Of its safetensors files."""
    peak_bytes: int | None
    """Memory at its most, beside what this process had when it began; None where the system does not tell."""


class _Virtual:
    """Tensors that will be: of a GGUF file, as transformers will write them."""

    def __init__(self, places: Places, dtype: str) -> None:
        tied = places.model.all_tied_weights_keys
        state = places.model.state_dict()
        self.shapes = {name: tuple(value.shape) for name, value in state.items() if name not in tied}
        self.dtypes = dict.fromkeys(self.shapes, _DTYPES[dtype])

    def names(self) -> list[str]:
        return list(self.shapes)


def _no_float(what: str, dtype: str) -> ConfigError:
    return ConfigError(f"{what} is stored in {dtype[:20]}, and bitsandbytes packs float16, bfloat16 and float32",
                       hint="quantize the model that it was made of")  # fmt: skip


class _Job:
    """A source, and what becomes of each of its tensors."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings, self.folder = settings, folder
        self.source: Any
        if from_gguf.is_gguf(folder):
            self.config: dict[str, Any] = {}
            self.dtype = settings.dtype or "bfloat16"
            self.places = Places(from_gguf.configuration(folder), settings.for_transformers(self.dtype), settings.skip)
            self.source = _Virtual(self.places, self.dtype)
        else:
            self.source, self.config = open_source(folder)
            self.dtype = settings.dtype or self._most()
            self.places = Places(_configuration(folder), settings.for_transformers(self.dtype), settings.skip)
        self.places.check_words(settings.skip)
        self.modules = self.places.of(self.source)
        odd = next((name for name, module in self.modules.items()
                    if module is not None and self.source.dtypes[name] not in _TORCH), None)  # fmt: skip
        if odd is not None:
            raise _no_float(odd[:120], self.source.dtypes[odd])

    def _most(self) -> str:
        """The dtype of most of what is stored."""
        sizes: dict[str, int] = {}
        for name, dtype in self.source.dtypes.items():
            sizes[dtype] = sizes.get(dtype, 0) + self.source.sizes[name]
        found = max(sizes, key=lambda dtype: sizes[dtype])
        if found not in _TORCH:
            raise _no_float("most of it", found)
        return _TORCH[found]

    def stored_dtype(self, name: str) -> str:
        """Of a tensor that is not packed, or of one before it is."""
        own: str = self.source.dtypes[name]
        # What is in float32 beside 16 bits is so for a reason (corrections of routers, decays).
        keeps = self.settings.dtype is None or own not in _TORCH or (own == "F32" and self._most() != "float32")
        return own if keeps else _DTYPES[self.settings.dtype or self.dtype]

    def predicted(self) -> dict[str, Tensor]:
        """All tensors of the checkpoint."""
        kind = self.settings.kind
        pack = weight_format("int8").pack if kind == "int8" else four_bits(double=self.settings.double)
        assert pack is not None
        out: dict[str, Tensor] = {}
        for name, module in self.modules.items():
            dtype, shape = self.stored_dtype(name), self.source.shapes[name]
            if module is None:
                out[name] = tensor(name, shape, dtype)
                continue
            rows, columns = self.places.linears[module].out_features, self.places.linears[module].in_features
            for part in pack(tensor(name, (rows, columns), dtype), rows, columns):
                if not part.name.endswith(".nested_offset"):  # in the words below
                    out[part.name] = part
            words, size = self._beside(name, (rows, columns), dtype)
            out[words] = tensor(words, size, "U8")
        return out

    def _beside(self, name: str, shape: tuple[int, int], dtype: str) -> tuple[str, tuple[int, ...]]:
        """What bitsandbytes notes beside a layer's tensors."""
        if self.settings.kind == "int8":
            return f"{name.removesuffix('.weight')}.weight_format", ()
        words: dict[str, Any] = {
            "quant_type": self.settings.kind,
            "blocksize": 64,
            "dtype": _TORCH[dtype],
            "shape": shape,
        }
        length = len(json.dumps(words))
        if self.settings.double:
            words = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0}
            length += len(json.dumps(words)) - 1 + _OFFSET - 1
        return f"{name}.quant_state.bitsandbytes__{self.settings.kind}", (length,)

    def pieces(self) -> Iterator[list[str]]:
        """Names of tensors that are written together."""
        batch: list[str] = []
        size = 0
        for name in self.modules:
            batch.append(name)
            size += self.own_bytes(name)
            if size >= _PIECE:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def own_bytes(self, name: str) -> int:
        """Of a tensor in the source."""
        return tensor(name, self.source.shapes[name], self.source.dtypes[name]).bytes

    def memory(self) -> int:
        """What there is at the most: of a piece what came of it so far, and what bitsandbytes takes for the tensor at
        hand beside the tensor.
        """
        kind = self.settings.kind
        bits = 8 if kind == "int8" else 5
        most = 0
        for names in self.pieces():
            held = 0
            for name in names:
                dtype, count = self.stored_dtype(name), math.prod(self.source.shapes[name])
                own = self.own_bytes(name)
                if self.modules[name] is None:
                    kept = tensor(name, (count,), dtype).bytes
                    most = max(most, held + own + (0 if dtype == self.source.dtypes[name] else kept))
                    held += kept
                else:
                    held += count * bits // 8  # there from the first slice on
                    whole = own if dtype == self.source.dtypes[name] else own + tensor(name, (count,), dtype).bytes
                    most = max(most, held + whole + min(count, _SLICE) * _WORKING[kind])
        return most + _LIBRARIES


def _configuration(folder: Path) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"transformers cannot read the configuration: {first_line(error)}") from None


def check_installed() -> None:
    """Refuses where bitsandbytes is missing.

    Raises:
        UsageError: it is.

    """
    from importlib.util import find_spec

    for name in ("torch", "transformers", "accelerate", "bitsandbytes"):
        if find_spec(name) is None:
            raise UsageError(f"int8, nf4 and fp4 need {name}", hint=f"pip install {name}")


def plan(source: Path, settings: Settings) -> Plan:
    """What `make` would do; reads headers alone.

    Raises:
        UsageError: settings that cannot be.
        ConfigError: no language model, or one that is quantized already.
        SourceError: weights that are missing or broken.

    """
    settings.check()
    check_installed()
    with quiet():
        return _plan(_Job(source, settings), source)


def _plan(job: _Job, source: Path) -> Plan:
    predicted = job.predicted()
    total = sum(one.bytes for one in predicted.values())
    headers = tensorfile.header_bytes({name: (one.dtype, one.shape, one.bytes) for name, one in predicted.items()})
    shapes = {name: math.prod(job.source.shapes[name]) for name in job.modules}
    packed = [name for name, module in job.modules.items() if module is not None]
    notes, disk, memory = [], 2 * (total + headers), job.memory()
    if from_gguf.is_gguf(source):
        said = from_gguf.note(source)
        notes += [said] if said else []
        count = from_gguf.elements(source)
        disk += count * tensor("", (1,), _DTYPES[job.dtype]).bytes
        memory = max(memory, 4 * count)
    elif not any(path for pattern in ("tokenizer*", "vocab.*", "*.model") for path in source.glob(pattern)):
        notes.append("its folder has no tokenizer, and neither will the checkpoint")
    if job.settings.kind == "int8" and job.dtype == "float32":
        notes.append("LLM.int8 computes in float16, whatever the rest is in")
    odd = {name.rpartition(".")[2]: f"{one.out_features:,} × {one.in_features:,}" for name, one in job.places.linears.items()
           if not divided(one.out_features, one.in_features)}  # fmt: skip
    if odd and job.settings.kind != "int8":
        notes.append("bitsandbytes 0.50 fails on CPUs with AVX512-BF16 where outputs are no multiple of 32 or inputs none of 64: "
                     + ", ".join(f"{name} ({shape})" for name, shape in sorted(odd.items())))  # fmt: skip
    left = {type(module).__name__ for name, module in job.places.model.named_modules() if name.endswith(".experts")}
    if left:
        notes.append(
            "bitsandbytes in transformers 5 packs linear layers and leaves the experts of a mixture as they are"
        )
    return Plan(job.dtype, len(packed), sum(shapes.values()), sum(shapes[name] for name in packed), tuple(job.places.kept),
                total, total + headers, disk, memory, tuple(notes))  # fmt: skip


def make(
    source: Path,
    target: Path,
    settings: Settings,
    *,
    progress: Callable[[Step], None] | None = None,
    force: bool = False,
    finish: Finish | None = None,
) -> Made:
    """Quantize the model in folder or GGUF file `source` and write the checkpoint to folder `target`; `finish`: see
    `Work.publish`.

    What fails, or is interrupted, leaves nothing. The same model and settings give the same bytes.

    Raises:
        UsageError: settings that cannot be, or a target that is there.
        ConfigError: no language model, or one that is quantized already.
        SourceError: weights that are missing, broken or not finite.
        KvctlError: memory or the disk does not suffice.

    """
    from kvctl.measure.memory import HighWater, give_back

    settings.check()
    check_installed()
    check_target(target, source, force)
    tell = progress or (lambda step: None)
    with quiet():
        job = _Job(source, settings)
        will = _plan(job, source)
        _check_room(will, target)
        _warm_up(settings)
        give_back()
        begun = _resident()
        mark = HighWater()
        work = Work(target, "bnb", {}, resume=False)
        try:
            if from_gguf.is_gguf(source):
                tell(Step("dequantize", 0, 1))
                plain = work.folder / "plain"
                from_gguf.convert(source, plain, job.dtype)
                tell(Step("dequantize", 1, 1))
                job = _Job(plain, settings.replace(dtype=None))
            pieces, done = [], 0
            for number, names in enumerate(job.pieces()):
                pieces.append(
                    _write(job, work, number, names, lambda at: tell(Step("pack", at, len(job.modules))), done)
                )
                done += len(names)
            tell(Step("files", 0, 1))
            files = work.publish(job.folder, _config_of(job), pieces, finish)
            tell(Step("files", 1, 1))
        except BaseException:
            discard(target)
            raise
        finally:
            work.close()
    peak = mark.read()
    size = sum(path.stat().st_size for path in files if path.suffix == ".safetensors")
    return Made(target, files, will, size, None if peak is None else max(peak - begun, 0))


def _warm_up(settings: Settings) -> None:
    """Libraries load what they need when they first pack something: that is theirs, and not the model's."""
    import bitsandbytes
    import torch

    value = torch.zeros(64, 64)
    if settings.kind == "int8":
        bitsandbytes.nn.Int8Params(value, requires_grad=False).to("cpu")
    else:
        bitsandbytes.nn.Params4bit(
            value, requires_grad=False, quant_type=settings.kind, compress_statistics=settings.double
        ).to("cpu")


def _resident() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _check_room(will: Plan, target: Path) -> None:
    import shutil

    from kvctl.hardware.host import host_device

    free = host_device().available_bytes
    if will.memory_bytes > free:
        raise KvctlError(f"it takes {format_bytes(will.memory_bytes)} of memory, and {format_bytes(free)} are free",
                         hint="a machine with more memory, or a folder of safetensors, which is read tensor by tensor")  # fmt: skip
    room = shutil.disk_usage(target.parent).free
    if will.disk_bytes > room:
        raise KvctlError(f"it takes {format_bytes(will.disk_bytes)} on the disk while it works, and {format_bytes(room)} are free",
                         hint="another place for the target")  # fmt: skip


def _write(job: _Job, work: Work, number: int, names: list[str], tell: Callable[[int], None], done: int) -> str:
    """Pack these tensors, or take them as they are, and write them to a file of their own."""
    import torch

    out: dict[str, torch.Tensor] = {}
    for at, name in enumerate(names, done):
        tell(at)
        value = job.source.read(name)
        _check_finite(name, value)
        wanted = getattr(torch, _TORCH.get(job.stored_dtype(name), ""), value.dtype)
        value = value.to(wanted)
        module = job.modules[name]
        if module is None:
            _check_finite(name, value, after=True)
            out[name] = value
        else:
            out |= _packed(name.removesuffix(".weight"), value, job.places.linears[module])
    written = tensorfile.write(work.folder / f"piece-{number:05d}.safetensors", out)
    tell(done + len(names))
    return written.name


def _packed(name: str, value: torch.Tensor, like: Any) -> dict[str, torch.Tensor]:
    """bitsandbytes' own tensors for a layer's weight, under the names that it gives them."""
    import torch

    from kvctl.measure.memory import trim

    from_conv1d = type(like.source_cls) is type and like.source_cls is not torch.nn.Linear
    value = value.T.contiguous() if from_conv1d else value
    out = _int8(name, value) if like.weight.__class__.__name__ == "Int8Params" else _four_bits(name, value, like.weight)
    if value.numel() >= _TRIMMED:
        trim()
    for key in ("SCB", "weight.absmax", "weight.nested_absmax"):
        if f"{name}.{key}" in out:
            _check_finite(f"{name}.{key}", out[f"{name}.{key}"], after=True)
    return out


def _four_bits(name: str, value: torch.Tensor, like: Any) -> dict[str, torch.Tensor]:
    """As Params4bit has it, whose scales are quantized together where they are."""
    import torch
    from bitsandbytes import functional

    flat = value.reshape(-1)
    codes = torch.empty(-(-flat.numel() // 2), 1, dtype=torch.uint8)
    scales = torch.empty(-(-flat.numel() // like.blocksize))
    for start in range(0, flat.numel(), _SLICE):
        part, of_part = functional.quantize_4bit(
            flat[start : start + _SLICE], blocksize=like.blocksize, quant_type=like.quant_type
        )
        codes[start // 2 : start // 2 + len(part)] = part
        first = start // like.blocksize
        scales[first : first + len(of_part.absmax)] = of_part.absmax
    more: dict[str, Any] = {}
    if like.compress_statistics:
        offset = scales.mean()
        scales, nested = functional.quantize_blockwise(scales - offset, blocksize=256)
        more = {"offset": offset, "state2": nested}
    state = functional.QuantState(
        scales, value.shape, functional.get_4bit_type(like.quant_type, device="cpu"), like.blocksize, like.quant_type,
        value.dtype, **more,
    )  # fmt: skip
    return {f"{name}.weight": codes} | {
        f"{name}.weight.{key}": part for key, part in state.as_dict(packed=True).items()
    }


def _int8(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """As Int8Params has it: a scale for each row."""
    import torch
    from bitsandbytes import functional

    codes, scales = torch.empty(value.shape, dtype=torch.int8), torch.empty(len(value))
    step = max(1, _SLICE // value.shape[1])
    for start in range(0, len(value), step):
        part = functional.int8_vectorwise_quant(value[start : start + step].to(torch.float16))
        codes[start : start + step], scales[start : start + step] = part[0], part[1]
    # The format is that of rows, which Linear8bitLt calls 0.
    return {
        f"{name}.weight": codes,
        f"{name}.SCB": scales,
        f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def _check_finite(name: str, value: torch.Tensor, after: bool = False) -> None:
    import torch

    if not value.is_floating_point() or not value.numel():
        return
    least, most = torch.aminmax(value)
    if bool(torch.isfinite(least)) and bool(torch.isfinite(most)):
        return
    if after:
        raise KvctlError(f"{name[:120]} has numbers that float16 does not hold", hint="nf4 takes weights in bfloat16")
    raise SourceError(f"{name[:120]} has numbers that are not finite", hint="download it again")


def _config_of(job: _Job) -> Mapping[str, Any]:
    config = {key: value for key, value in job.config.items() if key not in ("torch_dtype", "dtype", "auto_map")}
    # Older readers look for torch_dtype, and newer ones for either.
    return {**config, "torch_dtype": job.dtype, "quantization_config": job.places.settings.to_dict()}
