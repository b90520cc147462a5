"""What if a model's attention were another: against hand calculations, and against configurations that say the same."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any

import pytest
from conftest import Outcome

from kvctl.engines import engine
from kvctl.errors import ConfigError, UsageError
from kvctl.model import build_spec
from kvctl.size import SizePlan, size
from kvctl.sources import Found, resolve
from kvctl.spec import Provenance
from kvctl.structure import parse, parse_list, restructured

Run = Callable[..., Outcome]


def asked(kvctl: Run, *argv: str) -> dict[str | None, Any]:
    """Results by structure; None is the model's own."""
    return {one["what_if"]: one for one in kvctl("size", *argv, "--json").json["results"]}


def kv(kvctl: Run, *argv: str) -> dict[str | None, int]:
    return {name: one["kv_bytes"] for name, one in asked(kvctl, *argv).items()}


# -- by hand ----------------------------------------------------------------------------------------


def test_a_multi_head_model(kvctl: Run) -> None:
    # Llama 2 7B: 32 layers, 32 heads of 128, 2 bytes; a latent of 512 + 64 is as much as 576 / (2 · 128) = 2.25 heads of
    # keys and values, the figure that DeepSeek-V2's paper (arXiv 2405.04434, table 1) gives for MLA.
    found = kv(kvctl, "Llama-2-7b-hf", "--ctx", "4k", "--what-if", "mha,mqa,gqa:8", "--what-if", "mla:512+64")
    head = 32 * 2 * 128 * 2 * 4096
    assert found == {
        None: 32 * head, "mha": 32 * head, "mqa": head, "gqa:8": 8 * head, "mla:512+64": 32 * 576 * 2 * 4096,
    }  # fmt: skip
    assert found["mla:512+64"] == found["mqa"] * 2.25


def test_a_latent_beside_the_heads_it_stands_for(kvctl: Run) -> None:
    # DeepSeek-V3: 61 layers, a latent of 512 + 64; 128 heads with keys of 128 + 64 and values of 128.
    found = asked(kvctl, "DeepSeek-V3", "--ctx", "32k", "--what-if", "mha,gqa:8,mla:256+32")
    assert {name: one["kv_bytes"] for name, one in found.items()} == {
        None: 61 * 576 * 2 * 32768, "mha": 61 * 128 * (192 + 128) * 2 * 32768, "gqa:8": 61 * 8 * (192 + 128) * 2 * 32768,
        "mla:256+32": 61 * 288 * 2 * 32768,
    }  # fmt: skip
    assert (found[None]["kv_bytes_per_token"], found["mha"]["kv_bytes_per_token"]) == (70_272, 4_997_120)
    notes = " ".join(found["mha"]["model"]["notes"])
    assert "a model that does not exist" in notes
    assert "128 KV heads with keys of 192 and values of 128" in notes
    assert not found[None]["model"]["notes"]


def test_windows_stay_windows(kvctl: Run) -> None:
    # Gemma 3 27B: 62 layers, every sixth in full (10), the others over 1,024 tokens; heads of 128.
    held = 10 * 32768 + 52 * 1024
    found = kv(kvctl, "gemma-3-27b-it", "--ctx", "32k", "--what-if", "mqa,mha,mla:512+64")
    assert found == {
        None: 16 * 2 * 128 * 2 * held, "mqa": 2 * 128 * 2 * held, "mha": 32 * 2 * 128 * 2 * held, "mla:512+64": 576 * 2 * held,
    }  # fmt: skip


def test_chunks_stay_chunks(kvctl: Run) -> None:
    # Llama 4 Scout: 48 layers, every fourth in full (12), the others in chunks of 8,192 tokens.
    found = kv(kvctl, "Llama-4-Scout-17B-16E-Instruct", "--ctx", "32k", "--what-if", "mla:512+64,mqa")
    held = 12 * 32768 + 36 * 8192
    assert (found["mla:512+64"], found["mqa"]) == (576 * 2 * held, 2 * 128 * 2 * held)


