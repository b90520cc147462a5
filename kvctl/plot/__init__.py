"""Memory and time against context, or quality against bytes, as a picture (SVG, PNG, HTML) or on the terminal."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvctl.errors import UsageError
from kvctl.files import write_whole
from kvctl.plot.chart import Chart, Curve, Limit, Mark, checked

if TYPE_CHECKING:
    from kvctl.plot.scatter import Scatter

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


def _drawing(chart: Chart | Scatter) -> tuple[Any, Any, Any, Any]:
    """The chart, checked, and what lays it out, makes a web page of it and draws it on a terminal."""
    if isinstance(chart, Chart):
        from kvctl.plot import html, picture, text

        return checked(chart), picture.page, html.html, text.drawn
    from kvctl.plot import scatter

    return scatter.checked(chart), scatter.page, scatter.html, scatter.drawn


def render(chart: Chart | Scatter, kind: str) -> bytes:
    """The bytes of a picture; the same chart gives the same bytes."""
    chart, page, html, _ = _drawing(chart)
    if kind == "html":
        return bytes(html(chart), "utf-8")
    if kind == "svg":
        from kvctl.plot.svg import svg

        return svg(page(chart), name=chart.title).encode()
    if kind == "png":
        from kvctl.plot.png import png

        return png(page(chart))
    raise ValueError(f"no pictures of kind {kind}")


def terminal(chart: Chart | Scatter, width: int, height: int, *, colour: bool, unicode: bool) -> str:
    """The chart as lines of at most `width` columns; the last one ends in a newline too."""
    chart, _, _, drawn = _drawing(chart)
    return str(drawn(chart, width, height, colour=colour, unicode=unicode))


def write(chart: Chart | Scatter, path: str) -> None:
    """Draw into a file, whole or not at all: a file that was there stays until the new one is complete."""
    write_whole(path, render(chart, kind_of(path)))
