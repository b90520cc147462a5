"""What the options of `kvctl serve-test` ask for."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.units import parse_tokens

if TYPE_CHECKING:
    from kvctl.loadtest.compare import Gate
    from kvctl.loadtest.figures import Slo
    from kvctl.loadtest.lengths import Spread
    from kvctl.loadtest.plan import Plan, Step
    from kvctl.loadtest.report import ServeReport
    from kvctl.loadtest.work import Work

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


def read_steps(given: Load, works: Sequence[tuple[str, Work]]) -> tuple[Step, ...]:
    """Loads, one after the other: each pace with each kind of requests (and in what it differs from others).

    Raises:
        UsageError: several kinds of pace, or values that cannot be.

    """
    from kvctl.loadtest.plan import Step
    from kvctl.loadtest.work import Traced

    concurrency, rate = given.concurrency, given.rate
    if concurrency is not None and rate is not None:
        raise UsageError(
            "--concurrency keeps so many requests under way, and --rate sends them by a clock", hint="one of them"
        )
    if given.burstiness is not None and rate is None:
        raise UsageError("--burstiness is about --rate", hint="--rate 5 --burstiness 0.5")
    if given.burstiness is not None and not 0.01 <= given.burstiness <= 1000:
        raise UsageError(
            f"--burstiness: {given.burstiness:g} is out of range",
            hint="1 is Poisson, less comes in bursts, more is more even",
        )
    paces: list[dict[str, Any]]
    if rate is not None:
        paces = [_pace(part, given) for part in dict.fromkeys(rate.split(","))]
    elif concurrency is None and isinstance(works[0][1], Traced) and not given.find_limit:
        paces = [{}]
    else:
        counts = _numbers(concurrency or "1", "--concurrency", 1, _MOST_AT_ONCE)
        if any(one != int(one) for one in counts):
            raise UsageError(f"--concurrency: {concurrency} is no whole number", hint="--concurrency 1,4,16")
        paces = [{"at_once": int(one)} for one in counts]
    return tuple(Step(work, beside=beside, **pace) for beside, work in works for pace in paces)


def _pace(text: str, given: Load) -> dict[str, Any]:
    """ "5", or "1..10": rising from one to the other over --duration."""
    first, dots, last = text.partition("..")
    rates = [_numbers(part, "--rate", 1e-4, 1e5)[0] for part in ([first, last] if dots else [text])]
    if dots and given.duration is None:
        raise UsageError(f"--rate {text[:40]}: over what time?", hint="--duration 5m")
    if dots and given.burstiness is not None:
        raise UsageError("--burstiness is about an even --rate", hint="leave it out")
    return {"rate": rates[0], "last_rate": rates[1] if dots else None, "burstiness": given.burstiness}


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
        elif equals and name in limits:
            raise UsageError(f"--slo names {name} twice", hint="--slo ttft=500ms,tpot=50ms,p99")
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


def read_lengths(text: str, option: str) -> Spread:
    """ "512", "200-800", "normal:512:64", "lognormal:512:0.8", "512:70+4k:30".

    Raises:
        UsageError: it is no such thing.

    """
    found = _spread(text.strip(), option)
    if (found.most or 0) > _MOST_TOKENS:
        raise UsageError(f"{option}: {text.strip()[:40]} is out of range", hint=f"at most {_MOST_TOKENS:,} tokens")
    return found


def _spread(text: str, option: str) -> Spread:
    from kvctl.loadtest import lengths

    hint = f"{option} 512, 200-800, normal:512:64, lognormal:512:0.8 or 512:70+4k:30"
    kind, *rest = text.split(":")
    if kind in ("normal", "lognormal"):
        if len(rest) != 2:
            raise UsageError(f"{option}: {text[:40]!r} is no distribution", hint=hint)
        middle = _tokens(rest[0], option)
        width = _float(rest[1], option, hint)
        if kind == "normal" and 0 < width <= 1e7:
            return lengths.Normal(middle, width)
        if kind == "lognormal" and 0 < width <= 5:
            return lengths.Lognormal(middle, width)
        raise UsageError(f"{option}: {rest[1][:20]} is out of range", hint=hint)
    if "+" in text:
        parts = []
        for part in text.split("+"):
            tokens, colon, weight = part.partition(":")
            share = _float(weight.rstrip("%"), option, hint) if colon else 1.0
            if not 0 < share <= 1e9:
                raise UsageError(f"{option}: {part[:40]!r}: no share", hint=hint)
            parts.append((_tokens(tokens, option), share))
        return lengths.Mix(tuple(parts))
    low, dash, high = text.partition("-")
    if dash and low:
        found = lengths.Uniform(_tokens(low, option), _tokens(high, option))
        if found.low > found.high:
            raise UsageError(f"{option}: {text[:40]} goes down", hint=f"{option} {high}-{low}")
        return found
    return lengths.Fixed(_tokens(text, option))


def _float(text: str, option: str, hint: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{option}: {text[:40]!r} is no number", hint=hint) from None
    return value


class Load(Record):
    """What the options say of a load, as text."""

    input_tokens: str | None = None
    output_tokens: str | None = None
    shared_prefix: str | None = None
    groups: int | None = None
    order: str | None = None
    control: bool = False
    turns: int | None = None
    turn_tokens: str | None = None
    think: str | None = None
    tools: int | None = None
    trace: str | None = None
    speed: float | None = None
    prompts: str | None = None
    concurrency: str | None = None
    rate: str | None = None
    burstiness: float | None = None
    find_limit: bool = False
    requests: int | None = None
    duration: str | None = None
    warmup: int | None = None
    retry: int = 0

    def swept(self, sweeps: Sequence[str]) -> list[tuple[str, Load]]:
        """Each combination of what --sweep lists, with its words; of --concurrency and --rate all that there are at once.

        Raises:
            UsageError: it names no such option, or one that is given besides.

        """
        out: list[tuple[str, Load]] = [("", self)]
        for text in sweeps:
            name, equals, values = text.partition("=")
            field = name.strip().lstrip("-").replace("-", "_")
            if not equals or field not in _SWEPT:
                raise UsageError(f"--sweep: {text[:40]!r} is not understood",
                                 hint="--sweep concurrency=1,2,4; also " + ", ".join(one.replace("_", "-") for one in _SWEPT[1:]))  # fmt: skip
            if getattr(self, field) is not None or any(getattr(one, field) is not None for _, one in out):
                raise UsageError(f"--sweep {name}: it is given besides", hint="one of them")
            parts = [part.strip() for part in values.split(",")]
            if not all(parts):
                raise UsageError(f"--sweep: {text[:40]!r} lists nothing", hint="--sweep concurrency=1,2,4")
            if field in ("concurrency", "rate"):
                out = [(words, one.replace(**{field: values})) for words, one in out]
                continue
            words_of = _SWEPT_WORDS[field]
            out = [
                (", ".join(filter(None, (words, words_of.format(part)))), one.replace(**{field: part}))
                for words, one in out
                for part in dict.fromkeys(parts)
            ]
        return out


_SWEPT_WORDS = {
    "input_tokens": "{} tokens in", "output_tokens": "{} tokens out", "shared_prefix": "{} tokens shared", "turn_tokens": "{} tokens a turn",
}  # fmt: skip
_SWEPT = ("concurrency", "rate", *_SWEPT_WORDS)
_MOST_STEPS, _MOST_PROCESSES, _MOST_TOKENS = 1000, 64, 2**24
_OF_MADE = ("input_tokens", "shared_prefix", "groups", "order", "turn_tokens", "tools")


def _given(load: Load, names: Sequence[str]) -> str | None:
    """The first of these options that is given."""
    return next(("--" + name.replace("_", "-") for name in names if getattr(load, name) is not None), None)


def read_work(given: Load) -> Work:
    """The kind of requests.

    Raises:
        UsageError: several kinds, or values that cannot be.
        SourceError: a file that cannot be read.

    """
    from kvctl.loadtest.lengths import Fixed
    from kvctl.loadtest.work import RANDOM, ROUND, Given, Made, traced

    if given.trace is not None and given.prompts is not None:
        raise UsageError("--trace and --prompts are two kinds of requests", hint="one of them")
    if given.speed is not None and (given.trace is None or given.concurrency is not None or given.rate is not None):
        raise UsageError("--speed is about the times of a --trace", hint="--trace FILE --speed 2")
    if given.speed is not None and not 1e-4 <= given.speed <= 1e4:
        raise UsageError(f"--speed: {given.speed:g} is out of range", hint="2: twice as fast as they came")
    think = 0.0 if given.think is None else seconds(given.think, "--think")
    turns = given.turns or 1
    if given.turns is not None and not 2 <= given.turns <= 1000:
        raise UsageError(f"--turns: {given.turns} is out of range", hint="from 2 to 1,000")
    if turns == 1 and (other := _given(given, ("turn_tokens", "think"))) is not None:
        raise UsageError(f"{other} is about --turns", hint="--turns 4")
    if given.trace is not None:
        if (other := _given(given, (*_OF_MADE, "output_tokens", "turns"))) is not None:
            raise UsageError(f"{other}: a trace has lengths of its own", hint="leave it out")
        if given.trace in ("", "."):
            raise UsageError("--trace names no file", hint="--trace mooncake.jsonl")
        if given.trace == "-":
            raise UsageError("--trace: standard input cannot be read twice", hint="a file")
        timed = given.concurrency is None and given.rate is None and not given.find_limit
        return traced(given.trace, (given.speed or 1.0) if timed else None)
    output = read_lengths(given.output_tokens or "128", "--output-tokens")
    if given.prompts is not None:
        if (other := _given(given, _OF_MADE)) is not None:
            raise UsageError(f"{other}: prompts of a file are sent as they are", hint="leave it out")
        from kvctl.loadtest import prompts

        read, left_out = prompts.read(given.prompts, turns)
        longest = max(len(one.says) for one in read)
        return Given(
            given.prompts, read, output, think, turns=max(1, longest), capped=given.output_tokens is not None, left_out=left_out
        )  # fmt: skip
    if given.order is not None and (given.order not in (RANDOM, ROUND) or given.shared_prefix is None):
        raise UsageError(
            "--order: random or round, of the groups of --shared-prefix",
            hint="--shared-prefix 8k --groups 20 --order round",
        )
    if given.tools is not None and not 1 <= given.tools <= 1000:
        raise UsageError(f"--tools: {given.tools} is out of range", hint="from 1 to 1,000 definitions")
    prefix = 0 if given.shared_prefix is None else _tokens(given.shared_prefix, "--shared-prefix")
    if given.groups is not None and (given.shared_prefix is None or not 1 <= given.groups <= 100_000):
        raise UsageError(
            "--groups: beginnings that prompts share, from 1 to 100,000", hint="--shared-prefix 1k --groups 4"
        )
    lengths = read_lengths(given.input_tokens or "512", "--input-tokens")
    if lengths.most is not None and prefix >= lengths.least:
        raise UsageError(
            f"--shared-prefix: {prefix:,} tokens leave nothing of prompts of {lengths.words}",
            hint="more --input-tokens",
        )
    turn = Fixed(64) if given.turn_tokens is None else read_lengths(given.turn_tokens, "--turn-tokens")
    return Made(lengths, output, prefix, given.groups or 1, given.order or RANDOM, turns, turn, think, given.tools or 0)


def read_plan(
    url: str, given: Load, *, sweeps: Sequence[str], model: str | None, endpoint: str, slo: str | None, headers: Sequence[str],
    api_key_env: str | None, extra: Sequence[str], ca: str | None, insecure: bool, timeout: str, seed: int | None, max_error_rate: float, reset_cache: bool, processes: int,
) -> Plan:  # fmt: skip
    """All of it.

    Raises:
        UsageError: something of it cannot be.
        SourceError: a file that cannot be read.

    """
    from kvctl.loadtest import asks, load, target
    from kvctl.loadtest.loop import Patience
    from kvctl.loadtest.plan import Plan

    place = target.read_url(url)
    if endpoint not in _ENDPOINTS:
        raise UsageError(f"--endpoint: unknown {endpoint[:40]!r}", hint="chat or completions")
    if (ca is not None or insecure) and not place.secure:
        raise UsageError("--ca and --insecure are about https", hint="https://…")
    length = None
    if given.requests is not None or given.duration is not None:
        length = load.Length(given.requests, None if given.duration is None else seconds(given.duration, "--duration"))
    if given.requests is not None and not 1 <= given.requests <= _MOST_REQUESTS:
        raise UsageError(f"--requests: {given.requests} is out of range", hint=f"from 1 to {_MOST_REQUESTS:,}")
    if given.warmup is not None and not 0 <= given.warmup <= _MOST_REQUESTS:
        raise UsageError(f"--warmup: {given.warmup} is out of range", hint="0 or more")
    if not 0 <= max_error_rate <= 100:
        raise UsageError(f"--max-error-rate: {max_error_rate:g} is no percentage", hint="from 0 to 100")
    if not 0 <= given.retry <= 100:
        raise UsageError(
            f"--retry: {given.retry} is out of range", hint="times that a request is sent again, at most 100"
        )
    swept = given.swept(sweeps)
    works = [(words, read_work(one)) for words, one in swept]
    if given.control:
        works = list(_with_control(works, find_limit=given.find_limit))
    steps = read_steps(swept[0][1], works)
    if len(steps) > _MOST_STEPS:
        raise UsageError(f"--sweep: {len(steps):,} loads", hint=f"at most {_MOST_STEPS:,}")
    if given.find_limit and (steps[0].at_once is None or len(steps) > 1):
        raise UsageError(
            "--find-limit raises the number of requests at once by itself", hint="--concurrency N says where it begins"
        )
    if not 1 <= processes <= _MOST_PROCESSES:
        raise UsageError(f"--processes: {processes} is out of range", hint=f"from 1 to {_MOST_PROCESSES}")
    objective, percent = read_slo(slo, scheduled=steps[0].at_once is None)
    trust = target.Trust(ca, insecure)
    trust.context()
    path = asks.CHAT if endpoint == "chat" else asks.COMPLETIONS
    if path != asks.CHAT and (given.tools is not None or any(_of_messages(step.work) for step in steps)):
        raise UsageError("--endpoint completions takes texts, no messages and no tools", hint="--endpoint chat")
    return Plan(
        place, steps, length, path, model, given.warmup, read_headers(headers, api_key_env), read_extra(extra), trust,
        Patience(silence=seconds(timeout, "--timeout")), objective, percent, seed, max_error_rate, limit=given.find_limit, retries=given.retry,
        reset_cache=reset_cache, processes=processes,
    )  # fmt: skip


def _with_control(works: Sequence[tuple[str, Work]], *, find_limit: bool) -> Iterator[tuple[str, Work]]:
    """Before each kind of requests that begin alike the same without that."""
    from kvctl.loadtest.work import Made

    for words, work in works:
        if not isinstance(work, Made) or not work.prefix or find_limit:
            raise UsageError("--control is about --shared-prefix", hint="-i 2k --shared-prefix 1k --control")
        yield ", ".join(filter(None, (words, "no prefix shared"))), work.alone
        yield words, work


def _of_messages(work: Work) -> bool:
    from kvctl.loadtest.work import Given

    return isinstance(work, Given) and any(prompt.messages for prompt in work.prompts)


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
    metrics = files.get("--prometheus")
    if metrics is not None and not metrics.lower().endswith(".prom"):
        raise UsageError(
            f"--prometheus: {metrics[:200]!r} does not end in .prom, and node_exporter reads no other",
            hint="--prometheus kvctl.prom",
        )
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
