"""What is asked of another engine, and where its program is looked for."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.errors import KvctlError, UsageError
from kvctl.record import Record


class EngineAsk(Record):
    """Points to measure, and how the engine is found and started."""

    contexts: tuple[int, ...]
    """Prompt tokens of a sequence."""
    batches: tuple[int, ...] = (1,)
    """Sequences at a time."""
    decode: int = 64
    """Steps that are timed after the first token."""
    repeats: int = 3
    seed: int = 0
    """Of the random prompts."""
    prompt: str | None = None
    """Text whose tokens are repeated to the length wanted; None: random tokens."""
    flags: tuple[str, ...] = ()
    """More words of the engine's own command line, handed on."""
    program: str | None = None
    """llama-server, or the folder that it lies in; the Python that has vLLM."""
    random_weights: bool = False
    """Whether weights are made up where the engine can do that (vLLM's --load-format dummy)."""
    log_file: str | None = None
    """Where the engine's log is kept; None: only while it runs."""
    start_limit_s: float = 900.0
    """How long a start may take."""
    silence_limit_s: float = 900.0
    """How long nothing may come while it measures."""

    def checked(self) -> EngineAsk:
        """Itself.

        Raises:
            UsageError: no point, or a count below one.

        """
        if not self.contexts or not self.batches:
            raise UsageError("no context or no batch to measure")
        for what, least in (
            ("context", min(self.contexts)), ("batch", min(self.batches)), ("decode", self.decode), ("repeat", self.repeats)
        ):  # fmt: skip
            if least < 1:
                raise UsageError(f"{what}: {least} is out of range", hint="at least 1")
        if self.prompt is not None and not self.prompt.strip():
            raise UsageError("the prompt is empty")
        return self

    @property
    def points(self) -> tuple[tuple[int, int], ...]:
        """(context, batch), each once, in the order asked."""
        return tuple(dict.fromkeys((context, batch) for batch in self.batches for context in self.contexts))

    def steps(self, context: int, batch: int, batch_tokens: int) -> int:
        """Tokens that each sequence generates: the first, those timed, and of several so many that all still run then.

        An engine that takes `batch_tokens` a pass prefills a batch in several; the first sequences generate meanwhile.
        """
        if batch == 1:
            return self.decode + 1
        return self.decode + 1 + -(-context * batch // max(batch_tokens - batch, 1)) + 4 * batch

    def longest(self, batch_tokens: int) -> int:
        """Tokens of the longest sequence, its own included."""
        return max(context + self.steps(context, batch, batch_tokens) for context, batch in self.points)


def not_found(what: str, looked: Sequence[str], hint: str) -> KvctlError:
    """That an engine is not installed: where it was looked for, and how to get it."""
    return KvctlError(f"no {what} on this machine: looked at " + "; ".join(looked), hint=hint)
