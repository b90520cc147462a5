"""SGLang's default of --mem-fraction-static: what is left when activations and CUDA graphs have their share.

Source: sglang 0.5.23 srt/arg_groups/memory_hook.py (handle_gpu_memory_settings) and cuda_graph_hook.py; 0.4.4 to
0.5.22 srt/server_args.py of each release. Checked against those functions themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvctl.engines.sglang.budget import NEWEST
from kvctl.record import Record

BY_MEMORY = ((20, 2048, 8, 8), (35, 4096, 48, 160), (60, 4096, 32, 160), (160, 8192, 256, 512))
"""Below so many GiB: tokens of a prefill chunk, and requests of the largest decode graph on under 4 ranks and on more."""
_LARGEST = (16384, 512, 512)
_BY_RANKS = ((16, 0.79), (8, 0.81), (4, 0.85), (2, 0.87), (1, 0.88))


class Start(Record):
    """What SGLang chooses for a GPU when nothing is said."""

    chunk: int
    """--chunked-prefill-size."""
    batch: int
    """Requests of the largest decode graph."""
    fraction: float
    """--mem-fraction-static."""


def default_start(
    memory: float,
    *,
    tp: int = 1,
    pp: int = 1,
    latent: bool = False,
    workers: int = 1,
    chunk: int | None = None,
    requests: int | None = None,
    prefill_graphs: bool = True,
    drafting: str | None = None,
    version: tuple[int, ...] = NEWEST,
) -> Start:
    """Defaults for a GPU of `memory` MiB (nvidia-smi's total), for text models on CUDA without DeepEP.

    `latent`: latent attention; `workers`: data-parallel workers of attention; `requests`:
    --max-running-requests; `prefill_graphs`: whether prefill is captured, which SGLang decides by model;
    `drafting`: --speculative-algorithm.
    """
    if version < (0, 5, 3):
        return _before_0_5_3(memory, tp, pp, workers, chunk, drafting, version)
    found = next(((c, few, many) for gib, c, few, many in BY_MEMORY if memory < gib * 1024), _LARGEST)
    if version < (0, 5, 20) and found == BY_MEMORY[1][1:]:
        found = (2048, 16 if version < (0, 5, 5) else 24, 80)
    chunk = found[0] if chunk is None else chunk
    batch = found[1] if tp < 4 else found[2]
    if requests is not None and version >= (0, 5, 22):
        batch = min(batch, requests)
    reserved = 512 + max(chunk, 2048) * 1.5 + tp * pp / 8 * 1024 + batch * 2
    if workers > 1:
        reserved += batch * workers * (4.5 if batch > 300 else 3)
    if prefill_graphs and version >= (0, 5, 10):
        # With pipeline stages larger batches than 8,192 tokens are not captured.
        most = chunk if pp == 1 or version < (0, 5, 19) else min(chunk, 8192)
        reserved += 1536 if latent else 8 * _captured(most)
    if memory > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    if drafting is not None and version < (0, 5, 14) and drafting.upper() != "NGRAM":
        some = 2048 if version < (0, 5, 10) else 4096
        reserved += 6144 if drafting.upper() == "STANDALONE" else some
    return Start(chunk, batch, round((memory - reserved) / memory, 3))


def _before_0_5_3(
    memory: float, tp: int, pp: int, workers: int, chunk: int | None, drafting: str | None, version: tuple[int, ...]
) -> Start:
    """Tables by the number of ranks, then by memory."""
    small = memory < (35 * 1024 if version >= (0, 4, 8) else 25_000)
    largest = memory >= 160 * 1024 if version >= (0, 4, 8) else version >= (0, 4, 7) and memory > 180_000
    chunk = (2048 if small else 16384 if largest else 8192) if chunk is None else chunk
    batch = (8 if tp < 4 else 80) if small else 160
    if version < (0, 4, 8):
        return Start(chunk, batch, _by_ranks(memory, tp, pp, drafting, version))
    gib = next((base + tp * pp * each for below, base, each in
                ((35, 2.8, 0.1), (90, 9.5, 0.5), (160, 12, 0.5)) if memory < below * 1024), 32.0)  # fmt: skip
    if drafting is not None:
        gib += 6 if drafting.upper() == "STANDALONE" and version >= (0, 5, 2) else 2
    gib += 4 if workers > 1 else 0
    return Start(chunk, batch, round((memory - gib * 1024) / memory, 3))


def _by_ranks(memory: float, tp: int, pp: int, drafting: str | None, version: tuple[int, ...]) -> float:
    ranks = tp * pp if version >= (0, 4, 7) else tp
    fraction = next(share for most, share in _BY_RANKS if ranks >= most)
    if version < (0, 4, 6):
        return fraction
    if version < (0, 4, 7):
        return fraction if memory <= 81_920 else (memory - 13 * 1024) / memory
    fraction = fraction if memory <= 81_920 else 0.88
    if memory > 180_000:
        return 0.79
    if memory > 96 * 1024:
        reserved = (18 if drafting is None else 20) * 1024
        return min(fraction + 48 * 1024 * (1 - fraction) / memory, (memory - reserved) / memory)
    return fraction if drafting is None else fraction * 0.95


def _captured(tokens: int) -> int:
    """How many sizes of prefill are captured up to `tokens`."""
    ranges = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, tokens + 1, 512))
    return sum(size <= tokens for low, high, step in ranges for size in range(low, high, step))


def for_images(vision: Mapping[str, Any] | None, version: tuple[int, ...] = NEWEST) -> float:
    """What a default fraction is multiplied by for a model with a vision tower of this configuration."""
    if vision is None or version < (0, 4, 9):
        return 1.0
    if version < (0, 4, 10):
        return 0.9
    layers, width = _number(vision, "num_hidden_layers", 24), _number(vision, "hidden_size", 1024)
    heavier = layers * width**2 / (24 * 1024**2) - 1
    return 0.95 * max(0.8, min(1.05, 1 - 0.1 * heavier))


def _number(facts: Mapping[str, Any], name: str, default: int) -> int:
    found = facts.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) and 0 < found < 2**20 else default
