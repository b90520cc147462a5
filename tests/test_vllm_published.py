"""`--engine vllm` against start-up logs that other people published.

Facts only: model, command line as far as it bears on the cache, version, numbers, and where they
stood. A log rounds the memory to hundredths of a GiB, so the true budget lies within 0.005 of
what it prints; a plan agrees if some whole number of blocks in that interval gives the published
tokens and concurrency. "public notes" and "public log" are files of public repositories that were
found by their text; a GitHub thread is named by repository and number. Where one names no version
it is that of its day: for layers of one kind the versions here come to the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import Outcome

Run = Callable[..., Outcome]
GIB = 2**30


def mtp(tokens: int) -> str:
    return f"""--speculative-config '{{"method":"mtp","num_speculative_tokens":{tokens}}}'"""


DFLASH2 = {"model_type": "qwen3", "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8,
           "head_dim": 128, "hidden_size": 5120, "sliding_window": 2048, "use_sliding_window": True,
           "max_window_layers": 0, "layer_types": ["sliding_attention"] * 5, "torch_dtype": "bfloat16"}  # fmt: skip
"""The drafter of Qwen3.8-27B as the logs describe it: 5 layers, 8 KV heads of 128, windows of 2,048."""


def dflash(tokens: int) -> str:
    return f"""--speculative-config '{{"method":"dflash","model":"DRAFTER","num_speculative_tokens":{tokens}}}'"""


class Log(NamedTuple):
    """One start of vLLM: what was asked, and what it printed."""

    where: str
    version: str
    model: str | None
    """In the catalogue; None: the command line's own."""
    command: str
    memory: float
    """GiB, as "Available KV cache memory" has it."""
    tokens: int | None
    length: int
    concurrency: str | None


