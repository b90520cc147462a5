"""Whether it fits, on a terminal: the verdict, where the memory goes, and what to change."""

from __future__ import annotations

from itertools import groupby

from rich.text import Text

from kvctl.reports import Fit, SizeResult
from kvctl.screen_lines import Row, Screen
from kvctl.units import format_bytes, plural
from kvctl.words import device_words, one_line, share_words, signed_bytes, unicode_output, verdict_words

_STYLES = {"weights": "blue", "KV cache": "cyan", "headroom": "green", "left free": "bright_black",
           "in use": "red"}  # fmt: skip
_OVERHEAD = ("magenta", "yellow", "bright_magenta", "bright_yellow")
_MARKS = {"weights": "█", "KV cache": "▓", "headroom": "░", "left free": "·", "in use": "✕"}
_OTHER_MARKS = "▒▚▤▩▞▥"
_LETTERS = {"weights": "W", "KV cache": "K", "headroom": ".", "left free": "-", "in use": "x"}


def print_verdict(screen: Screen, result: SizeResult) -> None:
    """One line that says it all."""
    fit = result.fit
    assert fit is not None
    screen.line(one_line(verdict_words(result)), "bold green" if fit.fits else "bold red")


def print_fit(screen: Screen, result: SizeResult) -> None:
    """The parts of the fullest rank as a bar and a list, how much more would fit, and what to change."""
    fit = result.fit
    assert fit is not None
    print_verdict(screen, result)
    screen.line()
    parts = _parts(
        fit, on_host=result.allocation is not None and result.allocation.device == "cpu" and not fit.kv_bytes
    )
    whole = f"{device_words(fit)}: {format_bytes(fit.device_bytes)} for applications"
    if len(fit.ranks) > 1:
        whole = f"rank {fit.bottleneck_rank} of {len(fit.ranks)}, the one that decides; {whole}"
    screen.line(one_line(whole), "dim")
    screen.console.print(_bar(parts, fit, min(96, screen.console.width - 1)), soft_wrap=True)
    rows: list[Row] = []
    for name, size, style, mark, rule in parts:
        rows.append(((mark, name, signed_bytes(size),
                      share_words(max(size, 0), fit.device_bytes)), Text(one_line(rule), style="dim"), style))  # fmt: skip
    if fit.headroom_bytes < 0:
        edge = "│" if unicode_output() else "|"
        missing = share_words(-fit.headroom_bytes, fit.device_bytes)
        rows.append(((edge, "missing", format_bytes(-fit.headroom_bytes), missing),
                     Text("what lies behind the end of the memory", style="dim"), "bold red"))  # fmt: skip
    _list(screen, rows)
    if len({rank.headroom_bytes for rank in fit.ranks}) > 1:
        screen.line()
        _ranks(screen, fit)
    screen.line()
    for name, value in _more(result, fit):
        screen.line(Text.assemble((name.ljust(18), "dim"), one_line(value)), indent=18)


def _ranks(screen: Screen, fit: Fit) -> None:
    """A row for every rank, where they differ."""
    rows: list[Row] = [(("rank", "device", "weights", "KV cache", "headroom"), None, "dim")]
    for _, group in groupby(fit.ranks, key=lambda rank: rank.replace(rank=0)):
        alike = list(group)
        rank = alike[0]
        span = str(rank.rank) if len(alike) == 1 else f"{rank.rank}–{alike[-1].rank}"
        cells = (span, one_line(rank.device), format_bytes(rank.weights_bytes), format_bytes(rank.kv_bytes),
                 signed_bytes(rank.headroom_bytes))  # fmt: skip
        rows.append((cells, None, "red" if rank.headroom_bytes < 0 else ""))
    screen.table("rlrrr", rows)


