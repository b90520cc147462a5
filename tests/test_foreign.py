"""Other people's caches in kvctl's own measurement, beside the same caches without it: transformers' generate(), and kvpress's rule by hand."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome

from kvctl.engines import TRANSFORMERS
from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.formats import model_dtype
from kvctl.measure import foreign
from kvctl.model import build_spec
from kvctl.size import SizePlan, size
from kvctl.sources import Found
from kvctl.spec import Provenance
from kvctl.techniques import parse, parse_list
from kvctl.techniques.states import applied

Run = Callable[..., Outcome]
LAYERS, HEADS, DIM = 2, 2, 64
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": DIM, "vocab_size": 128,
    "max_position_embeddings": 4096, "torch_dtype": "float32", "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
ELEMENTS = HEADS * DIM
"""Of a token's keys, and of its values."""


def predicted(
    technique: str, tokens: int, generated: int = 0, dtype: str = "float32", batch: int = 1, **changes: Any
) -> int:
    spec = applied(
        build_spec(Found("model", CONFIG | changes, Provenance("local", "model"))), parse(technique), "transformers"
    )
    plan = SizePlan(TRANSFORMERS, sequences=batch, generated=generated, dtype=model_dtype(dtype))
    return size(spec, tokens, plan).kv_bytes


# -- what is asked for ------------------------------------------------------------------------------


def test_they_are_not_among_all() -> None:
    assert not [one.name for one in parse_list(["all"]) if one.foreign is not None]


