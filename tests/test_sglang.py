"""`--engine sglang` against SGLang's own sizing, published logs, and hand calculations."""

from __future__ import annotations

import gzip
import json
from functools import cache
from typing import Any

import pytest
from conftest import DATA

from kvctl.allocation import Allocation, Serving
from kvctl.engines import sglang
from kvctl.engines.sglang.fraction import default_start
from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.formats import BF16, FP16, CacheFormat, plain
from kvctl.model import build_spec
from kvctl.sources import Found, catalogue
from kvctl.spec import Formats, ModelSpec, Provenance

Json = dict[str, Any]
GIB = 2**30


@cache
def oracle() -> Json:
    """Measured with SGLang 0.5.23: its ModelConfig, pool configurators and pools (on torch's meta device)."""
    found: Json = json.loads(gzip.decompress((DATA / "sglang.json.gz").read_bytes()))
    return found


@cache
def known(name: str) -> ModelSpec:
    return build_spec(catalogue.find(name))


def plan(
    spec: ModelSpec | str,
    context: int = 4096,
    sequences: int = 1,
    *,
    fmt: CacheFormat | str = "auto",
    version: str | None = None,
    **serving: Any,
) -> Allocation:
    if isinstance(spec, str):
        spec = known(spec)
    if isinstance(fmt, str):
        fmt = plain(BF16) if fmt == "auto" else sglang.kv_dtype(fmt, "--kv-cache-dtype", version)
    return sglang.plan(spec, context, sequences, Formats(BF16, fmt, fmt), Serving(**serving), version)


FIELDS = {
    "tp": "tensor_parallel", "dp": "data_parallel", "pp": "pipeline_parallel", "dcp": "decode_context_parallel", "page": "block_size",
    "max_total": "max_tokens", "max_req": "max_sequences", "radix": "prefix_caching", "swa_ratio": "swa_ratio",
    "mamba_ratio": "mamba_ratio", "draft_layers": "draft_layers", "draft_tokens": "draft_tokens", "max_mamba": "mamba_slots",
    "ssm": "state_dtype", "disable_swa": "hybrid_disabled", "dsa": "sparse_backend",
}  # fmt: skip
REFUSED = (
    "attention split over", "does not keep this model's", "does not keep latents", "draft layers", "--dcp-size", "sparse latents",
    "several shapes", "sizes windows without", "does not serve", "from 0.5.8 on",
)  # fmt: skip
"""What SGLang's sizing alone answers though its classes refuse it, or what kvctl says it does not know."""


def options(case: Json) -> Json:
    asked: Json = dict(case["options"])
    fmt = asked.pop("kv", None)
    extra = asked.pop("extra", None)
    out = {FIELDS[name]: value for name, value in asked.items()}
    return {
        "fmt": fmt or plain(FP16 if case["dtype"] == "float16" else BF16),
        "kv_budget": oracle()["budget"],
        "attention_dp": "dp" in asked,
        "mamba_strategy": "extra_buffer" if extra else "no_buffer",
        "max_batched": 8192,
        **out,
    }


def answer(spec: ModelSpec, case: Json, version: str | None = None) -> Allocation | None:
    """kvctl's plan for a case; None for those that it rightly refuses."""
    try:
        return plan(spec, case["context"], version=version, **options(case))
    except KvctlError as err:
        if not any(word in err.message for word in REFUSED):
            raise
        return None


@pytest.mark.parametrize("model", sorted(oracle()["configs"]))
def test_equals_the_sizing_of_sglang_0_5_23(model: str) -> None:
    spec = build_spec(Found(model, oracle()["configs"][model], Provenance("stdin", "-")))
    for case in oracle()["cases"]:
        if case["model"] != model:
            continue
        got = answer(spec, case)
        if got is None:
            continue
        copies = case["options"].get("dcp", 1)
        assert got.capacity_tokens == case["tokens"] * copies, case["options"]
        last = got.log[-1]
        if case["log"]:
            # A draft model's pool is another worker's line.
            drafts = bool(case["options"].get("draft_layers")) and "SWA" not in case["log"][-1]
            assert list(got.log[: len(got.log) - 1 - drafts]) == case["log"], case["options"]
            assert f"max_running_requests={case['requests']}," in last, case["options"]
        assert last.startswith(f"max_total_num_tokens={case['tokens'] * copies}, ")


