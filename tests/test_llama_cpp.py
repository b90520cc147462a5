"""`--engine llama.cpp` against the lines that llama.cpp itself printed, character by character."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from conftest import DATA, Outcome, llama_cpp_options

from kvctl.allocation import Allocation, Serving
from kvctl.engines import llama_cpp
from kvctl.formats import FP16
from kvctl.model import build_spec
from kvctl.sources import catalogue
from kvctl.spec import Formats

Run = Callable[..., Outcome]
Json = dict[str, Any]

# Models of the log that the catalogue has; the others come with the plans of vLLM.
CATALOGUE = {
    "qwen3-8b": "Qwen/Qwen3-8B",
    "deepseek-v3.2": "deepseek-ai/DeepSeek-V3.2",
    "deepseek-v2-lite-mla": "deepseek-ai/DeepSeek-V2-Lite",
    "llama4-scout": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "smollm2-135m-q4_1": "smollm2-135m",
}


@cache
def oracle() -> list[Json]:
    cases: list[Json] = json.loads((DATA / "llama_cpp.json").read_text())["cases"]
    return cases


@cache
def configs() -> Json:
    found: Json = json.loads((DATA / "vllm.json").read_text())["configs"]
    return found


def ask(run: Run, name: str, *options: str) -> Outcome:
    name = CATALOGUE.get(name, name)
    model, stdin = ("-", json.dumps(configs()[name])) if name in configs() else (name, None)
    return run("size", model, "--json", "--engine", "llama.cpp", *options, stdin=stdin)


@pytest.mark.parametrize("index", range(116))
def test_prints_what_llama_cpp_prints(kvctl: Run, index: int) -> None:
    case = oracle()[index]
    options = llama_cpp_options(case["arguments"])
    outcome = ask(kvctl, case["model"], *options)
    if not case["log"]:
        # llama.cpp refused: a quantised V cache without flash attention.
        assert outcome.code == 2
        assert "flash attention" in outcome.err
        return
    assert outcome.code == 0, outcome.err
    allocation = outcome.json["results"][0]["allocation"]
    assert allocation["log"] == case["log"]
    assert sum(group["layers"] > 0 for group in allocation["groups"]) == sum(
        "size = " in line and "MiB" in line for line in case["log"]
    )


def test_every_case_is_there() -> None:
    assert len(oracle()) == 116


def allocation(run: Run, name: str, *options: str) -> Json:
    outcome = ask(run, name, *options)
    assert outcome.code == 0, outcome.err
    found: Json = outcome.json["results"][0]["allocation"]
    return found


def test_worked_examples(kvctl: Run) -> None:
    # 80 layers · 8 heads · 256 · 131,072: 40 GiB in f16, 34/32 bytes an element in q8_0
    assert allocation(kvctl, "llama-3.3-70b", "--ctx", "128k")["reserved_bytes"] == 40 * 2**30
    q8 = allocation(kvctl, "llama-3.3-70b", "--ctx", "128k", "-ctk", "q8_0", "-ctv", "q8_0")
    assert q8["reserved_bytes"] == 40 * 2**30 * 17 // 32
    # gemma-3-27b: 10 GiB of full layers, and windows of 4 slots in one stream: 4,608 cells, 1,872 MiB
    server = allocation(kvctl, "gemma3-27b", "--ctx", "128k")
    assert server["reserved_bytes"] == 10 * 2**30 + 1872 * 2**20
    assert "4 slots" in server["reasons"][0]
    one = allocation(kvctl, "gemma3-27b", "--ctx", "128k", "-np", "1")
    assert one["reserved_bytes"] == 10 * 2**30 + 624 * 2**20
    # Latents without values: 576 · 34/32 · 61 layers
    latent = allocation(kvctl, "deepseek-v3", "--ctx", "4096", "-ctk", "q8_0", "-ctv", "q8_0")
    assert latent["reserved_bytes"] == 4096 * 37_332


def test_windows_of_mistral_are_stored_in_full(kvctl: Run) -> None:
    got = allocation(kvctl, "Mistral-7B-v0.1", "--ctx", "32k", "-np", "1")
    # 32 layers · 8 heads · 256 · 2 B · 32,768
    assert got["reserved_bytes"] == 4 * 2**30
    assert any("every token" in reason for reason in got["reasons"])


def test_a_budget_says_how_long_the_context_may_be(kvctl: Run) -> None:
    # 131,072 B a token: 1 GiB holds 8,192 tokens; over 3 slots of their own in steps of 3 · 256
    assert allocation(kvctl, "llama-3.1-8b", "--ctx", "4k", "--kv-budget", "1GiB")["capacity_tokens"] == 8192
    three = allocation(kvctl, "llama-3.1-8b", "--ctx", "4k", "-np", "3", "--kv-budget", "1GiB")
    assert three["capacity_tokens"] == 8192 // 768 * 768
    small = ask(kvctl, "llama-3.1-8b", "--ctx", "16k", "--kv-budget", "1GiB")
    assert "more than the budget" in small.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Qwen3-32B", "--kv-dtype", "fp8"), "no cache type of llama.cpp"),
        (("Qwen3-32B", "--sequences", "2"), "--parallel N"),
        (("Qwen3-32B", "--ctx", "0"), "model's own maximum"),
        (("Qwen3-32B", "-np", "0"), "out of range"),
        (("Qwen3-32B", "-np", "300"), "out of range"),
        (("Qwen3-32B", "--beams", "2"), "by request, not by beam"),
        (("Qwen3-32B", "-fa", "maybe"), "unknown value"),
        (("Qwen3-32B", "--block-size", "16"), "no use for it"),
        (("whisper-large-v3",), "does not know how llama.cpp stores"),
        (("LongCat-Flash-Chat",), "does not know how llama.cpp stores"),
    ],
)
def test_what_is_not_understood_is_refused(kvctl: Run, arguments: tuple[str, ...], words: str) -> None:
    context = () if "--ctx" in arguments else ("--ctx", "4k")
    outcome = kvctl("size", *arguments, *context, "--engine", "llama.cpp")
    assert outcome.code in (1, 2)
    assert words in outcome.err
    assert not outcome.out


def test_windows_of_an_architecture_that_was_not_read_are_refused(kvctl: Run) -> None:
    config = configs()["gemma3-27b"] | {"model_type": "ministral"}
    text = config.pop("text_config", {})
    config |= text | {"model_type": "ministral", "num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2}
    outcome = kvctl("size", "-", "--engine", "llama.cpp", "--ctx", "4k", stdin=json.dumps(config))
    assert outcome.code == 1
    assert "does not know whether llama.cpp keeps" in outcome.err


def test_heads_that_do_not_fill_a_block_are_refused(kvctl: Run) -> None:
    config = {"model_type": "llama", "hidden_size": 80, "num_hidden_layers": 2, "num_attention_heads": 2,
              "torch_dtype": "bfloat16"}  # fmt: skip
    outcome = kvctl("size", "-", "--engine", "llama.cpp", "--ctx", "4k", "-ctk", "q8_0", stdin=json.dumps(config))
    assert outcome.code == 2
    assert "heads of 40 elements" in outcome.err


def test_models_without_a_cache_that_grows_have_a_table(kvctl: Run) -> None:
    outcome = kvctl("size", "-", "--engine", "llama.cpp", "--ctx", "4k", "-np", "1", "--kv-budget", "1GiB",
                    stdin=json.dumps(configs()["mamba2-2.7b"]))  # fmt: skip
    assert outcome.code == 0
    # R 64 · 3 · 5,376 · 4 B and S 64 · 80 · 64 · 128 · 4 B
    assert f"{64 * 3 * 5376 * 4 + 64 * 80 * 64 * 128 * 4:,} bytes" in outcome.out
    assert "llama_memory_recurrent: size =  163.94 MiB" in outcome.out


def test_a_physical_batch_is_never_more_than_a_logical_one(kvctl: Run) -> None:
    # 1,024 + 2,048 cells for -ub 8192, and 1,024 + 512 for the default
    big = allocation(kvctl, "gemma3-27b", "--ctx", "128k", "-np", "1", "-ub", "8192")
    assert "size =  3072 cells".replace("  ", " ") in " ".join(big["log"])
    assert any("2,048 tokens" in reason for reason in big["reasons"])


def test_slots_of_their_own_each_have_the_models_maximum(kvctl: Run) -> None:
    outcome = kvctl("size", "Qwen3-32B", "--ctx", "160k", "--engine", "llama.cpp", "-np", "4", "--kv-budget", "80GiB")
    assert "beyond the model" not in outcome.err
    # 40,960 for each of 4 slots
    assert "up to --ctx 163840" in outcome.out
    small = kvctl("size", "Qwen3-32B", "--ctx", "160k", "--engine", "llama.cpp", "-np", "1")
    assert "beyond the model" in small.err


def plan(name: str, context: int, **serving: Any) -> Allocation:
    """The allocation of a catalogue model, for options that the command line may not have yet."""
    spec = build_spec(catalogue.find(CATALOGUE.get(name, name)))
    f16 = llama_cpp.kv_dtype("f16", "-ctk")
    return llama_cpp.plan(spec, context, 1, Formats(FP16, f16, f16), Serving(**serving), None)


def test_a_cache_on_the_host_is_as_large() -> None:
    there = plan("qwen3-8b", 4096, slots=1)
    here = plan("qwen3-8b", 4096, slots=1, kv_on_host=True)
    # 36 layers · 8 heads · 128 · 4 B · 4,096
    assert here.reserved_bytes == there.reserved_bytes == 36 * 8 * 128 * 4 * 4096
    assert (there.device, here.device) == ("gpu", "cpu")
    assert "without KV offload the cache lies in the host's memory" in here.reasons


def test_a_logical_batch_bounds_the_physical_one() -> None:
    # gpt-oss: windows of 128 and a batch of 256 are 384 tokens, 512 cells; 18 layers of 8 heads of 64, 2,048 B a cell
    small = plan("gpt-oss-120b", 8192, slots=1, batch=256, ubatch=1024)
    assert small.reserved_bytes == 18 * 2048 * (8192 + 512)
    assert any("logical one of 256 tokens" in reason for reason in small.reasons)


def test_what_a_request_has_of_a_divided_context_is_said() -> None:
    """32,768 / 4; one cache that all share has no such parts."""
    assert (
        "--ctx is that of 4 slots together: a request has 8,192 tokens"
        in plan("qwen3-8b", 32768, slots=4, unified=False).reasons
    )
    assert not any("together" in reason for reason in plan("qwen3-8b", 32768, slots=4, unified=True).reasons)


def test_a_slot_may_be_limited() -> None:
    limited = plan("qwen3-8b", 32768, slots=4, unified=True, slot_limit=8192)
    assert limited.longest_sequence == 8192
    assert limited.reserved_bytes == plan("qwen3-8b", 32768, slots=4, unified=True).reserved_bytes
    assert "no slot takes more than 8,192 tokens" in limited.reasons


def test_without_slots_named_the_cache_is_unified_whatever_is_asked() -> None:
    assert plan("qwen3-8b", 4096, unified=False).log == plan("qwen3-8b", 4096).log
    assert "4/1 seqs" in plan("qwen3-8b", 4096).log[0]


def test_deepseek_v4_has_a_stream_for_every_slot() -> None:
    # 43 layers of 512 elements: windows of 128 + 512 tokens; entries every 4 and 128 tokens in 21 and 20 layers;
    # 21 indexer keys of 128; compressors of 8 · 1,024, 128 · 512 and 8 · 256 values and scores in float32
    cells = 43 * 768 * 512 * 2 + 21 * 8192 * 512 * 2 + 20 * 256 * 512 * 2 + 21 * 8192 * 128 * 2
    states = (21 * 8 * 1024 + 20 * 128 * 512 + 21 * 8 * 256) * 2 * 4
    assert plan("DeepSeek-V4-Flash", 32768, slots=1).reserved_bytes == cells + states
    assert plan("DeepSeek-V4-Flash", 32768).reserved_bytes == 4 * (cells + states)
