"""Kernels of the small floats. Parts hold bytes (uint8): tensors of fp8 cannot be gathered everywhere."""

from __future__ import annotations

from typing import Any

import torch

from kvctl.techniques.codecs import fast
from kvctl.techniques.codecs.base import Parts
from kvctl.techniques.codecs.floats import Fp8, Microscaled, PerTokenHead

Tensor = Any
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
VLLM_LEAST_SCALE = 1e-6


def saturate(x: Tensor, form: str) -> Tensor:
    """Bytes of the nearest fp8 (ties to even), clamped to its largest finite number; NaN stays."""
    most = torch.finfo(FP8[form]).max
    return x.clamp(-most, most).to(FP8[form]).view(torch.uint8)


def away(x: Tensor) -> Tensor:
    """As integers, halves away from zero the way vLLM's kernels round: x + 0.5 cut off."""
    return (x + torch.where(x >= 0, 0.5, -0.5)).trunc()


class Fp8Kernel:
    """Parts: bytes [batch, heads, tokens, dim]."""

    def __init__(self, codec: Fp8) -> None:
        self.codec = codec

        self.scale: Tensor | None = None
        """Of a calibrated codec [1] in fp32, from the first tokens on."""

    def _scale(self, like: Tensor) -> Tensor | None:
        """What elements are divided by; None where by nothing."""
        if self.codec.scales == (1.0,):
            return self.scale
        return torch.tensor(self.codec.scales, dtype=torch.float32, device=like.device).view(-1, 1, 1)

    def _calibrate(self, x: Tensor) -> None:
        sizes = x.float().abs()
        top = sizes.masked_fill(~sizes.isfinite(), 0.0).amax().view(1)
        # Of nothing but zeros, and where the division would leave nothing: a plain cast.
        scale = top / torch.finfo(FP8[self.codec.form]).max
        self.scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)

    def encode(self, x: Tensor) -> Parts:
        """See `Kernel`."""
        if self.codec.calibrated and self.scale is None and x.numel():
            self._calibrate(x)
        scale = self._scale(x)
        if scale is not None:
            x = x.float() / scale
        if self.codec.form == "e4m3" and fast.serves(x, x.numel()):
            return (fast.cast(x),)
        return (saturate(x, self.codec.form),)

    def decode(self, parts: Parts, dtype: Any, dim: int) -> Tensor:
        """See `Kernel`."""
        scale = self._scale(parts[0])
        between = dtype if scale is None else torch.float32
        if self.codec.form == "e4m3" and fast.serves(parts[0], parts[0].numel()):
            x = fast.uncast(parts[0], between)
        else:
            x = parts[0].view(FP8[self.codec.form]).to(between)
        return x if scale is None else (x * scale).to(dtype)


def at_ends(packed: Tensor, form: str) -> tuple[int, int]:
    """How many of these bytes are the largest number of the format, and how many are zero."""
    sizes = packed & 0x7F
    largest = torch.tensor(torch.finfo(FP8[form]).max).to(FP8[form]).view(torch.uint8)
    return int((sizes == largest).sum()), int((sizes == 0).sum())


