"""Synthetic traffic: four mixes whose lengths follow published statistics, the same for the same seed everywhere.

Requests arrive at random (a Poisson process). With probability `again` the next one continues a session, else it
begins one; prompts grow by the answer and a new message, as the hashes tell. What is published is named in `source`;
how sessions interleave, the spread of lengths and how many prompts begin alike are assumed, as `assumed` says.
"""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate
from math import exp, log

from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.replay.request import Request

HASH_TOKENS = 64
"""Tokens under one hash of these traces; a multiple of most engines' blocks."""
ACTIVE = 200
"""Sessions that may be continued; of more, the oldest ends."""


class Mix(Record):
    """One kind of traffic. Lengths are log-normal, as (median, sigma of the logarithm)."""

    name: str
    source: str
    assumed: str
    systems: int
    """Different beginnings (system prompts, tool descriptions) that sessions share."""
    system_tokens: int
    again: float
    """Probability that a request continues a session: 1 / (1 - again) requests a session."""
    first: tuple[float, float]
    """Tokens of a session's first message."""
    later: tuple[float, float]
    """Tokens of later messages, tool results included."""
    output: tuple[float, float]
    longest: int
    """Tokens of a prompt, at which a session ends."""
    kept: float = 1.0
    """Least share of the earlier prompt that the next one begins with; 1 is all of it, and the answer."""
    passages: int = 0
    """Retrieved passages in each first message,"""
    passage_tokens: int = 0
    library: int = 0
    """of so many, the k-th in popularity being taken in proportion to 1 / k."""


PRESETS: dict[str, Mix] = {
    mix.name: mix
    for mix in (
        Mix(
            name="chat",
            source="Azure conversation trace of 2023: median prompt 1,020 and output 129 tokens (Patel et al. 2024, "
            "Splitwise, section III)",
            assumed="3 turns a session, 20 system prompts of 256 tokens, spread of lengths",
            systems=20, system_tokens=256, again=2 / 3, first=(280, 1.1), later=(115, 1.0), output=(129, 1.0),
            longest=32_000,
        ),
        Mix(
            name="rag",
            source="RAGPulse: 6 passages of a library of 8,302, prompts of some 3,100 and answers of some 190 tokens "
            "(arXiv 2511.12979; github.com/flashserve/RAGPulse)",
            assumed="one question a session, one system prompt of 1,024 tokens, passages of 320, popularity 1/k",
            systems=1, system_tokens=1024, again=0.0, first=(120, 0.7), later=(120, 0.7), output=(190, 0.7),
            longest=32_000, passages=6, passage_tokens=320, library=8302,
        ),
        Mix(
            name="agent",
            source="Mooncake's tool and agent trace: mean prompt 8,596 and output 182 tokens, 59% found in an endless "
            "cache (Qin et al., FAST 2025, table 2)",
            assumed="2 steps a session, 30 beginnings of 2,048 tokens, spread of lengths",
            systems=30, system_tokens=2048, again=1 / 2, first=(3100, 1.1), later=(550, 1.2), output=(110, 1.0),
            longest=120_000,
        ),
        Mix(
            name="code",
            source="Azure coding trace of 2023: median prompt 1,500 and output 13 tokens (Patel et al. 2024, Splitwise, "
            "section III)",
            assumed="8 completions a session, each beginning with 80% or more of the last prompt, no system prompt",
            systems=1, system_tokens=0, again=7 / 8, first=(1500, 0.8), later=(80, 1.0), output=(13, 1.0),
            longest=32_000, kept=0.8,
        ),
    )
}  # fmt: skip


def preset(name: str, requests: int, rate: float, seed: int = 0) -> Iterator[Request]:
    """So many requests of a mix, `rate` a second on average."""
    mix = PRESETS.get(name)
    if mix is None:
        raise UsageError(f"{name!r} is no workload", hint="one of " + ", ".join(PRESETS))
    if not 1 <= requests <= 10**9:
        raise UsageError("requests must be from 1 to 1,000,000,000")
    if not 1e-6 <= rate <= 1e6:
        raise UsageError("the rate must be from 0.000001 to 1,000,000 requests a second")
    return _generate(mix, requests, rate, random.Random(seed))


class _Session:
    __slots__ = ("answer", "ids", "length")

    def __init__(self, ids: list[int], length: int) -> None:
        self.ids = ids
        """Hashes of the full runs."""
        self.length = length
        self.answer = 0


def _generate(mix: Mix, requests: int, rate: float, dice: random.Random) -> Iterator[Request]:
    time = 0.0
    active: list[_Session] = []
    popularity = list(accumulate(1 / rank for rank in range(1, mix.library + 1)))
    runs = mix.passage_tokens // HASH_TOKENS
    shared_runs = mix.system_tokens // HASH_TOKENS
    # Numbers of hashes: those of beginnings, then those of passages, then new ones.
    passages_at = mix.systems * shared_runs
    fresh = passages_at + mix.library * runs
    for _ in range(requests):
        time += dice.expovariate(rate)
        if active and dice.random() < mix.again:
            index = dice.randrange(len(active))
            session = active[index]
            if mix.kept < 1:
                session.length = int(session.length * (mix.kept + (1 - mix.kept) * dice.random()))
                del session.ids[session.length // HASH_TOKENS :]
            else:
                session.length += session.answer
            session.length += _tokens(dice, mix.later)
        else:
            system = dice.randrange(mix.systems) * shared_runs
            ids = list(range(system, system + shared_runs))
            for _ in range(mix.passages):
                rank = bisect(popularity, dice.random() * popularity[-1])
                ids += range(passages_at + rank * runs, passages_at + rank * runs + runs)
            session = _Session(ids, len(ids) * HASH_TOKENS + _tokens(dice, mix.first))
            index = len(active)
            active.append(session)
        session.length = min(session.length, mix.longest)
        new = session.length // HASH_TOKENS - len(session.ids)
        session.ids += range(fresh, fresh + new)
        fresh += max(new, 0)
        session.answer = _tokens(dice, mix.output)
        yield Request(
            round(time * 1e6), session.length, session.answer, tuple(session.ids), 1, None, HASH_TOKENS
        )  # fmt: skip
        if session.length == mix.longest or not mix.again:
            active[index] = active[-1]
            active.pop()
        elif len(active) > ACTIVE:
            active.pop(0)


def _tokens(dice: random.Random, shape: tuple[float, float]) -> int:
    median, sigma = shape
    return max(1, round(exp(dice.normalvariate(log(median), sigma))))
