"""What `--emit` writes says what the deployment is: read again by kvctl's reader of engines' command lines, it is the same."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from deployments import (  # fmt: skip
    CASES,
    GIB,
    LLAMA_CPP,
    LLAMA_CPP_GPU,
    MAC,
    OLLAMA,
    SGLANG,
    SGLANG_NODES,
    TENSORRT_LLM,
    TRANSFORMERS,
    VLLM,
    VLLM_NODES,
)
from hypothesis import given
from hypothesis import strategies as st

from kvctl.allocation import Serving
from kvctl.engines import commandline, engine
from kvctl.engines.flags import serving
from kvctl.errors import UsageError
from kvctl.recommend.deployment import Deployment
from kvctl.recommend.emit import KINDS, Promise, Site, emit, file_of, named
from kvctl.recommend.emit.command import Place, command
from kvctl.recommend.emit.nodes import Node
from kvctl.recommend.emit.told import told

PROMISE = Promise(
    ttft_s=2, tpot_s=0.05, percent=95, concurrency=64, prompt_tokens=2048, output_tokens=256, hit_rate=0.5,
    why=("It holds what is asked for on the fewest GPUs.",), log=("GPU KV cache size: 1,000 tokens",),
)  # fmt: skip
SITE = Site("llm")


def written(kind: str, deployment: Deployment, site: Site = SITE) -> str | None:
    """The text; None where the kind makes no sense for the deployment."""
    try:
        return emit(kind, deployment, site, PROMISE)
    except UsageError:
        return None


def check_read(text: str, deployment: Deployment, *, version: bool, local: str | None = None) -> None:
    """The text starts the deployment's engine with its model, length, formats and settings."""
    started = commandline.read(text)
    assert started.engine == deployment.engine.name
    if version:
        assert started.version is not None
        assert deployment.engine.version is not None
        assert started.version.startswith(deployment.engine.version)
    if deployment.engine.name != "ollama":  # which is asked for a model when it is up
        assert started.model == (local or deployment.model)
    assert serving(started.engine, started.flags, strict=True) == told(deployment)
    common = started.common
    if deployment.engine.name == "llama.cpp":
        key, _, value = deployment.kv_dtype.replace("auto", "f16").partition("/")
        assert (common["k_dtype"], common["v_dtype"]) == (key, value or key)
        # -c is for all slots: 4 of 4,096 tokens, 2, and 1.
        assert int(common["context"]) == deployment.context * (deployment.serving.slots or 1)
    elif deployment.engine.name != "transformers":  # which has no length
        assert int(common["context"]) == deployment.context
        assert common["kv_dtype"] == deployment.kv_dtype


@pytest.mark.parametrize("name", CASES)
def test_a_command_says_what_the_deployment_is(name: str) -> None:
    check_read(emit("command", CASES[name], SITE), CASES[name], version=False)


@pytest.mark.parametrize("name", ["vllm-nodes", "vllm-dp"])
def test_a_command_through_ray_too(name: str) -> None:
    check_read(emit("command", CASES[name], SITE.replace(ray=True)), CASES[name], version=False)


@pytest.mark.parametrize("kind", ["compose", "kubernetes", "lws", "systemd"])
@pytest.mark.parametrize("name", [name for name, one in CASES.items() if one.engine.name != "tensorrt-llm"])
def test_a_manifest_says_what_the_deployment_is(kind: str, name: str) -> None:
    """TensorRT-LLM's settings are in a file beside, which the reader of manifests does not look into."""
    deployment = CASES[name]
    text = written(kind, deployment)
    if text is None:
        return
    inside = {"/srv/models/SmolLM2-135M-Instruct.Q4_1.gguf": "/models/SmolLM2-135M-Instruct.Q4_1.gguf",
              "./Qwen3-32B-awq": "/models/Qwen3-32B-awq"}  # fmt: skip
    local = inside.get(deployment.model) if kind != "systemd" else None
    # The image of vLLM for CPUs has a name that the reader does not know.
    version = kind != "systemd" and name != "vllm-cpu"
    check_read(re.sub(r"^HEAD_ADDRESS", "", text), deployment, version=version, local=local)


@pytest.mark.parametrize("name", ["vllm", "vllm-made", "vllm-cpu", "sglang", "sglang-whole"])
def test_a_file_of_settings_says_what_the_deployment_is(name: str) -> None:
    check_read(emit("config", CASES[name], SITE), CASES[name], version=False)


