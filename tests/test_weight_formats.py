"""Formats of weights: against bitsandbytes (captured, and live), vLLM's shapes (test_weights) and calculations by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvctl.errors import ConfigError, UsageError
from kvctl.parameters import parameters
from kvctl.quantization import scheme
from kvctl.tensors import Tensor, tensor
from kvctl.weight_formats import FORMATS, convert, weight_format

DATA = json.loads((Path(__file__).parent / "data" / "weights.json").read_text("utf-8"))
CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 320,
}  # fmt: skip


def total(tensors: tuple[Tensor, ...]) -> int:
    return sum(t.total for t in tensors)


@pytest.mark.parametrize(("config", "name", "expected"), DATA["bitsandbytes"])
def test_bitsandbytes(config: dict[str, Any], name: str, expected: int) -> None:
    assert total(convert(parameters(config), weight_format(name))[0]) == expected


@pytest.mark.engine
@pytest.mark.parametrize("name", ["int8", "nf4", "fp4", "nf4-dq"])
def test_live_bitsandbytes(name: str, tmp_path: Path) -> None:
    """A tiny model, quantised for real: every byte of its parameters and of what belongs to them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("bitsandbytes")
    settings = {
        "int8": {"load_in_8bit": True},
        "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        "nf4-dq": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    }[name]
    config = {**CONFIG, "intermediate_size": 416, "vocab_size": 200, "pad_token_id": 0, "tie_word_embeddings": False}
    built = transformers.LlamaConfig.from_dict(config)
    transformers.AutoModelForCausalLM.from_config(built, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=transformers.BitsAndBytesConfig(**settings),
        dtype=torch.bfloat16,
        device_map="cpu",
    )
    held = 0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        nested = getattr(state, "state2", None)
        parts = [parameter, getattr(parameter, "SCB", None)]
        parts += [getattr(state, part, None) for part in ("absmax", "code", "offset")]
        parts += [getattr(nested, part, None) for part in ("absmax", "code")]
        held += sum(part.numel() * part.element_size() for part in parts if part is not None)
    assert total(convert(parameters(config), weight_format(name))[0]) == held
    # What the saved checkpoint names itself is read back as the same scheme.
    model.save_pretrained(tmp_path / "saved")
    found = scheme(json.loads((tmp_path / "saved" / "config.json").read_text("utf-8")))
    assert found is not None
    assert total(convert(parameters(config), found.format, found.keeps())[0]) == held


def one(rows: int, columns: int) -> tuple[Tensor, ...]:
    return (tensor("model.layers.N.mlp.up_proj.weight", (rows, columns), "BF16", (0,)),)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # 4,096 × 11,008: n = 45,088,768 weights.
        ("bf16", 2 * 45_088_768),
        ("fp8", 45_088_768 + 4),
        ("fp8-block", 45_088_768 + 4 * 32 * 86),
        ("fp8-channel", 45_088_768 + 2 * 4096),
        ("int8", 45_088_768 + 4 * 4096),
        # n / 2 + n / 64 float32 + the code book of 16 float32.
        ("nf4", 22_544_384 + 4 * 704_512 + 64),
        # scales in 8 bits, a float32 for 256 of them, a code book of 256 float32, one offset.
        ("nf4-dq", 22_544_384 + 704_512 + 4 * 2752 + 64 + 1024 + 4),
        # 86 groups of 128 inputs: 4-bit weights, 4-bit zeros and fp16 scales for each of the 4,096 outputs.
        ("awq", 22_544_384 + 86 * 4096 // 2 + 2 * 86 * 4096),
        # the same, and an index of 4 bytes for every input.
        ("gptq", 22_544_384 + 86 * 4096 // 2 + 2 * 86 * 4096 + 4 * 11_008),
        # symmetric, with the shape in two int64.
        ("w4a16", 22_544_384 + 2 * 86 * 4096 + 16),
        ("mxfp4", 22_544_384 + 45_088_768 // 32),
        ("nvfp4", 22_544_384 + 45_088_768 // 16 + 4 + 4),
    ],
)
def test_one_layer_by_hand(name: str, expected: int) -> None:
    tensors, notes = convert(one(4096, 11_008), weight_format(name))
    assert total(tensors) == expected
    assert notes == ()


def test_blocks_are_rounded_up() -> None:
    # DeepSeek-V3's kv_a_proj_with_mqa is [576, 7168]: 4.5 × 56 blocks of 128, published as [5, 56].
    down = (tensor("model.layers.N.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), "BF16", (0,)),)
    assert [t.shape for t in convert(down, weight_format("fp8-block"))[0]] == [(576, 7168), (5, 56)]


def test_awq_takes_smaller_groups_or_leaves_a_layer() -> None:
    # 11,008 + 32 divides by 32 alone; 11,000 by none of 128, 64 and 32.
    tensors, notes = convert(one(4096, 11_040), weight_format("awq"))
    assert [t.shape for t in tensors] == [(11_040, 512), (345, 512), (345, 4096)]
    assert notes == ()
    tensors, notes = convert(one(4096, 11_000), weight_format("awq"))
    assert [(t.dtype, t.bytes) for t in tensors] == [("F16", 2 * 4096 * 11_000)]
    assert "leaves as they are: up_proj (4,096 × 11,000)" in notes[0]


def test_what_stays() -> None:
    config = {
        **CONFIG, "model_type": "qwen2_moe", "num_experts": 4, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 192, "decoder_sparse_step": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    tensors = parameters(config)
    for fmt in FORMATS:
        kept = {t.name.split(".")[-2] for t in convert(tensors, fmt)[0] if t.dtype in ("BF16", "F16", "F32")}
        assert {"embed_tokens", "lm_head", "norm", "input_layernorm", "gate"} <= kept
    stored, notes = convert(tensors, weight_format("nf4"))
    experts = [t for t in stored if "experts" in t.name.split(".")]
    assert {t.dtype for t in experts} == {"BF16"}
    assert "leaves the experts" in notes[0]
    assert {
        t.dtype for t in convert(tensors, weight_format("nvfp4"))[0] if t.name.endswith("experts.N.up_proj.weight")
    } == {"U8"}


def test_gpt_oss_is_mxfp4_or_whole() -> None:
    config = {
        "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
    }  # fmt: skip
    tensors = parameters(config)
    shapes = {t.name.rpartition(".")[2]: t.shape for t in convert(tensors, weight_format("mxfp4"))[0]}
    # As in the published checkpoints: blocks of 16 bytes for 32 inputs, [experts, outputs, blocks, 16].
    assert shapes["gate_up_proj_blocks"] == (4, 192, 2, 16)
    assert shapes["down_proj_scales"] == (4, 64, 3)
    with pytest.raises(ConfigError, match="fused experts"):
        convert(tensors, weight_format("awq"))


def test_names() -> None:
    assert weight_format("BFloat16").name == "bf16"
    assert len({fmt.name for fmt in FORMATS}) == len(FORMATS)
    with pytest.raises(UsageError, match="unknown format 'q4_k_m'"):
        weight_format("q4_k_m")


# -- quantization_config ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
         "awq, 4 bits in groups of 128"),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "gptq, 8 bits"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8, 8 bits in blocks of 128 × 128"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8, 8 bits"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
         "bitsandbytes, 4 bits in groups of 64"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4, 4 bits in groups of 32"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, "modelopt, 4 bits in groups of 16"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group",
                                                           "group_size": 32, "symmetric": True}}}},
         "compressed-tensors, 4 bits in groups of 32"),
    ],
)  # fmt: skip
def test_schemes(facts: dict[str, Any], words: str) -> None:
    found = scheme({"model_type": "llama", "quantization_config": facts})
    assert found is not None
    assert found.words == words


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"quant_method": "aqlm"}, "names 'aqlm'"),
        ({"quant_method": 5}, "names '5'"),
        ([], "not an object"),
        ({"quant_method": "awq", "bits": "four"}, "bits is 'four', not a whole number"),
        ({"quant_method": "awq", "bits": 3}, "awq of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}, "rules by module"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "not a list of names"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "which layers modelopt left"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": []}, "MIXED_PRECISION"),
        ({"quant_method": "bitsandbytes"}, "neither 4 nor 8 bits"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}}, "several groups"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["re:.*"], "weights": {}}}},
            "Linear",
        ),
    ],
)
def test_schemes_that_are_refused(facts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scheme({"model_type": "llama", "quantization_config": facts})


@pytest.mark.parametrize(
    ("pattern", "module", "layer", "expected"),
    [
        ("lm_head", "lm_head", 0, True),
        ("gate", "model.layers.N.mlp.gate", 3, True),
        ("gate", "model.layers.N.mlp.gate_proj", 3, False),
        ("model.layers.3.mlp.gate", "model.layers.N.mlp.gate", 3, True),
        ("model.layers.3.mlp.gate", "model.layers.N.mlp.gate", 13, False),
        ("model.layers.*.self_attn", "model.layers.N.self_attn.q_proj", 3, True),
        ("model.layers.*.self_attn*", "model.layers.N.mlp.up_proj", 3, False),
        ("re:.*mlp.gate$", "model.layers.N.mlp.gate", 3, True),
        ("re:.*mlp.gate$", "model.layers.N.mlp.gate_proj", 3, False),
        ("model.language_model.layers.0*", "model.layers.N.mlp.up_proj", 0, True),
    ],
)
def test_excluded(pattern: str, module: str, layer: int, expected: bool) -> None:
    facts = {"quant_method": "fp8", "modules_to_not_convert": [pattern]}
    found = scheme({"quantization_config": facts})
    assert found is not None
    assert found.keeps()(module, layer) is expected


@pytest.mark.parametrize("pattern", ["re:(a+)+$", "re:.*.*.*.*.*x", "re:[", "re:" + "a" * 600])
def test_hostile_patterns(pattern: str) -> None:
    found = scheme({"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": [pattern]}})
    assert found is not None
    keeps = found.keeps()
    with pytest.raises(ConfigError, match="quantization_config has a pattern"):
        keeps("model.layers.N.mlp.up_proj", 0)


def test_excluded_layers_stay() -> None:
    facts = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.1.mlp.down_proj"]}
    found = scheme({**CONFIG, "quantization_config": facts})
    assert found is not None
    stored, _ = convert(parameters(CONFIG), found.format, found.keeps())
    down = {t.layers: t.dtype for t in stored if t.name.endswith("down_proj.weight")}
    assert down == {(0,): "F8_E4M3", (1,): "BF16"}
