"""What `kvctl quantize` asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvctl.errors import UsageError
from kvctl.formats import BF16, DType, model_dtype
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.spec import ModelSpec
    from kvctl.weights.judge import Exam
    from kvctl.weights.making import Settings
    from kvctl.weights.report import Gate
    from kvctl.weights.ways import Way

_LONGEST = 32_768
_DTYPES = {"fp16": "float16", "float16": "float16", "bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32",
           "float32": "float32"}  # fmt: skip


def read_ways(
    weights: str | None, compare: str | None, output: str | None, backend: str | None, *, dry: bool
) -> tuple[Way, ...]:
    """Formats to make.

    Raises:
        UsageError: none, or several where one is to be kept.

    """
    from kvctl.weights.ways import ways

    if weights is not None and compare is not None:
        raise UsageError("--weights makes one format, and --compare several", hint="one of them")
    if weights is None and compare is None:
        raise UsageError("no format is named", hint="--weights awq -o DIR, or --compare int8,nf4,awq")
    found = ways(weights, backend) if weights is not None else ways(compare or "", backend, "--compare")
    if weights is not None and len(found) > 1:
        raise UsageError(f"--weights takes one format, and {len(found)} are named", hint=f"--compare {weights}")
    if compare is not None and output is not None:
        raise UsageError("--compare keeps nothing", hint="--weights NAME -o DIR keeps one")
    if weights is not None and output is None and not dry:
        raise UsageError("where is it to go?", hint=f"-o DIR, or --dry-run, or --compare {weights} to measure alone")
    return found


class Caches(Record):
    """Formats of the cache that are asked about."""

    techniques: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    """Other names that the plain cache was given."""

    def notes(self, spec: ModelSpec) -> tuple[str, ...]:
        """What the plain cache of a model is, where it was named otherwise.

        Raises:
            UsageError: it takes another number of bytes.

        """
        own = spec.dtype if isinstance(spec.dtype, DType) else BF16
        named = {name: model_dtype(name) for name in self.plain}
        for name, dtype in named.items():
            if dtype is not None and dtype.bytes > own.bytes:
                raise UsageError(
                    f"--kv {name}: {spec.id} is {own.name}, and so is its plain cache", hint=f"--kv {own.name}"
                )
        return tuple(
            f"{name}: the plain cache is in the dtype that weights are run in, {own.name} as this model is"
            for name, dtype in named.items()
            if dtype not in (None, own)
        )


def read_caches(kv: str | None, others: Mapping[str, object]) -> Caches:
    """Formats of the cache, each a technique that packs it; `others` are options that are nothing without weights to make.

    Raises:
        UsageError: unknown, or beside options that are about weights.

    """
    from kvctl.techniques import parse_list

    if kv is None:
        return Caches()
    given = [option for option, value in others.items() if value]
    if given:
        raise UsageError(
            f"{given[0]} is about weights, and --kv about the cache",
            hint="--compare NAMES, or --weights NAME -o DIR, beside it",
        )
    names = [part.strip() for part in kv.split(",") if part.strip()]
    plain = tuple(name for name in names if name.lower() in ("plain", "auto") or model_dtype(name) is not None)
    found = parse_list([name for name in names if name not in plain], "--kv")
    if not found and (not plain or others):
        raise UsageError(
            "--kv: no format is named that is smaller" if plain else "--kv: no format is named",
            hint="--kv fp8,int8,int4",
        )
    for one in found:
        if (
            one.like_plain
            or one.keep is not None
            or one.paging is not None
            or one.foreign is not None
            or one.convert is not None
        ):
            raise UsageError(
                f"--kv {one.name[:40]}: that is no format of the cache",
                hint="kvctl profile MODEL --technique measures others",
            )
    return Caches(tuple(one.name for one in found), plain)


def read_settings(
    *, group: int | None, dtype: str, compute_dtype: str | None, int8_threshold: float | None, skip: Sequence[str],
    calib: str | None, calib_chat: bool, calib_samples: int | None, calib_length: int | None, seed: int | None,
) -> Settings:  # fmt: skip
    """How they are made.

    Raises:
        UsageError: a value that cannot be.

    """
    from kvctl.options_profile import within
    from kvctl.weights.calibration import Wanted
    from kvctl.weights.making import Settings

    usual, wanted = Settings(), Wanted(calib, calib_chat)
    calib_length = usual.length if calib_length is None else calib_length
    seed = usual.seed if seed is None else seed
    if group is not None and group not in (32, 64, 128):
        raise UsageError(f"--group: {group} is not known to readers of AWQ", hint="32, 64 or 128")
    if int8_threshold is not None and not 0 <= int8_threshold < 65504:
        raise UsageError(f"--int8-threshold: {int8_threshold:g} is out of range", hint="6 is LLM.int8's own; 0: none")
    if not 0 <= seed < 2**63:
        raise UsageError(f"--seed: {seed} is out of range", hint="from 0 to 9,223,372,036,854,775,807")
    if not 2 <= calib_length <= _LONGEST:
        raise UsageError(f"--calib-length: {calib_length} is out of range", hint=f"from 2 to {_LONGEST:,} tokens")
    wanted.check()
    modules = tuple(part.strip() for text in skip for part in text.split(",") if part.strip())
    return Settings(
        group, None if dtype == "auto" else _dtype(dtype, "--dtype"),
        None if compute_dtype is None else _dtype(compute_dtype, "--compute-dtype"), int8_threshold, modules,
        wanted, usual.samples if calib_samples is None else within(calib_samples, "--calib-samples"), calib_length, seed,
    )  # fmt: skip


def _dtype(text: str, option: str) -> str:
    found = _DTYPES.get(text.strip().lower())
    if found is None:
        raise UsageError(f"{option}: unknown {text[:40]!r}", hint="fp16, bf16 or fp32")
    return found


def read_context(ctx: str | None, *, of: bool) -> int:
    """Tokens at which bytes of caches are told; `of`: whether something is told of them.

    Raises:
        UsageError: several lengths, or none; or it is nothing here.

    """
    from kvctl.options_profile import asked_contexts
    from kvctl.weights.report import CONTEXT

    found = asked_contexts(ctx)
    if found is not None and not of:
        raise UsageError("--ctx is about caches and what fits", hint="beside --kv or --gpu")
    if found is not None and len(found) > 1:
        raise UsageError(f"--ctx: one length, and {len(found)} are named", hint="--ctx 32k")
    return CONTEXT if found is None else found[0]


def read_exam(
    tokens: int | None, text: str | None, device: str, caches: Sequence[str] = (), *, alone: bool = False
) -> Exam:
    """What the original and each format are scored on; of what is read through a cache the first half of a window is its
    prompt. `alone`: no weights are made, and caches are measured in this process.

    Raises:
        UsageError: too many or too few tokens.

    """
    from kvctl.options_profile import device_of
    from kvctl.weights import calibration
    from kvctl.weights.judge import Exam

    if text is not None:
        calibration.read(Path(text))  # before anything is loaded
    usual = Exam()
    count = usual.windows * (usual.length - 1) if tokens is None else tokens
    if not 1 <= count <= 2**20:
        raise UsageError(f"--tokens: {count} is out of range", hint="from 1 to 1,048,576")
    length = min(usual.length, 2 * count + 2 if caches else count + 1)
    scored = length - 1 - (length // 2 if caches else 0)
    windows = usual.windows if tokens is None else -(-count // scored)
    return usual.replace(
        text=None if text is None else Path(text),
        windows=windows,
        length=length,
        device=device_of(device),
        caches=() if alone else tuple(caches),
        prompted=bool(caches),
    )


def within(spec: ModelSpec, settings: Settings, exam: Exam, length: int | None) -> tuple[Settings, Exam]:
    """No text is longer than the model has positions; `length` is what was asked of calibration.

    Raises:
        UsageError: that is longer.

    """
    limit = spec.max_context
    if limit is None or limit < 2:
        return settings, exam
    if length is not None and length > limit:
        raise UsageError(
            f"--calib-length: {length:,} tokens, and {spec.id} ends at {limit:,}", hint=f"at most {limit:,}"
        )
    return settings.replace(length=min(settings.length, limit)), exam.within(limit)


def read_gate(max_ppl_increase: str | None, min_top1: str | None) -> Gate:
    """Bounds that are kept, or the status is 3.

    Raises:
        UsageError: no percentage.

    """
    from kvctl.options_techniques import bound
    from kvctl.weights.report import Gate

    return Gate(bound(max_ppl_increase, "--max-ppl-increase"), bound(min_top1, "--min-top1"))


def check_together(
    ways: Sequence[Way], caches: Sequence[str], *, compare: str | None, output: str | None, per_head: bool, resume: bool,
    force: bool, calibration: Mapping[str, object],
) -> None:  # fmt: skip
    """Refuses options that mean nothing beside the others. `caches`: formats of the cache, where no weights are made;
    `calibration`: what was given of it, None of what was not.

    Raises:
        UsageError: there is one.

    """
    for option, does, given in (("--resume", "goes on with", resume), ("--force", "replaces", force)):
        if given and output is None:
            # With --compare there is never a folder.
            hint = "leave it out" if compare is not None or not ways else f"-o DIR {option}"
            raise UsageError(f"{option} {does} a checkpoint, and none is kept", hint=hint)
    whole = next((way for way in ways if not way.resumes), None)
    if resume and whole is not None:
        raise UsageError(f"--resume: {whole.name} is made in one go", hint="start it without --resume")
    if per_head and "fp8" not in caches:
        raise UsageError("--per-head is about scales of an FP8 cache", hint="--kv fp8 -o DIR")
    extra = next((name for name, value in calibration.items() if value is not None), None)
    if extra is None or "fp8" in caches or any(way.calibrates for way in ways):
        return
    names = ", ".join(way.name for way in ways) or ", ".join(caches)
    raise UsageError(f"{extra} is nothing for {names[:80]}: nothing is calibrated", hint="leave it out")


def check_revision(model: str, source: str | None, revision: str | None) -> None:
    """Refuses one of a model that is here.

    Raises:
        UsageError: the model is here.

    """
    import os

    from kvctl.sources import jsonfile, looks_like_path

    if revision is not None and source is None and (model == "-" or looks_like_path(model) or os.path.lexists(model)):
        raise UsageError(f"--revision is about the Hub, and {jsonfile.plain(model)[:200]} is on this machine",
                         hint="leave it out")  # fmt: skip


def need_packages(ways: Sequence[Way]) -> None:
    """Refuses to go on without the packages that make and run these formats.

    Raises:
        KvctlError: one is not installed.

    """
    import importlib.util

    from kvctl.errors import KvctlError
    from kvctl.measure.run import need_torch

    need_torch()
    missing = sorted({way.by for way in ways if way.by and importlib.util.find_spec(way.by) is None})
    if missing:
        names = ", ".join(way.name for way in ways if way.by in missing)
        raise KvctlError(f"{names} needs {', '.join(missing)}, not installed", hint="pip install 'kvctl[quantize]'")
