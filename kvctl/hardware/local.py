"""`--gpu local`: which of this machine's GPUs, and what is known of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kvctl.errors import UsageError
from kvctl.hardware import table
from kvctl.hardware.device import Device
from kvctl.hardware.nvml_errors import NoGpuError

_NAME_IT = "name the GPU instead, as in --gpu H100, MI300X or M3Max:64GB"


def local_gpus(pick: str | None = None) -> tuple[Device, ...]:
    """The GPUs that can be used, those that an application started here would see; `pick` names others ("0,2").

    A GPU that cannot be read is left out and told of in the first one's notes; none left is an error.
    """
    found = list_gpus()
    chosen, told = (_visible(found) if pick is None else (_picked(found, pick), [])) if found else ([], [])
    usable = [device for device in chosen if device.unreadable is None]
    for device in chosen:
        if device.unreadable is not None:
            which = device.name if device.mig else f"GPU {device.index}"
            told.append(f"{which} left out: {device.unreadable}")
            told += device.notes
    if not usable:
        raise NoGpuError(f"--gpu local: {'; '.join(told[:4]) or 'this machine has no NVIDIA GPU'}", hint=_NAME_IT)
    slice_ = next((device for device in usable if device.mig), None)
    if slice_ is not None and len(usable) > 1:
        # "CUDA can only enumerate a single compute instance", and no other GPU beside it (NVIDIA MIG User Guide).
        told.append(f"CUDA gives a process one MIG slice and nothing beside it: {slice_.name} is taken; another is picked as "
                    "in --gpu local:MIG-… (nvidia-smi -L)")  # fmt: skip
        usable = [slice_]
    first, *rest = usable
    return (first.replace(notes=(*told, *first.notes)), *rest)


def list_gpus() -> tuple[Device, ...]:
    """Every GPU of this machine, also those that cannot be read, with the table's facts."""
    from kvctl.hardware.cuda import totals
    from kvctl.hardware.nvml import probe

    found = probe()
    seen = totals() if any(device.unreadable is None for device in found) else {}
    return tuple(_with_facts(device, seen.get(device.uuid or "")) for device in found)


def _with_facts(device: Device, cuda_total: int | None) -> Device:
    facts = None
    if device.unreadable is None:
        facts = table.facts_of(device.name.partition(" MIG ")[0], device.memory_bytes)
    return device.replace(facts=facts, cuda_total_bytes=cuda_total)


def _visible(found: Sequence[Device]) -> tuple[list[Device], list[str]]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order; CUDA ignores what follows a name it does not know."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return list(found), []
    chosen: list[Device] = []
    for word in (word.strip() for word in value.split(",")):
        named = _named(found, word)
        if not named:
            break
        chosen += [device for device in named if device not in chosen]
    told = [f"CUDA_VISIBLE_DEVICES={value[:60]} leaves {len(chosen)} of {len(found)} GPUs"]
    if len({device.name for device in found}) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        told.append(
            "CUDA may number unequal GPUs otherwise than nvidia-smi; CUDA_DEVICE_ORDER=PCI_BUS_ID makes them agree"
        )
    return chosen, told


def _picked(found: Sequence[Device], pick: str) -> list[Device]:
    chosen: list[Device] = []
    for word in (word.strip() for word in pick.split(",")):
        named = _named(found, word)
        if not named:
            numbers = sorted({device.index for device in found if device.index is not None})
            known = ", ".join(str(number) for number in numbers)
            raise UsageError(
                f"--gpu local: no GPU {word[:60]!r} here", hint=f"write local, or local: and some of {known}"
            )
        chosen += [device for device in named if device not in chosen]
    return chosen


def _named(found: Sequence[Device], word: str) -> list[Device]:
    """By number, by UUID or its beginning; a MIG slice also as MIG-GPU-…/1/0 of older drivers."""
    if word.isdecimal() and len(word) < 5:
        return [device for device in found if device.index == int(word)]
    if not word.startswith(("GPU-", "MIG-")) or len(word) < 5:
        return []
    hits = [device for device in found if device.uuid and device.uuid.startswith(word)]
    return hits if len({device.uuid for device in hits}) == 1 else []