def test_every_case_is_there() -> None:
    answered = 0
    for model, config in oracle()["configs"].items():
        spec = build_spec(Found(model, config, Provenance("stdin", "-")))
        answered += sum(answer(spec, case) is not None for case in oracle()["cases"] if case["model"] == model)
    assert answered == 1871
    assert (len(oracle()["cases"]), len(oracle()["configs"]), len(oracle()["older"])) == (1979, 188, 2780)


# -- other versions -----------------------------------------------------------------------------


def values(log: tuple[str, ...], name: str) -> list[int]:
    """Numbers that follow `name` in a log."""
    return [int(line.split(name)[1].split(",")[0]) for line in log if name in line]


@pytest.mark.parametrize("version", [*(f"0.4.{n}" for n in range(4, 11)), *(f"0.5.{n}" for n in range(1, 23))])
def test_equals_the_sizing_functions_of_other_versions(version: str) -> None:
    count = 0
    for case in oracle()["older"]:
        if case["version"] != version:
            continue
        spec = build_spec(Found(case["model"], oracle()["configs"][case["model"]], Provenance("stdin", "-")))
        got = answer(spec, case, version)
        if got is None:
            continue
        count += 1
        assert got.capacity_tokens == case["tokens"], case
        assert values(got.log, "max_running_requests=") == [case["requests"]] or case["requests"] is None, case
        assert values(got.log, "swa_layer_tokens=")[-1:] == ([case["swa"]] if "swa" in case else []), case
        assert values(got.log, "max_mamba_cache_size: ") == ([case["slots"]] if "slots" in case else []), case
    assert count >= 45


def test_versions_are_named() -> None:
    assert plan("Qwen3-32B", version="0.5.13.post1").warnings == ()
    # A minor version by itself is its newest patch, as `pip install sglang==0.5.*` has it.
    assert plan("Qwen3-32B", version="0.5") == plan("Qwen3-32B")
    for version in ("0.4.3", "0.5.24", "1.0", "newest", "0.5.x"):
        with pytest.raises(UsageError):
            sglang.check_version(version)


# -- published logs -----------------------------------------------------------------------------


def test_qwen3_235b_on_four_h100() -> None:
    # vllm-project/vllm#21348, July 2025: SGLang with --tp 4
    got = plan("Qwen/Qwen3-235B-A22B", tensor_parallel=4, max_tokens=367_404, version="0.4.9")
    assert got.log[0] == "KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB"


def test_qwen_32b_on_four_gpus() -> None:
    # A log of March 2025 (Qwen2ForCausalLM, 15.54 GB of weights on each of four ranks); latents were not logged then
    got = plan("Qwen/Qwen2.5-32B-Instruct", tensor_parallel=4, max_tokens=46_611, version="0.4.4")
    assert got.log[0] == "KV Cache is allocated. #tokens: 46611, K size: 1.42 GB, V size: 1.42 GB"
    assert len(plan("DeepSeek-V3", max_tokens=1000, version="0.4.4").log) == 1


def test_mimo_v2_flash_with_windows_counted_twice() -> None:
    # sgl-project/sglang#18039, January 2026: --tp-size 4 --page-size 64. 314,368 tokens counted at 48 · 640 + 39 · 1,280 B
    # each become int(314,368 · 48 / (9 + 0.8 · 39)) = 375,364 of full layers.
    got = plan(
        "XiaomiMiMo/MiMo-V2-Flash",
        262_144,
        tensor_parallel=4,
        block_size=64,
        kv_budget=314_368 * 80_640,
        version="0.5.8",
    )
    assert got.log[:2] == (
        "Use sliding window memory pool. full_layer_tokens=375360, swa_layer_tokens=300288",
        "KV Cache is allocated. #tokens: 300288, K size: 8.38 GB, V size: 5.59 GB",
    )


