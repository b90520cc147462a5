"""Settings as words of an engine's own command line: `flags.FLAGS`, read the other way."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from kvctl.allocation import Serving
from kvctl.engines.flags import COUNTS, FLAGS, GIB, NUMBER, OBJECT, ON_OFF, SHARES, Flag
from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.units import GIB as GIB_BYTES

COMMANDS = {"vllm": "vllm serve", "sglang": "python3 -m sglang.launch_server", "llama.cpp": "llama-server",
            "tensorrt-llm": "trtllm-serve", "ollama": "ollama serve", "transformers": "transformers serve"}  # fmt: skip
"""What starts each engine's server."""
_KNOWN_OTHERWISE = {"draft", "encoder"}
"""What no word says: facts of another model."""


class Words(Record):
    """How an engine is told its settings."""

    options: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    """Settings that only the environment has, with their values."""


def spelled(engine: str, told: Serving) -> Words:
    """What of `told` is not the engine's default, in its own spelling.

    Raises:
        UsageError: a setting that it has no word for.

    """
    usual = Serving()
    options: list[str] = []
    variables: list[tuple[str, str]] = []
    done: set[str] = set()
    # A setting that has an option is not told by a variable as well.
    rows = sorted((flag for flag in FLAGS if engine in flag.engines), key=lambda flag: not _options(flag, engine))
    for flag in rows:
        value = getattr(told, flag.field)
        if value is None or value == getattr(usual, flag.field) or flag.field in done:
            continue
        names = _options(flag, engine)
        if flag.kind.read is None:
            name = names[0] if names and value == flag.value else next(iter(flag.off), None)
            if value not in (flag.value, not flag.value):
                continue
            # A switch that nothing turns off is off where it is not said.
            options += [name] if name is not None else []
        elif names:
            options += [names[0], *_texts(flag, value)]
        elif flag.names[engine]:
            variables.append((flag.names[engine][0], ",".join(_texts(flag, value))))
        else:
            continue
        done.add(flag.field)
    left = [
        name
        for name in Serving._fields
        if name not in done | _KNOWN_OTHERWISE and getattr(told, name) != getattr(usual, name)
    ]
    if left:
        spelling = next((name for flag in FLAGS if flag.field == left[0] for name in flag.spellings), left[0])
        raise UsageError(f"{spelling}: {COMMANDS[engine]} has no such setting", hint="leave it out")
    return Words(tuple(options), tuple(variables))


def _options(flag: Flag, engine: str) -> list[str]:
    """Spellings as an option, long ones first."""
    return sorted(
        (name for name in flag.names[engine] if name.startswith("-")), key=lambda name: not name.startswith("--")
    )


def _texts(flag: Flag, value: Any) -> list[str]:
    if flag.kind is OBJECT:
        return [json.dumps(dict(value))]
    if flag.kind is ON_OFF:
        return ["on" if value else "off"]
    if flag.kind is GIB:
        return [_plain(value / GIB_BYTES)]
    if flag.kind is NUMBER:
        return [_plain(value)]
    if flag.kind is COUNTS:
        return [str(part) for part in value]
    if flag.kind is SHARES:
        return [",".join(f"{part:g}" for part in value)]
    return [str(value)]


def _plain(value: float) -> str:
    """A number; a whole one without a point, as some engines read no other."""
    return str(int(value)) if value == int(value) else format(Decimal(repr(value)), "f")