def test_states_and_cross_attention_are_left_alone(kvctl: Run) -> None:
    # Jamba: 4 of 32 layers are attention, 8 KV heads of 128; the other 28 are Mamba.
    found = asked(kvctl, "Jamba-v0.1", "--ctx", "4k", "--what-if", "mqa")
    head = 4 * 2 * 128 * 2 * 4096
    assert found[None]["kv_bytes"] - found["mqa"]["kv_bytes"] == 7 * head
    assert found[None]["kv_bytes_fixed"] == found["mqa"]["kv_bytes_fixed"] > 0
    assert "mqa leaves as it is: conv state, recurrent state" in found["mqa"]["model"]["notes"]
    # Whisper large v3: 32 decoder layers of 20 heads of 64; cross attention holds 1,500 positions.
    found = kv(kvctl, "whisper-large-v3", "--ctx", "448", "--what-if", "mqa"), 2 * 64 * 2
    assert found[0]["mqa"] == 32 * found[1] * 448 + 32 * 20 * found[1] * 1500


def test_a_bare_shape(kvctl: Run) -> None:
    shape = ("--layers", "4", "--kv-heads", "4", "--head-dim", "64", "--ctx", "1k", "--what-if")
    assert kv(kvctl, *shape, "mqa")["mqa"] == 4 * 2 * 64 * 2 * 1024


# -- against configurations -------------------------------------------------------------------------

ENGINES = ("ideal", "transformers", "vllm", "sglang", "llama.cpp", "tensorrt-llm", "ollama")


@pytest.mark.parametrize("rules", ENGINES)
@pytest.mark.parametrize(
    ("model", "heads"),
    [
        ("Llama-2-7b-hf", 8),
        ("Qwen3-32B", 2),
        ("gpt-oss-20b", 4),
        ("gemma-3-27b-it", 8),
        ("Qwen3-Next-80B-A3B-Instruct", 1),
    ],
)
def test_as_if_the_configuration_said_so(model: str, heads: int, rules: str) -> None:
    """The engine's plan, of a model whose file names so many KV heads."""
    found = resolve(model, source="catalogue")
    plan = SizePlan(engine(rules), sequences=2)
    try:
        expected = size(build_spec(found, {"num_key_value_heads": heads}), 3000, plan)
    except (ConfigError, UsageError) as error:
        with pytest.raises(type(error)):
            size(build_spec(found), 3000, plan.replace(what_if=parse(f"gqa:{heads}")))
        return
    ours = size(build_spec(found), 3000, plan.replace(what_if=parse(f"gqa:{heads}")))
    assert (ours.kv_bytes, ours.layers, ours.kv_bytes_per_token) == (
        expected.kv_bytes, expected.layers, expected.kv_bytes_per_token,
    )  # fmt: skip
    reserved = [None if one.allocation is None else one.allocation.reserved_bytes for one in (ours, expected)]
    assert reserved[0] == reserved[1]


@pytest.mark.parametrize("rules", ["ideal", "vllm", "llama.cpp", "sglang"])
def test_a_latent_as_if_the_configuration_said_so(rules: str) -> None:
    found, plan = resolve("DeepSeek-V3", source="catalogue"), SizePlan(engine(rules))
    expected = size(build_spec(found, {"kv_lora_rank": 256, "qk_rope_head_dim": 32}), 4096, plan)
    ours = size(build_spec(found), 4096, plan.replace(what_if=parse("mla:256+32")))
    assert ours.kv_bytes == expected.kv_bytes
    reserved = [None if one.allocation is None else one.allocation.reserved_bytes for one in (ours, expected)]
    assert reserved[0] == reserved[1]


# -- with other options -------------------------------------------------------------------------------


