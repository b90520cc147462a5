"""How long each layer takes, on a run of its own: the hooks that tell it would lengthen a run that is timed."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError
from kvctl.measure.statistics import quantile
from kvctl.measure.thin import layer_stack

if TYPE_CHECKING:
    from kvctl.measure.passes import Passes


class LayerClock:
    """Times each of a model's `count` layers while `passes` runs on `ids`."""

    def __init__(self, model: Any, count: int, passes: Passes, ids: Any) -> None:
        self._stack = layer_stack(model, count)
        if self._stack is None:
            raise ConfigError(f"which of {type(model).__name__}'s modules are its layers cannot be told")
        self._passes, self._ids = passes, ids
        self._times = [0.0] * count
        self._began = 0.0

    def run(self, decode: int, chunk: int | None) -> tuple[list[float], list[float]]:
        """Seconds of each layer: in prefill, and in a step of decoding (the median)."""
        hooks = []
        for index, layer in enumerate(self._stack):
            hooks.append(layer.register_forward_pre_hook(lambda *_: self._begin()))
            hooks.append(layer.register_forward_hook(lambda *_, index=index: self._end(index)))
        try:
            self._passes.begin(self._ids.shape[0])
            token = self._passes.prefill(self._ids, chunk).argmax(-1, keepdim=True)
            prefill = self._take()
            steps = []
            for _ in range(decode):
                token = self._passes.feed(token).argmax(-1, keepdim=True)
                steps.append(self._take())
        finally:
            for hook in hooks:
                hook.remove()
            self._passes.drop()
        return prefill, [quantile(column, 0.5) for column in zip(*steps, strict=True)]

    def _begin(self) -> None:
        self._passes.synchronize()
        self._began = perf_counter()

    def _end(self, index: int) -> None:
        self._passes.synchronize()
        self._times[index] += perf_counter() - self._began

    def _take(self) -> list[float]:
        taken, self._times = self._times, [0.0] * len(self._times)
        return taken
