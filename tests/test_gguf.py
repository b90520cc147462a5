"""GGUF files, written by the gguf package: what is read from them, and what hostile ones are answered with."""

from __future__ import annotations

import json
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import DATA, Outcome, llama_cpp_options

from kvctl.sources.gguf import TENSOR_TYPES
from kvctl.sources.gguf_config import ARCHITECTURES

Run = Callable[..., Outcome]
Json = dict[str, Any]
TYPE = gguf.GGUFValueType


@cache
def oracle() -> Json:
    found: Json = json.loads((DATA / "llama_cpp.json").read_text())
    return found


# The metadata of the packaged SmolLM2-135M-Instruct Q4_1.
SMOLLM = {
    "architecture": "llama",
    "metadata": {
        "context_length": 8192, "embedding_length": 576, "block_count": 30, "feed_forward_length": 1536,
        "attention.head_count": 9, "attention.head_count_kv": 3, "rope.dimension_count": 64,
    },
}  # fmt: skip


def keys_of(name: str) -> Json:
    return SMOLLM if name.startswith("smollm2") else oracle()["gguf"][name]


def write(path: Path, architecture: str, metadata: Json, words: int = 1000) -> Path:
    """A file with the keys, a vocabulary and two tensors, as the gguf package writes it."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        key = f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    writer.add_array("tokenizer.ggml.tokens", [f"token {number}" for number in range(words)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * words)
    writer.add_tensor_info("token_embd.weight", (64, 128), np.dtype(np.float16), 64 * 128 * 2)
    writer.add_tensor_info(
        "blk.0.attn_q.weight", (256, 34), np.dtype(np.uint8), 256 * 34, gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("index", range(116))
def test_the_file_gives_the_lines_that_llama_cpp_prints_of_it(kvctl: Run, tmp_path: Path, index: int) -> None:
    case = oracle()["cases"][index]
    keys = keys_of(case["model"])
    path = write(tmp_path / "model.gguf", keys["architecture"], keys["metadata"])
    options = llama_cpp_options(case["arguments"])
    outcome = kvctl("size", str(path), "--json", *options)
    if not case["log"]:
        assert outcome.code == 2
        return
    assert outcome.code == 0, outcome.err
    assert outcome.json["results"][0]["allocation"]["log"] == case["log"]


def test_block_sizes_are_those_of_the_package() -> None:
    assert {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()}.items() <= TENSOR_TYPES.items()


def test_architectures_are_those_of_the_package() -> None:
    # These are younger than the package's table.
    younger = {"deepseek32", "spark2_5", "minimax-01", "hy_v3", "muse-glimmer", "cohere2moe", "granite_swa", "laguna",
               "maple", "mellum", "minimax-m3", "mistral4", "talkie", "step35", "jais2", "hunyuan_vl", "maincoder",
               "llama-embed", "paddleocr", "kimi-linear", "glm-dsa", "gemma4", "qwen35", "qwen35moe", "exaone-moe",
               "deepseek2-ocr", "plamo3", "bailingmoe3", "deepseek4", "kimi-k3"}  # fmt: skip
    assert set(ARCHITECTURES) - set(gguf.MODEL_ARCH_NAMES.values()) <= younger


def test_weights_are_the_tensors(kvctl: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "llama", SMOLLM["metadata"])  # type: ignore[arg-type]
    result = kvctl("size", str(path), "--ctx", "100", "--json").json["results"][0]
    assert result["model"]["id"] == "model.gguf"
    # 64 · 128 in f16; 256 rows of 32 in q8_0: 34 bytes each
    assert result["weights"]["bytes"] == 64 * 128 * 2 + 256 * 34
    assert result["weights"]["parameters"] == 64 * 128 + 256 * 32
    # 30 layers · 2 · 3 heads · 64 · 2 B
    assert result["kv_bytes"] == 100 * 23_040
    changed = kvctl("size", str(path), "--ctx", "100", "--json", "--set", "num_key_value_heads=9").json["results"][0]
    assert changed["kv_bytes"] == 3 * 100 * 23_040


def test_split_files_add_up(kvctl: Run, tmp_path: Path) -> None:
    names = [tmp_path / f"m-{number:05d}-of-00002.gguf" for number in (1, 2)]
    write(names[0], "llama", SMOLLM["metadata"])  # type: ignore[arg-type]
    outcome = kvctl("size", str(names[0]), "--ctx", "100", "--json")
    assert outcome.json["results"][0]["weights"] is None
    assert "1 of 2 parts are not here" in outcome.err
    write(names[1], "llama", {})
    for name in names:
        weights = kvctl("size", str(name), "--ctx", "100", "--json").json["results"][0]["weights"]
        assert weights["bytes"] == 2 * (64 * 128 * 2 + 256 * 34)


def test_layers_may_have_kv_heads_of_their_own(kvctl: Run, tmp_path: Path) -> None:
    metadata = SMOLLM["metadata"] | {"block_count": 3, "attention.head_count_kv": [3, 1, 9]}  # type: ignore[operator]
    path = write(tmp_path / "model.gguf", "llama", metadata)
    assert kvctl("size", str(path), "--ctx", "100", "--json").json["results"][0]["kv_bytes"] == 100 * 13 * 64 * 2 * 2


def test_a_folder_of_gguf_files_says_so(kvctl: Run, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", "llama", SMOLLM["metadata"])  # type: ignore[arg-type]
    outcome = kvctl("size", str(tmp_path))
    assert outcome.code == 1
    assert "model.gguf" in outcome.err


# -- files that mean harm ----------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(keys: int, tensors: int = 0, *, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys)


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")
PADDING = bytes(4096)

HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a GGUF file"),
    "cut in the counts": (header(1)[:20], "too short"),
    "other magic": (header(1, magic=b"GGML") + PADDING, "is not a GGUF file"),
    "version 1": (header(1, version=1) + PADDING, "version 1"),
    "version 4": (header(1, version=4) + PADDING, "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + PADDING, "big-endian"),
    "2^60 keys": (header(2**60) + PADDING, "more than can be in it"),
    "2^60 tensors": (header(0, 2**60) + PADDING, "more than can be in it"),
    "key of 2^40 bytes": (header(1) + struct.pack("<Q", 2**40) + PADDING, "text of 1,099,511,627,776 bytes"),
    "text of 2^40 bytes": (
        header(1) + text("a") + struct.pack("<IQ", 8, 2**40) + PADDING, "text of 1,099,511,627,776 bytes"),
    "list of 2^60 numbers": (
        header(1) + text("a") + struct.pack("<IIQ", 9, 4, 2**60) + PADDING, "more than can be in it"),
    "list of 2^60 texts": (header(1) + text("a") + struct.pack("<IIQ", 9, 8, 2**60) + PADDING, "more than can be in it"),
    "lists of lists": (header(1) + text("a") + struct.pack("<IIQ", 9, 9, 1) + PADDING, "lists of type 9"),
    "unknown type of value": (header(1) + text("a") + struct.pack("<I", 99) + PADDING, "type 99"),
    "the same key twice": (header(2) + 2 * ARCHITECTURE + PADDING, "twice"),
    "cut in a key": (header(2) + ARCHITECTURE, "middle of its header"),
    "no architecture": (header(0) + PADDING, "names no architecture"),
    "unknown architecture": (
        header(1) + text("general.architecture") + struct.pack("<I", 8) + text("brand\x1b[31mnew") + PADDING,
        "does not know the GGUF architecture"),
    "missing keys": (header(1) + ARCHITECTURE + PADDING, "llama.block_count is missing"),
    "2^40 layers": (
        header(2) + ARCHITECTURE + text("llama.block_count") + struct.pack("<IQ", 10, 2**40) + PADDING, "no model has over"),
    "layers as text": (
        header(2) + ARCHITECTURE + text("llama.block_count") + struct.pack("<I", 8) + text("many") + PADDING,
        "not a whole number"),
    "tensor of 2^63 elements": (
        header(1, 1) + ARCHITECTURE + text("t") + struct.pack("<IQQIQ", 2, 2**62, 2, 0, 0) + PADDING, "elements"),
    "tensor of no dimension": (header(1, 1) + ARCHITECTURE + text("t") + struct.pack("<I", 0) + PADDING, "0 dimensions"),
    "tensor of an unknown type": (
        header(1, 1) + ARCHITECTURE + text("t") + struct.pack("<IQIQ", 1, 32, 4096, 0) + PADDING, "type 4096"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_end_in_one_line(kvctl: Run, tmp_path: Path, name: str) -> None:
    content, words = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    start = time.process_time()
    outcome = kvctl("size", str(path))
    assert time.process_time() - start < 5
    assert outcome.code == 1
    assert words in outcome.err
    assert len(outcome.err.splitlines()) <= 2
    assert "\x1b" not in outcome.err
    assert not outcome.out


def test_every_cut_of_a_good_file_is_an_answer_or_one_line(kvctl: Run, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", "llama", SMOLLM["metadata"]).read_bytes()  # type: ignore[arg-type]
    path = tmp_path / "cut.gguf"
    for length in [*range(0, 400, 7), *range(400, len(whole), 997)]:
        path.write_bytes(whole[:length])
        outcome = kvctl("size", str(path))
        assert outcome.code == 1
        assert outcome.err.startswith("kvctl: error: ")


def test_a_pipe_is_refused_and_not_waited_for(kvctl: Run, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    outcome = kvctl("size", str(tmp_path / "x.gguf"))
    assert outcome.code == 1
    assert "not a regular file" in outcome.err


def test_a_long_text_is_not_read_whole(kvctl: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    length = 400 * 2**20
    with open(path, "wb") as file:
        file.write(header(2) + ARCHITECTURE + text("a") + struct.pack("<IQ", 8, length))
        file.truncate(file.tell() + length + 64)
    tracemalloc.start()
    outcome = kvctl("size", str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert outcome.code == 1
    assert "llama.block_count is missing" in outcome.err
    assert peak < 20 * 2**20


def test_another_name_and_data_that_is_not_there(kvctl: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "sha256-0123", "llama", SMOLLM["metadata"])  # type: ignore[arg-type]
    outcome = kvctl("size", str(path), "--ctx", "100")
    assert outcome.code == 0
    assert "cut short" in outcome.err


def test_a_later_part_alone_names_the_first(kvctl: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "m-00002-of-00003.gguf", "llama", {})
    outcome = kvctl("size", str(path))
    assert outcome.code == 1
    assert "m-00001-of-00003.gguf" in outcome.err


def test_windows_in_the_file_count_where_the_engine_keeps_them(kvctl: Run, tmp_path: Path) -> None:
    metadata = SMOLLM["metadata"] | {"attention.sliding_window": 50}  # type: ignore[operator]
    path = str(write(tmp_path / "m.gguf", "llama", metadata))
    ideal = kvctl("size", path, "--ctx", "100", "--json").json["results"][0]
    assert ideal["kv_bytes"] == 50 * 23_040
    kept = kvctl("size", path, "--ctx", "256", "--json", "--engine", "llama.cpp", "-np", "1").json["results"][0]
    assert kept["allocation"]["reserved_bytes"] == 256 * 23_040
    other = write(tmp_path / "n.gguf", "qwen3", metadata | {"attention.key_length": 64, "attention.value_length": 64})
    assert "does not know which layers have it" in kvctl("size", str(other)).err


@pytest.mark.parametrize(
    ("architecture", "change", "words"),
    [
        ("glm4moe", {"nextn_predict_layers": 30}, "no layers are left"),
        ("gemma3", {"attention.sliding_window": 16, "attention.sliding_window_pattern": [2] * 30}, "true and false"),
        ("llama", {"attention.head_count_kv": [3] * 29 + [0]}, "without attention"),
        ("llama", {"attention.value_length": 32}, "keys of 64 and values of 32"),
    ],
)
def test_keys_that_contradict_are_refused(
    kvctl: Run, tmp_path: Path, architecture: str, change: Json, words: str
) -> None:
    path = write(tmp_path / "m.gguf", architecture, SMOLLM["metadata"] | change)  # type: ignore[operator]
    outcome = kvctl("size", str(path), "--ctx", "100")
    assert outcome.code == 1
    assert words in outcome.err


def test_openelm_has_head_counts_for_each_layer(kvctl: Run, tmp_path: Path) -> None:
    metadata = {"context_length": 2048, "embedding_length": 1280, "block_count": 3, "attention.head_count": [12, 16, 20],
                "attention.head_count_kv": [3, 4, 5], "attention.key_length": 64, "attention.value_length": 64}  # fmt: skip
    path = write(tmp_path / "m.gguf", "openelm", metadata)
    assert kvctl("size", str(path), "--ctx", "100", "--json").json["results"][0]["kv_bytes"] == 100 * 12 * 64 * 2 * 2


def test_files_of_old_latent_models_hold_expanded_heads(kvctl: Run, tmp_path: Path) -> None:
    # DeepSeek-V2-Lite before its latents were stored: 27 layers of 16 heads, keys of 192 and values of 128.
    metadata = {"context_length": 163840, "embedding_length": 2048, "block_count": 27, "attention.head_count": 16,
                "attention.head_count_kv": 16, "attention.key_length": 192, "attention.value_length": 128,
                "attention.kv_lora_rank": 512, "rope.dimension_count": 64}  # fmt: skip
    path = str(write(tmp_path / "model.gguf", "deepseek2", metadata))
    assert kvctl("size", path, "--ctx", "100", "--json").json["results"][0]["kv_bytes"] == 100 * 27 * 16 * 320 * 2
    log = kvctl("size", path, "--ctx", "4k", "--json", "--engine", "llama.cpp", "-np", "1").json["results"][0]
    # 4,096 · 27 · 16 · 192 · 2 B are 648 MiB, and two thirds of it for values
    assert log["allocation"]["log"] == [
        "llama_kv_cache: size = 1080.00 MiB (  4096 cells,  27 layers,  1/1 seqs), K (f16):  648.00 MiB, V (f16):  432.00 MiB"
    ]


def test_latents_for_several_heads_are_refused(kvctl: Run, tmp_path: Path) -> None:
    metadata = oracle()["gguf"]["deepseek-v3"]["metadata"] | {"attention.head_count_kv": 128}
    assert "latents for 128 KV heads" in kvctl("size", str(write(tmp_path / "m.gguf", "deepseek2", metadata))).err


def test_layers_that_predict_further_tokens_are_not_in_the_cache(kvctl: Run, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", SMOLLM["metadata"] | {"nextn_predict_layers": 2})  # type: ignore[operator]
    assert kvctl("size", str(path), "--ctx", "30", "--json").json["results"][0]["kv_bytes"] == 28 * 23_040
