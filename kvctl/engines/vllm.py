"""vLLM's planner: pages, groups, blocks and the capacity that its start-up log prints.

Sources: vllm 0.32.0 v1/kv_cache_interface.py, v1/core/kv_cache_utils.py, platforms/interface.py
and platforms/cpu.py; rules of other versions from the releases that `RULES` names.

A layer's states become one spec each (`_Spec`: what one block of one layer is). Specs of
equal kind form groups of as many layers; every group draws blocks of the same size from one
pool, and a request holds blocks of every group.
"""

from __future__ import annotations

from kvctl.allocation import Allocation, GroupRow, RankRow, Serving
from kvctl.errors import ConfigError, UsageError
from kvctl.formats import FP32, CacheFormat, DType
from kvctl.record import Record
from kvctl.spec import (
    Attention,
    ChunkedAttention,
    ConvState,
    Empty,
    Formats,
    FullAttention,
    Indexer,
    LatentAttention,
    Layer,
    LayerState,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
)
from kvctl.units import plural


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

_ONE_BYTE = "1 byte an element; scales a tensor, kept with the weights"
_DS_MLA = CacheFormat("fp8_ds_mla", 576, 656, "656 bytes a token: 512 fp8, 4 fp32 scales, 64 bf16 of the rotary key")

KV_DTYPES: dict[str, CacheFormat] = {
    "float16": CacheFormat("fp16", 1, 2, "2 bytes an element"),
    "bfloat16": CacheFormat("bf16", 1, 2, "2 bytes an element"),
    "fp8": CacheFormat("fp8", 1, 1, _ONE_BYTE),
    "fp8_e4m3": CacheFormat("fp8_e4m3", 1, 1, _ONE_BYTE),
    "fp8_e5m2": CacheFormat("fp8_e5m2", 1, 1, _ONE_BYTE),
    "fp8_inc": CacheFormat("fp8_inc", 1, 1, _ONE_BYTE),
    "fp8_ds_mla": _DS_MLA,
    "fp8_per_token_head": CacheFormat(
        "fp8_per_token_head", 1, 1, "1 byte an element + a 4-byte scale for each token and KV head", 4
    ),
    "int8_per_token_head": CacheFormat(
        "int8_per_token_head", 1, 1, "1 byte an element + a 4-byte scale for each token and KV head", 4
    ),
    "int4_per_token_head": CacheFormat(
        "int4_per_token_head", 2, 1, "1 byte per 2 elements + a 4-byte scale for each token and KV head", 4
    ),
    "nvfp4": CacheFormat("nvfp4", 16, 9, "9 bytes per 16 elements: e2m1 and one e4m3 scale"),
}
"""What --kv-cache-dtype takes. vLLM also has packed formats (turboquant_*, ultraquant_4bit,
nvfp4_ds_mla) that are not counted here yet."""

_UNCOUNTED = ("nvfp4_ds_mla", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc",
              "ultraquant_4bit", "nvfp4_4over6")  # fmt: skip


def kv_dtype(name: str, serving: Serving, option: str) -> CacheFormat:
    """The cache format that vLLM's --kv-cache-dtype `name` means; unknown ones list what there is."""
    fmt = KV_DTYPES.get(name.lower())
    if fmt is None:
        known = name.lower() in _UNCOUNTED
        raise UsageError(
            f"{option}: {name[:40]!r} is "
            + ("a format of vLLM that kvctl does not count yet" if known else "no format that vLLM has"),
            hint="one of auto, " + ", ".join(KV_DTYPES),
        )
    return fmt


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


# -- specs ----------------------------------------------------------------------------------


class _Spec(Record):
    """One block of one layer. `limit`: window or chunk; equal specs share a group."""

    kind: str
    """full, latent, indexer, window, chunk or state."""
    token_bytes: int
    """Bytes of one token; 0 for states."""
    block: int
    limit: int = 0
    step: int = 32
    """What a CPU's window kernel wants a block to be a multiple of."""
    page: int = 0
    """Bytes of a block, padding included."""
    checkpoints: int = 0

    @property
    def grows(self) -> bool:
        return self.kind in ("full", "latent", "indexer")


