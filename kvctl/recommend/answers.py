"""The one pure function of `kvctl recommend`: a request in, the best way to serve it and two that differ in kind out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvctl.formats import BF16, FP32, DType
from kvctl.recommend.binding import binding
from kvctl.recommend.candidate import Candidate, Rejection
from kvctl.recommend.checkpoints import loaded_from
from kvctl.recommend.fits import search
from kvctl.recommend.judge import ANY_LOSS, Judge, Judged, order
from kvctl.recommend.nearest import Lack, Near, nearest
from kvctl.recommend.passed_over import PassedOver, passed_over
from kvctl.recommend.prices import Prices
from kvctl.recommend.quality import Measured, quality_of
from kvctl.record import Record
from kvctl.units import format_rate, format_seconds, plural

if TYPE_CHECKING:
    from kvctl.recommend.advice import Advice
    from kvctl.recommend.request import Ask
    from kvctl.speed.calibrate import Measurement

FASTER = 0.9
"""Share of the best's time that another way has to stay under to count as faster."""
LESS = 0.75
"""Share of the best's cost that another way has to stay under to count as cheaper; half as many tokens for it are the least."""


class Known(Record):
    """What is known beside the request."""

    prices: Prices = Prices()
    measured: tuple[Measured, ...] = ()
    """Losses measured on this model."""
    measurements: tuple[Measurement, ...] = ()
    """Speeds measured on such hardware."""
    notes: tuple[str, ...] = ()
    """What of all that could not be read."""


class Answer(Record):
    """One way to serve, and why."""

    kind: str
    """best, ready to run, cheaper, faster, higher quality, more throughput or another engine."""
    judged: Judged
    why: tuple[str, ...]
    binds: str
    """What runs out first."""
    change: str
    """What to change next for more."""


class Left(Record):
    """Candidates that fit and were not chosen, by what they miss."""

    why: str
    count: int
    nearest: Judged
    """The best of them."""


