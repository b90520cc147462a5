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
    "GeForce RTX 4060 Ti 16GB": ["4060ti 16gb", "RTX 4060 Ti 16GB", "RTX 4060 Ti (16 GB)"],
    "GeForce RTX 4060 Ti 8GB": ["4060ti-8g", "NVIDIA GeForce RTX 4060 Ti 8GB"],
    "GeForce RTX 2080 Ti": ["2080ti", "RTX 2080 Ti 11GB"],
    "GeForce GTX 1080 Ti": ["1080ti", "GTX 1080 Ti 11GB"],
    "Tesla P40": ["p40", "P40 24GB"],
    "TITAN RTX": ["titan rtx"],
    "TITAN V": ["titan v"],
    "Quadro RTX 8000": ["rtx 8000", "Quadro RTX 8000 48GB"],
    "GeForce RTX 3070": ["3070", "RTX 3070 8GB"],
    "GeForce RTX 3080 10GB": ["RTX 3080 10GB", "3080-10gb"],
    "GeForce RTX 3080 12GB": ["RTX 3080 12GB", "RTX 3080 (12 GB)"],
    "GeForce RTX 3080 Ti": ["3080 ti"],
    "GeForce RTX 3090 Ti": ["3090ti", "RTX 3090 Ti 24GB"],
    "GeForce RTX 4070 SUPER": ["4070 super", "rtx4070super"],
    "GeForce RTX 4070 Ti": ["4070ti", "RTX 4070 Ti 12GB"],
    "GeForce RTX 4070 Ti SUPER": ["4070 ti super", "RTX 4070 Ti SUPER 16GB"],
    "GeForce RTX 4080 SUPER": ["RTX 4080 Super"],
    "GeForce RTX 5060 Ti 16GB": ["5060 ti 16gb"],
    "GeForce RTX 5070 Ti": ["5070ti"],
    "RTX 4000 Ada": ["RTX 4000 Ada 20GB", "NVIDIA RTX 4000 Ada Generation"],
    "RTX 5000 Ada": ["RTX 5000 Ada 32GB", "rtx 5000 ada generation"],
    "RTX A4000": ["a4000"],
    "RTX A5000": ["a5000", "RTX A5000 24GB"],
    "RTX PRO 5000 Blackwell": ["RTX PRO 5000", "RTX PRO 5000 48GB"],
    "RTX PRO 5000 Blackwell 72GB": ["RTX PRO 5000 72GB"],
    "RTX PRO 6000 Blackwell Max-Q": ["rtx pro 6000 max-q", "rtx pro 6000 blackwell max-q workstation edition"],
    "RTX A6000": ["a6000", "rtx a6000", "NVIDIA RTX A6000"],
    "RTX 6000 Ada": ["6000 ada", "rtx6000ada", "RTX 6000 Ada Generation", "RTX 6000 Ada 48GB"],
    "RTX PRO 6000 Blackwell": ["rtx pro 6000", "pro6000", "RTX 6000 Pro", "RTX PRO 6000 Blackwell Server"],
    "H100 SXM": ["h100-sxm", "h100 sxm5", "H100 80GB HBM3", "h100-sxm-80gb", "h100sxm", "H100 SXM 80GB"],
    "H100 PCIe": ["h100 pcie", "h100-pcie", "H100-PCIe-80GB", "H100 PCIe 80GB", "H100 (PCIe)"],
    "H100 NVL": ["h100 nvl", "h100-94gb"],
    "A100 80GB PCIe": ["a100 80gb pcie", "a100-pcie-80gb", "A100-PCIE-80GB", "A100 PCIe 80GB"],
    "A100 40GB PCIe": ["a100-pcie-40gb"],
    "A100 80GB SXM": ["A100-SXM4-80GB", "a100 sxm 80gb", "a100 80gb sxm4"],
    "A100 40GB SXM": ["A100-SXM4-40GB", "a100-sxm-40g"],
    "H200 SXM": ["h200", "H200 SXM", "h200-141gb", "H200 SXM 141GB"],
    "B200": ["b200", "NVIDIA B200", "b200-sxm", "B200 180GB", "b200 192gb"],
    "GB200": ["gb200", "GB200 NVL72", "GB200 192GB", "GB200 186GB"],
    "H20": ["H20 96GB"],
    "A40": ["A40 48GB"],
    "L4": ["l4", "NVIDIA L4", "l4-24gb"],
    "L40": ["l40"],
    "L40S": ["l40s", "L40S 48GB"],
    "A10": ["a10"],
    "A10G": ["a10g", "A10G 24GB"],
    "Tesla T4": ["t4", "tesla t4", "T4-16GB"],
    "Tesla V100 SXM2 32GB": ["v100-sxm2-32gb", "v100 sxm 32gb"],
    "Tesla P100 PCIe 16GB": ["p100"],
    "DGX Spark GB10": ["gb10", "dgx spark", "dgxspark", "spark", "NVIDIA GB10", "DGX-Spark-128GB"],
    "Jetson AGX Orin": ["agx orin 64gb", "agx orin", "orin agx", "Jetson AGX Orin 32GB"],
    "Jetson Orin NX": ["orin nx", "Orin NX 8GB"],
    "Jetson Orin Nano": ["orin nano", "jetson-orin-nano-super"],
    "Jetson AGX Xavier": ["xavier", "agx-xavier"],
    "Instinct MI300X": ["mi300x", "MI300X", "mi300", "amd mi300x", "MI300X 192GB", "AMD MI300X 192GB", "MI300X 192GB HBM3"],
    "Instinct MI300A": ["MI300A", "AMD MI300A 128GB"],
    "Instinct MI250": ["AMD MI250", "MI250 128GB", "MI250 64GB"],
    "Instinct MI100": ["AMD MI100 32GB"],
    "Instinct MI50 32GB": ["MI50 32GB"],
    "Radeon RX 7900 XTX": ["7900 xtx", "RX 7900 XTX 24GB", "AMD Radeon RX 7900 XTX"],
    "Radeon RX 7900 XT": ["7900xt"],
    "Radeon RX 9070 XT": ["rx 9070 xt"],
    "Radeon PRO W7900": ["W7900 48GB"],
    "Radeon AI PRO R9700": ["r9700", "Radeon AI PRO R9700 32GB"],
    "Ryzen AI Max+ 395": ["strix halo", "Strix Halo gfx1151", "Ryzen AI Max+ 395 (Strix Halo) 128GB", "ryzen ai max 395 64gb", "Radeon 8060S"],
    "Data Center GPU Max 1550": ["Intel Max 1550 (PVC)", "Max 1550", "Intel Data Center GPU Max 1550 128GB"],
    "Arc A770 16GB": ["A770", "Intel Arc A770 16GB"],
    "Arc B580": ["intel arc b580"],
    "Arc Pro B60": ["Arc Pro B60 24GB"],
    "Instinct MI325X": ["mi325x"],
    "Instinct MI355X": ["mi355x", "AMD Instinct MI355X 288GB HBM3e"],
    "Gaudi 2": ["gaudi2", "HL-225"],
    "Gaudi 3": ["gaudi3", "intel gaudi 3"],
    "Apple M1": ["M1 7-Core GPU 8GB", "m1 8-core"],
    "Apple M1 Max": ["Apple M1 Max 64GB", "M1 Max 32-Core GPU 64GB"],
    "Apple M2 Max": ["M2 Max 38-core"],
    "Apple M2 Ultra": ["m2ultra", "M2 Ultra", "m2-ultra-192gb", "apple m2 ultra", "M2 Ultra 76-Core GPU 192GB"],
    "Apple M3 Max": ["m3 max", "M3Max", "M3 Max 40-Core GPU 64GB"],
    "Apple M3 Max 30-core": ["M3 Max 30-Core GPU 36GB"],
    "Apple M4 Max": ["M4 Max 40-core 128GB"],
    "Apple M4": ["m4"],
}  # fmt: skip


