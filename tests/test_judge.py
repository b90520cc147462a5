"""Judging checkpoints in fresh processes: figures against a slow reference, and every way in which it can go wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import awq_models
import pytest

from kvctl.errors import ConfigError, KvctlError, SourceError, UsageError
from kvctl.weights.children import ask

psutil = pytest.importorskip("psutil")


# -- the protocol, with workers that misbehave --------------------------------------------------------


def _worker(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> str:
    name = f"worker_{abs(hash(str(folder))) % 10**9}"
    (folder / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    return name


def _ask(module: str, patience_s: float = 60.0, told: Callable[[Any], None] = lambda line: None) -> Any:
    return ask(module, {"number": 20}, what="the work", told=told, patience_s=patience_s)


def _children() -> list[Any]:
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


def test_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What libraries print on standard output does not reach the answer."""
    module = _worker(tmp_path, monkeypatch, """
import os, sys
from kvctl.weights.children import serve
def work(job, tell):
    print('{"answer": {"double": 0}}', flush=True)
    os.write(1, b"noise" * 100000)
    tell({"done": 1})
    return {"double": 2 * job["number"], "much": "x" * 200000}
serve(work)
""")  # fmt: skip
    seen: list[Any] = []
    answer = _ask(module, told=seen.append)
    assert (answer["double"], len(answer["much"]), seen) == (40, 200_000, [{"done": 1}])
    assert not _children()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit(3)", "the work: its process ended with status 3"),
        ("import sys; sys.exit('no such luck')", "ended with status 1: no such luck"),
        ("import os; os.kill(os.getpid(), 9)", "was killed, as the kernel does when memory ends"),
        ("import os; os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        ("raise MemoryError('out of memory: 3 GiB')", "the work: out of memory: .*3 GiB"),
        ("import sys; sys.stdout.write('{\"answer\": {}}')", "ended with status 0"),
        ("print('[' * 100000); print('7'); print('{\"answer\": 7}'); print('no')", "ended with status 0"),
        ("import sys\nsys.stderr.write('y' * 10**6 + '\\nlast \\x1b[31mword')\nsys.exit(1)", r"status 1: last \[31mword"),
        ("from kvctl.errors import ConfigError\nfrom kvctl.weights.children import serve\n"
         "def work(job, tell):\n    raise ConfigError('wrong', hint='better')\nserve(work)", "^wrong$"),
        ("from kvctl.weights.children import serve\ndef work(job, tell):\n    1 / 0\nserve(work)", "ZeroDivisionError"),
        ("nonsense(", "ended with status 1: SyntaxError"),
    ],
)  # fmt: skip
def test_workers_that_give_no_answer(code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KvctlError, match=message) as caught:
        _ask(_worker(tmp_path, monkeypatch, code))
    assert "\n" not in caught.value.message
    assert (type(caught.value) is ConfigError) == (message == "^wrong$")
    assert not _children()


_HANGS = "import subprocess, sys, time\nsubprocess.Popen(['sleep', '1000'])\nprint('{}', flush=True)\ntime.sleep(1000)"


def test_silence_and_interrupts_end_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _worker(tmp_path, monkeypatch, _HANGS)
    with pytest.raises(KvctlError, match="silent for 1 seconds"):
        _ask(module, patience_s=1.0)
    assert not _children()

    def interrupt(line: Any) -> None:
        assert len(_children()) == 2
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _ask(module, told=interrupt)
    assert not _children()


def test_a_parent_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _worker(tmp_path, monkeypatch, "import time\nfrom kvctl.weights.children import serve\n"
                     "serve(lambda job, tell: (tell({'up': 1}), time.sleep(1000)))")  # fmt: skip
    code = (f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom kvctl.weights.children import ask\n"
            f"ask({module!r}, {{}}, what='x', told=lambda line: print('up', flush=True), patience_s=100)")  # fmt: skip
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"up\n"
    (child,) = psutil.Process(parent.pid).children()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


# -- models ---------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
library = pytest.importorskip("safetensors.torch")

from kvctl.weights import bnb, bnb_reference, verify  # noqa: E402
from kvctl.weights.awq.make import Settings as AwqSettings  # noqa: E402
from kvctl.weights.awq.make import make as make_awq  # noqa: E402
from kvctl.weights.judge import Exam, Judged, Stage, judge, refer  # noqa: E402

