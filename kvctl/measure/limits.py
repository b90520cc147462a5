"""How near a point comes to what the hardware can do, and which of its limits binds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.formats import TORCH_NAMES
from kvctl.measure.report import Limits, Point

if TYPE_CHECKING:
    from kvctl.formats import DType
    from kvctl.measure.rates import Rates

_NEAR = 0.5
"""A step that takes over twice what its limits ask waits for something else: launching kernels, Python, one thread."""


def limits_of(point: Point, rates: Rates, dtype: DType) -> Limits | None:
    """Shares of the device's bandwidth and matrix rate; None for a point that was not timed."""
    work = point.work
    if work is None or point.ttft is None or point.tpot is None:
        return None
    # The maker's figures stand in where nothing could be measured.
    peak = rates.flops(TORCH_NAMES[dtype.name]) or (rates.published_flops if dtype.bytes == 2 else None)
    bandwidth = rates.bandwidth or rates.published_bandwidth
    prefill, step = point.ttft.median, point.tpot.median
    computing = work.decode_flops / peak if peak else None
    reading = work.decode_bytes / bandwidth if bandwidth else None
    # A peak that the model itself beats was measured at a bad moment, or by a kernel that is not the model's: it tells nothing.
    if peak and work.prefill_flops / prefill > peak:
        peak = computing = None
    if bandwidth and work.decode_bytes / step > bandwidth:
        bandwidth = reading = None
    return Limits(
        compute_share=work.prefill_flops / prefill / peak if peak else None,
        bandwidth_share=work.decode_bytes / step / bandwidth if bandwidth else None,
        flops_per_second=work.prefill_flops / prefill,
        bytes_per_second=work.decode_bytes / step,
        binds=_binds(step, computing, reading),
    )


def _binds(step: float, computing: float | None, reading: float | None) -> str:
    """What a decode step waits for: the limit that asks for more time, if that explains half of the step."""
    known = [(seconds, name) for seconds, name in ((computing, "compute"), (reading, "memory")) if seconds is not None]
    if not known:
        return "unknown"
    seconds, name = max(known)
    return name if seconds >= _NEAR * step else "overhead"
