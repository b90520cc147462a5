"""Readers for command-line values that more than one command takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, KvctlError, SourceError, UsageError
from kvctl.formats import MODEL_DTYPES, CacheFormat, DType, model_dtype
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.allocation import Serving
    from kvctl.ask import Plans
    from kvctl.engines import Engine
    from kvctl.engines.flags import Given
    from kvctl.ranks import Hardware
    from kvctl.size import SizePlan
    from kvctl.sources import Found
    from kvctl.spec import ModelSpec
    from kvctl.startlog import StartLog
    from kvctl.traffic import Traffic

SOLVES = ("ctx", "concurrency", "gpus", "tp")
OUTPUT_FORMATS = ("table", "json", "csv", "md")


def read_dtype(text: str) -> DType | None:
    """A model dtype; None for "auto"."""
    if text.lower() == "auto":
        return None
    dtype = model_dtype(text)
    if dtype is None:
        raise UsageError(
            f"--dtype: unknown model dtype {text[:40]!r}",
            hint="one of auto, "
            + ", ".join(d.name for d in MODEL_DTYPES)
            + "; formats of the cache alone go to --kv-dtype",
        )
    return dtype


def read_cache_format(text: str, option: str, engine: Engine) -> CacheFormat | None:
    """A cache format in the engine's own names; None for "auto"."""
    return None if text.lower() == "auto" else engine.kv_dtype(text, option)


_PACKED = re.compile(r"(?<![a-z0-9])(?:ud-)?(?:i?q\d|tq\d|mxfp4|nvfp4)[a-z0-9_]*")
"""What names of files have for a quantised type, in lower case."""


def _is_quantized(spec: ModelSpec) -> bool:
    text = spec.config.get("text_config")
    return "quantization_config" in spec.config or (isinstance(text, Mapping) and "quantization_config" in text)


def _is_gguf(spec: ModelSpec) -> bool:
    return spec.weights is not None and "GGUF" in spec.weights.source


