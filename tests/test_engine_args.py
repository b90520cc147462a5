"""`--engine-args`: command lines as people paste them. What a flag means is vLLM's, llama.cpp's and SGLang's own."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    assert without_graphs(text) == VLLM


def without_graphs(text: str) -> tuple[Any, ...]:
    """Settings but for --enforce-eager, which some of these texts have beside."""
    *rest, found = settings(text)
    return (*rest, {name: value for name, value in found.items() if name != "enforce_eager"})


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


SETTINGS = {"context": "8192", "tensor_parallel": 2}
VLLM_8K = ("vllm", None, "Qwen/Qwen3-8B", SETTINGS)


@pytest.mark.parametrize(
    "text",
    [
        # comments, also with a flag in them, and what stands before and after the command
        "vllm serve Qwen/Qwen3-8B \\\n  -tp 2 \\\n  # don't use --max-model-len 65536\n  --max-model-len 8192 # enough",
        "# start it\nexport HF_HOME=/x\nvllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 8192\ncurl -d '{}' http://h/v1/models",
        "# vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 8192",
        "root@h:/workspace# vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 8192",
        "```bash\nvllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 8192\n```",
        "vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 8192 \\",
        "vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 8192 &\nvllm bench serve --model other --max-model-len 1",
        "vllm serve Qwen/Qwen3-8B\n  -tp 2\n  --max-model-len 8192\n",
        "for n in 1; do\n  vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 8192\ndone",
        "cat > run.sh <<'EOF'\nvllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 8192\nEOF",
        # what a web page made of quotation marks and dashes
        "vllm serve “Qwen/Qwen3-8B” –-max-model-len 8192 —tensor-parallel-size 2",
        # variables that the text itself sets
        "MODEL=Qwen/Qwen3-8B\nTP=2\nvllm serve $MODEL -tp ${TP} --max-model-len ${CTX:-8192}",
        'ARGS="-tp 2 --max-model-len 8192"; vllm serve Qwen/Qwen3-8B $ARGS',
        'args=(\n  -tp 2  # two\n  --max-model-len 8192\n)\nvllm serve Qwen/Qwen3-8B "${args[@]}"',
        "export MODEL=Qwen/Qwen3-8B \\\nVLLM_X=spawn \\\n#VLLM_DEBUG=1 \\\nuv run vllm serve $MODEL -tp 2 --max-model-len 8192",
        'MODEL=${NAME:-"Qwen/Qwen3-8B"}\nTP="${TP:-2}"\nvllm serve "$MODEL" -tp "$TP" --max-model-len 8192',
        "MODEL := Qwen/Qwen3-8B\n\nserve:\n\tvllm serve $(MODEL) -tp 2 \\\n\t\t--max-model-len 8192\n\nstop:\n\tdocker stop x",
        "cat <<'EOF' | tee /etc/v.yaml\nmodel: Qwen/Qwen3-8B\nmax-model-len: 8192\nEOF\nvllm serve --config /etc/v.yaml -tp 2",
        # argparse takes a flag's start
        "vllm serve Qwen/Qwen3-8B --tensor-par 2 --max_model_l=8192 --served-model q",
        'VLLM="vllm serve"\nOPTIONS="-tp 2 --max-model-len 8192"\n$VLLM Qwen/Qwen3-8B $OPTIONS',
        "[me@h ~]$ ps aux | grep vllm\nme 789 1.0 5339 pts/0 Sl+ 0:26 /usr/bin/python3 /usr/bin/vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 8192",
        # shells in shells
        'docker exec -it node bash -c "export X=1 && vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 8192"',
        'tmux new-session -d -s v "vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 8192 2>&1 | tee log"',
        "srun -N1 bash -lc 'vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 8192'",
        "apptainer exec --nv vllm.sif vllm serve Qwen/Qwen3-8B -tp 2 --max-model-len 8192",
        # other places
        'ENTRYPOINT ["vllm", "serve"]\nCMD ["Qwen/Qwen3-8B", "-tp", "2", "--max-model-len", "8192"]',
        'p = subprocess.Popen(["vllm", "serve", "Qwen/Qwen3-8B", "-tp", "2", "--max-model-len", "8192"])',
        'import modal\nNAME = "Qwen/Qwen3-8B"\nGPUS = 2\n\ndef serve():\n    cmd = ["vllm", "serve", NAME, "--port", str(port)]  # now\n'
        '    cmd += ["-tp", str(GPUS)]\n    cmd.extend(["--max-model-len", "8192"])\n    subprocess.Popen(" ".join(cmd), shell=True)',
        "[Service]\nExecStart=/opt/venv/bin/vllm serve Qwen/Qwen3-8B \\\n  -tp 2 --max-model-len ${LEN}\nEnvironment=LEN=8192",
        "llm = LLM(model='Qwen/Qwen3-8B', tensor_parallel_size=2, max_model_len=8192, enforce_eager=True)",
        "[api_utils.py:273] non-default args: {'model_tag': 'Qwen/Qwen3-8B', 'model': 'Qwen/Qwen3-8B', 'max_model_len': 8192, "
        "'attention_config': AttentionConfig(backend=None), 'tensor_parallel_size': 2}",
        "args: Namespace(subparser='serve', model_tag='Qwen/Qwen3-8B', config='', lora_modules=None, middleware=[], "
        "config_format=<ConfigFormat.AUTO: 'auto'>, tensor_parallel_size=2, max_model_len=8192, dispatch=<function f at 0x7f>)",
        "[program:v]\ncommand=/opt/bin/vllm serve Qwen/Qwen3-8B -tp 2\n  --max-model-len %(ENV)s --max-model-len 8192\nautostart=true",
        "model: Qwen/Qwen3-8B\nmax-model-len: 8192\ntensor_parallel_size: 2\nenforce-eager: true",
        "applications:\n- args:\n    llm_configs:\n    - model_loading_config: {model_id: q, model_source: Qwen/Qwen3-8B}\n"
        "      engine_kwargs: {tensor_parallel_size: 2, max_model_len: 8192}",
    ],
)
def test_places_that_commands_are_pasted_from(text: str) -> None:
    assert without_graphs(text) == VLLM_8K


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("PS C:\\Users\\me> .\\llama-server.exe -m .\\models\\q.gguf -c 4096 -np 2", (".\\models\\q.gguf", {"context": "4096", "slots": 2})),
        ('& "C:\\Program Files\\llama\\llama-server.exe" -m C:\\m\\q.gguf `\n  -c 4096 `\n  -np 2', ("C:\\m\\q.gguf", {"context": "4096", "slots": 2})),
        ("@echo off\nset LLAMA_ARG_CTX_SIZE=4096\nllama-server.exe ^\n  -m q.gguf ^\n  -np 2\npause", ("q.gguf", {"context": "4096", "slots": 2})),
        ('$env:LLAMA_ARG_CTX_SIZE = "4096"; .\\llama-server -m q.gguf -np 2', ("q.gguf", {"context": "4096", "slots": 2})),
        ('[Service]\nEnvironment="LLAMA_ARG_CTX_SIZE=4096" LLAMA_ARG_N_PARALLEL=2\nExecStart=/usr/bin/llama-server -m q.gguf', ("q.gguf", {"context": "4096", "slots": 2})),
        ("services:\n  l:\n    image: ghcr.io/ggml-org/llama.cpp:server\n    environment:\n      LLAMA_ARG_MODEL: q.gguf\n"
         "      LLAMA_ARG_CTX_SIZE: 4096\n      LLAMA_ARG_N_PARALLEL: 2", ("q.gguf", {"context": "4096", "slots": 2})),
        ("models:\n  q:\n    cmd: |\n      /app/llama-server --port ${PORT}\n      -m q.gguf\n      -c 4096 -np 2", ("q.gguf", {"context": "4096", "slots": 2})),
        ('@echo off\nset MODEL=m\\q.gguf\nset CTX=4096\ncd /d "%~dp0"\nbin\\llama-server.exe -m %MODEL% --ctx-size %CTX% -np 2\npause',
         ("m\\q.gguf", {"context": "4096", "slots": 2})),
        ('start "llama-server" cmd /k "llama-server.exe --model q.gguf --ctx-size 4096 -np 2"', ("q.gguf", {"context": "4096", "slots": 2})),
        # one conversation, not the slots of a server
        ("./build/bin/llama-cli -m q.gguf -c 4096 -p 'how does vllm serve x do it?'", ("q.gguf", {"context": "4096", "slots": 1})),
        ("llama-mtmd-cli -m q.gguf --mmproj p.gguf -c 4096", ("q.gguf", {"context": "4096", "slots": 1})),
    ],
)  # fmt: skip
def test_places_that_llama_cpp_is_started_from(text: str, expected: tuple[str, dict[str, object]]) -> None:
    engine, _, *rest = settings(text)
    assert (engine, tuple(rest)) == ("llama.cpp", expected)


HELM = """
servingEngineSpec:
  modelSpec:
  - name: llama
    repository: vllm/vllm-openai
    tag: v0.11.0
    modelURL: meta-llama/Llama-3.1-8B-Instruct
    vllmConfig:
      maxModelLen: 16384
      tensorParallelSize: 2
      enablePrefixCaching: false
      extraArgs: ["--gpu-memory-utilization", "0.8"]
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HELM, ("vllm", "0.11.0", "meta-llama/Llama-3.1-8B-Instruct",
                {"context": "16384", "tensor_parallel": 2, "prefix_caching": False, "utilization": 0.8})),
        ('image:\n  repository: vllm/vllm-openai\n  tag: v0.11.0\n  command: ["vllm", "serve", "/data/", "--max-model-len", "4096"]',
         ("vllm", "0.11.0", "/data/", {"context": "4096"})),
        ("kind: Pod\nspec:\n  containers:\n  - image: vllm/vllm-openai:v0.8.5\n    env:\n    - {name: M, value: Qwen/Qwen3-8B}\n"
         "    - {name: LEN, value: '4096'}\n    args: [--model, $(M), --max-model-len=$(LEN)]",
         ("vllm", "0.8.5", "Qwen/Qwen3-8B", {"context": "4096"})),
        ("spec:\n  predictor:\n    model:\n      modelFormat: {name: huggingface}\n      args: [--model_id=Qwen/Qwen3-8B, --max-model-len=4096]",
         ("vllm", None, "Qwen/Qwen3-8B", {"context": "4096"})),
        ("services:\n  s:\n    image: lmsysorg/sglang:v0.5.18-cu130\n    entrypoint: python3 -m sglang.launch_server\n"
         "    command: >\n      --model-path Qwen/Qwen3-8B\n      --tp 2", ("sglang", "0.5.18", "Qwen/Qwen3-8B", {"tensor_parallel": 2})),
        ("services:\n  o:\n    image: ollama/ollama:0.32.0\n    environment: [OLLAMA_CONTEXT_LENGTH=16384, OLLAMA_NUM_PARALLEL=2]",
         ("ollama", "0.32.0", None, {"context": "16384", "slots": 2})),
        ('[Service]\nEnvironment="OLLAMA_CONTEXT_LENGTH=16384"\nEnvironment="OLLAMA_KV_CACHE_TYPE=q8_0"',
         ("ollama", None, None, {"context": "16384", "kv_dtype": "q8_0"})),
        ('docker run --rm --entrypoint bash vllm/vllm-openai:v0.19.1 -c "vllm serve Qwen/Qwen3-8B --max-model-len 4096"',
         ("vllm", "0.19.1", "Qwen/Qwen3-8B", {"context": "4096"})),
        ("[2025-05-02 16:13:41] server_args=ServerArgs(model_path='Qwen/Qwen3-0.6B', tp_size=2, context_length=4096, "
         "page_size=1, kv_cache_dtype='auto', disable_radix_cache=False, max_running_requests=None)",
         ("sglang", None, "Qwen/Qwen3-0.6B", {"context": "4096", "kv_dtype": "auto", "tensor_parallel": 2, "block_size": 1})),
        ("kind: LeaderWorkerSet\nspec:\n  containers:\n  - image: docker.io/vllm/vllm-openai:v0.8.5\n    command: [sh, -c, \"bash multi-node-serving.sh leader "
         "--ray_cluster_size=$(LWS_GROUP_SIZE); python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B -tp 8 --pipeline_parallel_size 2\"]",
         ("vllm", "0.8.5", "Qwen/Qwen3-8B", {"tensor_parallel": 8, "pipeline_parallel": 2})),
        ("services:\n  v:\n    image: vllm/vllm-openai:${TAG:-v0.11.0}\n    command: [--model, '${MODEL:-Qwen/Qwen3-8B}', --max-model-len, '${LEN:-4096}']",
         ("vllm", "0.11.0", "Qwen/Qwen3-8B", {"context": "4096"})),
        ('level=INFO source=llama_server.go:433 msg="starting llama-server" cmd="llama-server --model /m/sha256-aa -c 32768 -np 2 -ub 1024"',
         ("llama.cpp", None, "/m/sha256-aa", {"context": "32768", "slots": 2, "ubatch": 1024})),
        ('msg="server config" env="map[OLLAMA_CONTEXT_LENGTH:32768 OLLAMA_FLASH_ATTENTION:false OLLAMA_KV_CACHE_TYPE:q8_0 OLLAMA_NUM_PARALLEL:2]"',
         ("ollama", None, None, {"context": "32768", "kv_dtype": "q8_0", "slots": 2})),
        ('export OLLAMA_ORIGINS="a b"\nexport OLLAMA_CONTEXT_LENGTH=8192\nexport OLLAMA_NUM_PARALLEL=2', ("ollama", None, None, {"context": "8192", "slots": 2})),
        ("launchctl setenv OLLAMA_NUM_PARALLEL 5\nlaunchctl setenv OLLAMA_CONTEXT_LENGTH 32768", ("ollama", None, None, {"context": "32768", "slots": 5})),
        ('LLMConfig(model_loading_config=dict(model_id="q", model_source="Qwen/Qwen3-8B"), engine_kwargs=dict(tensor_parallel_size=2))',
         ("vllm", None, "Qwen/Qwen3-8B", {"tensor_parallel": 2})),
        ("python3 -m dynamo.sglang --model-path Qwen/Qwen3-8B --tp 2 --page-size 16",
         ("sglang", None, "Qwen/Qwen3-8B", {"tensor_parallel": 2, "block_size": 16})),
        ('job "v" {\n  config {\n    image = "vllm/vllm-openai:v0.10.0"\n    args = [\n      "--model", "Qwen/Qwen3-8B",\n      "-tp", "2",\n    ]\n  }\n}',
         ("vllm", "0.10.0", "Qwen/Qwen3-8B", {"tensor_parallel": 2})),
        ('container {\n  image   = "lmsysorg/sglang:v0.5.9"\n  command = ["python3", "-m", "sglang.launch_server"]\n'
         '  args    = ["--model-path", "Qwen/Qwen3-8B", "--tp", "2"]\n}', ("sglang", "0.5.9", "Qwen/Qwen3-8B", {"tensor_parallel": 2})),
        ("[Container]\nImage=docker.io/vllm/vllm-openai:v0.10.0\nExec=--model Qwen/Qwen3-8B \\\n  --tensor-parallel-size 2\n[Service]\nRestart=always",
         ("vllm", "0.10.0", "Qwen/Qwen3-8B", {"tensor_parallel": 2})),
        ("apptainer instance run --nv /c/vllm-openai_v0.8.3.sif name --model Qwen/Qwen3-8B -tp 2",
         ("vllm", "0.8.3", "Qwen/Qwen3-8B", {"tensor_parallel": 2})),
        ("apptainer run --nv docker://vllm/vllm-openai:v0.8.3 --model Qwen/Qwen3-8B -tp 2",
         ("vllm", "0.8.3", "Qwen/Qwen3-8B", {"tensor_parallel": 2})),
        ("VERSION := v0.5.9\nrun:\n\tdocker run -it \\\n\tlmsysorg/sglang:$(VERSION) \\\n\tpython3 -m sglang.launch_server \\\n\t--model-path Qwen/Qwen3-8B",
         ("sglang", "0.5.9", "Qwen/Qwen3-8B", {})),
        ("cat >./extra.yml <<EOF\nkv_cache_config:\n    dtype: fp8\n    free_gpu_memory_fraction: 0.8\nEOF\n\n"
         "trtllm-serve Qwen/Qwen3-8B \\\n  --tp_size 2 \\\n  --extra_llm_api_options ./extra.yml",
         ("tensorrt-llm", None, "Qwen/Qwen3-8B", {"kv_dtype": "fp8", "utilization": 0.8, "tensor_parallel": 2})),
        ("vllm serve Qwen/Qwen3-8B --hf-overrides.num_key_value_heads 4 -O3",
         ("vllm", None, "Qwen/Qwen3-8B", {"overrides": '{"num_key_value_heads": 4}'})),
    ],
)  # fmt: skip
def test_manifests_charts_and_logs(text: str, expected: tuple[object, ...]) -> None:
    assert settings(text) == expected


