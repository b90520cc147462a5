"""AWQ: the layout by hand and by others' code, scales that change nothing, the search against brute force."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import awq_models
import pytest

from kvctl.errors import ConfigError, KvctlError, UsageError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import numpy as np  # noqa: E402

from kvctl.weights.awq import layout, reference, search  # noqa: E402
from kvctl.weights.awq.structure import ARCHITECTURES, architecture, sites  # noqa: E402
from kvctl.weights.checkpoint import open_source  # noqa: E402
from kvctl.weights.layerwise import collect  # noqa: E402
from kvctl.weights.skeleton import Skeleton, run  # noqa: E402

# Layout


def test_eight_codes_in_a_word() -> None:
    # AutoAWQ's order 0,2,4,6,1,3,5,7 from the lowest bits up: codes 0..7 read 7,5,3,1,6,4,2,0 from the highest down.
    assert layout.pack(torch.arange(8, dtype=torch.uint8)[None]).tolist() == [[0x75316420]]


def test_the_highest_code_makes_a_negative_word() -> None:
    codes = torch.zeros(1, 8, dtype=torch.uint8)
    codes[0, 7] = 15  # bits 28 to 31: 0xF0000000 is -2^28 as a signed number
    assert layout.pack(codes).tolist() == [[-(1 << 28)]]


def test_reference_by_hand() -> None:
    # One input, eight outputs: codes 0..7, zeros all 4 (0x44444444), scales 0.5: (code - 4) / 2.
    words, zeros = np.array([[0x75316420]], dtype=np.int32), np.array([[0x44444444]], dtype=np.int32)
    found = reference.dequantize(words, zeros, np.full((1, 8), 0.5, dtype=np.float16))
    assert found.tolist() == [[-2.0], [-1.5], [-1.0], [-0.5], [0.0], [0.5], [1.0], [1.5]]


def test_packing_and_reference_agree() -> None:
    generator = torch.Generator().manual_seed(1)
    outputs, inputs, group = 24, 128, 32
    codes = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (outputs, inputs // group), generator=generator, dtype=torch.uint8)
    scales = torch.rand(outputs, inputs // group, generator=generator).half()
    tensors = layout.packed(codes, zeros, scales)
    assert {name: (str(t.dtype), tuple(t.shape)) for name, t in tensors.items()} == {
        "qweight": ("torch.int32", (128, 3)), "qzeros": ("torch.int32", (4, 3)), "scales": ("torch.float16", (4, 24)),
    }  # fmt: skip
    found = reference.dequantize(*(tensors[name].numpy() for name in ("qweight", "qzeros", "scales")))
    for row, column in itertools.product((0, 5, 23), (0, 31, 32, 127)):
        by_hand = (int(codes[row, column]) - int(zeros[row, column // group])) * float(scales[row, column // group])
        assert found[row, column] == np.float32(by_hand)


@pytest.mark.engine
def test_gptqmodel_reads_the_layout() -> None:
    packing = pytest.importorskip("gptqmodel.quantization.awq.utils.packing_utils", reason="gptqmodel is not installed")
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (16, 64), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (16, 1), generator=generator, dtype=torch.uint8)
    scales = torch.rand(16, 1, generator=generator).half()
    tensors = layout.packed(codes, zeros, scales)
    theirs = packing.dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, 64)
    ours = reference.dequantize(*(tensors[name].numpy() for name in ("qweight", "qzeros", "scales")))
    assert torch.equal(theirs.T.float(), torch.from_numpy(ours).half().float())


def test_the_largest_group_that_divides_all() -> None:
    assert layout.choose_group((4096, 11008)) == 128  # 11008 = 86 * 128
    assert layout.choose_group((576, 1536)) == 64  # 576 = 9 * 64: SmolLM2
    assert layout.choose_group((96, 64)) == 32
    with pytest.raises(ConfigError, match="divides inputs of 80"):
        layout.choose_group((64, 80))
    with pytest.raises(UsageError, match="groups of 128 do not divide inputs of 576") as caught:
        layout.choose_group((576, 1536), 128)
    assert caught.value.hint == "groups of 64 do"


def test_ranks_that_leave_whole_groups() -> None:
    # vLLM 13640, 21695: inputs / ranks has to be a multiple of the group. 11008 = 86 * 128, 4096 = 32 * 128.
    assert layout.ranks_that_fit((4096, 11008), 128) == (1, 2)
    assert layout.ranks_that_fit((576, 1536), 64) == (1, 3)  # 9 and 24 groups


# Structure


def _float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms that go to float32 on their own go to float64 instead."""
    to = torch.Tensor.to

    def wide(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (
            to(self, torch.float64)
            if args[:1] == (torch.float32,) and self.is_floating_point()
            else to(self, *args, **kwargs)
        )

    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.Tensor, "to", wide)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_folded_scales_change_nothing(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' own layers, with scales between 0.1 and 4 folded in everywhere, in float64."""
    made = awq_models.model(model_type)
    made.save_pretrained(tmp_path)
    ids = torch.randint(3, 512, (3, 40), generator=torch.Generator().manual_seed(0))
    _float64(monkeypatch)
    source, config = open_source(tmp_path)
    skeleton = Skeleton(transformers.AutoConfig.from_pretrained(tmp_path), source, architecture(config))
    states, beside = skeleton.enter(ids, torch.float64)
    folded = 0
    for index in range(2):
        with skeleton.filled(index, torch.float64) as layer:
            plain = run(layer, states, beside[index])
            for site in sites(layer, skeleton.known, skeleton.config):
                if site.fold is None:
                    assert site.why_not
                    continue
                scales = 0.1 + 4 * torch.rand(site.slots[0].of(layer).shape[1], dtype=torch.float64)
                if site.repeats is not None:
                    count, times, width = site.repeats
                    scales = scales.view(count, times, width)[:, :1].expand(-1, times, -1).reshape(-1)
                site.scale(layer, scales)
                folded += 1
            far = (run(layer, states, beside[index]) - plain).abs().amax() / plain.abs().amax()
            assert far < 1e-12
            states = plain
    assert folded >= 4  # of two layers: at least their attention's and their MLP's outputs, or inputs


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_layer_by_layer_is_the_model(model_type: str, tmp_path: Path) -> None:
    made = awq_models.model(model_type)
    made.save_pretrained(tmp_path)
    ids = torch.randint(3, 512, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = made(ids).logits
    source, config = open_source(tmp_path)
    skeleton = Skeleton(transformers.AutoConfig.from_pretrained(tmp_path), source, architecture(config))
    states, beside = skeleton.enter(ids, torch.float32)
    for index in range(2):
        with skeleton.filled(index, torch.float32) as layer:
            states = run(layer, states, beside[index])
        assert all(parameter.is_meta for parameter in layer.parameters())
    with torch.no_grad():
        logits = made.lm_head(made.model.norm(states))
    scale = getattr(made.config, "logit_scale", None) or 1 / getattr(made.config, "logits_scaling", 1)
    cap = getattr(made.config, "final_logit_softcapping", None)
    logits = logits * scale
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    assert torch.allclose(logits, whole, atol=1e-4)


def test_experts_are_given_what_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of each expert's inputs, against the arguments of the products that transformers itself computes."""
    awq_models.model("qwen2_moe").save_pretrained(tmp_path)
    source, config = open_source(tmp_path)
    skeleton = Skeleton(transformers.AutoConfig.from_pretrained(tmp_path), source, architecture(config))
    states, beside = skeleton.enter(torch.randint(3, 512, (2, 40)), torch.float32)
    with skeleton.filled(0, torch.float32) as layer:
        found = sites(layer, skeleton.known, skeleton.config)
        sums = collect(layer, found, states, beside[0], 2)
        seen: list[Any] = []
        linear = torch.nn.functional.linear

        def spy(x: Any, weight: Any, bias: Any = None) -> Any:
            seen.append((x, weight))
            return linear(x, weight, bias)

        monkeypatch.setattr(torch.nn.functional, "linear", spy)
        run(layer, states, beside[0])
        for site, own in zip(found, sums, strict=True):
            weight = site.slots[0].of(layer)
            if site.expert is None:
                continue
            whole = layer.mlp.experts.down_proj[site.expert]
            (x,) = (x for x, w in seen if w.data_ptr() == whole.data_ptr() and w.shape == whole.shape)
            assert weight.data_ptr() == whole.data_ptr()
            assert own.tokens == len(x)
            assert torch.allclose(own.gram, x.T @ x, atol=1e-5)
            assert torch.allclose(own.size.float(), x.abs().sum(0), atol=1e-4)


@pytest.mark.parametrize(("model_type", "reason"), [
    ("gpt2", "AWQ of gpt2: its layers are Conv1D"),
    ("mamba", "AWQ of mamba: its mixers"),
    ("gpt_oss", "AWQ of gpt_oss: its experts lie in one tensor"),
    ("t5", "AWQ of t5: where its layers' scales go is not known"),
])  # fmt: skip
def test_unknown_architectures_are_refused_by_name(model_type: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        architecture({"model_type": model_type})


def test_values_that_are_cut_off_take_no_scales(tmp_path: Path) -> None:
    made = awq_models.model("olmoe", clip_qkv=0.5)
    found = {site.name: site for site in sites(made.model.layers[0], architecture(made.config.to_dict()), made.config)}
    assert found["attention output"].fold is None
    assert "cut off" in found["attention output"].why_not


# Search


def _correlated(tokens: int, width: int, seed: int = 0) -> Any:
    """Inputs as models have them: some channels large, all of them mixed."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(width) + 0.5 * torch.randn(width, width, generator=generator) / math.sqrt(width)
    sizes = torch.exp(1.5 * torch.randn(width, generator=generator))
    return torch.randn(tokens, width, generator=generator) @ mix * sizes


def _sums(x: Any) -> search.Inputs:
    inputs = search.Inputs(x.shape[1])
    for part in x.split(100):
        inputs.add(part)
    return inputs


def test_costs_are_those_of_the_outputs() -> None:
    """By Gram matrix, and by the outputs themselves; damping adds a hundredth of the mean square of each input."""
    x, weight = _correlated(500, 64), torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    error = search.nearest(weight, 32).weight() - weight
    by_outputs = float((x @ error.T).square().sum()) + 0.01 * float(x.square().sum(0).mean()) * float(
        error.square().sum()
    )
    assert search.cost_of_nearest([weight], _sums(x), 32) == pytest.approx(by_outputs, rel=1e-4)


@pytest.mark.parametrize("shift", [0.0, 3.0, -3.0])
def test_nearest_is_the_nearest_of_sixteen(shift: float) -> None:
    """Zero is among the sixteen values, groups of one sign too; no other of them is nearer to a weight."""
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)) + shift
    found = search.nearest(weight, 32)
    for row, group in itertools.product(range(8), range(2)):
        scale, zero = float(found.scales[row, group]), int(found.zeros[row, group])
        values = (torch.arange(16) - zero) * scale
        assert 0 in values
        part = weight[row, 32 * group : 32 * group + 32]
        near = values[(part[:, None] - values).abs().argmin(1)]
        stored = found.weight()[row, 32 * group : 32 * group + 32]
        assert torch.allclose((part - near).abs(), (part - stored).abs(), atol=1e-6)
        # The grid reaches from the least to the greatest, but for the rounding of zero and scale.
        assert (part - stored).abs().amax() < 0.51 * scale + abs(values[-1] - values[0]) * 0.04


@pytest.mark.parametrize("compensate", [False, True])
def test_no_output_is_worse_than_rounded_to_nearest(compensate: bool) -> None:
    x = _correlated(400, 64)
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(rows, 64, generator=generator) ** 3 for rows in (16, 24)]
        options, inputs = search.Options(32, compensate=compensate), _sums(x)
        plain = [search.nearest(weight, 32).weight() - weight for weight in weights]
        codes, _ = search.codes_for(weights, inputs, options)
        for weight, code, error in zip(weights, codes, plain, strict=True):
            new = (x @ (code.weight() - weight).T).square().sum(0)
            old = (x @ error.T).square().sum(0)
            # What damping adds is beside the outputs.
            assert (new <= old + 0.011 * x.square().sum(0).mean() * error.square().sum(1)).all()


def test_scales_help_where_few_inputs_are_large() -> None:
    """The case that AWQ is made for: one input in sixteen is fifty times the others."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 64, generator=generator)
    x[:, ::16] *= 50
    weight = torch.randn(32, 64, generator=generator)
    found = search.scales_for([weight], _sums(x), search.Options(32))
    assert found.scales is not None
    assert found.scales[::16].min() > found.scales[1::16].max()
    stored = search.nearest(weight * found.scales, 32).weight() / found.scales
    plain = search.nearest(weight, 32).weight()
    assert (x @ (stored - weight).T).square().sum() < 0.5 * (x @ (plain - weight).T).square().sum()


def test_repeated_blocks_share_scales() -> None:
    x, weight = _correlated(400, 96), torch.randn(16, 96, generator=torch.Generator().manual_seed(0))
    found = search.scales_for([weight], _sums(x), search.Options(32), (2, 3, 16))
    assert found.scales is not None
    by_block = found.scales.view(2, 3, 16)
    assert torch.equal(by_block[:, :1].expand(-1, 3, -1), by_block)


def test_compensation_by_brute_force() -> None:
    """The textbook's way: after each column, the best change of all that are left is solved for anew."""
    x = _correlated(300, 32).double()
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(2))
    inputs = _sums(x.float())
    options = search.Options(32, clip=False)
    found = search.compensated(weight, inputs.damped, options)
    scales, zeros = search.grid(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True))
    gram, left = inputs.damped.double(), weight.double().clone()
    for i in range(32):
        code = torch.round(left[:, i : i + 1] / scales + zeros).clamp(0, 15)
        assert torch.equal(code[:, 0].to(torch.uint8), found.codes[:, i])
        error = left[:, i : i + 1] - (code - zeros) * scales
        if i < 31:
            # min over d of |(e, d) G (e, d)^T|: d = e G[i, rest] G[rest, rest]^-1, with the opposite sign of the error.
            left[:, i + 1 :] += error * torch.linalg.solve(gram[i + 1 :, i + 1 :], gram[i, i + 1 :])
    assert torch.equal(found.scales, scales.half())


def test_bounds_by_brute_force() -> None:
    """No pair of shrunk bounds of the common grid is better than those that were found."""
    x, weight = _correlated(300, 32), torch.randn(6, 32, generator=torch.Generator().manual_seed(3)) ** 3
    gram = x.T @ x
    scales, zeros = search.bounds(weight[:, None].clone(), gram[None])

    def cost(row: int, scale: float, zero: float) -> float:
        stored = (torch.round(weight[row] / scale + zero).clamp(0, 15) - zero) * scale
        return float((x @ (stored - weight[row])).square().sum())

    for row in range(6):
        own = cost(row, float(scales[row, 0]), float(zeros[row, 0]))
        for shrink in (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5):
            scale, zero = search.grid(weight[row].min()[None] * shrink, weight[row].max()[None] * shrink)
            assert own <= cost(row, float(scale), float(zero)) * (1 + 1e-4)


def test_what_saw_nothing_is_rounded_to_nearest() -> None:
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(2))
    inputs = search.Inputs(32)
    assert search.scales_for([weight], inputs, search.Options(32)).scales is None
    codes, _ = search.codes_for([weight], inputs, search.Options(32))
    assert all(torch.equal(a, b) for a, b in zip(codes[0], search.nearest(weight, 32), strict=True))


def test_a_group_of_zeros() -> None:
    found = search.nearest(torch.zeros(8, 32), 32)
    assert torch.equal(found.weight(), torch.zeros(8, 32))
    assert torch.isfinite(found.scales).all()
    assert (found.scales > 0).all()


def test_a_changed_function_is_noticed(tmp_path: Path) -> None:
    """A layer whose norm adds one where its type's does not: the table is wrong for it, and it is said."""
    from kvctl.weights.layerwise import quantize

    awq_models.model("gemma").save_pretrained(tmp_path)
    source, config = open_source(tmp_path)
    skeleton = Skeleton(transformers.AutoConfig.from_pretrained(tmp_path), source, architecture(config))
    states, beside = skeleton.enter(torch.randint(3, 512, (2, 40)), torch.float32)
    wrong = ARCHITECTURES["llama"]
    with skeleton.filled(0, torch.float32) as layer, pytest.raises(KvctlError, match="folding scales changed"):
        quantize(layer, sites(layer, wrong, skeleton.config), states, beside[0], 2, search.Options(32), torch.float16)
