"""Whether what a backend made is worse than rounding to nearest: each decoder layer on the same calibration tokens.

A layer gets what the original's layers before it make; what it adds to that is compared with what the original adds.
Scales that were moved between a layer's parts do not matter so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvctl.errors import KvctlError
from kvctl.record import Record
from kvctl.weights.skeleton import Skeleton, run

if TYPE_CHECKING:
    import torch

    from kvctl.weights.tensorfile import Source


class Compared(Record):
    """Squared errors of what the layers add, in parts of its square, layer by layer."""

    errors: tuple[float, ...]
    plain_errors: tuple[float, ...]
    """Of rounding to nearest in the same format."""

    @property
    def error(self) -> float:
        """Mean over the layers."""
        return sum(self.errors) / len(self.errors)

    @property
    def plain_error(self) -> float:
        """Mean over the layers."""
        return sum(self.plain_errors) / len(self.plain_errors)


def compare(
    original: Skeleton,
    made: Source,
    nearest: Callable[[torch.Tensor], torch.Tensor],
    slots: list[list[Any]],
    ids: torch.Tensor,
    batch: int,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> Compared:
    """`made` has the backend's weights under the model's own names; `slots` are the layers that were packed."""
    import torch

    other = Skeleton(original.config, made, original.known)
    states, beside = original.enter(ids, torch.float32)
    errors, plain_errors = [], []
    for index, layer_slots in enumerate(slots):
        tell(index, len(slots))
        with original.filled(index, torch.float32) as layer, other.filled(index, torch.float32) as changed:
            truth = _all(layer, states, beside[index], batch)
            added = float((truth - states).double().square().sum()) or 1.0
            errors.append(_error(truth, changed, states, beside[index], batch) / added)
            for slot in layer_slots:
                weight = slot.of(layer)
                weight.copy_(nearest(weight))
            plain_errors.append(_error(truth, layer, states, beside[index], batch) / added)
        states = truth
    tell(len(slots), len(slots))
    return Compared(tuple(errors), tuple(plain_errors))


def _all(layer: Any, states: torch.Tensor, beside: Mapping[str, Any], batch: int) -> torch.Tensor:
    import torch

    return torch.cat([run(layer, states[at : at + batch], beside) for at in range(0, len(states), batch)])


def _error(truth: torch.Tensor, layer: Any, states: torch.Tensor, beside: Mapping[str, Any], batch: int) -> float:
    total = 0.0
    for at in range(0, len(states), batch):
        out = run(layer, states[at : at + batch], beside)
        total += float((out - truth[at : at + batch]).double().square().sum())
    return total


def refuse_worse(name: str, found: Compared, slack: float, *, calibrated: bool) -> None:
    """Refuses what measures worse than rounding to nearest, or is not a number; `calibrated`: whether samples matter to it.

    Raises:
        KvctlError: it does.

    """
    if not found.error <= found.plain_error * slack:
        helps = "more samples, or another format" if calibrated else "another format: it looks at no samples"
        raise KvctlError(f"{name} is worse than rounding to nearest on the calibration text "
                         f"(error {found.error:.4g}, and {found.plain_error:.4g})",
                         hint=f"nothing was kept; {helps}")  # fmt: skip
