"""One HTTP/1.1 response, taken apart as its bytes come (RFC 9112).

kvctl has a reader of its own because it is on the path that is timed: a chunk of a stream is one call here, and nothing
waits. It takes what servers really send (bare line feeds, chunk extensions, trailers, 1xx before the answer, bodies
without a length) and refuses what could be read in two ways.
"""

from __future__ import annotations

_HEAD = 256 * 1024
"""Bytes of a status line with its headers, at most."""
_LINE = 16 * 1024
"""Of the line with a chunk's size, and of all trailers."""


class ProtocolError(Exception):
    """Bytes that are no HTTP/1.1 response."""


class Response:
    """A response to a request with a body or without (not to HEAD); `feed` it until `done`."""

    __slots__ = ("_at", "_buffer", "_left", "_read", "_trailers", "done", "headers", "keeps", "status")

    def __init__(self) -> None:
        self.status = 0
        """0 until the head is there."""
        self.headers: dict[str, str] = {}
        """Names in lower case; of a name that comes twice both values, joined by a comma."""
        self.done = False
        self.keeps = False
        """Whether the connection can be used again."""
        self._buffer = b""
        self._at = 0
        """What is before this was read: pieces are not cut off one by one, of which a read can hold tens of thousands."""
        self._left = 0
        self._trailers = 0
        self._read = self._head

    def feed(self, data: bytes) -> list[bytes]:
        """What of these bytes is the body, in pieces.

        Raises:
            ProtocolError: they are no HTTP/1.1; or there are more of them than the response has.

        """
        # A chunk that came whole and alone is the rule in a stream of events.
        if self._read == self._size and not self._buffer:
            end = data.find(b"\r\n", 0, 10)
            if end > 0:
                size = _hex(data[:end])
                if size and len(data) == end + size + 4 and data.endswith(b"\r\n"):
                    return [data[end + 2 : -2]]
        out: list[bytes] = []
        self._buffer += data
        while not self.done and self._read(out):
            pass
        self._buffer, self._at = self._buffer[self._at :], 0
        if self.done and self._buffer:
            raise ProtocolError(f"{len(self._buffer)} bytes come after the end of the response")
        return out

    def closed(self) -> bool:
        """The other side has closed: whether the response is complete."""
        if self._read == self._until_close:
            self.done = True
        return self.done

    # Each step takes what it can of the buffer and says whether another can go on.

    def _head(self, out: list[bytes]) -> bool:
        buffer = self._buffer
        end, after = _head_end(buffer, self._at)
        if end < 0:
            if len(buffer) - self._at > _HEAD:
                raise ProtocolError(f"its headers have more than {_HEAD // 1024} KiB")
            begun = buffer[self._at : self._at + 7]
            if not b"HTTP/1.".startswith(begun):
                raise ProtocolError(f"it does not answer in HTTP/1.1: {_shown(buffer[self._at :])}")
            return False
        lines = buffer[self._at : end].replace(b"\r\n", b"\n").split(b"\n")
        self._at = after
        status = _status(lines[0])
        if 100 <= status < 200 and status != 101:
            return True  # the answer is still to come
        self.headers = _fields(lines[1:])
        self._frame(status, lines[0].startswith(b"HTTP/1.0"))
        self.status = status
        return True

    def _frame(self, status: int, old: bool) -> None:
        """How the end of the body is told."""
        headers = self.headers
        connection = {word.strip().lower() for word in headers.get("connection", "").split(",")}
        self.keeps = "close" not in connection and (not old or "keep-alive" in connection)
        coding = headers.get("transfer-encoding", "").strip().lower()
        length = headers.get("content-length")
        if status in (204, 304):
            self.done = True
        elif coding:
            if coding != "chunked":
                raise ProtocolError(f"its transfer coding is {coding[:40]!r}, and chunked was expected")
            if length is not None:
                raise ProtocolError("it has both a length and chunks")
            self._read = self._size
        elif length is not None:
            self._left = _length(length)
            self.done = self._left == 0
            self._read = self._of_length
        else:
            self.keeps = False
            self._read = self._until_close

    def _of_length(self, out: list[bytes]) -> bool:
        self._part(out)
        self.done = self._left == 0
        return False

    def _part(self, out: list[bytes]) -> None:
        """As much as is there of what is left of a body, or of a chunk."""
        part = self._buffer[self._at : self._at + self._left]
        self._at += len(part)
        self._left -= len(part)
        if part:
            out.append(part)

    def _until_close(self, out: list[bytes]) -> bool:
        if part := self._buffer[self._at :]:
            out.append(part)
            self._at = len(self._buffer)
        return False

    def _size(self, out: list[bytes]) -> bool:
        self._whole(out)
        line = self._line()
        if line is None:
            return False
        size = _hex(line.partition(b";")[0].strip(b" \t")[:16])
        if size is None:
            raise ProtocolError(f"{_shown(line)} is no size of a chunk")
        self._left = size
        self._read = self._chunk if size else self._trailer
        return True

    def _whole(self, out: list[bytes]) -> None:
        """Chunks that are there from end to end, as they are in a flood; what is unusual in any way is left to the other steps."""
        buffer, at = self._buffer, self._at
        while (end := buffer.find(b"\r\n", at, at + 10)) > 0:
            size = _hex(buffer[at:end])
            after = end + 2 + (size or 0)
            if not size or buffer[after : after + 2] != b"\r\n":
                break
            out.append(buffer[end + 2 : after])
            at = after + 2
        self._at = at

    def _chunk(self, out: list[bytes]) -> bool:
        self._part(out)
        if self._left:
            return False
        self._read = self._chunk_end
        return True

    def _chunk_end(self, out: list[bytes]) -> bool:
        end = self._buffer[self._at : self._at + 2]
        if end.startswith(b"\n"):
            self._at += 1
        elif end == b"\r\n":
            self._at += 2
        elif end in (b"", b"\r"):
            return False
        else:
            raise ProtocolError(f"a chunk is longer than it says: {_shown(self._buffer[self._at :])}")
        self._read = self._size
        return True

    def _trailer(self, out: list[bytes]) -> bool:
        line = self._line()
        if line is None:
            return False
        self._trailers += len(line)
        if self._trailers > _LINE:
            raise ProtocolError("its trailers do not end")
        self.done = not line
        return True

    def _line(self) -> bytes | None:
        """The next line without its end; None where it is not there yet."""
        at = self._at
        end = self._buffer.find(b"\n", at)
        if end < 0:
            if len(self._buffer) - at > _LINE:
                raise ProtocolError(f"no size of a chunk is so long: {_shown(self._buffer[at:])}")
            return None
        self._at = end + 1
        return self._buffer[at:end].removesuffix(b"\r")


