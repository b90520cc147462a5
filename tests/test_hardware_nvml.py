"""--gpu local through NVML's real ctypes path: a small library stands in for the driver's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvctl.hardware.nvml_errors import advice, meaning

SOURCE = Path(__file__).parent / "data" / "fake_nvml.c"
COMPILER = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="no C compiler (cc, gcc, clang) to build a stand-in for NVML"
)
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="stands in for libnvidia-ml.so.1")
pytestmark = [needs_compiler, linux]

MIB = 2**20
GIB = 2**30

# An H100 as nvidia-smi -q shows it: 81,559 MiB in all, 551 reserved.
H100 = f"""
0.name NVIDIA H100 80GB HBM3
0.uuid GPU-11111111-2222-3333-4444-555555555555
0.memory {81559 * MIB} {551 * MIB} {80000 * MIB} {1008 * MIB}
0.capability 9 0
0.bus 00000000:01:00.0
0.pcie_generation 5
0.pcie_width 16
"""
SYSTEM = "driver 580.95.05\ncuda 12080\n"

# Asks for each script in turn and prints what came of it, one JSON line each.
ASK = """
import json, os, sys
from kvctl.errors import KvctlError
from kvctl.hardware import read_gpus
from kvctl.hardware.local import list_gpus

for job in json.load(sys.stdin):
    with open(os.environ["FAKE_NVML"], "w") as file:
        file.write(job["script"].replace("OWN_PID", str(os.getpid())))
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        os.environ.pop(name, None)
    os.environ.update(job["environment"])
    try:
        devices = list_gpus() if job["text"] is None else read_gpus(job["text"])
    except KvctlError as error:
        print(json.dumps({"error": error.message, "hint": error.hint, "code": int(error.exit_code)}))
        continue
    names = [name for name in type(devices[0])._fields if name != "facts"] if devices else []
    rows = [
        {name: getattr(device, name) for name in names}
        | {"card": device.facts.name if device.facts else None, "cuda_bytes": device.cuda_bytes,
           "cuda_estimated": device.cuda_estimated}
        for device in devices
    ]
    print(json.dumps(rows))
"""


class Driver:
    """A folder with the stand-in library, which processes are sent to."""

    def __init__(self, folder: Path, *flags: str, cuda: bool = False) -> None:
        self.folder = folder
        library = folder / "libnvidia-ml.so.1"
        assert COMPILER is not None
        subprocess.run([COMPILER, "-shared", "-fPIC", *flags, "-o", str(library), str(SOURCE)], check=True)
        if cuda:
            shutil.copy(library, folder / "libcuda.so.1")

    def ask_all(self, *jobs: dict[str, Any]) -> list[Any]:
        return ask(self.folder, *jobs)

    def ask(self, script: str, text: str | None = "local", **environment: str) -> Any:
        return self.ask_all(job(script, text, **environment))[0]


def job(script: str, text: str | None = "local", **environment: str) -> dict[str, Any]:
    return {"script": SYSTEM + script, "text": text, "environment": environment}


def ask(folder: Path, *jobs: dict[str, Any]) -> list[Any]:
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder), "FAKE_NVML": str(folder / "script.txt")}
    done = subprocess.run(
        [sys.executable, "-c", ASK], input=json.dumps(jobs), env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="module")
def old_driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Without the calls of 2021 and later: nvmlDeviceGetMemoryInfo_v2, …RunningProcesses_v3."""
    return Driver(tmp_path_factory.mktemp("old_nvml"), "-DOLD")


@pytest.fixture(scope="module")
def cuda_driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver(tmp_path_factory.mktemp("cuda"), cuda=True)


