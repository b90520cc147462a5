"""One try of --until-oom, in the process that this module is: a job on standard input, its answer on standard output.

The parent (kvctl.measure.oom) starts it with `python -m`. Whatever else is printed goes to standard error.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
from typing import TYPE_CHECKING, Any

from kvctl.measure.child import end_with_parent, go_first
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.formats import DType
    from kvctl.measure.loaded import Loaded
    from kvctl.measure.points import Asked
    from kvctl.measure.run import ProfilePlan

_WARM = 8
"""Tokens of the pass before the one that counts: libraries start their threads and take their workspaces in it."""


class Job(Record):
    """What is tried. It comes through a pipe, pickled by the parent."""

    plan: ProfilePlan
    what: str
    """context or batch: what `size` is."""
    size: int
    other: int
    """The one of both that stays."""
    decode: int
    memory_limit: int | None
    """Bytes that this process (on the CPU) or its tensors (on a GPU) may take."""
    reserve: int
    """Bytes of the host's memory that are left alone."""

    @property
    def context(self) -> int:
        """Tokens of a prompt."""
        return self.size if self.what == "context" else self.other

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.size if self.what == "batch" else self.other


def main() -> None:
    """Answer one job and end, without the tidying of a Python that ends: there is nothing to tidy."""
    go_first()
    answer = os.dup(1)
    os.dup2(2, 1)
    job = pickle.load(sys.stdin.buffer)
    threading.Thread(target=end_with_parent, daemon=True).start()
    told = _told(job)
    os.write(answer, json.dumps(told).encode() + b"\n")
    os._exit(0)


def _told(job: Job) -> dict[str, Any]:
    """What happened, as JSON has it."""
    from kvctl.errors import KvctlError
    from kvctl.measure.memory import HighWater, OutOfMemoryError, is_out_of_memory, shortage

    mark = HighWater()
    cap = _Cap(job)
    try:
        told = attempt(job, cap)
    except OutOfMemoryError as error:
        told = {"ran": False, "ended": error.message}
    except KvctlError as error:
        told = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        told = {"ran": False, "ended": shortage(error)}
    cap.lift()
    if not told.get("peak_bytes"):
        told["peak_bytes"] = _peak(job.plan.wanted.device, mark)
    return told


def attempt(job: Job, cap: _Cap) -> dict[str, Any]:
    """Load the model and run it once: prefill of the whole prompt and some steps of decoding."""
    from transformers import PreTrainedModel  # noqa: F401 (libraries are in RAM before what is left is counted)

    from kvctl.engines import TRANSFORMERS
    from kvctl.measure.load import load
    from kvctl.measure.memory import give_back
    from kvctl.measure.passes import random_ids
    from kvctl.measure.points import measure
    from kvctl.measure.report import Point
    from kvctl.measure.run import Now
    from kvctl.size import SizePlan, prepare

    plan = job.plan
    dtype = prepare(plan.spec, SizePlan(TRANSFORMERS, dtype=plan.wanted.dtype)).dtype
    cap.put()
    loaded = load(plan.spec, plan.wanted, dtype)
    vocabulary = getattr(loaded.model.config.get_text_config(decoder=True), "vocab_size", None) or 1000
    points: list[Point] = []

    def run(context: int, batch: int) -> Point:
        asked = plan.asked.replace(contexts=(context,), batches=(batch,), decode=job.decode, repeat=0)
        tokens = lambda rows, length: random_ids(vocabulary, rows, length, asked.seed)  # noqa: E731
        measure(loaded, asked, dtype, tokens, None, Now(), points.append)
        return points[-1]

    point = run(min(_WARM, job.context), 1)
    told: dict[str, Any] = {}
    if point.error is None:
        give_back()
        cap.put()
        told["room_bytes"] = room = cap.room()
        told["predicted"] = None if room is None else fitting(loaded, plan.asked, dtype, job, room)
        told["weights_bytes"] = loaded.weights_bytes
        point = run(job.context, job.batch)
    told |= {"ran": point.error is None, "ended": point.error or "ran"}
    if point.memory is not None:
        told["peak_bytes"] = point.memory.peak_bytes
    return told


