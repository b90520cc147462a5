"""What a vLLM rank spends on a GPU beside weights and cache: estimates, calibrated on published start-up logs.

The engine runs one batch of the largest size with no cache, and one step of its sampler, and takes the peak of torch's
memory; it adds what grew outside of torch, and in newer versions an estimate of CUDA graphs (v1/worker/gpu_worker.py,
determine_available_memory). What is live at that peak follows from the sources:

- sampler (`_dummy_sampler_run`, v1/sample): logits of every request in the model's dtype, a float32 copy, and what
  top-k and top-p make of it: sorted values, their indices and the sort's own buffers (36 bytes), or, from 0.17 on, two
  more float32 copies (12 bytes in all) and a row of the vocabulary for every multiprocessor. From 0.9 to 0.11 FlashInfer
  did without sorting where it was installed. The second model runner samples from the logits as they are, until 0.33;
- one layer (`_dummy_run`): gate and up projection, their product, and a few tensors as wide as the hidden state;
- mixtures of experts: rows of all chosen experts, which the workspace keeps from 0.13 on;
- latent attention: keys and values of a long past, expanded for all heads;
- encoders of images: their layers for as many patches as a batch holds, and their outputs.

`HELD`, `KEPT` and `FIXED` come out alike from either half of 85 published starts, split by model; `GRAPH` and `RUNTIME` rest
on all of them (tests/test_vllm_memory.py). Off by, in GiB, median and 90th percentile: activations 0.01 and 0.10 (67
starts of 0.8 to 0.19), runtime 0.01 and 0.17, the estimate of graphs 0.10 and 0.38. All of it together: 0.01 and 0.14 for
0.12 to 0.19 (67), 0.37 and 1.9 for 0.20 and later (12, of which a third have an encoder of images). Not in these rules:
experts in 4-bit floating point by CUTLASS with large batches (5 GiB too little for MiniMax M3 with 32,768 tokens), LoRA.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.allocation import Allocation, Part, Serving
from kvctl.engines.usual import default_context, shortage
from kvctl.engines.vllm.rules import minor_of, rules_for
from kvctl.engines.vllm.shape import Shape, shape_of
from kvctl.engines.vllm.start import Start, defaults, requested, start_refusal, utilization
from kvctl.hardware.table import facts_of
from kvctl.spec import LatentAttention, ModelSpec
from kvctl.units import MIB, format_bytes

__all__ = [
    "default_context",
    "kv_budget",
    "left",
    "overheads",
    "plan_refusal",
    "requested",
    "shortage",
    "start_refusal",
    "started",
]

HELD = 3.7
"""Tensors as wide as the hidden state that live while a layer runs."""
KEPT = 1.25
"""Those that live while the sampler runs."""
FIXED = 40 * MIB
PROCESSORS = 132
"""Multiprocessors of a GPU: each has a row of the vocabulary in the sampler's buffer."""
_SORTED, _COPIES = 36, 12
"""Bytes that sampling takes for each logit beside the model's dtype."""
HELD_BY_ENCODER = 4
"""Tensors as wide as the encoder's hidden state that live while one of its layers runs."""
MEDIA_TOKENS = 16_384
"""Positions of the largest image that models with images of any size take by their own preprocessing."""
MEDIA = 100 * MIB
"""What else images add: inputs, masks, and the embeddings that they are put into."""


def overheads(
    spec: ModelSpec,
    serving: Serving,
    *,
    dtype_bytes: int,
    device_bytes: int,
    gpu_name: str | None,
    version: str | None,
    context: int,
    free_bytes: int | None = None,
    last_stage: bool = True,
) -> tuple[Part, ...]:
    """Activations, CUDA graphs and the rest of one rank; `last_stage`: of a pipeline, the one that samples.

    Raises:
        ConfigError: the model's sizes are not known.

    """
    start = defaults(version, device_bytes, gpu_name, serving=serving, context=context, spec=spec)
    shape, minor = shape_of(spec), minor_of(version)
    return (
        _activations(shape, start, serving, dtype_bytes, minor, context, last_stage=last_stage),
        _graphs(shape, start, serving, version),
        _runtime(serving, start, minor),
    )


