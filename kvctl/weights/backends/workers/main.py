"""A backend's worker: one request on standard input, JSON lines on what was standard output.

    python -I main.py AUTOAWQ.py

The file that is named defines run(request, tell): it writes request["out"] and returns what is to be told of it.
Nothing of kvctl is imported here: this runs in an environment that has none of it. Whatever a library prints goes to
standard error. When standard input closes, the parent is gone, and so is this whole process group.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import runpy
import signal
import sys
import traceback
from typing import Any

_MOST = 64 << 20


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)
    request = _request()
    _end_with_parent(answers)
    # As if it were Ctrl-C: what cleans up on the way out does so.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def tell(message: str, /, **what: Any) -> None:
        data = json.dumps({message: what}).encode() + b"\n"
        while data:
            data = data[os.write(answers, data) :]

    def progress(stage: str, done: int, of: int) -> None:
        tell("progress", stage=stage, done=int(done), of=int(of))

    tell("hello", protocol=request["protocol"], python=sys.version.split()[0], versions=_versions())
    try:
        run = runpy.run_path(sys.argv[1])["run"]
        found = run(request, progress)
    except KeyboardInterrupt:
        tell("error", kind="interrupted", message="it was interrupted")
        code = 130
    except BaseException as error:
        traceback.print_exc()
        kind = type(error).__name__
        short = "out of memory" if isinstance(error, MemoryError) or "OutOfMemory" in kind else str(error).strip()
        tell("error", kind=kind, message=f"{kind}: {short.splitlines()[0] if short else 'no more is said'}"[:500])
        code = 1
    else:
        tell("done", **found)
        code = 0
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # threads of libraries are not waited for


def _request() -> dict[str, Any]:
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(0, 65536)
        if not more or len(data) > _MOST:
            os._exit(2)
        data += more
    found: dict[str, Any] = json.loads(data)
    return found


def _end_with_parent(answers: int) -> None:
    """A process that does nothing but wait for the parent's end: a library that holds Python's lock cannot delay it."""
    if os.fork():
        os.close(0)
        os.open(os.devnull, os.O_RDONLY)
        return
    for name in ("SIGTERM", "SIGINT", "SIGHUP"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.close(answers)
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def _versions() -> dict[str, str]:
    wanted = ("torch", "transformers", "autoawq", "gptqmodel", "llmcompressor", "compressed-tensors")
    found = {}
    for name in wanted:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