@pytest.mark.parametrize(
    "text",
    ["\n" * 190_000, "# a\n" * 45_000, "–" * 190_000, "a=(" * 60_000, '[ "' * 60_000, "A=1;" * 45_000,
     "vllm serve x " + "${A} " * 30_000, "vllm serve x " + '"a b" ' * 30_000,
     "args = [\n" * 20_000, 'image = "a"\n' * 15_000, "cat >x.json <<A\n" * 12_000, "x <<A\n" * 25_000, "A := b\n" * 25_000,
     "vllm serve x " + "--unknown-x " * 15_000, "A=1 " * 45_000],
)  # fmt: skip
def test_long_pastes_take_no_time(text: str) -> None:
    begun = time.process_time()  # of this process alone, whatever else the machine does
    with contextlib.suppress(UsageError):
        commandline.read(text)
    assert time.process_time() - begun < 5


def test_llama_cpp() -> None:
    text = "llama-server -m ./Qwen3-8B-Q4_K_M.gguf -c 32768 -np 4 -ctk q8_0 -ctv q8_0 -fa -ngl 99 --jinja"
    expected = {"context": "32768", "slots": 4, "k_dtype": "q8_0", "v_dtype": "q8_0", "flash_attention": True,
                "gpu_layers": 99}  # fmt: skip
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


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("lmsysorg/sglang:v0.5.3rc0-cu126", "0.5.3rc0"),
        ("lmsysorg/sglang:v0.5.10.rc0", "0.5.10.rc0"),
        ("vllm/vllm-openai:v0.11.0rc2", "0.11.0rc2"),
    ],
)
def test_a_candidate_goes_by_its_release(kvctl: Run, image: str, version: str) -> None:
    outcome = kvctl("size", "Qwen/Qwen3-8B", "--ctx", "4k", "--json", "--engine-args", f"docker run {image}")
    assert outcome.json["results"][0]["engine"]["version"] == version
    assert "estimated" in outcome.err


