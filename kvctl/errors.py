"""Exit codes and the one exception that users see."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process's exit status means (kvctl(1), EXIT STATUS)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    ANSWER_IS_NO = 3
    INTERRUPTED = 130


class Hint(str):
    """A hint that names options which not all commands have: `commands` give it, and others say `otherwise`, or nothing."""

    commands: tuple[str, ...]
    otherwise: str | None

    def __new__(cls, text: str, *commands: str, otherwise: str | None = None) -> Hint:
        made = super().__new__(cls, text)
        made.commands, made.otherwise = commands, otherwise
        return made


def hint_of(hint: str | None, command: str) -> str | None:
    """What a command says where an error has this hint."""
    return hint.otherwise if isinstance(hint, Hint) and command not in hint.commands else hint


class KvctlError(Exception):
    """One plain line of what went wrong, and one of what to do about it."""

    exit_code = ExitCode.FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(KvctlError):
    """The command line asks for something that cannot be."""

    exit_code = ExitCode.USAGE


class ConfigError(KvctlError):
    """A model's configuration is missing, damaged or not understood."""


class SourceError(KvctlError):
    """A model could not be found or fetched."""
