"""Start-up is part of the product: what a run may import. Times are for scripts/bench.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "numpy", "pydantic", "huggingface_hub", "httpx2", "httpx", "matplotlib", "psutil", "pynvml",
         "tokenizers"}  # fmt: skip

SCRIPT = """
import sys
sys.argv = ["kvctl", *sys.argv[1:]]
from kvctl.cli import run
code = run()
names = {name if name.startswith("kvctl.") else name.partition(".")[0] for name in sys.modules}
print(code, *sorted(names), file=sys.stderr)
"""


def imported(*argv: str) -> set[str]:
    """The packages that a run loads, and kvctl's own modules."""
    run = subprocess.run([sys.executable, "-c", SCRIPT, *argv], capture_output=True, text=True, check=True)
    code, *modules = run.stderr.splitlines()[-1].split()
    assert code == "0", run.stderr
    return set(modules)


@pytest.mark.parametrize(
    "argv",
    [
        ("size", "Qwen3-72B", "--ctx", "128k", "--json"),
        ("size", "deepseek-ai/DeepSeek-V3", "--ctx", "4k,32k", "--format", "csv", "--explain"),
        ("size", "Qwen/Qwen3-Next-80B-A3B-Instruct", "--format", "md", "--per-layer"),
        ("size", "--layers", "80", "--kv-heads", "8", "--head-dim", "128", "--json"),
        ("size", "--list-models", "qwen3"),
        ("size", "Qwen3-72B", "--ctx", "128k", "--engine", "vllm", "--gpu", "4xH100", "--json"),
        ("size", "DeepSeek-V3", "--engine", "all", "--gpu", "8xH100", "--ctx", "32k", "--format", "csv"),
        ("size", "Qwen3-72B", "--engine", "vllm", "--gpu", "4xH100", "--solve", "gpus", "--ctx", "8k", "--json"),
        ("size", "--list-gpus", "h100"),
        ("size", "--help"),
        ("profile", "--help"),
        ("--version",),
    ],
)
def test_nothing_heavy_and_no_rich_without_a_table(argv: tuple[str, ...]) -> None:
    modules = imported(*argv)
    assert not modules & HEAVY
    assert "rich" not in modules


def test_a_table_needs_rich_and_nothing_heavier() -> None:
    modules = imported("size", "Qwen3-72B", "--ctx", "128k")
    assert "rich" in modules
    assert not modules & HEAVY


@pytest.mark.parametrize(
    ("argv", "own"),
    [
        (("size", "Qwen3-32B", "--ctx", "4k", "--json"), "size"),
        (("size", "--help"), "size"),
        (("profile", "--help"), "profile"),
    ],
)
def test_a_command_loads_no_other(argv: tuple[str, ...], own: str) -> None:
    modules = imported(*argv)
    assert {name for name in modules if name.startswith("kvctl.commands.")} == {f"kvctl.commands.{own}"}
    assert not any(name.startswith("kvctl.measure") for name in modules)
