"""`--engine vllm` against plans that vLLM's own planner made, published logs, and hand calculations."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from conftest import DATA, Outcome

Run = Callable[..., Outcome]
Json = dict[str, Any]
GIB = 2**30

KINDS = {
    "FullAttentionSpec": "full_attention",
    "SlidingWindowSpec": "sliding_window",
    "MLAAttentionSpec": "latent_attention",
    "MambaSpec": "recurrent_state",
    "ChunkedLocalAttentionSpec": "chunked_attention",
}


@cache
def oracle() -> Json:
    found: Json = json.loads((DATA / "vllm.json").read_text())
    return found


@cache
def more() -> Json:
    """Measured in the same way with the model classes of vLLM 0.32: 110 architectures, odd shapes, options."""
    found: Json = json.loads(gzip.decompress((DATA / "vllm_more.json.gz").read_bytes()))
    return found


def plan(run: Run, model: str, *options: str, stdin: str | None = None) -> Json:
    engine = () if "--engine" in options else ("--engine", "vllm")
    outcome = run("size", model, "--json", *engine, *options, stdin=stdin)
    assert outcome.code == 0, outcome.err
    result: Json = outcome.json["results"][0]
    allocation: Json = result["allocation"]
    return allocation


def options_of(case: Json) -> list[str]:
    """The command line for a case, without its length."""
    options = ["--engine", "vllm@0.32", "--device", "cpu"]
    options += ["--kv-budget", str(case["mem"]), "--tensor-parallel-size", str(case["tp"])]
    for name, value in case["args"].items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            options.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            options += [flag, str(value)]
    return options


def check(run: Run, case: Json, config: Json) -> None:
    got = plan(run, "-", *options_of(case), "--ctx", str(case["max_model_len"]), stdin=json.dumps(config))
    assert got["block_size"] == case["cfg_block_size"]
    assert got["bytes_per_block"] == case["bytes_per_block"]
    assert got["num_blocks"] == case["num_blocks"]
    assert got["reserved_bytes"] == case["bytes_per_max_len_request"]
    assert got["reported_capacity"] == got["capacity_tokens"] == case["kv_cache_size_tokens"]
    assert round(got["max_concurrency"], 4) == case["max_concurrency"]
    groups = [(g["kind"], g["layers"], g["block_size"], g["page_bytes"]) for g in got["groups"]]
    expected = [(KINDS[kind], *rest) for kind, *rest in case["groups"]]
    # Zamba 2 registers its shared attention before its states.
    if config.get("model_type") == "zamba2":
        groups.sort()
        expected.sort()
    assert groups == expected


@pytest.mark.parametrize("index", range(36))
def test_equals_the_planner_of_vllm_0_32_on_a_cpu(kvctl: Run, index: int) -> None:
    case = oracle()["cases"][index]
    check(kvctl, case, oracle()["configs"][case["model"]])


@pytest.mark.parametrize("index", range(380))
def test_equals_the_planner_for_every_architecture(kvctl: Run, index: int) -> None:
    case = more()["cases"][index]
    check(kvctl, case, more()["configs"][case["model"]])


def test_every_case_is_there() -> None:
    assert (len(oracle()["cases"]), len(more()["cases"])) == (36, 380)


# -- worked by hand and published, on GPUs -------------------------------------------------------


def test_llama_70b_on_four_gpus(kvctl: Run) -> None:
    # 80 layers · 2 of 8 KV heads · 256 · 2 B = 81,920 B a token; 16 of them a block
    got = plan(kvctl, "Llama-3.1-70B", "-tp", "4", "--ctx", "128k", "--kv-budget", str(30_731 * 1_310_720))
    assert (got["bytes_per_block"], got["num_blocks"]) == (1_310_720, 30_731)
    assert got["reported_capacity"] == 491_696
    assert got["log"] == [
        "GPU KV cache size: 491,696 tokens, Maximum concurrency for 131,072 tokens per request: 3.75x"
    ]
    fp8 = plan(kvctl, "Llama-3.1-70B", "-tp", "4", "--kv-cache-dtype", "fp8", "--ctx", "128k")
    assert fp8["bytes_per_block"] == 655_360


def test_heads_repeat_once_ranks_outnumber_them(kvctl: Run) -> None:
    # 8 KV heads: one on each of 8 ranks, and still one on each of 16
    eight, sixteen = (plan(kvctl, "Llama-3.1-70B", "-tp", str(n), "--ctx", "32k") for n in (8, 16))
    assert eight["bytes_per_block"] == sixteen["bytes_per_block"] == 80 * 256 * 2 * 16
    assert any("2 times" in reason for reason in sixteen["reasons"])
    assert len(sixteen["per_rank"]) == 16


def test_a_rank_of_four_holds_3258_blocks_where_unsharded_heads_would_make_814(kvctl: Run) -> None:
    # Reported for another engine: Qwen3-32B, 64 layers · 8 heads · 256 · 2 B · block 16 = 4 MiB whole, 1 MiB on a rank
    whole = plan(kvctl, "Qwen3-32B", "--ctx", "4k", "--kv-budget", str(3258 * 2**20))
    quarter = plan(kvctl, "Qwen3-32B", "-tp", "4", "--ctx", "4k", "--kv-budget", str(3258 * 2**20))
    assert (whole["num_blocks"], quarter["num_blocks"]) == (814, 3258)


def test_latents_are_not_split(kvctl: Run) -> None:
    # 61 layers · 576 · 2 B · block 64; 29.3 GiB hold 447,680 tokens, and twice as many in fp8 and one block
    budget = ("--ctx", "128k", "--kv-budget", str(13_991 * 2_248_704))
    one, eight = (plan(kvctl, "DeepSeek-V3", "-tp", ranks, *budget) for ranks in ("1", "8"))
    assert one["bytes_per_block"] == eight["bytes_per_block"] == 61 * 576 * 2 * 64
    assert eight["reported_capacity"] == 447_680
    fp8 = plan(kvctl, "DeepSeek-V3", "--kv-cache-dtype", "fp8", *budget)
    assert fp8["reported_capacity"] == 895_424


@pytest.mark.parametrize(("dtype", "row"), [("auto", 78_324), ("fp8_ds_mla", 48_068)])
def test_indexer_keys_beside_latents(kvctl: Run, dtype: str, row: int) -> None:
    # 61 · (576 · 2 + 132) and 61 · (656 + 132) bytes a token
    assert plan(kvctl, "DeepSeek-V3.2", "--kv-cache-dtype", dtype, "--ctx", "4k")["bytes_per_block"] == 64 * row


def test_gemma_3_27b_by_version(kvctl: Run) -> None:
    # 10 full and 52 windowed layers: groups of 10, so 7 of them, 8 places empty; a page is 131,072 B.
    budget = str(15_371 * 1_310_720)
    options = ("--ctx", "128k", "--kv-budget", budget)
    now = plan(kvctl, "gemma-3-27b-it", *options)
    assert (now["bytes_per_block"], now["num_blocks"], len(now["groups"])) == (1_310_720, 15_371, 7)
    # 131,072/16 + 6 · (⌈(1023 + 2 · 8192)/16⌉ + 1) = 8,192 + 6 · 1,089
    assert now["blocks_per_request"] == 14_726
    assert now["reported_capacity"] == 136_812
    before = plan(kvctl, "gemma-3-27b-it", "--engine", "vllm@0.22", *options)
    assert before["blocks_per_request"] == 8_192 + 6 * 577
    assert f"{before['max_concurrency']:.2f}" == "1.32"
    oldest = plan(kvctl, "gemma-3-27b-it", "--engine", "vllm@0.11", *options)
    assert oldest["reported_capacity"] == 15_371 // 7 * 16 == 35_120


def test_gpt_oss_120b_and_its_published_error(kvctl: Run) -> None:
    options = ("gpt-oss-120b", "--ctx", "128k", "--kv-budget", str(16_136 * 589_824))
    assert plan(kvctl, *options)["blocks_per_request"] == 9_225
    assert plan(kvctl, *options, "--engine", "vllm@0.20.0")["reported_capacity"] == 129_088
    # The start-up error that a user published: 4.54 GiB needed with 1,024 batched tokens.
    error = plan(kvctl, *options, "--engine", "vllm@0.22", "--max-num-batched-tokens", "1024")
    assert f"{error['reserved_bytes'] / GIB:.2f}" == "4.54"
    # A log of the time: 5.38 GiB and 78,384 tokens, which is not 5.38 GiB / 78,384 a token.
    log = plan(kvctl, "gpt-oss-120b", "--engine", "vllm@0.11", "--ctx", "128k", "--kv-budget", "5.3825GiB")
    assert log["reported_capacity"] == 78_384


def test_without_the_hybrid_manager_windows_cost_the_whole_context(kvctl: Run) -> None:
    got = plan(kvctl, "gpt-oss-120b", "--ctx", "128k", "--disable-hybrid-kv-cache-manager")
    # 36 layers · 8 heads · 128 · 2 B · 131,072 tokens
    assert got["reserved_bytes"] == 36 * 8 * 128 * 2 * 131_072
    assert any("every token" in reason for reason in got["reasons"])


def test_qwen3_next_on_four_gpus(kvctl: Run) -> None:
    # State: 16 · 64 … (2·16·128 + 32·128)/4 channels · 3 + 8 · 128 · 128, in bf16 = 274,432 B; the page is 272 tokens.
    budget = str(10_276 * 3_342_336)
    options = ("Qwen3-Next-80B-A3B-Instruct", "-tp", "4", "--ctx", "256k", "--kv-budget", budget)
    bf16 = plan(kvctl, *options)
    assert (bf16["block_size"], bf16["bytes_per_block"], bf16["blocks_per_request"]) == (272, 3_342_336, 964 + 3 * 2)
    assert bf16["reported_capacity"] == 2_777_104
    fp8 = plan(kvctl, *options, "--kv-cache-dtype", "fp8")
    assert (fp8["block_size"], fp8["bytes_per_block"], fp8["blocks_per_request"]) == (544, 3_342_336, 488)
    assert f"{fp8['max_concurrency']:.2f}" == "21.06"
    assert plan(kvctl, *options, "--engine", "vllm@0.20.0")["reported_capacity"] == 698_768


@pytest.mark.parametrize(
    ("model", "options", "block"),
    [("Qwen3.5-27B", (), 784), ("Qwen3.6-35B-A3B", ("--kv-cache-dtype", "fp8"), 2096)],
)
def test_block_sizes_that_start_up_logs_show(kvctl: Run, model: str, options: tuple[str, ...], block: int) -> None:
    assert plan(kvctl, model, "--ctx", "32k", *options)["block_size"] == block


def test_groups_of_states_repeat_over_ranks(kvctl: Run) -> None:
    # Mamba 2 of 2.7B: 5,120 inner, 1 group of 128, 80 heads of 64. Over two ranks the group is on both:
    # (5120 + 2·2·128)/2 = 2,816 channels · 3 columns, and 40 · 64 · 128, times 2 B, in each of 64 layers.
    config = json.dumps(oracle()["configs"]["mamba2-2.7b"])
    got = plan(kvctl, "-", "--ctx", "4k", "-tp", "2", stdin=config)
    assert got["bytes_per_block"] == 64 * 2 * (2_816 * 3 + 40 * 64 * 128)


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Qwen3-32B", "--block-size", "16"), "--block-size says how an engine is started"),
        (("Qwen3-32B", "--engine", "transformers", "--kv-budget", "1GiB"), "--kv-budget has no effect"),
        (("Qwen3-32B", "--engine", "ideal@3"), "takes no version"),
        (("Qwen3-32B", "--engine", "vllm@0.40"), "0.8 to 0.33"),
        (("Qwen3-32B", "--engine", "vllm@new"), "no version of vLLM"),
        (("Qwen3-32B", "--engine", "vllm", "--kv-cache-dtype", "q8_0"), "no format that vLLM 0.33 has"),
        (("Qwen3-32B", "--engine", "vllm", "--kv-cache-dtype", "octave_k3v4"), "does not count yet"),
        (("Qwen3-32B", "--engine", "vllm", "--kv-cache-dtype", "fp8_ds_mla"), "latent attention"),
        (("Qwen3-32B", "--engine", "vllm", "--k-dtype", "fp8"), "one format"),
        (("Qwen3-32B", "--engine", "vllm", "-tp", "3"), "does not divide the 64 attention heads"),
        (("Qwen3-32B", "--engine", "vllm", "-tp", "128"), "does not divide the 64 attention heads"),
        (("Qwen3-32B", "--engine", "vllm@0.²"), "no version of vLLM"),
        (("Qwen3-32B", "--engine", "vllm", "--beams", "4"), "by request, not by beam"),
        (("Qwen3-32B", "--engine", "vllm", "--image-tokens", "9"), "part of --ctx"),
        (("Qwen3-32B", "--engine", "vllm@0.11", "--kv-dtype", "int4_per_token_head"), "not known of vLLM 0.11"),
        (("Qwen3-32B", "--engine", "vllm@0.11", "--kv-dtype", "octave_k3v4"), "not known of vLLM 0.11"),
        (("Qwen3-32B", "--engine", "vllm@0.27", "--kv-dtype", "nvfp4_4over6"), "not known of vLLM 0.27"),
        # 8 KV heads on 8 ranks: no two ranks hold the same, so there is nobody to deal tokens out to.
        (("Qwen3-32B", "--engine", "vllm", "-tp", "8", "-dcp", "2"), "are not repeated so often"),
        (("Qwen3-32B", "--engine", "vllm", "-tp", "16", "-dcp", "4"), "are not repeated so often"),
        # 28 attention heads and 4 KV heads: 7 of them each, which 2 ranks do not share evenly (vllm config/model.py)
        (("Qwen2.5-7B", "--engine", "vllm", "-tp", "28", "-dcp", "2"), "does not divide the 7 attention heads"),
        (("DeepSeek-V3", "--engine", "vllm", "-tp", "8", "-dcp", "4", "-pcp", "2"), "vLLM takes 1, 2, 16"),
        (("DeepSeek-V3", "--engine", "vllm@0.9", "-tp", "8", "-dcp", "8"), "no such context parallelism"),
        (("DeepSeek-V3", "--engine", "vllm@0.11", "-tp", "8", "-pcp", "2"), "no such context parallelism"),
        (("gemma-3-27b-it", "--engine", "vllm", "-tp", "32", "-dcp", "2"), "no tokens of windows"),
        (("Qwen3-32B", "--engine", "vllm", "--kv-budget", "20"), "did you mean 20GiB?"),
        (("Qwen3-32B", "--engine", "vllm", "--kv-budget", "20.5"), "did you mean 20.5GiB?"),
        (("Qwen3-32B", "--engine", "vllm", "-tp", "0"), "out of range"),
        (("Qwen3-32B", "--engine", "vllm", "--block-size", "20"), "no multiple of 16"),
        (("Qwen3-32B", "--engine", "vllm", "--kv-budget", "16 apples"), "not an amount of memory"),
        (("Qwen3-32B", "--engine", "vllm", "--device", "tpu"), "unknown value 'tpu'"),
        (("Qwen3-32B", "--engine", "vllm", "--ctx", "0"), "maximum length"),
        (("Qwen3-Next-80B-A3B-Instruct", "--engine", "vllm@0.8"), "does not serve recurrent layers"),
    ],
)
def test_what_is_not_understood_is_refused(kvctl: Run, arguments: tuple[str, ...], words: str) -> None:
    outcome = kvctl("size", *arguments)
    assert outcome.code in (1, 2)
    assert words in outcome.err
    assert not outcome.out


def test_a_version_between_those_read_says_so(kvctl: Run) -> None:
    outcome = kvctl("size", "Qwen3-32B", "--engine", "vllm@0.23.1rc1.dev5+gabc", "--ctx", "4k")
    assert "estimated: vLLM 0.23.1rc1.dev5+gabc, a build between releases, goes by the rules of 0.23" in outcome.err


def test_a_budget_too_small_for_one_request_says_so(kvctl: Run) -> None:
    outcome = kvctl("size", "Qwen3-32B", "--engine", "vllm", "--ctx", "32k", "--kv-budget", "1GiB")
    # 32,768/16 blocks needed; 2^30 / 4 MiB = 256 there
    assert "needs 2,048 blocks" in outcome.err
    assert "holds 256" in outcome.err
    assert "KV cache size" not in outcome.out


def test_more_requests_than_the_budget_holds_say_so(kvctl: Run) -> None:
    outcome = kvctl("size", "Qwen3-32B", "--engine", "vllm", "--ctx", "32k", "-n", "10", "--kv-budget", "20GiB")
    # 10 · 2,048 blocks of 4 MiB; 20 GiB hold 5,120
    assert "10 requests of this length need 20,480 blocks, and the budget holds 5,120" in outcome.err
    assert "GPU KV cache size" in outcome.out


def test_fp32_models_run_in_bf16(kvctl: Run) -> None:
    config = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
              "torch_dtype": "float32"}  # fmt: skip
    outcome = kvctl("size", "-", "--engine", "vllm", "--ctx", "16", "--json", stdin=json.dumps(config))
    assert outcome.json["results"][0]["allocation"]["bytes_per_block"] == 2 * 2 * 256 * 2 * 16
    assert "runs that in bf16" in outcome.err


def test_the_screen_shows_need_and_reserve(kvctl: Run) -> None:
    out = kvctl("size", "gemma-3-27b-it", "--engine", "vllm", "--ctx", "128k", "--kv-budget", "20GiB").out
    assert "what the architecture needs" in out
    assert "14,726 blocks × 1,310,720 bytes" in out
    assert "GPU KV cache size: " in out
    several = kvctl("size", "Qwen3-32B", "gemma-3-27b-it", "--engine", "vllm", "--ctx", "32k").out
    assert "reserved" in several.splitlines()[1]
    assert "reserved_bytes" in kvctl("size", "Qwen3-32B", "--engine", "vllm", "-f", "csv").out
    assert "| reserved |" in kvctl("size", "Qwen3-32B", "--engine", "vllm", "-f", "md").out


def test_mamba_2_reserves_a_checkpoint_block_in_late_versions(kvctl: Run) -> None:
    config = json.dumps(oracle()["configs"]["mamba2-2.7b"])
    blocks = [
        plan(kvctl, "-", "--engine", engine, "--ctx", "4k", "--enable-prefix-caching", stdin=config)[
            "blocks_per_request"
        ]
        for engine in ("vllm@0.11.0", "vllm@0.22", "vllm@0.28", "vllm@0.32")
    ]
    # No caching at first; then a state at each of 4,096/16 block boundaries; then two a request.
    assert blocks == [1, 256, 2, 3]


# -- splits, drafts, packed formats: sources are vLLM's releases, arithmetic by hand ------------


def test_stages_hold_their_layers_and_the_fullest_decides(kvctl: Run) -> None:
    # 61 layers over 4 stages: 15 each, and the one left over goes to the stage before the last (get_pp_indices).
    got = plan(kvctl, "DeepSeek-V3", "-pp", "4", "-tp", "2", "--ctx", "32k", "--kv-budget", "10GiB")
    page = 64 * 576 * 2
    assert [row["bytes_per_block"] for row in got["per_rank"]] == [15 * page] * 4 + [16 * page] * 2 + [15 * page] * 2
    assert got["num_blocks"] == 10 * GIB // (16 * page)
    assert any("4 pipeline stages" in reason for reason in got["reasons"])
    # Older releases logged a line for every stage.
    old = plan(kvctl, "Llama-3.1-70B", "--engine", "vllm@0.11.0", "-pp", "3", "--ctx", "4k", "--kv-budget", "10GiB")
    # 80 over 3: 27, 27, 26 layers · 16 tokens · 4,096 B
    expected = [10 * GIB // (layers * 16 * 4096) * 16 for layers in (27, 27, 26)]
    assert [line for line in old["log"] if "size" in line] == [f"GPU KV cache size: {n:,} tokens" for n in expected]


def test_layers_of_stages_may_be_named(kvctl: Run) -> None:
    text = "VLLM_PP_LAYER_PARTITION=50,30 vllm serve Llama-3.1-70B -pp 2 --max-model-len 4096"
    got = kvctl("size", "--json", "--engine-args", text).json["results"][0]["allocation"]
    assert [row["bytes_per_block"] for row in got["per_rank"]] == [50 * 65_536, 30 * 65_536]
    assert kvctl("size", "--engine-args", text.replace("50,30", "50,31")).code == 2


def test_context_parallel_ranks_share_the_tokens(kvctl: Run) -> None:
    # 131,072 tokens over 8 ranks: 16,384 each, 256 blocks of 64
    got = plan(kvctl, "DeepSeek-V3", "-tp", "8", "-dcp", "8", "--ctx", "128k", "--kv-budget", "10GiB")
    assert got["blocks_per_request"] == 256
    assert kvctl("size", "DeepSeek-V3", "--engine", "vllm", "-tp", "4", "-dcp", "3").code == 2


def test_ranks_of_the_prefill_divided_tokens_before_0_26(kvctl: Run) -> None:
    # 131,072 tokens in blocks of 64: 2,048, over 2 ranks of the prefill 1,024 (v1/kv_cache_interface.py of each)
    options = ("-tp", "8", "-pcp", "2", "--ctx", "128k", "--block-size", "64")
    assert plan(kvctl, "DeepSeek-V3", *options, "--engine", "vllm@0.25")["blocks_per_request"] == 1024
    assert plan(kvctl, "DeepSeek-V3", *options, "--engine", "vllm@0.33")["blocks_per_request"] == 2048


def test_ranks_that_hold_the_same_heads_share_the_tokens(kvctl: Run) -> None:
    # 8 KV heads on 16 ranks: pairs hold the same head, and each of a pair half of 4,096 tokens: 128 blocks of 16
    got = plan(kvctl, "Qwen3-32B", "-tp", "16", "-dcp", "2", "--ctx", "4k")
    assert (got["blocks_per_request"], got["bytes_per_block"]) == (128, 64 * 16 * 2 * 128 * 2)


def test_drafting_enlarges_states_and_adds_a_layer(kvctl: Run) -> None:
    # Published for a model of this shape with one draft token: 5,720 blocks a request of 262,144 tokens when every
    # layer is a group: 48 states · (2 + 1) + 17 layers · ⌈262,144/800⌉. The state's convolution has 3 + 1 columns:
    # (10,240 · 4 + 48 · 128 · 128 · 2) · 2 B … so blocks hold 800 tokens, where they hold 784 without drafts.
    drafts = '{"method": "mtp", "num_speculative_tokens": 1}'
    got = plan(kvctl, "Qwen3.5-27B", "--ctx", "256k", "--speculative-config", drafts, "--engine", "vllm@0.28")
    assert got["block_size"] == 800
    # The draft layer joins the 16 of its kind: groups of 17, so 3 of 48 states with 3 places empty.
    assert sorted(row["layers"] for row in got["groups"]) == [16, 16, 16, 17]
    assert got["bytes_per_block"] == 17 * 800 * 4096
    assert got["blocks_per_request"] == 3 * 3 + 328


def test_prompt_lookup_has_no_cache(kvctl: Run) -> None:
    lookup = '{"method": "ngram", "num_speculative_tokens": 4}'
    plain = plan(kvctl, "Qwen3-32B", "--ctx", "4k")
    assert plan(kvctl, "Qwen3-32B", "--ctx", "4k", "-sc", lookup)["bytes_per_block"] == plain["bytes_per_block"]


def test_a_draft_model_has_layers_of_its_own(kvctl: Run) -> None:
    draft = '{"model": "Llama-3.2-1B", "num_speculative_tokens": 3}'
    got = plan(kvctl, "Llama-3.1-70B", "--ctx", "4k", "-sc", draft)
    # 80 layers · 8 · 256 · 2 B and 16 layers · 8 · 128 · 2 B, 16 tokens a block
    assert got["bytes_per_block"] == 16 * (80 * 4096 + 16 * 2048)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ('{"method": "mtp"}', "no modules for multi-token prediction"),
        ('{"method": "magic", "num_speculative_tokens": 2}', "unknown method"),
        ('{"method": "ngram"}', "needs num_speculative_tokens"),
        ('{"model": "Llama-3.2-1B"}', "needs num_speculative_tokens"),
        ('{"method": "eagle3", "num_speculative_tokens": 2}', "names no draft model"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "out of range"),
        ("[1]", "not a JSON object"),
        ("{'method': 'mtp'}", "not a JSON object"),
    ],
)
def test_drafting_that_is_not_understood(kvctl: Run, settings: str, words: str) -> None:
    outcome = kvctl("size", "Qwen3-32B", "--engine", "vllm", "--speculative-config", settings)
    assert outcome.code in (1, 2)
    assert words in outcome.err


def test_packed_slots_of_a_hybrid(kvctl: Run) -> None:
    # A start-up log of this shape: 256-wide heads take 128 + 2 + 128 + 4 = 262 bytes, and blocks hold 3,072 tokens.
    got = plan(kvctl, "Qwen3.5-27B", "--ctx", "32k", "--kv-cache-dtype", "turboquant_4bit_nc", "--engine", "vllm@0.22")
    assert got["block_size"] == 3072
    assert got["bytes_per_block"] == 16 * 3072 * 4 * 262


def test_packed_slots_leave_the_first_and_last_layers(kvctl: Run) -> None:
    # 64 layers: 60 of 8 heads · (64 + 2 + 64 + 4) B and 4 of 8 · 512 B. A block grows until a packed page covers
    # 16 tokens of an unpacked layer: 16 · 4,096 / (16 · 1,072) = 3.8, so 4 · 16 = 64 tokens.
    got = plan(kvctl, "Qwen3-32B", "--ctx", "4k", "--kv-cache-dtype", "turboquant_4bit_nc")
    assert got["block_size"] == 64
    assert got["bytes_per_block"] == 64 * (60 * 8 * 134 + 4 * 8 * 512)


def test_sparse_latents_in_fp8(kvctl: Run) -> None:
    # fp8 becomes 656 bytes a token for latents with an indexer; in 0.11 without being asked.
    told = plan(kvctl, "DeepSeek-V3.2", "--ctx", "4k", "--kv-cache-dtype", "fp8")
    old = plan(kvctl, "DeepSeek-V3.2", "--ctx", "4k", "--engine", "vllm@0.11.0")
    assert told["bytes_per_block"] == old["bytes_per_block"] == 61 * (656 + 132) * 64
    nvfp4 = plan(kvctl, "DeepSeek-V3.2", "--ctx", "4k", "--kv-cache-dtype", "nvfp4_ds_mla")
    assert nvfp4["bytes_per_block"] == 61 * (352 + 132) * 64


def test_an_encoder_decoder_as_measured(kvctl: Run) -> None:
    # Measured with the planner of vLLM 0.32 on a CPU: 204 blocks, 10.2 requests; the encoder's budget is a batch.
    options = ("--engine", "vllm@0.32", "--device", "cpu", "--ctx", "448", "--kv-budget", "4GiB")
    got = plan(kvctl, "whisper-large-v3", *options)
    assert (got["num_blocks"], got["max_concurrency"], got["bytes_per_block"]) == (204, 10.2, 32 * 655_360)


def test_recurrent_layers_by_version(kvctl: Run) -> None:
    """Prefix caching of hybrids: none in 0.11, asked for until 0.25, on from 0.26; FlashInfer's checkpoints in 0.33."""
    options = ("Qwen3-Next-80B-A3B-Instruct", "-tp", "4", "--ctx", "256k")

    def blocks(*more: str) -> int:
        found: int = plan(kvctl, *options, *more)["blocks_per_request"]
        return found

    # 964 blocks of 272 tokens, and 3 groups of states
    assert blocks("--engine", "vllm@0.11", "--enable-prefix-caching") == 964 + 3
    assert blocks("--engine", "vllm@0.22") == 964 + 3
    assert blocks("--engine", "vllm@0.22", "--enable-prefix-caching") == 964 + 6
    assert blocks("--engine", "vllm@0.26") == 964 + 6
    # Blocks of ⌈274,432 / (64 · 1,024)⌉ · 64 = 320 tokens: 820 of them
    assert blocks("--gdn-prefill-backend", "flashinfer") == 820 + 9


