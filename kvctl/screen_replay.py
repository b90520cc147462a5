"""What a replay found, on a terminal: policies side by side."""

from __future__ import annotations

from kvctl.reports import SizeResult
from kvctl.screen_lines import Row, Screen
from kvctl.units import format_bytes
from kvctl.words import one_line, replay_verdict, replay_words, share_words

_TITLES = {"contiguous": "contiguous", "paged": "paged", "prefix": "paged, prefixes shared"}


def print_replay(screen: Screen, result: SizeResult) -> None:
    """Memory, what of it is used, where the rest goes, and what had to wait."""
    found = result.replay
    assert found is not None
    verdict, calm = replay_verdict(found)
    screen.line(one_line(verdict), "bold green" if calm else "bold red")
    screen.line()
    policies = found.policies
    rows: list[Row] = [(("", *(_TITLES.get(policy.policy, policy.policy) for policy in policies)), None, "dim")]

    def add(name: str, *cells: str) -> None:
        if any(cell not in ("0%", "0") for cell in cells):
            rows.append(((name, *cells), None, ""))

    add("peak memory", *(format_bytes(policy.peak_held_bytes) for policy in policies))
    add("mean memory", *(format_bytes(policy.mean_held_bytes) for policy in policies))
    add("of it, tokens stored", *(_percent(policy.utilization) for policy in policies))
    add("  reserved, filled later", *(_percent(policy.reservation) for policy in policies))
    add("  never filled", *(_percent(policy.internal_fragmentation) for policy in policies))
    add("  copies", *(_percent(policy.copies) for policy in policies))
    add("free, in too small pieces", *(_percent(policy.external_fragmentation) for policy in policies))
    add("prompt tokens from cache", *(_percent(policy.hit_rate) for policy in policies))
    add("requests at once, mean", *(f"{policy.mean_running:,.1f}" for policy in policies))
    add("requests at once, most", *(f"{policy.peak_running:,}" for policy in policies))
    add("requests waiting, mean", *(f"{policy.mean_queue:,.1f}" for policy in policies))
    add("preemptions", *(f"{policy.preemptions:,}" for policy in policies))
    add("tokens computed again", *(f"{policy.recomputed_tokens:,}" for policy in policies))
    add("blocks evicted", *(f"{policy.evicted_blocks:,}" for policy in policies))
    add("refused, too long", *(f"{policy.rejected:,}" for policy in policies))
    add("until all are done", *(_duration(policy.makespan_us) for policy in policies))
    screen.table("l" + "r" * len(policies), rows)
    screen.line()
    for line in replay_words(found):
        screen.line(one_line(line), "dim")


def _percent(share: float) -> str:
    return share_words(round(share * 10**9), 10**9)


def _duration(microseconds: int) -> str:
    seconds = microseconds / 10**6
    if seconds < 120:
        return f"{seconds:,.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"
