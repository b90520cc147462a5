"""`--from-log` against start-up logs that other people published, and against files that are none."""

from __future__ import annotations

import contextlib
import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import test_published_logs as other_logs
import test_vllm_published as vllm_published
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvctl.allocation import Serving
from kvctl.engines import Engine
from kvctl.errors import KvctlError, SourceError
from kvctl.hardware import read_gpus
from kvctl.model import build_spec
from kvctl.options import read_asked
from kvctl.ranks import Hardware
from kvctl.size import SizePlan
from kvctl.sources.tensors import attach
from kvctl.spec import ModelSpec
from kvctl.startlog import LogReport, StartLog, explain, read_log

GIB = 2**30
DATA = Path(__file__).parent / "data" / "start_logs.txt"


class Published(NamedTuple):
    """One published log."""

    where: str
    facts: dict[str, str]
    text: str


def published() -> list[Published]:
    out = []
    for block in DATA.read_text().split("\n== ")[1:]:
        head, _, text = block.partition("\n---\n")
        where, *rows = head.splitlines()
        out.append(Published(where, dict(row.split(": ", 1) for row in rows), text))  # type: ignore[misc]
    return out


LOGS = published()


def read(tmp_path: Path, text: str | bytes) -> StartLog:
    path = tmp_path / "server.log"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_log(str(path))


def asked(log: StartLog, facts: dict[str, str]) -> tuple[ModelSpec, SizePlan]:
    """The model and the plan as the command line makes them of a log."""
    rules = facts.get("rules", log.rules)
    words = " ".join(filter(None, (facts.get("env"), log.engine_args, facts.get("args"))))
    said = read_asked(engine=rules, engine_args=words, models=[facts["model"]], revision=None, ctx=None, dtype="auto",
                      kv_dtypes=("auto", "auto", "auto"), overrides=(), flags=())  # fmt: skip
    spec = build_spec(said.find(facts["model"], "catalogue"), said.overrides, checked=False)
    common = SizePlan(contexts=said.contexts, own_maximum=said.own_maximum, dtype=said.dtype, notes=said.notes)
    return spec, said.plans(common).each[0]


def report(log: StartLog, facts: dict[str, str]) -> LogReport:
    return explain(log, *asked(log, facts))


@pytest.mark.parametrize("entry", LOGS, ids=lambda entry: entry.where)
def test_reads_a_published_log(tmp_path: Path, entry: Published) -> None:
    log = read(tmp_path, entry.text)
    assert log.complete
    for reading in filter(None, entry.facts.get("reads", "").split("; ")):
        name, _, text = reading.partition("=")
        if name == "version":
            assert log.version == text
        else:
            assert text.replace(" GB", " GiB") in [figure.text for figure in log.all(name)], (name, log.all(name))
    for reading in filter(None, entry.facts.get("where", "").split("; ")):
        name, _, where = reading.partition("=")
        assert log.all(name)[0].where == where
    for words in filter(None, entry.facts.get("says", "").split("; ")):
        assert words in log.engine_args


@pytest.mark.parametrize("entry", LOGS, ids=lambda entry: entry.where)
def test_explains_a_published_log(tmp_path: Path, entry: Published) -> None:
    log = read(tmp_path, entry.text)
    found = report(log, entry.facts)
    wrong = "; ".join(f"{row.name}: {row.cause or '?'}" for row in found.rows if row.agrees is False) or "agrees"
    assert wrong == entry.facts["verdict"], [row.to_dict() for row in found.rows]
    assert any(row.agrees is not None for row in found.rows) or found.refused is not None, found


# -- the logs of the other tests, line by line as they were printed --------------------------------


