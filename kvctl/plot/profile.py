"""The chart of a profile: memory against context, and under it the time of a decode step; or techniques by quality."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from kvctl.errors import UsageError
from kvctl.measure.assessed import Assessment
from kvctl.measure.fits import Fitted, fitted
from kvctl.measure.report import Point, ProfileReport
from kvctl.measure.statistics import quantile
from kvctl.plot.chart import MOST_CURVES, Chart, Curve, Mark
from kvctl.plot.scatter import Scatter, Spot
from kvctl.units import format_bytes, format_seconds, plural

_FAR = 10
"""Memory beside the weights that is so many times the cache would press the cache's line flat: it stays out."""
_LOW, _HIGH = 0.05, 0.95


def chart_of(report: ProfileReport) -> Chart:
    """Measured marks on the predicted line of the cache, and on fitted lines of other memory and of TPOT.

    Raises:
        UsageError: nothing that could be drawn was measured.

    """
    batches = list(dict.fromkeys(point.batch for point in report.points))
    of_batch = {batch: [point for point in report.points if point.batch == batch] for batch in batches[:MOST_CURVES]}
    caches = _named("KV cache", {batch: _cache(points) for batch, points in of_batch.items()})
    peaks = _named("peak beside the weights", {batch: _peak(points) for batch, points in of_batch.items()})
    steps = _named("decode step", {batch: _steps(points) for batch, points in of_batch.items()})
    if len(caches) + len(peaks) > MOST_CURVES:
        peaks = ()
    name = _name(report)
    memory = Chart(
        title=f"{name}: memory against context",
        subtitle=_memory_words(report, caches, peaks),
        curves=(*caches, *peaks),
    )
    time = Chart(
        title=f"{name}: time per output token against context",
        subtitle="one step of the whole batch: ○ median, bars from the 5th to the 95th percentile"
        + (", lines fitted" if any(curve.points for curve in steps) else ""),
        curves=steps,
        y_label="TPOT",
        quantity="time",
    )
    panels = [panel for panel in (memory, time) if panel.curves]
    if not panels:
        raise UsageError("nothing to plot", hint="no point of this profile was measured")
    note = _note(report, len(batches))
    if len(panels) == 1:
        return panels[0].replace(note=note)
    return memory.replace(below=time.replace(note=note))


def _name(report: ProfileReport) -> str:
    """Of the model, without whose it is."""
    if report.model is None:
        return "profile"
    return report.model.id.rpartition("/")[2] or report.model.id


def quality_of(report: ProfileReport, found: Assessment) -> Scatter:
    """Divergence from the plain cache against bytes, a mark for each technique.

    Raises:
        UsageError: quality was not measured.

    """
    spots = []
    for row in found.rows:
        if row.quality is None or row.kv_bytes is None:
            continue
        kl = row.quality.kl
        error = kl.error or 0.0
        facts = (f"perplexity {row.quality.perplexity_change.value:+.2f}%", f"top-1 {row.quality.top1.value:.1%}")
        spots.append(Spot(row.name, row.kv_bytes, kl.value, kl.value - error, kl.value + error, row.pareto, facts))
    if not spots:
        raise UsageError("nothing to plot", hint="quality needs a text, and a model with a tokenizer")
    quality = next(row.quality for row in found.rows if row.quality is not None)
    name = _name(report)
    return Scatter(
        title=f"{name}: what smaller caches lose",
        spots=tuple(spots),
        subtitle=f"after {found.rows[0].tokens:,} tokens; bold and on the line: no other is as good in fewer bytes; bars: ± a standard error",
        note=f"{_note(report, 0)}; {quality.tokens:,} tokens of {found.text}",
        y_label="KL divergence from the plain cache (nats a token)",
    )


def _named(what: str, curves: dict[int, Curve | None]) -> tuple[Curve, ...]:
    """Curves named after what they show, and the batch where there are several."""
    several = len(curves) > 1
    return tuple(
        curve.replace(name=f"{what}, batch {batch:,}" if several else what)
        for batch, curve in curves.items()
        if curve is not None
    )


