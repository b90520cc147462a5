"""Which backends there are, what each makes, and what its environment is made of."""

from __future__ import annotations

import hashlib
import re
from importlib import resources

from kvctl.errors import UsageError
from kvctl.record import Record

MARK = "# -- of torch's CUDA build alone --\n"
"""What follows in a set is left out with torch's CPU build (scripts/backend_sets.py writes it)."""
_TORCH = re.compile(r"(?m)^torch==.*\n(?:[ \t]+--hash=.*\n)+")
_VERSION = re.compile(r"(?m)^([A-Za-z0-9._-]+)==([^\s;\\]+)")


class Format(Record):
    """Something that a backend makes."""

    name: str
    layout: str
    """How the checkpoint says it: quant_method, and the format where there are several."""
    bits: float
    """Of a weight, without scales."""
    group: int | None
    """Weights that share a scale; None: an output's, or what divides."""
    calibrates: bool
    """Whether it looks at calibration tokens."""
    runs_on: str
    """Who reads the checkpoint, and what that takes; quantizing needs no GPU unless the backend does."""


class Size(Record):
    """What an environment takes."""

    download_bytes: int
    installed_bytes: int
    measured: bool
    """Else the sum of the files' sizes in the index, and an estimate of what they unpack to."""


class Backend(Record):
    """Someone else's quantizer."""

    name: str
    package: str
    """As registries call it."""
    module: str
    """What is imported to see whether it works."""
    formats: tuple[Format, ...]
    needs_cuda: bool
    pythons: tuple[int, int]
    """The first and the last minor version of Python 3 that its set is for."""
    platforms: tuple[str, ...]
    """sys.platform, a dash and the machine."""
    needs_compiler: bool
    """Whether a part of it comes as C source alone."""
    cpu: Size
    """With torch's CPU build (Linux x86_64, Python 3.11)."""
    cuda: Size
    """With the build that registries offer on Linux."""
    why: str
    """What it is for, beside kvctl's own search."""
    limits: str

    def format(self, name: str) -> Format:
        """One of its formats.

        Raises:
            UsageError: it makes no such format.

        """
        for one in self.formats:
            if one.name == name:
                return one
        makers = ", ".join(other.name for other in BACKENDS if any(one.name == name for one in other.formats))
        raise UsageError(f"{self.name} makes no {name[:40]!r}",
                         hint=f"{makers} does" if makers else f"it makes {', '.join(f.name for f in self.formats)}")  # fmt: skip

    @property
    def version(self) -> str:
        """That its set pins."""
        return self.versions()[self.package]

    def count(self, cpu: bool) -> int:
        """Packages in its set, at most: some are for other Pythons."""
        return len(set(_VERSION.findall(requirements(self.name, cpu))))

    def versions(self) -> dict[str, str]:
        """Of all packages in its set."""
        return {name.lower(): version for name, version in _VERSION.findall(shipped(self.name))}


_LINUX = ("linux-x86_64", "linux-aarch64")
_ALL = (*_LINUX, "darwin-arm64")
_MB = 10**6
# Read of vLLM 0.32 (layers/quantization: get_min_capability of methods and schemes, _get_scheme_from_parts, marlin_utils_fp4),
# SGLang 0.5.23 (the same) and transformers 5.24 (quantizers: validate_environment).
AWQ_READERS = "vLLM (CUDA of 7.5 or newer, or a CPU), SGLang (7.5 or newer), transformers (with gptqmodel)"
_AWQ = Format("awq", "awq, gemm", 4, 128, True, AWQ_READERS)
_CT = "transformers (with compressed-tensors)"
_FP8_READERS = f"vLLM (CUDA of 8.9 or newer; from 7.5 activations are left as they are), SGLang (8.9 or newer; from 8.0 likewise), {_CT}"

BACKENDS: tuple[Backend, ...] = (
    Backend(
        "autoawq", "autoawq", "awq", (_AWQ,), False, (11, 13), _LINUX, False,
        Size(549 * _MB, 2312 * _MB, True), Size(2889 * _MB, 5800 * _MB, False),
        "the AWQ that others are measured against",
        "no release since May 2025, and it wants transformers 4.51.3: it knows no architecture newer than April 2025; on a CPU "
        "its own search makes things worse than rounding to nearest, which kvctl's worker repairs",
    ),
    Backend(
        "gptqmodel", "gptqmodel", "gptqmodel",
        (_AWQ, Format("gptq", "gptq, gptq", 4, 128, True, "vLLM and SGLang (CUDA of 6.0 or newer), transformers (with gptqmodel and optimum)")),
        False, (11, 14), _ALL, True, Size(373 * _MB, 1710 * _MB, True), Size(2911 * _MB, 5800 * _MB, False),
        "GPTQ; AWQ of many architectures, fast with CUDA",
        "without CUDA it runs torch's plain operators: over a minute for a layer of a model of 135M",
    ),
    Backend(
        "llm-compressor", "llmcompressor", "llmcompressor",
        (
            Format("fp8", "compressed-tensors, float-quantized", 8, None, False, _FP8_READERS),
            Format("fp8-static", "compressed-tensors, float-quantized", 8, None, True, _FP8_READERS),
            Format("int8-w8a8", "compressed-tensors, int-quantized", 8, None, False, f"vLLM (CUDA of 7.5 or newer, or a CPU), SGLang (8.0 or newer), {_CT}"),
            Format("nvfp4", "compressed-tensors, nvfp4-pack-quantized", 4, 16, True,
                   f"vLLM (CUDA of 10.0 or newer; from 7.5 activations are left as they are), SGLang (10.0 or newer), {_CT}"),
            Format("mxfp4", "compressed-tensors, mxfp4-pack-quantized", 4, 32, False,
                   f"vLLM (CUDA of 10.0 or newer; from 8.0 activations are left as they are), {_CT}"),
        ),
        False, (11, 14), _ALL, False, Size(359 * _MB, 1643 * _MB, True), Size(2897 * _MB, 5800 * _MB, False),
        "FP8, INT8, NVFP4 and MXFP4 with activations, as vLLM runs them",
        "its AWQ is compressed-tensors', which is not the AWQ layout: kvctl does not offer it",
    ),
)  # fmt: skip


def backend(name: str) -> Backend:
    """A backend by its name.

    Raises:
        UsageError: there is none of that name.

    """
    for one in BACKENDS:
        if name in (one.name, one.package):
            return one
    raise UsageError(f"no backend {name[:40]!r}", hint=f"there are {', '.join(one.name for one in BACKENDS)}")


def shipped(name: str) -> str:
    """A requirement set, as it comes with kvctl; pip can read it as it is."""
    return resources.files("kvctl").joinpath("data", "backends", f"{name}.txt").read_text(encoding="utf-8")


def requirements(name: str, cpu: bool) -> str:
    """What pip is given: everything pinned, everything hashed; with `cpu` torch's CPU build and nothing of CUDA."""
    text = shipped(name)
    if not cpu:
        return text
    own, mark, _ = text.partition(MARK)
    out, count = _TORCH.subn(lambda _: shipped("torch-cpu"), own)
    if not mark or count != 1:
        raise AssertionError(f"{name}.txt is not as scripts/backend_sets.py writes it")
    return out


def fingerprint(*texts: str) -> str:
    """Changes when any of them does."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
