"""Speed of a host whose memory and processor nobody publishes figures of, from what one engine was measured to do on it.

The roofline is the same; its two rates are those that the measurement itself shows: bytes that a step reads over the time between
tokens, and operations of a prompt over the time to its first token. Nothing is said of other engines on that host.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from kvctl.errors import ConfigError, KvctlError
from kvctl.hardware.device import GpuFacts
from kvctl.speed import ALIKE, CHUNKS, Prepared, Setup
from kvctl.speed.calibrate import Calibration, Measurement
from kvctl.speed.efficiency import fitted
from kvctl.speed.machine import Peaks, format_of
from kvctl.speed.roofline import Efficiency, Layout, prompt, step
from kvctl.speed.work import work_of

if TYPE_CHECKING:
    from collections.abc import Sequence

NAME = "CPU"
"""What measurements of a host have as their card."""
FACTS = GpuFacts(
    NAME, "", (), (), None, 0, None, None, None, None, None, None, None, None, None, True, False, (), 1, (), (), None
)
"""Nothing is known of it."""
_WHOLE = Efficiency(**dict.fromkeys(Efficiency._fields, 1.0)).replace(
    exchange=0.0, layer=0.0, expert_layer=0.0, step=0.0, sequence=0.0, half=0.0, first=0.0, wait=0.0
)
"""What is measured has all losses in it; prompts and answers of all requests are computed by the same cores."""


class HostPrepared(Prepared):
    """A setup on a host."""

    def best(self, prompt: int, answer: int, inside: float, before: float = 0.0) -> tuple[float, float]:
        """No limit of the hardware is known."""
        return 0.0, 0.0

    def most(self, prompt: int, answer: int, inside: float, before: float = 0.0) -> float:
        return float("inf")

    def spread(self, inside: float) -> dict[str, tuple[float, float]]:
        """Those of engines that were never measured: of a host nothing is published."""
        return {kind: (row["all"][0], row["all"][1]) for kind, row in fitted()["spread"]["engine"].items()}

    def assumption(self, prompt: int, inside: float, before: float = 0.0) -> str:
        return "this host reads and multiplies weights of any format as fast as those that were measured"


def prepare_host(setup: Setup, measurements: Sequence[Measurement]) -> Prepared:
    """The setup on a host that its engine was measured on; the rates are medians over the loads with fewest requests at once.

    Raises:
        ConfigError: the engine was not measured there, or not both of its phases.

    """
    engine = ALIKE.get(setup.engine, setup.engine)
    found = [one for one in measurements if one.card == NAME and ALIKE.get(one.engine, one.engine) == engine]
    least = min((one.concurrency for one in found if one.ttft and one.tpot), default=None)
    rates = [rate for one in found if one.concurrency == least and (rate := _rates(setup, one)) is not None]
    if not rates:
        raise ConfigError(
            f"how fast {setup.engine} is on this host is not known: a load test of it there tells (--calibrate FILE@cpu)"
        )
    bandwidth, flops = (median(rate[kind] for rate in rates) for kind in (0, 1))
    words = f"measured: {', '.join(sorted({one.where for one in found if one.concurrency == least}))}"
    facts = {"E": engine, "C": NAME}
    return HostPrepared(setup, _layout(setup, bandwidth, flops), _WHOLE, facts, Calibration({}, words))


def _layout(setup: Setup, bandwidth: float, flops: float) -> Layout:
    fmt = format_of(setup.weights)
    if fmt is None:
        raise ConfigError(f"how fast weights in {setup.weights} are multiplied is not known")
    return Layout(work_of(setup.spec, setup.formats), fmt, Peaks(bandwidth, flops, flops, 0.0, "none", True))


def _rates(setup: Setup, one: Measurement) -> tuple[float, float] | None:
    """Bytes and operations a second that a measurement shows; None where its model or format cannot be counted."""
    if not one.ttft or not one.tpot:
        return None
    try:
        laid = _layout(setup.replace(spec=one.spec, weights=one.weights or setup.weights), 1.0, 1.0)
    except KvctlError:
        return None
    chunk = CHUNKS.get(ALIKE.get(setup.engine, setup.engine), 8192)
    read = step(laid, one.concurrency, one.prompt + one.answer / 2)
    own = prompt(laid, one.prompt - one.before, one.concurrency if one.together else 1.0, chunk, before=one.before)
    return (read.weights + read.cache) / one.tpot, (own.operations + own.attention) / one.ttft
