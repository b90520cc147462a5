"""What engines take beside weights and cache, against their own code and against logs that others published.

vLLM's part is in tests of its own, llama.cpp's compute buffers in test_llama_cpp_compute.py, transformers' activations
in test_overheads_transformers.py.
"""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from functools import cache

import pytest
from conftest import DATA

from kvctl.allocation import Part, Serving
from kvctl.engines import ollama_memory as ollama
from kvctl.engines.llama_cpp import memory as llama_cpp
from kvctl.engines.llama_cpp.memory import Split, layer_split
from kvctl.engines.runtime import runtime
from kvctl.engines.sglang import memory as sglang
from kvctl.engines.sglang.fraction import default_start, for_images
from kvctl.engines.tensorrt_llm import memory as tensorrt
from kvctl.engines.transformers import memory as transformers
from kvctl.engines.vllm import memory as vllm
from kvctl.engines.vllm.shape import shape_of
from kvctl.engines.widths import widths
from kvctl.errors import KvctlError, UsageError
from kvctl.model import build_spec
from kvctl.sources import catalogue
from kvctl.spec import ModelSpec

GIB = 2**30


@cache
def known(name: str) -> ModelSpec:
    return build_spec(catalogue.find(name))


# -- SGLang ---------------------------------------------------------------------------------


def test_default_fractions_of_every_release() -> None:
    """38,088 defaults, made by the releases' own functions: 0.4.4 to 0.5.22, GPUs of 15 to 179 GiB, ranks, drafts."""
    found = json.loads(gzip.decompress((DATA / "sglang_fractions.json.gz").read_bytes()))
    checked = 0
    for group in found["groups"]:
        for version in group["versions"]:
            release = tuple(int(part) for part in version.split("."))
            for memory, tp, pp, latent, workers, chunk, requests, graphs, drafting, fraction, chunked in group["rows"]:
                got = default_start(memory, tp=tp, pp=pp, latent=bool(latent), workers=workers, chunk=chunk, requests=requests,
                                    prefill_graphs=bool(graphs), drafting=drafting, version=release)  # fmt: skip
                assert got.fraction == pytest.approx(fraction, abs=1e-12), (version, memory, tp, drafting)
                assert got.chunk == chunked
                checked += 1
    assert checked == 38_088


LOGS = [
    # where, free before the weights, free after, fraction or (MiB, ranks, version), GB of the cache as printed
    ("Qwen2 on an RTX 4090, February 2025: 2.82 + 2.82 GB", 22.76, 8.37, (24_564, 1, (0, 4, 4)), 5.64),
    ("Qwen3-0.6B on a GPU of 4 GB, 0.4.6, May 2025: 0.82 + 0.82 GB", 3.23, 2.03, (4096, 1, (0, 4, 6)), 1.64),
    ("LFM2-700M on a GPU of 16 GB, December 2025: 4.88 of states, 2.71 + 2.71", 15.33, 13.81, (16_380, 1, (0, 5, 7)), 10.30),
    ("Granite 4 hybrid on a GPU of 16 GB, February 2026: 2.77 of states, 1.52 + 1.52", 15.24, 9.26, (16_380, 1, (0, 5, 8)), 5.81),
    ("Qwen3-30B-A3B on an MI355X (sgl-project/sglang#18263), --mem-fraction-static 0.911", 287.18, 230.20, 0.911, 204.63),
    ("DeepSeek-V4 on GPUs of 96 GB, a catalogue of log lines, --mem-fraction-static 0.60", 93.58, 57.01, 0.60, 19.58),
    ("Qwen3.5-4B on an RTX 4090, a tutorial: 14.47 − 3.40 GB at the end of the pool, 0.85", 23.09, 14.47, 0.85, 11.07),
    ("Kimi-K2.5 on eight GPUs of 288 GB, February 2026, default for images", 283.54, 209.96, "kimi", 160.63),
]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "share", "printed"), [row[1:] for row in LOGS], ids=[row[0] for row in LOGS]
)
def test_the_budget_of_published_logs(before: float, after: float, share: object, printed: float) -> None:
    """Within 0.12 GB: the logs print two decimals, and a pool ends with a whole token or state."""
    if share == "kimi":
        # 294,896 MiB of HBM; a vision tower of 27 layers of 1,152: 0.95 × (1 − 0.1 × 0.4238)
        share = default_start(294_896, tp=8, latent=True, prefill_graphs=False, version=(0, 5, 9)).fraction
        share *= for_images({"num_hidden_layers": 27, "hidden_size": 1152}, (0, 5, 9))
    elif isinstance(share, tuple):
        share = default_start(share[0], tp=share[1], version=share[2]).fraction
    assert isinstance(share, float)
    parts = (Part("runtime", GIB, True, ""),)
    budget = sglang.kv_budget(
        device_bytes=0, free_bytes=round(before * GIB) + GIB, weights_bytes=round((before - after) * GIB), parts=parts,
        serving=Serving(utilization=share), version=None, spec=known("Qwen/Qwen3-8B"),
    )  # fmt: skip
    assert budget / GIB == pytest.approx(printed, abs=0.12)


