"""What the llama-server that Ollama starts takes beside weights and cache, and the context Ollama gives it.

Sources: ollama 0.34 server/sched.go (batch surcharge, eviction above 80% of the free memory, tiers of the context),
server/routes.go (default num_ctx), llm/llama_server.go (flags: -c is always named and --fit is left on, so a short
device moves layers to the CPU and never shortens the context).
"""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.allocation import Part, Serving
from kvctl.engines import ollama
from kvctl.engines.llama_cpp import memory as server
from kvctl.engines.usual import kv_budget, left, plan_refusal, shortage, start_refusal, started
from kvctl.spec import ModelSpec
from kvctl.units import GIB, MIB

__all__ = [
    "default_context",
    "expected",
    "kv_budget",
    "left",
    "overheads",
    "places",
    "plan_refusal",
    "shortage",
    "start_refusal",
    "started",
    "told",
]

_TIERS = ((47 * GIB, 262_144), (23 * GIB, 32_768))
"""Memory of all GPUs together, and the num_ctx that Ollama takes from there on."""
_SMALLEST = 4096
_SURCHARGES = ((2048, 2048 * MIB), (1024, 768 * MIB))
"""Tokens of a batch, and what Ollama adds to its estimate from there on."""


def default_context(device_bytes: Sequence[int], trained: int | None) -> int:
    """num_ctx where nothing names one, by the total memory of all GPUs; never more than the model was trained for."""
    total = sum(device_bytes)
    context = next((length for from_, length in _TIERS if total >= from_), _SMALLEST)
    return min(context, trained or context)


def told(spec: ModelSpec, serving: Serving, context: int) -> tuple[Serving, int]:
    """How llama-server is started for num_ctx `context`: its options, and -c."""
    parallel = ollama.parallel_of(spec, serving, [])
    length = min(context, spec.max_context or context) * parallel
    batch = serving.ubatch or ollama.batch_of(length)
    return Serving(
        slots=parallel, unified=False, flash_attention=serving.flash_attention, ubatch=batch, batch=batch
    ), length


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
    layers: int | None = None,
    head: bool = True,
    devices: int = 1,
) -> tuple[Part, ...]:
    """What llama-server takes on one GPU beside weights and cache for num_ctx `context`."""
    if version is not None:
        ollama.check_version(version)
    command, length = told(spec, serving, context)
    return server.overheads(spec, command, dtype_bytes=dtype_bytes, device_bytes=device_bytes, gpu_name=gpu_name,
                            version=None, context=length, layers=layers, head=head, devices=devices)  # fmt: skip


def expected(spec: ModelSpec, serving: Serving, *, file_bytes: int, context: int) -> int | None:
    """Bytes that Ollama expects before it loads: the file, a cache in f16, and a surcharge for the batch.

    With more than 80% of the free memory it first unloads other models. None: the model's numbers are not known.
    """
    command, length = told(spec, serving, context)
    cache = ollama.expected_cache(spec, length)
    if cache is None:
        return None
    return file_bytes + cache + next((more for least, more in _SURCHARGES if (command.ubatch or 0) >= least), 0)


places = server.places
