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
        self.trust = np.array(
            [o.point.trust / math.sqrt(count[o.point.id]) * group[o.point.group] ** -0.15 for o in observed]
        )
        self.names: dict[str, list[str]] = {
            name: sorted({x for o in observed for x in effects(name, o.facts)}) for name in EFFECTS
        }
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

        def cut(record: Any, rows: Any = rows) -> Any:
            return type(record)(*(getattr(record, n)[rows] for n in record._fields))

        found[rows] = sp.predicted(
            kind,
            cut(data.step),
            cut(data.prompt),
            cut(e),
            data.others[rows],
            data.output[rows],
            data.requests[rows],
            data.groups[rows],
        )
    return found


def _z(name: str, value: float) -> float:
    return math.log(value / (1 - value)) if name in SHARES else math.log(value)


def unpack(x: Any, names: dict[str, list[str]]) -> dict[str, Any]:
    table, at = {}, 0
    for name in EFFECTS:
        size = len(names[name])
        table[name] = {
            "base": float(x[at]),
            "effects": dict(zip(names[name], map(float, x[at + 1 : at + 1 + size]), strict=True)),
        }
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


def folds_of(data: Data, by: str, folds: int = 8) -> Any:
    """The part of the data that each observation is in; what shares `by` is in one."""
    groups = sorted({getattr(o.point, by) for o in data.observed})
    folds = min(folds, len(groups))
    of = dict(zip(groups, np.random.default_rng(0).permutation(len(groups)) % folds, strict=True))
    return np.array([of[getattr(o.point, by)] for o in data.observed])


def cross(data: Data, by: str = "group") -> Any:
    """Predictions of every observation by a fit without what it shares `by` with: a combination of model, GPU and engine, a GPU, an engine."""
    fold = folds_of(data, by)
    out = np.empty(len(data.observed))
    for number in sorted(set(fold)):
        table = fit(data.take(np.flatnonzero(fold != number)))
        rows = np.flatnonzero(fold == number)
        out[rows] = price(data.take(rows), table)
    return out


def inside(data: Data, found: Any, by: str = "group") -> Any:
    """Whether each observation lies in the range that all other parts of the data would have given it."""
    fold = folds_of(data, by)
    off = np.log(data.value / found)
    out = np.empty(len(data.observed), dtype=bool)
    for number in sorted(set(fold)):
        others = np.flatnonzero(fold != number)
        rows = spread(data.take(others), found[others])
        for index in np.flatnonzero(fold == number):
            o = data.observed[index]
            row = rows[sp.FIGURES[o.kind]]
            low, high = row.get(o.facts["G"] or o.facts["E"], row["all"])
            out[index] = low <= off[index] <= high
    return out


def load(path: str) -> Data:
    observed, left = sp.load(path)
    for why, count in left.items():
        print(f"left out: {count} × {why}", file=sys.stderr)
    return Data(observed)


PHASES = {
    "tpot": "decode (time between tokens)",
    "ttft": "time to the first token under load",
    "prefill": "prefill alone",
    "rate": "throughput of whole runs",
}
KEYS = (
    ("all", lambda o: "all figures"),
    ("phase", lambda o: PHASES[sp.FIGURES[o.kind]]),
    ("engine", lambda o: o.facts["E"] + (" before 2025" if o.facts["G"] else "")),
    ("GPU", lambda o: o.facts["C"]),
    (
        "engine and phase",
        lambda o: f"{o.facts['E']}{' before 2025' if o.facts['G'] else ''}, {PHASES[sp.FIGURES[o.kind]]}",
    ),
)


def table_of(data: Data, found: Any, held: Any, by: str, key: Any) -> list[dict[str, Any]]:
    """Rows of errors: how many figures, the median error and that of nine of ten (percent), and the share inside the range (percent)."""
    off = np.abs(found / data.value - 1)
    groups: dict[str, list[int]] = {}
    for index, o in enumerate(data.observed):
        groups.setdefault(key(o), []).append(index)
    return [
        {"by": by, "name": name, "figures": len(rows), "median": round(100 * float(np.median(off[rows])), 1),
         "inside": round(100 * float(np.mean(held[rows])), 1)} for name, rows in sorted(groups.items())
    ]  # fmt: skip


