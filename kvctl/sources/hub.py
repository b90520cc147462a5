"""The Hub: a repository's config.json and the size of its weights.

The client library brings the endpoint, the token, the session (proxies, certificates, offline mode)
and the URLs. Its download functions are not used: when a server fails they try again for minutes,
and they read files of any length. Two requests size a model; redirects and one retry come on top.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

from kvctl import __version__
from kvctl.errors import KvctlError, SourceError, UsageError
from kvctl.sources import Found, cache, jsonfile, local, safetensors
from kvctl.spec import Provenance, Weights

TIMEOUT = "KVCTL_HUB_TIMEOUT"

# What a request for config.json looks like: where a renamed repository leads to.
_RESOLVE = re.compile(r"/(?P<repo>[^/]+(/[^/]+)?)/resolve/")
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
_LONGEST_NAME = 96
_LONGEST_WAIT = 3600.0  # seconds: sockets cannot wait for ever larger numbers
_BUSY = (500, 502, 503, 504)
_PAUSE = 0.5  # seconds before the one retry
_GIVE_FILE = "give its config.json: kvctl size ./config.json"


def fetch(repo: str, revision: str | None = None, forced: bool = False) -> Found:
    """A repository's configuration; `forced`: the user asked for the Hub, although another source may know it."""
    check(repo, revision)
    hub = Hub(repo, revision, forced)
    try:
        answer = hub.patiently(hub.file_url(local.CONFIG))
    except Unreachable as down:
        return _stand_in(repo, revision, str(down))
    if answer.headers.get("X-Error-Code") == "EntryNotFound":
        raise hub.no_config(answer)
    if answer.status != 200:
        hub.refused(answer)
    where = f"the config.json of {repo} on the Hub"
    config = jsonfile.parse(answer.body, where, hint=f"see whether {hub.page(repo)} is a page of the Hub")
    local.refuse_other_json(config, where)
    if answer.commit is not None:
        cache.keep(repo, revision or "main", answer.commit, answer.body)
    name = answer.repo or repo
    notes = []
    if name.lower() != repo.lower():
        notes.append(f"{repo} is now called {name} on the Hub")
    if _needs_remote_code(config):
        notes.append(
            f"{name} is defined by code in its repository, which kvctl never runs: read from config.json alone"
        )
    weights, unknown = hub.weights(name, answer.commit)
    notes.extend(unknown)
    location = f"{hub.page(name)}/resolve/{quote(answer.commit or revision or 'main', safe='')}/{local.CONFIG}"
    return Found(name, config, Provenance("hub", location, answer.commit), weights, tuple(notes))


