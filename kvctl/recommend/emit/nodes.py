"""What is started on each of several nodes, so that they become one server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.errors import UsageError
from kvctl.recommend.space import OVER_NODES
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.recommend.deployment import Deployment
    from kvctl.recommend.emit.site import Site

HEAD = "HEAD_ADDRESS"
"""The variable with the address of the first node."""
VLLM_PORT, RAY_PORT, SGLANG_PORT = 29501, 6379, 20000
"""Where nodes meet: vLLM's --master-port by default, Ray's, and the one of SGLang's documentation."""
_OWN_NODES_SINCE = (0, 12)
"""vLLM's own processes span nodes (--nnodes) since then."""


class Node(Record):
    """One of several; texts, as a manifest may know the values only when it runs."""

    rank: str
    address: str
    """Of the first node."""

    @property
    def first(self) -> bool:
        return self.rank == "0"


def check(deployment: Deployment, site: Site) -> None:
    """Refuses several nodes of an engine that kvctl can start on one only.

    Raises:
        UsageError: it is such an engine.

    """
    engine = deployment.engine
    if deployment.nodes > 1 and engine.name not in OVER_NODES:
        raise UsageError(f"kvctl starts {engine.name} on one node, and this is for {deployment.nodes}",
                         hint="--engine vllm or --engine sglang")  # fmt: skip
    if deployment.nodes > 1 and engine.name == "vllm" and not site.ray and minor_of(engine.version) < _OWN_NODES_SINCE:
        raise UsageError(f"vLLM {engine.version} joins several nodes through Ray alone", hint="choose Ray")


def by_ray(deployment: Deployment, site: Site) -> bool:
    """Whether vLLM's nodes are joined through Ray."""
    return site.ray and deployment.engine.name == "vllm" and deployment.nodes > 1


def options(deployment: Deployment, site: Site, node: Node | None) -> list[tuple[str, ...]]:
    """Options of a node's server, each with its value; none for one node alone."""
    if deployment.nodes == 1:
        return []
    count = str(deployment.nodes)
    if by_ray(deployment, site):
        data = deployment.serving.data_parallel or 1
        own = [
            ("--data-parallel-backend", "ray"),
            ("--data-parallel-size-local", str(max(data // deployment.nodes, 1))),
        ]
        return [("--distributed-executor-backend", "ray"), *(own if data > 1 else [])]
    assert node is not None
    if deployment.engine.name == "sglang":
        return [("--nnodes", count), ("--node-rank", node.rank), ("--dist-init-addr", f"{node.address}:{SGLANG_PORT}")]
    out: list[tuple[str, ...]] = [("--distributed-executor-backend", "mp"), ("--nnodes", count), ("--node-rank", node.rank),
                                  ("--master-addr", node.address), ("--master-port", str(VLLM_PORT))]  # fmt: skip
    return out if node.first else [*out, ("--headless",)]


def ray_start(address: str | None) -> str:
    """The command that makes a node the first one of Ray's (None), or has it join that one and stay."""
    return (
        f"ray start --head --port={RAY_PORT}"
        if address is None
        else f"ray start --address={address}:{RAY_PORT} --block"
    )


def minor_of(version: str | None) -> tuple[int, int]:
    """(0, 33) of "0.33" and of "0.33.1"; beyond every version where there is none."""
    major, _, rest = (version or "").partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (999, 0)
