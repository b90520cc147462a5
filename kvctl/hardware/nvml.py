"""This machine's NVIDIA GPUs through NVML; the only module that knows pynvml (nvidia-ml-py).

Every call may fail by itself on some driver: what is optional becomes None, what is essential makes the GPU a
row with its reason (`Device.unreadable`), and only NVML itself failing is an error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvctl.hardware.device import Device, Readings, estimated_cuda_bytes
from kvctl.hardware.nvml_errors import NoGpuError, advice, cannot_ask, meaning

_NOT_SUPPORTED = 3
_NOT_FOUND = 6
_MAX_GPUS = 1024
_MAX_LINKS = 36  # NVML_NVLINK_MAX_LINKS
_MAX_SLICES = 64
_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_SM, _MEMORY = 1, 2  # NVML_CLOCK_SM, NVML_CLOCK_MEM
_SENSOR = 0  # NVML_TEMPERATURE_GPU

# nvml.h, nvmlClocksEventReason…; an idle GPU and clocks that somebody set are no slow-down.
_SLOWED = {
    0x04: "power limit",
    0x08: "hardware slow-down",
    0x20: "temperature (driver)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}


class _Memory(NamedTuple):
    total: int
    free: int | None
    used: int | None  # by processes; with the first call of NVML also what the driver keeps
    reserved: int | None  # known from the second call only


class _Gpu(NamedTuple):
    """A GPU's row, what its links lead to, and its place on the PCI bus."""

    device: Device
    slices: tuple[Device, ...]
    bus: str | None
    link_ends: tuple[str, ...]  # bus ids; "switch" for an NVSwitch


def probe() -> tuple[Device, ...]:
    """A row for every GPU, or for every slice of those cut up by MIG."""
    with _session() as nvml:
        count = _must(nvml, nvml.nvmlDeviceGetCount)
        driver = _text(nvml, nvml.nvmlSystemGetDriverVersion)
        cuda = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion)
        version = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None
        gpus = [_gpu(nvml, index) for index in range(min(count, _MAX_GPUS))]
    rows: list[Device] = []
    for gpu in gpus:
        whole = gpu.device.replace(driver=driver, cuda_version=version, peers=_peers(gpu, gpus))
        rows += [piece.replace(driver=driver, cuda_version=version) for piece in gpu.slices] or [whole]
    return tuple(rows)


def readings() -> dict[int, Readings]:
    """Clocks, power and temperature now, by the GPU's index; GPUs that do not answer are left out."""
    found: dict[int, Readings] = {}
    with _session() as nvml:
        for index in range(min(_must(nvml, nvml.nvmlDeviceGetCount), _MAX_GPUS)):
            handle = _ask(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is not None:
                found[index] = _readings(nvml, handle)
    return found


def _readings(nvml: Any, handle: Any) -> Readings:
    def watts(call: Callable[..., Any]) -> float | None:
        milliwatts = _ask(nvml, call, handle)
        return None if milliwatts is None else int(milliwatts) / 1000

    def either(older: str, newer: str, *arguments: int) -> int | None:
        # CUDA 14 drops the older names; neither pynvml nor the driver need know both.
        calls = [getattr(nvml, name) for name in (newer, older) if hasattr(nvml, name)]
        answers = (_ask(nvml, call, handle, *arguments) for call in calls)
        return next((answer for answer in answers if answer is not None), None)

    persistence = _ask(nvml, nvml.nvmlDeviceGetPersistenceMode, handle)
    reasons = either("nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetCurrentClocksEventReasons")
    return Readings(
        sm_mhz=_ask(nvml, nvml.nvmlDeviceGetClockInfo, handle, _SM),
        max_sm_mhz=_ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, _SM),
        memory_mhz=_ask(nvml, nvml.nvmlDeviceGetClockInfo, handle, _MEMORY),
        max_memory_mhz=_ask(nvml, nvml.nvmlDeviceGetMaxClockInfo, handle, _MEMORY),
        power_watts=watts(nvml.nvmlDeviceGetPowerUsage),
        power_limit_watts=watts(nvml.nvmlDeviceGetEnforcedPowerLimit),
        temperature_c=either("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV", _SENSOR),
        persistence=None if persistence is None else persistence == 1,
        slowed_by=tuple(name for bit, name in _SLOWED.items() if (reasons or 0) & bit),
    )