class Asked(Record):
    """What a run asks of engines: its own options and those of a pasted command line, brought together."""

    engine: str
    models: tuple[str, ...]
    pasted: bool
    """Whether a pasted command line starts the engine."""
    pasted_model: bool
    """Whether the model is that of a pasted command line."""
    revision: str | None
    contexts: tuple[int, ...] | None
    own_maximum: bool
    """Whether no length is named: the model's own maximum."""
    fit_length: bool
    """Whether the engine lowers that until it fits."""
    dtype: DType | None
    kv_dtypes: tuple[str, str, str]
    """Texts of --kv-dtype, --k-dtype and --v-dtype."""
    overrides: Mapping[str, Any]
    flags: tuple[Given, ...]
    notes: tuple[str, ...]
    weights: str = ""
    """What a pasted command line says of the weights' format: its own word, or the name of a GGUF file."""
    weights_named: bool = False
    """Whether `weights` is such a word."""

    def serving(self, engine: Engine, *, strict: bool) -> Serving:
        """How one engine is started."""
        from kvctl.engines.flags import serving

        started = serving(engine.name, self.flags, strict=strict)
        if self.fit_length:
            started = started.replace(fit_length=True)
        if strict and engine.rows and self.flags and started.cache_implementation is None:
            # Settings of a cache that is not named would look as if they counted.
            started = started.replace(cache_implementation="dynamic")
        name = started.draft_path
        if started.speculative is not None:
            from kvctl.engines.vllm.speculation import draft_model

            name = draft_model(started.speculative)
        if name is None:
            return started
        from kvctl.model import build_spec
        from kvctl.sources import resolve

        return started.replace(draft=build_spec(resolve(name)))

    def plans(self, common: SizePlan) -> Plans:
        """The plan for every engine and cache format that is asked about."""
        from kvctl.ask import Plans
        from kvctl.engines import ENGINES
        from kvctl.engines import engine as find_engine

        comparing = self.engine.lower() == "all"
        formats = self.kv_dtypes[0].split(",")
        if len(formats) > 1 and comparing:
            raise UsageError("--kv-dtype: one format for --engine all", hint="or several for one engine")
        plans: list[SizePlan] = []
        faults: list[tuple[str, KvctlError]] = []
        for rules in ENGINES if comparing else (find_engine(self.engine),):
            try:
                for name in formats:
                    key, value = self.cache_formats(rules, name)
                    serving = self.serving(rules, strict=not comparing)
                    plans.append(common.replace(engine=rules, serving=serving, key=key, value=value))
            except KvctlError as error:
                if not comparing:
                    raise
                faults.append((rules.name, error))
        return Plans(tuple(plans), tuple(faults), comparing)

    def specs(self, shape: tuple[int | None, int | None, int | None], source: str | None) -> list[ModelSpec]:
        """The models that are named, or the bare shape: layers, KV heads and head width."""
        from kvctl.model import build_spec, shape_spec

        if any(value is not None for value in shape):
            if self.models:
                raise UsageError("--layers, --kv-heads and --head-dim describe a shape without a model",
                                 hint="for a what-if on a model use --set num_hidden_layers=N")  # fmt: skip
            layers, kv_heads, head_dim = shape
            if layers is None or kv_heads is None or head_dim is None:
                raise UsageError("a shape needs all of --layers, --kv-heads and --head-dim")
            if source or self.revision:
                raise UsageError("--source and --revision are about a model; a shape has none")
            if self.overrides:
                raise UsageError("--set changes a model's configuration; a shape has none")
            return [shape_spec(layers, kv_heads, head_dim)]
        if not self.models:
            raise UsageError(
                "no model given", hint="kvctl size Qwen3-32B --ctx 32k; kvctl size --list-models shows the catalogue"
            )
        names = dict.fromkeys(self.models)
        if len(names) > 1 and all(part.strip("kKmM").isdigit() for part in self.models[1:]):
            own = ",".join(map(str, self.contexts or ()))
            raise UsageError(
                f"{self.models[1]!r} is a number, not a model",
                hint=f"several contexts are joined by commas: --ctx {own},{self.models[1]}",
            )
        found = [self.find(name, source) for name in names]
        return [build_spec(one, self.overrides, checked=not self.pasted) for one in found]

    def weights_format(self, specs: Sequence[ModelSpec], *, needed: bool) -> str | None:
        """The format of weights that a pasted command line names, where the models' own files do not have it.

        Raises:
            ConfigError: its size is `needed`, and not known.

        """
        if not self.weights or any(_is_quantized(spec) or _is_gguf(spec) for spec in specs):
            return None
        from kvctl.engines.commandline import QUANTIZATIONS
        from kvctl.quantization import named_format
        from kvctl.weight_formats import GGUF_BITS

        word, engine = self.weights.lower(), self.engine.partition("@")[0]
        if self.weights_named and engine in QUANTIZATIONS and word in QUANTIZATIONS[engine]:
            return QUANTIZATIONS[engine][word] or None
        if not self.weights_named and (named := named_format(self.weights)) is not None:
            return None if all(spec.id == self.weights for spec in specs) else named
        found = [name for name in GGUF_BITS if re.search(rf"(?<![a-z0-9]){name}(?![a-z0-9_])", word)]
        if found:
            return max(found, key=len)
        packed = word if self.weights_named else _PACKED.search(word)
        if packed and needed:
            shown = packed if isinstance(packed, str) else packed.group()
            raise ConfigError(f"how much weights take in {shown[:60]} is not known",
                              hint="--weights-dtype names what comes nearest, for example fp8, awq or q4_k_m")  # fmt: skip
        return None

    def find(self, name: str, source: str | None) -> Found:
        """A model's configuration; for one that a pasted command line names, how to name another."""
        from kvctl.sources import resolve

        try:
            return resolve(name, source=source, revision=self.revision)
        except SourceError as error:
            if not self.pasted_model:
                raise
            raise SourceError(error.message, hint="the pasted command names it; another name for it goes before: "
                              "kvctl size MODEL --engine-args …") from error  # fmt: skip

    def cache_formats(self, engine: Engine, both: str) -> tuple[CacheFormat | None, CacheFormat | None]:
        """Formats of keys and of values in the engine's own names, `both` where no other is named; None for its default."""
        _, key, value = self.kv_dtypes
        shared = read_cache_format(both, "--kv-dtype", engine)
        return (
            read_cache_format(key, "--k-dtype", engine) or shared,
            read_cache_format(value, "--v-dtype", engine) or (shared and (shared.values or shared)),
        )