LOGS = (
    # -- one kind of layer ----------------------------------------------------------------------
    Log("public log, Qwen3-8B on an RTX 5090, 2025-06-10; 8,505 blocks", "0.9.0", "Qwen3-8B",
        "--max-model-len 40960", 18.69, 136_080, 40_960, "3.32"),
    Log("public test file with a captured log, Qwen3-14B", "0.10.0", "Qwen3-14B", "--max-model-len 40960", 11.00, 72_064, 40_960, "1.76"),
    Log("vllm-project/vllm#25350", "0.10.2", "Qwen3-30B-A3B", "--kv-cache-dtype fp8 --max-model-len 100000",
        10.55, 230_528, 100_000, "2.31"),
    Log("public test file with a captured log, DeepSeek on 8 GPUs, 2025-12-03", "0.12.0", "DeepSeek-V3",
        "--tensor-parallel-size 8 --max-model-len 8192", 41.60, 635_648, 8192, "77.59"),
    Log("public log, Llama 3.1 70B AWQ on an RTX PRO 6000", "0.14.0", "Llama-3.1-70B-Instruct", "--max-model-len 4096",
        38.71, 126_832, 4096, None),
    Log("public notes, Qwen3-30B-A3B with kvcached on a DGX Spark", "0.14.0", "Qwen3-30B-A3B", "--max-model-len 16384",
        4.85, 52_960, 16_384, "3.23"),
    Log("public notes, GLM-4.7-NVFP4", "0.15.1", "GLM-4.7", "--tensor-parallel-size 4 --kv-cache-dtype fp8 --max-model-len 131072",
        31.99, 729_248, 131_072, None),
    Log("public article on LightOnOCR-2-1B, whose decoder is that of Qwen3-0.6B", "0.15.1", "Qwen3-0.6B",
        "--max-model-len 16384 --no-enable-prefix-caching", 77.94, None, 16_384, "44.53"),
    Log("public log, Qwen3-30B-A3B-FP8 on a GB10, 2026-03-18", "0.16.0", "Qwen3-30B-A3B",
        "--kv-cache-dtype fp8 --max-model-len 32768", 4.04, 88_176, 32_768, "2.69"),
    Log("public notes, MiniMax M2.5 on four RTX PRO 6000", "0.16.0", None,
        "SAFETENSORS_FAST_GPU=1 VLLM_SLEEP_WHEN_IDLE=1 vllm serve \\\n    MiniMaxAI/MiniMax-M2.5 \\\n"
        "    --tensor-parallel-size 4 \\\n    --tool-call-parser minimax_m2 \\\n"
        "    --reasoning-parser minimax_m2_append_think \\\n    --enable-auto-tool-choice \\\n    --trust-remote-code",
        23.62, 399_424, 196_608, "2.03"),
    Log("public notes, MiniMax M2.x in FP8 on four A100", "0.19.0", "MiniMax-M2.5",
        "--tensor-parallel-size 4 --max-model-len 128000 --max-num-seqs 10 --max-num-batched-tokens 8192",
        18.16, 307_184, 128_000, "2.40"),
    Log("public notes, Llama 3.3 70B on a GPU of 80 GiB", "0.16.0", "Llama-3.3-70B-Instruct",
        "--kv-cache-dtype fp8 --async-scheduling --no-enable-prefix-caching --max-num-batched-tokens 8192 "
        "--max-model-len 32000 --max-num-seqs 8", 5.11, 33_504, 32_000, "1.05"),
    Log("public log, a 7B model of Qwen2.5's shape, 2026-03-27", "0.18.0", "Qwen2.5-7B-Instruct", "--max-model-len 32768",
        13.1, 245_360, 32_768, "7.49"),
    Log("public notes, Qwen2.5-0.5B without chunked prefill", "0.19.0", "Qwen2.5-0.5B",
        "vllm serve qwen05b --served-model-name qwen05b-local --host 127.0.0.1 --port 8051 --gpu-memory-utilization 0.35 "
        "--max-model-len 4096 --max-num-seqs 4 --max-num-batched-tokens 4096 --block-size 16 --no-enable-prefix-caching "
        "--enforce-eager --no-enable-chunked-prefill", 4.17, 364_592, 4096, "89.01"),
    Log("the same with chunked prefill", "0.19.0", "Qwen2.5-0.5B",
        "--max-model-len 4096 --max-num-seqs 4 --max-num-batched-tokens 512 --block-size 16 --no-enable-prefix-caching "
        "--enforce-eager --enable-chunked-prefill", 4.29, 375_200, 4096, "91.60"),
    Log("public notes, a 1.5B model in fp16", "0.19.1", "Qwen2.5-1.5B-Instruct", "--dtype float16 --max-model-len 32768",
        120.53, 4_513_888, 32_768, None),
    Log("public bisection of vLLM, GLM-5.1-FP8 on eight H200: latents and indexers in bf16", "0.19.1", "GLM-5.1-FP8",
        "--tensor-parallel-size 8 --max-model-len 202752", 32.11, 344_192, 202_752, "1.70"),
    Log("public notebook, Qwen3-8B-AWQ", "0.20.0", "Qwen3-8B", "--dtype float16 --max-model-len 4096 --enforce-eager",
        4.79, 34_848, 4096, "8.51"),
    Log("public notes, Qwen3-VL-2B on an RTX 5070 Ti", "0.20.0", "Qwen3-VL-2B-Instruct",
        "--max-model-len 2048 --max-num-seqs 1 --enforce-eager", 8.13, 76_144, 2048, "37.18"),
    Log("public log of vllm-ascend, Qwen3-0.6B, 2026-05-27", "0.20.2", "Qwen3-0.6B", "--max-model-len 40960",
        54.98, 514_688, 40_960, "12.57"),
    Log("public notes, Qwen2.5-14B for a queueing model; 14,140 blocks", "0.21.0", "Qwen2.5-14B-Instruct",
        "--max-model-len 4096 --max-num-seqs 256", 41.43, 226_240, 4096, "55.23"),
    Log("public notes, Llama 3.1 8B on an RTX A5000", "0.22.0", "Llama-3.1-8B", "--max-model-len 2048 --enforce-eager",
        5.29, 43_296, 2048, None),
    Log("public notes, Qwen3-8B on an RTX 4090", "0.24.0", "Qwen3-8B", "--max-model-len 32768 --gpu-memory-utilization 0.92",
        6.03, 43_888, 32_768, "1.34"),
    Log("public notes, Qwen3-30B-A3B on a Strix Halo", "0.25.0", "Qwen3-30B-A3B", "--max-model-len 8192 --max-num-seqs 16",
        6.50, 70_944, 8192, "8.66"),
    # -- windows --------------------------------------------------------------------------------
    Log("public log of ROCm, gemma-3-27b-it: 8 padding layers of 52; 89,994 blocks", "0.11.0", "gemma-3-27b-it",
        "vllm serve /google/gemma-3-27b-it --max-model-len 4096 --limit-mm-per-prompt '{\"image\": 2}'",
        109.86, 205_696, 4096, "50.05"),
    # An offline LLM() batches 8,192 tokens on this GPU; a server has 2,048.
    Log("blog.huikang.dev, 2025-12-28: gpt-oss-120b on an H100, 2,048 batched tokens", "0.11.2", "gpt-oss-120b",
        "--max-model-len 98304 --gpu-memory-utilization 0.96 --max-num-seqs 6 --max-num-batched-tokens 2048",
        8.99, 130_960, 98_304, None),
    Log("public log, gemma-3-1b-it: 2 padding layers of 22", "0.13.0", "gemma-3-1b-it",
        "--max-model-len 2048 --gpu-memory-utilization 0.95", 25.39, 950_864, 2048, "461.21"),
    Log("public notes, GaMS-9B, a Gemma 2", "0.13.0", "gemma-2-9b-it", "--max-model-len 4096", 8.55, 26_656, 4096, "6.50"),
    # A Jetson Thor: unified memory, where the default is 2,048 batched tokens and not 8,192.
    Log("public notes, gemma-4-26B-A4B on a Jetson Thor", "0.19.0", "gemma-4-26B-A4B-it",
        "--max-model-len 131072 --kv-cache-dtype fp8 --max-num-batched-tokens 2048", 51.62, 451_040, 131_072, "33.42"),
    Log("public log, Gemma-4-26B-A4B-NVFP4 on an RTX 5090", "0.20.2", "gemma-4-26B-A4B-it",
        "--gpu-memory-utilization 0.85 --max-model-len 256000 --max-num-seqs 2 --max-num-batched-tokens 16384 "
        "--kv-cache-dtype fp8_e4m3 --quantization compressed-tensors --enable-prefix-caching --enable-chunked-prefill",
        4.58, 286_007, 256_000, "1.12"),
    Log("public notes, MiMo-V2.6-Flash on eight H100: 6 padding layers of 39", "0.31.1rc1.dev50", "MiMo-V2.5",
        "--tensor-parallel-size 8 --enable-expert-parallel --max-model-len 262144 --max-num-seqs 64 "
        "--max-num-batched-tokens 8192 --no-enable-prefix-caching --language-model-only", 49.18, 6_969_972, 262_144, None),
    # -- recurrent layers -----------------------------------------------------------------------
    Log("public notes, Falcon-H1-3B on an RTX 5060 Ti", "0.12.0", "Falcon-H1-3B-Instruct",
        "python3 -m vllm.entrypoints.openai.api_server --dtype bfloat16 --max-model-len 2048 "
        "--gpu-memory-utilization 0.75 --max-num-seqs 8 --port 8000", 5.28, 83_968, 2048, "41.50"),
    Log("public article, vLLM 0.17's log explained: Qwen3.6-35B-A3B; 304 blocks", "0.17.0", "Qwen3.6-35B-A3B",
        "--max-model-len 65536 --kv-cache-dtype fp8 --enable-prefix-caching", 6.08, 159_296, 65_536, "8.00"),
    Log("public log, Qwen3.5-35B-A3B-AWQ, 2026-03-20", "0.17.1rc1.dev126+gbc2c0c86e", "Qwen3.5-35B-A3B",
        "--max-model-len 32768 --enforce-eager --gpu-memory-utilization 0.67 --kv-cache-dtype fp8 --enable-prefix-caching "
        "--max-num-batched-tokens 8192 --max-num-seqs 3 --enable-chunked-prefill", 5.69, 148_816, 32_768, "12.91"),
    Log("public notes, a laboratory's course: Qwen3.5-9B on two GPUs", "0.19.0", "Qwen3.5-9B",
        "--tensor-parallel-size 2 --gpu-memory-utilization 0.85 --max-model-len 4096", 15.06, 246_576, 4096, "169.82"),
    Log("public notes, Qwen3.5-122B-A10B-NVFP4 on a Jetson Thor", "0.19.0", "Qwen3.5-122B-A10B",
        "--max-model-len 131072 --kv-cache-dtype fp8 --enable-prefix-caching", 21.43, 467_712, 131_072, "11.79"),
    Log("the same with multi-token prediction", "0.19.0", "Qwen3.5-122B-A10B",
        "--max-model-len 262144 --kv-cache-dtype fp8 --enable-prefix-caching " + mtp(1), 24.05, 482_080, 262_144, "6.42"),
    Log("public notes, Qwen3.5-27B", "0.19.0", "Qwen3.5-27B", "--max-model-len 262144", 20.5, 83_888, 262_144, "1.27"),
    Log("public notes, a model of 24 layers and 12 KiB a token on a DGX Spark", "0.19.0", "Qwen3.5-2B",
        "--max-model-len 262144", 5.95, 129_472, 262_144, "1.97"),
    Log("public log, Qwen3.6-27B-NVFP4 on an RTX 5090, 2026-05-01", "0.20.0", "Qwen3.6-27B",
        "--kv-cache-dtype fp8_e4m3 --max-model-len 32768 --enable-prefix-caching", 6.67, 53_312, 32_768, "5.15"),
    Log("public log, Qwen3.6-35B-A3B-NVFP4 on an RTX 5090, 2026-05-01", "0.20.0", "Qwen3.6-35B-A3B",
        "--model RedHatAI/Qwen3.6-35B-A3B-NVFP4 --served-model-name Qwen3.6-35B-A3B-NVFP4 --trust-remote-code "
        "--gpu-memory-utilization 0.90 --max-model-len 65536 --max-num-seqs 1 --max-num-batched-tokens 8192 "
        "--kv-cache-dtype fp8_e4m3 --quantization compressed-tensors --moe-backend cutlass --enable-prefix-caching "
        "--enable-chunked-prefill --safetensors-load-strategy prefetch --max-cudagraph-capture-size 1",
        2.95, 75_456, 65_536, "3.87"),
    Log("another start of it", "0.20.0", "Qwen3.6-35B-A3B",
        "--max-model-len 65536 --kv-cache-dtype fp8_e4m3 --enable-prefix-caching", 3.07, 79_648, 65_536, None),
    Log("public log, Qwen3.6-35B-A3B-NVFP4 on a DGX Spark, 2026-05-14: 3 padding layers of 30", "0.20.2", "Qwen3.6-35B-A3B",
        "--max-model-len 262144 --max-num-seqs 8 --max-num-batched-tokens 65536 --kv-cache-dtype fp8_e4m3 "
        "--enable-prefix-caching --enable-chunked-prefill "
        """--speculative-config '{"method":"qwen3_next_mtp","num_speculative_tokens":2}'""", 66.58, 5_747_892, 262_144, "21.93"),
    Log("public notes, Qwen3.6-27B NVFP4-MTP on two RTX PRO 4000", "0.20.2", "Qwen3.6-27B",
        "--quantization modelopt --tensor-parallel-size 2 --max-model-len 196608 --max-num-seqs 10 "
        "--max-num-batched-tokens 4096 --gpu-memory-utilization 0.92 --enable-prefix-caching --kv-cache-dtype fp8 "
        "--no-enable-flashinfer-autotune " + mtp(3), 6.35, 347_625, 196_608, "1.77"),
    Log("the same on four RTX 5060 Ti", "0.20.2", "Qwen3.6-27B",
        "--tensor-parallel-size 4 --max-model-len 196608 --max-num-batched-tokens 4096 --enable-prefix-caching "
        "--kv-cache-dtype fp8 " + mtp(3), 5.61, 615_468, 196_608, "3.13"),
    Log("public notes, a 27B NVFP4 model on two RTX 5060 Ti, 2026-05-27", "0.20.0", "Qwen3.6-27B",
        "--tensor-parallel-size 2 --max-model-len 153500 --max-num-seqs 1 --kv-cache-dtype fp8 --enable-prefix-caching "
        + mtp(3), 3.05, 46_400, 153_500, "1.05"),
    Log("public log, nvidia/Qwen3.6-35B-A3B-NVFP4 on a DGX Spark, 2026-06-01", "0.22.1rc1.dev26+g4721bb3aa", "Qwen3.6-35B-A3B",
        "--model nvidia/Qwen3.6-35B-A3B-NVFP4 --gpu-memory-utilization 0.85 --max-model-len 262144 --max-num-seqs 5 "
        "--max-num-batched-tokens 8192 --kv-cache-dtype fp8 --dtype auto --quantization modelopt --attention-backend flashinfer "
        "--moe-backend marlin --enable-prefix-caching --enable-chunked-prefill --async-scheduling --speculative-config "
        """'{"method":"mtp","num_speculative_tokens":2,"moe_backend":"triton"}'""", 74.76, 6_455_296, 262_144, None),
    Log("public log, nvidia/Qwen3.6-27B-NVFP4 on a DGX Spark, 2026-07-02", "0.23.1rc1.dev531+ga65f93fb2", "Qwen3.6-27B",
        "--model nvidia/Qwen3.6-27B-NVFP4 --gpu-memory-utilization 0.70 --max-model-len 262144 --max-num-seqs 8 "
        "--max-num-batched-tokens 65536 --kv-cache-dtype fp8 --dtype auto --quantization modelopt --enable-prefix-caching "
        "--enable-chunked-prefill --async-scheduling --safetensors-load-strategy prefetch " + mtp(2),
        48.6, 1_394_129, 262_144, "5.32"),
    Log("public notes, a 27B model in FP8 with a 16-bit cache on two H200, 2026-07-22", "0.23.0", "Qwen3.5-27B",
        "--tensor-parallel-size 2 --max-model-len 184320 --enable-prefix-caching " + mtp(2), 110.59, 3_233_564, 184_320, "17.54"),
    Log("public notes, Qwen3.8-27B-FP8 on an L40S: 184 blocks", "0.25.0", "Qwen3.5-27B", "--max-model-len 131072",
        8.82, 141_036, 131_072, "1.08"),
    Log("public notes, Qwen3-Next in W4A16", "0.26.0", "Qwen3-Next-80B-A3B-Instruct",
        "vllm serve /path/to/qwen3next-w4a16 --served-model-name qwen3-next-80b --max-model-len 65536 --max-num-seqs 4 "
        "--gpu-memory-utilization 0.75 --enable-prefix-caching --mamba-cache-mode align --mamba-ssm-cache-dtype float16 "
        "--enable-auto-tool-choice --tool-call-parser hermes --host 0.0.0.0 --port 8000", 5.85, 242_534, 65_536, "3.70"),
    Log("mitchross/talos-argocd-proxmox#1995: Qwen3.8-27B-FP8 on two RTX 3090", "0.27.0", "Qwen3.6-27B",
        "--tensor-parallel-size 2 --max-model-len 131072 --max-num-seqs 2 --kv-cache-dtype fp8_e4m3 --enable-prefix-caching "
        "--max-num-batched-tokens 8192 --gpu-memory-utilization 0.92", 4.99, 302_921, 131_072, "2.31"),
    # XPU: kernels there have blocks of 64, so that the block is a multiple of 64 and not of 16.
    Log("public article, Qwen3.8-27B on two Arc Pro B70", "0.27.0", "Qwen3.6-27B",
        "--tensor-parallel-size 2 --max-model-len 262144 --max-num-seqs 8 --kv-cache-dtype fp8 --enable-prefix-caching "
        "--gpu-memory-utilization 0.85 --block-size 64", 13.36, 843_486, 262_144, "3.22"),
    Log("public notes, Qwen3.8-27B-AWQ on an RTX 4090", "0.27.1", "Qwen3.6-27B",
        "--kv-cache-dtype fp8 --max-model-len 16384 --max-num-seqs 4 --no-enable-prefix-caching", 1.29, 30_427, 16_384, "1.86"),
    Log("the same without CUDA graphs", "0.27.1", "Qwen3.6-27B",
        "--kv-cache-dtype fp8 --max-model-len 8192 --max-num-seqs 8 --enforce-eager --no-enable-prefix-caching",
        4.00, 75_548, 8192, "9.22"),
    Log("public notes, Qwen3.8-27B on an A100", "0.28.0", "Qwen3.5-27B", "--max-model-len 262144", 18.61, 298_275, 262_144, "1.14"),
    Log("public notes, Qwen3.5-0.8B on an A100", "0.28.0", "Qwen3.5-0.8B", "--max-model-len 262144", 67.08, 5_788_118, 262_144, "22.08"),
    Log("the same as a server", "0.28.0", "Qwen3.5-0.8B", "--dtype bfloat16 --max-model-len 8192 --max-num-seqs 32",
        61.82, 3_697_198, 8192, "451.32"),
    Log("public notes, Qwen3.5-9B-AWQ on an RTX 5060 Ti", "0.28.0", "Qwen3.5-9B",
        "vllm serve cyankiwi/Qwen3.5-9B-AWQ-4bit --max-model-len 65536 --gpu-memory-utilization 0.92 --max-num-seqs 2 "
        "--enable-prefix-caching --enable-auto-tool-choice --tool-call-parser qwen3_coder --reasoning-parser qwen3 "
        "--limit-mm-per-prompt '{\"image\":0,\"video\":0}'", 6.75, 209_615, 65_536, "3.20"),
    Log("public test file, a 27B model on two GPUs of 16 GiB", "0.28.0", "Qwen3.6-27B",
        "--tensor-parallel-size 2 --kv-cache-dtype fp8 --max-model-len 131072", 2.32, 141_266, 131_072, "1.08"),
    # -- a drafter with windows of its own: groups of 5 layers -----------------------------------
    Log("public experiment for vllm-project/vllm#54076: 1,018 blocks in 15 groups", "0.28.0", "Qwen3.5-27B",
        "--max-model-len 4096 --max-num-seqs 4 --enable-prefix-caching --mamba-cache-mode align " + dflash(7),
        1_018 * 5 * 832 * 4096 / GIB, 35_945, 4096, "8.78"),
    Log("the same with --block-size 816, which becomes 1,632: 534 blocks", "0.28.0", "Qwen3.5-27B",
        "--max-model-len 4096 --max-num-seqs 4 --enable-prefix-caching --mamba-cache-mode align --block-size 816 " + dflash(7),
        534 * 5 * 1632 * 4096 / GIB, 20_634, 4096, "5.04"),
    Log("the same without a drafter: 469 blocks", "0.28.0", "Qwen3.5-27B",
        "--max-model-len 4096 --max-num-seqs 4 --enable-prefix-caching --mamba-cache-mode align",
        469 * 16 * 784 * 4096 / GIB, 160_085, 4096, "39.08"),
    # -- indexers that pool tokens ------------------------------------------------------------------
    Log("public log, DeepSeek-V4-Flash on 8 GPUs, 0.31; the length is the only usual one that gives these tokens",
        "0.31.0", "DeepSeek-V4-Flash", "--tensor-parallel-size 8 --kv-cache-dtype fp8 --max-model-len 262144 --max-num-batched-tokens 8192",
        47.43, 1_728_531, 262_144, None),
    Log("public log, GLM-5.3-Flash on 8 GPUs, 0.31.1rc1", "0.31.0", "GLM-5.3-Flash",
        "-tp 8 --max-model-len 262144 --no-enable-prefix-caching", 28.73, 2_618_281, 262_144, None),
    Log("public log of a build after 0.28.0, GLM-5.3-Flash on 8 GPUs; its support came with 0.30", "0.30.0", "GLM-5.3-Flash",
        "-tp 8 --max-model-len 131072", 81.79, 7_228_559, 131_072, "55.15"),
)  # fmt: skip


