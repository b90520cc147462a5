"""Scales of a cache that a checkpoint brings, under every name; and which flags and warnings follow for engines."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from kvctl.errors import ConfigError, UsageError
from kvctl.sources.kv_scales import FoundScales, of_folder, of_names, spelling_of
from kvctl.weights.kv_engines import reads, use

LLM_COMPRESSOR = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {
    "num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}}  # fmt: skip
PER_HEAD = LLM_COMPRESSOR | {
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head", "symmetric": True}
}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
}
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
QUARK = {"quant_method": "quark", "export": {"kv_cache_group": ["*k_proj", "*v_proj"]}}


def save(folder: Path, tensors: dict[str, tuple[str, list[int], bytes]], facts: Any = None) -> Path:
    """A safetensors file byte by byte, as the format's description has it."""
    folder.mkdir(exist_ok=True)
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    config = {"model_type": "llama"} | ({} if facts is None else {"quantization_config": facts})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model.layers.3.self_attn.k_scale", ("k_scale", "k")),  # llm-compressor
        ("model.layers.3.self_attn.v_scale", ("k_scale", "v")),
        ("model.layers.3.self_attn.attn.v_scale", ("attn.k_scale", "v")),  # vLLM's own
        ("model.layers.3.self_attn.k_proj.k_scale", ("k_proj.k_scale", "k")),  # ModelOpt
        ("backbone.layers.3.mixer.v_proj.v_scale", ("k_proj.k_scale", "v")),  # Nemotron-H
        ("model.layers.3.self_attn.qkv_proj.k_scale", ("qkv_proj.k_scale", "k")),
        ("model.layers.3.self_attn.qkqkv_proj.v_scale", ("qkv_proj.k_scale", "v")),
        ("model.layers.3.self_attn.k_proj.output_scale", ("k_proj.output_scale", "k")),  # Quark
        ("model.layers.3.self_attn.kv_scale", ("kv_scale", "kv")),  # AutoFP8
        ("model.layers.3.self_attn.v_cache.scale", ("k_cache.scale", "v")),  # Hunyuan
        # Scales of weights and inputs are not the cache's.
        ("model.layers.3.self_attn.k_proj.weight_scale", None),
        ("model.layers.3.self_attn.k_proj.input_scale", None),
        ("model.layers.3.self_attn.k_proj.scales", None),
        ("model.layers.3.self_attn.q_proj.output_scale", None),
        ("model.layers.3.self_attn.q_scale", None),
        ("model.layers.3.self_attn.k_proj.v_scale", ("k_scale", "v")),
        ("model.layers.3.mlp.down_proj.weight_scale_inv", None),
    ],
)
def test_spellings(name: str, wanted: tuple[str, str] | None) -> None:
    assert spelling_of(name) == wanted


def test_values_of_every_dtype(tmp_path: Path) -> None:
    # 0.15625 = 5/32 = 1.25 × 2^-3 fits all: bf16 0x3E20, fp16 0x3100, fp32 0x3E200000.
    folder = save(tmp_path / "m", {
        "model.layers.0.self_attn.q_proj.weight": ("BF16", [2], b"\xff\xff\xff\xff"),
        "model.layers.0.self_attn.k_scale": ("BF16", [1], bytes.fromhex("203e")),
        "model.layers.0.self_attn.v_scale": ("F16", [], bytes.fromhex("0031")),
        "model.layers.11.self_attn.k_scale": ("F32", [1], bytes.fromhex("0000203e")),
        "model.layers.11.self_attn.v_scale": ("F64", [2, 1, 1], struct.pack("<2d", 0.15625, 3.0)),
    }, LLM_COMPRESSOR)  # fmt: skip
    found = of_folder(folder)
    assert [(scale.layer, scale.half, scale.values) for scale in found.scales] == [
        (0, "k", (0.15625,)), (0, "v", (0.15625,)), (11, "k", (0.15625,)), (11, "v", (0.15625, 3.0)),
    ]  # fmt: skip
    assert (found.method, found.declared, found.layers, found.per_head) == ("compressed-tensors", "fp8", (0, 11), True)
    assert not found.placeholders
    assert found.words == "scales of the cache in 2 layers (k_scale: one a KV head); its configuration says fp8"


