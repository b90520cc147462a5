"""StreamingLLM (Xiao et al., 2023, arXiv 2309.17453): the first tokens and the newest.

Keys are to be seen at their places in the cache, not in the text. Rotary embeddings know distances alone, so it is the same
to leave the newest where they are and to turn the first ones forward until they lie right before them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from kvctl.errors import UsageError
from kvctl.techniques.budget import read_budget
from kvctl.techniques.keep import Keep, Place
from kvctl.techniques.options import Options

if TYPE_CHECKING:
    from kvctl.techniques.policy import Policy


class StreamingLLM(Keep):
    """`sinks` first tokens and as many of the newest as the budget leaves."""

    name: ClassVar[str] = "streaming-llm"
    replaced: bool = True
    """Whether positions are those in the cache."""

    def policy(self, place: Place, model: Any) -> Policy:
        from kvctl.techniques.keeps.torch_streaming import Streaming

        return Streaming(self, place, model)


def build(options: Options) -> StreamingLLM:
    """`streaming-llm:0.25`, `streaming-llm:1024:sinks=4:positions=cache`."""
    sinks = options.number("sinks", 4, least=0)
    budget = read_budget(options.first("0.25"), "streaming-llm")
    positions = options.choice("positions", ("cache", "text"))
    if budget.tokens is not None and budget.tokens <= sinks:
        raise UsageError(f"streaming-llm:{budget.tokens} leaves nothing beside {sinks} sinks", hint="a larger budget")
    return StreamingLLM(budget.replace(least=sinks + 1), sinks, replaced=positions == "cache")
