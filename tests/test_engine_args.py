"""`--engine-args`: command lines as people paste them. What a flag means is vLLM's, llama.cpp's and SGLang's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Outcome

from kvctl.engines import commandline
from kvctl.errors import UsageError

Run = Callable[..., Outcome]


def settings(text: str, engine: str | None = None) -> tuple[str, str | None, str | None, dict[str, object]]:
    """Engine, version, model and everything else that was read."""
    started = commandline.read(text, engine)
    flags = {item.flag.field: item.value for item in started.flags}
    return started.engine, started.version, started.model, {**started.common, **flags}


VLLM = ("vllm", None, "Qwen/Qwen3-32B", {"context": "32768", "tensor_parallel": 4})


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 4 --max-model-len 32768",
        "vllm serve --max-model-len=32768 -tp 4 --enforce-eager Qwen/Qwen3-32B",
        "vllm serve Qwen/Qwen3-32B \\\n  --tensor_parallel_size 4 \\\n  --max-model-len 32768 --port 8000",
        "$ vllm serve Qwen/Qwen3-32B -tp 4 --max-model-len 32768",
        "python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-32B -tp 4 --max-model-len 32768",
        "CUDA_VISIBLE_DEVICES=0,1,2,3 nohup vllm serve Qwen/Qwen3-32B -tp 4 --max-model-len 32768 > log.txt 2>&1 &",
        "cd /srv && source venv/bin/activate && vllm serve Qwen/Qwen3-32B -tp 4 --max-model-len 32768 | tee log",
        "docker run --gpus all -v ~/hf:/root/.cache -p 8000:8000 --ipc=host vllm/vllm-openai:latest "
        "--model Qwen/Qwen3-32B --tensor-parallel-size 4 --max-model-len 32768",
        "uv run vllm serve Qwen/Qwen3-32B -tp 4 --max-model-len 32768 --api-key sk-secret",
        'bash -c "exec vllm serve Qwen/Qwen3-32B -tp 4 --max-model-len 32768"',
        "vllm serve Qwen/Qwen3-32B -tp 4 --max-model-len 32768 --limit-mm-per-prompt '{\"image\": 2}' -O3",
    ],
)
def test_one_server_in_many_clothes(text: str) -> None:
    assert settings(text) == VLLM


KUBERNETES = """
apiVersion: apps/v1
kind: Deployment
spec:
  template:
    spec:
      initContainers:
      - name: wait
        image: busybox
        command: ["sleep", "1"]
      containers:
      - name: server
        image: vllm/vllm-openai:v0.11.0
        args:
        - --model
        - Qwen/Qwen3-32B
        - "--tensor-parallel-size=4"
        - --max-model-len
        - 32768
