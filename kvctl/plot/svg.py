"""A page as SVG: text stays text, every number is rounded, so the same chart is the same bytes."""

from __future__ import annotations

from html import escape

from kvctl.plot.colours import DARK, LIGHT
from kvctl.plot.picture import Dot, Label, Line, Page, Point

_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def svg(page: Page, *, name: str, alone: bool = True) -> str:
    """An image; `alone` as a file of its own, else as part of a web page. `name` is for screen readers."""
    parts = ['<?xml version="1.0" encoding="UTF-8"?>'] if alone else []
    parts.append(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {page.width} {page.height}" width="{page.width}"'
        f' height="{page.height}" role="img" aria-label="{escape(name)}" font-family="{_FONT}">'
    )
    if alone:
        parts.append(f"<title>{escape(name)}</title>")
    parts.append(f"<style>{_style()}</style>")
    parts.append(f'<rect class="f-background" width="100%" height="100%" fill="{LIGHT["background"]}"/>')
    parts += map(_line, page.lines)
    parts += map(_dot, page.dots)
    parts += map(_label, page.labels)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _style() -> str:
    """Light colours stand at the elements, for programs that know no CSS; a dark screen overrides them."""
    dark = "".join(f".f-{ink}{{fill:{colour}}}.s-{ink}{{stroke:{colour}}}" for ink, colour in DARK.items())
    return f"@media screen and (prefers-color-scheme:dark){{{dark}}}"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _path(points: tuple[Point, ...]) -> str:
    return "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points)


def _titled(tag: str, attributes: str, title: str) -> str:
    return f"<{tag} {attributes}><title>{escape(title)}</title></{tag}>" if title else f"<{tag} {attributes}/>"


def _line(line: Line) -> str:
    dash = ""
    if line.dash:
        on, off, offset = map(_number, line.dash)
        dash = f' stroke-dasharray="{on} {off}"' + (f' stroke-dashoffset="{offset}"' if offset != "0" else "")
    attributes = (
        f'class="{line.kind} s-{line.ink}" d="{_path(line.points)}" fill="none" stroke="{LIGHT[line.ink]}"'
        f' stroke-width="{_number(line.width)}" stroke-linejoin="round"{dash}'
    )
    return _titled("path", attributes, line.title)


def _dot(dot: Dot) -> str:
    x, y = map(_number, dot.at)
    colour = f'class="{dot.kind} f-{dot.ink}" cx="{x}" cy="{y}" r="{_number(dot.radius)}" fill="{LIGHT[dot.ink]}"'
    if not dot.title:
        return _titled("circle", colour, "")
    # A wide ring that takes the pointer and shows nothing.
    return _titled(
        "circle", f'{colour} stroke="#000" stroke-opacity="0" stroke-width="12" pointer-events="all"', dot.title
    )


def _label(label: Label) -> str:
    x, y = map(_number, label.at)
    attributes = f'class="{label.kind} f-{label.ink}" x="{x}" y="{y}" font-size="{_number(label.size)}" fill="{LIGHT[label.ink]}"'
    if label.anchor != "start":
        attributes += f' text-anchor="{label.anchor}"'
    if label.bold:
        attributes += ' font-weight="600"'
    title = f"<title>{escape(label.title)}</title>" if label.title and label.title != label.text else ""
    return f"{_patch(label)}<text {attributes}>{title}{escape(label.text)}</text>"


def _patch(label: Label) -> str:
    if label.box is None:
        return ""
    x, y, width, height = map(_number, label.box)
    area = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<rect class="f-background" {area} fill="{LIGHT["background"]}" fill-opacity="0.75"/>\n'
