"""What an answer is meant to hold, as runbooks and alarms are told it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.errors import KvctlError
from kvctl.formats import BF16, FP32, DType
from kvctl.recommend.emit import Promise
from kvctl.units import format_seconds

if TYPE_CHECKING:
    from kvctl.recommend.answers import Answer
    from kvctl.recommend.candidate import Candidate
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


def weights_of(candidate: Candidate, ask: Ask) -> int | None:
    """Bytes of the checkpoint that is fetched and loaded: of weights that the engine converts, as they are before; None: not known."""
    from kvctl.weigh import weigh

    stored, dtype = candidate.checkpoint, ask.spec.dtype
    computed = BF16 if not isinstance(dtype, DType) or dtype is FP32 else dtype
    try:
        info = weigh(
            ask.spec, (1, 1, False, 1, ()), computed, None if stored.made == "load" else stored.sized, [], assume=True
        )
    except KvctlError:
        return None
    return None if info is None else info.bytes
