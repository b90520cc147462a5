"""bitsandbytes checkpoints: what transformers itself would write, byte for byte, and as large as was said before."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import awq_models
import pytest

from kvctl.errors import ConfigError, KvctlError, SourceError, UsageError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("bitsandbytes")
library = pytest.importorskip("safetensors.torch")

from kvctl.tensors import grouped  # noqa: E402
from kvctl.weight_formats import convert, weight_format  # noqa: E402
from kvctl.weights import bnb_reference, bnb_verify  # noqa: E402
from kvctl.weights.bnb import Settings, Step, make, plan  # noqa: E402
from kvctl.weights.checkpoint import work_folder  # noqa: E402
from kvctl.weights.tensorfile import Source  # noqa: E402

pytestmark = pytest.mark.engine
FORMATS = {
    "int8": (Settings("int8"), {"load_in_8bit": True}),
    "nf4": (Settings("nf4"), {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "fp4-dq": (
        Settings("fp4", double=True),
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
    ),
}
# Plain ones, biases, tied heads, fused projections, experts, Conv1D, names with another prefix, latent attention, states.
TYPES = ("llama", "qwen2", "gemma2", "phi3", "mixtral", "qwen2_moe", "gpt2", "bloom", "opt", "deepseek_v3", "falcon_h1")


def _model(folder: Path, model_type: str = "llama", **changes: Any) -> Path:
    """In bfloat16, with a tokenizer."""
    made = awq_models.model(model_type, **changes).to(torch.bfloat16)
    made.save_pretrained(folder)
    awq_models.tokenizer(made.config.vocab_size).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _model(tmp_path_factory.mktemp("llama"))


def _bytes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def _nothing_at(target: Path) -> bool:
    return not target.exists() and not work_folder(target).exists()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("model_type", TYPES)
def test_as_transformers_writes_it(model_type: str, name: str, tmp_path: Path) -> None:
    settings, told = FORMATS[name]
    source = _model(tmp_path / "model", model_type)
    made = make(source, tmp_path / "out", settings)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        source, quantization_config=transformers.BitsAndBytesConfig(**told), dtype=torch.bfloat16, device_map="cpu"
    )
    theirs.save_pretrained(tmp_path / "theirs")
    wanted = library.load_file(tmp_path / "theirs" / "model.safetensors")
    found = library.load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(wanted)
    assert all(found[key].dtype == wanted[key].dtype and torch.equal(found[key], wanted[key]) for key in wanted)
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    # Lengths of the offsets as text are not known before, and the order of tensors may move digits in the header.
    slack = 3 * made.plan.packed if settings.double else 8
    assert abs(made.file_bytes - made.plan.file_bytes) <= slack
    checked = bnb_verify.check(tmp_path / "out", source)
    assert checked.packed == made.plan.packed
    assert checked.farthest is not None
    assert 0.9 < checked.farthest <= 1.02


@pytest.mark.parametrize(("name", "fmt"), [("int8", "int8"), ("nf4", "nf4"), ("fp4", "fp4"), ("nf4-dq", "nf4-dq")])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "qwen2_moe", "gpt2", "opt", "bloom", "jamba"])
def test_size_says_the_same(model_type: str, name: str, fmt: str, tmp_path: Path) -> None:
    """`size --weights-dtype` counts what lies in memory; the files have words beside each layer, a hundred bytes."""
    # As wide as real layers are: beside small ones those words would count.
    source = _model(
        tmp_path / "model", model_type, hidden_size=512, intermediate_size=1024, head_dim=64, vocab_size=2048
    )
    settings = Settings(name.removesuffix("-dq"), double=name.endswith("-dq"))
    said = plan(source, settings)
    stored = Source(source, [source / "model.safetensors"])
    tensors = grouped((n, stored.dtypes[n], stored.shapes[n], stored.sizes[n]) for n in stored.names())
    predicted = sum(one.total for one in convert(tensors, weight_format(fmt))[0])
    made = make(source, tmp_path / "out", settings)
    assert abs(made.file_bytes / predicted - 1) < 0.01
    if model_type != "gpt2":  # a Conv1D's outputs come second: `size` counts INT8's scales for its inputs
        assert 0 <= said.tensor_bytes - predicted <= 170 * said.packed


def test_reference_by_hand() -> None:
    """One block: the largest is 2, so codes 0, 7 and 15 of NF4 are -2, 0 and 2; bytes have the first weight above."""
    import numpy as np

    packed = np.array([[0x07], [0xF0]] + [[0x77]] * 30, dtype=np.uint8)
    out = bnb_reference.four_bits(packed, np.array([2.0], dtype=np.float32), "nf4", 0, 64)
    assert out[:5].tolist() == [-2.0, 0.0, 2.0, -2.0, 0.0]
    # INT8: 127 stands for the largest of its row.
    rows = bnb_reference.int8(np.array([[127, -127], [0, 64]], dtype=np.int8), np.array([3.0, 1.27], dtype=np.float32))
    assert rows == pytest.approx(np.array([[3.0, -3.0], [0.0, 0.64]]), abs=1e-6)


def test_same_bytes_and_one_file_or_many(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvctl.weights import bnb, checkpoint

    make(llama, tmp_path / "one", Settings())
    make(llama, tmp_path / "again", Settings())
    assert _bytes(tmp_path / "one") == _bytes(tmp_path / "again")
    monkeypatch.setattr(checkpoint, "_SHARD", 60_000)
    monkeypatch.setattr(bnb, "_PIECE", 20_000)
    made = make(llama, tmp_path / "many", Settings())
    shards = [path for path in made.files if path.suffix == ".safetensors"]
    assert len(shards) > 2
    one = library.load_file(tmp_path / "one" / "model.safetensors")
    many = {name: tensor for path in shards for name, tensor in library.load_file(path).items()}
    assert set(one) == set(many)
    assert all(torch.equal(one[name], many[name]) for name in one)
    bnb_verify.check(tmp_path / "many", llama)


def test_what_stays_and_what_is_named(llama: Path, tmp_path: Path) -> None:
    make(llama, tmp_path / "out", Settings("nf4", skip=("o_proj", "model.layers.0.mlp"), compute="float16"))
    stored = library.load_file(tmp_path / "out" / "model.safetensors")
    plain = {name for name, tensor in stored.items() if tensor.dtype == torch.bfloat16 and tensor.dim() == 2}
    assert plain == {
        "lm_head.weight", "model.embed_tokens.weight", *(f"model.layers.{i}.self_attn.o_proj.weight" for i in (0, 1)),
        *(f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }  # fmt: skip
    facts = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert facts["bnb_4bit_compute_dtype"] == "float16"
    assert {"o_proj", "model.layers.0.mlp", "lm_head"} <= set(facts["llm_int8_skip_modules"])
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert type(loaded.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert loaded.model.layers[1].mlp.up_proj.compute_dtype == torch.float16
    with pytest.raises(UsageError, match="no module is called 'o_porj'"):
        plan(llama, Settings(skip=("o_porj",)))
    make(llama, tmp_path / "int8", Settings("int8", threshold=4.5))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "int8")
    assert loaded.model.layers[1].mlp.up_proj.state.threshold == 4.5


@pytest.mark.parametrize("settings", [
    Settings("int4"), Settings("int8", double=True), Settings("int8", compute="float16"), Settings(compute="float8"),
    Settings(dtype="int8"), Settings("int8", threshold=-1.0),
])  # fmt: skip
def test_settings_that_cannot_be(llama: Path, tmp_path: Path, settings: Settings) -> None:
    with pytest.raises(UsageError):
        make(llama, tmp_path / "out", settings)
    assert _nothing_at(tmp_path / "out")


def test_another_dtype(llama: Path, tmp_path: Path) -> None:
    made = make(llama, tmp_path / "out", Settings(dtype="float16"))
    stored = library.load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.norm.weight"].dtype == torch.float16
    assert abs(made.file_bytes - made.plan.file_bytes) <= 8
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float16"


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["int8", "nf4", "fp4"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"])
def test_weights_are_rounded_before_they_are_packed(
    llama: Path, tmp_path: Path, kind: str, double: bool, stored: str, dtype: str | None
) -> None:
    """Held against torch's own rounding: a block's largest is that of the rounded weights, and the check takes it."""
    if kind == "int8" and double:
        pytest.skip("double quantization belongs to 4 bits")
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(llama)).to(getattr(torch, stored))
    model.save_pretrained(tmp_path / "model")
    make(tmp_path / "model", tmp_path / "out", Settings(kind, double=double, dtype=dtype))
    found = bnb_verify.check(tmp_path / "out", tmp_path / "model")
    assert found.farthest is not None
    assert 0.9 < found.farthest <= 1.02
    name = "model.layers.1.mlp.up_proj"
    weight = model.get_submodule(name).weight.detach().to(getattr(torch, dtype or stored))
    tensors = library.load_file(tmp_path / "out" / "model.safetensors")
    if kind == "int8":
        assert torch.equal(tensors[f"{name}.SCB"], weight.half().float().abs().amax(1))
    elif not double:
        assert torch.equal(tensors[f"{name}.weight.absmax"], weight.float().reshape(-1, 64).abs().amax(1))


@pytest.mark.parametrize("twin", ["same", "other", "alone"])
def test_tied_embeddings_are_stored_once(twin: str, tmp_path: Path) -> None:
    source = _model(tmp_path / "model", tie_word_embeddings=True)
    tensors = library.load_file(source / "model.safetensors")
    assert "lm_head.weight" not in tensors
    if twin != "alone":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][0, 0] += twin == "other"
        library.save_file(tensors, source / "model.safetensors", {"format": "pt"})
    make(source, tmp_path / "out", Settings())
    stored = library.load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight" in stored) == (twin == "other")
    assert torch.equal(stored["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])


def test_what_is_to_be_said(llama: Path, tmp_path: Path) -> None:
    """down_proj has 96 inputs, which bitsandbytes' kernel for AVX512-BF16 does not take."""
    (note,) = plan(llama, Settings()).notes
    assert note.endswith("inputs none of 64: down_proj (64 × 96)")
    assert plan(llama, Settings("int8")).notes == ()
    source = tmp_path / "model"
    shutil.copytree(llama, source)
    for path in source.glob("tokenizer*"):
        path.unlink()
    assert plan(source, Settings("int8")).notes == ("its folder has no tokenizer, and neither will the checkpoint",)
    experts = plan(_model(tmp_path / "experts", "mixtral"), Settings("int8")).notes
    assert experts == (
        "bitsandbytes in transformers 5 packs linear layers and leaves the experts of a mixture as they are",
    )


