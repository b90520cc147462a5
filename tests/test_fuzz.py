"""Mutated real configurations end in a clean answer or one clean line, never in anything else."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from conftest import measured_cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvctl.engines import ENGINES
from kvctl.errors import KvctlError
from kvctl.model import build_spec
from kvctl.size import SizePlan, contexts_for, size
from kvctl.sources import Found, catalogue
from kvctl.spec import Provenance

BASES = [case["config"] for case in measured_cases("transformers.jsonl")]
BASES += [dict(catalogue.find(name).config) for name in catalogue.names()]

WEIRD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [-1, 0, 1, 2, 7, 10_001, 2**31, 2**63, 10**400, -(10**400), 0.5, -0.0, 1e308, float("inf"), float("nan")]
    ),
    st.sampled_from(
        ["", "auto", "full_attention", "LLG", "M*E-", "x" * 5000, "\x1b[2J", "\u202e", "../../etc/passwd", "{}"]
    ),
    st.lists(
        st.one_of(st.none(), st.integers(-5, 5), st.text(max_size=3), st.lists(st.integers(), max_size=2)), max_size=5
    ),
    st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.integers(), st.text(max_size=3)), max_size=3),
)


def paths(config: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    out = []
    for key, value in config.items():
        out.append((*prefix, key))
        if isinstance(value, dict) and len(prefix) < 2:
            out += paths(value, (*prefix, key))
    return out


def put(config: dict[str, Any], path: tuple[str, ...], value: Any, *, delete: bool) -> None:
    for key in path[:-1]:
        inner = config.get(key)
        if not isinstance(inner, dict):
            return
        config = inner
    if delete:
        config.pop(path[-1], None)
    else:
        config[path[-1]] = value


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    config: dict[str, Any] = copy.deepcopy(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(1, 3))):
        every = paths(config)
        if not every:
            break
        path = draw(st.sampled_from(every))
        put(config, path, draw(WEIRD), delete=draw(st.booleans()))
    if draw(st.integers(0, 9)) == 0:
        config["model_type"] = draw(st.one_of(WEIRD, st.sampled_from([base.get("model_type", "") for base in BASES])))
    return config


def outcome_of(config: dict[str, Any]) -> KvctlError | None:
    """The clean error, if any; everything else is checked here or raised."""
    try:
        spec = build_spec(Found("fuzz", config, Provenance("local", "fuzz")))
        for engine in ENGINES:
            plan = SizePlan(engine, explain=True, per_layer=True)
            for context in contexts_for(spec, plan):
                result = size(spec, context, plan)
                assert result.kv_bytes >= 0
                assert sum(row.bytes for row in result.layers) == result.kv_bytes
                assert result.kv_bytes_fixed >= 0
                assert result.kv_bytes_per_token >= 0
                json.dumps(result.to_dict())
    except KvctlError as err:
        return err
    return None


@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(config=mutated())
def test_only_clean_answers_or_clean_errors(config: dict[str, Any]) -> None:
    error = outcome_of(config)
    if error is not None:
        assert error.message.strip()
        assert len(error.message) < 1000, error.message[:2000]


@pytest.mark.parametrize(
    "text",
    ["", " ", "{", "[]", "null", "3", '"x"', "{}", '{"model_type": null}', '{"model_type": []}', '{"a": NaN}',
     "<!DOCTYPE html><html>", "\ufeff{}", "[" * 100_000, '{"a":' * 50_000, '{"num_hidden_layers": ' + "9" * 5000 + "}",
     "\x00\x01\x02", "GGUF\x03\x00\x00\x00"],
)  # fmt: skip
def test_hostile_text_is_one_line_and_a_hint(kvctl: Any, text: str) -> None:
    outcome = kvctl("size", "-", stdin=text)
    assert outcome.code in (1, 2)
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert lines[0].startswith("kvctl: error: ")
    assert len(lines) <= 2, outcome.err
    assert "Traceback" not in outcome.err
    assert "internal error" not in outcome.err


def test_layers_that_are_no_numbers() -> None:
    base = next(config for config in BASES if config["model_type"] == "qwen4_exp_text")
    for entry in ("", "1", None, 1.5, True):
        error = outcome_of(base | {"ple_layer_ids": [entry]})
        assert error is not None
        assert "ple_layer_ids holds" in error.message
        assert "not a whole number" in error.message
