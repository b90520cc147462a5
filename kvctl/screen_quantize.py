"""What `kvctl quantize` shows: sizes, what they cost in quality, and what the freed memory buys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.sources.jsonfile import plain
from kvctl.units import format_bytes, format_seconds, plural
from kvctl.words import one_line

if TYPE_CHECKING:
    from kvctl.measure.quality import Quality
    from kvctl.reports import Fit
    from kvctl.screen_lines import Row as Line
    from kvctl.screen_lines import Screen
    from kvctl.weights.judge import CacheJudged, Judged
    from kvctl.weights.kv_run import KvPart
    from kvctl.weights.report import QuantizeReport, Row

_HALVES = ("keys", "values")
_SIZES = ["weights", "bytes", "bits"]
_MAKING = ["memory", "disk"]
_QUALITY = ["perplexity", "change", "±", "KL", "top-1", "tokens/s"]
_FITS = ["longest", "requests"]


class _Table:
    """A heading and a row for each format, or for each with each format of the cache; columns in groups that stay together."""

    def __init__(self, report: QuantizeReport) -> None:
        self.matrix = any(row.caches for row in report.rows)
        self.lead = ["", "format", "cache"] if self.matrix else ["", "format"]
        sizes = ["weights", f"cache at {report.context:,}", "both", "bits"] if self.matrix else _SIZES
        quality = any(row.judged is not None for row in report.rows)
        parts = [(sizes, True), (_MAKING, report.dry), (_QUALITY, quality), (_FITS, report.gpus is not None)]
        self.groups = [names for names, shown in parts if shown]
        self.rows: list[tuple[list[str], str]] = []
        for row in report.rows:
            limit = report.model.max_context
            making = _making(row) if report.dry else []
            weights, held, bits = _size(row)
            if not row.caches:
                cells = [weights, held, bits, *making, *(_quality(row.judged) if quality else [])]
                cells += _fit_cells(row.fit, limit) if report.gpus is not None else []
                # One that could not be made, where others stand in the matrix.
                lead = ["", row.name, "–"] if self.matrix else ["*" if row.pareto else "", row.name]
                cells = [held, "–", "–", *cells[2:]] if self.matrix else cells
                self.rows.append((lead + cells, "red" if row.error is not None or row.broken else ""))
            for cell in row.caches:
                both = "–" if row.bytes is None else format_bytes(row.bytes + cell.kv_bytes)
                found = _quality(cell.judged) if quality else []
                cells = [held, f"{cell.kv_bytes:,}", both, bits, *making, *found]
                cells += _fit_cells(cell.fit, limit) if report.gpus is not None else []
                bad = bool(cell.broken) or (cell.judged is not None and cell.judged.error is not None)
                lead = ["*" if cell.pareto else "", row.name, cell.name]
                self.rows.append((lead + cells, "red" if bad else ""))

    @property
    def head(self) -> list[str]:
        return [*self.lead, *(name for names in self.groups for name in names)]


def table_of(report: QuantizeReport) -> list[list[str]]:
    """A heading and a row for each format; the mark of the best is the last column."""
    if report.kv is not None:
        return _cache(report.kv, report.gpus is not None, report.model.max_context)
    table = _Table(report)
    marked = any(cells[0] for cells, _ in table.rows)
    return [
        cells[1:] + cells[:1] * marked for cells in (["best", *table.head[1:]], *(cells for cells, _ in table.rows))
    ]


def lines_of(report: QuantizeReport) -> list[tuple[str, str]]:
    """What is said under the table, with its style."""
    out = []
    if report.kv is not None:
        out += [(line, "") for line in _cache_lines(report.kv)]
        out += [(line, "dim") for line in _cache_footer(report, report.kv)]
        return out
    for row in report.rows:
        if row.error is not None:
            out.append((f"{row.name}: {row.error}", "red"))
        for cell in row.caches:
            if cell.judged is not None and cell.judged.error is not None:
                out.append((f"{row.name}, {cell.name}: {cell.judged.error}", "red"))
        if row.fit is not None and not row.fit.fits:
            out.append((f"{row.name} does not fit on {report.gpus}: {row.fit.why}", "red"))
    out += [(line, "") for row in report.rows[1:] for line in _lines(report, row)]
    return out + [(line, "dim") for line in _footer(report)]


def print_quantize(screen: Screen, report: QuantizeReport) -> None:
    """The table, and the lines that explain it."""
    if report.kv is not None:
        _print_cache(screen, report, report.kv)
        return
    table = _Table(report)
    lines: list[Line] = [(table.head, None, "dim"), *((cells, None, style) for cells, style in table.rows)]
    lead = len(table.lead)
    screen.tables(
        lead, "l" * lead + "r" * (len(table.head) - lead), lines, [len(names) for names in table.groups], bold=lead
    )
    for line, style in lines_of(report):
        screen.line(one_line(line), style)


def _size(row: Row) -> list[str]:
    if row.bytes is None or row.bits is None:
        return ["–", "–", "–"]
    held = f"{row.bytes:,}"
    if row.tensor_bytes is not None and row.predicted_bytes not in (None, row.tensor_bytes):
        held += f" ({row.predicted_bytes or 0:,} predicted)"
    return [format_bytes(row.bytes), held, f"{row.bits:.2f}"]


def _making(row: Row) -> list[str]:
    return ["–" if size is None else format_bytes(size) for size in (row.predicted_peak_bytes, row.disk_bytes)]


def _quality(judged: Judged | CacheJudged | None) -> list[str]:
    if judged is None or judged.perplexity is None:
        return ["–"] * len(_QUALITY)
    return [
        f"{judged.perplexity:.4g}",
        *_compared(judged.quality),
        "–" if judged.tokens_per_second is None else _rate(judged.tokens_per_second),
    ]


def _compared(found: Quality | None) -> list[str]:
    """Change of perplexity, its error, divergence, agreement; empty for what others are compared with."""
    if found is None:
        return [""] * 4
    change = found.perplexity_change
    error = "?" if change.error is None else f"{change.error:.2g}%"
    return [f"{change.value:+.2f}%", error, f"{found.kl.value:.3g}", f"{found.top1.value:.1%}"]


def _rate(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _fit_cells(fit: Fit | None, limit: int | None) -> list[str]:
    """The longest context of one request, as far as the model goes, and requests of the context that is asked about."""
    if fit is None:
        return ["–", "–"]
    longest = fit.max_context
    if longest is None or (limit is not None and longest > limit):
        longest_words = "any" if limit is None else f"{limit:,}+"
    else:
        longest_words = f"{longest:,}" if longest else "none"
    return [longest_words, f"{fit.max_concurrency:,}" if fit.max_concurrency else "none"]


def _lines(report: QuantizeReport, row: Row) -> list[str]:
    """Of one format: what was checked, and what it buys."""
    out = []
    if row.freed_bytes is not None and row.freed_bytes > 0:
        words = f"{row.name} frees {format_bytes(row.freed_bytes)}"
        if row.freed_tokens:
            words += f": room for {row.freed_tokens:,} more tokens of KV cache"
        out.append(words)
    ranks = row.facts.get("tensor_parallel")
    if ranks:
        out.append(
            f"{row.name}: groups of {row.group} stay whole on {_listed(ranks)} tensor-parallel rank{'s' if ranks != [1] else ''}"
        )
    if "output_error" in row.facts and row.name == "awq":
        out.append(
            f"{row.name}: error of the layers' outputs {row.facts['output_error']:.3g}, "
            f"rounded to nearest {row.facts['output_error_rounded_to_nearest']:.3g}"
        )
    out += [f"{row.name}: {words}" for words in row.checked if len(report.rows) == 2]
    if row.folder is not None and not report.dry:
        peak = "" if row.peak_bytes is None else f", {format_bytes(row.peak_bytes)} of memory at its most"
        took = "" if row.seconds is None else f", made in {format_seconds(row.seconds)}"
        out.append(f"{plain(str(row.folder))}: complete, reloaded and measured{took}{peak}")
    return out


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _footer(report: QuantizeReport) -> list[str]:
    out = []
    judged = next((row.judged for row in report.rows[1:] if row.judged is not None), None)
    if judged is not None and judged.quality is not None:
        found = judged.quality
        beside = " of weights and cache" if any(row.caches for row in report.rows) else ""
        by = sorted({row.judged.by for row in report.rows if row.judged is not None})
        out.append(
            f"{plural(found.tokens, 'token')} of text, paired with the original's; ± is a standard error; KL in nats; "
            f"bits: a parameter, with scales and what is not packed; *: no other is as good in fewer bytes{beside}; run by {', '.join(by)}"
        )
    cells = [cell for row in report.rows for cell in row.caches if cell.agrees is not None]
    if cells:
        tokens = max(cell.judged.kv_tokens for cell in cells if cell.judged is not None)
        agree = sum(bool(cell.agrees) for cell in cells)
        out.append(
            f"caches of {plural(tokens, 'token')} held as many bytes as predicted"
            + ("" if agree == len(cells) else f" in {agree} of {len(cells)}; JSON has the others")
            + "; plain: in the model's own dtype; each text is read through the cache, and its second half scored"
        )
        if any(cell.name == "fp8" for cell in cells):
            out.append(
                "fp8: with scale 1.0, as engines run it on a checkpoint without scales; fp8:scaled measures them"
            )
    if report.gpus is not None:
        out.append(_fit_words(report))
    if report.dry:
        out.append(
            "nothing was made; bytes are exact (of nf4-dq to a few), memory is beside what Python, torch and transformers take themselves"
            + ("" if report.process_bytes is None else f", {format_bytes(report.process_bytes)} here")
        )
    return out


def _fit_words(report: QuantizeReport) -> str:
    limit = report.model.max_context
    return (
        f"on {report.gpus}, by transformers' rules: the longest context of one request"
        + (f" (+: the model ends at {limit:,})" if limit is not None else "")
        + f", and requests of {report.context:,} tokens at once; what is taken beside weights and cache is estimated"
    )


# -- the cache ------------------------------------------------------------------------------


def _cache(part: KvPart, fits: bool, limit: int | None) -> list[list[str]]:
    rows = [
        [
            "format",
            f"bytes at {part.context:,}",
            "smaller",
            "change",
            "±",
            "KL",
            "p99",
            "top-1",
            *(_FITS if fits else []),
        ]
    ]
    plain = part.rows[0].kv_bytes
    for row in part.rows:
        cells = _compared(row.quality)
        cells.insert(3, "" if row.quality is None else f"{row.quality.kl_p99:.2g}")
        rows.append(
            [
                row.name,
                f"{row.kv_bytes:,}",
                f"{plain / row.kv_bytes:.2f}×",
                *cells,
                *(_fit_cells(row.fit, limit) if fits else []),
            ]
        )
    return rows


def _print_cache(screen: Screen, report: QuantizeReport, part: KvPart) -> None:
    """What formats cost, which flags ask for them, and what was written."""
    cells = _cache(part, report.gpus is not None, report.model.max_context)
    styles = ["dim", *("red" if row.broken else "bold" if row.name == part.which else "" for row in part.rows)]
    table: list[Line] = [(row, None, style) for row, style in zip(cells, styles, strict=True)]
    screen.tables(1, "l" + "r" * (len(cells[0]) - 1), table, (2, 5) if report.gpus is None else (2, 5, 2))
    for line, style in lines_of(report):
        screen.line(one_line(line), style)


def _cache_footer(report: QuantizeReport, part: KvPart) -> list[str]:
    out = []
    found = next((row.quality for row in part.rows if row.quality is not None), None)
    if found is not None:
        out.append(f"{plural(found.tokens, 'token')} of text, each read through the cache, in {part.dtype}; change of perplexity "
                   f"{found.plain_perplexity:.4g} plain; ± is a standard error; KL in nats")  # fmt: skip
    return [*out, _fit_words(report)] if report.gpus is not None else out


def _cache_lines(part: KvPart) -> list[str]:
    out = [f"checkpoint: {part.there}"]
    if part.layers:
        top = max(part.layers, key=lambda layer: max(layer[half]["largest"] for half in _HALVES))
        cut = max(layer[half]["cut"] for half in _HALVES for layer in part.layers)
        most = max(top[half]["largest"] for half in _HALVES)
        words = f"scale 1.0 cuts off up to {cut:.2%} of a layer's" if cut else "scale 1.0 cuts nothing off"
        out.append(f"largest key or value: {most:.4g} in layer {top['layer']}; {words}")
    if part.written is not None:
        sure = "less than 1.0 costs" + ("" if part.sure else ", though by no more than chance may do")
        which = (part.which or "").removeprefix("fp8, ")
        out.append(
            f"{plain(str(part.written))}: {part.tensors} scales ({which}), read back as written; they cost {sure}"
        )
    for name, engine, flags, warnings in part.uses:
        out.append(f"{name} in {engine}: {' '.join(flags) or 'follows from the checkpoint'}")
        out += [f"warning: {warning}" for warning in warnings]
    return out
