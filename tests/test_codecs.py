"""Codecs against slow float64 definitions, gguf's quantizers and ggml itself."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvctl.errors import UsageError
from kvctl.formats import cache_format
from kvctl.techniques.codecs import CODECS, Fp8, Microscaled, codec, grouped
from kvctl.techniques.codecs.blocks import GGML_TYPES

HEADS = [(1, 64), (3, 64), (2, 80), (2, 96), (1, 128)]
GROUPED = [
    *(grouped(bits, group, symmetric=sym) for bits in (8, 4, 2) for group in (64, 32, 0) for sym in (False, True)),
    *(grouped(bits, 32, symmetric=sym, per_channel=True) for bits in (8, 4, 2) for sym in (False, True)),
    grouped(4, 64, scale="bf16"),
    grouped(4, 64, scale="fp32"),
    grouped(8, 64, scale="bf16"),
    grouped(8, 16, scale="fp32", per_channel=True),
]
ALL = [*GROUPED, *(one for name, one in CODECS.items() if name not in ("int8", "int4", "int2"))]


def ids(one: object) -> str:
    return str(getattr(one, "name", one))


# ---- without torch


def test_importing_codecs_loads_no_torch() -> None:
    code = (
        "import sys, kvctl.techniques.codecs as c; c.codec('int4').bytes(1, 1, 64, 2); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", [name for name in CODECS if name not in ("int4_per_token_head", "fp8_e5m2")])
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (8, 128), (3, 192)])
def test_bytes_are_those_of_the_cache_formats(name: str, heads: int, dim: int) -> None:
    assert codec(name).bytes(7, heads, dim, 2) == 7 * cache_format(name).row_bytes(heads * dim, heads)


def test_bytes_by_hand() -> None:
    # 96 = 64 + 32: 48 bytes of codes and two groups of 4 bytes; two heads, ten tokens.
    assert grouped(4).bytes(10, 2, 96, 2) == 10 * 2 * (48 + 8)
    # KIVI keys: 64 tokens in two groups, 2 bits, 80 channels each with 4 bytes a group.
    assert grouped(2, per_channel=True).bytes(64, 3, 80, 2) == 3 * (64 * 80 // 4 + 2 * 80 * 4)
    assert grouped(8, 0, symmetric=True, scale="fp32").bytes(5, 2, 64, 2) == 5 * 2 * (64 + 4)
    assert codec("int4_per_token_head").bytes(5, 2, 64, 2) == 5 * 2 * (32 + 4)


@pytest.mark.parametrize(
    ("name", "heads", "dim"),
    [("q4_0", 1, 80), ("mxfp8", 2, 80), ("nvfp4", 2, 72), ("int4_per_token_head", 1, 65), ("int2", 1, 66)],
)
def test_what_does_not_fit_is_refused(name: str, heads: int, dim: int) -> None:
    with pytest.raises(UsageError, match=rf"^{name}: cannot pack {heads} heads of {dim} "):
        codec(name).check(heads, dim)


def test_llama_cpp_blocks_may_cross_heads() -> None:
    codec("q8_0").check(2, 80)  # 160 = 5 blocks


def test_names() -> None:
    assert [one.name for one in (grouped(8), grouped(4, 32, symmetric=True), grouped(2, 0), grouped(4, per_channel=True))] == [
        "int8", "int4-g32-sym", "int2-head", "int4-channel-g32",
    ]  # fmt: skip
    with pytest.raises(UsageError, match="unknown codec 'int5'"):
        codec("int5")
    with pytest.raises(UsageError, match="2 scales"):
        Fp8("fp8", scales=(1.0, 2.0)).check(3, 64)


# ---- kernels: every codec

engine = pytest.mark.engine


@pytest.fixture(scope="module")
def torch():  # type: ignore[no-untyped-def]
    return pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's passes; that numba's loops give the same bits is in test_codecs_loops.py."""
    if importlib.util.find_spec("torch") is not None:
        from kvctl.techniques.codecs import fast

        monkeypatch.setattr(fast, "loops", lambda: None)


