"""Layers of unequal pages side by side in one block: DeepSeek V4 in vLLM.

A block of a group holds one page of each of its layers; all groups draw from one pool, so the
group that fills most of a block sets its size. What grows (compressed entries and the
indexer's keys) is one group; windows of equal length and block are split into groups of
about as many layers.

Sources: vllm 0.20.0 to 0.33.0 v1/core/kv_cache_utils.py (kv_cache_planning.py from 0.33 on),
v1/kv_cache_interface.py, models/deepseek_v4/{attention,compressor}.py and
v1/attention/backends/mla/sparse_swa.py.
"""

from __future__ import annotations

from collections import Counter

from kvctl.allocation import Serving
from kvctl.engines.states import not_known
from kvctl.engines.versions import dotted
from kvctl.engines.vllm.groups import Group, Placed, Settings, stage_of
from kvctl.engines.vllm.rules import Rules
from kvctl.engines.vllm.specs import KV_DTYPES, Spec
from kvctl.engines.vllm.speculation import Drafts
from kvctl.errors import ConfigError, UsageError
from kvctl.families.compressor import CompressorTail
from kvctl.formats import plain
from kvctl.spec import CompressedAttention, Empty, Formats, Indexer, Layer, LayerState, ModelSpec, SlidingWindow

BLOCK = 256
"""Tokens of a block, which kernels ask for."""
_ROW = 584
"""Bytes of a row of 512: 448 in fp8, 64 of the rotary part in bf16, and 8 bytes of scales."""
_ALIGNMENT = 576
"""What the kernel wants pages to be a multiple of."""
_DIM, _INDEX_DIM = 512, 128
_WINDOW_BLOCK = 64
_STATE_BLOCK = {4: 4, 128: 8}
"""Tokens of a block of a compressor's states, by the tokens of an entry."""


def packs_layers(spec: ModelSpec) -> bool:
    """Whether a model's layers lie side by side in a block."""
    return any(isinstance(state, CompressedAttention) for layer, _ in spec.groups for state in layer.states)


def cache_format(fmt: Formats, serving: Serving, rules: Rules, warnings: list[str]) -> Formats:
    """The one format that these rows are kept in, and refusals of what vLLM does not start with.

    Raises:
        UsageError: a version, device, split or format that vLLM does not serve this model with.

    """
    if not rules.packing:
        raise UsageError(f"vLLM {dotted(rules.since)} does not serve DeepSeek V4", hint="vLLM 0.20 and later do")
    if serving.device == "cpu":
        raise ConfigError("kvctl does not know vLLM's plan for DeepSeek V4 on a CPU", hint="without --device cpu")
    if (serving.decode_context_parallel or 1) * (serving.prefill_context_parallel or 1) > 1:
        raise UsageError("vLLM deals out no tokens over ranks for DeepSeek V4, which has windows",
                         hint="without --decode-context-parallel-size")  # fmt: skip
    if serving.block_size not in (None, BLOCK):
        raise UsageError(f"--block-size {serving.block_size}: kernels for DeepSeek V4 take blocks of {BLOCK} tokens",
                         hint="leave --block-size out")  # fmt: skip
    told = fmt.key.name.startswith("fp8") and not fmt.key.name.endswith("per_token_head")
    if not told and fmt.key != plain(fmt.model):
        raise UsageError(f"vLLM does not keep the rows of DeepSeek V4 in {fmt.key.name}", hint="--kv-cache-dtype fp8")
    warnings.append(f"rows of DeepSeek V4 are kept as fp8_ds_mla, {_ROW} bytes each, as FlashMLA has it"
                    + ("" if told or rules.since >= (0, 30) else "; before 0.30 vLLM has to be told: --kv-cache-dtype fp8"))  # fmt: skip
    return fmt.replace(key=KV_DTYPES["fp8_ds_mla"], value=KV_DTYPES["fp8_ds_mla"])


def layers_of(spec: ModelSpec, serving: Serving, drafted: Drafts) -> list[Placed]:
    """Specs of every layer in order, pages and all; every rank of tensor parallelism holds the whole of them."""
    stages = serving.pipeline_parallel or 1
    stage = stage_of(len(spec.layers), stages, serving.stage_layers)
    held: list[tuple[Layer, ModelSpec, int]] = [(layer, spec, stage[i]) for i, layer in enumerate(spec.layers)]
    held += [(layer, model, stages - 1) for layer, model in drafted.layers]
    return [
        Placed(_spec(state, model), where)
        for layer, model, where in held
        for state in layer.states_in("vllm")
        if not isinstance(state, Empty)
    ]


def _spec(state: LayerState, spec: ModelSpec) -> Spec:
    if isinstance(state, SlidingWindow) and (state.kv_heads, state.key_dim, state.value_dim) == (1, _DIM, 0):
        return _page("window", _ROW, _WINDOW_BLOCK, state.window)
    if isinstance(state, CompressedAttention) and state.dim == _DIM and state.ratio in _STATE_BLOCK:
        return _page("latent", _ROW, BLOCK, ratio=state.ratio)
    if isinstance(state, Indexer) and state.dim == _INDEX_DIM and state.stride in _STATE_BLOCK:
        return _page("indexer", state.dim + 4, BLOCK, ratio=state.stride)
    if isinstance(state, CompressorTail) and state.dim in (_DIM, _INDEX_DIM) and state.ratio in _STATE_BLOCK:
        # A value and a gate in float32 for each series, kept as a window of what an entry is made of.
        series = 2 if state.overlapping else 1
        return _page("compressor", 2 * series * state.dim * 4, _STATE_BLOCK[state.ratio], series * state.ratio)
    raise not_known(spec, state, "vLLM")