def test_engines_and_their_formats(kvctl: Run) -> None:
    head = 32 * 2 * 128 * 4096  # elements
    found = asked(kvctl, "Llama-2-7b-hf", "--ctx", "4k", "--what-if", "gqa:8", "--engine", "vllm", "--kv-dtype", "fp8")
    assert found["gqa:8"]["allocation"]["reserved_bytes"] == 8 * head
    assert found[None]["allocation"]["reserved_bytes"] == 32 * head
    found = asked(
        kvctl, "Llama-2-7b-hf", "--ctx", "4k", "--what-if", "gqa:8", "--engine", "llama.cpp", "--kv-dtype", "q8_0"
    )
    assert found["gqa:8"]["allocation"]["reserved_bytes"] == 8 * head * 34 // 32
    # vLLM with VLLM_MLA_DISABLE=1: DeepseekV2Attention pads values of 128 to the 192 of keys, and its Attention has heads of 192.
    found = asked(kvctl, "DeepSeek-V3", "--ctx", "4k", "--what-if", "mha", "--engine", "vllm")
    assert found["mha"]["allocation"]["reserved_bytes"] == 61 * 128 * (192 + 192) * 2 * 4096
    assert any("pads values to the width of keys" in note for note in found["mha"]["model"]["notes"])


def test_engines_side_by_side(kvctl: Run) -> None:
    made = kvctl("size", "Llama-2-7b-hf", "--ctx", "4k", "--what-if", "mla:512+64", "--engine", "all")
    assert "Llama-2-7b-hf, if mla:512+64: 4,096 tokens" in made.out
    assert "how llama.cpp stores latent attention" in made.err  # no such architecture there


