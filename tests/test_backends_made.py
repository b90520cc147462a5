"""What backends make: read by hand, judged beside rounding to nearest, and there whole or not at all."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import awq_models
import pytest

from kvctl.errors import ConfigError, KvctlError, SourceError, UsageError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
library = pytest.importorskip("safetensors.torch")

from kvctl.weights.awq.make import Settings as Own  # noqa: E402
from kvctl.weights.awq.make import make as own_make  # noqa: E402
from kvctl.weights.backends import environments, process, table  # noqa: E402
from kvctl.weights.backends.compare import Compared, refuse_worse  # noqa: E402
from kvctl.weights.backends.make import Settings, link_old, make  # noqa: E402
from kvctl.weights.backends.packed import LAYOUTS, Decoded  # noqa: E402
from kvctl.weights.backends.table import Backend, Format, Size  # noqa: E402

CALIBRATION = {"samples": 6, "length": 48}


# -- formats, by hand -------------------------------------------------------------------------


def decoded(folder: Path, name: str, tensors: dict[str, Any], rows: int, width: int, group: int = 0) -> Any:
    library.save_file({f"a.{suffix}": tensor for suffix, tensor in tensors.items()}, str(folder / "m.safetensors"))
    found = Decoded(folder, [folder / "m.safetensors"], LAYOUTS[name], {"a": (rows, width)}, group)
    return found.read("a.weight")


def test_nvfp4(tmp_path: Path) -> None:
    # Sixteen codes, two a byte, the lower half first: 0x10 is code 0 (0.0) and then code 1 (0.5); 8 to 15 are negative.
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    scales = torch.tensor([[3.0]]).to(torch.float8_e4m3fn)
    # A weight is its value by the block's scale over the whole's: 3 / 2 here.
    found = decoded(tmp_path, "nvfp4", {"weight_packed": packed, "weight_scale": scales,
                                        "weight_global_scale": torch.tensor([2.0])}, 1, 16)  # fmt: skip
    half = [0.0, 0.75, 1.5, 2.25, 3.0, 4.5, 6.0, 9.0]
    assert found[0].tolist() == [*half, *(-value for value in half)]


def test_mxfp4(tmp_path: Path) -> None:
    # Scales are powers of two, stored as the exponent and 127: 129 is 4, 126 a half. 0x2A: code 10 (-1.0), then 2 (1.0).
    packed = torch.tensor([[0x2A] * 16 + [0x77] * 16], dtype=torch.uint8)
    found = decoded(
        tmp_path,
        "mxfp4",
        {"weight_packed": packed, "weight_scale": torch.tensor([[129, 126]], dtype=torch.uint8)},
        1,
        64,
    )
    assert found[0].tolist() == [-4.0, 4.0] * 16 + [3.0] * 32


def test_gptq(tmp_path: Path) -> None:
    # Eight inputs in a word, the first lowest: codes 0 to 7 of output 0 are 0x76543210; zeros are stored less one (7: 8).
    words = torch.tensor([[0x76543210] * 8], dtype=torch.int64).to(torch.int32)
    zeros = torch.tensor([[0x77777777]], dtype=torch.int64).to(torch.int32)
    scales = torch.tensor([[0.5, 1, 1, 1, 1, 1, 1, 2]], dtype=torch.float16)
    found = decoded(tmp_path, "gptq", {"qweight": words, "qzeros": zeros, "scales": scales,
                                       "g_idx": torch.zeros(8, dtype=torch.int32)}, 8, 8, group=8)  # fmt: skip
    assert found[0].tolist() == [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, -1.0, -0.5]
    assert found[7].tolist() == [-16.0, -14.0, -12.0, -10.0, -8.0, -6.0, -4.0, -2.0]


def test_eight_bits(tmp_path: Path) -> None:
    scale = torch.tensor([[0.5], [0.25]], dtype=torch.bfloat16)
    codes = torch.tensor([[-128, 127], [4, 0]])
    assert decoded(tmp_path, "int8-w8a8", {"weight": codes.to(torch.int8), "weight_scale": scale}, 2, 2).tolist() == [
        [-64.0, 63.5], [1.0, 0.0]]  # fmt: skip
    values = torch.tensor([[448.0, -0.875], [16.0, 0.0]]).to(torch.float8_e4m3fn)
    assert decoded(tmp_path, "fp8", {"weight": values, "weight_scale": scale}, 2, 2).tolist() == [
        [224.0, -0.4375],
        [4.0, 0.0],
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_nearest_is_near(name: str) -> None:
    """Mean squared error of a normal matrix, against a step's variance: step² / 12 for integers."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    rule = LAYOUTS[name]
    group = rule.group or 64
    error = (rule.nearest(weight, group) - weight).square().mean()
    top = weight.view(64, -1, group).abs().amax(-1) if name == "gptq" else weight.abs().amax(1)
    step = {"gptq": top * 2 / 15, "int8-w8a8": top / 127.5}.get(name)
    if step is not None:
        assert float(error) == pytest.approx(float(step.square().mean() / 12), rel=0.1)
    else:
        # Three bits of mantissa: a relative step of 1/8 to 1/16; one bit: of 1/2 to 1/4.
        worst = {"fp8": 2.0**-4, "fp8-static": 2.0**-4, "nvfp4": 0.25, "mxfp4": 0.34}[name]
        assert 0 < float(error.sqrt()) < worst * float(weight.square().mean().sqrt())


