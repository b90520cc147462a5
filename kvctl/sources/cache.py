"""Snapshots in the user's Hub cache.

Every name passes here, and most were never downloaded: the folder is computed as the Hub
client does, and nothing is imported before it is there.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

from kvctl.errors import UsageError
from kvctl.sources import Found

_CONFIG = "config.json"


def client() -> ModuleType:
    """The Hub's client library."""
    import huggingface_hub

    try:
        import huggingface_hub.constants  # reads the environment
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ValueError:
        raise UsageError(
            "a setting of the Hub client in the environment is malformed",
            hint="HF_ENDPOINT is an address; HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT are whole seconds",
        ) from None
    return huggingface_hub


def hub_cache() -> str:
    """The folder of the user's Hub cache."""
    home = os.getenv("XDG_CACHE_HOME", os.path.join(os.path.expanduser("~"), ".cache"))
    home = _expand(os.getenv("HF_HOME", os.path.join(home, "huggingface")))
    return _expand(os.getenv("HF_HUB_CACHE", os.getenv("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub"))))


def find(repo: str, revision: str | None = None) -> Found | None:
    """The cached snapshot of a repository at a revision (None: what main was when it was fetched)."""
    if not os.path.isdir(_folder(repo)):
        return None
    try:
        path = client().try_to_load_from_cache(repo, _CONFIG, cache_dir=hub_cache(), revision=revision)
    except (OSError, ValueError):
        # Unreadable, or no name that the Hub could know: not in the cache.
        return None
    return _snapshot(repo, Path(path).parent) if isinstance(path, str) else None


def snapshot(repo: str, revision: str | None = None, kind: str = "models") -> Path | None:
    """The folder with what is cached of a repository (of models, or datasets) at a branch, a tag or a commit."""
    folder = Path(_folder(repo, kind))
    revision = revision or "main"
    try:
        ref = folder / "refs" / revision
        found = folder / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision)
        return found if found.is_dir() and found.parent == folder / "snapshots" else None
    except (OSError, ValueError):
        return None


def newest(repo: str) -> Found | None:
    """The snapshot that was cached last, whatever its revision."""
    commits = [path for path in snapshots(repo) if (path / _CONFIG).is_file()]
    return _snapshot(repo, max(commits, key=lambda path: path.stat().st_mtime)) if commits else None


def keep(repo: str, revision: str, commit: str, config: bytes) -> None:
    """Put a config.json where the client looks for it, so that the model is there when the Hub is not.

    A file in the snapshot itself is the client's layout where it has no symbolic links.
    A cache that cannot be written is no reason to fail.
    """
    import contextlib
    import re

    # Both become names of files.
    if not re.fullmatch(r"[0-9a-f]{40}", commit) or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", revision):
        return
    folder = Path(_folder(repo))
    with contextlib.suppress(OSError):
        path = folder / "snapshots" / commit / _CONFIG
        if not path.exists():
            _write(path, config)
        if revision != commit:
            _write(folder / "refs" / revision, commit.encode())


def _snapshot(repo: str, folder: Path) -> Found:
    from kvctl.sources import catalogue, jsonfile, local
    from kvctl.spec import Provenance

    where = jsonfile.plain(str(folder))
    found = local.read_folder(folder, where).replace(id=repo, provenance=Provenance("cache", where, folder.name))
    if found.weights or found.notes:
        return found
    # Often only the configuration was fetched.
    weights = catalogue.find(repo).weights if repo in catalogue.names() else None
    unknown = "weights unknown: no safetensors in the cached snapshot; --source hub asks the Hub"
    return found.replace(weights=weights, notes=() if weights else (unknown,))


def snapshots(repo: str, kind: str = "models") -> list[Path]:
    """Folders of all commits of which something is cached."""
    try:
        return list(Path(_folder(repo, kind), "snapshots").iterdir())
    except (OSError, ValueError):
        return []


def _folder(repo: str, kind: str = "models") -> str:
    return os.path.join(hub_cache(), f"{kind}--" + repo.replace("/", "--"))


def _expand(path: str) -> str:
    return os.path.expandvars(os.path.expanduser(path))


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.incomplete")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
