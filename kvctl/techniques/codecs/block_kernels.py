"""Kernels of llama.cpp's block types, after ggml-quants.c (quantize_row_*_ref), in fp32 as there.

A block with NaN or Inf, for which ggml's conversions are undefined, gets codes 0 and a scale of NaN.
"""

from __future__ import annotations

from typing import Any

import torch

from kvctl.techniques.codecs import fast
from kvctl.techniques.codecs.base import Parts
from kvctl.techniques.codecs.blocks import BLOCK, GgmlBlocks

Tensor = Any

IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""kvalues_iq4nl of ggml-common.h."""
IQ4_NL_LEAST = 1e-15
"""GROUP_MAX_EPS: smaller blocks are stored as zeros."""

LOOPS = {"q8_0": (8, 2), "q4_0": (4, 2), "q4_1": (4, 4)}
"""Bits of a code, and where in a block codes start, of the types that `fast` knows."""


def halves(scale: Tensor) -> Tensor:
    """Bytes of fp16 numbers [rows, 1]."""
    return scale.to(torch.float16).view(torch.uint8)


def reciprocal(scale: Tensor) -> Tensor:
    """1 / scale, 0 for 0."""
    return torch.where(scale == 0, torch.zeros_like(scale), 1.0 / scale)


def cut(x: Tensor, top: int) -> Tensor:
    """As C converts to int8 and takes the lesser of it and `top`."""
    return x.nan_to_num(0.0).trunc().clamp(0, top).to(torch.uint8)


def nibbles(code: Tensor) -> Tensor:
    """Bytes of a block: element j low, element j + 16 high."""
    return (code[:, : BLOCK // 2] & 15) | ((code[:, BLOCK // 2 :] & 15) << 4)


def fifth_bits(code: Tensor) -> Tensor:
    """Four bytes: bit j is the fifth of element j."""
    bits = (code >> 4).view(-1, 4, 8)
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=code.device)
    return (bits * weights).sum(-1, dtype=torch.uint8)


def extreme(x: Tensor) -> Tensor:
    """The element of the largest magnitude, the first of equals, with its sign."""
    return x.gather(1, x.abs().argmax(1, keepdim=True))


def nearest_iq4(x: Tensor) -> Tensor:
    """Codes of the nearest values of the code book; the upper of two as near."""
    book = torch.tensor(IQ4_NL, dtype=torch.float32, device=x.device)
    upper = torch.bucketize(x, book, right=True).clamp(1, len(IQ4_NL) - 1)
    low, high = book[upper - 1], book[upper]
    return upper - (x - low < high - x).to(upper.dtype)


def iq4_nl(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and codes of blocks: the least-squares scale of the first choice, weighted by x squared."""
    peak = extreme(x)
    none = peak.abs() < IQ4_NL_LEAST
    inverse = 1.0 / (peak / IQ4_NL[0])
    code = nearest_iq4((x * inverse).nan_to_num(0.0))
    value = torch.tensor(IQ4_NL, dtype=torch.float32, device=x.device)[code]
    weight = x * x
    above, below = (weight * value) * x, (weight * value) * value
    over, under = torch.zeros_like(peak), torch.zeros_like(peak)
    for place in range(BLOCK):  # in ggml's order: fp32 sums depend on it
        over += above[:, place : place + 1]
        under += below[:, place : place + 1]
    scale = torch.where((under > 0) & ~none, over / under, torch.zeros_like(over))
    return scale, code.masked_fill(none, 0).to(torch.uint8)