class Unreachable(Exception):
    """No Hub answers: offline mode or no connection. The text says which."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes
    commit: str | None
    repo: str | None
    """The name under which the repository answered."""


class Hub:
    """One repository on the Hub, asked with the client library's settings."""

    def __init__(self, repo: str, revision: str | None, forced: bool) -> None:
        self._client = cache.client()
        settings = self._client.constants
        self.repo, self.revision, self.forced = repo, revision, forced
        self._endpoint: str = settings.ENDPOINT
        # Not the client's own headers: making them asks the Hub for a list of coding agents first.
        self._token: str | None = None if settings.HF_HUB_DISABLE_IMPLICIT_TOKEN else self._client.get_token()
        self._timeout = _timeout(settings)

    def file_url(self, name: str, revision: str | None = None) -> str:
        url: str = self._client.hf_hub_url(self.repo, name, revision=revision or self.revision)
        return url

    def patiently(self, url: str, span: range | None = None) -> Answer:
        """One answer, asked for a second time where the Hub is busy."""
        answer = self.get(url, span)
        if answer.status in _BUSY:
            time.sleep(_PAUSE)
            answer = self.get(url, span)
        return answer

    def page(self, repo: str) -> str:
        """The repository's address, without the credentials that an endpoint may hold."""
        parts = urlsplit(self._endpoint)
        return jsonfile.plain(f"{parts.scheme}://{self.host()}{parts.path}/{repo}")

    def get(self, url: str, span: range | None = None) -> Answer:
        """One answer, read within the time-out and the length of a configuration, or of the bytes in `span`."""
        import httpx2

        headers = {"user-agent": f"kvctl/{__version__}", "accept-encoding": "identity"}
        if self._token:
            headers["authorization"] = f"Bearer {self._token}"
        if span is not None:
            headers["range"] = f"bytes={span.start}-{span.stop - 1}"
        wanted = 200 if span is None else 206
        end = time.monotonic() + self._timeout
        try:
            with self._client.utils.get_session().stream(
                "GET", url, headers=headers, timeout=self._timeout, follow_redirects=True
            ) as response:
                most = jsonfile.LIMIT if span is None else len(span)
                body = b"".join(self._read(response.iter_bytes(), end, most)) if response.status_code == wanted else b""
                steps = [*response.history, response]
                commits = [step.headers.get("X-Repo-Commit", "") for step in steps]
                names = [self._repo_in(str(step.request.url)) for step in steps]
                return Answer(
                    response.status_code,
                    response.headers,
                    body,
                    next((commit for commit in commits if _NAME.fullmatch(commit)), None),
                    next((name for name in reversed(names) if name), None),
                )
        # None of the causes is shown or chained: their texts can hold the token or a signed address.
        except self._client.errors.OfflineModeIsEnabled:
            raise Unreachable("HF_HUB_OFFLINE is set") from None
        except httpx2.TimeoutException:
            raise self._too_slow() from None
        except httpx2.ConnectError as error:
            raise Unreachable(f"{self.host()}: {_why(error)}") from None
        except httpx2.ProxyError:
            raise Unreachable("the proxy refuses the connection") from None
        except httpx2.TooManyRedirects:
            raise SourceError(
                f"the Hub ({self.host()}) redirects {self.repo} in a circle", hint="check HF_ENDPOINT"
            ) from None
        except (httpx2.UnsupportedProtocol, httpx2.InvalidURL):
            raise SourceError(
                "HF_ENDPOINT is not an http or https address", hint="for example HF_ENDPOINT=https://huggingface.co"
            ) from None
        except (httpx2.LocalProtocolError, UnicodeError):
            raise SourceError(
                f"the token ({self._login()}) has characters that cannot be sent", hint="log in again: hf auth login"
            ) from None
        except ValueError:  # a port that is none
            raise SourceError(
                "HF_ENDPOINT is not an http or https address", hint="for example HF_ENDPOINT=https://huggingface.co"
            ) from None
        except (httpx2.HTTPError, OSError):
            raise SourceError(f"the Hub ({self.host()}) broke off its answer", hint="try again") from None

    def refused(self, answer: Answer) -> NoReturn:
        """Raise what an answer without the file means."""
        code, status = answer.headers.get("X-Error-Code", ""), answer.status
        if code == "GatedRepo":
            raise SourceError(
                f"{self.repo} is gated, and its owner has not granted you access ({self._login()})",
                hint=f"ask for access at {self.page(self.repo)}, then log in: hf auth login (or set HF_TOKEN)",
            )
        if code == "RevisionNotFound":
            raise SourceError(
                f"{self.repo} has no revision {jsonfile.plain(self.revision or 'main')}",
                hint=f"its branches and tags are listed at {self.page(self.repo)}/tree/main",
            )
        # With a valid login the Hub answers 404 for what is not there.
        if status == 401 and self._token:
            raise SourceError(
                f"the Hub refused the token ({self._login()})",
                hint="it may have expired or been revoked: log in again with hf auth login, or unset HF_TOKEN",
            )
        if status in (401, 404, 410):
            raise SourceError(f"{self.repo}: not found on the Hub, or private", hint=self._not_found_hint())
        if status in (403, 451):
            raise SourceError(
                f"the Hub refuses access to {self.repo} ({self._login()}; status {status})",
                hint=f"see {self.page(self.repo)}",
            )
        if status == 429:
            wait = answer.headers.get("Retry-After", "")
            when = f"in {wait} s" if wait.isdecimal() else "in a few minutes"
            raise SourceError(
                "the Hub answers 429: too many requests from here",
                hint=f"try again {when}" + ("" if self._token else "; logged in (hf auth login) the limit is higher"),
            )
        if status >= 500 or status == 408:
            raise SourceError(
                f"the Hub ({self.host()}) answers {status}: the fault is on its side",
                hint="try again later" + self._other_source(),
            )
        raise SourceError(f"the Hub ({self.host()}) answers {status} for {self.repo}", hint="check HF_ENDPOINT")

    def weights(self, repo: str, commit: str | None) -> tuple[Weights | None, tuple[str, ...]]:
        """The weights' size, which the answer can do without: a note where the Hub does not tell."""
        try:
            return safetensors.hub_weights(self.info(repo, commit or self.revision)), ()
        except Unreachable as down:
            return None, (f"weights unknown: {down}",)
        except KvctlError as error:
            return None, (f"weights unknown: {error.message}",)

    def info(self, repo: str, revision: str | None) -> dict[str, Any]:
        url = f"{self._endpoint}/api/models/{quote(repo)}"
        url += f"/revision/{quote(revision, safe='')}" if revision else ""
        answer = self.get(url + "?blobs=true")
        if answer.status != 200:
            raise SourceError(f"the Hub answers {answer.status} for the model's files")
        return jsonfile.parse(answer.body, f"the Hub's information on {repo}")

    def no_config(self, answer: Answer) -> SourceError:
        """The error for a repository without config.json: what it has instead."""
        try:
            info = self.info(answer.repo or self.repo, answer.commit or self.revision)
        except (KvctlError, Unreachable):
            return SourceError(
                f"{self.repo} has no config.json", hint=f"see its files: {self.page(self.repo)}/tree/main"
            )
        base: Any = info.get("config")
        for key in ("peft", "base_model_name_or_path"):
            base = base.get(key) if isinstance(base, dict) else None
        return local.no_config(self.repo, file_names(info), base=base if isinstance(base, str) else None)

    def _not_found_hint(self) -> str:
        from kvctl.sources import catalogue

        if self.forced and _catalogued(self.repo):
            return "the catalogue has it: drop --source hub"
        near = catalogue.nearest(self.repo, 3)
        login = "the login may lack access to a private one" if self._token else "a private one needs hf auth login"
        return ("near it: " + ", ".join(near) if near else "check its spelling") + f"; {login}"

    def _too_slow(self) -> SourceError:
        return SourceError(
            f"the Hub ({self.host()}) did not answer within {self._timeout:g} s",
            hint=f"try again, or allow more seconds: {TIMEOUT}={max(60, math.ceil(self._timeout) * 2)}"
            + self._other_source(),
        )

    def _other_source(self) -> str:
        return "; the catalogue has it: drop --source hub" if self.forced and _catalogued(self.repo) else ""

    def _read(self, chunks: Iterator[bytes], end: float, most: int) -> Iterator[bytes]:
        length = 0
        for chunk in chunks:
            length += len(chunk)
            if length > most:
                raise jsonfile.too_long(f"the answer of the Hub for {self.repo}")
            # The client's time-out is for each read: one byte now and then would never end.
            if time.monotonic() > end:
                raise self._too_slow()
            yield chunk

    def host(self) -> str:
        parts = urlsplit(self._endpoint)
        return jsonfile.plain(parts.netloc.rpartition("@")[2])

    def _repo_in(self, url: str) -> str | None:
        """The repository that an address of this Hub belongs to; files may be stored elsewhere."""
        here, there = urlsplit(self._endpoint), urlsplit(url)
        match = _RESOLVE.match(there.path.removeprefix(here.path))
        if match is None or (here.hostname, here.port) != (there.hostname, there.port):
            return None
        return match["repo"] if _NAME.fullmatch(match["repo"]) else None

    def _login(self) -> str:
        """Whose access was used, in words, and never the token itself."""
        if not self._token:
            return "not logged in"
        names = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
        return next((f"the token in {name}" for name in names if os.environ.get(name)), "the saved login")


