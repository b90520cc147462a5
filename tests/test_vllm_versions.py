"""Groups, blocks and capacity by version, against the planner functions of 31 releases of vLLM themselves.

The data holds layers as given to each release's `get_kv_cache_configs` (or what it was called
then), and the blocks, concurrency and logged tokens that came out. Null: it refused.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from conftest import DATA

from kvctl.engines.vllm.groups import Placed, Settings, bytes_per_block, groups_of, promoted
from kvctl.engines.vllm.rules import rules_for
from kvctl.engines.vllm.specs import Spec
from kvctl.errors import ConfigError

Json = dict[str, Any]


@cache
def oracle() -> Json:
    found: Json = json.loads((DATA / "vllm_versions.json").read_text())
    return found


def layer(facts: Json) -> Spec:
    if facts["kind"] == "state":
        return Spec("state", 0, facts["block"], page=max(facts["bytes"], facts["padded"]))
    # bf16: two bytes an element, keys and values of every head; a latent has neither heads nor values
    row = (
        facts["dim"] if facts["kind"] == "latent" else facts["heads"] * (facts["dim"] + facts.get("vdim", facts["dim"]))
    )
    shape = (facts.get("heads", 0), facts["dim"])
    return Spec(
        facts["kind"], 2 * row, facts["block"], facts.get("limit", 0), page=2 * row * facts["block"], shape=shape
    )


def planned(case: Json, version: str) -> tuple[int, float, int]:
    """Blocks, concurrency and the tokens that the log shows."""
    rules, _ = rules_for(version)
    kinds = [layer(facts) for facts in case["kinds"]]
    stage = [index for index, count in enumerate(case["stages"]) for _ in range(count)]
    layers = [Placed(kinds[kind], stage[index]) for index, kind in enumerate(case["layers"])]
    drafted = max((facts.get("spec", 0) for facts in case["kinds"]), default=0)
    batches = case["pp"] + 1 if rules.overlapped else 1
    settings = Settings(
        cpu=False, ranks=1, block=case["block"], batched=case["batched"], in_flight=case["batched"] * batches,
        encoder=0, block_given=False, states=case.get("mode", "none"), chunk=2048, checkpoints=(), delta_step=1,
        drafted=drafted if rules.draft_blocks else 0, context_parallel=case.get("dcp", 1), latent_step=64,
    )  # fmt: skip
    if not rules.hybrid or case.get("nohybrid"):
        layers = promoted(layers, [])
    groups = groups_of(layers, rules, [])
    blocks: int = case["mem"] // max(bytes_per_block(groups, index) for index in range(case["pp"]))
    concurrency = blocks / sum(settings.blocks(group[0].spec, case["len"]) for group in groups)
    if rules.capacity == "blocks":
        return blocks, blocks * case["block"] / case["len"], blocks * case["block"]
    if rules.capacity == "groups":
        smallest = min(group[0].spec.block for group in groups)
        return blocks, concurrency, blocks // len(groups) * smallest * case.get("dcp", 1)
    return blocks, concurrency, int(concurrency * case["len"])


@pytest.mark.parametrize("version", oracle()["versions"])
def test_equals_that_version(version: str) -> None:
    found = oracle()["versions"][version]
    assert len(found) > 10
    for name, expected in found.items():
        case = oracle()["cases"][name]
        if expected is None:
            with pytest.raises(ConfigError):
                planned(case, version)
            continue
        blocks, concurrency, tokens = planned(case, version)
        assert (name, blocks, round(concurrency, 4)) == (name, *expected[:2])
        assert expected[2] in (None, tokens), name
