"""What fits, what it holds, and why the rest does not: against arithmetic by hand and kvctl size itself."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvctl import rank_weights
from kvctl.engines import Engine, engine
from kvctl.hardware import Device, read_gpus
from kvctl.hardware.table import find
from kvctl.model import build_spec
from kvctl.ranks import Hardware
from kvctl.recommend.candidate import Candidate, Found, Rejection
from kvctl.recommend.fits import Search, search
from kvctl.recommend.request import Ask, ask
from kvctl.size import SizePlan, prepare
from kvctl.sources import catalogue
from kvctl.spec import ModelSpec

GIB = 2**30
VLLM, SGLANG, TENSORRT, LLAMA = (engine(name) for name in ("vllm", "sglang", "tensorrt-llm", "llama.cpp"))


@cache
def model(name: str) -> ModelSpec:
    return build_spec(catalogue.find(name))


def asked(name: str, gpus: str, context: int, concurrency: int | None, *engines: Engine, **more: Any) -> Ask:
    return ask(model(name), read_gpus(gpus), context=context, concurrency=concurrency, engines=engines, **more)


def one(found: Found, weights: str, kv: str = "auto", **serving: Any) -> Candidate:
    """The candidate with these formats and settings."""
    (match,) = [
        each for each in found.candidates
        if (each.deployment.weights, each.deployment.kv_dtype) == (weights, kv)
        and all(getattr(each.deployment.serving, name) == value for name, value in serving.items())
    ]  # fmt: skip
    return match


# -- the articles' cases, by hand -----------------------------------------------------------


def test_72b_awq_on_one_a100_at_64_sequences_of_32k_waits_and_says_the_arithmetic() -> None:
    """80 layers × 8 KV heads × 128 × 2 × 2 bytes = 327,680 bytes a token: 10 GiB a request of 32,768, 640 GiB for 64.

    Weights: 72.7·10^9 parameters; embeddings and head (2 × 152,064 × 8,192 = 2.49·10^9) in 16 bits are 4.64 GiB, the other
    70.2·10^9 at 4 + (16 + 4)/128 bits are 33.97 GiB: 38.6 GiB. vLLM takes 0.92 × 79.25 = 72.9 GiB.
    """
    found = search(asked("Qwen/Qwen2.5-72B-Instruct", "A100-80GB", 32_768, 64, VLLM))
    assert found.candidates
    assert not found.holding
    best = one(found, "awq", max_batched=8192)
    assert best.stack.weights == pytest.approx(38.6 * GIB, rel=0.002)
    # 72.9 − 38.6 − activations and graphs of 1 to 3 GiB: three requests.
    assert (best.at_once, best.usual_at_once, best.asked, best.queues) == (3, 3, 64, True)
    assert best.stack.kv == 30 * GIB
    (note,) = best.notes
    assert "64 requests of 32,768 tokens take 640 GiB" in note
    assert "38.62 GiB of weights" in note
    assert "3 requests run at once, and 61 wait" in note
    # A cache in 8 bits holds twice, and no format of it holds 64: 640 / 4 = 160 GiB is the least.
    assert one(found, "awq", "fp8", max_batched=8192).at_once == 6
    # 70 GiB of 8-bit weights leave less than one request of 10 GiB.
    (short,) = [each for each in found.rejections if each.weights == "fp8"]
    assert short.kind == "cache"
    assert "one request of 32,768 tokens takes 10 GiB" in short.why
    (plain,) = [each for each in found.rejections if each.weights == "bf16"]
    assert plain.kind == "weights"
    assert "135.4 GiB" in plain.why  # 72,706,203,648 × 2 bytes = 135.4 GiB


def test_7b_on_one_a100() -> None:
    """32 layers × 32 KV heads × 128 × 2 × 2 = 524,288 bytes a token: 4 GiB a request of 8,192.

    14.4 GiB of weights in 72.9 GiB leave at most 58.5: 14 requests, and fewer than 15 × 4 = 60 GiB whatever else is taken.
    """
    found = search(asked("Qwen3-7B", "A100-80GB", 8192, 16, VLLM))
    plain = one(found, "bf16", max_batched=8192)
    assert plain.stack.weights == pytest.approx(14.4 * GIB, rel=0.01)
    assert plain.at_once == 14
    # The other two fit with half of the cache's bytes, or a quarter of the weights'.
    assert not one(found, "bf16", "fp8", max_batched=8192).queues
    assert not one(found, "awq", max_batched=8192).queues


def test_7b_on_one_and_two_rtx_4090() -> None:
    """0.92 × 23.52 = 21.6 GiB, less 14.4 of weights and about a GiB: one request of 4 GiB. Two GPUs hold one each, or
    together, with half of the weights on each: 21.6 − 7.2 − 2 = 12 GiB, for requests that take 2 GiB of each."""
    alone = search(asked("Qwen3-7B", "RTX4090", 8192, 2, VLLM))
    assert one(alone, "bf16", max_batched=8192).at_once == 1
    two = search(asked("Qwen3-7B", "2xRTX4090", 8192, 12, VLLM))
    apart = one(two, "bf16", tensor_parallel=1, pipeline_parallel=None, max_batched=2048)
    assert (apart.deployment.replicas, apart.at_once) == (2, 2)
    joined = one(two, "bf16", tensor_parallel=2, max_batched=2048)
    assert joined.at_once in (5, 6)
    assert joined.stack.kv == joined.at_once * 2 * GIB


def test_72b_on_rtx_4090() -> None:
    # 38.6 GiB of AWQ on 23.5 GiB: no. On two, 19.3 GiB each of 21.6, and two ranks that exchange take 2 GiB: 4,096 tokens of
    # 640 MiB on each do not fit in the rest. Two stages, which exchange less, leave a GiB more, for 640 MiB as well.
    assert not search(asked("Qwen/Qwen2.5-72B-Instruct", "RTX4090", 4096, 1)).candidates
    two = search(asked("Qwen/Qwen2.5-72B-Instruct", "2xRTX4090", 4096, 1, VLLM, LLAMA))
    kinds = {(each.deployment.engine.name, each.deployment.weights) for each in two.holding}
    assert ("vllm", "bf16") not in kinds
    assert ("llama.cpp", "q4_k_m") in kinds  # 40.7 GiB on 47 GiB
    assert ("llama.cpp", "q5_k_m") not in kinds  # 47.4 GiB
    plain = [each for each in two.holding if (each.deployment.weights, each.deployment.kv_dtype) == ("awq", "auto")]
    assert {each.split.pipeline for each in plain} == {2}
    assert {each.stack.kv for each in plain} == {640 * 2**20}


def test_deepseek_v3_starts_on_h200_and_not_on_h100() -> None:
    """671·10^9 parameters in 8 bits with their scales, embeddings in 16: 641 GiB with its drafting layer, a ninth of 61 less
    without. Of 8 GPUs each has 79.3 GiB, and an H100 shows 79.2. An H200 shows 139.8: 0.92 of it less weights and 3 to 4 GiB
    leave 45 GiB; a token takes 61 × 576 × 2 = 70,272 bytes on every GPU, whatever the split, and an eighth dealt out."""
    engines = (VLLM, SGLANG, TENSORRT)
    small = search(asked("DeepSeek-V3", "8xH100", 4096, 1, *engines))
    assert not small.candidates
    assert {each.kind for each in small.rejections} == {"weights"}
    assert {each.engine for each in small.rejections} == {"vllm", "sglang", "tensorrt-llm"}
    large = search(asked("DeepSeek-V3", "8xH200", 32_768, 16, *engines))
    every = one(large, "fp8-block", tensor_parallel=8, decode_context_parallel=None, attention_dp=False,
                max_batched=8192, utilization=0.92)  # fmt: skip
    assert every.stack.weights == pytest.approx(79.3 * GIB, rel=0.001)
    assert every.capacity is not None
    assert every.capacity == pytest.approx(every.stack.pool / 70_272, rel=1e-3)
    assert 44 * GIB < every.stack.pool < 47 * GIB
    dealt = one(large, "fp8-block", decode_context_parallel=8, max_batched=8192, utilization=0.92)
    assert dealt.capacity is not None
    assert dealt.capacity == pytest.approx(8 * every.capacity, rel=1e-3)
    # Attention on ranks of its own: each holds requests of its own, and all of the attention's weights.
    apart = one(large, "fp8-block", data_parallel=8, attention_dp=False, max_batched=8192)
    assert apart.deployment.serving.max_sequences == 2
    assert apart.stack.weights > every.stack.weights + 10 * GIB


# -- what is promised is what kvctl size says -----------------------------------------------

CASES = [
    ("Qwen/Qwen3-32B", "4xH100", 16_384, 24),
    ("DeepSeek-V3", "8xH200", 16_384, 24),
    ("gpt-oss-120b", "2xH100", 16_384, 16),
    ("google/gemma-3-27b-it", "2xA100-80GB", 16_384, 8),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", "4xH100", 16_384, 8),
    ("Qwen3-7B", "2xRTX4090", 8192, 4),
]


@pytest.mark.parametrize(("name", "gpus", "context", "concurrency"), CASES)
def test_every_candidate_holds_what_it_promises_and_not_more(
    name: str, gpus: str, context: int, concurrency: int
) -> None:
    found = search(asked(name, gpus, context, concurrency))
    assert found.candidates
    for each in found.candidates[::7]:
        room, total = sized(each)
        deployment = each.deployment
        held = -(-each.at_once // deployment.replicas)
        if deployment.engine.slots:
            assert room.load(total, 1).fits
            assert deployment.serving.slots == held
            continue
        workers = each.split.data
        load = room.load(context, 1)
        assert load.fits, load.why
        assert load.allocation is not None
        count = load.allocation.held if load.allocation.whole is None else load.allocation.whole
        assert count is not None
        assert count * workers >= held
        # As many as are let in never push each other out, and where some wait the next would not fit.
        limit = deployment.serving.max_sequences
        assert limit is not None
        if each.queues:
            assert count * workers <= held + workers


def sized(each: Candidate) -> tuple[Any, int]:
    """The memory of one of its servers, asked of kvctl size with what the deployment says and nothing else."""
    deployment, by = each.deployment, each.deployment.engine
    kind = None if deployment.kv_dtype == "auto" else by.kv_dtype(deployment.kv_dtype, "--kv-cache-dtype")
    slots = deployment.serving.slots or 1
    total = slots * -(-deployment.context // 256) * 256 if by.slots == "shared" else deployment.context
    plan = SizePlan(
        engine=by, contexts=(total,), serving=deployment.serving, weights_dtype=each.checkpoint.sized, key=kind,
        value=kind, hardware=Hardware((deployment.device,) * (deployment.gpus * deployment.nodes)),
    )  # fmt: skip
    room = prepare(model(deployment.base), plan).room
    assert room is not None
    return room, total


@pytest.mark.parametrize(("name", "gpus", "context", "concurrency"), CASES[:4])
def test_the_stack_adds_up_to_the_device(name: str, gpus: str, context: int, concurrency: int) -> None:
    for each in search(asked(name, gpus, context, concurrency)).candidates:
        stack = each.stack
        parts = sum(part.bytes for part in stack.parts)
        assert stack.headroom >= 0
        assert stack.weights + parts + stack.pool + stack.headroom == stack.device
        assert stack.kv <= stack.pool
        assert each.at_once <= each.usual_at_once <= concurrency


def test_the_bytes_of_the_cache_are_named_where_the_engine_takes_them() -> None:
    found = search(asked("Qwen/Qwen3-32B", "2xH100", 8192, 8, VLLM))
    each = one(found, "bf16", tensor_parallel=2, max_batched=8192)
    budget = each.deployment.serving.kv_budget
    # 64 layers × 4 heads a rank × 128 × 2 × 2 bytes × 16 tokens in a block.
    assert budget is not None
    assert budget % (64 * 4 * 128 * 2 * 2 * 16) == 0
    assert each.deployment.serving.utilization == 0.92
    assert each.deployment.serving.max_sequences == 8


def test_measured_memory_lowers_the_share() -> None:
    (device,) = read_gpus("H100")
    busy = device.replace(free_bytes=40 * GIB)
    request = ask(model("Qwen3-7B"), (busy,), context=8192, concurrency=1, engines=[VLLM])
    share = one(search(request), "bf16", max_batched=8192).deployment.serving.utilization
    # 40 of 79.19 GiB are 0.505.
    assert share == 0.5


def test_shorter_usual_requests_run_more_at_once() -> None:
    request = asked("Qwen/Qwen3-32B", "H100", 32_768, 32, VLLM, prompt=1000, answer=200)
    each = one(search(request), "fp8-block", max_batched=8192)
    # 262,144 bytes a token: 8 GiB a request of 32,768, and 0.3 GiB one of 1,200.
    assert each.at_once < 6
    assert each.usual_at_once == 32
    assert not each.queues
    assert "all as long as 32,768 tokens" in each.notes[0]


def test_a_rate_lets_in_what_the_cache_holds() -> None:
    request = asked("Qwen/Qwen3-32B", "4xL40S", 8192, None, VLLM, rate=2.0)
    for each in search(request).candidates:
        limit = each.deployment.serving.max_sequences
        assert limit is not None
        assert each.asked is None
        assert not each.queues
        assert each.usual_at_once == limit * each.deployment.replicas


def test_a_host_is_told_what_the_requests_need() -> None:
    """SmolLM2-135M: 30 layers × 3 KV heads × 64 × 2 × 2 bytes = 23,040 a token; blocks of 128 on a CPU. 2,048 tokens are 16
    blocks of 2,949,120 bytes; four requests and the block that is set aside are 65 of them."""
    found = search(asked("SmolLM2-135M-Instruct", "cpu:4GiB", 2048, 4))
    (each,) = [candidate for candidate in found.candidates if candidate.deployment.engine.name == "vllm"]
    assert each.deployment.serving.kv_budget == 65 * 2_949_120
    assert (each.at_once, each.deployment.serving.max_sequences) == (4, 4)
    assert {candidate.deployment.engine.name for candidate in found.candidates} == {"vllm", "llama.cpp"}
    # 0.25 GiB of weights and 1.85 of vLLM's processes leave room for 43 requests of 45 MiB in 4 GiB; 64 are too many.
    most = search(asked("SmolLM2-135M-Instruct", "cpu:4GiB", 2048, 64, VLLM))
    assert most.candidates[0].queues
    assert most.candidates[0].at_once == (
        4 * GIB - most.candidates[0].stack.weights - round(1.85 * GIB) - 2_949_120
    ) // (16 * 2_949_120)


def test_turing_is_told_float16() -> None:
    found = search(asked("Qwen/Qwen2.5-7B-Instruct", "2xT4", 4096, 1, VLLM))
    assert {each.deployment.dtype for each in found.candidates} == {"float16"}


def test_nothing_is_tried_where_an_engine_does_not_run() -> None:
    found = search(asked("Qwen3-7B", "M3 Max", 4096, 1))
    assert {each.deployment.engine.name for each in found.candidates} == {"llama.cpp"}
    assert [each.kind for each in found.rejections] == ["engine"] * 3


def test_stages_over_nodes_stand_beside_ranks_over_nodes() -> None:
    # 39.6 GiB of DeepSeek-V3 on each of 16 H100: as two stages of eight ranks, or with attention on 16 ranks of its own.
    found = search(asked("DeepSeek-V3", "8xH100", 8192, 8, VLLM, nodes=2))
    assert {(each.split.pipeline, each.split.data) for each in found.holding} == {(2, 1), (1, 16)}


def test_the_same_request_gives_the_same_answer() -> None:
    request = asked("google/gemma-3-27b-it", "2xH100", 8192, 8)
    assert search(request) == search(request)


def test_what_ways_have_in_common_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = import_module("kvctl.engines.vllm.plan")
    cuts: list[Any] = []
    laid: list[Any] = []
    per_rank, lay_out = rank_weights.per_rank, plan.lay_out
    monkeypatch.setattr(rank_weights, "per_rank", lambda *args: cuts.append(args) or per_rank(*args))
    monkeypatch.setattr(plan, "lay_out", lambda *args: laid.append(args) or lay_out(*args))
    request = ask(build_spec(catalogue.find("Qwen/Qwen3-32B")), read_gpus("8xH100"), context=8192, concurrency=16)
    found = search(request)
    # bf16, fp8 and awq over 1 to 8 tensor-parallel ranks (1, 2, 4, 8), for all engines.
    assert len(cuts) == 3 * 4
    # Those splits, three formats of the cache and two batches, whatever the weights and the replicas.
    assert len(laid) == 4 * 3 * 2
    assert found.tried > 10 * len(laid)


def test_counts_of_what_was_rejected_are_whole() -> None:
    found = search(asked("DeepSeek-V3", "8xH100", 32_768, 16, VLLM))
    (only,) = found.rejections
    # Two formats of the cache, with every number of replicas and batch where a plan was asked, without where it was not.
    assert only.count > 30
    assert only.gpus == 8


# -- weights in host memory ----------------------------------------------------------------


def test_weights_stay_in_host_memory_only_where_that_is_asked_for() -> None:
    """72B in Q4_K_M is 40.7 GiB for 80 layers and the head; an RTX 4090 shows 23.5 GiB, of which a context and a margin take 2."""
    plain = asked("Qwen/Qwen2.5-72B-Instruct", "RTX4090", 4096, 1, LLAMA)
    assert not search(plain).candidates
    found = search(plain.replace(host=64 * GIB))
    each = one(found, "q4_k_m", "f16")
    layers = each.deployment.serving.gpu_layers
    assert layers is not None
    # (40.72 − 1 of the head) / 80 = 0.5 GiB a layer, and 16 MiB of cache for 4,096 tokens: forty in 21 GiB.
    assert 36 <= layers <= 44
    assert each.offloaded == pytest.approx((40.72 - each.stack.weights / GIB) * GIB, rel=0.01)
    tried = Search(plain.replace(host=64 * GIB))
    assert isinstance(
        tried.fit(LLAMA, each.checkpoint, each.split, "f16", None, 1, {"gpu_layers": layers + 1}), Rejection
    )
    # 133 GiB of bf16 are more than the host has.
    assert not [other for other in found.candidates if other.deployment.weights == "bf16"]


def test_vllm_leaves_whole_gib_of_every_gpu_with_the_host() -> None:
    # 38.6 GiB of AWQ; 0.92 × 23.5 = 21.6 GiB hold 19 and a request of 1.25: 18 or more have to stay.
    request = asked("Qwen/Qwen2.5-72B-Instruct", "RTX4090", 4096, 1, VLLM, host=64 * GIB)
    each = one(search(request), "awq")
    amount = each.deployment.serving.cpu_offload
    assert amount is not None
    assert amount % GIB == 0
    assert 18 <= amount // GIB <= 21
    assert each.stack.weights == pytest.approx(38.62 * GIB - amount, rel=0.001)
    less = Search(request).fit(VLLM, each.checkpoint, each.split, "auto", 2048, 1, {"cpu_offload": amount - GIB})
    assert isinstance(less, Rejection)


# -- more of anything never holds less ------------------------------------------------------


def card(gib: float) -> Device:
    """An A100 with so much memory."""
    (facts,) = find("A100 80GB SXM")
    size = int(gib * GIB)
    return Device("NVIDIA A100-SXM4-80GB", size, cuda_total_bytes=size, facts=facts)


MODELS = st.sampled_from(["Qwen3-7B", "google/gemma-3-27b-it", "gpt-oss-20b", "Qwen/Qwen3-30B-A3B"])
ENGINES = st.sampled_from([VLLM, SGLANG, TENSORRT, LLAMA])


# Right above these sizes SGLang's own default would keep more back than right below.
@example("Qwen3-7B", SGLANG, 1, 59.99, 0.02, 8, 12)
@example("Qwen3-7B", SGLANG, 1, 34.99, 0.02, 8, 12)
@example("Qwen3-7B", SGLANG, 2, 159.99, 0.02, 24, 12)
@settings(max_examples=20, deadline=None)
@given(MODELS, ENGINES, st.integers(1, 2), st.floats(8, 180), st.floats(0, 40), st.integers(1, 24), st.integers(9, 15))
def test_more_memory_never_removes_a_plan(
    name: str, by: Engine, count: int, small: float, more: float, concurrency: int, power: int
) -> None:
    request = ask(model(name), (card(small),) * count, context=2**power, concurrency=concurrency, engines=[by])
    larger = Search(request.replace(device=card(small + more)))
    for each in search(request).candidates[::5]:
        again = larger.again(each)
        assert isinstance(again, Candidate)
        assert again.at_once >= each.at_once
        assert again.usual_at_once >= each.usual_at_once
    if search(request).holding:
        assert search(request.replace(device=card(small + more))).holding


@settings(max_examples=10, deadline=None)
@given(MODELS, ENGINES, st.integers(1, 5), st.integers(1, 3), st.integers(1, 64))
def test_more_gpus_never_hold_less(name: str, by: Engine, count: int, more: int, concurrency: int) -> None:
    devices = read_gpus("RTX4090")
    few = search(ask(model(name), devices * count, context=8192, concurrency=concurrency, engines=[by]))
    many = search(ask(model(name), devices * (count + more), context=8192, concurrency=concurrency, engines=[by]))
    if few.candidates:
        assert most(many) >= most(few)
    if few.holding:
        assert least(many) <= least(few)


def most(found: Found) -> int:
    return max(each.usual_at_once for each in found.candidates)


def least(found: Found) -> int:
    return min(each.deployment.all_gpus for each in found.holding)


@settings(max_examples=10, deadline=None)
@given(MODELS, ENGINES, st.integers(2, 32), st.integers(10, 14))
def test_asking_for_less_never_removes_a_plan(name: str, by: Engine, concurrency: int, power: int) -> None:
    request = ask(model(name), read_gpus("2xA100-80GB"), context=2**power, concurrency=concurrency, engines=[by])
    fewer = Search(request.replace(concurrency=concurrency // 2))
    shorter = Search(
        ask(model(name), read_gpus("2xA100-80GB"), context=2 ** (power - 1), concurrency=concurrency, engines=[by])
    )
    for each in search(request).candidates[::5]:
        assert not isinstance(fewer.again(each), Rejection)
        again = shorter.again(each)
        assert isinstance(again, Candidate)
        assert again.at_once >= each.at_once
    # Objectives are not the search's: what is looked for with them is the same.
    assert search(request.replace(ttft=1.0, tpot=0.01)) == search(request.replace(ttft=9.0, tpot=0.9))


def test_gpus_without_bfloat16_run_no_model_that_overflows_in_float16() -> None:
    # vLLM 0.32, config/model.py, _FLOAT16_NOT_SUPPORTED_MODELS: gemma2, gemma3, gemma3_text, glm4.
    for name, runs in (("gemma-3-12b-it", False), ("gemma-2-9b-it", False), ("Qwen3-8B", True)):
        found = search(ask(model(name), read_gpus("4xT4"), context=4096))
        assert any(one.deployment.engine.name == "vllm" for one in found.candidates) == runs, name


def test_sglang_keeps_blocks_of_experts_whole() -> None:
    # Experts of 1,536 on 8 ranks are 192 wide, no multiple of 128; on 4 they are 384, which is three of them.
    for ranks, fits in ((8, False), (4, True)):
        request = ask(model("MiniMax-M2"), read_gpus(f"{ranks}xH200"), context=4096, engines=(engine("sglang"),))
        plain = [
            one
            for one in search(request).candidates
            if one.split.tensor == ranks and one.checkpoint.weights == "fp8-block"
        ]
        assert bool(plain) == fits
