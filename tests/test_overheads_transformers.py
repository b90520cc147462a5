"""Activations of transformers against the tensors that were alive in real forward passes on the CPU.

Left out: Falcon and DeepSeek-V3 with SDPA, for which the CPU has no fused kernel and CUDA has; GPT-2 with eager
attention, which no one asks for; gpt-oss on 512 tokens, whose experts the CPU runs all at once.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import DATA

from kvctl.allocation import Serving
from kvctl.engines.transformers import memory
from kvctl.engines.widths import widths
from kvctl.errors import ConfigError, UsageError
from kvctl.model import build_spec
from kvctl.sources import Found
from kvctl.spec import ModelSpec, Provenance

GIB = 2**30


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return build_spec(Found("test", config, Provenance("local", "test")))


def test_activations_of_forward_passes() -> None:
    """SDPA within 0.2% for Llama's kind and 5% for others, eager within 5%."""
    rows = json.loads((DATA / "transformers_activations.json").read_text())["rows"]
    assert len(rows) > 60
    close = 0
    for row in rows:
        spec = spec_of({**row["config"], "model_type": row["model_type"]})
        took, _ = memory.prefill(row["model_type"], widths(spec), row["tokens"], 2, eager=row["attn"] == "eager")
        measured = row["peak"] - row["kv"]
        assert took == pytest.approx(measured, rel=0.06), (
            row["model_type"],
            row["attn"],
            row["tokens"],
            took / measured,
        )
        close += abs(took / measured - 1) < 0.002
    assert close >= len(rows) // 2


def test_a_short_prompt_is_its_logits() -> None:
    # vocabulary 128,256 × (2 + 4) bytes: the last token's logits, and their copy in float32
    spec = spec_of({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "intermediate_size": 128, "vocab_size": 128_256})  # fmt: skip
    parts = memory.overheads(spec, Serving(), dtype_bytes=2, device_bytes=GIB, gpu_name=None, version=None, context=8)
    assert {part.name: part.bytes for part in parts}["activations"] == 128_256 * 6


def test_the_paged_cache_gets_its_share_of_what_is_free() -> None:
    spec = spec_of({"model_type": "llama"})
    budget = memory.kv_budget(device_bytes=24 * GIB, free_bytes=24 * GIB, weights_bytes=14 * GIB, parts=(),
                              serving=Serving(cache_implementation="paged"), version=None, spec=spec)  # fmt: skip
    assert budget == 9 * GIB
    with pytest.raises(UsageError, match="cb-max-memory-percent"):
        memory.kv_budget(device_bytes=24 * GIB, free_bytes=24 * GIB, weights_bytes=14 * GIB, parts=(),
                         serving=Serving(cache_implementation="paged", utilization=1.5), version=None, spec=spec)  # fmt: skip


def test_widths_that_are_not_known_are_refused() -> None:
    spec = spec_of({"model_type": "llama"}).replace(config={})
    with pytest.raises(ConfigError, match="width of its layers"):
        widths(spec)
    with pytest.raises(ConfigError, match="vocab_size"):
        widths(spec_of({"model_type": "llama"}).replace(vocab_size=None))
