"""The JSON contract: every output fits the schema that ships with the package."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome
from jsonschema import Draft202012Validator

import kvctl.families.compressor  # noqa: F401  (a kind of state of its own)
from kvctl.formats import CACHE_FORMATS
from kvctl.spec import LayerState

Run = Callable[..., Outcome]
Json = dict[str, Any]

COMMON = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "max_position_embeddings": 8192}

CONFIGS: dict[str, Json] = {
    "grouped": {"model_type": "llama", **COMMON, "num_key_value_heads": 2, "torch_dtype": "bfloat16"},
    "multi-head": {"model_type": "bloom", "hidden_size": 256, "n_layer": 3, "n_head": 8},
    "windowed": {"model_type": "mistral", **COMMON, "num_key_value_heads": 2, "sliding_window": 512},
    "mixed windows": {
        "model_type": "gemma3_text", **COMMON, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 128,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "chunked": {
        "model_type": "llama4_text", **COMMON, "num_key_value_heads": 2, "head_dim": 32, "attention_chunk_size": 512,
        "layer_types": ["chunked_attention", "chunked_attention", "chunked_attention", "full_attention"],
    },
    "shared": {
        "model_type": "gemma3n_text", **COMMON, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
    },
    "latent": {
        "model_type": "deepseek_v3", **COMMON, "num_key_value_heads": 8, "kv_lora_rank": 64, "q_lora_rank": 96,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    },
    "hybrid": {
        "model_type": "qwen3_next", **COMMON, "num_key_value_heads": 2, "head_dim": 32,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    },
    "recurrent": {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "conv_kernel": 4},
    "encoder-decoder": {
        "model_type": "t5", "d_model": 64, "d_kv": 16, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 3,
    },
    "audio": {
        "model_type": "whisper", "d_model": 64, "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4,
        "encoder_attention_heads": 4, "max_source_positions": 1500, "max_target_positions": 448,
    },
    "no cache": {"model_type": "bert", **COMMON},
}  # fmt: skip

ONE_LAYER = "size --layers 1 --kv-heads 1 --head-dim 8 --ctx 1 --json"

OPTIONS: list[list[str]] = [
    ["--ctx", "0"],
    ["--ctx", "1k,3000", "--per-layer"],
    ["--explain", "--sequences", "3", "--beams", "2"],
    ["--ctx", "777", "--engine", "transformers", "--per-layer", "--explain"],
    ["--ctx", "1m", "--kv-dtype", "q8_0", "--dtype", "fp16"],
    ["--ctx", "4k", "--k-dtype", "q8_0", "--v-dtype", "nvfp4", "--image-tokens", "64", "--audio-tokens", "0"],
]


def load(name: str) -> Json:
    document: Json = json.loads(resources.files("kvctl.data").joinpath("schemas", name).read_text("utf-8"))
    return document


SIZE = Draft202012Validator(load("kvctl.size-1.json"))
MODELS = Draft202012Validator(load("kvctl.models-1.json"))


def check(document: Json) -> list[Json]:
    """The results of a document that fits, with sums that agree."""
    SIZE.validate(document)
    results: list[Json] = document["results"]
    for result in results:
        assert sum(row["bytes"] for row in result["layers"]) == result["kv_bytes"]
        if "per_layer" in result:
            assert sum(layer["bytes"] for layer in result["per_layer"]) == result["kv_bytes"]
            assert [layer["index"] for layer in result["per_layer"]] == list(range(len(result["per_layer"])))
    return results


def undescribed(value: Any, schema: Json, path: str = "") -> Iterator[str]:
    """Keys in an output that the schema does not explain."""
    if isinstance(value, dict) and "properties" in schema:
        for key, inner in value.items():
            known = schema["properties"].get(key, {})
            if not known.get("description"):
                yield f"{path}.{key}"
            yield from undescribed(inner, known, f"{path}.{key}")
    if isinstance(value, list):
        for inner in value:
            yield from undescribed(inner, schema.get("items", {}), path + "[]")


@pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(kvctl: Run, name: str, options: list[str]) -> None:
    outcome = kvctl("size", "-", "--json", *options, stdin=json.dumps(CONFIGS[name]))
    assert outcome.code == 0, outcome.err
    assert check(outcome.json)
    assert not list(undescribed(outcome.json, SIZE.schema))


def test_the_configurations_cover_the_kinds(kvctl: Run) -> None:
    seen = set()
    for config in CONFIGS.values():
        results = check(kvctl("size", "-", "--json", "--ctx", "4k", stdin=json.dumps(config)).json)
        seen |= {row["kind"] for row in results[0]["layers"]}
    assert seen >= {
        "full_attention", "sliding_window", "chunked_attention", "latent_attention", "recurrent_state", "conv_state",
        "cross_attention", "shared", "none",
    }  # fmt: skip


@pytest.mark.parametrize("fmt", [fmt.name for fmt in CACHE_FORMATS])
def test_every_cache_format(kvctl: Run, fmt: str) -> None:
    outcome = kvctl(*f"size --layers 3 --kv-heads 2 --head-dim 80 --ctx 1k --kv-dtype {fmt} --json".split())
    (result,) = check(outcome.json)
    assert result["k_dtype"] == result["v_dtype"] == fmt
    assert result["weights"] is None


def test_overrides_are_in_the_output(kvctl: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["grouped"]))
    (result,) = check(kvctl("size", str(tmp_path), "--ctx", "1k", "--set", "num_key_value_heads=8", "--json").json)
    assert result["model"]["overrides"] == {"num_key_value_heads": 8}


def test_catalogue_models(kvctl: Run) -> None:
    models = ("Qwen3-32B", "DeepSeek-V3", "gpt-oss-120b")
    outcome = kvctl("size", *models, "--source", "catalogue", "--per-layer", "--explain", "--json")
    results = check(outcome.json)
    assert any(result["weights"] for result in results)
    assert not list(undescribed(outcome.json, SIZE.schema))


@pytest.mark.parametrize("pattern", [[], ["qwen3*"]], ids=str)
def test_list_models(kvctl: Run, pattern: list[str]) -> None:
    outcome = kvctl("size", "--list-models", *pattern, "--json")
    assert outcome.code == 0, outcome.err
    MODELS.validate(outcome.json)
    assert not list(undescribed(outcome.json, MODELS.schema))


def test_a_list_without_a_match_says_so(kvctl: Run) -> None:
    outcome = kvctl("size", "--list-models", "no such model", "--json")
    assert (outcome.code, outcome.out) == (1, "")
    assert "matches 'no such model'" in outcome.err


def test_as_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvctl", "size", "-", "--ctx", "4k", "--json"],
        input=json.dumps(CONFIGS["hybrid"]),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert len(check(json.loads(done.stdout))) == 1


# -- the schemas themselves --------------------------------------------------------------------


def test_schemas_are_valid_and_named_after_what_they_describe() -> None:
    for name in ("kvctl.size", "kvctl.models", "kvctl.gpus", "kvctl.profile"):
        schema = load(f"{name}-1.json")
        Draft202012Validator.check_schema(schema)
        assert schema["properties"]["schema"]["const"] == f"{name}/1"


def test_required_keys_are_the_contract() -> None:
    result = SIZE.schema["properties"]["results"]["items"]
    inner = result["properties"]
    assert set(SIZE.schema["required"]) == {"schema", "kvctl_version", "results"}
    assert set(result["required"]) == {
        "model", "engine", "context", "sequences", "k_dtype", "v_dtype", "kv_bytes", "kv_bytes_per_token",
        "kv_bytes_fixed", "layers", "weights",
    }  # fmt: skip
    assert set(inner["model"]["required"]) == {"id", "model_type", "source", "revision", "overrides", "notes"}
    assert set(inner["engine"]["required"]) == {"name", "version"}
    assert set(inner["layers"]["items"]["required"]) == {"kind", "count", "tokens", "bytes"}
    assert set(inner["weights"]["required"]) == {"bytes", "parameters", "source"}


def test_kinds_are_those_of_the_code() -> None:
    def kinds(cls: type[LayerState]) -> set[str]:
        own = {cls.kind} if "kind" in vars(cls) else set()
        return own.union(*map(kinds, cls.__subclasses__()))

    layers = SIZE.schema["properties"]["results"]["items"]["properties"]["layers"]["items"]
    assert set(layers["properties"]["kind"]["enum"]) == kinds(LayerState)


@pytest.mark.parametrize(
    "damage",
    [
        {"kv_bytes": -1},
        {"kv_bytes": 1.5},
        {"kv_bytes": "1"},
        {"context": None},
        {"layers": [{"kind": "attention", "count": 1, "tokens": 1, "bytes": 1}]},
        {"kv_bytes_per_token_exact": "2.5"},
        {"weights": {}},
        {"model": {"id": "x"}},
    ],
    ids=str,
)
def test_the_schema_refuses(kvctl: Run, damage: Json) -> None:
    document = kvctl(*ONE_LAYER.split()).json
    assert SIZE.is_valid(document)
    document["results"][0] |= damage
    assert not SIZE.is_valid(document)


def test_later_keys_are_welcome(kvctl: Run) -> None:
    document = kvctl(*ONE_LAYER.split()).json
    document["results"][0]["new"] = document["new"] = 1
    SIZE.validate(document)