@pytest.mark.parametrize("row", vllm_published.LOGS, ids=lambda row: f"{row.version}-{row.model}-{row.memory:g}")
def test_vllm_logs_agree(tmp_path: Path, row: vllm_published.Log) -> None:
    concurrency = f"Maximum concurrency for {row.length:,} tokens per request: {row.concurrency}x"
    tokens = f"GPU KV cache size: {row.tokens:,} tokens" if row.tokens is not None else ""
    memory = f"{row.memory:.2f}" if len(f"{row.memory:g}") < 8 else f"{row.memory:.9f}"
    log = read(tmp_path, f"(EngineCore pid=1) INFO [gpu_worker.py:1] Available KV cache memory: {memory} GiB\n{tokens}\n"
               + (concurrency if row.concurrency is not None else ""))  # fmt: skip
    command = row.command.replace("DRAFTER", vllm_published.drafter(tmp_path))
    env, found, rest = command.rpartition("vllm serve ")
    args = (rest if found else command).replace("python3 -m vllm.entrypoints.openai.api_server", "")
    length = "" if "--max-model-len" in args else f" --max-model-len {row.length}"
    model = row.model or "MiniMaxAI/MiniMax-M2.5"
    if not found or row.model is None:
        env = ""
    facts = {"model": model, "rules": f"vllm@{row.version}", "args": args.replace("\\\n", " ") + length, "env": env}
    rows = report(log, facts).rows
    assert {line.name for line in rows if line.agrees is False} == set(), rows
    assert {line.name for line in rows if line.agrees} == {
        name for name, said in (("capacity", row.tokens), ("concurrency", row.concurrency)) if said is not None
    }


@pytest.mark.parametrize("row", vllm_published.REFUSALS, ids=lambda row: f"{row.version}-{row.model}")
def test_vllm_refusals_agree(tmp_path: Path, row: vllm_published.Refusal) -> None:
    available = f"{row.available:.2f}" if row.available is not None else ""
    text = (f"ValueError: To serve at least one request with the model's max seq len ({row.length}), ({row.needed} GiB KV cache is "
            "needed, which is larger than the available KV cache memory")  # fmt: skip
    text += f" ({available} GiB). " if available else ". "
    if row.longest is not None:
        text += f"Based on the available memory, the estimated maximum model length is {row.longest}."
    command = row.command.replace("DRAFTER", vllm_published.drafter(tmp_path))
    facts = {"model": row.model, "rules": f"vllm@{row.version}", "args": f"{command} --max-model-len {row.length}"}
    found = report(read(tmp_path, text), facts)
    assert found.agrees, found.rows
    assert found.refused is not None
    assert found.refused.kind == "too long"
    if row.longest is not None:
        # A length that fits is named, within what the printed memory leaves open.
        least = int(next(words for words in found.refused.fits if "--max-model-len" in words).split()[1])
        assert row.longest * 0.99 < least <= row.longest


@pytest.mark.parametrize("row", other_logs.SGLANG, ids=lambda row: row[0])
def test_sglang_logs_agree(tmp_path: Path, row: tuple[str, str, str, str, list[str]]) -> None:
    _, version, model, flags, lines = row
    log = read(tmp_path, "\n".join(f"[2026-01-01 00:00:00 TP{rank}] {line}" for rank in (0, 1) for line in lines))
    found = report(log, {"model": model, "rules": f"sglang@{version}", "args": flags})
    assert found.agrees, found.rows
    assert any(line.agrees for line in found.rows)


@pytest.mark.parametrize("row", other_logs.LLAMA_CPP, ids=lambda row: row[0])
def test_llama_cpp_logs_agree(tmp_path: Path, row: tuple[str, str, str, str, list[str]]) -> None:
    _, build, model, flags, lines = row
    log = read(tmp_path, "\n".join(lines))
    facts = {"model": model, "rules": f"llama.cpp@{build}" if build else "llama.cpp", "args": flags}
    found = report(log, facts)
    assert found.rows
    assert all(line.agrees for line in found.rows), found.rows


# -- reading ------------------------------------------------------------------------------------


CONFIG = ("(EngineCore_DP0 pid=9) INFO 10-01 10:00:00 [core.py:77] Initializing a V1 LLM engine (v{}) with config: model='Qwen/Qwen3-8B', "
          "dtype=torch.bfloat16, max_seq_len={}, tensor_parallel_size={}, pipeline_parallel_size=1, data_parallel_size=1, "
          "kv_cache_dtype=auto, device_config=cuda, enable_prefix_caching=True\n")  # fmt: skip


