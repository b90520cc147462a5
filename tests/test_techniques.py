"""Techniques: what is predicted against what real caches hold, and what they hand out.

Models are small and random; the independent values are tensors of the cache itself (walked), plain caches of transformers, and
arithmetic in comments.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome

from kvctl.engines import TRANSFORMERS
from kvctl.errors import ConfigError, UsageError
from kvctl.formats import model_dtype
from kvctl.model import build_spec
from kvctl.size import SizePlan, size
from kvctl.sources import Found
from kvctl.spec import ModelSpec, Provenance
from kvctl.techniques import TABLE, Technique, parse, parse_list
from kvctl.techniques.states import applied

Run = Callable[..., Outcome]

LAYERS, HEADS, DIM = 3, 2, 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": DIM, "vocab_size": 128,
    "max_position_embeddings": 4096, "torch_dtype": "float32",
}  # fmt: skip


def spec_of(**changes: Any) -> ModelSpec:
    return build_spec(Found("model", CONFIG | changes, Provenance("local", "model")))


def predicted(
    technique: str, tokens: int, *, dtype: str = "float32", generated: int = 0, batch: int = 1, **changes: Any
) -> int:
    spec = applied(spec_of(**changes), parse(technique), "transformers")
    return size(
        spec, tokens, SizePlan(TRANSFORMERS, sequences=batch, generated=generated, dtype=model_dtype(dtype))
    ).kv_bytes


# -- names ------------------------------------------------------------------------------------------


def test_a_technique_is_parts_and_their_options() -> None:
    technique = parse("int4:group=32:residual=64+streaming-llm:0.25:sinks=8")  # of few tokens, 72 stay
    assert technique.store.keys.codec is not None
    assert (technique.store.keys.residual, technique.store.values.residual) == (64, 64)
    assert technique.keep is not None
    assert technique.keep.sinks == 8
    assert [kind.name for kind in technique.kinds] == ["int4", "streaming-llm"]


def test_all_may_stand_in_a_list() -> None:
    found = {one.name: one.of_all for one in parse_list(["all,hf:quanto-int4", "int8"])}
    assert found["int4"]
    assert not found["int8"]  # asked for by name too
    assert not found["hf:quanto-int4"]
    assert "gqa" not in found


def test_size_leaves_out_what_a_model_cannot_take(kvctl: Run) -> None:
    # phi-2: heads of 80 elements are no whole blocks of 32.
    outcome = kvctl("size", "phi-2", "--ctx", "1k", "--technique", "all")
    assert outcome.code == 0
    assert "mxfp4 is left out" in outcome.err
    assert "int8" in outcome.out


def test_commas_make_a_list_to_compare() -> None:
    assert [one.name for one in parse_list(["int8,int4", "int8", "int4+streaming-llm:512"])] == [
        "int8", "int4", "int4+streaming-llm:512",
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "part"), [
    ("int3", "unknown 'int3'"), ("gqa:x", "no number of KV heads"), ("int4:residual=-1", "no whole number"), ("int4:groups=32", "'groups' is not known here"), ("int4:sim", "'sim' is not known"),
    ("int4+int8", "two parts say how"), ("streaming-llm:512+streaming-llm:256", "both say which tokens stay"),
    ("streaming-llm:1.5", "is no share"), ("streaming-llm:4", "leaves nothing beside 4 sinks"), ("streaming-llm:x", "not a number"),
    ("int4:residual=16+streaming-llm:16", "is less than 4 first and 16 newest"), ("kivi4+streaming-llm", "packs 32 tokens together"), ("int4:sinks=8+streaming-llm", "the first 8 tokens"),
    ("int4:rope=before+streaming-llm", "before their rotary embedding"), ("int4:values=int3", "is no format"), ("", "unknown ''"),
    ("int4:group=32:group=64", "said twice"), ("int8:rope=never", "is not known"),
    ("paged+int8", "paged keeps all tokens as they are"), ("h2o+paged", "paged keeps all tokens"), ("paged+paged", "whole blocks"),
    ("paged:block=0", "too small"), ("paged:block=8k", "out of range"), ("paged:32", "'32' is not known"),
], ids=lambda value: value[:30])  # fmt: skip
def test_what_is_no_technique(text: str, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert part in caught.value.message


# -- prediction by hand --------------------------------------------------------------------------------


@pytest.mark.parametrize(("technique", "tokens", "each"), [
    # Keys and values, 2 heads of 64: 68 bytes per 64 elements (8-bit, 16-bit scale and minimum).
    ("int8", 100, 2 * 2 * 68 * 100),
    ("int4", 100, 2 * 2 * 36 * 100),
    ("int4:sym", 100, 2 * 2 * 34 * 100),
    # The newest 10 in fp32.
    ("int4:residual=10", 100, 2 * 2 * (36 * 90 + 64 * 4 * 10)),
    ("int4:residual=200", 100, 2 * 2 * 64 * 4 * 100),
    # 100 − 32 = 68 tokens are old enough: 64 of the keys are two groups of 32, each channel with a scale and a minimum.
    ("kivi4:residual=32", 100, 2 * (64 * 32 + 2 * 64 * 4 + 36 * 64 * 4) + 2 * (68 * (32 + 2 * 4) + 32 * 64 * 4)),
    ("q8_0", 100, 2 * 2 * 2 * 34 * 100),
    ("fp8", 100, 2 * 2 * 64 * 100),
    ("int4:values=fp8", 100, 2 * (36 + 64) * 100),
    # The first 4 and the newest 12, whatever the length; a quarter of the tokens.
    ("streaming-llm:16", 100, 2 * 2 * 64 * 4 * 16),
    ("streaming-llm:0.25", 101, 2 * 2 * 64 * 4 * 26),
    ("int8+streaming-llm:16", 100, 2 * 2 * 68 * 16),
])  # fmt: skip
def test_bytes_by_hand(technique: str, tokens: int, each: int) -> None:
    assert predicted(technique, tokens) == LAYERS * each
    assert predicted(technique, tokens, batch=3) == 3 * LAYERS * each


@pytest.mark.parametrize("batch", [1, 3])
def test_a_scale_of_the_tensor_is_there_once(batch: int) -> None:
    """4 bytes for the keys and 4 for the values of a layer, whatever the batch, from the first packed token on."""
    assert predicted("fp8:scaled", 100, batch=batch) == LAYERS * (batch * 2 * 2 * 64 * 100 + 8)
    assert predicted("fp8:scaled:values=int4", 100, batch=batch) == LAYERS * (batch * 2 * (64 + 36) * 100 + 4)
    assert predicted("fp8:scaled:residual=100", 100, batch=batch) == LAYERS * batch * 2 * 2 * 64 * 4 * 100
    assert predicted("fp8:scaled", 0, batch=batch) == 0


def test_layers_that_no_technique_works_on() -> None:
    with pytest.raises(ConfigError, match="int4 works on keys and values of full attention"):
        applied(
            spec_of(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=32),
            parse("int4"),
            "transformers",
        )


# -- real caches ------------------------------------------------------------------------------------------

ALL = [kind.name for kind in TABLE if kind.in_all]  # gqa needs a number: test_convert.py
MORE = ["fp8:scaled", "fp8_e5m2:scaled:residual=5:sinks=2", "fp8:scaled:values=int4", "fp8:scaled:residual=12+h2o:12:recent=4", "fp8:scaled+streaming-llm:16",
        "int4:group=32", "int8:group=48", "int4:sym", "int4:residual=16:sinks=2", "kivi4:residual=8", "kivi2:group=16:residual=0", "int4:rotate",
        "int4:rope=before", "q8_0:values=q4_0", "streaming-llm:16", "int8+streaming-llm:0.5", "int4:residual=4:sinks=2+streaming-llm:24",
        "streaming-llm:16:positions=text", "h2o:16", "h2o:16:recent=4:sinks=2:group=max", "int8:residual=4:sinks=2+h2o:0.5:sinks=2", "tova:16:heads=group:sinks=2", "snapkv:0.5:window=4:pool=max", "snapkv:40", "int8:residual=5+snapkv:0.5:window=4",
        "pyramidkv:0.5:window=4", "pyramidkv:24:window=4:beta=3", "int4:sinks=2+pyramidkv:24:window=4:sinks=2", "scissorhands:16", "scissorhands:21:drop=5:history=3:sinks=2", "int8:residual=5:sinks=1+scissorhands:32:sinks=1", "int8:residual=5+expected-attention:20", "q8_0+knorm:0.5", "int4:residual=7+random:0.5", "int8+window:16"]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    torch = pytest.importorskip("torch", reason="needs torch and transformers")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**CONFIG)
    return transformers.LlamaForCausalLM(config).eval()


def run(
    model: Any, technique: Technique | None, ids: Any, chunks: tuple[int, ...], mask: Any = None
) -> tuple[Any, Any]:
    """Logits of all tokens, and the cache."""
    import torch
    from transformers import DynamicCache

    from kvctl.techniques import attention
    from kvctl.techniques.caches import equipped

    cache, out, at = DynamicCache(config=model.config), [], 0
    if technique is not None:
        equipped(cache, model, technique, range(LAYERS))
        attention.install(model, technique)
    try:
        with torch.inference_mode():
            for count in chunks:
                given = {} if mask is None else {"attention_mask": mask[:, : at + count]}
                out.append(model(input_ids=ids[:, at : at + count], cache=cache, use_cache=True, **given).logits)
                at += count
    finally:
        attention.remove(model)
    return torch.cat(out, 1), cache


def ids_of(batch: int, tokens: int) -> Any:
    import torch

    return torch.randint(0, CONFIG["vocab_size"], (batch, tokens), generator=torch.Generator().manual_seed(1))


CHUNKS = {"whole": (75,), "pieces": (20, 30, 25), "steps": (40, *[1] * 35), "one": (1,), "singles": (1,) * 9}


@pytest.mark.engine
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("technique", [*ALL, *MORE])
def test_a_real_cache_holds_what_is_predicted(model: Any, technique: str, chunks: tuple[int, ...]) -> None:
    import torch

    from kvctl.measure.cache import walk

    ones = len(chunks) - next((index for index in reversed(range(len(chunks))) if chunks[index] > 1), 0) - 1
    logits, cache = run(model, parse(technique), ids_of(2, sum(chunks)), chunks)
    assert walk(cache).logical_bytes == predicted(technique, sum(chunks), generated=ones, batch=2)
    assert bool(torch.isfinite(logits).all())
    assert cache.get_seq_length() == sum(chunks)


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "technique",
    [
        "int4",
        "kivi4:residual=8",
        "fp8",
        "int8:residual=5+streaming-llm:32",
        "h2o:32",
        "scissorhands:32",
        "tova:32",
        "expected-attention:32",
        "q8_0+random:32",
    ],
)
def test_half_precision(technique: str, dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch and transformers")
    transformers = pytest.importorskip("transformers")
    from kvctl.measure.cache import walk

    config = transformers.AutoConfig.for_model(**CONFIG)
    half = transformers.LlamaForCausalLM(config).eval().to(getattr(torch, dtype))
    logits, cache = run(half, parse(technique), ids_of(1, 70), (60, *[1] * 10))
    assert logits.dtype == getattr(torch, dtype)
    assert walk(cache).logical_bytes == predicted(technique, 70, dtype=dtype, generated=10)


@pytest.mark.engine
@pytest.mark.parametrize("chunks", [(40,), (20, 20), (30, *[1] * 10)], ids=str)
@pytest.mark.parametrize("technique", ["streaming-llm:4096", "int4:residual=100", "streaming-llm:1.0", "streaming-llm:1.0:positions=text",
                                       "h2o:1.0", "tova:1.0", "scissorhands:64", "expected-attention:1.0", "snapkv:1.0", "pyramidkv:1.0", "knorm:1.0", "window:1.0", "random:1.0", "paged", "paged:block=7", "paged:block=1"])  # fmt: skip
def test_without_compression_nothing_changes(model: Any, technique: str, chunks: tuple[int, ...]) -> None:
    """Padding on the left included."""
    import torch

    ids = ids_of(2, 40)
    mask = torch.ones(2, 40, dtype=torch.long)
    for pads in (0, 7):
        mask[0, :pads] = 0
        plain, _ = run(model, None, ids, chunks, mask if pads else None)
        ours, _ = run(model, parse(technique), ids, chunks, mask if pads else None)
        assert torch.equal(plain[0, pads:], ours[0, pads:])
        assert torch.equal(plain[1], ours[1])


@pytest.mark.engine
def test_sequences_of_a_batch_do_not_see_each_other(model: Any) -> None:
    """Two texts of unlike lengths, padded on the left, give what each gives alone."""
    import torch

    ids = ids_of(2, 40)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[0, :16] = 0
    for technique in ("int4", "kivi4:residual=8", "int8:rotate"):
        together, _ = run(model, parse(technique), ids, (40,), mask)
        alone, _ = run(model, parse(technique), ids[1:], (40,))
        assert torch.allclose(together[1], alone[0], atol=1e-5)


@pytest.mark.engine
def test_beams_move_together(model: Any) -> None:
    """Reordered, and read again without being packed anew."""
    import torch

    _, cache = run(model, parse("int4:residual=4:sinks=2"), ids_of(2, 40), (40,))
    layer = cache.layers[0]
    before = layer.key_rows.read()
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(layer.key_rows.read(), before.flip(0))


@pytest.mark.engine
def test_a_reset_cache_knows_nothing(model: Any) -> None:
    import torch

    technique = parse("int8+streaming-llm:16")
    _, cache = run(model, technique, ids_of(1, 40), (40,))
    cache.reset()
    assert cache.get_seq_length() == 0
    assert len(cache.layers[0].key_rows) == 0
    assert torch.equal(run(model, technique, ids_of(1, 40), (40,))[0], run(model, technique, ids_of(1, 40), (40,))[0])


@pytest.mark.engine
@pytest.mark.parametrize("positions", ["cache", "text"])
def test_streaming_llm_against_its_definition(model: Any, positions: str) -> None:
    """One query over a plain cache from which all but the first and the newest tokens were taken, each key at its place."""
    import torch
    from transformers import DynamicCache
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    sinks, recent, prompt = 4, 12, 40
    ids = ids_of(1, prompt + 1)
    ours, _ = run(model, parse(f"streaming-llm:{sinks + recent}:sinks={sinks}:positions={positions}"), ids, (prompt, 1))

    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=ids[:, :prompt], cache=cache, use_cache=True)
        kept = [*range(sinks), *range(prompt - recent, prompt)]
        for layer in cache.layers:
            keys, values = layer.keys[:, :, kept], layer.values[:, :, kept]
            if positions == "cache":
                # Back to before the rotary embedding, and to the place in the cache.
                embedding = model.model.rotary_emb
                cos, sin = embedding(keys, torch.tensor([kept]))
                bare = apply_rotary_pos_emb(keys, keys, cos, -sin)[1]
                cos, sin = embedding(keys, torch.arange(len(kept))[None])
                keys = apply_rotary_pos_emb(bare, bare, cos, sin)[1]
            layer.keys, layer.values = keys, values
        place = len(kept) if positions == "cache" else prompt
        plain = model(
            input_ids=ids[:, prompt:], cache=cache, use_cache=True, position_ids=torch.tensor([[place]])
        ).logits
    assert torch.allclose(ours[:, -1], plain[:, -1], atol=1e-4)


@pytest.mark.engine
@pytest.mark.parametrize("chunks", [(40, 1, 1), (24, *[1] * 18), (24, 10, 8)], ids=["prompt", "steps", "pieces"])
@pytest.mark.parametrize("technique", ["streaming-llm:16", "streaming-llm:16:sinks=1", "streaming-llm:16:positions=text", "int8:residual=5+streaming-llm:16",
                                       "int8:sinks=2+streaming-llm:20"])  # fmt: skip
def test_first_tokens_are_none_of_the_padding(model: Any, technique: str, chunks: tuple[int, ...]) -> None:
    """Each of a ragged batch as it is alone: its own first tokens stay, at their places before its newest."""
    import torch

    ids, pads = ids_of(3, 42), (15, 0, 21)
    mask = torch.ones(3, 42, dtype=torch.long)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    together, _ = run(model, parse(technique), ids, chunks, mask)
    for row, count in enumerate(pads):
        if "sinks=2" in technique and count:
            continue  # the places of unpacked tokens hold padding: it has room for fewer than alone
        own = torch.stack([ids[row, count:]])
        alone, _ = run(model, parse(technique), own, (chunks[0] - count, *chunks[1:]))
        # Behind padding keys are turned to other positions, and rounded to others of 256 steps.
        assert torch.allclose(together[row, count:], alone[0], atol=2e-3 if "int8" in technique else 2e-5)


@pytest.mark.engine
def test_padded_sequences_move_with_their_first_tokens(model: Any) -> None:
    """Two of a batch change places in the middle, and go on as they would have."""
    import torch
    from transformers import DynamicCache

    from kvctl.techniques import attention
    from kvctl.techniques.caches import equipped

    technique, ids, mask = parse("streaming-llm:16"), ids_of(2, 43), torch.ones(2, 43, dtype=torch.long)
    mask[0, :15] = 0
    straight, _ = run(model, technique, ids, (42, 1), mask)
    cache = equipped(DynamicCache(config=model.config), model, technique, range(LAYERS))
    attention.install(model, technique.name)
    try:
        with torch.inference_mode():
            model(input_ids=ids[:, :42], cache=cache, use_cache=True, attention_mask=mask[:, :42])
            cache.reorder_cache(torch.tensor([1, 0]))
            last = model(input_ids=ids.flip(0)[:, 42:], cache=cache, use_cache=True, attention_mask=mask.flip(0)).logits
    finally:
        attention.remove(model)
    assert torch.allclose(last.flip(0)[:, 0], straight[:, 42], atol=2e-5)


# -- kvctl size ---------------------------------------------------------------------------------------------


def test_size_says_what_a_technique_leaves(kvctl: Run) -> None:
    # Qwen3-8B: 36 layers of 8 KV heads of 128; 4-bit codes and 4 bytes for every 64 elements, keys and values.
    document = kvctl("size", "Qwen3-8B", "--ctx", "32k", "--technique", "int4", "--json").json
    (result,) = document["results"]
    assert result["kv_bytes"] == 36 * 2 * 8 * 2 * (32 + 4) * 32768
    assert (result["technique"], result["k_dtype"]) == ("int4", "int4")


def test_a_scale_for_each_head(kvctl: Run) -> None:
    """Of 128 elements, for which the usual group is half: 64 bytes of codes and 4, beside 64 and 8."""
    document = kvctl("size", "Qwen3-8B", "--ctx", "32k", "--technique", "int4,int4:group=0", "--json").json
    assert [one["kv_bytes"] for one in document["results"][1:]] == [36 * 2 * 8 * each * 32768 for each in (72, 68)]
    assert "`group=0`" in (Path(__file__).parents[1] / "docs" / "techniques.md").read_text("utf-8")
    for command in ("size", "profile"):
        assert "int4:group=0" in kvctl(command, "--help").out


def test_a_measured_scale_is_not_called_1(kvctl: Run) -> None:
    asked = "size", "Qwen3-8B", "--ctx", "1k", "--json", "--technique"
    assert kvctl(*asked, "fp8").json["results"][0]["k_scheme"] == "8-bit floats (e4m3), scale 1"
    assert (
        kvctl(*asked, "fp8:scaled").json["results"][0]["k_scheme"] == "8-bit floats (e4m3), one measured scale a layer"
    )


def test_several_stand_beside_the_plain_cache(kvctl: Run) -> None:
    document = kvctl("size", "Qwen3-8B", "--ctx", "32k", "--technique", "int8,streaming-llm:1k", "--json").json
    each = 36 * 8 * 128 * 2 * 2
    assert [(one["technique"], one["kv_bytes"]) for one in document["results"]] == [
        ("plain", each * 32768), ("int8", each * 32768 * 68 // 128), ("streaming-llm:1k", each * 1024),
    ]  # fmt: skip


@pytest.mark.parametrize(("argv", "part"), [
    (["--engine", "vllm"], "a cache of kvctl's own, which vllm does not have"),
    (["--engine", "all"], "--technique is about one engine"),
    (["--kv-dtype", "fp8"], "without --kv-dtype"),
    (["--engine", "transformers", "--cache-implementation", "static"], "which transformers does not have"),
    (["--explain"], "--explain writes down formulas of plain caches"),
])  # fmt: skip
def test_what_does_not_go_with_a_technique(kvctl: Run, argv: list[str], part: str) -> None:
    outcome = kvctl("size", "Qwen3-8B", "--technique", "int4", *argv)
    assert part in outcome.err
    assert outcome.code == 2


def test_the_docs_name_every_technique() -> None:
    text = (Path(__file__).parents[1] / "docs" / "techniques.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows[: len(TABLE)] == [f"| `{kind.name}` | {kind.what} | {kind.paper} |" for kind in TABLE]
