"""What users of other calculators reported, with the right value by hand.

Groups: the architecture, quantised caches, what an engine reserves, and tensor parallelism.
Each test names the public thread, says the symptom in a sentence, and holds the arithmetic.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome

from kvctl.allocation import Serving
from kvctl.engines import engine
from kvctl.model import build_spec
from kvctl.size import SizePlan
from kvctl.size import size as size_of
from kvctl.sources import resolve

GIB = 2**30
K128 = 131_072

Run = Callable[..., Outcome]


def model(run: Run, name: str, ctx: int, *options: str) -> dict[str, Any]:
    """A model of the bundled catalogue, whatever else this machine has cached."""
    outcome = run("size", name, "--source", "catalogue", "--ctx", str(ctx), "--json", *options)
    assert outcome.code == 0, outcome.err
    result: dict[str, Any] = outcome.json["results"][0]
    assert result["context"] == ctx
    return result


def config(run: Run, fields: dict[str, Any], ctx: int, *options: str) -> dict[str, Any]:
    """A configuration as a user would pipe it in."""
    outcome = run("size", "-", "--ctx", str(ctx), "--json", *options, stdin=json.dumps(fields))
    assert outcome.code == 0, outcome.err
    result: dict[str, Any] = outcome.json["results"][0]
    return result


def refusal(run: Run, fields: dict[str, Any]) -> str:
    """The error line of a configuration that must not be answered."""
    outcome = run("size", "-", "--ctx", "4k", "--json", stdin=json.dumps(fields))
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("kvctl: error: ")
    assert "Traceback" not in outcome.err
    return outcome.err


def kinds(result: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """Kind of state → (layers, tokens held, bytes); no kind may have two rows."""
    rows = {row["kind"]: (row["count"], row["tokens"], row["bytes"]) for row in result["layers"]}
    assert len(rows) == len(result["layers"])
    return rows


# -- hybrids: only some layers keep keys and values ------------------------------------------


def test_full_attention_interval_counts_every_fourth_layer(kvctl: Run) -> None:
    """gpustack/gguf-parser-go#28: all 40 blocks of Qwen3.6-35B-A3B were charged; 10 have a KV cache."""
    result = model(kvctl, "Qwen3.6-35B-A3B", 262_144)
    # 10 layers · 2 KV heads · 256 · (K and V) · 2 B = 20,480 B a token; × 262,144 = 5 GiB, not 20
    assert kinds(result)["full_attention"] == (10, 262_144, 5 * GIB)
    assert result["kv_bytes_per_token"] == 20_480
    # 30 layers of state, whatever the length: 32 heads · 128 · 128 in float32 = 2,097,152 B,
    # and (2 · 16 · 128 + 32 · 128) channels · (kernel 4 − 1) · 2 B = 49,152 B
    assert kinds(result)["recurrent_state"] == (30, 0, 30 * 2_097_152)
    assert kinds(result)["conv_state"] == (30, 0, 30 * 49_152)
    assert result["kv_bytes_fixed"] == 30 * (2_097_152 + 49_152)


def test_an_interval_of_four_in_a_bare_config(kvctl: Run) -> None:
    """LMCache/LMCache#3080: taking num_hidden_layers for a Qwen3.5 file gives about four times too much."""
    fields = {
        "model_type": "qwen3_5_text", "num_hidden_layers": 40, "full_attention_interval": 4, "hidden_size": 2048,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "dtype": "bfloat16",
    }  # fmt: skip
    result = config(kvctl, fields, 1000)
    # 10 · 2 · 256 · 2 · 2 B · 1,000; all 40 layers would be 4 × that
    assert kinds(result)["full_attention"] == (10, 1000, 20_480_000)
    assert result["naive_kv_bytes"] == 4 * 20_480_000


def test_qwen3_5_27b_keeps_a_quarter(kvctl: Run) -> None:
    """unslothai/unsloth#4757: Qwen3.5-27B was put at 53.25 GiB; 16.00 is right."""
    # 16 of 64 layers · 4 KV heads · 256 · 2 · 2 B · 262,144
    assert kinds(model(kvctl, "Qwen3.5-27B", 262_144))["full_attention"] == (16, 262_144, 16 * GIB)


# -- latent attention ------------------------------------------------------------------------


def test_deepseek_latent_is_70272_bytes_a_token(kvctl: Run) -> None:
    """gpustack/gguf-parser-go#8: DeepSeek-V3 at 65,536 tokens, 321 GB for what the latent keeps in 4.3 GiB."""
    result = model(kvctl, "DeepSeek-V3", 65_536)
    # 61 · (512 + 64) · 2 B = 70,272; no factor 2 for V, no heads. The row says which layout it is.
    assert result["kv_bytes_per_token"] == 70_272
    assert kinds(result) == {"latent_attention": (61, 65_536, 70_272 * 65_536)}