@pytest.mark.parametrize("image", ["vllm/vllm-openai:latest", "vllm/vllm-openai", "nvcr.io/nvidia/vllm:25.09-py3"])
def test_an_image_that_says_no_version(kvctl: Run, image: str) -> None:
    """`latest` moves, and NVIDIA's builds are numbered by year and month: neither is a version of vLLM."""
    text = f"docker run {image} vllm serve Qwen/Qwen3-8B"
    outcome = kvctl("size", "--json", "--engine-args", text)
    assert "says no version of vllm" in outcome.err
    assert outcome.json["results"][0]["engine"]["version"] == "0.33"
    assert "no version" not in kvctl("size", "--json", "--engine", "vllm@0.12", "--engine-args", text).err


@pytest.mark.parametrize(
    ("text", "least", "most"),
    [
        # 8,190,735,360 parameters, 1,244,659,712 of them in embeddings and head, which stay in bf16: 8.8 GiB in fp8.
        ("vllm serve Qwen/Qwen3-8B -q fp8", 8.7, 8.9),
        ("vllm serve Qwen/Qwen3-8B --quantization fp8_per_tensor --kv-cache-memory-bytes 1000000000", 8.7, 8.9),
        ("vllm serve Qwen/Qwen3-8B --quantization fp8_per_block", 8.7, 8.9),
        ("vllm serve Qwen/Qwen3-8B --quantization fp8_per_channel", 8.7, 8.9),
        ("python -m sglang.launch_server --model-path Qwen/Qwen3-8B --quantization fp8", 8.7, 8.9),
        ("python -m sglang.launch_server --model-path Qwen/Qwen3-8B --quantization unquant", 15.2, 15.3),
        # 6.95 G weights of 4.5 bits, 2.49 GB of embeddings and head
        ("python -m sglang.launch_server --model-path Qwen/Qwen3-8B --quantization nvfp4_online", 5.9, 6.1),
        # 6.95 G weights of 4.16 bits, 2.49 GB of embeddings and head
        ("vllm serve Qwen/Qwen3-8B --quantization=awq", 5.6, 5.8),
        ("python -m sglang.launch_server --model-path Qwen/Qwen3-8B --cpu-offload-gb 4", 11.2, 11.3),  # 15.26 − 4
        # 4.8944 bits for each parameter, less the embeddings, which stay in host memory
        ("llama-server -hf Qwen/Qwen3-8B-GGUF:Q4_K_M -c 4096", 4.2, 4.4),
        # 20 of 37 layers, the head among them
        ("llama-server -m Qwen3-8B-Q4_K_M.gguf -ngl 20 -c 4096", 2.3, 2.6),
    ],
)
def test_what_changes_weights_is_counted(kvctl: Run, text: str, least: float, most: float) -> None:
    options = ("size", "Qwen3-8B", "--json", "--ctx", "4k", "--engine-args", text)
    # 36 layers × 2 × 8 KV heads × 128 × 2 bytes × 4,096 tokens, whatever the weights
    assert kvctl(*options).json["results"][0]["kv_bytes"] == 36 * 2 * 8 * 128 * 2 * 4096
    fit = kvctl(*options, "--gpu", "RTX4090").json["results"][0]["fit"]
    assert least < fit["weights_bytes"] / 2**30 < most


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("vllm serve Qwen/Qwen3-8B --quantization modelopt_fp4", "modelopt_fp4"),
        ("vllm serve Qwen/Qwen3-8B --quantization nonsense", "nonsense"),
        ("llama-server -m Qwen3-8B-UD-Q4_K_XL.gguf -c 4096", "ud-q4_k_xl"),
        ("llama-server -m Qwen3-8B-Q6_K_L.gguf -c 4096", "q6_k_l"),
        ("llama-server -m Qwen3-8B-TQ1_0.gguf -c 4096", "tq1_0"),
        ("llama-server -m Qwen3-8B-MXFP4_MOE.gguf -c 4096", "mxfp4_moe"),
    ],
)
def test_weights_of_an_unknown_format_are_not_taken_for_plain_ones(kvctl: Run, text: str, seen: str) -> None:
    options = ("size", "Qwen3-8B", "--json", "--ctx", "4k", "--engine-args", text)
    assert kvctl(*options).code == 0  # the cache is the same
    refused = kvctl(*options, "--gpu", "RTX4090")
    assert refused.code != 0
    assert seen in refused.err
    assert kvctl(*options, "--gpu", "RTX4090", "--weights-dtype", "fp16").code == 0
    # Beside a budget the cache has an answer; a word for the weights that is not understood is not passed over for that.
    assert kvctl(*options, "--gpu", "RTX4090", "--kv-budget", "2GiB").code == (1 if "--quantization" in text else 0)