def file_names(info: Mapping[str, Any]) -> list[str]:
    """The repository's files in the Hub's information on it."""
    siblings = info.get("siblings")
    files = [file.get("rfilename") for file in siblings if isinstance(file, dict)] if isinstance(siblings, list) else []
    return [name for name in files if isinstance(name, str)]


def check(repo: str, revision: str | None) -> None:
    """Refuse names and revisions that no repository can have."""
    if not _NAME.fullmatch(repo) or len(repo) > _LONGEST_NAME or "--" in repo or ".." in repo or repo.endswith(".git"):
        from kvctl.sources import catalogue

        near = catalogue.nearest(repo, 3)
        raise UsageError(
            f"{repo[:_LONGEST_NAME]!r} is neither a file here nor a name on the Hub",
            hint=("did you mean " + ", ".join(near) + "?") if near else "a name on the Hub is written org/name",
        )
    if revision is not None and (not revision or not revision.isprintable()):
        raise UsageError("--revision is empty or not printable", hint="a branch, a tag or a commit")


def _stand_in(repo: str, revision: str | None, reason: str) -> Found:
    """The cached snapshot or the catalogue's entry where the Hub cannot be reached."""
    down = f"the Hub cannot be reached ({reason})"
    found = cache.find(repo, revision)
    other = None if found else cache.newest(repo) or _catalogued(repo)
    if found is None and revision is None:
        found = other
    if found is not None:
        return found.replace(notes=(f"{down}: the answer is from {_described(found)}", *found.notes))
    if revision is not None:
        # Another revision than the one asked for is no answer.
        hint = f"without --revision {_described(other)} answers" if other else _GIVE_FILE
        raise SourceError(f"revision {jsonfile.plain(revision)} of {repo} is not cached, and {down}", hint=hint)
    from kvctl.sources import catalogue

    near = catalogue.nearest(repo, 3)
    raise SourceError(
        f"{repo} is neither cached nor in the catalogue, and {down}",
        hint="near it in the catalogue: " + ", ".join(near) if near else _GIVE_FILE,
    )


