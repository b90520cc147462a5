"""Every technique of the field in its place: yes, no or it depends, and the numbers of this case that say so.

Each function of `TABLE` is one rule, written down in its docstring; adding a technique is a row there, and a test at both sides of
its threshold. What is not known makes "depends", and says what is missing; no number is invented.
"""

from __future__ import annotations

from collections.abc import Callable

from kvctl.recommend.advice import cache, evictions, model, offload, serving, speculative, weights
from kvctl.recommend.advice.case import Advice, Case, KvChoice, Numbers, Sibling, WeightChoice, Work

__all__ = ["TABLE", "Advice", "Case", "KvChoice", "Numbers", "Sibling", "WeightChoice", "Work", "advise"]

TABLE: tuple[Callable[[Case], list[Advice]], ...] = (
    model.structure,
    cache.paging,
    cache.prefix,
    cache.formats,
    weights.weights,
    evictions.evictions,
    offload.offload,
    offload.weights,
    serving.disaggregated,
    serving.flash,
    serving.graphs,
    serving.batching,
    serving.chunked,
    speculative.speculative,
    model.sibling,
)


def advise(case: Case) -> tuple[Advice, ...]:
    """What each technique would do here, always in this order."""
    return tuple(advice for rule in TABLE for advice in rule(case))
