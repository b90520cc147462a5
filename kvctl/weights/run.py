"""One `kvctl quantize`: plan, make, reload and judge each format, and put what was found beside the files."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvctl.engines import TRANSFORMERS
from kvctl.errors import KvctlError
from kvctl.record import Record
from kvctl.size import SizePlan, size
from kvctl.weights import calibration, from_gguf
from kvctl.weights.buys import Terms, bought, gpus
from kvctl.weights.fetch import check_source, files_of
from kvctl.weights.kv_run import KvAsk, cost
from kvctl.weights.making import Making, Settings, making
from kvctl.weights.report import CONTEXT, Gate, QuantizeReport, Row, ranked

if TYPE_CHECKING:
    from kvctl.measure.run import Now
    from kvctl.ranks import Hardware
    from kvctl.spec import ModelSpec
    from kvctl.weights.backends.environments import Plan
    from kvctl.weights.judge import Exam, Judged, Stage
    from kvctl.weights.ways import Way

__all__ = ["Ask", "KvAsk", "check_source", "files_of", "install", "missing", "of_cache", "plan", "quantize"]
_STORED = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
REPORT = "kvctl-quantize.json"


class Ask(Record):
    """What is asked for."""

    spec: ModelSpec
    source: Path
    """A folder of safetensors, or a GGUF file."""
    ways: tuple[Way, ...]
    settings: Settings
    exam: Exam
    gate: Gate = Gate()
    target: Path | None = None
    """Where one format is kept; None: formats are compared and thrown away."""
    resume: bool = False
    force: bool = False
    context: int = CONTEXT
    """Tokens at which bytes of caches are told, and what fits."""
    hardware: Hardware | None = None
    """What fits on it is told of every format."""
    notes: tuple[str, ...] = ()

    def check(self) -> None:
        """Refuses caches that cannot be measured.

        Raises:
            UsageError: one packs nothing of so short a text.

        """
        from kvctl.weights.kv_measure import check_packs

        check_packs({one.name: one for one in self.terms.techniques[1:]}, self.exam.length)

    @property
    def terms(self) -> Terms:
        """What is asked of every row alike."""
        from kvctl.techniques import PLAIN, parse

        others = tuple(map(parse, self.exam.caches))
        return Terms(self.spec, self.context, self.hardware, (PLAIN, *others) if others else (), self.gate)


def plan(ask: Ask) -> QuantizeReport:
    """What would be done; nothing is written.

    Raises:
        KvctlError: it cannot be done.

    """
    from kvctl.weights.checkpoint import check_target

    if ask.target is not None:
        check_target(ask.target, ask.source, ask.force)
    ask.check()
    from kvctl.measure.hush import quiet

    with quiet():
        rows = [_with(ask, _original(ask.source))]
        ask.settings.calibration.check()
        rows += [bought(ask.terms, making(way, ask.source, ask.settings).plan(), rows[0]) for way in ask.ways]
        return _report(ask, rows).replace(dry=True, process_bytes=_resident())


def missing(ways: Sequence[Way]) -> list[Plan]:
    """Environments that these formats need and that are not there: what making each takes.

    Raises:
        KvctlError: one cannot be made on this machine.

    """
    from kvctl.weights.backends import environments

    names = dict.fromkeys(way.backend for way in ways if way.backend)
    return [environments.plan(name) for name in names if environments.state(name).status != "installed"]


def install(plan: Plan, now: Now) -> None:
    """Make an environment.

    Raises:
        KvctlError: it cannot be made; nothing of it is left.

    """
    from kvctl.weights.backends.creation import create

    create(plan, lambda step: now.say(f"{plan.backend.name}: {step.stage} {step.what} {step.done} of {step.of}"))


def of_cache(ask: KvAsk, now: Now) -> QuantizeReport:
    """What formats of the cache cost; see `kv_run.cost`."""
    from kvctl.measure.hush import quiet

    with quiet():
        part = cost(ask, now)
    plain = Ask(ask.spec, ask.source, (), ask.settings, ask.exam, ask.gate, ask.target, context=ask.context,
                hardware=ask.hardware)  # fmt: skip
    said = from_gguf.note(ask.source) if from_gguf.is_gguf(ask.source) else None
    return _report(plain, [], part.samples).replace(kv=part, notes=(*ask.notes, *((said,) if said else ())))


def quantize(ask: Ask, now: Now) -> QuantizeReport:
    """Make every format, reload each in a fresh process, and measure it against the original on the same tokens.

    On Ctrl-C what is complete is in the report, which says so.

    Raises:
        KvctlError: one format is asked for, and cannot be made or does not stand up to the checks.

    """
    from kvctl.measure.hush import quiet

    with quiet():
        return _Run(ask, now).run()


class _Run:
    def __init__(self, ask: Ask, now: Now) -> None:
        self.ask, self.now = ask, now
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.stack = ExitStack()
        self.samples: calibration.Samples | None = None
        """What formats are searched on: all on the same."""

    def run(self) -> QuantizeReport:
        from kvctl.weights.checkpoint import check_resumable, check_target, work_folder

        ask, interrupted = self.ask, False
        ask.check()
        if ask.target is not None:
            check_target(ask.target, ask.source, ask.force)
            if ask.resume:
                check_resumable(ask.target)
        with self.stack:
            place = ask.target.parent if ask.target is not None else Path(tempfile.gettempdir())
            _sweep(place)
            self.reference = Path(self.stack.enter_context(_folder(place, "reference")))
            self.source = self._folder_of_source()
            self.rows = [_with(ask, _original(self.source))]
            if len(ask.ways) == 1:
                making(ask.ways[0], self.source, ask.settings).plan()  # headers tell at once what cannot be
            if any(way.looks for way in ask.ways):
                self.now.say("reading the calibration data")
                own = ask.settings
                self.samples = calibration.draw(self.source, own.calibration, own.samples, own.length, own.seed)
            try:
                self._refer()
                for way in ask.ways:
                    target = ask.target or Path(self.stack.enter_context(_folder(place, way.name))) / way.name
                    self.rows.append(self._row(way, target))
                    if ask.target is None:
                        shutil.rmtree(target, ignore_errors=True)
            except KeyboardInterrupt:
                interrupted = True
                if ask.target is not None and (work_folder(ask.target) / "journal.json").is_file():
                    self.notes.append(f"--resume goes on with what is in {work_folder(ask.target)}")
        if self.source != ask.source and not interrupted:
            shutil.rmtree(self.source, ignore_errors=True)
        return _report(ask, list(ranked(self.rows)), self.samples).replace(
            notes=(*ask.notes, *self.notes), interrupted=interrupted
        )

    def _folder_of_source(self) -> Path:
        """The source as a folder of safetensors: a GGUF file is dequantized beside the target, once for runs that go on."""
        ask = self.ask
        if not from_gguf.is_gguf(ask.source):
            return ask.source
        if ask.target is None:
            folder = Path(self.stack.enter_context(_folder(Path(tempfile.gettempdir()), "source"))) / ask.source.stem
        else:
            folder = ask.target.with_name(f".{ask.target.name}.kvctl-source")
        said = from_gguf.note(ask.source)
        self.notes += [said] if said else []
        if not (ask.resume and folder.is_dir()):
            self.now.say("dequantizing the GGUF file")
            part = folder.with_name(f"{folder.name}-part")
            for old in (part, folder):
                shutil.rmtree(old, ignore_errors=True)
            from_gguf.convert(ask.source, part, ask.settings.dtype or "bfloat16")
            part.rename(folder)
        return folder

    def _row(self, way: Way, target: Path) -> Row:
        """One format; among several, what cannot be made says why, and the others stay."""
        row = Row(way.name, way.title, "", None, self.rows[0].parameters, None)
        try:
            one = making(way, self.source, self.ask.settings, self.samples)
            row = bought(self.ask.terms, one.plan(), self.rows[0])
            return self._one(one, row, target)
        except KvctlError as error:
            if len(self.ask.ways) == 1:
                raise
            return row.replace(error=error.message)

    def _one(self, one: Making, row: Row, target: Path) -> Row:
        """Make it, judge it while it has no name yet, and give it one."""
        from kvctl.measure.memory import HighWater, give_back

        give_back()
        start, mark, before = perf_counter(), HighWater(), _resident()
        found: dict[str, Any] = {}

        def tell(stage: str, done: int, of: int) -> None:
            self.now.say(f"{row.name}: {stage}" + (f" {done} of {of}" if of > 1 else ""))

        def finish(folder: Path, more: Mapping[str, Any]) -> Mapping[str, str]:
            peak = mark.read()
            found["seconds"] = perf_counter() - start
            # After another format its memory is there already, and says nothing of this one.
            alone = len(self.ask.ways) == 1
            found["peak_bytes"] = max(peak - before, 0) if peak is not None and alone else None
            self.now.say(f"{row.name}: holding its files against the format's rules")
            found["checked"] = (one.check(folder),)
            found["judged"] = self._judge(folder, row.name)
            # Where several caches are asked about, each of these is held against the bounds.
            found["broken"] = () if self.ask.exam.caches else tuple(self.ask.gate.broken(found["judged"].quality))
            found["tensor_bytes"] = tensor_bytes(folder)
            found.update(more, made_with=_made_with(one.way), folder=self.ask.target)
            if self.ask.target is None:
                return {}
            rows = ranked([self.rows[0], bought(self.ask.terms, row.replace(**found), self.rows[0])])
            report = _report(self.ask, rows, self.samples).replace(notes=(*self.ask.notes, *self.notes))
            from kvctl.weights.card import CARD, card, licence_of

            return {REPORT: json.dumps(report.to_dict(), indent=2) + "\n", CARD: card(report, licence_of(self.source))}

        one.make(
            target, resume=self.ask.resume, force=self.ask.force or self.ask.target is None, finish=finish, tell=tell
        )
        return bought(self.ask.terms, row.replace(**found), self.rows[0])

    def _refer(self) -> None:
        """Run the original: what is wrong with the text or the tokenizer shows before anything is made."""
        from kvctl.weights.judge import refer

        self.now.say("original: running it in a process of its own")
        judged = refer(self.source, self.ask.exam, self.reference, progress=self._stage("original"))
        self.rows[0] = _with(self.ask, self.rows[0].replace(judged=judged))

    def _judge(self, folder: Path, name: str) -> Judged:
        from kvctl.weights.judge import judge

        self.now.say(f"{name}: reloading it in a process of its own")
        return judge(folder, self.ask.exam, self.reference, name=name, progress=self._stage(name))

    def _stage(self, name: str) -> Any:
        def told(stage: Stage) -> None:
            self.now.say(f"{name}: {stage.stage} {stage.done:,} of {stage.of:,}")

        return told


def _with(ask: Ask, original: Row) -> Row:
    """The model as it is, with caches and GPUs that are asked about; it frees nothing."""
    return bought(ask.terms, original, original).replace(freed_bytes=None, freed_tokens=None)


_MARK = ".kvctl-quantize-"


def _folder(place: Path, name: str) -> Any:
    prefix = f"{_MARK}{name}-{os.getpid()}-"
    try:
        return tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True)
    except OSError as error:
        raise KvctlError(f"cannot write in {place}: {error.strerror}") from None


def _sweep(place: Path) -> None:
    """Remove folders of runs that were killed."""
    for path in place.glob(f"{_MARK}*"):
        parts = path.name.removeprefix(_MARK).rsplit("-", 2)
        if (
            len(parts) == 3
            and parts[1].isdigit()
            and not Path(f"/proc/{parts[1]}").exists()
            and Path("/proc/self").exists()
        ):
            shutil.rmtree(path, ignore_errors=True)


def _resident() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def _original(source: Path) -> Row:
    """The model as it is; of a GGUF file as it will be dequantized."""
    from kvctl.weights import checkpoint

    if from_gguf.is_gguf(source):
        count = from_gguf.elements(source)
        return Row("original", "dequantized", "bfloat16", None, count, 2 * count)
    files, _ = checkpoint.open_source(source)
    sizes: dict[str, int] = {}
    for name, size_ in files.sizes.items():
        sizes[files.dtypes[name]] = sizes.get(files.dtypes[name], 0) + size_
    held, count = sum(sizes.values()), sum(math.prod(shape) for shape in files.shapes.values())
    dtype = _STORED.get(most := max(sizes, key=lambda one: sizes[one]), most.lower())
    return Row("original", "as it is", dtype, None, count, held, tensor_bytes=held)


def tensor_bytes(folder: Path) -> int:
    """Of all tensors in a folder's safetensors files."""
    from kvctl.sources import safetensors

    return sum(length for path in sorted(folder.glob("*.safetensors")) for *_, length in safetensors.read_header(path))


