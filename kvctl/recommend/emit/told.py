"""What an engine is told of a deployment's settings: what it has no word for is left out, what it would choose is written out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvctl.engines.flags import spelling_of
from kvctl.errors import UsageError
from kvctl.units import GIB, MIB

if TYPE_CHECKING:
    from kvctl.allocation import Serving
    from kvctl.recommend.deployment import Deployment

_PROMPT_CACHE_SINCE = 7347
"""The first of kvctl's builds of llama.cpp that has --cache-ram: it came after b6673."""
_PLAIN = ("f32", "f16", "bf16")
"""Types of llama.cpp's cache that are not quantised."""


def told(deployment: Deployment) -> Serving:
    """The settings as the engine's own options say them; reading those options gives this again.

    Raises:
        UsageError: nothing starts this engine, or it cannot be started so.

    """
    name = deployment.engine.name
    if name not in _TOLD:
        raise UsageError(f"{name} is no engine that can be started", hint="--engine vllm")
    serving = deployment.serving
    check_ranks(deployment)
    # The image or the program is that of the device, and a draft model is named by its own option.
    serving = serving.replace(device="gpu", draft=None, encoder=0)
    if not deployment.engine.splits:
        one = {
            field: None
            for field in ("tensor_parallel", "pipeline_parallel", "data_parallel")
            if getattr(serving, field) == 1
        }
        serving = serving.replace(**one)
    return _TOLD[name](deployment, serving)


def check_ranks(deployment: Deployment) -> None:
    """Refuses ranks that are not one for each GPU.

    Raises:
        UsageError: they are not.

    """
    serving, engine = deployment.serving, deployment.engine.name
    if not deployment.engine.splits or not deployment.gpus:
        return
    ranks = (serving.tensor_parallel or 1) * (serving.pipeline_parallel or 1) * (serving.prefill_context_parallel or 1)
    if engine == "vllm" or (engine == "sglang" and not serving.attention_dp):
        ranks *= serving.data_parallel or 1
    if ranks != deployment.gpus * deployment.nodes:
        raise UsageError(f"{ranks} ranks of {engine} on {deployment.gpus * deployment.nodes} GPUs",
                         hint="tensor × pipeline × data parallelism is the number of GPUs")  # fmt: skip


def _whole(serving: Serving) -> Serving:
    """With every kind of parallelism named."""
    return serving.replace(
        tensor_parallel=serving.tensor_parallel or 1,
        pipeline_parallel=serving.pipeline_parallel or 1,
        data_parallel=serving.data_parallel or 1,
    )


