"""How many requests at once a server bears: doubled until something breaks, then halved between."""

from __future__ import annotations

from collections.abc import Callable

from kvctl.loadtest.run import Outcome
from kvctl.loadtest.verdict import BATCH, CLIENT, FAILED, KV
from kvctl.record import Record

_NEAR = 16
"""The two sides of a limit are apart by no more than such a part of it, or by one."""


class Limit(Record):
    """Between what the limit lies."""

    borne: int | None
    """The most requests at once that nothing broke at; None: not even one."""
    broken: int | None
    """The fewest that something broke at; None: nothing broke, as far as was tried."""
    why: str
    """What broke, or why no more were tried."""

    def to_dict(self) -> dict[str, int | str | None]:
        return {"borne": self.borne, "broken": self.broken, "why": self.why}


def breaks(outcome: Outcome, missed: str | None) -> str | None:
    """What a load broke; `missed`: the objective that it missed."""
    if missed is not None:
        return missed
    kind = outcome.verdict.kind
    if outcome.given_up is not None and kind != KV:  # a full cache is why a load was given up, too
        return outcome.given_up
    if outcome.retried:
        return "requests were turned away"
    return kind if kind in (KV, BATCH, FAILED) else None


def search(test: Callable[[int], tuple[Outcome, str | None]], first: int, most: int) -> Limit:
    """Run loads until the limit is known; `test` runs one and says what it broke.

    A load that the client itself bounds ends the search: it says nothing of the server.
    """
    borne: int | None = None
    broken: int | None = None
    why, at = "", first
    while True:
        outcome, what = test(at)
        if outcome.interrupted:
            return Limit(borne, broken, "interrupted")
        if what is None and outcome.verdict.kind == CLIENT:
            return Limit(borne, broken, "the client can do no more: " + "; ".join(outcome.verdict.evidence))
        if what is None:
            borne = at
            if at >= most:
                return Limit(borne, broken, f"no more than {most:,} were tried")
        else:
            broken, why = at, what
            if at == 1:
                return Limit(None, 1, why)
        if broken is None:
            at = min(2 * at, most)
        elif borne is None:
            at = max(at // 2, 1)
        elif broken - borne <= max(1, borne // _NEAR):
            return Limit(borne, broken, why)
        else:
            at = (borne + broken) // 2
