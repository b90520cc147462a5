"""Which tokens stay: what every eviction says of itself without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.techniques.budget import Budget

if TYPE_CHECKING:
    from kvctl.techniques.policy import Policy


class Place(Record):
    """Which layer an eviction works in; budgets may differ by layer."""

    layer: int = 0
    layers: int = 1


class Keep(Record):
    """An eviction. The first `sinks` and the newest `recent` tokens of every head always stay."""

    name: ClassVar[str]
    by_layer: ClassVar[bool] = False
    """Whether its budgets differ from layer to layer."""

    budget: Budget
    sinks: int = 0
    recent: int = 1
    fixed: int = 0
    """Of the first places, those that nothing may take out: a store has them unpacked. Padding may lie there."""

    def holding(self, recent: int, first: int = 0) -> Self:
        """The same, with at least so many newest tokens among those that always stay, and `first` fixed places.

        Raises:
            UsageError: they and the first ones are more than the budget.

        """
        most, budget = max(self.recent, recent), self.budget
        if budget.tokens is not None and self.sinks + most > budget.tokens:
            raise UsageError(f"{self.name}:{budget.tokens} is less than {self.sinks} first and {most} newest tokens that are to stay",
                             hint="a larger budget, or fewer of them")  # fmt: skip
        least = budget.replace(least=max(budget.least, self.sinks + most))
        return self.replace(recent=most, fixed=max(self.fixed, first), budget=least)

    def kept(self, seen: int, generated: int, place: Place) -> int:
        """Tokens of each head that are held when `seen` were, the last `generated` of them one by one."""
        return self.budget.of(seen)

    def period(self, place: Place) -> int:
        """After so many tokens more it holds a whole number more, always the same."""
        return 1 if self.budget.share is None else self.budget.share.denominator

    def beside(self, kept: int, heads: int, place: Place) -> int:
        """Bytes that it keeps of one sequence in one layer beside keys and values: scores, counts, positions."""
        return 0

    def policy(self, place: Place, model: Any) -> Policy:
        """What does it, for one layer of a run; imports torch."""
        raise NotImplementedError
