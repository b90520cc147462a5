"""Models whose layers lie on several devices (accelerate's device map): which they are, and their memory together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, UsageError
from kvctl.measure.memory import Watcher, watch
from kvctl.measure.report import MemoryUse

if TYPE_CHECKING:
    from kvctl.measure.loaded import Loaded, Wanted

_SUMMED = ("before_bytes", "steady_bytes", "peak_bytes", "reserved_bytes", "process_bytes")


def placed_by(model: Any, wanted: Wanted) -> Mapping[str, str]:
    """Where a model that has no memory yet is to lie: devices by prefixes of names."""
    if wanted.device_map is None:
        return {"": wanted.device}
    if isinstance(wanted.device_map, Mapping):
        return wanted.device_map
    if wanted.device_map != "auto":
        raise UsageError(f"--device-map: {wanted.device_map[:40]!r} with random weights", hint="auto")
    return {"": "cpu"} if wanted.device == "cpu" else spread(model)


def spread(model: Any) -> dict[str, str]:
    """A device for every part of a model that lies on meta, as `device_map="auto"` chooses them; parts by prefix.

    Raises:
        ConfigError: it does not fit the devices and the host's memory.

    """
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    whole = list(model._no_split_modules or ())
    memory = get_balanced_memory(model, no_split_module_classes=whole)
    found = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=whole)
    out = {part: name_of(device) for part, device in found.items()}
    if "disk" in out.values():
        raise ConfigError(
            "the model fits neither the devices nor the host's memory", hint="--layers keeps a few layers"
        )
    return out


def dispatch(model: Any, placed: Mapping[str, str]) -> None:
    """Hooks that move what a layer takes to where it lies."""
    if len(set(placed.values())) > 1:
        from accelerate import dispatch_model

        dispatch_model(model, device_map=dict(placed))


def name_of(device: Any) -> str:
    """ "cuda:1" of what accelerate and torch call it: 1, "cuda:1", device(type="cuda", index=1)."""
    return f"cuda:{device}" if isinstance(device, int) else str(device)


def place_of(placed: Mapping[str, str], path: str) -> str:
    """The device of a tensor by its full name: that of the longest prefix."""
    parts = path.split(".")
    for length in range(len(parts), -1, -1):
        found = placed.get(".".join(parts[:length]))
        if found is not None:
            return found
    return next(iter(placed.values()))


def used(model: Any, fallback: str) -> tuple[str, ...]:
    """Where the model computes: devices in order of first use; weights that wait on the host or the disk count for none."""
    found: dict[str, None] = {}
    for module in model.modules():
        device = _runs_on(module)
        if device is not None:
            found[device] = None
    return tuple(found) or (fallback,)


def input_device(model: Any, fallback: str) -> str:
    """Where token ids have to be: the embedding's device."""
    embedding = model.get_input_embeddings()
    return (_runs_on(embedding) if embedding is not None else None) or fallback


def _runs_on(module: Any) -> str | None:
    """Where a module that has weights of its own runs; None where it has none."""
    weights = list(module.parameters(recurse=False))
    if not weights:
        return None
    hook = getattr(module, "_hf_hook", None)
    for each in (hook, *getattr(hook, "hooks", ())):
        device = getattr(each, "execution_device", None)
        if device is not None and weights[0].is_meta:
            return name_of(device)
    return None if weights[0].is_meta else str(weights[0].device)


def located(loaded: Loaded, wanted: Wanted) -> Loaded:
    """With the devices that a device map really gave it."""
    if wanted.device_map is None:
        return loaded
    devices = used(loaded.model, loaded.device)
    notes = loaded.notes
    accelerators = [device for device in devices if device != "cpu"]
    if len(accelerators) > 1:
        notes += (f"memory is the sum over {', '.join(accelerators)}; their peaks need not have come at one time",)
    if any(parameter.is_meta for parameter in loaded.model.parameters()):
        notes += (
            "part of the weights waits on the host or the disk, and is brought at every pass; that memory is not counted",
        )
    return loaded.replace(device=input_device(loaded.model, loaded.device), devices=devices, notes=notes)


def synchronizer(devices: tuple[str, ...]) -> Callable[[], None]:
    """Waits for all that was asked of the accelerators among these."""
    import torch

    cuda = [device for device in devices if device.startswith("cuda")]
    mps = any(device.startswith("mps") for device in devices)

    def wait() -> None:
        for device in cuda:
            torch.cuda.synchronize(device)
        if mps:
            torch.mps.synchronize()

    return wait


class _Together:
    """What `watch_all` hands out: several watchers as one."""

    def __init__(self, watchers: list[Watcher]) -> None:
        self._watchers = watchers

    def settle(self) -> None:
        for watcher in self._watchers:
            watcher.settle()

    @property
    def use(self) -> MemoryUse:
        """Sums over the devices; of peaks that need not have come at one time."""
        uses = [watcher.use for watcher in self._watchers]
        if len(uses) == 1:
            return uses[0]
        sums = {}
        for name in _SUMMED:
            values = [getattr(use, name) for use in uses]
            sums[name] = None if None in values else sum(values)
        return uses[0].replace(**sums)


@contextmanager
def watch_all(devices: tuple[str, ...]) -> Iterator[_Together]:
    """Watches the accelerators among the devices; the host where there are none."""
    watched = [device for device in devices if device != "cpu"] or ["cpu"]
    with ExitStack() as stack:
        yield _Together([stack.enter_context(watch(device)) for device in watched])
