"""Deployments that what is emitted is checked on: every engine, one node and several, formats, offload, drafts."""

from __future__ import annotations

from kvctl.allocation import Serving
from kvctl.engines import engine
from kvctl.hardware import read_gpus
from kvctl.recommend.deployment import Deployment

GIB = 2**30
H100, L4, MI300X, CPU = (read_gpus(name)[0] for name in ("H100", "L4", "MI300X", "cpu:64GiB"))
MAC = read_gpus("M3Max:64GB")[0]
QWEN = "Qwen/Qwen3-32B"

VLLM = Deployment(
    base=QWEN, model=QWEN, engine=engine("vllm"), context=32768, device=H100, weights="fp8", made="load", kv_dtype="fp8", gpus=2,
    serving=Serving(tensor_parallel=2, max_sequences=64, max_batched=8192, block_size=16, utilization=0.9, kv_budget=40 * GIB,
                    prefix_caching=True, chunked_prefill=True),
)  # fmt: skip
"""On two GPUs of a node, weights converted while they are loaded."""
VLLM_NODES = VLLM.replace(
    base="deepseek-ai/DeepSeek-V3", model="deepseek-ai/DeepSeek-V3", made="stored", weights="fp8-block", kv_dtype="auto", gpus=8, nodes=2,
    serving=Serving(tensor_parallel=8, pipeline_parallel=2, expert_parallel=True, max_sequences=128, max_batched=8192, block_size=64,
                    utilization=0.92, kv_budget=29 * GIB, prefix_caching=True, offload=64 * GIB,
                    speculative={"method": "mtp", "num_speculative_tokens": 1}),
)  # fmt: skip
SGLANG = VLLM.replace(
    engine=engine("sglang"), kv_dtype="fp8_e4m3",
    serving=Serving(tensor_parallel=2, max_sequences=64, max_batched=8192, block_size=1, utilization=0.85, prefix_caching=True,
                    host_gb=99.5, max_tokens=500_000),
)  # fmt: skip
SGLANG_NODES = VLLM_NODES.replace(
    engine=engine("sglang"), kv_dtype="bf16",
    serving=Serving(tensor_parallel=16, data_parallel=16, attention_dp=True, expert_parallel=True, max_sequences=256, max_batched=8192,
                    utilization=0.8, prefix_caching=False, speculative_algorithm="EAGLE", draft_tokens=4),
)  # fmt: skip
LLAMA_CPP = Deployment(
    base="HuggingFaceTB/SmolLM2-135M-Instruct", model="/srv/models/SmolLM2-135M-Instruct.Q4_1.gguf", engine=engine("llama.cpp"),
    context=4096, device=CPU, weights="q4_1", kv_dtype="q8_0/q5_1", gpus=0,
    serving=Serving(device="cpu", slots=4, unified=False, batch=2048, ubatch=512, prompt_cache=0),
)  # fmt: skip
LLAMA_CPP_GPU = LLAMA_CPP.replace(
    base=QWEN, model="Qwen/Qwen3-32B-GGUF:Q4_K_M", device=L4, gpus=2, weights="q4_k_m", kv_dtype="f16",
    serving=Serving(slots=2, unified=True, slot_limit=4096, prefix_caching=True, flash_attention=True, tensor_split=(1.0, 1.5)),
)  # fmt: skip
TENSORRT_LLM = VLLM.replace(
    engine=engine("tensorrt-llm"), made="stored", weights="fp8", kv_dtype="fp8", model="nvidia/Qwen3-32B-FP8",
    serving=Serving(tensor_parallel=2, max_sequences=64, max_batched=8192, block_size=32, utilization=0.9, prefix_caching=True,
                    chunked_prefill=True, max_tokens=400_000, expert_parallel=True, second_manager=False),
)  # fmt: skip
OLLAMA = LLAMA_CPP.replace(
    engine=engine("ollama"), base="qwen3:8b", model="qwen3:8b", device=L4, gpus=1, weights="q4_k_m", kv_dtype="q8_0",
    serving=Serving(slots=2),
)  # fmt: skip
TRANSFORMERS = LLAMA_CPP.replace(
    engine=engine("transformers"), model="HuggingFaceTB/SmolLM2-135M-Instruct", weights="bf16", kv_dtype="auto",
    serving=Serving(device="cpu", block_size=32, num_blocks=64, max_batched=512, utilization=0.5),
)  # fmt: skip

CASES = {
    "vllm": VLLM,
    "vllm-nodes": VLLM_NODES,
    "vllm-replicas": VLLM.replace(replicas=3),
    "vllm-cpu": VLLM.replace(device=CPU, gpus=0, made="stored", weights="bf16", kv_dtype="auto",
                             serving=Serving(device="cpu", max_sequences=8, kv_budget=192 * 2**20, prefix_caching=False)),
    "vllm-amd": VLLM.replace(device=MI300X),
    "vllm-made": VLLM.replace(made="make", weights="awq", model="./Qwen3-32B-awq"),
    "vllm-dp": VLLM_NODES.replace(
        serving=Serving(tensor_parallel=4, data_parallel=4, decode_context_parallel=2, expert_parallel=True, max_sequences=64,
                        enforce_eager=True, cpu_offload=3 * GIB // 2, stage_layers=None)),
    "sglang": SGLANG,
    "sglang-nodes": SGLANG_NODES,
    "sglang-whole": SGLANG.replace(
        serving=Serving(tensor_parallel=2, max_sequences=8, chunked_prefill=False, prefix_caching=False, utilization=0.8)),
    "llama.cpp": LLAMA_CPP,
    "llama.cpp-gpu": LLAMA_CPP_GPU,
    "llama.cpp-mac": LLAMA_CPP.replace(device=MAC, gpus=1, kv_dtype="auto", serving=Serving(slots=1)),
    "tensorrt-llm": TENSORRT_LLM,
    "ollama": OLLAMA,
    "transformers": TRANSFORMERS,
}  # fmt: skip
"""By name; each can be started."""
