"""`kvctl serve-test` against real servers: its counts against their own, to the unit.

KVCTL_LLAMA_CPP=build/bin KVCTL_SMOLLM2_GGUF=SmolLM2-135M-Instruct.Q4_1.gguf python -m pytest -m engine tests/test_serve_test_engines.py
KVCTL_VLLM_PYTHON=venv/bin/python KVCTL_SMOLLM2=folder python -m pytest -m slow tests/test_serve_test_engines.py
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome

Run = Callable[..., Outcome]
pytestmark = pytest.mark.engine


def _free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def _served(
    argv: Sequence[str], port: int, log: Path, seconds: float, env: dict[str, str] | None = None
) -> Iterator[str]:
    """A server that is up, at its URL; gone afterwards with all that it started."""
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
        yield f"127.0.0.1:{port}"
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


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    program, gguf = os.environ.get("KVCTL_LLAMA_CPP"), os.environ.get("KVCTL_SMOLLM2_GGUF")
    found = shutil.which("llama-server", path=program) if program else None
    if found is None or gguf is None:
        pytest.skip("KVCTL_LLAMA_CPP and KVCTL_SMOLLM2_GGUF name no server and model")
    port = _free()
    argv = [
        found,
        "-m",
        gguf,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "-c",
        "2048",
        "-np",
        "4",
        "--metrics",
        "--slots",
        "--props",
    ]
    with _served(argv, port, tmp_path_factory.mktemp("llama") / "log", 120) as url:
        yield url


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
def test_vllm_counts_the_same_and_its_cache_is_full_where_it_should(kvctl: Run, tmp_path: Path) -> None:
    """A cache of 8 blocks of 128 tokens (one is vLLM's own): requests of 100 + 60 tokens take two, so three run at a time and more wait."""
    python, folder = os.environ.get("KVCTL_VLLM_PYTHON"), os.environ.get("KVCTL_SMOLLM2")
    if not python or not folder:
        pytest.skip("KVCTL_VLLM_PYTHON and KVCTL_SMOLLM2 name no vLLM and model")
    port = _free()
    argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(port), "--host", "127.0.0.1", "--enforce-eager",
            "--max-model-len", "512", "--num-gpu-blocks-override", "8", "--enable-prompt-tokens-details", "--served-model-name", "smollm2",
            "--kv-cache-memory-bytes", "201326592"]  # fmt: skip
    env = os.environ | {"VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_CI_ENV": "1"}
    with _served(argv, port, tmp_path / "log.vllm", 900, env) as url:
        asked = (
            "-i",
            "100",
            "-o",
            "60",
            "-c",
            "2,8",
            "-n",
            "12",
            "--endpoint",
            "completions",
            "--log",
            str(tmp_path / "log"),
        )
        outcome = kvctl("serve-test", url, *asked, "--json")
        assert outcome.code == 0, outcome.err
        found: dict[str, Any] = outcome.json
    assert found["server"]["engine"] == "vllm"
    own = _all(tmp_path / "log")
    counters = [load["metrics"]["counters"] for load in found["loads"]]
    assert sum(one["prompt_tokens"] for one in counters) == own["input_tokens"]
    assert sum(one["output_tokens"] for one in counters) == own["output_tokens"]
    assert sum(one["requests"] for one in counters) == own["requests"]
    few, many = found["loads"]
    assert few["verdict"]["kind"] != "kv-saturated"
    assert many["verdict"]["kind"] == "kv-saturated", many["verdict"]
    assert many["metrics"]["kv_use_max"] >= 0.95
