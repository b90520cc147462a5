"""When tokens came, and the times that follow: first token of a batch, and steps in which all of it decoded."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.errors import KvctlError
from kvctl.record import Record


class Arrivals(Record):
    """Tokens of one sequence."""

    first_s: float
    """When its first token came, on the clock of its pass."""
    later: tuple[tuple[int, float], ...]
    """(tokens so far, seconds since the first); several tokens may come at once."""

    @property
    def tokens(self) -> int:
        """How many came."""
        return self.later[-1][0] if self.later else 1

    def gaps(self) -> list[float]:
        """Seconds of each token after the first; those that came at once share theirs evenly."""
        out: list[float] = []
        before, at = 1, 0.0
        for tokens, seconds in self.later:
            if tokens > before:
                out += [(seconds - at) / (tokens - before)] * (tokens - before)
                before, at = tokens, seconds
        return out


def steps(sequences: Sequence[Arrivals], decode: int) -> tuple[float, ...]:
    """Seconds of the first `decode` steps in which every sequence of the batch generated.

    Those are the steps of the sequence that began last, as long as no other had ended.

    Raises:
        KvctlError: the sequences did not decode together for so long.

    """
    last = max(sequences, key=lambda one: one.first_s)
    gaps = last.gaps()[:decode]
    if len(gaps) < decode:
        raise KvctlError(f"{len(gaps) + 1:,} tokens came, and {decode + 1:,} were asked for")
    # Tokens of one step come one after the other: half a step is no other step.
    end = last.first_s + sum(gaps) - gaps[-1] / 2
    for other in sequences:
        if other.first_s + (other.later[-1][1] if other.later else 0.0) < end:
            raise KvctlError(
                f"the {len(sequences):,} sequences did not decode together for {decode:,} steps: the engine queued or preempted some",
                hint="fewer sequences, or more memory for the cache",
            )
    return tuple(gaps)
