"""GGUF files on the Hub: their headers, by ranged reads.

A file is named as llama.cpp's -hf does (org/repo:Q4_K_M), by its path in the repository
(org/repo/file.gguf), or by its address. Headers take a few MB, most of them vocabulary; they come
in ranges that double, and nothing is asked for twice.
"""

from __future__ import annotations

import re
from typing import NoReturn
from urllib.parse import quote

from kvctl.errors import KvctlError, SourceError
from kvctl.sources import Found, cache, gguf, jsonfile
from kvctl.sources.hub import Answer, Hub, Unreachable, check, file_names
from kvctl.spec import Provenance

_FIRST_RANGE = 2**20
_LONGEST_HEADER = 2**26  # bytes; with a vocabulary of a million words it is some 30 MB
_WORDS_SHOWN = 12
# The part of a file's name that says how its weights are stored.
_QUANTISATION = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d+_\w+|I?Q\d+|TQ\d_\d|BF16|F16|F32|MXFP4(?:_\w+)?|NVFP4))(?=[-._/]|$)", re.I)  # fmt: skip
_SPAN = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


def cached(
    repo: str, revision: str | None, *, file: str | None = None, quantisation: str | None = None
) -> Found | None:
    """The same from the user's Hub cache, if the file is there and no other is meant as well."""
    check(repo, revision)
    folder = cache.snapshot(repo, revision)
    if folder is None:
        return None
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
    if file is None:
        wanted = [name for name, label in _models(names).items() if label.lower() == (quantisation or "").lower()]
        file = wanted[0] if len(wanted) == 1 else None
    if file not in names:
        return None
    where = jsonfile.plain(str(folder / file))
    found = gguf.from_file(folder / file, where)
    return found.replace(id=jsonfile.plain(f"{repo}/{file}"), provenance=Provenance("cache", where, folder.name))


def fetch(repo: str, revision: str | None, *, file: str | None = None, quantisation: str | None = None) -> Found:
    """The model in one file of a repository: the file of that path, or the one of that quantisation.

    Raises:
        SourceError: no such file, no access to it, or no answer.
        ConfigError: the file is no model that kvctl can read.

    """
    check(repo, revision)
    hub = Hub(repo, revision, forced=True)
    try:
        if file is not None:
            return _read(hub, file, revision)
        info = hub.info(repo, revision)
    except Unreachable as down:
        raise SourceError(f"the Hub cannot be reached ({down})", hint="give a .gguf file that is here") from None
    return from_files(hub, file_names(info), _commit(info) or revision, quantisation)


def from_files(hub: Hub, names: list[str], commit: str | None, quantisation: str | None = None) -> Found:
    """The model among a repository's files; several are listed, and the user chooses."""
    models = _models(names)
    if not models:
        raise SourceError(f"{hub.repo} has no GGUF files", hint=f"its files: {hub.page(hub.repo)}/tree/main")
    if quantisation is not None:
        models = {name: label for name, label in models.items() if label.lower() == quantisation.lower()}
        if not models:
            raise SourceError(f"{hub.repo} has no GGUF file of {jsonfile.plain(quantisation)[:40]}",
                              hint="it has " + _listed(hub.repo, _models(names)))  # fmt: skip
    if len(models) > 1:
        raise SourceError(f"{hub.repo} has {len(models)} GGUF models", hint="name one: " + _listed(hub.repo, models))
    try:
        return _read(hub, next(iter(models)), commit)
    except Unreachable as down:
        raise SourceError(f"the Hub cannot be reached ({down})", hint="try again") from None


def _commit(info: dict[str, object]) -> str | None:
    commit = info.get("sha")
    return commit if isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{40}", commit) else None


def _models(names: list[str]) -> dict[str, str]:
    """First parts of the models among the files, with their quantisations; no projectors of images, no importances."""
    out = {}
    for name in names:
        base = name.rpartition("/")[2]
        if not base.endswith(".gguf") or "mmproj" in base or "imatrix" in base or gguf.parts_of(base)[0] != base:
            continue
        found = _QUANTISATION.findall(name.removesuffix(".gguf"))
        out[name] = found[-1].upper() if found else ""
    return out


