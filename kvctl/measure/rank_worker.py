"""One rank of `kvctl.measure.ranks`: `python -m kvctl.measure.rank_worker`, told on stdin, heard on stdout.

stdin brings one pickled `Told` and then stays open: its end means that the parent is gone, and this process goes too.
stdout carries frames (four bytes of length, big-endian, and a pickle); what libraries print goes to stderr.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import pickle
import shutil
import sys
import threading
import time
from typing import Any

from kvctl.errors import KvctlError, UsageError
from kvctl.measure.rank_messages import FRAME, Doing, Done, Failed, Loaded, Measured, Told
from kvctl.measure.report import CacheRow, Point
from kvctl.measure.run import Now
from kvctl.record import Record

_EVERY_S = 0.1
"""Between two looks at what is happening, for whoever shows it."""
_PATIENCE = datetime.timedelta(hours=2)
"""For the slowest rank in any exchange: loading takes long, and not equally long everywhere."""


class Voice:
    """Writes frames; from several threads."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._lock = threading.Lock()

    def say(self, message: Record) -> None:
        data = pickle.dumps(message)
        with self._lock:
            self._file.write(FRAME.pack(len(data)) + data)
            self._file.flush()


class _OutOfMemoryError(Exception):
    """A point that did not fit: the other ranks are in the middle of it, so this is the end of the run."""


# -- the rank -----------------------------------------------------------------------------------------


def main() -> None:
    """Runs until everything is measured, something fails, or the parent is gone."""
    voice = Voice(os.fdopen(os.dup(1), "wb"))
    os.dup2(2, 1)
    told: Told = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_leave_with_parent, args=(told,), name="kvctl parent", daemon=True).start()
    status = 1
    try:
        voice.say(Done(_run(told, voice)))
        status = 0
    except _OutOfMemoryError as error:
        voice.say(Failed(told.rank, "KvctlError", str(error), None, False))
    except KvctlError as error:
        voice.say(Failed(told.rank, type(error).__name__, error.message, error.hint, _follows(error)))
    except BrokenPipeError:
        pass
    except BaseException as error:
        from kvctl.measure.faults import first_line

        if os.environ.get("KVCTL_DEBUG"):
            import traceback

            traceback.print_exc()
        text = f"{type(error).__name__}: {first_line(error)}"
        voice.say(Failed(told.rank, "KvctlError", text, None, _follows(error)))
    # Not by the usual way: threads of process groups would wait for ranks that are gone.
    os._exit(status)


def _leave_with_parent(told: Told) -> None:
    while os.read(0, 1):
        pass
    if told.nnodes == 1:  # nobody else is left to remove the folder
        shutil.rmtree(os.path.dirname(told.store), ignore_errors=True)
    os._exit(1)


def _follows(error: BaseException | None) -> bool:
    """Whether an error says that the exchange with other ranks broke."""
    while error is not None:
        text = str(error)
        if type(error).__name__.startswith("Dist") or "gloo" in text or "NCCL" in text or "closed by peer" in text:
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _run(told: Told, voice: Voice) -> tuple[str, ...]:
    """Measures; what there is to note after it."""
    import torch.distributed as dist

    from kvctl.measure.hush import quiet, slow_kernels
    from kvctl.measure.points import measure
    from kvctl.measure.run import ready, settings_of

    now = Now()
    leads = told.local_rank == 0
    if leads:
        threading.Thread(target=_tell, args=(now, voice), name="kvctl progress", daemon=True).start()
    now.doing = "waiting for all ranks"
    plan = told.plan.replace(wanted=told.plan.wanted.replace(device=_device(told), tensor_parallel=told.world))
    _meet(told)
    # On the CPU whatever the model runs on: what is exchanged here is small, and must not wait for a GPU's queue.
    control = dist.new_group(backend="gloo", timeout=_PATIENCE)
    _check_alike(told, control)
    # All ranks measure the hardware at once, as they run: on a CPU each gets its part of the machine.
    model = ready(plan, now)
    loaded = model.loaded
    facts = {"rank": told.rank, "device": loaded.device, "weights_bytes": loaded.weights_bytes}
    rows = _everywhere(facts, told.world, control)
    if leads:
        voice.say(Loaded(settings_of(plan, loaded), model.notes, tuple(rows)))

    def done(point: Point) -> None:
        if point.error is not None:
            raise _OutOfMemoryError(point.error)
        found = _everywhere((point, point.memory and point.memory.peak_bytes), told.world, control)
        if leads:
            cache = tuple(_by_phase([each for each, _ in found]))
            voice.say(Measured(found[0][0].replace(cache=cache), tuple(peak for _, peak in found)))

    def line_up() -> None:
        dist.barrier(group=control)

    with quiet() as said:
        # What others take of the processors is not told: here the other ranks would be among them.
        measure(loaded.replace(line_up=line_up), plan.asked, model.dtype, model.tokens, model.rates, now, done)
    return tuple(slow_kernels(said))