def test_states_at_every_block_in_old_versions(kvctl: Run) -> None:
    # Bamba 9B: state (8,192 + 2 · 256) channels · 3 + 128 heads · 64 · 128, bf16 = 2,149,376 B; K and V 4,096 B a token:
    # 525 tokens, in multiples of its kernel's 256: 768. A request of 32,768 holds 43 states a group.
    config = {"model_type": "bamba", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
              "num_key_value_heads": 8, "attn_layer_indices": [9, 18, 27], "mamba_d_conv": 4, "mamba_d_head": 64,
              "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128,
              "mamba_chunk_size": 256, "torch_dtype": "bfloat16"}  # fmt: skip
    options = ("--ctx", "32k", "--enable-prefix-caching")
    old = plan(kvctl, "-", "--engine", "vllm@0.19", *options, stdin=json.dumps(config))
    assert old["block_size"] == 768
    assert {row["blocks_per_request"] for row in old["groups"]} == {43}
    new = plan(kvctl, "-", "--engine", "vllm@0.28", *options, stdin=json.dumps(config))
    assert {row["blocks_per_request"] for row in new["groups"] if row["kind"] == "recurrent_state"} == {2}


def test_connectors_that_need_every_token(kvctl: Run) -> None:
    """From 0.22 on vLLM asks the connector's class; before, any connector turned the hybrid manager off."""
    options = ("gpt-oss-120b", "--ctx", "128k")
    full = 36 * 8 * 128 * 2 * 131_072  # every layer, every token

    def bytes_(connector: str, engine: str) -> int:
        found: int = plan(
            kvctl, *options, "--engine", engine, "--kv-transfer-config", json.dumps({"kv_connector": connector})
        )["reserved_bytes"]
        return found

    assert bytes_("LMCacheConnectorV1", "vllm@0.33") == full
    assert bytes_("NixlConnector", "vllm@0.33") < full
    assert bytes_("NixlConnector", "vllm@0.20") == full
    told = plan(kvctl, *options, "--engine", "vllm@0.20", "--no-disable-hybrid-kv-cache-manager",
                "--kv-transfer-config", '{"kv_connector": "NixlConnector"}')  # fmt: skip
    assert told["reserved_bytes"] < full
    lmcache = plan(kvctl, *options, "--kv-offloading-size", "64", "--kv-offloading-backend", "lmcache")
    assert lmcache["reserved_bytes"] == full