def test_a_gguf_file(tmp_path: Path) -> None:
    """The same bytes as from the folder that transformers makes of it; tensors in 8 bits are told of."""
    gguf = pytest.importorskip("gguf")
    np = pytest.importorskip("numpy")
    file, chance = tmp_path / "model.gguf", np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(32)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([chr(97 + i) for i in range(26)] + ["ab", *(f"<{i}>" for i in range(5))])
    writer.add_token_types([1] * 32)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(30)
    writer.add_eos_token_id(31)
    writer.add_chat_template("{{ messages }}")
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64), "ffn_gate": (128, 64),
              "ffn_up": (128, 64), "ffn_down": (64, 128)}  # fmt: skip
    for name, shape in shapes.items():
        data = gguf.quants.quantize(chance.standard_normal(shape, dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name, rows in (("token_embd", (32, 64)), ("output", (32, 64)), ("output_norm", (64,)), ("blk.0.attn_norm", (64,)),
                       ("blk.0.ffn_norm", (64,))):  # fmt: skip
        writer.add_tensor(f"{name}.weight", chance.standard_normal(rows, dtype=np.float32))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    steps: list[Step] = []
    made = make(file, tmp_path / "out", Settings("nf4"), progress=steps.append)
    assert steps[:2] == [Step("dequantize", 0, 1), Step("dequantize", 1, 1)]
    assert "is quantized already (Q8_0)" in made.plan.notes[0]
    assert abs(made.file_bytes - made.plan.file_bytes) <= 32  # digits of places in the header, which the order moves
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= {path.name for path in made.files}
    config = transformers.GgufConfig(dequantize=True)
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.bfloat16, quantization_config=config
    )
    plain.save_pretrained(tmp_path / "plain")
    make(tmp_path / "plain", tmp_path / "again", Settings("nf4"))
    assert _bytes(tmp_path / "out")["model.safetensors"] == _bytes(tmp_path / "again")["model.safetensors"]
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1000)
    with pytest.raises(SourceError, match="before its tensors do"):
        make(file, tmp_path / "cut", Settings("nf4"))
    assert _nothing_at(tmp_path / "cut")


