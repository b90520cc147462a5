"""SnapKV (Li et al., 2024, arXiv 2404.14469): after the prompt, the tokens that its last queries attend to, and those of these queries.

The probabilities of the last `window` queries of a pass are added up, pooled along the places held before them (average as in
the authors' code, or largest) and averaged over the query heads of a group. Passes of one token let nothing go: what is
generated all stays. A prompt in several passes is cut after each; the queries of earlier passes are gone by then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from kvctl.errors import UsageError
from kvctl.techniques.budget import read_budget
from kvctl.techniques.keep import Keep, Place
from kvctl.techniques.options import Options

if TYPE_CHECKING:
    from kvctl.techniques.policy import Policy


class SnapKV(Keep):
    """The budget is a prompt's and has the window in it."""

    name: ClassVar[str] = "snapkv"
    window: int = 32
    kernel: int = 5
    largest: bool = False
    """Whether pooling takes the largest, not the average."""

    def of_prompt(self, tokens: int, place: Place) -> int:
        """Tokens kept of a prompt."""
        return self.budget.of(tokens)

    def kept(self, seen: int, generated: int, place: Place) -> int:
        return self.of_prompt(seen - generated, place) + generated

    def policy(self, place: Place, model: Any) -> Policy:
        from kvctl.techniques.keeps.torch_snapkv import LastQueries

        return LastQueries(self, place)


def read(options: Options, default: str = "0.25") -> SnapKV:
    """The options of SnapKV.

    Raises:
        UsageError: a budget without room for the window, or a kernel without a middle.

    """
    budget = read_budget(options.first(default), options.name)
    window, kernel = options.number("window", 32, least=1), options.number("kernel", 5, least=1)
    if kernel % 2 == 0:
        raise UsageError(f"{options.name}:kernel={kernel} has no middle", hint="an odd number")
    pool = options.choice("pool", ("avg", "max"))
    sinks = options.number("sinks", 0)
    if budget.tokens is not None and budget.tokens < sinks + window:
        raise UsageError(f"{options.name}:{budget.tokens} has no room for the last {window} tokens" + (f" and {sinks} first" if sinks else ""),
                         hint="a larger budget, or a smaller window=")  # fmt: skip
    return SnapKV(budget, sinks, window=window, kernel=kernel, largest=pool == "max").holding(window)


def build(options: Options) -> SnapKV:
    """`snapkv:0.25`, `snapkv:1024:window=32:kernel=7:pool=max:sinks=4`."""
    return read(options)
