"""vLLM's own loaders and kernels on a CPU, with checkpoints of experts in AWQ and of bitsandbytes.

KVCTL_VLLM_PYTHON names an interpreter that has vLLM 0.32 for CPUs. bitsandbytes is no part of vLLM since 0.28: KVCTL_VLLM_BNB names
a folder that has it and vllm-bnb-plugin (pip install --no-deps --target FOLDER vllm-bnb-plugin bitsandbytes).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
library = pytest.importorskip("safetensors.torch")
pytest.importorskip("accelerate")

import awq_models  # noqa: E402

from kvctl.weights import bnb  # noqa: E402
from kvctl.weights.awq.make import Settings, make  # noqa: E402

PYTHON, PLUGIN = os.environ.get("KVCTL_VLLM_PYTHON"), os.environ.get("KVCTL_VLLM_BNB")
pytestmark = [
    pytest.mark.engine, pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="KVCTL_VLLM_PYTHON names no interpreter that has vLLM"),
]  # fmt: skip
_SIZES = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 32, "initializer_range": 0.2,
          "sliding_window": None, "shared_expert_intermediate_size": 0}  # fmt: skip

_LOAD = """
import hashlib, json, sys
import torch
def main():
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.quantization import auto_awq
    from vllm.model_executor.model_loader import get_model
    # Its kernel for packed experts on CPUs takes AMX, which not every CPU has. What is looked at is what its loader put where,
    # before kernels lay that out anew.
    auto_awq.select_wna16_moe_backend = lambda *_, **__: (auto_awq.WNA16MoEBackend.MARLIN, None)
    for method in (auto_awq.AutoAWQMoEMethod, auto_awq.AutoAWQMarlinLinearMethod):
        method.process_weights_after_loading = lambda self, layer: None
    torch.accelerator.empty_cache = lambda: None
    asked = EngineArgs(model=sys.argv[1], dtype="float16", max_model_len=128, enforce_eager=True, skip_tokenizer_init=True)
    config = asked.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, "file://" + sys.argv[2], 0, "gloo")
        initialize_model_parallel(1, 1)
        model = get_model(vllm_config=config)
    def told(value):
        data = value.data.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return [str(value.dtype), list(value.shape), hashlib.sha256(data).hexdigest()]
    found = {name: told(value) for name, value in model.named_parameters()}
    for name, value in model.named_parameters():
        for part, state in getattr(value, "bnb_quant_state", {}).items():
            found[f"{name} {part}"] = told(state)
    print("FOUND", json.dumps(found))
if __name__ == "__main__":
    main()
"""
_RUN = """
import json, sys
def main():
    from vllm import LLM, SamplingParams
    llm = LLM(model=sys.argv[1], dtype="float16", max_model_len=128, enforce_eager=True, skip_tokenizer_init=True)
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    ids = json.loads(sys.argv[2])
    (done,) = llm.generate([{"prompt_token_ids": ids}], asked)
    print("FOUND", json.dumps([row[token].logprob for row, token in zip(done.prompt_logprobs[1:], ids[1:])]))
if __name__ == "__main__":
    main()
"""


def _vllm(script: str, tmp_path: Path, *argv: str, path: str | None = None) -> Any:
    assert PYTHON
    (tmp_path / "run.py").write_text(script)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "VLLM_TARGET_DEVICE": "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    env |= {"PYTHONPATH": path} if path else {}
    done = subprocess.run(
        [PYTHON, str(tmp_path / "run.py"), *argv], capture_output=True, text=True, timeout=600, env=env
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert line is not None, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(line.removeprefix("FOUND "))


@pytest.mark.parametrize(("model_type", "experts", "names"), [
    ("qwen3_moe", "mlp.experts", ("gate_proj", "up_proj", "down_proj")), ("mixtral", "block_sparse_moe.experts", ("w1", "w3", "w2")),
])  # fmt: skip
def test_experts_in_awq_are_put_where_they_belong(
    model_type: str, experts: str, names: tuple[str, str, str], tmp_path: Path
) -> None:
    """Every parameter of vLLM's own model has the bytes of the files, joined as its layers are."""
    source = awq_models.save(tmp_path / "model", model_type, **_SIZES)
    made = make(source, tmp_path / "awq", Settings(samples=8, length=64, group=32))
    assert any("no packed experts" in note for note in made.notes)
    found = _vllm(_LOAD, tmp_path, str(tmp_path / "awq"), str(tmp_path / "store"))
    wanted = _joined(library.load_file(tmp_path / "awq" / "model.safetensors"), experts, *names)
    # vLLM has the experts in a module of its own.
    assert {name.replace(".routed_experts.", "."): told for name, told in found.items()} == wanted