def test_ones_and_broken_ones_are_told(tmp_path: Path) -> None:
    one, zero = struct.pack("<f", 1.0), struct.pack("<f", 0.0)
    tensors = {f"model.layers.0.self_attn.{half}_scale": ("F32", [1], one) for half in "kv"}
    found = of_folder(save(tmp_path / "m", tensors, LLM_COMPRESSOR))
    assert found.placeholders
    assert "all 1.0" in found.words
    tensors["model.layers.1.self_attn.k_scale"] = ("F32", [1], zero)
    found = of_folder(save(tmp_path / "m", tensors, LLM_COMPRESSOR))
    assert found.broken == "model.layers.1.self_attn.k_scale"
    assert not found.placeholders
    tensors["model.layers.1.self_attn.k_scale"] = ("I32", [1], zero)
    with pytest.raises(ConfigError, match="1 numbers of I32"):
        of_folder(save(tmp_path / "m", tensors, LLM_COMPRESSOR))
    path = tmp_path / "m" / "model.safetensors"
    tensors["model.layers.1.self_attn.k_scale"] = ("F32", [1], zero)
    save(tmp_path / "m", tensors, LLM_COMPRESSOR)
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ConfigError, match="ends before"):
        of_folder(tmp_path / "m")


def test_what_configurations_declare(tmp_path: Path) -> None:
    found = of_names([], {"quantization_config": LLM_COMPRESSOR})
    assert (found.method, found.declared, found.dynamic) == ("compressed-tensors", "fp8", False)
    dynamic = LLM_COMPRESSOR | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": True}}
    found = of_names([], {"text_config": {"quantization_config": dynamic}})
    assert (found.declared, found.dynamic) == ("fp8", True)
    assert "found while it runs" in found.words
    assert of_names([], {"quantization_config": QUARK}).declared == "fp8"
    assert of_names([], {"quantization_config": FP8}).declared is None
    assert of_names([], {}).method is None
    # Older ModelOpt says it in a file of its own.
    folder = save(tmp_path / "m", {"model.layers.0.self_attn.k_proj.k_scale": ("F32", [], struct.pack("<f", 0.5))})
    assert of_folder(folder).declared is None
    inner = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(inner))
    found = of_folder(folder)
    assert (found.method, found.declared, found.spellings) == ("modelopt", "fp8", ("k_proj.k_scale",))


def checkpoint(facts: Any = None, scales: bool = True, per_head: bool = False, value: float = 0.5) -> FoundScales:
    names = [f"model.layers.0.self_attn.{half}_scale" for half in "kv"] if scales else []
    found = of_names(names, {} if facts is None else {"quantization_config": facts})
    values = (value, value) if per_head else (value,)
    return found.replace(scales=tuple(scale.replace(values=values) for scale in found.scales))


def spelled(name: str, facts: Any) -> FoundScales:
    names = [f"model.layers.0.self_attn.{name.format(half=half)}" for half in "kv"]
    found = of_names(names, {"quantization_config": facts})
    return found.replace(scales=tuple(scale.replace(values=(0.5,)) for scale in found.scales))


