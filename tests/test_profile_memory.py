"""What this process takes in RAM: known allocations, and the kernel's own books as other processes read them."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from kvctl.errors import KvctlError, UsageError
from kvctl.measure import memory
from kvctl.measure.memory import give_back, shortage, watch
from kvctl.units import MIB

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc's malloc")

# Runs a piece of code under watch in a process of its own, says what was seen, and waits to be looked at.
CHILD = """
import json, mmap, subprocess, sys, threading, time
from kvctl.measure.memory import watch
MIB = 2**20
job = json.loads(sys.argv[1])
exec(job["before"])
with watch("cpu", job["interval"]) as watcher:
    exec(job["code"])
print(json.dumps({name: getattr(watcher.use, name) for name in watcher.use._fields}), flush=True)
sys.stdin.read()
"""


class Seen:
    """What the child said of itself, and what the kernel said of the child."""

    def __init__(self, code: str, before: str = "", interval: float | None = 0.005) -> None:
        job = json.dumps({"code": code, "before": before, "interval": interval})
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, job], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdin is not None
        assert child.stdout is not None
        line = child.stdout.readline()
        status = Path(f"/proc/{child.pid}/status").read_text()
        child.stdin.close()
        _, code_, usage = os.wait4(child.pid, 0)
        child.stdout.close()
        child.returncode = os.waitstatus_to_exitcode(code_)
        assert child.returncode == 0
        self.use: dict[str, Any] = json.loads(line)
        self.high_water = next(int(row.split()[1]) * 1024 for row in status.splitlines() if row.startswith("VmHWM:"))
        self.most = usage.ru_maxrss * 1024

    def over(self, name: str) -> float:
        """MiB more than before the watch."""
        return float(self.use[name] - self.use["before_bytes"]) / MIB


@linux
def test_known_allocations() -> None:
    """300 MiB that stay and 200 MiB for a moment: 500 at most and 300 in the end, and the kernel agrees to 2%."""
    seen = Seen("kept = bytearray(300 * MIB); more = bytearray(200 * MIB); time.sleep(0.1); del more")
    assert seen.over("peak_bytes") == pytest.approx(500, rel=0.01)
    assert seen.over("sampled_peak_bytes") == pytest.approx(500, rel=0.01)
    assert seen.over("steady_bytes") == pytest.approx(300, rel=0.01)
    assert seen.use["observer"] == "kernel"
    assert seen.use["peak_bytes"] == pytest.approx(seen.high_water, rel=0.02)
    assert seen.use["sampled_peak_bytes"] == pytest.approx(seen.high_water, rel=0.02)


@linux
def test_an_earlier_peak_does_not_count() -> None:
    seen = Seen("kept = bytearray(100 * MIB)", before="old = bytearray(400 * MIB); del old")
    assert seen.over("peak_bytes") == pytest.approx(100, rel=0.03)


@linux
def test_a_short_peak_escapes_samples_and_not_the_kernel() -> None:
    seen = Seen("short = bytearray(200 * MIB); del short", interval=30)
    assert seen.over("peak_bytes") == pytest.approx(200, rel=0.02)
    assert seen.over("sampled_peak_bytes") < 20
    assert seen.use["peak_bytes"] == pytest.approx(seen.high_water, rel=0.02)


@linux
def test_without_samples() -> None:
    seen = Seen("kept = bytearray(200 * MIB)", interval=None)
    assert seen.over("peak_bytes") == pytest.approx(200, rel=0.02)
    assert (seen.use["sampled_peak_bytes"], seen.use["samples"], seen.use["sampling_share"]) == (None, 0, None)


@linux
def test_threads_count_and_children_do_not() -> None:
    thread = "kept = []; other = threading.Thread(target=lambda: kept.append(bytearray(150 * MIB))); other.start(); other.join()"
    assert Seen(thread).over("steady_bytes") == pytest.approx(150, rel=0.03)
    child = "subprocess.run([sys.executable, '-c', 'import time; kept = bytearray(150 * 2**20); time.sleep(0.1)'], check=True)"
    assert Seen(child).over("peak_bytes") < 20


@linux
def test_a_mapped_file_counts_and_page_cache_does_not(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(MIB) * 160)
    opened = f"file = open({str(path)!r}, 'rb'); "
    touch = "total = sum(view[place] for place in range(0, len(view), 4096)); time.sleep(0.05)"
    seen = Seen(f"view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ); {touch}", before=opened)
    assert seen.over("steady_bytes") == pytest.approx(160, rel=0.03)
    assert seen.over("peak_bytes") == pytest.approx(160, rel=0.03)
    assert 160 <= seen.use["mapped_bytes"] / MIB < 190  # and the interpreter's own files
    assert seen.use["anonymous_peak_bytes"] < seen.use["before_bytes"] + 10 * MIB
    seen = Seen("while file.read(MIB): pass", before=opened)
    assert seen.over("peak_bytes") < 10
    path.unlink()


@linux
@glibc
def test_what_malloc_keeps_is_given_back() -> None:
    """100,000 blocks of 1 KiB, all freed but the last: they stay with the process until glibc is told to trim."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    process = psutil.Process()
    give_back()
    before = process.memory_info().rss
    blocks = [libc.malloc(1024) for _ in range(100_000)]
    for block in blocks:
        ctypes.memset(block, 1, 1024)
    for block in blocks[:-1]:
        libc.free(block)
    del blocks[:-1]
    kept = process.memory_info().rss - before
    give_back()
    assert kept > 90 * MIB
    assert process.memory_info().rss - before < 10 * MIB
    libc.free(blocks[0])


