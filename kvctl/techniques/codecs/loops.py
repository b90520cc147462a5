"""Loops that pack and unpack in one pass, compiled by numba where it is installed; they write what torch's passes write.

torch alone goes over memory once for each operation, ten times for a codec; these read what is given once and write
what comes out once. Numbers go in and out as the integers that hold their bits: numba has no bf16 and no fp16.
  int32: fp32   int16: fp16   uint16: bf16
Rows are groups that share a scale. They are worked on `ROWS` at a time, so that all between stays in the first cache,
and step by step: a loop that does one thing is one that LLVM turns into vector instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic, overload

from kvctl.techniques.codecs.lanes import (
    LANES,
    STEP,
    above,
    all_of,
    at_least,
    at_most,
    bits_of,
    e4m3,
    fetch,
    first2,
    first4,
    first8,
    first_halves,
    first_of,
    first_signed,
    folded,
    from_e4m3,
    lane,
    least,
    minus,
    most,
    number,
    numbers_of,
    order,
    part,
    plus,
    put2,
    put4,
    put8,
    put_halves,
    save,
    second2,
    second4,
    second8,
    second_halves,
    second_of,
    second_signed,
    times,
    whole,
    with_sign,
)  # fmt: skip

ROWS = 64
OPTIONS = {"nogil": True, "error_model": "numpy"}

ASYMMETRIC, SYMMETRIC, Q8_0, Q4_0, Q4_1, HEAD_INT8, HEAD_INT4, HEAD_FP8 = range(8)
"""How a group's numbers and codes are made."""

HALF_MOST, BF16_MOST = np.float32(65504.0), np.float32(3.3895313892515355e38)
INFINITE, LOST = np.float32(np.inf), np.float32(np.nan)


def compiled(function: Callable[..., Any]) -> Any:
    """Compiled at the first call, and kept on disk where a folder for that can be written."""
    try:
        return numba.njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # no folder can be written
        return numba.njit(**OPTIONS)(function)


# -- bits ------------------------------------------------------------------------------------------------


@intrinsic
def bits(context: Any, value: Any) -> Any:
    """int32 of the bits of an fp32."""

    def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.bitcast(given[0], context.get_value_type(types.int32))

    return types.int32(types.float32), make


@intrinsic
def real(context: Any, value: Any) -> Any:
    """fp32 whose bits are an int32 (fp32) or uint16 (bf16)."""
    width = value.bitwidth

    def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        whole, number = given[0], context.get_value_type(types.int32)
        if width == 16:
            whole = builder.shl(builder.zext(whole, number), number(16))
        return builder.bitcast(whole, context.get_value_type(types.float32))

    return types.float32(value), make


@compiled
def nearest_half(value: Any) -> Any:
    """The nearest number that fp16 holds; at most 65504."""
    value = min(max(value, -HALF_MOST), HALF_MOST)
    whole = bits(value)
    normal = real(np.int32((whole + 0xFFF + ((whole >> 13) & 1)) & -8192))
    # Below 2^-14 the steps are of 2^-24, as those of fp32 are between 1/2 and 1.
    small = real(np.int32(bits((abs(value) + np.float32(0.5)) - np.float32(0.5)) | (whole & -2147483648)))
    return small if np.int32(whole & 0x7FFFFFFF) < 0x38800000 else normal


@compiled
def half_bits(value: Any) -> Any:
    """Bits of a number that fp16 holds."""
    whole = bits(value)
    size = np.int32(whole & 0x7FFFFFFF)
    small = np.int32(abs(value) * np.float32(2.0**24))
    kept = small if size < 0x38800000 else np.int32((size >> 13) - 0x1C000)
    kept = np.int32(0x7E00) if size > 0x7F800000 else kept
    return np.int16(np.int32((whole >> 16) & 0x8000) | kept)


@compiled
def half(whole: Any) -> Any:
    """fp32 of the bits of an fp16."""
    size = np.int32((np.int32(whole) & 0x7FFF) << 13)
    value = bits(real(size) * np.float32(2.0**112))
    value = np.int32(size | 0x7F800000) if size >= 0x0F800000 else value
    return real(np.int32(value | ((np.int32(whole) & 0x8000) << 16)))


