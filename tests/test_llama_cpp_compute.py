"""llama.cpp's compute buffers against those that the library allocates, and against published logs of CUDA."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import DATA
from libllama import spec_of

from kvctl.allocation import Serving
from kvctl.engines.llama_cpp import memory
from kvctl.engines.llama_cpp.builds import rules
from kvctl.engines.llama_cpp.compute import Batch, Shape, Style, compute_buffer
from kvctl.engines.llama_cpp.graph import Graph, Tensor
from kvctl.engines.llama_cpp.plan import layout
from kvctl.engines.llama_cpp.styles import shape_of
from kvctl.errors import ConfigError, UsageError
from kvctl.model import build_spec
from kvctl.sources import catalogue

MIB = 2**20


def measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "llama_cpp_compute.json").read_text())
    return found


def test_buffers_that_the_library_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """87 models of 29 architectures, three contexts each: windows, experts, slots, with and without flash attention."""
    found = measured()
    equal = 0
    for row in found["models"]:
        spec = spec_of(row["architecture"], {"context_length": 131_072} | row["metadata"])
        for n_ctx, ubatch, flash, slots, outputs, mib in row["buffers"]:
            serving = Serving(slots=slots, unified=False, flash_attention=bool(flash), ubatch=ubatch, device="cpu")
            if outputs is None:
                # The library's own default is logits for every token of a batch, which the server no longer wants.
                monkeypatch.setattr(memory, "outputs", lambda version, tokens, slots: tokens)
            else:
                monkeypatch.undo()
            *_, part = memory.overheads(
                spec, serving, dtype_bytes=2, device_bytes=0, gpu_name=None, version=None, context=n_ctx
            )
            if row["architecture"] in found["exact"]:
                assert round(part.bytes / MIB, 2) == pytest.approx(mib, abs=0.011), (row["architecture"], n_ctx, flash)
                equal += 1
            else:
                assert part.bytes / MIB == pytest.approx(mib, rel=0.16), (row["architecture"], n_ctx, flash)
    assert equal > 180


LLAMA_3_8B = Shape(layers=32, hidden=4096, heads=32, kv_heads=8, key=128, value=128, vocabulary=128_256, feed=14_336)
MISTRAL_7B = LLAMA_3_8B.replace(vocabulary=32_000)
QWEN3_4B = Shape(
    layers=36,
    hidden=2560,
    heads=32,
    kv_heads=8,
    key=128,
    value=128,
    vocabulary=151_936,
    feed=9728,
    style=Style(head_norm=True),
)
ORPHEUS = Shape(layers=28, hidden=3072, heads=24, kv_heads=8, key=128, value=128, vocabulary=156_940, feed=8192)
OPEN_LLAMA_7B = Shape(layers=32, hidden=4096, heads=32, kv_heads=32, key=128, value=128, vocabulary=32_000, feed=11_008)


CUDA = [
    # where, shape, cells, tokens, tokens with logits, flash attention, age, MiB of "CUDA0 compute buffer size", error
    ("ggml's continuous integration, 2024: a 7B of 32,000 words", OPEN_LLAMA_7B, 512, 512, 512, False, 0, 70.50, 0.0),
    ("Llama 3 8B, a log of 2024", LLAMA_3_8B, 512, 512, 512, False, 0, 258.50, 0.0),
    ("Llama 3.1 8B in Ollama, August 2024 and June 2025", LLAMA_3_8B, 8192, 512, 512, False, 0, 560.00, 0.0),
    ("Mistral 7B: fedora-copr/logdetective#106, January 2025", MISTRAL_7B, 2048, 512, 512, False, 0, 164.00, 0.0),
    ("the same with 32,768 tokens", MISTRAL_7B, 32_768, 512, 512, False, 0, 2144.00, 0.0),
    ("Orpheus 3B, 2026", ORPHEUS, 8192, 512, 512, True, 2, 318.52, 0.0),
    ("Qwen3-4B, llama-server of October 2026 with four slots", QWEN3_4B, 8192, 512, 4, True, 3, 85.01, 0.025),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "cells", "tokens", "outputs", "flash", "age", "mib", "error"), [row[1:] for row in CUDA],
                         ids=[row[0] for row in CUDA])  # fmt: skip
def test_published_buffers_on_cuda(
    shape: Shape, cells: int, tokens: int, outputs: int, flash: bool, age: int, mib: float, error: float
) -> None:
    """Newer kernels, which fuse, keep single tensors longer: up to 2.5% more."""
    batch = Batch(tokens=tokens, outputs=outputs, cells=cells, window_cells=cells, flash=flash, gpu=True, age=age)
    assert compute_buffer(shape, batch) / MIB == pytest.approx(mib, rel=error, abs=0.011)


OLDER = {
    # the libraries of 12 builds (node-llama-cpp 3.6 to 3.20), MiB of three models with three contexts
    ("b4753", "b5590", "b5640"): ((30.01, 80.01, 11.50), (18.01, 80.01, 6.00), (64.50, 80.01, 32.25)),
    ("b6122", "b6431", "b6673", "b7347", "b7698"): ((38.01, 81.01, 15.51), (18.01, 84.01, 6.01), (65.50, 81.01, 34.26)),
    ("b8095", "b8390"): ((40.01, 83.01, 16.51), (20.01, 86.01, 7.01), (67.50, 83.01, 35.26)),
    ("b9842", "b10361"): ((36.01, 83.01, 16.51), (16.01, 86.01, 6.51), (70.50, 83.01, 33.75)),
}  # fmt: skip


@pytest.mark.parametrize("builds", OLDER)
def test_older_builds(builds: tuple[str, ...]) -> None:
    models = ((2, 4096, 1000), (8, 256, 1000), (2, 512, 32_000))
    for build in builds:
        for (kv_heads, feed, words), row in zip(models, OLDER[builds], strict=True):
            spec = spec_of("llama", {
                "context_length": 131_072, "embedding_length": 1024, "block_count": 3, "feed_forward_length": feed,
                "attention.head_count": 8, "attention.head_count_kv": kv_heads, "attention.key_length": 128,
                "attention.value_length": 128, "rope.dimension_count": 128, "vocab_size": words})  # fmt: skip
            for (cells, flash, ubatch), mib in zip(
                ((4096, True, 512), (4096, False, 512), (1024, True, 256)), row, strict=True
            ):
                serving = Serving(slots=1, flash_attention=flash, ubatch=ubatch, device="cpu")
                shape = shape_of(spec, layout(rules(build)[0], spec, cells, serving), serving)
                age = {"b4": 0, "b5": 0, "b6": 1, "b7": 1, "b8": 2, "b9": 3, "b1": 3}[build[:2]]
                batch = Batch(
                    tokens=ubatch, outputs=ubatch, cells=cells, window_cells=cells, flash=flash, gpu=False, age=age
                )
                assert compute_buffer(shape, batch) / MIB == pytest.approx(mib, abs=0.011), (build, feed, cells, flash)


def test_the_allocator_takes_the_smallest_block_that_fits() -> None:
    # a [0, 64) and b [64, 96) live; c over a's place once d is made; 32-byte alignment
    graph = Graph()
    a = Tensor(64, (Tensor(0),))
    b = Tensor(20, (a,))
    c = Tensor(64, (b,))
    graph.expand(c)
    # a 64, b padded to 32 while a lives; then a goes, and c takes its place
    assert graph.peak(32) == 96


def test_only_the_last_device_makes_logits() -> None:
    spec = build_spec(catalogue.find("Qwen/Qwen3-8B"))
    sizes = [
        next(part.bytes for part in memory.overheads(
            spec, Serving(), dtype_bytes=2, device_bytes=24 * 2**30, gpu_name=None, version="b8390", context=8192, layers=18,
            head=head, devices=2) if part.name == "compute buffer")
        for head in (False, True)
    ]  # fmt: skip
    assert sizes[1] - sizes[0] > 151_936 * 512 * 4 // 2
    # Four copies of the mask: 8,192 cells × 512 tokens × 2 bytes, and of the input: 4,096 × 512 × 4
    assert sizes[0] > 4 * (8192 * 512 * 2 + 4096 * 512 * 4)


def test_builds_before_fit_have_no_margin() -> None:
    assert memory.fit_margin("b7347") == 0
    assert memory.fit_margin(None) == 1024 * MIB
    assert memory.outputs("b8390", 512, 4) == 512
    assert memory.outputs(None, 512, 4) == 4
    with pytest.raises(UsageError, match="no build"):
        memory.fit_margin("latest")


def test_a_model_without_widths_is_refused() -> None:
    spec = build_spec(catalogue.find("Qwen/Qwen3-8B")).replace(config={})
    with pytest.raises(ConfigError, match="width"):
        memory.overheads(spec, Serving(), dtype_bytes=2, device_bytes=1, gpu_name=None, version=None, context=8192)


@pytest.mark.parametrize(
    ("model", "context", "slots", "mib"),
    [
        # Logs of 2026 of models whose graphs are laid out as if they were Llama's: mostly logits and masks
        ("Qwen/Qwen3.5-9B", 32_768, 2, 501.00),
        ("Qwen/Qwen3.5-9B", 262_144, 2, 808.02),
        ("Qwen/Qwen3.6-27B", 200_192, 1, 654.78),
    ],
)
def test_hybrids_are_estimated_within_four_per_cent(model: str, context: int, slots: int, mib: float) -> None:
    spec = build_spec(catalogue.find(model))
    parts = memory.overheads(
        spec,
        Serving(slots=slots, unified=True),
        dtype_bytes=2,
        device_bytes=0,
        gpu_name=None,
        version="b8390",
        context=context,
    )
    buffer = next(part for part in parts if part.name == "compute buffer")
    assert buffer.estimated
    assert "as if the architecture were Llama's" in buffer.rule
    assert buffer.bytes / MIB == pytest.approx(mib, rel=0.04)


def test_what_the_server_itself_takes_of_a_host() -> None:
    """Peaks of llama-server b11434 with SmolLM2-135M in Q4_1 (92.1 MiB), over load tests: MiB resident, of slots and their cache."""
    keys = {"context_length": 8192, "embedding_length": 576, "block_count": 30, "attention.head_count": 9, "attention.head_count_kv": 3,
            "rope.dimension_count": 64, "vocab_size": 49152, "feed_forward_length": 1536}  # fmt: skip
    spec = spec_of("llama", keys)
    for slots, cells, cache, peak in ((1, 768, 16.88, 160.0), (4, 1024, 22.5, 167.7), (8, 2048, 23.91, 174.2)):
        serving = Serving(slots=slots, unified=False, flash_attention=True, device="cpu")
        parts = memory.overheads(
            spec, serving, dtype_bytes=2, device_bytes=0, gpu_name=None, version=None, context=cells
        )
        assert [part.name for part in parts] == ["process", "compute buffer"]
        assert parts[0].estimated
        beside = peak - 92.1 - cache
        assert beside <= sum(part.bytes for part in parts) / MIB <= beside + 10
