"""What the options of `kvctl profile` ask for, read into plans."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvctl.errors import KvctlError, UsageError
from kvctl.record import Record
from kvctl.units import parse_bytes, parse_token_list, plural

if TYPE_CHECKING:
    from kvctl.engines.flags import Given
    from kvctl.measure.machine import Machine
    from kvctl.measure.report import ProfileReport
    from kvctl.measure.run import ProfilePlan, Progress
    from kvctl.measure.saved import Saved
    from kvctl.spec import ModelSpec

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M"
"""What `kvctl profile` without a model runs, with random weights: nothing is downloaded."""
DEFAULT_CONTEXTS = (512, 2048)
_QUICK_CONTEXTS = (256, 1024)
"""Of the model that nobody named."""
_MOST = {"--batch": 4096, "--repeat": 1000, "--decode": 2**20, "--tp": 1024, "--layers": 1000, "--calib-samples": 2**16}
_RATE_BUDGET_S = 0.5
ENGINES = ("transformers", "llama.cpp", "vllm")
UNTIL = ("ctx", "batch")
WEIGHTS = ("auto", "random")
_OF_ANY_REPORT = {"save", "format_", "json_", "quiet"}
"""Parameters of the command that say nothing of a run."""


class Many(Record):
    """How many processes run the model, and where the others are."""

    tensor_parallel: int = 1
    nnodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str | None = None


def within(value: int, option: str, low: int = 1) -> int:
    """A count of something."""
    most = _MOST[option]
    if not low <= value <= most:
        raise UsageError(f"{option}: {value} is out of range", hint=f"from {low} to {most:,}")
    return value


def counts(text: str, option: str) -> tuple[int, ...]:
    """ "1,8": counts joined by commas."""
    try:
        found = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"{option}: {text[:40]!r} is no list of whole numbers", hint=f"{option} 1,8") from None
    return tuple(within(value, option) for value in found)


def asked_contexts(text: str | None) -> tuple[int, ...] | None:
    """The contexts that --ctx names."""
    found = None if text is None else parse_token_list(text)
    if found is not None and min(found) < 1:
        raise UsageError("--ctx: a prompt has at least 1 token")
    return found


def contexts(text: str | None, spec: ModelSpec, decode: int) -> tuple[int, ...]:
    """The contexts asked for, else some that the model has positions for."""
    if (found := asked_contexts(text)) is not None:
        return found
    if spec.max_context is None:
        return DEFAULT_CONTEXTS
    longest = max(spec.max_context - decode, 1)
    return tuple(dict.fromkeys(min(context, longest) for context in DEFAULT_CONTEXTS))


def many(tp: int, nnodes: int, node_rank: int, rdzv_endpoint: str | None) -> Many:
    """Ranks; options about several nodes are refused without any."""
    within(tp, "--tp")
    if not 1 <= nnodes <= 4096 or not 0 <= node_rank < nnodes:
        raise UsageError(f"--node-rank {node_rank} of --nnodes {nnodes}: no such node", hint="they are numbered from 0")
    if tp == 1 and (nnodes > 1 or rdzv_endpoint):
        raise UsageError("several nodes share a model with --tp", hint="--tp N is the number of ranks on all of them")
    if nnodes > 1 and not rdzv_endpoint:
        raise UsageError("--nnodes needs --rdzv-endpoint", hint="HOST:PORT of the first node, the same on all")
    if tp % nnodes:
        raise UsageError(f"--tp {tp} cannot be spread evenly over {plural(nnodes, 'node')}")
    return Many(tp, nnodes, node_rank, rdzv_endpoint)


def check_device(text: str) -> str:
    """The name of a device as torch may have it, whether or not it is here.

    Raises:
        UsageError: it is no such name.

    """
    name = text.lower()
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,4})?", name, re.ASCII):
        raise UsageError(f"--device: unknown {text[:40]!r}", hint="auto, cpu, cuda:0 or mps")
    return name


def device_of(text: str) -> str:
    """cpu, cuda:N or mps as torch has them here; "auto" is the best there is.

    Raises:
        UsageError: this machine has no such device.

    """
    import torch

    from kvctl.measure.hush import quiet

    name = check_device(text)
    with quiet():
        cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
        mps = torch.backends.mps.is_available()
    if name == "auto":
        return "cuda:0" if cuda else "mps" if mps else "cpu"
    if name == "cpu" or (name == "mps" and mps):
        return name
    if name == "mps":
        raise UsageError("--device mps: torch finds no Apple GPU here", hint="--device cpu")
    index = int(name.partition(":")[2] or 0)
    if index < cuda:
        return f"cuda:{index}"
    built = torch.version.cuda or torch.version.hip
    why = f"torch sees {plural(cuda, 'GPU')}" if built else f"torch {torch.__version__} is a build without CUDA"
    raise UsageError(f"--device {text[:40]}: {why}", hint="kvctl profile shows what this machine has; --device cpu")


def weights_of(text: str, model: str | None) -> str:
    """auto or random; the default model has random ones."""
    if text not in WEIGHTS:
        raise UsageError(f"--weights: unknown {text[:40]!r}", hint="auto (the model's own) or random")
    return text if model is not None else "random"


def check_values(
    *, weights: str, layers: int | None, dtype: str, device: str, device_map: str | None, attention: str | None, ctx: str | None,
    batch: str, decode: int, prefill_chunk: int | None, repeat: int, prompt: str | None, seed: int, ranks: Many, until: str | None,
    overrides: Sequence[str],
) -> None:  # fmt: skip
    """Refuses what no machine can run: before anything is measured or loaded, and without torch.

    Raises:
        UsageError: a value that is not known, or values that do not go together.
        SourceError: the prompt's file cannot be read.

    """
    from kvctl.measure.loaded import ATTENTIONS
    from kvctl.measure.run import read_text
    from kvctl.model import parse_overrides
    from kvctl.options import read_dtype

    parse_overrides(overrides)
    if layers is not None and weights != "random":
        raise UsageError("--layers keeps a few layers of a model with random weights", hint="add --weights random")
    if attention is not None and attention not in ATTENTIONS:
        raise UsageError(f"--attn: unknown {attention[:40]!r}", hint="one of " + ", ".join(ATTENTIONS))
    if device_map is not None and device_map != "auto":
        raise UsageError(f"--device-map: unknown {device_map[:40]!r}", hint="auto spreads the layers over all GPUs")
    if device_map is not None and ranks.tensor_parallel > 1:
        raise UsageError("--device-map puts whole layers on devices, and --tp cuts every layer", hint="one of them")
    if until is not None and ranks.tensor_parallel > 1:
        raise UsageError("--until-oom is about one device", hint="without --tp")
    if prefill_chunk is not None and prefill_chunk < 1:
        raise UsageError(
            f"--prefill-chunk: {prefill_chunk} is out of range", hint="tokens fed at a time, for example 512"
        )
    if not -(2**63) <= seed < 2**63:
        raise UsageError(f"--seed: {seed} is out of range")
    check_device(device)
    read_dtype(dtype)
    asked_contexts(ctx)
    counts(batch, "--batch")
    within(decode, "--decode", 0)
    within(repeat, "--repeat")
    if layers is not None:
        within(layers, "--layers")
    if prompt is not None:
        read_text(prompt)


def read_plan(
    spec: ModelSpec, *, weights: str, layers: int | None, dtype: str, device: str, device_map: str | None, attention: str | None,
    ctx: str | None, batch: str, decode: int, prefill_chunk: int | None, repeat: int, prompt: str | None, seed: int,
    encoder_tokens: int | None, trust_remote_code: bool, ranks: Many, revision: str | None, default_model: bool,
) -> ProfilePlan:  # fmt: skip
    """A run of the model in torch.

    Raises:
        UsageError: the same as `check_values`, or this machine has no such device.

    """
    from kvctl.formats import BF16, FP32
    from kvctl.measure.loaded import Wanted
    from kvctl.measure.points import Asked
    from kvctl.measure.run import ProfilePlan
    from kvctl.options import read_dtype

    if default_model and ctx is None:
        ctx = ",".join(map(str, _QUICK_CONTEXTS))
    on = device_of(device)
    wished = read_dtype(dtype)
    if default_model and wished is None:
        wished = FP32 if on == "cpu" else BF16
    elif wished is None and on == "cpu" and spec.weights is not None and "GGUF" in spec.weights.source:
        wished = FP32  # as transformers loads them; what a GGUF names is llama.cpp's cache, and fp16 crawls on a CPU
    return ProfilePlan(
        spec,
        Wanted(
            random=weights == "random", layers=layers, dtype=wished, device=on, device_map=device_map,
            attention=attention, tensor_parallel=ranks.tensor_parallel,
            trust_remote_code=trust_remote_code, seed=seed, revision=revision,
        ),
        Asked(
            contexts(ctx, spec, decode), counts(batch, "--batch"), decode, prefill_chunk, repeat, encoder_tokens, seed,
        ),
        prompt,
    )  # fmt: skip


def read_until(text: str | None, memory_limit: str | None) -> tuple[str | None, int | None]:
    """What --until-oom grows, and the memory it may have."""
    if text is not None and text not in UNTIL:
        raise UsageError(f"--until-oom: unknown {text[:40]!r}", hint="ctx or batch")
    if memory_limit is not None and text is None:
        raise UsageError("--memory-limit bounds --until-oom", hint="--until-oom ctx")
    return text, None if memory_limit is None else parse_bytes(memory_limit, what="--memory-limit")


def check_engine(
    name: str, *, of_transformers: dict[str, Any], of_others: dict[str, Any], not_of_llama_cpp: dict[str, Any],
    not_of_weights: dict[str, Any], random: bool,
) -> None:  # fmt: skip
    """Refuses unknown engines, and options that an engine would not heed.

    `not_of_llama_cpp` are of engines whose models have names and dtypes; `not_of_weights` change a configuration, which
    published weights do not follow in other engines.
    """
    if name not in ENGINES:
        raise UsageError(f"--engine: {name[:40]!r} is not one that profile runs", hint="one of " + ", ".join(ENGINES))
    if name == "transformers":
        _refuse(of_others, "only for other engines, and --engine is transformers", {})
        return
    hints = _OWN_WORDS[name]
    _refuse(of_transformers, f"only for transformers, and --engine is {name}", hints)
    if name == "llama.cpp":
        _refuse(not_of_llama_cpp, "llama.cpp runs a GGUF file as it is", hints)
    if not random:
        _refuse(not_of_weights, f"{name} runs the model as its file says", hints)


def _refuse(options: dict[str, Any], why: str, hints: dict[str, str]) -> None:
    for option, value in options.items():
        if value is not None and value is not False:
            own = hints.get(option)
            raise UsageError(
                f"{option}: {why}", hint=f"--engine-flags '{own}' hands its own flag on" if own else "leave it out"
            )


_OWN_WORDS = {
    "llama.cpp": {"--device": "-ngl 0", "--attn": "-fa off", "--prefill-chunk": "-ub 512", "--set": "--override-kv KEY=TYPE:VALUE"},
    "vllm": {"--tp": "--tensor-parallel-size N", "--trust-remote-code": "--trust-remote-code", "--revision": "--revision REV",
             "--prefill-chunk": "--max-num-batched-tokens N", "--set": "--hf-overrides JSON"},
}  # fmt: skip
"""What stands in an engine's own words for an option that is for transformers."""