class Recommendation(Record):
    """All of it."""

    ask: Ask
    answers: tuple[Answer, ...]
    """None where nothing meets the request."""
    left: tuple[Left, ...]
    rejections: tuple[Rejection, ...]
    tried: int
    fitting: int
    nearest: tuple[Near, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    limit: float
    """Percent that may be lost."""
    impossible: tuple[str, ...] = ()
    """Objectives that nothing meets even with one request alone, in words."""
    best_missing: Judged | None = None
    """Where nothing meets the request: what comes nearest to it on this hardware."""
    passed_over: tuple[PassedOver, ...] = ()
    """Measured speeds that are not used; they are among the notes, too."""
    unread: tuple[str, ...] = ()
    """Notes on what of them could not be read."""

    @property
    def met(self) -> bool:
        return bool(self.answers)

    @property
    def unknown(self) -> str:
        """What is missing where no engine that runs here could be judged at all; empty where one could."""
        reasons = [one for one in self.rejections if one.kind != "engine"]
        if self.fitting or not reasons or any(one.kind != "unknown" for one in reasons):
            return ""
        return reasons[0].why.removeprefix(f"{self.ask.spec.id}: ")


def recommend(ask: Ask, known: Known | None = None, *, advise: bool = True) -> Recommendation:
    """The answer to a request; the same for the same request."""
    known = known or Known()
    judge = judge_of(ask, known)
    found = search(ask)
    judged = [judge.judge(one, place) for place, one in enumerate(found.candidates)]
    ranked = sorted(judged, key=lambda one: order(ask.goal, one))
    good = [one for one in ranked if one.meets]
    answers = _answers(ask, good)
    unused = passed_over(ask, known.measurements, judge.told, judged)
    notes = [*ask.notes, *known.notes, *(one.words for one in unused)]
    if ask.max_quality_loss is None and not (ask.pins.weights and ask.pins.kv_dtype):
        named = ", but for those named" if ask.pins.weights or ask.pins.kv_dtype else ""
        notes.append(
            f"formats that lose more than {judge.limit:g}% are left out{named}; --max-quality-loss sets another bound"
        )
    near: tuple[Near, ...] = ()
    impossible: tuple[str, ...] = ()
    if not good:
        impossible = _impossible(ask, judge, judged)
        near = (
            ()
            if impossible
            else (*_slower(ask, known, ranked), *nearest(ask, _allowed(known), _lack(ask, known, ranked)))
        )
    advice: tuple[Advice, ...] = ()
    if answers and advise:
        from kvctl.recommend.cases import advice_for

        advice = advice_for(answers[0].judged, ask, judge, found)
    return Recommendation(
        ask, answers, _left(ask, ranked, answers), found.rejections, found.tried, len(found.candidates), near, advice, tuple(notes),
        judge.limit, impossible, ranked[0] if ranked and not good else None, unused, known.notes,
    )  # fmt: skip


_TRIED = 8
"""Candidates, those that serve most first, that lower rates are tried with."""


def _slower(ask: Ask, known: Known, ranked: Sequence[Judged]) -> tuple[Near, ...]:
    """The highest rate, to two digits, at which something here meets the request."""
    if ask.rate is None:
        return ()
    best: tuple[float, Candidate] | None = None
    able = [
        one
        for one in ranked
        if one.speed is not None
        and not one.candidate.queues
        and not any(line.startswith("quality") for line in one.missed)
    ]
    for one in sorted(able, key=lambda one: -_served(one))[:_TRIED]:
        low, high = best[0] if best is not None else 0.0, ask.rate
        while high - low > 0.005 * high and high > 1e-4:
            rate = (low + high) / 2
            if judge_of(ask.replace(rate=rate), known).meets(one.candidate):
                low, best = rate, (rate, one.candidate)
            else:
                high = rate
    if best is None:
        return ()
    step = 10.0 ** (math.floor(math.log10(best[0])) - 1)
    rate = math.floor(best[0] / step) * step
    return (Near("rate", f"--rate {rate:.6g}", ask.replace(rate=rate), best[1]),)


def _served(one: Judged) -> float:
    """Requests a second that it can serve, by the likeliest figure."""
    return one.speed.request_rate.mid if one.speed is not None else 0.0


def _lack(ask: Ask, known: Known, ranked: Sequence[Judged]) -> Lack:
    """What is short: quality where something would meet all else, GPUs for a rate, speed where something holds the request."""
    lossy = (
        None
        if any(not line.startswith("quality") for one in ranked[:1] for line in one.missed)
        else _allowed(known, lossy=True)
    )
    rates = [one.speed.request_rate.high for one in ranked if one.speed is not None and not one.candidate.queues]
    few = 0
    if ask.rate is not None and rates and max(rates) > 0:
        few = math.ceil(ask.all_gpus * min(ask.rate / max(rates), 1e6))
    slow = any(
        not one.candidate.queues and all(not line.startswith("quality") for line in one.missed) for one in ranked
    )
    return Lack(lossy, few, slow)


def _allowed(known: Known, *, lossy: bool = False) -> Callable[[Ask, Candidate], bool]:
    """Whether a candidate of a changed request meets that; `lossy`: whatever it loses."""
    last: list[tuple[Ask, Judge]] = []

    def allowed(ask: Ask, candidate: Candidate) -> bool:
        if not last or last[0][0] is not ask:
            judge = judge_of(ask, known)
            judge.limit = ANY_LOSS if lossy else judge.limit
            last[:] = [(ask, judge)]
        return last[0][1].meets(candidate)

    return allowed


def judge_of(ask: Ask, known: Known) -> Judge:
    """What judges the candidates of a request."""
    dtype = ask.spec.dtype
    return Judge(
        ask,
        quality_of(ask.spec, known.measured),
        known.prices,
        BF16 if not isinstance(dtype, DType) or dtype is FP32 else dtype,
        known.measurements,
    )


# -- what differs in kind ----------------------------------------------------------------------


def _answers(ask: Ask, good: Sequence[Judged]) -> tuple[Answer, ...]:
    """The best, and two that differ from it in kind: ready to run, cheaper, faster, of higher quality, or another engine's."""
    if not good:
        return ()
    best = good[0]
    chosen: list[tuple[str, Judged]] = [("best", best)]
    made = best.candidate.deployment.made == "make"
    kinds: tuple[tuple[str, str, Callable[[Judged], bool]], ...] = (
        ("ready to run", ask.goal, lambda one: made and one.candidate.deployment.made != "make"),
        ("cheaper", "cost", lambda one: 0 < _money(one) <= LESS * _money(best) and _worth(one) >= _worth(best) / 2),
        ("faster", "latency", lambda one: best.speed is not None and one.total < FASTER * best.total and one.time < best.time),
        ("higher quality", "quality", lambda one: _lost(one) < _lost(best) - 0.05),
        ("more throughput", "throughput", lambda one: best.speed is not None and _rate(one) > _rate(best) / FASTER),
        ("another engine", ask.goal, lambda one: one.candidate.deployment.engine.name not in {
            other.candidate.deployment.engine.name for _, other in chosen}),
    )  # fmt: skip
    for kind, goal, differs in kinds:
        if len(chosen) == 3:
            break
        taken = {in_words(one.candidate) for _, one in chosen}
        others = [one for one in good if in_words(one.candidate) not in taken and differs(one)]
        if others:
            chosen.append((kind, min(others, key=lambda one: order(goal, one))))
    return tuple(_answer(kind, one, best, ask) for kind, one in chosen)


def _money(one: Judged) -> float:
    return one.cost.per_hour if one.cost.per_hour is not None else float(one.cost.gpus)


def _worth(one: Judged) -> float:
    """Output tokens for the money, or for a GPU; 1 where no speed is known."""
    return one.rate / _money(one) if one.speed is not None and _money(one) else 1.0


def _lost(one: Judged) -> float:
    """Percent; a test that came out better is no gain of the format."""
    return max(one.loss.percent.mid, 0.0) if one.loss.percent is not None else float("inf")


def _rate(one: Judged) -> float:
    return one.speed.output_rate.mid if one.speed is not None else 0.0


def _answer(kind: str, one: Judged, best: Judged, ask: Ask) -> Answer:
    binds, change = binding(one, ask)
    return Answer(kind, one, tuple(_why(kind, one, best, ask)), binds, change)


def _why(kind: str, one: Judged, best: Judged, ask: Ask) -> list[str]:
    """Sentences for people, each with its numbers."""
    candidate, deployment = one.candidate, one.candidate.deployment
    out = []
    if kind == "best":
        words = {"throughput": f"most output tokens a second to count on ({format_rate(one.rate)}, between the least and the likeliest)",
                 "latency": "the shortest time of a request to count on", "cost": "fewest GPUs or least money",
                 "context": "most tokens in the cache", "quality": "least loss"}[ask.goal]  # fmt: skip
        if ask.rate is not None and one.speed is not None and ask.goal == "throughput":
            words = "serves all that comes, with the fewest GPUs"
        if one.speed is None and ask.goal in ("throughput", "latency"):
            out.append("meets the request; which is fastest is not known here")
        else:
            out.append(f"{words}{'' if words.startswith('serves') else ' of all that meets the request'}")
    elif kind == "ready to run":
        out.append("nothing has to be made first")
    elif kind == "cheaper":
        out.append(f"{plural(one.cost.gpus, 'GPU')} instead of {best.cost.gpus}")
    elif kind == "faster" and one.speed is not None and best.speed is not None:
        out.append(f"a request takes {format_seconds(one.total)} instead of {format_seconds(best.total)}")
    elif kind == "higher quality":
        out.append(f"loses {_percent(one)} instead of {_percent(best)}")
    elif kind == "more throughput":
        out.append(f"{format_rate(_rate(one))} output tokens a second instead of {format_rate(_rate(best))}")
    if candidate.asked is not None:
        out.append(f"holds {plural(candidate.at_once, 'request')} of {ask.context:,} tokens at once")
    else:
        out.append(f"has room for {plural(candidate.usual_at_once, 'usual request')} at once")
        if one.speed is not None and one.speed.sustained:
            out.append(f"{math.ceil(one.speed.concurrency):,} at once are in service at {ask.rate:.4g} a second")
    if deployment.made == "make":
        out.append(f"first: {candidate.checkpoint.how}")
    elif deployment.made == "load":
        out.append(candidate.checkpoint.how)
    elif candidate.checkpoint.name not in (deployment.base, loaded_from(ask.spec)):
        named = deployment.model in candidate.checkpoint.source
        out.append(
            f"loads {deployment.model}, a published checkpoint" + ("" if named else f" ({candidate.checkpoint.source})")
        )
    if one.meets and not one.sure:
        timed = (
            "its times may be missed"
            if ask.ttft is not None or ask.tpot is not None
            else "its formats may lose more than is allowed"
        )
        out.append(f"meets the request at its likeliest figures; at the far end of the ranges {timed}")
    return out


def _percent(one: Judged) -> str:
    return "an unknown share" if one.loss.percent is None else f"{_lost(one):.2g}%"


def _impossible(ask: Ask, judge: Judge, judged: Sequence[Judged]) -> tuple[str, ...]:
    """Objectives that no candidate meets even with one request alone."""
    out = []
    for name, limit in (("ttft", ask.ttft), ("tpot", ask.tpot)):
        if limit is None or not judged:
            continue
        alone = []
        for one in judged:
            if one.speed is None:
                return ()
            alone.append(
                (
                    getattr(
                        judge.prepared(one.candidate).at(
                            ask.prompt, ask.answer, 1.0, before=(one.found or 0.0) * ask.prompt
                        ),
                        name,
                    ).mid,
                    one.place,
                    one,
                )
            )
        least, _, one = min(alone, key=lambda row: row[:2])
        if least > limit:
            out.append(f"{name.upper()} of {format_seconds(limit)}: one request alone has {format_seconds(least)} at best, "
                       f"with {summary(one)}")  # fmt: skip
    return tuple(out)


def summary(one: Judged) -> str:
    """A candidate in a few words."""
    return in_words(one.candidate)


def in_words(candidate: Candidate) -> str:
    """Engine, GPUs and split, formats."""
    deployment, split = candidate.deployment, candidate.split
    where = "on the host"
    if deployment.all_gpus:
        where = f"on {plural(deployment.all_gpus, 'GPU')}"
        parts = [f"TP {split.tensor}"] if split.tensor > 1 else []
        parts += [f"PP {split.pipeline}"] if split.pipeline > 1 else []
        spread = ", experts spread" if deployment.serving.expert_parallel else ""
        parts += [f"attention on {split.data} ranks of their own{spread}"] if split.data > 1 else []
        parts += [f"DCP {split.dealt}"] if split.dealt > 1 else []
        parts += [f"{deployment.replicas} replicas"] if deployment.replicas > 1 else []
        where += f" ({', '.join(parts)})" if parts else ""
    cache = "" if deployment.kv_dtype == "auto" else f", cache in {deployment.kv_dtype}"
    return f"{deployment.engine.name} {where}, weights in {deployment.weights}{cache}"


def _left(ask: Ask, ranked: Sequence[Judged], answers: Sequence[Answer]) -> tuple[Left, ...]:
    """What fits and was not chosen, by the first thing that it misses."""
    chosen = {answer.judged.place for answer in answers}
    groups: dict[str, list[Judged]] = {}
    for one in ranked:
        if one.place in chosen:
            continue
        why = (
            one.missed[0].partition(":")[0]
            if one.missed
            else f"less {'for' if ask.goal == 'cost' else 'of'} the goal, {ask.goal}"
        )
        why = "requests wait: the cache holds fewer at once" if why.endswith("run at once") else why
        groups.setdefault(why, []).append(one)
    return tuple(Left(why, len(group), group[0]) for why, group in groups.items())
