"""Expected attention (Devoto et al., 2025, arXiv 2510.00636): after the prompt, tokens that queries to come are expected to attend to.

Queries to come are taken to be normal, with mean and covariance of those of the pass (without the first tokens') before their
rotary embedding, turned on average as over the next `future` positions. The expected exponentials of their scores, normalized
over the tokens and averaged over the query heads of a group, times the norm of the value, say what stays; this is what NVIDIA's
kvpress does by default. Passes of one token let nothing go: what is generated all stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from kvctl.techniques.budget import read_budget
from kvctl.techniques.keep import Keep, Place
from kvctl.techniques.options import Options

if TYPE_CHECKING:
    from kvctl.techniques.policy import Policy


class ExpectedAttention(Keep):
    """The budget is a prompt's."""

    name: ClassVar[str] = "expected-attention"
    future: int = 512

    def kept(self, seen: int, generated: int, place: Place) -> int:
        return self.budget.of(seen - generated) + generated

    def policy(self, place: Place, model: Any) -> Policy:
        from kvctl.techniques.keeps.torch_expected import Expected

        return Expected(self, place, model)


def build(options: Options) -> ExpectedAttention:
    """`expected-attention:0.25`, `expected-attention:1024:sinks=4:future=512`."""
    budget = read_budget(options.first("0.25"), "expected-attention")
    sinks, future = options.number("sinks", 4), options.number("future", 512, least=1)
    return ExpectedAttention(budget, sinks, future=future).holding(1)
