"""Data sets on the Hub: what parts one has, and the files of one part, for calibration.

The client library brings the addresses, the token, the cache and offline mode. The datasets library is not used, even
where it is installed: the same command has to read the same rows with and without it, it prepares a whole data set
before it gives a row, and the rows here come from the files as they are published, which a commit pins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

from kvctl.errors import KvctlError, SourceError, UsageError
from kvctl.record import Record
from kvctl.sources import cache, jsonfile
from kvctl.sources.hub import Hub, Unreachable, file_names

MOST = 2 * 10**9
"""Bytes that are downloaded of a data set."""
_NAME = re.compile(
    r"(?P<repo>[\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?:@(?P<revision>[^:\s]+))?(?P<parts>(?::[^:\s/]+){0,2})", re.ASCII
)
_FILES = re.compile(r"\.(?:jsonl?|ndjson|parquet|txt)(?:\.gz)?$")
_NO_DATA = re.compile(
    r"(?:^|/)(?:\.|(?:dataset_infos?|config|state|package)\.json$|(?:requirements|license)[\w-]*\.txt$)", re.I
)
_SHARD = re.compile(r"(?:^|.*/)data/(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*")
_SPLITS = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev"),
           "test": ("test", "testing", "eval", "evaluation")}  # fmt: skip
_DEFAULT = "default"


class Asked(Record):
    """A part of a data set, as it was written: NAME[@REVISION][:CONFIG][:SPLIT]."""

    repo: str
    revision: str | None = None
    parts: tuple[str, ...] = ()


class Part(Record):
    """A part of a data set, and its files."""

    repo: str
    revision: str
    """The commit."""
    config: str
    split: str
    files: tuple[str, ...]
    licence: str | None


def parse(text: str) -> Asked:
    """What a name asks for.

    Raises:
        UsageError: it is no name that a data set can have.

    """
    found = _NAME.fullmatch(text.removeprefix("hf://datasets/"))
    if found is None or len(found["repo"]) > 96 or "--" in text or ".." in text:
        raise UsageError(f"{jsonfile.plain(text)[:100]!r} is neither a file here nor a data set's name on the Hub",
                         hint="org/name, org/name:split or org/name:config:split")  # fmt: skip
    return Asked(found["repo"], found["revision"], tuple(part for part in found["parts"].split(":") if part))


class _DatasetHub(Hub):
    """The Hub's pages of data sets."""

    def page(self, repo: str) -> str:
        return super().page(f"datasets/{repo}")

    def listing(self) -> tuple[list[str], str, str]:
        """Names of its files, the commit, and the name under which it answers."""
        url = f"{self._endpoint}/api/datasets/{quote(self.repo)}"
        url += f"/revision/{quote(self.revision, safe='')}" if self.revision else ""
        answer = self.patiently(url)
        if answer.status != 200:
            self.refused(answer)
        info = jsonfile.parse(answer.body, f"the Hub's information on {self.repo}", hint="try again")
        commit, name = info.get("sha"), info.get("id")
        if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40}", commit):
            raise SourceError(f"the Hub ({self.host()}) names no commit of {self.repo}", hint="check HF_ENDPOINT")
        renamed = isinstance(name, str) and _NAME.fullmatch(name) is not None
        return file_names(info), commit, str(name) if renamed else self.repo

    def _not_found_hint(self) -> str:
        login = "the login may lack access to a private one" if self._token else "a private one needs hf auth login"
        return f"check its spelling, org/name; {login}"


def find(asked: Asked) -> Part:
    """The part that is asked for, at a commit; without a connection what the Hub cache has of it.

    Raises:
        SourceError: it is not there, or not for this login; the Hub does not answer.
        UsageError: it has no such configuration or split; several, and none was named.

    """
    hub, where = _DatasetHub(asked.repo, asked.revision, False), "on the Hub"
    try:
        names, commit, repo = hub.listing()
    except Unreachable as down:
        names, commit = _cached(asked, str(down))
        repo, where = asked.repo, "in the Hub cache"
    head = _head(_fetched(repo, "README.md", commit)) if "README.md" in names else {}
    parts = parts_of(names, head)
    where = f"{repo} {where}"
    if not parts:
        seen = ", ".join(sorted({Path(name).suffix for name in names if Path(name).suffix})[:8])
        raise SourceError(f"{where} has no data in JSON, Parquet or text files (its files: {jsonfile.plain(seen) or 'none'})",
                          hint="make a file of some of its rows, and give that")  # fmt: skip
    config, split = choose(parts, _default(head, parts), asked.parts, where)
    licence = head.get("license")
    licence = ", ".join(map(str, licence)) if isinstance(licence, list) else licence
    return Part(repo, commit, config, split, tuple(parts[config][split]),
                jsonfile.plain(licence)[:80] if isinstance(licence, str) else None)  # fmt: skip


