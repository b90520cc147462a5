"""--gpu names: the table of GPUs, its aliases, and the grammar around them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.errors import KvctlError, UsageError
from kvctl.hardware import Device, read_gpus, table
from kvctl.hardware.device import estimated_cuda_bytes
from kvctl.units import GIB, MIB

DATA = Path(__file__).parent / "data"
RAW = json.loads((Path(table.__file__).parent.parent / "data" / "gpus.json").read_text("utf-8"))

# Marketing and driver's names with the MiB that nvidia-smi prints and the maker's GB, collected beside the table.
NAMES = [line.split("\t") for line in (DATA / "gpu_names.tsv").read_text("utf-8").splitlines()]


def one(text: str) -> Device:
    (device,) = read_gpus(text)
    return device


def card_of(device: Device) -> str:
    assert device.facts is not None
    return device.facts.name


def refused(text: str) -> KvctlError:
    with pytest.raises(UsageError) as caught:
        read_gpus(text)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(("name", "card", "mib", "gigabytes"), NAMES, ids=[row[0] for row in NAMES])
def test_marketing_and_driver_names(name: str, card: str, mib: str, gigabytes: str) -> None:
    for spelled in (name, name.lower(), name.upper().replace(" ", "-"), name.replace(" ", "").replace("-", "_")):
        devices = read_gpus(spelled)
        assert {card_of(device) for device in devices} == {card}
        if mib:
            assert devices[0].memory_bytes == int(mib) * MIB
        elif not devices[0].unified:
            total = sum(device.memory_bytes for device in devices)
            # Tools print up to 1 part in 300 less than the maker's GB as GiB.
            assert int(gigabytes) * GIB * 0.996 < total <= int(gigabytes) * GIB


ALIASES = {
    "GeForce RTX 4090": ["rtx4090", "4090", "RTX 4090", "geforce rtx 4090", "rtx-4090", "RTX_4090_24GB", "nvidia 4090"],
    "GeForce RTX 3090": ["3090", "rtx3090", "RTX 3090"],
    "GeForce RTX 5090": ["5090", "rtx 5090", "GeForce RTX 5090", "5090 32gb"],
    "GeForce RTX 3060 12GB": ["3060", "rtx 3060", "rtx3060-12gb"],
    "GeForce RTX 4060 Ti 16GB": ["4060ti", "4060 ti", "RTX 4060 Ti 16GB"],
    "RTX A6000": ["a6000", "rtx a6000", "NVIDIA RTX A6000"],
    "RTX 6000 Ada": ["6000 ada", "rtx6000ada", "RTX 6000 Ada Generation"],
    "RTX PRO 6000 Blackwell": ["rtx pro 6000", "pro6000", "RTX 6000 Pro", "rtx pro 6000 blackwell max-q workstation edition"],
    "H100 SXM": ["h100-sxm", "h100 sxm5", "H100 80GB HBM3", "h100-sxm-80gb", "h100sxm"],
    "H100 PCIe": ["h100 pcie", "h100-pcie", "H100-PCIe-80GB"],
    "H100 NVL": ["h100 nvl", "h100-94gb"],
    "A100 80GB PCIe": ["a100 80gb pcie", "a100-pcie-80gb", "A100-PCIE-80GB"],
    "A100 40GB PCIe": ["a100-pcie-40gb"],
    "A100 80GB SXM": ["A100-SXM4-80GB", "a100 sxm 80gb", "a100 80gb sxm4"],
    "A100 40GB SXM": ["A100-SXM4-40GB", "a100-sxm-40g"],
    "H200 SXM": ["h200", "H200 SXM", "h200-141gb"],
    "B200": ["b200", "NVIDIA B200", "b200-sxm", "B200 180GB", "b200 192gb"],
    "GB200": ["gb200", "GB200 NVL72"],
    "L4": ["l4", "NVIDIA L4", "l4-24gb"],
    "L40": ["l40"],
    "L40S": ["l40s", "L40S 48GB"],
    "A10": ["a10"],
    "A10G": ["a10g"],
    "Tesla T4": ["t4", "tesla t4", "T4-16GB"],
    "Tesla V100 SXM2 32GB": ["v100-sxm2-32gb", "v100 sxm 32gb"],
    "Tesla P100 PCIe 16GB": ["p100"],
    "DGX Spark GB10": ["gb10", "dgx spark", "dgxspark", "spark", "NVIDIA GB10", "DGX-Spark-128GB"],
    "Jetson AGX Orin": ["agx orin 64gb", "agx orin", "orin agx", "Jetson AGX Orin 32GB"],
    "Jetson Orin NX": ["orin nx", "Orin NX 8GB"],
    "Jetson Orin Nano": ["orin nano", "jetson-orin-nano-super"],
    "Jetson AGX Xavier": ["xavier", "agx-xavier"],
    "Instinct MI300X": ["mi300x", "MI300X", "mi300", "amd mi300x", "MI300X 192GB"],
    "Instinct MI325X": ["mi325x"],
    "Instinct MI355X": ["mi355x"],
    "Gaudi 2": ["gaudi2", "HL-225"],
    "Gaudi 3": ["gaudi3", "intel gaudi 3"],
    "Apple M2 Ultra": ["m2ultra", "M2 Ultra", "m2-ultra-192gb", "apple m2 ultra"],
    "Apple M3 Max": ["m3 max", "M3Max"],
    "Apple M4": ["m4"],
}  # fmt: skip


@pytest.mark.parametrize(("card", "spelled"), [(card, name) for card, names in ALIASES.items() for name in names])
def test_names_that_people_type(card: str, spelled: str) -> None:
    device = one(spelled)
    assert card_of(device) == card
    assert not any("other variants" in note for note in device.notes)


def test_no_name_means_two_cards() -> None:
    """Each key belongs to one card or is listed as generic, and no generic name hides a card's own."""
    owners: dict[str, set[str]] = {}
    for row in RAW["gpus"]:
        for name in (row["name"], *row["nvml"], *row.get("aliases", ())):
            assert table.key(name), name
            owners.setdefault(table.key(name), set()).add(row["name"])
    assert {key: cards for key, cards in owners.items() if len(cards) > 1} == {}
    generic = [table.key(name) for name in RAW["generic"]]
    assert len(generic) == len(set(generic))
    assert set(generic) & set(owners) == set()
    for members in RAW["generic"].values():
        assert len(members) > 1
        assert set(members) <= {row["name"] for row in RAW["gpus"]}


