"""Start-up logs that other people published, for engines other than vLLM.

Each row: where it was published, the model, how it was started (as flags of the engine, as far as they count
here), and lines of the log. What the log does not follow from its flags is given as SGLang printed it: the tokens
of the pool and, where the budget chose them, the slots. Fine-tunes and re-quantised files stand under the model
whose shape they have.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from conftest import Outcome

Run = Callable[..., Outcome]


def kv(tokens: int, key: str, value: str = "", dtype: str = "") -> str:
    """SGLang's line; before 0.5.13 without a dtype, for latents with one size."""
    sizes = f"K size: {key} GB, V size: {value} GB" if value else f"KV size: {key} GB"
    return f"KV Cache is allocated. {f'dtype: torch.{dtype}, ' if dtype else ''}#tokens: {tokens}, {sizes}"


def mamba(slots: int, conv: str, ssm: str, rest: str = "") -> str:
    return f"Mamba Cache is allocated. max_mamba_cache_size: {slots}, conv_state size: {conv}GB, ssm_state size: {ssm}GB{rest}"


def cache(
    total: str, cells: int, layers: int, slots: str, types: str, key: str, value: str, name: str = "llama_kv_cache"
) -> str:
    """llama.cpp's line."""
    k, _, v = types.partition("/")
    return (
        f"{name}: size = {total:>7} MiB ({cells:6d} cells, {layers:3d} layers, {slots:>4} seqs), "
        f"K ({k}): {key:>7} MiB, V ({v or k}): {value:>7} MiB"
    )


def swa(cells: int, name: str = "llama_kv_cache") -> str:
    return f"{name}_iswa: creating     SWA KV cache, size = {cells} cells"


def recurrent(total: str, slots: int, layers: int, conv: str, state: str, kept: str = "") -> str:
    return (
        f"llama_memory_recurrent: size = {total:>7} MiB ({slots:6d} cells, {layers:3d} layers, {slots:2d} seqs{kept}), "
        f"R (f32): {conv:>7} MiB, S (f32): {state:>7} MiB"
    )


