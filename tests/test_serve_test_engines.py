"""`kvctl serve-test` against real servers: its counts against their own, to the unit.

KVCTL_LLAMA_CPP=build/bin KVCTL_SMOLLM2_GGUF=SmolLM2-135M-Instruct.Q4_1.gguf python -m pytest -m 'engine or slow' tests/test_serve_test_engines.py
KVCTL_VLLM_PYTHON=venv/bin/python KVCTL_SMOLLM2=folder OMP_NUM_THREADS=1 python -m pytest -m 'engine or slow' tests/test_serve_test_engines.py -k vllm
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from conftest import Outcome

Run = Callable[..., Outcome]
pytestmark = pytest.mark.engine


def _free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def _started(
    argv: Sequence[str], port: int, log: Path, seconds: float, env: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A server that is up; gone afterwards with all that it started."""
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, env=env)
    try:
        end = time.monotonic() + seconds
        while True:
            if process.poll() is not None or time.monotonic() > end:
                pytest.fail("the server did not start: " + log.read_text(errors="replace")[-2000:])
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer,
            ):
                if answer.status == 200:
                    break
            time.sleep(0.5)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and the failure says why
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _all(log: Path) -> dict[str, int]:
    """Sums over every request of a run, the warm-up's too, by the usage of its answers."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert all(line["fault"] is None for line in lines)
    return {
        name: sum(line[name] or 0 for line in lines) for name in ("input_tokens", "output_tokens", "cached_tokens")
    } | {"requests": len(lines)}


def _llama_cpp(*more: str) -> tuple[list[str], int]:
    """The command line of llama.cpp's server, and its port."""
    program, gguf = os.environ.get("KVCTL_LLAMA_CPP"), os.environ.get("KVCTL_SMOLLM2_GGUF")
    found = shutil.which("llama-server", path=program) if program else None
    if found is None or gguf is None:
        pytest.skip("KVCTL_LLAMA_CPP and KVCTL_SMOLLM2_GGUF name no server and model")
    port = _free()
    # Threads wait for one another at every step: on a machine that is busy with other tests, several are slower than one.
    own = ("--host", "127.0.0.1", "--port", str(port), "--metrics", "--slots", "--props", "-t", "1")
    return [found, "-m", gguf, *own, *more], port


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    argv, port = _llama_cpp("-c", "2048", "-np", "4")
    with _started(argv, port, tmp_path_factory.mktemp("llama") / "log", 120):
        yield f"127.0.0.1:{port}"


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_llama_cpp_counts_the_same(kvctl: Run, llama: str, tmp_path: Path, endpoint: str) -> None:
    asked = ("-i", "100", "-o", "16", "-c", "2,8", "-n", "16", "--endpoint", endpoint, "--log", str(tmp_path / "log"))
    outcome = kvctl("serve-test", llama, *asked, "--json")
    assert outcome.code == 0, outcome.err
    found = outcome.json
    assert found["server"]["engine"] == "llama.cpp"
    assert (found["server"]["context"], found["server"]["slots"]) == (512, 4)
    assert found["server"]["prompts_exact"]
    for load in found["loads"]:
        tokens = load["all"]["tokens"]
        assert (tokens["input"], tokens["output"], load["all"]["requests"]["short"]) == (1600, 256, 0)
    # All requests of both loads: what the server computed and what it found are the prompts, to the token.
    counters = [load["metrics"]["counters"] for load in found["loads"]]
    own = _all(tmp_path / "log")
    assert sum(one["prompt_tokens"] + one["cached_tokens"] for one in counters) == own["input_tokens"]
    assert sum(one["cached_tokens"] for one in counters) == own["cached_tokens"]
    assert sum(one["output_tokens"] for one in counters) == own["output_tokens"]
    # Eight at once wait for four slots, whose cells are not full.
    few, many = found["loads"]
    assert few["metrics"]["waiting_max"] == 0
    assert many["metrics"]["running_max"] == 4
    assert many["verdict"]["kind"] == "batch-limited"


def test_llama_cpp_finds_what_prompts_share(kvctl: Run, llama: str) -> None:
    asked = ("-i", "200", "-o", "4", "-c", "2", "-n", "12", "--shared-prefix", "150", "--endpoint", "completions")
    load = kvctl("serve-test", llama, *asked, "--json").json["loads"][0]
    # 150 of 200 tokens, or nothing of them where another slot takes the request: four slots have a cache of their own each.
    assert 0.3 < load["hit_rate"] <= 0.76
    assert load["hit_rate_of_counters"] == pytest.approx(load["hit_rate"], abs=0.2)


