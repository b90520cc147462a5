"""Every technique's verdict follows from numbers: each rule at both sides of its threshold, with the arithmetic in comments."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from kvctl.allocation import Serving
from kvctl.engines import engine
from kvctl.hardware.naming import read_gpus
from kvctl.model import build_spec
from kvctl.recommend.advice import (
    TABLE,
    Advice,
    Case,
    KvChoice,
    Numbers,
    Sibling,
    WeightChoice,
    Work,
    advise,
    evictions,
    model,
    offload,
    serving,
    speculative,
)
from kvctl.recommend.advice import cache as cache_advice
from kvctl.recommend.advice import weights as weight_advice
from kvctl.recommend.deployment import Deployment
from kvctl.recommend.quality import Loss, Measured, Quality
from kvctl.sources import catalogue
from kvctl.spec import ModelSpec
from kvctl.speed import Range

GB = 10**9


@cache
def spec(name: str) -> ModelSpec:
    return build_spec(catalogue.find(name))


def exactly(value: float) -> Range:
    return Range(value, value, value)


def case(
    name: str = "Qwen3-32B", gpu: str = "H100", engine_name: str = "vllm", work: dict[str, Any] | None = None,
    numbers: dict[str, Any] | None = None, serve: dict[str, Any] | None = None, max_loss: float | None = None,
    measured: tuple[Measured, ...] = (), **deployment: Any,
) -> Case:  # fmt: skip
    """Qwen3-32B in bf16 on an H100 under vLLM: 1,000 + 200 tokens, ten requests, a pool that holds them."""
    found = spec(name)
    given: dict[str, Any] = {"context": 32_768, "weights": "bf16", "replicas": 1} | deployment
    return Case(
        Deployment(base=found.id, model=found.id, engine=engine(engine_name), serving=Serving(**(serve or {})),
                   device=read_gpus(gpu)[0], **given),
        found,
        Work(**({"prompt": 1000, "answer": 200, "concurrency": 10} | (work or {}))),
        Numbers(**({"token_bytes": 262_144, "capacity": 100_000, "rank_weights": 65 * GB} | (numbers or {}))),
        Quality(found.id, 32_800_000_000, "bf16", measured),
        max_loss,
    )  # fmt: skip


def only(advices: list[Advice]) -> Advice:
    assert len(advices) == 1
    return advices[0]


def named(advices: list[Advice] | tuple[Advice, ...], technique: str) -> Advice:
    (found,) = [advice for advice in advices if advice.technique == technique]
    return found


# -- all of them ----------------------------------------------------------------------------

FIELD = (
    "GQA", "MQA", "MLA", "paged attention", "block size", "prefix", "radix", "INT8 KV", "FP8 KV", "INT4 KV", "NVFP4 KV", "INT8 weights",
    "INT4 weights", "AWQ weights", "FP8 weights", "StreamingLLM", "H2O", "ScissorHands", "SnapKV", "PyramidKV", "CPU offload", "disk offload",
    "LMCache", "disaggregated prefill", "FlashAttention", "CUDA graphs", "continuous batching", "chunked prefill", "speculative decoding",
    "distilled", "sibling",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["Qwen3-32B", "DeepSeek-V3", "gpt-oss-120b", "gemma-3-27b-it", "mamba-130m-hf", "Qwen3-Next-80B-A3B-Instruct"],
)
@pytest.mark.parametrize("engine_name", ["vllm", "sglang", "llama.cpp", "tensorrt-llm", "transformers", "ollama"])
def test_every_technique_of_the_field_has_its_place(name: str, engine_name: str) -> None:
    found = advise(case(name, engine_name=engine_name))
    names = " | ".join(advice.technique for advice in found)
    assert not [word for word in FIELD if word not in names]
    assert len({advice.technique for advice in found}) == len(found)
    for advice in found:
        assert advice.verdict in ("yes", "no", "depends")
        assert advice.because
        assert "\n" not in advice.because
        assert advice.source
        assert advice.how is None or advice.how.strip()
        assert set(advice.to_dict()) == {"technique", "verdict", "because", "how", "source"}
    assert found == advise(case(name, engine_name=engine_name))


def test_every_rule_says_its_verdicts() -> None:
    for rule in TABLE:
        words = rule.__doc__ or ""
        said = [
            word
            for word in ("yes", "no", "depends", "verdict")
            if word in words.replace(":", " ").replace(",", " ").split()
        ]
        assert len(said) >= 2, rule


# -- the model ------------------------------------------------------------------------------


def test_shared_heads() -> None:
    # Qwen3-32B: 64 query heads, 8 KV heads of 128, 64 layers: 64 × 8 × 2 × 128 × 2 B = 262,144 B, an eighth of 2,097,152.
    found = only(model.structure(case()))
    assert found.verdict == "yes"
    assert "8 times smaller" in found.because
    assert "256 KiB a token" in found.because


def test_latents() -> None:
    # docs/techniques.md: 71.11 times against its own heads.
    found = only(model.structure(case("DeepSeek-V3")))
    assert found.verdict == "yes"
    assert "MLA makes it 71.1 times smaller" in found.because


def test_multi_head_attention_shares_nothing() -> None:
    found = only(model.structure(case("Llama-2-7b-hf")))
    assert found.verdict == "no"
    assert "(1 times)" in found.because


def test_a_sibling_is_asked_for_only_where_something_is_missed() -> None:
    smaller = (Sibling("Qwen/Qwen3-14B", 14_800_000_000, 163_840), Sibling("Qwen/Qwen3-8B", 8_200_000_000, 147_456))
    # Ten requests of 1,200 tokens hold 12,000.
    assert only(model.sibling(case(numbers={"siblings": smaller, "capacity": 12_000}))).verdict == "no"
    short = only(model.sibling(case(numbers={"siblings": smaller, "capacity": 11_999})))
    assert (short.verdict, short.how) == ("depends", "Qwen/Qwen3-14B")
    assert only(model.sibling(case(numbers={"capacity": 11_999}))).verdict == "no"
    slow = case(work={"tpot": 0.02}, numbers={"siblings": smaller, "tpot": exactly(0.021)})
    assert only(model.sibling(slow)).verdict == "depends"
    assert (
        only(model.sibling(case(work={"tpot": 0.021}, numbers={"siblings": smaller, "tpot": exactly(0.021)}))).verdict
        == "no"
    )


# -- the cache ------------------------------------------------------------------------------


def test_half_a_block_of_a_request() -> None:
    # Blocks of 16 leave 7.5 tokens empty on average: 4% of 187.5 tokens.
    assert only(cache_advice.paging(case(work={"prompt": 100, "answer": 88}))).verdict == "yes"
    found = only(cache_advice.paging(case(work={"prompt": 100, "answer": 87})))
    assert found.verdict == "depends"
    assert "--block-size" in (found.how or "")
    # 7.5 × 262,144 B × 10 requests = 18.75 MiB.
    assert "18.75 MiB" in only(cache_advice.paging(case())).because
    assert only(cache_advice.paging(case(serve={"block_size": 256}))).verdict == "depends"  # 127.5 of 1,200


def test_slots_are_reserved_whole() -> None:
    found = only(cache_advice.paging(case(engine_name="llama.cpp", context=12_000)))
    assert found.verdict == "no"
    assert "uses 10%" in found.because


def test_prefixes_that_a_trace_finds() -> None:
    assert only(cache_advice.prefix(case())).verdict == "depends"
    assert only(cache_advice.prefix(case(work={"hit_rate": 0.0099}))).verdict == "no"
    found = only(cache_advice.prefix(case(work={"hit_rate": 0.01})))
    assert (found.verdict, found.how) == ("yes", "--enable-prefix-caching")
    # Half of 1,000 tokens at 5,000 a second: 100 ms.
    rate = {"prefill_rate": exactly(5000.0)}
    assert "TTFT is 100 ms shorter" in only(cache_advice.prefix(case(work={"shared": 500}, numbers=rate))).because
    # The trace is believed before a stated beginning.
    assert only(cache_advice.prefix(case(work={"shared": 500, "hit_rate": 0.0}))).verdict == "no"


FP8 = (KvChoice("fp8", 200_000, "--kv-cache-dtype fp8"),)


def test_a_smaller_cache_only_where_it_binds() -> None:
    enough = named(cache_advice.formats(case(numbers={"kv_choices": FP8, "capacity": 12_000})), "FP8 KV cache")
    assert enough.verdict == "no"
    assert "does not bind" in enough.because
    short = named(cache_advice.formats(case(numbers={"kv_choices": FP8, "capacity": 11_999})), "FP8 KV cache")
    assert (short.verdict, short.how) == ("yes", "--kv-cache-dtype fp8")
    assert "16.7 times" in short.because  # 200,000 / 11,999
    reading = case(numbers={"kv_choices": FP8, "capacity": 12_000, "decode_bound": "cache"})
    assert named(cache_advice.formats(reading), "FP8 KV cache").verdict == "yes"
    # A tenth fewer bytes hold 1 / 0.9 times as many tokens: 11,110 × 1.1112 are 12,345, and 12,344 are less.
    for capacity, verdict in ((12_345, "yes"), (12_344, "no")):
        little = case(numbers={"kv_choices": (KvChoice("fp8", capacity, "x"),), "capacity": 11_110})
        assert named(cache_advice.formats(little), "FP8 KV cache").verdict == verdict
    # Slots have no pool to compare: bytes of a token tell. 262,144 of now over 262,144 of then is no gain.
    for token, verdict in ((139_264, "yes"), (262_144, "no"), (400_000, "no")):
        choices = (KvChoice("q8_0", None, "-ctk q8_0 -ctv q8_0", token),)
        slots = case(
            engine_name="llama.cpp", numbers={"kv_choices": choices, "capacity": None, "decode_bound": "cache"}
        )
        assert named(cache_advice.formats(slots), "INT8 KV cache").verdict == verdict
    none = named(cache_advice.formats(case(numbers={"capacity": 11_999})), "FP8 KV cache")
    assert none.verdict == "no"
    assert "has none of fp8" in none.because


def test_a_limit_on_what_is_lost() -> None:
    def loss(low: float, mid: float, high: float) -> tuple[Measured, ...]:
        lost = Loss(Range(low, mid, high), "perplexity", "measured: f", True, "high")
        return (
            Measured("Qwen/Qwen3-32B", None, {"awq": lost}, {"fp8": lost, "h2o:0.5": lost, "streaming-llm:0.5": lost}),
        )

    def verdict(measured: tuple[Measured, ...], limit: float | None) -> str:
        given = case(numbers={"kv_choices": FP8, "capacity": 100}, measured=measured, max_loss=limit)
        return named(cache_advice.formats(given), "FP8 KV cache").verdict

    assert verdict(loss(0.1, 0.5, 1.0), 1.0) == "yes"
    assert verdict(loss(0.1, 0.5, 1.01), 1.0) == "depends"
    assert verdict(loss(0.1, 1.01, 1.5), 1.0) == "no"
    assert verdict(loss(0.1, 50.0, 90.0), None) == "yes"  # nobody set a limit, and the words say it
    turbo = case(numbers={"kv_choices": (KvChoice("turboquant_4bit_nc", None, "x"),), "capacity": 100}, max_loss=0.5)
    assert named(cache_advice.formats(turbo), "INT4 KV cache").verdict == "no"  # 1 to 4 points, published


def test_what_is_in_use_is_said() -> None:
    found = named(cache_advice.formats(case(kv_dtype="fp8")), "FP8 KV cache")
    assert found.verdict == "yes"
    assert "fp8 is in use" in found.because


# -- the weights ----------------------------------------------------------------------------

AWQ = (WeightChoice("awq", 19 * GB, "Qwen/Qwen3-32B-AWQ"),)


def test_smaller_weights_only_where_they_bind() -> None:
    idle = named(weight_advice.weights(case(numbers={"weight_choices": AWQ, "decode_bound": "cache"})), "AWQ weights")
    assert idle.verdict == "no"
    bound = named(
        weight_advice.weights(case(numbers={"weight_choices": AWQ, "decode_bound": "weights"})), "AWQ weights"
    )
    assert (bound.verdict, bound.how) == ("yes", "Qwen/Qwen3-32B-AWQ")
    assert "3.42 times less" in bound.because  # 65 / 19
    # 46 × 10^9 B over 262,144 B a token: 175,476 tokens.
    short = named(weight_advice.weights(case(numbers={"weight_choices": AWQ, "capacity": 100})), "AWQ weights")
    assert short.verdict == "yes"
    assert "175,476 tokens of the cache" in short.because
    assert (
        named(
            weight_advice.weights(case(numbers={"weight_choices": AWQ, "capacity": 100}, max_loss=1.0)), "AWQ weights"
        ).verdict
        == "no"
    )
    # A tenth of 65 GB is 6.5 GB.
    for taken, verdict in ((58_500_000_000, "yes"), (58_500_000_001, "no"), (64_990_000_000, "no")):
        little = case(numbers={"weight_choices": (WeightChoice("awq", taken, "x"),), "decode_bound": "weights"})
        found = named(weight_advice.weights(little), "AWQ weights")
        assert found.verdict == verdict
        assert ("less than 10% smaller" in found.because) is (verdict == "no")
    larger = (WeightChoice("awq", 65 * GB, "x"),)
    assert (
        named(weight_advice.weights(case(numbers={"weight_choices": larger, "capacity": 100})), "AWQ weights").verdict
        == "no"
    )
    unknown = (WeightChoice("nf4", 19 * GB, "x"),)
    assert (
        named(weight_advice.weights(case(numbers={"weight_choices": unknown, "capacity": 100})), "INT4 weights").verdict
        == "depends"
    )
    assert named(weight_advice.weights(case(weights="awq")), "AWQ weights").verdict == "yes"


# -- caches that let tokens go --------------------------------------------------------------


def test_engines_that_have_no_eviction() -> None:
    for name in ("vllm", "sglang"):
        assert {
            advice.verdict for advice in evictions.evictions(case(engine_name=name, numbers={"capacity": 100}))
        } == {"no"}


def test_context_shift_is_like_streaming_llm() -> None:
    enough = named(evictions.evictions(case(engine_name="llama.cpp", numbers={"capacity": 12_000})), "StreamingLLM")
    assert enough.verdict == "no"
    short = case(engine_name="llama.cpp", numbers={"capacity": 11_999})
    found = named(evictions.evictions(short), "StreamingLLM")
    assert found.verdict == "depends"
    assert "--context-shift --keep 4" in (found.how or "")
    # docs/techniques.md: 7.7% of perplexity, 4 of 10 keys left.
    assert "7.7% of perplexity and 6 of 10 keys" in found.because
    assert named(evictions.evictions(short), "H2O").verdict == "no"


def test_an_eviction_that_was_measured_on_this_model() -> None:
    lost = Loss(Range(0.1, 0.5, 0.9), "perplexity", "measured: f", True, "high")
    measured = (Measured("Qwen3-32B", None, {}, {"h2o:0.5": lost}),)
    given = case(engine_name="transformers", numbers={"capacity": 100}, measured=measured, max_loss=1.0)
    assert named(evictions.evictions(given), "H2O").verdict == "yes"
    assert (
        named(
            evictions.evictions(Case(**{n: getattr(given, n) for n in given._fields} | {"max_loss": 0.4})), "H2O"
        ).verdict
        == "no"
    )


# -- memory beside the GPU ------------------------------------------------------------------


def offloaded(work: dict[str, Any] | None = None, **numbers: Any) -> list[Advice]:
    # A token of 262,144 B over 52.4288 GB/s: 5 µs. At 100,000 prompt tokens a second it is computed in 10 µs.
    # New tokens a second: 2 × (1,000 × 0.5 + 200) = 1,400; a pool of 14,000 turns over in 10 s.
    given = {
        "pcie_gbs": 52.4288,
        "prefill_rate": exactly(100_000.0),
        "capacity": 14_000,
        "host_bytes": 262_144 * 140_000,
    } | numbers
    return offload.offload(
        case(work={"rate": 2.0, "hit_rate": 0.5, "reuse_seconds": 60.0} | (work or {}), numbers=given)
    )


def test_fetching_against_computing() -> None:
    found = named(offloaded(), "CPU offload of the cache")
    assert found.verdict == "yes"
    assert (
        "fetching a prompt of 1,000 tokens takes 5.00 ms (52.4 GB/s), computing it 10.0 ms (2 times as long)"
        in found.because
    )
    assert named(offloaded(prefill_rate=exactly(200_000.0)), "CPU offload of the cache").verdict == "no"  # as fast
    assert named(offloaded(prefill_rate=exactly(199_000.0)), "CPU offload of the cache").verdict == "yes"
    assert named(offloaded(prefill_rate=None), "CPU offload of the cache").verdict == "depends"


def test_when_prefixes_come_again() -> None:
    def verdict(**work: Any) -> str:
        return named(offloaded(work), "CPU offload of the cache").verdict

    assert verdict(reuse_seconds=10.0) == "no"  # still on the GPU
    assert verdict(reuse_seconds=10.1) == "yes"
    assert verdict(reuse_seconds=100.0) == "yes"  # the host keeps 140,000 tokens: 100 s
    assert verdict(reuse_seconds=100.1) == "no"
    assert verdict(reuse_seconds=None) == "depends"
    assert verdict(rate=None) == "depends"
    assert verdict(hit_rate=0.009) == "no"


def test_a_disk_where_the_host_forgets() -> None:
    def verdict(again: float, gbs: float | None) -> str:
        return named(offloaded({"reuse_seconds": again}, disk_gbs=gbs), "disk offload of the cache").verdict

    # 262,144 B × 100,000 a second: 26.2 GB/s is what computing amounts to.
    assert verdict(200.0, 27.0) == "yes"
    assert verdict(200.0, 26.0) == "no"
    assert verdict(60.0, 27.0) == "no"  # the host keeps it
    assert verdict(200.0, None) == "depends"


def test_lmcache_is_for_several_servers() -> None:
    assert named(offloaded(), "LMCache").verdict == "no"
    given = {"pcie_gbs": 52.4288, "prefill_rate": exactly(100_000.0), "capacity": 14_000}
    several = case(work={"rate": 2.0, "hit_rate": 0.5, "reuse_seconds": 60.0}, numbers=given, replicas=2)
    assert named(offload.offload(several), "LMCache").verdict == "yes"
    assert named(offload.offload(case(engine_name="llama.cpp", replicas=2)), "LMCache").verdict == "no"


def test_links_by_generation() -> None:
    # Gen 5 × 16: 63.0 GB/s, of which 0.8; gen 4: 31.5.
    assert offload.link_gbs(case(gpu="H100")) == (pytest.approx(50.4, abs=0.1), True)
    assert offload.link_gbs(case(gpu="L40S")) == (pytest.approx(25.2, abs=0.1), True)
    assert offload.link_gbs(case(numbers={"pcie_gbs": 40.0})) == (40.0, False)
    assert offload.link_gbs(case(gpu="m2ultra192gb", engine_name="llama.cpp")) is None


def test_weights_that_every_step_waits_for() -> None:
    def verdict(tpot: float | None) -> str:
        # 10 × 10^9 B over 50 GB/s: 200 ms.
        return only(
            offload.weights(case(work={"tpot": tpot}, numbers={"pcie_gbs": 50.0}, serve={"cpu_offload": 10 * GB}))
        ).verdict

    assert verdict(0.2) == "yes"
    assert verdict(0.199) == "no"
    assert verdict(None) == "depends"
    assert only(offload.weights(case())).verdict == "no"


def test_layers_that_the_host_computes() -> None:
    # 18 of 36 layers of 1 GB each are on the host. gpt-oss-120b: 128 experts of 3 × 2,880 × 2,880 + 3 × 2,880 parameters in a
    # layer, 3.186 × 10^9; attention has 2,880 × (4,096 + 2 × 512) + 4,096 × 2,880 and little more, 0.027 × 10^9: 99%.
    # Their part of 18 GB and of the cache that comes back is 18 / 0.99 = 18.2 layers and more: 19.
    given: dict[str, Any] = {"gpus": 1, "context": 8192}
    found = only(offload.weights(
        case("gpt-oss-120b", engine_name="llama.cpp", serve={"gpu_layers": 18}, numbers={"host_weights": 18 * GB, "token_bytes": 20}, **given)
    ))  # fmt: skip
    assert found.verdict == "depends"
    assert "18 of 36 layers" in found.because
    assert "99% of a layer's parameters" in found.because
    assert "4 of 128" in found.because
    assert found.how is not None
    assert found.how.startswith("--n-cpu-moe 19 ")
    all_away = case("gpt-oss-120b", engine_name="llama.cpp", serve={"gpu_layers": 1}, numbers={"host_weights": 35 * GB, "token_bytes": 20}, **given)  # fmt: skip
    assert "--cpu-moe" in (only(offload.weights(all_away)).how or "")  # 35 / 0.99 is 35.3 layers: all 36
    dense = case(engine_name="llama.cpp", serve={"gpu_layers": 32}, numbers={"host_weights": 30 * GB}, gpus=1)
    assert only(offload.weights(dense)).how == "--verify measures it"


def test_weights_of_a_host_are_in_its_memory() -> None:
    assert "already" in only(offload.weights(case(gpu="cpu:64GiB", engine_name="llama.cpp", gpus=0))).because


# -- steps ----------------------------------------------------------------------------------


def test_prompts_that_break_the_time_between_tokens() -> None:
    def found(limit: float | None, replicas: int = 2, tpot: float = 0.02, rate: float | None = 5.0) -> Advice:
        # 5 × 1,000 tokens a second of 10,000: half of the time; 20 ms become 40.
        numbers = {"prefill_rate": exactly(10_000.0), "tpot": exactly(tpot)}
        return only(serving.disaggregated(case(work={"rate": rate, "tpot": limit}, numbers=numbers, replicas=replicas)))

    assert found(0.04).verdict == "no"
    assert found(0.0399).verdict == "yes"
    assert found(0.0399, replicas=1).verdict == "depends"
    assert found(0.0199).verdict == "no"  # missed without prompts too
    assert found(None).verdict == "no"
    assert found(0.03, rate=None).verdict == "depends"
    assert "without bound" in found(0.03, rate=10.0).because
    assert found(0.03, rate=10.0).verdict == "yes"


def test_flash_attention_by_capability() -> None:
    assert only(serving.flash(case(gpu="A100"))).verdict == "yes"
    assert only(serving.flash(case(gpu="cpu:64GiB"))).verdict == "depends"
    assert only(serving.flash(case(gpu="cpu:64GiB", engine_name="llama.cpp"))).verdict == "yes"
    old = only(serving.flash(case(gpu="T4")))
    assert old.verdict == "depends"
    # 64 heads × 1,000² × 2 B = 128 × 10^6 B.
    assert "122.1 MiB in each layer" in old.because


def test_graphs_against_the_cache() -> None:
    def verdict(capacity: int, graphs: int | None = 262_144 * 1000) -> str:
        return only(serving.graphs(case(numbers={"capacity": capacity, "graph_bytes": graphs}))).verdict

    assert verdict(12_000) == "yes"
    assert verdict(11_000) == "no"  # 1,000 tokens short, and they are 1,000 tokens
    assert verdict(10_999) == "yes"  # they would not make it long enough
    assert verdict(12_000, None) == "depends"
    assert only(serving.graphs(case(engine_name="llama.cpp"))).verdict == "yes"
    assert only(serving.graphs(case(gpu="cpu:64GiB"))).verdict == "no"
    saved = case(
        numbers={"graph_bytes": 2**30, "tpot": exactly(0.01), "eager_tpot": exactly(0.015)},
        serve={"enforce_eager": True},
    )
    assert "save 5.00 ms of a step of 15.0 ms" in only(serving.graphs(saved)).because
    assert only(serving.graphs(saved)).how == "leave --enforce-eager out"


def test_batches_take_two() -> None:
    assert only(serving.batching(case(work={"concurrency": 1}))).verdict == "no"
    found = only(serving.batching(case(work={"concurrency": 2}, numbers={"tpot": Range(0.01, 0.02, 0.04)})))
    assert found.verdict == "yes"
    assert "100 tokens a second where one request alone has at most 100" in found.because


def test_chunks_by_what_others_wait() -> None:
    def found(**work: Any) -> Advice:
        return only(
            serving.chunked(case(work=work, numbers={"prefill_rate": exactly(10_000.0)}, serve={"max_batched": 2048}))
        )

    assert found(concurrency=1).verdict == "no"
    # 1,000 tokens take 100 ms.
    assert found(tpot=0.1).verdict == "depends"
    shorter = found(tpot=0.05)
    assert shorter.verdict == "yes"
    assert "near 500" in (shorter.how or "")
    assert found(prompt=2048).verdict == "depends"
    assert found(prompt=2049).verdict == "yes"
    assert only(serving.chunked(case())).verdict == "depends"


# -- speculation ----------------------------------------------------------------------------


def test_what_a_step_yields() -> None:
    assert speculative.yields(0.0, 3) == 1.0
    assert speculative.yields(0.5, 3) == pytest.approx(1.875)  # 1 + 1/2 + 1/4 + 1/8
    assert speculative.yields(1.0, 3) == 4.0
    # The card's 2.77 and 3.62 tokens a step of 7 drafted ones.
    assert speculative.yields(0.65, 7) == pytest.approx(2.77, abs=0.01)
    assert speculative.yields(0.75, 7) == pytest.approx(3.60, abs=0.02)


def test_tokens_that_come_at_no_cost() -> None:
    # H100 SXM: 989 × 10^12 × 2 / (2 × 3,350 × 10^9) = 295.
    at = speculative.ridge(case())
    assert at is not None
    assert at == pytest.approx(295, abs=1)
    step = speculative.Step(at)
    assert speculative.speed_up(0.5, 3, 0.0, 10, step) == pytest.approx(1.875)  # 40 tokens are few
    assert speculative.speed_up(1.0, 3, 0.0, 1000, step) == pytest.approx(1.0)  # computing takes all of it
    assert speculative.speed_up(0.5, 3, 0.1, 10, step) == pytest.approx(1.875 / 1.3)
    needed = speculative.break_even(3, 0.1, 10, step)
    assert needed is not None
    assert speculative.speed_up(needed, 3, 0.1, 10, step) == pytest.approx(1.1, abs=1e-6)
    assert speculative.break_even(3, 0.1, 1000, step) is None


def test_more_tokens_read_more_experts() -> None:
    # One token through 1 of 2 experts reads half, two read 3/4: 2 tokens a step, drafted for nothing, gain 2 × 0.5 / 0.75.
    step = speculative.Step(1e9, (1, 2))
    assert speculative.speed_up(1.0, 1, 0.0, 1, step) == pytest.approx(4 / 3)
    assert speculative.speed_up(1.0, 1, 0.0, 1, step.replace(whole=True)) == pytest.approx(2.0)
    assert speculative._experts(case("DeepSeek-V3")) == (8, 256)
    assert speculative._experts(case()) is None


def test_the_papers_throughput_lies_in_the_range() -> None:
    # EAGLE-3, arXiv 2503.01840: 1.38 times the throughput of SGLang at a batch of 64, Llama 3.1 8B on an H100.
    given = case("Llama-3.1-8B-Instruct", engine_name="sglang", work={"concurrency": 64})
    found = named(speculative.speculative(given), "speculative decoding: EAGLE-3")
    least, most = (float(word) for word in found.because.split(" it is ")[1].split(" times")[0].split(" to "))
    assert least < 1.38 < most


def test_a_layer_that_drafts_takes_memory() -> None:
    def eagle(**numbers: Any) -> Advice:
        return named(
            speculative.speculative(case(work={"concurrency": 1}, numbers=numbers)), "speculative decoding: EAGLE-3"
        )

    # 65 × 10^9 bytes in 64 layers: 1,015,625,000 each, 968.6 MiB; one layer more is 1.6% of 64.
    assert (
        "its layer takes about 968.6 MiB a GPU (as one of 64 does) and 1.6% of the cache" in eagle(free=2 * GB).because
    )
    assert eagle(free=1_015_625_000).verdict == "yes"
    short = eagle(free=1_015_624_999)
    assert short.verdict == "depends"
    assert short.because.endswith("and 968.6 MiB are free: the cache has to be smaller by it")


def test_speculation_by_acceptance_and_batch() -> None:
    def verdict(name: str, batch: int, **acceptance: float) -> str:
        given = case(work={"concurrency": batch}, numbers={"acceptance": acceptance})
        return named(speculative.speculative(given), f"speculative decoding: {name}").verdict

    assert verdict("EAGLE-3", 1) == "yes"
    assert verdict("EAGLE-3", 1000) == "no"
    # 1 + a over 1 + 3 × (1/64 + head): with a = 0.15, 1.176 / 1.12 < 1.1; with 0.3, 1.417 / 1.12 > 1.1.
    assert verdict("EAGLE-3", 1, eagle3=0.15) == "no"
    assert verdict("EAGLE-3", 1, eagle3=0.3) == "yes"
    assert verdict("n-gram lookup", 1) == "depends"
    assert verdict("n-gram lookup", 1000) == "no"
    assert verdict("n-gram lookup", 1, ngram=0.5) == "yes"
    assert verdict("multi-token prediction", 1) == "no"  # Qwen3 has no layers for it
    # 256 requests go through nearly all of 256 experts already, and two tokens for each compute less than they read.
    deepseek = case("DeepSeek-V3", work={"concurrency": 256})
    assert named(speculative.speculative(deepseek), "speculative decoding: multi-token prediction").verdict == "yes"
    # One request reads 8 of 256, and 1.9 times as much for two tokens: then it hangs on how much is no expert.
    alone = case("DeepSeek-V3", work={"concurrency": 1})
    assert named(speculative.speculative(alone), "speculative decoding: multi-token prediction").verdict == "depends"
