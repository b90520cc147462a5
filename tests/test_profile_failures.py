"""What goes wrong with models, checkpoints and memory: one plain line each, nothing run unasked, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvctl.errors import ConfigError, ExitCode, KvctlError, SourceError, UsageError
from kvctl.formats import FP16, FP32
from kvctl.measure.load import Wanted
from kvctl.measure.memory import OutOfMemoryError
from kvctl.measure.points import Asked
from kvctl.measure.report import ProfileReport
from kvctl.measure.run import Now, ProfilePlan, Progress, profile
from kvctl.model import build_spec
from kvctl.sources import Found, local
from kvctl.spec import ModelSpec, Provenance

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.engine

PLAIN = Wanted(dtype=FP32)
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "torch_dtype": "float32",
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
UP = "model.layers.1.mlp.up_proj.weight"
Make = Callable[..., Path]


def weights(**changes: Any) -> dict[str, Any]:
    """Tensors of the small model, at random."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    facts = {key: value for key, value in (CONFIG | changes).items() if key not in ("model_type", "architectures")}
    return {name: tensor.clone() for name, tensor in LlamaForCausalLM(LlamaConfig(**facts)).state_dict().items()}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A folder with a configuration, and weights where some are given."""

    def folder(config: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
        from safetensors.torch import save_file

        path = tmp_path / "model"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(CONFIG | (config or {})))
        if tensors is not None:
            save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
        return path

    return folder


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No threads, no children and no files but a test's own."""
    import psutil

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    threads = set(threading.enumerate())
    yield
    # transformers reads tensors in threads that it does not wait for when one of them is wrong.
    for thread in set(threading.enumerate()) - threads:
        if not thread.daemon:
            thread.join(10)
            assert not thread.is_alive()
    assert not psutil.Process().children()


def run(
    of: Path | ModelSpec, wanted: Wanted = PLAIN, on_point: Callable[[Any], None] = lambda _: None, **asked: Any
) -> ProfileReport:  # fmt: skip
    spec = of if isinstance(of, ModelSpec) else build_spec(local.from_path(str(of)))
    before = _files(of)
    plan = ProfilePlan(spec, wanted, Asked(**{"contexts": (8,), "decode": 2, "repeat": 1} | asked), limits=False)
    try:
        return profile(plan, Progress(Now(), on_point))
    finally:
        assert _files(of) == before


def _files(of: Path | ModelSpec) -> list[str]:
    return sorted(map(str, of.rglob("*"))) if isinstance(of, Path) and of.is_dir() else []


def refused(
    of: Path | ModelSpec, kind: type[KvctlError], words: str, hint: str | None = None, wanted: Wanted = PLAIN,
    **asked: Any,
) -> None:  # fmt: skip
    """One line that says so, and a hint."""
    with pytest.raises(KvctlError) as caught:
        run(of, wanted, **asked)
    error = caught.value
    assert type(error) is kind, error.message
    assert words in error.message
    assert "\n" not in error.message
    assert error.message.isprintable()
    assert hint is None or hint in (error.hint or "")
    assert error.exit_code == (ExitCode.USAGE if kind is UsageError else ExitCode.FAILED)


def test_the_small_model_runs(make: Make) -> None:
    """2 layers × keys and values × 2 heads of 8 × 4 bytes × (8 + 2 tokens)."""
    report = run(make(tensors=weights()))
    assert [row.logical_bytes for row in report.points[0].cache] == [2 * 2 * 2 * 8 * 4 * 8, 2 * 2 * 2 * 8 * 4 * 10]
    assert report.agrees
    assert not report.interrupted


# -- checkpoints --------------------------------------------------------------------------------------


def test_missing_and_misshapen_tensors(make: Make) -> None:
    tensors = weights()
    tensors[UP] = torch.zeros(63, 32)
    folder = make(tensors=tensors)
    refused(folder, SourceError, f"has other shapes for 1 of the model's tensors: {UP} (63 × 32 for 64 × 32)", "again")
    from safetensors.torch import save_file

    del tensors[UP]
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    refused(folder, SourceError, f"lacks 1 of the model's tensors: {UP}", "again")


