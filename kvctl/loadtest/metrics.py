"""What an engine's page of metrics says of its KV cache and its queue, whatever that engine and version call it.

A name that is not on the page is not available, never 0. Of each meaning the first name that is there counts; several engines behind
one page are added up, shares are averaged.
"""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from kvctl.engines.metrics import NAMES, page_of
from kvctl.errors import KvctlError
from kvctl.loadtest.target import Client
from kvctl.record import Record

_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
GAUGES = ("kv_use", "running", "waiting", "kv_tokens")
COUNTERS = (
    "preemptions",
    "prompt_tokens",
    "output_tokens",
    "cached_tokens",
    "prefix_queries",
    "prefix_hits",
    "requests",
    "ttft_seconds",
    "ttft_requests",
)
SHARES = ("kv_use",)
_MOST_SHARE = 1.05
"""A share that is more is none: some version counts something else (vllm#20302)."""
MOST_LOOKS = 2048
"""Samples that are kept: eight minutes and a half of four a second. Where there are more, two become one."""


class Sample(Record):
    """One look at the page: nanoseconds of the monotonic clock, and values by meaning; without what is not there."""

    at: int
    values: Mapping[str, float]
    series: Mapping[str, Mapping[str, float]] = {}
    """Of counters each line by its labels: a reset of one is seen in its own."""
    info: Mapping[str, Mapping[str, str]] = {}
    """Labels of lines that say how the engine is set up."""
    resets: Mapping[str, int] = {}
    """Of counters: times that they fell until then, where `series` goes on over that (see Unbroken)."""


def read(page: str, engine: str, at: int = 0) -> Sample:
    """One page.

    Raises:
        ValueError: it is no such page.

    """
    from prometheus_client.parser import text_string_to_metric_families

    names = NAMES.get(engine, {})
    wanted = {name for aliases in names.values() for name in aliases}
    found: dict[str, dict[str, float]] = {}
    info: dict[str, Mapping[str, str]] = {}
    # A page has some hundred kilobytes of histograms; parsing takes the loop's time, so that only what is meant is parsed.
    lines = [
        line
        for line in page.split("\n")
        if ((name := _NAME.match(line)) is not None and name[0] in wanted) or "cache_config_info{" in line[:80]
    ]
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                value = float(sample.value)
                if sample.name not in wanted:
                    info[sample.name] = dict(sample.labels)
                elif math.isfinite(value) and value >= 0:
                    found.setdefault(sample.name, {})[sys.intern(repr(sorted(sample.labels.items())))] = value
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"/metrics is no page of metrics: {str(error)[:100]}") from None
    values: dict[str, float] = {}
    series: dict[str, dict[str, float]] = {}
    for meaning, aliases in names.items():
        own = next((found[name] for name in aliases if name in found), None)
        if not own:
            continue
        value = sum(own.values()) / (len(own) if meaning in SHARES else 1)
        if meaning in SHARES and value > _MOST_SHARE:
            continue
        values[meaning] = value
        if meaning in COUNTERS:
            series[meaning] = own
    return Sample(at, values, series, info)


def of_slots(answer: Any, cells: int | None = None) -> dict[str, float]:
    """llama.cpp's /slots: tokens that requests under way hold, and their share of all cells; without `cells` each slot has its own.
    Nothing of what is no such answer."""
    if not isinstance(answer, list) or not all(isinstance(slot, Mapping) for slot in answer):
        return {}
    cells = cells or sum(_whole(slot.get("n_ctx")) for slot in answer)
    held = 0
    for slot in answer:
        if slot.get("is_processing"):
            after = slot.get("next_token")
            after = after[0] if isinstance(after, list) and after else after
            decoded = after.get("n_decoded") if isinstance(after, Mapping) else 0
            # Newer builds (b11434) count what was generated among n_prompt_tokens, so that this is the surer sum.
            computed, cached = (slot.get(f"n_prompt_tokens_{part}") for part in ("processed", "cache"))
            known = computed is not None and cached is not None
            held += _whole(computed) + _whole(cached) if known else _whole(slot.get("n_prompt_tokens"))
            held += _whole(decoded)
    out: dict[str, float] = {"kv_tokens": held}
    if cells and held <= _MOST_SHARE * cells:
        out["kv_use"] = held / cells
    return out


def _whole(value: Any) -> int:
    """A number of tokens; 0 of what is none."""
    known = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**53
    return int(value) if known else 0


class Growth(Record):
    """How far a counter went."""

    value: float
    resets: int
    """Times it fell: the server was restarted."""


def growth(samples: Iterable[Sample], meaning: str) -> Growth | None:
    """Of a counter over all samples, line by line; None where it was not there at the first and the last of them."""
    kept = [sample for sample in samples if meaning in sample.series]
    if len(kept) < 2:
        return None
    total, resets = 0.0, kept[-1].resets.get(meaning, 0) - kept[0].resets.get(meaning, 0)
    before = dict(kept[0].series[meaning])
    for sample in kept[1:]:
        fell = False
        for labels, value in sample.series[meaning].items():
            last = before.get(labels, 0.0)
            fell |= value < last
            total += value - last if value >= last else value
        resets += fell
        before = dict(sample.series[meaning])
    return Growth(total, resets)