def read_asked(
    *,
    engine: str | None,
    engine_args: str | None,
    models: Sequence[str] | None,
    revision: str | None,
    ctx: str | None,
    dtype: str,
    kv_dtypes: tuple[str, str, str],
    overrides: Sequence[str],
    flags: Sequence[Given],
) -> Asked:
    """One run's options; what the command line of kvctl says wins over a pasted one."""
    from kvctl.model import parse_overrides
    from kvctl.units import parse_token_list

    own = Asked(
        engine=engine or "ideal",
        models=tuple(models or ()),
        pasted=False,
        pasted_model=False,
        revision=revision,
        contexts=parse_token_list(ctx) if ctx is not None else None,
        own_maximum=False,
        fit_length=False,
        dtype=read_dtype(dtype),
        kv_dtypes=kv_dtypes,
        overrides=parse_overrides(overrides),
        flags=tuple(flags),
        notes=(),
    )
    if engine_args is None:
        return own
    from kvctl.engines import commandline

    if engine == "all":
        raise UsageError("--engine-args starts one engine", hint="leave --engine out")
    name, _, version = (engine or "").partition("@")
    pasted = commandline.read(engine_args, name.lower() or None)
    said = pasted.common
    length = said.get("context", "")
    if length and length.lower() not in commandline.OPEN_LENGTHS.get(pasted.engine, ()):
        pasted_contexts: tuple[int, ...] | None = (commandline.count_of(pasted.engine, length, "its length"),)
    else:
        pasted_contexts = None
    kv = tuple(
        ours if ours.lower() != "auto" else said.get(field, "auto")
        for ours, field in zip(kv_dtypes, ("kv_dtype", "k_dtype", "v_dtype"), strict=True)
    )
    taken = {item.flag.field for item in flags}
    notes = list(pasted.notes)
    if length.lower() in ("auto", "-1"):
        notes.append("the length is left to the engine: it takes the longest that the memory for the cache holds")
    if not version and pasted.version:
        from kvctl.engines import engine as find

        try:
            version = find(f"{pasted.engine}@{pasted.version}").version or ""
        except UsageError as error:
            notes.append(f"the image is {pasted.engine} {pasted.version}: {error.message.partition(': ')[2]}; "
                         "the newest rules known are used")  # fmt: skip
    if not version and pasted.unversioned:
        notes.append(f"the image's tag says no version of {pasted.engine}: the newest rules known are used; "
                     f"--engine {pasted.engine}@VERSION says another")  # fmt: skip
    return own.replace(
        engine=pasted.engine + (f"@{version}" if version else ""),
        models=own.models or ((pasted.model,) if pasted.model else ()),
        pasted=True,
        pasted_model=not own.models,
        revision=revision or (said.get("revision") if not own.models else None),
        contexts=own.contexts or pasted_contexts,
        own_maximum=own.contexts is None and pasted_contexts is None,
        fit_length=own.contexts is None and length.lower() in ("auto", "-1"),
        dtype=own.dtype or read_dtype(said.get("dtype", "auto")),
        kv_dtypes=kv,
        weights=said.get("weights", "") or pasted.model or "",
        weights_named=bool(said.get("weights")),
        overrides={**commandline.overrides_of(said.get("overrides")), **own.overrides},
        flags=(*(item for item in pasted.flags if item.flag.field not in taken), *flags),
        notes=tuple(notes),
    )


def read_hardware(
    gpu: str | None, overhead: str | None, solve: str | None, *, started: bool, needed: bool
) -> Hardware | None:
    """The hardware of --gpu; options that need one are refused without."""
    if gpu is None:
        for option, given in (("--solve", solve), ("--measured-overhead", overhead), ("--fail-unless-fits", needed)):
            if given:
                raise UsageError(f"{option} needs hardware", hint="name it: --gpu H100, --gpu 2xRTX4090, --gpu local")
        return None

    from kvctl.hardware import read_gpus
    from kvctl.ranks import Hardware
    from kvctl.units import parse_bytes

    if solve is not None and solve not in SOLVES:
        raise UsageError(f"--solve: unknown {solve[:40]!r}", hint="one of " + ", ".join(SOLVES))
    measured = parse_bytes(overhead, what="--measured-overhead") if overhead is not None else None
    if overhead is not None and measured is not None and measured < 1024 and overhead.strip().isdigit():
        raise UsageError(
            f"--measured-overhead: {overhead.strip()} bytes are nothing", hint=f"did you mean {overhead.strip()}GiB?"
        )
    devices = read_gpus(gpu)
    kinds = {device.name for device in devices}
    name = (
        re.sub(r"^\s*\d+\s*[x×*]\s*|\s*[x×*]\s*\d+\s*$", "", gpu)
        if len(kinds) == 1 and devices[0].index is None
        else ""
    )
    return Hardware(devices, "" if "," in name else name, measured, solve, started)


def read_log(
    path: str | None, models: Sequence[str], engine: str | None, beside: Mapping[str, object]
) -> StartLog | None:
    """A start-up log; `models` are those that the command line names, `beside` options that ask something else."""
    if path is None:
        return None
    for option, value in beside.items():
        if value:
            raise UsageError(f"{option} asks something else than --from-log", hint="one of them at a time")
    from kvctl import startlog

    if len(models) > 1 or engine == "all":
        raise UsageError("--from-log is about one start of one engine", hint="one model, or none: the log names it")
    return startlog.read_log(path)


