"""What an answer that came was: complete, or which fault it had."""

from __future__ import annotations

import contextlib
import re
import ssl
import time

from kvctl.loadtest.connection import words_of
from kvctl.loadtest.deltas import NoEventError, Said, read
from kvctl.loadtest.exchange import Exchange, Fault
from kvctl.loadtest.http1 import Response


def counted(exchange: Exchange, said: Said) -> None:
    """Usage, wherever it is: in an event of its own, beside the last token, or with every one."""
    usage = said.usage
    assert usage is not None
    if usage.completion is not None or exchange.usage is None:
        exchange.usage = usage
    if said.answer or said.reasoning:
        exchange.counts.append(usage.completion or 0)
    # Some servers send neither finish_reason nor [DONE]; usage alone is what they end with.
    if said.last and exchange.stamps:
        exchange.terminal = True


def verdict_of(exchange: Exchange, response: Response) -> Fault | None:
    """What is wrong with an answer that came whole."""
    if response.status != 200:
        return _refused(exchange, response)
    if "text/event-stream" not in response.headers.get("content-type", "text/event-stream"):
        return Fault("protocol", f"its answer is {response.headers['content-type'][:60]}, no stream of events")
    coding = response.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        return Fault("protocol", f"its answer is compressed ({coding[:40]}), and that was not asked for")
    if not exchange.terminal:
        return Fault("truncated", "the stream ended without finish_reason and [DONE]")
    if not exchange.stamps:
        return Fault("empty", "an answer without a token")
    if not exchange.sent:
        return Fault("protocol", "it answers before the request was sent whole")
    return None


def _refused(exchange: Exchange, response: Response) -> Fault:
    """An answer of another status than 200: which, and what it says."""
    said = "".join(exchange.said)
    if "html" in response.headers.get("content-type", "") or said.lstrip()[:1] == "<":
        said = re.sub(r"<(style|script|head)\b.*?(</\1>|$)|<[^>]*>?", " ", said, flags=re.DOTALL | re.IGNORECASE)
    with contextlib.suppress(NoEventError):
        said = read(said.encode()).error or said
    words = " ".join(said.split())[:300]
    exchange.retry_after = wait_of(response.headers.get("retry-after"))
    kind = "rejected" if response.status in (429, 503) else "status"
    place = (
        f" to {response.headers['location'][:200]}"
        if 300 <= response.status < 400 and "location" in response.headers
        else ""
    )
    return Fault(kind, f"{response.status}{place}" + (f": {words}" if words else ""))


_LONGEST = 1e9
"""Seconds: thirty years are as long as any more."""


def wait_of(text: str | None) -> float | None:
    """Seconds of a Retry-After: a number, or a date (RFC 9110, section 10.2.3); None of neither."""
    if text is None:
        return None
    if re.fullmatch(r"\d{1,300}(\.\d{1,9})?", text.strip(), re.ASCII):
        return min(float(text), _LONGEST)
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def fault_of(error: OSError, *, connected: bool) -> Fault:
    if isinstance(error, ssl.SSLError):
        return Fault("tls", getattr(error, "verify_message", None) or error.reason or str(error))
    return Fault("reset" if connected else "refused", words_of(error.errno or 0) if error.errno else str(error))