class PerTokenHeadKernel:
    """Parts: bytes [batch, heads, tokens, dim] (int4: dim / 2, even elements low), scale fp32 [batch, heads, tokens]."""

    def __init__(self, codec: PerTokenHead) -> None:
        self.codec = codec

    def encode(self, x: Tensor) -> Parts:
        """See `Kernel`."""
        *lead, dim = x.shape
        if fast.serves(x, dim):
            width = 4 if self.codec.form == "int4" else 8
            packed = torch.empty((*lead, dim * width // 8), dtype=torch.uint8)
            scale = torch.empty(lead, dtype=torch.float32)
            rows, records = x.reshape(-1, dim), packed.view(-1, packed.shape[-1])
            fast.encode(f"HEAD_{self.codec.form.upper()}", rows, width, records, 0, scale.view(-1), None)
            return packed, scale
        x = x.float()
        lost = ~x.abs().amax(-1, keepdim=True).isfinite()
        if lost.any():
            x = x.masked_fill(lost, 0.0)
        if self.codec.form == "int4":
            return self._int4(x, lost)
        most = 448.0 if self.codec.form == "fp8" else 127.0
        scale = (x.abs().amax(-1, keepdim=True) / most).clamp(min=VLLM_LEAST_SCALE)
        y = x * (1.0 / scale)
        if self.codec.form == "fp8":
            packed = saturate(y, "e4m3")
        else:
            packed = away(y).clamp_(-128, 127).to(torch.int8).view(torch.uint8)
        return packed, scale.masked_fill(lost, torch.nan).squeeze(-1)

    def _int4(self, x: Tensor, lost: Tensor) -> Parts:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        # Halved: the range of finite numbers may not fit fp32.
        scale = ((high / 15 - low / 15) if bool((high - low).isinf().any()) else (high - low) / 15).clamp(
            min=VLLM_LEAST_SCALE
        )
        zero = away(-low / scale).clamp_(0, 15)
        code = away(x * (1.0 / scale) + zero).clamp_(0, 15).to(torch.uint8)
        hidden = (scale.view(torch.int32) & -16) | zero.to(torch.int32)
        scale = hidden.view(torch.float32).masked_fill(lost, torch.nan)
        return code[..., 0::2] | code[..., 1::2] << 4, scale.squeeze(-1)

    def decode(self, parts: Parts, dtype: Any, dim: int) -> Tensor:
        """See `Kernel`."""
        if fast.serves(parts[0], dim):
            width = 4 if self.codec.form == "int4" else 8
            records, numbers = parts[0].reshape(-1, parts[0].shape[-1]), parts[1].reshape(-1)
            form = f"HEAD_{self.codec.form.upper()}"
            rows = fast.decode(form, dim, width, records, 0, numbers, None, dtype)
            return rows.view(*parts[1].shape, dim)
        packed, scale = parts[0], parts[1].unsqueeze(-1)
        if self.codec.form == "fp8":
            return (packed.view(FP8["e4m3"]).float() * scale).to(dtype)
        if self.codec.form == "int8":
            return (packed.view(torch.int8).float() * scale).to(dtype)
        bits = scale.view(torch.int32)
        code = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        step = (bits & -16).view(torch.float32)
        return ((code.float() - (bits & 15).float()) * step).to(dtype)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1(x: Tensor) -> Tensor:
    """Codes of the nearest e2m1 (ties to even), saturating; the highest of 4 bits is the sign."""
    size = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for edge in (0.25, 1.25, 2.5, 5.0):
        code += size > edge
    for edge in (0.75, 1.75, 3.5):
        code += size >= edge
    return code


def e8m0(top: Tensor, largest: int) -> Tensor:
    """Bytes of a block's scale: 2^(floor(log2(top)) - largest), biased by 127; 255 is NaN."""
    _, exponent = torch.frexp(top)
    biased = (exponent.to(torch.int32) - 1 - largest + 127).clamp_(0, 254)
    biased = torch.where(top == 0, torch.zeros_like(biased), biased)
    return biased.masked_fill(~top.isfinite(), 255).to(torch.uint8)


class MicroscaledKernel:
    """Parts: elements uint8 [batch, heads, tokens, dim] (e2m1: dim / 2, the first lowest), scales [..., dim / block]."""

    def __init__(self, codec: Microscaled) -> None:
        self.codec = codec

    def encode(self, x: Tensor) -> Parts:
        """See `Kernel`."""
        name, shape = self.codec.name, x.shape
        rows = x.float().reshape(-1, self.codec.block)
        top = rows.abs().amax(-1, keepdim=True)
        if name == "nvfp4":
            # The block's scale is of what the tensor's scale leaves.
            scales = saturate(top / 6.0 / self.codec.tensor_scale, "e4m3")
            scales = scales.masked_fill(~top.isfinite(), 0x7F)
            step = scales.view(FP8["e4m3"]).float() * self.codec.tensor_scale
        else:
            scales = e8m0(top, 8 if name == "mxfp8" else 2)
            step = torch.ldexp(torch.ones_like(top), scales.to(torch.int32) - 127)
        y = torch.where((step > 0) & top.isfinite(), rows / step, torch.zeros_like(rows))
        packed = saturate(y, "e4m3") if name == "mxfp8" else e2m1(y)
        if name != "mxfp8":
            packed = packed[:, 0::2] | packed[:, 1::2] << 4
        width = shape[-1] // self.codec.block
        return packed.reshape(*shape[:-1], width * packed.shape[-1]), scales.reshape(*shape[:-1], width)

    def decode(self, parts: Parts, dtype: Any, dim: int) -> Tensor:
        """See `Kernel`."""
        packed, scales = parts
        if self.codec.name == "nvfp4":
            step = scales.view(FP8["e4m3"]).float() * self.codec.tensor_scale
        else:
            step = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.to(torch.int32) - 127)
            step = step.masked_fill(scales == 255, torch.nan)
        if self.codec.name == "mxfp8":
            values = packed.view(FP8["e4m3"]).float()
        else:
            code = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
            table = torch.tensor((*E2M1, *(-value for value in E2M1)), device=code.device)
            values = table[code.int()]
        return (values.unflatten(-1, (-1, self.codec.block)) * step.unsqueeze(-1)).flatten(-2).to(dtype)
