"""What SGLang leaves of a GPU for weights and cache, and to its cache when the weights are there.

Source: sglang 0.5.23 srt/mem_cache/kv_cache_configurator.py (_profile_available_bytes); before 0.5.16
srt/model_executor/model_runner*.py (profile_max_num_token). Every version from 0.4.4 on has the same rule:

    cache = free after weights − free before weights × (1 − mem_fraction_static)

so the fraction is one of the memory that was free before the weights were loaded, and the rest of it is for
activations and CUDA graphs, whose real size is never measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from kvctl.allocation import Part, Serving, Shortage
from kvctl.engines.runtime import runtime
from kvctl.engines.sglang.budget import NEWEST, rules_for
from kvctl.engines.sglang.fraction import BY_MEMORY, default_start, for_images
from kvctl.engines.usual import default_context, left, plan_refusal, start_refusal, started
from kvctl.engines.versions import numbers
from kvctl.errors import UsageError
from kvctl.spec import LatentAttention, ModelSpec
from kvctl.units import GIB, MIB, format_bytes

__all__ = ["default_context", "kv_budget", "left", "overheads", "plan_refusal", "shortage", "start_refusal", "started"]

_IMAGES = 100 * MIB
"""Embeddings of images, SGLANG_VLM_CACHE_SIZE_MB, kept off the cache's budget from 0.5.18 on."""


def overheads(
    spec: ModelSpec,
    serving: Serving,
    *,
    dtype_bytes: int,
    device_bytes: int,
    gpu_name: str | None,
    version: str | None,
    context: int,
    free_bytes: int | None = None,
) -> tuple[Part, ...]:
    """What is neither weights nor cache, on one rank of a GPU of `device_bytes` (what CUDA sees).

    `free_bytes`: what of it is free before the process starts; None: all.
    """
    release = _release(version)
    before = runtime(_ranks(serving))
    free = max(0, (device_bytes if free_bytes is None else min(free_bytes, device_bytes)) - before.bytes)
    share, why = fraction(spec, serving, device_bytes, release)
    reserve = Part("activations and graphs", round(free * (1 - share)), estimated=False, rule=(
        f"SGLang keeps 1 − {share:.3f} of the {format_bytes(free)} that are free before the weights for activations and "
        f"CUDA graphs, whatever they take: {why}"))  # fmt: skip
    parts = [before, reserve]
    if release >= (0, 5, 18) and _vision(spec) is not None:
        parts.append(Part("image embeddings", _IMAGES, estimated=False,
                          rule="100 MiB for embeddings of images that requests share (SGLANG_VLM_CACHE_SIZE_MB)"))  # fmt: skip
    return tuple(parts)


def kv_budget(
    *,
    device_bytes: int,
    free_bytes: int,
    weights_bytes: int,
    parts: Sequence[Part],
    serving: Serving,
    version: str | None,
    spec: ModelSpec,
) -> int:
    """Bytes for the cache on one rank; 0 or less: SGLang ends before it serves.

    `free_bytes`: before the process starts; `parts`: those of `overheads`.
    """
    before = free_bytes - sum(part.bytes for part in parts if part.name == "runtime")
    share, _ = fraction(spec, serving, device_bytes, _release(version))
    images = sum(part.bytes for part in parts if part.name == "image embeddings")
    return before - weights_bytes - round(before * (1 - share)) - images


def shortage(
    spec: ModelSpec, serving: Serving, *, before: int, weights_bytes: int, device_bytes: int, version: str | None
) -> Shortage | None:
    """What will go wrong with `before` bytes free when the weights are loaded, and what to do; None: nothing.

    The smallest fraction that starts is 1 − free after weights / free before, as SGLang says in its error.
    """
    release = _release(version)
    share, _ = fraction(spec, serving, device_bytes, release)
    if weights_bytes >= before:
        return Shortage("start", f"the weights take {format_bytes(weights_bytes)} of {format_bytes(before)} on each GPU",
                        "no --mem-fraction-static helps: more GPUs, or smaller weights")  # fmt: skip
    if before * share <= weights_bytes:
        least = -(-1000 * weights_bytes // before) / 1000
        return Shortage("start", f"the weights alone take {weights_bytes / before:.4f} of the memory, --mem-fraction-static is "
                        f"{share:.3f}", f"raise --mem-fraction-static above {least:.3f}")  # fmt: skip
    if serving.utilization is None:
        return None
    usual, _ = fraction(spec, serving.replace(utilization=None), device_bytes, release)
    if share > usual + 0.005:
        return Shortage("run", f"--mem-fraction-static {share:g} keeps {format_bytes(round(before * (1 - share)))} for activations "
                        f"and CUDA graphs, SGLang's default {format_bytes(round(before * (1 - usual)))}",
                        f"if a step runs out of memory, lower it to {usual:.3f}, or take smaller prefill chunks")  # fmt: skip
    return None


def fraction(spec: ModelSpec, serving: Serving, device_bytes: int, release: tuple[int, ...]) -> tuple[float, str]:
    """--mem-fraction-static, given or by default, and where it comes from.

    The default is one of nvidia-smi's total, which is at most a per cent more than CUDA's.
    """
    if serving.utilization is not None:
        if not 0 < serving.utilization < 1:
            raise UsageError(f"--mem-fraction-static {serving.utilization:g} is out of range", hint="between 0 and 1")
        return serving.utilization, "--mem-fraction-static"
    vision = _vision(spec)
    workers = (serving.data_parallel or 1) if serving.attention_dp else 1
    latent = spec.keeps(LatentAttention)
    stages = serving.pipeline_parallel or 1
    captured = workers == 1 and vision is None and stages == 1 if release < (0, 5, 16) else stages == 1
    start = default_start(
        device_bytes / MIB, tp=serving.tensor_parallel or 1, pp=stages, latent=latent, workers=workers,
        chunk=serving.max_batched, requests=serving.max_sequences, prefill_graphs=captured,
        drafting=serving.speculative_algorithm, version=release,
    )  # fmt: skip
    share = start.fraction * for_images(vision, release)
    why = f"the default for {device_bytes / GIB:.0f} GiB with prefill chunks of {start.chunk:,} tokens"
    return share, why + (", less for images" if vision is not None else "")


def usual_share(spec: ModelSpec, serving: Serving, device_bytes: int, version: str | None) -> float:
    """A --mem-fraction-static to name, in thousandths: the default, or what leaves as much as on a GPU of a little less memory.

    The default reserves more from 20, 35, 60 and 160 GiB on, so that right above a GPU would hold less than one right below.
    """
    release = _release(version)
    sizes = [device_bytes, *(gib * GIB - MIB for gib, *_ in BY_MEMORY if gib * GIB - MIB < device_bytes)]
    best = max(size * fraction(spec, serving, size, release)[0] for size in sizes)
    return int(1000 * best / device_bytes) / 1000


def _ranks(serving: Serving) -> int:
    return (serving.tensor_parallel or 1) * (serving.pipeline_parallel or 1)


def _vision(spec: ModelSpec) -> Mapping[str, Any] | None:
    found = spec.config.get("vision_config")
    return found if isinstance(found, Mapping) else None


@lru_cache(maxsize=64)
def _release(version: str | None) -> tuple[int, ...]:
    """Three numbers of a version whose rules are known."""
    rules_for(version)
    if version is None:
        return NEWEST
    asked = numbers(version, "SGLang", "sglang@0.5.13")[:3]
    return asked if len(asked) == 3 else rules_for(version)[0].since