def _listed(repo: str, models: dict[str, str]) -> str:
    """How to name each: by its quantisation where that is its own, else by its path."""
    labels = list(models.values())
    words = [f"{repo}:{label}" if label and labels.count(label) == 1 else f"{repo}/{name}" for name, label in models.items()]  # fmt: skip
    more = len(words) - _WORDS_SHOWN
    return ", ".join(map(jsonfile.plain, words[:_WORDS_SHOWN])) + (f" and {more} more" if more > 0 else "")


def _read(hub: Hub, file: str, commit: str | None) -> Found:
    """The model of a file, all of its parts together."""
    folder, slash, base = file.rpartition("/")
    headers, location = [], ""
    parts = gguf.parts_of(base)
    name = hub.repo
    for part in parts:
        start = _Ranges(hub, folder + slash + part, commit)
        where = jsonfile.plain(f"{hub.repo}/{folder}{slash}{part}")
        headers.append(gguf.parse_header(start, start.whole, where))
        commit = commit or start.commit
        name = start.repo or name
        location = location or start.url
    where = jsonfile.plain(f"{name}/{file}")
    return gguf.found(headers, len(parts), where, where, Provenance("hub", jsonfile.plain(location), commit))


class _Ranges:
    """The start of a file on the Hub, as far as it was asked for."""

    def __init__(self, hub: Hub, file: str, commit: str | None) -> None:
        self._hub, self._file, self._asked = hub, file, hub.file_url(file, commit)
        self.data = bytearray()
        answer = self._range(0, _FIRST_RANGE)
        self.commit, self.repo = answer.commit, answer.repo
        self.longest = min(self.whole, _LONGEST_HEADER)
        revision = quote(self.commit or commit or "main", safe="")
        self.url = f"{hub.page(self.repo or hub.repo)}/resolve/{revision}/{quote(file)}"

    def reach(self, end: int) -> int:
        while len(self.data) < end:
            self._range(len(self.data), min(self.longest, max(end, 2 * len(self.data))))
        return len(self.data)

    def _range(self, start: int, end: int) -> Answer:
        answer = self._hub.patiently(self._asked, range(start, end))
        if answer.status == 200:
            raise SourceError(
                f"the Hub ({self._hub.host()}) does not answer parts of files, and a GGUF file is too long to read whole",
                hint=f"download it: hf download {self._hub.repo} {jsonfile.plain(self._file)}",
            )
        if answer.status == 416:
            raise SourceError(f"{self._hub.repo}/{jsonfile.plain(self._file)} is empty", hint="choose another file")
        if answer.status != 206:
            self._refused(answer)
        span = _SPAN.fullmatch(answer.headers.get("Content-Range", ""))
        # All that was asked for: a crumb at a time, a header would take forever.
        if (
            span is None
            or (int(span[1]), int(span[2]) + 1) != (start, min(end, int(span[3])))
            or len(answer.body) != int(span[2]) + 1 - start
            or not answer.body
        ):
            raise SourceError(f"the Hub ({self._hub.host()}) answers with another part of the file than asked for",
                              hint="try again")  # fmt: skip
        self.whole = int(span[3])
        self.data += answer.body
        return answer

    def _refused(self, answer: Answer) -> NoReturn:
        if answer.headers.get("X-Error-Code") == "EntryNotFound":
            hint = f"its files: {self._hub.page(self._hub.repo)}/tree/main"
            try:
                models = _models(file_names(self._hub.info(self._hub.repo, answer.commit)))
                hint = "it has " + _listed(self._hub.repo, models) if models else hint
            except (KvctlError, Unreachable):
                pass
            raise SourceError(f"{self._hub.repo} has no file {jsonfile.plain(self._file)}", hint=hint)
        self._hub.refused(answer)
