"""Integers in groups that share a scale: per token along channels, or per channel along tokens (KIVI).

x is stored as a code of 8, 4 or 2 bits. Asymmetric: x ~ code * scale + minimum, codes 0 to 2^bits - 1.
Symmetric: x ~ code * scale, codes -(2^(bits-1) - 1) to 2^(bits-1) - 1. Codes are those of the scale and
minimum *as stored*, so that rounding them costs next to nothing. Scales and minima beyond the range of fp16
saturate at 65504 and never become Inf.
"""

from __future__ import annotations

from kvctl.techniques.codecs.base import Codec, Kernel, refuse

SCALE_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}


class Grouped(Codec):
    """Codes of `bits`; made by `grouped`."""

    bits: int = 8
    group: int = 64
    """Elements that share a scale; 0: the head. What is left of a head is a shorter group."""
    symmetric: bool = False
    scale: str = "fp16"
    """The type of scales and minima: fp16, bf16, fp32."""

    @property
    def per_channel(self) -> bool:
        """One scale a channel, shared by `group` tokens."""
        return self.tokens > 1

    @property
    def interleaved(self) -> bool:
        """Each group is one record of codes, scale and minimum: the layout of torch's own row-wise quantizers."""
        return not self.per_channel and self.bits < 8 and not self.symmetric and self.scale == "fp16"

    @property
    def numbers(self) -> int:
        """Bytes of one group's scale and minimum."""
        return SCALE_BYTES[self.scale] * (1 if self.symmetric else 2)

    def segments(self, dim: int) -> list[tuple[int, int, int]]:
        """(start, end, group) of the whole groups of a head and of the shorter one behind them."""
        group = min(self.group or dim, dim)
        whole = dim // group * group
        return [(0, whole, group)] + ([(whole, dim, dim - whole)] if whole < dim else [])

    def bytes(self, tokens: int, heads: int, dim: int, itemsize: int) -> int:
        codes = tokens * heads * dim * self.bits // 8
        if self.per_channel:
            return codes + tokens // self.tokens * heads * dim * self.numbers
        groups = sum((end - start) // group for start, end, group in self.segments(dim))
        return codes + tokens * heads * groups * self.numbers

    def check(self, heads: int, dim: int) -> None:
        per_byte = 8 // self.bits
        if not self.per_channel and any(group % per_byte for _, _, group in self.segments(dim)):
            raise refuse(
                self.name,
                heads,
                dim,
                f"a group must fill whole bytes ({per_byte} codes each)",
                f"a group size that {per_byte} divides",
            )

    def kernel(self) -> Kernel:
        from kvctl.techniques.codecs.integer_kernels import ChannelKernel, TokenKernel

        return ChannelKernel(self) if self.per_channel else TokenKernel(self)


def grouped(
    bits: int, group: int | None = None, *, symmetric: bool = False, scale: str = "fp16", per_channel: bool = False
) -> Grouped:
    """The codec of these options; `group` is 64 elements (32 tokens per channel), 0 the whole head."""
    usual = 32 if per_channel else 64
    group = usual if group is None else group
    if bits not in (8, 4, 2) or scale not in SCALE_BYTES or group < 0:
        raise ValueError(f"bits {bits}, group {group}, scale {scale}")
    if per_channel and (group < 2 or group * bits % 8):
        raise ValueError(f"{group} tokens of {bits} bits fill no whole bytes")
    name = f"int{bits}"
    if per_channel:
        name += f"-channel-g{group}"
    elif group != usual:
        name += f"-g{group}" if group else "-head"
    name += "-sym" if symmetric else ""
    name += f"-{scale}" if scale != "fp16" else ""
    return Grouped(name, group if per_channel else 1, bits, group, symmetric, scale)
