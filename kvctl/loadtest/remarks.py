"""What has to be known beside the figures of a load, and whether its prompts were found in the cache as they were meant to be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvctl.loadtest import slices
from kvctl.loadtest.metrics import Course
from kvctl.loadtest.work import Made
from kvctl.units import format_seconds, plural

if TYPE_CHECKING:
    from kvctl.loadtest.run import Outcome

_LATE, _LATE_NS = 0.01, 1_000_000
"""Dispatch delay at the 99th percentile that is worth a word: as a share of the median first-token time, and at all."""
_OFF = 0.01
"""By how much the server's count of prompts may be another than was asked for (vllm#44708)."""
_POINTS = 0.02
"""By how much the share that was found in the cache may be another than designed (inference-perf#340)."""
_FLAGS: Mapping[str, str] = {"vllm": "--enable-prompt-tokens-details", "sglang": "--enable-cache-report"}
"""What has engines say in usage what they found in their cache (gpustack#5189)."""


def remarks(one: Outcome, engine: str) -> Iterator[str]:
    """Lines, in plain words, of what the figures alone do not tell."""
    figures = one.figures
    if figures.good:
        yield from _late(one)
        yield from _prompts(one)
        yield from _cached(one, engine)
        yield from _uncounted(one)
        yield from _ttft(one)
    yield from _preemptions(one)
    if one.window.resets:
        yield f"the server was restarted meanwhile: its counters began anew {plural(one.window.resets, 'time')}"
    watched = one.watched
    if watched is not None and watched.misses:
        yield f"{watched.misses:,} of {plural(watched.looks, 'look')} at the server's metrics gave nothing: {watched.why}"
    wait = figures.rejected_wait
    if wait.count:
        median = format_seconds(wait.percentile(50).value / 1e9)
        yield f"{plural(wait.count, 'request')} turned away with Retry-After: {median} in the median"


def _late(one: Outcome) -> Iterator[str]:
    """vllm#54101: what waits for the client is in no time from sending."""
    dispatch = one.figures.times["dispatch"].percentile(99).value
    ttft = one.figures.times["ttft"].percentile(50).value
    if dispatch > max(_LATE * ttft, _LATE_NS):
        yield (f"requests waited for the client: 99 of 100 went out within {format_seconds(dispatch / 1e9)} of when they were due, and the median "
               f"first-token time is {format_seconds(ttft / 1e9)}; times from when they were due stand in JSON")  # fmt: skip


def _prompts(one: Outcome) -> Iterator[str]:
    figures = one.figures
    if not figures.with_built:
        return
    built, counted = figures.built / figures.with_built, figures.counted / figures.with_built
    if abs(counted - built) > _OFF * built:
        yield (f"prompts were made of {built:,.6g} tokens on average, and the server counts {counted:,.6g} "
               f"({counted / built - 1:+.1%})")  # fmt: skip


def _cached(one: Outcome, engine: str) -> Iterator[str]:
    if one.figures.with_cached or not one.counted_hit_rate:
        return
    flag = f"; {_FLAGS[engine]} has it say so" if engine in _FLAGS else ""
    yield (f"the server's answers do not say what was found in its cache, and its counters do ({one.counted_hit_rate:.1%} of "
           f"input tokens){flag}")  # fmt: skip


def _uncounted(one: Outcome) -> Iterator[str]:
    """Answers without usage (sglang#24254): beside their events stands what the engine counted."""
    figures = one.figures
    each = one.counted_tokens_an_event
    if figures.sources["events"] and each is not None and figures.events:
        yield (f"output tokens of {plural(figures.sources['events'], 'answer')} are events for want of usage; by the engine's own counter each of "
               f"these carries {each:.2f} tokens")  # fmt: skip


def _ttft(one: Outcome) -> Iterator[str]:
    """aiperf#1424: the client's mean beside the server's, of the same requests, the warm-up's among them."""
    gap = one.ttft_gap
    if gap is not None:
        server, client, requests = gap
        yield (f"first-token time by the server's own histogram: {format_seconds(server)} on average of {plural(requests, 'request')}; by the client "
               f"{format_seconds(client)}: {format_seconds(abs(client - server))} {'more' if client >= server else 'less'} on the way")  # fmt: skip
    elif one.counters.get("ttft_requests"):
        yield (f"the server gave {one.counters['ttft_requests']:,.0f} first tokens in this time, and {one.figures.answered:,} of them came here: "
               "others load it too, or answers were lost")  # fmt: skip


def _preemptions(one: Outcome) -> Iterator[str]:
    """inference-sim#1167: preemptions are taken for slow decoding unless both are looked at by time."""
    found = preemption_cost(one)
    if found is not None:
        hit, rest = found
        more = f" ({hit / rest - 1:+.0%})" if rest else ""
        yield (f"between events of a request {format_seconds(hit)} went by on average in seconds with preemptions, and {format_seconds(rest)} "
               f"in those without{more}")  # fmt: skip


def preemption_cost(one: Outcome) -> tuple[float, float] | None:
    """Seconds between events in slices of time with preemptions, and in those without; None where there were not both."""
    preempted = Course(one.samples, "preemptions").between
    return slices.cost(one.figures.slices, lambda first, last: bool(preempted(first, last)))


# -- prefix caching ----------------------------------------------------------------------------------


def held_against_design(one: Outcome) -> float | None:
    """Share of input tokens that was found in the cache, where that can be held against what was designed: see `misses_design`."""
    seen = one.hit_rate if one.hit_rate is not None else one.counted_hit_rate
    work = one.step.work
    return seen if isinstance(work, Made) and work.turns == 1 and one.figures.tokens_in else None


def misses_design(one: Outcome, server: Mapping[str, Any]) -> str | None:
    """In what way made prompts were found in the cache other than they were meant to be; None where they were, or no one says.

    An engine that keeps blocks finds whole ones only, and a template's own beginning is the same in all prompts. Turns of a
    conversation and requests of a trace are found as far as the cache is large: that is what they are sent for.
    """
    seen, work, figures = held_against_design(one), one.step.work, one.figures
    if seen is None or not isinstance(work, Made):
        return None
    block = block_size(one, server) or 1
    prefix, around, whole = (
        work.prefix,
        int(server.get("prompt_overhead_tokens") or 0),
        figures.tokens_in / figures.with_prompt,
    )
    least, most = prefix // block * block / whole, max(prefix, around) / whole
    if seen > most + _POINTS:
        return (
            f"{seen:.1%} of input tokens were found in the server's cache, and at most {most:.1%} had been sent before"
        )
    if seen < least - _POINTS:
        blocks = f" (whole blocks of {block})" if block > 1 else ""
        return (
            f"{seen:.1%} of input tokens were found in the server's cache, and {least:.1%}{blocks} had been sent before"
        )
    return None


def block_size(one: Outcome, server: Mapping[str, Any]) -> int | None:
    """Tokens of a block of the engine's cache, where it says."""
    for info in one.samples[-1].info.values() if one.samples else ():
        text = info.get("block_size", "")
        if text.isascii() and text.isdigit() and 0 < len(text) < 8 and int(text):
            return int(text)
    page = server.get("facts", {}).get("page_size")
    return page if isinstance(page, int) and page > 0 else None
