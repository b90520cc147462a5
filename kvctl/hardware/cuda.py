"""The memory total that the CUDA driver gives to applications, which is less than NVML's.

vLLM and torch take their share of it. No context is made on any GPU.
"""

from __future__ import annotations

import sys
from typing import Any

_MAX_GPUS = 1024


def totals() -> dict[str, int]:
    """Bytes by UUID as NVML writes it ("GPU-…", "MIG-…"); empty where there is no driver to ask."""
    import ctypes

    try:
        cuda: Any = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        if cuda.cuInit(0) != 0:
            return {}
        count = ctypes.c_int()
        if cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return {}
        found = (_total(cuda, number) for number in range(min(count.value, _MAX_GPUS)))
        return dict(pair for pair in found if pair is not None)
    except (OSError, AttributeError):  # no driver, or one without these calls
        return {}


def _total(cuda: Any, number: int) -> tuple[str, int] | None:
    import ctypes
    import uuid

    device, size, raw = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(16)
    if cuda.cuDeviceGet(ctypes.byref(device), number) != 0:
        return None
    # Of a MIG slice the second call gives the slice's own UUID, the first its card's.
    ask_uuid = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    if ask_uuid(raw, device) != 0 or cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device) != 0:
        return None
    name = str(uuid.UUID(bytes=raw.raw))
    prefix = "MIG" if _is_slice(cuda, device) else "GPU"
    return f"{prefix}-{name}", size.value


def _is_slice(cuda: Any, device: Any) -> bool:
    import ctypes

    name = ctypes.create_string_buffer(256)
    return cuda.cuDeviceGetName(name, 256, device) == 0 and b" MIG " in name.value
