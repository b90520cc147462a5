"""How fast a device's memory and arithmetic really are, measured in a few seconds.

Of many runs the fastest counts: whatever else runs on the machine can only slow a run down. A rate is therefore what
was reached at least once, a lower bound of what the device can do; `spread` says how far the middle run was from it.

Bytes are those that a program asks for. A copy moves two for every byte copied; where the processor fetches a line
before it overwrites it (write-allocate), the memory moves three, and the rate of a copy is a lower bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvctl.errors import KvctlError
from kvctl.measure.statistics import quantile
from kvctl.record import Record

FEWEST_RUNS = 3
_MOST_RUNS = 500
_OF_TORCH = (RuntimeError, AssertionError, NotImplementedError, TypeError)
"""What torch raises for devices and dtypes that it cannot use."""
_DTYPES = ("float32", "bfloat16", "float16")


class Rate(Record):
    """One thing measured again and again."""

    what: str
    """read, copy, sum, matvec (bytes a second); matmul (FLOP a second)."""
    value: float
    """Of the fastest run; a second."""
    spread: float
    """How much longer the middle run took than the fastest, as a share of the fastest."""
    runs: int
    seconds: float
    """Spent on it in all, without making the data."""
    ran: str
    """In words: "libc's memchr over 256 MiB, 2 threads"."""
    dtype: str | None = None

    def to_dict(self) -> dict[str, Any]:
        unit = "flops_per_second" if self.what == "matmul" else "bytes_per_second"
        return {
            "what": self.what,
            "dtype": self.dtype,
            unit: self.value,
            "spread": self.spread,
            "runs": self.runs,
            "seconds": self.seconds,
            "ran": self.ran,
        }


class Rates(Record):
    """What was measured on one device."""

    device: str
    memory: tuple[Rate, ...] = ()
    matrix: tuple[Rate, ...] = ()
    published_bandwidth: float | None = None
    """Bytes a second by the maker."""
    published_flops: float | None = None
    """FLOP a second of dense 16-bit products by the maker."""
    notes: tuple[str, ...] = ()
    """What was left out, and why."""

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second: the highest of all ways to move them, since none can be faster than the memory."""
        return max((rate.value for rate in self.memory), default=None)

    def flops(self, dtype: str) -> float | None:
        """FLOP a second of matrix products in a dtype ("bfloat16"); None where that was not measured."""
        return max((rate.value for rate in self.matrix if rate.dtype == dtype), default=None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "bandwidth_bytes_per_second": self.bandwidth,
            "published_bytes_per_second": self.published_bandwidth,
            "published_flops_per_second": self.published_flops,
            "memory": [rate.to_dict() for rate in self.memory],
            "matrix": [rate.to_dict() for rate in self.matrix],
            "notes": list(self.notes),
        }


def measure_rates(device: str = "cpu", budget_s: float = 1.0) -> Rates:
    """Memory bandwidth, and with torch matrix rates, of "cpu", "cuda", "cuda:N" or "mps"; about `budget_s` for each.

    Without torch the CPU's memory alone is measured.

    Raises:
        KvctlError: another device without torch, or one that torch cannot use.

    """
    from kvctl.measure.hostmemory import memory_rates
    from kvctl.measure.torchrates import Bench

    torch = import_torch()
    memory: list[Rate] = []
    notes: list[str] = []
    if device == "cpu":
        host, notes = memory_rates(budget_s)
        memory += host
    if torch is None:
        if device != "cpu":
            raise KvctlError(f"the rates of {device} need torch", hint="pip install 'kvctl[measure]'")
        notes.append("matrix rates need torch: pip install 'kvctl[measure]'")
        return Rates(device, tuple(memory), notes=tuple(notes))
    matrix: list[Rate | None] = []
    try:
        bench = Bench(torch, device, budget_s)
        with bench.on_device():
            memory += bench.memory()
            for dtype in _DTYPES:
                try:
                    matrix.append(bench.matmul(dtype))
                except _OF_TORCH as error:
                    notes.append(f"matrix rate of {dtype} not measured: {_first_line(error)}")
            bench.close()
    except _OF_TORCH as error:
        raise KvctlError(f"the rates of {device} could not be measured: {_first_line(error)}") from None
    return Rates(device, tuple(memory), tuple(rate for rate in matrix if rate), notes=(*notes, *bench.notes))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def import_torch() -> Any:
    """torch, or None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


def repeat(run: Callable[[], float], budget_s: float) -> tuple[list[float], float]:
    """Seconds of each run until the budget is spent, and of all; one run before them warms up and is not counted.

    At least three runs are made, however long they take.
    """
    run()
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < FEWEST_RUNS or (time.perf_counter() - begin < budget_s and len(times) < _MOST_RUNS):
        times.append(run())
    return times, time.perf_counter() - begin


def rate(what: str, amount: int, times: list[float], seconds: float, ran: str, dtype: str | None = None) -> Rate:
    """The rate of `amount` bytes or FLOP a run."""
    fastest = min(times)
    spread = quantile(tuple(times), 0.5) / fastest - 1
    return Rate(what, amount / fastest, spread, len(times), seconds, f"{ran}, {len(times)} runs", dtype)
