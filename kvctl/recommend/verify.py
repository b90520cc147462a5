"""A recommendation put to the proof: what it promises, the command that is started for that here, and the load that is put on it.

Starting, sending and watching are `kvctl.loadtest`'s; what came of it is laid beside the promise by `kvctl.loadtest.promised`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.loadtest.promised import SPEED, Promised
from kvctl.recommend.emit.command import command
from kvctl.record import Record
from kvctl.units import format_bytes, plural

if TYPE_CHECKING:
    from kvctl.hardware import Device
    from kvctl.loadtest.capacity import Sizing
    from kvctl.loadtest.figures import Slo
    from kvctl.loadtest.launch import Launch
    from kvctl.loadtest.live import Live
    from kvctl.loadtest.plan import Plan
    from kvctl.loadtest.report import ServeReport
    from kvctl.loadtest.tests import Done
    from kvctl.measure.run import Now
    from kvctl.recommend.answers import Answer, Known, Recommendation
    from kvctl.recommend.deployment import Deployment
    from kvctl.recommend.emit import Site
    from kvctl.recommend.request import Ask
    from kvctl.speed import Range

_FEWEST = 8
"""Requests of a load that are measured, at least."""
_MINUTE_S = 60.0
_PATIENCE_S = 3600.0
"""Seconds for the first byte of an answer, and for those under way after the last was sent: a slow machine computes long prompts for
minutes, one after the other, and whoever waits can end it."""
_WHOLE = ("llama.cpp",)
"""Engines of which all is known that they take of a host."""


# -- what is promised ----------------------------------------------------------------------------


def promised(answer: Answer, ask: Ask) -> Promised:
    """Of one answer, what one of its servers promises: its share of the requests."""
    from kvctl.recommend.answers import in_words

    candidate, speed = answer.judged.candidate, answer.judged.speed
    deployment, stack = candidate.deployment, candidate.stack
    count = deployment.replicas
    host = deployment.device.kind == "cpu"
    ranges: dict[str, Range] = {}
    if speed is not None:
        for name in SPEED:
            found: Range = getattr(speed, name)
            if math.isfinite(found.high):
                ranges[name] = _share(found, count) if name.endswith("rate") else found
    return Promised(
        in_words(candidate), "", deployment.engine.name, ask.prompt, ask.answer, ask.context,
        None if ask.concurrency is None else -(-min(ask.concurrency, candidate.usual_at_once) // count),
        None if ask.rate is None else ask.rate / count,
        candidate.at_once // count,
        _cells(deployment.serving.slots, ask.context) if candidate.capacity is None else candidate.capacity // count,
        stack.device - stack.headroom, stack.device if host else None, deployment.engine.name in _WHOLE, **ranges,
    )  # fmt: skip


def _cells(slots: Any, context: int) -> int | None:
    """Tokens of llama.cpp's cache, where every slot has a part of its own: whole 256ths. None of engines without slots."""
    return slots * -(-context // 256) * 256 if isinstance(slots, int) and 0 < slots < 2**20 else None


def _share(found: Range, count: int) -> Range:
    return found if count == 1 else type(found)(found.low / count, found.mid / count, found.high / count)


def answered(found: Recommendation, known: Known) -> Recommendation:
    """Answers of which a trial has to say whether they keep objectives: where nothing but these stands in the way, and how fast this
    machine is, is not known."""
    from kvctl.recommend.answers import recommend

    nearest = found.best_missing
    if found.met or nearest is None or nearest.speed is not None:
        return found
    if not all(words.startswith(("TTFT: ", "TPOT: ")) for words in nearest.missed):
        return found
    again = recommend(found.ask.replace(ttft=None, tpot=None), known)
    return again.replace(
        notes=(*again.notes, f"{nearest.no_speed.partition(':')[0]}: whether objectives are kept, the trial says")
    )


# -- what is started -----------------------------------------------------------------------------


def check_here(deployment: Deployment, how: str) -> None:
    """Refuses what cannot be started on this machine; `how`: what makes its weights, where they have to be made.

    Raises:
        UsageError: it cannot.

    """
    from kvctl.loadtest.launch import ENGINES

    # The machine first: on another one, nothing else about the answer matters.
    if deployment.nodes > 1:
        raise UsageError(f"--verify starts one machine's server, and this is one over {deployment.nodes} nodes",
                         hint="start it (--emit command), and kvctl serve-test URL --plan plan.json")  # fmt: skip
    if deployment.device.kind == "cpu":
        _check_memory(deployment.device)
    else:
        _check_gpus(deployment)
    name = deployment.engine.name
    if name not in ENGINES:
        raise UsageError(f"--verify: {name} is no engine that kvctl starts",
                         hint="--engine llama.cpp or vllm; or start it yourself, and kvctl serve-test URL --plan plan.json")  # fmt: skip
    if deployment.made == "make":
        raise UsageError(f"--verify: weights in {deployment.weights} have to be made first: {how}",
                         hint="then kvctl recommend FOLDER … --verify, of what was made")  # fmt: skip


def _check_memory(device: Device) -> None:
    from kvctl.hardware.host import host_device

    own = host_device()
    if device.memory_bytes > own.memory_bytes:
        raise UsageError(f"--verify: the plan is for a host with {format_bytes(device.memory_bytes)}, and this one has "
                         f"{format_bytes(own.memory_bytes)}", hint="--gpu cpu is this host")  # fmt: skip


def _check_gpus(deployment: Deployment) -> None:
    from kvctl.hardware.local import local_gpus

    wanted = deployment.device
    what = f"--verify: the plan is for {plural(deployment.gpus, 'GPU')} ({wanted.name})"
    hint = "--gpu local is this machine's; or start it there, and kvctl serve-test URL --plan plan.json"
    try:
        own = local_gpus()
    except KvctlError as error:
        raise UsageError(f"{what}, and {error.message.removeprefix('--gpu local: ')}", hint=hint) from None
    alike = [one for one in own if _alike(one, wanted)]
    if len(alike) < deployment.gpus:
        there = ", ".join(dict.fromkeys(one.name for one in own))
        raise UsageError(f"{what}, and this machine has {len(alike)} of them ({there})", hint=hint)


def _alike(one: Device, wanted: Device) -> bool:
    same = one.facts == wanted.facts if wanted.facts is not None else one.name == wanted.name
    return same and one.cuda_bytes >= wanted.cuda_bytes


def launch_of(deployment: Deployment, site: Site, more: Sequence[str] = ()) -> Launch:
    """What is started: the command that is emitted, with kvctl's own host and port; `more` are options that change nothing of what is
    promised.

    Raises:
        UsageError: they do.
        KvctlError: the engine is not installed.

    """
    from kvctl.loadtest import launch

    told = command(deployment, site)
    words = [word for option in told.options if option[0] not in ("--host", "--port") for word in option]
    before = [f"{name}={value}" for name, value in told.variables]
    plain = shlex.join([*told.program, *words])
    _check_more(plain, shlex.join([*told.program, *words, *more]))
    return launch.of_command(shlex.join([*before, *told.program, *words, *more]))


_SPEED_ALONE = ("--enforce-eager",)
"""Options that are known to `kvctl size`, and leave the cache as it is."""


def _check_more(plain: str, full: str) -> None:
    from kvctl.engines import commandline
    from kvctl.loadtest.launch import told

    with told("--verify-args"):
        one, other = commandline.read(plain), commandline.read(full)
    left = [found for found in other.flags if found not in one.flags and found.spelling not in _SPEED_ALONE]
    if left or (one.common, one.model) != (other.common, other.model):
        what = left[0].spelling if left else "an option"
        raise UsageError(f"--verify-args: {what} changes what is promised",
                         hint="only what leaves memory and requests as they are: -t 4, --enforce-eager")  # fmt: skip


# -- what is done to it --------------------------------------------------------------------------


def plan_of(wanted: Promised, launch: Launch, sizing: Sizing, slo: Slo | None, percent: float) -> Plan:
    """Usual requests as many at once, or as often, as is promised; and where these are shorter than the longest, those too, as many as
    are held, each once."""
    from kvctl.loadtest import asks
    from kvctl.loadtest.launch import HOST
    from kvctl.loadtest.load import Length
    from kvctl.loadtest.loop import Patience
    from kvctl.loadtest.plan import Plan, Step
    from kvctl.loadtest.target import read_url

    usual = _made(wanted.prompt, wanted.answer)
    steps = [Step(usual, wanted.concurrency, wanted.rate)]
    if wanted.prompt + wanted.answer < wanted.context and wanted.held:
        longest = _made(wanted.context - wanted.answer, wanted.answer)
        steps.append(Step(longest, wanted.held, beside="the longest", once=True))
    elif wanted.concurrency is None and wanted.held:
        steps.append(Step(usual, wanted.held, once=True))
    most = wanted.concurrency or 0
    if wanted.rate is not None:  # by a clock: as many as come in a minute, and no more than are held
        most = min(wanted.held, int(wanted.rate * _MINUTE_S))
    return Plan(
        read_url(f"http://{HOST}"), tuple(steps), Length(requests=max(_FEWEST, most)), asks.COMPLETIONS, launch.model, warm=max(1, most),
        patience=Patience(silence=_PATIENCE_S, whole=2 * _PATIENCE_S), slo=slo, slo_percent=percent, sizing=sizing, launch=launch,
        promised=wanted, notes=launch.notes,
    )  # fmt: skip


def _made(prompt: int, answer: int) -> Any:
    from kvctl.loadtest.lengths import Fixed
    from kvctl.loadtest.work import Made

    return Made(Fixed(prompt), Fixed(answer))


class Trial(Record):
    """What came of an answer that was started here."""

    answer: int
    """Its number."""
    promised: Promised
    command: str
    refused: str | None = None
    """Why the engine did not start."""
    report: ServeReport | None = None
    """Of the test; None where it did not start."""

    @property
    def broken(self) -> tuple[str, ...]:
        """Promises that do not hold."""
        if self.report is None:
            return (self.refused or "the engine did not start",)
        found = self.report.verified
        return (*(found.broken if found is not None else ()), *self.report.failed)

    @property
    def holds(self) -> bool:
        """Whether nothing broke, and all of it was tried."""
        return not self.broken and not self.interrupted

    @property
    def interrupted(self) -> bool:
        return self.report is not None and self.report.interrupted

    def to_dict(self) -> dict[str, Any]:
        found = None if self.report is None else self.report.verified
        return {
            "answer": self.answer, "command": self.command, "refused": self.refused, "holds": self.holds, "broken": list(self.broken),
            "promised": self.promised.to_dict(), "rows": [] if found is None else [row.to_dict() for row in found.rows],
            "notes": [] if found is None else list(found.notes), "test": None if self.report is None else self.report.to_dict(),
        }  # fmt: skip


def put(number: int, plan: Plan, now: Now, live: Live | None = None, done: Done | None = None) -> Trial:
    """Start what the plan starts, and put its loads on it.

    Raises:
        KvctlError: it does not start, and not for want of room in the cache, or ends in the middle.

    """
    from kvctl.loadtest import tests
    from kvctl.loadtest.capacity import Refused

    assert plan.promised is not None
    assert plan.launch is not None
    trial = Trial(number, plan.promised, plan.launch.shown)
    try:
        found = tests.run(plan, now, tests.Log(None), live, done or (lambda outcome: None))
    except Refused as error:
        return trial.replace(refused=f"{error.message}; {error.hint}" if error.hint else error.message)
    return trial.replace(report=found, command=found.started.command if found.started is not None else trial.command)


# -- plans that were kept ------------------------------------------------------------------------


def of_plan(
    data: Mapping[str, Any], where: str, number: int
) -> tuple[Promised, float | None, float | None, float, str]:
    """What an answer of a plan's file promises, its objectives for TTFT and TPOT in seconds, how many requests of a
    hundred are to keep them, and its command line.

    Raises:
        ConfigError: it is no plan, is damaged, or has no such answer.

    """
    from kvctl.recommend import what_if

    side = what_if.read(data, where, number)
    try:
        asked = data["asked"]
        name, _, _ = str(side.settings["engine"]).partition("@")
        tokens = {field: _whole(asked[field]) for field in ("prompt_tokens", "output_tokens", "context")}
        concurrency = None if asked["concurrency"] is None else _whole(asked["concurrency"])
        rate, ttft, tpot = (None if asked[field] is None else _more(asked[field]) for field in ("rate", "ttft_seconds", "tpot_seconds"))  # fmt: skip
        percent = _more(asked.get("slo_percent", 99.0))
        if percent > 100:
            raise ValueError("slo_percent above 100")
        alone = side.settings.get("replicas", 1) == 1
        tokens_held = side.capacity or _cells(side.settings.get("slots"), tokens["context"]) if alone else None
        if (concurrency is None) == (rate is None):
            raise ValueError("requests at once, or a rate")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = str(error)[:80]
        raise ConfigError(f"{where} is damaged: {what if what.isprintable() else type(error).__name__}",
                          hint="name a file that kvctl recommend --json wrote") from None  # fmt: skip
    found = Promised(
        side.name, f"{where}#{number}", name, tokens["prompt_tokens"], tokens["output_tokens"], tokens["context"], concurrency, rate,
        side.held or 0, tokens_held, whole=name in _WHOLE,
        ttft=side.speed.get("ttft"), tpot=side.speed.get("tpot"), output_rate=side.speed.get("output_rate"),
        request_rate=side.speed.get("request_rate"),
    )  # fmt: skip
    return found, ttft, tpot, percent, shlex.join(side.command)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**40:
        raise TypeError("a whole number of at least 1 is wanted")
    return value


def _more(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise TypeError("a number above 0 is wanted")
    return float(value)
