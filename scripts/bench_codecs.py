"""How fast codecs pack and unpack, beside a plain copy of the same bytes.

    python scripts/bench_codecs.py [--hot] [NAME ...]

For every codec, shape and dtype: the bytes that an ideal loop would move (floats one way, codes and scales the
other) are copied by `dst.copy_(src)`; the ratio is the copy's time over the codec's, taken in turns, median. The
layers rotate through more memory than a cache holds, as a decode step does; with --hot the same layer again.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from kvctl.techniques.codecs import CODECS, Codec, grouped

SHAPES = ((1, 3, 2048, 64), (1, 8, 2048, 128))
DTYPES = (torch.float32, torch.bfloat16)
ROTATING = 100 << 20
ROUNDS = 4
DEFAULT = (
    grouped(8), grouped(4), grouped(2), grouped(8, symmetric=True), grouped(8, per_channel=True),
    grouped(4, per_channel=True), grouped(2, per_channel=True),
)  # fmt: skip


def ratio(copies: list[Callable[[], object]], works: list[Callable[[], object]], rounds: int) -> tuple[float, float]:
    """(median of copy time over work time, median of work seconds); the first round warms up."""
    ratios, times = [], []
    for turn in range(rounds + 1):
        for copy, work in zip(copies, works, strict=True):
            start = time.perf_counter()
            copy()
            middle = time.perf_counter()
            work()
            end = time.perf_counter()
            if turn:
                ratios.append((middle - start) / (end - middle))
                times.append(end - middle)
    return statistics.median(ratios), statistics.median(times)


def bench(codec: Codec, shape: tuple[int, ...], dtype: torch.dtype, hot: bool) -> tuple[float, float, float, float]:
    """(pack ratio, unpack ratio, pack µs, unpack µs)."""
    kernel = codec.kernel()
    size = torch.Size(shape).numel() * dtype.itemsize
    layers = 1 if hot else max(4, ROTATING // size)
    xs = [torch.randn(shape).to(dtype) for _ in range(layers)]
    parts = [kernel.encode(x) for x in xs]
    # A copy of n bytes reads n and writes n.
    moved = (size + sum(part.nbytes for part in parts[0])) // 2
    sources = [torch.zeros(moved, dtype=torch.uint8) for _ in xs]
    targets = [torch.zeros_like(source) for source in sources]
    copies = [lambda a=a, b=b: b.copy_(a) for a, b in zip(sources, targets, strict=True)]
    rounds = 40 if hot else ROUNDS
    pack = ratio(copies, [lambda x=x: kernel.encode(x) for x in xs], rounds)
    unpack = ratio(copies, [lambda p=p: kernel.decode(p, dtype, shape[-1]) for p in parts], rounds)
    return pack[0], unpack[0], pack[1] * 1e6, unpack[1] * 1e6


def main() -> None:
    """Print the table."""
    hot = "--hot" in sys.argv
    names = [name for name in sys.argv[1:] if name != "--hot"]
    codecs = [one for one in dict.fromkeys((*DEFAULT, *CODECS.values())) if one.name in names] if names else DEFAULT
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {'one layer, hot' if hot else 'rotating layers'}"
    )
    print(f"{'codec':20} {'shape':18} {'dtype':9} {'pack':>6} {'unpack':>7} {'pack µs':>9} {'unpack µs':>9}")
    for codec in codecs:
        for shape in SHAPES:
            for dtype in DTYPES:
                pack, unpack, pack_us, unpack_us = bench(codec, shape, dtype, hot)
                print(
                    f"{codec.name:20} {'x'.join(map(str, shape)):18} {str(dtype)[6:]:9} {pack:6.2f} {unpack:7.2f} {pack_us:9.0f} {unpack_us:9.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