@pytest.mark.parametrize(
    ("name", "ctx", "layers", "hundredths"),
    [
        ("DeepSeek-V3.1", 163_840, 61, 1072),  # 61 · 576 · 2 · 163,840 = 11,513,364,480 B
        ("Kimi-K2.5", 262_144, 61, 1716),  # 61 · 576 · 2 · 262,144 = 18,421,383,168 B
    ],
)
def test_latent_models_of_the_table(kvctl: Run, name: str, ctx: int, layers: int, hundredths: int) -> None:
    """unslothai/unsloth#4757: one formula for all was 81 % under for DeepSeek-V3.1, 61 % for Kimi-K2.5."""
    result = model(kvctl, name, ctx)
    assert result["kv_bytes"] == layers * 576 * 2 * ctx
    assert round(result["kv_bytes"] / GIB * 100) == hundredths


def test_glm_5_has_an_indexer_beside_the_latent(kvctl: Run) -> None:
    """unslothai/unsloth#4757: GLM-5 shown as 5.73 GiB; the latent alone is 16.97 (17.18 with the draft layer)."""
    rows = kinds(model(kvctl, "zai-org/GLM-5", 202_752))
    assert rows["latent_attention"] == (78, 202_752, 78 * 576 * 2 * 202_752)
    assert rows["indexer"] == (78, 202_752, 78 * 128 * 2 * 202_752)
    # the thread's number has the 79th layer (multi-token prediction), which is no part of the model's cache
    assert round(79 * 576 * 2 * 202_752 / GIB, 2) == 17.18


MLA = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
    "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
GQA = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 2560, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("folder", ["DeepSeek-V3", "my-finetune", "Qwen3-4B", "llama"])
@pytest.mark.parametrize(("fields", "per_token"), [(MLA, 70_272), (GQA, 147_456)])
def test_fields_decide_and_names_do_not(
    kvctl: Run, tmp_path: Path, folder: str, fields: dict[str, Any], per_token: int
) -> None:
    """LMCache/LMCache#2132: the latent case hung on one exact model name, and broke for every other."""
    # 61 · 576 · 2; 36 · 8 · 128 · 2 · 2
    path = tmp_path / folder
    path.mkdir()
    (path / "config.json").write_text(json.dumps(fields | {"_name_or_path": "deepseek-ai/DeepSeek-V3"}))
    outcome = kvctl("size", str(path), "--ctx", "1000", "--json")
    assert outcome.json["results"][0]["kv_bytes"] == per_token * 1000


def test_a_latent_under_an_unknown_type_is_never_dense(kvctl: Run) -> None:
    """LMCache/LMCache#2132, the other half: an unknown name with latent fields is refused by the field."""
    assert "kv_lora_rank" in refusal(kvctl, MLA | {"model_type": "brand_new"})


# -- compressed layouts ----------------------------------------------------------------------


