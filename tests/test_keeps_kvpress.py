"""What stays of a prompt in one pass, beside NVIDIA's kvpress where it is installed: the same scores keep the same tokens.

kvpress lets the newest token go where its score is low; here it always stays, so it is put above all others before both are
compared. Its ObservedAttentionPress divides each sum by the number of queries that could see the token; H2O's paper does not, so that
is taken back.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.techniques import parse

TOKENS = 200
PAIRS = {
    "snapkv:0.25": "SnapKVPress(0.75, window_size=32, kernel_size=5)",
    "snapkv:60:window=16:kernel=7": "SnapKVPress(0.7, window_size=16, kernel_size=7)",
    "tova:0.25": "TOVAPress(0.75)",
    "knorm:0.25": "KnormPress(0.75)",
    "expected-attention:0.25": "ExpectedAttentionPress(0.75)",
    "h2o:0.25:recent=1": "ObservedAttentionPress(0.75)",
    "streaming-llm:0.25:positions=text": "StreamingLLMPress(0.75)",
    "window:0.25": "StreamingLLMPress(0.75, n_sink=0)",
}


@pytest.mark.engine
@pytest.mark.parametrize("technique", PAIRS)
def test_kept_tokens_beside_kvpress(technique: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch and transformers")
    transformers = pytest.importorskip("transformers")
    kvpress: Any = pytest.importorskip("kvpress", reason="needs kvpress")
    press = eval(f"kvpress.{PAIRS[technique]}", {"kvpress": kvpress})
    observed = isinstance(press, kvpress.ObservedAttentionPress)

    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                                      num_key_value_heads=2, head_dim=32, vocab_size=512)  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        # Attention that differs from token to token.
        weight.data *= 4 if weight.dim() > 1 else 1
    model.set_attn_implementation("eager" if observed else "sdpa")
    # No token twice: in the first layer its key has the same norm, and of equals any may stay.
    ids = torch.stack([torch.randperm(512, generator=torch.Generator().manual_seed(seed))[:TOKENS] for seed in (1, 2)])
    theirs: list[Any] = []

    def scored(module: Any, _: Any, given: dict[str, Any], out: Any) -> None:
        layer = (given.get("cache") or given["past_key_values"]).layers[module.layer_idx]
        scores = press.score(
            module, given["hidden_states"], layer.keys, layer.values, out[1] if observed else None, given
        )
        if observed:
            scores = scores * torch.arange(TOKENS, 0, -1)
        scores[..., -1] = float("inf")
        kept = int(TOKENS * (1 - press.compression_ratio) + 1e-9)
        theirs.append(scores.topk(kept, dim=-1).indices.sort(-1).values)

    for layer in model.model.layers:
        # As kvpress does before it runs.
        object.__setattr__(layer.self_attn, "rotary_emb", model.model.rotary_emb)
        layer.self_attn.register_forward_hook(scored, with_kwargs=True)
    with torch.inference_mode():
        model(input_ids=ids, use_cache=True, output_attentions=observed)
    assert [tuple(kept.shape) for kept in theirs] == [(2, 2, theirs[0].shape[2])] * 3
    for kept, ours in zip(theirs, _ours(model, technique, ids), strict=True):
        assert torch.equal(kept, ours)


def _ours(model: Any, technique: str, ids: Any) -> list[Any]:
    """What stays in each layer; hooks of others go on hearing of it."""
    import torch
    from transformers import DynamicCache

    from kvctl.techniques import attention
    from kvctl.techniques.caches import equipped

    made, cache = parse(technique), DynamicCache(config=model.config)
    for layer in model.model.layers:
        layer.self_attn._forward_hooks.clear()
    model.set_attn_implementation("sdpa")
    equipped(cache, model, made, range(3))
    found: list[Any] = []
    for layer in cache.layers:
        choose = layer.policy.choose

        def kept(held: int, target: int, seen: Any, choose: Any = choose) -> Any:
            out = choose(held, target, seen)
            places = torch.arange(held).expand(2, 2, held)
            found.append(
                torch.cat([places[..., : out.start], places[..., out.stop :]], -1) if isinstance(out, slice) else out
            )
            return out

        layer.policy.choose = kept
    attention.install(model, made)
    try:
        with torch.inference_mode():
            model(input_ids=ids, cache=cache, use_cache=True)
    finally:
        attention.remove(model)
    return found