def vllm_start(memory: float, tokens: int, length: int = 40_960, version: str = "0.11.0", ranks: int = 1) -> str:
    return (CONFIG.format(version, length, ranks)
            + f"(Worker_TP0 pid=10) INFO 10-01 10:00:05 [gpu_worker.py:298] Available KV cache memory: {memory:.2f} GiB\n"
            f"(EngineCore_DP0 pid=9) INFO 10-01 10:00:06 [kv_cache_utils.py:1087] GPU KV cache size: {tokens:,} tokens\n")  # fmt: skip


def test_the_last_complete_start_of_several_is_read(tmp_path: Path) -> None:
    # 36 layers · 8 heads · 128 · 2 · 2 B = 147,456 B a token: 4 GiB hold 1,820 blocks of 16, 8 GiB 3,640
    log = read(tmp_path, vllm_start(4, 29_120) + vllm_start(8, 58_240) + CONFIG.format("0.12.0", 8192, 1))
    assert (log.starts, log.version) == (3, "0.11.0")
    assert log.figure("capacity").value == 58_240  # type: ignore[union-attr]
    assert "3 starts in the log: the last complete one is taken" in log.notes
    assert report(log, {"model": "Qwen3-8B"}).agrees


def test_a_log_that_is_cut_off_is_read_so_far(tmp_path: Path) -> None:
    log = read(
        tmp_path, CONFIG.format("0.11.0", 8192, 2) + "(Worker_TP0 pid=1) Model loading took 7.68 GiB and 1.0 seconds\n"
    )
    assert not log.complete
    assert log.notes == ("the log ends before it says how large the cache is",)
    assert log.engine_args == (
        "vllm serve Qwen/Qwen3-8B --dtype bfloat16 --max-model-len 8192 --tensor-parallel-size 2 --kv-cache-dtype auto "
        "--enable-prefix-caching"
    )
    assert log.kv_budget is None


@pytest.mark.parametrize(
    "wrap",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "".join(f"\x1b[32m{line}\x1b[0m\n" for line in text.splitlines()),
        lambda text: "".join(f"#033[1;36m{line}#033[0;0m\n" for line in text.splitlines()),
        lambda text: "".join(f"2026-10-01T10:00:00.123456789Z stderr F {line}\n" for line in text.splitlines()),
        lambda text: "".join(f"Oct 01 10:00:00 host vllm[123]: {line}\n" for line in text.splitlines()),
        lambda text: "".join(f"vllm-1  | {line}\n" for line in text.splitlines()),
        lambda text: "".join(json.dumps({"log": line + "\n", "stream": "stderr"}) + "\n" for line in text.splitlines()),
        lambda text: "".join(f"Capturing CUDA graphs:  50%|\r{line}\n" for line in text.splitlines()),
        lambda text: "\ufeff".encode("utf-16-le") + text.encode("utf-16-le"),
        lambda text: "\ufeff".encode("utf-16-be") + text.encode("utf-16-be"),
        lambda text: text.encode() + b"\xc3\x28 no UTF-8 GiB\n" * 3,
    ],
)  # fmt: skip
def test_whatever_wrote_the_lines_down(tmp_path: Path, wrap: Callable[[str], str | bytes]) -> None:
    log = read(tmp_path, wrap(vllm_start(4, 29_120, ranks=2)))
    memory = log.figure("kv_available")
    assert memory is not None
    assert (memory.value, memory.where, memory.text) == (4 * GIB, "TP0", "4.00 GiB")
    assert (log.version, log.model) == ("0.11.0", "Qwen/Qwen3-8B")
    assert "--tensor-parallel-size 2" in log.engine_args


def test_printed_decimals_are_the_precision(tmp_path: Path) -> None:
    # "%.2f", and round(x, 2) without its zeros: both are within 0.005 GiB
    for text in ("4.00", "4.0"):
        log = read(tmp_path, f"Available KV cache memory: {text} GiB\nGPU KV cache size: 29,120 tokens\n")
        assert log.kv_budget == (4 * GIB - 5_368_709, 4 * GIB + 5_368_709)
    assert log.figures[0].line == 1
    assert log.figures[1].line == 2


