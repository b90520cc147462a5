"""Configuration files that an engine's command line names, as the flags that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvctl.errors import UsageError

FLAGS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("--config",),
    "sglang": ("--config",),
    "tensorrt-llm": ("--config", "--extra_llm_api_options"),
}
"""Flags that name such a file."""

_LONGEST = 1_000_000
_MOST = 10_000
"""Values in it at most."""
TENSORRT_LLM = {
    "tensor_parallel_size": "--tp_size", "pipeline_parallel_size": "--pp_size", "max_seq_len": "--max_seq_len",
    "max_batch_size": "--max_batch_size", "enable_attention_dp": "--enable-attention-dp",
    "kv_cache_config.tokens_per_block": "--tokens-per-block", "kv_cache_config.dtype": "--kv_cache_dtype",
    "kv_cache_config.max_tokens": "--max-tokens", "kv_cache_config.max_attention_window": "--max-attention-window",
    "kv_cache_config.free_gpu_memory_fraction": "--kv_cache_free_gpu_memory_fraction",
    "kv_cache_config.use_kv_cache_manager_v2": "--use-kv-cache-manager-v2",
}  # fmt: skip
"""Of TensorRT-LLM's file: its keys, and what they are called on a command line here."""


def words(engine: str, name: str, told: str | None = None) -> list[str] | None:
    """The file's settings as words of a command line; None where there is no such file here.

    `told`: what is in it, where that is known.

    Raises:
        UsageError: it is too long, or no YAML mapping.

    """
    path = Path(name)
    try:
        if told is None and not path.is_file():
            return None
        if told is None and path.stat().st_size > _LONGEST:
            raise UsageError(f"--engine-args: {path.name[:60]} is too long to be a configuration")
        text = path.read_text("utf-8") if told is None else told
    except (OSError, ValueError) as error:
        raise UsageError(f"--engine-args: {path.name[:60]} cannot be read: {type(error).__name__}") from None
    import yaml

    try:
        settings = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        settings = None
    if not isinstance(settings, Mapping) or not short(settings):
        raise UsageError(f"--engine-args: {path.name[:60]} is no YAML mapping of settings")
    if engine == "tensorrt-llm":
        known = ((TENSORRT_LLM[key], value) for key, value in _flat(settings, "") if key in TENSORRT_LLM)
        return [word for flag, value in known for word in _word(flag, value)]
    return [word for key, value in settings.items() for word in _word(f"--{str(key).replace('_', '-')}", value)]


def short(value: Any) -> bool:
    """Whether it is as long as it looks: with anchors, a few bytes of YAML stand for lists without end."""
    queue, count = [value], 0
    while queue and count < _MOST:
        inner = queue.pop()
        count += 1
        if isinstance(inner, (Mapping, list)):
            queue += inner.values() if isinstance(inner, Mapping) else inner
    return count < _MOST


def _flat(settings: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and not prefix:
            yield from _flat(value, f"{key}.")
        else:
            yield f"{prefix}{key}", value


def _word(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool) and flag == TENSORRT_LLM["kv_cache_config.use_kv_cache_manager_v2"]:
        return [flag, "on" if value else "off"]  # where a third word leaves it open
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, list):
        return [f"{flag}={','.join(map(str, value))}"]
    if isinstance(value, Mapping):
        import json

        return [f"{flag}={json.dumps(value, default=str)}"]
    return [f"{flag}={value}"]