def _made_with(way: Way) -> str:
    from importlib import metadata

    from kvctl import __version__

    if way.backend:
        from kvctl.weights.backends.table import backend

        one = backend(way.backend)
        return f"{one.name} {one.version}, kvctl {__version__}"
    if not way.by:
        return f"kvctl {__version__}"
    return f"{way.by} {metadata.version(way.by)}, kvctl {__version__}"


def _report(ask: Ask, rows: Sequence[Row], samples: calibration.Samples | None = None) -> QuantizeReport:
    from kvctl.measure.environment import environment

    own = {name: getattr(ask.settings, name) for name in Settings._fields}
    own["calibration"] = None if samples is None else dict(samples.facts)
    settings = own | {
        "skip": list(ask.settings.skip),
        "exam": ask.exam.to_dict(),
        "max_ppl_increase_percent": ask.gate.most_change,
        "min_top1_percent": ask.gate.least_top1,
    }
    info = size(ask.spec, 1, SizePlan(TRANSFORMERS)).model
    limit = info.max_context
    beyond = limit is not None and ask.context > limit and (ask.hardware is not None or bool(ask.exam.caches))
    warnings = (f"{ask.context:,} tokens is beyond the model's own maximum of {limit:,}",) if beyond else ()
    return QuantizeReport(
        info,
        settings,
        environment("cpu"),
        tuple(rows),
        ask.context,
        gpus(ask.hardware),
        notes=ask.notes,
        warnings=warnings,
    )
