"""The family table: everything in it exists, everything that reads a configuration is in it."""

from __future__ import annotations

import inspect
import pkgutil
from collections import Counter
from importlib import import_module
from typing import Any

import pytest

import kvctl.families as families
from kvctl.engines import IDEAL, TRANSFORMERS
from kvctl.errors import ConfigError
from kvctl.families.attention import PATTERNS
from kvctl.families.fields import Fields, model_type_facts
from kvctl.families.patterns import FULL, SLIDING
from kvctl.formats import FP32
from kvctl.model import build_spec
from kvctl.size import SizePlan, size
from kvctl.sources import Found
from kvctl.spec import Provenance

READERS = {family.reader for family in families.FAMILIES}


def readers_in_modules() -> dict[str, Any]:
    out = {}
    for info in pkgutil.iter_modules(families.__path__):
        module = import_module(f"kvctl.families.{info.name}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            hints = function.__annotations__
            if (
                function.__module__ == module.__name__
                and list(hints) == ["f", "return"]
                and hints["return"] == "Layers"
            ):
                out[f"{info.name}:{name}"] = function
    return out


def test_every_row_names_a_reader() -> None:
    for reader in READERS:
        assert callable(families._load(reader)), reader


def test_every_reader_is_in_the_table_or_serves_one_that_is() -> None:
    served = {"attention:decoder_only_bert", "latent:latent", "unknown:read_unknown"}
    assert set(readers_in_modules()) - READERS - served == set()


def test_a_type_is_listed_once() -> None:
    counts = Counter(model_type for family in families.FAMILIES for model_type in family.types)
    assert [model_type for model_type, count in counts.items() if count > 1] == []


def test_patterns_belong_to_types_that_are_read() -> None:
    assert [model_type for model_type in PATTERNS if families.find_reader(model_type) is None] == []


@pytest.mark.parametrize(
    ("model_type", "extra", "expected"),
    [
        # The rules of the configuration classes of transformers 5.24, for six layers.
        ("gemma2", {}, [SLIDING, FULL] * 3),
        ("gemma3_text", {}, [SLIDING] * 5 + [FULL]),
        ("gemma3_text", {"sliding_window_pattern": 2}, [SLIDING, FULL] * 3),
        ("cohere2", {}, [SLIDING, SLIDING, SLIDING, FULL, SLIDING, SLIDING]),
        ("exaone4", {"sliding_window_pattern": "LLG"}, [SLIDING, SLIDING, FULL] * 2),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}, [FULL] * 4 + [SLIDING] * 2),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 4}, [FULL] * 6),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 4}, [SLIDING, FULL, SLIDING, FULL, FULL, FULL]),
        ("cwm", {}, [FULL, SLIDING, SLIDING, SLIDING, FULL, SLIDING]),
        ("muse_glimmer_text", {}, [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL]),
        ("flint", {}, [FULL, FULL, SLIDING, SLIDING, SLIDING, FULL]),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8}, [FULL, FULL, FULL, SLIDING, FULL, FULL]),
        ("mimo_v2_flash", {}, [FULL, SLIDING, SLIDING, SLIDING, SLIDING, FULL]),
    ],
)  # fmt: skip
def test_patterns(model_type: str, extra: dict[str, Any], expected: list[str]) -> None:
    from kvctl.families.patterns import layer_kinds, mimo_v2

    fields = Fields({"model_type": model_type, "num_hidden_layers": 6, **extra})
    assert layer_kinds(fields, PATTERNS.get(model_type, mimo_v2)) == expected


def test_a_file_leaves_out_what_its_class_fills_in() -> None:
    assert model_type_facts("gpt2").aliases["num_hidden_layers"] == "n_layer"
    assert Fields({"model_type": "gpt2", "n_head": 5}).number("num_attention_heads") == 5
    assert Fields({"model_type": "qwen3"}).number("head_dim") == 128
    assert Fields({"model_type": "deepseek_v3"}).number("kv_lora_rank") == 512


# -- contradictions, measured in transformers 5.24 (fp32; tokens and encoder positions as noted) --------


def total(config: dict[str, Any], tokens: int, encoder: int) -> int:
    spec = build_spec(Found("case", config, Provenance("local", "case")))
    return size(spec, tokens, SizePlan(TRANSFORMERS, dtype=FP32, encoder_tokens=encoder or None)).kv_bytes


