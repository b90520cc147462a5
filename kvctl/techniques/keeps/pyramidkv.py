"""PyramidKV (Cai et al., 2024, arXiv 2406.02069): as SnapKV, with budgets that shrink from the first layer to the last.

Beside the window, which every layer keeps, the last layer gets 1/beta of the mean and the first so much more, with equal steps
between; the mean over layers is the budget. In tokens the layers' budgets are whole numbers whose sum is exactly the number of
layers times the budget. Of a share, each layer's tokens are rounded up, as everywhere; the first layer's share is no
more than 1, and the last one's larger for it.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import ClassVar

from kvctl.techniques.keep import Place
from kvctl.techniques.keeps.snapkv import SnapKV, read
from kvctl.techniques.options import Options


class PyramidKV(SnapKV):
    """SnapKV with a budget for each layer."""

    name: ClassVar[str] = "pyramidkv"
    by_layer: ClassVar[bool] = True
    beta: int = 20

    def _first(self) -> Fraction:
        """What the first layer gets of the mean; the last gets 2 less this."""
        first, share = 2 - Fraction(1, self.beta), self.budget.share
        # No layer may keep more than there is; so it also never keeps more of a longer text than the longer text has more.
        return first if share is None else min(first, 1 / share)

    def _until(self, layer: int, layers: int) -> Fraction:
        """What the layers before `layer` get together, in means."""
        if layers == 1:
            return Fraction(layer)
        first = self._first()
        return layer * first - (2 * first - 2) * Fraction(layer * (layer - 1), 2 * (layers - 1))

    def of_prompt(self, tokens: int, place: Place) -> int:
        least, share = self.budget.least, self.budget.share
        before, after = (self._until(layer, place.layers) for layer in (place.layer, place.layer + 1))
        if share is None:
            assert self.budget.tokens is not None
            free = self.budget.tokens - least
            own = math.floor(after * free + Fraction(1, 2)) - math.floor(before * free + Fraction(1, 2))
        else:
            own = max(math.ceil((after - before) * (share * tokens - least)), 0)
        return min(tokens, least + own)

    def period(self, place: Place) -> int:
        share = self.budget.share
        each = self._until(place.layer + 1, place.layers) - self._until(place.layer, place.layers)
        return 1 if share is None else (each * share).denominator


def build(options: Options) -> PyramidKV:
    """`pyramidkv:0.25`, `pyramidkv:1024:beta=20` and SnapKV's options."""
    snap = read(options)
    beta = options.number("beta", 20, least=1)
    return PyramidKV(snap.budget, snap.sinks, snap.recent, window=snap.window, kernel=snap.kernel, largest=snap.largest, beta=beta)  # fmt: skip
