"""What a replay assumes of the engine and its speed."""

from __future__ import annotations

from kvctl.errors import UsageError
from kvctl.record import Record

RESERVES = ("max", "pow2", "exact")
LIMIT = 2**50
"""Numbers beyond this are a slip of the keyboard."""


class Setup(Record):
    """The engine's memory, and the time model: see `kvctl.replay.simulator`."""

    block_size: int
    """Tokens of a block."""
    capacity_blocks: int | None
    """Blocks of the pool; None is without limit (then the prefix cache forgets nothing and grows with the trace)."""
    bytes_per_block: int
    """Bytes of a block on one rank, over all layers."""
    max_length: int
    """Tokens that one sequence may have (max_model_len); longer requests are rejected under every policy."""
    max_sequences: int | None = None
    """Sequences that run at once (max_num_seqs)."""
    concurrency: int | None = None
    """Keep so many requests in flight and ignore the arrival times; None replays the arrival times."""
    tpot: int = 25_000
    """Microseconds of one iteration, in which every running sequence gets one token: 40 tokens a second. Assumed."""
    prefill_rate: int = 10_000
    """Prompt tokens that are computed in a second for each request in prefill. Assumed."""
    reserve: str = "max"
    """What the contiguous policy reserves: "max" is `max_length`, or prompt + max_output where the trace has that;
    "pow2" is prompt + output rounded up to a power of two; "exact" is prompt + output, known by an oracle. These are
    Orca (Max), (Pow2) and (Oracle) of Kwon et al. 2023, section 6.1."""

    def check(self) -> None:
        """Refuse numbers that make no sense, by name."""
        for name in self._fields:
            value = getattr(self, name)
            if name == "reserve":
                if value not in RESERVES:
                    raise UsageError(f"reserve: {value!r} is not known", hint="one of " + ", ".join(RESERVES))
            elif value is None:
                if name not in ("capacity_blocks", "max_sequences", "concurrency"):
                    raise UsageError(f"{name} is missing")
            elif type(value) is not int or not 1 <= value <= LIMIT:
                raise UsageError(f"{name}: {value!r} is not a whole number from 1 to {LIMIT}")