def test_mimo_v2_flash_with_windows_as_long_as_the_rest() -> None:
    # sgl-project/sglang#15464, December 2025: TP 4, windows and full layers of 1,496,958 tokens each
    got = plan("XiaomiMiMo/MiMo-V2-Flash", tensor_parallel=4, swa_ratio=1.0, max_tokens=1_496_958, version="0.5.8")
    assert got.log[1:4] == (
        "KV Cache is allocated. #tokens: 1496958, K size: 41.76 GB, V size: 27.84 GB",
        "KV Cache is allocated. #tokens: 1496958, K size: 4.82 GB, V size: 3.21 GB",
        "SWAKVPool mem usage: 77.63 GB, swa size: 1496958, full size: 1496958",
    )


def test_gemma_4_e4b_stores_the_layers_that_share() -> None:
    # A capacity report of June 2026: 35 windowed and 7 full layers, 18 of which share in the architecture
    got = plan("google/gemma-4-E4B-it", max_tokens=805_556, version="0.5.13")
    assert got.log[1:3] == (
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 644444, K size: 21.51 GB, V size: 21.51 GB",
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 805556, K size: 10.76 GB, V size: 10.76 GB",
    )
    assert any("18 layers" in reason for reason in got.reasons)


def test_qwen3_6_27b_on_an_h100() -> None:
    # A server log of 2026: 124 slots, 330,323 tokens. One state is 48 · (10,240 · 3 · 2 + 48 · 128 · 128 · 4) B =
    # 153,944,064 B and 125 of them are allocated; a token is 16 · 4 · 512 · 2 B = 65,536 B.
    got = plan("Qwen/Qwen3.6-27B", 262_144, kv_budget=330_323 * 65_536 + 125 * 153_944_064 + 1000)
    assert got.log[:2] == (
        "Mamba Cache is allocated. max_mamba_cache_size: 124, conv_state size: 0.34GB, ssm_state size: 17.58GB",
        "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 330323, K size: 10.08 GB, V size: 10.08 GB",
    )
    # Another: 535,124 tokens
    got = plan("Qwen/Qwen3.6-27B", max_tokens=535_124)
    assert (
        got.log[0]
        == "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 535124, K size: 16.33 GB, V size: 16.33 GB"
    )


def test_glm_5_counts_the_page_for_padding() -> None:
    # 78 · (656 + 132) B = 61,464 B a token; 131,072 + 64 of them are 7.51 GiB, 131,072 alone 7.50
    got = plan("zai-org/GLM-5", fmt="fp8_e4m3", max_tokens=131_072)
    assert got.log[0] == "KV Cache is allocated. dtype: torch.float8_e4m3fn, #tokens: 131072, KV size: 7.51 GB"
    assert (got.block_size, got.bytes_per_block) == (64, 64 * 61_464)
    assert plan("zai-org/GLM-5", fmt="fp8_e4m3", sparse_backend="trtllm").bytes_per_block == 64 * 78 * (576 + 132)


# -- worked by hand -----------------------------------------------------------------------------


def test_llama_70b_on_four_gpus() -> None:
    # 80 layers · 2 of 8 KV heads · 256 · 2 B = 81,920 B a token; 16 ranks hold one head each, twice over
    got = plan("Llama-3.1-70B", 131_072, tensor_parallel=4, kv_budget=415_094 * 81_920 + 81_919)
    assert (got.bytes_per_block, got.capacity_tokens, got.num_blocks) == (81_920, 415_094, 415_094)
    assert got.max_concurrency == 415_094 / 131_072
    fp8 = plan("Llama-3.1-70B", fmt="fp8_e5m2", tensor_parallel=4, kv_budget=415_094 * 81_920)
    assert (fp8.bytes_per_block, fp8.capacity_tokens) == (40_960, 830_188)
    assert plan("Llama-3.1-70B", tensor_parallel=16).bytes_per_block == 40_960
    assert len(plan("Llama-3.1-70B", tensor_parallel=16).per_rank) == 16


