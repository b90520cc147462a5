"""What backends' packed tensors mean, read slowly, and what rounding to nearest makes in the same format.

Sources: AutoGPTQ's QuantLinear (GPTQ), and compressed-tensors' formats as its documentation and vLLM's loaders have them.
Shares nothing with any backend, nor with a kernel. AWQ has a reader of its own (kvctl.weights.verify).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.errors import SourceError
from kvctl.record import Record
from kvctl.sources import jsonfile, safetensors
from kvctl.weights.tensorfile import Source

if TYPE_CHECKING:
    import torch

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP8_TOP = 448.0
_SAME, _NEAR = 1.02, 1.15
"""Of 8 bits llm-compressor rounds as is done here, and measures the same to the last digit; of 4 bits it rounds a block's
scale, or the whole tensor's, otherwise: NVFP4 measures up to 1.03 times what is rounded here, MXFP4 less.
"""
_WRONG = "the backend wrote what its format does not allow: nothing was kept"
Shapes = Mapping[str, tuple[tuple[int, ...], ...]]


class Layout(Record):
    """How a format stores a linear layer of [outputs, inputs]."""

    method: str
    """quant_method in config.json."""
    format: str
    """Its format, where it says one."""
    parts: Callable[[int, int, int], Mapping[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]]
    """Of outputs, inputs and group: suffix -> dtypes and shapes that it may have."""
    optional: Mapping[str, tuple[str, ...]]
    decode: Callable[[Mapping[str, Any], int], Any]
    nearest: Callable[[Any, int], Any]
    group: int
    """0: as the checkpoint says."""
    slack: float
    """How much worse than rounding to nearest it may measure: how scales are rounded differs a little."""


def _unpack(words: torch.Tensor, dim: int) -> torch.Tensor:
    """Eight codes of 4 bits from each int32, lowest first, along a dimension."""
    import torch

    codes = torch.stack([(words >> shift) & 15 for shift in range(0, 32, 4)], dim + 1)
    return codes.flatten(dim, dim + 1)


def _decode_gptq(parts: Mapping[str, Any], group: int) -> torch.Tensor:
    import torch

    codes = _unpack(parts["qweight"], 0)  # [inputs, outputs]
    zeros = (_unpack(parts["qzeros"], 1) + 1) & 15  # stored less one
    of = parts["g_idx"].long() if "g_idx" in parts else torch.arange(len(codes)) // group
    return ((codes - zeros[of]).float() * parts["scales"].float()[of]).T.contiguous()


def _decode_scaled(parts: Mapping[str, Any], _: int) -> torch.Tensor:
    out: torch.Tensor = parts["weight"].float() * parts["weight_scale"].float()
    return out


def _fp4(packed: torch.Tensor) -> torch.Tensor:
    import torch

    table = torch.tensor([*_FP4, *(-value for value in _FP4)])
    return table[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]


def _blocks(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, width = values.shape
    return (values.view(rows, scales.shape[1], -1) * scales[..., None]).view(rows, width)


def _decode_nvfp4(parts: Mapping[str, Any], _: int) -> torch.Tensor:
    return _blocks(_fp4(parts["weight_packed"]), parts["weight_scale"].float() / parts["weight_global_scale"].float())


def _decode_mxfp4(parts: Mapping[str, Any], _: int) -> torch.Tensor:
    import torch

    return _blocks(_fp4(parts["weight_packed"]), torch.exp2(parts["weight_scale"].float() - 127))


def _nearest_fp4(values: torch.Tensor) -> torch.Tensor:
    import torch

    table = torch.tensor(_FP4)
    middles = (table[1:] + table[:-1]) / 2
    return table[torch.bucketize(values.abs().contiguous(), middles)] * values.sign()


def _nearest_gptq(weight: torch.Tensor, group: int) -> torch.Tensor:
    parts = weight.view(weight.shape[0], -1, group)
    scales = (parts.abs().amax(-1, keepdim=True) * 2 / 15).clamp_min(1e-8)
    return ((parts / scales).round().clamp(-8, 7) * scales).view_as(weight)


def _steps(weight: torch.Tensor, dim: int | None, top: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, and weights divided by them, both rounded to the weights' dtype, as llm-compressor has them.

    In bfloat16 quotients between 64 and 128 are multiples of a half, and INT8's codes are the even one of two far more
    often: of small models up to 1.3 times the error of quotients in float32.
    """
    import torch

    most = weight.abs()
    scales = (most.amax() if dim is None else most.amax(dim, keepdim=True)) / top
    scales = scales.clamp_min(torch.finfo(weight.dtype).tiny)
    return (weight / scales).float(), scales.float()


