"""What vLLM takes without being told when it starts on a GPU: batch sizes, CUDA graphs, its share of the memory.

Sources: vllm 0.8.5 to 0.33.0 engine/arg_utils.py (get_batch_defaults, _set_default_args_v0), config/scheduler.py,
config/vllm.py (_set_cudagraph_sizes, use_v2_model_runner), model_executor/models/config.py (GptOssForCausalLMConfig),
v1/worker/gpu_worker.py and v1/worker/utils.py (request_memory); the defaults of the API server, on CUDA.
"""

from __future__ import annotations

import math
import re
from typing import Any

from kvctl.allocation import Serving
from kvctl.engines.versions import history
from kvctl.engines.vllm.models import least_batched
from kvctl.engines.vllm.rules import minor_of, rules_for
from kvctl.record import Record
from kvctl.spec import LatentAttention, ModelSpec
from kvctl.units import GIB

_LARGE, _LARGEST = 70 * GIB, 160 * GIB
_LONG = 32_768
"""Tokens from which the first engine (V0) cuts prompts into parts."""


class Changes(Record):
    """What a version does at its start, from `since` on."""

    since: tuple[int, int]
    spares_a100: bool = False
    """Whether an A100 takes the small batches, whatever its memory."""
    spares_gb10: bool = False
    largest: bool = False
    """Whether 160 GiB take larger batches still."""
    within_limit: bool = False
    """Whether a batch holds no more than all sequences together."""
    graphs_by_requests: bool = False
    """Whether graphs end at twice the requests of a batch, not always at 512."""
    coarse_graphs: bool = False
    """Whether sizes above 256 are captured in steps of 16, not of 8."""
    drafts_in_graphs: bool = False
    """Whether draft tokens count for that end."""
    blackwell_graphs: bool = False
    """Whether data-centre Blackwell captures up to 1,024."""
    batch_captured: bool = False
    """Whether the largest batch is captured too, where it is no larger than that end."""
    requests_captured: bool = False
    """Whether the batch of all requests is captured too."""
    draft_sizes: bool = False
    """Whether sizes that are whole steps of all drafting requests are captured too."""
    whole_prompts: str = ""
    """A batch where prompts are not cut: "" (they always are), "length" (the longest prompt), or "larger" (that, or
    the batch by memory)."""
    two_engines: bool = False
    """Whether older GPUs still run the first engine (V0)."""
    rounds_up: bool = False
    """Whether the share of the memory is rounded up to a byte."""


_CHANGES: tuple[dict[str, Any], ...] = (
    {"since": (0, 8), "two_engines": True},
    {"since": (0, 9), "spares_a100": True},
    {"since": (0, 10), "graphs_by_requests": True, "whole_prompts": "length"},
    {"since": (0, 11), "two_engines": False},
    {"since": (0, 12), "within_limit": True, "coarse_graphs": True, "whole_prompts": "larger"},
    {"since": (0, 13), "drafts_in_graphs": True},
    {"since": (0, 14), "rounds_up": True},
    {"since": (0, 22), "batch_captured": True},
    {"since": (0, 28), "largest": True, "blackwell_graphs": True},
    {"since": (0, 29), "draft_sizes": True},
    {"since": (0, 31), "requests_captured": True},
    {"since": (0, 33), "spares_gb10": True},
)
"""What each version changed; one that is not named goes by the one before it."""


_ALL = history(Changes, _CHANGES)


def changes_for(version: str | None) -> Changes:
    """What holds for a version; None is the newest."""
    rules_for(version)  # refuses what is no version
    minor = minor_of(version)
    return next(changes for changes in reversed(_ALL) if changes.since <= minor)


class Start(Record):
    """How an engine starts: what it was told, and its defaults for the rest."""

    batched: int
    """--max-num-batched-tokens."""
    sequences: int
    """--max-num-seqs."""
    utilization: float
    graphs: tuple[int, ...]
    """Batch sizes that CUDA graphs are captured for; none where they are off."""
    first_engine: bool
    """Whether it is V0 that runs."""


def defaults(
    version: str | None,
    device_bytes: int,
    gpu_name: str | None,
    *,
    serving: Serving,
    context: int,
    spec: ModelSpec | None = None,
) -> Start:
    """Settings of a start on a GPU of `device_bytes`, as CUDA counts them, with --max-model-len `context`."""
    changes, name = changes_for(version), (gpu_name or "").lower()
    first = changes.two_engines and _before_ampere(name)
    batched, sequences = _batch(changes, device_bytes, name, serving.chunked_prefill, context, spec, first=first)
    if spec is not None:
        batched = max(batched, least_batched(spec, minor_of(version)))
    if changes.within_limit:
        batched = min(batched, (serving.max_sequences or sequences) * context)
    batched = serving.max_batched or batched
    sequences = serving.max_sequences or min(sequences, batched)
    return Start(
        batched,
        sequences,
        utilization(serving, version),
        _graphs(changes, serving, batched, sequences, name, spec, first=first),
        first,
    )


def utilization(serving: Serving, version: str | None) -> float:
    """--gpu-memory-utilization, or the version's own."""
    return rules_for(version)[0].utilization if serving.utilization is None else serving.utilization