def _joined(stored: dict[str, Any], experts: str, gate: str, up: str, down: str) -> dict[str, list[Any]]:
    """What vLLM's modules hold: queries, keys and values side by side, and gates and values of all experts."""
    out = {}
    for layer in (0, 1):
        at = f"model.layers.{layer}"
        for part in ("qweight", "qzeros", "scales"):
            joined = [stored.pop(f"{at}.self_attn.{name}_proj.{part}") for name in "qkv"]
            out[f"{at}.self_attn.qkv_proj.{part}"] = torch.cat(joined, 1)
            own = [
                {name: stored.pop(f"{at}.{experts}.{number}.{name}.{part}") for name in (gate, up, down)}
                for number in range(4)
            ]
            out[f"{at}.{experts}.w13_{part}"] = torch.stack([torch.cat([one[gate], one[up]], 1) for one in own])
            out[f"{at}.{experts}.w2_{part}"] = torch.stack([one[down] for one in own])
    out |= stored
    return {name: _told(value) for name, value in out.items()}


def _told(value: Any) -> list[Any]:
    return [str(value.dtype), list(value.shape), hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()]


plugged = pytest.mark.skipif(
    not PLUGIN, reason="KVCTL_VLLM_BNB names no folder that has vllm-bnb-plugin and bitsandbytes"
)


@plugged
def test_int8_is_put_where_it_belongs(tmp_path: Path) -> None:
    """What it computes is no measure: it rounds activations, and in another dtype than transformers does."""
    pytest.importorskip("bitsandbytes")
    source = awq_models.save(tmp_path / "model", **_SIZES)
    bnb.make(source, tmp_path / "bnb", bnb.Settings("int8", False))
    found = _vllm(_LOAD, tmp_path, str(tmp_path / "bnb"), str(tmp_path / "store"), path=PLUGIN)
    stored = library.load_file(tmp_path / "bnb" / "model.safetensors")
    wanted = {}
    for layer in (0, 1):
        at = f"model.layers.{layer}"
        for name, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
            prefix = f"{at}.{name.split('.')[0]}"
            rows = [f"{prefix}.{part}_proj" for part in parts]
            wanted[f"{at}.{name}.weight"] = torch.cat([stored.pop(f"{row}.weight") for row in rows])
            wanted |= {f"{at}.{name}.weight {number}": stored.pop(f"{row}.SCB") for number, row in enumerate(rows)}
    for name, value in stored.items():
        if not name.endswith("weight_format"):
            wanted[f"{name.removesuffix('.SCB')}.weight 0" if name.endswith(".SCB") else name] = value
    # What is not packed is loaded in what it computes in.
    wanted = {name: value.half() if (value.dim() == 1 and name.endswith("weight")) or name.startswith(("lm_head", "model.embed")) else value
              for name, value in wanted.items()}  # fmt: skip
    assert found == {name: _told(value) for name, value in wanted.items()}


@plugged
@pytest.mark.parametrize("name", ["nf4", "nf4-dq", "fp4"])
def test_four_bits_mean_the_same(name: str, tmp_path: Path) -> None:
    """Of a text, the plugin's layers and transformers' give the same probabilities, in float16: it reads packed weights of no wider one."""
    pytest.importorskip("bitsandbytes")
    source = awq_models.save(tmp_path / "model", **_SIZES)
    bnb.make(source, tmp_path / "bnb", bnb.Settings(name.removesuffix("-dq"), name.endswith("-dq")))
    ids = [3 + (7 * i * i) % 509 for i in range(48)]
    found = torch.tensor(_vllm(_RUN, tmp_path, str(tmp_path / "bnb"), json.dumps(ids), path=PLUGIN))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bnb", dtype=torch.float16).eval()
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted, original = (
            one(torch.tensor([ids]))
            .logits[0, :-1]
            .float()
            .log_softmax(-1)
            .gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            for one in (model, plain)
        )
    # Far nearer to each other than to the model that it was made of.
    assert float((found - wanted).abs().mean()) < 0.05 * float((found - original).abs().mean())
