"""Tensors from headers: a folder's, and the Hub's by ranged reads (a Hub on the loopback interface)."""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub

from kvctl.allocation import Serving
from kvctl.engines import engine
from kvctl.errors import ConfigError
from kvctl.model import build_spec
from kvctl.parameters import parameters
from kvctl.size import SizePlan, needs_tensors, size
from kvctl.sources import Found, resolve, safetensors
from kvctl.sources import tensors as source
from kvctl.spec import ModelSpec, Provenance
from kvctl.tensors import Tensor, grouped, stored
from kvctl.weight_formats import convert, weight_format

pytestmark = pytest.mark.usefixtures("surroundings")

TOKEN = "hf_" + "Secret" * 5
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def files(tensors: tuple[Tensor, ...], count: int = 1, padding: int = 0) -> dict[str, bytes]:
    """Safetensors files without their data, and their index where there are several."""
    names = (
        [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else ["model.safetensors"]
    )
    headers: list[dict[str, Any]] = [{"__metadata__": {"format": "pt", "note": "x" * padding}} for _ in names]
    ends, where = [0] * count, {}
    number = 0
    for t in tensors:
        for layer in t.layers or (0,):
            for expert in range(t.each):
                name = t.name.replace(".N.", f".{layer}.", 1).replace(".N.", f".{expert}.", 1)
                at = number % count
                number += 1
                offsets = [ends[at], ends[at] + t.bytes]
                headers[at][name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": offsets}
                ends[at] = offsets[1]
                where[name] = names[at]
    out = {}
    for name, header in zip(names, headers, strict=True):
        data = json.dumps(header).encode()
        out[name] = struct.pack("<Q", len(data)) + data
    if count > 1:
        out[safetensors.INDEX] = json.dumps({"metadata": {"total_size": sum(ends)}, "weight_map": where}).encode()
    return out


def spec_of(name: str, **options: Any) -> ModelSpec:
    return source.attach(build_spec(resolve(name, **options)))


def by_name(tensors: tuple[Tensor, ...] | None) -> dict[str, Tensor]:
    assert tensors is not None
    return {t.name: t for t in tensors}


@pytest.mark.parametrize("count", [1, 3])
def test_folder(tmp_path: Path, count: int) -> None:
    mixtral = {**CONFIG, "model_type": "mixtral", "num_local_experts": 4}
    expected = parameters(mixtral)
    (tmp_path / "config.json").write_text(json.dumps(mixtral))
    for name, data in files(expected, count).items():
        (tmp_path / name).write_bytes(data)
    for place in (".", "config.json"):
        assert by_name(spec_of(place if place != "." else str(tmp_path)).tensors) == by_name(expected)


def test_folder_without_all_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert spec_of(str(tmp_path)).tensors is None
    written = files(parameters(CONFIG), 3)
    for name, data in list(written.items())[1:]:
        (tmp_path / name).write_bytes(data)
    assert spec_of(str(tmp_path)).tensors is None


def test_what_ifs_and_other_sources_have_no_tensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name, data in files(parameters(CONFIG)).items():
        (tmp_path / name).write_bytes(data)
    spec = build_spec(resolve(str(tmp_path)), {"num_hidden_layers": 2})
    assert source.attach(spec).tensors is None
    spec = build_spec(Found("x", CONFIG, Provenance("catalogue", "x")))
    assert source.attach(spec) is spec


@pytest.mark.parametrize(
    "header",
    [
        b"[1]", b"{", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "X", "shape": [2], "data_offsets": [4, 0]}}',
        b'{"a": {"dtype": "F32", "shape": 5, "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [' + b"1," * 100 + b'1], "data_offsets": [0, 4]}}',
        b"[" * 100_000,
    ],
)  # fmt: skip
def test_hostile_headers(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    spec = spec_of(str(tmp_path))
    assert spec.tensors is None
    assert "tensors unknown: model.safetensors has no valid safetensors header" in spec.notes


def test_too_many_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="over 200,000 different tensors"):
        grouped((f"t{i}", "F32", (1,), 4) for i in range(200_002))


