"""vLLM's planner: pages, groups, blocks and the capacity that its start-up log prints.

Sources: vllm 0.32.0 and 0.33.0 v1/kv_cache_interface.py, v1/core/kv_cache_utils.py and
kv_cache_planning.py, platforms/interface.py and platforms/cpu.py; `rules` has what other
versions do otherwise.

A layer's states become one spec each (`Spec`: what one block of one layer is). Specs of
equal kind form groups of as many layers; every group draws blocks of the same size from one
pool, and a request holds blocks of every group.
"""

from __future__ import annotations

from kvctl.allocation import Allocation, GroupRow, RankRow, Serving
from kvctl.engines.versions import dotted
from kvctl.engines.vllm import packed
from kvctl.engines.vllm.groups import Group, Settings, longest
from kvctl.engines.vllm.layout import Laid, connectors, lay_out
from kvctl.engines.vllm.models import check_served
from kvctl.engines.vllm.rules import Rules, minor_of, rules_for
from kvctl.engines.vllm.specs import Spec, fp8_key, kv_dtype
from kvctl.errors import UsageError
from kvctl.kept import kept
from kvctl.spec import Attention, Formats, Indexer, LatentAttention, ModelSpec
from kvctl.units import GIB, plural

__all__ = ["check_version", "kv_dtype", "plan"]


def check_version(version: str) -> None:
    """Refuses a version whose rules are not known."""
    rules_for(version)


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
    _check_split(spec, serving, rules)
    check_served(spec, minor_of(version))
    # How layers lie does not depend on how much memory there is for them.
    alike = serving.replace(kv_budget=None, num_blocks=None, max_sequences=None, utilization=None)
    laid, because, about = _laid_out(spec, context, fmt, alike, rules)
    reasons += because
    warnings += about
    _check_dealt(laid, serving, rules)
    budget, num_blocks = serving.kv_budget, serving.num_blocks
    if num_blocks is None and budget is not None:
        # The poorest stage decides for all.
        num_blocks = budget // laid.widest
    usable = 0
    if num_blocks is not None:
        usable = num_blocks - rules.spare_block
        if laid.packed:
            usable = packed.blocks_usable(laid.groups, laid.of_stage, num_blocks, budget, rules)
        short = serving.fit_length or usable < laid.request
        fits = longest(laid.groups, laid.settings, usable, context) if short else context
        if serving.fit_length and 0 < fits < context:
            reasons.append(f"a length of {fits:,} is the longest that fits; the model's own is {context:,}")
            laid = laid.replace(context=fits)
        _warn_of_shortage(rules, serving, laid, num_blocks, usable, sequences, fits, warnings)
    _warn_of_precision(spec, laid, fmt, serving, rules, warnings)
    _explain(spec, laid, serving, reasons)
    reported, concurrency, log = _capacity(rules, serving, laid, num_blocks)
    if num_blocks is not None and usable < laid.request:
        log = ()
    elif rules.each_stage and budget is not None and serving.num_blocks is None:
        counts = [budget // size for size in laid.of_stage if size]  # a stage may have no layer with a cache
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
        held=None if concurrency is None else int(concurrency) if usable >= laid.request else 0,
        whole=None if concurrency is None or laid.packed or not laid.request else usable // laid.request,
    )


@kept
def _laid_out(
    spec: ModelSpec, context: int, fmt: Formats, serving: Serving, rules: Rules
) -> tuple[Laid, tuple[str, ...], tuple[str, ...]]:
    """Layers laid out, with reasons and warnings."""
    reasons: list[str] = []
    warnings: list[str] = []
    return lay_out(spec, context, fmt, serving, rules, reasons, warnings), tuple(reasons), tuple(warnings)


