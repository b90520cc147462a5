"""What engines' pages of metrics call what kvctl asks of them: serve-test reads them, recommended alarms watch them."""

from __future__ import annotations

from collections.abc import Mapping

TIMES: Mapping[str, Mapping[str, str]] = {
    # vllm/v1/metrics/loggers.py
    "vllm": {"ttft": "vllm:time_to_first_token_seconds", "tpot": "vllm:request_time_per_output_token_seconds"},
    # sglang/srt/observability/metrics_collector.py
    "sglang": {"ttft": "sglang:time_to_first_token_seconds", "tpot": "sglang:request_time_per_output_token_seconds"},
    # tensorrt_llm/metrics/collector.py
    "tensorrt-llm": {"ttft": "trtllm_time_to_first_token_seconds", "tpot": "trtllm_time_per_output_token_seconds"},
}
"""Histograms of seconds, one observation a request; a page has them with _bucket, _sum and _count behind the name."""

NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    # vllm/v1/metrics/loggers.py; gpu_* until 0.9 (vllm#30041), prompt_tokens_cached from 0.16 on.
    "vllm": {
        "kv_use": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        "running": ("vllm:num_requests_running",),
        "waiting": ("vllm:num_requests_waiting",),
        "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
        "prompt_tokens": ("vllm:prompt_tokens_total",),
        "output_tokens": ("vllm:generation_tokens_total",),
        "cached_tokens": ("vllm:prompt_tokens_cached_total",),
        "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        "requests": ("vllm:request_success_total",),
        "ttft_seconds": (TIMES["vllm"]["ttft"] + "_sum",),
        "ttft_requests": (TIMES["vllm"]["ttft"] + "_count",),
    },
    # sglang/srt/observability/metrics_collector.py
    "sglang": {
        "kv_use": ("sglang:token_usage",),
        "running": ("sglang:num_running_reqs",),
        "waiting": ("sglang:num_queue_reqs",),
        "kv_tokens": ("sglang:num_used_tokens",),
        "preemptions": ("sglang:num_retracted_requests_total", "sglang:num_retractions"),
        "prompt_tokens": ("sglang:prompt_tokens_total",),
        "output_tokens": ("sglang:generation_tokens_total",),
        "cached_tokens": ("sglang:cached_tokens_total",),
        "requests": ("sglang:num_requests_total",),
        "ttft_seconds": (TIMES["sglang"]["ttft"] + "_sum",),
        "ttft_requests": (TIMES["sglang"]["ttft"] + "_count",),
    },
    # tools/server/server.cpp: no use of the cache; that comes from /slots.
    "llama.cpp": {
        "running": ("llamacpp:requests_processing",),
        "waiting": ("llamacpp:requests_deferred",),
        "prompt_tokens": ("llamacpp:prompt_tokens_total",),
        "output_tokens": ("llamacpp:tokens_predicted_total",),
        "cached_tokens": ("llamacpp:prompt_tokens_cached_total",),
    },
    # TGI's router: docs/source/reference/metrics.md
    "tgi": {
        "running": ("tgi_batch_current_size",),
        "waiting": ("tgi_queue_size",),
        "requests": ("tgi_request_success",),
    },
    # tensorrt_llm/metrics/collector.py; the numbers of requests in later versions only. It has the page with return_perf_metrics: true.
    "tensorrt-llm": {
        "kv_use": ("trtllm_kv_cache_utilization",),
        "running": ("trtllm_num_requests_running",),
        "waiting": ("trtllm_num_requests_waiting",),
        "requests": ("trtllm_request_success_total",),
        "ttft_seconds": (TIMES["tensorrt-llm"]["ttft"] + "_sum",),
        "ttft_requests": (TIMES["tensorrt-llm"]["ttft"] + "_count",),
    },
}
"""By meaning, the name of today first."""


def page_of(engine: str) -> str:
    """Where an engine has its page of metrics: TensorRT-LLM's /metrics is another thing, which is gone once it was read."""
    return "/prometheus/metrics" if engine == "tensorrt-llm" else "/metrics"
