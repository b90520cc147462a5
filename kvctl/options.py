"""Readers for command-line values that more than one command takes."""

from __future__ import annotations

from kvctl.errors import UsageError
from kvctl.formats import CACHE_FORMATS, MODEL_DTYPES, CacheFormat, DType, cache_format, model_dtype

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


def read_cache_format(text: str, option: str) -> CacheFormat | None:
    """A cache format; None for "auto"."""
    return None if text.lower() == "auto" else cache_format(text, option=option)


def read_output_format(text: str, as_json: bool) -> str:
    """The output format; --json is short for --format json."""
    if as_json:
        return "json"
    if text not in OUTPUT_FORMATS:
        raise UsageError(f"--format: unknown format {text[:40]!r}", hint="one of " + ", ".join(OUTPUT_FORMATS))
    return text


def at_least_one(value: int, option: str) -> int:
    """A count of sequences or beams."""
    if not 1 <= value <= 2**31:
        raise UsageError(f"{option}: {value} is out of range", hint=f"from 1 to {2**31:,}")
    return value


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

    return [engine.name for engine in ENGINES if engine.name.startswith(incomplete.lower())]


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
