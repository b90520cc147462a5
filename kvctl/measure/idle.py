"""Whether the machine is idle beside us: what other programs take of the processors while times are measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

NOTICEABLE = 0.1
"""Share of all processors from which others lengthen times."""


class Others:
    """Adds up processor time over the spans that are timed; seconds."""

    def __init__(self) -> None:
        self._others = 0.0
        self._all = 0.0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A span that counts."""
        before = _read()
        try:
            yield
        finally:
            after = _read()
            if before is not None and after is not None:
                busy, own, total = (b - a for a, b in zip(before, after, strict=True))
                self._others += max(busy - own, 0.0)
                self._all += total

    @property
    def share(self) -> float | None:
        """Of all processors' time; None where this system does not tell."""
        return self._others / self._all if self._all > 0.5 else None


def _read() -> tuple[float, float, float] | None:
    """Busy time of all processors, time of this process, and time of all processors in all."""
    import psutil

    try:
        times = psutil.cpu_times()
    except (OSError, psutil.Error, NotImplementedError):
        return None
    own = os.times()
    total = sum(value for name, value in times._asdict().items() if not name.startswith("guest"))
    idle = times.idle + getattr(times, "iowait", 0.0)
    return total - idle, own.user + own.system, total
