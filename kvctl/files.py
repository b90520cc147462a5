"""Writing files whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvctl.errors import KvctlError

_ELSEWHERE = "name a file in a folder that is there and can be written to"


def write_whole(path: str, data: bytes) -> None:
    """Write a file; one that was there stays until the new one is complete.

    Raises:
        KvctlError: it cannot be written; then nothing is left behind.

    """
    try:
        target = _target(path)
        old = target.stat() if target.exists() else None
        # Containers give every run the same process id, so what one that was killed left must not stop the next.
        part = target.with_name(f".kvctl-{os.getpid()}-{os.urandom(4).hex()}.part")
        with open(part, "xb") as file:
            try:
                if old is not None:
                    part.chmod(old.st_mode & 0o7777)  # a private file stays private
                file.write(data)
                file.close()
                os.replace(part, target)
            finally:
                part.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise _cannot(path, error) from None


def write_json(path: str, value: Any) -> None:
    """Write a document of JSON in the same way.

    Raises:
        KvctlError: it cannot be written; then nothing is left behind.

    """
    write_whole(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def check_writable(path: str) -> None:
    """Refuse at once what `write_whole` would refuse after hours of work; writes nothing.

    Raises:
        KvctlError: the file, or its folder, is not there to be written.

    """
    try:
        folder = _target(path).parent
        if not folder.is_dir():
            raise KvctlError(f"cannot write {path[:200]}: there is no folder {str(folder)[:200]}", hint=_ELSEWHERE)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise KvctlError(f"cannot write {path[:200]}: its folder is read-only", hint=_ELSEWHERE)
    except (OSError, ValueError) as error:
        raise _cannot(path, error) from None


def cache_folder() -> Path:
    """kvctl's own: KVCTL_CACHE, or in the user's cache folder. It need not be there."""
    own = os.getenv("KVCTL_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    home = os.getenv("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home).expanduser().absolute() / "kvctl"


def _target(path: str) -> Path:
    """Where the bytes go: through a link, the file it points to is replaced and the link stays."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise KvctlError(f"cannot write {path[:200]}: its links lead in a circle", hint=_ELSEWHERE)
    if target.exists() and not (target.is_file() and os.access(target, os.W_OK)):
        raise KvctlError(
            f"cannot write {path[:200]}: it is {'read-only' if target.is_file() else 'no plain file'}", hint=_ELSEWHERE
        )
    return target


def _cannot(path: str, error: OSError | ValueError) -> KvctlError:
    return KvctlError(f"cannot write {path[:200]}: {getattr(error, 'strerror', None) or error}", hint=_ELSEWHERE)