def sample(torch, heads, dim, tokens=64, dtype="float32", seed=0):  # type: ignore[no-untyped-def]
    """Channels of different size and offset, an outlier channel, as keys have."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(2, heads, tokens, dim, generator=make)
    x = x * (0.1 + torch.rand(heads, 1, dim, generator=make) * 3) + torch.randn(heads, 1, dim, generator=make)
    x[..., 3] = x[..., 3] * 20 + 50
    return x.to(getattr(torch, dtype))


def fits(one, heads, dim):  # type: ignore[no-untyped-def]
    try:
        one.check(heads, dim)
    except UsageError:
        pytest.skip("refused")


def relative_bound(torch, one, x):  # type: ignore[no-untyped-def]
    """The largest error that the definition allows for each element, in float64, from x alone."""
    name = one.name
    x = x.double()
    if name.startswith("fp8") and "head" not in name:
        bits, least = (3, 2.0**-10) if one.form == "e4m3" else (2, 2.0**-17)
        return (x.abs() * 2.0 ** -(bits + 1)).clamp(min=least)
    if name in ("mxfp8", "mxfp4", "nvfp4"):
        rows = (
            x.unflatten(-1, (-1, one.block))
            .abs()
            .amax(-1, keepdim=True)
            .expand(*x.shape[:-1], -1, one.block)
            .flatten(-2)
        )
        # mxfp8: top / 2^floor is below 512, so 448 saturates at worst by 64/512; mxfp4: 6 of 8 at worst.
        return rows * {"mxfp8": 1 / 8, "mxfp4": 1 / 4, "nvfp4": 1 / 6 + 1 / 12}[name] + 2.0**-9
    if name.endswith("per_token_head"):
        span = x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)
        top = x.abs().amax(-1, keepdim=True)
        # int4's zero point is a whole number in 0..15: half a step more, and all of what lies beyond 0.
        beyond = x.amin(-1, keepdim=True).clamp(min=0) + (-x.amax(-1, keepdim=True)).clamp(min=0)
        return {"fp8": top / 16 / 1.5, "int8": top / 127 * 0.501, "int4": span / 15 * 1.01 + beyond}[
            one.form
        ].expand_as(x)
    if name in GGML_TYPES:
        row = x if x.shape[-1] % 32 == 0 else x.transpose(1, 2).flatten(-2)
        rows = row.unflatten(-1, (-1, 32))
        top, span = rows.abs().amax(-1, keepdim=True), rows.amax(-1, keepdim=True) - rows.amin(-1, keepdim=True)
        bound = {
            "q8_0": top / 127 * 0.51 + top * 2**-11, "q4_0": top / 8 * 1.01, "q5_0": top / 16 * 1.02,
            "q4_1": span / 15 * 0.51 + top * 2**-10, "q5_1": span / 31 * 0.51 + top * 2**-10, "iq4_nl": top * 0.2,
        }[name]  # fmt: skip
        bound = bound.expand_as(rows).flatten(-2)
        return bound if x.shape[-1] % 32 == 0 else bound.unflatten(-1, (-1, x.shape[-1])).transpose(1, 2)
    raise AssertionError(name)


OTHERS = [one for one in ALL if one not in GROUPED]


@engine
@pytest.mark.parametrize("one", OTHERS, ids=ids)
@pytest.mark.parametrize(("heads", "dim"), HEADS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_error_stays_within_the_definition(torch, one, heads, dim, dtype) -> None:  # type: ignore[no-untyped-def]
    fits(one, heads, dim)
    x = sample(torch, heads, dim, dtype=dtype)
    kernel = one.kernel()
    back = kernel.decode(kernel.encode(x), torch.float32, dim)
    assert back.shape == x.shape
    assert ((back.double() - x.double()).abs() <= relative_bound(torch, one, x) + 1e-6).all()


@engine
@pytest.mark.parametrize("one", ALL, ids=ids)
@pytest.mark.parametrize(("heads", "dim"), HEADS)
@pytest.mark.parametrize("groups", [0, 1, 3])
def test_parts_take_the_predicted_bytes(torch, one, heads, dim, groups) -> None:  # type: ignore[no-untyped-def]
    fits(one, heads, dim)
    tokens = groups * one.tokens
    x = sample(torch, heads, dim, tokens)
    kernel = one.kernel()
    parts = kernel.encode(x)
    assert sum(part.nbytes for part in parts) == 2 * one.bytes(tokens, heads, dim, 4)
    assert all(part.shape[0] == 2 and part.shape[1] in (1, heads) and part.shape[2] == groups for part in parts)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        back = kernel.decode(parts, dtype, dim)
        assert back.dtype == dtype
        assert back.shape == x.shape


def same(torch, left, right):  # type: ignore[no-untyped-def]
    """Bit for bit."""
    return left.shape == right.shape and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


@engine
@pytest.mark.parametrize("one", ALL, ids=ids)
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (2, 80), (2, 96)])
def test_encoding_in_pieces_is_encoding_at_once(torch, one, heads, dim) -> None:  # type: ignore[no-untyped-def]
    fits(one, heads, dim)
    x = sample(torch, heads, dim, 4 * one.tokens)
    kernel = one.kernel()
    whole = kernel.encode(x)
    pieces = [kernel.encode(x[:, :, at : at + one.tokens]) for at in range(0, 4 * one.tokens, one.tokens)]
    appended = [torch.cat(parts, 2) for parts in zip(*pieces, strict=True)]
    assert all(same(torch, left, right) for left, right in zip(whole, appended, strict=True))
    # Beams permute the first dimension; tokens are gathered where they are packed one by one.
    turned = kernel.decode(tuple(part.flip(0) for part in whole), torch.float32, dim)
    assert same(torch, turned, kernel.decode(whole, torch.float32, dim).flip(0))
    if one.tokens == 1:
        kept = kernel.decode(tuple(part[:, :, [0, 2]] for part in whole), torch.float32, dim)
        assert same(torch, kept, kernel.decode(whole, torch.float32, dim)[:, :, [0, 2]])
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert all(same(torch, left, right) for left, right in zip(whole, kernel.encode(strided), strict=True))


@engine
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("one", [one for one in ALL if not isinstance(one, Fp8)], ids=ids)
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (2, 96), (2, 80)])
def test_not_finite_poisons_its_group_alone(torch, one, bad, heads, dim) -> None:  # type: ignore[no-untyped-def]
    fits(one, heads, dim)
    x = sample(torch, heads, dim, 2 * one.tokens)
    kernel = one.kernel()
    clean = kernel.decode(kernel.encode(x), torch.float32, dim)
    x[0, 1, one.tokens, 5] = bad
    back = kernel.decode(kernel.encode(x), torch.float32, dim)
    assert torch.isnan(back[0, 1, one.tokens, 5])
    spoilt = torch.isnan(back)
    # One group at most: channel 5 of the second group of tokens, or channels of one token's row.
    outside = spoilt.clone()
    if one.tokens > 1:
        outside[0, 1, one.tokens :, 5] = False
    elif dim % 32 and one.name in GGML_TYPES:
        outside[0, :, 1] = False
    else:
        outside[0, 1, 1] = False
    assert not outside.any()
    if getattr(one, "group", 0) in (16, 32) and one.tokens == 1:
        assert spoilt.sum() == one.group
    assert torch.allclose(back[~spoilt], clean[~spoilt], rtol=1e-6, atol=0)


@engine
def test_fp8_saturates_element_by_element(torch) -> None:  # type: ignore[no-untyped-def]
    x = torch.tensor([1e6, -1e6, math.inf, -math.inf, math.nan, 0.0, 447.0, 1.0]).view(1, 1, 1, 8)
    for form, most in (("e4m3", 448.0), ("e5m2", 57344.0)):
        kernel = Fp8("fp8", form=form).kernel()
        back = kernel.decode(kernel.encode(x), torch.float32, 8).flatten()
        assert back[:4].tolist() == [most, -most, most, -most]
        assert torch.isnan(back[4])
        assert back[5] == 0.0
        assert back[7] == 1.0


@engine
def test_fp8_static_scales(torch) -> None:  # type: ignore[no-untyped-def]
    x = torch.full((1, 2, 1, 4), 896.0)
    kernel = Fp8("fp8", scales=(2.0, 1.0)).kernel()
    back = kernel.decode(kernel.encode(x), torch.float32, 4)
    assert back[0, :, 0, 0].tolist() == [896.0, 448.0]


@engine
@pytest.mark.parametrize(("form", "name", "most"), [("e4m3", "fp8", 448.0), ("e5m2", "fp8_e5m2", 57344.0)])
def test_fp8_scaled_by_its_first_tokens(torch, form, name, most) -> None:  # type: ignore[no-untyped-def]
    """One scale for all of them and all that come later: the largest over the largest number; NaN and Inf say nothing."""
    x = sample(torch, 2, 64, 5) * 1e5
    top = float(x.abs().max())
    spoilt = x.clone()
    spoilt[0, 0, 0, :2] = torch.tensor([math.inf, math.nan])
    kernel = Fp8(name, form=form, calibrated=True).kernel()
    back = kernel.decode(kernel.encode(spoilt), torch.float32, 64)
    assert kernel.scale.shape == (1,)
    assert kernel.scale.dtype == torch.float32
    assert float(kernel.scale) == pytest.approx(top / most)
    # Half of the last of 3 or 2 bits behind the point, and what is lost in the smallest numbers.
    assert ((back - x).abs() <= x.abs() / (16 if form == "e4m3" else 8) + top / most * 2.0**-9)[~(spoilt != x)].all()
    assert float(back[0, 0, 0, 0]) == pytest.approx(top)
    assert back[0, 0, 0, 1].isnan()
    later = kernel.decode(kernel.encode(torch.full((1, 1, 1, 64), 2 * top)), torch.float32, 64)
    assert later.unique().tolist() == [pytest.approx(top)]


@engine
def test_fp8_scaled_of_nothing(torch) -> None:  # type: ignore[no-untyped-def]
    kernel = Fp8("fp8", calibrated=True).kernel()
    assert kernel.decode(kernel.encode(torch.zeros(1, 2, 0, 64)), torch.float32, 64).shape == (1, 2, 0, 64)
    assert kernel.scale is None
    assert not kernel.decode(kernel.encode(torch.zeros(1, 2, 3, 64)), torch.float32, 64).any()
    one = kernel.decode(kernel.encode(torch.ones(1, 2, 3, 64)), torch.float32, 64)
    assert one.unique().tolist() == [1.0]


@engine
@pytest.mark.parametrize(
    ("form", "values", "largest"), [("e4m3", (1e3, -448, 440, 400), 3), ("e5m2", (1e6, -57344, 57000, 40000), 3)]
)
def test_what_a_plain_cast_cannot_hold(torch, form, values, largest) -> None:  # type: ignore[no-untyped-def]
    """440 of e4m3 lies nearer to 448 than to 416, 57,000 of e5m2 to 57,344 than to 49,152."""
    from kvctl.techniques.codecs.float_kernels import at_ends

    (packed,) = (
        Fp8("fp8", form=form).kernel().encode(torch.tensor([*values, 1e-9, -1e-9, 0.0, math.nan]).view(1, 1, 1, 8))
    )
    assert at_ends(packed, form) == (largest, 3)


# ---- small floats: every value from its definition


def minifloat(byte: int, exponents: int, mantissa: int, bias: int) -> float:
    sign = -1.0 if byte >> (exponents + mantissa) & 1 else 1.0
    exponent, fraction = byte >> mantissa & (2**exponents - 1), byte & (2**mantissa - 1)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias - mantissa)
    return sign * (1 + fraction / 2**mantissa) * 2.0 ** (exponent - bias)


E4M3 = [minifloat(byte, 4, 3, 7) for byte in range(127)]
E5M2 = [minifloat(byte, 5, 2, 15) for byte in range(124)]
E2M1 = [minifloat(byte, 2, 1, 1) for byte in range(8)]


def nearest(value: float, table: list[float]) -> float:
    """The nearest of the table's values, ties to the even code; beyond its end the last."""
    size = abs(value)
    code = min(range(len(table)), key=lambda at: (abs(table[at] - size), at % 2))
    return math.copysign(table[code], value)


