"""One decoder layer: what its linear layers are given, their scales and codes, and what it makes with these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from kvctl.errors import KvctlError
from kvctl.measure.memory import trim
from kvctl.record import Record
from kvctl.weights.awq.search import Codes, Inputs, Options, codes_for, cost_of_nearest, scales_for
from kvctl.weights.skeleton import run

if TYPE_CHECKING:
    import torch

    from kvctl.weights.awq.structure import Site

_SAME = 1e-4
"""How far a token's state may be off when scales have been folded, in parts of its length: float32's own rounding stays
far below, and scales in a wrong place far above."""
_MOST = 0.9
"""Of the tokens: of a mixture, rounding alone sends some to other experts."""


class Report(Record):
    """What became of linear layers that share inputs."""

    name: str
    layers: tuple[str, ...]
    scaled: bool
    why_not: str
    error: float
    """Squared error of their outputs over the calibration tokens, in parts of the outputs' own squares."""
    plain_error: float
    """The same of rounding to nearest."""
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "layers": list(self.layers), "scaled": self.scaled, "why_not": self.why_not,
                "error": self.error, "plain_error": self.plain_error, "tokens": self.tokens}  # fmt: skip


class Done(Record):
    """A layer whose weights are now what its codes stand for."""

    codes: Mapping[str, Codes]
    """By the slots' names."""
    reports: tuple[Report, ...]
    largest: float
    """The largest value that the calibration tokens have after it."""


def collect(
    layer: Any, sites: Sequence[Site], states: torch.Tensor, beside: Mapping[str, Any], batch: int
) -> list[Inputs]:
    """Sums over what each site is given when the layer runs over states [samples, length, width]."""
    found = [Inputs(site.slots[0].of(layer).shape[1]) for site in sites]
    by_source: dict[str, list[int]] = {}
    for place, site in enumerate(sites):
        by_source.setdefault(site.source, []).append(place)
    with ExitStack() as stack:
        for source, places in by_source.items():
            module = layer.get_submodule(source)
            mine = {sites[place].expert: found[place] for place in places}
            hook = _experts_hook(mine) if hasattr(module, "gate_up_proj") else _linear_hook(mine[None])
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        for start in range(0, len(states), batch):
            run(layer, states[start : start + batch], beside)
    return found


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1]).float()


def _linear_hook(into: Inputs) -> Any:
    def hook(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        into.add(_flat(args[0] if args else kwargs["input"]))

    return hook


def _experts_hook(into: Mapping[int | None, Inputs]) -> Any:
    """Of transformers' fused experts, called with (states, chosen experts [tokens, k], their weights)."""
    import torch

    def hook(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        states, chosen = _flat(given[0]), given[1]
        into[None].add(states)
        for expert, own in into.items():
            if expert is None:
                continue
            rows = (chosen == expert).any(-1).nonzero()[:, 0]
            if len(rows):
                both = torch.nn.functional.linear(states[rows], module.gate_up_proj[expert])
                gate, values = both.chunk(2, dim=-1)
                own.add(module.act_fn(gate) * values)

    return hook


def quantize(
    layer: Any,
    sites: Sequence[Site],
    states: torch.Tensor,
    beside: Mapping[str, Any],
    batch: int,
    options: Options,
    plain: torch.dtype,
) -> Done:
    """Search a layer's scales and codes and put these in the place of its weights; `states` become what it then makes.

    `plain`: what is not packed is stored in.

    Raises:
        KvctlError: its function changed where only scales were moved; weights or states are not finite.

    """
    # What each step took goes back to the system: the next one asks for other sizes, and would take as much beside it.
    inputs = collect(layer, sites, states, beside, batch)
    trim()
    before = run(layer, states[:1], beside)
    found = [
        scales_for([slot.of(layer) for slot in site.slots], given, options, site.repeats)
        if site.fold is not None and options.scale else None
        for site, given in zip(sites, inputs, strict=True)
    ]  # fmt: skip
    plain_costs = [
        cost_of_nearest([slot.of(layer) for slot in site.slots], given, options.group)
        if one is None
        else one.plain_cost
        for site, given, one in zip(sites, inputs, found, strict=True)
    ]
    outputs = [
        sum(_outputs(slot.of(layer), given) for slot in site.slots) for site, given in zip(sites, inputs, strict=True)
    ]
    trim()
    rows = _fold_all(layer, sites, [one.scales if one is not None else None for one in found])
    _check_same(before, run(layer, states[:1], beside))
    codes: dict[str, Codes] = {}
    reports = []
    for site, given, one, size, plain_error in zip(sites, inputs, found, outputs, plain_costs, strict=True):
        scales = None if one is None else one.scales
        weights = [slot.of(layer) for slot in site.slots]
        chosen, costs = codes_for(weights, given, options, scales)
        # Rows that were divided count as much as before.
        error = sum(float((cost * _rows_of(slot, rows, cost) ** 2).sum())
                    for slot, cost in zip(site.slots, costs, strict=True))  # fmt: skip
        for slot, code, weight in zip(site.slots, chosen, weights, strict=True):
            codes[slot.name] = code
            weight.copy_(code.weight())
        reports.append(Report(site.name, tuple(slot.name for slot in site.slots), scales is not None,
                              site.why_not, _share(error, size), _share(plain_error, size), given.tokens))  # fmt: skip
        trim()
    inputs.clear()
    del given
    trim()
    packed = {slot.path for site in sites for slot in site.slots}
    for path, parameter in layer.named_parameters():
        if path not in packed:
            parameter.data.copy_(parameter.data.to(plain))
    largest = 0.0
    for start in range(0, len(states), batch):
        out = run(layer, states[start : start + batch], beside)
        largest = max(largest, float(out.abs().amax()))
        states[start : start + batch] = out
    if not largest < float("inf"):
        raise KvctlError("a layer makes numbers that are not finite of the calibration text")
    return Done(codes, tuple(reports), largest)


def _outputs(weight: torch.Tensor, given: Inputs) -> float:
    """Squares of what a layer makes of its inputs, summed."""
    return float(((weight @ given.gram) * weight).sum())


def _share(error: float, whole: float) -> float:
    return error / whole if whole > 0 else 0.0


def _fold_all(
    layer: Any, sites: Sequence[Site], scales: Sequence[torch.Tensor | None]
) -> dict[tuple[str, int | None], torch.Tensor]:
    """Fold every site's scales; by what rows of matrices were divided for it."""
    divided = {}
    for site, own in zip(sites, scales, strict=True):
        if own is None or site.fold is None:
            continue
        taken = site.scale(layer, own)
        if site.fold.rows is not None:
            divided[site.fold.slot.path, site.fold.slot.expert] = taken
    return divided


def _rows_of(slot: Any, divided: Mapping[tuple[str, int | None], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """By what each row of a slot was divided: the last ones of its matrix, or none."""
    import torch

    out = torch.ones_like(like)
    by = divided.get((slot.path, slot.expert))
    if by is not None and (slot.rows is None or slot.rows[0] > 0):
        out[len(out) - len(by) :] = by
    return out


def _check_same(before: torch.Tensor, after: torch.Tensor) -> None:
    """Scales were moved from one place to another: nothing may have changed."""
    import torch

    far = torch.linalg.vector_norm(before - after, dim=-1) / torch.linalg.vector_norm(before, dim=-1).clamp_min(1e-12)
    most = float(far.flatten().quantile(_MOST))
    if not most <= _SAME:
        raise KvctlError(f"AWQ: folding scales changed what a layer makes by {most:.2g} of it: "
                         "this model is not what its type says")  # fmt: skip
