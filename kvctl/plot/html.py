"""A chart as one web page that needs nothing from elsewhere: the picture, and its numbers as tables."""

from __future__ import annotations

from html import escape

from kvctl.plot.chart import Chart, Mark, fit_words, limit_words
from kvctl.plot.picture import page
from kvctl.plot.svg import svg

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
    for panel in chart.panels:
        if panel.limits:
            body.append(_fits(panel))
        body.append(_sizes(panel))
    return document(chart.title, body)


def document(title: str, body: list[str], style: str = "") -> str:
    """A whole page; its parts are HTML already, and `style` is CSS that it has besides."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _fits(chart: Chart) -> str:
    head = ["", *(limit_words(limit) for limit in chart.limits)]
    rows = [[escape(curve.name), *(fit_words(curve, limit) for limit in chart.limits)] for curve in chart.curves]
    return table("What fits", [escape(cell) for cell in head], rows)


def _sizes(chart: Chart) -> str:
    """A line for every context that a curve has a point or a mark at, to the byte."""
    columns: list[tuple[str, dict[int, str]]] = []
    for curve in chart.curves:
        if curve.points:
            name = f"{curve.name}, {curve.line}" if curve.line else curve.name
            columns.append((name, {context: _value(chart, size) for context, size in curve.points}))
        if curve.measured:
            cells = {mark.context: _value(chart, mark.value, mark) for mark in curve.measured}
            columns.append((f"{curve.name}, measured", cells))
    contexts = sorted({context for _, column in columns for context in column})
    rows = [[f"{context:,}", *(column.get(context, "") for _, column in columns)] for context in contexts]
    head = [escape(chart.x_label), *(escape(name) for name, _ in columns)]
    return table(escape(f"{chart.y_label[:1].upper()}{chart.y_label[1:]} by context"), head, rows)


def _value(chart: Chart, value: int, mark: Mark | None = None) -> str:
    """A value, and under it the bytes, or from where to where it was measured."""
    under = [f"{value:,} bytes"] if chart.quantity == "memory" else []
    if mark is not None and mark.low is not None and mark.high is not None:
        under.append(f"{chart.amount(mark.low)} to {chart.amount(mark.high)}")
    return chart.amount(value) + (f"<small>{', '.join(under)}</small>" if under else "")


def table(caption: str, head: list[str], rows: list[list[str]]) -> str:
    """Cells are already HTML."""
    lines = ['<div class="scroll"><table>', *([f"<caption>{caption}</caption>"] if caption else [])]
    lines.append("<thead><tr>" + "".join(f'<th scope="col">{cell}</th>' for cell in head) + "</tr></thead>\n<tbody>")
    for first, *rest in rows:
        lines.append(f'<tr><th scope="row">{first}</th>' + "".join(f"<td>{cell}</td>" for cell in rest) + "</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])