def test_techniques_of_another_structure(kvctl: Run) -> None:
    made = kvctl(
        "size", "Llama-2-7b-hf", "--ctx", "4k", "--what-if", "gqa:8", "--technique", "int8,int4", "--json"
    ).json
    each = 32 * 2 * 128 * 2 * 4096
    # 8-bit codes and 4 bytes for every 64 of 16-bit elements; 4-bit ones.
    assert [(one["what_if"], one["technique"], one["kv_bytes"]) for one in made["results"]] == [
        (structure, technique, heads * each * part // 128)
        for structure, heads in ((None, 32), ("gqa:8", 8))
        for technique, part in (("plain", 128), ("int8", 68), ("int4", 36))
    ]
    refused = kvctl("size", "Llama-2-7b-hf", "--ctx", "4k", "--what-if", "mla:512+64", "--technique", "int8")
    assert "if mla:512+64, int8: keeps latents: int8 works on keys and values of heads" not in refused.err
    (line,) = (line for line in refused.out.splitlines() if "if mla:512+64, int8" in line)
    assert "int8 works on keys and values of heads" in line


def test_on_a_gpu_more_requests_fit(kvctl: Run) -> None:
    found = asked(kvctl, "Llama-2-7b-hf", "--ctx", "4k", "--what-if", "gqa:8", "--gpu", "L40S")
    fits = [found[name]["fit"] for name in (None, "gqa:8")]
    assert fits[0]["weights_bytes"] == fits[1]["weights_bytes"]
    # 32 layers of 32 heads of 128, and of 8: 2 GiB a request of 4,096 tokens and half a GiB.
    for fit, each in zip(fits, (2**31, 2**29), strict=True):
        assert fit["kv_bytes"] == each
        assert fit["max_concurrency"] == fit["kv_budget_bytes"] // each


def test_how_it_is_written_down(kvctl: Run) -> None:
    made = kvctl("size", "Llama-2-7b-hf", "--ctx", "4k", "--what-if", "gqa:8")
    assert "Llama-2-7b-hf as it is" in made.out
    assert "4.00x smaller" in next(line for line in made.out.splitlines() if "if gqa:8" in line)
    assert "what if gqa:8: a model that does not exist" in made.err
    made = kvctl("size", "DeepSeek-V3", "--ctx", "4k", "--what-if", "mha", "--format", "md")
    # 128 · 320 elements for 576.
    assert made.out.splitlines()[-1].startswith("| deepseek-ai/DeepSeek-V3 if mha |")
    assert made.out.splitlines()[-1].endswith("| 71.11x larger |")
    rows = list(
        csv.DictReader(io.StringIO(kvctl("size", "Qwen3-8B", "--ctx", "4k,8k", "--what-if", "mqa", "-f", "csv").out))
    )
    assert [(row["what_if"], row["context"]) for row in rows] == [
        ("", "4096"),
        ("", "8192"),
        ("mqa", "4096"),
        ("mqa", "8192"),
    ]
    assert kvctl("size", "Qwen3-8B", "--ctx", "4k").out.count("as it is") == 0
    # What fits of each is not the same workload, and has no ratio.
    made = kvctl("size", "Llama-2-7b-hf", "--what-if", "gqa:8", "--gpu", "L4", "--solve", "ctx", "--engine", "vllm")
    assert "beside its own" not in made.out
    made = kvctl("size", "Llama-2-7b-hf", "--ctx", "4k", "--what-if", "gqa:8", "--explain", "--per-layer")
    assert "Llama-2-7b-hf if gqa:8, step by step" in made.out
    assert "Llama-2-7b-hf if gqa:8, layer by layer" in made.out


@pytest.mark.parametrize("rules", ["llama.cpp", "sglang"])
def test_an_engine_that_cannot_hold_one_of_them(kvctl: Run, rules: str) -> None:
    """Why, in the place of its row; the others stay."""
    argv = ("size", "Qwen3-8B", "--ctx", "8k", "--what-if", "mla:512+64,mqa", "--engine", rules)
    made = kvctl(*argv)
    assert made.code == 0
    names = [line for line in made.out.splitlines() if line.startswith("Qwen3-8B")]
    assert [name.split("  ")[0] for name in names] == [
        "Qwen3-8B as it is", next(name for name in names if "mla" in name), "Qwen3-8B if mqa",
    ]  # fmt: skip
    assert names[1].startswith("Qwen3-8B if mla:512+64: kvctl does not know how")
    assert "8.00x smaller" in names[2]
    document = kvctl(*argv, "--json").json
    assert [one["what_if"] for one in document["results"]] == [None, "mqa"]
    (why,) = document["refused"]
    assert why.startswith("Qwen/Qwen3-8B if mla:512+64: kvctl does not know how")
    lines = kvctl(*argv, "-f", "md").out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| Qwen/Qwen3-8B", "| Qwen/Qwen3-8B if mla:512+64", "| Qwen/Qwen3-8B if mqa",
    ]  # fmt: skip
    assert len({line.count(" | ") for line in lines[2:]}) == 1
    assert "no answer for: Qwen/Qwen3-8B if mla:512+64" in kvctl(*argv, "-f", "csv").err
    # Alone, beside the model's own.
    made = kvctl("size", "DeepSeek-V3.2", "--ctx", "8k", "--what-if", "mha", "--engine", "vllm")
    assert "DeepSeek-V3.2 if mha: vLLM picks tokens by an indexer from latents alone" in made.out
    made = kvctl("size", "Qwen3-8B", "--ctx", "8k", "--what-if", "mla:512+64", "--engine", rules)
    assert made.code == 0
    assert "Qwen3-8B as it is" in made.out


@pytest.mark.parametrize("columns", [80, 140])
def test_a_comparison_on_a_gpu_fits_a_terminal(kvctl: Run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    made = kvctl(
        "size",
        "DeepSeek-V3",
        "--ctx",
        "32k",
        "--what-if",
        "mha,mla:256+32",
        "--gpu",
        "8xH200",
        "--engine",
        "vllm",
        "-q",
    )
    assert max(map(len, made.out.splitlines())) <= columns
    assert made.out.count("DeepSeek-V3 if mha") == (2 if columns == 80 else 1)
    for name in ("KV cache", "weights", "fits", "headroom", "longest", "at once", "beside its own"):
        assert made.out.count(name) == 1


def test_a_curve_for_each(kvctl: Run, tmp_path: Any) -> None:
    picture = tmp_path / "curves.svg"
    assert kvctl("size", "Qwen3-8B", "--ctx", "32k", "--what-if", "mha,mqa", "--plot", str(picture)).code == 0
    drawn = picture.read_text()
    assert all(name in drawn for name in ("as it is", "mha", "mqa"))


# -- what cannot be ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["gpa", "gqa", "gqa:", "gqa:0", "gqa:-1", "gqa:8+1", "gqa:x", "mla", "mla:512", "mla:0+64", "mla:512+", "mha:8",
                                  "gqa:" + "9" * 30, "mla:9999999+64", "gqa:٣", "mla:512+64+1"])  # fmt: skip
