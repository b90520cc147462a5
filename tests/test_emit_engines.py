"""Emitted commands, read by the engines' own parsers.

KVCTL_VLLM_PYTHON=venv/bin/python python -m pytest -m engine tests/test_emit_engines.py -k vllm
KVCTL_LLAMA_CPP=build/bin KVCTL_SMOLLM2_GGUF=SmolLM2-135M-Instruct.Q4_1.gguf python -m pytest -m engine tests/test_emit_engines.py -k llama
KVCTL_SGLANG=folder of an unpacked wheel (with sglang/ in it) python -m pytest -m engine tests/test_emit_engines.py -k sglang
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from deployments import CASES, GIB, LLAMA_CPP, SGLANG, VLLM

from kvctl.recommend.deployment import Deployment
from kvctl.recommend.emit import Site, emit
from kvctl.recommend.emit.command import Place, command
from kvctl.recommend.emit.nodes import Node

pytestmark = pytest.mark.engine
SITE = Site("llm")
HEAD = "10.0.0.1"

# As `vllm serve` reads its words, up to the settings of the engine; the configuration itself where that needs no GPU.
CHILD = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

out = []
for words, whole in json.load(open(sys.argv[1])):
    parser = FlexibleArgumentParser()
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", *words])
    serve.validate(args)
    if getattr(args, "model_tag", None):
        args.model = args.model_tag
    engine = AsyncEngineArgs.from_cli_args(args)
    names = ("model", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "gpu_memory_utilization",
             "kv_cache_memory_bytes", "kv_cache_dtype", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
             "decode_context_parallel_size", "enable_expert_parallel", "enable_prefix_caching", "enable_chunked_prefill",
             "quantization", "kv_offloading_size", "kv_offloading_backend", "cpu_offload_gb", "speculative_config", "nnodes",
             "node_rank", "master_addr", "distributed_executor_backend", "data_parallel_backend", "enforce_eager",
             "served_model_name")
    found = {name: getattr(engine, name) for name in names} | {"headless": args.headless, "port": args.port}
    if whole:
        config = engine.create_engine_config()
        found["config"] = {"max_model_len": config.model_config.max_model_len, "bytes": config.cache_config.kv_cache_memory_bytes,
                           "seqs": config.scheduler_config.max_num_seqs, "prefix": config.cache_config.enable_prefix_caching}
    out.append(found)
json.dump(out, open(sys.argv[2], "w"), default=str)
"""


