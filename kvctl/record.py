"""Frozen records that cost nothing at start-up.

`dataclasses` writes and compiles source for every class, which for the thirty small
classes of the core took longer than everything else in a run. A `Record` looks and type-checks
like a frozen dataclass, and its methods are written once, here.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self, dataclass_transform


@dataclass_transform(frozen_default=True)
class Record:
    """Fields are the annotations of the class and its bases, in that order; class values are defaults."""

    _fields: ClassVar[tuple[str, ...]] = ()
    _names: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        own = [name for name, hint in cls.__annotations__.items() if not str(hint).startswith("ClassVar")]
        cls._fields = (*cls._fields, *(name for name in own if name not in cls._fields))
        cls._names = frozenset(cls._fields)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        fields = self._fields
        values = self.__dict__
        values.update(zip(fields, args, strict=False))
        values.update(kwargs)
        if len(args) > len(fields) or len(values) != len(args) + len(kwargs):
            raise TypeError(f"{type(self).__name__}: too many or repeated values")
        if values.keys() != self._names:
            for name in fields:
                if name not in values:
                    # The class's own value is the default; without one this raises.
                    values[name] = getattr(type(self), name)
            if len(values) != len(fields):
                raise TypeError(f"{type(self).__name__}: unknown field among {sorted(kwargs)}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash((type(self), *self._values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in self._fields)})"

    def _values(self) -> tuple[Any, ...]:
        return tuple(map(self.__dict__.__getitem__, self._fields))

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed."""
        return type(self)(**dict(zip(self._fields, self._values(), strict=True)) | changes)
