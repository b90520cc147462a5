"""Both phases as bytes, operations and seconds, by hand; the queue against the exact one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvctl.formats import BF16, plain
from kvctl.hardware.table import find
from kvctl.model import build_spec
from kvctl.sources import catalogue
from kvctl.spec import Formats
from kvctl.speed import Setup, layout_of, prepare
from kvctl.speed.load import full, queued, served
from kvctl.speed.roofline import Demand, Efficiency, Layout, prompt, prompt_seconds, step, step_seconds

B16 = Formats(BF16, plain(BF16), plain(BF16))
LAYERS, HEAD = 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096), 128_256 * 4096
"""Llama-3.1-8B's parameters: queries and output, keys and values, the feed-forward part, norms; and the head."""
A100 = (2039e9, 312e12, 300e9)
"""An A100 of 80 GB with NVLink: bytes and operations a second, and bytes a second one way (NVIDIA's data sheet: 2,039 GB/s,
312 TFLOPS, 600 GB/s both ways)."""


def layout(
    model: str = "meta-llama/Llama-3.1-8B-Instruct", card: str = "A100 80GB SXM", weights: str = "bf16", **more: Any
) -> Layout:
    return layout_of(Setup(build_spec(catalogue.find(model)), "vllm", find(card)[0], weights, B16, **more))


ONES = Efficiency(**dict.fromkeys(Efficiency._fields, 1.0)).replace(
    exchange=0, layer=0, expert_layer=0, step=0, sequence=0, half=0, first=0
)
"""Hardware at its best."""


# -- one token ---------------------------------------------------------------------------------------


def test_one_token_of_one_request_reads_all_weights() -> None:
    bandwidth, flops, _ = A100
    found = step(layout(), 1, 1000)
    # 7.5 milliards of two bytes over 2,039 GB/s: 7.36 ms.
    assert found.weights == pytest.approx(2 * (LAYERS + HEAD) / bandwidth)
    assert found.weights == pytest.approx(7.36e-3, rel=1e-3)
    assert found.operations == pytest.approx(2 * (LAYERS + HEAD) / flops)
    # 1,000 rows of 4,096 bytes in 32 layers, and 2 × 32 × 256 operations for each of them.
    assert found.cache == pytest.approx(32 * 4096 * 1000 / bandwidth)
    assert found.attention == pytest.approx(32 * 16_384 * 1000 / flops)
    assert (found.wire, found.exchanges, found.layers, found.passes, found.sequences) == (0, 0, 32, 1, 1)


def test_more_requests_share_the_weights() -> None:
    one, eight = step(layout(), 1, 1000), step(layout(), 8, 1000)
    assert eight.weights == one.weights
    assert eight.operations == pytest.approx(8 * one.operations)
    assert eight.cache == pytest.approx(8 * one.cache)


def test_ranks_divide_weights_and_cache_and_exchange_activations() -> None:
    one, two = step(layout(), 4, 1000), step(layout(tensor=2), 4, 1000)
    assert (two.weights, two.operations, two.cache) == pytest.approx(
        (one.weights / 2, one.operations / 2, one.cache / 2)
    )
    # After attention and after the feed-forward part of 32 layers: half of 4 × 4,096 × 2 bytes, there and back.
    assert two.wire == pytest.approx(64 * 4 * 4096 * 2 / A100[2])
    # Sixteen ranks have eight KV heads: each is on two of them.
    assert step(layout(tensor=16), 4, 1000).cache == pytest.approx(one.cache / 8)


def test_tokens_dealt_out_are_read_once_and_exchanged_in_every_layer() -> None:
    whole, dealt = (
        step(layout("deepseek-ai/DeepSeek-V3", "H200", "fp8", tensor=8, dealt=n), 4, 20_000) for n in (1, 8)
    )
    # 61 layers' latents lie on one rank of eight each.
    assert dealt.cache == pytest.approx(whole.cache / 8)
    # Queries of 576 numbers (512 of latent, 64 rotated) and outputs of 512, of 16 heads a rank, come from 7 other ranks: 2 bytes
    # each, over NVLink with 450 GB/s one way.
    moved = 61 * 4 * 16 * (576 + 512) * 2 * 7
    assert dealt.wire - whole.wire == pytest.approx(moved / 450e9)
    # Queries, sums and outputs: three times in each layer, beside the two sums of tensor parallelism.
    assert dealt.exchanges / whole.exchanges == pytest.approx((2 + 3) / 2)
    plain = layout("deepseek-ai/DeepSeek-V3", "H200", "fp8", tensor=8)
    assert prompt(plain.replace(context_parallel=8), 4096) == prompt(plain, 4096)


