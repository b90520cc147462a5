"""Where configurations come from: a path, stdin, the Hub cache, the catalogue, the Hub.

Precedence (design): a path wins; then a snapshot that is already in the user's Hub cache;
then the bundled catalogue; then the Hub. `--source` forces one of them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from kvctl.errors import SourceError, UsageError
from kvctl.record import Record
from kvctl.spec import Provenance, Weights

SOURCES = ("catalogue", "cache", "hub")


class Found(Record):
    """A configuration and what is known beside it."""

    id: str
    config: Mapping[str, Any]
    provenance: Provenance
    weights: Weights | None = None
    notes: tuple[str, ...] = ()
    """Lines for stderr: which source answered and why, what stands in for what."""
    whole: bool = True
    """Whether the configuration is the model's own file, with nothing but its class's defaults left out."""


# What people paste: a model's page, or a file or folder of it.
_PAGE = re.compile(
    r"(?:hf://(?:models/)?|https?://([^/]+)/)([^/?#]+/[^/?#]+)(?:/(?:tree|blob|resolve)/([^/?#]+))?(?:/([^?#]*))?(?:[?#].*)?"
)
# A GGUF file on the Hub: by its path in a repository, or by its quantisation as llama.cpp's -hf has it.
_FILE_OF = re.compile(r"([\w][\w.-]*/[\w.-]+)/(.+\.gguf)", re.ASCII)
_QUANTISED = re.compile(r"([\w][\w.-]*/[\w.-]+):([\w.-]+)", re.ASCII)


def looks_like_path(name: str) -> bool:
    """True for what can only be meant as a file or folder."""
    return (
        name.startswith((".", "/", "~"))
        or name.endswith((".json", ".gguf"))
        or (os.sep in name and os.path.exists(name))
    )


def _from_address(address: str) -> tuple[str, str | None, str | None]:
    """Repository, revision and GGUF file of a Hub page; other addresses are not fetched."""
    page = _PAGE.fullmatch(address)
    hosts = {
        None,
        "huggingface.co",
        "www.huggingface.co",
        "hf.co",
        os.environ.get("HF_ENDPOINT", "").partition("://")[2].rstrip("/"),
    }
    if page is None or page[1] not in hosts:
        raise SourceError(
            f"{re.sub(r'//[^/]*@', '//…@', address)[:200]} is an address, and kvctl reads files and Hub names",
            hint="name the repository (org/name), or pipe the file: curl -L ADDRESS | kvctl size -",
        )
    from urllib.parse import unquote

    path = unquote(page[4] or "")
    return page[2], page[3] and unquote(page[3]), path if path.endswith(".gguf") else None


def resolve(name: str, *, source: str | None = None, revision: str | None = None) -> Found:
    """Find a model's configuration; SourceError says where was looked and what is near."""
    if source is not None and source not in SOURCES:
        raise UsageError(f"--source: unknown source {source!r}", hint="one of " + ", ".join(SOURCES))
    if name == "-":
        from kvctl.sources import local

        return local.from_stdin()
    if "://" in name:
        name, of_page, file = _from_address(name)
        revision = revision or of_page
        if file is not None:
            return _hub_file(source, name, revision, file=file)
    elif not os.path.exists(name):
        if file_of := _FILE_OF.fullmatch(name):
            return _hub_file(source, file_of[1], revision, file=file_of[2])
        if quantised := _QUANTISED.fullmatch(name):
            return _hub_file(source, quantised[1], revision, quantisation=quantised[2])
    if source is None and (looks_like_path(name) or os.path.exists(name)):
        from kvctl.sources import local

        return local.from_path(name)
    from kvctl.sources import catalogue

    if source == "catalogue":
        if revision is not None:
            raise UsageError("--revision is about the Hub; the catalogue has one state of each model")
        return catalogue.find(name)
    # A short name means the same repository everywhere: the catalogue spells it out.
    repo = catalogue.full_name(name)
    if source != "hub":
        from kvctl.sources import cache

        snapshot = cache.find(repo, revision=revision)
        if snapshot is not None:
            return snapshot
        if source == "cache":
            raise SourceError(
                f"{name} is not in the Hub cache", hint="drop --source cache, or download it with: hf download " + repo
            )
    if source is None and revision is None and catalogue.has(name):
        return catalogue.find(name)
    from kvctl.sources import hub

    return hub.fetch(repo, revision=revision, forced=source == "hub")


def _hub_file(source: str | None, repo: str, revision: str | None, **which: str) -> Found:
    """A GGUF file of a repository: from the Hub cache, else from the Hub."""
    if source == "catalogue":
        raise UsageError("--source catalogue has no GGUF files", hint="drop it, or give the path of a file")
    from kvctl.sources import gguf_hub

    found = gguf_hub.cached(repo, revision, **which) if source != "hub" else None
    if found is not None:
        return found
    if source == "cache":
        raise SourceError(
            f"{repo} has no such GGUF file in the Hub cache", hint=f"download it with: hf download {repo}"
        )
    return gguf_hub.fetch(repo, revision, **which)
