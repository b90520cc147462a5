"""`--engine ollama` against logs of the llama-server that Ollama started, and hand calculations."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.allocation import Allocation, Serving
from kvctl.engines import engine
from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.model import build_spec
from kvctl.reports import SizeResult
from kvctl.size import SizePlan
from kvctl.size import size as size_of
from kvctl.sources import resolve

MIB, GIB = 2**20, 2**30


def sized(model: str, num_ctx: int, *, kv: str | None = None, sequences: int = 1, **serving: Any) -> SizeResult:
    rules = engine("ollama")
    fmt = rules.kv_dtype(kv, "--kv-dtype") if kv else None
    plan = SizePlan(engine=rules, serving=Serving(**serving), key=fmt, value=fmt, sequences=sequences)
    return size_of(build_spec(resolve(model, source="catalogue")), num_ctx, plan)


def planned(model: str, num_ctx: int, **options: Any) -> Allocation:
    allocation = sized(model, num_ctx, **options).allocation
    assert allocation is not None
    return allocation


def refused(model: str, num_ctx: int, **options: Any) -> str:
    with pytest.raises(KvctlError) as error:
        planned(model, num_ctx, **options)
    return error.value.message


# -- logs that users published ----------------------------------------------------------------


def test_parallel_requests_have_a_stream_each() -> None:
    """Ollama on a CPU, OLLAMA_NUM_PARALLEL=2, num_ctx 4096: `-c 8192 -np 2 … -b 1024 -ub 1024`."""
    plan = planned("Ministral-3-3B-Instruct-2512", 4096, slots=2)
    assert plan.log == (
        "llama_kv_cache: size =  832.00 MiB (  4096 cells,  26 layers,  2/2 seqs), "
        "K (f16):  416.00 MiB, V (f16):  416.00 MiB",
    )
    assert plan.reasons[0] == "2 parallel requests of 4,096 tokens: llama-server -c 8192 -np 2"
    assert plan.longest_sequence == 4096


@pytest.mark.parametrize(("num_ctx", "mib"), [(32_768, 4096), (8192, 1024)])
def test_one_request_at_a_time(num_ctx: int, mib: int) -> None:
    """hermes3:8b on an RTX 2060 (`-c 32768 -np 1`); the line that 0.34.2 prints for llama3.1:8b at 8192."""
    (line,) = planned("Llama-3.1-8B", num_ctx).log
    half = f"{mib / 2:.2f}"
    assert line == (
        f"llama_kv_cache: size = {mib:.2f} MiB ({num_ctx:6d} cells,  32 layers,  1/1 seqs), "
        f"K (f16): {half:>7} MiB, V (f16): {half:>7} MiB"
    )


def test_num_ctx_is_lowered_to_what_the_model_was_trained_for() -> None:
    """0.31.1 with a Qwen3: "requested context size too large for model" num_ctx=262144, then `-c 40960`."""
    result = sized("Qwen3-8B", 262_144)
    assert result.allocation is not None
    assert " 40960 cells" in result.allocation.log[0]
    assert "Ollama lowers num_ctx to the model's own maximum of 40,960" in result.warnings
    assert not any("is beyond" in line for line in result.warnings)


@pytest.mark.parametrize(
    ("model", "num_ctx", "batch", "mib"),
    [
        # gemma4:e4b of 24 cached layers, measured at 32k and at 8k with a batch of 512: 4 full, 20 windows of 512
        ("gemma-4-E4B", 32_768, 512, 512 + 40),
        ("gemma-4-E4B", 8192, 512, 128 + 40),
        # gemma2:2b and gemma3:4b with a batch of 1,024, Ollama's own choice from 4k to 32k
        ("gemma-2-2b", 8192, None, 416 + 260),
        ("gemma-3-4b-it", 8192, None, 160 + 232),
        ("gemma-3-4b-it", 32_768, None, 640 + 232),
    ],
)
def test_windows_hold_a_batch(model: str, num_ctx: int, batch: int | None, mib: int) -> None:
    """Allocations that a user of Ollama read from its log, by kind of layer."""
    assert planned(model, num_ctx, ubatch=batch).reserved_bytes == mib * MIB


# -- hand calculations --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ctx", "slots", "cells"), [(4096, 1, 1536), (4096, 2, 2048), (32_768, 1, 2048), (32_769, 1, 3072)]
)
def test_batches_grow_with_the_context(num_ctx: int, slots: int, cells: int) -> None:
    """512 tokens up to 4,096 over all requests, 1,024 up to 32,768, then 2,048; gemma-3's windows are 1,024."""
    result = sized("gemma-3-4b-it", num_ctx, slots=slots)
    assert result.allocation is not None
    assert f"({cells:6d} cells,  29 layers" in result.allocation.log[3]
    assert any(line.startswith("windows hold a batch of") for line in result.warnings) == (cells > 1536)


