"""Plans of an engine for what a log says: the model, the settings and the memory can each be another."""

from __future__ import annotations

from typing import Any

from kvctl.allocation import Allocation, Serving
from kvctl.errors import KvctlError
from kvctl.size import SizePlan, prepare
from kvctl.spec import Formats, ModelSpec
from kvctl.startlog.log import StartLog


class Trial:
    """One model, asked what an engine would reserve."""

    def __init__(self, log: StartLog, spec: ModelSpec, plan: SizePlan) -> None:
        self.log, self.spec = log, spec
        self.plan = plan.replace(hardware=None, serving=log.told(plan.serving, None), weights_dtype=None)
        self._formats: dict[tuple[object, ...], Formats] = {}

    @property
    def length(self) -> int:
        """The longest request: what the log says, else the plan's context, else the model's own."""
        for name in ("length", "length_refused"):
            if (found := self.log.figure(name)) is not None and found.value >= 1:
                return int(found.value)
        if self.plan.contexts:
            return max(self.plan.contexts)
        return self.spec.max_context or 4096

    def allocation(self, plan: SizePlan | None = None, context: int | None = None, **serving: Any) -> Allocation | None:
        """What the engine reserves for one request; None where it, or kvctl, refuses."""
        plan = plan or self.plan
        try:
            told: Serving = plan.serving.replace(
                **serving, encoder=plan.encoder_tokens or self.spec.default_encoder or 0
            )
            return plan.engine.plan(self.spec, context or self.length, 1, self._format(plan), told)
        except KvctlError:
            return None

    def refusal(self) -> str:
        """Why the engine makes no plan; empty where it does."""
        try:
            self.plan.engine.plan(self.spec, self.length, 1, self._format(self.plan), self.plan.serving)
        except KvctlError as error:
            return error.message
        return ""

    def _format(self, plan: SizePlan) -> Formats:
        """Formats of the cache, whatever the split."""
        key = (plan.engine, plan.dtype, plan.key, plan.value)
        if key not in self._formats:
            alone = plan.replace(serving=Serving(), notes=(), explain=False)
            self._formats[key] = prepare(self.spec, alone).fmt
        return self._formats[key]
