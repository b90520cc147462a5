"""Man pages, completions, CLI reference and schemas follow from the code and say all of it."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def load_generator() -> Any:
    folder = str(ROOT / "scripts")
    if folder not in sys.path:
        sys.path.append(folder)  # where it finds the schemas, as a script does
    spec = importlib.util.spec_from_file_location("generate", ROOT / "scripts" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


generate = load_generator()
COMMANDS = generate.commands()
FILES = generate.files()
MAN_PAGES = [name for name in FILES if name.startswith("man/")]


def plain(roff: str) -> str:
    """A man page's text without fonts and escapes."""
    return re.sub(r"\\f[A-Z]", "", roff).replace("\\-", "-").replace("\\(dq", chr(34))


@pytest.mark.parametrize("name", FILES)
def test_file_is_what_the_code_says(name: str) -> None:
    assert (ROOT / name).read_bytes() == FILES[name].encode(), "run: python scripts/generate.py"


def test_nothing_is_left_over() -> None:
    assert generate.stale(FILES) == []


def test_check_names_what_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(ROOT / "CHANGELOG.md", tmp_path)
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["generate.py"])
    assert generate.main() == 0
    monkeypatch.setattr(sys, "argv", ["generate.py", "--check"])
    assert generate.main() == 0
    (tmp_path / "docs" / "cli.md").write_text("edited by hand")
    (tmp_path / "man" / "kvctl-gone.1").touch()
    capsys.readouterr()
    assert generate.main() == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in said] == ["docs/cli.md", "man/kvctl-gone.1"]


@pytest.mark.parametrize("name", ["size", "profile"])
def test_engine_options_stand_apart(name: str) -> None:
    command = next(command for command in COMMANDS if command.name == name)
    page = plain(FILES[f"man/{command.page}.1"])
    own, _, engines = page.partition(".SH ENGINE OPTIONS")
    assert "--gpu-memory-utilization" in engines
    assert "--gpu-memory-utilization" not in own.partition(".SH OPTIONS")[2]
    assert ("--mem-fraction-static" in engines) == (name == "size")  # SGLang's, which profile does not run


def test_what_holds_for_one_command_alone_stands_there() -> None:
    size, profile = plain(FILES["man/kvctl-size.1"]), plain(FILES["man/kvctl-profile.1"])
    assert "KVCTL_VLLM_PYTHON" in profile
    assert "KVCTL_VLLM_PYTHON" in plain(FILES["man/kvctl.1"])
    assert "KVCTL_VLLM_PYTHON" not in size
    exits = profile.partition(".SH EXIT STATUS")[2].partition(".SH")[0]
    assert "--check" in exits
    assert "\n3\n" not in exits  # profile never answers no


def test_dates_come_from_the_changelog() -> None:
    date = generate.release_date()
    assert f" - {date}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert all(date in FILES[page] for page in MAN_PAGES)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.page)
def test_man_page_and_reference_name_every_option(command: Any) -> None:
    page, reference = plain(FILES[f"man/{command.page}.1"]), FILES["docs/cli.md"]
    assert command.options
    for option in command.options:
        for name in option.names:
            assert re.search(rf"^{re.escape(name)}\b|, {re.escape(name)}\b", page, re.M), name
            assert re.search(rf"`[^`]*(?<![\w-]){re.escape(name)}\b[^`]*`", reference), name
    assert all(example in page and example in reference for example in command.examples)


@pytest.mark.parametrize("command", COMMANDS[1:], ids=lambda command: command.page)
def test_every_command_is_listed_and_has_examples(command: Any) -> None:
    assert f"{command.page}(1)" in plain(FILES["man/kvctl.1"])
    assert f"## {command.path}\n" in FILES["docs/cli.md"]
    assert command.examples
    assert all(line.startswith(command.path) for line in command.examples)


@pytest.mark.parametrize("command", COMMANDS[1:], ids=lambda command: command.page)
def test_readme_names_every_command(command: Any) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if not readme.strip():
        pytest.skip("README.md is empty")
    assert command.path in readme


@pytest.mark.parametrize("name", MAN_PAGES)
def test_man_page_has_its_sections(name: str) -> None:
    titles = re.findall(r"^\.SH (.+)$", FILES[name], re.M)
    wanted = [
        "NAME",
        "SYNOPSIS",
        "DESCRIPTION",
        "OPTIONS",
        "EXAMPLES",
        "EXIT STATUS",
        "ENVIRONMENT",
        "FILES",
        "SEE ALSO",
    ]
    assert [title for title in titles if title in wanted] == wanted


@pytest.mark.parametrize("name", MAN_PAGES)
def test_man_page_is_clean(name: str) -> None:
    if shutil.which("mandoc") is None:
        pytest.skip("mandoc is not installed")
    done = subprocess.run(["mandoc", "-T", "lint", str(ROOT / name)], capture_output=True, text=True, timeout=60)
    assert done.stdout + done.stderr == ""


def test_text_survives_roff() -> None:
    assert generate.esc(r"a\b --x 'q' ×") == r"a\eb \-\-x \(aqq\(aq \[u00D7]"
    assert generate.fill(".hidden is a file") == r"\&.hidden is a file"
    assert generate.fill("see --kv-dtype") == r"see \fB\-\-kv\-dtype\fR"


def test_every_exit_code_is_explained() -> None:
    page = plain(FILES["man/kvctl.1"])
    assert all(f"\n{int(code)}\n" in page for code in generate.ExitCode)


def test_every_variable_of_its_own_is_explained() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "kvctl").rglob("*.py"))
    assert set(re.findall(r"\bKVCTL_[A-Z_]+\b", sources)) <= set(generate.ENVIRONMENT)


def test_no_document_has_an_unfilled_placeholder() -> None:
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("man/*")]:
        assert not re.search(r"@[A-Z]+@|TODO|FIXME", path.read_text("utf-8")), path
