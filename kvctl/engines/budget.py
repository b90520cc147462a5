"""What an engine takes on a GPU beside weights and cache, part by part."""

from __future__ import annotations

from kvctl.record import Record


class Part(Record):
    """One part of a rank's memory."""

    name: str
    """activations, graphs, runtime, …"""
    bytes: int
    estimated: bool
    """Whether a rule of thumb gives it, and not the engine's own arithmetic."""
    rule: str
    """One plain sentence that says how it comes about, with its numbers."""
