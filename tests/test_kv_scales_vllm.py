"""vLLM as the judge: its loader, and its cache on a CPU, with checkpoints whose scales kvctl wrote.

KVCTL_VLLM_PYTHON names an interpreter that has vLLM 0.32 for CPUs, where this one has none.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("safetensors.torch")

import awq_models  # noqa: E402
from test_kv_scales import IDS, loaded, rescaled  # noqa: E402

from kvctl.weights import kv_write  # noqa: E402
from kvctl.weights.kv_calibrate import calibrate  # noqa: E402
from kvctl.weights.kv_scales import HEAD  # noqa: E402

PYTHON = os.environ.get("KVCTL_VLLM_PYTHON") or (sys.executable if importlib.util.find_spec("vllm") else None)
pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON is None, reason="vLLM is not installed, and KVCTL_VLLM_PYTHON names no interpreter that has it"
    ),
]
RUN = """
import json, sys
def main():
    from vllm import LLM, SamplingParams
    folder, dtype, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    llm = LLM(model=folder, dtype="float32", max_model_len=256, enforce_eager=True, kv_cache_dtype=dtype, seed=0,
              enable_prefix_caching=False, skip_tokenizer_init=True)
    def scales(model):
        return {name: [part.kv_cache_dtype, part._k_scale.flatten().tolist(), part._v_scale.flatten().tolist(),
                       part._k_scale_float, part._v_scale_float]
                for name, part in model.named_modules() if hasattr(part, "_k_scale")}
    found = llm.apply_model(scales)[0]
    out = llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False))
    told = [row[token].logprob for row, token in zip(out[0].prompt_logprobs[1:], ids[1:])]
    print("FOUND", json.dumps({"scales": found, "logprobs": told}))
if __name__ == "__main__":
    main()
"""


def vllm(folder: Path, dtype: str, tmp_path: Path, ids: Any = IDS[0]) -> Any:
    assert PYTHON is not None
    (tmp_path / "run.py").write_text(RUN)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "VLLM_TARGET_DEVICE": "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }  # fmt: skip
    done = subprocess.run([PYTHON, str(tmp_path / "run.py"), str(folder), dtype, json.dumps(ids.tolist())],
                          capture_output=True, text=True, timeout=600, env=env)  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert line is not None, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(line.removeprefix("FOUND "))


def save(folder: Path) -> Path:
    """Heads of 32, which vLLM has on CPUs."""
    return awq_models.save(folder, sliding_window=None, hidden_size=128, head_dim=32)


def test_its_layers_hold_what_was_written(tmp_path: Path) -> None:
    source = save(tmp_path / "model")
    big = rescaled(source, tmp_path / "big", 2.0**12, 2.0**12)
    made = calibrate(loaded(big), IDS)
    kv_write.write(big, tmp_path / "kv", made.scales)
    found = vllm(tmp_path / "kv", "auto", tmp_path)
    assert set(found["scales"]) == {f"model.layers.{n}.self_attn.attn" for n in range(2)}
    for layer in made.scales.layers:
        dtype, keys, values, key, value = found["scales"][f"model.layers.{layer.layer}.self_attn.attn"]
        assert dtype == "fp8"
        assert (tuple(keys), tuple(values), key, value) == (layer.keys, layer.values, *layer.keys, *layer.values)
    # Its own cache: with the scales near to fp32, with 1.0 far from it.
    plain = torch.tensor(vllm(big, "auto", tmp_path)["logprobs"])
    unscaled = vllm(big, "fp8", tmp_path)
    assert all(row[1] == [1.0] or row[1] == [] or row[3] == 1.0 for row in unscaled["scales"].values())
    near = (torch.tensor(found["logprobs"]) - plain).abs().mean()
    far = (torch.tensor(unscaled["logprobs"]) - plain).abs().mean()
    assert 0 < near < 0.2 * far


def test_scales_on_top_of_fp8_weights_are_read_and_on_awq_passed_over(tmp_path: Path) -> None:
    """What `declared` and `reads` say of methods."""
    script = """
import json, sys
def main():
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
    from vllm.model_executor.layers.attention import Attention
    rows = {"awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
            "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False},
            "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
            "compressed-tensors": {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "ignore": []}}
    layer = Attention.__new__(Attention)
    out = {}
    for name, facts in rows.items():
        config = get_quantization_config(name).from_config(facts)
        try:
            made = config.get_quant_method(layer, "model.layers.0.self_attn.attn")
        except Exception as error:
            made = repr(error)
        out[name] = isinstance(made, BaseKVCacheMethod)
    print("FOUND", json.dumps(out))
main()
"""
    assert PYTHON is not None
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"VLLM_TARGET_DEVICE": "cpu"}
    done = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True, timeout=300, env=env)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert line is not None, done.stderr[-4000:]
    assert json.loads(line.removeprefix("FOUND ")) == {
        "awq": False,
        "gptq": False,
        "fp8": True,
        "compressed-tensors": True,
    }


def test_names_are_those_that_its_loader_looks_for(tmp_path: Path) -> None:
    script = """
import json
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
names = ["self_attn.k_scale", "self_attn.attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.qkv_proj.k_scale", "self_attn.kv_scale",
         "self_attn.k_cache.scale", "self_attn.k_proj.output_scale"]
print("FOUND", json.dumps([[config.get_cache_scale_mapper()._map_name("model.layers.0." + name) for name in names]
                           for config in (QuantizationConfig, Fp8Config)]))
"""
    assert PYTHON is not None
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"VLLM_TARGET_DEVICE": "cpu"}
    done = subprocess.run([PYTHON, "-c", script], capture_output=True, text=True, timeout=300, env=env)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert line is not None, done.stderr[-4000:]
    plain, fp8 = json.loads(line.removeprefix("FOUND "))
    wanted = "model.layers.0.self_attn.attn.k_scale"
    assert fp8 == [wanted] * 7
    assert plain == [wanted] * 6 + ["model.layers.0.self_attn.k_proj.output_scale"]


def test_scales_a_head(tmp_path: Path) -> None:
    """Its layers hold them; a CPU's cache divides by the largest."""
    source = save(tmp_path / "model")
    made = calibrate(loaded(source), IDS, strategy=HEAD)
    kv_write.write(source, tmp_path / "kv", made.scales)
    found = vllm(tmp_path / "kv", "auto", tmp_path)["scales"]
    for layer in made.scales.layers:
        _, keys, values, key, value = found[f"model.layers.{layer.layer}.self_attn.attn"]
        assert (tuple(keys), tuple(values)) == (layer.keys, layer.values)
        assert len(keys) == 2
        assert (key, value) == (max(layer.keys), max(layer.values))