def _check_split(spec: ModelSpec, serving: Serving, rules: Rules) -> None:
    ranks = serving.tensor_parallel or 1
    if spec.attention_heads is not None and spec.attention_heads % ranks:
        raise UsageError(f"--tensor-parallel-size {ranks} does not divide the {spec.attention_heads} attention heads",
                         hint="vLLM refuses this split")  # fmt: skip
    dealt, prefill = serving.decode_context_parallel or 1, serving.prefill_context_parallel or 1
    if (prefill > 1 and rules.dealing not in ("both", "axes")) or (dealt > 1 and not rules.dealing):
        raise UsageError(f"vLLM {dotted(rules.since)} has no such context parallelism",
                         hint="it has --decode-context-parallel-size from 0.10.2 on, --prefill-context-parallel-size from 0.12 on")  # fmt: skip
    if rules.dealing == "axes" and prefill > 1:
        allowed = sorted({1, prefill, ranks * prefill})
        if dealt not in allowed:
            raise UsageError(f"--decode-context-parallel-size {dealt} with --prefill-context-parallel-size {prefill}: "
                             f"vLLM takes {', '.join(map(str, allowed))}")  # fmt: skip
    elif ranks % dealt:
        raise UsageError(f"--decode-context-parallel-size {dealt} does not divide the {plural(ranks, 'rank')} of "
                         "--tensor-parallel-size", hint="vLLM refuses this split")  # fmt: skip
    heads = [s.kv_heads for layer, _ in spec.groups for s in layer.states_in("vllm") if isinstance(s, Attention)]
    latent = spec.keeps(LatentAttention, engine="vllm")
    if dealt == 1 or not heads or latent:
        return
    most = max(heads)
    if not (ranks > most and dealt <= ranks // most):
        raise UsageError(f"--decode-context-parallel-size {dealt}: on {plural(ranks, 'rank')}, {most} KV heads are "
                         "not repeated so often", hint="vLLM deals tokens out over ranks that hold the same heads")  # fmt: skip
    if spec.attention_heads is not None and rules.dealing != "decode" and spec.attention_heads // most % dealt:
        raise UsageError(f"--decode-context-parallel-size {dealt} does not divide the {spec.attention_heads // most} "
                         "attention heads of a KV head", hint="vLLM refuses this split")  # fmt: skip


def _check_dealt(laid: Laid, serving: Serving, rules: Rules) -> None:
    """Refuses to deal out tokens of layers that vLLM cannot deal out."""
    if (serving.decode_context_parallel or 1) * (serving.prefill_context_parallel or 1) == 1:
        return
    if any(item.spec.kind in ("window", "chunk") for group in laid.groups for item in group):
        raise UsageError("vLLM deals out no tokens of windows over ranks",
                         hint="--disable-hybrid-kv-cache-manager, or no context parallelism")  # fmt: skip
    caching = laid.settings.states != "none" or not any(
        item.spec.kind == "state" for group in laid.groups for item in group
    )
    if len(laid.groups) > 1 and rules.dealing != "axes" and caching and serving.prefix_caching is not False:
        raise UsageError(f"vLLM {dotted(rules.since)} deals out no tokens over ranks where layers form several groups",
                         hint="--no-enable-prefix-caching, or 0.26 and later")  # fmt: skip


def _capacity(
    rules: Rules, serving: Serving, laid: Laid, num_blocks: int | None
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
    rules: Rules, serving: Serving, laid: Laid, num_blocks: int, usable: int, sequences: int, fits: int,
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


def _warn_of_precision(
    spec: ModelSpec, laid: Laid, fmt: Formats, serving: Serving, rules: Rules, warnings: list[str]
) -> None:
    """What the numbers do not show: scales that are not there, and what a share of the memory covers."""
    if fmt.key.name in ("fp8", "fp8_e4m3", "fp8_e5m2") and spec.kv_format is None:
        hybrid = any(item.spec.kind == "state" for group in laid.groups for item in group)
        warnings.append("the configuration names no scales for an fp8 cache: vLLM takes 1.0, which may cost accuracy"
                        + (", and computes none where layers are recurrent" if hybrid else ""))  # fmt: skip
    if serving.utilization is not None and serving.kv_budget is None:
        graphs = "come out of that share too" if rules.graphs_counted else "come on top of that share"
        warnings.append(
            f"CUDA graphs {graphs} in this version, whose own --gpu-memory-utilization is {rules.utilization:g}"
        )


_KINDS = {"full": "full_attention", "latent": "latent_attention", "indexer": "indexer", "window": "sliding_window",
          "chunk": "chunked_attention", "state": "recurrent_state", "tail": "indexer", "cross": "cross_attention",
          "compressor": "compressor_state"}  # fmt: skip


def _row(group: Group, laid: Laid) -> GroupRow:
    return GroupRow(
        kind=_KINDS[group[0].spec.kind],
        layers=len(group),
        block_size=group[0].spec.block,
        page_bytes=sum(item.spec.page for item in group),
        blocks_per_request=laid.settings.blocks(group[0].spec, laid.context),
    )


def _explain(spec: ModelSpec, laid: Laid, serving: Serving, reasons: list[str]) -> None:
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
    keys = {fp8_key(s.dim) for layer, _ in spec.groups for s in layer.states_in("vllm") if isinstance(s, Indexer)}
    if any(item.kind == "indexer" and item.token_bytes in keys for item in specs):
        reasons.append("indexer keys are kept in fp8, 4 bytes of scale for 128, whatever --kv-cache-dtype says")
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
    if any(str(name).startswith("LMCache") for name in connectors(serving)):
        reasons.append(_lmcache(laid, serving))
    if (serving.data_parallel or 1) > 1:
        reasons.append(f"{serving.data_parallel} data-parallel engines: each has a pool of its own, of this size")
    _explain_ranks(spec, specs, settings, reasons)


def _lmcache(laid: Laid, serving: Serving) -> str:
    """What LMCache's host memory holds: chunks of all layers' tokens (lmcache 0.5.6, v1/config.py: 256 tokens, 5 GiB)."""
    stages = range(len(laid.of_stage))
    placed = [item for group in laid.groups for item in group]
    token = max(sum(item.spec.token_bytes for item in placed if item.stage == stage) for stage in stages)
    tokens, size = serving.lmcache_chunk or 256, serving.lmcache_size or 5 * GIB
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
