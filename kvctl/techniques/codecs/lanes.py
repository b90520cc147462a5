"""Sixteen numbers at a time, for the loops that numba compiles: what LLVM makes of them are the processor's vectors.

Left to itself LLVM turns loops over a group of 32 or 64 elements into anything between two vector instructions and
hundreds of plain ones. `Numbers` are 16 fp32, `Wholes` 16 int32. Arrays are flat and hold bits: int32 for fp32,
uint16 for bf16, uint8 for codes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES, STEP = 16, 32
BYTE, SHORT, WORD, REAL = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()


class Numbers(types.Type):  # type: ignore[misc]
    """16 fp32."""


class Wholes(types.Type):  # type: ignore[misc]
    """16 int32."""


NUMBERS, WHOLES = Numbers("kvctl_numbers"), Wholes("kvctl_wholes")


def lanes(kind: Any, count: int = LANES) -> Any:
    """LLVM's vector."""
    return ir.VectorType(kind, count)


def every(kind: Any, value: float, count: int = LANES) -> Any:
    """A vector of the same constant."""
    return ir.Constant(lanes(kind, count), [ir.Constant(kind, value)] * count)


@register_model(Numbers)
class _NumbersModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, lanes(REAL))


@register_model(Wholes)
class _WholesModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, lanes(WORD))