@pytest.mark.parametrize("name", ["llama.cpp", "llama.cpp-gpu", "llama.cpp-mac"])
def test_variables_say_what_the_deployment_is(name: str) -> None:
    lines = emit("config", CASES[name], SITE).splitlines()
    exports = "\n".join(f"export {line}" for line in lines if not line.startswith("#"))
    started = commandline.read(f"{exports}\nllama-server")
    assert started.model == CASES[name].model
    assert serving("llama.cpp", started.flags, strict=True) == told(CASES[name])


def test_tensorrt_llms_file_says_what_the_deployment_is(tmp_path: Any) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(emit("config", TENSORRT_LLM, SITE))
    line = file.read_text().splitlines()[2].removeprefix("# ").replace("engine.yaml", str(file))
    check_read(line, TENSORRT_LLM, version=False)


@pytest.mark.parametrize("name", [name for name in CASES if written("config", CASES[name])])
def test_a_file_of_settings_names_itself(name: str) -> None:
    """Whether it is written into a folder or saved from stdout: its command reads the name that is said."""
    deployment = CASES[name]
    file = file_of("config", deployment, SITE)
    text = emit("config", deployment, SITE)
    head = [line for line in text.splitlines() if line.startswith("#")]
    assert f"# This file is {file}:" in head
    assert re.search(rf"(--config |--extra_llm_api_options |\. \./){re.escape(file)}(;|$)", head[2])
    assert file == ("engine.env" if deployment.engine.name in ("llama.cpp", "ollama") else "engine.yaml")
    assert not any("llm.yaml" in line or "llm.env" in line for line in head)


# -- any settings ---------------------------------------------------------------------------

counts = st.integers(1, 4096)
BOTH = {
    "max_sequences": counts,
    "max_batched": st.integers(1, 10**6),
    "block_size": st.sampled_from([1, 16, 64]),
    "utilization": st.floats(0.01, 1, allow_nan=False),
    "prefix_caching": st.booleans(),
    "chunked_prefill": st.booleans(),
    "hybrid_disabled": st.booleans(),
    "decode_context_parallel": st.integers(1, 8),
    "cpu_offload": st.integers(1, 2**40),
}
SETTINGS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "vllm": BOTH
    | {
        "kv_budget": st.integers(1024, 2**42),
        "num_blocks": counts,
        "expert_parallel": st.booleans(),
        "enforce_eager": st.booleans(),
        "capture_sizes": st.lists(counts, min_size=1, max_size=4).map(tuple),
        "offload": st.integers(2**20, 2**42),
        # $ and {{ in a pasted value stand for something that a shell or a chart puts there: refused, and rightly.
        "speculative": st.fixed_dictionaries(
            {"method": st.text(st.characters(exclude_characters="${"), max_size=9), "num_speculative_tokens": counts}
        ),
        "kv_transfer": st.just({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}),
        "async_scheduling": st.booleans(),
        "conv_dtype": st.sampled_from(["float32", "bfloat16"]),
        "mamba_cache_mode": st.sampled_from(["align", "all", "none"]),
    },
    "sglang": BOTH
    | {
        "max_tokens": st.integers(1, 2**40),
        "expert_parallel": st.booleans(),
        "kv_budget": st.integers(1024, 2**42),
        "host_gb": st.floats(0.001, 1e5),
        "swa_ratio": st.floats(1e-6, 1),
        "mamba_slots": counts,
        "state_dtype": st.sampled_from(["float32", "bfloat16"]),
        "speculative_algorithm": st.sampled_from(["EAGLE", "NGRAM"]),
        "draft_tokens": st.integers(1, 64),
    },
    "llama.cpp": {
        "slots": st.integers(1, 256),
        "unified": st.booleans(),
        "batch": counts,
        "ubatch": counts,
        "prompt_cache": st.integers(-1, 10**5),
        "gpu_layers": st.integers(0, 99),
        "tensor_split": st.lists(st.integers(1, 9).map(float), min_size=2, max_size=4).map(tuple),
        "fit_margin": st.integers(0, 4096),
        "kv_on_host": st.booleans(),
        "swa_full": st.booleans(),
        "flash_attention": st.sampled_from([None, True]),
        "slot_limit": counts,
        "prefix_caching": st.booleans(),
        "kv_budget": st.integers(1024, 2**42),
    },
    "tensorrt-llm": {
        "max_sequences": counts,
        "max_batched": counts,
        "block_size": st.sampled_from([16, 32, 64]),
        "utilization": st.floats(0.01, 1, allow_nan=False),
        "prefix_caching": st.booleans(),
        "chunked_prefill": st.booleans(),
        "max_tokens": st.integers(1, 10**9),
        "attention_windows": st.lists(counts, min_size=1, max_size=3).map(tuple),
        "expert_parallel": st.booleans(),
        "attention_dp": st.booleans(),
        "second_manager": st.sampled_from([None, True]),
    },
    "ollama": {"slots": st.integers(1, 256), "flash_attention": st.sampled_from([None, True, False])},
    "transformers": {"block_size": counts, "num_blocks": counts, "max_batched": counts, "utilization": st.floats(0.01, 1)},
}  # fmt: skip
BASES = {"vllm": VLLM, "sglang": SGLANG, "llama.cpp": LLAMA_CPP_GPU, "tensorrt-llm": TENSORRT_LLM, "ollama": OLLAMA,
         "transformers": TRANSFORMERS}  # fmt: skip