def _marks(found: dict[int, Mark]) -> tuple[Mark, ...]:
    return tuple(found[context] for context in sorted(found))


def _cache(points: Sequence[Point]) -> Curve | None:
    """The cache after prefill, over all ranks: there the cache holds the context."""
    measured, predicted = {}, {}
    for point in points:
        rows = [row for row in point.cache if row.phase == point.cache[0].phase]
        if rows:
            measured[point.context] = Mark(point.context, sum(row.logical_bytes for row in rows))
            predicted[point.context] = sum(row.predicted_bytes for row in rows)
    if not measured:
        return None
    wrong = [context for context, mark in measured.items() if mark.value != predicted[context]]
    fact = "as predicted, to the byte"
    if wrong:
        worst = max(wrong, key=lambda context: abs(measured[context].value - predicted[context]))
        fact = f"predicted: {format_bytes(predicted[worst])} at {plural(worst, 'token')}"
    return Curve("", tuple(sorted(predicted.items())), _marks(measured), "predicted", (fact,))


def _peak(points: Sequence[Point]) -> Curve | None:
    """What the process took at its most, beside what it held before the point."""
    taken = {point.context: point.memory.peak_bytes - point.memory.before_bytes for point in points if point.memory}
    taken = {context: size for context, size in taken.items() if size >= 0}
    most = max((sum(row.logical_bytes for row in point.held) for point in points), default=0)
    if not taken or (most and max(taken.values()) > _FAR * most):
        return None
    fit = fitted(list(taken), list(taken.values()), degree=1)
    marks = _marks({context: Mark(context, size) for context, size in taken.items()})
    facts = () if fit is None else (f"{format_bytes(max(0, round(fit.coefficients[1])))} a token of context",)
    return Curve("", _line(fit, list(taken)), marks, "fitted", facts)


def _steps(points: Sequence[Point]) -> Curve | None:
    """Decode steps in nanoseconds."""
    samples = {point.context: point.tpot for point in points if point.tpot is not None}
    if not samples:
        return None
    marks = {
        context: Mark(context, *(_nanoseconds(value) for value in (
            sample.median, quantile(sample.values, _LOW), quantile(sample.values, _HIGH))))
        for context, sample in samples.items()
    }  # fmt: skip
    times = [Fraction(sample.median) * 10**9 for sample in samples.values()]
    fit = fitted(list(samples), times, degree=1, relative=True)
    facts: tuple[str, ...] = ()
    if fit is not None:
        start, slope = fit.coefficients
        sign = "+" if slope >= 0 else "−"
        more = format_seconds(abs(slope) * 1024 / 1e9)
        facts = (f"{format_seconds(max(0.0, start) / 1e9)} {sign} {more} every 1,024 tokens",)
    return Curve("", _line(fit, list(samples)), _marks(marks), "fitted", facts)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _line(fit: Fitted | None, contexts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """A fitted line from the first context to the last: no further than it was measured."""
    if fit is None:
        return ()
    start, slope = fit.coefficients
    return tuple((context, max(0, round(start + slope * context))) for context in (min(contexts), max(contexts)))


def _memory_words(report: ProfileReport, caches: Sequence[Curve], peaks: Sequence[Curve]) -> str:
    words = ["○ measured"]
    if any(len(curve.points) > 1 for curve in caches):
        words.append("line of the cache: predicted" if peaks else "line: predicted")
    if any(curve.points for curve in peaks):
        words.append("line of the peak: fitted")
    if caches and report.ranks > 1:
        words.append(f"cache of all {report.ranks} ranks")
    return "; ".join(words)


def _note(report: ProfileReport, batches: int) -> str:
    engine = f"{report.engine} {report.engine_version}" if report.engine_version else report.engine
    parts = [f"kvctl {report.version}", engine]
    parts += [str(value) for value in (report.dtype, report.settings.get("device")) if value]
    if batches > MOST_CURVES:
        parts.append(f"{batches - MOST_CURVES} more batches are not drawn")
    if report.interrupted:
        parts.append("interrupted")
    return "; ".join([*parts, "GiB is 2^30 bytes"])
