"""`kvctl recommend --verify` on real engines: five configurations for SmolLM2 under small memory limits start, hold the promised context and
as many requests at once as promised, without pushing any out; and the next larger one does not.

KVCTL_LLAMA_CPP=build/bin KVCTL_SMOLLM2_GGUF=SmolLM2-135M-Instruct.Q4_1.gguf python -m pytest -m 'engine or slow' tests/test_recommend_engines.py
KVCTL_VLLM_PYTHON=venv/bin/python KVCTL_SMOLLM2=folder OMP_NUM_THREADS=1 python -m pytest -m 'engine or slow' tests/test_recommend_engines.py -k vllm
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome

from kvctl.units import MIB

Run = Callable[..., Outcome]
pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Keys and values of a token of SmolLM2-135M: 30 layers of 3 heads of 64, in 2 bytes; 34 bytes for 32 in q8_0.
F16, Q8_0 = 2 * 30 * 3 * 64 * 2, 2 * 30 * 3 * 64 // 32 * 34


def _rows(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in found["verified"]["rows"]}


def _measured(found: dict[str, Any], name: str) -> Any:
    return _rows(found)[name]["measured"]


def _whole(found: dict[str, Any], prompt: int, answer: int, at_once: int) -> None:
    """Every request was as long as promised, as the engine counts it, and all ran at once."""
    (load,) = found["verified"]["test"]["loads"]
    requests, tokens = load["all"]["requests"], load["all"]["tokens"]
    assert (requests["short"], sum(requests["failed"].values())) == (0, 0)
    assert requests["good"] >= max(8, at_once)
    assert (tokens["input"], tokens["output"]) == (prompt * requests["good"], answer * requests["good"])
    assert load["sent"] >= requests["good"] + at_once
    assert _measured(found, "requests that run at once") == at_once


# -- a load test makes a host's speed known -----------------------------------------------------------------


def test_llama_cpp_is_as_fast_as_was_measured(kvctl: Run, gguf: str, tmp_path: Path) -> None:
    """The hint of an unknown speed, followed: what is predicted of the loads that were tested is what was measured of them."""
    saved = str(tmp_path / "today.json")
    asked = ("recommend", gguf, "--engine", "llama.cpp", "--gpu", "cpu", "--ctx", "2k", "--input-tokens", "128", "--output-tokens", "32",
             "--max-quality-loss", "0", "--json")  # fmt: skip
    assert "--calibrate FILE@cpu" in kvctl(*asked, "--concurrency", "2").json["answers"][0]["assumption"]
    server = f"llama-server -m {gguf} -t 1 -c 4096 -np 2"
    tested = kvctl(
        "serve-test",
        "--launch",
        server,
        "-c",
        "1,2",
        "-n",
        "6",
        "-i",
        "128",
        "-o",
        "32",
        "--save",
        saved,
    )
    assert tested.code == 0, tested.err
    for load in json.loads(Path(saved).read_text())["loads"]:
        outcome = kvctl(*asked, "--concurrency", str(load["step"]["at_once"]), "--calibrate", f"{saved}@cpu")
        assert "not used" not in outcome.err
        found = outcome.json["answers"][0]
        assert found["validated"] == f"measured: {saved}"
        times = (load["all"] if load["steady_refused"] else load["steady"])["times"]
        assert found["side"]["speed"]["tpot"]["mid"] == pytest.approx(times["tpot"]["p50"]["value"], rel=0.15)


# -- llama.cpp: SmolLM2 in Q4_1 is 92.1 MiB --------------------------------------------------------------------


@pytest.fixture
def gguf() -> str:
    path = os.environ.get("KVCTL_SMOLLM2_GGUF")
    if not path or not os.environ.get("KVCTL_LLAMA_CPP"):
        pytest.skip("KVCTL_LLAMA_CPP and KVCTL_SMOLLM2_GGUF name no server and model")
    return path


LLAMA = {
    # requests at once, tokens of each, MiB of the host, percent that may be lost, type of the cache, bytes of the cache
    "1 slot": (1, 768, 167, "0", "f16", 768 * F16),
    "4 slots": (4, 256, 178, "0", "f16", 4 * 256 * F16),
    # Eight slots of 256 take 45 MiB in 16 bits, and 23.9 MiB in q8_0: the limit leaves that alone.
    "8 slots": (8, 256, 185, "1", "q8_0", 8 * 256 * Q8_0),
}


@pytest.mark.parametrize(("count", "ctx", "limit", "loss", "kv", "size"), LLAMA.values(), ids=LLAMA)
def test_llama_cpp_holds_what_is_promised_and_no_more(
    kvctl: Run, gguf: str, tmp_path: Path, count: int, ctx: int, limit: int, loss: str, kv: str, size: int
) -> None:
    answer, log = ctx // 8, tmp_path / "log"
    asked = (
        "recommend",
        gguf,
        "--engine",
        "llama.cpp",
        "--gpu",
        f"cpu:{limit}MiB",
        "--max-quality-loss",
        loss,
        "--json",
    )
    # Threads wait for one another at every step: on a machine that is busy with other tests, several are slower than one.
    proof = ("--verify", "--verify-args", "-t 1", "--server-log", str(log))
    outcome = kvctl(*asked, "--ctx", str(ctx), "--concurrency", str(count), *proof)
    found = outcome.json
    assert outcome.code == 0, (outcome.err, found["verified"]["broken"])
    settings = found["answers"][0]["side"]["settings"]
    assert (settings["slots"], settings["kv_dtype"], settings["made"]) == (count, kv, "stored")
    _whole(found, ctx - answer, answer, count)
    assert _measured(found, "waiting for a slot") == 0
    assert _measured(found, "tokens in the cache") == count * ctx
    # The log prints hundredths of a MiB.
    assert _measured(found, "bytes of the cache") == pytest.approx(size, abs=MIB / 100)
    assert f"{count}/{count} seqs), K ({kv})" in log.read_text(errors="replace")
    # What the process had at most is what was planned with, and less than the limit.
    memory = _rows(found)["memory of the process"]
    assert memory["measured"] <= memory["promised"]["mid"] <= limit * MIB
    assert memory["measured"] == pytest.approx(memory["promised"]["mid"], rel=0.15)

    # One request more at once, or a step more of context, does not fit: the plan says so,
    for more in (("--ctx", str(ctx), "--concurrency", str(count + 1)), ("--ctx", str(ctx + 256), "--concurrency", str(count))):  # fmt: skip
        larger = kvctl(*asked, *more)
        assert larger.code == 3, more
        assert larger.json["answers"] == []
    # and the engine, started as recommended, has one wait, and takes no longer request.
    line = shlex.join(found["answers"][0]["side"]["command"]) + " -t 1"
    lengths = ("-i", str(ctx - answer), "-o", str(answer), "--endpoint", "completions")
    load = ("-c", str(count + 1), "-n", str(count + 3), "--warmup", "1", "--json")
    forced = kvctl("serve-test", "--launch", line, *lengths, *load)
    assert forced.code == 0, forced.err
    looks = forced.json["loads"][0]["metrics"]["series"]
    assert max(look["running"] for look in looks) == count
    assert max(look["waiting"] for look in looks) == 1
    longer = kvctl("serve-test", "--launch", line, "-i", str(ctx), "-o", str(answer), "--endpoint", "completions")
    assert longer.code == 1
    assert f"and the server takes {ctx:,}" in longer.err


# -- vLLM: blocks of 128 tokens, of which one is vLLM's own ---------------------------------------------------


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> str:
    path = os.environ.get("KVCTL_SMOLLM2")
    if not path or not os.environ.get("KVCTL_VLLM_PYTHON"):
        pytest.skip("KVCTL_VLLM_PYTHON and KVCTL_SMOLLM2 name no vLLM and model")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    return path


def _on_vllm(kvctl: Run, folder: str, ctx: int, count: int) -> tuple[dict[str, Any], list[str]]:
    """The report of a plan that was put to the proof, and its command line."""
    asked = (
        "recommend",
        folder,
        "--engine",
        "vllm",
        "--gpu",
        "cpu:4GiB",
        "--ctx",
        str(ctx),
        "--concurrency",
        str(count),
    )
    outcome = kvctl(*asked, "--verify", "--verify-args", "--enforce-eager", "--json")
    assert outcome.code == 0, (outcome.err, outcome.out[-2000:])
    found = outcome.json
    blocks = count * (ctx // 128) + 1
    assert found["answers"][0]["side"]["settings"]["kv_budget"] == blocks * 128 * F16
    _whole(found, ctx - ctx // 8, ctx // 8, count)
    assert _measured(found, "pushed out of the cache") == 0
    assert _measured(found, "blocks of the cache") == blocks
    assert _measured(found, f"requests of {ctx:,} tokens that the cache holds") == count
    assert _measured(found, "cache in use at most") == 1
    return found, found["answers"][0]["side"]["command"]


def test_vllm_holds_what_is_promised_and_pushes_out_more(kvctl: Run, folder: str) -> None:
    _, command = _on_vllm(kvctl, folder, 512, 3)
    # One more at once in the same cache, and let in: three fill it, and the fourth waits or pushes one out.
    where = command.index("--max-num-seqs")
    assert command[where + 1] == "3"
    line = shlex.join([*command[: where + 1], "4", *command[where + 2 :], "--enforce-eager"])
    load = ("-i", "448", "-o", "64", "-c", "4", "-n", "8", "--warmup", "4", "--endpoint", "completions", "--json")
    forced = kvctl("serve-test", "--launch", line, *load)
    assert forced.code == 0, forced.err
    (one,) = forced.json["loads"]
    assert one["verdict"]["kind"] == "kv-saturated"
    assert one["metrics"]["counters"]["preemptions"] > 0 or one["metrics"]["waiting_max"] > 0
    # A memory that leaves 14 blocks beside the weights (134,515,008 parameters in 2 bytes) has no room for a fourth request.
    # and what its processes were seen to take.
    limit = 2 * 134_515_008 + round(1.85 * 2**30) + 14 * 128 * F16
    tight = ("recommend", folder, "--engine", "vllm", "--gpu", f"cpu:{limit // MIB}MiB", "--ctx", "512", "--json")
    assert kvctl(*tight, "--concurrency", "3").code == 0
    larger = kvctl(*tight, "--concurrency", "4")
    assert larger.code == 3
    assert json.loads(larger.out)["answers"] == []


def test_vllm_does_not_start_for_a_longer_request(kvctl: Run, folder: str) -> None:
    _, command = _on_vllm(kvctl, folder, 1024, 1)
    where = command.index("--max-model-len")
    line = shlex.join([*command[: where + 1], "1280", *command[where + 2 :], "--enforce-eager"])
    forced = kvctl("serve-test", "--launch", line)
    assert forced.code == 1
    assert "vllm did not start" in forced.err
    assert "1,280" in forced.err or "1280" in forced.err
