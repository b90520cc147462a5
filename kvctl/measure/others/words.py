"""Settings of a plan as words of the engine's own command line, and such words as a plan again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from kvctl.allocation import Serving
from kvctl.engines import commandline
from kvctl.engines import engine as find_engine
from kvctl.engines.flags import COUNTS, FLAGS, GIB, OBJECT, ON_OFF, SHARES, Flag, serving
from kvctl.errors import UsageError
from kvctl.formats import TORCH_NAMES, model_dtype
from kvctl.record import Record
from kvctl.size import SizePlan
from kvctl.units import GIB as GIB_BYTES

_COMMANDS = {"llama.cpp": "llama-server", "vllm": "vllm serve"}
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
            if name is None or value not in (flag.value, not flag.value):
                continue
            options.append(name)
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
        raise UsageError(f"{spelling}: {_COMMANDS[engine]} has no such setting", hint="leave it out")
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
        return [f"{value / GIB_BYTES!r}"]
    if flag.kind is COUNTS:
        return [str(part) for part in value]
    if flag.kind is SHARES:
        return [",".join(f"{part:g}" for part in value)]
    return [str(value)]


def formats(engine: str, plan: SizePlan) -> list[str]:
    """Options for the formats of the cache and of the model.

    Raises:
        UsageError: keys and values apart, where the engine stores both alike.

    """
    if engine == "llama.cpp":
        pairs = (("--cache-type-k", plan.key), ("--cache-type-v", plan.value))
        return [word for name, fmt in pairs if fmt is not None for word in (name, fmt.name)]
    out = ["--dtype", TORCH_NAMES[plan.dtype.name]] if plan.dtype is not None else []
    if plan.key is not None:
        if plan.value not in (None, plan.key, plan.key.values):
            raise UsageError(f"{engine} stores keys and values in one format", hint="--kv-dtype sets both")
        out += ["--kv-cache-dtype", TORCH_NAMES.get(plan.key.name, plan.key.name)]
    return out


def planned(engine: str, words: Sequence[str], plan: SizePlan, rules: str = "") -> SizePlan:
    """The plan of a start with these words; `plan` has what no word says, `rules` the version if that is known.

    Raises:
        UsageError: a word that no such engine has, or a value that it does not know.

    """
    said = commandline.read(f"{_COMMANDS[engine]} {shlex.join(words)}", engine)
    found = find_engine(rules or engine)
    common = said.common
    told = serving(engine, said.flags, strict=True).replace(draft=plan.serving.draft)
    context = common.get("context")
    both = common.get("kv_dtype", "auto")
    key, value = (common.get(field, both) for field in ("k_dtype", "v_dtype"))
    keys = None if key == "auto" else found.kv_dtype(key, "--kv-cache-dtype")
    values = None if value == "auto" else found.kv_dtype(value, "--kv-cache-dtype")
    return plan.replace(
        engine=found,
        contexts=(commandline.count_of(engine, context, "its length"),) if context else plan.contexts,
        dtype=model_dtype(common.get("dtype", "auto")),
        key=keys,
        value=(values.values or values) if values is not None else None,
        serving=told,
        notes=(*plan.notes, *said.notes),
    )
