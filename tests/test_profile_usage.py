"""Wrong usage of `kvctl profile`, and profile without torch: a line each, before anything is measured or loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Outcome

from kvctl import cli

Run = Callable[..., Outcome]


@pytest.fixture
def profile(kvctl: Run, monkeypatch: pytest.MonkeyPatch, surroundings: None) -> Run:
    """`kvctl profile` where torch cannot be imported and nothing may be measured."""
    from kvctl.measure import machine, run

    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(machine, "look", never)
    monkeypatch.setattr(run, "profile", never)
    return lambda *argv: kvctl("profile", *argv)


def one_line(outcome: Outcome) -> str:
    """The error, which is a line and perhaps a hint, and nothing on stdout."""
    assert outcome.out == ""
    first, *hints = outcome.err.splitlines()
    assert first.startswith("kvctl: error: ")
    assert "internal error" not in first
    assert [line[:6] for line in hints] in ([], ["hint: "])
    return outcome.err


WRONG = [
    (["--device", "gpu"], 2, "--device: unknown 'gpu'"),
    (["--device", "cuda:x"], 2, "--device: unknown 'cuda:x'"),
    (["--device", "cuda:"], 2, "--device: unknown 'cuda:'"),
    (["--dtype", "fp7"], 2, "unknown model dtype 'fp7'"),
    (["--attn", "flash"], 2, "--attn: unknown 'flash'"),
    (["--engine", "sglang"], 2, "'sglang' is not one that profile runs"),
    (["--weights", "none"], 2, "--weights: unknown 'none'"),
    (["--ctx", "0"], 2, "a prompt has at least 1 token"),
    (["--ctx", "-1"], 2, "'-1' is not a number of tokens"),
    (["--ctx", ""], 2, "empty list"),
    (["--ctx", "4,096"], 2, "could be one number or several"),
    (["--batch", "0"], 2, "--batch: 0 is out of range"),
    (["--batch", "1;8"], 2, "'1;8' is no list of whole numbers"),
    (["--decode", "-1"], 2, "--decode: -1 is out of range"),
    (["--repeat", "0"], 2, "--repeat: 0 is out of range"),
    (["--prefill-chunk", "0"], 2, "--prefill-chunk: 0 is out of range"),
    (["--seed", "9" * 20], 2, "out of range"),
    (["--layers", "2"], 2, "--layers keeps a few layers of a model with random weights"),
    (["--weights", "random", "--layers", "0"], 2, "--layers: 0 is out of range"),
    (["--tp", "0"], 2, "--tp: 0 is out of range"),
    (["--tp", "3", "--nnodes", "2", "--rdzv-endpoint", "a:1"], 2, "cannot be spread evenly"),
    (["--tp", "2", "--nnodes", "2"], 2, "--nnodes needs --rdzv-endpoint"),
    (["--nnodes", "2", "--rdzv-endpoint", "a:1"], 2, "several nodes share a model with --tp"),
    (["--node-rank", "1"], 2, "no such node"),
    (["--device-map", "balanced"], 2, "--device-map: unknown 'balanced'"),
    (["--device-map", "auto", "--tp", "2"], 2, "--tp cuts every layer"),
    (["--until-oom", "foo"], 2, "--until-oom: unknown 'foo'"),
    (["--until-oom", "ctx", "--tp", "2"], 2, "--until-oom is about one device"),
    (["--memory-limit", "4GiB"], 2, "--memory-limit bounds --until-oom"),
    (["--until-oom", "ctx", "--memory-limit", "4XB"], 2, "'4XB' is not an amount of memory"),
    (["--save", "missing/run.json"], 1, "there is no folder"),
    (["--save", "."], 1, "it is no plain file"),
    (["--plot", "memory.xyz"], 2, "ends in none of .svg, .png, .html"),
    (["--plot", "missing/memory.svg"], 1, "there is no folder"),
    (["--plot", "-", "--json"], 2, "--plot - draws on stdout"),
    (["--compare", "missing.json"], 1, "missing.json: no such file"),
    (["--prompt", "missing.txt"], 1, "--prompt: cannot read missing.txt"),
    (["--format", "xml"], 2, "unknown format 'xml'"),
    (["--encoder-tokens", "-1"], 2, "-1 is not in the range"),
    (["--decode", "many"], 2, "'many' is not a valid int"),
    (["--kv-dtype", "q8_0"], 2, "--kv-dtype: only for other engines"),
    (["--swa-full"], 2, "--swa-full: only for other engines"),
    (["--engine-path", "bin"], 2, "--engine-path: only for other engines"),
    (["--bogus"], 2, "No such option: --bogus"),
]


@pytest.mark.parametrize(
    ("argv", "code", "part"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else None
)
def test_wrong_usage_of_a_model(profile: Run, argv: list[str], code: int, part: str) -> None:
    outcome = profile("Qwen3-8B", *argv)
    assert part in one_line(outcome)
    assert outcome.code == code


@pytest.mark.parametrize(
    ("argv", "code", "part"),
    [
        *(case for case in WRONG if case[0][0] in ("--device", "--attn", "--ctx", "--batch", "--tp", "--save", "--compare", "--until-oom")),
        (["--engine", "vllm"], 2, "--engine vllm is about a model, and none is named"),
        (["--source", "hub"], 2, "--source is about a model"),
        (["--revision", "main"], 2, "--revision is about a model"),
        (["--prompt", "text.txt"], 2, "--prompt is about a model"),
        (["--set", "layers"], 2, "--set"),
        (["--layers", "0"], 2, "--layers: 0 is out of range"),
        (["--weights", "none"], 2, "--weights: unknown 'none'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_wrong_usage_without_a_model(profile: Run, argv: list[str], code: int, part: str) -> None:
    outcome = profile(*argv)
    assert part in one_line(outcome)
    assert outcome.code == code


@pytest.mark.parametrize("argv", [["--tp", "2"], ["--layers", "0", "--weights", "random"], ["--prefill-chunk", "0"], ["--until-oom", "ctx"], ["--attn", "sdpa"],
                                  ["--device", "cpu"], ["--device-map", "auto"], ["--encoder-tokens", "4"]], ids=" ".join)  # fmt: skip
def test_what_only_transformers_has(profile: Run, argv: list[str]) -> None:
    outcome = profile("model.gguf", "--engine", "llama.cpp", *argv)
    assert f"{argv[0]}: only for transformers, and --engine is llama.cpp" in one_line(outcome)
    assert outcome.code == 2


def test_two_formats(profile: Run) -> None:
    outcome = profile("--json", "--format", "csv")
    assert "--json and --format csv ask for two formats" in one_line(outcome)
    assert outcome.code == 2


@pytest.mark.parametrize(("engine", "argv", "hint"), [
    ("vllm", ["--tp", "2"], "--engine-flags '--tensor-parallel-size N' hands its own flag on"),
    ("vllm", ["--set", "num_hidden_layers=2"], "--engine-flags '--hf-overrides JSON' hands its own flag on"),
    ("vllm", ["--revision", "main"], "--engine-flags '--revision REV' hands its own flag on"),
    ("llama.cpp", ["--set", "num_hidden_layers=2"], "--override-kv"),
    ("llama.cpp", ["--weights", "random"], "leave it out"),
    ("llama.cpp", ["--dtype", "bf16"], "leave it out"),
    ("llama.cpp", ["--source", "hub"], "leave it out"),
], ids=str)  # fmt: skip
def test_what_an_engine_would_not_heed(profile: Run, engine: str, argv: list[str], hint: str) -> None:
    outcome = profile("model.gguf", "--engine", engine, *argv)
    assert hint in one_line(outcome)
    assert outcome.code == 2


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"schema": "kvctl.size/1"}', '{"schema": "kvctl.profile/2"}', '{"schema": "kvctl.profile/1"}'],
)
def test_files_that_are_no_profile(profile: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    outcome = profile("Qwen3-8B", "--compare", "run.json")
    assert "run.json" in one_line(outcome)
    assert outcome.code == 1


def test_own_options_are_not_the_engines(profile: Run) -> None:
    # vLLM has a --device and llama.cpp a -b of their own, which kvctl size takes.
    outcome = profile("Qwen3-8B", "--device", "cpu", "-b", "1,8", "--json")
    assert "not installed: torch" in one_line(outcome)
    assert outcome.code == 1


def test_no_spelling_stands_for_two_options() -> None:
    for name, command in cli.command().commands.items():
        spellings = [spelling for param in command.params for spelling in (*param.opts, *param.secondary_opts)]
        assert len(spellings) == len(set(spellings)), name


def test_a_model_without_torch_is_a_line_and_a_hint(profile: Run) -> None:
    outcome = profile("Qwen3-8B", "--weights", "random")
    assert one_line(outcome).splitlines()[1].startswith("hint: pip install 'kvctl[measure]'")
    assert outcome.code == 1


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from kvctl.cli import main
main()
"""


