"""A model cut over ranks by transformers' own tensor-parallel plan, before it has any weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError

if TYPE_CHECKING:
    from kvctl.spec import ModelSpec


def shard(model: Any, spec: ModelSpec, ranks: int) -> int:
    """Cuts a model that lies on meta over the ranks of this process group, as from_pretrained does; which rank this is.

    Raises:
        ConfigError: transformers has no plan for the model, or refuses it.

    """
    import torch.distributed as dist
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=ranks)
    _untie(model)
    try:
        config, _, mesh = type(model).prepare_distribute_model(config)
        type(model).maybe_distribute_model(model, config, mesh)
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise _cannot_shard(spec, model, error) from None
    model.tie_weights()
    return int(dist.get_rank())


def _untie(model: Any) -> None:
    """Gives every tied tensor a place of its own: a plan names both, and cuts them alike."""
    import torch

    for path in model.all_tied_weights_keys:
        prefix, _, name = path.rpartition(".")
        module = model.get_submodule(prefix)
        module._parameters[name] = torch.nn.Parameter(torch.empty_like(module._parameters[name]), requires_grad=False)


def _cannot_shard(spec: ModelSpec, model: Any, error: Exception) -> ConfigError:
    if not model.tp_plan:
        return ConfigError(f"{spec.id}: transformers has no tensor-parallel plan for {type(model).__name__}",
                           hint="--device-map auto puts whole layers on several devices")  # fmt: skip
    return ConfigError(
        f"{spec.id}: transformers does not cut it over ranks: {type(error).__name__}: {str(error)[:300]}"
    )


def share_replicated(model: Any) -> None:
    """Rank 0's numbers for what every rank holds whole: ranks that drew their own would compute different things."""
    import torch.distributed as dist

    done: set[int] = set()
    for tensor in (*model.parameters(), *model.buffers()):
        if hasattr(tensor, "placements") or id(tensor) in done or not tensor.numel():
            continue
        done.add(id(tensor))
        data = tensor.detach()
        if data.dim() and data.stride(0) == 0:  # experts that share the memory of one
            data = data[:1]
        whole = data.contiguous()
        dist.broadcast(whole, 0)
        if whole is not data:
            data.copy_(whole)
