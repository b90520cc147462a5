"""A trace through all allocation policies at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kvctl.errors import SourceError
from kvctl.replay.contiguous import Contiguous
from kvctl.replay.paged import Paged
from kvctl.replay.prefix import PrefixSharing
from kvctl.replay.report import Replay, report
from kvctl.replay.request import Request
from kvctl.replay.setup import Setup
from kvctl.replay.simulator import Simulator

POLICIES: dict[str, type[Simulator]] = {policy.name: policy for policy in (Contiguous, Paged, PrefixSharing)}
_CHUNK = 1024
_SECONDS = 0.1


def replay(
    requests: Iterable[Request],
    setup: Setup,
    progress: Callable[[int], None] | None = None,
    policies: Iterable[str] = tuple(POLICIES),
) -> Replay:
    """Read `requests` once, and replay them under every policy.

    `progress` is called with the requests taken so far, ten times a second at most, and at the end.
    """
    setup.check()
    runs = [POLICIES[name](setup) for name in policies]
    count, shown = 0, time.monotonic()
    chunk: list[Request] = []
    hashed = split = False

    def work() -> None:
        nonlocal count, shown
        # One policy after the other in turns: what each needs stays in the processor's cache.
        for run in runs:
            for request in chunk:
                run.offer(request)
        count += len(chunk)
        chunk.clear()
        if progress is not None and time.monotonic() - shown >= _SECONDS:
            shown = time.monotonic()
            progress(count)

    for request in requests:
        hashed = hashed or bool(request.hash_ids)
        split = split or request.sequences > 1
        chunk.append(request)
        if len(chunk) == _CHUNK:
            work()
    work()
    if not count:
        raise SourceError("no requests to replay")
    for run in runs:
        run.drain()
    if progress is not None:
        progress(count)
    notes = []
    if not hashed:
        notes.append("the trace says nothing of what prompts have in common: no prefix is shared")
    if split:
        notes.append("parallel samples and beams are taken to differ from their first token on")
    assumed = tuple(name for name in ("tpot", "prefill_rate") if getattr(setup, name) == getattr(Setup, name))
    return Replay(setup, count, tuple(report(run) for run in runs), assumed, tuple(notes))
