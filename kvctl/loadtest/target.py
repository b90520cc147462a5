"""The server that is tested: where it is, what it is, and what it serves. Nothing here is timed."""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvctl.errors import KvctlError, UsageError
from kvctl.loadtest.loop import Address
from kvctl.record import Record

if TYPE_CHECKING:
    import httpx2

_SECONDS = 10.0
_MOST = 4 * 2**20
"""Bytes of an answer that is looked at."""


class Place(Record):
    """A URL, taken apart."""

    secure: bool
    name: str
    port: int
    base: str
    """The path before /v1, without a slash at its end."""

    @property
    def root(self) -> str:
        """As a URL, without /v1."""
        name = f"[{self.name}]" if ":" in self.name else self.name
        usual = 443 if self.secure else 80
        port = "" if self.port == usual else f":{self.port}"
        return f"{'https' if self.secure else 'http'}://{name}{port}{self.base}"


def read_url(text: str) -> Place:
    """ "localhost:8000", "http://10.0.0.7:8000/v1", "https://host/team/v1/".

    Raises:
        UsageError: it is no such URL, or has a name and a password in it.

    """
    whole = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(whole)
        port = parts.port
    except ValueError:
        raise UsageError(f"{text[:80]!r} is no URL", hint="http://127.0.0.1:8000") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\s\x00-\x1f]", whole):
        raise UsageError(f"{text[:80]!r} is no URL of a server", hint="http://127.0.0.1:8000")
    if parts.username is not None or parts.password is not None:
        raise UsageError("the URL has a name or a password in it, which others could see", hint="--api-key-env NAME")
    if parts.query or parts.fragment:
        raise UsageError(f"{text[:80]!r}: a server's URL has no ? and no #", hint="http://127.0.0.1:8000/v1")
    base = re.sub(r"/(chat/completions|completions)$", "", parts.path.rstrip("/"))
    secure = parts.scheme == "https"
    return Place(secure, parts.hostname, port or (443 if secure else 80), base.removesuffix("/v1").rstrip("/"))


def resolve(place: Place) -> Address:
    """The address that answers: names that stand for several are tried in turn, once.

    Raises:
        KvctlError: there is no such name, or nothing listens there.

    """
    try:
        found = socket.getaddrinfo(place.name, place.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, socket.gaierror) else str(error)
        raise KvctlError(f"{place.name}: {(why or 'no such name').lower()}", hint="is the name right?") from None
    last: OSError | None = None
    for family, _, _, _, pair in found:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.settimeout(_SECONDS)
                sock.connect(pair)
            return Address(family, str(pair[0]), place.port, place.name)
        except OSError as error:
            last = error
    why = (
        "no answer" if isinstance(last, TimeoutError) else os.strerror(last.errno) if last and last.errno else str(last)
    )
    raise KvctlError(f"{place.root}: {why.lower()}", hint="does the server run, and on this port?")


