"""How much a trial sends, and about how long it takes: by the speed that is predicted, or by what its first load took; unknown otherwise."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvctl.errors import KvctlError
from kvctl.record import Record
from kvctl.units import plural

if TYPE_CHECKING:
    from kvctl.loadtest.plan import Plan, Step
    from kvctl.loadtest.run import Outcome
    from kvctl.recommend.candidate import Candidate
    from kvctl.recommend.judge import Judge

_SECOND = 1e9


class Size(Record):
    """What one load sends."""

    words: str
    requests: int
    """The warm-up's too."""
    prompt: int
    answer: int
    at_once: int | None
    """None: they come by a clock."""
    rate: float | None

    @property
    def said(self) -> str:
        """ "12 requests of 512 and 64 tokens (4 at once)"."""
        return f"{plural(self.requests, 'request')} of {self.prompt:,} and {self.answer:,} tokens ({self.words})"

    def seconds(self, ttft: float, tpot: float) -> float:
        """One request after another in each of the places that there are."""
        one = ttft + max(self.answer - 1, 0) * tpot
        if self.at_once is None:
            assert self.rate is not None
            return self.requests / self.rate + one
        return -(-self.requests // self.at_once) * one


def sizes(plan: Plan) -> tuple[Size, ...]:
    """Of a trial's loads, in their order."""
    return tuple(_size(plan, step) for step in plan.steps)


def _size(plan: Plan, step: Step) -> Size:
    from kvctl.loadtest.lengths import Fixed
    from kvctl.loadtest.work import Made

    assert isinstance(step.work, Made)
    prompt, answer = step.work.input, step.work.output
    assert isinstance(prompt, Fixed)
    assert isinstance(answer, Fixed)
    requests = plan.length_of(step).requests
    assert requests is not None
    return Size(step.words, plan.warm_of(step) + requests, prompt.tokens, answer.tokens, step.at_once, step.rate)


def before(plan: Plan, candidate: Candidate, judge: Judge) -> str:
    """What will be sent, and about how long that takes; one server of several is started, with its share of the requests."""
    found = sizes(plan)
    sent = ", then ".join(one.said for one in found)
    return f"--verify starts the server and sends {sent}: {_how_long(found, candidate, judge)}; Ctrl-C ends it sooner"


def _how_long(found: tuple[Size, ...], candidate: Candidate, judge: Judge) -> str:
    replicas = candidate.deployment.replicas
    total = 0.0
    for one in found:
        try:
            prepared = judge.prepared(candidate)
        except KvctlError as error:
            return f"how long it takes is not known ({error.message})"
        if one.at_once is not None:
            speed = prepared.at(one.prompt, one.answer, float(one.at_once * replicas))
        else:
            assert one.rate is not None
            held = float(max(candidate.usual_at_once, 1))
            speed = prepared.coming(one.prompt, one.answer, one.rate * replicas, held)
        total += one.seconds(speed.ttft.mid, speed.tpot.mid)
    if not math.isfinite(total):
        return "how long it takes is not known (the queue is predicted to grow without end)"
    return f"about {duration(total)} by the predicted speed, beside the start"


def after(plan: Plan, done: Outcome, number: int) -> str | None:
    """How long the load after the `number`-th takes, by what that one took: prompts in proportion to their tokens; None after the last,
    or where it says nothing."""
    found = sizes(plan)
    if number >= len(found) or done.interrupted:
        return None
    last, following = found[number - 1], found[number]
    ttft, tpot = (done.figures.times[name] for name in ("ttft", "tpot"))
    if not ttft.count or last.at_once is None or following.at_once is None:
        return f"next: {following.said}"
    more = following.prompt * following.at_once / (last.prompt * last.at_once)
    between = tpot.percentile(50).value / _SECOND if tpot.count else 0.0
    seconds = following.seconds(ttft.percentile(50).value / _SECOND * more, between)
    return f"next: {following.said}: about {duration(seconds)} by what was measured, and more where attention over long prompts takes most"


def duration(seconds: float) -> str:
    """Roughly: "less than 10 s", "40 s", "7 min", "3.5 h"."""
    if seconds < 10:
        return "10 s or less"
    if seconds < 100:
        return f"{round(seconds, -1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
