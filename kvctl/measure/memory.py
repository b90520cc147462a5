"""How much memory this process takes while a pass runs, on the CPU, a CUDA device or Apple's GPU.

The kernel's high-water mark misses nothing but cannot say when it was reached; samples can, but miss what is shorter than
their interval. Both are reported. What Python's collector and the C library only keep for later is given back before the
readings before and after, so that they show what is in use.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from kvctl.errors import KvctlError, UsageError
from kvctl.hardware.nvml_errors import NoGpuError
from kvctl.measure.report import MemoryUse
from kvctl.units import format_bytes

INTERVAL_S = 0.005
_NO_MEMORY = ("can't allocate memory", "annot allocate memory", "out of memory", "bad_alloc", "MemoryError",
              "Thread creation failed")  # fmt: skip
"""Of torch's allocator for the CPU (a plain RuntimeError), the C library, CUDA and C++."""


class Resident(NamedTuple):
    """Bytes of this process in RAM; `mapped` of them are pages of files or shared with others (None: not told)."""

    total: int
    mapped: int | None


class OutOfMemoryError(KvctlError):
    """A model, or its cache, does not fit into the memory that is there."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of torch or Python says that there is no memory left."""
    import torch

    if isinstance(error, (MemoryError, torch.OutOfMemoryError, OutOfMemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and tells_shortage(str(error))


def tells_shortage(text: str) -> bool:
    """Whether what torch, Python or the C++ library said is that there is no memory left."""
    return any(words in text for words in _NO_MEMORY)


def shortage(error: BaseException) -> str:
    """What was asked for when there was no more: "44.16 MiB more was asked for"; else what the exception says."""
    # torch's allocators: "tried to allocate 46309760 bytes" on a CPU, "Tried to allocate 2.00 GiB" on a GPU.
    found = re.search(r"ried to allocate ([\d.]+) (bytes|[KMG]iB)", str(error))
    if found is None:
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    number, unit = found.groups()
    return f"{format_bytes(int(number)) if unit == 'bytes' else f'{number} {unit}'} more was asked for"


class Watcher:
    """What `watch` hands out; `use` is there once it has ended."""

    def __init__(self) -> None:
        self._use: MemoryUse | None = None
        self._settle: Callable[[], None] = lambda: None

    @property
    def use(self) -> MemoryUse:
        """What the process took between entry and exit; steady is at `settle`, or else at exit."""
        if self._use is None:
            raise RuntimeError("memory is still being watched")
        return self._use

    def settle(self) -> None:
        """Reads the steady memory now: for a caller that lets go of the cache before the end. The last call counts.

        It collects garbage first, which takes up to a tenth of a second: not within what is timed.
        """
        self._settle()


@contextmanager
def watch(device: str = "cpu", interval_s: float | None = INTERVAL_S) -> Iterator[Watcher]:
    """Watches this process's memory on "cpu", "cuda", "cuda:N" or "mps" until the block ends.

    A block that ends by an exception leaves no `use`: what it held when it broke off is no measurement of it.
    `interval_s` None takes no samples: for passes whose time must not be touched.

    Raises:
        UsageError: another device.
        KvctlError: a device other than the CPU without torch, or torch without that device.

    """
    kind = device.partition(":")[0]
    makers = {"cpu": _watch_cpu, "cuda": _watch_cuda, "mps": _watch_mps}
    if kind not in makers:
        raise UsageError(f"memory of {device[:40]!r} cannot be watched", hint="cpu, cuda, cuda:N or mps")
    with makers[kind](device, interval_s) as watcher:
        yield watcher


class Sampler:
    """A thread that reads numbers again and again and keeps the highest of each; what cannot be read is left out."""

    def __init__(self, readers: Mapping[str, Callable[[], int | None]], interval_s: float) -> None:
        self.peaks: dict[str, int] = {}
        self.count = 0
        self.busy_s = 0.0
        """Processor time that the thread itself took."""
        self._readers = readers
        self._interval_s = interval_s
        # Held until the end: to wait for it costs a tenth of waiting for an Event, which is Python.
        self._going = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvctl memory", daemon=True)

    def __enter__(self) -> Sampler:
        self._read()
        self._going.acquire()
        self._begin = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._going.release()
        self._thread.join()
        self.watched_s = time.perf_counter() - self._begin
        self._read()

    def _run(self) -> None:
        begin = time.thread_time()
        while not self._going.acquire(timeout=self._interval_s):
            self._read()
            self.busy_s = time.thread_time() - begin

    def _read(self) -> None:
        for name, read in self._readers.items():
            value = read()
            if value is not None:
                self.peaks[name] = max(value, self.peaks.get(name, 0))
        self.count += 1


@contextmanager
def _sampling(readers: Mapping[str, Callable[[], int | None]], interval_s: float | None) -> Iterator[Sampler | None]:
    if interval_s is None:
        yield None
        return
    with Sampler(readers, interval_s) as sampler:
        yield sampler


def _sampled(sampler: Sampler | None) -> dict[str, Any]:
    """The fields of MemoryUse that are about the samples."""
    if sampler is None:
        return {}
    return {"samples": sampler.count, "sampling_share": sampler.busy_s / max(sampler.watched_s, 1e-9)}


@contextmanager
def _watch_cpu(_: str, interval_s: float | None) -> Iterator[Watcher]:
    watcher, steady = Watcher(), []
    watcher._settle = lambda: steady.append(_settled())
    with _reader() as read:
        last = [read()]

        def total() -> int:
            last[0] = read()
            return last[0].total

        def anonymous() -> int | None:
            resident = last[0]
            return None if resident.mapped is None else resident.total - resident.mapped

        before = _settled()
        mark = HighWater()
        with _sampling({"total": total, "anonymous": anonymous}, interval_s) as sampler:
            try:
                yield watcher
            finally:
                kernel = mark.read()
    if not steady:
        watcher.settle()
    peaks = sampler.peaks if sampler else {}
    # The exact readings may lie above the kernel's running count, which lags by some pages for every core.
    seen = [before.total, steady[-1].total, *([peaks["total"]] if sampler else [])]
    watcher._use = MemoryUse(
        observer="samples" if kernel is None else "kernel",
        before_bytes=before.total,
        steady_bytes=steady[-1].total,
        peak_bytes=max(*seen, kernel or 0),
        sampled_peak_bytes=peaks.get("total"),
        mapped_bytes=steady[-1].mapped,
        anonymous_peak_bytes=peaks.get("anonymous"),
        **_sampled(sampler),
    )


class HighWater:
    """The most that this process had in RAM since this was made, as the kernel kept count of it."""

    def __init__(self) -> None:
        self._reset = _reset_mark()
        self._lifetime = None if self._reset else _lifetime_peak()

    def read(self) -> int | None:
        """Bytes; None where the mark could not be reset and has not risen since: it may be older then."""
        if self._reset:
            return _status("VmHWM")
        now = _lifetime_peak()
        return now if now is not None and self._lifetime is not None and now > self._lifetime else None


def _reset_mark() -> bool:
    """Sets VmHWM back to what is in RAM now (Linux 4.0 and later: proc_pid_clear_refs(5))."""
    try:
        with open("/proc/self/clear_refs", "wb", buffering=0) as file:
            file.write(b"5")
    except OSError:
        return False
    return _status("VmHWM") is not None


def _status(key: str) -> int | None:
    """A line of /proc/self/status, in bytes."""
    try:
        with open("/proc/self/status", "rb") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(key.encode() + b":")), None)
    return int(found.split()[1]) * 1024 if found else None


