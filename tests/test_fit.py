"""Does it fit: budgets, ranks, limits and what is said of them, against numbers worked out by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome

from kvctl.ask import Plans
from kvctl.engines import engine
from kvctl.hardware import Device, read_gpus
from kvctl.model import build_spec, shape_spec
from kvctl.plot.build import chart_of
from kvctl.ranks import Hardware
from kvctl.reports import Fit, SizeResult
from kvctl.search import largest
from kvctl.size import SizePlan, size
from kvctl.solve import answers_on
from kvctl.sources import catalogue

Run = Callable[..., Outcome]
GIB = 2**30

# 80 layers, 8 KV heads of 128, bf16: 2 × 80 × 8 × 128 × 2 = 327,680 bytes a token.
SHAPE = shape_spec(80, 8, 128)
TOKEN = 327_680


def card(gib: int, **more: Any) -> Device:
    return Device("a card", gib * GIB, cuda_total_bytes=gib * GIB, **more)


def asked(context: int, *devices: Device, rules: str = "ideal", sequences: int = 1, serving: dict[str, Any] | None = None,
          **hardware: Any) -> SizeResult:  # fmt: skip
    plan = SizePlan(
        engine=engine(rules), contexts=(context,), sequences=sequences, hardware=Hardware(devices, **hardware)
    )
    return size(SHAPE, context, plan.replace(serving=plan.serving.replace(**(serving or {}))))


def fit(*args: Any, **more: Any) -> Fit:
    found = asked(*args, **more).fit
    assert found is not None
    return found


def test_the_ideal_takes_the_whole_device() -> None:
    # 80 GiB ÷ 327,680 = 262,144 tokens; 65,536 of them take 20 GiB.
    found = fit(65_536, card(80))
    assert found.fits
    assert (found.max_context, found.max_concurrency) == (262_144, 4)
    assert (found.kv_bytes, found.headroom_bytes, found.overhead_bytes) == (20 * GIB, 60 * GIB, 0)


def test_it_fits_to_the_byte() -> None:
    assert fit(262_144, card(80)).headroom_bytes == 0
    over = fit(262_145, card(80))
    assert not over.fits
    assert over.headroom_bytes == -TOKEN


def test_several_devices_share_the_layers_and_the_smallest_decides() -> None:
    # Half of a token's bytes on each: 40 GiB ÷ 163,840 = 262,144.
    found = fit(65_536, card(80), card(40))
    assert found.max_context == 262_144
    assert found.bottleneck_rank == 1
    assert [rank.kv_bytes for rank in found.ranks] == [10 * GIB, 10 * GIB]


VLLM = {"rules": "vllm@0.32", "overhead": 8 * GIB, "serving": {"utilization": 0.9, "max_batched": 8192}}


def test_vllm_asks_for_its_share() -> None:
    # 0.9 × 80 = 72 GiB, less 8 measured: 64 GiB ÷ (16 × 327,680) = 13,107 blocks, one set aside: 209,696 tokens.
    found = fit(32_768, card(80), **VLLM)
    assert found.kv_budget_bytes == 64 * GIB
    assert found.max_context == 13_106 * 16
    assert found.max_concurrency == 6  # 13,107 ÷ 2,048 = 6.4
    assert [(part.name, part.bytes) for part in found.parts] == [("overhead", 8 * GIB), ("left free", 8 * GIB)]
    assert found.headroom_bytes == 54 * GIB
    assert found.device_bytes == found.weights_bytes + found.kv_bytes + found.overhead_bytes + found.headroom_bytes


def test_tensor_parallel_ranks_have_their_heads() -> None:
    # Four ranks with two heads each: four times as many tokens in each one's 64 GiB.
    found = fit(32_768, *(card(80),) * 4, **VLLM)
    assert len(found.ranks) == 4
    assert found.max_context == (4 * 64 * GIB // (16 * TOKEN) - 1) * 16
    assert found.kv_bytes == 10 * GIB // 4


def test_an_odd_number_of_gpus_becomes_stages() -> None:
    # 3 divides 64 query heads nowhere: a shape has no query heads, but 8 KV heads are neither a divisor nor a multiple of 3.
    found = asked(32_768, *(card(80),) * 3, **VLLM)
    assert found.fit is not None
    assert found.allocation is not None
    assert found.allocation.tensor_parallel_size == 1
    assert "3 pipeline stages" in " ".join(found.fit.notes)
    # 80 layers over 3 stages: 27 at the most.
    assert found.fit.kv_bytes == 10 * GIB * 27 // 80


def test_data_parallel_engines_share_the_requests() -> None:
    found = fit(
        32_768, card(80), card(80), sequences=12, **{**VLLM, "serving": {**VLLM["serving"], "data_parallel": 2}}
    )  # type: ignore[dict-item]
    assert found.fits
    assert found.max_concurrency == 12  # 6 in each
    assert found.kv_bytes == 60 * GIB  # 6 × 10


def test_free_memory_below_the_share_refuses_the_start() -> None:
    # vllm#20305: 19.77 of 22.05 GiB free, and 0.9 × 22.05 = 19.84 wanted; 0.89 × 22.05 = 19.62 works.
    total = round(22.05 * GIB)
    device = Device("NVIDIA L4", total, cuda_total_bytes=total, free_bytes=round(19.77 * GIB), index=0)
    found = fit(1024, device, rules="vllm@0.19", overhead=GIB)
    assert not found.fits
    assert "19.77/22.05" in found.why
    assert "0.89" in found.why


def test_memory_of_others_is_a_part() -> None:
    found = fit(1024, card(80, free_bytes=76 * GIB, used_by_others=4 * GIB, index=0), **VLLM)
    assert ("in use", 4 * GIB) in [(part.name, part.bytes) for part in found.parts]


def test_a_budget_that_is_given_is_the_budget() -> None:
    found = fit(32_768, card(80), rules="vllm@0.32", serving={"kv_budget": 20 * GIB}, overhead=8 * GIB)
    assert found.kv_budget_bytes == 20 * GIB
    assert found.max_concurrency == 2
    assert found.headroom_bytes == 10 * GIB


def test_a_budget_beyond_the_device_does_not_fit() -> None:
    found = fit(32_768, card(80), rules="vllm@0.32", serving={"kv_budget": 79 * GIB}, overhead=8 * GIB)
    assert not found.fits
    assert "79 GiB" in found.why
    assert found.headroom_bytes == -7 * GIB
    assert found.max_concurrency == 7  # 79 GiB hold 16,179 blocks of a request's 2,048, whatever else there is


def test_a_told_budget_is_held_against_every_rank() -> None:
    """The device with least beside the budget decides, wherever it stands; the same holds for its slice of layers."""
    for cards in ((card(80), card(24)), (card(24), card(80))):
        small = cards.index(card(24))
        # 8 measured and 20 for the cache are 4 more than 24; the other has 80 − 28 = 52 to spare, and 20 − 2.5 of cache
        # for tokens: 16,384 × 327,680 ÷ 2 ranks
        found = fit(16_384, *cards, rules="vllm@0.32", serving={"kv_budget": 20 * GIB}, overhead=8 * GIB)
        assert not found.fits
        assert f"rank {small}" in found.why
        assert (found.bottleneck_rank, found.headroom_bytes) == (small, -4 * GIB)
        assert found.ranks[1 - small].headroom_bytes == int(17.5 * GIB)
        # Layers are halved: 2.5 GiB on each, and 24 − 8 − 2.5 are left.
        halves = fit(16_384, *cards, serving={"kv_budget": 20 * GIB}, overhead=8 * GIB)
        assert halves.fits
        assert (halves.bottleneck_rank, halves.ranks[small].headroom_bytes) == (small, int(13.5 * GIB))
        assert not fit(131_072, *cards, serving={"kv_budget": 20 * GIB}, overhead=8 * GIB).fits  # 20 + 8 on 24


def check_sums(found: Fit) -> None:
    """Parts add up to the device, none of them is less than nothing, and the deciding rank is one of the ranks."""
    for rank in found.ranks:
        parts = (rank.weights_bytes, rank.kv_bytes, rank.overhead_bytes)
        assert min(parts) >= 0
        assert sum(parts) + rank.headroom_bytes == rank.device_bytes
    rank = found.ranks[found.bottleneck_rank]
    assert (rank.overhead_bytes, rank.headroom_bytes) == (found.overhead_bytes, found.headroom_bytes)
    assert sum(part.bytes for part in found.parts) == found.overhead_bytes
    if not found.fits:
        assert found.headroom_bytes <= min(rank.headroom_bytes for rank in found.ranks)


@pytest.mark.parametrize("rules", ["ideal", "vllm", "sglang", "tensorrt-llm", "llama.cpp", "ollama", "transformers"])
@pytest.mark.parametrize("told", [{}, {"kv_budget": 10 * GIB}, {"kv_budget": 40 * GIB}])
@pytest.mark.parametrize("gpu", ["L4", "H100", "L4,T4", "2xRTX4090"])
def test_every_rank_adds_up(rules: str, told: dict[str, Any], gpu: str) -> None:
    model = build_spec(catalogue.find("Qwen3-32B"))
    plan = SizePlan(engine(rules), contexts=(8192,), hardware=Hardware(read_gpus(gpu)))
    found = size(model, 8192, plan.replace(serving=plan.serving.replace(**told))).fit
    assert found is not None
    check_sums(found)


def test_blocks_that_are_told_and_do_not_hold_the_workload_add_up(kvctl: Run) -> None:
    # 300 requests of 8,192 × 147,456 bytes are 337.5 GiB; 4,000 blocks of 16 tokens hold 8.8 of them.
    fit_ = kvctl("size", "Qwen3-8B", "--engine", "vllm", "--gpu", "L4", "--num-gpu-blocks-override", "4000", "--sequences",
                 "300", "--ctx", "8192", "--json").json["results"][0]["fit"]  # fmt: skip
    assert fit_["kv_bytes"] == 300 * 8192 * 147_456
    assert min(part["bytes"] for part in fit_["parts"]) >= 0
    parts = fit_["weights_bytes"] + fit_["kv_bytes"] + fit_["overhead_bytes"] + fit_["headroom_bytes"]
    assert parts == fit_["device_bytes"]


def test_the_device_bounds_a_budget_that_nothing_reserves(kvctl: Run) -> None:
    """llama.cpp takes what the context takes: a budget that is told is a limit, and the device is another."""
    options = ("size", "Qwen3-8B", "--engine", "llama.cpp", "--gpu", "2xL4", "--kv-budget", "40GiB")
    result = kvctl(*options, "--solve", "ctx", "--json").json["results"][0]
    assert result["fit"]["fits"]
    assert 64 * 1024 < result["context"] < 40 * GIB * 2 // 147_456
    assert kvctl(*options, "--ctx", str(result["context"] + 256), "--fail-unless-fits").code == 3


def test_advice_keeps_a_length_that_memory_would_change(kvctl: Run) -> None:
    """Ollama takes 4,096 tokens on 22 GiB and more on more."""
    options = ("size", "Llama-3.3-70B-Instruct", "--engine", "ollama")
    advice = kvctl(*options, "--gpu", "L4", "--json").json["results"][0]["fit"]["advice"]
    (gpus,) = [words.split() for words in advice if words.startswith("--gpu ")]
    assert gpus[2:] == ["--ctx", "4096"]
    assert kvctl(*options, *gpus, "--fail-unless-fits").code == 0


def test_of_unequal_gpus_the_largest_are_enough() -> None:
    # 65,536 tokens are 20 GiB: the 80 GiB alone hold them, whichever stands first.
    for cards in ((card(16), card(80)), (card(80), card(16))):
        plan = SizePlan(contexts=(65_536,), hardware=Hardware(cards, solve="gpus"))
        (result,) = answers_on(SHAPE, plan)
        assert result.fit is not None
        assert [rank.device_bytes for rank in result.fit.ranks] == [80 * GIB]


@pytest.mark.parametrize("rules", ["llama.cpp", "ollama"])
def test_llama_cpp_has_256_slots(kvctl: Run, rules: str) -> None:
    """LLAMA_MAX_SEQ in src/llama-cparams.h."""
    options = ("size", "Qwen3-0.6B", "--ctx", "1k", "--engine", rules, "--gpu", "H100")
    assert kvctl(*options, "--json").json["results"][0]["fit"]["max_concurrency"] == 256
    assert kvctl(*options, "--sequences", "256").code == 0
    over = kvctl(*options, "--sequences", "257")
    assert over.code == 2
    assert "256 slots" in over.err


def test_vllm_runs_no_more_requests_than_it_is_told(kvctl: Run) -> None:
    options = ("size", "Qwen3-0.6B", "--ctx", "512", "--engine", "vllm", "--gpu", "RTX4090", "--max-num-seqs", "16")
    assert kvctl(*options, "--json").json["results"][0]["fit"]["max_concurrency"] == 16


def test_a_budget_that_the_device_has_not_is_told_apart(kvctl: Run) -> None:
    """15.26 GiB of weights and 10 of cache on 22."""
    options = ("size", "Qwen3-8B", "--ctx", "8k", "--engine", "vllm", "--gpu", "L4", "--kv-budget", "10GiB")
    shown = kvctl(*options)
    assert "does not fit" in shown.out
    assert shown.out.count("which the device has not") == 2
    advice = kvctl(*options, "--json").json["results"][0]["fit"]["advice"]
    (less,) = [words.split()[1] for words in advice if words.startswith("--kv-budget ")]
    assert kvctl(*options[:-1], less, "--fail-unless-fits").code == 0
    more = f"{int(less.removesuffix('MiB')) + 1}MiB"  # what is told there is the most, to the MiB
    assert kvctl(*options[:-1], more, "--fail-unless-fits").code == 3
    replayed = kvctl(*options, "--workload", "chat", "--requests", "10")
    assert replayed.code == 3
    assert "no memory" in replayed.err


def test_requests_that_are_refused_are_a_no(kvctl: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 1_000_000, "output_length": 10, "hash_ids": list(range(1954))}
    trace.write_text(json.dumps(row) + "\n")
    options = ("size", "Qwen3-8B", "--ctx", "8k", "--engine", "vllm", "--gpu", "L4", "--trace", str(trace))
    assert kvctl(*options).code == 0
    assert kvctl(*options, "--fail-unless-fits").code == 3


def test_the_fewest_gpus() -> None:
    # 1 TiB of cache for 3,355,443 tokens: 13 × 80 GiB hold it, 12 do not.
    plan = SizePlan(contexts=(3_355_443,), hardware=Hardware((card(80),), "card", solve="gpus"))
    (result,) = answers_on(SHAPE, plan)
    assert result.fit is not None
    assert result.fit.fits
    assert len(result.fit.ranks) == 13


@pytest.mark.parametrize("answer", [0, 1, 2, 15, 16, 17, 1000, 1024])
@pytest.mark.parametrize("guess", [1, 16, 17, 500, 5000])
@pytest.mark.parametrize("block", [0, 1, 16])
def test_the_search_finds_the_last_that_holds(answer: int, guess: int, block: int) -> None:
    assert largest(lambda number: number <= answer, guess, 1024, block) == min(answer, 1024)


def test_a_chart_has_the_corner_where_it_ends_to_fit() -> None:
    # 80 GiB ÷ 327,680 = 262,144 tokens, and one more is one token too many.
    plan = SizePlan(contexts=(524_288,), hardware=Hardware((card(80),)))
    chart = chart_of([SHAPE], Plans((plan,)))
    (curve,) = chart.curves
    points = dict(curve.points)
    assert points[262_144] == 80 * GIB
    assert points[262_145] == 80 * GIB + TOKEN
    assert points[524_288] == 160 * GIB
    assert min(points) == 1024
    assert [(limit.name, limit.bytes) for limit in chart.limits] == [("a card", 80 * GIB)]


def test_a_chart_ends_where_the_engine_says_no() -> None:
    # vLLM sets one block aside: 13,106 of 13,107 blocks are a request's.
    plan = SizePlan(engine=engine("vllm@0.32"), contexts=(524_288,), hardware=Hardware((card(80),), overhead=8 * GIB))
    chart = chart_of([SHAPE], Plans((plan.replace(serving=plan.serving.replace(utilization=0.9)),)))
    (limit,) = chart.limits
    assert limit.bytes == 72 * GIB
    points = dict(chart.curves[0].points)
    assert points[13_106 * 16] <= limit.bytes < points[13_106 * 16 + 1]


# -- the command line ------------------------------------------------------------------------


def test_exit_status_says_no(kvctl: Run) -> None:
    no = kvctl("size", "Llama-3.1-70B", "--gpu", "H100", "--ctx", "8k", "--fail-unless-fits", "--json")
    assert no.code == 3
    assert no.json["results"][0]["fit"]["fits"] is False
    assert kvctl("size", "Llama-3.1-70B", "--gpu", "4xH100", "--ctx", "8k", "--fail-unless-fits").code == 0
    assert kvctl("size", "Llama-3.1-70B", "--gpu", "H100", "--ctx", "8k").code == 0


def test_solving_for_what_never_fits_is_a_no(kvctl: Run) -> None:
    outcome = kvctl("size", "Llama-3.1-70B", "--gpu", "T4", "--solve", "ctx")
    assert outcome.code == 3
    assert outcome.err.splitlines()[-2].startswith("kvctl: error: no context fits")
    assert outcome.out == ""


@pytest.mark.parametrize("option", [("--solve", "ctx"), ("--fail-unless-fits",), ("--measured-overhead", "1GiB")])
def test_questions_about_hardware_need_hardware(kvctl: Run, option: tuple[str, ...]) -> None:
    outcome = kvctl("size", "Qwen3-8B", *option)
    assert outcome.code == 2
    assert "needs hardware" in outcome.err


def test_table_and_json_agree(kvctl: Run) -> None:
    options = ("size", "Llama-3.1-70B", "--gpu", "4xH100", "--ctx", "32k", "--engine", "vllm", "--sequences", "4")
    fit_ = kvctl(*options, "--json").json["results"][0]["fit"]
    table = kvctl(*options).out
    assert re.search(r"^fits: about ([\d.]+) GiB", table, re.M)
    assert f"{fit_['max_context']:,} tokens in each of 4 requests" in table
    assert f"{fit_['max_concurrency']:,} of 32,768 tokens" in table
    headroom = re.search(r"headroom +([\d.]+) GiB", table)
    assert headroom
    assert float(headroom[1]) == round(fit_["headroom_bytes"] / GIB, 2)


def test_advice_is_true(kvctl: Run) -> None:
    options = ("size", "Llama-3.1-70B", "--ctx", "128k", "--engine", "vllm")
    fit_ = kvctl(*options, "--gpu", "2xH100", "--json").json["results"][0]["fit"]
    assert not fit_["fits"]
    assert fit_["advice"]
    for words in fit_["advice"]:
        change = words.split()
        gpu = () if "--gpu" in change else ("--gpu", "2xH100")
        again = kvctl(*options, *gpu, *change, "--fail-unless-fits", "--json")
        assert again.code == 0, words


def test_what_the_options_say_about_ranks_counts(kvctl: Run) -> None:
    one = kvctl("size", "Llama-3.1-70B", "--ctx", "8k", "--engine", "vllm", "-tp", "8", "--gpu", "H100", "--json")
    assert len(one.json["results"][0]["fit"]["ranks"]) == 8
    too_few = kvctl("size", "Llama-3.1-70B", "--ctx", "8k", "--engine", "vllm", "-tp", "8", "--gpu", "4xH100")
    assert too_few.code == 2
    assert "8 ranks on 4 GPUs" in too_few.err


def test_a_number_of_gpus_that_no_split_uses_is_named_as_such(kvctl: Run) -> None:
    # 41 is prime: 41 tensor ranks do not divide 32 heads, and 36 layers make no 41 stages
    outcome = kvctl("size", "Qwen3-8B", "--ctx", "8k", "--engine", "vllm", "--gpu", "41xH100")
    assert outcome.code == 2
    assert "all of 41 GPUs" in outcome.err
    assert "--tensor-parallel-size" not in outcome.err.splitlines()[0]


def test_a_pasted_command_line_has_only_the_ranks_it_names(kvctl: Run) -> None:
    pasted = kvctl(
        "size", "--engine-args", "vllm serve Qwen/Qwen3-8B --max-model-len 8192", "--gpu", "4xH100", "--json"
    )
    assert len(pasted.json["results"][0]["fit"]["ranks"]) == 1
    assert "3 GPUs of 4 stay idle" in pasted.err


def test_a_generic_name_says_which_card_it_took(kvctl: Run) -> None:
    for name in ("A100", "H100"):
        outcome = kvctl("size", "Qwen3-8B", "--gpu", name, "--ctx", "8k")
        assert f"{name}: took {name}" in outcome.err
        assert "other variants" in outcome.err


def test_gpus_are_listed(kvctl: Run) -> None:
    rows = kvctl("size", "--list-gpus", "--json").json["gpus"]
    assert len(rows) == 123
    assert [row["name"] for row in kvctl("size", "--list-gpus", "h100", "--json").json["gpus"]] == [
        "H100 PCIe", "H100 SXM", "H100 NVL"]  # fmt: skip
    assert kvctl("size", "--list-gpus", "nothing-like-it").code == 2


def test_formats_side_by_side(kvctl: Run) -> None:
    table = kvctl("size", "Qwen3-32B", "--ctx", "8k", "--gpu", "H100", "--engine", "vllm", "--kv-dtype", "auto,fp8").out
    assert re.search(r"Qwen3-32B bf16 .* yes .*\n.*Qwen3-32B fp8 .* yes ", table)


def test_ollama_takes_its_own_length_on_a_card(kvctl: Run) -> None:
    # Ollama's tiers: 262,144 tokens from 47 GiB on, 32,768 from 23 GiB, else 4,096; never more than the model's own.
    for card_, length in (("RTX4090", 32_768), ("T4", 4096), ("H100", 40_960)):
        outcome = kvctl("size", "Qwen3-8B", "--gpu", card_, "--engine", "ollama", "--json")
        assert [result["context"] for result in outcome.json["results"]] == [length], card_
    asked_ = kvctl("size", "Qwen3-8B", "--gpu", "T4", "--engine", "ollama", "--ctx", "8k", "--json")
    assert asked_.json["results"][0]["context"] == 8192


def test_sglang_is_told_which_way_to_turn_the_fraction(kvctl: Run) -> None:
    # sglang#322: one shortage asks for more, the other for less.
    start = kvctl("size", "Qwen3-8B", "--gpu", "L4", "--engine", "sglang", "--ctx", "8k")
    assert "raise --mem-fraction-static" in start.out
    run = kvctl("size", "Qwen3-8B", "--gpu", "L4", "--engine", "sglang", "--ctx", "8k", "--mem-fraction-static", "0.9")
    assert "fits" in run.out
    assert "lower it" in run.err


def test_sglang_takes_its_share_of_what_is_free() -> None:
    # 80 GiB without weights: with half of it free, half of what it would get otherwise, and the rest is in use.
    whole, half = (
        fit(1024, card(80, free_bytes=free * GIB, index=0), rules="sglang", serving={"utilization": 0.8})
        for free in (80, 40)
    )
    assert whole.fits
    assert half.fits
    runtime = sum(part.bytes for part in half.parts if part.name == "runtime")
    # (free − runtime) × 0.8
    assert whole.kv_budget_bytes == pytest.approx((80 * GIB - runtime) * 0.8, abs=2)
    assert half.kv_budget_bytes == pytest.approx((40 * GIB - runtime) * 0.8, abs=2)
    assert ("in use", 40 * GIB) in [(part.name, part.bytes) for part in half.parts]


def test_blocks_that_are_told_must_fit() -> None:
    # 100,000 blocks of 16 × 327,680 bytes are 488 GiB.
    found = fit(1024, card(80), rules="vllm@0.32", serving={"num_blocks": 100_000}, overhead=8 * GIB)
    assert not found.fits
    assert "100,000 blocks take 488.3 GiB" in found.why