def _activations(
    shape: Shape, start: Start, serving: Serving, size: int, minor: tuple[int, int], context: int, *, last_stage: bool
) -> Part:
    ranks, tokens, requests = serving.tensor_parallel or 1, start.batched, min(start.sequences, start.batched)
    workspace = _workspace(shape, min(tokens, _chunk(minor)), ranks, size, expert=serving.expert_parallel)
    positions = _positions(shape, tokens)
    media = positions * shape.hidden * size + MEDIA if positions else 0
    # Stages of a pipeline keep the two tensors that they hand on.
    handed = 2 * tokens * shape.hidden * size if (serving.pipeline_parallel or 1) > 1 else 0
    phases = [
        (
            _layer(shape, tokens, ranks, size) + workspace + media + handed,
            f"one layer of {tokens:,} tokens, {shape.hidden:,} wide",
        )
    ]
    if shape.attention:
        rows = shape.attention // ranks + HELD * shape.hidden
        kept = workspace if minor >= (0, 13) else 0
        phases.append((int(tokens * rows * size) + kept + media + handed, f"attention of {tokens:,} tokens"))
    if last_stage:
        logits, words = _sampling(shape, requests, size, start, minor)
        kept = int(KEPT * tokens * shape.hidden * size) + (workspace if minor >= (0, 13) else 0)
        phases.append((logits + kept + media, words))
    if shape.latent_heads:
        past = min(max(8 * context, 4 * start.sequences * 64), (128 if minor <= (0, 10) else 64) * 1024)
        expanded = past * shape.latent_heads // ranks * shape.latent_width * size
        phases.append((expanded + int(HELD * tokens * shape.hidden * size),
                       f"keys and values of {past:,} tokens for {shape.latent_heads // ranks} heads"))  # fmt: skip
    if shape.vision is not None and shape.vision.hidden:
        row = HELD_BY_ENCODER * shape.vision.hidden + shape.vision.width // ranks
        phases.append((positions * shape.vision.patches * row * size + media,
                       f"images of {positions:,} positions in the encoder"))  # fmt: skip
    peak, what = max(phases)
    # What nine tenths of the published starts are off by, rounded up (tests/test_vllm_memory.py).
    within = "1 GiB: an encoder of images" if shape.vision else "0.2 GiB" if minor < (0, 20) else "0.5 GiB"
    if shape.recurrent and requests > 256:
        # Refused starts of three Qwen3.5-like models with 1,024 requests (vllm-project/recipes#831) had that much less.
        within = "8 GiB: recurrent layers with many requests take more"
    return Part("activations", peak + FIXED, True, f"the profile run's peak, {what}; within about {within}")


def _positions(shape: Shape, tokens: int) -> int:
    """Positions of images that a profile run encodes: a batch of them, or the largest image alone."""
    if shape.vision is None:
        return 0
    return max(tokens, MEDIA_TOKENS) if shape.vision.any_size else tokens


