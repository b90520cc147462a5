"""vLLM's planner: pages, groups, blocks and the capacity that its start-up log prints.

Sources: vllm 0.32.0 and 0.33.0 v1/kv_cache_interface.py, v1/core/kv_cache_utils.py and
kv_cache_planning.py, platforms/interface.py and platforms/cpu.py; `vllm_rules` has what other
versions do otherwise.

A layer's states become one spec each (`Spec`: what one block of one layer is). Specs of
equal kind form groups of as many layers; every group draws blocks of the same size from one
pool, and a request holds blocks of every group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvctl.allocation import Allocation, GroupRow, RankRow, Serving
from kvctl.engines import vllm_packed as packed
from kvctl.engines.vllm_groups import (
    Group,
    Placed,
    Settings,
    block_size,
    block_step,
    bytes_per_block,
    groups_of,
    longest,
    placed,
    promoted,
    stage_of,
)
from kvctl.engines.vllm_models import MINIMAX_M3, MINIMAX_M3_BLOCK, check_served, least_batched, specs_of
from kvctl.engines.vllm_rules import Rules, dotted, minor_of, rules_for
from kvctl.engines.vllm_specs import KV_DTYPES, Spec, check_format, is_packed, kv_dtype, told
from kvctl.engines.vllm_speculation import Drafts, drafts
from kvctl.errors import ConfigError, UsageError
from kvctl.formats import plain
from kvctl.record import Record
from kvctl.spec import Attention, Formats, Indexer, LatentAttention, ModelSpec
from kvctl.units import plural

__all__ = ["check_version", "kv_dtype", "plan"]


def check_version(version: str) -> None:
    """Refuses a version whose rules are not known."""
    rules_for(version)


_ATTENTION_FREE = ("mamba", "mamba2", "falcon_mamba")
_STATE_EACH_BLOCK = ("bamba", "falcon_h1", "granitemoehybrid", "jamba", "mamba", "mamba2", "falcon_mamba", "nemotron_h",
                     "zamba2")  # fmt: skip
"""Model types that, until 0.27, kept a state at every block boundary when prefixes are cached."""


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
    reasons: list[str] = []
    warnings: list[str] = [doubt] if doubt else []
    _check_split(spec, serving)
    asked = (rules.since[0], rules.since[1]) if version is None else minor_of(version)
    check_served(spec, asked)
    check_format(fmt, asked)
    laid = _lay_out(spec, context, fmt, serving, rules, reasons, warnings)
    budget, num_blocks = serving.kv_budget, serving.num_blocks
    if num_blocks is None and budget is not None:
        # The poorest stage decides for all.
        num_blocks = budget // laid.widest
    usable = 0
    if num_blocks is not None:
        usable = num_blocks - rules.spare_block
        if laid.packed:
            usable = packed.blocks_usable(laid.groups, laid.of_stage, num_blocks, budget, rules)
        fits = longest(laid.groups, laid.settings, usable, context)
        if serving.fit_length and 0 < fits < context:
            reasons.append(f"a length of {fits:,} is the longest that fits; the model's own is {context:,}")
            laid = laid.replace(context=fits)
        _warn_of_shortage(rules, serving, laid, num_blocks, usable, sequences, fits, warnings)
    _warn_of_precision(spec, fmt, serving, rules, warnings)
    _explain(spec, laid, serving, reasons)
    reported, concurrency, log = _capacity(rules, serving, laid, num_blocks)
    if num_blocks is not None and usable < laid.request:
        log = ()
    elif rules.each_stage and budget is not None and serving.num_blocks is None:
        counts = [budget // size for size in laid.of_stage]
        log = tuple(line for count in counts for line in _capacity(rules, serving, laid, count)[2])
    ranks, held = laid.settings.ranks, sequences * laid.request
    if num_blocks is not None and num_blocks > 2 * (held + rules.spare_block):
        enough = (held + rules.spare_block) * laid.widest
        reasons.append(
            f"blocks fill the whole budget whatever the load: --kv-cache-memory-bytes {enough} holds this one"
        )
    return Allocation(
        device=serving.device,
        tensor_parallel_size=ranks,
        block_size=laid.block,
        bytes_per_block=laid.widest,
        blocks_per_request=laid.request,
        reserved_bytes=held * laid.widest,
        kv_budget_bytes=budget,
        num_blocks=num_blocks,
        # Through a float, as vLLM does: its log shows the result of exactly this.
        capacity_tokens=int(concurrency * laid.context) if concurrency is not None else None,
        reported_capacity=reported,
        max_concurrency=concurrency,
        per_rank=tuple(
            RankRow(stage * ranks + rank, size, held * size)
            for stage, size in enumerate(laid.of_stage)
            for rank in range(ranks)
        ),
        groups=tuple(_row(group, laid) for group in laid.groups),
        log=log,
        reasons=tuple(reasons),
        warnings=tuple(warnings),
        longest_sequence=laid.context,
    )


class _Laid(Record):
    """Layers laid out in groups, for requests of at most `context` tokens."""

    groups: list[Group]
    settings: Settings
    block: int
    context: int
    of_stage: tuple[int, ...]
    """Bytes of a block on every pipeline stage."""
    packed: bool = False
    """Whether layers of unequal pages lie side by side."""

    @property
    def widest(self) -> int:
        return max(self.of_stage)

    @property
    def request(self) -> int:
        """Blocks that one request holds, over all groups."""
        return sum(self.settings.blocks(group[0].spec, self.context) for group in self.groups)


def _lay_out(
    spec: ModelSpec, context: int, fmt: Formats, serving: Serving, rules: Rules, reasons: list[str], warnings: list[str]
) -> _Laid:
    side_by_side = packed.packs_layers(spec)
    if side_by_side:
        fmt = packed.cache_format(fmt, serving, rules, warnings)
    else:
        fmt = _sparse_format(spec, fmt, serving, rules, warnings)
    drafted = drafts(spec, serving.speculative, serving.draft)
    if drafted.reason:
        reasons.append(drafted.reason)
    layers = _layers(spec, fmt, serving, drafted, reasons)
    every = [item.spec for item in layers]
    if not every:
        raise ConfigError(f"{spec.model_type[:60]}: nothing that vLLM would cache")
    if not rules.hybrid and any(item.kind == "state" for item in every):
        raise ConfigError(f"vLLM {dotted(rules.since)} does not serve recurrent layers from its KV cache")
    settings = _settings(spec, serving, rules, every, context, drafted.tokens, warnings)
    settings = settings.replace(retained=drafted.retained if rules.since >= (0, 28) else 0)
    unpacked = max((item.token_bytes for item in every if item.kind == "full"), default=0) if is_packed(fmt) else 0
    block, padded = block_size(settings, every, unpacked, reasons)
    stages = range(serving.pipeline_parallel or 1)
    pooled = any(item.kind == "tail" for item in every)
    if (side_by_side or pooled) and _stored_in_full(layers, serving, rules, reasons):
        raise ConfigError(f"{spec.id}: kvctl does not know vLLM's plan without the hybrid KV cache manager",
                          hint="without what turns it off: its own option, or a KV connector")  # fmt: skip
    if side_by_side:
        groups = packed.groups_of(layers, rules)
        of_stage = tuple(packed.bytes_per_block(groups, stage, rules) for stage in stages)
        return _Laid(groups, settings, block, context, of_stage, True)
    layers = [item.replace(spec=placed(item.spec, settings, block, padded, context)) for item in layers]
    if not rules.hybrid or _stored_in_full(layers, serving, rules, reasons):
        layers = promoted(layers, reasons)
    groups = groups_of(layers, rules, reasons)
    step = block_step(groups[0]) if pooled and rules.since >= (0, 32) else 1
    of_stage = tuple(-(-bytes_per_block(groups, stage) // step) * step for stage in stages)
    return _Laid(groups, settings, block, context, of_stage)


def _check_split(spec: ModelSpec, serving: Serving) -> None:
    ranks = serving.tensor_parallel or 1
    if spec.attention_heads is not None and spec.attention_heads % ranks:
        raise UsageError(f"--tensor-parallel-size {ranks} does not divide the {spec.attention_heads} attention heads",
                         hint="vLLM refuses this split")  # fmt: skip
    if ranks % (serving.decode_context_parallel or 1):
        raise UsageError(f"--decode-context-parallel-size {serving.decode_context_parallel} does not divide the "
                         f"{plural(ranks, 'rank')} of --tensor-parallel-size", hint="vLLM refuses this split")  # fmt: skip


_PACKS_FP8 = ("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120")
"""Backends that keep sparse latents in a layout of their own when told fp8."""


def _sparse_format(spec: ModelSpec, fmt: Formats, serving: Serving, rules: Rules, warnings: list[str]) -> Formats:
    """fp8 means fp8_ds_mla for latents with an indexer, on the kernel that a Hopper GPU runs them on."""
    latents = [
        layer for layer, _ in spec.groups if any(isinstance(s, LatentAttention) for s in layer.states_in("vllm"))
    ]
    sparse = any(isinstance(state, Indexer) for layer in latents for state in layer.states_in("vllm"))
    if not sparse or serving.device == "cpu":
        return fmt
    backend = (serving.attention_backend or _PACKS_FP8[0]).upper()
    untold = fmt.key == plain(fmt.model)
    told = fmt.key.name.startswith("fp8") and fmt.key.name != "fp8_ds_mla"
    if told and backend not in _PACKS_FP8 and rules.since >= (0, 20):
        return fmt
    if untold and spec.model_type in rules.blackwell_fp8:
        warnings.append(
            f"a Blackwell GPU keeps {spec.model_type} in fp8 without being told: --kv-cache-dtype fp8 "
            "--attention-backend FLASHINFER_MLA_SPARSE"
        )
    if not told and not (untold and (rules.sparse_fp8 or backend == _PACKS_FP8[1])):
        return fmt
    warnings.append(
        "sparse latents in fp8 are kept as fp8_ds_mla, 656 bytes a token, as FlashMLA on a Hopper GPU has it; "
        "--attention-backend says another kernel (FLASHINFER_MLA_SPARSE on Blackwell, ROCM_AITER_MLA_SPARSE on AMD)"
    )
    return fmt.replace(key=KV_DTYPES["fp8_ds_mla"], value=KV_DTYPES["fp8_ds_mla"])


def _connectors(serving: Serving) -> list[Any]:
    """Names of what moves the cache elsewhere."""
    settings = serving.kv_transfer or {}
    names = [settings["kv_connector"]] if "kv_connector" in settings else []
    inner = settings.get("kv_connector_extra_config")
    if isinstance(inner, Mapping) and isinstance(inner.get("connectors"), list):
        names += [part.get("kv_connector") for part in inner["connectors"] if isinstance(part, Mapping)]
    if serving.offload is not None:
        names.append("LMCacheConnectorV1" if serving.offload_backend == "lmcache" else "OffloadingConnector")
    return names


def _stored_in_full(layers: list[Placed], serving: Serving, rules: Rules, reasons: list[str]) -> bool:
    """Whether the hybrid KV cache manager is off: told so, or for what cannot do with it."""
    if serving.hybrid_disabled is not None:
        return serving.hybrid_disabled
    names = _connectors(serving)
    unable = [str(name)[:40] for name in names if name not in rules.connectors]
    if unable and len({item.spec.kind for item in layers}) > 1:
        reasons.append(f"{unable[0]} turns the hybrid KV cache manager off")
    chunks = not rules.chunks_apart and any(item.spec.kind == "chunk" for item in layers)
    return bool(unable) or chunks


def _layers(spec: ModelSpec, fmt: Formats, serving: Serving, drafted: Drafts, reasons: list[str]) -> list[Placed]:
    """Specs of every layer in order, with its pipeline stage; those that draft come last, on the last stage."""
    ranks, cpu = serving.tensor_parallel or 1, serving.device == "cpu"
    stages = serving.pipeline_parallel or 1
    if packed.packs_layers(spec):
        return packed.layers_of(spec, serving, drafted)
    dtypes = told(serving.conv_dtype, serving.state_dtype)
    of = {id(layer): specs_of(layer, spec, fmt, ranks, cpu, drafted.tokens, dtypes) for layer, _ in spec.groups}
    stage = stage_of(len(spec.layers), stages, serving.stage_layers)
    kept: dict[int, list[Spec]] = {}
    if is_packed(fmt) and not any(item.kind == "state" for specs in of.values() for item in specs):
        # The first and last two layers of a model without recurrent ones stay in the model's dtype.
        whole = fmt.replace(key=plain(fmt.model), value=plain(fmt.model))
        count = len(spec.layers)
        edge = min(2, count // 2)
        for index in (*range(edge), *range(count - edge, count)):
            kept[index] = specs_of(spec.layers[index], spec, whole, ranks, cpu)
        reasons.append(f"the first and last {edge} layers stay in {fmt.model.name}")
    out = [
        Placed(item, stage[index]) for index, layer in enumerate(spec.layers) for item in kept.get(index, of[id(layer)])
    ]
    seen: dict[int, list[Spec]] = {}
    for layer, model in drafted.layers:
        if id(layer) not in seen:
            seen[id(layer)] = specs_of(layer, model, fmt, ranks, cpu)
        out += [Placed(item, stages - 1) for item in seen[id(layer)]]
    return out


def _capacity(
    rules: Rules, serving: Serving, laid: _Laid, num_blocks: int | None
) -> tuple[int | None, float | None, tuple[str, ...]]:
    """Tokens that the log reports, requests that fit at once, and the log's lines."""
    if num_blocks is None:
        return None, None, ()
    context, groups = laid.context, laid.groups
    counted = packed.blocks_logged(groups, laid.settings, context, rules) if laid.packed else laid.request
    concurrency = num_blocks / counted
    if rules.capacity == "blocks":
        tokens = num_blocks * laid.block
        concurrency = tokens / context
    elif rules.capacity == "groups":
        smallest = min(group[0].spec.block for group in groups)
        tokens = num_blocks // len(groups) * smallest * laid.settings.context_parallel
    else:
        tokens = int(concurrency * context)
    pool = "CPU" if serving.device == "cpu" else "GPU"
    size = f"{pool} KV cache size: {tokens:,} tokens"
    limit = f"Maximum concurrency for {context:,} tokens per request: {concurrency:.2f}x"
    return tokens, concurrency, (f"{size}, {limit}",) if rules.one_line else (size, limit)