def test_one_gpu(driver: Driver) -> None:
    (gpu,) = driver.ask("count 1\n" + H100)
    assert gpu["name"] == "NVIDIA H100 80GB HBM3"
    assert gpu["card"] == "H100 SXM"
    assert gpu["memory_bytes"] == 81559 * MIB
    assert gpu["free_bytes"] == 80000 * MIB
    assert gpu["reserved_bytes"] == 551 * MIB
    assert gpu["cuda_bytes"] == (81559 - 551) * MIB
    assert not gpu["cuda_estimated"]
    assert gpu["used_by_others"] == 1008 * MIB  # in use by what is not told
    assert (gpu["index"], gpu["compute_capability"], gpu["pcie"]) == (0, "9.0", "gen 5 x16")
    assert (gpu["driver"], gpu["cuda_version"]) == ("580.95.05", "12.8")
    assert (gpu["mig"], gpu["unified"], gpu["unreadable"], gpu["notes"]) == (False, False, None, [])


def test_the_cuda_driver_s_own_total_wins(cuda_driver: Driver) -> None:
    """85,028,896,768 bytes is what deviceQuery printed for such a card in a public thread."""
    script = "count 1\n" + H100 + "cuda_devices 1\nc0.uuid 11111111222233334444555555555555\nc0.name NVIDIA H100\n"
    (gpu,) = cuda_driver.ask(script + "c0.total 85028896768\n")
    assert gpu["cuda_bytes"] == 85028896768
    (failed,) = cuda_driver.ask(script + "error.cuInit 100\nc0.total 85028896768\n")
    assert failed["cuda_bytes"] == (81559 - 551) * MIB


def test_no_driver_at_all(tmp_path: Path) -> None:
    (answer,) = ask(tmp_path, job(""))
    assert "driver is not installed" in answer["error"]
    assert answer["code"] == 1
    assert "--gpu" in answer["hint"]


@pytest.mark.parametrize("script", ["count 0\n", ""])
def test_no_gpu(driver: Driver, script: str) -> None:
    assert "no NVIDIA GPU" in driver.ask(script)["error"]


def test_driver_and_library_of_different_versions(driver: Driver) -> None:
    answer = driver.ask("error.init 18\n")
    assert "different versions" in answer["error"]
    assert "reboot, or reload" in answer["hint"]


def codes() -> list[int]:
    import pynvml

    return sorted(
        value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_") and isinstance(value, int)
    )


def test_every_error_code_of_nvml(driver: Driver) -> None:
    """At the start one line; at one GPU of two a row with its reason, and the other GPU stays."""
    unknown = 4242
    every = [*codes(), unknown]
    assert {*range(1, 28), 999} <= set(every)
    good = H100.replace("\n0.", "\n1.")
    jobs = [job(f"error.init {code}\n") for code in every]
    jobs += [job(f"error.count {code}\n") for code in every]
    jobs += [job(f"count 2\n0.error.handle {code}\n" + good) for code in every]
    jobs += [job(f"count 2\n0.error.handle {code}\n" + good, None) for code in every]
    answers = driver.ask_all(*jobs)
    size = len(every)
    for answer, code in zip(answers[: 2 * size], every * 2, strict=True):
        assert answer["error"] == f"--gpu local: {meaning(code)}"
        assert answer["hint"] == advice(code)
        assert "\n" not in answer["error"]
    for (gpu,), code in zip(answers[2 * size : 3 * size], every, strict=True):
        assert gpu["index"] == 1
        assert f"GPU 0 left out: {meaning(code)}" in gpu["notes"]
    for (bad, gpu), code in zip(answers[3 * size :], every, strict=True):
        assert (bad["unreadable"], bad["memory_bytes"], gpu["unreadable"]) == (meaning(code), 0, None)
    assert str(unknown) in meaning(unknown)
    assert len({meaning(code) for code in every}) == size  # each says its own


@pytest.mark.parametrize("call", ["handle", "memory"])
@pytest.mark.parametrize(("code", "word"), [(15, "lost"), (4, "permission"), (16, "reset"), (999, "unknown error")])
def test_a_bad_gpu_does_not_hide_the_good(driver: Driver, call: str, code: int, word: str) -> None:
    script = "count 3\n" + H100 + f"1.error.{call} {code}\n1.error.memory_v2 {code}\n1.name NVIDIA H100 80GB HBM3\n"
    gpus = driver.ask(script + H100.replace("\n0.", "\n2."))
    assert [gpu["index"] for gpu in gpus] == [0, 2]
    assert any("GPU 1" in note and word in note for note in gpus[0]["notes"])


