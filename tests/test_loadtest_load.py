"""When requests are sent: times against formulas, loads against a server that does as a script says."""

from __future__ import annotations

import itertools
import socket
import statistics
import time

import pytest
from scripted_server import Scripted, good, wait

from kvctl.loadtest.connection import Address
from kvctl.loadtest.exchange import Exchange
from kvctl.loadtest.load import MEASURED, SECOND, WARM, Ask, Closed, Key, Length, Load, Open, constant, gamma, ramp
from kvctl.loadtest.loop import Loop

REQUEST = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"


def _run(load: Load, delay: float = 0.0) -> None:
    with Scripted(lambda number: [wait(delay), *good(2)]) as server:
        loop = Loop(Address(socket.AF_INET, "127.0.0.1", server.port, "localhost"))
        loop.run(load)
        loop.close()


def _key(exchange: Exchange) -> Key:
    assert isinstance(exchange.key, Key)
    return exchange.key


def test_so_many_at_a_time_and_the_warm_up_is_handed_over() -> None:
    done: list[Exchange] = []
    load = Closed(4, lambda number: Ask(REQUEST), Length(requests=20), done.append, warm=8)
    _run(load, 0.02)
    assert [sum(_key(one).phase == phase for one in done) for phase in (WARM, MEASURED)] == [8, 20]
    assert {_key(one).number for one in done} == set(range(28))
    # Never more than four under way, and four but at the start and the end: there is no pause between the two phases.
    moments = sorted([(one.sent, 1) for one in done] + [(one.ended, -1) for one in done])
    live = list(itertools.accumulate(step for _, step in moments))
    assert max(live) == 4
    first = min(one.scheduled for one in done if _key(one).phase == MEASURED)
    before = [one for one in done if _key(one).phase == WARM and one.ended > first]
    assert before
    assert load.began == first


def test_for_so_long() -> None:
    done: list[Exchange] = []
    load = Closed(2, lambda number: Ask(REQUEST), Length(seconds=0.5), done.append)
    start = time.monotonic()
    _run(load, 0.05)
    assert 0.4 < time.monotonic() - start < 3
    assert load.last - load.began <= 0.5 * SECOND
    assert all(one.good for one in done)


def test_by_a_clock_that_does_not_wait() -> None:
    """20 a second while answers take 0.3 s: six are under way at a time, and each goes out when it is due."""
    done: list[Exchange] = []
    load = Open(constant(20), lambda number: Ask(REQUEST), Length(requests=20), done.append)
    _run(load, 0.3)
    due = sorted(one.scheduled for one in done)
    assert [round((at - due[0]) / SECOND * 20, 6) for at in due] == list(range(20))
    assert statistics.median(one.sent - one.scheduled for one in done) < 0.02 * SECOND
    assert (
        max(
            itertools.accumulate(
                step for _, step in sorted([(o.sent, 1) for o in done] + [(o.ended, -1) for o in done])
            )
        )
        >= 4
    )


def test_what_waits_for_room_is_late_by_its_own_stamps() -> None:
    """One at a time, ten a second, 0.3 s each: the fifth is sent 0.8 s after it was due (4 × 0.3 − 4 × 0.1)."""
    done: list[Exchange] = []
    load = Open(constant(10), lambda number: Ask(REQUEST), Length(requests=5), done.append, most=1)
    _run(load, 0.3)
    late = [(one.sent - one.scheduled) / SECOND for one in sorted(done, key=lambda one: one.scheduled)]
    assert late[4] == pytest.approx(0.8, abs=0.25)
    assert late == sorted(late)


def test_a_stop_sends_no_more() -> None:
    done: list[Exchange] = []
    load = Closed(
        2,
        lambda number: Ask(REQUEST),
        Length(),
        lambda one: (done.append(one), load.stop() if len(done) == 10 else None),
    )
    _run(load)
    assert 10 <= len(done) <= 12


def test_times_of_arrival() -> None:
    assert list(itertools.islice(constant(4), 4)) == [0, 0.25, 0.5, 0.75]
    times = list(itertools.islice(gamma(10, 1, 5), 20_000))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    # Poisson: the mean gap is 1/rate and so is its standard deviation; of shape k it is 1/(rate √k).
    assert statistics.mean(gaps) == pytest.approx(0.1, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.03)
    bursts = [b - a for a, b in itertools.pairwise(itertools.islice(gamma(10, 0.25, 5), 20_000))]
    assert statistics.mean(bursts) == pytest.approx(0.1, rel=0.05)
    assert statistics.stdev(bursts) == pytest.approx(0.2, rel=0.06)
    assert list(itertools.islice(gamma(10, 1, 5), 9)) == times[:9]
    # From 2 to 6 a second in 10 s are 40 requests, of which 2·5 + 0.4·25/2 = 15 in the first half.
    rising = list(itertools.takewhile(lambda at: at < 12, ramp(2, 6, 10)))
    assert sum(at < 10 for at in rising) == pytest.approx(40, abs=1)
    assert sum(at < 5 for at in rising) == pytest.approx(15, abs=1)
    assert sum(10 <= at < 12 for at in rising) == pytest.approx(12, abs=1)
    assert rising == sorted(rising)
    assert [round(at, 9) for at in itertools.islice(ramp(5, 5, 10), 3)] == [0, 0.2, 0.4]
