"""Readers for command-line values that more than one command takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvctl.errors import UsageError
from kvctl.formats import CACHE_FORMATS, MODEL_DTYPES, CacheFormat, DType, model_dtype

if TYPE_CHECKING:
    from kvctl.allocation import Serving
    from kvctl.engines import Engine

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


DEVICES = ("gpu", "cpu")


def read_serving(engine: Engine, given: Mapping[str, Any], *, strict: bool) -> Serving:
    """How the engine is started: the values of its options by their names, None where one was not given.

    Options that are not this engine's are refused (`strict`) or left to others.
    """
    from kvctl.allocation import Serving
    from kvctl.engines import ENGINES
    from kvctl.units import parse_bytes, parse_tokens

    for option, value in given.items():
        if strict and value is not None and option not in engine.options:
            takers = " or ".join(f"--engine {e.name}" for e in ENGINES if option in e.options)
            raise UsageError(f"{option} says how an engine is started; {engine.name} has no use for it",
                             hint=f"it is for {takers}")  # fmt: skip
    for option, most in (
        ("--tensor-parallel-size", 1024), ("--block-size", 2**20), ("--parallel", 256), ("--ubatch-size", 2**20)
    ):  # fmt: skip
        value = given[option]
        if value is not None and not 1 <= value <= most:
            raise UsageError(f"{option}: {value} is out of range", hint=f"from 1 to {most:,}")
    budget, batched = given["--kv-budget"], given["--max-num-batched-tokens"]
    if batched is not None:
        batched = parse_tokens(batched, what="--max-num-batched-tokens")
        if batched == 0:
            raise UsageError("--max-num-batched-tokens: 0 is out of range", hint="at least 1")
    flash = _one_of(given["--flash-attn"] or "auto", "--flash-attn", ("auto", "on", "off"))
    return Serving(
        device=_one_of(given["--device"] or "gpu", "--device", DEVICES),
        kv_budget=parse_bytes(budget, what="--kv-budget") if budget is not None else None,
        tensor_parallel=given["--tensor-parallel-size"],
        block_size=given["--block-size"],
        max_batched=batched,
        prefix_caching=given["--enable-prefix-caching"],
        hybrid_disabled=bool(given["--disable-hybrid-kv-cache-manager"]),
        slots=given["--parallel"],
        unified=given["--kv-unified"],
        ubatch=given["--ubatch-size"],
        swa_full=bool(given["--swa-full"]),
        flash_attention=None if flash == "auto" else flash == "on",
    )


def _one_of(text: str, option: str, known: tuple[str, ...]) -> str:
    if text.lower() not in known:
        raise UsageError(f"{option}: unknown {option.lstrip('-')} {text[:40]!r}", hint="one of " + ", ".join(known))
    return text.lower()


def at_least_one(value: int, option: str) -> int:
    """A count of sequences or beams."""
    if not 1 <= value <= 2**31:
        raise UsageError(f"{option}: {value} is out of range", hint=f"from 1 to {2**31:,}")
    return value


def read_output_format(text: str, as_json: bool) -> str:
    """The output format; --json is short for --format json."""
    if as_json:
        return "json"
    if text not in OUTPUT_FORMATS:
        raise UsageError(f"--format: unknown format {text[:40]!r}", hint="one of " + ", ".join(OUTPUT_FORMATS))
    return text


def complete_dtypes(incomplete: str) -> list[str]:
    """Model dtypes that start so."""
    return [name for name in ("auto", *(d.name for d in MODEL_DTYPES)) if name.startswith(incomplete.lower())]


def complete_cache_formats(incomplete: str) -> list[str]:
    """Cache formats that start so."""
    return [name for name in ("auto", *(f.name for f in CACHE_FORMATS)) if name.startswith(incomplete.lower())]


def complete_output_formats(incomplete: str) -> list[str]:
    """Output formats that start so."""
    return [name for name in OUTPUT_FORMATS if name.startswith(incomplete)]


def complete_engines(incomplete: str) -> list[str]:
    """Engines that start so."""
    from kvctl.engines import ENGINES

    return [name for name in (*(engine.name for engine in ENGINES), "all") if name.startswith(incomplete.lower())]


def complete_devices(incomplete: str) -> list[str]:
    """Devices that start so."""
    return [name for name in DEVICES if name.startswith(incomplete.lower())]


def complete_sources(incomplete: str) -> list[str]:
    """Sources that start so."""
    from kvctl.sources import SOURCES

    return [name for name in SOURCES if name.startswith(incomplete.lower())]


def complete_models(incomplete: str) -> list[str]:
    """Catalogue names: full ids, and unique short names while no organisation is typed."""
    from kvctl.sources import catalogue

    names = catalogue.names()
    if "/" not in incomplete:
        names += catalogue.short_names()
    return [name for name in names if name.lower().startswith(incomplete.lower())]
