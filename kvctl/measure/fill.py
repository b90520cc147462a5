"""Random weights for a model that was built without any: sensible numbers, and fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from kvctl.units import GIB, format_bytes

_LARGE = 2**20
"""Elements from which a tensor is filled by repeating random numbers: drawing each takes minutes for billions."""
_BLOCK = 2**20 + 7
"""Numbers that are repeated; an odd count, so that rows differ."""
_SHARE_FROM = 4 * GIB
"""Bytes of weights from which experts share memory, where only some layers are kept."""


def fill(model: Any, device: str | Callable[[str], str], seed: int, *, sharing: bool) -> tuple[str, ...]:
    """Give every tensor memory on `device` (of some, by full name) and numbers; notes of what was shared.

    `sharing`: the model stands for a larger one, so a mixture's experts may be one in memory, and the
    embedding one with the head.
    """
    import torch

    torch.manual_seed(seed)
    notes: list[str] = []
    shared: set[str] = set()
    if sharing and sum(p.numel() * p.element_size() for p in model.parameters()) > _SHARE_FROM:
        shared, saved = _experts(model)
        if shared:
            notes.append(f"a layer's experts share the memory of one: {format_bytes(saved)} less is held; "
                         "what a pass reads and computes is the same")  # fmt: skip
            _run_one_by_one(model)
        if _tie(model):
            notes.append("the embedding shares the memory of the head")
    where = device if callable(device) else lambda path: device
    made: dict[int, Any] = {}
    for module, name, parameter, path in _meta(model):
        known = made.get(id(parameter))
        if known is None:
            shape = local(parameter).shape
            rows = (1, *shape[1:]) if path in shared else shape
            data = torch.empty(rows, dtype=parameter.dtype, device=where(path))
            known = torch.nn.Parameter(_like(parameter, data.expand(shape)), requires_grad=False)
            if data.numel() >= _LARGE and data.dim() > 1:
                _repeat(data, _std(model))
                known._is_hf_initialized = True
            made[id(parameter)] = known
        setattr(module, name, known)
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            # What they hold, initialize_weights() knows, as it does for a checkpoint that leaves them out.
            module._buffers[name] = torch.zeros_like(buffer, device=where(f"{prefix}.{name}"))
    with torch.no_grad():
        model.initialize_weights()
        model.tie_weights()
    return tuple(notes)


def local(tensor: Any) -> Any:
    """This rank's part of a tensor that is cut over ranks; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


def _like(parameter: Any, data: Any) -> Any:
    """`data`, as this rank's part of what `parameter` is where that is cut over ranks."""
    if not hasattr(parameter, "placements"):
        return data
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        data, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )  # fmt: skip


def _meta(model: Any) -> Iterator[tuple[Any, str, Any, str]]:
    """Module, name, parameter and full name of all that has no memory yet."""
    for prefix, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                yield module, name, parameter, f"{prefix}.{name}"


def _repeat(data: Any, std: float) -> None:
    """Fill with a block of normal numbers, over and over."""
    import torch

    block = (torch.randn(_BLOCK, device=data.device) * std).to(data.dtype)
    flat = data.view(-1)
    whole = len(flat) // _BLOCK
    flat[: whole * _BLOCK].view(whole, _BLOCK).copy_(block)
    flat[whole * _BLOCK :].copy_(block[: len(flat) - whole * _BLOCK])


def _std(model: Any) -> float:
    found = getattr(model.config.get_text_config(decoder=True), "initializer_range", None)
    return found if isinstance(found, float) and 0 < found <= 1 else 0.02


def _experts(model: Any) -> tuple[set[str], int]:
    """Names of tensors [experts, …] of mixtures, and the bytes that one expert each saves."""
    found, saved = set(), 0
    for prefix, module in model.named_modules():
        count = getattr(module, "num_experts", None)
        if "Experts" not in type(module).__name__ or not isinstance(count, int) or count < 2:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2 and parameter.shape[0] == count:
                found.add(f"{prefix}.{name}")
                saved += parameter.numel() // count * (count - 1) * parameter.element_size()
    return found, saved


def _run_one_by_one(model: Any) -> None:
    """Experts in a loop: kernels that take all at once would copy shared ones apart."""
    change = getattr(model, "set_experts_implementation", None)
    if change is not None:
        change("eager")


def _tie(model: Any) -> bool:
    """Let the input embedding be the head's tensor, where both have one shape."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if (
        head is None
        or embedding is None
        or head.weight is embedding.weight
        or head.weight.shape != embedding.weight.shape
        or getattr(head.weight, "placements", None) != getattr(embedding.weight, "placements", None)
    ):
        return False
    embedding.weight = head.weight
    return True
