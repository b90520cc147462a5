"""What --technique of `kvctl profile` and its companions ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvctl.errors import UsageError
from kvctl.options_profile import percent

if TYPE_CHECKING:
    from kvctl.measure.assessed import AssessAsked
    from kvctl.measure.run import ProfilePlan
    from kvctl.techniques import Technique


def read_techniques(texts: Sequence[str] | None, *, alone: bool, **bounds: Any) -> list[Technique]:
    """Techniques to compare; `alone`: one sequence on one device, all layers.

    Raises:
        UsageError: an unknown technique, or options that do not go with them, or that are nothing without them.

    """
    for name, value in bounds.items():
        option = "--" + name.replace("_", "-")
        if value is not None and not texts:
            raise UsageError(f"{option} is about techniques, and none is named", hint="--technique int8,int4")
        if name in ("max_ppl_increase", "min_top1"):
            bound(value, option)
        if name == "best" and value and bounds.get("max_ppl_increase") is None and bounds.get("min_top1") is None:
            raise UsageError("--best takes a bound to be kept", hint="--max-ppl-increase 1%, or --min-top1 98%")
        if name == "tokens" and value is not None and not 1 <= value <= 2**20:
            raise UsageError(
                f"--tokens: {value} is out of range", hint="tokens of the text that are scored: from 1 to 1,048,576"
            )
    if not texts:
        return []
    from kvctl.techniques import parse_list

    found = parse_list(texts)
    if not found:
        raise UsageError("--technique: none is named", hint="--technique int8,int4, or all")
    if not alone:
        raise UsageError("--technique compares caches of one sequence on one device",
                         hint="without --tp, --until-oom, --layers and --batch")  # fmt: skip
    return found


def assess_asked(
    plan: ProfilePlan, tokens: int | None, most_change: str | None, least_top1: str | None, *, drawn: bool
) -> AssessAsked:
    """What is measured of each technique.

    Raises:
        UsageError: a bound that is no percentage, or a model whose positions end before anything can be scored.

    """
    from kvctl.measure.assessed import AssessAsked, Bounds

    bounds = Bounds(bound(most_change, "--max-ppl-increase"), bound(least_top1, "--min-top1"))
    if plan.wanted.random and (bounds or drawn):
        raise UsageError(f"{'bounds are' if bounds else '--plot is'} about quality, which needs a text, and random weights have no tokenizer",
                         hint="a model with its weights")  # fmt: skip
    return AssessAsked(
        max(plan.asked.contexts), plan.asked.decode, max(plan.asked.repeat, 1), plan.asked.encoder_tokens, bounds=bounds
    ).within(plan.spec.max_context, tokens)


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
