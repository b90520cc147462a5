"""A paged cache on real models: what it hands out and what it holds. Plain caches of transformers are the reference."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.measure.cache import walk
from kvctl.techniques import parse

pytest.importorskip("torch", reason="needs torch and transformers")
pytest.importorskip("transformers")

pytestmark = pytest.mark.engine
LAYERS, DIM = 2, 16


def model_of(kv_heads: int = 2, dtype: str = "float32") -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=kv_heads,
        head_dim=DIM, vocab_size=128, max_position_embeddings=512,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval().to(getattr(torch, dtype))


def paged(model: Any, size: int = 16, count: int | None = None, *, index: bool = False) -> tuple[Any, Any]:
    """A cache, and what its layers share."""
    from transformers import DynamicCache

    from kvctl.techniques.caches import equipped
    from kvctl.techniques.paging.cache import Pages

    pages = Pages(size, count, index=index)
    return equipped(DynamicCache(config=model.config), model, parse("paged"), range(LAYERS), pages), pages


def plain(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def feed(model: Any, cache: Any, ids: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model(input_ids=ids, cache=cache, use_cache=True).logits


def random_ids(batch: int, tokens: int, seed: int = 1) -> Any:
    import torch

    return torch.randint(0, 128, (batch, tokens), generator=torch.Generator().manual_seed(seed))


CLOSE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Of logits near one: what another order of additions makes."""


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("kv_heads", [1, 2, 4], ids=["mqa", "gqa", "mha"])
def test_through_chunks_steps_forks_and_copies(kv_heads: int, dtype: str) -> None:
    """A prompt in chunks, some steps, then four continuations of it, each with a token of its own, in one batch."""
    import torch

    model = model_of(kv_heads, dtype)
    ids, steps = random_ids(1, 37), random_ids(4, 9, seed=2)
    ours, pages = paged(model)
    theirs = plain(model)
    for cut in (slice(0, 20), slice(20, 36), slice(36, 37)):
        assert torch.equal(feed(model, ours, ids[:, cut]), feed(model, theirs, ids[:, cut]))
    ours.reorder_cache(torch.tensor([0, 0, 0, 0]))
    theirs.batch_repeat_interleave(4)
    assert pages.blocks.held == 3
    for at in range(9):
        mine, other = feed(model, ours, steps[:, at : at + 1]), feed(model, theirs, steps[:, at : at + 1])
        assert torch.allclose(mine, other, atol=CLOSE[dtype])
    # 46 tokens: two whole blocks that all share, and the third, with 5 tokens when it was forked, copied for three of four.
    assert pages.table.copied == 3
    assert pages.blocks.held == 2 + 4
    item = torch.finfo(getattr(torch, dtype)).bits // 8
    assert walk(ours).logical_bytes == LAYERS * 2 * 6 * 16 * kv_heads * DIM * item + 4 * 4 * (1 + 3)


def test_a_found_prefix_is_read_and_not_computed() -> None:
    """Two prompts of 50 tokens that share 35: two blocks of 16 are found, 18 tokens computed."""
    import torch

    model = model_of()
    first, second = random_ids(1, 50), random_ids(1, 50, seed=2)
    second[:, :35] = first[:, :35]
    second[:, 35] = (first[:, 35] + 1) % 128
    cache, pages = paged(model, index=True)
    assert pages.begin(first[0].tolist()) == 0
    feed(model, cache, first)
    pages.remember(first[0].tolist())
    before = cache.layers[0].pool.keys[pages.table.row(0)[0]].clone()
    hit = pages.begin(second[0].tolist())
    assert hit == 32
    logits = feed(model, cache, second[:, hit:])
    assert torch.allclose(logits, feed(model, plain(model), second)[:, hit:], atol=1e-5)
    assert pages.blocks.held == 4 + 2
    assert torch.equal(cache.layers[0].pool.keys[pages.table.row(0)[0]], before)
    # The first goes on, and knows nothing of the second.
    pages.use([0])
    step = random_ids(1, 1, seed=3)
    theirs = plain(model)
    feed(model, theirs, first)
    assert torch.allclose(feed(model, cache, step), feed(model, theirs, step), atol=1e-5)
    pages.reset()
    assert pages.blocks.held == 0


