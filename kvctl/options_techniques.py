"""What --technique of `kvctl profile` and its companions ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvctl.errors import UsageError
from kvctl.options_profile import percent
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.measure.assessed import AssessAsked, Bounds
    from kvctl.measure.run import ProfilePlan
    from kvctl.techniques import Technique


class Asked(Record):
    """What is compared, and how much worse it may be."""

    techniques: tuple[Technique, ...] = ()
    bounds: Bounds | None = None
    tokens: int | None = None


def read_techniques(
    texts: Sequence[str] | None, max_ppl_increase: str | None, min_top1: str | None, *, best: bool, tokens: int | None, text: str | None,
    alone: bool,
) -> Asked:  # fmt: skip
    """Techniques to compare; `alone`: one sequence on one device, all layers.

    Raises:
        UsageError: an unknown technique, or options that do not go with them, or that are nothing without them.

    """
    bounds = {"--max-ppl-increase": max_ppl_increase, "--min-top1": min_top1}
    for option, value in (bounds | {"--best": best or None, "--tokens": tokens, "--text": text}).items():
        if value is not None and not texts:
            raise UsageError(f"{option} is about techniques, and none is named", hint="--technique int8,int4")
    if not texts:
        return Asked()
    from kvctl.measure.assessed import Bounds
    from kvctl.techniques import parse_list

    asked = Bounds(*(bound(value, option) for option, value in bounds.items()))
    if best and not asked:
        raise UsageError("--best takes a bound to be kept", hint="--max-ppl-increase 1%, or --min-top1 98%")
    if tokens is not None and not 1 <= tokens <= 2**20:
        raise UsageError(
            f"--tokens: {tokens} is out of range", hint="tokens of the text that are scored: from 1 to 1,048,576"
        )
    found = parse_list(texts)
    if not found:
        raise UsageError("--technique: none is named", hint="--technique int8,int4, or all")
    if not alone:
        raise UsageError("--technique compares caches of one sequence on one device",
                         hint="without --tp, --until-oom, --layers and --batch")  # fmt: skip
    return Asked(tuple(found), asked, tokens)


def assess_asked(plan: ProfilePlan, asked: Asked, *, drawn: bool) -> AssessAsked:
    """What is measured of each technique.

    Raises:
        UsageError: bounds or a picture, of a model that reads no text.

    """
    from kvctl.measure.assessed import AssessAsked, Bounds

    bounds = asked.bounds or Bounds()
    if plan.wanted.random and (bounds or drawn):
        raise UsageError(f"{'bounds are' if bounds else '--plot is'} about quality, which needs a text, and random weights have no tokenizer",
                         hint="a model with its weights")  # fmt: skip
    return AssessAsked(
        max(plan.asked.contexts), plan.asked.decode, max(plan.asked.repeat, 1), plan.asked.encoder_tokens, bounds=bounds
    ).within(plan.spec.max_context, asked.tokens)


def bound(text: str | None, option: str) -> float | None:
    """A bound in percent.

    Raises:
        UsageError: it is none, or may be meant as a share.

    """
    value = percent(text, option)
    if value is None or text is None:
        return None
    if option == "--min-top1" and value > 100:
        raise UsageError(f"{option}: {text[:40]} is more than all", hint=f"{option} 98%")
    if 0 < value < 1 and not text.endswith("%") and option == "--min-top1":
        raise UsageError(
            f"{option}: {text[:40]} may be a share or a percentage", hint=f"{option} {100 * value:g}%, or {value:g}%"
        )
    return value
