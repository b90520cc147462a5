"""DeepSeek V4 in vLLM: the planners of thirteen releases themselves, and a published error."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from conftest import DATA, Outcome

from kvctl.allocation import Allocation, Serving
from kvctl.engines import engine
from kvctl.model import build_spec
from kvctl.size import SizePlan, size
from kvctl.sources import catalogue

Run = Callable[..., Outcome]
Json = dict[str, Any]
VERSIONS = ("0.20", "0.22", "0.23", "0.24", "0.25", "0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33")
FLASH = "DeepSeek-V4-Flash"


@cache
def oracle() -> Json:
    found: Json = json.loads((DATA / "vllm_deepseek_v4.json").read_text())
    return found


def planned(case: Json, version: str, budget: int) -> Allocation:
    stages = case.get("stages")
    ratios = oracle()["ratios"][case["model"]]
    found = catalogue.find("deepseek-ai/DeepSeek-V4-Flash")
    spec = build_spec(
        found.replace(config={**found.config, "compress_ratios": ratios, "num_hidden_layers": len(ratios)})
    )
    serving = Serving(
        kv_budget=budget, max_batched=case["batched"], async_scheduling=case["overlapped"],
        pipeline_parallel=len(stages) if stages else None, stage_layers=tuple(stages) if stages else None,
    )  # fmt: skip
    allocation = size(spec, case["context"], SizePlan(engine=engine(f"vllm@{version}.0"), serving=serving)).allocation
    assert allocation is not None
    return allocation


@pytest.mark.parametrize("version", VERSIONS)
def test_equals_the_planner_of_the_release(version: str) -> None:
    cases = [case for case in oracle()["cases"] if case["version"] == version]
    assert len(cases) >= 14
    for case in cases:
        got = planned(case, version, case["mem"])
        assert got.num_blocks == case["num_blocks"], case
        # The planner's groups are those of the first stage.
        assert "stages" in case or sorted(row.layers for row in got.groups) == case["groups"]
        if "tokens" in case:
            assert got.reported_capacity == case["tokens"]
        else:
            assert list(got.log) == case["log"]


@pytest.mark.parametrize("version", VERSIONS)
def test_starts_with_exactly_what_the_check_at_the_start_wants(version: str) -> None:
    for case in [case for case in oracle()["cases"] if case["version"] == version and "needed" in case]:
        # From 0.29 on one block is set aside before the check.
        spare = planned(case, version, case["mem"]).bytes_per_block if version >= "0.29" else 0
        for missing in (0, 1):
            got = planned(case, version, case["needed"] + spare - missing)
            assert any("would not start" in line for line in got.warnings) == bool(missing), case


def test_a_published_error(kvctl: Run) -> None:
    # vllm-project/vllm#44376 (0.22, two GPUs, the Python class: 16,384 tokens in a batch): 30,000 tokens need
    # 6.66 GiB, and 5.44 GiB would do for 13,528.
    options = ("size", FLASH, "--json", "--engine", "vllm@0.22", "-tp", "2", "--max-num-batched-tokens", "16384")
    need = kvctl(*options, "--ctx", "30000").json["results"][0]["allocation"]
    assert f"{need['reserved_bytes'] / 2**30:.2f}" == "6.66"
    most = kvctl(*options, "--ctx", "13528").json["results"][0]["allocation"]
    assert f"{most['reserved_bytes'] / 2**30:.2f}" == "5.44"
    # Blocks of its groups as vllm-project/vllm#51163 names them: 256, 64, 8 and 4 tokens.
    assert {row["block_size"] for row in need["groups"]} == {256, 64, 8, 4}


def test_pages_by_hand(kvctl: Run) -> None:
    # 256 tokens: 64 entries · 584 B and 2 · 584 B (of 4 and of 128 tokens), keys 64 · 132 B, each up to a multiple of
    # 576; 64 tokens of the window at 584 B; states of 4 and 8 tokens in float32: 2 · 2 · 512 and 2 · 512 elements.
    def page(size: int) -> int:
        return -(-size // 576) * 576

    entries, heavy, keys = page(64 * 584), page(2 * 584), page(64 * 132)
    got = kvctl("size", FLASH, "--json", "--engine", "vllm", "--ctx", "64k").json["results"][0]["allocation"]
    # 21 layers of 4 tokens an entry, 20 of 128, and windows in all 43
    assert got["bytes_per_block"] == 21 * (entries + keys) + 20 * heavy == 1_002_240
    sizes = {(row["block_size"], row["layers"]): row["page_bytes"] for row in got["groups"]}
    assert sizes[64, 22] == 22 * page(64 * 584)
    assert sizes[4, 42] == 21 * (page(4 * 2048 * 4) + page(4 * 512 * 4))
    assert sizes[8, 20] == 20 * page(8 * 1024 * 4)
    # In flight: two batches of 8,192 tokens.
    blocks = [256, 2 * (-(-(127 + 16_384) // 64) + 1), -(-(7 + 16_384) // 4) + 1, -(-(127 + 16_384) // 8) + 1]
    assert got["blocks_per_request"] == sum(blocks)


def test_prediction_modules_hold_a_window_more(kvctl: Run) -> None:
    # What the planner of 0.33 makes of the model with a 44th layer that has a window alone.
    case = next(c for c in oracle()["cases"] if c["version"] == "0.33" and "module" in c["model"] and c["overlapped"])
    drafts = '{"method": "mtp", "num_speculative_tokens": 1}'
    options = ("--ctx", str(case["context"]), "--kv-budget", str(case["mem"]))
    options += ("--max-num-batched-tokens", str(case["batched"]), "-sc", drafts)
    got = kvctl("size", FLASH, "--json", "--engine", "vllm", *options).json["results"][0]["allocation"]
    assert sorted(row["layers"] for row in got["groups"]) == case["groups"] == [20, 22, 22, 42, 62]
    assert (got["num_blocks"], got["reported_capacity"]) == (case["num_blocks"], case["tokens"])


def test_drafting_layers_in_the_checkpoint_hold_windows(kvctl: Run) -> None:
    # 43 layers and three that draft (vllm models/deepseek_v4/nvidia/dspark.py): 46 windows in two groups of 23.
    drafts = '{"method": "dspark", "num_speculative_tokens": 7}'
    got = kvctl("size", "DeepSeek-V4-Flash-0731", "--json", "--engine", "vllm", "-sc", drafts, "--ctx", "64k")
    assert sorted(row["layers"] for row in got.json["results"][0]["allocation"]["groups"]) == [20, 23, 23, 42, 62]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--engine", "vllm@0.19"), "does not serve DeepSeek V4"),
        (("--kv-dtype", "nvfp4"), "does not keep the rows of DeepSeek V4 in nvfp4"),
        (("--block-size", "128"), "take blocks of 256 tokens"),
        (("-tp", "2", "-dcp", "2"), "deals out no tokens"),
        (("--device", "cpu"), "on a CPU"),
        (("--disable-hybrid-kv-cache-manager",), "without the hybrid KV cache manager"),
    ],
)
def test_what_vllm_would_not_start_is_refused(kvctl: Run, options: tuple[str, ...], words: str) -> None:
    engine = () if "--engine" in options else ("--engine", "vllm")
    outcome = kvctl("size", FLASH, "--ctx", "64k", *engine, *options)
    assert outcome.code in (1, 2)
    assert words in outcome.err
