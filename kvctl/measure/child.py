"""Processes that measure for this one: gone with it, and with all that they started, whatever happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

from kvctl.errors import KvctlError

_PDEATHSIG, _SIGKILL = 1, 9  # prctl(2)

# -- the parent's side ----------------------------------------------------------------------------------


@contextlib.contextmanager
def child(argv: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """This Python with these arguments, in a session of its own so that Ctrl-C is this process's alone; gone afterwards.

    Raises:
        KvctlError: it cannot be started.

    """
    # As this process finds its modules, and nothing from where it happens to stand.
    env = os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
    try:
        started = subprocess.Popen(
            [sys.executable, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise KvctlError(f"a process cannot be started: {error.strerror}") from None
    try:
        yield started
    finally:
        end(started)
        started.wait()
        for pipe in (started.stdin, started.stdout, started.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def end(started: subprocess.Popen[bytes]) -> None:
    """Kill it and whatever it started."""
    if started.poll() is not None and not hasattr(os, "killpg"):
        return
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(started.pid, signal.SIGKILL)
        else:
            started.kill()


# -- the child's side -----------------------------------------------------------------------------------


def go_first() -> None:
    """If memory ends, the kernel takes this process before any other; and it ends when its parent does."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(_PDEATHSIG, _SIGKILL, 0, 0, 0)


def end_with_parent() -> None:
    """The parent holds the other end of standard input for as long as it waits; so on every system."""
    while os.read(0, 4096):
        pass
    os._exit(1)
