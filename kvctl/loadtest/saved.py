"""Load tests as files: written whole, and read back without trust in what stands there.

A file has what a report is made of, so that all else is worked out again as it was at first. Of prompts it has how many there were.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvctl.errors import ConfigError, KvctlError, SourceError, UsageError
from kvctl.files import write_json
from kvctl.loadtest import calibrate, lengths, load, metrics, target
from kvctl.loadtest.capacity import Capacity, Side
from kvctl.loadtest.figures import SECOND, SHOWN, SUMS, TIMES, Figures, Slo
from kvctl.loadtest.histogram import Histogram, Percentile
from kvctl.loadtest.launch import Launch, Started
from kvctl.loadtest.limit import Limit
from kvctl.loadtest.plan import Plan, Step
from kvctl.loadtest.promised import SPEED, Promised
from kvctl.loadtest.report import SCHEMA, ServeReport
from kvctl.loadtest.run import Outcome
from kvctl.loadtest.slices import Slice, Slices
from kvctl.loadtest.verdict import Verdict, Window
from kvctl.loadtest.work import RANDOM, ROUND, Given, Made, Traced, Work
from kvctl.sources import jsonfile
from kvctl.speed import Range

_LIMIT = 512_000_000
"""Bytes; an hour of looks at the server's metrics takes a few millions."""
_HINT = "name a file that kvctl serve-test wrote with --save or --json"
_DEEPEST = 20

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Some = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
_Number = Annotated[float, msgspec.Meta(ge=0, le=2.0**62)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_More = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
_Amount = _Count | _Number
"""A whole number stays one."""


class _Percentile(msgspec.Struct):
    value: _Number
    low: _Number | None
    high: _Number | None


class _Times(msgspec.Struct):
    min: _Number
    max: _Number
    histogram: str
    sums: str
    p50: _Percentile
    p90: _Percentile
    p95: _Percentile
    p99: _Percentile


class _Requests(msgspec.Struct):
    failed: dict[str, _Count]
    messages: dict[str, list[str]]
    asked_to_wait: _Times | None


class _Start(msgspec.Struct):
    requests: _Count
    skew: _Number


class _Tokens(msgspec.Struct):
    output_from: dict[str, _Count]


class _Figures(msgspec.Struct):
    requests: _Requests
    start: _Start
    tokens: _Tokens
    seconds: _Number
    times: dict[str, _Times | None]
    sums: dict[str, _Count]


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
    info: dict[str, dict[str, str]]
    all_looks: _Count | None
    failed_looks: _Count | None
    seconds_looking: _Number | None


class _Slice(msgspec.Struct):
    seconds: _Number
    width: _More
    events: _Count
    gaps: _Count
    between_events: _Number | None


class _Fixed(msgspec.Struct, tag_field="kind", tag="fixed"):
    tokens: _Some


class _Uniform(msgspec.Struct, tag_field="kind", tag="uniform"):
    low: _Some
    high: _Some


class _Normal(msgspec.Struct, tag_field="kind", tag="normal"):
    mean: _More
    deviation: _More


class _Lognormal(msgspec.Struct, tag_field="kind", tag="lognormal"):
    median: _More
    sigma: _More


class _Part(msgspec.Struct):
    tokens: _Some
    weight: _More


class _Mix(msgspec.Struct, tag_field="kind", tag="mix"):
    parts: Annotated[list[_Part], msgspec.Meta(min_length=1)]


_Spread = _Fixed | _Uniform | _Normal | _Lognormal | _Mix


class _Made(msgspec.Struct, tag_field="kind", tag="made"):
    input_tokens: _Spread
    output_tokens: _Spread
    prefix_tokens: _Count
    groups: _Some
    order: str
    turns: _Some
    turn_tokens: _Spread
    think_seconds: _Number
    tools: _Count


class _Traced(msgspec.Struct, tag_field="kind", tag="trace"):
    path: str
    speed: _More | None
    requests: _Count
    seconds: _Number | None
    longest_tokens: _Count
    left_out: _Count


class _Given(msgspec.Struct, tag_field="kind", tag="prompts"):
    path: str
    prompts: _Count
    turns: _Some
    output_tokens: _Spread
    output_capped: bool
    think_seconds: _Number
    left_out: _Count


class _Step(msgspec.Struct):
    at_once: _Some | None
    rate: _More | None
    last_rate: _More | None
    burstiness: _More | None
    beside: str
    work: _Made | _Traced | _Given


class _Load(msgspec.Struct):
    step: _Step
    began_seconds: _Number | None
    slices: list[_Slice]
    sent: _Count
    whole_seconds: _Number
    output_tokens_per_second: _Number | None
    all: _Figures
    steady: _Figures
    verdict: _Verdict
    metrics: _Metrics
    remarks: tuple[str, ...]
    retried: _Count
    lengths_changed: _Count
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
    requests: _Count | None
    seconds: _Number | None
    warm_up: _Count | None
    seed: int | None
    max_error_percent: _Number
    retries: _Count
    processes: _Some
    reset_cache: bool
    find_limit: bool
    launch: str | None
    objective: _Objective | None
    steps: list[_Step]


class _Limit(msgspec.Struct):
    borne: _Count | None
    broken: _Count | None
    why: str


class _Side(msgspec.Struct):
    tokens: _Amount | None
    bytes: _Amount | None
    bytes_within: _Amount
    blocks: _Amount | None
    concurrency: _Amount | None
    requests: _Amount | None


class _Capacity(msgspec.Struct):
    length: _Count
    context: _Count | None
    declared: _Side
    declared_by: tuple[str, ...]
    predicted: _Side
    predicted_for: str | None
    settings: tuple[str, ...]
    notes: tuple[str, ...]


class _Started(msgspec.Struct):
    engine: str
    command: str
    program: str
    log: str
    seconds: _Number
    ended: str | None
    resident_bytes: _Count | None = None


class _Range(msgspec.Struct):
    low: _Number
    mid: _Number
    high: _Number


class _Promised(msgspec.Struct):
    name: str
    source: str
    engine: str
    prompt: _Some
    answer: _Some
    context: _Some
    concurrency: _Some | None
    rate: _More | None
    held: _Count
    tokens: _Count | None
    memory: _Count | None
    limit: _Count | None
    whole: bool
    ttft: _Range | None
    tpot: _Range | None
    output_rate: _Range | None
    request_rate: _Range | None


class _Plan(msgspec.Struct):
    promised: _Promised


class _Server(msgspec.Struct):
    """What is used of what it says; there may be more."""

    engine: str = "unknown"
    model: str = "?"
    version: str | None = None
    context: _Count | None = None
    slots: _Count | None = None
    facts: dict[str, Any] = {}
    address: str | None = None
    tokens_counted_by: str | None = None
    prompts_exact: bool | None = True
    prompt_overhead_tokens: _Count | None = None
    seed: int | None = None


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
    capacity: _Capacity | None
    started: _Started | None
    notes: tuple[str, ...]
    plan: _Plan | None = None
    kvctl_version: str = ""


def save(report: ServeReport, path: str) -> None:
    """Write the report's JSON, whole or not at all.

    Raises:
        KvctlError: it cannot be written.

    """
    write_json(path, report.to_dict())


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
    except (msgspec.ValidationError, ValueError, LookupError, TypeError, OverflowError, UsageError) as error:
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
    place = target.read_url(found.url)
    launch = None if settings.launch is None else Launch("", (), settings.launch, None)
    plan = Plan(
        place, tuple(map(_step, settings.steps)), length, found.endpoint, warm=settings.warm_up, slo=slo,
        slo_percent=99.0 if objective is None else objective.percent, seed=settings.seed, most_errors=settings.max_error_percent,
        limit=settings.find_limit, processes=settings.processes, retries=settings.retries, reset_cache=settings.reset_cache, launch=launch,
        promised=None if found.plan is None else _promised(found.plan.promised),
    )  # fmt: skip
    widths = [_whole(piece.width) for one in found.loads for piece in one.slices]
    zero = max(widths, default=SECOND)  # not 0, which is no time, and at the beginning of a slice of every load
    own, held = found.started, found.capacity
    return ServeReport(
        plan, _server(found.server) if found.loads else found.server, found.environment,
        tuple(_outcome(one, slo, zero) for one in found.loads),
        None if found.limit is None else Limit(found.limit.borne, found.limit.broken, found.limit.why),
        None if found.calibration is None else calibrate.of_dict(found.calibration),
        None if held is None else Capacity(
            held.length, held.context, _side(held.declared), held.declared_by, _side(held.predicted), held.predicted_for, held.settings, held.notes,
        ),
        None if own is None else Started(own.engine, place, own.command, own.program, own.log, own.seconds, resident_bytes=own.resident_bytes),
        None if own is None else own.ended, found.notes, found.dry_run, found.interrupted, found.kvctl_version,
    )  # fmt: skip


def _server(found: dict[str, Any]) -> dict[str, Any]:
    """With all that is used of it; what a file does not say is not known."""
    return found | msgspec.structs.asdict(msgspec.convert(found, _Server))


def _promised(found: _Promised) -> Promised:
    values = msgspec.structs.asdict(found)
    ranges = {name: None if values[name] is None else Range(*msgspec.structs.astuple(values[name])) for name in SPEED}
    return Promised(**{**values, **ranges})


def _side(found: _Side) -> Side:
    return Side(**msgspec.structs.asdict(found))


def _step(found: _Step) -> Step:
    work = _work(found.work)
    timed = isinstance(work, Traced) and work.speed is not None
    if (found.at_once is None) == (found.rate is None) and not (timed and found.at_once is None):
        raise ValueError("a load without a pace, or with two")
    return Step(work, found.at_once, found.rate, found.last_rate, found.burstiness, found.beside)


def _work(found: _Made | _Traced | _Given) -> Work:
    if isinstance(found, _Traced):
        return Traced(
            found.path, found.speed, found.requests, found.longest_tokens, found.seconds, left_out=found.left_out
        )
    if isinstance(found, _Given):
        return Given(
            found.path, (), _spread(found.output_tokens), found.think_seconds, found.prompts, found.turns, found.output_capped, found.left_out
        )  # fmt: skip
    if found.order not in (RANDOM, ROUND):
        raise ValueError(f"an order of {found.order[:40]!r}")
    return Made(
        _spread(found.input_tokens), _spread(found.output_tokens), found.prefix_tokens, found.groups, found.order, found.turns,
        _spread(found.turn_tokens), found.think_seconds, found.tools,
    )  # fmt: skip


def _spread(found: _Spread) -> lengths.Spread:
    if isinstance(found, _Mix):
        return lengths.Mix(tuple((part.tokens, part.weight) for part in found.parts))
    if isinstance(found, _Uniform):
        if found.low > found.high:
            raise ValueError("lengths that go down")
        return lengths.Uniform(found.low, found.high)
    if isinstance(found, _Normal):
        return lengths.Normal(found.mean, found.deviation)
    if isinstance(found, _Lognormal):
        return lengths.Lognormal(found.median, found.sigma)
    return lengths.Fixed(found.tokens)


def _outcome(found: _Load, slo: Slo | None, zero: int) -> Outcome:
    figures = _figures(found.all, slo, zero)
    figures.slices = Slices.of(_slice(piece, zero) for piece in found.slices)
    seen = found.metrics
    window = Window(seen.kv_use_max, seen.waiting_max, seen.running_max, seen.preemptions, seen.resets, seen.looks)
    watched = None
    if seen.all_looks is not None:
        watched = metrics.Watched(seen.all_looks, seen.failed_looks or 0, None, seen.seconds_looking or 0.0)
    return Outcome(
        _step(found.step), figures, _figures(found.steady, slo, zero), window, Verdict(found.verdict.kind, found.verdict.evidence),
        tuple(_samples(seen, zero)), seen.counters, found.sent, found.whole_seconds, found.output_tokens_per_second,
        found.client_cpu, found.given_up, found.interrupted, found.retried, found.lengths_changed, watched, found.remarks,
        0 if found.began_seconds is None else zero + _whole(found.began_seconds),
    )  # fmt: skip


def _slice(found: _Slice, zero: int) -> Slice:
    waited = round((found.between_events or 0.0) * SECOND * found.gaps)
    return Slice(zero + _whole(found.seconds), _whole(found.width), found.events, found.gaps, waited)


def _samples(found: _Metrics, zero: int) -> Iterable[metrics.Sample]:
    before = -1
    for number, look in enumerate(found.series, 1):
        values = {name: value for name in metrics.GAUGES if (value := look.get(name)) is not None}
        lost = look.get("preemptions")
        series = {} if lost is None else {"preemptions": {"": lost}}
        at = _whole(look.get("seconds") or 0.0)
        if at <= before:
            raise ValueError("looks that do not follow one another")
        before = at
        yield metrics.Sample(zero + at, values, series, found.info if number == len(found.series) else {})


def _figures(found: _Figures, slo: Slo | None, zero: int) -> Figures:
    out = Figures(slo)
    requests = found.requests
    for name in SUMS:
        setattr(out, name, found.sums[name])
    if out.tokens_in and not out.with_prompt:
        raise ValueError("input tokens of no request")
    out.faults, out.words, out.sources = Counter(requests.failed), requests.messages, Counter(found.tokens.output_from)
    if set(out.faults) - set(out.words):
        raise ValueError("failures without messages")
    if requests.asked_to_wait is not None:
        out.rejected_wait = _histogram(requests.asked_to_wait)
    out.start, out._start = found.start.requests, (0, _whole(found.start.skew))
    if found.seconds:
        out.first, out.last = zero, zero + _whole(found.seconds)
    for name in TIMES:
        times = found.times.get(name)
        if times is not None:
            out.times[name] = _histogram(times)
    return out


def _histogram(found: _Times) -> Histogram:
    told = ((of, getattr(found, f"p{of}")) for of in SHOWN)
    percentiles = [Percentile(of, _half(one.value), *map(_bound, (one.low, one.high))) for of, one in told]
    return Histogram.of_text(found.histogram, found.sums, _whole(found.min), _whole(found.max), percentiles)


def _half(seconds: float) -> float:
    """Nanoseconds, to a half: the middle of a bucket may have one."""
    return round(2 * seconds * SECOND) / 2


def _bound(seconds: float | None) -> float | None:
    return None if seconds is None else _half(seconds)


def _whole(seconds: float) -> int:
    """Nanoseconds."""
    return round(seconds * SECOND)