def _warn_of_shortage(
    rules: Rules, serving: Serving, laid: _Laid, num_blocks: int, usable: int, sequences: int, fits: int,
    warnings: list[str],
) -> None:  # fmt: skip
    request = laid.request
    if usable < request:
        aside = ", one of them set aside" if rules.spare_block else ""
        warnings.append(
            f"vLLM would not start: one request of {laid.context:,} tokens needs {request:,} blocks, "
            f"and the budget holds {num_blocks:,}{aside}" + (f"; --max-model-len {fits} fits" if fits else "")
        )
    elif (serving.max_sequences or sequences) < sequences:
        warnings.append(
            f"{plural(sequences, 'request')} at once are more than --max-num-seqs {serving.max_sequences}: some would wait"
        )
    elif sequences * request > num_blocks:
        warnings.append(
            f"{plural(sequences, 'request')} of this length need {sequences * request:,} blocks, "
            f"and the budget holds {num_blocks:,}: some would wait"
        )


def _warn_of_precision(spec: ModelSpec, fmt: Formats, serving: Serving, rules: Rules, warnings: list[str]) -> None:
    """What the numbers do not show: scales that are not there, and what a share of the memory covers."""
    if fmt.key.name in ("fp8", "fp8_e4m3", "fp8_e5m2") and spec.kv_format is None:
        warnings.append("the configuration names no scales for an fp8 cache: vLLM takes 1.0, which may cost accuracy")
    if serving.utilization is not None and serving.kv_budget is None:
        graphs = "CUDA graphs come out of it too" if rules.graphs_counted else "CUDA graphs come on top of it"
        warnings.append(f"--gpu-memory-utilization {serving.utilization:g} of this version ({rules.utilization} without it): "
                        f"{graphs}")  # fmt: skip


