"""--until-oom: the largest context or batch that really runs, each try in a process of its own.

A try that runs out of memory, or is killed for it, is a data point. On the CPU the machine is not driven that far: a try
is ended before it would leave the system too little.
"""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, KvctlError, SourceError, UsageError
from kvctl.measure.child import child, end
from kvctl.measure.memory import give_back, tells_shortage
from kvctl.measure.report import Try, UntilOom
from kvctl.measure.try_worker import Job
from kvctl.record import Record
from kvctl.units import MAX_TOKENS, MIB, format_bytes, plural

if TYPE_CHECKING:
    from kvctl.measure.run import ProfilePlan, Progress

STEPS = 2
"""Tokens that a try generates after its prompt: the first step is what needs most."""
FIRST = 64
"""Tokens of the first try, and the finest step in a search for a context; of a batch both are 1."""
RESOLUTION = 100
"""A search ends when what ran and what failed are a hundredth apart."""
_POLL_S = 0.01
_PATIENCE_S = 10.0
_LIBRARIES = 512 * MIB
"""What a process with torch and transformers takes before it loads a model, with some to spare."""
_MOST_SAID = 8192
_MOST_ANSWERED = 65536
_ERRORS: dict[str, type[KvctlError]] = {kind.__name__: kind for kind in (ConfigError, SourceError, UsageError)}
_WORKER = ("-P", "-m", "kvctl.measure.try_worker")


