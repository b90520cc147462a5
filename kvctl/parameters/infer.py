"""A size that a configuration lacks, from the published number of parameters.

Rows of the catalogue that only say what the cache needs leave out how wide feed-forward parts are. The count is linear in
that width, so the published number leaves one value or none: a value that is whole, and a multiple of 16 as widths are, is
the model's. Whether the head reads the embeddings may be missing too; both are tried, and one must be left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvctl.errors import ConfigError
from kvctl.families import text_fields
from kvctl.families.fields import Fields
from kvctl.parameters import parameters

_WIDTHS = ("intermediate_size", "moe_intermediate_size")
_STEP, _ROUND, _WIDEST = 16, 128, 2**20


def completed(config: Mapping[str, Any], published: int) -> tuple[dict[str, Any], str] | None:
    """The configuration with the width that it lacks, and what was filled in; None where no one value follows."""
    text = text_fields(Fields(config))
    found = []
    for width in _WIDTHS:
        if width in text.raw:
            continue
        for changed in _heads(config, text):
            value = _solved(changed, text.path, width, published)
            if value is not None:
                found.append((_with(changed, text.path, width, value), f"{width} {value:,}", value))
        if len(found) > 1:
            # Untied embeddings may look like wider layers: widths are round numbers.
            found = [item for item in found if item[2] % _ROUND == 0]
        if found:
            break
    return found[0][:2] if len(found) == 1 else None


def _heads(config: Mapping[str, Any], text: Fields) -> Iterator[Mapping[str, Any]]:
    if "tie_word_embeddings" in config or "tie_word_embeddings" in text.raw:
        yield config
        return
    for tied in (False, True):
        yield {**config, "tie_word_embeddings": tied}


def _solved(config: Mapping[str, Any], path: str, width: str, published: int) -> int | None:
    """The width with which the parameters are as many as published."""
    try:
        one, two = (_count(_with(config, path, width, _STEP * times)) for times in (1, 2))
        step = two - one
        steps, rest = divmod(published - one, step) if step > 0 else (0, 1)
        value = _STEP * (steps + 1)
        if rest or not 0 < value <= _WIDEST:
            return None
        return value if _count(_with(config, path, width, value)) == published else None
    except ConfigError:
        return None


def _count(config: Mapping[str, Any]) -> int:
    return sum(tensor.elements * tensor.count for tensor in parameters(config, whole=False))


def _with(config: Mapping[str, Any], path: str, key: str, value: int) -> dict[str, Any]:
    """The configuration with a key of its text part set."""
    out = dict(config)
    inner = out
    for part in path.split("."):
        if part:
            inner[part] = dict(inner[part])
            inner = inner[part]
    inner[key] = value
    return out
