"""The search for a limit, against servers that bear so many."""

from __future__ import annotations

import pytest

from kvctl.loadtest.figures import Figures
from kvctl.loadtest.lengths import Fixed
from kvctl.loadtest.limit import Limit, breaks, search
from kvctl.loadtest.plan import Step
from kvctl.loadtest.run import Outcome
from kvctl.loadtest.verdict import Verdict, Window
from kvctl.loadtest.work import Made

WORK = Made(Fixed(512), Fixed(128))


def _outcome(at: int, kind: str = "not limited", **more: object) -> Outcome:
    return Outcome(
        Step(WORK, at_once=at),
        Figures(),
        Figures(),
        Window(None, None, None, None, 0, 0),
        Verdict(kind, ("x",)),
        (),
        {},
        1,
        1.0,
        None,
        0.1,
    ).replace(**more)


@pytest.mark.parametrize(
    ("bears", "first"), [(1, 1), (2, 1), (3, 1), (7, 1), (12, 1), (16, 1), (5, 16), (1, 64), (15, 4), (4, 4)]
)
def test_small_limits_are_found_to_one(bears: int, first: int) -> None:
    tried: list[int] = []

    def test(at: int) -> tuple[Outcome, str | None]:
        tried.append(at)
        return _outcome(at), None if at <= bears else "kv-saturated"

    assert search(test, first, 4096) == Limit(bears, bears + 1, "kv-saturated")
    assert len(tried) == len(set(tried)) <= 10


def test_large_ones_to_a_sixteenth() -> None:
    found = search(lambda at: (_outcome(at), None if at <= 700 else "late"), 1, 4096)
    assert found.borne is not None
    assert found.broken is not None
    assert found.borne <= 700 < found.broken <= found.borne * 17 / 16


def test_where_there_is_none() -> None:
    assert search(lambda at: (_outcome(at), "late"), 8, 64) == Limit(None, 1, "late")
    assert search(lambda at: (_outcome(at), None), 1, 48) == Limit(48, None, "no more than 48 were tried")
    assert search(lambda at: (_outcome(at, "client-limited" if at > 8 else "not limited"), None), 1, 64) == Limit(
        8, None, "the client can do no more: x"
    )
    assert search(lambda at: (_outcome(at, interrupted=at > 2), None), 1, 64) == Limit(2, None, "interrupted")


def test_what_breaks() -> None:
    assert breaks(_outcome(1), None) is None
    assert breaks(_outcome(1, "compute-limited"), None) is None
    assert breaks(_outcome(1, "kv-saturated"), None) == "kv-saturated"
    assert breaks(_outcome(1, "batch-limited"), None) == "batch-limited"
    assert breaks(_outcome(1), "ttft") == "ttft"
    assert breaks(_outcome(1, given_up="5 of 20 failed"), None) == "5 of 20 failed"
    # llama.cpp throws requests out whose shared cells are full: that is why they failed.
    assert breaks(_outcome(1, "kv-saturated", given_up="5 of 20 failed"), None) == "kv-saturated"
