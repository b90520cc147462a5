"""`--engine llama.cpp@bNNNN` against what those builds' own libraries logged."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from conftest import DATA, Outcome
from libllama import planned, spec_of

from kvctl.engines import engine
from kvctl.errors import ConfigError, UsageError

Json = dict[str, Any]


@cache
def oracle() -> Json:
    found: Json = json.loads((DATA / "llama_cpp_builds.json").read_text())
    return found


CASES = [(build, name) for build, models in json.loads((DATA / "llama_cpp_builds.json").read_text())["logs"].items() for name in models]  # fmt: skip


@pytest.mark.parametrize(("build", "name"), CASES)
def test_builds_log_what_their_rules_say(build: str, name: str) -> None:
    spec = spec_of(**oracle()["models"][name])
    for context, lines in zip(oracle()["contexts"], oracle()["logs"][build][name], strict=True):
        if lines[0].startswith("refused"):
            with pytest.raises(UsageError):
                planned(spec, context, version=build)
        else:
            assert list(planned(spec, context, version=build).log) == lines, context


def test_every_case_is_there() -> None:
    assert len(CASES) == 92
    assert len(oracle()["contexts"]) == 10


def test_builds_between_measured_ones_say_so_where_rules_changed() -> None:
    spec = spec_of(**oracle()["models"]["llama"])
    assert planned(spec, {"n_ctx": 1024}, version="b8200").warnings == ()
    assert planned(spec, {"n_ctx": 1024}, version="8200").warnings == ()
    (warning,) = planned(spec, {"n_ctx": 1024}, version="b8000").warnings
    assert warning == "build b8000 by the rules of b7698; some of them changed by b8095"
    assert planned(spec, {"n_ctx": 1024}, version="b11434").warnings == ()
    (warning,) = planned(spec, {"n_ctx": 1024}, version="b99999").warnings
    assert warning == "estimated: build b99999 by the rules of b11434, the newest that was measured"


@pytest.mark.parametrize("version", ["b4752", "b1", "0.6", "newest", "b", "b99999999"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(UsageError):
        engine(f"llama.cpp@{version}")


def test_a_build_may_be_a_number() -> None:
    assert engine("llama.cpp@6431") == engine("llama.cpp@b6431")


def test_a_build_is_asked_for_by_its_tag(kvctl: Any) -> None:
    # DeepSeek-V3 in 2025: 61 layers of 576 and, once more, of 512 elements, in f16
    outcome: Outcome = kvctl(
        "size", "DeepSeek-V3", "--ctx", "4096", "--engine", "llama.cpp@b6673", "-np", "1", "--json"
    )
    assert outcome.json["results"][0]["allocation"]["reserved_bytes"] == 4096 * 61 * (576 + 512) * 2
    assert outcome.json["results"][0]["engine"]["version"] == "b6673"


@pytest.mark.parametrize(("model", "build", "words"), [
    ("gemma3", "b5500", "between b4980 and b5552"), ("deepseek2", "b5500", "between b4980 and b5552"),
    ("deepseek2", "b4980", "no build this old"), ("lfm2", "b4980", "no hybrids in builds this old"),
])  # fmt: skip
def test_builds_whose_storage_is_not_known_are_refused(model: str, build: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(spec_of(**oracle()["models"][model]), {"n_ctx": 1024}, version=build)


@pytest.mark.parametrize(("build", "cells"), [("b5552", 1024 + 2048), ("b5554", 1024 + 512)])
def test_first_windows_have_room_for_a_logical_batch(kvctl: Any, build: str, cells: int) -> None:
    # gemma-3-27b: 62 layers of 16 heads, 8,192 B a cell; 10 of them hold all 32,768 tokens
    outcome: Outcome = kvctl(
        "size", "gemma-3-27b-it", "--ctx", "32k", "--engine", f"llama.cpp@{build}", "-np", "1", "--json"
    )
    allocation = outcome.json["results"][0]["allocation"]
    assert allocation["reserved_bytes"] == 8192 * (10 * 32768 + 52 * cells)
    assert f"llama_kv_cache_unified_iswa: creating     SWA KV cache, size = {cells} cells" in allocation["log"]
