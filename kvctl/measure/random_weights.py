"""Models with random weights, built from their configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.measure.architecture import class_of, config_of, torch_dtype
from kvctl.measure.devices import dispatch, located, place_of, placed_by
from kvctl.measure.faults import cannot_build
from kvctl.measure.fill import fill
from kvctl.measure.loaded import Loaded, Wanted, weights_bytes
from kvctl.measure.memory import is_out_of_memory
from kvctl.measure.sharding import shard, share_replicated
from kvctl.measure.thin import thin
from kvctl.units import format_count

if TYPE_CHECKING:
    from kvctl.formats import DType
    from kvctl.spec import ModelSpec

_SAME_SIZE = 0.03
"""Published counts are rounded, and some leave out embeddings."""


def with_random_weights(spec: ModelSpec, wanted: Wanted, dtype: DType) -> Loaded:
    import torch

    if spec.provenance.source == "shape":
        raise UsageError("a bare shape is no model that can run", hint="name a model, for example Qwen3-8B")
    spec = _completed(spec)
    if not spec.layers:
        raise ConfigError(f"{spec.id} has no layers: nothing of it can run")
    config = config_of(spec, wanted, without=("quantization_config",), text_only=wanted.layers is not None)
    model_class = class_of(spec, wanted, config)
    try:
        with torch.device("meta"):
            model = model_class._from_config(config, dtype=torch_dtype(dtype), **wanted.attention_setting)
    except Exception as error:
        if isinstance(error, KvctlError) or is_out_of_memory(error):
            raise
        raise cannot_build(spec, error) from None
    notes = _unlike(spec, model)
    thinned = None
    if wanted.layers is not None:
        thinned = thin(model, spec, wanted.layers)
        spec = thinned.spec
        if len(thinned.kept) == sum(thinned.counts):
            notes += (f"--layers {wanted.layers:,}: the model has no more, and all of them run",)
    ranks = wanted.tensor_parallel
    seed = wanted.seed + (shard(model, spec, ranks) if ranks > 1 else 0)
    placed = placed_by(model, wanted)
    notes += fill(model, lambda path: place_of(placed, path), seed, sharing=thinned is not None)
    if ranks > 1:
        share_replicated(model)
    dispatch(model, placed)
    model.eval()
    return located(Loaded(model, spec, wanted.device, weights_bytes(model), thinned, notes=notes, ranks=ranks), wanted)


def _completed(spec: ModelSpec) -> ModelSpec:
    """The model with a width that its catalogue entry lacks, where its published number of parameters tells it."""
    if spec.whole or spec.weights is None or spec.weights.parameters is None:
        return spec
    from kvctl.parameters import infer

    found = infer.completed(spec.config, spec.weights.parameters)
    return spec if found is None else spec.replace(config=found[0])


def _unlike(spec: ModelSpec, model: Any) -> tuple[str, ...]:
    """A note where the architecture that was built has not got the published number of parameters."""
    published = spec.weights.parameters if spec.weights is not None else None
    built = sum(parameter.numel() for parameter in model.parameters())
    head = model.get_output_embeddings()
    # some published counts have a tied head twice; several code books have a list of heads
    counted_twice = sum(parameter.numel() for parameter in head.parameters()) if head is not None else 0
    if published is None or any(
        abs(count - published) <= published * _SAME_SIZE for count in (built, built + counted_twice)
    ):
        return ()
    return (f"what was built has {format_count(built)} parameters, and {spec.id} has {format_count(published)}: its "
            "configuration is not all in the source; the cache is its own, times are not",)  # fmt: skip
