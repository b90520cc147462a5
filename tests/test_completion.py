"""TAB in bash, zsh and fish: real keys in real shells, and what a completion loads."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvctl.formats import CACHE_FORMATS
from kvctl.sources import catalogue

SCRIPTS = Path(__file__).parent.parent / "completions"
SHELLS = ("bash", "zsh", "fish")
TAB, BELL, CLEAR = b"\t", b"\x07", b"\x15"

# Each set-up makes Ctrl-G write the line that is being edited, and tells when the prompt is there.
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
SET_UP = {
    "bash": """
source {scripts}/kvctl.bash
bind -x '"\\C-g": printf %s "$READLINE_LINE" > line'
touch ready
""",
    "zsh": """
fpath=({scripts} $fpath); autoload -Uz compinit; compinit -u -D
dump() {{ printf %s "$BUFFER" > line }}; zle -N dump; bindkey '^G' dump
touch ready
""",
    "fish": """
source {scripts}/kvctl.fish
bind \\cg 'commandline > line'
touch ready
""",
}


class Terminal:
    """A shell at a terminal of its own, in an empty folder but for models/."""

    def __init__(self, shell: str, folder: Path) -> None:
        self.folder = folder
        env = {
            **os.environ,
            "HOME": str(folder),
            "TERM": "dumb",
            "PATH": f"{folder / 'programs'}{os.pathsep}{os.environ['PATH']}",
        }
        self.pid, self.screen = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(shell, START[shell], env)
        (folder / "setup").write_text(SET_UP[shell].format(scripts=SCRIPTS))
        os.write(self.screen, b"source ./setup\n")
        self.wait_for("ready")

    def wait_for(self, name: str, key: bytes = b"") -> str:
        """The content of a file that the shell is about to write; `key` asks for it."""
        path = self.folder / name
        for _ in range(100):
            if key:
                os.write(self.screen, key)
            end = time.monotonic() + 0.2
            while time.monotonic() < end and not path.exists():
                if select.select([self.screen], [], [], 0.02)[0]:
                    os.read(self.screen, 65536)
            if path.exists():
                time.sleep(0.1)  # written, not only opened
                text = path.read_text()
                path.unlink()
                return text
        raise AssertionError(f"the shell writes no {name}")

    def tab(self, line: str) -> str:
        """The line after TAB."""
        os.write(self.screen, line.encode() + TAB)
        after = self.wait_for("line", BELL).rstrip("\n")
        os.write(self.screen, CLEAR)
        return after

    def close(self) -> None:
        os.close(self.screen)
        os.waitpid(self.pid, 0)


@pytest.fixture(scope="module", params=SHELLS)
def terminal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp("home")
    (folder / "models").mkdir()
    (folder / "programs").mkdir()
    # A kvctl that knows few models, one of them with a colon in its name.
    names = ["Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-70B", "odd/a:b-one", "odd/a:c-two"]
    program = folder / "programs" / "kvctl"
    program.write_text(
        f"#!{sys.executable}\n"
        "from kvctl.cli import main\n"
        "from kvctl.sources import catalogue\n"
        f"catalogue.names = lambda: {names!r}\n"
        "catalogue.short_names = lambda: [name.rpartition('/')[2] for name in catalogue.names()]\n"
        "main()\n"
    )
    program.chmod(0o755)
    terminal = Terminal(request.param, folder)
    yield terminal
    terminal.close()


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("kvctl si", "kvctl size"),
        ("kvctl --vers", "kvctl --version"),
        ("kvctl size --expl", "kvctl size --explain"),
        ("kvctl size --kv-dtype q8", "kvctl size --kv-dtype q8_0"),
        ("kvctl size --kv-dtype=q8", "kvctl size --kv-dtype=q8_0"),
        ("kvctl size --engine tr", "kvctl size --engine transformers"),
        ("kvctl size -n 3 -f j", "kvctl size -n 3 -f json"),
        ("kvctl size Qwen3-32", "kvctl size Qwen3-32B"),
        ("kvctl size qwen3-32", "kvctl size Qwen3-32B"),
        ("kvctl size Qwen/Qwen3-32", "kvctl size Qwen/Qwen3-32B"),
        ("kvctl size meta-", "kvctl size meta-llama/Llama-3.1-70B"),
        ("kvctl size odd/a:b", "kvctl size odd/a:b-one"),
        ("kvctl size --ctx 4k --json lla", "kvctl size --ctx 4k --json Llama-3.1-70B"),
        ("kvctl size Qwen3-32B meta-", "kvctl size Qwen3-32B meta-llama/Llama-3.1-70B"),
        ("kvctl p", "kvctl profile"),
        ("kvctl serve-test --fa", "kvctl serve-test --fail-on"),
        ("kvctl serve-test --format j", "kvctl serve-test --format json"),
        ("kvctl serve-test --trace mod", "kvctl serve-test --trace models/"),
        ("kvctl profile --until-oom c", "kvctl profile --until-oom ctx"),
        ("kvctl profile --device=cp", "kvctl profile --device=cpu"),
        ("kvctl profile --attn fl", "kvctl profile --attn flash_attention_2"),
        ("kvctl profile --weights r", "kvctl profile --weights random"),
        ("kvctl profile --engine ll", "kvctl profile --engine llama.cpp"),
        ("kvctl profile --device-map a", "kvctl profile --device-map auto"),
        ("kvctl profile --ctx 4k meta-", "kvctl profile --ctx 4k meta-llama/Llama-3.1-70B"),
        ("kvctl profile mod", "kvctl profile models/"),
        ("kvctl profile --save mod", "kvctl profile --save models/"),
        ("kvctl size --from-log mod", "kvctl size --from-log models/"),
        ("kvctl size ./mod", "kvctl size ./models/"),
        ("kvctl size mod", "kvctl size models/"),
        ("kvctl size --ctx mod", "kvctl size --ctx mod"),
    ],
)
def test_tab(terminal: Terminal, line: str, after: str) -> None:
    assert terminal.tab(line).rstrip(" ") == after


@pytest.mark.parametrize("shell", SHELLS)
def test_script_is_well_formed(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = SCRIPTS / ("_kvctl" if shell == "zsh" else f"kvctl.{shell}")
    done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


# -- what the scripts ask of the program -----------------------------------------------------

RUN = """
import sys
sys.argv = ["kvctl"]
from kvctl.cli import main
try:
    main()
