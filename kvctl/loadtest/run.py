"""One load test: look at the server, build prompts, send, watch, and add up."""

from __future__ import annotations

import gc
import json
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvctl import texts
from kvctl.errors import KvctlError
from kvctl.loadtest import asks, caches, load, metrics, target, verdict, words
from kvctl.loadtest.capacity import Sizing
from kvctl.loadtest.counting import counter
from kvctl.loadtest.exchange import Exchange
from kvctl.loadtest.figures import Figures, Slo
from kvctl.loadtest.loop import Loop, Patience
from kvctl.loadtest.work import Kit, Traced, Work
from kvctl.record import Record
from kvctl.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvctl.loadtest.launch import Launch

SECOND = load.SECOND
_FEWEST = 20
"""Requests of which some fail, before a load is given up in its middle."""
_ROUNDS = 2
"""So many times the median request has a load to be whole for, or the long ones among its requests are not in it."""
_AHEAD = 64
"""Requests that are ready before they are due, beside one for each that is under way."""
_MOST_READY = 256 * 2**20
"""Bytes of them."""


class Step(Record):
    """One load: requests of a kind, so many at once, so many a second, or (neither) by their own times."""

    work: Work
    at_once: int | None = None
    """Requests that are kept under way; conversations, where those are what is sent."""
    rate: float | None = None
    """A second."""
    last_rate: float | None = None
    """At the end, where the rate rises or falls."""
    burstiness: float | None = None
    """Of the gaps; None: they are even."""
    beside: str = ""
    """In what requests of this load differ from those of others."""

    @property
    def words(self) -> str:
        """ "16 at once", "5 a second", "1 to 10 a second, 4,096 in"."""
        if self.at_once is not None:
            pace = f"{self.at_once:,} at once"
        elif self.rate is None:
            pace = "by its times"
        elif self.last_rate is None:
            pace = f"{self.rate:g} a second"
        else:
            pace = f"{self.rate:g} to {self.last_rate:g} a second"
        return f"{pace}, {self.beside}" if self.beside else pace

    def to_dict(self) -> dict[str, Any]:
        out = {name: getattr(self, name) for name in ("at_once", "rate", "last_rate", "burstiness")}
        return out | {"words": self.words, "work": self.work.to_dict()}