def test_a_name_says_the_format_that_a_configuration_leaves_to_another_file(kvctl: Run) -> None:
    """modelopt's hf_quant_config.json stands beside config.json: NVFP4 by the name, 120.7 billion parameters, not 16 bits each."""
    name = "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4"
    for text in (f"vllm serve {name} -tp 2", f"python -m sglang.launch_server --model-path {name} --tp 2"):
        for more in ((), ("--weights-dtype", "nvfp4"), ("--kv-budget", "2GiB")):
            outcome = kvctl("size", "--json", "--ctx", "4k", "--gpu", "2xH100", "--engine-args", text, *more)
            (result,) = outcome.json["results"]
            assert 36 < result["fit"]["weights_bytes"] / 2**30 < 36.2
            assert 120e9 * 4.5 / 8 < result["weights"]["bytes"] < 120e9 * 5.5 / 8
    other = kvctl(
        "size", "Qwen3-8B", "--json", "--ctx", "4k", "--gpu", "H100", "--engine-args", "vllm serve Qwen/Qwen3-8B-AWQ"
    )
    assert 5.6 < other.json["results"][0]["fit"]["weights_bytes"] / 2**30 < 5.8


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
        ("vllm serve $MODEL", None, "a shell would replace"),
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
    assert settings(text) == (
        "vllm", None, "Qwen/Qwen3-8B", {"context": "8192", "tensor_parallel": 2, "enforce_eager": True})  # fmt: skip
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


