"""A load while it runs: a few lines that are drawn over and over.

They are put together by hand: a frame took 0.15 ms of a core, and 2.0 ms through rich's Live on the same machine. The thread that is
timed may have to wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvctl.loadtest.verdict import FULL
from kvctl.units import format_seconds, plural
from kvctl.words import one_line, shortened

if TYPE_CHECKING:
    from kvctl.loadtest.live import Moment

_BLOCKS, _ASCII = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
_LABEL = 10
"""Columns of what a line is about."""
_DIM, _BOLD, _RED, _CYAN, _YELLOW = "2", "1", "31", "36", "33"
Part = tuple[str, str]
"""A text, and its SGR codes."""


def frame(seen: Moment, width: int, *, colour: bool, unicode: bool) -> list[str]:
    """Lines of at most `width` columns."""
    spark = max(8, min(60, width - _LABEL - 30))
    lines = [_head(seen, width, unicode), _requests(seen)]
    if seen.kv_use is not None or seen.running is not None or seen.waiting is not None:
        lines.append(_cache(seen, width, unicode))
    for name, values in (("TTFT", seen.ttft), ("TPOT", seen.tpot)):
        if values is not None:
            lines.append([_named(name), *_course(values, spark, unicode, format_seconds)])
    if seen.events is not None:
        lines.append([_named("output"), *_course(seen.events, spark, unicode, lambda value: f"{value:,.0f} events/s")])
    return [_joined(line, width, colour) for line in lines]


def bar(share: float, width: int, *, unicode: bool) -> str:
    """A bar of eighths in a trough."""
    share = min(max(share, 0.0), 1.0)
    if not unicode:
        return ("#" * round(width * share)).ljust(width, ".")
    eighths = round(8 * width * share)
    return ("█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]).ljust(width, "░")


def sparkline(values: Sequence[float | None], width: int, *, unicode: bool) -> str:
    """The last `width` values as blocks over the largest of them; a gap where there is none."""
    shown = list(values[-width:])
    top = max((value for value in shown if value is not None), default=0.0)
    marks = _BLOCKS if unicode else _ASCII
    cells = [" " if value is None else marks[1 + round(7 * value / top)] if top else marks[1] for value in shown]
    return "".join(cells).rjust(width)


def _named(text: str) -> Part:
    return text.ljust(_LABEL), _DIM


def _head(seen: Moment, width: int, unicode: bool) -> list[Part]:
    of = f"{seen.number} of {seen.of}" if seen.of is not None else f"load {seen.number}"
    name = shortened(one_line(seen.name), max(8, width // 3))
    room = max(6, min(24, width - len(of) - len(name) - 34))
    shares = [] if seen.part is None else [(bar(seen.part, room, unicode=unicode), _CYAN), ("  ", "")]
    state = "warming up, " if seen.warming else "" if seen.part is None else f"{seen.part:.0%} of {seen.goal}, "
    return [(of.ljust(_LABEL), _DIM), (name, _BOLD), ("  ", ""), *shares, (f"{state}{_clock(seen.seconds)}", "")]


def _clock(seconds: float) -> str:
    """ "12 s", "3:07", "1:02:03"."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _requests(seen: Moment) -> list[Part]:
    return [
        _named("requests"), (f"{seen.good:,} good  ", ""), (f"{seen.failed:,} failed", _RED if seen.failed else ""),
        (f"  {seen.under_way:,} under way", ""),
    ]  # fmt: skip


def _cache(seen: Moment, width: int, unicode: bool) -> list[Part]:
    parts = [_named("KV cache")]
    if seen.kv_use is not None:
        full = seen.kv_use >= FULL
        room = max(6, min(24, width - _LABEL - 48))
        parts += [
            (bar(seen.kv_use, room, unicode=unicode), _RED if full else _CYAN),
            (f" {seen.kv_use:4.0%}", _RED if full else ""),
        ]
    for value, words, bad in (
        (seen.running, "running", ""),
        (seen.waiting, "waiting", _YELLOW),
        (seen.preempted, "preempted", _RED),
    ):
        if value is not None:
            parts.append((f"  {value:,.0f} {words}", bad if value else ""))
    return parts


def _course(values: Sequence[float | None], width: int, unicode: bool, words: Callable[[float], str]) -> list[Part]:
    last = next((value for value in reversed(values) if value is not None), None)
    said = "" if last is None else words(last) if unicode else words(last).replace("µ", "u")
    return [(sparkline(values, width, unicode=unicode), _CYAN), (f"  {said}", "")]


def _joined(parts: Sequence[Part], width: int, colour: bool) -> str:
    """In one line, cut where it is too long."""
    out, room = [], width
    for text, style in parts:
        text = text[:room]
        room -= len(text)
        out.append(f"\x1b[{style}m{text}\x1b[0m" if colour and style and text.strip() else text)
    return "".join(out).rstrip()


def done_words(name: str, good: int, failed: int, ttft: float | None, tpot: float | None, rate: float | None) -> str:
    """A load that is over: "16 at once: 60 good, TTFT 47 ms, TPOT 13 ms, 520 tokens/s"."""
    parts = [f"{good:,} good" + (f", {plural(failed, 'failure')}" if failed else "")]
    parts += [
        f"{what} {format_seconds(value)}" for what, value in (("TTFT", ttft), ("TPOT", tpot)) if value is not None
    ]
    if rate is not None:
        parts.append(f"{rate:,.0f} output tokens/s")
    return one_line(f"{name}: {', '.join(parts)}")
