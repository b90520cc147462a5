"""Shell citizenship: streams, exit codes, pipes, odd terminals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Outcome

from kvctl.sources import catalogue

Run = Callable[..., Outcome]
KVCTL = [sys.executable, "-m", "kvctl"]


def shell(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*KVCTL, *argv], capture_output=True, text=True, env=os.environ | environment, timeout=60,
                          stdin=subprocess.DEVNULL)  # fmt: skip


def test_version(kvctl: Run) -> None:
    from kvctl import __version__

    assert kvctl("--version").out == f"kvctl {__version__}\n"


def test_no_command_is_help(kvctl: Run) -> None:
    outcome = kvctl()
    assert outcome.code == 0
    assert "size" in outcome.out


@pytest.mark.parametrize(
    ("argv", "code", "part"),
    [
        (["size"], 2, "no model given"),
        (["size", "Qwen3-32B", "--bogus"], 2, "No such option"),
        (["bogus"], 2, "No such command"),
        (["size", "Qwen3-32B", "--ctx", "4kk"], 2, "'4kk' is not a number of tokens"),
        (["size", "Qwen3-32B", "--ctx", ""], 2, "empty list"),
        (["size", "Qwen3-32B", "--ctx", "-5"], 2, "is not a number of tokens"),
        (["size", "Qwen3-32B", "--ctx", "1e30"], 2, "is not a number of tokens"),
        (["size", "Qwen3-32B", "--ctx", "9" * 30], 2, "out of range"),
        (["size", "Qwen3-32B", "--ctx", "0.0001k"], 2, "not a whole number"),
        (["size", "Qwen3-32B", "--sequences", "0"], 2, "out of range"),
        (["size", "Qwen3-32B", "--dtype", "fp8"], 2, "unknown model dtype"),
        (["size", "Qwen3-32B", "--kv-dtype", "q9"], 2, "unknown cache format"),
        (["size", "Qwen3-32B", "--engine", "vlm"], 2, "unknown engine"),
        (["size", "Qwen3-32B", "--format", "xml"], 2, "unknown format"),
        (["size", "Qwen3-32B", "--source", "web"], 2, "unknown source"),
        (["size", "--layers", "80"], 2, "needs all of"),
        (["size", "Qwen3-32B", "--layers", "80"], 2, "without a model"),
        (["size", "Qwen3-33B", "--source", "catalogue"], 1, "is not in the catalogue"),
        (["size", "./nothing-here"], 1, "nothing-here"),
    ],
)
def test_errors_are_a_line_and_a_hint(kvctl: Run, argv: list[str], code: int, part: str) -> None:
    outcome = kvctl(*argv)
    assert outcome.code == code
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert lines[0].startswith("kvctl: error: ")
    assert part in lines[0]
    assert len(lines) <= 2
    assert all(line.startswith("hint: ") for line in lines[1:])


def test_formats_hint_lists_what_there_is(kvctl: Run) -> None:
    assert "q8_0" in kvctl("size", "Qwen3-32B", "--kv-dtype", "q9").err


def test_a_typo_names_the_nearest_model(kvctl: Run) -> None:
    assert "Qwen/Qwen3-32B" in kvctl("size", "Qwen3-33B", "--source", "catalogue").err


def test_nothing_is_printed_when_a_later_model_fails(kvctl: Run, tmp_path: Path) -> None:
    outcome = kvctl("size", "Qwen3-32B", str(tmp_path / "missing"), "--json")
    assert outcome.code == 1
    assert outcome.out == ""


def test_reference_shapes_say_that_no_such_model_is_published(kvctl: Run) -> None:
    outcome = kvctl("size", "Qwen3-72B", "--ctx", "128k", "--json")
    assert outcome.json["results"][0]["kv_bytes"] == 42_949_672_960  # 2 · 80 · 8 · 128 · 2 · 131,072
    assert "no model Qwen3-72B is published" in outcome.err


def test_default_contexts_stop_at_the_models_maximum(kvctl: Run) -> None:
    contexts = [result["context"] for result in kvctl("size", "Qwen3-32B", "--json").json["results"]]
    assert contexts == [4096, 32768, 40960]


def test_several_models_and_contexts(kvctl: Run) -> None:
    results = kvctl("size", "Qwen3-32B", "DeepSeek-V3", "--ctx", "4k,32k", "--json").json["results"]
    assert [(r["model"]["id"], r["context"]) for r in results] == [
        ("Qwen/Qwen3-32B", 4096), ("Qwen/Qwen3-32B", 32768),
        ("deepseek-ai/DeepSeek-V3", 4096), ("deepseek-ai/DeepSeek-V3", 32768),
    ]  # fmt: skip


def test_list_models_is_one_name_a_line_in_a_pipe() -> None:
    run = shell("size", "--list-models", "qwen3-3*")
    assert "Qwen/Qwen3-32B" in run.stdout.splitlines()


def test_no_colour_in_a_pipe_or_where_it_is_unwanted() -> None:
    assert "\x1b" not in shell("size", "Qwen3-32B").stdout
    assert "\x1b[3" not in shell("size", "Qwen3-32B", FORCE_COLOR="", NO_COLOR="1").stdout


@pytest.mark.parametrize(
    "environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}, {"TERM": "dumb"}, {"COLUMNS": "20"}]
)
def test_odd_terminals_get_an_answer(environment: dict[str, str]) -> None:
    run = shell("size", "gemma-3-27b-it", "--ctx", "32k", "--explain", **environment)
    assert run.returncode == 0
    assert run.stdout
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("form", ["json", "csv", "md", "table"])
def test_a_reader_that_leaves_is_no_error(form: str) -> None:
    argv = [*KVCTL, "size", *catalogue.names()[:300], "-q", "--ctx", "4k,8k", "--explain", "--format", form]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 0, errors
    assert b"Traceback" not in errors


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [*KVCTL, "size", "Qwen3-32B", "--json"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert run.returncode == 1
    assert "No space left" in run.stderr
    assert "Traceback" not in run.stderr


def test_interrupt_is_130() -> None:
    process = subprocess.Popen(
        [*KVCTL, "size", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    time.sleep(1.5)  # long enough to be reading
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == b""
    assert b"interrupted" in err
    assert b"Traceback" not in err


def test_escape_sequences_from_a_config_do_not_reach_the_terminal(kvctl: Run) -> None:
    config = {"model_type": "x\x1b[2Jx", "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
              "hidden_size": 64}  # fmt: skip
    for form in ("table", "md", "csv"):
        outcome = kvctl("size", "-", "--ctx", "10", "--format", form, stdin=json.dumps(config))
        assert "\x1b" not in outcome.out + outcome.err


def test_closed_streams() -> None:
    def run(redirect: str) -> subprocess.CompletedProcess[str]:
        command = f"{sys.executable} -m kvctl size Qwen3-32B --ctx 1m --json {redirect}"
        return subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)

    json.loads(run("2>&-").stdout)
    assert "internal" not in run(">&-").stderr


@pytest.mark.parametrize("width", ["0", "1", "20", "abc"])
def test_numbers_are_whole_at_any_width(width: str) -> None:
    run = shell("size", "gemma-3-27b-it", "--ctx", "128k", COLUMNS=width)
    assert "11,173,625,856" in run.stdout
    assert "…" not in run.stdout
    run = shell("size", "Qwen3-32B", "DeepSeek-V3", "--ctx", "4k,32k", COLUMNS=width)
    assert "Qwen3-32B" in run.stdout
    assert "DeepSeek-V3" in run.stdout


def test_numbers_that_are_none(kvctl: Run) -> None:
    for argv in (
        ["--set", "torch_dtype=NaN"],
        ["--image-tokens", "9" * 400],
        ["--encoder-tokens", "-1"],
        ["-n", "9" * 30],
    ):
        outcome = kvctl("size", "Qwen3-32B", "--ctx", "1k", *argv)
        assert outcome.code == 2
        assert "internal" not in outcome.err
        assert len(outcome.err) < 2500


def test_help_breaks_no_option_in_80_columns(kvctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = kvctl("size", "--help")
    _, _, listed = outcome.out.partition("Options:\n")
    body, _, _ = listed.partition("\n\n")
    assert "--tensor-parallel-size" in body
    assert [line for line in body.splitlines() if len(line) > 80 or not line.startswith("  ")] == []


def test_what_no_engine_takes_is_wrong_usage(kvctl: Run) -> None:
    outcome = kvctl("size", "Qwen3-8B", "--engine", "all", "--kv-dtype", "zzz")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("kvctl: error: no engine answers: ideal: --kv-dtype: unknown cache format 'zzz'")


def test_a_build_beyond_those_known_is_estimated(kvctl: Run) -> None:
    outcome = kvctl("size", "Qwen3-8B", "--ctx", "4k", "--engine", "llama.cpp@b99999")
    assert outcome.code == 0
    assert "estimated: build b99999 by the rules of b" in outcome.err
