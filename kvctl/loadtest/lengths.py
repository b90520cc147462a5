"""How many tokens requests have: all the same, or drawn by lot."""

from __future__ import annotations

import math
import random
from typing import Any

from kvctl.record import Record


class Spread(Record):
    """Lengths in tokens; each kind says how they are drawn."""

    @property
    def words(self) -> str:
        """ "512", "200 to 800", "lognormal: median 512, sigma 0.8"."""
        raise NotImplementedError

    @property
    def most(self) -> int | None:
        """The longest that can be drawn; None: there is no bound."""
        return None

    @property
    def least(self) -> int:
        """The shortest."""
        return 1

    def draw(self, lot: random.Random) -> int:
        """One, at least 1."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        return {"kind": type(self).__name__.lower()} | {name: getattr(self, name) for name in self._fields}


class Fixed(Spread):
    """All the same."""

    tokens: int

    @property
    def words(self) -> str:
        return f"{self.tokens:,}"

    @property
    def most(self) -> int | None:
        return self.tokens

    @property
    def least(self) -> int:
        return self.tokens

    def draw(self, lot: random.Random) -> int:
        return self.tokens


class Uniform(Spread):
    """Each length between two, both of them included, as often as any other."""

    low: int
    high: int

    @property
    def words(self) -> str:
        return f"{self.low:,} to {self.high:,}"

    @property
    def most(self) -> int | None:
        return self.high

    @property
    def least(self) -> int:
        return self.low

    def draw(self, lot: random.Random) -> int:
        return lot.randint(self.low, self.high)


class Normal(Spread):
    """Around a mean; what falls below 1 is 1."""

    mean: float
    deviation: float

    @property
    def words(self) -> str:
        return f"normal: mean {self.mean:g}, standard deviation {self.deviation:g}"

    def draw(self, lot: random.Random) -> int:
        return max(1, round(lot.gauss(self.mean, self.deviation)))


class Lognormal(Spread):
    """Whose logarithm is normal: a few are much longer than most, as in real traffic."""

    median: float
    sigma: float
    """Standard deviation of the natural logarithm."""

    @property
    def words(self) -> str:
        return f"lognormal: median {self.median:g}, sigma {self.sigma:g}"

    def draw(self, lot: random.Random) -> int:
        return max(1, round(lot.lognormvariate(math.log(self.median), self.sigma)))


class Mix(Spread):
    """Some lengths, each with its share of requests."""

    parts: tuple[tuple[int, float], ...]
    """Tokens, and a weight: shares are weights over their sum."""

    @property
    def words(self) -> str:
        total = sum(weight for _, weight in self.parts)
        return ", ".join(f"{tokens:,} ({weight / total:.0%})" for tokens, weight in self.parts)

    @property
    def most(self) -> int | None:
        return max(tokens for tokens, _ in self.parts)

    @property
    def least(self) -> int:
        return min(tokens for tokens, _ in self.parts)

    def draw(self, lot: random.Random) -> int:
        tokens, weights = zip(*self.parts, strict=True)
        return int(lot.choices(tokens, weights)[0])

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "mix", "parts": [{"tokens": tokens, "weight": weight} for tokens, weight in self.parts]}
