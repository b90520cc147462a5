"""What a rank may run on: cards of the bundled table, this machine's GPUs, its memory."""

from __future__ import annotations

from kvctl.hardware.device import Device, GpuFacts


def read_gpus(text: str) -> tuple[Device, ...]:
    """The devices that the value of --gpu names, in its order; unknown names raise UsageError with the nearest."""
    from kvctl.hardware.naming import read_gpus as read

    return read(text)


__all__ = ["Device", "GpuFacts", "read_gpus"]
