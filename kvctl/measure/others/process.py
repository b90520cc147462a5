"""Another program as a child: its output in a file, its end never after ours, its failure in one plain line."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvctl.errors import KvctlError

Tell = Callable[[str], None]
"""Takes one line: what happens."""

MOST_LOG = 256 * 2**20
"""Bytes of output after which a program is taken to be out of hand."""
_TAIL = 256 * 2**10
_GRACE_S = 2.0
_POLL_S = 0.05

# Why a program ended, the surest first; looked for from the end. Then come lines that only say that it did.
_TELLING = (
    re.compile(r"out of memory|insufficient memory|cannot allocate memory|bad_alloc", re.IGNORECASE),
    re.compile(r"^(?:\([^()]*\) *)?(?:ERROR [\d\- :,]+\[[^]]*\] *)?(?:[a-z_]+\.)*[A-Z]\w*(?:Error|Exception): .+"),
    re.compile(
        r"\berror\b|\bfailed\b|\bfatal\b|couldn't|could not|cannot|unable|invalid|assert|requires|too (?:large|small)",
        re.IGNORECASE,
    ),
)
_AFTERWARDS = re.compile(
    r"exiting due to|See root cause above|failed to create_?\s?context with model|failed to load model|encountered an error while|leaked|resource_tracker"
)
_MILD = re.compile(r"^(?:\([^()]*\) *)?(?:(?:WARNING|INFO|DEBUG) \d\d-\d\d |\d+\.\d\d\.\d{3}\.\d{3} [DIW] )")
"""Lines of vLLM and llama.cpp that are no errors by their level."""
_STAMP = re.compile(r"^\d+\.\d\d\.\d{3}\.\d{3} [A-Z] +")
"""llama.cpp's time and level before a line."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Child:
    """A program in a session of its own, with all that it starts; use it as a context."""

    def __init__(self, what: str, words: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        """`what` is its name in messages; `words` the program's path and arguments; output and errors go to `log`."""
        self.what, self.log = what, log
        leash = [sys.executable, "-I", str(Path(__file__).with_name("leash.py"))]
        try:
            with open(log, "wb") as out:
                self._process = subprocess.Popen(
                    [*leash, *words],
                    stdin=subprocess.PIPE,  # the leash: what hangs on it is killed when this end closes
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=dict(env),
                    start_new_session=True,
                )
        except (OSError, ValueError) as error:  # ValueError: a null byte in a word
            raise KvctlError(f"{what} cannot be started: {getattr(error, 'strerror', None) or error}") from None

    @property
    def pid(self) -> int:
        """The group, and the process that holds it: the program is its child."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def may_end(self, limit_s: float) -> None:
        """Return when it has ended, or after so many seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)

    def check(self) -> None:
        """Nothing where it runs as it should.

        Raises:
            KvctlError: it has ended, or writes without end.

        """
        if not self.running:
            raise KvctlError(f"{self.what} ended: {self.last_words()}")
        with contextlib.suppress(FileNotFoundError):
            if self.log.stat().st_size > MOST_LOG:
                raise KvctlError(
                    f"{self.what} wrote more than {MOST_LOG >> 20} MiB of log and was stopped: {self.last_words()}"
                )

    def wait_for(self, ready: Callable[[], bool], limit_s: float, tell: Tell, doing: str) -> None:
        """Return when `ready` says so.

        Raises:
            KvctlError: it ended before, or `limit_s` passed.

        """
        begun = told = time.monotonic()
        while not ready():
            self.check()
            now = time.monotonic()
            if now - begun > limit_s:
                raise KvctlError(f"{self.what} was not ready after {limit_s:g} s: {self.last_words()}")
            if now - told >= 1:
                told = now
                tell(f"{doing}, {now - begun:,.0f} s")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End it and all that it started; returns when it is gone."""
        if self.running:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_S)
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self._signal(signal.SIGKILL)  # where there is no leash that reaches all
        self._process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def last_words(self) -> str:
        """What its log says of its end, on one line; else how it ended."""
        told = telling(_tail(self.log))
        status = self._process.poll()
        if status is not None and status < 0:
            ended = f"killed by {signal.Signals(-status).name}"
            if -status == signal.SIGKILL:
                ended += ", as the kernel does where memory runs out"
            return f"{ended}; its last line: {told}" if told else ended
        if told:
            return told
        return "it said nothing" if status is None else f"exit status {status}, and it said nothing"


def telling(text: str) -> str:
    """The line of a log that says why; its last line where none does."""
    lines = [line for raw in re.split(r"[\r\n]+", text) if (line := _ESCAPES.sub("", raw).strip())]
    grave = [line for line in lines if not _MILD.search(line) and not _AFTERWARDS.search(line)]
    for pattern in _TELLING:
        found = next((line for line in reversed(grave) if pattern.search(line)), None)
        if found is not None:
            return _short(found)
    return _short(lines[-1]) if lines else ""


def _short(line: str) -> str:
    line = " ".join(_STAMP.sub("", line).split())
    return line if len(line) <= 300 else line[:299] + "…"


def _tail(log: Path) -> str:
    try:
        with open(log, "rb") as source:
            source.seek(max(source.seek(0, os.SEEK_END) - _TAIL, 0))
            return source.read(_TAIL).decode("utf-8", "replace")
    except OSError:
        return ""