@pytest.mark.parametrize(
    ("name", "taken", "others"),
    [
        ("A100", "A100 80GB SXM", ["A100 80GB PCIe", "A100 40GB SXM", "A100 40GB PCIe"]),
        ("H100", "H100 SXM", ["H100 PCIe 80GB", "H100 NVL 94GB"]),
        ("a100-40g", "A100 40GB SXM", ["A100 40GB PCIe"]),
        ("a100 80gb", "A100 80GB SXM", ["A100 80GB PCIe"]),
        ("a10040gb", "A100 40GB SXM", ["A100 40GB PCIe"]),
        ("v100-32gb", "Tesla V100 SXM2 32GB", ["Tesla V100 PCIe 32GB"]),
        ("V100", "Tesla V100 SXM2 16GB", ["Tesla V100 SXM2 32GB", "Tesla V100 PCIe 32GB"]),
        ("GH200", "GH200 96GB", ["GH200 144GB"]),
        ("Jetson", "Jetson AGX Orin", ["Jetson Orin NX 16GB", "Jetson Orin Nano 8GB", "Jetson AGX Xavier 32GB"]),
        ("Orin", "Jetson AGX Orin", ["Jetson Orin NX 16GB", "Jetson Orin Nano 8GB"]),
        ("rtx 6000", "RTX 6000 Ada", ["RTX PRO 6000 Blackwell 96GB"]),
    ],
)
def test_a_generic_name_says_which_variant_was_taken(name: str, taken: str, others: list[str]) -> None:
    device = one(name)
    assert card_of(device) == taken
    (note,) = [note for note in device.notes if "other variants" in note]
    for other in others:
        assert other in note


@pytest.mark.parametrize(
    ("text", "cards"),
    [
        ("2xRTX4090", ["GeForce RTX 4090"] * 2),
        ("2 x RTX 4090", ["GeForce RTX 4090"] * 2),
        ("2×4090", ["GeForce RTX 4090"] * 2),
        ("4*H100", ["H100 SXM"] * 4),
        ("H100 x4", ["H100 SXM"] * 4),
        ("4090x2", ["GeForce RTX 4090"] * 2),
        ("RTX4090x2", ["GeForce RTX 4090"] * 2),
        ("8xMI300X", ["Instinct MI300X"] * 8),
        ("MI300Xx8", ["Instinct MI300X"] * 8),
        ("H100:80GB x2", ["H100 SXM"] * 2),
        ("H100x2:80GB", ["H100 SXM"] * 2),
        ("A100-40GB,2xRTX3090", ["A100 40GB SXM", "GeForce RTX 3090", "GeForce RTX 3090"]),
        ("l4, l4 ,t4", ["L4", "L4", "Tesla T4"]),
        ("2xA100 40GB", ["A100 40GB SXM"] * 2),
    ],
)
def test_counts_and_lists(text: str, cards: list[str]) -> None:
    assert [card_of(device) for device in read_gpus(text)] == cards