def test_what_is_no_structure(text: str) -> None:
    with pytest.raises(UsageError, match="is no structure"):
        parse(text)


def test_lists() -> None:
    assert [one.name for one in parse_list(["MHA, mqa", "gqa:4,mha"])] == ["mha", "mqa", "gqa:4"]
    with pytest.raises(UsageError, match="none is named"):
        parse_list([","])


@pytest.mark.parametrize(("argv", "part", "code"), [
    (["Llama-2-7b-hf", "--what-if", "gqa:7"], "has 32 query heads, which 7 KV heads cannot share evenly", 2),
    (["Llama-2-7b-hf", "--what-if", "gqa:4294967296"], "has 32 query heads, which 4,294,967,296 KV heads cannot share evenly\nhint: one of 1, 2, 4, 8, 16, 32", 2),
    (["mamba-2.8b-hf", "--what-if", "mqa"], "mqa is about keys and values of heads, and its cache has none", 1),
    (["DeepSeek-V4-Pro", "--what-if", "mha"], "mha is about keys and values of heads", 1),
    (["--layers", "4", "--kv-heads", "4", "--head-dim", "64", "--what-if", "gqa:2"], "how many query heads it has is not known", 1),
    (["Llama-2-7b-hf", "--what-if", "gqa:8", "--workload", "chat"], "a replay is about one cache", 2),
], ids=str)  # fmt: skip
def test_what_is_refused(kvctl: Run, argv: list[str], part: str, code: int) -> None:
    outcome = kvctl("size", "--ctx", "4k", *argv)
    assert part in outcome.err
    assert outcome.code == code


def spec_of(**fields: Any) -> Any:
    config = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
              "num_key_value_heads": 4, "vocab_size": 128} | fields  # fmt: skip
    return build_spec(Found("model", config, Provenance("local", "model")))


def test_what_a_configuration_leaves_open() -> None:
    with pytest.raises(ConfigError, match="its layers differ in query heads"):
        restructured(spec_of(num_attention_heads_per_layer=[8, 16]), parse("mha"))
    assert restructured(spec_of(num_attention_heads_per_layer=[8, 8]), parse("mha")).layers[0].states[0].kv_heads == 8  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="4 KV heads, which do not divide the 6 query heads"):
        restructured(spec_of().replace(attention_heads=6, config={}), parse("mha"))
    latent = {
        "model_type": "deepseek_v3",
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": None,
        "v_head_dim": 32,
    }
    with pytest.raises(ConfigError, match="takes qk_nope_head_dim, which its configuration lacks"):
        restructured(spec_of(**latent), parse("mha"))


def test_an_engine_that_repeats_heads_goes_on_doing_so() -> None:
    # Falcon's newer architecture: transformers caches the KV heads once for every query head.
    spec = spec_of(model_type="falcon", new_decoder_architecture=True, num_kv_heads=4, num_key_value_heads=None)
    changed = restructured(spec, parse("gqa:2"), "transformers")
    needed, stored = (
        size(changed, 100, SizePlan(engine(name), dtype=None)).kv_bytes for name in ("ideal", "transformers")
    )
    assert (needed, stored) == (2 * 2 * 2 * 64 * 2 * 100, 2 * 8 * 2 * 64 * 2 * 100)
