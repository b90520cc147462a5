"""A queue whose long tail lies on disk, so that an overloaded replay does not fill the memory."""

from __future__ import annotations

import marshal
from collections import deque
from typing import IO

from kvctl.replay.request import Request

Waiting = tuple[Request, int, int]
"""A request, the iteration since when it waits, and the output tokens that its sequences had stored."""


class SpillQueue:
    """First in, first out; of the waiting items about `keep` are in memory at most."""

    def __init__(self, keep: int = 4096) -> None:
        self._keep = keep
        self._head: deque[Waiting] = deque()
        self._tail: list[Waiting] = []
        self._file: IO[bytes] | None = None
        self._chunks: deque[tuple[int, int]] = deque()
        self._end = 0
        self.count = 0

    def append(self, item: Waiting) -> None:
        self.count += 1
        if not self._chunks and not self._tail and len(self._head) < self._keep // 2:
            self._head.append(item)
            return
        self._tail.append(item)
        if len(self._tail) == self._keep // 2:
            self._write()

    def first(self) -> Waiting:
        """The oldest item, which stays; only of a queue that is not empty."""
        if not self._head:
            self._refill()
        return self._head[0]

    def popleft(self) -> Waiting:
        if not self._head:
            self._refill()
        self.count -= 1
        return self._head.popleft()

    def _write(self) -> None:
        if self._file is None:
            import tempfile

            self._file = tempfile.TemporaryFile(prefix="kvctl-")  # noqa: SIM115 (lives as long as the queue)
        data = marshal.dumps([(request.__dict__, at, done) for request, at, done in self._tail])
        self._file.seek(self._end)
        self._file.write(data)
        self._chunks.append((self._end, len(data)))
        self._end += len(data)
        self._tail = []

    def _refill(self) -> None:
        if self._chunks and self._file is not None:
            start, size = self._chunks.popleft()
            self._file.seek(start)
            rows = marshal.loads(self._file.read(size))  # our own file, which has no name
            for values, at, done in rows:
                request = Request.__new__(Request)
                request.__dict__.update(values)
                self._head.append((request, at, done))
            if not self._chunks:
                self._end = 0
        else:
            self._head.extend(self._tail)
            self._tail = []
