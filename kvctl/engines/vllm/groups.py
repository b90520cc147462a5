"""How vLLM's planner groups layers: pages made equal, groups of as many layers, blocks of a request.

Sources: vllm 0.33.0 v1/core/kv_cache_planning.py and v1/kv_cache_interface.py; what other
versions do otherwise stands in `Rules`.
"""

from __future__ import annotations

from kvctl.engines.versions import dotted
from kvctl.engines.vllm.rules import Rules
from kvctl.engines.vllm.specs import Spec, sized
from kvctl.engines.vllm.stages import stage_sizes
from kvctl.errors import ConfigError, UsageError
from kvctl.record import Record
from kvctl.search import last


class Placed(Record):
    """One layer's spec, and the pipeline stage that holds the layer."""

    spec: Spec
    stage: int


Group = list[Placed]


class Settings(Record):
    """Options with vLLM's defaults filled in."""

    cpu: bool
    ranks: int
    block: int
    batched: int
    in_flight: int
    encoder: int
    """Positions of the encoder that a request may hold: its budget is that of a batch."""
    block_given: bool
    states: str
    """What recurrent layers keep of a request: "none" (the newest state alone), "align" (two, at
    block boundaries, for prefix caching) or "all" (one at every block boundary)."""
    chunk: int
    """Tokens that a recurrent layer's kernel scans at once; blocks are multiples of it with "all"."""
    checkpoints: tuple[str, ...]
    """Kinds of state that reserve a block for a checkpoint of the prefill."""
    delta_step: int
    """What blocks are a multiple of for such checkpoints of gated delta layers; 1 without."""
    drafted: int
    """Blocks that draft tokens need beside a state's own."""
    context_parallel: int
    """Ranks that tokens of the cache are dealt out to."""
    latent_step: int
    retained: int = 0
    """Tokens that windows keep beyond their length."""

    def blocks(self, spec: Spec, context: int) -> int:
        """Blocks that one request of `context` tokens holds in a group of such layers."""
        if spec.kind == "state":
            if self.states == "all":
                return -(-context // spec.block) + self.drafted
            if self.states == "align":
                return 2 + self.drafted + (spec.checkpoints in self.checkpoints)
            return 1 + self.drafted
        if spec.kind in ("window", "compressor"):
            return -(-min(spec.limit - 1 + self.retained + self.in_flight, context) // spec.block) + 1
        if spec.kind == "chunk":
            return -(-min(spec.limit + self.in_flight, context) // spec.block)
        if spec.kind == "tail":
            return 1
        if spec.kind == "cross":
            return -(-spec.limit // spec.block)
        held = -(-context // self.context_parallel)
        return -(-held // spec.block)


def block_size(settings: Settings, specs: list[Spec], packed: int, reasons: list[str]) -> tuple[int, int]:
    """Tokens in a block, and the page that states are padded to (0: they are not).

    `packed`: bytes that a token takes in layers which a packed format leaves out, 0 without any.
    """
    tokens = [item.token_bytes for item in specs if item.kind in ("full", "latent")]
    pages = [item.page for item in specs if item.kind == "state"]
    block = settings.block
    if not settings.cpu and block % 16:
        raise UsageError(f"--block-size {block} is no multiple of 16", hint="vLLM's attention kernels need one")
    if packed and not pages and packed > min(tokens):
        # Blocks grow until a page covers the smallest one of a layer that is not packed.
        smallest = min(tokens)
        block = max(block, block * -(-16 * packed // (block * smallest)))
        reasons.append(f"a block holds {block} tokens so that a packed page covers one of the layers left unpacked")
    if not pages or not tokens:
        return block, 0
    token = max(tokens)
    step = max(32 if settings.cpu else 16, block)
    if any(item.kind == "latent" for item in specs):
        step = max(step, settings.latent_step)
    page = max(pages)
    if settings.states == "all":
        import math

        step = math.lcm(settings.chunk, step)
    elif settings.states == "align":
        import math

        step = math.lcm(step, settings.delta_step)
    needed = step * -(-page // (step * token))
    if settings.cpu:
        needed = -(-needed // 32) * 32
    if block < needed:
        reasons.append(
            f"a block holds {needed:,} tokens so that a page of attention is as large as a recurrent state "
            f"of {page:,} bytes"
        )
        block = needed
    if block * token > page:
        reasons.append(f"recurrent states of {page:,} bytes are padded to pages of {block * token:,}")
    return block, block * token


def placed(item: Spec, settings: Settings, block: int, padded: int, context: int) -> Spec:
    """A spec with its block size and page."""
    if item.kind == "state":
        # Without any attention the block is set before a platform's default is.
        aligned = block if padded or settings.block_given else 16
        return item.replace(block=aligned if settings.states != "none" else context, page=max(item.page, padded))
    if item.kind == "tail":
        return item.replace(block=block)
    if item.kind == "window" and settings.cpu:
        # The CPU's kernel takes multiples of 32 only, and windows choose their own block.
        return sized(item, max(item.step, block // item.step * item.step))
    if item.kind == "cross":
        return sized(item, block).replace(limit=settings.encoder)
    # Some windows come with a block of their own.
    return sized(item, item.block or block)


def promoted(layers: list[Placed], reasons: list[str]) -> list[Placed]:
    """Windows and chunks stored as if every token were kept."""
    specs = [item.spec for item in layers]
    if len({item.kind for item in specs}) == 1 and len({item.limit for item in specs}) == 1:
        return layers
    if any(item.kind == "state" for item in specs):
        raise UsageError("vLLM does not run recurrent models with the hybrid KV cache manager disabled")
    if not any(item.grows for item in specs):
        raise UsageError("vLLM needs the hybrid KV cache manager for a model whose windows differ")
    block = next(item.block for item in specs if item.grows)
    reasons.append("one table for all layers: windowed ones keep every token")
    full = [item if item.grows else sized(item, block).replace(kind="full", limit=0) for item in specs]
    return [item.replace(spec=spec) for item, spec in zip(layers, full, strict=True)]


def groups_of(layers: list[Placed], rules: Rules, reasons: list[str]) -> list[Group]:
    """Layers that share a block table; every group has a block of the same size."""
    specs = [item.spec for item in layers]
    if any(item.kind == "tail" for item in specs):
        return _around_latents(layers, rules)
    first = specs[0]
    local = first.kind in ("window", "chunk")
    uniform = len({item.block for item in specs}) == 1 and (
        all(item.grows for item in specs)
        or (local and all((item.kind, item.limit) == (first.kind, first.limit) for item in specs))
    )
    if uniform or len(set(specs)) == 1:
        return [layers]
    page = max(item.page for item in specs)
    uneven = [item for item in specs if item.kind in ("latent", "indexer") and page % item.page]
    if (
        uneven
        and any(item.kind == "window" for item in specs)
        and not any(item.kind in ("chunk", "state") for item in specs)
    ):
        # Latents cannot be padded: windows are stored in full instead.
        return [promoted(layers, reasons)]
    buckets: dict[Spec, Group] = {}
    for item in layers:
        spec = _unified(item.spec, page, rules, reasons)
        buckets.setdefault(spec, []).append(item.replace(spec=spec))
    counts = [len(bucket) for bucket in buckets.values()]
    size = max(counts) if max(counts) < rules.even_below * min(counts) else min(counts)
    groups = []
    for bucket in buckets.values():
        number = -(-len(bucket) // size)
        groups += [bucket[index::number] for index in range(number)]
    return groups


def _around_latents(layers: list[Placed], rules: Rules) -> list[Group]:
    """Latents with indexers that pool tokens are one group; states lie where its latents do, so many to a group.

    Sources: vllm 0.30.0 v1/core/kv_cache_utils.py, _get_kv_cache_groups_glm5_next; 0.33.0
    v1/core/kv_cache_planning.py, _get_packed_kv_cache_groups, which comes to the same.
    """
    if not rules.pooled:
        raise ConfigError(f"vLLM {dotted(rules.since)} does not serve indexers that pool tokens", hint="0.30 does")
    if len({item.stage for item in layers}) > 1:
        raise ConfigError("kvctl does not know how vLLM divides pooled indexers over pipeline stages")
    attention = [item for item in layers if item.spec.kind in ("latent", "indexer")]
    tails = [item for item in layers if item.spec.kind == "tail"]
    states = [item for item in layers if item.spec.kind == "state"]
    latents = sum(item.spec.kind == "latent" for item in attention)
    fit = even = latents
    if rules.since >= (0, 32):
        fit = max(sum(item.spec.page for item in attention) // states[0].spec.page, 1)
        # Places for the three kinds of layers that leave fewest empty; the largest of the best.
        counts = (latents, len(tails), len(states))
        even = min(range(latents, max(counts) + 1), key=lambda size: (sum(-count % size for count in counts), -size))
    number = max(-(-len(states) // fit), -(-len(states) // even))
    return [attention, tails, *(states[index::number] for index in range(number))]


_KERNEL_KEYS = 64
"""Pooled keys in a page that the indexer's kernel reads."""


def block_step(attention: Group) -> int:
    """Bytes that blocks with pooled keys are a multiple of, from 0.32 on: whole rows of latents, and whole pages of
    keys where the kernel splits a block.

    Sources: vllm 0.33.0 v1/worker/utils.py, customize_attention_spec, and what backends of sparse latents and
    `Glm5NextIndexerBackend` ask for.
    """
    import math

    latent, keys = (next(item.spec for item in attention if item.spec.kind == kind) for kind in ("latent", "indexer"))
    kernel = math.gcd(_KERNEL_KEYS * keys.stride, keys.block)
    return math.lcm(latent.token_bytes, 1 if kernel == keys.block else kernel // keys.stride * keys.token_bytes)


def _unified(item: Spec, page: int, rules: Rules, reasons: list[str]) -> Spec:
    """The same page for every layer: more tokens in a block where that comes out even, padding elsewhere."""
    if item.page == page:
        return item
    even = item.kind != "state" and page % item.page == 0
    if rules.pages == "equal" or (rules.pages == "scaled" and not even):
        raise ConfigError(f"vLLM {dotted(rules.since)} does not serve layers whose pages have {item.page:,} and {page:,} bytes",
                          hint="a later version does, or --disable-hybrid-kv-cache-manager")  # fmt: skip
    if even:
        return item.replace(block=item.block * (page // item.page), page=page)
    if item.kind in ("latent", "indexer"):
        raise ConfigError("vLLM cannot give latent layers the same page as this model's other layers")
    line = f"pages of {item.page:,} bytes are padded to {page:,}"
    if line not in reasons:
        reasons.append(line)
    return item.replace(page=page)


def bytes_per_block(groups: list[Group], stage: int) -> int:
    """Bytes of one block on a pipeline stage: those of the group that holds most there."""
    return max(sum(item.spec.page for item in group if item.stage == stage) for group in groups)


def longest(groups: list[Group], settings: Settings, blocks: int, most: int) -> int:
    """The longest request, of at most `most` tokens, that so many blocks hold; 0 where none does."""

    def fits(tokens: int) -> bool:
        return sum(settings.blocks(group[0].spec, tokens) for group in groups) <= blocks

    return last(fits, 0, most + 1)


def stage_of(layers: int, stages: int, partition: tuple[int, ...] | None) -> list[int]:
    """The pipeline stage of every layer."""
    return [stage for stage, count in enumerate(stage_sizes(layers, stages, partition)) for _ in range(count)]
