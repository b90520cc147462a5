"""Server-sent events, taken apart as their bytes come (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import re

_LONGEST = 16 * 2**20
_EACH = 40
"""Bytes that a line of an event takes besides its own: an event of endless empty lines is no short one."""
_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventError(Exception):
    """A stream that is no longer read."""


class Events:
    """The data of events; comments, ids and names are passed over, and what is not ended by an empty line is no event."""

    __slots__ = ("_begun", "_buffer", "_data", "_held", "_return", "comments")

    def __init__(self) -> None:
        self.comments = 0
        """Lines that servers send to keep a connection alive."""
        self._buffer = bytearray()
        """Grows in place: a line of many megabytes may come in pieces of one byte."""
        self._data: list[bytes] | None = None
        self._held = 0
        """Bytes that these take."""
        self._begun = False
        self._return = False
        """Whether the last line ended in a carriage return, of which a line feed that comes is a part."""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of every event that ends here.

        Raises:
            EventError: one is longer than 16 MiB.

        """
        # One whole event of one line is the rule.
        usual = not self._buffer and self._data is None and self._begun and not self._return
        if (
            usual
            and data.startswith(b"data: ")
            and data.find(b"\n") == len(data) - 2
            and data[-1:] == b"\n"
            and b"\r" not in data
        ):
            return [data[6:-2]]
        if self._return and data:
            self._return = False
            if data.startswith(b"\n"):
                data = data[1:]
        seen = len(self._buffer)
        self._buffer += data
        if not self._begun and self._buffer:
            if len(self._buffer) < 3 and b"\xef\xbb\xbf".startswith(self._buffer):
                return []
            self._buffer = self._buffer.removeprefix(b"\xef\xbb\xbf")
            self._begun, seen = True, 0
        out = self._lines(seen)
        if len(self._buffer) + self._held > _LONGEST:
            raise EventError(f"an event of more than {_LONGEST // 2**20} MiB")
        return out

    @property
    def rest(self) -> bytes:
        """What came and ended no event."""
        return b"\n".join(self._data or []) + bytes(self._buffer)

    def _lines(self, seen: int) -> list[bytes]:
        """`seen` bytes of the buffer have no end of a line."""
        out: list[bytes] = []
        buffer, at = self._buffer, 0
        while (end := _LINE_END.search(buffer, seen)) is not None:
            line = bytes(buffer[at : end.start()])
            at = seen = end.end()
            self._return = at == len(buffer) and end[0] == b"\r"
            if line:
                self._field(line)
            elif self._data is not None:
                out.append(b"\n".join(self._data))
                self._data, self._held = None, 0
        if at:
            self._buffer = buffer[at:]
        return out

    def _field(self, line: bytes) -> None:
        if line.startswith(b":"):
            self.comments += 1
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            if self._data is None:
                self._data = []
            self._data.append(value[1:] if value.startswith(b" ") else value)
            self._held += len(value) + _EACH