def drafter(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(DFLASH2))
    return str(folder)


def planned(
    run: Run, model: str | None, version: str, command: str, *more: str, stdin: str | None = None
) -> dict[str, Any]:
    names = () if model is None else (model,)
    outcome = run("size", *names, "--source", "catalogue", "--engine", f"vllm@{version}", "--engine-args", command,
                  "--json", *more, stdin=stdin)  # fmt: skip
    assert outcome.code == 0, outcome.err
    allocation: dict[str, Any] = outcome.json["results"][0]["allocation"]
    return allocation


def agrees(plan: Callable[[int], dict[str, Any]], log: Log) -> str | None:
    """None if a budget that prints as the published one gives the published numbers; else what it gives."""
    widest = plan(round(log.memory * GIB))["bytes_per_block"]
    low, high = (int((log.memory + rounding) * GIB) // widest for rounding in (-0.005, 0.005))

    def at(blocks: int) -> tuple[int, str]:
        found = plan(blocks * widest)
        return found["reported_capacity"], f"{found['max_concurrency']:.2f}"

    def wanted(found: tuple[int, str]) -> bool:
        return log.tokens in (None, found[0]) and log.concurrency in (None, found[1])

    first, last = low, high
    while log.tokens is not None and first < last:
        middle = (first + last) // 2
        first, last = (middle + 1, last) if at(middle)[0] < log.tokens else (first, middle)
    # Several numbers of blocks may print the same tokens.
    if any(wanted(at(blocks)) for blocks in range(first, min(first + 16, high) + 1)):
        return None
    return f"{at(low)} to {at(high)}, published {(log.tokens, log.concurrency)}"


@pytest.mark.parametrize("log", LOGS, ids=lambda log: f"{log.version}-{log.model}-{log.memory:g}")
def test_agrees_with_the_published_log(kvctl: Run, tmp_path: Path, log: Log) -> None:
    command = log.command.replace("DRAFTER", drafter(tmp_path))
    more = () if "--max-model-len" in command else ("--ctx", str(log.length))
    plan = lambda budget: planned(kvctl, log.model, log.version, command, "--kv-budget", str(budget), *more)  # noqa: E731
    assert agrees(plan, log) is None, log.where


# -- configurations that no catalogue has ---------------------------------------------------------


def test_zamba_2(kvctl: Run) -> None:
    """Public notes, Zamba2-2.7B on an RTX 5060 Ti, vLLM 0.12.0: 6.16 GiB, 5,088 tokens, 15.27x; block 48, padded by 43.12%."""
    kinds = ["hybrid" if layer in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "mamba" for layer in range(54)]
    config = {"model_type": "zamba2", "num_hidden_layers": 54, "hidden_size": 2560, "num_attention_heads": 32,
              "num_key_value_heads": 32, "attention_head_dim": 160, "layers_block_type": kinds, "mamba_d_state": 64,
              "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 80, "mamba_headdim": 64,
              "torch_dtype": "bfloat16"}  # fmt: skip
    text = json.dumps(config)
    log = Log("", "0.12.0", "-", "--max-model-len 2048", 6.16, 5_088, 2048, "15.27")
    plan = lambda budget: planned(kvctl, "-", "0.12.0", log.command, "--kv-budget", str(budget), stdin=text)  # noqa: E731
    assert plan(GIB)["block_size"] == 48
    # 48 · 32 · 160 · 2 · 2 B over (5,120 + 2 · 64) · 3 · 2 B + 5,120 · 64 · 2 B
    assert round(983_040 / 686_848 * 100 - 100, 2) == 43.12
    assert any("686,848 bytes are padded to pages of 983,040" in reason for reason in plan(GIB)["reasons"])
    assert agrees(plan, log) is None


def test_ministral_on_two_gpus(kvctl: Run) -> None:
    """Public script, Ministral-3-14B, vLLM 0.12.0: 52.36 GiB, 686,320 tokens, 6.86x; 40 layers, 8 KV heads of 128."""
    config = json.dumps({"model_type": "llama", "num_hidden_layers": 40, "hidden_size": 5120, "num_attention_heads": 32,
                         "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16"})  # fmt: skip
    command = "--tensor-parallel-size 2 --max-model-len 100000"
    log = Log("", "0.12.0", "-", command, 52.36, 686_320, 100_000, "6.86")
    plan = lambda budget: planned(kvctl, "-", "0.12.0", command, "--kv-budget", str(budget), stdin=config)  # noqa: E731
    assert agrees(plan, log) is None


# -- what one request needs, and the longest that fits ----------------------------------------------


class Refusal(NamedTuple):
    """ "To serve at least one request with … (length), (needed GiB KV cache is needed, … (available GiB) … longest."""

    where: str
    version: str
    model: str
    command: str
    length: int
    needed: str
    available: float | None = None
    longest: int | None = None


REFUSALS = (
    Refusal("vllm-project/vllm#25350", "0.10.2", "Qwen3-30B-A3B", "--kv-cache-dtype fp8", 221_000, "10.12", 5.59, 122_080),
    Refusal("vllm-project/vllm#27508", "0.11.0", "gpt-oss-120b", "--max-num-batched-tokens 1024", 131_072, "4.54"),
    Refusal("public notes, a tuned Qwen3-8B, 2025-10-08", "0.11.0", "Qwen3-8B", "", 40_960, "5.62", 4.50, 32_768),
    Refusal("public notes, Qwen3-1.7B", "0.14.0", "Qwen3-1.7B", "", 40_960, "4.38"),
    Refusal("public notes, Qwen3-32B-AWQ on a GPU of 24 GiB", "0.14.0", "Qwen3-32B", "", 16_384, "4.00"),
    Refusal("public notes, Llama 3.3 70B", "0.16.0", "Llama-3.3-70B-Instruct", "--kv-cache-dtype fp8", 131_072, "20.00"),
    Refusal("public notes, a 27B NVFP4 model on two RTX 5060 Ti", "0.20.2", "Qwen3.6-27B",
            "--tensor-parallel-size 2 --kv-cache-dtype fp8 --enable-prefix-caching " + mtp(3), 160_000, "2.98", 2.9, 153_600),
    Refusal("kaito-project/kaito#2132", "0.25.0", "Mistral-Small-4-119B-2603", "", 1_048_576, "22.50", 17.39, 810_208),
    Refusal("public notes, Qwen3.8-27B-FP8 on an L40S", "0.25.0", "Qwen3.5-27B", "", 131_072, "8.18", 7.04, 112_896),
    Refusal("public notes, Kimi K3 on two nodes", "0.26.0", "Kimi-K3",
            "--tensor-parallel-size 16 --no-enable-prefix-caching", 32_768, "0.88", 0.82, 30_336),
    Refusal("public notes, Qwen3.8-27B-AWQ on an RTX 4090", "0.27.1", "Qwen3.6-27B",
            "--kv-cache-dtype fp8 --no-enable-prefix-caching", 262_144, "8.18"),
    Refusal("public reply to a pull request of vLLM, Qwen3.5 on an RTX 5090: what prefix caching costs", "0.29.0", "Qwen3.6-27B",
            "--kv-cache-dtype fp8 --enable-prefix-caching --mamba-cache-mode align " + mtp(3), 262_144, "9.29", 9.28, 260_800),
    # A server's default on a GPU of 24 GiB: 2,048 batched tokens.
    Refusal("public comparison of Windows and WSL, Qwen3.8-27B with its drafter", "0.29.0", "Qwen3.5-27B",
            "--mamba-ssm-cache-dtype float16 --enable-prefix-caching --max-num-batched-tokens 2048 " + dflash(7),
            71_680, "6.37"),
    # On AMD fp8 stays a byte an element: (78 · 576 + 21 · 132) · 64 B a block.
    Refusal("public notes, GLM-5.3 on four MI355X", "0.33.0", "GLM-5.3",
            "--tensor-parallel-size 4 --kv-cache-dtype fp8 --attention-backend ROCM_AITER_MLA_SPARSE", 1_048_576, "46.58"),
)  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda row: f"{row.version}-{row.model}")
def test_agrees_with_the_published_refusal(kvctl: Run, tmp_path: Path, refusal: Refusal) -> None:
    command = refusal.command.replace("DRAFTER", drafter(tmp_path)) or "--enforce-eager"

    def needed(length: int) -> float:
        reserved: int = planned(kvctl, refusal.model, refusal.version, command, "--ctx", str(length))["reserved_bytes"]
        return reserved / GIB

    assert f"{needed(refusal.length):.2f}" == refusal.needed, refusal.where
    if refusal.available is not None and refusal.longest is not None:
        assert needed(refusal.longest) <= refusal.available + 0.005
        assert needed(refusal.longest + 1) > refusal.available - 0.005


