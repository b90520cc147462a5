"""Techniques on small models of every architecture: bytes as predicted, or a refusal that says why; never another number."""

from __future__ import annotations

import gc

import pytest
from conftest import measured_cases

from kvctl.errors import ConfigError, KvctlError
from kvctl.formats import model_dtype
from kvctl.model import build_spec
from kvctl.sources import Found
from kvctl.spec import Provenance

torch = pytest.importorskip("torch", reason="needs torch and transformers")
pytest.importorskip("transformers")

from kvctl.measure.assess import assess  # noqa: E402
from kvctl.measure.assessed import AssessAsked, Assessed  # noqa: E402
from kvctl.measure.load import Wanted, load  # noqa: E402
from kvctl.measure.points import texts  # noqa: E402
from kvctl.measure.run import Now  # noqa: E402
from kvctl.techniques import parse  # noqa: E402
from kvctl.techniques.states import applied  # noqa: E402

pytestmark = pytest.mark.engine
gc.collect()
gc.freeze()

MODELS = {case["name"]: case for case in measured_cases("small_models.jsonl.gz")}
TECHNIQUES = ("int8", "h2o:16", "streaming-llm:12")
SAMPLE = {
    "llama--mqa": (None, None, None),
    "gemma3_text": (None, None, None),  # its windows are left as they are
    "qwen3_next": (None, None, None),  # and its recurrent states
    "falcon": (None, "does not pass through", "cannot be turned to other positions"),
    "bloom": (None, "needs a model that runs with sdpa", "cannot be turned to other positions"),
    "sp--whisper": (None, None, "cannot be turned to other positions"),  # beside the cross attention of its decoder
    "sp--vibevoice": (None, None, None),  # a part of it knows no sdpa
    "deepseek_v3": ("keeps latents",) * 3,
    "mamba2": ("its cache has none",) * 3,
    "falcon_h1": (None, None, None),  # attention and a recurrence in every layer
    "zaya": (None, None, "cannot be turned to other positions"),
}


def assessed(name: str, technique: str) -> Assessed:
    spec = build_spec(Found("model", MODELS[name]["config"], Provenance("local", "model")))
    dtype = model_dtype("float32")
    assert dtype is not None
    torch.set_num_threads(1)
    loaded = load(spec, Wanted(random=True), dtype)
    vocabulary = loaded.model.config.get_text_config(decoder=True).vocab_size
    asked = AssessAsked(24, 3, 1)
    found = assess(loaded, [parse(technique)], asked, dtype, texts(None, vocabulary, 0), None, Now(), lambda row: None)
    return found.rows[1]


@pytest.mark.parametrize("name", SAMPLE)
def test_bytes_or_a_reason(name: str) -> None:
    for technique, reason in zip(TECHNIQUES, SAMPLE[name], strict=True):
        if reason is not None:
            with pytest.raises(KvctlError, match=reason):
                assessed(name, technique)
            continue
        row = assessed(name, technique)
        assert row.agrees is True, row
        assert row.ratio is not None
        assert row.ratio > 1


def test_indexers_are_refused_by_the_configuration() -> None:
    """transformers keeps what an indexer picks from in a layer of its own kind: said before a model is built."""
    spec = build_spec(Found("model", MODELS["qwen4_exp"]["config"], Provenance("local", "model")))
    with pytest.raises(
        ConfigError, match="works on keys and values of full attention, and its layers keep an indexer's"
    ):
        applied(spec, parse("int8"), "transformers")
    applied(spec, parse("int8"), "")  # what the architecture needs is known


@pytest.mark.parametrize("technique", ["h2o:1000", "paged:block=4"])
@pytest.mark.parametrize("name", ["falcon_h1", "zamba2", "zaya"])
def test_states_beside_keys_and_values_are_transformers_own(name: str, technique: str) -> None:
    """A technique that keeps everything changes nothing: the same logits, by beams that change places, and once more after a reset."""
    from transformers import DynamicCache, GenerationConfig

    from kvctl.techniques import attention
    from kvctl.techniques.caches import equipped

    torch.manual_seed(0)
    torch.set_num_threads(1)
    spec = build_spec(Found("model", MODELS[name]["config"], Provenance("local", "model")))
    dtype = model_dtype("float32")
    assert dtype is not None
    model = load(spec, Wanted(random=True), dtype).model
    ids = torch.randint(4, 60, (2, 9))
    beams = GenerationConfig(max_new_tokens=8, num_beams=3, do_sample=False, output_scores=True, pad_token_id=0,
                             return_dict_in_generate=True, eos_token_id=None)  # fmt: skip
    plain = model.generate(ids, generation_config=beams, past_key_values=DynamicCache(config=model.config))
    made = parse(technique)
    cache = DynamicCache(config=model.config)
    indexes = [at for at, layer in enumerate(cache.layers) if layer.__class__.__name__.endswith("FullAttentionLayer")]
    assert indexes
    equipped(cache, model, made, indexes)
    attention.install(model, made)
    try:
        for _ in range(2):
            found = model.generate(ids, generation_config=beams, past_key_values=cache)
            assert torch.equal(found.sequences, plain.sequences)
            torch.testing.assert_close(found.scores, plain.scores, rtol=1e-4, atol=1e-4)
            cache.reset()
    finally:
        attention.remove(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name not in SAMPLE])
def test_bytes_or_a_reason_for_every_architecture(name: str) -> None:
    for technique in TECHNIQUES:
        try:
            row = assessed(name, technique)
        except KvctlError as error:
            print(f"{technique}: {error.message}")
        else:
            assert row.agrees is True, row
