"""Where nothing fits: the nearest that does, in every direction, and nothing nearer."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.engines import engine
from kvctl.hardware import read_gpus, table
from kvctl.model import build_spec
from kvctl.recommend import nearest
from kvctl.recommend.answers import Known, judge_of, recommend
from kvctl.recommend.candidate import Candidate
from kvctl.recommend.fits import search
from kvctl.recommend.nearest import holding, siblings
from kvctl.recommend.request import Ask, ask
from kvctl.sources import catalogue

VLLM, LLAMA = engine("vllm"), engine("llama.cpp")


def asked(name: str, gpus: str, context: int, concurrency: int | None, *engines: Any, **more: Any) -> Ask:
    spec = build_spec(catalogue.find(catalogue.full_name(name)))
    return ask(spec, read_gpus(gpus), context=context, concurrency=concurrency, engines=engines, **more)


# 72B in AWQ on one A100: 31.8 GiB are left for 64 requests.
TIGHT = asked("Qwen2.5-72B-Instruct", "A100-80GB", 32_768, 64, VLLM)


def test_nothing_fits_to_begin_with() -> None:
    assert holding(TIGHT) is None
    assert not search(TIGHT).holding


def test_the_longest_request_of_which_as_many_fit() -> None:
    """4 bits with two scales of 4 bytes for every head and token: 80 × 8 × (128 + 8) = 87,040 bytes a token; 64 requests of n
    tokens in 31.8 GiB are 6,120 tokens: 5,888 or 6,144 in steps of 256, for the batch of 2,048 leaves a little more."""
    near = nearest.shorter(TIGHT)
    assert near is not None
    assert near.ask.context in (5888, 6144)
    assert near.words == f"--ctx {near.ask.context}"
    assert near.candidate.at_once == 64
    assert near.ask.prompt + near.ask.answer <= near.ask.context
    assert holding(near.ask) is not None
    longer = near.ask.replace(context=near.ask.context + 256, prompt=near.ask.prompt + 256)
    assert holding(longer) is None


def test_the_most_requests_that_fit() -> None:
    near = nearest.fewer(TIGHT)
    assert near is not None
    # 32,768 × 87,040 bytes = 2.66 GiB each: eleven or twelve in 31.8 GiB.
    assert near.ask.concurrency in (11, 12)
    assert near.candidate.at_once == near.ask.concurrency
    assert holding(TIGHT.replace(concurrency=near.ask.concurrency)) is not None
    assert holding(TIGHT.replace(concurrency=near.ask.concurrency + 1)) is None


def test_the_fewest_gpus_of_the_kind() -> None:
    near = nearest.more_gpus(TIGHT)
    assert near is not None
    # 64 × 2.66 = 170 GiB beside 38.6 of weights: 209 GiB of 72.9 each.
    assert near.ask.gpus == 3
    assert holding(TIGHT.replace(gpus=2)) is None
    assert near.candidate.deployment.gpus * near.candidate.deployment.replicas <= 3


def test_more_nodes_where_one_has_no_more_room() -> None:
    near = nearest.more_gpus(asked("DeepSeek-V3", "8xH100", 4096, 1, VLLM))
    assert near is not None
    assert (near.ask.gpus, near.ask.nodes) == (8, 2)
    assert near.candidate.deployment.nodes == 2
    assert "2 nodes" in near.words


@pytest.mark.parametrize(
    ("request_", "memory"),
    [
        # Short of memory: 0.92 of a card is more than the 79.3 GiB of weights on each.
        (asked("DeepSeek-V3", "8xH100", 4096, 1, VLLM), 79.3 / 0.92),
        (asked("gpt-oss-120b", "RTX4090", 4096, 8, VLLM), 57),
        # Too slow, and cards of the same memory or less are faster: 8 GB of weights take 27 ms of an L4 in every step.
        (asked("Llama-3.1-8B-Instruct", "L4", 8192, 20, VLLM, ttft=2.0, tpot=0.06), 8),
        (asked("Qwen3-8B", "L40S", 40_672, None, VLLM, rate=2.0, prompt=8150, answer=178), 8),
        (asked("Qwen3-32B", "A100-80GB", 8192, 8, VLLM, tpot=0.02), 16),
    ],
)
def test_the_nearest_gpu(request_: Ask, memory: float) -> None:
    """It meets the request when it is asked about, and no card of its maker does that has less memory, or as much and less bandwidth."""
    found = recommend(request_, advise=False)
    assert not found.met
    (near,) = (near for near in found.nearest if near.direction == "gpu")
    name = near.ask.device.name
    assert name in near.words
    named = near.ask.device.facts
    assert named is not None
    assert recommend(request_.replace(device=near.ask.device), advise=False).met
    assert near.ask.device.cuda_bytes > memory * 2**30
    smaller = [
        card
        for card in table.cards()
        if card.vendor == "NVIDIA" and card.dies == 1 and not card.unified and (card.cuda_capability or 0) >= 8
        and card.name not in ("A800 80GB SXM", "H800", "H20")
        and (card.nominal_gb, card.bandwidth_gbs or 0) < (named.nominal_gb, named.bandwidth_gbs or 0)
    ]  # fmt: skip
    assert smaller
    for card in smaller:
        changed = request_.replace(device=read_gpus(card.name)[0])
        assert holding(changed, lambda ask, one: judge_of(ask, Known()).meets(one)) is None, card.name


def test_another_maker_where_none_of_the_same_does() -> None:
    """135 GiB of weights: AMD has 192 GB."""
    same = nearest.larger_gpu(asked("Qwen2.5-72B-Instruct", "MI210", 4096, 1, VLLM), bf16)
    assert same is not None
    assert same.ask.device.facts is not None
    assert (same.ask.device.facts.vendor, same.ask.device.facts.name) == ("AMD", "Instinct MI300X")
    # Intel's have 128 GB at most, and vLLM is not known there: NVIDIA's H200 has 139.8 GiB, and 0.92 of it is less.
    other = nearest.larger_gpu(asked("Qwen2.5-72B-Instruct", "Arc B580", 4096, 1, VLLM), bf16)
    assert other is not None
    assert other.ask.device.facts is not None
    assert other.ask.device.facts.name == "B200"
    assert nearest.larger_gpu(asked("Qwen2.5-72B-Instruct", "M1", 4096, 1, LLAMA)) is None


def test_as_many_as_a_machine_has() -> None:
    """Two GH200s to a machine at most (NVL2), four GB200s to a tray: eight of either are no machine, and are not named."""
    one, eight = read_gpus("H100")[0], {device.name for device in nearest.others(read_gpus("H100")[0], 8, slow=False)}
    assert {"NVIDIA GH200 480GB", "NVIDIA GB200"} <= {device.name for device in nearest.others(one, 1, slow=False)}
    assert not any("GH200" in name or "GB200" in name or "GB300" in name for name in eight)
    assert {"NVIDIA H200", "NVIDIA B200"} <= eight
    # More of the same: a second in the machine, then machines of two.
    request = asked("Qwen2.5-72B-Instruct", "GH200 96GB", 32_768, 64, VLLM)
    assert [(ask.gpus, ask.nodes) for ask in nearest._larger(request)][:2] == [(2, 1), (2, 2)]


def bf16(_: Ask, each: Candidate) -> bool:
    return each.deployment.weights == "bf16"


def test_another_engine() -> None:
    near = nearest.engines(asked("Qwen3-7B", "M3 Max", 4096, 1, VLLM))
    assert near is not None
    assert near.words == "--engine llama.cpp"


def test_a_smaller_model_of_the_family() -> None:
    request = asked("Qwen2.5-72B-Instruct", "RTX4090", 8192, 1, LLAMA)
    near = nearest.smaller_model(request)
    assert near is not None
    assert near.words.startswith("Qwen/Qwen2.5-")
    assert near.words.endswith("B-Instruct")
    assert near.candidate.deployment.base == near.words
    names = [spec.id for spec in siblings(request.spec)]
    for larger in names[: names.index(near.words)]:
        assert holding(asked(larger, "RTX4090", 8192, 1, LLAMA)) is None


def test_siblings_differ_in_the_size_alone() -> None:
    found = [spec.id for spec in siblings(build_spec(catalogue.find("Qwen/Qwen2.5-72B-Instruct")))]
    assert found
    assert all(name.startswith("Qwen/Qwen2.5-") and name.endswith("B-Instruct") for name in found)
    sizes = [float(name.removeprefix("Qwen/Qwen2.5-").removesuffix("B-Instruct")) for name in found]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) < 72
    assert [spec.id for spec in siblings(build_spec(catalogue.find("openai/gpt-oss-120b")))] == ["openai/gpt-oss-20b"]
    assert not list(siblings(build_spec(catalogue.find("deepseek-ai/DeepSeek-V3"))))


def test_other_formats_where_quality_rules_them_out() -> None:
    def plain(_: Ask, each: Candidate) -> bool:
        return each.deployment.weights == "bf16" and each.deployment.kv_dtype == "auto"

    request = asked("Qwen2.5-72B-Instruct", "A100-80GB", 4096, 1, VLLM)
    assert holding(request, plain) is None
    assert nearest.formats(request, None) is None
    near = nearest.formats(request, nearest.anything)
    assert near is not None
    assert not plain(request, near.candidate)
    assert near.candidate.deployment.weights in near.words
    # Other directions keep to what is allowed: 135 GiB of weights on two.
    more = nearest.more_gpus(request, plain)
    assert more is not None
    assert (more.ask.gpus, plain(more.ask, more.candidate)) == (2, True)
    assert nearest.shorter(request, plain) is None


def test_every_direction_at_once_in_one_order() -> None:
    directions = [near.direction for near in nearest.nearest(TIGHT)]
    assert directions == ["gpus", "gpu", "context", "requests", "model"]


def test_no_second_host_and_no_second_mac_plug_in() -> None:
    assert nearest.more_gpus(asked("Qwen2.5-72B-Instruct", "M1", 4096, 1)) is None
    assert nearest.more_gpus(asked("Qwen2.5-72B-Instruct", "cpu:8GiB", 4096, 1)) is None
    assert nearest.larger_gpu(asked("Qwen2.5-72B-Instruct", "cpu:8GiB", 4096, 1)) is None