def _by_phase(points: list[Point]) -> list[CacheRow]:
    """The rows of all ranks: phase by phase, in each by rank."""
    rows = [row.replace(rank=rank) for rank, point in enumerate(points) for row in point.cache]
    phases = list(dict.fromkeys(row.phase for row in rows))
    return sorted(rows, key=lambda row: (phases.index(row.phase), row.rank))


def _everywhere(value: Any, world: int, group: Any) -> list[Any]:
    """What every rank has, by rank."""
    import torch.distributed as dist

    found: list[Any] = [None] * world
    dist.all_gather_object(found, value, group=group)
    return found


def _tell(now: Now, voice: Voice) -> None:
    """Says what happens, as often as somebody could read it: not within what is timed."""
    last = None
    while True:
        seen = Doing(now.doing, now.step, now.steps)
        if seen != last:
            try:
                voice.say(seen)
            except OSError:
                return
            last = seen
        time.sleep(_EVERY_S)


def _device(told: Told) -> str:
    """This rank's device, checked."""
    if told.plan.wanted.device == "cpu":
        return "cpu"
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < told.nproc:
        raise UsageError(f"{told.nproc} ranks on this machine, and torch sees {count} CUDA devices",
                         hint="fewer --tp, or --device cpu")  # fmt: skip
    device = f"cuda:{told.local_rank}"
    torch.cuda.set_device(told.local_rank)
    return device


# -- meeting ------------------------------------------------------------------------------------------


def _meet(told: Told) -> None:
    """The process group of all ranks.

    Raises:
        KvctlError: not all came in time.

    """
    import torch.distributed as dist

    deadline = time.monotonic() + told.meeting_s
    store = _store(told)
    store.add("kvctl/ranks", 1)
    while (here := int(store.add("kvctl/ranks", 0))) < told.world:
        if time.monotonic() > deadline:
            raise KvctlError(f"only {here} of {told.world} ranks came within {told.meeting_s:g} s",
                             hint="start the same command on every node, each with its own --node-rank")  # fmt: skip
        time.sleep(0.05)
    store.set_timeout(_PATIENCE)
    backend: dict[str, Any] = {"backend": "gloo"}
    if told.plan.wanted.device != "cpu":
        import torch

        backend = {"backend": "nccl", "device_id": torch.device("cuda", told.local_rank)}
    dist.init_process_group(store=store, rank=told.rank, world_size=told.world, timeout=_PATIENCE, **backend)


def _store(told: Told) -> Any:
    import torch.distributed as dist

    if told.nnodes == 1:
        return dist.FileStore(told.store, told.world)
    host, _, port = told.store.rpartition(":")
    try:
        return dist.TCPStore(
            host.strip("[]"), int(port), told.world, told.rank == 0, wait_for_workers=False,
            timeout=datetime.timedelta(seconds=told.meeting_s),
        )  # fmt: skip
    except (RuntimeError, ValueError, OSError) as error:
        if told.rank == 0:
            from kvctl.measure.faults import first_line

            raise KvctlError(f"cannot listen at {told.store}: {first_line(error)}",
                             hint="--rdzv-endpoint is an address of the first node, and a free port of it") from None  # fmt: skip
        raise KvctlError(f"the first node does not answer at {told.store} within {told.meeting_s:g} s",
                         hint="start it with --node-rank 0; the port must be open between the nodes") from None  # fmt: skip


def _check_alike(told: Told, group: Any) -> None:
    """Refuses nodes that were started with other options: they would wait for one another for ever."""
    if told.nnodes == 1:
        return
    plan = told.plan
    text = repr((plan.spec.id, plan.spec.config, plan.asked, plan.wanted, plan.limits, told.nproc))
    mine = hashlib.sha256(text.encode()).hexdigest()
    others = _everywhere(mine, told.world, group)
    if len(set(others)) > 1:
        raise UsageError("the nodes were started with different models or options", hint="only --node-rank may differ")


if __name__ == "__main__":
    main()
