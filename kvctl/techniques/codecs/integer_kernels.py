"""Kernels of grouped integers.

Where numba is installed, CPUs run its loops (`fast`). Otherwise whole-tensor passes beat blocks that fit the cache: a
pass over 2K tokens costs tens of microseconds, starting one several. Where torch has a fused loop (fbgemm's row-wise
quantizers) it is used; the plain formulas give the same and serve other devices and rows that fp16 cannot hold.
"""

from __future__ import annotations

from typing import Any

import torch

from kvctl.techniques.codecs import fast
from kvctl.techniques.codecs.base import Parts
from kvctl.techniques.codecs.integers import Grouped

Tensor = Any
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FUSED = "fbgemm" in torch.backends.quantized.supported_engines


def whole(numbers: Tensor) -> bool:
    """Whether all are finite, in one pass: tests element by element are ten times slower. May err towards False."""
    return not numbers.numel() or bool(numbers.float().sum().isfinite())


def stored(numbers: Tensor, dtype: Any) -> Tensor:
    """Scales or minima as they are stored: beyond the type's range they saturate (NaN stays)."""
    most = torch.finfo(dtype).max
    return numbers.clamp(-most, most).to(dtype)


def asymmetric(x: Tensor, along: int, levels: int, dtype: Any) -> tuple[Tensor, Tensor]:
    """Scale and minimum of each group along a dimension (kept, of size 1); NaN both where a value is not finite."""
    low, high = x.amin(along, keepdim=True), x.amax(along, keepdim=True)
    minimum = stored(low, dtype)
    scale = stored((high - minimum.float()) / levels, dtype)
    if scale.numel() and not scale.float().abs().amin() > 0:
        # A constant group has no range, a tiny one none that the type can hold: then every code is 0.
        scale = scale.masked_fill(scale == 0, 1.0)
    if not whole(high - low):
        lost = ~(low.isfinite() & high.isfinite())
        minimum, scale = minimum.masked_fill(lost, torch.nan), scale.masked_fill(lost, torch.nan)
    return scale, minimum


def symmetric(x: Tensor, along: int, levels: int, dtype: Any) -> Tensor:
    """The scale of each group; NaN where a value is not finite, 0 where all codes are 0."""
    top = torch.maximum(x.amax(along, keepdim=True), -x.amin(along, keepdim=True)).abs_()
    scale = stored(top / levels, dtype)
    return scale if whole(top) else scale.masked_fill(~top.isfinite(), torch.nan)


def codes(x: Tensor, scale: Tensor, minimum: Tensor | None, bits: int) -> Tensor:
    """Codes as uint8 from 0, or as int8 where they are symmetric and of 8 bits; 0 stands for what is lost."""
    inverse = scale.float().reciprocal()
    if not whole(inverse):
        # NaN: any code will do. A scale of 0, or below fp32's reciprocals: nothing but zeros to store.
        inverse = inverse.masked_fill(~inverse.isfinite(), 0.0)
        x = x.nan_to_num(0.0, 0.0, 0.0)
        minimum = None if minimum is None else minimum.nan_to_num(0.0)
    top, half = 2**bits - 1, 2 ** (bits - 1)
    if minimum is None:
        y = torch.mul(x, inverse).round_().clamp_(1 - half, half - 1)
        return y.to(torch.int8) if bits == 8 else y.add_(half).to(torch.int8).view(torch.uint8)
    y = torch.sub(x, minimum.float()).mul_(inverse).round_().clamp_(0, top)
    # fp32 to int8 is several times faster than to uint8, which 8 bits from 0 would need.
    return (
        y.sub_(half).to(torch.int8).view(torch.uint8).bitwise_xor_(half)
        if bits == 8
        else y.to(torch.int8).view(torch.uint8)
    )