def _settings(
    spec: ModelSpec, serving: Serving, rules: Rules, specs: list[Spec], context: int, drafted: int, warnings: list[str]
) -> Settings:
    cpu = serving.device == "cpu"
    kinds = {item.kind for item in specs}
    latent = "latent" in kinds
    ranks = serving.tensor_parallel or 1
    block, batched = serving.block_size, serving.max_batched
    states = _states(spec, serving, rules) if "state" in kinds else "none"
    if cpu and latent:
        if "indexer" in kinds or "state" in kinds:
            raise ConfigError("kvctl does not know vLLM's plan for this latent attention on a CPU")
        block, states, batched = 16, "none", max(context, 2048)
    elif cpu:
        block = block or 128
    elif block is None and packed.packs_layers(spec):
        block = packed.BLOCK
    elif block is None and spec.model_type in MINIMAX_M3:
        block = MINIMAX_M3_BLOCK
    elif block is None:
        block = 64 if latent else 16
        if latent:
            warnings.append("block size 64, as FlashMLA on a Hopper GPU has it; --block-size sets another backend's")
    if batched is None:
        batched = max(2048 * ranks if cpu else 8192, least_batched(spec, rules.since))
        if kinds & {"window", "chunk"} and not cpu:
            warnings.append(
                "8,192 batched tokens, vLLM's default on a GPU of 70 GiB and more; --max-num-batched-tokens sets it"
            )
    # As many batches as stages are in flight, and one more with asynchronous scheduling.
    batches = 1
    if rules.overlapped and not cpu:
        batches = (serving.pipeline_parallel or 1) + (serving.async_scheduling is not False)
    if cpu and "state" in kinds:
        warnings.append("on a CPU with AVX512-BF16 vLLM keeps Mamba and delta states in float32, which takes more")
    flashinfer = rules.delta_checkpoints and serving.gdn_prefill_backend == "flashinfer"
    if (
        rules.delta_checkpoints
        and states == "align"
        and not cpu
        and serving.gdn_prefill_backend is None
        and any(item.checkpoints == "delta" for item in specs)
    ):
        warnings.append(
            "estimated: counted for Triton's prefill of gated delta layers; where FlashInfer runs it (Hopper, and "
            "Blackwell with CUDA 13) blocks are multiples of 64 and a request holds one more in each such group: "
            "--gdn-prefill-backend flashinfer"
        )
    flashkda = rules.kda_checkpoints and not cpu
    kinds_of = (("ssd", rules.ssd_checkpoints), ("delta", flashinfer), ("kda", flashkda),
                ("glm", flashkda and rules.since >= (0, 32)))  # fmt: skip
    checkpoints = tuple(kind for kind, made in kinds_of if made)
    if states == "align" and any(item.checkpoints in {"kda", "glm"}.intersection(checkpoints) for item in specs):
        warnings.append(
            "estimated: counted for FlashKDA's prefill (Hopper and Blackwell, bounded gates); where Triton runs it a "
            "request holds one block less in each group of delta layers"
        )
    return Settings(
        cpu=cpu,
        ranks=ranks,
        block=block,
        batched=batched,
        in_flight=batches * batched,
        encoder=max(batched, spec.default_encoder or 0),
        block_given=serving.block_size is not None,
        states=states,
        chunk=spec.scan_chunk or 2048,
        checkpoints=checkpoints,
        delta_step=64 if flashinfer and any(item.checkpoints == "delta" for item in specs) else 1,
        drafted=drafted if rules.draft_blocks else 0,
        context_parallel=(serving.decode_context_parallel or 1) * (serving.prefill_context_parallel or 1),
        latent_step=rules.latent_step,
    )


