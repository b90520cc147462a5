"""What `kvctl recommend` reports, as a plan that can be kept (`kvctl.recommend/1`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from kvctl import __version__
from kvctl.recommend.answers import Answer, Left, Recommendation, in_words
from kvctl.recommend.cases import memory
from kvctl.recommend.emit import Site, named
from kvctl.recommend.what_if import SCHEMA, Side, settings
from kvctl.record import Record
from kvctl.units import format_seconds

if TYPE_CHECKING:
    from kvctl.recommend.judge import Judged
    from kvctl.recommend.request import Ask
    from kvctl.recommend.verify import Trial

MATRIX = "kvctl.recommend-matrix/1"


class RecommendReport(Record):
    """One request's answer, or those of several models and GPUs beside each other."""

    each: tuple[Recommendation, ...]
    site: Site | None = None
    explain: bool = False
    trial: Trial | None = None
    """What came of an answer that was started, where one was."""

    @property
    def proven(self) -> bool:
        """Whether no promise broke, as far as one was put to the proof."""
        return self.trial is None or self.trial.holds

    @property
    def interrupted(self) -> bool:
        return self.trial is not None and self.trial.interrupted

    @property
    def met(self) -> bool:
        """Whether a request has an answer."""
        return any(one.met for one in self.each)

    def site_of(self, one: Recommendation) -> Site:
        return self.site or Site(named(one.ask.spec.id))

    def to_dict(self) -> dict[str, Any]:
        if len(self.each) == 1:
            found = one_dict(self.each[0], self.site_of(self.each[0]))
            return found if self.trial is None else found | {"verified": self.trial.to_dict()}
        return {
            "schema": MATRIX, "kvctl_version": __version__, "rows": [row_dict(one) for one in self.each],
        }  # fmt: skip


def one_dict(found: Recommendation, site: Site) -> dict[str, Any]:
    """A request and its answers."""
    return {
        "schema": SCHEMA,
        "kvctl_version": __version__,
        "asked": asked_dict(found.ask, found.limit),
        "answers": [_answer(answer, site) for answer in found.answers],
        "left": [_left(one) for one in found.left],
        "rejected": [{name: getattr(one, name) for name in one._fields} for one in found.rejections],
        "tried": found.tried,
        "fitting": found.fitting,
        "nearest": [{"direction": near.direction, "change": near.words, "with": in_words(near.candidate)} for near in found.nearest],
        "impossible": list(found.impossible),
        "best_missing": None if found.best_missing is None else {"with": in_words(found.best_missing.candidate), "misses": list(found.best_missing.missed)},
        "advice": [one.to_dict() for one in found.advice],
        "notes": list(found.notes),
    }  # fmt: skip


def asked_dict(ask: Ask, limit: float) -> dict[str, Any]:
    """The request, with what it left out filled in."""
    return {
        "model": ask.spec.id, "gpu": ask.device.name, "gpus": ask.gpus, "nodes": ask.nodes, "context": ask.context,
        "prompt_tokens": ask.prompt, "output_tokens": ask.answer, "concurrency": ask.concurrency, "rate": ask.rate,
        "ttft_seconds": ask.ttft, "tpot_seconds": ask.tpot, "slo_percent": ask.slo_percent, "goal": ask.goal, "max_quality_loss_percent": limit,
        **{f"told_{name}": getattr(ask.pins, name) for name in ask.pins._fields},
        "engines": [engine.name for engine in ask.engines],
    }  # fmt: skip


def side(answer: Answer, site: Site) -> Side:
    """What is compared of an answer."""
    from kvctl.recommend.emit.script import first

    one = answer.judged
    candidate, speed = one.candidate, one.speed
    told = first(candidate.deployment, site)
    figures = {} if speed is None else {
        name: found for name in ("ttft", "tpot", "output_rate", "request_rate") if math.isfinite((found := getattr(speed, name)).high)
    }  # fmt: skip
    return Side(
        in_words(candidate), settings(candidate.deployment), (*told.program, *told.arguments), memory(candidate),
        candidate.offloaded, candidate.capacity, candidate.at_once,
        figures, one.loss, one.cost,
    )  # fmt: skip


def _answer(answer: Answer, site: Site) -> dict[str, Any]:
    one = answer.judged
    speed = one.speed
    return {
        "kind": answer.kind,
        "why": list(answer.why),
        "binds": answer.binds,
        "change": answer.change,
        "meets_surely": one.sure,
        "requests_at_once": one.candidate.at_once,
        "usual_requests_at_once": one.candidate.usual_at_once,
        "prefill_bound": None if speed is None else speed.prefill_bound,
        "decode_bound": None if speed is None else speed.decode_bound,
        "validated": None if speed is None else speed.validated or "unvalidated",
        "assumption": one.no_speed if speed is None else speed.assumption,
        "prompt_share_found": one.found,
        "notes": list(one.candidate.notes),
        "side": side(answer, site).to_dict(),
    }


def _left(one: Left) -> dict[str, Any]:
    return {
        "why": one.why,
        "count": one.count,
        "nearest": in_words(one.nearest.candidate),
        "misses": list(one.nearest.missed),
    }


def row_dict(found: Recommendation) -> dict[str, Any]:
    """A row of the matrix: the best answer in flat columns."""
    ask = found.ask
    base: dict[str, Any] = {
        "model": ask.spec.id,
        "gpu": f"{ask.all_gpus}x {ask.device.name}" if ask.gpus else ask.device.name,
        "met": found.met,
    }
    if not found.answers:
        near = "; ".join(f"{near.direction}: {near.words}" for near in found.nearest)
        return base | {"answer": None, "gpus_used": None, "requests_at_once": None, "ttft_seconds": None, "tpot_seconds": None,
                       "output_tokens_per_second": None, "output_tokens_per_second_low": None, "output_tokens_per_second_high": None, "validated": None,
                       "made_first": None, "quality_loss_percent": None, "per_hour": None,
                       "nearest": "; ".join(found.impossible) or near or None}  # fmt: skip
    one = found.answers[0].judged
    speed = one.speed
    return base | {
        "answer": in_words(one.candidate), "gpus_used": one.cost.gpus, "requests_at_once": one.candidate.at_once,
        "ttft_seconds": _mid(one, "ttft"), "tpot_seconds": _mid(one, "tpot"),
        "output_tokens_per_second": None if speed is None else speed.output_rate.mid,
        "output_tokens_per_second_low": None if speed is None else speed.output_rate.low,
        "output_tokens_per_second_high": None if speed is None else speed.output_rate.high,
        "validated": None if speed is None else speed.validated or "unvalidated",
        "made_first": one.candidate.checkpoint.how if one.candidate.deployment.made == "make" else None,
        "quality_loss_percent": None if one.loss.percent is None else one.loss.percent.mid, "per_hour": one.cost.per_hour, "nearest": None,
    }  # fmt: skip


def _mid(one: Judged, name: str) -> float | None:
    if one.speed is None:
        return None
    value: float = getattr(one.speed, name).mid
    return value if math.isfinite(value) else None


def seconds(value: float) -> str:
    """For people; what never comes is said so."""
    return format_seconds(value) if math.isfinite(value) else "never"