def _vllm(deployment: Deployment, serving: Serving) -> Serving:
    if serving.offload and serving.offload_backend is None:
        serving = serving.replace(offload_backend="native")
    # Both are told in GiB: of whole MiB these are short, and exact.
    return _whole(serving).replace(
        offload=None if serving.offload is None else serving.offload // MIB * MIB,
        cpu_offload=None if serving.cpu_offload is None else -(-serving.cpu_offload // MIB) * MIB,
    )


def _sglang(deployment: Deployment, serving: Serving) -> Serving:
    # It takes no bytes: the share of the memory, or a number of tokens, says how large the cache is. Whole gigabytes in host memory.
    return _whole(serving).replace(
        kv_budget=None,
        expert_parallel=False,
        # What it does unless it is told not to has no option.
        prefix_caching=None if serving.prefix_caching else serving.prefix_caching,
        hybrid_disabled=serving.hybrid_disabled or None,
        chunked_prefill=None,
        max_batched=None if serving.chunked_prefill is False else serving.max_batched,
        host_gb=None if serving.host_gb is None else float(math.ceil(serving.host_gb)),
        cpu_offload=None if serving.cpu_offload is None else -(-serving.cpu_offload // GIB) * GIB,
    )


def _llama_cpp(deployment: Deployment, serving: Serving) -> Serving:
    slots = serving.slots or serving.max_sequences
    quantised = any(kind not in _PLAIN for kind in cache_types(deployment)[1:])
    if quantised and serving.flash_attention is False:
        raise UsageError("llama.cpp keeps values in a quantised type only with flash attention", hint="--flash-attn on")
    return serving.replace(
        kv_budget=None,
        max_sequences=None,
        slots=slots,
        unified=bool(serving.unified) if slots else serving.unified,
        flash_attention=True if quantised else serving.flash_attention,
        # Whether an earlier prompt is used again has options of its own, which change no memory of the device.
        prefix_caching=None,
        prompt_cache=_prompt_cache(deployment, serving),
    )


def _prompt_cache(deployment: Deployment, serving: Serving) -> int | None:
    """MiB for prompts of requests that ended. Without being told llama-server keeps up to 8 GiB of them in the host's memory (pull
    request 16391, October 2025): without a GPU of its own memory that is what was planned with."""
    if serving.prefix_caching is False:
        return 0
    device, version = deployment.device, deployment.engine.version
    known = version is None or int(version.removeprefix("b")) >= _PROMPT_CACHE_SINCE
    planned = known and (device.kind == "cpu" or device.unified)
    return 0 if planned and serving.prompt_cache is None else serving.prompt_cache


def _tensorrt_llm(deployment: Deployment, serving: Serving) -> Serving:
    from kvctl.engines.tensorrt_llm.settings import rules_for

    if rules_for(deployment.engine.version)[0].second == "never" and not serving.second_manager:
        serving = serving.replace(second_manager=None)  # there is one cache manager, and no question which
    # Options that kvctl.engines.flags has no row for: the command has them, under TensorRT-LLM's own names.
    return serving.replace(
        tensor_parallel=serving.tensor_parallel or 1,
        pipeline_parallel=serving.pipeline_parallel or 1,
        data_parallel=serving.data_parallel if serving.data_parallel != 1 else None,
        kv_budget=None,
        expert_parallel=False,
        prefix_caching=None,
        chunked_prefill=None,
        max_batched=None,
    )


def _ollama(deployment: Deployment, serving: Serving) -> Serving:
    serving = serving.replace(
        kv_budget=None, max_sequences=None, prefix_caching=None, slots=serving.slots or serving.max_sequences or 1
    )
    quantised = cache_types(deployment)[0] not in _PLAIN
    return serving.replace(flash_attention=True) if quantised and serving.flash_attention is None else serving


def _transformers(deployment: Deployment, serving: Serving) -> Serving:
    # `transformers serve` has an option for the paged cache alone; how many requests are in a batch is not told to it.
    return serving.replace(kv_budget=None, max_sequences=None, prefix_caching=None, cache_implementation="paged")


_TOLD: Mapping[str, Callable[[Deployment, Serving], Serving]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "llama.cpp": _llama_cpp,
    "tensorrt-llm": _tensorrt_llm,
    "ollama": _ollama,
    "transformers": _transformers,
}


_NEEDED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "vllm": (
        ("kv_budget", "num_blocks", "utilization"),
        ("max_sequences",),
        ("max_batched",),
        ("block_size",),
        ("prefix_caching",),
    ),
    "sglang": (
        ("utilization", "max_tokens"),
        ("max_sequences",),
        ("max_batched", "chunked_prefill"),
        ("block_size",),
        ("prefix_caching",),
    ),
    "llama.cpp": (("slots", "max_sequences"), ("batch",), ("ubatch",), ("prompt_cache",)),
    "tensorrt-llm": (
        ("utilization", "max_tokens"),
        ("max_sequences",),
        ("max_batched",),
        ("block_size",),
        ("prefix_caching",),
    ),
    "ollama": (("slots", "max_sequences"),),
    "transformers": (("num_blocks", "utilization"), ("block_size",), ("max_batched",)),
}
"""Settings that change memory, of which an engine chooses what it is not told; of several one says enough."""


def unsaid(deployment: Deployment) -> tuple[str, ...]:
    """Options that change memory and that the deployment leaves to the engine, in the engine's words."""
    serving, engine = deployment.serving, deployment.engine.name
    out = []
    for fields in _NEEDED.get(engine, ()):
        if all(getattr(serving, field) is None for field in fields):
            out.append(_NAMED.get((engine, fields[0])) or spelling_of(fields[0], engine))
    return tuple(out)


_NAMED = {("tensorrt-llm", "max_batched"): "--max_num_tokens", ("tensorrt-llm", "prefix_caching"): "enable_block_reuse"}
"""What kvctl.engines.flags has no row for."""


def cache_types(deployment: Deployment) -> tuple[str, str]:
    """Of keys and of values, as llama.cpp calls them: "q8_0" is both, "q8_0/q4_0" one after the other."""
    key, slash, value = deployment.kv_dtype.partition("/")
    key = "f16" if key == "auto" else key
    return key, value if slash else key


def cells(deployment: Deployment) -> int:
    """llama.cpp's -c: every slot's part, or the one pool that all slots share."""
    serving = deployment.serving
    slots = serving.slots or serving.max_sequences or 1
    if serving.unified and serving.max_tokens:
        return serving.max_tokens
    return deployment.context * slots