def test_who_reads_them() -> None:
    """As the loaders of vLLM 0.32, SGLang 0.5.23 have it (see kv_write)."""
    rows = [
        (checkpoint(LLM_COMPRESSOR), True, True, None),
        (checkpoint(PER_HEAD, per_head=True), True, False, None),
        (checkpoint(MODELOPT), True, True, True),
        (checkpoint(FP8), True, True, None),
        (checkpoint(QUARK), True, True, None),
        (checkpoint({"quant_method": "awq"}), False, False, None),
        (checkpoint(), False, False, None),
        (checkpoint(LLM_COMPRESSOR, scales=False), False, False, False),
    ]
    rows += [
        (spelled("{half}_proj.output_scale", FP8), True, True, None),
        (spelled("{half}_proj.output_scale", LLM_COMPRESSOR), False, True, None),
        (spelled("{half}_proj.{half}_scale", MODELOPT), True, True, True),
        (spelled("attn.{half}_scale", LLM_COMPRESSOR), True, False, None),
        (spelled("qkv_proj.{half}_scale", LLM_COMPRESSOR), True, False, None),
    ]
    for found, *wanted in rows:
        assert [reads(engine, found) for engine in ("vllm", "sglang", "tensorrt-llm")] == wanted, found


def test_flags_of_every_engine() -> None:
    plain, scaled = checkpoint(scales=False), checkpoint(LLM_COMPRESSOR)
    made = use("llama.cpp", "q8_0", plain)
    assert (made.flags, made.warnings) == (("-ctk q8_0", "-ctv q8_0", "-fa on"), ())
    assert use("llama.cpp", "fp16", plain).flags == ("-ctk f16", "-ctv f16")
    assert use("llama.cpp", "int4", plain).format == "q4_0"
    assert use("ollama", "q4_0", plain).flags == ("OLLAMA_KV_CACHE_TYPE=q4_0", "OLLAMA_FLASH_ATTENTION=1")
    made = use("vllm", "fp8", plain)
    assert made.flags == ("--kv-cache-dtype fp8",)
    assert made.warnings == (
        "vLLM runs fp8 with scale 1.0: the checkpoint has no scales of the cache; "
        "kvctl quantize MODEL --kv fp8 -o DIR writes calibrated ones",
    )
    assert use("vllm", "fp8", scaled) == made.replace(flags=(), warnings=())
    # Where none can be written, nobody is told to.
    for method, said in (
        ("awq", "no place for any in one of method awq"),
        ("gguf", "no place"),
        ("quark", "the tool of quark writes"),
    ):
        (warning,) = use("vllm", "fp8", checkpoint({"quant_method": method}, scales=False)).warnings
        assert said in warning
        assert "kvctl quantize" not in warning
    made = use("sglang", "fp8", checkpoint(FP8))
    assert (made.flags, made.warnings) == (("--kv-cache-dtype fp8_e4m3",), ())
    assert use("sglang", "fp8", scaled).flags == ()
    made = use("sglang", "fp8", checkpoint(PER_HEAD, per_head=True))
    assert made.flags == ("--kv-cache-dtype fp8_e4m3",)
    assert "no scales a head" in made.warnings[0]
    assert "FlashAttention" in use("vllm", "fp8", checkpoint(PER_HEAD, per_head=True)).warnings[0]
    assert "of method awq" in use("vllm", "fp8", checkpoint({"quant_method": "awq"})).warnings[0]
    assert "declares no cache in fp8" in use("vllm", "fp8", checkpoint()).warnings[0]
    assert "all scales of the checkpoint" in use("vllm", "fp8", checkpoint(LLM_COMPRESSOR, value=1.0)).warnings[0]
    assert "damaged" in use("vllm", "fp8", checkpoint(LLM_COMPRESSOR, value=-1.0)).warnings[0]
    made = use("tensorrt-llm", "fp8", scaled)
    assert made.flags == ("--kv_cache_dtype fp8",)
    assert "not known to kvctl" in made.warnings[0]
    # Formats with scales of their own say nothing of the checkpoint's.
    assert use("vllm", "int8", plain).warnings == ()
    assert use("vllm", "int8", plain).flags == ("--kv-cache-dtype int8_per_token_head",)
    with pytest.raises(UsageError, match=r"no cache type of llama\.cpp"):
        use("llama.cpp", "fp8", plain)
    with pytest.raises(UsageError, match="no flag for the format"):
        use("transformers", "fp8", plain)
