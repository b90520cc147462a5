"""Speed of a host whose memory and processor nobody publishes figures of, from what one engine was measured to do on it.

The roofline is the same; its two rates are those that the measurement itself shows: bytes that a step reads over the time between
tokens, and operations of a prompt over the time to its first token. What that gives is moved by
measured over predicted at as many requests at once. Nothing is
said of other engines on that host.
"""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from kvctl.errors import ConfigError, KvctlError
from kvctl.hardware.device import GpuFacts
from kvctl.speed import ALIKE, CHUNKS, Prepared, Setup
from kvctl.speed.calibrate import Calibration, Measurement, Tell, silent
from kvctl.speed.efficiency import fitted
from kvctl.speed.machine import Peaks, format_of
from kvctl.speed.roofline import Efficiency, Layout, prompt, step
from kvctl.speed.work import work_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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

    busy: tuple[tuple[float, float, float], ...] = ()
    """Requests at once that were measured, and the logarithms of measured over predicted TTFT and TPOT there, ascending; between two of
    them, what lies on the way."""

    def pace(self, prompt: int, answer: int, before: float = 0.0) -> Callable[[float], tuple[float, float]]:
        roofline = super().pace(prompt, answer, before)

        def seconds(held: float) -> tuple[float, float]:
            first, between = roofline(held)
            return first * math.exp(self._apart(held, 1)), between * math.exp(self._apart(held, 2))

        return seconds

    def _apart(self, held: float, kind: int) -> float:
        """At so many requests at once; as at the nearest end, where fewer or more are than were measured."""
        rows = self.busy
        for low, high in pairwise(rows):
            if held < high[0]:
                way = max(math.log(held / low[0]) / math.log(high[0] / low[0]), 0.0)
                return low[kind] + way * (high[kind] - low[kind])
        return rows[-1][kind] if rows else 0.0

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


def prepare_host(setup: Setup, measurements: Sequence[Measurement], tell: Tell = silent) -> Prepared:
    """The setup on a host that its engine was measured on; the rates are medians over the loads with fewest requests at once,
    and all loads correct what follows from them, at so many requests in service.

    Raises:
        ConfigError: the engine was not measured there, or not both of its phases.

    """
    engine = ALIKE.get(setup.engine, setup.engine)
    rates: dict[float, list[tuple[Measurement, tuple[float, float]]]] = {}
    for one in measurements:
        if one.card != NAME or ALIKE.get(one.engine, one.engine) != engine:
            continue
        try:
            rate = _rates(setup, one)
        except KvctlError as error:
            tell(one, error.message)
        else:
            rates.setdefault(one.concurrency, []).append((one, rate))
    if not rates:
        raise ConfigError(
            f"how fast {setup.engine} is on this host is not known: a load test of it there tells "
            "(kvctl serve-test URL --save FILE, then --calibrate FILE@cpu)"
        )
    least = min(rates)
    peak = [median(rate[kind] for _, rate in rates[least]) for kind in (0, 1)]
    laid = _layout(setup, *peak)
    busy = []
    for concurrency, found in sorted(rates.items()):
        shares = [_shares(setup, one, peak) for one, _ in found]
        first, between = (median(share[kind] for share in shares) for kind in (0, 1))
        busy.append((concurrency, first, between))
        for one, _ in found:
            tell(one, "")
    words = f"measured: {', '.join(sorted({one.where for found in rates.values() for one, _ in found}))}"
    return HostPrepared(setup, laid, _WHOLE, {"E": engine, "C": NAME}, Calibration({}, words), tuple(busy))


def _shares(setup: Setup, one: Measurement, peak: Sequence[float]) -> tuple[float, float]:
    """Logarithms of measured over predicted TTFT and TPOT, as the host's rates predict them."""
    own = setup.replace(spec=one.spec, weights=one.weights or setup.weights)
    ready = HostPrepared(own, _layout(own, *peak), _WHOLE, {}, None)
    times = (
        ready.together(one.prompt, one.answer, one.concurrency)
        if one.together
        else ready.seconds(one.prompt, one.answer, one.concurrency, one.before)
    )
    assert one.ttft
    assert one.tpot
    return math.log(one.ttft / times[0]), math.log(one.tpot / times[1])


def _layout(setup: Setup, bandwidth: float, flops: float) -> Layout:
    fmt = format_of(setup.weights)
    if fmt is None:
        raise ConfigError(f"how fast weights in {setup.weights} are multiplied is not known")
    return Layout(work_of(setup.spec, setup.formats), fmt, Peaks(bandwidth, flops, flops, 0.0, "none", True))


def _rates(setup: Setup, one: Measurement) -> tuple[float, float]:
    """Bytes and operations a second that a measurement shows.

    Raises:
        ConfigError: its model or format cannot be counted, or it lacks a time.

    """
    if not one.ttft or not one.tpot:
        raise ConfigError("a host's speed follows from TTFT and TPOT, and it has only one of them" if one.ttft or one.tpot else
                          "it has neither TTFT nor TPOT")  # fmt: skip
    laid = _layout(setup.replace(spec=one.spec, weights=one.weights or setup.weights), 1.0, 1.0)
    chunk = CHUNKS.get(ALIKE.get(setup.engine, setup.engine), 8192)
    read = step(laid, one.concurrency, one.prompt + one.answer / 2)
    own = prompt(laid, one.prompt - one.before, one.concurrency if one.together else 1.0, chunk, before=one.before)
    return (read.weights + read.cache) / one.tpot, (own.operations + own.attention) / one.ttft