def reserve_of(total: int) -> int:
    """Bytes of the host's memory that no try may take: a thirty-second of it, and at least 512 MiB.

    A try fills some GiB a second, and is looked at a hundred times a second.
    """
    return max(512 * MIB, total // 32)


def until_oom(plan: ProfilePlan, what: str, progress: Progress, memory_limit: int | None = None) -> UntilOom:
    """Look for the largest "ctx" (with the largest batch of the plan) or "batch" (with its longest context).

    `progress.tried` is called with each try; `memory_limit` is bytes that a try's process (on the CPU) or its tensors (on a
    GPU) may take. Ctrl-C ends the try at hand and returns what is known. What this process holds of a device is not there
    for the tries: it should hold no model by then.

    Raises:
        UsageError: what this cannot be asked of.
        KvctlError: the model cannot be loaded, or fails otherwise than for want of memory.

    """
    _give_back()
    return _Search(plan, what, progress, memory_limit).run()


def _give_back() -> None:
    """What a model that ran in this process left in torch's and the C library's hands."""
    torch = sys.modules.get("torch")
    if torch is not None:
        give_back()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


class _OthersTookIt(Exception):
    """Other programs need the memory that is searched."""


class _Search:
    """What ran, what failed, and what is tried next."""

    def __init__(self, plan: ProfilePlan, what: str, progress: Progress, memory_limit: int | None) -> None:
        if what not in ("ctx", "batch"):
            raise UsageError(f"--until-oom: {what[:40]!r} is neither ctx nor batch")
        what = "context" if what == "ctx" else what
        if plan.wanted.tensor_parallel > 1:
            raise UsageError("--until-oom tries one process at a time", hint="leave --tp out")
        device = plan.wanted.device
        if memory_limit is not None and (plan.wanted.device_map is not None or device.partition(":")[0] == "mps"):
            raise UsageError(f"--memory-limit: what is taken on {plan.wanted.device_map or device} cannot be limited")
        self.plan, self.what, self.progress, self.limit = plan, what, progress, memory_limit
        asked = plan.asked
        self.decode = min(asked.decode, STEPS)
        self.other = max(asked.batches if what == "context" else asked.contexts)
        self.first = FIRST if what == "context" else 1
        positions = plan.spec.max_context
        self.most = MAX_TOKENS
        if what == "context" and positions is not None:
            self.most = positions - self.decode
        if self.most < 1 or (what == "batch" and positions is not None and self.other + self.decode > positions):
            raise UsageError(f"{plural(max(self.other if what == 'batch' else 1, 1), 'token')} and {self.decode} more are beyond the "
                             f"{positions:,} positions of {plan.spec.id}", hint="a shorter --ctx")  # fmt: skip
        self.tries: list[Try] = []
        self.low: int | None = None
        self.high: int | None = None
        self.predicted: int | None = None
        self.room: int | None = None

    def run(self) -> UntilOom:
        interrupted = short = False
        try:
            self._look()
        except _OthersTookIt:
            short = True
        except KeyboardInterrupt:
            interrupted = True
        predicted = self.predicted
        if predicted is not None:
            predicted = min(predicted, self.most)
        return UntilOom(
            self.what, self.low, self.high, predicted, tuple(self.tries), self._note(interrupted, short), interrupted
        )

    def _look(self) -> None:
        """A small one first: what does not run at all is found out, and how much room the loaded model leaves."""
        if not self._runs(min(self.first, self.most)):
            return
        assert self.low is not None
        step = self.low
        if self.predicted is not None and self.predicted > self.low:
            guess = min(self.predicted, self.most)
            step = max(guess // 16, self._resolution(guess))
            if not self._runs(guess):
                # Down from the guess, in doubled steps.
                while self.high is not None and self.high - step > self.low and not self._runs(self.high - step):
                    step *= 2
        while self.high is None and self.low < self.most:
            self._runs(min(self.low + step, self.most))
            step *= 2
        while self.high is not None and self.high - self.low > self._resolution(self.low):
            self._runs((self.low + self.high) // 2)

    def _resolution(self, size: int) -> int:
        """How far apart what ran and what failed may stay."""
        return max(size // RESOLUTION, self.first)

    def _runs(self, size: int) -> bool:
        """One try."""
        self.progress.now.say(f"trying {self._words(size)}" + (f", {self.low:,} ran" if self.low else "") + (
            f", {self.high:,} did not" if self.high else ""))  # fmt: skip
        reserve = reserve_of(_host().memory_bytes)
        job = Job(self.plan, self.what, size, self.other, self.decode, self.limit, reserve)
        _wait_for(reserve)
        begin = time.monotonic()
        end = _attempt(job)
        one = _judged(size, end, time.monotonic() - begin, first=not self.tries)
        if end.answer is not None and self.room is None:
            self.predicted, self.room = end.answer.get("predicted"), end.answer.get("room_bytes")
        self.tries.append(one)
        if one.ran:
            self.low = max(size, self.low or 0)
        else:
            self.high = size if self.high is None else min(size, self.high)
        self.progress.tried(one)
        return one.ran

    def _words(self, size: int) -> str:
        context, batch = (size, self.other) if self.what == "context" else (self.other, size)
        return f"{context:,} tokens × {batch:,}"

    def _note(self, interrupted: bool, short: bool) -> str:
        notes = []
        beside = (
            f"with a batch of {self.other:,}" if self.what == "context" else f"with {plural(self.other, 'token')} each"
        )
        notes.append(f"{beside}, random tokens, and {plural(self.decode, 'token')} after the prompt")
        if self.low is not None and self.low == self.most and self.what == "context":
            notes.append(
                f"the model has no more positions than {self.most + self.decode:,}: memory is not what ends it"
            )
        if self.plan.wanted.layers is not None:
            notes.append("of the layers that were kept alone")
        if self.limit is not None:
            notes.append(f"each try limited to {format_bytes(self.limit)}")
        if self.room is not None and self.predicted is not None:
            notes.append(f"predicted: cache and activations (estimated) within {format_bytes(self.room)}, what was left beside "
                         "the loaded model")  # fmt: skip
        elif self.tries and self.low is None:
            notes.append("the loaded model leaves no room, or does not fit itself")
        elif self.tries:
            notes.append("no prediction: " + ("how much memory is left is not known here" if self.room is None else
                         "what its activations take is not known"))  # fmt: skip
        if short:
            notes.append("ended early: other programs took the memory meanwhile")
        if interrupted:
            notes.append("interrupted: larger ones may run" if self.low else "interrupted")
        return "; ".join(notes)


# -- one try ------------------------------------------------------------------------------------------


class End(Record):
    """How a try's process ended."""

    answer: Mapping[str, Any] | None
    """Its own word; None where it gave none."""
    status: int
    """Exit status; negative for a signal."""
    stopped: str | None
    """Why this process ended it."""
    said: str
    """The last line that it wrote elsewhere."""
    most: int
    """Bytes of RAM that it was seen with."""


def _judged(size: int, end: End, seconds: float, *, first: bool) -> Try:
    """What a try's end means; of the first, what is no matter of memory is an error."""
    answer = end.answer or {}
    peak = answer.get("peak_bytes") or end.most or None
    if end.stopped is not None:
        return Try(size, False, f"stopped: {end.stopped}", peak, seconds)
    if "error" in answer:
        if not first:
            return Try(size, False, f"refused: {answer.get('message')}", peak, seconds)
        raise _ERRORS.get(str(answer["error"]), KvctlError)(str(answer.get("message")), hint=answer.get("hint"))
    if end.answer is not None:
        ended = str(answer.get("ended"))
        if not answer.get("ran") and not ended.startswith("out of memory"):
            ended = f"out of memory: {ended}"
        return Try(size, bool(answer.get("ran")), ended, peak, seconds)
    if tells_shortage(end.said):
        return Try(size, False, f"out of memory: {end.said}", peak, seconds)
    how = f"killed by {_signal_name(-end.status)}" if end.status < 0 else f"ended with status {end.status}"
    if end.status == -signal.SIGKILL:
        return Try(size, False, f"{how}: the kernel does that when memory ends", peak, seconds)
    if end.said:
        how += f": {end.said}"
    if not first:
        return Try(size, False, how, peak, seconds)
    raise KvctlError(f"a try of {size:,} {how}",
                     hint="kvctl profile MODEL without --until-oom runs it in this process")  # fmt: skip


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _wait_for(reserve: int) -> None:
    """Memory that a try held comes back a moment after its end; what others hold may not come back at all."""
    end = time.monotonic() + _PATIENCE_S
    while _host().available_bytes < reserve + _LIBRARIES:
        if time.monotonic() > end:
            raise _OthersTookIt
        time.sleep(0.1)


def _attempt(job: Job) -> End:
    """Run a job in a process of its own, and watch the machine's memory meanwhile.

    Raises:
        _OthersTookIt: memory became short, and for the most part it was not the job that took it.

    """
    free = _host().available_bytes - job.reserve
    with _child() as worker:
        answer, said = _Reader(worker.stdout, _MOST_ANSWERED), _Reader(worker.stderr, _MOST_SAID)
        stopped, most = None, 0
        assert worker.stdin is not None
        with suppress(BrokenPipeError):
            worker.stdin.write(pickle.dumps(job))
            worker.stdin.flush()
        rss = _rss_reader(worker.pid)
        while worker.poll() is None:
            most = max(most, held := rss())
            stopped = _too_much(job, held)
            if stopped is not None:
                end(worker)
                if held < free // 2 and not stopped.startswith("took"):
                    raise _OthersTookIt
                break
            time.sleep(_POLL_S)
        status = worker.wait()
        return End(_parsed(answer.text()), status, stopped, _last_line(said.text()), most)


def _too_much(job: Job, held: int) -> str | None:
    """Why a try may not go on."""
    limit = job.memory_limit
    on_host = not job.plan.wanted.device.startswith("cuda") and job.plan.wanted.device_map is None
    if limit is not None and on_host and held > limit + max(limit // 50, 32 * MIB):
        return f"took {format_bytes(held)}, more than the limit of {format_bytes(limit)}"
    if _host().available_bytes < job.reserve:
        return f"would have left less than {format_bytes(job.reserve)} of the machine's memory"
    return None


def _host() -> Any:
    from kvctl.hardware.host import host_device

    return host_device()


def _child() -> AbstractContextManager[subprocess.Popen[bytes]]:
    """A worker."""
    return child(_WORKER)


class _Reader:
    """Reads a pipe to its end in a thread, and keeps the last of it."""

    def __init__(self, pipe: Any, most: int) -> None:
        self._kept = b""
        self._most = most
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def _read(self, pipe: Any) -> None:
        with suppress(OSError, ValueError):
            while data := pipe.read1(65536):
                self._kept = (self._kept + data)[-self._most :]

    def text(self) -> str:
        """What was kept; what the process left to others that still write is not waited for."""
        self._thread.join(timeout=2)
        return self._kept.decode(errors="replace")


def _parsed(text: str) -> Mapping[str, Any] | None:
    """The answer's line; None where it is none."""
    try:
        found = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = next(filter(tells_shortage, reversed(lines)), None)
    line = found or (lines[-1] if lines else "")
    return "".join(letter for letter in line if letter.isprintable())[:300]


def _rss_reader(pid: int) -> Callable[[], int]:
    """Bytes that a process has in RAM; 0 once it is gone."""
    import psutil

    try:
        process = psutil.Process(pid)
    except psutil.Error:
        return lambda: 0

    def read() -> int:
        try:
            return int(process.memory_info().rss)
        except psutil.Error:
            return 0

    return read