def test_mixtures_read_the_experts_that_are_chosen() -> None:
    bandwidth, flops, _ = A100
    laid = layout("mistralai/Mixtral-8x7B-Instruct-v0.1")
    expert, rest = 32 * 3 * 4096 * 14336, laid.work.dense + laid.work.head
    assert step(laid, 1, 100).weights == pytest.approx(2 * (rest + 2 * expert) / bandwidth)
    # Of eight experts four tokens read 5.46875 (tests/test_speed_work.py), and each multiplies two.
    assert step(laid, 4, 100).weights == pytest.approx(2 * (rest + 5.46875 * expert) / bandwidth)
    assert step(laid, 4, 100).operations == pytest.approx(2 * 4 * (rest + 2 * expert) / flops)


def test_formats_have_their_bytes_and_rates() -> None:
    # An H100: 3,350 GB/s, 989 and 1,978 TFLOPS. FP8: one byte, all but the head.
    plain_, fp8 = step(layout(card="H100 SXM"), 1, 1), step(layout(card="H100 SXM", weights="fp8"), 1, 1)
    assert plain_.weights == pytest.approx(2 * (LAYERS + HEAD) / 3350e9)
    assert fp8.weights == pytest.approx((LAYERS + 2 * HEAD) / 3350e9)
    assert fp8.operations == pytest.approx(plain_.operations / 2)
    # AWQ's 4 bits, scales and zeros for 128; it is multiplied in 16 bits.
    awq = step(layout(card="H100 SXM", weights="awq"), 1, 1)
    assert awq.weights == pytest.approx(((4 + 20 / 128) / 8 * LAYERS + 2 * HEAD) / 3350e9)
    assert awq.operations == plain_.operations


# -- a prompt ----------------------------------------------------------------------------------------


def test_a_prompt() -> None:
    bandwidth, flops, _ = A100
    found = prompt(layout(), 1000)
    # 2 × 6.98 milliards of operations a token, and the head once: 44.7 ms.
    assert found.operations == pytest.approx((2 * 1000 * LAYERS + 2 * HEAD) / flops)
    assert found.operations == pytest.approx(44.74e-3, rel=1e-3)
    # Each token looks back at half of the prompt on average.
    assert found.attention == pytest.approx(32 * 16_384 * 1000 * 500 / flops)
    assert found.weights == pytest.approx(2 * (LAYERS + HEAD) / bandwidth)
    assert (found.passes, found.layers, found.sequences) == (1, 32, 1)
    # The head's operations (0.525 milliards, once) are as many as 0.075 tokens more would make.
    assert found.tokens == pytest.approx(1000 + HEAD / LAYERS)


def test_long_prompts_are_computed_in_passes_that_read_the_weights_again() -> None:
    one, five = prompt(layout(), 20_000, chunk=1 << 20), prompt(layout(), 20_000, chunk=4096)
    assert five.passes == 5
    assert five.weights == pytest.approx(5 * one.weights)
    assert five.operations == one.operations


def test_what_is_in_the_cache_is_looked_at_and_not_computed() -> None:
    whole, rest = prompt(layout(), 1000), prompt(layout(), 250, before=750)
    assert rest.operations == pytest.approx((2 * 250 * LAYERS + 2 * HEAD) / A100[1])
    # 250 tokens look at 750 + 125 on average: 1000² / 2 - 750² / 2 pairs.
    assert rest.attention == pytest.approx(32 * 16_384 * 250 * 875 / A100[1])
    assert prompt(layout(), 750).attention + rest.attention == pytest.approx(whole.attention)


def test_windows_bound_what_a_prompt_compares() -> None:
    # gpt-oss, 18 layers of 128: 128² / 2 pairs, and 128 for each token after these.
    found = prompt(layout("openai/gpt-oss-120b", "H100 SXM", "mxfp4"), 1000)
    pairs = 18 * (1000 * 500) + 18 * (128 * 64 + 872 * 128)
    assert found.attention == pytest.approx(16_384 * pairs / 989e12)


