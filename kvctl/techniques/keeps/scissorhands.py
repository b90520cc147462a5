"""ScissorHands (Liu et al., 2023, arXiv 2305.17118): tokens that mattered lately go on mattering; the others go, many at once.

Tokens fill a buffer. When it is over-full, `drop` of them go at once, and it fills again. Those go that were of no importance at most
of the last `history` queries: a token is of none to a query that gives it a probability under one by the number of tokens seen
so far. Counts are added up over the query heads of a group; of equal counts the older goes.

As `history` is no more than `drop`, one count a token is enough: counting starts `history` steps before the buffer is full
again. A prompt's pass that over-fills it counts its own last `history` queries, or where it has fewer those counted before too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvctl.errors import UsageError
from kvctl.techniques.budget import read_budget
from kvctl.techniques.keep import Keep, Place
from kvctl.techniques.options import Options

if TYPE_CHECKING:
    from kvctl.techniques.policy import Policy

_HISTORY, _RECENT = 400, 10
"""The paper's."""


class ScissorHands(Keep):
    """A buffer of `budget.tokens`, the newest `recent` of which always stay."""

    name: ClassVar[str] = "scissorhands"
    drop: int = 1
    history: int = 1

    @property
    def buffer(self) -> int:
        """Tokens that it holds when it is full."""
        assert self.budget.tokens is not None
        return self.budget.tokens

    def holding(self, recent: int, first: int = 0) -> Self:
        left, most = self.buffer - self.drop + 1, max(self.recent, recent)
        if self.sinks + most > left:
            raise UsageError(f"{self.name}:{self.buffer}:drop={self.drop} leaves {left}, less than {self.sinks} first and {most} newest tokens that are to stay",
                             hint="a larger budget, or a smaller drop=")  # fmt: skip
        return super().holding(recent, first)

    def kept(self, seen: int, generated: int, place: Place) -> int:
        """All until the buffer is full; then up and down by `drop`, wherever a prompt ended."""
        over = seen - self.buffer - 1
        return seen if over < 0 else self.buffer - self.drop + 1 + over % self.drop

    def next_drop(self, seen: int) -> int:
        """How many will have been seen when tokens go next."""
        over = seen - self.buffer - 1
        return self.buffer + 1 if over < 0 else self.buffer + 1 + (over // self.drop + 1) * self.drop

    def period(self, place: Place) -> int:
        return self.drop

    def beside(self, kept: int, heads: int, place: Place) -> int:
        """A count in 32 bits for every token."""
        return 4 * kept * heads

    def policy(self, place: Place, model: Any) -> Policy:
        from kvctl.techniques.keeps.torch_scissorhands import Unimportant

        return Unimportant(self, place)


def build(options: Options) -> ScissorHands:
    """`scissorhands:1024`, `scissorhands:1024:drop=512:history=400:recent=10:sinks=4`."""
    budget = read_budget(options.first("512"), "scissorhands")
    if budget.tokens is None:
        raise UsageError("scissorhands fills a buffer of so many tokens, not of a share", hint="scissorhands:512")
    drop = options.number("drop", max(budget.tokens // 2, 1), least=1)
    history = options.number("history", min(_HISTORY, drop), least=1)
    recent = options.number("recent", max(min(_RECENT, budget.tokens // 4), 1), least=1)
    if history > drop:
        raise UsageError(f"scissorhands: a history of {history} is more than the {drop} tokens dropped at once",
                         hint="a smaller history=, or a larger drop=")  # fmt: skip
    return ScissorHands(budget, options.number("sinks", 0), drop=drop, history=history).holding(recent)