def test_host_memory_holds_blocks_of_all_ranks(kvctl: Run) -> None:
    # 64 GiB over 2 ranks of 2 MiB a block: 16,384
    got = plan(kvctl, "Qwen3-32B", "-tp", "2", "--ctx", "4k", "--kv-offloading-size", "64")
    assert any("holds 16,384 blocks" in reason for reason in got["reasons"])


def test_chunks_were_stored_in_full_before_0_14(kvctl: Run) -> None:
    # VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE was 0 until 0.13. 48 layers · 8 · 256 · 2 B · 16 tokens
    old = plan(kvctl, "Llama-4-Scout-17B-16E-Instruct", "--engine", "vllm@0.12", "--ctx", "128k")
    assert (old["bytes_per_block"], len(old["groups"])) == (48 * 4096 * 16, 1)
    assert len(plan(kvctl, "Llama-4-Scout-17B-16E-Instruct", "--engine", "vllm@0.14", "--ctx", "128k")["groups"]) == 4


def test_a_budget_of_the_environment(kvctl: Run) -> None:
    text = "VLLM_CPU_KVCACHE_SPACE=40 vllm serve Qwen/Qwen3-8B --max-model-len 4096"
    found = kvctl("size", "--json", "--engine-args", text).json["results"][0]["allocation"]
    assert found["kv_budget_bytes"] == 40 * GIB