def _states(spec: ModelSpec, serving: Serving, rules: Rules) -> str:
    """What recurrent layers keep: vLLM's mamba_cache_mode."""
    default = rules.state_caching == "default" and spec.model_type not in _ATTENTION_FREE
    caching = serving.prefix_caching if serving.prefix_caching is not None else default
    if not caching or rules.state_caching == "never":
        return "none"
    each = rules.state_each_block and spec.model_type in _STATE_EACH_BLOCK
    if serving.mamba_cache_mode == "all" and not each:
        raise UsageError(f"--mamba-cache-mode all: vLLM {dotted(rules.since)} has it not for {spec.model_type[:40]}",
                         hint="--mamba-cache-mode align")  # fmt: skip
    if each and serving.mamba_cache_mode != "align":
        return "all"
    return "align" if rules.align_others else "none"


_KINDS = {"full": "full_attention", "latent": "latent_attention", "indexer": "indexer", "window": "sliding_window",
          "chunk": "chunked_attention", "state": "recurrent_state", "tail": "indexer", "cross": "cross_attention",
          "compressor": "compressor_state"}  # fmt: skip


def _row(group: Group, laid: _Laid) -> GroupRow:
    return GroupRow(
        kind=_KINDS[group[0].spec.kind],
        layers=len(group),
        block_size=group[0].spec.block,
        page_bytes=sum(item.spec.page for item in group),
        blocks_per_request=laid.settings.blocks(group[0].spec, laid.context),
    )


