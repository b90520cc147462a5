"""This machine's memory, and the part of it that a container's limits leave."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvctl.hardware.device import Device
from kvctl.units import format_bytes

# cgroup v1 writes "no limit" as the largest multiple of a page; nothing near it is a limit.
_NO_LIMIT = 2**60
CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


class Limit(NamedTuple):
    """One limit of a group, and what is used under it."""

    limit: int
    used: int | None
    where: str


class _Group(NamedTuple):
    """A group's folder and the files that its version of cgroups has there."""

    folder: Path
    limits: tuple[str, ...]
    used: str


def host_device() -> Device:
    """The host's RAM; a container's limit counts where it is smaller. Swap is not memory to plan with."""
    import psutil

    memory = psutil.virtual_memory()
    total, free = int(memory.total), int(memory.available)
    notes: tuple[str, ...] = ()
    for bound in cgroup_limits(CGROUPS, OWN_GROUPS):
        if bound.used is not None:
            free = min(free, max(bound.limit - bound.used, 0))
        if bound.limit < total:
            total = bound.limit
            notes = (f"CPU: {bound.where} limits memory to {format_bytes(bound.limit)}",)
    return Device("CPU", total, kind="cpu", free_bytes=min(free, total), notes=notes)


def cgroup_limits(root: Path, own: Path) -> list[Limit]:
    """Limits of this process's groups and of all above them, of either version of cgroups."""
    return [
        Limit(limit, _usage(group), name)
        for group in _groups(root, own)
        for name in group.limits
        if (limit := _number(group.folder / name)) is not None and 0 < limit < _NO_LIMIT
    ]


def _groups(root: Path, own: Path) -> list[_Group]:
    """Those of this process, and their parents."""
    files = {
        1: (("memory.limit_in_bytes",), "memory.usage_in_bytes"),
        2: (("memory.max", "memory.high"), "memory.current"),
    }
    return [_Group(folder, *files[version]) for folder, version in group_folders(root, own, "memory")]


def group_folders(root: Path, own: Path, controller: str) -> list[tuple[Path, int]]:
    """Folders of this process's groups and of all above them that may limit by a controller, with cgroups' version."""
    try:
        lines = own.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found: dict[Path, int] = {}
    for line in lines[:64]:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if (number, controllers) == ("0", ""):
            top, version = root, 2
        elif controller in controllers.split(","):
            top, version = root / controller, 1
        else:
            continue
        # In a container the path may be the host's; its own root is mounted at the top, which is always looked into.
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts), -1, -1):
            found[top.joinpath(*parts[:depth])] = version
    return list(found.items())


def _number(file: Path) -> int | None:
    """A count of bytes; "max" and what cannot be read are no number."""
    try:
        text = file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 25 else None


def _usage(group: _Group) -> int | None:
    """What the group uses, without the file cache that the kernel gives back when asked."""
    used = _number(group.folder / group.used)
    if used is None:
        return None
    try:
        lines = (group.folder / "memory.stat").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    stat = dict(line.split(" ", 1) for line in lines if " " in line)
    for key in ("total_inactive_file", "inactive_file"):
        if stat.get(key, "").isdecimal():
            return max(used - int(stat[key]), 0)
    return used