def test_every_gpu_lost(driver: Driver) -> None:
    answer = driver.ask("count 2\n0.error.handle 15\n1.error.handle 15\n")
    assert "GPU 0 left out: the GPU is lost" in answer["error"]


def test_unequal_gpus(driver: Driver) -> None:
    script = f"count 2\n{H100}\n1.name NVIDIA GeForce RTX 4090\n1.memory {24564 * MIB} {420 * MIB} {24000 * MIB} 0\n"
    big, small = driver.ask(script)
    assert (big["card"], small["card"]) == ("H100 SXM", "GeForce RTX 4090")
    assert small["memory_bytes"] == 24564 * MIB
    assert (small["compute_capability"], small["pcie"], small["nvlinks"]) == (None, None, 0)


def test_an_older_driver(old_driver: Driver) -> None:
    """The first memory call counts the driver's own part as used, so others' use is an estimate."""
    (gpu,) = old_driver.ask("count 1\n" + H100 + f"0.compute0 777 {900 * MIB}\n")
    assert gpu["reserved_bytes"] is None
    assert gpu["free_bytes"] == 80000 * MIB
    assert gpu["used_by_others"] == 900 * MIB
    assert gpu["cuda_bytes"] == 81089 * MIB  # the table's
    (quiet,) = old_driver.ask("count 1\n" + H100)
    # used 1,008 + 551; the rule's part for the driver is 384 MiB and a four-hundredth.
    assert quiet["used_by_others"] == (1008 + 551 - 384) * MIB - 81559 * MIB // 400


def test_processes(driver: Driver) -> None:
    script = (
        "count 1\n" + H100 + f"0.compute0 10 {GIB}\n0.compute1 11 {2 * GIB}\n0.graphics0 11 {GIB}\n0.graphics1 12 5\n"
    )
    (gpu,) = driver.ask(script)
    assert gpu["processes"] == [[10, GIB], [11, 2 * GIB], [12, 5]]
    assert gpu["used_by_others"] == 3 * GIB + 5
    own, absurd = driver.ask_all(
        job("count 1\n" + H100 + f"0.compute0 OWN_PID {GIB}\n0.compute1 9 {2 * GIB}\n"),
        job("count 1\n" + H100 + f"0.compute0 10 {2**62}\n"),
    )
    assert own[0]["processes"] == [[9, 2 * GIB]]
    assert absurd[0]["used_by_others"] == 1008 * MIB


def test_processes_that_do_not_tell(driver: Driver) -> None:
    """WSL and some containers give no bytes a process; then all that is in use counts."""
    (gpu,) = driver.ask("count 1\n" + H100 + f"0.compute0 10 ?\n0.compute1 11 {GIB}\n")
    assert gpu["processes"] == [[10, None], [11, GIB]]
    assert gpu["used_by_others"] == 1008 * MIB
    assert any("not told" in note for note in gpu["notes"])


@pytest.mark.parametrize("code", [3, 4, 13, 999])
def test_processes_that_cannot_be_listed(driver: Driver, code: int) -> None:
    (gpu,) = driver.ask("count 1\n" + H100 + f"0.error.compute {code}\n0.error.graphics {code}\n")
    assert (gpu["processes"], gpu["used_by_others"]) == ([], 1008 * MIB)


# Public report: tools showed the whole card where a process sees a slice.
# An A100 40 GB shows 4,864 MiB of a 1g.5gb and 19,968 of a 3g.20gb, in nvidia-smi and in torch alike.
MIG = f"""
count 1
0.name NVIDIA A100-SXM4-40GB
0.memory {40960 * MIB} {500 * MIB} {40000 * MIB} 0
0.capability 8 0
0.mig 1
0.slices 7
0s0.name NVIDIA A100-SXM4-40GB MIG 3g.20gb
0s0.uuid MIG-aaaaaaaa-0000-0000-0000-000000000000
0s0.memory {19968 * MIB} {60 * MIB} {19900 * MIB} {8 * MIB}
0s3.name NVIDIA A100-SXM4-40GB MIG 1g.5gb
0s3.uuid MIG-bbbbbbbb-0000-0000-0000-000000000000
0s3.memory {4864 * MIB} 0 {4850 * MIB} {14 * MIB}
"""


