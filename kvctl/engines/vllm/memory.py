"""What a vLLM rank spends on a GPU beside weights and cache: estimates, calibrated on published start-up logs.

The engine runs one batch of the largest size with no cache, and one step of its sampler, and takes the peak of torch's
memory; it adds what grew outside of torch, and in newer versions an estimate of CUDA graphs (v1/worker/gpu_worker.py,
determine_available_memory). What is live at that peak follows from the sources:

- sampler (`_dummy_sampler_run`, v1/sample): logits of every request in the model's dtype, a float32 copy, and what
  top-k and top-p make of it: sorted values, their indices and the sort's own buffers (36 bytes), or, from 0.17 on and
  with FlashInfer, two more float32 copies (12 bytes) and a row of the vocabulary for every multiprocessor. The second
  model runner samples from the logits as they are, until 0.33;
- one layer (`_dummy_run`): gate and up projection, their product, and a few tensors as wide as the hidden state;
- mixtures of experts: rows of all chosen experts, which the workspace keeps from 0.13 on;
- latent attention: keys and values of a long past, expanded for all heads;
- encoders of images: their layers for as many patches as a batch holds, and their outputs.

The coefficients (`HELD`, `KEPT`, `FIXED`, `GRAPH`, `RUNTIME`) and their errors are measured in tests/test_vllm_memory.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.allocation import Part, Serving
from kvctl.engines.vllm.rules import minor_of, rules_for
from kvctl.engines.vllm.shape import Shape, shape_of
from kvctl.engines.vllm.start import Start, defaults, requested, start_refusal, utilization
from kvctl.spec import ModelSpec
from kvctl.units import MIB, format_bytes

__all__ = ["kv_budget", "left", "overheads", "requested", "start_refusal", "started"]

HELD = 4.3
"""Tensors as wide as the hidden state that live while a layer runs."""
KEPT = 1.5
"""Those that live while the sampler runs."""
FIXED = 25 * MIB
PROCESSORS = 132
"""Multiprocessors of a GPU: each has a row of the vocabulary in the sampler's buffer."""
_SORTED, _COPIES = 36, 12
"""Bytes that sampling takes for each logit beside the model's dtype."""
MEDIA_TOKENS = 16_384
"""Positions of the largest image that models with images of any size take by their own preprocessing."""


def overheads(
    spec: ModelSpec,
    serving: Serving,
    *,
    dtype_bytes: int,
    device_bytes: int,
    gpu_name: str | None,
    version: str | None,
    context: int,
) -> tuple[Part, ...]:
    """Activations, CUDA graphs and the rest of one rank, the last stage of a pipeline, which has the sampler.

    Raises:
        ConfigError: the model's sizes are not known.

    """
    start = defaults(version, device_bytes, gpu_name, serving=serving, context=context, spec=spec)
    shape, minor = shape_of(spec), minor_of(version)
    return (
        _activations(shape, start, serving, dtype_bytes, minor, context),
        _graphs(shape, start, serving, version),
        _runtime(serving, minor),
    )


def _activations(shape: Shape, start: Start, serving: Serving, size: int, minor: tuple[int, int], context: int) -> Part:
    ranks, tokens, requests = serving.tensor_parallel or 1, start.batched, min(start.sequences, start.batched)
    workspace = _workspace(shape, tokens, ranks, size, expert=serving.expert_parallel)
    logits, words = _sampling(shape, requests, size, start, minor)
    media = tokens * shape.hidden * size if shape.vision else 0
    phases = [
        (logits + int(KEPT * tokens * shape.hidden * size) + media + (workspace if minor >= (0, 13) else 0), words),
        (
            _layer(shape, tokens, ranks, size) + workspace + media,
            f"one layer of {tokens:,} tokens, {shape.hidden:,} wide",
        ),
    ]
    if shape.latent_heads:
        past = min(max(8 * context, 4 * start.sequences * 64), (128 if minor <= (0, 10) else 64) * 1024)
        expanded = past * shape.latent_heads // ranks * shape.latent_width * size
        phases.append((expanded + int(HELD * tokens * shape.hidden * size),
                       f"keys and values of {past:,} tokens for {shape.latent_heads // ranks} heads"))  # fmt: skip
    if shape.vision is not None:
        positions = max(tokens, MEDIA_TOKENS if shape.vision.patches == 4 else 0)
        row = 4 * shape.vision.hidden + 2 * shape.vision.width // ranks
        phases.append((positions * (shape.vision.patches * row + shape.hidden) * size,
                       f"images of {positions:,} positions in the encoder"))  # fmt: skip
    peak, what = max(phases)
    return Part("activations", peak + FIXED, True, f"the profile run's peak, {what}")


