"""vLLM's planner: pages, groups, blocks and the capacity that its start-up log prints.

Sources: vllm 0.32.0 and 0.33.0 v1/kv_cache_interface.py, v1/core/kv_cache_utils.py and
kv_cache_planning.py, platforms/interface.py and platforms/cpu.py; `vllm_rules` has what other
versions do otherwise.

A layer's states become one spec each (`Spec`: what one block of one layer is). Specs of
equal kind form groups of as many layers; every group draws blocks of the same size from one
pool, and a request holds blocks of every group.
"""

from __future__ import annotations

from kvctl.allocation import Allocation, GroupRow, RankRow, Serving
from kvctl.engines.vllm_groups import (
    Group,
    Placed,
    Settings,
    block_size,
    bytes_per_block,
    groups_of,
    placed,
    promoted,
    stage_of,
)
from kvctl.engines.vllm_rules import Rules, dotted, minor_of, rules_for
from kvctl.engines.vllm_specs import KV_DTYPES, Spec, check_format, is_packed, kv_dtype, specs_of, told
from kvctl.engines.vllm_speculation import Drafts, drafts
from kvctl.errors import ConfigError, UsageError
from kvctl.formats import plain
from kvctl.spec import Attention, Formats, Indexer, ModelSpec
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
    check_format(fmt, (rules.since[0], rules.since[1]) if version is None else minor_of(version))
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
    unpacked = max((item.token_bytes for item in every if item.kind == "full"), default=0) if is_packed(fmt) else 0
    block, padded = block_size(settings, every, unpacked, reasons)
    layers = [item.replace(spec=placed(item.spec, settings, block, padded, context)) for item in layers]
    if not rules.hybrid or serving.hybrid_disabled:
        layers = promoted(layers, reasons)
    groups = groups_of(layers, rules, reasons)

    stages = serving.pipeline_parallel or 1
    request = sum(settings.blocks(group[0].spec, context) for group in groups)
    of_stage = [bytes_per_block(groups, stage) for stage in range(stages)]
    widest = max(of_stage)
    _explain(spec, groups, settings, context, stages, serving, reasons)
    budget, num_blocks = serving.kv_budget, serving.num_blocks
    if num_blocks is None and budget is not None:
        # The poorest stage decides for all.
        num_blocks = budget // widest
    reported, concurrency, log = _capacity(rules, serving, settings, groups, num_blocks, request, block, context)
    if rules.each_stage and budget is not None and serving.num_blocks is None:
        counts = [budget // size for size in of_stage]
        log = tuple(line for count in counts
                    for line in _capacity(rules, serving, settings, groups, count, request, block, context)[2])  # fmt: skip
    if num_blocks is not None:
        _warn_of_shortage(rules, serving, num_blocks, request, sequences, context, warnings)
        if num_blocks - rules.spare_block < request:
            log = ()
    ranks = settings.ranks
    return Allocation(
        device=serving.device,
        tensor_parallel_size=ranks,
        block_size=block,
        bytes_per_block=widest,
        blocks_per_request=request,
        reserved_bytes=sequences * request * widest,
        kv_budget_bytes=budget,
        num_blocks=num_blocks,
        # Through a float, as vLLM does: its log shows the result of exactly this.
        capacity_tokens=int(concurrency * context) if concurrency is not None else None,
        reported_capacity=reported,
        max_concurrency=concurrency,
        per_rank=tuple(
            RankRow(stage * ranks + rank, of_stage[stage], sequences * request * of_stage[stage])
            for stage in range(stages)
            for rank in range(ranks)
        ),
        groups=tuple(_row(group, settings, context) for group in groups),
        log=log,
        reasons=tuple(reasons),
        warnings=tuple(warnings),
        longest_sequence=context,
    )


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
    sparse = any(isinstance(state, Indexer) for layer, _ in spec.groups for state in layer.states_in("vllm"))
    if not sparse or serving.device == "cpu":
        return fmt
    backend = (serving.attention_backend or _PACKS_FP8[0]).upper()
    untold = fmt.key == plain(fmt.model)
    told = fmt.key.name.startswith("fp8") and fmt.key.name != "fp8_ds_mla"
    if told and backend not in _PACKS_FP8 and rules.since >= (0, 20):
        return fmt
    if not told and not (untold and (rules.sparse_fp8 or backend == _PACKS_FP8[1])):
        return fmt
    warnings.append(
        "sparse latents in fp8 are kept as fp8_ds_mla, 656 bytes a token, as FlashMLA on a Hopper GPU has it; "
        "--attention-backend says another kernel (FLASHINFER_MLA_SPARSE on Blackwell, ROCM_AITER_MLA_SPARSE on AMD)"
    )
    return fmt.replace(key=KV_DTYPES["fp8_ds_mla"], value=KV_DTYPES["fp8_ds_mla"])


def _layers(spec: ModelSpec, fmt: Formats, serving: Serving, drafted: Drafts, reasons: list[str]) -> list[Placed]:
    """Specs of every layer in order, with its pipeline stage; those that draft come last, on the last stage."""
    ranks, cpu = serving.tensor_parallel or 1, serving.device == "cpu"
    stages = serving.pipeline_parallel or 1
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
    rules: Rules, serving: Serving, settings: Settings, groups: list[Group], num_blocks: int | None, request: int,
    block: int, context: int,
) -> tuple[int | None, float | None, tuple[str, ...]]:  # fmt: skip
    """Tokens that the log reports, requests that fit at once, and the log's lines."""
    if num_blocks is None:
        return None, None, ()
    concurrency = num_blocks / request
    if rules.capacity == "blocks":
        tokens = num_blocks * block
        concurrency = tokens / context
    elif rules.capacity == "groups":
        tokens = num_blocks // len(groups) * min(group[0].spec.block for group in groups) * settings.context_parallel
    else:
        tokens = int(concurrency * context)
    pool = "CPU" if serving.device == "cpu" else "GPU"
    size = f"{pool} KV cache size: {tokens:,} tokens"
    limit = f"Maximum concurrency for {context:,} tokens per request: {concurrency:.2f}x"
    return tokens, concurrency, (f"{size}, {limit}",) if rules.one_line else (size, limit)