@engine
@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "mxfp8", "mxfp4", "nvfp4"])
def test_small_floats_round_as_defined(torch, name) -> None:  # type: ignore[no-untyped-def]
    x = sample(torch, 1, 32, 6)
    x[0, 0, 0] *= 100
    x[0, 0, 1] *= 1e-4
    x[0, 0, 2] = 0
    kernel = codec(name).kernel()
    back = kernel.decode(kernel.encode(x), torch.float32, 32)
    for row, got in zip(x.view(-1, 32).tolist(), back.view(-1, 32).tolist(), strict=True):
        if name.startswith("fp8"):
            assert got == [nearest(value, E4M3 if name == "fp8" else E5M2) for value in row]
            continue
        size = 16 if name == "nvfp4" else 32
        for at in range(0, 32, size):
            block = row[at : at + size]
            top = max(map(abs, block))
            if name == "nvfp4":
                step = nearest(top / 6, E4M3)
            else:
                step = 2.0 ** (math.floor(math.log2(top)) - (8 if name == "mxfp8" else 2)) if top else 1.0
            table = E4M3 if name == "mxfp8" else E2M1
            want = [nearest(value / step, table) * step if step else 0.0 for value in block]
            assert got[at : at + size] == pytest.approx(want, rel=1e-6, abs=1e-12)


