"""Why an engine did not start: what was short, and settings with which it fits, each worked out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from kvctl.errors import KvctlError
from kvctl.size import SizePlan
from kvctl.startlog.causes import compared
from kvctl.startlog.figures import UNITS
from kvctl.startlog.report import LogRow, Refused, refusal_words, row
from kvctl.startlog.trial import Trial
from kvctl.units import GIB, format_bytes

_ALLOCATION = re.compile(
    r"Tried to allocate (\d[\d.]*) (GiB|MiB)\.(?: GPU (\d+) has a total capacity of (\d[\d.]*) GiB of which (\d[\d.]*) (GiB|MiB) is free)?"
)
_PROCESS = re.compile(r"this process has (\d[\d.]*) (GiB|MiB) memory in use")


def explained(trial: Trial) -> Refused | None:
    """The refusal in plain words."""
    refusal = trial.log.refusal
    if refusal is None:
        return None
    by_kind = {"too long": _too_long, "no cache": _no_cache, "not free": _not_free, "fraction": _fraction}
    why, short, fits = by_kind.get(refusal.kind, _out_of_memory)(trial)
    return Refused(refusal.kind, refusal.line, why, short, tuple(fits), refusal_words(refusal))


def rows(trial: Trial) -> Iterator[LogRow]:
    """What one request needs, and the longest that fits, beside kvctl's."""
    log = trial.log
    if (asked := log.figure("length_asked")) is not None:
        yield from _fitted(trial, int(asked.value))
    if log.refusal is None or log.refusal.kind != "too long":
        return
    needed, longest = log.figure("needed"), log.figure("longest")
    if needed is not None:

        def takes(plan: SizePlan) -> tuple[float, float] | None:
            found = trial.allocation(plan, kv_budget=None, num_blocks=None)
            return (found.reserved_bytes,) * 2 if found is not None else None

        yield from compared(trial, "needed", needed, takes)
    # The estimate in the message leaves no block aside, as the start itself does from 0.29 on.
    aside = _set_aside(trial)
    if longest is not None:
        yield from compared(trial, "longest", longest, lambda plan: _longest(trial, plan, aside))


def _fitted(trial: Trial, asked: int) -> Iterator[LogRow]:
    """The length that --max-model-len auto came to; a block is set aside for it in every version."""
    longest, budget = trial.log.figure("longest"), trial.log.kv_budget
    sample = trial.allocation(context=asked, kv_budget=None)
    if longest is None or budget is None or sample is None:
        return
    ends = [
        trial.allocation(context=asked, kv_budget=max(end, 1), fit_length=True)
        for end in (budget[0] - sample.bytes_per_block, budget[1])
    ]
    low, high = (found.longest_sequence if found is not None else None for found in ends)
    if low is not None and high is not None:
        yield row("longest", longest, low, high, low <= longest.value <= high)


def _set_aside(trial: Trial) -> int:
    """Bytes of the block that is never given out."""
    from kvctl.engines.vllm.rules import rules_for

    if trial.plan.engine.name != "vllm" or not rules_for(trial.plan.engine.version)[0].spare_block:
        return 0
    found = trial.allocation(kv_budget=None)
    return found.bytes_per_block if found is not None else 0


def _longest(trial: Trial, plan: SizePlan, aside: int) -> tuple[int, int] | None:
    """Tokens of the longest request that the printed memory and `aside` hold, at both ends of it."""
    budget = trial.log.kv_budget
    if budget is None or budget[0] <= 0:
        return None
    ends = []
    for end in budget:
        found = trial.allocation(plan, kv_budget=end + aside, fit_length=True)
        if found is None:
            return None
        ends.append(found.longest_sequence if found.held or found.longest_sequence < trial.length else 0)
    return ends[0], ends[1]


Why = tuple[str, int | None, list[str]]


def _too_long(trial: Trial) -> Why:
    log = trial.log
    needed, available = log.figure("needed"), log.figure("available_refused") or log.figure("kv_available")
    length = trial.length
    fits: list[str] = []
    ends = _longest(trial, trial.plan, 0)
    if ends is not None and ends[0]:
        fits.append(f"--max-model-len {ends[0]}")
    short = None
    why = f"the cache holds no request of {length:,} tokens"
    if needed is not None and available is not None:
        short = int(needed.value - available.value)
        why = f"one request of {length:,} tokens takes {needed.text}, and {available.text} are left for the cache: {format_bytes(max(short, 0))} short"
        fits += _more_share(trial, short, (available.high - available.value) + (needed.high - needed.value))
    elif (budget := log.kv_budget) is not None and (one := trial.allocation(kv_budget=None)) is not None:
        short = int(one.reserved_bytes - sum(budget) / 2)
        why = f"one request of {length:,} tokens takes {format_bytes(one.reserved_bytes)} by kvctl's count, {format_bytes(max(short, 0))} more than is left for the cache"
    fits += _smaller(trial)
    return why, short, fits