def test_the_advice_of_a_start_without_graphs_is_exact(tmp_path: Path) -> None:
    """vllm 0.33 gpu_worker.py: advised = share − consumed − peak − graphs − 150 MiB, and share − consumed − peak is left."""
    left = 4 * GIB + 1234
    text = (
        "Free memory on device (23.5/24.0 GiB) on startup. Desired GPU memory utilization is (0.9, 21.6 GiB). Actual usage is 16.0 GiB "
        "for consumed memory (weights + non-torch), 1.6 GiB for peak activation, and 0.0 GiB for CUDAGraph memory. Replace "
        f"gpu_memory_utilization config with `--kv-cache-memory={left - 150 * 2**20}` (3.85 GiB) to fit into requested memory, or "
        "`--kv-cache-memory=6000000000` (5.59 GiB) to fully utilize gpu memory. Current kv cache memory in use is 4.0 GiB.\n"
    )
    log = read(
        tmp_path, text + "GPU KV cache size: 29,120 tokens, Maximum concurrency for 4,096 tokens per request: 7.11x\n"
    )
    assert log.kv_budget == (left, left)
    rows = {row.name: row for row in report(log, {"model": "Qwen3-8B"}).rows}
    assert rows["share of the GPU"].agrees  # 0.9 · 24.0
    assert rows["share less the parts"].agrees  # 21.6 − 16.0 − 1.6
    assert rows["capacity"].agrees


def test_ranks_and_replicas_are_told_apart(tmp_path: Path) -> None:
    lines = [
        f"(EngineCore_DP{dp} pid=1) (Worker_DP{dp}_TP{tp} pid=2) INFO Available KV cache memory: {memory} GiB"
        for dp, tp, memory in ((0, 0, "4.50"), (0, 1, "4.00"), (1, 0, "3.00"), (1, 1, "3.50"))
    ]
    lines += [
        "(EngineCore_DP0 pid=1) INFO GPU KV cache size: 58,240 tokens",
        "(EngineCore_DP1 pid=1) INFO GPU KV cache size: 43,680 tokens",
    ]
    log = read(tmp_path, "\n".join(lines))
    assert [figure.where for figure in log.all("kv_available")] == ["DP0 TP0", "DP0 TP1", "DP1 TP0", "DP1 TP1"]
    assert log.figure("kv_available").text == "4.00 GiB"  # type: ignore[union-attr]
    found = report(log, {"model": "Qwen3-8B", "rules": "vllm@0.11", "args": "--max-model-len 4096 -tp 2"})
    # 4 GiB at 73,728 B a token: 3,640 blocks
    assert [(row.name, row.agrees) for row in found.rows] == [("capacity", True)]


def test_stages_count_with_their_own_layers(tmp_path: Path) -> None:
    # Qwen3-8B: 18 of 36 layers each, 73,728 B a token; the second stage has less memory
    text = (
        "(Worker_PP0 pid=1) INFO Available KV cache memory: 9.00 GiB\n(Worker_PP1 pid=2) INFO Available KV cache memory: 8.00 GiB\n"
        "(EngineCore pid=3) INFO GPU KV cache size: 116,496 tokens\n"
    )
    found = report(
        read(tmp_path, text), {"model": "Qwen3-8B", "rules": "vllm@0.15", "args": "-pp 2 --max-model-len 4096"}
    )
    assert [(row.name, row.low, row.high, row.agrees) for row in found.rows] == [("capacity", 116_432, 116_576, True)]


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("Qwen/Qwen3-8B", ("Qwen/Qwen3-8B", "Qwen3-8B")),
        ("/home/test/hf/Qwen3-0.6B/", ("/home/test/hf/Qwen3-0.6B/", "hf/Qwen3-0.6B", "Qwen3-0.6B")),
        (
            "/models/models--Qwen--Qwen3-8B/snapshots/abc",
            ("/models/models--Qwen--Qwen3-8B/snapshots/abc", "Qwen/Qwen3-8B"),
        ),
        (r"D:\\models\\Qwen3-8B", (r"D:\models\Qwen3-8B", "models/Qwen3-8B", "Qwen3-8B")),
    ],
)
def test_names_of_the_model(tmp_path: Path, model: str, names: tuple[str, ...]) -> None:
    assert read(tmp_path, CONFIG.format("0.11.0", 8192, 1).replace("Qwen/Qwen3-8B", model)).model_names == names


