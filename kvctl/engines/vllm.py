"""vLLM's planner: pages, groups, blocks and the capacity that its start-up log prints.

Sources: vllm 0.32.0 v1/kv_cache_interface.py, v1/core/kv_cache_utils.py, platforms/interface.py
and platforms/cpu.py; rules of other versions from the releases that `RULES` names.

A layer's states become one spec each (`Spec`: what one block of one layer is). Specs of
equal kind form groups of as many layers; every group draws blocks of the same size from one
pool, and a request holds blocks of every group.
"""

from __future__ import annotations

from kvctl.allocation import Allocation, GroupRow, RankRow, Serving
from kvctl.engines.vllm_specs import Spec, kv_dtype, sized, specs_of
from kvctl.errors import ConfigError, UsageError
from kvctl.record import Record
from kvctl.spec import Attention, Formats, ModelSpec
from kvctl.units import plural

__all__ = ["check_version", "kv_dtype", "plan"]


class Rules(Record):
    """What changed between versions, from version `since` on."""

    since: tuple[int, int]
    capacity: str
    """What the logged token count is: "blocks" (blocks × block size), "groups" (blocks a group ×
    the smallest block size) or "concurrency" (concurrent full requests × their length)."""
    hybrid: bool
    """Whether windows are kept apart from full attention, and recurrent layers served at all."""
    even_groups: bool
    """Whether groups grow to the largest kind where that is under 1.5 × the smallest."""
    overlapped: bool
    """Whether asynchronous scheduling keeps two batches in flight on a GPU."""
    checkpoints: bool
    """Whether Mamba 2 reserves a block for a checkpoint of the prefill."""


RULES: tuple[Rules, ...] = (
    Rules((0, 8), "blocks", False, False, False, False),
    Rules((0, 11), "groups", True, False, False, False),
    Rules((0, 19), "groups", True, True, False, False),
    Rules((0, 20), "groups", True, True, False, False),
    Rules((0, 22), "concurrency", True, True, False, False),
    Rules((0, 32), "concurrency", True, True, True, True),
    Rules((0, 33), "concurrency", True, True, True, True),
)


def rules_for(version: str | None) -> tuple[Rules, str | None]:
    """Rules of a version ("0.32", "0.32.1", "v0.32.0"), and a warning where they were not read from it."""
    newest = RULES[-1]
    if version is None:
        return newest, None
    parts = version.lower().removeprefix("v").split(".")
    if not 2 <= len(parts) <= 4 or not all(part.isascii() and part.isdigit() and len(part) < 5 for part in parts):
        raise UsageError(f"--engine: {version[:40]!r} is no version of vLLM", hint="for example vllm@0.11")
    asked = (int(parts[0]), int(parts[1]))
    if not RULES[0].since <= asked <= newest.since:
        raise UsageError(
            f"--engine: kvctl knows vLLM {_dotted(RULES[0].since)} to {_dotted(newest.since)}, not {version}",
            hint="the rules change between versions; name one of these",
        )
    rules = next(rules for rules in reversed(RULES) if rules.since <= asked)
    if rules.since == asked:
        return rules, None
    return rules, f"estimated: vLLM {version} goes by the rules of {_dotted(rules.since)}, the nearest version read"


def check_version(version: str) -> None:
    """Refuses a version whose rules are not known."""
    rules_for(version)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


# -- the plan -------------------------------------------------------------------------------


_ATTENTION_FREE = ("mamba", "mamba2", "falcon_mamba")


class _Settings(Record):
    """Options with vLLM's defaults filled in."""

    cpu: bool
    ranks: int
    block: int
    batched: int
    in_flight: int
    checkpoints: bool
    block_given: bool
    aligned: bool
    """Recurrent states live at block boundaries, for prefix caching."""