def test_published_defaults() -> None:
    # sgl-project/sglang#13023 of November 2025 prints mem_fraction_static=0.851 on an L40S of 46,068 MiB
    assert default_start(46_068, version=(0, 5, 5)).fraction == 0.851
    # SGLang's documentation of 2025 printed 0.88 for its CI's GPUs of 80 GB, by ranks alone
    assert default_start(81_559, version=(0, 4, 5)).fraction == 0.88


def test_weights_that_leave_no_static_memory() -> None:
    # SemiAnalysisAI/InferenceX#2128: 125.65 GB of weights leave 12.25 GB; 0.88 does not start, 0.9113 is the least
    spec = known("Qwen/Qwen3-8B")
    before, weights = round(137.90 * GIB), round(125.65 * GIB)
    found = sglang.shortage(spec, Serving(utilization=0.88), before=before, weights_bytes=weights, device_bytes=140 * GIB,
                            version=None)  # fmt: skip
    assert found is not None
    assert (found.when, found.hint) == ("start", "raise --mem-fraction-static above 0.912")
    assert "0.9112" in found.message


def test_the_two_shortages_of_memory_are_told_apart() -> None:
    # sgl-project/sglang#322: the error says raise the fraction, the documentation says lower it
    spec = known("Qwen/Qwen3-8B")
    high = sglang.shortage(spec, Serving(utilization=0.97), before=79 * GIB, weights_bytes=16 * GIB, device_bytes=80 * GIB,
                           version=None)  # fmt: skip
    assert high is not None
    assert high.when == "run"
    assert "lower" in high.hint
    assert (
        sglang.shortage(spec, Serving(), before=79 * GIB, weights_bytes=16 * GIB, device_bytes=80 * GIB, version=None)
        is None
    )
    never = sglang.shortage(
        spec, Serving(), before=10 * GIB, weights_bytes=16 * GIB, device_bytes=80 * GIB, version=None
    )
    assert never is not None
    assert "no --mem-fraction-static helps" in never.hint


def test_parts_of_sglang_sum_to_what_is_no_budget() -> None:
    spec, serving = known("Qwen/Qwen3-8B"), Serving()
    parts = sglang.overheads(
        spec, serving, dtype_bytes=2, device_bytes=80 * GIB, gpu_name=None, version=None, context=8192
    )
    budget = sglang.kv_budget(device_bytes=80 * GIB, free_bytes=80 * GIB, weights_bytes=16 * GIB, parts=parts, serving=serving,
                              version=None, spec=spec)  # fmt: skip
    assert budget + 16 * GIB + sum(part.bytes for part in parts) == 80 * GIB


@pytest.mark.parametrize("free", [79, 40, 20, 17])
def test_sglang_divides_what_is_free_when_it_starts(free: int) -> None:
    """rest = free after loading − free before it × (1 − mem_fraction_static): what others hold is no part of either."""
    spec, serving = known("Qwen/Qwen3-8B"), Serving()
    parts = sglang.overheads(spec, serving, dtype_bytes=2, device_bytes=80 * GIB, gpu_name=None, version=None, context=8192,
                             free_bytes=free * GIB)  # fmt: skip
    budget = sglang.kv_budget(device_bytes=80 * GIB, free_bytes=free * GIB, weights_bytes=15 * GIB, parts=parts,
                              serving=serving, version=None, spec=spec)  # fmt: skip
    assert budget + 15 * GIB + sum(part.bytes for part in parts) == free * GIB


def test_fractions_that_sglang_refuses() -> None:
    for bad in (0.0, 1.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="mem-fraction-static"):
            sglang.overheads(known("Qwen/Qwen3-8B"), Serving(utilization=bad), dtype_bytes=2, device_bytes=80 * GIB,
                             gpu_name=None, version=None, context=1)  # fmt: skip


