"""Which flags start an engine with a cache in some format, and whether it would run fp8 with scale 1.0 on a checkpoint.

Read of vLLM 0.32 and SGLang 0.5.23 (layers/quantization and their models' loaders); see `kv_write`. TensorRT-LLM's documentation
speaks of ModelOpt's checkpoints alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.engines import llama_cpp, ollama, sglang, tensorrt_llm, vllm
from kvctl.engines.commandline import COMMON
from kvctl.engines.flags import FLAGS
from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.weights.kv_scales import HEAD, OWN_TOOL, TENSOR, WRITABLE

if TYPE_CHECKING:
    from kvctl.sources.kv_scales import FoundScales

_ENGINES = {"vllm": vllm, "sglang": sglang, "tensorrt-llm": tensorrt_llm, "llama.cpp": llama_cpp, "ollama": ollama}
_TITLES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}
_SAME = {"vllm": {"int8": "int8_per_token_head", "int4": "int4_per_token_head"}, "sglang": {"fp8": "fp8_e4m3"},
         "llama.cpp": {"int8": "q8_0", "int4": "q4_0", "fp16": "f16"}, "ollama": {"int8": "q8_0", "int4": "q4_0", "fp16": "f16"}}  # fmt: skip
"""Formats by kvctl's names that engines have under others, of as many bits."""
_SCALED = {"vllm": ("fp8", "fp8_e4m3"), "sglang": ("fp8_e4m3",), "tensorrt-llm": ("fp8",)}
"""Formats that divide by static scales of the checkpoint."""
_NAMES = {
    "vllm": frozenset(
        (
            "k_scale",
            "attn.k_scale",
            "k_proj.k_scale",
            "qkv_proj.k_scale",
            "k_proj.output_scale",
            "k_cache.scale",
            "kv_scale",
        )
    ),
    "sglang": frozenset(("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")),
}
"""Spellings that an engine's loader knows; vLLM knows output_scale with fp8 and Quark alone."""


class Use(Record):
    """How an engine is started with a cache in a format."""

    engine: str
    format: str
    """The engine's own name of it."""
    flags: tuple[str, ...]
    """Of its command line, or variables of its environment; empty where the checkpoint says it already."""
    warnings: tuple[str, ...] = ()


def use(engine: str, kv_format: str, found: FoundScales, version: str | None = None) -> Use:
    """Flags for a cache in `kv_format` (kvctl's name or the engine's own) with a checkpoint.

    Raises:
        UsageError: the engine has no such format, or no command line.

    """
    planner = _ENGINES.get(engine)
    if planner is None:
        raise UsageError(f"{engine} has no flag for the format of the cache", hint="one of " + ", ".join(_ENGINES))
    name = _SAME.get(engine, {}).get(kv_format.lower(), kv_format.lower())
    planner.kv_dtype(name, "--kv", version)
    settings = COMMON[engine]
    if engine == "llama.cpp":
        flags = [f"{settings['k_dtype'][0]} {name}", f"{settings['v_dtype'][0]} {name}"]
    else:
        flags = [f"{settings['kv_dtype'][0]}{'=' if engine == 'ollama' else ' '}{name}"]
    if engine in ("llama.cpp", "ollama") and name not in ("f32", "f16", "bf16"):
        # Neither keeps packed values without: llama.cpp refuses to start, Ollama falls back to f16.
        flash = next(flag for flag in FLAGS if flag.field == "flash_attention").names[engine]
        flags.append(f"{flash[-1]} on" if engine == "llama.cpp" else f"{flash[0]}=1")
    if name in _SCALED.get(engine, ()):
        return Use(engine, name, () if _follows(engine, found) else tuple(flags), tuple(_warnings(engine, found)))
    return Use(engine, name, tuple(flags))


def _follows(engine: str, found: FoundScales) -> bool:
    """Whether the engine takes fp8 of the checkpoint's own accord."""
    if found.declared != "fp8" or found.dynamic or found.method is None:
        return False
    if found.method == "compressed-tensors":
        return engine == "vllm" or (engine == "sglang" and not found.per_head)
    return found.method.startswith("modelopt")


def reads(engine: str, found: FoundScales) -> bool | None:
    """Whether an engine divides by the checkpoint's scales; None where that is not known."""
    if not found.scales or found.broken is not None:
        return False
    method, declared = found.method, found.declared is not None and not found.dynamic
    known = _NAMES.get(engine)
    if known is not None and not known.issuperset(found.spellings):
        return False
    if engine == "vllm" and "k_proj.output_scale" in found.spellings and method not in ("fp8", "quark"):
        return False
    if engine == "tensorrt-llm":
        return True if declared and method is not None and method.startswith("modelopt") else None
    if method == "fp8":
        return not found.per_head
    if method == "compressed-tensors":
        # vLLM gives attention parameters for scales with or without a scheme; heads of their own need one.
        return declared and not found.per_head if engine == "sglang" else declared or not found.per_head
    return method in OWN_TOOL and declared and not found.per_head


def _advice(method: str | None) -> str:
    """How a checkpoint whose weights are quantized by this method comes to scales."""
    if method in WRITABLE:
        return "kvctl quantize MODEL --kv fp8 -o DIR writes calibrated ones"
    if method in OWN_TOOL:
        return f"the tool of {method} writes them, with the weights"
    return f"there is no place for any in one of method {method} (in compressed-tensors, fp8 and unquantized ones there is)"


def _warnings(engine: str, found: FoundScales) -> list[str]:
    title = _TITLES[engine]
    write = _advice(found.method)
    if found.broken is not None:
        return [f"{found.broken} is no scale that divides: the checkpoint is damaged"]
    if not found.scales:
        return [f"{title} runs fp8 with scale 1.0: the checkpoint has no scales of the cache; {write}"]
    known = reads(engine, found)
    names = ", ".join(found.spellings)
    if known is None:
        return [
            f"whether {title} reads {names} of a checkpoint of method {found.method} is not known to kvctl; without, it runs fp8 with scale 1.0"
        ]
    if not known:
        why = (
            f"it knows no scales a head ({HEAD}), one a layer alone ({TENSOR})" if found.per_head and engine == "sglang"
            else f"it passes over {names} of a checkpoint " + ("whose configuration declares no cache in fp8" if found.method is None
            else f"of method {found.method}" + ("" if found.declared else " that declares no cache in fp8"))
        )  # fmt: skip
        return [f"{title} runs fp8 with scale 1.0: {why}"]
    if found.placeholders:
        return [f"{title} runs fp8 with scale 1.0: that is what all scales of the checkpoint are; {write}"]
    if found.per_head and engine == "vllm":
        return [
            "vLLM has scales a head in its FlashAttention backend alone; on a CPU it takes the largest of a layer's"
        ]
    return []
