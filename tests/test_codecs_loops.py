"""The loops that numba compiles: to the bit what torch's passes give, and how fast."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from test_codecs import same, sample  # noqa: E402

from kvctl.measure.idle import Others  # noqa: E402
from kvctl.techniques.codecs import CODECS, Codec, fast, grouped  # noqa: E402

pytestmark = pytest.mark.engine

LOOPS = [
    grouped(8), grouped(4), grouped(2), grouped(8, symmetric=True), grouped(4, 32, symmetric=True, scale="bf16"),
    grouped(2, 0, scale="fp32"), grouped(8, per_channel=True), grouped(4, per_channel=True),
    grouped(2, per_channel=True, symmetric=True), *(CODECS[name] for name in (
        "fp8", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "q8_0", "q4_0", "q4_1")),
]  # fmt: skip


SAMPLE = [grouped(8), grouped(4), grouped(4, per_channel=True), CODECS["fp8"], CODECS["q8_0"]]


def alike(left: Any, right: Any) -> bool:
    """Bit for bit, but for which NaN it is."""
    if left.dtype.is_floating_point and torch.equal(left.isnan(), right.isnan()):
        left, right = left.nan_to_num(0.0), right.nan_to_num(0.0)
    return left.dtype == right.dtype and same(torch, left, right)


def cases(one: Codec, dim: int, dtype: str) -> Iterator[Any]:
    x = sample(torch, 3, dim, 96, dtype)
    yield x
    yield x * 1e-6
    yield x * (1000.0 if dtype == "float16" else 1e30)
    # One sign of zero in a group: which of two is the least is left open.
    ties = x.round() + 0.0
    ties[0, 0] = -ties[0, 0].abs()
    ties[:, 0, :32] = -0.0
    ties[0, 1, 5, : dim // 2] = 0.0 - ties[0, 1, 5, dim // 2 :]
    yield ties
    lost = x.clone()
    lost[0, 1, one.tokens, 5], lost[1, 0, 3, 7], lost[1, 1, 4, 7] = math.nan, math.inf, -math.inf
    lost[0, 0, 0] = 0
    yield lost


@pytest.mark.parametrize("one", [
    pytest.param(one, id=one.name, marks=[] if one in SAMPLE else pytest.mark.slow) for one in LOOPS  # each is compiled anew
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loops_write_what_torch_does(one: Codec, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, wanted = one.kernel(), getattr(torch, dtype)
    for x in cases(one, 64, dtype):
        parts = kernel.encode(x)
        back = kernel.decode(parts, wanted, 64)
        with monkeypatch.context() as patch:
            patch.setattr(fast, "loops", lambda: None)
            plain = kernel.encode(x)
            plain_back = kernel.decode(plain, wanted, 64)
        if one.name == "fp8":  # of NaN the sign is left open
            assert (((parts[0] ^ plain[0]) & 0x7F) == 0).all()
        else:
            assert all(alike(left, right) for left, right in zip(parts, plain, strict=True))
        assert alike(back, plain_back)


def test_threads_share_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in shares that do not come out even are those of one thread."""
    x = sample(torch, 3, 64, 1001)
    for one in (grouped(4), CODECS["q8_0"]):
        kernel = one.kernel()
        alone = kernel.encode(x)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "get_num_threads", lambda: 3)
            patch.setattr(fast, "SHARE", 1)
            shared = kernel.encode(x)
            back = kernel.decode(shared, torch.float32, 64)
        assert all(same(torch, left, right) for left, right in zip(alone, shared, strict=True))
        assert same(torch, back, kernel.decode(alone, torch.float32, 64))


@pytest.mark.slow
@pytest.mark.parametrize("one", [grouped(8), grouped(4), CODECS["int8_per_token_head"]], ids=lambda one: one.name)
def test_half_of_a_copys_bandwidth(one: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns with the copy; a machine that others work on is skipped."""
    path = Path(__file__).parent.parent / "scripts" / "bench_codecs.py"
    spec = importlib.util.spec_from_file_location("bench_codecs", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_codecs", script)
    spec.loader.exec_module(script)
    xs = [torch.randn(1, 8, 2048, 128) for _ in range(12)]
    spare = [torch.zeros(xs[0].nbytes, dtype=torch.uint8) for _ in range(24)]
    others = Others()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with others.counting():
            found = script.bench(one, xs, spare, 1.0)
    finally:
        torch.set_num_threads(before)
    if min(found) < 0.5 and (others.share or 0) > 0.1:
        pytest.skip(f"other programs took {others.share:.0%} of the processors")
    assert min(found) >= 0.5, found
