"""Processes that run elsewhere: their lines are read as they come, and nothing of them outlives the call.

A child leads a process group of its own, which is killed with it. Its standard input stays open for as long as the parent
lives: workers end when it closes. POSIX only, as are the locks.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from kvctl.errors import KvctlError
from kvctl.record import Record
from kvctl.sources import jsonfile

MOST_LINE = 1 << 20
"""Bytes of a line."""
_TICK_S = 0.1
_GRACE_S = 5.0
"""From the request to end to the end by force."""
_GONE_S = 1.0
"""For what was killed to be gone; whoever is then left waits for its own parent to notice."""
_FOREIGN = ("PYTHON", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "PIP_ROOT", "PIP_REQUIREMENT", "PIP_EDITABLE", "PIP_PYTHON",
            "PIP_NO_DEPS", "PIP_DRY_RUN", "PIP_REPORT", "PIP_LOG", "PIP_QUIET", "PIP_UPGRADE", "VIRTUAL_ENV", "CONDA_PREFIX",
            "__PYVENV_LAUNCHER__", "LD_PRELOAD")  # fmt: skip
"""Variables that lead a Python to other places than its own; how pip reaches its indexes stays as it is."""


class SilenceError(KvctlError):
    """Nothing was heard of a child for too long."""


class Ended(Record):
    """How a child ended."""

    code: int
    """As subprocess has it: negative for a signal."""

    @property
    def how(self) -> str:
        """In words."""
        if self.code >= 0:
            return f"ended with status {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def environment(folder: Path | None = None, **more: str) -> dict[str, str]:
    """This process's variables, without those that would mix two Pythons; `folder`: the environment whose programs come first."""
    out = {key: value for key, value in os.environ.items() if not key.startswith(_FOREIGN)}
    out |= {
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    if folder is not None:
        out["PATH"] = f"{folder / 'bin'}{os.pathsep}{out.get('PATH', os.defpath)}"
        out["VIRTUAL_ENV"] = str(folder)
    return out | more


class Log:
    """What a child says, in a file that does not grow without end: its first and last megabytes."""

    def __init__(self, path: Path, most: int = 4 << 20) -> None:
        self.path, self._most, self._size, self._left = path, most, 0, 0
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] | None = path.open("wb")

    def write(self, data: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):  # a full disk is told by what matters
            if self._file is None:
                return
            if self._size < self._most:
                self._file.write(data)
                self._file.flush()
                self._size += len(data)
                return
            self._tail.append(data)
            self._tail_size += len(data)
            while self._tail_size > self._most and len(self._tail) > 1:
                gone = self._tail.popleft()
                self._tail_size -= len(gone)
                self._left += len(gone)

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._file is not None:
                if self._left:
                    self._file.write(f"\n... {self._left} bytes left out ...\n".encode())
                for data in self._tail:
                    self._file.write(data)
                self._file.close()
                self._file = None

    def last_line(self) -> str:
        """The last one that is not empty; of a traceback that is what went wrong."""
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(max(0, self.path.stat().st_size - 16384))
            lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
            return jsonfile.plain(lines[-1])[:300] if lines else ""
        return ""


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    folder: Path,
    log: Log,
    heard: Callable[[bytes], bool],
    given: bytes = b"",
    silence: float = 1800.0,
) -> Ended:
    """Run a child in `folder`; `heard` is called with each line of its standard output, and says whether it is a sign of life.

    `given` is what it reads on standard input. Its standard error goes to the log. What `heard` raises ends the child, and
    so does Ctrl-C.

    Raises:
        KvctlError: it cannot be started; it sends a line without end.
        SilenceError: no sign of life for `silence` seconds.

    """
    try:
        child = subprocess.Popen(
            list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(env), cwd=folder,
            start_new_session=True, bufsize=0,
        )  # fmt: skip
    except OSError as error:
        raise KvctlError(f"cannot start {jsonfile.plain(argv[0])[:200]}: {error.strerror or error}") from None
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    said, writing = child.stderr, child.stdin
    pump = threading.Thread(target=_pump, args=(said, log), daemon=True)
    feed = threading.Thread(target=_feed, args=(writing, given), daemon=True)
    pump.start()
    feed.start()
    try:
        _listen(child, heard, silence)
        return Ended(child.wait())
    finally:
        _end(child)
        pump.join(_GRACE_S)
        feed.join(_GRACE_S)
        for pipe in (writing, child.stdout, said):
            with contextlib.suppress(OSError):
                pipe.close()


def _pump(pipe: IO[bytes], log: Log) -> None:
    with contextlib.suppress(OSError, ValueError):
        while data := os.read(pipe.fileno(), 65536):
            log.write(data)


def _feed(pipe: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    with contextlib.suppress(OSError, ValueError):
        while view:
            view = view[os.write(pipe.fileno(), view[:65536]) :]


def _listen(child: subprocess.Popen[bytes], heard: Callable[[bytes], bool], silence: float) -> None:
    """Until it has ended; what others hold of its output is not waited for."""
    assert child.stdout is not None
    pipe, rest, last = child.stdout.fileno(), b"", time.monotonic()
    while True:
        ready, _, _ = select.select([pipe], [], [], _TICK_S)
        data = os.read(pipe, 65536) if ready else None
        if data:
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if heard(line):
                    last = time.monotonic()
            if len(rest) > MOST_LINE:
                raise KvctlError("it sends lines without end")
        elif child.poll() is not None:
            if rest:
                heard(rest)
            return
        elif ready:
            time.sleep(_TICK_S)  # it has closed its output and goes on
        if time.monotonic() - last > silence:
            raise SilenceError(f"nothing was heard of it for {silence:.0f} s")


def _end(child: subprocess.Popen[bytes]) -> None:
    """The whole group: asked first, where it is still at work, then by force."""
    try:
        if child.poll() is None:
            _signal(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_S)
    finally:
        # Whoever is left of the group; the number stays its own while anyone is.
        _signal(child.pid, signal.SIGKILL)
        child.wait()
        until = time.monotonic() + _GONE_S
        while _signal(child.pid, 0) and time.monotonic() < until:
            time.sleep(0.005)


def _signal(group: int, number: int) -> bool:
    """Whether anyone is there to take it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