"""


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (KUBERNETES, "0.11.0"),
        ('args: ["--model", "Qwen/Qwen3-32B", "-tp", "4", "--max-model-len", "32768"]\nimage: vllm/vllm-openai:v0.19.1', "0.19.1"),
        ('["vllm", "serve", "Qwen/Qwen3-32B", "-tp", "4", "--max-model-len", "32768"]', None),
        ("- vllm\n- serve\n- Qwen/Qwen3-32B\n- --tensor-parallel-size=4\n- --max-model-len=32768", None),
        ('command: ["/bin/sh", "-c"]\nargs:\n- |\n  vllm serve Qwen/Qwen3-32B -tp 4 \\\n    --max-model-len 32768\n', None),
    ],
)  # fmt: skip
def test_kubernetes(text: str, version: str | None) -> None:
    assert settings(text) == (VLLM[0], version, *VLLM[2:])


def test_llama_cpp() -> None:
    text = "llama-server -m ./Qwen3-8B-Q4_K_M.gguf -c 32768 -np 4 -ctk q8_0 -ctv q8_0 -fa -ngl 99 --jinja"
    expected = {"context": "32768", "slots": 4, "k_dtype": "q8_0", "v_dtype": "q8_0", "flash_attention": True}
    assert settings(text) == ("llama.cpp", None, "./Qwen3-8B-Q4_K_M.gguf", expected)
    docker = (
        "docker run -e LLAMA_ARG_CTX_SIZE=8192 -e LLAMA_ARG_N_PARALLEL=2 -p 8080:8080 "
        "ghcr.io/ggml-org/llama.cpp:server-cuda-b6123 -hf ggml-org/gemma-3-4b-it-GGUF:Q8_0 --ctx-size 16384"
    )
    assert settings(docker) == (
        "llama.cpp", "b6123", "ggml-org/gemma-3-4b-it-GGUF:Q8_0", {"context": "16384", "slots": 2},
    )  # fmt: skip
    assert settings("LLAMA_ARG_SWA_FULL=1 llama-server -hf a/b")[3] == {"swa_full": True}


def test_sglang_and_flags_alone() -> None:
    assert settings("python -m sglang.launch_server --model-path Qwen/Qwen3-32B --context-length 32768")[:3] == (
        "sglang", None, "Qwen/Qwen3-32B",
    )  # fmt: skip
    assert settings("--tensor-parallel-size 4 --enable-prefix-caching", "vllm")[3] == {
        "tensor_parallel": 4, "prefix_caching": True,
    }  # fmt: skip
    assert settings("vllm serve m --no-enable-prefix-caching")[3] == {"prefix_caching": False}


def test_numbers_are_the_engines_own(kvctl: Run) -> None:
    """vLLM's human_readable_int: k is 1,000, K is 1,024; 20G is 20 · 2^30."""
    outcome = kvctl("size", "--json", "--engine-args", "vllm serve Qwen/Qwen3-32B --max-model-len 32k --kv-cache-memory-bytes 20G")  # fmt: skip
    result = outcome.json["results"][0]
    assert result["context"] == 32_000
    assert result["allocation"]["kv_budget_bytes"] == 20 * 2**30
    # 64 layers · 8 heads · 256 · 2 B · 16 tokens
    assert result["allocation"]["num_blocks"] == 20 * 2**30 // (64 * 8 * 256 * 2 * 16)


def test_length_is_the_models_own_without_one(kvctl: Run) -> None:
    result = kvctl("size", "--json", "--engine-args", "vllm serve Qwen/Qwen3-32B").json["results"]
    assert [row["context"] for row in result] == [40_960]


def test_what_kvctl_is_told_wins(kvctl: Run) -> None:
    outcome = kvctl(
        "size", "Qwen3-8B", "--ctx", "4k", "-tp", "1", "--json",
        "--engine-args", "vllm serve /models/x -tp 8 --max-model-len 32768 --dtype float16",
    )  # fmt: skip
    result = outcome.json["results"][0]
    assert (result["model"]["id"], result["context"], result["dtype"]) == ("Qwen/Qwen3-8B", 4096, "fp16")
    assert result["allocation"]["tensor_parallel_size"] == 1


def test_versions_come_from_the_image(kvctl: Run) -> None:
    text = "docker run vllm/vllm-openai:{} --model google/gemma-3-27b-it --max-model-len 131072"
    old = kvctl("size", "--json", "--kv-budget", "18.76GiB", "--engine-args", text.format("v0.11.0")).json["results"][0]
    # Worked example: 15,371 blocks over 7 groups of 16 tokens.
    assert old["engine"]["version"] == "0.11.0"
    assert old["allocation"]["reported_capacity"] == 15_369 // 7 * 16
    new = kvctl("size", "--json", "--engine-args", text.format("v9.1"))
    assert "newest rules" in new.err


def test_what_ifs_of_the_engine(kvctl: Run) -> None:
    override = json.dumps({"max_position_embeddings": 65536, "rope_scaling": {"factor": 2}, "num_key_value_heads": 4})
    text = f"vllm serve Qwen/Qwen3-8B --hf-overrides '{override}'"
    result = kvctl("size", "--json", "--engine-args", text).json["results"][0]
    assert (result["context"], result["kv_bytes_per_token"]) == (65_536, 36 * 2 * 4 * 128 * 2)