def test_what_is_reserved_for_requests() -> None:
    # 3 requests of ceil(1,000 / 64) pages, and the page for padded tokens
    got = plan("Qwen3-32B", 1000, 3, block_size=64)
    assert got.reserved_bytes == (3 * 16 + 1) * 64 * 262_144
    assert (got.blocks_per_request, got.log, got.num_blocks) == (16, (), None)


def test_latents_are_on_every_rank() -> None:
    # 61 · 576 · 2 B; with the indexer's 132 B, and fp8 with scales and a bf16 rotary key: 656 B
    for ranks in (1, 8):
        assert plan("DeepSeek-V3", tensor_parallel=ranks).bytes_per_block == 70_272
    assert plan("DeepSeek-V3", fmt="fp8_e4m3").bytes_per_block == 35_136
    assert plan("DeepSeek-V3.2").bytes_per_block == 64 * 78_324
    assert plan("DeepSeek-V3.2", fmt="fp8_e4m3").bytes_per_block == 64 * 48_068
    # Before 0.5.19 a token was priced without its scales: 61 · (576 + 132) B, and more was allocated.
    old = plan("DeepSeek-V3.2", fmt="fp8_e4m3", kv_budget=64 * 1000 * 43_188, version="0.5.16")
    assert (old.capacity_tokens, old.bytes_per_block) == (64_000, 64 * 48_068)
    assert any("not split" in reason for reason in plan("DeepSeek-V3", tensor_parallel=8).reasons)


def test_attention_of_data_parallel_ranks() -> None:
    # 8 KV heads on 8 ranks in 4 groups: two ranks split a head's layer, 4 heads each
    got = plan("Qwen3-32B", tensor_parallel=8, data_parallel=4, attention_dp=True)
    assert got.bytes_per_block == 64 * 4 * 256 * 2
    assert any("4 times" in reason for reason in got.reasons)
    alone = plan("Qwen3-32B", tensor_parallel=8, data_parallel=4)
    assert alone.bytes_per_block == 64 * 1 * 256 * 2