def test_nearest_rounds_in_the_models_dtype() -> None:
    # In bfloat16: 191 / 127.5 is 1.498, stored as 1.5; 134 / 1.5 is 89.33, of which 89.5 is left, and the even code is 90:
    # 135. In float32: 134 / 1.498 is 89.45, and 89 of 191 / 127.5 are 133.325.
    weight = torch.tensor([[191.0, 134.0]])
    found = LAYOUTS["int8-w8a8"].nearest(weight.bfloat16(), 0)
    assert found.dtype == torch.float32
    assert found.tolist() == [[190.5, 135.0]]
    assert LAYOUTS["int8-w8a8"].nearest(weight, 0)[0].tolist() == pytest.approx([127 * 191 / 127.5, 133.3255], rel=1e-6)
    # FP8: 191 / 448 is 0.42634, in bfloat16 0.42578; 134 / 0.42578 is 314.7, in bfloat16 314, in steps of 32 320.
    assert LAYOUTS["fp8"].nearest(weight.bfloat16(), 0)[0, 1] == 320 * 0.42578125


@pytest.mark.parametrize(("calibrated", "hint"), [(True, "more samples"), (False, "it looks at no samples")])
def test_what_helps_where_a_result_is_worse(calibrated: bool, hint: str) -> None:
    with pytest.raises(KvctlError, match=r"llm-compressor's fp8 is worse than rounding to nearest") as caught:
        refuse_worse("llm-compressor's fp8", Compared((2.0,), (1.0,)), 1.02, calibrated=calibrated)
    assert hint in str(caught.value.hint)
    refuse_worse("llm-compressor's fp8", Compared((1.01,), (1.0,)), 1.02, calibrated=calibrated)


def test_shapes_and_dtypes_are_checked(tmp_path: Path) -> None:
    good = {"weight": torch.zeros(2, 2, dtype=torch.int8), "weight_scale": torch.ones(2, 1)}
    bad = {
        "lacks weight_scale": {"weight": good["weight"]},
        "weight is F32": {**good, "weight": torch.zeros(2, 2)},
        r"weight_scale is F32 \(2, 2\)": {**good, "weight_scale": torch.ones(2, 2)},
        "no scale can be": {**good, "weight_scale": torch.full((2, 1), float("nan"))},
    }
    for message, tensors in bad.items():
        with pytest.raises(SourceError, match=message):
            decoded(tmp_path, "int8-w8a8", tensors, 2, 2)


