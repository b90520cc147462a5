"""Parameters that follow from a configuration: against transformers (captured, and live) and published counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvctl.errors import ConfigError
from kvctl.parameters import parameters
from kvctl.parameters.dense import DENSE
from kvctl.quantization import scheme
from kvctl.sources import catalogue
from kvctl.tensors import Tensor
from kvctl.weight_formats import convert

DATA = json.loads((Path(__file__).parent / "data" / "weights.json").read_text("utf-8"))


def counted(tensors: tuple[Tensor, ...], *, buffers: bool = True) -> int:
    """Elements; transformers keeps what corrects the routers in buffers, which are no parameters there."""
    held = ("e_score_correction_bias", "expert_bias")
    return sum(t.elements * t.count for t in tensors if buffers or not t.name.endswith(held))


@pytest.mark.parametrize(("name", "config", "expected"), DATA["transformers"], ids=lambda value: str(value)[:40])
def test_parameters_of_transformers(name: str, config: dict[str, Any], expected: int) -> None:
    tensors = parameters(config)
    # Two of its classes have the corrections among the parameters.
    assert expected in (counted(tensors), counted(tensors, buffers=False)), name


PUBLISHED = {
    # Elements of the checkpoint as the Hub counts them, by hand or from the model's own card.
    "Qwen/Qwen3-32B": 32_762_123_264,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "google/gemma-3-1b-it": 999_885_952,
    "openai/gpt-oss-120b": 116_829_156_672,
    "openai/gpt-oss-20b": 20_914_757_184,
    "MiniMaxAI/MiniMax-M2": 228_689_764_864,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    # Without what corrects its routers, 192 float32 a layer, which its count leaves out.
    "skt/A.X-K1": 518_983_059_456 + 60 * 192,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name: str) -> None:
    if not catalogue.has(name):
        pytest.skip("not in the catalogue")
    found = catalogue.find(name)
    assert counted(parameters(found.config)) == PUBLISHED[name]


def test_deepseek_v3_with_its_drafting_layer_and_scales() -> None:
    # The Hub counts 684,531,386,000 elements, scales among them, and 684,489,845,504 for R1 without scales.
    config = catalogue.find("deepseek-ai/DeepSeek-V3").config
    tensors = parameters(config)
    assert counted(tensors) == 671_026_419_200
    hidden, vocabulary, last = 7168, 129_280, 60
    layer = sum(t.elements * t.each for t in tensors if last in t.layers)
    # The drafting layer: one more layer, a matrix of twice the width, three norms, embeddings and head of its own.
    drafting = layer + 2 * hidden * hidden + 3 * hidden + 2 * vocabulary * hidden
    assert counted(tensors) + drafting == 684_489_845_504
    found = scheme(config)
    assert found is not None
    stored, notes = convert(tensors, found.format, found.keeps())
    assert notes == ()
    scales = sum(t.elements * t.count for t in stored if t.name.endswith("weight_scale_inv"))
    scales += sum(t.elements * t.each for t in stored if t.name.endswith("weight_scale_inv") and last in t.layers)
    assert counted(tensors) + drafting + scales == 684_531_386_000


def test_minimax_m2_5_with_its_scales() -> None:
    # The Hub counts 228,703,644,928 elements for M2.5, scales among them, and 228,689,764,864 for M2 without.
    config = catalogue.find("MiniMaxAI/MiniMax-M2.5").config
    found = scheme(config)
    assert found is not None
    stored, _ = convert(parameters(config), found.format, found.keeps())
    assert counted(stored) == 228_703_644_928


def test_partial_rows_of_the_catalogue_agree_or_are_refused() -> None:
    # Sizes that a partial source leaves out must not come from class defaults.
    for name in catalogue.names():
        found = catalogue.find(name)
        if found.whole:
            continue
        try:
            tensors = parameters(found.config, whole=False)
        except ConfigError:
            continue
        assert {"hidden_size", "vocab_size"} & {*found.config, *found.config.get("text_config", {})}, name
        assert counted(tensors) > 0


def test_unknown_types_have_no_number() -> None:
    with pytest.raises(ConfigError, match="parameters of gpt2 are not known"):
        parameters({"model_type": "gpt2"})
    with pytest.raises(ConfigError, match="parameters of llava beside its language model's are not known"):
        parameters({"model_type": "llava", "text_config": {"model_type": "llama"}})
    text = {"hidden_size": 64, "num_hidden_layers": 2}
    with pytest.raises(ConfigError, match=r"vision_config.hidden_size is missing"):
        parameters({"model_type": "qwen3_vl", "text_config": text})


# -- live ------------------------------------------------------------------------------------------

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2,
    "shared_expert_intermediate_size": 48, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "index_n_heads": 2, "index_head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 1,
}  # fmt: skip
FLAGS = ("attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias", "attention_out_bias", "lm_head_bias",
         "use_qk_norm", "tie_word_embeddings")  # fmt: skip
LIVE = sorted({*DENSE, "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "qwen3_next",
               "qwen3_5_text", "qwen3_5_moe_text"} - {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "glm_moe_dsa"})  # fmt: skip


@pytest.mark.engine
@pytest.mark.parametrize("model_type", LIVE)
@pytest.mark.parametrize("flags", [None, False, True])
def test_live_transformers(model_type: str, flags: bool | None) -> None:
    """Every type, with every flag as its class has it, off, and on."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        pytest.skip("a type of vLLM alone")
    names = set(CONFIG_MAPPING[model_type]().to_dict())
    aliases = getattr(CONFIG_MAPPING[model_type], "attribute_map", {})
    config = {k: v for k, v in SMALL.items() if (k in names or aliases.get(k, "") in names) and k not in aliases}
    config |= {k: v for k, v in SMALL.items() if k in aliases.values()}
    config |= {flag: flags for flag in FLAGS if flags is not None and flag in names}
    if "mlp_layer_types" in names and model_type in ("mellum", "glm4_moe_lite"):
        config["mlp_layer_types"] = ["dense", "sparse", "sparse", "sparse"]
    built = CONFIG_MAPPING[model_type].from_dict({"model_type": model_type, **config})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)
    expected = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    tensors = parameters({"model_type": model_type, **config})
    assert expected in (counted(tensors), counted(tensors, buffers=False))
