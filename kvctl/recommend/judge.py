"""How good a candidate is: its speed under the load, what its formats lose, what it costs, and whether that meets what is asked."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvctl.errors import ConfigError, KvctlError
from kvctl.formats import plain
from kvctl.recommend.checkpoints import timed
from kvctl.recommend.load import found
from kvctl.recommend.prices import Cost, Prices, cost
from kvctl.record import Record
from kvctl.spec import Formats
from kvctl.speed import Prepared, Range, Setup, Speed, prepare
from kvctl.speed.host import FACTS, prepare_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvctl.formats import DType
    from kvctl.recommend.candidate import Candidate
    from kvctl.recommend.quality import Loss, Quality
    from kvctl.recommend.request import Ask
    from kvctl.speed.calibrate import Measurement

USUAL_LOSS = 1.0
"""Percent that may be lost where nobody says how much: what makers of quantized checkpoints call lossless."""
STEP = 1.05
"""Figures within so much of each other count as equal: predictions are less exact than that."""
ANY_LOSS = 100.0
"""A bound that takes formats of which nobody published what they lose."""
_MADE = ("stored", "load", "make")


class Judged(Record):
    """One candidate, with what speaks for it."""

    candidate: Candidate
    speed: Speed | None
    no_speed: str
    """Why its speed is not known; empty where it is."""
    loss: Loss
    cost: Cost
    missed: tuple[str, ...]
    """What it does not meet, in words; none where it meets all."""
    sure: bool
    """Whether it meets all even at the far end of its ranges."""
    place: int
    """In the order of the space."""
    found: float | None = None
    """Share of prompt tokens that its speed takes to be in the cache; None where nothing says it."""

    @property
    def meets(self) -> bool:
        return not self.missed

    @property
    def total(self) -> float:
        """Seconds of one request from its start to its end, as is likeliest; infinite where that is not known."""
        return math.inf if self.speed is None else self.speed.total.mid

    @property
    def time(self) -> float:
        """The same to count on: between the likeliest and the most, as `rate` is."""
        return math.inf if self.speed is None else math.sqrt(self.speed.total.mid * self.speed.total.high)

    @property
    def rate(self) -> float:
        """Output tokens a second to count on: between the likeliest and the least, so that of two ways the better known one goes first."""
        if self.speed is None:
            return 0.0
        found = self.speed.output_rate
        return math.sqrt(found.low * found.mid)


_OWN = "bf16"
"""A format that loses nothing."""


class Judge:
    """Judges candidates of one request."""

    def __init__(
        self, ask: Ask, quality: Quality, prices: Prices, dtype: DType, measurements: Sequence[Measurement] = ()
    ) -> None:
        self.ask, self.quality, self.prices, self.dtype, self.measurements = ask, quality, prices, dtype, measurements
        self.limit = USUAL_LOSS if ask.max_quality_loss is None else ask.max_quality_loss
        self.told: dict[int, str] = {}
        """By the id of a measurement: why no speed rests on it so far; empty where one does."""
        self._prepared: dict[tuple[object, ...], Prepared | KvctlError] = {}
        self._losses: dict[tuple[str, str], Loss] = {}

    def judge(self, candidate: Candidate, place: int = 0) -> Judged:
        """One candidate."""
        ask = self.ask
        share = found(ask.reuse, candidate, ask.spec, ask.prompt, ask.answer)
        speed, why = self._speed(candidate, (share or 0.0) * ask.prompt)
        loss = self.loss(candidate)
        deployment = candidate.deployment
        facts, rate = deployment.device.facts, None if speed is None else speed.output_rate
        name, dies = (deployment.device.name, 1) if facts is None else (facts.name, facts.dies)
        price = cost(name, deployment.all_gpus, self.prices, rate, dies=dies)
        missed, sure = self._missed(candidate, speed, why, self.counted(candidate))
        return Judged(candidate, speed, why, loss, price, tuple(missed), sure and not missed, place, share)

    # -- speed ------------------------------------------------------------------------------

    def prepared(self, candidate: Candidate) -> Prepared:
        """What its speed follows from.

        Raises:
            ConfigError: what it runs on, or its format, has no known speed.

        """
        deployment, split = candidate.deployment, candidate.split
        key = (
            deployment.engine.name,
            deployment.weights,
            deployment.kv_dtype,
            split,
            deployment.serving.max_batched,
            candidate.offloaded,
        )
        if key not in self._prepared:
            try:
                self._prepared[key] = self._prepare(candidate)
            except KvctlError as error:
                self._prepared[key] = error
        found = self._prepared[key]
        if isinstance(found, KvctlError):
            raise found
        # Each of several servers side by side is as fast as one.
        return found.replace(setup=found.setup.replace(replicas=deployment.replicas))

    def _prepare(self, candidate: Candidate) -> Prepared:
        from kvctl.speed.calibrate import calibration

        deployment, split = candidate.deployment, candidate.split
        device = deployment.device
        host = device.kind == "cpu"
        if device.facts is None and not host:
            raise ConfigError(f"how fast {device.name} is, is not known: --verify measures it")
        if device.mig:
            raise ConfigError("how much of its card's speed a MIG slice has is not known")
        if candidate.offloaded and deployment.engine.slots:
            raise ConfigError(
                "layers in host memory are computed by the host, and how fast that is, is not known: --verify measures it"
            )
        key = value = plain(self.dtype)
        if deployment.kv_dtype != "auto":
            key = deployment.engine.kv_dtype(deployment.kv_dtype, "--kv-cache-dtype")
            value = key.values or key
        weights = timed(deployment.weights, self.ask.spec, slots=bool(deployment.engine.slots))
        setup = Setup(
            self.ask.spec, deployment.engine.name, device.facts or FACTS, weights, Formats(self.dtype, key, value),
            tensor=max(split.tensor // split.data, 1) if split.tensor > 1 else split.tensor,
            pipeline=split.gpus if deployment.engine.slots else split.pipeline, data=split.data, expert=split.data > 1, dealt=split.dealt,
            node=max(split.gpus, 1), batched=deployment.serving.max_batched, offloaded=candidate.offloaded // max(split.ranks, 1),
        )  # fmt: skip
        if host:
            return prepare_host(setup, self.measurements, self._tell)
        ready = prepare(setup)
        return ready.replace(calibration=calibration(setup, self.measurements, self._tell))

    def _tell(self, one: Measurement, why: str) -> None:
        """What one setup makes use of, another may not; of several reasons the first stays."""
        if why:
            self.told.setdefault(id(one), why)
        else:
            self.told[id(one)] = ""

    def _speed(self, candidate: Candidate, before: float) -> tuple[Speed | None, str]:
        ask = self.ask
        try:
            prepared = self.prepared(candidate)
        except KvctlError as error:
            return None, error.message
        held = float(max(candidate.usual_at_once, 1))
        if ask.rate is not None:
            return prepared.coming(ask.prompt, ask.answer, ask.rate, held, before), ""
        return prepared.at(ask.prompt, ask.answer, float(ask.concurrency or 1), held, before), ""

    # -- quality ----------------------------------------------------------------------------

    def loss(self, candidate: Candidate) -> Loss:
        """What its formats lose together."""
        return self._both(candidate.deployment.weights, candidate.deployment.kv_dtype)

    def counted(self, candidate: Candidate) -> Loss:
        """What is held against it: nothing of a format that was named, unless it was said how much may be lost."""
        pins, deployment = self.ask.pins, candidate.deployment
        if self.ask.max_quality_loss is not None or (pins.weights is None and pins.kv_dtype is None):
            return self.loss(candidate)
        return self._both(
            deployment.weights if pins.weights is None else _OWN,
            deployment.kv_dtype if pins.kv_dtype is None else _OWN,
        )

    def _both(self, weights: str, kv_dtype: str) -> Loss:
        key = weights, kv_dtype
        if key not in self._losses:
            self._losses[key] = self.quality.both(*key)
        return self._losses[key]

    def meets(self, candidate: Candidate) -> bool:
        """Whether it meets the request; as `judge` says, and sooner where its formats lose too much."""
        return not candidate.queues and not self._loses(self.counted(candidate)) and self.judge(candidate).meets

    def _loses(self, loss: Loss) -> bool:
        """Whether that is more than may be lost."""
        verdict = loss.allowed(self.limit)
        return verdict == "no" or (verdict == "unknown" and self.limit < ANY_LOSS)

    # -- what it misses ---------------------------------------------------------------------

    def _missed(self, candidate: Candidate, speed: Speed | None, why: str, loss: Loss) -> tuple[list[str], bool]:
        ask, missed, sure = self.ask, [], True
        if candidate.queues:
            missed.append(f"{candidate.usual_at_once:,} of {ask.concurrency:,} requests run at once")
        if self._loses(loss):
            told = "nobody published what it loses"
            if loss.percent is not None:
                told = f"loses {max(loss.percent.mid, 0):.2g}%"
                if loss.percent.mid <= self.limit:
                    told = f"loses up to {loss.percent.high:.2g}%, by the one figure there is"
            missed.append(f"quality: {told}, and {self.limit:g}% is the most")
        sure = sure and loss.allowed(self.limit) == "yes"
        for name, limit in (("ttft", ask.ttft), ("tpot", ask.tpot)):
            if limit is None:
                continue
            if speed is None:
                missed.append(f"{name.upper()}: {why}")
                continue
            figure: Range = getattr(speed, name)
            if figure.mid > limit:
                if math.isinf(figure.mid):
                    missed.append(f"{name.upper()}: the queue grows without end at this rate")
                else:
                    missed.append(f"{name.upper()}: {_seconds(figure.mid)}, and {_seconds(limit)} is the most")
            sure = sure and figure.high <= limit
        if speed is not None and not speed.sustained:
            missed.append(f"rate: {speed.request_rate.mid:.3g} requests a second, and {ask.rate:g} come")
        return missed, sure


def _seconds(value: float) -> str:
    from kvctl.units import format_seconds

    return "never" if math.isinf(value) else format_seconds(value)


# -- which is better ---------------------------------------------------------------------------


def order(goal: str, one: Judged) -> tuple[float, ...]:
    """What candidates are sorted by, least first; the same candidate has the same place in whatever company.

    What meets the request goes before what does not, then the goal in steps of 5%; among equals what needs no preparation, fewer
    GPUs and less loss, then the figures themselves.
    """
    speed, candidate = one.speed, one.candidate
    lost = one.loss.percent.mid if one.loss.percent is not None else math.inf
    # Of two that lose as much, the one that is surer not to lose more: what the model computes in itself.
    most = one.loss.percent.high if one.loss.percent is not None else math.inf
    rate = one.rate
    money = one.cost.per_hour if one.cost.per_hour is not None else float(one.cost.gpus)
    late = speed.ttft.mid + speed.tpot.mid * 64 if speed is not None else math.inf
    goals: dict[str, tuple[float, ...]] = {
        "cost": (money, -_step(rate)),
        "latency": (_step(one.time),),
        "throughput": (-_step(rate),),
        "context": (
            -_step(float(candidate.capacity or candidate.at_once * candidate.deployment.context)),
            -_step(rate),
        ),
        "quality": (round(max(lost, 0.0), 1), round(max(most, 0.0), 1), -_step(rate)),
    }
    return (
        float(len(one.missed)), *goals[goal], float(_MADE.index(candidate.deployment.made)), float(one.cost.gpus), round(max(lost, 0.0), 1),
        -rate, late, float(one.place),
    )  # fmt: skip


def _step(value: float) -> float:
    """The step of 5% that a figure is in."""
    if value <= 0 or math.isinf(value):
        return value
    return float(math.floor(math.log(value) / math.log(STEP)))
