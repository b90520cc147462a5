"""What a format of weights or of the cache costs in quality: measured on this model where a saved result says it, published otherwise.

Published figures stand in kvctl/data/quality.json, each with its source. Those of the same model are taken, or else those of models
within a factor of ten of its parameters: small models lose more (Qwen2 in 4 bits: 0.1% at 72B, 14% at 0.5B). Scores of tasks go
before perplexities: they are what people ask about. `low` and `high` are the least and the most of the figures, with two standard
errors where these are known, and `mid` is their median. What nobody published of such a model, nor measured, is unknown, and never
nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from statistics import median
from typing import TYPE_CHECKING, Any

from kvctl.record import Record
from kvctl.speed import Range

if TYPE_CHECKING:
    from kvctl.spec import ModelSpec

NEAR = 10.0
"""Factor between parameters up to which one model's loss stands for another's."""
_SIXTEEN = frozenset(("auto", "bf16", "bfloat16", "fp16", "float16", "f16", "half", "fp32", "float32", "f32"))
_WEIGHTS = {"int4": "w4a16", "bnb-4bit": "nf4", "bnb-8bit": "int8", "llm.int8": "int8", "fp8-dynamic": "fp8-channel", "fp8_block": "fp8-block"}  # fmt: skip
"""Formats of compressed-tensors."""
_CACHE = {
    "fp8_e4m3": "fp8",
    "fp8_inc": "fp8",
    "float8_e4m3fn": "fp8",
    "fp8_ds_mla": "fp8",
    "fp4_mx_block16": "fp4_e2m1",
}
"""Words of engines for formats that other words stand for in the table."""
_PATH = os.path.join(os.path.dirname(os.path.dirname(__file__)), "data", "quality.json")


class Loss(Record):
    """What is lost, in percent of the original's score, or of its perplexity more."""

    percent: Range | None
    """None: unknown."""
    metric: str
    """accuracy, perplexity, or "" where nothing is lost or nothing known."""
    source: str
    """Who says so, with an address; why nothing is lost, or why it is not known."""
    measured: bool = False
    """Whether it was measured on this model."""
    sure: str = ""
    """ "high" (three figures or more, of two sources at least), "medium" (two), "low" (one, or of another format, a bound, or quoted
    at second hand, or of models of unlike size); "" where there is no figure."""
    basis: str = ""
    """Which figures: models and benchmarks."""

    def allowed(self, limit: float) -> str:
        """ "yes" where no figure is beyond the limit (percent), "no" where the middle one is, "depends" between; "unknown".

        Of what one figure alone tells, the worst that it leaves open counts: 500 questions tell losses of two points from none
        only just.
        """
        if self.percent is None:
            return "unknown"
        if self.percent.mid > limit or (self.sure == "low" and self.percent.high > limit):
            return "no"
        return "yes" if self.percent.high <= limit else "depends"

    def to_dict(self) -> dict[str, Any]:
        """As JSON, which has no infinity: null in a range is beyond all bounds."""
        out = {name: getattr(self, name) for name in self._fields}
        found = self.percent
        values = {} if found is None else {name: getattr(found, name) for name in found._fields}
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        return out | {"percent": None if found is None else finite}


NOTHING = Range(0.0, 0.0, 0.0)


class Figure(Record):
    """One row of the table."""

    formats: tuple[str, ...]
    model: str
    billions: tuple[float, float]
    """Parameters, 10^9: from, to."""
    metric: str
    benchmark: str
    original: float
    value: float
    source: str
    """Its key in the table's sources."""
    error: float = 0.0
    """Standard error of the loss, percent."""
    most: bool = False
    """Whether no more is lost than this, and how much is not said."""
    quoted: bool = False
    """Whether it was read where another text quotes it."""
    own: bool = False
    """Whether kvctl measured it, on that model."""
    keys: int | None = None
    """Of ten keys hidden in a text, those that were found again."""
    smaller: float | None = None
    """How many times smaller the cache was."""

    @property
    def percent(self) -> float:
        """What is lost; less than nothing where the test came out better."""
        lost = self.original - self.value if self.metric == "accuracy" else self.value - self.original
        return 100 * lost / self.original

    @property
    def span(self) -> tuple[float, float]:
        """Its least and its most: with two standard errors, and from nothing where it is a bound."""
        if self.most:
            return 0.0, self.percent
        return self.percent - 2 * self.error, self.percent + 2 * self.error


@cache
def _table() -> Mapping[str, Any]:
    import json

    with open(_PATH, encoding="utf-8") as file:
        data: dict[str, Any] = json.load(file)
    return data