@pytest.mark.slow
def test_llama_cpp_is_full_where_size_says(kvctl: Run, tmp_path: Path) -> None:
    """Eight slots share 512 cells, of which requests of 60 + 50 tokens fill 110 each: four have room. llama.cpp throws out all that are
    under way when there is none."""
    argv, port = _llama_cpp("-c", "512", "-np", "8", "--kv-unified")
    line = f"llama-server -m {os.environ['KVCTL_SMOLLM2_GGUF']} -c 512 -np 8 --kv-unified"
    (sized,) = kvctl("size", "--engine-args", line, "--json").json["results"]
    predicted = sized["allocation"]["reserved_bytes"] // sized["kv_bytes_per_token"] // (60 + 50)
    assert predicted == 4
    asked = ["-i", "60", "-o", "50", "--endpoint", "completions", "--find-limit", "-n", "8", "--warmup", "2"]
    with _started(argv, port, tmp_path / "log", 120):
        outcome = kvctl("serve-test", f"127.0.0.1:{port}", *asked, "--json")
    assert outcome.code == 0, outcome.err
    limit = outcome.json["limit"]
    assert limit["why"] == "kv-saturated", limit
    assert abs(limit["borne"] - predicted) <= 1, limit


# -- a server that ends in the middle ------------------------------------------------------------------


