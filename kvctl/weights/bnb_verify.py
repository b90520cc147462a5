"""Whether a bitsandbytes checkpoint holds what it should: names, shapes, dtypes, finite numbers, and the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.errors import SourceError
from kvctl.record import Record
from kvctl.sources import jsonfile, safetensors
from kvctl.tensors import tensor
from kvctl.weight_formats import four_bits, weight_format
from kvctl.weights import bnb_reference as reference
from kvctl.weights.bnb_places import Places
from kvctl.weights.checkpoint import open_source
from kvctl.weights.tensorfile import Source

if TYPE_CHECKING:
    import torch

_WRONG = "the file is not what was written: quantize again"
_DTYPES = ("float16", "bfloat16", "float32")
_AT_ONCE = 2**22
"""Weights that are compared at a time."""
_SLACK = 1.02
"""Over half a gap: scales are rounded, and so are the weights before."""


class Checked(Record):
    """What a checkpoint has."""

    packed: int
    """Linear layers."""
    tensors: int
    tensor_bytes: int
    farthest: float | None
    """Of all packed weights from the original's, the most, in what rounding may do at most; None without an original."""


def check(folder: Path, original: Path | None = None) -> Checked:
    """Whether a folder is a complete bitsandbytes checkpoint, by the model's own class and a dequantizer of kvctl's own.

    With `original` (a folder) its packed weights must be what rounding that folder's can give, and all others the same.

    Raises:
        SourceError: it is not.

    """
    from kvctl.measure.hush import quiet

    with quiet():
        return _Check(folder).run(original)