def check_without_model(options: dict[str, Any]) -> None:
    """Refuses options that are about a model, where none is named."""
    for option, value in options.items():
        if value:
            raise UsageError(f"{option} is about a model, and none is named", hint="kvctl profile MODEL")


def check_files(save: str | None, plot: str | None, form: str) -> None:
    """Refuses before a long run what could not be written after it."""
    from kvctl.files import check_writable
    from kvctl.options import check_plot

    check_plot(plot, form)
    if plot is not None and plot.lower().endswith(".png") and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("PNG pictures need matplotlib", hint="pip install 'kvctl[plot]', or --plot FILE.svg")
    for path in (save, plot):
        if path is not None and path != "-":
            check_writable(path)


def read_earlier(paths: Sequence[str]) -> list[Saved]:
    """Saved profiles to compare with."""
    if not paths:
        return []
    from kvctl.measure.saved import load

    return [load(path) for path in paths]


def saved(report: ProfileReport, path: str) -> KvctlError | None:
    """Keep a report, without who else uses the machine: files get sent around. Why it cannot be kept."""
    from kvctl.measure.saved import save as write

    machine = report.machine
    if machine is not None:
        gpus = [gpu.replace(holders=(), device=gpu.device.replace(uuid=None)) for gpu in machine.gpus]
        machine = machine.replace(gpus=tuple(gpus))
    try:
        write(report.replace(machine=machine), path)
    except KvctlError as error:
        return error
    return None


