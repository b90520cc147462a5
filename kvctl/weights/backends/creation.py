"""Making a backend's environment: whole, or not at all."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvctl.errors import KvctlError
from kvctl.record import Record
from kvctl.sources import jsonfile
from kvctl.weights.backends import children
from kvctl.weights.backends.environments import MARKER, Plan, cannot_write, check_room, fault, locked, log_of, size_of
from kvctl.weights.backends.pipfaults import explain
from kvctl.weights.backends.table import Backend

_SILENCE_S = 1800.0


class Step(Record):
    """How far it is."""

    stage: str
    """ "environment", "build tools", "packages" or "trial"."""
    what: str
    """A package."""
    done: int
    of: int


Tell = Callable[[Step], None]


def create(what: Plan, tell: Tell = lambda step: None, silence: float = _SILENCE_S) -> Path:
    """Make an environment, where it is not there in good state; what was broken is made anew.

    Raises:
        UsageError: another process is at it.
        KvctlError: the network, the disk, a file with another hash, a package that does not build or does not import.

    """
    folder = what.folder
    if fault(folder) is not None:
        check_room(what)
    with locked(folder, shared=False):
        if fault(folder) is None:
            return folder
        log = log_of(what.backend.name)
        part = folder.parent / f".{folder.name}.part"
        try:
            # A process that was killed left it: the lock says that nobody is at it.
            shutil.rmtree(part, ignore_errors=True)
            _make(what, part, tell, log, silence)
            if folder.exists():
                shutil.rmtree(folder)
            part.rename(folder)
        except OSError as error:
            raise cannot_write(folder, error) from None
        finally:
            log.close()
            shutil.rmtree(part, ignore_errors=True)
        # Of what failed the log stays.
        log.path.unlink(missing_ok=True)
    return folder


def _make(what: Plan, part: Path, tell: Tell, log: children.Log, silence: float) -> None:
    name = what.backend.name
    tell(Step("environment", "", 0, 1))
    # Copies would break where Python finds its library beside itself; links say which Python it is.
    _run([what.python, "-I", "-m", "venv", "--symlinks", str(part)], None, part.parent, log, lambda line: None, silence,
         lambda: KvctlError(f"cannot make an environment for {name}: {log.last_line() or 'venv failed'}",
                            hint="Debian keeps venv apart: apt install python3-venv"))  # fmt: skip
    tell(Step("environment", "", 1, 1))
    sets = (("build tools", what.tools, ()), ("packages", what.requirements, ("--no-build-isolation",)))
    for stage, text, more in sets:
        if "==" not in text:
            continue
        path = part / f"{stage.replace(' ', '-')}.txt"
        path.write_text(text, encoding="utf-8")
        _install(name, stage, path, _count(text), more, part, tell, log, silence)
    tell(Step("trial", what.backend.module, 0, 1))
    facts = trial(what.backend, part, log)
    tell(Step("trial", what.backend.module, 1, 1))
    marker = {"backend": name, "module": what.backend.module, "version": what.backend.version,
              "python": what.python_version, "torch_build": "cpu" if what.cpu else "cuda", "bytes": size_of(part), **facts}  # fmt: skip
    # Last: what lacks it was not completed.
    (part / MARKER).write_text(json.dumps(marker) + "\n", encoding="utf-8")


def _count(text: str) -> int:
    return sum("==" in line.partition(";")[0] for line in text.splitlines())


def _install(name: str, stage: str, path: Path, count: int, more: tuple[str, ...], part: Path, tell: Tell,
             log: children.Log, silence: float) -> None:  # fmt: skip
    seen: set[str] = set()

    def heard(line: str) -> None:
        words = line.split()
        if len(words) > 1 and words[0] in ("Collecting", "Building", "Installing"):
            if words[0] == "Collecting":
                seen.add(words[1])
            tell(Step(stage, jsonfile.plain(words[1] if words[0] == "Collecting" else words[0].lower())[:60],
                      min(len(seen), count), count))  # fmt: skip

    command = [str(part / "bin" / "python"), "-I", "-m", "pip", "install", "--no-color", "--progress-bar", "off",
               "--no-warn-script-location", "--require-hashes", *more, "-r", str(path)]  # fmt: skip
    _run(command, part, part, log, heard, silence, lambda: explain(name, log))
    tell(Step(stage, "", count, count))


def trial(one: Backend, folder: Path, log: children.Log) -> dict[str, Any]:
    """Whether its library can be imported, and the versions of what is beside it.

    Raises:
        KvctlError: it cannot.

    """
    code = (f"import json, importlib, importlib.metadata as m\nimportlib.import_module({one.module!r})\n"
            "print(json.dumps({'versions': {d.metadata['Name'].lower(): d.version for d in m.distributions()}}))")  # fmt: skip
    lines: list[str] = []
    python = str(folder / "bin" / "python")
    _run([python, "-I", "-c", code], folder, folder, log, lines.append, 600.0,
         lambda: KvctlError(f"{one.name} cannot be imported: {log.last_line()}", hint=f"its log: {jsonfile.plain(str(log.path))}"))  # fmt: skip
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    raise KvctlError(f"{one.name} cannot be imported: it says nothing")


def _run(command: list[str], folder: Path | None, cwd: Path, log: children.Log, heard: Callable[[str], None],
         silence: float, failed: Callable[[], KvctlError]) -> None:  # fmt: skip
    def line(data: bytes) -> bool:
        log.write(data + b"\n")
        heard(data.decode("utf-8", "replace"))
        return True

    ended = children.run(command, env=children.environment(folder), folder=cwd, log=log, heard=line, silence=silence)
    if ended.code != 0:
        raise failed()