def bomb(first: str, last: str) -> str:
    """A few hundred bytes of YAML that stand for 9^9 words ("billion laughs")."""
    lines = [f"{first}\n"]
    lines += [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise("abcdefghij")]
    return "".join(lines) + last


@pytest.mark.parametrize(
    "text",
    [
        bomb("a: &a [x]", "args: *j"),
        bomb("a: &a {args: [sleep]}", "image: x"),
        "args: &a [x, *a]\nimage: vllm/vllm-openai",
    ],
)
def test_yaml_that_stands_for_more_than_it_says(kvctl: Run, tmp_path: Path, text: str) -> None:
    outcome = kvctl("size", "--source", "catalogue", "--engine-args", text)
    assert (outcome.code, outcome.out) == (2, "")
    assert "stands for more" in outcome.err
    (tmp_path / "c.yaml").write_text(text)
    assert kvctl("size", "Qwen3-8B", "--engine-args", f"vllm serve --config {tmp_path / 'c.yaml'}").code == 2


def test_empty_values_are_refused(kvctl: Run) -> None:
    outcome = kvctl("size", "--source", "catalogue", "--engine-args", "vllm serve Qwen3-8B --max-model-len ''")
    assert (outcome.code, outcome.out) == (2, "")


def test_minus_one_is_the_engines_choice() -> None:
    assert settings("llama-server -m m -np 2 -np -1")[3] == {}
    assert settings("python -m sglang.launch_server --model m --chunked-prefill-size -1")[3] == {}