@pytest.mark.parametrize(
    ("text", "mib"),
    [
        ("H100:80GB", 81559),  # the published size: nvidia-smi prints 81,559 MiB
        ("H100:80GiB", 81559),
        ("H100:94GB", 95830),  # the NVL
        ("A100:40GB", 40960),
        ("A100:40GiB", 40960),
        ("B200:180GB", 183359),
        ("B200:192GB", 183359),  # 183,359 MiB are 192.3 GB
        ("L4:24GB", 23034),
        ("RTX 4090:48GiB", 49152),  # taken as written
        ("H100:70GiB", 71680),
        ("H100:500MB", 476.837158203125),  # 5*10^8 / 2^20
        ("M3 Max:64GB", 65536),
        ("AGX Orin:32GB", 32768),
        ("agx orin 64gb", 65536),
        ("m2ultra", 196608),
    ],
)
def test_memory_after_a_colon(text: str, mib: float) -> None:
    assert one(text).memory_bytes == mib * MIB


def test_a_size_that_is_not_the_card_s_own_is_told() -> None:
    assert any("81,559 MiB" in note for note in one("H100:80GB").notes)
    assert any("70 GiB as written" in note and "80 GB" in note for note in one("H100:70GiB").notes)
    assert any("64 GB or 128 GB or 192 GB" in note for note in one("m2 ultra").notes)


def test_each_die_of_a_two_die_card_is_a_device() -> None:
    """torch prints 65,520 MiB for a device of an MI250X, which has 128 GB."""
    first, second = read_gpus("MI250X")
    assert first.memory_bytes == second.memory_bytes == 65520 * MIB
    assert any("dies" in note for note in first.notes)
    assert len(read_gpus("4xMI250X")) == 8


@pytest.mark.parametrize(
    "text",
    ["0xH100", "100000xH100", "99999999999999999999xH100", "4096xH100,H100", "H100:0", "H100:-4GB", "H100:", "H100:nanGB",
     "H100:1e9GB", "H100:9999999PiB", "H100:1KB", "", " ", ",", "H100,", ",H100", "x", "2x", "2xcpu", "cpu,cpu", "cpu:8GiB,H100,cpu", "cpu:x", "4xlocal",
     "H100\x00", "H100\x1b[31m", "Ｈ１００", "H100;rm", "H" * 5000, "H100," * 3000 + "H100", "RTX 4090 Laptop", "Quadro RTX 6000",
     "RTX 4090 48GB", "RTX409", "64GB", "GB", "9" * 300 + "xH100", "H100:" + "9" * 300],
)  # fmt: skip
def test_refusals_are_one_line(text: str) -> None:
    error = refused(text)
    assert len(error.message) < 120
    assert error.hint
    assert "\x1b" not in error.message


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("RTX 4091", "GeForce RTX 4090"),
        ("H1000", "H100"),
        ("4090 laptop", "GeForce RTX 4090"),
        ("MI300A", "Instinct MI300X"),
        ("A100-60GB", "A100"),
        ("h10", "H100"),
        ("gaudi4", "Gaudi"),
        ("M9 Max", "Max"),
    ],
)
def test_unknown_names_list_the_nearest(text: str, near: str) -> None:
    error = refused(text)
    assert text.split("-")[0] in error.message
    assert near in (error.hint or "")


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    if "local" in text.lower() or "cpu" in text.lower():
        return
    try:
        devices = read_gpus(text)
    except UsageError:
        return
    assert all(device.memory_bytes > 0 for device in devices)


def test_the_table_is_complete_and_sourced() -> None:
    for row in RAW["gpus"]:
        facts = {"mib", "bw", "fp16", "fp8", "int8", "fp4", "fp32", "cc", "link"} & set(row)
        if row["vendor"] != "Apple":
            assert facts - set(row["src"]) == set(), row["name"]
        assert set(row["src"].values()) <= set(RAW["sources"])
        for mib, source in row.get("cuda", ()):
            assert isinstance(mib, int)
            assert source in RAW["sources"] or "#" in source
            if row["vendor"] == "NVIDIA" and not row.get("unified"):
                assert row["mib"] * 0.96 < mib <= row["mib"], row["name"]
    assert len(RAW["gpus"]) == 72


