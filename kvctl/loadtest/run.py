"""One load test: look at the server, build prompts, send, watch, and add up."""

from __future__ import annotations

import gc
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvctl import texts
from kvctl.errors import KvctlError
from kvctl.loadtest import asks, load, metrics, target, verdict, words
from kvctl.loadtest.counting import counter
from kvctl.loadtest.exchange import Exchange
from kvctl.loadtest.figures import Figures, Slo
from kvctl.loadtest.loop import Loop, Patience
from kvctl.record import Record
from kvctl.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

SECOND = load.SECOND
_AHEAD = 64
"""Requests that are ready before they are due, beside one for each that is under way."""


class Step(Record):
    """One load."""

    at_once: int | None = None
    """Requests that are kept under way; None: they are sent by a clock."""
    rate: float | None = None
    """A second."""
    burstiness: float | None = None
    """Of the gaps; None: they are even."""

    @property
    def words(self) -> str:
        """ "16 at once", "5 a second"."""
        return f"{self.at_once:,} at once" if self.at_once is not None else f"{self.rate:g} a second"

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}


class Plan(Record):
    """What is to be done to a server."""

    place: target.Place
    steps: tuple[Step, ...]
    input_tokens: int
    output_tokens: int
    length: load.Length | None = None
    """Of each load; None: by how many requests are under way."""
    path: str = asks.CHAT
    model: str | None = None
    warm: int | None = None
    """Requests before those that count; None: as many as are under way, and eight at least."""
    headers: Mapping[str, str] = {}
    extra: Mapping[str, Any] = {}
    trust: target.Trust = target.Trust()
    patience: Patience = Patience()
    slo: Slo | None = None
    slo_percent: float = 99.0
    """Requests of a hundred that have to keep it."""
    seed: int | None = None
    """Of prompts and times; None draws one, so that no run finds another's prompts in the server's cache."""
    most_errors: float = 5.0
    """Percent of requests that may fail before a load is given up."""
    every: float = 0.25
    """Seconds between looks at the server's metrics."""
    limit: bool = False
    """Whether the steps are only where a search for the limit begins."""
    prefix_tokens: int = 0
    """With which prompts begin alike; 0: no two do."""
    groups: int = 1
    """Beginnings that there are."""

    def length_of(self, step: Step) -> load.Length:
        """As asked, else four requests for each that is under way, and enough to tell percentiles from."""
        return self.length or load.Length(requests=max(24 if self.limit else 50, 4 * (step.at_once or 0)))

    @property
    def designed(self) -> float | None:
        """Share of input tokens that may be found in the server's cache, template and all; None where nothing is meant to be."""
        return self.prefix_tokens / self.input_tokens if self.prefix_tokens else None


