"""Weights on each rank: against vLLM's own classes (captured), and calculations by hand."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.allocation import Serving
from kvctl.engines import engine
from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.model import build_spec
from kvctl.parameters import parameters
from kvctl.quantization import scheme
from kvctl.rank_weights import SHARDED, Split, left_in_file, per_rank, stages_of
from kvctl.size import SizePlan, size
from kvctl.sources import Found, catalogue
from kvctl.spec import ModelSpec, Provenance
from kvctl.tensors import Tensor, tensor
from kvctl.weight_formats import convert, weight_format

DATA = json.loads((Path(__file__).parent / "data" / "weights.json").read_text("utf-8"))
TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100, "tie_word_embeddings": False,
}  # fmt: skip


def as_stored(config: dict[str, Any]) -> tuple[Tensor, ...]:
    """The tensors of a checkpoint, by its configuration."""
    tensors = parameters(config)
    found = scheme(config)
    return tensors if found is None else convert(tensors, found.format, found.keeps())[0]


@pytest.mark.parametrize("entry", DATA["vllm"], ids=lambda entry: entry["name"])
def test_ranks_of_vllm(entry: dict[str, Any]) -> None:
    tensors = as_stored(entry["config"])
    for ranks, spread, expected in entry["cases"]:
        try:
            sizes = per_rank(tensors, entry["config"], Split(ranks, 1, spread))
        except UsageError:
            assert expected is None, (ranks, spread)
            continue
        assert sizes[0] == expected, (ranks, spread)
        assert len(sizes) == ranks


def test_every_type_was_compared() -> None:
    assert {entry["config"]["model_type"] for entry in DATA["vllm"]} == SHARDED


def test_by_hand() -> None:
    # Elements of a layer: q and o 64 × 64 each; k and v 16 × 64 each; gate, up, down 96 × 64 each; norms 64 each.
    # Two ranks: everything halves but the norms. Vocabulary: 100 rows are padded to 128.
    whole = 3 * (2 * 4096 + 2 * 1024 + 3 * 6144 + 2 * 64) + 64 + 2 * 128 * 64
    half = 3 * ((2 * 4096 + 2 * 1024 + 3 * 6144) // 2 + 2 * 64) + 64 + 2 * 64 * 64
    # Four ranks: the two KV heads are repeated, 8 rows of k and of v on each rank.
    fourth = 3 * (2 * 4096 // 4 + 2 * 8 * 64 + 3 * 6144 // 4 + 2 * 64) + 64 + 2 * 32 * 64
    tensors = parameters(TINY)
    assert per_rank(tensors, TINY, Split(1)) == (2 * whole,)
    assert per_rank(tensors, TINY, Split(2)) == (2 * half,) * 2
    assert per_rank(tensors, TINY, Split(4)) == (2 * fourth,) * 4


def test_heads_are_not_cut() -> None:
    with pytest.raises(UsageError, match="8 attention heads over 3 ranks"):
        per_rank(parameters(TINY), TINY, Split(3))
    odd = {**TINY, "intermediate_size": 90}
    with pytest.raises(UsageError, match="into 4 equal parts"):
        per_rank(parameters(odd), odd, Split(4))


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        # vLLM's own comment and tests (tests/distributed/test_pipeline_partition.py): the rest goes to the middle.
        (8, 4, [2, 2, 2, 2]),
        (5, 4, [1, 1, 2, 1]),
        (6, 4, [1, 2, 2, 1]),
        (7, 4, [2, 2, 2, 1]),
        (61, 4, [15, 15, 16, 15]),
    ],
)
def test_pipeline_stages(layers: int, stages: int, sizes: list[int]) -> None:
    assert [len(stage) for stage in stages_of(layers, Split(1, stages))] == sizes


def test_stages_by_hand() -> None:
    # Three layers on two stages: two and one. The first has the embeddings, the last the norm and the head.
    layer = 2 * 4096 + 2 * 1024 + 3 * 6144 + 2 * 64
    vocabulary = 128 * 64
    expected = (2 * (2 * layer + vocabulary), 2 * (layer + vocabulary + 64))
    assert per_rank(parameters(TINY), TINY, Split(1, 2)) == expected
    tied = {**TINY, "tie_word_embeddings": True}
    # The tied head is the embeddings once more, on the last stage.
    assert per_rank(parameters(tied), tied, Split(1, 2)) == expected
    assert sum(per_rank(parameters(tied), tied, Split(1, 1))) == 2 * (3 * layer + vocabulary + 64)


def test_experts_that_do_not_divide() -> None:
    config = {
        **TINY, "model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 1,
    }  # fmt: skip
    sizes = per_rank(parameters(config), config, Split(4, 1, True))
    # Six experts on four ranks: two, two, one, one; 3 × 96 × 64 elements each.
    assert sizes[0] - sizes[3] == 2 * 3 * 96 * 64
    assert sizes[0] == sizes[1]
    assert sizes[2] == sizes[3]


def test_stages_by_name_and_experts_over_data_parallel_ranks() -> None:
    assert [len(r) for r in stages_of(5, Split(1, 2, stages=(1, 4)))] == [1, 4]
    with pytest.raises(UsageError, match="does not divide 5 layers over 2 stages"):
        stages_of(5, Split(1, 2, stages=(1, 5)))
    config = {**TINY, "model_type": "mixtral", "num_local_experts": 8, "num_hidden_layers": 1}
    whole = per_rank(parameters(config), config, Split(1))[0]
    # Two of eight experts on each of four data-parallel ranks: six are gone, 3 × 96 × 64 elements each.
    assert per_rank(parameters(config), config, Split(1, 1, True, 4)) == (whole - 6 * 2 * 3 * 96 * 64,)
    with pytest.raises(ConfigError, match="data- and tensor-parallel"):
        per_rank(parameters(config), config, Split(2, 1, True, 2))


def test_experts_in_one_tensor_are_cut_alike() -> None:
    # Some checkpoints have all experts of a layer in one tensor, gate and up together, named like a module.
    config = {**TINY, "model_type": "mixtral", "num_local_experts": 4, "num_hidden_layers": 1}
    one_by_one = parameters(config)
    fused = (
        *(t for t in one_by_one if "experts" not in t.name),
        tensor("model.layers.N.mlp.experts.gate_up_proj", (4, 192, 64), "BF16", (0,)),
        tensor("model.layers.N.mlp.experts.down_proj", (4, 64, 96), "BF16", (0,)),
    )
    for split in (Split(2), Split(4), Split(4, 1, True)):
        assert per_rank(fused, config, split) == per_rank(one_by_one, config, split)


def test_the_merger_of_qwen2_5_vl_where_its_two_layers_are_alike() -> None:
    # Vision: one block of width 8, patches of 2 × 1 × 2 × 2, a merger from 32 to 32, as in the 32B model's proportions.
    vision = {"hidden_size": 8, "out_hidden_size": 32, "intermediate_size": 16, "depth": 1, "patch_size": 2,
              "temporal_patch_size": 2, "in_channels": 3, "spatial_merge_size": 2}  # fmt: skip
    text = {key: value for key, value in TINY.items() if key not in ("model_type", "tie_word_embeddings")}
    config = {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": vision, "tie_word_embeddings": False}
    whole, halves = per_rank(parameters(config), config, Split(1))[0], per_rank(parameters(config), config, Split(2))
    # Cut in two: the text model's linear layers, biases (64 + 2 × 16) and vocabulary; the block's five weights and the
    # biases of qkv, gate and up; the merger's two weights and its first bias.
    block = 3 * 64 + 64 + 3 * 128 + 24 + 2 * 16
    merger = 2 * 32 * 32 + 32
    text_part = 3 * (2 * 4096 + 2 * 1024 + 3 * 6144 + 96) + 2 * 128 * 64
    assert halves == (whole - (text_part + block + merger),) * 2


def test_layers_that_draft_are_left_in_the_file() -> None:
    extra = tensor("model.layers.N.mlp.up_proj.weight", (96, 64), "BF16", (3,))
    tensors = (*parameters(TINY), extra)
    assert left_in_file(tensors, TINY) == 2 * 96 * 64
    assert per_rank(tensors, TINY, Split(2)) == per_rank(parameters(TINY), TINY, Split(2))


def test_unknown_is_refused() -> None:
    with pytest.raises(ConfigError, match="how vLLM shards gpt2"):
        per_rank((), {"model_type": "gpt2"}, Split(2))
    odd = tensor("model.layers.N.mlp.oddity.weight", (96, 64), "BF16", (0, 1, 2))
    with pytest.raises(ConfigError, match="oddity"):
        per_rank((odd,), TINY, Split(2))
    packed, _ = convert(parameters(TINY), weight_format("nf4"))
    with pytest.raises(ConfigError, match="bitsandbytes"):
        per_rank(packed, TINY, Split(2))
    with pytest.raises(UsageError, match="4 is more than the 3 layers"):
        per_rank(parameters(TINY), TINY, Split(1, 4))


# -- in the report ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (96,), (0, 64), (8, 0, 0, 1)])
@pytest.mark.parametrize("name", ["mlp.experts.N.w1.weight", "self_attn.q_proj.weight", "self_attn.qkv_proj.weight"])
def test_odd_shapes_are_refused_or_cut(name: str, shape: tuple[int, ...]) -> None:
    odd = (tensor(f"model.layers.N.{name}", shape, "BF16", (0,)),)
    for split in (Split(2), Split(1, 1, True, 2)):
        with contextlib.suppress(KvctlError):
            assert min(per_rank(odd, TINY, split)) >= 0


def sized(name: str, **serving: Any) -> Any:
    return size(build_spec(catalogue.find(name)), 8192, SizePlan(engine("vllm"), serving=Serving(**serving)))


def test_report_by_rank() -> None:
    weights = sized("Qwen/Qwen3-32B", tensor_parallel=8).to_dict()["weights"]
    # 65,524,246,528 bytes in all: the norms (257 of 5,120 and 128 of 128 elements) are whole on every rank.
    norms = 2 * ((2 * 64 + 1) * 5120 + 2 * 64 * 128)
    assert weights["bytes"] == 65_524_246_528
    assert weights["per_rank"] == [(65_524_246_528 - norms) // 8 + norms] * 8
    assert weights["rules"] == "vllm 0.32"


def test_report_with_experts_over_data_parallel_ranks() -> None:
    # Qwen3-30B-A3B: 128 experts of 3 × 768 × 2,048 in 48 layers; 16 of them on each of eight ranks.
    result = sized("Qwen/Qwen3-30B-A3B", data_parallel=8, expert_parallel=True)
    weights = result.to_dict()["weights"]
    assert weights["per_rank"] == [weights["bytes"] - 2 * 48 * 112 * 3 * 768 * 2048]


def test_report_of_a_quantised_model() -> None:
    # gpt-oss-120b: 65,248,815,744 bytes of tensors; on four ranks vLLM's 17,368,614,144 (captured above).
    result = sized("openai/gpt-oss-120b", tensor_parallel=4)
    weights = result.to_dict()["weights"]
    assert weights["bytes"] == 65_248_815_744
    assert weights["scheme"] == "mxfp4, 4 bits in groups of 32"
    assert weights["per_rank"] == [17_368_614_144] * 4
    assert "estimated" in weights["source"]
    assert any("MXFP4" in warning for warning in result.warnings)


def test_latent_attention_keeps_a_matrix_twice() -> None:
    # DeepSeek-V3: 61 layers × 128 heads × (128 + 128) × 512 elements, 2 bytes each, over 8 ranks.
    warnings = sized("deepseek-ai/DeepSeek-V3", tensor_parallel=8).warnings
    assert any(f"{61 * 128 * 256 * 512 * 2 // 8:,} bytes a rank" in w for w in warnings)


def test_what_cannot_be_told_is_a_warning() -> None:
    result = sized("meta-llama/Llama-4-Scout-17B-16E-Instruct", tensor_parallel=4)
    assert "per_rank" not in (result.to_dict()["weights"] or {})
    assert any("weights on each rank unknown" in warning for warning in result.warnings)


def test_partial_rows_do_not_pass_for_unquantised() -> None:
    # The source of this row leaves out that the checkpoint is in FP8.
    found = catalogue.find("deepseek-ai/DeepSeek-V3-0324")
    assert not found.whole
    result = sized("deepseek-ai/DeepSeek-V3-0324", tensor_parallel=8)
    assert "per_rank" not in result.to_dict()["weights"]
    assert any("not in the source of this configuration" in warning for warning in result.warnings)


def test_one_rank_and_other_engines_have_none() -> None:
    assert "per_rank" not in sized("Qwen/Qwen3-32B").to_dict()["weights"]


def a_spec(config: dict[str, Any], *, whole: bool = True, source: str = "local") -> ModelSpec:
    return build_spec(Found("tiny", config, Provenance(source, "tiny"), whole=whole))


def what_if(spec: ModelSpec, name: str, **serving: Any) -> Any:
    plan = SizePlan(engine("vllm"), serving=Serving(**serving), weights_dtype=name)
    return size(spec, 64, plan).to_dict()["weights"]


def test_what_if() -> None:
    spec = a_spec({**TINY, "dtype": "bfloat16"})
    # Linear layers: 3 × (2 × 64 × 64 + 2 × 16 × 64 + 3 × 96 × 64) elements of a byte, and 7 × 3 scales of 4 bytes.
    linear = 3 * (2 * 4096 + 2 * 1024 + 3 * 6144)
    rest = 2 * (3 * 2 * 64 + 64 + 2 * 100 * 64)
    assert what_if(spec, "bf16")["bytes"] == 2 * linear + rest
    assert what_if(spec, "fp32")["bytes"] == 2 * (2 * linear + rest)
    assert what_if(spec, "fp8")["bytes"] == linear + 4 * 21 + rest
    answer = what_if(spec, "fp8", tensor_parallel=2)
    # Two ranks: half of the weights, all of the scales; 64 of 128 padded rows of the vocabulary; whole norms.
    assert answer["per_rank"] == [linear // 2 + 4 * 21 + 2 * (2 * 64 * 64 + 7 * 64)] * 2
    assert answer["dtype"] == "fp8"
    assert answer["parameters"] == linear + rest // 2


def test_what_if_needs_the_parameters() -> None:
    with pytest.raises(ConfigError, match="not known"):
        what_if(a_spec({"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 8}), "awq")
    with pytest.raises(UsageError, match="unknown format 'q3'"):
        what_if(a_spec(TINY), "q3")
    # A part of a configuration: without a published count to check against, nothing follows from it.
    with pytest.raises(ConfigError, match="no parameter count is known"):
        what_if(a_spec(TINY, whole=False, source="catalogue"), "awq")
    missing = {key: value for key, value in TINY.items() if key != "intermediate_size"}
    spec = a_spec(missing, whole=False, source="catalogue")
    with pytest.raises(KvctlError, match="intermediate_size is not in the source"):
        what_if(spec, "awq")


def test_nothing_of_it_is_loaded_unless_asked_for() -> None:
    code = (
        "import sys; from kvctl.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([name for name in sys.modules if name.startswith('kvctl.') and name.partition('.')[2].partition('.')[0]"
        " in ('weigh', 'weights', 'weight_formats', 'quantization', 'parameters', 'tensors')], file=sys.stderr)"
    )
    arguments = ["size", "Qwen3-32B", "--engine", "vllm", "--ctx", "8k", "--json"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr.strip().splitlines()[-1] == "[]"


# -- hostile configurations ------------------------------------------------------------------------

STRANGE = st.sampled_from(
    [None, True, False, -1, 0, 1, 7, 2**40, 10**30, 0.5, 1e308, "", "x", [], [1], ["x"], {}, {"a": 1}]
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(DATA["vllm"]), st.data())
def test_strange_values_end_in_one_line(entry: dict[str, Any], data: st.DataObject) -> None:
    config = json.loads(json.dumps(entry["config"]))
    places = [config, *(value for value in config.values() if isinstance(value, dict))]
    place = data.draw(st.sampled_from(places))
    for key in data.draw(st.lists(st.sampled_from(sorted(place)), min_size=1, max_size=3)):
        place[key] = data.draw(STRANGE)
    told: KvctlError | None = None
    try:
        sizes = per_rank(as_stored(config), config, Split(2, 2))
    except KvctlError as error:
        told = error
    assert "\n" not in told.message if told else all(size > 0 for size in sizes)


def test_too_many_ranks() -> None:
    with pytest.raises(UsageError, match="1,048,576 ranks"):
        per_rank(parameters(TINY), TINY, Split(2**20))


@pytest.mark.parametrize(("version", "said"), [
    # vLLM's pull request 43529 took bitsandbytes out in 0.28; vllm-bnb-plugin 0.0.3 refuses packed weights on several ranks.
    ("", "vLLM 0.33 loads bitsandbytes weights through vllm-bnb-plugin alone, on one rank"),
    ("@0.28", "vLLM 0.28 loads bitsandbytes weights through vllm-bnb-plugin alone, on one rank"),
    ("@0.27", None),
])  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_vllm_takes_of_bitsandbytes(
    kvctl: Callable[..., Outcome], version: str, said: str | None, ranks: int
) -> None:
    facts = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    model = {
        "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256,
        "num_key_value_heads": 2, "vocab_size": 512, "torch_dtype": "bfloat16", "quantization_config": facts,
    }  # fmt: skip
    options = ["--engine", f"vllm{version}", "--gpu", "h100", "--tensor-parallel-size", str(ranks), "--json"]
    found = kvctl("size", "-", *options, stdin=json.dumps(model)).json["results"][0]
    loads = [line for line in found["warnings"] if "loads" in line]
    assert loads == ([] if said is None else [said + (", not on 2" if ranks == 2 else "")])
    assert any("how engines hold bitsandbytes weights is not known" in line for line in found["warnings"])
    assert not any("0.32" in line for line in found["warnings"])
    asked = kvctl("size", "llama-3.1-8b", "--weights-dtype", "nf4", "--engine", f"vllm{version}", "--json").json[
        "results"
    ][0]
    assert [line for line in asked["warnings"] if "loads" in line] == ([] if said is None else [said])
