"""Scales, bounds and codes of linear layers, from sums over what they are given.

Of the inputs X [tokens, inputs] only the Gram matrix X^T X and the mean of |x| are needed: an error D of a weight
[outputs, inputs] costs the outputs |X D^T|^2 = trace(D G D^T). No activation is kept.

1. Scales of input channels (AWQ): where inputs are large, weights are made larger before they are rounded, and what
   comes before made smaller. Tried are powers of the inputs' size, alone and over a power of the weights' (AWQ's grid),
   a tenth apart, then half of one around the best.
2. Bounds of each group (clipping): its largest and its smallest weights may be cut where that costs the outputs less.
3. Codes: rounded to nearest, or column by column with each one's error made up for by those that follow (GPTQ,
   Frantar et al. 2022, arXiv 2210.17323).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvctl.record import Record

if TYPE_CHECKING:
    import torch

_TOP = 15
_SMALLEST = 1e-5
"""Of scales: float16 holds it; below, a group is as good as nothing."""
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
_MOST = 256.0
"""Of scales of inputs: norms divided by them stay where float16 has all of its digits."""
_DAMPING = 0.01
"""Of the mean diagonal, added to it: directions in which calibration has nothing still cost a little."""


class Inputs:
    """Sums over the inputs of a layer: Gram matrix [inputs, inputs], |x| [inputs], and how many tokens."""

    def __init__(self, width: int) -> None:
        import torch

        self.gram = torch.zeros(width, width)
        self.size = torch.zeros(width, dtype=torch.float64)
        self.tokens = 0

    def add(self, x: torch.Tensor) -> None:
        """More tokens [tokens, inputs], in float32."""
        if not len(x):
            return
        self.gram.addmm_(x.T, x)
        self.size += x.abs().sum(0, dtype=x.dtype)
        self.tokens += len(x)

    @property
    def damped(self) -> torch.Tensor:
        """The Gram matrix, a little of its mean diagonal added."""
        import torch

        more = _DAMPING * self.gram.diagonal().mean().clamp_min(1e-12)
        return self.gram + more * torch.eye(len(self.gram))


class Codes(NamedTuple):
    """A layer in 4 bits: codes uint8 [outputs, inputs], zeros uint8 and scales float16 [outputs, inputs / group]."""

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor

    def weight(self) -> torch.Tensor:
        """What they stand for, in float32 [outputs, inputs]."""
        outputs, inputs = self.codes.shape
        by_group = self.codes.view(outputs, self.scales.shape[1], -1).float() - self.zeros.float()[..., None]
        return (by_group * self.scales.float()[..., None]).view(outputs, inputs)


class Options(Record):
    """What of the search is done."""

    group: int
    scale: bool = True
    clip: bool = True
    compensate: bool = True


class Scaled(NamedTuple):
    """Scales [inputs] of what layers share, and the squared error of their outputs with and without, both rounded to nearest."""

    scales: torch.Tensor | None
    """None: no scales are better than none."""
    cost: float
    plain_cost: float


def grid(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales as float16 holds them, and zeros, of groups with these bounds; zero is always between them."""
    import torch

    low, high = low.clamp_max(0), high.clamp_min(0)
    scales = ((high - low) / _TOP).clamp_min(_SMALLEST).half().float()
    return scales, torch.round(-low / scales).clamp_(0, _TOP)


def nearest(weight: torch.Tensor, group: int) -> Codes:
    """Rounded to nearest between each group's extremes: what anything else is measured against."""
    parts = _parts(weight, group)
    return _codes(weight, *grid(parts.amin(-1), parts.amax(-1)))


def _quantized(weight: torch.Tensor, group: int) -> torch.Tensor:
    return nearest(weight, group).weight()


