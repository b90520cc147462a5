"""TAB in bash, zsh and fish: the generated scripts in real shells, and what a completion loads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from kvctl.formats import CACHE_FORMATS
from kvctl.sources import catalogue

SCRIPTS = Path(__file__).parent.parent / "completions"
TITLED = ["Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-70B", "odd/a:b-one", "odd/a:c-two"]
FORMATS = [fmt.name for fmt in CACHE_FORMATS]

Complete = Callable[[str], list[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder but for models/, with a `kvctl` in bin/ that knows few models."""
    (tmp_path / "models").mkdir()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "kvctl"
    program.write_text(
        textwrap.dedent(f"""\
            #!{sys.executable}
            from kvctl.cli import main
            from kvctl.sources import catalogue
            catalogue.names = lambda: {TITLED!r}
            main()
            """)
    )
    program.chmod(0o755)
    return tmp_path


def shell(folder: Path, *argv: str) -> list[str]:
    """Lines that a shell prints, with the folder's kvctl first on its path."""
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    env = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder), "TERM": "dumb"}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


BASH = """
source "$1"
COMP_LINE=$2 COMP_POINT=${#2}
# As Readline does: words end at blanks, and = and : stand alone.
read -ra COMP_WORDS <<<"$(sed -E 's/([=:])/ \\1 /g' <<<"$2")"
[[ $2 == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_kvctl kvctl "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
[[ ${#COMPREPLY[@]} -eq 0 ]] || printf '%s\\n' "${COMPREPLY[@]}"
"""

# A shell in a shell: its completion system only works at a prompt. Each match is written to a file.
ZSH = """
zmodload zsh/zpty
zpty inner zsh -f -i
zpty -w inner "fpath=($1 \\$fpath); autoload -Uz compinit; compinit -u -D"
zpty -w inner 'compadd() { local -a found; builtin compadd -O found "$@"; print -rl -- $found >> matches; builtin compadd "$@" }'
zpty -w inner 'finish() { touch done }; TRAPUSR1() { finish }'
zpty -w inner 'list() { zle complete-word; touch done }; zle -N complete-word-and-tell list'
zpty -w inner 'zle -C list-all list-choices _main_complete; tell() { zle list-all; touch done }; zle -N tell; bindkey "^I" tell; touch ready'
repeat 200; do [[ -e ready ]] && break; sleep 0.05; done
zpty -n -w inner "$2"$'\\t'
repeat 200; do [[ -e done ]] && break; sleep 0.05; done
zpty -d inner
[[ -e done ]] && { [[ ! -e matches ]] || cat matches }
"""


@pytest.fixture(params=["bash", "zsh", "fish"])
def complete(request: pytest.FixtureRequest, folder: Path) -> Complete:
    """What a shell offers for a line."""

    def bash(line: str) -> list[str]:
        return shell(folder, "bash", "--norc", "-c", BASH, "bash", str(SCRIPTS / "kvctl.bash"), line)

    def zsh(line: str) -> list[str]:
        return [found for found in shell(folder, "zsh", "-f", "-c", ZSH, "zsh", str(SCRIPTS), line) if found]

    def fish(line: str) -> list[str]:
        code = f"source {SCRIPTS / 'kvctl.fish'}; complete -C $argv[1]"
        return [found.partition("\t")[0] for found in shell(folder, "fish", "--no-config", "-c", code, line)]

    how: Complete = {"bash": bash, "zsh": zsh, "fish": fish}[request.param]
    return how


def test_commands(complete: Complete) -> None:
    assert complete("kvctl s") == ["size"]


def test_options(complete: Complete) -> None:
    assert complete("kvctl --vers") == ["--version"]
    assert {found.rstrip("=") for found in complete("kvctl size --kv")} == {"--kv-dtype", "--kv-heads"}