def _batch(
    changes: Changes, device_bytes: int, name: str, chunked: bool | None, context: int, spec: ModelSpec | None, *,
    first: bool,
) -> tuple[int, int]:  # fmt: skip
    """Tokens and requests of a batch."""
    if first:
        latent = spec is not None and spec.keeps(LatentAttention)
        cut = context > _LONG and not latent if chunked is None else chunked
        return 2048 if cut else max(context, 2048), 256
    batched, sequences = _by_memory(changes, device_bytes, name)
    if chunked is False and changes.whole_prompts:
        batched = context if changes.whole_prompts == "length" else max(batched, context)
    return batched, sequences


def _by_memory(changes: Changes, device_bytes: int, name: str) -> tuple[int, int]:
    """Tokens and requests of a batch."""
    if changes.largest and device_bytes >= _LARGEST:
        return 16_384, 1024
    spared = (changes.spares_a100 and "a100" in name) or (changes.spares_gb10 and "gb10" in name)
    return (8192, 1024) if device_bytes >= _LARGE and not spared else (2048, 256)


def _before_ampere(name: str) -> bool:
    """Whether a GPU's compute capability is below 8.0."""
    return (
        re.search(r"\b(v100|t4|p100|p40|p4|titan (v|rtx|xp?)|quadro (rtx|gv)|(rtx|gtx) ?(10|16|20)\d\d)", name)
        is not None
    )


def data_center_blackwell(name: str | None) -> bool:
    """Whether a GPU's compute capability is 10.x: B200, B300 and what is built of them."""
    return re.search(r"\bg?b[23]00\b", (name or "").lower()) is not None


def _graphs(
    changes: Changes, serving: Serving, batched: int, sequences: int, name: str, spec: ModelSpec | None, *, first: bool
) -> tuple[int, ...]:
    if serving.enforce_eager:
        return ()
    if serving.capture_sizes is not None:
        return tuple(sorted({size for size in serving.capture_sizes if 0 < size <= batched}))
    if first:
        return _sizes(next((size for size in _sizes(8192, fine=True) if size >= sequences), 8192), fine=True)
    ceiling = 1024 if changes.blackwell_graphs and data_center_blackwell(name) else 512
    drafts = _draft_tokens(serving)
    most = min(2 * sequences * (1 + drafts * changes.drafts_in_graphs), ceiling) if changes.graphs_by_requests else 512
    oss = spec is not None and spec.model_type == "gpt_oss" and changes.graphs_by_requests
    most = min(1024 if oss else most, batched)
    sizes = {*_sizes(most, fine=not (changes.coarse_graphs or oss))}
    if changes.batch_captured and batched <= most:
        sizes.add(batched)
    if changes.draft_sizes and drafts and not oss:
        requests = min(sequences, ceiling)
        steps = (step * (1 + drafts) for step in {*_sizes(requests, fine=False), requests})
        sizes |= {size for size in steps if size <= most}
    elif changes.requests_captured and sequences <= most:
        sizes.add(sequences)
    return tuple(sorted(sizes))


def _draft_tokens(serving: Serving) -> int:
    """Tokens that --speculative-config drafts in a step."""
    tokens = (serving.speculative or {}).get("num_speculative_tokens")
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and 0 < tokens < 1024 else 0


def _sizes(most: int, *, fine: bool) -> tuple[int, ...]:
    """1, 2, 4, then every 8th, and above 256 every 16th."""
    sizes = [size for size in (1, 2, 4) if size <= most]
    if fine:
        return (*sizes, *range(8, most + 1, 8))
    return (*sizes, *range(8, min(most + 1, 256), 8), *range(256, most + 1, 16))


def requested(device_bytes: int, serving: Serving, version: str | None) -> int:
    """Bytes that the engine takes of a GPU: --gpu-memory-utilization of all of it."""
    share = device_bytes * utilization(serving, version)
    return math.ceil(share) if changes_for(version).rounds_up else int(share)


def start_refusal(free_bytes: int, device_bytes: int, serving: Serving, version: str | None) -> str | None:
    """Why the engine refuses to start on a GPU with so much free memory, as its log words it; None where it starts."""
    wanted = requested(device_bytes, serving, version)
    if free_bytes >= wanted:
        return None
    best = highest_utilization(free_bytes, device_bytes)
    return (
        f"Free memory on device ({_gib(free_bytes)}/{_gib(device_bytes)} GiB) on startup is less than desired GPU memory "
        f"utilization ({utilization(serving, version)}, {_gib(wanted)} GiB)"
        + (f"; --gpu-memory-utilization {best} is within it" if best else "")
    )


def highest_utilization(free_bytes: int, device_bytes: int) -> float:
    """The largest share, in whole hundredths, that what is free covers."""
    hundredths = min(100, 100 * free_bytes // device_bytes)
    while hundredths and math.ceil(device_bytes * (hundredths / 100)) > free_bytes:
        hundredths -= 1
    return hundredths / 100


def _gib(count: int) -> float:
    return round(count / GIB, 2)