class _Check:
    def __init__(self, folder: Path) -> None:
        import transformers

        config = jsonfile.read_file(folder / "config.json")
        facts = config.get("quantization_config")
        if not isinstance(facts, dict) or facts.get("quant_method") != "bitsandbytes":
            raise SourceError(f"{jsonfile.plain(str(folder))} is no bitsandbytes checkpoint")
        self.source = Source(folder, safetensors.named_files(folder))
        self.kind = "int8" if facts.get("load_in_8bit") else str(facts.get("bnb_4bit_quant_type"))
        self.double = bool(facts.get("bnb_4bit_use_double_quant"))
        self.dtype = str(config.get("torch_dtype") or config.get("dtype"))
        built = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
        del built.quantization_config
        settings = {
            name: facts[name] for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type") if name in facts
        }
        self.places = Places(built, settings, facts.get("llm_int8_skip_modules") or ())

    def run(self, original: Path | None) -> Checked:
        rules = weight_format("int8").pack if self.kind == "int8" else four_bits(double=self.double)
        assert rules is not None
        source = self.source
        plain = set(source.names())
        modules = self._modules()
        for name, module in modules.items():
            like = self.places.linears[module]
            rows, columns = like.out_features, like.in_features
            for part in rules(tensor(f"{name}.weight", (rows, columns), "BF16"), rows, columns):
                if part.name.endswith(".nested_offset"):
                    continue
                if part.name not in source:
                    raise SourceError(f"{part.name} is missing", hint=_WRONG)
                found = (source.dtypes[part.name], source.shapes[part.name])
                if found != (part.dtype, part.shape):
                    raise SourceError(
                        f"{part.name} is {found[0]} {found[1]}, not {part.dtype} {part.shape}", hint=_WRONG
                    )
                plain.discard(part.name)
            plain -= {f"{name}.weight_format", f"{name}.weight.quant_state.bitsandbytes__{self.kind}"}
            self._check_words(name, (rows, columns))
        for name in sorted(plain):
            if source.dtypes[name] not in ("BF16", "F16", "F32"):
                raise SourceError(f"{name} is {source.dtypes[name]}, and belongs to no packed layer", hint=_WRONG)
            _check_finite(name, source.read(name))
        far = None if original is None else self._compare(original, modules, plain)
        return Checked(len(modules), len(source.names()), sum(source.sizes.values()), far)

    def _modules(self) -> dict[str, str]:
        """Packed layers by their names in the file; all that should be, and no other."""
        end = "SCB" if self.kind == "int8" else "weight.absmax"
        weights = [f"{name.removesuffix('.' + end)}.weight" for name in self.source.names() if name.endswith(f".{end}")]
        found = {name.removesuffix(".weight"): module for name, module in self.places.linears_of(weights).items()}
        missing = set(self.places.linears) - set(found.values())
        if missing:
            raise SourceError(f"{min(missing)} is not packed", hint=_WRONG)
        return found

    def _check_words(self, name: str, shape: tuple[int, int]) -> None:
        if self.kind == "int8":
            _check_finite(f"{name}.SCB", self.source.read(f"{name}.SCB"))
            return
        parts = self._parts(name)
        facts = reference.words(parts[f"quant_state.bitsandbytes__{self.kind}"])
        if (facts.get("quant_type"), facts.get("blocksize"), tuple(facts.get("shape", ()))) != (self.kind, 64, shape):
            raise SourceError(f"{name}: its quant_state is not that of {self.kind} in blocks of 64", hint=_WRONG)
        book = parts["quant_map"]
        if max(abs(a - b) for a, b in zip(book.tolist(), reference.BOOKS[self.kind], strict=True)) > 1e-6:
            raise SourceError(f"{name}: its code book is not {self.kind}'s", hint=_WRONG)
        scales = reference.absmax(parts, facts)
        if not (abs(scales) < float("inf")).all():
            raise SourceError(f"{name} has scales that are not finite", hint=_WRONG)

    def _parts(self, name: str) -> dict[str, Any]:
        start = f"{name}.weight."
        return {
            one.removeprefix(start): self.source.read(one).numpy()
            for one in self.source.names()
            if one.startswith(start)
        }

    def _compare(self, original: Path, modules: Mapping[str, str], plain: set[str]) -> float:
        import torch

        before, _ = open_source(original)
        most = 0.0
        for name, module in modules.items():
            weight = before.read(f"{name}.weight")
            if self.places.linears[module].source_cls is not torch.nn.Linear:
                weight = weight.T  # a Conv1D's lies the other way round
            far = min(max(self._far(name, rounded.contiguous())) for rounded in self._rounded(name, weight))
            if not far <= _SLACK:
                raise SourceError(f"{name} does not stand for the original's weights", hint=_WRONG)
            most = max(most, far)
        for name in plain:
            if name in before and not torch.equal(
                before.read(name).to(self.source.read(name).dtype), self.source.read(name)
            ):
                raise SourceError(f"{name} is not the original's", hint=_WRONG)
        return most

    def _rounded(self, name: str, weight: torch.Tensor) -> Iterator[torch.Tensor]:
        """A weight in what it may have been rounded to before it was packed: of 4 bits the words beside it tell."""
        import torch

        own = str(weight.dtype).removeprefix("torch.")
        if self.kind == "int8":
            kinds = [own, self.dtype]  # what is in float32 beside 16 bits stays so
        else:
            kinds = [str(reference.words(self._parts(name)[f"quant_state.bitsandbytes__{self.kind}"]).get("dtype"))]
        for kind in dict.fromkeys(kind if kind in _DTYPES else own for kind in kinds):
            yield weight.to(getattr(torch, kind))

    def _far(self, name: str, weight: torch.Tensor) -> Iterator[float]:
        """How far some weights at a time are from what they should be, in what rounding may do."""
        import numpy as np

        if self.kind == "int8":
            rows = max(1, _AT_ONCE // weight.shape[1])
            packed, scales = (self.source.read(f"{name}.{part}").numpy() for part in ("weight", "SCB"))
            for at in range(0, len(weight), rows):
                some, scale = weight[at : at + rows].half().float().numpy(), scales[at : at + rows]
                gap = np.abs(reference.int8(packed[at : at + rows], scale) - some).max(1)
                # Products of a row are rounded in float32.
                yield float((gap / np.maximum(scale / 254 + scale * 1e-6, 1e-30)).max())
            return
        parts, flat = self._parts(name), weight.view(-1)
        scales = reference.absmax(parts, reference.words(parts[f"quant_state.bitsandbytes__{self.kind}"]))
        off = reference.rounding(parts, len(scales))
        packed = self.source.read(f"{name}.weight").numpy()
        for at in range(0, len(flat), _AT_ONCE):
            some = flat[at : at + _AT_ONCE].float().numpy()
            gap = np.abs(reference.four_bits(packed, scales, self.kind, at, len(some)) - some)
            blocks = np.maximum.reduceat(np.abs(some), np.arange(0, len(some), reference.BLOCK))
            error = np.abs(blocks - scales[at // reference.BLOCK :][: len(blocks)])
            if (error > blocks * 1e-6 + off[at // reference.BLOCK :][: len(blocks)]).any():
                raise SourceError(f"{name} has scales that are not its blocks' largest weights", hint=_WRONG)
            # The ends of the code feel scales that are rounded themselves.
            allowed = reference.FARTHEST[self.kind] * blocks + error + 1e-30
            yield float((np.maximum.reduceat(gap, np.arange(0, len(some), reference.BLOCK)) / allowed).max())


def _check_finite(name: str, value: torch.Tensor) -> None:
    import torch

    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise SourceError(f"{name} has numbers that are not finite", hint=_WRONG)
