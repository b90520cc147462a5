"""A file for `docker compose`: one machine, a service for every replica, each on GPUs of its own.

Schema: github.com/compose-spec/compose-spec schema/compose-spec.json.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvctl.errors import UsageError
from kvctl.recommend.emit import images
from kvctl.recommend.emit.containers import FILES, container
from kvctl.recommend.emit.documents import document, title
from kvctl.recommend.emit.site import bracketed
from kvctl.recommend.emit.starting import limit_s, limit_words

if TYPE_CHECKING:
    from kvctl.recommend.deployment import Deployment
    from kvctl.recommend.emit.site import Site

_NEEDS_IPC = ("vllm", "sglang", "tensorrt-llm")
"""Ranks of one server talk through shared memory, of which Docker gives 64 MiB."""


def compose(deployment: Deployment, site: Site) -> str:
    """The file. The token of the Hub is taken from the environment of whoever starts it, and stands nowhere in it.

    Raises:
        UsageError: several nodes, more GPUs than a machine has, or no image for the device.

    """
    if deployment.nodes > 1:
        raise UsageError(f"docker compose is for one machine, and this is for {deployment.nodes}",
                         hint="--emit lws, or --emit command")  # fmt: skip
    if deployment.all_gpus > site.machine_gpus:
        raise UsageError(f"docker compose is for one machine of {site.machine_gpus} GPUs, and this takes {deployment.all_gpus}",
                         hint="--emit kubernetes")  # fmt: skip
    many = deployment.replicas > 1
    services: dict[str, Any] = {}
    for number in range(deployment.replicas):
        name = f"{site.name}-{number}" if many else site.name
        services[name] = _service(deployment, site, number)
    whole: dict[str, Any] = {"name": site.name, "services": services}
    if files := container(deployment, site).files:
        whole["configs"] = {_config(name): {"content": text} for name, text in files}
    note = f"{title(deployment)}\ndocker compose up -d; docker compose logs -f"
    note += f"\nstart_period: {limit_words(deployment, site)}"
    if many:
        last = site.port + deployment.replicas - 1
        note += f"\nOne port each, {site.port} to {last}: a load balancer in front of them shares out the requests."
    for line in container(deployment, site).after:
        note += "".join(f"\nWhen it is up: docker compose exec {name} {line}" for name in services)
    return document(whole, comment=note)


def _service(deployment: Deployment, site: Site, number: int) -> dict[str, Any]:
    one = container(deployment, site)
    port = site.port + number
    service: dict[str, Any] = {
        "image": one.image,
        "entrypoint": list(one.program),
        # Compose puts variables in place of $NAME; $$ is a dollar.
        "command": [word.replace("$", "$$") for word in one.arguments],
        # One without a value is passed on from the environment of `docker compose`.
        "environment": {**dict(one.variables), "HF_TOKEN": None},
        "ports": [f"{bracketed(site.host)}:{port}:{site.port}"],
        "volumes": [f"{site.folder}:{images.MODELS}"],
        "restart": "unless-stopped",
        "healthcheck": {
            "test": ["CMD", "ollama", "list"]
            if deployment.engine.name == "ollama"
            else [
                "CMD",
                "curl",
                "--fail",
                "--silent",
                "--output",
                "/dev/null",
                f"http://127.0.0.1:{site.port}{one.health}",
            ],
            "interval": "10s",
            "timeout": "5s",
            "retries": 3,
            "start_period": f"{limit_s(deployment, site)}s",
        },
    }
    if not service["command"]:
        del service["command"]
    if one.files:
        service["configs"] = [{"source": _config(name), "target": f"{FILES}/{name}"} for name, _ in one.files]
    if deployment.engine.name in _NEEDS_IPC and images.kind(deployment) != "cpu":
        service["ipc"] = "host"
        # Memory that is pinned for transfers is locked (NVIDIA's own docker run lines).
        service["ulimits"] = {"memlock": -1, "stack": 67108864}
    service.update(_devices(deployment, number))
    if deployment.gpus and images.kind(deployment) == "amd":
        service["environment"]["HIP_VISIBLE_DEVICES"] = ",".join(_ids(deployment, number))
    return service


def _devices(deployment: Deployment, number: int) -> dict[str, Any]:
    """The GPUs of a replica: the next ones after those of the replicas before it."""
    if not deployment.gpus:
        return {}
    if images.kind(deployment) == "amd":
        # ROCm's containers are given every GPU; a variable says which of them are seen.
        return {
            "devices": ["/dev/kfd", "/dev/dri"],
            "group_add": ["video"],
            "security_opt": ["seccomp=unconfined"],
            "cap_add": ["SYS_PTRACE"],
        }
    reserved = {"driver": "nvidia", "device_ids": _ids(deployment, number), "capabilities": ["gpu"]}
    return {"deploy": {"resources": {"reservations": {"devices": [reserved]}}}}


def _ids(deployment: Deployment, number: int) -> list[str]:
    return [str(number * deployment.gpus + index) for index in range(deployment.gpus)]


def _config(name: str) -> str:
    """The name of a config that has a file's text."""
    return name.replace(".", "-").lower()
