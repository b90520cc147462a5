"""What an answer is meant to hold, as runbooks and alarms are told it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.recommend.emit import Promise
from kvctl.units import format_seconds

if TYPE_CHECKING:
    from kvctl.recommend.answers import Answer
    from kvctl.recommend.request import Ask


def promise_of(answer: Answer, ask: Ask) -> Promise:
    """Objectives as they were asked for; no prediction stands in for one, for a range of medians is no bound of the slowest."""
    candidate = answer.judged.candidate
    why = [*answer.why, f"binds first: {answer.binds}"]
    if ask.ttft is None and ask.tpot is None:
        why.append("no times were asked for: --slo ttft=…,tpot=… adds checks and alarms for them; predicted are "
                   + _predicted(answer) if answer.judged.speed is not None else "no times were asked for")  # fmt: skip
    return Promise(
        ttft_s=ask.ttft, tpot_s=ask.tpot, percent=ask.slo_percent, concurrency=ask.concurrency, rate=ask.rate,
        prompt_tokens=ask.prompt, output_tokens=ask.answer, hit_rate=answer.judged.found or None, why=tuple(why), log=log_lines(candidate.capacity, candidate.deployment.replicas, candidate.deployment.engine.name),
    )  # fmt: skip


def _predicted(answer: Answer) -> str:
    speed = answer.judged.speed
    assert speed is not None
    return f"TTFT {format_seconds(speed.ttft.mid)} and TPOT {format_seconds(speed.tpot.mid)} in the median"


def log_lines(capacity: int | None, replicas: int, engine: str) -> tuple[str, ...]:
    """What the start-up log will say of the cache."""
    if capacity is None or engine != "vllm":
        return ()
    return (f"GPU KV cache size: {capacity // replicas:,} tokens",)
