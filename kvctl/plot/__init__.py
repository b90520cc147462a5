"""Memory against context as a picture (SVG, PNG, HTML) or on the terminal."""

from __future__ import annotations

import os
from pathlib import Path

from kvctl.errors import KvctlError, UsageError
from kvctl.plot.chart import Chart, Curve, Limit, checked

__all__ = ["Chart", "Curve", "Limit", "kind_of", "render", "terminal", "write"]

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
    data = render(chart, kind_of(path))
    try:
        # Through a link, the file it points to is replaced and the link stays.
        target = Path(os.path.realpath(path))
        if target.is_symlink():
            raise KvctlError(f"cannot write {path[:200]}: its links lead in a circle")
        old = target.stat() if target.exists() else None
        if old is not None and not (target.is_file() and os.access(target, os.W_OK)):
            raise KvctlError(f"cannot write {path[:200]}: it is {'read-only' if target.is_file() else 'no plain file'}")
        # Containers give every run the same process id, so what one that was killed left must not stop the next.
        part = target.with_name(f".kvctl-{os.getpid()}-{os.urandom(4).hex()}.part")
        with open(part, "xb") as file:
            try:
                if old is not None:
                    part.chmod(old.st_mode & 0o7777)  # a private picture stays private
                file.write(data)
                file.close()
                os.replace(part, target)
            finally:
                part.unlink(missing_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise KvctlError(f"cannot write {path[:200]}: {getattr(error, 'strerror', None) or error}") from None
