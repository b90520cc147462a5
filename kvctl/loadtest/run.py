"""One load test: look at the server, build prompts, send, watch, and add up."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import Callable, Mapping, Sequence

from kvctl import texts
from kvctl.errors import KvctlError
from kvctl.loadtest import asks, caches, drive, load, metrics, target, verdict, words, workers
from kvctl.loadtest.capacity import Sizing
from kvctl.loadtest.counting import counter
from kvctl.loadtest.exchange import Exchange
from kvctl.loadtest.figures import Figures
from kvctl.loadtest.live import Live
from kvctl.loadtest.loop import Loop
from kvctl.loadtest.plan import Plan, Step
from kvctl.loadtest.work import Given, Kit, Traced, Work
from kvctl.record import Record
from kvctl.units import plural

SECOND = load.SECOND
_ROUNDS = 2
"""So many times the median request has a load to be whole for, or the long ones among its requests are not in it."""


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
    began: int = 0
    """When the first measured request was due; 0: there was none."""

    @property
    def whole_events(self) -> list[float]:
        """Events with output a second, in each whole slice of the time that the load was whole, whosever they are."""
        slices = self.figures.slices
        counts = slices.counts(self.began, self.began + round(self.seconds * SECOND)) if self.began else []
        return [count * SECOND / slices.width for count in counts]

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


class Session:
    """A server that was looked at, and prompts for it."""

    def __init__(self, plan: Plan, say: Callable[[str], None] = lambda text: None) -> None:
        self.plan, self.say = plan, say
        self.address = target.resolve(plan.place)
        self.client = target.Client(plan.place, plan.trust, plan.headers, self.address)
        self.client.retries = plan.retries
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
        if isinstance(work, Given) and work.left_out:
            note = f"{work.path}: in {plural(work.left_out, 'conversation')} nobody asks anything; left out"
            if note not in self.notes:
                self.notes.append(note)
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
        """For requests that count for nothing."""
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
            loop.run(
                load.Closed(
                    1, lambda number: wanted[number], load.Length(requests=len(wanted)), done.append, drain=self.plan.patience.silence,
                    retries=self.plan.retries,
                )
            )  # fmt: skip
        finally:
            loop.close()
        return done

    def loop(self) -> Loop:
        """A new one, without connections."""
        plan = self.plan
        return Loop(self.address, tls=plan.trust.context() if plan.place.secure else None, patience=plan.patience)

    def run(
        self, step: Step, number: int, keep: drive.Keep | None = None, say: Callable[[str], None] = lambda text: None,
        live: Live | None = None,
    ) -> Outcome:  # fmt: skip
        """One load; `keep` is given a line for every exchange as it ends, and `live` what there is to show meanwhile. On Ctrl-C what came
        until then is the outcome, which says so.

        Raises:
            KvctlError: the server cannot be reached any more, or this system does not allow such a load.

        """
        plan = self.plan
        if plan.reset_cache:
            caches.reset(self.client, self.server)
        job = drive.Job(
            plan.replace(launch=None, sizing=Sizing()), step, number, self.address, self._wire_of(step.work), self._vocabulary(step.work),
            self.server.context, self.seed, keep is not None,
        )  # fmt: skip
        beginnings = step.work.source(job.kit()).prime()
        if beginnings:
            self.say(f"{step.words}: filling the cache with {plural(len(beginnings), 'beginning')}")
            self._prime(beginnings)
        watch = (
            metrics.Watch(self.client, self.server.engine, plan.every, cells=self.cells)
            if self.server.metrics
            else None
        )

        live = Live() if live is None else live
        live.watch(watch)

        def tick(seen: drive.Seen) -> None:
            live.tick(seen)
            phase = f"{seen.measured:,} measured" if seen.began else "warming up"
            say(f"{step.words}: {phase}, {seen.live:,} under way")

        start = watch.start if watch is not None else lambda: None
        count = min(plan.processes, step.at_once or plan.processes)
        try:
            if count == 1:
                driven = drive.put(job, keep or (lambda line: None), tick, start, live.inside)
            else:
                driven = workers.together(job, count, keep or (lambda line: None), tick, start)
        finally:
            if watch is not None:
                watch.stop()
        return self._outcome(step, driven, watch)

    def _outcome(self, step: Step, driven: drive.Driven, watch: metrics.Watch | None) -> Outcome:
        whole = driven.began, driven.stopped
        samples = tuple(watch.samples) if watch is not None else ()
        seen = verdict.window(samples, *whole)
        figures, cpu = driven.figures, driven.cpu
        counters = {
            name: found.value for name in metrics.COUNTERS if (found := metrics.growth(samples, name)) is not None
        }
        return Outcome(
            step, figures, driven.steady, seen, verdict.verdict(figures, seen, cpu=cpu, at_once=step.at_once), samples, counters, driven.sent,
            max(0, whole[1] - whole[0]) / SECOND, _rate(figures, whole), cpu, driven.given_up, driven.interrupted, driven.retried, driven.cut,
            None if watch is None else watch.watched, began=driven.began,
        )  # fmt: skip


def _rate(figures: Figures, whole: tuple[int, int]) -> float | None:
    """Output tokens a second over the whole seconds of a window; events stand for tokens, by how many each carries."""
    rate, each = figures.slices.rate(*whole), figures.tokens_a_chunk
    return None if rate is None or each is None else each * rate