@engine
def test_nvfp4_takes_a_scale_of_the_tensor(torch) -> None:  # type: ignore[no-untyped-def]
    x = sample(torch, 2, 64) * 1e4
    small = Microscaled("nvfp4", tensor_scale=float(x.abs().max()) / (6 * 448)).kernel()
    back = small.decode(small.encode(x), torch.float32, 64)
    tops = x.unflatten(-1, (4, 16)).abs().amax(-1, keepdim=True)
    assert ((back - x).abs().unflatten(-1, (4, 16)) <= tops / 4 + float(x.abs().max()) * 2**-16).all()
    plain = codec("nvfp4").kernel()
    assert plain.decode(plain.encode(x), torch.float32, 64).abs().max() == 6 * 448


@engine
@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_per_token_head_is_vllms(torch, form) -> None:  # type: ignore[no-untyped-def]
    """From the definition in vLLM's kernels, in float64."""
    x = sample(torch, 2, 64, 5)
    x[0, 0, 0] = 0
    one = codec(f"{form}_per_token_head")
    kernel = one.kernel()
    back = kernel.decode(kernel.encode(x), torch.float32, 64)
    for row, got in zip(x.view(-1, 64).tolist(), back.view(-1, 64).tolist(), strict=True):
        if form == "int4":
            step = max((max(row) - min(row)) / 15, 1e-6)
            zero = min(max(math.floor(-min(row) / step + 0.5), 0), 15)
            want = [(min(max(math.floor(value / step + zero + 0.5), 0), 15) - zero) * step for value in row]
        else:
            step = max(max(map(abs, row)) / (448 if form == "fp8" else 127), 1e-6)
            codes = [
                nearest(v / step, E4M3) if form == "fp8" else math.copysign(math.floor(abs(v / step) + 0.5), v)
                for v in row
            ]
            want = [value * step for value in codes]
        wrong = sum(abs(a - b) > 1e-5 * max(map(abs, row)) + 1e-9 for a, b in zip(got, want, strict=True))
        assert wrong <= 1  # a tie that fp32 sees otherwise