def _parts(weight: torch.Tensor, group: int) -> torch.Tensor:
    return weight.view(weight.shape[0], weight.shape[1] // group, group)


def _codes(weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Codes:
    import torch

    parts = weight.view(*scales.shape, -1)
    codes = torch.round(parts / scales[..., None] + zeros[..., None]).clamp_(0, _TOP)
    return Codes(codes.view(weight.shape).to(torch.uint8), zeros.to(torch.uint8), scales.half())


def _cost(error: torch.Tensor, gram: torch.Tensor) -> float:
    """trace(D G D^T)."""
    return float(((error @ gram) * error).sum())


def scales_for(
    weights: Sequence[torch.Tensor], inputs: Inputs, options: Options, repeats: tuple[int, int, int] | None = None
) -> Scaled:
    """The scales of shared inputs that cost the outputs of `weights` [outputs, inputs] least.

    `repeats`: (n, times, width) where inputs are n blocks of `width` that each stand there `times` times and have one
    scale.
    """
    gram, group = inputs.damped, options.group
    plain = cost_of_nearest(weights, inputs, group)
    if not inputs.tokens:
        return Scaled(None, plain, plain)
    size = (inputs.size / inputs.tokens).float().clamp_min(1e-8)
    relative = _relative_size(weights, group).clamp_min(1e-4)
    best, least, at = None, plain, (False, 0.0)

    def attempt(over: bool, power: float) -> None:
        nonlocal best, least, at
        scales = _shared(size**power / (relative ** (1 - power) if over else 1.0), repeats)
        cost = 0.0
        for weight in weights:
            cost += _cost(_quantized(weight * scales, group) / scales - weight, gram)
            if not cost < least:
                return
        best, least, at = scales, cost, (over, power)

    for over, tenth in itertools.product((False, True), range(1, 10)):
        attempt(over, tenth / 10)
    over, power = at
    if best is not None:
        attempt(over, power - 0.05)
        attempt(over, power + 0.05)
    return Scaled(best, least, plain)


def cost_of_nearest(weights: Sequence[torch.Tensor], inputs: Inputs, group: int) -> float:
    """Squared error of layers' outputs with their weights rounded to nearest."""
    gram = inputs.damped
    return sum(_cost(_quantized(weight, group) - weight, gram) for weight in weights)


def _relative_size(weights: Sequence[torch.Tensor], group: int) -> torch.Tensor:
    """How large the weights of each input channel are within their groups, 0 to 1, over all layers' outputs."""
    import torch

    total, rows = torch.zeros(weights[0].shape[1]), 0
    for weight in weights:
        parts = _parts(weight.abs(), group)
        total += (parts / parts.amax(-1, keepdim=True).clamp_min(1e-8)).view(weight.shape).sum(0)
        rows += len(weight)
    return total / rows


def _shared(scales: torch.Tensor, repeats: tuple[int, int, int] | None) -> torch.Tensor:
    """Around 1, and one for all channels that repeat one another."""
    if repeats is not None:
        count, times, width = repeats
        one = scales.view(count, times, width).log().mean(1, keepdim=True).exp()
        scales = one.expand(count, times, width).reshape(-1)
    scales = scales / (scales.amax() * scales.amin()).sqrt()
    return scales.clamp(1 / _MOST, _MOST)


def codes_for(
    weights: Sequence[torch.Tensor], inputs: Inputs, options: Options, scales: torch.Tensor | None = None
) -> tuple[list[Codes], list[torch.Tensor]]:
    """Codes of layers [outputs, inputs] that share inputs, and the squared error of each of their outputs.

    `inputs` are those that were seen; `weights` have been multiplied by `scales` since, and the inputs divided. No
    output is worse than with rounding to nearest.
    """
    import torch

    whole, gram = torch.cat(list(weights)), inputs.damped
    if scales is not None:
        gram = gram / scales[:, None] / scales
    codes = nearest(whole, options.group)
    costs = _row_costs(codes.weight() - whole, gram)
    if inputs.tokens:
        for tried in _tries(whole, gram, options):
            found = _row_costs(tried.weight() - whole, gram)
            better = found < costs
            costs = torch.where(better, found, costs)
            codes = Codes(*(torch.where(better[:, None], new, old) for new, old in zip(tried, codes, strict=True)))
    rows = [len(weight) for weight in weights]
    return [Codes(*part) for part in zip(*(tensor.split(rows) for tensor in codes), strict=True)], list(
        costs.split(rows)
    )


def _tries(whole: torch.Tensor, gram: torch.Tensor, options: Options) -> Iterator[Codes]:
    if options.compensate:
        yield compensated(whole, gram, options)
    elif options.clip:
        yield _codes(whole, *bounds(_parts(whole, options.group), _diagonal(gram, options.group)))


def _row_costs(error: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    return ((error @ gram) * error).sum(1)


def _diagonal(gram: torch.Tensor, group: int) -> torch.Tensor:
    """Blocks [groups, group, group] along the diagonal."""
    count = len(gram) // group
    return gram.view(count, group, count, group).diagonal(dim1=0, dim2=2).permute(2, 0, 1)


def bounds(parts: torch.Tensor, grams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros of groups [outputs, groups, group]: of bounds that are cut, those that cost the outputs least.

    Both bounds are cut alike first, then each alone. `grams`: the Gram matrix's own block of each group.
    """
    import torch

    low, high = parts.amin(-1).clamp_max(0), parts.amax(-1).clamp_min(0)
    by_group = parts.transpose(0, 1).contiguous()

    def cost(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        s, z = scales.T[..., None], zeros.T[..., None]
        error = (torch.round(by_group / s + z).clamp_(0, _TOP) - z) * s - by_group
        return (torch.bmm(error, grams) * error).sum(-1).T

    best = grid(low, high)
    least = cost(*best)
    cut_low, cut_high = torch.ones_like(low), torch.ones_like(high)

    def attempt(lower: torch.Tensor, upper: torch.Tensor) -> None:
        nonlocal best, least, cut_low, cut_high
        tried = grid(low * lower, high * upper)
        found = cost(*tried)
        better = found < least
        best = (torch.where(better, tried[0], best[0]), torch.where(better, tried[1], best[1]))
        least = torch.where(better, found, least)
        cut_low, cut_high = torch.where(better, lower, cut_low), torch.where(better, upper, cut_high)

    for shrink in _SHRINKS[1:]:
        attempt(torch.full_like(low, shrink), torch.full_like(high, shrink))
    for step in (0.9, 1.1):
        attempt(cut_low * step, cut_high)
        attempt(cut_low, cut_high * step)
    return best


def compensated(weight: torch.Tensor, gram: torch.Tensor, options: Options) -> Codes:
    """Column by column, the error of each made up for by those that follow.

    The columns' order is that of the inputs, as the layout's groups demand. Bounds of a group are found when its turn
    comes, from the weights as they are then.
    """
    import torch

    group, (outputs, inputs) = options.group, weight.shape
    left = weight.clone()
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(gram.double())), upper=True).float()
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scales, zeros = torch.empty(outputs, inputs // group), torch.empty(outputs, inputs // group)
    for at, start in enumerate(range(0, inputs, group)):
        stop = start + group
        block, own = left[:, start:stop].clone(), upper[start:stop, start:stop]
        if options.clip:
            found = bounds(block[:, None].clone(), gram[start:stop, start:stop][None])
        else:
            found = grid(block.amin(1, keepdim=True), block.amax(1, keepdim=True))
        scale, zero = found[0][:, 0], found[1][:, 0]
        scales[:, at], zeros[:, at] = scale, zero
        errors = torch.empty_like(block)
        for i in range(group):
            column = block[:, i]
            code = torch.round(column / scale + zero).clamp_(0, _TOP)
            codes[:, start + i] = code.to(torch.uint8)
            error = (column - (code - zero) * scale) / own[i, i]
            block[:, i:] -= error[:, None] * own[i, i:]
            errors[:, i] = error
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    return Codes(codes, zeros.to(torch.uint8), scales.half())