finally:
    print(*sys.modules, file=sys.stderr)
"""


def ask(words: str) -> tuple[list[str], set[str]]:
    """Values for the last of `words`, and the modules that were loaded for them."""
    env = {**os.environ, "_KVCTL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run([sys.executable, "-c", RUN], env=env, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split(), set(done.stderr.split())


def test_every_catalogue_name_completes_long_and_short() -> None:
    values, loaded = ask("kvctl size ")
    assert len(catalogue.names()) > 50
    assert set(values) == {*catalogue.names(), *catalogue.short_names()}
    heavy = {"rich", "huggingface_hub", "httpx2", "pydantic", "numpy", "torch", "transformers"}
    assert not loaded & heavy


def test_values_complete_from_the_tables() -> None:
    assert ask("kvctl size --k-dtype ")[0] == ["auto", *(fmt.name for fmt in CACHE_FORMATS)]
    assert ask("kvctl size --v-dtype q4")[0] == [fmt.name for fmt in CACHE_FORMATS if fmt.name.startswith("q4")]


def test_values_of_profile_complete() -> None:
    assert ask("kvctl profile --engine ")[0] == ["transformers", "llama.cpp", "vllm"]
    assert ask("kvctl profile --device c")[0] == ["cpu", "cuda:0"]
    assert ask("kvctl profile --until-oom ")[0] == ["ctx", "batch"]
    values, loaded = ask("kvctl profile Qwen/Qwen3-3")
    assert "Qwen/Qwen3-32B" in values
    assert not loaded & {"rich", "huggingface_hub", "numpy", "torch", "transformers", "psutil"}


def test_a_completion_is_quick() -> None:
    start = time.perf_counter()
    ask("kvctl size Qwen")
    # About 0.1 s on one core; the bound only catches a heavy import.
    assert time.perf_counter() - start < 2