def _head_end(buffer: bytes, start: int) -> tuple[int, int]:
    """Where the head ends, and what comes after it begins; -1 where that is not there yet."""
    places = [(at, at + len(mark)) for mark in (b"\r\n\r\n", b"\n\n") if (at := buffer.find(mark, start)) >= 0]
    return min(places, default=(-1, -1))


def _status(line: bytes) -> int:
    version, _, rest = line.partition(b" ")
    code = rest[:3]
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or not code.isdigit() or len(code) < 3 or code[:1] not in b"12345":
        raise ProtocolError(f"it does not answer in HTTP/1.1: {_shown(line)}")
    return int(code)


def _fields(lines: list[bytes]) -> dict[str, str]:
    out: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise ProtocolError(f"{_shown(line)} is no header")
        key, text = name.decode("latin-1").lower(), value.strip().decode("latin-1")
        out[key] = f"{out[key]}, {text}" if key in out else text
    return out


def _length(text: str) -> int:
    """Of a body; the same length said twice is one."""
    values = {value.strip() for value in text.split(",")}
    value = values.pop()
    if values or not (value.isascii() and value.isdigit()) or len(value) > 18:
        raise ProtocolError(f"{text[:40]!r} is no length")
    return int(value)


_DIGITS = frozenset(b"0123456789abcdefABCDEF")


def _hex(text: bytes) -> int | None:
    """None for what is no hexadecimal number of at most 15 digits."""
    if not 0 < len(text) < 16 or not _DIGITS.issuperset(text):
        return None
    return int(text, 16)


def _shown(data: bytes) -> str:
    return repr(data[:40].decode("latin-1"))