@pytest.mark.parametrize(("damage", "words"), [
    (lambda data: data[: len(data) // 2], "bytes"),
    (lambda data: data[:-1], "bytes"),
    (lambda data: data[:100], "ends after 100 bytes, within its header"),
    (lambda _: b"", "model.safetensors is empty"),
    (lambda _: b"\xff" * 1000, "no valid safetensors header"),
    (lambda data: data[:8] + b"\x00" * 50 + data[58:], "no valid safetensors header"),
    (lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
])  # fmt: skip
def test_damaged_safetensors(make: Make, damage: Callable[[bytes], bytes], words: str) -> None:
    folder = make(tensors=weights())
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    refused(folder, SourceError, words)


def test_folders_without_weights(make: Make, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, SourceError, "is empty")
    folder = make()
    refused(folder, SourceError, "no weights there", "--weights random")
    os.symlink("/nonexistent/blob", folder / "model.safetensors")
    refused(folder, SourceError, "model.safetensors is a link to a file that is gone", "again")


def test_adapters(make: Make, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = make()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base"}')
    save_file({"a": torch.zeros(2)}, str(folder / "adapter_model.safetensors"))
    refused(folder, SourceError, "has an adapter's weights, and not those of the model")
    (folder / "config.json").unlink()
    refused(folder, SourceError, "is an adapter, not a model")


@pytest.mark.parametrize(("index", "words"), [
    (b"{nonsense", "its index of weights is damaged"),
    (b"[]", "its index of weights is damaged"),
    (b"{}", "its index of weights is damaged"),
    (b"\xff\xfe\x00", "its index of weights is damaged"),
    (b'{"weight_map": {"a": 5}}', "its index of weights is damaged"),
    (b'{"weight_map": {"a": "../../etc/passwd"}}', "its index of weights is damaged"),
    (b'{"weight_map": {"a": "gone.safetensors", "b": "gone-too.safetensors"}}', "gone-too.safetensors is not there, and 1 more"),
    (None, "has shard.safetensors, and neither model.safetensors nor model.safetensors.index.json"),
])  # fmt: skip
def test_damaged_indexes(make: Make, index: bytes | None, words: str) -> None:
    folder = make(tensors=weights())
    os.rename(folder / "model.safetensors", folder / "shard.safetensors")
    if index is not None:
        (folder / "model.safetensors.index.json").write_bytes(index)
    refused(folder, SourceError, words)


def test_sharded_weights_run(make: Make) -> None:
    from safetensors.torch import save_file

    tensors = weights()
    folder = make()
    names = sorted(tensors)
    files = {name: f"model-{1 + (index % 2)}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: tensors[name] for name in names if files[name] == file}
        save_file(part, str(folder / file), metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert run(folder).agrees


class Evil:
    """Writes a file where it is unpickled."""

    def __reduce__(self) -> Any:
        return open, ("ran", "w")


def test_damaged_bin_weights(make: Make) -> None:
    folder = make()
    file, index = folder / "pytorch_model.bin", folder / "pytorch_model.bin.index.json"
    index.write_text("nonsense")
    refused(folder, SourceError, "its index of weights is damaged", "again")
    index.write_text('{"weight_map": {"a": "gone.bin"}}')
    refused(folder, SourceError, "gone.bin is not there", "again")
    file.mkdir()
    refused(folder, SourceError, "pytorch_model.bin is a folder", "again")
    file.rmdir()
    os.symlink(file.name, file)
    refused(folder, SourceError, "pytorch_model.bin is a link to itself", "again")
    file.unlink()
    file.write_bytes(b"")
    refused(folder, SourceError, "pytorch_model.bin is empty", "again")
    torch.save(weights(), file)
    assert run(folder).agrees
    file.write_bytes(file.read_bytes()[:5000])
    refused(folder, SourceError, "pytorch_model.bin is cut short", "again")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
def test_what_is_no_file(make: Make) -> None:
    """Nothing is waited for."""
    folder = make()
    file = folder / "model.safetensors"
    for put, words in ((file.mkdir, "is a folder"), (lambda: os.mkfifo(file), "is no regular file"),
                       (lambda: os.symlink(file.name, file), "is a link to itself")):  # fmt: skip
        put()
        refused(folder, SourceError, words, "again")
        file.rmdir() if file.is_dir() else file.unlink()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_weights_that_may_not_be_read(make: Make) -> None:
    folder = make(tensors=weights())
    (folder / "model.safetensors").chmod(0)
    refused(folder, SourceError, "permission denied", "make it readable")


def test_pickled_weights_that_would_run_code(make: Make, tmp_path: Path) -> None:
    folder = make()
    torch.save({UP: Evil()}, folder / "pytorch_model.bin")
    refused(folder, SourceError, "a .bin file is damaged, or holds more than tensors")
    (folder / "pytorch_model.bin").write_bytes(b"garbage")
    refused(folder, SourceError, "a .bin file is damaged, or holds more than tensors")
    assert not (tmp_path / "ran").exists()


# -- configurations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "kind", "words"), [
    ({"torch_dtype": "float33"}, ConfigError, "'float33', which is no model dtype"),
    ({"model_type": "nonsense"}, ConfigError, "does not know the type 'nonsense'"),
    ({"architectures": ["LlamaForSequenceClassification"]}, ConfigError, "does not generate text"),
    ({"architectures": ["Trainer"]}, ConfigError, "does not generate text"),
    ({"hidden_act": "nope"}, SourceError, "cannot load it: KeyError: 'nope'"),
    ({"rope_scaling": {"rope_type": "nope", "factor": 2.0}}, SourceError, "KeyError: 'nope'"),
    ({"quantization_config": []}, ConfigError, "quantization_config is '[]', not an object"),
    ({"vocab_size": 0}, ConfigError, "vocab_size is 0, and has to be at least 1"),
    ({"vocab_size": -5}, ConfigError, "vocab_size is -5, out of range"),
    ({"num_hidden_layers": 0}, ConfigError, "num_hidden_layers is 0, and has to be at least 1"),
    ({"hidden_size": 0}, ConfigError, "hidden_size is 0, and has to be at least 1"),
    ({"head_dim": 0}, ConfigError, "head_dim is 0, and has to be at least 1"),
    ({"head_dim": 7}, ConfigError, "RoPE requires an even rotary dimension"),
    ({"hidden_size": "32"}, ConfigError, "hidden_size is '32', not a whole number"),
    ({"vocab_size": float("inf")}, ConfigError, "Field 'vocab_size' expected int, got float (value: inf)"),
    ({"initializer_range": float("nan")}, ConfigError, "initializer_range: Value must be greater"),
])  # fmt: skip
def test_broken_configurations(make: Make, config: dict[str, Any], kind: type[KvctlError], words: str) -> None:
    refused(make(config, weights()), kind, words, wanted=Wanted())


def test_an_architecture_of_another_type_is_not_followed(make: Make) -> None:
    assert run(make({"architectures": ["GPT2LMHeadModel"]}, weights())).agrees


CODE = """
import pathlib
pathlib.Path({mark!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM
class Config(LlamaConfig):
    model_type = "mine"
class Model(LlamaForCausalLM):
    config_class = Config
"""


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "mine"])
def test_code_from_a_repository_never_runs_unasked(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                   model_type: str, random: bool) -> None:  # fmt: skip
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    mark = tmp_path / "ran"
    folder = make({"model_type": model_type, "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}},
                  weights())  # fmt: skip
    (folder / "code.py").write_text(CODE.format(mark=str(mark)))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}, "tokenizer_class": "Tokenizer"})
    )
    wanted = Wanted(random=random, dtype=FP32)
    if model_type == "llama":  # transformers' own class is used, and the text is replaced by random tokens
        report = run(folder, wanted)
        assert report.agrees
        assert random or "without a tokenizer that loads" in report.notes[-1]
    else:
        refused(folder, ConfigError, "runs code from its repository", "--trust-remote-code", wanted)
    assert not mark.exists()
    trusted = Wanted(random=random, dtype=FP32, trust_remote_code=True)
    assert run(folder, trusted).agrees
    assert mark.exists()
    if random:
        thinned = run(folder, trusted.replace(layers=1)).settings
        assert (thinned["layers_kept"], thinned["layers_of_kind"]) == ([0], [2])


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize(("named", "code", "words"), [
    ([1], "", "auto_map names no classes"),
    ({"AutoConfig": 5}, "", "auto_map names '5', which is no class of a file"),
    ({"AutoConfig": "code.Config"}, None, "its code, code.py, is not there"),
    ({"AutoConfig": "code.Config"}, "def (", "SyntaxError"),
    ({"AutoConfig": "code.Config"}, "raise RuntimeError('first\\nsecond')", "cannot be run: RuntimeError: first"),
    ({"AutoConfig": "code.Config"}, "import sys\nsys.exit(0)", "ends the program"),
    ({"AutoConfig": "code.Config"}, "import nosuchpackage", "nosuchpackage"),
    ({"AutoConfig": "code.Config"}, "", "has no attribute 'Config'"),
    (None, "", "does not know the type 'mine'"),
])  # fmt: skip
def test_trusted_code_that_does_not_run(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: Any, code: str | None,
                                        words: str, random: bool) -> None:  # fmt: skip
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = make({"model_type": "mine", "auto_map": named}, weights())
    if code is not None:
        (folder / "code.py").write_text(code)
    refused(folder, ConfigError, words, "", Wanted(random=random, dtype=FP32, trust_remote_code=True))


