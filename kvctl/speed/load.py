"""What requests see: both phases put together, under a load that is held at so many requests at once.

Works on numbers and on arrays alike, as `kvctl.speed.roofline` does.
"""

from __future__ import annotations

import math
from typing import Any

from kvctl.speed.roofline import Demand, Efficiency, prompt_seconds, step_seconds


def served(step: Demand, prompt: Demand, e: Efficiency, others: Any, output: Any) -> tuple[Any, Any]:
    """Seconds to the first token and between tokens, of requests that come one after another, `others` beside each in its group of ranks.

    A decoding request waits for a share of the prompts that come while it answers, one for each of the others; a prompt waits for
    those of others that are computed when it comes: each is with the share of its time that its own prompt takes, and starts
    that fall together add to that.
    """
    token, own = step_seconds(step, e), prompt_seconds(prompt, e)
    between = token + e.mix * own * others / output
    computing = own / (own + output * between)
    first = e.first + own * (1 + others * (e.wait + computing / 2))
    return first, between


def no_worse_than_in_turn(
    together: tuple[float, float], beside: tuple[float, float], alone: tuple[float, float], count: float, output: int
) -> tuple[float, float]:
    """Seconds to the first token and between tokens of `count` requests at once, where these are no longer than one after another.

    `beside`: in steps as large, but for waiting for prompts; `alone`: of one by itself. Of prompts that take nearly all of the time,
    the fitted shares of waiting can add up to more than all.
    """
    more = max(output - 1, 0)
    total, least = (first + more * between for first, between in (together, beside))
    most = max(count * (alone[0] + more * alone[1]), least)
    if total <= most:
        return together
    kept = (most - least) / (total - least)
    first, between = (one + kept * (other - one) for one, other in zip(beside, together, strict=True))
    return first, between


def queued(load: float, places: float) -> float:
    """How long a request waits for one of so many places, in times of its service; `load` is the share of them that is taken.

    Sakasegawa's approximation of the M/M/c queue (1977): load^(sqrt(2(c+1)) - 1) / (c (1 - load)); without end from a load of 1 on.
    """
    if load >= 1:
        return math.inf
    return math.pow(load, math.sqrt(2 * (places + 1)) - 1) / (places * (1 - load))


def full(step: Demand, prompts: Demand, e: Efficiency, requests: Any, output: Any) -> Any:
    """Requests a second of a group of ranks that is never short of them; `prompts` are those of all `requests` in service."""
    return e.busy * requests / (output * step_seconds(step, e) + prompt_seconds(prompts, e))


def batch(step: Demand, prompts: Demand, e: Efficiency, output: Any) -> Any:
    """Seconds of requests that start and end together."""
    return prompt_seconds(prompts, e) + output * step_seconds(step, e)
