"""How fast a model runs on GPUs: a roofline for each phase, efficiencies fitted on published measurements, a queue on top.

`prepare` takes what does not depend on the load, `Prepared.at` and `Prepared.coming` give figures for one load. Every figure is
a range: `low` and `high` are meant to hold nine of ten measurements of combinations that the fit has not seen, `mid` is the likeliest.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError
from kvctl.record import Record
from kvctl.units import plural

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvctl.hardware.device import GpuFacts
    from kvctl.spec import Formats, ModelSpec
    from kvctl.speed.calibrate import Calibration
    from kvctl.speed.roofline import Efficiency, Layout


class Range(Record):
    """A figure and what it lies between, nine times of ten."""

    low: float
    mid: float
    high: float

    def to_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in self._fields}


class Speed(Record):
    """One load's figures."""

    ttft: Range
    """Seconds to the first token, waiting in the queue included."""
    tpot: Range
    """Seconds between tokens of one request."""
    total: Range
    """Seconds of one request, from when it comes to its last token."""
    output_rate: Range
    """Output tokens a second, of all requests of all replicas."""
    request_rate: Range
    """Requests a second, of all replicas."""
    concurrency: float
    """Requests in service at once that these figures are for, of all replicas."""
    prefill_bound: str
    """What binds a prompt: compute, attention, weights, communication, overhead."""
    decode_bound: str
    """What binds a step: weights, cache, compute, communication, overhead."""
    validated: str
    """What the figures were compared with ("57 figures of vllm on H100 SXM"); empty is unvalidated."""
    assumption: str
    """The assumption that these figures hang on most."""
    sustained: bool = True
    """Whether it keeps up with the requests that come, where they come at a rate."""


class Setup(Record):
    """A model, an engine and how it lies on GPUs."""

    spec: ModelSpec
    engine: str
    card: GpuFacts
    weights: str
    """A name of kvctl.speed.machine.FORMATS."""
    formats: Formats
    """Of the cache."""
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    """Groups of ranks that attend for requests of their own."""
    expert: bool = False
    dealt: int = 1
    """Tensor ranks over which a request's tokens are dealt out."""
    replicas: int = 1
    node: int = 8
    """GPUs that a node joins by its own links."""
    old: bool = False
    """Whether the engine is of before 2025, as measurements may be."""
    batched: int | None = None
    """Tokens of prompts that the engine computes in one pass; None is its default."""
    offloaded: int = 0
    """Bytes of each rank's weights that come from the host's memory in every pass."""


CHUNKS = {"llama.cpp": 512, "mlx-lm": 2048, "exllamav2": 2048}
"""Tokens of a prompt that an engine computes at once without being told; 8,192 where it is not here. llama.cpp: n_ubatch."""
FETCHED = 0.8
"""Share of a PCIe link's rate that copies from the host reach: about 50 of 63 GB/s to an H100 (vLLM's blog on its offloading connector)."""
ALIKE = {"ollama": "llama.cpp"}
"""Engines that run another one's server."""