SCRIPT = """#!/bin/bash
# vllm serve Old/Model --max-model-len 1
docker pull vllm/vllm-openai:v0.11.0 && cd src/vllm
export HF_TOKEN=x
vllm serve Qwen/Qwen3-32B \\
  # --tensor-parallel-size 8 \\
  --tensor-parallel-size 4 \\  # GPUs
  --max-model-len 32768  # --max-model-len 1
echo started --max-model-len 2
cat <<EOF > log
--max-model-len 3
EOF
"""


def test_a_script_around_the_command() -> None:
    assert settings(SCRIPT) == VLLM


def test_several_commands_are_said(kvctl: Run) -> None:
    text = "vllm serve Qwen/Qwen3-8B --max-model-len 4096 && vllm serve Qwen/Qwen3-32B --max-model-len 8192"
    outcome = kvctl("size", "--engine-args", text, "--json")
    assert outcome.json["results"][0]["model"]["id"] == "Qwen/Qwen3-8B"
    assert "2 commands in it start an engine: the first is taken" in outcome.err


def test_unknown_flags_do_not_flood(kvctl: Run) -> None:
    many = " ".join(f"--q{number} x" for number in range(20_000))
    outcome = kvctl("size", "--engine-args", f"vllm serve Qwen/Qwen3-8B --max-model-len 4096 {many[:150_000]}")
    assert len(outcome.err.splitlines()) < 12
    assert "more flags are not known" in outcome.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm serve <model> --max-model-len 4096", "<model> stands for something"),
        ("vllm serve m --max-num 4", "--max-num could be --max-num-batched-tokens or --max-num-seqs"),
    ],
)
def test_what_would_be_misread_is_refused(kvctl: Run, text: str, words: str) -> None:
    outcome = kvctl("size", "--engine-args", text)
    assert outcome.code == 2
    assert words in outcome.err