SGLANG = [
    # where, version, model, flags, lines
    ("sgl-project/sglang, an issue of May 2025", "0.4.6", "DeepSeek-R1", "--tp 8 --max-total-tokens 274934", [kv(274_934, "17.99")]),
    ("a learner's log, May 2025", "0.4.6", "Qwen3-0.6B", "--max-total-tokens 15387", [kv(15_387, "0.82", "0.82")]),
    ("a deployment guide, August 2025", "0.5.1", "Qwen3-0.6B", "--max-total-tokens 104273", [kv(104_273, "5.57", "5.57")]),
    ("sgl-project/sglang#11309, October 2025: 8 B200", "0.5.4", "DeepSeek-V3.2",
     "--tp 8 --dp 8 --enable-dp-attention --kv-cache-dtype fp8_e4m3 --max-total-tokens 975424", [kv(975_424, "43.67")]),
    ("a parser of SLURM logs, November 2025: DP and EP", "0.5.4", "DeepSeek-R1",
     "--kv-cache-dtype fp8_e4m3 --max-total-tokens 524288", [kv(524_288, "17.16")]),
    ("an injection experiment: Mixtral-8x7B", "0.5.3", "Mixtral-8x7B-Instruct-v0.1", "--max-total-tokens 356458", [kv(356_458, "21.76", "21.76")]),
    ("documentation of SGLang, rendered February 2026", "0.5.8", "Qwen2.5-0.5B-Instruct", "--max-total-tokens 20480", [kv(20_480, "0.12", "0.12")]),
    ("a benchmark of February 2026: Granite 4 on two GPUs", "0.5.8", "ibm-granite/granite-4.0-h-small",
     "--tp 2 --max-total-tokens 399740 --max-mamba-cache-size 38", [mamba(38, "0.03", "2.74"), kv(399_740, "1.52", "1.52")]),
    ("a log of 26 February 2026: Kimi-K2.5 on eight GPUs of 288 GB", "0.5.9", "Kimi-K2.5", "--tp 8 --max-total-tokens 2454421", [kv(2_454_421, "160.63")]),
    ("a recipe for GLM-5 on eight SM120 GPUs", "0.5.9", "zai-org/GLM-5", "--tp 8 --max-total-tokens 314304 --kv-cache-dtype bf16", [kv(314_304, "29.32")]),
    ("a log of April 2026: Qwen3.5-9B on two GPUs of 24 GB", "0.5.10", "Qwen3.5-9B",
     "--tp 2 --max-total-tokens 327310 --max-mamba-cache-size 186", [mamba(186, "0.10", "4.38"), kv(327_310, "2.50", "2.50")]),
    ("a comparison of engines on RTX PRO 6000: Qwen3.6-27B-FP8", "0.5.10", "Qwen3.6-27B",
     "--max-total-tokens 403904 --max-mamba-cache-size 154", [mamba(154, "0.43", "21.80"), kv(403_904, "12.33", "12.33")]),
    ("a tuning guide: Qwen3.6-27B, --tp 4", "0.5.10", "Qwen3.6-27B", "--tp 4 --max-total-tokens 1048576", [kv(1_048_576, "8.00", "8.00")]),
    ("a test of NemotronH on four XPUs", "0.5.10", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
     "--tp 4 --max-total-tokens 1557504 --max-mamba-cache-size 8", [mamba(8, "0.00", "0.10"), kv(1_557_504, "2.23", "2.23")]),
    ("ktransformers on an H100: Qwen3-30B-A3B", "0.5.10", "Qwen3-30B-A3B", "--max-total-tokens 549277", [kv(549_277, "25.14", "25.14")]),
    ("flashinfer-ai/flashinfer#3333, May 2026: TP 8, fp8 latents of 576 B", "0.5.12", "DeepSeek-V3.2",
     "--tp 8 --kv-cache-dtype fp8_e4m3 --dsa-decode-backend trtllm --max-total-tokens 4636736", [kv(4_636_736, "186.50")]),
    ("deployment notes, May 2026: Kimi-K2.6 INT4", "0.5.12", "Kimi-K2.6", "--tp 8 --max-total-tokens 209413", [kv(209_413, "13.71")]),
    ("Ascend/sglang, a CI run of June 2026: Kimi-K2.6 on NPUs, pages of 128", "0.5.13", "Kimi-K2.6",
     "--page-size 128 --max-total-tokens 76416", [kv(76_416, "5.01", dtype="bfloat16")]),
    ("documentation of SGLang, rendered May 2026", "0.5.13", "meta-llama/Llama-3.1-8B-Instruct", "--max-total-tokens 20480",
     [kv(20_480, "1.25", "1.25", "bfloat16")]),
    ("a self-study guide: MiniCPM5-1B", "0.5.13", "MiniCPM5-1B", "--max-total-tokens 251788", [kv(251_788, "2.88", "2.88", "bfloat16")]),
    ("a deployment note of July 2026: GLM-5.2, fp8 with an indexer", "0.5.12", "zai-org/GLM-5.2",
     "--kv-cache-dtype fp8_e4m3 --max-total-tokens 131072", [kv(131_072, "7.51")]),
    ("a check of CUDA graphs: Qwen3.5-4B", "0.5.16", "Qwen3.5-4B", "--max-total-tokens 1651079", [kv(1_651_079, "25.19", "25.19", "bfloat16")]),
    ("ktransformers notes: Qwen3-Next-80B", "0.5.16", "Qwen3-Next-80B-A3B-Instruct", "--max-total-tokens 53440", [kv(53_440, "0.61", "0.61", "bfloat16")]),
    ("sgl-project/sglang test of memory thresholds: gpt-oss-20b", "0.5.16", "gpt-oss-20b", "--max-total-tokens 968726",
     [kv(774_980, "8.87", "8.87", "bfloat16"), kv(968_726, "11.09", "11.09", "bfloat16"), "SWAKVPool mem usage: 39.91 GB, swa size: 774980, full size: 968726"]),
    ("a recipe with one draft layer: Qwen3.5-27B on two GPUs", "0.5.16", "Qwen3.5-27B",
     "--tp 2 --kv-cache-dtype fp8_e4m3 --speculative-algorithm NEXTN --speculative-num-draft-tokens 8 --max-total-tokens 262144",
     [kv(262_144, "2.00", "2.00", "float8_e4m3fn"), kv(262_144, "0.13", "0.13", "float8_e4m3fn")]),
    ("noonghunna/club-3090#1261, September 2026: two RTX 5090", "0.5.16", "Qwen3.5-27B",
     "--tp 2 --kv-cache-dtype fp8_e4m3 --max-total-tokens 454112", [kv(454_112, "3.46", "3.46", "float8_e4m3fn")]),
    ("upgrade notes of August 2026: Qwen3.6-27B on an A100 with EAGLE, six draft tokens", "0.5.17", "Qwen3.6-27B",
     "--max-total-tokens 171008 --max-mamba-cache-size 43 --mamba-ssm-dtype bfloat16 --max-running-requests 4 "
     "--speculative-algorithm NEXTN --speculative-num-draft-tokens 6",
     [mamba(43, "0.12", "3.09", " intermediate_ssm_state_cache size: 2.11GB intermediate_conv_window_cache size: 0.04GB"),
      kv(171_008, "5.22", "5.22", "bfloat16"), kv(171_008, "0.33", "0.33", "bfloat16")]),
    ("a serving guide of August 2026: Qwen3.8-27B-FP8 on an H100", "0.5.18", "Qwen3.5-27B",
     "--max-running-requests 32 --max-total-tokens 330323 --max-mamba-cache-size 124",
     [mamba(124, "0.34", "17.58"), kv(330_323, "10.08", "10.08", "bfloat16")]),
    ("an experiment's record: Qwen3.8-27B without prefix caching", "0.5.18", "Qwen3.5-27B",
     "--disable-radix-cache --max-running-requests 32 --max-total-tokens 535124", [kv(535_124, "16.33", "16.33", "bfloat16")]),
    ("a log of 27 August 2026: Qwen3-30B-A3B in fp8", "0.5.18", "Qwen3-30B-A3B", "--max-total-tokens 392920", [kv(392_920, "17.99", "17.99", "bfloat16")]),
    ("a catalogue of deployments: gemma-4-E4B-it on a DGX Spark", "0.5.18", "gemma-4-E4B-it", "--max-total-tokens 997846",
     ["SWAKVPool mem usage: 79.94 GB, swa size: 798276, full size: 997846"]),
    ("a study of retractions, October 2026: gemma-4-26B-A4B, fp8", "0.5.18", "gemma-4-26B-A4B-it",
     "--kv-cache-dtype fp8_e4m3 --max-total-tokens 37081", ["SWAKVPool mem usage: 3.18 GB, swa size: 29664, full size: 37081"]),
    ("a recipe for Qwen3.8-27B-NVFP4 on a DGX Spark", "0.5.12", "Qwen3.5-27B",
     "--kv-cache-dtype fp8_e4m3 --max-mamba-cache-size 360 --max-running-requests 72 --max-total-tokens 228520",
     [mamba(360, "0.99", "50.77"), kv(228_520, "3.49", "3.49")]),
    ("notes on AMD's Strix Halo: Qwen3.5-35B-A3B", "0.5.12", "Qwen3.5-35B-A3B", "--max-mamba-cache-size 32 --max-total-tokens 4096",
     [mamba(32, "0.05", "1.93"), kv(4096, "0.04", "0.04")]),
    ("an audit's fixture, October 2026: Qwen3.5-9B with 16 draft tokens, no prefix caching", "0.5.19", "Qwen3.5-9B",
     "--disable-radix-cache --max-running-requests 64 --speculative-num-draft-tokens 16 --max-total-tokens 295950",
     [mamba(64, "0.07", "3.05", " intermediate_ssm_state_cache size: 48.75GB intermediate_conv_window_cache size: 0.43GB"),
      kv(295_950, "4.52", "4.52", "bfloat16")]),
    ("a guide to --mamba-full-memory-ratio: eight B300, fp8", "0.5.22", "moonshotai/Kimi-K3",
     "--tp 8 --kv-cache-dtype fp8_e4m3 --max-mamba-cache-size 257 --max-total-tokens 1167552",
     [mamba(257, "0.46", "13.04"), kv(1_167_552, "15.03", dtype="float8_e4m3fn")]),
]  # fmt: skip


