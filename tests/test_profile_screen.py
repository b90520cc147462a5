"""What `kvctl profile` shows on a terminal."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl.hardware.device import Device, Readings
from kvctl.measure.assessed import AssessAsked, Assessed, Assessment, Ends, Greedy, Recall
from kvctl.measure.machine import Gpu, look
from kvctl.measure.quality import Estimate, Quality
from kvctl.measure.report import Line, ProfileReport
from kvctl.measure.shared import FirstToken, Held, PrefillWork, Sharing, SharingAsked
from kvctl.measure.statistics import Ratio, Sample, ratio
from kvctl.output_profile import emit_profile
from kvctl.screen_lines import Screen
from kvctl.screen_profile import print_machine, print_profile

KIB = 1024


def shown(capsys: pytest.CaptureFixture[str], *lines: Line) -> str:
    print_profile(Screen(), ProfileReport(None, "transformers", None, "bf16", None, {}, {}, lines=lines), None)
    return capsys.readouterr().out


def test_a_line_that_falls_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(
        capsys,
        Line("steady memory", 1, 4 * KIB, -2 * KIB, 45 * KIB, points=2),
        Line("TTFT", 1, -0.5, 0.25, points=4, curve=-2e-9),
        Line("TPOT", 1, 0.7, -0.0024, points=3, slope_error=0.0002),
    )
    assert "4 KiB − 2 KiB × tokens; predicted for the cache: 45 KiB" in out
    assert "−500 ms + 250 ms × tokens − 2 ns × tokens²" in out
    assert "700 ms − 2.40 ms × tokens" in out


def test_a_slope_within_the_noise_is_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(
        capsys,
        Line("TTFT", 1, 0.7, -0.0024, points=2),  # one run each: nothing to judge by
        Line("TPOT", 1, 0.7, -0.0024, points=3, slope_error=0.0013),
    )
    assert "TTFT  its growth with context cannot be told from noise: --repeat 3" in out
    assert "TPOT  its growth with context is within the noise" in out


def test_a_gpu_shows_its_clocks_and_power(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = Gpu(Device("H100", 80 * 2**30, index=0), Readings(sm_mhz=1980, power_watts=120.5, temperature_c=41), ())
    print_machine(Screen(), look().replace(gpus=(gpu,), no_gpu=None))
    assert "SM clock 1980 MHz, power 120.5 W, temperature 41 °C" in capsys.readouterr().out


# -- techniques ---------------------------------------------------------------------------------------


def row(name: str, size: int, **more: Any) -> Assessed:
    return Assessed(name, (), 130, size, size, 5_990_400, **more)


SCORED = Quality(64, 1, 4, "blocks", 21.75, 21.7, Estimate(-0.16, 0.22, None), Estimate(0.00026, 0.0001, None), 0.0015,
                 Estimate(0.984, 0.01, None))  # fmt: skip
MEASURED = {
    "working_bytes": 34_309_000, "ttft": Ratio(1.03, 0.9, 1.2, "pairs"), "tpot": Ratio(1.11, 1.0, 1.2, "pairs"),
    "quality": SCORED, "greedy": Greedy(4, 32, 1), "recall": Recall((0.0, 1.0), (1, 1), 1), "pareto": True,
}  # fmt: skip


def report(**parts: Any) -> ProfileReport:
    return ProfileReport(None, "transformers", None, "fp32", None, {}, {}, **parts)


def assessed(*rows: Assessed, interrupted: bool = False) -> ProfileReport:
    return report(techniques=Assessment(rows, AssessAsked(128), "english", interrupted))


def table_of(out: str) -> list[str]:
    """Lines up to the first that explains."""
    lines = out.splitlines()[2:]
    return lines[: next(index for index, line in enumerate(lines) if line.startswith(("bytes after", "found ")))]


@pytest.mark.parametrize("columns", [80, 140])
def test_techniques_fit_a_terminal(columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    found = assessed(row("plain", 5_990_400), row("int4:group=32:residual=128", 1_591_200, **MEASURED))
    print_profile(Screen(), found, None)
    table = table_of(capsys.readouterr().out)
    assert max(map(len, table)) <= columns
    assert sum("technique" in line for line in table) == (2 if columns == 80 else 1)
    assert any("1,591,200" in line and "3.76×" in line for line in table)


def test_what_was_not_measured_is_not_explained(capsys: pytest.CaptureFixture[str]) -> None:
    print_profile(Screen(), assessed(row("plain", 5_990_400), row("int8", 1_591_200), interrupted=True), None)
    out = capsys.readouterr().out
    assert "3.76×" in out  # 5,990,400 / 1,591,200
    assert "smaller: than the plain cache in fp32" in out
    for absent in ("TTFT", "times over", "works in", "perplexity", "keys", "same", "?", "–"):
        assert absent not in out


def test_before_anything_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found = assessed(interrupted=True).replace(interrupted=True)
    assert not found.found
    print_profile(Screen(), found, None)
    emit_profile(found, "md", [], quiet=True)
    out = capsys.readouterr().out
    assert "interrupted: nothing was measured" in out
    assert "bytes after" not in out


@pytest.mark.parametrize(("ends", "part"), [
    (Ends(1000, 30, 0), "fp8: 3.0% of all elements are cut off at its largest number: it has no scale; fp8:scaled"),
    (Ends(1000, 1, 60), "fp8: 0.1% of all elements are cut off at its largest number and 6.0% of all elements became zero"),
    (Ends(1000, 0, 60), "fp8: 6.0% of all elements became zero"), (Ends(1000, 0, 50), ""), (None, ""),
])  # fmt: skip
def test_what_a_format_without_a_scale_loses(ends: Ends | None, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_profile(Screen(), assessed(row("plain", 5_990_400), row("fp8", 1_497_600, ends=ends)), None)
    out = capsys.readouterr().out
    assert part in out
    assert ("fp8:" in out) == bool(part)


def test_what_one_run_cannot_say_has_a_question_mark(capsys: pytest.CaptureFixture[str]) -> None:
    alone = ratio(Sample((2.1,)), Sample((2.0,)), paired=True)
    print_profile(
        Screen(), assessed(row("plain", 5_990_400), row("int8", 1_591_200, ttft=alone, tpot=MEASURED["tpot"])), None
    )
    out = capsys.readouterr().out
    assert "1.05×?" in out
    assert "1.11× " in out or "1.11×\n" in out
    assert "?: too few runs to tell from noise, --repeat 3" in out


def test_techniques_as_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    emit_profile(assessed(row("plain", 5_990_400), row("int8", 1_591_200, **MEASURED)), "md", [], quiet=True)
    lines = capsys.readouterr().out.splitlines()
    head = "technique | bytes | smaller | TTFT | TPOT | works in | perplexity | ± | KL | p99 | top-1 | same | keys | best for its bytes"
    assert lines[2:5] == [
        f"| {head} |", "|---|" + "---:|" * 13,
        "| plain | 5,990,400 | 1.00× | – | – | – | – | – | – | – | – | – | – |  |",
    ]  # fmt: skip
    assert lines[5] == (
        "| int8 | 1,591,200 | 3.76× | 1.03× | 1.11× | 32.72 MiB | -0.16% | 0.22% | 0.00026 | 0.0015 | 98.4% | 4 | 2/2 | yes |"
    )
    assert lines[6] == ""
    assert all(line.startswith("- ") for line in lines[7:])
    assert any("best for its bytes: no other is as good in fewer bytes" in line for line in lines)


# -- prompts with a common prefix ---------------------------------------------------------------------


def shared(*, hits: tuple[int, ...], pairs: int) -> ProfileReport:
    asked = SharingAsked(64, 0.5, 3, 16, 4)
    tokens = sum(asked.lengths) + 3 * 4
    held = (Held("contiguous", 1_132_462_080, None, 24_576, tokens), Held("contiguous-pow2", 11_796_480, None, 256, tokens),
            Held("paged", 9_584_704, 9_584_704, 208, tokens, 13), Held("prefix", 6_635_584, 6_635_584, 208 - sum(hits), tokens - sum(hits), 9))  # fmt: skip
    one, other = Sample((0.1, 0.11, 0.12)[:pairs]), Sample((0.2, 0.21, 0.2)[:pairs])
    first = FirstToken(other, one, ratio(one, other, paired=True))
    work = PrefillWork(12_800_000_000, 5_900_000_000 if sum(hits) else 12_800_000_000)
    return report(sharing=Sharing(asked, held, (), hits, hits, None, work, first))


@pytest.mark.parametrize("columns", [80, 140])
def test_policies_fit_a_terminal(columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_profile(Screen(), shared(hits=(0, 32, 32), pairs=3), None)
    table = table_of(capsys.readouterr().out)
    assert max(map(len, table)) <= columns
    assert any("1,132,462,080" in line and "6,635,584" in line for line in table)
    assert any("power of 2" in line for line in table)


@pytest.mark.parametrize(("pairs", "part"), [(1, "0.50× (?:"), (2, "× (?:"), (3, " to ")])
def test_few_pairs_have_no_interval(pairs: int, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two, Student's t has one degree of freedom: 12.7 standard errors."""
    print_profile(Screen(), shared(hits=(0, 32, 32), pairs=pairs), None)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("TTFT"))
    assert part in line
    assert (" to tell from noise" in line) == (pairs < 3)


def test_nothing_found_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    print_profile(Screen(), shared(hits=(0, 0, 0), pairs=3), None)
    out = capsys.readouterr().out
    assert "nothing: prompts share no whole block of 16 tokens before their last token" in out
    assert "12.8 GFLOP, nothing saved" in out
    assert "with the prefix in the cache" not in out


def test_policies_as_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    emit_profile(shared(hits=(0, 32, 32), pairs=3), "md", [], quiet=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:6] == [
        "|  | one piece, longest | one piece, power of 2 | paged | paged, prefixes shared |", "|---|---:|---:|---:|---:|",
        "| memory | 1.05 GiB | 11.25 MiB | 9.14 MiB | 6.33 MiB |", "| bytes | 1,132,462,080 | 11,796,480 | 9,584,704 | 6,635,584 |",
    ]  # fmt: skip
    assert any(line.startswith("- TTFT: 110 ms with the prefix in the cache") for line in lines)
