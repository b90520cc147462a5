"""Which formats of weights and of the cache an engine takes on which GPU.

Capabilities are CUDA's, as the least with which a format runs at all; `native` is the least whose tensor cores compute in
it, below it kernels unpack weights on the way (they still save memory and reads). Sources, by row: vLLM 0.32
model_executor/layers/quantization/*.py (get_min_capability), v1/attention/backends/*.py (supported_kv_cache_dtypes,
supports_compute_capability) and platforms/cuda.py (_get_backend_priorities); SGLang 0.5.23 srt/layers/quantization/*.py
(get_min_capability) and srt/arg_groups/{choices,kv_cache_hook}.py; TensorRT-LLM 1.2 docs, features/quantization.md (tables of
formats by hardware, for the PyTorch backend); llama.cpp b11434 common/arg.cpp (kv_cache_types).
"""

from __future__ import annotations

from kvctl.engines import Engine
from kvctl.formats import FP16
from kvctl.hardware import Device
from kvctl.record import Record
from kvctl.spec import Attention, Indexer, LatentAttention, ModelSpec


class Takes(Record):
    """One format of weights in one engine."""

    weights: str
    """A name of kvctl.weight_formats."""
    least: float
    """CUDA capability."""
    native: float
    """That whose tensor cores compute in it; above all where weights are unpacked first in any case."""
    load: str = ""
    """What --quantization is told to convert plain weights while loading; empty where it cannot."""


_NEVER = 99.0

_TABLE: dict[str, tuple[Takes, ...]] = {
    "vllm": (
        Takes("bf16", 7.5, 7.5),
        Takes("fp16", 7.5, 7.5),
        Takes("fp8", 7.5, 8.9, "fp8"),
        Takes("fp8-block", 7.5, 9.0),
        Takes("fp8-channel", 7.5, 8.9),
        Takes("w8a8", 7.5, 7.5),
        Takes("awq", 7.5, _NEVER),
        Takes("gptq", 7.5, _NEVER),
        Takes("w4a16", 7.5, _NEVER),
        Takes("mxfp4", 8.0, 10.0),
        Takes("nvfp4", 7.5, 10.0),
    ),
    "sglang": (
        Takes("bf16", 7.5, 7.5),
        Takes("fp16", 7.5, 7.5),
        Takes("fp8", 8.0, 8.9, "fp8"),
        Takes("fp8-block", 8.0, 9.0),
        Takes("fp8-channel", 8.0, 8.9),
        Takes("w8a8", 8.0, 8.0),
        Takes("awq", 8.0, _NEVER),
        Takes("gptq", 8.0, _NEVER),
        Takes("w4a16", 8.0, _NEVER),
        Takes("mxfp4", 8.0, 10.0),
        Takes("nvfp4", 8.0, 10.0),
    ),
    "tensorrt-llm": (
        Takes("bf16", 8.0, 8.0),
        Takes("fp16", 8.0, 8.0),
        Takes("fp8", 8.9, 8.9),
        Takes("fp8-block", 9.0, 9.0),
        Takes("mxfp4", 9.0, 10.0),
        Takes("nvfp4", 10.0, 10.0),
    ),
}
"""bitsandbytes is not here: vLLM took it out in 0.28, and where SGLang loads it on one rank fp8 and 4-bit integers take as
little and are faster."""

_LEAST = {"vllm": 7.5, "sglang": 7.5, "tensorrt-llm": 8.0}
"""CUDA capability with which an engine runs at all: vLLM's docs from 0.21 on (installation/gpu.cuda.inc.md; 7.0 before), SGLang's
(install.md: sm75 and above), and the least that TensorRT-LLM's table of formats has."""

_GFX = {
    "vllm": ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1150", "gfx1151", "gfx1200", "gfx1201"),
    "sglang": ("gfx942", "gfx950"),
}
"""AMD's GPUs that an engine is built for, as LLVM names them: vLLM's docs, installation/gpu.rocm.inc.md; SGLang's
sgl-kernel/setup_rocm.py, which refuses others, and docs/platforms/amd_gpu.md."""

_NAMES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tensorrt-llm": "TensorRT-LLM",
    "llama.cpp": "llama.cpp",
    "ollama": "Ollama",
}

