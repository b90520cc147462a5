"""The bundled catalogue: published models, one JSON line each, found as text.

A look-up parses the one line it needs; names are read with a regex. Written by
scripts/build_catalogue.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from kvctl.errors import SourceError, UsageError
from kvctl.formats import model_dtype
from kvctl.sources import Found
from kvctl.spec import Provenance, Weights

# importlib.resources would cost more than a look-up.
_PATH = os.path.join(os.path.dirname(os.path.dirname(__file__)), "data", "catalogue.jsonl")
_START = '{"id":"'


@cache
def _lines() -> Mapping[str, str]:
    """The unparsed line of each model."""
    with open(_PATH, encoding="utf-8") as file:
        lines = file.read().split("\n")
    return {line[len(_START) : line.index('"', len(_START))]: line for line in lines if line.startswith(_START)}


@cache
def _spellings() -> Mapping[str, tuple[str, ...]]:
    """Lower-case full and short names → full names."""
    out: dict[str, tuple[str, ...]] = {}
    for name in _lines():
        for spelling in {name.lower(), _short(name).lower()}:
            out[spelling] = (*out.get(spelling, ()), name)
    return out


def _short(name: str) -> str:
    return name.rpartition("/")[2]


def full_name(name: str) -> str:
    """The full id that `name` means, whatever its case, with or without organisation.

    An unknown name comes back unchanged; one that two models share is a UsageError.
    """
    if name in _lines():
        return name
    matches = _spellings().get(name.lower(), ())
    if len(matches) > 1:
        raise UsageError(f"{name} is ambiguous", hint="one of " + ", ".join(matches))
    return matches[0] if matches else name


def has(name: str) -> bool:
    """True for names of exactly one model here (one without enough facts included)."""
    return name in _lines() or len(_spellings().get(name.lower(), ())) == 1


def find(name: str) -> Found:
    """The model's configuration; SourceError where it is unknown, or known in part only."""
    full = full_name(name)
    if full not in _lines():
        near = nearest(name)
        raise SourceError(
            f"{name} is not in the catalogue",
            hint="nearest: " + ", ".join(near) if near else "kvctl size --list-models says what is",
        )
    row = json.loads(_lines()[full])
    if "incomplete" in row:
        raise SourceError(
            f"the catalogue cannot size {full}: {row['incomplete']}",
            hint=f"read the model's own configuration: kvctl size {full} --source hub",
        )
    return Found(
        id=full,
        config=row["config"],
        provenance=Provenance("catalogue", row["source"]),
        weights=_weights(row),
        notes=tuple(row.get("notes", ())),
        whole=bool(row.get("verbatim")),
    )


def _weights(row: Mapping[str, Any]) -> Weights | None:
    parameters = row.get("parameters")
    if "weights" in row:
        size, source = row["weights"]
        return Weights(size, parameters, source)
    dtype = model_dtype(row.get("weight_dtype", ""))
    if parameters is None:
        return None
    if dtype is None:
        return Weights(None, parameters, "catalogue: the parameter count; how they are stored is not in the source")
    return Weights(parameters * dtype.bytes, parameters, f"catalogue: parameters × {dtype.name}")


def names() -> list[str]:
    """Full ids of all models that can be sized from here, in the order of the file."""
    return [
        name for name, line in _lines().items() if not line.startswith(',"incomplete"', len(_START) + len(name) + 1)
    ]


def short_names() -> list[str]:
    """Names without organisation that mean one model, where they differ from its full id."""
    sized = set(names())
    return [
        _short(found[0]) for spelling, found in _spellings().items()
        if len(found) == 1 and found[0] in sized and "/" in found[0] and spelling == _short(found[0]).lower()
    ]  # fmt: skip


def matching(patterns: Sequence[str]) -> list[dict[str, Any]]:
    """Models that match any of the patterns.

    Raises:
        SourceError: none does.

    """
    rows = [row for pattern in patterns for row in listing(pattern)]
    if not rows:
        near = nearest(patterns[0])
        raise SourceError(
            f"no model of the catalogue matches {patterns[0]!r}", hint="near it: " + ", ".join(near) if near else None
        )
    return rows


def listing(pattern: str = "", *, incomplete: bool = False) -> list[dict[str, Any]]:
    """Models whose id matches: a glob where there is *, ? or [, else any part of the id; case does not count.

    With `incomplete`, only those that cannot be sized from here, and why.
    """
    wanted = pattern.lower()
    if any(sign in wanted for sign in "*?["):
        from fnmatch import fnmatchcase

        found = [name for name in _lines() if any(fnmatchcase(part.lower(), wanted) for part in (name, _short(name)))]
    else:
        found = [name for name in _lines() if wanted in name.lower()]
    rows = [json.loads(_lines()[name]) for name in found]
    return [_listed(row) for row in rows if ("incomplete" in row) is incomplete]


def _listed(row: Mapping[str, Any]) -> dict[str, Any]:
    listed = {key: row.get(key) for key in ("id", "model_type", "parameters", "max_context")}
    if "incomplete" in row:
        return listed | {"incomplete": row["incomplete"]}
    return listed | {"model_type": row["config"].get("model_type")}


def nearest(name: str, n: int = 5) -> list[str]:
    """The models whose short names are most like `name`, best first."""
    from difflib import SequenceMatcher

    wanted = _letters(_short(name))
    if not wanted:
        return []
    matcher = SequenceMatcher(autojunk=False)
    matcher.set_seq2(wanted)
    scores = []
    for candidate in names():
        letters = _letters(_short(candidate))
        matcher.set_seq1(letters)
        if matcher.real_quick_ratio() < _LIKE or matcher.quick_ratio() < _LIKE:
            continue
        # Names grow to the right: sharing the whole beginning counts as much as being alike.
        score = matcher.ratio() + (letters.startswith(wanted) or wanted.startswith(letters))
        if score >= _LIKE:
            scores.append((-score, candidate))
    return [candidate for _, candidate in sorted(scores)[:n]]


_LIKE = 0.6


def _letters(name: str) -> str:
    return "".join(char for char in name.lower() if char.isalnum() or char == ".")