@compiled
def bf16_bits(value: Any) -> Any:
    """Bits of the nearest bf16, ties to even."""
    whole = bits(value)
    return (
        np.uint16(np.uint32(np.uint32(whole) + 0x7FFF + ((whole >> 16) & 1)) >> 16)
        if value == value
        else np.uint16(0x7FC0)
    )


def stored(value: Any, like: Any) -> Any:
    """The nearest number of the type that `like` stands for, which saturates."""


@overload(stored, strict=False)
def _stored(value: Any, like: Any) -> Any:
    if like == types.int16:
        return lambda value, like: nearest_half(value)
    if like == types.uint16:
        return lambda value, like: real(bf16_bits(min(max(value, -BF16_MOST), BF16_MOST)))
    return lambda value, like: value


def lowered(value: Any, like: Any) -> Any:
    """Bits of a number in the type that `like` stands for, which holds it."""


@overload(lowered, strict=False)
def _lowered(value: Any, like: Any) -> Any:
    if like == types.int16:
        return lambda value, like: half_bits(value)
    if like == types.uint16:
        return lambda value, like: bf16_bits(value)
    return lambda value, like: bits(value)


def raised(whole: Any) -> Any:
    """fp32 of bits of any of the types."""


@overload(raised, strict=False)
def _raised(whole: Any) -> Any:
    if whole == types.int16:
        return lambda whole: half(whole)
    return lambda whole: real(whole)


# -- numbers of groups -----------------------------------------------------------------------------------


@compiled
def affine(low: Any, high: Any, levels: Any, numbers: Any, scale: Any, minimum: Any, inverse: Any) -> None:
    """Scale, minimum and inverse of groups from their bounds."""
    like = numbers[0]
    for g in range(low.shape[0]):
        minimum[g] = stored(low[g], like)
    for g in range(low.shape[0]):
        step = stored((high[g] - minimum[g]) / np.float32(levels), like)
        scale[g] = step if step != 0 else np.float32(1.0)
    for g in range(low.shape[0]):
        turned = np.float32(1.0) / scale[g]
        inverse[g] = turned if abs(turned) < np.float32(np.inf) else np.float32(0.0)


@compiled
def centred(low: Any, high: Any, levels: Any, least: Any, numbers: Any, scale: Any, inverse: Any) -> None:
    """Scale and inverse of groups around zero."""
    like = numbers[0]
    for g in range(low.shape[0]):
        step = abs(max(high[g], -low[g])) / np.float32(levels)
        scale[g] = stored(max(step, np.float32(least)), like)
    for g in range(low.shape[0]):
        turned = np.float32(1.0) / scale[g]
        inverse[g] = turned if abs(turned) < np.float32(np.inf) else np.float32(0.0)


@compiled
def block_scale(low: Any, high: Any, form: Any, scale: Any, minimum: Any, inverse: Any) -> None:
    """ggml's: the inverse is of the scale before fp16 rounds it."""
    for g in range(low.shape[0]):
        if form == Q8_0:
            scale[g] = abs(max(high[g], -low[g])) / np.float32(127.0)
        elif form == Q4_0:  # the largest element gets code 0
            scale[g] = (-high[g] if high[g] > -low[g] else -low[g]) / np.float32(8.0)
        else:
            minimum[g] = low[g]
            scale[g] = (high[g] - low[g]) / np.float32(15.0)
    for g in range(low.shape[0]):
        turned = np.float32(1.0) / scale[g]
        inverse[g] = turned if scale[g] != 0 else np.float32(0.0)


@compiled
def zero_point(low: Any, high: Any, scale: Any, zero: Any, inverse: Any) -> None:
    """vLLM's int4: a whole zero point of 4 bits, kept in the lowest bits of the scale."""
    for g in range(low.shape[0]):
        span = high[g] - low[g]
        # Halved: the range of finite numbers may not fit fp32.
        step = (
            span / np.float32(15.0)
            if span < np.float32(np.inf)
            else high[g] / np.float32(15.0) - low[g] / np.float32(15.0)
        )
        scale[g] = max(step, np.float32(1e-6))
    for g in range(low.shape[0]):
        zero[g] = min(max(np.floor(-low[g] / scale[g] + np.float32(0.5)), np.float32(0.0)), np.float32(15.0))
    for g in range(low.shape[0]):
        inverse[g] = np.float32(1.0) / scale[g]
        scale[g] = real(np.int32((bits(scale[g]) & -16) | np.int32(zero[g])))


