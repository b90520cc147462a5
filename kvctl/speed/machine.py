"""What a GPU and its links can do at most: bytes and operations a second, by format of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.record import Record
from kvctl.weight_formats import GGUF_BITS

if TYPE_CHECKING:
    from kvctl.hardware.device import GpuFacts

NETWORK_GBS = 50.0
"""GB/s of one GPU to another node, one way: a 400 Gbit/s adapter for each GPU, as servers with eight of them have it. Assumed."""
PCIE_GBS = {"": 32.0, "8": 32.0, "9": 64.0, "10": 64.0, "12": 64.0}
"""GB/s of sixteen PCIe lanes, one way: generation 4 up to Ada, 5 from Hopper on (PCI-SIG, rounded)."""


class Format(Record):
    """How weights of a format are stored and multiplied."""

    name: str
    bits: float
    """A weight of a layer, scales included."""
    rate: str
    """Which rate of a GPU multiplies it, where it has that: fp16, fp8, fp4, int8, or half (16 bits that are summed in 16 bits, which
    GeForce cards do twice as fast as summed in 32: half the rate of int8)."""
    kind: str
    """What it shares kernels with: 16, fp8, fp4, int8, int4, gguf."""
    whole: bool = False
    """Whether the output's projection is stored so, too."""


# Bits with their scales: kvctl.weight_formats says how each is stored.
FORMATS = (
    Format("bf16", 16, "fp16", "16"),
    Format("fp16", 16, "fp16", "16"),
    Format("fp32", 32, "fp16", "16"),
    Format("fp8", 8, "fp8", "fp8"),
    Format("fp8-block", 8 + 32 / 16384, "fp8", "fp8"),
    Format("fp8-channel", 8, "fp8", "fp8"),
    Format("w8a8", 8, "int8", "int8"),
    Format("int8", 8, "int8", "int8"),
    Format("gptq-int8", 8 + 24 / 128, "fp16", "int4"),
    Format("nf4", 4.5, "fp16", "bnb"),
    Format("nf4-dq", 4 + 8 / 64 + 32 / 16384, "fp16", "bnb"),
    Format("fp4", 4.5, "fp16", "bnb"),
    Format("awq", 4 + 20 / 128, "fp16", "int4"),
    Format("gptq", 4 + 20 / 128, "fp16", "int4"),
    Format("w4a16", 4 + 16 / 128, "fp16", "int4"),
    Format("mxfp4", 4.25, "fp8", "mxfp4"),
    Format("nvfp4", 4.5, "fp4", "fp4"),
    # llama.cpp multiplies blocks as integers, and 16 bits with sums in 16 bits.
    *(Format(name, bits, "int8", "gguf", whole=True) for name, bits in GGUF_BITS.items()),
    Format("f16", 16, "half", "gguf16", whole=True),
    Format("mlx-4bit", 4.5, "fp16", "mlx", whole=True),
    Format("mlx-mxfp4", 4.25, "fp16", "mlx", whole=True),
)
_BY_NAME = {fmt.name: fmt for fmt in FORMATS}


def format_of(name: str) -> Format | None:
    """A format by kvctl's name for it; "exl2-3.5" is ExLlamaV2's, and "gguf-4.85" a GGUF file's, of so many bits a weight."""
    if name.startswith("gguf-"):
        bits = float(name.removeprefix("gguf-"))
        rate, kind = ("half", "gguf16") if bits > 12 else ("int8", "gguf")
        return Format(name, bits, rate, kind, whole=True)
    if name.startswith("exl2-"):
        return Format(name, float(name.removeprefix("exl2-")), "fp16", "exl2", whole=True)
    return _BY_NAME.get(name)


class Peaks(Record):
    """One device, at most."""

    bandwidth: float
    """Bytes a second."""
    flops: float
    """Operations a second with the weights' rate."""
    flops16: float
    """Those with 16 bits: attention's."""
    link: float
    """Bytes a second to its peers in a node, one way; 0 where nothing is known of it."""
    wired: str
    """nvlink, pcie, fabric (of another maker), or none."""
    native: bool
    """Whether it multiplies the format itself, and does not unpack it to 16 bits first."""


def peaks(facts: GpuFacts, fmt: Format) -> Peaks | None:
    """Of a card of the table; None where its bandwidth or its rates are not known."""
    dense = facts.fp16_tflops or facts.shader_tflops or facts.fp32_tflops
    if facts.bandwidth_gbs is None or dense is None:
        return None
    halves = facts.int8_tops / 2 if facts.int8_tops else None
    own = {"fp8": facts.fp8_tflops, "fp4": facts.fp4_tflops, "int8": facts.int8_tops, "half": halves}.get(fmt.rate)
    if own is not None and fmt.rate in ("int8", "half"):
        own = max(own, dense)  # B300 has kept few integer units
    link, wired = _link(facts)
    dies = facts.dies
    return Peaks(facts.bandwidth_gbs * 1e9 / dies, (own or dense) * 1e12 / dies, dense * 1e12 / dies, link, wired,
                 fmt.rate == "fp16" or own is not None)  # fmt: skip


def _link(facts: GpuFacts) -> tuple[float, str]:
    if facts.link_gbs:
        return facts.link_gbs * 1e9 / 2, "nvlink" if facts.vendor == "NVIDIA" else "fabric"
    if facts.unified:
        return 0.0, "none"
    capability = (facts.compute_capability or "").partition(".")[0]
    return PCIE_GBS.get(capability if facts.vendor == "NVIDIA" else "", 32.0) * 1e9, "pcie"


def family(facts: GpuFacts) -> str:
    """Cards that behave alike: by compute capability, or by maker."""
    if facts.vendor != "NVIDIA":
        return facts.vendor.lower()
    return {"8.0": "ampere", "8.6": "rtx ampere", "8.9": "ada", "9.0": "hopper", "10.0": "blackwell", "10.3": "blackwell",
            "12.0": "rtx blackwell", "12.1": "rtx blackwell"}.get(facts.compute_capability or "", "older")  # fmt: skip
