"""The value of --gpu: `H100`, `2xRTX4090`, `H100:80GiB`, `A100-40GB,2xRTX3090`, `local`, `cpu`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from kvctl.errors import UsageError
from kvctl.hardware import table
from kvctl.hardware.device import Device, GpuFacts, usable_by_metal
from kvctl.units import GIB, MIB, format_bytes, parse_bytes

MAX_DEVICES = 4096
_LONGEST_COUNT = 3
"""Digits that are taken for a count before a name that is not known."""
_BEFORE = re.compile(r"([0-9]+)\s*[xX×*]\s*(?=\S)")
_AFTER = re.compile(r"\s*[xX×*]\s*([0-9]{1,4})$")
_SIZED = re.compile(r"(.*\d)\s*g(?:i?b)?(?:\s*(?:hbm|gddr)\d[ex]?)?", re.IGNORECASE)
_WRITE = "write --gpu H100, 2xRTX4090, H100:80GiB, A100-40GB,2xRTX3090, local or cpu"
_LOCAL_PICK = re.compile(r"[0-9]{1,3}|(GPU|MIG)-[0-9A-Za-z/-]+")


class _Item(NamedTuple):
    times: int
    name: str
    memory: str | None
    named_size: bool = False  # the memory was part of the name: "A100-40GB"


def read_gpus(text: str) -> tuple[Device, ...]:
    """The devices that the text names, in its order."""
    devices: list[Device] = []
    for item in _items(text):
        devices += _devices(item)
        if len(devices) > MAX_DEVICES:
            raise UsageError(f"--gpu: more than {MAX_DEVICES:,} GPUs", hint=_WRITE)
    if sum(device.kind == "cpu" for device in devices) > 1:
        raise UsageError("--gpu: cpu is the whole host, and named twice", hint="write cpu, or cpu:64GiB")
    own = [(device.index, device.uuid) for device in devices if device.index is not None]
    if len(set(own)) < len(own):
        raise UsageError("--gpu: a GPU of this machine is named twice", hint="write local, or local:0,1")
    return tuple(devices)


def _items(text: str) -> list[str]:
    """Parts between commas; the numbers after `local:0` belong to it."""
    if len(text) > 2000:
        raise UsageError(f"--gpu: {len(text):,} characters are too long for a list of GPUs", hint=_WRITE)
    items: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if items and items[-1].lower().startswith("local:") and _LOCAL_PICK.fullmatch(part):
            items[-1] += "," + part
        elif part:
            items.append(part)
        else:
            raise UsageError("--gpu: an empty name", hint=_WRITE)
    return items


def _devices(text: str) -> tuple[Device, ...]:
    head, colon, tail = text.partition(":")
    memory = tail.strip() if colon else None
    if head.strip().lower() == "local":
        from kvctl.hardware.local import local_gpus

        return local_gpus(memory)
    item = _item(text, head.strip(), memory)
    if item.name.lower() == "cpu":
        return (_cpu(item),)
    found = table.find(item.name)
    if not found:
        raise _unknown(text, item.name)
    return _cards(item, found)


def _item(text: str, head: str, memory: str | None) -> _Item:
    """Count, name and memory: the first reading whose name is known ("RTX4090" is not four thousand times "RT")."""
    count = 1
    if memory is not None and (after := _AFTER.search(memory)):
        count, memory = _count(after[1], text), memory[: after.start()]
    before, after = _BEFORE.match(head), _AFTER.search(head)
    readings = [(head, "1")]
    if before is not None:
        readings.append((head[before.end() :], before[1]))
    if after is not None:
        readings.append((head[: after.start()], after[1]))
    for name, digits in readings:
        if table.find(name) or name.strip().lower() == "cpu":
            return _Item(count * _count(digits, text), name.strip(), memory)
        if memory is None and (sized := _sized(name)) is not None:
            return _Item(count * _count(digits, text), *sized, named_size=True)
    if memory is None:
        for name, _ in readings:
            _refuse_other_size(name)
    # "7900 xtx" is a name, and no count of "tx".
    counted = before is not None and len(before[1]) <= _LONGEST_COUNT
    return _Item(count, head[before.end() :] if counted and before is not None else head, memory)


def _sized(name: str) -> tuple[str, str] | None:
    """ "A100-40GB", "RTX 3080 (12 GB)", "m2ultra192gb" as a known name and a size that it comes with."""
    for bare, size, found in _splits(name):
        if any(_published(card, int(size) * 10**9) for card in found):
            return bare, size + "GB"
    return None


def _splits(name: str) -> Iterator[tuple[str, str, tuple[GpuFacts, ...]]]:
    """Each known name and digits of gigabytes that the text may be, with the cards so named."""
    match = _SIZED.fullmatch(name.replace("(", " ").replace(")", " ").strip())
    if match is None:
        return
    for digits in (3, 2, 1):
        bare, size = match[1][:-digits].strip(" -_"), match[1][-digits:]
        if size.isascii() and size.isdecimal() and (found := table.find(bare)):
            yield bare, size, found


def _refuse_other_size(name: str) -> None:
    """An error for a known card with a size that it does not come with."""
    for bare, size, found in _splits(name):
        # "A10060GB" is an A100 with 60 GB, and no A10 with 060.
        if not size.startswith("0"):
            sizes = " or ".join(dict.fromkeys(_sizes(card) for card in found))
            raise UsageError(
                f"--gpu: {_short(bare)} comes with {sizes}, not {size} GB",
                hint=f"write {bare}, or {bare}:{size}GB for memory of that size",
            )


def _count(digits: str, text: str) -> int:
    count = int(digits) if len(digits) <= 9 else MAX_DEVICES + 1
    if not 1 <= count <= MAX_DEVICES:
        raise UsageError(f"--gpu: {_short(text)} counts no GPUs that could be", hint=f"from 1 to {MAX_DEVICES:,}")
    return count


def _unknown(text: str, name: str) -> UsageError:
    if not table.key(name):
        return UsageError(f"--gpu: {_short(text)} names no GPU", hint=_WRITE)
    near = table.nearest(name)
    hint = f"nearest: {', '.join(near)}" if near else _WRITE
    return UsageError(f"--gpu: no GPU {_short(name)} in the table", hint=hint)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "…")


def _cpu(item: _Item) -> Device:
    if item.times != 1:
        raise UsageError("--gpu: cpu is the whole host", hint="write cpu, or cpu:64GiB")
    from kvctl.hardware.host import host_device

    if item.memory is None:
        return host_device()
    return Device("CPU", _bytes(item.memory), kind="cpu")


def _bytes(text: str) -> int:
    size = parse_bytes(text, what="--gpu")
    if size < MIB:
        raise UsageError(f"--gpu: {text!r} is too little memory for a GPU", hint="write H100:80GiB")
    return size


def _cards(item: _Item, meant: tuple[GpuFacts, ...]) -> tuple[Device, ...]:
    """The card, in the variant that the memory names, as often as counted."""
    notes: list[str] = []
    size = None if item.memory is None else _bytes(item.memory)
    fitting = tuple(card for card in meant if size is not None and _published(card, size) is not None)
    card = (fitting or meant)[0]
    rivals = (fitting or meant)[1:]
    if rivals:
        others = ", ".join(_titled(other) for other in rivals)
        notes.append(f"{item.name}: took {_titled(card)}; other variants: {others}")
    memory = _memory(card, item, size, notes)
    if card.dies > 1:
        notes.append(f"{card.name}: each of its {card.dies} dies is a device of its own")
    if card.note:
        notes.append(f"{card.name}: {card.note}")
    name = card.nvml_names[0] if card.nvml_names else card.name
    device = Device(name, memory, unified=card.unified, facts=card, notes=tuple(notes))
    return (device, *(device.replace(notes=()),) * (item.times * card.dies - 1))


def _titled(card: GpuFacts) -> str:
    return card.name if re.search(r"\dGB", card.name) else f"{card.name} {card.nominal_gb}GB"


def _memory(card: GpuFacts, item: _Item, size: int | None, notes: list[str]) -> int:
    """Bytes of one device of this card."""
    if size is None:
        memory = card.device_mib * MIB
        if len(card.memory_options_gb) > 1:
            smallest = card.memory_options_gb[0]
            notes.append(
                f"{card.name}: took {card.nominal_gb} GB; comes with {_sizes(card)} (write {item.name}:{smallest}GB)"
            )
        elif card.memory_mib is None:
            notes.append(f"{card.name}: {card.nominal_gb} GB as the maker says, estimated as GiB")
    else:
        published = _published(card, size)
        memory = size if published is None else published
        if published is None:
            notes.append(f"{card.name}: {format_bytes(size)} as written; the card comes with {_sizes(card)}")
        elif published != size and not item.named_size:
            notes.append(f"{card.name}: {item.memory} read as the card's {published // MIB:,} MiB")
    if card.metal:
        notes.append(
            f"{card.name}: about {format_bytes(usable_by_metal(memory))} of its memory is for the GPU, estimated"
        )
    return memory


def _sizes(card: GpuFacts) -> str:
    options = card.memory_options_gb or (card.nominal_gb // card.dies,)
    return " or ".join(f"{option} GB" for option in options)


def _published(card: GpuFacts, size: int) -> int | None:
    """The exact bytes of the published variant that a rounded size means ("80GB" and "80GiB": 81,559 MiB)."""
    for option in card.memory_options_gb:
        if size in (option * GIB, option * 10**9):
            return option * GIB
    exact = card.device_mib * MIB
    # Of a card with two dies people name the memory of both, or of one.
    named = {card.nominal_gb, card.nominal_gb // card.dies}
    sizes = {gigabytes * unit for gigabytes in named for unit in (GIB, 10**9)}
    return exact if size in {*sizes, round(exact / 10**9) * 10**9, exact} else None