def _parts(fit: Fit, *, on_host: bool = False) -> list[tuple[str, int, str, str, str]]:
    """Name, bytes, style, mark and words of every part of the device."""
    weights = "; ".join(words.partition(": ")[2] for words in fit.estimated if words.startswith("weights: "))
    rows = [("weights", fit.weights_bytes, f"estimated: {weights}" if weights else ""),
            ("KV cache", fit.kv_bytes, "of this workload" + (", in host memory" if on_host else ""))]  # fmt: skip
    rows += [(part.name, part.bytes, ("estimated: " if part.estimated else "") + part.rule) for part in fit.parts]
    if fit.headroom_bytes >= 0:
        rows.append(
            ("headroom", fit.headroom_bytes, "for more tokens or requests" if fit.fits else "not what is short")
        )
    out = []
    spare = iter(_OVERHEAD)
    letters, others = iter("agrstuv"), iter(_OTHER_MARKS)
    for name, size, rule in rows:
        style = _STYLES.get(name) or next(spare, "magenta")
        if unicode_output():
            mark = _MARKS.get(name) or next(others, "▒")
        else:
            mark = _LETTERS.get(name) or next(letters, "o")
        out.append((name, size, style, mark, rule))
    return out


def _bar(parts: list[tuple[str, int, str, str, str]], fit: Fit, width: int) -> Text:
    """The device's memory from end to end; what does not fit goes on behind a mark."""
    total = max(fit.device_bytes, sum(size for _, size, _, _, _ in parts if size > 0))
    text = Text()
    done = cells = 0
    for _, size, style, mark, _ in parts:
        if size <= 0:
            continue
        done += size
        upto = max(round(width * done / total), cells + 1)
        text.append(mark * (upto - cells), style=style)
        cells = upto
    if total > fit.device_bytes:
        edge = max(1, round(width * fit.device_bytes / total))
        text = Text.assemble(text[:edge], ("│" if unicode_output() else "|", "bold red"), text[edge + 1 :])
    return text[:width]


def _list(screen: Screen, rows: list[Row]) -> None:
    widths = [max(len(row[0][column]) for row in rows) for column in range(4)]
    for cells, tail, style in rows:
        mark, name, size, share = cells
        text = Text.assemble((mark, style), " ", name.ljust(widths[1]), "  ", (size.rjust(widths[2]), "bold"), "  ",
                             share.rjust(widths[3]), "  ")  # fmt: skip
        indent = text.cell_len
        if tail is not None:
            text.append_text(tail)
        text.rstrip()
        screen.line(text, indent=indent)


def _more(result: SizeResult, fit: Fit) -> list[tuple[str, str]]:
    """How much more would fit, and what to change."""
    rows = []
    each = "" if result.sequences == 1 else f" in each of {result.sequences:,} requests"
    told = result.beyond_device
    given = " in the budget that is told, which the device has not" if told else ""
    if fit.max_context is None:
        rows.append(("longest context", "any: nothing of the cache grows with it"))
    else:
        limit = result.model.max_context
        own = f"; the model's own maximum is {limit:,}" if limit and fit.max_context > limit else ""
        rows.append(
            ("longest context", f"{plural(fit.max_context, 'token')}{each}{given}{own}" if fit.max_context else "none")
        )
    rows.append(("requests at once", f"{fit.max_concurrency:,} of {result.context:,} tokens{given}"))
    if fit.capacity_tokens is not None:
        rows.append(
            (
                "memory for cache",
                f"{format_bytes(fit.kv_budget_bytes)} {'told' if told else 'on the rank that decides'}, {fit.capacity_tokens:,} tokens",
            )
        )
    if result.allocation is not None and fit.fits:
        rows += [
            ("all is reserved", reason) for reason in result.allocation.reasons if "--kv-cache-memory-bytes" in reason
        ]
    for index, words in enumerate(fit.advice):
        checkpoint = " (a checkpoint so quantised)" if "--weights-dtype" in words else ""
        rows.append(("it fits with" if not index else "or", words + checkpoint))
    if not fit.fits and not fit.advice:
        more = ", up to 16 such GPUs" if len({rank.device for rank in fit.ranks}) == 1 else ""
        rows.append(("it fits with", f"nothing that was tried: a smaller format, fewer tokens{more}"))
    return rows
