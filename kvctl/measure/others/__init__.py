"""Other engines on this machine: each is started, measured from outside, and put beside kvctl's prediction.

Adding one: a row in `ADAPTERS` and a module with `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from kvctl.errors import UsageError
from kvctl.measure.others.ask import EngineAsk
from kvctl.measure.report import ProfileReport
from kvctl.measure.run import Progress
from kvctl.size import SizePlan
from kvctl.spec import ModelSpec

ADAPTERS = {"llama.cpp": ".llama_cpp", "vllm": ".vllm_engine"}
"""Modules by engine, loaded when first asked for."""

__all__ = ["ADAPTERS", "EngineAsk", "run"]

_Run = Callable[[ModelSpec, str, SizePlan, EngineAsk, Progress], ProfileReport]


def run(engine: str, spec: ModelSpec, path: str, plan: SizePlan, ask: EngineAsk, progress: Progress) -> ProfileReport:
    """Start `engine` with the model at `path` (a GGUF file for llama.cpp; a folder or a name for vLLM) and measure.

    `plan` has the formats and the serving that the engine is started with; they and `ask.flags` become its own flags.
    Where it is interrupted while it measures, the report has what there is.

    Raises:
        UsageError: no adapter for the engine, a setting that it does not know, a model that it cannot run.
        KvctlError: it is not installed, or does not start.
        KeyboardInterrupt: it was interrupted before the engine was ready.

    """
    module = ADAPTERS.get(engine)
    if module is None:
        raise UsageError(f"{engine} cannot be run by kvctl", hint="one of " + ", ".join(ADAPTERS))
    adapter = cast("_Run", import_module(module, __name__).run)
    return adapter(spec, path, plan, ask.checked(), progress)