GGUF = ("bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "q3_k_m")
"""Types of GGUF files that are considered, the largest first."""


def capability(device: Device) -> float | None:
    """A GPU's CUDA capability; None where that is not known, or it is no such GPU."""
    try:
        return float(device.compute_capability or "")
    except ValueError:
        return device.facts.cuda_capability if device.facts is not None else None


def vendor(device: Device) -> str:
    """NVIDIA where nothing else is known of a GPU; empty for a host."""
    if device.kind == "cpu":
        return ""
    return device.facts.vendor if device.facts is not None else "NVIDIA"


_NOT_IN_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
"""vLLM 0.32, config/model.py: these overflow in float16, and GPUs without bfloat16 get them in float32, twice as large."""


def computes_in(engine: Engine, device: Device, spec: ModelSpec) -> str:
    """Why an engine does not compute a model on a device in 16 bits; empty where it does."""
    if engine.name == "vllm" and dtype(spec, device) == "float16" and spec.model_type in _NOT_IN_FLOAT16:
        return f"vllm computes {spec.model_type} in bfloat16 alone, which {device.name} has not"
    return ""


def dtype(spec: ModelSpec, device: Device) -> str:
    """What engines have to be told to compute in: GPUs below 8.0 have no bfloat16, and engines refuse to guess."""
    has = capability(device)
    return "float16" if has is not None and has < 8.0 and spec.dtype is not FP16 else "auto"


def runs(engine: Engine, device: Device) -> str:
    """Why an engine does not run on a device; empty where it does."""
    maker, facts, name = vendor(device), device.facts, _NAMES[engine.name]
    called = device.name if facts is None else facts.name
    if engine.slots:
        # ggml has backends for the GPUs of all of the table's makers (CUDA, HIP, SYCL, Metal, Vulkan); Gaudi is none of these.
        return f"{name} has no backend for {called}" if "Gaudi" in called else ""
    if engine.name == "tensorrt-llm" and maker != "NVIDIA":
        return f"{name} runs on NVIDIA's GPUs, not on {called}"
    if maker not in ("NVIDIA", "AMD", ""):
        return f"kvctl does not know {name} on {called}"
    if engine.name == "sglang" and not maker:
        return f"kvctl does not know {name} on a CPU"
    least, has = _LEAST[engine.name], capability(device)
    if maker == "NVIDIA" and has is not None and has < least:
        return f"{name} needs CUDA capability {least}, and {called} has {has}"
    gfx = facts.compute_capability if facts is not None else None
    if maker == "AMD" and gfx is not None and gfx not in _GFX[engine.name]:
        return f"{called} is {gfx}, and of AMD's GPUs {name} supports {', '.join(_GFX[engine.name])}"
    return ""


def weights(engine: Engine, device: Device, name: str) -> Takes | None:
    """How an engine takes a format of weights on a device; None where it does not."""
    if engine.slots:
        return Takes(name, 0, _NEVER)
    found = next((takes for takes in _TABLE[engine.name] if takes.weights == name), None)
    if found is None:
        return None
    maker = vendor(device)
    if not maker:  # vLLM's kernels for CPUs: plain weights
        return found.replace(load="") if name in ("bf16", "fp16") else None
    if maker == "AMD":
        facts = device.facts
        rate = {"fp8": facts.fp8_tflops, "mxfp4": facts.fp4_tflops} if facts is not None else {}
        eight = name.startswith("fp8") and rate.get("fp8")
        # vLLM's fused_moe/oracle/mxfp4.py: gfx950 has the format, gfx942 unpacks it to 16 bits (moe_gemm_a16w4).
        four = name == "mxfp4" and (rate.get("mxfp4") or (engine.name == "vllm" and rate.get("fp8")))
        return found if name in ("bf16", "fp16", "awq", "gptq") or eight or four else None
    has = capability(device)
    return found if has is None or has >= found.least else None


def computes(takes: Takes, device: Device) -> bool:
    """Whether tensor cores compute in the format, or weights are unpacked on the way."""
    has = capability(device)
    if vendor(device) == "AMD":
        return takes.weights not in ("mxfp4", "nvfp4") or bool(device.facts is not None and device.facts.fp4_tflops)
    return has is None or has >= takes.native


def caches(engine: Engine, device: Device, spec: ModelSpec) -> tuple[str, ...]:
    """Formats of keys and values that are considered, in the engine's words, the model's own first.

    vLLM: fp8 in attention's kernels from 8.9, and by FlashInfer from 8.0 for plain heads without sinks; nvfp4 where tensor
    cores have it, and elsewhere 4 bits with a scale for every token and head, which Triton's kernels read (8 bits of that kind
    only where there is no native fp8, which takes less and has the faster kernels). SGLang: fp8_e4m3 from 8.9, fp8_e5m2 below;
    nvfp4 on Blackwell, of plain heads. TensorRT-LLM: fp8 from 8.9, nvfp4 of checkpoints that ModelOpt calibrated for it.
    """
    if engine.slots:
        return ("f16", "q8_0", "q4_0") if engine.name == "ollama" else ("f16", "q8_0", "q5_1", "q4_0")
    maker, has = vendor(device), capability(device) or 8.0
    own = "bfloat16" if spec.kv_format is not None and engine.name != "tensorrt-llm" else "auto"
    if not maker:
        return (own,)
    latent = spec.keeps(LatentAttention, engine=engine.name)
    sparse = spec.keeps(Indexer, engine=engine.name)
    eight = has >= 8.9 if maker == "NVIDIA" else bool(device.facts and device.facts.fp8_tflops)
    four = maker == "NVIDIA" and has >= 10
    out = [own]
    if engine.name == "vllm":
        if eight or (maker == "NVIDIA" and has >= 8.0 and not latent and not sparse and _plain_heads(spec)):
            out.append("fp8")
        scaled = maker == "NVIDIA" and not latent and not sparse and _by_head(spec)
        if scaled and not eight:
            out.append("int8_per_token_head")
        if four and not latent and not sparse and _plain_heads(spec):
            out.append("nvfp4")
        elif scaled:
            out.append("int4_per_token_head")
    elif engine.name == "sglang":
        if eight or not sparse:
            out.append("fp8_e4m3" if eight else "fp8_e5m2")
        if four and not latent and not sparse:
            out.append("nvfp4")
    else:
        if eight:
            out.append("fp8")
        if spec.kv_format == "nvfp4" and four:
            out.append("nvfp4")
    return tuple(out)


def _heads(spec: ModelSpec) -> list[Attention]:
    return [s for layer, _ in spec.groups for s in layer.states_in("vllm") if isinstance(s, Attention)]


def _plain_heads(spec: ModelSpec) -> bool:
    """Whether FlashInfer's kernels have all heads: equal keys and values of 64, 128 or 256, and no sinks."""
    return spec.model_type != "gpt_oss" and all(
        s.key_dim == s.value_dim and s.key_dim in (64, 128, 256) for s in _heads(spec)
    )


def _by_head(spec: ModelSpec) -> bool:
    """Whether Triton's kernels keep scales for all heads: keys as wide as values."""
    return bool(_heads(spec)) and all(s.key_dim == s.value_dim for s in _heads(spec))