def test_equal_tensors_are_one_record() -> None:
    named = [(f"model.layers.{layer}.mlp.experts.{expert}.w1.weight", "BF16", (4, 8), 64)
             for layer in (1, 2) for expert in range(3)]  # fmt: skip
    (record,) = grouped([*named])
    assert record == Tensor("model.layers.N.mlp.experts.N.w1.weight", "BF16", (4, 8), 64, (1, 2), 3)
    assert (record.count, record.total, record.elements) == (6, 384, 32)
    assert stored((3, 5), "F4") == 8  # 60 bits


# -- the Hub ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4])
def test_hub(hub: FakeHub, count: int) -> None:
    expected = parameters(CONFIG)
    hub.add("org/model", CONFIG, files=files(expected, count))
    before = len(hub.requests)
    spec = spec_of("org/model")
    assert by_name(spec.tensors) == by_name(expected)
    asked = [r for r in hub.requests[before:] if r.path.endswith(".safetensors")]
    assert len(asked) == count
    assert all(r.headers["range"] == "bytes=0-65535" for r in asked)
    # Every file at the commit that answered for config.json.
    assert all(f"/resolve/{hub.repositories['org/model'].commit}/" in r.path for r in asked)


def test_hub_reads_headers_and_no_data(hub: FakeHub) -> None:
    # A header of 200,000 bytes takes a second range; of the data, at most the rest of the first is sent.
    ((name, data),) = files(parameters(CONFIG), padding=200_000).items()
    hub.add("org/model", CONFIG, files={name: data + bytes(5_000_000)})
    spec = build_spec(resolve("org/model"))
    sent = hub.sent
    assert source.attach(spec).tensors is not None
    assert hub.sent - sent < 210_000
    ranges = [r.headers["range"] for r in hub.requests if r.path.endswith(name)]
    length = len(data)
    assert ranges == ["bytes=0-65535", f"bytes=65536-{length - 1}"]


def test_hub_keeps_the_token_to_itself(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.tokens.add(TOKEN)
    written = files(parameters(CONFIG))
    repository = hub.add("org/model", CONFIG, files=written)
    spec = build_spec(resolve("org/model"))
    with FakeHub() as storage:
        hub.storage = storage
        storage.add("org/model", CONFIG, files=written, commit=repository.commit,
                    revisions={repository.commit: repository.commit})  # fmt: skip
        spec = source.attach(spec)
        assert spec.tensors is not None, spec.notes
        assert storage.requests
        assert {request.token for request in storage.requests} == {None}
        assert all("range" in request.headers for request in storage.requests)
    assert TOKEN not in repr(spec)


def test_hub_without_ranges(hub: FakeHub) -> None:
    hub.add("org/model", CONFIG, files=files(parameters(CONFIG)))
    spec = build_spec(resolve("org/model"))
    hub.ranges = False
    spec = source.attach(spec)
    assert spec.tensors is None
    assert any("does not answer parts of files" in note for note in spec.notes)


def test_hub_that_refuses(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = hub.add("org/model", CONFIG, files=files(parameters(CONFIG)))
    spec = build_spec(resolve("org/model"))
    repository.gated = True
    assert "gated" in source.attach(spec).notes[-1]
    repository.gated = False
    del repository.files["model.safetensors"]
    assert source.attach(spec).notes[-1] == "tensors unknown: org/model has no file model.safetensors"
    hub.failures = [(503, {}), (503, {})]
    assert "answers 503" in source.attach(spec).notes[-1]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in list(sys.modules):
        if name.partition(".")[0] == "huggingface_hub":
            monkeypatch.delitem(sys.modules, name)
    assert "HF_HUB_OFFLINE is set" in source.attach(spec).notes[-1]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 500) + b"{}",
        struct.pack("<Q", 2) + b"[]" + b"x" * 9,
    ],
)
def test_hub_hostile_files(hub: FakeHub, data: bytes) -> None:
    hub.add("org/model", CONFIG, files={"model.safetensors": data})
    spec = build_spec(resolve("org/model"))
    start = time.monotonic()
    spec = source.attach(spec)
    assert time.monotonic() - start < 5
    assert spec.tensors is None
    assert spec.notes[-1].startswith("tensors unknown: ")
    assert "\n" not in spec.notes[-1]


