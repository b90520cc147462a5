"""Whether packed files hold what they should, by the reference dequantizer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.errors import KvctlError, SourceError
from kvctl.record import Record
from kvctl.sources import jsonfile, safetensors
from kvctl.weights.awq import reference
from kvctl.weights.tensorfile import Source

if TYPE_CHECKING:
    import torch

_PARTS = ("qweight", "qzeros", "scales")
_WRONG = "the file is not what was written: quantize again"


class Dequantized(Source):
    """An AWQ checkpoint as if it were not packed: each packed layer is one tensor, [outputs, inputs] in float32."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        super().__init__(folder, files)
        self.stored = dict(self.shapes)
        self.packed = [name.removesuffix(".qweight") for name in self.shapes if name.endswith(".qweight")]
        for module in self.packed:
            missing = [part for part in _PARTS if f"{module}.{part}" not in self.stored]
            if missing:
                raise SourceError(f"{module} lacks {missing[0]}", hint=_WRONG)
            inputs, words = self.stored[f"{module}.qweight"]
            for part in _PARTS:
                del self.shapes[f"{module}.{part}"]
            self.shapes[f"{module}.weight"] = (inputs, 8 * words)[::-1]

    def names(self) -> list[str]:
        return list(self.shapes)

    def read(self, name: str) -> torch.Tensor:
        module = name.removesuffix(".weight")
        if f"{module}.qweight" not in self.stored:
            return super().read(name)
        import torch

        words, zeros, scales = (super(Dequantized, self).read(f"{module}.{part}") for part in _PARTS)
        # Others' scales may be bfloat16, which numpy has not.
        return torch.from_numpy(reference.dequantize(words.numpy(), zeros.numpy(), scales.float().numpy()))


def check_packed(path: Path, wanted: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Whether a file's packed layers stand for exactly these weights [outputs, inputs], looked at one after another.

    Raises:
        KvctlError: one does not.

    """
    import torch

    source = Dequantized(path.parent, [path])
    for module, weight in wanted:
        found = source.read(f"{module}.weight")
        if found.shape != weight.shape or not torch.equal(found, weight):
            raise KvctlError(
                f"{path.name}: {module} was not packed as it should be", hint="a fault of the disk, or kvctl's"
            )


class Checked(Record):
    """What a checkpoint has."""

    packed: int
    """Linear layers."""
    tensors: int
    tensor_bytes: int
    group: int


def check(folder: Path) -> Checked:
    """Whether a folder is a complete AWQ checkpoint: names, shapes, dtypes and finite numbers, by the model's own class.

    Raises:
        KvctlError: it is not.

    """
    source, facts, _ = _opened(folder)
    group = facts.get("group_size")
    if (facts.get("bits"), facts.get("version"), facts.get("zero_point")) != (4, "gemm", True) or not isinstance(
        group, int
    ):
        raise SourceError(
            f"{jsonfile.plain(str(folder))}: its quantization_config is not AWQ's of 4 bits, version gemm"
        )
    plain = {"F16", "BF16"}
    for name in source.stored:
        module, _, part = name.rpartition(".")
        kind = source.dtypes[name]
        if module in source.packed and part in _PARTS:
            inputs, words = source.stored[f"{module}.qweight"]
            rows = inputs if part == "qweight" else inputs // group
            shape = (rows, 8 * words if part == "scales" else words)
            if source.stored[name] != shape or kind != ("F16" if part == "scales" else "I32"):
                raise SourceError(f"{name} is {kind} {source.stored[name]}, not {shape}", hint=_WRONG)
        elif kind not in plain:
            raise SourceError(f"{name} is {kind}, and neither packed nor float16", hint=_WRONG)
        if kind in plain:
            _check_finite(source, name, positive=part == "scales")
    _check_modules(source, folder)
    return Checked(len(source.packed), len(source.stored), sum(source.sizes.values()), group)


def _check_finite(source: Dequantized, name: str, positive: bool) -> None:
    least, greatest = map(float, super(Dequantized, source).read(name).aminmax())
    if not (math.isfinite(least) and math.isfinite(greatest)) or (positive and least <= 0):
        raise SourceError(f"{name} has numbers that are not {'positive' if positive else 'finite'}", hint=_WRONG)


def _check_modules(source: Dequantized, folder: Path) -> None:
    """Packed is what should be, and nothing is missing, by the class that runs the model."""
    from kvctl.weights.awq.structure import sites

    skeleton = _skeleton(folder, source)
    wanted = {
        f"{skeleton.name_of(index)}.{slot.name}"
        for index, layer in enumerate(skeleton.layers)
        for site in sites(layer, skeleton.known, skeleton.config)
        for slot in site.slots
    }
    odd = wanted ^ set(source.packed)
    if odd:
        name = min(odd)
        raise SourceError(f"{name} {'is not packed' if name in wanted else 'should not be packed'}", hint=_WRONG)


def _opened(folder: Path) -> tuple[Dequantized, Mapping[str, Any], dict[str, Any]]:
    config = jsonfile.read_file(folder / "config.json")
    facts = config.get("quantization_config")
    if not isinstance(facts, dict) or facts.get("quant_method") != "awq":
        raise SourceError(f"{jsonfile.plain(str(folder))} is no AWQ checkpoint")
    return Dequantized(folder, safetensors.named_files(folder)), facts, config


def _skeleton(folder: Path, source: Source) -> Any:
    import transformers

    from kvctl.weights.awq.structure import architecture
    from kvctl.weights.skeleton import Skeleton

    config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return Skeleton(config, source, architecture(config.to_dict()))


def load_dequantized(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' plain model with the weights that an AWQ checkpoint stands for: what any kernel should compute."""
    source, _, _ = _opened(folder)
    return plain_model(folder, source, dtype)


def plain_model(folder: Path, source: Source, dtype: torch.dtype) -> Any:
    """transformers' model of a folder's configuration, not packed, with the weights that `source` has."""
    model: Any = _skeleton(folder, source).filled_model(dtype)
    return model