def test_windows_of_gemma_3_are_stored_in_full() -> None:
    # 62 layers · 16 heads · 256 · 2 B = 507,904 B; from 0.5.2 to 0.5.7 windows had a pool of 0.8 · full
    got = plan("gemma-3-27b-it", 131_072, kv_budget=int(18.2 * GIB))
    assert (got.bytes_per_block, got.capacity_tokens) == (507_904, int(18.2 * GIB) // 507_904)
    assert any("52 layers" in reason for reason in got.reasons)
    assert plan("gemma-3-27b-it", version="0.5.2").groups[1].kind == "sliding_window"


def test_gpt_oss_stores_windows_at_four_fifths() -> None:
    # 18 · 2,048 + 0.8 · 18 · 2,048 B = 66,355.2 B
    got = plan("gpt-oss-120b", 131_072, kv_budget=136_871 * 66_356)
    assert got.capacity_tokens == int(136_871 * 66_356 / 66_355.2)
    assert [group.layers for group in got.groups] == [18, 18]
    # Without prefix caching, 16 requests: 16 · (127 + 128 + 2 · 1) + 2 · 8,192 + 1 tokens of windowed layers
    capped = plan("gpt-oss-120b", kv_budget=8 * GIB, prefix_caching=False, max_sequences=16, max_batched=8192)
    windows = 16 * (127 + 128 + 2) + 2 * 8192 + 1
    assert capped.capacity_tokens == (8 * GIB - windows * 18 * 2048) // (18 * 2048)
    assert plan("gpt-oss-120b", hybrid_disabled=True).bytes_per_block == 36 * 2048


def test_qwen3_next_gives_nearly_half_to_states() -> None:
    # A state on one of 4 ranks: 36 · (2,048 · 3 · 2 + 8 · 128 · 128 · 4) B = 19,316,736 B; the pool takes 0.9 / 1.9 of the budget
    budget = int(26.6 * GIB)
    got = plan("Qwen/Qwen3-Next-80B-A3B-Instruct", 262_144, tensor_parallel=4, kv_budget=budget)
    slots = int(budget * 0.9 / 1.9) // 19_316_736 - 1
    assert values(got.log, "max_mamba_cache_size: ") == [slots] == [699]
    assert got.capacity_tokens == (budget - 700 * 19_316_736) // 12_288
    # 3 slots a request, and 2 more that keep states for prefixes since 0.5.16
    assert values(got.log, "max_running_requests=") == [699 // 5]
    plain_ = plan("Qwen/Qwen3-Next-80B-A3B-Instruct", tensor_parallel=4, kv_budget=budget, mamba_strategy="no_buffer")
    assert values(plain_.log, "max_running_requests=") == [233]
    assert (
        plan("Qwen/Qwen3-Next-80B-A3B-Instruct", kv_budget=budget, prefix_caching=False, max_sequences=10)
        .log[0]
        .startswith("Mamba Cache is allocated. max_mamba_cache_size: 10,")
    )


def test_stages_of_a_pipeline() -> None:
    # 61 layers are 30 and 31: the last stages have one more, and the poorest decides
    got = plan("DeepSeek-V3", pipeline_parallel=2, tensor_parallel=2, kv_budget=31 * 1152 * 100_000)
    assert [row.bytes_per_block for row in got.per_rank] == [30 * 1152] * 2 + [31 * 1152] * 2
    assert got.capacity_tokens == 100_000
    uneven = plan("DeepSeek-V3", pipeline_parallel=2, stage_layers=(40, 21))
    assert [row.bytes_per_block for row in uneven.per_rank] == [40 * 1152, 21 * 1152]
    assert [line.split("#tokens: ")[1] for line in got.log[:2]] == [
        "100000, KV size: 3.22 GB",
        "100000, KV size: 3.33 GB",
    ]


def test_draft_layers_take_their_part() -> None:
    # One layer more than 61
    got = plan("DeepSeek-V3", draft_layers=1, draft_tokens=2, kv_budget=62 * 1152 * 100_000)
    assert got.capacity_tokens == 100_000
    assert got.log[1].startswith("KV Cache is allocated. dtype: torch.bfloat16, #tokens: 100000, KV size: 0.11 GB")
    assert values(got.log, "max_running_requests=") == [48]


def test_draft_layers_follow_the_algorithm() -> None:
    # DeepSeek-V3 names one prediction module; an EAGLE3 draft of one layer is priced as one of 64
    mtp = plan("DeepSeek-V3", speculative_algorithm="NEXTN", kv_budget=62 * 1152 * 100_000)
    assert mtp.capacity_tokens == 100_000
    assert plan("DeepSeek-V3", speculative_algorithm="NGRAM", kv_budget=61 * 1152 * 100_000).capacity_tokens == 100_000
    draft = known("Qwen3-32B").replace(layers=known("Qwen3-32B").layers[:1])
    eagle = plan("Qwen3-32B", speculative_algorithm="EAGLE3", draft=draft, kv_budget=65 * 4096 * 1000)
    assert (eagle.capacity_tokens, len(eagle.log)) == (1000, 2)
    with pytest.raises(ConfigError):
        plan("DeepSeek-V3", speculative_algorithm="DFLASH")


def test_a_sequence_spread_over_ranks() -> None:
    # Latents lie on one of two ranks, the indexer's keys on both: 61 · (576 · 2 + 2 · 132) B for two tokens
    got = plan("DeepSeek-V3.2", tensor_parallel=8, decode_context_parallel=2, kv_budget=6400 * 61 * 1416)
    assert got.capacity_tokens == 12_800


def test_pages_by_kernel() -> None:
    assert plan("DeepSeek-V3", attention_backend="flashmla").block_size == 64
    assert plan("DeepSeek-V3", attention_backend="trtllm_mla", block_size=32).block_size == 32
    assert plan("Qwen3-32B", attention_backend="trtllm_mha", block_size=8).block_size == 64
    assert plan("Qwen3-32B", attention_backend="fa3", block_size=8).block_size == 8
    got = plan("Qwen3-32B", block_size=64, kv_budget=1_000_000 * 262_144 // 10)
    assert (got.capacity_tokens, got.num_blocks) == (100_000 // 64 * 64, 100_000 // 64)


def test_the_cache_in_host_memory() -> None:
    # Twice 81,920 tokens and a page more; GB are 10^9 bytes there
    got = plan("Qwen3-32B", kv_budget=20 * GIB, host_ratio=2.0)
    assert got.log[1] == "Allocating kv hierarchical KV host pool: 163841 tokens, 42.95 GB host memory."
    got = plan("Qwen3-32B", kv_budget=20 * GIB, host_gb=30, block_size=64, version="0.5.16")
    tokens = (int(30e9 // 262_144) // 64 + 1) * 64
    assert got.log[1] == f"Allocating {tokens * 262_144 / 1e9:.2f} GB host memory for hierarchical KV cache."
    with pytest.raises(ConfigError):
        plan("gpt-oss-120b", kv_budget=20 * GIB, host_ratio=2.0)


# -- what is refused ----------------------------------------------------------------------------


def test_formats_are_those_of_the_engine() -> None:
    for name in ("fp8", "int8", "nvfp4_ds_mla", "mxfp4", "q8_0"):
        with pytest.raises(UsageError) as caught:
            sglang.kv_dtype(name, "--kv-cache-dtype")
        assert caught.value.hint is not None
        assert caught.value.hint.endswith("auto, fp8_e5m2, fp8_e4m3, mxfp8, bf16, bfloat16, nvfp4, fp4_mx_block16")
    with pytest.raises(UsageError):
        sglang.kv_dtype("fp8_e4m3", "--k-dtype")
    # The list is the version's: 0.5.3's server_args.py has auto and two kinds of fp8.
    with pytest.raises(UsageError, match=r"0\.5\.3") as caught:
        sglang.kv_dtype("bf16", "--kv-cache-dtype", "0.5.3")
    assert caught.value.hint == "one of auto, fp8_e5m2, fp8_e4m3"
    for name, version in (("nvfp4", "0.5.13"), ("bf16", "0.5.2"), ("fp4_e2m1", None), ("mxfp8", "0.5.10")):
        with pytest.raises(UsageError):
            sglang.kv_dtype(name, "--kv-cache-dtype", version)
    # 4 bits and a byte for 16: 9 bytes a 16; 33 bytes a 32
    assert plan("Qwen3-32B", fmt="nvfp4").bytes_per_block == 64 * 8 * 256 * 9 // 16
    assert plan("Qwen3-32B", fmt="mxfp8").bytes_per_block == 64 * 8 * 256 * 33 // 32
    assert plan("Qwen3-32B", fmt="fp4_e2m1", version="0.5.10").bytes_per_block == 64 * 8 * 256 * 9 // 16


@pytest.mark.parametrize(
    ("model", "serving"),
    [
        ("Qwen3-32B", {"tensor_parallel": 3}),
        ("Qwen3-32B", {"tensor_parallel": 4, "data_parallel": 3, "attention_dp": True}),
        ("Qwen3-32B", {"tensor_parallel": 4, "decode_context_parallel": 3}),
        ("Qwen3-32B", {"pipeline_parallel": 65}),
        ("Qwen3-32B", {"pipeline_parallel": 2, "stage_layers": (32, 31)}),
        ("gpt-oss-120b", {"swa_ratio": 1.5}),
        ("gpt-oss-120b", {"kv_budget": GIB, "prefix_caching": False, "max_sequences": 8}),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"mamba_ratio": 0.0}),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"mamba_strategy": "best"}),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"state_dtype": "fp8"}),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {"version": "0.5.5"}),
        ("XiaomiMiMo/MiMo-V2-Flash", {"draft_layers": 1}),
        ("DeepSeek-V3", {"draft_layers": 1, "version": "0.5.13"}),
        ("DeepSeek-V3", {"fmt": "nvfp4"}),
        ("DeepSeek-V3.2", {"fmt": "fp8_e5m2"}),
        ("DeepSeek-V3.2", {"version": "0.5.2"}),
        ("gpt-oss-120b", {"decode_context_parallel": 2, "tensor_parallel": 8}),
        ("whisper-large-v3", {}),
        ("deepseek-ai/DeepSeek-V4-Flash", {}),
    ],
)
def test_what_sglang_or_kvctl_cannot_is_refused(model: str, serving: Json) -> None:
    with pytest.raises(KvctlError) as caught:
        plan(model, **serving)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 160