@pytest.mark.parametrize(
    ("name", "bandwidth", "fp16", "capability"),
    # NVIDIA's, AMD's and Apple's data sheets; dense.
    [
        ("H100 SXM", 3350, 989, "9.0"),
        ("H200", 4800, 989, "9.0"),
        ("A100-SXM4-80GB", 2039, 312, "8.0"),
        ("A100-SXM4-40GB", 1555, 312, "8.0"),
        ("RTX 4090", 1008, 165.2, "8.9"),
        ("RTX 3090", 936, 71.2, "8.6"),
        ("L4", 300, 121, "8.9"),
        ("T4", 320, 65, "7.5"),
        ("MI300X", 5300, 1307, "gfx942"),
        ("M2 Ultra", 800, None, None),
    ],
)
def test_rates(name: str, bandwidth: float, fp16: float | None, capability: str | None) -> None:
    facts = one(name).facts
    assert facts is not None
    assert (facts.bandwidth_gbs, facts.fp16_tflops, facts.compute_capability) == (bandwidth, fp16, capability)


@pytest.mark.parametrize(
    ("name", "gib", "within"),
    # Totals that vLLM and torch printed for such cards in public, none among the table's own sightings.
    [
        ("A100-SXM4-80GB", 79.32, 0.10),  # vllm-project/vllm-omni#276: "(0.49/79.32 GiB)" on an A100 (80GB)
        ("A100-SXM4-80GB", 79.15, 0.11),  # torch, beside nvidia-smi's 81920MiB
        ("L40S", 44.39, 0.02),  # torch
        ("B200", 178.35, 0.02),  # torch
        ("T4", 14.74, 0.03),  # torch
        ("dgx spark", 121.69, 0.10),  # vLLM: "(100.94/121.69 GiB)" on a GB10
    ],
)
def test_memory_that_applications_see(name: str, gib: float, within: float) -> None:
    device = one(name)
    assert abs(device.cuda_bytes / GIB - gib) <= within
    assert not device.cuda_estimated


def test_the_rule_for_cards_without_a_sighting() -> None:
    """Close to every card whose both totals are known, and labelled as an estimate."""
    known = [card for card in table.cards() if card.vendor == "NVIDIA" and not card.unified and card.cuda_mib]
    misses = [abs(estimated_cuda_bytes(card.device_mib * MIB) / MIB - (card.cuda_mib or 0)) for card in known]
    assert len(misses) >= 38
    assert max(misses) < 475
    assert sum(misses) / len(misses) < 110
    estimated = one("H100:70GiB")
    assert estimated.cuda_estimated
    assert estimated.cuda_bytes == 70 * GIB - 384 * MIB - 70 * GIB // 400
    assert one("H800").cuda_estimated
    # 62,827 of 65,536 MiB are seen of the 64 GB card.
    assert one("agx orin 32gb").cuda_bytes == 32 * GIB * 62827 // 65536
    assert one("agx orin 32gb").cuda_estimated
    assert one("agx orin 64gb").cuda_bytes == 62827 * MIB


def test_memory_given_by_the_user_is_not_replaced_by_a_sighting() -> None:
    assert one("H100:80GB").cuda_bytes == one("H100").cuda_bytes == 81089 * MIB
    assert one("H100:81559MiB").cuda_bytes == 81089 * MIB
    assert one("cpu:64GiB").cuda_bytes == 64 * GIB


def test_what_a_mac_leaves_to_the_gpu_is_an_estimate() -> None:
    big, small = one("M2 Ultra:192GB"), one("M1:16GB")
    assert (big.cuda_bytes, small.cuda_bytes) == (144 * GIB, 16 * GIB * 2 // 3)
    assert one("M1 Max:32GB").cuda_bytes == 32 * GIB * 2 // 3
    assert one("M3 Pro:36GB").cuda_bytes == 27 * GIB
    assert big.cuda_estimated
    assert small.cuda_estimated
    assert any("144 GiB" in note and "estimated" in note for note in big.notes)
    assert big.unified


def test_naming_a_card_imports_little() -> None:
    script = "import sys; from kvctl.hardware import read_gpus; read_gpus('4xH100,cpu:8GiB'); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"psutil", "pynvml", "ctypes", "difflib", "dataclasses", "importlib.resources"} & set(run.stdout.split())