def test_hub_too_many_files(hub: FakeHub) -> None:
    index = {"weight_map": {f"t{i}": f"model-{i}.safetensors" for i in range(1_001)}}
    hub.add("org/model", CONFIG, files={safetensors.INDEX: json.dumps(index).encode()})
    assert "has 1,001 files of weights, and kvctl reads 1,000" in spec_of("org/model").notes[-1]
    bad = {"weight_map": {"t": "../../etc/passwd"}}
    hub.add("org/other", CONFIG, files={safetensors.INDEX: json.dumps(bad).encode()})
    assert "names no files" in spec_of("org/other").notes[-1]


# -- what is made of them --------------------------------------------------------------------------


def weighed(spec: ModelSpec, **options: Any) -> Any:
    plan = SizePlan(engine("vllm"), contexts=(64,), **options)
    assert needs_tensors(plan)
    return size(source.attach(spec), 64, plan)


def in_folder(folder: Path, config: dict[str, Any], tensors: tuple[Tensor, ...]) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    for name, data in files(tensors).items():
        # Sparse: as long as the real file, so that its header is believed.
        with open(folder / name, "wb") as file:
            file.write(data)
            file.truncate(len(data) + sum(t.total for t in tensors))
    return build_spec(resolve(str(folder)))


def test_ranks_from_headers(tmp_path: Path) -> None:
    result = weighed(in_folder(tmp_path, CONFIG, parameters(CONFIG)), serving=Serving(tensor_parallel=2))
    weights = result.to_dict()["weights"]
    assert weights["source"] == "safetensors headers"
    assert weights["bytes"] == sum(t.total for t in parameters(CONFIG))
    # Half of the linear layers, whole norms, 64 of the vocabulary's 128 padded rows (as in test_weights.py).
    half = 3 * ((2 * 4096 + 2 * 1024 + 3 * 6144) // 2 + 2 * 64) + 64 + 2 * 64 * 64
    assert weights["per_rank"] == [2 * half] * 2


def test_float32_weights_are_loaded_in_the_dtype_of_the_engine(tmp_path: Path) -> None:
    config = {**CONFIG, "dtype": "float32"}
    result = weighed(in_folder(tmp_path, config, parameters(config, "F32")), serving=Serving(tensor_parallel=2))
    weights = result.to_dict()["weights"]
    assert weights["bytes"] == 2 * sum(t.total for t in parameters(CONFIG))
    half = 3 * ((2 * 4096 + 2 * 1024 + 3 * 6144) // 2 + 2 * 64) + 64 + 2 * 64 * 64
    assert weights["per_rank"] == [2 * half] * 2


def test_ranks_of_a_quantised_checkpoint(tmp_path: Path) -> None:
    wide = {**CONFIG, "hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
    facts = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    config = {**wide, "dtype": "float16", "quantization_config": facts}
    tensors, _ = convert(parameters(wide), weight_format("awq"))
    result = weighed(in_folder(tmp_path, config, tensors), serving=Serving(tensor_parallel=2))
    weights = result.to_dict()["weights"]
    # n weights of 4 bits, with a 16-bit scale and a 4-bit zero for 128 of them; all of it halves.
    count = 3 * (2 * 256 * 256 + 2 * 64 * 256 + 3 * 512 * 256)
    packed = count // 2 + count // 128 * 2 + count // 256
    rest = 2 * (3 * 2 * 256 + 256)
    assert weights["bytes"] == packed + rest + 2 * 2 * 100 * 256
    assert weights["per_rank"] == [packed // 2 + rest + 2 * 2 * 64 * 256] * 2
    assert weights["scheme"] == "awq, 4 bits in groups of 128"
    # A what-if starts from the configuration: what is quantised cannot be taken for the original.
    other = weighed(in_folder(tmp_path, config, tensors), weights_dtype="fp16").to_dict()["weights"]
    assert other["bytes"] == sum(t.total for t in parameters(wide))


def test_what_if_from_headers(tmp_path: Path) -> None:
    # A drafting layer in the file is not converted, and not counted.
    extra = Tensor("model.layers.N.mlp.up_proj.weight", "BF16", (96, 64), 2 * 96 * 64, (3,))
    spec = in_folder(tmp_path, CONFIG, (*parameters(CONFIG), extra))
    weights = weighed(spec, weights_dtype="fp8").to_dict()["weights"]
    linear = 3 * (2 * 4096 + 2 * 1024 + 3 * 6144)
    assert weights["bytes"] == linear + 4 * 21 + 2 * (3 * 2 * 64 + 64 + 2 * 100 * 64)
    assert weights["source"] == "what if, from its tensors"
