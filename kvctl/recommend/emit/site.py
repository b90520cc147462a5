"""Where a deployment runs and under which names, and what it is meant to hold."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvctl.errors import UsageError
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.recommend.deployment import Deployment

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?(\.[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?)*")
_OURS = re.compile(r"\$[({]?(HEAD_ADDRESS|LWS_)")
"""Variables that stand in what is written for several nodes."""
_IMAGE = re.compile(r"[A-Za-z0-9][-A-Za-z0-9._/]*(:\d+/[-A-Za-z0-9._/]+)?(:[-A-Za-z0-9._]+)?(@sha256:[0-9a-f]{64})?")
SETTINGS, VARIABLES = "engine.yaml", "engine.env"
"""What an engine's own file is called: one of settings, and one of variables of the environment."""
_LONGEST = 52
"""Kubernetes takes 63 letters, and a LeaderWorkerSet puts numbers of groups and pods behind a name."""


class Site(Record):
    """Names, places and accounts; every one has a default that runs."""

    name: str = "llm"
    """Of the service, the unit, the job of Prometheus."""
    served: str | None = None
    """What requests call the model; None: as it was asked for."""
    port: int = 8000
    host: str = "127.0.0.1"
    """Where a server that runs outside of a container listens."""
    image: str | None = None
    """None: the engine's own, of the version that the rules are for."""
    user: str = "llm"
    folder: str = "/srv/models"
    """Models on each machine: local ones, and those that are downloaded."""
    claim: str = "models"
    """The PersistentVolumeClaim with the same in it."""
    secret: str = "hf-token"
    """The Secret whose key `token` is one of the Hugging Face Hub; it need not be there."""
    programs: str = "/usr/local/bin"
    """Where a systemd unit looks for the engine."""
    machine_gpus: int = 8
    """In one machine, for servers side by side."""
    ray: bool = False
    """Whether vLLM joins several nodes through Ray, not through its own processes."""
    start_s: int = 1800
    """Seconds that a start may take before it counts as failed, at least."""
    weights: int | None = None
    """Bytes of the weights as they are loaded; None: not known."""


class Promise(Record):
    """What the deployment is meant to hold; None is not asked for, empty is not known."""

    ttft_s: float | None = None
    """Seconds to the first token."""
    tpot_s: float | None = None
    """Seconds between tokens of a request."""
    percent: float = 99.0
    """Requests of a hundred that keep these times."""
    concurrency: int | None = None
    """Requests at once, of all replicas."""
    rate: float | None = None
    """Requests a second, of all replicas."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    hit_rate: float | None = None
    """Share of prompt tokens that are counted on to be in the prefix cache."""
    why: tuple[str, ...] = ()
    """Sentences: why this configuration."""
    log: tuple[str, ...] = ()
    """Lines that the start-up log will print."""


def check(site: Site) -> None:
    """Refuses names and numbers that nothing could be started with.

    Raises:
        UsageError: a name that Kubernetes does not take, a port that is none, a path that is not absolute.

    """
    if not _NAME.fullmatch(site.name) or len(site.name) > _LONGEST:
        raise UsageError(f"{site.name[:60]!r} is no name of a service",
                         hint=f"at most {_LONGEST} of a-z, 0-9 and -, a letter first: {named(site.name)}")  # fmt: skip
    for text, what in (
        (site.served, "a model's name"),
        (site.image, "an image"),
        (site.secret, "a Secret"),
        (site.claim, "a claim"),
    ):
        if text is not None and (not text.strip() or not text.isprintable() or len(text) > 500):
            raise UsageError(f"{text[:60]!r} cannot be {what}", hint="printable letters, and at least one")
    if site.served is not None and site.served.startswith("-"):
        raise UsageError(f"{site.served[:60]!r} cannot be a model's name", hint="a name without a dash before it, which engines read as an option")  # fmt: skip
    if site.served is not None and _OURS.search(site.served):
        raise UsageError(f"{site.served[:60]!r} cannot be a model's name", hint="a name without variables of the files that are written")  # fmt: skip
    if site.image is not None and not _IMAGE.fullmatch(site.image):
        raise UsageError(f"{site.image[:60]!r} is no name of an image", hint="registry/name:tag")
    if not _is_host(site.host):
        raise UsageError(
            f"{site.host[:60]!r} is no address to listen on", hint="127.0.0.1, 0.0.0.0, ::1 or a host's name"
        )
    if not 1 <= site.port <= 65535:
        raise UsageError(f"{site.port} is no port", hint="from 1 to 65535")
    for path in (site.folder, site.programs):
        if not path.startswith("/") or any(letter.isspace() for letter in path):
            raise UsageError(f"{path[:60]!r} is no absolute path without spaces", hint="/srv/models")
    if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,30}", site.user):
        raise UsageError(f"{site.user[:40]!r} is no name of a user", hint="llm")
    if site.start_s < 10:
        raise UsageError(f"{site.start_s} seconds are too few to load a model", hint="at least 10")


def _is_host(text: str) -> bool:
    """Whether it is an address or a host's name."""
    import ipaddress

    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _HOST.fullmatch(text) is not None
    return True


def bracketed(host: str) -> str:
    """An address as it stands before a colon and a port."""
    return f"[{host}]" if ":" in host else host


def reached(host: str) -> str:
    """Where a server that listens there is asked, from its own machine: one that listens everywhere, at the machine's own address."""
    return bracketed({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host))


def is_variables(deployment: Deployment) -> bool:
    """Whether the engine reads variables, and no file of settings."""
    return deployment.engine.name in ("llama.cpp", "ollama")


def named(model: str) -> str:
    """A name of a service from that of a model: "Qwen/Qwen3-32B" is qwen3-32b."""
    last = model.rstrip("/").rpartition("/")[2].lower().removesuffix(".gguf")
    short = re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:_LONGEST].strip("-")
    if not short:
        return "llm"
    return short if short[0].isalpha() else f"m-{short}"[:_LONGEST].strip("-")
