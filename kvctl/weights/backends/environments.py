"""Environments of backends: a folder each in the user's cache, there whole or not at all.

NAME-HASH-pyX.Y: the hash is of what pip is given, so another set is another folder. One is made beside its place and
renamed when its backend could be imported; what makes it holds a lock, and so does whoever uses it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.files import cache_folder
from kvctl.record import Record
from kvctl.sources import jsonfile
from kvctl.units import format_bytes
from kvctl.weights.backends import children
from kvctl.weights.backends.table import Backend, Size, backend, fingerprint, requirements, shipped

MARKER = "kvctl-backend.json"
_SPARE = 200 * 10**6
"""Bytes of disk beyond what an environment takes while it is made."""
_KEPT_LOGS = 8


class State(Record):
    """What is there of a backend."""

    backend: Backend
    status: str
    """ "installed", "not installed", "broken", or "cannot": not on this machine."""
    folder: Path | None
    version: str
    python: str
    build: str
    """Of torch: cpu or cuda; empty where nothing is installed."""
    size: int
    """Bytes on the disk; where nothing is installed, what it would take."""
    download_bytes: int
    why: str
    """What is wrong with it."""

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.backend.name, "status": self.status, "version": self.version, "python": self.python,
                "torch_build": self.build, "folder": None if self.folder is None else str(self.folder), "bytes": self.size,
                "download_bytes": self.download_bytes, "why": self.why,
                "formats": [one.name for one in self.backend.formats]}  # fmt: skip


class Plan(Record):
    """What would be made."""

    backend: Backend
    folder: Path
    python: str
    """The interpreter that it is made with."""
    python_version: str
    cpu: bool
    tools: str
    """What pip is given first: packages that come as source are built with these."""
    requirements: str
    packages: int
    size: Size
    free_bytes: int
    notes: tuple[str, ...]


def root() -> Path:
    """Where environments are: kvctl's own cache folder, or the user's."""
    return cache_folder() / "backends"


def has_cuda() -> bool:
    """Whether an NVIDIA driver is loaded."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def here() -> str:
    """This machine, as the table names platforms."""
    machine = {"AMD64": "x86_64", "arm64": "aarch64" if sys.platform == "linux" else "arm64"}
    return f"{sys.platform}-{machine.get(platform.machine(), platform.machine())}"


def interpreter(one: Backend) -> tuple[str, str]:
    """A Python that a backend's set is for, and its version: kvctl's own, else the newest that is found.

    Raises:
        ConfigError: there is none.

    """
    first, last = one.pythons
    if sys.version_info[0] == 3 and first <= sys.version_info[1] <= last and sys.executable:
        return sys.executable, f"3.{sys.version_info[1]}"
    for minor in range(last, first - 1, -1):
        path = shutil.which(f"python3.{minor}")
        if path and _runs(path, "import sys, venv; print(sys.version_info[1])") == str(minor):
            return path, f"3.{minor}"
    raise ConfigError(f"{one.name} needs Python 3.{first} to 3.{last}; none is found (kvctl runs in {platform.python_version()})",
                      hint=f"install one as python3.{last}")  # fmt: skip


def _runs(python: str, code: str) -> str | None:
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False,
                              env=children.environment(), stdin=subprocess.DEVNULL)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def plan(name: str, build: str = "auto") -> Plan:
    """What making a backend's environment takes; makes nothing.

    `build` is torch's: "cpu", "cuda" (what registries offer; the same on macOS), or "auto": cpu where no NVIDIA driver is
    loaded and pip finds one.

    Raises:
        UsageError: there is no such backend, or build.
        ConfigError: it is not for this machine; no compiler, or too little disk.

    """
    one = backend(name)
    if build not in ("auto", "cpu", "cuda"):
        raise UsageError(f"torch has no build {build[:20]!r}", hint="auto, cpu or cuda")
    if here() not in one.platforms:
        raise ConfigError(f"{one.name} has no packages for {here()}", hint=f"it is for {', '.join(one.platforms)}")
    if one.needs_compiler and not any(shutil.which(name) for name in (os.getenv("CC") or "cc", "gcc", "clang")):
        raise ConfigError(f"{one.name} is built in part from C source, and no C compiler is found",
                          hint="install one (Debian: apt install gcc)")  # fmt: skip
    python, version = interpreter(one)
    notes, cpu = [], build == "cpu"
    there = state(one.name)
    if sys.platform == "darwin":
        cpu = False
    elif build == "auto" and there.folder is not None:
        cpu = there.build == "cpu"  # what was chosen once, also where it has to be made anew
    elif build == "auto" and not has_cuda():
        cpu = _finds_cpu_build(python)
        if not cpu:
            notes.append("pip finds no CPU build of torch: the build for CUDA is taken, which runs without a GPU too; "
                         "PIP_EXTRA_INDEX_URL can name PyTorch's own index of CPU builds")  # fmt: skip
    text = requirements(one.name, cpu)
    folder = root() / f"{one.name}-{fingerprint(text, shipped('build'))}-py{version}"
    size = one.cpu if cpu or sys.platform == "darwin" else one.cuda
    free = shutil.disk_usage(_existing(folder)).free
    return Plan(one, folder, python, version, cpu, shipped("build"), text, one.count(cpu), size, free, tuple(notes))


