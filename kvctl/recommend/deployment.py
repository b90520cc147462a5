"""One way to serve a model, complete enough to be sized, timed and started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.allocation import Serving
    from kvctl.engines import Engine
    from kvctl.hardware import Device


class Deployment(Record):
    """What is loaded, by which engine, on what, and with which settings; nothing is left to an engine's default that changes memory."""

    base: str
    """The model that was asked for."""
    model: str
    """What the engine is told to load: the base itself, a checkpoint of it in `weights`, or the folder where one has to be made."""
    engine: Engine
    serving: Serving
    """Parallelism, limits and budget, as the engine is told; `max_sequences` (`slots` of llama.cpp) are those of one replica."""
    context: int
    """Tokens of the longest request, prompt and answer; each of llama.cpp's slots has them, so that -c is `cells`."""
    device: Device
    """One of the GPUs, or the host."""
    weights: str
    """A name of kvctl.weight_formats, or of a GGUF type."""
    made: str = "stored"
    """How they come to be in that format: "stored" (the checkpoint has it), "load" (the engine converts while it loads) or "make"
    (`kvctl quantize` or another tool has to first)."""
    dtype: str = "auto"
    """What the engine is told to compute in: float16 on GPUs without bfloat16, else the checkpoint's."""
    kv_dtype: str = "auto"
    """The engine's own word for the format of keys and values."""
    gpus: int = 1
    """On each node; 0 on a host alone."""
    nodes: int = 1
    replicas: int = 1
    """Servers like this one, side by side behind a router, each on GPUs of its own."""

    @property
    def cells(self) -> int:
        """Tokens of all slots together, each in whole 256ths, as llama.cpp counts -c."""
        return (self.serving.slots or 1) * -(-self.context // 256) * 256

    @property
    def all_gpus(self) -> int:
        """GPUs of all replicas."""
        return self.gpus * self.nodes * self.replicas