def test_mig_slices_show_their_own_memory(driver: Driver) -> None:
    big, small = driver.ask(MIG, None)
    assert (big["memory_bytes"], small["memory_bytes"]) == (19968 * MIB, 4864 * MIB)
    assert (big["cuda_bytes"], small["cuda_bytes"]) == (19968 * MIB, 4864 * MIB)
    assert small["free_bytes"] == 4850 * MIB
    assert big["mig"]
    assert small["mig"]
    assert big["card"] == small["card"] == "A100 40GB SXM"
    assert [gpu["index"] for gpu in (big, small)] == [0, 0]


@pytest.mark.parametrize("pick", ["local", "local:0", "local:MIG-aaaaaaaa,MIG-bbbbbbbb", "local:0,1"])
def test_a_process_sees_one_slice_and_nothing_beside_it(driver: Driver, pick: str) -> None:
    """MIG User Guide, CUDA device enumeration: slices are not pooled, not with each other and not with whole GPUs."""
    whole = H100.replace("0.", "1.", 1).replace("\n0.", "\n1.")
    (gpu,) = driver.ask(MIG.replace("count 1", "count 2") + whole, pick)
    assert gpu["memory_bytes"] == 19968 * MIB
    assert any("one MIG slice" in note and "3g.20gb" in note for note in gpu["notes"])


def test_one_mig_slice_is_picked(driver: Driver) -> None:
    jobs = [job(MIG, "local:MIG-bbbbbbbb"), job(MIG, CUDA_VISIBLE_DEVICES="MIG-bbbbbbbb-0000-0000-0000-000000000000")]
    for (gpu,) in driver.ask_all(*jobs):
        assert gpu["memory_bytes"] == 4864 * MIB
        assert not any("one MIG slice" in note for note in gpu["notes"])


def test_cuda_s_total_of_a_slice(cuda_driver: Driver) -> None:
    script = MIG + f"cuda_devices 1\nc0.uuid bbbbbbbb{'0' * 24}\nc0.name NVIDIA A100-SXM4-40GB MIG 1g.5gb\n"
    big, small = cuda_driver.ask(script + f"c0.total {4800 * MIB}\n", None)
    assert (big["cuda_bytes"], small["cuda_bytes"]) == (19968 * MIB, 4800 * MIB)


def test_mig_without_slices(driver: Driver) -> None:
    answer = driver.ask(
        f"count 1\n0.name NVIDIA A100-SXM4-40GB\n0.memory {40960 * MIB} 0 {40960 * MIB} 0\n0.mig 1\n0.slices 7\n"
    )
    assert "no slice" in answer["error"]


def test_a_slice_that_fails(driver: Driver) -> None:
    (gpu,) = driver.ask(MIG + "0s3.error.memory 4\n0s3.error.memory_v2 4\n")
    assert gpu["memory_bytes"] == 19968 * MIB
    assert any("no permission" in note for note in gpu["notes"])


@pytest.mark.parametrize("broken", ["0.error.memory 3\n0.error.memory_v2 3\n", "0.memory 0 0 0 0\n"])
def test_a_gpu_that_shares_the_system_s_memory(driver: Driver, broken: str) -> None:
    """Public reports: GB10 (driver 580) answers "not supported" for its memory, and tools said "no GPU"."""
    (gpu,) = driver.ask("count 1\n0.name NVIDIA GB10\n0.capability 12 1\n" + broken)
    assert gpu["unified"]
    assert gpu["card"] == "DGX Spark GB10"
    assert gpu["memory_bytes"] == gpu["cuda_bytes"] == psutil.virtual_memory().total
    assert 0 < gpu["free_bytes"] <= gpu["memory_bytes"]
    assert any("shares the system's memory" in note for note in gpu["notes"])


