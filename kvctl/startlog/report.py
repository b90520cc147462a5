"""What a start-up log says beside what kvctl expects, and why they differ where they do."""

from __future__ import annotations

from typing import Any

from kvctl.record import Record
from kvctl.startlog.figures import Figure, Refusal
from kvctl.startlog.log import StartLog


class LogRow(Record):
    """One value of the log, and kvctl's."""

    name: str
    unit: str
    """bytes, tokens, blocks, requests, states or "" for a ratio."""
    said: str
    """As the log prints it."""
    value: float
    half: float
    """Half of its last printed digit; 0 where it is exact."""
    line: int
    low: float | None
    """What kvctl expects at least, for what rounds to the printed memory. None: it has no such value."""
    high: float | None
    agrees: bool | None
    """Whether they are the same within the printed precision. None: the log measured what kvctl only estimates."""
    difference: float
    """The log's value less the nearest that kvctl expects; 0 where they agree."""
    cause: str = ""
    """What accounts for a difference; empty where nothing was found that does."""
    remark: str = ""

    def to_dict(self) -> dict[str, Any]:
        out = {name: getattr(self, name) for name in self._fields}
        return out | {"cause": self.cause or None, "remark": self.remark or None}


def row(
    name: str,
    said: Figure,
    low: float | None,
    high: float | None,
    agrees: bool | None,
    cause: str = "",
    remark: str = "",
) -> LogRow:
    """A row of the report."""
    difference = 0.0
    if not agrees and low is not None and high is not None:
        difference = said.value - (low if said.value < low else high if said.value > high else said.value)
    return LogRow(name, said.unit, said.text, said.value, said.half, said.line, low, high, agrees,
                  round(difference, 6), cause, remark)  # fmt: skip


class Refused(Record):
    """Why an engine did not start, in plain words."""

    kind: str
    line: int
    why: str
    """What was short, and by how much."""
    short_bytes: int | None
    fits: tuple[str, ...]
    """Settings with which it fits, each worked out."""
    said: str
    """The log's own line."""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields} | {"fits": list(self.fits)}


class LogReport(Record):
    """A start-up log, explained."""

    log: StartLog
    rows: tuple[LogRow, ...]
    refused: Refused | None
    notes: tuple[str, ...]

    @property
    def agrees(self) -> bool | None:
        """Whether nothing that kvctl works out differs from the log; None where it has no such number."""
        found = [row.agrees for row in self.rows if row.agrees is not None]
        return all(found) if found else None

    @property
    def unexplained(self) -> tuple[LogRow, ...]:
        """Rows that differ, and nothing was found that accounts for it."""
        return tuple(row for row in self.rows if row.agrees is False and not row.cause)

    def to_dict(self) -> dict[str, Any]:
        return self.log.to_dict() | {
            "agrees": self.agrees,
            "rows": [row.to_dict() for row in self.rows],
            "refused": self.refused.to_dict() if self.refused is not None else None,
            "notes": list(self.notes),
        }


def refusal_words(refusal: Refusal) -> str:
    """The log's own line without what stands before the error."""
    text = refusal.text
    for mark in ("ValueError: ", "RuntimeError: ", "OutOfMemoryError: "):
        text = text.rpartition(mark)[2] or text
    return text[:300]