def test_what_the_engine_measured_stands_beside_estimates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-8B in bf16: 8,190,735,360 parameters of 2 B; without an engine's own rules nothing is taken beside them."""
    monkeypatch.setattr(Engine, "memory", None)
    log = read(tmp_path, vllm_start(4, 29_120) + "Model loading took 15.27 GiB and 2 seconds\n")
    spec, plan = asked(log, {"model": "Qwen3-8B"})
    plan = plan.replace(hardware=Hardware(read_gpus("RTX 4090"), "RTX 4090"))
    rows = {row.name: row for row in explain(log, attach(spec), plan).rows}
    assert rows["capacity"].agrees
    assert (rows["weights"].low, rows["weights"].agrees) == (16_381_470_720, None)
    assert rows["left for the cache"].remark == "kvctl's is an estimate"


def test_a_length_that_the_engine_chose(tmp_path: Path) -> None:
    """vllm 0.29 v1/core/kv_cache_utils.py: the longest that 4 GiB less a block hold, 1,819 blocks of 16 tokens."""
    text = CONFIG.format("0.29.0", 40_960, 1) + (
        "INFO [gpu_worker.py:1] Available KV cache memory: 4.0 GiB\n"
        "INFO [kv_cache_utils.py:2044] Auto-fit max_model_len: reduced from 40960 to 29104 to fit in available GPU memory (4.0 GiB)\n"
        "INFO [kv_cache_utils.py:2235] GPU KV cache size: 29,120 tokens, Maximum concurrency for 29,104 tokens per request: 1.00x\n"
    )
    log = read(tmp_path, text)
    assert "--max-model-len 29104" in log.engine_args
    rows = {row.name: row for row in report(log, {"model": "Qwen3-8B"}).rows}
    assert [rows[name].agrees for name in ("capacity", "concurrency", "longest")] == [True] * 3


def test_a_cache_on_a_cpu(tmp_path: Path) -> None:
    """The device that the log names goes with the plan, and a budget that is told wins."""
    text = CONFIG.format("0.18.0+cpu", 1024, 1).replace("device_config=cuda", "device_config=cpu")
    log = read(tmp_path, text + "INFO CPU KV cache size: 174,720 tokens\n")
    assert (log.device, log.rules) == ("cpu", "vllm@0.18.0+cpu")
    assert log.told(Serving(), 5).device == "cpu"
    assert log.told(Serving(), 5).kv_budget == 5
    assert log.told(Serving(kv_budget=7), 5).kv_budget == 7


def test_ollamas_own_engine_is_read_and_not_compared(tmp_path: Path) -> None:
    text = (
        'time=2025-07-24T18:29:07.5+09:00 level=INFO source=server.go:175 msg=offload memory.required.kv="1.6 GiB" memory.graph.full="565.0 MiB"\n'
        'time=2025-07-24T18:29:07.517+09:00 level=INFO source=server.go:438 msg="starting llama server" cmd="C:\\\\Users\\\\x\\\\ollama.exe '
        "runner --ollama-engine --model C:\\\\Users\\\\x\\\\blobs\\\\sha256-e7 --ctx-size 8192 --batch-size 512 --n-gpu-layers 63 "
        '--kv-cache-type q8_0 --parallel 2 --port 49262"\n'
        'time=2025-07-24T18:29:20.1+09:00 level=INFO source=device.go:251 msg="kv cache" device=CUDA0 size="1.6 GiB"\n'
    )
    log = read(tmp_path, text)
    assert (log.engine, log.rules, log.complete) == ("ollama", "llama.cpp", True)
    assert log.engine_args == "llama-server -c 8192 -np 2 -b 512 -ctk q8_0 -ctv q8_0"
    assert log.figure("kv_cache").half == 0.05 * GIB  # type: ignore[union-attr]
    assert log.figure("kv_estimate").text == "1.6 GiB"  # type: ignore[union-attr]
    found = report(log, {"model": "gemma-3-27b-it"})
    assert found.rows == ()
    assert any("Ollama's own engine" in note for note in found.notes)