def _page(kind: str, row: int, block: int, limit: int = 0, ratio: int = 1) -> Spec:
    page = block // ratio * row
    return Spec(kind, row, block, limit, page=-(-page // _ALIGNMENT) * _ALIGNMENT)


def groups_of(layers: list[Placed], rules: Rules) -> list[Group]:
    """Groups of layers; the first is what grows."""
    growing: Group = [item for item in layers if item.spec.grows]
    if max((item.spec.page for item in growing), default=0) < max(item.spec.page for item in layers):
        raise ConfigError("kvctl does not know vLLM's plan for DeepSeek V4 without layers of 4 tokens an entry")
    windows: dict[tuple[int, int], Group] = {}
    for item in layers:
        if not item.spec.grows:
            windows.setdefault((item.spec.block, item.spec.limit), []).append(item)
    size = _group_size([growing, *windows.values()], rules)
    pages = sorted({item.spec.page for item in growing})
    groups = [growing]
    for bucket in windows.values():
        if rules.packing in ("tuples", "pages"):
            bucket = [_padded(item, pages) for item in bucket]
        # Layers of each page size take turns, so that every group has as many of each.
        by_page: dict[int, Group] = {}
        for item in bucket:
            by_page.setdefault(item.spec.page, []).append(item)
        number = -(-_repeats(bucket) // size)
        groups += [[item for part in by_page.values() for item in part[index::number]] for index in range(number)]
    return groups


def _padded(item: Placed, pages: list[int]) -> Placed:
    """A window's page, made as large as the next one of those that grow."""
    return item.replace(spec=item.spec.replace(page=next(page for page in pages if page >= item.spec.page)))


def _repeats(group: Group) -> int:
    """Layers of the commonest page size."""
    return max(Counter(item.spec.page for item in group).values())


def _group_size(buckets: list[Group], rules: Rules) -> int:
    """Layers of each page size in a group: the number that leaves fewest places empty."""
    if rules.packing == "balanced":
        counts = [Counter(item.spec.page for item in bucket) for bucket in buckets]
        even = [count for count in counts if len(set(count.values())) == 1]
        repeats = [max(count.values()) for count in even]
        least = max((max(count.values()) for count in even if len(count) > 1), default=0)
    else:
        repeats = [_repeats(bucket) for bucket in buckets]
        least = repeats[0]
    # The largest of the best.
    sizes = range(least, max(*repeats, least) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in repeats), -size))


def bytes_per_block(groups: list[Group], stage: int, rules: Rules) -> int:
    """Bytes of one block on a pipeline stage."""
    held = [[item.spec.page for item in group if item.stage == stage] for group in groups]
    if rules.packing == "tuples":
        # Places for every page size of what grows, as many as the longest list of equal pages.
        return _places(held) * sum(set(held[0]))
    if rules.packing == "pages":
        # Each page size has as many places as the group that needs most of them.
        counts = [Counter(pages) for pages in held]
        return sum(page * max(count[page] for count in counts) for page in set().union(*counts))
    return max(sum(pages) for pages in held)


def _places(held: list[list[int]]) -> int:
    return max(count for pages in held for count in Counter(pages).values())


def blocks_logged(groups: list[Group], settings: Settings, context: int, rules: Rules) -> int:
    """Blocks that the log counts for a request; before 0.27 those of windows by their share of the first group's bytes."""
    blocks = [settings.blocks(group[0].spec, context) for group in groups]
    if rules.packing not in ("tuples", "pages"):
        return sum(blocks)
    # Every stage logs its own; the first one's is said.
    sizes = [sum(item.spec.page for item in group if item.stage == 0) for group in groups]
    return -(-sum(count * size for count, size in zip(blocks, sizes, strict=True)) // sizes[0])


def blocks_usable(
    groups: list[Group], of_stage: tuple[int, ...], num_blocks: int, budget: int | None, rules: Rules
) -> int:
    """Blocks that one request may hold, as the check at the start counts them."""
    usable = []
    for stage, size in enumerate(of_stage):
        counted = size
        if rules.packing != "balanced":
            held = [[item.spec.page for item in group if item.stage == stage] for group in groups]
            counted = _places(held) * sum(set(held[0]))
        usable.append(((num_blocks * size if budget is None else budget) - rules.spare_block * size) // counted)
    return min(usable)


def explanation(groups: list[Group], settings: Settings, context: int) -> str:
    """Why short requests take so much, in words."""
    states = sum(settings.blocks(group[0].spec, context) for group in groups if group[0].spec.kind == "compressor")
    every = sum(settings.blocks(group[0].spec, context) for group in groups)
    return (f"{len(groups)} groups share one pool; compressors' states, in blocks of 4 and 8 tokens for all that is "
            f"in flight, take {states:,} of {every:,} blocks")  # fmt: skip