def test_a_budget_that_is_too_small_is_said() -> None:
    got = plan("Qwen3-32B", 32_768, kv_budget=1000)
    assert got.log == ()
    assert "would not start" in got.warnings[0]
    got = plan("Qwen/Qwen3-Next-80B-A3B-Instruct", kv_budget=2**27)
    assert got.log == ()
    assert "recurrent state" in got.warnings[0]
    got = plan("gpt-oss-120b", kv_budget=100 * 66_356)
    assert "hold no window of 127" in got.warnings[0]
    got = plan("Qwen3-32B", 32_768, 4, kv_budget=65_536 * 262_144)
    assert "4 requests of 32,768 tokens" in got.warnings[0]


def test_the_command_line(kvctl: Any) -> None:
    outcome = kvctl("size", "Qwen3-32B", "--ctx", "32k", "--engine", "sglang", "--json")
    assert outcome.code == 0, outcome.err
    result = outcome.json["results"][0]
    assert result["engine"] == {"name": "sglang", "version": "0.5.23"}
    assert result["allocation"]["reserved_bytes"] == (32_768 + 1) * 262_144
    assert (
        kvctl("size", "Qwen3-32B", "--ctx", "32k", "--engine", "sglang@0.5.10", "--kv-cache-dtype", "fp8_e4m3").code
        == 0
    )


