"""This machine: its GPUs and who holds their memory, its processor, its memory, and how fast they were measured to be."""

from __future__ import annotations

import os
from typing import Any

from kvctl.errors import KvctlError
from kvctl.hardware.cpu import Cpu, read_cpu
from kvctl.hardware.device import Device, Readings
from kvctl.hardware.nvml_errors import NoGpuError
from kvctl.measure.rates import Rates, import_torch, measure_rates
from kvctl.record import Record

_GB = 10**9
_TERA = 10**12


class Holder(Record):
    """Another process on a GPU; None is "not told"."""

    pid: int
    bytes: int | None
    name: str | None
    user: str | None


class Gpu(Record):
    """One GPU or MIG slice; `device.unreadable` says why nothing is known of it."""

    device: Device
    readings: Readings | None
    holders: tuple[Holder, ...]

    def to_dict(self) -> dict[str, Any]:
        device = self.device
        facts = device.facts
        return {
            "name": device.name,
            "index": device.index,
            "uuid": device.uuid,
            "mig": device.mig,
            "unreadable": device.unreadable,
            "memory_bytes": device.memory_bytes,
            "usable_bytes": device.cuda_bytes,
            "usable_estimated": device.cuda_estimated,
            "free_bytes": device.free_bytes,
            "used_by_others_bytes": device.used_by_others,
            "holders": [_fields(holder) for holder in self.holders],
            "compute_capability": device.compute_capability,
            "pcie": device.pcie,
            "nvlinks": device.nvlinks,
            "nvlink_peers": list(device.peers),
            "driver": device.driver,
            "cuda_version": device.cuda_version,
            "card": facts.name if facts else None,
            "published_bandwidth_gbs": facts.bandwidth_gbs if facts else None,
            "published_fp16_tflops": facts.fp16_tflops if facts else None,
            "readings": _fields(self.readings) if self.readings else None,
            "notes": list(device.notes),
        }


class Memory(Record):
    """Bytes of the host's memory."""

    total_bytes: int
    available_bytes: int
    """What could be taken without swapping; also within the cgroup's limit."""
    swap_total_bytes: int
    swap_free_bytes: int
    limit_bytes: int | None
    """Of this process's cgroups, the smallest; None without one."""
    limit_name: str | None
    limit_used_bytes: int | None
    """What is used under it, without the file cache that the kernel gives back."""


class Machine(Record):
    """What was found; `rates` is what was measured."""

    cpu: Cpu
    memory: Memory
    gpus: tuple[Gpu, ...]
    no_gpu: str | None
    """Why there are none, in words."""
    load: tuple[float, float, float] | None
    """Mean number of running processes over 1, 5 and 15 minutes."""
    rates: tuple[Rates, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "cpu": _fields(self.cpu) | {"usable_cores": self.cpu.usable_cores},
            "memory": _fields(self.memory),
            "gpus": [gpu.to_dict() for gpu in self.gpus],
            "no_gpu": self.no_gpu,
            "load_average": list(self.load) if self.load else None,
            "rates": [rates.to_dict() for rates in self.rates],
        }


def look() -> Machine:
    """Everything that can be read in a moment; nothing is measured. A machine without GPUs is none the worse."""
    gpus, why = _gpus()
    try:
        load = os.getloadavg()
    except (AttributeError, OSError):  # Windows has none
        load = None
    return Machine(read_cpu(), _memory(), gpus, why, load)


def with_rates(machine: Machine, budget_s: float = 1.0) -> Machine:
    """The machine with what its CPU and, where torch can use them, its GPUs were measured to do.

    A GPU that cannot be measured has its reason in the notes of its rates.
    """
    found = [measure_rates("cpu", budget_s)]
    torch = import_torch()
    if torch is not None:
        for device in _torch_devices(torch):
            try:
                rates = measure_rates(device, budget_s)
            except KvctlError as error:
                rates = Rates(device, notes=(error.message,))
            found.append(published(rates, gpu_of(device, machine.gpus)))
    return machine.replace(rates=tuple(found))


def published(rates: Rates, gpu: Gpu | None) -> Rates:
    """The rates with the maker's figures beside them, as far as the bundled table has them.

    A slice of a card (MIG) has only a part of what is published, and gets none.
    """
    facts = gpu.device.facts if gpu else None
    if gpu is None or facts is None or gpu.device.mig:
        return rates
    bandwidth, flops = facts.bandwidth_gbs, facts.fp16_tflops
    return rates.replace(
        published_bandwidth=None if bandwidth is None else bandwidth * _GB / facts.dies,
        published_flops=None if flops is None else flops * _TERA / facts.dies,
    )


def gpu_of(device: str, gpus: tuple[Gpu, ...]) -> Gpu | None:
    """The GPU that torch calls "cuda" or "cuda:N", by its UUID; None where that cannot be told.

    torch counts only what CUDA_VISIBLE_DEVICES leaves, in CUDA's own order, so that its number says little.
    """
    torch = import_torch() if device.startswith("cuda") else None
    if torch is None or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.device(device))
    uuid = str(getattr(properties, "uuid", "")).lower()
    found = [gpu for gpu in gpus if uuid and (gpu.device.uuid or "").lower().endswith(uuid)]
    return found[0] if len(found) == 1 else None


def _torch_devices(torch: Any) -> list[str]:
    if torch.cuda.is_available():
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    mps = getattr(torch.backends, "mps", None)
    return ["mps"] if mps is not None and mps.is_available() else []


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    from kvctl.hardware.local import list_gpus
    from kvctl.hardware.nvml import readings

    try:
        devices = list_gpus()
    except NoGpuError as error:
        return (), error.message.removeprefix("--gpu local: ")
    try:
        sensors = readings() if devices else {}
    except NoGpuError:  # it answered a moment ago
        sensors = {}
    found = [
        Gpu(
            device,
            None if device.unreadable or device.index is None else sensors.get(device.index),
            tuple(_holder(pid, size) for pid, size in device.processes),
        )
        for device in devices
    ]
    return tuple(found), None if found else "this machine has no NVIDIA GPU"


def _holder(pid: int, size: int | None) -> Holder:
    """A process of another container, or one that has just ended, has no name here."""
    import psutil

    name = user = None
    try:
        process = psutil.Process(pid)
        name = _printable(process.name())
        user = _printable(process.username())
    except (psutil.Error, OSError, KeyError, ValueError):
        pass
    return Holder(pid, size, name, user)


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)[:64]


def _memory() -> Memory:
    import psutil

    from kvctl.hardware.host import CGROUPS, OWN_GROUPS, cgroup_limits, host_device

    memory = psutil.virtual_memory()
    try:
        swap = psutil.swap_memory()
        swap_total, swap_free = int(swap.total), int(swap.free)
    except (OSError, RuntimeError, ValueError):  # a container may hide it
        swap_total = swap_free = 0
    tightest = min(cgroup_limits(CGROUPS, OWN_GROUPS), key=lambda bound: bound.limit, default=None)
    if tightest is not None and tightest.limit >= memory.total:
        tightest = None
    return Memory(
        total_bytes=int(memory.total),
        available_bytes=int(host_device().available_bytes),
        swap_total_bytes=swap_total,
        swap_free_bytes=swap_free,
        limit_bytes=tightest.limit if tightest else None,
        limit_name=tightest.where if tightest else None,
        limit_used_bytes=tightest.used if tightest else None,
    )


def _fields(record: Record) -> dict[str, Any]:
    """A flat record as JSON has it."""
    values = {name: getattr(record, name) for name in record._fields}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
