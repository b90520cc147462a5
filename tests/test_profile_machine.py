"""What is found of this machine, and how fast it is measured to be: beside the system's own tools and a plain C loop."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_hardware_nvml import H100, MIG, SYSTEM, Driver, driver, needs_compiler  # noqa: F401

from kvctl.errors import KvctlError
from kvctl.hardware import cpu as cpu_module
from kvctl.hardware import table
from kvctl.hardware.cpu import cpuinfo, last_cache, quota, read_cpu
from kvctl.hardware.device import Device
from kvctl.measure import hostmemory, rates
from kvctl.measure.environment import container, environment
from kvctl.measure.hostmemory import memory_rates, working_set
from kvctl.measure.machine import Gpu, look, published, with_rates
from kvctl.measure.rates import Rates, measure_rates, rate, repeat
from kvctl.units import GIB, KIB, MIB

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and /sys")

V2 = "0::/system.slice/docker-1.scope\n"
V1 = "4:cpu,cpuacct:/docker/1\n5:memory:/docker/1\n0::/\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (V2, {}, None),
        (V2, {"cpu.max": "max 100000\n"}, None),
        (V2, {"cpu.max": "150000 100000\n"}, 1.5),  # docker run --cpus 1.5
        (V2, {"cpu.max": "400000 100000", "system.slice/cpu.max": "200000 100000"}, 2.0),
        (V2, {"system.slice/docker-1.scope/cpu.max": "50000 100000", "cpu.max": "max 100000"}, 0.5),
        (V1, {"cpu/docker/1/cpu.cfs_quota_us": "250000", "cpu/docker/1/cpu.cfs_period_us": "100000"}, 2.5),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        (V1, {"cpu/cpu.cfs_quota_us": "100000"}, None),
        (V2, {"cpu.max": "100000 0"}, None),
        (V2, {"cpu.max": "0 100000"}, None),
        (V2, {"cpu.max": "nan\x00 1"}, None),
        (V2, {"cpu.max": "9" * 400 + " 1"}, None),
        ("garbage", {"cpu.max": "100000 100000"}, None),
        ("", {}, None),
    ],
)
def test_quota(tmp_path: Path, own: str, files: dict[str, str], expected: float | None) -> None:
    write(tmp_path / "cgroup", files)
    (tmp_path / "own").write_text(own)
    assert quota(tmp_path / "cgroup", tmp_path / "own") == expected


def test_quota_rounds_up_to_threads() -> None:
    cpu = read_cpu()
    assert cpu.replace(allowed_cores=8, quota_cores=1.5).usable_cores == 2
    assert cpu.replace(allowed_cores=1, quota_cores=4.0).usable_cores == 1
    assert cpu.replace(allowed_cores=8, quota_cores=0.1).usable_cores == 1
    assert cpu.replace(allowed_cores=None, logical_cores=None, quota_cores=None).usable_cores == 1


# As such machines print them (shortened).
XEON = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse4_2 avx f16c avx2 fma avx512f avx512bw avx512_bf16 avx512_fp16 amx_bf16 amx_tile amx_int8

processor\t: 1
model name\t: another
"""
GRAVITON = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd aes asimdhp asimddp sve svei8mm i8mm svebf16 bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