@pytest.mark.parametrize(("text", "part"), [
    ("hf:int4", "hf:int4 is no quantized cache of transformers"),
    ("hf:quanto-int8", "hf:quanto-int8 is no quantized cache"), ("hf:quanto-int4:axis=2", "hf:quanto-int4:axis=2 is not known"),
    ("hf:quanto-int4:group=0", "hf:quanto-int4:group=0 is too small"), ("hf:fp8:group=32", "hf:fp8: 'group' is not known here"),
    ("hf:quanto-int4+streaming-llm:32", "hf:quanto-int4 is a whole cache by itself"), ("int8+hf:fp8", "hf:fp8 is a whole cache by itself"),
    ("kvpress", "kvpress: which of its presses is not said"), ("hf", "hf: which quantized cache of transformers is not said"), ("kvpress:0.5", "kvpress:0.5 is no press"),
    ("kvpress:SnapKVPress:1", "'1' is no compression ratio"), ("kvpress:SnapKVPress:1/2", "'1/2' is no compression ratio"),
    ("kvpress:SnapKVPress:half", "'half' is no compression ratio"), ("kvpress:SnapKVPress:0.5:0.6", "'0.6' is not known here"),
    ("h2o:32+kvpress:TOVAPress:0.5", "kvpress:TOVAPress is a whole cache by itself"),
])  # fmt: skip
def test_what_is_refused(text: str, part: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse(text)
    assert part in refused.value.message


@pytest.mark.parametrize(
    ("technique", "package"),
    [("hf:quanto-int4", "optimum-quanto"), ("hf:hqq-int2", "hqq"), ("kvpress:TOVAPress:0.5", "kvpress")],
)
def test_what_is_not_installed(technique: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    asked = parse(technique).foreign
    assert asked is not None
    with pytest.raises(KvctlError, match=f"needs {package}, which is not installed") as refused:
        foreign.need(asked)
    assert refused.value.hint == f"pip install {package}"


# -- bytes ------------------------------------------------------------------------------------------

BY_HAND = {
    # Half a byte an element, a scale and a shift of 4 bytes for 64 of them; 5 tokens wait as they are.
    ("hf:quanto-int4", 261, 5): 256 * ELEMENTS // 2 + 256 * ELEMENTS // 64 * 8 + 5 * ELEMENTS * 4,
    # Of 130 single tokens the first 128 went in with the prompt when there were so many.
    ("hf:quanto-int4", 386, 130): 384 * ELEMENTS // 2 + 384 * ELEMENTS // 64 * 8 + 2 * ELEMENTS * 4,
    ("hf:quanto-int2:group=32:residual=8", 35, 3): 32 * ELEMENTS // 4 + 32 * ELEMENTS // 32 * 8 + 3 * ELEMENTS * 4,
    ("hf:hqq-int8:axis=1", 257, 1): 256 * ELEMENTS + 256 * ELEMENTS // 64 * 8 + ELEMENTS * 4,
    # A byte an element and one scale of 4 bytes.
    ("hf:fp8", 100, 50): 100 * ELEMENTS + 4,
    # int(100 * (1 - 0.3)) tokens of the prompt stay, and all after it.
    ("kvpress:SnapKVPress:0.3", 107, 7): 77 * ELEMENTS * 4,
    ("kvpress:KnormPress:0.0", 107, 7): 107 * ELEMENTS * 4,
}  # fmt: skip


@pytest.mark.parametrize(("technique", "tokens", "generated"), BY_HAND)
def test_bytes_by_hand(technique: str, tokens: int, generated: int) -> None:
    assert predicted(technique, tokens, generated) == 2 * LAYERS * BY_HAND[technique, tokens, generated]


@pytest.mark.parametrize(("technique", "changes", "part"), [
    ("hf:quanto-int4", {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}, "takes full attention alone"),
    ("kvpress:PyramidKVPress:0.5", {}, "does not know how many tokens it keeps"),
    ("kvpress:SnapKVPress", {}, "does not know how many tokens it keeps"),
])  # fmt: skip
def test_what_size_does_not_know(technique: str, changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        predicted(technique, 64, **changes)


def test_size_beside_kvctls_own(kvctl: Run) -> None:
    outcome = kvctl("size", "Qwen3-8B", "--technique", "int4,hf:quanto-int4", "--ctx", "4k", "--format", "csv")
    assert outcome.code == 0
    assert [line.count("int4") > 0 for line in outcome.out.splitlines()[1:]] == [False, True, True]
    refused = kvctl("size", "Qwen3-8B", "--technique", "kvpress:ThinKPress:0.5", "--ctx", "4k")
    assert "kvpress:ThinKPress: kvctl does not know how many tokens it keeps" in refused.err


# -- real caches --------------------------------------------------------------------------------------


def model_in(dtype: str = "float32") -> Any:
    torch = pytest.importorskip("torch", reason="needs torch and transformers")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.for_model(**CONFIG)).eval()
    for weight in model.parameters():
        # Attention that differs from token to token.
        weight.data *= 4 if weight.dim() > 1 else 1
    return model.to(getattr(torch, dtype))


def ids_of(tokens: int, batch: int = 1) -> Any:
    import torch

    return torch.randint(1, CONFIG["vocab_size"], (batch, tokens), generator=torch.Generator().manual_seed(1))


def passes_of(model: Any, technique: str) -> Any:
    from kvctl.measure.passes import Passes

    made = parse(technique)
    assert made.foreign is not None
    for start, module in (("hf:quanto", "optimum.quanto"), ("hf:hqq", "hqq"), ("kvpress", "kvpress")):
        if technique.startswith(start):
            pytest.importorskip(module, reason=f"needs {module}")
    foreign.need(made.foreign)
    out = Passes(model, "cpu", layers=LAYERS)
    out.technique = made
    return out


def waiting(chunks: Sequence[int], residual: int) -> int:
    """Tokens that wait unpacked, by transformers' QuantizedLayer.update read line by line."""
    kept = 0
    for count in chunks[1:]:
        kept = 0 if kept + count >= residual else kept + count
    return kept


QUANTIZED = [
    ("hf:quanto-int4", 128), ("hf:quanto-int4:axis=1", 128), ("hf:quanto-int2:group=32:residual=16", 16),
    ("hf:quanto-int4:group=128:residual=1", 1), ("hf:hqq-int8", 128), ("hf:hqq-int4:residual=16", 16),
    ("hf:hqq-int4:axis=1:group=32:residual=16", 16), ("hf:hqq-int3:group=32:residual=16", 16), ("hf:hqq-int2", 128),
    ("hf:hqq-int1:residual=16", 16), ("hf:fp8", 0),
]  # fmt: skip
CHUNKS = {"prompt": (64,), "steps": (64, *[1] * 20), "pieces": (64, 32, 8, 4, *[1] * 4), "long": (64, *[1] * 130)}


@pytest.mark.engine
@pytest.mark.parametrize(("chunks", "dtype"), [*((chunks, "float32") for chunks in CHUNKS.values()), (CHUNKS["steps"], "bfloat16")],
                         ids=[*CHUNKS, "bf16"])  # fmt: skip
@pytest.mark.parametrize(("technique", "residual"), QUANTIZED)
def test_bytes_of_a_real_cache(technique: str, residual: int, chunks: tuple[int, ...], dtype: str) -> None:
    passes, total = passes_of(model_in(dtype), technique), sum(chunks)
    import torch

    from kvctl.measure.cache import walk

    ids, at = ids_of(total), 0
    passes.begin(1)
    with torch.inference_mode():
        for count in chunks:
            passes.logits(ids[:, at : at + count])
            at += count
    # What waits is as if so many had come one by one after a prompt.
    held = walk(passes.cache).logical_bytes
    assert held == predicted(technique, total, waiting(chunks, residual) if residual else 0, dtype)
    if all(count == 1 for count in chunks[1:]):
        assert held == predicted(technique, total, len(chunks) - 1, dtype)


@pytest.mark.engine
@pytest.mark.parametrize(("technique", "settings"), [
    ("hf:quanto-int4", {"backend": "quanto"}),
    ("hf:quanto-int2:axis=1:group=32:residual=16", {"backend": "quanto", "nbits": 2, "axis_key": -1, "axis_value": -1, "q_group_size": 32,
                                                   "residual_length": 16}),
    ("hf:hqq-int4:axis=1:residual=8", {"backend": "hqq", "axis_key": 1, "axis_value": 1, "residual_length": 8}),
    ("hf:fp8", {"backend": "fp8"}),
])  # fmt: skip
def test_the_same_logits_as_generate(technique: str, settings: dict[str, Any]) -> None:
    model = model_in()
    import torch

    passes, ids = passes_of(model, technique), ids_of(64)
    theirs = model.generate(ids, max_new_tokens=20, do_sample=False, cache_implementation="quantized", cache_config=settings,
                            output_logits=True, return_dict_in_generate=True)  # fmt: skip
    ours = []
    with torch.inference_mode():
        passes.begin(1)
        ours.append(passes.prefill(ids))
        for _ in range(19):
            ours.append(passes.feed(ours[-1].argmax(-1, keepdim=True)))
    assert torch.equal(torch.stack(ours), torch.stack(list(theirs.logits)))


@pytest.mark.engine
@pytest.mark.parametrize("ratio", ["0.3", "0.75"])
def test_a_press_beside_its_rule_by_hand(ratio: str) -> None:
    """kvpress's KnormPress keeps int(n * (1 - ratio)) keys with the smallest norms of every head; positions go on as in the text."""
    model = model_in()
    import torch
    from transformers import DynamicCache

    from kvctl.measure.cache import walk

    prompt, more = 50, 6
    ids, passes = ids_of(prompt + more), passes_of(model, f"kvpress:KnormPress:{ratio}")
    before = [(path, type(module)) for path, module in model.named_modules(remove_duplicate=False)]
    with torch.inference_mode():
        passes.begin(1)
        passes.prefill(ids[:, :prompt])
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :prompt], cache=cache, use_cache=True)
        kept = int(prompt * (1 - float(ratio)))
        for own, plain in zip(passes.cache.layers, cache.layers, strict=True):
            stay = plain.keys.norm(dim=-1).argsort(-1)[..., :kept].sort(-1).values[..., None].expand(-1, -1, -1, DIM)
            plain.keys, plain.values = plain.keys.gather(2, stay), plain.values.gather(2, stay)
            assert torch.equal(own.keys.sort(2).values, plain.keys.sort(2).values)
        ours = torch.cat([passes.logits(ids[:, prompt : prompt + 4]), passes.logits(ids[:, prompt + 4 :])], 1)
        theirs = [model(input_ids=ids[:, place : place + 1], cache=cache, position_ids=torch.tensor([[place]]), use_cache=True).logits
                  for place in range(prompt, prompt + more)]  # fmt: skip
    assert torch.allclose(ours, torch.cat(theirs, 1), atol=1e-4, rtol=1e-4)
    assert walk(passes.cache).logical_bytes == predicted(f"kvpress:KnormPress:{ratio}", prompt + more, more)
    # Nothing of it is left in the model.
    assert [(path, type(module)) for path, module in model.named_modules(remove_duplicate=False)] == before
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.engine
def test_profile_runs_them_beside_its_own(tmp_path: Path) -> None:
    for module in ("torch", "transformers", "accelerate", "optimum.quanto", "hqq", "kvpress"):
        pytest.importorskip(module, reason="needs torch, transformers, accelerate, optimum-quanto, hqq and kvpress")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    names = ["int4", "hf:quanto-int4", "hf:hqq-int4:axis=1", "kvpress:KnormPress:0.5", "kvpress:KnormPress"]
    done = subprocess.run([sys.executable, "-m", "kvctl", "profile", str(tmp_path), "--weights", "random", "--technique", ",".join(names),
                           "--ctx", "64", "--decode", "4", "--repeat", "1", "--check", "--json"], capture_output=True, text=True,
                          timeout=300, env=os.environ | {"HF_HUB_OFFLINE": "1"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["techniques"]["rows"]}
    assert {name: row["agrees"] for name, row in rows.items()} == dict.fromkeys(["plain", *names[:4]], True) | {
        names[4]: None
    }
    assert rows["kvpress:KnormPress"]["kv_bytes"] == rows["plain"]["kv_bytes"]


@pytest.mark.engine
@pytest.mark.parametrize(("technique", "part"), [
    ("kvpress:NoSuchPress:0.5", "kvpress has no such press"), ("kvpress:SnapKVPress:0.5:colour=red", "it cannot be made so"),
])  # fmt: skip
def test_what_kvpress_does_not_have(technique: str, part: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("kvpress", reason="needs kvpress")
    asked = parse(technique).foreign
    assert asked is not None
    with pytest.raises(UsageError) as refused:
        foreign.need(asked)
    assert part in refused.value.message
