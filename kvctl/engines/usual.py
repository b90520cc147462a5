"""What an engine's `memory` module says where the engine has nothing of its own to say: see `kvctl.engines.Memory`."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.allocation import Allocation, Part, Serving, Shortage
from kvctl.spec import ModelSpec


def kv_budget(
    *,
    device_bytes: int,
    free_bytes: int,
    weights_bytes: int,
    parts: Sequence[Part],
    serving: Serving,
    version: str | None,
    spec: ModelSpec,
) -> int:
    """All that is free, less weights and parts."""
    return free_bytes - weights_bytes - sum(part.bytes for part in parts)


def left(serving: Serving, version: str | None) -> str:
    """Nothing is left alone but what is not asked for."""
    return "nothing asks for it"


def start_refusal(free_bytes: int, device_bytes: int, serving: Serving, version: str | None) -> str | None:
    """It looks at free memory when it allocates."""
    return None


def started(
    spec: ModelSpec, serving: Serving, *, device_bytes: int, gpu_name: str | None, version: str | None, context: int
) -> Serving:
    """The plan's rules choose the same on every device."""
    return serving


def shortage(
    spec: ModelSpec, serving: Serving, *, before: int, weights_bytes: int, device_bytes: int, version: str | None
) -> Shortage | None:
    """No share is kept for what the engine does not measure."""
    return None


def plan_refusal(
    allocation: Allocation, spec: ModelSpec, serving: Serving, *, device_bytes: int, gpu_name: str | None,
    version: str | None, context: int,
) -> str | None:  # fmt: skip
    """A plan that holds a request starts."""
    return None


def overheads(
    spec: ModelSpec,
    serving: Serving,
    *,
    dtype_bytes: int,
    device_bytes: int,
    gpu_name: str | None,
    version: str | None,
    context: int,
    free_bytes: int | None = None,
) -> tuple[Part, ...]:
    """Nothing beside weights and cache."""
    return ()


def default_context(device_bytes: Sequence[int], trained: int | None) -> int | None:
    """The length does not depend on the memory."""
    return None