MOONSHINE = {
    "model_type": "moonshine", "architectures": ["MoonshineForConditionalGeneration"], "is_encoder_decoder": True,
    "hidden_size": 64, "intermediate_size": 64, "decoder_num_hidden_layers": 4, "encoder_num_hidden_layers": 2,
    "encoder_num_attention_heads": 4, "encoder_num_key_value_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize("decoder", [(4, 4), (1, 4), (8, 2)])
def test_moonshine_decoders_have_the_heads_of_the_encoder(decoder: tuple[int, int]) -> None:
    config = MOONSHINE | {"decoder_num_attention_heads": decoder[0], "decoder_num_key_value_heads": decoder[1]}
    # 4 layers · 2 · 4 heads · 16 · 4 B · (24 + 9)
    assert total(config, 24, 9) == 67_584


PIX2STRUCT = {
    "model_type": "pix2struct", "is_encoder_decoder": True,
    "text_config": {"model_type": "pix2struct_text_model", "hidden_size": 64, "d_kv": 16, "num_heads": 4, "num_layers": 4},
}  # fmt: skip


def test_pix2struct_has_one_count_of_layers() -> None:
    config = PIX2STRUCT | {"text_config": PIX2STRUCT["text_config"] | {"num_decoder_layers": 1}}  # type: ignore[operator]
    # 4 layers · 2 · 64 · 4 B · (24 + 14)
    assert total(config, 24, 14) == total(PIX2STRUCT, 24, 14) == 77_824


def test_pix2struct_heads_that_do_not_fill_its_width_are_refused() -> None:
    config = PIX2STRUCT | {"text_config": PIX2STRUCT["text_config"] | {"num_heads": 1}}  # type: ignore[operator]
    with pytest.raises(ConfigError, match="is not hidden_size 64"):
        total(config, 24, 14)


# -- published files that say things in their own way ---------------------------------------------------

GQA = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
ROW = 2 * 2 * 32 * 2  # K and V · 2 KV heads · head dim 32 · 2 B


def at_100(config: dict[str, Any]) -> int:
    spec = build_spec(Found("case", config, Provenance("local", "case")))
    return size(spec, 100, SizePlan(IDEAL)).kv_bytes


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        # Vision language models with everything in one place
        ({**GQA, "model_type": "minicpmv", "architectures": ["MiniCPMV"], "query_num": 64, "slice_mode": True}, 4),
        ({**GQA, "model_type": "llava_qwen", "mm_hidden_size": 1152, "use_sliding_window": False,
          "sliding_window": 4096, "max_window_layers": 28}, 4),
        ({**GQA, "model_type": "llava_llama", "mm_vision_select_layer": -2}, 4),
        ({**GQA, "model_type": "bailing_moe_v2", "score_function": "sigmoid", "num_experts": 8}, 4),
        # NVILA keeps its model under llm_cfg
        ({"model_type": "llava_llama", "llm_cfg": {**GQA, "model_type": "qwen2"}}, 4),
        # Wrappers with words that only sound like a cache of another kind
        ({"model_type": "brand_new_vl", "downsample_ratio": 0.5, "pixel_shuffle_ratio": 0.5,
          "conversation_formatter_class": "X", "quantization_config": {"modules_to_not_convert": ["lm_head"]},
          "projector_config": {"num_latents": 64, "conv_kernel": 3}, "text_config": {**GQA, "model_type": "qwen2"}}, 4),
        # Grok 2 is published as "git"
        ({**GQA, "model_type": "git", "architectures": ["Grok1ForCausalLM"]}, 4),
        # The kinds of layers that predict further tokens stand at the end of the list
        ({**GQA, "model_type": "step3p5", "head_dim": 32, "num_attention_groups": 2, "num_nextn_predict_layers": 2,
          "layer_types": ["full_attention"] * 6}, 4),
    ],
)  # fmt: skip
def test_plain_attention_in_other_words(config: dict[str, Any], layers: int) -> None:
    assert at_100(config) == 100 * layers * ROW


def test_deci_counts_kv_heads_of_each_layer() -> None:
    config = {**GQA, "model_type": "deci", "num_key_value_heads_per_layer": [4, 2, 1, 1]}
    assert at_100(config) == 100 * 2 * (4 + 2 + 1 + 1) * 32 * 2


def test_santacoder_has_one_kv_head_where_its_own_code_runs() -> None:
    config = {"model_type": "gpt2", "attention_head_type": "multiquery", "n_layer": 2, "n_head": 4, "n_embd": 64,
              "torch_dtype": "float32"}  # fmt: skip
    assert at_100(config) == 100 * 2 * 2 * 16 * 4
    assert total(config, 100, 0) == 4 * 100 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    "hint",
    [
        {"kv_norm_sliding_window": 128}, {"attention_expert_window": 64}, {"moe_kv_heads": 2}, {"embedding_kv_share": 2},
        {"norm_recurrent_steps": 3}, {"num_attention_experts": 4, "moe_attention": True}, {"router_layer_skip": True},
        {"vocab_window": 64}, {"tie_layer_groups": 2},
    ],
)  # fmt: skip
def test_unknown_types_with_a_hidden_hint_are_refused(hint: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        at_100({**GQA, "model_type": "brand_new"} | hint)


@pytest.mark.parametrize(
    "extra",
    [
        {"scoring_func": "softmax", "seq_aux": True, "ep_size": 1}, {"unsloth_fixed": True, "lora_r": 8},
        {"query_pre_attn_scalar": 32}, {"_attn_implementation_autoset": True}, {"clip_qkv": 8.0, "qkv_bias": True},
    ],
)  # fmt: skip
def test_unknown_types_with_keys_of_another_matter_are_read(extra: dict[str, Any]) -> None:
    assert at_100({**GQA, "model_type": "brand_new", "head_dim": 32} | extra) == 100 * 4 * ROW