# -- from a model's folder to a checkpoint ----------------------------------------------------

FAKE = """
import json, pathlib, shutil, os
def run(request, tell):
    tell("layer", 0, 1)
    assert json.loads(pathlib.Path(request["source"], "config.json").read_text())["hidden_size"]
    shutil.copytree({given!r}, request["out"])
    out = pathlib.Path(request["out"])
    {harm}
    tell("layer", 1, 1)
    return {{"samples": len(request["ids"])}}
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a good AWQ checkpoint of it."""
    folder = tmp_path_factory.mktemp("llama")
    source = awq_models.save(folder / "model", num_hidden_layers=2)
    own_make(source, folder / "given", Own(**CALIBRATION))
    return source, folder / "given"


@pytest.fixture
def fake(llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend that hands out that checkpoint, after `harm`."""
    size = Size(1, 1, True)
    formats = (Format("awq", "awq, gemm", 4, 128, True, ""), Format("gptq", "gptq", 4, 128, True, ""))
    one = Backend("fake", "fake", "fake", formats, False, (11, 99), (environments.here(),), False, size, size, "", "")
    monkeypatch.setattr(table, "BACKENDS", (one,))
    monkeypatch.setenv("KVCTL_CACHE", str(tmp_path / "cache"))
    env = tmp_path / "env"
    (env / "bin").mkdir(parents=True)
    (env / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (env / "bin" / "python").chmod(0o755)
    found = environments.State(one, "installed", env, "1", "3", "cpu", 1, 0, "")
    monkeypatch.setattr(environments, "state", lambda name: found)
    workers = tmp_path / "workers"
    workers.mkdir()
    shutil.copy(process.WORKERS / "main.py", workers)
    monkeypatch.setattr(process, "WORKERS", workers)

    def run(harm: str, target: Path, force: bool = False, name: str = "awq") -> Any:
        (workers / "fake.py").write_text(FAKE.format(given=str(llama[1]), harm=harm))
        return make(llama[0], target, Settings("fake", name, **CALIBRATION), force=force)

    return run


def test_a_good_one(fake: Any, llama: tuple[Path, Path], tmp_path: Path) -> None:
    made = fake("pass", tmp_path / "out")
    assert made.compared.error < made.compared.plain_error
    assert len(made.compared.errors) == 2
    assert made.facts == {"samples": 6}
    assert made.packed == 14  # seven in each of two layers
    assert sorted(path.name for path in made.files) == sorted(path.name for path in (tmp_path / "out").iterdir())
    ours, theirs = (library.load_file(str(at / "model.safetensors")) for at in (tmp_path / "out", llama[1]))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (llama[0] / "tokenizer.json").read_bytes()
    assert not list((tmp_path / "cache" / "backends" / "logs").iterdir())


LOAD = "from safetensors.torch import load_file, save_file; t = load_file(str(out / 'model.safetensors')); "
SAVE = "; save_file(t, str(out / 'model.safetensors'))"
CONFIG = "c = json.loads((out / 'config.json').read_text()); {}; (out / 'config.json').write_text(json.dumps(c))"
Q = "model.layers.1.mlp.up_proj"
HARMS = {
    "nothing": ("shutil.rmtree(out)", "wrote no config.json"),
    "half": ("(out / 'model.safetensors').unlink()", "wrote no model.safetensors"),
    "cut short": ("os.truncate(out / 'model.safetensors', 5000)", "model.safetensors"),
    "a link": ("(out / 'model.safetensors').rename(out / 'x'); (out / 'model.safetensors').symlink_to(out / 'x')",
               "wrote no model.safetensors"),
    "another method": (CONFIG.format("c['quantization_config']['quant_method'] = 'gptq'"), "says quant_method 'gptq'"),
    "another group": (CONFIG.format("c['quantization_config']['group_size'] = 16"), "says group_size '16'"),
    "a layer is missing": (f"{LOAD}[t.pop('{Q}.' + p) for p in ('qweight', 'qzeros', 'scales')]{SAVE}", "up_proj"),
    "a shape": (f"{LOAD}t['{Q}.qzeros'] = t['{Q}.qzeros'][:1].clone(){SAVE}", "up_proj.qzeros is"),
    "not finite": (f"{LOAD}t['{Q}.scales'][0, 0] = float('nan'){SAVE}", "up_proj.scales has numbers"),
    "worse": (f"{LOAD}t['{Q}.qweight'] = t['{Q}.qweight'].flip(0){SAVE}", "worse than rounding to nearest"),
    "fails": ("raise RuntimeError('no luck')", "fake failed: RuntimeError: no luck"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMS)
def test_bad_ones_leave_nothing(fake: Any, tmp_path: Path, name: str) -> None:
    harm, message = HARMS[name]
    place = tmp_path / "place"
    (place / "out").mkdir(parents=True)
    (place / "out" / "config.json").write_text("{}")
    with pytest.raises(KvctlError, match=message) as caught:
        fake(harm, place / "out", force=True)
    assert "\n" not in caught.value.message
    assert [path.name for path in place.iterdir()] == ["out"]
    assert [path.name for path in (place / "out").iterdir()] == ["config.json"]


def test_refused_before_anything_runs(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="is there already"):
        fake("pass", tmp_path / "out")
    with pytest.raises(UsageError, match="makes no 'nvfp4'"):
        fake("pass", tmp_path / "new", name="nvfp4")
    gone = environments.state("fake").replace(status="not installed", folder=None)
    monkeypatch.setattr(environments, "state", lambda name: gone)
    with pytest.raises(UsageError, match="fake is not installed"):
        fake("pass", tmp_path / "new")


def test_old_names_of_rotary_embeddings(tmp_path: Path) -> None:
    """transformers 4 knows rope_theta and rope_scaling alone, and is silent about rope_parameters."""
    source, view = tmp_path / "source", tmp_path / "view"
    source.mkdir()
    view.mkdir()
    (source / "model.safetensors").write_bytes(b"x")
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    link_old(source, {"rope_parameters": scaled, "dtype": "bfloat16"}, view)
    found = json.loads((view / "config.json").read_text())
    assert (found["rope_theta"], found["rope_scaling"], found["torch_dtype"]) == (
        5e5,
        {"rope_type": "linear", "factor": 2.0},
        "bfloat16",
    )
    assert (view / "model.safetensors").read_bytes() == b"x"
    with pytest.raises(ConfigError, match="several kinds"):
        link_old(source, {"rope_parameters": {"full_attention": scaled}}, view)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(("name", "form"), [(one.name, form.name) for one in table.BACKENDS for form in one.formats])
def test_real_ones(name: str, form: str, tmp_path: Path) -> None:
    """Where the user has installed one: nothing is installed here."""
    if environments.state(name).status != "installed":
        pytest.skip(f"{name}'s environment is not installed")
    source = awq_models.save(tmp_path / "model", num_hidden_layers=1, hidden_size=64, intermediate_size=128)
    made = make(source, tmp_path / "out", Settings(name, form, **CALIBRATION))
    assert made.packed == 7
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("form", ["fp8", "fp8-static", "int8-w8a8"])
def test_eight_bits_are_rounded_as_here(form: str, dtype: str, tmp_path: Path) -> None:
    """A narrow model in each dtype: llm-compressor's own result is rounding to nearest, in the dtype that it works in."""
    if environments.state("llm-compressor").status != "installed":
        pytest.skip("llm-compressor's environment is not installed")
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    source = tmp_path / "model"
    awq_models.model("llama", **sizes).to(getattr(torch, dtype)).save_pretrained(source)
    awq_models.tokenizer(awq_models.model("llama", **sizes).config.vocab_size).save_pretrained(source)
    compared = make(source, tmp_path / "out", Settings("llm-compressor", form, **CALIBRATION)).compared
    assert compared.error == pytest.approx(compared.plain_error, rel=1e-3)
