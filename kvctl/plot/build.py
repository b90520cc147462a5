"""The chart of models and plans: what each takes at every context, and what the GPU has for it."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl import __version__
from kvctl.ask import Plans
from kvctl.errors import KvctlError, UsageError
from kvctl.plot.chart import MOST_CURVES, Chart, Curve, Limit
from kvctl.size import Question, answer, prepare
from kvctl.spec import ModelSpec
from kvctl.units import plural
from kvctl.words import device_words, engine_words, format_words

_POINTS = 48
_LEAST, _USUAL = 1024, 128 * 1024


def chart_of(specs: Sequence[ModelSpec], plans: Plans) -> Chart:
    """One curve for a model and plan: the cache, and on hardware all that the rank that decides holds, to the longest context asked.

    Raises:
        UsageError: no curve has a point.

    """
    asked_for = len(specs) * len(plans.each)
    if asked_for > MOST_CURVES:
        raise UsageError(f"{asked_for} curves are too many for one picture; it holds {MOST_CURVES}",
                         hint="fewer models, formats or engines")  # fmt: skip
    curves, limits, notes = [], {}, set()
    imagined = any(plan.what_if is not None for plan in plans.each)
    first = None
    for asked in _questions(specs, plans):
        upto = _longest(asked)
        points = {}
        for tokens in _contexts(upto, _corner(asked, upto)):
            try:
                result = answer(asked, tokens)
            except KvctlError:
                continue  # a length that the engine refuses
            first = first or result
            fit = result.fit
            if fit is not None:
                engine = [part for part in fit.parts if part.name not in ("left free", "in use")]
                points[tokens] = fit.weights_bytes + fit.kv_bytes + sum(part.bytes for part in engine)
                idle = fit.overhead_bytes - sum(part.bytes for part in engine)
                limit = fit.device_bytes - idle
                card = fit.devices[fit.bottleneck_rank].removeprefix("NVIDIA ").removeprefix("GeForce ")
                limits[limit] = f"{result.engine}'s share of {card}" if idle else card
                if not fit.fits:
                    # A block that is set aside, or a pool that is divided: it ends before the last byte is taken.
                    points[tokens] = max(points[tokens], limit + 1)
                if fit.estimated:
                    notes.add("estimated: " + ", ".join(words.partition(":")[0] for words in fit.estimated))
                ranks = f"; rank {fit.bottleneck_rank} of {device_words(fit)}" if len(fit.ranks) > 1 else ""
            else:
                plan = result.allocation
                points[tokens] = plan.reserved_bytes if plan is not None else result.kv_bytes
                ranks = "; on each rank" if plan is not None and len(plan.per_rank) > 1 else ""
            notes.add(f"{engine_words(result)}{ranks}")
        if points:
            name = asked.spec.id.rpartition("/")[2] or asked.spec.id
            structure = result.what_if or ("as it is" if imagined else "")
            curves.append((name, structure, format_words(result), engine_words(result), tuple(sorted(points.items()))))
    if first is None:
        raise UsageError("nothing to plot", hint="name a model and contexts, for example --ctx 4k,32k,128k")
    names = dict.fromkeys(name for name, *_ in curves)
    models = ", ".join(names) if len(names) <= 2 else plural(len(names), "model")
    where = f" on {device_words(first.fit)}" if first.fit is not None else ""
    what = "weights, cache and what the engine takes beside them" if first.fit is not None else "KV cache"
    return Chart(
        title=f"{models}{where}: memory against context",
        subtitle=f"{what}; {plural(first.sequences, 'sequence')}",
        curves=_named(curves),
        limits=tuple(Limit(name, size) for size, name in sorted(limits.items())),
        note=f"kvctl {__version__}; {'; '.join(sorted(notes))}; GiB is 2^30 bytes",
    )


def _questions(specs: Sequence[ModelSpec], plans: Plans) -> list[Question]:
    questions = []
    for spec in specs:
        for plan in plans.each:
            try:
                questions.append(prepare(spec, plan))
            except KvctlError:
                if not plans.comparing and plan.what_if is None:
                    raise
    return questions


def _named(curves: list[tuple[str, str, str, str, tuple[tuple[int, int], ...]]]) -> tuple[Curve, ...]:
    """Curves called by what tells them apart: model, structure, format, engine."""
    words = [curve[:4] for curve in curves]
    telling = [column for column in range(4) if len({name[column] for name in words}) > 1] or [0]
    return tuple(
        Curve(", ".join(name[column] for column in telling), curve[4])
        for name, curve in zip(words, curves, strict=True)
    )


def _longest(asked: Question) -> int:
    """The longest context asked for, else the model's own maximum."""
    if asked.plan.contexts is not None:
        return max(asked.plan.contexts)
    return asked.spec.max_context or _USUAL


def _contexts(upto: int, corner: int | None) -> list[int]:
    """Contexts from 1,024 (or the only one) to the longest, evenly in powers of two, and both sides of a corner."""
    least = min(_LEAST, upto)
    if upto < 1:
        return []
    ratio = (upto / least) ** (1 / (_POINTS - 1)) if upto > least else 1
    out = {upto, *(round(least * ratio**step) for step in range(_POINTS))}
    if corner is not None:
        out |= {corner, corner + 1}
    return sorted(tokens for tokens in out if 1 <= tokens <= upto)


def _corner(asked: Question, upto: int) -> int | None:
    """The longest context that fits, where the curve meets the limit."""
    if asked.room is None:
        return None
    try:
        fit = answer(asked, upto).fit
    except KvctlError:
        return None
    return fit.max_context if fit is not None else None