def summary(data: Data, found: Any, key: Any) -> None:
    off = np.log(found / data.value)
    groups: dict[Any, list[int]] = {}
    for index, o in enumerate(data.observed):
        groups.setdefault(key(o), []).append(index)
    for name, rows in sorted(groups.items(), key=lambda item: str(item[0])):
        part = off[rows]
        print(
            f"{name!s:60} n {len(rows):4}  median {100 * np.median(np.abs(np.expm1(part))):5.1f}%  bias {100 * np.expm1(np.median(part)):6.1f}%  90% {100 * np.quantile(np.abs(np.expm1(part)), 0.9):6.1f}%"
        )


SHARE, ENOUGH = 0.97, 30
"""Share of residuals that a range is to hold (above nine of ten, for what is judged is other data), and how many make one of their own."""


def spread(data: Data, found: Any) -> dict[str, Any]:
    """Kind of figure → "all" or an engine and its age → logarithms that hold `SHARE` of what was measured over what was predicted."""
    off = np.log(data.value / found)
    out: dict[str, Any] = {}
    for kind in sorted(set(sp.FIGURES.values())):
        rows: dict[str, list[float]] = {}
        for o, value in zip(data.observed, off, strict=True):
            if sp.FIGURES[o.kind] == kind:
                rows.setdefault("all", []).append(value)
                rows.setdefault(o.facts["G"] or o.facts["E"], []).append(value)
        out[kind] = {name: [round(float(np.quantile(part, q)), 3) for q in ((1 - SHARE) / 2, (1 + SHARE) / 2)]
                     for name, part in sorted(rows.items()) if name == "all" or len(part) >= ENOUGH}  # fmt: skip
    return out


def widest(outer: dict[str, Any], inner: dict[str, Any]) -> dict[str, Any]:
    """Ranges that are nowhere narrower than those of what is better known."""
    return {kind: {name: [min(low, inner[kind].get(name, inner[kind]["all"])[0]), max(high, inner[kind].get(name, inner[kind]["all"])[1])]
                   for name, (low, high) in rows.items()} for kind, rows in outer.items()}  # fmt: skip


def measured(data: Data) -> dict[str, dict[str, list[int]]]:
    """Engine → card → figures, those of several requests at once, and both of engines since 2025."""
    out: dict[str, dict[str, list[int]]] = {}
    for o in data.observed:
        row = out.setdefault(o.facts["E"], {}).setdefault(o.facts["C"], [0, 0, 0, 0])
        for place in (0, 2) if not o.facts["G"] else (0,):
            row[place] += 1
            row[place + 1] += o.several
    return {engine: dict(sorted(row.items())) for engine, row in sorted(out.items())}


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("points")
    parser.add_argument("--write", action="store_true", help="write kvctl/data/speed.json and docs' table of errors")
    options = parser.parse_args()
    data = load(options.points)
    table = fit(data)
    print(len(data.observed), "figures,", sum(1 + len(v) for v in data.names.values()), "coefficients")
    unseen = cross(data)
    held = inside(data, unseen)
    print("of combinations of model, GPU and engine that a fit had not seen:")
    errors = [row for key in KEYS for row in table_of(data, unseen, held, *key)]
    by_card, by_engine = cross(data, "gpu"), cross(data, "engine")
    errors += table_of(data, by_card, inside(data, by_card, "gpu"), "never seen", lambda o: "the GPU")
    errors += table_of(data, by_engine, inside(data, by_engine, "engine"), "never seen", lambda o: "the engine")
    for row in errors:
        print(row)
    near = spread(data, unseen)
    card = widest(spread(data, by_card), near)
    far = {kind: {"all": rows["all"]} for kind, rows in spread(data, by_engine).items()}
    far = {
        kind: {"all": [min(rows["all"][0], card[kind]["all"][0]), max(rows["all"][1], card[kind]["all"][1])]}
        for kind, rows in far.items()
    }
    rounded = {name: {"base": round(row["base"], 4), "effects": {k: round(v, 4) for k, v in sorted(row["effects"].items()) if abs(v) >= 5e-4}}
               for name, row in table.items()}  # fmt: skip
    result = {"about": "written by scripts/fit_speed.py", "figures": len(data.observed), "measured": measured(data),
              "coefficients": rounded, "spread": {"combination": near, "card": card, "engine": far}, "errors": errors}  # fmt: skip
    if options.write:
        path = Path(__file__).resolve().parent.parent / "kvctl" / "data" / "speed.json"
        path.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    else:
        print(json.dumps(result["spread"], indent=1))


if __name__ == "__main__":
    main()