def _sized(spec: _Spec, block: int) -> _Spec:
    return spec.replace(block=block, page=block * spec.token_bytes)


def _heads(heads: int, ranks: int) -> int:
    """KV heads on one rank; vLLM repeats them once ranks outnumber them."""
    if heads % ranks and ranks % heads:
        raise UsageError(
            f"--tensor-parallel-size {ranks} neither divides {heads} KV heads nor is a multiple of them",
            hint="vLLM refuses this split",
        )
    return max(1, heads // ranks)


def _divide(count: int, ranks: int, what: str) -> int:
    if count % ranks:
        raise UsageError(
            f"--tensor-parallel-size {ranks} does not divide {count:,} {what}", hint="vLLM refuses this split"
        )
    return count // ranks


_CONFIG_STATES = ("nemotron_h", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Model types whose state dtype vLLM takes from the config; others follow the model's dtype."""


def _state_bytes(states: list[LayerState], model_type: str, fmt: Formats, ranks: int) -> tuple[int, int]:
    """Bytes of one request's convolution and recurrent state on one rank, and Mamba 2's checkpoint blocks."""
    total, checkpoints = 0, 0
    for state in states:
        if isinstance(state, ConvState):
            channels = state.channels
            groups, width = state.groups
            if groups % ranks:
                # Heads on each rank need their group with them: groups are repeated.
                if groups != 1:
                    raise UsageError(
                        f"--tensor-parallel-size {ranks} does not divide {groups} state groups",
                        hint="vLLM refuses this split",
                    )
                channels += (ranks - 1) * width
            columns = state.kernel - 1 if state.fixed_columns is None else state.fixed_columns
            total += _divide(channels, ranks, "channels of the convolution") * columns * fmt.model.bytes
        elif isinstance(state, RecurrentState):
            dtype: DType = fmt.model
            if state.name == "kda":
                dtype = FP32
            elif model_type in _CONFIG_STATES and state.dtype is not None:
                dtype = state.dtype
            total += (
                _divide(state.shape[0], ranks, "heads of the state") * (state.elements // state.shape[0]) * dtype.bytes
            )
            checkpoints = int(state.name == "ssm" and len(state.shape) == 3)
    return total, checkpoints


def _latent_row(state: LatentAttention, fmt: CacheFormat) -> int:
    """Bytes of one token's latent."""
    width = state.latent + state.rope
    if fmt.name == _DS_MLA.name and width != _DS_MLA.block:
        raise UsageError(f"--kv-cache-dtype fp8_ds_mla is for latents of 512 + 64, not of {width}")
    if fmt.name == "nvfp4":
        raise UsageError("vLLM does not keep latents in nvfp4", hint="--kv-cache-dtype fp8")
    # Two scales, as if there were values of their own.
    return fmt.row_bytes(width, 0) + 2 * fmt.head_bytes


def _attention(state: Attention, fmt: Formats, heads: int, cpu: bool) -> _Spec:
    keys, values = heads * state.key_dim, heads * state.value_dim
    if cpu and fmt.key.name in KV_DTYPES and fmt.key.name not in ("float16", "bfloat16"):
        # The CPU's kernel packs nothing and stores no scales beside the rows: a byte an element.
        token = keys + values
    else:
        token = fmt.key.row_bytes(keys, heads) + fmt.value.row_bytes(values, heads)
    # Keys and values of different widths run on a kernel of their own.
    step = 32 if state.key_dim == state.value_dim else 16
    if isinstance(state, SlidingWindow):
        return _Spec("window", token, 0, state.window, step)
    if isinstance(state, ChunkedAttention):
        return _Spec("chunk", token, 0, state.chunk)
    return _Spec("full", token, 0)


_STATES = {("conv",), ("conv", "delta"), ("conv", "kda"), ("conv", "ssm")}


def _specs_of(layer: Layer, spec: ModelSpec, fmt: Formats, ranks: int, cpu: bool) -> list[_Spec]:
    """Specs of one layer, block size still open (0)."""
    specs: list[_Spec] = []
    states: list[LayerState] = []
    for state in layer.states_in("vllm"):
        if isinstance(state, Empty):
            continue
        if isinstance(state, (ConvState, RecurrentState)):
            states.append(state)
        elif isinstance(state, LatentAttention) and state.window is None:
            specs.append(_Spec("latent", _latent_row(state, fmt.key), 0))
        elif isinstance(state, Indexer) and state.stride == 1 and state.dim % 128 == 0 and specs:
            # Keys in fp8 with one fp32 scale for every 128, whatever the cache's format.
            specs.append(_Spec("indexer", state.dim + state.dim // 128 * 4, 0))
        elif type(state) in (FullAttention, SlidingWindow, ChunkedAttention):
            assert isinstance(state, Attention)
            if fmt.key.name == _DS_MLA.name:
                raise UsageError(
                    "--kv-cache-dtype fp8_ds_mla is for latent attention; this model keeps keys and values"
                )
            if not state.value_dim or (isinstance(state, FullAttention) and state.prefix):
                raise _unknown(spec, state)
            specs.append(_attention(state, fmt, _heads(state.kv_heads, ranks), cpu))
        else:
            raise _unknown(spec, state)
    if states:
        names = tuple(
            "conv" if isinstance(s, ConvState) else s.name for s in states if isinstance(s, (ConvState, RecurrentState))
        )
        if names not in _STATES or (names == ("conv",) and specs):
            raise _unknown(spec, states[-1])
        page, checkpoints = _state_bytes(states, spec.model_type, fmt, ranks)
        specs.append(_Spec("state", 0, 0, page=page, checkpoints=checkpoints))
    return specs


def _unknown(spec: ModelSpec, state: LayerState) -> ConfigError:
    return ConfigError(
        f"{spec.id}: kvctl does not know how vLLM stores its {state.kind.replace('_', ' ')} yet",
        hint="--engine ideal says what the architecture needs",
    )


# -- the plan -------------------------------------------------------------------------------


_ATTENTION_FREE = ("mamba", "mamba2", "falcon_mamba")


class _Settings(Record):
    """Options with vLLM's defaults filled in."""

    cpu: bool
    ranks: int
    block: int
    batched: int
    in_flight: int
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
    by_layer = [(layer, _specs_of(layer, spec, fmt, ranks, serving.device == "cpu")) for layer, _ in spec.groups]
    every = [item for _, specs in by_layer for item in specs]
    if not every:
        raise ConfigError(f"{spec.model_type[:60]}: nothing that vLLM would cache")
    if not rules.hybrid and any(item.kind == "state" for item in every):
        raise ConfigError(f"vLLM {_dotted(rules.since)} does not serve recurrent layers from its KV cache")
    settings = _settings(spec, serving, rules, every, context, warnings)
    block, padded = _block_size(settings, every, reasons)
    specs_of = {
        id(layer): [_placed(item, settings, block, padded, context) for item in specs] for layer, specs in by_layer
    }
    placed = [item for layer in spec.layers for item in specs_of[id(layer)]]
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
    starts = False
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
        starts = num_blocks - 1 >= request
        if starts and reserved > num_blocks * bytes_per_block:
            warnings.append(
                f"{plural(sequences, 'request')} of this length need {sequences * request:,} blocks, and the budget holds "
                f"{num_blocks:,}: some would wait"
            )
        if not starts:
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
        log=_log(rules, serving, context, reported, concurrency) if starts else (),
        reasons=tuple(reasons),
        warnings=tuple(warnings),
    )


def _log(
    rules: Rules, serving: Serving, context: int, tokens: int | None, concurrency: float | None
) -> tuple[str, ...]:
    """What the engine prints at start-up; nothing without a budget."""
    if tokens is None:
        return ()
    pool = "CPU" if serving.device == "cpu" else "GPU"
    size = f"{pool} KV cache size: {tokens:,} tokens"
    limit = f"Maximum concurrency for {context:,} tokens per request: {concurrency:.2f}x"
    return (f"{size}, {limit}",) if rules.capacity == "concurrency" else (size, limit)


def _settings(
    spec: ModelSpec, serving: Serving, rules: Rules, specs: list[_Spec], context: int, warnings: list[str]
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
    return _Settings(cpu, ranks, block, batched, batches * batched, serving.block_size is not None,
                     caching and "state" in kinds)  # fmt: skip


def _block_size(settings: _Settings, specs: list[_Spec], reasons: list[str]) -> tuple[int, int]:
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


def _placed(item: _Spec, settings: _Settings, block: int, padded: int, context: int) -> _Spec:
    """A spec with its block size and page."""
    if item.kind == "state":
        # Without any attention the block is set before a platform's default is.
        aligned = block if padded or settings.block_given else 16
        return item.replace(block=aligned if settings.aligned else context, page=max(item.page, padded))
    if item.kind == "window" and settings.cpu:
        # The CPU's kernel takes multiples of 32 only, and windows choose their own block.
        return _sized(item, max(item.step, block // item.step * item.step))
    return _sized(item, block)


def _promoted(specs: list[_Spec], reasons: list[str]) -> list[_Spec]:
    """Windows and chunks stored as if every token were kept."""
    if len({item.kind for item in specs}) == 1 and len({item.limit for item in specs}) == 1:
        return specs
    if any(item.kind == "state" for item in specs):
        raise UsageError("vLLM does not run recurrent models with the hybrid KV cache manager disabled")
    if not any(item.grows for item in specs):
        raise UsageError("vLLM needs the hybrid KV cache manager for a model whose windows differ")
    block = next(item.block for item in specs if item.grows)
    reasons.append("without the hybrid KV cache manager, windowed layers keep every token")
    return [item if item.grows else _sized(item, block).replace(kind="full", limit=0) for item in specs]


def _groups(specs: list[_Spec], rules: Rules, reasons: list[str]) -> list[list[_Spec]]:
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
    buckets: dict[_Spec, list[_Spec]] = {}
    for item in unified:
        buckets.setdefault(item, []).append(item)
    counts = [len(bucket) for bucket in buckets.values()]
    size = max(counts) if rules.even_groups and max(counts) < 1.5 * min(counts) else min(counts)
    groups = []
    for bucket in buckets.values():
        number = -(-len(bucket) // size)
        groups += [bucket[index::number] for index in range(number)]
    return groups


def _unify(item: _Spec, page: int, reasons: list[str]) -> _Spec:
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


def _blocks(item: _Spec, context: int, settings: _Settings) -> int:
    """Blocks that one request of the maximum length holds in a group of such layers."""
    if item.kind == "state":
        return 2 + item.checkpoints if settings.aligned else 1
    if item.kind == "window":
        return -(-min(item.limit - 1 + settings.in_flight, context) // item.block) + 1
    if item.kind == "chunk":
        return -(-min(item.limit + settings.in_flight, context) // item.block)
    return -(-context // item.block)


_KINDS = {"full": "full_attention", "latent": "latent_attention", "indexer": "indexer", "window": "sliding_window",
          "chunk": "chunked_attention", "state": "recurrent_state"}  # fmt: skip


def _row(group: list[_Spec], context: int, settings: _Settings) -> GroupRow:
    return GroupRow(
        kind=_KINDS[group[0].kind],
        layers=len(group),
        block_size=group[0].block,
        page_bytes=sum(item.page for item in group),
        blocks_per_request=_blocks(group[0], context, settings),
    )


def _explain(spec: ModelSpec, groups: list[list[_Spec]], settings: _Settings, context: int, reasons: list[str]) -> None:
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
        reasons.append("prefix caching keeps recurrent states at block boundaries: 2 blocks a group, 3 with Mamba 2")
    if settings.ranks > 1:
        heads = {s.kv_heads for layer, _ in spec.groups for s in layer.states if isinstance(s, Attention)}
        for count in sorted(heads):
            if settings.ranks > count:
                reasons.append(
                    f"{plural(count, 'KV head')} on {settings.ranks} ranks: every head is held {settings.ranks // count} times"
                )
        if any(item.kind == "latent" for group in groups for item in group):
            reasons.append(f"latents are not split: every one of {settings.ranks} ranks holds all of them")