def model_of_log(log: StartLog, source: str | None) -> str:
    """The first of the names in a log that is known."""
    from kvctl.sources import resolve

    for name in log.model_names:
        try:
            resolve(name, source=source)
        except KvctlError:
            continue
        return name
    seen = log.model_name or log.model
    raise SourceError(
        f"{log.path}: it names {seen!r}, which is no known model" if seen else f"{log.path}: it names no model",
        hint="name it: kvctl size MODEL --from-log FILE",
    )


def read_traffic(
    trace: str | None, tokenizer: str | None, workload: str | None, *, requests: int | None, rate: float | None,
    in_flight: int | None, tpot: float | None, prefill_rate: int | None,
) -> Traffic | None:  # fmt: skip
    """What is to be replayed; options about a replay are refused without one."""
    only = (("--tokenizer", tokenizer), ("--requests", requests), ("--rate", rate), ("--in-flight", in_flight),
            ("--tpot", tpot), ("--prefill-rate", prefill_rate))  # fmt: skip
    if trace is None and workload is None:
        for option, value in only:
            if value is not None:
                raise UsageError(f"{option} is about a replay", hint="--workload chat, or --trace FILE")
        return None
    from kvctl.traffic import WORKLOADS, Traffic

    if trace is not None and workload is not None:
        raise UsageError("--trace and --workload are two kinds of traffic", hint="one of them")
    if workload is not None and workload not in WORKLOADS:
        raise UsageError(f"--workload: unknown {workload[:40]!r}", hint="one of " + ", ".join(WORKLOADS))
    for option, value in only[1:3]:
        if trace is not None and value is not None:
            raise UsageError(f"{option} is about a --workload; a trace has its own")
    if workload is not None and tokenizer is not None:
        raise UsageError("--tokenizer reads the messages of a --trace")
    for option, number in only[1:]:
        if number is not None and not 0 < float(number) <= 10**9:
            raise UsageError(f"{option}: {number} is out of range", hint="above 0, at most 1,000,000,000")
    return Traffic(
        trace, tokenizer, workload, requests or Traffic.requests, rate or Traffic.rate, in_flight,
        None if tpot is None else max(1, round(tpot * 1000)), prefill_rate,
    )  # fmt: skip


def check_plot(path: str | None, form: str) -> None:
    """Refuses a picture of no known kind, and one that would stand among JSON."""
    if path is None:
        return
    from kvctl.plot import kind_of

    if kind_of(path) == "terminal" and form != "table":
        raise UsageError(f"--plot - draws on stdout, where {form} goes", hint="--plot FILE.svg")


def at_least_one(value: int, option: str) -> int:
    """A count of sequences or beams."""
    if not 1 <= value <= 2**31:
        raise UsageError(f"{option}: {value} is out of range", hint=f"from 1 to {2**31:,}")
    return value


def read_output_format(text: str, as_json: bool) -> str:
    """The output format; --json is short for --format json."""
    if as_json and text not in ("table", "json"):
        raise UsageError(f"--json and --format {text[:40]} ask for two formats", hint="one of them")
    if as_json:
        return "json"
    if text not in OUTPUT_FORMATS:
        raise UsageError(f"--format: unknown format {text[:40]!r}", hint="one of " + ", ".join(OUTPUT_FORMATS))
    return text


def with_structures(plans: Plans, texts: Sequence[str]) -> Plans:
    """Every plan for the model's own structure, and then for each that is asked about."""
    if not texts:
        return plans
    from kvctl.structure import parse_list

    found = (None, *parse_list(texts))
    return plans.replace(each=tuple(plan.replace(what_if=one) for one in found for plan in plans.each))


def with_techniques(plans: Plans, texts: Sequence[str]) -> Plans:
    """Every plan with every technique; beside several stands the plain cache."""
    if not texts:
        return plans
    from kvctl.techniques import PLAIN, parse_list

    found = parse_list(texts)
    if not found:
        raise UsageError("--technique: none is named", hint="--technique int4, or int8,int4 to compare")
    if plans.comparing:
        raise UsageError("--technique is about one engine", hint="--engine ideal or transformers")
    if len(found) > 1 and PLAIN not in found:
        found = [PLAIN, *found]
    return plans.replace(each=tuple(plan.replace(technique=one) for plan in plans.each for one in found))