@pytest.mark.parametrize("row", SGLANG, ids=lambda row: row[0])
def test_sglang(kvctl: Run, row: tuple[str, str, str, str, list[str]]) -> None:
    _, version, model, flags, lines = row
    outcome = kvctl(
        "size", model, "--engine", f"sglang@{version}", "--engine-args", f"--model-path x {flags}", "--json"
    )
    assert outcome.code == 0, outcome.err
    log = outcome.json["results"][0]["allocation"]["log"]
    # From 0.5.17 on pools have labels, which says the same.
    assert not set(lines) - set(log), log


# The slots and the tokens of a log give the memory that was divided; its rule gives the slots back.
@pytest.mark.parametrize(
    ("version", "model", "flags", "tokens", "slots", "state", "row", "requests"),
    [
        # 24 of 32 layers: 4,096 + 2 · 2,048 channels · 3 · 2 B and 32 heads · 128 · 128 · 4 B, half on each rank
        ("0.5.10", "Qwen3.5-9B", "--tp 2", 327_310, 186, 24 * (24_576 + 2**20), 8 * 2 * 2 * 256 * 2, 62),
        # 48 of 64 layers: 10,240 channels · 3 · 2 B and 48 heads · 128 · 128 · 4 B; one spare slot from 0.5.17 on
        ("0.5.10", "Qwen3.6-27B", "", 403_904, 154, 48 * (61_440 + 3 * 2**20), 16 * 4 * 2 * 256 * 2, 51),
        ("0.5.18", "Qwen3.5-27B", "--max-running-requests 32", 330_323, 124, 48 * (61_440 + 3 * 2**20), 16 * 4 * 2 * 256 * 2, 24),
    ],
)  # fmt: skip
def test_sglang_divides_the_memory_of_published_logs(
    kvctl: Run, version: str, model: str, flags: str, tokens: int, slots: int, state: int, row: int, requests: int
) -> None:
    spare = int(version >= "0.5.17")
    budget = (slots + spare) * state + tokens * row + row // 2
    outcome = kvctl("size", model, "--engine", f"sglang@{version}", "--ctx", "256k", "--kv-budget", str(budget),
                    "--engine-args", f"--model-path x {flags}", "--json")  # fmt: skip
    log = "\n".join(outcome.json["results"][0]["allocation"]["log"])
    assert re.findall(r"max_mamba_cache_size: (\d+)|max_total_num_tokens=(\d+)|max_running_requests=(\d+)", log) == [
        (str(slots), "", ""), ("", str(tokens), ""), ("", "", str(requests)),
    ]  # fmt: skip


