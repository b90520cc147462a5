"""Memory for the cache, from the model, the card and the options alone, against start-up logs that others published."""

from __future__ import annotations

import json
from functools import cache
from statistics import median
from typing import Any

import pytest
from conftest import DATA

from kvctl.allocation import Serving
from kvctl.engines import engine
from kvctl.errors import KvctlError
from kvctl.hardware import Device
from kvctl.model import build_spec
from kvctl.ranks import Hardware
from kvctl.size import SizePlan, prepare
from kvctl.sources import resolve

GIB = 2**30


def predicted(row: dict[str, Any]) -> tuple[float, float] | None:
    """Weights and memory for the cache on the poorest rank, in GiB; None for a model that is not in the catalogue."""
    options = {"tensor_parallel": "tp", "utilization": "utilization", "max_batched": "batched", "max_sequences": "sequences",
               "enforce_eager": "eager"}  # fmt: skip
    serving = Serving(**{name: row[key] for name, key in options.items() if row.get(key) is not None})
    if row.get("pp", 1) > 1:
        serving = serving.replace(pipeline_parallel=row["pp"])
    total = round(row["device_gib"] * GIB)
    device = Device(row.get("gpu") or "a card", total, cuda_total_bytes=total)
    count = row.get("tp", 1) * row.get("pp", 1)
    context = row.get("context") or 4096
    try:
        spec = build_spec(resolve(row["model"], source="catalogue"))
        plan = SizePlan(engine=engine(f"vllm@{row['version']}"), contexts=(context,), serving=serving,
                        hardware=Hardware((device,) * count, started=True))  # fmt: skip
        room = prepare(spec, plan).room
        assert room is not None
        ranks = room.ranks(context, 1)
    except KvctlError:
        return None
    return max(rank.weights for rank in ranks) / GIB, min(rank.budget for rank in ranks) / GIB


@cache
def errors() -> dict[bool, list[float]]:
    """Predicted less printed, for starts before 0.20 and from it on, where the same weights were loaded (within 2%)."""
    out: dict[bool, list[float]] = {False: [], True: []}
    for line in (DATA / "vllm_memory.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        if not row.get("available_gib") or not row.get("device_gib") or not row.get("weights_gib"):
            continue
        found = predicted(row)
        if found is not None and abs(found[0] - row["weights_gib"]) < 0.02 * row["weights_gib"]:
            minor = int(row["version"].split(".")[1])
            out[minor >= 20].append(found[1] - row["available_gib"])
    return out


@pytest.mark.parametrize(
    ("newer", "starts", "middle", "most"),
    # Median and 90th percentile in GiB as measured, rounded up: 44 starts of 0.8 to 0.19, 8 later ones.
    [(False, 44, 0.05, 0.4), (True, 8, 0.3, 3.1)],
)
def test_the_cache_gets_what_the_log_says(newer: bool, starts: int, middle: float, most: float) -> None:
    sizes = sorted(abs(error) for error in errors()[newer])
    assert len(sizes) >= starts
    assert median(sizes) <= middle
    assert sizes[int(len(sizes) * 0.9)] <= most
