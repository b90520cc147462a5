"""--gpu cpu and a real GPU: the host's memory under a container's limits, and this machine's own cards."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from kvctl.hardware import read_gpus
from kvctl.hardware.host import cgroup_limits, host_device
from kvctl.units import GIB, MIB


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def limits(tmp_path: Path, own: str) -> list[int]:
    (tmp_path / "own").write_text(own)
    return sorted(limit.limit for limit in cgroup_limits(tmp_path / "cgroup", tmp_path / "own"))


V2 = "0::/system.slice/docker-1.scope\n"
V1 = "12:cpu,cpuacct:/docker/1\n5:memory:/docker/1\n0::/\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (V2, {}, []),
        (V2, {"memoryDOTmax": "max\n"}, []),
        (V2, {"memoryDOTmax": "8589934592\n"}, [8 * GIB]),  # a container sees its own group at the top
        (V2, {"system.slice__docker-1.scope__memoryDOTmax": "4294967296\n"}, [4 * GIB]),
        (
            V2,
            {"system.slice__memoryDOTmax": "2147483648", "system.slice__docker-1.scope__memoryDOTmax": "max"},
            [2 * GIB],
        ),
        (V2, {"memoryDOThigh": "3221225472", "memoryDOTmax": "4294967296"}, [3 * GIB, 4 * GIB]),
        (V1, {"memory__memoryDOTlimit_in_bytes": "9223372036854771712"}, []),  # no limit, in pages of 4 KiB
        (V1, {"memory__memoryDOTlimit_in_bytes": "9223372036854710272"}, []),  # in pages of 64 KiB
        (V1, {"memory__docker__1__memoryDOTlimit_in_bytes": "1073741824"}, [GIB]),
        (V1, {"memory__docker__memoryDOTlimit_in_bytes": "536870912"}, [512 * MIB]),
        ("0::/../../x\n", {"x__memoryDOTmax": "1048576"}, [MIB]),
        (V2, {"memoryDOTmax": "-1"}, []),
        (V2, {"memoryDOTmax": "0"}, []),
        (V2, {"memoryDOTmax": "9" * 400}, []),
        (V2, {"memoryDOTmax": "nan\x00"}, []),
        (V2, {"memoryDOTmax": ""}, []),
        ("garbage", {"memoryDOTmax": "1048576"}, []),
        ("", {}, []),
    ],
)
def test_cgroup_limits(tmp_path: Path, own: str, files: dict[str, str], expected: list[int]) -> None:
    write(tmp_path / "cgroup", **files)
    assert limits(tmp_path, own) == expected


def test_cgroup_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "cgroup" / "memory.max").mkdir(parents=True)
    assert limits(tmp_path, V2) == []
    assert cgroup_limits(tmp_path / "none", tmp_path / "none") == []


def test_file_cache_is_not_counted_as_used(tmp_path: Path) -> None:
    """The kernel drops inactive file pages before it refuses memory: 6 of 8 GiB used, 4 of them cache."""
    write(
        tmp_path / "cgroup",
        memoryDOTmax=str(8 * GIB),
        memoryDOTcurrent=str(6 * GIB),
        memoryDOTstat=f"anon {2 * GIB}\nfile {4 * GIB}\ninactive_file {4 * GIB}\nbroken\n",
    )
    (tmp_path / "own").write_text("0::/\n")
    (limit,) = cgroup_limits(tmp_path / "cgroup", tmp_path / "own")
    assert (limit.limit, limit.used, limit.where) == (8 * GIB, 2 * GIB, "memory.max")


def test_the_smallest_limit_binds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, memoryDOTmax=str(64 * MIB), memoryDOThigh=str(32 * MIB), memoryDOTcurrent=str(20 * MIB))
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr("kvctl.hardware.host.CGROUPS", tmp_path)
    monkeypatch.setattr("kvctl.hardware.host.OWN_GROUPS", tmp_path / "own")
    device = host_device()
    assert (device.memory_bytes, device.free_bytes) == (32 * MIB, 12 * MIB)
    assert device.cuda_bytes == 32 * MIB
    assert not device.cuda_estimated
    assert "memory.high limits memory to 32 MiB" in device.notes[0]


def test_a_limit_above_the_host_s_memory_binds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, memoryDOTmax=str(2**50))
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr("kvctl.hardware.host.CGROUPS", tmp_path)
    monkeypatch.setattr("kvctl.hardware.host.OWN_GROUPS", tmp_path / "own")
    device = host_device()
    assert (device.memory_bytes, device.notes) == (psutil.virtual_memory().total, ())


def test_the_host_without_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvctl.hardware.host.CGROUPS", tmp_path)
    (device,) = read_gpus("cpu")
    assert (device.kind, device.memory_bytes) == ("cpu", psutil.virtual_memory().total)
    assert device.free_bytes is not None
    assert 0 < device.free_bytes <= device.memory_bytes
    assert device.notes == ()


def test_the_host_s_memory_as_written() -> None:
    (device,) = read_gpus("CPU:64GiB")
    assert (device.kind, device.memory_bytes, device.free_bytes) == ("cpu", 64 * GIB, None)


@pytest.mark.gpu
def test_a_real_gpu() -> None:
    """NVML's answers for this machine's own GPUs hang together, and CUDA's total lies within NVML's."""
    from kvctl.hardware.local import list_gpus
    from kvctl.hardware.nvml_errors import NoGpuError

    try:
        gpus = list_gpus()
    except NoGpuError as error:
        pytest.skip(error.message)
    assert gpus
    for gpu in gpus:
        if gpu.unreadable:
            continue
        assert gpu.free_bytes is not None
        assert 0 <= gpu.free_bytes <= gpu.memory_bytes
        assert gpu.cuda_bytes <= gpu.memory_bytes
        if gpu.facts is not None and gpu.facts.memory_mib and not gpu.mig and not gpu.unified:
            assert abs(gpu.memory_bytes / MIB - gpu.facts.device_mib) < gpu.facts.device_mib * 0.02
            if gpu.facts.cuda_mib:
                assert abs(gpu.cuda_bytes / MIB - gpu.facts.cuda_mib) < gpu.memory_bytes / MIB * 0.02