@cache
def figures(kind: str) -> tuple[Figure, ...]:
    """All of "weights", "cache" or "techniques"."""
    return tuple(
        Figure(**{**row, "formats": tuple(row["formats"]), "billions": _span(row["billions"])})
        for row in _table()[kind]
    )


def _span(billions: float | Sequence[float]) -> tuple[float, float]:
    low, high = (billions, billions) if isinstance(billions, int | float) else billions
    return float(low), float(high)


def address(source: str) -> str:
    """A source in words, with where to open it."""
    found = _table()["sources"][source]
    return f"{found['title']} ({found['url']})"


def plain_name(model: str) -> str:
    """A model's name without owner and what publishers put before or behind it: "Meta-Llama-3.1-8B" → "llama-3.1-8b"."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    for ending in (".gguf", "-gguf", "-hf"):
        name = name.removesuffix(ending)
    return name.removeprefix("meta-")


def published(kind: str, name: str, model: str, parameters: int | None, why: str = "") -> Loss:
    """The loss of a format as the table has it, for a model of so many parameters.

    `kind` is "weights", "cache" or "techniques"; `why` is said of what has no figures.
    """
    relation: Mapping[str, Any] = {}
    rows = [row for row in figures(kind) if name in row.formats]
    chosen = _chosen(rows, plain_name(model), parameters)
    if not chosen and kind == "weights" and name in _table()["as"]:
        # Its own figures are of models of another size, or there are none: those of formats that are like it.
        relation = _table()["as"][name]
        rows = [row for row in figures(kind) if any(one in (name, *relation["formats"]) for one in row.formats)]
        chosen = _chosen(rows, plain_name(model), parameters)
    if not rows:
        return Loss(None, "", why or f"nobody is known to have published what {name} costs")
    if not chosen:
        others = ", ".join(f"{row.model} {row.percent:+.2g}%" for row in rows[:3])
        return Loss(None, "", f"what {name} costs is known of models of another size alone ({others})")
    if any(row.metric == "accuracy" for row in chosen):
        chosen = [row for row in chosen if row.metric == "accuracy"]
    spans = [row.span for row in chosen]
    percent = Range(min(low for low, _ in spans), median(row.percent for row in chosen), max(high for _, high in spans))
    sources = list(dict.fromkeys(row.source for row in chosen))
    sure = "high" if len(chosen) >= 3 and len(sources) > 1 else "medium" if len(chosen) > 1 else "low"
    if parameters is None or (relation and not relation.get("finer")) or all(row.quoted or row.most for row in chosen):
        sure = "low"
    words = [address(source) for source in sources]
    if relation:
        words.append(relation["because"])
    return Loss(percent, chosen[0].metric, "; ".join(words), False, sure, _basis(chosen))


def _chosen(rows: Sequence[Figure], name: str, parameters: int | None) -> list[Figure]:
    """Of these, those that stand for the model."""
    same = [row for row in rows if plain_name(row.model) == name]
    if same or parameters is None:
        return same or list(rows)
    billions = parameters / 1e9
    return [row for row in rows if row.billions[0] <= billions * NEAR and billions <= row.billions[1] * NEAR]


def _basis(rows: Iterable[Figure]) -> str:
    by_model: dict[str, list[str]] = {}
    for row in rows:
        by_model.setdefault(row.model, []).append(row.benchmark)
    return "; ".join(f"{model}: {', '.join(dict.fromkeys(tests))}" for model, tests in by_model.items())


class Measured(Record):
    """What a saved result says of one model; see kvctl.recommend.measured."""

    model: str
    parameters: int | None
    weights: Mapping[str, Loss]
    caches: Mapping[str, Loss]
    """With the model's own weights."""
    both: Mapping[tuple[str, str], Loss] = {}
    """Of a format of weights and one of the cache, together."""

    def of(self, model: str, parameters: int | None) -> bool:
        """Whether it is about this model: by name, or by its number of parameters."""
        same = self.parameters is not None and self.parameters == parameters
        return same or plain_name(self.model) == plain_name(model)


