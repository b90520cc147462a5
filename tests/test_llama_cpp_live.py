"""llama.cpp's own library, live: the lines that it logs of made-up models against those that kvctl plans.

Needs the shared objects of libllama, for example those of an npm package of 11 MB:

    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xzf node-llama-cpp-linux-x64-*.tgz
    KVCTL_LIBLLAMA=package/bins/linux-x64 python -m pytest -m engine tests/test_llama_cpp_live.py

KVCTL_LIBLLAMA_SEEDS makes more models of every architecture (default 1).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from gguf_models import random_context, random_keys, write
from libllama import planned, spec_of

from kvctl.errors import UsageError
from kvctl.sources.gguf_config import ARCHITECTURES

pytestmark = pytest.mark.engine

# Their loaders want tensors that are optional to the one who asks for what is missing.
UNASKABLE = {"laguna", "rwkv6"}
SEEDS = int(os.environ.get("KVCTL_LIBLLAMA_SEEDS", "1"))


def library() -> Path:
    folder = Path(os.environ.get("KVCTL_LIBLLAMA") or Path.home() / ".cache" / "kvctl" / "libllama")
    if not list(folder.glob("libllama.*so*")):
        pytest.skip(f"no libllama in {folder}: set KVCTL_LIBLLAMA to the folder of its shared objects")
    return folder


def logged(path: Path, contexts: list[dict[str, Any]]) -> list[list[str]]:
    """The library's lines, from a process of its own: it ends where an assertion fails."""
    script = Path(__file__).with_name("libllama.py")
    request = json.dumps({"gguf": str(path), "contexts": contexts})
    run = subprocess.run([sys.executable, script, library()], input=request + "\n", text=True, capture_output=True,
                         timeout=300, check=False)  # fmt: skip
    assert run.stdout, run.stderr[-2000:]
    answer = json.loads(run.stdout)
    assert "logs" in answer, answer
    logs: list[list[str]] = answer["logs"]
    return logs


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - UNASKABLE))
def test_plans_are_what_the_library_logs(tmp_path: Path, architecture: str, seed: int) -> None:
    random = Random(f"{architecture} {seed}")
    keys = random_keys(architecture, random)
    contexts = [random_context(random) for _ in range(6)]
    logs = logged(write(tmp_path / "model.gguf", architecture, keys), contexts)
    spec = spec_of(architecture, keys)
    for context, lines in zip(contexts, logs, strict=True):
        if lines[0].startswith("refused"):
            with pytest.raises(UsageError):
                planned(spec, context)
        else:
            assert list(planned(spec, context).log) == lines, (keys, context)


def test_large_sizes_are_printed_through_a_32_bit_float(tmp_path: Path) -> None:
    keys = {"context_length": 2**20, "embedding_length": 1024, "block_count": 61, "attention.head_count": 48,
            "attention.head_count_kv": 48, "attention.key_length": 96, "attention.value_length": 96,
            "rope.dimension_count": 96}  # fmt: skip
    contexts: list[dict[str, Any]] = [{"n_ctx": 1_000_123, "type_k": "q5_1", "type_v": "q4_0"}, {"n_ctx": 777_777}]
    logs = logged(write(tmp_path / "model.gguf", "llama", keys), contexts)
    assert [list(planned(spec_of("llama", keys), context).log) for context in contexts] == logs
