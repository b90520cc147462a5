"""Manifests for Kubernetes: a Deployment and its Service; for several nodes a LeaderWorkerSet (leaderworkerset.x-k8s.io/v1).

Sources: kubernetes.io API reference 1.37; sigs.k8s.io/lws api/leaderworkerset/v1; docs.vllm.ai deployment/k8s and
deployment/frameworks/lws.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from kvctl.engines.metrics import NAMES, page_of
from kvctl.errors import UsageError
from kvctl.recommend.emit import images, nodes
from kvctl.recommend.emit.containers import FILES, Container, container
from kvctl.recommend.emit.documents import document, title
from kvctl.recommend.emit.nodes import Node
from kvctl.recommend.emit.script import line_of
from kvctl.recommend.emit.starting import limit_s, limit_words

if TYPE_CHECKING:
    from kvctl.recommend.deployment import Deployment
    from kvctl.recommend.emit.site import Site

_GPU = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
APP = "app.kubernetes.io/name"
"""The label with the service's name, of pods and of their Service."""
_LEADER, _INDEX = "$(LWS_LEADER_ADDRESS)", "$(LWS_WORKER_INDEX)"
"""Variables that LeaderWorkerSet gives every pod; Kubernetes itself puts their values in place."""
_DOLLAR = re.compile(rf"\$(?=[$(])(?!{re.escape(_LEADER[1:])}|{re.escape(_INDEX[1:])})")
"""A $ that Kubernetes would read as more than itself (third_party/forked/golang/expansion/expand.go)."""
ONE_NODE = (
    "With ReadWriteOnce, pods on other nodes wait for ever; ReadOnlyMany is enough where the models are there already."
)
_STEP_S = 10
"""Between two looks at a server that starts."""
_MARGIN_S = 600
"""To find a node and fetch the image, before a server starts."""


def kubernetes(deployment: Deployment, site: Site) -> str:
    """A Deployment, its Service and what they need; the token of the Hub by reference to a Secret.

    Raises:
        UsageError: several nodes, or no image for the device.

    """
    if deployment.nodes > 1:
        raise UsageError(
            f"a Deployment's pods are on one node each, and this is for {deployment.nodes}", hint="--emit lws"
        )
    one = container(deployment, site)
    labels = {APP: site.name}
    whole = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": site.name, "labels": labels},
        "spec": {
            "replicas": deployment.replicas,
            # Without it `kubectl rollout status` gives up after ten minutes.
            "progressDeadlineSeconds": limit_s(deployment, site) + _MARGIN_S,
            "selector": {"matchLabels": labels},
            # GPUs for one more pod than are asked for may not be there: the old one goes first.
            "strategy": {"type": "Recreate"}
            if deployment.replicas == 1
            else {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "template": {
                "metadata": {"labels": labels, **_scraped(deployment, site)},
                "spec": _pod(deployment, site, one, answers=True),
            },
        },
    }
    note = _note(deployment, site) + "".join(
        f"\nWhen it is up: kubectl exec deploy/{site.name} -- {line}" for line in one.after
    )
    return document(*_maps(site, one), whole, _service(site, labels), comment=note)


def leader_worker_set(deployment: Deployment, site: Site) -> str:
    """A LeaderWorkerSet: a group of one pod a node for every replica, and the Service of the first pods.

    Raises:
        UsageError: one node, an engine that does not span nodes, or no image for the device.

    """
    if deployment.nodes == 1:
        what = f"{deployment.replicas} servers of one node each" if deployment.replicas > 1 else "one node"
        raise UsageError(
            f"a LeaderWorkerSet is for a server over several nodes, and this answer is for {what}",
            hint="--emit kubernetes",
        )
    first = container(deployment, site, Node("0", _LEADER))
    other = container(deployment, site, Node(_INDEX, _LEADER))
    if nodes.by_ray(deployment, site):
        first, other = _by_ray(first, other)
    labels = {APP: site.name}
    whole = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": site.name, "labels": labels},
        "spec": {
            "replicas": deployment.replicas,
            "leaderWorkerTemplate": {
                "size": deployment.nodes,
                # A rank that is gone ends its whole group's work.
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": {
                    "metadata": {"labels": labels, **_scraped(deployment, site)},
                    "spec": _pod(deployment, site, first, answers=True),
                },
                "workerTemplate": {
                    "metadata": {"labels": labels},
                    "spec": _pod(deployment, site, other, answers=False),
                },
            },
        },
    }
    # The operator labels the pods; its own headless service has the set's name.
    chosen = {"leaderworkerset.sigs.k8s.io/name": site.name, "leaderworkerset.sigs.k8s.io/worker-index": "0"}
    note = _note(deployment, site) + "\nThe cluster needs the LeaderWorkerSet operator (sigs.k8s.io/lws)."
    if nodes.by_ray(deployment, site):
        note += "\nvLLM's images have no Ray since 0.18: it is installed when a pod starts, where it is missing."
    return document(whole, _service(site, chosen, f"{site.name}-leader"), comment=note)


