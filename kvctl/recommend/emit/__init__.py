"""What people can run of a recommendation: command lines, manifests, units, an engine's own files, alarms, a runbook.

Adding a kind: a row in `KINDS`, and a module here that makes its text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, cast

from kvctl.errors import UsageError
from kvctl.recommend.emit.site import SETTINGS, VARIABLES, Promise, Site, check, is_variables, named
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.recommend.deployment import Deployment

__all__ = ["KINDS", "Kind", "Promise", "Site", "emit", "file_of", "named"]


class Kind(Record):
    """One thing that can be written."""

    name: str
    summary: str
    module: str
    function: str
    file: str
    """What it is called in a folder; {name} is the service's."""
    promised: bool = False
    """Whether it says what the deployment is meant to hold."""
    beside: bool = False
    """Whether it names the files that lie beside it."""


KINDS: tuple[Kind, ...] = (
    Kind("command", "the engine's command line, on one machine or on each of several nodes", ".script", "script", "start.sh"),
    Kind("compose", "a file for docker compose", ".compose", "compose", "compose.yaml"),
    Kind("kubernetes", "a Deployment and its Service", ".kubernetes", "kubernetes", "kubernetes.yaml"),
    Kind("lws", "a LeaderWorkerSet for several nodes, and its Service", ".kubernetes", "leader_worker_set", "leaderworkerset.yaml"),
    Kind("systemd", "units of systemd", ".systemd", "systemd", "{name}.service"),
    Kind("config", "the engine's own configuration file", ".config_files", "config", SETTINGS),
    Kind("alerts", "alerting rules for Prometheus", ".prometheus", "prometheus", "alerts.yaml", promised=True),
    Kind("runbook", "how to start, check and watch it, in Markdown", ".runbook", "runbook", "RUNBOOK.md", promised=True, beside=True),
)  # fmt: skip


def file_of(kind: str, deployment: Deployment, site: Site) -> str:
    """What a kind's file is called in a folder."""
    if kind == "config" and is_variables(deployment):
        return VARIABLES
    return next(row.file for row in KINDS if row.name == kind).format(name=site.name)


def emit(
    kind: str,
    deployment: Deployment,
    site: Site | None = None,
    promise: Promise | None = None,
    beside: Mapping[str, str] | None = None,
) -> str:
    """The text of a kind: the same for the same deployment, with a line end and no spaces before one.

    `beside` are files that are written into the same folder, by kind.

    Raises:
        UsageError: no such kind, or one that makes no sense for the deployment.

    """
    found = next((row for row in KINDS if row.name == kind), None)
    if found is None:
        raise UsageError(f"--emit: unknown kind {kind[:40]!r}", hint="one of " + ", ".join(row.name for row in KINDS))
    site = site or Site(named(deployment.base))
    check(site)
    write = cast("Callable[..., str]", getattr(import_module(found.module, __name__), found.function))
    more = [promise or Promise()] * found.promised + [beside or {}] * found.beside
    return write(deployment, site, *more)
