"""vLLM's start-up log, V0 and V1, 0.8 to 0.33.

Sources: vllm 0.8.5 to 0.33.0 v1/worker/gpu_worker.py, v1/core/kv_cache_utils.py and kv_cache_planning.py,
v1/engine/core.py, worker/worker.py, executor/executor_base.py, platforms/interface.py, entrypoints/utils.py; vllm-ascend.
From 0.15 on sizes are printed as round(x, 2): 0.4 stands for 0.40.
"""

from __future__ import annotations

import re
from typing import Any

from kvctl.startlog import pairs
from kvctl.startlog.figures import Figure, sized, whole
from kvctl.startlog.lines import Line
from kvctl.startlog.start import Reader, Start, counted, fact, refused, rule, sizes
from kvctl.units import GIB

_SIZE = r"(-?\d[\d.]*)"


def _ratio(name: str, text: str, line: Line, decimals: int | None = None) -> Figure | None:
    """A number without a unit; exact where it is not printed with so many decimals."""
    found = sized(name, text, 1, line.number, line.where, decimals or 0, unit="")
    return found if found is None or decimals is not None else found.replace(half=0)


def _args(start: Start, match: re.Match[str], line: Line) -> None:
    start.args |= pairs.settings(line.text[match.end() :])


def _config(start: Start, match: re.Match[str], line: Line) -> None:
    if match[1]:
        start.facts["version"] = match[1][:60]
    if not start.config:
        start.config = pairs.settings(line.text[match.end() :])
        start.facts["first"] = line.where


def _utilization(start: Start, match: re.Match[str], line: Line) -> None:
    start.add(_ratio("utilization", match[1], line), sized("requested", match[2], GIB, line.number, line.where))


def _profile(start: Start, match: re.Match[str], line: Line) -> None:
    """V0: the share as printed with two decimals."""
    sizes(GIB, "device_total")(start, match, line)
    start.add(_ratio("utilization", match[2], line, 2), sized("requested", match[3], GIB, line.number, line.where))


def _concurrency(start: Start, match: re.Match[str], line: Line) -> None:
    start.add(whole("length", match[1], "tokens", line.number, line.where), _ratio("concurrency", match[2], line, 2))


def _capacity(start: Start, match: re.Match[str], line: Line) -> None:
    start.facts.setdefault("pool", match[1])
    start.add(whole("capacity", match[2], "tokens", line.number, line.where))


def _fitted(start: Start, match: re.Match[str], line: Line) -> None:
    start.facts["fitted"] = match[2]
    start.add(whole("length_asked", match[1], "tokens", line.number, line.where))
    start.add(whole("longest", match[2], "tokens", line.number, line.where))


def _consumed(start: Start, match: re.Match[str], line: Line) -> None:
    start.add(
        sized("consumed", match[1], GIB, line.number, line.where),
        sized("activations", match[2], GIB, line.number, line.where),
        sized("graphs", match[3], GIB, line.number, line.where) if match[3] else None,
    )


def _stored(start: Start, match: re.Match[str], line: Line) -> None:
    start.refuse("too long", line)
    start.add(whole("length_refused", match[1], "tokens", line.number, line.where),
              whole("longest", match[2], "tokens", line.number, line.where))  # fmt: skip


def _not_free(start: Start, match: re.Match[str], line: Line) -> None:
    start.refuse("not free", line)
    start.add(_ratio("utilization", match[3], line), sized("requested", match[4], GIB, line.number, line.where))


def _in_use(start: Start, match: re.Match[str], line: Line) -> None:
    if not start.has("kv_available"):
        sizes(GIB, "kv_available")(start, match, line)


_DEVICE = sizes(GIB, "device_free", "device_total")