@st.composite
def deployments(draw: st.DrawFn, name: str) -> Deployment:
    """Any of an engine's settings, and as many GPUs as they take."""
    base = BASES[name]
    chosen = draw(st.sets(st.sampled_from(sorted(SETTINGS[name]))))
    values = {field: draw(SETTINGS[name][field]) for field in sorted(chosen)}
    gpus = base.gpus
    if base.engine.splits:
        ranks = {"tensor_parallel": draw(st.integers(1, 8)), "pipeline_parallel": draw(st.integers(1, 4))}
        gpus = ranks["tensor_parallel"] * ranks["pipeline_parallel"]
        if name == "vllm":
            ranks["data_parallel"] = draw(st.integers(1, 4))
            gpus *= ranks["data_parallel"]
        values |= ranks
    kinds = {"vllm": ["auto", "fp8"], "sglang": ["auto", "fp8_e5m2"], "llama.cpp": ["f16", "q8_0", "q8_0/q4_0"],
             "tensorrt-llm": ["auto", "fp8", "nvfp4"], "ollama": ["f16", "q8_0"], "transformers": ["auto"]}[name]  # fmt: skip
    kv = draw(st.sampled_from(kinds))
    if kv in ("q8_0", "q8_0/q4_0") and values.get("flash_attention") is False:
        del values["flash_attention"]
    device = base.serving.device
    return base.replace(
        serving=Serving(device=device, **values), gpus=gpus, kv_dtype=kv, context=draw(st.integers(1, 2**20)), nodes=1
    )


def _any(name: str) -> Any:
    @given(deployments(name))
    def check(deployment: Deployment) -> None:
        started = commandline.read(emit("command", deployment, SITE))
        assert serving(name, started.flags, strict=True) == told(deployment)
        # What the engine takes in whole gigabytes, or has no word for, is all that differs.
        own, said = deployment.serving, told(deployment)
        same = [field for field in Serving._fields if getattr(own, field) == getattr(said, field)]
        changed = set(Serving._fields) - set(same)
        assert changed <= CHANGED[name]
        if "context" in started.common and name != "llama.cpp":
            assert int(started.common["context"]) == deployment.context

    return check


PARALLEL = {"tensor_parallel", "pipeline_parallel", "data_parallel"}
CHANGED = {
    "vllm": PARALLEL | {"offload_backend", "offload", "cpu_offload"},
    "sglang": PARALLEL
    | {
        "kv_budget",
        "expert_parallel",
        "chunked_prefill",
        "max_batched",
        "host_gb",
        "cpu_offload",
        "prefix_caching",
        "hybrid_disabled",
    },
    "llama.cpp": {"kv_budget", "unified", "flash_attention", "prefix_caching", "prompt_cache"},
    "tensorrt-llm": PARALLEL | {"max_batched", "prefix_caching", "chunked_prefill", "expert_parallel"},
    "ollama": {"slots", "flash_attention"},
    "transformers": {"cache_implementation", "device"},
}
test_any_vllm = _any("vllm")
test_any_sglang = _any("sglang")
test_any_llama_cpp = _any("llama.cpp")
test_any_tensorrt_llm = _any("tensorrt-llm")
test_any_ollama = _any("ollama")
test_any_transformers = _any("transformers")