@pytest.mark.parametrize(
    ("total", "before", "ranks"),
    [
        # about what CUDA sees of a GPU, and "Load weight begin. avail mem" in logs, in GiB
        (23.5, 22.76, 1),  # RTX 4090, February 2025
        (15.7, 15.33, 1),  # a GPU of 16 GB, December 2025
        (139.8, 137.29, 8),  # H200: sgl-project/sglang#11716
        (178.35, 175.34, 8),  # B200, August 2025
        (139.8, 137.90, 8),  # H200: SemiAnalysisAI/InferenceX#2128
        (95.0, 93.99, 8),  # eight GPUs of 96 GB without NVLink
    ],
)
def test_what_a_process_takes_before_it_loads_anything(total: float, before: float, ranks: int) -> None:
    """An estimate, within 1.5 GiB of every log."""
    assert runtime(ranks).estimated
    assert runtime(ranks).bytes / GIB == pytest.approx(total - before, abs=1.5)


# -- TensorRT-LLM ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total", "peak", "temporary", "share", "printed"),
    [
        # a log of December 2025: gpt-oss-120b on a GB10
        (119.70, 113.65, 0.56, 0.9, 5.95),
        # a parser's example, January 2026: DeepSeek-R1 on eight H200
        (139.81, 91.46, 0.015, 0.85, 41.11),
    ],
)
def test_the_budget_of_tensorrt_logs(total: float, peak: float, temporary: float, share: float, printed: float) -> None:
    parts = (Part("all but the cache", round((peak - temporary) * GIB), True, ""),)
    budget = tensorrt.kv_budget(device_bytes=round(total * GIB), free_bytes=round(total * GIB), weights_bytes=0, parts=parts,
                                serving=Serving(utilization=share), version=None, spec=known("Qwen/Qwen3-8B"))  # fmt: skip
    assert budget / GIB == pytest.approx(printed, abs=0.015)


def test_tensorrt_activations() -> None:
    # the same log of December 2025: 0.85 GiB in torch for gpt-oss-120b; the estimate is 19% above
    parts = tensorrt.overheads(known("openai/gpt-oss-120b"), Serving(), dtype_bytes=2, device_bytes=120 * GIB, gpu_name=None,
                               version=None, context=131_072)  # fmt: skip
    activations = next(part for part in parts if part.name == "activations")
    assert activations.estimated
    assert activations.bytes / GIB == pytest.approx(0.85, rel=0.25)


# -- llama.cpp: layers by device ------------------------------------------------------------


def test_layers_are_divided_by_free_memory() -> None:
    # Two equal GPUs and 32 layers: places 0 to 32 (the head is the last) by upper_bound(0.5, place / 33): 17 and 15 + head
    assert layer_split(32, [24 * GIB, 24 * GIB]) == Split((17, 15), 0, 1)
    # 3 : 1 by --tensor-split: 0.75 × 33 = 24.75, so places 0 to 24 on the first
    assert layer_split(32, [1, 1], (3, 1)) == Split((25, 7), 0, 1)
    # -ngl 10 of 33 places: the last 9 layers and the head; 5 places each
    assert layer_split(32, [1, 1], None, 10) == Split((5, 4), 23, 1)
    assert layer_split(32, [24 * GIB], None, 0) == Split((0,), 32, -1)
    assert layer_split(80, [80 * GIB]) == Split((80,), 0, 0)
    # 7 of 17 GiB: 0.4118 × 37 = 15.2, so places 0 to 15 on the first
    assert layer_split(36, [7 * GIB, 10 * GIB]) == Split((16, 20), 0, 1)


def test_shares_that_cannot_be() -> None:
    for free, shares in (([], None), ([0, 0], None), ([1, 1], (-1.0, 2.0)), ([1], (float("nan"),))):
        with pytest.raises(UsageError):
            layer_split(32, free, shares)


# -- Ollama ---------------------------------------------------------------------------------


def test_the_context_that_ollama_takes() -> None:
    # server/routes.go: 256k from 47 GiB of all GPUs on, 32k from 23 GiB on, else 4k
    assert [ollama.default_context([gib * GIB], None) for gib in (8, 22, 23, 24, 46, 47, 80)] == [
        4096, 4096, 32_768, 32_768, 32_768, 262_144, 262_144]  # fmt: skip
    assert ollama.default_context([24 * GIB, 24 * GIB], 131_072) == 131_072


