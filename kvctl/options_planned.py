"""`kvctl serve-test --plan`: a load, objectives and promises of what `kvctl recommend` wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.errors import KvctlError, SourceError, UsageError
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.loadtest.promised import Promised
    from kvctl.options_serve import Load

_LIMIT = 64_000_000
"""Bytes of a plan; one that was put to the proof has a load test in it."""
_HINT = "kvctl recommend MODEL … --json > plan.json saves one"
_SAYS = (
    "input_tokens",
    "output_tokens",
    "shared_prefix",
    "turns",
    "tools",
    "trace",
    "prompts",
    "concurrency",
    "rate",
    "burstiness",
)


class Planned(Record):
    """What a plan says of a test."""

    load: Load
    slo: str | None
    """As --slo has it; None where the plan has no objectives."""
    promised: Promised
    command: str
    """The engine's, with the settings that the plan is about."""


def numbered(text: str) -> tuple[str, int]:
    """ "plan.json#2": the file, and the number of the answer."""
    path, mark, number = text.rpartition("#")
    return (path, int(number)) if mark and number.isdecimal() and len(number) < 10 else (text, 1)


def plan_file(text: str, option: str) -> tuple[dict[str, Any], str, int]:
    """What the plan's file of FILE or FILE#N holds, how it is called in messages, and the number of the answer.

    Raises:
        KvctlError: it cannot be read.

    """
    from kvctl.sources.jsonfile import plain, read_file

    path, number = numbered(text)
    where = plain(path[:200])
    if not path.strip() or not Path(path).exists():
        raise SourceError(f"{option}: a plan is looked for, and there is no file {where or repr(path)}",
                          hint=_HINT)  # fmt: skip
    try:
        return read_file(Path(path), limit=_LIMIT), where, number
    except KvctlError as error:
        raise type(error)(error.message, hint=_HINT) from None


def read(text: str, load: Load, sweeps: Sequence[str]) -> Planned:
    """The plan of --plan FILE or FILE#N; `load` is what other options say.

    Raises:
        UsageError: they say what the plan says.
        KvctlError: the file is no plan.

    """
    from kvctl.recommend.verify import of_plan

    said = [f"--{name.replace('_', '-')}" for name in _SAYS if getattr(load, name) is not None]
    said += ["--find-limit"] * load.find_limit + ["--control"] * load.control + ["--sweep"] * bool(sweeps)
    if said:
        raise UsageError(f"{said[0]}: --plan says what is sent", hint="leave it out, or --plan")
    promised, ttft, tpot, percent, command = of_plan(*plan_file(text, "--plan"))
    slo = ",".join(f"{name}={value * 1e3:.6f}ms" for name, value in (("ttft", ttft), ("tpot", tpot)) if value is not None)  # fmt: skip
    load = load.replace(
        input_tokens=str(promised.prompt), output_tokens=str(promised.answer),
        concurrency=None if promised.concurrency is None else str(promised.concurrency),
        rate=None if promised.rate is None else f"{promised.rate:.6f}",
    )  # fmt: skip
    return Planned(load, f"{slo},p{percent:g}" if slo else None, promised, command)