def test_jetson(driver: Driver) -> None:
    """Its RAM is already what CUDA sees, and the card is the Orin of the nearest size."""
    (gpu,) = driver.ask("count 1\n0.name Orin (nvgpu)\n")
    assert gpu["card"].startswith("Jetson")
    assert gpu["cuda_bytes"] == gpu["memory_bytes"] == psutil.virtual_memory().total


def test_less_is_free_than_the_engine_asks_for(cuda_driver: Driver) -> None:
    """Public report: vLLM refused to start with 19.77 of 22.05 GiB free at a utilisation of 0.9."""
    total, free = round(22.05 * GIB), round(19.77 * GIB)
    script = (
        f"count 1\n0.name NVIDIA L4\n0.memory {23034 * MIB} {455 * MIB} {free} {2300 * MIB}\n"
        "0.uuid GPU-00000000-0000-0000-0000-000000000001\ncuda_devices 1\n"
        f"c0.uuid 00000000000000000000000000000001\nc0.name NVIDIA L4\nc0.total {total}\n"
    )
    (gpu,) = cuda_driver.ask(script)
    assert gpu["free_bytes"] == free < 0.9 * gpu["cuda_bytes"] == 0.9 * total
    assert gpu["memory_bytes"] > total


def test_nvlink(driver: Driver) -> None:
    pair = "count 3\n" + "".join(
        f"{index}.name NVIDIA RTX A6000\n{index}.memory {49140 * MIB} 0 {49140 * MIB} 0\n{index}.bus 00000000:0{index}:00.0\n"
        for index in range(3)
    )
    links = "".join(
        f"{here}l{link}.active {active}\n{here}l{link}.type 0\n{here}l{link}.bus 00000000:0{there}:00.0\n"
        for here, there in ((0, 2), (2, 0))
        for link, active in ((0, 1), (1, 0), (2, 1))
    )
    assert [(gpu["peers"], gpu["nvlinks"]) for gpu in driver.ask(pair + links)] == [([2], 2), ([], 0), ([0], 2)]
    switched = "".join(f"{here}l0.active 1\n{here}l0.type 2\n" for here in range(3))
    assert [gpu["peers"] for gpu in driver.ask(pair + switched)] == [[1, 2], [0, 2], [0, 1]]


FOUR = "count 4\n" + "".join(
    f"{index}.name NVIDIA L4\n{index}.uuid GPU-{index}{index}aa\n{index}.memory {23034 * MIB} 0 {23034 * MIB} 0\n"
    for index in range(4)
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2", [2]),
        ("3,1", [3, 1]),
        ("0,0,1", [0, 1]),
        ("GPU-22", [2]),
        ("GPU-33aa,0", [3, 0]),
        ("1,9,2", [1]),  # CUDA stops at the first that it does not know
        ("", []),
        ("-1", []),
        ("GPU-", []),
        ("none", []),
    ],
)
def test_cuda_visible_devices(driver: Driver, value: str, expected: list[int]) -> None:
    answer = driver.ask(FOUR, CUDA_VISIBLE_DEVICES=value)
    if expected:
        assert [gpu["index"] for gpu in answer] == expected
        assert f"leaves {len(expected)} of 4 GPUs" in answer[0]["notes"][0]
    else:
        assert "leaves 0 of 4 GPUs" in answer["error"]


def test_two_gpus_of_one_uuid_prefix(driver: Driver) -> None:
    """CUDA takes a beginning that means two GPUs for none."""
    twins = FOUR.replace("GPU-11aa", "GPU-22ab")
    answers = driver.ask_all(*(job(twins, CUDA_VISIBLE_DEVICES=value) for value in ("GPU-22", "GPU-22a", "GPU-22ab")))
    assert ["error" in answer for answer in answers] == [True, True, False]
    assert answers[2][0]["index"] == 1


