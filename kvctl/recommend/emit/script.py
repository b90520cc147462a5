"""Command lines for people: what to type, on one machine or on each of several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvctl.recommend.emit import images, nodes
from kvctl.recommend.emit.command import Command, Place, command
from kvctl.recommend.emit.documents import comments, shell, title
from kvctl.units import plural

if TYPE_CHECKING:
    from kvctl.recommend.deployment import Deployment
    from kvctl.recommend.emit.site import Site

_VISIBLE = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES"}


def script(deployment: Deployment, site: Site) -> str:
    """The command of one server, one option a line; on several nodes what starts each of them.

    Raises:
        UsageError: the engine cannot be started so.

    """
    if deployment.nodes == 1 and deployment.replicas == 1:
        return comments(title(deployment)) + lines(command(deployment, site))
    if deployment.nodes == 1:
        return _servers(deployment, site)
    if nodes.by_ray(deployment, site):
        return _by_ray(deployment, site)
    address = f"${{{nodes.HEAD}:?}}"
    blocks = [
        comments(
            f"{title(deployment)}\nThe same {nodes.HEAD} on every node: the first one's address on the network between them."
        )
    ]
    for rank in range(deployment.nodes):
        place = Place(site.host, node=nodes.Node(str(rank), address))
        what = "the first node, which answers" if rank == 0 else f"node {rank + 1} of {deployment.nodes}"
        blocks.append(comments(f"On {what}:") + lines(command(deployment, site, place)))
    return "\n".join(blocks)


def _servers(deployment: Deployment, site: Site) -> str:
    """Several servers side by side, each with a port and GPUs of its own; of several machines the first."""
    each = on_machine(deployment, site)
    machines = -(-deployment.replicas // each)
    head = f"{title(deployment)}\n{plural(deployment.replicas, 'server')} side by side, behind a router of yours"
    head += f": {each} on each of {machines} machines, and as follows on each." if machines > 1 else "."
    blocks = [comments(head)]
    for number in range(each):
        what = f"Server {number + 1} of {each}, port {site.port + number}:"
        text = lines(replica(deployment, site, number))
        blocks.append(
            comments(what)
            + (text if number == each - 1 else text.rstrip("\n") + " &\n" if "\n# and" not in text else text)
        )
    return "\n".join(blocks)


def on_machine(deployment: Deployment, site: Site) -> int:
    """Servers on the first of the machines."""
    if not deployment.gpus:
        return deployment.replicas
    return min(deployment.replicas, max(site.machine_gpus // deployment.gpus, 1))


def replica(deployment: Deployment, site: Site, number: int) -> Command:
    """One of several servers: with a port and GPUs of its own."""
    one = command(deployment, site.replace(port=site.port + number))
    visible = _VISIBLE.get(images.kind(deployment))
    if visible is None or not deployment.gpus:
        return one
    ids = ",".join(str(number * deployment.gpus + index) for index in range(deployment.gpus))
    return one.replace(variables=((visible, ids), *one.variables))


def first(deployment: Deployment, site: Site) -> Command:
    """The command of the server that answers: of several nodes, the first one's."""
    if deployment.nodes == 1 or nodes.by_ray(deployment, site):
        return command(deployment, site)
    return command(deployment, site, Place(site.host, node=nodes.Node("0", f"${{{nodes.HEAD}:?}}")))


def _by_ray(deployment: Deployment, site: Site) -> str:
    address = f"${{{nodes.HEAD}:?}}"
    others = plural(deployment.nodes - 1, "node")
    head = comments(
        f"{title(deployment)}\nvLLM's images have no Ray since 0.18: pip install 'ray[cgraph]' where it is missing."
    )
    return "\n".join(
        (
            head + comments("On the first node:") + nodes.ray_start(None) + "\n",
            comments(f"On the other {others}, with the first one's address in {nodes.HEAD}:")
            + nodes.ray_start(f'"{address}"') + "\n",
            comments("On the first node again, when `ray status` shows all of them:") + lines(command(deployment, site)),
        )
    )  # fmt: skip


def lines(one: Command) -> str:
    """A command with what it needs before it: variables, files."""
    out = [f"export {name}={shell(value)}\n" for name, value in one.variables]
    for name, text in one.files:
        out.append(f"cat > {shell(name)} <<'EOF'\n{text}EOF\n")
    shown = [" ".join(map(shell, option)) for option in one.options]
    named = sum(not option[0].startswith("-") for option in one.options)  # the model stands beside the program
    out.append(" \\\n  ".join((" ".join((*one.program, *shown[:named])), *shown[named:])) + "\n")
    return "".join(out) + "".join(f"# and when it is up: {line}\n" for line in one.after)


def line_of(program: Sequence[str], arguments: Sequence[str]) -> str:
    """A program and its words on one line, for a shell."""
    return " ".join((*program, *map(shell, arguments)))
