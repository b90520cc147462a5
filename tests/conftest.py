"""Shared helpers: measured cases, and the command line in-process."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

DATA = Path(__file__).parent / "data"


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def measured_cases(name: str) -> list[dict[str, Any]]:
    """Cases of a compact file of measured caches."""
    data = (DATA / name).read_bytes()
    text = gzip.decompress(data) if name.endswith(".gz") else data
    return [json.loads(line) for line in text.decode().splitlines()]


@pytest.fixture
def kvctl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the command line in this process: kvctl("size", "Qwen3-32B") -> (code, out, err)."""
    import io

    from kvctl import cli

    def run(*argv: str, stdin: str | bytes | None = None) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["kvctl", *argv])
        if stdin is not None:
            data = stdin.encode() if isinstance(stdin, str) else stdin
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        capsys.readouterr()
        code = cli.run()
        captured = capsys.readouterr()
        return Outcome(int(code), captured.out, captured.err)

    return run
