"""What a long run holds, and how long its report takes: simulated, not waited for."""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from array import array
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType

import pytest

from kvctl.loadtest.deltas import Usage
from kvctl.loadtest.exchange import Exchange, Fault
from kvctl.loadtest.figures import Figures
from kvctl.loadtest.lengths import Fixed
from kvctl.loadtest.metrics import MOST_LOOKS, Course, Sample, Unbroken, Watch, growth, thinned
from kvctl.loadtest.plan import Step
from kvctl.loadtest.report import _slices, load_of
from kvctl.loadtest.run import Outcome
from kvctl.loadtest.slices import Slices
from kvctl.loadtest.verdict import Verdict, Window, window
from kvctl.loadtest.work import Made

SECOND = 1_000_000_000


def _exchange(lot: random.Random, at: int, tokens: int) -> Exchange:
    one = Exchange(b"", at)
    one.sent = at + lot.randrange(100_000)
    first = one.sent + lot.randrange(10_000_000, 500_000_000)
    one.stamps = array("q", [first + n * 20_000_000 for n in range(tokens)])
    one.answer_at, one.ended = first, one.stamps[-1] + 1
    one.usage = Usage(100, tokens, 0)
    if lot.random() < 0.05:
        one.fault = Fault("status", f"500: {lot.random()}")
    return one


def _outcome(figures: Figures, samples: tuple[Sample, ...] = ()) -> Outcome:
    return Outcome(
        Step(Made(Fixed(100), Fixed(4)), at_once=1), figures, Figures(), Window(None, None, None, None, 0, 0), Verdict("x", ()), samples, {}, 1, 1.0, None, 0.1
    )  # fmt: skip


def _size(root: object) -> int:
    """Bytes of an object and of all that it holds, each once."""
    seen: dict[int, object] = {}
    stack = [root]
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, type | FunctionType | ModuleType | MethodType):
            continue
        seen[id(one)] = one
        stack.extend(gc.get_referents(one))
    return sum(map(sys.getsizeof, seen.values()))


def _held(count: int) -> int:
    """Bytes that figures of so many requests hold, one every two seconds."""
    lot, figures = random.Random(1), Figures()
    for number in range(count):
        figures.add(_exchange(lot, number * SECOND * 2, 4), 4)
    held = _size(figures)
    assert figures.count == count
    assert sum(one.events for one in figures.slices) == 4 * count
    assert max(map(len, figures.words.values())) == 3
    return held


