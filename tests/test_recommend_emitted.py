"""What `kvctl recommend` says of an answer, and what `kvctl size` says of the command that it emits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvctl.engines.commandline import QUANTIZATIONS
from kvctl.recommend.emit.command import _ON_LOAD
from kvctl.weight_formats import weight_format

if TYPE_CHECKING:
    from conftest import Run

CASES = [
    ("Qwen3-8B", "1xH200", "vllm", "fp8"),
    ("Qwen3-8B", "1xH200", "sglang", "fp8"),
    ("Qwen3-8B", "2xL40S", "vllm", "bf16"),
    ("Qwen3-32B", "2xH100", "vllm", None),
    ("Qwen3-Next-80B-A3B-Instruct", "4xH100", "vllm", None),
    ("NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "2xH100", "vllm", None),
    ("NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "2xB200", "sglang", None),
    ("GLM-4.5-Air", "4xH100", "vllm", None),
    ("GLM-4.5-Air", "4xH100", "sglang", None),
    ("DeepSeek-V4-Flash", "4xH200", "vllm", None),
    ("DeepSeek-V3", "8xH200", "sglang", None),
    ("GLM-5.1-FP8", "8xB200", "vllm", None),
    ("Kimi-K2.5", "4xB200", "vllm", None),
    ("gpt-oss-120b", "1xH100", "vllm", None),
    ("Mixtral-8x7B-Instruct-v0.1", "2xH100", "vllm", "bf16"),
    ("MiniMax-M2", "4xH200", "vllm", None),
]


@pytest.mark.parametrize(("model", "gpus", "engine", "weights"), CASES)
def test_size_has_the_weights_and_the_capacity_of_the_command(
    kvctl: Run, model: str, gpus: str, engine: str, weights: str | None
) -> None:
    pins = f"--engine {engine} -tp {gpus[0]} --replicas 1 --max-quality-loss 10" + (
        f" --weights-dtype {weights}" if weights else ""
    )
    asked = f"recommend {model} --gpu {gpus} --ctx 8k --concurrency 4 {pins}".split()
    answer = kvctl(*asked, "--json").json["answers"][0]["side"]
    command = kvctl(*asked, "--emit", "command", "--quiet").out
    (result,) = kvctl("size", "--json", "--engine-args", command, "--gpu", gpus).json["results"]
    assert result["fit"]["weights_bytes"] == answer["memory"]["weights"] > 0
    assert result["fit"]["capacity_tokens"] == answer["capacity"] > 0


@pytest.mark.parametrize(("model", "gpus"), [("mamba-2.8b-hf", "A10"), ("Jamba-v0.1", "2xH100")])
def test_size_has_the_capacity_of_models_with_states(kvctl: Run, model: str, gpus: str) -> None:
    """How their weights are stored is not in their source, and `size` does not assume it."""
    asked = f"recommend {model} --gpu {gpus} --ctx 8k --concurrency 4 --engine vllm".split()
    answer = kvctl(*asked, "--json").json["answers"][0]["side"]
    command = kvctl(*asked, "--emit", "command", "--quiet").out
    # Mamba attends to nothing: vLLM keeps no prefixes of it unless it is told to, and then two states a request.
    assert ("--no-enable-prefix-caching" in command) == (model == "mamba-2.8b-hf")
    (result,) = kvctl("size", "--json", "--engine-args", command, "--gpu", gpus).json["results"]
    assert result["fit"]["capacity_tokens"] == answer["capacity"] > 0


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_what_is_told_an_engine_reads_back_as_the_same_format(engine: str) -> None:
    for weights, options in _ON_LOAD[engine].items():
        word = dict(options)["--quantization"]
        assert weight_format(QUANTIZATIONS[engine][word]).name == weights