# -- what the words are ---------------------------------------------------------------------


def words(deployment: Deployment, **place: Any) -> list[str]:
    one = command(deployment, SITE, Place("127.0.0.1", **place))
    return [*one.program, *one.arguments]


def test_numbers_are_plain() -> None:
    """vLLM reads 32k as 32,000; --kv-offloading-size is in GiB, --cpu-offload-gb of SGLang in whole ones."""
    text = emit("command", VLLM.replace(serving=VLLM.serving.replace(offload=24 * GIB, cpu_offload=3 * GIB // 2)), SITE)
    for option in ("--max-model-len 32768", "--kv-cache-memory-bytes 42949672960", "--kv-offloading-size 24",
                   "--kv-offloading-backend native", "--cpu-offload-gb 1.5", "--max-num-batched-tokens 8192"):  # fmt: skip
        assert f"  {option} \\\n" in text or f"  {option}\n" in text
    sglang = emit("command", SGLANG.replace(serving=SGLANG.serving.replace(cpu_offload=3 * GIB // 2)), SITE)
    assert "--cpu-offload-gb 2 \\" in sglang
    assert "--hicache-size 100 \\" in sglang  # 99.5 gigabytes: its parser reads whole ones


def test_values_in_a_quantised_type_need_flash_attention() -> None:
    """llama-context.cpp: "V cache quantization requires flash_attn"."""
    assert words(LLAMA_CPP)[words(LLAMA_CPP).index("--flash-attn") + 1] == "on"
    plain = LLAMA_CPP.replace(kv_dtype="q8_0/f16")
    assert words(plain)[words(plain).index("--flash-attn") + 1] == "auto"
    with pytest.raises(UsageError, match="flash attention"):
        emit("command", LLAMA_CPP.replace(serving=LLAMA_CPP.serving.replace(flash_attention=False)), SITE)


def test_ollama_reads_words_of_the_environment_as_yes() -> None:
    """envconfig.Bool: strconv.ParseBool, and true where that fails; "off" would turn it on."""
    one = command(OLLAMA.replace(kv_dtype="f16", serving=Serving(slots=2, flash_attention=False)), SITE)
    assert dict(one.variables)["OLLAMA_FLASH_ATTENTION"] == "0"
    assert dict(one.variables)["OLLAMA_NUM_PARALLEL"] == "2"


def test_weights_made_on_load() -> None:
    assert "--quantization fp8_per_tensor" in emit("command", VLLM, SITE)
    assert "--quantization" not in emit("command", VLLM.replace(made="stored"), SITE)
    with pytest.raises(UsageError, match="makes no awq weights while it loads"):
        emit("command", VLLM.replace(weights="awq"), SITE)
    with pytest.raises(UsageError, match="no fp8 weights"):
        emit("command", TENSORRT_LLM.replace(made="load"), SITE)


def test_names_of_formats_by_version() -> None:
    """Until 0.32 `--quantization fp8` converts; that version refuses it for anything but a checkpoint in fp8."""
    assert "--quantization fp8 \\" in emit("command", VLLM.replace(engine=engine("vllm@0.19")), SITE)
    with pytest.raises(UsageError, match="makes no fp8-block"):
        emit("command", VLLM.replace(engine=engine("vllm@0.19"), weights="fp8-block"), SITE)


def test_what_is_left_to_the_engine_is_named() -> None:
    from kvctl.recommend.emit.told import unsaid

    assert unsaid(VLLM) == unsaid(SGLANG) == unsaid(LLAMA_CPP) == unsaid(TENSORRT_LLM) == ()
    assert unsaid(VLLM.replace(serving=Serving(tensor_parallel=2))) == (
        "--kv-cache-memory-bytes", "--max-num-seqs", "--max-num-batched-tokens", "--block-size", "--enable-prefix-caching",
    )  # fmt: skip
    assert unsaid(TENSORRT_LLM.replace(serving=Serving())) == (
        "--kv_cache_free_gpu_memory_fraction", "--max_batch_size", "--max_num_tokens", "--tokens-per-block", "enable_block_reuse",
    )  # fmt: skip
    assert "choose otherwise on another machine: --batch-size, --ubatch-size, --cache-ram." in emit(
        "runbook", LLAMA_CPP_GPU, SITE
    )


def test_models_of_llama_cpp() -> None:
    """A file, a repository with a type, a file in a repository."""
    assert words(LLAMA_CPP)[1:3] == ["--model", "/srv/models/SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert words(LLAMA_CPP_GPU)[1:3] == ["--hf-repo", "Qwen/Qwen3-32B-GGUF:Q4_K_M"]
    one = LLAMA_CPP_GPU.replace(model="Qwen/Qwen3-32B-GGUF/Qwen3-32B-Q4_K_M.gguf")
    assert words(one)[1:5] == ["--hf-repo", "Qwen/Qwen3-32B-GGUF", "--hf-file", "Qwen3-32B-Q4_K_M.gguf"]
    assert commandline.read(emit("command", one, SITE)).model == one.model
    # In a container, models lie elsewhere.
    assert words(LLAMA_CPP, container=True)[2] == "/models/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert words(LLAMA_CPP_GPU, container=True)[2] == "Qwen/Qwen3-32B-GGUF:Q4_K_M"


def test_words_survive_a_shell() -> None:
    odd = VLLM.replace(base='it\'s a "model" $HOME', model="/srv/models/my model; ls", made="stored")
    text = emit("command", odd, SITE)
    command_line = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))
    found = shlex.split(command_line.replace("\\\n", " "))
    assert found[2] == odd.model
    assert found[found.index("--served-model-name") + 1] == odd.base


FAKE = """#!/bin/sh
for word in "$(basename "$0")" "$@"; do printf '%s\\0' "$word" >> "$WORDS"; done
printf '\\n' >> "$WORDS"
"""


@pytest.mark.parametrize("served", ["${HOME}", "$HOME", "$(HF_HOME)", "a b"])
def test_a_shell_and_its_variables_leave_a_name_as_it_is(served: str, tmp_path: Path) -> None:
    site = SITE.replace(served=served)
    assert shlex.quote(served) in emit(
        "command", VLLM, site
    )  # in single quotes, where nothing stands for something else
    (tmp_path / "llama-server").write_text('#!/bin/sh\nprintf %s "$LLAMA_ARG_ALIAS"\n')
    (tmp_path / "llama-server").chmod(0o755)
    text = emit("config", LLAMA_CPP_GPU, site)
    (tmp_path / "engine.env").write_text(text)
    how = text.splitlines()[2].removeprefix("# ")
    ran = subprocess.run(["/bin/sh", "-euc", how], cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/root"},
                         capture_output=True, text=True, check=False)  # fmt: skip
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", served)


@pytest.mark.parametrize("name", [*CASES, "odd"])
def test_a_shell_runs_exactly_these_words(name: str, tmp_path: Path) -> None:
    """The text is run, with programs that write down what they are given."""
    deployment = (
        CASES[name] if name != "odd" else VLLM.replace(base='it\'s \\ "a" $HOME `x` é', model="/m/a b;c", made="stored")
    )
    for program in ("vllm", "python3", "llama-server", "trtllm-serve", "ollama", "transformers"):
        (tmp_path / program).write_text(FAKE)
        (tmp_path / program).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "WORDS": str(tmp_path / "words"), "HEAD_ADDRESS": "10.0.0.1"}
    # Servers side by side are started one after another here: they write into one file.
    (tmp_path / "run.sh").write_text(emit("command", deployment, SITE).replace(" &\n", "\n"))
    ran = subprocess.run(
        ["/bin/sh", "-eu", "run.sh"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    found = [line.split("\0")[:-1] for line in (tmp_path / "words").read_text().split("\n")[:-1]]
    places = [Place("127.0.0.1", node=Node(str(rank), "10.0.0.1")) for rank in range(deployment.nodes)]
    if deployment.nodes == 1:
        places = [Place("127.0.0.1")]
    wanted = [command(deployment, SITE, place) for place in places]
    if deployment.replicas > 1:
        wanted = [command(deployment, SITE.replace(port=SITE.port + number)) for number in range(deployment.replicas)]
    assert found == [[*one.program, *one.arguments] for one in wanted]
    for file, text in wanted[0].files:
        assert (tmp_path / file).read_text() == text


def test_nodes_are_not_started_without_the_address(tmp_path: Path) -> None:
    (tmp_path / "vllm").write_text(FAKE)
    (tmp_path / "vllm").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "WORDS": str(tmp_path / "words")}
    ran = subprocess.run(
        ["/bin/sh", "-c", emit("command", VLLM_NODES, SITE)], env=env, capture_output=True, text=True, check=False
    )
    assert ran.returncode != 0
    assert "HEAD_ADDRESS" in ran.stderr
    assert not (tmp_path / "words").exists()


# -- several nodes --------------------------------------------------------------------------


def test_nodes_of_vllm_by_its_own_processes() -> None:
    """vllm/entrypoints/cli/serve.py: ranks but the first are started headless; all know the first one's address."""
    text = emit("command", VLLM_NODES, SITE)
    first, second = text.split("# On node 2 of 2:")
    for part, rank in ((first, 0), (second, 1)):
        assert "--distributed-executor-backend mp" in part
        assert f"--nnodes 2 \\\n  --node-rank {rank} \\" in part
        assert '--master-addr "${HEAD_ADDRESS:?}"' in part
    assert "--headless" not in first
    assert second.rstrip().endswith("--headless")


def test_nodes_of_vllm_by_ray() -> None:
    text = emit("command", VLLM_NODES, SITE.replace(ray=True))
    assert "ray start --head --port=6379\n" in text
    assert 'ray start --address="${HEAD_ADDRESS:?}":6379 --block\n' in text
    assert text.count("vllm serve") == 1
    assert "--distributed-executor-backend ray" in text
    assert "--headless" not in text
    data = emit("command", CASES["vllm-dp"], SITE.replace(ray=True))
    # Four engines of four GPUs on two nodes of eight.
    assert "--data-parallel-backend ray \\\n  --data-parallel-size-local 2" in data


def test_nodes_of_sglang() -> None:
    text = emit("command", SGLANG_NODES, SITE)
    for rank in (0, 1):
        assert f'--nnodes 2 \\\n  --node-rank {rank} \\\n  --dist-init-addr "${{HEAD_ADDRESS:?}}:20000"' in text
    # --ep-size counts ranks; a chain of three drafts is verified with the token before it.
    assert "--ep-size 16" in text
    assert "--speculative-num-steps 3 \\\n  --speculative-eagle-topk 1" in text


# -- what makes no sense --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "deployment", "message"),
    [
        ("compose", VLLM_NODES, "one machine, and this is for 2"),
        ("compose", VLLM.replace(replicas=5), "takes 10"),
        ("kubernetes", VLLM_NODES, "one node each"),
        ("kubernetes", CASES["llama.cpp-mac"], "a Mac does not reach its GPU"),
        ("systemd", CASES["llama.cpp-mac"], "no systemd"),
        ("lws", VLLM, "for a server over several nodes"),
        ("lws", TENSORRT_LLM.replace(nodes=2, gpus=1), "on one node, and this is for 2"),
        ("command", LLAMA_CPP_GPU.replace(nodes=2), "on one node"),
        ("command", VLLM.replace(engine=engine("ideal")), "no engine that can be started"),
        ("command", VLLM.replace(gpus=4), "2 ranks of vllm on 4 GPUs"),
        ("command", VLLM_NODES.replace(engine=engine("vllm@0.11")), "through Ray alone"),
        ("command", TRANSFORMERS.replace(serving=Serving(nbits=4)), "no such option"),
        ("command", LLAMA_CPP_GPU.replace(serving=Serving(tensor_parallel=2)), "no such setting"),
        ("config", VLLM_NODES, "options that differ"),
        ("config", TRANSFORMERS, "no configuration file"),
        ("compose", TRANSFORMERS, "no image of transformers"),
        ("compose", SGLANG.replace(device=CASES["vllm-amd"].device), "no image of sglang"),
        ("alerts", OLLAMA, "no page of metrics"),
        ("svg", VLLM, "unknown kind 'svg'"),
    ],
)
def test_what_makes_no_sense_is_said(kind: str, deployment: Deployment, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        emit(kind, deployment, SITE)
    assert caught.value.hint


@pytest.mark.parametrize(
    "site",
    [
        Site("Bad_Name"),
        Site("x" * 60),
        Site(""),
        Site(port=0),
        Site(folder="models"),
        Site(user="a b"),
        Site(start_s=1),
        Site("9a"),
    ],
)
def test_names_that_nothing_takes(site: Site) -> None:
    with pytest.raises(UsageError):
        emit("command", VLLM, site)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-1-8b-instruct"),
        ("/srv/models/X_y.gguf", "x-y"),
        ("01-ai/01.Yi", "m-01-yi"),
        ("…", "llm"),
        ("a/" + "long-" * 30, ("long-" * 11)[:52].strip("-")),
    ],
)
def test_names_from_models(model: str, name: str) -> None:
    assert named(model) == name
    emit("command", VLLM, Site(named(model)))


# -- every kind -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [row.name for row in KINDS])
def test_texts_are_clean_and_always_the_same(kind: str) -> None:
    seen = 0
    for deployment in CASES.values():
        for site in (SITE, SITE.replace(ray=True)):
            text = written(kind, deployment, site)
            if text is None:
                continue
            seen += 1
            assert text == written(kind, deployment, site)
            assert text.endswith("\n")
            assert not text.endswith("\n\n")
            assert not re.search(r"[ \t]$", text, re.MULTILINE)
            assert "None" not in text
    assert seen


def test_no_token_stands_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for row in KINDS:
        for deployment in CASES.values():
            assert "hf_secret" not in (written(row.name, deployment) or "")


# -- the engines' own lists -----------------------------------------------------------------


def flags() -> Any:
    return json.loads(resources.files("kvctl").joinpath("data/engine_flags.json").read_text("utf-8"))


@pytest.mark.parametrize(
    "name", [name for name, one in CASES.items() if one.engine.name in ("vllm", "sglang", "llama.cpp")]
)
def test_every_option_is_one_of_the_engine(name: str) -> None:
    """engine_flags.json: from vLLM 0.32's parser, SGLang 0.5.23's fields, llama.cpp b11434's table (scripts/extract_engine_flags.py)."""
    facts = flags()[CASES[name].engine.name]
    switches, values = set(facts["switches"].split()), set(facts["values"].split())
    node = Place("127.0.0.1")
    if CASES[name].nodes > 1:
        node = node.replace(node=Node("1", "10.0.0.1"))
    for option, *given_values in command(CASES[name], SITE, node).options:
        if not option.startswith("-"):
            continue
        # A switch has no value, everything else has one.
        assert option in (values if given_values else switches), option
        choices = facts.get("choices", {}).get(option, "").split()
        assert not choices or set(given_values) <= set(choices), (option, given_values)


def test_versions_of_those_lists() -> None:
    assert flags()["sglang"]["version"] == engine("sglang").version
    assert flags()["vllm"]["version"].startswith("0.3")
    assert "fp8_e4m3" in flags()["sglang"]["choices"]["--kv-cache-dtype"].split()


def test_names_of_tensorrt_llm() -> None:
    """From its documentation: llm-api/reference/KvCacheConfig.html, TorchLlmArgs, commands/trtllm-serve (pages of 0.18 and of main up to 1.4rc; none of 1.2 was found)."""
    import yaml

    cache = {"enable_block_reuse", "max_tokens", "max_attention_window", "free_gpu_memory_fraction", "host_cache_size",
             "dtype", "tokens_per_block", "use_kv_cache_manager_v2"}  # fmt: skip
    whole = {"kv_cache_config", "enable_attention_dp", "enable_chunked_prefill", "return_perf_metrics"}
    options = {"--host", "--port", "--tp_size", "--pp_size", "--ep_size", "--max_batch_size", "--max_num_tokens", "--max_seq_len",
               "--extra_llm_api_options"}  # fmt: skip
    full = TENSORRT_LLM.replace(serving=TENSORRT_LLM.serving.replace(attention_dp=True, attention_windows=(1024, 4096), second_manager=True))  # fmt: skip
    one = command(full, SITE)
    assert {option[0] for option in one.options[1:]} <= options
    settings = yaml.safe_load(one.files[0][1])
    assert settings.keys() <= whole
    assert settings["kv_cache_config"].keys() <= cache
    assert settings["kv_cache_config"]["max_attention_window"] == [1024, 4096]
    assert settings["kv_cache_config"]["use_kv_cache_manager_v2"] is True
    # 1.2 has one cache manager, and is not asked for another.
    assert "use_kv_cache_manager_v2" not in emit("config", TENSORRT_LLM, SITE)


def test_a_mac_runs_on_its_gpu() -> None:
    assert words(CASES["llama.cpp-mac"])[-3:] == ["--n-gpu-layers", "all", "--metrics"]
    assert MAC.facts is not None
    assert MAC.facts.metal
