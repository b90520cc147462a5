"""A Hub on the loopback interface, for tests with the real client library.

It speaks the part of the protocol that reading models needs: `resolve` addresses with the Hub's headers,
model information, redirects of renamed repositories, logins, and the error codes; and it counts requests.

    with FakeHub() as hub:
        hub.add("org/model", config={"model_type": "llama"})
        os.environ["HF_ENDPOINT"] = hub.url
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

CHUNK = bytes(65536)


@dataclass
class Repository:
    """What the fake Hub knows of one repository."""

    files: dict[str, bytes | int]
    """Contents; a number stands for a file of so many zero bytes."""
    commit: str
    revisions: dict[str, str]
    """Branches and tags, and the commits they name."""
    info: dict[str, Any] = field(default_factory=dict)
    """More keys of the model information: safetensors, config, …"""
    gated: bool = False
    private: bool = False


@dataclass(frozen=True)
class Request:
    """One request that came in; header names are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]

    @property
    def token(self) -> str | None:
        kind, _, value = self.headers.get("authorization", "").partition(" ")
        return value if kind == "Bearer" else None


class FakeHub:
    """The server; a context manager. Change the attributes at any time."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.renamed: dict[str, str] = {}
        self.tokens: set[str] = set()
        """Tokens that are valid; any other is refused."""
        self.granted: set[str] = set()
        """Tokens with access to gated repositories."""
        self.requests: list[Request] = []
        self.delay = 0.0
        """Seconds before every answer."""
        self.drip = 0.0
        """Seconds after every byte of a body."""
        self.failures: list[tuple[int, dict[str, str]]] = []
        """Statuses and headers for the next requests, whatever they ask for."""
        self.hook: Callable[[Request], tuple[int, dict[str, str], bytes] | None] | None = None
        """Sees every request first, and may answer it."""
        self.via_cache = False
        """Send files through a second address of the Hub, as the real one does."""
        self.storage: FakeHub | None = None
        """Another server, of another origin, that files are fetched from."""
        self.ranges = True
        """Whether parts of files are answered; without it a range is answered with the whole file."""
        self.sent = 0
        """Bytes of bodies that were written."""
        self._server = _Server(("127.0.0.1", 0), _handler_of(self))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(
        self,
        name: str,
        config: Mapping[str, Any] | bytes | int | None = None,
        *,
        files: Mapping[str, bytes | int] | None = None,
        commit: str | None = None,
        revisions: Mapping[str, str] | None = None,
        info: Mapping[str, Any] | None = None,
        gated: bool = False,
        private: bool = False,
    ) -> Repository:
        """A repository; `config` becomes its config.json."""
        contents = dict(files or {})
        if config is not None:
            contents["config.json"] = json.dumps(config).encode() if isinstance(config, Mapping) else config
        commit = commit or hashlib.sha1(name.encode()).hexdigest()
        repository = Repository(
            contents, commit, {"main": commit, **(revisions or {})}, dict(info or {}), gated=gated, private=private
        )
        self.repositories[name] = repository
        return repository

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Clients that hang up are a part of the tests."""


