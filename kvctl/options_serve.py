"""What the options of `kvctl serve-test` ask for."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvctl.errors import UsageError
from kvctl.units import parse_tokens

if TYPE_CHECKING:
    from kvctl.loadtest.compare import Gate
    from kvctl.loadtest.figures import Slo
    from kvctl.loadtest.report import ServeReport
    from kvctl.loadtest.run import Plan, Step

_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h)?", re.ASCII)
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_ENDPOINTS = ("chat", "completions")
_MOST_AT_ONCE, _MOST_REQUESTS, _LONGEST = 16_384, 10_000_000, 7 * 86_400.0


def seconds(text: str, option: str, bare: str = "s") -> float:
    """ "500ms", "2s", "5m"; a bare number is in `bare`.

    Raises:
        UsageError: it is no time.

    """
    found = _TIME.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{option}: {text[:40]!r} is no time", hint=f"{option} 500ms, 2s or 5m")
    value = float(found[1]) * _UNITS[found[2] or bare]
    if not 0 < value <= _LONGEST:
        raise UsageError(f"{option}: {text[:40]} is out of range", hint="more than nothing, and at most a week")
    return value


def read_steps(concurrency: str | None, rate: str | None, burstiness: float | None) -> tuple[Step, ...]:
    """Loads, one after the other.

    Raises:
        UsageError: both kinds, or values that cannot be.

    """
    from kvctl.loadtest.run import Step

    if concurrency is not None and rate is not None:
        raise UsageError(
            "--concurrency keeps so many requests under way, and --rate sends them by a clock", hint="one of them"
        )
    if burstiness is not None and rate is None:
        raise UsageError("--burstiness is about --rate", hint="--rate 5 --burstiness 0.5")
    if burstiness is not None and not 0.01 <= burstiness <= 1000:
        raise UsageError(
            f"--burstiness: {burstiness:g} is out of range",
            hint="1 is Poisson, less comes in bursts, more is more even",
        )
    if rate is not None:
        rates = _numbers(rate, "--rate", 1e-4, 1e5)
        return tuple(Step(rate=one, burstiness=burstiness) for one in rates)
    counts = _numbers(concurrency or "1", "--concurrency", 1, _MOST_AT_ONCE)
    if any(one != int(one) for one in counts):
        raise UsageError(f"--concurrency: {concurrency} is no whole number", hint="--concurrency 1,4,16")
    return tuple(Step(at_once=int(one)) for one in counts)


def _numbers(text: str, option: str, low: float, high: float) -> tuple[float, ...]:
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"{option}: {text[:40]!r} is no list of numbers", hint=f"{option} 1,4,16") from None
    if not all(low <= one <= high for one in found):
        raise UsageError(f"{option}: {text[:40]} is out of range", hint=f"from {low:g} to {high:,.0f}")
    return found


def read_slo(text: str | None, *, scheduled: bool) -> tuple[Slo | None, float]:
    """ "ttft=500ms,tpot=50ms,p99": times that requests keep, and how many of a hundred have to.

    Raises:
        UsageError: it is no such thing.

    """
    if text is None:
        return None, 99.0
    from kvctl.loadtest.figures import Slo

    limits: dict[str, int] = {}
    percent = 99.0
    for part in (part.strip() for part in text.split(",")):
        name, equals, value = part.partition("=")
        share = re.fullmatch(r"p(\d+(?:\.\d+)?)", part)
        if share is not None and 0 < float(share[1]) <= 100:
            percent = float(share[1])
        elif equals and name in ("ttft", "tpot", "e2e"):
            limits[name] = int(seconds(value, f"--slo {name}") * 1e9)
        else:
            raise UsageError(f"--slo: {part[:40]!r} is not understood", hint="--slo ttft=500ms,tpot=50ms,p99")
    if not limits:
        raise UsageError("--slo names no time", hint="--slo ttft=500ms,tpot=50ms,p99")
    return Slo(**limits, scheduled=scheduled), percent


def read_headers(given: Sequence[str], api_key_env: str | None) -> dict[str, str]:
    """Headers of every request; the key comes from a variable, so that no list of processes shows it.

    Raises:
        UsageError: it is no header, or the variable is not set.

    """
    out: dict[str, str] = {}
    for text in given:
        name, colon, value = text.partition(":")
        if (
            not colon
            or not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name.strip())
            or re.search(r"[\r\n\x00]|[^\x20-\x7e\xa0-\xff\t]", value)
        ):
            raise UsageError("--header: that is no header", hint="--header 'X-Team: ops'")
        if name.strip().lower() in ("authorization", "proxy-authorization", "x-api-key", "api-key"):
            raise UsageError(f"--header: a key on the command line is seen by everybody ({name.strip()})",
                             hint="--api-key-env NAME takes it from a variable")  # fmt: skip
        if name.strip().lower() in ("host", "content-length", "transfer-encoding", "connection", "content-type"):
            raise UsageError(f"--header: {name.strip()} is kvctl's own", hint="leave it out")
        out[name.strip()] = value.strip()
    if api_key_env is not None:
        key = os.environ.get(api_key_env, "")
        if not key.strip():
            raise UsageError(f"--api-key-env: the variable {api_key_env[:60]!r} is not set", hint="export it first")
        if not re.fullmatch(r"[\x21-\x7e]+", key.strip()):
            raise UsageError(
                f"--api-key-env: what {api_key_env[:60]!r} holds is no key",
                hint="a key has no spaces and no control characters",
            )
        out["Authorization"] = f"Bearer {key.strip()}"
    return out


def read_extra(given: Sequence[str]) -> dict[str, Any]:
    """ "top_k=5": what else is in every body; values are JSON, or else text.

    Raises:
        UsageError: it is no such pair, or of kvctl's own.

    """
    out: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"--extra: {text[:40]!r} is no KEY=VALUE", hint="--extra top_k=5")
        if name in ("model", "messages", "prompt", "stream", "stream_options", "max_tokens", "n"):
            raise UsageError(f"--extra: {name} is kvctl's own", hint="--model, --output-tokens")
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
    return out


def _tokens(text: str, option: str) -> int:
    count = parse_tokens(text, what=option)
    if count < 1:
        raise UsageError(f"{option}: at least one token is needed")
    return count


def read_plan(
    url: str, *, model: str | None, endpoint: str, input_tokens: str, output_tokens: str, concurrency: str | None, rate: str | None,
    burstiness: float | None, requests: int | None, duration: str | None, warmup: int | None, slo: str | None, headers: Sequence[str],
    api_key_env: str | None, extra: Sequence[str], ca: str | None, insecure: bool, timeout: str, seed: int | None, max_error_rate: float,
    shared_prefix: str | None, groups: int | None, find_limit: bool,
) -> Plan:  # fmt: skip
    """All of it.

    Raises:
        UsageError: something of it cannot be.

    """
    from kvctl.loadtest import asks, load, target
    from kvctl.loadtest.loop import Patience
    from kvctl.loadtest.run import Plan

    place = target.read_url(url)
    if endpoint not in _ENDPOINTS:
        raise UsageError(f"--endpoint: unknown {endpoint[:40]!r}", hint="chat or completions")
    if (ca is not None or insecure) and not place.secure:
        raise UsageError("--ca and --insecure are about https", hint="https://…")
    steps = read_steps(concurrency, rate, burstiness)
    length = None
    if requests is not None or duration is not None:
        length = load.Length(requests, None if duration is None else seconds(duration, "--duration"))
    if requests is not None and not 1 <= requests <= _MOST_REQUESTS:
        raise UsageError(f"--requests: {requests} is out of range", hint=f"from 1 to {_MOST_REQUESTS:,}")
    if warmup is not None and not 0 <= warmup <= _MOST_REQUESTS:
        raise UsageError(f"--warmup: {warmup} is out of range", hint="0 or more")
    if not 0 <= max_error_rate <= 100:
        raise UsageError(f"--max-error-rate: {max_error_rate:g} is no percentage", hint="from 0 to 100")
    prefix = 0 if shared_prefix is None else _tokens(shared_prefix, "--shared-prefix")
    if groups is not None and (shared_prefix is None or not 1 <= groups <= 100_000):
        raise UsageError(
            "--groups: beginnings that prompts share, from 1 to 100,000", hint="--shared-prefix 1k --groups 4"
        )
    if prefix >= _tokens(input_tokens, "--input-tokens"):
        raise UsageError(
            f"--shared-prefix: {prefix:,} tokens leave nothing of prompts of {input_tokens}", hint="more --input-tokens"
        )
    if find_limit and (rate is not None or len(steps) > 1):
        raise UsageError(
            "--find-limit raises the number of requests at once by itself", hint="--concurrency N says where it begins"
        )
    objective, percent = read_slo(slo, scheduled=rate is not None)
    trust = target.Trust(ca, insecure)
    trust.context()
    return Plan(
        place, steps, _tokens(input_tokens, "--input-tokens"), _tokens(output_tokens, "--output-tokens"), length,
        asks.CHAT if endpoint == "chat" else asks.COMPLETIONS, model, warmup, read_headers(headers, api_key_env), read_extra(extra),
        trust, Patience(silence=seconds(timeout, "--timeout")), objective, percent, seed, max_error_rate, prefix_tokens=prefix,
        groups=groups or 1, limit=find_limit,
    )  # fmt: skip


def check_files(files: Mapping[str, str | None]) -> None:
    """Refuses before a long run what could not be written after it; `files`: paths by the options that name them.

    Raises:
        UsageError: one is named twice, or the page does not end in .html.
        KvctlError: one cannot be written.

    """
    from kvctl.files import check_writable

    seen: dict[str, str] = {}
    for option, path in files.items():
        if path is None:
            continue
        where = os.path.realpath(path) if "\0" not in path else path
        if where in seen:
            raise UsageError(f"{seen[where]} and {option} name the same file: {path[:200]}", hint="a file for each")
        seen[where] = option
        if option != "--log":  # which may be a pipe
            check_writable(path)
    report = files.get("--report")
    if report is not None and not report.lower().endswith((".html", ".htm")):
        raise UsageError(f"--report: {report[:200]!r} does not end in .html", hint="--report page.html")


def read_saved(path: str, given: Sequence[str]) -> ServeReport:
    """The report of a file, in place of a run; `given`: other options, as they were written.

    Raises:
        UsageError: they are about a run.
        KvctlError: the file is no such report.

    """
    if given:
        raise UsageError(f"--from shows a saved result, and {given[0]} is about a run", hint="leave one of them out")
    from kvctl.loadtest import saved

    return saved.read(path)


def given(context: Any, but: Collection[str]) -> list[str]:
    """Options that the command line has, besides some: as it spells them, or an argument's name."""
    said = (param for param in context.command.params if param.name not in but)
    return [
        param.opts[0] if param.opts[0].startswith("-") else param.opts[0].upper()
        for param in said
        if getattr(context.get_parameter_source(param.name), "name", "") == "COMMANDLINE"
    ]


def read_gates(fail_on: Sequence[str], compare: str | None) -> tuple[Gate, ...]:
    """How much worse than before figures may be.

    Raises:
        UsageError: there is nothing before, or one is not understood.

    """
    if not fail_on:
        return ()
    if compare is None:
        raise UsageError("--fail-on is about --compare", hint="--compare baseline.json --fail-on ttft_p99:+5%")
    from kvctl.loadtest.compare import read_gate

    return tuple(dict.fromkeys(read_gate(text) for text in fail_on))
