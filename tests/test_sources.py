"""Every source of configurations: what it finds, and what it says when it does not."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_hub import FakeHub
from hypothesis import given
from hypothesis import strategies as st

import kvctl.sources
from kvctl.errors import ConfigError, ExitCode, KvctlError, SourceError, UsageError
from kvctl.sources import Found, jsonfile, resolve
from kvctl.spec import Provenance, Weights

pytestmark = pytest.mark.usefixtures("surroundings")

TOKEN = "hf_" + "Secret" * 5
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
KNOWN = "org/Known-7B"
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def catalogue(surroundings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue of one model, so that these tests do not depend on the bundled one."""
    stub = ModuleType("kvctl.sources.catalogue")
    found = Found(KNOWN, LLAMA, Provenance("catalogue", "test"), Weights(14, 7, "catalogue"))
    vars(stub).update(
        has=lambda name: name == KNOWN,
        names=lambda: [KNOWN],
        find=lambda name: found,
        full_name=lambda name: KNOWN if name == KNOWN.partition("/")[2] else name,
        nearest=lambda name, n: [KNOWN][:n] if "nown" in name else [],
    )
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.setattr(kvctl.sources, "catalogue", stub, raising=False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def refuse(name: str, kind: type[KvctlError] = SourceError, **options: Any) -> KvctlError:
    """The error for a name: one line, a hint of one line, and no secret in any of its texts."""
    with pytest.raises(KvctlError) as caught:
        resolve(name, **options)
    error = caught.value
    assert type(error) is kind, error
    assert error.exit_code == (ExitCode.USAGE if kind is UsageError else ExitCode.FAILED)
    for text in (error.message, error.hint or ""):
        assert "\n" not in text
        assert TOKEN not in text
        assert "secret" not in text
    assert len(error.message) < 400, error.message
    assert error.hint, error.message
    assert error.__cause__ is None
    return error


def answers(found: Found, source: str, config: Mapping[str, Any] = LLAMA) -> Found:
    """Check where an answer is from, and that it holds no secret."""
    assert found.config == config
    assert found.provenance.source == source
    assert TOKEN not in repr(found)
    assert "secret" not in repr(found)
    return found


def tensors(path: Path, **shapes: tuple[str, list[int], int]) -> None:
    """Write a safetensors header: name=(dtype, shape, bytes). The data is left out."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, size) in shapes.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    data = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data)


# JSON files


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"[1, 2]", "holds a list, not a JSON object {…}"),
        (b"12", "holds a number, not a JSON object {…}"),
        (b"null", "holds null, not a JSON object {…}"),
        (b'"text"', "holds a string, not a JSON object {…}"),
        (b'{"a": 1,\n "b": [1, 2', "is cut short: its JSON ends at line 2, column 11"),
        (b'{"a": "unfinished', "is cut short: its JSON ends at line 1, column 17"),
        (b'{"a": tru', "is cut short: its JSON ends at line 1, column 9"),
        (b'{"a": 1,}', "is not valid JSON: "),
        (b"{'a': 1}", "is not valid JSON: expecting property name enclosed in double quotes at line 1, column 2"),
        (b'{"a": 1} {"b": 2}', "is not valid JSON: extra data at line 1, column 10"),
        (b'{"a": "\xe9"}', "is not UTF-8 text (byte 7)"),
        ('{"a": 1}'.encode("utf-16"), "is UTF-16 text, not UTF-8"),
        (b"\n<!DOCTYPE html><html>Sign in</html>", "looks like a web page, not JSON"),
        (b"GGUF\x03\0\0\0", "is too short for a GGUF header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "is a git-lfs pointer"),
        (b"PK\x03\x04rest", "is a zip archive"),
        (struct.pack("<Q", 2) + b"{}", "is a safetensors file (weights), not a configuration"),
        (b'{"a": ' + b"[" * 200_000, "is nested too deep to be a configuration"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "holds a whole number with thousands of digits"),
        (b'{"weight_map": {}}', "is an index of weights, not a configuration"),
        (b'{"peft_type": "LORA", "base_model_name_or_path": "org/base"}', "describes an adapter, not a model"),
        (b'{"_diffusers_version": "0.30"}', "describes a part of a diffusers pipeline"),
        (b'{"dim": 4096, "n_layers": 32, "n_heads": 32}', "is in the format of params.json"),
    ],
)
def test_files_that_are_no_configuration(data: bytes, message: str) -> None:
    Path("some.json").write_bytes(data)
    error = refuse("some.json", ConfigError)
    assert error.message.startswith(f"some.json {message}")


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + json.dumps(LLAMA).encode(),
        json.dumps({"model_type": "first"}).encode()[:-1] + b"," + json.dumps(LLAMA).encode()[1:],
    ],
    ids=["byte order mark", "duplicate keys"],
)
def test_files_that_pass(data: bytes) -> None:
    Path("some.json").write_bytes(data)
    assert answers(resolve("some.json"), "local").id == "some.json"


@given(st.binary(max_size=80) | st.text(max_size=40).map(lambda text: ('{"a": ' + text).encode("utf-8", "replace")))
def test_any_bytes_are_an_object_or_a_clean_error(data: bytes) -> None:
    error: ConfigError | None = None
    try:
        assert isinstance(jsonfile.parse(data, "some.json"), dict)
    except ConfigError as caught:
        error = caught
    assert error is None or (error.hint and "\n" not in error.message)


def test_infinity_passes() -> None:
    # Published configurations have it: "time_step_limit": [0.0, Infinity].
    Path("some.json").write_text('{"time_step_limit": [0.0, Infinity], "x": NaN}')
    assert resolve("some.json").config["time_step_limit"] == [0.0, float("inf")]


def test_a_file_of_200_mb_fails_at_once() -> None:
    with open("big.json", "wb") as file:
        file.write(b'{"a": "')
        file.truncate(200_000_000)
    start = time.perf_counter()
    error = refuse("big.json", ConfigError)
    assert time.perf_counter() - start < 1
    assert error.message == "big.json is too long for a configuration (200 MB): over 10 MB"


def test_names_with_control_characters_stay_on_one_line() -> None:
    assert refuse("./no\n\x1b[31msuch.json").message == r"./no\n\x1b[31msuch.json: no such file or folder"


# Paths


def test_missing_path() -> None:
    assert refuse("./nowhere").message == "./nowhere: no such file or folder"
    assert refuse("~nobody-here/x").message == "~nobody-here/x: no such file or folder"
    assert refuse("some/config.json").message == "some/config.json: no such file or folder"
    Path("file.json").write_text("{}")
    assert refuse("./file.json/config.json").message == "./file.json/config.json: no such file or folder"


def test_name_that_cannot_be_a_file() -> None:
    assert refuse("./" + "x" * 300).message.endswith("file name too long")
    assert refuse("./a\0b", UsageError).message == r"./a\x00b cannot be the name of a file"


def test_address_of_a_file() -> None:
    error = refuse("https://example.org/config.json")
    assert "is an address" in error.message
    assert "kvctl size -" in (error.hint or "")


def test_circle_of_links() -> None:
    Path("a").symlink_to("b")
    Path("b").symlink_to("a")
    assert "lead in a circle" in refuse("./a").message
    assert "lead in a circle" in refuse("./a/config.json").message
    # A link to the folder itself is a circle that does no harm.
    Path("config.json").write_text(json.dumps(LLAMA))
    Path("here").symlink_to(".")
    answers(resolve("./here/here/here"), "local")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file() -> None:
    path = Path("config.json")
    path.write_text("{}")
    path.chmod(0)
    assert refuse("./config.json").message.endswith("config.json: permission denied")


def test_unreadable_file_by_any_user(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("my.json").write_text("{}")

    def denied(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    assert refuse("./my.json").message == "my.json: permission denied"


def test_pipes_and_devices_do_not_block() -> None:
    os.mkfifo("pipe.json")
    assert refuse("./pipe.json").message == "pipe.json is a pipe, not a regular file"
    assert refuse("/dev/zero").message == "/dev/zero is a device, not a regular file"
    Path("folder").mkdir()
    os.mkfifo("folder/config.json")
    assert refuse("./folder").message == "folder/config.json is a pipe, not a regular file"


@pytest.mark.parametrize(
    ("files", "message", "hint"),
    [
        ([], "./m is empty", "a folder with a config.json"),
        (["README.md"], "./m has no config.json", "a folder with a config.json"),
        (["b.Q4_K_M.gguf", "a.gguf"], "./m has GGUF files (a.gguf) and no config.json", "give one of the files"),
        (
            ["model.safetensors"],
            "./m has weights (model.safetensors) and no config.json",
            "put the model's config.json",
        ),
        (["params.json", "consolidated.safetensors"], "./m has only params.json", "for transformers"),
        (["model_index.json"], "./m is a diffusers pipeline", "subfolder"),
        (["a/config.json", "b/config.json"], "./m has no config.json itself", "these do: m/a, m/b"),
    ],
)
def test_folder_without_config(files: list[str], message: str, hint: str) -> None:
    Path("m").mkdir()
    for name in files:
        Path("m", name).parent.mkdir(exist_ok=True)
        Path("m", name).write_bytes(b"")
    error = refuse("./m")
    assert error.message.startswith(message)
    assert hint in (error.hint or "")


def test_folder_of_an_adapter_names_the_base_model() -> None:
    Path("m").mkdir()
    Path("m/adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    error = refuse("./m")
    assert error.message == "./m is an adapter, not a model"
    assert error.hint == "the cache is its base model's: size org/base"


def test_folder_file_and_snapshot_are_one_model(tmp_path: Path) -> None:
    folder = tmp_path / "hf/hub/models--org--name/snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    found = answers(resolve(str(folder)), "local")
    assert (found.id, found.provenance.revision) == ("org/name", COMMIT)
    (tmp_path / "plain").symlink_to(folder)
    assert answers(resolve("./plain"), "local").id == "plain"
    assert answers(resolve("plain/config.json"), "local").id == "plain"
    os.chdir("plain")
    assert answers(resolve("."), "local").id


# Standard input


def feed(monkeypatch: pytest.MonkeyPatch, data: bytes) -> io.BytesIO:
    stream = io.BytesIO(data)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream))
    return stream


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, json.dumps(LLAMA).encode())
    assert answers(resolve("-"), "stdin").id == "stdin"
    feed(monkeypatch, b"")
    assert refuse("-", ConfigError).message == "standard input is empty"
    endless = feed(monkeypatch, b'{"a": "' + bytes(40_000_000))
    assert refuse("-", ConfigError).message.startswith("standard input is too long for a configuration: over 10 MB")
    assert endless.tell() == jsonfile.LIMIT + 1


def test_standard_input_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    master, terminal = os.openpty()
    with os.fdopen(master, "wb", buffering=0), os.fdopen(terminal, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        error = refuse("-", UsageError)
    assert error.hint == "pipe a config.json into it: kvctl size - < config.json"
    monkeypatch.setattr(sys, "stdin", None)
    assert refuse("-", UsageError).message == "standard input is closed"


# Weights


def model(**changes: Any) -> Path:
    folder = Path("m")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


def test_weights_from_headers() -> None:
    folder = model()
    tensors(folder / "model-00001-of-00002.safetensors", a=("BF16", [4, 8], 64), b=("F32", [2], 8))
    tensors(folder / "model-00002-of-00002.safetensors", c=("F8_E4M3", [10], 10), d=("F4", [3], 2), e=("I64", [], 8))
    # The same weights once more, in the layout of another library.
    tensors(folder / "consolidated.safetensors", a=("BF16", [4, 8], 64))
    weights = resolve("./m").weights
    assert weights is not None
    assert (weights.bytes, weights.parameters, weights.source) == (92, 32 + 2 + 10 + 3 + 1, "safetensors headers")


def test_packed_weights_have_bytes_and_no_parameters() -> None:
    tensors(model() / "model.safetensors", a=("I32", [100], 400), b=("F16", [10], 20))
    weights = resolve("./m").weights
    assert weights is not None
    assert (weights.bytes, weights.parameters) == (420, None)


# A layer of 64 inputs and 32 outputs, and a norm of 64: 2,112 parameters. The shapes are those that the tools write.
_NORM: dict[str, tuple[str, list[int], int]] = {"model.norm.weight": ("BF16", [64], 128)}
_LAYER = "model.layers.0.mlp.up_proj"
_PACKED: dict[str, tuple[dict[str, Any], dict[str, tuple[str, list[int], int]]]] = {
    "AutoAWQ": ({"quant_method": "awq", "bits": 4}, {
        "qweight": ("I32", [64, 4], 1024), "qzeros": ("I32", [2, 4], 32), "scales": ("F16", [2, 32], 128)}),
    "GPTQ": ({"quant_method": "gptq", "bits": 8}, {
        "qweight": ("I32", [16, 32], 2048), "qzeros": ("I32", [2, 8], 64), "scales": ("F16", [2, 32], 128), "g_idx": ("I32", [64], 256)}),
    "GPTQ of 3 bits": ({"quant_method": "gptq", "bits": 3}, {
        "qweight": ("I32", [6, 32], 768), "qzeros": ("I32", [2, 3], 24), "scales": ("F16", [2, 32], 128)}),
    "GPTQ without zero points": ({"quant_method": "gptq", "bits": 4}, {
        "qweight": ("I32", [8, 32], 1024), "scales": ("F16", [2, 32], 128)}),
    "bitsandbytes, 4 bits": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, {
        "weight": ("U8", [1024, 1], 1024), "weight.absmax": ("U8", [32], 32), "weight.quant_map": ("F32", [16], 64),
        "weight.nested_absmax": ("F32", [1], 4), "weight.nested_quant_map": ("F32", [256], 1024),
        "weight.quant_state.bitsandbytes__nf4": ("U8", [90], 90)}),
    "bitsandbytes, 8 bits": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {
        "weight": ("I8", [32, 64], 2048), "SCB": ("F32", [32], 128), "weight_format": ("U8", [], 1)}),
    "compressed-tensors, 4 bits": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}},
        {"weight_packed": ("I32", [32, 8], 1024), "weight_scale": ("BF16", [32, 2], 128), "weight_shape": ("I64", [2], 16)}),
    "compressed-tensors, FP8": ({"quant_method": "compressed-tensors"}, {
        "weight": ("F8_E4M3", [32, 64], 2048), "weight_scale": ("BF16", [32, 1], 64), "input_scale": ("BF16", [1], 2)}),
    "compressed-tensors, NVFP4": ({"quant_method": "compressed-tensors"}, {
        "weight_packed": ("U8", [32, 32], 1024), "weight_scale": ("F8_E4M3", [32, 4], 128), "weight_global_scale": ("F32", [1], 4),
        "input_global_scale": ("F32", [1], 4)}),
    "DeepSeek's FP8": ({"quant_method": "fp8"}, {
        "weight": ("F8_E4M3", [32, 64], 2048), "weight_scale_inv": ("F32", [1, 1], 4)}),
    "ModelOpt's NVFP4": ({"quant_algo": "NVFP4"}, {
        "weight": ("U8", [32, 32], 1024), "weight_scale": ("F8_E4M3", [32, 4], 128), "weight_scale_2": ("F32", [], 4),
        "input_scale": ("F32", [], 4)}),
    "OpenAI's MXFP4": ({"quant_method": "mxfp4"}, {
        "experts_blocks": ("U8", [1, 32, 2, 16], 1024), "experts_scales": ("U8", [1, 32, 2], 64)}),
    "only the cache": ({"quant_method": "compressed-tensors", "config_groups": {}}, {
        "weight": ("BF16", [32, 64], 4096), "k_scale": ("F32", [1], 4), "v_scale": ("F32", [1], 4)}),
}  # fmt: skip


@pytest.mark.parametrize("writer", _PACKED)
def test_parameters_are_counted_however_they_are_packed(writer: str) -> None:
    facts, layer = _PACKED[writer]
    stored = _NORM | {f"{_LAYER}.{name}": about for name, about in layer.items()}
    tensors(model(quantization_config=facts) / "model.safetensors", **stored)
    found = resolve("./m")
    assert found.weights is not None
    assert (found.weights.bytes, found.weights.parameters) == (sum(about[2] for about in stored.values()), 2112)
    assert not any("says nothing of quantization" in note for note in found.notes)


def test_packings_that_are_not_known_have_no_parameters() -> None:
    folder = model(quantization_config={"quant_method": "bitnet"})
    tensors(folder / "model.safetensors", **_NORM, **{f"{_LAYER}.weight": ("U8", [8, 64], 512)})
    weights = resolve("./m").weights
    assert weights is not None
    assert (weights.bytes, weights.parameters) == (640, None)


def test_whole_numbers_where_nothing_says_what_they_stand_for() -> None:
    folder = model()
    tensors(folder / "model.safetensors", **_NORM, **{f"{_LAYER}.weight": ("I8", [32, 64], 2048)})
    (note,) = resolve("./m").notes
    assert f"{_LAYER}.weight is of I8, and config.json says nothing of quantization" in note
    # Older ModelOpt says it in a file beside; masks that old checkpoints bring are no weights.
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W8A8_INT8"}}))
    assert not resolve("./m").notes
    (folder / "hf_quant_config.json").unlink()
    tensors(folder / "model.safetensors", **_NORM, **{"h.0.attn.bias": ("U8", [1, 1, 64, 64], 4096)})
    assert not resolve("./m").notes


def test_weights_from_the_index() -> None:
    folder = model()
    index: dict[str, Any] = {
        "metadata": {"total_size": 1000},
        "weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"},
    }
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    tensors(folder / "x-1.safetensors", a=("BF16", [4], 8))
    weights = resolve("./m").weights
    assert weights is not None
    assert (weights.bytes, weights.parameters, weights.source) == (1000, None, "safetensors index")
    tensors(folder / "x-2.safetensors", b=("BF16", [4], 8))
    tensors(folder / "other.safetensors", b=("BF16", [4], 8))
    weights = resolve("./m").weights
    assert weights is not None
    assert (weights.bytes, weights.parameters, weights.source) == (16, 8, "safetensors headers")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\x01",
        struct.pack("<Q", 50) + b"{}",
        struct.pack("<Q", 200_000_000) + b"{}",
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 5) + b"{\xff\xff\xff}",
        *(
            struct.pack("<Q", len(text)) + text
            for text in (
                b'{"a": 1}',
                b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 7]}}',
                b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
                b'{"a": {"dtype": "F32", "shape": "22", "data_offsets": [0, 8]}}',
                b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8]}}',
                b'{"a": ' + b"[" * 100_000,
            )
        ),
    ],
)
def test_malformed_header(header: bytes) -> None:
    (model() / "model.safetensors").write_bytes(header)
    found = answers(resolve("./m"), "local")
    assert found.weights is None
    assert found.notes == ("weights unknown: model.safetensors has no valid safetensors header",)


@pytest.mark.parametrize(
    "index",
    ["", "[]", "{}", '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": "x"}, "metadata": {"total_size": "1"}}'],
)
def test_malformed_index(index: str) -> None:
    (model() / "model.safetensors.index.json").write_text(index)
    found = answers(resolve("./m"), "local")
    assert found.weights is None
    assert found.notes[0].startswith("weights unknown: ")


# The Hub's cache


def cached(repo: str, commit: str = COMMIT, *, main: bool = True, config: str | None = None) -> Path:
    root = Path(os.environ["HF_HOME"], "hub", "models--" + repo.replace("/", "--"))
    folder = root / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA) if config is None else config)
    (root / "refs").mkdir(exist_ok=True)
    if main:
        (root / "refs/main").write_text(commit)
    return folder


def test_cache_comes_before_the_catalogue() -> None:
    tensors(cached(KNOWN) / "model.safetensors", a=("BF16", [4], 8))
    for name in (KNOWN, "Known-7B"):
        found = answers(resolve(name), "cache")
        assert (found.id, found.provenance.revision) == (KNOWN, COMMIT)
        assert found.weights is not None
        assert found.weights.bytes == 8
    assert answers(resolve(KNOWN, revision=COMMIT), "cache")
    assert resolve(KNOWN, source="catalogue").provenance.source == "catalogue"


def test_cache_without_weights() -> None:
    cached(KNOWN)
    assert resolve(KNOWN).weights == Weights(14, 7, "catalogue")
    cached("org/other")
    found = answers(resolve("org/other"), "cache")
    assert found.notes == ("weights unknown: no safetensors in the cached snapshot; --source hub asks the Hub",)


def test_cache_without_the_model() -> None:
    answers(resolve(KNOWN), "catalogue")
    assert "huggingface_hub" not in sys.modules
    assert refuse(KNOWN, source="cache").message == f"{KNOWN} is not in the Hub cache"
    cached(KNOWN, main=False)
    answers(resolve(KNOWN), "catalogue")
    cached("bert-base", config='{"cut')
    assert "is cut short" in refuse("bert-base", ConfigError).message


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HF_HUB_CACHE": "{0}/a", "HUGGINGFACE_HUB_CACHE": "{0}/b", "HF_HOME": "{0}/c"}, "a"),
        ({"HUGGINGFACE_HUB_CACHE": "{0}/b", "HF_HOME": "{0}/c"}, "b"),
        ({"HF_HOME": "$PLACE/c"}, "c/hub"),
        ({"XDG_CACHE_HOME": "{0}/d"}, "d/huggingface/hub"),
        ({"HOME": "{0}/e"}, "e/.cache/huggingface/hub"),
        ({"HOME": "{0}/e", "HF_HUB_CACHE": "~/f"}, "e/f"),
    ],
)
def test_cache_folder_is_the_clients(
    variables: dict[str, str], folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvctl.sources import cache

    monkeypatch.delenv("HF_HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("PLACE", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp_path))
    assert cache.hub_cache() == str(tmp_path / folder)
    assert cache.hub_cache() == cache.client().constants.HF_HUB_CACHE


# The Hub


def test_found(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("//", f"//user:{TOKEN}@"))
    hub.add(
        "org/new",
        LLAMA,
        files={"model.safetensors": 2_100, "pytorch_model.bin": 9_000},
        info={"safetensors": {"parameters": {"BF16": 1_000}, "total": 1_000}},
    )
    found = answers(resolve("org/new"), "hub")
    commit = hub.repositories["org/new"].commit
    assert found.provenance == Provenance("hub", f"{hub.url}/org/new/resolve/{commit}/config.json", commit)
    assert found.id == "org/new"
    assert found.weights is not None
    assert (found.weights.bytes, found.weights.parameters) == (2_000, 1_000)
    assert found.weights.source == "safetensors headers"
    assert found.notes == ()
    assert len(hub.requests) == 2
    # Now it is in the cache, as the client library sees it too.
    assert answers(resolve("org/new"), "cache").provenance.revision == commit
    assert len(hub.requests) == 2
    from kvctl.sources import cache

    client = cache.client()
    [repo] = client.scan_cache_dir().repos
    assert (repo.repo_id, repo.refs["main"].commit_hash) == ("org/new", commit)
    assert client.hf_hub_download("org/new", "config.json", local_files_only=True)
    assert not list(Path(os.environ["HF_HOME"]).rglob("*incomplete*"))


def test_revision(hub: FakeHub) -> None:
    hub.add("org/new", LLAMA, revisions={"v1.0": COMMIT, "refs/pr/1": COMMIT})
    for revision in ("v1.0", "refs/pr/1"):
        assert answers(resolve("org/new", revision=revision), "hub").provenance.revision == COMMIT
        answers(resolve("org/new", revision=revision), "cache")
    error = refuse("org/new", revision="v9")
    assert error.message == "org/new has no revision v9"
    assert refuse("org/new", UsageError, revision="").message == "--revision is empty or not printable"
    # A revision is looked for even where the catalogue knows the name.
    hub.add(KNOWN, LLAMA)
    answers(resolve(KNOWN, revision="main"), "hub")


def test_revision_cannot_leave_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("org/new", LLAMA, revisions={"../../../x": COMMIT})
    hub.hook = lambda request: (200, {"X-Repo-Commit": "../../y"}, json.dumps(LLAMA).encode())
    answers(resolve("org/new", revision="../../../x"), "hub")
    assert not list(tmp_path.rglob("x"))
    assert not list(tmp_path.rglob("y"))


def test_cache_that_cannot_be_written(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("file").write_text("")
    monkeypatch.setenv("HF_HUB_CACHE", str(Path("file").absolute()))
    hub.add("org/new", LLAMA)
    answers(resolve("org/new"), "hub")


def test_not_found_names_what_is_near(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refuse("org/Knownn-7B")
    assert error.message == "org/Knownn-7B: not found on the Hub, or private"
    assert error.hint == f"near it: {KNOWN}; a private one needs hf auth login"
    assert len(hub.requests) == 1
    assert "not found on the Hub" in refuse("short").message
    assert refuse(KNOWN, source="hub").hint == "the catalogue has it: drop --source hub"
    hub.tokens.add(TOKEN)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert refuse("org/other").message == "org/other: not found on the Hub, or private"


def test_private(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/mine", LLAMA, private=True)
    assert "not found on the Hub, or private" in refuse("org/mine").message
    hub.tokens.add(TOKEN)
    Path(os.environ["HF_HOME"]).mkdir(exist_ok=True)
    Path(os.environ["HF_HOME"], "token").write_text(TOKEN)
    answers(resolve("org/mine"), "hub")
    assert hub.requests[-1].token == TOKEN


def test_gated(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/gated", LLAMA, gated=True)
    error = refuse("org/gated")
    assert error.message == "org/gated is gated, and its owner has not granted you access (not logged in)"
    assert error.hint == f"ask for access at {hub.url}/org/gated, then log in: hf auth login (or set HF_TOKEN)"
    hub.tokens.add(TOKEN)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert "(the token in HF_TOKEN)" in refuse("org/gated").message
    assert len(hub.requests) == 2
    hub.granted.add(TOKEN)
    answers(resolve("org/gated"), "hub")


def test_refused_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/new", LLAMA)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    error = refuse("org/new")
    assert error.message == "the Hub refused the token (the token in HF_TOKEN)"
    assert "hf auth login" in (error.hint or "")
    monkeypatch.setenv("HF_TOKEN", TOKEN + "\u20ac")
    assert "has characters that cannot be sent" in refuse("org/new").message


def test_renamed(hub: FakeHub) -> None:
    hub.add("new-org/new", LLAMA)
    hub.renamed["org/old"] = "new-org/new"
    found = answers(resolve("org/old"), "hub")
    assert found.id == "new-org/new"
    assert found.notes == ("org/old is now called new-org/new on the Hub",)
    assert "/new-org/new/resolve/" in found.provenance.location
    # One of the three only leads to the new address.
    assert len(hub.requests) == 3
    hub.renamed["other"] = "other"
    assert "redirects other in a circle" in refuse("other").message


def test_files_behind_redirects(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token goes to the Hub alone, and a signed address is never shown."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.tokens.add(TOKEN)
    hub.via_cache = True
    hub.add("org/new", LLAMA)
    assert answers(resolve("org/new"), "hub").id == "org/new"
    assert [request.token for request in hub.requests] == [TOKEN] * 3
    with FakeHub() as storage:
        hub.storage = storage
        commit = hub.add("org/large", LLAMA).commit
        storage.add("org/large", LLAMA)
        hub.renamed["org/before"] = "org/large"
        storage.renamed["org/large"], storage.repositories["blob/store"] = (
            "blob/store",
            storage.repositories["org/large"],
        )
        storage.repositories["blob/store"].revisions[commit] = commit
        found = answers(resolve("org/before"), "hub")
        assert (found.id, found.provenance.revision) == ("org/large", commit)
        assert [request.token for request in storage.requests] == [None, None]


def test_offline_by_setting(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = answers(resolve(KNOWN, source="hub"), "catalogue")
    assert found.notes[0] == "the Hub cannot be reached (HF_HUB_OFFLINE is set): the answer is from the catalogue"
    error = refuse("org/other")
    assert error.message == (
        "org/other is neither cached nor in the catalogue, and the Hub cannot be reached (HF_HUB_OFFLINE is set)"
    )
    assert f"near it in the catalogue: {KNOWN}" == refuse("org/Knownn").hint
    cached(KNOWN, main=False)
    found = answers(resolve(KNOWN, source="hub"), "cache")
    assert found.notes[0].endswith("the answer is from the snapshot in the Hub cache")
    assert found.provenance.revision == COMMIT
    assert hub.requests == []


def test_offline_never_answers_for_another_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    error = refuse(KNOWN, revision="v2")
    assert error.message.startswith(f"revision v2 of {KNOWN} is not cached, and the Hub cannot be reached")
    assert error.hint == "without --revision the catalogue answers"
    cached(KNOWN)
    assert refuse(KNOWN, revision="v2").hint == "without --revision the snapshot in the Hub cache answers"
    answers(resolve(KNOWN, revision=COMMIT, source="hub"), "cache")


def test_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://user:{TOKEN}@127.0.0.1:{port}")
    start = time.perf_counter()
    error = refuse("org/other")
    assert time.perf_counter() - start < 5
    assert f"the Hub cannot be reached (127.0.0.1:{port}: connection refused)" in error.message
    assert answers(resolve(KNOWN, source="hub"), "catalogue").notes


def test_no_such_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(socket, "getaddrinfo", fails)
    assert "(hub.invalid: its name cannot be resolved)" in refuse("org/other").message


def test_tls_that_is_none(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url.replace("http:", "https:"))
    assert "no secure connection" in refuse("org/other").message


@pytest.mark.parametrize("endpoint", ["nonsense", "ftp://127.0.0.1", "//host"])
def test_endpoint_that_is_no_address(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert refuse("org/other").message == "HF_ENDPOINT is not an http or https address"


def test_slow(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCTL_HUB_TIMEOUT", "0.3")
    hub.add("org/new", LLAMA)
    hub.delay = 1
    start = time.perf_counter()
    error = refuse("org/new")
    assert time.perf_counter() - start < 1
    assert re.fullmatch(r"the Hub \(127.0.0.1:\d+\) did not answer within 0.3 s", error.message)
    assert error.hint == "try again, or allow more seconds: KVCTL_HUB_TIMEOUT=60"
    assert "drop --source hub" in (refuse(KNOWN, source="hub").hint or "")
    # A byte now and then is too slow as well.
    hub.delay, hub.drip = 0, 0.05
    assert "did not answer within 0.3 s" in refuse("org/new").message


def test_time_out_settings(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/new", LLAMA)
    hub.delay = 1.5
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
    assert "did not answer within 1 s" in refuse("org/new").message
    hub.delay = 0
    monkeypatch.setenv("KVCTL_HUB_TIMEOUT", "1e300")
    answers(resolve("org/new"), "hub")


@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan", "inf"])
def test_time_out_that_is_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCTL_HUB_TIMEOUT", value)
    assert refuse("org/new", UsageError).message == f"KVCTL_HUB_TIMEOUT={value} is not a number of seconds"


@pytest.mark.parametrize(("name", "value"), [("HF_HUB_ETAG_TIMEOUT", "soon"), ("HF_ENDPOINT", "http://[")])
def test_settings_that_the_client_cannot_read(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    error = refuse("org/new", UsageError)
    assert error.message == "a setting of the Hub client in the environment is malformed"
    assert name in (error.hint or "")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"<!doctype html><title>Sign in</title>", "looks like a web page, not JSON"),
        (b"layers: 12", "is not valid JSON: expecting value at line 1, column 1"),
        (b'{"a": ', "is cut short"),
        (b"", "is empty"),
        (b"[]", "holds a list"),
    ],
)
def test_config_that_is_none(hub: FakeHub, config: bytes, message: str) -> None:
    hub.add("org/new", config)
    error = refuse("org/new", ConfigError)
    assert error.message.startswith(f"the config.json of org/new on the Hub {message}")
    # It is not kept either.
    assert not list(Path(os.environ["HF_HOME"]).rglob("config.json*"))


def test_config_of_200_mb(hub: FakeHub) -> None:
    hub.add("org/new", 200_000_000)
    start = time.perf_counter()
    error = refuse("org/new", ConfigError)
    assert time.perf_counter() - start < 5
    assert error.message == "the answer of the Hub for org/new is too long for a configuration: over 10 MB"
    time.sleep(0.1)
    assert hub.sent < 30_000_000


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.Q4_K_M.gguf": 5, "b.Q8_0.gguf": 5}, "org/new has 2 GGUF models"),
        ({"params.json": 5, "consolidated.safetensors": 5}, "org/new has only params.json"),
        ({"model_index.json": 5, "vae/config.json": 5}, "org/new is a diffusers pipeline"),
        ({"adapter_config.json": 5}, "org/new is an adapter, not a model"),
        ({"model.safetensors": 5}, "org/new has weights (model.safetensors) and no config.json"),
        ({"README.md": 5}, "org/new has no config.json"),
        ({}, "org/new is empty"),
    ],
)
def test_repository_without_config(hub: FakeHub, files: dict[str, int], message: str) -> None:
    hub.add("org/new", files=files, info={"config": {"peft": {"base_model_name_or_path": "org/base"}}})
    error = refuse("org/new")
    assert error.message.startswith(message)
    assert ("org/base" in (error.hint or "")) == ("adapter" in message)
    assert len(hub.requests) == 2


def test_repository_without_config_and_without_a_list(hub: FakeHub) -> None:
    hub.add("org/new", files={})
    hub.hook = lambda request: (500, {}, b"") if "/api/" in request.path else None
    assert refuse("org/new").message == "org/new has no config.json"


def test_remote_code_is_only_noted(hub: FakeHub) -> None:
    theirs = {"model_type": "their_own", "auto_map": {"AutoModelForCausalLM": "modeling_their_own.Model"}}
    hub.add("org/new", theirs, files={"modeling_their_own.py": b"raise SystemExit"})
    found = answers(resolve("org/new"), "hub", theirs)
    assert found.notes == (
        "org/new is defined by code in its repository, which kvctl never runs: read from config.json alone",
    )
    known = {**theirs, "model_type": "llama"}
    hub.add("org/known", known)
    assert answers(resolve("org/known"), "hub", known).notes == ()
    assert not any(".py" in request.path for request in hub.requests)


@pytest.mark.parametrize("status", [500, 502, 503, 504])
def test_fault_of_the_hub(hub: FakeHub, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/new", LLAMA)
    monkeypatch.setattr("kvctl.sources.hub._PAUSE", 0.01)
    hub.failures = [(status, {"Retry-After": "3600"})] * 2
    start = time.perf_counter()
    error = refuse("org/new")
    assert time.perf_counter() - start < 5
    assert f"answers {status}: the fault is on its side" in error.message
    assert error.hint == "try again later"
    assert len(hub.requests) == 2
    # One failure is tried again.
    hub.failures = [(status, {})]
    answers(resolve("org/new"), "hub")


def test_too_many_requests(hub: FakeHub) -> None:
    hub.failures = [(429, {"Retry-After": "120"}), (429, {})]
    error = refuse("org/new")
    assert error.message == "the Hub answers 429: too many requests from here"
    assert error.hint == "try again in 120 s; logged in (hf auth login) the limit is higher"
    assert (refuse("org/new").hint or "").startswith("try again in a few minutes")
    assert len(hub.requests) == 2


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (403, "the Hub refuses access to org/new (not logged in; status 403)"),
        (451, "the Hub refuses access to org/new (not logged in; status 451)"),
        (404, "org/new: not found on the Hub, or private"),
        (418, "answers 418 for org/new"),
        (204, "answers 204 for org/new"),
    ],
)
def test_other_refusals(hub: FakeHub, status: int, message: str) -> None:
    hub.failures = [(status, {})]
    assert message in refuse("org/new").message


def test_answer_that_breaks_off(hub: FakeHub) -> None:
    hub.hook = lambda request: (200, {"Content-Encoding": "gzip"}, b"no gzip")
    assert "broke off its answer" in refuse("org/new").message


@pytest.mark.parametrize(
    "name", ["two words", "a/b/c", "org/../../x", "org//name", "-x/y", "org/na--me", "x" * 97, "org/é", "a/b.git", ""]
)
def test_names_that_no_repository_has(hub: FakeHub, name: str) -> None:
    error = refuse(name, UsageError)
    assert "is neither a file here nor a name on the Hub" in error.message
    assert hub.requests == []


@pytest.mark.parametrize("answer", [(500, b""), (200, b"<html>"), (200, b"[]"), (404, b"")])
def test_weights_are_optional(hub: FakeHub, answer: tuple[int, bytes]) -> None:
    hub.add("org/new", LLAMA)
    hub.hook = lambda request: (answer[0], {}, answer[1]) if request.path.startswith("/api/") else None
    found = answers(resolve("org/new"), "hub")
    assert found.weights is None
    assert found.notes[0].startswith("weights unknown: ")
    assert len(hub.requests) == 2


@pytest.mark.parametrize(
    ("safetensors", "size", "expected"),
    [
        # What the Hub counts agrees with the files.
        ({"parameters": {"F32": 10_000_000, "F8_E4M3": 5}, "total": 10_000_005}, 40_000_905, (40_000_005, 10_000_005)),
        # Two weights packed in each byte: the Hub counts the weights.
        (
            {"parameters": {"U8": 40_000_000, "BF16": 1_000_000}, "total": 41_000_000},
            22_000_000,
            (22_000_000, 41_000_000),
        ),
        ({"parameters": {"NEW": 40_000_000}, "total": 40_000_000}, 22_000_000, (22_000_000, 40_000_000)),
        ({"parameters": "many"}, 22_000_000, (22_000_000, None)),
        (None, 22_000_000, (22_000_000, None)),
        (None, None, None),
    ],
)
def test_weights_of_the_hub(
    hub: FakeHub, safetensors: Any, size: int | None, expected: tuple[int, int | None] | None
) -> None:
    files: dict[str, bytes | int] = {"consolidated.safetensors": 7, "original/model.safetensors": 7}
    if size is not None:
        files |= {"model-00001-of-00002.safetensors": 1_000, "model-00002-of-00002.safetensors": size - 1_000}
    hub.add("org/new", LLAMA, files=files, info={"safetensors": safetensors})
    weights = resolve("org/new").weights
    assert (weights and (weights.bytes, weights.parameters)) == expected


def test_requests_carry_no_more_than_they_must(hub: FakeHub) -> None:
    hub.add("org/new", LLAMA)
    resolve("org/new")
    paths = [request.path for request in hub.requests]
    commit = hub.repositories["org/new"].commit
    assert paths == ["/org/new/resolve/main/config.json", f"/api/models/org/new/revision/{commit}?blobs=true"]
    assert all(request.headers["user-agent"].startswith("kvctl/") for request in hub.requests)


def test_unknown_source() -> None:
    assert "--source: unknown source" in refuse(KNOWN, UsageError, source="web").message


def test_nothing_is_printed(hub: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    hub.add("org/new", LLAMA)
    hub.failures = [(503, {"X-HF-Warning": "topic; a warning of the Hub"})]
    resolve("org/new")
    refuse("org/other")
    assert capfd.readouterr() == ("", "")


def test_a_catalogue_hit_imports_no_client() -> None:
    script = "import sys; from kvctl.sources import resolve; resolve('Qwen3-72B'); print(*sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    if "cannot import name 'catalogue'" in run.stderr:
        pytest.skip("no catalogue yet")
    assert run.returncode == 0, run.stderr
    modules = set(run.stdout.split())
    assert not modules & {
        "huggingface_hub",
        "httpx2",
        "httpx",
        "requests",
        "ssl",
        "kvctl.sources.hub",
        "kvctl.sources.local",
    }
