"""What Compose and Kubernetes say alike of a container: image, words, variables, where it is asked whether it is well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.recommend.emit import images, starting
from kvctl.recommend.emit.command import FILES, Command, Place, command
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.recommend.deployment import Deployment
    from kvctl.recommend.emit.nodes import Node
    from kvctl.recommend.emit.site import Site

__all__ = ["FILES", "Container", "container", "health_of"]
_EVERYWHERE = "0.0.0.0"  # a container's own network: what reaches it is said outside of it
_PROGRAMS = {"llama.cpp": ("/app/llama-server",)}
"""Where an image has a program that is not on its path (llama.cpp .devops/*.Dockerfile)."""


class Container(Record):
    """One server in a container."""

    image: str
    program: tuple[str, ...]
    arguments: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, str], ...]
    after: tuple[str, ...]
    """Commands to run in it when it is up."""
    health: str
    """The path that answers 200 when requests may come."""


def container(deployment: Deployment, site: Site, node: Node | None = None) -> Container:
    """The container of one replica's server, or of one node of it.

    Raises:
        UsageError: the engine cannot be started so, or there is no image for the device.

    """
    image = images.image(deployment, site)
    one: Command = command(deployment, site, Place(_EVERYWHERE, container=True, node=node))
    variables = (
        ("HF_HOME", images.MODELS),
        *_caches(deployment.engine.name),
        *starting.variables(deployment, site),
        *one.variables,
    )
    return Container(
        image,
        _PROGRAMS.get(deployment.engine.name, one.program),
        one.arguments,
        variables,
        one.files,
        one.after,
        health_of(deployment.engine.name),
    )


def health_of(engine: str) -> str:
    """The path of a server that answers 200 when requests may come."""
    return "/" if engine == "ollama" else "/health"


def _caches(engine: str) -> tuple[tuple[str, str], ...]:
    """Variables that keep downloads of an engine's own in the folder of models."""
    return {
        "llama.cpp": (("LLAMA_CACHE", f"{images.MODELS}/llama.cpp"),),
        "ollama": (("OLLAMA_MODELS", f"{images.MODELS}/ollama"),),
    }.get(engine, ())
