"""Arithmetic of `kvctl size`, from the command line: published figures and hand calculations."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Outcome

GIB = 2**30
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "torch_dtype": "bfloat16", "max_position_embeddings": 131072,
}  # fmt: skip

Run = Callable[..., Outcome]


def one(run: Run, config: dict[str, Any], *options: str) -> dict[str, Any]:
    outcome = run("size", "-", "--json", *options, stdin=json.dumps(config))
    assert outcome.code == 0, outcome.err
    result: dict[str, Any] = outcome.json["results"][0]
    return result


def shape(run: Run, layers: int, heads: int, dim: int, *options: str) -> dict[str, Any]:
    outcome = run("size", "--layers", str(layers), "--kv-heads", str(heads), "--head-dim", str(dim), "--json", *options)
    assert outcome.code == 0, outcome.err
    result: dict[str, Any] = outcome.json["results"][0]
    return result


# -- the articles' numbers -------------------------------------------------------------


@pytest.mark.parametrize(("ctx", "gib"), [("4k", 1.25), ("32k", 10), ("128k", 40)])
def test_80_layers_of_8_heads(kvctl: Run, ctx: str, gib: float) -> None:
    result = shape(kvctl, 80, 8, 128, "--ctx", ctx)
    assert result["kv_bytes_per_token"] == 327_680  # 2 · 80 · 8 · 128 · 2
    assert result["kv_bytes"] == gib * GIB


def test_32_layers_of_32_heads_at_8192(kvctl: Run) -> None:
    assert shape(kvctl, 32, 32, 128, "--ctx", "8192")["kv_bytes"] == 4 * GIB


def test_80_layers_of_64_heads_is_343_6_gb(kvctl: Run) -> None:
    # 2 · 80 · 64 · 128 · 2 · 131,072; one article prints 274 GB, an arithmetic slip
    assert shape(kvctl, 80, 64, 128, "--ctx", "131072")["kv_bytes"] == 343_597_383_680 == 320 * GIB


def test_multi_query_and_grouped_are_fractions_of_multi_head(kvctl: Run) -> None:
    full = shape(kvctl, 80, 64, 128, "--ctx", "4k")["kv_bytes"]
    assert shape(kvctl, 80, 1, 128, "--ctx", "4k")["kv_bytes"] * 64 == full
    assert shape(kvctl, 80, 8, 128, "--ctx", "4k")["kv_bytes"] * 64 == full * 8


# -- formats ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bytes_a_row"),
    [
        # a row is 8 heads · 128 = 1,024 elements of keys, and as many of values
        ("fp32", 4096),
        ("bf16", 2048),
        ("fp16", 2048),
        ("float16", 2048),
        ("fp8", 1024),
        ("q8_0", 1024 // 32 * 34),
        ("q4_0", 1024 // 32 * 18),
        ("q4_1", 1024 // 32 * 20),
        ("q5_0", 1024 // 32 * 22),
        ("q5_1", 1024 // 32 * 24),
        ("iq4_nl", 1024 // 32 * 18),
        ("int4", 576),  # 4.5 bits · 1,024
        ("int8", 1088),  # 8.5 bits · 1,024
        ("nvfp4", 576),  # 0.5625 bytes an element
        ("mxfp8", 1024 // 32 * 33),
        ("int8_per_token_head", 1024 + 8 * 4),
    ],
)
def test_formats_count_their_scales(kvctl: Run, name: str, bytes_a_row: int) -> None:
    result = shape(kvctl, 1, 8, 128, "--ctx", "1000", "--kv-dtype", name)
    assert result["kv_bytes"] == 1000 * 2 * bytes_a_row


def test_keys_and_values_may_differ(kvctl: Run) -> None:
    result = shape(kvctl, 2, 4, 64, "--ctx", "10", "--k-dtype", "q8_0", "--v-dtype", "q4_0")
    assert (result["k_dtype"], result["v_dtype"]) == ("q8_0", "q4_0")
    assert result["kv_bytes"] == 2 * 10 * (256 // 32 * 34 + 256 // 32 * 18)


def test_a_row_that_does_not_fill_its_block_takes_all_of_it(kvctl: Run) -> None:
    # 3 heads · 80 = 240 elements: 8 blocks of 32 (one half full), 34 bytes each
    assert shape(kvctl, 1, 3, 80, "--ctx", "1", "--kv-dtype", "q8_0")["kv_bytes"] == 2 * 8 * 34


def test_the_models_dtype_is_the_default_format(kvctl: Run) -> None:
    config = LLAMA | {"torch_dtype": "float32"}
    assert one(kvctl, config, "--ctx", "100")["kv_bytes_per_token"] == 2 * 32 * 8 * 128 * 4
    assert one(kvctl, config, "--ctx", "100", "--dtype", "bf16")["kv_bytes_per_token"] == 2 * 32 * 8 * 128 * 2


def test_kv_dtype_leaves_recurrent_states_alone(kvctl: Run) -> None:
    config = {
        "model_type": "qwen3_next", "dtype": "bfloat16", "num_hidden_layers": 4, "hidden_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    plain, small = (
        {row["kind"]: row["bytes"] for row in one(kvctl, config, "--ctx", "100", *options)["layers"]}
        for options in ((), ("--kv-dtype", "fp8"))
    )
    # every 4th layer is attention: 1 · 100 · 2 · 2 · 32 · 2
    assert plain["full_attention"] == 25_600 == 2 * small["full_attention"]
    # 3 layers · 160 channels · (kernel 4 − 1) · 2; 3 · 4 · 16 · 24 · 4 in float32
    assert plain["conv_state"] == small["conv_state"] == 2_880
    assert plain["recurrent_state"] == small["recurrent_state"] == 18_432


# -- windows, sequences, beams, growth ------------------------------------------------------


def test_a_full_window_stops_growing(kvctl: Run) -> None:
    config = LLAMA | {"model_type": "mistral", "sliding_window": 4096}
    before, after = (one(kvctl, config, "--ctx", ctx) for ctx in ("4095", "32768"))
    assert before["kv_bytes_per_token"] == 131_072  # 2 · 32 · 8 · 128 · 2
    assert after["kv_bytes_per_token"] == 0
    assert after["kv_bytes"] == after["kv_bytes_fixed"] == 4096 * 131_072
    assert one(kvctl, config, "--ctx", "32768", "--engine", "transformers")["kv_bytes"] == 4095 * 131_072


@pytest.mark.parametrize("off", [{"sliding_window": None}, {"model_type": "qwen2", "use_sliding_window": False}])
def test_a_window_that_is_off_is_off(kvctl: Run, off: dict[str, Any]) -> None:
    config = LLAMA | {"model_type": "mistral", "sliding_window": 4096, "max_window_layers": 0} | off
    assert one(kvctl, config, "--ctx", "32768")["kv_bytes"] == 32768 * 131_072


def test_sequences_and_beams_multiply(kvctl: Run) -> None:
    base = one(kvctl, LLAMA, "--ctx", "1000")
    assert one(kvctl, LLAMA, "--ctx", "1000", "--sequences", "7")["kv_bytes"] == 7 * base["kv_bytes"]
    assert one(kvctl, LLAMA, "--ctx", "1000", "--beams", "4")["kv_bytes"] == 4 * base["kv_bytes"]


T5 = {"model_type": "t5", "d_model": 64, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "d_kv": 24,
      "architectures": ["T5ForConditionalGeneration"], "dtype": "float16"}  # fmt: skip


def test_beams_share_the_encoder_in_theory_and_not_in_transformers(kvctl: Run) -> None:
    # self: 3 · 2 · 4 · 24 · 2 · 50 tokens; cross: the same for 10 encoder positions
    own, cross = 3 * 2 * 4 * 24 * 2 * 50, 3 * 2 * 4 * 24 * 2 * 10
    options = ("--ctx", "50", "--encoder-tokens", "10", "--beams", "2")
    assert one(kvctl, T5, *options)["kv_bytes"] == 2 * own + cross
    assert one(kvctl, T5, *options, "--engine", "transformers")["kv_bytes"] == 2 * (own + cross)


def test_encoder_positions_default_to_the_context_and_say_so(kvctl: Run) -> None:
    outcome = kvctl("size", "-", "--json", "--ctx", "50", stdin=json.dumps(T5))
    assert outcome.json["results"][0]["encoder_tokens"] == 50
    assert "cross attention holds 50 encoder positions" in outcome.err


def test_whisper_holds_its_full_input_by_default(kvctl: Run) -> None:
    config = {"model_type": "whisper", "d_model": 1280, "decoder_layers": 32, "decoder_attention_heads": 20,
              "encoder_layers": 32, "encoder_attention_heads": 20, "max_source_positions": 1500,
              "max_target_positions": 448, "torch_dtype": "float16",
              "architectures": ["WhisperForConditionalGeneration"]}  # fmt: skip
    result = one(kvctl, config, "--ctx", "448")
    # whisper-large: 2 · 32 · 20 · 64 · 2 bytes a position, 448 of text and 1,500 of audio
    assert result["kv_bytes"] == 163_840 * (448 + 1500)
    assert one(kvctl, config, "--ctx", "448", "--audio-tokens", "100")["kv_bytes"] == 163_840 * (448 + 100)


def test_image_tokens_of_a_decoder_only_model_are_positions(kvctl: Run) -> None:
    assert one(kvctl, LLAMA, "--ctx", "1000", "--image-tokens", "576")["kv_bytes"] == 1576 * 131_072


def test_fractions_of_an_entry_are_exact(kvctl: Run) -> None:
    config = {
        "model_type": "deepseek_v4", "dtype": "bfloat16", "num_hidden_layers": 2, "hidden_size": 64,
        "num_attention_heads": 4, "head_dim": 33, "index_head_dim": 16, "sliding_window": 8,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    }  # fmt: skip
    result = one(kvctl, config, "--ctx", "1280")
    # (33 + 16) · 2 / 4 + 33 · 2 / 128 = 24.5 + 33/64
    assert result["kv_bytes_per_token_exact"] == "1601/64"
    assert result["kv_bytes_per_token"] == 26
    assert {row["kind"]: row["tokens"] for row in result["layers"]}["indexer"] == 320


# -- what-ifs ----------------------------------------------------------------------------------


def test_overrides_are_applied_and_reported(kvctl: Run) -> None:
    result = one(kvctl, LLAMA, "--ctx", "1000", "--set", "num_key_value_heads=32")
    assert result["kv_bytes"] == 4 * 1000 * 131_072
    assert result["model"]["overrides"] == {"num_key_value_heads": 32}


def test_plain_override_reaches_the_nested_language_model(kvctl: Run) -> None:
    config = {"model_type": "llava", "text_config": LLAMA}
    for key in ("num_key_value_heads", "text_config.num_key_value_heads"):
        result = one(kvctl, config, "--ctx", "1000", "--set", f"{key}=1")
        assert result["kv_bytes"] == 1000 * 131_072 // 8
        assert result["model"]["overrides"] == {"text_config.num_key_value_heads": 1}


def test_an_override_without_effect_is_refused(kvctl: Run) -> None:
    outcome = kvctl("size", "-", "--set", "num_key_value_head=1", stdin=json.dumps(LLAMA))
    assert outcome.code == 2
    assert "num_key_value_head: has no effect" in outcome.err
    assert "num_key_value_heads" in outcome.err.splitlines()[-1]


@pytest.mark.parametrize("text", ["", "=1", "a", "a..b=1"])
def test_malformed_override(kvctl: Run, text: str) -> None:
    outcome = kvctl("size", "-", "--set", text, stdin=json.dumps(LLAMA))
    assert outcome.code == 2
    assert "is not key=value" in outcome.err


# -- unknown model types -------------------------------------------------------------------------

PLAIN = {"model_type": "brand_new", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 2, "torch_dtype": "bfloat16"}  # fmt: skip


def test_unknown_type_with_standard_fields_is_read_and_said(kvctl: Run) -> None:
    outcome = kvctl("size", "-", "--json", "--ctx", "100", stdin=json.dumps(PLAIN))
    assert outcome.json["results"][0]["kv_bytes"] == 2 * 4 * 2 * 128 * 2 * 100
    assert "'brand_new' is not known" in outcome.err


@pytest.mark.parametrize(
    "hint",
    [
        {"sliding_window": 1024}, {"layer_types": ["full_attention"] * 4}, {"kv_lora_rank": 512}, {"ssm_state_size": 16},
        {"num_kv_shared_layers": 2}, {"linear_attention_every": 2}, {"full_attention_interval": 4},
        {"attention_chunk_size": 8192}, {"compress_ratios": [4, 4, 4, 4]}, {"conv_kernel": 4},
        {"is_encoder_decoder": True}, {"v_head_dim": 64}, {"kv_channels": 64},
    ],
)  # fmt: skip
def test_unknown_type_with_a_hint_is_refused_by_the_key(kvctl: Run, hint: dict[str, Any]) -> None:
    outcome = kvctl("size", "-", stdin=json.dumps(PLAIN | hint))
    assert outcome.code == 1
    assert next(iter(hint)) in outcome.err
    assert outcome.out == ""


@pytest.mark.parametrize("off", [{"sliding_window": None}, {"use_sliding_window": False}, {"kv_lora_rank": None}])
def test_a_hint_that_is_off_is_no_hint(kvctl: Run, off: dict[str, Any]) -> None:
    assert kvctl("size", "-", "--json", stdin=json.dumps(PLAIN | off)).code == 0


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size"])
def test_unknown_type_without_a_field_is_refused_by_the_field(kvctl: Run, key: str) -> None:
    config = {name: value for name, value in PLAIN.items() if name != key}
    outcome = kvctl("size", "-", stdin=json.dumps(config))
    assert outcome.code == 1
    assert key in outcome.err


# -- the contract -----------------------------------------------------------------------------------


def test_totals_add_up(kvctl: Run) -> None:
    config = LLAMA | {"model_type": "gemma2", "sliding_window": 512, "head_dim": 128, "num_hidden_layers": 6}
    result = one(kvctl, config, "--ctx", "4096", "--per-layer", "--sequences", "3")
    assert sum(row["bytes"] for row in result["layers"]) == result["kv_bytes"]
    assert sum(row["bytes"] for row in result["per_layer"]) == result["kv_bytes"]
    assert [row["kind"] for row in result["per_layer"]] == ["sliding_window", "full_attention"] * 3
    assert sum(row["count"] for row in result["layers"]) == 6
    assert result["kv_bytes"] == result["kv_bytes_fixed"] + 3 * 4096 * result["kv_bytes_per_token"]


def test_explain_shows_the_sum_and_what_a_naive_formula_says(kvctl: Run) -> None:
    config = LLAMA | {"model_type": "mistral", "sliding_window": 4096}
    outcome = kvctl("size", "-", "--ctx", "32768", "--explain", stdin=json.dumps(config))
    assert (
        "32 layers × min(32,768, 4,096) tokens × 2 (K and V) × 8 KV heads × head dim 128 × 2 B = 536,870,912 B"
        in outcome.out
    )
    assert "8.0× too much" in outcome.out  # 4 GiB for 0.5 GiB


def test_beyond_the_models_maximum_is_a_warning(kvctl: Run) -> None:
    outcome = kvctl("size", "-", "--json", "--ctx", "256k", stdin=json.dumps(LLAMA))
    assert outcome.code == 0
    assert "262,144 tokens is beyond the model's own maximum of 131,072" in outcome.err
    assert outcome.json["results"][0]["warnings"]


def test_quiet_keeps_stderr_empty(kvctl: Run) -> None:
    assert kvctl("size", "-", "--ctx", "256k", "--quiet", stdin=json.dumps(LLAMA)).err == ""


@pytest.mark.parametrize("form", ["table", "csv", "md", "json"])
def test_every_format_carries_the_bytes(kvctl: Run, form: str) -> None:
    outcome = kvctl("size", "-", "--ctx", "1000", "--format", form, stdin=json.dumps(LLAMA))
    assert outcome.code == 0
    assert "131072000" in outcome.out.replace(",", "")
