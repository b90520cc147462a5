"""Load tests as files: written whole, and read back without trust in what stands there."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvctl.errors import ConfigError, KvctlError, SourceError, UsageError
from kvctl.files import write_whole
from kvctl.loadtest import calibrate, load, metrics, target
from kvctl.loadtest.figures import SECOND, TIMES, Figures, Slo
from kvctl.loadtest.histogram import Histogram
from kvctl.loadtest.limit import Limit
from kvctl.loadtest.report import SCHEMA, ServeReport
from kvctl.loadtest.run import Outcome, Plan, Step
from kvctl.loadtest.verdict import Verdict, Window
from kvctl.sources import jsonfile

_LIMIT = 512_000_000
"""Bytes; an hour of looks at the server's metrics takes a few millions."""
_HINT = "name a file that kvctl serve-test wrote with --save or --json"
_DEEPEST = 20

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Number = Annotated[float, msgspec.Meta(ge=0, le=2.0**62)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class _Times(msgspec.Struct):
    mean: _Number
    standard_deviation: _Number
    min: _Number
    max: _Number
    histogram: str


class _Requests(msgspec.Struct):
    good: _Count
    failed: dict[str, _Count]
    messages: dict[str, list[str]]
    short: _Count
    reconnects: _Count


class _Tokens(msgspec.Struct):
    input: _Count
    output: _Count
    cached: _Count | None
    output_from: dict[str, _Count]


class _Figures(msgspec.Struct):
    requests: _Requests
    tokens: _Tokens
    seconds: _Number
    times: dict[str, _Times | None]
    kept: _Count
    events: _Count
    events_bundled: _Count
    without_kernel_stamps: _Count


class _Verdict(msgspec.Struct):
    kind: str
    evidence: tuple[str, ...]


class _Metrics(msgspec.Struct):
    looks: _Count
    kv_use_max: _Share | None
    waiting_max: _Number | None
    running_max: _Number | None
    preemptions: _Number | None
    resets: _Count
    counters: dict[str, _Number]
    series: list[dict[str, _Number | None]]


class _Events(msgspec.Struct):
    first: _Count
    counts: list[_Count]


class _Load(msgspec.Struct):
    step: dict[str, Any]
    began_seconds: _Number | None
    events_by_second: _Events
    sent: _Count
    whole_seconds: _Number
    output_tokens_per_second: _Number | None
    all: _Figures
    steady: _Figures
    verdict: _Verdict
    metrics: _Metrics
    client_cpu: _Number
    given_up: str | None
    interrupted: bool


class _Objective(msgspec.Struct):
    percent: _Number
    from_schedule: bool
    ttft: _Number | None = None
    tpot: _Number | None = None
    e2e: _Number | None = None


class _Settings(msgspec.Struct):
    input_tokens: _Count
    output_tokens: _Count
    prefix_tokens: _Count
    groups: _Count
    requests: _Count | None
    seconds: _Number | None
    warm_up: _Count | None
    seed: int | None
    max_error_percent: _Number
    objective: _Objective | None
    steps: list[dict[str, Any]]


class _Limit(msgspec.Struct):
    borne: _Count | None
    broken: _Count | None
    why: str


class _Report(msgspec.Struct):
    """What has to be there; more may be."""

    dry_run: bool
    interrupted: bool
    url: str
    endpoint: str
    server: dict[str, Any]
    environment: dict[str, Any]
    settings: _Settings
    calibration: dict[str, Any] | None
    loads: list[_Load]
    limit: _Limit | None
    notes: tuple[str, ...]
    kvctl_version: str = ""


def save(report: ServeReport, path: str) -> None:
    """Write the report's JSON, whole or not at all.

    Raises:
        KvctlError: it cannot be written.

    """
    write_whole(path, (json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n").encode())


def read(path: str) -> ServeReport:
    """A report that `save` or --json wrote.

    Raises:
        SourceError: there is no such file, or it cannot be read.
        ConfigError: it holds something else, is damaged, or was written by a later kvctl.

    """
    where = jsonfile.plain(path[:200])
    try:
        data = jsonfile.read_file(Path(path), limit=_LIMIT)
    except ConfigError as error:
        words = error.message.replace("a configuration", "a saved load test")
        raise ConfigError(words, hint=_HINT) from None
    except KvctlError as error:
        raise SourceError(error.message, hint=_HINT) from None
    except (RecursionError, ValueError) as error:  # ValueError: a NUL in the path
        raise SourceError(f"{where} cannot be read: {error}", hint=_HINT) from None
    return of_dict(data, where)


def of_dict(data: Mapping[str, Any], where: str) -> ServeReport:
    """What `ServeReport.to_dict` gave; `where` names it in errors.

    Raises:
        ConfigError: it is something else.

    """
    schema = data.get("schema")
    if schema != SCHEMA:
        name = jsonfile.plain(schema[:40]) if isinstance(schema, str) else ""
        family, _, number = name.partition("/")
        if family == SCHEMA.partition("/")[0] and number.isdecimal():
            raise ConfigError(f"{where} is of a later kvctl: {name}, and this one reads {SCHEMA}")
        what = f"holds {name}" if name else "names no schema"
        raise ConfigError(f"{where} {what}, and is no saved load test ({SCHEMA})", hint=_HINT)
    try:
        return _report(msgspec.convert(_tamed(data), _Report))
    except (msgspec.ValidationError, ValueError, TypeError, OverflowError, UsageError) as error:
        raise ConfigError(f"{where} is damaged: {jsonfile.plain(str(error)[:200])}", hint=_HINT) from None


def _tamed(value: Any, depth: int = 0) -> Any:
    """Without control characters and what is no number, and nowhere deep.

    Raises:
        ValueError: it is nested too deep.

    """
    if depth > _DEEPEST:
        raise ValueError("it is nested too deep")
    if isinstance(value, str):
        return value if value.isprintable() else "".join(char if char.isprintable() else " " for char in value)
    if isinstance(value, dict):
        return {_tamed(key): _tamed(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_tamed(item, depth + 1) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _report(found: _Report) -> ServeReport:
    settings = found.settings
    objective = settings.objective
    slo = None
    if objective is not None:
        limits = {name: getattr(objective, name) for name in ("ttft", "tpot", "e2e")}
        whole = {name: None if value is None else _whole(value) for name, value in limits.items()}
        slo = Slo(**whole, scheduled=objective.from_schedule)
    length = None
    if settings.requests is not None or settings.seconds is not None:
        length = load.Length(settings.requests, settings.seconds)
    plan = Plan(
        target.read_url(found.url), tuple(map(_step, settings.steps)), settings.input_tokens, settings.output_tokens, length,
        found.endpoint, warm=settings.warm_up, slo=slo, slo_percent=99.0 if objective is None else objective.percent, seed=settings.seed,
        most_errors=settings.max_error_percent, limit=found.limit is not None, prefix_tokens=settings.prefix_tokens, groups=settings.groups,
    )  # fmt: skip
    own = None if found.calibration is None else calibrate.of_dict(found.calibration)
    limit = None if found.limit is None else Limit(found.limit.borne, found.limit.broken, found.limit.why)
    return ServeReport(
        plan, _server(found.server) if found.loads else found.server, found.environment, tuple(_outcome(one, slo) for one in found.loads),
        limit, own, found.notes, found.dry_run, found.interrupted, version=found.kvctl_version,
    )  # fmt: skip


def _server(found: dict[str, Any]) -> dict[str, Any]:
    """With all that is shown of it; what a file does not say is not known."""
    unknown: dict[str, Any] = {"engine": "unknown", "model": "?", "tokens_counted_by": "?", "prompts_exact": True}
    return dict.fromkeys(("version", "context", "slots")) | unknown | found


def _step(found: dict[str, Any]) -> Step:
    step = Step(**found)
    if not isinstance(step.words, str):
        raise ValueError("a step without words")
    return step


def _outcome(found: _Load, slo: Slo | None) -> Outcome:
    figures = _figures(found.all, slo)
    events = found.events_by_second
    figures.by_second = {events.first + place: count for place, count in enumerate(events.counts) if count}
    seen = found.metrics
    window = Window(seen.kv_use_max, seen.waiting_max, seen.running_max, seen.preemptions, seen.resets, seen.looks)
    return Outcome(
        _step(found.step), figures, _figures(found.steady, slo), window, Verdict(found.verdict.kind, found.verdict.evidence),
        tuple(map(_sample, seen.series)), seen.counters, found.sent, found.whole_seconds, found.output_tokens_per_second,
        found.client_cpu, found.given_up, found.interrupted, 0 if found.began_seconds is None else max(1, _whole(found.began_seconds)),
    )  # fmt: skip


def _sample(found: dict[str, float | None]) -> metrics.Sample:
    values = {name: value for name in metrics.GAUGES if (value := found.get(name)) is not None}
    lost = found.get("preemptions")
    series = {} if lost is None else {"preemptions": {"": lost}}
    return metrics.Sample(_whole(found.get("seconds") or 0.0), values, series)


def _figures(found: _Figures, slo: Slo | None) -> Figures:
    out = Figures(slo)
    requests, tokens = found.requests, found.tokens
    out.good, out.faults, out.words = requests.good, Counter(requests.failed), requests.messages
    if set(out.faults) - set(out.words):
        raise ValueError("failures without messages")
    out.short, out.reconnects = requests.short, requests.reconnects
    out.tokens_in, out.tokens_out, out.sources = tokens.input, tokens.output, Counter(tokens.output_from)
    out.cached, out.with_cached = tokens.cached or 0, requests.good if tokens.cached is not None else 0
    out.kept, out.chunks, out.bundled = found.kept, found.events, found.events_bundled
    out.user_stamps = found.without_kernel_stamps
    if found.seconds:
        out.first, out.last = 1, 1 + _whole(found.seconds)
    for name in TIMES:
        times = found.times.get(name)
        if times is not None:
            mean, deviation = times.mean * SECOND, times.standard_deviation * SECOND
            out.times[name] = Histogram.of_text(times.histogram, mean, deviation, _whole(times.min), _whole(times.max))
    return out


def _whole(seconds: float) -> int:
    """Nanoseconds."""
    return round(seconds * SECOND)
