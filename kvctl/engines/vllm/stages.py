"""How vLLM divides layers over pipeline stages (distributed/utils.py, get_pp_indices)."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.errors import UsageError


def stage_sizes(layers: int, stages: int, partition: Sequence[int] | None) -> list[int]:
    """Layers of every stage: those named, else even parts; what remains goes to stages before the last, which has the head."""
    if stages > layers:
        raise UsageError(f"--pipeline-parallel-size {stages} is more than the {layers} layers")
    if partition:
        if len(partition) != stages or sum(partition) != layers or min(partition) < 0:
            raise UsageError(f"VLLM_PP_LAYER_PARTITION does not divide {layers} layers over {stages} stages")
        return list(partition)
    each, rest = divmod(layers, stages)
    return [each + (stages - 1 - rest <= stage < stages - 1) for stage in range(stages)]
