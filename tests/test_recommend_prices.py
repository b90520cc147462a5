"""Prices that the user gives: numbers, names, files; what goes wrong; what a deployment costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvctl.errors import ConfigError, KvctlError, SourceError, UsageError
from kvctl.recommend.prices import Prices, cost, parse, remarks, words
from kvctl.speed import Range


def test_one_number_is_the_price_of_any_gpu() -> None:
    assert parse(["2.5"]).of("L40S") == 2.5
    assert parse(["$2.5"]).each == 2.5
    assert parse([]).of("L40S") is None


def test_names_are_spelled_as_elsewhere() -> None:
    prices = parse(["h100=2.5, L40S = 0.9,1"])
    assert prices.of("H100 SXM") == prices.of("H100 PCIe") == 2.5
    assert prices.of("L40S") == 0.9
    assert prices.of("Tesla T4") == 1.0  # any other


def test_a_card_of_its_own_goes_before_a_name_for_several() -> None:
    prices = parse(["A100=1,A100 80GB PCIe=1.5,A100-80GB=1.25"])
    assert prices.of("A100 80GB PCIe") == 1.5
    assert prices.of("A100 80GB SXM") == 1.25
    assert prices.of("A100 40GB SXM") == 1.0


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text('"H100" = 2.5\nL40S = 1\ndefault = 0.5\n')
    prices = parse([str(path)])
    assert (prices.of("L40S"), prices.of("Tesla T4")) == (1.0, 0.5)
    path.write_text("[prices]\nL40S = 0.8\n")
    assert parse([str(path)]).of("L40S") == 0.8
    assert parse([str(path), "9"]).of("Tesla T4") == 9.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no price"),
        ("free", "'free' is no price"),
        ("H100=cheap", "H100: 'cheap' is no price"),
        ("H100=", "H100: '' is no price"),
        ("=2", "unknown GPU ''"),
        ("0", "out of range"),
        ("H100=0", "out of range"),
        ("-1", "is no price"),
        ("nan", "is no price"),
        ("1e9", "is no price"),
        ("2000000", "out of range"),
        ("H1000=2", "unknown GPU 'H1000'"),
        ("L40S=1,L40S=2", "two prices"),
        ("1,2", "is no price"),
        ("1.2.3", "is no price"),
        ("H100=2;L40S=1", "is no price"),
        ("9" * 60, "is no price"),
    ],
)
def test_what_is_no_price(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse([text])
    assert caught.value.hint


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"L40S", "is no TOML"),
        (b"\xff", "is no TOML"),
        (b"", "holds no prices"),
        (b"prices = 3", "holds no prices"),
        (b'L40S = "1"', "is no number"),
        (b"L40S = true", "is no number"),
        (b"L40S = nan", "out of range"),
        (b"L40S = inf", "out of range"),
        (b"Banana = 1", "unknown GPU 'Banana'"),
        (b"L40S = 1\nl40s = 2", "two prices"),
    ],
)
def test_what_is_no_file_of_prices(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "p.toml"
    path.write_bytes(data)
    with pytest.raises(KvctlError, match=message) as caught:
        parse([str(path)])
    assert isinstance(caught.value, ConfigError | UsageError)
    assert caught.value.hint


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        parse([str(tmp_path / "none.toml")])
    (tmp_path / "d.toml").mkdir()
    with pytest.raises(SourceError, match="directory"):
        parse([str(tmp_path / "d.toml")])


def test_the_cost_of_a_million_tokens() -> None:
    # 4 × 0.9 = 3.6 an hour, 0.001 a second; at 500 tokens a second a million takes 2,000 s: 2.0.
    found = cost("L40S", 4, parse(["L40S=0.9"]), Range(250.0, 500.0, 1000.0))
    assert found.per_hour == pytest.approx(3.6)
    assert found.per_million is not None
    assert found.per_million.mid == pytest.approx(2.0)
    assert (found.per_million.low, found.per_million.high) == (pytest.approx(1.0), pytest.approx(4.0))
    assert words(found) == "4 GPUs, 3.6 an hour"


def test_a_card_with_two_dies_is_paid_for_once() -> None:
    # MI250: two dies, each a GPU to an engine; a card at 4 an hour. Three dies are on two cards.
    for gpus, hour, said in (
        (1, 4.0, "1 GPU of 1 card, 4 an hour"), (2, 4.0, "2 GPUs of 1 card, 4 an hour"), (3, 8.0, "3 GPUs of 2 cards, 8 an hour"),
    ):  # fmt: skip
        found = cost("Instinct MI250", gpus, parse(["MI250=4"]), dies=2)
        assert (found.gpus, found.per_hour, words(found)) == (gpus, hour, said)
    # 4 an hour at 1,000 tokens a second: 4 / 3.6 for a million.
    each = cost("Instinct MI250", 2, parse(["4"]), Range(1000.0, 1000.0, 1000.0), dies=2).per_million
    assert each is not None
    assert each.mid == pytest.approx(4 / 3.6)


def test_without_a_price_gpus_are_counted() -> None:
    found = cost("L40S", 4, Prices(), Range(1.0, 2.0, 3.0))
    assert (found.per_hour, found.per_million, found.order) == (None, None, (0.0, 4))
    assert words(found) == "4 GPUs"
    assert cost("host", 0, parse(["2"])).per_hour is None  # a host has no GPU to pay
    assert cost("L40S", 1, parse(["2"]), Range(0.0, 1.0, 2.0)).per_million is None
    assert found.to_dict()["per_million_output_tokens"] is None


def test_a_price_that_says_nothing_is_named(tmp_path: Path) -> None:
    (unused, bare) = remarks(parse(["H200=2"]), ["H100 SXM", "H100 SXM"])
    assert unused.startswith("--price H200: no such GPU is asked about")
    assert bare.startswith("H100 SXM has no price")
    # What is used, for any GPU, or in a list of all there is, is no matter.
    path = tmp_path / "p.toml"
    path.write_text("H100 = 2.5\nH200 = 3.5\n")
    for texts in (["H100=2"], ["2"], [str(path)], []):
        assert remarks(parse(texts), ["H100 SXM"]) == ()
    assert remarks(parse(["H200=2,H100=1"]), ["H100 SXM", "H200 SXM"]) == ()
    assert (
        len(remarks(parse(["H200=2,H100=1"]), ["H100 SXM"])) == len(remarks(parse(["H200=2", "1"]), ["H100 SXM"])) == 1
    )
    assert remarks(parse([str(path)]), ["L40S"]) == ("L40S has no price: its GPUs are counted instead",)
