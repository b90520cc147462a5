"""Time and memory of a replay: python scripts/bench_replay.py [REQUESTS] [CAPACITY_BLOCKS].

The trace is like Mooncake's: about 20 hashes of 512 tokens a request, half of them following up on one of the last
200 prompts, 200 tokens of output, 10 requests a second. It is written as JSONL first, so that reading it counts too.
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from kvctl.replay import POLICIES, Setup, read_trace, replay


def write(path: Path, count: int) -> None:
    dice = random.Random(1)
    prompts: list[tuple[int, ...]] = []
    fresh, now = 1, 0.0
    with path.open("w") as file:
        for _ in range(count):
            now += dice.expovariate(1 / 100)
            start = dice.choice(prompts) if prompts and dice.random() < 0.5 else (0,)
            new = dice.randrange(1, 20)
            ids = (*start[:40], *range(fresh, fresh + new))
            fresh += new
            prompts.append(ids)
            del prompts[:-200]
            length = len(ids) * 512 - dice.randrange(512)
            file.write(
                f'{{"timestamp": {int(now)}, "input_length": {length}, "output_length": {dice.randrange(1, 400)}, '
                f'"hash_ids": {list(ids)}}}\n'
            )


def megabytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    capacity = int(sys.argv[2]) if len(sys.argv) > 2 else 100_000
    setup = Setup(block_size=16, capacity_blocks=capacity, bytes_per_block=2**20, max_length=40_960)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        write(path, count)
        print(
            f"{count:,} requests, {path.stat().st_size / 2**20:.0f} MiB, {capacity:,} blocks; {megabytes()} MiB resident"
        )
        began = time.process_time()
        for _ in read_trace(path):
            pass
        print(f"{'reading':12}{time.process_time() - began:7.1f} s  {megabytes()} MiB resident at most")
        for names in (*((name,) for name in POLICIES), tuple(POLICIES)):
            began = time.process_time()
            rows = replay(read_trace(path), setup, policies=names).policies
            spent = time.process_time() - began
            what = "together" if len(names) > 1 else names[0]
            print(f"{what:12}{spent:7.1f} s  {megabytes()} MiB resident at most")
        for row in rows:
            print(
                f"{row.policy:12}{row.utilization:8.2%} used, {row.hit_rate:.1%} hits, {row.preemptions:,} preemptions, "
                f"{row.evicted_blocks:,} blocks evicted, queue of {row.peak_queue:,}, {row.peak_running:,} running"
            )


if __name__ == "__main__":
    main()
