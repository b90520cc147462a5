"""README.md shows what the program prints, and counts what the tests count."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Outcome, measured_cases

from kvctl.sources import catalogue

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
Run = Callable[..., Outcome]


def test_the_example_is_what_the_program_prints(kvctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    blocks = re.findall(r"```console\n\$ kvctl (.*?)\n(.*?)```", README, re.DOTALL)
    assert blocks
    for command, shown in blocks:
        assert kvctl(*shlex.split(command)).out == shown


def test_every_command_line_for_a_bundled_model_works(kvctl: Run) -> None:
    lines = [
        line.partition(" #")[0].partition(" |")[0] for line in README.splitlines() if line.startswith("kvctl size ")
    ]
    runnable = [line for line in lines if not re.search(r"path/to|some-org|gguf|\$\(", line)]
    assert len(runnable) >= 5
    for line in runnable:
        assert kvctl(*shlex.split(line)[1:]).code == 0, line


def test_counts_of_measured_cases() -> None:
    cases = measured_cases("transformers.jsonl") + measured_cases("transformers_more.jsonl.gz")
    types = {case["config"].get("model_type") for case in cases}
    match = re.search(r"cache of ([\d,]+) small models, (\d+) model types", README)
    assert match is not None
    assert (int(match[1].replace(",", "")), int(match[2])) == (len(cases), len(types))


def test_models_of_the_peers_table_are_in_the_catalogue() -> None:
    rows = re.findall(r"^\| ([\w.-]+)(?:, attention)? \| [\d,]{6,} \|", README, re.MULTILINE)
    assert len(rows) == 14
    assert all(catalogue.has(name) for name in rows), rows