def read_by_vllm(folder: Path, commands: list[tuple[list[str], bool]]) -> list[dict[str, Any]]:
    """What vLLM's parser makes of the words after `vllm serve`."""
    python = os.environ.get("KVCTL_VLLM_PYTHON")
    if not python:
        pytest.skip("KVCTL_VLLM_PYTHON names no Python with vLLM")
    (folder / "ask.json").write_text(json.dumps(commands))
    ran = subprocess.run(
        [python, "-c", CHILD, str(folder / "ask.json"), str(folder / "answer.json")],
        capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "VLLM_NO_USAGE_STATS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer: list[dict[str, Any]] = json.loads((folder / "answer.json").read_text())
    return answer


def expected(deployment: Deployment) -> dict[str, Any]:
    """The settings as vLLM calls them, by the deployment's own numbers."""
    told = deployment.serving
    return {
        "model": deployment.model,
        "max_model_len": deployment.context,
        "max_num_seqs": told.max_sequences,
        "max_num_batched_tokens": told.max_batched,
        "block_size": told.block_size,
        "gpu_memory_utilization": told.utilization or 0.92,
        "kv_cache_memory_bytes": told.kv_budget,
        "kv_cache_dtype": deployment.kv_dtype,
        "tensor_parallel_size": told.tensor_parallel or 1,
        "pipeline_parallel_size": told.pipeline_parallel or 1,
        "data_parallel_size": told.data_parallel or 1,
        "decode_context_parallel_size": told.decode_context_parallel or 1,
        "enable_expert_parallel": told.expert_parallel,
        "enable_prefix_caching": told.prefix_caching,
        "enable_chunked_prefill": told.chunked_prefill,
        "quantization": "fp8_per_tensor" if deployment.made == "load" else None,
        "kv_offloading_size": told.offload / 2**30 if told.offload else None,
        "kv_offloading_backend": "native",
        "cpu_offload_gb": (told.cpu_offload or 0) / 2**30,
        "speculative_config": told.speculative,
        "enforce_eager": told.enforce_eager,
        "served_model_name": [deployment.base],
        "port": 8000,
    }


def test_vllm_reads_every_command(tmp_path: Path) -> None:
    """All cases, all nodes, and a file of settings: each setting arrives as the number that it is."""
    asked: list[tuple[list[str], bool]] = []
    wanted: list[dict[str, Any]] = []
    for deployment in (one for one in CASES.values() if one.engine.name == "vllm"):
        for rank in range(deployment.nodes):
            node = Node(str(rank), HEAD) if deployment.nodes > 1 else None
            asked.append((list(command(deployment, SITE, Place("127.0.0.1", node=node)).arguments), False))
            more: dict[str, Any] = {"nnodes": deployment.nodes, "headless": rank > 0}
            if deployment.nodes > 1:
                more |= {"node_rank": rank, "master_addr": HEAD, "distributed_executor_backend": "mp"}
            wanted.append(expected(deployment) | more)
        if deployment.nodes > 1:
            asked.append((list(command(deployment, SITE.replace(ray=True)).arguments), False))
            data = "ray" if (deployment.serving.data_parallel or 1) > 1 else "mp"
            wanted.append(
                expected(deployment)
                | {"distributed_executor_backend": "ray", "data_parallel_backend": data, "nnodes": 1}
            )
    full = VLLM.replace(
        serving=VLLM.serving.replace(prefix_caching=False, speculative={"method": "ngram", "num_speculative_tokens": 2})
    )
    (tmp_path / "llm.yaml").write_text(emit("config", full, SITE))
    asked.append((["--config", str(tmp_path / "llm.yaml")], False))
    wanted.append(expected(full))
    found = read_by_vllm(tmp_path, asked)
    assert len(found) == len(wanted) > 10
    for one, want in zip(found, wanted, strict=True):
        assert {name: one[name] for name in want} == want


def test_vllm_makes_a_configuration_of_it(tmp_path: Path) -> None:
    """On this machine's CPU: what vLLM itself works out from the command."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 128,
        "max_position_embeddings": 65536, "torch_dtype": "bfloat16",
    }))  # fmt: skip
    deployment = CASES["vllm-cpu"].replace(model=str(folder))
    words = [*command(deployment, SITE).arguments, "--skip-tokenizer-init"]
    [found] = read_by_vllm(tmp_path, [(words, True)])
    assert found["config"] == {"max_model_len": 32768, "bytes": 192 * 2**20, "seqs": 8, "prefix": False}


# -- sglang ---------------------------------------------------------------------------------


def read_by_sglang(folder: Path, commands: list[list[str]]) -> list[dict[str, Any]]:
    """What SGLang's parser makes of the words after its program."""
    wheel = os.environ.get("KVCTL_SGLANG")
    if not wheel:
        pytest.skip("KVCTL_SGLANG names no unpacked wheel of SGLang")
    (folder / "ask.json").write_text(json.dumps(commands))
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sglang_parser.py")), wheel, str(folder / "ask.json"), str(folder / "answer.json")],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    answer: list[dict[str, Any]] = json.loads((folder / "answer.json").read_text())
    return answer


def test_sglang_reads_every_command(tmp_path: Path) -> None:
    """All cases, all nodes, and a file of settings: SGLang takes whole gigabytes, and no bytes of the cache."""
    full = SGLANG.replace(
        serving=SGLANG.serving.replace(cpu_offload=3 * GIB // 2, swa_ratio=0.5, kv_budget=GIB, hybrid_disabled=False)
    )
    asked: list[list[str]] = []
    wanted: list[dict[str, Any]] = []
    for deployment in (*(one for one in CASES.values() if one.engine.name == "sglang"), full):
        told = deployment.serving
        want = {
            "model_path": deployment.model,
            "served_model_name": deployment.base,
            "context_length": deployment.context,
            "kv_cache_dtype": deployment.kv_dtype,
            "quantization": "fp8" if deployment.made == "load" else None,
            "tp_size": told.tensor_parallel,
            "pp_size": 1,
            "dp_size": told.data_parallel or 1,
            "enable_dp_attention": told.attention_dp,
            "ep_size": told.tensor_parallel if told.expert_parallel else 1,
            "max_running_requests": told.max_sequences,
            "chunked_prefill_size": -1 if told.chunked_prefill is False else told.max_batched,
            "mem_fraction_static": told.utilization,
            "disable_radix_cache": told.prefix_caching is False,
            "hicache_size": 100 if told.host_gb else 0,
            "enable_hierarchical_cache": bool(told.host_gb),
            "cpu_offload_gb": 2 if told.cpu_offload else 0,
            "speculative_num_draft_tokens": told.draft_tokens,
            "enable_metrics": True,
            "port": 8000,
        }
        for rank in range(deployment.nodes):
            node = Node(str(rank), HEAD) if deployment.nodes > 1 else None
            asked.append(list(command(deployment, SITE, Place("127.0.0.1", node=node)).arguments))
            many = {"nnodes": deployment.nodes, "node_rank": rank, "dist_init_addr": f"{HEAD}:20000" if node else None}
            wanted.append(want | many)
        if deployment.nodes == 1:
            file = tmp_path / f"{len(asked)}.yaml"
            file.write_text(emit("config", deployment, SITE))
            asked.append(["--config", str(file)])
            wanted.append(want)
    found = read_by_sglang(tmp_path, asked)
    assert len(found) == len(wanted) == 8
    for one, words in zip(found, wanted, strict=True):
        assert {name: one[name] for name in words} == words


# -- llama.cpp ------------------------------------------------------------------------------


def llama_server() -> str:
    folder = os.environ.get("KVCTL_LLAMA_CPP")
    found = shutil.which("llama-server", path=folder) if folder else None
    if found is None:
        pytest.skip("KVCTL_LLAMA_CPP names no folder with llama-server")
    return found


def words_of(deployment: Deployment, model: Path) -> list[str]:
    """The command with a file in place of its model."""
    options = [
        option for option in command(deployment, SITE).options if option[0] not in ("--model", "--hf-repo", "--hf-file")
    ]
    return ["--model", str(model), *(word for option in options for word in option)]


def refused(argv: list[str], env: dict[str, str] | None = None) -> str:
    """What it says when it ends, which it must."""
    ran = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60, env=env)
    assert ran.returncode != 0
    return ran.stdout + ran.stderr


@pytest.mark.parametrize("name", [name for name, one in CASES.items() if one.engine.name == "llama.cpp"])
def test_llama_cpp_reads_every_command(name: str, tmp_path: Path) -> None:
    """With a model that is not there, the model is all that is wrong."""
    server = llama_server()
    words = words_of(CASES[name], tmp_path / "no.gguf")
    said = refused([server, *words])
    assert "no.gguf" in said
    assert "argument" not in said
    assert "invalid argument" in refused([server, *words, "--no-such-option"])


@pytest.mark.parametrize("name", [name for name, one in CASES.items() if one.engine.name == "llama.cpp"])
def test_llama_cpp_reads_every_variable(name: str, tmp_path: Path) -> None:
    server = llama_server()
    lines = [line for line in emit("config", CASES[name], SITE).splitlines() if not line.startswith("#")]
    env = dict(line.split("=", 1) for line in lines if not line.startswith(("LLAMA_ARG_MODEL=", "LLAMA_ARG_HF_REPO=")))
    known = subprocess.run([server, "--help"], capture_output=True, text=True, check=True, timeout=60)
    for variable in env:
        assert f"(env: {variable})" in known.stdout + known.stderr
    said = refused([server], {**os.environ, **env, "LLAMA_ARG_MODEL": str(tmp_path / "no.gguf")})
    assert "no.gguf" in said
    assert "argument" not in said


@pytest.mark.parametrize("by", ["command", "config"])
def test_llama_cpp_gives_every_slot_its_context(by: str, tmp_path: Path) -> None:
    """Four slots of 4,096 tokens each, which -c names together; the cache is that of the rules for q8_0 and q5_1."""
    server, gguf = llama_server(), os.environ.get("KVCTL_SMOLLM2_GGUF")
    if not gguf:
        pytest.skip("KVCTL_SMOLLM2_GGUF names no model")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    site = SITE.replace(port=port)
    deployment = LLAMA_CPP.replace(model=str(Path(gguf).resolve()))
    argv, env = [server, *command(deployment, site).arguments], dict(os.environ)
    if by == "config":
        lines = [line for line in emit("config", deployment, site).splitlines() if not line.startswith("#")]
        argv, env = [server], env | dict(line.split("=", 1) for line in lines)
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*argv, "-lv", "4", "-t", "1"], stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    try:
        slots = wait_for(f"http://127.0.0.1:{port}/slots", process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert [slot["n_ctx"] for slot in slots] == [4096] * 4
    # 30 layers, 4 × 4,096 cells of 192 elements: 34 bytes for 32 of K, 24 for 32 of V, 6 blocks each.
    k, v = (30 * 4 * 4096 * 6 * block / 2**20 for block in (34, 24))
    assert f"size =  {k + v:.2f} MiB" in log.read_text(errors="replace")


def wait_for(url: str, process: subprocess.Popen[bytes]) -> Any:
    """The JSON there, once it is there."""
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            return json.loads(answer.read())
        time.sleep(0.3)
    return pytest.fail("it does not answer")