LLAMA_CPP = [
    # where, build, model, command line, lines
    ("LM Studio's log, 22 July 2025, less the padding of its seqs", "b6122", "Qwen3-8B", "-c 131072 -np 1",
     [cache("18432.00", 131_072, 36, "1/1", "f16", "9216.00", "9216.00", "llama_kv_cache_unified")]),
    ("a thesis' log: Llama-3.2-1B on a CPU", "b6122", "Llama-3.2-1B-Instruct", "-c 1024 -np 1", [cache("32.00", 1024, 16, "1/1", "f16", "16.00", "16.00", "llama_kv_cache_unified")]),
    ("a log over RPC: Llama-3.1-70B on two machines", "b6122", "Llama-3.1-70B-Instruct", "-c 4096 -np 1",
     [cache("1280.00", 4096, 80, "1/1", "f16", "640.00", "640.00", "llama_kv_cache_unified")]),
    ("a parser's example: DeepSeek-V3", "b5640", "DeepSeek-V3", "-c 131072 -ctk q4_0 -ctv q4_0 -fa",
     ["llama_kv_cache_unified: size = 4666.50 MiB (131072 cells,  61 layers,  1 seqs), K (q4_0): 2470.50 MiB, V (q4_0): 2196.00 MiB"]),
    ("a benchmark's log: Qwen3-30B-A3B on two GPUs", "b5640", "Qwen3-30B-A3B", "-c 16384",
     ["llama_kv_cache_unified: size = 1536.00 MiB ( 16384 cells,  48 layers,  1 seqs), K (f16):  768.00 MiB, V (f16):  768.00 MiB"]),
    ("a log of Phi-3-mini", "b5640", "Phi-3.5-mini-instruct", "-c 4096",
     ["llama_kv_cache_unified: size = 1536.00 MiB (  4096 cells,  32 layers,  1 seqs), K (f16):  768.00 MiB, V (f16):  768.00 MiB"]),
    ("LM Studio's log, 12 August 2025: gpt-oss-120b", "b6122", "gpt-oss-120b", "-c 4096 -np 1 --swa-full",
     [cache("144.00", 4096, 18, "1/1", "f16", "72.00", "72.00", "llama_kv_cache_unified"), swa(4096, "llama_kv_cache_unified")]),
    ("ggml-org/llama.cpp#14604, July 2025: Gemma 3n", "b6122", "gemma-3n-E4B-it", "-c 32768",
     [cache("256.00", 32_768, 4, "1/1", "f16", "128.00", "128.00", "llama_kv_cache_unified")]),
    ("a speed table of Qwen2.5-VL-3B", "b6122", "Qwen2.5-VL-3B-Instruct", "-c 4096",
     [cache("144.00", 4096, 36, "1/1", "f16", "72.00", "72.00", "llama_kv_cache_unified")]),
    ("a log on an RTX card: gpt-oss-20b", "b6673", "gpt-oss-20b", "-c 131072",
     [cache("3072.00", 131_072, 12, "1/1", "f16", "1536.00", "1536.00"), swa(768), cache("18.00", 768, 12, "1/1", "f16", "9.00", "9.00")]),
    ("a log on an Apple M5: gpt-oss-20b with the server's four slots", "b8179", "gpt-oss-20b", "-c 131072",
     [cache("3072.00", 131_072, 12, "4/1", "f16", "1536.00", "1536.00"), swa(1024), cache("24.00", 1024, 12, "4/1", "f16", "12.00", "12.00")]),
    ("a log on Metal: gpt-oss-20b with a batch of 2,048", "b7698", "gpt-oss-20b", "-c 131072 -np 1 -ub 2048",
     [swa(2304), cache("54.00", 2304, 12, "1/1", "f16", "27.00", "27.00")]),
    ("ggml-org/llama.cpp, documentation of the Hexagon backend: gpt-oss-20b", "b7347", "gpt-oss-20b", "-c 8192 -np 1 -b 128 -ctk q8_0 -ctv q8_0 -fa on",
     [cache("102.00", 8192, 12, "1/1", "q8_0", "51.00", "51.00"), swa(256), cache("3.19", 256, 12, "1/1", "q8_0", "1.59", "1.59")]),
    ("ggml-org/llama.cpp, documentation of the Hexagon backend: OLMoE-1B-7B", "b7347", "allenai/OLMoE-1B-7B-0924", "-c 8192 -np 1 -ctk q8_0 -ctv q8_0 -fa on",
     [cache("544.00", 8192, 16, "1/1", "q8_0", "272.00", "272.00")]),
    ("a log of Qwen3.5-0.8B: the server's defaults on a CPU", "b8352", "Qwen3.5-0.8B", "-c 262144",
     [cache("3072.00", 262_144, 6, "4/1", "f16", "1536.00", "1536.00"), recurrent("77.06", 4, 24, "5.06", "72.00")]),
    ("a comparison of KV types: Qwen3.5-9B", "b8352", "Qwen3.5-9B", "-c 135168",
     [cache("4224.00", 135_168, 8, "4/1", "f16", "2112.00", "2112.00"), recurrent("201.00", 4, 32, "9.00", "192.00")]),
    ("a reading of a log: Qwen3.5-35B-A3B", "b8352", "Qwen3.5-35B-A3B", "-c 32768", [recurrent("251.25", 4, 40, "11.25", "240.00")]),
    ("lmstudio-ai/lmstudio-bug-tracker#1862, April 2026: Qwen3.6-27B", "b8390", "Qwen3.6-27B", "-c 262144",
     [cache("16384.00", 262_144, 16, "4/1", "f16", "8192.00", "8192.00"), recurrent("598.50", 4, 64, "22.50", "576.00")]),
    ("a guide to slots: Qwen3-Next", "", "Qwen3-Next-80B-A3B-Instruct", "-c 131072 -ctk q8_0 -ctv q8_0", [cache("1632.00", 131_072, 12, "4/1", "q8_0", "816.00", "816.00")]),
    ("the same guide, eight slots", "", "Qwen3-Next-80B-A3B-Instruct", "-c 131072 -np 8 -ctk q8_0 -ctv q8_0", [cache("1632.00", 16_384, 12, "8/8", "q8_0", "816.00", "816.00")]),
    ("a study of unified caches: 4,096 tokens over ten slots", "", "meta-llama/Llama-2-7b-hf", "-c 4096 -np 10 -ctk q8_0 -ctv q8_0",
     [cache("1360.00", 512, 32, "10/10", "q8_0", "680.00", "680.00")]),
    ("the same study, unified", "", "meta-llama/Llama-2-7b-hf", "-c 5120 -np 10 --kv-unified -ctk q8_0 -ctv q8_0", [cache("1360.00", 5120, 32, "10/1", "q8_0", "680.00", "680.00")]),
    ("ggml-org/llama.cpp#21610: MiniMax-M2.5, a context that --fit chose", "", "MiniMax-M2.5", "-c 87296 -ctk q8_0 -ctv q8_0", [cache("11231.69", 87_296, 62, "4/1", "q8_0", "5615.84", "5615.84")]),
    ("a start script: MiniMax-M2.7 with two types", "", "MiniMax-M2.7", "-c 196608 -np 1 -ctk q8_0 -ctv q4_0", [cache("19344.00", 196_608, 62, "1/1", "q8_0/q4_0", "12648.00", "6696.00")]),
    ("a start script: gemma-4-31B on an R9700", "", "gemma-4-31B-it", "-c 96856 -np 1 -ctk q8_0 -ctv q8_0", [cache("4026.88", 97_024, 10, "1/1", "q8_0", "2013.44", "2013.44")]),
    ("a parser's fixture: gemma-4-31B with four slots", "", "gemma-4-31B-it", "-c 32768",
     [cache("2560.00", 32_768, 10, "4/1", "f16", "1280.00", "1280.00"), swa(4608), cache("3600.00", 4608, 50, "4/1", "f16", "1800.00", "1800.00")]),
    ("a probe of gemma-4-26B-A4B at its full length", "", "gemma-4-26B-A4B-it", "-c 262144 -np 1 -ctk q8_0 -ctv q8_0",
     [cache("2720.00", 262_144, 5, "1/1", "q8_0", "1360.00", "1360.00"), cache("159.38", 1536, 25, "1/1", "q8_0", "79.69", "79.69")]),
    ("ggml-org/llama.cpp#21730, April 2026: gemma-4-E4B", "", "gemma-4-E4B-it", "-c 131072 -np 1", [cache("2048.00", 131_072, 4, "1/1", "f16", "1024.00", "1024.00"), swa(1024)]),
    ("a sizing library's truth: gemma-4-E4B", "", "gemma-4-E4B-it", "-c 16384 -np 1 -ctk q8_0 -ctv q8_0", [cache("21.25", 1024, 20, "1/1", "q8_0", "10.62", "10.62")]),
    ("a log on Metal: gemma-4-E2B with a batch of 2,048 and four slots", "", "gemma-4-E2B-it", "-c 8192 -ub 2048",
     [cache("48.00", 8192, 3, "4/1", "f16", "24.00", "24.00"), swa(4096), cache("48.00", 4096, 12, "4/1", "f16", "24.00", "24.00")]),
    ("Ollama's log of May 2026, its runner's flags: gemma-2-2b", "b8390", "gemma-2-2b-it", "-c 16384 -np 2 --swa-full -fa off",
     [cache("832.00", 8192, 13, "2/2", "f16", "416.00", "416.00"), swa(8192)]),
    ("Ollama's log of March 2026, its runner's flags: gemma-2b", "b8390", "google/gemma-2b-it", "-c 4096 -np 1", [cache("72.00", 4096, 18, "1/1", "f16", "36.00", "36.00")]),
    ("a log of llama-cli: Qwen3-8B on a CPU", "b7698", "Qwen3-8B", "-c 4096 -np 1", [cache("576.00", 4096, 36, "1/1", "f16", "288.00", "288.00")]),
    ("a log of Qwen3-Coder-30B", "b7698", "Qwen3-30B-A3B", "-c 65536", [cache("6144.00", 65_536, 48, "4/1", "f16", "3072.00", "3072.00")]),
    ("measurements of a VRAM estimator: Qwen2.5-1.5B", "", "Qwen2.5-1.5B-Instruct", "-c 16384", [cache("448.00", 16_384, 28, "4/1", "f16", "224.00", "224.00")]),
    ("an allocator's fixture: GLM-4.7-Flash", "", "GLM-4.7-Flash", "-c 32768 -np 1", [cache("1692.00", 32_768, 47, "1/1", "f16", "1692.00", "0.00")]),
    ("a log over four GPUs: GLM-5 with its indexer", "", "zai-org/GLM-5", "-c 524288 -np 1", [cache("44928.00", 524_288, 78, "1/1", "f16", "44928.00", "0.00"),
     "llama_kv_cache_dsa: creating indexer KV cache, size = 524288 cells"]),
    ("a log over eight GPUs: GLM-5 at 768,000 tokens", "", "zai-org/GLM-5", "-c 768000 -np 1", [cache("65812.50", 768_000, 78, "1/1", "f16", "65812.50", "0.00")]),
    ("ggml-org/llama.cpp#27872: DeepSeek-V4-Flash, all of its window", "", "deepseek-ai/DeepSeek-V4-Flash", "-c 8448 -np 1 --swa-full",
     [cache("354.75", 8448, 43, "1/1", "f16", "354.75", "0.00")]),
    ("a log of Trinity-Nano with a batch of 512", "", "arcee-ai/Trinity-Nano-Base", "-c 131072 -np 1",
     [cache("1792.00", 131_072, 14, "1/1", "f16", "896.00", "896.00"), swa(2560), cache("105.00", 2560, 42, "1/1", "f16", "52.50", "52.50")]),
    ("a daemon's log: Qwen3.6-35B-A3B", "", "Qwen3.6-35B-A3B", "-c 54631 -np 1", [cache("1070.00", 54_784, 10, "1/1", "f16", "535.00", "535.00")]),
    ("a comparison of Macs, 32,768 tokens: Qwen3.6-35B-A3B", "b9842", "Qwen3.6-35B-A3B", "-c 32768 -np 1",
     [cache("640.00", 32_768, 10, "1/1", "f16", "320.00", "320.00"), recurrent("62.81", 1, 40, "2.81", "60.00", "  0 rs_seq")]),
    ("a KV quantization test: Qwen3.5-0.8B", "b9842", "Qwen3.5-0.8B", "-c 32768 -np 1 -ctk q8_0 -ctv q8_0",
     [cache("204.00", 32_768, 6, "1/1", "q8_0", "102.00", "102.00"), recurrent("19.27", 1, 24, "1.27", "18.00", "  0 rs_seq")]),
    ("a comparison on a slow GPU: Qwen3.5-9B, one slot", "b9842", "Qwen3.5-9B", "-c 8192 -np 1", [recurrent("50.25", 1, 32, "2.25", "48.00", "  0 rs_seq")]),
    ("an allocator's fixture: draft layers, three tokens", "b10361", "Qwen3.5-27B", "-c 32768 -np 1 --spec-type draft-mtp",
     [cache("2048.00", 32_768, 16, "1/1", "f16", "1024.00", "1024.00"), recurrent("598.50", 1, 64, "22.50", "576.00", "  3 rs_seq"),
      cache("128.00", 32_768, 1, "1/1", "f16", "64.00", "64.00")]),
    ("measured with Vulkan on b11342: an f16 draft cache beside q8_0", "b10361", "Qwen3.5-27B", "-c 65536 -np 1 -ctk q8_0 -ctv q8_0 --spec-type draft-mtp --spec-draft-n-max 2",
     [cache("2176.00", 65_536, 16, "1/1", "q8_0", "1088.00", "1088.00"), recurrent("448.88", 1, 64, "16.88", "432.00", "  2 rs_seq"),
      cache("256.00", 65_536, 1, "1/1", "f16", "128.00", "128.00")]),
    ("a log of a fine-tune with six draft tokens", "b10361", "Qwen3.6-27B", "-c 262144 -np 1 --spec-type draft-mtp --spec-draft-n-max 6",
     [cache("16384.00", 262_144, 16, "1/1", "f16", "8192.00", "8192.00"), cache("1024.00", 262_144, 1, "1/1", "f16", "512.00", "512.00"),
      recurrent("1047.38", 1, 64, "39.38", "1008.00", "  6 rs_seq")]),
]  # fmt: skip


