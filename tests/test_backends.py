"""Backends' environments and workers: against a small package from a folder, and workers that misbehave."""

from __future__ import annotations

import ast
import base64
import hashlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.weights.backends import children, creation, environments, process, table
from kvctl.weights.backends.children import Log
from kvctl.weights.backends.process import Progress, ask
from kvctl.weights.backends.table import Backend, Format, Size

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")
ROOT = Path(__file__).parent.parent


# -- a backend that weighs nothing ------------------------------------------------------------


def wheel(folder: Path, name: str, version: str, files: dict[str, str], requires: str = "") -> tuple[Path, str]:
    """A wheel by hand (PEP 427), and its SHA-256."""
    info = f"{name}-{version}.dist-info"
    need = f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{need}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{info}/RECORD,,"]
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in files.items():
            data = text.encode()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{inside},sha256={digest},{len(data)}")
            archive.writestr(inside, data)
        archive.writestr(f"{info}/RECORD", "\n".join(record) + "\n")
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A backend of one small wheel, and an index that is a folder; the build tools' set is empty."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    _, digest = wheel(wheels, "fakequant", "1.2.3", {"fakequant/__init__.py": "VERSION = '1.2.3'\n"})
    own = f"fakequant==1.2.3 \\\n    --hash=sha256:{digest}\n"
    sets = {"fake": f"torch==0 \\\n    --hash=sha256:0\n{own}{table.MARK}nvidia-x==1 \\\n    --hash=sha256:0\n",
            "torch-cpu": "", "build": ""}  # fmt: skip
    size = Size(1000, 50_000_000, True)
    one = Backend("fake", "fakequant", "fakequant", (Format("awq", "awq, gemm", 4, 128, True, "anything"),), False,
                  (11, 99), (environments.here(),), False, size, size, "tests", "none")  # fmt: skip
    monkeypatch.setattr(table, "BACKENDS", (one,))
    monkeypatch.setattr(table, "shipped", lambda name: sets[name])
    monkeypatch.setattr(environments, "shipped", lambda name: sets[name])
    monkeypatch.setattr(environments, "has_cuda", lambda: False)
    monkeypatch.setattr(environments, "_finds_cpu_build", lambda python: True)
    monkeypatch.setenv("KVCTL_CACHE", str(tmp_path / "cache"))
    for key in [key for key in os.environ if key.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    # What would lead a child elsewhere.
    bad = tmp_path / "bad"
    (bad / "fakequant").mkdir(parents=True)
    (bad / "fakequant" / "__init__.py").write_text("raise SystemExit('the wrong one')\n")
    monkeypatch.setenv("PYTHONPATH", str(bad))
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))
    yield {"wheels": wheels, "sets": sets, "backend": one, "tmp": tmp_path}
    assert not (tmp_path / "elsewhere").exists()