class Outcome(Record):
    """One load, and what came of it."""

    step: Step
    figures: Figures
    steady: Figures
    """Of requests that were sent and answered while the load was whole."""
    window: verdict.Window
    verdict: verdict.Verdict
    samples: tuple[metrics.Sample, ...]
    counters: Mapping[str, float]
    """How far the server's went over the whole load, warm-up and all."""
    sent: int
    """Requests in all, warm-up and all."""
    seconds: float
    """That the load was whole."""
    output_rate: float | None
    """Output tokens a second in that time, whosever they are; None where it is too short to say."""
    cpu: float
    given_up: str | None = None
    interrupted: bool = False
    began: int = 0
    """When the first measured request was due; 0: there was none."""

    @property
    def whole_events(self) -> list[int]:
        """Events with output in each whole second of the time that the load was whole, whosever they are."""
        first, last = -(-self.began // SECOND), int(self.began + self.seconds * SECOND) // SECOND
        return [self.figures.by_second.get(second, 0) for second in range(first, last)] if self.began else []

    @property
    def hit_rate(self) -> float | None:
        """Cached input tokens over all input tokens, by the usage of good answers; None where it does not say."""
        figures = self.figures
        return figures.cached / figures.tokens_in if figures.with_cached and figures.tokens_in else None

    @property
    def counted_hit_rate(self) -> float | None:
        """The same by the engine's own counters, over the whole load; None where it has none."""
        counters = self.counters
        if counters.get("prefix_queries"):
            return counters.get("prefix_hits", 0.0) / counters["prefix_queries"]
        # llama.cpp's prompt tokens are those that were computed.
        if "cached_tokens" in counters and counters.get("prompt_tokens"):
            cached, rest = counters["cached_tokens"], counters["prompt_tokens"]
            return cached / (cached + rest)
        return None


class Ready:
    """Requests that are made before they are due."""

    def __init__(self, make: Callable[[], bytes]) -> None:
        self._make = make
        self._made: deque[bytes] = deque()
        self.late = 0
        """Requests that were made when they were due."""

    def fill(self, count: int) -> None:
        """Until there are so many."""
        while len(self._made) < count:
            self._made.append(self._make())

    def take(self) -> bytes:
        if self._made:
            return self._made.popleft()
        self.late += 1
        return self._make()


class Session:
    """A server that was looked at, and prompts for it."""

    def __init__(self, plan: Plan, say: Callable[[str], None] = lambda text: None) -> None:
        self.plan, self.say = plan, say
        self.address = target.resolve(plan.place)
        self.client = target.Client(plan.place, plan.trust, plan.headers)
        say(f"looking at {plan.place.root}")
        self.server = target.look(self.client)
        model = plan.model or (self.server.models[0] if self.server.models else None)
        if model is None:
            raise KvctlError(f"{plan.place.root} names no model", hint="--model NAME")
        if plan.model is not None and self.server.models and plan.model not in self.server.models:
            raise KvctlError(f"{plan.place.root} does not serve {plan.model[:80]}",
                             hint="it serves " + ", ".join(self.server.models[:5]))  # fmt: skip
        self.wire = asks.Wire(plan.place, plan.path, model, self.server.engine, plan.headers, plan.extra)
        self.seed = secrets.randbits(48) if plan.seed is None else plan.seed
        self.vocabulary, self.counted_by = self._vocabulary()
        self.notes: list[str] = []

    def _vocabulary(self) -> tuple[words.Vocabulary, str]:
        self.say("counting tokens of words")
        count, how = counter(self.client, self.wire)
        return words.learn(count, words.candidates(texts.read(texts.samples()[0]))), how

    def check(self) -> None:
        """Refuses what the server cannot take, and finds out whether it counts tokens in streams.

        Raises:
            KvctlError: it cannot.

        """
        plan, limit = self.plan, self.server.context
        asked = plan.input_tokens + plan.output_tokens
        if limit is not None and asked > limit:
            raise KvctlError(f"{plan.input_tokens:,} tokens in and {plan.output_tokens:,} out are {asked:,}, and the server takes {limit:,}",
                             hint="fewer --input-tokens or --output-tokens")  # fmt: skip
        self.say("trying one request")
        one = self._tried()
        if one.fault is not None and one.status == 400 and self.wire.usage:
            # Some servers refuse to be asked for usage in a stream (rocketride-server#1780).
            self.wire = self.wire.replace(usage=False)
            again = self._tried()
            if again.fault is None:
                self.notes.append("the server refuses stream_options: tokens of answers are counted by events")
            one = again
        if one.fault is not None:
            raise KvctlError(f"the first request failed: {one.fault.kind}: {one.fault.message}",
                             hint="--endpoint completions or chat, --model, --api-key-env?")  # fmt: skip
        found = one.usage.prompt if one.usage is not None else None
        if found is not None and abs(found - plan.input_tokens) > 0.01 * plan.input_tokens:
            self.notes.append(
                f"prompts of {plan.input_tokens:,} tokens were asked for, and the server counts {found:,}"
            )

    def _tried(self) -> Exchange:
        """One request that counts for nothing."""
        done: list[Exchange] = []
        lot = random.Random(self.seed ^ 1)
        data = self.wire.request(
            self.wire.body(self.vocabulary.prompt(self.plan.input_tokens, lot), min(4, self.plan.output_tokens))
        )
        once = load.Closed(1, lambda number: data, load.Length(requests=1), done.append)
        loop = self.loop()
        try:
            loop.run(once)
        finally:
            loop.close()
        return done[0]

    def _prime(self, beginnings: Sequence[str], lot: random.Random) -> None:
        """A request with each beginning, one after the other: those that are measured do not race to be its first (sglang#37359).

        Raises:
            KvctlError: one fails.

        """
        done: list[Exchange] = []
        data = [
            self.wire.request(self.wire.body(self.vocabulary.prompt(self.plan.input_tokens, lot, one), 1))
            for one in beginnings
        ]
        loop = self.loop()
        try:
            loop.run(load.Closed(1, lambda number: data[number], load.Length(requests=len(data)), done.append))
        finally:
            loop.close()
        bad = next((one.fault for one in done if one.fault is not None), None)
        if bad is not None:
            raise KvctlError(f"filling the cache: {bad.kind}: {bad.message}")

    def loop(self) -> Loop:
        """A new one, without connections."""
        plan = self.plan
        return Loop(self.address, tls=plan.trust.context() if plan.place.secure else None, patience=plan.patience)

    def run(
        self, step: Step, number: int, keep: Callable[[Exchange], None] = lambda exchange: None,
        say: Callable[[str], None] = lambda text: None,
        show: Callable[[Figures, load.Load, Loop, metrics.Watch | None], None] = lambda *parts: None,
    ) -> Outcome:  # fmt: skip
        """One load; `keep` is shown every exchange as it ends, `show` once where the figures will be. On Ctrl-C what came until then is the outcome, which says so."""
        plan = self.plan
        lot = random.Random(f"{self.seed} {number}")
        beginnings = (
            [self.vocabulary.prompt(plan.prefix_tokens, lot) for _ in range(plan.groups)]
            if plan.prefix_tokens
            else [""]
        )
        if plan.prefix_tokens:
            self.say(f"{step.words}: filling the cache with {plural(plan.groups, 'beginning')}")
            self._prime(beginnings, lot)

        def make() -> bytes:
            prompt = self.vocabulary.prompt(plan.input_tokens, lot, lot.choice(beginnings))
            return self.wire.request(self.wire.body(prompt, plan.output_tokens))

        ready, figures, steady = Ready(make), Figures(plan.slo), Figures(plan.slo)
        asked = plan.output_tokens if self.wire.lengthens else None
        sent_by: dict[str, Any] = {}

        def told(exchange: Exchange) -> None:
            exchange.data = b""  # the next need the room
            key = exchange.key
            assert isinstance(key, load.Key)
            measured = key.phase == load.MEASURED
            if measured:
                figures.add(exchange, asked)
            else:
                figures.see(exchange)
            if measured and exchange.good and not source.stopped:
                steady.add(exchange, asked)
            keep(exchange)
            given_up = self._too_many(figures)
            if given_up is not None:
                sent_by.setdefault("given_up", given_up)
                source.stop()

        warm = plan.warm if plan.warm is not None else max(8, step.at_once or 0)
        source = self._source(step, lambda number: ready.take(), told, warm, lot)
        ready.fill(_AHEAD + (step.at_once or 0))
        watch = metrics.Watch(self.client, self.server.engine, plan.every) if self.server.metrics else None
        loop = self.loop()
        interrupted = False
        with undisturbed():
            try:
                loop.open(min(step.at_once or 8, 4096))
                if watch is not None:
                    watch.start()
                show(figures, source, loop, watch)
                began, cpu = time.monotonic(), time.thread_time()

                def tick(now: int) -> None:
                    ready.fill(_AHEAD)
                    phase = "warming up" if not source.began else f"{figures.count:,} measured"
                    say(f"{step.words}: {phase}, {source.live:,} under way")

                try:
                    loop.run(source, tick)
                except KeyboardInterrupt:
                    interrupted = True
                share = (time.thread_time() - cpu) / max(time.monotonic() - began, 1e-9)
            except OSError as error:
                raise KvctlError(f"{plan.place.root}: {str(error).lower()}") from None
            finally:
                loop.close()
                if watch is not None:
                    watch.stop()
        return self._outcome(step, source, figures, steady, watch, share, sent_by.get("given_up"), interrupted)

    def _source(
        self, step: Step, make: load.Make, told: Callable[[Exchange], None], warm: int, lot: random.Random
    ) -> load.Closed | load.Open:
        length, drain = self.plan.length_of(step), self.plan.patience.silence
        if step.at_once is not None:
            return load.Closed(step.at_once, make, length, told, warm, drain)
        assert step.rate is not None
        times: Iterator[float] = (
            load.constant(step.rate)
            if step.burstiness is None
            else load.gamma(step.rate, step.burstiness, lot.getrandbits(48))
        )
        return load.Open(times, make, length, told, warm, drain)

    def _too_many(self, figures: Figures) -> str | None:
        """Why a load is given up."""
        failed, count = figures.faults.total(), figures.count
        if count >= 20 and failed > count * self.plan.most_errors / 100:
            return f"{failed:,} of {count:,} requests failed, and {self.plan.most_errors:g}% may"
        return None

    def _outcome(
        self, step: Step, source: load.Load, figures: Figures, steady: Figures, watch: metrics.Watch | None, cpu: float,
        given_up: str | None, interrupted: bool,
    ) -> Outcome:  # fmt: skip
        whole = source.began, source.stopped or time.monotonic_ns()
        samples = tuple(watch.samples) if watch is not None else ()
        seen = verdict.window(samples, *whole)
        counters = {
            name: found.value for name in metrics.COUNTERS if (found := metrics.growth(samples, name)) is not None
        }
        return Outcome(
            step, figures, steady, seen, verdict.verdict(figures, seen, cpu=cpu, at_once=step.at_once), samples, counters, source.number,
            max(0, whole[1] - whole[0]) / SECOND, _rate(figures, whole), cpu, given_up, interrupted, source.began,
        )  # fmt: skip


def _rate(figures: Figures, whole: tuple[int, int]) -> float | None:
    """Output tokens a second over the whole seconds of a window; events stand for tokens, by how many each carries."""
    first, last = -(-whole[0] // SECOND), whole[1] // SECOND
    each = figures.tokens_a_chunk
    if last - first < 2 or each is None:
        return None
    return each * sum(figures.by_second.get(second, 0) for second in range(first, last)) / (last - first)


@contextmanager
def undisturbed() -> Iterator[None]:
    """The collector of garbage waits: it would stop the clock's reader in the middle."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
