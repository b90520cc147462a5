"""The largest number that something holds for."""

from __future__ import annotations

from collections.abc import Callable


def largest(holds: Callable[[int], bool], guess: int, most: int, block: int = 1) -> int:
    """The largest number from 1 to `most` that holds, 0 where none does; what holds for one holds for all below.

    Looks near the guess first, and at multiples of a block: a check takes a plan of the engine.
    """
    step = max(block, 1)
    guess = min(max(guess // step * step, 1), most)
    if holds(guess):
        low, high = guess, guess // step * step + step
        while high <= most and holds(high):
            low, step = high, 2 * step
            high += step
        high = min(high, most + 1)
    else:
        high, low = guess, guess - step
        while low >= 1 and not holds(low):
            high, step = low, 2 * step
            low -= step
        low = max(low, 0)
    if high - low > 1 and not holds(low + 1):
        return low  # one more token would be one more block
    return last(holds, low, high)


def last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The last number that holds, where `low` is taken to hold and `high` not to; neither is asked."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
