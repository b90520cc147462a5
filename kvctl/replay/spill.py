"""A queue whose long tail lies on disk, so that an overloaded replay does not fill the memory."""

from __future__ import annotations

import pickle
from collections import deque
from typing import IO, Any


class SpillQueue:
    """First in, first out; of the waiting items about `keep` are in memory at most."""

    def __init__(self, keep: int = 4096) -> None:
        self._keep = keep
        self._head: deque[Any] = deque()
        self._tail: list[Any] = []
        self._file: IO[bytes] | None = None
        self._chunks: deque[tuple[int, int]] = deque()
        self._end = 0
        self.count = 0

    def append(self, item: Any) -> None:
        self.count += 1
        if not self._chunks and not self._tail and len(self._head) < self._keep // 2:
            self._head.append(item)
            return
        self._tail.append(item)
        if len(self._tail) == self._keep // 2:
            self._write()

    def first(self) -> Any:
        """The oldest item, which stays; only of a queue that is not empty."""
        if not self._head:
            self._refill()
        return self._head[0]

    def popleft(self) -> Any:
        if not self._head:
            self._refill()
        self.count -= 1
        return self._head.popleft()

    def _write(self) -> None:
        if self._file is None:
            import tempfile

            self._file = tempfile.TemporaryFile(prefix="kvctl-")  # noqa: SIM115 (lives as long as the queue)
        data = pickle.dumps(self._tail, pickle.HIGHEST_PROTOCOL)
        self._file.seek(self._end)
        self._file.write(data)
        self._chunks.append((self._end, len(data)))
        self._end += len(data)
        self._tail = []

    def _refill(self) -> None:
        if self._chunks and self._file is not None:
            start, size = self._chunks.popleft()
            self._file.seek(start)
            self._head.extend(pickle.loads(self._file.read(size)))  # our own file, which no one else can open
            if not self._chunks:
                self._end = 0
        else:
            self._head.extend(self._tail)
            self._tail = []
