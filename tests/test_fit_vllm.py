"""`kvctl size --gpu` against vLLM's own check at its start: the longest context and the concurrency that it admits.

`data/vllm_longest.json` was measured with vLLM 0.32 on a CPU, for the cases of `data/vllm.json` and of
`data/vllm_more.json.gz`: the largest --max-model-len for which `get_kv_cache_configs`, called as the engine does for a
configuration of that length made anew, raises no "To serve at least one request …"; with one token more it does. The
model's own maximum was lifted (VLLM_ALLOW_LONG_MAX_MODEL_LEN). null: 2^24 tokens are admitted, and 2^44 by the groups
of the case's own length.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from conftest import DATA, Outcome
from test_vllm import more, options_of, oracle

Run = Callable[..., Outcome]
Json = dict[str, Any]
GIB = 2**30


@cache
def longest() -> dict[str, list[list[Any]]]:
    """For either file: the index of a case, and pairs of memory in bytes and tokens."""
    found: dict[str, list[list[Any]]] = json.loads((DATA / "vllm_longest.json").read_text())["cases"]
    return found


def sizes(run: Run, model: str, *options: str, stdin: str | None = None) -> list[Json]:
    outcome = run("size", model, "--json", *options, stdin=stdin)
    assert outcome.code == 0, outcome.err
    results: list[Json] = outcome.json["results"]
    return results


def check(run: Run, case: Json, config: Json, memory: int, tokens: int | None) -> None:
    own = case["max_model_len"]
    contexts = {own, 2**24} if tokens is None else {own, max(tokens, 1), tokens + 1}
    # The device does not come into it: what is told of the budget decides.
    options = [*options_of({**case, "mem": memory}), "--gpu", "H200", "--ctx", ", ".join(map(str, sorted(contexts)))]
    results = {result["context"]: result for result in sizes(run, "-", *options, stdin=json.dumps(config))}
    assert results.keys() == contexts
    for context, result in results.items():
        admitted = tokens is None or context <= tokens
        assert result["fit"]["max_context"] == tokens
        assert (result["fit"]["max_concurrency"] > 0) == admitted
        assert any("vLLM would not start" in words for words in result["warnings"]) != admitted
    if memory == case["mem"]:
        concurrency = int(case["max_concurrency"]) if tokens is None or own <= tokens else 0
        assert results[own]["fit"]["max_concurrency"] == concurrency


@pytest.mark.parametrize("number", range(36))
def test_the_longest_context_is_the_one_that_vllm_admits(kvctl: Run, number: int) -> None:
    index, *rows = longest()["vllm.json"][number]
    case = oracle()["cases"][index]
    for memory, tokens in rows:
        check(kvctl, case, oracle()["configs"][case["model"]], memory, tokens)


@pytest.mark.parametrize("number", range(353))
def test_so_it_is_for_every_architecture(kvctl: Run, number: int) -> None:
    index, *rows = longest()["vllm_more.json.gz"][number]
    case = more()["cases"][index]
    for memory, tokens in rows:
        check(kvctl, case, more()["configs"][case["model"]], memory, tokens)


def test_every_case_is_there() -> None:
    assert {name: len(rows) for name, rows in longest().items()} == {"vllm.json": 36, "vllm_more.json.gz": 353}


# -- starts that fail, published and worked by hand -----------------------------------------------


def fit(run: Run, model: str, *options: str) -> Json:
    (result,) = sizes(run, model, *options)
    found: Json = result["fit"]
    return found | {"reserved": result["allocation"]["reserved_bytes"], "log": result["allocation"]["log"]}


def test_gpt_oss_120b_needs_more_than_a_loader_left_of_an_h100(kvctl: Run) -> None:
    # A published start-up error: 4.54 GiB needed at 131,072 tokens with 1,024 batched ones. 36 layers, half of them
    # full: 131,072/16 + ⌈(127 + 1024)/16⌉ + 1 = 8,265 blocks of 18 · 16 · 2,048 B. A loader that held 66 GiB of
    # weights had left 3.86 GiB for it.
    options = ("gpt-oss-120b", "--engine", "vllm@0.22", "--max-num-batched-tokens", "1024", "--ctx", "128k")
    short = fit(kvctl, *options, "--gpu", "H100", "--kv-budget", "3.86GiB")
    assert short["reserved"] == short["kv_bytes"] == 8_265 * 18 * 16 * 2_048
    assert f"{short['kv_bytes'] / GIB:.2f}" == "4.54"
    assert (short["fits"], short["max_concurrency"], short["log"]) == (False, 0, [])
    assert short["headroom_bytes"] == int(3.86 * GIB) - 8_265 * 589_824
    # 7,026 blocks; 73 of them hold the window's tokens: 6,953 · 16
    assert short["max_context"] == (int(3.86 * GIB) // 589_824 - 73) * 16
    enough = fit(kvctl, *options, "--gpu", "H100", "--kv-budget", str(8_265 * 589_824))
    assert (enough["fits"], enough["max_context"], enough["max_concurrency"]) == (True, 131_072, 1)


@pytest.mark.parametrize("version", ["0.22", "0.33"])
def test_gpt_oss_120b_is_refused_whatever_the_batch(kvctl: Run, version: str) -> None:
    got = fit(kvctl, "gpt-oss-120b", "--engine", f"vllm@{version}", "--ctx", "128k", "--gpu", "H100",
              "--kv-budget", "3.86GiB")  # fmt: skip
    # 8,192 + 521 blocks with one batch of 8,192 in flight, 8,192 + 1,033 with two
    assert got["kv_bytes"] == {"0.22": 8_713, "0.33": 9_225}[version] * 589_824
    assert not got["fits"]
    assert "too little for one request of 131,072 tokens" in got["why"]


def test_deepseek_v3_does_not_start_on_8_gpus_of_80_gb(kvctl: Run) -> None:
    # 641 GiB over 8 is 80.1 GiB of weights, and 0.92 · 79.2 = 72.9 GiB are asked for.
    got = fit(kvctl, "DeepSeek-V3", "--engine", "vllm", "--gpu", "8xH100", "--ctx", "32k")
    assert (got["fits"], got["max_context"], got["max_concurrency"]) == (False, 0, 0)
    assert got["why"].startswith("weights of ")
    assert len(got["ranks"]) == 8
    assert kvctl("size", "DeepSeek-V3", "--engine", "vllm", "--gpu", "8xH100", "--fail-unless-fits").code == 3
    # One token in fp8 does not fit either: it is not the cache.
    least = fit(kvctl, "DeepSeek-V3", "--engine", "vllm", "--gpu", "8xH100", "--ctx", "1", "--kv-dtype", "fp8")
    assert not least["fits"]


@pytest.mark.parametrize(("gpus", "tokens"), [("16xH100", 447_680), ("8xH200", 687_424)])
def test_deepseek_v3_starts_on_more(kvctl: Run, gpus: str, tokens: int) -> None:
    # Worked by hand with 3.5 GiB beside weights and cache, and 641 GiB of weights cut evenly: 29.3 GiB and 44.99 GiB
    # are left. By tensor, ranks hold some 0.1 to 0.8 GiB less: 70,272 B a token.
    got = fit(kvctl, "DeepSeek-V3", "--engine", "vllm", "--gpu", gpus, "--ctx", "32k", "--measured-overhead", "3.5GiB")
    assert got["fits"]
    assert got["capacity_tokens"] == pytest.approx(tokens, rel=0.02)
    # And by kvctl's own estimates of what is beside them.
    assert fit(kvctl, "DeepSeek-V3", "--engine", "vllm", "--gpu", gpus, "--ctx", "32k")["fits"]


# -- a budget that is told -------------------------------------------------------------------------


def test_a_told_budget_answers_for_the_cache_and_the_device_for_the_rest(kvctl: Run) -> None:
    # 132 GiB of weights and 16 GiB do not fit on 140 GiB; the engine's check counts blocks of 16 · 81,920 · 4 B alone
    got = fit(kvctl, "Llama-3.1-70B", "--engine", "vllm@0.32", "--ctx", "32k", "--gpu", "H200", "--kv-budget", "16GiB")
    assert not got["fits"]
    assert got["why"].startswith("a budget of 16 GiB beside ")
    blocks = 16 * GIB // (16 * 327_680)
    assert (got["max_context"], got["max_concurrency"]) == ((blocks - 1) * 16, blocks // 2_048)
    # No shorter context helps, so none is said to.
    assert not any(words.startswith(("--ctx", "--sequences")) for words in got["advice"])


@pytest.mark.parametrize("what", ["ctx", "concurrency"])
def test_what_is_solved_for_fits_on_the_device_too(kvctl: Run, what: str) -> None:
    outcome = kvctl("size", "Llama-3.1-70B", "--engine", "vllm", "--ctx", "32k", "--gpu", "H200", "--kv-budget", "16GiB",
                    "--solve", what)  # fmt: skip
    assert outcome.code == 3
    assert "a budget of 16 GiB beside " in outcome.err


def test_unknown_weights_are_said_and_not_counted_beside_a_told_budget(kvctl: Run) -> None:
    config = json.dumps(oracle()["configs"]["mamba2-2.7b"])
    options = ("size", "-", "--engine", "vllm", "--gpu", "H200", "--ctx", "4k", "--json")
    got = kvctl(*options, "--kv-budget", "1GiB", stdin=config).json["results"][0]["fit"]
    assert got["weights_bytes"] == 0
    assert "weights: not known, nothing is counted for them" in got["estimated"]
    refused = kvctl(*options, stdin=config)
    assert refused.code == 1
    assert "--kv-budget asks about the cache alone" in refused.err


def test_on_a_cpu_only_a_told_budget_has_an_answer(kvctl: Run) -> None:
    options = ("Qwen3-8B", "--engine", "vllm", "--device", "cpu", "--gpu", "H200", "--ctx", "4k")
    got = fit(kvctl, *options, "--kv-budget", "16GiB")
    # What vLLM takes of a GPU for activations and graphs is none of a CPU's.
    assert [part["name"] for part in got["parts"]] == ["left free"]
    refused = kvctl("size", *options)
    assert refused.code == 1
    assert "--kv-budget says how much" in refused.err


# -- kernels of latents, by GPU ------------------------------------------------------------------------

# vLLM 0.32, platforms/cuda.py: on 9.x FLASH_ATTN_MLA comes first (16 bits alone; multiples of 16), then FLASHMLA (64); on
# 10.x FLASHINFER_MLA (32 or 64); on others TRITON_MLA (multiples of 16). platforms/rocm.py: TRITON_MLA where AITER is not
# asked for. Indexers have 64 on CUDA, and 1 or multiples of 16 on ROCm. The least that takes the default, 16, or its least own.
BLOCKS = (
    ("DeepSeek-V3", "8xA100", "auto", 16), ("DeepSeek-V3", "8xH200", "auto", 16), ("DeepSeek-V3", "8xH200", "fp8", 64),
    ("DeepSeek-V3", "8xB200", "auto", 32), ("DeepSeek-V3", "8xB200", "fp8", 32), ("DeepSeek-V3", "8xMI300X", "auto", 16),
    ("DeepSeek-V3", "8xRTX PRO 6000 Blackwell", "auto", 16),
    ("DeepSeek-V3.2", "8xH200", "auto", 64), ("DeepSeek-V3.2", "8xB200", "auto", 64), ("DeepSeek-V3.2", "8xMI300X", "auto", 16),
)  # fmt: skip


@pytest.mark.parametrize(("model", "gpus", "cache", "block"), BLOCKS)
def test_blocks_of_latents_are_those_of_the_gpus_kernels(
    kvctl: Run, model: str, gpus: str, cache: str, block: int
) -> None:
    options = ("--engine", "vllm@0.32", "--gpu", gpus, "--ctx", "8k", "--kv-dtype", cache)
    outcome = kvctl("size", model, "--json", *options)
    assert outcome.json["results"][0]["allocation"]["block_size"] == block
    assert "Hopper" not in outcome.err + outcome.out


def test_latents_of_other_widths_are_tritons(kvctl: Run) -> None:
    # With 64 of the rotary key: 320, 512 and 576 are what other kernels have (MLACommonBackend.get_supported_head_sizes), 384 is none.
    for width, block in ((256, 32), (320, 16), (448, 32), (512, 32)):
        told = ("--set", f"kv_lora_rank={width}", "--engine", "vllm@0.32", "--gpu", "8xB200", "--ctx", "8k")
        (result,) = sizes(kvctl, "DeepSeek-V3", *told)
        assert result["allocation"]["block_size"] == block, width


def test_older_versions_forced_blocks_of_latents(kvctl: Run) -> None:
    # "Forcing kv cache block size to 64 for FlashMLA backend" in logs of 0.8 to 0.13, on Hopper.
    for gpus, said in (("8xH200", False), ("8xB200", True)):
        outcome = kvctl("size", "DeepSeek-V3", "--json", "--engine", "vllm@0.12", "--gpu", gpus, "--ctx", "8k")
        assert outcome.json["results"][0]["allocation"]["block_size"] == 64
        assert ("assumed for vLLM 0.12" in outcome.err + outcome.out) is said


def test_blocks_without_a_gpu_say_what_is_assumed(kvctl: Run) -> None:
    outcome = kvctl("size", "DeepSeek-V3", "--engine", "vllm@0.32", "--ctx", "8k")
    assert "block size 64, as FlashMLA on a Hopper GPU has it" in outcome.err + outcome.out


@pytest.mark.parametrize(("gpus", "row"), [("8xH200", 656), ("8xB200", 576), ("8xMI300X", 576)])
def test_sparse_latents_in_fp8_by_gpu(kvctl: Run, gpus: str, row: int) -> None:
    # fp8_ds_mla has 512 values, 4 scales of 4 B and 64 values of 2 B: 656; plain fp8 512 + 64. Indexers 128 + 4. 61 layers.
    options = ("--engine", "vllm@0.32", "--gpu", gpus, "--ctx", "8k", "--kv-dtype", "fp8")
    (result,) = sizes(kvctl, "DeepSeek-V3.2", *options)
    plan = result["allocation"]
    assert plan["bytes_per_block"] == 61 * (row + 132) * plan["block_size"]


def test_what_blackwell_does_without_being_told_is_said_there_alone(kvctl: Run) -> None:
    for gpus, told in (("8xH200", False), ("8xMI300X", False), ("8xB200", True)):
        outcome = kvctl("size", "GLM-5.1", "--engine", "vllm@0.32", "--gpu", gpus, "--ctx", "8k", "--json")
        assert ("a Blackwell GPU keeps" in outcome.err + outcome.out) is told