def test_the_machine_needs_no_torch() -> None:
    argv = [sys.executable, "-c", WITHOUT_TORCH, "profile"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.startswith("this machine\nCPU ")
    *stages, line = done.stderr.splitlines()
    assert stages == ["looking at this machine", "measuring memory bandwidth and matrix rates"]
    assert line.startswith("note: running a model takes torch, transformers and accelerate; not installed: torch")
    assert "pip install 'kvctl[measure]'" in line


@pytest.mark.parametrize("argv", [["--check"], ["--tp", "2"], ["--until-oom", "ctx"], ["--device", "cpu"], ["--plot", "-"],
                                  ["--layers", "2"], ["--ctx", "1k"], ["--set", "num_hidden_layers=2"]], ids=" ".join)  # fmt: skip
def test_options_of_a_run_need_torch(profile: Run, argv: list[str]) -> None:
    outcome = profile(*argv)
    assert "running a model takes torch" in one_line(outcome)
    assert outcome.code == 1


def test_help_breaks_no_option_in_80_columns(kvctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = kvctl("profile", "--help")
    assert outcome.code == 0
    assert [line for line in outcome.out.splitlines() if len(line) > 80] == []
    _, _, listed = outcome.out.partition("Options:\n")
    body, _, _ = listed.partition("\n\n")
    assert "--until-oom" in body
    assert "sglang" not in body
    assert [line for line in body.splitlines() if not line.startswith("  ")] == []


def test_an_interrupt_that_a_library_swallows(kvctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' lazy imports make of it that a module is missing."""
    import os
    import signal

    from kvctl import options_profile, signals
    from kvctl.errors import ConfigError

    def broken(*_: object, **__: object) -> None:
        signals.heed()
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise ConfigError("could not import 'LlamaConfig'") from None

    monkeypatch.setattr(options_profile, "read_model", broken)
    monkeypatch.setattr(signals, "_received", [])
    before = signal.getsignal(signal.SIGINT)
    try:
        outcome = kvctl("profile", "Qwen3-8B", "--engine", "vllm")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (outcome.code, outcome.err) == (130, "kvctl: error: interrupted\n")


def test_what_was_measured_is_printed_where_it_cannot_be_saved(
    kvctl: Run, monkeypatch: pytest.MonkeyPatch, surroundings: None
) -> None:
    from kvctl import options_profile
    from kvctl.errors import KvctlError
    from kvctl.measure.report import Point, ProfileReport
    from kvctl.measure.statistics import Sample

    points = (Point(64, 1, 4, ttft=Sample((0.5,))),)
    monkeypatch.setattr(
        options_profile, "run_other", lambda *_, **__: ProfileReport(None, "vllm", None, None, None, {}, {}, points)
    )
    monkeypatch.setattr(options_profile, "saved", lambda *_: KvctlError("cannot write run.json: no space left"))
    outcome = kvctl("profile", "Qwen3-8B", "--engine", "vllm", "--save", "run.json", "--json")
    assert outcome.json["points"][0]["ttft"]["median_s"] == 0.5
    assert "cannot write run.json" in outcome.err
    assert outcome.code == 1
