"""Measured speeds that no prediction of a request rests on, and why: nothing that somebody gives is left out silently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvctl.record import Record
from kvctl.speed import ALIKE
from kvctl.speed.calibrate import REFERENCE
from kvctl.speed.host import NAME as HOST

if TYPE_CHECKING:
    from kvctl.recommend.judge import Judged
    from kvctl.recommend.request import Ask
    from kvctl.speed.calibrate import Measurement


class PassedOver(Record):
    """Loads of one file that are not used for one reason."""

    words: str
    """For people: the file, which of its loads, and why."""
    card: str = ""
    """What they were measured on, where they would be used if that were asked about."""


def card_of(ask: Ask) -> str:
    """What measurements have as their card, of what is asked about; empty where kvctl does not know the GPU."""
    if not ask.gpus:
        return HOST
    return ask.device.facts.name if ask.device.facts is not None else ""


def passed_over(
    ask: Ask, measurements: Sequence[Measurement], told: Mapping[int, str], judged: Sequence[Judged]
) -> tuple[PassedOver, ...]:
    """`told`: reasons by the id of a measurement, as `Judge.told`; `judged`: all that fits."""
    files: dict[tuple[str, str, str], list[Measurement]] = {}
    for one in measurements:
        files.setdefault((one.where, one.card, one.engine), []).append(one)
    out = []
    for (where, card, _), loads in files.items():
        reasons: dict[str, list[Measurement]] = {}
        for one in loads:
            why = told[id(one)] if id(one) in told else _why(ask, one, judged)
            if why:
                reasons.setdefault(why, []).append(one)
        for why, some in reasons.items():
            which = (
                "" if len(some) == len(loads) else f" of its {len(loads)} loads {', '.join(_load(one) for one in some)}"
            )
            out.append(PassedOver(f"{where}: not used{which}: {why}", card if card != card_of(ask) else ""))
    return tuple(out)


def _load(one: Measurement) -> str:
    return f"{one.concurrency:.3g} at once of {one.prompt:,} + {one.answer:,} tokens"


def _why(ask: Ask, one: Measurement, judged: Sequence[Judged]) -> str:
    """Why nothing that was predicted came to ask about it."""
    card, engine = card_of(ask), ALIKE.get(one.engine, one.engine)
    if one.card != card:
        return f"it was measured on {one.card}, and this is about {ask.device.name}"
    if ask.device.mig:
        return "how much of its card's speed a MIG slice has is not known"
    if one.engine == REFERENCE and not ask.gpus:
        return f"what {REFERENCE} does says nothing of a server on a host"
    names = list(dict.fromkeys(engine.name for engine in ask.engines))
    if one.engine != REFERENCE and engine not in [ALIKE.get(name, name) for name in names]:
        return f"it was measured with {one.engine}, and this is about {', '.join(names)}"
    own = [
        each
        for each in judged
        if one.engine == REFERENCE or ALIKE.get(name := each.candidate.deployment.engine.name, name) == engine
    ]
    if not own:
        return f"nothing {'' if one.engine == REFERENCE else f'of {one.engine} '}fits on {ask.device.name}"
    return next((each.no_speed for each in own if each.no_speed), "no speed was predicted")
