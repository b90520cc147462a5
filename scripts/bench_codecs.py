"""How fast codecs pack and unpack, beside a plain copy of the same bytes; about two minutes.

    OMP_NUM_THREADS=1 python scripts/bench_codecs.py [--all] [NAME ...]

For every codec, shape and dtype: the bytes that an ideal loop would move (floats one way, codes and scales the
other) are copied by `dst.copy_(src)`; the ratio is the copy's time over the codec's, taken in turns, median. The
layers rotate through more memory than a cache holds, as a decode step does. Memory that was freed stays with the
process: what the kernel takes for fresh pages, whoever writes them, is left out. Every codec has at least half of the
copy's bandwidth, or the last line says which have not, and the exit status is 1.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
import sys
import time
from collections.abc import Callable

import torch

from kvctl.techniques.codecs import CODECS, Codec, fast, grouped

SHAPES = ((1, 3, 2048, 64), (1, 8, 2048, 128), (1, 3, 8192, 64), (1, 8, 8192, 128))
DTYPES = (torch.float32, torch.bfloat16)
ROTATING = 100 << 20
SECONDS = 0.2
"""For one number."""
GOAL = 0.5
DEFAULT = (
    grouped(8), grouped(4), grouped(2), grouped(8, per_channel=True), grouped(4, per_channel=True),
    grouped(2, per_channel=True), *(CODECS[name] for name in (
        "fp8", "fp8_per_token_head", "int8_per_token_head", "int4_per_token_head", "q8_0", "q4_0")),
)  # fmt: skip


def keep_freed_memory() -> None:
    """Tell glibc to map nothing for single allocations and to give nothing back."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def ratio(copy: Callable[[int], object], work: Callable[[int], object], layers: int, seconds: float = SECONDS) -> float:
    """Median of copy time over work time, layer by layer in turns; at least nine, the first three only warm up."""
    ratios: list[float] = []
    until = 0.0
    for turn in itertools.count():
        start = time.perf_counter()
        copy(turn % layers)
        middle = time.perf_counter()
        work(turn % layers)
        end = time.perf_counter()
        if turn == 2:  # compiled, and memory is there
            until = end + seconds
        if turn > 2:
            ratios.append((middle - start) / (end - middle))
        if end > until and turn > 8:
            return statistics.median(ratios)
    raise AssertionError


def bench(
    codec: Codec, xs: list[torch.Tensor], spare: list[torch.Tensor], seconds: float = SECONDS
) -> tuple[float, float]:
    """(pack ratio, unpack ratio) over layers; `spare` has two bytes buffers of the size of a layer for each."""
    kernel, dim, dtype = codec.kernel(), xs[0].shape[-1], xs[0].dtype
    parts = [kernel.encode(x) for x in xs]
    # A copy of n bytes reads n and writes n.
    moved = (xs[0].nbytes + sum(part.nbytes for part in parts[0])) // 2

    def copy(layer: int) -> None:
        spare[2 * layer + 1][:moved].copy_(spare[2 * layer][:moved])

    pack = ratio(copy, lambda layer: kernel.encode(xs[layer]), len(xs), seconds)
    return pack, ratio(copy, lambda layer: kernel.decode(parts[layer], dtype, dim), len(xs), seconds)


def main() -> int:
    """Print the table."""
    names = [name for name in sys.argv[1:] if name != "--all"]
    codecs = tuple(dict.fromkeys((*DEFAULT, *CODECS.values()))) if names or "--all" in sys.argv else DEFAULT
    codecs = tuple(one for one in codecs if not names or one.name in names)
    keep_freed_memory()
    how = "numba's loops" if fast.loops() is not None else "torch's passes"
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {how}")
    columns = [(shape, dtype) for shape in SHAPES for dtype in DTYPES]
    found: dict[str, list[tuple[float, float]]] = {one.name: [] for one in codecs}
    for shape, dtype in columns:
        size = torch.Size(shape).numel() * dtype.itemsize
        xs = [torch.randn(shape).to(dtype) for _ in range(max(3, ROTATING // size))]
        spare = [torch.zeros(size, dtype=torch.uint8) for _ in range(2 * len(xs))]
        for one in codecs:
            found[one.name].append(bench(one, xs, spare))
    print("share of a copy's bandwidth, pack / unpack")
    print(f"{'':20}" + "".join(f"{'x'.join(map(str, shape[1:])):>13}" for shape, _ in columns))
    print(f"{'':20}" + "".join(f"{str(dtype)[6:]:>13}" for _, dtype in columns))
    for name, pairs in found.items():
        print(f"{name:20}" + "".join(f"{pack:8.2f} {unpack:4.2f}" for pack, unpack in pairs))
    short = [f"{name} ({min(map(min, pairs)):.2f})" for name, pairs in found.items() if min(map(min, pairs)) < GOAL]
    print(f"below {GOAL}: {', '.join(short)}" if short else f"all reach {GOAL}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
