"""What a token costs a model: against hand counts and the active parameters that makers publish."""

from __future__ import annotations

import pytest

from kvctl.errors import ConfigError
from kvctl.formats import BF16, cache_format, plain
from kvctl.model import build_spec
from kvctl.sources import catalogue
from kvctl.spec import Formats
from kvctl.speed.work import Work, work_of

B16 = Formats(BF16, plain(BF16), plain(BF16))


def work(name: str, fmt: Formats = B16) -> Work:
    return work_of(build_spec(catalogue.find(name)), fmt)


def test_a_dense_model_by_hand() -> None:
    # Llama-3.1-8B: 32 layers of 4096. Queries and output 2 × 4096², keys and values 2 × 4096 × 1024, three matrices of
    # 4096 × 14336, two norms; one more norm at the end, which is not of a layer.
    layer = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    found = work("meta-llama/Llama-3.1-8B-Instruct")
    assert (found.dense, found.head, found.active) == (32 * layer, 128_256 * 4096, 32 * layer)
    assert (found.expert, found.experts, found.chosen, found.expert_layers, found.touched(100)) == (0, 0, 0, 0, 0.0)
    # A query compares with a key over 32 heads of 128 and adds a value of 128: 2 × 32 × 256; a row is 2 × 8 × 128 × 2 bytes.
    (group,) = found.attends
    assert (group.layers, group.pair, group.step, group.row, group.heads, group.limit) == (
        32,
        16_384,
        16_384,
        4096,
        8,
        None,
    )
    assert not found.estimated


def test_a_mixture_by_hand() -> None:
    # Mixtral-8x7B: an expert has three matrices of 4096 × 14336 in each of 32 layers; two of eight are chosen, by 4096 × 8.
    found = work("mistralai/Mixtral-8x7B-Instruct-v0.1")
    assert found.expert == 32 * 3 * 4096 * 14336
    assert found.dense == 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 2 * 4096 + 4096 * 8)
    assert (found.experts, found.chosen, found.expert_layers) == (8, 2, 32)
    # Each token misses an expert with 6/8: of four tokens all do with (3/4)⁴ = 0.3164, and 8 × 0.6836 are read.
    assert found.touched(1) == pytest.approx(2)
    assert found.touched(4) == pytest.approx(5.46875)
    assert found.touched(10_000) == pytest.approx(8)


@pytest.mark.parametrize(
    ("name", "published", "heads"),
    [
        # What the makers' model cards say; how often the embedding's size is in it differs between them: `heads`.
        ("meta-llama/Llama-3.1-8B-Instruct", 8.03, 2),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 12.9, 2),  # mistral.ai/news/mixtral-of-experts
        ("deepseek-ai/DeepSeek-V3", 37, 1),  # arXiv 2412.19437
        ("moonshotai/Kimi-K2-Instruct", 32, 1),
        ("openai/gpt-oss-120b", 5.13, 1),  # arXiv 2508.10925, table 1
        ("openai/gpt-oss-20b", 3.61, 1),
        ("Qwen/Qwen3-30B-A3B", 3.3, 2),
        ("Qwen/Qwen3-235B-A22B", 22, 2),
        ("Qwen/Qwen3-32B", 31.2, 0),  # "Number of Parameters (Non-Embedding)"
        ("zai-org/GLM-4.5", 32, 0),
        ("MiniMaxAI/MiniMax-M2", 10, 0),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", 17, 1),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", 17, 1),
        ("ibm-granite/granite-4.0-h-small", 9, 1),
        ("ibm-granite/granite-3.1-1b-a400m-instruct", 0.4, 1),
        ("ibm-granite/granite-3.1-3b-a800m-instruct", 0.8, 1),
    ],
)
def test_active_parameters_as_published(name: str, published: float, heads: int) -> None:
    found = work(name)
    # They are published with two or three digits.
    assert (found.active + heads * found.head) / 1e9 == pytest.approx(published, rel=0.025 if published > 1 else 0.06)


@pytest.mark.parametrize(
    ("name", "published", "within"),
    [
        ("deepseek-ai/DeepSeek-V3", 671, 0.001), ("openai/gpt-oss-120b", 116.83, 0.0002), ("openai/gpt-oss-20b", 20.91, 0.0005),
        ("Qwen/Qwen3-30B-A3B", 30.5, 0.002), ("mistralai/Mixtral-8x7B-Instruct-v0.1", 46.7, 0.001),
        ("zai-org/GLM-4.5", 355, 0.01),  # with the layer that predicts a second token
        ("ibm-granite/granite-4.0-h-small", 32, 0.02),
    ],
)  # fmt: skip
def test_all_parameters_as_published(name: str, published: float, within: float) -> None:
    # The embedding is as large as the head.
    found = work(name)
    assert (found.stored + found.head) / 1e9 == pytest.approx(published, rel=within)


def test_latent_attention_decodes_with_the_latent() -> None:
    # DeepSeek-V3: 128 heads. Prompts: keys of 128 + 64, values of 128. Decoding: both with the latent of 512, and 64 for
    # positions. A row is 512 + 64 of two bytes, once for all heads.
    (group,) = work("deepseek-ai/DeepSeek-V3").attends
    assert (group.pair, group.step) == (2 * 128 * (128 + 64 + 128), 2 * 128 * (2 * 512 + 64))
    assert (group.row, group.heads) == (1152, 1)


def test_windows_end_what_is_looked_at() -> None:
    # gpt-oss: every other layer looks at 128 tokens.
    window, whole = sorted(work("openai/gpt-oss-120b").attends, key=lambda group: group.limit or 1 << 60)
    assert (window.layers, window.limit, whole.layers, whole.limit) == (18, 128, 18, None)
    assert (window.seen(1000), window.seen(50), whole.seen(1000)) == (128, 50, 1000)


def test_rows_are_in_the_format_of_the_cache() -> None:
    fp8 = Formats(BF16, cache_format("fp8"), cache_format("fp8"))
    assert work("meta-llama/Llama-3.1-8B-Instruct", fp8).attends[0].row == 2048


def test_recurrent_states_are_counted_once_a_sequence() -> None:
    found = work("Qwen/Qwen3-Next-80B-A3B-Instruct")
    # 12 of 48 layers attend; the others keep 32 heads of 128 × 128 float32 and a convolution of 3 × 8192 bf16.
    assert sum(group.layers for group in found.attends) == 12
    assert found.state == pytest.approx(36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2), rel=0.01)


@pytest.mark.parametrize(
    "name", ["baidu/ERNIE-4.5-300B-A47B-Base-PT", "baidu/ERNIE-4.5-VL-28B-A3B-PT", "PrimeIntellect/INTELLECT-3.1"]
)
def test_mixtures_whose_experts_no_source_names_are_not_taken_for_dense(name: str) -> None:
    with pytest.raises(ConfigError, match="how many experts a token goes through"):
        work(name)


def test_configurations_that_contradict_what_is_published_are_not_believed() -> None:
    spec = build_spec(catalogue.find("meta-llama/Llama-3.1-8B-Instruct"))
    assert spec.weights is not None
    with pytest.raises(ConfigError, match=r"0\.1 times the parameters"):
        work_of(spec.replace(weights=spec.weights.replace(parameters=80_300_000_000)), B16)


def test_published_totals_stand_in_for_unknown_architectures() -> None:
    # Llama-4-Scout: 16 experts of 3 × 5120 × 8192 in all 48 layers, of 107.8 (108.6 with vision) milliards.
    found = work("meta-llama/Llama-4-Scout-17B-16E-Instruct")
    assert found.estimated
    assert found.expert == 48 * 3 * 5120 * 8192
