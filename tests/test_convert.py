"""KV heads of a model, joined: bytes by hand, weights against loops in double precision, and logits against a model that was
built with fewer heads from the first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import Outcome, measured_cases

from kvctl.engines import TRANSFORMERS
from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.formats import FP32
from kvctl.model import build_spec
from kvctl.size import SizePlan, size
from kvctl.sources import Found
from kvctl.spec import Attention, CrossAttention, ModelSpec, Provenance
from kvctl.techniques import parse, parse_list
from kvctl.techniques.states import applied

Run = Callable[..., Outcome]

QUERY, HEADS, DIM, LAYERS, HIDDEN = 8, 4, 16, 3, 48
CONFIG = {
    "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": QUERY,
    "num_key_value_heads": HEADS, "head_dim": DIM, "vocab_size": 96, "max_position_embeddings": 512,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama with biases": {"model_type": "llama", "attention_bias": True},
    "qwen2, whose keys and values have biases": {"model_type": "qwen2"},
    "qwen3, whose heads are normed": {"model_type": "qwen3"},
    "gemma3, with windows": {"model_type": "gemma3_text", "sliding_window": 16,
                             "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gpt_oss, with sinks": {"model_type": "gpt_oss", "sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
}  # fmt: skip


@pytest.fixture(autouse=True)
def packages(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("engine"):
        pytest.importorskip("torch", reason="needs torch and transformers")
        pytest.importorskip("transformers")


def spec_of(**fields: Any) -> ModelSpec:
    return build_spec(Found("model", CONFIG | {"torch_dtype": "float32"} | fields, Provenance("local", "model")))


# -- names and bytes ----------------------------------------------------------------------------------


def test_bytes_by_hand(kvctl: Run) -> None:
    # Llama 2 7B: 32 layers of 32 heads of 128; one head of 8-bit codes takes 2 · 68 bytes a token, of keys and of values.
    found = kvctl("size", "Llama-2-7b-hf", "--ctx", "4k", "--technique", "gqa:8,gqa:8+int8,int8+gqa:1", "--json")
    head = 32 * 2 * 128 * 2 * 4096
    assert [(one["technique"], one["kv_bytes"]) for one in found.json["results"]] == [
        ("plain", 32 * head), ("gqa:8", 8 * head), ("gqa:8+int8", 8 * head * 68 // 128), ("int8+gqa:1", head * 68 // 128),
    ]  # fmt: skip
    assert "arXiv 2305.13245" in found.err


def test_windows_have_fewer_heads_too(kvctl: Run) -> None:
    # Gemma 3 27B: 10 full layers, 52 that slide over 1,024 tokens (of which transformers keeps 1,023), heads of 128.
    asked = kvctl(
        "size", "gemma-3-27b-it", "--ctx", "32k", "--technique", "gqa:4", "--engine", "transformers", "--json"
    )
    (result,) = asked.json["results"]
    assert result["kv_bytes"] == 4 * 2 * 128 * 2 * (10 * 32768 + 52 * 1023)


def test_all_leaves_the_model_as_it_is() -> None:
    assert not any(one.convert for one in parse_list(["all"]))


@pytest.mark.parametrize(("text", "part"), [
    ("gqa", "how many KV heads are to stay"), ("gqa:0", "no number of KV heads"), ("gqa:x", "no number of KV heads"), ("gqa:1:2", "'2' is not known"),
    ("gqa:1+gqa:2", "both join KV heads"), ("gqa:1+int4+int8", "two parts say how"),
])  # fmt: skip
def test_what_is_no_technique(text: str, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert part in caught.value.message


def test_heads_that_cannot_be_joined() -> None:
    with pytest.raises(UsageError, match="has 4 KV heads, and 3 does not divide them"):
        applied(spec_of(model_type="llama"), parse("gqa:3"), "transformers")
    with pytest.raises(UsageError, match="has 4 KV heads, and 8 does not divide them"):  # more is no average
        applied(spec_of(model_type="llama"), parse("gqa:8"), "transformers")
    latent = spec_of(model_type="deepseek_v3", kv_lora_rank=32, qk_rope_head_dim=8)
    with pytest.raises(ConfigError, match="keeps latents"):
        applied(latent, parse("gqa:1"), "transformers")
    with pytest.raises(ConfigError, match="its cache has none"):
        applied(spec_of(model_type="mamba", state_size=8), parse("gqa:1"), "transformers")


# -- real models --------------------------------------------------------------------------------------


def built(fields: dict[str, Any], seed: int = 0) -> Any:
    """A model whose weights, biases and norms are all random."""
    torch = pytest.importorskip("torch", reason="needs torch and transformers")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**CONFIG | fields)
    kind = "AutoModelForSeq2SeqLM" if config.is_encoder_decoder else "AutoModelForCausalLM"
    model = getattr(transformers, kind).from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * (0.2 if weight.dim() > 1 else 1))
    return model


def averaged(rows: Any, heads: int) -> Any:
    """Slow and obvious, in double precision: row d of new head h is the mean of row d of its old heads."""
    import torch

    group = HEADS // heads
    out = torch.zeros(heads * DIM, *rows.shape[1:], dtype=torch.float64)
    for head in range(heads):
        for row in range(DIM):
            for old in range(head * group, (head + 1) * group):
                out[head * DIM + row] += rows[old * DIM + row].double() / group
    return out


def is_joined(name: str) -> bool:
    return ".k_proj." in name or ".v_proj." in name


def run(model: Any, chunks: tuple[int, ...] = (20, 1, 1, 10)) -> tuple[Any, Any]:
    import torch
    from transformers import DynamicCache

    ids = torch.randint(0, CONFIG["vocab_size"], (2, sum(chunks)), generator=torch.Generator().manual_seed(1))
    cache, out, at = DynamicCache(config=model.config), [], 0
    with torch.inference_mode():
        for count in chunks:
            out.append(model(input_ids=ids[:, at : at + count], cache=cache, use_cache=True).logits)
            at += count
    return torch.cat(out, 1), cache


@pytest.mark.engine
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)
def test_logits_are_those_of_a_model_built_so(fields: dict[str, Any], heads: int) -> None:
    import torch

    from kvctl.measure.cache import walk

    model = built(fields)
    spec = spec_of(**fields)
    before, weights, settings = run(model)[0], dict(model.named_parameters()), model.config.to_dict()
    other = built(fields | {"num_key_value_heads": heads})
    other.load_state_dict(
        {
            name: averaged(weight, heads).float() if is_joined(name) else weight
            for name, weight in model.state_dict().items()
        }
    )
    expected, plain = run(other)

    technique = parse(f"gqa:{heads}")
    assert technique.convert is not None
    restore = technique.convert.apply(model, spec)
    try:
        ours, cache = run(model)
        assert model.config.num_key_value_heads == heads
        assert torch.allclose(ours, expected, atol=1e-4, rtol=1e-4)
        assert torch.equal(ours, before) == (heads == HEADS)
        predicted = size(
            applied(spec, technique, "transformers"), 32, SizePlan(TRANSFORMERS, sequences=2, dtype=FP32)
        ).kv_bytes
        assert walk(cache).logical_bytes == walk(plain).logical_bytes == predicted
    finally:
        restore()
    assert torch.equal(run(model)[0], before)
    assert all(after is weights[name] for name, after in model.named_parameters())  # the very tensors
    assert model.config.to_dict() == settings
    restore()  # once more does nothing
    assert torch.equal(run(model)[0], before)


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_mean_is_rounded_once(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    from kvctl.techniques.torch_convert import mean_of_groups

    for shape in ((HEADS * DIM, HIDDEN), (HEADS * DIM,)):
        rows = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(getattr(torch, dtype))
        for heads in (1, 2, 4):
            found, exact = mean_of_groups(rows, heads, HEADS // heads, DIM), averaged(rows, heads)
            assert found.dtype == rows.dtype
            # Half a unit in the last place, and what adding in single precision may turn around.
            unit = torch.finfo(rows.dtype).eps * exact.abs().clamp_min(torch.finfo(rows.dtype).smallest_normal)
            assert bool(((found.double() - exact).abs() <= 0.51 * unit + 4e-7).all())


@pytest.mark.engine
@pytest.mark.parametrize("fault", [KeyboardInterrupt, MemoryError])
def test_a_conversion_that_breaks_off_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, fault: type[BaseException]
) -> None:
    model = built({"model_type": "qwen2"})
    import torch

    from kvctl.techniques import torch_convert

    before, weights, settings = run(model)[0], dict(model.named_parameters()), model.config.to_dict()
    calls = []

    def breaks(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 7:  # in the second layer
            raise fault
        return torch.zeros(args[1] * args[3], *args[0].shape[1:])

    monkeypatch.setattr(torch_convert, "mean_of_groups", breaks)
    with pytest.raises(fault):
        torch_convert.joined(model, spec_of(model_type="qwen2"), 1, "gqa:1")
    assert all(after is weights[name] for name, after in model.named_parameters())
    assert model.config.to_dict() == settings
    assert torch.equal(run(model)[0], before)


@pytest.mark.engine
def test_runs_with_other_techniques_in_between() -> None:
    """A store on fewer heads, the plain cache after each."""
    model = built({"model_type": "llama"})
    import torch

    from kvctl.measure.cache import walk
    from kvctl.measure.passes import Passes
    from kvctl.techniques import PLAIN

    spec, passes = spec_of(model_type="llama"), Passes(model, "cpu", layers=LAYERS)
    ids = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(2))

    def logits(text: str) -> tuple[Any, int]:
        technique = parse(text)
        passes.use(technique, tuple(range(LAYERS)) if not technique.like_plain else (), spec)
        passes.begin(1)
        with torch.inference_mode():
            return passes.logits(ids), walk(passes.cache).logical_bytes

    plain = logits("plain")
    joined, held = logits("gqa:1")
    assert held * HEADS == plain[1]
    # 8-bit codes of a head of 16 in one group, and 4 bytes beside.
    _, packed = logits("gqa:1+int8:group=16")
    assert packed == LAYERS * 2 * (16 + 4) * 40
    assert torch.equal(logits("gqa:1")[0], joined)
    assert torch.equal(logits("plain")[0], plain[0])
    evicted, _ = logits("gqa:2+streaming-llm:1.0")
    assert torch.allclose(evicted, logits("gqa:2")[0], atol=1e-5)
    passes.use(PLAIN, (), spec)
    assert model.config.num_key_value_heads == HEADS


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one projection for all": ({"model_type": "phi3", "pad_token_id": 0}, "has no projections of keys and of values"),
    "a norm over all heads": ({"model_type": "olmo2"}, "has a k_norm that is not the same for all heads"),
    "an encoder": ({"model_type": "bart", "d_model": 48, "decoder_layers": 1, "encoder_layers": 1, "decoder_ffn_dim": 8, "encoder_ffn_dim": 8,
                    "encoder_attention_heads": 4, "decoder_attention_heads": 4}, "has an encoder"),
}  # fmt: skip


@pytest.mark.engine
@pytest.mark.parametrize("case", REFUSED)
def test_models_that_are_refused(case: str) -> None:
    fields, part = REFUSED[case]
    model = built(fields)
    with pytest.raises(ConfigError) as caught:
        parse("gqa:1").convert.apply(model, spec_of(**fields))  # type: ignore[union-attr]
    assert part in caught.value.message
    assert type(model).__name__ in caught.value.message


@pytest.mark.engine
def test_projections_that_are_refused() -> None:
    model = built({"model_type": "llama"})
    import torch

    class Packed(torch.nn.Linear):
        """As quantisers put in a linear layer's place."""

    def refused(part: str) -> None:
        with pytest.raises(ConfigError) as caught:
            parse("gqa:1").convert.apply(model, spec_of(model_type="llama"))  # type: ignore[union-attr]
        assert part in caught.value.message

    attention = model.model.layers[1].self_attn
    plain = attention.v_proj
    attention.v_proj = Packed(HIDDEN, HEADS * DIM, bias=False)
    refused("layers.1.self_attn of LlamaForCausalLM has a Packed as v_proj")
    attention.v_proj = torch.nn.Linear(HIDDEN, 2 * HEADS * DIM, bias=False)
    refused("has 128 outputs of v_proj, not 4 heads of 16")
    attention.v_proj = torch.nn.Linear(HIDDEN, HEADS * DIM, bias=False, device="meta")
    refused("has its v_proj somewhere else")
    attention.v_proj = plain
    attention.gate = torch.nn.Linear(HIDDEN, HEADS)
    refused("has a part that may depend on the heads: gate")