def fetch(part: Part) -> Iterator[tuple[Path, str]]:
    """Its files on this machine, one after another as they are asked for, until `MOST`; each with what it is called.

    Raises:
        SourceError: one cannot be had, or the first is larger than all that is downloaded.

    """
    left = MOST
    for number, name in enumerate(part.files):
        path = _here(part.repo, name, part.revision)
        if path is None:
            size = _size(part.repo, name, part.revision)
            left -= size
            if left < 0 and number:
                return
            if left < 0:
                raise SourceError(f"{jsonfile.plain(name)} of {part.repo} has {size / 1e9:.1f} GB, and {MOST / 1e9:g} GB are downloaded at most",
                                  hint="download it, and give some of its rows as a file")  # fmt: skip
            path = _fetched(part.repo, name, part.revision)
        yield path, f"{part.repo}/{jsonfile.plain(name)}"


# -- parts ----------------------------------------------------------------------------------


def parts_of(names: Sequence[str], head: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Files by configuration and split: as the card's head says, or else as the Hub tells splits by names of files.

    https://huggingface.co/docs/hub/datasets-manual-configuration, and .../datasets-file-names-and-splits
    """
    files = sorted(name for name in names if _FILES.search(name.lower()) and not _NO_DATA.search(name))
    said = head.get("configs")
    configs = [one for one in said if isinstance(one, dict)] if isinstance(said, list) else []
    if not any("data_files" in one or "data_dir" in one for one in configs):
        found = _by_name(files)
        return {_DEFAULT: found} if found else {}
    out: dict[str, dict[str, list[str]]] = {}
    for one in configs:
        folder = str(one.get("data_dir") or "").strip("./")
        inside = [name for name in files if not folder or name.startswith(f"{folder}/")]
        if "data_files" in one:
            under = {name.removeprefix(f"{folder}/") if folder else name: name for name in inside}
            splits = {split: [under[name] for name in under if any(_matches(pattern, name) for pattern in patterns)]
                      for split, patterns in _patterns(one["data_files"]).items()}  # fmt: skip
        else:
            splits = _by_name(inside)
        splits = {split: own for split, own in splits.items() if own}
        if splits:
            out[str(one.get("config_name", _DEFAULT))] = splits
    return out


def _patterns(said: Any) -> dict[str, list[str]]:
    """Patterns of files by split, of the forms that a card may have."""
    if isinstance(said, dict):
        return {str(split): _listed(paths) for split, paths in said.items()}
    rows = said if isinstance(said, list) else [said]
    out: dict[str, list[str]] = {}
    for row in rows:
        split = str(row.get("split", "train")) if isinstance(row, dict) else "train"
        out.setdefault(split, []).extend(_listed(row.get("path") if isinstance(row, dict) else row))
    return out


def _listed(paths: Any) -> list[str]:
    return [path for path in (paths if isinstance(paths, list) else [paths]) if isinstance(path, str)]


def _matches(pattern: str, name: str) -> bool:
    """Whether a name is of a pattern of fsspec: * stays within a folder, and ** does not."""
    words = re.split(r"(\*\*/|\*\*|\*|\?)", pattern.removeprefix("./"))
    rules = {"**/": r"(?:[^/]+/)*", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    return re.fullmatch("".join(rules.get(word) or re.escape(word) for word in words), name) is not None


def _by_name(files: Sequence[str]) -> dict[str, list[str]]:
    shards: dict[str, list[str]] = {}
    for name in files:
        if found := _SHARD.fullmatch(name):
            shards.setdefault(found["split"], []).append(name)
    if shards:
        return shards
    out: dict[str, list[str]] = {}
    for name in files:
        words = re.split(r"[-._ /0-9]+", name.lower())
        split = next((split for split, known in _SPLITS.items() if any(word in known for word in words)), None)
        if split is not None:
            out.setdefault(split, []).append(name)
    return out or ({"train": list(files)} if files else {})


def _default(head: Mapping[str, Any], parts: Mapping[str, Any]) -> str | None:
    """The configuration that is meant where none is named."""
    said = head.get("configs")
    marked = [str(one.get("config_name")) for one in (said if isinstance(said, list) else [])
              if isinstance(one, dict) and one.get("default") is True]  # fmt: skip
    return next((name for name in (*marked, _DEFAULT) if name in parts), next(iter(parts)) if len(parts) == 1 else None)


def choose(
    parts: Mapping[str, Mapping[str, Sequence[str]]], default: str | None, asked: Sequence[str], where: str
) -> tuple[str, str]:
    """The configuration and the split that words ask for; one word may be either."""
    config, split = default, None
    if len(asked) == 2:
        config, split = asked
    elif asked and asked[0] in parts:
        config = asked[0]
    elif asked:
        split = asked[0]
        if default is None or split not in parts[default]:
            splits = dict.fromkeys(one for own in parts.values() for one in own)
            raise UsageError(f"{where} has no configuration or split {jsonfile.plain(split)[:60]!r}",
                             hint=_offer("configurations", parts) + "; " + _offer("splits", splits))  # fmt: skip
    if config is None:
        raise UsageError(f"{where} has {len(parts)} configurations, and none is named", hint=_offer("they are", parts))
    if config not in parts:
        raise UsageError(f"{where} has no configuration {jsonfile.plain(config)[:60]!r}", hint=_offer("it has", parts))
    own = parts[config]
    if split is None:
        split = "train" if "train" in own else next(iter(own)) if len(own) == 1 else None
    if split is None:
        raise UsageError(f"{where} has {len(own)} splits, and none is named", hint=_offer("they are", own))
    if split not in own:
        raise UsageError(f"{where} has no split {jsonfile.plain(split)[:60]!r}", hint=_offer("it has", own))
    return config, split


def _offer(what: str, names: Mapping[str, Any]) -> str:
    shown = [jsonfile.plain(name)[:60] for name in list(names)[:12]]
    return f"{what}: " + ", ".join(shown) + (", …" if len(names) > 12 else "")


def _head(readme: Path) -> Mapping[str, Any]:
    """What the head of a card says, in YAML; nothing where it is damaged."""
    import yaml

    try:
        with readme.open(encoding="utf-8") as file:
            text = file.read(jsonfile.LIMIT)
        found = re.match(r"---\s*\n(.*?)\n---\s*(?:\n|$)", text, re.S)
        head = yaml.load(found[1], getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if found else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return head if isinstance(head, dict) else {}


# -- files ----------------------------------------------------------------------------------


def _cached(asked: Asked, reason: str) -> tuple[list[str], str]:
    """Files of the snapshot in the Hub cache, and its commit."""
    folder = cache.snapshot(asked.repo, asked.revision, "datasets")
    if folder is None and asked.revision is None:
        folder = max(cache.snapshots(asked.repo, "datasets"), key=lambda one: one.stat().st_mtime, default=None)
    if folder is None:
        raise SourceError(f"{asked.repo} is not in the Hub cache, and the Hub cannot be reached ({reason})",
                          hint="give a file, or leave --calib out: kvctl brings a text")  # fmt: skip
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()], folder.name


def _here(repo: str, name: str, commit: str) -> Path | None:
    found = cache.client().try_to_load_from_cache(repo, name, revision=commit, repo_type="dataset")
    return Path(found) if isinstance(found, str) else None


def _size(repo: str, name: str, commit: str) -> int:
    client = cache.client()
    try:
        return int(
            client.get_hf_file_metadata(client.hf_hub_url(repo, name, revision=commit, repo_type="dataset")).size or 0
        )
    except Exception as error:
        _say(repo, name, error)


def _fetched(repo: str, name: str, commit: str) -> Path:
    """A file of a repository, in the Hub cache."""
    from kvctl.measure.hush import quiet

    with quiet():
        try:
            return Path(cache.client().hf_hub_download(repo, name, revision=commit, repo_type="dataset"))
        except Exception as error:
            _say(repo, name, error)


def _say(repo: str, name: str, error: Exception) -> NoReturn:
    """What the client's errors mean; its own words are not shown, which may hold addresses that are signed."""
    errors, where = cache.client().errors, f"{jsonfile.plain(name)} of {repo}"
    if isinstance(error, KvctlError):
        raise error
    if isinstance(error, errors.GatedRepoError):
        raise SourceError(f"{repo} is gated, and its owner has not granted you access",
                          hint="ask for it on its page, then hf auth login (or set HF_TOKEN)") from None  # fmt: skip
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        raise SourceError(f"{where} is not in the Hub cache, and the Hub cannot be reached",
                          hint="try again with a connection, or give a file") from None  # fmt: skip
    if isinstance(error, errors.RepositoryNotFoundError):
        raise SourceError(f"{repo} is not on the Hub, or private", hint="hf auth login") from None
    if isinstance(error, errors.EntryNotFoundError):
        raise SourceError(f"{where} is not there", hint="see the files on its page") from None
    if isinstance(error, errors.HfHubHTTPError):
        raise SourceError(f"the Hub answers {error.response.status_code} for {where}", hint="try again later") from None
    reason = error.strerror if isinstance(error, OSError) and error.strerror else "the connection broke off"
    raise SourceError(f"{where} could not be fetched: {reason}", hint="try again") from None
