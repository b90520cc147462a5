"""What is asked and said of techniques on a real model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvctl.measure.quality import Quality, Scores, pareto, separates
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.measure.statistics import Ratio


class Bounds(Record):
    """How much worse a technique may be."""

    most_change: float | None = None
    """Of the perplexity, in percent."""
    least_top1: float | None = None
    """Agreement in percent."""

    def __bool__(self) -> bool:
        return self.most_change is not None or self.least_top1 is not None

    def broken(self, row: Assessed) -> list[str]:
        """What a technique breaks, a line for each; none where it keeps all, or was not scored."""
        out: list[str] = []
        quality = row.quality
        if quality is None:
            return out
        change, top1 = quality.perplexity_change.value, 100 * quality.top1.value
        if self.most_change is not None and change > self.most_change:
            out.append(f"{row.name}: perplexity {change:+.2f}%, and at most {self.most_change:g}% is asked for")
        if self.least_top1 is not None and top1 < self.least_top1:
            out.append(f"{row.name}: top-1 agreement {top1:.1f}%, and at least {self.least_top1:g}% is asked for")
        return out

    def sure(self, row: Assessed) -> bool:
        """Whether a technique keeps them by more than twice its standard errors."""
        quality = row.quality
        if quality is None:
            return False
        change, top1 = quality.perplexity_change, quality.top1
        if change.error is None or top1.error is None:
            return False
        return (self.most_change is None or change.value + 2 * change.error <= self.most_change) and (
            self.least_top1 is None or 100 * (top1.value - 2 * top1.error) >= self.least_top1
        )

    def to_dict(self) -> dict[str, Any]:
        return {"max_perplexity_increase_percent": self.most_change, "min_top1_percent": self.least_top1}


class AssessAsked(Record):
    """What is to be measured of every technique."""

    context: int
    """Prompt tokens of the runs that are timed."""
    decode: int = 64
    repeat: int = 3
    encoder_tokens: int | None = None
    """Positions that cross attention sees; None as `kvctl size` has it."""
    windows: int = 6
    """Pieces of text."""
    prompt: int = 512
    """Tokens of a piece before those that count."""
    scored: int = 256
    """Tokens of a piece that count."""
    greedy: int = 32
    """Tokens that are generated after the prompt of each of `texts` pieces; 0 generates none."""
    texts: int = 6
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Where in a prompt a key is hidden: 0 is its beginning."""
    keys: int = 2
    """Prompts with a key for each depth."""
    bounds: Bounds = Bounds()

    @property
    def window(self) -> int:
        """Tokens of a piece: the last one is only predicted."""
        return self.prompt + self.scored + 1

    def within(self, positions: int | None, tokens: int | None) -> AssessAsked:
        """For a model with so many positions, pieces of text no longer than that; so many tokens scored in all: with fewer, less is generated too."""
        asked = self
        if positions is not None and asked.window > positions:
            prompt = positions * 2 // 3
            asked = asked.replace(prompt=prompt, scored=positions - prompt - 1)
        if tokens is None:
            return asked
        windows = -(-tokens // asked.scored)
        few = windows < asked.windows
        return asked.replace(
            windows=windows,
            scored=-(-tokens // windows),
            texts=min(asked.texts, windows),
            keys=1 if few else asked.keys,
        )

    def to_dict(self) -> dict[str, Any]:
        out = {name: getattr(self, name) for name in self._fields}
        return out | {"depths": list(self.depths), "bounds": self.bounds.to_dict()}


class Greedy(Record):
    """How long the likeliest continuation is that of the plain cache."""

    same: float
    """Tokens before the first that differs: the mean over texts."""
    of: int
    """Tokens that were generated."""
    texts: int

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}


class Recall(Record):
    """Keys hidden in a text that were found again."""

    depths: tuple[float, ...]
    found: tuple[int, ...]
    """At each depth."""
    of: int
    """At each depth."""

    @property
    def words(self) -> str:
        """ "9/10"."""
        return f"{sum(self.found)}/{self.of * len(self.depths)}"

    def to_dict(self) -> dict[str, Any]:
        by_depth = [
            {"depth": depth, "found": found, "of": self.of}
            for depth, found in zip(self.depths, self.found, strict=True)
        ]
        return {"found": sum(self.found), "of": self.of * len(self.depths), "by_depth": by_depth}


class Ends(Record):
    """Elements that 8-bit floats without a scale cannot hold: packed ones of keys and values in all layers."""

    elements: int
    largest: int
    """Stored as the largest number of the format."""
    zero: int
    """Stored as zero."""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}


