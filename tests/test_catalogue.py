"""The bundled catalogue: every model sizes, the well-known ones to the byte, and names resolve."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.engines import ENGINES, IDEAL, TRANSFORMERS, Engine
from kvctl.errors import ExitCode, KvctlError, SourceError, UsageError
from kvctl.formats import BF16, plain
from kvctl.model import build_spec
from kvctl.parameters import parameters
from kvctl.sources import catalogue
from kvctl.spec import (
    Attention,
    ChunkedAttention,
    Formats,
    FullAttention,
    LatentAttention,
    Layer,
    ModelSpec,
    SlidingWindow,
    Workload,
)

TWO_BYTES = Formats(BF16, plain(BF16), plain(BF16))
NAMES = catalogue.names()
INCOMPLETE = catalogue.listing(incomplete=True)


@cache
def spec(name: str) -> ModelSpec:
    return build_spec(catalogue.find(name))


def layer_bytes(layer: Layer, work: Workload, engine: Engine = IDEAL) -> int:
    """One layer, all sequences."""
    return work.sequences * sum(state.size(work, TWO_BYTES, engine.retention) for state in layer.states_in(engine.name))


def total(model: ModelSpec, context: int, *, sequences: int = 1, engine: Engine = IDEAL) -> int:
    """All layers, by distinct layer and count."""
    work = Workload(context, sequences, encoder=100)
    return sum(count * layer_bytes(layer, work, engine) for layer, count in model.groups)


def attention_bytes(model: ModelSpec, context: int) -> int:
    """Keys, values and latents alone, recurrent states left out."""
    work = Workload(context)
    return sum(
        state.size(work, TWO_BYTES, IDEAL.retention)
        for layer in model.layers
        for state in layer.states
        if isinstance(state, (Attention, LatentAttention))
    )


# -- known models, by hand ----------------------------------------------------------------
# Two bytes an element, one sequence; keys and values make the first factor of 2. The context
# is 131,072 or the model's maximum where that is shorter.

KNOWN = {
    # 80 layers × 8 KV heads × 128
    "meta-llama/Llama-3.1-70B": (131072, 2 * 80 * 8 * 128 * 131072 * 2, 42_949_672_960),
    # the same shape; the file has a sliding_window, and use_sliding_window is false
    "Qwen/Qwen2.5-72B-Instruct": (32768, 2 * 80 * 8 * 128 * 32768 * 2, 10_737_418_240),
    # heads of 128 as the file says, not hidden_size 5120 / 64 heads = 80
    "Qwen/Qwen3-32B": (40960, 2 * 64 * 8 * 128 * 40960 * 2, 10_737_418_240),
    # again 128, not 2048 / 32 = 64
    "Qwen/Qwen3-30B-A3B": (40960, 2 * 48 * 4 * 128 * 40960 * 2, 4_026_531_840),
    # a latent of 512 and a rotary key of 64 in each of 61 layers, once: no factor for keys and values
    "deepseek-ai/DeepSeek-V3": (131072, 61 * (512 + 64) * 131072 * 2, 9_210_691_584),
    # of 62 layers every 6th is full (10), the other 52 keep 1,024 tokens; 16 KV heads × 128
    "google/gemma-3-27b-it": (131072, 2 * 16 * 128 * (10 * 131072 + 52 * 1024) * 2, 11_173_625_856),
    # 18 full layers, 18 with a window of 128; 8 KV heads × 64
    "openai/gpt-oss-120b": (131072, 2 * 8 * 64 * (18 * 131072 + 18 * 128) * 2, 4_836_556_800),
    # every layer keeps the newest 4,096 tokens; 8 KV heads × 128
    "mistralai/Mistral-7B-v0.1": (32768, 2 * 32 * 8 * 128 * 4096 * 2, 536_870_912),
    # 12 attention layers of 48, 2 KV heads × 256
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (131072, 12 * 2 * 2 * 256 * 131072 * 2, 3_221_225_472),
    # 4 attention layers of 32, 8 KV heads × 128
    "ai21labs/Jamba-v0.1": (131072, 4 * 2 * 8 * 128 * 131072 * 2, 2_147_483_648),
    # multi-query: one KV head × 64
    "tiiuae/falcon-7b": (2048, 2 * 32 * 1 * 64 * 2048 * 2, 16_777_216),
    # 12 full layers, 36 that keep a chunk of 8,192; 8 KV heads × 128
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (131072, 2 * 8 * 128 * (12 * 131072 + 36 * 8192) * 2, 7_650_410_496),
    # the first 20 of 35 layers have a cache: 4 full, 16 with a window of 512; 2 KV heads × 256
    "google/gemma-3n-E4B-it": (32768, 2 * 2 * 256 * (4 * 32768 + 16 * 512) * 2, 285_212_672),
    # 70 layers × 112 heads × 128
    "bigscience/bloom": (2048, 2 * 70 * 112 * 128 * 2048 * 2, 8_220_835_840),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_to_the_byte(name: str) -> None:
    context, by_hand, published = KNOWN[name]
    assert by_hand == published
    assert attention_bytes(spec(name), context) == published


@pytest.mark.parametrize("name", KNOWN)
def test_known_models_maximum_is_known(name: str) -> None:
    limit = spec(name).max_context
    assert limit is not None
    assert min(131072, limit) == KNOWN[name][0]


def test_recurrent_states_stand_beside_the_attention_part() -> None:
    # Qwen3-Next: 36 layers, each with 3 columns of a convolution over 8,192 channels (2 bytes) and a
    # float32 matrix of 128 × 128 for each of 32 heads.
    states = 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)
    assert total(spec("Qwen/Qwen3-Next-80B-A3B-Instruct"), 131072) == 3_221_225_472 + states
    # Jamba: 28 layers, inner width 8,192: 3 columns (2 bytes) and 16 float32 states a channel.
    states = 28 * (8192 * 3 * 2 + 8192 * 16 * 4)
    assert total(spec("ai21labs/Jamba-v0.1"), 131072) == 2_147_483_648 + states


@pytest.mark.parametrize(
    ("name", "per_token"),
    [
        ("meta-llama/Llama-3.3-70B-Instruct", 2 * 80 * 8 * 128 * 2),  # 327,680
        ("deepseek-ai/DeepSeek-R1-0528", 61 * 576 * 2),  # 70,272
        ("EleutherAI/gpt-j-6b", 2 * 28 * 16 * 256 * 2),  # 28 layers, 16 heads × 256
        ("openai-community/gpt2-xl", 2 * 48 * 25 * 64 * 2),  # 48 layers, 25 heads × 64
        ("tiiuae/falcon-180B", 2 * 80 * 8 * 64 * 2),  # 8 groups × 64
        ("WizardLM/WizardCoder-15B-V1.0", 2 * 40 * 1 * 128 * 2),  # StarCoder: multi-query
        ("zai-org/glm-4-9b", 2 * 40 * 2 * 128 * 2),  # 2 groups × 128
        ("stepfun-ai/step3", 2 * 61 * 1 * 256 * 2),  # one KV head × 256
        ("moonshotai/Kimi-K2-Instruct", 61 * 576 * 2),  # DeepSeek-V3's latent
        ("meituan-longcat/LongCat-Flash-Chat", 2 * 28 * 576 * 2),  # two latents in each of 28 layers
        ("mistralai/Mistral-7B-v0.3", 2 * 32 * 8 * 128 * 2),  # no window any more
        ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", 2 * 40 * 8 * 128 * 2),  # none either
        ("mistralai/Ministral-3-3B-Instruct-2512", 2 * 26 * 8 * 128 * 2),  # nested: 26 layers
        ("google/gemma-4-31B-it", 2 * 10 * 4 * 512 * 2),  # past the window: 10 full layers, 4 KV heads × 512
        ("rednote-hilab/dots.llm1.base", 2 * 62 * 32 * 128 * 2),  # multi-head, 32 × 128
        ("swiss-ai/Apertus-8B-Instruct-2509", 2 * 32 * 8 * 128 * 2),
        ("openai/whisper-large-v3", 2 * 32 * 20 * 64 * 2),  # decoder: 32 layers, 20 heads × 64
    ],
)
def test_bytes_a_token_past_every_window(name: str, per_token: int) -> None:
    model = spec(name)
    assert total(model, 100_001) - total(model, 100_000) == per_token


def test_windows_of_every_mistral_generation() -> None:
    windowed = {"Mistral-7B-v0.1", "Mistral-7B-Instruct-v0.1"}
    for name in ("v0.1", "v0.3", "Instruct-v0.1", "Instruct-v0.2", "Instruct-v0.3"):
        name = f"Mistral-7B-{name}"
        kinds = {type(state) for layer in spec(name).layers for state in layer.states}
        assert kinds == {SlidingWindow if name in windowed else FullAttention}


def test_recurrentgemma_is_multi_query() -> None:
    # 26 layers in a cycle of recurrent, recurrent, attention: 8 with attention, one KV head × 256, window 2,048.
    assert attention_bytes(spec("google/recurrentgemma-2b"), 8192) == 8 * 2 * 256 * 2048 * 2


# -- reference shapes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "context", "expected"),
    [
        ("Qwen3-72B", 1, 327_680),
        ("Qwen3-72B", 4096, 5 * 2**28),  # 1.25 GiB
        ("Qwen3-72B", 32768, 10 * 2**30),
        ("Qwen3-72B", 131072, 40 * 2**30),
        ("Qwen3.5-72B", 131072, 40 * 2**30),
        ("Llama-4-70B", 131072, 343_597_383_680),  # 320 GiB
        ("Qwen3-7B", 8192, 4 * 2**30),
    ],
)
def test_reference_shapes(name: str, context: int, expected: int) -> None:
    assert total(spec(name), context) == expected


@pytest.mark.parametrize("name", ["Qwen3-72B", "Qwen3.5-72B", "Llama-4-70B", "Qwen3-7B"])
def test_reference_shapes_say_what_they_are(name: str) -> None:
    found = catalogue.find(name)
    (note,) = found.notes
    assert f"no model {name} is published" in note
    near = note.partition("nearest published models: ")[2].split(", ")
    assert near
    assert set(near) <= set(NAMES)
    assert spec(name).max_context is None  # so that no context draws a warning
    assert found.weights is None


# -- the whole catalogue --------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_every_model_sizes(engine: Engine) -> None:
    for name in NAMES:
        model = spec(name)
        assert model.layers
        sizes = [total(model, context, engine=engine) for context in (0, 1, 2, 127, 128, 129, 4096, 131072, 2**20)]
        assert min(sizes) >= 0, name
        assert max(sizes) > 0, name


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 2**21), st.integers(1, 4096), st.sampled_from(ENGINES))
def test_linear_in_sequences_and_additive_over_layers(name: str, context: int, sequences: int, engine: Engine) -> None:
    model = spec(name)
    one = total(model, context, engine=engine)
    assert total(model, context, sequences=sequences, engine=engine) == sequences * one
    work = Workload(context, 1, encoder=100)
    assert sum(layer_bytes(layer, work, engine) for layer in model.layers) == one


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 2**21), st.integers(0, 2**21))
def test_every_state_is_monotone_in_tokens(name: str, one: int, other: int) -> None:
    fewer, more = sorted((one, other))
    for layer, _ in spec(name).groups:
        for state in layer.states:
            if state.kind == "compressor_state":  # a buffer that fills and empties
                continue
            sizes = [state.size(Workload(n, 1, 100), TWO_BYTES, IDEAL.retention) for n in (fewer, more)]
            assert 0 <= sizes[0] <= sizes[1], (name, state)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 2**21), st.sampled_from(ENGINES))
def test_a_window_never_takes_more_than_full_attention(name: str, context: int, engine: Engine) -> None:
    work = Workload(context)
    for layer, _ in spec(name).groups:
        for state in layer.states:
            size = state.size(work, TWO_BYTES, engine.retention)
            if isinstance(state, (SlidingWindow, ChunkedAttention)):
                full = FullAttention(state.kv_heads, state.key_dim, state.value_dim)
                assert size <= full.size(work, TWO_BYTES, engine.retention), (name, state)
            if isinstance(state, LatentAttention) and state.window:
                assert size <= replace(state, window=None).size(work, TWO_BYTES, engine.retention), (name, state)


def test_transformers_never_keeps_more_of_a_window() -> None:
    # It keeps window - 1 tokens: what the newest query brings is not stored.
    model = spec("mistralai/Mistral-7B-v0.1")
    assert total(model, 32768) - total(model, 32768, engine=TRANSFORMERS) == 2 * 32 * 8 * 128 * 2


def test_incomplete_models_say_what_is_missing() -> None:
    assert INCOMPLETE
    for row in INCOMPLETE:
        assert row["id"] not in NAMES
        with pytest.raises(SourceError) as caught:
            catalogue.find(row["id"])
        assert row["incomplete"]
        assert row["incomplete"] in caught.value.message
        assert caught.value.hint is not None
        assert f"{row['id']} --source hub" in caught.value.hint
        assert caught.value.exit_code is ExitCode.FAILED


def test_file_is_one_model_a_line_with_its_source() -> None:
    text = (Path(catalogue.__file__).parent.parent / "data" / "catalogue.jsonl").read_text("utf-8")
    header, *lines = text.splitlines()
    assert json.loads(header)["models"] == len(NAMES)
    assert json.loads(header)["incomplete"] == len(INCOMPLETE)
    assert len(lines) == len(NAMES) + len(INCOMPLETE)
    ids = [json.loads(line)["id"] for line in lines]
    assert len({name.lower() for name in ids}) == len(ids)
    assert all(json.loads(line)["source"] for line in lines)
    assert not re.search(r'\.\./|"/', text)


def test_listed_maximum_is_what_the_model_says() -> None:
    for row in catalogue.listing():
        assert row["max_context"] == spec(row["id"]).max_context, row["id"]
        assert row["model_type"] == spec(row["id"]).model_type


def test_rows_that_are_no_whole_file_give_no_default_as_their_maximum() -> None:
    # A LLaMA class default (2,048) is no fact about a row that leaves the field out.
    assert spec("01-ai/Yi-34B").max_context == 4096
    assert spec("01-ai/Yi-6B").max_context is None
    assert spec("lmsys/vicuna-7b-v1.5").max_context is None


# -- weights -----------------------------------------------------------------------------------


def test_weights_are_parameters_times_dtype() -> None:
    weights = catalogue.find("meta-llama/Llama-3.1-70B").weights
    assert weights is not None
    # 70,553,706,496 parameters, bf16
    assert (weights.parameters, weights.bytes) == (70_553_706_496, 141_107_412_992)
    assert weights.source == "catalogue: parameters × bf16"


def test_weights_of_quantised_models_are_not_guessed() -> None:
    for name in NAMES:
        found = catalogue.find(name)
        quantised = any(word in name.lower() for word in ("fp8", "nvfp4", "gpt-oss", "4bit"))
        if quantised or "quantization_config" in found.config:
            weights = found.weights
            assert weights is None or weights.bytes is None or weights.source.startswith("catalogue: estimate"), name
    deepseek = catalogue.find("deepseek-ai/DeepSeek-V3").weights
    assert deepseek is not None
    assert "estimate" in deepseek.source
    assert round(deepseek.bytes / 2**30, 1) == 641.3


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen2.5-72B-Instruct"),
        ("qwen/QWEN2.5-72b-instruct", "Qwen/Qwen2.5-72B-Instruct"),
        ("Qwen2.5-72B-Instruct", "Qwen/Qwen2.5-72B-Instruct"),
        ("qwen2.5-72b-instruct", "Qwen/Qwen2.5-72B-Instruct"),
        ("qwen3-72b", "Qwen3-72B"),
        ("bloom", "bigscience/bloom"),
        ("gemma-4-12b-it", "google/gemma-4-12B-it"),
    ],
)
def test_names_resolve(name: str, full: str) -> None:
    assert catalogue.full_name(name) == full
    assert catalogue.has(name)


def test_ambiguous_names_list_the_candidates() -> None:
    with pytest.raises(UsageError) as caught:
        catalogue.full_name("Grok-1")
    assert caught.value.exit_code is ExitCode.USAGE
    assert caught.value.hint is not None
    assert "hpcai-tech/grok-1, xai-org/grok-1" in caught.value.hint
    assert not catalogue.has("grok-1")
    assert catalogue.full_name("xai-org/Grok-1") == "xai-org/grok-1"


@pytest.mark.parametrize("name", ["", "/", "nobody/nothing", "x" * 5000, '","', "a\nb", "Qwen/", "é"])
def test_unknown_names_come_back_and_are_not_found(name: str) -> None:
    assert catalogue.full_name(name) == name
    assert not catalogue.has(name)
    with pytest.raises(SourceError) as caught:
        catalogue.find(name)
    assert caught.value.exit_code is ExitCode.FAILED


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("Qwen3-32", "Qwen/Qwen3-32B"),
        ("Qwen/Qwen3-32", "Qwen/Qwen3-32B"),
        ("llama3.1-70b", "meta-llama/Llama-3.1-70B"),
        ("mistral 7b", "mistralai/Mistral-7B-v0.1"),
        ("deepseek v3", "deepseek-ai/DeepSeek-V3"),
        ("gemma3 27b", "google/gemma-3-27b-it"),
        ("gpt-oss120b", "openai/gpt-oss-120b"),
        ("Qwen3-32B-Instruct", "Qwen/Qwen3-32B"),
    ],
)
def test_typos_lead_to_the_nearest_names(typo: str, meant: str) -> None:
    assert meant in catalogue.nearest(typo)[:3]
    with pytest.raises(SourceError) as caught:
        catalogue.find(typo)
    assert caught.value.hint is not None
    assert meant in caught.value.hint


def test_nearest_is_bounded_and_can_be_sized() -> None:
    near = catalogue.nearest("Llama-3", n=3)
    assert len(near) == 3
    assert set(near) <= set(NAMES)


def test_listing_takes_parts_and_globs() -> None:
    assert {row["id"] for row in catalogue.listing("JAMBA-v")} == {"ai21labs/Jamba-v0.1"}
    by_glob = {row["id"] for row in catalogue.listing("qwen3-3?b")}
    assert by_glob == {"Qwen/Qwen3-32B"}
    assert [row["id"] for row in catalogue.listing()] == NAMES
    assert catalogue.listing("no such model") == []
    assert catalogue.listing("meta-llama/Llama-3.1-70B")[0] == {
        "id": "meta-llama/Llama-3.1-70B",
        "model_type": "llama",
        "parameters": 70_553_706_496,
        "max_context": 131_072,
    }


def test_a_lookup_is_light() -> None:
    code = (
        "import sys; from kvctl.sources import catalogue as c; before = set(sys.modules); import json;"
        "seen = []; load = json.loads; json.loads = lambda text: seen.append(text) or load(text);"
        "c.find('qwen3-32b'); assert len(seen) == 1 and len(seen[0]) < 2000, seen;"
        "c.names(); assert len(seen) == 1;"
        "print(*({'difflib', 'fnmatch', 'typer', 'rich', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("", "fnmatch")  # importlib may have fnmatch


# -- parameters ---------------------------------------------------------------------------------


def test_configurations_have_the_parameters_that_are_published() -> None:
    """What follows from a configuration beside the count of its files: a field that is missing or a class's default shows.

    Counts of files have layers that draft tokens (up to 4.1% of GLM-4.7-Flash), and may be without a head (e5).
    """
    # These files have the tied head a second time: 151,936 x 1,024 and x 2,048 parameters.
    twice = {"Qwen/Qwen3-0.6B": 151_936 * 1024, "Qwen/Qwen3-1.7B": 151_936 * 2048}
    counted = 0
    for name in NAMES:
        one = spec(name)
        if one.weights is None or one.weights.parameters is None:
            continue
        try:
            tensors = parameters(one.config, "BF16", whole=one.whole)
        except KvctlError:
            continue
        counted += 1
        found = sum(tensor.elements * tensor.count for tensor in tensors) + twice.get(name, 0)
        assert 0.955 < found / one.weights.parameters < 1.02, name
    assert counted > 150


@pytest.mark.parametrize(("name", "count"), [
    # 16 layers of 64 experts of 3 x 2,048 x 1,024, of 4 x 2,048² and two norms over heads, 50,304 x 2,048 twice.
    ("allenai/OLMoE-1B-7B-0924", 6_919_161_856),
    ("ibm-granite/granite-4.0-h-micro", 3_191_396_096),
    ("rednote-hilab/dots.llm1.base", 142_774_381_696),
])  # fmt: skip
def test_parameters_to_the_unit(name: str, count: int) -> None:
    """As the Hub counts them in the files."""
    found = spec(name)
    tensors = parameters(found.config, "BF16", whole=True)
    assert sum(tensor.elements * tensor.count for tensor in tensors) == count
    assert found.weights is not None
    assert found.weights.parameters == count