@pytest.mark.parametrize("row", LLAMA_CPP, ids=lambda row: row[0])
def test_llama_cpp(kvctl: Run, row: tuple[str, str, str, str, list[str]]) -> None:
    _, build, model, flags, lines = row
    engine = f"llama.cpp@{build}" if build else "llama.cpp"
    outcome = kvctl("size", model, "--engine", engine, "--engine-args", f"llama-server -m x.gguf {flags}", "--json")
    assert outcome.code == 0, outcome.err
    log = [line.replace(", P (f32):    0.00 MiB", "") for line in outcome.json["results"][0]["allocation"]["log"]]
    assert not set(lines) - set(log), log


@pytest.mark.parametrize(
    ("where", "model", "flags", "lines"),
    [
        ("a log of August 2026: Qwen3-32B, q8_0", "Qwen3-32B", "OLLAMA_CONTEXT_LENGTH=8192 OLLAMA_KV_CACHE_TYPE=q8_0 OLLAMA_FLASH_ATTENTION=1",
         [cache("1088.00", 8192, 64, "1/1", "q8_0", "544.00", "544.00")]),
        ("a parser's anchor, September 2026: qwen3.6:35b-a3b", "Qwen3.6-35B-A3B", "OLLAMA_CONTEXT_LENGTH=262144 OLLAMA_KV_CACHE_TYPE=q8_0 OLLAMA_FLASH_ATTENTION=1",
         [cache("2720.00", 262_144, 10, "1/1", "q8_0", "1360.00", "1360.00")]),
        ("tuning notes: gpt-oss:20b, a batch of 1,024 above 4,096 tokens", "gpt-oss-20b", "OLLAMA_CONTEXT_LENGTH=16384",
         [cache("384.00", 16_384, 12, "1/1", "f16", "192.00", "192.00"), cache("30.00", 1280, 12, "1/1", "f16", "15.00", "15.00")]),
        ("a setup record: qwen3.5:9b", "Qwen3.5-9B", "OLLAMA_CONTEXT_LENGTH=16384", [cache("512.00", 16_384, 8, "1/1", "f16", "256.00", "256.00")]),
        ("a table of contexts: a 27B hybrid", "Qwen3.6-27B", "OLLAMA_CONTEXT_LENGTH=196608", [cache("12288.00", 196_608, 16, "1/1", "f16", "6144.00", "6144.00")]),
    ],
)  # fmt: skip
def test_ollama(kvctl: Run, where: str, model: str, flags: str, lines: list[str]) -> None:
    outcome = kvctl("size", model, "--engine-args", f"{flags} ollama serve", "--json")
    assert outcome.code == 0, (where, outcome.err)
    assert not set(lines) - set(outcome.json["results"][0]["allocation"]["log"])