# -- every architecture -------------------------------------------------------------------------------

SMALL = {case["name"]: case for case in measured_cases("small_models.jsonl.gz")}
SAMPLE = ("gemma3n_text", "gemma4_text--shared", "llama4_text", "lfm2--mix", "mimo_v2_flash", "qwen3_5_text", "itt--llava",
          "minimax_m3_vl_text", "mllama")  # fmt: skip
"""Layers that read another's cache, norms without weights, convolutions, widths and heads that differ by layer, delta layers, a
language model in a wrapper, an indexer, cross attention."""


def average_in_place(model: Any, spec: ModelSpec) -> None:
    """As many heads as there were, each with the mean of all: the same function as one head of the mean."""
    import torch

    kept = {
        index: state
        for index, layer in enumerate(spec.layers)
        for state in layer.states_in("transformers")
        if isinstance(state, Attention) and not isinstance(state, CrossAttention)
    }
    with torch.no_grad():
        for module in model.modules():
            state = kept.get(getattr(module, "layer_idx", None))
            if state is None or not hasattr(module, "k_proj"):
                continue
            for linear, dim in ((module.k_proj, state.key_dim), (module.v_proj, state.value_dim)):
                for rows in linear.parameters():
                    heads = [rows[first : first + dim].double() for first in range(0, rows.shape[0], dim)]
                    rows.copy_((sum(heads) / len(heads)).float().repeat(len(heads), *[1] * (rows.dim() - 1)))


