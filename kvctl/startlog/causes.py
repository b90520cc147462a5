"""Assumptions that may account for a difference, the likeliest first. Each is tried, none is guessed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvctl.allocation import Serving
from kvctl.engines import Engine
from kvctl.engines.versions import dotted
from kvctl.errors import KvctlError
from kvctl.size import SizePlan
from kvctl.spec import ModelSpec
from kvctl.startlog.figures import Figure
from kvctl.startlog.log import StartLog
from kvctl.startlog.report import LogRow, row
from kvctl.startlog.trial import Trial

_BLOCKS = (1, 16, 32, 64, 128, 256, 512, 1024)
_FORMATS = {
    "vllm": ("auto", "bfloat16", "fp8", "fp8_ds_mla", "nvfp4", "int8_per_token_head", "turboquant_4bit_nc"),
    "sglang": ("auto", "bf16", "fp8_e4m3"),
    "llama.cpp": ("f16", "q8_0", "q4_0", "bf16", "f32"),
    "tensorrt-llm": ("auto", "fp8", "nvfp4"),
}
_STATES = ("float32", "bfloat16", "float16")


def cause(trial: Trial, holds: Callable[[SizePlan], bool]) -> str:
    """The likeliest assumption under which a plan gives the log's value; empty where none does."""
    for words, plan in variants(trial.log, trial.spec, trial.plan):
        try:
            if holds(plan):
                return words
        except KvctlError:
            continue
    return ""


def compared(
    trial: Trial, name: str, said: Figure, ends: Callable[[SizePlan], tuple[float, float] | None]
) -> Iterator[LogRow]:
    """A row with the least and the most that a plan gives, and what accounts for another value; none without them."""
    found = ends(trial.plan)
    if found is None:
        return

    def holds(plan: SizePlan) -> bool:
        got = ends(plan)
        return got is not None and said.meets(*got)

    agrees = said.meets(*found)
    yield row(name, said, *found, agrees, "" if agrees else cause(trial, holds))


def variants(log: StartLog, spec: ModelSpec, plan: SizePlan) -> Iterator[tuple[str, SizePlan]]:
    """Plans that differ in one assumption, and what that is. What the log states, and the plan has, is not doubted."""
    serving, name = plan.serving, plan.engine.name
    yield from _as_logged(log, plan)
    if name == "llama.cpp":
        yield from _llama(plan)
    if name in ("vllm", "sglang"):
        yield ("windowed layers keep every token, as with the hybrid cache manager off",
               plan.replace(serving=serving.replace(hybrid_disabled=not serving.hybrid_disabled)))  # fmt: skip
    if not _certain(log, plan):
        yield from _versions(plan)
    if name in ("vllm", "sglang") and not log.states("block_size", "page_size"):
        for size in _BLOCKS:
            if size != serving.block_size:
                yield f"blocks of {size} tokens", plan.replace(serving=serving.replace(block_size=size))
    if not log.states("speculative_config", "speculative_algorithm"):
        yield from _drafts(plan)
    yield from _formats(log, plan)
    if name == "vllm":
        yield from _vllm(log, plan)
    if name in ("vllm", "sglang"):
        for dtype in _STATES:
            if dtype != serving.state_dtype:
                yield f"recurrent states in {dtype}", plan.replace(serving=serving.replace(state_dtype=dtype))
    if (serving.pipeline_parallel or 1) > 1:
        yield (
            "as without pipeline stages: each is charged all layers",
            plan.replace(serving=serving.replace(pipeline_parallel=None, stage_layers=None)),
        )
    if plan.engine.splits and not log.states("tensor_parallel_size", "tp_size"):
        for ranks in (1, 2, 4, 8, 16):
            if ranks != (serving.tensor_parallel or 1):
                yield f"tensor parallelism of {ranks}", plan.replace(serving=serving.replace(tensor_parallel=ranks))
    if spec.max_context is not None and plan.contexts != (spec.max_context,):
        yield f"a length of {spec.max_context:,} tokens, the model's own", plan.replace(contexts=(spec.max_context,))


