"""Attention over rows as they are stored, against a softmax in float64 over the same rows unpacked."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch and transformers")
transformers = pytest.importorskip("transformers")

from conftest import measured_cases  # noqa: E402
from test_techniques import ALL, CONFIG, MORE, ids_of, run  # noqa: E402

from kvctl.errors import ConfigError  # noqa: E402
from kvctl.formats import model_dtype  # noqa: E402
from kvctl.measure.load import Wanted, load  # noqa: E402
from kvctl.measure.passes import Passes  # noqa: E402
from kvctl.model import build_spec  # noqa: E402
from kvctl.sources import Found  # noqa: E402
from kvctl.spec import Provenance  # noqa: E402
from kvctl.techniques import attention, direct, parse  # noqa: E402
from kvctl.techniques.caches import Rows, TechniqueLayer, equipped  # noqa: E402
from kvctl.techniques.states import Compressed, applied  # noqa: E402

pytestmark = pytest.mark.engine

PACKING = [
    name for name in (*ALL, *MORE)
    if (one := parse(name)).keep is None and one.paging is None and not one.store.unrotated
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.AutoConfig.for_model(**CONFIG)).eval()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call went over."""
    found: list[int] = []
    attend = direct.attention

    def counted(query: Any, keys: Rows, values: Rows, scaling: float) -> Any:
        found.append(len(keys))
        return attend(query, keys, values, scaling)

    monkeypatch.setattr(direct, "attention", counted)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "each", "batch", "tokens"), [(2, 3, 1, 70), (4, 1, 3, 70), (1, 8, 2, 71), (2, 3, 2, 1)]
)
@pytest.mark.parametrize("technique", ["int8", "int4:residual=8:sinks=3", "int4:rotate", "kivi4:residual=8", "kivi2:group=16", "fp8", "q8_0:values=q4_0"])  # fmt: skip
def test_as_a_softmax_in_float64(technique: str, heads: int, each: int, batch: int, tokens: int, dtype: Any) -> None:
    torch.manual_seed(3)
    store = parse(technique).store
    keys, values = Rows(store.keys), Rows(store.values)
    rows = torch.randn(2, batch, heads, tokens, 64).to(dtype)
    keys.append(rows[0])
    values.append(rows[1])
    query = torch.randn(batch, heads * each, 1, 64).to(dtype)
    out = direct.attention(query, keys, values, 0.2)

    # Unpacked in fp32, whatever type the model has.
    held = [torch.cat([part.double() if not packed or not half.rotated else _turned(part) for part, packed in half.pieces()], 1)
            for half in (keys, values)]  # fmt: skip
    expected = torch.empty(batch, heads * each, 64, dtype=torch.float64)
    for sequence in range(batch):
        for head in range(heads * each):
            key, value = (half[sequence * heads + head // each] for half in held)
            weights = (key @ query[sequence, head, 0].double() * 0.2).softmax(0)
            expected[sequence, head] = weights @ value
    assert out.shape == (batch, 1, heads * each, 64)
    assert out.dtype == dtype
    step = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert torch.allclose(out[:, 0].double(), expected, atol=step)


def _turned(rows: Any) -> Any:
    """Times a Hadamard matrix of 64, written out."""
    signs = [[(-1) ** bin(row & column).count("1") for column in range(64)] for row in range(64)]
    return rows.double() @ torch.tensor(signs, dtype=torch.float64) / 8


@pytest.mark.parametrize("technique", PACKING)
def test_a_model_says_the_same_as_of_unpacked_rows(
    model: Any, technique: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = (60, 1, 1, 3, 1)
    direct_logits, cache = run(model, parse(technique), ids_of(2, sum(chunks)), chunks)
    packed = any(half.packed for layer in cache.layers for half in (layer.key_rows, layer.value_rows))
    # Three layers, and three steps of one token.
    assert calls == ([61, 61, 61, 62, 62, 62, 66, 66, 66] if packed else [])
    monkeypatch.setattr(TechniqueLayer, "_direct", False)
    logits, _ = run(model, parse(technique), ids_of(2, sum(chunks)), chunks)
    assert torch.allclose(direct_logits, logits, atol=2e-5)


def test_padding_is_not_attended(model: Any, calls: list[int]) -> None:
    ids, mask = ids_of(2, 44), torch.ones(2, 44, dtype=torch.long)
    mask[0, :16] = 0
    padded, _ = run(model, parse("int4"), ids, (40, 1, 1, 1, 1), mask)
    ids[0, :16] = 5
    others, _ = run(model, parse("int4"), ids, (40, 1, 1, 1, 1), mask)
    assert not calls
    assert torch.equal(padded[0, 16:], others[0, 16:])


def test_whoever_works_with_rows_gets_them_unpacked(model: Any, calls: list[int]) -> None:
    """A model that changes what the cache hands out, or looks at it besides."""
    technique = parse("int8")
    ids = ids_of(1, 42)
    plain, _ = run(model, technique, ids, (40, 1, 1))
    seen = len(calls)
    cache = transformers.DynamicCache(config=model.config)
    equipped(cache, model, technique, range(len(cache.layers)))
    for layer in cache.layers:
        layer.update = lambda *args, update=layer.update, **kwargs: tuple(part * 1 for part in update(*args, **kwargs))
    attention.install(model, technique)
    try:
        with torch.inference_mode():
            out = [
                model(input_ids=ids[:, at:end], cache=cache, use_cache=True).logits
                for at, end in ((0, 40), (40, 41), (41, 42))
            ]
    finally:
        attention.remove(model)
    assert len(calls) == seen
    assert torch.allclose(torch.cat(out, 1), plain, atol=2e-5)


def test_rows_are_what_they_would_have_been(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    technique = parse("int4:residual=4:sinks=2")
    _, cache = run(model, technique, ids_of(2, 40), (40,))
    new = torch.randn(2, 2, 2, 1, 64)
    monkeypatch.setattr(attention, "serves", lambda model: True)
    keys, values = cache.layers[0].update(new[0], new[1])
    assert isinstance(keys, direct.Stored)
    assert keys.shape == (2, 2, 41, 64)
    assert torch.equal(keys, cache.layers[0].key_rows.read())
    assert torch.equal(values.transpose(1, 2)[:, -1], new[1][:, :, 0])
    assert type(keys[:, :, 3:]) is torch.Tensor
    # Where torch does not ask whose tensors it works with.
    assert torch.equal(torch.vmap(lambda rows: rows * 1.0)(values), cache.layers[0].value_rows.read())
    cache.layers[0].update(new[0], new[1])
    with pytest.raises(RuntimeError, match="41 tokens were kept, and 42"):
        values.rows()


@pytest.mark.parametrize("name", [
    "llama--mqa", "sp--whisper", "gpt2",
    "gemma3n_text", "gemma4_text--shared",  # later layers attend to the rows of earlier ones
    "diffllama",  # its values are split before they are attended to
    "doge",  # a mask is made of its values
])  # fmt: skip
def test_architectures_say_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, spec, indexes = small(name)
    ids = torch.arange(10, 38)[None]
    found = []
    for able in (TechniqueLayer._direct, False):
        monkeypatch.setattr(TechniqueLayer, "_direct", able)
        passes = Passes(loaded.model, loaded.device, encoder_tokens=16, layers=len(spec.layers))
        passes.use(parse("int8"), indexes, spec)
        with torch.inference_mode():
            passes.begin(1)
            found.append(
                torch.stack([passes.prefill(ids[:, :24]), *(passes.feed(ids[:, at : at + 1]) for at in range(24, 28))])
            )
        passes.drop()
    assert torch.allclose(found[0], found[1], atol=1e-4, rtol=1e-4)


def small(name: str) -> Any:
    """A small random model, and the layers that a technique works on."""
    case = next(case for case in measured_cases("small_models.jsonl.gz") if case["name"] == name)
    spec = build_spec(Found("model", case["config"], Provenance("local", "model")))
    dtype = model_dtype("float32")
    assert dtype is not None
    changed = applied(spec, parse("int8"), "transformers")
    indexes = tuple(
        at for at, layer in enumerate(changed.layers) if any(isinstance(state, Compressed) for state in layer.states)
    )
    return load(spec, Wanted(random=True), dtype), spec, indexes


def test_autocast_changes_nothing(calls: list[int]) -> None:
    """Closer to float64 than bf16 products would be, and scales of fp16 are joined as they are."""
    torch.manual_seed(3)
    store = parse("kivi4:residual=8").store
    keys, values = Rows(store.keys), Rows(store.values)
    rows, query = torch.randn(2, 1, 2, 70, 64).bfloat16(), torch.randn(1, 4, 1, 64).bfloat16()
    keys.append(rows[0])
    values.append(rows[1])
    plain = direct.attention(query, keys, values, 0.2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(direct.attention(query, keys, values, 0.2), plain)


@pytest.mark.parametrize("technique", ["int8", "kivi4:residual=8", "int8+streaming-llm:32"])
def test_a_model_under_autocast(model: Any, technique: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        logits, _ = run(model, parse(technique), ids_of(1, 80), (70, *[1] * 10))
    assert bool(torch.isfinite(logits).all())


@pytest.mark.parametrize("technique", ["int8", "h2o:16"])
def test_a_copy_of_a_cache_has_no_copy_of_the_model(model: Any, technique: str) -> None:
    _, cache = run(model, parse(technique), ids_of(1, 40), (40,))
    import copy

    before = {id(module) for module in model.modules()}
    other = copy.deepcopy(cache)
    held = [value for layer in other.layers for value in vars(layer).values() if isinstance(value, torch.nn.Module)]
    assert all(id(value) in before for value in held)
    first, second = [run_on(model, parse(technique), one) for one in (cache, other)]
    assert torch.equal(first, second)


def run_on(model: Any, technique: Any, cache: Any) -> Any:
    """The next token's logits."""
    attention.install(model, technique)
    try:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([[7]]), past_key_values=cache, use_cache=True).logits
    finally:
        attention.remove(model)


def test_sequences_are_repeated_and_chosen(model: Any) -> None:
    _, cache = run(model, parse("int4:residual=4"), ids_of(2, 40), (40,))
    layer = cache.layers[1]
    rows = layer.key_rows.read()
    cache.batch_repeat_interleave(3)
    assert torch.equal(layer.key_rows.read(), rows.repeat_interleave(3, 0))
    cache.batch_select_indices(torch.tensor([4, 0]))
    assert torch.equal(layer.key_rows.read(), rows.flip(0))
    with pytest.raises(ConfigError, match="cannot be cropped"):
        cache.crop(-1)


def test_threads_do_not_take_each_others_attention(model: Any) -> None:
    """Two evictions, each in a thread: each gives what it gives alone."""
    from concurrent.futures import ThreadPoolExecutor

    torch.manual_seed(1)
    other = transformers.LlamaForCausalLM(transformers.AutoConfig.for_model(**CONFIG)).eval()
    technique, ids = parse("h2o:16"), ids_of(1, 60)
    alone = [run(one, technique, ids, (40, *[1] * 20))[0] for one in (model, other)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(lambda one: run(one, technique, ids, (40, *[1] * 20))[0], (model, other)))
    assert all(torch.equal(one, two) for one, two in zip(alone, together, strict=True))


def test_a_model_with_another_attention_gets_plain_rows(calls: list[int]) -> None:
    config = transformers.AutoConfig.for_model(**CONFIG)
    torch.manual_seed(0)
    eager = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    logits, cache = run(eager, parse("int8"), ids_of(1, 42), (40, 1, 1))
    new = torch.randn(2, 1, 2, 1, 64)
    assert type(cache.layers[0].update(new[0], new[1])[0]) is torch.Tensor
    assert not calls
    assert bool(torch.isfinite(logits).all())