def test_a_cache_that_ran_full_is_counted(tmp_path: Path) -> None:
    line = (
        "[2026-01-01 00:00:00 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 1, #new_token_ratio: 0.5\n"
    )
    log = read(tmp_path, "[2026-01-01 00:00:00 TP0] max_total_num_tokens=1000, context_len=2048\n" + line * 3)
    assert any("ran full 3 times" in note for note in log.notes)
    assert log.refusal is None


def test_an_error_before_another_try_is_none(tmp_path: Path) -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.64 GiB of which 1.00 GiB is free\n"
    assert read(tmp_path, oom + vllm_start(4, 29_120)).refusal is None
    assert read(tmp_path, vllm_start(4, 29_120) + oom).refusal.kind == "out of memory"  # type: ignore[union-attr]


def test_the_printed_peak_holds_the_graphs(tmp_path: Path) -> None:
    """vllm 0.33 gpu_worker.py: peak_activation_memory = transient peak + estimate of the graphs."""
    entry = next(entry for entry in LOGS if "receipts of a validation" in entry.where)
    log = read(tmp_path, entry.text)
    spec, plan = asked(log, entry.facts)
    rows = explain(log, attach(spec), plan.replace(hardware=Hardware(read_gpus("A100-80GB"), "A100-80GB"))).rows
    said = {row.name: row.said for row in rows if row.agrees is None}
    assert said == {
        "weights": "51.1 GiB",
        "activations and graphs": "2.4 GiB",
        "graphs": "1.55 GiB",
        "left for the cache": "19.54 GiB",
    }


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(vllm_start(4, 29_120).encode())))
    assert read_log("-").version == "0.11.0"