def test_what_is_quantized_already(llama: Path, tmp_path: Path) -> None:
    make(llama, tmp_path / "nf4", Settings())
    with pytest.raises(ConfigError, match=r"is quantized already \(bitsandbytes, 4 bits"):
        make(tmp_path / "nf4", tmp_path / "twice", Settings("int8"))


def test_weights_that_are_missing_or_broken(llama: Path, tmp_path: Path) -> None:
    for number, (change, message) in enumerate((
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "lacks model.layers.1.mlp.up_proj.weight"),
        (lambda tensors: tensors.pop("lm_head.weight"), "lacks lm_head.weight"),
        (lambda tensors: tensors.update({"model.layers.0.mlp.extra.weight": torch.zeros(2)}), "has model.layers.0.mlp.extra"),
        (lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].fill_(float("nan")), "up_proj.weight has .* not finite"),
        (lambda tensors: tensors["model.norm.weight"].fill_(float("inf")), "model.norm.weight has .* not finite"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(2)}), "model.norm.weight is"),
    )):  # fmt: skip
        source = tmp_path / str(number)
        shutil.copytree(llama, source)
        tensors = library.load_file(source / "model.safetensors")
        change(tensors)
        library.save_file(tensors, source / "model.safetensors", {"format": "pt"})
        with pytest.raises(SourceError, match=message):
            make(source, tmp_path / "out", Settings())
        assert _nothing_at(tmp_path / "out")


