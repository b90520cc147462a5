"""Any model in any engine with any options: a clean answer whose numbers hold together, or one clean line."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_schema import SIZE

from kvctl.engines import ENGINES, engine
from kvctl.engines.flags import (
    BYTES,
    CHOICE,
    COUNT,
    COUNTS,
    FLAGS,
    GIB,
    LAYERS,
    NUMBER,
    OBJECT,
    ON_OFF,
    SWITCH,
    TEXT,
    TOKENS,
    Flag,
    Given,
    serving,
)  # fmt: skip
from kvctl.engines.flags import given as read
from kvctl.errors import KvctlError
from kvctl.model import build_spec
from kvctl.options import read_cache_format
from kvctl.reports import SizeReport, SizeResult
from kvctl.size import SizePlan, size
from kvctl.sources import catalogue
from kvctl.spec import ModelSpec

VERSIONS = {
    "vllm": ("0.8", "0.11", "0.12", "0.19", "0.20", "0.26", "0.28", "0.33"),
    "sglang": ("0.4.4", "0.4.10", "0.5.4", "0.5.7", "0.5.8", "0.5.9", "0.5.11", "0.5.14", "0.5.17", "0.5.23"),
    "llama.cpp": ("b4753", "b5552", "b6123", "b8095", "b11434"),
    "tensorrt-llm": ("1.0", "1.1", "1.2", "1.3", "1.4"),
}
VALUES = {
    TOKENS: ("1", "16", "512", "8k", "1m"),
    BYTES: ("1", "1MiB", "512MiB", "20GiB", "1000TiB"),
    GIB: ("0.001", "1", "1000"),
    LAYERS: ("0", "7", "99", "all"),
    NUMBER: ("0.01", "0.5", "1", "2"),
    ON_OFF: ("auto", "on", "off"),
    COUNTS: ("1", "512", "4096,1024", "8,8"),
    TEXT: ("EAGLE", "NGRAM", "Qwen3-8B"),
    OBJECT: ('{"method": "mtp", "num_speculative_tokens": 2}', '{"method": "ngram", "num_speculative_tokens": 0}', "{}",
             '{"kv_connector": "OffloadingConnector"}'),
}  # fmt: skip


@cache
def spec_of(name: str) -> ModelSpec:
    return build_spec(catalogue.find(name))


@st.composite
def flags(draw: st.DrawFn, name: str) -> list[Given]:
    """Some of an engine's flags, with values in and a little out of range."""
    takes = [flag for flag in FLAGS if name in flag.engines and flag.field != "draft_path"]
    chosen = draw(st.lists(st.sampled_from(takes), max_size=4)) if takes else []
    return [read(flag, flag.key, draw(values(flag))) for flag in chosen]


def values(flag: Flag) -> st.SearchStrategy[Any]:
    if flag.kind is SWITCH:
        return st.booleans()
    if flag.kind is CHOICE:
        return st.sampled_from(flag.choices)
    if flag.kind is COUNT:
        return st.sampled_from([str(n) for n in (0, 1, 2, 3, 8, 16, 64, 1000, 4096, int(flag.low), int(flag.high))])
    return st.sampled_from(VALUES[flag.kind])


@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_answers_hold_together(data: st.DataObject) -> None:
    error = refusal(data)
    if error is not None:
        assert 0 < len(error.message) < 500
        assert "\n" not in error.message


def refusal(data: st.DataObject) -> KvctlError | None:
    """The clean error, if any; answers are checked here."""
    name = data.draw(st.sampled_from([rules.name for rules in ENGINES]))
    version = data.draw(st.sampled_from((None, *VERSIONS.get(name, ()))))
    spec = spec_of(data.draw(st.sampled_from(catalogue.names())))
    context = data.draw(st.sampled_from([0, 1, 15, 16, 1000, 4096, 131_072, 2**40]))
    try:
        rules = engine(f"{name}@{version}" if version else name)
        started = serving(name, data.draw(flags(name)), strict=True)
        kept = read_cache_format(data.draw(st.sampled_from(["auto", "auto", "fp8", "q8_0"])), "--kv-dtype", rules)
        plan = SizePlan(
            rules, sequences=data.draw(st.sampled_from([1, 3, 2**31])), serving=started, key=kept, value=kept
        )
        result = size(spec, context, plan)
        assert size(spec, context, plan) == result
        SIZE.validate(json.loads(json.dumps(SizeReport((result,), ()).to_dict(), allow_nan=False)))
        check(result, started.num_blocks is None)
        longer, more = size(spec, context + 16, plan), size(spec, context, plan.replace(sequences=plan.sequences + 1))
    except KvctlError as error:
        return error
    if result.allocation and longer.allocation and more.allocation:
        reserved = result.allocation.reserved_bytes
        assert reserved <= min(longer.allocation.reserved_bytes, more.allocation.reserved_bytes)
    return None


def check(result: SizeResult, counted: bool) -> None:
    """Numbers of one answer; `counted`: blocks follow from the budget."""
    made = result.allocation
    if made is None:
        return
    assert made.reserved_bytes == max(row.reserved_bytes for row in made.per_rank)
    # TensorRT-LLM rounds up to whole blocks, and its second manager to pieces of memory; SGLang before 0.5.17
    # leaves scales of sparse fp8 latents out of its price of a token.
    if (
        counted
        and not (result.engine == "sglang" and any(row.kind == "indexer" for row in result.layers))
        and made.num_blocks is not None
        and made.kv_budget_bytes is not None
        and result.engine != "tensorrt-llm"
    ):
        assert made.num_blocks * made.bytes_per_block <= made.kv_budget_bytes


@pytest.mark.parametrize("name", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_add_up_to_what_the_architecture_needs(name: str, ranks: int) -> None:
    """Where every layer keeps every token and KV heads divide, nothing is lost and nothing is kept twice."""
    split = next(flag for flag in FLAGS if flag.field == "tensor_parallel")
    plan = SizePlan(engine(name), serving=serving(name, [read(split, "-tp", str(ranks))], strict=True))
    seen = 0
    for model in catalogue.names():
        spec = spec_of(model)
        if any(len(layer.states) != 1 or layer.states[0].kind != "full_attention" for layer in spec.layers):
            continue
        if any(state.kv_heads % ranks for layer in spec.layers for state in layer.states):  # type: ignore[attr-defined]
            continue
        try:
            result = size(spec, 4096, plan)
        except KvctlError:
            continue
        made = result.allocation
        assert made is not None
        # SGLang has a page more in every pool; 4,096 tokens are whole blocks everywhere.
        tokens = 4096 + (made.block_size if name == "sglang" else 0)
        assert sum(row.reserved_bytes for row in made.per_rank) * 4096 == result.kv_bytes * tokens, model
        seen += 1
    assert seen > 50
