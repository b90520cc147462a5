"""Bounds on techniques, the smallest that keeps them, and what a model generates."""

from __future__ import annotations

import pytest

from kvctl.measure.assessed import AssessAsked, Assessed, Assessment, Bounds, Recall
from kvctl.measure.generation import greedy
from kvctl.measure.quality import Estimate, Quality


def row(name: str, size: int, change: float, top1: float, error: float = 0.1) -> Assessed:
    quality = Quality(1536, 6, 20, "blocks", 20.0, 20.0, Estimate(change, error, None), Estimate(0.1, 0.01, None), 0.4,
                      Estimate(top1, error / 100, None))  # fmt: skip
    return Assessed(name, (), 576, size, size, 1000, quality=quality)


ROWS = (
    Assessed("plain", (), 576, 1000, 1000, 1000),
    row("int8", 500, 0.1, 0.99),
    row("int4", 250, 0.9, 0.95),
    row("int2", 125, 300, 0.4),
)


def found(bounds: Bounds) -> Assessment:
    return Assessment(ROWS, AssessAsked(512, bounds=bounds), "english")


@pytest.mark.parametrize(("bounds", "smallest", "broken"), [
    (Bounds(1.0), "int4", ["int2"]),
    (Bounds(None, 98), "int8", ["int4", "int2"]),
    (Bounds(0.05, 30), None, ["int8", "int4", "int2"]),
    (Bounds(400.0, 30.0), "int2", []),
    (Bounds(), None, []),
])  # fmt: skip
def test_the_smallest_that_keeps_the_bounds(bounds: Bounds, smallest: str | None, broken: list[str]) -> None:
    made = found(bounds)
    assert (made.smallest.name if made.smallest is not None else None) == smallest
    assert [line.partition(":")[0] for line in made.broken()] == broken
    # One that keeps them is enough where the best is asked for.
    assert bool(made.broken(best=True)) == (smallest is None and bool(broken))


def test_how_sure_a_bound_is_kept() -> None:
    # 0.9% ± 0.1 keeps 1% by one error only, and 1.2% by three; 95% ± 0.1 keeps 94.9% by one, and 94.7% by three.
    assert not Bounds(1.0).sure(ROWS[2])
    assert Bounds(1.2).sure(ROWS[2])
    assert not Bounds(None, 94.9).sure(ROWS[2])
    assert Bounds(None, 94.7).sure(ROWS[2])


def test_continuations_until_they_part() -> None:
    # Parted after 1 of 3, after none, and never: (1 + 0 + 3) / 3.
    made = greedy([[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[1, 9, 3], [5, 4, 6], [7, 8, 9]])
    assert (made.same, made.of, made.texts) == (pytest.approx(4 / 3), 3, 3)


def test_keys_in_words() -> None:
    recall = Recall((0.0, 0.5, 1.0), (2, 1, 2), 2)
    assert recall.words == "5/6"
    assert recall.to_dict()["by_depth"][1] == {"depth": 0.5, "found": 1, "of": 2}


@pytest.mark.parametrize(("positions", "tokens", "prompt", "scored", "windows"), [
    (None, None, 512, 256, 6), (2048, 1000, 512, 250, 4),
    (300, None, 200, 99, 6),  # two thirds of 300; the last position is that of the token that is only predicted
    (300, 200, 200, 67, 3),  # 200 in pieces of at most 99: three of 67
])  # fmt: skip
def test_pieces_of_text_that_a_model_can_read(
    positions: int | None, tokens: int | None, prompt: int, scored: int, windows: int
) -> None:
    made = AssessAsked(512).within(positions, tokens)
    assert (made.prompt, made.scored, made.windows) == (prompt, scored, windows)
