"""What an answer is meant to hold, as runbooks and alarms are told it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvctl.recommend.emit import Promise

if TYPE_CHECKING:
    from kvctl.recommend.answers import Answer
    from kvctl.recommend.request import Ask


def promise_of(answer: Answer, ask: Ask, percent: float) -> Promise:
    """Objectives as they were asked for, or else the far ends of the predicted ranges."""
    speed, candidate = answer.judged.speed, answer.judged.candidate
    ttft, tpot = ask.ttft, ask.tpot
    if speed is not None and math.isfinite(speed.ttft.high):
        ttft = speed.ttft.high if ttft is None else ttft
        tpot = speed.tpot.high if tpot is None else tpot
    return Promise(
        ttft_s=_rounded(ttft), tpot_s=_rounded(tpot), percent=percent, concurrency=ask.concurrency, rate=ask.rate,
        prompt_tokens=ask.prompt, output_tokens=ask.answer, hit_rate=answer.judged.found or None, why=(*answer.why, f"binds first: {answer.binds}"), log=log_lines(candidate.capacity, candidate.deployment.replicas, candidate.deployment.engine.name),
    )  # fmt: skip


def _rounded(value: float | None) -> float | None:
    """Three digits, upwards."""
    if value is None:
        return None
    step = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / step) * step:.6g}")


def log_lines(capacity: int | None, replicas: int, engine: str) -> tuple[str, ...]:
    """What the start-up log will say of the cache."""
    if capacity is None or engine != "vllm":
        return ()
    return (f"GPU KV cache size: {capacity // replicas:,} tokens",)