class Assessed(Record):
    """One technique."""

    name: str
    papers: tuple[str, ...]
    tokens: int
    """Tokens that the cache had seen when its bytes were counted."""
    kv_bytes: int | None = None
    predicted_bytes: int | None = None
    plain_bytes: int | None = None
    """Of the plain cache, as measured."""
    working_bytes: int | None = None
    """The most that the process took beside what it had before and the cache."""
    ttft: Ratio | None = None
    """Over the plain cache's, in the same run."""
    tpot: Ratio | None = None
    quality: Quality | None = None
    """None for the plain cache, with which the others are compared, and without text."""
    greedy: Greedy | None = None
    recall: Recall | None = None
    """Of the plain cache too: what it does not find itself says nothing of the others."""
    like: tuple[str, ...] = ()
    """Techniques that the text does not tell this one from."""
    pareto: bool = False
    """Whether no other is as good in fewer bytes, or better in as many."""
    error: str | None = None
    ends: Ends | None = None
    """Of 8-bit floats without a scale."""

    @property
    def agrees(self) -> bool | None:
        """Whether its bytes are as predicted; None where none were counted, or none could be predicted."""
        return None if self.kv_bytes is None or self.predicted_bytes is None else self.kv_bytes == self.predicted_bytes

    @property
    def words(self) -> str:
        """On one line: "int4: 1,762,560 bytes as predicted, perplexity +0.98%"."""
        words = self.name if self.kv_bytes is None else f"{self.name}: {self.kv_bytes:,} bytes"
        if self.agrees is not None:
            words += " as predicted" if self.agrees else ", NOT as predicted"
        if self.quality is not None:
            words += f", perplexity {self.quality.perplexity_change.value:+.2f}%"
        return words if self.error is None else f"{self.name}: {self.error}"

    @property
    def ratio(self) -> float | None:
        """The plain cache's bytes over its own."""
        return self.plain_bytes / self.kv_bytes if self.plain_bytes and self.kv_bytes else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "papers": list(self.papers), "tokens": self.tokens, "kv_bytes": self.kv_bytes,
            "predicted_bytes": self.predicted_bytes, "agrees": self.agrees, "plain_bytes": self.plain_bytes, "ratio": self.ratio,
            "working_bytes": self.working_bytes, "ends": None if self.ends is None else self.ends.to_dict(),
            "ttft_ratio": None if self.ttft is None else self.ttft.to_dict(),
            "tpot_ratio": None if self.tpot is None else self.tpot.to_dict(),
            "quality": None if self.quality is None else self.quality.to_dict(),
            "greedy": None if self.greedy is None else self.greedy.to_dict(),
            "recall": None if self.recall is None else self.recall.to_dict(),
            "not_told_from": list(self.like), "pareto": self.pareto, "error": self.error,
        }  # fmt: skip


class Assessment(Record):
    """All techniques of a run, the plain cache first."""

    rows: tuple[Assessed, ...]
    settings: AssessAsked
    text: str | None
    """Which; None where quality was not measured."""
    interrupted: bool = False
    left: tuple[str, ...] = ()
    """Techniques that do not work with the model, and why."""

    @property
    def smallest(self) -> Assessed | None:
        """The technique with the fewest bytes that keeps the bounds; None where none does, or none were set."""
        bounds = self.settings.bounds
        kept = [row for row in self.rows if row.kv_bytes and row.quality is not None and not bounds.broken(row)]
        return min(kept, key=lambda row: row.kv_bytes or 0, default=None) if bounds else None

    def broken(self, *, best: bool = False) -> list[str]:
        """What breaks the bounds, a line for each; with `best`, where one technique keeps them, nothing."""
        if best and self.smallest is not None:
            return []
        return [line for row in self.rows for line in self.settings.bounds.broken(row)]

    @property
    def agrees(self) -> bool | None:
        """Whether all bytes are as predicted."""
        found = [row.agrees for row in self.rows if row.agrees is not None]
        return all(found) if found else None

    @property
    def failed(self) -> bool:
        """Whether a technique could not be measured."""
        return any(row.error is not None for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            "agrees": self.agrees, "text": self.text, "interrupted": self.interrupted, "left_out": list(self.left),
            "settings": self.settings.to_dict(), "smallest": None if self.smallest is None else self.smallest.name,
            "rows": [row.to_dict() for row in self.rows],
        }  # fmt: skip


def ranked(rows: Sequence[Assessed], scores: Mapping[str, Scores]) -> list[Assessed]:
    """The plain cache, then by bytes; with who is best, and who cannot be told from whom."""
    rows = [*rows[:1], *sorted(rows[1:], key=lambda row: -(row.kv_bytes or 0))]
    judged = [(row, row.kv_bytes, row.quality) for row in rows]
    points = [(held, found.kl.value) for _, held, found in judged if held is not None and found is not None]
    # The plain cache loses nothing: no larger one is better.
    own = [(row.kv_bytes, 0.0) for row in rows[:1] if row.kv_bytes is not None and points]
    found_marks = pareto([*own, *points]) if points else ()
    marks = iter(found_marks[len(own) :])
    out: list[Assessed] = []
    for row, held, found in judged:
        if not out and own:
            row = row.replace(pareto=found_marks[0])
        if held is not None and found is not None:
            like = tuple(
                other for other in scores if other != row.name and not separates(scores[row.name], scores[other]).apart
            )
            row = row.replace(pareto=next(marks), like=like)
        out.append(row)
    return out
