"""Tokens drawn by lot: what others are compared with.

Each token draws a number when it arrives, by its place in the text, its head and its layer; the highest stay, so that what is
held is at any time an even sample of what was seen. The newest token always stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from kvctl.techniques.budget import read_budget
from kvctl.techniques.keep import Keep, Place
from kvctl.techniques.options import Options

if TYPE_CHECKING:
    from kvctl.techniques.policy import Policy


class Random(Keep):
    """An even sample."""

    name: ClassVar[str] = "random"
    seed: int = 0

    def beside(self, kept: int, heads: int, place: Place) -> int:
        """The number that each token drew, in float32."""
        return 4 * kept * heads

    def policy(self, place: Place, model: Any) -> Policy:
        from kvctl.techniques.keeps.torch_plain import Lots

        return Lots(self, place)


def build(options: Options) -> Random:
    """`random:0.25`, `random:512:sinks=4:seed=1`."""
    budget = read_budget(options.first("0.25"), "random")
    return Random(budget, options.number("sinks", 0), seed=options.number("seed", 0)).holding(1)