def test_what_cpuinfo_says(tmp_path: Path) -> None:
    def read(text: str) -> tuple[str | None, tuple[str, ...]]:
        (tmp_path / "cpuinfo").write_text(text)
        info = cpuinfo(tmp_path / "cpuinfo")
        return cpu_module._model(info), cpu_module._instruction_sets(info)

    xeon = ("avx", "f16c", "fma", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16")
    assert read(XEON) == ("Intel(R) Xeon(R) Platinum 8480+", xeon)
    assert read(GRAVITON) == ("ARM Neoverse-V1", ("asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve"))
    assert read(GRAVITON.replace("0xd40", "0xfff"))[0] == "ARM implementer 0x41, part 0xfff"
    assert read("\x00 broken")[1] == ()


def test_caches_that_cores_share_count_once(tmp_path: Path) -> None:
    """Two chiplets of two cores, each with 32 MiB: 64 MiB, and the second level is not the last."""
    for core in range(4):
        shared = "0-1" if core < 2 else "2-3"
        for index, (level, kind, size, who) in enumerate(
            [
                ("1", "Data", "48K", str(core)),
                ("1", "Instruction", "32K", str(core)),
                ("3", "Unified", "32768K", shared),
            ]
        ):
            folder = f"cpu{core}/cache/index{index}"
            write(tmp_path, {f"{folder}/level": level, f"{folder}/type": kind, f"{folder}/size": size + "\n",
                             f"{folder}/shared_cpu_list": who + "\n"})  # fmt: skip
    assert last_cache(tmp_path) == 64 * MIB
    assert last_cache(tmp_path / "none") is None


@linux
def test_this_cpu_as_other_tools_see_it() -> None:
    cpu = read_cpu()
    assert cpu.logical_cores == int(subprocess.check_output(["getconf", "_NPROCESSORS_ONLN"]))
    assert cpu.allowed_cores == int(subprocess.check_output(["nproc"], env=os.environ | {"OMP_NUM_THREADS": ""}))
    if shutil.which("lscpu") is None:
        pytest.skip("lscpu is not installed")
    shown = json.loads(subprocess.check_output(["lscpu", "-J"], env=os.environ | {"LC_ALL": "C"}))["lscpu"]
    facts: dict[str, str] = {}

    def gather(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            facts[row["field"].rstrip(":")] = row["data"]
            gather(row.get("children", []))

    gather(shown)
    if "Flags" in facts:
        assert ("avx2" in cpu.instruction_sets) == ("avx2" in facts["Flags"].split())
        assert cpu.model == facts["Model name"]
    match = re.match(r"([0-9.]+) (KiB|MiB)", facts.get("L3 cache", facts.get("L3", "")))
    if match:
        assert cpu.last_cache_bytes == float(match[1]) * {"KiB": KIB, "MiB": MIB}[match[2]]


@linux
def test_affinity_is_what_is_left() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " \
           "from kvctl.hardware.cpu import read_cpu; print(read_cpu().usable_cores)"  # fmt: skip
    assert subprocess.check_output([sys.executable, "-c", code]).strip() == b"1"


def test_a_machine_that_tells_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on macOS or in a closed container: no /proc, no /sys, no frequencies, no load."""
    for name in ("_CPUINFO", "_CPUS", "CGROUPS", "OWN_GROUPS"):
        monkeypatch.setattr(cpu_module, name, tmp_path / "none")

    def fails(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(psutil, "cpu_freq", fails)
    monkeypatch.setattr(psutil, "swap_memory", fails)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: None)
    monkeypatch.setattr(os, "getloadavg", fails)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    answers = {"machdep.cpu.brand_string": b"Apple M3 Max\0", "hw.optional.arm.FEAT_BF16": b"\1\0\0\0",
               "hw.optional.arm.AdvSIMD": b"\1\0\0\0", "hw.l2cachesize": (4 * MIB).to_bytes(8, "little")}  # fmt: skip
    monkeypatch.setattr(cpu_module, "_of_mac", lambda name: answers.get(name, b""))
    machine = look()
    cpu = machine.cpu
    assert (cpu.model, cpu.instruction_sets, cpu.last_cache_bytes) == ("Apple M3 Max", ("asimd", "bf16"), 4 * MIB)
    assert (cpu.physical_cores, cpu.quota_cores, cpu.mhz, cpu.governor, cpu.usable_cores) == (None, None, None, None, 1)
    assert machine.load is None
    assert machine.memory.swap_total_bytes == 0
    json.dumps(machine.to_dict())


@linux
def test_this_machine_s_memory() -> None:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory = look().memory
    assert memory.total_bytes == int(lines["MemTotal"].split()[0]) * 1024
    assert memory.swap_total_bytes == int(lines["SwapTotal"].split()[0]) * 1024
    assert memory.available_bytes <= memory.total_bytes


def test_a_container_s_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path, {"memory.max": str(64 * MIB), "memory.current": str(20 * MIB), "own": "0::/\n"})
    monkeypatch.setattr("kvctl.hardware.host.CGROUPS", tmp_path)
    monkeypatch.setattr("kvctl.hardware.host.OWN_GROUPS", tmp_path / "own")
    memory = look().memory
    assert (memory.limit_bytes, memory.limit_name, memory.limit_used_bytes) == (64 * MIB, "memory.max", 20 * MIB)
    assert memory.available_bytes == 44 * MIB
    assert memory.total_bytes == psutil.virtual_memory().total


# Prints what is found of the GPUs that the stand-in driver shows.
LOOK = """
import json, os, sys
from kvctl.hardware.nvml import own_memory
with open(os.environ["FAKE_NVML"], "w") as file:
    file.write(sys.argv[1].replace("OWN_PID", str(os.getpid())))
from kvctl.measure.machine import look
found = look().to_dict()
if len(sys.argv) > 2:
    with own_memory(sys.argv[2]) as read:
        found["own"] = read()
print(json.dumps(found))
"""


def look_at(driver: Driver, script: str, *more: str) -> Any:  # noqa: F811
    environment = os.environ | {"LD_LIBRARY_PATH": str(driver.folder), "FAKE_NVML": str(driver.folder / "look.txt")}
    return json.loads(subprocess.check_output([sys.executable, "-c", LOOK, SYSTEM + script, *more], env=environment))


# What nvidia-smi -q shows of a busy H100.
SENSORS = """
0.sm_clock 1830
0.sm_clock_max 1980
0.memory_clock 2619
0.memory_clock_max 2619
0.milliwatts 687250
0.milliwatts_max 700000
0.temperature 61
0.persistence 1
0.reasons 0x24
"""


@linux
@needs_compiler
def test_gpus_and_who_holds_them(driver: Driver) -> None:  # noqa: F811
    holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        held = f"0.compute0 {holder.pid} {3 * GIB}\n0.compute1 999999999 {GIB}\n0.compute2 OWN_PID {5 * GIB}\n"
        uuid = "GPU-11111111-2222-3333-4444-555555555555"
        found = look_at(driver, "count 2\n" + H100 + SENSORS + held + "1.error.handle 15\n", uuid)
        name, user = psutil.Process(holder.pid).name(), psutil.Process(holder.pid).username()
    finally:
        holder.kill()
        holder.wait()
    good, bad = found["gpus"]
    assert good["holders"] == [
        {"pid": holder.pid, "bytes": 3 * GIB, "name": name, "user": user},
        {"pid": 999999999, "bytes": GIB, "name": None, "user": None},
    ]
    assert found["own"] == 5 * GIB
    assert (good["memory_bytes"], good["free_bytes"]) == (81559 * MIB, 80000 * MIB)
    # NVIDIA's data sheet of the H100 SXM: 3.35 TB/s, and 989.4 TFLOP/s of dense 16-bit products.
    assert (good["published_bandwidth_gbs"], round(good["published_fp16_tflops"])) == (3350, 989)
    assert good["readings"] == {
        "sm_mhz": 1830,
        "max_sm_mhz": 1980,
        "memory_mhz": 2619,
        "max_memory_mhz": 2619,
        "power_watts": 687.25,
        "power_limit_watts": 700.0,
        "temperature_c": 61,
        "persistence": True,
        "slowed_by": ["power limit", "temperature (driver)"],
    }
    assert (bad["name"], bad["readings"], bad["holders"]) == ("GPU 1", None, [])
    assert "fallen off the bus" in bad["unreadable"]
    assert found["no_gpu"] is None


@linux
@needs_compiler
def test_a_driver_without_sensors(driver: Driver) -> None:  # noqa: F811
    (gpu,) = look_at(driver, "count 1\n" + H100 + "0.error.reasons 3\n")["gpus"]
    assert gpu["readings"].pop("slowed_by") == []
    assert set(gpu["readings"].values()) == {None}


@linux
@needs_compiler
def test_no_gpu_is_no_error(driver: Driver, tmp_path: Path) -> None:  # noqa: F811
    assert look_at(driver, "count 0\n")["no_gpu"] == "this machine has no NVIDIA GPU"
    assert "different versions" in look_at(driver, "error.init 18\n")["no_gpu"]
    assert len(look_at(driver, MIG)["gpus"]) == 2


def test_published_figures_stand_beside() -> None:
    (card,) = table.find("H100 SXM")
    device = Device("NVIDIA H100 80GB HBM3", card.device_mib * MIB, facts=card)
    beside = published(Rates("cuda:0"), Gpu(device, None, ()))
    assert beside.published_bandwidth == 3.35e12
    assert beside.published_flops == pytest.approx(989.4e12, rel=0.001)
    assert published(Rates("cuda:0"), Gpu(device.replace(mig=True), None, ())).published_bandwidth is None
    assert published(Rates("cuda:0"), Gpu(device.replace(facts=None), None, ())).published_bandwidth is None
    assert published(Rates("cuda:0"), None).published_bandwidth is None


def test_the_fastest_run_counts_and_the_middle_one_is_its_spread() -> None:
    """1,000 bytes in 2, 1 and 4 s: 1,000 a second at best; the middle run took twice as long."""
    found = rate("read", 1000, [2.0, 1.0, 4.0], 7.0, "a loop")
    assert (found.value, found.spread, found.runs, found.seconds) == (1000, 1.0, 3, 7.0)
    assert found.to_dict()["bytes_per_second"] == 1000
    assert rate("matmul", 1000, [1.0], 1.0, "", "float32").to_dict()["flops_per_second"] == 1000


def test_runs_end_with_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 1 s: a warm-up, then as many as 5 s hold, or 3 where they do not hold so many."""
    clock = [0.0]
    monkeypatch.setattr(rates.time, "perf_counter", lambda: clock[0])

    def run() -> float:
        clock[0] += 1
        return 1.0

    assert repeat(run, 5) == ([1.0] * 5, 5.0)
    assert repeat(run, 0.1) == ([1.0] * 3, 3.0)


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvctl.measure.rates.import_torch", lambda: None)
    monkeypatch.setattr("kvctl.measure.machine.import_torch", lambda: None)
    machine = with_rates(look(), 0.05)
    (found,) = machine.rates
    assert [row.what for row in found.memory] == ["read", "copy"]
    assert found.bandwidth == max(row.value for row in found.memory)
    # Any memory of this century moves a GB a second, and no CPU's 10 TB.
    assert all(1e9 < row.value < 1e13 for row in found.memory)
    assert found.matrix == ()
    assert found.flops("float32") is None
    assert "kvctl[measure]" in found.notes[0]
    json.dumps(machine.to_dict())
    with pytest.raises(KvctlError, match="cuda:0 need torch"):
        measure_rates("cuda:0")


def test_too_little_memory_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    free = Device("CPU", GIB, kind="cpu", free_bytes=80 * MIB)
    monkeypatch.setattr(hostmemory, "host_device", lambda: free)
    assert working_set() == 10 * MIB
    found, (note,) = memory_rates(0.1)
    assert found == []
    assert "10 MiB" in note


def test_threads_that_fail_are_told_of_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostmemory, "_search", lambda *_: False)
    with pytest.raises(KvctlError, match="wrong answer"):
        memory_rates(0.1)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    before = threading.active_count()
    monkeypatch.setattr(hostmemory.mmap, "mmap", full)
    with pytest.raises(KvctlError, match="Cannot allocate memory"):
        memory_rates(0.1)
    assert threading.active_count() == before


@linux
def test_an_interrupt_ends_the_threads() -> None:
    code = (
        "import os, signal, threading; from kvctl.measure.hostmemory import memory_rates\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "try: memory_rates(60)\n"
        "except KeyboardInterrupt: print(threading.active_count())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], timeout=30).split() == [b"1"]


# Reads and copies in OpenMP threads, as STREAM does (J. McCalpin); prints the best GB/s of each.
STREAM = r"""
#include <omp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
int main(void) {
  size_t bytes = BYTES, n = bytes / 8;
  uint64_t *from = malloc(bytes), *to = malloc(bytes), sum = 0;
  double read = 1e9, copy = 1e9;
  #pragma omp parallel for schedule(static)
  for (size_t i = 0; i < n; i++) { from[i] = i; to[i] = 1; }
  for (int run = 0; run < 60; run++) {
    double begin = omp_get_wtime();
    #pragma omp parallel for schedule(static) reduction(+ : sum)
    for (size_t i = 0; i < n; i++) sum += from[i];
    double middle = omp_get_wtime();
    #pragma omp parallel for schedule(static)
    for (size_t i = 0; i < n; i++) to[i] = from[i];
    double end = omp_get_wtime();
    if (middle - begin < read) read = middle - begin;
    if (end - middle < copy) copy = end - middle;
    from[run] = sum + to[run];
  }
  printf("%g %g\n", bytes / read, 2.0 * bytes / copy);
}
"""


@pytest.mark.slow
@linux
def test_bandwidth_as_a_c_program_measures_it(tmp_path: Path) -> None:
    """Interleaved; the best of each. Compilers and libc differ in how they store, and the host has other guests: within half again."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is not installed")
    (tmp_path / "stream.c").write_text(STREAM.replace("BYTES", f"{working_set()}UL"))
    build = [compiler, "-O3", "-march=native", "-fopenmp", "-o", str(tmp_path / "stream"), str(tmp_path / "stream.c")]
    if subprocess.run(build, capture_output=True).returncode:
        pytest.skip("gcc has no OpenMP here")
    theirs = {"read": 0.0, "copy": 0.0}
    ours = dict(theirs)
    for _ in range(3):
        done = subprocess.check_output(
            [tmp_path / "stream"], env=os.environ | {"OMP_NUM_THREADS": str(read_cpu().usable_cores)}
        )
        for what, value in zip(theirs, map(float, done.split()), strict=True):
            theirs[what] = max(theirs[what], value)
        for row in memory_rates(1)[0]:
            ours[row.what] = max(ours[row.what], row.value)
    for what in ours:
        assert 0.67 < ours[what] / theirs[what] < 1.5, (ours, theirs)


@pytest.mark.slow
@pytest.mark.engine
def test_matrix_rates_as_a_plain_loop_measures_them() -> None:
    """2·n³ FLOP for n × n; the loop takes the size that was fastest."""
    import time

    torch = pytest.importorskip("torch")
    found = measure_rates("cpu", 0.5)
    assert [row.what for row in found.memory] == ["read", "copy", "matvec", "sum", "matvec"]
    assert {row.dtype for row in found.matrix} == {"float32", "bfloat16", "float16"}
    (row,) = (row for row in found.matrix if row.dtype == "float32")
    size = int(row.ran.partition("×")[0].split()[-1])
    one = torch.randn(size, size)
    best = float("inf")
    for _ in range(50):
        begin = time.perf_counter()
        one @ one
        best = min(best, time.perf_counter() - begin)
    assert row.value == pytest.approx(2 * size**3 / best, rel=0.25)


@pytest.mark.engine
def test_a_device_that_torch_has_not() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("torch has CUDA here")
    for device in ("cuda:0", "nonsense"):
        with pytest.raises(KvctlError, match=f"rates of {device} could not be measured"):
            measure_rates(device, 0.05)


@pytest.mark.gpu
def test_a_gpu_is_as_fast_as_published() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA device here")
    found = next(row for row in with_rates(look(), 0.5).rates if row.device == "cuda:0")
    assert found.bandwidth is not None
    if found.published_bandwidth is None:
        pytest.skip("no published figure of this GPU")
    assert 0.6 < found.bandwidth / found.published_bandwidth < 1.02


def test_where_it_ran_says_nothing_of_who() -> None:
    import platform
    import socket

    facts = environment("cpu")
    assert facts["python"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert facts["memory_bytes"] == psutil.virtual_memory().total
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", facts["time"])
    assert (facts["device"], facts["gpus"]) == ("cpu", [])
    text = json.dumps(facts)
    for name in (socket.gethostname(), platform.node(), os.path.expanduser("~")):
        assert len(name) < 6 or name not in text


def test_versions_are_read_and_nothing_is_imported() -> None:
    code = (
        "import sys; from kvctl.measure.environment import environment; facts = environment(); "
        "assert facts['torch'] is None; "
        "print(facts['packages'].get('numpy'), *[name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    shown = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    pip = subprocess.run([sys.executable, "-m", "pip", "list", "--format", "json"], capture_output=True)
    if pip.returncode:
        pytest.skip("pip is not installed here")
    listed = json.loads(pip.stdout)
    assert shown == [next((row["version"] for row in listed if row["name"] == "numpy"), "None")]


@pytest.mark.engine
def test_torch_s_build() -> None:
    torch = pytest.importorskip("torch")
    facts = environment("cpu")["torch"]
    assert facts["version"] == str(torch.__version__)
    assert facts["threads"] == torch.get_num_threads()
    assert facts["build"] == ("cuda" if torch.version.cuda else "rocm" if torch.version.hip else "cpu")


def test_containers_leave_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert container(tmp_path) is None
    write(tmp_path, {"run/systemd/container": "systemd-nspawn\n"})
    assert container(tmp_path) == "systemd-nspawn"
    write(tmp_path, {"run/.containerenv": ""})
    assert container(tmp_path) == "podman"
    write(tmp_path, {".dockerenv": ""})
    assert container(tmp_path) == "docker"
