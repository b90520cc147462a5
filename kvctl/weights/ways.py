"""Formats that `kvctl quantize` makes of a model's weights, and who makes them."""

from __future__ import annotations

from kvctl.errors import UsageError
from kvctl.record import Record


class Way(Record):
    """One format."""

    name: str
    title: str
    by: str = ""
    """The package that makes it, beside torch and transformers; empty: kvctl itself."""
    backend: str = ""
    """Whose environment it is made in (kvctl.weights.backends); empty: this one."""
    grouped: bool = False
    """Whether it has a group size, and is calibrated on a text."""
    calibrated: bool = False
    """Whether it is calibrated, without groups."""

    @property
    def calibrates(self) -> bool:
        """Whether what comes out, or what is said of it, depends on a text."""
        return self.grouped or self.calibrated

    @property
    def resumes(self) -> bool:
        """Whether work on it can be gone on with."""
        return not self.by and not self.backend

    @property
    def looks(self) -> bool:
        """Whether it is at least held against a text: all but bitsandbytes' formats are."""
        return not self.by

    @property
    def readers(self) -> str:
        """Engines that read it, and what that takes."""
        from kvctl.weights.backends.table import AWQ_READERS, backend

        if self.backend:
            return backend(self.backend).format(self.name).runs_on
        return _BITSANDBYTES_READERS if self.by else AWQ_READERS


_BITSANDBYTES_READERS = "transformers (with bitsandbytes), SGLang (CUDA of 7.0 or newer), vLLM (from 0.28 with vllm-bnb-plugin, on one rank)"
"""vLLM took bitsandbytes out in 0.28 (pull request 43529); its plugin 0.0.3 refuses packed weights on several ranks, and takes
16 bits for what is not packed. Run on a CPU with vLLM 0.32; SGLang 0.5.23 as its layers/quantization/bitsandbytes.py says."""
OWN = "kvctl"
"""The backend that is none."""
TABLE = (
    Way("awq", "4 bits in groups with a zero point, AutoAWQ's GEMM layout, scales searched on a text", grouped=True),
    Way("rtn", "4 bits in AutoAWQ's GEMM layout, rounded to nearest", grouped=True),
    Way("int8", "8 bits a row, LLM.int8 of bitsandbytes", "bitsandbytes"),
    Way("nf4", "4 bits in blocks of 64, NormalFloat of bitsandbytes (QLoRA)", "bitsandbytes"),
    Way("nf4-dq", "nf4 whose scales are quantized too (double quantization)", "bitsandbytes"),
    Way("fp4", "4 bits in blocks of 64, floating point of bitsandbytes", "bitsandbytes"),
    Way("gptq", "4 bits in groups, GPTQ's layout", backend="gptqmodel", grouped=True),
    Way("fp8", "8-bit floats with a scale for each output, activations scaled as they come", backend="llm-compressor"),
    Way("fp8-static", "8-bit floats, weights and activations with one calibrated scale", backend="llm-compressor", calibrated=True),
    Way("int8-w8a8", "INT8 weights and activations", backend="llm-compressor"),
    Way("nvfp4", "NVIDIA's 4-bit floats in blocks of 16, activations too", backend="llm-compressor", calibrated=True),
    Way("mxfp4", "OCP's 4-bit floats in blocks of 32, activations too", backend="llm-compressor"),
)  # fmt: skip


def way(name: str, backend: str | None = None) -> Way:
    """The format of this name, made by the backend that is asked for.

    Raises:
        UsageError: unknown, or not made by that backend.

    """
    found = next((one for one in TABLE if one.name == name.strip().lower()), None)
    if found is None:
        known = ", ".join(one.name for one in TABLE)
        raise UsageError(f"--weights: unknown format {name.strip()[:40]!r}", hint=f"one of {known}")
    if backend is None or backend == (found.backend or OWN):
        return found
    from kvctl.weights.backends.table import backend as backend_of

    backend_of(backend).format(found.name)
    return found.replace(backend=backend, by="")


def ways(text: str, backend: str | None = None, option: str = "--weights") -> tuple[Way, ...]:
    """Formats of a list with commas, each once."""
    names = dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip())
    if not names:
        raise UsageError(f"{option}: no format is named", hint=f"{option} awq")
    return tuple(way(name, backend) for name in names)