class Prepared(Record):
    """A setup with all that no load changes."""

    setup: Setup
    layout: Layout
    efficiency: Efficiency
    facts: dict[str, str]
    calibration: Calibration | None

    def several(self, inside: float) -> bool:
        """Whether `inside` requests on all replicas make steps that one alone says nothing of."""
        from kvctl.speed.efficiency import FEW

        return inside / self.setup.replicas / self.setup.data > FEW

    def spread(self, inside: float) -> dict[str, tuple[float, float]]:
        """Kind of figure → the logarithms that measurements lie below and above a prediction, of so many requests."""
        from kvctl.speed.efficiency import spreads

        return spreads(self.facts, several=self.several(inside))

    def seconds(self, prompt: int, answer: int, held: float, before: float = 0.0) -> tuple[float, float]:
        """Seconds to the first token and between tokens, with `held` requests in service on one replica.

        `before`: tokens of a prompt that are found in the cache.
        """
        return self.pace(prompt, answer, before)(held)

    def pace(self, prompt: int, answer: int, before: float = 0.0) -> Callable[[float], tuple[float, float]]:
        """`seconds` of requests of one kind, by how many are in service: what does not depend on that is counted once."""
        from kvctl.speed.load import no_worse_than_in_turn, served
        from kvctl.speed.roofline import prompt as prompted
        from kvctl.speed.roofline import step

        own = prompted(self.layout, prompt - before, 1, self.chunk, before=before, pipelined=True)
        alone = served(step(self.layout, 1.0, prompt + answer / 2), own, self.efficiency, 0.0, answer)

        def seconds(held: float) -> tuple[float, float]:
            demand = step(self.layout, held, prompt + answer / 2)
            others = max(held / self.setup.data - 1, 0.0)
            first, between = served(demand, own, self.efficiency, others, answer)
            if others:
                beside = served(demand, own, self.efficiency, 0.0, answer)
                first, between = no_worse_than_in_turn((first, between), beside, alone, others + 1, answer)
            if self.setup.offloaded:
                once = self.setup.offloaded / (FETCHED * host_link(self.setup.card))
                first, between = first + own.passes * once, between + once
            if self.calibration is not None:
                best = self.best(prompt, answer, held * self.setup.replicas, before)
                first = max(first * self.calibration.factor("ttft"), best[0])
                between = max(between * self.calibration.factor("tpot"), best[1])
            return float(first), float(between)

        return seconds

    def together(self, prompt: int, answer: int, count: float) -> tuple[float, float]:
        """Seconds of `count` prompts and of a step, where requests are computed as one batch and nothing else goes on."""
        from kvctl.speed.roofline import prompt as prompted
        from kvctl.speed.roofline import prompt_seconds, step, step_seconds

        prompts = prompted(self.layout, prompt, count, self.chunk, pipelined=True)
        token = step(self.layout, count, prompt + answer / 2)
        return float(prompt_seconds(prompts, self.efficiency)), float(step_seconds(token, self.efficiency))

    @property
    def chunk(self) -> int:
        return self.setup.batched or CHUNKS.get(ALIKE.get(self.setup.engine, self.setup.engine), 8192)

    def at(self, prompt: int, answer: int, asked: float, held: float | None = None, before: float = 0.0) -> Speed:
        """Figures with `asked` requests held at once over all replicas, of which `held` are in service and the others wait.

        `before`: tokens of a prompt that are found in the cache.
        """
        inside = min(asked, held) if held is not None else asked
        first, between = self.seconds(prompt, answer, max(inside / self.setup.replicas, 1.0), before)
        service = first + max(answer - 1, 0) * between
        # Those that memory does not hold wait until others end.
        first += (asked / inside - 1) * service
        return self._speed(prompt, answer, inside, first, between, before, there=asked)

    def coming(self, prompt: int, answer: int, rate: float, held: float, before: float = 0.0) -> Speed:
        """Figures with `rate` requests a second, of which at most `held` are in service.

        Requests in service follow from how long each is (Little's law); for a place they wait as in `kvctl.speed.load.queued`. What is
        served is what comes, and no more than can be.
        """
        from kvctl.speed.load import queued

        replicas, pace = self.setup.replicas, self.pace(prompt, answer, before)

        def throughput(inside: float) -> float:
            first, between = pace(max(inside / replicas, 1.0))
            return inside / (first + max(answer - 1, 0) * between)

        best = max(throughput(step) for step in _steps(held))
        low, high = min(1e-3, held), held
        while high / low > 1.001 and rate < best:
            inside = math.sqrt(low * high)
            low, high = (inside, high) if throughput(inside) < rate else (low, inside)
        inside = high
        first, between = pace(max(inside / replicas, 1.0))
        service = first + max(answer - 1, 0) * between
        load = rate / best
        if load < 1:
            first += queued(load, max(held / replicas, 1.0)) * service
        found = self._speed(prompt, answer, inside, first, between, before)
        # As many leave as come, as long as that is sustained; what could at most is as uncertain as everything.
        slow, fast = (one / found.request_rate.mid for one in (found.request_rate.low, found.request_rate.high))
        most = min(rate, self.most(prompt, answer, held, before))
        requests = Range(*(min(most, best * share) for share in (slow, 1.0, fast)))
        found = found.replace(request_rate=requests, output_rate=_times(requests, answer))
        if load < 1:
            return found
        never = Range(math.inf, math.inf, math.inf)
        return found.replace(ttft=never, total=never, sustained=False)

    def _speed(
        self,
        prompt: int,
        answer: int,
        inside: float,
        first: float,
        between: float,
        before: float,
        there: float | None = None,
    ) -> Speed:
        """Figures of `inside` requests in service, of `there` with those that wait: as many as leave come (Little's law)."""
        best_first, best_between = self.best(prompt, answer, inside, before)
        spread = self.spread(inside)
        ttft = self._range("ttft", first, spread, least=best_first)
        tpot = self._range("tpot", between, spread, least=best_between)
        more = max(answer - 1, 0)
        total = Range(*(one + more * other for one, other in zip(
            (ttft.low, ttft.mid, ttft.high), (tpot.low, tpot.mid, tpot.high), strict=True)))  # fmt: skip
        count = inside if there is None else there
        requests = Range(count / total.high, count / total.mid, count / total.low)
        bounds = self.bounds(prompt, answer, inside, before)
        return Speed(
            ttft=ttft, tpot=tpot, total=total, output_rate=_times(requests, answer),
            request_rate=requests, concurrency=inside, prefill_bound=bounds[0], decode_bound=bounds[1], validated=self.validated(inside),
            assumption=self.assumption(prompt, inside, before),
        )  # fmt: skip

    def most(self, prompt: int, answer: int, inside: float, before: float = 0.0) -> float:
        """Requests a second that the hardware cannot go beyond with so many in service."""
        first, between = self.best(prompt, answer, inside, before)
        return inside / (first + max(answer - 1, 0) * between)

    def best(self, prompt: int, answer: int, inside: float, before: float = 0.0) -> tuple[float, float]:
        """Seconds to the first token and between tokens that the hardware cannot go below."""
        from kvctl.speed.roofline import prompt as prompted
        from kvctl.speed.roofline import step

        own = prompted(self.layout, prompt - before, 1, self.chunk, before=before, pipelined=True)
        token = step(self.layout, max(inside / self.setup.replicas, 1.0), prompt)
        return (
            max(own.operations + own.attention, own.weights),
            max(token.weights + token.cache, token.operations + token.attention),
        )

    def _range(self, kind: str, value: float, spread: dict[str, tuple[float, float]], least: float = 0.0) -> Range:
        low, high = spread[kind]
        if self.calibration is not None:
            low, high = self.calibration.spread(kind, low, high)
        return Range(max(value * math.exp(low), least), max(value, least), max(value * math.exp(high), least))

    def bounds(self, prompt: int, answer: int, inside: float, before: float = 0.0) -> tuple[str, str]:
        """What takes most of a prompt's time, and of a step's."""
        from kvctl.speed.roofline import prompt as prompted
        from kvctl.speed.roofline import step

        e = self.efficiency
        own = prompted(self.layout, prompt - before, 1, self.chunk, before=before, pipelined=True)
        token = step(self.layout, max(inside / self.setup.replicas, 1.0), prompt + answer / 2)
        talk = (own.wire / e.link + own.exchanges * e.exchange, token.wire / e.link + token.exchanges * e.exchange)
        return (
            _largest({"compute": own.operations / e.prefill * (1 + e.half / own.tokens), "weights": own.weights / e.memory,
                      "attention": own.attention / e.attention, "communication": talk[0], "overhead": _overhead(own, e)}),
            _largest({"weights": token.weights / e.memory, "compute": token.operations / (e.prefill * e.decode),
                      "cache": token.cache / e.cache + token.attention / e.attention, "communication": talk[1],
                      "overhead": _overhead(token, e)}),
        )  # fmt: skip

    def _published(self, *, several: bool, recent: bool = False) -> int:
        """Published figures of this engine on this card."""
        from kvctl.speed.efficiency import known

        return known(self.facts["E"], self.facts["C"], several=several, recent=recent)[0]

    @property
    def _dated(self) -> bool:
        """Whether all of them are older than the engine."""
        return not self.setup.old and not self._published(several=False, recent=True)

    def validated(self, inside: float) -> str:
        """What was measured here, and how many published figures of this engine on this card there are; empty where there is neither."""
        own = (self.calibration.words,) if self.calibration is not None else ()
        count = self._published(several=False)
        words = f"{plural(count, 'published figure')} of {self.facts['E']} on {self.setup.card.name}"
        if self._dated:
            words += " before 2025"
        if self.several(inside) and not self._published(several=True):
            words += ", of one request at a time"
        return "; ".join((*own, words) if count else own)

    def assumption(self, prompt: int, inside: float, before: float = 0.0) -> str:
        """What the figures hang on most."""
        setup, layout = self.setup, self.layout
        if setup.offloaded:
            return f"weights in host memory come at {FETCHED * host_link(setup.card) / 1e9:.3g} GB/s, which nobody measured here"
        if not self.validated(inside):
            return f"{setup.engine} reaches as much of {setup.card.name} as it does of its like: nobody published that"
        if self.calibration is None and self.several(inside) and not self._published(several=True):
            return f"steps of {setup.engine} on {setup.card.name} grow with their requests as those of its like: nobody published that"
        if self.calibration is None and self._dated:
            return f"{setup.engine} is as much faster on {setup.card.name} than before 2025 as on others: nobody published that"
        if layout.context_parallel > 1:
            return (
                f"what it takes to deal tokens out over {layout.context_parallel} ranks: no published figure has that"
            )
        if layout.tensor > layout.node or (layout.data > 1 and layout.spread > layout.node):
            return f"the network between nodes carries {layout.network / 1e9:g} GB/s of each GPU"
        if layout.work.experts:
            return "tokens choose experts evenly"
        if layout.work.estimated:
            return "parameters are the published total, not counted from the architecture"
        if prompt <= 1:
            return "requests do not wait for prompts"
        if before:
            return f"{before / prompt:.0%} of {prompt:,} prompt tokens are found in the cache"
        return f"prompts have {prompt:,} tokens and none is found in a cache"