def _as_logged(log: StartLog, plan: SizePlan) -> Iterator[tuple[str, SizePlan]]:
    """Where the question differs from the log: each of the log's settings, and all of them."""
    from kvctl.engines import commandline
    from kvctl.engines.flags import FLAGS, serving

    name = plan.engine.name
    version = log.rules.partition("@")[2]
    if version and version != plan.engine.version:
        yield f"by the rules of {log.rules}, as the log says", plan.replace(engine=plan.engine.replace(version=version))
    if not log.states("model", "model_path", "model_tag", "n_ctx"):
        return  # an excerpt that does not show how it was started
    try:
        started = commandline.read(log.engine_args, name)
        told = serving(name, started.flags, strict=False)
    except KvctlError:
        return
    cached = _cached(started.common, plan)
    usual, asked = Serving(), plan.serving
    differ: dict[str, Any] = {}
    for field in Serving._fields:
        logged = getattr(told, field)
        # What no option of the engine's says is not the log's to say.
        if logged == getattr(asked, field) or not any(flag.field == field and flag.names.get(name) for flag in FLAGS):
            continue
        differ[field] = logged
        option = _option(field, name)
        if logged != getattr(usual, field):
            yield f"{option} {logged}, as the log says", plan.replace(serving=asked.replace(**{field: logged}))
        elif getattr(asked, field) != getattr(usual, field):
            yield (
                f"without {option}, which the log does not have",
                plan.replace(serving=asked.replace(**{field: logged})),
            )
    if cached is not None and (cached.key, cached.value) != (plan.key, plan.value):
        yield "the cache's format as the log says", cached
    if differ:
        yield "the settings of the log", (cached or plan).replace(serving=asked.replace(**differ))


def _option(field: str, engine: str) -> str:
    """What the engine calls a setting: an option, or a variable."""
    from kvctl.engines.flags import FLAGS

    names = next(flag.names[engine] for flag in FLAGS if flag.field == field and flag.names.get(engine))
    return max(names, key=len)


def _cached(common: Mapping[str, str], plan: SizePlan) -> SizePlan | None:
    """The plan with the formats of the cache that the log names."""
    both = common.get("kv_dtype", "auto")
    names = common.get("k_dtype", both), common.get("v_dtype", both)
    if names == ("auto", "auto") and not common.get("kv_dtype"):
        return None
    try:
        key, value = (None if name == "auto" else plan.engine.kv_dtype(name, "--kv-dtype") for name in names)
    except KvctlError:
        return None
    return plan.replace(key=key, value=value and (value.values or value))


def _certain(log: StartLog, plan: SizePlan) -> bool:
    """Whether the log names a release, and the plan goes by it."""
    version = log.rules.partition("@")[2]
    return bool(version) and version == plan.engine.version and re.search(r"dev|rc|\+", version) is None


def _vllm(log: StartLog, plan: SizePlan) -> Iterator[tuple[str, SizePlan]]:
    serving = plan.serving
    if not log.states("enable_prefix_caching"):
        for caching in (True, False):
            if caching is not serving.prefix_caching:
                yield (
                    f"prefix caching {'on' if caching else 'off'}",
                    plan.replace(serving=serving.replace(prefix_caching=caching)),
                )
    if not log.states("max_num_batched_tokens"):
        for batched in (2048, 4096, 8192, 16_384):
            if batched != serving.max_batched:
                yield f"{batched:,} tokens in a batch", plan.replace(serving=serving.replace(max_batched=batched))