def tree(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_life_of_an_environment(fake: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before = environments.state("fake")
    assert (before.status, before.folder, before.size, before.download_bytes) == (
        "not installed",
        None,
        50_000_000,
        1000,
    )
    plan = environments.plan("fake")
    assert plan.packages == 1
    assert not environments.root().exists()  # a plan makes nothing

    steps: list[creation.Step] = []
    folder = creation.create(plan, steps.append)
    assert folder == plan.folder
    assert steps[0].stage == "environment"
    assert steps[-1].stage == "trial"
    assert steps[-1].done == 1
    state = environments.state("fake")
    assert (state.status, state.version, state.build, state.folder) == ("installed", "1.2.3", "cpu", folder)
    # Blocks of the disk, as du counts them.
    du = int(
        subprocess.run(["du", "-s", "-B1", str(folder)], capture_output=True, text=True, check=True).stdout.split()[0]
    )
    assert abs(state.size - du) < 0.1 * du
    assert tree(environments.root()) == [f".{folder.name}.lock", folder.name, "logs"]
    assert tree(environments.root() / "logs") == []
    # It is not the environment of this process, and knows nothing of it.
    found = subprocess.run([folder / "bin" / "python", "-I", "-c", "import fakequant, sys; print(sys.prefix, fakequant.VERSION)"],
                           capture_output=True, text=True, check=True).stdout.split()  # fmt: skip
    assert found == [str(folder), "1.2.3"]
    assert "fakequant" not in sys.modules

    monkeypatch.setattr(environments, "_finds_cpu_build", lambda python: False)
    assert environments.plan("fake").folder == folder  # not asked again
    again: list[creation.Step] = []
    assert creation.create(plan, again.append) == folder
    assert again == []  # there already
    assert environments.remove("fake") > 0
    assert environments.state("fake").status == "not installed"


@pytest.mark.slow
def test_broken_environments_are_seen_and_rebuilt(fake: dict[str, Any]) -> None:
    plan = environments.plan("fake")
    folder = creation.create(plan)
    python = folder / "bin" / "python"
    (package,) = folder.glob("lib/python3*/site-packages/fakequant")
    harms = {
        "it was not completed": lambda: (folder / environments.MARKER).unlink(),
        "fakequant is gone": lambda: package.rename(package.with_name("other")),
        "its Python is gone": lambda: (python.unlink(), python.symlink_to("/nowhere/python3")),
    }
    for why, harm in harms.items():
        harm()
        state = environments.state("fake")
        assert state.status == "broken"
        assert state.why.startswith(why)
        creation.create(plan)
        assert environments.state("fake").status == "installed"


@pytest.mark.slow
def test_another_set_is_another_environment(fake: dict[str, Any]) -> None:
    first = creation.create(environments.plan("fake"))
    fake["sets"]["fake"] = "# newer\n" + fake["sets"]["fake"]
    assert environments.state("fake").status == "not installed"
    assert environments.plan("fake").folder != first


@pytest.mark.slow
def test_a_file_that_is_another_one_is_refused(fake: dict[str, Any]) -> None:
    wheel(fake["wheels"], "fakequant", "1.2.3", {"fakequant/__init__.py": "EVIL = 1\n"})
    with pytest.raises(KvctlError, match=r"fakequant==1.2.3.* is not the file that kvctl's list names") as caught:
        creation.create(environments.plan("fake"))
    assert "\n" not in caught.value.message
    assert tree(environments.root()) == [f".{environments.plan('fake').folder.name}.lock", "logs"]


@pytest.mark.slow
def test_without_a_network(fake: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(KvctlError, match="pip reaches no package index") as caught:
        creation.create(environments.plan("fake"))
    assert "PIP_FIND_LINKS" in (caught.value.hint or "")
    (log,) = tree(environments.root() / "logs")
    assert log in (caught.value.hint or "")


@pytest.mark.slow
def test_a_package_that_is_not_there(fake: dict[str, Any]) -> None:
    next(fake["wheels"].iterdir()).unlink()
    with pytest.raises(KvctlError, match=r"pip finds no fakequant==1\.2\.3"):
        creation.create(environments.plan("fake"))


@pytest.mark.slow
def test_a_package_that_does_not_import(fake: dict[str, Any]) -> None:
    _, digest = wheel(fake["wheels"], "fakequant", "1.2.3", {"fakequant/__init__.py": "import no_such_thing\n"})
    fake["sets"]["fake"] = f"torch==0 \\\n    --hash=sha256:0\nfakequant==1.2.3 --hash=sha256:{digest}\n{table.MARK}"
    with pytest.raises(KvctlError, match="cannot be imported: ModuleNotFoundError: No module named 'no_such_thing'"):
        creation.create(environments.plan("fake"))
    assert environments.state("fake").status == "not installed"


@pytest.mark.slow
def test_two_at_once(fake: dict[str, Any]) -> None:
    plan = environments.plan("fake")
    inside, go_on = threading.Event(), threading.Event()

    def wait(step: creation.Step) -> None:
        inside.set()
        go_on.wait(60)

    thread = threading.Thread(target=creation.create, args=(plan, wait))
    thread.start()
    try:
        assert inside.wait(60)
        with pytest.raises(UsageError, match="another process is making or using"):
            creation.create(plan)
        with pytest.raises(UsageError, match="another process is making"), environments.used(plan.folder):
            pass
    finally:
        go_on.set()
        thread.join(120)
    with environments.used(plan.folder), environments.used(plan.folder), pytest.raises(UsageError, match="using"):
        environments.remove("fake")


CREATE = """
import os, sys
sys.path.insert(0, {tests!r})
import pytest, test_backends
from kvctl.weights.backends import creation, environments, table
sets = {sets!r}
table.BACKENDS = (test_backends.Backend("fake", "fakequant", "fakequant", (), False, (11, 99), (environments.here(),), False,
                  test_backends.Size(1, 1, True), test_backends.Size(1, 1, True), "", ""),)
table.shipped = environments.shipped = lambda name: sets[name]
environments.has_cuda = lambda: False
environments._finds_cpu_build = lambda python: True
def tell(step):
    print(step.stage, step.what, flush=True)
    if step.stage == {stop!r}:
        import time
        time.sleep(60)
creation.create(environments.plan("fake"), tell)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_while_it_is_made(fake: dict[str, Any], number: int) -> None:
    code = CREATE.format(tests=str(Path(__file__).parent), sets=fake["sets"], stop="packages")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("packages"):
            break
    child.send_signal(number)
    child.communicate(timeout=60)
    folder = environments.plan("fake").folder
    assert not folder.exists()
    left = [name for name in tree(environments.root()) if name.endswith(".part")]
    assert bool(left) == (number == signal.SIGKILL)
    creation.create(environments.plan("fake"))
    assert environments.state("fake").status == "installed"
    assert not [name for name in tree(environments.root()) if name.endswith(".part")]


def test_refusals_before_anything_is_made(fake: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no backend 'nothing'"):
        environments.plan("nothing")
    with pytest.raises(UsageError, match="no build 'rocm'"):
        environments.plan("fake", "rocm")
    huge = environments.plan("fake").replace(size=Size(1, 10**18, False))
    with pytest.raises(ConfigError, match=r"needs .* of disk"):
        creation.create(huge)
    monkeypatch.setattr(table, "BACKENDS", (fake["backend"].replace(platforms=("beos-m68k",)),))
    assert environments.state("fake").status == "cannot"
    with pytest.raises(ConfigError, match="no packages for"):
        environments.plan("fake")
    monkeypatch.setattr(table, "BACKENDS", (fake["backend"].replace(pythons=(0, 1)),))
    with pytest.raises(ConfigError, match=r"needs Python 3.0 to 3.1"):
        environments.plan("fake")
    assert not environments.root().exists()


def test_a_cache_that_cannot_be_written(fake: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (fake["tmp"] / "file").write_text("")
    monkeypatch.setenv("KVCTL_CACHE", str(fake["tmp"] / "file"))
    with pytest.raises(KvctlError, match="cannot write"):
        creation.create(environments.plan("fake"))


# -- the sets that come with kvctl ------------------------------------------------------------


@pytest.mark.parametrize("name", [one.name for one in table.BACKENDS])
def test_sets_pin_and_hash_everything(name: str) -> None:
    """By pip's own reader, where it is there: every line is one exact version with SHA-256 hashes."""
    one = table.backend(name)
    for cpu in (True, False):
        text = table.requirements(name, cpu)
        joined = text.replace("\\\n", " ")
        lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
        assert lines
        for line in lines:
            head, *hashes = line.split("--hash=sha256:")
            assert "==" in head
            assert hashes
            assert all(len(digest.strip()) == 64 for digest in hashes)
        names = [line.split("==")[0] for line in lines]
        assert {"torch", "transformers", one.package} <= set(names)
        gpu = [each for each in names if each.startswith(("nvidia-", "cuda-")) and each != "nvidia-ml-py"]
        assert bool(gpu) == (not cpu)
        assert ("+cpu" in text) == cpu
    assert one.version in text


def test_torch_of_the_cpu() -> None:
    # The hash of the wheel for CPython 3.11 on x86_64, by sha256sum.
    assert "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b" in table.shipped("torch-cpu")


# -- workers ----------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder that looks like an environment: its Python is this one."""
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").symlink_to(sys.executable)
    return tmp_path


def work(here: Path, code: str, silence: float = 30.0, tell: Any = None, request: dict[str, Any] | None = None) -> Any:
    """What a worker with this body of run() answers."""
    script = here / "worker.py"
    script.write_text(
        "import os, sys, time, signal, subprocess\ndef run(request, tell):\n"
        + textwrap.indent(textwrap.dedent(code), "    ")
    )
    (here / "work").mkdir(exist_ok=True)
    return ask("fake", here / "env", script, request or {}, work=here / "work", log=Log(here / "log"),
               tell=tell or (lambda step: None), silence=silence)  # fmt: skip


def test_answers(here: Path) -> None:
    steps: list[Progress] = []
    found = work(here, """
        print("a library prints")
        os.write(1, b'{"done": {"lie": 1}}\\n')
        subprocess.run(["sh", "-c", "echo and so does its child"])
        print("to standard error", file=sys.stderr)
        tell("layer", 0, 2)
        tell("layer", 2, 2)
        assert "kvctl" not in sys.modules
        try:
            import kvctl
        except ImportError:
            pass
        return {"twice": 2 * request["number"]}
    """, tell=steps.append, request={"number": 21, "long": "x" * 500_000})  # fmt: skip
    assert found.facts == {"twice": 42}
    assert steps == [Progress("layer", 0, 2), Progress("layer", 2, 2)]
    log = (here / "log").read_text()
    assert all(said in log for said in ("a library prints", "and so does its child", "to standard error", '{"lie": 1}'))


HOSTILE = {
    "raises": ("raise ValueError('a\\nb')", "fake failed: ValueError: a$"),
    "says nothing of it": ("raise AssertionError", "fake failed: AssertionError: no more is said"),
    "out of memory": ("raise MemoryError", "fake failed: MemoryError: out of memory"),
    "dies": ("os.kill(os.getpid(), signal.SIGKILL)", r"fake's worker was killed by SIGKILL \(out of memory\?\)"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "fake's worker was killed by SIGSEGV"),
    "leaves": ("print('I am off', file=sys.stderr); sys.stderr.flush(); os._exit(3)", "ended with status 3: I am off"),
    "leaves as if all were well": ("os._exit(0)", "fake's worker ended with status 0"),
    "exits": ("sys.exit(0)", "fake failed: SystemExit"),
    "answers what is no JSON": ("return {'a': object()}", "fake's worker ended with status 1"),
    "hangs": ("time.sleep(600)", "nothing was heard of it for 2 s"),
    "hangs and ignores": ("signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)", "nothing was heard"),
    "hangs and prints": ("while True: print('x' * 100)", "nothing was heard of it for 2 s"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_workers_that_fail(here: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "_GRACE_S", 1.0)
    code, message = HOSTILE[name]
    begun = time.monotonic()
    with pytest.raises(KvctlError, match=message) as caught:
        work(here, code, silence=2.0)
    assert time.monotonic() - begun < 30
    assert "\n" not in caught.value.message
    assert str(here / "log") in (caught.value.hint or "")
    assert (here / "log").stat().st_size < 10 << 20
    assert alive(here) == []


RAW = {
    "junk": ("print('hello'); print('[1, 2]'); print('{}'); print('{\"progress\": 3}'); print(b'\\xff')", "ended with status 0"),
    "flood of junk": ("while True: print('no message')", "without end"),
    "flood of progress": ("m = '{\"progress\": {\"stage\": \"a\", \"done\": 1, \"of\": 2}}'\nwhile True: print(m)", "without end"),
    "a line without end": ("while True: sys.stdout.write('x' * 65536)", "lines without end"),
    "deep": ("print('[' * 100000)", "ended with status 0"),
    "another protocol": ("print('{\"hello\": {\"protocol\": 99, \"versions\": {}}}')", "speaks protocol 99"),
    "control characters": ("print('{\"error\": {\"message\": \"a\\\\u001b[2Jb\\\\nc\"}}')", "fake failed: a"),
    "progress that cannot be": ("print('{\"progress\": {\"stage\": \"a\", \"done\": 3, \"of\": 2}}')", "ended with status 0"),
    "closes and goes on": ("os.close(1); os.close(2); __import__('time').sleep(600)", "nothing was heard"),
}  # fmt: skip


@pytest.mark.parametrize("name", RAW)
def test_what_is_no_protocol(here: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, message = RAW[name]
    monkeypatch.setattr(children, "_GRACE_S", 1.0)
    monkeypatch.setattr(process, "_MOST_SAID", 20_000)
    workers = here / "workers"
    workers.mkdir()
    (workers / "main.py").write_text(f"import os, sys\n{code}\n")
    monkeypatch.setattr(process, "WORKERS", workers)
    steps: list[Progress] = []
    with pytest.raises(KvctlError, match=message) as caught:
        work(here, "pass", silence=3.0, tell=steps.append)
    assert "\x1b" not in caught.value.message
    assert len(steps) <= 200
    assert alive(here) == []


def alive(here: Path) -> list[int]:
    """Processes that were started with a file in this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(here) in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def test_nothing_outlives_a_worker(here: Path) -> None:
    """A grandchild that holds the output and ignores requests to end."""
    code = f"""
        subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)", {str(here)!r}])
        return {{}}
    """
    work(here, code)
    assert alive(here) == []


def test_a_callback_that_raises_ends_it(here: Path) -> None:
    def tell(step: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(here, "tell('a', 0, 1)\ntime.sleep(600)", tell=tell)
    assert alive(here) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_worker_outlives_its_parent(here: Path, number: int) -> None:
    script = here / "worker.py"
    # Its own lock is held: threads of Python could not see the parent's end.
    script.write_text(
        "import re\ndef run(request, tell):\n    tell('a', 0, 1)\n    re.match('(a+)+$', 'a' * 60 + 'b')\n"
    )
    code = (f"from pathlib import Path\nfrom kvctl.weights.backends.process import ask\nfrom kvctl.weights.backends.children import Log\n"
            f"here = Path({str(here)!r})\nask('fake', here / 'env', here / 'worker.py', {{}}, work=here, log=Log(here / 'log'),"
            " tell=lambda step: print('begun', flush=True))\n")  # fmt: skip
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"begun\n"
    assert len(alive(here)) >= 2
    parent.send_signal(number)
    parent.communicate(timeout=60)
    until = time.monotonic() + 20
    while alive(here) and time.monotonic() < until:
        time.sleep(0.05)
    assert alive(here) == []


def test_workers_import_nothing_of_kvctl() -> None:
    for path in process.WORKERS.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
        assert not [name for name in names if name.split(".")[0] == "kvctl"], path
