"""One `kvctl quantize --kv`: what formats of the cache cost this model, and scales of an FP8 cache written beside its weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.engines import TRANSFORMERS
from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.formats import FP32
from kvctl.measure.quality import Quality, quality, separates
from kvctl.record import Record
from kvctl.size import SizePlan, prepare, size
from kvctl.sources import kv_scales as stored
from kvctl.techniques import PLAIN
from kvctl.weights import calibration, from_gguf
from kvctl.weights.kv_engines import Use, use
from kvctl.weights.report import CONTEXT, Gate

if TYPE_CHECKING:
    from kvctl.measure.loaded import Loaded
    from kvctl.measure.quality import Scores
    from kvctl.measure.run import Now
    from kvctl.ranks import Hardware
    from kvctl.reports import Fit
    from kvctl.spec import ModelSpec
    from kvctl.techniques import Technique
    from kvctl.weights.judge import Exam
    from kvctl.weights.kv_calibrate import Calibrated
    from kvctl.weights.making import Settings

UNSCALED, LARGEST, CHOSEN = "fp8, scale 1.0", "fp8, largest/448", "fp8, calibrated"
ENGINES = ("vllm", "sglang", "tensorrt-llm", "llama.cpp", "ollama")


class KvAsk(Record):
    """What is asked for."""

    spec: ModelSpec
    source: Path
    formats: tuple[str, ...]
    """fp8, or any technique that packs the cache."""
    settings: Settings
    exam: Exam
    per_head: bool = False
    gate: Gate = Gate()
    target: Path | None = None
    force: bool = False
    context: int = CONTEXT
    """Tokens at which bytes are told, and what fits."""
    hardware: Hardware | None = None
    notes: tuple[str, ...] = ()


class KvRow(Record):
    """One format of the cache."""

    name: str
    kv_bytes: int
    """Of one sequence of the context, from the technique's rule."""
    quality: Quality | None
    """None for the plain cache."""
    broken: tuple[str, ...] = ()
    fit: Fit | None = None
    """On the GPUs that are named, with the weights as they are."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "kv_bytes": self.kv_bytes, "broken": list(self.broken),
            "quality": None if self.quality is None else self.quality.to_dict(),
            "fit": None if self.fit is None else self.fit.to_dict(),
        }  # fmt: skip


class KvPart(Record):
    """What was found of the cache."""

    dtype: str
    """That the model computed in."""
    there: str
    """Scales that the checkpoint brings already, in words."""
    rows: tuple[KvRow, ...]
    uses: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...]
    """Format, engine, its flags, and warnings."""
    context: int = CONTEXT
    layers: tuple[Mapping[str, Any], ...] = ()
    """Of a calibration: the largest values, and the error of attention's output with each choice of scales."""
    calibrated_tokens: int | None = None
    samples: calibration.Samples | None = None
    """What scales were calibrated on."""
    written: Path | None = None
    which: str | None = None
    """Whose scales were written."""
    tensors: int | None = None
    sure: bool | None = None
    """Whether these cost less than scale 1.0 with 95% confidence."""

    @property
    def broken(self) -> list[str]:
        return [f"{row.name}: {what}" for row in self.rows for what in row.broken]

    def to_dict(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "there": self.there,
            "context": self.context,
            "results": [row.to_dict() for row in self.rows],
            "engines": [
                {"format": name, "engine": engine, "flags": list(flags), "warnings": list(warnings)}
                for name, engine, flags, warnings in self.uses
            ],
            "layers": [dict(layer) for layer in self.layers],
            "calibrated_tokens": self.calibrated_tokens,
            "written": None if self.written is None else str(self.written),
            "written_scales": self.which,
            "written_tensors": self.tensors,
            "better_than_1_for_sure": self.sure,
        }


