"""A page as PNG, through matplotlib used as a canvas."""

from __future__ import annotations

import io
import logging
import warnings
from typing import Any

from kvctl.errors import KvctlError, UsageError
from kvctl.plot.colours import LIGHT
from kvctl.plot.picture import Page

_DOTS = 2
"""Pixels of the file for each pixel of the page: sharp on today's screens."""


def png(page: Page) -> bytes:
    """The picture in light colours."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it talks about its font cache
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise KvctlError(f"matplotlib does not load: {error}") from None
        raise UsageError(
            "PNG pictures need matplotlib, which is not installed",
            hint="pip install 'kvctl[plot]', or write .svg or .html, which need nothing",
        ) from None
    except (ImportError, ValueError) as error:  # a broken installation, or an MPLBACKEND that is none
        raise KvctlError(f"matplotlib does not load: {error}", hint="write .svg or .html, which need nothing") from None
    # Someone's own matplotlibrc must not change the picture; a character without a glyph is no news.
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        matplotlib.rcdefaults()
        figure = Figure(figsize=(page.width / 100, page.height / 100), dpi=100 * _DOTS, facecolor=LIGHT["background"])
        FigureCanvasAgg(figure)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, page.width), ylim=(page.height, 0))
        axes.axis("off")
        _draw(axes, page)
        target = io.BytesIO()
        figure.savefig(target, format="png", metadata={"Software": "kvctl"})
    return target.getvalue()


def _draw(axes: Any, page: Page) -> None:
    from matplotlib.patches import Rectangle

    point = 0.72  # points (1/72 inch) for each pixel of the page (1/100 inch)
    for line in page.lines:
        xs, ys = zip(*line.points, strict=True)
        (drawn,) = axes.plot(xs, ys, color=LIGHT[line.ink], linewidth=line.width * point, solid_joinstyle="round")
        if line.dash:
            on, off, offset = line.dash
            # matplotlib counts dashes in line widths.
            drawn.set_linestyle((-offset / line.width, (on / line.width, off / line.width)))
    for dot in page.dots:
        if dot.radius:
            axes.plot(*dot.at, "o", color=LIGHT[dot.ink], markersize=2 * dot.radius * point, markeredgewidth=0)
    for label in page.labels:
        if label.box is not None:
            x, y, width, height = label.box
            back = LIGHT["background"]
            axes.add_patch(Rectangle((x, y), width, height, facecolor=back, alpha=0.75, linewidth=0, zorder=2.5))
        axes.text(
            *label.at,
            label.text,
            color=LIGHT[label.ink],
            fontsize=label.size * point,
            fontweight="bold" if label.bold else "normal",
            ha={"start": "left", "middle": "center", "end": "right"}[label.anchor],
            va="baseline",
            parse_math=False,  # a $ in a name is a $
            zorder=3,
        )
