"""Models that vLLM stores in ways of their own, and those that it does not serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
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


@pytest.mark.parametrize(("block", "blocks", "tokens"), [("128", 3_276, 151_621), ("16", 13_107, 157_207)])
def test_an_input_that_is_not_cut_makes_batches_longer(kvctl: Run, block: str, blocks: int, tokens: int) -> None:
    # The planner of vLLM 0.32 on a CPU, of the whole model: 2,496 tokens in a batch, where 2,048 are usual.
    options = ("--device", "cpu", "--ctx", "8192", "--kv-budget", "16GiB", "--block-size", block)
    got = plan(kvctl, "google/gemma-4-26B-A4B", *options, engine="vllm@0.32")
    assert (got["num_blocks"], got["reported_capacity"]) == (blocks, tokens)


@pytest.mark.parametrize(
    ("model", "engine", "words"),
    [
        ("google-t5/t5-base", "vllm", "no encoder-decoder of text since 0.11"),
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", "vllm", "0.10 was the last"),
        ("MiniMaxAI/MiniMax-Text-01", "vllm", "0.23 was the last"),
        ("MiniMaxAI/MiniMax-Text-01", "vllm@0.23", "does not know how vLLM stores"),
        ("google/recurrentgemma-2b", "vllm", "vLLM does not serve recurrent_gemma"),
        ("sgl-project/DeepSeek-V4-Flash-FP8", "vllm", "vLLM does not serve deepseek_ref"),
        ("RWKV/rwkv-5-world-3b", "vllm@0.12", "vLLM does not serve rwkv5"),
        ("thinkingmachines/Inkling", "vllm@0.24", "does not serve inkling_mm_model"),
        ("MiniMaxAI/MiniMax-M3", "vllm@0.22", "does not serve minimax_m3"),
    ],
)
def test_what_vllm_does_not_serve(kvctl: Run, model: str, engine: str, words: str) -> None:
    outcome = kvctl("size", model, "--engine", engine, "--ctx", "8k")
    assert outcome.code == 1
    assert words in outcome.err


MTP = '{"method": "mtp"}'


def test_modules_repeat_full_attention(kvctl: Run) -> None:
    # vllm hy_v3_mtp.py: one decoder layer a module. 80 layers · 8 KV heads · 256 · 2 B, and one more; 16 tokens a block.
    got = plan(kvctl, "tencent/Hy3", "--ctx", "64k", "--set", "num_nextn_predict_layers=1", "-sc", MTP)
    assert got["bytes_per_block"] == 16 * 81 * 8 * 256 * 2
    # vllm models/minimax_m3: the module attends sparsely, so it has an index key a token too.
    got = plan(kvctl, "MiniMaxAI/MiniMax-M3", "-tp", "4", "--ctx", "64k", "-sc", MTP)
    assert got["bytes_per_block"] == 128 * (61 * 2 * 128 * 2 + 58 * 128 * 2)


def test_modules_with_a_window(kvctl: Run) -> None:
    # vllm mimo_v2_mtp.py: only the first module, with attention like that of windowed layers. 39 windows become 40.
    plain, drafting = (plan(kvctl, "MiMo-V2-Flash", "--ctx", "64k", *options) for options in ((), ("-sc", MTP)))
    assert sum(row["layers"] for row in drafting["groups"]) == sum(row["layers"] for row in plain["groups"]) + 1 == 49
    assert [row["kind"] for row in drafting["groups"]].count("full_attention") == 1


def test_chained_modules_keep_more_of_windows(kvctl: Run) -> None:
    # Three modules after 33 windows and 12 full layers: three groups of 12 windows. From 0.28 on a chain of three
    # draft tokens keeps 2 tokens more of a window of 512: ⌈(511 + 2 + 2 · 8,192)/16⌉ + 1 = 1,058, not 1,057.
    kinds = '["sliding_attention", "sliding_attention", "sliding_attention"]'
    options = (
        "--ctx",
        "64k",
        "--set",
        f"mtp_layer_types={kinds}",
        "-sc",
        '{"method": "mtp", "num_speculative_tokens": 3}',
    )
    for engine, blocks in (("vllm@0.27", 1_057), ("vllm@0.28", 1_058)):
        got = plan(kvctl, "Step-3.7-Flash", *options, engine=engine)
        assert [row["layers"] for row in got["groups"]] == [12] * 4
        assert got["blocks_per_request"] == 4_096 + 3 * blocks


def test_modules_of_unknown_attention(kvctl: Run) -> None:
    outcome = kvctl("size", "Step-3.7-Flash", "--engine", "vllm", "--ctx", "8k", "-sc", MTP)
    assert (outcome.code, "does not say which attention" in outcome.err) == (1, True)


def test_an_assistant_reads_the_cache_of_its_model(kvctl: Run, tmp_path: Path) -> None:
    # vllm gemma4_mtp.py: all layers of the assistant share the target's keys and values.
    text = {"model_type": "gemma4_text", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 64, "sliding_window": 512}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4_assistant", "text_config": text}))
    drafts = json.dumps({"model": str(tmp_path), "num_speculative_tokens": 3})
    plain, drafting = (
        plan(kvctl, "google/gemma-4-31B-it", "--ctx", "8k", *options) for options in ((), ("-sc", drafts))
    )
    assert drafting["groups"] == plain["groups"]


def test_kimi_k3_reserves_a_checkpoint_block(kvctl: Run) -> None:
    # vllm 0.29.0 models/kimi_k3/nvidia/kda.py: a block for a checkpoint where FlashKDA runs; Kimi Linear's code has none.
    # 24 latent layers and 69 delta layers in three groups of 23: with prefix caching two blocks each.
    for model, engine, each in (
        ("Kimi-K3", "vllm@0.28", 2),
        ("Kimi-K3", "vllm@0.29", 3),
        ("Kimi-Linear-48B-A3B-Instruct", "vllm", 2),
    ):
        got = plan(kvctl, model, "-tp", "8", "--ctx", "256k", engine=engine)
        states = [row["blocks_per_request"] for row in got["groups"] if row["kind"] == "recurrent_state"]
        assert states == [each] * 3


# The planner functions of vLLM 0.31 and 0.33 (0.30 and 0.32 say the same) with the layers of GLM-5.3: every 4th a
# latent of 512 in bf16 with an index key for each pool, the others delta layers of 64 heads of 128; 40 GiB a rank.
GLM = [
    ("0.31", 45, 4, 131_072, 4, 1_152, 3_206, 3_416_397, [8, 8, 9, 9, 11, 22]),
    ("0.33", 45, 4, 131_072, 4, 1_152, 3_201, 3_303_633, [8, 8, 9, 9, 11, 22]),
    ("0.31", 45, 2, 1_000_000, 4, 2_176, 1_697, 3_618_336, [8, 8, 9, 9, 11, 22]),
    ("0.33", 45, 2, 1_000_000, 4, 2_176, 1_696, 3_585_623, [8, 8, 9, 9, 11, 22]),
    ("0.31", 45, 8, 8_192, 4, 640, 5_771, 2_148_910, [8, 8, 9, 9, 11, 22]),
    ("0.33", 45, 8, 8_192, 4, 640, 5_751, 1_812_007, [8, 8, 9, 9, 11, 22]),
    ("0.31", 45, 4, 131_072, 2, 1_152, 3_109, 3_313_031, [8, 8, 9, 9, 11, 22]),
    ("0.33", 45, 4, 131_072, 2, 1_152, 3_107, 3_206_619, [8, 8, 9, 9, 11, 22]),
    ("0.31", 31, 4, 65_536, 4, 1_152, 5_038, 5_002_581, [6, 6, 6, 6, 7, 14]),
    ("0.33", 31, 4, 65_536, 4, 1_152, 5_023, 4_702_676, [6, 6, 6, 6, 7, 14]),
    ("0.31", 90, 4, 65_536, 4, 1_152, 1_603, 1_591_730, [17, 17, 17, 17, 22, 44]),
    ("0.33", 90, 4, 65_536, 4, 1_152, 1_602, 1_499_838, [17, 17, 17, 17, 22, 44]),
    ("0.31", 45, 1, 131_072, 4, 4_352, 848, 2_778_726, [8, 8, 9, 9, 11, 22]),
    ("0.33", 45, 1, 131_072, 4, 4_352, 848, 2_526_114, [8, 8, 9, 9, 11, 22]),
]  # fmt: skip


@pytest.mark.parametrize(("version", "layers", "ranks", "length", "pool", "block", "blocks", "tokens", "groups"), GLM)
def test_glm_5_3_equals_the_planner(
    kvctl: Run, version: str, layers: int, ranks: int, length: int, pool: int, block: int, blocks: int, tokens: int,
    groups: list[int],
) -> None:  # fmt: skip
    what_if = ("--set", f"num_hidden_layers={layers}", "--set", f"index_kpool={pool}")
    options = ("-tp", str(ranks), "--ctx", str(length), "--kv-budget", "40GiB")
    got = plan(kvctl, "GLM-5.3-Flash", *options, *what_if, engine=f"vllm@{version}")
    assert (got["block_size"], got["num_blocks"], got["reported_capacity"]) == (block, blocks, tokens)
    assert sorted(row["layers"] for row in got["groups"]) == groups


def test_glm_5_3_as_published(kvctl: Run) -> None:
    # LMCache/LMCache#5042: blocks of 1,152 tokens on four ranks; vllm-project/vllm#53906: of 2,304 on two, with three
    # draft tokens, which lengthen the convolutions. Groups as ModelEngine-Group/unified-cache-management#1371 has them.
    what_if = ("--set", "index_kpool=4", "--ctx", "128k")
    four = plan(kvctl, "GLM-5.3-Flash", "-tp", "4", *what_if, engine="vllm@0.31")
    assert [row["layers"] for row in four["groups"]] == [22, 11, 9, 9, 8, 8]
    # A latent's row has 1,024 bytes, and a key of 132 stands for 4 tokens.
    assert (four["block_size"], four["bytes_per_block"]) == (1_152, 11 * 1_152 * (1_024 + 33))
    drafts = '{"method": "ngram", "num_speculative_tokens": 3}'
    assert plan(kvctl, "GLM-5.3-Flash", "-tp", "2", *what_if, "-sc", drafts)["block_size"] == 2_304


def test_glm_5_3_with_its_prediction_module_in_0_33(kvctl: Run) -> None:
    # The planner of 0.33 with a twelfth latent layer and three draft tokens: a checkpoint in each group of delta layers,
    # and blocks a multiple of lcm(1,024, 4,224) bytes, which 12 · 1,152 · (1,024 + 33) = 14,611,968 are not.
    drafts = '{"method": "mtp", "num_speculative_tokens": 3}'
    got = plan(kvctl, "GLM-5.3-Flash", "-tp", "4", "--ctx", "32768", "-sc", drafts, "--kv-budget", "40GiB")
    assert sorted(row["layers"] for row in got["groups"]) == [11, 11, 12, 12, 24]
    assert (got["bytes_per_block"], got["blocks_per_request"]) == (14_631_936, 29 + 1 + 3 * 6)
    assert (got["num_blocks"], got["reported_capacity"]) == (2935, 2003626)