@contextmanager
def own_memory(uuid: str) -> Iterator[Callable[[], int | None]]:
    """A function that reads the bytes this process holds on one GPU; None where they are not told.

    In a container that has its own process numbers the driver's list does not name this process.

    Raises:
        NoGpuError: NVML does not start, or does not find the GPU.

    """
    with _session() as nvml:
        handle = _must(nvml, lambda: nvml.nvmlDeviceGetHandleByUUID(uuid))
        yield lambda: _listed(nvml, handle).get(os.getpid())


@contextmanager
def _session() -> Iterator[Any]:
    try:
        import pynvml
    except ImportError:
        raise NoGpuError("--gpu local: nvidia-ml-py is missing", hint="pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise cannot_ask(error.value) from None
    try:
        yield pynvml
    finally:
        _ask(pynvml, pynvml.nvmlShutdown)


def _must(nvml: Any, call: Callable[..., Any]) -> Any:
    try:
        return call()
    except nvml.NVMLError as error:
        raise cannot_ask(error.value) from None


def _ask(nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """The answer, or None where this driver has none."""
    try:
        return call(*arguments)
    except nvml.NVMLError:
        return None


def _text(nvml: Any, call: Callable[..., Any], *arguments: Any) -> str | None:
    """A printable string; what is not UTF-8 or a control character shows as such."""
    try:
        text = call(*arguments)
    except nvml.NVMLError:
        return None
    except UnicodeDecodeError as error:  # pynvml decodes strictly
        text = error.object.decode("utf-8", errors="replace")
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)[:96]


def _gpu(nvml: Any, index: int) -> _Gpu:
    name = f"GPU {index}"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = _text(nvml, nvml.nvmlDeviceGetName, handle) or name
        return _readable(nvml, handle, index, name)
    except nvml.NVMLError as error:
        return _Gpu(_unreadable(name, index, meaning(error.value), advice(error.value)), (), None, ())


def _unreadable(name: str, index: int, reason: str, hint: str | None) -> Device:
    notes = (f"{name}: {hint}",) if hint else ()
    return Device(name, 0, index=index, unreadable=reason, notes=notes)


def _readable(nvml: Any, handle: Any, index: int, name: str) -> _Gpu:
    """Raises NVMLError where the memory cannot be read."""
    bus = _bus(_ask(nvml, nvml.nvmlDeviceGetPciInfo_v3, handle))
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    links = _links(nvml, handle)
    facts = {
        "index": index,
        "compute_capability": f"{capability[0]}.{capability[1]}" if capability else None,
        "nvlinks": len(links),
        "pcie": _pcie(nvml, handle),
    }
    mode = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if mode and mode[0] == 1:
        slices = tuple(piece.replace(**facts) for piece in _slices(nvml, handle, name, index))
        empty = _unreadable(
            name, index, "MIG is on and no slice is made of it", "nvidia-smi mig -cgi …, or turn MIG off"
        )
        return _Gpu(empty, slices, bus, tuple(links))
    device = _device(nvml, handle, name).replace(uuid=_text(nvml, nvml.nvmlDeviceGetUUID, handle), **facts)
    return _Gpu(device, (), bus, tuple(links))


def _slices(nvml: Any, handle: Any, name: str, index: int) -> Iterator[Device]:
    """The MIG slices, each with its own memory: a process sees one of them, never the whole card."""
    count = _ask(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    for place in range(min(count, _MAX_SLICES)):
        try:
            piece = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
            title = _text(nvml, nvml.nvmlDeviceGetName, piece) or f"{name} MIG {place}"
            uuid = _text(nvml, nvml.nvmlDeviceGetUUID, piece)
            yield _device(nvml, piece, title).replace(mig=True, uuid=uuid)
        except nvml.NVMLError as error:
            if error.value != _NOT_FOUND:  # an empty place
                reason, hint = meaning(error.value), advice(error.value)
                yield _unreadable(f"{name} MIG {place}", index, reason, hint).replace(mig=True)


def _device(nvml: Any, handle: Any, name: str) -> Device:
    memory = _memory(nvml, handle)
    if memory is None:
        return _unified(name)
    processes = _processes(nvml, handle)
    notes: tuple[str, ...] = ()
    if processes and any(size is None for _, size in processes):
        notes = (f"{name}: what each process holds is not told; all that is in use counts as others'",)
    return Device(
        name,
        memory.total,
        free_bytes=memory.free,
        reserved_bytes=memory.reserved,
        used_by_others=_others(memory, processes),
        processes=processes,
        notes=notes,
    )


def _memory(nvml: Any, handle: Any) -> _Memory | None:
    """Totals of the second call, or of the first; None where the GPU has no memory of its own."""
    answer = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2)
    reserved = int(answer.reserved) if answer is not None else None
    if answer is None:
        try:
            answer = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            if error.value == _NOT_SUPPORTED:
                return None
            raise
    total, free, used = int(answer.total), int(answer.free), int(answer.used)
    if total == 0:
        return None
    if reserved is not None and reserved >= total:
        reserved = None
    return _Memory(total, free if free <= total else None, used if used <= total else None, reserved)


def _unified(name: str) -> Device:
    """GB10 and Jetson tell no total of their own: CUDA allocates in the system's memory there."""
    import psutil

    memory = psutil.virtual_memory()
    note = f"{name}: NVML gives no memory total; taken for one that shares the system's memory"
    return Device(name, int(memory.total), free_bytes=int(memory.available), unified=True, notes=(note,))


def _processes(nvml: Any, handle: Any) -> tuple[tuple[int, int | None], ...]:
    """Other processes with a context on the GPU: pid, and bytes where they are told (not in WSL)."""
    return tuple((pid, size) for pid, size in sorted(_listed(nvml, handle).items()) if pid != os.getpid())


def _listed(nvml: Any, handle: Any) -> dict[int, int | None]:
    """Every process with a context on the GPU, this one too."""
    found: dict[int, int | None] = {}
    for kind in ("Compute", "Graphics"):
        for version in ("_v3", "_v2"):
            call = getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses{version}", None)
            listed = None if call is None else _ask(nvml, call, handle)
            if listed is not None:
                break
        for process in listed or ():
            size = process.usedGpuMemory
            known = found.get(process.pid)
            found[process.pid] = known if size is None else max(int(size), known or 0)
    return found


def _others(memory: _Memory, processes: tuple[tuple[int, int | None], ...]) -> int:
    """Bytes that other processes hold, as they say; else all that is in use but for the driver's own part."""
    told = [size for _, size in processes if size is not None]
    if processes and len(told) == len(processes) and sum(told) <= memory.total:
        return sum(told)
    used = memory.used or 0
    if memory.reserved is None:
        used -= memory.total - estimated_cuda_bytes(memory.total)
    return max(used, 0)


def _pcie(nvml: Any, handle: Any) -> str | None:
    """At most: an idle link slows down."""
    generation = _ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    width = _ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    return f"gen {generation} x{width}" if generation and width else None


def _bus(info: Any) -> str | None:
    try:
        return str(info.busId).lower() if info is not None else None
    except UnicodeDecodeError:
        return None


def _links(nvml: Any, handle: Any) -> list[str]:
    """Where each active NVLink leads: another GPU's bus id, "switch", or "" where it is not told."""
    ends = []
    for link in range(_MAX_LINKS):
        state = _ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:  # no such link, and none after it
            break
        if state != 1:
            continue
        if _ask(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == _SWITCH:
            ends.append("switch")
        else:
            ends.append(_bus(_ask(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)) or "")
    return ends


def _peers(gpu: _Gpu, gpus: list[_Gpu]) -> tuple[int, ...]:
    """The GPUs that this one's NVLinks reach, directly or through switches."""
    return tuple(
        other.device.index
        for other in gpus
        if other is not gpu
        and other.device.index is not None
        and (other.bus in gpu.link_ends or ("switch" in gpu.link_ends and "switch" in other.link_ends))
    )