def fitting(loaded: Loaded, asked: Asked, dtype: DType, job: Job, room: int) -> int | None:
    """The largest size whose cache, as `size` has it, and activations, as it estimates them, take no more than `room`.

    None where what transformers takes for activations is not known.
    """
    from kvctl.allocation import Serving
    from kvctl.engines.transformers.memory import overheads
    from kvctl.errors import KvctlError
    from kvctl.measure.points import Predictor
    from kvctl.search import largest
    from kvctl.units import MAX_TOKENS

    config = loaded.model.config
    encoder = asked.encoder_tokens if getattr(config, "is_encoder_decoder", False) else None
    predictor = Predictor(loaded.spec, dtype, encoder)
    eager = getattr(config, "_attn_implementation", None) == "eager"
    if eager and asked.prefill_chunk is not None:
        return None  # scores of a chunk over all that came before it
    serving = Serving(attention_backend="eager" if eager else None)

    def parts(tokens: int) -> dict[str, int]:
        found = overheads(loaded.spec, serving, dtype_bytes=dtype.bytes, device_bytes=room, gpu_name=None, version=None,
                          context=tokens)  # fmt: skip
        return {part.name: part.bytes for part in found}

    def fits(size: int) -> bool:
        tried = job.replace(size=size)
        at_once = min(tried.context, asked.prefill_chunk or tried.context)
        activations = parts(at_once * (1 if eager else tried.batch))["activations"] * (tried.batch if eager else 1)
        growth = parts(tried.context * tried.batch).get("cache growth", 0)
        return predictor.bytes(tried.context + tried.decode, tried.batch) + activations + growth <= room

    try:
        return largest(fits, job.size, MAX_TOKENS)
    except KvctlError:
        return None


class _Cap:
    """A limit to what this process may take, and what is left below it."""

    def __init__(self, job: Job) -> None:
        self._limit, self._reserve = job.memory_limit, job.reserve
        self._device = "cuda" if job.plan.wanted.device_map else job.plan.wanted.device
        self._whole = job.plan.wanted.device_map is None
        self._before: tuple[int, int] | None = None

    def put(self) -> None:
        """Sets the limit, anew where what is in RAM has become more or less than what is reserved."""
        if self._limit is None:
            return
        if self._device.startswith("cuda"):
            import torch

            total = torch.cuda.mem_get_info(self._device)[1]
            torch.cuda.set_per_process_memory_fraction(min(self._limit / total, 1.0), self._device)
        elif sys.platform.startswith("linux"):
            import resource

            import psutil

            # The kernel limits what is reserved, and stacks of threads are hardly used: what is in RAM counts.
            used = psutil.Process().memory_info()
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            self._before = self._before or (soft, hard)
            wanted = max(self._limit - used.rss + used.data, 0)
            resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))

    def lift(self) -> None:
        """Takes the limit off, so that what happened can be told."""
        if self._before is not None:
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, self._before)

    def room(self) -> int | None:
        """Bytes that may still be taken; None where that is not known."""
        if self._device.startswith("cuda") and self._whole:
            import torch

            used, kept = torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)
            left = int(torch.cuda.mem_get_info(self._device)[0] + kept - used)
            return left if self._limit is None else min(left, self._limit - int(used))
        if self._device != "cpu":
            return None
        import psutil

        from kvctl.hardware.host import host_device

        left = host_device().available_bytes - self._reserve
        return left if self._limit is None else min(left, self._limit - int(psutil.Process().memory_info().rss))


def _peak(device: str, mark: Any) -> int | None:
    """The most that was held by a try that broke off."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.max_memory_allocated(device)) if torch.cuda.is_initialized() else None
    found: int | None = mark.read()
    return found


if __name__ == "__main__":
    main()
