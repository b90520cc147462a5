"""Key norm (Devoto et al., 2024, arXiv 2406.11430): keys of small norm stay, which tend to be those that get much attention.

A rotary embedding leaves norms as they are, so no scores are stored. The newest token always stays. The paper leaves the first
two layers whole; here every layer has the same budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from kvctl.techniques.budget import read_budget
from kvctl.techniques.keep import Keep, Place
from kvctl.techniques.options import Options

if TYPE_CHECKING:
    from kvctl.techniques.policy import Policy


class KeyNorm(Keep):
    """The tokens whose keys are shortest."""

    name: ClassVar[str] = "knorm"

    def policy(self, place: Place, model: Any) -> Policy:
        from kvctl.techniques.keeps.torch_plain import ShortKeys

        return ShortKeys(self, place)


def build(options: Options) -> KeyNorm:
    """`knorm:0.25`, `knorm:512:sinks=4`."""
    budget = read_budget(options.first("0.25"), "knorm")
    return KeyNorm(budget, options.number("sinks", 0)).holding(1)
