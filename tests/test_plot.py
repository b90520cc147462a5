"""Pictures of memory against context: read back as XML, HTML, PNG and lines of text."""

from __future__ import annotations

import builtins
import os
import re
import struct
import subprocess
import sys
import unicodedata
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.errors import KvctlError, UsageError
from kvctl.plot import Chart, Curve, Limit, Mark, kind_of, render, terminal, write
from kvctl.plot.axes import context_axis, memory_axis, time_axis
from kvctl.plot.colours import DARK, LIGHT
from kvctl.units import format_seconds

GIB = 2**30
LADDER = tuple(2**power for power in range(12, 21))  # 4k … 1M
SVG = "{http://www.w3.org/2000/svg}"

# 64 layers × 8 heads × 128 × 2 tensors × 2 bytes = 262,144 bytes a token (Qwen3-32B, bf16).
PER_TOKEN = 262_144


def straight(name: str, per_token: int, contexts: tuple[int, ...] = LADDER, fixed: int = 0) -> Curve:
    return Curve(name, tuple((context, context * per_token + fixed) for context in contexts))


# 18.5 GiB / 262,144 bytes = 75,776 tokens, to the token.
EXACT = Curve("Qwen3-32B", tuple((context, context * PER_TOKEN) for context in sorted({*LADDER, 75_776, 75_777})))
CHART = Chart(
    "Qwen3-32B on one GPU",
    (EXACT, straight("half of it", PER_TOKEN // 2)),
    (Limit("a GPU", 37 * GIB // 2),),
    subtitle="one sequence",
    note="kvctl, engine ideal",
)


def image(chart: Chart) -> ElementTree.Element:
    return ElementTree.fromstring(render(chart, "svg"))


def marked(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [element for element in root.iter() if kind in element.get("class", "").split()]


def words(root: ElementTree.Element, kind: str) -> list[str]:
    return [(element[0].tail if len(element) else element.text) or "" for element in marked(root, kind)]


def height(element: ElementTree.Element) -> float:
    """Where a level line, or the first point of a path, is."""
    match = re.match(r"M([\d.]+) ([\d.]+)", element.get("d", ""))
    assert match is not None
    return float(match[2])


# -- the picture ---------------------------------------------------------------------------


def test_a_doubling_axis_is_even_in_doublings() -> None:
    root = image(CHART)
    assert words(root, "x-tick") == ["4k", "8k", "16k", "32k", "64k", "128k", "256k", "512k", "1M"]
    xs = [float(element.get("x", "")) for element in marked(root, "x-tick")]
    steps = {round(b - a, 1) for a, b in pairwise(xs)}
    assert max(steps) - min(steps) <= 0.1


def test_every_point_lies_at_its_value() -> None:
    root = image(CHART)
    # The scale as a reader takes it: two ticks and a ruler. Labels stand 4 below their lines.
    ticks = {
        float(text): float(e.get("y", "")) - 4
        for e, text in zip(marked(root, "y-tick"), words(root, "y-tick"), strict=True)
    }
    assert words(root, "y-label") == ["memory (GiB)"]
    zero, top = ticks[0], ticks[max(ticks)]
    per_gib = (zero - top) / max(ticks)
    points = [point for curve in CHART.curves for point in curve.points]
    circles = marked(root, "point")
    assert len(circles) == len(points)
    for circle, (_, size) in zip(circles, points, strict=True):
        assert zero - float(circle.get("cy", "")) == pytest.approx(per_gib * size / GIB, abs=0.02)
    assert [zero - height(line) for line in marked(root, "limit")] == [pytest.approx(per_gib * 18.5, abs=0.02)]


def test_every_curve_has_a_path_and_a_name_beside_its_end() -> None:
    root = image(CHART)
    assert [path.get("stroke") for path in marked(root, "curve")] == [LIGHT["curve0"], LIGHT["curve1"]]
    assert words(root, "name") == ["Qwen3-32B", "half of it"]
    # 1,048,576 tokens × 262,144 bytes = 256 GiB, and 128 for the other.
    assert words(root, "fact") == [
        "256 GiB at 1,048,576 tokens",
        "fits up to 75,776 tokens",
        "128 GiB at 1,048,576 tokens",
        # 18.5 GiB / 131,072 = 151,552, between the points at 131,072 and 262,144: three digits.
        "fits up to about 151,000 tokens",
    ]
    assert words(root, "limit-label") == ["a GPU: 18.50 GiB"]
    assert words(root, "title") == ["Qwen3-32B on one GPU"]
    assert words(root, "note") == ["kvctl, engine ideal"]


def test_crossings_are_marked_on_the_limit() -> None:
    root = image(CHART)
    marks = marked(root, "crossing")
    assert len(marks) == 2
    assert {round(float(mark.get("cy", ""))) for mark in marks} <= {
        round(height(marked(root, "limit")[0])) + d for d in (0, 1)
    }
    assert words(root, "crossing-label")[0] == "75,776"
    ticks = dict(zip(words(root, "x-tick"), (float(e.get("x", "")) for e in marked(root, "x-tick")), strict=True))
    # log2(75,776 / 65,536) = 0.2095 of a doubling past 64k.
    expected = ticks["64k"] + 0.2095 * (ticks["128k"] - ticks["64k"])
    assert float(marks[0].get("cx", "")) == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        (((1024, 5), (2048, 10)), "fits throughout"),
        (((1024, 11), (2048, 12)), "does not fit even at 1,024 tokens"),
        (((1024, 11),), "does not fit"),
        (((1024, 10),), "fits"),
        (((1, 10), (2, 11)), "fits up to 1 token"),
        (((0, 0), (10, 100)), "fits up to about 1 token"),
        # Halfway between 100,000 and 200,000 would be 150,000.
        (((100_000, 5), (200_000, 15)), "fits up to about 150,000 tokens"),
        # 20,480 is known to fit; three digits would say less.
        (((20_480, 10), (40_960, 20)), "fits up to about 20,480 tokens"),
        # Not monotone: the first context that does not fit counts.
        (((1, 1), (2, 11), (3, 1), (4, 1)), "fits up to 1 token"),
    ],
)
def test_what_fits(points: tuple[tuple[int, int], ...], expected: str) -> None:
    chart = Chart("t", (Curve("c", points),), (Limit("l", 10),))
    assert words(image(chart), "fact")[1] == expected
    assert expected in terminal(chart, 200, 30, colour=False, unicode=True)


def test_contexts_within_eightfold_are_linear() -> None:
    root = image(Chart("t", (straight("c", 1, (4096, 32_768)),)))
    assert words(root, "x-tick") == ["4k", "8k", "12k", "16k", "20k", "24k", "28k", "32k"]
    assert not context_axis([4096, 32_768], 10).log
    assert context_axis([4096, 32_769], 10).log
    # A logarithm has no place for 0.
    assert not context_axis([0, 2**20], 10).log


@pytest.mark.parametrize(
    ("size", "unit", "labels"),
    [
        (0, "GiB", ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (700, "bytes", ["0", "200", "400", "600"]),
        (5 * 2**10, "KiB", ["0", "1", "2", "3", "4", "5"]),
        (300 * 2**20, "MiB", ["0", "100", "200", "300"]),
        (80 * GIB, "GiB", ["0", "20", "40", "60", "80"]),
        (2 * 2**40, "GiB", ["0", "500", "1,000", "1,500", "2,000"]),
        (2**60, "TiB", ["0", "200,000", "400,000", "600,000", "800,000", "1,000,000"]),
    ],
)
def test_memory_ticks(size: int, unit: str, labels: list[str]) -> None:
    axis = memory_axis([0, size], [], 6)
    assert (axis.unit, [label for _, label in axis.ticks]) == (unit, labels)


def test_a_limit_far_above_is_named_and_not_drawn() -> None:
    chart = Chart("t", (straight("c", 1000),), (Limit("rack", 1400 * GIB), Limit("node", 350 * GIB)))
    root = image(chart)
    assert marked(root, "limit") == []
    assert sorted(words(root, "limit-label")) == [
        "↑ node: 350 GiB, above this picture",
        "↑ rack: 1.37 TiB, above this picture",
    ]
    spots = [(label.get("x"), label.get("y")) for label in marked(root, "limit-label")]
    assert len(set(spots)) == 2


def test_limits_far_below_keep_their_labels_apart() -> None:
    limits = tuple(Limit(f"RTX 30{n}0", n * GIB) for n in (5, 6, 7))
    root = image(Chart("t", (straight("c", 2**22),), limits))
    assert len({(e.get("x"), e.get("y")) for e in marked(root, "limit-label")}) == 3


def test_curves_on_one_another_all_show() -> None:
    root = image(Chart("t", tuple(straight(name, 65_536) for name in "abc")))
    dashes = [(path.get("stroke-dasharray"), path.get("stroke-dashoffset")) for path in marked(root, "curve")]
    assert dashes == [(None, None), ("7 14", "-7"), ("7 14", "-14")]
    text = terminal(Chart("t", tuple(straight(name, 65_536) for name in "abc")), 80, 24, colour=False, unicode=True)
    assert text.count("on the line of A") == 2


def test_names_beside_the_curves_do_not_touch() -> None:
    chart = Chart("t", tuple(straight(f"m{n}", 1000 + n) for n in range(8)), (Limit("a", GIB), Limit("b", 2 * GIB)))
    root = image(chart)
    ys = [float(element.get("y", "")) for kind in ("name", "fact") for element in marked(root, kind)]
    ys.sort()
    assert len(ys) == 8 * 4
    assert min(b - a for a, b in pairwise(ys)) >= 15
    assert ys[-1] < float(root.get("height", ""))


def test_nothing_and_too_much_are_refused() -> None:
    for curves in ((), (Curve("c", ()),)):
        with pytest.raises(UsageError, match="nothing to plot"):
            render(Chart("t", curves), "svg")
    with pytest.raises(UsageError, match="9 curves are too many"):
        terminal(Chart("t", tuple(straight(str(n), n + 1) for n in range(9))), 80, 24, colour=False, unicode=True)


HOSTILE = 'x</title><script>alert("1")</script>&amp;\x1b[31m\x00\n\u202e\ud800]]>$\\frac$'


def test_names_are_text_and_nothing_else() -> None:
    chart = Chart(HOSTILE, (straight(HOSTILE, 65_536),), (Limit(HOSTILE, GIB),), HOSTILE, HOSTILE)
    root = image(chart)
    assert {element.tag for element in root.iter()} <= {
        SVG + tag for tag in ("svg", "title", "style", "rect", "path", "circle", "text")
    }
    assert '<script>alert("1")</script>&amp; [31m' in words(root, "title")[0]
    page = Page(chart)
    assert "script" not in page.tags
    for text in (render(chart, "html").decode(), terminal(chart, 80, 24, colour=False, unicode=True)):
        assert not re.search("[\x00\x1b\u202e]", text)


def test_long_names_lose_their_middle() -> None:
    name = "organisation/" + "very-" * 30 + "long-Instruct"
    root = image(Chart(name * 3, (straight(name, 1000),)))
    (shown,) = words(root, "name")
    assert len(shown) == 36
    assert shown.startswith("organisation/")
    assert shown.endswith("-Instruct")
    # In full under the pointer.
    assert marked(root, "name")[0][0].text == name


# -- measured marks, a second panel -----------------------------------------------------------

MARKED = Chart(
    "memory",
    (
        Curve("cache", ((1024, GIB), (16_384, 16 * GIB)), (Mark(1024, GIB), Mark(4096, 5 * GIB)), "predicted", ("as said",)),
        Curve("marks alone", (), (Mark(2048, 12 * GIB), Mark(16_384, 14 * GIB))),
    ),
    below=Chart(
        "time",
        (Curve("step", ((1024, 10**7), (4096, 2 * 10**7)), (Mark(1024, 11_000_000, 10_000_000, 14_000_000), Mark(4096, 2 * 10**7))),),
        quantity="time",
        y_label="TPOT",
        note="the end",
    ),
)  # fmt: skip


def ruler(root: ElementTree.Element, panel: int) -> tuple[float, float]:
    """Where 0 is in a panel, and pixels for each unit of its axis."""
    ticks = [
        (float(text.replace(",", "")), float(e.get("y", "")) - 4)
        for e, text in zip(marked(root, "y-tick"), words(root, "y-tick"), strict=True)
    ]
    starts = [place for place, (value, _) in enumerate(ticks) if value == 0]
    own = ticks[starts[panel] : (*starts, None)[panel + 1]]
    return own[0][1], (own[0][1] - own[-1][1]) / own[-1][0]


def test_measured_values_are_rings_at_their_place() -> None:
    root = image(MARKED)
    assert words(root, "y-label") == ["memory (GiB)", "TPOT (ms)"]
    rings, holes = marked(root, "measured"), marked(root, "hole")
    assert [ring.get("fill") for ring in rings] == [LIGHT[f"curve{index}"] for index in (0, 0, 1, 1, 0, 0)]
    assert {hole.get("fill") for hole in holes} == {LIGHT["background"]}
    zero, per_gib = ruler(root, 0)
    for ring, hole, gib in zip(rings, holes, (1, 5, 12, 14), strict=False):
        assert zero - float(ring.get("cy", "")) == pytest.approx(per_gib * gib, abs=0.02)
        assert (hole.get("cx"), hole.get("cy")) == (ring.get("cx"), ring.get("cy"))
    zero, per_ms = ruler(root, 1)
    for ring, ms in zip(rings[4:], (11, 20), strict=True):
        assert zero - float(ring.get("cy", "")) == pytest.approx(per_ms * ms, abs=0.02)
    # One bar, from 10 to 14 ms.
    (bar,) = marked(root, "bar")
    ends = [float(number) for number in re.findall(r" ([\d.]+)", (bar.get("d") or "").replace("L", " L"))]
    assert [zero - end for end in ends] == [pytest.approx(per_ms * ms, abs=0.02) for ms in (10, 14)]
    assert len(marked(root, "bar-end")) == 2
    # A line only where there is one, and no other dots on it.
    assert len(marked(root, "curve")) == 2
    assert marked(root, "point") == []


def test_panels_share_their_contexts_and_edges() -> None:
    root = image(MARKED)
    ticks = [(e.get("x"), text) for e, text in zip(marked(root, "x-tick"), words(root, "x-tick"), strict=True)]
    assert ticks[:5] == ticks[5:]
    assert [text for _, text in ticks[:5]] == ["1k", "2k", "4k", "8k", "16k"]
    rings = marked(root, "measured")
    assert rings[1].get("cx") == rings[5].get("cx")
    assert float(rings[1].get("cy", "")) < float(rings[5].get("cy", "")) < float(root.get("height", ""))
    assert words(root, "title") == ["memory", "time"]
    assert words(root, "fact") == [
        "5 GiB at 4,096 tokens",
        "as said",
        "14 GiB at 16,384 tokens",
        "20.0 ms at 4,096 tokens",
    ]


def test_marks_are_in_the_page_to_the_byte() -> None:
    page = Page(MARKED)
    memory = page.rows.index(["context (tokens)", "cache, predicted", "cache, measured", "marks alone, measured"])
    assert page.rows[memory + 1] == ["1,024", "1 GiB1,073,741,824 bytes", "1 GiB1,073,741,824 bytes", ""]
    assert page.rows[memory + 2] == ["2,048", "", "", "12 GiB12,884,901,888 bytes"]
    time = page.rows.index(["context (tokens)", "step", "step, measured"])
    assert page.rows[time + 1] == ["1,024", "10.0 ms", "11.0 ms10.0 ms to 14.0 ms"]


@pytest.mark.parametrize(("unicode", "ring", "bar"), [(True, "○", "│"), (False, "o", "|")])
def test_marks_on_the_terminal(unicode: bool, ring: str, bar: str) -> None:
    lines = terminal(MARKED, 100, 60, colour=False, unicode=unicode).splitlines()
    middle = lines.index("time")
    assert lines[middle - 1] == ""
    above, below = "\n".join(lines[:middle]), "\n".join(lines[middle:])
    plots = [re.findall(r"^ *\d* ?[│┤|+](.*)$", part, re.MULTILINE) for part in (above, below)]
    assert [sum(line.count(ring) for line in plot) for plot in plots] == [4, 2]
    # The bar stands at the left edge over the first ring: 14 ms of a scale of 21.2 is two fifths down.
    first = [place for place, line in enumerate(plots[1]) if line.startswith((bar, ring))]
    assert len(first) == pytest.approx(4 / 21.2 * len(plots[1]), abs=1.5)
    assert plots[1][first[-1]].startswith((bar, ring))
    assert "A cache        5 GiB at 4,096    as said" in lines
    assert "step: 20.0 ms at 4,096 tokens" in lines
    assert not unicode or "TPOT (ms)" in lines


@pytest.mark.parametrize(
    ("longest", "unit", "labels"),
    [
        (0, "ms", ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (300_000, "µs", ["0", "100", "200", "300"]),
        (42 * 10**6, "ms", ["0", "10", "20", "30", "40"]),
        (9 * 10**9, "ms", ["0", "2,000", "4,000", "6,000", "8,000"]),
        (40 * 10**9, "s", ["0", "10", "20", "30", "40"]),
    ],
)
def test_time_ticks(longest: int, unit: str, labels: list[str]) -> None:
    axis = time_axis([0, longest], 6)
    assert (axis.unit, [label for _, label in axis.ticks]) == (unit, labels)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, "0 s"), (3e-8, "30 ns"), (8.5e-4, "850 µs"), (9.996e-4, "1.00 ms"), (0.0123, "12.3 ms"), (0.99951, "1.00 s"),
     (1.25, "1.25 s"), (9.996, "10.0 s"), (99.96, "100 s"), (1234.4, "1,234 s")],
)  # fmt: skip
def test_times_in_words(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


def test_marks_out_of_order_and_limits_of_time_are_refused() -> None:
    with pytest.raises(ValueError, match="ascend"):
        render(Chart("t", (Curve("c", (), (Mark(2, 1), Mark(1, 1))),)), "svg")
    with pytest.raises(ValueError, match="negative"):
        render(Chart("t", (Curve("c", (), (Mark(2, 1, -1, 2),)),)), "svg")
    with pytest.raises(ValueError, match="limits"):
        render(CHART.replace(quantity="time"), "svg")


# -- colours -------------------------------------------------------------------------------

# Machado, Oliveira, Fernandes 2009, severity 1.0: protanopia, deuteranopia, tritanopia; and none.
VISION = [
    ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
    ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
]
XYZ = (
    (0.4124 / 0.9505, 0.3576 / 0.9505, 0.1805 / 0.9505),
    (0.2126, 0.7152, 0.0722),
    (0.0193 / 1.089, 0.1192 / 1.089, 0.9505 / 1.089),
)


def times(matrix: Any, vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def linear(colour: str) -> list[float]:
    channels = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]


def lab(light: list[float]) -> list[float]:
    x, y, z = (
        v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in times(XYZ, [min(1, max(0, v)) for v in light])
    )
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_colours_differ_for_every_eye_and_stand_out(palette: dict[str, str]) -> None:
    curves = [palette[f"curve{index}"] for index in range(8)]
    for vision in VISION:
        for one, other in combinations(curves, 2):
            a, b = (lab(times(vision, linear(colour))) for colour in (one, other))
            assert sum((p - q) ** 2 for p, q in zip(a, b, strict=True)) ** 0.5 > 15, (one, other)
    back = times(XYZ, linear(palette["background"]))[1] + 0.05
    for name, least in [*((f"curve{index}", 3.0) for index in range(8)), ("text", 7), ("muted", 4.5), ("limit", 4.5)]:
        front = times(XYZ, linear(palette[name]))[1] + 0.05
        assert max(front, back) / min(front, back) >= least, name
    assert set(LIGHT) == set(DARK)


# -- the same bytes, files -------------------------------------------------------------------


def test_the_same_chart_is_the_same_bytes_in_another_process() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from test_plot import CHART; from kvctl.plot import render;"
        "import hashlib; print(*(hashlib.sha256(render(CHART, kind)).hexdigest() for kind in ('svg', 'html')))"
    )
    argv = [sys.executable, "-c", script, str(Path(__file__).parent)]
    runs = {
        subprocess.run(
            argv, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("path", "kind"), [("a.svg", "svg"), ("x/y.PNG", "png"), ("a.b.html", "html"), ("-", "terminal")]
)
def test_kinds(path: str, kind: str) -> None:
    assert kind_of(path) == kind


@pytest.mark.parametrize("path", ["", "chart", "chart.pdf", ".svg", "svg", "a.svg/", "a.svg.gz"])
def test_unknown_endings(path: str) -> None:
    with pytest.raises(UsageError, match=r"\.svg, \.png, \.html") as caught:
        kind_of(path)
    assert "- for the terminal" in (caught.value.hint or "")


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    target = tmp_path / "chart.svg"
    target.write_text("old")
    link = tmp_path / "link.svg"
    link.symlink_to(target)
    write(CHART, str(link))
    assert link.is_symlink()
    assert target.read_bytes() == render(CHART, "svg")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chart.svg", "link.svg"]


def test_a_private_file_stays_private(tmp_path: Path) -> None:
    target = tmp_path / "chart.svg"
    target.write_text("old")
    target.chmod(0o600)
    write(CHART, str(target))
    assert target.stat().st_mode & 0o777 == 0o600
    assert target.read_bytes() == render(CHART, "svg")


def test_links_in_a_circle_are_left_alone(tmp_path: Path) -> None:
    one, two = tmp_path / "one.svg", tmp_path / "two.svg"
    one.symlink_to(two)
    two.symlink_to(one)
    with pytest.raises(KvctlError, match="circle"):
        write(CHART, str(one))
    assert one.is_symlink()


def test_what_a_killed_run_left_does_not_stop_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run in a container may have the same process id."""

    def killed(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr("os.replace", killed)
    monkeypatch.setattr("pathlib.Path.unlink", lambda *_, **__: None)
    with pytest.raises(SystemExit):
        write(CHART, str(tmp_path / "chart.svg"))
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 1
    write(CHART, str(tmp_path / "chart.svg"))
    assert (tmp_path / "chart.svg").read_bytes() == render(CHART, "svg")


class Stuck:
    """A file that takes some bytes, and then fails."""

    def __init__(self, file: Any, error: BaseException) -> None:
        self.file, self.error = file, error

    def __enter__(self) -> Stuck:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, data: bytes) -> None:
        self.file.write(data[:100])
        raise self.error


@pytest.mark.parametrize(
    ("error", "expected"),
    [(KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left on device"), KvctlError)],
)
def test_a_write_cut_short_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, expected: type[BaseException]
) -> None:
    target = tmp_path / "chart.svg"
    target.write_text("old")
    real = builtins.open
    monkeypatch.setattr(builtins, "open", lambda *argv, **more: Stuck(real(*argv, **more), error))
    with pytest.raises(expected):
        write(CHART, str(target))
    monkeypatch.undo()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["chart.svg"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/chart.svg", "No such file or directory"),
        ("file/chart.svg", "Not a directory"),
        ("folder.svg", "no plain file"),
        ("a\0.svg", "null"),
        (f"{'n' * 300}.svg", "File name too long"),
    ],
)
def test_what_cannot_be_written_is_said_in_one_line(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.svg").mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KvctlError, match=reason) as caught:
        write(CHART, str(tmp_path / name))
    assert caught.value.message.startswith("cannot write ")
    assert "\n" not in caught.value.message
    assert sorted(tmp_path.iterdir()) == before


# -- PNG -----------------------------------------------------------------------------------


def test_png_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match="matplotlib") as caught:
        write(CHART, str(tmp_path / "chart.png"))
    assert "pip install 'kvctl[plot]'" in (caught.value.hint or "")
    assert list(tmp_path.iterdir()) == []
    # The others need nothing.
    for kind in ("svg", "html"):
        assert render(CHART, kind)


def test_png_is_the_same_picture() -> None:
    pytest.importorskip("matplotlib")
    data = render(CHART, "png")
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    # IHDR: width and height, each twice the SVG's.
    root = image(CHART)
    assert struct.unpack(">II", data[16:24]) == (2 * int(root.get("width", "")), 2 * int(root.get("height", "")))
    assert render(CHART, "png") == data
    assert render(Chart("$x^$ \\bad", (straight("$a_{$", 65_536),)), "png")


# -- HTML ----------------------------------------------------------------------------------


class Page(HTMLParser):
    """Tags and tables of a page; fails where tags do not close."""

    def __init__(self, chart: Chart) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.links: list[tuple[str, str | None]] = []
        self.feed(render(chart, "html").decode())
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [
            (name, value)
            for name, value in attrs
            if name in ("src", "href", "xlink:href", "srcset") or name.startswith("on")
        ]
        if tag != "meta":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & {*self.open}:
            self.rows[-1][-1] += data


def test_html_needs_nothing_and_has_the_numbers() -> None:
    page = Page(CHART)
    assert page.links == []
    assert not {"script", "link", "iframe", "img", "object"} & {*page.tags}
    source = render(CHART, "html").decode()
    assert re.findall(r"https?://[^\"]*", source) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"url\(|@import", source)
    fits, contexts = page.rows[:3], page.rows[3:]
    assert fits == [
        ["", "a GPU: 18.50 GiB"],
        ["Qwen3-32B", "fits up to 75,776 tokens"],
        ["half of it", "fits up to about 151,000 tokens"],
    ]
    assert contexts[0] == ["context (tokens)", "Qwen3-32B", "half of it"]
    assert contexts[1] == ["4,096", "1 GiB1,073,741,824 bytes", "512 MiB536,870,912 bytes"]
    # 75,777 × 262,144; the other curve has no point there.
    assert ["75,777", "18.50 GiB19,864,485,888 bytes", ""] in contexts
    assert len(contexts) == 1 + len(EXACT.points)


# -- the terminal ----------------------------------------------------------------------------


def columns(line: str) -> int:
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


CHARTS = {
    "plain": CHART,
    "eight": Chart(
        "t",
        tuple(straight(f"model-{n}", 2**15 * n + 7) for n in range(1, 9)),
        (Limit("A", 40 * GIB), Limit("B", 80 * GIB)),
    ),
    "wide": Chart(
        "模型" * 40, (straight("模型-" * 20, 65_536), straight("e\u0301" * 9, 9)), (Limit("显卡", GIB),), note="n" * 300
    ),
    "point": Chart("t", (Curve("a", ((1, 0),)), Curve("b", ((1, 0),)))),
    "marks": MARKED,
    "huge": Chart("t", (Curve("a", ((0, 0), (2**40, 2**70))),), (Limit("l", 1), Limit("m", 2**80))),
}


@pytest.mark.parametrize("chart", CHARTS.values(), ids=CHARTS)
@pytest.mark.parametrize("unicode", [True, False])
def test_no_line_is_wider_than_the_terminal(chart: Chart, unicode: bool) -> None:
    for width in range(20, 201):
        text = terminal(chart, width, 24, colour=True, unicode=unicode)
        for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines():
            assert columns(line) <= width, (width, line)


def test_the_terminal_gets_what_it_can_show() -> None:
    plain = terminal(CHART, 80, 24, colour=False, unicode=False)
    assert plain.isascii()
    assert "\x1b" not in plain
    assert plain.endswith("\n")
    assert not any(line != line.rstrip() for line in plain.splitlines())
    coloured = terminal(CHART, 80, 24, colour=True, unicode=False)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    # Every colour ends on its line.
    assert all(line.count("\x1b[0m") * 2 == line.count("\x1b[") for line in coloured.splitlines())


@pytest.mark.parametrize("rows", [10, 24, 40, 80])
def test_the_picture_fits_a_screen_that_has_room(rows: int) -> None:
    lines = terminal(CHART, 80, rows, colour=False, unicode=True).splitlines()
    assert len(lines) < max(rows, 20)
    assert sum("│" in line or "┤" in line for line in lines) <= 24


def test_the_limit_is_a_dashed_line_and_curves_have_letters() -> None:
    lines = terminal(CHART, 100, 30, colour=False, unicode=True).splitlines()
    (limit,) = [line for line in lines if "╌╌╌╌" in line]
    assert "╌ a GPU: 18.50 GiB ╌" in limit
    assert limit.count("●") == 2
    # The crossing stands over its context: a fifth of the way from 64k to 128k.
    axis = next(line for line in lines if "└" in line)
    ticks = [place for place, char in enumerate(axis) if char == "┬"]
    assert len(ticks) == 9
    assert limit.index("●") == pytest.approx(ticks[4] + 0.21 * (ticks[5] - ticks[4]), abs=1)
    assert [line[-1] for line in lines if "│" in line or "┤" in line if line[-1] in "AB"] == ["A", "B"]
    assert "A Qwen3-32B   256 GiB at 1,048,576  up to 75,776" in lines
    assert "B half of it  128 GiB at 1,048,576  up to about 151,000" in lines


def test_curves_without_braille_are_their_letters() -> None:
    lines = terminal(CHART, 80, 30, colour=False, unicode=False).splitlines()
    plot = [line for line in lines if line[4:5] in ("|", "+")]
    assert {char for line in plot for char in line[5:]} >= {"a", "b", "A", "B", "X", "-"}


def test_a_very_narrow_terminal_still_says_it_all() -> None:
    text = " ".join(terminal(CHART, 20, 24, colour=False, unicode=True).split())
    assert "fits up to 75,776 tokens" in text
    assert "18.50 GiB" in text


names = st.text(max_size=60)
sizes = st.integers(0, 2**64)
marks = st.dictionaries(
    st.integers(0, 2**40),
    st.lists(sizes, min_size=3, max_size=3).map(sorted) | st.lists(sizes, min_size=1, max_size=1),
    max_size=4,
).map(lambda found: tuple(Mark(x, y[len(y) // 2], *(y[0], y[-1])[: len(y) - 1]) for x, y in sorted(found.items())))


@given(
    curves=st.lists(
        st.builds(
            lambda name, points, measured: Curve(name, tuple(sorted(points.items())), measured),
            names,
            st.dictionaries(st.integers(0, 2**40), sizes, min_size=1, max_size=8),
            marks,
        ),
        min_size=1,
        max_size=8,
    ),
    limits=st.lists(st.builds(Limit, names, st.integers(1, 2**60)), max_size=4),
    title=names,
    width=st.integers(20, 120),
    unicode=st.booleans(),
    alone=st.booleans(),
)
def test_any_chart_can_be_drawn(
    curves: list[Curve], limits: list[Limit], title: str, width: int, unicode: bool, alone: bool
) -> None:
    below = None
    if not alone:
        bare = tuple(curve.replace(points=() if curve.measured else curve.points) for curve in curves)
        below = Chart(title, bare, quantity="time")
    chart = Chart(title, tuple(curves), tuple(limits), title, title, below=below)
    root = image(chart)
    lines = [curve for panel in chart.panels for curve in panel.curves if curve.points]
    assert len(marked(root, "curve")) == len(lines)
    assert len(marked(root, "measured")) == sum(len(c.measured) for panel in chart.panels for c in panel.curves)
    assert len(marked(root, "limit-label")) == len(limits)
    for element in root.iter():
        for name in ("cx", "cy", "x", "y"):
            if element.get(name):
                limit = float(root.get("width" if "x" in name else "height", ""))
                assert -1 <= float(element.get(name, "")) <= limit + 1
    Page(chart)
    for line in terminal(chart, width, 24, colour=False, unicode=unicode).splitlines():
        assert columns(line) <= width
        assert unicode or line.isascii()
