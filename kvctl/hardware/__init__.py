"""What a rank may run on: cards of the bundled table, this machine's GPUs, its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvctl.errors import UsageError
from kvctl.hardware.device import Device, GpuFacts


def read_gpus(text: str) -> tuple[Device, ...]:
    """The devices that the value of --gpu names, in its order; unknown names raise UsageError with the nearest."""
    from kvctl.hardware.naming import read_gpus as read

    return read(text)


def listing(patterns: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of the table whose names match one of the patterns, all for an empty one; nothing found is a UsageError."""
    from kvctl.hardware import table

    rows = [
        {
            "name": card.name,
            "vendor": card.vendor,
            "nvml_names": list(card.nvml_names),
            "aliases": list(card.aliases),
            "memory_mib": card.memory_mib,
            "nominal_gb": card.nominal_gb,
            "cuda_mib": card.cuda_mib,
            "bandwidth_gbs": card.bandwidth_gbs,
            "fp16_tflops": card.fp16_tflops,
            "fp8_tflops": card.fp8_tflops,
            "int8_tops": card.int8_tops,
            "fp4_tflops": card.fp4_tflops,
            "compute_capability": card.compute_capability,
            "link_gbs": card.link_gbs,
            "sources": dict(card.sources),
        }
        for card in table.cards()
        if any(table.key(pattern) in table.key(name) for pattern in patterns for name in (card.name, *card.nvml_names))
    ]
    if not rows:
        near = table.nearest(patterns[0])
        raise UsageError(
            f"no GPU of the table matches {patterns[0][:40]!r}", hint="near it: " + ", ".join(near) if near else None
        )
    return rows


__all__ = ["Device", "GpuFacts", "listing", "read_gpus"]