# ---- grouped integers


def slow_groups(one, x):  # type: ignore[no-untyped-def]
    """(indices of a group's elements) for every group of x [batch, heads, tokens, dim]."""
    batch, heads, tokens, dim = x.shape
    for b in range(batch):
        for h in range(heads):
            if one.tokens > 1:
                for t in range(0, tokens, one.tokens):
                    for d in range(dim):
                        yield [(b, h, t + i, d) for i in range(one.tokens)]
            else:
                size = one.group or dim
                for t in range(tokens):
                    for d in range(0, dim, size):
                        yield [(b, h, t, i) for i in range(d, min(d + size, dim))]


def slow_number(torch, value, scale):  # type: ignore[no-untyped-def]
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[scale]
    most = torch.finfo(dtype).max
    return float(torch.tensor(min(max(value, -most), most), dtype=torch.float32).to(dtype))


def slow_decode(torch, one, values):  # type: ignore[no-untyped-def]
    """What a group decodes to, and its step, in float64."""
    if one.symmetric:
        levels = 2 ** (one.bits - 1) - 1
        step = slow_number(torch, max(map(abs, values)) / levels, one.scale)
        return [min(max(round(v / step), -levels), levels) * step if step else 0.0 for v in values], step
    levels = 2**one.bits - 1
    low = slow_number(torch, min(values), one.scale)
    step = slow_number(torch, (max(values) - low) / levels, one.scale) or 1.0
    return [min(max(round((v - low) / step), 0), levels) * step + low for v in values], step