def _nearest_int8(weight: torch.Tensor, _: int) -> torch.Tensor:
    codes, scales = _steps(weight, 1, 127.5)
    return codes.round().clamp(-128, 127) * scales


def _eight_bits(weight: torch.Tensor, dim: int | None) -> torch.Tensor:
    import torch

    codes, scales = _steps(weight, dim, _FP8_TOP)
    return codes.clamp(-_FP8_TOP, _FP8_TOP).to(torch.float8_e4m3fn).float() * scales


def _nearest_fp8(weight: torch.Tensor, _: int) -> torch.Tensor:
    return _eight_bits(weight, 1)


def _nearest_fp8_tensor(weight: torch.Tensor, _: int) -> torch.Tensor:
    return _eight_bits(weight, None)


def _nearest_nvfp4(weight: torch.Tensor, group: int) -> torch.Tensor:
    import torch

    whole = _FP8_TOP * 6 / weight.abs().amax().clamp_min(1e-12)
    parts = weight.view(weight.shape[0], -1, group)
    scales = (parts.abs().amax(-1, keepdim=True) / 6 * whole).to(torch.float8_e4m3fn).float().clamp_min(2.0**-9) / whole
    return (_nearest_fp4(parts / scales) * scales).view_as(weight)


def _nearest_mxfp4(weight: torch.Tensor, group: int) -> torch.Tensor:
    import torch

    parts = weight.view(weight.shape[0], -1, group)
    scales = torch.exp2(parts.abs().amax(-1, keepdim=True).clamp_min(2.0**-125).log2().floor() - 2)
    return (_nearest_fp4(parts / scales) * scales).view_as(weight)


_FLOATS = ("F16", "BF16", "F32")
_LOOSE = {"input_scale": _FLOATS, "input_global_scale": _FLOATS}