class GgmlKernel:
    """Part: uint8 [batch, heads or 1, tokens, blocks * bytes of a block]."""

    def __init__(self, codec: GgmlBlocks) -> None:
        self.codec = codec

    def encode(self, x: Tensor) -> Parts:
        """See `Kernel`."""
        batch, heads, tokens, dim = x.shape
        if dim % BLOCK:
            x = x.transpose(1, 2).reshape(batch, 1, tokens, heads * dim)
        rows = x.reshape(-1, BLOCK)
        served = self.codec.name in LOOPS and fast.serves(rows, BLOCK)
        blocks = self._fast(rows) if served else self._quantize(rows.float())
        return (blocks.view(*x.shape[:-1], x.shape[-1] // BLOCK * blocks.shape[-1]),)

    def _fast(self, rows: Tensor) -> Tensor:
        width, place = LOOPS[self.codec.name]
        blocks = torch.empty((rows.shape[0], place + BLOCK * width // 8), dtype=torch.uint8)
        numbers = blocks.view(torch.float16)
        fast.encode(self.codec.name.upper(), rows, width, blocks, place, numbers[:, 0], numbers[:, 1])
        return blocks

    def _quantize(self, x: Tensor) -> Tensor:
        name = self.codec.name
        lost = ~x.abs().amax(1, keepdim=True).isfinite()
        if lost.any():
            x = x.masked_fill(lost, 0.0)
        minimum = None
        if name == "q8_0":
            scale = x.abs().amax(1, keepdim=True) / 127
            y = (x * reciprocal(scale)).nan_to_num(0.0)
            whole = y.trunc()
            # roundf: halves away from zero.
            code = (whole + ((y - whole).abs() >= 0.5) * y.sign()).clamp(-127, 127).to(torch.int8).view(torch.uint8)
        elif name == "iq4_nl":
            scale, code = iq4_nl(x)
        elif name.endswith("_0"):
            half = 8 if name == "q4_0" else 16
            scale = extreme(x) / -half
            code = cut(x * reciprocal(scale) + (half + 0.5), 2 * half - 1)
        else:
            top = 15 if name == "q4_1" else 31
            minimum = x.amin(1, keepdim=True)
            scale = (x.amax(1, keepdim=True) - minimum) / top
            code = cut((x - minimum) * reciprocal(scale) + 0.5, top)
        head = [halves(scale.masked_fill(lost, torch.nan))]
        if minimum is not None:
            head.append(halves(minimum))
        if name.startswith("q5"):
            head.append(fifth_bits(code))
        return torch.cat((*head, code if name == "q8_0" else nibbles(code)), 1)

    def decode(self, parts: Parts, dtype: Any, dim: int) -> Tensor:
        """See `Kernel`."""
        name, part = self.codec.name, parts[0]
        batch, lead, tokens, width = part.shape
        size = self.codec.bytes(1, 1, BLOCK, 1)
        blocks = part.reshape(-1, size)
        if name in LOOPS and fast.serves(blocks, BLOCK):
            bits, place = LOOPS[name]
            numbers = blocks.contiguous().view(torch.float16)
            x = fast.decode(name.upper(), BLOCK, bits, blocks, place, numbers[:, 0], numbers[:, 1], dtype)
        else:
            x = self._restore(blocks, name)
        x = x.view(batch, lead, tokens, width // size * BLOCK)
        if dim % BLOCK:
            x = x.view(batch, tokens, width // size * BLOCK // dim, dim).transpose(1, 2)
        return x.to(dtype)

    @staticmethod
    def _restore(blocks: Tensor, name: str) -> Tensor:
        scale = blocks[:, :2].contiguous().view(torch.float16).float()
        if name == "q8_0":
            return blocks[:, 2:].view(torch.int8).float() * scale
        packed = blocks[:, -BLOCK // 2 :]
        code = torch.cat((packed & 15, packed >> 4), 1)
        if name == "iq4_nl":
            return torch.tensor(IQ4_NL, dtype=torch.float32, device=code.device)[code.int()] * scale
        if name.startswith("q5"):
            fifth = blocks[:, -BLOCK // 2 - 4 : -BLOCK // 2].unsqueeze(-1)
            places = torch.arange(8, dtype=torch.uint8, device=code.device)
            code |= ((fifth >> places) & 1).flatten(1) << 4
        if name.endswith("_0"):
            return (code.float() - (8 if name == "q4_0" else 16)) * scale
        return code.float() * scale + blocks[:, 2:4].contiguous().view(torch.float16).float()