def check_grouped(torch, one, x):  # type: ignore[no-untyped-def]
    dim = x.shape[-1]
    kernel = one.kernel()
    got = kernel.decode(kernel.encode(x), torch.float32, dim).double().tolist()
    source = x.double().tolist()
    ties = count = 0
    for group in slow_groups(one, x):
        values = [source[b][h][t][d] for b, h, t, d in group]
        want, step = slow_decode(torch, one, values)
        top = max(map(abs, values)) + abs(step)
        low = 0.0 if one.symmetric else slow_number(torch, min(values), one.scale)
        for (b, h, t, d), expected, value in zip(group, want, values, strict=True):
            error = abs(got[b][h][t][d] - expected)
            count += 1
            # The next code is right only where fp32 cannot tell which is nearer.
            if error > 4e-6 * top:
                assert error <= abs(step) * 1.001 + 4e-6 * top
                assert abs((value - low) / step % 1 - 0.5) <= 1e-3 + 1e-6 * top / abs(step)
                ties += 1
    assert ties <= max(2, count // 100)


@engine
@pytest.mark.parametrize("one", GROUPED, ids=ids)
@pytest.mark.parametrize(
    ("heads", "dim", "dtype"), [(1, 64, "float32"), (2, 80, "float32"), (2, 96, "float16"), (1, 128, "bfloat16")]
)
def test_grouped_integers_against_the_definition(torch, one, heads, dim, dtype) -> None:  # type: ignore[no-untyped-def]
    check_grouped(torch, one, sample(torch, heads, dim, one.tokens, dtype))


@engine
@pytest.mark.parametrize("one", GROUPED, ids=ids)
@pytest.mark.parametrize("size", [1e-9, 1e-5, 3e4, 1e6])
def test_grouped_integers_of_any_size(torch, one, size) -> None:  # type: ignore[no-untyped-def]
    """Below fp16's least and above its largest number nothing becomes Inf or NaN."""
    x = torch.randn(1, 2, one.tokens, 64, generator=torch.Generator().manual_seed(1)) * size
    check_grouped(torch, one, x)


@engine
@pytest.mark.parametrize("one", GROUPED, ids=ids)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.7, 123.456, 1e-6])
def test_constant_groups(torch, one, value) -> None:  # type: ignore[no-untyped-def]
    x = torch.full((1, 1, one.tokens, 64), value)
    kernel = one.kernel()
    back = kernel.decode(kernel.encode(x), torch.float32, 64)
    ulp = {"fp16": 2**-11, "bf16": 2**-8, "fp32": 2**-23}[one.scale]
    if value == 1e-6 and one.symmetric:
        assert (back - value).abs().max() <= 1e-6  # the scale may vanish in fp16
    else:
        assert (back - value).abs().max() <= abs(value) * ulp + 2**-25


@engine
@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("group", [64, 32, 16])
def test_fused_quantizers_write_what_the_formulas_do(torch, bits, group) -> None:  # type: ignore[no-untyped-def]
    from kvctl.techniques.codecs import integer_kernels

    if not integer_kernels.FUSED:
        pytest.skip("this torch has no fbgemm")
    rows = sample(torch, 8, group, 512).reshape(-1, group)
    rows[:50] = rows[:50, :1]
    rows[50:100] *= 1e-6
    rows[100:150] += 1000
    fused = integer_kernels.fused_rows(rows, bits)
    plain = integer_kernels.plain_rows(rows, bits)
    assert same(torch, fused, plain)
    assert torch.allclose(
        integer_kernels.fused_restore(fused, bits), integer_kernels.plain_restore(plain, bits), rtol=1e-5, atol=1e-6
    )


