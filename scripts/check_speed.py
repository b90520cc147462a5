"""How far kvctl's predicted speeds are from measured ones: of the file that they were fitted on, or of any other in its form.

    python scripts/check_speed.py FILE [--each]

FILE has records as tests/data/speed.jsonl has them (a list of JSON, or a line each). Every figure of every record is predicted
with the coefficients that kvctl ships; printed are, by phase, engine and GPU, how many there are, the median error, and the share
that lies in the stated range. --each prints a line of JSON for every figure instead.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import speed_points as sp

from kvctl.speed.efficiency import efficiency, spreads


def judge(o: sp.Observation) -> dict[str, Any]:
    """One figure: measured, predicted, and the range."""
    found = float(sp.predicted(o.kind, o.step, o.prompt, efficiency(o.facts), o.others, o.output, o.requests, o.groups))
    low, high = spreads(o.facts, several=o.several)[sp.FIGURES[o.kind]]
    least, most = found * math.exp(low), found * math.exp(high)
    return {"id": o.point.id, "metric": o.metric, "phase": sp.FIGURES[o.kind], "engine": o.facts["E"], "gpu": o.facts["C"], "measured": o.value,
            "predicted": found, "low": least, "high": most, "error_percent": 100 * abs(found / o.value - 1), "inside": least <= o.value <= most}  # fmt: skip


def main() -> None:
    observed, left = sp.load(sys.argv[1])
    for why, count in sorted(left.items()):
        print(f"left out: {count} × {why}", file=sys.stderr)
    rows = [judge(o) for o in observed]
    if "--each" in sys.argv:
        for row in rows:
            print(json.dumps(row))
        return
    for by in (None, "phase", "engine", "gpu"):
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault("all" if by is None else row[by], []).append(row)
        for name, group in sorted(groups.items()):
            share = 100 * sum(row["inside"] for row in group) / len(group)
            print(
                f"{by or '':8}{name:32}{len(group):6} figures  median error {median(row['error_percent'] for row in group):5.1f}%  inside {share:5.1f}%"
            )


if __name__ == "__main__":
    main()
