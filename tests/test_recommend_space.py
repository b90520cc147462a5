"""What could be run: checkpoints, formats by GPU, splits."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from kvctl.engines import Engine, engine
from kvctl.hardware import Device, read_gpus, table
from kvctl.model import build_spec
from kvctl.quantization import scheme
from kvctl.recommend import space, takes
from kvctl.recommend.checkpoints import _data, checkpoints, gguf_types, is_quantized, published, stored_format
from kvctl.recommend.request import Ask, ask
from kvctl.recommend.space import Split
from kvctl.sources import catalogue
from kvctl.spec import ModelSpec
from kvctl.weight_formats import GGUF_BITS, weight_format

VLLM, SGLANG, TENSORRT, LLAMA, OLLAMA = (
    engine(name) for name in ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "ollama")
)


def model(name: str) -> ModelSpec:
    return build_spec(catalogue.find(name))


def gpu(name: str) -> Device:
    return read_gpus(name)[0]


def asked(name: str, gpus: str, **more: Any) -> Ask:
    return ask(model(name), read_gpus(gpus), context=4096, **more)


def considered(name: str, device: str, by: Engine) -> list[tuple[str, str]]:
    spec = model(name)
    offered = gguf_types(spec) if by.slots else checkpoints(spec)
    return [(one.weights, one.made) for one in space.weights(by, gpu(device), offered)]


# -- checkpoints ----------------------------------------------------------------------------


def test_published_checkpoints_are_those_with_the_same_layers() -> None:
    found = {one.name: one.weights for one in published(model("Qwen3-32B"))}
    # The format is the one that its own configuration names: blocks of 128 × 128.
    assert found["Qwen/Qwen3-32B-FP8"] == "fp8-block"
    assert found["nvidia/Qwen3-32B-NVFP4"] == "nvfp4"
    assert found["Qwen/Qwen3-32B-AWQ"] == "awq"
    # fbgemm_fp8 has a scale for each row, and TensorRT-LLM reads none of it.
    found = {one.name: one.weights for one in published(model("Llama-3.1-405B-Instruct"))}
    assert found["meta-llama/Llama-3.1-405B-Instruct-FP8"] == "fp8-channel"


def test_a_longer_name_is_no_checkpoint_of_a_shorter_one() -> None:
    # DeepSeek-V3-0324 and V3.1 are other weights than V3.
    assert catalogue.has("nvidia/DeepSeek-V3-0324-NVFP4")
    assert not list(published(model("DeepSeek-V3")))


def test_a_checkpoint_that_engines_load_as_plain_weights_is_none() -> None:
    # This one's configuration has no quant_method: vLLM 0.29 was seen to load it without quantization.
    names = [one.name for one in checkpoints(build_spec(catalogue.find("Qwen/Qwen3-32B")))]
    assert "Qwen/Qwen3-32B-FP8" in names
    assert "Qwen/Qwen3-32B-FP8-Static-PerTensor" not in names


def test_other_layers_are_another_model() -> None:
    spec = model("Qwen3-32B")
    changed = build_spec(catalogue.find("Qwen/Qwen3-32B"), {"num_hidden_layers": 63})
    assert [one.weights for one in checkpoints(changed) if one.made == "stored"] == ["bf16"]
    assert len([one for one in checkpoints(spec) if one.made == "stored"]) > 1


@pytest.mark.parametrize("name", catalogue.names()[::25])
def test_every_published_name_is_in_the_catalogue_or_has_a_source(name: str) -> None:
    data = _data()
    for one in published(model(name)):
        assert catalogue.has(one.name) or one.name in {row[0] for row in data["checkpoints"][name]}
        assert one.source
        weight_format(one.weights)


def test_the_table_of_checkpoints_names_sources_formats_and_models_that_exist() -> None:
    data = _data()
    for base, rows in data["checkpoints"].items():
        assert catalogue.has(base)
        for name, weights, source in rows:
            assert source in data["sources"]
            assert weight_format(weights).name == weights
            assert not catalogue.has(name)  # else it needs no row


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("DeepSeek-V3", "fp8-block"),
        ("gpt-oss-120b", "mxfp4"),
        ("Qwen3-32B", "bf16"),
        ("Qwen/Qwen3-8B-FP8", "fp8-block"),
    ],
)
def test_how_a_model_is_stored(name: str, stored: str) -> None:
    assert stored_format(model(name)) == stored
    own = [one for one in checkpoints(model(name)) if one.sized is None]
    assert [(one.weights, one.made) for one in own] == [(stored, "stored")]


def test_a_quantized_checkpoint_is_served_as_it_is() -> None:
    spec = model("Qwen/Qwen3-32B-FP8")
    assert is_quantized(spec.id)
    assert scheme(spec.config) is not None
    assert len(checkpoints(spec)) == 1


def test_a_name_says_the_format_where_the_configuration_does_not() -> None:
    (only,) = checkpoints(model("nvidia/Qwen3-32B-NVFP4"))
    assert (only.weights, only.made, only.sized) == ("nvfp4", "stored", "nvfp4")
    assert not gguf_types(model("nvidia/Qwen3-32B-NVFP4"))


def test_what_has_to_be_made_says_how() -> None:
    by_name = {one.weights: one for one in checkpoints(model("Qwen3-7B"))}
    assert (by_name["fp8"].made, by_name["awq"].made) == ("load", "make")
    assert by_name["awq"].how == "kvctl quantize Qwen3-7B --weights awq -o ./Qwen3-7B-awq"
    assert by_name["awq"].loads == "./Qwen3-7B-awq"
    assert "llama-quantize" in next(one for one in gguf_types(model("Qwen3-7B")) if one.weights == "q4_k_m").how


def test_gguf_types_have_known_sizes() -> None:
    assert all(one.weights in GGUF_BITS or one.weights == "bf16" for one in gguf_types(model("Qwen3-32B")))
    assert [one.weights for one in gguf_types(model("gpt-oss-120b"))] == ["mxfp4"]


# -- formats by GPU -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "by", "formats"),
    [
        # Hopper computes in 8-bit floats; NVFP4 would be unpacked like AWQ, and has twice the scales.
        ("H100", VLLM, ["bf16", "fp8-block", "awq"]),
        ("B200", VLLM, ["bf16", "fp8-block", "nvfp4", "awq"]),
        # Ampere has no 8-bit floats: 8-bit integers are computed in, 8-bit floats unpacked.
        ("A100", VLLM, ["bf16", "fp8-block", "w8a8", "awq"]),
        ("A100", TENSORRT, ["bf16"]),
        # Blocks are Hopper's there, and nothing else of this model is published in 8-bit floats that it would load.
        ("RTX4090", TENSORRT, ["bf16"]),
        ("B200", TENSORRT, ["bf16", "fp8-block", "nvfp4"]),
        # SGLang's kernels for plain and packed weights start with Turing and Ampere.
        ("T4", SGLANG, ["bf16"]),
    ],
)
def test_formats_that_an_engine_takes_on_a_gpu(device: str, by: Engine, formats: list[str]) -> None:
    assert [name for name, _ in considered("Qwen3-32B", device, by)] == formats


def test_published_comes_before_made() -> None:
    assert ("fp8", "load") in considered("Qwen3-7B", "H100", VLLM)
    assert ("fp8-block", "stored") in considered("Qwen3-32B", "H100", VLLM)
    assert not any(made == "load" for _, made in considered("Qwen3-32B", "H100", VLLM))


def test_gpus_without_bfloat16_are_told_float16() -> None:
    assert takes.dtype(model("Qwen3-32B"), gpu("T4")) == "float16"
    assert takes.dtype(model("Qwen3-32B"), gpu("A100")) == "auto"


@pytest.mark.parametrize(
    ("name", "device", "by", "formats"),
    [
        ("Qwen3-32B", "H100", VLLM, ("auto", "fp8", "int4_per_token_head")),
        ("Qwen3-32B", "B200", VLLM, ("auto", "fp8", "nvfp4")),
        ("Qwen3-32B", "A100", VLLM, ("auto", "fp8", "int8_per_token_head", "int4_per_token_head")),
        ("Qwen3-32B", "T4", VLLM, ("auto", "int8_per_token_head", "int4_per_token_head")),
        # Latents have one row and no heads: no scales of heads, and Triton alone has fp8 before Hopper, from 8.9 on.
        ("DeepSeek-V3", "A100", VLLM, ("auto",)),
        ("DeepSeek-V3", "H100", VLLM, ("auto", "fp8")),
        ("DeepSeek-V3", "B200", VLLM, ("auto", "fp8")),
        # Sinks: FlashInfer runs them on Blackwell alone.
        ("gpt-oss-120b", "A100", VLLM, ("auto", "int8_per_token_head", "int4_per_token_head")),
        ("Qwen3-32B", "A100", SGLANG, ("auto", "fp8_e5m2")),
        ("Qwen3-32B", "H100", SGLANG, ("auto", "fp8_e4m3")),
        ("Qwen3-32B", "B200", SGLANG, ("auto", "fp8_e4m3", "nvfp4")),
        ("Qwen3-32B", "A100", TENSORRT, ("auto",)),
        ("Qwen3-32B", "H100", TENSORRT, ("auto", "fp8")),
        ("Qwen3-32B", "A100", LLAMA, ("f16", "q8_0", "q5_1", "q4_0")),
    ],
)
def test_formats_of_the_cache(name: str, device: str, by: Engine, formats: tuple[str, ...]) -> None:
    assert takes.caches(by, gpu(device), model(name)) == formats
    for one in formats:
        if one != "auto":
            by.kv_dtype(one, "--kv-cache-dtype")  # the engine's own word


@pytest.mark.parametrize(
    ("device", "by", "runs"),
    [("M3 Max", VLLM, False), ("M3 Max", LLAMA, True), ("MI300X", TENSORRT, False), ("MI300X", VLLM, True),
     ("cpu:8GiB", SGLANG, False), ("cpu:8GiB", VLLM, True), ("cpu:8GiB", LLAMA, True), ("P100", VLLM, False),
     # vLLM's installation page has 7.5 since 0.21; V100 is 7.0, T4 7.5.
     ("V100", VLLM, False), ("T4", VLLM, True), ("V100", SGLANG, False), ("V100", LLAMA, True), ("T4", TENSORRT, False),
     # vLLM's ROCm page: MI200 (gfx90a), MI300, MI350, RX 7900, RX 9000, Ryzen AI MAX; SGLang's kernels: gfx942 and gfx950.
     ("MI50 32GB", VLLM, False), ("MI60", VLLM, False), ("MI100", VLLM, False), ("RX 6900 XT", VLLM, False),
     ("MI210", VLLM, True), ("MI250", VLLM, True), ("MI355X", VLLM, True), ("RX 7900 XTX", VLLM, True),
     ("RX 9070 XT", VLLM, True), ("Ryzen AI Max+ 395", VLLM, True),
     ("MI300X", SGLANG, True), ("MI355X", SGLANG, True), ("MI210", SGLANG, False), ("RX 7900 XTX", SGLANG, False),
     ("MI50 32GB", LLAMA, True), ("RX 6900 XT", LLAMA, True),
     # llama.cpp: SYCL on Intel's GPUs; Gaudi is no GPU and has no backend.
     ("Data Center GPU Max 1550", LLAMA, True), ("Arc B580", LLAMA, True), ("Arc B580", VLLM, False),
     ("Gaudi 2", VLLM, False), ("Gaudi 2", LLAMA, False), ("Gaudi 3", OLLAMA, False)],
)  # fmt: skip
def test_engines_on_devices(device: str, by: Engine, runs: bool) -> None:
    why = takes.runs(by, gpu(device))
    assert (why == "") is runs
    facts = gpu(device).facts
    assert runs or facts is None or facts.name in why


def test_every_amd_card_says_what_it_is() -> None:
    """Or engines would be said to run on it."""
    assert all(card.compute_capability for card in table.cards() if card.vendor == "AMD")


# -- splits ---------------------------------------------------------------------------------


def shapes(by: Engine, request: Ask) -> list[Split]:
    return list(space.splits(by, request))


def test_a_dense_model_on_linked_gpus() -> None:
    # 64 query and 8 KV heads: tensor parallelism over 1, 2, 4 and 8; stages for the numbers that divide neither.
    found = shapes(VLLM, asked("Qwen3-32B", "8xH100"))
    assert [(one.tensor, one.pipeline) for one in found] == [
        (1, 1), (2, 1), (1, 3), (4, 1), (1, 5), (2, 3), (1, 7), (8, 1)
    ]  # fmt: skip
    assert all(one.data == one.dealt == one.nodes == 1 for one in found)


def test_gpus_without_links_have_stages_too() -> None:
    found = {(one.tensor, one.pipeline) for one in shapes(VLLM, asked("Qwen3-32B", "4xL40S"))}
    assert found == {(1, 1), (2, 1), (4, 1), (1, 2), (1, 3), (1, 4), (2, 2)}


def test_latents_are_dealt_out_or_attended_to_apart() -> None:
    found = [one for one in shapes(VLLM, asked("DeepSeek-V3", "8xH200")) if one.gpus == 8]
    assert found == [Split(8, gpus=8), Split(8, dealt=8, gpus=8), Split(1, data=8, gpus=8)]
    apart = [one for one in shapes(SGLANG, asked("DeepSeek-V3", "8xH200")) if one.data == 8]
    assert apart == [Split(8, data=8, gpus=8)]
    assert not [one for one in shapes(TENSORRT, asked("DeepSeek-V3", "8xH200")) if one.dealt > 1]


def test_few_kv_heads_are_dealt_out_over_their_copies() -> None:
    # Qwen3-235B-A22B has 4 KV heads: eight ranks hold each twice.
    found = [one for one in shapes(VLLM, asked("Qwen3-235B-A22B", "8xH200")) if one.dealt > 1]
    assert found == [Split(8, dealt=2, gpus=8)]


def test_several_nodes_are_stages_of_a_node_each() -> None:
    found = [one for one in shapes(VLLM, asked("Qwen3-32B", "8xH100", nodes=3)) if one.nodes > 1]
    assert found == [Split(8, 2, gpus=8, nodes=2), Split(8, 3, gpus=8, nodes=3)]
    assert [one.ranks for one in found] == [16, 24]


def test_replicas_fill_the_gpus() -> None:
    request = asked("Qwen3-32B", "8xH100", nodes=2)
    assert list(space.replicas(Split(4, gpus=4), request)) == [1, 2, 3, 4]
    assert list(space.replicas(Split(1, 3, gpus=3), request)) == [1, 2, 3, 4]  # two on each node
    assert list(space.replicas(Split(8, 2, gpus=8, nodes=2), request)) == [1]


def test_many_replicas_are_tried_in_steps_of_five_percent() -> None:
    counts = space.replicas(Split(1, gpus=1), asked("Qwen3-32B", "8xH100", nodes=60))
    assert counts[:40] == tuple(range(1, 41))
    assert counts[-1] == 480
    assert all(after / before <= 1.05 for before, after in pairwise(counts[40:]))
    assert len(counts) < 110


def test_more_gpus_have_every_split_of_fewer() -> None:
    for name in ("Qwen3-32B", "DeepSeek-V3", "gpt-oss-120b"):
        for by in (VLLM, SGLANG, TENSORRT, LLAMA):
            before: set[Split] = set()
            for count in range(1, 9):
                now = set(shapes(by, asked(name, f"{count}xH100")))
                assert before <= now
                before = now


def test_the_order_is_the_same_each_time_and_starts_with_few_gpus() -> None:
    found = shapes(VLLM, asked("DeepSeek-V3", "8xH200", nodes=2))
    assert found == shapes(VLLM, asked("DeepSeek-V3", "8xH200", nodes=2))
    assert [one.ranks for one in found] == sorted(one.ranks for one in found)
    assert len(found) == len(set(found))