engine = pytest.mark.engine
EXAM = Exam(windows=3, length=70, new_tokens=6, prompt="What")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its head is large, so that it is sure of what it says: else nothing that quantizing does would show."""
    folder, made = tmp_path_factory.mktemp("llama"), awq_models.model("llama")
    made.lm_head.weight.data *= 30
    made.save_pretrained(folder)
    awq_models.tokenizer(512).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def referred(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Judged]:
    folder = tmp_path_factory.mktemp("reference")
    return folder, refer(llama, EXAM, folder)


def _ids() -> Any:
    """Windows of the shipped text: the tokenizer takes each character as a token."""
    from kvctl import texts

    made = awq_models.tokenizer(512)
    ids = made(texts.read("english"), add_special_tokens=False)["input_ids"]
    return torch.tensor(ids[:210]).view(3, 70)


def _log_probs(model: Any) -> Any:
    with torch.no_grad():
        return model(_ids()).logits.double().log_softmax(-1)[:, :-1]


def _expected(plain: Any, other: Any) -> tuple[float, float, float]:
    """Perplexity, divergence and top-1 of all tokens at once, in float64."""
    one, two, true = _log_probs(plain), _log_probs(other), _ids()[:, 1:, None]
    return (
        float(torch.exp(-two.gather(2, true).mean())),
        float((one.exp() * (one - two)).sum(-1).mean()),
        float((one.argmax(-1) == two.argmax(-1)).double().mean()),
    )


def _found(judged: Judged) -> tuple[float, float, float]:
    quality = judged.quality
    assert quality is not None
    return judged.perplexity, quality.kl.value, quality.top1.value


def _dequantized(model: Any, stored: Any) -> None:
    """A plain model's weights by kvctl's own reading of NF4."""
    for name, module in model.named_modules():
        if f"{name}.weight.absmax" in stored:
            packed, scales = stored[f"{name}.weight"].numpy(), stored[f"{name}.weight.absmax"].numpy()
            flat = bnb_reference.four_bits(packed, scales, "nf4", 0, module.weight.numel())
            module.weight.data = torch.from_numpy(flat).view(module.weight.shape)


@engine
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_figures(kind: str, llama: Path, referred: tuple[Path, Judged], tmp_path: Path) -> None:
    has_avx512bf16 = pytest.importorskip("bitsandbytes.functional").has_avx512bf16
    reference, original = referred
    bnb.make(llama, tmp_path / "out", bnb.Settings(kind))
    stages: list[Stage] = []
    judged = judge(tmp_path / "out", EXAM, reference, progress=stages.append)
    plain = transformers.AutoModelForCausalLM.from_pretrained(llama)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" if kind == "int8" else llama)
    if kind == "nf4":
        _dequantized(loaded, library.load_file(tmp_path / "out" / "model.safetensors"))
    # On CPUs with AVX512-BF16 bitsandbytes computes 4 bits in bfloat16, whatever is asked for.
    assert _found(judged) == pytest.approx(_expected(plain, loaded), rel=1e-3 if kind == "int8" else 0.1)
    assert original.perplexity == pytest.approx(_expected(plain, plain)[0], rel=1e-5)
    assert original.quality is None
    assert judged.tokens == original.tokens == 3 * 69
    prompt = awq_models.tokenizer(512)("What", return_tensors="pt")["input_ids"]
    assert bool(judged.notes) == (kind == "nf4" and has_avx512bf16())  # down_proj has 96 inputs
    wanted = loaded.generate(prompt, do_sample=False, max_new_tokens=6, pad_token_id=0)[0, 4:].tolist()
    assert list(judged.generated) == wanted
    assert judged.same is not None
    assert (judged.by, judged.dtype) == ("transformers", "float32")
    # Nothing is held of what is packed but what the file holds, bitsandbytes' code books included.
    on_disk = library.load_file(tmp_path / "out" / "model.safetensors")
    words = sum(t.numel() for name, t in on_disk.items() if "quant_state" in name or name.endswith("weight_format"))
    buffers = sum(b.numel() * b.element_size() for b in plain.buffers())
    total = sum(t.numel() * t.element_size() for t in on_disk.values())
    assert judged.weights_bytes == total - words + buffers
    assert {stage.stage for stage in stages} == {"load", "score", "generate"}
    assert json.loads(json.dumps(judged.to_dict()))["quality"]["tokens"] == 207
    assert not _children()


@engine
def test_the_original_against_itself(llama: Path, referred: tuple[Path, Judged]) -> None:
    reference, original = referred
    judged = judge(llama, EXAM, reference)
    assert judged.quality is not None
    assert judged.quality.kl.value == pytest.approx(0, abs=1e-6)
    assert judged.quality.top1.value == 1
    assert judged.same == len(original.generated) == 6
    # Distributions lie on the disk in the model's own dtype: 207 rows of 512 in float32.
    assert (reference / "logits.bin").stat().st_size == 207 * 512 * 4


@engine
def test_awq(llama: Path, referred: tuple[Path, Judged], tmp_path: Path) -> None:
    """Without kernels: what the packed weights stand for, by the reference dequantizer."""
    make_awq(llama, tmp_path / "awq", AwqSettings(samples=6, length=48))
    judged = judge(tmp_path / "awq", EXAM.replace(kernels=False, dtype="float32"), referred[0])
    assert judged.by == "kvctl's reference dequantizer"
    plain = transformers.AutoModelForCausalLM.from_pretrained(llama)
    loaded = verify.load_dequantized(tmp_path / "awq", torch.float32)
    assert _found(judged) == pytest.approx(_expected(plain, loaded), rel=1e-3, abs=1e-6)


@engine
@pytest.mark.slow
def test_awq_by_gptqmodel(llama: Path, referred: tuple[Path, Judged], tmp_path: Path) -> None:
    """Kernels that share nothing with kvctl: the same weights, up to float16."""
    pytest.importorskip("gptqmodel")
    make_awq(llama, tmp_path / "awq", AwqSettings(samples=6, length=48))
    one = judge(tmp_path / "awq", EXAM, referred[0])
    two = judge(tmp_path / "awq", EXAM.replace(kernels=False), referred[0])
    assert (one.by, one.notes) == ("transformers + gptqmodel", ())
    assert _found(one) == pytest.approx(_found(two), rel=0.02)


@engine
def test_tokenizers(llama: Path, referred: tuple[Path, Judged], tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(llama, source)
    for path in source.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ConfigError, match="no tokenizer can be loaded"):
        judge(source, EXAM, referred[0])
    awq_models.tokenizer(40).save_pretrained(source)  # knows fewer characters
    with pytest.raises(ConfigError, match="makes other tokens of the text than the original's"):
        judge(source, EXAM, referred[0])
    awq_models.tokenizer(600).save_pretrained(source)
    (tmp_path / "text").write_text("".join(chr(32 + i % 590) for i in range(5000)))
    (tmp_path / "reference").mkdir()
    with pytest.raises(ConfigError, match=r"the tokenizer has token 5\d\d, the model 512"):
        refer(source, EXAM.replace(text=tmp_path / "text", windows=9), tmp_path / "reference")


@engine
def test_what_cannot_be_judged(llama: Path, referred: tuple[Path, Judged], tmp_path: Path) -> None:
    short = tmp_path / "text"
    short.write_text("a" * 100)
    with pytest.raises(UsageError, match="has 100 tokens: 1 of 3 windows of 70"):
        judge(llama, EXAM.replace(text=short), referred[0])
    with pytest.raises(UsageError, match="windows of 1 tokens"):
        judge(llama, EXAM.replace(length=1), referred[0])
    source = tmp_path / "model"
    shutil.copytree(llama, source)
    tensors = library.load_file(source / "model.safetensors")
    library.save_file(
        {name: tensors[name] for name in sorted(tensors)[1:]}, source / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(SourceError, match=r"the checkpoint lacks lm_head\.weight"):
        judge(source, EXAM, referred[0])
    tensors["model.norm.weight"][0] = float("nan")
    library.save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(KvctlError, match="numbers that are not finite"):
        judge(source, EXAM, referred[0])
    (source / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes()[:9000])
    with pytest.raises(SourceError, match="ends after 9,000"):
        judge(source, EXAM, referred[0])
    with (source / "model-00002.safetensors").open("wb") as file:
        file.truncate(8 * 2**40)
    with pytest.raises(KvctlError, match=r"to run model takes 8.00 TiB of memory at least, and .* are free"):
        judge(source, EXAM, referred[0])
    cut = tmp_path / "reference"
    shutil.copytree(referred[0], cut)
    with (cut / "logits.bin").open("r+b") as file:
        file.truncate(100_000)
    with pytest.raises(KvctlError, match="what the original left is cut short"):
        judge(llama, EXAM, cut)


@engine
def test_killed_while_it_scores(llama: Path, referred: tuple[Path, Judged]) -> None:
    def kill(stage: Stage) -> None:
        if stage.stage == "score":
            for child in _children():
                os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(KvctlError, match=r"judging llama\d*: its process was killed, as the kernel does"):
        judge(llama, EXAM, referred[0], progress=kill)
    time.sleep(0.1)
    assert not _children()