def _times(found: Range, factor: float) -> Range:
    return Range(found.low * factor, found.mid * factor, found.high * factor)


def _overhead(demand: Any, e: Any) -> float:
    return float(
        demand.layers * e.layer
        + demand.expert_layers * e.expert_layer
        + demand.passes * e.step
        + demand.sequences * e.sequence
    )


def _largest(parts: dict[str, Any]) -> str:
    return max(parts, key=lambda name: float(parts[name]))


def _steps(held: float) -> list[float]:
    """Numbers of requests from one to `held`, four times as many each: rates grow with them, and fall a little where memory is short."""
    steps, value = [held], held / 4
    while value > 1:
        steps.append(value)
        value /= 4
    return steps


def host_link(card: GpuFacts) -> float:
    """Bytes a second between a GPU and its host, at most."""
    from kvctl.speed.machine import PCIE_GBS

    capability = (card.compute_capability or "").partition(".")[0]
    return PCIE_GBS.get(capability if card.vendor == "NVIDIA" else "", PCIE_GBS[""]) * 1e9


def facts_of(setup: Setup, layout: Layout) -> dict[str, str]:
    """What its efficiencies depend on, by the letters of `kvctl.speed.efficiency.EFFECTS`."""
    from kvctl.speed.machine import family

    engine = ALIKE.get(setup.engine, setup.engine)
    return {
        "E": engine, "G": f"{engine}/old" if setup.old else "", "F": family(setup.card), "C": setup.card.name,
        "K": layout.fmt.kind + ("" if layout.peaks.native else " unpacked"), "W": layout.wire[1] if layout.tensor > 1 else "",
        "M": "experts" if layout.work.experts else "", "L": "latent" if any(one.step != one.pair for one in layout.work.attends) else "",
    }  # fmt: skip


