"""Requests to end that are heeded as Ctrl-C is: what was measured is printed and saved, children are ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_HEEDED = ("SIGINT", "SIGTERM", "SIGHUP")
_received: list[int] = []
_at: list[float] = []
_MOMENT_S = 0.25


def heed() -> None:
    """From here on these raise KeyboardInterrupt, and are remembered; one that is ignored (nohup) stays so."""
    for name in _HEEDED:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _interrupt)


def _interrupt(number: int, _: FrameType | None) -> None:
    if not _again():
        _received.append(number)
        raise KeyboardInterrupt


def _again() -> bool:
    """Whether it is the same request once more: `timeout` and the like hand a signal on that the terminal has sent already."""
    now = time.monotonic()
    again = bool(_at) and now - _at[-1] < _MOMENT_S
    _at.append(now)
    return again


@contextmanager
def instead(tell: Callable[[], None]) -> Iterator[None]:
    """Meanwhile the first of these calls `tell`, at whatever moment it comes, and the next one raises KeyboardInterrupt."""
    first = len(_received)

    def heard(number: int, frame: FrameType | None) -> None:
        if len(_received) > first:
            _interrupt(number, frame)
        elif not _again():
            _received.append(number)
            tell()

    before = {
        number: handler
        for name in _HEEDED
        if (number := getattr(signal, name, None)) is not None and callable(handler := signal.getsignal(number))
    }
    for number in before:
        signal.signal(number, heard)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def asked() -> bool:
    """Whether one came. Libraries swallow the interrupt at times, and then fail for want of what it broke off."""
    return bool(_received)


def check() -> None:
    """KeyboardInterrupt, where one came."""
    if _received:
        raise KeyboardInterrupt


def received() -> int:
    """The signal that asked for the end; without one it was Ctrl-C."""
    return _received[-1] if _received else signal.SIGINT
