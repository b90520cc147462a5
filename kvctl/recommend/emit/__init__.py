"""What people can run of a recommendation: command lines, manifests, units, an engine's own files, alarms, a runbook.

Adding a kind: a row in `KINDS`, and a module here that makes its text.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, cast

from kvctl.errors import UsageError
from kvctl.recommend.emit.site import Promise, Site, check, named
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.recommend.deployment import Deployment

__all__ = ["KINDS", "Kind", "Promise", "Site", "emit", "named"]


class Kind(Record):
    """One thing that can be written."""

    name: str
    summary: str
    module: str
    function: str
    promised: bool = False
    """Whether it says what the deployment is meant to hold."""


KINDS: tuple[Kind, ...] = (
    Kind("command", "the engine's command line, on one machine or on each of several nodes", ".script", "script"),
    Kind("compose", "a file for docker compose", ".compose", "compose"),
    Kind("kubernetes", "a Deployment and its Service", ".kubernetes", "kubernetes"),
    Kind("lws", "a LeaderWorkerSet for several nodes, and its Service", ".kubernetes", "leader_worker_set"),
    Kind("systemd", "units of systemd", ".systemd", "systemd"),
    Kind("config", "the engine's own configuration file", ".config_files", "config"),
    Kind("alerts", "alerting rules for Prometheus", ".prometheus", "prometheus", promised=True),
    Kind("runbook", "how to start, check and watch it, in Markdown", ".runbook", "runbook", promised=True),
)


def emit(kind: str, deployment: Deployment, site: Site | None = None, promise: Promise | None = None) -> str:
    """The text of a kind: the same for the same deployment, with a line end and no spaces before one.

    Raises:
        UsageError: no such kind, or one that makes no sense for the deployment.

    """
    found = next((row for row in KINDS if row.name == kind), None)
    if found is None:
        raise UsageError(f"--emit: unknown kind {kind[:40]!r}", hint="one of " + ", ".join(row.name for row in KINDS))
    site = site or Site(named(deployment.base))
    check(site)
    write = cast("Callable[..., str]", getattr(import_module(found.module, __name__), found.function))
    return write(deployment, site, promise or Promise()) if found.promised else write(deployment, site)
