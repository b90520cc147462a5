"""Axes: where values lie, and which of them get a tick."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvctl.plot.chart import Chart
from kvctl.record import Record
from kvctl.units import BINARY, GIB, KIB, MIB, TIB

_FAR = 10
"""A limit this many times above every curve stays outside: the curves would be a line at the bottom."""


class Axis(Record):
    """A scale from `low` to `high` with ticks as (value, label)."""

    low: float
    high: float
    log: bool
    ticks: tuple[tuple[float, str], ...]
    unit: str = ""

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high one."""
        if self.log:
            return math.log2(value / self.low) / math.log2(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def value(self, share: float) -> float:
        """The value at a share of the axis; never beyond its ends."""
        if self.log:
            found = self.low * 2 ** (share * math.log2(self.high / self.low))
        else:
            found = self.low + share * (self.high - self.low)
        return min(max(found, self.low), self.high)


def context_axis(contexts: Sequence[int], most: int) -> Axis:
    """Contexts: doubling ticks when they span more than eightfold, else even ones; at most `most`."""
    low, high = min(contexts), max(contexts)
    if low == high:
        low, high = max(0, low - 1 - low // 4), high + 1 + high // 4
        values = [contexts[0]]
        return Axis(low, high, False, tuple(zip(values, _token_labels(values), strict=True)))
    if low and high > 8 * low:
        powers = range((low - 1).bit_length(), high.bit_length())
        every = math.ceil(len(powers) / most)
        # The largest power gets a tick: what people ask about is the far end.
        values = [2**power for power in powers if (powers[-1] - power) % every == 0]
        return Axis(low, high, True, tuple((value, _token_label(value)) for value in values))
    step = 1
    while high // step - (low - 1) // step > most:
        step *= 2
    # Multiples of a power of two, as contexts are.
    values = list(range(-(-low // step) * step, high + 1, step))
    return Axis(low, high, False, tuple(zip(values, _token_labels(values), strict=True)))


def _token_label(value: int) -> str:
    """4096 as 4k and 1048576 as 1M, as kvctl reads them: k is 1,024."""
    for unit, size in (("T", TIB), ("G", GIB), ("M", MIB), ("k", KIB)):
        if value >= size and value % size == 0:
            return f"{value // size:,}{unit}"
    return f"{value:,}"


def _token_labels(values: Sequence[int]) -> list[str]:
    """All with k or M, or all in full."""
    if all(value % 1024 == 0 for value in values):
        return [_token_label(value) for value in values]
    return [f"{value:,}" for value in values]


def value_axis(chart: Chart, most: int) -> Axis:
    """The axis of a chart's values: memory, with its limits, or time."""
    if chart.quantity == "memory":
        return memory_axis(chart.values, [limit.bytes for limit in chart.limits], most)
    return time_axis(chart.values, most)


def time_axis(times: Sequence[int], most: int) -> Axis:
    """Nanoseconds from 0, with about `most` even ticks, in ms up to ten seconds."""
    peak = max(times)
    unit, size = ("µs", 10**3) if 0 < peak < 10**6 else ("ms", 10**6) if peak < 10**10 else ("s", 10**9)
    return from_zero((peak or size) * 1.06, unit, size, most)


def memory_axis(sizes: Sequence[int], limits: Sequence[int], most: int) -> Axis:
    """Bytes from 0, with about `most` even ticks in the unit that reads best, GiB where possible."""
    peak = max(sizes)
    peak = max([peak, *(limit for limit in limits if not peak or limit <= _FAR * peak)])
    unit, size = _unit(peak)
    return from_zero((peak or size) * 1.06, unit, size, most)


def from_zero(high: float, unit: str, size: float, most: int) -> Axis:
    """From 0 to `high`, with about `most` even ticks in a unit of this size."""
    each = step(high / size, most)
    decimals = max(0, -math.floor(math.log10(each)))
    count = int(high / size / each + 1e-9)
    ticks = tuple(
        (number * each * size, f"{number * each:,.{decimals}f}" if number else "0") for number in range(count + 1)
    )
    return Axis(0, high, False, ticks, unit)


def _unit(peak: int) -> tuple[str, int]:
    """GiB from half of one to 8,192 of them and for nothing; beyond, larger or smaller."""
    if peak == 0 or GIB // 2 <= peak <= 8192 * GIB:
        return "GiB", GIB
    for unit, size in BINARY:
        if peak >= size and (unit != "GiB" or peak >= GIB):
            return unit, size
    return "bytes", 1


def step(span: float, most: int) -> float:
    """1, 2 or 5 times a power of ten."""
    rough = span / most
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next((factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9)), 10 * power)
