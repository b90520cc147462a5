"""Runs a program that ends when its parent does, however that ends. A script of its own, without kvctl:

python -I leash.py PARENT_PID PROGRAM [ARGUMENT …]

Only Linux offers that (PR_SET_PDEATHSIG in linux/prctl.h; it outlives exec); elsewhere the program merely runs.
"""

import os
import sys


def main(parent: int, words: list[str]) -> None:
    """Become the program; exit status 127 where there is none."""
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)
    try:
        os.execv(words[0], words)
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