def pack(values: Tensor, bits: int) -> Tensor:
    """Neighbours along the last dimension into one byte, the first lowest."""
    if bits == 8:
        return values
    per_byte = 8 // bits
    parts = values.unflatten(-1, (-1, per_byte))
    packed = parts[..., 0].clone()
    for place in range(1, per_byte):
        packed |= parts[..., place] << place * bits
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The reverse of `pack`, as uint8."""
    if bits == 8:
        return packed
    mask = 2**bits - 1
    return torch.stack([(packed >> place) & mask for place in range(0, 8, bits)], -1).flatten(-2)


def restore(values: Tensor, scale: Tensor, minimum: Tensor | None, bits: int) -> Tensor:
    """fp32 of codes: scales and minima broadcast."""
    out = values.to(torch.float32)
    if minimum is None:
        if bits < 8:
            out.sub_(2 ** (bits - 1))
        return out.mul_(scale.float())
    offset = minimum.float()
    if scale.dtype != torch.float32 and out.shape[-1] == scale.shape[-1] and out.is_contiguous():
        # One pass; slow where scales broadcast along the last dimension. Of a scale of 11 bits the product is exact,
        # so that rounding once or twice is the same.
        return torch.addcmul(offset, out, scale.float(), out=out)
    return out.mul_(scale.float()).add_(offset)


def fused_rows(rows: Tensor, bits: int) -> Tensor | None:
    """Records of each row by torch's fused quantizer, or None where it would not hold them."""
    if not FUSED or rows.device.type != "cpu" or not rows.numel() or not whole(rows):
        return None
    operator = (
        torch.ops.quantized.embedding_bag_4bit_prepack if bits == 4 else torch.ops.quantized.embedding_bag_2bit_prepack
    )
    records = operator(rows)
    numbers = records[:, -4:].contiguous().view(torch.float16)
    return records if whole(numbers) else None


def fused_restore(records: Tensor, bits: int) -> Tensor:
    """fp32 of records [rows, bytes]."""
    if bits == 4:
        return torch.ops.quantized.embedding_bag_4bit_unpack(records)
    return torch.ops.quantized.embedding_bag_2bit_unpack(records)


def plain_rows(rows: Tensor, bits: int) -> Tensor:
    """The records that `fused_rows` makes, for any device and any values."""
    scale, minimum = asymmetric(rows, -1, 2**bits - 1, torch.float16)
    packed = pack(codes(rows, scale, minimum, bits), bits)
    return torch.cat((packed, torch.cat((scale, minimum), -1).view(torch.uint8)), -1)


def plain_restore(records: Tensor, bits: int) -> Tensor:
    """The reverse of `plain_rows`."""
    numbers = records[:, -4:].contiguous().view(torch.float16)
    return restore(unpack(records[:, :-4], bits), numbers[:, :1], numbers[:, 1:], bits)


