"""`--engine tensorrt-llm` against start-up logs that its users published, and hand calculations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from conftest import Outcome

from kvctl.allocation import Allocation, Serving
from kvctl.engines import engine
from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.formats import BF16, DType
from kvctl.model import build_spec
from kvctl.reports import SizeResult
from kvctl.size import SizePlan
from kvctl.size import size as size_of
from kvctl.sources import resolve
from kvctl.spec import Formats, ModelSpec

Run = Callable[..., Outcome]
GIB = 2**30


def spec_of(model: str, **overrides: Any) -> ModelSpec:
    return build_spec(resolve(model, source="catalogue"), overrides)


def sized(
    model: str | ModelSpec, ctx: int, serving: Serving, *, kv: str | None = None, version: str = "",
    sequences: int = 1, dtype: DType | None = None,
) -> SizeResult:  # fmt: skip
    rules = engine("tensorrt-llm" + (f"@{version}" if version else ""))
    fmt = rules.kv_dtype(kv, "--kv-cache-dtype") if kv else None
    plan = SizePlan(engine=rules, serving=serving, key=fmt, value=fmt, sequences=sequences, dtype=dtype)
    return size_of(spec_of(model) if isinstance(model, str) else model, ctx, plan)


def planned(model: str | ModelSpec, ctx: int, serving: Serving, **options: Any) -> Allocation:
    allocation = sized(model, ctx, serving, **options).allocation
    assert allocation is not None
    return allocation


def refused(model: str | ModelSpec, ctx: int, serving: Serving, **options: Any) -> str:
    with pytest.raises(KvctlError) as error:
        planned(model, ctx, serving, **options)
    return error.value.message


# -- logs that users published ----------------------------------------------------------------

# Model, options, tokens of the pool and the GiB beside them ("Allocated … GiB for max tokens in
# paged KV cache (…)"); the comment has version, source, and bytes a token by hand.
LOGS: list[tuple[str, Mapping[str, Any], str | None, int, str]] = [
    # 1.2.1, Qwen3-Reranker-0.6B, which has this shape: 28 layers · 8 heads · 128 · 2 · 2 B = 114,688
    ("Qwen3-0.6B", {}, None, 643_136, "68.69"),
    # 1.2.0rc2, nvidia/Qwen3-8B-FP8 with an fp8 cache: 36 · 8 · 128 · 2 = 73,728
    ("Qwen3-8B", {}, "fp8", 46_208, "3.17"),
    # 0.19.0, Llama-3.1-8B with an fp8 cache: 32 · 8 · 128 · 2 = 65,536
    ("Llama-3.1-8B", {}, "fp8", 263_008, "16.05"),
    # 1.3.0rc7, Kimi-K2.5 in NVFP4 with an fp8 cache, TP 8: 61 latents of 576 = 35,136 on every rank
    ("Kimi-K2.5", {"tensor_parallel": 8}, "fp8", 5_073_376, "166.02"),
    # Dynamo's documentation, TinyLlama over 2 GPUs: 22 · 2 of 4 heads · 64 · 2 · 2 B = 11,264
    ("TinyLlama-1.1B-Chat-v1.0", {"tensor_parallel": 2}, None, 1_800_032, "18.88"),
    # Dynamo's documentation, an 8B of this shape, blocks of 64: 32 · 8 · 128 · 2 · 2 B = 131,072
    ("DeepSeek-R1-Distill-Llama-8B", {"block_size": 64}, None, 220_480, "26.91"),
    # Triton, models of these shapes: 24 · 2 · 64 · 2 · 2 B = 12,288, and 28 · 2 · 128 · 2 · 2 B = 28,672
    ("Qwen2.5-0.5B", {"block_size": 64}, None, 190_656, "2.18"),
    ("Qwen2.5-1.5B", {"block_size": 64}, None, 273_792, "7.31"),
    # docs/source/reference/memory.md, a 7B with an fp8 cache and blocks of 64: 32 · 32 · 128 · 2 = 262,144
    ("Llama-2-7b-hf", {"block_size": 64}, "fp8", 259_840, "63.44"),
    # 1.2.1, an 8B of this shape: 32 · 8 · 128 · 2 · 2 B
    ("Llama-3.1-Nemotron-Nano-8B-v1", {}, None, 12_800, "1.56"),
]


@pytest.mark.parametrize(("model", "options", "kv", "tokens", "gib"), LOGS)
def test_prints_what_users_saw(model: str, options: Mapping[str, Any], kv: str | None, tokens: int, gib: str) -> None:
    version = "1.3" if model == "Kimi-K2.5" else ""
    plan = planned(model, 4096, Serving(max_tokens=tokens, **options), kv=kv, version=version)
    assert plan.log[-1] == f"[MemUsageChange] Allocated {gib} GiB for max tokens in paged KV cache ({tokens})."
    assert plan.capacity_tokens == tokens


def test_the_first_manager_rounds_up_to_1_1() -> None:
    """1.1.0rc3 on a DGX Spark with gpt-oss-120b: kv size 73,728 B a token, 5.95 GiB are 86,711 tokens."""
    # 36 · 8 · 64 · 2 · 2 B = 73,728: the windowed half keeps every token too
    budget = 86_711 * 73_728
    plan = planned("gpt-oss-120b", 131_072, Serving(kv_budget=budget), version="1.1")
    assert plan.log == (
        "Number of tokens per block: 32.",
        "[MemUsageChange] Allocated 5.95 GiB for max tokens in paged KV cache (86720).",
    )
    # Its log: "Attention window size 131072 exceeds upper bound 86720 for available blocks."
    assert any("lowers the maximum length to 86,720" in line for line in plan.warnings)
    assert "without max_attention_window, windowed layers keep every token" in plan.reasons
    # From 1.2 on the last block has to fit: 86,711 // 32 blocks.
    assert planned("gpt-oss-120b", 8192, Serving(kv_budget=budget)).num_blocks == 2709


def test_names_the_blocks_of_a_sequence() -> None:
    """SmolLM2-135M with --max_seq_len 2048: one token more with overlapped scheduling."""
    plan = planned("SmolLM2-135M", 2048, Serving(max_tokens=422_048))
    # 30 · 3 · 64 · 2 · 2 B = 23,040 B a token: 9.06 GiB
    assert plan.log == (
        "Max KV cache blocks per sequence: 65 [window size=2049], tokens per block=32, primary blocks=13189, "
        "secondary blocks=0, max sequence length=2049",
        "Number of tokens per block: 32.",
        "[MemUsageChange] Allocated 9.06 GiB for max tokens in paged KV cache (422048).",
    )
    # nvidia/Qwen3-8B-FP8 at 9,192: 288 blocks a sequence, 1,444 in the pool
    plan = planned("Qwen3-8B", 9192, Serving(max_tokens=46_208), kv="fp8")
    assert plan.log[0].startswith("Max KV cache blocks per sequence: 288 [window size=9193], tokens per block=32, "
                                  "primary blocks=1444, ")  # fmt: skip


def test_values_are_as_wide_as_keys() -> None:
    """MiMo-V2-Flash cut to 2 layers, 1.3.0rc0: 216,616 blocks, 59.50 GiB, 6,931,712 tokens."""
    # 4 and 8 heads, keys of 192 and values of 128 stored as 192: 12 · 192 · 2 · 2 B = 9,216 a token
    spec = spec_of("MiMo-V2-Flash", num_hidden_layers=2)
    plan = planned(spec, 262_144, Serving(max_tokens=6_931_712), version="1.3")
    assert plan.bytes_per_block == 32 * 9216
    assert plan.log == (
        "Max KV cache blocks per sequence: 8193 [window size=262145], tokens per block=32, primary blocks=216616, "
        "secondary blocks=0, max sequence length=262145",
        "Number of tokens per block: 32.",
        "[MemUsageChange] Allocated 59.50 GiB for max tokens in paged KV cache (6931712).",
    )
    assert "values are stored as wide as keys" in plan.reasons


def test_a_pool_of_llama_2_7b() -> None:
    """NVIDIA/TensorRT-LLM#1400: 69,524,783,104 bytes are 132,608 tokens."""
    # 32 · 32 · 128 · 2 · 2 B = 524,288
    plan = planned("Llama-2-7b-hf", 4096, Serving(kv_budget=69_524_783_104))
    assert (plan.num_blocks, plan.capacity_tokens) == (132_608 // 32, 132_608)


def test_blocks_of_a_7b_with_the_last_one_rounded_up() -> None:
    """NVIDIA/TensorRT-LLM#2268: a 7B (32 layers, 32 heads of 128), 0.9 of 21.89 GiB, blocks of 64: 631."""
    # 19.701 GiB / 32 MiB = 630.4
    serving = Serving(kv_budget=int(0.9 * 21.89 * GIB), block_size=64)
    assert planned("Llama-2-7b-hf", 4096, serving, version="1.0").num_blocks == 631


# -- hand calculations --------------------------------------------------------------------------


def test_llama_3_1_70b_over_4_gpus() -> None:
    # 80 layers · 2 of 8 heads · 128 · 2 · 2 B = 81,920 B a token; 38.565 GiB // 81,920 // 32 blocks
    plan = planned("Llama-3.1-70B", 131_072, Serving(kv_budget=int(38.565 * GIB), tensor_parallel=4))
    assert plan.bytes_per_block == 32 * 81_920
    assert (plan.num_blocks, plan.capacity_tokens) == (15_796, 505_472)
    # A request starts when blocks for all of it are free: 15,796 // 4,096
    assert (plan.blocks_per_request, plan.max_concurrency) == (4096, 3)
    assert len(plan.per_rank) == 4
    half = planned("Llama-3.1-70B", 131_072, Serving(kv_budget=int(38.565 * GIB), tensor_parallel=4), kv="fp8")
    assert half.capacity_tokens == 1_010_944  # 1,010,958 tokens // 32


def test_heads_are_whole_on_every_rank() -> None:
    # 8 heads on 16 ranks: a rank holds one, the estimate counts half of one
    result = sized("Llama-3.1-70B", 4096, Serving(kv_budget=8 * GIB, tensor_parallel=16))
    plan = result.allocation
    assert plan is not None
    assert plan.bytes_per_block == 32 * 80 * 128 * 2 * 2
    assert "8 KV heads on 16 ranks: each holds 1" in plan.reasons
    assert any("counts 20,480 bytes a token, and its manager allocates 40,960" in line for line in plan.reasons)
    assert any(line.startswith("estimated: ") for line in result.warnings)


def test_attention_dp_keeps_whole_heads() -> None:
    serving = Serving(kv_budget=40 * GIB, tensor_parallel=8, attention_dp=True)
    plan = planned("Llama-3.1-70B", 4096, serving, sequences=12)
    # 327,680 B a token on every rank; 12 requests over 8 ranks are 2 on the fullest
    assert plan.bytes_per_block == 32 * 327_680
    assert plan.reserved_bytes == 2 * 128 * 32 * 327_680


def test_latents_are_not_split() -> None:
    for ranks in (1, 8):
        plan = planned("DeepSeek-V3", 4096, Serving(tensor_parallel=ranks))
        assert plan.bytes_per_block == 32 * 61 * 576 * 2  # 70,272 B a token
    assert any("latents are not split" in line for line in plan.reasons)
    assert "nvfp4 cache of latents" in refused("DeepSeek-V3", 4096, Serving(), kv="nvfp4")


def test_indexer_keys() -> None:
    # From 1.3 on 128 + 4 B a token and layer: (1,152 + 132) · 61 = 78,324
    plan = planned("DeepSeek-V3.2", 4096, Serving(kv_budget=8 * GIB), version="1.4")
    assert plan.bytes_per_block == 32 * 78_324
    assert not any("Allocated" in line for line in plan.log)
    # 1.2 counts them as elements: (576 + 132) · 2 B · 61 with blocks of 64, (576 + 264) with 32
    assert planned("DeepSeek-V3.2", 4096, Serving(block_size=64), version="1.2").bytes_per_block == 64 * 708 * 2 * 61
    assert planned("DeepSeek-V3.2", 4096, Serving(), version="1.2").bytes_per_block == 32 * 840 * 2 * 61
    assert planned("DeepSeek-V3.2", 4096, Serving(), version="1.2", kv="fp8").bytes_per_block == 32 * 840 * 61
    assert "from 1.2 on" in refused("DeepSeek-V3.2", 4096, Serving(), version="1.1")


def test_nvfp4_has_a_scale_for_16() -> None:
    # 65,536 elements a token: half a byte each and 1 B for 16
    plan = planned("Llama-3.1-8B", 4096, Serving(kv_budget=GIB), kv="nvfp4")
    assert plan.bytes_per_block == 32 * (65_536 // 2 + 65_536 // 16)
    assert not any("Allocated" in line for line in plan.log)
    assert "nvfp4" in refused("Llama-3.1-8B", 4096, Serving(), kv="nvfp4", version="1.1")


def test_stages_take_layers_in_turn() -> None:
    # 80 layers over 3 stages are 27, 27 and 26; 2 · 8 · 128 · 2 B = 4,096 B a layer and token
    plan = planned("Llama-3.1-70B", 4096, Serving(kv_budget=10 * GIB, pipeline_parallel=3, tensor_parallel=2))
    per_block = [27 * 32 * 2048] * 4 + [26 * 32 * 2048] * 2
    assert [row.bytes_per_block for row in plan.per_rank] == per_block
    assert plan.num_blocks == 10 * GIB // (27 * 2048) // 32
    assert "the model has 32 layers" in refused("Llama-3.1-8B", 4096, Serving(pipeline_parallel=33))


def test_windows_of_the_first_manager_share_equally() -> None:
    # gemma-3-27b: 5 of 6 layers keep 1,024. Half of 20 GiB each:
    # 10 layers · 16 · 128 · 2 · 2 B = 81,920 B a token: 131,072 tokens; 52 layers: 425,984 B, 25,206.2 // 32 = 787
    windows = (1024, 1024, 1024, 1024, 1024, 131_072)
    serving = Serving(kv_budget=20 * GIB, attention_windows=windows)
    plan = planned("gemma-3-27b-it", 131_072, serving)
    assert plan.log == (
        "Window size = 1024, primary_blocks: 787, secondary_blocks: 0",
        "Window size = 131072, primary_blocks: 4096, secondary_blocks: 0",
    )
    # A window holds 32 blocks and one more; the long pool has room for one request.
    assert [(row.layers, row.blocks_per_request) for row in plan.groups] == [(10, 4096), (52, 33)]
    assert plan.max_concurrency == 1
    assert plan.reserved_bytes == 32 * (4096 * 81_920 + 33 * 425_984)
    assert any(line.startswith("estimated") for line in plan.warnings)
    # Windows alone hold requests of any length.
    short = planned("gemma-3-27b-it", 131_072, serving.replace(attention_windows=(512, 4096)))
    assert short.capacity_tokens is None
    # Windows that never close are one pool.
    assert planned("gemma-3-27b-it", 1024, serving).num_blocks == 20 * GIB // 507_904 // 32


def test_one_window_for_all_layers() -> None:
    plan = planned("Llama-3.1-8B", 8192, Serving(kv_budget=GIB, attention_windows=(1000,)))
    assert (plan.blocks_per_request, plan.capacity_tokens) == (33, None)
    assert (plan.num_blocks, plan.max_concurrency) == (256, 7)  # 1 GiB / 131,072 B / 32; 256 // 33


def test_the_second_manager_keeps_windows_apart() -> None:
    # gpt-oss: both kinds have blocks of 18 · 8 · 64 · 2 · 2 B · 32 = 1,179,648 B and share a pool
    plan = planned("gpt-oss-120b", 131_072, Serving(kv_budget=20 * GIB), version="1.3")
    assert plan.bytes_per_block == 1_179_648
    assert plan.num_blocks == 20 * GIB // 1_179_648
    assert plan.blocks_per_request == 4096 + 5
    assert plan.log == ("KV cache manager v2 device quota set to 20.0GiB",)


def test_the_second_manager_shares_by_a_typical_request() -> None:
    # gemma-3-27b: blocks of 2,621,440 B (10 layers) and 13,631,488 B (52). At 2,048 tokens and one:
    # 65 blocks, 162.5 MiB = 6 pieces of 32 MiB; 65 - 32 blocks, 429 MiB = 14 pieces. 640 pieces
    # are shared 192 to 448: 6,144 MiB // 2.5 and 14,336 MiB // 13 blocks.
    plan = planned("gemma-3-27b-it", 65_536, Serving(kv_budget=20 * GIB), version="1.4")
    assert plan.num_blocks == 2457 + 1102
    assert plan.capacity_tokens == 2457 * 32
    assert plan.max_concurrency == 1  # 2,457 // 2,048
    # Told so, 1.3 and later keep every token as before.
    first = planned("gemma-3-27b-it", 65_536, Serving(kv_budget=20 * GIB, second_manager=False), version="1.4")
    assert first.num_blocks == 20 * GIB // 507_904 // 32


def test_windows_that_the_second_manager_may_not_know() -> None:
    assert "keeps this architecture's windows apart" in refused("Mistral-7B-v0.1", 8192, Serving(), version="1.4")
    windows = Serving(attention_windows=(4096,))
    assert planned("Mistral-7B-v0.1", 8192, windows, version="1.4").blocks_per_request == 129


def test_the_second_manager_sets_more_aside_than_max_tokens() -> None:
    # 10,000 · 131,072 B / 0.95, whole blocks of 32
    plan = planned("Llama-3.1-8B", 4096, Serving(max_tokens=10_000), version="1.4")
    assert plan.num_blocks == -(-10_000 * 131_072 * 20 // 19) // (32 * 131_072)


def test_recurrent_states_lie_beside_the_blocks() -> None:
    # Qwen3-Next over 4 GPUs: 12 layers · 1 head · 256 · 2 · 2 B = 12,288 B a token, and a state of
    # 2,048 · 3 · 2 B + 8 · 128 · 128 · 2 B = 274,432 B in each of 36 layers
    serving = Serving(kv_budget=8 * GIB, tensor_parallel=4, max_sequences=16)
    plan = planned("Qwen3-Next-80B-A3B-Instruct", 4096, serving)
    assert plan.num_blocks == 8 * GIB // 12_288 // 32
    assert plan.reserved_bytes == 128 * 32 * 12_288 + 16 * 36 * 274_432
    assert any(line.startswith("estimated: recurrent") for line in plan.warnings)
    assert "1.3 and later" in refused("Qwen3-Next-80B-A3B-Instruct", 4096, serving, version="1.4")


# -- what it refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "q8_0", "int8", ""])
def test_takes_its_own_formats_alone(name: str) -> None:
    with pytest.raises(UsageError) as error:
        engine("tensorrt-llm").kv_dtype(name, "--kv-cache-dtype")
    assert error.value.hint == "one of auto, fp8, nvfp4"


@pytest.mark.parametrize("version", ["0.21", "1.5", "2.0", "x", "1", "1.²"])
def test_versions_that_are_not_known(version: str) -> None:
    with pytest.raises(UsageError):
        engine(f"tensorrt-llm@{version}")


@pytest.mark.parametrize(
    ("model", "serving"),
    [
        ("Llama-3.1-8B", Serving(block_size=48)),
        ("Llama-3.1-8B", Serving(block_size=1)),
        ("Llama-3.1-8B", Serving(tensor_parallel=3)),
        ("Llama-3.1-8B", Serving(device="cpu")),
        ("Llama-3.1-8B", Serving(second_manager=True)),
        ("Llama-3.1-8B", Serving(attention_windows=(0,))),
        ("gemma-3-27b-it", Serving(attention_windows=(512, 4096), pipeline_parallel=2)),
        ("Qwen3-Next-80B-A3B-Instruct", Serving(attention_windows=(512, 4096))),
    ],
)
def test_options_that_are_refused(model: str, serving: Serving) -> None:
    with pytest.raises(UsageError):
        planned(model, 8192, serving)


@pytest.mark.parametrize(
    ("model", "ranks", "taken"),
    [
        # 28 heads, 4 KV heads: 7 divides the heads, and 4 % 7 and 7 % 4 are left over; 28 is a multiple of both
        ("Qwen2.5-7B-Instruct", 7, False),
        ("Qwen2.5-7B-Instruct", 4, True),
        ("Qwen2.5-7B-Instruct", 28, True),
        # 24 heads, 8 KV heads
        ("Llama-3.2-3B", 3, False),
        ("Llama-3.2-3B", 24, True),
        ("Llama-3.2-3B", 12, False),
        # 128 heads of latents: every rank holds all of them
        ("DeepSeek-V3", 64, True),
    ],
)
def test_tensor_parallelism_by_kv_heads(model: str, ranks: int, taken: bool) -> None:
    serving = Serving(tensor_parallel=ranks)
    if taken:
        planned(model, 4096, serving)
    else:
        with pytest.raises(UsageError, match="KV heads"):
            planned(model, 4096, serving)
        planned(model, 4096, serving.replace(attention_dp=True))  # whole heads on every rank


@pytest.mark.parametrize(
    "model", ["whisper-large-v3", "gemma-3n-E4B-it", "Kimi-Linear-48B-A3B-Instruct", "mamba-130m-hf"]
)
def test_states_that_are_not_known(model: str) -> None:
    with pytest.raises(ConfigError):
        planned(model, 4096, Serving())


def test_heads_of_several_widths_need_the_second_manager() -> None:
    assert "several widths" in refused("gemma-4-26B-A4B", 4096, Serving())
    # 5 full layers · 2 · 512, 25 windowed · 8 · 256, keys and values in 2 B: blocks of 640 KiB and 6.25 MiB
    plan = planned("gemma-4-26B-A4B", 131_072, Serving(), version="1.4")
    assert [(row.layers, row.page_bytes) for row in plan.groups] == [(5, 32 * 20_480), (25, 32 * 204_800)]


def test_one_format_for_keys_and_values() -> None:
    rules = engine("tensorrt-llm")
    half = rules.kv_dtype("fp8", "--kv-cache-dtype")
    with pytest.raises(UsageError):
        rules.plan(spec_of("Llama-3.1-8B"), 4096, 1, Formats(BF16, half, half.replace(name="nvfp4")), Serving())


def test_follows_the_checkpoint(kvctl: Run) -> None:
    outcome = kvctl("size", "nvidia/Kimi-K2.6-NVFP4", "--ctx", "4k", "--engine", "tensorrt-llm", "--json")
    # 61 latents of 576 in 1 B
    assert outcome.json["results"][0]["allocation"]["bytes_per_block"] == 32 * 35_136
