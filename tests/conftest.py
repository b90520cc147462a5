"""Shared helpers: measured cases, and the command line in-process."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings

# Machines are noisy: how long an example takes says nothing about the code.
settings.register_profile("noisy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("noisy")

# Under nohup, or behind a script's &, signals are ignored, and so they would be in programs that tests start and signal:
# what is handled here is as the system has it there. SIGINT is as Python has it, for what it leaves alone where it is ignored.
for _name in ("SIGINT", "SIGTERM", "SIGHUP"):
    _number = getattr(signal, _name, None)
    if _number is not None and signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _name == "SIGINT" else lambda *_: None)

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


_LLAMA_CPP = {"n_ctx": "--ctx", "k": "-ctk", "v": "-ctv", "fa": "-fa", "n_seq_max": "-np", "n_ubatch": "-ub"}


def llama_cpp_options(arguments: dict[str, Any]) -> list[str]:
    """Options for a context that llama.cpp's library was asked for; its default is one sequence."""
    options = ["--engine", "llama.cpp"]
    for name, value in ({"n_seq_max": 1} | arguments).items():
        if name == "unified":
            options.append("--kv-unified" if value else "--no-kv-unified")
        elif name == "swa_full":
            options += ["--swa-full"] * value
        else:
            options += [_LLAMA_CPP[name], str(value)]
    return options


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of its own for every test, and a client library that reads the environment anew."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING", "KVCTL_", "TRANSFORMERS_")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in list(sys.modules):
        if name.partition(".")[0] == "huggingface_hub":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)


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