def look_around(progress: Progress) -> Machine:
    """This machine, and what it was measured to do."""
    from kvctl.measure.machine import look, with_rates

    progress.now.stage("looking at this machine")
    machine = look()
    progress.now.stage("measuring memory bandwidth and matrix rates")
    return with_rates(machine, _RATE_BUDGET_S)


def missing_packages(context: Any, model: str | None) -> KvctlError | None:
    """That the packages which run models are not installed, where nothing but this machine was asked about.

    Raises:
        KvctlError: they are not installed, and a run was asked for: by a model's name, or by an option of runs.

    """
    from kvctl.measure.run import need_torch

    try:
        need_torch()
    except KvctlError as missing:
        given = {name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"}
        if model is not None or given - _OF_ANY_REPORT:
            raise
        return missing
    return None


def no_run(missing: KvctlError) -> ProfileReport:
    """A report without a model; its note says what is missing."""
    from kvctl.measure.report import ProfileReport

    note = f"{missing.message}; {missing.hint}" if missing.hint else missing.message
    return ProfileReport(None, "none", None, None, None, {}, {}, notes=(note,))


def read_model(
    name: str | None, overrides: Sequence[str], source: str | None = None, revision: str | None = None
) -> ModelSpec:
    """The model to run; without a name the one that needs nothing."""
    from kvctl.model import build_spec, parse_overrides
    from kvctl.sources import resolve

    found = resolve(
        DEFAULT_MODEL if name is None else name, source="catalogue" if name is None else source, revision=revision
    )
    return build_spec(found, parse_overrides(overrides))


def run(
    plan: ProfilePlan, ranks: Many, until: str | None, memory_limit: int | None, progress: Progress
) -> ProfileReport:
    """Measure in this process, on several ranks, or until memory runs out."""
    if ranks.tensor_parallel > 1:
        from kvctl.measure.ranks import profile_ranks

        return profile_ranks(
            plan, progress, nproc=ranks.tensor_parallel // ranks.nnodes, nnodes=ranks.nnodes, node_rank=ranks.node_rank,
            rdzv_endpoint=ranks.rdzv_endpoint,
        )  # fmt: skip
    from kvctl.measure.run import profile, report_of

    if until is None:
        return profile(plan, progress)
    from kvctl.measure.oom import until_oom

    # First: what this process takes of a GPU once it has run a model would be missing there.
    found = until_oom(plan, until, progress, memory_limit)
    if found.interrupted:
        return report_of(plan).replace(until_oom=found, interrupted=True)
    return profile(plan, progress).replace(until_oom=found)


def percent(text: str | None, option: str) -> float | None:
    """ "1%" and "1" are 1.

    Raises:
        UsageError: it is no number, or less than 0.

    """
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"{option}: {text[:40]!r} is no percentage", hint=f"{option} 1%")
    return value