def test_unequal_gpus_may_be_numbered_otherwise(driver: Driver) -> None:
    unequal = FOUR.replace("0.name NVIDIA L4", "0.name NVIDIA H200")
    told, same, ordered = driver.ask_all(
        job(unequal, CUDA_VISIBLE_DEVICES="1"),
        job(FOUR, CUDA_VISIBLE_DEVICES="1"),
        job(unequal, CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID"),
    )
    assert [any("CUDA_DEVICE_ORDER" in note for note in gpus[0]["notes"]) for gpus in (told, same, ordered)] == [
        True,
        False,
        False,
    ]


def test_picking(driver: Driver) -> None:
    picked, listed, mixed, unknown, junk = driver.ask_all(
        job(FOUR, "local:1,3"),
        job(FOUR, "local:GPU-22aa, 0", CUDA_VISIBLE_DEVICES="3"),
        job(FOUR, "local:0,4090"),
        job(FOUR, "local:7"),
        job(FOUR, "local:\x1b[31m"),
    )
    assert [gpu["index"] for gpu in picked] == [1, 3]
    assert [gpu["index"] for gpu in listed] == [2, 0]
    assert [gpu["card"] for gpu in mixed] == ["L4", "GeForce RTX 4090"]
    assert unknown["code"] == junk["code"] == 2
    assert "0, 1, 2, 3" in unknown["hint"]
    assert "\x1b" not in junk["error"]


@pytest.mark.parametrize("text", ["local,local", "local:0,local:0", "local:0,H100,local"])
def test_memory_that_is_named_twice_is_not_twice_there(driver: Driver, text: str) -> None:
    answer = driver.ask("count 1\n" + H100, text)
    assert answer["code"] == 2
    assert "named twice" in answer["error"]


def test_hostile_answers(driver: Driver) -> None:
    long, bytes_, control, nonsense, nameless = driver.ask_all(
        job("count 1\n" + H100.replace("NVIDIA H100 80GB HBM3", "N" * 95)),
        job("count 1\n" + H100.replace("NVIDIA H100 80GB HBM3", "NVIDIA \\x\\x card")),
        job("count 1\n" + H100.replace("NVIDIA H100 80GB HBM3", "card \\e[31m")),
        job(f"count 1\n0.name card\n0.memory {GIB} {2 * GIB} {5 * GIB} {7 * GIB}\n"),
        job(f"count 1\n0.error.name 7\n0.error.uuid 7\n0.memory {GIB} 0 {GIB} 0\n"),
    )
    assert (long[0]["name"], long[0]["card"]) == ("N" * 95, None)
    assert bytes_[0]["name"] == "NVIDIA \N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} card"
    assert "\x1b" not in control[0]["name"]
    assert (nonsense[0]["free_bytes"], nonsense[0]["reserved_bytes"], nonsense[0]["used_by_others"]) == (None, None, 0)
    assert nameless[0]["name"] == "GPU 0"


def test_a_card_that_the_table_lacks(driver: Driver) -> None:
    (gpu,) = driver.ask(f"count 1\n0.name NVIDIA H400\n0.memory {300000 * MIB} {900 * MIB} {290000 * MIB} 0\n")
    assert gpu["card"] is None
    assert gpu["cuda_bytes"] == 299100 * MIB


@pytest.mark.parametrize("wrong", ["system", "device"])
def test_optional_questions_may_all_fail(driver: Driver, wrong: str) -> None:
    calls = ["uuid", "capability", "bus", "pcie_generation", "pcie_width", "mig", "compute", "graphics"]
    errors = "error.driver 3\nerror.cuda 3\nerror.shutdown 1\n" if wrong == "system" else ""
    errors += "".join(f"0.error.{call} 13\n" for call in calls) if wrong == "device" else ""
    script = errors + ("" if wrong == "system" else SYSTEM) + "count 1\n" + H100
    (gpu,) = driver.ask(script)
    assert (gpu["unreadable"], gpu["memory_bytes"]) == (None, 81559 * MIB)