def test_a_pinned_pool_of_a_drafting_server(kvctl: Run, tmp_path: Path) -> None:
    """Public comparison of Windows and WSL, 0.29: 6·10⁹ B give 61,303 tokens (1.01x) at 60,928, 7·10⁹ B 73,315 (1.02x) at 71,680."""
    # Groups of 5, the drafter's windows: 16 full layers are padded to 20, 48 recurrent ones to 50. A request of 71,680
    # holds 4 · 160 + 10 · 9 + 15 of them; in flight are 2 · 2,048 tokens, a server's default on a GPU of 24 GiB.
    rest = f"--max-num-batched-tokens 2048 --mamba-ssm-cache-dtype float16 --enable-prefix-caching {dflash(7)}"
    rest = rest.replace("DRAFTER", drafter(tmp_path))
    for budget, length, tokens, concurrency in (
        (6_000_000_000, 60_928, 61_303, "1.01"),
        (7_000_000_000, 71_680, 73_315, "1.02"),
    ):
        command = f"--kv-cache-memory-bytes {budget} --max-model-len {length} {rest}"
        got = planned(kvctl, "Qwen3.5-27B", "0.29.0", command)
        assert got["block_size"] == 448
        assert (got["reported_capacity"], f"{got['max_concurrency']:.2f}") == (tokens, concurrency)