def test_a_length_left_to_the_engine(kvctl: Run) -> None:
    # 5 GiB / 2 MiB a block (fp8) = 2,560 blocks, one set aside: 2,559 · 16 tokens
    text = "vllm serve Qwen/Qwen3-32B --max-model-len auto --kv-cache-memory-bytes 5G --kv-cache-dtype fp8"
    found = kvctl("size", "--json", "--engine-args", text).json["results"][0]["allocation"]
    assert found["log"] == [
        "GPU KV cache size: 40,960 tokens, Maximum concurrency for 40,944 tokens per request: 1.00x"
    ]


def test_lmcache_holds_chunks_in_host_memory(kvctl: Run) -> None:
    # 5 GiB / (256 tokens · 64 layers · 4 of 8 heads · 256 · 2 B = 32 MiB) = 160 chunks
    settings = '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'
    got = plan(kvctl, "Qwen3-32B", "-tp", "2", "--ctx", "4k", "--kv-transfer-config", settings)
    assert "LMCache holds 40,960 tokens in 5,368,709,120 bytes of host memory of each rank" in got["reasons"]
    text = f"LMCACHE_MAX_LOCAL_CPU_SIZE=20 vllm serve Qwen/Qwen3-32B -tp 2 --kv-transfer-config '{settings}'"
    more = kvctl("size", "--json", "--engine-args", text).json["results"][0]["allocation"]
    assert any("holds 163,840 tokens" in reason for reason in more["reasons"])


def test_a_stage_without_a_cache_prints_nothing(kvctl: Run) -> None:
    """Nemotron Super has layers without attention; alone on a stage they hold no block."""
    arguments = ("--engine", "vllm@0.11", "-pp", "64", "--kv-budget", "4GiB", "--ctx", "4k", "--json")
    outcome = kvctl("size", "nvidia/Llama-3_3-Nemotron-Super-49B-v1", *arguments)
    assert outcome.code == 0, outcome.err
    ranks = outcome.json["results"][0]["allocation"]["per_rank"]
    assert 0 in {row["bytes_per_block"] for row in ranks}
