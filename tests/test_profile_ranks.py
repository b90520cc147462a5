"""Profiles over several ranks and devices: what each holds, and what happens when one is lost.

tests/data/transformers_ranks.json has the caches of two ranks as scripts/capture_transformers_ranks.py walked them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from conftest import DATA, measured_cases

from kvctl.allocation import Serving
from kvctl.engines import TRANSFORMERS
from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.formats import model_dtype
from kvctl.measure.load import Wanted
from kvctl.measure.points import Asked
from kvctl.measure.ranks import profile_ranks
from kvctl.measure.report import Point, ProfileReport
from kvctl.measure.run import Now, ProfilePlan, Progress
from kvctl.model import build_spec
from kvctl.size import SizePlan, size
from kvctl.sources import Found
from kvctl.spec import ModelSpec, Provenance

MEASURED: dict[str, Any] = json.loads((DATA / "transformers_ranks.json").read_text())

# hidden 64, 4 query heads and 2 KV heads of 16
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    "max_position_embeddings": 4096, "torch_dtype": "float32",
}  # fmt: skip
ROW = 3 * 2 * 2 * 16 * 4
"""Bytes of a token of it in float32: 3 layers, keys and values, 2 heads of 16, 4 bytes."""


@cache
def configs() -> dict[str, Any]:
    return {case["name"]: case["config"] for case in measured_cases("transformers.jsonl")}


def spec_of(config: dict[str, Any], folder: str = "model") -> ModelSpec:
    return build_spec(Found("model", config, Provenance("local", folder)))


def on_ranks(config: dict[str, Any], ranks: int, tokens: int, batch: int = 1, encoder: int | None = None) -> Any:
    asked = SizePlan(TRANSFORMERS, sequences=batch, dtype=model_dtype("float32"), encoder_tokens=encoder,
                     serving=Serving(tensor_parallel=ranks))  # fmt: skip
    return size(spec_of(config), tokens, asked).allocation


# -- predicted against measured -----------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(MEASURED["bytes"]))
def test_what_each_rank_holds_is_predicted(name: str) -> None:
    found = on_ranks(configs()[name], 2, MEASURED["tokens"], MEASURED["batch"], MEASURED["encoder"].get(name))
    assert [row.reserved_bytes for row in found.per_rank] == MEASURED["bytes"][name]


@pytest.mark.parametrize("name", sorted(MEASURED["errors"]))
def test_what_does_not_run_is_refused(name: str) -> None:
    if "No module named" in MEASURED["errors"][name]:
        pytest.skip("its packages were not there when it was measured")
    with pytest.raises(KvctlError):
        on_ranks(configs()[name], 2, MEASURED["tokens"], MEASURED["batch"], 17)


def test_by_hand() -> None:
    # Of 2 KV heads each of 2 ranks holds one; 100 tokens of 3 sequences.
    assert on_ranks(LLAMA, 2, 100, 3).reserved_bytes == 100 * 3 * ROW // 2
    # phi3's plan gathers what its fused projection gives: both ranks hold all of it.
    phi3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    assert on_ranks(phi3, 2, 100).reserved_bytes == 100 * ROW
    assert "whole cache" in on_ranks(phi3, 2, 100).reasons[0]


def test_refusals_name_what_is_missing() -> None:
    with pytest.raises(UsageError, match="does not divide the 2 KV heads"):
        on_ranks(LLAMA, 4, 100)
    bloom = {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4}
    with pytest.raises(ConfigError, match="no tensor-parallel plan for bloom"):
        on_ranks(bloom, 2, 100)


# -- options ------------------------------------------------------------------------------------------


def plan(config: dict[str, Any] | ModelSpec = LLAMA, contexts: tuple[int, ...] = (32, 64, 96), batch: int = 1,
         **wanted: Any) -> ProfilePlan:  # fmt: skip
    spec = config if isinstance(config, ModelSpec) else spec_of(config)
    told = Wanted(**({"random": True, "dtype": model_dtype("float32")} | wanted))
    return ProfilePlan(spec, told, Asked(contexts, (batch,), 4, None, 2), limits=False)


def run(
    asked: ProfilePlan, done: Callable[[Point], None] = lambda point: None, nproc: int = 2, **more: Any
) -> ProfileReport:
    return profile_ranks(asked, Progress(Now(), done), nproc=nproc, **more)


@pytest.mark.parametrize(
    ("wanted", "more", "match"),
    [
        ({}, {"nproc": 1}, "two or more ranks"),
        ({"device": "mps"}, {}, "runs on cpu or cuda"),
        ({"device": "cuda:1"}, {}, "runs on cpu or cuda"),
        ({"device_map": "auto"}, {}, "whole layers"),
        ({}, {"rdzv_endpoint": "a:1"}, "several nodes"),
        ({}, {"nnodes": 2}, "--rdzv-endpoint HOST:PORT"),
        ({}, {"nnodes": 2, "rdzv_endpoint": "host"}, "--rdzv-endpoint HOST:PORT"),
        ({}, {"nnodes": 2, "node_rank": 2, "rdzv_endpoint": "host:1"}, "out of range"),
        ({}, {"nproc": 4}, "does not divide the 2 KV heads"),
    ],
)
def test_options_that_do_not_go_together(wanted: dict[str, Any], more: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        run(plan(**wanted), **more)


# -- real ranks ---------------------------------------------------------------------------------------


def need_engine() -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if not transformers.__version__.startswith("5.24"):
        pytest.skip(f"the rules are those of transformers 5.24, not {transformers.__version__}")


def children() -> list[Any]:
    psutil = pytest.importorskip("psutil")
    return sorted(
        (child for child in psutil.Process().children() if "rank_worker" in " ".join(child.cmdline())),
        key=lambda child: child.create_time(),
    )


@pytest.mark.engine
def test_two_ranks_hold_half_each() -> None:
    need_engine()
    report = run(plan(contexts=(32,), batch=3))
    (point,) = report.points
    # 32 tokens after prefill, 36 after 4 steps; half of it on each of 2 ranks.
    rows = [(row.phase, row.rank, row.logical_bytes, row.predicted_bytes) for row in point.cache]
    held = {"prefill": 32 * 3 * ROW // 2, "decode": 36 * 3 * ROW // 2}
    assert rows == [(phase, rank, held[phase], held[phase]) for phase in held for rank in (0, 1)]
    assert point.ttft is not None
    assert (report.ranks, report.agrees, len(point.ttft.values)) == (2, True, 2)
    assert [row["rank"] for row in report.settings["ranks"]] == [0, 1]
    # All but the norms is cut: 3 layers and the last one have 64 numbers each, twice in a layer.
    whole = 2 * 128 * 64 + 3 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)
    norms = (2 * 3 + 1) * 64
    least = 4 * (whole // 2 + norms)
    assert all(least <= row["weights_bytes"] < 1.5 * least for row in report.settings["ranks"])
    assert all(row["peak_bytes"] > 2**26 for row in report.settings["ranks"])
    assert not children()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 7])
def test_weights_from_a_folder(tmp_path: Path, chunk: int | None) -> None:
    need_engine()
    from kvctl.measure.load import load

    dtype = model_dtype("float32")
    assert not isinstance(dtype, str)
    load(spec_of(LLAMA), Wanted(random=True), dtype).model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    asked = plan(spec_of(config, str(tmp_path)), contexts=(32,), random=False)
    report = run(asked.replace(asked=asked.asked.replace(prefill_chunk=chunk)))
    assert report.agrees
    assert [row.logical_bytes for row in report.points[0].held] == [36 * ROW // 2] * 2


@pytest.mark.engine
@pytest.mark.slow
def test_a_sample_of_the_measured_ranks_is_still_so(tmp_path: Path) -> None:
    need_engine()
    path = Path(__file__).parent.parent / "scripts" / "capture_transformers_ranks.py"
    found = importlib.util.spec_from_file_location("capture_transformers_ranks", path)
    assert found is not None
    assert found.loader is not None
    script = importlib.util.module_from_spec(found)
    found.loader.exec_module(script)
    phi3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0}
    gemma3 = LLAMA | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 8}
    bloom = {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4}
    wanted = {"llama": LLAMA, "phi3": phi3, "gemma3": gemma3, "bloom": bloom}
    measured = script.measure(wanted)
    assert "no tensor-parallel plan" in measured.pop("bloom")[0]["error"]
    for name, rows in measured.items():
        want = on_ranks(wanted[name], 2, script.PROMPT + script.STEPS, script.BATCH).reserved_bytes
        assert [row.get("bytes", row) for row in rows] == [want, want], name


@pytest.mark.engine
def test_a_killed_rank_is_named_and_what_was_measured_stays() -> None:
    need_engine()

    def done(point: Point) -> None:
        os.kill(children()[1].pid, signal.SIGKILL)

    report = run(plan(), done)
    assert [len(point.cache) for point in report.points] == [4, 0, 0]
    assert str(report.points[1].error).startswith("rank 1 of 2 was killed (SIGKILL")
    assert report.points[2].error == "not tried: the ranks had ended"
    assert report.warnings[-1] == report.points[1].error
    assert not children()


@pytest.mark.engine
def test_interrupted() -> None:
    need_engine()

    def done(point: Point) -> None:
        raise KeyboardInterrupt

    report = run(plan(), done)
    assert (report.interrupted, len(report.points), report.settings["attention"]) == (True, 1, "sdpa")
    assert not children()


@pytest.mark.engine
@pytest.mark.slow
def test_a_rank_without_memory_is_named() -> None:
    need_engine()
    psutil = pytest.importorskip("psutil")
    if not hasattr(psutil, "RLIMIT_AS"):
        pytest.skip("no limits for other processes here")

    def done(point: Point) -> None:
        child = children()[1]
        limit = child.memory_info().vms + 2**26
        child.rlimit(psutil.RLIMIT_AS, (limit, limit))

    # Keys of 2,000 tokens of 256 sequences: 2000 · 256 · 16 · 4 B = 33 MB a layer on each rank.
    report = run(plan(contexts=(32, 2000, 2500), batch=256), done)
    assert str(report.points[1].error).startswith("rank 1 of 2: out of memory")
    assert len(report.points) == 3
    assert not children()


@pytest.mark.engine
@pytest.mark.slow
def test_ranks_go_when_their_parent_is_killed(tmp_path: Path) -> None:
    need_engine()
    psutil = pytest.importorskip("psutil")
    import subprocess
    import sys

    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, psutil, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import test_profile_ranks as t\n"
        "def done(point):\n"
        "    print(json.dumps([child.pid for child in t.children()]), flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "t.run(t.plan(), done)\n"
    )
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert out.returncode == -signal.SIGKILL, out.stderr
    ranks = json.loads(out.stdout)
    assert len(ranks) == 2
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(psutil.pid_exists(pid) for pid in ranks)


# -- several nodes ------------------------------------------------------------------------------------


def endpoint() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.engine
@pytest.mark.slow
def test_a_node_that_never_comes() -> None:
    need_engine()
    with pytest.raises(KvctlError, match="only 1 of 2 ranks came within 3 s"):
        run(plan(), nproc=1, nnodes=2, rdzv_endpoint=endpoint(), meeting_s=3)
    with pytest.raises(KvctlError, match="the first node does not answer at 127"):
        run(plan(), nproc=1, nnodes=2, node_rank=1, rdzv_endpoint=endpoint(), meeting_s=3)
    assert not children()


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("alike", [True, False])
def test_two_nodes(alike: bool) -> None:
    need_engine()
    where, found = endpoint(), {}

    def node(number: int) -> None:
        asked = plan(contexts=(32,) if alike or number else (32, 64))
        try:
            found[number] = run(asked, nproc=1, nnodes=2, node_rank=number, rdzv_endpoint=where, meeting_s=120)
        except KvctlError as error:
            found[number] = error

    threads = [threading.Thread(target=node, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for report in found.values():
        if alike:
            assert [row.logical_bytes for row in report.points[0].held] == [36 * ROW // 2] * 2
            assert (report.ranks, report.settings["nodes"]) == (2, 2)
        else:
            assert "different models or options" in report.message


# -- layers on several devices ------------------------------------------------------------------------


@pytest.mark.engine
def test_layers_that_wait_on_the_disk(tmp_path: Path) -> None:
    need_engine()
    pytest.importorskip("accelerate")
    import torch

    from kvctl.measure.load import load
    from kvctl.measure.passes import Passes, random_ids
    from kvctl.measure.run import profile

    dtype = model_dtype("float32")
    assert not isinstance(dtype, str)
    whole = load(spec_of(LLAMA), Wanted(random=True), dtype)
    whole.model.save_pretrained(tmp_path)
    spec = spec_of(json.loads((tmp_path / "config.json").read_text()), str(tmp_path))
    placed = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0"), "cpu")
    placed |= dict.fromkeys(("model.layers.1", "model.layers.2"), "disk")
    split = load(spec, Wanted(device_map=placed), dtype)
    assert (split.device, split.devices, split.weights_bytes) == ("cpu", ("cpu",), whole.weights_bytes)
    assert any("brought at every pass" in note for note in split.notes)
    ids = random_ids(128, 2, 20, 0)
    with torch.inference_mode():
        seen = []
        for model in (whole.model, split.model):
            passes = Passes(model, "cpu")
            passes.begin(2)
            seen.append(passes.prefill(ids))
    assert torch.allclose(*seen, atol=1e-5)
    report = profile(
        plan(spec, contexts=(32,), random=False, device_map=placed).replace(limits=True), Progress(Now(), print)
    )
    assert report.agrees
    assert report.points[0].held[0].logical_bytes == 36 * ROW
    assert report.points[0].work is None  # reads of what is brought cannot be told from others


@pytest.mark.engine
@pytest.mark.parametrize("random", [True, False])
def test_a_device_map_of_one_device(tmp_path: Path, random: bool) -> None:
    need_engine()
    pytest.importorskip("accelerate")
    from kvctl.measure.load import load

    dtype = model_dtype("float32")
    assert not isinstance(dtype, str)
    model = load(spec_of(LLAMA), Wanted(random=True, device_map="auto"), dtype)
    if not random:
        model.model.save_pretrained(tmp_path)
        spec = spec_of(json.loads((tmp_path / "config.json").read_text()), str(tmp_path))
        model = load(spec, Wanted(device_map={"": "cpu"}), dtype)
    assert (model.device, model.devices, model.notes) == ("cpu", ("cpu",), ())


@pytest.mark.engine
def test_where_modules_run() -> None:
    need_engine()
    torch = pytest.importorskip("torch")
    from types import SimpleNamespace

    from kvctl.measure.devices import input_device, name_of, place_of, spread, used
    from kvctl.measure.load import load

    placed = {"model.layers.1": "cuda:1", "model.layers.10": "cuda:2", "model": "cuda:0", "lm_head": "cpu"}
    names = ("model.layers.1.mlp.weight", "model.layers.10.mlp.weight", "model.norm.weight", "lm_head.weight")
    assert [place_of(placed, name) for name in names] == ["cuda:1", "cuda:2", "cuda:0", "cpu"]
    assert [name_of(device) for device in (1, "cpu", torch.device("cuda", 2))] == ["cuda:1", "cpu", "cuda:2"]
    dtype = model_dtype("float32")
    assert not isinstance(dtype, str)
    model = load(spec_of(LLAMA), Wanted(random=True), dtype).model
    # Weights that wait (on meta) run where accelerate's hook says; AlignDevicesHook names it so.
    model.model.layers[0].mlp.up_proj.to("meta")._hf_hook = SimpleNamespace(execution_device=1)
    assert used(model, "none") == ("cpu", "cuda:1")
    model.get_input_embeddings().to("meta")._hf_hook = SimpleNamespace(hooks=[SimpleNamespace(execution_device=0)])
    assert input_device(model, "none") == "cuda:0"
    with torch.device("meta"):
        fresh = type(model)._from_config(model.config, dtype=torch.float32)
    assert set(spread(fresh).values()) <= {"cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))}


def test_a_rank_that_ended_before_it_was_read_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it said last waits in the pipe when its end is seen."""
    from kvctl.measure import ranks
    from kvctl.measure.rank_messages import FRAME, Done

    said = pickle.dumps(Done(("a note",)))
    script = f"import sys; sys.stdout.buffer.write({FRAME.pack(len(said)) + said!r})"
    popen = subprocess.Popen

    def ended(_: list[str], **pipes: Any) -> subprocess.Popen[bytes]:
        process = popen([sys.executable, "-c", script], **pipes)
        process.wait()
        return process

    monkeypatch.setattr(ranks.subprocess, "Popen", ended)
    read = os.read
    monkeypatch.setattr(ranks.os, "read", lambda file, most: read(file, min(most, 16)))  # as of a slow pipe
    spec = spec_of(LLAMA)
    plan = ProfilePlan(spec, Wanted(random=True), Asked((16,)))
    report = profile_ranks(plan, Progress(Now(), lambda _: None), nproc=2)
    assert report.notes[:1] == ("a note",)
    assert report.warnings == ()
