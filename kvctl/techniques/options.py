"""The words behind a technique's name: `int4:group=32:residual=128`."""

from __future__ import annotations

from collections.abc import Sequence

from kvctl.errors import UsageError
from kvctl.units import parse_tokens


class Options:
    """What stands behind the colons of one technique; every word must be asked for."""

    def __init__(self, name: str, words: Sequence[str]) -> None:
        self.name = name
        self._plain = [word for word in words if "=" not in word]
        self._named: dict[str, str] = {}
        for word in words:
            key, equals, value = word.partition("=")
            if equals:
                if key in self._named:
                    raise UsageError(f"{name}: {key[:40]} is said twice")
                self._named[key] = value
        self._known: list[str] = []

    def first(self, default: str) -> str:
        """The word without a name: a budget, …"""
        return self._plain.pop(0) if self._plain else default

    def number(self, key: str, default: int, *, least: int = 0) -> int:
        """A whole number: `group=32`."""
        self._known.append(key)
        text = self._named.pop(key, None)
        value = default if text is None else self._number(key, text)
        if value < least:
            raise UsageError(f"{self.name}:{key}={value} is too small", hint=f"at least {least}")
        return value

    def _number(self, key: str, text: str) -> int:
        try:
            return parse_tokens(text, what=key)
        except UsageError:
            raise UsageError(f"{self.name}:{key}={text[:40]} is no whole number", hint=f"{key}=64") from None

    def choice(self, key: str, values: Sequence[str]) -> str:
        """One of several words; the first is the default."""
        self._known.append(key)
        value = self._named.pop(key, values[0])
        if value not in values:
            raise UsageError(f"{self.name}:{key}={value[:40]} is not known", hint="one of " + ", ".join(values))
        return value

    def text(self, key: str) -> str | None:
        """A word: `values=int4`."""
        self._known.append(key)
        return self._named.pop(key, None)

    def flag(self, word: str) -> bool:
        """A word that stands for itself: `sym`."""
        self._known.append(word)
        if word in self._plain:
            self._plain.remove(word)
            return True
        return False

    def rest(self) -> tuple[tuple[str, str], ...]:
        """All named words that are left, for who knows them by himself."""
        left = tuple(self._named.items())
        self._named = {}
        return left

    def end(self) -> None:
        """Refuses what nobody asked for."""
        left = [*self._plain, *self._named]
        if left:
            known = ", ".join(dict.fromkeys(self._known))
            if left[0] in self._known:
                raise UsageError(
                    f"{self.name}: {left[0][:40]} is said twice, or takes no value", hint=f"it takes {known}"
                )
            raise UsageError(
                f"{self.name}: {left[0][:40]!r} is not known here", hint=f"it takes {known}" if known else None
            )