@compiled
def in_half(value: Any) -> Any:
    """Bits of the nearest fp16; Inf beyond."""
    kept = half_bits(nearest_half(value))
    kept = np.int16(0x7C00 | (np.int32(kept) & 0x8000)) if abs(value) >= np.float32(65520.0) else kept
    return np.int16(0x7E00) if value != value else kept


@compiled
def to_first_peak(x: Any, at: Any, size: Any, rows: Any, low: Any, high: Any) -> None:
    """Of two peaks as high as each other ggml takes the first: the other bound is brought below it."""
    for g in range(rows):
        if high[g] == -low[g]:
            for j in range(size):
                value = real(x[at + g * size + j])
                if abs(value) == high[g]:
                    # Zeros, too, have a sign.
                    if bits(value) < 0:
                        high[g] = low[g]
                    else:
                        low[g] = high[g]
                    break


# -- rows ------------------------------------------------------------------------------------------------


def in_order(whole: Any, like: Any) -> Any:
    """fp32 of the whole numbers that `lanes.order` gives; of bf16 the lower half is not its own."""


@overload(in_order, strict=False)
def _in_order(whole: Any, like: Any) -> Any:
    kept = -65536 if like == types.uint16 else -1
    return lambda whole, like: real(np.int32((whole ^ ((whole >> 31) & 0x7FFFFFFF)) & kept))


