"""One start of an engine, as it is put together from a log line by line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from kvctl.startlog.figures import Figure, Pool, Refusal, sized, whole
from kvctl.startlog.lines import Line

_MOST = 400
"""Values of one name that are kept: every rank of a large cluster has some."""


class Start:
    """What is known of one start."""

    def __init__(self, line: int) -> None:
        self.line = line
        """Where it begins."""
        self.last = line
        """The last line that said something of it."""
        self.figures: list[Figure] = []
        self.pools: list[Pool] = []
        self.refusals: list[Refusal] = []
        self.args: dict[str, Any] = {}
        """Settings that it was given."""
        self.config: dict[str, Any] = {}
        """Settings in effect."""
        self.facts: dict[str, str] = {}
        """All else, by name; the first that is said."""
        self.notes: list[str] = []

    def add(self, *figures: Figure | None) -> None:
        """Keep values that could be read."""
        for figure in figures:
            if figure is not None and sum(kept.name == figure.name for kept in self.figures) < _MOST:
                self.figures.append(figure)

    def pool(self, pool: Pool) -> None:
        """Keep a cache's line once, however many ranks print it."""
        if len(self.pools) < _MOST and not any(
            kept.kind == pool.kind and kept.same(pool) and kept.where != pool.where for kept in self.pools
        ):
            self.pools.append(pool)

    def refuse(self, kind: str, line: Line) -> None:
        """Keep why it stopped; every process of it prints that."""
        if not any(kept.kind == kind for kept in self.refusals):
            self.refusals.append(Refusal(kind, line.number, line.text[:600]))

    def has(self, name: str) -> bool:
        """Whether a value of this name was read."""
        return any(figure.name == name for figure in self.figures)


Handler = Callable[[Start, "re.Match[str]", Line], object]


class Reader:
    """Finds starts of one engine; keeps the last, and the last complete one."""

    engine: str = ""
    rules: tuple[tuple[str, re.Pattern[str], Handler], ...] = ()
    """(a text that the line holds, what to find in it, what to make of that)."""

    def __init__(self) -> None:
        self.current: Start | None = None
        self.complete: Start | None = None
        self.count = 0

    def begins(self, start: Start | None, line: Line) -> bool:
        """Whether this line is the first of another start."""
        raise NotImplementedError

    def is_complete(self, start: Start) -> bool:
        """Whether it says how large the cache became, or why there is none."""
        raise NotImplementedError

    def feed(self, line: Line) -> None:
        """Read one line."""
        if self.begins(self.current, line):
            self._close()
            self.current = Start(line.number)
            self.count += 1
        for mark, pattern, handler in self.rules:
            if mark in line.text and (match := pattern.search(line.text)) is not None:
                if self.current is None:
                    self.current = Start(line.number)
                    self.count += 1
                handler(self.current, match, line)
                self.current.last = line.number

    def _close(self) -> None:
        if self.current is not None and self.is_complete(self.current):
            self.complete = self.current

    def finish(self) -> tuple[Start, bool] | None:
        """The last complete start, else the last one; whether it is complete."""
        self._close()
        if self.complete is not None:
            return self.complete, True
        return (self.current, False) if self.current is not None else None


def rule(mark: str, pattern: str, handler: Handler) -> tuple[str, re.Pattern[str], Handler]:
    """A row of `Reader.rules`."""
    return mark, re.compile(pattern), handler


# What many rules make of a line.


def fact(name: str) -> Handler:
    """The first group of the first such line, as text."""

    def handler(start: Start, match: re.Match[str], line: Line) -> None:
        start.facts.setdefault(name, match[1].strip()[:300])

    return handler


def counted(name: str, unit: str) -> Handler:
    """The first group as a count."""

    def handler(start: Start, match: re.Match[str], line: Line) -> None:
        start.add(whole(name, match[1], unit, line.number, line.where))

    return handler


def sizes(factor: int, *names: str) -> Handler:
    """The groups in turn as sizes in units of `factor` bytes; those that did not take part are left out."""

    def handler(start: Start, match: re.Match[str], line: Line) -> None:
        start.add(*(sized(name, match[index], factor, line.number, line.where)
                    for index, name in enumerate(names, 1) if match[index]))  # fmt: skip

    return handler


def refused(kind: str, *then: Handler) -> Handler:
    """Why it stopped, and what else the line says."""

    def handler(start: Start, match: re.Match[str], line: Line) -> None:
        start.refuse(kind, line)
        for other in then:
            other(start, match, line)

    return handler
