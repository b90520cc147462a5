"""The newest tokens and nothing else: what others are compared with. The first tokens go, positions stay those of the text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from kvctl.techniques.budget import read_budget
from kvctl.techniques.keep import Keep, Place
from kvctl.techniques.options import Options

if TYPE_CHECKING:
    from kvctl.techniques.policy import Policy


class Window(Keep):
    """As many of the newest as the budget has."""

    name: ClassVar[str] = "window"

    def policy(self, place: Place, model: Any) -> Policy:
        from kvctl.techniques.keeps.torch_plain import Newest

        return Newest(self, place)


def build(options: Options) -> Window:
    """`window:0.25`, `window:512`."""
    return Window(read_budget(options.first("0.25"), "window")).holding(1)