def layout_of(setup: Setup) -> Layout:
    """The ranks of a setup.

    Raises:
        ConfigError: rates of the card, the format's kernels or the model's parameters are not known.

    """
    from kvctl.speed.machine import NETWORK_GBS, format_of, peaks
    from kvctl.speed.roofline import Layout
    from kvctl.speed.work import work_of

    fmt = format_of(setup.weights)
    if fmt is None:
        raise ConfigError(f"how fast weights in {setup.weights} are multiplied is not known")
    best = peaks(setup.card, fmt)
    if best is None:
        raise ConfigError(f"bandwidth or rate of {setup.card.name} is not known, and so no speed of it is")
    work = work_of(setup.spec, setup.formats)
    return Layout(
        work,
        fmt,
        best,
        setup.tensor,
        setup.pipeline,
        setup.data,
        setup.expert,
        setup.node,
        NETWORK_GBS * 1e9,
        setup.dealt,
    )


def prepare(setup: Setup, calibration: Calibration | None = None) -> Prepared:
    """What does not depend on a load.

    Raises:
        ConfigError: as `layout_of`.

    """
    from kvctl.speed.efficiency import efficiency

    layout = layout_of(setup)
    facts = facts_of(setup, layout)
    return Prepared(setup, layout, efficiency(facts), facts, calibration)
