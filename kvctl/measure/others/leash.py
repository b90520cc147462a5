"""Runs a program that ends when its parent does, however that ends, and with it all that it started. A script of its own, without kvctl:

python -I leash.py PROGRAM [ARGUMENT …]

Standard input is a pipe whose other end the parent holds open: when it closes, because the parent wants that or is gone, everything is
killed. On Linux that reaches processes that have left the group (PR_SET_CHILD_SUBREAPER in linux/prctl.h hands orphans over to this one), and
the program goes too where this process alone is killed (PR_SET_PDEATHSIG). Its exit status, or the signal that ended it, is the program's.
"""

import contextlib
import os
import select
import signal
import sys

_PDEATHSIG, _SUBREAPER = 1, 36
_PASSED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals to the group that are the program's to heed: this process goes when that has gone."""


def main(words: list[str]) -> None:
    """Run the program to its end, or to that of the parent; exit status 127 where there is none."""
    _prctl(_SUBREAPER, 1)
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    for number in _PASSED:
        signal.signal(number, signal.SIG_IGN)
    here = os.getpid()
    program = os.fork()
    if program == 0:
        _become(words, here)
    status = _until_it_ends(program, ended)
    if not sys.platform.startswith("linux") and status is None:
        os.killpg(0, signal.SIGKILL)  # this process too
    _end_all()
    if status is not None and os.WIFSIGNALED(status):
        _end_by(os.WTERMSIG(status))
    os._exit(1 if status is None else os.waitstatus_to_exitcode(status))


def _become(words: list[str], leash: int) -> None:
    for number in (*_PASSED, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    _prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leash:  # it ended before the call
        os._exit(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        os.execv(words[0], words)
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def _until_it_ends(program: int, ended: int) -> int | None:
    """Its wait status; None where the parent's end of the pipe closed first."""
    while True:
        readable, _, _ = select.select([0, ended], [], [])
        if ended in readable:
            os.read(ended, 4096)
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == program:
                    return status
                if pid == 0:
                    break
        if 0 in readable and not os.read(0, 4096):
            return None


def _end_all() -> None:
    """Kill whatever is left, until nothing is; only Linux shows what that is."""
    while sys.platform.startswith("linux"):
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b") ")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    out, queue = [], [root]
    while queue:
        found = children.get(queue.pop(), [])
        out += found
        queue += found
    return out


def _end_by(number: int) -> None:
    """As the program did, without a core of this process."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        import ctypes

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
