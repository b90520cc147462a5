"""This machine's processor: what it is, and how much of it this process may use.

Every fact may be missing (macOS has no /proc, a virtual machine no frequencies) and is None then.
"""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from pathlib import Path

from kvctl.hardware.host import CGROUPS, OWN_GROUPS, group_folders
from kvctl.record import Record

_CPUINFO = Path("/proc/cpuinfo")
_CPUS = Path("/sys/devices/system/cpu")

# What makes a difference to matrix products, under the names of Linux' /proc/cpuinfo; asimd is NEON of 64-bit ARM.
_X86 = ("avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile",
        "amx_int8", "amx_bf16", "amx_fp16")  # fmt: skip
_ARM = ("neon", "asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2", "sme", "sme2")
_OTHER = ("rvv", "vsx", "altivec", "mma", "vx", "vxe")
_KNOWN = (*_X86, *_ARM, *_OTHER)
_APPLE = {"asimd": "AdvSIMD", "asimddp": "FEAT_DotProd", "asimdhp": "FEAT_FP16", "i8mm": "FEAT_I8MM", "bf16": "FEAT_BF16",
          "sme": "FEAT_SME", "sme2": "FEAT_SME2"}  # fmt: skip

# ARM's cores have numbers instead of names (Main ID Register, "primary part number" in each core's manual).
_ARM_PARTS = {
    ("0x41", "0xd08"): "ARM Cortex-A72",
    ("0x41", "0xd0b"): "ARM Cortex-A76",
    ("0x41", "0xd0c"): "ARM Neoverse-N1",
    ("0x41", "0xd40"): "ARM Neoverse-V1",
    ("0x41", "0xd49"): "ARM Neoverse-N2",
    ("0x41", "0xd4f"): "ARM Neoverse-V2",
}


class Cpu(Record):
    """One machine's processor."""

    model: str | None
    architecture: str
    physical_cores: int | None
    logical_cores: int | None
    allowed_cores: int | None
    """Logical cores that this process's affinity leaves (taskset, cpuset)."""
    quota_cores: float | None
    """Processor time a second that a cgroup allows; None without a limit."""
    instruction_sets: tuple[str, ...]
    """Of those that matter to matrix products."""
    last_cache_bytes: int | None
    """All last-level caches together."""
    mhz: float | None
    max_mhz: float | None
    governor: str | None

    @property
    def usable_cores(self) -> int:
        """Threads that can run at once here; at least 1."""
        cores = self.allowed_cores or self.logical_cores or 1
        return max(1, cores if self.quota_cores is None else min(cores, math.ceil(self.quota_cores)))


def read_cpu() -> Cpu:
    """What can be read of this machine's processor."""
    import psutil

    info = cpuinfo(_CPUINFO)
    now, most = _frequencies()
    return Cpu(
        model=_model(info),
        architecture=platform.machine(),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count(),
        allowed_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        quota_cores=quota(CGROUPS, OWN_GROUPS),
        instruction_sets=_instruction_sets(info),
        last_cache_bytes=last_cache(_CPUS) or _number_of_mac("hw.l3cachesize") or _number_of_mac("hw.l2cachesize"),
        mhz=now,
        max_mhz=most,
        governor=_line(_CPUS / "cpu0/cpufreq/scaling_governor"),
    )


def quota(root: Path, own: Path) -> float | None:
    """Cores' worth of time that the tightest of this process's groups leaves; None without a limit."""
    found = []
    for folder, version in group_folders(root, own, "cpu"):
        if version == 2:
            words = (_line(folder / "cpu.max") or "").split()
        else:
            words = [_line(folder / name) or "" for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        # "max" and -1 are no limit.
        if len(words) == 2 and all(re.fullmatch(r"[0-9]{1,15}", word) for word in words) and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return min((value for value in found if value > 0), default=None)


def cpuinfo(file: Path) -> dict[str, str]:
    """The first processor's lines; names in lower case."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.strip().partition("\n\n")[0].splitlines())
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def last_cache(cpus: Path) -> int | None:
    """Bytes of the caches of the highest level, each once however many cores share it."""
    levels: dict[int, dict[str, int]] = {}
    for folder in cpus.glob("cpu[0-9]*/cache/index[0-9]*"):
        level, size, shared = (_line(folder / name) or "" for name in ("level", "size", "shared_cpu_list"))
        match = re.fullmatch(r"(\d{1,9})([KMG]?)", size)
        if match and level.isdecimal() and _line(folder / "type") in ("Data", "Unified"):
            scale = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[match[2]]
            levels.setdefault(int(level), {})[shared] = int(match[1]) * scale
    return sum(levels[max(levels)].values()) if levels else None


def _model(info: dict[str, str]) -> str | None:
    """As the maker names it; ARM's cores by their numbers."""
    if sys.platform == "darwin":
        return _text_of_mac("machdep.cpu.brand_string")
    part = (info.get("cpu implementer", ""), info.get("cpu part", ""))
    named = info.get("model name") or info.get("cpu") or _ARM_PARTS.get(part)
    if not named and all(part):
        named = f"ARM implementer {part[0]}, part {part[1]}"
    return named or platform.processor() or None


def _instruction_sets(info: dict[str, str]) -> tuple[str, ...]:
    if sys.platform == "darwin":
        arm = [name for name, feature in _APPLE.items() if _number_of_mac(f"hw.optional.arm.{feature}") == 1]
        x86 = [name for name in _X86 if _number_of_mac(f"hw.optional.{name.replace('_', '')}") == 1]
        return (*x86, *arm)
    flags = set((info.get("flags") or info.get("features") or "").split())
    return tuple(name for name in _KNOWN if name in flags)


def _frequencies() -> tuple[float | None, float | None]:
    """MHz now and at most; psutil fails in its own ways where there is nothing to read."""
    import psutil

    try:
        read = psutil.cpu_freq()
    except (AttributeError, NotImplementedError, OSError, RuntimeError, ValueError):
        return None, None
    return (read.current or None, read.max or None) if read else (None, None)


def _line(file: Path) -> str | None:
    try:
        with open(file, encoding="ascii", errors="replace") as opened:
            return opened.read(4096).strip()
    except OSError:
        return None


def _of_mac(name: str) -> bytes:
    """What sysctlbyname(3) answers; nothing on other systems."""
    if sys.platform != "darwin":
        return b""
    import ctypes

    size, buffer = ctypes.c_size_t(256), ctypes.create_string_buffer(256)
    code = ctypes.CDLL(None).sysctlbyname(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0))
    return buffer.raw[: size.value] if code == 0 else b""


def _text_of_mac(name: str) -> str | None:
    return _of_mac(name).rstrip(b"\0").decode("utf-8", errors="replace") or None


def _number_of_mac(name: str) -> int | None:
    raw = _of_mac(name)
    return int.from_bytes(raw, sys.byteorder, signed=True) if len(raw) in (4, 8) else None