def test_more_layers_than_there_are(make: Make) -> None:
    report = run(make(), Wanted(random=True, dtype=FP32, layers=50))
    assert "--layers 50: the model has no more, and all of them run" in report.notes


@pytest.mark.parametrize(("method", "facts"), [
    ("gptq", {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
    ("awq", {"bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}),
    ("bitsandbytes", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    ("compressed-tensors", {"format": "pack-quantized", "config_groups": {}}),
])  # fmt: skip
def test_quantized_checkpoints_whose_package_is_missing(make: Make, method: str, facts: dict[str, Any]) -> None:
    import importlib.util

    packages = {
        "gptq": "gptqmodel",
        "awq": "gptqmodel",
        "bitsandbytes": "bitsandbytes",
        "compressed-tensors": "compressed_tensors",
    }
    if importlib.util.find_spec(packages[method]):
        pytest.skip(f"{packages[method]} is installed")
    folder = make({"quantization_config": {"quant_method": method} | facts}, weights())
    refused(folder, SourceError, "transformers cannot load it", "install what is missing")
    assert run(folder, Wanted(random=True, dtype=FP32)).agrees


def test_an_unknown_quantization_is_said(make: Make) -> None:
    report = run(make({"quantization_config": {"quant_method": "nonsense"}}, weights()))
    assert "does not know the checkpoint's quantization (nonsense)" in report.notes[0]


# -- GGUF ---------------------------------------------------------------------------------------------


def test_gguf_files_that_cannot_be_run(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from gguf_models import random_keys, write

    file = tmp_path / "model.gguf"
    file.write_bytes(b"nope" * 100)
    refused(file, SourceError, "is not a GGUF file")
    file.write_bytes(b"GGUF\x03\x00")
    refused(file, ConfigError, "too short for a GGUF header")
    write(file, "mamba2", random_keys("mamba2", Random(1)))
    refused(file, SourceError, "architecture mamba2 is not supported", "--engine llama.cpp")
    write(file, "llama", random_keys("llama", Random(1)))
    refused(file, SourceError, "of the model's tensors: ")
    file.write_bytes(file.read_bytes()[:-50])
    refused(file, ConfigError, "")


def small_gguf(tmp_path: Path, *more: str) -> Path:
    """A file with the tokens' embeddings, and `more` tensors of their shape."""
    gguf = pytest.importorskip("gguf")
    import numpy

    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in (("context_length", 128), ("embedding_length", 32), ("block_count", 1), ("feed_forward_length", 64),
                        ("attention.head_count", 4), ("attention.head_count_kv", 2), ("vocab_size", 64)):  # fmt: skip
        writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for name in ("token_embd.weight", *more):
        writer.add_tensor(name, numpy.zeros((64, 32), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_gguf_file_that_was_cut_off(tmp_path: Path) -> None:
    file = small_gguf(tmp_path)
    whole = file.read_bytes()
    for cut in (1, 64 * 32 * 2):  # its one tensor has 64 × 32 × 4 bytes, which need no padding
        file.write_bytes(whole[:-cut])
        refused(file, SourceError, f"ends after {len(whole) - cut:,} bytes, before its tensors do", "download it again")


def test_the_head_of_a_gguf_file(tmp_path: Path) -> None:
    """Without a tensor of its own it is the embeddings: 64 × 32 parameters fewer are built."""
    weights = [
        run(small_gguf(tmp_path, *more), Wanted(random=True, dtype=FP32)).settings["weights_bytes"]
        for more in ((), ("output.weight",))
    ]
    assert weights[1] - weights[0] == 64 * 32 * 4


# -- numbers ------------------------------------------------------------------------------------------


def changed(tensors: dict[str, Any], name: str, value: float) -> dict[str, Any]:
    tensors[name][0, 0] = value
    return tensors


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_what_is_no_number_is_not_timed(make: Make, name: str, value: float) -> None:
    tensors = changed(weights(), name, value)
    if name.startswith("model.embed"):
        tensors[name][:] = value
    refused(make(tensors=tensors), KvctlError, "are not numbers (NaN or infinity)", "--dtype")


def test_fp16_overflows(make: Make) -> None:
    """Gate and up at 30,000 times their weight: their product is far beyond fp16's 65,504, and fits into fp32."""
    tensors = {name: tensor * (3e4 if "_proj" in name and "mlp" in name else 1) for name, tensor in weights().items()}
    folder = make(tensors=tensors)
    assert run(folder).agrees
    refused(folder, KvctlError, "are not numbers", "fp16 overflows", Wanted(dtype=FP16))


@pytest.mark.parametrize("random", [False, True])
def test_a_vocabulary_of_one(make: Make, random: bool) -> None:
    assert run(make({"vocab_size": 1}, weights(vocab_size=1)), Wanted(random=random, dtype=FP32)).agrees


@pytest.mark.parametrize(("asked", "words"), [
    ({"contexts": (127,)}, "127 tokens and 2 more are beyond the 128 positions"),
    ({"contexts": (0,)}, "at least 1 token"), ({"contexts": ()}, "at least 1 token"), ({"batches": (0,)}, "at least 1 token"),
    ({"batches": ()}, "at least 1 token"), ({"prefill_chunk": 0}, "a chunk 1 token"), ({"decode": -1}, "no negative numbers"),
    ({"repeat": -1}, "no negative numbers"),
])  # fmt: skip
def test_lengths_that_cannot_be(make: Make, asked: dict[str, Any], words: str) -> None:
    refused(make(tensors=weights()), UsageError, words, **asked)


@pytest.mark.parametrize("asked", [{"contexts": (126,)}, {"contexts": (1,)}, {"decode": 0}, {"decode": 1}, {"prefill_chunk": 100},
                                   {"prefill_chunk": 1}, {"repeat": 0}])  # fmt: skip
def test_lengths_at_the_edge(make: Make, asked: dict[str, Any]) -> None:
    report = run(make(tensors=weights()), **asked)
    assert report.agrees
    assert report.points[0].cache
    assert (report.points[0].ttft is None) == (asked.get("repeat") == 0)


# -- other kinds of models ----------------------------------------------------------------------------


def spec_of(
    config: dict[str, Any], source: str = "local", name: str = "model", revision: str | None = None
) -> ModelSpec:
    return build_spec(Found(name, config, Provenance(source, name, revision)))  # type: ignore[arg-type]


def test_an_encoder_keeps_no_cache() -> None:
    bert = spec_of({"model_type": "bert", "architectures": ["BertModel"], "num_hidden_layers": 2, "hidden_size": 64,
                    "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 64})  # fmt: skip
    refused(bert, KvctlError, "keeps no cache", "is_decoder", wanted=Wanted(random=True, dtype=FP32))


def test_a_model_that_needs_images() -> None:
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "num_hidden_layers": 2, "hidden_size": 64,
              "num_attention_heads": 2, "intermediate_size": 64}  # fmt: skip
    refused(spec_of(config), ConfigError, "generate", wanted=Wanted(random=True, dtype=FP32))


def test_layers_that_need_an_image_are_left_out_on_text() -> None:
    """Mllama passes over cross attention without one, whichever places its layers have among those that are kept."""
    text = {"model_type": "mllama_text_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0, "cross_attention_layers": [2, 3],
            "max_position_embeddings": 128, "rope_scaling": {"rope_type": "default"}}  # fmt: skip
    spec = spec_of({"model_type": "mllama", "text_config": text})
    report = run(spec, Wanted(random=True, dtype=FP32, layers=1), encoder_tokens=0)
    assert (report.settings["layers_kept"], report.settings["layers_of_kind"]) == ([0, 2], [2, 2])
    # keys and values × 2 heads of 8 × 4 bytes × tokens, of the one layer that attends to the text
    assert [row.logical_bytes for row in report.points[0].cache] == [2 * 2 * 8 * 4 * 8, 2 * 2 * 8 * 4 * 10]


def test_a_model_that_fails_in_its_pass(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    def forward(self: Any, input_ids: Any, pixel_values: Any = None, use_cache: bool = True) -> Any:
        raise ValueError("You have to specify pixel_values\nsecond line")

    folder = make(tensors=weights())
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    refused(folder, KvctlError, "cannot be run on text alone: You have to specify pixel_values")


# -- memory -------------------------------------------------------------------------------------------

LIMITED = """
import resource, sys, os
sys.path.insert(0, os.path.dirname({file!r}))
import psutil, test_profile_failures as t
from transformers import LlamaForCausalLM
t.torch.set_num_threads(1)
big = t.CONFIG | {config!r}
def limit(more):
    used = psutil.Process().memory_info().data
    resource.setrlimit(resource.RLIMIT_DATA, (used + more * 2**20, resource.RLIM_INFINITY))
{code}
"""


def limited(code: str, **config: Any) -> str:
    """What a process says whose memory ends."""
    script = LIMITED.format(file=os.path.abspath(__file__), config=config, code=code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA is Linux's")


@linux
def test_out_of_memory_in_loading() -> None:
    """Weights of 2 × 3 × 2048 × 8192 × 4 bytes and more, 400 MiB, into 100 MiB."""
    said = limited(
        "limit(100)\ntry: t.run(t.spec_of(big), t.Wanted(random=True, dtype=t.FP32))\n"
        "except t.OutOfMemoryError as error: print(error.message)",
        hidden_size=2048, intermediate_size=8192,
    )  # fmt: skip
    assert said.startswith("model: its weights do not fit into the memory of cpu: ")
    assert issubclass(OutOfMemoryError, KvctlError)


@linux
def test_out_of_memory_with_few_layers() -> None:
    """What was done already is not advised again."""
    said = limited(
        "limit(100)\ntry: t.run(t.spec_of(big), t.Wanted(random=True, layers=1, dtype=t.FP32))\n"
        "except t.OutOfMemoryError as error: print(error.hint)",
        hidden_size=2048, intermediate_size=16384,
    )  # fmt: skip
    assert said.startswith("fewer --layers")


@linux
def test_out_of_memory_in_a_pass() -> None:
    """4,096 tokens take 2 × 2 × 16 heads × 256 × 4 bytes each, 256 MiB, of 200 MiB; 128 tokens take 8 MiB."""
    said = limited(
        "limit(200)\nreport = t.run(t.spec_of(big), t.Wanted(random=True, dtype=t.FP32), contexts=(128, 4096, 8192), prefill_chunk=128)\n"
        "print(*(point.error for point in report.points), sep='\\n')",
        num_attention_heads=16, num_key_value_heads=16, head_dim=256, max_position_embeddings=10_000,
    )  # fmt: skip
    errors = said.splitlines()
    assert errors[0] == "None"
    assert errors[1].startswith("out of memory: ")
    assert errors[2] == "not tried: a smaller one ran out of memory"


# -- Ctrl-C -------------------------------------------------------------------------------------------


def interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_ctrl_c_in_loading(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tensors=weights())
    monkeypatch.setattr("transformers.core_model_loading.convert_and_load_state_dict_in_model", interrupt)
    monkeypatch.setattr("transformers.modeling_utils.convert_and_load_state_dict_in_model", interrupt)
    report = run(folder)
    assert report.interrupted
    assert report.points == ()
    assert report.to_dict()["interrupted"] is True


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_ctrl_c_in_the_observed_pass(make: Make, monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """In the second point's: the first is complete and stays."""
    from kvctl.measure.passes import Passes

    folder = make(tensors=weights())
    feed = Passes.feed
    seen = []

    def watched(self: Any, ids: Any) -> Any:
        seen.append(ids.shape[1])
        if 16 in seen and ids.shape[1] == (16 if phase == "prefill" else 1):
            raise KeyboardInterrupt
        return feed(self, ids)

    monkeypatch.setattr(Passes, "feed", watched)
    report = run(folder, contexts=(8, 16, 32))
    assert report.interrupted
    assert [point.context for point in report.points] == [8]
    assert report.points[0].ttft is not None


def test_ctrl_c_between_points(make: Make) -> None:
    report = run(
        make(tensors=weights()),
        on_point=lambda point: interrupt() if point.context == 16 else None,
        contexts=(8, 16, 32),
    )
    assert report.interrupted
    assert [point.context for point in report.points] == [8, 16]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_real_signal(tmp_path: Path) -> None:
    """SIGINT to a process that profiles; it says what is complete and ends by itself."""
    code = f"""
import os, sys
sys.path.insert(0, os.path.dirname({os.path.abspath(__file__)!r}))
import test_profile_failures as t
report = t.run(t.spec_of(t.CONFIG | dict(max_position_embeddings=10**6)), t.Wanted(random=True, dtype=t.FP32),
               on_point=lambda point: print(point.context, flush=True), contexts=(8, 100_000), decode=2)
print(report.interrupted, len(report.points), flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                             start_new_session=True)  # fmt: skip
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "8\n"  # the second point takes minutes
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    finally:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 0, err[-2000:]
    assert out.splitlines()[-1] == "True 1"
    assert "Traceback" not in err


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize(("number", "said"), [
    (signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM"), (signal.SIGHUP, "ended by SIGHUP"),
], ids=str)  # fmt: skip
def test_a_command_that_is_ended_keeps_what_is_complete(tmp_path: Path, number: signal.Signals, said: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 10**6}))
    argv = [
        "profile",
        str(tmp_path / "model"),
        "--weights",
        "random",
        "--ctx",
        "8 100000",
        "--decode",
        "2",
        "--repeat",
        "1",
    ]
    kept = tmp_path / "run.json"
    child = subprocess.Popen([sys.executable, "-m", "kvctl", *argv, "--save", str(kept)], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip
    try:
        assert child.stderr is not None
        while not (line := child.stderr.readline()).startswith("8 tokens × 1: TTFT"):  # the second point takes minutes
            assert line, "ended by itself"
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    finally:
        with contextlib.suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 128 + number
    assert err.splitlines()[-1] == f"kvctl: error: {said}"
    assert "interrupted: the cache is as predicted, to the byte, in the one point" in out
    saved = json.loads(kept.read_text())
    assert (saved["interrupted"], len(saved["points"])) == (True, 1)


# -- the Hub ------------------------------------------------------------------------------------------

HUB = """
import os, sys
sys.path.insert(0, os.path.dirname({file!r}))
import test_profile_failures as t
from kvctl import sources
try:
    report = t.run(t.build_spec(sources.resolve("org/model")), t.Wanted(dtype=t.FP32))
    print("ran", report.agrees, report.model.source)
except t.KvctlError as error:
    print(type(error).__name__, error.message, "|", error.hint)
"""
TOKEN = "hf_averysecrettoken0123456789"


def through_hub(tmp_path: Path, url: str, **env: str) -> str:
    """What a process says that runs a model of the Hub at this address."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", HUB.format(file=os.path.abspath(__file__))], capture_output=True, text=True, timeout=120, check=False,
        env=kept | {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1"} | env,
    )  # fmt: skip
    assert TOKEN not in done.stdout + done.stderr
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done.stdout.strip()


@pytest.fixture
def files(make: Make) -> dict[str, bytes]:
    folder = make(tensors=weights())
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_model_from_the_hub_and_then_without_it(tmp_path: Path, files: dict[str, bytes]) -> None:
    from fake_hub import FakeHub

    with FakeHub() as hub:
        hub.tokens = {TOKEN}
        hub.add("org/model", files=files)
        assert through_hub(tmp_path, hub.url, HF_TOKEN=TOKEN) == "ran True hub"
        paths = [request.path for request in hub.requests]
        assert any(path.endswith("/model.safetensors") for path in paths)
        assert any(request.token == TOKEN for request in hub.requests)
    # With the Hub gone, and offline: from the client's cache.
    assert through_hub(tmp_path, hub.url, HF_HUB_OFFLINE="1") == "ran True cache"


def test_weights_that_are_not_in_the_cache(tmp_path: Path, files: dict[str, bytes]) -> None:
    """The configuration is: kvctl size was there before."""
    from fake_hub import FakeHub

    with FakeHub() as hub:
        hub.add("org/model", files={"config.json": files["config.json"]})
        assert "it has no weights in safetensors | --weights random" in through_hub(tmp_path, hub.url)
    said = through_hub(tmp_path, hub.url, HF_HUB_OFFLINE="1")
    assert "its weights are not in the Hub's cache, and HF_HUB_OFFLINE is set | hf download org/model" in said


@pytest.mark.slow
def test_a_hub_that_is_gone(tmp_path: Path, files: dict[str, bytes]) -> None:
    """The client tries for half a minute."""
    from fake_hub import FakeHub

    with FakeHub() as hub:
        hub.add("org/model", files={"config.json": files["config.json"]})
        through_hub(tmp_path, hub.url)
    assert "the Hub cannot be reached | try again" in through_hub(tmp_path, hub.url)


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "words"), [
    ("cut", "a damaged safetensors file"), ("gated", "it is gated"), ("broken", "the Hub answers 500"),
])  # fmt: skip
def test_a_hub_that_fails_at_the_weights(tmp_path: Path, files: dict[str, bytes], damage: str, words: str) -> None:
    from fake_hub import FakeHub

    with FakeHub() as hub:
        hub.tokens = {TOKEN}
        if damage == "cut":
            files["model.safetensors"] = files["model.safetensors"][:5000]
        hub.add("org/model", files=files)

        def hook(request: Any) -> Any:
            if not request.path.endswith("model.safetensors"):
                return None
            if damage == "gated":
                return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "restricted"}, b""
            return (500, {}, b"") if damage == "broken" else None

        hub.hook = hook
        said = through_hub(tmp_path, hub.url, HF_TOKEN=TOKEN)
    assert said.startswith("SourceError org/model: transformers cannot load it: ")
    assert words in said