@pytest.mark.parametrize(("card", "spelled"), [(card, name) for card, names in ALIASES.items() for name in names])
def test_names_that_people_type(card: str, spelled: str) -> None:
    device, *further = read_gpus(spelled)
    assert {card_of(each) for each in (device, *further)} == {card}
    assert not any("other variants" in note for note in device.notes)


def test_no_name_means_two_cards() -> None:
    """Each key belongs to one card or is listed as generic, and no generic name hides a card's own."""
    owners: dict[str, set[str]] = {}
    for row in RAW["gpus"]:
        for name in (row["name"], *row["nvml"], *row.get("aliases", ())):
            assert table.key(name), name
            owners.setdefault(table.key(name), set()).add(row["name"])
    generic = {table.key(name): set(members) for name, members in RAW["generic"].items()}
    assert len(generic) == len(RAW["generic"])
    # Drivers print one name for cards that differ in their memory: "NVIDIA GeForce RTX 3080".
    shared = {key: cards for key, cards in owners.items() if len(cards) > 1}
    assert shared == {key: generic[key] for key in set(generic) & set(owners)}
    assert set(shared) == {"3080", "4060ti", "5060ti", "mi50"}
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
        ("RTX 3080", "GeForce RTX 3080 10GB", ["GeForce RTX 3080 12GB"]),
        ("NVIDIA GeForce RTX 4060 Ti", "GeForce RTX 4060 Ti 16GB", ["GeForce RTX 4060 Ti 8GB"]),
        ("H100 80GB", "H100 SXM", ["H100 PCIe 80GB"]),
        ("A100 80GB", "A100 80GB SXM", ["A100 80GB PCIe"]),
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
        ("2xRTX 3080 12GB", ["GeForce RTX 3080 12GB"] * 2),
        ("7900 XTX x2", ["Radeon RX 7900 XTX"] * 2),
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
    # The memory of both dies, and of one: the same card.
    for text in ("MI250X 128GB", "MI250X:128GB", "MI250X:64GB"):
        assert [device.memory_bytes for device in read_gpus(text)] == [65520 * MIB] * 2
    # xpu-smi prints 68,719,476,736 bytes for a stack of an Intel Max 1550, which has two.
    assert [device.memory_bytes for device in read_gpus("Max 1550")] == [68719476736] * 2


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
        ("MI301X", "Instinct MI300X"),
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


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("RTX 4090 48GB", "'RTX 4090' comes with 24 GB, not 48 GB", "RTX 4090:48GB"),
        ("rtx409048gb", "'rtx4090' comes with 24 GB, not 48 GB", "rtx4090:48GB"),
        ("2xA100-60GB", "'A100' comes with 80 GB or 40 GB, not 60 GB", "A100:60GB"),
        ("A10060GB", "'A100' comes with 80 GB or 40 GB, not 60 GB", "A100:60GB"),
        ("M2 Ultra 96GB", "'M2 Ultra' comes with 64 GB or 128 GB or 192 GB, not 96 GB", "M2 Ultra:96GB"),
        ("RTX 3060 (8 GB)", "'RTX 3060' comes with 12 GB, not 8 GB", "RTX 3060:8GB"),
    ],
)
def test_a_memory_that_the_card_does_not_have(text: str, message: str, hint: str) -> None:
    error = refused(text)
    assert error.message == f"--gpu: {message}"
    assert f"or {hint} for memory of that size" in (error.hint or "")
    assert one(hint).facts


