"""TOVA (Oren et al., 2024, arXiv 2401.06104): at every pass the tokens go to which the newest query attends least.

As in the paper the probabilities are averaged over all heads of a layer, so that its heads hold the same tokens; or each KV head
goes by its own group of query heads. The newest token always stays. No scores are stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from kvctl.techniques.budget import read_budget
from kvctl.techniques.keep import Keep, Place
from kvctl.techniques.options import Options

if TYPE_CHECKING:
    from kvctl.techniques.policy import Policy


class TOVA(Keep):
    """The tokens that the newest query attends to most."""

    name: ClassVar[str] = "tova"
    together: bool = True
    """Whether all heads of a layer hold the same tokens."""

    def policy(self, place: Place, model: Any) -> Policy:
        from kvctl.techniques.keeps.torch_tova import NewestQuery

        return NewestQuery(self, place)


def build(options: Options) -> TOVA:
    """`tova:0.25`, `tova:512:heads=group:sinks=4`."""
    budget = read_budget(options.first("0.25"), "tova")
    sinks = options.number("sinks", 0)
    heads = options.choice("heads", ("layer", "group"))
    return TOVA(budget, sinks, together=heads == "layer").holding(1)