@engine
def test_packing_order(torch) -> None:  # type: ignore[no-untyped-def]
    """Documented: neighbours share a byte, the first lowest; per channel the tokens r, r + rows, ... do."""
    x = torch.arange(16.0).view(1, 1, 1, 16)
    (part,) = grouped(4, 16).kernel().encode(x)
    assert part.flatten()[:8].tolist() == [low | (low + 1) << 4 for low in range(0, 16, 2)]
    assert part.flatten()[8:].contiguous().view(torch.float16).tolist() == [1.0, 0.0]
    codes, scale, minimum = grouped(4, 16, per_channel=True).kernel().encode(x.view(1, 1, 16, 1))
    assert codes.flatten().tolist() == [low | (low + 8) << 4 for low in range(8)]
    assert (scale.item(), minimum.item()) == (1.0, 0.0)


# ---- llama.cpp


@engine
@pytest.mark.parametrize("name", GGML_TYPES)
@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (2, 80)])
def test_blocks_are_those_of_the_gguf_package(torch, name, heads, dim) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("numpy")
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name.upper()]
    x = sample(torch, heads, dim, 300)
    x[0, 0, 0] = 0
    kernel = codec(name).kernel()
    (part,) = kernel.encode(x)
    row = x if dim % 32 == 0 else x.transpose(1, 2).reshape(2, 1, 300, heads * dim)
    if name != "iq4_nl":  # which the package only reads
        assert (gguf.quants.quantize(row.numpy(), kind) == part.numpy()).all()
    want = torch.from_numpy(gguf.quants.dequantize(part.numpy(), kind))
    if dim % 32:
        want = want.view(2, 300, heads, dim).transpose(1, 2)
    assert torch.equal(kernel.decode((part,), torch.float32, dim), want)


@engine
@pytest.mark.parametrize("name", GGML_TYPES)
def test_blocks_are_those_of_ggml(torch, name) -> None:  # type: ignore[no-untyped-def]
    folder = os.environ.get("KVCTL_GGML")
    if not folder or not (path := Path(folder) / "libggml-base.so").exists():
        pytest.skip("KVCTL_GGML names no folder with libggml-base.so")
    ggml = ctypes.CDLL(str(path))
    x = sample(torch, 3, 64, 2000)
    x[0, 0, 0] = 0
    x[0, 0, 1] *= 1e-18
    x[0, 0, 2] = torch.arange(64) - 32.0
    (part,) = codec(name).kernel().encode(x)
    out = torch.zeros_like(part)
    call = getattr(ggml, f"quantize_row_{name}_ref")
    call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    call(x.data_ptr(), out.data_ptr(), x.numel())
    size = cache_format(name).block_bytes
    ours, theirs = part.view(-1, size), out.view(-1, size)
    if name == "iq4_nl":  # ggml leaves the codes of the block before in blocks of (next to) nothing: they decode to 0
        nothing = x.view(-1, 32).abs().amax(1) < 1e-15
        assert torch.equal(ours[nothing, :2], theirs[nothing, :2])
        ours, theirs = ours[~nothing], theirs[~nothing]
    assert torch.equal(ours, theirs)


# ---- Hadamard


@engine
@pytest.mark.parametrize("dim", [1, 2, 64, 80, 96, 128, 512, 65])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_is_orthonormal_and_its_own_inverse(torch, dim, dtype) -> None:  # type: ignore[no-untyped-def]
    from kvctl.techniques.codecs.hadamard import rotate, rotated_width

    x = sample(torch, 2, max(dim, 4), 5)[..., :dim].to(getattr(torch, dtype))
    y = rotate(x)
    assert y.dtype == x.dtype
    slack = 1e-5 if dtype == "float32" else 0.02
    assert torch.allclose(rotate(y).double(), x.double(), rtol=slack, atol=slack * float(x.abs().max()))
    width = rotated_width(dim)
    assert dim % width == 0
    assert width & (width - 1) == 0
    assert dim // width % 2 == 1
    # From the definition: entry (i, j) is (-1)^(bits that i and j share) / sqrt(width).
    signs = [[(-1.0) ** bin(i & j).count("1") for j in range(width)] for i in range(width)]
    matrix = torch.tensor(signs, dtype=torch.float64) / width**0.5
    want = (x.double().unflatten(-1, (-1, width)) @ matrix).flatten(-2)
    assert torch.allclose(y.double(), want, rtol=slack, atol=slack * float(x.abs().max()))