def test_what_ollama_expects() -> None:
    # Llama 3.1 8B, num_ctx 8,192: 2 × 32 layers × 8 heads × 128 × 8,192 tokens × 2 bytes = 1 GiB, and 768 MiB for batches of 1,024
    spec = known("meta-llama/Llama-3.1-8B-Instruct")
    assert ollama.expected(spec, Serving(), file_bytes=5 * GIB, context=8192) == 5 * GIB + GIB + 768 * 2**20
    # 2 GiB for those of 2,048, which a context above 32,768 brings
    assert ollama.expected(spec, Serving(), file_bytes=0, context=65_536) == 8 * GIB + 2 * GIB
    parts = ollama.overheads(
        spec, Serving(), dtype_bytes=2, device_bytes=24 * GIB, gpu_name=None, version=None, context=8192
    )
    assert [part.name for part in parts] == ["runtime", "compute buffer", "margin"]


@pytest.mark.parametrize("number", [True, -3, 1.5, "many", None, 2**70, [1, "x"], {}])
def test_widths_of_hostile_configurations(number: object) -> None:
    """One plain line, or the width that stands elsewhere; never a traceback."""
    spec = known("Qwen/Qwen3-8B")
    for name in ("intermediate_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        hostile = spec.replace(config={**spec.config, name: number})
        with suppress(KvctlError):
            parts = tensorrt.overheads(
                hostile, Serving(), dtype_bytes=2, device_bytes=GIB, gpu_name=None, version=None, context=8
            )
            assert all(0 <= part.bytes < 2**62 for part in parts)
    vision = {"num_hidden_layers": number, "hidden_size": number}
    assert 0.7 < for_images(vision) < 1


@pytest.mark.parametrize(
    ("model", "hidden", "vocabulary", "queries", "feed"),
    [
        # As the models' papers and cards have them: 71 heads of 64, four times the width.
        ("falcon-7b", 4544, 65_024, 71 * 64, 18_176),
        ("falcon-40b", 8192, 65_024, 128 * 64, 32_768),
        ("microsoft/phi-2", 2560, 51_200, 32 * 80, 10_240),
        ("openai/whisper-large-v3", 1280, 51_866, 20 * 64, 5120),
        ("THUDM/chatglm3-6b", 4096, 65_024, 32 * 128, 13_696),
        # A file that leaves its language model to Llama's defaults, which are those of the 7B.
        ("llava-hf/llava-1.5-7b-hf", 4096, 32_064, 32 * 128, 11_008),
    ],
)
def test_widths_under_older_names(model: str, hidden: int, vocabulary: int, queries: int, feed: int) -> None:
    spec = known(model)
    found = widths(spec)
    assert (found.hidden, found.vocabulary, found.queries, found.feed) == (hidden, vocabulary, queries, feed)
    shape = shape_of(spec)
    assert (shape.hidden, shape.vocabulary, shape.width) == (hidden, vocabulary, feed)


def test_every_catalogue_model_has_an_estimate_or_says_what_to_give_instead() -> None:
    """What cannot be estimated can be measured, and the hint names the option."""
    for name in catalogue.names():
        spec = known(name)
        for memory in (tensorrt, transformers, vllm):
            fault = None
            try:
                parts = memory.overheads(spec, Serving(), dtype_bytes=2, device_bytes=80 * GIB, gpu_name=None,
                                         version=None, context=4096)  # fmt: skip
            except KvctlError as error:
                fault, parts = error, ()
            assert all(0 <= part.bytes < 2**40 for part in parts), name
            assert fault is None or "--measured-overhead" in (fault.hint or ""), (name, fault)


@pytest.mark.parametrize("free", [(0,), (0, 0), (0, 5 * GIB)])
def test_devices_without_free_memory_have_their_layers(free: tuple[int, ...]) -> None:
    """Where all is full, that the weights do not fit is the answer, not an error."""
    spec = known("Qwen/Qwen3-8B")
    laid = llama_cpp.places(spec, 16 * GIB, free, Serving())
    assert sum(place.layers for place in laid) == 36
    # All but the embeddings, which stay in host memory: 151,936 × 4,096 in bf16.
    assert abs(sum(place.weights for place in laid) - (16 * GIB - 151_936 * 4096 * 2)) < GIB
    assert sum(place.share for place in laid) == 1
