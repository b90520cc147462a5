"""Weights by their published number: beside the bytes that are published, or follow from all tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import Outcome

from kvctl.errors import ConfigError
from kvctl.formats import BF16
from kvctl.model import build_spec
from kvctl.rank_weights import Split
from kvctl.sources import catalogue
from kvctl.spec import ModelSpec, Weights
from kvctl.weigh import weigh
from kvctl.weight_estimates import estimated
from kvctl.weight_formats import weight_format

Run = Callable[..., Outcome]
ONE = (1, 1, False, 1, ())


def spec(name: str) -> ModelSpec:
    return build_spec(catalogue.find(name))


def test_deepseek_v3_in_the_bytes_of_its_files() -> None:
    # The Hub has 684,531,386,000 parameters in 688,586,727,753 bytes.
    assert estimated(spec("deepseek-ai/DeepSeek-V3"), BF16, weight_format("fp8-block")).bytes == pytest.approx(
        688_586_727_753, rel=0.005
    )


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B", "allenai/OLMoE-1B-7B-0924"])  # fmt: skip
@pytest.mark.parametrize("fmt", ["fp8", "fp8-block", "fp8-channel", "w8a8"])
def test_eight_bits_are_what_all_tensors_make(name: str, fmt: str) -> None:
    one = spec(name)
    info = weigh(one, ONE, BF16, fmt, [])
    assert info is not None
    assert info.bytes is not None
    assert info.source.startswith("what if")
    assert estimated(one, BF16, weight_format(fmt)).bytes == pytest.approx(info.bytes, rel=0.01)


def test_glm_4_5_air_in_8_bits() -> None:
    # 110,468,824,832 parameters; 151,552 words of 4,096 twice stay in 16 bits.
    info = weigh(spec("zai-org/GLM-4.5-Air"), ONE, BF16, "fp8", [])
    assert info is not None
    assert info.bytes == pytest.approx(110_468_824_832 + 2 * 151_552 * 4096, rel=1e-6)
    assert info.source == "estimated: 110,468,824,832 parameters as if stored in fp8"
    assert info.per_rank is None
    four = weigh(spec("zai-org/GLM-4.5-Air"), ONE, BF16, "awq", [])  # nine tenths of it are experts
    assert four is not None
    assert four.source == "estimated: 110,468,824,832 parameters as if stored in awq"
    # 4 bits, and 16 + 4 for every 128
    assert four.bytes == pytest.approx(
        (110_468_824_832 - 1_241_513_984) * (4 + 20 / 128) / 8 + 2 * 1_241_513_984, rel=1e-4
    )


def test_deepseek_v4_has_experts_in_4_bits_and_all_else_in_8() -> None:
    # 43 layers of 256 experts of 3 x 4,096 x 2,048 in MXFP4 (4 bits, and 8 for every 32); 129,280 words of 4,096 twice in 16 bits;
    # what is left of 290,944,616,402 in 8 bits with a float32 for every 128 x 128.
    experts = 43 * 256 * 3 * 4096 * 2048
    words = 2 * 129_280 * 4096
    rest = 290_944_616_402 - experts - words
    info = weigh(spec("deepseek-ai/DeepSeek-V4-Flash"), ONE, BF16, None, [], assume=True)
    assert info is not None
    assert info.bytes == pytest.approx(experts * 4.25 / 8 + 2 * words + rest * (1 + 4 / 128**2), rel=1e-6)
    assert info.source == "estimated: 290,944,616,402 parameters as if stored in mxfp4 for its experts, fp8-block else"


def test_kimi_k2_5_has_experts_in_4_bits_and_all_else_in_16() -> None:
    # 60 layers of 384 experts of 3 x 7,168 x 2,048 in 4 bits with 16 for every 32; its quantization_config leaves the rest.
    experts = 60 * 384 * 3 * 7168 * 2048
    info = weigh(spec("moonshotai/Kimi-K2.5"), ONE, BF16, None, [], assume=True)
    assert info is not None
    assert info.bytes == pytest.approx(experts * 4.5 / 8 + 2 * (1_026_879_376_368 - experts), rel=1e-5)


def test_glm_5_1_fp8_is_counted_where_nobody_published_its_number() -> None:
    # zai-org/GLM-5.1 has 753,864,139,008 on the Hub, with the layer that drafts; here without.
    info = weigh(spec("zai-org/GLM-5.1-FP8"), ONE, BF16, None, [], assume=True)
    assert info is not None
    assert info.bytes == pytest.approx(753_864_139_008, rel=0.02)


def test_what_is_not_sound_is_refused() -> None:
    flash = spec("deepseek-ai/DeepSeek-V4-Flash")
    with pytest.raises(ConfigError, match="what nvfp4 makes of it"):  # 4 bits of what is not mostly experts
        estimated(spec("meta-llama/Llama-3.1-8B"), BF16, weight_format("nvfp4"))
    with pytest.raises(ConfigError, match="recurrent layers"):
        estimated(spec("ai21labs/Jamba-v0.1"), BF16, weight_format("fp8"))
    with pytest.raises(ConfigError, match="embeddings"):
        estimated(flash.replace(weights=Weights(None, 10**9, "a test")), BF16, weight_format("fp8"))
    packed = Weights(None, 158_000_000_000, "a count of packed bytes")  # fewer than its experts
    with pytest.raises(ConfigError, match="not known from its number"):
        estimated(flash.replace(weights=packed), BF16, weight_format("fp8-block"))


def test_experts_have_several_names() -> None:
    """Model tables call them num_experts; GraniteMoE's and GLM's classes do not."""
    from kvctl.parameters import parameters

    config = {"model_type": "glm4_moe", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 16, "vocab_size": 128, "intermediate_size": 96, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
              "n_shared_experts": 1}  # fmt: skip
    named = [
        parameters({**config, name: 8}, whole=False)
        for name in ("n_routed_experts", "num_experts", "num_local_experts")
    ]
    assert named[0] == named[1] == named[2]
    assert sum(t.count for t in named[0] if "mlp.experts.N.up_proj" in t.name) == 8
    granite = {"model_type": "granitemoe", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4,
               "num_key_value_heads": 2, "vocab_size": 128, "intermediate_size": 32}  # fmt: skip
    assert parameters({**granite, "num_experts": 5}, whole=False) == parameters({**granite, "num_local_experts": 5})
    # A model's own file is read as its class reads it: a name that the class does not know changes nothing.
    assert parameters({**granite, "num_experts": 5}) == parameters(granite)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-235B-A22B", "meta-llama/Llama-3.1-8B"])
@pytest.mark.parametrize(
    "ranks", [(1, 1, True, 8, ()), (1, 1, False, 8, ()), (2, 1, False, 4, ()), (1, 2, True, 4, ())]
)
def test_ranks_that_each_have_all_of_attention_have_what_all_tensors_make(
    name: str, ranks: tuple[int, int, bool, int, tuple[int, ...]]
) -> None:
    one = spec(name)
    info = weigh(one, ranks, BF16, "fp8-block", [], by_rank=True)
    assert info is not None
    assert info.per_rank is not None
    found = estimated(one, BF16, weight_format("fp8-block"), ranks=Split(*ranks)).per_rank
    assert found == pytest.approx(info.per_rank, rel=0.005)


def test_ranks_that_each_have_all_of_attention_are_not_given_equal_shares(kvctl: Run) -> None:
    asked = ("--weights-dtype", "fp8", "--ctx", "8k", "--gpu", "4xH200", "--engine", "vllm", "--json")
    shared = kvctl("size", "GLM-4.5-Air", *asked, "-tp", "4").json["results"][0]["fit"]
    # (110,468,824,832 + 2 x 151,552 x 4,096) / 4, and a scale for each matrix
    assert shared["weights_bytes"] == pytest.approx((110_468_824_832 + 1_241_513_984) / 4, rel=1e-6)
    each = kvctl("size", "GLM-4.5-Air", *asked, "--data-parallel-size", "4", "--enable-expert-parallel").json[
        "results"
    ][0]["fit"]
    # 45 layers of 128 experts of 3 x 4,096 x 1,408 over four, all else on each
    experts = 45 * 128 * 3 * 4096 * 1408
    assert each["weights_bytes"] == pytest.approx(110_468_824_832 + 1_241_513_984 - 3 * experts / 4, rel=1e-6)
    # In which layers this one has experts is a list: what each rank has is not told by their number.
    refused = kvctl("size", "MiMo-V2-Flash", *asked[2:], "--data-parallel-size", "4", "--enable-expert-parallel")
    assert refused.code == 1
    assert "where each has all of attention is not known" in refused.err
