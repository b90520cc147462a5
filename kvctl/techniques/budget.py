"""How many tokens an eviction keeps: so many, or a share of what was seen."""

from __future__ import annotations

import math
from fractions import Fraction

from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.units import parse_tokens


class Budget(Record):
    """Tokens a head keeps: `tokens`, or `share` of those seen, rounded up; never fewer than `least`."""

    tokens: int | None = None
    share: Fraction | None = None
    least: int = 1

    def of(self, seen: int) -> int:
        """Tokens that are kept of `seen`."""
        most = self.tokens if self.share is None else math.ceil(self.share * seen)
        assert most is not None
        return min(seen, max(most, self.least))


def read_budget(text: str, what: str) -> Budget:
    """ "512" and "2k" are tokens; "0.25", "25%" and "1" with a point are a share of the tokens seen.

    Raises:
        UsageError: it is neither.

    """
    if "." in text or text.endswith("%"):
        try:
            share = Fraction(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if not 0 < share <= 1:
            raise UsageError(f"{what}: {text[:40]!r} is no share", hint=f"above 0, up to 1: {what}:0.25") from None
        return Budget(share=share)
    tokens = parse_tokens(text, what=what)
    if tokens < 1:
        raise UsageError(f"{what}: at least 1 token is kept")
    return Budget(tokens=tokens)
