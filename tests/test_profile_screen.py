"""What `kvctl profile` shows on a terminal."""

from __future__ import annotations

import pytest

from kvctl.hardware.device import Device, Readings
from kvctl.measure.machine import Gpu, look
from kvctl.measure.report import Line, ProfileReport
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