def test_default_memory_fractions() -> None:
    # What SGLang 0.5.23 resolves for GPUs of 15 to 269 GiB, ranks, latents, data-parallel attention, chunks and requests
    for memory, tp, pp, latent, workers, chunk, requests, graphs, fraction, chunked, batch in oracle()["fractions"]:
        got = default_start(memory, tp=tp, pp=pp, latent=bool(latent), workers=workers, chunk=chunk, requests=requests,
                            prefill_graphs=bool(graphs))  # fmt: skip
        assert (got.fraction, got.chunk, got.batch) == (fraction, chunked, batch)
    assert len(oracle()["fractions"]) == 936


def test_a_budget_without_room_is_no_pool() -> None:
    """Slots that were asked for take more than there is: nothing is left, not less than nothing."""
    for options in ({"mamba_slots": 10**6}, {"draft_tokens": 1024}):
        got = plan("Qwen/Qwen3-Next-80B-A3B-Instruct", kv_budget=2**26, **options)
        assert (got.num_blocks, got.capacity_tokens, got.max_concurrency, got.log) == (0, 0, 0.0, ())
        assert "would not start" in got.warnings[-1] + got.warnings[0]


def test_pools_of_windows_are_no_blocks_of_one_size() -> None:
    """Windowed layers have 0.8 tokens for each of the full ones, so pages × bytes of a page would be over the budget."""
    got = plan("openai/gpt-oss-120b", kv_budget=20 * 2**30)
    assert got.bytes_per_block == 0
    full, windowed = (group.page_bytes // group.block_size for group in got.groups)
    assert got.capacity_tokens * full + int(got.capacity_tokens * 0.8) * windowed <= 20 * 2**30


@pytest.mark.parametrize(
    ("backend", "asked", "page"),
    # srt/arg_groups/overrides.py: intel_xpu takes 64 or 128; cutlass_mla (server_args.py, 0.5.14) 128 alone.
    [("intel_xpu", None, 128), ("intel_xpu", 64, 64), ("cutlass_mla", 64, 128), ("tokenspeed_mla", None, 64), ("fa3", 7, 7)],
)  # fmt: skip
def test_backends_have_pages_of_their_own(backend: str, asked: int | None, page: int) -> None:
    assert plan("Qwen/Qwen3-8B", attention_backend=backend, block_size=asked).block_size == page