def _smaller(trial: Trial) -> list[str]:
    """A smaller format of the cache, where one request then fits."""
    plan, budget = trial.plan, trial.log.kv_budget
    name = plan.engine.smaller_cache
    if budget is None or not name or plan.key is not None:
        return []
    try:
        kind = plan.engine.kv_dtype(name, "--kv-cache-dtype")
    except KvctlError:
        return []
    found = trial.allocation(plan.replace(key=kind, value=kind.values or kind), kv_budget=max(budget[0], 1))
    return [f"--kv-cache-dtype {name}"] if found is not None and found.held else []


def _more_share(trial: Trial, short: float, rounding: float) -> list[str]:
    """A larger share of the GPU, where that much is free."""
    total, free, asked = (trial.log.figure(name) for name in ("device_total", "device_free", "requested"))
    if total is None or free is None or asked is None:
        return []
    share = math.ceil((asked.value + short + rounding) / total.low * 100) / 100
    return [f"--gpu-memory-utilization {share:.2f}"] if share * total.high <= free.low and share < 1 else []


def _no_cache(trial: Trial) -> Why:
    log = trial.log
    available, weights, asked = log.figure("kv_available"), log.figure("weights"), log.figure("requested")
    if available is None:
        taken = f"weights take {weights.text}; " if weights is not None else ""
        return f"{taken}with activations nothing is left of the engine's share for the cache", None, []
    short = max(0, -int(available.value))
    of = f" of the {asked.text} that the engine may take" if asked is not None else ""
    why = f"weights and activations need {format_bytes(short)} more than there is{of}: nothing is left for the cache"
    one = trial.allocation(kv_budget=None)
    need = one.reserved_bytes if one is not None else 0
    return why, short, _more_share(trial, short + need, available.half)


def _not_free(trial: Trial) -> Why:
    log = trial.log
    free, total, asked, share = (
        log.figure(name) for name in ("device_free", "device_total", "requested", "utilization")
    )
    if free is None or total is None or asked is None or share is None:
        return "less memory is free than the engine's share", None, []
    short = int(asked.value - free.value)
    why = (f"{share.text} of {total.text} are {asked.text}, and {free.text} are free: {format_bytes(max(short, 0))} "
           "more than that, which other processes hold")  # fmt: skip
    # One hundredth is the step that people type.
    most = math.floor(free.low / total.high * 100) / 100
    fits = [f"--gpu-memory-utilization {most:.2f}"] if most >= 0.01 else []
    return why, short, [*fits, f"free {format_bytes(math.ceil(asked.high - free.low))} on that GPU"]


def _fraction(trial: Trial) -> Why:
    log = trial.log
    after, before, used = (log.figure(name) for name in ("free_after", "free_before", "weights"))
    fraction = trial.plan.serving.utilization
    if after is None or (before is None and used is None):
        return "the memory that --mem-fraction-static leaves is taken by the weights", None, []
    start = before.value if before is not None else after.value + (used.value if used is not None else 0)
    if start <= 0:
        return "nothing is left of the GPU's memory", None, []
    least = 1 - after.value / start
    short = int(start * (1 - fraction) - after.value) if fraction is not None else None
    why = (f"of {format_bytes(int(start))} that were free, {format_bytes(int(after.value))} are left after the weights"
           + (f", and {format_bytes(int(start * (1 - fraction)))} are to stay unused at --mem-fraction-static {fraction:g}"
              if fraction is not None else ""))  # fmt: skip
    one = trial.allocation()
    need = one.reserved_bytes if one is not None else 0
    enough = math.ceil((least + need / start) * 1000) / 1000
    fits = [f"--mem-fraction-static {enough:g} holds one request of {trial.length:,} tokens"] if enough < 1 else []
    return why, short, [f"--mem-fraction-static above {math.ceil(least * 1000) / 1000:g}", *fits]


def _out_of_memory(trial: Trial) -> Why:
    log = trial.log
    match = _ALLOCATION.search(log.refusal.text) if log.refusal is not None else None
    wanted = log.figure("wanted")
    if match is None:
        if wanted is not None:
            free = log.figure("device_free")
            short = int(wanted.value - free.value) if free is not None else None
            beside = f"; {free.text} were free on {free.where} before loading" if free is not None else ""
            return (
                f"a buffer of {wanted.text} could not be allocated{beside}",
                short if short and short > 0 else None,
                [],
            )
        return "a buffer could not be allocated", None, []
    tried = float(match[1]) * UNITS[match[2]]
    if match[4] is None:
        return f"{format_bytes(int(tried))} could not be allocated", None, []
    total, free_bytes = float(match[4]) * GIB, float(match[5]) * UNITS[match[6]]
    why = (f"{format_bytes(int(tried))} were to be allocated on GPU {match[3]}, and {format_bytes(int(free_bytes))} of "
           f"{format_bytes(int(total))} were free")  # fmt: skip
    process = _PROCESS.search(log.refusal.text) if log.refusal is not None else None
    if process is not None:
        others = total - free_bytes - float(process[1]) * UNITS[process[2]]
        if others > 0.5 * GIB:
            why += f"; other processes hold {format_bytes(int(others))}"
    return why, int(tried - free_bytes), []