def test_glm_5_3_flash_with_drafts(kvctl: Run) -> None:
    """vllm-project/vllm#57261: 873 blocks of 14,611,968 bytes on each of 4 GPUs, 45 of them a request of 32,768."""
    got = planned(
        kvctl, "GLM-5.3-Flash", "0.31.0", f"-tp 4 --max-model-len 32768 --num-gpu-blocks-override 873 {mtp(3)}"
    )
    assert (got["block_size"], got["bytes_per_block"], got["blocks_per_request"]) == (1152, 14_611_968, 45)
    assert (got["reported_capacity"], f"{got['max_concurrency']:.2f}") == (635_699, "19.40")


def test_what_a_blackwell_gpu_keeps_in_fp8_is_said(kvctl: Run) -> None:
    """vllm 0.32 and 0.33 model_executor/models/config.py: GlmMoeDsaForCausalLM, Glm5NextModelConfig."""
    for name, version, told in (
        ("GLM-5.1", "0.31", False), ("GLM-5.1", "0.32", True), ("GLM-5.3-Flash", "0.32", False), ("GLM-5.3-Flash", "0.33", True),
    ):  # fmt: skip
        outcome = kvctl("size", name, "--ctx", "32k", "--engine", f"vllm@{version}", "-tp", "8")
        assert outcome.code == 0
        assert ("a Blackwell GPU keeps" in outcome.err) is told
    fp8 = ("--kv-cache-dtype", "fp8", "--attention-backend", "FLASHINFER_MLA_SPARSE")
    assert "a Blackwell GPU keeps" not in kvctl("size", "GLM-5.1", "--ctx", "32k", "--engine", "vllm", *fp8).err


