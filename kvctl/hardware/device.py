"""The records of a device and of a GPU's published facts."""

from __future__ import annotations

from kvctl.record import Record
from kvctl.units import GIB, MIB

# What Metal lets one process hold (recommendedMaxWorkingSetSize): about 2/3 of the memory up to 32 GB, 3/4 above.
_METAL_SMALL_BYTES = 32 * GIB


class GpuFacts(Record):
    """One row of the table; rates are dense, 10^12 a second, and None is "not sourced".

    Memory and rates are the card's: of one with several dies each is a device with its part of them.
    """

    name: str
    vendor: str
    nvml_names: tuple[str, ...]
    aliases: tuple[str, ...]
    memory_mib: int | None  # as nvidia-smi prints it
    nominal_gb: int  # as the maker names it
    bandwidth_gbs: float | None  # GB/s, 10^9
    fp16_tflops: float | None
    fp8_tflops: float | None
    int8_tops: float | None
    fp4_tflops: float | None
    fp32_tflops: float | None
    shader_tflops: float | None  # of chips without published tensor rates
    compute_capability: str | None
    link_gbs: float | None  # NVLink or its like, both directions summed; 0 is none
    unified: bool
    metal: bool
    memory_options_gb: tuple[int, ...]
    dies: int  # devices that one card shows
    cuda_sightings: tuple[tuple[int, str], ...]  # MiB in all that applications printed on Linux, ascending; where
    sources: tuple[tuple[str, str], ...]  # field → where it comes from
    note: str | None
    per_node: int | None = (
        None  # how many one machine has at most, where it is sold as part of a machine; None elsewhere
    )

    @property
    def cuda_capability(self) -> float | None:
        """The compute capability as a number; None for other makers' names of theirs (gfx942), and where it is not known."""
        try:
            return float(self.compute_capability or "")
        except ValueError:
            return None

    @property
    def device_mib(self) -> int:
        """MiB of one device; what the maker calls GB are binary where no tool's figure is known."""
        return (self.memory_mib or self.nominal_gb * 1024) // self.dies

    @property
    def cuda_mib(self) -> int | None:
        """The middle of the sightings: drivers differ by some tens of MiB."""
        seen = self.cuda_sightings
        return seen[(len(seen) - 1) // 2][0] if seen else None


class Device(Record):
    """One GPU, MIG slice or host memory that a rank may run on; bytes."""

    name: str
    memory_bytes: int  # all of it, as NVML reports it, or as the user wrote it
    kind: str = "gpu"  # "gpu" or "cpu"
    free_bytes: int | None = None  # measured
    used_by_others: int = 0  # what other processes hold, as far as they say
    reserved_bytes: int | None = None  # what driver and firmware keep (NVML's second memory call)
    cuda_total_bytes: int | None = None  # total memory that the CUDA driver itself gives for this device
    unified: bool = False  # shares the system's memory
    mig: bool = False
    index: int | None = None
    uuid: str | None = None
    processes: tuple[tuple[int, int | None], ...] = ()  # other processes: pid, bytes (None: not told)
    peers: tuple[int, ...] = ()  # indices of the GPUs joined by NVLink
    nvlinks: int | None = None  # active links
    pcie: str | None = None  # "gen 5 x16"
    compute_capability: str | None = None
    driver: str | None = None
    cuda_version: str | None = None
    unreadable: str | None = None  # why nothing can be said of it
    facts: GpuFacts | None = None  # of the whole card, also for a MIG slice
    notes: tuple[str, ...] = ()  # what to tell the person

    @property
    def cuda_bytes(self) -> int:
        """Total memory as applications see it: vLLM and torch take their share of this, not of NVML's total."""
        return self._cuda()[0]

    @property
    def available_bytes(self) -> int:
        """What an application can still have of `cuda_bytes`: all of it, where nobody measured what is free."""
        return self.cuda_bytes if self.free_bytes is None else min(self.free_bytes, self.cuda_bytes)

    @property
    def cuda_estimated(self) -> bool:
        """Whether `cuda_bytes` comes from a rule rather than from a measurement of this or such a card."""
        return self._cuda()[1]

    def _cuda(self) -> tuple[int, bool]:
        facts = self.facts
        if self.cuda_total_bytes is not None:
            return self.cuda_total_bytes, False
        # Applications see all of a MIG slice: NVML and torch both say 4,864 MiB of an A100's 1g.5gb.
        if self.kind == "cpu" or self.mig:
            return self.memory_bytes, False
        if facts is not None and facts.metal:
            return usable_by_metal(self.memory_bytes), True
        # Public listings of H100s show 454 MiB reserved, and deviceQuery 81,106 of 81,559 MiB.
        if self.reserved_bytes is not None and not self.unified:
            return self.memory_bytes - self.reserved_bytes, False
        if facts is not None and facts.cuda_mib and self.memory_bytes == facts.device_mib * MIB:
            return facts.cuda_mib * MIB, False
        if self.unified and self.index is None and facts is not None and facts.cuda_mib:
            # Another size of a Jetson: what firmware and kernel keep of it grows with the size.
            return self.memory_bytes * facts.cuda_mib // facts.device_mib, True
        if self.unified or (facts is not None and facts.vendor != "NVIDIA"):
            return self.memory_bytes, True
        return estimated_cuda_bytes(self.memory_bytes), True


class Readings(Record):
    """What a GPU's sensors say now; None where the driver does not tell."""

    sm_mhz: int | None = None
    max_sm_mhz: int | None = None
    memory_mhz: int | None = None
    max_memory_mhz: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None  # the one in force
    temperature_c: int | None = None
    persistence: bool | None = None  # whether the driver stays loaded between processes
    slowed_by: tuple[str, ...] = ()  # what holds the clocks down at this moment


def usable_by_metal(memory_bytes: int) -> int:
    """What one process may hold of a Mac's memory; an estimate."""
    return memory_bytes * 2 // 3 if memory_bytes <= _METAL_SMALL_BYTES else memory_bytes * 3 // 4


def estimated_cuda_bytes(memory_bytes: int) -> int:
    """What applications see of NVML's total: all but 384 MiB and a four-hundredth.

    Fitted on the 38 cards of the table whose both totals are known: 109 MiB off on average, 474 at most.
    """
    return max(memory_bytes - 384 * MIB - memory_bytes // 400, 0)
