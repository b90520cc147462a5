"""Options of `kvctl recommend`, read: requests, what is known beside them, and what is to be written."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.units import parse_tokens

if TYPE_CHECKING:
    from kvctl.engines import Engine
    from kvctl.hardware import Device
    from kvctl.recommend.answers import Known
    from kvctl.recommend.emit import Site
    from kvctl.recommend.load import Heard
    from kvctl.recommend.request import Ask, Pins
    from kvctl.recommend.what_if import Side
    from kvctl.spec import ModelSpec

_WORKLOAD_REQUESTS = 5_000
"""Of a --workload, that are looked at: what is found changes by less than two points with twice as many."""
MOST_ROWS = 200
"""Requests of a matrix."""


def read_hardware(texts: Sequence[str]) -> tuple[tuple[Device, ...], ...]:
    """Kinds of hardware: --gpu H100,8xH200,local; each is asked about for itself.

    Raises:
        UsageError: none is named, or a name that is not known.

    """
    from kvctl.hardware import read_gpus

    names = [name for text in texts for name in _parts(text)]
    if not names:
        raise UsageError("--gpu names nothing to run on", hint="--gpu H100, --gpu 8xH200, --gpu local, --gpu cpu")
    return tuple(tuple(read_gpus(name)) for name in names)


def _parts(text: str) -> list[str]:
    """Names between commas; the numbers of local:0,1 stay together."""
    parts = [part.strip() for part in re.split(r",(?!\s*\d+\s*(?:,|$))", text)]
    return [part for part in parts if part]


def read_engines(text: str) -> tuple[Engine, ...]:
    """--engine any, or names between commas."""
    from kvctl.engines import engine
    from kvctl.recommend.request import SERVERS

    names = [part.strip() for part in text.split(",") if part.strip()]
    if any(name.lower() == "any" for name in names):
        return ()
    if not names:
        raise UsageError("--engine names none", hint="one of any, " + ", ".join(SERVERS) + ", ollama")
    try:
        return tuple(engine(name) for name in names)
    except UsageError as error:
        if "unknown engine" not in error.message:
            raise
        raise UsageError(error.message, hint="one of any, " + ", ".join(SERVERS) + ", ollama") from None


def read_slo(text: str | None) -> tuple[float | None, float | None, float]:
    """Seconds to the first token and between tokens at most, and how many requests of a hundred keep them."""
    from kvctl.options_serve import read_slo as read

    found, percent = read(text, scheduled=True)
    if found is None:
        return None, None, percent
    if found.e2e is not None:
        raise UsageError("--slo e2e follows from the others", hint="--slo ttft=500ms,tpot=50ms")
    return None if found.ttft is None else found.ttft / 1e9, None if found.tpot is None else found.tpot / 1e9, percent


def read_pins(
    weights: str | None,
    kv: str | None,
    tensor: int | None,
    pipeline: int | None,
    replicas: int | None,
) -> Pins:
    """What is not to be searched for.

    Raises:
        UsageError: a format that no engine knows.

    """
    from kvctl.recommend.request import Pins

    return Pins(
        None if weights is None else _weights(weights),
        None if kv is None else _cache(kv),
        tensor,
        pipeline,
        replicas,
    )


def _weights(name: str) -> str:
    from kvctl.weight_formats import GGUF_BITS, weight_format

    low = name.strip().lower()
    return low if low in GGUF_BITS else weight_format(low).name


def _cache(name: str) -> str:
    from kvctl.engines import engine
    from kvctl.recommend.request import SERVERS

    low = name.strip().lower()
    if low == "auto":
        return low
    for one in SERVERS:
        with contextlib.suppress(UsageError):
            engine(one).kv_dtype(low, "--kv-cache-dtype")
            return low
    raise UsageError(f"--kv-cache-dtype: no engine has a cache in {name[:40]!r}",
                     hint="auto (16 bits), fp8, int8_per_token_head, nvfp4, q8_0, q4_0, …, as the engine has it")  # fmt: skip


def read_loss(text: str | None) -> float | None:
    """Percent: 1, 1%, 0.5."""
    if text is None:
        return None
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise UsageError(f"--max-quality-loss: {text[:40]!r} is no percentage", hint="--max-quality-loss 1")
    return value


def read_length(text: str | None, option: str) -> int | None:
    return None if text is None else parse_tokens(text, what=option)


def asks(
    specs: Sequence[ModelSpec], kinds: Sequence[Sequence[Device]], *, nodes: int, ctx: str | None, prompt: str | None, answer: str | None,
    concurrency: int | None, rate: float | None, engines: Sequence[Engine], slo: str | None, goal: str, max_loss: str | None,
    host: str | None,
    heard: Heard | None = None, shared: str | None = None, pins: Pins | None = None,
) -> tuple[Ask, ...]:  # fmt: skip
    """Every model on every kind of hardware, in that order.

    Raises:
        UsageError: a request that cannot be.

    """
    from kvctl.recommend.request import ask

    ttft, tpot, percent = read_slo(slo)
    if len(specs) * len(kinds) > MOST_ROWS:
        raise UsageError(
            f"{len(specs):,} models on {len(kinds):,} kinds of hardware are more than {MOST_ROWS} rows",
            hint="fewer at a time",
        )
    return tuple(
        ask(
            spec, devices, nodes=nodes, context=read_length(ctx, "--ctx"), prompt=read_length(prompt, "--input-tokens"),
            answer=read_length(answer, "--output-tokens"), concurrency=concurrency, rate=rate, engines=engines, ttft=ttft, tpot=tpot, slo_percent=percent,
            goal=goal, max_quality_loss=read_loss(max_loss), host=_host(host, devices), heard=heard, shared=read_length(shared, "--shared-prefix"),
            pins=pins,
        )
        for spec in specs for devices in kinds
    )  # fmt: skip


def _host(text: str | None, devices: Sequence[Device]) -> int | None:
    """Bytes of the host's memory for weights: as told, or what is free of this machine's where its own GPUs are asked about."""
    if text is not None:
        from kvctl.units import parse_bytes

        return parse_bytes(text, what="--host-memory")
    if not devices or devices[0].index is None or devices[0].unified:
        return None
    from kvctl.hardware.host import host_device

    return host_device().available_bytes


def read_heard(
    workload: str | None, trace: str | None, tokenizer: str | None, rate: float | None, *, quiet: bool
) -> Heard | None:
    """The requests of --workload or --trace; None without either.

    Raises:
        UsageError: both, or an unknown kind.
        SourceError: a trace that cannot be read.

    """
    from kvctl.options import read_traffic
    from kvctl.output import progress

    made = rate if workload is not None else None
    traffic = read_traffic(
        trace, tokenizer, workload, requests=None, rate=made, in_flight=None, tpot=None, prefill_rate=None
    )
    if traffic is None:
        return None
    from kvctl.recommend.load import heard
    from kvctl.replay import PRESETS
    from kvctl.traffic import requests_of

    with progress("requests read", quiet=quiet) as advance:
        if traffic.workload is None:
            assert trace is not None
            return heard("standard input" if trace == "-" else trace[:200], requests_of(traffic), advance)
        mix = PRESETS[traffic.workload]
        notes = [f"{mix.name}: {mix.source}; assumed: {mix.assumed}"]
        return heard(
            mix.name, requests_of(traffic.replace(requests=_WORKLOAD_REQUESTS)), advance, rate=traffic.rate, notes=notes
        )


def read_known(
    prices: Sequence[str], quality: Sequence[str], calibrate: Sequence[str] = (), specs: Sequence[ModelSpec] = (),
    hardware: Sequence[Sequence[Device]] = (),
) -> Known:  # fmt: skip
    """Prices, and results that were saved, for what is asked about."""
    from kvctl.recommend import calibrated, measured
    from kvctl.recommend.answers import Known
    from kvctl.recommend.prices import Prices, parse, remarks

    found = parse(list(prices)) if prices else Prices()
    gpus = [one for kind in hardware for one in kind if one.kind != "cpu"]
    notes = list(remarks(found, (one.name if one.facts is None else one.facts.name for one in gpus)))
    return Known(found, tuple(measured.load(path) for path in quality),
                 tuple(one for path in calibrate for one in calibrated.load(path, specs, notes)), tuple(notes))  # fmt: skip


def read_site(
    model: str,
    *,
    name: str | None,
    served: str | None,
    port: int | None,
    host: str | None,
    image: str | None,
    ray: bool,
) -> Site:
    """Names and places of what is emitted."""
    from kvctl.recommend.emit import Site, named
    from kvctl.recommend.emit.site import check

    plain = Site()
    site = Site(named(model) if name is None else name, served, plain.port if port is None else port, plain.host if host is None else host,
                image, ray=ray)  # fmt: skip
    check(site)
    return site


def read_kinds(texts: Sequence[str]) -> tuple[str, ...]:
    """--emit command,compose: what is to be written."""
    from kvctl.recommend.emit import KINDS

    known = (*(kind.name for kind in KINDS), "json")
    names = tuple(dict.fromkeys(part.strip() for text in texts for part in text.split(",") if part.strip()))
    if texts and not names:
        raise UsageError("--emit names no kind", hint="one of all, " + ", ".join(known))
    if "all" in names:
        return ("all",)
    for name in names:
        if name not in known:
            raise UsageError(f"--emit: unknown kind {name[:40]!r}", hint="one of all, " + ", ".join(known))
    return names


def check_together(kinds: Sequence[str], output: str | None, answer: int, form: str, *, force: bool) -> None:
    """Refuses what does not go together."""
    if output is not None and not output.strip():
        raise UsageError("-o names no folder", hint="--emit all -o DIR")
    if output is not None and not kinds:
        raise UsageError("-o is where --emit writes", hint="--emit all -o DIR")
    if force and output is None:
        raise UsageError("--force replaces files, and none is written", hint="--emit all -o DIR --force")
    if output is None and (len(kinds) > 1 or kinds == ("all",)):
        raise UsageError("several files do not fit on stdout", hint="-o DIR, or one kind")
    if kinds and form != "table":
        raise UsageError(f"--emit writes its own forms, not {form}", hint="--emit json writes the plan")
    if not 1 <= answer <= 3:
        raise UsageError(f"--answer {answer}: there are at most three", hint="from 1 to 3")


class Proof(Record):
    """How an answer is put to the proof."""

    more: tuple[str, ...]
    """Options of the engine."""
    log: str | None
    limit_s: float | None
    model: str
    """As it was named."""


def read_proof(
    verify: bool, more: str | None, log: str | None, limit: str | None, *, alone: bool, model: str
) -> Proof | None:
    """--verify and what is about it; `alone`: nothing else is asked for.

    Raises:
        UsageError: something that does not go with it, or is about it without it.

    """
    given = {"--verify-args": more, "--server-log": log, "--start-timeout": limit}
    if not verify:
        if (other := next((name for name, value in given.items() if value is not None), None)) is not None:
            raise UsageError(f"{other} is about --verify", hint="kvctl recommend MODEL … --verify")
        return None
    if not alone:
        raise UsageError(
            "--verify runs what --emit writes and --what-if compares", hint="--verify first, then the other"
        )
    from kvctl.options_serve import seconds

    try:
        words = tuple(shlex.split(more or ""))
    except ValueError as error:
        raise UsageError(f"--verify-args: {str(error).lower()}", hint="--verify-args '-t 4'") from None
    if log is not None:
        from kvctl.files import check_writable

        check_writable(log)
    return Proof(words, log, None if limit is None else seconds(limit, "--start-timeout"), model)


def read_plans(texts: Sequence[str], *, alone: bool) -> tuple[Side, ...]:
    """--what-if FILE or FILE#N: the plans to compare.

    Raises:
        UsageError: too many, or too few to compare.
        KvctlError: a file that is none.

    """
    if not texts:
        return ()
    if alone and len(texts) != 2:
        raise UsageError("--what-if compares two plans", hint="--what-if A.json --what-if B.json, or one and a MODEL")
    if not alone and len(texts) != 1:
        raise UsageError("--what-if compares one plan with that of a MODEL", hint="one --what-if, or no MODEL")
    return tuple(_plan(text) for text in texts)


def _plan(text: str) -> Side:
    from kvctl.options_planned import plan_file
    from kvctl.recommend.what_if import read

    return read(*plan_file(text, "--what-if"))
