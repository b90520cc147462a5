"""What NVML's return codes mean to a person (nvml.h, nvmlReturn_t)."""

from __future__ import annotations

from kvctl.errors import KvctlError

_RESET = "nvidia-smi --gpu-reset, or reboot"
_LOG = "the kernel's log may say more: dmesg | grep -i nvrm"
_NEWER = "install a newer driver"

# code: what, and what to do about it.
_MEANINGS: dict[int, tuple[str, str | None]] = {
    1: ("NVML was not started", None),
    2: ("NVML takes the question for invalid", None),
    3: ("the driver does not tell (not supported)", None),
    4: ("no permission to read it", "run as a user who may use the GPU; in a container, pass the GPU to it"),
    5: ("NVML was started twice", None),
    6: ("NVML does not find it", None),
    7: ("NVML's answer did not fit", None),
    8: ("the GPU lacks power: a power cable is not attached", None),
    9: ("NVIDIA's driver is not loaded", "load it (modprobe nvidia), or reboot"),
    10: ("the GPU did not answer in time", _LOG),
    11: ("the kernel has trouble with the GPU's interrupts", _LOG),
    12: ("NVIDIA's driver is not installed (no libnvidia-ml.so.1)", "name the GPU instead, as in --gpu H100"),
    13: ("the driver is too old for the question", _NEWER),
    14: ("the GPU's info ROM is corrupted", "the card may need repair"),
    15: ("the GPU is lost: it has fallen off the bus", "reboot; " + _LOG),
    16: ("the GPU must be reset before it can be used", _RESET),
    17: ("the operating system blocks the question", None),
    18: (
        "NVIDIA's driver and its library are of different versions",
        "reboot, or reload the driver (an update was installed while it ran)",
    ),
    19: ("the GPU is in use by something that keeps it to itself", None),
    20: ("NVML is out of memory", None),
    21: ("NVML has no data", None),
    22: ("not on a virtual GPU with ECC", None),
    23: ("the GPU's own resources are exhausted", None),
    24: ("no such clock", None),
    25: ("the driver and NVML's Python package differ in version", _NEWER),
    26: ("the driver no longer answers the question", "update nvidia-ml-py: pip install -U nvidia-ml-py"),
    27: ("the GPU is not ready yet", "try again in a moment"),
    28: ("NVML finds no GPU", None),
    29: ("the GPU is in a state that does not allow it", _RESET),
    30: ("no such kind of reset", None),
    999: ("the driver reports an unknown error", "reboot; " + _LOG),
}


def meaning(code: int) -> str:
    """One clause: "the GPU is lost: it has fallen off the bus"."""
    known = _MEANINGS.get(code)
    return known[0] if known else f"NVML reports error {code}"


def advice(code: int) -> str | None:
    """What to do about it, if there is anything."""
    known = _MEANINGS.get(code)
    return known[1] if known else _LOG


class NoGpuError(KvctlError):
    """This machine's GPUs cannot be asked, or there are none."""


def cannot_ask(code: int) -> NoGpuError:
    """The error for a whole machine whose NVML does not start."""
    return NoGpuError(f"--gpu local: {meaning(code)}", hint=advice(code))
