"""Memory bandwidth and matrix rates of one device through torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from kvctl.measure.hostmemory import working_set
from kvctl.measure.rates import FEWEST_RUNS, Rate, rate, repeat
from kvctl.units import GIB, MIB, format_bytes

_COLUMNS = 8192
_SMALLEST, _LARGEST = 256, 16384
"""Rows of the square matrices that are multiplied."""


class Bench:
    """Measurements of one device with torch."""

    def __init__(self, torch: Any, device: str, budget_s: float) -> None:
        self.torch = torch
        self.device = torch.device(device)
        self.budget_s = budget_s
        self.notes: list[str] = []
        self.timed = {"cuda": self._timed_cuda, "mps": self._timed_mps}.get(self.device.type, _timed)

    def on_device(self) -> AbstractContextManager[Any]:
        """While it lasts the device is the current one: events and streams are of that."""
        cuda = self.device.type == "cuda"
        return self.torch.cuda.device(self.device) if cuda else nullcontext()

    def close(self) -> None:
        """Gives the memory back to the device."""
        if self.device.type == "cuda":
            self.torch.cuda.empty_cache()

    def memory(self) -> list[Rate]:
        """A linear layer on one token, as in decoding; a plain sum of its matrix; off the CPU also a copy."""
        torch, host = self.torch, self.device.type == "cpu"
        size = working_set() if host else min(4 * GIB, self._available() // 4)
        if size < 16 * MIB:
            self.notes.append(f"bandwidth by torch not measured: {format_bytes(max(size, 0))} of memory to work in")
            return []
        found = []
        with torch.inference_mode():
            for name in ("float32", "bfloat16") if host else ("float16",):
                width = getattr(torch, name).itemsize
                matrix = self._data(name, size // _COLUMNS // width // 2 * 2, _COLUMNS)
                vector = self._data(name, 1, _COLUMNS)
                moved = matrix.numel() * width
                shape = f"{matrix.shape[0]} × {_COLUMNS} matrix ({format_bytes(moved)})"
                found.append(
                    self._run(
                        "matvec",
                        moved,
                        partial(torch.nn.functional.linear, vector, matrix),
                        f"{shape} as a linear layer on one token",
                        name,
                    )
                )
                if name == "float32" or not host:
                    found.append(self._run("sum", moved, matrix.sum, f"sum of {shape}", name))
                if not host:
                    half = matrix.view(2, -1)
                    way = f"copy of {format_bytes(moved // 2)}, two bytes moved for each"
                    found.append(self._run("copy", moved, partial(half[0].copy_, half[1]), way, name))
                del matrix, vector
        return found

    def matmul(self, name: str) -> Rate | None:
        """The highest rate of square products of growing size: 2·n³ FLOP each.

        It stops growing where a run would not fit into the budget three times, or the matrices not into a quarter of
        the memory.
        """
        torch = self.torch
        dtype = getattr(torch, name)
        room = self._available() // 4
        rows, best, spent = _SMALLEST, None, 0.0
        with torch.inference_mode():
            while rows <= _LARGEST and 3 * rows * rows * dtype.itemsize <= room and spent < self.budget_s:
                left, right = self._data(name, rows, rows), self._data(name, rows, rows)
                out = torch.empty_like(left)
                way = f"{rows} × {rows} matrices multiplied"
                if name == "float32" and self.device.type == "cuda":
                    way += f" (precision {torch.get_float32_matmul_precision()})"
                found = self._run("matmul", 2 * rows**3, partial(torch.mm, left, right, out=out), way, name, 0.2)
                spent += found.seconds
                best = found if best is None or found.value > best.value else best
                # A size twice as large takes eight times as long.
                if (FEWEST_RUNS + 1) * 8 * 2 * rows**3 / found.value > self.budget_s - spent:
                    break
                rows *= 2
        if best is None:
            self.notes.append(f"matrix rate of {name} not measured: {format_bytes(room)} of memory to work in")
        return best.replace(seconds=spent) if best else None

    def _data(self, dtype: str, *shape: int) -> Any:
        """Random numbers, since a GPU on easy data draws less power and keeps higher clocks; ones on the CPU.

        Not zeros: fresh zeros may all lie in one page of memory. The generator is our own, whose use changes no seed.
        """
        torch = self.torch
        options = {"dtype": getattr(torch, dtype), "device": self.device}
        if self.device.type == "cpu":
            return torch.ones(*shape, **options)
        return torch.randn(*shape, generator=torch.Generator(self.device).manual_seed(0), **options)

    def _run(self, what: str, amount: int, call: Callable[[], Any], way: str, dtype: str, share: float = 1.0) -> Rate:
        times, seconds = repeat(lambda: self.timed(call), self.budget_s * share)
        threads = f", {self.torch.get_num_threads()} threads" if self.device.type == "cpu" else ""
        return rate(what, amount, times, seconds, f"torch: {way}{threads}", dtype)

    def _available(self) -> int:
        """Bytes that can be taken on the device."""
        if self.device.type == "cuda":
            return int(self.torch.cuda.mem_get_info(self.device)[0])
        from kvctl.hardware.host import host_device

        return host_device().available_bytes

    def _timed_cuda(self, call: Callable[[], Any]) -> float:
        """Between two events on the stream: without the time that Python takes to launch and to wait."""
        torch = self.torch
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def _timed_mps(self, call: Callable[[], Any]) -> float:
        self.torch.mps.synchronize()
        begin = time.perf_counter()
        call()
        self.torch.mps.synchronize()
        return time.perf_counter() - begin


def _timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
