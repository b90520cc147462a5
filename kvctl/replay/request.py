"""One request of a trace: how long, when, and what its prompt shares."""

from __future__ import annotations

from kvctl.record import Record

HASH_TOKENS = 512
"""Tokens under one hash in the public Mooncake traces."""


class Request(Record):
    """What the replay has to know of a request; nothing of its text."""

    arrival: int | None
    """Microseconds since any fixed moment; None where the trace does not say (only a closed loop can replay it)."""
    input_length: int
    """Tokens of the prompt, at least 1."""
    output_length: int
    """Tokens that each sequence generates."""
    hash_ids: tuple[int, ...] = ()
    """One number for each `hash_tokens` tokens of the prompt, the last one perhaps for fewer. Requests with the
    same numbers up to some place have the same tokens up to there; tokens after the last hash are shared by nobody."""
    sequences: int = 1
    """Parallel samples (n, best_of) or beams that continue the one prompt."""
    max_output: int | None = None
    """Tokens that the request allowed for its output (max_tokens), where the trace says."""
    hash_tokens: int = HASH_TOKENS
