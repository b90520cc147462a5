"""Models that vLLM stores in ways of their own, and those that it does not serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import Outcome

Run = Callable[..., Outcome]
Json = dict[str, Any]


def plan(run: Run, model: str, *options: str, engine: str = "vllm") -> Json:
    outcome = run("size", model, "--json", "--engine", engine, *options)
    assert outcome.code == 0, outcome.err
    allocation: Json = outcome.json["results"][0]["allocation"]
    return allocation


@pytest.mark.parametrize(
    ("length", "batched", "gain"),
    [(8_192, 16_384, 5.9), (131_072, 16_384, 8.6), (131_072, 2_048, 28.1), (1_048_576, 16_384, 27.9), (1_048_576, 2_048, 73.1)],
)  # fmt: skip
def test_inkling_gains_by_fp8_as_published(kvctl: Run, length: int, batched: int, gain: float) -> None:
    # vllm-project/vllm#54704, Inkling-Small on four ranks: what fp8 adds to the pool at the same budget, in percent.
    options = ("-tp", "4", "--ctx", str(length), "--max-num-batched-tokens", str(batched), "--kv-budget", "100GiB")
    usual, fp8 = (
        plan(kvctl, "Inkling-Small", *options, "--kv-dtype", name, engine="vllm@0.29") for name in ("auto", "fp8")
    )
    assert round(100 * (fp8["reported_capacity"] / usual["reported_capacity"] - 1), 1) == gain
    assert len(usual["groups"]) == 12


def test_inkling_blocks_of_a_request_as_published(kvctl: Run) -> None:
    # vllm-project/vllm#54703: 8,194 blocks for each of six groups of convolutions, 84 % of a request's blocks.
    got = plan(kvctl, "Inkling-Small", "-tp", "4", "--ctx", "131072", "--max-num-batched-tokens", "16384")
    convolutions = [row["blocks_per_request"] for row in got["groups"] if row["block_size"] == 4]
    assert convolutions == [8_194] * 6
    assert round(100 * sum(convolutions) / got["blocks_per_request"]) == 84
    # 2 KV heads a rank · (2 · 128 + 2 · 4,096/8 = 1,280, so 2,048) · 2 B · 4 tokens, seven layers a group
    assert got["bytes_per_block"] == 7 * 4 * 2 * 2_048 * 2


def test_inkling_is_not_split_over_more_ranks_than_heads(kvctl: Run) -> None:
    outcome = kvctl("size", "Inkling-Small", "--engine", "vllm", "-tp", "16", "--ctx", "8k")
    assert (outcome.code, "does not divide 8 KV heads" in outcome.err) == (2, True)


def test_minimax_m3_keeps_index_keys_in_bf16(kvctl: Run) -> None:
    # 8 ranks and 4 KV heads: one head of 128 a rank; 57 of 60 layers have a key of 128 a token beside; blocks of 128.
    for name, size in (("auto", 2), ("fp8", 1)):
        got = plan(kvctl, "MiniMaxAI/MiniMax-M3", "-tp", "8", "--ctx", "128k", "--kv-dtype", name)
        assert got["block_size"] == 128
        assert got["bytes_per_block"] == 128 * (60 * 2 * 128 * size + 57 * 128 * 2)
        assert got["blocks_per_request"] == 1_024


@pytest.mark.parametrize(
    ("model", "engine", "words"),
    [
        ("google-t5/t5-base", "vllm", "no encoder-decoder of text since 0.11"),
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", "vllm", "0.10 was the last"),
        ("MiniMaxAI/MiniMax-Text-01", "vllm", "0.23 was the last"),
        ("MiniMaxAI/MiniMax-Text-01", "vllm@0.23", "does not know how vLLM stores"),
        ("google/recurrentgemma-2b", "vllm", "vLLM does not serve recurrent_gemma"),
        ("RWKV/rwkv-5-world-3b", "vllm@0.12", "vLLM does not serve rwkv5"),
        ("thinkingmachines/Inkling", "vllm@0.24", "does not serve inkling_mm_model"),
        ("MiniMaxAI/MiniMax-M3", "vllm@0.22", "does not serve minimax_m3"),
    ],
)
def test_what_vllm_does_not_serve(kvctl: Run, model: str, engine: str, words: str) -> None:
    outcome = kvctl("size", model, "--engine", engine, "--ctx", "8k")
    assert outcome.code == 1
    assert words in outcome.err
