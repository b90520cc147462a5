"""The bandwidth of this machine's memory, by the C library's own loops in as many threads as may run at once.

ctypes lets go of the interpreter's lock during a call, so that the threads really run side by side.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

from kvctl.errors import KvctlError
from kvctl.hardware.cpu import read_cpu
from kvctl.hardware.host import host_device
from kvctl.measure.rates import Rate, rate, repeat
from kvctl.units import GIB, MIB, format_bytes

_PAGE = 4096
_PATTERN, _ABSENT = 1, 2
_SMALLEST = 16 * MIB
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
"""As malloc takes memory; Windows knows no flags."""


def working_set() -> int:
    """Bytes to measure with: eight times the last-level caches, so that next to nothing of it is found there.

    From 256 MiB to 4 GiB, and at most an eighth of the memory that is free.
    """
    wanted = min(max(8 * (read_cpu().last_cache_bytes or 0), 256 * MIB), 4 * GIB)
    return min(wanted, host_device().available_bytes // 8)


def memory_rates(budget_s: float) -> tuple[list[Rate], list[str]]:
    """Reading and copying; and what was left out, in words.

    Reading is a search for a byte that is not there (memchr): every byte is loaded and nothing written, as in decoding,
    where weights and cache are read.
    """
    size, threads = working_set(), read_cpu().usable_cores
    part = size // threads // _PAGE * _PAGE
    if size < _SMALLEST or part == 0:
        return [], [f"memory bandwidth not measured: {format_bytes(size)} to work in"]
    crew = _Crew(part, threads)
    try:
        crew.start()
        ran = f"{format_bytes(part * threads)}, {threads} threads" if threads > 1 else f"{format_bytes(part)}, 1 thread"
        moved = part * threads * crew.passes
        return [
            rate("read", moved, *repeat(lambda: crew.run(_search), budget_s), f"C library's memchr over {ran}"),
            # Half of each part onto the other half: as many bytes are read and written as the part has.
            rate(
                "copy",
                moved,
                *repeat(lambda: crew.run(_copy), budget_s),
                f"C library's memmove within {ran}, two bytes moved for each",
            ),
        ], []
    finally:
        crew.stop()


Job = Callable[[Any, int, int], bool]
"""(library, address, bytes) to whether it went as it must."""


class _Crew:
    """Threads that each own a part of the memory and do the same job on it at once."""

    def __init__(self, part: int, threads: int) -> None:
        self._library = _library()
        self._part = part
        # Python wakes its threads one by one; many of them work longer, so that this does not count.
        self.passes = max(1, threads // 8)
        self._barrier = threading.Barrier(threads + 1)
        self._job: Job | None = None
        self._spans: list[tuple[float, float]] = [(0.0, 0.0)] * threads
        self._failed: str | None = None
        self._threads = [threading.Thread(target=self._work, args=(index,), daemon=True) for index in range(threads)]

    def start(self) -> None:
        """Returns when every thread has its memory."""
        for thread in self._threads:
            thread.start()
        self._meet()

    def run(self, job: Job) -> float:
        """Seconds from the first thread's start to the last one's end."""
        self._job = job
        self._meet()
        self._meet()
        if self._failed:
            raise KvctlError(f"memory bandwidth could not be measured: {self._failed}")
        return max(end for _, end in self._spans) - min(begin for begin, _ in self._spans)

    def stop(self) -> None:
        """Ends the threads, whatever they wait for."""
        self._job = None
        self._barrier.abort()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _meet(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise KvctlError(f"memory bandwidth could not be measured: {self._failed}") from None

    def _work(self, index: int) -> None:
        try:
            # Written by the thread that will read it: memory then lies near its core, and is no shared page of zeros.
            memory = mmap.mmap(-1, self._part, **_PRIVATE)
            start = ctypes.c_char.from_buffer(memory)
            address = ctypes.addressof(start)
            ctypes.memset(address, _PATTERN, self._part)
            self._barrier.wait()
            while True:
                self._barrier.wait()
                job = self._job
                if job is None:
                    break
                begin = time.perf_counter()
                good = all(job(self._library, address, self._part) for _ in range(self.passes))
                self._spans[index] = (begin, time.perf_counter())
                if not good:
                    self._failed = "the C library gave a wrong answer"
                self._barrier.wait()
        except threading.BrokenBarrierError:
            pass  # stopped
        except (OSError, ValueError, MemoryError) as error:
            self._failed = str(error) or type(error).__name__
            self._barrier.abort()


def _library() -> Any:
    """The C library, whose calls run without the interpreter's lock."""
    import sys

    library: Any = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
    library.memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    library.memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    library.memchr.restype = library.memmove.restype = ctypes.c_void_p
    return library


def _search(library: Any, address: int, size: int) -> bool:
    return library.memchr(address, _ABSENT, size) is None


def _copy(library: Any, address: int, size: int) -> bool:
    half = size // 2
    return bool(library.memmove(address, address + half, half))
