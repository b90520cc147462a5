"""H2O (Zhang et al., 2023, arXiv 2306.14048): the tokens that got most attention so far, and the newest.

Each KV head keeps for every token it holds the sum of the probabilities that all queries so far gave it, and lets go of the
smallest sums outside the newest half. Of several query heads in a group either all count, or the one that attends most to the
token at each query.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from kvctl.techniques.budget import read_budget
from kvctl.techniques.keep import Keep, Place
from kvctl.techniques.options import Options

if TYPE_CHECKING:
    from kvctl.techniques.policy import Policy


class H2O(Keep):
    """The newest half of the budget, or `recent` tokens, and the heaviest of the others."""

    name: ClassVar[str] = "h2o"
    halves: bool = True
    """Whether the newest are half of what is kept, rounded down."""
    largest: bool = False
    """Whether of a group's query heads the largest probability counts, not the sum."""

    def newest(self, kept: int) -> int:
        """How many of so many are the newest, whatever their sums."""
        return max(self.recent, kept // 2) if self.halves else self.recent

    def beside(self, kept: int, heads: int, place: Place) -> int:
        """A sum in float32 for every token."""
        return 4 * kept * heads

    def policy(self, place: Place, model: Any) -> Policy:
        from kvctl.techniques.keeps.torch_h2o import HeavyHitters

        return HeavyHitters(self, place)


def build(options: Options) -> H2O:
    """`h2o:0.25`, `h2o:512:recent=64:group=max:sinks=4`."""
    budget = read_budget(options.first("0.25"), "h2o")
    sinks = options.number("sinks", 0)
    recent = options.number("recent", 0)
    group = options.choice("group", ("sum", "max"))
    return H2O(budget, sinks, halves=not recent, largest=group == "max").holding(max(recent, 1))