def _handler_of(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            request = Request(self.command, self.path, {name.lower(): value for name, value in self.headers.items()})
            hub.requests.append(request)
            time.sleep(hub.delay)
            answered = hub.hook(request) if hub.hook else None
            if answered:
                self.answer(answered[0], answered[2], answered[1])
            elif hub.failures:
                status, headers = hub.failures.pop(0)
                self.answer(status, b"", headers)
            else:
                parts = urlsplit(self.path).path.strip("/").split("/")
                self.route([unquote(part) for part in parts], request.token)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            """Tests look at `requests` instead."""

        def route(self, parts: list[str], token: str | None) -> None:
            if token is not None and token not in hub.tokens:
                return self.error(401, "", "Invalid credentials in Authorization header")
            if parts[:2] == ["api", "models"]:
                name, rest = self.split_name(parts[2:], "revision")
                return self.information(name, rest[0] if rest else "main", token)
            if parts[:2] == ["api", "datasets"]:  # `add` them as datasets/NAME
                name, rest = self.split_name(parts[1:], "revision")
                return self.information(name, rest[0] if rest else "main", token)
            if parts[:3] == ["api", "resolve-cache", "models"]:
                return self.file("/".join(parts[3:5]), parts[5], "/".join(parts[6:]), token, final=True)
            if "resolve" in parts:
                name, rest = self.split_name(parts, "resolve")
                return self.file(name, rest[0], "/".join(rest[1:]), token)
            return self.error(404, "", "not a page of this Hub")

        @staticmethod
        def split_name(parts: list[str], at: str) -> tuple[str, list[str]]:
            end = parts.index(at) if at in parts else len(parts)
            return "/".join(parts[:end]), parts[end + 1 :]

        def repository(self, name: str, token: str | None) -> Repository | None:
            """The repository, or None after an answer that it is elsewhere or not there."""
            if name in hub.renamed:
                self.answer(307, b"", {"Location": self.path.replace(name, hub.renamed[name], 1)})
                return None
            repository = hub.repositories.get(name)
            if repository is None or (repository.private and token is None):
                # The Hub does not tell strangers which repositories do not exist.
                status, said = (
                    (401, "Invalid username or password.") if token is None else (404, "Repository not found")
                )
                self.error(status, "RepoNotFound", said)
                return None
            return repository

        def commit(self, repository: Repository, revision: str) -> str | None:
            commit = repository.revisions.get(revision, revision if revision == repository.commit else None)
            if commit is None:
                self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return commit

        def information(self, name: str, revision: str, token: str | None) -> None:
            repository = self.repository(name, token)
            commit = self.commit(repository, revision) if repository else None
            if repository is None or commit is None:
                return
            sizes = {path: data if isinstance(data, int) else len(data) for path, data in repository.files.items()}
            info = {
                "id": name.removeprefix("datasets/"),
                "sha": commit,
                "private": repository.private,
                "gated": "manual" if repository.gated else False,
                "siblings": [{"rfilename": path, "size": size} for path, size in sizes.items()],
                **repository.info,
            }
            self.answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

        def file(self, name: str, revision: str, path: str, token: str | None, final: bool = False) -> None:
            repository = self.repository(name, token)
            commit = self.commit(repository, revision) if repository else None
            if repository is None or commit is None:
                return None
            if repository.gated and token not in hub.granted:
                return self.error(401 if token is None else 403, "GatedRepo", "Access to this model is restricted.")
            about = {"X-Repo-Commit": commit}
            data = repository.files.get(path)
            if data is None:
                return self.error(404, "EntryNotFound", "Entry not found", about)
            about["ETag"] = f'"{hashlib.sha1(str(data).encode()).hexdigest()}"'
            if hub.storage is not None:
                length = data if isinstance(data, int) else len(data)
                linked = {"X-Linked-Size": str(length), "X-Linked-ETag": about["ETag"]}
                location = f"{hub.storage.url}/{name}/resolve/{commit}/{path}?signature=signed-secret"
                return self.answer(302, b"", {**about, **linked, "Location": location})
            if hub.via_cache and not final:
                return self.answer(307, b"", {**about, "Location": f"/api/resolve-cache/models/{name}/{commit}/{path}"})
            return self.part(data, about)

        def part(self, data: bytes | int, about: dict[str, str]) -> None:
            """The file, or the range of it that was asked for."""
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if hub.ranges else None
            if asked is None:
                return self.answer(200, data, about)
            length = data if isinstance(data, int) else len(data)
            start, end = int(asked[1]), min(int(asked[2]) + 1, length)
            if start >= length:
                return self.answer(416, b"", {**about, "Content-Range": f"bytes */{length}"})
            about["Content-Range"] = f"bytes {start}-{end - 1}/{length}"
            return self.answer(206, end - start if isinstance(data, int) else data[start:end], about)

        def error(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
            about = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **(headers or {})}
            self.answer(status, json.dumps({"error": message}).encode(), about)

        def answer(self, status: int, body: bytes | int, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(body if isinstance(body, int) else len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            try:
                for piece in self.pieces(body):
                    self.wfile.write(piece)
                    hub.sent += len(piece)
                    time.sleep(hub.drip)
            except OSError:
                self.close_connection = True  # the client has seen enough

        @staticmethod
        def pieces(body: bytes | int) -> Any:
            if isinstance(body, int):
                return (CHUNK[: body - start] for start in range(0, body, len(CHUNK)))
            return (body[at : at + 1] for at in range(len(body))) if hub.drip else [body]

    return Handler