def test_stages_work_on_passes_of_their_own() -> None:
    alone, piped = (
        prompt(layout(pipeline=2), 8192, chunk=1024),
        prompt(layout(pipeline=2), 8192, chunk=1024, pipelined=True),
    )
    # Eight passes through two stages take nine steps in place of sixteen.
    assert piped.operations == pytest.approx(alone.operations * 9 / 16)


# -- seconds -----------------------------------------------------------------------------------------


def test_the_longer_of_reading_and_multiplying_wins() -> None:
    found = step(layout(), 1, 1000)
    least = found.weights + found.cache + found.attention
    # Arithmetic takes 48 µs beside 7,362: the cubes' root is as good as the longer.
    assert step_seconds(found, ONES) == pytest.approx(least, rel=1e-4)
    assert step_seconds(found, ONES) >= least
    prefill = prompt(layout(), 1000)
    both = (prefill.operations**3 + prefill.weights**3) ** (1 / 3)
    assert prompt_seconds(prefill, ONES) == pytest.approx(both + prefill.attention)
    # Half of the bandwidth is twice the time; a launch of 10 µs a layer adds 320 µs.
    slower = ONES.replace(memory=0.5, layer=1e-5)
    assert step_seconds(found, slower) == pytest.approx(
        2 * found.weights + 320e-6 + found.cache + found.attention, rel=1e-4
    )


def test_requests_that_are_served_side_by_side() -> None:
    d, p = Demand(*[0.01] + [0] * 10), Demand(*[0, 0.2] + [0] * 8 + [1])
    # 10 ms a step, 200 ms a prompt; of nine others each comes once in 100 tokens, and 30% of their prompts is waited for.
    e = ONES.replace(mix=0.3, wait=0.05, first=0.001)
    first, between = served(d, p, e, 9, 100)
    assert between == pytest.approx(0.01 + 0.3 * 0.2 * 9 / 100)
    computing = 0.2 / (0.2 + 100 * between)
    assert first == pytest.approx(0.001 + 0.2 * (1 + 9 * (0.05 + computing / 2)))
    alone = served(d, p, e, 0, 100)
    assert alone == pytest.approx((0.201, 0.01))
    assert full(d, p, ONES, 10, 100) == pytest.approx(10 / (100 * 0.01 + 0.2))


def _erlang(load: float, places: int) -> float:
    """Mean wait over service of an M/M/c queue: Erlang's C / (c (1 - load)), with the recursion of B."""
    offered, blocked = load * places, 1.0
    for count in range(1, places + 1):
        blocked = offered * blocked / (count + offered * blocked)
    waits = blocked / (1 - load * (1 - blocked))
    return waits / (places * (1 - load))


@pytest.mark.parametrize("places", [1, 2, 8, 64, 256])
@pytest.mark.parametrize("load", [0.5, 0.8, 0.95, 0.999])
def test_waiting_for_a_place(load: float, places: int) -> None:
    exact = _erlang(load, places)
    if places == 1:
        assert exact == pytest.approx(load / (1 - load))  # M/M/1
        assert queued(load, places) == pytest.approx(exact)
    # It is known to be good where the wait matters: a tenth, or 1.5% of the service where hardly anybody waits.
    assert queued(load, places) == pytest.approx(exact, rel=0.1, abs=0.015)


def test_a_load_of_all_places_has_no_end() -> None:
    assert queued(1.0, 8) == queued(2.5, 8) == math.inf
    assert queued(0.0, 8) == 0.0


# -- of the whole ------------------------------------------------------------------------------------


def test_best_is_the_roofline() -> None:
    ready = prepare(
        Setup(
            build_spec(catalogue.find("meta-llama/Llama-3.1-8B-Instruct")),
            "vllm",
            find("A100 80GB SXM")[0],
            "bf16",
            B16,
        )
    )
    bandwidth, flops, _ = A100
    first, between = ready.best(1000, 100, 1)
    assert first == pytest.approx((2 * 1000 * LAYERS + 2 * HEAD + 32 * 16_384 * 1000 * 500) / flops)
    assert between == pytest.approx((2 * (LAYERS + HEAD) + 32 * 4096 * 1000) / bandwidth)
