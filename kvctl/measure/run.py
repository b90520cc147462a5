"""One `kvctl profile` of a model in this process: load, measure, report."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl import signals, texts
from kvctl.engines import TRANSFORMERS
from kvctl.errors import KvctlError, SourceError
from kvctl.measure.idle import NOTICEABLE, Others
from kvctl.measure.report import Point, ProfileReport, Try
from kvctl.record import Record
from kvctl.size import SizePlan, prepare, size
from kvctl.units import plural

if TYPE_CHECKING:
    from kvctl.formats import DType
    from kvctl.measure.assessed import AssessAsked
    from kvctl.measure.generation import Reading
    from kvctl.measure.loaded import Loaded, Wanted
    from kvctl.measure.points import Asked
    from kvctl.measure.rates import Rates
    from kvctl.measure.shared import SharingAsked
    from kvctl.spec import ModelSpec
    from kvctl.techniques import Technique

INSTALL = "pip install 'kvctl[measure]'"
_RATE_BUDGET_S = 0.3
"""For each rate of the hardware; their noise is below what shares are read with."""


class ProfilePlan(Record):
    """What to run. Everything in it can be sent to another process."""

    spec: ModelSpec
    wanted: Wanted
    asked: Asked
    prompt: str | None = None
    """A text file whose tokens fill the prompt; None for the text that kvctl ships."""
    limits: bool = True
    """Whether the hardware's rates are measured too."""


class Now:
    """What is happening, for whoever shows it: plain attributes, read from another thread."""

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self.doing = ""
        self.step = 0
        self.steps = 0
        self.last: Point | None = None
        self._tell = tell

    def say(self, text: str) -> None:
        """What goes on now; the end, where that was asked for and a library swallowed it."""
        self.doing, self.step, self.steps = text, 0, 0
        signals.check()

    def stage(self, text: str) -> None:
        """Something begins that may take long: worth a line of its own where nothing else moves."""
        self.say(text)
        self._tell(text)


class Progress(Record):
    """How a run tells what it does: `now` is changed in place, `done` gets each point as it is complete, `tried` each try
    of --until-oom."""

    now: Now
    done: Callable[[Point], None]
    tried: Callable[[Try], None] = lambda _: None


