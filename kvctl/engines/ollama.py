"""Ollama: what it tells the llama-server that it starts, and what it expects before.

Sources: ollama llm/llama_server.go, server/sched.go, envconfig/config.go and
types/model (architectures without parallel requests) of 0.34; the cells themselves are
llama.cpp's. A request has num_ctx tokens to itself: the server gets -c num_ctx × parallel.
"""

from __future__ import annotations

from kvctl.allocation import Allocation, Serving
from kvctl.engines import llama_cpp
from kvctl.errors import UsageError
from kvctl.formats import CacheFormat
from kvctl.spec import Attention, ChunkedAttention, Empty, Formats, LatentAttention, ModelSpec, SlidingWindow
from kvctl.units import format_bytes

VERSION = "0.34"

KV_TYPES = ("f16", "q8_0", "q4_0")
"""What OLLAMA_KV_CACHE_TYPE takes; it ignores anything else."""

_ONE_AT_A_TIME = ("mllama", "qwen3_vl", "qwen3_5", "qwen3_next", "lfm2", "nemotron_h")
"""Beginnings of the model types that Ollama serves one request at a time."""

_BATCHES = ((2048, 32_768), (1024, 4096), (512, 0))
"""Tokens of a batch, and the contexts (-c) above which Ollama takes it where there is room."""


def kv_dtype(name: str, option: str, version: str | None = None) -> CacheFormat:
    """The cache format that OLLAMA_KV_CACHE_TYPE's `name` means; unknown ones list what there is."""
    if option in ("--k-dtype", "--v-dtype"):
        raise UsageError("ollama keeps keys and values in one format", hint="--kv-dtype sets both")
    if name.lower() not in KV_TYPES:
        raise UsageError(f"{option}: {name[:40]!r} is no cache type of Ollama", hint="one of " + ", ".join(KV_TYPES))
    return llama_cpp.kv_dtype(name, option)


def check_version(version: str) -> None:
    """One set of rules so far: that of 0.34, which starts llama-server."""
    if version.lower().removeprefix("v").split(".")[:2] != VERSION.split("."):
        raise UsageError(
            f"--engine: kvctl knows one version of Ollama, {VERSION}, not {version[:40]!r}", hint="--engine ollama"
        )


def plan(
    spec: ModelSpec, context: int, sequences: int, fmt: Formats, serving: Serving, version: str | None
) -> Allocation:
    """What llama-server allocates for num_ctx = `context`, once for every parallel request.

    Raises:
        ConfigError: what llama.cpp's plan does not know.
        UsageError: settings that Ollama or llama.cpp refuse.

    """
    _check(context, sequences, fmt, serving)
    reasons: list[str] = []
    warnings: list[str] = []
    parallel = parallel_of(spec, serving, warnings)
    length = min(context, spec.max_context or context)
    if length < context:
        warnings.append(f"Ollama lowers num_ctx to the model's own maximum of {length:,}")
    if parallel > 1:
        reasons.append(
            f"{parallel} parallel requests of {length:,} tokens: llama-server -c {length * parallel} -np {parallel}"
        )
    batch = serving.ubatch or batch_of(length * parallel)
    if spec.keeps(LatentAttention):
        warnings.append("a file without attention.key_length_mla, as the library's older ones are, keeps decompressed "
                        "keys and values instead of latents: several times as much")  # fmt: skip
    told = Serving(kv_budget=serving.kv_budget, slots=parallel, unified=False, flash_attention=serving.flash_attention)
    below = llama_cpp.plan(spec, length * parallel, 1, fmt, told.replace(ubatch=batch), None)
    local = any(group.kind in (SlidingWindow.kind, ChunkedAttention.kind) for group in below.groups)
    if local and serving.ubatch is None and batch > 512:
        warnings.append(f"windows hold a batch of {batch:,} tokens, Ollama's where there is room; with little memory "
                        "or without flash attention it takes less, and num_batch sets it")  # fmt: skip
    expected = expected_cache(spec, length * parallel)
    if expected is not None:
        reasons.append(f"before loading, Ollama expects {format_bytes(expected)} for the cache, beside the file: every layer "
                       "at full length in f16, with the fewest KV heads of any layer, as wide as embedding / query heads")  # fmt: skip
    capacity = below.capacity_tokens
    if capacity is not None:
        capacity = _capacity(spec, length * parallel, fmt, told, serving.ubatch) // parallel
    return below.replace(
        num_blocks=capacity * parallel // below.block_size if capacity is not None else None,
        capacity_tokens=capacity,
        reported_capacity=capacity,
        longest_sequence=length,
        reasons=(*reasons, *below.reasons),
        warnings=(*warnings, *below.warnings),
    )


def _check(context: int, sequences: int, fmt: Formats, serving: Serving) -> None:
    """Refuses what Ollama refuses, or kvctl does not know."""
    if sequences > 1:
        raise UsageError("ollama answers as many requests at a time as OLLAMA_NUM_PARALLEL says",
                         hint="--parallel N instead of --sequences and --beams")  # fmt: skip
    if context < 1:
        raise UsageError("--ctx 0: Ollama needs a context of at least one token")
    if fmt.key != fmt.value:
        raise UsageError("ollama keeps keys and values in one format", hint="--kv-dtype sets both")
    if serving.ubatch is not None and serving.ubatch > 2048:
        raise UsageError(f"num_batch {serving.ubatch:,}: kvctl knows batches of up to 2,048 tokens")


def parallel_of(spec: ModelSpec, serving: Serving, warnings: list[str]) -> int:
    """Requests at a time: OLLAMA_NUM_PARALLEL, 1 without it and for some architectures."""
    asked = serving.slots or 1
    if asked > 1 and spec.model_type.startswith(_ONE_AT_A_TIME):
        warnings.append(
            f"Ollama serves {spec.model_type[:60]} one request at a time, whatever OLLAMA_NUM_PARALLEL says"
        )
        return 1
    return asked


def batch_of(context: int) -> int:
    """Tokens of a batch for all requests' context, where there is room for it."""
    return next(batch for batch, above in _BATCHES if context > above)


def _capacity(spec: ModelSpec, context: int, fmt: Formats, told: Serving, batch: int | None) -> int:
    """The largest context over all requests in the budget: longer ones come with larger batches."""
    longest = None
    for size, above in ((batch, 0),) if batch is not None else _BATCHES:
        fits = llama_cpp.plan(spec, context, 1, fmt, told.replace(ubatch=size), None).capacity_tokens or 0
        fits = fits if longest is None else min(fits, longest)
        if fits > above:
            return fits
        longest = above
    return 0


def expected_cache(spec: ModelSpec, context: int) -> int | None:
    """Bytes of PredictServerVRAM beside the file's; None where its inputs are not known.

    2 × layers × fewest KV heads × (embedding ÷ heads) × tokens × 2 bytes.
    """
    states = [state for layer in spec.layers for state in layer.states if not isinstance(state, Empty)]
    heads = [state.kv_heads for state in states if isinstance(state, Attention)]
    if not heads or len(heads) < len(states) or spec.hidden_size is None or spec.attention_heads is None:
        return None
    return 2 * len(spec.layers) * min(heads) * (spec.hidden_size // spec.attention_heads) * context * 2