RULES = (
    rule("vLLM API server version", r"vLLM API server version v?(\S+)", fact("version")),
    rule("version", r"[█▀▄▌]\s+version (\d\S*)", fact("version")),
    rule("non-default args", r"non-default args: ?\{", _args),
    rule("LLM engine", r"Initializing (?:a|an) (?:V[01] )?LLM engine (?:\(v([^)\s]*)\) )?with config: ", _config),
    rule("max_num_batched_tokens=", r"Chunked prefill is enabled with max_num_batched_tokens=(\d+)", fact("batched")),
    rule("max model len", r"Using max model len (\d+)", fact("length")),
    rule("Auto-fit max_model_len", r"reduced from ([\d,]+) to ([\d,]+)", _fitted),
    rule("Block size is set to", r"Block size is set to (\d+) if prefix cache", fact("block")),
    rule("kv cache block size to", r"(?:Forcing|Setting) kv cache block size to (\d+)", fact("block")),
    rule("attention block size", r"Setting attention block size to (\d+) tokens", counted("block_size", "tokens")),
    rule("padding layers", r"Add (\d+) padding layers", counted("padding_layers", "")),
    rule("Model loading took", rf"Model loading took {_SIZE} (?:GiB|GB)", sizes(GIB, "weights")),
    rule("Loading model weights took", rf"Loading model weights took {_SIZE} (?:GiB|GB)", sizes(GIB, "weights")),
    rule("total_gpu_memory", rf"total_gpu_memory \({_SIZE}GiB\) x gpu_memory_utilization \({_SIZE}\) = {_SIZE}GiB", _profile),
    rule("model weights take", rf"model weights take {_SIZE}GiB; non_torch_memory takes {_SIZE}GiB; PyTorch activation peak "
         rf"memory takes {_SIZE}GiB; the rest of the memory reserved for KV Cache is {_SIZE}GiB",
         sizes(GIB, "weights_profiled", "non_torch", "activations", "kv_available")),
    rule("kv_cache_size=", rf"total_gpu_memory={_SIZE}GiB.*?kv_cache_size={_SIZE}GiB", sizes(GIB, "device_total", "kv_available")),
    rule("torch peak memory increase", rf"torch peak memory increase: {_SIZE}GiB", sizes(GIB, "activations_profiled")),
    rule("Available KV cache memory", rf"Available KV cache memory: {_SIZE} GiB", sizes(GIB, "kv_available")),
    rule("CUDA graph memory", rf"Estimated CUDA graph memory: {_SIZE} GiB total", sizes(GIB, "graphs_estimated")),
    rule("Graph capturing finished", rf"Graph capturing finished in \d+ secs?, took {_SIZE} GiB", sizes(GIB, "graphs")),
    rule("CUDA graph pool memory", rf"CUDA graph pool memory: {_SIZE} GiB \(actual\), {_SIZE} GiB \(estimated\)",
         sizes(GIB, "graphs", "graphs_estimated")),
    rule("blocks:", r"# (?:GPU|\w+) blocks: (\d+), # CPU blocks: \d+", counted("blocks", "blocks")),
    rule("num_gpu_blocks is", r"num_gpu_blocks is: (\d+)", counted("blocks", "blocks")),
    rule("KV cache size", r"(GPU|CPU|XPU|NPU)(?: \+ host)? KV cache size: ([\d,]+) tokens", _capacity),
    rule("Maximum concurrency", rf"Maximum concurrency for ([\d,]+) tokens per request: {_SIZE}x", _concurrency),
    rule("Free memory on device", rf"Free memory on device[^(]*\({_SIZE}/{_SIZE} GiB\) on startup", _DEVICE),
    rule("Desired GPU memory utilization", rf"Desired GPU memory utilization is \(([\d.]+), {_SIZE} GiB\)", _utilization),
    rule("GiB for weight,", rf"Actual usage is {_SIZE} GiB for weight, {_SIZE} GiB for peak activation, {_SIZE} GiB for "
         rf"non-torch memory, and {_SIZE} GiB for CUDAGraph memory", sizes(GIB, "weights_used", "activations", "non_torch", "graphs")),
    rule("consumed memory", rf"Actual usage is {_SIZE} GiB for consumed memory \(weights \+ non-torch\), {_SIZE} GiB for peak "
         rf"activation(?:, and {_SIZE} GiB for CUDAGraph memory)?", _consumed),
    rule("cache memory in use", rf"Current kv cache memory in use is {_SIZE} GiB", _in_use),
    # What is left of the share when weights, activations, graphs and 150 MiB are taken off, to the byte.
    rule("--kv-cache-memory=", r"--kv-cache-memory=(\d+)`? \([^)]*\) to fit into requested memory", counted("suggested", "bytes")),
    # Why it did not start.
    rule("max seq len (", r"To serve at least one request with (?:the )?models?'?s? max seq len \((\d+)\)",
         refused("too long", counted("length_refused", "tokens"))),
    rule("cache is needed", rf"\(?{_SIZE} GiB KV ?cache is needed", refused("too long", sizes(GIB, "needed"))),
    rule("available KV cache memory (", rf"available KV cache memory \({_SIZE} GiB\)", sizes(GIB, "available_refused")),
    rule("estimated maximum model length", r"estimated maximum model length is (\d+)", counted("longest", "tokens")),
    rule("that can be stored in KV cache", r"max seq len \((\d+)\) is larger than the maximum number of tokens that can be stored "
         r"in KV cache \((\d+)\)", _stored),
    rule("No available memory for the cache", r"No available memory for the cache blocks", refused("no cache")),
    rule("less than desired", rf"Free memory on device[^(]*\({_SIZE}/{_SIZE} GiB\) on startup is less than desired \w+ memory "
         rf"utilization \(([\d.]+), {_SIZE} GiB\)", _not_free),
    rule("out of memory. Tried to allocate", r"out of memory\. Tried to allocate", refused("out of memory")),
)  # fmt: skip