# -- what accounts for a difference -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "args", "tokens", "cause"),
    [
        # gemma-3-27b: 7 groups of 10 layers; 18.76 GiB are 15,368 blocks of 1,310,720 B, whatever the meaning
        ("0.33", "--max-model-len 131072", 15_368 // 7 * 16, "the tokens are the blocks of one group of layers, as vLLM counts from 0.10 to 0.20.0"),
        # one pool of 62 layers, windows in full: 507,904 B a token
        ("0.33", "--max-model-len 4096", 39_648, "windowed layers keep every token, as with the hybrid cache manager off"),
        ("0.11", "--max-model-len 4096 --kv-cache-dtype fp8", 15_368 // 7 * 16, "a cache in the model's own dtype"),
    ],
)  # fmt: skip
def test_an_assumption_accounts_for_a_difference(
    tmp_path: Path, version: str, args: str, tokens: int, cause: str
) -> None:
    log = read(tmp_path, f"Available KV cache memory: 18.76 GiB\nGPU KV cache size: {tokens:,} tokens\n")
    found = report(log, {"model": "gemma-3-27b-it", "rules": f"vllm@{version}", "args": args})
    assert [row.cause for row in found.rows if row.name == "capacity"] == [cause], found.rows


@pytest.mark.parametrize(
    ("rules", "args", "cause"),
    [
        # 73,728 B a token on two ranks
        ("vllm@0.11.0", "-tp 4", "--tensor-parallel-size 2, as the log says"),
        ("vllm@0.11.0", "--kv-cache-dtype fp8", "the cache's format as the log says"),
        (
            "vllm@0.11.0",
            "--num-gpu-blocks-override 77",
            "without --num-gpu-blocks-override, which the log does not have",
        ),
        ("vllm@0.11.0", "--num-gpu-blocks-override 77 -tp 4 --kv-cache-dtype fp8", "the settings of the log"),
    ],
)
def test_where_the_question_differs_from_the_log(tmp_path: Path, rules: str, args: str, cause: str) -> None:
    log = read(tmp_path, vllm_start(4, 58_240, ranks=2))
    rows = [
        row for row in report(log, {"model": "Qwen3-8B", "rules": rules, "args": args}).rows if row.name == "capacity"
    ]
    assert [(row.agrees, row.cause or "?") for row in rows] == [(False, cause)]


def test_a_version_that_the_log_names_is_taken_before_others(tmp_path: Path) -> None:
    # Qwen3-Next in 0.10.2: one group's blocks × the smallest block
    published = next(log for log in vllm_published.LOGS if (log.version, log.model) == ("0.11.0", "gemma-3-27b-it"))
    text = CONFIG.format("0.11.0", published.length, 1).replace("Qwen/Qwen3-8B", "google/gemma-3-27b-it")
    text += f"Available KV cache memory: {published.memory:.2f} GiB\nGPU KV cache size: {published.tokens:,} tokens\n"
    log = read(tmp_path, text)
    for rules, cause in (("vllm@0.11.0", ""), ("vllm@0.8", "by the rules of vllm@0.11.0, as the log says")):
        rows = [row for row in report(log, {"model": "gemma-3-27b-it", "rules": rules}).rows if row.name == "capacity"]
        assert [row.cause for row in rows] == [cause]


def test_json_of_a_report(tmp_path: Path) -> None:
    found = report(read(tmp_path, vllm_start(4, 29_120)), {"model": "Qwen3-8B"})
    out = json.loads(json.dumps(found.to_dict()))
    assert (out["engine"], out["version"], out["agrees"], out["refused"]) == ("vllm", "0.11.0", True, None)
    assert out["kv_budget_bytes"] == [4 * GIB - 5_368_709, 4 * GIB + 5_368_709]
    # 3.995 GiB are 1,818 blocks of 2,359,296 B, 4.005 GiB 1,822
    assert out["rows"][0] == {
        "name": "capacity", "unit": "tokens", "said": "29,120", "value": 29_120, "half": 0, "line": 3, "low": 29_088, "high": 29_152,
        "agrees": True, "difference": 0, "cause": None, "remark": None,
    }  # fmt: skip


# -- files that are none ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no start of an engine in it"),
        (b"hello\nworld\n", "no start of an engine in it"),
        (b"\x00\x01\x02" * 100, "is no text"),
        (b"\x1f\x8b\x08\x00" + b"x" * 50, "is compressed"),
        (b"GGUF\x03\x00\x00\x00", "is no text"),
        (b"GiB tokens " * 200_000, "no start of an engine in it"),
    ],
)  # fmt: skip
def test_files_that_are_no_log(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=message) as caught:
        read(tmp_path, content)
    assert "\n" not in caught.value.message


def test_names_that_are_no_file(tmp_path: Path) -> None:
    for name, message in (
        (str(tmp_path / "none.log"), "no such log"), (str(tmp_path), "is not a file"), ("a\x00b", "no"), ("x" * 5000, "too long"),
    ):  # fmt: skip
        with pytest.raises(SourceError, match=message):
            read_log(name)


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "server.log"
    path.write_text("x")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(SourceError, match="Permission denied"):
        read_log(str(path))