def test_windows_that_llama_cpp_ignores_hold_no_batch() -> None:
    result = sized("Mistral-7B-v0.1", 32_768)
    assert result.allocation is not None
    assert result.allocation.reserved_bytes == 131_072 * 32_768
    assert not any("batch" in line for line in result.warnings)


@pytest.mark.parametrize(("kv", "block"), [("f16", 64), ("q8_0", 34), ("q4_0", 18)])
def test_cache_types(kv: str, block: int) -> None:
    # 32 layers · 8 heads · 128 · 2 are 2,048 blocks of 32 elements a token
    plan = planned("Llama-3.1-8B", 8192, kv=kv)
    assert plan.reserved_bytes == 2048 * block * 8192
    assert f"K ({kv}):" in plan.log[0]


def test_what_it_expects_before_loading() -> None:
    # gemma-4-26B-A4B: 2 · 30 layers · 2 heads · (2,816 / 16) · 131,072 · 2 B = 5.16 GiB
    assert 2 * 30 * 2 * 176 * 131_072 * 2 == 5_536_481_280
    (line,) = (line for line in planned("gemma-4-26B-A4B", 131_072).reasons if line.startswith("before loading"))
    assert line.startswith("before loading, Ollama expects 5.16 GiB for the cache")
    # Latents and recurrent layers: what its file says of heads is not in a configuration.
    for model in ("DeepSeek-V2-Lite", "Qwen3.5-27B"):
        assert not any(line.startswith("before loading") for line in planned(model, 4096).reasons)


def test_some_architectures_answer_one_request_at_a_time() -> None:
    result = sized("Qwen3.5-27B", 8192, slots=4)
    assert result.allocation is not None
    assert " 1/1 seqs" in result.allocation.log[0]
    assert "Ollama serves qwen3_5 one request at a time, whatever OLLAMA_NUM_PARALLEL says" in result.warnings


def test_latents_depend_on_the_file() -> None:
    result = sized("DeepSeek-V2-Lite", 32_768)
    assert result.allocation is not None
    assert result.allocation.reserved_bytes == 972 * MIB  # 27 · 576 · 2 B · 32,768
    assert any("attention.key_length_mla" in line for line in result.warnings)


def test_the_longest_context_of_each_request() -> None:
    # 4 GiB of 131,072 B a token are 32,768 tokens, 16,384 for each of two requests
    plan = planned("Llama-3.1-8B", 4096, slots=2, kv_budget=4 * GIB)
    assert (plan.capacity_tokens, plan.num_blocks) == (16_384, 128)
    # gemma-3-4b: 5 full layers of 4,096 B a token, 29 windows of 1,024 and a batch. 872 MiB are 32,768
    # tokens with a batch of 1,024 (above), and a longer context would come with one of 2,048.
    assert planned("gemma-3-4b-it", 4096, kv_budget=872 * MIB).capacity_tokens == 32_768
    assert planned("gemma-3-4b-it", 4096, kv_budget=900 * MIB).capacity_tokens == 32_768
    # With 29 · 4,096 B · 3,072 = 348 MiB of windows, 1,000 MiB leave 652 MiB for 20,480 B a token: 33,280.
    assert planned("gemma-3-4b-it", 4096, kv_budget=1000 * MIB).capacity_tokens == 33_280
    assert planned("gemma-3-4b-it", 4096, kv_budget=MIB).capacity_tokens == 0
    assert planned("gemma-3-4b-it", 4096, kv_budget=900 * MIB, ubatch=512).capacity_tokens == 37_120  # 726 MiB


# -- what it refuses -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q5_0", "bf16", "f32", "fp8", ""])
def test_takes_its_own_types_alone(name: str) -> None:
    with pytest.raises(UsageError) as error:
        engine("ollama").kv_dtype(name, "--kv-dtype")
    assert error.value.hint == "one of f16, q8_0, q4_0"


def test_refusals() -> None:
    for version in ("0.5", "0.3", "0.340", "x", ""):
        with pytest.raises(UsageError):
            engine(f"ollama@{version}")
    assert engine("ollama@v0.34.2").version == "0.34.2"
    with pytest.raises(UsageError):
        engine("ollama").kv_dtype("q8_0", "--k-dtype")
    assert "OLLAMA_NUM_PARALLEL" in refused("Llama-3.1-8B", 4096, sequences=2)
    assert "at least one token" in refused("Llama-3.1-8B", 0)
    assert "num_batch 4,096" in refused("Llama-3.1-8B", 8192, ubatch=4096)
    assert "flash attention" in refused("Llama-3.1-8B", 8192, kv="q8_0", flash_attention=False)
    with pytest.raises(ConfigError):
        planned("whisper-large-v3", 448)