def place(context: Any, builder: Any, array: Any, kind: Any, at: Any, vector: Any) -> Any:
    """Pointer to a vector in an array from an element on."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), vector.as_pointer())


def read(context: Any, builder: Any, array: Any, kind: Any, at: Any, vector: Any) -> Any:
    """A vector of an array; need not be aligned."""
    found = builder.load(place(context, builder, array, kind, at, vector))
    found.align = 1
    return found


def write(context: Any, builder: Any, array: Any, kind: Any, at: Any, value: Any) -> None:
    """A vector into an array."""
    builder.store(value, place(context, builder, array, kind, at, value.type)).align = 1


def half_of(second: bool) -> Any:
    """The first or the second `Numbers` of 32 in an array of bits: of fp32 16 and 16, of bf16 the even and the odd."""

    @intrinsic
    def operation(context: Any, array: Any, at: Any) -> Any:
        wide = array.dtype.bitwidth == 32

        def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            at = builder.add(given[1], given[1].type(LANES)) if second and wide else given[1]
            found = read(context, builder, given[0], array, at, lanes(WORD))
            if not wide:
                found = builder.and_(found, every(WORD, -65536)) if second else builder.shl(found, every(WORD, 16))
            return builder.bitcast(found, lanes(REAL))

        return NUMBERS(array, at), make

    return operation


first_of, second_of = half_of(second=False), half_of(second=True)


@intrinsic
def fetch(context: Any, array: Any, at: Any) -> Any:
    """Ask for 32 elements that are needed soon; they need not exist."""
    wide = array.dtype.bitwidth == 32

    def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        pointer = BYTE.as_pointer()
        call = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [pointer, WORD, WORD, WORD]), "llvm.prefetch.p0"
        )
        for line in range(2 if wide else 1):
            start = place(context, builder, given[0], array, builder.add(given[1], given[1].type(line * LANES)), BYTE)
            builder.call(call, [start, WORD(0), WORD(3), WORD(1)])
        return context.get_dummy_value()

    return types.void(array, at), make


@intrinsic
def save(context: Any, array: Any, at: Any, one: Any, two: Any) -> Any:
    """Both halves; bf16 is rounded, ties to even (a NaN must be one that arithmetic makes)."""

    def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        array_value, at, *both = given
        both = [builder.bitcast(half, lanes(WORD)) for half in both]
        if array.dtype.bitwidth == 32:
            write(context, builder, array_value, array, at, both[0])
            write(context, builder, array_value, array, builder.add(at, at.type(LANES)), both[1])
            return context.get_dummy_value()
        near = []
        for half in both:
            odd = builder.and_(builder.lshr(half, every(WORD, 16)), every(WORD, 1))
            near.append(builder.add(builder.add(half, every(WORD, 0x7FFF)), odd))
        low, high = builder.lshr(near[0], every(WORD, 16)), builder.and_(near[1], every(WORD, -65536))
        write(context, builder, array_value, array, at, builder.or_(low, high))
        return context.get_dummy_value()

    return types.void(array, at, one, two), make


@intrinsic
def all_of(context: Any, value: Any) -> Any:
    """Numbers that are all the same."""

    def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        empty = ir.Constant(lanes(REAL), ir.Undefined)
        one = builder.insert_element(empty, given[0], WORD(0))
        return builder.shuffle_vector(one, empty, every(WORD, 0))

    return NUMBERS(types.float32), make


def two(kind: Any, step: Callable[[Any, Any, Any], Any]) -> Any:
    """An operation on two vectors of a kind."""

    @intrinsic
    def operation(context: Any, left: Any, right: Any) -> Any:
        return kind(kind, kind), lambda context, builder, signature, given: step(builder, *given)

    return operation


def lesser(builder: Any, left: Any, right: Any) -> Any:
    """By element; `left` where one is NaN."""
    compare = builder.fcmp_ordered if left.type.element == REAL else builder.icmp_signed
    return builder.select(compare("<", right, left), right, left)


def greater(builder: Any, left: Any, right: Any) -> Any:
    """By element; `left` where one is NaN."""
    compare = builder.fcmp_ordered if left.type.element == REAL else builder.icmp_signed
    return builder.select(compare(">", right, left), right, left)


plus = two(NUMBERS, lambda builder, left, right: builder.fadd(left, right))
minus = two(NUMBERS, lambda builder, left, right: builder.fsub(left, right))
times = two(NUMBERS, lambda builder, left, right: builder.fmul(left, right))
at_most = two(NUMBERS, lesser)
at_least = two(NUMBERS, greater)
least = two(WHOLES, lesser)
most = two(WHOLES, greater)


@intrinsic
def order(context: Any, value: Any) -> Any:
    """Whole numbers in the order of the numbers, NaN beyond Inf."""

    def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        whole = builder.bitcast(given[0], lanes(WORD))
        sign = builder.ashr(whole, every(WORD, 31))
        return builder.xor(whole, builder.and_(sign, every(WORD, 0x7FFFFFFF)))

    return WHOLES(NUMBERS), make


@intrinsic
def folded(context: Any, low: Any, high: Any) -> Any:
    """The least of `low` in lane 0 and, turned by NOT, the most of `high` in lane 8: two folds for one."""

    def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        def mixed(left: Any, right: Any, places: list[int]) -> Any:
            return builder.shuffle_vector(left, right, ir.Constant(lanes(WORD), [ir.Constant(WORD, p) for p in places]))

        low, high = given[0], builder.xor(given[1], every(WORD, -1))
        both = lesser(builder, mixed(low, high, [*range(8), *range(16, 24)]), mixed(low, high, [*range(8, 16), *range(24, 32)]))  # fmt: skip
        for step in (4, 2, 1):
            both = lesser(builder, both, mixed(both, both, [lane ^ step for lane in range(LANES)]))
        return both

    return WHOLES(WHOLES, WHOLES), make


@intrinsic
def lane(context: Any, value: Any, at: Any) -> Any:
    """One of 16."""

    def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.extract_element(given[0], builder.trunc(given[1], WORD))

    return types.int32(WHOLES, types.intp), make


@intrinsic
def whole(context: Any, value: Any) -> Any:
    """Cut off."""
    return WHOLES(NUMBERS), lambda context, builder, signature, given: builder.fptosi(given[0], lanes(WORD))


@intrinsic
def number(context: Any, value: Any) -> Any:
    """fp32 of int32."""
    return NUMBERS(WHOLES), lambda context, builder, signature, given: builder.sitofp(given[0], lanes(REAL))


@intrinsic
def bits_of(context: Any, value: Any) -> Any:
    """int32 with the same bits."""
    return WHOLES(NUMBERS), lambda context, builder, signature, given: builder.bitcast(given[0], lanes(WORD))


@intrinsic
def with_sign(context: Any, size: Any, sign: Any) -> Any:
    """Positive numbers with the signs of others."""

    def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        size, sign = (builder.bitcast(one, lanes(WORD)) for one in given)
        return builder.bitcast(builder.or_(size, builder.and_(sign, every(WORD, -(2**31)))), lanes(REAL))

    return NUMBERS(NUMBERS, NUMBERS), make


@intrinsic
def e4m3(context: Any, value: Any) -> Any:
    """Codes of the nearest e4m3, ties to even; they saturate, NaN stays."""

    def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        value, word = given[0], lambda number: every(WORD, number)
        whole = builder.bitcast(value, lanes(WORD))
        size = builder.and_(whole, word(0x7FFFFFFF))
        lost = builder.icmp_signed(">", size, word(0x7F800000))
        size = builder.select(builder.icmp_signed("<", size, word(0x43E00000)), size, word(0x43E00000))
        odd = builder.and_(builder.lshr(size, word(20)), word(1))
        normal = builder.sub(builder.lshr(builder.add(builder.add(size, word(0x7FFFF)), odd), word(20)), word(0x3C0))
        # Below 2^-6 the steps are of 2^-9, as those of fp32 are between 2^14 and 2^15.
        small = builder.fadd(builder.bitcast(size, lanes(REAL)), every(REAL, 16384.0))
        small = builder.and_(builder.bitcast(small, lanes(WORD)), word(0x3FF))
        code = builder.select(builder.icmp_signed("<", size, word(0x3C800000)), small, normal)
        code = builder.select(lost, word(0x7F), code)
        return builder.or_(code, builder.and_(builder.lshr(whole, word(24)), word(0x80)))

    return WHOLES(NUMBERS), make


@intrinsic
def from_e4m3(context: Any, code: Any) -> Any:
    """Numbers of codes 0 to 255."""

    def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        word = lambda number: every(WORD, number)  # noqa: E731
        size = builder.and_(given[0], word(0x7F))
        value = builder.fmul(builder.bitcast(builder.shl(size, word(20)), lanes(REAL)), every(REAL, 2.0**120))
        value = builder.bitcast(value, lanes(WORD))
        value = builder.select(builder.icmp_signed("==", size, word(0x7F)), word(0x7FC00000), value)
        sign = builder.shl(builder.and_(given[0], word(0x80)), word(24))
        return builder.bitcast(builder.or_(value, sign), lanes(REAL))

    return NUMBERS(WHOLES), make


def in_bytes(builder: Any, one: Any, two: Any, wide: bool) -> Any:
    """The lowest bytes of 32 int32, in order."""
    if wide:
        one, two = builder.trunc(one, lanes(BYTE)), builder.trunc(two, lanes(BYTE))
        places = ir.Constant(lanes(WORD, 32), [ir.Constant(WORD, at) for at in range(32)])
        return builder.shuffle_vector(one, two, places)
    one = builder.and_(one, every(WORD, 255))
    joint = builder.trunc(builder.or_(one, builder.shl(two, every(WORD, 8))), lanes(SHORT))
    return builder.bitcast(joint, lanes(BYTE, 32))


def in_words(builder: Any, codes: Any, wide: bool) -> tuple[Any, Any]:
    """The reverse of `in_bytes`."""
    if wide:
        halves = [
            ir.Constant(lanes(WORD), [ir.Constant(WORD, at + start) for at in range(LANES)]) for start in (0, LANES)
        ]
        one, two = (builder.zext(builder.shuffle_vector(codes, codes, half), lanes(WORD)) for half in halves)
        return one, two
    joint = builder.zext(builder.bitcast(codes, lanes(SHORT)), lanes(WORD))
    return builder.and_(joint, every(WORD, 255)), builder.lshr(joint, every(WORD, 8))


def put(width: int, halves: bool = False) -> Any:
    """Codes of 32 elements into bytes, neighbours (or element j and j + 16) in one, the first lowest.

    `like` is the array that the elements were of.
    """
    per = 8 // width
    group = ir.IntType(8 * per)

    @intrinsic
    def operation(context: Any, array: Any, at: Any, one: Any, two: Any, like: Any) -> Any:
        wide = like.dtype.bitwidth == 32

        def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            one, two = given[2], given[3]
            if halves:
                loose = in_bytes(builder, one, two, wide)
                low, high = (
                    ir.Constant(lanes(WORD), [ir.Constant(WORD, at + start) for at in range(LANES)])
                    for start in (0, LANES)
                )
                low, high = builder.shuffle_vector(loose, loose, low), builder.shuffle_vector(loose, loose, high)
                high = builder.shl(builder.bitcast(high, lanes(SHORT, 8)), every(SHORT, 4, 8))
                packed = builder.or_(low, builder.bitcast(high, lanes(BYTE)))
            elif per == 1:
                packed = in_bytes(builder, one, two, wide)
            elif wide:
                loose = builder.bitcast(in_bytes(builder, one, two, wide), lanes(group, 32 // per))
                packed = loose
                for place in range(1, per):
                    packed = builder.or_(packed, builder.lshr(loose, every(group, place * (8 - width), 32 // per)))
                packed = builder.trunc(packed, lanes(BYTE, 32 // per))
            else:
                packed = builder.trunc(builder.or_(one, builder.shl(two, every(WORD, width))), lanes(BYTE))
                if per == 4:
                    packed = builder.bitcast(packed, lanes(SHORT, 8))
                    packed = builder.trunc(
                        builder.or_(packed, builder.lshr(packed, every(SHORT, 4, 8))), lanes(BYTE, 8)
                    )
            write(context, builder, given[0], array, given[1], packed)
            return context.get_dummy_value()

        return types.void(array, at, one, two, like), make

    return operation


def take(width: int, second: bool, halves: bool = False, signed: bool = False) -> Any:
    """The first or the second half of what `put` wrote."""
    per = 8 // width
    group = ir.IntType(8 * per)

    @intrinsic
    def operation(context: Any, array: Any, at: Any, like: Any) -> Any:
        wide = like.dtype.bitwidth == 32

        def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
            found = read(context, builder, given[0], array, given[1], lanes(BYTE, 32 // per))
            if halves:
                places = ir.Constant(lanes(WORD, 32), [ir.Constant(WORD, lane) for lane in range(32)])
                high = builder.lshr(builder.bitcast(found, lanes(SHORT, 8)), every(SHORT, 4, 8))
                found = builder.shuffle_vector(found, builder.bitcast(high, lanes(BYTE)), places)
                found = builder.and_(found, every(BYTE, 15, 32))
            elif per > 1 and not wide:
                if per == 4:
                    found = builder.zext(found, lanes(SHORT, 8))
                    found = builder.and_(
                        builder.or_(found, builder.shl(found, every(SHORT, 4, 8))), every(SHORT, 0x0F0F, 8)
                    )
                    found = builder.bitcast(found, lanes(BYTE))
                found = builder.zext(found, lanes(WORD))
                return (
                    builder.lshr(found, every(WORD, width))
                    if second
                    else builder.and_(found, every(WORD, 2**width - 1))
                )
            elif per > 1:
                spread = packed = builder.zext(found, lanes(group, 32 // per))
                for place in range(1, per):
                    spread = builder.or_(spread, builder.shl(packed, every(group, place * (8 - width), 32 // per)))
                mask = int.from_bytes(bytes([2**width - 1] * per), "little")
                found = builder.bitcast(builder.and_(spread, every(group, mask, 32 // per)), lanes(BYTE, 32))
            code = in_words(builder, found, wide)[second]
            if signed:
                code = builder.ashr(builder.shl(code, every(WORD, 24)), every(WORD, 24))
            return code

        return WHOLES(array, at, like), make

    return operation


put8, put4, put2, put_halves = put(8), put(4), put(2), put(4, halves=True)
first8, first4, first2, first_halves, first_signed = (
    take(8, False), take(4, False), take(2, False), take(4, False, halves=True), take(8, False, signed=True),
)  # fmt: skip
second8, second4, second2, second_halves, second_signed = (
    take(8, True), take(4, True), take(2, True), take(4, True, halves=True), take(8, True, signed=True),
)  # fmt: skip


@intrinsic
def above(context: Any, codes: Any, others: Any, places: Any) -> Any:
    """Codes and, shifted left, others."""

    def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.or_(given[0], builder.shl(given[1], spread(builder, given[2])))

    return WHOLES(WHOLES, WHOLES, types.intp), make


@intrinsic
def part(context: Any, codes: Any, places: Any, mask: Any) -> Any:
    """Bits of bytes, from a place on."""

    def make(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return builder.and_(builder.lshr(given[0], spread(builder, given[1])), spread(builder, given[2]))

    return WHOLES(WHOLES, types.intp, types.intp), make


def spread(builder: Any, whole: Any) -> Any:
    """16 times an integer."""
    empty = ir.Constant(lanes(WORD), ir.Undefined)
    return builder.shuffle_vector(
        builder.insert_element(empty, builder.trunc(whole, WORD), WORD(0)), empty, every(WORD, 0)
    )


@intrinsic
def numbers_of(context: Any, whole: Any) -> Any:
    """The reverse of `bits_of`."""
    return NUMBERS(WHOLES), lambda context, builder, signature, given: builder.bitcast(given[0], lanes(REAL))
