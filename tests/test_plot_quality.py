"""Pictures of quality against bytes: marks where they belong, and every number in words."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import pytest

from kvctl.errors import UsageError
from kvctl.plot import render, terminal
from kvctl.plot.scatter import Scatter, Spot

MIB = 2**20
SVG = "{http://www.w3.org/2000/svg}"
CHART = Scatter(
    "a model",
    (
        Spot("int8", 4 * MIB, 1e-4, 0.9e-4, 1.1e-4, True),
        Spot("int4", 2 * MIB, 1e-2, 0.8e-2, 1.2e-2, True, ("top-1 90%",)),
        Spot("window", 4 * MIB, 1.0, 0.9, 1.1),
        Spot("same <as> plain", 8 * MIB, 0.0, 0.0, 0.0, True),
    ),
    y_label="KL (nats)",
)


def marks(chart: Scatter) -> dict[str, tuple[float, float]]:
    """Where the technique of each name lies."""
    root = ElementTree.fromstring(render(chart, "svg"))
    dots = [dot for dot in root.iter(f"{SVG}circle") if "technique" in dot.get("class", "")]
    return {(dot[0].text or "").split(":")[0]: (float(dot.get("cx", "")), float(dot.get("cy", ""))) for dot in dots}


def test_both_axes_are_logarithmic() -> None:
    found = marks(CHART)
    (x8, y8), (x4, y4), (xw, yw), (xp, yp) = (found[name] for name in ("int8", "int4", "window", "same <as> plain"))
    assert (x8, x8 - x4) == (pytest.approx(xw), pytest.approx(xp - x8))  # 2, 4 and 8 MiB
    assert y8 - y4 == pytest.approx(y4 - yw)  # 1e-4, 1e-2 and 1
    assert yp == pytest.approx(y8)  # no loss at all lies at the foot, which is the lowest power of ten


def test_the_line_joins_those_that_no_other_beats() -> None:
    root = ElementTree.fromstring(render(CHART, "svg"))
    (line,) = [path for path in root.iter(f"{SVG}path") if "front" in path.get("class", "")]
    assert line.get("d", "").count("L") == 2
    names = [text.text or text[0].tail for text in root.iter(f"{SVG}text") if "name" in text.get("class", "").split()]
    assert sorted(names) == ["int4", "int8", "same <as> plain", "window"]


def test_a_page_has_every_number() -> None:
    page = render(CHART, "html").decode()
    assert "2,097,152<small>2 MiB</small>" in page
    assert "same &lt;as&gt; plain" in page
    assert "top-1 90%" in page


@pytest.mark.parametrize("unicode", [True, False])
@pytest.mark.parametrize("width", [20, 80, 140])
def test_on_a_terminal(width: int, unicode: bool) -> None:
    lines = terminal(CHART, width, 40, colour=False, unicode=unicode).splitlines()
    assert max(map(len, lines)) <= width
    plot = [line for line in lines if ("│" if unicode else "|") in line]
    rows = {letter: next(number for number, line in enumerate(plot) if letter in line[8:]) for letter in "ABCD"}
    # Largest first: plain, then the two of 4 MiB by loss, then int4. The less is lost, the lower.
    assert rows["D"] < rows["B"]
    assert rows["C"] < rows["D"]
    assert rows["A"] == rows["B"]
    if not unicode:
        assert all(line.isascii() for line in lines)


def test_many_techniques() -> None:
    spots = tuple(Spot(f"t{number}", 1000 + number, math.exp(-number / 4), 0, 1, False) for number in range(60))
    text = terminal(Scatter("m", spots), 80, 40, colour=False, unicode=True)
    assert "8 more are not drawn" in text  # 52 letters
    assert len(marks(Scatter("m", spots))) == 60


def test_nothing_to_draw() -> None:
    with pytest.raises(UsageError, match="nothing to plot"):
        render(Scatter("m", ()), "svg")