def _sampling(shape: Shape, requests: int, size: int, start: Start, minor: tuple[int, int]) -> tuple[int, str]:
    """Bytes of logits and of what the sampler makes of them."""
    vocabulary = -(-shape.vocabulary // 64) * 64
    each, row = size + _COPIES, PROCESSORS * vocabulary * 4
    if minor <= (0, 16):
        each, row = size + _SORTED, 0
    elif second_runner(shape, minor) and minor < (0, 33):
        each, row = size, 0
    return (
        requests * vocabulary * each + row,
        f"logits of {requests:,} requests, {vocabulary:,} of {each} bytes each"
        + (f" ({size + _COPIES} with FlashInfer)" if (0, 9) <= minor <= (0, 11) else ""),
    )


_SECOND_RUNNER = {
    (0, 22): frozenset(("qwen3",)),
    (0, 23): frozenset(("qwen3", "llama", "mistral")),
    (0, 24): frozenset(("qwen3", "llama", "mistral", "deepseek_v2", "qwen2_moe", "granitemoe")),
    (0, 25): frozenset(("deepseek_v2", "qwen2_moe", "granitemoe")),
    (0, 26): frozenset(("deepseek_v2", "qwen2_moe", "granitemoe", "inkling_text")),
    (0, 28): frozenset(("deepseek_v2", "qwen2_moe", "granitemoe", "inkling_text", "deepseek_v4")),
}
"""Models that the second model runner runs without being told; from 0.25 on all without experts or recurrent layers too,
from 0.29 on every one (config/vllm.py, use_v2_model_runner)."""


def second_runner(shape: Shape, minor: tuple[int, int]) -> bool:
    """Whether the second model runner runs a model without being told."""
    if minor >= (0, 29):
        return True
    kinds = next((kinds for since, kinds in reversed(_SECOND_RUNNER.items()) if since <= minor), frozenset())
    if minor >= (0, 25):
        return shape.kind in kinds or not (shape.chosen or shape.recurrent)
    return shape.kind in kinds and not (minor < (0, 24) and shape.quantized)


def _layer(shape: Shape, tokens: int, ranks: int, size: int) -> int:
    """Bytes that live while one layer runs."""
    width = (3 if shape.gated else 2) * shape.width // ranks
    return int(tokens * size * (width + HELD * shape.hidden))


def _chunk(minor: tuple[int, int]) -> int:
    """Tokens that a mixture of experts takes at once (VLLM_FUSED_MOE_CHUNK_SIZE)."""
    return 65_536 if minor <= (0, 11) else 16_384 if minor <= (0, 17) else 2**40


def _workspace(shape: Shape, tokens: int, ranks: int, size: int, *, expert: bool) -> int:
    """Bytes of the rows of all chosen experts: what goes in or comes out, and the product between."""
    if not shape.chosen or shape.packed_experts:
        return 0
    width = shape.expert_width if expert else shape.expert_width // ranks
    return tokens * shape.chosen * (max(2 * width, shape.hidden) + width) * size


GRAPH = (280 * MIB, 175_000)
"""CUDA graphs: a fixed part, and bytes for each layer of each graph."""


def _graphs(shape: Shape, start: Start, serving: Serving, version: str | None) -> Part:
    if not start.graphs:
        return Part("graphs", 0, False, "no CUDA graphs are captured")
    layers = -(-shape.layers // (serving.pipeline_parallel or 1))
    # Batches that hold prompts are captured in pieces between attentions, those of decoding alone also as a whole.
    count = len(start.graphs) + sum(batch <= start.sequences for batch in start.graphs)
    taken = GRAPH[0] + GRAPH[1] * layers * count
    what = f"{count} CUDA graphs of {layers} layers"
    rules, _ = rules_for(version)
    if rules.graphs_counted:
        return Part("graphs", taken, True, what)
    return Part("graphs", 0, True, f"{what} take about {format_bytes(taken)} beyond the engine's share in this version")


RUNTIME = {
    (0, 8): (600, 1600),
    (0, 10): (130, 1400),
    (0, 11): (130, 900),
    (0, 12): (130, 560),
    (0, 18): (250, 2150),
    (0, 22): (450, 2350),
    (0, 26): (260, 1300),
}
"""MiB outside of torch, from a version on: of a rank that is alone, and of each of several.

Before 0.10 all that a GPU's context takes is counted; before 0.11 (in part 0.12) buffers of NCCL are; from 0.18 on ranks
share a workspace that fuses their sums with norms; from 0.20 to 0.25 what trial captures of graphs leave behind is
counted, from 0.26 on it is not.
"""
FIRST_RUNTIME = (130, 300)
"""Those of the first engine (V0), which counts from its own start."""


def _runtime(serving: Serving, start: Start, minor: tuple[int, int]) -> Part:
    row = next(row for since, row in reversed(RUNTIME.items()) if since <= minor)
    ranks = serving.tensor_parallel or 1
    taken = (FIRST_RUNTIME if start.first_engine else row)[ranks > 1]
    exchange = f", and the exchange between {ranks} ranks" if ranks > 1 else ""
    return Part("runtime", taken * MIB, True, f"what kernels take outside of torch{exchange}")


def kv_budget(
    *,
    device_bytes: int,
    free_bytes: int,
    weights_bytes: int,
    parts: Sequence[Part],
    serving: Serving,
    version: str | None,
    spec: ModelSpec,
) -> int:
    """Bytes for the cache on one rank: what the engine asks for, less all that the start takes."""
    return requested(device_bytes, serving, version) - weights_bytes - sum(part.bytes for part in parts)


def left(serving: Serving, version: str | None) -> str:
    """Why the engine leaves some of the memory alone."""
    return f"--gpu-memory-utilization {utilization(serving, version):g} leaves it alone"


def started(
    spec: ModelSpec, serving: Serving, *, device_bytes: int, gpu_name: str | None, version: str | None, context: int
) -> Serving:
    """The options with what the engine takes on such a GPU: its batch, for windows hold what is in flight, and what it is, for
    blocks and formats of latents follow from its kernels."""
    if serving.gpu is None and spec.keeps(LatentAttention, engine="vllm"):
        facts = facts_of(gpu_name or "", device_bytes)
        serving = serving.replace(gpu=facts.compute_capability if facts is not None else None)
    if serving.max_batched is not None:
        return serving
    start = defaults(version, device_bytes, gpu_name, serving=serving, context=context, spec=spec)
    return serving.replace(max_batched=start.batched)


def plan_refusal(
    allocation: Allocation, spec: ModelSpec, serving: Serving, *, device_bytes: int, gpu_name: str | None,
    version: str | None, context: int,
) -> str | None:  # fmt: skip
    """Why the engine refuses to start although its cache holds a request, as its log words it.

    Source: config/compilation.py from 0.20 on: a graph of a full batch needs a block of recurrent state for each request.
    """
    if minor_of(version) < (0, 20) or not any(group.kind == "recurrent_state" for group in allocation.groups):
        return None
    start = defaults(version, device_bytes, gpu_name, serving=serving, context=context, spec=spec)
    blocks = allocation.num_blocks or 0
    if not start.graphs or start.sequences <= blocks:
        return None
    return f"max_num_seqs ({start.sequences}) exceeds available Mamba cache blocks ({blocks}); --max-num-seqs {blocks} starts"
