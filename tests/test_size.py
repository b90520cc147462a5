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
        {"sliding_window": 1024}, {"layer_types": ["full_attention", "sliding_attention"] * 2}, {"kv_lora_rank": 512}, {"ssm_state_size": 16},
        {"num_kv_shared_layers": 2}, {"linear_attention_every": 2}, {"full_attention_interval": 4},
        {"attention_chunk_size": 8192}, {"compress_ratios": [4, 4, 4, 4]}, {"conv_kernel": 4},
        {"is_encoder_decoder": True}, {"v_head_dim": 64}, {"kv_channels": 64}, {"attention_head_dim": 64},
        {"qk_head_dim": 64}, {"kv_proj_dim": 256}, {"use_mla": True}, {"kda_layers": [0, 2]}, {"local_layers": 2},
        {"global_layers": [1]}, {"layers_without_attention": [1]}, {"attn_every": 2}, {"rnn_layers": 2}, {"d_inner": 64},
        {"no_rope_layers": [1, 0, 1, 0]}, {"cla_factor": 2}, {"yoco": True}, {"num_self_decoder_layers": 2},
        {"nsa_config": {"block": 64}}, {"moba_chunk": 64}, {"hgrn": True}, {"retention_heads": 4},
        {"attention_k_eq_v": True}, {"num_nextn_predict_layers": 1}, {"layer_group_size": 5}, {"total_ut_steps": 4},
        {"attn_config": {"sliding_window": 128}}, {"n_kv_heads": 2}, {"num_query_groups": 2}, {"d_kv": 64},
        {"head_size": 64}, {"mla_rank": 64}, {"attn_mode": "local"}, {"attention_span": 128}, {"kv_reuse": 2},
        {"cross_layer_kv": True}, {"use_cla": True}, {"n_passes": 3}, {"num_meta_tokens": 128}, {"num_sink_tokens": 4},
        {"prompt_length": 16}, {"encoder_layers": 4}, {"decoder_layers": 4}, {"n_layer": 8}, {"num_layers": 8},
        {"SLIDING_WINDOW": 128}, {"pruned_heads": {"0": [1]}}, {"q_lora_rank": 512},
        {"architectures": ["BrandNewForMaskedLM"]}, {"architectures": ["BrandNewForConditionalGeneration"]},
    ],
)  # fmt: skip
def test_unknown_type_with_a_hint_is_refused_by_the_key(kvctl: Run, hint: dict[str, Any]) -> None:
    outcome = kvctl("size", "-", stdin=json.dumps(PLAIN | hint))
    assert outcome.code == 1
    assert next(iter(hint)) in outcome.err
    assert outcome.out == ""


@pytest.mark.parametrize("off", [{"sliding_window": None}, {"use_sliding_window": False}, {"kv_lora_rank": None}, {"full_attention_interval": 0},
                                 {"layer_types": ["full_attention"] * 4}, {"architectures": ["BrandNewForCausalLM"]},
                                 {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2},
                                 {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "vocab_size": 9,
                                  "intermediate_size": 9, "hidden_act": "silu", "attention_bias": True, "num_experts": 8,
                                  "moe_intermediate_size": 9, "use_qk_norm": True, "logit_scale": 0.5}])  # fmt: skip
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


def test_an_unknown_wrapper_is_read_through_only_if_nothing_else_is_said(kvctl: Run) -> None:
    wrapper = {"model_type": "new_vlm", "text_config": LLAMA, "vision_config": {"num_hidden_layers": 2}}
    assert one(kvctl, wrapper, "--ctx", "1000")["kv_bytes"] == 1000 * 131_072
    for extra in (
        {"sliding_window": 128},
        {"cross_attention_layers": [1]},
        {"llm_config": LLAMA},
        {"talker_config": LLAMA | {"vocab_size": 9}},
    ):
        outcome = kvctl("size", "-", stdin=json.dumps(wrapper | extra))
        assert outcome.code == 1
        assert next(iter(extra)) in outcome.err


