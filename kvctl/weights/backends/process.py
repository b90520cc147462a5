"""One request to a worker in a backend's environment, and what it answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvctl.errors import KvctlError
from kvctl.record import Record
from kvctl.sources import jsonfile
from kvctl.weights.backends import children
from kvctl.weights.backends.children import Log

PROTOCOL = 1
SILENCE_S = 3600.0
"""A layer of a large model on a CPU takes minutes, and loading it as well."""
_MOST_JUNK = 10_000
_MOST_SAID = 1_000_000
"""Messages: of a model with a thousand layers that is a thousand for each."""
_BETWEEN_S = 0.05
"""Progress is passed on no faster, save for the last of a stage."""
WORKERS = Path(__file__).with_name("workers")


class Progress(Record):
    """How far a backend is."""

    stage: str
    done: int
    of: int


class Answer(Record):
    """What a worker said."""

    versions: Mapping[str, str]
    facts: Mapping[str, Any]
    """Of its "done"."""


class _Talk:
    """The messages of one run, checked one by one."""

    def __init__(self, name: str, tell: Callable[[Progress], None]) -> None:
        self.name, self._tell = name, tell
        self.versions: dict[str, str] = {}
        self.done: dict[str, Any] | None = None
        self.error: str | None = None
        self.junk: list[bytes] = []
        self._said = self._junk = 0
        self._last = 0.0
        self._stage = ""

    def heard(self, line: bytes) -> bool:
        self._said += 1
        if self._said > _MOST_SAID:
            raise KvctlError(f"{self.name}'s worker sends messages without end")
        try:
            kind, what = self._read(line)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._odd(line)
            return False
        if kind == "progress":
            self._progress(what)
        elif kind == "hello":
            if what["protocol"] != PROTOCOL:
                raise KvctlError(f"{self.name}'s worker speaks protocol {what['protocol']}, not {PROTOCOL}")
            self.versions = what["versions"]
        elif kind == "error":
            self.error = what["message"]
        else:
            self.done = what
        return True

    @staticmethod
    def _read(line: bytes) -> tuple[str, Any]:
        """A message, with what it has to have; ValueError and the like for anything else."""
        ((kind, what),) = json.loads(line).items()
        if kind == "progress":
            step = Progress(jsonfile.plain(str(what["stage"]))[:40], int(what["done"]), int(what["of"]))
            if not 0 <= step.done <= step.of:
                raise ValueError
            return kind, step
        if kind == "hello":
            versions = {str(key)[:80]: jsonfile.plain(str(value))[:80] for key, value in what["versions"].items()}
            return kind, {"protocol": int(what["protocol"]), "versions": versions}
        if kind == "error":
            return kind, {"message": jsonfile.plain(str(what["message"]))[:300]}
        if kind == "done":
            return kind, dict(what)
        raise ValueError

    def _odd(self, line: bytes) -> None:
        """Something that is no message: a library that found the way out. Some of it is let pass."""
        if line.strip():
            self._junk += 1
            self.junk.append(line[:1000])
        if self._junk > _MOST_JUNK:
            raise KvctlError(f"{self.name}'s worker prints where its messages should be, without end")

    def _progress(self, step: Progress) -> None:
        now = time.monotonic()
        if step.stage != self._stage or step.done == step.of or now - self._last >= _BETWEEN_S:
            self._last, self._stage = now, step.stage
            self._tell(step)


def ask(
    name: str,
    folder: Path,
    script: Path,
    request: Mapping[str, Any],
    *,
    work: Path,
    log: Log,
    tell: Callable[[Progress], None] = lambda step: None,
    silence: float = SILENCE_S,
) -> Answer:
    """Send a request to backend `name`'s worker in its environment `folder`; it runs in folder `work`.

    Raises:
        KvctlError: it failed, died, fell silent, or talks nonsense; the log is kept, and the hint names it.

    """
    talk = _Talk(name, tell)
    kept = f"its log: {jsonfile.plain(str(log.path))}"
    argv = [str(folder / "bin" / "python"), "-I", str(WORKERS / "main.py"), str(script)]
    # Nothing is fetched: a model's folder has all that is needed.
    env = children.environment(folder, HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1",
                               TOKENIZERS_PARALLELISM="false", HF_HUB_DISABLE_TELEMETRY="1")  # fmt: skip
    given = json.dumps({"protocol": PROTOCOL, **request}).encode() + b"\n"
    try:
        ended = children.run(argv, env=env, folder=work, log=log, heard=talk.heard, given=given, silence=silence)
    except children.SilenceError as error:
        raise KvctlError(f"{name}: {error.message}, and it was ended",
                         hint=kept) from None  # fmt: skip
    except KvctlError as error:
        raise KvctlError(error.message, hint=error.hint or kept) from None
    finally:
        for line in talk.junk:
            log.write(b"[standard output] " + line + b"\n")
        log.close()
    if talk.error is not None:
        raise KvctlError(f"{name} failed: {talk.error}", hint=kept)
    if ended.code != 0 or talk.done is None:
        said = log.last_line()
        raise KvctlError(f"{name}'s worker {ended.how}" + (f": {said}" if said else ""), hint=kept)
    return Answer(talk.versions, talk.done)