@pytest.mark.parametrize(
    "line",
    [
        "Available KV cache memory: 1.2.3 GiB",
        "Available KV cache memory: 99999999999999999999999999999 GiB",
        "GPU KV cache size: ,,, tokens",
        f"GPU KV cache size: {'9' * 400} tokens",
        f"GPU KV cache size: {'9' * 19} tokens",
        "Maximum concurrency for 0 tokens per request: 0x",
        "non-default args: {" + "[" * 5000,
        "non-default args: {'model': " + "(" * 3000 + ")" * 3000 + "}",
        "non-default args: {'max_model_len': -5, 'tensor_parallel_size': 'x', 'speculative_config': {'method': 3}, 'model': '-rf'}",
        "Initializing a V1 LLM engine (v" + "9" * 3000 + ") with config: model='" + "a" * 3000 + "', max_seq_len=" + "9" * 300,
        "Initializing a V1 LLM engine (v0.11.0) with config: model='x', tensor_parallel_size=0, max_seq_len=0",
        "server_args=ServerArgs(model_path='x', tp_size=1e999, mem_fraction_static=nan, context_length=-1)",
        "Mamba Cache is allocated. max_mamba_cache_size: 99999999999, conv_state size: 0.0.0GB, ssm_state size: 1GB",
        "[2026-01-01 00:00:00 TP0] KV Cache is allocated. #tokens: 0, K size: 0.00 GB, V size: 0.00 GB",
        "llama_kv_cache: size = 1.00 MiB (99999999999999999999999 cells, 1 layers, 1/1 seqs), K (f16): 1 MiB, V (f16): 1 MiB",
        'msg="starting llama-server" cmd="llama-server --model \'x -c 99999999999999999999 -np"',
        "[MemUsageChange] Allocated 0.00 GiB for max tokens in paged KV cache (0)",
        "Max KV cache blocks per sequence: 1 [window size=0], tokens per block=0, primary blocks=0, secondary blocks=0, max sequence length=0",
        "ValueError: No available memory for the cache blocks. Available KV cache memory: -3.20 GiB",
        "Free memory on device (0.0/0.0 GiB) on startup is less than desired GPU memory utilization (0, 0.0 GiB)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 0 GiB. GPU 0 has a total capacity of 0 GiB of which 0 GiB is free",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Load weight end. avail mem=0 GB, mem usage=0 GB",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "rest", ["", vllm_start(4, 29_120), "Available KV cache memory: 0.00 GiB\nGPU KV cache size: 0 tokens\n"]
)
def test_damaged_lines(tmp_path: Path, line: str, rest: str) -> None:
    try:
        log = read(tmp_path, f"{line}\n{rest}")
    except SourceError:
        return
    json.dumps(log.to_dict(), allow_nan=False)
    tried(log)


def tried(log: StartLog) -> None:
    """Nothing but plain errors, whatever the log says."""
    facts = {"model": "Qwen3.5-9B" if len(log.figures) % 2 else "Qwen3-8B", "rules": log.rules}
    try:
        found = report(log, facts)
    except KvctlError:
        return
    json.dumps(found.to_dict(), allow_nan=False)


LINES = tuple(line for entry in LOGS for line in entry.text.splitlines() if line.strip())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.sampled_from(LINES), min_size=1, max_size=25),
    cuts=st.lists(st.tuples(st.integers(0, 24), st.integers(0, 300), st.text("0123456789.,-()[]{}'= GiBMx\x1b\r\u2028", max_size=12)), max_size=6),
)  # fmt: skip
def test_shuffled_and_damaged_lines(tmp_path: Path, lines: list[str], cuts: list[tuple[int, int, str]]) -> None:
    for index, at, text in cuts:
        if index < len(lines):
            lines[index] = lines[index][:at] + text + lines[index][at + len(text) :]
    try:
        log = read(tmp_path, "\n".join(lines))
    except SourceError:
        return
    json.dumps(log.to_dict(), allow_nan=False)
    tried(log)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=3000))
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    with contextlib.suppress(SourceError):
        read(tmp_path, content)


def test_a_large_log_is_read_in_little_memory(tmp_path: Path) -> None:
    """300 MB of requests after the start, with a line of 60 MB: in bounded memory."""
    path = tmp_path / "server.log"
    access = b'(APIServer pid=1) INFO:     10.0.0.1:34512 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n' * 10_000
    with path.open("wb") as out:
        out.write(vllm_start(4, 29_120).encode())
        for _ in range(260):
            out.write(access)
        out.write(b"tokens " * 8_000_000)
    tracemalloc.start()
    try:
        log = read_log(str(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert log.figure("capacity").value == 29_120  # type: ignore[union-attr]
    assert peak < 32 * 2**20


def test_standard_input_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)  # what Python makes of kvctl … <&-
    with pytest.raises(SourceError, match="standard input is closed"):
        read_log("-")