def _sampling(shape: Shape, requests: int, size: int, start: Start, minor: tuple[int, int]) -> tuple[int, str]:
    """Bytes of logits and of what the sampler makes of them."""
    vocabulary = -(-shape.vocabulary // 64) * 64
    each, row = size + _COPIES, PROCESSORS * vocabulary * 4
    if minor <= (0, 8) or (0, 12) <= minor <= (0, 16):
        each, row = size + _SORTED, 0
    elif second_runner(shape, minor) and minor < (0, 33):
        each, row = size, 0
    return (
        requests * vocabulary * each + row,
        f"logits of {requests:,} requests, {vocabulary:,} of {each} bytes each",
    )


def second_runner(shape: Shape, minor: tuple[int, int]) -> bool:
    """Whether the second model runner runs a model without being told."""
    return minor >= (0, 29) or (minor >= (0, 25) and not shape.chosen and not shape.recurrent)


def _layer(shape: Shape, tokens: int, ranks: int, size: int) -> int:
    """Bytes that live while one layer runs."""
    width = (3 if shape.gated else 2) * shape.width // ranks
    return int(tokens * size * (width + HELD * shape.hidden))


def _workspace(shape: Shape, tokens: int, ranks: int, size: int, *, expert: bool) -> int:
    """Bytes of the rows of all chosen experts: what goes in or comes out, and the product between."""
    if not shape.chosen or shape.packed_experts:
        return 0
    width = shape.expert_width if expert else shape.expert_width // ranks
    return tokens * shape.chosen * (max(2 * width, shape.hidden) + width) * size


GRAPH = (100 * MIB, 400_000)
"""CUDA graphs: a fixed part, and bytes for each layer and captured size (both kinds of graph)."""


def _graphs(shape: Shape, start: Start, serving: Serving, version: str | None) -> Part:
    if not start.graphs:
        return Part("graphs", 0, False, "no CUDA graphs are captured")
    layers = -(-shape.layers // (serving.pipeline_parallel or 1))
    taken = GRAPH[0] + GRAPH[1] * layers * len(start.graphs)
    what = f"CUDA graphs of {len(start.graphs)} batch sizes and {layers} layers"
    rules, _ = rules_for(version)
    if rules.graphs_counted:
        return Part("graphs", taken, True, what)
    return Part("graphs", 0, True, f"{what} take about {format_bytes(taken)} beyond the engine's share in this version")


RUNTIME = {
    (0, 8): (600, 1600),
    (0, 10): (130, 1400),
    (0, 11): (130, 560),
    (0, 18): (250, 2150),
}
"""MiB outside of torch, from a version on: one rank, and each of several. Before 0.10 all that a GPU's context takes
counts; before 0.11 NCCL's buffers do; from 0.18 on ranks share a workspace that fuses their sums with norms."""


def _runtime(serving: Serving, minor: tuple[int, int]) -> Part:
    alone, each = next(row for since, row in reversed(RUNTIME.items()) if since <= minor)
    ranks = serving.tensor_parallel or 1
    return Part(
        "runtime",
        (each if ranks > 1 else alone) * MIB,
        True,
        "what kernels take outside of torch" + (f", and the exchange between {ranks} ranks" if ranks > 1 else ""),
    )


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
    """The options with the batch that the engine takes on such a GPU: windows hold what is in flight."""
    if serving.max_batched is not None:
        return serving
    start = defaults(version, device_bytes, gpu_name, serving=serving, context=context, spec=spec)
    return serving.replace(max_batched=start.batched)
