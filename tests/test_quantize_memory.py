"""Memory while weights are packed: the kernel's high-water mark of a process of its own against what --dry-run says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import awq_models
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.engine]
pytest.importorskip("torch")
pytest.importorskip("transformers")

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2, "num_attention_heads": 16,
              "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True},
    "qwen3": {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 1, "num_attention_heads": 12,
              "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 100_000, "tie_word_embeddings": True},
    "llama-deep": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 9,
                   "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True},
}  # fmt: skip


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    made = awq_models.model(request.param.removesuffix("-deep"), max_position_embeddings=2048, **SHAPES[request.param])
    path: Path = tmp_path_factory.mktemp("model") / request.param
    made.to(torch.bfloat16).save_pretrained(path)
    awq_models.tokenizer(512).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", ["int8", "nf4", "nf4-dq", "fp4", "rtn", "awq"])
def test_the_peak_is_what_was_said(folder: Path, tmp_path: Path, name: str) -> None:
    if name not in ("rtn", "awq"):
        pytest.importorskip("bitsandbytes")
    asked = [
        sys.executable,
        "-m",
        "kvctl",
        "quantize",
        str(folder),
        "--weights",
        name,
        "-o",
        str(tmp_path / "out"),
        "--json",
        "-q",
    ]
    said, done = (
        json.loads(subprocess.run([*asked, *more], capture_output=True, check=True, timeout=900).stdout)["results"][1]
        for more in (["--dry-run"], ["--tokens", "64"])
    )
    assert done["predicted_peak_bytes"] == said["predicted_peak_bytes"]
    assert abs(done["peak_bytes"] / said["predicted_peak_bytes"] - 1) < 0.1
