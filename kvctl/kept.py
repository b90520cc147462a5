"""Answers about a model that a search asks for again and again, each worked out once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from kvctl.errors import KvctlError

if TYPE_CHECKING:
    from kvctl.spec import ModelSpec

P = ParamSpec("P")
R = TypeVar("R")

MOST = 512
"""Answers of one function that are kept; the oldest go."""


def kept(function: Callable[Concatenate[ModelSpec, P], R]) -> Callable[Concatenate[ModelSpec, P], R]:
    """Keeps what a pure function says of a model, for the same model (the object) and equal other arguments, refusals included.

    What it returns is handed out again: callers must not change it. Arguments that cannot be compared are worked out anew.
    """
    found: dict[object, tuple[ModelSpec, R | KvctlError]] = {}

    @wraps(function)
    def ask(spec: ModelSpec, /, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (id(spec), args, *kwargs.items()) if kwargs else (id(spec), args)
        try:
            entry = found.get(key)
        except TypeError:
            return function(spec, *args, **kwargs)
        if entry is None:
            try:
                answer: R | KvctlError = function(spec, *args, **kwargs)
            except KvctlError as error:
                answer = error
            if len(found) >= MOST:
                del found[next(iter(found))]
            entry = found[key] = (spec, answer)  # held, so that no other model gets its number
        if isinstance(entry[1], KvctlError):
            raise entry[1].with_traceback(None)
        return entry[1]

    return ask