@pytest.mark.parametrize(
    ("where", "model", "options", "tokens", "gib"),
    [
        ("a build log of a speech pipeline", "nvidia/Llama-3.1-Nemotron-Nano-8B-v1", [], 12_800, "1.56"),
        ("a course's log, Triton", "Qwen2.5-1.5B-Instruct", [], 273_792, "7.31"),
        ("the same course, a second engine", "Qwen2.5-0.5B-Instruct", [], 190_656, "2.18"),
        ("ai-dynamo/dynamo, TensorRT-LLM example of February 2025: DeepSeek-R1-Distill-Llama-8B", "Llama-3.1-8B-Instruct",
         ["--tokens-per-block", "64"], 220_480, "26.91"),
        ("a guide on an RTX 5090: Llama-3.1-8B, fp8", "Llama-3.1-8B-Instruct", ["--kv-dtype", "fp8"], 263_008, "16.05"),
    ],
)  # fmt: skip
def test_tensorrt_llm(kvctl: Run, where: str, model: str, options: list[str], tokens: int, gib: str) -> None:
    outcome = kvctl(
        "size", model, "--engine", "tensorrt-llm", "--ctx", "4k", "--max-tokens", str(tokens), "--json", *options
    )
    assert outcome.code == 0, (where, outcome.err)
    line = f"[MemUsageChange] Allocated {gib} GiB for max tokens in paged KV cache ({tokens})."
    assert any(line in found for found in outcome.json["results"][0]["allocation"]["log"])