def _known(engine: Engine) -> list[str]:
    """Versions at which an engine's rules change, newest first."""
    if engine.name == "vllm":
        from kvctl.engines.vllm.rules import RULES

        return [dotted(rules.since) for rules in reversed(RULES)]
    if engine.name == "sglang":
        from kvctl.engines.sglang.budget import RULES as POOLS

        return [dotted(rules.since) for rules in reversed(POOLS)]
    if engine.name == "llama.cpp":
        from kvctl.engines.llama_cpp.builds import BUILDS

        return [f"b{build}" for build, _ in reversed(BUILDS)]
    if engine.name == "tensorrt-llm":
        from kvctl.engines.tensorrt_llm.settings import RULES as MANAGERS

        return [dotted(rules.since) for rules in reversed(MANAGERS)]
    return []


def _versions(plan: SizePlan) -> Iterator[tuple[str, SizePlan]]:
    for version in _known(plan.engine):
        if version != plan.engine.version:
            yield (
                f"by the rules of {plan.engine.name} {version}",
                plan.replace(engine=plan.engine.replace(version=version)),
            )


def _drafts(plan: SizePlan) -> Iterator[tuple[str, SizePlan]]:
    serving = plan.serving
    if plan.engine.name == "vllm":
        if serving.speculative is not None:
            yield "without draft layers", plan.replace(serving=serving.replace(speculative=None, draft=None))
        else:
            for tokens in (1, 2, 3):
                mtp = {"method": "mtp", "num_speculative_tokens": tokens}
                yield (f"with layers that draft {tokens} token{'s' * (tokens > 1)} (MTP)",
                       plan.replace(serving=serving.replace(speculative=mtp)))  # fmt: skip
    elif serving.speculative_algorithm is not None:
        yield (
            "without draft layers",
            plan.replace(
                serving=serving.replace(speculative_algorithm=None, draft_tokens=None, draft=None, draft_path=None)
            ),
        )
    elif plan.engine.name == "llama.cpp":
        drafting = serving.replace(speculative_algorithm="draft-mtp")
        yield "with draft layers (MTP)", plan.replace(serving=drafting)
        if plan.key is not None and plan.value is not None:
            yield (f"with draft layers (MTP) in {plan.key.name}",
                   plan.replace(serving=drafting.replace(draft_key=plan.key.name, draft_value=plan.value.name)))  # fmt: skip


def _formats(log: StartLog, plan: SizePlan) -> Iterator[tuple[str, SizePlan]]:
    # "auto" may be what the checkpoint says.
    if log.states("kv_cache_dtype", "cache-type-k") and plan.key is not None:
        return
    for name in _FORMATS.get(plan.engine.name, ()):
        try:
            found = None if name == "auto" else plan.engine.kv_dtype(name, "--kv-dtype")
        except KvctlError:
            continue
        if found != plan.key or plan.key != plan.value:
            words = "the model's own dtype" if name == "auto" else name
            yield f"a cache in {words}", plan.replace(key=found, value=found and (found.values or found))


def _llama(plan: SizePlan) -> Iterator[tuple[str, SizePlan]]:
    serving = plan.serving
    if not serving.swa_full:
        yield "windowed layers keep every token (--swa-full)", plan.replace(serving=serving.replace(swa_full=True))
    for flash in (True, False):
        if flash is not serving.flash_attention:
            yield (
                f"flash attention {'on' if flash else 'off'}",
                plan.replace(serving=serving.replace(flash_attention=flash)),
            )
    for ubatch in (256, 512, 1024, 2048, 4096):
        if ubatch != serving.ubatch:
            batch = max(serving.batch or 2048, ubatch)
            yield f"a physical batch of {ubatch:,}", plan.replace(serving=serving.replace(ubatch=ubatch, batch=batch))
    for slots in (1, 2, 4, 8):
        for unified in (True, False):
            if (slots, unified) != (serving.slots, serving.unified):
                yield (f"{slots} slot{'s' * (slots > 1)}{' on one unified cache' if unified and slots > 1 else ''}",
                       plan.replace(serving=serving.replace(slots=slots, unified=unified)))  # fmt: skip
