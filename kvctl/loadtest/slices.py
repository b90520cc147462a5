"""What came when: events with output, and the gaps before them, by slices of time, in memory that does not grow with time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvctl.record import Record

SECOND = 1_000_000_000
_MOST = 4096
"""Slices that are kept: where there are more, two become one. At a second each these are 68 minutes."""


class Slice(Record):
    """A piece of time, in nanoseconds of the monotonic clock, and what came in it."""

    start: int
    width: int
    events: int
    """With output, of whatever exchange."""
    gaps: int
    """Of these, those with another of their exchange before them."""
    waited: int
    """Nanoseconds between them, in all."""

    @property
    def gap(self) -> float | None:
        """Seconds between two events of an exchange, on average; None where there were none."""
        return self.waited / self.gaps / SECOND if self.gaps else None


class Slices:
    """Adds stamps up, exactly, however wide the slices have become."""

    __slots__ = ("_kept", "most", "width")

    def __init__(self, most: int = _MOST) -> None:
        self.most = most
        self.width = SECOND
        self._kept: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, stamps: Sequence[int]) -> None:
        """Those of one exchange, in order."""
        at, count, width = 0, len(stamps), self.width
        while at < count:
            number = stamps[at] // width
            # All in the same slice at once: sums of gaps are differences of their ends.
            end = max(bisect_left(stamps, (number + 1) * width, at), at + 1)
            before = max(at - 1, 0)
            kept = self._kept.setdefault(number, [0, 0, 0])
            kept[0] += end - at
            kept[1] += end - 1 - before
            kept[2] += stamps[end - 1] - stamps[before]
            at = end
        while len(self._kept) > self.most:
            self._widen()

    def join(self, other: Slices) -> None:
        """Add all of another."""
        own = Slices(self.most)
        own.width, own._kept = other.width, {number: list(sums) for number, sums in other._kept.items()}
        while own.width < self.width:
            own._widen()
        while self.width < own.width:
            self._widen()
        for number, sums in own._kept.items():
            kept = self._kept.setdefault(number, [0, 0, 0])
            for at, value in enumerate(sums):
                kept[at] += value
        while len(self._kept) > self.most:
            self._widen()

    def _widen(self) -> None:
        self.width *= 2
        joined: dict[int, list[int]] = {}
        for number, (events, gaps, waited) in self._kept.items():
            kept = joined.setdefault(number // 2, [0, 0, 0])
            kept[0] += events
            kept[1] += gaps
            kept[2] += waited
        self._kept = joined

    def __iter__(self) -> Iterator[Slice]:
        """In order; those in which nothing came are not there."""
        for number in sorted(self._kept):
            yield Slice(number * self.width, self.width, *self._kept[number])

    @classmethod
    def of(cls, pieces: Iterable[Slice]) -> Slices:
        """The same again.

        Raises:
            ValueError: they are not of one width, a second doubled some times, each at its place and there once.

        """
        found = cls()
        for number, piece in enumerate(pieces):
            if not number:
                found.width = piece.width
            doubled, rest = divmod(piece.width, SECOND)
            if rest or doubled.bit_count() != 1 or piece.width != found.width or piece.start % piece.width:
                raise ValueError("slices that cannot be")
            place = piece.start // piece.width
            if place in found._kept or number >= found.most:
                raise ValueError("slices that are there twice, or too many")
            found._kept[place] = [piece.events, piece.gaps, piece.waited]
        return found

    def counts(self, first: int, last: int) -> list[int]:
        """Events in each whole slice between two times."""
        places = range(-(-first // self.width), last // self.width)
        return [self._kept[place][0] if place in self._kept else 0 for place in places]

    def rate(self, first: int, last: int) -> float | None:
        """Events a second over the whole slices between two times; None of less than two."""
        counts = self.counts(first, last)
        return None if len(counts) < 2 else sum(counts) / (len(counts) * self.width / SECOND)


def cost(slices: Slices, hit: Callable[[int, int], bool]) -> tuple[float, float] | None:
    """Seconds between events in slices that were hit, and in the others; None where either had none.

    `hit`: whether something was the case between two times.
    """
    sums = {True: [0, 0], False: [0, 0]}
    for one in slices:
        side = sums[hit(one.start, one.start + one.width)]
        side[0] += one.waited
        side[1] += one.gaps
    (hit_ns, hits), (rest_ns, rest) = sums[True], sums[False]
    return (hit_ns / hits / SECOND, rest_ns / rest / SECOND) if hits and rest else None