def plan(
    spec: ModelSpec, context: int, sequences: int, fmt: Formats, serving: Serving, version: str | None
) -> Allocation:
    """What vLLM reserves on every rank for requests of at most `context` tokens (--max-model-len).

    Raises:
        ConfigError: a kind of state whose storage in vLLM is not known, or a model without a cache.
        UsageError: a split, block size or format that vLLM refuses.

    """
    if context < 1:
        raise UsageError("--ctx 0: vLLM needs a maximum length of at least one token")
    rules, doubt = rules_for(version)
    ranks = serving.tensor_parallel or 1
    if spec.attention_heads is not None and spec.attention_heads % ranks:
        raise UsageError(f"--tensor-parallel-size {ranks} does not divide the {spec.attention_heads} attention heads",
                         hint="vLLM refuses this split")  # fmt: skip
    if rules.since < (0, 32) and (fmt.key.head_bytes or fmt.key.name == "nvfp4"):
        raise UsageError(f"--kv-cache-dtype {fmt.key.name}: not known of vLLM {_dotted(rules.since)}",
                         hint="one of auto, bfloat16, fp8, fp8_e4m3, fp8_e5m2")  # fmt: skip
    reasons: list[str] = []
    warnings: list[str] = [doubt] if doubt else []
    by_layer = [(layer, specs_of(layer, spec, fmt, ranks, serving.device == "cpu")) for layer, _ in spec.groups]
    every = [item for _, specs in by_layer for item in specs]
    if not every:
        raise ConfigError(f"{spec.model_type[:60]}: nothing that vLLM would cache")
    if not rules.hybrid and any(item.kind == "state" for item in every):
        raise ConfigError(f"vLLM {_dotted(rules.since)} does not serve recurrent layers from its KV cache")
    settings = _settings(spec, serving, rules, every, context, warnings)
    block, padded = _block_size(settings, every, reasons)
    placed_of = {
        id(layer): [_placed(item, settings, block, padded, context) for item in specs] for layer, specs in by_layer
    }
    placed = [item for layer in spec.layers for item in placed_of[id(layer)]]
    if not rules.hybrid or serving.hybrid_disabled:
        placed = _promoted(placed, reasons)
    groups = _groups(placed, rules, reasons)

    request = sum(_blocks(group[0], context, settings) for group in groups)
    bytes_per_block = max(sum(item.page for item in group) for group in groups)
    _explain(spec, groups, settings, context, reasons)
    rows = tuple(_row(group, context, settings) for group in groups)
    reserved = sequences * request * bytes_per_block
    budget = serving.kv_budget
    num_blocks = budget // bytes_per_block if budget is not None else None
    concurrency = capacity = reported = None
    log: tuple[str, ...] = ()
    if num_blocks is not None:
        concurrency = num_blocks / request
        # Through a float, as vLLM does: its log shows the result of exactly this.
        capacity = int(concurrency * context)
        smallest = min(group[0].block for group in groups)
        reported = {
            "blocks": num_blocks * block,
            "groups": num_blocks // len(groups) * smallest,
            "concurrency": capacity,
        }[rules.capacity]
        # One block is always set aside.
        if num_blocks - 1 >= request:
            log = _log(rules, serving, context, reported, concurrency)
            if reserved > num_blocks * bytes_per_block:
                warnings.append(
                    f"{plural(sequences, 'request')} of this length need {sequences * request:,} blocks, "
                    f"and the budget holds {num_blocks:,}: some would wait"
                )
        else:
            warnings.append(
                f"vLLM would not start: one request of {context:,} tokens needs {request:,} blocks, "
                f"and the budget holds {num_blocks:,}, one of them set aside"
            )
    return Allocation(
        device=serving.device,
        tensor_parallel_size=ranks,
        block_size=block,
        bytes_per_block=bytes_per_block,
        blocks_per_request=request,
        reserved_bytes=reserved,
        kv_budget_bytes=budget,
        num_blocks=num_blocks,
        capacity_tokens=capacity,
        reported_capacity=reported,
        max_concurrency=concurrency,
        per_rank=tuple(RankRow(rank, bytes_per_block, reserved) for rank in range(ranks)),
        groups=rows,
        log=log,
        reasons=tuple(reasons),
        warnings=tuple(warnings),
        longest_sequence=context,
    )


def _log(rules: Rules, serving: Serving, context: int, tokens: int, concurrency: float) -> tuple[str, ...]:
    """What the engine prints at start-up."""
    pool = "CPU" if serving.device == "cpu" else "GPU"
    size = f"{pool} KV cache size: {tokens:,} tokens"
    limit = f"Maximum concurrency for {context:,} tokens per request: {concurrency:.2f}x"
    return (f"{size}, {limit}",) if rules.capacity == "concurrency" else (size, limit)


