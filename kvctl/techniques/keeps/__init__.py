"""Evictions: one file each. A `Keep` that predicts, and the `Policy` that does it (in a function: torch is imported there)."""
