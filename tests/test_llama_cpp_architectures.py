"""Made-up models of every GGUF architecture: what libllama 0.5 logged of their caches, line by line.

Captured by tests/libllama.py from the npm package @node-llama-cpp/linux-x64 3.22.1 for the models and contexts of
tests/gguf_models.py; tests/test_llama_cpp_live.py asks the library again.
"""

from __future__ import annotations

from typing import Any

import pytest
from conftest import measured_cases
from libllama import planned, spec_of

from kvctl.errors import UsageError
from kvctl.sources.gguf_config import ARCHITECTURES

CASES = measured_cases("llama_cpp_architectures.jsonl.gz")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["architecture"])
def test_plans_are_what_the_library_logged(case: dict[str, Any]) -> None:
    spec = spec_of(case["architecture"], case["metadata"])
    for context, lines in case["logs"]:
        if lines == ["refused"]:
            with pytest.raises(UsageError):
                planned(spec, context)
        else:
            assert list(planned(spec, context).log) == lines, context


def test_every_architecture_is_there() -> None:
    assert set(ARCHITECTURES) - {case["architecture"] for case in CASES} == {"laguna", "rwkv6"}