def cost(ask: KvAsk, now: Now) -> KvPart:
    """Measure each format through a real cache, beside the plain one, on the same tokens; with a target, write scales.

    Raises:
        UsageError: scales of no fp8 format, or of a GGUF file.
        ConfigError: a technique does not work with this model, or scales cannot be written.
        KvctlError: no scales cost less than 1.0: there is nothing to write.

    """
    from kvctl.measure.faults import blaming_weights
    from kvctl.measure.hush import quiet

    spec, fp8 = ask.spec, "fp8" in ask.formats
    if ask.target is not None:
        from kvctl.weights.checkpoint import check_target

        if not fp8:
            raise UsageError(
                f"-o writes scales of an FP8 cache, and --kv says {', '.join(ask.formats)}",
                hint="--kv fp8, or without -o",
            )
        if from_gguf.is_gguf(ask.source):
            raise UsageError(
                "a GGUF file has no place for scales of the cache", hint="give the folder that it was made of"
            )
        from kvctl.weights import kv_write
        from kvctl.weights.kv_scales import HEAD, TENSOR, layers_of

        kv_write.check(ask.source, layers_of(spec), HEAD if ask.per_head else TENSOR)
        check_target(ask.target, ask.source, ask.force)
    there = _there(ask.source)
    samples = None
    if fp8 and _scalable(spec):
        own = ask.settings
        now.say("reading the calibration data")
        with quiet():
            samples = calibration.draw(ask.source, own.calibration, own.samples, own.length, own.seed)
    loaded, dtype = _loaded(ask, now)
    with quiet(), blaming_weights(loaded.model):
        found = None if samples is None else _calibrated(ask, loaded, samples, now)
        techniques = _techniques(ask, found)
        scores = _measured(ask, loaded, techniques, now)
    rows = []
    for name, technique in {"plain": PLAIN, **techniques}.items():
        # In the model's own dtype, whatever it was measured in.
        plan = SizePlan(TRANSFORMERS, contexts=(ask.context,), hardware=ask.hardware, technique=technique)
        found_size = size(spec, ask.context, plan)
        measured = quality(scores[name]) if name in scores else None
        rows.append(KvRow(name, found_size.kv_bytes, measured, tuple(ask.gate.broken(measured)), found_size.fit))
    part = KvPart(dtype.name, there.words, tuple(rows), _uses(ask.formats, there), ask.context)
    if found is not None and samples is not None:
        part = part.replace(
            layers=tuple(_layer(one) for one in found.layers), calibrated_tokens=found.tokens, samples=samples
        )
    if ask.target is None or found is None:
        return part
    return _written(ask, ask.target, part, found, scores)


def _scalable(spec: ModelSpec) -> bool:
    """Whether its layers keep what scales are calibrated of."""
    from kvctl.weights.kv_scales import layers_of

    try:
        return bool(layers_of(spec))
    except ConfigError:
        return False


def _there(source: Path) -> stored.FoundScales:
    if from_gguf.is_gguf(source):
        return stored.FoundScales((), "gguf", None)
    return stored.of_folder(source)


def _loaded(ask: KvAsk, now: Now) -> tuple[Loaded, Any]:
    """In float32 unless another dtype is asked for: that of 16 bits has noise of its own, which hides differences."""
    from kvctl.formats import model_dtype
    from kvctl.measure.load import Wanted, load

    wanted = FP32 if ask.settings.dtype is None else model_dtype(ask.settings.dtype)
    dtype = prepare(ask.spec, SizePlan(TRANSFORMERS, dtype=wanted)).dtype
    now.say(f"loading {ask.spec.id}")
    try:
        return load(ask.spec, Wanted(device=ask.exam.device, dtype=dtype), dtype), dtype
    except KvctlError as error:
        # Random weights, which `profile` may run instead, say nothing of what a format costs.
        first, *_ = re.split(r"(?:, or )?(?:run it without its quantization: )?--weights random", error.hint or "")
        raise type(error)(error.message, hint=first or None) from None


def _ids(ask: KvAsk, loaded: Loaded, text: str) -> list[int]:
    from kvctl.measure.loaded import Wanted
    from kvctl.measure.points import Asked
    from kvctl.measure.run import ProfilePlan, reading

    plan = ProfilePlan(ask.spec, Wanted(), Asked(contexts=(1,)))
    return list(reading("text", loaded, plan, text).ids)


def _calibrated(ask: KvAsk, loaded: Loaded, samples: calibration.Samples, now: Now) -> Calibrated:
    from kvctl.weights.kv_calibrate import calibrate
    from kvctl.weights.kv_scales import HEAD, TENSOR

    calibration.check_vocabulary(samples, loaded.model.config.get_text_config().vocab_size)
    return calibrate(
        loaded, samples.ids, strategy=HEAD if ask.per_head else TENSOR,
        told=lambda done, of: now.say(f"calibrating scales: {done} of {of}"),
    )  # fmt: skip


