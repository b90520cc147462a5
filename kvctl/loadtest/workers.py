"""Several processes that put one load on a server: where one cannot take in what the server writes.

This process starts them, hands each its share, has all begin at the same moment of the clock that they have in common, and adds up
what they found. They are gone with it, whatever happens.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from kvctl import signals
from kvctl.errors import KvctlError
from kvctl.loadtest.drive import Driven, Job, Keep, Seen, joined, put
from kvctl.measure.child import child, end_with_parent, go_first

_MODULE = "kvctl.loadtest.workers"
_AHEAD_NS = 50_000_000
"""From the word to begin until then: it has to reach all."""
_READY, _SEEN, _LINES, _DONE, _ERROR, _GONE = "ready", "seen", "lines", "done", "error", "gone"


def together(job: Job, count: int, keep: Keep, tick: Callable[[Seen], None], start: Callable[[], None]) -> Driven:
    """The load, by `count` processes; otherwise as `drive.put`.

    Raises:
        KvctlError: one of them cannot be started, ends, or has no connections.

    """
    inbox: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(child(("-P", "-m", _MODULE))) for _ in range(count)]
        for index, one in enumerate(started):
            assert one.stdin is not None
            assert one.stdout is not None
            threading.Thread(target=_listen, args=(index, one.stdout, inbox), daemon=True).start()
            with _piped():
                pickle.dump(job.replace(index=index, of=count), one.stdin)
                one.stdin.flush()
        for _ in started:
            _answer(inbox.get(), (_READY,))
        start()
        begin = time.monotonic_ns() + _AHEAD_NS
        for one in started:
            assert one.stdin is not None
            with _piped():
                one.stdin.write(b"%d\n" % begin)
                one.stdin.flush()
        return joined(_results(inbox, [one.pid for one in started], keep, tick), job.plan.most_errors)


def _results(
    inbox: queue.SimpleQueue[tuple[int, str, Any]], pids: Sequence[int], keep: Keep, tick: Callable[[Seen], None]
) -> list[Driven]:
    """Of all processes; on Ctrl-C they are asked for what they have."""
    found: dict[int, Driven] = {}
    seen: dict[int, Seen] = {}

    def hand_on() -> None:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGINT)

    with signals.instead(hand_on):
        while len(found) < len(pids):
            said = inbox.get()
            if said[1] == _GONE:
                signals.check()
            index, what, value = _answer(said, (_SEEN, _LINES, _DONE))
            if what == _DONE:
                found[index] = value
            elif what == _LINES:
                for line in value:
                    keep(line)
            else:
                seen[index] = value
                tick(_added(seen))
    return [found[index] for index in range(len(pids))]


def _added(seen: Mapping[int, Seen]) -> Seen:
    all_ = seen.values()
    return Seen(
        all(one.began for one in all_), sum(one.measured for one in all_), sum(one.failed for one in all_), sum(one.live for one in all_)
    )  # fmt: skip


def _answer(said: tuple[int, str, Any], wanted: Sequence[str]) -> tuple[int, str, Any]:
    _, what, value = said
    if what == _ERROR:
        raise KvctlError(value[0], hint=value[1])
    if what not in wanted:
        raise KvctlError("a process of this client ended before it was done", hint="KVCTL_DEBUG=1 shows more")
    return said


@contextlib.contextmanager
def _piped() -> Any:
    """Of a process that is gone the other end says so."""
    with contextlib.suppress(BrokenPipeError):
        yield


def _listen(index: int, stdout: IO[bytes], inbox: queue.SimpleQueue[tuple[int, str, Any]]) -> None:
    try:
        what = ""
        while what not in (_DONE, _ERROR):  # that it ends after these is no news
            what, value = pickle.load(stdout)
            inbox.put((index, what, value))
    except (EOFError, OSError, ValueError, pickle.UnpicklingError):
        inbox.put((index, _GONE, None))


# -- the other side -------------------------------------------------------------------------------------


def main() -> None:
    """Read a job, put its share on the server, and say what came of it."""
    go_first()
    out = sys.stdout.buffer
    lines: list[Mapping[str, Any]] = []

    def say(what: str, value: Any = None) -> None:
        pickle.dump((what, value), out)
        out.flush()

    def tick(seen: Seen) -> None:
        if lines:
            say(_LINES, lines)
            lines.clear()
        say(_SEEN, seen)

    def start() -> int:
        say(_READY)
        word = sys.stdin.buffer.readline()
        if not word:
            os._exit(1)
        threading.Thread(target=end_with_parent, daemon=True).start()
        return int(word)

    try:
        job: Job = pickle.load(sys.stdin.buffer)
        driven = put(job, lines.append, tick, start)
        say(_LINES, lines)
        say(_DONE, driven)
    except KvctlError as error:
        say(_ERROR, (error.message, error.hint))
    except (BrokenPipeError, KeyboardInterrupt):
        os._exit(1)


if __name__ == "__main__":
    main()
