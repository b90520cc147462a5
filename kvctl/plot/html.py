"""A chart as one web page that needs nothing from elsewhere: the picture, and its numbers as tables."""

from __future__ import annotations

from html import escape

from kvctl.plot.chart import Chart, fit_words, limit_words
from kvctl.plot.picture import page
from kvctl.plot.svg import svg
from kvctl.units import format_bytes

_STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1f2328;--muted:#59636e;--rule:#d7dbe0}
@media screen and (prefers-color-scheme:dark){:root{--back:#16191d;--text:#e6e9ec;--muted:#9aa4af;--rule:#343a42}}
body{margin:1.5rem auto;max-width:980px;padding:0 1rem;background:var(--back);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
svg{max-width:100%;height:auto;display:block}
.scroll{overflow-x:auto}
table{border-collapse:collapse;margin:1.25rem 0;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding-bottom:.4rem}
th,td{padding:.25rem .9rem .25rem 0;border-bottom:1px solid var(--rule);text-align:right;vertical-align:top}
th{font-weight:600;overflow-wrap:anywhere;min-width:7em}
tr>:first-child{text-align:left}
small{display:block;color:var(--muted)}
@media print{body{margin:0;max-width:none;font-size:10px}.scroll{overflow:visible}thead{display:table-header-group}tr,svg{break-inside:avoid}}
"""


def html(chart: Chart) -> str:
    """The page of a checked chart."""
    body = [svg(page(chart), name=chart.title, alone=False).rstrip()]
    if chart.limits:
        body.append(_fits(chart))
    body.append(_sizes(chart))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(chart.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _fits(chart: Chart) -> str:
    head = ["", *(limit_words(limit) for limit in chart.limits)]
    rows = [[escape(curve.name), *(fit_words(curve, limit) for limit in chart.limits)] for curve in chart.curves]
    return _table("What fits", [escape(cell) for cell in head], rows)


def _sizes(chart: Chart) -> str:
    """A line for every context that a curve has a point at, to the byte."""
    contexts = sorted({context for curve in chart.curves for context, _ in curve.points})
    columns = [dict(curve.points) for curve in chart.curves]
    rows = [[f"{context:,}", *(_size(column.get(context)) for column in columns)] for context in contexts]
    head = [escape(chart.x_label), *(escape(curve.name) for curve in chart.curves)]
    return _table(escape(f"{chart.y_label[:1].upper()}{chart.y_label[1:]} by context"), head, rows)


def _size(size: int | None) -> str:
    return "" if size is None else f"{format_bytes(size)}<small>{size:,} bytes</small>"


def _table(caption: str, head: list[str], rows: list[list[str]]) -> str:
    """Cells are already HTML."""
    lines = ['<div class="scroll"><table>', f"<caption>{caption}</caption>"]
    lines.append("<thead><tr>" + "".join(f'<th scope="col">{cell}</th>' for cell in head) + "</tr></thead>\n<tbody>")
    for first, *rest in rows:
        lines.append(f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])