_BEGINS = re.compile(
    r"vLLM API server version|non-default args: ?\{|[█▀▄▌]\s+version \d|Initializing (?:a|an) (?:V[01] )?LLM engine"
)


class VllmReader(Reader):
    """Finds vLLM's starts."""

    engine = "vllm"
    rules = RULES

    def begins(self, start: Start | None, line: Line) -> bool:
        found = _BEGINS.search(line.text)
        if start is None or found is None:
            return False
        if not found[0].startswith("Initializing"):
            # The banner and the arguments come before the engine.
            return bool(start.config or start.figures or start.refusals) or ("{" in found[0] and bool(start.args))
        # Engines of data parallelism begin side by side.
        beside = line.where != start.facts.get("first", line.where) and "DP" in line.where
        return bool(start.config) and not beside and (self.is_complete(start) or start.has("kv_available"))

    def is_complete(self, start: Start) -> bool:
        return start.has("capacity") or start.has("blocks") or bool(start.refusals)


# -- in kvctl's terms -----------------------------------------------------------------------

# Settings that kvctl reads, as the log names them; those in effect win over those given.
_IN_EFFECT = (
    ("dtype", "dtype"), ("max_seq_len", "max_model_len"), ("tensor_parallel_size", "tensor_parallel_size"),
    ("pipeline_parallel_size", "pipeline_parallel_size"), ("data_parallel_size", "data_parallel_size"),
    ("decode_context_parallel_size", "decode_context_parallel_size"), ("kv_cache_dtype", "kv_cache_dtype"),
)  # fmt: skip
_GIVEN = (
    "revision", "hf_overrides", "enable_expert_parallel", "block_size", "num_gpu_blocks_override", "max_num_batched_tokens",
    "max_num_seqs", "gpu_memory_utilization", "kv_cache_memory_bytes", "kv_transfer_config", "async_scheduling",
    "mamba_cache_mode", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "disable_hybrid_kv_cache_manager",
    "speculative_config", "attention_backend", "gdn_prefill_backend", "prefill_context_parallel_size", "dtype",
    "max_model_len", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size",
    "kv_cache_dtype", "enable_prefix_caching",
)  # fmt: skip


def model(start: Start) -> str | None:
    """The model as the engine was told."""
    for found in (start.config.get("model"), start.args.get("model"), start.args.get("model_tag")):
        if isinstance(found, str) and found:
            return found
    return None


def settings(start: Start) -> dict[str, Any]:
    """Options by their name without dashes."""
    config = start.config
    out = {name: start.args[name] for name in _GIVEN if start.args.get(name) is not None}
    for name, option in _IN_EFFECT:
        if isinstance(found := config.get(name), str | int) and not isinstance(found, bool):
            out[option] = str(found).removeprefix("torch.")
    for option in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
    ):
        if str(out.get(option)) == "1":
            del out[option]
    if isinstance(config.get("enable_prefix_caching"), bool):
        out["enable_prefix_caching"] = config["enable_prefix_caching"]
    if "fitted" in start.facts:
        out["max_model_len"] = start.facts["fitted"].replace(",", "")
    elif "max_model_len" not in out and (found := start.facts.get("length")):
        out["max_model_len"] = found
    if found := start.facts.get("batched"):
        out["max_num_batched_tokens"] = found
    if "block_size" not in out and (found := start.facts.get("block")):
        out["block_size"] = found
    drafts = _drafts(start)
    if drafts is not None:
        out["speculative_config"] = drafts
    else:
        out.pop("speculative_config", None)
    return out


def _drafts(start: Start) -> dict[str, Any] | None:
    """What drafts tokens, as --speculative-config has it."""
    given, found = start.args.get("speculative_config"), start.config.get("speculative_config")
    if isinstance(given, dict):
        return given
    if not isinstance(found, dict) or not isinstance(found.get("method"), str):
        return None
    out = {"method": found["method"], "num_speculative_tokens": found.get("num_spec_tokens")}
    if isinstance(found.get("model"), str) and found["model"] != model(start):
        out["model"] = found["model"]
    return {name: value for name, value in out.items() if value is not None}
