"""An answer as advice looks at it: its numbers, other formats that it could have, and what else the field offers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.allocation import Part
from kvctl.errors import KvctlError
from kvctl.recommend.advice import Advice, Case, KvChoice, Numbers, Sibling, WeightChoice, Work, advise
from kvctl.recommend.advice.model import token_bytes
from kvctl.recommend.nearest import siblings
from kvctl.speed import Range

if TYPE_CHECKING:
    from kvctl.recommend.candidate import Candidate, Found
    from kvctl.recommend.judge import Judge, Judged
    from kvctl.recommend.request import Ask

_SIBLINGS = 3


def advice_for(one: Judged, ask: Ask, judge: Judge, found: Found) -> tuple[Advice, ...]:
    """Every technique's place in the case of the best answer."""
    candidate = one.candidate
    deployment = candidate.deployment
    count = ask.concurrency if ask.concurrency is not None else candidate.usual_at_once
    reuse, rate = ask.reuse, ask.rate
    if rate is None and one.speed is not None:
        rate = one.speed.request_rate.mid
    shared = reuse.shared if reuse is not None else 0
    gap = reuse.gap() if reuse is not None else None
    work = Work(ask.prompt, ask.answer, max(1, -(-count // deployment.replicas)), ask.rate, shared=shared, hit_rate=None if shared else one.found,
                endless=reuse.share(None) if reuse is not None else None,
                reuse_seconds=gap / rate if gap is not None and rate else None, ttft=ask.ttft, tpot=ask.tpot)  # fmt: skip
    case = Case(deployment, ask.spec, work, _numbers(one, ask, judge, found), judge.quality, judge.limit)
    return advise(case)


def _numbers(one: Judged, ask: Ask, judge: Judge, found: Found) -> Numbers:
    candidate = one.candidate
    deployment, stack = candidate.deployment, candidate.stack
    graphs = [part.bytes for part in stack.parts if part.name == "graphs"]
    alike = [
        other for other in found.candidates
        if other.deployment.engine == deployment.engine and other.split == candidate.split and other.deployment.replicas == deployment.replicas
    ]  # fmt: skip
    speed = one.speed
    prefill = None
    if speed is not None:
        prepared = judge.prepared(candidate)
        alone = prepared.at(ask.prompt, 1, 1.0).ttft
        prefill = Range(*(ask.prompt / value for value in (alone.high, alone.mid, alone.low)))
    return Numbers(
        token_bytes=_token(candidate, ask),
        capacity=None if candidate.capacity is None else candidate.capacity // deployment.replicas,
        rank_weights=stack.weights,
        host_weights=candidate.offloaded,
        graph_bytes=graphs[0] if graphs else None,
        free=stack.headroom,
        prefill_rate=prefill,
        tpot=speed.tpot if speed is not None else None,
        ttft=speed.ttft if speed is not None else None,
        decode_bound=speed.decode_bound if speed is not None else "",
        kv_choices=tuple(_caches(candidate, alike, ask)),
        weight_choices=tuple(_weights(candidate, alike)),
        siblings=tuple(_siblings(ask)),
    )  # fmt: skip


def _token(candidate: Candidate, ask: Ask) -> int:
    """Bytes of one more token of one sequence on one rank, as the pool counts it."""
    stack = candidate.stack
    each = candidate.at_once / candidate.deployment.replicas / candidate.split.data
    return max(1, round(stack.kv / max(each, 1.0) / ask.context))


def _caches(candidate: Candidate, alike: list[Candidate], ask: Ask) -> list[KvChoice]:
    """The same deployment with its cache in other formats."""
    seen: dict[str, KvChoice] = {}
    for other in alike:
        name = other.deployment.kv_dtype
        if (
            other.deployment.weights == candidate.deployment.weights
            and name not in seen
            and name != candidate.deployment.kv_dtype
        ):
            capacity = None if other.capacity is None else other.capacity // other.deployment.replicas
            seen[name] = KvChoice(
                name,
                capacity,
                f"--kv-cache-dtype {name}" if not other.deployment.engine.slots else f"-ctk {name} -ctv {name}",
                _token(other, ask),
            )
    return list(seen.values())


def _weights(candidate: Candidate, alike: list[Candidate]) -> list[WeightChoice]:
    """The same with its weights in other formats."""
    seen: dict[str, WeightChoice] = {}
    for other in alike:
        name = other.deployment.weights
        if name != candidate.deployment.weights and name not in seen:
            how = other.deployment.model if other.deployment.made == "stored" else other.checkpoint.how
            seen[name] = WeightChoice(name, other.stack.weights, how)
    return list(seen.values())


def _siblings(ask: Ask) -> list[Sibling]:
    out: list[Sibling] = []
    for spec in siblings(ask.spec):
        if len(out) == _SIBLINGS:
            break
        if spec.weights is None or spec.weights.parameters is None:
            continue
        try:
            out.append(
                Sibling(
                    spec.id,
                    spec.weights.parameters,
                    round(token_bytes(spec, min(ask.context, spec.max_context or ask.context))),
                )
            )
        except KvctlError:
            continue
    return out


def memory(candidate: Candidate) -> dict[str, int]:
    """Bytes of the fullest rank by what takes them, in the order of the stack."""
    stack = candidate.stack

    def named(part: Part) -> str:
        return part.name

    out = {"weights": stack.weights}
    for part in stack.parts:
        out[named(part)] = out.get(named(part), 0) + part.bytes
    # Of a rate nobody says how many are there at once: as many as are let in.
    out["cache of these requests" if candidate.asked is not None else "cache of all that are let in"] = stack.kv
    if stack.pool > stack.kv:
        out["cache that is reserved beside"] = stack.pool - stack.kv
    out["free"] = stack.headroom
    return out
