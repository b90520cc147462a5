"""Where a measurement was made: what another person needs to judge it, and nothing that names the person or the machine."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from kvctl import __version__
from kvctl.measure.machine import Gpu, Machine, gpu_of, look

_PACKAGES = ("torch", "transformers", "accelerate", "gguf", "numpy", "safetensors", "tokenizers")


def environment(device: str | None = None, machine: Machine | None = None) -> dict[str, Any]:
    """Versions, processor, memory and GPUs (of `device` "cuda:N" that one), as JSON has them.

    Versions are those of installed packages, which are not imported. `machine` is what `look` found, to look only once.
    """
    machine = machine or look()
    cpu, memory = machine.cpu, machine.memory
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "kvctl": __version__,
        "python": platform.python_version(),
        "python_implementation": platform.python_implementation(),
        "os": _system(),
        "kernel": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "libc": " ".join(part for part in platform.libc_ver() if part) or None,
        "container": container(),
        "packages": {name: found for name in _PACKAGES if (found := _installed(name)) is not None},
        "torch": _torch_build(),
        "device": device,
        "gpus": [_gpu(gpu) for gpu in _used(device, machine)],
        "cpu": {
            "model": cpu.model,
            "physical_cores": cpu.physical_cores,
            "logical_cores": cpu.logical_cores,
            "usable_cores": cpu.usable_cores,
            "quota_cores": cpu.quota_cores,
            "instruction_sets": list(cpu.instruction_sets),
            "mhz": cpu.mhz,
            "governor": cpu.governor,
        },
        "memory_bytes": memory.total_bytes,
        "available_bytes": memory.available_bytes,
        "limit_bytes": memory.limit_bytes,
        "load_average": list(machine.load) if machine.load else None,
    }


def container(root: Path = Path("/")) -> str | None:
    """Which kind of container this process is in, as far as that leaves marks; None is "none seen"."""
    for mark, name in ((".dockerenv", "docker"), ("run/.containerenv", "podman"), (".singularity.d", "apptainer")):
        if (root / mark).exists():
            return name
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    try:
        # systemd tells its children (systemd.io/CONTAINER_INTERFACE).
        named = (root / "run/systemd/container").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return named[:32] if named.replace("-", "").isalnum() else None


def _used(device: str | None, machine: Machine) -> tuple[Gpu, ...]:
    """The GPU that a device is; all of them where no device is named, or it cannot be told which one it is."""
    if device is not None and not device.startswith("cuda"):
        return ()
    found = gpu_of(device, machine.gpus) if device else None
    return (found,) if found else machine.gpus


def _gpu(gpu: Gpu) -> dict[str, Any]:
    """Without its UUID, which tells one card from all others, and without the names of others' processes."""
    whole = gpu.to_dict()
    names = ("name", "index", "mig", "unreadable", "memory_bytes", "free_bytes", "used_by_others_bytes",
             "compute_capability", "pcie", "nvlinks", "driver", "cuda_version", "readings")  # fmt: skip
    return {name: whole[name] for name in names}


def _system() -> str:
    """As the distribution names itself."""
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        release = platform.freedesktop_os_release()
        return release.get("PRETTY_NAME") or release["NAME"]
    except (OSError, KeyError, AttributeError):
        return f"{platform.system()} {platform.version()}" if sys.platform == "win32" else platform.system()


def _installed(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _torch_build() -> dict[str, Any] | None:
    """What this torch was built for; None where it is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    build = "cuda" if torch.version.cuda else "rocm" if getattr(torch.version, "hip", None) else "cpu"
    shown = torch.__config__.show()
    blas = next((part.partition("=")[2] for part in shown.replace("\n", ",").split(",") if "BLAS_INFO=" in part), None)
    cudnn = torch.backends.cudnn.version() if build != "cpu" else None
    return {
        "version": str(torch.__version__),
        "build": build,
        "cuda": torch.version.cuda,
        "hip": getattr(torch.version, "hip", None),
        "cudnn": cudnn,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "blas": blas,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
