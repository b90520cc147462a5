"""Workers in processes of their own: a job as one line of JSON on their standard input, lines of JSON from their
standard output; whatever else is printed there goes to standard error.

A worker tells how far it is, then gives one answer. It ends when its parent does, and its parent ends it whatever
happens, with all that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvctl.errors import ConfigError, KvctlError, SourceError, UsageError, hint_of
from kvctl.measure.child import child, end_with_parent, go_first
from kvctl.measure.memory import tells_shortage

_ERRORS: dict[str, type[KvctlError]] = {kind.__name__: kind for kind in (ConfigError, SourceError, UsageError)}
_MOST_SAID = 8192
_LONGEST_LINE = 64 * 2**20
_KILLED_HINT = "a machine with more memory, or fewer and shorter windows"

# -- the parent's side ----------------------------------------------------------------------------------


def ask(
    module: str, job: Mapping[str, Any], *, what: str, told: Callable[[Mapping[str, Any]], None], patience_s: float
) -> Mapping[str, Any]:
    """Run `python -m module` on a job and return its answer; `told` gets every line before it.

    `what` names the work in errors; `patience_s` is how long it may be silent.

    Raises:
        KvctlError: its own error, in its own kind; or it was killed, ran out of memory, broke off or fell silent.

    """
    with child(("-P", "-m", module)) as worker:
        lines: queue.Queue[bytes | None] = queue.Queue(maxsize=1000)
        said = _Tail(worker.stderr)
        reader = threading.Thread(target=_read, args=(worker.stdout, lines), daemon=True)
        reader.start()
        assert worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.write(json.dumps(job).encode() + b"\n")
            worker.stdin.flush()
        end = time.monotonic() + patience_s
        while True:
            try:
                # In short waits: one without end is not broken off by Ctrl-C everywhere.
                line = lines.get(timeout=0.5)
            except queue.Empty:
                if time.monotonic() > end:
                    raise KvctlError(f"{what}: its process has been silent for {patience_s:.0f} seconds") from None
                continue
            if line is None:
                break
            end = time.monotonic() + patience_s
            found = _parsed(line)
            if found is None:
                continue
            if "error" in found:
                hint = found.get("hint")
                raise _ERRORS.get(str(found["error"]), KvctlError)(
                    _plain(found.get("message")), hint=None if hint is None else _plain(hint)
                )
            if "answer" in found and isinstance(found["answer"], Mapping):
                return found["answer"]
            told(found)
        raise _ended(what, worker.wait(), said.text())


def _ended(what: str, status: int, said: str) -> KvctlError:
    """The error for a worker that gave no answer."""
    line = _last_line(said)
    if status == -signal.SIGKILL:
        return KvctlError(f"{what}: its process was killed, as the kernel does when memory ends", hint=_KILLED_HINT)
    if tells_shortage(line):
        return KvctlError(f"{what}: out of memory: {line}", hint=_KILLED_HINT)
    how = f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"
    return KvctlError(f"{what}: its process {how}" + (f": {line}" if line else ""))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _plain(value: Any) -> str:
    return "".join(letter for letter in str(value) if letter.isprintable())[:500]


def _parsed(line: bytes) -> Mapping[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = next(filter(tells_shortage, reversed(lines)), None)
    return _plain(found or (lines[-1] if lines else ""))[:300]


def _read(pipe: Any, into: queue.Queue[bytes | None]) -> None:
    """Whole lines; one that is too long to be an answer is dropped."""
    with contextlib.suppress(OSError, ValueError):
        while line := pipe.readline(_LONGEST_LINE):
            if line.endswith(b"\n"):
                into.put(line)
    into.put(None)


class _Tail:
    """Reads a pipe to its end in a thread, and keeps the last of it."""

    def __init__(self, pipe: Any) -> None:
        self._kept = b""
        self._thread = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._thread.start()

    def _read(self, pipe: Any) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := pipe.read1(65536):
                self._kept = (self._kept + data)[-_MOST_SAID:]

    def text(self) -> str:
        """What was kept; what the process left to others that still write is not waited for."""
        self._thread.join(timeout=2)
        return self._kept.decode(errors="replace")


# -- the worker's side ----------------------------------------------------------------------------------


def serve(work: Callable[[Mapping[str, Any], Callable[[Mapping[str, Any]], None]], Mapping[str, Any]]) -> None:
    """Answer one job and end, without the tidying of a Python that ends: there is nothing to tidy."""
    go_first()
    out = os.dup(1)
    os.dup2(2, 1)
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=end_with_parent, daemon=True).start()

    def tell(line: Mapping[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        while data:
            data = data[os.write(out, data) :]

    tell(_answered(work, job, tell))
    os._exit(0)


def _answered(work: Any, job: Mapping[str, Any], tell: Any) -> Mapping[str, Any]:
    from kvctl.measure.memory import is_out_of_memory, shortage

    try:
        return {"answer": work(job, tell)}
    except KvctlError as error:
        return {"error": type(error).__name__, "message": error.message, "hint": hint_of(error.hint, "quantize")}
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"error": "KvctlError", "message": f"out of memory: {shortage(error)}", "hint": _KILLED_HINT}