def _lifetime_peak() -> int | None:
    """The most this process ever had in RAM."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    # Kilobytes on Linux and the BSDs, bytes on macOS (getrusage(2) of each).
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def map_large() -> None:
    """Has glibc map each block of a megabyte or more by itself, so that it goes back to the system as soon as it is freed.

    By itself it raises that limit to 32 MB as blocks are freed (mallopt(3), M_MMAP_THRESHOLD), and smaller ones leave
    holes that others do not fit in. Of the whole process, from now on.
    """
    if sys.platform.startswith("linux"):
        found = getattr(ctypes.CDLL(None), "mallopt", None)
        if found is not None:
            found(ctypes.c_int(-3), ctypes.c_int(2**20))


@contextmanager
def _reader() -> Iterator[Callable[[], Resident]]:
    """A quick way to read what is in RAM: one system call where there is /proc."""
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, AttributeError):
        yield _by_psutil
        return
    page = os.sysconf("SC_PAGE_SIZE")

    def read() -> Resident:
        fields = os.pread(file, 128, 0).split(b" ", 3)
        return Resident(int(fields[1]) * page, int(fields[2]) * page)

    try:
        yield read
    finally:
        os.close(file)


def _by_psutil() -> Resident:
    import psutil

    return Resident(int(psutil.Process().memory_info().rss), None)


def _settled() -> Resident:
    """What is in RAM once garbage is collected and free memory given back, exactly where the kernel counts it anew.

    Since Linux 6.2 the running counts of statm may lag by 32 to 256 pages for every core; smaps_rollup walks the tables.
    """
    give_back()
    found: dict[bytes, int] = {}
    try:
        with open("/proc/self/smaps_rollup", "rb") as file:
            for line in file.read().splitlines()[1:]:
                name, _, value = line.partition(b":")
                found[name] = int(value.split()[0]) * 1024
        return Resident(found[b"Rss"], found[b"Rss"] - found[b"Anonymous"])
    except (OSError, ValueError, KeyError, IndexError):
        with _reader() as read:
            return read()


def give_back() -> None:
    """Collects Python's garbage, and has glibc return free memory to the kernel (malloc_trim); other C libraries do so
    by themselves."""
    gc.collect()
    trim()


def trim() -> None:
    """Has glibc return free memory to the kernel, without looking for garbage first, which takes far longer."""
    if sys.platform.startswith("linux"):
        found = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if found is not None:
            found(ctypes.c_size_t(0))


def _torch(device: str) -> Any:
    from kvctl.measure.rates import import_torch

    torch = import_torch()
    if torch is None:
        raise KvctlError(f"watching the memory of {device} needs torch", hint="pip install 'kvctl[measure]'")
    return torch


@contextmanager
def _watch_cuda(device: str, interval_s: float | None) -> Iterator[Watcher]:
    """torch's allocator counts exactly what tensors take, and at its most; NVML tells what the process has of the card."""
    torch = _torch(device)
    if not torch.cuda.is_available():
        raise KvctlError(f"torch has no {device} here")
    cuda, where = torch.cuda, torch.device(device)

    def held() -> int:
        cuda.synchronize(where)
        gc.collect()
        return int(cuda.memory_allocated(where))

    watcher, steady = Watcher(), []
    watcher._settle = lambda: steady.append(held())
    with ExitStack() as stack:
        process = _process_reader(torch, where, stack)
        before = held()
        cuda.reset_peak_memory_stats(where)
        with _sampling({"process": process}, interval_s) as sampler:
            try:
                yield watcher
            finally:
                peak, reserved = int(cuda.max_memory_allocated(where)), int(cuda.max_memory_reserved(where))
    if not steady:
        watcher.settle()
    watcher._use = MemoryUse(
        observer="cuda",
        before_bytes=before,
        steady_bytes=steady[-1],
        peak_bytes=peak,
        reserved_bytes=reserved,
        process_bytes=sampler.peaks.get("process") if sampler else None,
        **_sampled(sampler),
    )