class Trust(Record):
    """How a secure server is believed."""

    ca: str | None = None
    """A file of certificates that are trusted, besides none."""
    insecure: bool = False
    """Whether any is."""

    def context(self) -> ssl.SSLContext:
        """For connections of ours.

        Raises:
            UsageError: the file cannot be read.

        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"{self.ca}: no certificates can be read from it ({error})", hint="a file in PEM"
            ) from None
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


class Server(Record):
    """What answers."""

    engine: str
    """vllm, sglang, llama.cpp, tensorrt-llm, tgi, ollama, lmstudio, transformers, or unknown."""
    version: str | None
    models: tuple[str, ...]
    context: int | None
    """Tokens that a request may have, where the server says."""
    slots: int | None = None
    """Requests that it runs at a time, where it says."""
    metrics: bool = False
    """Whether it has a page of metrics."""
    facts: Mapping[str, Any] = {}
    """What else it says of itself."""


class Client:
    """Questions that are not timed, over a library."""

    def __init__(self, place: Place, trust: Trust, headers: Mapping[str, str]) -> None:
        import httpx2

        verify: ssl.SSLContext | bool = trust.context() if place.secure else True
        # Proxies of the environment are for the world outside; a server under test is asked directly, as the load is sent.
        self.http = httpx2.Client(
            verify=verify, headers=dict(headers), timeout=_SECONDS, trust_env=False, follow_redirects=False
        )
        self.root = place.root

    def get(self, path: str) -> httpx2.Response | None:
        """None where nothing sensible is there.

        Raises:
            KvctlError: the connection fails.

        """
        return self._asked("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> httpx2.Response | None:
        """The same with a body in JSON."""
        return self._asked("POST", path, body)

    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx2.Response | None:
        import httpx2

        try:
            try:
                found = self.http.request(method, self.root + path, json=body)
            except (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError):
                # Servers close a connection behind an answer of 500 (uvicorn), or one that lay idle: once more, on a new one.
                found = self.http.request(method, self.root + path, json=body)
        except httpx2.TimeoutException:
            raise KvctlError(
                f"{self.root}{path}: no answer in {_SECONDS:g} s", hint="is the server up, and not full?"
            ) from None
        except httpx2.HTTPError as error:
            raise KvctlError(
                f"{self.root}: {_first_line(error)}", hint="does the server run there, and speak HTTP?"
            ) from None
        return found if len(found.content) <= _MOST else None

    def object(self, path: str) -> dict[str, Any]:
        """A JSON object, or an empty one."""
        found = self.get(path)
        if found is None or found.status_code != 200:
            return {}
        try:
            value = found.json()
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def close(self) -> None:
        self.http.close()


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def look(client: Client) -> Server:
    """What a server says of itself.

    Raises:
        KvctlError: it does not answer, wants a key, or serves no models.

    """
    listed = client.get("/v1/models")
    if listed is not None and listed.status_code in (401, 403):
        raise KvctlError(
            f"the server refuses: {listed.status_code}", hint="--api-key-env NAME takes the key from a variable"
        )
    found_models = entries(listed)
    owners = {str(entry.get("owned_by")).lower() for entry in found_models}
    models = tuple(str(entry["id"]) for entry in found_models)
    server = listed.headers.get("server", "").lower() if listed is not None else ""
    found = _named(client, owners, server) or Server("unknown", None, (), None)
    own = next(
        (entry.get("max_model_len") for entry in found_models if isinstance(entry.get("max_model_len"), int)), None
    )
    metrics = client.get("/metrics")
    page = metrics is not None and metrics.status_code == 200 and b"# TYPE" in metrics.content
    return found.replace(models=models or found.models, context=found.context or own, metrics=page)


def lists_models(listed: httpx2.Response) -> bool:
    """Whether an answer of /v1/models is one, be the list empty."""
    try:
        found = listed.json() if listed.status_code == 200 else None
    except ValueError:
        return False
    return isinstance(found, dict) and isinstance(found.get("data"), list)


def entries(listed: httpx2.Response | None) -> list[dict[str, Any]]:
    """Models of such an answer."""
    if listed is None or listed.status_code != 200:
        return []
    try:
        found = listed.json()
    except ValueError:
        return []
    data = found.get("data") if isinstance(found, dict) else None
    return (
        [entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
        if isinstance(data, list)
        else []
    )


def _named(client: Client, owners: set[str], server: str) -> Server | None:
    """By what only one engine has, the surest first."""
    if "llamacpp" in owners or server == "llama.cpp":
        return _llama_cpp(client)
    if "sglang" in owners:
        info = client.object("/get_server_info") or client.object("/server_info")
        return Server("sglang", _text(info.get("version")), (), _count(info.get("context_length")), _count(info.get("max_running_requests")), facts={
            name: info[name] for name in ("max_total_num_tokens", "page_size", "kv_cache_dtype", "mem_fraction_static") if name in info
        })  # fmt: skip
    if "vllm" in owners:
        return Server("vllm", _text(client.object("/version").get("version")), (), None)
    if owners & {"tensorrt_llm", "tensorrt-llm"}:
        return Server("tensorrt-llm", _text(client.object("/version").get("version")), (), None)
    info = client.object("/info")
    if "model_id" in info and ("max_total_tokens" in info or "docker_label" in info):
        return Server("tgi", _text(info.get("version")), (str(info["model_id"]),), _count(info.get("max_total_tokens")),
                      _count(info.get("max_concurrent_requests")))  # fmt: skip
    version = client.object("/api/version").get("version")
    if (
        isinstance(version, str)
        and "library" in owners | {"library"}
        and client.object("/api/tags").get("models") is not None
    ):
        return Server("ollama", version, (), None)
    if "organization_owner" in owners:
        return Server("lmstudio", None, (), None)
    # transformers/cli/serving/server.py: what no other has; without the Hub its list of models answers 500.
    paths = client.object("/openapi.json").get("paths")
    if isinstance(paths, dict) and {"/load_model", "/reset", "/v1/responses"} <= paths.keys():
        return Server("transformers", None, (), None)
    return None


def _llama_cpp(client: Client) -> Server:
    props = client.object("/props")
    settings = props.get("default_generation_settings")
    context = _count(settings.get("n_ctx")) if isinstance(settings, dict) else None
    return Server("llama.cpp", _text(props.get("build_info")), (), context, _count(props.get("total_slots")))


def _text(value: Any) -> str | None:
    return value[:80] if isinstance(value, str) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
