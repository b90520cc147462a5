"""A width that a configuration lacks, from the published number of parameters."""

from __future__ import annotations

import json

import pytest

from kvctl.model import build_spec
from kvctl.parameters.infer import completed
from kvctl.sources import catalogue, resolve

# Widths as the models' own files have them.
PUBLISHED = {
    "Qwen/Qwen2.5-72B-Instruct": 29_568,
    "Qwen/Qwen2.5-32B-Instruct": 27_648,
    "Qwen/Qwen2.5-14B-Instruct": 13_824,
    "Qwen/Qwen2.5-Coder-7B-Instruct": 18_944,
    "NousResearch/Meta-Llama-3-70B": 28_672,
    "mistralai/Mixtral-8x22B-Instruct-v0.1": 16_384,
    "NousResearch/Hermes-4-405B": 53_248,
    "01-ai/Yi-1.5-34B": 20_480,
    "zai-org/GLM-4-9B-0414": 13_696,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_widths_of_published_models_come_out(name: str) -> None:
    spec = build_spec(resolve(name, source="catalogue"))
    assert "intermediate_size" not in spec.config
    assert spec.weights is not None
    assert spec.weights.parameters is not None
    found = completed(spec.config, spec.weights.parameters)
    assert found is not None
    assert found[0]["intermediate_size"] == PUBLISHED[name]


def rows() -> list[str]:
    names = []
    for line in catalogue._lines().values():
        row = json.loads(line)
        if row.get("verbatim") and row.get("parameters") and "intermediate_size" in row.get("config", {}):
            names.append(row["id"])
    return names


def test_a_width_that_is_taken_away_comes_back_or_nothing_does() -> None:
    equal = 0
    for name in rows():
        spec = build_spec(resolve(name, source="catalogue"))
        assert spec.weights is not None
        assert spec.weights.parameters is not None
        config = {key: value for key, value in spec.config.items() if key != "intermediate_size"}
        found = completed(config, spec.weights.parameters)
        if found is not None and "intermediate_size" in found[1] and "moe" not in found[1]:
            assert found[0]["intermediate_size"] == spec.config["intermediate_size"], name
            equal += 1
    assert equal >= 40


def test_a_number_that_no_width_makes_is_no_answer() -> None:
    spec = build_spec(resolve("Qwen/Qwen2.5-72B-Instruct", source="catalogue"))
    assert completed(spec.config, 72_706_203_649) is None
    assert completed(spec.config, 1) is None
    assert completed({"model_type": "llama"}, 10**9) is None
