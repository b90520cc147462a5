"""Fits kvctl/data/speed.json on published measurements: efficiencies, and how far predictions of unseen combinations are off.

Needs numpy. Bases and effects are found together by least squares of the logarithm of predicted over measured, with a loss
that outliers do not rule; effects are held near nothing (a Gaussian prior), so that only what the data tell has one. Ranges are those
of combinations of model, GPU and engine that a fit has not seen.

    python scripts/fit_speed.py tests/data/speed.jsonl [--cross] [--write]
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import speed_points as sp

from kvctl.speed.efficiency import EFFECTS, SHARES, effects
from kvctl.speed.roofline import FIELDS, Demand, Efficiency

# Where a fit begins, and what it is held to where data say little: (value, spread of the base, spread of an effect) after the
# logistic or exponential; times in seconds.
START: dict[str, tuple[float, float, float]] = {
    "memory": (0.70, 1.0, 0.4),
    "prefill": (0.50, 1.0, 0.4),
    "decode": (0.50, 1.0, 0.3),
    "cache": (0.50, 1.0, 0.3),
    "attention": (0.35, 1.0, 0.4),
    "link": (0.50, 1.0, 0.4),
    "exchange": (8e-6, 1.0, 0.4),
    "layer": (8e-6, 1.0, 0.5),
    "expert_layer": (15e-6, 1.0, 0.5),
    "step": (5e-4, 1.0, 0.5),
    "sequence": (1e-5, 1.0, 0.5),
    "half": (100.0, 1.0, 0.4),
    "first": (0.02, 1.0, 0.4),
    "wait": (0.05, 1.0, 0.5),
    "mix": (0.6, 1.0, 0.5),
    "busy": (0.9, 0.5, 0.4),
}
SPREAD = 0.15
"""Of the logarithm, within a combination: what a residual is weighed against the priors with."""


class Data:
    """Observations as arrays."""

    def __init__(self, observed: list[sp.Observation]) -> None:
        self.observed = observed
        self.kinds = np.array([o.kind for o in observed])
        self.step = Demand(*(np.array([float(getattr(o.step, name)) for o in observed]) for name in FIELDS))
        self.prompt = Demand(*(np.array([float(getattr(o.prompt, name)) for o in observed]) for name in FIELDS))
        for name in ("others", "output", "requests", "groups", "value"):
            setattr(self, name, np.array([float(getattr(o, name)) for o in observed]))
        # Figures of one point share its weight, and points of one combination do not outvote others.
        count: dict[str, int] = {}
        group: dict[str, int] = {}
        for o in observed:
            count[o.point.id] = count.get(o.point.id, 0) + 1
            group[o.point.group] = group.get(o.point.group, 0) + 1
        self.trust = np.array([o.point.trust / math.sqrt(count[o.point.id]) * group[o.point.group] ** -0.15 for o in observed])
        self.names: dict[str, list[str]] = {name: sorted({x for o in observed for x in effects(name, o.facts)}) for name in EFFECTS}
        self.members = {
            name: np.array([[float(effect in effects(name, o.facts)) for effect in self.names[name]] for o in observed]).reshape(len(observed), -1)
            for name in EFFECTS
        }  # fmt: skip

    def take(self, rows: Any) -> Data:
        return Data([self.observed[i] for i in rows])


def predict(data: Data, e: Efficiency) -> Any:
    found = np.empty(len(data.observed))
    for kind in np.unique(data.kinds):
        rows = data.kinds == kind
        cut = lambda record: type(record)(*(getattr(record, n)[rows] for n in record._fields))  # noqa: E731
        found[rows] = sp.predicted(kind, cut(data.step), cut(data.prompt), cut(e), data.others[rows], data.output[rows], data.requests[rows], data.groups[rows])
    return found


def _z(name: str, value: float) -> float:
    return math.log(value / (1 - value)) if name in SHARES else math.log(value)


def unpack(x: Any, names: dict[str, list[str]]) -> dict[str, Any]:
    table, at = {}, 0
    for name in EFFECTS:
        size = len(names[name])
        table[name] = {"base": float(x[at]), "effects": dict(zip(names[name], map(float, x[at + 1 : at + 1 + size]), strict=True))}
        at += 1 + size
    return table


def columns(data: Data, x: Any) -> dict[str, Any]:
    """Every coefficient of every observation, before the logistic function or the exponential."""
    found, at = {}, 0
    for name in EFFECTS:
        size = len(data.names[name])
        found[name] = x[at] + data.members[name] @ x[at + 1 : at + 1 + size]
        at += 1 + size
    return found


def efficiency_of(z: dict[str, Any]) -> Efficiency:
    return Efficiency(**{name: 1 / (1 + np.exp(-z[name])) if name in SHARES else np.exp(z[name]) for name in EFFECTS})


def fit(data: Data) -> dict[str, Any]:
    """The table of coefficients."""
    start, spread = [], []
    for name in EFFECTS:
        value, base, effect = START[name]
        start += [_z(name, value), *([0.0] * len(data.names[name]))]
        spread += [base, *([effect] * len(data.names[name]))]
    x0, held = np.array(start), np.array(spread)
    target = np.log(data.value)

    def off(z: dict[str, Any]) -> Any:
        return (np.log(predict(data, efficiency_of(z))) - target) / SPREAD

    def residuals(x: Any) -> Any:
        return np.concatenate([_soft(off(columns(data, x))) * data.trust, (x - x0) / held])

    def slopes(x: Any) -> Any:
        # A coefficient's effects all move it alike: one difference for each coefficient is enough.
        z = columns(data, x)
        here = off(z)
        soft = (_soft(here + 1e-6) - _soft(here - 1e-6)) / 2e-6 * data.trust
        parts = []
        for name in EFFECTS:
            slope = (off({**z, name: z[name] + 1e-5}) - here) / 1e-5 * soft
            parts += [slope[:, None], data.members[name] * slope[:, None]]
        return np.vstack([np.hstack(parts), np.diag(1 / held)])

    return unpack(_descend(residuals, slopes, x0, held), data.names)


def _descend(residuals: Any, slopes: Any, x: Any, scale: Any) -> Any:
    """Least squares by Levenberg and Marquardt's steps, in units of the priors."""
    damping, here = 1e-2, residuals(x)
    for _ in range(80):
        slope = slopes(x) * scale
        normal, downhill = slope.T @ slope, slope.T @ here
        while True:
            trial = x - scale * np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill)
            there = residuals(trial)
            if np.isfinite(there).all() and there @ there < here @ here:
                break
            damping *= 4
            if damping > 1e8:
                return x
        gain = 1 - (there @ there) / (here @ here)
        x, here, damping = trial, there, max(damping / 4, 1e-6)
        if gain < 1e-5:
            return x
    return x


