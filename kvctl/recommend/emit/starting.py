"""How long a start may take before it counts as failed: by the bytes of the weights, at rates that are slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.recommend.emit.command import is_local
from kvctl.units import format_bytes

if TYPE_CHECKING:
    from kvctl.recommend.deployment import Deployment
    from kvctl.recommend.emit.site import Site

# Choices, not measurements: slower than what is usual, so that a start that gets on is not ended.
_HUB, _DISK = 100_000_000, 500_000_000
"""Bytes a second from the Hub, and from a disk or a volume into memory."""
_BESIDE_S = 600
"""What engines do beside: compile, try batches out, capture graphs."""


def limit_s(deployment: Deployment, site: Site) -> int:
    """Seconds, in whole minutes; never less than the site's own."""
    if site.weights is None:
        return site.start_s
    seconds = _BESIDE_S + site.weights / _DISK + (0 if is_local(deployment) else site.weights / _HUB)
    return max(site.start_s, -(-int(seconds) // 60) * 60)


def limit_words(deployment: Deployment, site: Site) -> str:
    """The limit, and what it is based on."""
    whole = f"a start counts as failed after {limit_s(deployment, site) / 60:,.0f} minutes"
    if site.weights is None:
        return (
            f"{whole}: how many bytes of weights it loads is not known, and where it takes longer, this has to be more."
        )
    hub = "" if is_local(deployment) else f"{_HUB / 1e6:.0f} MB/s from the Hub the first time, "
    based = f"{format_bytes(site.weights)} of weights at {hub}{_DISK / 1e6:.0f} MB/s into memory, and {_BESIDE_S // 60} minutes beside"
    return f"{whole}: {based}; {site.start_s / 60:,.0f} at least. Where the network is slower, it has to be more."


def variables(deployment: Deployment, site: Site) -> tuple[tuple[str, str], ...]:
    """What gives the engine itself as long: vLLM ends a start of its own accord after 600 seconds unless it is told (vllm/envs.py)."""
    if deployment.engine.name != "vllm":
        return ()
    return (("VLLM_ENGINE_READY_TIMEOUT_S", str(limit_s(deployment, site))),)
