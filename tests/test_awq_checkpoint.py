"""AWQ checkpoints: complete or absent, the same bytes for the same seed, and what they hold is what was meant."""

from __future__ import annotations

import hashlib
import json
import random
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
library = pytest.importorskip("safetensors.torch")

from kvctl.weights import verify  # noqa: E402
from kvctl.weights.awq.make import Settings, Step, make, plan  # noqa: E402
from kvctl.weights.awq.structure import ARCHITECTURES  # noqa: E402
from kvctl.weights.calibration import Wanted  # noqa: E402
from kvctl.weights.checkpoint import work_folder  # noqa: E402

SMALL = Settings(samples=6, length=48, batch=4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return awq_models.save(tmp_path_factory.mktemp("llama"), num_hidden_layers=3)


def _bytes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_architecture(model_type: str, tmp_path: Path) -> None:
    """Written, checked, and loaded as what it stands for: nearer to the model than its weights rounded to nearest."""
    source = awq_models.save(tmp_path / "model", model_type)
    made = make(source, tmp_path / "awq", SMALL)
    checked = verify.check(tmp_path / "awq")
    assert checked.group == made.group == 32
    config = json.loads((tmp_path / "awq" / "config.json").read_text())
    facts = config["quantization_config"]
    assert (facts["quant_method"], facts["version"], facts["bits"], facts["group_size"]) == ("awq", "gemm", 4, 32)
    assert made.error < made.plain_error
    stored = library.load_file(tmp_path / "awq" / "model.safetensors")
    before = library.load_file(source / "model.safetensors")
    whole = {name.removesuffix(".qweight") + ".weight" for name in stored if name.endswith(".qweight")}
    rest = {name for name in stored if not name.endswith((".qweight", ".qzeros", ".scales"))}
    assert whole | rest == set(before)
    left = {name.removesuffix(".weight") for name in rest if before[name].dim() == 2} - {"model.embed_tokens"}
    assert left == {name for name in facts["modules_to_not_convert"] if f"{name}.weight" in before}
    loaded = verify.load_dequantized(tmp_path / "awq", torch.float32)
    assert not any(parameter.is_meta for parameter in loaded.parameters())
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.randint(3, 512, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        far = (loaded(ids).logits - plain(ids).logits).square().mean() / plain(ids).logits.square().mean()
    assert 0 < far < 0.15


def test_same_seed_same_bytes_and_resumed_ones(llama: Path, tmp_path: Path) -> None:
    """Interrupted after every second step, and gone on with: always the same files."""
    steps: list[Step] = []
    make(llama, tmp_path / "whole", SMALL, progress=steps.append)
    wanted = _bytes(tmp_path / "whole")
    assert not work_folder(tmp_path / "whole").exists()
    make(llama, tmp_path / "again", SMALL)
    assert _bytes(tmp_path / "again") == wanted
    for stop in range(0, len(steps) - 1, 2):
        target, seen = tmp_path / f"stopped{stop}", iter(range(len(steps)))

        def interrupt(_: Step, seen: Any = seen, stop: int = stop) -> None:
            if next(seen) == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            make(llama, target, SMALL, progress=interrupt)
        assert not target.exists()
        make(llama, target, SMALL, resume=True)
        assert _bytes(target) == wanted
    make(llama, tmp_path / "other", SMALL.replace(seed=1))
    assert _bytes(tmp_path / "other") != wanted


_CHILD = """
import sys
from pathlib import Path
from kvctl.weights.awq.make import Settings, make
make(Path(sys.argv[1]), Path(sys.argv[2]), Settings(samples=6, length=48, batch=4), resume=sys.argv[3] == "resume",
     progress=lambda step: print(step.stage, flush=True))
"""


@pytest.mark.slow
def test_killed_at_ten_moments(llama: Path, tmp_path: Path) -> None:
    """SIGKILL at random moments after the first step: nothing is at the target, or all of it; the same bytes come out."""
    make(llama, tmp_path / "whole", SMALL)
    wanted = _bytes(tmp_path / "whole")
    chance, target = random.Random(0), tmp_path / "killed"
    for _ in range(10):
        shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(work_folder(target), ignore_errors=True)
        child = _child(llama, target, "begin")
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(chance.uniform(0, 0.6))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        if target.exists():
            assert _bytes(target) == wanted
            continue
        assert work_folder(target).exists()
        child = _child(llama, target, "resume")
        child.communicate()
        assert child.returncode == 0
        assert _bytes(target) == wanted


def _child(source: Path, target: Path, how: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", _CHILD, str(source), str(target), how], stdout=subprocess.PIPE)


def test_a_full_disk(llama: Path, tmp_path: Path) -> None:
    """As far as a process can tell: the kernel refuses to make files longer than a limit."""
    kept, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, kept[1]))
    try:
        with pytest.raises(KvctlError, match=r"cannot write .*: File too large"):
            make(llama, tmp_path / "awq", SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not (tmp_path / "awq").exists()
    make(llama, tmp_path / "awq", SMALL)


def test_the_plan_is_what_comes(llama: Path, tmp_path: Path) -> None:
    asked = plan(llama, SMALL)
    made = make(llama, tmp_path / "awq", SMALL)
    checked = verify.check(tmp_path / "awq")
    assert (asked.file_bytes, asked.group, asked.layers) == (checked.tensor_bytes, made.group, 3)


def test_a_target_that_is_there(llama: Path, tmp_path: Path) -> None:
    target = tmp_path / "awq"
    target.mkdir()
    (target / "mine").write_text("mine")
    with pytest.raises(UsageError, match="is there already"):
        make(llama, target, SMALL)
    # What is no model's folder is not replaced at all.
    with pytest.raises(UsageError, match="is no model's folder"):
        make(llama, target, SMALL, force=True)
    assert (target / "mine").read_text() == "mine"
    (target / "config.json").write_text("{}")
    make(llama, target, SMALL, force=True)
    assert not (target / "mine").exists()
    verify.check(target)
    with pytest.raises(UsageError, match="is the model itself"):
        make(llama, llama, SMALL, force=True)
    with pytest.raises(UsageError, match="holds the model itself"):
        make(llama, llama.parent, SMALL, force=True)


def test_killed_between_two_renamings(llama: Path, tmp_path: Path) -> None:
    """What was at the target has been moved away and nothing has come: it comes back."""
    target, work = tmp_path / "awq", work_folder(tmp_path / "awq")
    (work / "old").mkdir(parents=True)
    (work / "old" / "mine").write_text("mine")

    def interrupt(_: Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(llama, target, SMALL, progress=lambda step: interrupt(step) if step.stage == "layer" else None)
    assert (target / "mine").read_text() == "mine"


def test_nothing_to_go_on_with(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing of .* is there to go on with"):
        make(llama, tmp_path / "awq", SMALL, resume=True)

    def interrupt(step: Step) -> None:
        if step.done and step.stage == "layer":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(llama, tmp_path / "awq", SMALL, progress=interrupt)
    with pytest.raises(UsageError, match="begun with other settings"):
        make(llama, tmp_path / "awq", SMALL.replace(seed=1), resume=True)
    piece = work_folder(tmp_path / "awq") / "layer-00000.safetensors"
    data = bytearray(piece.read_bytes())
    data[-1] ^= 1
    piece.write_bytes(data)
    with pytest.raises(KvctlError, match=r"layer-00000\.safetensors in .* is damaged"):
        make(llama, tmp_path / "awq", SMALL, resume=True)


def test_two_at_one_target(llama: Path, tmp_path: Path) -> None:
    def inside(step: Step) -> None:
        if step == Step("layer", 1, 3):
            with pytest.raises(UsageError, match="another process is writing"):
                make(llama, tmp_path / "awq", SMALL)

    make(llama, tmp_path / "awq", SMALL, progress=inside)
    verify.check(tmp_path / "awq")


def test_what_is_quantized_already(llama: Path, tmp_path: Path) -> None:
    make(llama, tmp_path / "awq", SMALL)
    with pytest.raises(ConfigError, match=r"is quantized already \(awq, 4 bits in groups of 32\)"):
        make(tmp_path / "awq", tmp_path / "twice", SMALL)


def test_shapes_that_no_group_divides(tmp_path: Path) -> None:
    source = awq_models.save(tmp_path / "model", intermediate_size=72)
    with pytest.raises(ConfigError, match="no group of 128, 64, 32 divides inputs of 72"):
        make(source, tmp_path / "awq", SMALL)
    source = awq_models.save(tmp_path / "odd", num_key_value_heads=1, head_dim=20, num_attention_heads=8)
    with pytest.raises(ConfigError, match="8 outputs together"):
        make(source, tmp_path / "awq", SMALL)


def test_anothers_tokenizer(llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(llama, source)
    awq_models.tokenizer(600).save_pretrained(source)
    text = tmp_path / "text"
    text.write_text("".join(chr(32 + i % 590) for i in range(10_000)))
    with pytest.raises(ConfigError, match=r"the tokenizer has token 5\d\d, the model 512"):
        make(source, tmp_path / "awq", SMALL.replace(calibration=Wanted(str(text))))
    for path in source.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ConfigError, match="no tokenizer can be loaded"):
        make(source, tmp_path / "awq", SMALL)


def test_windows_by_hand(tmp_path: Path) -> None:
    """Ten tokens in windows of three: three that do not overlap, in order; with a first token, windows of two."""
    from kvctl.weights import calibration

    assert calibration.windows(list(range(10)), 3, 3, 0).tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert calibration.windows(list(range(10)), 5, 3, 0, 99).tolist() == [[99, i, i + 1] for i in range(0, 10, 2)]
    tokenizer = awq_models.tokenizer(100)
    tokenizer.save_pretrained(tmp_path / "plain")
    ids, first = calibration.tokenize(tmp_path / "plain", "abc", 100)
    assert (len(ids), first) == (3, None)
    # One that puts "!" (the second character from the space: token 2 after "?" and " ") before every text.
    adding = pytest.importorskip("tokenizers").processors.TemplateProcessing(single="! $A", special_tokens=[("!", 2)])
    tokenizer.backend_tokenizer.post_processor = adding
    tokenizer.bos_token = "!"
    tokenizer.save_pretrained(tmp_path / "adds")
    assert calibration.tokenize(tmp_path / "adds", "abc", 100) == (ids, 2)


def test_too_little_text(llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("a" * 100)
    with pytest.raises(UsageError, match="has 100 tokens: 2 of 6 samples of 48"):
        make(llama, tmp_path / "awq", SMALL.replace(calibration=Wanted(str(text))))


def test_weights_that_are_missing_or_broken(llama: Path, tmp_path: Path) -> None:
    for number, (change, message) in enumerate((
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "lacks model.layers.1.mlp.up_proj.weight"),
        (lambda tensors: tensors.update({"model.layers.0.mlp.extra.weight": torch.zeros(2)}), "has model.layers.0.mlp.extra"),
        (lambda tensors: tensors["model.layers.2.mlp.up_proj.weight"].fill_(float("nan")), "not finite"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(2)}), "model.norm.weight is"),
    )):  # fmt: skip
        source = tmp_path / str(number)
        shutil.copytree(llama, source)
        tensors = library.load_file(source / "model.safetensors")
        change(tensors)
        library.save_file(tensors, source / "model.safetensors", {"format": "pt"})
        with pytest.raises(SourceError, match=message):
            make(source, tmp_path / "awq", SMALL)
        assert not (tmp_path / "awq").exists()


def test_numbers_that_float16_does_not_hold(llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(llama, source)
    tensors = library.load_file(source / "model.safetensors")
    tensors["lm_head.weight"][3, 4] = 1e5
    library.save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(KvctlError, match="reaches 1e\\+05, which float16 does not hold") as caught:
        make(source, tmp_path / "awq", SMALL)
    assert caught.value.hint == "--dtype bf16 holds it"
    make(source, tmp_path / "awq", SMALL.replace(dtype="bfloat16"))
    assert json.loads((tmp_path / "awq" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    source = awq_models.save(tmp_path / "model", tie_word_embeddings=True)
    make(source, tmp_path / "awq", SMALL)
    stored = library.load_file(tmp_path / "awq" / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert torch.equal(stored["model.embed_tokens.weight"],
                       library.load_file(source / "model.safetensors")["model.embed_tokens.weight"].half())  # fmt: skip
    loaded = verify.load_dequantized(tmp_path / "awq", torch.float32)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_what_else_a_folder_has(llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(llama, source)
    for name in ("LICENSE", "chat_template.jinja", "notes.txt", "code.py"):
        (source / name).write_text(name)
    make(source, tmp_path / "awq", SMALL)
    names = {path.name for path in (tmp_path / "awq").iterdir()}
    assert {"LICENSE", "chat_template.jinja", "tokenizer.json", "generation_config.json", "config.json"} <= names
    assert not names & {"notes.txt", "code.py"}


@pytest.mark.parametrize("change", ["zero scale", "dtype", "missing", "not packed"])
def test_a_damaged_checkpoint_is_found(llama: Path, tmp_path: Path, change: str) -> None:
    make(llama, tmp_path / "awq", SMALL)
    file, name = tmp_path / "awq" / "model.safetensors", "model.layers.1.mlp.up_proj"
    tensors = library.load_file(file)
    if change == "zero scale":
        tensors[f"{name}.scales"][0, 0] = 0
    elif change == "dtype":
        tensors[f"{name}.scales"] = tensors[f"{name}.scales"].float()
    elif change == "missing":
        del tensors[f"{name}.qzeros"]
    else:
        for part in ("qweight", "qzeros", "scales"):
            del tensors[f"{name}.{part}"]
        tensors[f"{name}.weight"] = torch.zeros(96, 64, dtype=torch.float16)
    library.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(SourceError, match=f"{name}"):
        verify.check(tmp_path / "awq")


def test_experts_that_saw_nothing_are_told_of(tmp_path: Path) -> None:
    source = awq_models.save(tmp_path / "model", "mixtral")
    tensors = library.load_file(source / "model.safetensors")
    for name in tensors:
        if name.endswith("block_sparse_moe.gate.weight"):
            # Whatever the token: the first two experts get weights that are far above.
            tensors[name] = torch.zeros_like(tensors[name])
    library.save_file(tensors, source / "model.safetensors", {"format": "pt"})
    made = make(source, tmp_path / "awq", SMALL)
    assert any("experts were given no calibration token" in note for note in made.notes)


def test_several_files(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvctl.weights import checkpoint

    make(llama, tmp_path / "one", SMALL)
    monkeypatch.setattr(checkpoint, "_SHARD", 60_000)
    made = make(llama, tmp_path / "many", SMALL)
    shards = [path for path in made.files if path.suffix == ".safetensors"]
    assert len(shards) > 2
    assert verify.check(tmp_path / "many") == verify.check(tmp_path / "one")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    together = {name: tensor for path in shards for name, tensor in library.load_file(path).items()}
    assert set(index["weight_map"]) == set(together)
    one = library.load_file(tmp_path / "one" / "model.safetensors")
    assert all(torch.equal(one[name], together[name]) for name in one)
