"""Pages of metrics: of vLLM, SGLang and llama.cpp as their code writes them, renamed, reset, broken."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest
from scripted_server import Scripted, send

from kvctl.loadtest.metrics import Sample, Watch, growth, of_slots, read
from kvctl.loadtest.target import Client, Trust, page_of, read_url

VLLM = """# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e9
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.2e+06
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 5.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 6.0
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="68",enable_prefix_caching="True"} 1.0
"""
OLD_VLLM = """# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
# TYPE vllm:gpu_prefix_cache_queries counter
vllm:gpu_prefix_cache_queries_total{model_name="m"} 100.0
"""
LLAMA = """# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 4023
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 2
"""


def test_a_page_of_vllm() -> None:
    sample = read(VLLM, "vllm", 5)
    assert sample.at == 5
    # Two engines: shares are averaged, counts added; finished requests are the sum over reasons.
    assert dict(sample.values) == {
        "kv_use": 0.5,
        "running": 7,
        "preemptions": 7,
        "prompt_tokens": 1.2e6,
        "requests": 11,
    }
    assert sample.info["vllm:cache_config_info"]["num_gpu_blocks"] == "68"


def test_names_of_older_versions_and_what_is_not_there() -> None:
    sample = read(OLD_VLLM, "vllm")
    assert dict(sample.values) == {"kv_use": 0.5, "prefix_queries": 100}
    assert "preemptions" not in sample.values
    assert read(VLLM, "unknown").values == {}


def test_pages_of_others() -> None:
    assert dict(read(LLAMA, "llama.cpp").values) == {"prompt_tokens": 4023, "waiting": 2}
    page = '# TYPE sglang:token_usage gauge\nsglang:token_usage{model_name="m"} 0.31\n# TYPE sglang:num_queue_reqs gauge\nsglang:num_queue_reqs{model_name="m"} 9\n'
    assert dict(read(page, "sglang").values) == {"kv_use": 0.31, "waiting": 9}


def test_slots_of_llama_cpp() -> None:
    """Two of four slots of 256 cells are at work, with 100 + 20 and 50 + 1 tokens: 171 of 1,024."""
    slots = [
        {"n_ctx": 256, "is_processing": True, "n_prompt_tokens": 100, "next_token": [{"n_decoded": 20}]},
        {"n_ctx": 256, "is_processing": True, "n_prompt_tokens": 50, "next_token": {"n_decoded": 1}},
        {"n_ctx": 256, "is_processing": False, "n_prompt_tokens": 200},
        {"n_ctx": 256, "is_processing": False},
    ]
    assert of_slots(slots) == {"kv_tokens": 171, "kv_use": 171 / 1024}
    assert of_slots([]) == {"kv_tokens": 0}
    # b11434 as it was seen after 24 tokens of an answer to 200: what was generated is among n_prompt_tokens already.
    newer = [{"n_ctx": 1024, "is_processing": True, "n_prompt_tokens": 224, "n_prompt_tokens_processed": 180, "n_prompt_tokens_cache": 20,
              "next_token": [{"n_decoded": 24}]}] * 4  # fmt: skip
    assert of_slots(newer) == {"kv_tokens": 896, "kv_use": 896 / 4096}
    assert of_slots(newer, 1024)["kv_use"] == 896 / 1024  # which all slots share


def _counter(*values: float) -> list[Sample]:
    return [Sample(at, {}, {"requests": {"a": value}}) for at, value in enumerate(values)]


def test_how_far_a_counter_went() -> None:
    found = growth(_counter(10, 12, 15), "requests")
    assert found is not None
    assert (found.value, found.resets) == (5, 0)
    # The server was restarted: 12, then from 0 to 3, and on to 4.
    found = growth(_counter(10, 12, 3, 4), "requests")
    assert found is not None
    assert (found.value, found.resets) == (2 + 3 + 1, 1)
    # A line that comes later begins at 0.
    later = [Sample(0, {}, {"requests": {"a": 5}}), Sample(1, {}, {"requests": {"a": 5, "b": 2}})]
    found = growth(later, "requests")
    assert found is not None
    assert (found.value, found.resets) == (2, 0)
    assert growth(_counter(10), "requests") is None
    assert growth(_counter(10, 11), "preemptions") is None


@pytest.mark.parametrize("page", ["", "<html>", '# TYPE x gauge\nx{a="b" 1', "\x00\xff", "x 1 2 3 4"])
def test_what_is_no_page_gives_nothing_or_is_refused(page: str) -> None:
    with contextlib.suppress(ValueError):
        assert not read(page, "vllm").values


def _answer(body: str) -> bytes:
    data = body.encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(data) + data


def test_a_watch_looks_from_before_the_start_to_after_the_end() -> None:
    counts = iter(range(1000))

    def script(number: int) -> list[object]:
        asked = server.requests[number].split()[1]
        if asked == b"/slots":
            return [send(_answer(json.dumps([{"n_ctx": 10, "is_processing": True, "n_prompt_tokens": 5}])))]
        value = next(counts)
        if value == 1:
            return [send(b"HTTP/1.1 503 x\r\nContent-Length: 0\r\n\r\n")]
        return [send(_answer(f"# TYPE llamacpp:prompt_tokens_total counter\nllamacpp:prompt_tokens_total {value}\n"))]

    with Scripted(script) as server:  # type: ignore[arg-type]
        watch = Watch(Client(read_url(f"127.0.0.1:{server.port}"), Trust(), {}), "llama.cpp", every=0.02)
        watch.start()
        while len(watch.samples) < 4:
            pass
        watch.stop()
    first, *_, last = watch.samples
    assert first.values["prompt_tokens"] == 0
    assert first.values["kv_use"] == 0.5
    assert watch.misses == 1
    assert watch.why == "/metrics answers 503"
    found = growth(watch.samples, "prompt_tokens")
    assert found is not None
    assert found.value == last.values["prompt_tokens"]
    assert [sample.at for sample in watch.samples] == sorted(sample.at for sample in watch.samples)


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    watch = Watch(Client(read_url(f"127.0.0.1:{port}"), Trust(), {}), "vllm")
    watch.look()
    assert (watch.samples, watch.misses) == ([], 1)
    assert watch.why is not None
    assert "onnection refused" in watch.why


def test_tensorrt_llms_page_is_another_one() -> None:
    """As its MetricsCollector writes it: gauges of the cache, a counter by why requests finished, and histograms."""
    page = (
        "# HELP trtllm_kv_cache_utilization KV cache utilization\n# TYPE trtllm_kv_cache_utilization gauge\n"
        'trtllm_kv_cache_utilization{engine_type="undefined",model_name="m"} 0.62\n'
        "# TYPE trtllm_request_success_total counter\n"
        'trtllm_request_success_total{engine_type="undefined",finished_reason="length",model_name="m"} 5.0\n'
        'trtllm_request_success_total{engine_type="undefined",finished_reason="stop",model_name="m"} 2.0\n'
    )
    found = read(page, "tensorrt-llm")
    assert found.values == {"kv_use": 0.62, "requests": 7.0}
    assert page_of("tensorrt-llm") == "/prometheus/metrics"
    assert page_of("vllm") == page_of("unknown") == "/metrics"