def _process_reader(torch: Any, where: Any, stack: ExitStack) -> Callable[[], int | None]:
    """Reads what NVML says this process holds on the device; nothing where it does not say."""
    from kvctl.hardware.nvml import own_memory

    uuid = getattr(torch.cuda.get_device_properties(where), "uuid", None)
    if uuid is None:
        return lambda: None
    name = str(uuid)
    try:
        return stack.enter_context(own_memory(name if name.startswith(("GPU-", "MIG-")) else f"GPU-{name}"))
    except NoGpuError:
        return lambda: None


@contextmanager
def _watch_mps(device: str, interval_s: float | None) -> Iterator[Watcher]:
    """Metal keeps no high-water mark: the samples are all there is."""
    torch = _torch(device)
    mps = getattr(torch.backends, "mps", None)
    if mps is None or not mps.is_available():
        raise KvctlError(f"torch has no {device} here")

    def held() -> int:
        torch.mps.synchronize()
        gc.collect()
        return int(torch.mps.current_allocated_memory())

    watcher, steady = Watcher(), []
    watcher._settle = lambda: steady.append(held())
    before = held()
    readers = {"total": lambda: int(torch.mps.current_allocated_memory()),
               "driver": lambda: int(torch.mps.driver_allocated_memory())}  # fmt: skip
    with _sampling(readers, interval_s) as sampler:
        yield watcher
    if not steady:
        watcher.settle()
    peaks = sampler.peaks if sampler else {}
    watcher._use = MemoryUse(
        observer="samples",
        before_bytes=before,
        steady_bytes=steady[-1],
        peak_bytes=max(before, steady[-1], peaks.get("total", 0)),
        reserved_bytes=peaks.get("driver"),
        sampled_peak_bytes=peaks.get("total"),
        **_sampled(sampler),
    )
