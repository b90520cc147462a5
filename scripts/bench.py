"""Print how fast kvctl starts, sizes and reports: ratios within one run, models a second, and a load test's report.

    python scripts/bench.py            CPU time, best of several runs
    python scripts/bench.py --valgrind instruction counts (repeatable; needs valgrind)

Limits (the JSON form at most 1.5x of importing typer, the table at most 1.25x of importing
typer and rich's tables, 2,000 models a second, two seconds for the report of 100,000 requests) are the project's own; the script exits 1
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
REQUESTS, EVENTS, REPORT_SECONDS = 100_000, 64, 2.0
"""Of a load test: its report, and what adding each request up takes beside."""


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


def load_report() -> tuple[float, float]:
    """Seconds that the JSON of a load takes, and microseconds that each of its requests took to add up."""
    import json
    from array import array

    from kvctl.loadtest.deltas import Usage
    from kvctl.loadtest.exchange import Exchange
    from kvctl.loadtest.figures import Figures
    from kvctl.loadtest.lengths import Fixed
    from kvctl.loadtest.plan import Step
    from kvctl.loadtest.report import load_of
    from kvctl.loadtest.run import Outcome
    from kvctl.loadtest.verdict import verdict, window
    from kvctl.loadtest.work import Made

    figures, adding = Figures(), 0.0
    for number in range(REQUESTS):
        one = Exchange(b"", number * 10_000_000)
        one.sent = one.scheduled + number % 1000 * 100
        one.stamps = array(
            "q", range(one.sent + 10**8, one.sent + 10**8 + EVENTS * 20_000_000, 20_000_000 + number % 997)
        )
        one.answer_at, one.ended, one.usage = one.first_token, one.last_token, Usage(512, EVENTS, 0)
        start = time.process_time()
        figures.add(one, EVENTS)
        adding += time.process_time() - start
    seen = window((), 0, 1)
    found = Outcome(Step(Made(Fixed(512), Fixed(EVENTS)), at_once=1), figures, figures, seen, verdict(figures, seen, cpu=0.1, at_once=1), (), {}, REQUESTS, 1000.0, None, 0.1)  # fmt: skip
    start = time.process_time()
    json.dumps(load_of(found))
    return time.process_time() - start, adding / REQUESTS * 1e6


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
    seconds, each = load_report()
    missed += seconds > REPORT_SECONDS
    print(
        f"report of {REQUESTS:,} requests of {EVENTS} events: {seconds:.3f} s (limit {REPORT_SECONDS:g}); {each:.0f} µs to add each up"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
