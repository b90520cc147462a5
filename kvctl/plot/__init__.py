"""Memory and time against context as a picture (SVG, PNG, HTML) or on the terminal."""

from __future__ import annotations

import os

from kvctl.errors import UsageError
from kvctl.files import write_whole
from kvctl.plot.chart import Chart, Curve, Limit, Mark, checked

__all__ = ["Chart", "Curve", "Limit", "Mark", "kind_of", "render", "terminal", "write"]

_KINDS = ("svg", "png", "html")


def kind_of(path: str) -> str:
    """svg, png or html by the ending of a path; terminal for "-"."""
    if path == "-":
        return "terminal"
    kind = os.path.splitext(path)[1][1:].lower()
    if kind not in _KINDS:
        raise UsageError(
            f"--plot: {path[:200]!r} ends in none of .svg, .png, .html",
            hint="name a file with one of these endings, or - for the terminal",
        )
    return kind


def render(chart: Chart, kind: str) -> bytes:
    """The bytes of a picture; the same chart gives the same bytes."""
    chart = checked(chart)
    if kind == "html":
        from kvctl.plot.html import html

        return html(chart).encode()
    from kvctl.plot.picture import page

    if kind == "svg":
        from kvctl.plot.svg import svg

        return svg(page(chart), name=chart.title).encode()
    if kind == "png":
        from kvctl.plot.png import png

        return png(page(chart))
    raise ValueError(f"no pictures of kind {kind}")


def terminal(chart: Chart, width: int, height: int, *, colour: bool, unicode: bool) -> str:
    """The chart as lines of at most `width` columns; the last one ends in a newline too."""
    from kvctl.plot.text import drawn

    return drawn(checked(chart), width, height, colour=colour, unicode=unicode)


def write(chart: Chart, path: str) -> None:
    """Draw into a file, whole or not at all: a file that was there stays until the new one is complete."""
    write_whole(path, render(chart, kind_of(path)))
