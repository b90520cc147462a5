"""Which part of the best an engine reaches: fitted on published measurements (data/speed.json, written by scripts/fit_speed.py).

A coefficient is a base and effects of what the setup is: engine, its age, the GPU's family and the card itself, the format of the weights.
What was never measured has no effect of its own, so that an unseen card or engine gets what its kind has. Shares of the best
go through a logistic function and stay below 1; times go through the exponential.
"""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

from kvctl.speed.roofline import Efficiency

# Which effects a coefficient has: E engine, G engine and its age, F the GPU's family, C the card, K the kind of format, W the wire,
# M mixtures of experts, L latent attention; pairs are joint effects.
EFFECTS: dict[str, tuple[str, ...]] = {
    "memory": ("E", "G", "F", "C", "K", "EK", "EF", "EM", "GF", "GC"),
    "prefill": ("E", "G", "F", "C", "K", "EK", "EF", "EM", "GF", "GC"),
    "decode": ("E", "F"),
    "cache": ("E", "G", "F", "EL"),
    "attention": ("E", "G", "F"),
    "link": ("W", "E"),
    "exchange": ("W", "E", "G", "F"),
    "layer": ("E", "G", "F", "C", "GL"),
    "expert_layer": ("E", "G", "F", "EK"),
    "step": ("E", "G", "F"),
    "sequence": ("E", "G"),
    "half": ("E", "F"),
    "first": ("E", "G"),
    "wait": ("E", "G"),
    "mix": ("E", "G"),
    "busy": ("E", "G"),
}
SHARES = frozenset(("memory", "prefill", "decode", "cache", "attention", "link", "mix", "busy"))
"""Those that are below 1."""


def effects(name: str, facts: dict[str, str]) -> list[str]:
    """The names of a coefficient's effects for a setup; `facts` are its letters."""
    found = []
    for letters in EFFECTS[name]:
        values = [facts.get(letter, "") for letter in letters]
        if all(values):
            found.append("|".join((letters, *values)))
    return found


@cache
def fitted() -> dict[str, Any]:
    """What the fit wrote."""
    import json

    path = os.path.join(os.path.dirname(os.path.dirname(__file__)), "data", "speed.json")
    with open(path, encoding="utf-8") as file:
        found: dict[str, Any] = json.load(file)
    return found


def efficiency(facts: dict[str, str], table: dict[str, Any] | None = None) -> Efficiency:
    """Of a setup."""
    table = fitted()["coefficients"] if table is None else table
    values = {}
    for name in EFFECTS:
        row = table[name]
        z = row["base"] + sum(row["effects"].get(effect, 0.0) for effect in effects(name, facts))
        values[name] = 1 / (1 + math.exp(-z)) if name in SHARES else math.exp(z)
    return Efficiency(**values)


FEW = 2
"""Requests in a step up to which one alone says how long it takes."""
_ENOUGH = 30
"""Figures of an engine's batches that make it known how its steps grow."""


@cache
def known(engine: str, card: str, *, several: bool, recent: bool) -> tuple[int, int]:
    """How many figures were published of an engine on a card, and of it on all cards.

    `several`: of more than `FEW` requests at once; `recent`: of the engine since 2025.
    """
    measured: dict[str, list[int]] = fitted()["measured"].get(engine, {})
    which = int(several) + 2 * int(recent)
    return measured[card][which] if card in measured else 0, sum(row[which] for row in measured.values())


def spreads(facts: dict[str, str], *, several: bool) -> dict[str, tuple[float, float]]:
    """Kind of figure (ttft, tpot, rate, prefill) → logarithms that a measurement lies below and above its prediction, nine times of ten.

    Those of combinations that a fit had not seen; wider where no measurement of the engine (of its age) on the card, or none of the engine, was in
    it, and where none says how its steps grow with `several` requests in them.
    """
    data = fitted()
    here, anywhere = known(facts["E"], facts["C"], several=several, recent=not facts["G"])
    level = "combination" if here else "card" if anywhere >= (_ENOUGH if several else 1) else "engine"
    found = {}
    for kind, row in data["spread"][level].items():
        own = row.get(facts["G"] or facts["E"], row["all"])
        found[kind] = (own[0], own[1])
    return found