class Plan(Record):
    """What is to be done to a server."""

    place: target.Place
    steps: tuple[Step, ...]
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
    retries: int = 0
    """Times that a request is sent again which the server turned away."""
    reset_cache: bool = False
    """Whether the server is told to forget what it keeps of prompts, before each load."""
    launch: Launch | None = None
    """What is started for the test."""
    sizing: Sizing = Sizing()
    """What is known of how the server was started."""
    notes: tuple[str, ...] = ()

    def warm_of(self, step: Step) -> int:
        """Requests of the warm-up."""
        warm = self.warm if self.warm is not None else max(8, step.at_once or 0)
        count = step.work.count
        return warm if count is None or self.warm is not None else min(warm, count // 4)

    def length_of(self, step: Step) -> load.Length:
        """As asked, else all that there are; else four requests for each that is under way, and enough to tell percentiles from."""
        count = step.work.count
        if count is not None:
            left = max(1, count - self.warm_of(step))
            asked = self.length or load.Length()
            return asked.replace(requests=left if asked.requests is None else min(asked.requests, left))
        return self.length or load.Length(requests=max(24 if self.limit else 50, 4 * (step.at_once or 0)))


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
    retried: int = 0
    """Times that a request was sent again which the server had turned away."""
    cut: int = 0
    """Requests of another length than drawn: what stands around any prompt is longer, or the server's context shorter."""
    watched: metrics.Watched | None = None
    """Of looks at the server's metrics; None where it has none."""
    remarks: tuple[str, ...] = ()
    """What has to be known beside the figures."""

    @property
    def designed(self) -> float | None:
        """Share of input tokens that had been sent or written before, and may be found in the server's cache; None where none were meant to."""
        figures = self.figures
        return figures.known / figures.tokens_in if figures.with_known and figures.tokens_in else None

    @property
    def refused(self) -> str | None:
        """Why nothing is said of times while the load was whole: too few of its requests begin and end in it."""
        e2e = self.figures.times["e2e"]
        rounds = self.seconds * SECOND / max(e2e.percentile(50).value, 1) if e2e.count else 0.0
        return (
            None
            if rounds >= _ROUNDS
            else f"the load was whole for {rounds:.1f} requests one after the other, and {_ROUNDS} are needed"
        )

    @property
    def ttft_gap(self) -> tuple[float, float, int] | None:
        """First-token time by the server's own histogram and by the client, on average in seconds, and of how many requests, the
        warm-up's among them; None where it does not say, or others load it too."""
        figures, counted = self.figures, self.counters.get("ttft_requests")
        if not counted or counted != figures.answered or "ttft_seconds" not in self.counters:
            return None
        return self.counters["ttft_seconds"] / counted, figures.waited / figures.answered / SECOND, figures.answered

    @property
    def counted_tokens_an_event(self) -> float | None:
        """Output tokens by the engine's counter for each event that came, over the whole load; None where it does not say."""
        counted = self.counters.get("output_tokens")
        return counted / self.figures.events if counted and self.figures.events else None

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

    def __init__(self, make: Callable[[], load.Ask | None]) -> None:
        self._make = make
        self._made: deque[load.Ask] = deque()
        self._bytes = 0
        self.late = 0
        """Requests that were made when they were due."""

    def fill(self, count: int) -> None:
        """Until there are so many, or no more, or they take too much memory."""
        while len(self._made) < count and self._bytes < _MOST_READY:
            ask = self._make()
            if ask is None:
                return
            self._made.append(ask)
            self._bytes += len(ask.data)

    def take(self) -> load.Ask:
        if self._made:
            ask = self._made.popleft()
            self._bytes -= len(ask.data)
            return ask
        self.late += 1
        made = self._make()
        assert made is not None, "more requests than there are"
        return made


class Session:
    """A server that was looked at, and prompts for it."""

    def __init__(self, plan: Plan, say: Callable[[str], None] = lambda text: None) -> None:
        self.plan, self.say = plan, say
        self.address = target.resolve(plan.place)
        self.client = target.Client(plan.place, plan.trust, plan.headers, self.address)
        say(f"looking at {plan.place.root}")
        self.server = target.look(self.client)
        model = plan.model or (self.server.models[0] if self.server.models else None)
        if model is None:
            raise KvctlError(f"{plan.place.root} names no model", hint="--model NAME")
        # transformers loads what it is asked for.
        listed = plan.model in self.server.models or not self.server.models or self.server.engine == "transformers"
        if plan.model is not None and not listed:
            raise KvctlError(f"{plan.place.root} does not serve {plan.model[:80]}",
                             hint="it serves " + ", ".join(self.server.models[:5]))  # fmt: skip
        self.wire = asks.Wire(plan.place, plan.path, model, self.server.engine, plan.headers, plan.extra)
        self.seed = secrets.randbits(48) if plan.seed is None else plan.seed
        self.notes: list[str] = []
        self.counted_by: str | None = None
        """How tokens of prompts were counted; None where nobody had to."""
        self._learned: dict[str, words.Vocabulary] = {}
        self.steps = tuple(step.replace(work=self._fitting(step.work)) for step in plan.steps)
        self.vocabulary = self._vocabulary(self.steps[0].work)
        self.cells: int | None = None
        """Of llama.cpp's cache, where that is known."""

    def _fitting(self, work: Work) -> Work:
        """Without what the server cannot take, where some of it may be left out."""
        if not isinstance(work, Traced):
            return work
        found = work.fitting(self.server.context)
        note = (
            f"{plural(found.left_out, 'request')} of {work.path} left out: longer than the {found.limit:,} tokens that the server takes"
            if found.limit
            else ""
        )
        if note and note not in self.notes:
            self.notes.append(note)
        return found

    def _vocabulary(self, work: Work) -> words.Vocabulary | None:
        """Words to make its prompts of; what stands around a prompt depends on what else is in the body."""
        if not work.made:
            return None
        key = json.dumps(dict(work.extra), sort_keys=True)
        if key not in self._learned:
            self.say("counting tokens of words")
            count, self.counted_by = counter(self.client, self._wire_of(work))
            self._learned[key] = words.learn(count, words.candidates(texts.read(texts.samples()[0])))
        return self._learned[key]

    def _wire_of(self, work: Work) -> asks.Wire:
        return self.wire.replace(full_length=not work.natural, extra={**work.extra, **self.wire.extra})

    def _kit(self, work: Work, lot: random.Random) -> Kit:
        return Kit(self._wire_of(work), self._vocabulary(work), lot, self.server.context)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, with its answer; where lengths have no bound, the longest that the server takes, or 0."""
        found = [step.work.longest for step in self.steps]
        known = [one for one in found if one is not None]
        return max(known) if len(known) == len(found) else self.server.context or 0

    def check(self) -> None:
        """Refuses what the server cannot take, and finds out whether it counts tokens in streams.

        Raises:
            KvctlError: it cannot.

        """
        limit = self.server.context
        for work in (step.work for step in self.steps):
            if limit is not None and work.longest is not None and work.longest > limit:
                raise KvctlError(f"{work.words}: up to {work.longest:,} tokens, and the server takes {limit:,}",
                                 hint="fewer --input-tokens or --output-tokens")  # fmt: skip
        self.say("trying one request")
        one = self._tried()
        if one.fault is not None and one.status in (400, 422) and self.steps[0].work.extra.get("tools"):
            # vLLM lets a model choose a tool only where it was started for that; definitions are read all the same.
            self.wire = self.wire.replace(extra={**self.wire.extra, "tool_choice": "none"})
            again = self._tried()
            if again.fault is None:
                self.notes.append(f"tools are defined, and not to be called: {one.fault.message}")
            one = again
        if one.fault is not None and one.status in (400, 422) and self.wire.usage:
            # Some servers refuse to be asked for usage in a stream (rocketride-server#1780).
            self.wire = self.wire.replace(usage=False)
            again = self._tried()
            if again.fault is None:
                self.notes.append("the server refuses stream_options: tokens of answers are counted by events")
            one = again
        if one.fault is not None:
            raise KvctlError(f"the first request failed: {one.fault.kind}: {one.fault.message}",
                             hint="--endpoint completions or chat, --model, --api-key-env?")  # fmt: skip
        if (
            one.usage is not None
            and (one.usage.completion or 0) > len(one.stamps)
            and self.wire.engine in asks.COUNT_EACH
        ):
            self.wire = self.wire.replace(each=True)  # it drafts tokens ahead: which event carries how many?
        found = one.usage.prompt if one.usage is not None else None
        asked = one.key.ask.tokens if isinstance(one.key, load.Key) else None
        if found is not None and asked is not None and abs(found - asked) > 0.01 * asked:
            self.notes.append(f"a prompt of {asked:,} tokens was made, and the server counts {found:,}")

    def _tried(self) -> Exchange:
        """One request that counts for nothing."""
        work = self.steps[0].work
        kit = self._kit(work, random.Random(self.seed ^ 1)).replace(most_out=4)
        ask = work.source(kit).next()
        assert ask is not None
        return self._sent([ask])[0]

    def _prime(self, wanted: Sequence[load.Ask]) -> None:
        """Requests one after the other, before those that are measured: these do not race to be the first of a beginning (sglang#37359).

        Raises:
            KvctlError: one fails.

        """
        bad = next((one.fault for one in self._sent(wanted) if one.fault is not None), None)
        if bad is not None:
            raise KvctlError(f"filling the cache: {bad.kind}: {bad.message}")

    def _sent(self, wanted: Sequence[load.Ask]) -> list[Exchange]:
        """Some requests, one after the other, that count for nothing."""
        done: list[Exchange] = []
        loop = self.loop()
        try:
            loop.run(load.Closed(1, lambda number: wanted[number], load.Length(requests=len(wanted)), done.append))
        finally:
            loop.close()
        return done

    def loop(self) -> Loop:
        """A new one, without connections."""
        plan = self.plan
        return Loop(self.address, tls=plan.trust.context() if plan.place.secure else None, patience=plan.patience)

    def run(
        self, step: Step, number: int, keep: Callable[[Exchange], None] = lambda exchange: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> Outcome:  # fmt: skip
        """One load; `keep` is shown every exchange as it ends. On Ctrl-C what came until then is the outcome, which says so."""
        plan = self.plan
        lot = random.Random(f"{self.seed} {number}")
        if plan.reset_cache:
            caches.reset(self.client, self.server)
        making = step.work.source(self._kit(step.work, lot))
        beginnings = making.prime()
        if beginnings:
            self.say(f"{step.words}: filling the cache with {plural(len(beginnings), 'beginning')}")
            self._prime(beginnings)
        ready, figures, steady = Ready(making.next), Figures(plan.slo), Figures(plan.slo)
        sent_by: dict[str, Any] = {}

        def told(exchange: Exchange) -> None:
            exchange.data = b""  # the next need the room
            key = exchange.key
            assert isinstance(key, load.Key)
            measured = key.phase == load.MEASURED
            if measured:
                figures.add(exchange, key.ask.asked, key.ask.known, key.ask.tokens)
            else:
                figures.see(exchange)
            if measured and exchange.good and not source.stopped:
                steady.add(exchange, key.ask.asked, key.ask.known, key.ask.tokens)
            keep(exchange)
            given_up = self._too_many(figures)
            if given_up is not None:
                sent_by.setdefault("given_up", given_up)
                source.stop()

        ready.fill(_AHEAD + (step.at_once or 0))
        watch = (
            metrics.Watch(self.client, self.server.engine, plan.every, cells=self.cells)
            if self.server.metrics
            else None
        )
        loop = self.loop()
        interrupted = False
        with undisturbed():
            try:
                loop.open(min(step.at_once or 8, 4096))
                if watch is not None:
                    watch.start()
                # Its clock begins as it is made: not before there are connections.
                source = self._source(step, lambda number: ready.take(), told, lot)
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
        given_up = sent_by.get("given_up") or (None if interrupted else self._too_many(figures, 1))
        found = self._outcome(step, source, figures, steady, watch, share, given_up, interrupted)
        return found.replace(retried=source.retried, cut=making.cut)

    def _source(
        self, step: Step, make: load.Make, told: Callable[[Exchange], None], lot: random.Random
    ) -> load.Closed | load.Open:
        plan = self.plan
        length, warm, drain = plan.length_of(step), plan.warm_of(step), plan.patience.silence
        if step.at_once is not None:
            return load.Closed(step.at_once, make, length, told, warm, drain, plan.retries)
        return load.Open(self._times(step, length, lot), make, length, told, warm, drain, retries=plan.retries)

    @staticmethod
    def _times(step: Step, length: load.Length, lot: random.Random) -> Iterator[float]:
        own = step.work.times()
        if step.rate is None:
            assert own is not None
            return own
        if step.last_rate is not None:
            assert length.seconds is not None
            return load.ramp(step.rate, step.last_rate, length.seconds)
        if step.burstiness is None:
            return load.constant(step.rate)
        return load.gamma(step.rate, step.burstiness, lot.getrandbits(48))

    def _too_many(self, figures: Figures, least: int = _FEWEST) -> str | None:
        """Why a load is given up; of fewer requests than `least` nothing is said."""
        failed, count = figures.faults.total(), figures.count
        if count >= least and failed > count * self.plan.most_errors / 100:
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
            max(0, whole[1] - whole[0]) / SECOND, _rate(figures, whole), cpu, given_up, interrupted,
            watched=None if watch is None else watch.watched,
        )  # fmt: skip


def _rate(figures: Figures, whole: tuple[int, int]) -> float | None:
    """Output tokens a second over the whole seconds of a window; events stand for tokens, by how many each carries."""
    rate, each = figures.slices.rate(*whole), figures.tokens_a_chunk
    return None if rate is None or each is None else each * rate


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
