"""`--engine transformers` against caches measured in transformers, to the byte, by layer.

The numbers come from running every architecture as a small random model and walking
every tensor of its cache (scripts/compact_oracles.py says how they are kept).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from conftest import measured_cases

from kvctl.engines import TRANSFORMERS
from kvctl.errors import ConfigError
from kvctl.formats import model_dtype
from kvctl.model import build_spec
from kvctl.size import SizePlan, size
from kvctl.sources import Found
from kvctl.spec import Provenance

FILES = ("transformers.jsonl", "transformers_more.jsonl.gz")
# Hashing decides what these keep; they are refused by name.
REFUSED = {"reformer"}


@cache
def cases() -> dict[str, dict[str, Any]]:
    return {f"{file.partition('.')[0]}:{case['name']}": case for file in FILES for case in measured_cases(file)}


def spec_of(case: dict[str, Any]) -> Any:
    return build_spec(Found(case["name"], case["config"], Provenance("local", case["name"])))


@pytest.mark.parametrize("name", sorted(cases()))
def test_bytes_equal_the_measured_cache(name: str) -> None:
    case = cases()[name]
    if case["config"].get("model_type") in REFUSED:
        with pytest.raises(ConfigError, match="cannot be sized"):
            spec_of(case)
        return
    spec = spec_of(case)
    for dtype, batch, tokens, encoder, total, layers in case["runs"]:
        plan = SizePlan(
            TRANSFORMERS, sequences=batch, dtype=model_dtype(dtype), encoder_tokens=encoder or None, per_layer=True
        )
        result = size(spec, tokens, plan)
        assert result.kv_bytes == total, f"{name}: {dtype}, batch {batch}, {tokens} tokens"
        if layers is None or result.per_layer is None or case["config"]["model_type"] == "blt":
            continue  # BLT numbers the layers of its two stacks from 0 each
        measured = [value for value, repeats in layers for _ in range(repeats)]
        predicted = [layer.bytes for layer in result.per_layer]
        # A cache may have more slots than the decoder has layers (prophetnet), or none at all; those are empty.
        length = max(len(predicted), len(measured))
        padded = [[*row, *([0] * (length - len(row)))] for row in (predicted, measured)]
        assert padded[0] == padded[1], f"{name}: {dtype}, batch {batch}, {tokens} tokens"


def test_counts_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    runs = sum(len(case["runs"]) for case in cases().values())
    types = {case["config"].get("model_type") for case in cases().values()}
    with capsys.disabled():
        print(f"\ntransformers oracles: {len(cases())} cases, {len(types)} model types, {runs} distinct runs")
    assert len(measured_cases("transformers.jsonl")) == 256