# -- what a real class would refuse -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"num_key_value_heads": 64}, "num_key_value_heads is 64"),
        ({"hidden_size": 4097}, "hidden_size 4097 does not split"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1,000,000,000"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 32 layers"),
        ({"layer_types": ["odd"] * 32}, "layer_types holds 'odd'"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'"),
        ({"model_type": "gemma3n_text", "num_hidden_layers": 10, "num_kv_shared_layers": 6, "head_dim": 128},
         "no full_attention layer is left to share from"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_by_name(kvctl: Run, change: dict[str, Any], part: str) -> None:
    outcome = kvctl("size", "-", "--ctx", "1000", stdin=json.dumps(LLAMA | change))
    assert outcome.code == 1
    assert part in outcome.err
    assert outcome.out == ""


def test_a_wrapper_without_a_language_model_is_refused(kvctl: Run) -> None:
    outcome = kvctl("size", "-", stdin='{"model_type": "llava"}')
    assert outcome.code == 1
    assert "text_config is missing" in outcome.err


def test_transformers_slides_wherever_a_file_names_a_window(kvctl: Run) -> None:
    # Measured in transformers 5.24: 4 layers, window 8, 24 tokens: 7 · (32 + 8) · 4 bytes a layer.
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
              "dtype": "float32", "sliding_window": 8}  # fmt: skip
    assert one(kvctl, config, "--ctx", "24", "--engine", "transformers")["kv_bytes"] == 4480
    assert one(kvctl, config, "--ctx", "24")["kv_bytes"] == 4 * 24 * 40 * 4


def test_transformers_keeps_the_models_dtype(kvctl: Run) -> None:
    outcome = kvctl("size", "-", "--engine", "transformers", "--kv-dtype", "fp8", stdin=json.dumps(LLAMA))
    assert outcome.code == 2
    assert "in the model's dtype, bf16" in outcome.err


def test_a_state_dtype_that_the_config_names(kvctl: Run) -> None:
    config = {"model_type": "qwen3_next", "dtype": "bfloat16", "num_hidden_layers": 4, "hidden_size": 64,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2,
              "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
              "mamba_ssm_dtype": "bfloat16"}  # fmt: skip
    for engine, width in (("ideal", 2), ("transformers", 4)):
        rows = {row["kind"]: row["bytes"] for row in one(kvctl, config, "--ctx", "9", "--engine", engine)["layers"]}
        assert rows["recurrent_state"] == 3 * 4 * 16 * 24 * width


def test_one_more_token_of_a_beam_search_is_one_for_every_beam(kvctl: Run) -> None:
    assert one(kvctl, LLAMA, "--ctx", "1000", "--beams", "5")["kv_bytes_per_token"] == 5 * 131_072


def test_a_number_with_a_comma_is_not_two(kvctl: Run) -> None:
    outcome = kvctl("size", "-", "--ctx", "131,072", stdin=json.dumps(LLAMA))
    assert outcome.code == 2
    assert "131072" in outcome.err


def test_two_folders_of_one_name_stay_apart(kvctl: Run, tmp_path: Any) -> None:
    for parent, heads in (("a", 8), ("b", 4)):
        folder = tmp_path / parent / "model"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(LLAMA | {"num_key_value_heads": heads}))
    outcome = kvctl("size", str(tmp_path / "a" / "model"), str(tmp_path / "b" / "model"), "--ctx", "4k")
    assert "/a/model" in outcome.out
    assert "/b/model" in outcome.out


def test_what_if_drops_the_published_weights(kvctl: Run) -> None:
    outcome = kvctl("size", "Qwen3-32B", "--ctx", "4k", "--set", "num_hidden_layers=32", "--json")
    assert outcome.json["results"][0]["weights"] is None


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "q8_0", "int4", "nvfp4", "fp8_per_token_head"])
def test_formulas_evaluate_to_their_bytes(kvctl: Run, fmt: str) -> None:
    import re

    for model in (
        "DeepSeek-V3",
        "gemma-3-27b-it",
        "Qwen3-32B",
        "Qwen3-Next-80B-A3B-Instruct",
        "Jamba-v0.1",
        "falcon-7b",
    ):
        result = kvctl("size", model, "--ctx", "4096", "-n", "3", "--kv-dtype", fmt, "--explain", "--json").json[
            "results"
        ][0]
        assert result["formulas"]
        for formula in result["formulas"]:
            left, _, right = formula["text"].rpartition(" = ")
            text = re.sub(r"B of keys \+ ([\d,]+) B of values:[^)]*", r"+ \1", left)
            text = re.sub(
                r"\(a row of [^)]*\)|\(K and V\)|\(K and V in one\)|\((?:fp32|bf16|fp16)\)|head dim", "", text
            )
            text = re.sub(r"(?<=\d),(?=\d{3})", "", text).replace("×", "*").replace("−", "-")
            text = re.sub(r"min\((\d+), (\d+)\)", lambda m: str(min(int(m[1]), int(m[2]))), text)
            text = re.sub(r"[a-zA-Z]+", "", text)
            assert round(eval(text)) == int(right.replace(",", "").removesuffix(" B")), formula["text"]
        assert sum(formula["bytes"] for formula in result["formulas"]) == result["kv_bytes"]


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("16,000,000,000", 16 * 10**9), ("1,024GiB", 2**40), ("1_000", 1000), ("1,5GiB", None), ("1,,2", None), ("0,64", None),
     ("1,2345", None), ("1,234,5", None)],
)  # fmt: skip
def test_a_comma_that_may_be_a_decimal_point_is_refused(kvctl: Run, text: str, bytes_: int | None) -> None:
    outcome = kvctl("size", "Qwen3-8B", "--ctx", "4k", "--engine", "vllm", "--kv-budget", text, "--json")
    if bytes_ is None:
        assert (outcome.code, outcome.out) == (2, "")
        assert "is not an amount of memory" in outcome.err
    else:
        assert outcome.json["results"][0]["allocation"]["kv_budget_bytes"] == bytes_