def _warn_of_shortage(
    rules: Rules, serving: Serving, num_blocks: int, request: int, sequences: int, context: int, warnings: list[str]
) -> None:
    if num_blocks - rules.spare_block < request:
        warnings.append(
            f"vLLM would not start: one request of {context:,} tokens needs {request:,} blocks, "
            f"and the budget holds {num_blocks:,}" + (", one of them set aside" if rules.spare_block else "")
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
        checkpoints=(("ssd",) if rules.ssd_checkpoints else ()) + (("delta",) if flashinfer else ()),
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
          "chunk": "chunked_attention", "state": "recurrent_state", "cross": "cross_attention"}  # fmt: skip


def _row(group: Group, settings: Settings, context: int) -> GroupRow:
    return GroupRow(
        kind=_KINDS[group[0].spec.kind],
        layers=len(group),
        block_size=group[0].spec.block,
        page_bytes=sum(item.spec.page for item in group),
        blocks_per_request=settings.blocks(group[0].spec, context),
    )


def _explain(
    spec: ModelSpec, groups: list[Group], settings: Settings, context: int, stages: int, serving: Serving,
    reasons: list[str],
) -> None:  # fmt: skip
    """Why the engine takes more than the architecture needs, in words."""
    specs = [item.spec for group in groups for item in group]
    widest = max(len(group) for group in groups)
    short = sum(widest - len(group) for group in groups)
    if len(groups) > 1:
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
            + (", and 1 for a checkpoint with Mamba 2" if "ssd" in settings.checkpoints else "")
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
        held = serving.offload // (copies * max(bytes_per_block(groups, stage) for stage in range(stages)))
        reasons.append(f"host memory of {serving.offload:,} bytes holds {held:,} blocks that leave the GPU")
    if (serving.data_parallel or 1) > 1:
        reasons.append(f"{serving.data_parallel} data-parallel engines: each has a pool of its own, of this size")
    _explain_ranks(spec, specs, settings, reasons)


def _explain_ranks(spec: ModelSpec, specs: list[Spec], settings: Settings, reasons: list[str]) -> None:
    if settings.ranks == 1:
        return
    heads = {s.kv_heads for layer, _ in spec.groups for s in layer.states if isinstance(s, Attention)}
    for count in sorted(heads):
        if settings.ranks > count:
            reasons.append(
                f"{plural(count, 'KV head')} on {settings.ranks} ranks: every head is held {settings.ranks // count} times"
            )
    if settings.context_parallel == 1 and any(item.kind == "latent" for item in specs):
        reasons.append(f"latents are not split: every one of {settings.ranks} ranks holds all of them")
