"""Answers about a model are worked out once, and handed out for that model alone."""

from __future__ import annotations

from typing import Any

import pytest

from kvctl import kept as module
from kvctl.errors import UsageError
from kvctl.kept import kept
from kvctl.model import shape_spec
from kvctl.spec import ModelSpec


def counted() -> tuple[Any, list[Any]]:
    asked: list[Any] = []

    @kept
    def answer(spec: ModelSpec, factor: Any, *, more: int = 0) -> Any:
        asked.append(factor)
        if factor == 0:
            raise UsageError("nothing")
        return [len(spec.layers), factor, more]

    return answer, asked


def test_the_same_question_is_asked_once() -> None:
    answer, asked = counted()
    spec = shape_spec(2, 1, 8)
    assert answer(spec, 3) == answer(spec, 3) == [2, 3, 0]
    assert answer(spec, 3, more=1) == [2, 3, 1]
    assert asked == [3, 3]


def test_another_model_has_answers_of_its_own() -> None:
    answer, asked = counted()
    for layers in (2, 3, 4):
        assert answer(shape_spec(layers, 1, 8), 1)[0] == layers
    assert len(asked) == 3


def test_a_refusal_is_an_answer() -> None:
    answer, asked = counted()
    spec = shape_spec(2, 1, 8)
    for _ in range(3):
        with pytest.raises(UsageError, match="nothing"):
            answer(spec, 0)
    assert asked == [0]


def test_what_cannot_be_compared_is_worked_out_anew() -> None:
    answer, asked = counted()
    spec = shape_spec(2, 1, 8)
    assert answer(spec, [1]) == answer(spec, [1])
    assert len(asked) == 2


def test_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    answer, asked = counted()
    spec = shape_spec(2, 1, 8)
    for factor in (1, 2, 3, 3, 1):
        answer(spec, factor)
    assert asked == [1, 2, 3, 1]
