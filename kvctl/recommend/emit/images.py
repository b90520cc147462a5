"""Container images: of the version that the rules are for, and for the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.errors import UsageError

if TYPE_CHECKING:
    from kvctl.recommend.deployment import Deployment
    from kvctl.recommend.emit.site import Site

MODELS = "/models"
"""Where models lie in a container."""

# Engine, kind of device → image. Sources: docs.vllm.ai deployment/docker and getting_started/installation/cpu, docs.sglang.io
# get_started/install, llama.cpp docs/docker.md, NGC's catalogue, Ollama docs/docker.md.
_IMAGES = {
    ("vllm", "nvidia"): "vllm/vllm-openai:v{version}",
    ("vllm", "amd"): "vllm/vllm-openai-rocm:v{version}",
    ("vllm", "cpu"): "public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:v{version}",
    ("sglang", "nvidia"): "lmsysorg/sglang:v{version}",
    ("llama.cpp", "nvidia"): "ghcr.io/ggml-org/llama.cpp:server-cuda-{version}",
    ("llama.cpp", "amd"): "ghcr.io/ggml-org/llama.cpp:server-rocm-{version}",
    ("llama.cpp", "cpu"): "ghcr.io/ggml-org/llama.cpp:server-{version}",
    ("tensorrt-llm", "nvidia"): "nvcr.io/nvidia/tensorrt-llm/release:{version}",
    ("ollama", "nvidia"): "ollama/ollama:{version}",
    ("ollama", "amd"): "ollama/ollama:{version}-rocm",
    ("ollama", "cpu"): "ollama/ollama:{version}",
}


def kind(deployment: Deployment) -> str:
    """nvidia, amd, metal or cpu."""
    device = deployment.device
    if device.kind == "cpu":
        return "cpu"
    if device.facts is not None and device.facts.metal:
        return "metal"
    return device.facts.vendor.lower() if device.facts is not None else "nvidia"


def image(deployment: Deployment, site: Site) -> str:
    """The image of the deployment.

    Raises:
        UsageError: there is none for the device.

    """
    where = kind(deployment)
    engine = deployment.engine
    if where == "metal":
        raise UsageError("a container on a Mac does not reach its GPU", hint="--emit command, and run it there")
    if site.image is not None:
        return site.image
    found = _IMAGES.get((engine.name, where))
    if found is None:
        raise UsageError(f"kvctl knows no image of {engine.name} for {deployment.device.name}",
                         hint="name one, or --emit command")  # fmt: skip
    return found.format(version=version(engine.version))


def version(text: str | None) -> str:
    """A version in full: images of 0.33 are tagged 0.33.0; builds of llama.cpp have one number."""
    assert text is not None
    return text if text.startswith("b") or text.count(".") != 1 else f"{text}.0"


def shared_memory_gib(deployment: Deployment) -> int:
    """GiB of /dev/shm, through which ranks talk to one another: what the engines' own manifests take.

    Source: docs.vllm.ai deployment/k8s (2Gi for one GPU) and deployment/frameworks/lws (15Gi), docs.sglang.io (--shm-size 32g). What vLLM
    offloads to host memory may lie there too.
    """
    if deployment.engine.name == "sglang":
        return 32
    offload = -(-(deployment.serving.offload or 0) // 2**30)
    return (2 if deployment.gpus * deployment.nodes <= 1 else 15) + offload