@linux
def test_steady_is_where_the_caller_says() -> None:
    with watch() as watcher:
        kept = bytearray(64 * MIB)
        watcher.settle()
        del kept
    assert watcher.use.steady_bytes - watcher.use.before_bytes == pytest.approx(64 * MIB, rel=0.05)


@linux
def test_a_mark_that_cannot_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of the process's whole life is that of the watch only where it rose meanwhile."""
    monkeypatch.setattr(memory, "_reset_mark", lambda: False)
    lifetime = memory._lifetime_peak()
    assert lifetime is not None
    with watch() as low:
        time.sleep(0.02)
    assert low.use.observer == "samples"
    with watch() as high:
        more = bytearray(lifetime + 32 * MIB - psutil.Process().memory_info().rss + 32 * MIB)
        time.sleep(0.02)
        del more
    assert high.use.observer == "kernel"
    assert high.use.peak_bytes == pytest.approx(lifetime + 64 * MIB, rel=0.02)


def test_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on macOS: psutil reads, and nobody says what is mapped."""

    def missing(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError

    real = psutil.Process().memory_info().rss
    monkeypatch.setattr(memory, "open", missing, raising=False)
    monkeypatch.setattr(memory, "os", SimpleNamespace(open=missing, O_RDONLY=0, O_CLOEXEC=0))
    monkeypatch.setattr(memory, "_lifetime_peak", lambda: None)
    with watch() as watcher:
        kept = bytearray(64 * MIB)
        time.sleep(0.05)
    assert len(kept)
    use = watcher.use
    assert (use.observer, use.mapped_bytes, use.anonymous_peak_bytes) == ("samples", None, None)
    assert use.peak_bytes == pytest.approx(real + 64 * MIB, rel=0.1)


@linux
def test_samples_cost_little() -> None:
    with watch() as watcher:
        time.sleep(1)
    assert watcher.use.samples > 50
    assert watcher.use.sampling_share is not None
    assert watcher.use.sampling_share < 0.05  # 0.003 to 0.008 on an idle machine


def test_an_exception_leaves_no_thread_and_no_figure() -> None:
    with pytest.raises(ZeroDivisionError), watch() as watcher:
        _ = 1 // 0
    assert not [thread for thread in threading.enumerate() if thread.name == "kvctl memory"]
    with pytest.raises(RuntimeError):
        _ = watcher.use


def test_what_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="npu"), watch("npu"):
        pass
    monkeypatch.setattr("kvctl.measure.rates.import_torch", lambda: None)
    with pytest.raises(KvctlError, match="cuda:0 needs torch"), watch("cuda:0"):
        pass
    here = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False), backends=SimpleNamespace(mps=None))
    monkeypatch.setattr("kvctl.measure.rates.import_torch", lambda: here)
    for device in ("cuda:0", "mps"):
        with pytest.raises(KvctlError, match=f"torch has no {device}"), watch(device):
            pass


class Allocator:
    """Counts as torch's CUDA allocator says it does (torch.cuda.memory: documentation of the four calls)."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def take(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def reset(self, _: Any) -> None:
        self.most = self.now


def test_cuda_by_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Allocator()
    books.take(900)
    books.take(-200)
    cuda = SimpleNamespace(
        is_available=lambda: True,
        synchronize=lambda _: None,
        memory_allocated=lambda _: books.now,
        max_memory_allocated=lambda _: books.most,
        max_memory_reserved=lambda _: 2048,
        reset_peak_memory_stats=books.reset,
        get_device_properties=lambda _: SimpleNamespace(uuid="00000000-0000-0000-0000-000000000000"),
    )
    monkeypatch.setattr(
        "kvctl.measure.rates.import_torch", lambda: SimpleNamespace(cuda=cuda, device=lambda name: name)
    )
    with watch("cuda:0") as watcher:
        books.take(100)
        books.take(50)
        books.take(-50)
    use = watcher.use
    assert (use.observer, use.before_bytes, use.steady_bytes, use.peak_bytes) == ("cuda", 700, 800, 850)
    assert (use.reserved_bytes, use.process_bytes, use.sampled_peak_bytes) == (2048, None, None)


@linux
@pytest.mark.engine
def test_tensors_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    with watch() as watcher:
        kept = torch.ones(64 * MIB)
        more = torch.ones(32 * MIB)
        time.sleep(0.05)
        del more
    assert kept.numel()
    use = watcher.use
    assert use.peak_bytes - use.before_bytes == pytest.approx(384 * MIB, rel=0.03)
    assert use.steady_bytes - use.before_bytes == pytest.approx(256 * MIB, rel=0.03)


@pytest.mark.gpu
def test_tensors_on_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA device here")
    with watch("cuda:0") as watcher:
        kept = torch.ones(64 * MIB, device="cuda:0")
        more = torch.ones(32 * MIB, device="cuda:0")
        del more
    assert kept.numel()
    use = watcher.use
    assert use.peak_bytes - use.before_bytes == 384 * MIB
    assert use.steady_bytes - use.before_bytes == 256 * MIB
    assert use.reserved_bytes is not None
    assert use.reserved_bytes >= use.peak_bytes


def test_what_a_shortage_says() -> None:
    """As torch 2.13 words them on a CPU, and on a GPU (its documentation of CUDA memory)."""
    on_cpu = RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
                          "allocate 46309760 bytes. Error code 12 (Cannot allocate memory)")  # fmt: skip
    on_gpu = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB")
    # 46,309,760 / 2^20
    assert shortage(on_cpu) == "44.16 MiB more was asked for"
    assert shortage(on_gpu) == "2.00 GiB more was asked for"
    assert shortage(MemoryError()) == "MemoryError"
