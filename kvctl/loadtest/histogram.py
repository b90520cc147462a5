"""Durations in bounded memory: exact while they are few, then by counts of sizes, to one part in a thousand, whatever their number."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from operator import mul

from kvctl.record import Record

_BITS = 10
"""Of a value, those that are kept: the middle of a bucket is within a thousandth of each of its values."""
_FEW = 1 << 17
"""Values that are kept as they are, too: a megabyte."""
_Z95 = 1.959963984540054
_BUCKET = re.compile(r"(\d{1,19})(?:\*([1-9]\d{0,18}))?", re.ASCII)
_SUMS = re.compile(r"(\d{1,40}) (\d{1,60})", re.ASCII)


class Percentile(Record):
    """What so many of a hundred do not exceed, in nanoseconds, and between what it lies with 95% confidence, if requests
    are independent; None of the bounds where there are too few to say."""

    of: float
    value: float
    low: float | None
    high: float | None

    def like(self, other: Percentile) -> bool:
        """Whether all three are in the same buckets as those of another."""
        return all(
            one is other if one is None or other is None else _key(int(one)) == _key(int(other))
            for one, other in ((self.value, other.value), (self.low, other.low), (self.high, other.high))
        )


class Histogram:
    """Whole numbers from 0 on; `add` them, ask for percentiles."""

    __slots__ = ("_counts", "_ordered", "_told", "_values", "count", "largest", "smallest", "squares", "total")

    def __init__(self, values: Iterable[int] = ()) -> None:
        self._counts: dict[int, int] = {}
        self._values: array[int] | None = array("q")
        """All of them; None once they are too many."""
        self._ordered = 0
        """How many they were when they were put in order."""
        self._told: dict[float, Percentile] = {}
        """Percentiles that are known better than from counts: of values that are no longer here."""
        self.count = self.total = self.squares = self.largest = 0
        self.smallest: int | None = None
        self.extend(list(values))

    def add(self, value: int, times: int = 1) -> None:
        """One more, or several; what is less than nothing is nothing (two clocks may differ by a microsecond)."""
        value = max(value, 0)
        if self._values is not None:
            self._keep((value,) * times if times + len(self._values) <= _FEW else None)
        shift = value.bit_length() - _BITS
        key = value if shift <= 0 else (shift << _BITS) + (value >> shift)  # as _key has it, without the call
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
        self._told = {}
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
        if of in self._told:
            return self._told[of]
        share = of / 100
        rank = max(1, math.ceil(share * self.count))
        low, high = _ranks(share, self.count)
        ranks = sorted({one for one in (rank, low, high) if 1 <= one <= self.count})
        known = dict(zip(ranks, self._at(ranks), strict=True))
        return Percentile(of, known[rank], known.get(low), known.get(high))

    def share_within(self, value: int) -> float:
        """Of 1, those that are no more than `value`; of many, to a bucket's width."""
        if not self.count:
            raise ValueError("a share of nothing")
        if self._values is not None:
            return sum(one <= value for one in self._values) / self.count
        limit = _key(value)
        return sum(count for key, count in self._counts.items() if key <= limit) / self.count

    def rows(self) -> list[tuple[float, int]]:
        """Middles of buckets with their counts, in order: for plots."""
        return [(self._middle(key), self._counts[key]) for key in sorted(self._counts)]

    @property
    def text(self) -> str:
        """All counts in one line: where each bucket begins, and after a star how many it holds, if more than one."""
        return " ".join(
            f"{_low(key)}" if (count := self._counts[key]) == 1 else f"{_low(key)}*{count}"
            for key in sorted(self._counts)
        )

    @property
    def sums(self) -> str:
        """Of all values, and of their squares: exact, as `text` is not."""
        return f"{self.total} {self.squares}"

    @classmethod
    def of_text(cls, text: str, sums: str, smallest: int, largest: int, told: Iterable[Percentile] = ()) -> Histogram:
        """The same again; of `told` the percentiles, all others from counts.

        Raises:
            ValueError: it is no such text, or the rest does not go with it.

        """
        found = cls()
        found._values = None
        for word in text.split():
            bucket = _BUCKET.fullmatch(word)
            if bucket is None:
                raise ValueError(f"{word[:40]!r} is no bucket")
            key = _key(int(bucket[1]))
            found._counts[key] = found._counts.get(key, 0) + int(bucket[2] or 1)
        found.count = sum(found._counts.values())
        if not found.count or _key(smallest) != min(found._counts) or _key(largest) != max(found._counts):
            raise ValueError("the least and the most are not in its buckets")
        found.smallest, found.largest = smallest, largest
        both = _SUMS.fullmatch(sums)
        if both is None:
            raise ValueError(f"{sums[:40]!r} are no sums")
        found.total, found.squares = int(both[1]), int(both[2])
        # By Cauchy and Schwarz; below it there is no deviation.
        if not smallest * found.count <= found.total <= largest * found.count or (
            found.total**2 > found.squares * found.count
        ):
            raise ValueError("its sums are of other values")
        for one in told:
            if not one.like(found.percentile(one.of)):
                raise ValueError(f"p{one.of:g} is not where its buckets have it")
            found._told[one.of] = one
        return found

    def _at(self, ranks: list[int]) -> list[float]:
        """Values at ranks, which are in order."""
        if self._values is not None:
            if self._ordered != len(self._values):  # once, however many percentiles are asked for
                self._values = array("q", sorted(self._values))
                self._ordered = len(self._values)
            return [float(self._values[rank - 1]) for rank in ranks]
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
        if key < 1 << _BITS:
            return float(key)
        value = _low(key) + ((1 << (key >> _BITS)) - 1) / 2
        return float(min(max(value, self.smallest or 0), self.largest))


def _ranks(share: float, count: int) -> tuple[int, int]:
    """Between which a quantile lies with 95% confidence: how many of `count` are below it is binomial. They may be out of range."""
    spread = _Z95 * math.sqrt(count * share * (1 - share))
    return math.floor(share * count - spread), math.ceil(share * count + spread) + 1


@cache
def told_of(percent: float) -> int:
    """The fewest values of which a percentile has both bounds."""
    count = 1
    while (ranks := _ranks(percent / 100, count))[0] < 1 or ranks[1] > count:
        count += 1
    return count


def _key(value: int) -> int:
    """Of the bucket that a value is in."""
    shift = value.bit_length() - _BITS
    return value if shift <= 0 else (shift << _BITS) + (value >> shift)


def _low(key: int) -> int:
    """The least value of a bucket."""
    shift = key >> _BITS
    return (key - (shift << _BITS)) << shift if shift else key