@cache
def encoder(form: int, size: int, width: int, record: int, place: int) -> Any:
    """The loop that packs rows of `size` elements into codes of `width` bits, at byte `place` of records of bytes.

    It takes x and the records, both flat, columns of scales and of minima and the range of rows.
    """
    signed = form in (SYMMETRIC, Q8_0, HEAD_INT8)
    last = float(2 ** (width - 1) - 1 if signed else 2**width - 1)
    first = -128.0 if form == HEAD_INT8 else -last if signed else 0.0
    levels = {ASYMMETRIC: 2**width - 1, SYMMETRIC: 2 ** (width - 1) - 1, HEAD_FP8: 448}.get(form, 127)
    shift = 2 ** (width - 1) if form == SYMMETRIC and width < 8 else 0
    rounder = 12582912.0 + shift
    """1.5 * 2^23: added to a small number it leaves the nearest integer, ties to even, in the lowest bits."""
    nothing = {2: 0xAA, 4: 0x88}[width] if shift or form == Q4_0 else 0
    least_scale = 0.0 if form == SYMMETRIC else 1e-6
    # C's roundf: what lies just below a half stays below it.
    half_step = {Q8_0: 0.49999997, Q4_0: 8.5}.get(form, 0.5)
    taken = size * width // 8
    blocks = form in (Q8_0, Q4_0, Q4_1)

    def encode(x: Any, records: Any, numbers: Any, minima: Any, start: int, stop: int) -> None:
        lowest, highest = np.zeros(ROWS, np.int32), np.zeros(ROWS, np.int32)
        low, high = np.zeros(ROWS, np.float32), np.zeros(ROWS, np.float32)
        number_bits = np.zeros(ROWS, numbers.dtype)
        scale, offset, inverse = np.ones(ROWS, np.float32), np.zeros(ROWS, np.float32), np.ones(ROWS, np.float32)
        bottom, top, round_up = all_of(np.float32(first)), all_of(np.float32(last)), all_of(np.float32(rounder))
        nearly = all_of(np.float32(half_step))
        for base in range(start, stop, ROWS):
            rows = min(ROWS, stop - base)
            for g in range(rows):
                at = (base + g) * size
                keys, others = order(first_of(x, at)), order(second_of(x, at))
                under, over = least(keys, others), most(keys, others)
                for j in range(STEP, size, STEP):
                    keys, others = order(first_of(x, at + j)), order(second_of(x, at + j))
                    under, over = least(under, least(keys, others)), most(over, most(keys, others))
                both = folded(under, over)
                lowest[g], highest[g] = lane(both, 0), lane(both, 8)
            for g in range(ROWS):
                low[g], high[g] = in_order(lowest[g], x[0]), in_order(np.int32(~highest[g]), x[0])
            odd = False
            for g in range(rows):
                odd |= not (low[g] > -INFINITE and high[g] < INFINITE)
            if form == ASYMMETRIC:
                affine(low, high, levels, numbers, scale, offset, inverse)
            elif form == HEAD_INT4:
                zero_point(low, high, scale, offset, inverse)
            elif form in (SYMMETRIC, HEAD_INT8, HEAD_FP8):
                centred(low, high, levels, least_scale, numbers, scale, inverse)
            else:
                if form == Q4_0:
                    to_first_peak(x, base * size, size, rows, low, high)
                block_scale(low, high, form, scale, offset, inverse)
            for g in range(rows):
                at, to = (base + g) * size, (base + g) * record + place
                less, factor = all_of(offset[g]), all_of(inverse[g])
                for j in range(0, size, STEP):
                    one, two = first_of(x, at + j), second_of(x, at + j)
                    fetch(x, at + j + ROWS * size)
                    if form in (ASYMMETRIC, Q4_1):
                        one, two = minus(one, less), minus(two, less)
                    one, two = times(one, factor), times(two, factor)
                    if form == HEAD_FP8:
                        put8(records, to + j, e4m3(one), e4m3(two), x)
                        continue
                    if form in (Q8_0, HEAD_INT8):
                        one, two = plus(one, with_sign(nearly, one)), plus(two, with_sign(nearly, two))
                    elif form in (Q4_0, Q4_1):
                        one, two = plus(one, nearly), plus(two, nearly)
                    elif form == HEAD_INT4:
                        one, two = plus(plus(one, less), nearly), plus(plus(two, less), nearly)
                    one, two = at_most(at_least(one, bottom), top), at_most(at_least(two, bottom), top)
                    if form in (ASYMMETRIC, SYMMETRIC):
                        codes, others = bits_of(plus(one, round_up)), bits_of(plus(two, round_up))
                    else:
                        codes, others = whole(one), whole(two)
                    if form in (Q4_0, Q4_1):
                        put_halves(records, to, codes, others, x)
                    elif width == 8:
                        put8(records, to + j, codes, others, x)
                    elif width == 4:
                        put4(records, to + j // 2, codes, others, x)
                    else:
                        put2(records, to + j // 4, codes, others, x)
            if odd:
                for g in range(rows):
                    if not (low[g] > -INFINITE and high[g] < INFINITE):
                        for j in range(taken):
                            records[(base + g) * record + place + j] = nothing
                        scale[g] = LOST
                        offset[g] = LOST if form == ASYMMETRIC else np.float32(0.0)
            for g in range(ROWS):
                number_bits[g] = in_half(scale[g]) if blocks else lowered(scale[g], numbers[0])
            for g in range(rows):
                numbers[base + g] = number_bits[g]
            if form in (ASYMMETRIC, Q4_1):
                for g in range(ROWS):
                    number_bits[g] = in_half(offset[g]) if blocks else lowered(offset[g], numbers[0])
                for g in range(rows):
                    minima[base + g] = number_bits[g]

    return compiled(encode)


@cache
def decoder(form: int, size: int, width: int, record: int, place: int) -> Any:
    """The reverse of `encoder`."""
    middle = {SYMMETRIC: 2 ** (width - 1) if width < 8 else 0, Q4_0: 8}.get(form, 0)

    def decode(records: Any, numbers: Any, minima: Any, x: Any, start: int, stop: int) -> None:
        scale, offset = np.zeros(ROWS, np.float32), np.full(ROWS, np.float32(middle))
        number_bits = np.zeros(ROWS, numbers.dtype)
        for base in range(start, stop, ROWS):
            rows = min(ROWS, stop - base)
            for g in range(rows):
                number_bits[g] = numbers[base + g]
            for g in range(ROWS):
                scale[g] = raised(number_bits[g])
            if form in (ASYMMETRIC, Q4_1):
                for g in range(rows):
                    number_bits[g] = minima[base + g]
                for g in range(ROWS):
                    offset[g] = raised(number_bits[g])
            if form == HEAD_INT4:
                for g in range(rows):
                    joint = bits(scale[g])
                    scale[g], offset[g] = real(np.int32(joint & -16)), np.float32(joint & 15)
            for g in range(rows):
                at, to = (base + g) * record + place, (base + g) * size
                factor, other = all_of(scale[g]), all_of(offset[g])
                for j in range(0, size, STEP):
                    if form in (Q4_0, Q4_1):
                        codes, others = first_halves(records, at, x), second_halves(records, at, x)
                    elif width == 4:
                        codes, others = first4(records, at + j // 2, x), second4(records, at + j // 2, x)
                    elif width == 2:
                        codes, others = first2(records, at + j // 4, x), second2(records, at + j // 4, x)
                    elif form in (ASYMMETRIC, HEAD_FP8):
                        codes, others = first8(records, at + j, x), second8(records, at + j, x)
                    else:
                        codes, others = first_signed(records, at + j, x), second_signed(records, at + j, x)
                    if form == HEAD_FP8:
                        one, two = from_e4m3(codes), from_e4m3(others)
                    else:
                        one, two = number(codes), number(others)
                    if width < 8 and form not in (ASYMMETRIC, Q4_1):
                        one, two = minus(one, other), minus(two, other)
                    one, two = times(one, factor), times(two, factor)
                    if form in (ASYMMETRIC, Q4_1):
                        one, two = plus(one, other), plus(two, other)
                    save(x, to + j, one, two)

    return compiled(decode)


# -- channels --------------------------------------------------------------------------------------------


def channel(at: Any, like: Any) -> Any:
    """The channel at a place of the arrays in between: those of bf16 have the even ones of 32 first."""


@overload(channel, strict=False)
def _channel(at: Any, like: Any) -> Any:
    if like == types.uint16:
        return lambda at, like: at // STEP * STEP + at % LANES * 2 + at % STEP // LANES
    return lambda at, like: at


@cache
def channel_encoder(form: int, tokens: int, dim: int, width: int) -> Any:
    """The loop that packs groups of `tokens` by channel: flat x and codes, flat scales and minima, a range of groups."""
    last = float(2**width - 1 if form == ASYMMETRIC else 2 ** (width - 1) - 1)
    first = 0.0 if form == ASYMMETRIC else -last
    shift = 2 ** (width - 1) if form == SYMMETRIC and width < 8 else 0
    nothing = {2: 0xAA, 4: 0x88}[width] if shift else 0
    rows = tokens * width // 8
    rounder = 12582912.0 + shift

    def encode(x: Any, packed: Any, numbers: Any, minima: Any, start: int, stop: int) -> None:
        lowest, highest = np.zeros(dim, np.int32), np.zeros(dim, np.int32)
        low, high = np.zeros(dim, np.float32), np.zeros(dim, np.float32)
        scale, offset, inverse = np.ones(dim, np.float32), np.zeros(dim, np.float32), np.ones(dim, np.float32)
        offset_bits, inverse_bits = offset.view(np.int32), inverse.view(np.int32)
        bottom, top, round_up = all_of(np.float32(first)), all_of(np.float32(last)), all_of(np.float32(rounder))
        for group in range(start, stop):
            for d in range(0, dim, STEP):
                at = group * tokens * dim + d
                one, two = order(first_of(x, at)), order(second_of(x, at))
                under, over, under_two, over_two = one, one, two, two
                for t in range(1, tokens):
                    one, two = order(first_of(x, at + t * dim)), order(second_of(x, at + t * dim))
                    under, over = least(under, one), most(over, one)
                    under_two, over_two = least(under_two, two), most(over_two, two)
                save(lowest, d, numbers_of(under), numbers_of(under_two))
                save(highest, d, numbers_of(over), numbers_of(over_two))
            odd = False
            for d in range(dim):
                low[d], high[d] = in_order(lowest[d], x[0]), in_order(highest[d], x[0])
            for d in range(dim):
                odd |= not (low[d] > -INFINITE and high[d] < INFINITE)
            if form == ASYMMETRIC:
                affine(low, high, 2**width - 1, numbers, scale, offset, inverse)
            else:
                centred(low, high, 2 ** (width - 1) - 1, 0.0, numbers, scale, inverse)
            for d in range(0, dim, STEP):
                less, less_two = first_of(offset_bits, d), second_of(offset_bits, d)
                factor, factor_two = first_of(inverse_bits, d), second_of(inverse_bits, d)
                for row in range(rows):
                    codes = others = whole(bottom)
                    for step in range(8 // width):
                        at = (group * tokens + step * rows + row) * dim + d
                        one, two = first_of(x, at), second_of(x, at)
                        fetch(x, at + tokens * dim)
                        if form == ASYMMETRIC:
                            one, two = minus(one, less), minus(two, less_two)
                        one, two = times(one, factor), times(two, factor_two)
                        one, two = at_most(at_least(one, bottom), top), at_most(at_least(two, bottom), top)
                        more, more_two = bits_of(plus(one, round_up)), bits_of(plus(two, round_up))
                        codes = above(codes, more, step * width) if step else more
                        others = above(others, more_two, step * width) if step else more_two
                    put8(packed, (group * rows + row) * dim + d, codes, others, x)
            if odd:
                for d in range(dim):
                    if not (low[d] > -INFINITE and high[d] < INFINITE):
                        for row in range(rows):
                            packed[(group * rows + row) * dim + channel(d, x[0])] = nothing
                        scale[d], offset[d] = LOST, LOST
            for d in range(dim):
                numbers[group * dim + channel(d, x[0])] = lowered(scale[d], numbers[0])
            if form == ASYMMETRIC:
                for d in range(dim):
                    minima[group * dim + channel(d, x[0])] = lowered(offset[d], numbers[0])
            if odd:
                offset[:] = 0.0

    return compiled(encode)


@cache
def channel_decoder(form: int, tokens: int, dim: int, width: int) -> Any:
    """The reverse of `channel_encoder`."""
    middle = 2 ** (width - 1) if form == SYMMETRIC and width < 8 else 0
    rows = tokens * width // 8

    def decode(packed: Any, numbers: Any, minima: Any, x: Any, start: int, stop: int) -> None:
        scale, offset = np.zeros(dim, np.float32), np.full(dim, np.float32(middle))
        scale_bits, offset_bits = scale.view(np.int32), offset.view(np.int32)
        for group in range(start, stop):
            for d in range(dim):
                scale[d] = raised(numbers[group * dim + channel(d, x[0])])
            if form == ASYMMETRIC:
                for d in range(dim):
                    offset[d] = raised(minima[group * dim + channel(d, x[0])])
            for d in range(0, dim, STEP):
                factor, factor_two = first_of(scale_bits, d), second_of(scale_bits, d)
                other, other_two = first_of(offset_bits, d), second_of(offset_bits, d)
                for row in range(rows):
                    at = (group * rows + row) * dim + d
                    if form == SYMMETRIC and width == 8:
                        codes, others = first_signed(packed, at, x), second_signed(packed, at, x)
                    else:
                        codes, others = first8(packed, at, x), second8(packed, at, x)
                    for step in range(8 // width):
                        one, two = codes, others
                        if width < 8:
                            one, two = part(codes, step * width, 2**width - 1), part(others, step * width, 2**width - 1)
                        value, value_two = number(one), number(two)
                        if form == SYMMETRIC and width < 8:
                            value, value_two = minus(value, other), minus(value_two, other_two)
                        value, value_two = times(value, factor), times(value_two, factor_two)
                        if form == ASYMMETRIC:
                            value, value_two = plus(value, other), plus(value_two, other_two)
                        save(x, (group * tokens + step * rows + row) * dim + d, value, value_two)

    return compiled(decode)


# -- casts -----------------------------------------------------------------------------------------------


@compiled
def cast(x: Any, packed: Any, start: int, stop: int) -> None:
    """e4m3 of blocks of 32."""
    for at in range(start * STEP, stop * STEP, STEP):
        put8(packed, at, e4m3(first_of(x, at)), e4m3(second_of(x, at)), x)


@compiled
def uncast(packed: Any, x: Any, start: int, stop: int) -> None:
    """The reverse of `cast`."""
    for at in range(start * STEP, stop * STEP, STEP):
        save(x, at, from_e4m3(first8(packed, at, x)), from_e4m3(second8(packed, at, x)))