def test_numbers_that_float16_does_not_hold(llama: Path, tmp_path: Path) -> None:
    """bitsandbytes takes weights for INT8 in float16, which ends at 65,504."""
    source = tmp_path / "model"
    shutil.copytree(llama, source)
    tensors = library.load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e5
    library.save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(KvctlError, match=r"up_proj\.SCB has numbers that float16 does not hold"):
        make(source, tmp_path / "out", Settings("int8"))
    assert _nothing_at(tmp_path / "out")
    make(source, tmp_path / "out", Settings("nf4"))


def test_a_full_disk(llama: Path, tmp_path: Path) -> None:
    """As far as a process can tell: the kernel refuses to make files longer than a limit."""
    kept, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, kept[1]))
    try:
        with pytest.raises(KvctlError, match=r"cannot write .*: File too large"):
            make(llama, tmp_path / "out", Settings())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
        signal.signal(signal.SIGXFSZ, ignored)
    assert _nothing_at(tmp_path / "out")


def test_too_little_room(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with numbers, before anything is read."""
    from kvctl.hardware import host

    found = host.host_device()
    with monkeypatch.context() as patched:
        patched.setattr(host, "host_device", lambda: found.replace(free_bytes=1000))
        with pytest.raises(KvctlError, match="MiB of memory, and 1000 B are free"):
            make(llama, tmp_path / "out", Settings())
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: type("", (), {"free": 1000})())
        with pytest.raises(KvctlError, match="on the disk while it works, and 1000 B are free"):
            make(llama, tmp_path / "out", Settings())
    assert _nothing_at(tmp_path / "out")


def test_interrupted_at_every_step(llama: Path, tmp_path: Path) -> None:
    steps: list[Step] = []
    make(llama, tmp_path / "whole", Settings(), progress=steps.append)
    for stop in range(0, len(steps) - 1, 5):
        seen = iter(range(len(steps)))

        def interrupt(_: Step, seen: Any = seen, stop: int = stop) -> None:
            if next(seen) == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            make(llama, tmp_path / "out", Settings(), progress=interrupt)
        assert _nothing_at(tmp_path / "out")


_CHILD = """
import sys
from pathlib import Path
from kvctl.weights.bnb import Settings, make
make(Path(sys.argv[1]), Path(sys.argv[2]), Settings(), progress=lambda step: print(step.stage, flush=True))
"""


@pytest.mark.slow
def test_killed(llama: Path, tmp_path: Path) -> None:
    """SIGKILL at moments after the first step: nothing is at the target, or all of it; the next run does not stumble."""
    target = tmp_path / "out"
    make(llama, tmp_path / "whole", Settings())
    for wait in (0.0, 0.02, 0.1):
        shutil.rmtree(target, ignore_errors=True)
        child = subprocess.Popen([sys.executable, "-c", _CHILD, str(llama), str(target)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(wait)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert not target.exists() or _bytes(target) == _bytes(tmp_path / "whole")
        make(llama, target, Settings(), force=True)
        assert _bytes(target) == _bytes(tmp_path / "whole")
        assert not work_folder(target).exists()


def test_two_at_one_target(llama: Path, tmp_path: Path) -> None:
    """The second is refused, and does not take the first one's work away."""

    def inside(step: Step) -> None:
        if step.stage == "pack" and step.done == 1:
            with pytest.raises(UsageError, match="another process is writing"):
                make(llama, tmp_path / "out", Settings())

    make(llama, tmp_path / "out", Settings(), progress=inside)
    bnb_verify.check(tmp_path / "out", llama)


def test_what_else_a_folder_has(llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(llama, source)
    for name in ("LICENSE", "chat_template.jinja", "notes.txt", "code.py"):
        (source / name).write_text(name)
    make(source, tmp_path / "out", Settings())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"LICENSE", "chat_template.jinja", "tokenizer.json", "generation_config.json", "config.json"} <= names
    assert not names & {"notes.txt", "code.py"}


@pytest.mark.parametrize("change", ["swapped halves", "scale", "missing", "dtype", "norm"])
def test_a_damaged_checkpoint_is_found(llama: Path, tmp_path: Path, change: str) -> None:
    make(llama, tmp_path / "out", Settings())
    file, name = tmp_path / "out" / "model.safetensors", "model.layers.1.mlp.up_proj"
    tensors = library.load_file(file)
    weight = tensors[f"{name}.weight"]
    if change == "swapped halves":
        tensors[f"{name}.weight"] = (weight << 4) | (weight >> 4)
    elif change == "scale":
        tensors[f"{name}.weight.absmax"][0] *= 2
    elif change == "missing":
        del tensors[f"{name}.weight.absmax"]
    elif change == "dtype":
        tensors[f"{name}.weight.absmax"] = tensors[f"{name}.weight.absmax"].half()
    else:
        tensors["model.norm.weight"][0] += 1
    library.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(SourceError, match="norm" if change == "norm" else name):
        bnb_verify.check(tmp_path / "out", llama)


_PEAK = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from kvctl.weights.bnb import Settings, make
made = make(Path(sys.argv[1]), Path(sys.argv[2]), Settings(sys.argv[3]))
print(made.peak_bytes, made.plan.memory_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's mark is read from /proc")
@pytest.mark.parametrize("kind", ["int8", "nf4", "fp4"])
def test_memory_is_what_was_said(kind: str, tmp_path: Path) -> None:
    """Layers of 32 MB each: the kernel's own mark, within a tenth."""
    source = _model(tmp_path / "model", hidden_size=2048, intermediate_size=8192, head_dim=128, num_attention_heads=16)
    out = subprocess.run([sys.executable, "-c", _PEAK, str(source), str(tmp_path / "out"), kind], capture_output=True,
                         text=True, check=True)  # fmt: skip
    peak, said = map(int, out.stdout.split()[-2:])
    assert abs(peak / said - 1) < 0.1