def _explain(spec: ModelSpec, laid: _Laid, serving: Serving, reasons: list[str]) -> None:
    """Why the engine takes more than the architecture needs, in words."""
    groups, settings, context, stages = laid.groups, laid.settings, laid.context, len(laid.of_stage)
    specs = [item.spec for group in groups for item in group]
    widest = max(len(group) for group in groups)
    short = sum(widest - len(group) for group in groups)
    if laid.packed:
        reasons.append(packed.explanation(groups, settings, context))
    elif any(item.kind == "tail" for item in specs):
        reasons.append(
            f"{plural(len(groups) - 2, 'group')} of recurrent layers draw blocks from the latents' pool; one block "
            "more a request holds keys that wait for their pool to be full"
        )
    elif len(groups) > 1:
        reasons.append(
            f"{plural(len(groups), 'group')} of {plural(widest, 'layer')} share one pool"
            + (f"; {plural(short, 'place')} in them stay empty and are paid for" if short else "")
        )
    for window in sorted({item.limit for item in specs if item.kind == "window"}):
        if window - 1 + settings.in_flight < context:
            batches = f"{settings.in_flight // settings.batched} × " if settings.in_flight != settings.batched else ""
            reasons.append(
                f"a window keeps {window:,} − 1 tokens, {batches}{settings.batched:,} in flight, and one block more"
            )
    if settings.states == "align":
        reasons.append(
            "prefix caching keeps recurrent states at block boundaries: 2 blocks a group"
            + (
                ", and 1 for a checkpoint of the prefill"
                if any(s.checkpoints in settings.checkpoints for s in specs)
                else ""
            )
        )
    elif settings.states == "all":
        reasons.append("prefix caching keeps a recurrent state at every block boundary")
    if settings.drafted and any(item.kind == "state" for item in specs):
        reasons.append(f"recurrent layers hold {plural(settings.drafted, 'block')} more for draft tokens")
    if settings.context_parallel > 1:
        reasons.append(f"tokens are dealt out over {settings.context_parallel} ranks: each holds its part of them")
    if stages > 1:
        reasons.append(f"{stages} pipeline stages: the one that holds most decides how many blocks all have")
    if serving.offload is not None:
        copies = stages if any(item.kind == "latent" for item in specs) else stages * settings.ranks
        held = serving.offload // (copies * laid.widest)
        reasons.append(f"host memory of {serving.offload:,} bytes holds {held:,} blocks that leave the GPU")
    if any(str(name).startswith("LMCache") for name in _connectors(serving)):
        reasons.append(_lmcache(laid, serving))
    if (serving.data_parallel or 1) > 1:
        reasons.append(f"{serving.data_parallel} data-parallel engines: each has a pool of its own, of this size")
    _explain_ranks(spec, specs, settings, reasons)