def _soft(off: Any) -> Any:
    """Like a square near nothing, like a line far off."""
    return np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))


def price(data: Data, table: dict[str, Any]) -> Any:
    """Predictions with a table, of points it may not have seen."""
    from kvctl.speed.efficiency import efficiency

    rows = [efficiency(o.facts, table) for o in data.observed]
    e = Efficiency(**{name: np.array([getattr(row, name) for row in rows]) for name in Efficiency._fields})
    return predict(data, e)


def cross(data: Data, folds: int = 8, *, by: str = "group") -> Any:
    """Predictions of every observation by a fit without its combination."""
    groups = sorted({getattr(o.point, by) for o in data.observed})
    rng = np.random.default_rng(0)
    of = dict(zip(groups, rng.permutation(len(groups)) % folds, strict=True))
    fold = np.array([of[getattr(o.point, by)] for o in data.observed])
    out = np.empty(len(data.observed))
    for number in range(folds):
        table = fit(data.take(np.flatnonzero(fold != number)))
        rows = np.flatnonzero(fold == number)
        out[rows] = price(data.take(rows), table)
    return out


def load(path: str) -> Data:
    text = Path(path).read_text()
    records = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines()]
    observed: list[sp.Observation] = []
    left: dict[str, int] = {}
    for record in records:
        point = sp.read(record)
        found = point if isinstance(point, str) else sp.observations(point)
        if isinstance(found, str):
            left[found] = left.get(found, 0) + 1
        else:
            observed += found
    for why, count in left.items():
        print(f"left out: {count} × {why}", file=sys.stderr)
    return Data(observed)


def summary(data: Data, found: Any, key: Any) -> None:
    off = np.log(found / data.value)
    groups: dict[Any, list[int]] = {}
    for index, o in enumerate(data.observed):
        groups.setdefault(key(o), []).append(index)
    for name, rows in sorted(groups.items(), key=lambda item: str(item[0])):
        part = off[rows]
        print(f"{name!s:60} n {len(rows):4}  median {100 * np.median(np.abs(np.expm1(part))):5.1f}%  bias {100 * np.expm1(np.median(part)):6.1f}%  90% {100 * np.quantile(np.abs(np.expm1(part)), 0.9):6.1f}%")


def main() -> None:
    data = load(sys.argv[1])
    print(len(data.observed), "figures", sum(1 + len(v) for v in data.names.values()), "coefficients")
    table = fit(data)
    found = price(data, table)
    print("seen:")
    summary(data, found, lambda o: "all")
    summary(data, found, lambda o: (o.point.engine, o.point.generation, o.kind))
    for name, row in table.items():
        value = 1 / (1 + math.exp(-row["base"])) if name in SHARES else math.exp(row["base"])
        print(name, f"{value:.4g}", {k: round(v, 2) for k, v in sorted(row["effects"].items(), key=lambda i: -abs(i[1]))[:8]})
    if "--cross" in sys.argv:
        unseen = cross(data)
        print("unseen:")
        summary(data, unseen, lambda o: "all")
        summary(data, unseen, lambda o: (o.point.engine, o.point.generation, o.kind))
        summary(data, unseen, lambda o: o.point.source[:50])


if __name__ == "__main__":
    main()