def check_room(what: Plan) -> None:
    """Refuses a disk that is too small for it.

    Raises:
        ConfigError: it is.

    """
    needed = what.size.installed_bytes + what.size.download_bytes + _SPARE
    if what.free_bytes < needed:
        raise ConfigError(f"{what.backend.name} needs {format_bytes(needed)} of disk while it is installed, "
                          f"and {jsonfile.plain(str(root()))} has {format_bytes(what.free_bytes)}",
                          hint="KVCTL_CACHE names another folder")  # fmt: skip


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _finds_cpu_build(python: str) -> bool:
    """Whether pip, as the user has set it up, finds torch's CPU build."""
    if _runs(python, "import pip") is None:
        return False
    read, write = os.pipe()
    try:
        os.write(write, shipped("torch-cpu").encode())
        os.close(write)
        command = [python, "-I", "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed",
                   "--retries", "1", "--require-hashes", "-r", "/dev/stdin"]  # fmt: skip
        done = subprocess.run(
            command, stdin=read, capture_output=True, timeout=300, check=False, env=children.environment()
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        os.close(read)
    return done.returncode == 0


def _folders(one: Backend, python: str) -> dict[Path, bool]:
    """Where its environments would be: with torch's CPU build or not."""
    return {root() / f"{one.name}-{fingerprint(requirements(one.name, cpu), shipped('build'))}-py{python}": cpu
            for cpu in (has_cuda() is False, has_cuda())}  # fmt: skip


def state(name: str) -> State:
    """What is there of a backend: read from the disk, nothing is run but an interpreter that has to be found."""
    one = backend(name)
    size = one.cuda if has_cuda() else one.cpu
    nothing = State(one, "not installed", None, one.version, "", "", size.installed_bytes, size.download_bytes, "")
    if here() not in one.platforms:
        return nothing.replace(status="cannot", why=f"it has no packages for {here()}")
    try:
        _, python = interpreter(one)
    except ConfigError as error:
        return nothing.replace(status="cannot", why=error.message)
    broken = nothing
    for folder, cpu in _folders(one, python).items():
        if not folder.is_dir():
            continue
        found = nothing.replace(folder=folder, python=python, build="cpu" if cpu else "cuda")
        why = fault(folder)
        if why is None:
            marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
            return found.replace(status="installed", version=marker["version"], size=marker["bytes"], download_bytes=0)
        broken = found.replace(status="broken", why=why)
    return broken


def states() -> tuple[State, ...]:
    """Of all backends."""
    from kvctl.weights.backends.table import BACKENDS

    return tuple(state(one.name) for one in BACKENDS)


def fault(folder: Path) -> str | None:
    """What is wrong with an environment; None: nothing that shows."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        module, version, size = marker["module"], marker["version"], marker["bytes"]
    except (OSError, ValueError, KeyError, TypeError):
        return "it was not completed"
    if not (isinstance(module, str) and isinstance(version, str) and isinstance(size, int)):
        return "it was not completed"
    python = folder / "bin" / "python"
    if not python.exists():
        return "its Python is gone" + (f" ({os.readlink(python)})" if python.is_symlink() else "")
    packages = list(folder.glob("lib/python3*/site-packages"))
    if not any((place / module).is_dir() or (place / f"{module}.py").is_file() for place in packages):
        return f"{module} is gone from it"
    return None


@contextlib.contextmanager
def used(folder: Path) -> Iterator[None]:
    """While it is used nobody takes it away.

    Raises:
        UsageError: it is being made.

    """
    with locked(folder, shared=True):
        yield


@contextlib.contextmanager
def locked(folder: Path, shared: bool) -> Iterator[None]:
    import fcntl

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = (folder.parent / f".{folder.name}.lock").open("a")
    except OSError as error:
        raise cannot_write(folder.parent, error) from None
    with file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            doing = "making" if shared else "making or using"
            raise UsageError(f"another process is {doing} the environment {folder.name}", hint="wait for it") from None
        yield


def cannot_write(path: Path, error: OSError) -> KvctlError:
    return KvctlError(f"cannot write {jsonfile.plain(str(path))[:200]}: {error.strerror or error}",
                      hint="KVCTL_CACHE names another folder")  # fmt: skip


def log_of(name: str) -> children.Log:
    """A new log file; the oldest ones of the backend go."""
    folder = root() / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        old = sorted(folder.glob(f"{name}-*.log"), key=lambda path: path.stat().st_mtime)
        for path in old[: -_KEPT_LOGS + 1]:
            path.unlink(missing_ok=True)
        return children.Log(folder / f"{name}-{int(time.time())}-{os.getpid()}.log")
    except OSError as error:
        raise cannot_write(folder, error) from None


def remove(name: str) -> int:
    """Remove all environments of a backend; bytes that became free.

    Raises:
        UsageError: one is in use.

    """
    one, freed = backend(name), 0
    for folder in sorted(root().glob(f"{one.name}-*-py3.*")):
        with locked(folder, shared=False):
            freed += size_of(folder)
            shutil.rmtree(folder, ignore_errors=True)
    return freed


def size_of(folder: Path) -> int:
    """Bytes on the disk, each file once."""
    seen, total = set(), 0
    for base, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(os.path.join(base, name))
            if status.st_ino not in seen:
                seen.add(status.st_ino)
                total += status.st_blocks * 512
    return total
