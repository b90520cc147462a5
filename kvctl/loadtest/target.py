"""The server that is tested: where it is, what it is, and what it serves. Nothing here is timed."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from kvctl.engines.metrics import page_of
from kvctl.errors import KvctlError, UsageError
from kvctl.loadtest.answers import wait_of
from kvctl.loadtest.connection import Address
from kvctl.record import Record

_SECONDS = 10.0
_LONGEST_WAIT = 300.0
"""Seconds that are waited where the server asks for it."""
"""For an answer, and all of it."""
_MOST = 4 * 2**20
"""Bytes of an answer that is looked at."""
_MODELS, _NAME = 1000, 500
"""Models, and letters of their names, that are looked at."""


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
    began = time.monotonic()
    try:
        found = socket.getaddrinfo(place.name, place.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        why = error.strerror if isinstance(error, socket.gaierror) else str(error)
        raise KvctlError(f"{place.name}: {(why or 'no such name').lower()}", hint="is the name right?") from None
    looked_up = time.monotonic() - began
    last: OSError | None = None
    for family, _, _, _, pair in found:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.settimeout(_SECONDS)
                began = time.monotonic()
                sock.connect(pair)
            return Address(family, str(pair[0]), place.port, place.name, looked_up, time.monotonic() - began)
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


class Answer(Record):
    """What came back for a question."""

    status_code: int
    headers: Mapping[str, str]
    """Names in lower case."""
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """What it says.

        Raises:
            ValueError: it is no JSON, or is nested without end.

        """
        try:
            return json.loads(self.content)
        except RecursionError:
            raise ValueError("JSON that is nested without end") from None


class Client:
    """Questions that are not timed, over a library; asked of one address of a name, where that is given: the one that is loaded."""

    def __init__(self, place: Place, trust: Trust, headers: Mapping[str, str], address: Address | None = None) -> None:
        import httpx2

        verify: ssl.SSLContext | bool = trust.context() if place.secure else True
        own = dict(headers) | {"Accept-Encoding": "identity"}
        self.root = self._base = place.root
        self.retries = 0
        self._more: dict[str, Any] = {}
        if address is not None:
            own["Host"] = _netloc(place.name, place.port)
            scheme = "https" if place.secure else "http"
            self._base = f"{scheme}://{_netloc(address.host, place.port)}{place.base}"
            self._more = {"sni_hostname": place.name}
        # Proxies of the environment are for the world outside; a server under test is asked directly, as the load is sent.
        self.http = httpx2.Client(verify=verify, headers=own, timeout=_SECONDS, trust_env=False, follow_redirects=False)

    def get(self, path: str) -> Answer | None:
        """None where nothing sensible is there.

        Raises:
            KvctlError: the connection fails.

        """
        return self._asked("GET", path, None)

    def there(self, path: str) -> Answer | None:
        """None, too, where nothing comes: of what a server may do without."""
        try:
            return self.get(path)
        except KvctlError:
            return None

    def post(self, path: str, body: Mapping[str, Any]) -> Answer | None:
        """The same with a body in JSON; what is turned away (429, 503) is asked again, up to `retries` times, when the server says."""
        for _ in range(self.retries):
            found = self._asked("POST", path, body)
            if found is None or found.status_code not in (429, 503):
                return found
            wait = wait_of(found.headers.get("retry-after"))
            if wait is not None and wait > _LONGEST_WAIT:
                return found
            time.sleep(1.0 if wait is None else wait)
        return self._asked("POST", path, body)

    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None) -> Answer | None:
        """In a thread of its own: the library waits so long for each byte, and a server can send one at a time for ever."""
        out: list[Answer | KvctlError | None] = []

        def ask() -> None:
            try:
                out.append(self._read(method, path, body))
            except KvctlError as error:
                out.append(error)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_SECONDS)
        if not out:
            raise KvctlError(f"{self.root}{path}: no answer in {_SECONDS:g} s", hint="is the server up, and not full?")
        if isinstance(out[0], KvctlError):
            raise out[0]
        return out[0]

    def _read(self, method: str, path: str, body: Mapping[str, Any] | None) -> Answer | None:
        import httpx2

        end = time.monotonic() + _SECONDS
        try:
            try:
                return self._stream(method, path, body, end)
            except (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError):
                # Servers close a connection behind an answer of 500 (uvicorn), or one that lay idle: once more, on a new one.
                return self._stream(method, path, body, end)
        except httpx2.TimeoutException:
            raise KvctlError(
                f"{self.root}{path}: no answer in {_SECONDS:g} s", hint="is the server up, and not full?"
            ) from None
        except httpx2.HTTPError as error:
            raise KvctlError(
                f"{self.root}: {_first_line(error)}", hint="does the server run there, and speak HTTP?"
            ) from None
        except Exception as error:  # whatever a library makes of what a server sends: no traceback in a thread
            raise KvctlError(f"{self.root}{path}: {type(error).__name__}: {_first_line(error)}") from None

    def _stream(self, method: str, path: str, body: Mapping[str, Any] | None, end: float) -> Answer | None:
        """Until that time, and no more than can be looked at."""
        import httpx2

        content = bytearray()
        with self.http.stream(method, self._base + path, json=body, extensions=self._more) as found:
            for part in found.iter_bytes():
                content += part
                if len(content) > _MOST:
                    return None
                if time.monotonic() > end:
                    raise httpx2.ReadTimeout("")
            headers = {name.lower(): value for name, value in found.headers.items()}
            return Answer(found.status_code, headers, bytes(content))

    def object(self, path: str) -> dict[str, Any]:
        """A JSON object, or an empty one, where there is none to be had."""
        found = self.there(path)
        if found is None or found.status_code != 200:
            return {}
        try:
            value = found.json()
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def close(self) -> None:
        self.http.close()


def _netloc(name: str, port: int) -> str:
    """Of a URL."""
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


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
    if listed is not None and listed.status_code in (301, 302, 303, 307, 308):
        where = listed.headers.get("location", "another place")[:200]
        raise KvctlError(f"{client.root}/v1/models sends on to {where}", hint="give the URL of the server itself")
    found_models = entries(listed)
    owners = {str(entry.get("owned_by")).lower() for entry in found_models}
    models = tuple(str(entry["id"]) for entry in found_models)
    server = listed.headers.get("server", "").lower() if listed is not None else ""
    found = _named(client, owners, server) or Server("unknown", None, (), None)
    own = next((limit for entry in found_models if (limit := _count(entry.get("max_model_len"))) is not None), None)
    metrics = client.there(page_of(found.engine))
    page = metrics is not None and metrics.status_code == 200 and b"# TYPE" in metrics.content
    return found.replace(models=models or found.models, context=found.context or own, metrics=page)


def lists_models(listed: Answer) -> bool:
    """Whether an answer of /v1/models is one, be the list empty."""
    try:
        found = listed.json() if listed.status_code == 200 else None
    except ValueError:
        return False
    return isinstance(found, dict) and isinstance(found.get("data"), list)


def entries(listed: Answer | None) -> list[dict[str, Any]]:
    """Models of such an answer."""
    if listed is None or listed.status_code != 200:
        return []
    try:
        found = listed.json()
    except ValueError:
        return []
    data = found.get("data") if isinstance(found, dict) else None
    if not isinstance(data, list):
        return []
    known = [entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    return [entry for entry in known if 0 < len(entry["id"]) <= _NAME][:_MODELS]


def _named(client: Client, owners: set[str], server: str) -> Server | None:
    """By what only one engine has, the surest first."""
    if "llamacpp" in owners or server == "llama.cpp":
        return _llama_cpp(client)
    if "sglang" in owners:
        info = client.object("/get_server_info") or client.object("/server_info")
        return Server("sglang", _text(info.get("version")), (), _count(info.get("context_length")), _count(info.get("max_running_requests")), facts={
            name: value for name in ("max_total_num_tokens", "page_size", "kv_cache_dtype", "mem_fraction_static")
            if (value := _fact(info.get(name))) is not None
        })  # fmt: skip
    if "vllm" in owners:
        return Server("vllm", _text(client.object("/version").get("version")), (), None)
    if owners & {"tensorrt_llm", "tensorrt-llm"}:
        return Server("tensorrt-llm", _text(client.object("/version").get("version")), (), None)
    info = client.object("/info")
    if "model_id" in info and ("max_total_tokens" in info or "docker_label" in info):
        own = _text(info["model_id"])
        return Server("tgi", _text(info.get("version")), (own,) if own else (), _count(info.get("max_total_tokens")),
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
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**53 else None


def _fact(value: Any) -> str | int | float | None:
    """What goes into the report as it is: a short text, or a number that is one."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return _text(value) or _count(value)