@pytest.mark.parametrize(
    ("text", "engine", "words"),
    [
        ("", None, "empty"),
        ("echo hello", None, "no engine's command"),
        ("vllm serve 'x", None, "quotation mark"),
        ("vllm serve m --tensor-paralel-size 4", None, "no flag --tensor-paralel-size"),
        ("vllm serve m --tensor-parallel-size $TP", None, "a shell would replace"),
        ("vllm serve m --tensor-parallel-size", None, "has no value"),
        ("vllm serve m --tensor-parallel-size four", None, "not a whole number"),
        ("vllm serve m --hf-overrides [1]", None, "no JSON object"),
        ("vllm serve m --max-model-len 1.5K", None, "no number that vllm reads"),
        ("llama-server -c 4096", "vllm", "starts llama.cpp, and --engine says vllm"),
        ("--ctx 4", "ideal", "no command line of its own"),
        ("args: [", None, "no valid YAML"),
        ("[" * 100_000, None, "no valid YAML"),
        ("x" * 300_000, None, "too long"),
        ("kind: Pod\nspec: {containers: [{image: busybox, args: [a]}]}\n---\nkind: Pod\napiVersion: v1", None, "no engine's command"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused(kvctl: Run, text: str, engine: str | None, words: str) -> None:
    arguments = ["--engine", engine] if engine else []
    outcome = kvctl("size", "Qwen3-8B", "--engine-args", text, *arguments)
    assert outcome.code == 2
    assert words in outcome.err
    assert "Traceback" not in outcome.err


def test_flags_that_no_engine_has_are_said(kvctl: Run) -> None:
    outcome = kvctl("size", "--engine-args", "vllm serve Qwen/Qwen3-8B --frobnicate 3 --max-model-len 4096")
    assert outcome.code == 0
    assert "--frobnicate is no flag of vllm" in outcome.err


def test_secrets_are_not_repeated() -> None:
    with pytest.raises(UsageError) as error:
        commandline.read("vllm serve m --api-key sk-secret --tensor-paralel-size 4")
    assert "sk-secret" not in f"{error.value.message} {error.value.hint}"


def test_configuration_files_are_read_where_they_are(kvctl: Run, tmp_path: Path) -> None:
    served = tmp_path / "serve.yaml"
    served.write_text("model: Qwen/Qwen3-8B\ntensor-parallel-size: 4\nmax_model_len: 8192\nenforce-eager: true\n")
    text = f"vllm serve --config {served} --tensor-parallel-size 2"
    assert settings(text) == ("vllm", None, "Qwen/Qwen3-8B", {"context": "8192", "tensor_parallel": 2})
    options = tmp_path / "options.yaml"
    options.write_text("enable_attention_dp: true\nkv_cache_config:\n  tokens_per_block: 64\n  dtype: fp8\n"
                       "  max_attention_window: [512, 32768]\nprint_iter_log: true\n")  # fmt: skip
    text = f"trtllm-serve Qwen/Qwen3-8B --tp_size 2 --extra_llm_api_options {options}"
    assert settings(text)[3] == {
        "kv_dtype": "fp8", "tensor_parallel": 2, "block_size": 64, "attention_dp": True, "attention_windows": (512, 32768),
    }  # fmt: skip
    missing = kvctl("size", "--engine-args", "vllm serve Qwen/Qwen3-8B --config /nowhere/x.yaml --max-model-len 4096")
    assert missing.code == 0
    assert "no such file here" in missing.err
    served.write_text("- 1")
    assert kvctl("size", "Qwen3-8B", "--engine-args", f"vllm serve --config {served}").code == 2


def test_what_changes_the_cache_and_is_not_counted_is_named(kvctl: Run) -> None:
    command = "vllm serve gpt-oss-20b --kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0 1 --max-model-len 8192"
    outcome = kvctl("size", "--engine-args", command)
    assert outcome.code == 0
    assert "--kv-cache-dtype-skip-layers changes what the cache takes, and kvctl does not count it" in outcome.err
