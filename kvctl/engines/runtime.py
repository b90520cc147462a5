"""What a process takes of a GPU before it allocates anything: CUDA's context, kernels, communicators.

All estimated, and within 1.5 GiB of every log that was found: without NVLink it is less, on newer GPUs more.

Sources, as others printed them:
- a CUDA context on an H100: 550 MiB (NVIDIA/TensorRT-LLM, a bisect of its release candidates rc19 and rc20);
- llama.cpp, beside all it accounts for: 749 MiB on an RTX PRO 6000 (ggml-org/llama.cpp#27953);
- SGLang before it loads weights: 0.4 GiB on a GPU of 16 GB (a benchmark of LFM2-700M, December 2025), 0.9 GiB on an RTX 4090
  (a log of February 2025), 2.5 GiB on eight H200, of it 1.8 to 2.0 GiB in communicators (sgl-project/sglang#11716), 3.0 GiB on four B200
  (a change of how flashinfer prepares weights, August 2025).
"""

from __future__ import annotations

from kvctl.allocation import Part
from kvctl.units import MIB, format_bytes

CONTEXT = 550 * MIB
"""CUDA's context with the kernels that are loaded at once."""
TWO_RANKS, MANY_RANKS = 450 * MIB, 1900 * MIB
"""NCCL and the buffers of custom all-reduce, on 2 or 3 ranks and on more."""


def runtime(ranks: int, *, more: int = 0) -> Part:
    """The context, and what `ranks` processes take to talk to each other; `more` is an engine's own."""
    talk = 0 if ranks < 2 else TWO_RANKS if ranks < 4 else MANY_RANKS
    total = CONTEXT + talk + more
    rule = f"CUDA's context and kernels take about {format_bytes(CONTEXT + more)}"
    if talk:
        rule += f", communication between {ranks} ranks about {format_bytes(talk)}"
    return Part("runtime", total, estimated=True, rule=rule + ": taken from published logs")