def test_pooled_indexers_before_and_over_stages(kvctl: Run) -> None:
    for options, message in (
        (("--engine", "vllm@0.29"), "vLLM 0.29 does not serve indexers that pool tokens"),
        (("--engine", "vllm", "-pp", "2"), "pooled indexers over pipeline stages"),
    ):
        outcome = kvctl("size", "GLM-5.3-Flash", "--ctx", "32k", *options)
        assert outcome.code != 0
        assert message in outcome.err


# -- block sizes --------------------------------------------------------------------------------------

BLOCKS = (
    ("public notes, Qwen3.5-9B in bf16, fp8 and turboquant", "0.28.0", "Qwen3.5-9B", "", 528),
    ("", "0.28.0", "Qwen3.5-9B", "--kv-cache-dtype fp8", 1056),
    ("", "0.28.0", "Qwen3.5-9B", "--kv-cache-dtype turboquant_4bit_nc", 2048),
    ("ROCm/ROCm#6055", "0.18.1rc1.dev27+g63f49b8bd", "Qwen3.5-35B-A3B", "--dtype half --quantization awq", 1056),
    ("public log, Nemotron-Cascade-2-30B-A3B-NVFP4", "0.19.0", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
     "--kv-cache-dtype fp8 --mamba-ssm-cache-dtype float32", 4176),
    ("public log, Qwen3.5-27B AutoRound", "0.19.1", "Qwen3.5-27B", "--dtype bfloat16", 784),
    ("public notes, Qwen3.8-27B on two GPUs", "0.29.0", "Qwen3.6-27B", "-tp 2 --kv-cache-dtype fp8_e4m3 " + mtp(3), 1600),
    ("syv-ai/qwen38-27b-rtx3090#102: 15 draft tokens", "0.28.0", "Qwen3.5-27B", "--mamba-ssm-cache-dtype float16 " + dflash(15), 480),
    ("syv-ai/qwen38-27b-rtx3090#102: 7, and a cache of 8 bits with scales by head", "0.28.0", "Qwen3.5-27B",
     "--mamba-ssm-cache-dtype float16 --kv-cache-dtype int8_per_token_head " + dflash(7), 864),
    ("public notes, Kimi K3 on two nodes", "0.26.0", "Kimi-K3", "--tensor-parallel-size 16", 384),
    ("public notes, LFM2.5-1.2B: pages padded by 300%", "0.17.0", "LFM2-1.2B", "--dtype float16", 16),
)  # fmt: skip


@pytest.mark.parametrize(("where", "version", "model", "command", "block"), BLOCKS)
def test_blocks_hold_as_many_tokens(
    kvctl: Run, tmp_path: Path, where: str, version: str, model: str, command: str, block: int
) -> None:
    command = command.replace("DRAFTER", drafter(tmp_path)) or "--enforce-eager"
    assert planned(kvctl, model, version, command, "--ctx", "32k")["block_size"] == block, where


def test_lfm2_is_consistent_with_its_log(kvctl: Run) -> None:
    """Public notes, LFM2.5-1.2B on a MetaX C500: 217,264 tokens, 313.37x at 2,048; 2 padding layers, no memory published."""
    # 40,738 blocks: // 3 groups · 16 = 217,264, and / (128 + 2) = 313.37
    got = planned(kvctl, "LFM2-1.2B", "0.17.0", "--max-model-len 2048 --num-gpu-blocks-override 40738")
    assert (got["reported_capacity"], f"{got['max_concurrency']:.2f}") == (217_264, "313.37")
