"""SGLang's default of --mem-fraction-static: what is left when activations and CUDA graphs have their share.

Source: sglang 0.5.23 srt/arg_groups/memory_hook.py (handle_gpu_memory_settings) and cuda_graph_hook.py.
"""

from __future__ import annotations

from kvctl.record import Record

_BY_MEMORY = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
"""Below so many GiB: tokens of a prefill chunk, and requests of the largest decode graph on under 4 ranks and on more."""
_LARGEST = (16384, 512, 512)


class Start(Record):
    """What SGLang chooses for a GPU when nothing is said."""

    chunk: int
    """--chunked-prefill-size."""
    batch: int
    """Requests of the largest decode graph."""
    fraction: float
    """--mem-fraction-static."""


def default_start(
    memory: int,
    *,
    tp: int = 1,
    pp: int = 1,
    latent: bool = False,
    workers: int = 1,
    chunk: int | None = None,
    requests: int | None = None,
    prefill_graphs: bool = True,
) -> Start:
    """Defaults for a GPU of `memory` MiB, for text models on CUDA without DeepEP.

    `latent`: latent attention; `workers`: data-parallel workers of attention; `requests`:
    --max-running-requests; `prefill_graphs`: whether prefill is captured, which SGLang decides by model.
    """
    found = next(((c, few, many) for gib, c, few, many in _BY_MEMORY if memory < gib * 1024), _LARGEST)
    chunk = found[0] if chunk is None else chunk
    batch = found[1] if tp < 4 else found[2]
    batch = batch if requests is None else min(batch, requests)
    reserved = 512 + max(chunk, 2048) * 1.5 + tp * pp / 8 * 1024 + batch * 2
    if workers > 1:
        reserved += batch * workers * (4.5 if batch > 300 else 3)
    if prefill_graphs:
        # With pipeline stages larger batches than 8,192 tokens are not captured.
        reserved += 1536 if latent else 8 * _captured(chunk if pp == 1 else min(chunk, 8192))
    if memory > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return Start(chunk, batch, round((memory - reserved) / memory, 3))


def _captured(tokens: int) -> int:
    """How many sizes of prefill are captured up to `tokens`."""
    ranges = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, tokens + 1, 512))
    return sum(size <= tokens for low, high, step in ranges for size in range(low, high, step))
