"""Durations in bounded memory: exact while they are few, then by counts of sizes, to one part in a thousand, whatever their number."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from operator import mul

from kvctl.record import Record

_BITS = 10
"""Of a value, those that are kept: the middle of a bucket is within a thousandth of each of its values."""
_FEW = 1 << 17
"""Values that are kept as they are, too: a megabyte."""
_Z95 = 1.959963984540054


class Percentile(Record):
    """What so many of a hundred do not exceed, in nanoseconds, and between what it lies with 95% confidence, if requests
    are independent; None of the bounds where there are too few to say."""

    of: float
    value: float
    low: float | None
    high: float | None


class Histogram:
    """Whole numbers from 0 on; `add` them, ask for percentiles."""

    __slots__ = ("_counts", "_values", "count", "largest", "smallest", "squares", "total")

    def __init__(self, values: Iterable[int] = ()) -> None:
        self._counts: dict[int, int] = {}
        self._values: array[int] | None = array("q")
        """All of them; None once they are too many."""
        self.count = self.total = self.squares = self.largest = 0
        self.smallest: int | None = None
        self.extend(list(values))

    def add(self, value: int, times: int = 1) -> None:
        """One more, or several; what is less than nothing is nothing (two clocks may differ by a microsecond)."""
        value = max(value, 0)
        if self._values is not None:
            self._keep((value,) * times if times + len(self._values) <= _FEW else None)
        shift = value.bit_length() - _BITS
        key = value if shift <= 0 else (shift << _BITS) + (value >> shift)
        self._counts[key] = self._counts.get(key, 0) + times
        self.count += times
        self.total += value * times
        self.squares += value * value * times
        if value > self.largest:
            self.largest = value
        if self.smallest is None or value < self.smallest:
            self.smallest = value

    def extend(self, values: Sequence[int], *others: Histogram) -> None:
        """Several at once, to others too: an answer's gaps come while the next answers wait."""
        if not values:
            return
        values = values if min(values) >= 0 else [max(value, 0) for value in values]
        keys = [
            value if (shift := value.bit_length() - _BITS) <= 0 else (shift << _BITS) + (value >> shift)
            for value in values
        ]
        total, squares, least, most = sum(values), sum(map(mul, values, values)), min(values), max(values)
        for one in (self, *others):
            counts = one._counts
            for key in keys:
                counts[key] = counts.get(key, 0) + 1
            one._keep(values)
            one.count += len(keys)
            one.total += total
            one.squares += squares
            one.largest = max(one.largest, most)
            one.smallest = least if one.smallest is None else min(one.smallest, least)

    def _keep(self, values: Sequence[int] | None) -> None:
        """As they are, as long as they are few; None: others that are too many already."""
        if self._values is None:
            return
        if values is None or len(self._values) + len(values) > _FEW:
            self._values = None
        else:
            self._values.extend(values)

    def join(self, other: Histogram) -> None:
        """Add all of another."""
        for key, count in other._counts.items():
            self._counts[key] = self._counts.get(key, 0) + count
        self._keep(other._values)
        self.count += other.count
        self.total += other.total
        self.squares += other.squares
        self.largest = max(self.largest, other.largest)
        if other.smallest is not None:
            self.smallest = other.smallest if self.smallest is None else min(self.smallest, other.smallest)

    @property
    def mean(self) -> float:
        """Exact.

        Raises:
            ValueError: there are none.

        """
        if not self.count:
            raise ValueError("the mean of nothing")
        return self.total / self.count

    @property
    def deviation(self) -> float:
        """The standard deviation, exact."""
        if self.count < 2:
            return 0.0
        # In whole numbers: differences of large squares would lose what is asked for.
        return math.sqrt((self.count * self.squares - self.total * self.total) / (self.count * (self.count - 1)))

    def percentile(self, of: float) -> Percentile:
        """The smallest value that `of` percent do not exceed (nearest rank).

        Raises:
            ValueError: there are none, or `of` is no percentage.

        """
        if not self.count or not 0 <= of <= 100:
            raise ValueError("a percentile of nothing")
        share = of / 100
        rank = max(1, math.ceil(share * self.count))
        # Ranks between which the quantile lies: how many of n are below it is binomial.
        spread = _Z95 * math.sqrt(self.count * share * (1 - share))
        low, high = math.floor(share * self.count - spread), math.ceil(share * self.count + spread) + 1
        ranks = sorted({one for one in (rank, low, high) if 1 <= one <= self.count})
        known = dict(zip(ranks, self._at(ranks), strict=True))
        return Percentile(of, known[rank], known.get(low), known.get(high))

    def share_within(self, value: int) -> float:
        """Of 1, those that are no more than `value`; of many, to a bucket's width."""
        if not self.count:
            raise ValueError("a share of nothing")
        if self._values is not None:
            return sum(one <= value for one in self._values) / self.count
        shift = value.bit_length() - _BITS
        limit = value if shift <= 0 else (shift << _BITS) + (value >> shift)
        return sum(count for key, count in self._counts.items() if key <= limit) / self.count

    def rows(self) -> list[tuple[float, int]]:
        """Middles of buckets with their counts, in order: for plots."""
        return [(self._middle(key), self._counts[key]) for key in sorted(self._counts)]

    def _at(self, ranks: list[int]) -> list[float]:
        """Values at ranks, which are in order."""
        if self._values is not None:
            ordered = sorted(self._values)
            return [float(ordered[rank - 1]) for rank in ranks]
        out: list[float] = []
        seen = 0
        for key in sorted(self._counts):
            seen += self._counts[key]
            while len(out) < len(ranks) and ranks[len(out)] <= seen:
                out.append(self._middle(key))
            if len(out) == len(ranks):
                break
        return out

    def _middle(self, key: int) -> float:
        shift = max((key >> _BITS), 0)
        if key < 1 << _BITS:
            return float(key)
        low = (key - (shift << _BITS)) << shift
        value = low + ((1 << shift) - 1) / 2
        return float(min(max(value, self.smallest or 0), self.largest))
