"""Print how fast kvctl starts and sizes: ratios within one run, and models a second.

    python scripts/bench.py            CPU time, best of several runs
    python scripts/bench.py --valgrind instruction counts (repeatable; needs valgrind)

Limits (the JSON form at most 1.5x of importing typer, the table at most 1.25x of importing
typer and rich's tables, 2,000 models a second) are the project's own; the script exits 1
where one is missed.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import time

CASES = {
    "import typer": ["-c", "import typer"],
    "import typer, rich": ["-c", "import typer, rich.console, rich.table"],
    "kvctl --help": ["-m", "kvctl", "--help"],
    "kvctl size … --json": ["-m", "kvctl", "size", "Qwen3-72B", "--ctx", "128k", "--json"],
    "kvctl size … (table)": ["-m", "kvctl", "size", "Qwen3-72B", "--ctx", "128k"],
    "kvctl size … --gpu --json": ["-m", "kvctl", "size", "Qwen3-72B", "--engine", "vllm", "--gpu", "4xH100", "--json"],
    "the same, does not fit": ["-m", "kvctl", "size", "DeepSeek-V3", "--engine", "vllm", "--gpu", "4xH100", "--json"],
}
LIMITS = {
    ("kvctl size … --json", "import typer"): 1.5,
    ("kvctl size … (table)", "import typer, rich"): 1.25,
    ("kvctl size … --gpu --json", "kvctl size … --json"): 1.5,
    ("the same, does not fit", "kvctl size … --json"): 1.5,
}
MODELS_A_SECOND = 2000


def instructions(argv: list[str]) -> float:
    run = subprocess.run(
        ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, *argv],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    match = re.search(r"Collected : (\d+)", run.stderr)
    if match is None:
        raise SystemExit("valgrind printed no count")
    return float(match[1])


def cpu_seconds(argv: list[str], repeats: int = 15) -> float:
    best = float("inf")
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *argv], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


def models_a_second() -> tuple[float, int]:
    """Catalogue rows resolved, read and sized in one process, on one core, after one warm-up."""
    from kvctl.engines import IDEAL
    from kvctl.errors import KvctlError
    from kvctl.model import build_spec
    from kvctl.size import SizePlan, size
    from kvctl.sources import catalogue

    plan = SizePlan(IDEAL)
    names = catalogue.names()

    def everything() -> int:
        count = 0
        for name in names:
            try:
                size(build_spec(catalogue.find(name)), 32768, plan)
                count += 1
            except KvctlError:
                continue  # rows that are marked incomplete
        return count

    everything()
    start = time.process_time()
    count = everything()
    return count / (time.process_time() - start), count


def main() -> int:
    valgrind = "--valgrind" in sys.argv
    measure = instructions if valgrind else cpu_seconds
    unit = (lambda v: f"{v / 1e6:,.0f} M instructions") if valgrind else (lambda v: f"{v * 1000:,.0f} ms of CPU")
    values = {name: measure(argv) for name, argv in CASES.items()}
    for name, value in values.items():
        print(f"{name:26} {unit(value)}")
    missed = 0
    for (name, base), limit in LIMITS.items():
        ratio = values[name] / values[base]
        missed += ratio > limit
        print(f"{name} / {base}: {ratio:.2f} (limit {limit})")
    rate, count = models_a_second()
    missed += rate < MODELS_A_SECOND
    print(f"{count} catalogue models: {rate:,.0f} a second on one core (limit {MODELS_A_SECOND:,})")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