def test_a_model_that_is_not_here_says_how_to_name_another(kvctl: Run) -> None:
    outcome = kvctl("size", "--engine-args", "vllm serve /data/models/Qwen3-32B -tp 2")
    assert outcome.code == 1
    assert "another name for it goes before: kvctl size MODEL --engine-args" in outcome.err


def test_the_tag_of_a_rocm_image(kvctl: Run) -> None:
    text = "docker run rocm/vllm:rocm6.4.1_vllm_0.10.1_20250909 vllm serve Qwen/Qwen3-8B"
    outcome = kvctl("size", "--ctx", "4k", "--json", "--engine-args", text)
    assert outcome.json["results"][0]["engine"]["version"] == "0.10.1"


def test_a_candidate_of_an_engine_that_has_no_release_yet(kvctl: Run) -> None:
    text = "docker run nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc5 trtllm-serve Qwen/Qwen3-8B"
    outcome = kvctl("size", "--ctx", "4k", "--json", "--engine-args", text)
    assert outcome.json["results"][0]["engine"]["version"] == "1.3.0rc5"
    assert "is no version" not in outcome.err


def test_options_with_several_words_are_read_whole(kvctl: Run) -> None:
    # vLLM captures two kinds of graph for each of three sizes.
    line = "vllm serve Qwen/Qwen3-8B --max-model-len 8192 --cudagraph-capture-sizes 1 2 4 --port 8000"
    fit = kvctl("size", "--engine-args", line, "--gpu", "L4", "--json").json["results"][0]["fit"]
    (graphs,) = [part for part in fit["parts"] if part["name"] == "graphs"]
    assert graphs["rule"].startswith("6 CUDA graphs")