class Quality(Record):
    """What formats cost one model."""

    model: str
    parameters: int | None = None
    own_weights: str | None = None
    """The format that its maker published it in (a name of kvctl.weight_formats): what that costs is part of the model."""
    measured: tuple[Measured, ...] = ()
    """Saved results, the one that counts most first; those of other models are passed over."""

    @property
    def _results(self) -> tuple[Measured, ...]:
        return tuple(result for result in self.measured if result.of(self.model, self.parameters))

    def weights(self, name: str) -> Loss:
        """Of weights in a format of kvctl.weight_formats or a GGUF type."""
        low = _WEIGHTS.get(name.lower(), name.lower())
        if low == self.own_weights:
            return Loss(NOTHING, "", f"{self.model} is published in {low}")
        if low in _SIXTEEN:
            return Loss(NOTHING, "", f"{low} keeps what {self.own_weights or 'the model'} has")
        for result in self._results:
            if low in result.weights:
                return result.weights[low]
        return published("weights", low, self.model, self.parameters)

    def cache(self, name: str) -> Loss:
        """Of keys and values in a format, in an engine's word; "q8_0/q4_0" are keys and values in different ones."""
        low = "/".join(dict.fromkeys(_CACHE.get(part, part) for part in name.lower().split("/")))
        if all(part in _SIXTEEN for part in low.split("/")):
            return Loss(NOTHING, "", "the cache in 16 bits, as the model computes it")
        for result in self._results:
            if low in result.caches:
                return result.caches[low]
        found = published("cache", low, self.model, self.parameters)
        if found.percent is not None or "/" not in low:
            return found
        return _worse([self.cache(part) for part in low.split("/")], low)

    def technique(self, name: str) -> Loss:
        """Of a cache that lets tokens go, by its name in `kvctl profile --technique`."""
        measured = (result.caches[name] for result in self._results if name in result.caches)
        return next(measured, None) or published("techniques", name, self.model, self.parameters)

    def both(self, weights: str, cache: str) -> Loss:
        """Of both together: as measured together, or else one upon the other, (1 + a)(1 + b) - 1."""
        weights_name = _WEIGHTS.get(weights.lower(), weights.lower())
        cache_name = _CACHE.get(cache.lower(), cache.lower())
        for result in self._results:
            if (weights_name, cache_name) in result.both:
                return result.both[weights_name, cache_name]
        return _upon(self.weights(weights), self.cache(cache))


def same_cache(one: str, other: str) -> bool:
    """Whether two words, of whatever engine, name the same kind of cache."""
    first, second = (_CACHE.get(name.lower(), name.lower()) for name in (one, other))
    return first == second or {first, second} <= _SIXTEEN


def quality_of(spec: ModelSpec, measured: Sequence[Measured] = ()) -> Quality:
    """For a model as its configuration has it."""
    from kvctl.recommend.checkpoints import stored_format

    return Quality(spec.id, _parameters(spec), stored_format(spec), tuple(measured))


def _parameters(spec: ModelSpec) -> int | None:
    """As its files say, or counted from its configuration; None where neither does."""
    from kvctl.errors import KvctlError
    from kvctl.parameters import parameters

    if spec.weights is not None and spec.weights.parameters is not None:
        return spec.weights.parameters
    try:
        return (
            sum(tensor.elements * tensor.count for tensor in parameters(spec.config, "BF16", whole=spec.whole)) or None
        )
    except KvctlError:
        return None


def _worse(losses: Sequence[Loss], name: str) -> Loss:
    """Keys in one format and values in another: no more than all in the worse of the two."""
    unknown = next((loss for loss in losses if loss.percent is None), None)
    if unknown is not None:
        return unknown
    worst = max(losses, key=lambda loss: loss.percent.mid if loss.percent is not None else 0.0)
    assert worst.percent is not None
    return worst.replace(
        percent=Range(0.0, worst.percent.mid, worst.percent.high), measured=False, sure="low",
        basis=f"{name}: at most what both in the worse format lose; {worst.basis}",
    )  # fmt: skip


def _upon(first: Loss, second: Loss) -> Loss:
    for one, other in ((first, second), (second, first)):
        if one.percent is None:
            return one
        if one.percent == NOTHING:
            return other
    assert first.percent is not None
    assert second.percent is not None
    together = [
        100 * ((1 + a / 100) * (1 + b / 100) - 1)
        for a, b in zip(_values(first.percent), _values(second.percent), strict=True)
    ]
    order = ("low", "medium", "high")
    metric = first.metric if first.metric == second.metric else f"{first.metric}, {second.metric}"
    return Loss(
        Range(*together), metric, f"{first.source}; {second.source}", first.measured and second.measured,
        min(first.sure or "low", second.sure or "low", key=order.index), f"one upon the other: {first.basis}; {second.basis}",
    )  # fmt: skip


def _values(found: Range) -> tuple[float, float, float]:
    return found.low, found.mid, found.high