def _ending(argv: Sequence[str], port: int, log: Path, after: float, *, again: bool) -> Iterator[str]:
    """A server that is killed after so many seconds of a load, and started anew on the same port."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(_started(argv, port, log, 120))
        over = threading.Event()

        def end() -> None:
            over.wait(after)
            os.killpg(first.pid, signal.SIGKILL)
            first.wait()
            if again and not over.is_set():
                stack.enter_context(_started(argv, port, log, 120))

        thread = threading.Thread(target=end)
        thread.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            over.set()
            thread.join()


@pytest.mark.slow
def test_a_restart_in_the_middle_shows(kvctl: Run, tmp_path: Path) -> None:
    """Requests by a clock, so that they go on while nothing listens; the new server counts from 0."""
    argv, port = _llama_cpp("-c", "2048", "-np", "4")
    words = "-i 40 -o 4 --rate 1 -d 24s --warmup 2 --max-error-rate 100 --endpoint completions"
    asked = (*words.split(), "--log", str(tmp_path / "log"))
    with contextlib.contextmanager(_ending)(argv, port, tmp_path / "log.llama", 6, again=True) as url:
        outcome = kvctl("serve-test", url, *asked, "--json")
    assert outcome.code == 0, outcome.err
    (load,) = outcome.json["loads"]
    requests = load["all"]["requests"]
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    measured = [line for line in lines if line["phase"] == "measured"]
    # Every request is told of once: as good with all its tokens, or as a failure and why.
    assert requests["ended"] == len(measured) == requests["good"] + sum(requests["failed"].values())
    assert requests["good"] == sum(line["fault"] is None for line in measured) > 0
    assert set(requests["failed"]) <= {"refused", "reset", "truncated", "rejected", "timeout"}
    assert sum(requests["failed"].values()) > 0
    assert all(line["output_tokens"] == 4 for line in measured if line["fault"] is None)
    # Some were answered after the restart, behind a failure.
    faults = [line["fault"] for line in sorted(measured, key=lambda line: line["number"])]
    assert faults[-1] is None
    assert load["metrics"]["resets"] == 1
    assert any("restarted" in words for words in load["verdict"]["evidence"])


@pytest.mark.slow
def test_a_server_that_is_gone_is_given_up(kvctl: Run, tmp_path: Path) -> None:
    argv, port = _llama_cpp("-c", "2048", "-np", "4")
    asked = ("-i", "60", "-o", "40", "-c", "4", "-d", "100s", "--endpoint", "completions")
    began = time.monotonic()
    with contextlib.contextmanager(_ending)(argv, port, tmp_path / "log.llama", 8, again=False) as url:
        outcome = kvctl("serve-test", url, *asked, "--json")
    assert outcome.code == 1
    (load,) = outcome.json["loads"]
    assert load["given_up"] is not None
    assert outcome.json["failed"]
    assert time.monotonic() - began < 90


# -- vLLM: a cache of 25 blocks of 32 tokens, one of which is vLLM's own ----------------------------------

VLLM = ("--max-model-len", "192", "--block-size", "32", "--num-gpu-blocks-override", "25")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python, folder = os.environ.get("KVCTL_VLLM_PYTHON"), os.environ.get("KVCTL_SMOLLM2")
    if not python or not folder:
        pytest.skip("KVCTL_VLLM_PYTHON and KVCTL_SMOLLM2 name no vLLM and model")
    port = _free()
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(port), "--host", "127.0.0.1", "--enforce-eager",
            *VLLM, "--enable-prompt-tokens-details", "--served-model-name", "smollm2", "--kv-cache-memory-bytes", "201326592"]  # fmt: skip
    env = os.environ | {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_CI_ENV": "1"}
    with _started(argv, port, tmp_path_factory.mktemp("vllm") / "log", 900, env):
        yield f"127.0.0.1:{port}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("--endpoint", "chat"),
        ("--endpoint", "completions"),
        ("--endpoint", "completions", "--shared-prefix", "65", "--groups", "2"),
    ],
    ids=["chat", "completions", "shared"],
)
def test_vllm_counts_the_same(kvctl: Run, vllm: str, tmp_path: Path, more: tuple[str, ...]) -> None:
    asked = ("-i", "100", "-o", "20", "-c", "1,3", "-n", "12", "--log", str(tmp_path / "log"))
    outcome = kvctl("serve-test", vllm, *asked, *more, "--json")
    assert outcome.code == 0, outcome.err
    found = outcome.json
    assert (found["server"]["engine"], found["server"]["context"]) == ("vllm", 192)
    assert found["server"]["prompts_exact"]
    own = _all(tmp_path / "log")
    assert own["input_tokens"] == 100 * own["requests"]
    assert own["output_tokens"] == 20 * own["requests"]
    counters = [load["metrics"]["counters"] for load in found["loads"]]
    summed = {name: sum(one[name] for one in counters) for name in counters[0]}
    assert summed["requests"] == own["requests"]
    assert summed["prompt_tokens"] == own["input_tokens"]
    assert summed["output_tokens"] == own["output_tokens"]
    assert summed["prefix_hits"] == summed["cached_tokens"] == own["cached_tokens"]
    assert summed["prefix_queries"] == own["input_tokens"]
    # Whole blocks of 32 are found: two of a beginning of 65 tokens, of each request.
    assert own["cached_tokens"] == (64 * own["requests"] if "--groups" in more else own["cached_tokens"])
    if more == ("--endpoint", "completions"):
        assert own["cached_tokens"] == 0  # another word stands second in each prompt


@pytest.mark.slow
def test_vllm_preempts_and_the_report_says_so(kvctl: Run, vllm: str) -> None:
    """Requests of 96 + 64 tokens grow to five blocks: of 24 four have room, and eight are preempted or wait."""
    outcome = kvctl(
        "serve-test", vllm, "-i", "96", "-o", "64", "-c", "2,8", "-n", "16", "--endpoint", "completions", "--json"
    )
    assert outcome.code == 0, outcome.err
    few, many = outcome.json["loads"]
    assert few["verdict"]["kind"] != "kv-saturated"
    assert few["metrics"]["preemptions"] == 0
    assert many["verdict"]["kind"] == "kv-saturated", many["verdict"]
    assert many["metrics"]["preemptions"] > 0
    assert any("preempted" in words for words in many["verdict"]["evidence"])
    assert many["all"]["requests"]["good"] == 16
    assert many["all"]["tokens"]["output"] == 16 * 64


@pytest.mark.slow
def test_vllm_is_full_where_size_says(kvctl: Run, vllm: str) -> None:
    line = f"vllm serve {os.environ['KVCTL_SMOLLM2']} " + " ".join(VLLM)
    (sized,) = kvctl("size", "--engine-args", line, "--device", "cpu", "--ctx", "160", "--json").json["results"]
    predicted = int(sized["allocation"]["max_concurrency"])
    assert predicted == 5  # 25 blocks / 5
    outcome = kvctl(
        "serve-test", vllm, "-i", "96", "-o", "64", "--endpoint", "completions", "--find-limit", "-n", "24", "--json"
    )
    assert outcome.code == 0, outcome.err
    limit = outcome.json["limit"]
    assert limit["why"] == "kv-saturated", limit
    assert abs(limit["borne"] - predicted) <= 1, limit
