"""Units for systemd: one a server, or one a node; systemd.service(5), systemd.exec(5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.errors import UsageError
from kvctl.recommend.emit import images, nodes, starting
from kvctl.recommend.emit.command import Command, Place, command
from kvctl.recommend.emit.documents import comments, title
from kvctl.recommend.emit.nodes import Node
from kvctl.recommend.emit.script import replica

if TYPE_CHECKING:
    from kvctl.recommend.deployment import Deployment
    from kvctl.recommend.emit.site import Site

_QUOTED = frozenset(" \t\"'\\;{}[]()*?<>|&#~`")


def systemd(deployment: Deployment, site: Site) -> str:
    """The units, one after another where there are several: each begins with the file that it belongs in.

    Raises:
        UsageError: a Mac, more GPUs than a machine has, or an engine that cannot be started so.

    """
    if images.kind(deployment) == "metal":
        raise UsageError("a Mac has no systemd", hint="--emit command")
    if deployment.nodes > 1:
        return "\n".join(_of_node(deployment, site, rank) for rank in range(deployment.nodes))
    if deployment.all_gpus > site.machine_gpus:
        raise UsageError(f"units are for one machine of {site.machine_gpus} GPUs, and this takes {deployment.all_gpus}",
                         hint="--emit kubernetes")  # fmt: skip
    if deployment.replicas == 1:
        return _unit(deployment, site, command(deployment, site), site.name, title(deployment))
    return "\n".join(_of_replica(deployment, site, number) for number in range(deployment.replicas))


def unit_names(deployment: Deployment, site: Site) -> list[str]:
    """What the units are called."""
    if deployment.nodes > 1:
        return [f"{site.name}-node-{rank}" for rank in range(deployment.nodes)]
    if deployment.replicas > 1:
        return [f"{site.name}-{number}" for number in range(deployment.replicas)]
    return [site.name]


def _of_replica(deployment: Deployment, site: Site, number: int) -> str:
    """One of several servers: with a port and GPUs of its own."""
    name = unit_names(deployment, site)[number]
    one = replica(deployment, site.replace(name=name), number)
    return _unit(deployment, site, one, name, title(deployment))


def _of_node(deployment: Deployment, site: Site, rank: int) -> str:
    """One of several nodes; the first one's address is a variable in the file of variables."""
    own = site.replace(ray=False)  # engines' own processes: no second service beside this one
    place = Place(site.host, node=Node(str(rank), f"${{{nodes.HEAD}}}"))
    note = f"{title(deployment)}\nNode {rank + 1} of {deployment.nodes}; /etc/{site.name}.env there has {nodes.HEAD}=ADDRESS of the first one."
    return _unit(deployment, site, command(deployment, own, place), unit_names(deployment, site)[rank], note)


def _unit(deployment: Deployment, site: Site, one: Command, name: str, note: str) -> str:
    environment = f"/etc/{site.name}.env"
    head = comments(
        f"/etc/systemd/system/{name}.service: {note}\nA token of the Hub, where one is needed: HF_TOKEN=… in {environment}."
    )
    for file, text in one.files:
        head += comments(f"{site.folder}/{file}:\n" + "\n".join(f"  {line}" for line in text.splitlines()))
    for line in one.after:
        head += comments(f"When it is up: {line}")
    words = [f"{site.programs}/{one.program[0]}", *one.program[1:]]
    start = " \\\n  ".join((" ".join(words), *(" ".join(map(_word, option)) for option in one.options)))
    variables = [("HF_HOME", site.folder), *starting.variables(deployment, site), *one.variables]
    # Several nodes cannot start without the variable, one alone needs no file.
    optional = "-" if deployment.nodes == 1 else ""
    lines = [
        "[Unit]",
        f"Description={site.name}: {deployment.base} on {deployment.engine.name}".replace("%", "%%"),
        "Wants=network-online.target",
        "After=network-online.target",
        "",
        "[Service]",
        # Its type is simple: systemd itself sets such a start no limit.
        f"User={site.user}",
        f"WorkingDirectory={site.folder}",
        *(f"Environment={_quoted(f'{key}={value}')}" for key, value in variables),
        f"EnvironmentFile={optional}{environment}",
        f"ExecStart={start}",
        "Restart=on-failure",
        "RestartSec=10",
        # Ranks that are left when their parent has ended hold the GPUs' memory.
        "KillMode=mixed",
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=524288",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return head + "\n".join(lines) + "\n"


def _word(word: str) -> str:
    """A word of a command as systemd reads it: $ is doubled, but for the one variable that is meant."""
    head = f"${{{nodes.HEAD}}}"
    return head.join(_quoted(part.replace("$", "$$")) if part else "" for part in word.split(head)) or '""'


def _quoted(word: str) -> str:
    """% doubled, and in quotes as in C where it has to be."""
    plain = word.replace("%", "%%")
    if not _QUOTED.intersection(plain) and plain.isprintable():
        return plain
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"')
    # A line end would end the directive, and begin one of its own.
    return (
        '"' + "".join(f"\\x{ord(char):02x}" if ord(char) < 32 or ord(char) == 127 else char for char in escaped) + '"'
    )