def _settings(
    spec: ModelSpec, serving: Serving, rules: Rules, specs: list[Spec], context: int, warnings: list[str]
) -> _Settings:
    cpu = serving.device == "cpu"
    kinds = {item.kind for item in specs}
    latent = "latent" in kinds
    block, batched = serving.block_size, serving.max_batched
    # Classes without any attention do not cache prefixes unless told to.
    caching = serving.prefix_caching if serving.prefix_caching is not None else spec.model_type not in _ATTENTION_FREE
    ranks = serving.tensor_parallel or 1
    if cpu and latent:
        if "indexer" in kinds or "state" in kinds:
            raise ConfigError("kvctl does not know vLLM's plan for this latent attention on a CPU")
        block, caching, batched = 16, False, max(context, 2048)
    elif cpu:
        block = block or 128
    elif block is None:
        block = 64 if latent else 16
        if latent:
            warnings.append("block size 64, as FlashMLA on a Hopper GPU has it; --block-size sets another backend's")
    if batched is None:
        batched = 2048 * ranks if cpu else 8192
        if kinds & {"window", "chunk"} and not cpu:
            warnings.append(
                "8,192 batched tokens, vLLM's default on a GPU of 70 GiB and more; --max-num-batched-tokens sets it"
            )
    batches = 2 if rules.overlapped and not cpu else 1
    if cpu and "state" in kinds:
        warnings.append("on a CPU with AVX512-BF16 vLLM keeps Mamba and delta states in float32, which takes more")
    return _Settings(cpu, ranks, block, batched, batches * batched, rules.checkpoints,
                     serving.block_size is not None, caching and "state" in kinds)  # fmt: skip


def _block_size(settings: _Settings, specs: list[Spec], reasons: list[str]) -> tuple[int, int]:
    """Tokens in a block, and the page that states are padded to (0: they are not)."""
    tokens = [item.token_bytes for item in specs if item.kind in ("full", "latent")]
    pages = [item.page for item in specs if item.kind == "state"]
    block = settings.block
    if not settings.cpu and block % 16:
        raise UsageError(f"--block-size {block} is no multiple of 16", hint="vLLM's attention kernels need one")
    if not pages or not tokens:
        return block, 0
    token = max(tokens)
    step = max(32 if settings.cpu else 16, block)
    if any(item.kind == "latent" for item in specs):
        step = max(step, 128)
    page = max(pages)
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