class Course:
    """A counter by time, added up once: how far it went between any two times."""

    def __init__(self, samples: Iterable[Sample], meaning: str) -> None:
        kept = [sample for sample in samples if meaning in sample.series]
        self._at = [sample.at for sample in kept]
        steps = [found.value for pair in pairwise(kept) if (found := growth(pair, meaning)) is not None]
        self._sums = list(accumulate(steps, initial=0.0)) if kept else []

    def until(self, at: int) -> float | None:
        """From the first look to the one at that very time; None where that did not say."""
        place = bisect_left(self._at, at)
        return self._sums[place] if place < len(self._at) and self._at[place] == at else None

    def between(self, first: int, last: int) -> float | None:
        """From the last look before `first` to the last before `last`; None where there are none."""
        start, end = bisect_left(self._at, first) - 1, bisect_left(self._at, last) - 1
        return self._sums[end] - self._sums[max(start, 0)] if end > 0 else None


class Unbroken:
    """Counters that go on where a restarted server begins anew: of their samples any may be left out, and sums stay what they were."""

    def __init__(self) -> None:
        self._last: dict[str, dict[str, float]] = {}
        self._carried: dict[str, dict[str, float]] = {}
        self._resets: dict[str, int] = {}
        self._info: Mapping[str, Mapping[str, str]] = {}

    def add(self, sample: Sample) -> Sample:
        """The next one, as it is kept."""
        series = {}
        for meaning, lines in sample.series.items():
            last, carried = self._last.setdefault(meaning, {}), self._carried.setdefault(meaning, {})
            fell = [labels for labels, value in lines.items() if value < last.get(labels, 0.0)]
            for labels in fell:
                carried[labels] = carried.get(labels, 0.0) + last[labels]
            if fell:
                self._resets[meaning] = self._resets.get(meaning, 0) + 1
            last.update(lines)
            series[meaning] = {labels: value + carried.get(labels, 0.0) for labels, value in last.items()}
        self._info = self._info if sample.info == self._info else sample.info
        return sample.replace(series=series, resets=dict(self._resets), info=self._info)


def thinned(samples: Sequence[Sample]) -> list[Sample]:
    """About half as many: of two neighbours the later one, with the higher gauges of both. The first and the last stay."""
    out = [samples[0]]
    rest = samples[1:-1]
    for number in range(0, len(rest) - 1, 2):
        one, other = rest[number], rest[number + 1]
        values = {
            name: max(value, one.values.get(name, value)) if name in GAUGES else value
            for name, value in (*one.values.items(), *other.values.items())
        }
        out.append(other.replace(values=values))
    if len(rest) % 2:
        out.append(rest[-1])
    return [*out, samples[-1]]


class Watched(Record):
    """How looking went."""

    looks: int
    misses: int
    """Of these, those that gave nothing."""
    why: str | None
    """Of the first of those."""
    seconds: float
    """That all of them took."""


class Watch:
    """Looks at the server's metrics on a timer, in a thread of its own, from `start` to `stop`."""

    def __init__(
        self, client: Client, engine: str, every: float = 0.25, clock: Callable[[], int] = time.monotonic_ns, cells: int | None = None
    ) -> None:  # fmt: skip
        """`cells`: of llama.cpp's whole cache, where that is known."""
        self.cells = cells
        self.client, self.engine, self.every, self._clock = client, engine, every, clock
        self.samples: list[Sample] = []
        """MOST_LOOKS of them at most."""
        self.looks = 0
        self.misses = 0
        """Looks that gave nothing."""
        self.took_ns = 0
        """All of them."""
        self.why: str | None = None
        """Of the first that gave nothing."""
        self._unbroken = Unbroken()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """The first look is done when this returns."""
        self.look()
        self._thread.start()

    def stop(self) -> None:
        """And the last one too."""
        self._over.set()
        if self._thread.ident is not None:  # it was started
            self._thread.join(timeout=30)
        self.look()

    def _run(self) -> None:
        while not self._over.wait(self.every):
            self.look()

    @property
    def watched(self) -> Watched:
        return Watched(self.looks, self.misses, self.why, self.took_ns / 1e9)

    def look(self) -> None:
        """One more sample; whatever the server answers, no error."""
        began = self._clock()
        self.looks += 1
        try:
            answer = self.client.get(page_of(self.engine))
            if answer is None or answer.status_code != 200:
                raise ValueError(
                    "no page of metrics" if answer is None else f"{page_of(self.engine)} answers {answer.status_code}"
                )
            sample = read(answer.text, self.engine, (began + self._clock()) // 2)
            if self.engine == "llama.cpp":
                sample = sample.replace(values={**sample.values, **self._slots()})
            self.keep(sample)
        except (KvctlError, ValueError) as error:
            self.misses += 1
            self.why = self.why or (error.message if isinstance(error, KvctlError) else str(error))[:200]
        self.took_ns += self._clock() - began

    def keep(self, sample: Sample) -> None:
        """One more, in bounded memory."""
        self.samples.append(self._unbroken.add(sample))
        if len(self.samples) > MOST_LOOKS:
            self.samples = thinned(self.samples)

    def _slots(self) -> dict[str, float]:
        try:
            slots = self.client.get("/slots")
            return of_slots(slots.json(), self.cells) if slots is not None and slots.status_code == 200 else {}
        except (KvctlError, ValueError):
            return {}