def joined_as_averaged(name: str) -> bool:
    """Whether a small model can be changed; if so, its bytes and logits are right."""
    import torch

    from kvctl.measure.cache import walk
    from kvctl.measure.load import Wanted, load
    from kvctl.measure.passes import Passes

    technique, spec = parse("gqa:1"), build_spec(Found("model", SMALL[name]["config"], Provenance("local", "model")))
    try:
        changed = applied(spec, technique, "transformers")
        model = load(spec, Wanted(random=True), FP32).model
        passes = Passes(model, "cpu", layers=len(spec.layers))
        passes.use(technique, (), spec)
        passes.begin(1)
    except KvctlError:
        return False
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(0, vocabulary, (1, 24), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        ours, held = passes.logits(ids), walk(passes.cache).logical_bytes
    assert held == size(changed, 24, SizePlan(TRANSFORMERS, dtype=FP32)).kv_bytes
    passes.use(parse("plain"), (), spec)
    average_in_place(model, spec)
    passes.begin(1)
    with torch.inference_mode():
        assert torch.allclose(ours, passes.logits(ids), atol=1e-4, rtol=1e-3, equal_nan=True)
    return True


@pytest.mark.engine
@pytest.mark.parametrize("name", SAMPLE)
def test_unlike_architectures(name: str) -> None:
    pytest.importorskip("torch", reason="needs torch and transformers")
    pytest.importorskip("accelerate")
    assert joined_as_averaged(name)


@pytest.mark.engine
@pytest.mark.slow
def test_every_architecture() -> None:
    """Changed as it should be, or refused. recurrent_gemma keeps its states in modules, where this does not look."""
    pytest.importorskip("torch", reason="needs torch and transformers")
    pytest.importorskip("accelerate")
    changed = [name for name in SMALL if name != "recurrent_gemma" and joined_as_averaged(name)]
    assert len(changed) >= 120