def need_torch() -> None:
    """Refuses to go on without the packages that run models.

    Raises:
        KvctlError: torch, transformers or accelerate is not installed.

    """
    missing = [name for name in ("torch", "transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise KvctlError(f"running a model takes torch, transformers and accelerate; not installed: {', '.join(missing)}",
                         hint=f"{INSTALL} (for a machine without a GPU, install torch's CPU build first)")  # fmt: skip


class Ready(Record):
    """A model that can be run, and what it is run with."""

    loaded: Loaded
    dtype: DType
    tokens: Callable[[int, int], Any]
    """Ids [batch, length] that fill a prompt."""
    rates: Rates | None
    """What its device can do."""
    notes: tuple[str, ...] = ()


def ready(plan: ProfilePlan, now: Now) -> Ready:
    """Load the model, read the prompt, measure the hardware.

    Raises:
        KvctlError: the model cannot be loaded, or the prompt cannot be read.

    """
    from kvctl.measure.load import load
    from kvctl.measure.machine import gpu_of, look, published
    from kvctl.measure.rates import measure_rates

    dtype = prepare(plan.spec, SizePlan(TRANSFORMERS, dtype=plan.wanted.dtype)).dtype
    now.stage(f"loading {plan.spec.id}")
    loaded = load(plan.spec, plan.wanted, dtype)
    notes = list(loaded.notes)
    tokens = _prompt(plan, loaded, notes)
    rates = None
    if plan.limits:
        now.stage("measuring the hardware")
        rates = measure_rates(loaded.device, _RATE_BUDGET_S)
        if loaded.device != "cpu":
            rates = published(rates, gpu_of(loaded.device, look().gpus))
    return Ready(loaded, dtype, tokens, rates, tuple(notes))


def _begun(plan: ProfilePlan, now: Now) -> Ready:
    """As `ready`, on as many threads as there are cores."""
    notes = _threads()
    model = ready(plan, now)
    return model.replace(notes=(*notes, *model.notes))


def profile(plan: ProfilePlan, progress: Progress) -> ProfileReport:
    """Load the model and measure every point; on Ctrl-C what is complete is in the report, which says so.

    Raises:
        KvctlError: the model cannot be loaded or run.

    """
    from kvctl.measure.fits import lines_of
    from kvctl.measure.hush import quiet, slow_kernels
    from kvctl.measure.points import check_lengths, measure

    check_lengths(plan.spec, plan.asked)
    points: list[Point] = []
    notes: list[str] = []
    warnings: list[str] = []
    interrupted = False
    model = None

    def done(point: Point) -> None:
        points.append(point)
        progress.done(point)

    try:
        model = _begun(plan, progress.now)
        with quiet() as said:
            others = measure(model.loaded, plan.asked, model.dtype, model.tokens, model.rates, progress.now, done)
        notes = slow_kernels(said)
        warnings = _busy(others)
    except KeyboardInterrupt:
        interrupted = True
    return report_of(plan, model, notes, warnings).replace(
        points=tuple(points), lines=lines_of(points), interrupted=interrupted
    )


def profile_techniques(
    plan: ProfilePlan, techniques: Sequence[Technique], asked: AssessAsked, text: str | None, progress: Progress
) -> ProfileReport:  # fmt: skip
    """Load the model and measure every technique beside the plain cache; `text` is a file, None the one that kvctl ships.

    Raises:
        KvctlError: the model cannot be loaded or run, or a technique does not work with it.

    """
    from kvctl.measure.assess import assess
    from kvctl.measure.foreign import need
    from kvctl.measure.hush import quiet
    from kvctl.measure.points import check_lengths

    check_lengths(plan.spec, plan.asked.replace(contexts=(asked.context,)))
    for one in techniques:
        if one.foreign is not None:
            with quiet():
                need(one.foreign)
    model = _begun(plan.replace(limits=False), progress.now)
    notes, ids = list[str](), None
    if model.loaded.tokenizer_path is not None:
        ids = reading("english" if text is None else text, model.loaded, plan, read_text(text, "--text"))
    elif text is not None:
        raise SourceError("--text needs the model's own tokenizer, and random weights have none")
    else:
        notes.append("quality needs a text, and a model with random weights has no tokenizer: bytes and times alone")
    with quiet():
        found = assess(model.loaded, techniques, asked, model.dtype, model.tokens, ids, progress.now,
                       lambda row: progress.now.stage(row.words))  # fmt: skip
    report = report_of(plan, model, [*notes, *found.left])
    return report.replace(techniques=found, interrupted=found.interrupted)


def profile_sharing(plan: ProfilePlan, asked: SharingAsked, progress: Progress) -> ProfileReport:
    """Load the model and measure requests whose prompts begin alike, in a paged cache.

    Raises:
        KvctlError: the model cannot be loaded or run, or its cache cannot be shared in blocks.

    """
    from kvctl.measure.hush import quiet
    from kvctl.measure.sharing import paged_model, share
    from kvctl.techniques import parse

    paged_model(plan.spec, parse("paged"))  # before anything is loaded
    model = _begun(plan.replace(limits=False), progress.now)
    others = Others()
    with quiet(), others.counting():
        found = share(model.loaded, asked, model.dtype, model.tokens, progress.now)
    report = report_of(plan, model, warnings=_busy(others.share))
    return report.replace(sharing=found, interrupted=found.interrupted)


def _busy(others: float | None) -> list[str]:
    """A warning, where other programs took too much of the processors."""
    if others is None or others < NOTICEABLE:
        return []
    return [f"other programs took {others:.0%} of the processors while times were measured: they are longer "
            "and vary more than on an idle machine"]  # fmt: skip


def report_of(
    plan: ProfilePlan, model: Ready | None = None, notes: Sequence[str] = (), warnings: Sequence[str] = ()
) -> ProfileReport:
    """The report of a run before anything is measured: which model, how and where."""
    from kvctl.measure.environment import environment

    question = prepare(plan.spec, SizePlan(TRANSFORMERS, dtype=plan.wanted.dtype))
    result = size(plan.spec, max(plan.asked.contexts), SizePlan(TRANSFORMERS, dtype=question.dtype))
    return ProfileReport(
        model=result.model,
        engine="transformers",
        engine_version=_version("transformers"),
        dtype=question.dtype.name,
        weights=result.weights,
        settings=settings_of(plan, None if model is None else model.loaded),
        environment=environment(plan.wanted.device),
        notes=(*(() if model is None else model.notes), *notes),
        warnings=(*question.warnings, *warnings),
    )


def _threads() -> list[str]:
    """As many threads as there are cores to use: torch counts those that a container's quota takes away."""
    import os

    import torch

    from kvctl.hardware.cpu import read_cpu

    usable, now = read_cpu().usable_cores, torch.get_num_threads()
    if not usable or usable >= now or "OMP_NUM_THREADS" in os.environ:
        return []
    torch.set_num_threads(usable)
    return [f"{now} threads of torch on {plural(usable, 'core')} would wait for one another: {usable} are used"]


def settings_of(plan: ProfilePlan, loaded: Loaded | None) -> dict[str, Any]:
    """How a model is run, as reports have it."""
    asked, wanted = plan.asked, plan.wanted
    thinned = loaded.thinned if loaded is not None else None
    attention = (
        getattr(getattr(loaded.model, "config", None), "_attn_implementation", None) if loaded is not None else None
    )
    return {
        "device": wanted.device,
        "device_map": wanted.device_map,
        "attention": attention,
        "weights": "random" if wanted.random else "published",
        "weights_bytes": loaded.weights_bytes if loaded is not None else None,
        "layers": wanted.layers,
        "layers_kept": list(thinned.kept) if thinned is not None else None,
        "layers_of_kind": list(thinned.counts) if thinned is not None else None,
        "decode": asked.decode,
        "prefill_chunk": asked.prefill_chunk,
        "repeat": asked.repeat,
        "seed": asked.seed,
        "tensor_parallel": wanted.tensor_parallel,
    }


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _prompt(plan: ProfilePlan, loaded: Loaded, notes: list[str]) -> Callable[[int, int], Any]:
    """What fills the prompt: a text's tokens, or random ones where the model has no tokenizer."""
    from kvctl.measure import points

    config = loaded.model.config.get_text_config(decoder=True)
    vocabulary = getattr(config, "vocab_size", None) or 1000
    ids = None
    if loaded.tokenizer_path is not None:
        text = read_text(plan.prompt)
        try:
            ids = _tokenized(loaded, plan, text)
        except Exception as error:
            if plan.prompt is not None:
                from kvctl.measure.faults import first_line

                raise SourceError(f"{plan.spec.id}: no tokenizer for --prompt: {first_line(error)}") from None
            notes.append("the model comes without a tokenizer that loads: the prompt is random tokens")
        if ids is not None and max(ids, default=0) >= vocabulary:
            raise SourceError(f"{plan.spec.id}: its tokenizer has tokens that the model has no embedding for")
    elif plan.prompt is not None:
        raise SourceError("--prompt needs the model's own tokenizer, and random weights have none",
                          hint="without --prompt the prompt is random tokens")  # fmt: skip
    return points.texts(ids, vocabulary, plan.asked.seed)


def _tokenized(loaded: Loaded, plan: ProfilePlan, text: str) -> list[int]:
    return [int(token) for token in _tokenizer(loaded, plan)(text)["input_ids"]]


def _tokenizer(loaded: Loaded, plan: ProfilePlan) -> Any:
    import transformers

    from kvctl.measure.hush import quiet

    told: dict[str, Any] = {"trust_remote_code": plan.wanted.trust_remote_code}
    if loaded.gguf_file is not None:
        told["gguf_file"] = loaded.gguf_file
    if plan.wanted.revision is not None:
        told["revision"] = plan.wanted.revision
    try:
        with quiet():
            return transformers.AutoTokenizer.from_pretrained(loaded.tokenizer_path, **told)
    except Exception as error:
        raise SourceError(f"{loaded.spec.id}: no tokenizer can be loaded of it",
                          hint="copy the model's tokenizer files there, or install what they need (sentencepiece, tiktoken)") from error  # fmt: skip


def reading(name: str, loaded: Loaded, plan: ProfilePlan, text: str) -> Reading:
    """A text as the model's tokenizer reads it."""
    from kvctl.measure.generation import Reading
    from kvctl.measure.hush import quiet

    tokenizer = _tokenizer(loaded, plan)

    def encode(words: str) -> list[int]:
        with quiet():
            return [int(token) for token in tokenizer(words, add_special_tokens=False)["input_ids"]]

    with quiet():
        ids = tuple(int(token) for token in tokenizer(text)["input_ids"])
    first = tokenizer.bos_token_id
    begin = (int(first),) if first is not None and ids[:1] == (first,) else ()
    return Reading(name, ids, encode, tokenizer.decode, begin)


def read_text(path: str | None, option: str = "--prompt") -> str:
    """A prompt from a file, or the one that kvctl ships."""
    if path is None:
        return texts.read(texts.samples()[0])
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SourceError(f"{option}: {path[:200]} is no UTF-8 text") from None
    except OSError as error:
        raise SourceError(f"{option}: cannot read {path[:200]}: {error.strerror}") from None
    if not text.strip():
        raise SourceError(f"{option}: {path[:200]} is empty")
    return text