def _lmcache(laid: _Laid, serving: Serving) -> str:
    """What LMCache's host memory holds: chunks of all layers' tokens (lmcache 0.5.6, v1/config.py: 256 tokens, 5 GiB)."""
    stages = range(len(laid.of_stage))
    placed = [item for group in laid.groups for item in group]
    token = max(sum(item.spec.token_bytes for item in placed if item.stage == stage) for stage in stages)
    tokens, size = serving.lmcache_chunk or 256, serving.lmcache_size or 5 * 2**30
    # Its allocator works in pages of 4 KiB.
    chunk = -(-token * tokens // 4096) * 4096
    where = "the first rank" if any(item.spec.kind == "latent" for item in placed) else "each rank"
    return f"LMCache holds {size // chunk * tokens:,} tokens in {size:,} bytes of host memory of {where}"


def _explain_ranks(spec: ModelSpec, specs: list[Spec], settings: Settings, reasons: list[str]) -> None:
    if settings.ranks == 1:
        return
    heads = {s.kv_heads for layer, _ in spec.groups for s in layer.states if isinstance(s, Attention) and s.value_dim}
    for count in sorted(heads):
        if settings.ranks > count:
            reasons.append(
                f"{plural(count, 'KV head')} on {settings.ranks} ranks: every head is held {settings.ranks // count} times"
            )
    if settings.context_parallel == 1 and any(item.kind == "latent" for item in specs):
        reasons.append(f"latents are not split: every one of {settings.ranks} ranks holds all of them")