LAYOUTS: dict[str, Layout] = {
    "gptq": Layout(
        "gptq", "gptq",
        lambda rows, width, group: {
            "qweight": (("I32",), ((width // 8, rows),)), "qzeros": (("I32",), ((width // group, rows // 8),)),
            "scales": (("F16", "BF16"), ((width // group, rows),)), "g_idx": (("I32",), ((width,),)),
        },
        {}, _decode_gptq, _nearest_gptq, 0, 1.0,
    ),
    "fp8": Layout(
        "compressed-tensors", "float-quantized",
        lambda rows, width, _: {"weight": (("F8_E4M3",), ((rows, width),)), "weight_scale": (_FLOATS, ((rows, 1),))},
        {}, _decode_scaled, _nearest_fp8, 0, _SAME,
    ),
    "fp8-static": Layout(
        "compressed-tensors", "float-quantized",
        lambda rows, width, _: {"weight": (("F8_E4M3",), ((rows, width),)), "weight_scale": (_FLOATS, ((1,), ())),
                                "input_scale": (_FLOATS, ((1,), ()))},
        {}, _decode_scaled, _nearest_fp8_tensor, 0, _SAME,
    ),
    "int8-w8a8": Layout(
        "compressed-tensors", "int-quantized",
        lambda rows, width, _: {"weight": (("I8",), ((rows, width),)), "weight_scale": (_FLOATS, ((rows, 1),))},
        {}, _decode_scaled, _nearest_int8, 0, _SAME,
    ),
    "nvfp4": Layout(
        "compressed-tensors", "nvfp4-pack-quantized",
        lambda rows, width, _: {"weight_packed": (("U8",), ((rows, width // 2),)),
                                "weight_scale": (("F8_E4M3",), ((rows, width // 16),)),
                                "weight_global_scale": (_FLOATS, ((1,), ()))},
        _LOOSE, _decode_nvfp4, _nearest_nvfp4, 16, _NEAR,
    ),
    "mxfp4": Layout(
        "compressed-tensors", "mxfp4-pack-quantized",
        lambda rows, width, _: {"weight_packed": (("U8",), ((rows, width // 2),)),
                                "weight_scale": (("U8",), ((rows, width // 32),))},
        _LOOSE, _decode_mxfp4, _nearest_mxfp4, 32, _NEAR,
    ),
}  # fmt: skip


class Decoded(Source):
    """A checkpoint as if its linear layers were not packed: [outputs, inputs] in float32."""

    def __init__(self, folder: Path, files: Sequence[Path], layout: Layout, linear: Mapping[str, tuple[int, int]],
                 group: int) -> None:  # fmt: skip
        """`linear`: the shapes of layers that have to be packed, by their whole names.

        Raises:
            SourceError: one is not, or not as its format says; others are.

        """
        super().__init__(folder, files)
        self.layout, self.group = layout, layout.group or group
        self.parts: dict[str, list[str]] = {}
        for module, (rows, width) in linear.items():
            self._check(module, layout.parts(rows, width, self.group))
            for suffix in self.parts[module]:
                del self.shapes[f"{module}.{suffix}"]
            self.shapes[f"{module}.weight"] = (rows, width)
        for name in self.shapes:
            kind = self.dtypes.get(name, "F32")
            if name.removesuffix(".weight") not in linear and kind not in _FLOATS:
                raise SourceError(f"{jsonfile.plain(name)} is {kind}, and should not be packed", hint=_WRONG)

    def _check(self, module: str, wanted: Mapping[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]) -> None:
        for suffix, (dtypes, shapes) in wanted.items():
            name = f"{module}.{suffix}"
            if name not in self.dtypes:
                raise SourceError(f"{module} lacks {suffix}", hint=_WRONG)
            if self.dtypes[name] not in dtypes or self.shapes[name] not in shapes:
                raise SourceError(
                    f"{name} is {self.dtypes[name]} {self.shapes[name]}, not {dtypes[0]} {shapes[0]}", hint=_WRONG
                )
        self.parts[module] = [
            *wanted,
            *(suffix for suffix in self.layout.optional if f"{module}.{suffix}" in self.dtypes),
        ]

    def names(self) -> list[str]:
        return list(self.shapes)

    def read(self, name: str) -> torch.Tensor:
        module = name.removesuffix(".weight")
        if module not in self.parts:
            return super().read(name)
        import torch

        parts = {suffix: super(Decoded, self).read(f"{module}.{suffix}") for suffix in self.parts[module]}
        for suffix, tensor in parts.items():
            if "scale" in suffix and not (torch.isfinite(tensor.float()).all() and (tensor.float() >= 0).all()):
                raise SourceError(f"{module}.{suffix} has numbers that no scale can be", hint=_WRONG)
        out: torch.Tensor = self.layout.decode(parts, self.group)
        return out


def decoded(folder: Path, facts: Mapping[str, Any]) -> Decoded:
    """A folder's checkpoint as if it were not packed; `facts` is its quantization_config.

    Raises:
        SourceError: it is of none of these formats, or its files are not what it says.

    """
    files = safetensors.files_of(folder)
    shapes = {name: shape for file in files for name, _, shape, _ in safetensors.read_header(file)}
    static = any(name.endswith(".input_scale") for name in shapes)
    name = next(
        (name for name, one in LAYOUTS.items()
         if one.method == facts.get("quant_method") and (one.method == "gptq" or one.format == facts.get("format"))
         and (name != "fp8" or not static) and (name != "fp8-static" or static)),
        None,
    )  # fmt: skip
    if name is None:
        raise SourceError(
            f"{jsonfile.plain(str(folder))}: no reader for {str(facts.get('quant_method'))[:40]} {str(facts.get('format'))[:40]}"
        )
    linear: dict[str, tuple[int, int]] = {}
    for tensor, shape in shapes.items():
        module, _, part = tensor.rpartition(".")
        if part == "qweight":
            linear[module] = shape[1], 8 * shape[0]
        elif part == "weight_packed":
            linear[module] = shape[0], 2 * shape[1]
        elif part == "weight" and f"{module}.weight_scale" in shapes:
            linear[module] = shape[0], shape[1]
    return Decoded(folder, files, LAYOUTS[name], linear, int(facts.get("group_size") or 0))