def _described(found: Found) -> str:
    return "the catalogue" if found.provenance.source == "catalogue" else "the snapshot in the Hub cache"


def _catalogued(repo: str) -> Found | None:
    """The catalogue's entry, where it has one that can be sized."""
    from kvctl.sources import catalogue

    try:
        return catalogue.find(repo) if catalogue.has(repo) else None
    except SourceError:
        return None


def _needs_remote_code(config: Mapping[str, Any]) -> bool:
    """True where only code in the repository defines the model: transformers has no class for its type."""
    if not config.get("auto_map"):
        return False
    table = resources.files("kvctl").joinpath("data/model_types.jsonl").read_text("utf-8")
    return f'"model_type":{json.dumps(config.get("model_type"))},' not in table


def _timeout(settings: Any) -> float:
    """Seconds: kvctl's own setting, else the client's."""
    text = os.environ.get(TIMEOUT)
    if not text:
        default = settings.DEFAULT_DOWNLOAD_TIMEOUT
        own = (settings.HF_HUB_DOWNLOAD_TIMEOUT, settings.HF_HUB_ETAG_TIMEOUT)
        return float(next((value for value in own if value != default), default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{TIMEOUT}={jsonfile.plain(text)} is not a number of seconds", hint=f"{TIMEOUT}=30")
    return min(seconds, _LONGEST_WAIT)


def _why(error: BaseException) -> str:
    """Why there is no connection, in a few words."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, socket.gaierror):
            return "its name cannot be resolved"
        if isinstance(cause, ssl.SSLError):
            return "no secure connection"
        if isinstance(cause, ConnectionRefusedError):
            return "connection refused"
        cause = cause.__cause__ or cause.__context__
    return "no connection"
