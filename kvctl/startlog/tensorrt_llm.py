"""TensorRT-LLM's start-up log (PyTorch backend and C++ runtime).

Sources: TensorRT-LLM _torch/pyexecutor/_util.py, cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp, llmapi/llm_args.py.
A first, smaller cache is made for measuring; the last one is the real one.
"""

from __future__ import annotations

import re
from typing import Any

from kvctl.startlog import pairs
from kvctl.startlog.figures import sized, whole
from kvctl.startlog.lines import Line
from kvctl.startlog.start import Reader, Start, fact, refused, rule, sizes
from kvctl.units import GIB

_SIZE = r"(\d[\d.]*)"


def _drop(start: Start, *names: str) -> None:
    start.figures = [figure for figure in start.figures if figure.name not in names]


def _allocated(start: Start, match: re.Match[str], line: Line) -> None:
    _drop(start, "kv_bytes", "capacity")
    start.add(sized("kv_bytes", match[1], GIB, line.number, line.where),
              whole("capacity", match[2], "tokens", line.number, line.where))  # fmt: skip


def _sequence(start: Start, match: re.Match[str], line: Line) -> None:
    start.facts["block"] = match[3]
    if match[5]:
        start.facts["length"] = match[5]
    start.facts["window"] = match[2]
    _drop(start, "blocks")
    start.add(whole("blocks", match[4], "blocks", line.number, line.where))


def _measured(start: Start, match: re.Match[str], line: Line) -> None:
    start.add(
        sized("peak", match[1], GIB, line.number, line.where),
        sized("kv_available", match[2], GIB, line.number, line.where),
        sized("fraction", match[3], 1, line.number, line.where, 0, unit="") if match[3] else None,
        whole("token_bytes", match[4], "bytes", line.number, line.where) if match[4] else None,
        sized("device_total", match[5], GIB, line.number, line.where) if match[5] else None,
        sized("temporary", match[6], GIB, line.number, line.where) if match[6] else None,
    )


def _args(start: Start, match: re.Match[str], line: Line) -> None:
    start.args |= pairs.settings(line.text[match.end() :])


class TrtReader(Reader):
    """Finds TensorRT-LLM's starts."""

    engine = "tensorrt-llm"
    rules = (
        rule("version: ", r"TensorRT[- ]LLM version: (\d[\w.]*)", fact("version")),
        rule("engine args: {", r"engine args: \{", _args),
        rule("LlmArgs(", r"\w*LlmArgs\(", _args),
        rule("Memory usage when calculating", rf"total: {_SIZE} GiB, available: {_SIZE} GiB",
             sizes(GIB, "device_total", "device_free")),
        rule("Peak memory during", rf"\(torch \+ non-torch\): {_SIZE} GiB, available KV cache memory when calculating max tokens: "
             rf"{_SIZE} GiB(?:, fraction is set {_SIZE}, kv size(?: per token)? is (\d+)\. device total memory {_SIZE} GiB)?"
             rf"(?:[, ]*(?:tmp kv_mem|temporary kv cache memory during profiling) {_SIZE} GiB)?", _measured),
        rule("Max KV cache blocks per sequence", r"Max KV cache blocks per sequence: (\d+) \[window size=(\d+)\], tokens per block=(\d+), "
             r"primary blocks=(\d+)(?:, secondary blocks=\d+)?(?:, max sequence length=(\d+))?",
             _sequence),
        rule("Number of tokens per block", r"Number of tokens per block: (\d+)",
             lambda start, match, line: start.facts.__setitem__("block", match[1])),
        rule("for max tokens in paged KV cache", rf"Allocated {_SIZE} GiB for max tokens in paged KV cache \((\d+)\)", _allocated),
        rule("out of memory. Tried to allocate", r"out of memory\. Tried to allocate",
             refused("out of memory")),
    )  # fmt: skip

    def begins(self, start: Start | None, line: Line) -> bool:
        """Ranks print the version too, so a start begins where arguments come after a cache was made."""
        return start is not None and start.has("capacity") and (
            "engine args: {" in line.text or "Using LLM with PyTorch backend" in line.text
        )  # fmt: skip

    def is_complete(self, start: Start) -> bool:
        return start.has("capacity") or bool(start.refusals)


# -- in kvctl's terms -----------------------------------------------------------------------

_SETTINGS = ("tensor_parallel_size", "pipeline_parallel_size", "max_batch_size", "max_seq_len", "revision")
_CACHE = {"dtype": "kv_cache_dtype", "tokens_per_block": "tokens-per-block", "max_tokens": "max-tokens",
          "free_gpu_memory_fraction": "kv_cache_free_gpu_memory_fraction"}  # fmt: skip


def model(start: Start) -> str | None:
    """The model as the engine was told."""
    found = start.args.get("model")
    return found if isinstance(found, str) and found else None


def settings(start: Start) -> dict[str, Any]:
    """Options by their name without dashes."""
    out = {name: start.args[name] for name in _SETTINGS if isinstance(start.args.get(name), int | str)}
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if out.get(name) == 1:
            del out[name]
    cache = start.args.get("kv_cache_config")
    if isinstance(cache, dict):
        for name, option in _CACHE.items():
            if isinstance(cache.get(name), int | float | str) and cache[name] != "auto":
                out[option] = cache[name]
    if start.args.get("enable_attention_dp") is True:
        out["enable-attention-dp"] = True
    if "tokens-per-block" not in out and start.facts.get("block", "32") != "32":
        out["tokens-per-block"] = start.facts["block"]
    if "max_seq_len" not in out and (length := start.facts.get("length")):
        # With overlapped scheduling the longest sequence has one token more.
        out["max_seq_len"] = max(1, int(length[:12]) - 1)
    return out