def test_deepseek_v4_is_not_dense(kvctl: Run) -> None:
    """jundot/omlx#2521: DeepSeek-V4-Flash at 200K was refused over 5.4 times the memory that it took."""
    ctx = 200 * 1024
    result = model(kvctl, "DeepSeek-V4-Flash", ctx)
    # 43 layers: 2 of windows alone, 21 with one entry every 4 tokens, 20 with one every 128.
    # A row is one key of 512 that is the value too; the indexer's row is 128 wide.
    held = {(row["kind"], row["tokens"]): (row["count"], row["bytes"]) for row in result["layers"]}
    assert held["sliding_window", 128] == (43, 43 * 128 * 512 * 2)
    assert held["compressed_attention", ctx // 4] == (21, 21 * (ctx // 4) * 512 * 2)
    assert held["compressed_attention", ctx // 128] == (20, 20 * (ctx // 128) * 512 * 2)
    assert held["indexer", ctx // 4] == (21, 21 * (ctx // 4) * 128 * 2)
    # 21 · (512 + 128) · 2 / 4 + 20 · 512 · 2 / 128
    assert result["kv_bytes_per_token"] == 6880
    # dense multi-query attention would be 43 · 2 · 512 · 2 = 88,064 B a token
    assert result["kv_bytes"] < 88_064 * ctx / 12


def test_an_unknown_compressed_layout_is_refused(kvctl: Run) -> None:
    """jundot/omlx PR #2626: without kv_lora_rank the file looked dense; compress_ratios must stop that."""
    fields = GQA | {"model_type": "brand_new", "q_lora_rank": 1024, "compress_ratios": [0, 4, 128] * 12}
    assert "compress_ratios" in refusal(kvctl, fields)


# -- the width of a head ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layers", "heads", "dim", "derived"),
    [
        ("Qwen3-32B", 64, 8, 128, 80),  # hidden 5,120 / 64 heads = 80: 0.625×
        ("Qwen3-30B-A3B", 48, 4, 128, 64),  # 2,048 / 32: 0.5×
        ("Qwen3-4B", 36, 8, 128, 80),  # 2,560 / 32
        ("Qwen3-0.6B", 28, 8, 128, 64),  # 1,024 / 16; unsloth#4757: 2.19 shown, 4.38 GiB right at 40,960
        ("Mistral-Small-24B-Instruct-2501", 40, 8, 128, 160),  # 5,120 / 32: 25 % high
    ],
)
def test_explicit_head_dim_wins(kvctl: Run, name: str, layers: int, heads: int, dim: int, derived: int) -> None:
    """LMCache/LMCache#688, NVIDIA/Model-Optimizer#2482: hidden / heads where the file names head_dim."""
    result = model(kvctl, name, 32_768)
    assert derived != dim
    assert kinds(result) == {"full_attention": (layers, 32_768, layers * heads * dim * 2 * 2 * 32_768)}


def test_qwen3_0_6b_of_the_table(kvctl: Run) -> None:
    """unslothai/unsloth#4757: 2.19 GiB shown, 4.38 right."""
    # 28 · 8 · 128 · 2 · 2 · 40,960
    assert model(kvctl, "Qwen3-0.6B", 40_960)["kv_bytes"] == 4_697_620_480 == 4.375 * GIB


def test_gpt_oss_20b_head_dim_and_windows(kvctl: Run) -> None:
    """NVIDIA/Model-Optimizer#2482: gpt-oss-20b has heads of 64, not 2,880 / 64 = 45 (30 % low)."""
    rows = kinds(model(kvctl, "gpt-oss-20b", K128))
    # every other of 24 layers: 8 heads · 64 · 2 · 2 B = 2,048 B a token and layer
    assert rows == {
        "full_attention": (12, K128, 12 * 2048 * K128),
        "sliding_window": (12, 128, 12 * 2048 * 128),
    }


def test_gemma_3_12b_head_dim_and_windows(kvctl: Run) -> None:
    """NVIDIA/Model-Optimizer#2482: Gemma-3-12B has heads of 256, not 3,840 / 16 = 240."""
    rows = kinds(model(kvctl, "gemma-3-12b-it", K128))
    # every 6th of 48 layers is full: 8 heads · 256 · 2 · 2 B = 8,192 B a token and layer
    assert rows == {
        "full_attention": (8, K128, 8 * 8192 * K128),
        "sliding_window": (40, 1024, 40 * 8192 * 1024),
    }


def test_gemma_3_27b_of_the_table(kvctl: Run) -> None:
    """unslothai/unsloth#4757: 81.38 GiB shown, 10.41 right."""
    result = model(kvctl, "gemma-3-27b-it", K128)
    # 16 · 128 · 2 · 2 B = 8,192 B a token and layer; 10 full layers, 52 of window 1,024
    assert result["kv_bytes"] == 8192 * (10 * K128 + 52 * 1024) == 11_173_625_856
    assert round(result["kv_bytes"] / GIB, 2) == 10.41


# -- layers that differ ------------------------------------------------------------------------


def test_kv_heads_listed_by_layer(kvctl: Run) -> None:
    """tmac1973/llama-toolchest#58: head counts may be one number a layer (OpenELM-270M's list here)."""
    heads = [3] * 5 + [4] * 7 + [5] * 4
    fields = {"model_type": "openelm", "num_transformer_layers": 16, "model_dim": 1280, "head_dim": 64,
              "num_kv_heads": heads, "num_query_heads": [4 * count for count in heads]}  # fmt: skip
    result = config(kvctl, fields, 2048, "--dtype", "fp16", "--per-layer")
    # 63 heads in all: 63 · 64 · 2 · 2 B = 16,128 B a token
    assert sum(heads) == 63
    assert result["kv_bytes"] == 16_128 * 2048
    assert [layer["bytes"] for layer in result["per_layer"]] == [count * 64 * 2 * 2 * 2048 for count in heads]


def test_gemma_4_12b_global_layers_have_a_shape_of_their_own(kvctl: Run) -> None:
    """tmac1973/llama-toolchest#58: gemma-4-12b at 128K in q8_0 shown as 58 GB; about 40 times over."""
    pattern = ["sliding_attention"] * 5 + ["full_attention"]
    text = {
        "model_type": "gemma4_unified_text", "num_hidden_layers": 48, "hidden_size": 3840, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "sliding_window": 1024, "num_kv_shared_layers": 0, "layer_types": pattern * 8,
    }  # fmt: skip
    fields = {"model_type": "gemma4_unified", "dtype": "bfloat16", "text_config": text}
    result = config(kvctl, fields, K128, "--kv-dtype", "q8_0")
    # q8_0 is 34 bytes per 32 elements. 8 global layers of 1 head of 512; 40 of 8 heads of 256 over 1,024 tokens.
    assert kinds(result) == {
        "full_attention": (8, K128, 8 * 2 * (512 // 32 * 34) * K128),
        "sliding_window": (40, 1024, 40 * 2 * (8 * 256 // 32 * 34) * 1024),
    }
    assert result["kv_bytes"] == 1_140_850_688 + 178_257_920
    # all 48 layers as 8 heads of 512 over all tokens: 54.8 GB, 41.5 times as much
    assert round(48 * 2 * (8 * 512 // 32 * 34) * K128 / result["kv_bytes"], 1) == 41.5


def test_gemma_4_26b_a4b_windows(kvctl: Run) -> None:
    """ollama/ollama#16958: 25 of 30 layers are windowed; 56.37 GB charged, so no expert went to the GPU."""
    rows = kinds(model(kvctl, "gemma-4-26B-A4B", K128))
    # 5 global layers: 2 heads · 512; 25 windowed: 8 heads · 256 over 1,024 tokens; 2 · 2 B
    assert rows == {
        "full_attention": (5, K128, 5 * 2 * 512 * 4 * K128),
        "sliding_window": (25, 1024, 25 * 8 * 256 * 4 * 1024),
    }
    # The thread's 3.00 GB is the engine's: its windows also hold a batch of 512.
    assert round((5 * 2 * 512 * 4 * K128 + 25 * 8 * 256 * 4 * 1536) / 1e9, 2) == 3.00


def test_gemma_4_31b_has_50_windows_and_10_global_layers(kvctl: Run) -> None:
    """vllm-project/vllm#39254 has the shape: 60 layers are 50 windows of 1,024 and 10 full ones."""
    rows = kinds(model(kvctl, "gemma-4-31B", K128))
    # 10 · 4 heads · 512 · 4 B · 131,072 = 10 GiB; 50 · 16 heads · 256 · 4 B · 1,024
    assert rows == {
        "full_attention": (10, K128, 10 * GIB),
        "sliding_window": (50, 1024, 838_860_800),
    }


def test_keys_and_values_have_lengths_of_their_own(kvctl: Run) -> None:
    """ollama/ollama#5136, PR #17201: a key length used for values too, on a model where they differ."""
    rows = kinds(model(kvctl, "MiMo-V2-Flash", 32_768))
    # keys of 192, values of 128: 9 full layers of 4 heads, 39 windowed ones of 8
    assert rows == {
        "full_attention": (9, 32_768, 9 * 4 * (192 + 128) * 2 * 32_768),
        "sliding_window": (39, 128, 39 * 8 * (192 + 128) * 2 * 128),
    }


def test_deepseek_v2_lite_is_a_latent(kvctl: Run) -> None:
    """ollama/ollama#5136: deepseek-v2:16b at 32K is 8,640 MiB decompressed (192 + 128 wide), 972 as a latent."""
    result = model(kvctl, "DeepSeek-V2-Lite", 32_768)
    assert 27 * 16 * (192 + 128) * 2 * 32_768 == 8640 * 2**20
    # 27 · (512 + 64) · 2 B · 32,768, and the row names the layout
    assert kinds(result) == {"latent_attention": (27, 32_768, 972 * 2**20)}


def test_mistral_7b_window(kvctl: Run) -> None:
    """Andyyyy64/whichllm#124: a window of 4,096 makes 32K fit; engines that ignore it need all of it."""
    # 32 · 8 · 128 · 2 · 2 B = 131,072 B a token
    windowed = model(kvctl, "Mistral-7B-v0.1", 32_768)
    assert kinds(windowed) == {"sliding_window": (32, 4096, GIB // 2)}
    ignored = model(kvctl, "Mistral-7B-v0.1", 32_768, "--set", "sliding_window=null")
    assert kinds(ignored) == {"full_attention": (32, 32_768, 4 * GIB)}


# -- shapes read, not guessed ----------------------------------------------------------------


@pytest.mark.parametrize(("ctx", "gib"), [("32k", 4.5), ("256k", 36)])
def test_36_layers_of_8_heads(kvctl: Run, ctx: str, gib: float) -> None:
    """Osmantic/ODS#3324, HenriGrimm/Minnow#854: KV from the parameter count, capped; layers and heads decide."""
    outcome = kvctl("size", "--layers", "36", "--kv-heads", "8", "--head-dim", "128", "--ctx", ctx, "--json")
    # 36 · 8 · 128 · 2 · 2 B = 147,456 B a token
    assert outcome.json["results"][0]["kv_bytes"] == gib * GIB


def test_grouped_heads_are_not_query_heads(kvctl: Run) -> None:
    """jranaraki/vllm-fit#2: 64 query heads charged where 8 KV heads are kept, 8 times over."""
    # 80 · 8 · 128 · 2 · 2 B
    assert model(kvctl, "Llama-3.1-70B", 4096)["kv_bytes_per_token"] == 327_680


def test_contexts_are_not_capped(kvctl: Run) -> None:
    """jranaraki/vllm-fit#33: every context was cut to 32,768 without a word."""
    assert model(kvctl, "Llama-3.1-70B", K128)["kv_bytes"] == 4 * model(kvctl, "Llama-3.1-70B", 32_768)["kv_bytes"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda text: {"model_type": "llava", "text_config": text},
        lambda text: {"model_type": "internvl_chat", "llm_config": text},
        lambda text: {"model_type": "some_omni", "thinker_config": {"text_config": text}},
        lambda text: {"model_type": "some_omni", "thinker_config": {"model_type": "x", "text_config": text}},
    ],
    ids=["text_config", "llm_config", "thinker_config.text_config", "named thinker"],
)
def test_nested_language_models_are_unwrapped(kvctl: Run, wrap: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """jranaraki/vllm-fit#14: the nested part was missed, and made-up defaults were sized instead."""
    fields = wrap(GQA) | {"vision_config": {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16}}
    # 36 · 8 · 128 · 2 · 2 B
    assert config(kvctl, fields, 1000)["kv_bytes"] == 147_456 * 1000


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "num_key_value_heads"])
def test_a_missing_dimension_is_an_error_that_names_it(kvctl: Run, key: str) -> None:
    """jranaraki/vllm-fit#31: a missing dimension must stop the answer, not fall back to 32 layers."""
    text = {name: value for name, value in GQA.items() if name != key} | {"model_type": "brand_new"}
    assert key in refusal(kvctl, {"model_type": "brand_new_vl", "text_config": text})
    assert key in refusal(kvctl, text)


def test_a_missing_width_is_an_error_that_names_it(kvctl: Run) -> None:
    """jranaraki/vllm-fit#31: neither head_dim nor hidden_size."""
    text = {name: value for name, value in GQA.items() if name not in ("head_dim", "hidden_size")}
    assert "hidden_size" in refusal(kvctl, text | {"model_type": "brand_new"})


def test_a_wrapper_without_a_language_model_is_an_error(kvctl: Run) -> None:
    """jranaraki/vllm-fit#14: a vision part alone says nothing about the cache."""
    vision = {"model_type": "clip_vision_model", "num_hidden_layers": 24, "hidden_size": 1024}
    refusal(kvctl, {"model_type": "brand_new_vl", "vision_config": vision})


# -- quantised caches --------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "block"), [("q8_0", 34), ("q4_0", 18)])
def test_blocks_are_34_and_18_bytes_per_32(kvctl: Run, name: str, block: int) -> None:
    """withcatai/node-llama-cpp#608: q8_0 came out 32 times too large, above f16; others forget the scales."""
    plain = model(kvctl, "Llama-3.1-8B", 8192, "--kv-dtype", "f16")["kv_bytes"]
    small = model(kvctl, "Llama-3.1-8B", 8192, "--kv-dtype", name)["kv_bytes"]
    # 32 layers · 8 heads · 128 · 2 (K and V) = 65,536 elements a token
    assert plain == 65_536 * 2 * 8192
    assert small == 65_536 // 32 * block * 8192 < plain


def test_llama_3_1_8b_at_32k_in_q4_0(kvctl: Run) -> None:
    """ollama/ollama#6279: 4 GB in f16 became 1.1 GB in q4_0."""
    assert model(kvctl, "Llama-3.1-8B", 32_768, "--kv-dtype", "f16")["kv_bytes"] == 4 * GIB
    # 4 GiB · (18/32) / 2
    assert model(kvctl, "Llama-3.1-8B", 32_768, "--kv-dtype", "q4_0")["kv_bytes"] == 1.125 * GIB


def test_keys_and_values_take_formats_of_their_own(kvctl: Run) -> None:
    """ollama/ollama#5091: keys suffer more from few bits than values, so users want both settings."""
    result = model(kvctl, "Llama-3.1-8B", 32_768, "--k-dtype", "q8_0", "--v-dtype", "q4_0")
    assert (result["k_dtype"], result["v_dtype"]) == ("q8_0", "q4_0")
    # 32,768 elements of keys and as many of values a token: 1,024 blocks of 34 and of 18 bytes
    assert result["kv_bytes"] == 1024 * (34 + 18) * 32_768
    mixed = model(kvctl, "Llama-3.1-8B", 32_768, "--kv-dtype", "q8_0", "--v-dtype", "f16")
    assert mixed["kv_bytes"] == (1024 * 34 + 32_768 * 2) * 32_768


def test_qwen2_5_7b_1m_counts_its_quantisation(kvctl: Run) -> None:
    """ollama/ollama#10128: Qwen2.5-7B-1M at 262,144 tokens in q8_0 shown as 52 GB; about 10 GB were used."""
    # 28 layers · 4 heads · 128 · 2 = 28,672 elements a token: 57,344 B in f16, 896 blocks · 34 B = 30,464 in q8_0
    plain = model(kvctl, "Qwen2.5-7B-Instruct-1M", 262_144, "--kv-dtype", "f16")
    small = model(kvctl, "Qwen2.5-7B-Instruct-1M", 262_144, "--kv-dtype", "q8_0")
    assert (plain["kv_bytes_per_token"], small["kv_bytes_per_token"]) == (57_344, 30_464)
    assert small["kv_bytes"] == 30_464 * 262_144 == 7_985_954_816


def test_states_of_hybrids_are_not_quantised(kvctl: Run) -> None:
    """Peers halve everything; only keys and values have a cache format."""
    plain, small = (
        kinds(model(kvctl, "Qwen3-Next-80B-A3B-Instruct", K128, "--kv-dtype", name)) for name in ("bf16", "q8_0")
    )
    # 12 layers · 2 heads · 256 · 2 = 12,288 elements a token
    assert plain["full_attention"] == (12, K128, 12_288 * 2 * K128)
    assert small["full_attention"] == (12, K128, 12_288 // 32 * 34 * K128)
    # 36 · 32 · 128 · 128 · 4 B and 36 · 8,192 · 3 · 2 B either way
    assert small["recurrent_state"] == plain["recurrent_state"] == (36, 0, 75_497_472)
    assert small["conv_state"] == plain["conv_state"] == (36, 0, 1_769_472)


# -- what the engine reserves ----------------------------------------------------------------------


def reserved(run: Run, name: str, *options: str) -> dict[str, Any]:
    result = model(run, name, K128, "--engine", "vllm", *options)
    return {"need": result["kv_bytes"], **result["allocation"]}


def test_need_and_reserve_are_two_numbers(kvctl: Run) -> None:
    """alvarobartt/hf-mem#60, #61, #70: windows were left out, then capped, then charged in full; a log decided."""
    # gpt-oss-120b: 18 full layers and 18 windows of 128; 4.50 GiB are needed (and 4.5 MiB in windows)
    both = reserved(kvctl, "openai/gpt-oss-120b")
    assert both["need"] == 18 * 8 * 128 * 2 * (K128 + 128)
    assert both["reserved_bytes"] > both["need"]
    # Only with the hybrid manager off do all 36 layers hold the whole context: 9 GiB.
    off = reserved(kvctl, "openai/gpt-oss-120b", "--disable-hybrid-kv-cache-manager")
    assert off["reserved_bytes"] == 9 * GIB
    # gemma-3-27b: 10.41 GiB needed; 62 GiB with the manager off, which one tool charged always
    off = reserved(kvctl, "google/gemma-3-27b-it", "--disable-hybrid-kv-cache-manager")
    assert f"{off['need'] / GIB:.2f}" == "10.41"
    assert off["reserved_bytes"] == 62 * GIB


def test_windows_cost_the_maximum_length_without_the_hybrid_manager(kvctl: Run) -> None:
    """vllm-project/vllm#39254, tenstorrent/tt-xla#5727: gemma-4-31B's 50 windows of 1,024 beside 10 full layers."""
    on = reserved(kvctl, "google/gemma-4-31B-it")
    off = reserved(kvctl, "google/gemma-4-31B-it", "--disable-hybrid-kv-cache-manager")
    # 50 layers of 16 heads · 256 and 10 of 4 · 512, K and V, 2 B
    assert off["reserved_bytes"] == K128 * 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)
    assert on["reserved_bytes"] < off["reserved_bytes"] / 4
    assert any("every token" in reason for reason in off["reasons"])


@pytest.mark.parametrize("version", ["0.20", "0.22", "0.25"])
def test_a_logged_capacity_of_a_windowed_model(kvctl: Run, version: str) -> None:
    """redhat-performance/configiq#112: 64.68 GiB of an H200 logged 626,949 tokens, where 972,134 had been predicted."""
    options = ("--max-num-batched-tokens", "8192", "--kv-budget", "64.68GiB")
    plan = model(kvctl, "gemma-4-31B-it", 262_144, "--engine", f"vllm@{version}", *options)["allocation"]
    assert plan["reported_capacity"] == 626_949


def test_an_indexer_takes_less_than_its_dtype_says(kvctl: Run) -> None:
    """DeepSeek-V3.2: keys of 128 in fp8 and a scale of 4 bytes, where the architecture has 256 bytes in bf16."""
    plan = reserved(kvctl, "DeepSeek-V3.2")
    # 61 layers of a latent of 512 + 64 in bf16 and of a key
    assert plan["reserved_bytes"] == K128 * 61 * (2 * 576 + 132)
    assert any("indexer keys are kept in fp8" in reason for reason in plan["reasons"])


def test_bytes_for_a_length_and_not_bytes_over_logged_tokens(kvctl: Run) -> None:
    """vllm-project/vllm#51041: logged tokens are concurrency × length, so GiB / tokens says nothing of a windowed model."""
    rates = []
    for ctx in (4096, 131_072):
        plan = model(kvctl, "google/gemma-3-27b-it", ctx, "--engine", "vllm", "--kv-budget", "60GiB")["allocation"]
        rates.append(60 * GIB / plan["reported_capacity"])
        assert plan["reported_capacity"] == int(plan["num_blocks"] / plan["blocks_per_request"] * ctx)
    assert rates[0] > 3 * rates[1]


def test_a_length_is_refused_where_the_memory_left_for_the_cache_shrank(kvctl: Run) -> None:
    """vllm-project/vllm#25350: 10.55 GiB hold 230,528 tokens in fp8, and then 5.59 GiB only 122,080 of 221,000."""
    # Qwen3-30B-A3B's shape: 48 layers · 4 heads · 256 · 1 B = 49,152 B a token, blocks of 16
    options = ("Qwen/Qwen3-30B-A3B", "--engine", "vllm@0.10", "--kv-cache-dtype", "fp8", "--json")
    first = kvctl("size", *options, "--ctx", "40960", "--kv-budget", "10.553GiB").json["results"][0]["allocation"]
    assert first["reported_capacity"] == 230_528
    outcome = kvctl("size", *options, "--ctx", "221000", "--kv-budget", "5.5886GiB")
    assert "would not start" in outcome.err
    assert "--max-model-len 122080 fits" in outcome.err


def test_the_pool_fills_the_budget_and_one_request_needs_little(kvctl: Run) -> None:
    """vllm-project/vllm#33263: 18.78 GiB are filled for one sequence of 1,024 tokens; the need is what to ask for."""
    plan = model(kvctl, "Qwen/Qwen3-8B", 1024, "--engine", "vllm", "--kv-budget", "18.78GiB")["allocation"]
    # 36 layers · 8 heads · 256 · 2 B · 16 tokens a block; 64 blocks for the request and the one set aside
    assert plan["reserved_bytes"] == 64 * 36 * 4096 * 16
    assert any(f"--kv-cache-memory-bytes {65 * 36 * 4096 * 16} holds" in reason for reason in plan["reasons"])
    assert plan["num_blocks"] * plan["bytes_per_block"] > 18.7 * GIB


@pytest.mark.parametrize(
    ("version", "default", "words"), [("0.19", "0.9", "come on top of"), ("0.22", "0.92", "come out of")]
)
def test_what_a_share_of_the_memory_covers_changed(kvctl: Run, version: str, default: str, words: str) -> None:
    """vllm-project/vllm#21489, #30515, #27951: CUDA graphs came on top of the share, later out of it."""
    options = ("--engine", f"vllm@{version}", "--gpu-memory-utilization", "0.85", "--ctx", "4k")
    err = kvctl("size", "Qwen/Qwen3-8B", *options).err
    assert words in err
    assert f"--gpu-memory-utilization is {default}\n" in err


# -- tensor parallelism ------------------------------------------------------------------------------


def test_more_ranks_than_kv_heads(kvctl: Run) -> None:
    """huggingface/transformers#48307: 8 ranks and 4 KV heads (Qwen3-VL-30B-A3B's text model) fail there; vLLM repeats heads."""
    # 48 layers · 1 head · 256 · 2 B · block 16 on every rank, as with 4 ranks
    eight = reserved(kvctl, "Qwen/Qwen3-30B-A3B", "-tp", "8")
    assert eight["bytes_per_block"] == reserved(kvctl, "Qwen/Qwen3-30B-A3B", "-tp", "4")["bytes_per_block"]
    assert eight["bytes_per_block"] == 48 * 1 * 256 * 2 * 16
    assert [row["rank"] for row in eight["per_rank"]] == list(range(8))
    assert any("2 times" in reason for reason in eight["reasons"])


def test_ranks_are_rows_and_never_one_pool(kvctl: Run) -> None:
    """AlexsJones/llmfit#68, #70 and Andyyyy64/whichllm#112: one of two cards counted, or unlike cards put together."""
    # 64 layers · 4 of 8 heads · 256 · 2 B · 16 tokens on each of two ranks: a budget is that of one card
    plan = reserved(kvctl, "Qwen/Qwen3-32B", "-tp", "2", "--kv-budget", "8GiB")
    assert [row["bytes_per_block"] for row in plan["per_rank"]] == [64 * 4 * 256 * 2 * 16] * 2
    assert plan["num_blocks"] == 8 * GIB // (64 * 4 * 256 * 2 * 16)


def test_an_fp8_cache_without_scales_is_said(kvctl: Run) -> None:
    """vllm-project/vllm#11906, #5493, #17414: scales of 1.0 cost accuracy; a checkpoint that has some is followed."""
    assert (
        "names no scales" in kvctl("size", "Qwen2-7B", "--engine", "vllm", "--kv-cache-dtype", "fp8", "--ctx", "4k").err
    )
    # club-3090#594: what --calculate-kv-scales does for other models, hybrids refuse
    hybrid = ("Qwen3-Next-80B-A3B-Instruct", "--engine", "vllm", "--kv-cache-dtype", "fp8", "--ctx", "4k")
    assert "computes none where layers are recurrent" in kvctl("size", *hybrid).err
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
              "num_key_value_heads": 8, "torch_dtype": "bfloat16",
              "quantization_config": {"quant_method": "compressed-tensors",
                                      "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}}  # fmt: skip
    outcome = kvctl("size", "-", "--engine", "vllm", "--ctx", "4k", "--json", stdin=json.dumps(config))
    assert outcome.json["results"][0]["k_dtype"] == "fp8"
    assert "names no scales" not in outcome.err


# -- Ollama ------------------------------------------------------------------------------------


def by_ollama(name: str, num_ctx: int, kv: str | None = None, **serving: Any) -> int:
    """Bytes that Ollama's llama-server reserves, by the rules of `--engine ollama`."""
    rules = engine("ollama")
    fmt = rules.kv_dtype(kv, "--kv-dtype") if kv else None
    plan = SizePlan(engine=rules, serving=Serving(**serving), key=fmt, value=fmt)
    allocation = size_of(build_spec(resolve(name, source="catalogue")), num_ctx, plan).allocation
    assert allocation is not None
    return allocation.reserved_bytes


@pytest.mark.parametrize(("num_ctx", "gb"), [(4096, 0.40), (8192, 0.48), (32_768, 0.99), (K128, 3.00)])
def test_ollama_reserves_windows_of_gemma_4_26b(num_ctx: int, gb: float) -> None:
    """ollama/ollama#16958: charged 1.76, 3.52, 14.09 and 56.37 GB; windows hold 1,024 and a batch of 512."""
    assert round(by_ollama("gemma-4-26B-A4B", num_ctx, ubatch=512) / 1e9, 2) == gb


@pytest.mark.parametrize(("kv", "gib"), [("f16", 4), ("q8_0", 2.125), ("q4_0", 1.125)])
def test_ollama_counts_scales_of_llama_3_1_8b(kv: str, gib: float) -> None:
    """ollama/ollama#6279, #5091: 4 GB at 32K in f16 are 1.1 in q4_0; 32 elements take 64, 34 or 18 bytes."""
    assert by_ollama("Llama-3.1-8B", 32_768, kv) == gib * GIB


def test_ollama_counts_the_cache_type_of_qwen2_5_7b_1m() -> None:
    """ollama/ollama#10128: shown as 52 GB at 262,144 tokens in q8_0; 8.0 GB of the 10 used are the cache."""
    assert by_ollama("Qwen2.5-7B-Instruct-1M", 262_144, "q8_0") == 30_464 * 262_144


def test_ollama_keeps_latents_where_the_file_has_them(kvctl: Run) -> None:
    """ollama/ollama#5136: deepseek-v2:16b took 8,640 MiB at 32K; a newer file 972, and the warning says which."""
    outcome = kvctl("size", "DeepSeek-V2-Lite", "--source", "catalogue", "--ctx", "32k", "--engine", "ollama", "--json")
    assert outcome.json["results"][0]["allocation"]["reserved_bytes"] == 972 * 2**20
    assert "attention.key_length_mla" in outcome.err