class TokenKernel:
    """Groups along the channels of a token.

    Interleaved parts: one uint8 [batch, heads, tokens, groups * record] for the whole groups and one for the
    shorter group behind them; a record is the codes, the scale and the minimum. Otherwise for each of the two:
    codes [..., dim * bits / 8] (int8 where symmetric and of 8 bits), scale [..., groups] and, asymmetric, minimum.
    """

    def __init__(self, codec: Grouped) -> None:
        self.codec = codec
        self.dtype = DTYPES[codec.scale]

    def encode(self, x: Tensor) -> Parts:
        """See `Kernel`."""
        codec, parts = self.codec, []
        for start, end, group in codec.segments(x.shape[-1]):
            groups = (end - start) // group
            rows = x[..., start:end].reshape(-1, group)
            if fast.serves(rows, group):
                made = self._fast(rows, groups)
            elif codec.interleaved:
                made = [(self._records(rows.float()), groups * (group * codec.bits // 8 + 4))]
            else:
                made = self._separate(rows.float(), groups)
            parts += [part.view(*x.shape[:-1], width) for part, width in made]
        return tuple(parts)

    def _fast(self, rows: Tensor, groups: int) -> list[tuple[Tensor, int]]:
        """What `_records` or `_separate` make."""
        codec, count = self.codec, rows.shape[0]
        form, width = "SYMMETRIC" if codec.symmetric else "ASYMMETRIC", rows.shape[-1] * codec.bits // 8
        if codec.interleaved:
            records = torch.empty((count, width + 4), dtype=torch.uint8)
            numbers = records.view(torch.float16)
            fast.encode(form, rows, codec.bits, records, 0, numbers[:, -2], numbers[:, -1])
            return [(records, groups * (width + 4))]
        packed, scale = torch.empty((count, width), dtype=torch.uint8), torch.empty(count, dtype=self.dtype)
        minimum = None if codec.symmetric else torch.empty_like(scale)
        fast.encode(form, rows, codec.bits, packed, 0, scale, minimum)
        if codec.symmetric and codec.bits == 8:
            packed = packed.view(torch.int8)
        numbers = [(scale, groups)] if minimum is None else [(scale, groups), (minimum, groups)]
        return [(packed, groups * width), *numbers]

    def _records(self, rows: Tensor) -> Tensor:
        if not rows.numel():
            return rows.new_empty((0, rows.shape[-1] * self.codec.bits // 8 + 4), dtype=torch.uint8)
        records = fused_rows(rows, self.codec.bits)
        return plain_rows(rows, self.codec.bits) if records is None else records

    def _separate(self, rows: Tensor, groups: int) -> list[tuple[Tensor, int]]:
        """Codes, scale and minimum of rows, each with its width for a token."""
        codec, levels = self.codec, 2**self.codec.bits - 1
        width = groups * rows.shape[-1] * codec.bits // 8
        if codec.symmetric:
            scale, minimum = symmetric(rows, -1, levels // 2, self.dtype), None
        else:
            scale, minimum = asymmetric(rows, -1, levels, self.dtype)
        packed = pack(codes(rows, scale, minimum, codec.bits), codec.bits)
        numbers = [(scale, groups)] if minimum is None else [(scale, groups), (minimum, groups)]
        return [(packed, width), *numbers]

    def decode(self, parts: Parts, dtype: Any, dim: int) -> Tensor:
        """See `Kernel`."""
        codec, left = self.codec, list(parts)
        pieces = []
        for start, end, group in codec.segments(dim):
            lead, width = left[0].shape[:-1], group * codec.bits // 8
            records = left.pop(0).reshape(-1, width + 4 if codec.interleaved else width)
            if codec.interleaved:
                numbers = records.contiguous().view(torch.float16) if fast.serves(records, group) else None
                if numbers is not None:
                    rows = fast.decode(
                        "ASYMMETRIC", group, codec.bits, records, 0, numbers[:, -2], numbers[:, -1], dtype
                    )
                else:
                    restored = fused_restore if FUSED and records.is_cpu and records.numel() else plain_restore
                    rows = restored(records, codec.bits)
            else:
                scale = left.pop(0).reshape(-1, 1)
                minimum = None if codec.symmetric else left.pop(0).reshape(-1, 1)
                if fast.serves(records, group):
                    form, low = (
                        "SYMMETRIC" if codec.symmetric else "ASYMMETRIC",
                        None if minimum is None else minimum[:, 0],
                    )
                    rows = fast.decode(form, group, codec.bits, records.view(torch.uint8), 0, scale[:, 0], low, dtype)
                else:
                    rows = self._rows(records, scale, minimum)
            pieces.append(rows.view(*lead, end - start))
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1)).to(dtype)

    def _rows(self, packed: Tensor, scale: Tensor, minimum: Tensor | None) -> Tensor:
        bits = self.codec.bits
        width = packed.shape[-1]
        if bits == 8 and minimum is not None and FUSED and packed.is_cpu and packed.numel() and width % 4 == 0:
            # fbgemm's 8-bit record: codes, scale and minimum of fp32. Its one pass is worth the assembly.
            records = torch.empty((packed.shape[0], width + 8), dtype=torch.uint8)
            records[:, :width].copy_(packed)
            numbers = records.view(torch.float32)
            numbers[:, -2:-1].copy_(scale)
            numbers[:, -1:].copy_(minimum)
            return torch.ops.quantized.embedding_bag_byte_unpack(records)
        return restore(unpack(packed, bits), scale, minimum, bits)


class ChannelKernel:
    """Groups of tokens that share a scale in each channel.

    Parts: codes [batch, heads, groups, group * bits / 8, dim], scale and (asymmetric) minimum [batch, heads,
    groups, dim]. Byte row r of a group holds the tokens r, r + rows, ... of it, the first lowest: packing and
    unpacking never leave a row, so that every pass runs along contiguous channels.
    """

    def __init__(self, codec: Grouped) -> None:
        self.codec = codec
        self.dtype = DTYPES[codec.scale]

    @staticmethod
    def _word(dim: int) -> Any:
        """The type through which rows of `dim` bytes are shifted."""
        return torch.uint8 if dim % 4 else torch.int32

    def encode(self, x: Tensor) -> Parts:
        """See `Kernel`."""
        codec = self.codec
        if x.shape[-2] % codec.tokens:
            raise ValueError(f"{codec.name}: {x.shape[-2]} tokens are no whole groups of {codec.tokens}")
        grouped = x.unflatten(-2, (x.shape[-2] // codec.tokens, codec.tokens))
        if fast.serves(x, x.shape[-1]):
            return self._fast(grouped)
        grouped, levels = grouped.float(), 2**codec.bits - 1
        if codec.symmetric:
            scale, minimum = symmetric(grouped, -2, levels // 2, self.dtype), None
        else:
            scale, minimum = asymmetric(grouped, -2, levels, self.dtype)
        values = codes(grouped, scale, minimum, codec.bits)
        if codec.bits < 8:
            # Four channels at a time: shifts of codes never leave their byte.
            planes = values.unflatten(-2, (8 // codec.bits, codec.tokens * codec.bits // 8)).view(
                self._word(x.shape[-1])
            )
            packed = planes[..., 0, :, :].clone()
            for place in range(1, 8 // codec.bits):
                packed |= planes[..., place, :, :] << place * codec.bits
            values = packed.view(torch.uint8)
        numbers = (scale,) if minimum is None else (scale, minimum)
        return (values, *(one.squeeze(-2) for one in numbers))

    def _fast(self, grouped: Tensor) -> Parts:
        codec = self.codec
        *lead, tokens, dim = grouped.shape
        packed = torch.empty((*lead, tokens * codec.bits // 8, dim), dtype=torch.uint8)
        scale = torch.empty((*lead, dim), dtype=self.dtype)
        minimum = None if codec.symmetric else torch.empty_like(scale)
        form = "SYMMETRIC" if codec.symmetric else "ASYMMETRIC"
        fast.encode_channels(form, grouped.reshape(-1, tokens, dim), codec.bits, packed, scale, minimum)
        if codec.symmetric and codec.bits == 8:
            packed = packed.view(torch.int8)
        return (packed, scale) if minimum is None else (packed, scale, minimum)

    def decode(self, parts: Parts, dtype: Any, dim: int) -> Tensor:
        """See `Kernel`."""
        codec = self.codec
        if fast.serves(parts[0], dim):
            *lead, _, _ = parts[0].shape
            out = torch.empty((*lead, codec.tokens, dim), dtype=fast.made(dtype))
            form, minimum = "SYMMETRIC" if codec.symmetric else "ASYMMETRIC", None if codec.symmetric else parts[2]
            rows = out.view(-1, codec.tokens, dim)
            fast.decode_channels(form, rows, codec.bits, parts[0].view(torch.uint8), parts[1], minimum)
            return out.flatten(-3, -2).to(dtype)
        values, scale = parts[0], parts[1].unsqueeze(-2)
        minimum = None if codec.symmetric else parts[2].unsqueeze(-2)
        if codec.bits < 8:
            words = values.contiguous().view(self._word(dim))
            places = torch.arange(0, 8, codec.bits, dtype=words.dtype, device=words.device).view(-1, 1, 1)
            mask = int.from_bytes(bytes([2**codec.bits - 1]) * words.itemsize, "little")
            planes = (words.unsqueeze(-3) >> places).bitwise_and_(mask)
            values = planes.view(torch.uint8).flatten(-3, -2)
        out = restore(values, scale, minimum, codec.bits)
        return out.flatten(-3, -2).to(dtype)
