"""Texts that come with kvctl: English prose, code, and Chinese prose (data/texts/README.md says from where)."""

from __future__ import annotations

from importlib import resources

from kvctl.errors import UsageError

_NAMES = ("english", "code", "chinese")


def samples() -> tuple[str, ...]:
    """Names of the texts; the first is the one to take where none is asked for."""
    return _NAMES


def read(name: str) -> str:
    """The whole text of a sample.

    Raises:
        UsageError: there is no sample of that name.

    """
    if name not in _NAMES:
        raise UsageError(f"no text is called {name[:80]!r}", hint=f"texts: {', '.join(_NAMES)}")
    return resources.files("kvctl").joinpath("data", "texts", f"{name}.txt").read_text(encoding="utf-8")