def run_other(
    engine: str, model: str, spec: ModelSpec, flags: Sequence[Given], *, ctx: str | None, batch: str, decode: int, repeat: int,
    dtype: str, kv_dtypes: tuple[str, str, str], prompt: str | None, seed: int, random: bool, program: str | None,
    engine_flags: str | None, progress: Progress,
) -> ProfileReport:  # fmt: skip
    """Start another engine with this model and measure it."""
    import shlex

    from kvctl.measure.others import EngineAsk
    from kvctl.measure.others import run as run_engine
    from kvctl.measure.run import read_text
    from kvctl.options import read_asked
    from kvctl.size import SizePlan

    try:
        words = tuple(shlex.split(engine_flags or ""))
    except ValueError as error:
        raise UsageError(f"--engine-flags: {error}") from None
    asked = read_asked(engine=engine, engine_args=None, models=[model], revision=None, ctx=None, dtype=dtype, kv_dtypes=kv_dtypes,
                       overrides=[], flags=flags)  # fmt: skip
    (plan,) = asked.plans(SizePlan(dtype=asked.dtype)).each
    ask = EngineAsk(
        contexts(ctx, spec, decode), counts(batch, "--batch"), within(decode, "--decode"), within(repeat, "--repeat"), seed,
        read_text(prompt) if prompt is not None else None, words, program, random,
    )  # fmt: skip
    return run_engine(engine, spec, model, plan, ask, progress)