def test_a_pool_without_room_says_so_and_drops_what_nobody_reads() -> None:
    from kvctl.errors import KvctlError

    model = model_of()
    cache, pages = paged(model, count=4, index=True)
    for seed in range(5):  # 3 blocks each: the ones before have to go
        ids = random_ids(1, 40, seed)
        hit = pages.begin(ids[0].tolist())
        feed(model, cache, ids[:, hit:])
        pages.remember(ids[0].tolist())
        pages.table.release(pages.at_work[0])
    assert pages.radix is not None
    assert pages.radix.evicted >= 4
    assert pages.begin(random_ids(1, 80, 9)[0].tolist()) == 0
    with pytest.raises(KvctlError, match="the pool has 4 blocks, 5 are needed"):
        feed(model, cache, random_ids(1, 80, 9))


def test_beam_search_shares_blocks() -> None:
    """transformers' own beam search over it finds the same text."""
    import torch

    model = model_of()
    ids = random_ids(1, 21)
    settings: dict[str, Any] = {
        "max_new_tokens": 12,
        "min_new_tokens": 12,
        "num_beams": 3,
        "do_sample": False,
        "pad_token_id": 0,
    }
    cache, pages = paged(model)
    ours = model.generate(ids, cache=cache, **settings)
    assert torch.equal(ours, model.generate(ids, **settings))
    assert pages.table.copied > 0
    assert pages.blocks.held <= 9


def test_sequences_of_unlike_lengths_are_refused() -> None:
    model = model_of()
    cache, pages = paged(model)
    feed(model, cache, random_ids(1, 5))
    pages.use([pages.table.begin()])
    feed(model, cache, random_ids(1, 6))
    with pytest.raises(ValueError, match="different lengths"):
        pages.use(pages.table.sequences)


def test_against_transformers_own_paged_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """generate_batch() one request at a time, in pages of 16: the same tokens, the same tokens found, as many blocks."""
    import torch

    model = model_of()
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    prompts = random_ids(4, 50)
    prompts[:, :35] = prompts[0, :35]
    prompts[:, 35] = torch.arange(4)
    order: list[int] = []
    theirs_found, theirs_rows = list[int](), list[int]()
    search, free = PagedAttentionCache.search_prefix_match, PagedAttentionCache.free_blocks

    def searched(self: Any, request: str, ids: list[int]) -> int:
        found: int = search(self, request, ids)
        order.append(next(at for at in range(4) if prompts[at].tolist() == ids))
        theirs_found.append(found)
        return found

    def freed(self: Any, request: str, no_cache: bool = False) -> None:
        theirs_rows.append(len(self.cache_allocators["full_attention"].block_table[request]))
        free(self, request, no_cache)

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", searched)
    monkeypatch.setattr(PagedAttentionCache, "free_blocks", freed)
    made = model.generate_batch(
        prompts.tolist(), GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=-1),
        ContinuousBatchingConfig(page_size=16, num_blocks=32, max_batch_tokens=64, max_requests_per_batch=1, use_cuda_graph=False),
        warmup=False,
    )  # fmt: skip
    theirs = [made[name].generated_tokens for name in sorted(made)]
    model.set_attn_implementation("sdpa")  # it leaves its own
    cache, pages = paged(model, index=True)
    ours, found, rows = dict[int, list[int]](), list[int](), list[int]()
    for number in order:
        prompt = prompts[number : number + 1]
        found.append(pages.begin(prompt[0].tolist()))
        token = feed(model, cache, prompt[:, found[-1] :])[:, -1].argmax(-1, keepdim=True)
        pages.remember(prompt[0].tolist())
        ours[number] = [int(token)]
        for _ in range(11):
            token = feed(model, cache, token)[:, -1].argmax(-1, keepdim=True)
            ours[number].append(int(token))
        rows.append(len(pages.table.row(pages.at_work[0])))
    assert [ours[number] for number in range(4)] == theirs
    assert found == theirs_found == [0, 32, 32, 32]
    assert rows == theirs_rows == [4] * 4  # 50 + 11 tokens
