"""One request and what came back, with a stamp for every moment that matters: nanoseconds of the monotonic clock."""

from __future__ import annotations

from array import array

from kvctl.loadtest.deltas import Called, Said, Usage


class Fault:
    """What went wrong with a request."""

    __slots__ = ("kind", "message")

    KINDS = (
        "refused",  # no connection: refused, unreachable, no such name
        "tls",  # no secure connection
        "reset",  # the connection broke off
        "timeout",  # nothing came for too long
        "rejected",  # 429 or 503: the server has no room
        "status",  # another status than 200
        "protocol",  # no HTTP/1.1, no events, no JSON
        "truncated",  # the answer ended without saying so
        "server",  # an error object in an answer that had begun
        "empty",  # an answer without a token
        "cancelled",  # by us, at the end of the run
    )

    def __init__(self, kind: str, message: str) -> None:
        assert kind in self.KINDS, kind
        self.kind, self.message = kind, message

    def __repr__(self) -> str:
        return f"Fault({self.kind!r}, {self.message!r})"


class Wrote:
    """What a model wrote, of an exchange whose answer goes into the next request."""

    __slots__ = ("calls", "parts")

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.calls: dict[int, Called] = {}
        """Calls of tools, by their index."""

    def add(self, said: Said) -> None:
        """One event more."""
        if said.text:
            self.parts.append(said.text)
        for call in said.calls:
            before = self.calls.get(call.index)
            self.calls[call.index] = call if before is None else before.joined(call)

    @property
    def text(self) -> str:
        """The answer, of the first choice."""
        return "".join(self.parts)


class Exchange:
    """A request (the bytes that are sent, head and body), and its answer as far as it has come."""

    __slots__ = (
        "answer_at",
        "bundled",
        "bytes_in",
        "connect_ns",
        "counts",
        "data",
        "ended",
        "events",
        "fault",
        "finish",
        "first_byte",
        "kernel",
        "key",
        "reconnects",
        "retry_after",
        "said",
        "scheduled",
        "sent",
        "stamps",
        "status",
        "terminal",
        "tries",
        "usage",
        "wrote",
    )  # fmt: skip

    def __init__(self, data: bytes, scheduled: int, key: object = None) -> None:
        self.data = data
        self.key = key
        """What the sender knows it by."""
        self.scheduled = scheduled
        """When it was to be sent."""
        self.sent = 0
        """When its last byte was handed to the system; of a request that was sent twice, the second time."""
        self.first_byte = 0
        """Of the answer, of its head as a rule."""
        self.stamps = array("q")
        """When each event with output came."""
        self.counts = array("q")
        """Output tokens so far, of events with output whose usage says it."""
        self.answer_at = 0
        """When the first came that was no reasoning; 0 where none did."""
        self.ended = 0
        self.status = 0
        self.usage: Usage | None = None
        self.finish: str | None = None
        self.terminal = False
        """Whether the stream said that it ends."""
        self.fault: Fault | None = None
        self.retry_after: float | None = None
        """Seconds that the server asks to wait."""
        self.connect_ns: int | None = None
        """That connecting took, where it was done for this request."""
        self.reconnects = 0
        self.bytes_in = 0
        self.bundled = 0
        """Events that came in one read with others before them: all of them have the stamp of its last packet."""
        self.kernel = True
        """Whether all stamps are the kernel's."""
        self.events: list[bytes] | None = None
        """The data of events, where they are kept: a list is put here before it is sent."""
        self.tries = 0
        """Times that the server had turned it away before."""
        self.wrote: Wrote | None = None
        """What the model wrote, where it is kept: one is put here before it is sent."""
        self.said: list[str] = []
        """The beginning of what a server says with another status than 200."""

    @property
    def good(self) -> bool:
        return self.fault is None and self.ended > 0

    @property
    def first_token(self) -> int:
        """0 where none came."""
        return self.stamps[0] if self.stamps else 0

    @property
    def last_token(self) -> int:
        return self.stamps[-1] if self.stamps else 0
