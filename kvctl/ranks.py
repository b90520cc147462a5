"""Which rank of an engine runs on which device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvctl.allocation import Serving
from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.units import plural

if TYPE_CHECKING:
    from kvctl.engines import Engine
    from kvctl.hardware import Device


class Hardware(Record):
    """What a model is to run on."""

    devices: tuple[Device, ...]
    name: str = ""
    """What one of them is called on the command line; empty for several kinds, and for this machine's."""
    overhead: int | None = None
    """Measured bytes on each rank beside weights and cache: they take the place of estimates."""
    solve: str | None = None
    """What to look for the best of: ctx, concurrency, gpus or tp."""
    started: bool = False
    """Whether a pasted command line starts the engine: parallelism that it does not name is none."""


class Layout(Record):
    """Which rank of an engine runs where."""

    devices: tuple[Device, ...]
    serving: Serving
    notes: tuple[str, ...] = ()

    @property
    def replicas(self) -> int:
        """Engines side by side, each with a cache of its own."""
        dp = self.serving.data_parallel or 1
        return dp if not self.serving.attention_dp else 1


def layout(engine: Engine, serving: Serving, hardware: Hardware, works: Callable[[Serving], bool]) -> Layout:
    """Gives every rank a device; where no parallelism is named, all devices are used.

    `works` says whether the engine takes a split. One device stands for as many of its kind as the options need.

    Raises:
        UsageError: more ranks than devices, or no split that uses all of them.

    """
    devices, notes = hardware.devices, [note for device in hardware.devices for note in device.notes]
    _check_devices(engine, devices, notes)
    if devices[0].kind == "cpu":
        serving = serving.replace(device="cpu")
    if not engine.splits:
        return Layout(devices, serving, tuple(dict.fromkeys(notes)))
    named = serving.tensor_parallel, serving.pipeline_parallel, serving.data_parallel
    if named == (None, None, None) and len(devices) > 1 and not hardware.started:
        serving = _over_all(serving, len(devices), works)
        tp, pp = serving.tensor_parallel or 1, serving.pipeline_parallel or 1
        stages = f" and {pp} pipeline stages" if pp > 1 else ""
        notes.append(
            f"{len(devices)} GPUs: {plural(tp, 'tensor-parallel rank')}{stages}; name another split for another answer"
        )
    world = (serving.tensor_parallel or 1) * (serving.pipeline_parallel or 1)
    if engine.name == "vllm" or not serving.attention_dp:
        world *= serving.data_parallel or 1
    if world > len(devices):
        if len(devices) > 1 or devices[0].index is not None:
            raise UsageError(f"{plural(world, 'rank')} on {plural(len(devices), 'GPU')}",
                             hint=f"name {world} GPUs, or less parallelism")  # fmt: skip
        if devices[0].kind == "cpu":
            raise UsageError(f"{plural(world, 'rank')} on one host", hint="leave parallelism out, or name GPUs")
        devices *= world
        notes.append(f"the options make {world} ranks: {world} such GPUs are counted")
    elif world < len(devices):
        notes.append(f"{plural(world, 'rank')}: {plural(len(devices) - world, 'GPU')} of {len(devices)} stay idle")
    return Layout(devices[:world], serving, tuple(dict.fromkeys(notes)))


def _check_devices(engine: Engine, devices: tuple[Device, ...], notes: list[str]) -> None:
    """Refuses devices that an engine does not run on, and says of which kind its estimates are."""
    if len({device.kind for device in devices}) > 1:
        raise UsageError("--gpu cpu is a machine of its own", hint="name GPUs, or cpu")
    if devices[0].kind == "cpu" and engine.name == "tensorrt-llm":
        raise UsageError("tensorrt-llm runs on no CPU")
    others = {device.facts.vendor for device in devices if device.facts is not None} - {"NVIDIA"}
    if others and engine.name == "tensorrt-llm":
        raise UsageError(f"tensorrt-llm runs on NVIDIA's GPUs, not on {' and '.join(sorted(others))}'s")
    if "Apple" in others and engine.name in ("vllm", "sglang"):
        raise UsageError(
            f"kvctl does not know {engine.name} on Apple's GPUs", hint="--engine llama.cpp, ollama or transformers"
        )
    if others and engine.plans:
        notes.append(f"estimates of {engine.name} were calibrated on NVIDIA's GPUs")


def _over_all(serving: Serving, count: int, works: Callable[[Serving], bool]) -> Serving:
    """As much tensor parallelism as the engine takes, pipeline stages for the rest."""
    for ranks in range(count, 0, -1):
        if count % ranks == 0:
            told = serving.replace(tensor_parallel=ranks, pipeline_parallel=count // ranks if ranks < count else None)
            if works(told):
                return told
    if works(serving.replace(tensor_parallel=1)):  # so it is the number of GPUs that it does not take
        raise UsageError(f"no split in tensor-parallel ranks and pipeline stages uses all of {count:,} GPUs",
                         hint="name one: --tp, --pp, --dp, or another number of GPUs")  # fmt: skip
    return serving.replace(tensor_parallel=count)  # the engine says why not