def _techniques(ask: KvAsk, found: Calibrated | None) -> dict[str, Technique]:
    from kvctl.techniques import parse

    out: dict[str, Technique] = {}
    for name in ask.formats:
        out[UNSCALED if name == "fp8" else name] = parse(name)
        if name == "fp8" and found is not None:
            out[LARGEST] = found.plain.technique(LARGEST, ask.spec)
            out[CHOSEN] = found.scales.technique(CHOSEN, ask.spec)
    return out


def _measured(ask: KvAsk, loaded: Loaded, techniques: Mapping[str, Technique], now: Now) -> dict[str, Scores]:
    import torch

    from kvctl.weights.kv_measure import check_packs, measure

    exam = ask.exam
    from kvctl import texts

    text = texts.read(texts.samples()[0]) if exam.text is None else calibration.read(exam.text)
    ids, length = _ids(ask, loaded, text), exam.length
    if len(ids) < exam.windows * length:
        raise UsageError(f"the text has {len(ids):,} tokens: {len(ids) // length} of {exam.windows} windows of {length:,}",
                         hint="a longer text, or fewer --tokens")  # fmt: skip
    check_packs(techniques, length)
    windows = torch.tensor(ids[: exam.windows * length]).view(exam.windows, length)
    return measure(
        loaded, techniques, windows, length // 2,
        told=lambda name, window: now.say(f"{name}: text {window + 1} of {exam.windows}"),
    )  # fmt: skip


def _layer(report: Any) -> dict[str, Any]:
    halves = {"keys": report.keys, "values": report.values}
    return {"layer": report.layer} | {
        name: {
            field: list(value) if isinstance(value := getattr(half, field), tuple) else value for field in half._fields
        }
        for name, half in halves.items()
    }


def _uses(
    formats: tuple[str, ...], there: stored.FoundScales
) -> tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...]:
    """How each engine is told; engines without the format are left out."""
    out = []
    for name in formats:
        for engine in ENGINES:
            try:
                found: Use = use(engine, name, there)
            except UsageError:
                continue
            out.append((name, engine, found.flags, found.warnings))
    return tuple(out)


def _written(ask: KvAsk, target: Path, part: KvPart, found: Calibrated, scores: Mapping[str, Scores]) -> KvPart:
    """The scales that cost least, where that is less than 1.0 costs."""
    from kvctl.weights.kv_write import write

    nats = {row.name: row.quality.kl.value for row in part.rows if row.quality is not None}
    which = min((CHOSEN, LARGEST), key=lambda name: nats[name])
    if not nats[which] < nats[UNSCALED]:
        raise KvctlError(f"no scales cost less than 1.0 does (KL {nats[UNSCALED]:.3g} nats; {nats[which]:.3g} at best): nothing is written",
                         hint="this model's keys and values fit FP8 as they are; more --tokens would tell smaller differences")  # fmt: skip
    own = found.scales if which == CHOSEN else found.plain
    sure = separates(scores[which], scores[UNSCALED]).apart
    kept: list[KvPart] = []

    def finish(folder: Path) -> Mapping[str, str]:
        there = stored.of_folder(folder)
        wanted = {
            (layer.layer, half): values
            for layer in own.layers
            for half, values in (("k", layer.keys), ("v", layer.values))
        }
        read = {(scale.layer, scale.half[0]): scale.values for scale in there.scales}
        if read.keys() != wanted.keys() or any(list(read[key] or ()) != list(wanted[key]) for key in wanted):
            raise KvctlError("scales were not read back as they were written", hint="a fault of the disk, or kvctl's")
        kept.append(part.replace(
            written=target, which=which, sure=sure, tensors=len(there.scales), uses=_uses(ask.formats, there)
        ))  # fmt: skip
        from kvctl.weights.card import CARD, kv_card, licence_of

        model = size(ask.spec, 1, SizePlan(TRANSFORMERS)).model
        return {
            "kvctl-kv-scales.json": json.dumps(kept[0].to_dict(), indent=2) + "\n",
            CARD: kv_card(model, kept[0], licence_of(ask.source)),
        }

    write(ask.source, target, own, force=ask.force, finish=finish)
    return kept[0]
