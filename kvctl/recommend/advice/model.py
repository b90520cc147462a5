"""Advice that is a choice of model: the structure of its attention, and smaller siblings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.engines import IDEAL
from kvctl.errors import KvctlError
from kvctl.formats import BF16, plain
from kvctl.recommend.advice.case import DEPENDS, NO, YES, Advice, Case, size
from kvctl.spec import Formats, LatentAttention, Workload
from kvctl.structure import parse, restructured
from kvctl.units import format_count

if TYPE_CHECKING:
    from kvctl.spec import ModelSpec

SMALLER = 2.0
"""How many times smaller a cache has to be than that of multi-head attention to count as shared heads."""
_SOURCES = "arXiv 1911.02150 (MQA), 2305.13245 (GQA), 2405.04434 (MLA)"


def token_bytes(spec: ModelSpec, context: int) -> float:
    """Bytes that one more token takes at this length, over all layers, in 16 bits and without an engine's rounding."""
    formats = Formats(BF16, plain(BF16), plain(BF16))
    work = Workload(context)
    return float(
        sum(
            count * state.growth(work, formats, IDEAL.retention)
            for layer, count in spec.groups
            for state in layer.states
        )
    )


def _of_heads(spec: ModelSpec, context: int) -> float | None:
    try:
        return token_bytes(restructured(spec, parse("mha")), context)
    except KvctlError:
        return None  # its query heads are not known, or it has no heads


def structure(case: Case) -> list[Advice]:
    """GQA, MQA and MLA: whether the model's cache is smaller than one KV head for each query head would make it.

    yes: at least `SMALLER` times smaller, and nothing is to be done; no: it is not, and nothing but another model changes that;
    depends: the comparison is not possible (query heads not known, or nothing that grows).
    """
    spec, context = case.spec, case.deployment.context
    own = token_bytes(spec, context)
    heads = _of_heads(spec, context)
    name = "MLA" if spec.keeps(LatentAttention) else "GQA or MQA"
    if heads is None or not own:
        what = "nothing of its cache grows with the text" if not own else "how many query heads it has is not known"
        return [Advice("attention structure (GQA, MQA, MLA)", DEPENDS, f"{spec.id}: {what}", None, _SOURCES)]
    ratio = heads / own
    rate = f"{spec.id} keeps {size(round(own))} a token in 16 bits, and multi-head attention of its shape {size(round(heads))}"
    if ratio >= SMALLER:
        because = f"{rate}: {name} makes it {ratio:.3g} times smaller already"
        return [Advice("attention structure (GQA, MQA, MLA)", YES, because, None, _SOURCES)]
    because = f"{rate}: it shares no heads to speak of ({ratio:.3g} times), which nothing but training changes"
    return [Advice("attention structure (GQA, MQA, MLA)", NO, because, "another model: see siblings", _SOURCES)]


def sibling(case: Case) -> list[Advice]:
    """A smaller or distilled sibling: no where every objective is met and the cache holds the requests, or where none is known;
    depends otherwise, since how good another model is for a task is not for arithmetic to say."""
    technique, source = "smaller or distilled sibling", "the catalogue (kvctl models)"
    found = sorted(case.numbers.siblings, key=lambda one: (-one.parameters, one.name))
    if not case.missed:
        return [
            Advice(
                technique, NO, f"{case.spec.id} holds {case.needed:,} tokens and meets what was asked for", None, source
            )
        ]
    missed = "; ".join(case.missed)
    if not found:
        return [Advice(technique, NO, f"{missed}, and no smaller sibling is known", None, source)]
    one = found[0]
    own = token_bytes(case.spec, case.deployment.context)
    because = (
        f"{missed}: {one.name} has {format_count(one.parameters)} parameters and keeps {size(one.token_bytes)} a token "
        f"where {case.spec.id} keeps {size(round(own))}; what it loses depends on the task"
    )
    return [Advice(technique, DEPENDS, because, one.name, source)]
