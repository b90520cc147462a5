"""Requests to end that are heeded as Ctrl-C is: what was measured is printed and saved, children are ended."""

from __future__ import annotations

import signal
from types import FrameType

_HEEDED = ("SIGTERM", "SIGHUP")
_received: list[int] = []


def heed() -> None:
    """From here on SIGTERM and SIGHUP raise KeyboardInterrupt; one that is ignored (nohup) stays so."""
    for name in _HEEDED:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _interrupt)


def _interrupt(number: int, _: FrameType | None) -> None:
    _received.append(number)
    raise KeyboardInterrupt


def received() -> int:
    """The signal that asked for the end; without one it was Ctrl-C."""
    return _received[-1] if _received else signal.SIGINT
