"""Measured speeds, read from what `kvctl serve-test` and `kvctl profile` saved, for `kvctl.speed.calibrate`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, KvctlError, SourceError, UsageError
from kvctl.recommend.checkpoints import of_gguf, stored_format, timed
from kvctl.sources import jsonfile
from kvctl.speed import ALIKE
from kvctl.speed.calibrate import Measurement
from kvctl.speed.host import NAME as HOST
from kvctl.weight_formats import GGUF_BITS

if TYPE_CHECKING:
    from kvctl.hardware import Device
    from kvctl.loadtest.report import ServeReport
    from kvctl.measure.report import ProfileReport
    from kvctl.spec import ModelSpec

_LIMIT = 512_000_000
_HINT = "name a file that kvctl serve-test --save or kvctl profile --save wrote"
_CARD = "--calibrate FILE@H100 says it, FILE@2xH100 for two of them, FILE@cpu for this host"
_SHOWN = 3
"""Reasons, where a whole file is good for nothing."""
_NAMED = {"f16": "f16", "bf16": "f16", "fp16": "f16"} | {
    f"q{bits}_{kind}": f"gguf-{bits + 0.5 * (kind + 1):.2f}" for bits in (4, 5) for kind in (0, 1)
}
"""Types of GGUF files that kvctl makes nothing of, and the bits of their blocks: 32 weights, a scale of 16 bits and, in those that end in 1, a minimum."""
_OLDER = re.compile(r"(?<![a-z])(" + "|".join(_NAMED) + r")(?![a-z0-9_])", re.I)
_PLAIN = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
_TYPE = re.compile("|".join(sorted((re.escape(name) for name in GGUF_BITS), key=len, reverse=True)), re.I)


def load(text: str, specs: Sequence[ModelSpec] = (), notes: list[str] | None = None) -> tuple[Measurement, ...]:
    """FILE or FILE@CARD; `specs` are models that are known already, and what of the file says nothing is added to `notes`.

    Raises:
        SourceError: there is no such file, or it cannot be read.
        ConfigError: it is no such result, is damaged, or does not say enough.
        UsageError: an unknown card.

    """
    path, devices = _named(text)
    where = jsonfile.plain(path[:200])
    data = _document(path, where)
    schema = data.get("schema")
    left: list[str] = []
    if schema == "kvctl.serve-test/1":
        from kvctl.loadtest import saved

        found = tuple(_served(saved.of_dict(data, where), where, devices, specs, left))
        what = "no load that says how fast the server is"
    elif schema == "kvctl.profile/1":
        from kvctl.measure import saved as profiles

        found = tuple(_profiled(profiles.load(path).report, where, devices, specs, left))
        what = "no point that was measured to its end"
    else:
        name = jsonfile.plain(schema[:40]) if isinstance(schema, str) else "no schema"
        raise ConfigError(
            f"{where} holds {name}, and no measured speed (kvctl.serve-test/1 or kvctl.profile/1)", hint=_HINT
        )
    if not found:
        raise ConfigError(f"{where} has {what}" + "".join(f"; {one}" for one in left[:_SHOWN]), hint=_HINT)
    if notes is not None:
        notes.extend(f"{where}: not used of its loads {one}" for one in left)
    return found


def _named(text: str) -> tuple[str, tuple[Device, ...]]:
    """The file, and the GPUs, or the host, that are named behind it."""
    from kvctl.hardware import read_gpus

    path, mark, name = text.rpartition("@")
    if not mark or os.path.exists(text):
        return text, ()
    devices = tuple(read_gpus(name))
    if devices and devices[0].kind == "cpu":
        return path, devices
    if len({device.name for device in devices}) > 1 or not devices or devices[0].facts is None:
        raise UsageError(f"--calibrate: {name[:40]} is not one kind of GPU that is known", hint=_CARD)
    return path, devices


def _document(path: str, where: str) -> dict[str, Any]:
    try:
        return jsonfile.read_file(Path(path), limit=_LIMIT)
    except ConfigError as error:
        message = error.message.replace("to be a configuration", "to be a saved result")
        raise ConfigError(message.replace("a configuration", "a saved result"), hint=_HINT) from None
    except KvctlError as error:
        raise SourceError(error.message, hint=_HINT) from None
    except (RecursionError, ValueError) as error:  # ValueError: a NUL in the path
        raise SourceError(f"{where} cannot be read: {error}", hint=_HINT) from None


# -- what a server did ---------------------------------------------------------------------------


def _served(
    report: ServeReport, where: str, devices: Sequence[Device], specs: Sequence[ModelSpec], left: list[str]
) -> Iterator[Measurement]:
    if not devices:
        raise ConfigError(f"{where} does not say what GPU the server ran on", hint=_CARD)
    from kvctl.loadtest.figures import SECOND

    said = [str(report.server.get("model") or "")]
    if report.capacity is not None and report.capacity.predicted_for:
        said.insert(0, report.capacity.predicted_for.partition(", ")[0])
    spec, weights = _model(said, specs, where)
    engine = str(report.server.get("engine") or "unknown")
    weights = timed(weights, spec, slots=ALIKE.get(engine, engine) == "llama.cpp") if weights is not None else None
    for one in report.outcomes:
        # Requests at the edges of a load see another one; where too few are left, all are better than none.
        figures = one.figures if one.refused or not one.steady.good else one.steady
        ttft, tpot = figures.times["ttft"], figures.times["tpot"]
        why = one.given_up or ("" if figures.good else "no request was answered")
        why = why or ("" if ttft.count else "no first token was timed")
        why = why or ("" if figures.with_prompt else "the tokens of its prompts were not counted")
        why = why or ("" if one.step.at_once or one.seconds else "it lasted no time")
        if why:
            left.append(f"{one.step.words}: {why}")
            continue
        first = ttft.percentile(50).value / SECOND
        between = tpot.percentile(50).value / SECOND if tpot.count else None
        prompt, answer = figures.tokens_in / figures.with_prompt, max(figures.tokens_out / figures.good, 1.0)
        at_once = float(one.step.at_once or 0)
        if not at_once:  # Little's law
            at_once = max(figures.good / one.seconds * (first + (answer - 1) * (between or 0.0)), 1.0)
        cached = figures.cached / figures.with_cached if figures.with_cached else 0.0
        yield Measurement(
            engine, _name(devices[0]), spec, max(round(prompt), 1), max(round(answer), 1),
            at_once, first or None, between or None, weights, len(devices), where, min(cached, max(prompt - 1, 0.0)),
        )  # fmt: skip


# -- what kvctl profile measured -----------------------------------------------------------------


def _profiled(
    report: ProfileReport, where: str, devices: Sequence[Device], specs: Sequence[ModelSpec], left: list[str]
) -> Iterator[Measurement]:
    card, count = _card(report, where, devices)
    if report.model is None:
        raise ConfigError(f"{where} does not say which model it measured", hint=_HINT)
    spec, weights = _model([report.model.id, report.model.location], specs, where)
    if report.weights is not None and report.weights.scheme is None:
        weights = _PLAIN.get(report.dtype or "", weights)
    for point in report.points:
        first = point.ttft.median if point.ttft is not None else None
        between = point.tpot.median if point.tpot is not None else None
        if point.scaled is not None:  # a few layers ran
            first, between = point.scaled.ttft_s, point.scaled.tpot_s
        if point.error is not None or first is None:
            left.append(
                f"{point.batch:,} at once of {point.context:,} tokens: {point.error or 'no first token was timed'}"
            )
            continue
        yield Measurement(report.engine, card, spec, point.context, max(point.decode, 1), float(point.batch), first, between, weights,
                          max(report.ranks, count), where, together=True)  # fmt: skip


def _name(device: Device) -> str:
    return HOST if device.kind == "cpu" or device.facts is None else device.facts.name


def _card(report: ProfileReport, where: str, devices: Sequence[Device]) -> tuple[str, int]:
    """The card that it ran on, and how many."""
    from kvctl.hardware.table import facts_of

    device = str(report.settings.get("device") or report.environment.get("device") or "")
    if device == "cpu":
        if devices and devices[0].kind != "cpu":
            raise ConfigError(
                f"{where} was measured on a processor, and not on {devices[0].name}", hint="--calibrate FILE"
            )
        return HOST, 1
    if devices:
        return _name(devices[0]), len(devices)
    gpus = report.environment.get("gpus")
    names = set()
    for gpu in gpus if isinstance(gpus, list) else []:
        if isinstance(gpu, dict) and isinstance(gpu.get("name"), str):
            size = gpu.get("memory_bytes")
            facts = facts_of(gpu["name"], size if isinstance(size, int) else 0)
            if facts is None:
                raise ConfigError(
                    f"{where}: {jsonfile.plain(gpu['name'][:60])} is not in the table of GPUs", hint=_CARD
                )
            names.add(facts.name)
    if len(names) != 1:
        raise ConfigError(f"{where} does not say what GPU it was measured on" if not names else f"{where} names several kinds of GPUs",
                          hint=_CARD)  # fmt: skip
    return names.pop(), 1


# -- the model -----------------------------------------------------------------------------------


def _model(names: Sequence[str], specs: Sequence[ModelSpec], where: str) -> tuple[ModelSpec, str | None]:
    """The model of the first name that is known, and the format of its weights."""
    from kvctl.model import build_spec
    from kvctl.sources import resolve

    for name in filter(None, names):
        short = name.rpartition("/")[2]
        gguf = _TYPE.search(short)
        if gguf is None and "gguf" in short.lower():
            gguf = _OLDER.search(short)
        bare = re.sub(r"[-_.]gguf$", "", short[: gguf.start()] if gguf else short, flags=re.I).rstrip("-_.")
        weights = None if gguf is None else _NAMED.get(gguf[0].lower(), gguf[0].lower())
        for spec in specs:
            if spec.id.lower() in (name.lower(), bare.lower()) or spec.id.rpartition("/")[2].lower() in (short.lower(), bare.lower()):  # fmt: skip
                return spec, stored_format(spec) if of_gguf(spec) else weights or stored_format(spec)
        for tried in (name, bare):
            try:
                spec = build_spec(resolve(tried, source=None if os.path.exists(tried) else "catalogue"))
            except KvctlError:
                continue
            return spec, stored_format(spec) if of_gguf(spec) else weights or stored_format(spec)
    shown = jsonfile.plain(next(filter(None, names), "no model")[:80])
    raise ConfigError(f"{where} is about {shown}, which is no model of the catalogue",
                      hint="serve-test --size-model MODEL says which model a server has")  # fmt: skip