def test_figures_of_nine_hours_hold_what_those_of_two_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,000 requests in two hours, four times as many in nine: what is held is the same but for sizes that did not come before. (The
    first values are held as they are; how many is made small here, to be past it.)"""
    monkeypatch.setattr("kvctl.loadtest.histogram._FEW", 1000)
    first, second = _held(4_000), _held(16_000)
    assert second < 1.5 * first
    assert second < 4 * 2**20


def test_slices_are_joined_and_sums_stay() -> None:
    lot, stamps, slices = random.Random(2), array("q"), Slices(most=64)
    for _ in range(1000):
        at = lot.randrange(1000 * SECOND)
        own = array("q", sorted(at + lot.randrange(10 * SECOND) for _ in range(20)))
        slices.add(own)
        stamps.extend(own)
    assert len(slices) <= 64
    assert slices.width == 16 * SECOND  # 1,010 seconds in 64 slices
    assert sum(one.events for one in slices) == 20_000
    assert sum(one.gaps for one in slices) == 19_000
    # By hand: in order, and each holds what came in it.
    for one in slices:
        assert one.events == sum(one.start <= stamp < one.start + one.width for stamp in stamps)


def _watched(looks: int) -> Watch:
    """So many, four a second: counters that grow, a restart every thousandth, gauges with a peak of one look."""
    watch = Watch(None, "vllm")  # type: ignore[arg-type]
    for count in range(1, looks + 1):
        since = float(count % 1000)
        values = {"kv_use": 0.99 if count == 777 else 0.5, "waiting": count % 7, "preemptions": since}
        series = {"preemptions": {"": since}, "requests": {f"engine {n}": since for n in range(8)}}
        watch.keep(Sample(count * SECOND // 4, values, series, {"info": {"block_size": "16"}}))
    return watch


def test_an_hour_of_looks_keeps_extremes_and_sums() -> None:
    """14,400 looks with 14 restarts. Of each thousand 0 to 999 were counted, and at 14,400 there are 400 more; the first look was at 1."""
    watch = _watched(14_400)
    assert MOST_LOOKS / 2 < len(watch.samples) <= MOST_LOOKS
    assert _size(watch.samples) < 8 * 2**20
    seen = growth(watch.samples, "preemptions")
    assert seen is not None
    assert (seen.value, seen.resets) == (999 - 1 + 13 * 999 + 400, 14)
    every = growth(watch.samples, "requests")
    assert every is not None
    assert every.value == 8 * seen.value
    found = window(watch.samples, watch.samples[0].at, watch.samples[-1].at)
    assert (found.kv_use, found.waiting, found.preemptions, found.resets) == (0.99, 6, seen.value, 14)
    assert [sample.at for sample in watch.samples] == sorted(sample.at for sample in watch.samples)
    course = Course(watch.samples, "preemptions")
    assert course.between(0, 10**18) == seen.value
    middle = watch.samples[900].at
    assert (course.between(0, middle) or 0) + (course.between(middle, 10**18) or 0) == seen.value


def test_two_hours_hold_what_one_does() -> None:
    assert _size(_watched(8_191).samples) < 1.3 * _size(_watched(4_096).samples)


def test_thinning_by_hand() -> None:
    kept = thinned(
        [Sample(at, {"kv_use": use, "prompt_tokens": at}) for at, use in enumerate((0.1, 0.9, 0.2, 0.3, 0.4, 0.5))]
    )
    assert [(sample.at, sample.values["kv_use"], sample.values["prompt_tokens"]) for sample in kept] == [
        (0, 0.1, 0), (2, 0.9, 2), (4, 0.4, 4), (5, 0.5, 5)
    ]  # fmt: skip


def test_counters_that_go_on_over_a_restart() -> None:
    """10, 12, then from nothing to 3 and on to 20; a line that is away for a look and comes back as it was."""
    unbroken = Unbroken()
    raw = [{"a": 10.0, "b": 5.0}, {"a": 12.0}, {"a": 3.0, "b": 5.0}, {"a": 20.0, "b": 6.0}]
    kept = [unbroken.add(Sample(at, {}, {"requests": lines})) for at, lines in enumerate(raw)]
    assert [dict(sample.series["requests"]) for sample in kept] == [
        {"a": 10, "b": 5}, {"a": 12, "b": 5}, {"a": 15, "b": 5}, {"a": 32, "b": 6}
    ]  # fmt: skip
    for some in (kept, [kept[0], kept[-1]]):
        found = growth(some, "requests")
        assert found is not None
        assert (found.value, found.resets) == (23, 1)


def _seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


@pytest.fixture(scope="module")
def reported() -> Callable[[int], tuple[float, int]]:
    def of(count: int) -> tuple[float, int]:
        lot, figures = random.Random(3), Figures()
        for number in range(count):
            figures.add(_exchange(lot, number * SECOND // 100, 3), 3)
        samples = tuple(
            Sample(number * SECOND // 4, {"kv_use": 0.5}, {"preemptions": {"": float(number)}})
            for number in range(MOST_LOOKS)
        )
        one = _outcome(figures, samples)
        return _seconds(lambda: json.dumps(load_of(one))), len(json.dumps(load_of(one)))

    return of


def test_a_report_takes_no_longer_for_more_requests(reported: Callable[[int], tuple[float, int]]) -> None:
    """16 times as many: with a list of them it would take 16 times as long, and be as much larger."""
    (few_s, few), (many_s, many) = reported(2_000), reported(32_000)
    assert many_s < 8 * few_s + 0.3
    assert many < 2 * few


def test_slices_beside_samples_take_time_by_their_number() -> None:
    """4,096 slices beside 2,048 looks, and a quarter of both: four times as long, not sixteen times."""

    def work(slices: int, looks: int) -> float:
        figures = Figures()
        for number in range(slices):
            figures.slices.add(array("q", [number * SECOND, number * SECOND + 1]))
        one = _outcome(
            figures,
            tuple(Sample(n * 2 * SECOND, {"kv_use": 0.5}, {"preemptions": {"": float(n)}}) for n in range(looks)),
        )
        return _seconds(lambda: list(_slices(one, 0)))

    assert work(4096, 2048) < 10 * work(1024, 512)
