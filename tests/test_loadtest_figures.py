"""Figures against numbers worked out by hand."""

from __future__ import annotations

from array import array

import pytest

from kvctl.loadtest.deltas import Usage
from kvctl.loadtest.exchange import Exchange, Fault
from kvctl.loadtest.figures import DEFINITIONS, Figures, Slo

MS = 1_000_000


def _exchange(
    *stamps: int, tokens: int | None = None, scheduled: int = 0, sent: int = 10, answer: int | None = None
) -> Exchange:
    """Times in milliseconds."""
    one = Exchange(b"", scheduled * MS)
    one.sent = sent * MS
    one.stamps = array("q", [at * MS for at in stamps])
    one.answer_at = (stamps[0] if answer is None else answer) * MS if stamps else 0
    one.ended = (max(stamps) + 1 if stamps else sent) * MS
    one.usage = None if tokens is None else Usage(100, tokens, 40)
    return one


def _p50(figures: Figures, name: str) -> float:
    return figures.times[name].percentile(50).value / MS


def test_times_of_one_request() -> None:
    """Due at 0, sent at 10, tokens at 110, 130, 150, 190 ms; the answer begins with the second."""
    figures = Figures()
    figures.add(_exchange(110, 130, 150, 190, tokens=4, answer=130))
    assert _p50(figures, "ttft") == pytest.approx(100, rel=1e-3)
    assert _p50(figures, "ttfat") == pytest.approx(120, rel=1e-3)
    assert _p50(figures, "tpot") == pytest.approx(80 / 3, rel=1e-3)
    assert _p50(figures, "itl") == pytest.approx(20, rel=1e-3)
    assert figures.times["itl"].count == 3  # the first token's time is no gap
    assert figures.times["itl"].mean / MS == pytest.approx(80 / 3)
    assert _p50(figures, "e2e") == pytest.approx(180, rel=1e-3)
    assert _p50(figures, "dispatch") == pytest.approx(10, rel=1e-3)
    assert _p50(figures, "ttft_scheduled") == pytest.approx(110, rel=1e-3)
    assert _p50(figures, "e2e_scheduled") == pytest.approx(190, rel=1e-3)
    assert (figures.tokens_in, figures.tokens_out, figures.cached) == (100, 4, 40)
    # From 10 to 191 ms.
    assert figures.rates()["output_tokens"] == pytest.approx(4 / 0.181)


def test_events_of_several_tokens_are_no_tokens() -> None:
    """Four tokens an event, 20 ms apart: 5 ms a token, and no gap is called the time between tokens (sglang#12064)."""
    figures = Figures()
    figures.add(_exchange(100, 120, 140, 160, tokens=16))
    assert figures.times["itl"].count == 0
    assert _p50(figures, "icl") == pytest.approx(20, rel=1e-3)
    assert _p50(figures, "tpot") == pytest.approx(60 / 15, rel=1e-3)
    assert figures.tokens_a_chunk == 4


def test_without_usage_events_are_counted_and_that_is_said() -> None:
    figures = Figures()
    figures.add(_exchange(100, 120))
    figures.add(_exchange(100, 120, tokens=2))
    assert figures.sources == {"events": 1, "usage": 1}
    assert figures.tokens_out == 4
    assert figures.without_usage == 1


def test_one_token_has_no_time_per_token() -> None:
    figures = Figures(Slo(tpot=5 * MS))
    figures.add(_exchange(100, tokens=1))
    assert figures.times["tpot"].count == 0
    assert figures.kept == 1


def test_failures_are_no_samples() -> None:
    figures = Figures()
    for kind, message in (("status", "500"), ("status", "500"), ("status", "502"), ("truncated", "cut")):
        bad = _exchange(100, 120, tokens=2)
        bad.fault = Fault(kind, message)
        figures.add(bad)
    assert (figures.good, figures.count) == (0, 4)
    assert figures.faults == {"status": 3, "truncated": 1}
    assert figures.words == {"status": ["500", "502"], "truncated": ["cut"]}
    assert all(not times.count for times in figures.times.values())
    assert figures.tokens_out == 0
    # What was streamed before is seen where it came.
    assert sum(one.events for one in figures.slices) == figures.events == 8
    assert figures.to_dict()["times"]["ttft"] is None


def test_objectives_count_from_when_a_request_was_due() -> None:
    """Sent at 10 ms and answered at 110: within 105 ms of sending, not of when it was due (guidellm#1048)."""
    for scheduled, kept in ((False, 1), (True, 0)):
        figures = Figures(Slo(ttft=105 * MS, scheduled=scheduled))
        figures.add(_exchange(110, 120, tokens=2))
        assert figures.kept == kept
        assert figures.rates()["goodput"] == pytest.approx(kept / 0.111)
    figures = Figures(Slo(ttft=200 * MS, tpot=9 * MS))
    figures.add(_exchange(110, 120, tokens=2))
    assert figures.kept == 0


def test_answers_that_are_shorter_than_asked() -> None:
    figures = Figures()
    figures.add(_exchange(100, 120, tokens=2), asked=2)
    figures.add(_exchange(100, 120, tokens=2), asked=512)
    assert figures.short == 1


def test_every_time_is_defined() -> None:
    assert set(DEFINITIONS) == set(Figures().times)


def test_a_hundred_thousand_requests_take_little_memory() -> None:
    figures = Figures()
    for number in range(100_000):
        figures.add(_exchange(number + 100, number + 120, tokens=2, scheduled=number, sent=number + 10))
    assert figures.count == 100_000
    assert sum(len(found.rows()) for found in figures.times.values()) < 10_000
    assert len(figures.slices) == 101