def _placed(item: Spec, settings: _Settings, block: int, padded: int, context: int) -> Spec:
    """A spec with its block size and page."""
    if item.kind == "state":
        # Without any attention the block is set before a platform's default is.
        aligned = block if padded or settings.block_given else 16
        return item.replace(block=aligned if settings.aligned else context, page=max(item.page, padded))
    if item.kind == "window" and settings.cpu:
        # The CPU's kernel takes multiples of 32 only, and windows choose their own block.
        return sized(item, max(item.step, block // item.step * item.step))
    return sized(item, block)


def _promoted(specs: list[Spec], reasons: list[str]) -> list[Spec]:
    """Windows and chunks stored as if every token were kept."""
    if len({item.kind for item in specs}) == 1 and len({item.limit for item in specs}) == 1:
        return specs
    if any(item.kind == "state" for item in specs):
        raise UsageError("vLLM does not run recurrent models with the hybrid KV cache manager disabled")
    if not any(item.grows for item in specs):
        raise UsageError("vLLM needs the hybrid KV cache manager for a model whose windows differ")
    block = next(item.block for item in specs if item.grows)
    reasons.append("without the hybrid KV cache manager, windowed layers keep every token")
    return [item if item.grows else sized(item, block).replace(kind="full", limit=0) for item in specs]


def _groups(specs: list[Spec], rules: Rules, reasons: list[str]) -> list[list[Spec]]:
    """Layers that share a block table; every group has a block of the same size."""
    first = specs[0]
    local = first.kind in ("window", "chunk")
    uniform = len({item.block for item in specs}) == 1 and (
        all(item.grows for item in specs)
        or (local and all((item.kind, item.limit) == (first.kind, first.limit) for item in specs))
    )
    if uniform or len(set(specs)) == 1:
        return [specs]
    page = max(item.page for item in specs)
    unified = [_unify(item, page, reasons) for item in specs]
    buckets: dict[Spec, list[Spec]] = {}
    for item in unified:
        buckets.setdefault(item, []).append(item)
    counts = [len(bucket) for bucket in buckets.values()]
    size = max(counts) if rules.even_groups and max(counts) < 1.5 * min(counts) else min(counts)
    groups = []
    for bucket in buckets.values():
        number = -(-len(bucket) // size)
        groups += [bucket[index::number] for index in range(number)]
    return groups


def _unify(item: Spec, page: int, reasons: list[str]) -> Spec:
    """The same page for every layer: more tokens in a block where that comes out even, padding elsewhere."""
    if item.page == page:
        return item
    if item.kind != "state" and page % item.page == 0:
        return item.replace(block=item.block * (page // item.page), page=page)
    if item.kind in ("latent", "indexer"):
        raise ConfigError(
            "vLLM cannot give latent layers the same page as this model's other layers",
            hint="--disable-hybrid-kv-cache-manager stores windows in full",
        )
    line = f"pages of {item.page:,} bytes are padded to {page:,}"
    if line not in reasons:
        reasons.append(line)
    return item.replace(page=page)


def _blocks(item: Spec, context: int, settings: _Settings) -> int:
    """Blocks that one request of the maximum length holds in a group of such layers."""
    if item.kind == "state":
        return 2 + item.checkpoints * settings.checkpoints if settings.aligned else 1
    if item.kind == "window":
        return -(-min(item.limit - 1 + settings.in_flight, context) // item.block) + 1
    if item.kind == "chunk":
        return -(-min(item.limit + settings.in_flight, context) // item.block)
    return -(-context // item.block)


_KINDS = {"full": "full_attention", "latent": "latent_attention", "indexer": "indexer", "window": "sliding_window",
          "chunk": "chunked_attention", "state": "recurrent_state"}  # fmt: skip


def _row(group: list[Spec], context: int, settings: _Settings) -> GroupRow:
    return GroupRow(
        kind=_KINDS[group[0].kind],
        layers=len(group),
        block_size=group[0].block,
        page_bytes=sum(item.page for item in group),
        blocks_per_request=_blocks(group[0], context, settings),
    )


def _explain(spec: ModelSpec, groups: list[list[Spec]], settings: _Settings, context: int, reasons: list[str]) -> None:
    """Why the engine takes more than the architecture needs, in words."""
    widest = max(len(group) for group in groups)
    short = sum(widest - len(group) for group in groups)
    if len(groups) > 1:
        reasons.append(
            f"{plural(len(groups), 'group')} of {plural(widest, 'layer')} share one pool"
            + (f"; {plural(short, 'place')} in them stay empty and are paid for" if short else "")
        )
    windows = sorted({item.limit for group in groups for item in group if item.kind == "window"})
    for window in windows:
        if window - 1 + settings.in_flight < context:
            batches = f"{settings.in_flight // settings.batched} × " if settings.in_flight != settings.batched else ""
            reasons.append(
                f"a window keeps {window:,} − 1 tokens, {batches}{settings.batched:,} in flight, and one block more"
            )
    if settings.aligned:
        reasons.append(
            "prefix caching keeps recurrent states at block boundaries: 2 blocks a group"
            + (", and 1 for a checkpoint with Mamba 2" if settings.checkpoints else "")
        )
    if settings.ranks > 1:
        heads = {s.kv_heads for layer, _ in spec.groups for s in layer.states if isinstance(s, Attention)}
        for count in sorted(heads):
            if settings.ranks > count:
                reasons.append(
                    f"{plural(count, 'KV head')} on {settings.ranks} ranks: every head is held {settings.ranks // count} times"
                )
        if any(item.kind == "latent" for group in groups for item in group):
            reasons.append(f"latents are not split: every one of {settings.ranks} ranks holds all of them")