def _by_ray(first: Container, other: Container) -> tuple[Container, Container]:
    """The first pod starts Ray and then vLLM, which waits until all GPUs are there; the others join it and stay."""
    install = "command -v ray > /dev/null || pip install 'ray[cgraph]'"
    serve = f"{install}\n{nodes.ray_start(None)}\nexec {line_of(first.program, first.arguments)}\n"
    join = f"{install}\nuntil {nodes.ray_start('$LWS_LEADER_ADDRESS')}; do sleep 5; done\n"
    shell = ("/bin/sh", "-ec")
    return first.replace(program=shell, arguments=(serve,)), other.replace(program=shell, arguments=(join,))


def _pod(deployment: Deployment, site: Site, one: Container, *, answers: bool) -> dict[str, Any]:
    """A pod; `answers`: whether requests come to it."""
    secret = {"secretKeyRef": {"name": site.secret, "key": "token", "optional": True}}
    variables = [{"name": name, "value": _literal(value)} for name, value in one.variables]
    mounts = [{"name": "models", "mountPath": images.MODELS}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {"name": "models", "persistentVolumeClaim": {"claimName": site.claim}},
        {
            "name": "shared-memory",
            "emptyDir": {"medium": "Memory", "sizeLimit": f"{images.shared_memory_gib(deployment)}Gi"},
        },
    ]
    if one.files:
        mounts.append({"name": "settings", "mountPath": FILES})
        volumes.append({"name": "settings", "configMap": {"name": f"{site.name}-settings"}})
    server: dict[str, Any] = {
        "name": "server",
        "image": one.image,
        "command": [_literal(word) for word in one.program],
        "args": [_literal(word) for word in one.arguments],
        "env": [*variables, {"name": "HF_TOKEN", "valueFrom": secret}],
        "volumeMounts": mounts,
    }
    if deployment.gpus:
        amount = {_GPU[images.kind(deployment)]: str(deployment.gpus)}
        server["resources"] = {"limits": amount, "requests": amount}
    if answers:
        asked = {"httpGet": {"path": one.health, "port": "http"}}
        server["ports"] = [{"name": "http", "containerPort": site.port}]
        # Loading takes minutes: until it is done, nothing else is asked, and nobody restarts it.
        looks = -(-limit_s(deployment, site) // _STEP_S)
        server["startupProbe"] = {**asked, "periodSeconds": _STEP_S, "failureThreshold": looks}
        server["readinessProbe"] = {**asked, "periodSeconds": 5, "timeoutSeconds": 5}
        server["livenessProbe"] = {**asked, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6}
    pod: dict[str, Any] = {
        # A service called vllm would give every pod VLLM_PORT, which vLLM takes for its own.
        "enableServiceLinks": False,
        "containers": [server],
        "volumes": volumes,
    }
    if product := _product(deployment):
        pod["nodeSelector"] = {"nvidia.com/gpu.product": product}
    return pod


def _literal(word: str) -> str:
    """A word that comes out of Kubernetes as it is: $$( stands for $(."""
    return _DOLLAR.sub("$$", word)


def _product(deployment: Deployment) -> str | None:
    """What NVIDIA's feature discovery labels nodes of this GPU with: its name, with - for spaces."""
    facts = deployment.device.facts
    if (
        not deployment.gpus
        or facts is None
        or images.kind(deployment) != "nvidia"
        or not facts.nvml_names
        or deployment.device.mig
    ):
        return None
    return facts.nvml_names[0].replace(" ", "-")


def _scraped(deployment: Deployment, site: Site) -> dict[str, Any]:
    """Annotations that a usual Prometheus finds pods by; none of an engine that has no page."""
    if deployment.engine.name not in NAMES:
        return {}
    page = page_of(deployment.engine.name)
    found = {"prometheus.io/scrape": "true", "prometheus.io/port": str(site.port), "prometheus.io/path": page}
    return {"annotations": found}


def _service(site: Site, chosen: dict[str, str], name: str | None = None) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name or site.name, "labels": {APP: site.name}},
        "spec": {
            "type": "ClusterIP",
            "selector": chosen,
            "ports": [{"name": "http", "port": site.port, "targetPort": site.port, "protocol": "TCP"}],
        },
    }


def _maps(site: Site, one: Container) -> list[dict[str, Any]]:
    """A ConfigMap with the engine's own files."""
    if not one.files:
        return []
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"{site.name}-settings"},
            "data": dict(one.files),
        }
    ]


def _note(deployment: Deployment, site: Site) -> str:
    claim = f"It reads models from the PersistentVolumeClaim {site.claim}, and a token of the Hub from the Secret {site.secret}"
    made = f"kubectl create secret generic {site.secret} --from-file=token=FILE"
    lines = [title(deployment), f"{claim} (key token), if it is there:", made]
    if deployment.replicas * deployment.nodes > 1:
        lines.append(
            f"Its pods may be on several nodes: {site.claim} has to have the access mode ReadWriteMany. {ONE_NODE}"
        )
    if deployment.engine.name in NAMES:
        lines.append(
            f'Alerts (--emit alerts) ask for job="{site.name}". A job that finds pods by these annotations has a name of its own: the scrape '
            "configuration at the head of the rules gives that one."
        )
    lines.append(f"startupProbe: {limit_words(deployment, site)}")
    return "\n".join(lines)