@pytest.mark.parametrize(("mib", "card"), [(10240, "GeForce RTX 3080 10GB"), (12288, "GeForce RTX 3080 12GB")])
def test_one_driver_s_name_of_two_cards(mib: int, card: str) -> None:
    """nvidia-smi prints "NVIDIA GeForce RTX 3080" for both; the memory tells which it is."""
    facts = table.facts_of("NVIDIA GeForce RTX 3080", mib * MIB)
    assert facts is not None
    assert facts.name == card


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
        facts = {"mib", "bw", "fp16", "fp8", "int8", "fp4", "fp32", "cc", "link", "node"} & set(row)
        if row["vendor"] != "Apple":
            assert facts - set(row["src"]) == set(), row["name"]
        assert set(row["src"].values()) <= set(RAW["sources"])
        # No rate that contradicts the order of widths, but for Blackwell Ultra's narrow INT8.
        rates = [row[field] for field in ("fp32", "fp16", "fp8", "fp4") if field in row]
        assert rates == sorted(rates), row["name"]
        for mib, source in row.get("cuda", ()):
            assert isinstance(mib, int)
            assert source in RAW["sources"] or "#" in source
            if row["vendor"] == "NVIDIA" and not row.get("unified"):
                assert row["mib"] * 0.96 < mib <= row["mib"], row["name"]
    assert len(RAW["gpus"]) == 123


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
        # GH100's whitepaper and H100's page: 1,671 TFLOPS with sparsity, 3.9 TB/s.
        ("H100 NVL", 3900, 1671 / 2, "9.0"),
        ("GH200 96GB", 4000, 989, "9.0"),
        # 352 bits at 14 Gbit/s; Turing's whitepaper: 53.8 TFLOPS of FP16 with FP32 accumulation.
        ("RTX 2080 Ti", 352 * 14 / 8, 53.8, "7.5"),
        # GA102's whitepaper: 40.6 TFLOPS for the RTX 3070, 59.5 for the RTX 3080.
        ("RTX 3070", 448, 40.6, "8.6"),
        ("RTX 3080 10GB", 760.3, 59.5, "8.6"),
        # 6,144 CUDA cores at 2.175 GHz: 4 x 26.73; hmc-tech has 106.91 and 261.12.
        ("RTX 4000 Ada", 360, 106.9, "8.9"),
        ("RTX 5000 Ada", 576, 261.1, "8.9"),
        # NVIDIA: 222.2 TFLOPS with sparsity.
        ("RTX A5000", 768, 111.1, "8.6"),
        ("RTX 5070 Ti", 256 * 28 / 8, 87.9, "12.0"),
        ("P40", 347.1, None, "6.1"),
        # AMD's data sheets.
        ("MI100", 4096 * 2.4 / 8, 184.6, "gfx908"),
        ("MI300A", 5300, 980.6, "gfx942"),
        ("RX 7900 XTX", 960, 122.8, "gfx1100"),
        ("R9700", 256 * 20 / 8, 191.4, "gfx1201"),
        ("Strix Halo", 256 * 8 / 8, 59.4, "gfx1151"),
        ("M3 Max 30-core", 300, None, None),
    ],
)
def test_rates(name: str, bandwidth: float, fp16: float | None, capability: str | None) -> None:
    facts = one(name).facts
    assert facts is not None
    assert (facts.bandwidth_gbs, facts.fp16_tflops, facts.compute_capability) == (bandwidth, fp16, capability)


def test_rates_of_narrow_formats_and_links() -> None:
    """RTX PRO 5000: 2,142 TOPS of FP4 with sparsity; RX 9070 XT: 779 TOPS of INT8 with it; GB10: 1,000 of FP4; MI355X: 5,033 of FP8."""
    for name, field, value in [
        ("RTX PRO 5000", "fp4_tflops", 2142 / 2),
        ("RTX PRO 4500", "fp4_tflops", 1617 / 2),
        ("RX 9070 XT", "int8_tops", 779 / 2),
        ("DGX Spark", "fp4_tflops", 1000 / 2),
        ("MI355X", "fp8_tflops", 5033),
        ("AGX Orin 64GB", "int8_tops", 170 / 2),
        ("Arc Pro B60", "int8_tops", 197),
        ("Arc B580", "int8_tops", 437.45 / 2),
        ("RTX 3090", "link_gbs", 4 * 14.0625 * 2),
        ("H100 NVL", "link_gbs", 600),
        ("MI250", "link_gbs", 6 * 50 * 2),
    ]:
        facts = read_gpus(name)[0].facts
        assert abs(getattr(facts, field) - value) <= 0.005 * value, name


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
